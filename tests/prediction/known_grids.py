"""Memory and bounds of grids of layouts with every choice, kept in `known_grids.csv`.

Each base of `known_steps` is spread over schedules, shards, recomputation and states, at constant
rates. Stored are means over all layouts that share a choice. A change that is meant to move them is
followed by

    PYTHONPATH=tests python tests/prediction/known_grids.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from constant_rates import SITE, Rates
from known_steps import BASES, FRAMEWORK, Step, changed
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.prediction import StepProblem, check_layout, step_problem
from perfmodel.prediction.grids import (
    GridCosts,
    LayoutGrid,
    PipelineChoice,
    RecomputeChoice,
    ShardChoice,
    StateChoice,
    pass_work_s,
    price_grids,
)
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Job, Layout

TABLE = Path(__file__).with_suffix(".csv")
SHARDS = (
    ShardChoice(True, False, Layout().order),
    ShardChoice(False, False, Layout().order),
    ShardChoice(True, True, "pp-tp-cp-ep-dp"),
)
RECOMPUTES = (
    RecomputeChoice("none"),
    RecomputeChoice("selective"),
    RecomputeChoice("full"),
    RecomputeChoice("none", (1,)),
)
STATES = (
    StateChoice(0, True, True, False),
    StateChoice(1, False, False, False),
    StateChoice(1, True, True, True),
    StateChoice(2, False, True, False),
    StateChoice(3, True, False, False),
    StateChoice(3, True, True, False),
)
HOST_STATES = (StateChoice(1, True, True, False), StateChoice(1, True, True, False, 2))
"""Where there is one stage and nothing is recomputed, some layers may be on the host."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "micro_batch")
OTHERS = {
    "combined passes": replace(
        BASES["experts"], layout=BASES["experts"].layout.replace(ep_overlap=True)
    ),
    "checked collectives": replace(
        BASES["dense"], framework=FRAMEWORK.replace(checks_collectives="pipelines")
    ),
    "checked collectives without stages": replace(
        BASES["fp8"], framework=FRAMEWORK.replace(checks_collectives="pipelines")
    ),
    "inference": replace(
        BASES["sharded"], job=BASES["sharded"].job.replace(mode="inference", global_batch=32)
    ),
    "gradients of every micro-batch": replace(
        BASES["adapters"],
        layout=Layout(pp=2, dp=8),
        job=Job(global_batch=32, seq_len=1024, reduce_every_micro_batch=True),
    ),
    "secondary shards of partly frozen weights": replace(
        BASES["sharded"],
        job=BASES["sharded"].job.replace(secondary_shards=4, frozen_embedding=True),
    ),
    "more layers than segments": changed(BASES["sharded"], "model", "layers", 18),
    "states on the host": replace(
        BASES["sharded"], layout=Layout(dp=16, zero=3, offload_states="optimizer")
    ),
    "whole gradients in pipelines, of which there is none": replace(
        BASES["sharded"], job=BASES["sharded"].job.replace(whole_gradients_in_pipelines=True)
    ),
    "slow transfers": Step(
        replace(catalog.model("gpt2-345m"), layers=4),  # pyright: ignore[reportCallIssue]
        Layout(tp=8, pp=4, micro_batch=4, order="pp-tp-cp-ep-dp"),
        Job(global_batch=12, seq_len=1024),
    ),
}
"""Steps with further features of grids."""
LEFT_OUT = ("images", "encoder and decoder", "two kinds of nodes", "newer nodes first")


def grid_of(step: Step) -> LayoutGrid:
    """The grid around the layout of a base, with every schedule that its pipeline can have."""
    pipelines = []
    for name in schedule_names():
        choice = PipelineChoice(name, 2 if name in ("interleaved", "breadth-first") else 1)
        if _is_possible(step, choice):
            pipelines.append(choice)
    # Shards of experts need sequence parallelism here, and so do the layouts that leave it out
    # without tensor ranks.
    shards = [shard for shard in SHARDS if shard.sequence_parallel or step.layout.ep == 1]
    degrees = Layout(**{key: getattr(step.layout, key) for key in DEGREES})
    states = STATES
    if step.layout.offload_states != "none":
        # Only states that are sharded can be on the host.
        states = tuple(state for state in STATES if state.zero)
        degrees = degrees.replace(zero=1, offload_states=step.layout.offload_states)
    return LayoutGrid(
        degrees=degrees,
        pipelines=tuple(pipelines),
        shards=tuple(shards),
        recomputes=RECOMPUTES,
        states=states,
        valid=np.ones((1, 1, 1, 1), bool),
    )


def _is_possible(step: Step, choice: PipelineChoice) -> bool:
    try:
        layout = step.layout.replace(**choice._asdict())
        check_layout(step.model, step.cluster, step.job, layout)
        scheduler = get_schedule(layout.schedule)
        scheduler.require(
            layout.pp, step.job.num_microbatches(layout), scheduler.chunks_for(layout.vpp)
        )
    except LayoutError:
        return False
    return (scheduler.name == "forward") == (step.job.mode == "inference")


def figures(problem: StepProblem, grid: LayoutGrid, costs: GridCosts) -> dict[str, float]:
    """Mean bound, peak and work of the layouts that share a choice; how many are too large, by
    their largest part."""
    arrays = {
        "bound": np.broadcast_to(costs.bound_s, costs.grid.shape),
        "peak": np.broadcast_to(costs.spread(costs.peak_bytes), costs.grid.shape),
        "work": pass_work_s(problem, grid),
    }
    figures = {"size": float(costs.grid.size)}
    for name, values in arrays.items():
        for axis in range(values.ndim):
            others = tuple(i for i in range(values.ndim) if i != axis)
            for choice, mean in enumerate(np.asarray(values, float).mean(axis=others).tolist()):
                figures[f"{name}.axis{axis}.{choice}"] = mean
    figures |= {f"left{i}": float(n) for i, n in enumerate(costs.left_out)}
    half = float(np.median(costs.peak_bytes))
    figures |= {f"large{i}": float(n) for i, n in enumerate(costs.too_large(half))}
    return {name: value for name, value in figures.items() if value and np.isfinite(value)}


def cases() -> Iterator[StoredCase]:
    """Grids of all bases but those that grids do not hold, whole and of what fits into less
    memory."""
    for name, step in (BASES | OTHERS).items():
        if name in LEFT_OUT:
            continue
        problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
        problem = problem.repriced(Rates(), Rates())
        grid = grid_of(step)
        (whole,) = price_grids(problem, [grid])
        yield StoredCase(name, name, figures(problem, grid, whole))
        (narrow,) = price_grids(problem, [grid], float(np.quantile(whole.peak_bytes, 0.2)))
        yield StoredCase(name, "a fifth fits", figures(problem, grid, narrow))
        # Exchanges then bound a step, and not passes.
        slow = problem.repriced(Rates(), Rates(slower=100.0))
        (costs,) = price_grids(slow, [grid])
        yield StoredCase(name, "slow links", figures(slow, grid, costs))
        if step.layout.pp == 1:
            hosted = replace(grid, recomputes=RECOMPUTES[:1], states=HOST_STATES)
            (costs,) = price_grids(problem, [hosted])
            yield StoredCase(name, "layers on the host", figures(problem, hosted, costs))


if __name__ == "__main__":
    write_cases(TABLE, cases())
