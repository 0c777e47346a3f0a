"""The blind record: what every source of published runs was predicted to take before anything was
changed for it.

A collection is a folder `published*` of tables of runs. Of the first, `published`, no look was
recorded: its results were in view while the model was built. Of every later one, each source is
predicted once, as the version of that day predicts what its rows say, and the answers are kept with
the commit.
"""

import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from prepared_runs import prepare
from studies.reliability import WidthDecile, deciles_table, interval_scores, width_deciles
from studies.tables import percent, rows_table

from perfmodel.errors import PerfModelError
from perfmodel.validation import measured_times_s
from perfmodel.validation.rows import read_tables

FOLDER: Final = Path(__file__).parents[1] / "blind"
WITHOUT_A_LOOK: Final = "published"
"""The collection whose results were in view from the beginning."""
RECORDED: Final = (
    "case_id",
    "source",
    "commit",
    "predicted_iter_time_s",
    "lo_s",
    "hi_s",
    "skipped_reason",
)
EVERY_SOURCE: Final = ("*",)
_TIMES: Final = ("predicted_iter_time_s", "lo_s", "hi_s")
_GROUPS_OF_PREDICTIONS: Final = ("device_generation", "model_kind")
"""Columns of predictions by which errors are told apart."""
_GROUPS: Final = (*_GROUPS_OF_PREDICTIONS, "trained", "framework")
"""The same, with what is known of a row itself."""
ADAPTERS: Final = "job.adapter_rank"
"""Column that prepared rows have where adapters are trained."""
DESCRIBED: Final = 0.02
"""Standard deviation of the log step time between all that a run may have been, up to which it is
fully described."""
UNLIKELY: Final = 0.1
"""Probability to fit below which a run that ran contradicts its prediction."""


def collections(data: Path) -> list[Path]:
    """Folders of collections whose sources have a first look, in the order of their names."""
    folders = (folder for folder in sorted(data.glob(f"{WITHOUT_A_LOOK}*")) if folder.is_dir())
    return [
        folder for folder in folders if folder.name != WITHOUT_A_LOOK and any(folder.glob("*.csv"))
    ]


def runs_of(collection: Path) -> pd.DataFrame:
    """All rows of a collection."""
    return read_tables(sorted(collection.glob("*.csv")))[0]


# --- recording
# ----------------------------------------------------------------------------------------


def recorded_looks(collection: str, folder: Path = FOLDER) -> pd.DataFrame:
    """First looks at a collection's rows (columns `RECORDED`); empty if there are none."""
    path = folder / f"{collection}.csv"
    return pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=list(RECORDED))


def record_first_looks(
    collection: str,
    runs: pd.DataFrame,
    commit: str,
    predict: Callable[[pd.DataFrame], pd.DataFrame],
    folder: Path = FOLDER,
) -> tuple[list[str], list[str]]:
    """Predict the sources without a first look and add the predictions to the record, whose old
    rows stay.

    Args:
        collection: its name.
        runs: its rows.
        commit: the version that predicts.
        predict: makes a frame with `_TIMES` and `skipped_reason` of some rows.

    Returns:
        Names of the sources recorded now; cases that a source gained after its first look, which
        stay without one.

    Raises:
        PerfModelError: two rows have one name, or rows that have a first look are gone.
    """
    if runs["case_id"].duplicated().any():
        raise PerfModelError(
            f"{collection}: two rows are named {runs['case_id'][runs['case_id'].duplicated()].iloc[0]}"
        )
    before = recorded_looks(collection, folder)
    if gone := sorted(set(before["case_id"]) - set(runs["case_id"])):
        raise PerfModelError(
            f"{collection}: {gone[0]} has a first look, but the tables no longer have that row"
        )
    # A source is recorded as a whole: rows that it gains later may follow a change made for it.
    has_look = runs["source"].isin(set(before["source"]))
    late = runs["case_id"][has_look & ~runs["case_id"].isin(set(before["case_id"]))]
    new = runs[~has_look].reset_index(drop=True)
    if len(new):
        looks = predict(new)[[*_TIMES, "skipped_reason"]].reset_index(drop=True)
        looks.insert(0, "commit", commit)
        looks.insert(0, "source", new["source"])
        looks.insert(0, "case_id", new["case_id"])
        write_looks(
            pd.concat([before, looks[list(RECORDED)]], ignore_index=True), collection, folder
        )
    return sorted(set(new["source"])), late.tolist()


