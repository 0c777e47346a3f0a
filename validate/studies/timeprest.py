"""TiMePReSt's VGG-16 on two machines (section 5): is there a setting with both its memory and its epochs per hour? And
the results section of its page."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pandas as pd
from studies.schedule_tables import version_table
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.ir.interpreter import TimeToAccuracy, accuracy_curve
from perfmodel.prediction import evaluate, needed_memory, step_problem
from perfmodel.schedule import PassTimes
from perfmodel.spec import Cluster, Job, Layout, NetworkLevel

IMAGES: Final = 50_000
"""Of CIFAR-100's training set."""
CONTEXT_BYTES: Final = 1e9
"""What a process holds that is no tensor, left out of the comparison."""
PAPER: Final = (0.5, 0.4)
"""Memory saved on stage 0 and stage 1, nearly (figure 16)."""
WITHIN: Final = 0.1
NETWORKS: Final = (1, 10, 100)
"""Gbit/s between the machines; the paper does not tell."""
BATCHES: Final = (32, 128)
MICRO_BATCHES: Final = (2, 4, 8, 16)
SEEDS: Final = 3


def two_machines(gbit_per_s: float) -> Cluster:
    """Two hosts of one Turing device each (the chip of the paper's RTX 6000)."""
    device = catalog.device("Titan-RTX")
    levels = (
        NetworkLevel(name="none", size=1, bandwidth_bytes_per_s=device.link_bandwidth_bytes_per_s, latency_s=1e-5),
        NetworkLevel(name="Ethernet", size=2, bandwidth_bytes_per_s=gbit_per_s / 8 * 1e9, latency_s=5e-5),
    )
    return Cluster(name="two machines", device=device, levels=levels, max_devices=2)


def variants(micro_batches: int) -> dict[str, str]:
    """nF1B in the order of the paper's figures, in the default order, and run freely."""
    return {"order of figures": "nf1b:1", "default": "nf1b", "free": f"nf1b:{2 * micro_batches}"}


