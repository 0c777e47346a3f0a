"""Named groups of published runs and the error to reach on each: over their runs, with the best
known elsewhere, and as means over sources, each counting the same."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

Chosen = Callable[[pd.DataFrame], pd.Series]


@dataclass(frozen=True)
class Bar:
    """An error that the predictions are to reach."""

    name: str
    rows: Chosen
    """Which runs count."""
    statistic: Literal["mean", "median"]
    time: float | None = None
    """Step time error to reach, a fraction; None for none."""
    memory: float | None = None
    """The same of peak memory."""
    elsewhere: str = "-"
    """Best figure known of others, with what it rests on."""
    missing: str = ""
    """Which term is missing where the bar is missed, and what shows it."""


def _starts(column: str, *starts: str) -> Chosen:
    """A filter that chooses runs by how the text of a column begins."""
    return lambda runs: pd.Series(runs[column].astype(str).str.startswith(starts))


def playbook(runs: pd.DataFrame) -> pd.Series:
    """Runs of the ultra-scale playbook's sweep."""
    return pd.Series(runs["case_id"].str.startswith("usp-"))


def _one_stage(runs: pd.DataFrame) -> pd.Series:
    """Runs of the playbook without a pipeline, tensor parallelism within a node."""
    return pd.Series(playbook(runs) & (runs["pp"] == 1) & (runs["tp"] <= 8))


def _nvidia_llama(runs: pd.DataFrame) -> pd.Series:
    """Runs of Llama in NVIDIA's tables."""
    return pd.Series(
        runs["source"].str.startswith("NVIDIA") & runs["model"].astype(str).str.startswith("llama")
    )


BARS = (
    Bar(
        "Korthikanti T5 + SC21 T1",
        _starts("case_id", "korthikanti-t5", "megatron-sc21"),
        "mean",
        0.04,
        elsewhere="3.65 % (tuned on it) / 10.3 %",
        missing="What a year of software and the number of devices did: with the same micro-batches per replica and "
        "full recompute, 530B took longer on more devices in 2021 than on fewer in 2022; predicted, both take the "
        "same. And tp up to 2 with heads of 96 elements (1.7B, 3.6B), predicted too fast, as vTrain's 3.6B.",
    ),
    Bar(
        "vTrain, several nodes",
        _starts("case_id", "vtrain-multi"),
        "mean",
        0.08,
        elsewhere="14.7 % (paper), 19.7 %",
        missing="A few runs are far off where their neighbours are not (`validate/end_to_end.md`).",
    ),
    Bar(
        "vTrain, one node",
        _starts("case_id", "vtrain-single"),
        "mean",
        0.07,
        elsewhere="8.4 % (paper)",
        missing="Runs with tp = 8 take longer than predicted, though they launch no more operators than those with "
        "tp = 4; the head of tp = 1 takes several times that of tp = 2; and products of hidden 2048 on two devices are "
        "faster than in the kernel tables.",
    ),
    Bar(
        "SimuMax B200",
        _starts("case_id", "simumax"),
        "mean",
        0.04,
        0.008,
        elsewhere="5.6 % / memory 0.46 %",
        missing="About a millisecond per layer and micro-batch that no tensor parallelism divides, and attention at "
        "32k to 128k tokens, which was never measured there; products take longer than their power limit has it.",
    ),
    Bar(
        "llm-foundry FSDP",
        _starts("case_id", "llmf"),
        "mean",
        0.05,
        elsewhere="naive rate 9.8 %",
        missing="Attention "
        "of 2023 (Triton's first generation), slower in runs of 16k tokens and more; and runs with few sequences per "
        "device, near the limit of memory, which are predicted too fast.",
    ),
    Bar(
        "Zero Bubble",
        _starts("case_id", "zb-"),
        "mean",
        0.04,
        elsewhere="14.4 %",
        missing="Products take longer in its steps than under the power limit: most of its runs come out too fast.",
    ),
    Bar(
        "BLOOM tuning",
        _starts("case_id", "bloom"),
        "mean",
        0.07,
        elsewhere="naive 11 %",
        missing="Runs with 12, 14 and 26 heads of 128 elements per device take longer than runs that differ in the "
        "number of heads alone; something per micro-batch and stage that does not grow with it (with tp = 8, small "
        "micro-batches are predicted too fast); the links inside a node, of which the table says '4 between GPU "
        "pairs'; heads of 108 and 150 elements, whose rows do not begin on 16 bytes: no table holds such 16-bit "
        "products of Ampere; and the network, bettered on 25 February by an unknown amount.",
    ),
    Bar(
        "NVIDIA Llama tables",
        _nvidia_llama,
        "mean",
        0.08,
        elsewhere="naive 9.9 %",
        missing="Recipes that the tables leave out: FSDP on GB200 is slower than predicted, packed fine-tuning over "
        "pipelines faster.",
    ),
    Bar(
        "playbook, pp = 1, tp <= 8",
        _one_stage,
        "median",
        0.10,
        elsewhere="27 %",
        missing="Runs of a second version of the framework (below), the network at 256 and 512 devices.",
    ),
    Bar(
        "playbook, peak memory",
        playbook,
        "median",
        memory=0.06,
        missing="Two versions of the framework, which no column tells apart: of the rows whose memory can, most "
        "gather inputs again in backward, as here, the others keep them, which takes more. "
        "What makes its pipelined runs slow is shown below.",
    ),
    Bar(
        "MaxText TPU",
        _starts("case_id", "maxtext"),
        "mean",
        0.10,
        missing="Attention kernels for training on TPU, whose forward is only bounded here by the rate of a backward.",
    ),
)


