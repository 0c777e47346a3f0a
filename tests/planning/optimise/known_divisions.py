"""Uneven stages, micro-batches and buckets that the solvers find at constant rates, kept in
`known_divisions.csv`.

Among what is stored is how many divisions they looked at, which no optimum tells. A change that is
meant to move it is followed by

    PYTHONPATH=tests python tests/planning/optimise/known_divisions.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from constant_rates import SITE, Rates
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.planning.optimise import (
    launchable_buckets,
    partition_stages,
    size_buckets,
    size_micro_batches,
)
from perfmodel.prediction import StepProblem, step_problem
from perfmodel.spec import Cluster, Job, Layout

TABLE = Path(__file__).with_suffix(".csv")
MIXED = Cluster.of_kinds(
    "mixed",
    [
        replace(catalog.cluster(name), name=name[-4:], max_devices=8)
        for name in ("dgx-a100", "dgx-h100")
    ],
)
PARTITIONED = (
    Layout(tp=2, pp=3, dp=2),
    Layout(tp=2, pp=3, dp=2, schedule="gpipe", recompute="full"),
    Layout(tp=2, pp=3, schedule="zb-h1"),
    Layout(tp=4, pp=2, vpp=2, schedule="interleaved"),
    Layout(tp=2, pp=3, recompute_full_layers=(2, 1, 1)),
)


def problem_of(model: str, layers: int, cluster: Cluster, job: Job) -> StepProblem:
    """A step at constant rates."""
    problem = step_problem(replace(catalog.model(model), layers=layers), cluster, job, site=SITE)
    return problem.repriced(Rates(), Rates())


def _words(name: str, values: Sequence[object]) -> dict[str, float]:
    """Values as a name that counts one."""
    return {f"{name}.{'-'.join(map(str, values))}": 1.0}


def partition_cases() -> Iterator[StoredCase]:
    """Uneven stages on one kind of nodes and on two."""
    for cluster in (catalog.cluster("dgx-a100"), MIXED):
        problem = problem_of("llama3-8b", 9, cluster, Job(global_batch=16, seq_len=2048))
        for layout in PARTITIONED[: 2 if cluster is MIXED else None]:
            smaller = (
                layout.replace(dp=1, kinds=("a100", "h100", "h100")) if cluster is MIXED else layout
            )
            for recompute in (True, False):
                result = partition_stages(problem, smaller, recompute=recompute)
                figures = {
                    "step": result.step_time_s,
                    "given": result.given_s or 0.0,
                    "gap": result.gap,
                }
                figures |= {
                    "bound": result.certificate.lower_bound_s,
                    "evaluated": float(result.evaluated),
                }
                figures |= _words("partition", result.layout.partition or ())
                figures |= _words("kinds", result.layout.kinds or ())
                figures |= _words("recompute", result.layout.recompute_full_layers or ())
                name = f"{cluster.name}, {smaller.label}, recompute={recompute}"
                yield StoredCase(
                    name, name, {key: value for key, value in figures.items() if value}
                )


def size_cases() -> Iterator[StoredCase]:
    """Unequal micro-batches and buckets."""
    problem = problem_of(
        "gpt2-345m",
        24,
        catalog.cluster("v100-100g"),
        Job(global_batch=32, seq_len=512, dtype="fp16"),
    )
    for text in ("pp=4,micro_batch=4", "pp=2,dp=8,micro_batch=2,schedule=gpipe"):
        sized = size_micro_batches(problem, Layout.parse(text))
        figures = {
            "step": sized.step_time_s,
            "uniform": sized.uniform_s,
            "best": sized.best_uniform_s,
        }
        figures |= {"at": float(sized.best_uniform), "evaluated": float(sized.evaluated)} | _words(
            "sizes", sized.sizes
        )
        yield StoredCase(text, text, figures)
    for text in ("dp=16", "pp=2,dp=4"):
        layout = Layout.parse(text)
        for name, result in (
            ("free", size_buckets(problem, layout)),
            ("filled", launchable_buckets(problem, layout)),
        ):
            figures = {
                "step": result.step_time_s,
                "given": result.given_s,
                "evaluated": float(result.evaluated),
            }
            for stage, buckets in enumerate(result.buckets):
                figures |= _words(f"stage{stage}", buckets)
            yield StoredCase(f"{name} buckets, {text}", f"{name} buckets, {text}", figures)


def cases() -> Iterator[StoredCase]:
    """Everything that is stored."""
    yield from partition_cases()
    yield from size_cases()


if __name__ == "__main__":
    write_cases(TABLE, cases())