def write_looks(looks: pd.DataFrame, collection: str, folder: Path = FOLDER) -> None:
    """Write first looks, with times of six digits."""
    folder.mkdir(parents=True, exist_ok=True)
    # Rounded as text: another platform's last bits would change the file, which is committed.
    rounded = looks.copy()
    for name in _TIMES:
        rounded[name] = [f"{float(value):.6g}" if pd.notna(value) else "" for value in looks[name]]
    rounded.to_csv(folder / f"{collection}.csv", index=False, lineterminator="\n")


def commit_of_package(root: Path) -> str:
    """The commit that is checked out.

    Raises:
        PerfModelError: the package differs from it.
    """

    def git(*arguments: str) -> str:
        """The output of a git command."""
        return subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    if changed := git("status", "--porcelain", "--", "perfmodel"):
        raise PerfModelError(
            f"a first look is kept with its commit, but {changed.splitlines()[0].split()[-1]} is not committed; commit "
            "or stash the changes first"
        )
    return git("rev-parse", "--short=8", "HEAD")


# --- today
# --------------------------------------------------------------------------------------------


def predicted_today(runs: pd.DataFrame, predict: Callable[[pd.DataFrame], pd.DataFrame]) -> "Look":
    """Predict a collection's rows with the present version, with the settings that their notes
    state as columns.

    The package never reads notes; constants of sites are fitted to rows that were prepared in the
    same way.

    Args:
        runs: rows as they were collected.
        predict: makes a frame with `_TIMES` and `skipped_reason` of prepared rows.
    """
    prepared_runs = prepare(runs)
    return Look.of(prepared_runs, predict(prepared_runs))


# --- what is known of a source beside its rows
# --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the package that was made with results of some sources in view."""

    sources: tuple[str, ...]
    """Patterns of their names."""
    what: str


@dataclass(frozen=True, kw_only=True)
class ToldNotToFit:
    """The reason why runs that ran were predicted to fit with a probability below `UNLIKELY`."""

    runs: tuple[str, ...]
    """Patterns of their names."""
    why: str


