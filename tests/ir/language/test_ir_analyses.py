"""Live memory and work against slow counts and closed forms."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.ir import Builder, Function, Tensor, live_memory, parse_function, work
from perfmodel.ir.models import (
    Adam,
    TransformerSize,
    mlp,
    training_step,
    transformer_inference,
    transformer_loss,
)


@st.composite
def functions(draw: st.DrawFn) -> Function:
    """Random chains and sends over three devices."""
    b = Builder("random")
    values = [b.parameter(f"p{d}", Tensor("fp32", (draw(st.integers(1, 4)),), d)) for d in range(3)]
    for _ in range(draw(st.integers(0, 15))):
        x = draw(st.sampled_from(values))
        if draw(st.booleans()):
            values.append(b.op("send", x, to=(b.types[x].device + 1) % 3))
        else:
            values.append(b.op("unsqueeze" if b.types[x].rank < 2 else "relu", x, axes=(0,)))
    return b.build(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))


def counted_peaks(function: Function) -> list[float]:
    """Bytes of all values alive while each instruction runs, summed anew for each."""
    types, n = function.types, len(function.instructions)
    peaks = [0.0] * function.n_devices
    made = dict.fromkeys((p.name for p in function.parameters), 0)
    made |= {name: k for k, i in enumerate(function.instructions) for name in i.outputs}
    used = made | {name: k for k, i in enumerate(function.instructions) for name in i.inputs}
    used |= dict.fromkeys(function.outputs, n)
    for k in range(n + 1):
        for device in range(function.n_devices):
            alive = [
                t.n_bytes
                for name, t in types.items()
                if made[name] <= k <= used[name] and t.device == device
            ]
            peaks[device] = max(peaks[device], sum(alive))
    return peaks


@given(functions())
def test_peaks_are_those_of_the_slow_count(function: Function) -> None:
    memory = live_memory(function)
    np.testing.assert_array_equal(memory.peak_bytes, counted_peaks(function))
    for device in range(function.n_devices):
        steps, in_use = memory.profile(device)
        assert (np.diff(steps) > 0).all()
        assert in_use.max(initial=0.0) <= memory.peak_bytes[device]


def test_peak_is_at_the_instruction_that_holds_most() -> None:
    function = parse_function("""func @f(%x: fp32[8] @0) {
      %a = relu(%x)
      %b = concat(%a, %a) {axis=0}
      %c = sum(%b) {axes=[0]}
      return %c
    }""")
    memory = live_memory(function)
    assert memory.peak_bytes[0] == 4 * (8 + 16)
    steps, in_use = memory.profile(0)
    assert dict(zip(steps.tolist(), in_use.tolist(), strict=True)) == {
        0: 64.0,
        1: 96.0,
        2: 68.0,
        3: 4.0,
    }
    with pytest.raises(PerfModelError, match="device 1 does not exist"):
        memory.profile(1)


def test_mlp_training_does_three_products_per_layer() -> None:
    sizes, batch = (16, 32, 64, 8), 32
    step = training_step(mlp(batch, sizes))
    # the first layer needs no input gradient
    gemms = sum(2 * batch * a * b * (3 if k else 2) for k, (a, b) in enumerate(pairwise(sizes)))
    flops = work(step.function).flops[0]
    assert gemms < flops < 1.1 * gemms


def test_transformer_flops_are_the_closed_form() -> None:
    """2 FLOPs per parameter of the products and token, and attention (Narayanan et al. 2021,
    section 5.1)."""
    size, batch = TransformerSize(layers=3, hidden=64, heads=4, vocab=96, seq_len=32), 2
    tokens, h = batch * size.seq_len, size.hidden
    products = 2 * tokens * (12 * h * h * size.layers + h * size.vocab)
    visible = size.seq_len * (size.seq_len + 1) / 2
    attention = size.layers * batch * 2 * 2 * visible * h
    found = work(transformer_inference(size, batch).function).flops[0]
    assert products + attention < found < 1.02 * (products + attention)
    trained = work(training_step(transformer_loss(size, batch)).function).flops[0]
    assert 2.9 < trained / found < 3.2


@pytest.mark.parametrize("experts", [0, 4])
def test_parameter_count_is_the_model_s(experts: int) -> None:
    size = TransformerSize(layers=3, hidden=8, heads=2, vocab=11, seq_len=5, experts=experts)
    weights = transformer_loss(size, 2).inputs_of("parameter")
    assert sum(np.prod(w.shape) for w in weights) == size.n_parameters


def test_optimizer_state_doubles_what_adam_reads() -> None:
    plain, adam = (training_step(mlp(4, (8, 8)), o) for o in (None, Adam()))
    assert len(adam.inputs_of("state")) == 2 * len(plain.inputs_of("parameter"))
    assert work(adam.function).traffic_bytes[0] > work(plain.function).traffic_bytes[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"heads": 3}, "is not divisible by 3 heads"), ({"layers": 0}, "at least 1")],
)
def test_impossible_models(change: dict[str, int], says: str) -> None:
    with pytest.raises(PerfModelError, match=says):
        TransformerSize(
            **({"layers": 1, "hidden": 8, "heads": 2, "vocab": 8, "seq_len": 4} | change)
        )
