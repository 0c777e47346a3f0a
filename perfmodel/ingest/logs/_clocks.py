"""Step times from a log's time stamps, where its printed times or rates do not cover whole
steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from perfmodel.ingest.logs._log import LoggedStep

_SPAN_S: Final = 20.0
"""A progress bar shows whole seconds, so that step times over spans of this length are right to 5
%."""
_LEAST_SPANS: Final = 6
"""Least number of spans; with fewer, the rates of the bar are more precise."""


def timed_by_stamps(steps: Mapping[int, LoggedStep]) -> dict[int, LoggedStep]:
    """Steps timed from one stamp to the next.

    DeepSpeed's `CurrSamplesPerSec` counts forward, backward and update alone: what passes between
    them is lost.
    """
    timed: dict[int, LoggedStep] = {}
    before: LoggedStep | None = None
    for at, step in steps.items():
        timed[at] = step
        if (
            before is not None
            and before.clock_s is not None
            and step.clock_s is not None
            and step.seconds is None
        ):
            passed_s, covered = step.clock_s - before.clock_s, step.step - before.step
            # After a restart steps or clocks go back, and the difference is the time of no step.
            if passed_s > 0 and covered > 0:
                timed[at] = replace(step, seconds=passed_s / covered)
        before = step
    return timed


def timed_by_spans(steps: Mapping[int, LoggedStep]) -> dict[int, LoggedStep]:
    """Steps of a progress bar grouped into spans and timed by the bar's clock.

    The bar's own rate is a moving mean, in which a long step lengthens many after it. Short logs
    keep it.
    """
    spans: dict[int, LoggedStep] = {}
    start: LoggedStep | None = None
    for at, step in steps.items():
        if step.clock_s is None:
            return dict(steps)
        # A restarted run has a new progress bar, whose clock starts again.
        if start is None or start.clock_s is None or step.step < start.step:
            start = step
            continue
        passed_s, covered = step.clock_s - start.clock_s, step.step - start.step
        if passed_s >= _SPAN_S and covered > 0:
            spans[at] = replace(step, seconds=passed_s / covered)
            start = step
    return spans if len(spans) >= _LEAST_SPANS else dict(steps)
