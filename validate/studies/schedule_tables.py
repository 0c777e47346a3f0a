"""What the papers say of their schedules, beside what ours do: bubbles, memory, staleness, measured
runs."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from perfmodel.prediction import EAGER
from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.schedule import get_schedule, schedule_facts, weight_versions
from perfmodel.timeline import compile_structure, makespan_lanes

_MEASURED = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
"""Ours with the memory of the zero-bubble authors' schedules, which are searched for."""
_OPS_PER_TRANSFER = 8
"""What Megatron-LM issues around a transfer: a buffer, send and receive, group start and end, two
waits, a synchronisation with the host."""
_TIMES = re.compile(r"TF ([\d.]+) TB ([\d.]+) TW ([\d.]+) Tcomm ([\d.]+)")


def bubble_table(depths: Iterable[int] = (4, 8, 16, 32)) -> pd.DataFrame:
    """Bubble fractions beside the formulas of Chimera's table 2; backwards take twice as long as
    forwards unless stated."""
    rows = []
    for p in depths:
        m = 2 * p
        formulas = [
            ("gpipe", m, 2.0, (p - 1) / (m + p - 1)),
            ("1f1b", m, 2.0, (p - 1) / (m + p - 1)),
            ("chimera", p, 2.0, (p - 2) / (1.5 * p + p - 2)),
            ("chimera", p, 1.0, (p - 2) / (2 * p + p - 2)),
            # a forward of two micro-batches lasts as long as a backward of one: 3 m / 2 slots of
            # work
            ("chimera-doubling", m, 2.0, (p - 2) / (1.5 * m + p - 2)),
        ]
        for name, micro_batches, backward_s, formula in formulas:
            facts = schedule_facts(name, p, micro_batches, backward_s=backward_s)
            rows.append((p, micro_batches, name, backward_s, facts.bubble_fraction, formula))
    return pd.DataFrame(rows, columns=["p", "m", "schedule", "T_b / T_f", "bubble", "formula"])


def memory_table(depths: Iterable[int] = (4, 8, 16, 32)) -> pd.DataFrame:
    """Chimera's table 2 with m = 2 p: weights of a stage and activations of a micro-batch, least
    and most."""
    names = ("pipedream", "pipedream-2bw", "gpipe", "gems", "1f1b", "chimera")
    rows = []
    for p in depths:
        for name in names:
            facts = schedule_facts(name, p, 2 * p)
            rows.append((p, name, _span(facts.weights), _span(facts.activations)))
    return pd.DataFrame(rows, columns=["p", "schedule", "weights / M", "activations / Ma"])


def _span(ends: tuple[float, float]) -> str:
    """The smallest and the largest value as text, or the one value if they are equal."""
    low, high = (f"{end:g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def version_table(
    workers: Iterable[int] = range(2, 17), micro_batches: Iterable[int] = range(2, 17)
) -> pd.DataFrame:
    """TiMePReSt's version difference (section 4.4): simulated in the figures' unit time, by the
    paper's formula floor((W + N - 2) / N), and by ours, ceil(W / (N + 1))."""
    rows = []
    for w in workers:
        for n in micro_batches:
            # Twenty mini-batches are enough for the difference to settle.
            versions = weight_versions(get_schedule("nf1b:1")(w, n, 1, 20), "latest")
            simulated = int(versions.steady_difference[0])
            rows.append((w, n, simulated, (w + n - 2) // n, -(-w // (n + 1)), versions.sequences))
    return pd.DataFrame(rows, columns=["W", "N", "simulated", "paper", "closed_form", "sequences"])


def zero_bubble_table(path: Path) -> pd.DataFrame:
    """Published zero-bubble runs against step times composed from the stage times that the rows
    state.

    Stages are taken to be equal. A transfer holds up its sender for the stated time, and for the
    host's time to issue it: `_OPS_PER_TRANSFER` operators of an eager framework. Nothing is fitted.
    """
    published: list[dict[Any, Any]] = pd.read_csv(path).to_dict("records")
    # Rows whose schedule we have, and whose notes state all four times.
    stated = [
        (row, times)
        for row in published
        if row["schedule"] in _MEASURED and (times := _TIMES.search(str(row["notes"])))
    ]
    rows = [row for row, _ in stated]
    composed_s = np.array([_composed_s(row, times) for row, times in stated]).reshape(-1, 2)
    table = pd.DataFrame(
        {
            "case_id": [row["case_id"] for row in rows],
            "schedule": [row["schedule"] for row in rows],
            "measured_s": [float(row["measured_iter_time_s"]) for row in rows],
            "stated_only_s": composed_s[:, 0],
            "predicted_s": composed_s[:, 1],
            "memory_gb": [row["measured_peak_memory_gb"] for row in rows],
        }
    )
    table["stated_only_error"] = table.stated_only_s / table.measured_s - 1
    table["error"] = table.predicted_s / table.measured_s - 1
    return table


def _composed_s(row: Mapping[str, Any], stated: re.Match[str]) -> Float[np.ndarray, "2"]:
    """Step time of a row from the stated times alone, and with the host's time per transfer."""
    host_s = np.array([0.0, _OPS_PER_TRANSFER * EAGER.host.host_op_s])
    forward_s, input_s, weight_s, send_s = (float(text) / 1e3 for text in stated.groups())
    name = _MEASURED[row["schedule"]]
    spec = ProgramSpec(
        schedule=name,
        stages=int(row["pp"]),
        micro_batches=int(row["num_microbatches"]),
        chunks=int(row["vpp"]) if name == "interleaved" else 1,
        sends="blocking",
    )
    # Authors time the two halves of a backward; a backward in one piece takes both.
    seconds = {
        Kind.FORWARD: forward_s,
        Kind.BACKWARD: input_s + weight_s,
        Kind.BACKWARD_INPUT: input_s,
        Kind.BACKWARD_WEIGHT: weight_s,
    }

    def spans(program: ProgramSpec) -> Float[np.ndarray, "2"]:
        """Makespans without and with the host's time."""
        structure = build(program)
        durations = np.array(
            [seconds.get(Kind(kind), 0.0) / spec.chunks for kind in structure.class_kind]
        )
        sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
        lanes = np.where(sends, send_s + host_s[:, None], durations)
        return np.asarray(makespan_lanes(compile_structure(structure), lanes))

    if not spec.scheduler.staggered:
        return spans(spec)
    # devices go on alone: what each further step of a stream takes
    return spans(replace(spec, steps=3)) - spans(replace(spec, steps=2))
