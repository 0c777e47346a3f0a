"""Steps on changed machines, and the memory that they need, kept in `known_machines.csv`.

Prices are constant rates of kernels, and of links their latency and bandwidth, so that new weights
move nothing. A change that is meant to move answers is followed by

    PYTHONPATH=tests python tests/planning/known_machines.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from constant_rates import SITE, Links, Rates
from stored_figures import Figures, StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.planning.design import memory_to_fit
from perfmodel.planning.what_if import NAMES, Scenario, in_scenario, parse_sweep, step_s, sweep
from perfmodel.prediction import EAGER, StepProblem, step_problem
from perfmodel.spec import Job, Layout, Transformer

TABLE = Path(__file__).with_suffix(".csv")
LAYOUTS = {
    "stages": Layout(tp=2, pp=2, dp=8, zero=1, sequence_parallel=True),
    "shards": Layout(dp=16, zero=3, overlap_param_gather=False),
}
EXPERTS = Layout(dp=16, ep=8, zero=1)
SWEPT = {
    "stages": ("inter_node_bandwidth=0.5x:4x:3", "host_op_s=0:1e-4:2"),
    "shards": ("all_gather_delay_s=0:0.02:2",),
}
TOGETHER = (
    ("slow_rank=1", "slow_factor=1.5x"),
    ("slow_factor=2x",),
    ("compute_rate=4x", "power_limit=2x"),
    ("compute_rate=4x",),
    ("memory_bytes=2e9",),
    ("inter_node_latency=5us", "inter_node_bandwidth=200Gbit/s"),
    ("intra_node_latency=+50%", "intra_node_bandwidth=-20%"),
    ("all_gather_delay_s=0.002", "reduce_scatter_delay_s=0.001"),
    ("host_bandwidth=0.5x",),
)


def problem_of(name: str, cluster: str = "dgx-a100") -> StepProblem:
    """A small model on two nodes or more."""
    model = catalog.model(name)
    assert isinstance(model, Transformer)
    job = Job(global_batch=64, seq_len=1024)
    problem = step_problem(
        replace(model, layers=4), catalog.cluster(cluster), job, None, EAGER, site=SITE
    )
    return problem.repriced(Rates(), Links())


def cases() -> Iterator[StoredCase]:
    """Every setting of every layout, some at once, then sweeps and memory."""
    problem = problem_of("gpt3-1.3b")
    for name, layout in LAYOUTS.items():
        yield StoredCase(name, name, {"step": step_s(problem, layout, Scenario())})
        single = [
            (f"{setting}=1.5x",) for setting in NAMES if setting.endswith(("h", "rate", "_s"))
        ]
        for settings in (*single, *TOGETHER):
            try:
                yield StoredCase(
                    name,
                    " ".join(settings),
                    {"step": step_s(problem, layout, Scenario.parse(settings))},
                )
            except PerfModelError as error:
                yield StoredCase(name, " ".join(settings), {f"refused.{type(error).__name__}": 1.0})
        for text in SWEPT[name]:
            curve = sweep(
                problem, layout, Scenario.parse(["memory_bandwidth=2x"]), parse_sweep(text)
            )
            figures = {
                f"at.{value:.6g}": seconds
                for value, seconds in zip(curve.values, curve.step_s, strict=True)
            }
            yield StoredCase(name, f"sweep {text}", figures | {"hidden": curve.hidden_up_to or 0.0})
        for cluster in ("dgx-a100", "dgx-h100"):
            need = memory_to_fit(problem_of("gpt3-6.7b", cluster), layout)
            figures = {
                "needed": need.memory_bytes,
                "likely": need.likely_bytes,
                "fits": need.fits_probability,
            }
            figures |= {
                "peak": need.peak_bytes,
                "has": need.has_bytes,
                "is": float(need.fits),
            } | need.parts_bytes
            yield StoredCase(name, f"memory on {cluster}", figures)
    for settings in (TOGETHER[2], TOGETHER[4]):
        name = f"what if {' '.join(settings)}"
        yield StoredCase(name, name, _scenario(problem, LAYOUTS["stages"], settings))
    experts = problem_of("mixtral-8x7b")
    for delays in ((), ("all_to_all_delay_s=0.002",), ("send_recv_delay_s=0.001",)):
        name = "experts" if not delays else delays[0]
        yield StoredCase(
            "experts", name, {"step": step_s(experts, EXPERTS, Scenario.parse(delays))}
        )


def _scenario(problem: StepProblem, layout: Layout, settings: Sequence[str]) -> Figures:
    result = in_scenario(problem, layout, Scenario.parse(settings))
    figures = {
        "before": result.before_s,
        "after": result.after_s,
        "notes": float(len(result.notes)),
    }
    figures |= {"fits before": float(result.fits_before), "fits after": float(result.fits_after)}
    figures |= {
        "before fits": result.fits_probability_before,
        "after fits": result.fits_probability_after,
    }
    figures = {name.replace(" ", "-"): value for name, value in figures.items()}
    return figures | {f"by.{name}": value for name, value in result.sensitivity.items()}


if __name__ == "__main__":
    write_cases(TABLE, cases())
