"""The record as Markdown."""

from typing import Any

from studies.excess import excess_text
from studies.not_blind import NOT_BLIND
from studies.pairs import LEAST, pairs_text
from studies.record import MOST_GENERIC
from studies.reliability import WidthDecile, deciles_table
from studies.tables import percent, rows_table

from perfmodel.validation import MOST_TERM_ROWS as MOST_ROWS

FIGURES = ("n", "median_ape", "mean_ape", "p90_ape", "bias", "spearman", "coverage_90", "width_90")
STEPS = (
    "source",
    "framework",
    "n",
    "mean error",
    "as `generic`",
    "median",
    "bias",
    "Spearman",
    "inside 90 %",
    "width",
    "looked at",
)


def record_text(record: dict[str, Any], kernels: dict[str, Any], live: dict[str, Any]) -> str:
    """The report of everything.

    Args:
        record: of `published_record`.
        kernels: of `validate_kernels`.
        live: the figures of `validate/live.json`.
    """
    sources = record["sources"]
    parts = [
        "# Predicted against measured",
        "Made by `make validate`. Every run is predicted as `perfmodel predict --framework` predicts what its row "
        f"says; `generic` is the same without the framework, for at most {MOST_GENERIC} runs of each source, drawn "
        "with seed 0. What is fitted to published runs (`perfmodel fit "
        "--sites`: how much longer products take on devices whose power nobody measured, how far apart ranks meet, "
        "spread of peak memory, and what sites add by framework and device, with their spread) leaves out the "
        "source that it is held against and all runs that share a team with it "
        "(`perfmodel/prediction/sites/teams.toml`; of a benchmark, by submitter); "
        "nothing else knows sources. `looked at` says whether anything was looked up "
        "with a source's results in view: it flatters the model, and is listed at the end. What a stranger meets is in "
        "`validate/blind`. Errors are relative to the measured time; width: the interval's upper end over its lower, "
        "the median of the runs.",
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
        f"Over groups of at least {LEAST} layouts of one job on as many devices. Regret: how much longer the layout "
        "predicted fastest takes than the fastest measured.",
        rows_table(
            ("source", "groups", "Spearman", "mean regret", "largest regret"),
            (
                (
                    name,
                    f["groups"],
                    f"{f['spearman']:.2f}",
                    percent(f["regret"]),
                    percent(f["worst_regret"]),
                )
                for name, f in record["ranking"].items()
            ),
        ),
        *pairs_text(record["pairs"]),
        "## Whether intervals are wide where errors are large",
        _intervals(record["intervals"]),
        "From the narrowest intervals to the widest, a tenth of all runs each.",
        deciles_table([WidthDecile(**decile) for decile in record["width_deciles"]]),
        "## Peak memory of published runs",
        _figures(
            "source", [(name, f["memory"]) for name, f in sources.items() if f["memory"]["n"]]
        ),
        _others(record["others_memory"]),
        *excess_text(record["excess"]),
        "## Will it fit?",
        *_fits(record["fits"]),
        "## Rows of published runs that are not predicted",
        rows_table(
            ("why", "rows"), ((reason, f"{count:,}") for reason, count in record["skipped"].items())
        ),
        "## Live runs and papers' tables",
        _live(live),
        "## Not blind",
        "None of this is a constant fitted to these runs: facts of frameworks (`perfmodel catalog frameworks`), of "
        "devices and of how rows are to be read. But they were looked up, or chosen, with these runs' errors in view, "
        "so that the errors above flatter the model.",
        "\n".join(f"- {subject}: {'; '.join(facts)}." for subject, facts in NOT_BLIND.items()),
    ]
    rows = [
        (f"{family}, {device}", f)
        for family, d in kernels["families"].items()
        for device, f in d.items()
    ]
    parts += [
        "## Kernels and collectives (training rows included; those kept out: `training/report.md`)"
    ]
    parts += [_figures("family, device", rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _steps(record: dict[str, Any]) -> str:
    """The mean over sources first, then every source, then all runs together."""
    generic, mean = record["generic"], record["over_sources"]
    rows = [
        (
            f"mean over {mean['sources']} sources",
            "",
            "",
            percent(mean["mean_ape"]),
            percent(generic["over_sources"]["mean_ape"]),
            percent(mean["median_ape"]),
            percent(mean["bias"], sign=True),
            "",
            percent(mean["coverage_90"]),
            _ratio(mean["width_90"]),
            "",
        )
    ]
    for name, of in [*record["sources"].items(), ("all", record["all"])]:
        if of["n"]:
            alike = generic["sources"].get(name, {}).get("mean_ape")
            rows.append(
                (
                    name,
                    ", ".join(of.get("frameworks", ())),
                    f"{of['n']:,}",
                    percent(of["mean_ape"]),
                    percent(alike),
                    percent(of["median_ape"]),
                    percent(of["bias"], sign=True),
                    "-" if of["spearman"] is None else f"{of['spearman']:.2f}",
                    percent(of["coverage_90"]),
                    _ratio(of["width_90"]),
                    record["looked_at"].get(name, ""),
                )
            )
    return rows_table(STEPS, rows)


def _groups(groups: dict[str, Any]) -> str:
    rows = [
        (
            name,
            of["sources"],
            f"{of['n']:,}",
            of["statistic"],
            percent(of["error"]),
            percent(of["to_reach"]),
            "reached" if of["error"] <= of["to_reach"] else "missed",
            percent(of["bias"], sign=True),
        )
        for name, of in groups.items()
    ]
    return rows_table(("runs", "sources", "n", "statistic", "error", "to reach", "", "bias"), rows)


def _terms(terms: dict[str, Any]) -> str:
    """A row per source; a column per term that any run has."""
    mean = terms["over_sources"]
    names = [name for name, of in mean.get("without", {}).items() if of["adds"]]

    def row(name: str, of: dict[str, Any], what: str = "mean_ape") -> tuple[str, ...]:
        return (
            name,
            f"{of.get('n', '')}",
            percent(of["mean_ape"]) if what == "mean_ape" else "",
            *(percent(of["without"][term][what]) for term in names),
        )

    rows = (
        [row(f"mean over {mean['sources']} sources", mean), row("adds", mean, "adds")]
        if names
        else []
    )
    rows += [row(name, of) for name, of in terms["sources"].items()]
    return rows_table(("source", "n", "all terms", *(f"without {name}" for name in names)), rows)


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
                        name,
                        what,
                        f"{found['n']:,}",
                        bar["statistic"],
                        percent(found["error"]),
                        percent(found["to_reach"]),
                        mark,
                        percent(found["bias"], sign=True),
                        bar["elsewhere"],
                    )
                )
    head = (
        "rows",
        "what",
        "n",
        "statistic",
        "error",
        "to reach",
        "",
        "mean signed error",
        "best known elsewhere",
    )
    return rows_table(head, rows)