@dataclass(frozen=True)
class Group:
    """Runs whose errors are averaged within each source, and then over sources."""

    name: str
    rows: Chosen
    to_reach: float
    """A fraction."""
    statistic: Literal["mean error", "median bias"] = "mean error"
    """Mean over sources of their mean errors, or how far the median source's mean signed error is
    from 0."""


def _all(runs: pd.DataFrame) -> pd.Series:
    """A mask that selects every run."""
    return pd.Series(True, index=runs.index)


def _no_mlperf(runs: pd.DataFrame) -> pd.Series:
    """Choose runs outside the logs of MLPerf, which have more sources than all others together."""
    return ~runs["source"].astype(str).str.startswith("MLPerf")


def _number(runs: pd.DataFrame, column: str) -> pd.Series:
    """Numbers in a column of degrees or counts; 1 where a cell is empty."""
    cells: Any = runs[column] if column in runs else pd.Series(1.0, index=runs.index)
    # Cells may hold text; what is no number says nothing.
    numbers: Any = pd.to_numeric(cells, errors="coerce")
    return numbers.fillna(1.0)


def _experts(runs: pd.DataFrame) -> pd.Series:
    """Runs of mixtures of experts."""
    # Tables state experts in one of three ways.
    named = runs["family"].astype(str).str.contains("moe", case=False)
    return named | (_number(runs, "n_experts") > 1) | (_number(runs, "ep") > 1)


def _context(runs: pd.DataFrame) -> pd.Series:
    """Runs with context parallelism."""
    return _number(runs, "cp") > 1


GROUPS = (
    Group("every source", _all, 0.09),
    Group("every source but the logs of MLPerf", _no_mlperf, 0.09),
    Group("H100", _starts("device", "H100"), 0.10),
    Group("H200", _starts("device", "H200"), 0.10),
    Group("B200", _starts("device", "B200"), 0.10),
    Group("GB200", _starts("device", "GB200"), 0.10),
    Group("H100, H200, B200, GB200", _starts("device", "H100", "H200", "B200", "GB200"), 0.10),
    Group("mixtures of experts", _experts, 0.15),
    Group("context parallelism", _context, 0.12),
    Group("median source", _all, 0.03, "median bias"),
)


def group_means(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Mean errors of each of `GROUPS` that has a timed run, by the group's name.

    Args:
        frame: of `published_record`.

    Returns:
        `sources`, `n` (runs), `statistic`, `error`, `by_row` (mean error of all runs), `bias` (mean
        over sources of their mean signed errors) and `to_reach`.
    """
    measured_s = np.asarray(frame["measured_s"], float)
    predicted_s = np.asarray(frame["predicted_iter_time_s"], float)
    signed_error = predicted_s / measured_s - 1
    source = frame["source"].to_numpy(str)

    figures = {}
    for group in GROUPS:
        # Runs without a measured time have no error, whatever group they belong to.
        chosen = np.asarray(group.rows(frame), bool) & np.isfinite(signed_error)
        by_source = [signed_error[chosen & (source == name)] for name in np.unique(source[chosen])]
        if not by_source:
            continue

        # Within a source runs resemble each other: each source counts as one observation.
        bias = np.array([errors.mean() for errors in by_source])
        error = np.array([np.abs(errors).mean() for errors in by_source])
        statistics = {
            "mean error": float(error.mean()),
            "median bias": abs(float(np.median(bias))),
        }
        average = np.median if group.statistic == "median bias" else np.mean
        figures[group.name] = {
            "sources": len(bias),
            "n": int(chosen.sum()),
            "statistic": group.statistic,
            "error": statistics[group.statistic],
            "by_row": float(np.abs(signed_error[chosen]).mean()),
            "bias": float(average(bias)),
            "to_reach": group.to_reach,
        }
    return figures
