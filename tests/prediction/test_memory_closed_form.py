"""Memory of pipeline ranks against a count by hand of what ZeRO, 1F1B and the frameworks' buffers
hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.prediction import StepProblem, step_problem
from perfmodel.prediction.memory import checkpoint_bytes, needed_memory, version_difference
from perfmodel.spec import Framework, Job, Layout
from perfmodel.units import dtype_bytes
from perfmodel.workload import BlockOps, Shard, blocks, parameter_count

PLAIN = Framework(context_bytes=3e8, communicator_bytes=0.0, bucket_bytes=0.0)
STATE_BYTES = {
    "adam": 8,
    "lamb": 8,
    "lion": 4,
    "sgd": 4,
    "adafactor": 0,
    "plain-sgd": 0,
    "adam16bit": 4,
    "muon": 4,
}
KEEPS_MASTER = {"adam", "lamb", "lion", "sgd", "adafactor", "muon"}
MUON_OTHERS_BYTES = 8
"""Of embedding and head, which Adam updates."""


def problem_of(model: str, framework: Framework = PLAIN, **fields: Any) -> StepProblem:
    job = Job(**({"global_batch": 64, "seq_len": 1024} | fields))
    layers = 8 if model != "gpt3-1.3b" else 24
    return step_problem(
        replace(catalog.model(model), layers=layers),
        catalog.cluster("dgx-h100"),
        job,
        None,
        framework,
    )


@dataclass(frozen=True)
class Rank:
    """What a pipeline rank holds under 1F1B, a stage of equally many layers."""

    blocks: Sequence[tuple[BlockOps, int, bool]]
    """A block, how often it occurs, and whether it is a layer."""
    in_flight: int
    """Micro-batches whose activations are alive at once."""
    pipelined: bool

    @classmethod
    def of(cls, problem: StepProblem, layout: Layout, rank: int) -> "Rank":
        embedding, *layers, head = blocks(problem.model, problem.job, Shard.of(layout))
        assert len(layers) == 1
        here = [(layers[0][0], layers[0][1] // layout.pp, True)]
        if rank == 0:
            here.insert(0, (*embedding, False))
        if rank == layout.pp - 1:
            here.append((*head, False))
        micro_batches = problem.job.global_batch // (layout.dp * layout.micro_batch)
        return cls(here, min(layout.pp - rank, micro_batches), layout.pp > 1)

    @property
    def experts(self) -> float:
        return float(sum(n * block.expert_params for block, n, _ in self.blocks))

    @property
    def others(self) -> float:
        """Parameters outside routed experts; a tied head on a stage of its own holds a copy of the
        table."""
        return float(sum(n * self.dense_of(block) for block, n, _ in self.blocks))

    def dense_of(self, block: BlockOps) -> int:
        return block.params - block.expert_params + (block.tied_params if self.pipelined else 0)


def outside_layers(rank: Rank) -> float:
    """Parameters of embedding and head."""
    return float(
        sum(n * rank.dense_of(block) for block, n, is_layer in rank.blocks if not is_layer)
    )


def states(rank: Rank, layout: Layout, sharded: bool) -> float:
    """Parameters whose states a rank keeps, whole or its shard of them."""
    if not sharded:
        return rank.others + rank.experts
    shards, shards_of_experts = (
        layout.dp * layout.cp // layout.replicate,
        layout.edp // layout.replicate,
    )
    return rank.others / shards + rank.experts / shards_of_experts


def check(problem: StepProblem, layout: Layout) -> None:
    for number, found in enumerate(needed_memory(problem, layout)):
        rank = Rank.of(problem, layout, number)
        for category, expected in by_hand(problem, layout, rank).items():
            # To the byte: what there is nothing of takes no bytes at all.
            told = pytest.approx(expected, rel=1e-12, abs=0.25)
            assert getattr(found, category) == told, f"{category} of rank {number} of {layout}"


def by_hand(problem: StepProblem, layout: Layout, rank: Rank) -> dict[str, float]:
    job, framework = problem.job, problem.framework
    weight_bytes = max(dtype_bytes(job.dtype), 2)
    has_master = job.optimizer in KEEPS_MASTER and dtype_bytes(job.dtype) < 4
    state_bytes = STATE_BYTES[job.optimizer] + (4 if has_master else 0)
    several_passes = layout.pp > 1 or job.global_batch > layout.dp * layout.micro_batch
    is_added_up_whole = (layout.pp > 1 and job.gradients.whole_gradients_in_pipelines) or (
        several_passes and job.gradients.whole_gradients_in_accumulation
    )
    shards_gradients = layout.zero >= 2 and not is_added_up_whole
    # Weights without a wider copy have gradients of their own type, but for those that are added up
    # before they are sharded.
    kept_bytes = added_up_bytes = dtype_bytes(job.gradients.grad_dtype)
    if job.optimizer not in KEEPS_MASTER:
        kept_bytes = min(kept_bytes, weight_bytes)
    gradient_bytes = added_up_bytes if layout.zero >= 2 and is_added_up_whole else kept_bytes
    gradients = gradient_bytes * states(rank, layout, shards_gradients)
    gradients += 2 * states(rank, layout, shards_gradients) * job.gradients.half_gradients
    replicated = layout.dp * layout.cp > 1

    optimizer = state_bytes * states(rank, layout, layout.zero >= 1)
    if job.optimizer == "muon":
        shards = layout.dp * layout.cp // layout.replicate if layout.zero >= 1 else 1
        optimizer += (MUON_OTHERS_BYTES - STATE_BYTES["muon"]) * outside_layers(rank) / shards

    # ZeRO 3 makes a block's whole gradient, and reduces it from a copy in the type of reductions or
    # adds it up.
    makes_whole = layout.zero == 3 and replicated
    reduced_bytes = makes_whole * (
        weight_bytes + dtype_bytes(job.gradients.grad_dtype) * shards_gradients
    )
    buffers = framework.memory.context_bytes + while_it_runs(rank, layout, reduced_bytes)
    sizes_of_groups = (
        layout.devices,
        layout.dp * layout.cp,
        layout.tp * layout.pp,
        layout.tp,
        layout.pp,
    )
    buffers += framework.memory.communicator_bytes * sum(size > 1 for size in sizes_of_groups)
    if layout.zero < 3 and replicated:
        buffers += min(framework.memory.bucket_bytes, gradients)
    if framework.memory.ddp_buckets and layout.zero == 0 and replicated:
        buffers += weight_bytes * states(rank, layout, False)
    if layout.zero == 3 and replicated:
        buffers += weight_bytes * gathered(rank, layout)
    return {
        "weights": weight_bytes * states(rank, layout, layout.zero == 3),
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": sum(n * kept(block, layout) * rank.in_flight for block, n, _ in rank.blocks),
        "buffers": buffers,
    }


def kept(block: BlockOps, layout: Layout) -> float:
    """Of a micro-batch for its backward."""
    return getattr(block.activation_bytes, layout.recompute)


def gathered(rank: Rank, layout: Layout) -> float:
    """Parameters that ZeRO 3 has unsharded at once: what is no layer, the layer in use, those
    gathered ahead."""
    ((layer, n),) = [(block, n) for block, n, is_layer in rank.blocks if is_layer]
    return outside_layers(rank) + min(1 + layout.prefetch, n) * (
        rank.dense_of(layer) + layer.expert_params
    )


def while_it_runs(rank: Rank, layout: Layout, reduced_bytes: float) -> float:
    """The largest block at work, with what it recomputes and so many bytes of each parameter's
    gradient; behind the head, of which then nothing is left, layers."""
    transient = []
    for block, _, is_layer in rank.blocks:
        gradients = reduced_bytes * (rank.dense_of(block) + block.expert_params)
        recomputed = block.activation_bytes.none - kept(block, layout)
        transient.append((block.workspace_bytes + recomputed + gradients, is_layer))
    last, _, ends_in_layer = rank.blocks[-1]
    if ends_in_layer:
        return max(size for size, _ in transient)
    return max(transient[-1][0], max(size for size, _ in transient[:-1]) - kept(last, layout))


LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=dp, zero=zero, recompute=recompute, micro_batch=micro_batch)  # pyright: ignore
    for tp, pp, dp, zero in product((1, 2), (1, 2, 4), (1, 4), (0, 1, 2, 3))
    for recompute, micro_batch in (("none", 1), ("full", 2))
]


@pytest.mark.parametrize(
    "whole_gradients", ["", "whole_gradients_in_pipelines", "whole_gradients_in_accumulation"]
)
@pytest.mark.parametrize("model", ["gpt3-1.3b", "llama3-8b"])
def test_every_stage_of_zero_and_of_a_pipeline(model: str, whole_gradients: str) -> None:
    problem = problem_of(model, **({whole_gradients: True} if whole_gradients else {}))
    for layout in LAYOUTS:
        check(problem, layout)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_are_sharded_over_their_own_replicas(zero: int) -> None:
    problem = problem_of("mixtral-8x7b")
    for ep, tp, pp, cp in ((1, 1, 1, 1), (4, 1, 1, 1), (8, 2, 2, 1), (2, 2, 1, 2)):
        check(
            problem, Layout(tp=tp, pp=pp, dp=8, cp=cp, ep=ep, zero=zero, sequence_parallel=tp > 1)
        )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_divides_by_the_shards_and_not_by_the_copies(zero: int) -> None:
    for replicate, model in product((1, 2, 4), ("llama3-8b", "mixtral-8x7b")):
        check(problem_of(model), Layout(tp=2, dp=8, zero=zero, replicate=replicate))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", STATE_BYTES)
def test_optimizers_keep_a_master_copy_of_narrow_weights_alone(optimizer: str, dtype: str) -> None:
    for zero, whole in product((0, 1, 2, 3), (False, True)):
        problem = problem_of(
            "llama3-8b", dtype=dtype, optimizer=optimizer, whole_gradients_in_accumulation=whole
        )
        check(problem, Layout(dp=4, zero=zero))


@pytest.mark.parametrize(("grad_dtype", "half"), [("fp32", False), ("fp32", True), ("bf16", False)])
def test_gradients_take_their_type_and_a_buffer_of_halves(grad_dtype: str, half: bool) -> None:
    check(problem_of("llama3-8b", grad_dtype=grad_dtype, half_gradients=half), Layout(dp=4, zero=2))


@pytest.mark.parametrize("optimizer", ["adam", "adam16bit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_that_are_cast_when_gathered_lie_on_their_shards_once(
    dtype: str, optimizer: str
) -> None:
    """Their master copy is all there is of them; nothing else changes, nor do layouts whose weights
    are whole."""
    for zero, dp, offload in product((0, 1, 2, 3), (1, 4), ("none", "optimizer")):
        if offload == "optimizer" and zero == 0:
            continue
        layout = Layout(dp=dp, zero=zero, offload_states=offload)  # pyright: ignore[reportArgumentType]
        kept_twice, cast = (
            needed_memory(
                problem_of("llama3-8b", framework, dtype=dtype, optimizer=optimizer), layout
            )[0]
            for framework in (PLAIN, PLAIN.replace(casts_when_gathered=True))
        )
        has_master_alone = (
            zero == 3 and offload == "none" and dtype == "bf16" and optimizer == "adam"
        )
        assert cast == (replace(kept_twice, weights=0.0) if has_master_alone else kept_twice)


@pytest.mark.parametrize("bucket_bytes", [1e6, 320e6, 1e13])
def test_a_reduction_holds_a_bucket_or_all_there_is(bucket_bytes: float) -> None:
    framework = PLAIN.replace(bucket_bytes=bucket_bytes)
    for zero, dp in product((0, 1, 2, 3), (1, 4)):
        check(problem_of("llama3-8b", framework), Layout(dp=dp, zero=zero))


def test_ddp_keeps_a_bucket_of_every_gradient() -> None:
    framework = PLAIN.replace(ddp_buckets=True)
    for zero, dp in product((0, 1), (1, 4)):
        check(problem_of("llama3-8b", framework), Layout(dp=dp, zero=zero))


@pytest.mark.parametrize("prefetch", [1, 2, 3, 20])
def test_zero_3_holds_the_layers_that_it_gathers_ahead(prefetch: int) -> None:
    for pp in (1, 4):
        check(problem_of("llama3-8b"), Layout(pp=pp, dp=4, zero=3, prefetch=prefetch))


def test_every_communicator_of_several_ranks_takes_its_memory() -> None:
    """All ranks, data, model (tensor and pipeline together), tensor and pipeline parallel ones."""
    problem = problem_of("llama3-8b", PLAIN.replace(communicator_bytes=1e8))
    for tp, pp, dp, cp in product((1, 2), (1, 2), (1, 2), (1, 2)):
        check(problem, Layout(tp=tp, pp=pp, dp=dp, cp=cp))


def test_what_is_frozen_has_neither_gradients_nor_states() -> None:
    problem = problem_of("llama3-8b", frozen=True)
    for memory in needed_memory(problem, Layout(dp=4, zero=0)):
        assert memory.gradients == memory.optimizer == 0


@pytest.mark.parametrize(
    ("cluster", "dtype", "bits"),
    [
        ("dgx-h100", "fp32", 32),
        ("dgx-h100", "bf16", 16),
        ("dgx-h100", "fp8", 8),
        # Row-wise and column-wise, each 4 bits with a scale of 8 bits for 16 weights.
        ("hgx-b200", "fp4", 2 * (4 + 8 / 16)),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_weights_are_kept_in_the_type_of_their_products(
    cluster: str, dtype: str, bits: float, autocast: bool
) -> None:
    """Without a wider copy; under autocast they stay in fp32 as they were loaded."""
    problem = problem_of("llama3-8b", PLAIN.replace(autocast=autocast), frozen=True, dtype=dtype)
    problem = replace(problem, cluster=catalog.cluster(cluster))
    (memory,) = needed_memory(problem, Layout(dp=4, zero=0))
    assert memory.weights == pytest.approx(
        parameter_count(problem.model) * (32 if autocast else bits) / 8
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_on_the_host_leave_the_device(zero: int) -> None:
    problem = problem_of("llama3-8b")
    resident, of_optimizer = (
        needed_memory(problem, Layout(dp=4, zero=zero, offload_states=offload))[0]  # pyright: ignore
        for offload in ("none", "optimizer")
    )
    assert of_optimizer.weights == resident.weights
    assert of_optimizer.optimizer == 0
    assert of_optimizer.gradients == (0 if zero >= 2 else resident.gradients)
    if zero == 3:
        (weights_too,) = needed_memory(problem, Layout(dp=4, zero=3, offload_states="weights"))
        assert (weights_too.weights, weights_too.gradients, weights_too.optimizer) == (0, 0, 0)


def test_a_lone_replica_gathers_what_is_kept_on_the_host_alone() -> None:
    """Its own weights are whole already; those on the host it copies into room for the layers in
    use."""
    problem = problem_of("llama3-8b")
    on_device, of_optimizer, of_weights = (
        needed_memory(problem, Layout(zero=3, offload_states=offload))[0]  # pyright: ignore
        for offload in ("none", "optimizer", "weights")
    )
    assert of_optimizer.buffers == on_device.buffers
    layout = Layout(zero=3)
    weight_bytes = 2 * gathered(Rank.of(problem, layout, 0), layout)
    assert of_weights.buffers - on_device.buffers == pytest.approx(weight_bytes)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_a_stage_has_the_weights_of_each_group_of_layers_that_it_runs(groups: int, pp: int) -> None:
    """Once, wherever the group began; one stage has the model's own number of parameters."""
    plain = replace(catalog.model("gpt3-1.3b"), layers=12, vocab=50304)
    shared = replace(plain, layer_groups=groups)
    job = Job(global_batch=4 * pp, seq_len=1024)
    of_plain, of_shared = (
        needed_memory(step_problem(model, catalog.cluster("dgx-a100"), job), Layout(pp=pp))
        for model in (plain, shared)
    )
    layer = parameter_count(replace(plain, layers=2)) - parameter_count(replace(plain, layers=1))
    for rank, (all_bytes, found) in enumerate(zip(of_plain, of_shared, strict=True)):
        layers = range(rank * 12 // pp, (rank + 1) * 12 // pp)
        groups_of_rank = {i * groups // 12 for i in layers}
        saved = (len(layers) - len(groups_of_rank)) * layer
        assert all_bytes.weights - found.weights == pytest.approx(2 * saved)
        assert all_bytes.optimizer - found.optimizer == pytest.approx(12 * saved)
    if pp == 1:
        assert of_shared[0].weights == pytest.approx(2 * parameter_count(shared))
    assert sum(found.weights for found in of_shared) >= 2 * parameter_count(shared)


@pytest.mark.parametrize("micro_batch", [1, 8, 16])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_weights_are_as_old_as_the_papers_of_schedules_say(pp: int, micro_batch: int) -> None:
    """Mini-batches in flight: one per stage of PipeDream, two of its double-buffered weights,
    ceil(W / (N + 1)) of TiMePReSt, and none beside the one under way where a flush ends each
    step."""
    problem = problem_of("llama3-8b")
    ages = {
        "1f1b": 1,
        "gpipe": 1,
        "zb-h2": 1,
        "pipedream": pp,
        "pipedream-vertical-sync": pp,
        "pipedream-2bw": min(pp, 2),
        "nf1b": len(range(0, pp, 64 // micro_batch + 1)),
    }
    for schedule, age in ages.items():
        layout = Layout(pp=pp, schedule=schedule, micro_batch=micro_batch)
        assert version_difference(problem, layout) == age, schedule


@pytest.mark.parametrize(
    ("dtype", "optimizer", "bytes_per_param"),
    [("bf16", "adam", 2 + 12), ("fp32", "adam", 4 + 8), ("bf16", "sgd", 2 + 8)],
)
def test_a_checkpoint_is_of_weights_and_states(
    dtype: str, optimizer: str, bytes_per_param: int
) -> None:
    """A master copy and two states of Adam, one of SGD with momentum; in fp32 the weights are their
    own master copy."""
    model = catalog.model("gpt3-1.3b")
    job = Job(global_batch=8, seq_len=128).replace(dtype=dtype, optimizer=optimizer)
    assert checkpoint_bytes(model, job) == parameter_count(model) * bytes_per_param
