"""Names of ranges that say which pass runs inside them: `forward stage=1 micro_batch=3`, `step=7`, `optimizer`.

Written by `torch.profiler.record_function`, NVTX ranges or `jax.profiler.TraceAnnotation`; steps are also taken
from the profilers' own marks (`ProfilerStep#7`, `step_num`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ingest._measured_trace import PHASES

_PHASE_NAMES: Final = {name: name for name in PHASES if name} | {
    "fwd": "forward", "bwd": "backward", "update": "optimizer", "dgrad": "backward_input", "wgrad": "backward_weight",
}  # fmt: skip
_WORD: Final = re.compile(r"[\s,:;/|]+")
_TAG: Final = re.compile(r"(stage|micro_batch|microbatch|mb|step)[=#](\d{1,9})", re.I)
_TAG_NAMES: Final = {"microbatch": "micro_batch", "mb": "micro_batch"}


class Tags(NamedTuple):
    """What a range says; empty or -1 where it says nothing. In the order of the last fields of `Activity`."""

    phase: str = ""
    stage: int = -1
    micro_batch: int = -1
    step: int = -1


@dataclass(frozen=True)
class Range:
    """A range of time, on some clock."""

    start_s: float
    end_s: float
    tags: Tags


def parse_tags(name: str) -> Tags:
    """What the name of a range says; words that are none of ours are passed over."""
    profiler_step = re.fullmatch(r"ProfilerStep#(\d{1,9})", name)
    if profiler_step:
        return Tags(step=int(profiler_step[1]))
    if name.startswith("Optimizer.step"):
        return Tags(phase="optimizer")
    words = [word for word in _WORD.split(name) if word]
    found = {}
    for word in words:
        if tag := _TAG.fullmatch(word):
            found[_TAG_NAMES.get(tag[1].lower(), tag[1].lower())] = int(tag[2])
    # a phase is the first word, so that functions that happen to be called "forward" somewhere are none
    phase = _PHASE_NAMES.get(words[0].lower(), "") if words and (found or len(words) == 1) else ""
    return Tags(phase=phase, **found)


def tags_at(ranges: Iterable[Range], at_s: Float[np.ndarray, " events"]) -> list[Tags]:
    """For each time what the ranges around it say; inner ranges go before outer ones."""
    ranges = sorted(ranges, key=lambda r: r.start_s - r.end_s)  # longest first
    order = np.argsort(at_s, kind="stable")
    ordered = at_s[order]
    columns: dict[str, Int[np.ndarray, " events"]] = {
        name: np.full(len(at_s), -1) for name in ("phase", "stage", "micro_batch", "step")
    }
    for each in ranges:
        inside = order[np.searchsorted(ordered, each.start_s) : np.searchsorted(ordered, each.end_s, side="right")]
        if each.tags.phase:
            columns["phase"][inside] = PHASES.index(each.tags.phase)
        for name in ("stage", "micro_batch", "step"):
            if (value := getattr(each.tags, name)) >= 0:
                columns[name][inside] = value
    rows = zip(*(columns[name].tolist() for name in columns), strict=True)
    return [Tags(PHASES[max(phase, 0)], stage, micro_batch, step) for phase, stage, micro_batch, step in rows]


def with_default_phase(tags: Sequence[Tags], phases: Sequence[str]) -> list[Tags]:
    """The phases given, wherever no range says one."""
    return [t if t.phase else t._replace(phase=phase) for t, phase in zip(tags, phases, strict=True)]
