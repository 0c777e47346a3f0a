"""Programs on real processes: their numbers are the reference executor's, their times make
sense."""

from collections.abc import Iterator

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.ir import Program, parse_function, undistributed
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute, program_ranks, random_inputs, run
from perfmodel.ir.models import TransformerSize, mlp, training_step, transformer_loss
from perfmodel.measure.ranks import RankGroup

MLP = training_step(mlp(8, (4, 8, 4), "fp64"))
TRANSFORMER = training_step(
    transformer_loss(TransformerSize(layers=1, hidden=8, heads=2, vocab=8, seq_len=4), 4, "fp64")
)
COLLECTIVES = """func @all(%a: fp64[4, 2] @0, %b: fp64[4, 2] @1) {
  %r_0, %r_1 = all_reduce(%a, %b)
  %m_0, %m_1 = all_reduce(%b, %a) {op="max"}
  %g_0, %g_1 = all_gather(%a, %b) {axis=1}
  %s_0, %s_1 = reduce_scatter(%a, %b) {axis=0}
  %n_0, %n_1 = reduce_scatter(%a, %b) {axis=0, op="max"}
  %t_0, %t_1 = all_to_all(%a, %b) {split_axis=0, concat_axis=1}
  %one = gather(%b, %a) {axis=0, to=1}
  %sum = reduce(%a, %b) {to=0}
  %c = broadcast(%a) {to=[1]}
  %p_0, %p_1 = scatter(%b) {axis=0, to=[1, 0]}
  %x = send(%a) {to=1}
  return %r_0, %m_0, %g_1, %s_0, %s_1, %n_1, %t_0, %t_1, %one, %sum, %c, %p_0, %p_1, %x
}"""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    """Started once, as that is what takes time."""
    with program_ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (MLP, Degrees(data=2, zero=2)),
        pytest.param(TRANSFORMER, Degrees(tensor=2), marks=pytest.mark.slow),
        pytest.param(
            MLP, Degrees(pipeline=2, micro_batches=2, schedule="gpipe"), marks=pytest.mark.slow
        ),
        pytest.param(
            MLP, Degrees(pipeline=2, micro_batches=4, schedule="1f1b"), marks=pytest.mark.slow
        ),
        (MLP, Degrees(pipeline=2, micro_batches=2, schedule="chimera")),
        (MLP, Degrees(pipeline=2, data=2, micro_batches=2, schedule="1f1b")),
    ],
    ids=["D2", "T2", "P2-gpipe", "P2-1f1b", "P2-chimera", "P2D2-1f1b"],
)
def test_real_runs_compute_what_the_reference_does(
    model: Program, degrees: Degrees, two_ranks: RankGroup
) -> None:
    program = distribute(model, degrees)
    x = random_inputs(program)
    result = run(program, x, repeats=2, ranks=two_ranks if degrees.n_devices == 2 else None)
    want = execute(program, x)
    assert result.outputs.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(result.outputs[name], value, rtol=1e-12, atol=1e-13)

    timeline, structure = result.timeline, result.program.structure
    assert timeline.structure is structure
    assert structure.devices == degrees.n_devices
    assert (timeline.end_s >= timeline.start_s).all()
    assert timeline.makespan_s == pytest.approx(float(np.sort(result.makespans_s)[0]))
    # what one rank runs, it runs in its program's order
    for device in range(structure.devices):
        own = np.flatnonzero(structure.device == device)
        assert (np.diff(timeline.end_s[own]) >= 0).all()
    assert 0 < timeline.idle_fraction() < 1
    assert timeline.to_frame()["end_s"].max() == timeline.makespan_s


def test_every_collective_and_clocks(two_ranks: RankGroup) -> None:
    program = undistributed(parse_function(COLLECTIVES))
    x = random_inputs(program)
    result = run(program, x, repeats=1, ranks=two_ranks)
    for name, value in execute(program, x).items():
        np.testing.assert_allclose(result.outputs[name], value, rtol=1e-14)
    # processes of one host share a clock
    np.testing.assert_array_equal(result.clock_offset_s, 0.0)
    # all members of a collective leave it after the last has come
    structure = result.program.structure
    index = result.program.instruction
    for k in range(len(program.function.instructions)):
        members = np.flatnonzero(index == k)
        assert len(np.unique(result.timeline.start_s[members])) == 1
    assert structure.n_classes > 2


def test_runs_need_processes_and_repeats() -> None:
    with pytest.raises(PerfModelError, match="2 to 64 ranks"):
        run(MLP, random_inputs(MLP))
    with pytest.raises(PerfModelError, match="repeats must be at least 1"):
        run(MLP, {}, repeats=0)


def test_running_ranks_must_be_as_many_as_devices(two_ranks: RankGroup) -> None:
    program = distribute(MLP, Degrees(data=4))
    with pytest.raises(PerfModelError, match="for 4 devices, but 2 ranks are running"):
        run(program, random_inputs(program), ranks=two_ranks)
