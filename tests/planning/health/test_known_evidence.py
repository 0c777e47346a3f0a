"""Each kind of evidence moves the probabilities of faults as the table says; what a log lacks is
named."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from known_evidence import EVIDENCE, FAULTS, STEP_ONLY, TABLE, cases, sentences
from stored_figures import moved_figures

from perfmodel.planning.health._evidence import weigh

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/planning/health/known_evidence.py` and review it"


def test_evidence_counts_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence_counts_the_same_in_every_unit(name: str) -> None:
    """Also where seconds, clocks and bytes are small numbers."""
    observed = replace(STEP_ONLY, **EVIDENCE[name])
    likely, no_fault = weigh(observed, FAULTS)
    scaled, scaled_no_fault = weigh(_in_other_units(observed), _in_other_units(FAULTS))
    assert scaled_no_fault == pytest.approx(no_fault)
    for cause, of_cause in zip(likely, scaled, strict=True):
        assert of_cause.fault.name == cause.fault.name
        assert of_cause.probability == pytest.approx(cause.probability)
        assert of_cause.explains_s == pytest.approx(1e-3 * cause.explains_s)


UNITS = {"_s": 1e-3, "_hz": 1e-12, "_bytes": 1e-9}


def _in_other_units(value: Any, unit: float = 1.0) -> Any:
    """A record in kiloseconds, THz and GB, by the ends of the names of its fields."""
    if is_dataclass(value):
        changes = {}
        for field in fields(value):
            ends = [size for end, size in UNITS.items() if field.name.endswith(end)]
            changes[field.name] = _in_other_units(getattr(value, field.name), *ends)
        return replace(value, **changes)  # pyright: ignore[reportArgumentType]
    if isinstance(value, dict):
        return {key: _in_other_units(entry, unit) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(_in_other_units(entry, unit) for entry in value)
    return value * unit if isinstance(value, float) else value


def test_what_a_log_lacks_is_what_could_decide() -> None:
    settings = {
        "megatron": ("--timing-log-level", "--log-straggler"),
        "deepspeed": ("wall_clock_breakdown", None),
    }
    for name, sentence in sentences():
        form, _, has = name.partition(" with ")
        timers, clocks = settings.get(form, (None, None))
        assert ("only has step times" in sentence) is (has == "steps")
        if timers is not None:
            assert (timers in sentence) is ("timers" not in has)
        if clocks is not None:
            assert (clocks in sentence) is ("clocks" not in has)
        assert ("to log more" in sentence) is any(
            word is not None and kind not in has
            for word, kind in ((timers, "timers"), (clocks, "clocks"))
        )
