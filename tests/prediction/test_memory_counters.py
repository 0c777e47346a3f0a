"""What allocators and drivers show of a rank's memory, against a count by hand of what each of them
includes."""

from dataclasses import replace
from itertools import product

import pytest

from perfmodel import catalog
from perfmodel.prediction import StepProblem, explain, step_problem
from perfmodel.prediction.memory import checkpoint_bytes as whole_checkpoint_bytes
from perfmodel.prediction.memory import fullness, needed_memory, rank_checkpoint_bytes
from perfmodel.spec import Framework, Job, Layout

MIB = 2**20
HOLES = 0.15
PLAIN = Framework(context_bytes=3e8, communicator_bytes=1e8)
MODEL = replace(catalog.model("llama3-8b"), layers=8)
LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=4, dp=2),
    Layout(pp=2, dp=4, zero=3),
    Layout(tp=2, pp=2, sequence_parallel=True),
)


def problem_of(
    framework: Framework = PLAIN, cluster: str = "dgx-h100", batch: int = 16
) -> StepProblem:
    job = Job(global_batch=batch, seq_len=1024)
    return step_problem(MODEL, catalog.cluster(cluster), job, None, framework)


def context_of(layout: Layout) -> float:
    """The context and a communicator of each group of several ranks."""
    sizes = (layout.devices, layout.dp, layout.tp * layout.pp, layout.tp, layout.pp)
    return 3e8 + 1e8 * sum(size > 1 for size in sizes)


@pytest.mark.parametrize(
    ("cluster", "workspace"), [("dgx-h100", 2 * 32 * MIB), ("dgx-a100", 2 * 8.125 * MIB)]
)
def test_counters_show_tensors_workspaces_holes_and_the_context(
    cluster: str, workspace: float
) -> None:
    problem = problem_of(cluster=cluster)
    for layout in LAYOUTS:
        context = context_of(layout)
        peaks: dict[str, list[float]] = {}
        for stage in needed_memory(problem, layout):
            tensors, moving = stage.peak - context, stage.activations + stage.buffers - context
            holes = moving * HOLES / (1 - HOLES)
            peaks.setdefault("allocated", []).append(tensors + workspace)
            peaks.setdefault("reserved", []).append(tensors + workspace + holes)
            peaks.setdefault("device", []).append(tensors + holes + context)
            peaks.setdefault("resting", []).append(
                stage.weights + stage.gradients + stage.optimizer + workspace
            )
        shown = explain(problem, layout).memory_counted_bytes
        assert shown == pytest.approx({name: max(of_stages) for name, of_stages in peaks.items()})


def test_what_is_planned_before_the_run_has_no_holes() -> None:
    problem = problem_of(PLAIN.replace(planned_memory=True))
    for layout in LAYOUTS:
        shown = explain(problem, layout).memory_counted_bytes
        assert shown["reserved"] == pytest.approx(shown["allocated"])


@pytest.mark.parametrize(("sequence_parallel", "tp"), [(False, 1), (False, 2), (True, 2)])
def test_outputs_that_a_framework_keeps_are_those_of_the_micro_batches_in_flight(
    sequence_parallel: bool, tp: int
) -> None:
    for pp, batch in ((1, 16), (4, 16), (4, 2)):
        layout = Layout(tp=tp, pp=pp, sequence_parallel=sequence_parallel)
        frees, keeps = (
            explain(
                problem_of(PLAIN.replace(keeps_outputs=on), batch=batch), layout
            ).memory_counted_bytes["allocated"]
            for on in (False, True)
        )
        in_flight = min(pp, batch) if pp > 1 else 0
        assert keeps - frees == pytest.approx(
            in_flight * 2 * 1024 * MODEL.hidden / (tp if sequence_parallel else 1)
        )


