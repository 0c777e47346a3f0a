"""TiMePReSt's VGG-16 on two machines (section 5): is there a setting with both its memory and its
epochs per hour? Its images and unlike cards, residual networks, digits learned by a convolutional
network; and the results section of its page."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import pandas as pd
from studies.schedule_tables import version_table
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.ir.interpreter import TimeToAccuracy, accuracy_curve, digits_task, map_task
from perfmodel.prediction import StepProblem, evaluate, layout_batches, step_problem
from perfmodel.prediction.memory import fitting, needed_memory
from perfmodel.schedule import PassTimes
from perfmodel.spec import Cluster, ConvNet, Job, Layout, NetworkLevel

IMAGES: Final = 50_000
"""Of CIFAR-100's training set."""
CONTEXT_BYTES: Final = 1e9
"""What a process holds that is no tensor, left out of the comparison."""
PAPER: Final = (0.5, 0.4)
"""Memory saved on stage 0 and stage 1, nearly (figure 16)."""
WITHIN: Final = 0.1
BASELINES: Final = {"vertical sync": "pipedream-vertical-sync", "stashing alone": "pipedream"}
"""PipeDream as this paper describes it, with one version of the weights on all stages for each
forward pass (section 3, equation 1), and as PipeDream's own paper runs it by default (section 3.3
there). Only the first keeps an old version on the last stage. The first was added after results
against the second had been seen."""
SPEED: Final = "epochs/h over PipeDream's"
NETWORKS: Final = (1, 10, 100)
"""Gbit/s between the machines; the paper does not tell."""
BATCHES: Final = (32, 128)
MICRO_BATCHES: Final = (2, 4, 8, 16)
SEEDS: Final = 3
IMAGES_OF: Final = {"CIFAR-100": (32, 100), "Tiny-ImageNet-200": (64, 200), "ImageNet": (224, 1000)}
"""Height and width of the images of a data set, and its classes; the paper trains on the first two,
and does not tell whether it enlarges them."""
ACCURACIES: Final = {
    "a map": (map_task, 128, 6, 1.0, 0.9),
    "digits": (digits_task, 32, 12, 0.1, 0.9),
}
"""Task, mini-batch, epochs, learning rate and target accuracy."""


def two_machines(gbit_per_s: float) -> Cluster:
    """A cluster of two hosts with one Turing device each (the chip of the paper's RTX 6000)."""
    device = catalog.device("Titan-RTX")
    levels = (
        NetworkLevel(
            name="none",
            size=1,
            bandwidth_bytes_per_s=device.link_bandwidth_bytes_per_s,
            latency_s=1e-5,
        ),
        NetworkLevel(
            name="Ethernet", size=2, bandwidth_bytes_per_s=gbit_per_s / 8 * 1e9, latency_s=5e-5
        ),
    )
    return Cluster(name="two machines", device=device, levels=levels, max_devices=2)


def variants(micro_batches: int) -> dict[str, str]:
    """Orders of nF1B: that of the paper's figures, the default, and one that runs freely."""
    return {"order of figures": "nf1b:1", "default": "nf1b", "free": f"nf1b:{2 * micro_batches}"}


def settings_table() -> pd.DataFrame:
    """Every cut of VGG-16's 21 layers, mini-batch, N, order and link: memory saved on both stages
    and epochs per hour relative to each of `BASELINES` with the same cut, mini-batch and link."""
    layers = len(catalog.model("vgg-16").stack)  # pyright: ignore[reportAttributeAccessIssue]
    rows: list[dict[str, Any]] = []
    for gbit, batch in product(NETWORKS, BATCHES):
        rows += _settings_of(gbit, batch, layers)
    return pd.DataFrame(rows)


