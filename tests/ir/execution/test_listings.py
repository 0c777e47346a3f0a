"""DistIR's listings in our text form: what they compute, and the traces that the paper draws."""

import numpy as np
import pytest
from execution_cases import PROGRAMS, listing, unit_timer

from perfmodel.ir import Function, live_memory, parse_function
from perfmodel.ir.execution import execute_function, program_structure, simulate

RNG = np.random.default_rng(0)
WEIGHTS = {"w1": RNG.standard_normal((8, 8)), "w2": RNG.standard_normal((8, 8))}
X, Y = RNG.standard_normal((4, 8)), RNG.standard_normal((4, 8))
WHOLE = WEIGHTS | {"x": X, "y": Y}
HALVES = WEIGHTS | {"x_1": X[:2], "x_2": X[2:], "y_1": Y[:2], "y_2": Y[2:]}

FIGURE_3_TOP = {
    0: "x_1 as_1 ar_1 as_2 ar_2 dar_1 dw1_1 dar_2 dw1_2 w1_new",
    1: "y_1 ar_1 p_1 ar_2 dp_1 dw2_1 dar_1 p_2 dp_2 dw2_2 dar_2 w2_new",
}


def swapped() -> Function:
    """Figure 3, bottom: lines 10 (p_1) and 11 (ar_2) of figure 2 exchanged."""
    lines = (PROGRAMS / "pipeline_mlp.ir").read_text().splitlines()
    p, ar = (
        next(k for k, line in enumerate(lines) if f"%{name} @1 =" in line)
        for name in ("p_1", "ar_2")
    )
    assert ar == p + 1
    lines[p], lines[ar] = lines[ar], lines[p]
    return parse_function("\n".join(lines))


def spans(function: Function) -> dict[tuple[str, int], tuple[float, float]]:
    """Start and end of the instruction that makes each value, by device."""
    program = program_structure(function)
    timeline = simulate(program, unit_timer)
    made = [instruction.outputs[0] for instruction in function.instructions]
    return {
        (made[program.instruction[op]], int(program.structure.device[op])): (
            timeline.start_s[op],
            timeline.end_s[op],
        )
        for op in np.flatnonzero(program.instruction >= 0).tolist()
    }


@pytest.mark.parametrize("name", ["pipeline_mlp", "gradient_checkpointing"])
def test_listings_compute_what_the_sequential_program_does(name: str) -> None:
    want = execute_function(listing("sequential_mlp"), WHOLE)
    found = execute_function(listing(name), WHOLE)
    for weight in ("w1_new", "w2_new"):
        np.testing.assert_allclose(found[weight], want[weight], rtol=1e-12)


def test_zero_listing_computes_what_the_sequential_program_does() -> None:
    want = execute_function(listing("sequential_mlp"), WHOLE)
    found = execute_function(listing("zero_mlp"), HALVES)
    for weight in ("w1_new", "w2_new"):
        np.testing.assert_allclose(found[weight], want[weight], rtol=1e-12)


@pytest.mark.parametrize("device", [0, 1])
def test_trace_has_the_order_of_figure_3(device: int) -> None:
    found = spans(listing("pipeline_mlp"))
    names = FIGURE_3_TOP[device].split()
    ends = [found[name, device][1] for name in names]
    assert ends == sorted(ends)
    drawn = [
        (start, name) for (name, d), (start, _) in found.items() if d == device and name in names
    ]
    assert [
        name for _, name in sorted(drawn, key=lambda item: (item[0], names.index(item[1])))
    ] == names


def test_both_devices_work_at_once_until_the_send_blocks() -> None:
    top, bottom = spans(listing("pipeline_mlp")), spans(swapped())
    # figure 3, top: as_2 on device 1 beside p_1 on device 2; bottom: p_1 waits for the send of as_2
    assert top["p_1.h", 1][0] < top["as_2", 0][1]
    assert bottom["p_1.h", 1][0] == bottom["ar_2", 1][1]


def test_the_swapped_program_is_slower_and_computes_the_same() -> None:
    top, bottom = (simulate(f, unit_timer).makespan_s for f in (listing("pipeline_mlp"), swapped()))
    assert bottom > top
    found, want = (
        execute_function(swapped(), WHOLE),
        execute_function(listing("pipeline_mlp"), WHOLE),
    )
    np.testing.assert_array_equal(found["w1_new"], want["w1_new"])


def test_checkpointing_reclaims_the_first_activation() -> None:
    """Figure 8: %as_f is dead after line 8, until %as_b holds the same numbers again."""
    function = listing("gradient_checkpointing")
    made = {name: k for k, i in enumerate(function.instructions) for name in i.outputs}
    last_use = max(k for k, i in enumerate(function.instructions) if "as_f" in i.inputs)
    assert last_use < made["dp"] < made["as_b"]
    steps, in_use = live_memory(function).profile(0)
    at_dp = in_use[np.searchsorted(steps, made["dp"], side="right") - 1]
    plain = listing("sequential_mlp")
    made_plain = {name: k for k, i in enumerate(plain.instructions) for name in i.outputs}
    steps, in_use = live_memory(plain).profile(0)
    assert at_dp == in_use[np.searchsorted(steps, made_plain["dp"], side="right") - 1] - X.nbytes


def test_zero_frees_gathered_weights_between_uses() -> None:
    """Figure 9: no device ever holds more than its own weight and one that was sent to it."""
    function = listing("zero_mlp")
    weights = [
        n for n, t in function.types.items() if t.shape == (8, 8) and n[0] == "w" and "new" not in n
    ]
    last = {
        n: max(k for k, i in enumerate(function.instructions) if n in i.inputs) for n in weights
    }
    made = {n: k for k, i in enumerate(function.instructions) for n in i.outputs}
    assert last["w2_1_f"] < made["w2_1_b"]
    assert last["w1_2_f"] < made["w1_2_b"]
