"""Pipelining by every schedule of the package."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.errors import LayoutError
from perfmodel.ir import Builder, Program, Tensor, undistributed
from perfmodel.ir.distribute import default_stages, micro_batches, passes_of, pipeline
from perfmodel.ir.execution import execute, execute_function, random_inputs, simulate
from perfmodel.ir.models import TransformerSize as Size
from perfmodel.ir.models import mlp, training_step, transformer_inference
from perfmodel.ops import Gemm, Op
from perfmodel.schedule import PassTimes, Phase, Schedule, get_schedule, schedule_names
from perfmodel.schedule.facts import starts_and_ends

SAMPLES, LAYERS, BATCHES = 16, 8, 8
STEP = training_step(mlp(SAMPLES, (2, *[4] * (LAYERS - 1), 2), "fp64"))
INPUTS = random_inputs(STEP)
WANT = execute(STEP, INPUTS)


def schedules() -> list[Schedule]:
    """Every schedule over 4 devices that it allows."""
    made = []
    for name in schedule_names():
        for chunks in (1, 2):
            try:
                made.append(get_schedule(name)(4, BATCHES, chunks))
            except LayoutError:
                continue
    return made


def differs(found: dict, want: dict) -> float:
    return max(float(abs(found[k] - v).max() / abs(v).max()) for k, v in want.items())


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: f"{s.name}-{s.chunks}")
def test_every_schedule_computes_the_same_step_or_says_why_not(schedule: Schedule) -> None:
    if schedule.updates.any() and not schedule.forward_only:
        pytest.skip("of several steps: test_asynchronous")
    if schedule.forward_only or schedule.slices > 1:
        with pytest.raises(LayoutError, match=schedule.name):
            pipeline(STEP, schedule)
        return
    spread = pipeline(STEP, schedule)
    assert spread.n_devices == schedule.devices
    assert differs(execute(spread, INPUTS), WANT) < 1e-12


@pytest.mark.parametrize("schedule", schedules(), ids=lambda s: f"{s.name}-{s.chunks}")
def test_programs_take_as_long_as_their_schedule(schedule: Schedule) -> None:
    """A product takes a second, all else nothing.

    Sends that hold up both devices start where passes end, as the schedule has them, yet make the
    earlier device wait; those on a stream of their own start as soon as the value is there, which
    may be inside a pass. The schedule lies between, and at an end of the range unless it runs pairs
    of passes as one.
    """
    if schedule.forward_only or schedule.slices > 1:
        with pytest.raises(LayoutError, match=r"no backward passes|apply sequence_slices first"):
            pipeline(STEP, schedule)
        return
    passes = passes_of(STEP.function, default_stages(LAYERS, schedule.n_stages))

    def pass_s(phase: Phase) -> np.ndarray:
        stages = range(schedule.n_stages)
        return np.array(
            [float(sum(i.op == "matmul" for i in passes.body(phase, stage))) for stage in stages]
        )

    times = PassTimes(
        pass_s(Phase.FORWARD), pass_s(Phase.BACKWARD_INPUT), pass_s(Phase.BACKWARD_WEIGHT)
    )
    want = starts_and_ends(schedule, times)[1].max()
    policy = get_schedule(schedule.name).weights
    blocking, beside = (
        simulate(
            pipeline(STEP, schedule, weights=policy, send_stream=stream).function, products_s
        ).makespan_s
        for stream in ("compute", "send")
    )
    if schedule.paired.any():
        assert beside <= want <= blocking
    elif (schedule.phase == Phase.BACKWARD_WEIGHT).any():
        assert beside == want <= blocking
    else:
        assert beside <= want == blocking


def products_s(ops: Sequence[Op]) -> np.ndarray:
    """A second for every product."""
    return np.array([float(isinstance(op, Gemm)) for op in ops])


def test_passes_follow_the_schedule() -> None:
    schedule = get_schedule("1f1b")(4, BATCHES, 1)
    function = pipeline(STEP, schedule).function
    for device in range(4):
        order: dict[tuple[str, int], None] = {}
        for i in function.instructions:
            tag, here = i.tag, {function.types[n].device for n in i.outputs}
            if tag.micro_batch >= 0 and here == {device} and i.op not in ("send", "accumulate"):
                order[tag.phase, tag.micro_batch] = None
        want = [
            ("forward" if i.phase == 0 else "backward", i.micro_batch)
            for i in schedule.order(device)
        ]
        assert list(order) == want


def test_stages_may_be_uneven() -> None:
    spread = pipeline(STEP, get_schedule("gpipe")(2, 4, 1), stage_of_layer=(0,) * 7 + (1,))
    assert differs(execute(spread, INPUTS), WANT) < 1e-12
    count = [
        sum(spread.types[i.outputs[0]].device == d for i in spread.function.instructions)
        for d in (0, 1)
    ]
    assert count[0] > 2 * count[1]
    with pytest.raises(LayoutError, match="stage_of_layer"):
        pipeline(STEP, get_schedule("gpipe")(2, 4, 1), stage_of_layer=(0,) * 8)


def test_inference_is_pipelined_too() -> None:
    model = transformer_inference(Size(layers=2, hidden=8, heads=2, vocab=8, seq_len=4), 4, "fp64")
    x = random_inputs(model)
    spread = pipeline(model, get_schedule("forward")(2, 4, 1))
    assert differs(execute(spread, x), execute(model, x)) < 1e-12


def test_weights_shared_by_stages_are_held_by_both() -> None:
    """A weight used in two stages: its gradient is summed, its update runs on both devices."""
    b = Builder("tied")
    x, w = b.parameter("x", Tensor("fp64", (4, 3))), b.parameter("w", Tensor("fp64", (3, 3)))
    with b.tagged(phase="forward", layer=0):
        h = b.op("relu", b.op("matmul", x, w))
    with b.tagged(phase="forward", layer=1):
        loss = b.op(
            "scale", b.op("sum", b.op("matmul", h, w), axes=(0, 1)), factor=0.25, name="loss"
        )
    plain = undistributed(b.build([loss]), {"w": "parameter", "loss": "loss"})
    model = replace(plain, inputs=(replace(plain.inputs[0], batch_axis=0), plain.inputs[1]))
    step = training_step(model)
    inputs = random_inputs(step)
    spread = pipeline(step, get_schedule("1f1b")(2, 2, 1))
    # two micro-batches of data, two copies of the weight
    assert [len(whole.pieces) for whole in spread.inputs] == [2, 2]
    assert differs(execute(spread, inputs), execute(step, inputs)) < 1e-12


def normalising(samples: int) -> Program:
    """A model that mixes the samples of a batch."""
    b = Builder("batch_norm")
    x = b.parameter("x", Tensor("fp64", (samples, 3)))
    with b.tagged(phase="forward", layer=0):
        y = b.op("exp", b.op("sum", x, axes=(0,)))
    plain = undistributed(b.build([y]))
    return replace(plain, inputs=(replace(plain.inputs[0], batch_axis=0),))


def test_mixing_samples_forbids_micro_batches() -> None:
    with pytest.raises(LayoutError, match="%exp: exp mixes samples of the batch in %sum"):
        micro_batches(normalising(4), 2)


def test_instructions_must_be_tagged() -> None:
    b = Builder("untagged")
    x = b.parameter("x", Tensor("fp64", (4, 3)))
    with pytest.raises(LayoutError, match="%relu: tag every instruction"):
        pipeline(undistributed(b.build([b.op("relu", x)])), get_schedule("forward")(1, 2, 1))


def test_pipelines_come_before_other_dimensions() -> None:
    spread = pipeline(STEP, get_schedule("1f1b")(2, 2, 1))
    with pytest.raises(LayoutError, match="before other dimensions"):
        pipeline(spread, get_schedule("1f1b")(2, 2, 1))
    assert execute_function(spread.function, spread.split(INPUTS))