def _missing(bars: dict[str, Any]) -> str:
    """What is missing where a bar is missed."""
    missed = {
        name: bar["missing"]
        for name, bar in bars.items()
        if any(
            w in bar and bar[w]["n"] and bar[w]["error"] > bar[w]["to_reach"]
            for w in ("time", "memory")
        )
    }
    return rows_table(("missed", "which term is missing"), missed.items()) if missed else ""


def _intervals(scores: dict[str, float]) -> str:
    """Beside one interval for everybody."""
    return (
        "Interval score of log step times at 90 %, mean over sources, the less the better: "
        f"{scores['ours']:.3f}; of the one interval for everybody that scores best on these runs (its ends a factor "
        f"{scores['fixed_ratio']:.2f} apart), {scores['fixed']:.3f}."
    )


def _fits(fits: dict[str, Any]) -> list[str]:
    """What was told of runs that ran, and of those that ran out of memory."""
    rows = [
        (
            name,
            f"{f['ran']:,}",
            percent(f["ran_likely"]),
            percent(f["ran_told"]),
            f"{f['did_not_run']:,}",
            percent(f["did_not_run_unlikely"]),
            percent(f["did_not_run_told"]),
            percent(f["precision"]),
            f"{f['brier']:.3f}",
        )
        for name, f in [*fits["sources"].items(), ("every source", fits["all"])]
        if f
    ]
    head = (
        "source",
        "ran",
        "likely to fit",
        "`fits`",
        "did not run",
        "unlikely to fit",
        "not `fits`",
        "ran, of the likely",
        "Brier",
    )
    ranges = [
        (
            f"{of['from']:.2f} to {of['to']:.2f}",
            f"{of['n']:,}",
            percent(of["said"]),
            percent(of["ran"]),
        )
        for of in fits["reliability"]
    ]
    return [
        "Runs that ran, and how many of them a probability of at least 0.5 told likely to fit (recall), or `fits` to "
        "fit; those that did not, and how many were told unlikely to; how many of those told likely ran (precision). "
        "Sources where every run ran count in the last row alone. The sweep's rows that did not run crashed or ran out "
        "of memory, nobody knows which, those that need next to none of it among them.",
        rows_table(head, rows),
        "Of all runs, by the probability that they were told to fit with:",
        rows_table(("probability", "runs", "mean", "ran"), ranges),
    ]


def _others(others: dict[str, Any]) -> str:
    rows = [
        (predictor, source, f"{f['n']:,}", percent(f["ours"]), percent(f["theirs"]))
        for predictor, by_source in others.items()
        for source, f in by_source.items()
    ]
    return rows_table(("predictor", "source", "n", "ours", "theirs"), rows) if rows else ""


def _live(live: dict[str, Any]) -> str:
    papers = (
        "Papers' own tables: bubbles, memory and staleness of schedules and Zero Bubble's throughput in "
        "`validate/schedules.md`, DistSim's profiling cost in `validate/distsim_profiling.md`, calibration by whole "
        "runs in `validate/end_to_end.md`, optimisers in `validate/optimise.md`."
    )
    figures = (
        ("configurations", live["configurations"]),
        ("step time, mean error", percent(live["mean_step_error"])),
        ("step time, largest error", percent(live["largest_step_error"])),
        ("activity of a device, mean error", percent(live["mean_device_error"])),
        ("Spearman", f"{live['spearman']:.3f}"),
        ("inside the 90 % interval", percent(live["coverage_90"])),
    )
    return f"{rows_table(('live (`validate/live.md`)', 'reached'), figures)}\n\n{papers}"


def _figures(head: str, rows: list[tuple[str, dict[str, Any]]]) -> str:
    def cell(name: str, value: float | None) -> str:
        if value is None:
            return "-"
        if name in ("n", "spearman", "width_90"):
            return f"{value:,}" if name == "n" else f"{value:.2f}"
        return percent(value, sign=name == "bias")

    return rows_table(
        (head, *FIGURES), ((name, *(cell(k, f.get(k)) for k in FIGURES)) for name, f in rows)
    )
