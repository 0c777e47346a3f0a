"""Which collectives, how many and how large: against the counts of the papers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from distribute_cases import program

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir import OPS, Program, live_memory, parse_function, undistributed, work
from perfmodel.ir.distribute import (
    Degrees,
    data_parallel,
    distribute,
    expert_parallel,
    tensor_parallel,
)
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.models import (
    Adam,
    TransformerSize,
    mlp,
    model_program,
    training_step,
    transformer_inference,
    transformer_loss,
)
from perfmodel.spec import Transformer

LAYERS = 4
SIZE = TransformerSize(layers=LAYERS, hidden=16, heads=4, vocab=16, seq_len=8)


def collectives(spread: Program, phase: str | None = None) -> Counter[str]:
    return Counter(
        i.op
        for i in spread.function.instructions
        if OPS[i.op].collective and phase in (None, i.tag.phase)
    )


def parameter_bytes(spread: Program, *roles: str) -> list[int]:
    """Bytes of the inputs of some roles on each device."""
    total = [0] * spread.n_devices
    for whole in spread.inputs:
        for piece in whole.pieces if whole.role in roles else ():
            tensor = spread.types[piece.value]
            total[tensor.device] += tensor.n_bytes
    return total


def test_tensor_parallel_blocks_have_megatron_s_two_all_reduces_each_way() -> None:
    step = tensor_parallel(training_step(transformer_loss(SIZE, 4)), 2)
    forward, backward = collectives(step, "forward"), collectives(step, "backward")
    # embedding, 2 per block; the vocabulary-parallel loss: maximum, sum of exponentials, label's
    # logit
    assert forward == {"all_reduce": 1 + 2 * LAYERS + 3}
    # 2 per block and the head's
    assert backward == {"all_reduce": 2 * LAYERS + 1}


@pytest.mark.parametrize(("blocks", "backward"), [("one_norm", 1), ("two_norms", 2)])
def test_sub_layers_side_by_side_are_reduced_once(blocks: str, backward: int) -> None:
    """Results of both once; their input's gradient once, or once for each norm between."""
    size = replace(SIZE, parallel_blocks=blocks)
    step = training_step(transformer_loss(size, 4))
    plain, scattered = tensor_parallel(step, 2), tensor_parallel(step, 2, sequence_parallel=True)
    assert collectives(plain, "forward") == {"all_reduce": 1 + LAYERS + 3}
    assert collectives(plain, "backward") == {"all_reduce": backward * LAYERS + 1}
    inference = tensor_parallel(transformer_inference(size, 4), 2, sequence_parallel=True)
    assert collectives(inference) == {
        "reduce_scatter": 1 + LAYERS,
        "all_gather": backward * LAYERS + 1,
    }
    assert work(scattered.function).flops.sum() <= work(plain.function).flops.sum()


def test_a_shared_norm_has_one_gain_and_shift() -> None:
    for blocks in ("none", "one_norm", "two_norms"):
        size = replace(SIZE, parallel_blocks=blocks)
        held = sum(parameter_bytes(transformer_inference(size, 1), "parameter")) // 4
        assert held == size.n_parameters
        assert held == SIZE.n_parameters - (2 * 16 * LAYERS if blocks == "one_norm" else 0)


def test_a_model_of_the_catalog_keeps_how_its_sub_layers_follow_one_another() -> None:
    gpt = Transformer(
        name="gpt",
        layers=LAYERS,
        hidden=16,
        heads=4,
        kv_heads=4,
        head_dim=4,
        ffn_hidden=64,
        vocab=16,
        seq_len=8,
    )
    for blocks, norms in (("none", 2), ("one_norm", 1), ("two_norms", 2)):
        step = model_program(replace(gpt, parallel_blocks=blocks), 4, mode="inference")
        assert sum(i.op == "layer_norm" for i in step.function.instructions) == norms * LAYERS + 1
        reduced = collectives(tensor_parallel(step, 2))["all_reduce"]
        assert reduced == 1 + (2 if blocks == "none" else 1) * LAYERS


def test_experts_are_not_put_beside_attention() -> None:
    with pytest.raises(PerfModelError, match="dense layers"):
        replace(SIZE, experts=4, parallel_blocks="one_norm")


def test_sequence_parallelism_turns_all_reduces_into_pairs_of_the_same_volume() -> None:
    model = transformer_inference(SIZE, 4)
    plain, scattered = tensor_parallel(model, 2), tensor_parallel(model, 2, sequence_parallel=True)
    assert collectives(plain) == {"all_reduce": 1 + 2 * LAYERS}
    assert collectives(scattered) == {
        "reduce_scatter": 1 + 2 * LAYERS,
        "all_gather": 2 * LAYERS + 1,
    }
    # Korthikanti et al., section 4.2.2: a ring all-reduce is a reduce-scatter and an all-gather
    assert (
        work(scattered.function).communicated_bytes[0]
        == 2 * work(plain.function).communicated_bytes[0]
    )
    assert (
        live_memory(scattered.function).peak_bytes.max()
        < live_memory(plain.function).peak_bytes.max()
    )


def test_data_parallel_reduces_every_gradient_once_whatever_the_micro_batches() -> None:
    for count in (1, 4):
        step = distribute(training_step(mlp(16, (4, 8, 4))), Degrees(data=2, micro_batches=count))
        assert collectives(step) == {"all_reduce": 4 + 1}  # 2 weights, 2 biases, the loss


