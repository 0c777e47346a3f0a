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
    """Format the whole report.

    Args:
        record: of `published_record`.
        kernels: of `validate_kernels`.
        live: the figures of `validate/live.json`.
    """
    # Sections in the order in which a reader asks: how good, why, and how much that says.
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
        _ranking(record["ranking"]),
        *pairs_text(record["pairs"]),
        "## Whether intervals are wide where errors are large",
        _intervals(record["intervals"]),
        "From the narrowest intervals to the widest, a tenth of all runs each.",
        deciles_table([WidthDecile(**decile) for decile in record["width_deciles"]]),
        "## Peak memory of published runs",
        _figures(
            "source",
            [
                (name, figures["memory"])
                for name, figures in sources.items()
                if figures["memory"]["n"]
            ],
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
        "## Kernels and collectives (training rows included; those kept out: `training/report.md`)",
        _kernels(kernels["families"]),
    ]
    # A table without rows is no part.
    return "\n\n".join(part for part in parts if part) + "\n"


def _ranking(ranking: dict[str, Any]) -> str:
    """Table of how well layouts are ordered, source by source."""
    rows = [
        (
            name,
            figures["groups"],
            f"{figures['spearman']:.2f}",
            percent(figures["regret"]),
            percent(figures["worst_regret"]),
        )
        for name, figures in ranking.items()
    ]
    return rows_table(("source", "groups", "Spearman", "mean regret", "largest regret"), rows)


def _kernels(families: dict[str, Any]) -> str:
    """Errors of kernels and collectives, a row a family and device."""
    rows = []
    for family, by_device in families.items():
        for device, figures in by_device.items():
            rows.append((f"{family}, {device}", figures))
    return _figures("family, device", rows)


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
    # All runs together come last: sources with many runs weigh most in them.
    for name, figures in [*record["sources"].items(), ("all", record["all"])]:
        # Sources that state peak memory alone have no step time.
        if figures["n"]:
            as_generic = generic["sources"].get(name, {}).get("mean_ape")
            rows.append(
                (
                    name,
                    ", ".join(figures.get("frameworks", ())),
                    f"{figures['n']:,}",
                    percent(figures["mean_ape"]),
                    percent(as_generic),
                    percent(figures["median_ape"]),
                    percent(figures["bias"], sign=True),
                    _ratio(figures["spearman"]),
                    percent(figures["coverage_90"]),
                    _ratio(figures["width_90"]),
                    record["looked_at"].get(name, ""),
                )
            )
    return rows_table(STEPS, rows)


def _groups(groups: dict[str, Any]) -> str:
    """Table of mean errors over sources for every group, beside the errors to reach."""
    rows = [
        (
            name,
            figures["sources"],
            f"{figures['n']:,}",
            figures["statistic"],
            percent(figures["error"]),
            percent(figures["to_reach"]),
            "reached" if figures["error"] <= figures["to_reach"] else "missed",
            percent(figures["bias"], sign=True),
        )
        for name, figures in groups.items()
    ]
    return rows_table(("runs", "sources", "n", "statistic", "error", "to reach", "", "bias"), rows)


def _terms(terms: dict[str, Any]) -> str:
    """Table of the physical terms: a row per source, and a column per term that any run has."""
    mean = terms["over_sources"]
    names = [name for name, term in mean.get("without", {}).items() if term["adds"]]

    def row(name: str, figures: dict[str, Any], statistic: str = "mean_ape") -> tuple[str, ...]:
        """A statistic without each term; with all terms only an error means anything."""
        return (
            name,
            f"{figures.get('n', '')}",
            percent(figures["mean_ape"]) if statistic == "mean_ape" else "",
            *(percent(figures["without"][term][statistic]) for term in names),
        )

    rows = []
    if names:
        rows = [row(f"mean over {mean['sources']} sources", mean), row("adds", mean, "adds")]
    # Means first, then source by source.
    rows += [row(name, figures) for name, figures in terms["sources"].items()]
    return rows_table(("source", "n", "all terms", *(f"without {name}" for name in names)), rows)


