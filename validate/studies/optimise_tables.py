"""How good the optimisers of `perfmodel.planning.optimise` are, beside exact answers, bounds and
other methods."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.chain import Chain
from studies.chain_relaxation import optimise_chain
from studies.optimisers import OPTIMISERS, anneal, run_optimiser

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise import (
    PartitionResult,
    Relaxation,
    Run,
    bandwidth_problem,
    convex_bound,
    design_hardware,
    partition,
    partition_stages,
    relax,
    size_buckets,
    size_micro_batches,
)
from perfmodel.planning.optimise.launches import LaunchChoices, relax_layout
from perfmodel.prediction import StepProblem, step_problem
from perfmodel.spec import Cluster, Job, Layout

PARTITIONS: Final = (
    ("gpt3-6.7b", "dgx-a100", 64, 2048, "tp=2,pp=4,dp=2"),
    ("gpt3-175b", "dgx-a100", 1536, 2048, "tp=8,pp=16,dp=8,zero=1"),
    ("llama3-8b", "dgx-a100", 64, 2048, "tp=1,pp=8,schedule=zb-h1"),
    ("llama3-8b", "dgx-a100", 64, 2048, "tp=1,pp=8,schedule=gpipe"),
    ("llama3-8b", "dgx-a100", 64, 2048, "tp=1,pp=4,vpp=2"),
    ("llama3-70b", "dgx-h100", 512, 8192, "tp=4,pp=8,dp=4,zero=1"),
    ("llama3-70b", "dgx-h100", 512, 2048, "tp=4,pp=16,dp=4,zero=3"),
    ("deepseek-v2-lite", "dgx-h100", 64, 4096, "tp=1,pp=4,dp=2,ep=2"),
    ("gpt-oss-20b", "dgx-h100", 64, 4096, "tp=1,pp=8"),
    ("t5-11b", "dgx-a100", 64, 512, "tp=8,pp=4"),
    ("resnet-50", "dgx-a100", 512, 1, "pp=4"),
)
LAUNCHED: Final = (
    ("large vocabulary", "gemma-2-27b", "dgx-h100", 64, 4096, "tp=2,pp=8"),
    ("large vocabulary", "gemma-3-12b", "dgx-h100", 64, 4096, "tp=1,pp=8"),
    ("large vocabulary, two stages a rank", "gemma-2-9b", "dgx-a100", 64, 2048, "tp=2,pp=4,vpp=2"),
    ("large vocabulary, two stages a rank", "llama3-8b", "dgx-a100", 64, 2048, "tp=1,pp=4,vpp=2"),
    ("experts after dense layers", "deepseek-v2-lite", "dgx-h100", 64, 4096, "tp=1,pp=4,dp=2,ep=2"),
    (
        "experts after dense layers",
        "moonlight-16b-a3b",
        "dgx-h100",
        64,
        4096,
        "tp=1,pp=4,dp=2,ep=2",
    ),
    ("memory of the first stages", "llama3-70b", "dgx-h100", 512, 8192, "tp=4,pp=8,dp=4,zero=1"),
    ("encoder before decoder", "t5-11b", "dgx-a100", 64, 512, "tp=8,pp=4"),
    ("encoder before decoder", "mt5-xl", "dgx-a100", 64, 512, "tp=1,pp=4"),
)
"""Layouts whose even stages take unequal times, and why they do."""
LAUNCHED_MICRO_BATCHES: Final = (1, 2, 4)
MIXED_DEVICES: Final = (
    ("llama3-8b", ("dgx-a100", "dgx-h100"), (4, 4), "pp=8,tp=1"),
    ("llama3-8b", ("jean-zay-v100", "dgx-a100", "dgx-h100"), (3, 2, 3), "pp=8,tp=2"),
    ("gpt3-6.7b", ("jean-zay-v100", "dgx-a100"), (8, 8), "pp=16,tp=1"),
)
BANDWIDTHS: Final = (
    ("gpt3-13b", "l4x8", 64, 2048, "pp=20,dp=4"),
    ("gpt3-13b", "l4x8", 128, 2048, "pp=40,dp=4"),
    ("gpt3-175b", "v100-100g", 384, 2048, "pp=96,tp=1,dp=4,recompute=full"),
    ("gpt-1t", "l4x8", 256, 2048, "pp=128,dp=4"),
)
MICRO_BATCHES: Final = (
    ("gpt3-6.7b", "dgx-a100", 64, 1024, "pp=8,tp=1,micro_batch=4"),
    ("gpt3-6.7b", "dgx-a100", 128, 512, "pp=8,tp=1,micro_batch=4"),
    ("llama3-8b", "dgx-h100", 32, 2048, "pp=8,tp=2,micro_batch=2"),
    ("gpt2-345m", "v100-100g", 64, 256, "pp=4,tp=1,micro_batch=8"),
)
BUCKETS: Final = (
    ("gpt3-6.7b", "dgx-a100", 64, 1024, "pp=2,tp=2,dp=8"),
    ("gpt3-1.3b", "v100-100g", 32, 1024, "dp=16"),
    ("bert-large", "v100-100g", 256, 512, "dp=32"),
    ("deepseek-v2-lite", "dgx-h100", 64, 1024, "pp=2,dp=8,ep=8"),
)
_PRICES: Final = {
    "compute_rate": 0.4,
    "memory_bandwidth": 0.25,
    "intra_node_bandwidth": 0.15,
    "inter_node_bandwidth": 0.2,
}


def random_chain(
    seed: int, layers: int = 96, stages: int = 16, micro_batches: int = 64, transfer: float = 0.2
) -> Chain:
    """Layers of unequal times and sizes on devices of unequal speed, of which recompute must make
    some stages fit.

    Args:
        seed: of everything random.
        layers, stages, micro_batches: sizes.
        transfer: mean seconds of a transfer relative to a layer's forward.
    """
    rng = np.random.default_rng(seed)
    forward_s = rng.lognormal(0, 0.5, layers) * 1e-3
    # Memory is short by so much that the first stages, which hold most micro-batches, must
    # recompute.
    saved, state = (rng.lognormal(0, 0.4, layers) * 1e9 for _ in range(2))
    return Chain(
        forward_s=forward_s,
        backward_s=np.stack([2.0 * forward_s, 2.12 * forward_s, 3.0 * forward_s]),
        saved_bytes=np.stack([saved, 0.6 * saved, 0.1 * saved]),
        state_bytes=state,
        in_flight=np.minimum(stages - np.arange(stages), micro_batches),
        capacity_bytes=np.full(
            stages, (state.mean() + 0.45 * stages * saved.mean()) * layers / stages
        ),
        slowness=rng.uniform(0.8, 1.25, stages),
        boundary_s=rng.lognormal(0, 0.3, layers) * transfer * 1e-3,
        micro_batches=micro_batches,
    )


def partition_study() -> pd.DataFrame:
    """Per instance: milliseconds of the dynamic program, and makespans of it, of the relaxation and
    of even stages.

    `exact_s` and `relaxed_s` are improved by the same moves of single layers through the timeline.
    """
    rows = []
    for seed in range(50):
        chain = random_chain(seed)
        exact_ms, front = _timed(chain.exact)
        exact_s = chain.improved([cuts.partition for cuts in front[:8]])[1]
        relax_s, relaxed = _timed(lambda chain=chain: relax(chain.relaxation()))
        rounded = [tuple(map(int, values["layers"])) for values, *_ in relaxed.starts]
        rows.append(
            {
                "seed": seed,
                "exact_ms": 1e3 * exact_ms,
                "exact_s": exact_s,
                "relax_seconds": relax_s,
                "rounded_s": float(chain.step_s(rounded).min()),
                "relaxed_s": chain.improved(rounded)[1],
                "even_s": float(chain.step_s([_even_partition(chain)])[0]),
            }
        )
    return pd.DataFrame(rows)


def _even_partition(chain: Chain) -> tuple[int, ...]:
    """A partition with the same number of layers on every stage, but for rounding."""
    cuts = np.linspace(0, chain.layers, chain.stages + 1).round().astype(int)
    return tuple(np.diff(cuts).tolist())


def brute_force_agrees() -> tuple[int, int]:
    """Number of small instances on which the dynamic program finds the minimum over all partitions,
    and the number of all."""
    agree = []
    for seed in range(20):
        chain = random_chain(seed, layers=9, stages=4, micro_batches=6)
        exact = chain.exact()[0].value
        brute_force = chain.brute_force()
        agree.append(bool(np.isclose(exact, brute_force, rtol=1e-12)))
    return sum(agree), len(agree)


def continuous_problems() -> dict[str, Relaxation]:
    """Splits of bandwidth over the links of real models' pipelines, and of one long random
    chain."""
    problems = {}
    for name, cluster, batch, seq_len, layout in BANDWIDTHS:
        # A relaxation whose only unknowns are the links' shares.
        problem, links = bandwidth_problem(
            _model(name, cluster, batch, seq_len), Layout.parse(layout)
        )
        problems[f"{name}, {len(links)} links"] = problem
    # Far more links than any pipeline of a real model has; stages and modes are given, links alone
    # unknown.
    chain = random_chain(0, layers=384, stages=192, micro_batches=64, transfer=4.0)
    even = np.full((1, chain.stages), chain.layers // chain.stages, float)
    mode = np.zeros((chain.stages, chain.modes))
    mode[:, 0] = 1
    problem = chain.relaxation(links=True, stages=False)
    fixed = {"layers": even[0], "mode": mode}
    problems[f"random chain, {chain.stages - 1} links"] = replace(
        problem, constants={**problem.constants, **fixed}
    )
    return problems


def continuous_study(limit_s: float = 10.0) -> pd.DataFrame:
    """Per problem: seconds of the relaxation, its certified gap, and seconds of the others to the
    same value.

    The target is what the relaxation gains over equal shares less a hundredth of that gain; times
    are of code that is compiled, from the same start. One that does not get there in `limit_s` has
    seconds `inf`, and the share of the gain that it got instead.
    """
    rows = []
    for name, problem in continuous_problems().items():
        cold_s, best = _timed(lambda problem=problem: relax(problem, n_starts=1, steps=800))
        # With a target that any value meets it ends at its start: equal shares.
        equal = run_optimiser("Powell", problem, np.inf, limit_s)[1]
        target = best.value + 0.01 * (equal - best.value)
        # The fewest steps that reach the target, now that the code is compiled.
        for steps in (25, 50, 100, 200, 400, 800):
            warm_s, relaxed = _timed(
                lambda problem=problem, steps=steps: relax(problem, n_starts=1, steps=steps)
            )
            if relaxed.value <= target:
                break
        # A bound holds for all shares, so that the gap cannot be luck.
        bounded = convex_bound(problem, best.values)
        row: dict[str, Any] = {
            "problem": name,
            "gain": 1 - best.value / equal,
            "gap": best.value / bounded.lower_bound - 1,
            "relaxation": warm_s,
            "with compilation": cold_s,
        }
        for optimiser in OPTIMISERS:
            seconds, value = run_optimiser(optimiser, problem, target, limit_s)
            row[optimiser] = seconds if value <= target else np.inf
            row[f"{optimiser}, share of the gain"] = (equal - value) / (equal - best.value)
        rows.append(row)
    return pd.DataFrame(rows)


def mixed_study(seeds: Iterable[int], patience: float) -> pd.DataFrame:
    """Per instance: makespans of cuts, recompute and bandwidth optimised together, of the best
    uniform layout, and of simulated annealing in the same time and in `patience` times as much."""
    rows = []
    optimise_chain(_mixed_chain(-1))  # compiles
    for seed in seeds:
        chain = _mixed_chain(seed)
        seconds, optimised = _timed(lambda chain=chain: optimise_chain(chain))
        rows.append(
            {
                "seed": seed,
                "seconds": seconds,
                "found_s": optimised.step_s,
                "gap": optimised.certificate.gap(optimised.step_s),
                "uniform_s": float(chain.step_s([_even_partition(chain)])[0]),
                "cuts_alone_s": chain.improved([cuts.partition for cuts in chain.exact()[:8]])[1],
                "annealed_s": anneal(chain, seconds),
                "annealed_longer_s": anneal(chain, patience * seconds),
            }
        )
    return pd.DataFrame(rows)


def model_partitions() -> pd.DataFrame:
    """Real layouts, even and with the stages and recompute that `optimise.partition` finds."""
    rows = []
    for name, cluster, batch, seq_len, layout in PARTITIONS:
        result = partition(name, cluster, layout, global_batch=batch, seq_len=seq_len)
        best = result.layout
        rows.append(
            {
                "model": name,
                "cluster": cluster,
                "layout": layout,
                "even_s": result.given_s or np.nan,
                "found_s": result.step_time_s,
                "gap": result.gap,
                "partition": "-".join(map(str, best.partition or ())),
                "recompute": best.recompute + _suffix(best.recompute_full_layers),
                "seconds": result.seconds,
            }
        )
    return pd.DataFrame(rows)


def launch_table(layouts: Sequence[tuple[str, str, str, int, int, str]] = LAUNCHED) -> pd.DataFrame:
    """Stages, recompute and micro-batch of real layouts by relaxation and by dynamic programming.

    Dynamic programming (moves of layers where a rank has several stages) is run once for every
    micro-batch and kind of recompute, the relaxation once for all of them. Infinite: nothing fits,
    or the method does not apply.
    """
    rows = []
    for why, name, cluster, batch, seq_len, layout in layouts:
        # Both methods are given the same choices.
        problem = _model(name, cluster, batch, seq_len)
        base = Layout.parse(layout)
        choices = LaunchChoices(LAUNCHED_MICRO_BATCHES)
        cuts = _cuts(problem, base, choices)
        relaxed = _relaxed(problem, base, choices)
        cut_s = min((cut.step_time_s for cut in cuts), default=np.inf)
        relaxed_s = relaxed.step_time_s if relaxed else np.inf
        even = [cut.given_s for cut in cuts if cut.given_s]
        rows.append(
            {
                "unequal by": why,
                "model": name,
                "layout": layout,
                "even_s": min(even, default=np.nan),
                "cut_s": cut_s,
                "relaxed_s": relaxed_s,
                "gain": 1 - relaxed_s / cut_s,
                "relaxed": _changes(relaxed.layout) if relaxed else "-",
                "cut": _changes(min(cuts, key=lambda cut: cut.step_time_s).layout) if cuts else "-",
            }
        )
    return pd.DataFrame(rows)


def _cuts(problem: StepProblem, base: Layout, choices: LaunchChoices) -> list[PartitionResult]:
    """The exact partition for every micro-batch and kind of recompute that has one which fits."""
    cuts = []
    for micro_batch, recompute in product(choices.micro_batches, choices.recomputes):
        with suppress(LayoutError):  # nothing fits
            cuts.append(
                partition_stages(
                    problem, base.replace(micro_batch=micro_batch, recompute=recompute)
                )
            )
    return cuts


def _relaxed(problem: StepProblem, base: Layout, choices: LaunchChoices) -> PartitionResult | None:
    """The best layout by gradients over all choices at once; None if nothing fits."""
    with suppress(LayoutError):
        return relax_layout(problem, base, choices)
    return None


def _changes(layout: Layout) -> str:
    """Settings of a layout that a launch states: stages, micro-batch and recompute."""
    stages = "-".join(map(str, layout.partition or ()))
    recompute = layout.recompute + _suffix(layout.recompute_full_layers)
    return f"{stages}, micro-batch {layout.micro_batch}, recompute {recompute}"


def mixed_device_table() -> pd.DataFrame:
    """Pipelines over several kinds of devices: even stages in the given order, and the best order
    and cut."""
    rows = []
    for name, clusters, supply, layout in MIXED_DEVICES:
        laid_out = Layout.parse(layout)
        # Of each kind there are devices for so many stages, and no more.
        kinds = []
        for k, (cluster, stages) in enumerate(zip(clusters, supply, strict=True)):
            max_devices = stages * laid_out.tp
            kinds.append(
                replace(catalog.cluster(cluster), name=f"kind{k}", max_devices=max_devices)
            )
        job = Job(global_batch=64, seq_len=2048, dtype="fp16")
        problem = step_problem(catalog.model(name), Cluster.of_kinds("mixed", kinds), job)
        result = partition_stages(problem, laid_out)
        rows.append(
            {
                "model": name,
                "devices": ", ".join(f"{n} {c}" for n, c in zip(supply, clusters, strict=True)),
                "layout": layout,
                "even_s": result.given_s or np.nan,
                "found_s": result.step_time_s,
                "gap": result.gap,
                "partition": "-".join(map(str, result.layout.partition or ())),
                "seconds": result.seconds,
            }
        )
    return pd.DataFrame(rows)


def hardware_table() -> pd.DataFrame:
    """The machine that is optimal for two training runs, at the price of today's and at twice
    that."""
    runs = [
        Run(
            _model("gpt3-13b", "dgx-a100", 256, 2048),
            Layout.parse("tp=4,pp=4,dp=8,zero=1,sequence_parallel=true"),
        ),
        Run(
            _model("llama3-8b", "dgx-a100", 128, 8192),
            Layout.parse("tp=2,pp=2,dp=16,zero=1,recompute=selective"),
        ),
    ]
    rows = []
    for budget in (1.0, 2.0):
        design = design_hardware(runs, _PRICES, budget=budget)
        # Against a machine that is better by the same factor in everything.
        speedup = (np.array(design.even_s) / design.step_s).tolist()
        rows.append(
            {"budget": budget}
            | design.multiples
            | {"speedup_1": speedup[0], "speedup_2": speedup[1]}
            | {"priced": design.priced, "seconds": design.seconds}
        )
    return pd.DataFrame(rows)


def size_table() -> pd.DataFrame:
    """Unequal micro-batches and gradient buckets against the usual ones."""
    rows = []
    for name, cluster, batch, seq_len, layout in MICRO_BATCHES:
        result = size_micro_batches(_model(name, cluster, batch, seq_len), Layout.parse(layout))
        # Equal sizes other than the layout's own may be better, and are no merit of unequal ones.
        best = min(result.best_uniform_s, result.uniform_s)
        sizes = "-".join(map(str, result.sizes))
        rows.append(
            (
                "micro-batches",
                name,
                cluster,
                seq_len,
                layout,
                best,
                result.step_time_s,
                sizes,
                result.seconds,
            )
        )
    for name, cluster, batch, seq_len, layout in BUCKETS:
        buckets = size_buckets(_model(name, cluster, batch, seq_len), Layout.parse(layout))
        sizes = " ".join("-".join(map(str, of_stage)) for of_stage in buckets.buckets)
        rows.append(
            (
                "buckets",
                name,
                cluster,
                seq_len,
                layout,
                buckets.given_s,
                buckets.step_time_s,
                sizes,
                buckets.seconds,
            )
        )
    columns = [
        "sizes of",
        "model",
        "cluster",
        "seq_len",
        "layout",
        "usual_s",
        "found_s",
        "sizes",
        "seconds",
    ]
    table = pd.DataFrame(rows, columns=pd.Index(columns))
    # Beside the times that it is made of.
    table.insert(7, "gain", 1 - table.found_s / table.usual_s)
    return table


def _mixed_chain(seed: int) -> Chain:
    """A chain whose transfers take four times as long as a layer's forward."""
    return random_chain(100 + seed, layers=192, stages=32, transfer=4.0)


def _model(name: str, cluster: str, batch: int, seq_len: int) -> StepProblem:
    """A model of the catalog on a cluster of the catalog."""
    return step_problem(
        catalog.model(name), catalog.cluster(cluster), Job(global_batch=batch, seq_len=seq_len)
    )


def _suffix(full_layers: tuple[int, ...] | None) -> str:
    """The number of fully recomputed layers of each stage, where stages differ, as text."""
    return f", full in {'-'.join(map(str, full_layers))}" if full_layers else ""


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Run a function; returns its seconds and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
