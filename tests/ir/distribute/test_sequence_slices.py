"""Sequences cut into slices: the same step, keys and values kept for later slices, and what cannot
be sliced."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from distribute_cases import inputs, largest_error, program
from thinned import one_in

from perfmodel.errors import LayoutError
from perfmodel.ir import (
    OPS,
    Builder,
    Program,
    Tensor,
    live_memory,
    parse_program,
    to_text,
    undistributed,
)
from perfmodel.ir.distribute import (
    Degrees,
    checkpoint,
    distribute,
    pipeline,
    sequence_slices,
    staged,
)
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.models import (
    TransformerSize,
    mlp,
    training_step,
    transformer_inference,
    transformer_loss,
)
from perfmodel.ops import Attention
from perfmodel.schedule import get_schedule

SEQ_LEN = 4


@pytest.mark.parametrize("count", one_in(3, [1, 2, 4]))
@pytest.mark.parametrize("recomputes", [False, True])
def test_slices_compute_the_same_step(count: int, recomputes: bool) -> None:
    cut = sequence_slices(program("transformer"), count)
    cut = checkpoint(cut) if recomputes else cut
    assert largest_error(execute(cut, inputs("transformer")), "transformer") < 1e-12
    assert parse_program(to_text(cut)) == cut


def test_tied_embeddings_and_inference_are_sliced_too() -> None:
    size = TransformerSize(layers=2, hidden=8, heads=2, vocab=16, seq_len=SEQ_LEN, tied=True)
    for model in (
        training_step(transformer_loss(size, 4, "fp64")),
        transformer_inference(size, 4, "fp64"),
    ):
        x = random_inputs(model)
        found = execute(sequence_slices(model, 2), x)
        for name, value in execute(model, x).items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-12, atol=1e-12 * np.abs(value).max()
            )


@pytest.mark.parametrize("count", [2, 4])
def test_slice_j_sees_the_keys_of_slices_up_to_j(count: int) -> None:
    cut = sequence_slices(program("transformer"), count)
    found: Counter[tuple[int, str, int, int]] = Counter()
    for i in cut.function.instructions:
        given, made = ([cut.types[n] for n in names] for names in (i.inputs, i.outputs))
        for op in OPS[i.op].work(tuple(given), tuple(made), dict(i.attributes)):
            if isinstance(op, Attention):
                found[i.tag.micro_batch, str(op.pass_), op.seq_q, op.seq_kv] += 1
    part = SEQ_LEN // count
    assert found == {(j, p, part, part * (j + 1)): 4 for j in range(count) for p in ("fwd", "bwd")}


def test_the_backward_passes_of_a_sequence_run_last_slice_first() -> None:
    done = program("transformer")
    function = staged(done, Degrees(pipeline=2, micro_batches=2, schedule="seq1f1b:4")).function
    order: dict[tuple[str, int], None] = {}
    for i in function.instructions:
        if (
            i.tag.phase == "backward"
            and function.types[i.outputs[0]].device == 1
            and i.op == "attention_grad"
        ):
            order[i.tag.phase, i.tag.micro_batch] = None
    assert [k for _, k in order] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_a_device_holds_less_the_more_slices_there_are() -> None:
    """About 1 / k of the activations (Sun et al. 2024, section 3.2); gradients are summed in one
    place all the same."""
    size = TransformerSize(layers=4, hidden=8, heads=2, vocab=8, seq_len=64)
    step = training_step(transformer_loss(size, 8, "fp64"))

    def peak_bytes(schedule: str) -> float:
        cut = distribute(step, Degrees(pipeline=4, micro_batches=8, schedule=schedule))
        weights = sum(
            tensor.n_bytes for w in step.inputs_of("parameter") for tensor in [step.types[w.name]]
        )
        return float(live_memory(cut.function).peak_bytes[0]) - weights / 4

    whole = peak_bytes("1f1b")
    assert 0.2 < peak_bytes("seq1f1b:4") / whole < peak_bytes("seq1f1b:2") / whole < 0.75


def unmasked() -> Program:
    b = Builder("unmasked")
    x = b.parameter("x", Tensor("fp64", (2, 4, 6)))
    with b.tagged(phase="forward", layer=0):
        y = b.op("attention", x, heads=1)
    plain = undistributed(b.build([y]))
    return replace(plain, inputs=(replace(plain.inputs[0], batch_axis=0),))


@pytest.mark.parametrize(
    ("model", "count", "message"),
    [
        (program("transformer"), 3, "tokens: .* is not divisible into 3 slices"),
        (training_step(mlp(8, (4, 8, 4), "fp64")), 2, "mixes positions of the sequence"),
        (unmasked(), 2, "%attention: only causal attention"),
        (sequence_slices(program("transformer"), 2), 2, "slice sequences before"),
    ],
    ids=["odd", "mlp", "not causal", "twice"],
)
def test_what_cannot_be_sliced_is_named(model: Program, count: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        sequence_slices(model, count)


def test_a_program_has_the_slices_of_its_schedule() -> None:
    with pytest.raises(LayoutError, match="has 2 slices of a sequence, the program has 4"):
        pipeline(sequence_slices(program("transformer"), 4), get_schedule("seq1f1b")(2, 2))
    with pytest.raises(LayoutError, match="has 1 slices of a sequence, the program has 2"):
        pipeline(sequence_slices(program("transformer"), 2), get_schedule("1f1b")(2, 2))
