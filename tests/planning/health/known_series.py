"""Step times of drawn logs, taken apart, kept in `known_series.csv`.

Logs of several formats have warm-ups, stalls, checkpoints, drifts, restarts and growing batches,
together and alone. A change that is meant to move what is said of them is followed by

    PYTHONPATH=tests:tests/ingest python tests/planning/health/known_series.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from stored_figures import StoredCase, write_cases
from written_logs import WrittenRun, write_log

from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import parse_log
from perfmodel.planning.health import StepSeries, step_series

TABLE = Path(__file__).with_suffix(".csv")
FORMATS = ("megatron", "torchtitan", "nanotron", "deepspeed", "hf-trainer", "maxtext", "composer")
N = 120
BATCHES = (*[128] * 30, *[256] * 30, *[512] * (N - 60))


def _steps(seed: int = 1, scatter: float = 0.01, usual_s: float = 3.0) -> np.ndarray:
    return usual_s * np.random.default_rng(seed).normal(1.0, scatter, N)


def _changed(
    places: dict[int, float], factor: np.ndarray | float = 1.0, **fields: Any
) -> np.ndarray:
    step_s = _steps(**fields) * factor
    for place, times in places.items():
        step_s[place] *= times
    return step_s


SAVES = dict.fromkeys(range(20, N, 20), 25.0)
RUNS: dict[str, dict[str, Any]] = {
    "warm-up": {"step_s": _changed({0: 9.0, 1: 3.0, 2: 1.5})},
    "stalls": {"step_s": _changed({0: 5.0, 33: 4.0, 34: 2.2, 71: 7.0, 100: 1.4})},
    "regular stalls": {"step_s": _changed(dict.fromkeys(range(10, N, 25), 3.0))},
    "trend": {"step_s": _changed({0: 2.0}, np.linspace(1.0, 1.3, N))},
    "falling": {"step_s": _changed({}, np.linspace(1.2, 1.0, N))},
    "jump": {"step_s": _changed({50: 3.0}, np.where(np.arange(N) < 70, 1.0, 1.25))},
    "scatter": {"step_s": _changed({}, scatter=0.12, seed=5)},
    "checkpoints": {"step_s": _steps(), "checkpoints": tuple(SAVES), "pause_after_s": SAVES},
    "pauses that nobody names": {
        "step_s": _steps(),
        "pause_after_s": {30: 60.0, 61: 45.0, 95: 80.0},
    },
    "evaluations": {
        "step_s": _steps(),
        "evaluations": (40, 80),
        "pause_after_s": {40: 30.0, 80: 32.0},
    },
    "growing batch": {
        "step_s": _changed({}, np.array(BATCHES) / 512 * 0.8 + 0.2),
        "batches": BATCHES,
    },
    "skipped": {"step_s": _steps(), "skipped": (5, 50, 51, 99)},
    "short": {"step_s": _steps()[:14]},
}


def figures(series: StepSeries) -> dict[str, float]:
    """Figures of a series by name, with each of its stalls, its drift and its smallest batch."""
    figures = {
        "lines": float(len(series.steps)),
        "seconds": float(series.seconds.sum()),
        "covered": float(series.covered.sum()),
        "warm": float(series.warm_up_steps),
        "warm_s": series.warm_up_s,
        "usual": series.usual_s,
        "scatter": series.scatter,
        "mean": series.mean_s,
        "before": series.before_drift_s,
        "drift_s": series.drift_s,
        "restarts": float(series.restarts),
        "skipped": float(series.skipped_steps),
        "untimed": float(series.untimed_events),
    }
    for i, stalls in enumerate(series.stalls):
        figures |= {
            f"stall{i}.{stalls.kind}": float(stalls.count),
            f"stall{i}.each": stalls.seconds_each,
        }
        figures |= {
            f"stall{i}.per_step": stalls.seconds_per_step,
            f"stall{i}.every": float(stalls.every or 0),
        }
    if series.drift is not None:
        figures |= {
            f"drift.{series.drift.kind}": series.drift.change,
            "drift.at": float(series.drift.at_step),
        }
    if series.small_batch is not None:
        figures |= {
            "small": float(series.small_batch.global_batch),
            "small_s": series.small_batch.step_s,
        }
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """What is said of the log of a steady run of every format, and of every other run."""
    for form in FORMATS:
        for name, changes in ({form: {"step_s": _steps()}} | RUNS).items():
            run = replace(WrittenRun(step_s=()), **changes)
            for save_every in (None, 20) if name in ("checkpoints", "regular stalls") else (None,):
                try:
                    log = parse_log(write_log(form, run))
                    tokens = run.global_batch * run.seq_len
                    series = step_series(log, tokens, run.devices, run.global_batch, save_every)
                except PerfModelError:
                    continue
                yield StoredCase(
                    form, name if save_every is None else f"{name}, said", figures(series)
                )


if __name__ == "__main__":
    write_cases(TABLE, cases())
