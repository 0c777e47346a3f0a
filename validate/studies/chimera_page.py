"""The results section of Chimera's page: which terms of Piz Daint decide what the paper found, and
its figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.chimera import STUDIES, Conditions, chimera_table
from studies.chimera_figures import (
    CALIBRATED_ON,
    FACTORS,
    MEMORY_SCHEMES,
    RATES,
    calibrated_table,
    closed_form_table,
    large_batch_table,
    memory_table,
    pipelines_table,
    scaling_table,
    speedup_table,
    synchronisation_table,
    v100_table,
)
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.prediction import EAGER

GLOO_RATES: Final = (1.2e9, 2.4e9, 5.0e9, 10.2e9)
"""From gloo as measured on one core to the network's own rate."""
CHIMERA_2021: Final = catalog.framework("chimera@2021")
MARGINS: Final = (0.04, 0.12, 0.2, 0.25)
"""From what is always lost to what DeepSpeed saw with PyTorch of 2019: more than 30 % at worst
(ZeRO, arXiv 1910.02054, section 3.2)."""


def chimera_page(folder: Path) -> str:
    """Format the page of all tables, and draw speed-ups beside the paper's into `folder`."""
    scaling = {study.model: scaling_table(study) for study in STUDIES}
    draw_speedups(scaling, folder / "chimera.png")
    parts = [
        _HEAD,
        *_terms_parts(),
        *_choices_parts(),
        *_stage_time_parts(),
        *_scaling_parts(scaling),
        *_large_batch_parts(),
        *_pipelines_and_memory_parts(),
        "### 32 V100 (section 4.2.3)\n",
        _V100,
        markdown_table(v100_table()),
    ]
    return "\n".join(parts)


def _terms_parts() -> list[str]:
    """Section on which terms of the description decide, and on the two least known terms."""
    grid = sensitivity_table()
    return [
        "### Which terms decide\n",
        _TERMS,
        markdown_table(terms_table()),
        _GRID,
        markdown_table(grid),
        best_agreement(grid),
    ]


def _choices_parts() -> list[str]:
    """Section on each scheme's choice under both ways of sending messages."""
    parts = []
    for study in STUDIES:
        parts += [
            f"### {study.model} on {study.nodes} nodes, batch {study.batch} (figures 10, 11, 13)\n",
            "Messages by gloo:\n",
            markdown_table(chimera_table(study)),
            "At the network's own rate:\n",
            markdown_table(chimera_table(study, Conditions().at_rate(RATES["network"]))),
        ]
    return parts


def _stage_time_parts() -> list[str]:
    """Section on stage times calibrated on one row, and on the paper's closed form."""
    parts = ["### T_f calibrated beside T_f predicted (section 3.4)\n", _MEASURED]
    for study in STUDIES:
        parts += [f"{study.model}:\n", markdown_table(calibrated_table(study))]
    parts += ["### The paper's closed form beside the evaluator (section 3.4, figure 13)\n", _FORM]
    for study in STUDIES:
        parts += [f"{study.model}:\n", markdown_table(closed_form_table(study))]
    return parts


def _scaling_parts(scaling: dict[str, pd.DataFrame]) -> list[str]:
    """Section on weak scaling, and on the gain from reducing gradients early."""
    parts = ["### Weak scaling (figures 14 and 15)\n", _SCALING]
    for study in STUDIES:
        parts += [
            f"{study.model}, at the paper's depths and micro-batches:\n",
            markdown_table(scaling[study.model]),
        ]
    return [
        *parts,
        "### Reducing gradients early (figure 12)\n",
        _SYNC,
        markdown_table(synchronisation_table()),
    ]


def _large_batch_parts() -> list[str]:
    """Section on batches far above the depth, at a fixed depth."""
    parts = ["### Large batches on fixed nodes (figures 17 and 18)\n", _LARGE]
    for study in STUDIES:
        rates = large_batch_table(study)
        parts += [
            f"{study.model}, sequences/s:\n",
            markdown_table(rates),
            markdown_table(speedup_table(study, rates)),
        ]
    return parts