@dataclass(frozen=True, kw_only=True)
class KnownSources:
    """The record in `sources.toml` of which sources anybody looked at."""

    before_first_look: tuple[str, ...]
    """Patterns of sources whose results had been seen, in another form, before their first look."""
    changes: tuple[Change, ...]
    told_not_to_fit: tuple[ToldNotToFit, ...] = ()

    @classmethod
    def read(cls, path: Path = FOLDER / "sources.toml") -> "KnownSources":
        """Read a file of this format."""
        content = tomllib.loads(path.read_text())
        changes = (
            Change(sources=tuple(entry["sources"]), what=entry["what"])
            for entry in content["changes"]
        )
        not_to_fit = (
            ToldNotToFit(runs=tuple(entry["runs"]), why=entry["why"])
            for entry in content["told_not_to_fit"]
        )
        return cls(
            before_first_look=tuple(content["before_first_look"]),
            changes=tuple(changes),
            told_not_to_fit=tuple(not_to_fit),
        )

    def was_blind(self, source: str) -> bool:
        """Whether nobody had looked at a source before its first look."""
        return not _matches(source, self.before_first_look)

    def why_not_to_fit(self, case_id: str) -> str:
        """The reason why a run that ran is predicted not to fit; empty if it is not known."""
        reasons = [entry.why for entry in self.told_not_to_fit if _matches(case_id, entry.runs)]
        return "; ".join(reasons)

    @property
    def changes_for_all(self) -> list[str]:
        """Changes that were made with the results of every source in view."""
        return [change.what for change in self.changes if change.sources == EVERY_SOURCE]

    def changes_of(self, source: str) -> list[str]:
        """Changes that were made with results of a source in view, after its first look."""
        return [change.what for change in self.changes if _matches(source, change.sources)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches any of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def looked_at(source: str, collection: str, known: KnownSources) -> str:
    """Text on whether anybody looked at the errors of a source."""
    if collection == WITHOUT_A_LOOK:
        return "from the beginning"
    if not known.was_blind(source):
        return "before its first look"
    return "after its first look" if known.changes_of(source) else "never"


def not_predicted(runs: pd.DataFrame) -> pd.DataFrame:
    """Empty predictions, for rows that cannot be predicted."""
    return pd.DataFrame({name: np.full(len(runs), np.nan) for name in _TIMES})


# --- scores
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Look:
    """Predictions of some rows beside what was measured."""

    source: np.ndarray
    measured_s: Float[np.ndarray, " runs"]
    """NaN where a row is not compared."""
    predicted_s: Float[np.ndarray, " runs"]
    lo_s: Float[np.ndarray, " runs"]
    hi_s: Float[np.ndarray, " runs"]
    open_deviation: Float[np.ndarray, " runs"]
    """Of the log step time between all that a run may have been; NaN where nobody recorded it."""
    fits_probability: Float[np.ndarray, " runs"]
    """NaN where nobody recorded it."""
    device_generation: np.ndarray
    """Empty where nobody recorded it."""
    model_kind: np.ndarray
    """Empty where nobody recorded it."""
    trained: np.ndarray
    """What is trained, where these are not the model's own weights: `adapters (LoRA)`, else
    empty."""
    framework: np.ndarray
    """Name of the framework without its year; empty where there is none."""

    @classmethod
    def of(cls, runs: pd.DataFrame, predictions: pd.DataFrame) -> "Look":
        """Make a look from rows and their predictions, in the same order."""
        # Rows that were not prepared lack the column of adapters.
        has_adapters = runs[ADAPTERS].notna() if ADAPTERS in runs else np.full(len(runs), False)
        cells = pd.Series("", index=runs.index)
        if "framework" in runs:
            cells = runs["framework"].fillna("")
        return cls(
            source=runs["source"].to_numpy(str),
            measured_s=measured_times_s(runs),
            predicted_s=_numbers(predictions, "predicted_iter_time_s"),
            lo_s=_numbers(predictions, "lo_s"),
            hi_s=_numbers(predictions, "hi_s"),
            open_deviation=_numbers(predictions, "open_deviation"),
            fits_probability=_numbers(predictions, "fits_probability"),
            device_generation=_texts(predictions, "device_generation"),
            model_kind=_texts(predictions, "model_kind"),
            trained=np.where(has_adapters, "adapters (LoRA)", ""),
            framework=cells.astype(str).str.partition("@")[0].to_numpy(str),
        )

    def take(self, chosen: np.ndarray) -> "Look":
        """The look at some of the rows."""
        return Look(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @classmethod
    def joined(cls, looks: Sequence["Look"]) -> "Look":
        """The look at the rows of several looks, in their order."""
        columns = {}
        for field in fields(cls):
            columns[field.name] = np.concatenate([getattr(look, field.name) for look in looks])
        return cls(**columns)

    @property
    def compared(self) -> Bool[np.ndarray, " runs"]:
        """Whether a row was measured and is predicted."""
        return np.isfinite(self.measured_s) & np.isfinite(self.predicted_s)

    def described(self) -> "Look":
        """Whether a row leaves open no setting that would move the step time."""
        return self.take(self.open_deviation <= DESCRIBED)

    def narrower_half(self) -> "Look":
        """The half of the rows with the narrower intervals."""
        compared = self.take(self.compared)
        ratio = compared.hi_s / compared.lo_s
        return compared.take(ratio <= np.median(ratio)) if len(ratio) else compared

    def unlikely_to_fit(self) -> int:
        """Rows that ran although their probability to fit is below `UNLIKELY`."""
        return int((self.compared & (self.fits_probability < UNLIKELY)).sum())

    def score(self) -> dict[str, Any]:
        """Rows that were measured and those of them that are predicted, sources, the mean over
        sources of their mean relative errors, the error of the median row, the share of rows inside
        their 90 % intervals, the mean over sources of that share, and by what factor the ends of
        the median row's interval are apart."""
        timed = np.isfinite(self.measured_s)
        compared = self.compared
        inside = (self.lo_s <= self.measured_s) & (self.measured_s <= self.hi_s)
        frame = pd.DataFrame(
            {
                "source": self.source,
                "error": np.abs(self.predicted_s / self.measured_s - 1),
                "inside": inside,
                "ratio": self.hi_s / self.lo_s,
            }
        )[compared]
        figures: dict[str, Any] = {"rows": int(timed.sum()), "predicted": int(compared.sum())}
        if frame.empty:
            return figures
        by_source = frame.groupby("source")
        return figures | {
            "sources": len(by_source),
            "mean_over_sources": float(by_source["error"].mean().mean()),
            "median_row": float(frame["error"].median()),
            "inside": float(frame["inside"].mean()),
            "inside_over_sources": float(by_source["inside"].mean().mean()),
            "ratio": float(frame["ratio"].median()),
        }

    def by_group(self, group: str) -> dict[str, dict[str, float]]:
        """By value of one of `_GROUPS`: rows, sources, the mean over sources of their mean relative
        errors and of their mean log ratios of predicted to measured (the bias), the number of
        sources that are predicted slower than measured, and the share of rows inside."""
        frame = pd.DataFrame(
            {
                "source": self.source,
                "group": getattr(self, group),
                "error": np.abs(self.predicted_s / self.measured_s - 1),
                "log": np.log(self.predicted_s / self.measured_s),
                "inside": (self.lo_s <= self.measured_s) & (self.measured_s <= self.hi_s),
            }
        )[self.compared & (getattr(self, group) != "")]
        figures = {}
        for name, rows in frame.groupby("group"):
            by_source = rows.groupby("source")
            figures[str(name)] = {
                "rows": len(rows),
                "sources": len(by_source),
                "mean_over_sources": float(by_source["error"].mean().mean()),
                "bias": float(np.expm1(by_source["log"].mean().mean())),
                "slower": int((by_source["log"].mean() > 0).sum()),
                "inside": float(rows["inside"].mean()),
            }
        return figures

    def scores_of_intervals(self) -> dict[str, float]:
        """Scores of the predicted intervals (`interval_scores`)."""
        return interval_scores(self.source, self.measured_s, self.predicted_s, self.lo_s, self.hi_s)

    def deciles(self) -> list[WidthDecile]:
        """Reliability of the intervals by decile of their width (`width_deciles`)."""
        return width_deciles(self.measured_s, self.predicted_s, self.lo_s, self.hi_s)


def _numbers(predictions: pd.DataFrame, name: str) -> Float[np.ndarray, " runs"]:
    """A column of predictions; NaN if it is missing, as in some first looks."""
    if name not in predictions:
        return np.full(len(predictions), np.nan)
    return np.asarray(pd.to_numeric(predictions[name]), float)


def _texts(predictions: pd.DataFrame, name: str) -> np.ndarray:
    """A column of predictions; empty texts if it is missing, as in some first looks."""
    if name not in predictions:
        return np.full(len(predictions), "")
    return predictions[name].fillna("").to_numpy(str)


def blind_figures(first: Look, today: Look, known: KnownSources) -> dict[str, Any]:
    """Scores of the first looks and of today, over all sources that were blind, and source by
    source."""
    blind = np.array([known.was_blind(source) for source in first.source.tolist()], bool)

    # Source by source all are shown; those that somebody had looked at count in no total.
    sources = {}
    for source in dict.fromkeys(first.source.tolist()):
        rows = first.source == source
        sources[source] = {"first": first.take(rows).score(), "today": today.take(rows).score()}
    figures = {}
    for which, look in (("first", first.take(blind)), ("today", today.take(blind))):
        figures[which] = look.score()
        if figures[which]["predicted"]:
            figures[which]["intervals"] = look.scores_of_intervals()
    now = today.take(blind)
    figures["described"] = now.described().score()
    figures["narrower_half"] = now.narrower_half().score()
    figures["unlikely_to_fit"] = now.unlikely_to_fit()
    figures["groups"] = {group: now.by_group(group) for group in _GROUPS}
    return figures | {"sources": sources}


# --- the page
# -----------------------------------------------------------------------------------------

_HEAD: Final = """# The blind record

Made by `make blind`. Every source of published runs is predicted once before anything is changed for it, and the
answers are kept with the commit in the tables beside this page: the error that a stranger meets. `today` is the present
version on the same rows, with settings that their notes state in columns (`validate/prepared_runs.py`; first looks had
none of them) and the runs of a source's teams (`perfmodel/prediction/sites/teams.toml`) left out of
everything that is fitted; once something was changed with a source's results in view it is no longer blind.

"""


def blind_page(
    figures: Mapping[str, Any], looks: Sequence[pd.DataFrame], today: Look, known: KnownSources
) -> str:
    """The record as Markdown."""
    has_today = bool(figures["today"]["predicted"])
    parts = [_HEAD + _summary_table(figures)]
    if has_today:
        parts.append(_details(figures))
    parts += [
        "## Source by source",
        "Mean error of the rows that are predicted, of all that were measured, and the share of them inside their "
        "interval. The median row's ends are a factor `ends apart` from one another. Changed after the first look at "
        f"every source: {'; '.join(known.changes_for_all)}.",
        _sources_table(figures["sources"], looks, known),
    ]
    # First looks have neither groups nor all that intervals rest on.
    if has_today:
        parts += [
            "## By device, kind of model and framework",
            "Today's predictions of sources that nobody had looked at. Every source counts the same; a positive bias is "
            "slower than measured, as so many of the sources are in the mean of their own rows.",
            _groups_table(figures["groups"]),
            "## Whether intervals are wide where errors are large",
            "Today's predictions, from the narrowest intervals to the widest.",
            deciles_table(today.deciles()),
        ]
    return "\n\n".join(parts) + "\n"


def _summary_table(figures: Mapping[str, Any]) -> str:
    """Scores over all blind sources: of the first looks, and of today's predictions where there are
    any."""
    head = (
        "sources that nobody had looked at",
        "sources",
        "rows",
        "mean over sources",
        "median row",
        "inside 90 %",
        "inside, mean over sources",
        "ends apart",
        "interval score",
        "one fixed interval",
    )
    rows = []
    for name, when in (("first look", "first"), ("today", "today")):
        if figures[when]["predicted"]:
            rows.append((name, *_summary_cells(figures[when])))
    return rows_table(head, rows)


def _sources_table(
    sources: Mapping[str, Any], looks: Sequence[pd.DataFrame], known: KnownSources
) -> str:
    """Table with a row per source: its first look, today's score, and whether anybody looked at
    it."""
    head = (
        "source",
        "commit",
        "rows",
        "first: predicted",
        "error",
        "inside",
        "ends apart",
        "today: predicted",
        "error",
        "inside",
        "ends apart",
        "looked at",
        "changed for it",
    )
    # A source is recorded as a whole, so that all of its rows have one commit.
    commits = {}
    for look in looks:
        commits |= dict(zip(look["source"], look["commit"], strict=True))
    rows = [
        _source_cells(name, commits.get(name, ""), scores, known)
        for name, scores in sources.items()
    ]
    return rows_table(head, rows)


def _groups_table(groups: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Table of the figures of `Look.by_group`, for all columns one below the other."""
    rows = []
    for by_value in groups.values():
        for name, figures in by_value.items():
            n_rows = str(figures["rows"])
            n_sources = str(figures["sources"])
            error = percent(figures["mean_over_sources"])
            inside = percent(figures["inside"])
            slower = f"{figures['slower']} of {figures['sources']}"
            bias = f"{100 * figures['bias']:+.1f} %"
            rows.append((name, n_rows, n_sources, error, bias, slower, inside))
    return rows_table(
        ("", "rows", "sources", "mean over sources", "bias", "slower", "inside"), rows
    )


def _details(figures: Mapping[str, Any]) -> str:
    """Today's figures of the rows that are described best, and of whether runs that ran were told
    to fit."""
    described, narrow = figures["described"], figures["narrower_half"]
    sentences = []
    if described["predicted"]:
        sentences.append(
            f"{described['predicted']} rows are fully described: what they leave open moves their step time by a "
            f"standard deviation of at most {percent(DESCRIBED)}. Their mean error over {described['sources']} sources "
            f"is {percent(described['mean_over_sources'])}, that of the median row {percent(described['median_row'])}."
        )
    if narrow["predicted"]:
        sentences.append(
            f"In the half of the rows with the narrowest intervals the ends of the median row's are a factor "
            f"{narrow['ratio']:.2f} apart, and {percent(narrow['inside'])} lie inside."
        )
    sentences.append(
        f"{figures['unlikely_to_fit']} rows ran although they are given a probability to fit below {UNLIKELY}; "
        "`validate/memory.py` names them, with the reason where it is known."
    )
    return "Today: " + " ".join(sentences)


def _summary_cells(score: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of a score (`Look.score`) and of the scores of its intervals."""
    intervals = score["intervals"]
    return (
        str(score["sources"]),
        f"{score['predicted']} of {score['rows']}",
        percent(score["mean_over_sources"]),
        percent(score["median_row"]),
        percent(score["inside"]),
        percent(score["inside_over_sources"]),
        f"{score['ratio']:.2f}",
        f"{intervals['ours']:.3f}",
        f"{intervals['fixed']:.3f}",
    )


def _source_cells(
    source: str, commit: str, scores: Mapping[str, Any], known: KnownSources
) -> tuple[str, ...]:
    """Cells of a source's row: both scores, and what was changed for this source alone."""
    for_all = known.changes_for_all
    changes = "; ".join(change for change in known.changes_of(source) if change not in for_all)
    cells = [*_look_cells(scores["first"]), *_look_cells(scores["today"])]
    n_rows = str(scores["first"]["rows"])
    return source, commit, n_rows, *cells, looked_at(source, "", known), changes


def _look_cells(score: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells of a look: number of predicted rows, mean error, coverage, and the ratio of the
    interval's ends."""
    if not score["predicted"]:
        return "0", "-", "-", "-"
    error = percent(score["mean_over_sources"])
    inside = percent(score["inside"])
    return str(score["predicted"]), error, inside, f"{score['ratio']:.2f}"
