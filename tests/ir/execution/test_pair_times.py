"""Events of ranks, their times from two ranks, and what programs of more ranks are predicted to
take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import NoDataError, PerfModelError, UnknownNameError
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream
from perfmodel.ir.execution import PairTimes, program_structure, simulate_on_cores
from perfmodel.ir.execution.events import Kernel, Transfer, rank_events
from perfmodel.ir.execution.pair_times import Curve, measure_pair, messages, predict_ranks
from perfmodel.ir.models import mlp, training_step
from perfmodel.program import Kind
from perfmodel.spec import Cluster, NetworkLevel
from perfmodel.timeline import times

STEP = training_step(mlp(16, (8, 8, 8), "fp32"))
CALL_S, MESSAGE_S, S_PER_BYTE, CORE_S_PER_BYTE = 1e-4, 1e-3, 1e-6, 3e-7


def cluster(ranks: int, ranks_per_host: int) -> Cluster:
    sizes = [("loopback", ranks_per_host)] + [("network", ranks)] * (ranks > ranks_per_host)
    levels = tuple(
        NetworkLevel(name=n, size=s, bandwidth_bytes_per_s=1e9, latency_s=1e-5) for n, s in sizes
    )
    return Cluster(name="ranks", device=catalog.device("cpu"), levels=levels)


def linear(kind: str) -> Curve:
    """What two ranks measure on a network of one latency and one bandwidth."""
    sent = messages(kind, 2)
    sizes = np.array([64.0, 1e4, 1e5, 1e6])
    network_s = sent.count * MESSAGE_S + sizes * sent.sent * S_PER_BYTE
    core_s = sent.count * CALL_S + sizes * sent.sent * CORE_S_PER_BYTE
    return Curve(sizes, core_s + network_s, core_s + network_s, core_s)


PAIR = PairTimes({}, {(kind, True): linear(kind) for kind in ("all_reduce", "all_gather", "send")})


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_messages_of_a_ring_are_the_textbooks(ranks: int):
    # Thakur, Rabenseifner and Gropp 2005, section 4: 2 (n - 1) steps of 1/n, and n - 1 steps of
    # whole parts
    assert messages("all_reduce", ranks) == (2 * (ranks - 1), 1 / ranks)
    assert messages("all_gather", ranks).sent == ranks - 1
    assert messages("all_to_all", ranks).sent == pytest.approx((ranks - 1) / ranks)
    with pytest.raises(UnknownNameError, match="all_reduce"):
        messages("all_reduc", ranks)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("concurrent", [1, 2])
def test_two_ranks_tell_what_more_ranks_take(kind: str, ranks: int, concurrent: int):
    size = 1e5
    found = PAIR.time(Transfer(kind, size, "fp32", ranks, True, concurrent))
    sent = messages(kind, ranks)
    sent_bytes = concurrent * size * sent.sent
    # messages are copied and added up by the rank's core, however many ranks there are
    assert found.core_s == pytest.approx(
        sent.count * CALL_S + sent_bytes * CORE_S_PER_BYTE, rel=0.01
    )
    assert found.network_s == pytest.approx(
        sent.count * MESSAGE_S + sent_bytes * S_PER_BYTE, rel=0.01
    )


def test_what_was_not_measured_is_named():
    with pytest.raises(NoDataError, match="all_to_all between hosts"):
        PAIR.time(Transfer("all_to_all", 8, "fp32", 2, True))
    kernel = next(e for e in rank_events(STEP.function, cluster(1, 1)) if isinstance(e, Kernel))
    with pytest.raises(NoDataError, match="kernel"):
        PAIR.time(kernel)


def test_ranks_share_few_distinct_events():
    program = distribute(STEP, Degrees(data=4))
    events = rank_events(program.function, cluster(4, 2))
    assert len(events) == len(program.function.instructions)
    kernels = {e for e in events if isinstance(e, Kernel)}
    assert kernels == {
        e
        for e in rank_events(distribute(STEP, Degrees(data=4)).function, cluster(4, 1))
        if isinstance(e, Kernel)
    }
    # every rank runs the same kernels, so that four ranks have as many as one
    assert 4 * len(kernels) <= len(events)
    # both ranks of a host are in the one group over all four, so nobody else shares the link
    assert {e.concurrent for e in events if isinstance(e, Transfer)} == {1}
    tensor = rank_events(distribute(STEP, Degrees(tensor=2, data=2)).function, cluster(4, 2))
    assert {(e.across_hosts, e.concurrent) for e in tensor if isinstance(e, Transfer)} == {
        (False, 1),
        (True, 2),
    }


@given(st.data())
def test_with_a_core_each_the_critical_path_decides(data: st.DataObject):
    program = on_one_stream(distribute(STEP, Degrees(pipeline=2, data=2, micro_batches=2)))
    structure = program_structure(program.function).structure
    durations_s = np.array(
        [
            0.0,
            *data.draw(
                st.lists(
                    st.floats(0, 1),
                    min_size=structure.n_classes - 1,
                    max_size=structure.n_classes - 1,
                )
            ),
        ]
    )
    of_op_s = durations_s[structure.duration]
    on_core = np.array(
        data.draw(st.lists(st.booleans(), min_size=structure.n_ops, max_size=structure.n_ops))
    )
    on_core &= structure.device >= 0
    simulated = simulate_on_cores(
        structure,
        np.where(on_core, of_op_s, 0),
        np.where(on_core, 0, of_op_s),
        np.zeros(structure.n_ops),
        1 + np.arange(structure.n_ops) % 3,
        range(structure.devices),
    )
    expected = times(structure, durations_s)
    np.testing.assert_allclose(simulated.end_s, expected.end_s, atol=1e-12)
    np.testing.assert_allclose(simulated.start_s, expected.start_s, atol=1e-12)


def test_a_shared_core_does_the_work_of_its_ranks_in_turn():
    program = distribute(STEP, Degrees(data=4))
    structure = program_structure(program.function).structure
    kernels = (structure.device >= 0) & (
        np.bincount(np.maximum(structure.pred, 0).ravel(), minlength=structure.n_ops) > 0
    )
    work_s = np.where(kernels, 1.0, 0.0)
    nothing_s, one = 0 * work_s, np.ones(len(work_s), int)
    alone, shared = (
        simulate_on_cores(structure, work_s, nothing_s, nothing_s, one, cores)
        for cores in (range(4), [0] * 4)
    )
    # all ranks always have work, so that one core is never idle
    assert shared.makespan_s == pytest.approx(work_s.sum())
    assert alone.makespan_s < shared.makespan_s <= 4 * alone.makespan_s + 1e-9


def test_a_link_gives_credit_for_its_pause_only():
    program = on_one_stream(distribute(STEP, Degrees(data=2)))
    structure = program_structure(program.function).structure
    reduces = np.isin(structure.class_kind[structure.duration], (Kind.GRAD_REDUCE,)) & (
        structure.device >= 0
    )
    reduces |= (structure.device >= 0) & (structure.class_kind[structure.duration] == Kind.BACKWARD)
    wait_s, credit_s = np.where(reduces, 1.0, 0.0), np.where(reduces, 0.25, 0.0)
    nothing_s = np.zeros(structure.n_ops)
    one = np.ones(structure.n_ops, int)
    full = simulate_on_cores(structure, nothing_s, wait_s, nothing_s, one, range(2))
    credited = simulate_on_cores(structure, nothing_s, wait_s, credit_s, one, range(2))
    # messages follow one another without a pause, so that only the first finds a link that was idle
    assert full.makespan_s - credited.makespan_s == pytest.approx(0.25)


@given(
    work_s=st.floats(0.01, 1),
    wait_s=st.floats(0.01, 9),
    messages=st.integers(1, 20),
    sharing=st.sampled_from([1, 2, 4, 8]),
)
def test_ranks_use_a_core_while_others_wait_for_their_messages(
    work_s: float, wait_s: float, messages: int, sharing: int
):
    # One op a rank, all called at once: per message the core serves every rank, or the first waits,
    # if that is longer.
    structure = program_structure(distribute(STEP, Degrees(data=sharing)).function).structure
    first = np.flatnonzero(np.all(structure.pred < 0, axis=1) & (structure.device >= 0))
    ops = [int(first[structure.device[first] == rank][0]) for rank in range(sharing)]
    core_s, network_s = np.zeros(structure.n_ops), np.zeros(structure.n_ops)
    core_s[ops], network_s[ops] = messages * work_s, messages * wait_s
    each = np.full(structure.n_ops, messages)
    found = simulate_on_cores(structure, core_s, network_s, 0 * core_s, each, [0] * sharing)
    period_s = max(sharing * work_s, work_s + wait_s)
    assert found.makespan_s == pytest.approx((messages - 1) * period_s + sharing * work_s + wait_s)


@pytest.mark.slow
def test_two_real_ranks_are_measured_and_more_predicted():
    program = distribute(STEP, Degrees(data=2, pipeline=2, micro_batches=2))
    events = rank_events(program.function, cluster(4, 4))
    pair = measure_pair(events)
    assert set(pair.kernels_s) == {e for e in events if isinstance(e, Kernel)}
    assert set(pair.transfers) == {(e.kind, False) for e in events if isinstance(e, Transfer)}
    assert min(pair.kernels_s.values()) > 0
    predicted = predict_ranks(program.function, cluster(4, 4), pair, [0, 1, 0, 1])
    assert 0 < predicted.makespan_s < 10
    assert (predicted.end_s >= predicted.start_s).all()


def test_transfers_between_hosts_need_hosts():
    with pytest.raises(PerfModelError, match="hosts"):
        measure_pair([Transfer("send", 64, "fp32", 2, True)])
