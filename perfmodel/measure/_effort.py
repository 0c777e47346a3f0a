"""What a measurement will cost, before it is made."""

from typing import NamedTuple

from perfmodel.measure._harness import StoppingRule


class Effort(NamedTuple):
    """Seconds of one measurement."""

    least: float
    """On a quiet machine, where the fewest samples suffice."""
    most: float
    """Where the interval stays too wide and the rule's caps end it."""


def measuring_s(rule: StoppingRule, call_s: float, *, warmup_calls: int = 2) -> Effort:
    """Seconds that `time_calls` takes for a call of `call_s`, by its stopping rule.

    Calls of less than half of `rule.min_sample_s` are bundled to samples that long; no sample starts after
    `rule.max_s`. Compiling the program and filling its inputs come on top.
    """
    sample_s = call_s if 2 * call_s >= rule.min_sample_s else rule.min_sample_s
    cap_s = rule.max_s + sample_s
    warmup_s = warmup_calls * call_s
    least, most = (warmup_s + min(n * sample_s, cap_s) for n in (rule.min_repeats, rule.max_repeats))
    return Effort(least, most)
