"""From a layout to the program whose structure it shares with many others."""

from perfmodel.prediction._zero import reduces_every_micro_batch
from perfmodel.program import ProgramSpec, Sends
from perfmodel.spec import Job, Layout

MAX_SEGMENTS_OVERLAP = 4
"""Buckets into which a stage's last backward is cut so that its gradient reduction can start."""
MAX_SEGMENTS_GATHER = 16
"""Layer groups that ZeRO-3 gathers one by one."""


def segments_of(layers: int, stages: int, most: int) -> int:
    """Layer groups of every stage: as many as its layers, and at most `most`."""
    return min(max(1, layers // stages), most)


def program_spec(layout: Layout, job: Job, layers: int, tied_embeddings: bool, sends: Sends = "lag") -> ProgramSpec:
    """The program of one step of `layout`; `layers` bounds the segments of a stage.

    Raises:
        LayoutError: if the global batch does not divide into micro-batches.
    """
    training = job.mode == "train"
    plain = ProgramSpec(schedule=layout.effective_schedule, stages=layout.pp, micro_batches=1, chunks=layout.vpp)
    scheduler, replicas = plain.scheduler, plain.replicas
    replicated = layout.replicated or replicas > 1
    segments = 1
    grad_reduce = gather = "none"
    if training and replicated:
        eager = "overlap" if replicas == 1 else "eager_opt"
        grad_reduce = eager if layout.overlap_grad_reduce else "end"
        if layout.overlap_grad_reduce:
            segments = segments_of(layers, plain.n_stages, MAX_SEGMENTS_OVERLAP)
        # without ZeRO the gathers take no time: the layouts share one program with those of ZeRO 1
        if layout.zero < 3:
            gather = "step_overlap" if layout.overlap_param_gather else "step"
    if replicated and layout.zero == 3:
        gather = "layer" if layout.overlap_param_gather else "layer_serial"
        segments = segments_of(layers, plain.n_stages, MAX_SEGMENTS_GATHER)
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
        reduce_every_micro_batch=training and replicated and reduces_every_micro_batch(layout.zero),
        tied_embedding=training and tied_embeddings and layout.pp > 1,
        optimizer=training,
        forward_only=not training,
        grad_norm_barrier=steps == 1,
    )
