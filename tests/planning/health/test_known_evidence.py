"""Each kind of evidence moves the probabilities of faults as the table says; what a log lacks is
named."""

from known_evidence import TABLE, cases, sentences
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/planning/health/known_evidence.py` and review it"


def test_evidence_counts_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


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
