"""Predicted layouts as compact rows of the page: six significant figures, names stored once."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

from perfmodel.display import part_looks
from perfmodel.planning.decision._scenarios import Turned
from perfmodel.planning.training_run import TrainingRun
from perfmodel.prediction import GAUSS_90, Prediction
from perfmodel.prediction.memory import CATEGORIES
from perfmodel.prediction.sites import NOISE
from perfmodel.spec import DIMENSIONS, Layout
from perfmodel.units import fit_words

MOST_EVENTS: Final = 12
"""Most events of the critical path of a layout that a row lists."""
MOST_SOURCES: Final = 6
"""Most sources of error that a row lists for its layout."""
_SETTINGS: Final = (
    *(d.key for d in DIMENSIONS),
    "vpp",
    "micro_batch",
    "schedule",
    "zero",
    "recompute",
)
"""Fields of layouts that may have a column."""
_QUANTITIES: Final = {
    "step_s": ("step", "s", "low"),
    "lo_s": ("90 % from", "s", "low"),
    "hi_s": ("90 % to", "s", "low"),
    "tokens_per_s": ("{}/s", "", "high"),
    "tokens_per_s_per_device": ("{}/s and device", "", "high"),
    "mfu": ("MFU", "share", "high"),
    "bubble": ("bubble", "share", "low"),
    "memory_bytes": ("memory", "bytes", "low"),
    "fits": ("fits", "share", "high"),
    "best": ("is the best", "share", "high"),
    "usd": ("cost of a million {}", "money", "low"),
    "energy_j": ("energy of a million {}", "J", "low"),
    "devices": ("devices", "", "low"),
    "global_batch": ("global batch", "", ""),
}
"""Key in a row -> head of its column, unit, and which values are better."""
_SITE_WORDS: Final = {
    "products": "speed of matrix products at this site",
    "attention": "speed of attention at this site",
    "memory": "speed of memory-bound kernels at this site",
    "intra_node": "network inside the nodes of this site",
    "inter_node": "network between the nodes of this site",
    "host": "hosts of this site",
    "other": "all other times at this site",
    "unstated": "settings that are not stated",
    "extrapolated": "times without measurements",
    "bubble": "pipeline bubble",
}
"""Class of events or degree of `SitePrior` -> what is uncertain about it."""


def rows(
    predictions: Sequence[Prediction],
    runs: Sequence[TrainingRun],
    turned: Turned,
    best: Sequence[float] = (),
) -> dict[str, Any]:
    """Return `rows` and the names of their lists' entries: `parts` of the step, `categories` of
    memory, `origins` of times, `events` of critical paths, `quantities` and `settings`.

    Args:
        predictions: the rows, the best first.
        runs: training time, cost and energy of each row.
        turned: step times of each row on machines with other parameters.
        best: probability of each to be the best; none where there is one row.
    """
    # Parts, origins and events are lists of names for the whole page. Rows hold figures in the
    # order of these lists, which keeps a page of 100 layouts small.
    looks = part_looks(chain.from_iterable(p.breakdown_s for p in predictions))
    parts = _felt_parts(predictions, looks)
    origins = list(dict.fromkeys(chain.from_iterable(p.provenance for p in predictions)))
    events: dict[str, int] = {}
    records = []
    for i, (p, run) in enumerate(zip(predictions, runs, strict=True)):
        path = []
        for event in p.critical_path[:MOST_EVENTS]:
            number = events.setdefault(event.event, len(events))
            path.append([number, _six_figures(event.count), _six_figures(event.time_s)])
        record = _quantities(p, run)
        if len(best):
            record["best"] = _six_figures(best[i])
        record |= {
            "layout": p.layout_notation,
            "settings": [_setting(p.layout, name) for name in _SETTINGS],
            "breakdown_s": [_six_figures(p.breakdown_s.get(name, 0.0)) for name in parts],
            "memory": [_stage_memory(stage) for stage in p.memory_account.needed_per_stage],
            "capacity_bytes": p.memory_capacity_bytes,
            "origins": [_six_figures(p.provenance.get(name, 0.0)) for name in origins],
            "sources": _sources(p),
            "path": path,
            "fit_words": fit_words(p.fits_probability),
            "notes": [*p.reasons, *p.warnings],
            "elasticity": _all_six_figures(turned.elasticity[i].tolist()),
            "ratio": [_all_six_figures(ratios) for ratios in turned.ratio[i].tolist()],
        }
        records.append(record)
    unit = predictions[0].sample_unit
    return {
        "rows": records,
        "unit": unit,
        "tokens_per_unit": predictions[0].tokens_per_counted_sample,
        "parts": [{"label": looks[name].label, "colour": looks[name].colour} for name in parts],
        "categories": list(CATEGORIES),
        "origins": origins,
        "events": list(events),
        "quantities": _quantity_heads(records, unit),
        "settings": _varied_settings(predictions, records),
    }


def _felt_parts(predictions: Sequence[Prediction], names: Iterable[str]) -> list[str]:
    """Parts that the legend names: at least a millionth of the step of some layout."""
    felt = set()
    for p in predictions:
        felt.update(name for name, part_s in p.breakdown_s.items() if part_s > 1e-6 * p.step_time_s)
    return [name for name in names if name in felt]


def _quantity_heads(records: Sequence[dict[str, Any]], unit: str) -> list[dict[str, str]]:
    """Return the page's heading of each quantity; `unit` is what throughput is counted in."""
    heads = []
    for name, (head, figure_unit, better) in _QUANTITIES.items():
        # A batch that all rows share is in the page's heading already.
        is_in_heading = name == "global_batch" and _is_same_in_all(records, name)
        if name in records[0] and not is_in_heading:
            heads.append(
                {"key": name, "label": head.format(unit), "unit": figure_unit, "better": better}
            )
    return heads


