"""From a layout to the program whose structure it shares with many others."""

from perfmodel.prediction._zero import shards_gradients
from perfmodel.program import ProgramSpec, Sends
from perfmodel.spec import Job, Layout

MAX_SEGMENTS = 16
"""Layer groups of a stage whose weights are gathered and gradients reduced together. Frameworks cut finer (torch's
`fully_shard` by wrapped block, its DistributedDataParallel by 25 MB, Megatron-Core by 40 M parameters): what this many
groups leave exposed, the first gather and the last reduction, is small already."""


def segments_of(layers: int, stages: int) -> int:
    """Layer groups of every stage: as many as its layers, and at most `MAX_SEGMENTS`."""
    return min(max(1, layers // stages), MAX_SEGMENTS)


def program_spec(layout: Layout, job: Job, layers: int, tied_embeddings: bool, sends: Sends = "lag") -> ProgramSpec:
    """The program of one step of `layout`; `layers` bounds the segments of a stage.

    Raises:
        LayoutError: if the global batch does not divide into micro-batches.
    """
    training = job.mode == "train"
    plain = ProgramSpec(schedule=layout.effective_schedule, stages=layout.pp, micro_batches=1, chunks=layout.vpp)
    scheduler, replicas = plain.scheduler, plain.replicas
    replicated = layout.replicated or replicas > 1
    gathers = layout.zero == 3 and (replicated or layout.offload_states == "weights")
    # the same whatever overlaps and is sharded, so that overlap only takes waits away and ZeRO 3 only adds to ZeRO 1
    segments = segments_of(layers, plain.n_stages) if replicated or gathers else 1
    grad_reduce = gather = "none"
    if training and replicated:
        # a reduction that waits for another rank's replica would hold up the gathers of layers behind it
        eager = "overlap" if replicas == 1 else "end" if gathers else "eager_opt"
        grad_reduce = eager if layout.overlap_grad_reduce else "end"
        # without ZeRO the gathers take no time: the layouts share one program with those of ZeRO 1
        if layout.zero < 3:
            gather = "step_overlap" if layout.overlap_param_gather else "step"
    if gathers:
        gather = "layer" if layout.overlap_param_gather else "layer_serial"
    micro_batches, steps = job.num_microbatches(layout), 1
    if training and (scheduler.asynchronous or scheduler.staggered):
        # the pipeline is full once the first micro-batch is back, which a backward of all of them delays most
        filling = layout.pp if not scheduler.plain else -(-2 * layout.pp // micro_batches)
        steps = 2 * max(2, filling)
    return ProgramSpec(
        schedule=layout.effective_schedule,
        stages=layout.pp,
        micro_batches=micro_batches,
        chunks=layout.vpp,
        steps=steps,
        offload=layout.offload and training,
        sends=sends,
        grad_reduce=grad_reduce,
        segments=segments,
        param_gather=gather,
        prefetch=layout.prefetch if gather == "layer" else 1,
        reduce_every_micro_batch=training
        and replicated
        and bool(shards_gradients(layout.zero, layout.pp > 1, replicas, job)),
        tied_embedding=training and tied_embeddings and layout.pp > 1,
        optimizer=training,
        forward_only=not training,
        grad_norm_barrier=steps == 1,
    )