def _settings_of(gbit_per_s: float, batch: int, layers: int) -> list[dict[str, Any]]:
    """Rows of `settings_table` of one link and mini-batch."""
    job = Job(global_batch=batch, seq_len=1, dtype="fp32", optimizer="sgd")
    problem = step_problem(catalog.model("vgg-16"), two_machines(gbit_per_s), job)

    # Of every cut first PipeDream, which takes a mini-batch at once, then nF1B's micro-batches.
    keys, layouts = [], []
    for cut in range(1, layers):
        pipedream = Layout(pp=2, micro_batch=batch, partition=(cut, layers - cut))
        for versions, schedule in BASELINES.items():
            keys.append((cut, 1, versions))
            layouts.append(replace(pipedream, schedule=schedule))
        for n in MICRO_BATCHES:
            for order, schedule in variants(n).items():
                keys.append((cut, n, order))
                layouts.append(replace(pipedream, micro_batch=batch // n, schedule=schedule))
    step_s = evaluate(problem, layouts).step_time_s
    peaks = [_peaks_of_stages(problem, layout) for layout in layouts]

    rows = []
    bases: dict[str, tuple[float, list[float]]] = {}
    for (cut, n, order), seconds, peak in zip(keys, step_s.tolist(), peaks, strict=True):
        if order in BASELINES:
            bases[order] = (seconds, peak)
            continue
        for versions, (base_s, base_peak) in bases.items():
            saved_0, saved_1 = _saved(peak, base_peak)
            rows.append(
                {
                    "PipeDream with": versions,
                    "Gbit/s": gbit_per_s,
                    "mini-batch": batch,
                    "layers": f"{cut}-{layers - cut}",
                    "N": n,
                    "order": order,
                    "stage 0 saved": saved_0,
                    "stage 1 saved": saved_1,
                    SPEED: base_s / seconds,
                    "PipeDream's epochs/h": 3600 * batch / (IMAGES * base_s),
                }
            )
    return rows


def _peaks_of_stages(problem: StepProblem, layout: Layout) -> list[float]:
    """Peak bytes of both stages, without what a process holds that is no tensor."""
    return [rank.peak - CONTEXT_BYTES for rank in needed_memory(problem, layout)]


def _saved(peaks: list[float], base_peaks: list[float]) -> list[float]:
    """Share of a baseline's memory that is saved on each stage."""
    return [1 - peak / base_peak for peak, base_peak in zip(peaks, base_peaks, strict=True)]


def networks() -> dict[str, ConvNet]:
    """VGG-16 and ResNet-50 at the image size of each data set."""
    by_title: dict[str, ConvNet] = {}
    for data, (size, classes) in IMAGES_OF.items():
        for net in (catalog.vgg16(size, classes), catalog.resnet(50, size, classes)):
            title = f"{net.name}, {data} ({size} x {size})"
            # Names of their own: the catalog's are of other images.
            by_title[title] = replace(net, name=f"{net.name}-{size}", aliases=())
    return by_title


def images_table() -> pd.DataFrame:
    """The default order against each of `BASELINES` for every network and image, on two machines
    alike and on the paper's unlike ones: 10 Gbit/s, mini-batches of 128, every cut, N from 2 to 16,
    both orders of the unlike machines.

    A setting and the PipeDream that it is held against have the same network, machines, cut and
    mini-batch, and both fit the 24 and 8 GB that the unlike cards have.
    """
    rows: list[dict[str, Any]] = []
    machines: dict[str, tuple[Cluster, tuple[tuple[str, ...] | None, ...]]] = {
        "alike": (two_machines(10), (None,)),
        "RTX 6000, RTX 2080": (
            catalog.cluster("timeprest"),
            (("rtx6000", "rtx2080"), ("rtx2080", "rtx6000")),
        ),
    }
    settings = product(BASELINES.items(), networks().items(), machines.items())
    for (versions, schedule), (name, net), (machines_name, (cluster, orders)) in settings:
        job = Job(global_batch=128, seq_len=1, dtype="fp32", optimizer="sgd")
        problem = step_problem(net, cluster, job)
        # A network is cut between its layers, of which the problem knows how many there are.
        (even,) = layout_batches(problem, [Layout(pp=2, micro_batch=128, kinds=orders[0])])
        layers = sum(count for block, count in even.tables[0].pairs if block.is_layer)
        tables = []
        for kinds, cut in product(orders, range(1, layers)):
            pipedream = Layout(
                pp=2, micro_batch=128, schedule=schedule, partition=(cut, layers - cut), kinds=kinds
            )
            tried = [
                replace(pipedream, micro_batch=128 // n, schedule="nf1b") for n in MICRO_BATCHES
            ]
            tables.append(_against(problem, pipedream, tried))
        table = pd.concat(tables)
        table = table[table["fits"]]
        # More epochs per hour for more memory is a trade, and no win.
        faster = table[SPEED] > 1
        dominates = dominating(table)
        rows.append(
            {
                "PipeDream with": versions,
                "network and images": name,
                "machines": machines_name,
                "settings that fit": len(table),
                "faster": int(faster.sum()),
                "no more memory and faster": int(dominates.sum()),
                "epochs/h, most": table[SPEED].max(),
                "epochs/h, most with no more memory": table[dominates][SPEED].max(),
                "stage 0 saves, most": table["stage 0 saved"].max(),
                "stage 1 saves, most": table["stage 1 saved"].max(),
            }
        )
    return pd.DataFrame(rows)


def _against(problem: StepProblem, base: Layout, tried: list[Layout]) -> pd.DataFrame:
    """Memory saved by layouts on both stages, and their epochs per hour relative to a base."""
    # Base and settings in one call, as lanes of one program.
    base_s, *step_s = evaluate(problem, [base, *tried]).step_time_s.tolist()
    base_fits, *fits = fitting(problem, [base, *tried]).tolist()
    base_peaks = _peaks_of_stages(problem, base)
    rows = []
    for layout, seconds, layout_fits in zip(tried, step_s, fits, strict=True):
        saved_0, saved_1 = _saved(_peaks_of_stages(problem, layout), base_peaks)
        rows.append(
            {
                "stage 0 saved": saved_0,
                "stage 1 saved": saved_1,
                SPEED: base_s / seconds,
                "fits": layout_fits and base_fits,
            }
        )
    return pd.DataFrame(rows)


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """One row per baseline and order: the most memory saved and the most epochs per hour over all
    settings, and the number of settings that save what the paper does (within `WITHIN`) on stage 0
    or stage 1, train faster than PipeDream, or do all three."""
    rows = []
    for (versions, order), settings in table.groupby(["PipeDream with", "order"], sort=False):
        first, second = (
            (settings[f"stage {i} saved"] - share).abs() <= WITHIN for i, share in enumerate(PAPER)
        )
        faster = settings[SPEED] > 1
        rows.append(
            {
                "PipeDream with": versions,
                "order": order,
                "settings": len(settings),
                "stage 0 saves, most": settings["stage 0 saved"].max(),
                "stage 1 saves, most": settings["stage 1 saved"].max(),
                "epochs/h, most": settings[SPEED].max(),
                "stage 0 as paper": int(first.sum()),
                "stage 1 as paper": int(second.sum()),
                "faster": int(faster.sum()),
                "stage 0 and faster": int((first & faster).sum()),
                "all": int((first & second & faster).sum()),
                "no more memory and faster": int(dominating(settings).sum()),
            }
        )
    return pd.DataFrame(rows)


def dominating(table: pd.DataFrame) -> pd.Series:
    """Settings that train faster than PipeDream with no more memory on either stage."""
    return (table[SPEED] > 1) & (table["stage 0 saved"] >= 0) & (table["stage 1 saved"] >= 0)


def usual_table(table: pd.DataFrame) -> pd.DataFrame:
    """The fastest cut for PipeDream, at 10 Gbit/s, the larger mini-batch and N = 4."""
    is_usual = (table["Gbit/s"] == 10) & (table["mini-batch"] == BATCHES[-1]) & (table["N"] == 4)
    usual = table[is_usual]
    # Users cut for speed: PipeDream's best cut is the fair one to compare at.
    best_cut = usual["layers"].iloc[int(usual["PipeDream's epochs/h"].argmax())]
    best_cut_rows = usual[usual["layers"] == best_cut]
    return best_cut_rows.sort_values("PipeDream with", ascending=False, kind="stable")


def accuracy_table(data: str) -> pd.DataFrame:
    """Epochs and time to a test accuracy on real data (`ACCURACIES`), in two stages and four
    micro-batches.

    Mini-batches are of one size for all schedules; least and most of the seeds. A forward of a
    micro-batch takes 1, a backward 2.
    """
    task, mini_batch, epochs, learning_rate, target = ACCURACIES[data]
    # A backward takes twice a forward; messages take no time.
    passes = PassTimes.uniform(2, 1.0, 2.0)
    rows = []
    for name in ("pipedream", "pipedream-2bw", "nf1b:1", "nf1b", "gpipe", "1f1b"):
        # Several seeds, as the epoch at which a target is reached is chance in part.
        curves = [
            accuracy_curve(
                name,
                passes,
                micro_batches=4,
                mini_batch=mini_batch,
                epochs=epochs,
                learning_rate=learning_rate,
                seed=seed,
                task=task,
            )
            for seed in range(SEEDS)
        ]
        summary = TimeToAccuracy.of(curves, target)
        rows.append(
            {
                "schedule": name,
                "reached": f"{summary.reached} of {SEEDS}",
                "epochs": _span(summary.epochs),
                "time": _span(summary.time_s),
                "last accuracy": _span(summary.last_accuracy),
            }
        )
    return pd.DataFrame(rows)


def _span(ends: tuple[float, float] | None) -> str:
    """The smallest and the largest value as text, one value if they are equal, a dash if no seed
    reached the accuracy."""
    if ends is None:
        return "-"
    least, most = ends
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def timeprest_page(_folder: Path) -> str:
    """Format the page of all tables."""
    settings = settings_table()
    summary = summary_table(settings)
    first, second = PAPER
    images = images_table()
    on_map = accuracy_table("a map")
    on_digits = accuracy_table("digits")
    map_sentence = _accuracy_sentence("the map", on_map, ACCURACIES["a map"][2])
    digits_sentence = _accuracy_sentence("digits", on_digits, ACCURACIES["digits"][2])
    return f"""## Results

{_versions()}

### VGG-16 on two machines against PipeDream (section 5, figures 15 and 16)

The paper: nearly {first:.0%} less memory on stage 0 and {second:.0%} on stage 1, and more epochs per hour. It says of
the cut only that it balances memory (section 4.1), and states neither N, nor the mini-batches, nor what is between the
machines, nor whether CIFAR-100's images of 32 x 32 pixels and Tiny-ImageNet's of 64 x 64 are enlarged. Its PipeDream
takes one version of the weights on all stages (`vertical sync`: section 3, equation 1); PipeDream's own paper leaves
this off by default (`stashing alone`). Both take the same time and differ in the memory of the last stage. That the
paper means vertical sync was read after the results against `stashing alone` were known.

First VGG-16 as published, for 224 x 224: every cut, several N, mini-batches and links, each against PipeDream with the
same cut, mini-batch and link (epochs/h 1: as fast; memory saved is a share of PipeDream's on that stage, without what a
process holds that is no tensor). {_whole_sentence(summary)}

{markdown_table(summary)}
{_stage_1_sentence(summary)}

{_faster_sentence(settings)}

The cut that is fastest for PipeDream, at one link and N; PipeDream's epochs are of CIFAR-100's {IMAGES:,} images:

{markdown_table(usual_table(settings))}
### The paper's images, unlike cards, and residual networks

The default order against PipeDream with the same network, images, machines and cut, at 10 Gbit/s and mini-batches of
128, N from 2 to 16; cuts and orders of the unlike machines of which both fit into the cards. The paper trains VGG-16 on
the first two data sets alone:

{markdown_table(images)}
{_images_sentence(images)}

### Epochs and time to an accuracy (figures 11 to 14)

Not VGG-16 on CIFAR-100, in two stages, mini-batches of one size for all schedules, weights by each schedule's versions,
time by its timeline in forwards of a micro-batch, without messages between the stages. A dense network learns land from
sea on a real map, to an accuracy of {ACCURACIES["a map"][-1]:.0%}:

{markdown_table(on_map)}
A convolutional network of four layers learns the handwritten digits that scikit-learn ships, 8 x 8 pixels, to
{ACCURACIES["digits"][-1]:.0%}:

{markdown_table(on_digits)}
The paper finds nF1B slower in epochs and faster in time than PipeDream. {map_sentence}
{digits_sentence}
"""


def _whole_sentence(summary: pd.DataFrame) -> str:
    """Sentence on how many settings have the paper's memory on both stages and are faster, by
    baseline."""
    counts = []
    for versions, rows in summary.groupby("PipeDream with", sort=False):
        agreeing = int(rows["all"].sum())
        settings = int(rows["settings"].sum())
        counts.append(f"**{agreeing}** of {settings} against PipeDream with {versions}")
    return (
        f"Settings with the paper's memory on both stages (within {WITHIN:.0%} of PipeDream's) and more epochs per "
        f"hour: {' and '.join(counts)}."
    )


def _stage_1_sentence(summary: pd.DataFrame) -> str:
    """Sentence on the largest saving on stage 1 of any setting, and on what can be saved there."""
    by_baseline = summary.groupby("PipeDream with", sort=False)
    most = [f"{rows['stage 1 saves, most'].max():.0%} with {name}" for name, rows in by_baseline]
    reached = int(summary["stage 1 as paper"].sum())
    beginning = f"{reached} settings save" if reached else "No setting saves"
    return (
        f"{beginning} {PAPER[1]:.0%} on stage 1 within {WITHIN:.0%}; the most is {' and '.join(most)}. With vertical sync "
        "PipeDream's last stage holds two versions of its weights, by stashing alone one. Either way its backward "
        "follows its forward at once, so that it holds the activations of one mini-batch, and nF1B has to hold those "
        "of a mini-batch too until its one backward. What is left to save is the second version and working space of "
        f"smaller passes. Stage 0, which stashes a version and a second mini-batch, saves up to "
        f"{summary['stage 0 saves, most'].max():.0%}."
    )


def _images_sentence(images: pd.DataFrame) -> str:
    """Sentence on where the default order wins, and on its savings on stage 1 by network."""
    sentences = []
    for versions, rows in images.groupby("PipeDream with", sort=False):
        winning = rows[rows["no more memory and faster"] > 0]
        best = rows.iloc[int(rows["epochs/h, most with no more memory"].fillna(0).argmax())]
        sentences.append(
            f"Against PipeDream with {versions}, some settings of {len(winning)} of {len(rows)} rows are faster with "
            f"no more memory on either stage, by up to {best['epochs/h, most with no more memory']:.2f} times "
            f"({best['network and images']}, machines {best['machines']})."
        )
    saved = []
    for name in ("vgg-16", "resnet-50"):
        network_rows = images[images["network and images"].str.startswith(name)]
        most = network_rows.iloc[int(network_rows["stage 1 saves, most"].argmax())]
        saved.append(f"{most['stage 1 saves, most']:.0%} on {most['network and images']}")
    sentences.append(
        f"On stage 1, where the paper saves {PAPER[1]:.0%}, at most {' and '.join(saved)} are saved."
    )
    return " ".join(sentences)


def _faster_sentence(settings: pd.DataFrame) -> str:
    """Sentence on how many settings of the default order save time without losing memory, by link,
    and by how much."""
    sentences = []
    default_rows = settings[settings["order"] == "default"]
    for versions, version_rows in default_rows.groupby("PipeDream with", sort=False):
        # Only settings that win without more memory are counted.
        winning = version_rows[dominating(version_rows)]
        by_link = [
            f"{int(dominating(rows).sum())} at {gbit} Gbit/s"
            for gbit, rows in version_rows.groupby("Gbit/s")
        ]
        fastest = f", by up to {winning[SPEED].max():.2f} times" if len(winning) else ""
        sentences.append(
            f"In {len(winning)} of {len(version_rows)} settings the default order is faster than PipeDream with {versions} "
            f"and needs no more memory on either stage{fastest}: {', '.join(by_link)}."
        )
    return (
        f"{' '.join(sentences)} Without messages its steps follow one another as fast as PipeDream's and no faster "
        "(above); messages of micro-batches overlap with passes that wait for PipeDream's messages of whole "
        "mini-batches."
    )


def _accuracy_sentence(data: str, table: pd.DataFrame, epochs: int) -> str:
    """Sentence on nF1B's epochs and time beside PipeDream's."""
    # The paper compares its default order with PipeDream's.
    by_name = table.set_index("schedule")
    ours, pipedream = by_name.loc["nf1b"], by_name.loc["pipedream"]
    # A schedule that no seed brings to the target has neither epochs nor time.
    if "-" in (ours["epochs"], pipedream["epochs"]):
        return (
            f"On {data} the default order reaches the target with {ours['reached']} seeds, PipeDream with "
            f"{pipedream['reached']}, in {epochs} epochs."
        )
    return (
        f"On {data} the default order takes {ours['epochs']} epochs, PipeDream {pipedream['epochs']}; in time "
        f"{ours['time']} and {pipedream['time']}."
    )


def _versions() -> str:
    """Section on the version difference: the paper's formula and ours, simulated."""
    versions = version_table()
    # The formula is shown wrong by its smallest counterexample.
    wrong = versions[versions.simulated != versions.paper]
    first = wrong.iloc[0]
    return f"""### Version difference (section 4.4)

Simulated for W and N from 2 to 16: floor((W + N - 2) / N) is right in {len(versions) - len(wrong)} of {len(versions)}
cases; the smallest counterexample is W = {first.W}, N = {first.N} (formula {first.paper}, simulated {first.simulated}).
ceil(W / (N + 1)) is right in {(versions.simulated == versions.closed_form).sum()}: backwards start N + 1 slots apart,
as the paper says of its figure 7 (section 4.2); its formula assumes instead that the difference is 1/N below
(W + N - 1) / N, the mini-batches that enter until the first forward ends if one enters every N slots (equations 17
and 18). The paper's condition for a single sequence of updates, W <= N + 1 (equation 11), holds in
{((versions.sequences == 1) == (versions.W <= versions.N + 1)).sum()} of {len(versions)} cases.

{markdown_table(wrong.head(5))}"""