def _varied_settings(
    predictions: Sequence[Prediction], records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Settings in which rows differ, with their places in `settings`."""
    has_folded_experts = any(p.layout.etp not in (None, p.layout.tp) for p in predictions)
    varied = []
    for i, name in enumerate(_SETTINGS):
        values = {row["settings"][i] for row in records}
        # Unless experts are folded, `etp` equals `tp` and needs no column of its own.
        if len(values) > 1 and (has_folded_experts or name != "etp"):
            varied.append({"key": name, "at": i})
    return varied


def _quantities(prediction: Prediction, run: TrainingRun) -> dict[str, float]:
    """Return the figures of a layout that the page can draw and filter by."""
    priced = {
        "usd": run.usd_per_million_tokens,
        "energy_j": run.energy_per_million_tokens_j,
    }
    return {name: _six_figures(value) for name, value in priced.items() if value is not None} | {
        "step_s": _six_figures(prediction.step_time_s),
        "lo_s": _six_figures(prediction.step_time_lo_s),
        "hi_s": _six_figures(prediction.step_time_hi_s),
        "tokens_per_s": _six_figures(prediction.tokens_per_s_per_device * prediction.devices),
        "tokens_per_s_per_device": _six_figures(prediction.tokens_per_s_per_device),
        "mfu": _six_figures(prediction.mfu),
        "bubble": _six_figures(prediction.bubble_fraction),
        "memory_bytes": _six_figures(prediction.memory_needed_bytes),
        "fits": _six_figures(prediction.fits_probability),
        "goodput": _six_figures(run.goodput.fraction),
        "devices": prediction.devices,
        "global_batch": prediction.global_batch,
    }


def _sources(prediction: Prediction) -> list[list[Any]]:
    """The largest sources of error in words, with their half-widths of a 90 % interval."""
    largest = sorted(prediction.uncertainty.by_source.items(), key=lambda item: -abs(item[1]))[
        :MOST_SOURCES
    ]
    return [
        [_source_words(name), _six_figures(GAUSS_90 * abs(sd))]
        for name, sd in largest
        if abs(sd) > 1e-4
    ]


def _source_words(name: str) -> str:
    """A source of error (`Uncertainty.by_source`) in words of the page's reader."""
    if name == NOISE:
        return "differences between repeated runs"
    kind, _, part = name.partition(": ")
    if kind == "site":
        return _SITE_WORDS[part]
    if kind == "fit":
        return "parameters fitted to your runs"
    return f"measured times of {part.replace('_', ' ')}"


def _setting(layout: Layout, name: str) -> Any:
    return layout.tp if name == "etp" and layout.etp is None else layout.value(name)


def _is_same_in_all(made: Sequence[dict[str, Any]], name: str) -> bool:
    return len({row[name] for row in made}) == 1


def _six_figures(value: float) -> float:
    return float(f"{value:.6g}")


def _all_six_figures(values: Iterable[float]) -> list[float]:
    return [_six_figures(value) for value in values]


def _stage_memory(stage: Any) -> list[float]:
    """Bytes of a stage by category."""
    return _all_six_figures(getattr(stage, name) for name in CATEGORIES)