def _pipelines_and_memory_parts() -> list[str]:
    """Section on more than two pipelines, and on the memory of workers."""
    pipelines = pipelines_table()
    memory = memory_table()
    return [
        "### More pipelines (figure 19)\n",
        fastest_pipelines(pipelines),
        markdown_table(pipelines),
        "### Memory on 32 nodes (figure 9)\n",
        _MEMORY,
        memory_verdict(memory),
        markdown_table(memory),
    ]


def cumulative_terms() -> list[tuple[str, Conditions]]:
    """Descriptions of the conditions, from the hardware alone to the software that ran, one term
    after another."""
    # Each description below differs from the one before it in one term, so that a term's worth is
    # the difference of two rows.
    hardware = Conditions(
        cluster=catalog.cluster("piz-daint"),
        framework=EAGER,
        formula_gelu=False,
        stashes=False,
        full_pipelines=False,
    )
    roomy = catalog.framework("chimera@2021").replace(memory_margin=EAGER.memory.memory_margin)
    eager = replace(hardware, framework=roomy)
    gelu = replace(eager, formula_gelu=True)
    pipelines = replace(gelu, full_pipelines=True)
    stashes = replace(pipelines, stashes=True)
    allocator = replace(stashes, framework=catalog.framework("chimera@2021"))
    gloo = replace(allocator, cluster=catalog.cluster("piz-daint-gloo"))
    return [
        ("hardware alone, today's kernels", hardware),
        ("+ kernels of their code", eager),
        ("+ GELU written out", gelu),
        ("+ full pipelines", pipelines),
        ("+ 2BW's copies and loads", stashes),
        ("+ allocator of 2020", allocator),
        ("+ gloo over TCP", gloo),
    ]


def agreement(conditions: Conditions) -> dict[str, Any]:
    """Agreement of our model's choices and throughputs with the paper's: how many choices are the
    same, and the same in depth; the mean of |ours / paper's - 1| over the throughputs that the
    paper states; and Chimera's throughput over DAPPLE's and PipeDream-2BW's."""
    figures: dict[str, Any] = {}
    tables = [chimera_table(study, conditions) for study in STUDIES]
    # Two models and five schemes: too few to judge a term by one of them.
    both = pd.concat(tables)
    figures["choices"] = f"{both['same'].sum()} of {len(both)}"
    figures["depths"] = f"{both['same p'].sum()} of {len(both)}"
    # Throughputs are told of Chimera's, so that its own row says nothing.
    stated = both[both["scheme"] != "chimera"].dropna()
    ratio = np.asarray(stated["ours, of Chimera's"] / stated["paper, of Chimera's"])
    figures["throughputs off"] = float(np.abs(ratio - 1).mean())
    for study, table in zip(STUDIES, tables, strict=True):
        rows = table.set_index("scheme")["ours, of Chimera's"]
        for scheme, name in (("1f1b", "DAPPLE"), ("pipedream-2bw", "2BW")):
            figures[f"{study.model}, over {name}"] = float(1 / rows[scheme])
    return figures


PAPER: Final = {
    "choices": "",
    "depths": "",
    "throughputs off": np.nan,
    "bert-48, over DAPPLE": 1.19,
    "bert-48, over 2BW": 1.17,
    "gpt2-1.3b, over DAPPLE": 1.38,
    "gpt2-1.3b, over 2BW": 1.16,
}


def terms_table() -> pd.DataFrame:
    """Agreement as terms are added, the paper's own figures last."""
    rows = [{"term": name} | agreement(on) for name, on in cumulative_terms()]
    return pd.DataFrame([*rows, {"term": "paper"} | PAPER])


def sensitivity_table() -> pd.DataFrame:
    """Agreement over the two figures of the description that are least known: the rate at which
    gloo carried data, and the memory that was lost."""
    rows = []
    for rate in GLOO_RATES:
        for margin in MARGINS:
            on = Conditions().at_rate(rate).with_margin(margin)
            rows.append({"GB/s": rate / 1e9, "memory lost": f"{margin:.0%}"} | agreement(on))
    return pd.DataFrame(rows)


