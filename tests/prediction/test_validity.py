"""One statement of what makes a layout impossible: errors and searches give the same reason."""

import pickle
from collections import Counter

import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError, Reason, Rejection
from perfmodel.planning.layouts import default_space, enumerate_layouts, restrict, with_schedules
from perfmodel.prediction import check_layout
from perfmodel.spec import Job, Layout, Problem

IMPOSSIBLE = [
    ("gpt3-1.3b", "tp=5,dp=8", Reason.HEADS, ""),
    ("llama3-8b", "tp=64", Reason.HEADS, ""),
    ("llama3-8b", "dp=8,cp=3,micro_batch=1", Reason.SEQUENCE, ""),
    ("gpt3-1.3b", "dp=16,micro_batch=3", Reason.BATCH, ""),
    ("gpt3-1.3b", "dp=8,ep=2", Reason.UNSPLIT, "ep"),
    ("mixtral-8x7b", "dp=16,ep=16", Reason.EXPERTS, ""),
    ("mixtral-8x7b", "tp=2,dp=8,ep=2", Reason.EXPERT_SEQUENCE, ""),
    ("resnet-50", "tp=2,dp=8", Reason.UNSPLIT, "tp, cp or ep"),
    ("mlp-1b", "cp=2,dp=8", Reason.UNSPLIT, "cp or ep"),
    ("gpt3-1.3b", "pp=32", Reason.STAGES, ""),
    ("gpt3-1.3b", "pp=4,vpp=3,schedule=chimera", Reason.CHUNKS, "chimera"),
    ("gpt3-1.3b", "pp=3,schedule=chimera", Reason.SCHEDULE, "chimera"),
    ("gpt3-1.3b", "pp=4,schedule=seq1f1b:3", Reason.SLICES, ""),
    ("gpt3-1.3b", "dp=2097152", Reason.CAPACITY, ""),
]


@pytest.mark.parametrize(("model", "text", "reason", "about"), IMPOSSIBLE)
def test_errors_carry_their_reason(model: str, text: str, reason: Reason, about: str) -> None:
    made, cluster = catalog.model(model), catalog.cluster("dgx-a100")
    job = Job(global_batch=64, seq_len=2048)
    with pytest.raises(LayoutError) as error:
        check_layout(made, cluster, job, Layout.parse(text))
    assert error.value.rejection == Rejection(reason, about)
    assert reason.frees  # there is something to change
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.rejection) == (str(error.value), error.value.rejection)


def test_experts_over_ranks_that_are_not_there_are_no_layout() -> None:
    with pytest.raises(LayoutError) as error:
        Layout(dp=6, ep=4)
    assert error.value.rejection == Rejection(Reason.EXPERT_RANKS)


@pytest.mark.parametrize(
    ("fix", "schedules", "reason"),
    [
        ("tp=5", "", Rejection(Reason.HEADS)),
        ("pp=40", "", Rejection(Reason.STAGES)),
        ("pp=5", "chimera", Rejection(Reason.SCHEDULE, "chimera")),
        ("pp=20", "zb-v", Rejection(Reason.SCHEDULE_STAGES, "zb-v")),
        ("pp=5,vpp=2", "1f1b", Rejection(Reason.UNEVEN_CHUNKS)),
        ("micro_batch=7", "", Rejection(Reason.BATCH)),
    ],
)
def test_searches_count_the_reasons_of_errors(fix: str, schedules: str, reason: Rejection) -> None:
    model, cluster = catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100")
    rejected: Counter[Rejection] = Counter()
    problem = Problem(
        model=model, cluster=cluster, job=Job(global_batch=40, seq_len=2048), devices=40
    )
    space = restrict(with_schedules(default_space(problem), schedules), fix)
    assert not any(layout.pp > 1 for layout in enumerate_layouts(space, problem, rejected))
    assert rejected[reason]
