"""Memory that frameworks take beside states and activations: the optimizer's step, live weights,
8-bit copies."""

from dataclasses import replace
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.prediction import StepProblem, predict, step_problem
from perfmodel.prediction.grids import LayoutGrid, StateChoice, price_grids
from perfmodel.prediction.memory import needed_memory, peak_memory
from perfmodel.spec import Framework, Job, Layout

PLAIN = Framework(context_bytes=3e8, communicator_bytes=0.0, bucket_bytes=0.0)
OF_STEPS = PLAIN.replace(step_bytes_per_param=8.0)


def problem_of(framework: Framework, cluster: str = "dgx-h100", **fields: Any) -> StepProblem:
    job = Job(**({"global_batch": 64, "seq_len": 1024} | fields))
    return step_problem(
        catalog.model("llama3.2-1b"), catalog.cluster(cluster), job, None, framework
    )


def first_rank(
    framework: Framework, layout: Layout, cluster: str = "dgx-h100", **fields: Any
) -> Any:
    return needed_memory(problem_of(framework, cluster, **fields), layout)[0]


def total(memory: Any) -> float:
    return (
        memory.weights + memory.gradients + memory.optimizer + memory.activations + memory.buffers
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_is_that_of_the_step_or_of_the_passes(zero: int, recompute: str) -> None:
    """The step takes eight bytes of every parameter that the rank updates, when activations are
    gone."""
    layout = Layout(dp=8, zero=zero, recompute=recompute)  # pyright: ignore
    plain, of_steps = (first_rank(framework, layout) for framework in (PLAIN, OF_STEPS))
    states = plain.weights + plain.gradients + plain.optimizer
    # Adam's states and the master copy are 12 bytes of what a rank updates.
    in_step = states + plain.optimizer / 12 * 8 + PLAIN.memory.context_bytes
    assert total(of_steps) == pytest.approx(max(total(plain), in_step))
    assert of_steps.activations == plain.activations


def in_step(framework: Framework, layout: Layout, **fields: Any) -> float:
    """Bytes that the optimizer's step needs, by a step so large that it is the peak."""
    huge = 1e3
    memory = first_rank(framework.replace(step_bytes_per_param=huge), layout, **fields)
    return total(memory) - huge / 12 * memory.optimizer


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_permanent_buffers_stay_in_the_step(zero: int) -> None:
    """Those of communicators, of data-parallel wrappers without ZeRO, and the bucket of a ZeRO 3
    with live weights, whatever the size that it is asked to have; buckets of lower stages are
    gone."""
    layout = Layout(dp=8, zero=zero, recompute="full")  # pyright: ignore
    plain = in_step(PLAIN, layout)
    # All ranks and the data-parallel ones: two communicators.
    assert in_step(PLAIN.replace(communicator_bytes=1e8), layout) - plain == pytest.approx(
        2e8, abs=1e6
    )
    wrapped = in_step(PLAIN.replace(ddp_buckets=True), layout)
    assert wrapped - plain == pytest.approx(2 * 1.2358e9 if zero == 0 else 0.0, rel=1e-3, abs=1e6)

    bucketed = PLAIN.replace(bucket_bytes=2e9, live_params=1.0)
    assert in_step(bucketed, layout) - plain == pytest.approx(1e9 if zero == 3 else 0.0, abs=1e6)
    asked_for = in_step(bucketed, layout, bucket_bytes=3e8)
    assert asked_for - plain == pytest.approx(3e8 if zero == 3 else 0.0, abs=1e6)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_weights_are_gathered_ahead_only_beside_passes(prefetch: int) -> None:
    """Where passes wait for each gather, one layer is whole at a time: `prefetch` layers less."""
    ahead = Layout(dp=8, zero=3, recompute="full", prefetch=prefetch)
    waiting = Layout(dp=8, zero=3, recompute="full", overlap_param_gather=False)
    a_layer = 2 * (1.2358e9 - 128256 * 2048) / 16
    less = first_rank(PLAIN, ahead).buffers - first_rank(PLAIN, waiting).buffers
    assert less == pytest.approx(prefetch * a_layer, rel=0.01)


def test_a_step_in_parts_takes_less() -> None:
    layout = Layout(dp=2, zero=3, recompute="full")
    whole = first_rank(OF_STEPS, layout)
    in_parts = first_rank(OF_STEPS.replace(step_params=1e7), layout)
    assert total(in_parts) < total(whole)


def test_a_step_on_the_host_takes_nothing_on_the_device() -> None:
    layout = Layout(dp=8, zero=2, offload_states="optimizer", recompute="full")
    assert total(first_rank(OF_STEPS, layout)) == total(first_rank(PLAIN, layout))


def test_weights_stay_live_under_zero_3_alone() -> None:
    """Up to all of them: more than the model has are not kept."""
    # One live weight, so that gradients are reduced from buckets in both.
    no_more, live = PLAIN.replace(live_params=1.0), PLAIN.replace(live_params=1e9)
    for layout, more in ((Layout(dp=8, zero=2), False), (Layout(dp=8, zero=3), True)):
        plain, kept = (first_rank(framework, layout) for framework in (no_more, live))
        assert (total(kept) > total(plain)) == more
    everything = first_rank(PLAIN.replace(live_params=1e12), Layout(dp=8, zero=3))
    assert everything.buffers - first_rank(no_more, Layout(dp=8, zero=3)).buffers < 2 * 1.24e9


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("zero", [2, 3])
def test_zero_3_reduces_the_whole_gradient_of_a_block_from_a_copy(
    zero: Any, grad_dtype: str
) -> None:
    """The largest is that of the tied table, in the type of weights and in that of reductions.
    Planned programs reduce weight by weight."""
    layout = Layout(dp=8, zero=zero, recompute="full")
    blockwise, planned = (
        first_rank(framework, layout, grad_dtype=grad_dtype, seq_len=16)
        for framework in (PLAIN, PLAIN.replace(planned_memory=True))
    )
    table = 128256 * 2048
    whole = table * (2 + (4 if grad_dtype == "fp32" else 2)) if zero == 3 else 0
    assert blockwise.buffers - planned.buffers == pytest.approx(whole, rel=0.05)


def test_secondary_shards_keep_the_weights_once_more() -> None:
    """Under ZeRO 3 alone: a share of the 16-bit weights for each rank of a group."""
    for zero, share in ((2, 0.0), (3, 1 / 4)):
        layout = Layout(dp=8, zero=zero)
        plain, copied = (first_rank(PLAIN, layout, secondary_shards=ranks) for ranks in (0, 4))
        assert copied.weights - plain.weights == pytest.approx(share * 2 * 1.2358e9, rel=1e-3)
        assert copied.buffers == plain.buffers


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_planned_programs_gather_weight_by_weight(prefetch: int) -> None:
    """The largest weight is the table, and a second one is on its way. Frameworks that gather
    modules hold the table and whole layers, which are less here if few are gathered ahead."""
    layout = Layout(dp=8, zero=3, recompute="full", prefetch=prefetch)
    planned = PLAIN.replace(planned_memory=True)
    whole, sharded = (
        first_rank(planned, layout.replace(zero=zero), seq_len=16, frozen=True) for zero in (0, 3)
    )
    table = 2 * 128256 * 2048
    a_layer = 2 * (1.2358e9 - 128256 * 2048) / 16
    more = sharded.buffers - whole.buffers
    assert more == pytest.approx(min(2 * table, table + (1 + prefetch) * a_layer), rel=0.01)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_gathered_weights_are_those_of_layers_that_are_not_recomputed(
    zero: Any, recompute: Any
) -> None:
    """Under ZeRO 3 alone, one 16-bit copy of all layers beside what is gathered anyway; layers that
    are recomputed in full save no weight from forward to backward."""
    layout = Layout(dp=8, zero=zero, recompute=recompute)
    plain, saved = (
        first_rank(PLAIN, layout, saves_gathered_weights=saves) for saves in (False, True)
    )
    layers = 1.2358e9 - 128256 * 2048
    more = 2 * layers if zero == 3 and recompute != "full" else 0.0
    assert saved.buffers - plain.buffers == pytest.approx(more, rel=1e-3)
    assert saved.weights == plain.weights


def test_saved_gathered_weights_take_the_place_of_live_ones() -> None:
    """Live weights are among the saved ones; some layers recomputed in full save less."""
    layout = Layout(dp=8, zero=3)
    none_live, live = PLAIN.replace(live_params=1.0), PLAIN.replace(live_params=1e9)
    beside_live = [
        first_rank(framework, layout, saves_gathered_weights=True)
        for framework in (none_live, live)
    ]
    assert beside_live[0] == beside_live[1]

    saved = first_rank(PLAIN, layout, saves_gathered_weights=True)
    in_part = first_rank(
        PLAIN, layout.replace(recompute_full_layers=(4,)), saves_gathered_weights=True
    )
    a_layer = (1.2358e9 - 128256 * 2048) / 16
    plain = [
        first_rank(PLAIN, each) for each in (layout, layout.replace(recompute_full_layers=(4,)))
    ]
    more = (saved.buffers - plain[0].buffers) - (in_part.buffers - plain[1].buffers)
    assert more == pytest.approx(2 * 4 * a_layer, rel=1e-3)


def test_eight_bit_copies_are_those_of_layers_that_are_trained_in_eight_bits() -> None:
    copies = PLAIN.replace(fp8_copy_bytes=2.0)
    layout = Layout(dp=8, zero=1)
    for fields, more in (
        ({"dtype": "fp8"}, 2.0),
        ({"dtype": "bf16"}, 0.0),
        ({"dtype": "fp8", "frozen": True}, 0.0),
    ):
        plain, copied = (first_rank(framework, layout, **fields) for framework in (PLAIN, copies))
        layers = 1.2358e9 - 128256 * 2048
        assert copied.weights - plain.weights == pytest.approx(more * layers, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("micro_batch", "pp"), [(8, 1), (2, 1), (8, 2)])
def test_gradients_of_a_single_backward_take_the_place_of_activations(
    recompute: Any, zero: Any, micro_batch: int, pp: int
) -> None:
    """Of one micro-batch without a pipeline; gradients that lie from step to step, or are added to,
    come on top."""
    layout = Layout(dp=8 // pp, pp=pp, zero=zero, micro_batch=micro_batch, recompute=recompute)
    freed = PLAIN.replace(frees_gradients=True)
    lying, coming = (
        first_rank(framework, layout, global_batch=64 // pp) for framework in (PLAIN, freed)
    )
    is_single = micro_batch == 8 and pp == 1
    saved = min(lying.gradients, lying.activations) if is_single else 0.0
    assert total(lying) - total(coming) == pytest.approx(saved)
    assert coming.activations == lying.activations

    # In the optimizer's step all of them are there.
    in_step = PLAIN.replace(frees_gradients=True, step_bytes_per_param=1e3)
    at_least = lying.weights + lying.gradients + lying.optimizer * (1 + 1e3 / 12)
    assert total(first_rank(in_step, layout, global_batch=64 // pp)) >= at_least


@pytest.mark.parametrize(
    ("cluster", "recipe", "bytes_per_weight"),
    [
        ("dgx-h100", "delayed", 2.0),
        ("dgx-h100", "tensorwise", 2.0),
        ("dgx-b200", "delayed", 1.0),
        ("dgx-b200", "current", 1.0),
        ("dgx-b200", "rowwise", 2.0),
        ("dgx-b200", "mxfp8", 2 + 2 / 32),
    ],
)
@pytest.mark.parametrize("zero", [1, 3])
def test_weights_in_eight_bits_alone_are_held_once_or_both_ways_round(
    cluster: str, recipe: Any, bytes_per_weight: float, zero: int
) -> None:
    """Twice where products take operands one way round, or where scales are not those of the whole
    tensor."""
    layout = Layout(dp=8, zero=zero)  # pyright: ignore
    narrow, wide = (
        first_rank(PLAIN, layout, cluster, dtype="fp8", fp8_recipe=recipe, fp8_params=alone)
        for alone in (True, False)
    )
    layers = (1.2358e9 - 128256 * 2048) / (8 if zero == 3 else 1)
    assert narrow.weights - wide.weights == pytest.approx(
        (bytes_per_weight - 2) * layers, rel=1e-3, abs=1.0
    )
    assert narrow.optimizer == wide.optimizer


@pytest.mark.parametrize(
    ("dtype", "bytes_per_weight"), [("bf16", 2.0), ("fp8", 1.0), ("fp4", 2 * 9 / 16)]
)
def test_frozen_weights_lie_as_products_read_them(dtype: str, bytes_per_weight: float) -> None:
    """In 4 bits with an 8-bit scale for 16 of them, both ways round; in 8 bits once."""
    memory = first_rank(PLAIN, Layout(dp=8), "dgx-b200", dtype=dtype, frozen=True)
    assert memory.weights == pytest.approx(bytes_per_weight * 1.2358e9, rel=1e-3)
    assert memory.gradients == memory.optimizer == 0


def test_only_trained_weights_of_eight_bit_products_are_kept_in_eight_bits() -> None:
    for fields in ({"dtype": "bf16"}, {"dtype": "fp8", "fp8_recipe": "current", "frozen": True}):
        narrow, wide = (
            first_rank(PLAIN, Layout(dp=8), "dgx-b200", fp8_params=alone, **fields)
            for alone in (True, False)
        )
        assert total(narrow) == total(wide)


def test_eight_bits_take_more_than_sixteen_where_weights_have_copies() -> None:
    """Megatron-LM, and Megatron-Core without --fp8-param-gather; Megatron-Bridge's recipes keep
    weights in 8 bits alone."""

    def peak(framework: str, dtype: str) -> float:
        layout = "dp=8,zero=1,micro_batch=1"
        # Megatron-LM runs fused attention in 8 bits alone unless a launch asks for it.
        kernels = {"flash_attention": True, "framework": framework}
        prediction = predict(
            "llama2-7b", "dgx-h100", layout, global_batch=8, seq_len=4096, dtype=dtype, **kernels
        )
        return total(prediction.memory)

    for framework in ("megatron-lm@2023", "megatron-core@2024"):
        assert peak(framework, "fp8") > peak(framework, "bf16")
    assert peak("megatron-bridge@2026", "fp8") <= peak("megatron-bridge@2026", "bf16")


def test_a_run_that_was_out_of_memory_in_the_optimizer_is_not_said_to_fit() -> None:
    prediction = predict(
        "llama-7b",
        "dgx-1v",
        "dp=8,zero=2,micro_batch=1,recompute=full",
        global_batch=8,
        seq_len=1024,
        dtype="fp16",
        framework="deepspeed@2022",
    )
    assert not prediction.fits


TOKENS, LAYERS, HIDDEN = 2 * 1024, 16, 2048
KEYS_AND_VALUES = 2 * 8 * 64
"""Elements of the keys and values of a token in a layer."""


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_gathers_and_checkpoints_in_fp32(recompute: Any, frozen: bool) -> None:
    """Twice the bytes of gathered weights, of the inputs of layers that are recomputed, and of
    frozen weights. Trained ones have their fp32 copy in any case."""
    layout = Layout(dp=8, zero=3, micro_batch=2, recompute=recompute)
    narrow, autocast = (
        PLAIN.replace(casts_when_gathered=True),
        PLAIN.replace(casts_when_gathered=True, autocast=True),
    )
    before, after = (
        first_rank(framework, layout, frozen=frozen) for framework in (narrow, autocast)
    )
    inputs = 2 * TOKENS * HIDDEN * LAYERS if recompute == "full" else 0
    assert after.activations - before.activations == pytest.approx(inputs, rel=1e-6)
    assert after.weights == pytest.approx(2 * before.weights if frozen else 0.0)
    assert after.optimizer == before.optimizer
    table, a_layer = 128256 * HIDDEN, (1.2358e9 - 128256 * HIDDEN) / LAYERS
    assert after.buffers - before.buffers == pytest.approx(2 * (table + 2 * a_layer), rel=0.01)
    # Products of fp32 cast nothing.
    wide = (
        first_rank(framework, layout, frozen=frozen, dtype="fp32")
        for framework in (narrow, autocast)
    )
    assert len({total(memory) for memory in wide}) == 1


@pytest.mark.parametrize("layers", [0, 4, 16])
def test_keys_and_values_that_layers_return_outlive_full_recompute(layers: int) -> None:
    """Those of every layer that is recomputed in full; the others have saved them anyway."""
    layout = Layout(dp=8, micro_batch=2, recompute_full_layers=(layers,))
    if layers == LAYERS:
        layout = Layout(dp=8, micro_batch=2, recompute="full")
    before, after = (
        first_rank(framework, layout)
        for framework in (PLAIN, PLAIN.replace(keeps_keys_values=True))
    )
    assert after.activations - before.activations == pytest.approx(
        2 * TOKENS * KEYS_AND_VALUES * layers, rel=1e-6
    )


@pytest.mark.parametrize("slots", [0, 1, 2])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_planned_slots_hold_activations_of_all_stages_but_the_last(pp: int, slots: int) -> None:
    """1F1B keeps `pp - rank` micro-batches of a stage's layers; slots are there whether or not they
    are in use."""
    layout = Layout(pp=pp, recompute="full")
    plain, planned = (
        needed_memory(problem_of(framework, global_batch=32), layout)
        for framework in (PLAIN, PLAIN.replace(slots_per_stage=slots))
    )
    of_a_stage = 2 * 1024 * HIDDEN * LAYERS / pp
    for rank in range(pp):
        more = max(0, slots * pp - (pp - rank)) if rank < pp - 1 else 0
        gained = planned[rank].activations - plain[rank].activations
        assert gained == pytest.approx(more * of_a_stage, rel=0.05)


@pytest.mark.parametrize(("slots", "pp", "zero"), [(0, 1, 3), (0, 1, 2), (2, 4, 1), (1, 2, 0)])
def test_grids_know_the_memory_of_each_layout(slots: int, pp: int, zero: int) -> None:
    """Whether gathers run ahead and how many places are planned matters in a grid as in a layout
    alone."""
    problem = problem_of(PLAIN.replace(slots_per_stage=slots), global_batch=32)
    first = LayoutGrid.of(Layout(pp=pp, dp=8, zero=zero, recompute="full"))
    states = tuple(StateChoice(zero, True, ahead, offload=False) for ahead in (True, False))
    (costs,) = price_grids(problem, [replace(first, states=states)])
    layouts = [costs.grid.layout(place) for place in range(2)]
    in_grid = costs.peak_bytes[..., costs.of_state].ravel()
    assert in_grid.tolist() == pytest.approx(peak_memory(problem, layouts)[0].tolist(), rel=1e-12)
    assert (in_grid[0] > in_grid[1]) == (zero == 3)