def best_agreement(grid: pd.DataFrame) -> str:
    """Sentence on the rate and memory of the grid that agree best with the paper."""
    # Cells say `7 of 10`.
    count = grid["choices"].str.split().str[0].astype(int)
    most = grid.iloc[int(count.argmax())]
    closest = grid.iloc[int(grid["throughputs off"].argmin())]
    best = (
        f"Most choices agree ({most['choices']}, {most['depths']} in depth) at {most['GB/s']:g} GB/s with "
        f"{most['memory lost']} of memory lost, throughputs best at {closest['GB/s']:g} GB/s (mean off "
        f"{closest['throughputs off']:.1%})."
    )
    why = ""
    if most["GB/s"] != closest["GB/s"]:
        why = (
            " No single rate does both: Bert-48's throughputs want a fast network, since Chimera reduces twice as many "
            "gradients as DAPPLE; GPT-2's depth wants memory to be short, so that only deep pipelines do without "
            "recompute."
        )
    return f"{best}{why} These are readings of the paper, not settings: nothing is set by them.\n"


def fastest_pipelines(table: pd.DataFrame) -> str:
    """Sentence on the paper's finding in figure 19 and on the number of pipelines that is fastest
    here."""
    # Columns are named by the number of pipelines.
    counts = [name for name in table.columns if name.endswith(" pipelines")]
    fastest = table[counts].astype(float).idxmax(axis=1).astype(str).str.removesuffix(" pipelines")
    sentences = [
        "The paper: two pipelines are best except at depth 32, where four are slightly faster."
    ]
    for messages, rows in table.groupby("messages", sort=False):
        best = [f"{fastest[i]} at depth {rows.loc[i, 'p']}" for i in rows.index]
        sentences.append(f"Fastest here with messages of `{messages}`: {', '.join(best)}.")
    return "\n".join(sentences) + "\n"


def memory_verdict(table: pd.DataFrame) -> str:
    """Sentence on which of the paper's statements on figure 9 hold here."""
    gpipe = table["gpipe"].str.contains("OOM")
    coarse = table["pipedream-2bw"].str.contains("OOM")
    below = table["chimera/1f1b"] < 1
    # Cells say `least to fullest` in GB, with `(OOM)` where that does not fit.
    fullest = table[list(MEMORY_SCHEMES)].apply(
        lambda cells: cells.str.extract(r"to ([\d.]+)")[0].astype(float)
    )
    least_of_others = fullest.drop(columns="gems").min(axis=1)
    return (
        f"Here GPipe runs out of memory in {gpipe.sum()} of {len(table)}, PipeDream-2BW in {coarse.sum()}; GEMS needs "
        f"least in {(fullest['gems'] < least_of_others).sum()}, and Chimera's peak is below DAPPLE's in {below.sum()}.\n"
    )