@pytest.mark.parametrize("counter", ["allocated", "resting", "device"])
@pytest.mark.parametrize(("schedule", "in_flight_last"), [("1f1b", 1), ("gpipe", 8)])
@pytest.mark.parametrize(("tp", "cp", "micro_batch"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_buffers_to_receive_into_are_those_of_all_micro_batches(
    counter: str, schedule: str, in_flight_last: int, tp: int, cp: int, micro_batch: int
) -> None:
    """The first stage receives gradients alone, the last one inputs alone, beside those that are in
    flight."""
    layout = Layout(
        pp=4, tp=tp, cp=cp, sequence_parallel=tp > 1, micro_batch=micro_batch, schedule=schedule
    )
    boundary = 2 * 1024 * MODEL.hidden * micro_batch / (tp * cp)
    in_stages = {}
    for apart in (False, True):
        framework = PLAIN.replace(receives_apart=apart, memory_counter=counter)  # pyright: ignore[reportArgumentType]
        in_stages[apart] = explain(
            problem_of(framework, batch=8 * micro_batch), layout
        ).memory_account.per_stage
    added = [
        after.peak - before.peak
        for before, after in zip(in_stages[False], in_stages[True], strict=True)
    ]
    assert added[0] == pytest.approx(8 * boundary)
    assert added[-1] == pytest.approx((8 - in_flight_last) * boundary, abs=1.0)


def test_buffers_to_receive_into_fill_devices_of_pipelines_alone() -> None:
    for layout in (Layout(), Layout(pp=4), Layout(pp=2, vpp=2, schedule="interleaved")):
        shared, apart = (
            fullness(problem, layout, needed_memory(problem, layout))
            for problem in (problem_of(PLAIN.replace(receives_apart=on)) for on in (False, True))
        )
        assert (apart > shared) if layout.pp > 1 else (apart == shared)


@pytest.mark.parametrize(
    ("reported", "stages"), [("fullest", 4), ("first_rank", 1), ("first_node", 2)]
)
def test_reports_are_of_the_ranks_that_a_framework_watches(reported: str, stages: int) -> None:
    """A node of eight devices holds two of the four stages of four devices each."""
    problem = problem_of(PLAIN.replace(reported_ranks=reported))  # pyright: ignore[reportArgumentType]
    layout = Layout(tp=2, pp=4, dp=2)
    found = explain(problem, layout)
    assert found.memory_account.reported_stages == stages
    resting = max(
        m.weights + m.gradients + m.optimizer for m in needed_memory(problem, layout)[:stages]
    )
    assert found.memory_counted_bytes["resting"] == pytest.approx(resting + 2 * 32 * MIB)


def test_a_layout_fits_below_what_the_framework_can_use() -> None:
    for margin, share in product((0.0, 0.1), (0.99, 1.01)):
        needed = max(stage.peak for stage in needed_memory(problem_of(), Layout()))
        device = replace(
            catalog.device("H100-SXM5-80GB"), memory_bytes=needed / (1 - margin) * share
        )
        cluster = replace(catalog.cluster("dgx-h100"), device=device)
        framework = PLAIN.replace(memory_margin=margin)
        problem = step_problem(MODEL, cluster, Job(global_batch=16, seq_len=1024), None, framework)
        found = explain(problem, Layout())
        assert found.fits == (share > 1)
        assert found.memory_needed_bytes == pytest.approx(needed)
        assert bool(found.reasons) != found.fits


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, pp=4), Layout(pp=2, dp=4, zero=3), Layout(pp=4, vpp=2)]
)
def test_ranks_write_every_weight_and_state_once(layout: Layout) -> None:
    layout = layout.replace(schedule="interleaved") if layout.vpp > 1 else layout
    problem = problem_of()
    of_ranks = rank_checkpoint_bytes(problem, layout)
    assert len(of_ranks) == layout.pp
    assert of_ranks.sum() == pytest.approx(whole_checkpoint_bytes(MODEL, problem.job))
    assert (of_ranks > 0).all()


def test_what_a_stage_writes_depends_on_its_layers_and_not_on_how_ranks_divide_them() -> None:
    """A table that first and last stage hold counts on both; one stage holds it once."""
    model = replace(catalog.model("gpt3-125m"), layers=4)
    problem = step_problem(model, catalog.cluster("dgx-a100"), Job(global_batch=32, seq_len=1024))
    for pp in (1, 2, 4):
        alone, *divided = (
            rank_checkpoint_bytes(problem, Layout(tp=tp, pp=pp)).tolist() for tp in (1, 2, 4)
        )
        assert all(of_ranks == pytest.approx(alone) for of_ranks in divided)
    table, layer = 50_304 * 768, 12 * 768**2
    first, last = rank_checkpoint_bytes(problem, Layout(tp=2, pp=2)).tolist()
    assert last / first == pytest.approx(
        (table + 2 * layer) / (table + 2048 * 768 + 2 * layer), rel=1e-3
    )
