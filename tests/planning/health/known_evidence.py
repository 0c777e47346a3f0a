"""Probabilities of made-up faults under one kind of evidence each, kept in `known_evidence.csv`.

Steps, timers, clocks and peaks are given, so that no prediction and no fitted constant is among
what is stored: it is the arithmetic of `weigh`. A change that is meant to move it is followed by

    PYTHONPATH=tests python tests/planning/health/known_evidence.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stored_figures import StoredCase, write_cases

from perfmodel.ingest.logs import ClockRange, PhaseTimer
from perfmodel.planning.health._causes import DATA_LOADING, SLOW_RANK, Fault, Severity
from perfmodel.planning.health._evidence import Observed, likelihood, weigh
from perfmodel.planning.health._measurements import undecided_sentence

TABLE = Path(__file__).with_suffix(".csv")
STEP_ONLY = Observed(
    steady_s=11.5,
    expected_s=10.0,
    deviation=0.1,
    expected_sync_s=0.6,
    times_sync=True,
    one_rank=False,
    timers={},
    expected_passes_s=8.0,
    passes_ratio=None,
    clocks=None,
    usual_clock_hz=1.9e9,
    jump=None,
    batch_ratio=None,
    expected_small_batch_s=4.0,
    pipeline=False,
    peak_bytes=None,
    peak_counter="reserved",
    expected_peak_bytes=5e10,
)


def _fault(name: str, prior: float, *severities: Severity, setting: str = "") -> Fault:
    return Fault(
        name=name, title=name, prior=prior, severities=severities, remedy="", setting=setting
    )


def _severity(weight: float, step_s: float, **effects: Any) -> Severity:
    return Severity(description=f"{step_s:g} s", weight=weight, step_s=step_s, **effects)


FAULTS = (
    _fault(
        "slow link",
        0.7,
        _severity(0.4, 10.9, gradient_sync_s=1.5),
        _severity(0.6, 12.0, gradient_sync_s=2.7),
    ),
    _fault(
        "slow host",
        0.5,
        _severity(0.3, 11.0, small_batch_s=4.3),
        _severity(0.7, 13.0, small_batch_s=5.2),
    ),
    _fault(
        "low clocks", 0.4, _severity(1.0, 11.4, passes_s=9.3, small_batch_s=4.6, clock_share=0.85)
    ),
    _fault(
        SLOW_RANK,
        0.6,
        _severity(0.5, 11.2, passes_s=8.0),
        _severity(0.4, 12.5, passes_s=8.1),
        _severity(0.1, 9.9, passes_s=8.0),
    ),
    _fault(DATA_LOADING, 0.3, _severity(1.0, 11.6)),
    _fault(
        "recompute",
        0.2,
        _severity(1.0, 12.6, passes_s=10.5, peak_bytes={"reserved": 4e10}),
        setting="recompute",
    ),
    _fault("impossible", 0.0, _severity(1.0, 11.5)),
)


def _timers(**seconds: tuple[float, float]) -> dict[str, Any]:
    return {
        "timers": {
            name: PhaseTimer(least_s=least, most_s=most) for name, (least, most) in seconds.items()
        }
    }


EVIDENCE: dict[str, dict[str, Any]] = {
    "no slower": {"steady_s": 9.7},
    "hardly slower": {"steady_s": 10.4, **_timers(data=(0.1, 0.3))},
    "certain site": {"deviation": 0.001},
    "a jump": {"jump": 1.14},
    "a jump beside other evidence": {"jump": 1.3, "passes_ratio": 1.2, "peak_bytes": 6e10},
    "a growing batch": {"batch_ratio": 2.45},
    "a growing batch that was not predicted": {"batch_ratio": 2.45, "expected_small_batch_s": None},
    "compute times": _timers(compute=(7.0, 7.9)),
    "compute times of stages": {"pipeline": True, **_timers(compute=(7.0, 7.9))},
    "forward times": _timers(forward=(2.0, 2.3)),
    "compute times of one rank": _timers(compute=(7.0, 7.0)),
    "no compute": _timers(compute=(0.0, 7.0)),
    "synchronisation": _timers(gradient_sync=(1.4, 1.4)),
    "synchronisation of one rank": {"one_rank": True, **_timers(gradient_sync=(1.4, 1.4))},
    "synchronisation that spreads": _timers(gradient_sync=(1.4, 2.6)),
    "synchronisation and gathers": _timers(gradient_sync=(1.1, 1.1), weight_gather=(0.5, 0.6)),
    "synchronisation and gathers that spread": _timers(
        gradient_sync=(1.1, 1.9), weight_gather=(0.5, 0.6)
    ),
    "synchronisation with passes": {"times_sync": False, **_timers(gradient_sync=(1.4, 1.5))},
    "much synchronisation on a fast site": {"steady_s": 9.0, **_timers(gradient_sync=(2.4, 2.4))},
    "much synchronisation with gathers on a fast site": {
        "steady_s": 9.0,
        **_timers(gradient_sync=(1.4, 1.4), weight_gather=(0.9, 0.9)),
    },
    "slower by 7 %": {"steady_s": 10.7, **_timers(data=(0.1, 0.6))},
    "data": _timers(data=(0.2, 1.3)),
    "more data than excess": _timers(data=(0.2, 4.5)),
    "passes": {"passes_ratio": 1.12},
    "passes of stages": {"passes_ratio": 1.12, "pipeline": True},
    "passes of one rank": {"passes_ratio": 1.12, "one_rank": True},
    "passes that were not predicted": {"passes_ratio": 1.12, "expected_passes_s": 0.0},
    "clocks": {"clocks": ClockRange(least_hz=1.55e9, most_hz=1.6e9)},
    "one low clock": {"clocks": ClockRange(least_hz=1.55e9, most_hz=1.85e9)},
    "no clocks": {"clocks": ClockRange(least_hz=0.0, most_hz=1.85e9)},
    "a peak": {"peak_bytes": 4.4e10},
    "a peak of another counter": {"peak_bytes": 4.4e10, "peak_counter": "allocated"},
    "a peak that was not predicted": {"peak_bytes": 4.4e10, "expected_peak_bytes": None},
}


def figures(observed: Observed) -> dict[str, float]:
    """Probability of every fault and of none, what each explains by which severity, and the
    likelihood of the evidence without a fault and with a slow rank."""
    likely, no_fault = weigh(observed, FAULTS)
    figures = {"none": no_fault, "excess": observed.excess_s, "most": observed.most_explained_s}
    # A factor that all faults have in common does not show in their probabilities.
    figures["likelihood"] = likelihood(observed, None, None)
    figures["likelihood.slow"] = likelihood(observed, FAULTS[3], FAULTS[3].severities[0])
    for place, cause in enumerate(likely):
        name = cause.fault.name.replace(" ", "-")
        figures |= {f"{name}.place": place + 1.0, f"{name}.probability": cause.probability}
        figures |= {f"{name}.explains": cause.explains_s, f"{name}.step": cause.severity.step_s}
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """The step alone, then with every kind of evidence."""
    yield StoredCase("step", "step", figures(STEP_ONLY))
    for name, changes in EVIDENCE.items():
        yield StoredCase("step", name, figures(replace(STEP_ONLY, **changes)))


def sentences() -> Iterator[tuple[str, str]]:
    """What a log that cannot decide is said to lack, by what it has."""
    for form in ("megatron", "deepspeed", "maxtext"):
        for has in (set[str](), {"timers"}, {"clocks"}, {"batches"}, {"timers", "clocks"}):
            yield (
                f"{form} with {', '.join(sorted(has)) or 'steps'}",
                undecided_sentence(
                    form,
                    has_timers="timers" in has,
                    has_clocks="clocks" in has,
                    batch_grows="batches" in has,
                ),
            )


if __name__ == "__main__":
    write_cases(TABLE, cases())
