"""The store, and sessions as owners of everything that is kept."""

import gc
import pickle
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.cost import KernelModel
from perfmodel.prediction import evaluate, explain, layout_batches, prepared, step_problem
from perfmodel.session import Cache, Session, current_session
from perfmodel.spec import Job, Layout

LAYOUTS = [
    Layout.parse(text)
    for text in (
        "tp=2,pp=2,dp=2",
        "tp=2,pp=2,dp=2,zero=3",
        "tp=2,pp=2,dp=2,schedule=gpipe",
        "tp=2,pp=2,dp=2,recompute=full",
        "tp=2,pp=2,dp=2,micro_batch=2",
        "tp=2,pp=2,dp=2,schedule=seq1f1b",
        "tp=2,pp=2,dp=2,tp_overlap=true",
        "tp=2,pp=2,dp=2,order=tp-pp-cp-ep-dp",
        "tp=2,pp=2,dp=2,schedule=chimera",
        "tp=2,pp=2,dp=2,vpp=2",
        "tp=2,pp=2,dp=2,sequence_parallel=false",
        "tp=2,pp=2,dp=2,partition=11-13",
        "tp=4,pp=1,dp=2",
        "tp=1,pp=4,dp=2",
        "tp=2,pp=2,cp=2",
        "tp=2,pp=2,dp=2,schedule=pipedream-2bw",
        "tp=2,pp=2,dp=2,overlap_grad_reduce=false",
    )
]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=60), st.integers(1, 8))
def test_a_store_tells_what_was_made_and_stays_small(
    asked: list[tuple[int, int]], most: int
) -> None:
    """Against a plain list of what was used when."""
    store, used, made = Cache(most, lambda value: value[1]), [], []
    for key in asked:
        kept = key in used

        def make(key=key) -> tuple[int, int]:
            made.append(key)
            return key

        before = len(made)
        assert store.get_or_compute(key, make) == key
        assert len(made) == before + (not kept)
        used = [*(k for k in used if k != key), key]
        while sum(size for _, size in used) > most and len(used) > 1:
            used.pop(0)
        assert len(store) == len(used)


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=20), st.integers(1, 6))
def test_many_keys_are_answered_in_one_call(requests: list[list[int]], most: int) -> None:
    """In the order of the keys, from one call for those that are absent, each once; more may come
    with them."""
    store, calls = Cache(most), []

    def make(absent: list[int]) -> list[tuple[int, str]]:
        calls.append(absent)
        return [(key, str(key)) for key in [*absent, absent[0] + 10]]

    for keys in requests:
        calls.clear()
        assert store.get_or_compute_each(keys, make) == [str(key) for key in keys]
        assert len(calls) <= 1
        for absent in calls:
            assert len(set(absent)) == len(absent)
            assert set(absent) <= set(keys)
        assert len(store) <= most

        # What was asked for last is still there, as far as there is room: it is not computed again.
        calls.clear()
        last_keys = list(dict.fromkeys(keys))
        if len(last_keys) < most:
            store.get_or_compute_each(last_keys, make)
            assert not calls


def test_what_cannot_be_made_leaves_nothing_behind() -> None:
    store = Cache(4)
    with pytest.raises(ZeroDivisionError):
        store.get_or_compute("a", lambda: 1 // 0)
    assert store.get_or_compute("a", lambda: 2) == 2


def test_a_session_is_used_where_it_is_opened() -> None:
    outer = current_session()
    with Session() as first:
        assert current_session() is first
        with first, Session() as second:
            assert current_session() is second
        assert current_session() is first
        assert pickle.loads(pickle.dumps(outer)) is first  # in another process: that process's own
    assert current_session() is outer


def test_clearing_forgets_everything_and_changes_no_answer() -> None:
    model, cluster, job = (
        pm.model("gpt3-1.3b"),
        pm.cluster("dgx-a100"),
        Job(global_batch=16, seq_len=2048),
    )
    with Session() as session:
        problem = step_problem(model, cluster, job)
        assert step_problem(model, cluster, job) is problem
        before = explain(problem, LAYOUTS[0]).to_dict()
        program = prepared(layout_batches(problem, [LAYOUTS[0]])[0].spec)
        kept = [weakref.ref(problem), weakref.ref(KernelModel.load()), weakref.ref(program)]
        del problem, program
        session.clear()
        gc.collect()
        assert [one() for one in kept] == [None] * 3
        assert pm.predict(model, cluster, LAYOUTS[0], global_batch=16, job=job).to_dict() == before


def test_equal_programs_are_shared_by_problems() -> None:
    model, job = pm.model("gpt3-1.3b"), Job(global_batch=16, seq_len=2048)
    with Session():
        found = [step_problem(model, pm.cluster(name), job) for name in ("dgx-a100", "dgx-h100")]
        specs = [layout_batches(problem, [LAYOUTS[0]])[0].spec for problem in found]
        assert prepared(specs[0]) is prepared(specs[1])


@given(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=6))
@settings(max_examples=15)
def test_a_problem_answers_alike_whatever_it_has_seen(layouts: list[Layout]) -> None:
    problem = step_problem(
        pm.model("gpt2-345m"), pm.cluster("dgx-a100"), Job(global_batch=16, seq_len=512)
    )
    with Session():
        for layout in layouts:
            with Session():
                fresh = explain(problem, layout).to_dict()
            assert explain(problem, layout).to_dict() == fresh
        with Session():
            together = evaluate(problem, layouts).step_time_s.tolist()
        assert evaluate(problem, layouts).step_time_s.tolist() == together


def test_machines_with_other_rates_share_events_and_not_prices() -> None:
    here = pm.cluster("dgx-a100")
    faster = replace(
        here.levels[1],
        bandwidth_bytes_per_s=2 * here.levels[1].bandwidth_bytes_per_s,
        latency_s=1e-6,
    )
    there = replace(here, levels=(here.levels[0], faster))
    job, layout = Job(global_batch=32, seq_len=2048), Layout.parse("tp=2,pp=2,dp=8,zero=1")
    problems = [step_problem(pm.model("gpt3-1.3b"), cluster, job) for cluster in (here, there)]
    assert problems[0].setting == problems[1].setting
    assert problems[0] != problems[1]

    # Prices of the one are never taken for the other, whichever is asked first.
    in_turn = [explain(problem, layout).step_time_s for problem in problems]
    with Session():
        alone = explain(step_problem(pm.model("gpt3-1.3b"), there, job), layout).step_time_s
    assert in_turn[1] == alone < in_turn[0]