def draw_speedups(scaling: dict[str, pd.DataFrame], path: Path) -> None:
    """Chimera's speed-ups at the largest scale, ours under both rates beside the paper's."""
    import matplotlib

    # Draws into files, where no display is.
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(scaling), figsize=(9, 3.2), sharey=True)
    for ax, (model, table) in zip(axes, scaling.items(), strict=True):
        last = table[table["nodes"] == table["nodes"].max()].set_index("messages")
        schemes = [name for name in last.columns if name.startswith("over ")]
        # Three bars a scheme, side by side around its tick.
        for i, (name, colour) in enumerate(
            (("paper", "black"), ("network", "tab:blue"), ("gloo", "tab:orange"))
        ):
            heights = last.loc[name, schemes].astype(float)
            ax.bar(
                [x + 0.27 * (i - 1) for x in range(len(schemes))],
                heights,
                0.25,
                label=name,
                color=colour,
            )
        ax.set_xticks(
            range(len(schemes)), [name.removeprefix("over ") for name in schemes], rotation=20
        )
        ax.set_title(f"{model}, {last['nodes'].iloc[0]} nodes", fontsize=10)
        ax.axhline(1.0, color="grey", linewidth=0.6)
    axes[0].set_ylabel("Chimera's speed-up over")
    axes[-1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


_HEAD = """## Results

`1f1b` is DAPPLE, R recompute, `paper's/ours` the time of the paper's choice over that of ours, both by our evaluation.
The paper's choices are those of the legends of figures 14 and 15 (as transcribed by another reader), its throughputs
those of section 4.2.3 at the largest scale. Devices, network, kernels, optimizer, memory and the two ways of sending
messages are described by `--framework chimera@2021` and `--cluster piz-daint` or `piz-daint-gloo`, each figure with
its source; nothing is fitted on what is compared here.

![Chimera's speed-ups](../../validate/papers/chimera.png)
"""
_TERMS = """Added one after another, from a description that knows the hardware alone to that of what ran. `choices`:
the paper's depth, micro-batch and recompute, over both models and five schemes; `throughputs off`: mean of |ours /
paper's - 1| of the throughputs that the paper states.
"""
_GRID = """Two figures are known least: what gloo carried over TCP (first: measured elsewhere on one core; second:
twice that; last: the network), and the share of memory lost in torch's allocator of that time.
"""
_MEASURED = f"""The paper measures T_f, a stage's forward pass, by a microbenchmark and does not print it. Here it is
calibrated on one row instead: all kernels take `T_f x` times what they are predicted to, so that Chimera gains over
`{CALIBRATED_ON}` what the paper says at the largest scale ({FACTORS[0]:g} to {FACTORS[1]:g} is tried; `none does`: no
factor gives that row, and both columns are the prediction). The other rows and all choices follow.
"""
_FORM = """T_f and T_b are the mean of our stages, or the longest: the paper has equal ones, where here the last stage
has the head as well. The paper finds its form within a tenth of the throughputs that it measured, which are in a
picture only; ours is held against the evaluator, not against them. The same figures for any model: `perfmodel schedules
chimera --model M --cluster C --layout ...`.
"""
_SCALING = f"""PipeDream updates after every micro-batch, with the paper's smaller batches for it, at the fastest depth
and recompute that fit into memory, of which torch's allocator of that time loses
{CHIMERA_2021.memory.memory_margin:.0%} (an input, `memory_margin` of `--framework chimera@2021`; the grid above varies
it). Over PipeDream the paper's figure is the upper end that it states over asynchronous schemes.
"""
_SYNC = """`over eager`: throughput of the paper's `eager-sync-opt` over reducing every stage as soon as it is done;
`over end`: over reducing at the end. `loss`: share of a reduction's time by which passes beside it run longer (cost
of progress). Without such a cost starting early never hurts, so that the paper's 1.09 over `eager` on 64 nodes is out
of reach by construction. The paper does not state the cost of progress.
"""
_LARGE = """Direct concatenation (`chimera`) is the paper's best for Bert-48, forward doubling for GPT-2. Speed-ups
are means over the batches, the best way of each batch over the other scheme. All run at one depth and micro-batch per
model: 4 and 8 for Bert-48, 8 and 1 with recompute for GPT-2. Whether they fit into memory is not asked, so that GPipe,
which holds all micro-batches, takes DAPPLE's time. Backward halving runs backwards on halves of a micro-batch; one of a
single sequence cannot be halved.
"""
_MEMORY = """GB of the least and the fullest worker. The paper: GPipe out of memory everywhere, PipeDream the next,
PipeDream-2BW and DAPPLE usually fullest in their first worker, PipeDream-2BW out of memory on coarse stages, GEMS
least; Chimera's peak a little below DAPPLE's in four of six (`chimera/1f1b`: ours). Micro-batches and batch of the
figure are not in the text at hand: 512 sequences are taken, and micro-batches of 8 (Bert-48) and 1 (GPT-2), without
recompute.
"""
_V100 = """The paper: 1.10 to 2.39 over synchronous schemes, 1.05 to 1.89 over asynchronous ones (PipeDream among
them, left out here). Model, length and batch are not in the text at hand: Bert-48 with sequences of 512 tokens and 8
sequences per device are taken, on V100 in place of the P100 in Piz Daint's network. The paper's V100 are eight to a
server, joined by NVLink inside and InfiniBand between, so that this is no reproduction of its figure.
"""