@pytest.mark.parametrize(("zero", "reduced", "gathered"), [(1, 4, 4), (2, 12, 4), (3, 12, 12 + 3)])
def test_zero_communicates_as_its_stages_say(zero: int, reduced: int, gathered: int) -> None:
    """With 3 micro-batches: gradients are reduced once or each time; weights gathered once or in
    each pass."""
    step = distribute(
        training_step(mlp(12, (4, 8, 4)), Adam()), Degrees(data=2, micro_batches=3, zero=zero)
    )
    found = collectives(step)
    assert found["reduce_scatter"] == reduced
    # of the backward pass only the second layer's input gradient needs a weight
    assert found["all_gather"] == gathered


def test_zero_shards_what_its_stages_say() -> None:
    step = training_step(transformer_loss(SIZE, 4), Adam())
    state, weights = parameter_bytes(step, "state")[0], parameter_bytes(step, "parameter")[0]
    for zero, of_state, of_weights in ((0, 1, 1), (1, 4, 1), (2, 4, 1), (3, 4, 4)):
        spread = data_parallel(step, 4, zero=zero)
        assert parameter_bytes(spread, "state") == [state // of_state] * 4
        assert parameter_bytes(spread, "parameter") == [weights // of_weights] * 4


def test_checkpointing_lowers_the_peak_for_more_flops() -> None:
    step = training_step(transformer_loss(SIZE, 64))
    plain, checked = (distribute(step, Degrees(checkpoint=c)).function for c in (False, True))
    assert live_memory(checked).peak_bytes[0] < 0.6 * live_memory(plain).peak_bytes[0]
    # all products but the last of each network are repeated: nobody needs its result
    assert 1.2 < work(checked).flops[0] / work(plain).flops[0] < 4 / 3


def test_experts_exchange_tokens_by_all_to_all() -> None:
    spread = expert_parallel(program("experts"), 4)
    layers = 2
    # to the experts and back, forward; the same of gradients, and once more of tokens for the
    # weight gradients
    assert collectives(spread, "forward")["all_to_all"] == 2 * layers
    assert collectives(spread, "backward")["all_to_all"] == 2 * layers
    whole = parameter_bytes(program("experts"), "parameter")[0]
    assert max(parameter_bytes(spread, "parameter")) < whole / 2


def test_pipeline_sends_each_boundary_once_per_micro_batch_and_direction() -> None:
    step = distribute(
        program("transformer"), Degrees(pipeline=4, micro_batches=4, schedule="gpipe")
    )
    assert collectives(step) == {"send": 2 * 3 * 4}
    memory = live_memory(step.function).peak_bytes
    ordered = distribute(
        program("transformer"), Degrees(pipeline=4, micro_batches=4, schedule="1f1b")
    )
    # the last stage of 1F1B holds one micro-batch, of GPipe all
    assert live_memory(ordered.function).peak_bytes[-1] < memory[-1]


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    step = distribute(
        program("transformer"), Degrees(data=2, tensor=2, pipeline=2, micro_batches=2)
    )
    groups = {
        (i.op, i.tag.stream): tuple(sorted(step.types[n].device for n in i.inputs))
        for i in step.function.instructions
        if i.op == "all_reduce" and step.types[i.inputs[0]].device == 0
    }
    assert groups["all_reduce", "compute"] == (0, 1)
    assert groups["all_reduce", "data_comm"] == (0, 2)
    sends = {
        (step.types[i.inputs[0]].device, i.attribute("to"))
        for i in step.function.instructions
        if i.op == "send"
    }
    assert sends == {(r, r + 4) for r in range(4)} | {(r + 4, r) for r in range(4)}


def test_work_does_not_depend_on_the_distribution() -> None:
    step = program("transformer")
    whole = work(step.function).flops.sum()
    spread = distribute(step, Degrees(data=2, tensor=2, pipeline=2, micro_batches=2))
    gemm = work(spread.function).flops.sum()
    assert gemm == pytest.approx(whole, rel=0.05)  # replicated norms and updates come on top


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        (Degrees(data=32), "is not divisible by 32 devices"),
        (Degrees(tensor=3), "is not divisible by 3 devices"),
        (Degrees(micro_batches=3), "is not divisible into 3 micro-batches"),
        (Degrees(pipeline=8, micro_batches=2), "4 layers are too few for 8 pipeline stages"),
        (Degrees(data=2, zero=4), "zero must be 0, 1, 2 or 3"),
        (Degrees(pipeline=2, micro_batches=2, schedule="nonesuch"), "unknown schedule"),
    ],
)
def test_what_does_not_divide_is_named(degrees: Degrees, says: str) -> None:
    with pytest.raises((LayoutError, ValueError), match=says):
        distribute(program("transformer"), degrees)


def test_constants_stand_where_they_are_used() -> None:
    """A constant has no operand that would say on which of the parts' devices it is."""
    text = """func @f(%x: fp64[4, 2] @0, %w: fp64[2, 2] @0) {
  %two = constant() {dtype="fp64", value=2.0}
  %y = matmul(%x, %w)
  %like = broadcast_like(%two, %y)
  %z = mul(%y, %like)
  return %z
}"""
    program = undistributed(parse_function(text), {"w": "parameter"})
    data = replace(program.inputs[0], batch_axis=0)
    program = replace(program, inputs=(data, *program.inputs[1:]))
    x = random_inputs(program)
    spread = data_parallel(program, 2)
    np.testing.assert_allclose(execute(spread, x)["z"], execute(program, x)["z"])
    assert {spread.types[name].device for name in spread.types if name.startswith("two")} == {0, 1}