def _ratio(value: float | None) -> str:
    """A number with two digits; a dash for none."""
    return "-" if value is None else f"{value:.2f}"


def _bars(bars: dict[str, Any]) -> str:
    """Table of errors beside the errors to reach and those of other predictors, with a row per
    quantity."""
    rows = []
    for name, bar in bars.items():
        for quantity in ("time", "memory"):
            if quantity not in bar or not bar[quantity]["n"]:
                continue
            reached = bar[quantity]
            rows.append(
                (
                    name,
                    quantity,
                    f"{reached['n']:,}",
                    bar["statistic"],
                    percent(reached["error"]),
                    percent(reached["to_reach"]),
                    "missed" if _is_missed(bar, quantity) else "reached",
                    percent(reached["bias"], sign=True),
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
    """Text on what is missing where a bar is missed."""
    missed = []
    for name, bar in bars.items():
        if _is_missed(bar, "time") or _is_missed(bar, "memory"):
            missed.append((name, bar["missing"]))
    return rows_table(("missed", "which term is missing"), missed) if missed else ""


def _is_missed(bar: dict[str, Any], quantity: str) -> bool:
    """Whether a bar asks for an error of a quantity that its runs exceed."""
    if quantity not in bar or not bar[quantity]["n"]:
        return False
    return bar[quantity]["error"] > bar[quantity]["to_reach"]


def _intervals(scores: dict[str, float]) -> str:
    """Table of our intervals beside one fixed interval for all runs."""
    return (
        "Interval score of log step times at 90 %, mean over sources, the less the better: "
        f"{scores['ours']:.3f}; of the one interval for everybody that scores best on these runs (its ends a factor "
        f"{scores['fixed_ratio']:.2f} apart), {scores['fixed']:.3f}."
    )


def _fits(fits: dict[str, Any]) -> list[str]:
    """Table of the predicted fit of runs that ran, and of those that ran out of memory."""
    rows = [
        (
            name,
            f"{figures['ran']:,}",
            percent(figures["ran_likely"]),
            percent(figures["ran_told"]),
            f"{figures['did_not_run']:,}",
            percent(figures["did_not_run_unlikely"]),
            percent(figures["did_not_run_told"]),
            percent(figures["precision"]),
            f"{figures['brier']:.3f}",
        )
        for name, figures in [*fits["sources"].items(), ("every source", fits["all"])]
        if figures
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
            f"{of_bin['from']:.2f} to {of_bin['to']:.2f}",
            f"{of_bin['n']:,}",
            percent(of_bin["said"]),
            percent(of_bin["ran"]),
        )
        for of_bin in fits["reliability"]
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


def _others(by_predictor: dict[str, Any]) -> str:
    """Errors of ours and of other predictors, source by source."""
    rows = []
    for predictor, by_source in by_predictor.items():
        for source, figures in by_source.items():
            ours = percent(figures["ours"])
            theirs = percent(figures["theirs"])
            rows.append((predictor, source, f"{figures['n']:,}", ours, theirs))
    return rows_table(("predictor", "source", "n", "ours", "theirs"), rows) if rows else ""


def _live(live: dict[str, Any]) -> str:
    """Section with the figures of live runs, and where those of papers' tables are."""
    # Tables of papers have pages of their own.
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
    """Rows of `FIGURES`, each with its name in front."""
    table_rows = []
    for name, figures in rows:
        cells = [_figure(figure, figures.get(figure)) for figure in FIGURES]
        table_rows.append((name, *cells))
    return rows_table((head, *FIGURES), table_rows)


def _figure(name: str, value: float | None) -> str:
    """Format one of `FIGURES` as a count, a ratio or a share."""
    if value is None:
        return "-"
    if name == "n":
        return f"{value:,}"
    if name in ("spearman", "width_90"):
        return f"{value:.2f}"
    return percent(value, sign=name == "bias")
