"""The record as Markdown."""

from collections.abc import Iterable
from typing import Any

from studies.not_blind import NOT_BLIND

from perfmodel.validation import MOST_TERM_ROWS as MOST_ROWS

FIGURES = ("n", "median_ape", "mean_ape", "p90_ape", "bias", "spearman", "coverage_90", "width_90")
STEPS = ("source", "framework", "n", "mean error", "as `generic`", "median", "bias", "Spearman", "inside 90 %", "width")


def record_text(record: dict[str, Any], kernels: dict[str, Any] | None, live: dict[str, Any] | None) -> str:
    """The report of everything.

    Args:
        record: of `published_record`.
        kernels: of `validate_kernels`; None leaves the part out.
        live: the figures of `validate/live.json`.
    """
    sources = record["sources"]
    parts = [
        "# Predicted against measured",
        "Made by `make validate`. Every run is predicted as `perfmodel predict --framework` predicts what its row "
        "says; `generic` is the same without the framework. What is fitted to published runs (`perfmodel fit "
        "--sites`: how much longer products take on devices whose power nobody measured, how far apart ranks meet, "
        "spread of peak memory, and what sites add by framework and device, with their spread) leaves out the "
        "source that it is held against and those of its team; nothing else knows sources. What was looked up with "
        "results in view is listed at the end. Errors are relative to the measured time; width: the interval's "
        "upper end over its lower, the median of the runs.",
        "## Step time of published runs",
        _steps(record),
        "## Means over sources",
        "Of every source the mean over those of its runs that belong to the group, then the mean over sources.",
        _groups(record["groups"]),
        "## What each term contributes",
        f"Mean error of every source (at most {MOST_ROWS} runs of each, drawn with seed 0) with all terms of "
        "the physics, and with each switched off; constants are not fitted anew without it. Adds: mean share of "
        "the step that the term adds. Columns of terms that no run has are left out.",
        _terms(record["terms"]),
        "## Bars",
        _bars(record["bars"]),
        _missing(record["bars"]),
        "## Beside other predictors",
        "Mean errors on the rows that both predict. `one FLOP rate`: the median rate of the other rows of the same "
        "source, device and dtype; it is told what ours is not, the other measurements of that source.",
        _others(record["others"]),
        "## Order of layouts",
        "Over groups of at least 5 layouts of one job on as many devices. Regret: how much longer the layout predicted "
        "fastest takes than the fastest measured.",
        _table(
            ("source", "groups", "Spearman", "mean regret", "largest regret"),
            (
                (name, f["groups"], f"{f['spearman']:.2f}", _percent(f["regret"]), _percent(f["worst_regret"]))
                for name, f in record["ranking"].items()
            ),
        ),
        *_pairs(record.get("pairs")),
        *_intervals(record.get("intervals")),
        "## Peak memory of published runs",
        _figures("source", [(name, f["memory"]) for name, f in sources.items() if f["memory"]["n"]]),
        _others(record["others_memory"]),
        *_excess(record["excess"]),
        "## Will it fit?",
        *_fits(record["fits"]),
        "## Rows of published runs that are not predicted",
        _table(("why", "rows"), ((reason, f"{count:,}") for reason, count in record["skipped"].items())),
        "## Live runs and papers' tables",
        _live(live),
        "## Not blind",
        "None of this is a constant fitted to these runs: facts of frameworks (`perfmodel catalog frameworks`), of "
        "devices and of how rows are to be read. But they were looked up, or chosen, with these runs' errors in view, "
        "so that the errors above flatter the model.",
        "\n".join(f"- {subject}: {'; '.join(facts)}." for subject, facts in NOT_BLIND.items()),
    ]
    if kernels is not None:
        rows = [(f"{family}, {device}", f) for family, d in kernels["families"].items() for device, f in d.items()]
        parts += ["## Kernels and collectives (training rows included; those kept out: `training/report.md`)"]
        parts += [_figures("family, device", rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _steps(record: dict[str, Any]) -> str:
    """The mean over sources first, then every source, then all runs together."""
    generic, mean = record["generic"], record["over_sources"]
    rows = [
        (
            f"mean over {mean['sources']} sources", "", "", _percent(mean["mean_ape"]),
            _percent(generic["over_sources"]["mean_ape"]), _percent(mean["median_ape"]),
            _percent(mean["bias"], sign=True), "", _percent(mean["coverage_90"]), _ratio(mean["width_90"]),
        )
    ]  # fmt: skip
    for name, of in [*record["sources"].items(), ("all", record["all"])]:
        if of["n"]:
            alike = generic["sources"].get(name, {}).get("mean_ape")
            rows.append(
                (
                    name, ", ".join(of.get("frameworks", ())), f"{of['n']:,}", _percent(of["mean_ape"]),
                    _percent(alike), _percent(of["median_ape"]), _percent(of["bias"], sign=True),
                    "-" if of["spearman"] is None else f"{of['spearman']:.2f}", _percent(of["coverage_90"]),
                    _ratio(of["width_90"]),
                )
            )  # fmt: skip
    return _table(STEPS, rows)


def _groups(groups: dict[str, Any]) -> str:
    rows = [
        (
            name, of["sources"], f"{of['n']:,}", of["statistic"], _percent(of["error"]), _percent(of["to_reach"]),
            "reached" if of["error"] <= of["to_reach"] else "missed", _percent(of["bias"], sign=True),
        )
        for name, of in groups.items()
    ]  # fmt: skip
    return _table(("runs", "sources", "n", "statistic", "error", "to reach", "", "bias"), rows)


def _terms(terms: dict[str, Any]) -> str:
    """A row per source; a column per term that any run has."""
    mean = terms["over_sources"]
    names = [name for name, of in mean.get("without", {}).items() if of["adds"]]

    def row(name: str, of: dict[str, Any], what: str = "mean_ape") -> tuple[str, ...]:
        return (name, f"{of.get('n', '')}", _percent(of["mean_ape"]) if what == "mean_ape" else "",
                *(_percent(of["without"][term][what]) for term in names))  # fmt: skip

    rows = [row(f"mean over {mean['sources']} sources", mean), row("adds", mean, "adds")] if names else []
    rows += [row(name, of) for name, of in terms["sources"].items()]
    return _table(("source", "n", "all terms", *(f"without {name}" for name in names)), rows)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _bars(bars: dict[str, Any]) -> str:
    rows = []
    for name, bar in bars.items():
        for what in ("time", "memory"):
            if what in bar and bar[what]["n"]:
                found = bar[what]
                mark = "reached" if found["error"] <= found["to_reach"] else "missed"
                rows.append(
                    (
                        name, what, f"{found['n']:,}", bar["statistic"], _percent(found["error"]),
                        _percent(found["to_reach"]), mark, _percent(found["bias"], sign=True), bar["elsewhere"],
                    )
                )  # fmt: skip
    head = ("rows", "what", "n", "statistic", "error", "to reach", "", "mean signed error", "best known elsewhere")
    return _table(head, rows)


def _missing(bars: dict[str, Any]) -> str:
    """What is missing where a bar is missed."""
    missed = {
        name: bar["missing"]
        for name, bar in bars.items()
        if any(w in bar and bar[w]["n"] and bar[w]["error"] > bar[w]["to_reach"] for w in ("time", "memory"))
    }
    return _table(("missed", "which term is missing"), missed.items()) if missed else ""


def _pairs(pairs: dict[str, Any] | None) -> list[str]:
    """Reliability and regret of choosing between layouts of one site."""
    if not pairs:
        return []
    figures = [("frameworks that behave", pairs["reliability"]), *pairs["apart"].items()]
    rows = [
        (name, f"{one['from']:.0%} to {one['to']:.0%}", f"{one['n']:,}", _percent(one["probability"]),
         _percent(one["faster"]))
        for name, of in figures for one in of["bins"]
    ]  # fmt: skip
    errors = "; ".join(f"{name}: {of['pairs']:,} pairs, {_percent(of['error'])}" for name, of in figures)
    chosen = [
        (name, of["groups"], f"{of['pairs']:,}", _percent(of["error"]), _percent(of["regret"]), _percent(of["random"]))
        for name, of in sorted(pairs["sources"].items(), key=lambda one: one[1]["apart"])
    ]
    parts = [
        "## Pairs of layouts of one site",
        "Runs of one job of a source on as many devices, its source left out: the probability that the layout "
        "predicted faster is faster (joint, with heavy tails, as searches print it), and how often it was. Pairs of a "
        f"source count as many as the square root of their number. Mean distance of the two: {errors}.",
        _table(("runs", "probability", "pairs", "mean probability", "faster"), rows),
        f"Regret of trying first the layout that is most probably faster than any other: mean over {pairs['groups']} "
        f"groups of at least two layouts {_percent(pairs['regret'])} (to reach 3.0 %; nanotron's pipelines apart). "
        "At random: of a layout drawn from the group.",
        _table(("source", "groups", "pairs", "distance", "mean regret", "at random"), chosen),
    ]
    if pairs["next_run"]:
        parts += [
            "One more measurement, of the first 12 layouts of a group of at least 5, then the layout of the least "
            "expected step: mean regret now, after a run of the layout predicted fastest, after the measurement of the "
            "least expected regret (`calibrate --for-decision`: a run, or one beside a run of the first), and after "
            "one of as many runs drawn at random.",
            _table(
                ("source", "groups", "now", "the first", "least expected regret", "its runs", "at random"),
                (
                    (
                        name,
                        of["groups"],
                        *(_percent(of[key]) for key in ("now", "first", "chosen")),
                        f"{of['runs']:.1f}",
                        _percent(of["random"]),
                    )
                    for name, of in pairs["next_run"].items()
                ),
            ),
        ]
    return parts


def _intervals(scores: dict[str, float] | None) -> list[str]:
    """Beside one interval for everybody."""
    if not scores:
        return []
    return [
        "Interval score of log step times at 90 %, mean over sources, the less the better: "
        f"{scores['ours']:.3f}; of the one interval for everybody that scores best on these runs (its ends a factor "
        f"{scores['fixed_ratio']:.2f} apart), {scores['fixed']:.3f}."
    ]


def _excess(excess: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the playbook's sweep takes beyond its prediction, which is most of the sweep's error."""
    if not excess["by_tp"]:
        return []

    def number(value_ms: float | None) -> str:
        return "-" if value_ms is None else f"{value_ms:.1f} ms"

    return [
        "## Pipelines of nanotron",
        "Most of the playbook's time error, of its ranking and of its coverage comes from pipelined runs that take "
        "much longer than others of the same layout, by the same time per micro-batch whatever its size, the model and "
        "tp: as if every transfer between stages waited a quarter of a second (stages within have twice the transfers "
        "of the first and the last). The more devices, the more runs do; those on most devices, and pipelines of the "
        "largest tp, all. Where memory tells the two versions of the framework apart, they are of the one that gathers "
        "inputs again in backward, and nearly none is of the other. Nothing else in a row tells which will, and no "
        "other source has it, so that no term for it can be held against rows that it was not fitted on.",
        _table(
            ("stages", "runs", "slow ones", "more per micro-batch"),
            (
                (row["pp"], row["runs"], row["slow"], "-" if row["more_s"] is None else f"{row['more_s']:.2f} s")
                for row in excess["by_pp"]
            ),
        ),
        "The others, measured less predicted, runs of at least 8 micro-batches: a layer takes so many milliseconds "
        "more per micro-batch that three quarters of the runs take still more. Hosts of pipelines check every "
        "collective, and so do those of some runs of one stage, which are among the slow ones above where tp is high.",
        _table(
            ("tp", "runs", "one stage", "several stages"),
            (
                (row["tp"], row["runs"], *(number(row[k]) for k in ("one_stage_ms", "several_stages_ms")))
                for row in excess["by_tp"]
            ),
        ),
        "What choosing by prediction costs on so many devices: most of it on the most, where runs of any layout are "
        "slow or not whatever it is, so that which is the fastest measured is chance.",
        _table(
            ("devices", "one stage", "several", "slow, one stage", "slow, several", "groups", "regret", "largest"),
            (
                (
                    row["devices"],
                    *row["runs"],
                    *("-" if share is None else _percent(share) for share in row["slow"]),
                    row["groups"],
                    *("-" if row[k] is None else _percent(row[k]) for k in ("regret", "worst_regret")),
                )
                for row in excess.get("by_devices", [])
            ),
        ),
    ]


def _fits(fits: dict[str, Any]) -> list[str]:
    """What was told of runs that ran, and of those that ran out of memory."""
    rows = [
        (
            name, f"{f['ran']:,}", _percent(f["ran_likely"]), _percent(f["ran_told"]), f"{f['did_not_run']:,}",
            _percent(f["did_not_run_unlikely"]), _percent(f["did_not_run_told"]), _percent(f["precision"]),
            f"{f['brier']:.3f}",
        )
        for name, f in [*fits["sources"].items(), ("every source", fits["all"])]
        if f
    ]  # fmt: skip
    head = (
        "source", "ran", "likely to fit", "`fits`", "did not run", "unlikely to fit", "not `fits`",
        "ran, of the likely", "Brier",
    )  # fmt: skip
    ranges = [
        (f"{of['from']:.2f} to {of['to']:.2f}", f"{of['n']:,}", _percent(of["said"]), _percent(of["ran"]))
        for of in fits["reliability"]
    ]
    return [
        "Runs that ran, and how many of them a probability of at least 0.5 told likely to fit (recall), or `fits` to "
        "fit; those that did not, and how many were told unlikely to; how many of those told likely ran (precision). "
        "Sources where every run ran count in the last row alone. The sweep's rows that did not run crashed or ran out "
        "of memory, nobody knows which, those that need next to none of it among them.",
        _table(head, rows),
        "Of all runs, by the probability that they were told to fit with:",
        _table(("probability", "runs", "mean", "ran"), ranges),
    ]


def _others(others: dict[str, Any]) -> str:
    rows = [
        (predictor, source, f"{f['n']:,}", _percent(f["ours"]), _percent(f["theirs"]))
        for predictor, by_source in others.items()
        for source, f in by_source.items()
    ]
    return _table(("predictor", "source", "n", "ours", "theirs"), rows) if rows else ""


def _live(live: dict[str, Any] | None) -> str:
    papers = (
        "Papers' own tables: bubbles, memory and staleness of schedules and Zero Bubble's throughput in "
        "`validate/schedules.md`, DistSim's profiling cost in `validate/distsim_profiling.md`, calibration by whole "
        "runs in `validate/end_to_end.md`, optimisers in `validate/optimise.md`."
    )
    if live is None:
        return papers
    figures = (
        ("configurations", live["configurations"]),
        ("step time, mean error", _percent(live["mean_step_error"])),
        ("step time, largest error", _percent(live["largest_step_error"])),
        ("activity of a device, mean error", _percent(live["mean_device_error"])),
        ("Spearman", f"{live['spearman']:.3f}"),
        ("inside the 90 % interval", _percent(live["coverage_90"])),
    )
    return f"{_table(('live (`validate/live.md`)', 'reached'), figures)}\n\n{papers}"


def _figures(head: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        if name in ("n", "spearman", "width_90"):
            return f"{value:,}" if name == "n" else f"{value:.2f}"
        return _percent(value, sign=name == "bias")

    return _table((head, *FIGURES), ((name, *(cell(k, f.get(k)) for k in FIGURES)) for name, f in rows))


def _percent(value: float | None, sign: bool = False) -> str:
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