def settings_table() -> pd.DataFrame:
    """Every cut of VGG-16's 21 layers, mini-batch, N, order and network: memory saved on both stages and epochs per
    hour relative to PipeDream with the same cut, mini-batch and network."""
    layers = len(catalog.model("vgg-16").stack)  # pyright: ignore[reportAttributeAccessIssue]
    rows: list[dict[str, Any]] = []
    for gbit, batch in product(NETWORKS, BATCHES):
        job = Job(global_batch=batch, seq_len=1, dtype="fp32", optimizer="sgd")
        problem = step_problem(catalog.model("vgg-16"), two_machines(gbit), job)
        keys, layouts = [], []
        for cut in range(1, layers):
            whole = Layout(pp=2, micro_batch=batch, schedule="pipedream", partition=(cut, layers - cut))
            keys.append((cut, 1, "pipedream"))
            layouts.append(whole)
            for n in MICRO_BATCHES:
                for order, schedule in variants(n).items():
                    keys.append((cut, n, order))
                    layouts.append(replace(whole, micro_batch=batch // n, schedule=schedule))
        step_s = evaluate(problem, layouts).step_time_s
        peaks = [[rank.peak - CONTEXT_BYTES for rank in needed_memory(problem, layout)] for layout in layouts]
        base: tuple[float, list[float]] = (0.0, [])
        for (cut, n, order), seconds, peak in zip(keys, step_s.tolist(), peaks, strict=True):
            if order == "pipedream":
                base = (seconds, peak)
                continue
            saved = [1 - own / other for own, other in zip(peak, base[1], strict=True)]
            rows.append(
                {
                    "Gbit/s": gbit, "mini-batch": batch, "layers": f"{cut}-{layers - cut}", "N": n, "order": order,
                    "stage 0 saved": saved[0], "stage 1 saved": saved[1], "epochs per hour": base[0] / seconds,
                    "PipeDream's": 3600 * batch / (IMAGES * base[0]),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Of every order over all settings: the most that it saves, the most epochs per hour, and how many settings save
    what the paper does (within `WITHIN`) on stage 0, on stage 1, train faster than PipeDream, and do all three."""
    rows = []
    for order, some in table.groupby("order", sort=False):
        first, second = ((some[f"stage {i} saved"] - share).abs() <= WITHIN for i, share in enumerate(PAPER))
        faster = some["epochs per hour"] > 1
        rows.append(
            {
                "order": order, "settings": len(some), "stage 0 saves, most": some["stage 0 saved"].max(),
                "stage 1 saves, most": some["stage 1 saved"].max(), "epochs/h, most": some["epochs per hour"].max(),
                "stage 0 as paper": int(first.sum()), "stage 1 as paper": int(second.sum()),
                "faster": int(faster.sum()), "stage 0 and faster": int((first & faster).sum()),
                "all": int((first & second & faster).sum()),
                "no more memory and faster": int(dominating(some).sum()),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def dominating(table: pd.DataFrame) -> pd.Series:
    """Which settings train faster than PipeDream with no more memory on either stage."""
    return (table["epochs per hour"] > 1) & (table["stage 0 saved"] >= 0) & (table["stage 1 saved"] >= 0)


def usual_table(table: pd.DataFrame) -> pd.DataFrame:
    """The cut that is fastest for PipeDream, at 10 Gbit/s, the larger mini-batch and N = 4."""
    some = table[(table["Gbit/s"] == 10) & (table["mini-batch"] == BATCHES[-1]) & (table["N"] == 4)]
    best = some.loc[some["PipeDream's"].idxmax(), "layers"]
    return some[some["layers"] == best]


def accuracy_table() -> pd.DataFrame:
    """Epochs and time to a test accuracy of 0.9 on a real map, in two stages and four micro-batches, mini-batches of
    128 alike for all schedules; least and most of the seeds. A forward of a micro-batch takes 1, a backward 2."""
    passes = PassTimes.uniform(2, 1.0, 2.0)
    rows = []
    for name in ("pipedream", "pipedream-2bw", "nf1b:1", "nf1b", "gpipe", "1f1b"):
        curves = [
            accuracy_curve(name, passes, micro_batches=4, mini_batch=128, epochs=6, learning_rate=1.0, seed=seed)
            for seed in range(SEEDS)
        ]
        found = TimeToAccuracy.of(curves, 0.9)
        rows.append(
            {
                "schedule": name, "reached": f"{found.reached} of {SEEDS}", "epochs": _span(found.epochs),
                "time": _span(found.time_s), "last accuracy": _span(found.last_accuracy),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def _span(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{ends[0]:.4g} to {ends[1]:.4g}" if ends[0] != ends[1] else f"{ends[0]:.4g}"


def timeprest_page(_folder: Path) -> str:
    """All tables."""
    settings = settings_table()
    summary = summary_table(settings)
    first, second = PAPER
    whole, most = int(summary["all"].sum()), float(summary["stage 1 saves, most"].max())
    stage_0, accuracy = float(summary["stage 0 saves, most"].max()), accuracy_table()
    return f"""## Results

{_versions()}

### VGG-16 on two machines against PipeDream (section 5, figures 15 and 16)

The paper: nearly {first:.0%} less memory on stage 0 and {second:.0%} on stage 1, and more epochs per hour; it tells
neither the cut of the network, nor N, nor what is between the machines. Here every cut, several N, mini-batches and
networks, each against PipeDream with the same cut, mini-batch and network (1: as fast). Of {len(settings)} settings
**{whole}** have both its memory (within {WITHIN:.0%} of the device) and more epochs per hour.

{markdown_table(summary)}
The reason is stage 1. PipeDream's last stage holds one version of its weights and one mini-batch, whose backward
follows its forward at once: there is no version to save, and nF1B has to keep the activations of all N micro-batches of
a mini-batch until its one backward. What it saves there, {most:.0%} at most, is working space of smaller passes. Stage
0, which stashes a version and a second mini-batch, saves up to {stage_0:.0%}.

{_faster_sentence(settings)}

The cut that is fastest for PipeDream, at one network and N:

{markdown_table(usual_table(settings))}
### Epochs and time to an accuracy (figures 11 to 14)

Not VGG-16 on CIFAR-100 but a small network on a real map, land or sea, in two stages: mini-batches of one size for all
schedules, weights by each schedule's versions, time by its timeline.

{markdown_table(accuracy)}
The paper finds nF1B slower in epochs and faster in time than PipeDream. {_accuracy_sentence(accuracy)}
"""


def _faster_sentence(settings: pd.DataFrame) -> str:
    """How many settings win in time without losing memory, in which order, and by how much."""
    of_default = settings[settings["order"] == "default"]
    winning = of_default[dominating(of_default)]
    if winning.empty:
        return "No setting of the default order is faster than PipeDream with no more memory on either stage."
    return (
        f"In {len(winning)} of {len(of_default)} settings the default order is faster than PipeDream with no more "
        f"memory on either stage, by up to {winning['epochs per hour'].max():.2f} times: messages of "
        "micro-batches overlap with passes where PipeDream's of whole mini-batches do not."
    )


def _accuracy_sentence(table: pd.DataFrame) -> str:
    """What nF1B takes here beside PipeDream, in epochs and in time."""
    by_name = table.set_index("schedule")
    ours, pipedream = by_name.loc["nf1b"], by_name.loc["pipedream"]
    return (
        f"Here the default order takes {ours['epochs']} epochs, PipeDream {pipedream['epochs']}; in time they take "
        f"{ours['time']} and {pipedream['time']} forwards of a micro-batch, without messages between the stages."
    )


def _versions() -> str:
    versions = version_table()
    wrong = versions[versions.simulated != versions.paper]
    first = wrong.iloc[0]
    return f"""### Version difference (section 4.4)

Simulated for W and N from 2 to 16: floor((W + N - 2) / N) is right in {len(versions) - len(wrong)} of {len(versions)}
cases; the smallest counterexample is W = {first.W}, N = {first.N} (formula {first.paper}, simulated {first.simulated}).
ceil(W / (N + 1)) is right in {(versions.simulated == versions.closed_form).sum()}: successive backwards start N + 1
slots apart, not N. There is a single sequence of updates if and only if W <= N + 1 in all cases:
{((versions.sequences == 1) == (versions.W <= versions.N + 1)).all()}.

{markdown_table(wrong.head(5))}"""
