"""Predictions, searches and what-ifs in notebooks, from the plain values that their `to_dict` gives."""

from collections.abc import Mapping
from typing import Any

from perfmodel.display._html import bar, folded, paragraph, table
from perfmodel.display._palette import PARTS, Look
from perfmodel.units import GIB, duration

_MOST_EVENTS = 20


def prediction_html(values: Mapping[str, Any], timeline: str = "") -> str:
    """Step time, rates and memory; breakdown, memory, critical path and origin of the times fold open.

    Args:
        values: of `Prediction.to_dict`.
        timeline: HTML of the timeline, if there is one.
    """
    step_s, capacity = values["step_time_s"], values["memory_capacity_bytes"]
    peak = values["memory_bytes"]["peak"]
    fits = "fits" if values["fits"] else "does not fit"
    summary = [
        ("step time", f"{duration(step_s)} (90 %: {duration(values['step_time_lo_s'])} to "
                      f"{duration(values['step_time_hi_s'])})"),
        ("MFU", f"{values['mfu']:.1%}, {values['tflops_per_device']:.0f} TFLOP/s per device"),
        ("tokens per second and device", f"{values['tokens_per_s_per_device']:,.0f}"),
        ("bubble", f"{values['bubble_fraction']:.1%}"),
        ("memory", f"{peak / GIB:.1f} of {capacity / GIB:.0f} GiB, {fits}"),
    ]  # fmt: skip
    parts = [f"<b>{paragraph(_job(values), values['layout'])}</b>", table(("", ""), summary)]
    if notes := [*values["reasons"], *values["warnings"]]:
        parts.append(paragraph(*notes))
    parts.append(_breakdown(values["breakdown_s"], step_s))
    per_stage = values["memory_bytes"]["per_stage"]
    rows = [[f"rank {i}", *(f"{v / GIB:.2f}" for v in stage.values())] for i, stage in enumerate(per_stage)]
    parts.append(folded("memory per pipeline rank, GiB", table(("", *per_stage[0]), rows)))
    events = [
        (e["event"], f"{e['count']:.0f}", duration(e["time_s"]), f"{e['time_s'] / step_s:.1%}")
        for e in values["critical_path"][:_MOST_EVENTS]
    ]
    parts.append(folded("critical path", table(("event", "count", "time", "share"), events)))
    origins = [(name, f"{share:.1%}") for name, share in values["provenance"].items() if share >= 0.0005]
    parts.append(folded("where the times come from", table(("origin", "share of the critical path"), origins)))
    if timeline:
        parts.append(folded("timeline", timeline))
    return "".join(parts)


def search_html(values: Mapping[str, Any]) -> str:
    """The ranked layouts, each folding open to its prediction, and why others were rejected.

    Args:
        values: of `SearchResult.to_dict`.
    """
    layouts = values["layouts"]
    rows = [
        (_rank(p, place), p["layout"], duration(p["step_time_s"]),
         f"{duration(p['step_time_lo_s'])} to {duration(p['step_time_hi_s'])}",
         f"{p['mfu']:.1%}", f"{p['bubble_fraction']:.1%}", f"{p['memory_bytes']['peak'] / GIB:.1f}",
         f"{p['probability_first_better']:.0%}" if place and "rank" in p else "")
        for place, p in enumerate(layouts)
    ]  # fmt: skip
    counts = f"{values['evaluated']:,} layouts scored, {values['feasible']:,} fit, {values['seconds']:.1f} s"
    parts = [paragraph(_job(layouts[0]) if layouts else "", counts)]
    parts.append(table(("#", "layout", "step", "90 % interval", "MFU", "bubble", "GiB", "1st better"), rows))
    if any(p.get("tied") for p in layouts):
        parts.append(paragraph("=: as likely faster as slower than the first of its rank (45 to 55 %)"))
    if layouts:
        parts.append(folded("the best layout", prediction_html(layouts[0])))
    if values["rejected"]:
        rejected = [(reason, f"{count:,}") for reason, count in values["rejected"].items()]
        parts.append(folded("rejected", table(("why", "layouts"), rejected)))
    return "".join(parts)


def _rank(values: Mapping[str, Any], place: int) -> str:
    """As in `Robustness.ranks`; those that are tied end in =."""
    return f"{values.get('rank', place + 1)}{'=' * values.get('tied', False)}"


def whatif_html(values: Mapping[str, Any]) -> str:
    """Step time before and after, and what 10 % more of each parameter would change.

    Args:
        values: of `WhatIf.to_dict`.
    """
    before, after = values["before"], values["after"]
    fits = {True: "fits", False: "does not fit"}
    rows = [
        (name, duration(side["step_time_s"]), fits[side["fits"]])
        for name, side in (("as it is", before), (", ".join(values["settings"]) or "no setting", after))
    ]
    effects = sorted(values["sensitivity"].items(), key=lambda item: -abs(item[1]))
    changes = [(name.replace("_", " "), f"{1.1**value - 1:+.2%}") for name, value in effects]
    return (
        table(("", "step time", "memory"), rows)
        + paragraph(f"change {values['change']:+.1%}", *values["notes"])
        + folded("sensitivity", table(("10 % more of", "changes the step by"), changes), opened=True)
    )


def _job(values: Mapping[str, Any]) -> str:
    return (
        f"{values['model']} on {values['devices']} devices of {values['cluster']}, "
        f"global batch {values['global_batch']}, sequence {values['seq_len']}"
    )


def _breakdown(breakdown_s: Mapping[str, float], step_s: float) -> str:
    looks = {name: PARTS.get(name, Look("#B39DDB", name.replace("_", " "))) for name in breakdown_s}
    order = [*(n for n in PARTS if n in breakdown_s), *(n for n in breakdown_s if n not in PARTS)]
    rows = [
        (looks[n].label, duration(breakdown_s[n]), f"{breakdown_s[n] / step_s:.1%}") for n in order if breakdown_s[n]
    ]
    coloured = bar([(looks[n].label, looks[n].colour, breakdown_s[n] / step_s) for n in order])
    return coloured + folded("breakdown", table(("mean over pipeline ranks", "time", "share"), rows))
