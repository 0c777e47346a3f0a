"""Prints a search: a table for narrow terminals, the best layout to paste, the next command."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Final

from perfmodel.display import table
from perfmodel.prediction.text import memory_words, print_breakdown, throughput_words
from perfmodel.units import GIB, batch_words, duration, figure, long_duration, number_of, scaled

if TYPE_CHECKING:
    from rich.console import Console

    from perfmodel.planning.layouts import Improvement, ParetoFront, SearchResult
    from perfmodel.prediction import Prediction

Column = Callable[[int, "Prediction"], str]
"""Function of place and prediction that returns a cell."""
_IN_EVERY_TABLE: Final = (
    "step_time_s",
    "memory_bytes",
    "memory_gib",
    "mfu",
    "devices",
    "global_batch",
)
"""Quantities that the ranking shows without being asked."""
NARROW: Final = 100
"""Width of a terminal below which a table keeps only the most important figures."""
_UNITS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "step_time": ("step", duration),
    "memory": ("GiB", lambda v: f"{v / GIB:.1f}"),
    "mfu": ("MFU", lambda v: f"{v:.1%}"),
    "energy": ("energy", lambda v: scaled(v, "J")),
    "power": ("power", lambda v: scaled(v, "W")),
    "cost": ("cost, $", lambda v: figure(v, 3)),
    "train_time": ("training", long_duration),
    "tokens_per_s": ("tokens/s", lambda v: f"{v:,.0f}"),
    "tokens_per_s_per_device": ("tokens/s/device", lambda v: f"{v:,.0f}"),
    "devices": ("devices", lambda v: f"{v:.0f}"),
}
"""Heading and number format of a column, by the name of the objective or quantity without its
unit."""


def print_search(
    console: "Console",
    result: "SearchResult",
    command: str = "",
    run: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> None:
    """Print the ranking, the best layout and the next command; with `verbose` also how the search
    went and why others were rejected.

    Args:
        command: makes the winner's prediction again; empty where none does.
        run: lines of the winner's whole run.
    """
    if result.layouts:
        _heading(console, result)
        _ranking(console, result, run)
        _winner(console, result, command, run)
    beyond = result.beyond
    if beyond:
        gain = f", {beyond.gain:.1%} better" if isfinite(beyond.gain) else ""
        console.print(
            f"if {result.framework} could run every layout: {duration(beyond.step_time_s)}{gain}"
        )
        console.print(f"  {beyond.notation}", soft_wrap=True, markup=False)
    console.print(
        f"{_evaluated_line(result.feasible, result.evaluated, result.seconds)}; {result.certificate}"
    )

    # Without any layout, the account of the rejected is the only answer there is.
    if verbose or not result.layouts:
        _account(console, result)
    if verbose and result.layouts:
        print_breakdown(console, result.layouts[0], "where the best layout's step goes")


def _evaluated_line(feasible: int, evaluated: int, seconds: float) -> str:
    """The sentence that says how many layouts fit and were evaluated, and how long it took."""
    fit = "1 layout fits" if feasible == 1 else f"{feasible:,} layouts fit"
    were = "was" if evaluated == 1 else "were"
    return f"{fit} into memory; {evaluated:,} of them {were} fully evaluated, in {seconds:.1f} s"


def print_pareto(console: "Console", front: "ParetoFront") -> None:
    """Print a row per layout, sorted by the first objective."""
    rows = []
    for values, p in zip(front.values.tolist(), front.layouts, strict=True):
        cells = [
            _quantity(name)[1](value) for name, value in zip(front.objectives, values, strict=True)
        ]
        rows.append((*cells, p.layout_notation))
    console.print("Pareto front: no other layout is better in every objective")
    layout_last(console, [_quantity(name)[0] for name in front.objectives], rows)
    console.print(f"{_evaluated_line(front.feasible, front.evaluated, front.seconds)}; exact")


def _heading(console: "Console", result: "SearchResult") -> None:
    """Print the job, the objective and the constraints."""
    best = result.layouts[0]
    batches = ", ".join(str(b.layouts[0].global_batch) for b in result.batches if b.layouts)
    console.print(
        f"{best.model} on {number_of(best.devices, 'device')} of {best.cluster}, "
        f"{batch_words(batches or best.global_batch, best.seq_len, best.sample_unit)}"
    )
    goal = []
    if result.objective != "step_time":
        goal.append(f"objective {result.objective}")
    if result.constraints:
        goal.append(f"where {' and '.join(result.constraints)}")
    if result.robust:
        goal.append(f"in the robust order of {result.robust}")
    if result.framework != "generic":
        goal.append(f"only layouts that {result.framework} can run")
    if {"cost, $", "energy"} & set(_asked_for(result)) and "train_time_s" not in result.quantities[
        0
    ]:
        goal.append(f"cost and energy are those of a million {best.sample_unit}")
    if goal:
        console.print(", ".join(goal))


def _columns(result: "SearchResult", is_wide: bool) -> "dict[str, Column]":
    """Columns of the ranking by heading; each makes a cell from a place and its prediction."""
    # Layouts that cannot be told apart share a rank, shown as `2=`.
    ranks = list(range(1, len(result.layouts) + 1))
    if result.robustness:
        ranks = result.robustness.ranks
    columns: dict[str, Column] = {
        "#": lambda i, _: f"{ranks[i]}=" if ranks.count(ranks[i]) > 1 else str(ranks[i]),
        "step": lambda _, p: duration(p.step_time_s),
        "90 % interval": lambda _, p: interval(p.step_time_lo_s, p.step_time_hi_s),
        "MFU": lambda _, p: f"{p.mfu:.1%}",
        "GiB": lambda _, p: f"{p.memory_needed_bytes / GIB:.1f}",
        "fits": lambda _, p: f"{p.fits_probability:.2f}",
    }
    if is_wide:
        columns["bubble"] = lambda _, p: f"{p.bubble_fraction:.1%}"
    columns |= _asked_for(result)
    robustness = result.robustness
    if robustness is None:
        return columns

    # Predictions err together: how sure is it that the first is better?
    head = "1st faster" if result.objective == "step_time" else "1st better"
    columns[head] = lambda i, _: f"{robustness.better[0, i]:.0%}" if i else ""
    if result.robust == "best":
        columns["is best"] = lambda i, _: f"{robustness.best[i]:.0%}"
    elif result.robust:
        columns["regret"] = lambda i, _: f"{robustness.regret[i]:.1%}"
    return columns


def _ranking(console: "Console", result: "SearchResult", run: Sequence[str]) -> None:
    """Print a row per ranked layout, with the columns that apply to this search."""
    columns = _columns(result, is_wide=console.width >= NARROW)
    rows = []
    for i, p in enumerate(result.layouts):
        cells = [cell(i, p) for cell in columns.values()]
        rows.append((*cells, p.layout_notation))
    layout_last(console, list(columns), rows)
    if run and {"cost, $", "training"} & {*columns}:
        console.print(
            "cost, training: without failures and restarts, which the recommended layout's figures include"
        )
    if result.robustness and len({*result.robustness.ranks}) < len(result.robustness.ranks):
        console.print("=: tied with the first of its rank (the chance to be faster is 45 to 55 %)")
    # Layouts on nodes of several kinds have memories of several sizes.
    capacities = {p.memory_capacity_bytes for p in result.layouts}
    capacity_text = f", of {capacities.pop() / GIB:.1f}" if len(capacities) == 1 else ""
    console.print(
        f"GiB: needed on the fullest device{capacity_text}; fits: probability that it fits"
    )


def _asked_for(result: "SearchResult") -> dict[str, Column]:
    """Return columns for facts beyond the notation in which layouts differ, and for quantities
    named by objective and constraints."""
    from perfmodel.planning.layouts import OBJECTIVES

    further_columns: dict[str, Column] = {}
    if len({p.devices for p in result.layouts}) > 1:
        further_columns["devices"] = lambda _, p: str(p.devices)
    if result.batches:
        further_columns["batch"] = lambda _, p: str(p.global_batch)

    # Money and training time are shown whenever the tariff gives them. Other quantities are shown
    # if the objective or a constraint names them, unless the table has them anyway.
    named = " ".join([result.objective, *result.constraints])
    for name in result.quantities[0] if result.quantities else ():
        is_asked_for = name in ("train_time_s", "cost") or name.rsplit("_", 1)[0] in named
        if is_asked_for and name not in _IN_EVERY_TABLE:
            heading, column = _quantity_column(result, name)
            further_columns[heading] = column
    if result.objective not in OBJECTIVES and result.objective not in further_columns:
        further_columns["objective"] = lambda i, _: figure(result.values[i])
    return further_columns


def _quantity_column(result: "SearchResult", name: str) -> tuple[str, Column]:
    """Heading and cells of a quantity's column."""
    heading, text_of = _quantity(name)
    unit = result.layouts[0].sample_unit

    # People count the samples of these models, which is not the search's own unit.
    if unit != "tokens" and name.startswith("tokens_per_s"):
        return heading.replace("tokens", unit), lambda place, p: figure(
            result.quantities[place][name] / p.tokens_per_counted_sample, 3
        )
    is_per_million = name in ("cost", "energy_j") and "train_time_s" not in result.quantities[0]
    if unit != "tokens" and is_per_million:
        return heading, lambda place, p: text_of(
            result.quantities[place][name] * p.tokens_per_counted_sample
        )
    return heading, lambda place, _: text_of(result.quantities[place][name])


def _winner(console: "Console", result: "SearchResult", command: str, run: Sequence[str]) -> None:
    """The recommended layout, a better one that may not fit, and the command to predict it."""
    best, riskier = result.first_to_try, result.riskier
    min_fit = result.recommendation.min_fit
    # A layout that may well not fit is never called recommended.
    if best.fits_probability >= min_fit:
        head = "recommended"
    else:
        console.print(
            f"no layout fits with a probability of {min_fit:g} or more (--min-fit); use more devices, or free "
            "more memory"
        )
        head = "most likely to fit"
    console.print(f"{head}: {best.layout_notation}", soft_wrap=True, markup=False)
    for line in (*_facts(best), *run):
        console.print(f"  {line}", markup=False)
    if riskier is not None:
        better = "faster" if result.objective == "step_time" else f"better {result.objective}"
        console.print(
            f"{better}, but riskier: {riskier.layout_notation}",
            soft_wrap=True,
            markup=False,
        )
        for line in _facts(riskier):
            console.print(f"  {line}", markup=False)
    if command:
        console.print(f"next: {command}", soft_wrap=True, markup=False)


def _facts(p: "Prediction") -> tuple[str, str]:
    """Lines on step time and throughput, and on the memory of a layout, as `predict` has them."""
    return (
        f"{duration(p.step_time_s)} per step, {throughput_words(p)}",
        memory_words(p),
    )


def _account(console: "Console", result: "SearchResult") -> None:
    """Print the method of the search, and why other layouts are not ranked."""
    cuts = [improvement.result for improvement in result.improvements]
    for improvement in result.improvements:
        cut = improvement.result
        if cut.gain > 1e-3:
            gain = "does not fit without this" if cut.given_s is None else f"{cut.gain:.1%} faster"
            figures = f"{cut.prediction.layout_notation}: {duration(cut.step_time_s)}, {gain}"
            console.print(f"{improvement.how}, {_changes(improvement)}: {figures}", markup=False)
        buckets = improvement.buckets
        if buckets is not None and buckets.gain > 1e-3:
            console.print(
                f"gradient buckets of {buckets.most_layers} layers make {cut.prediction.layout_notation} "
                f"{buckets.gain:.1%} faster than ranked here (with a bucket per layer)",
                markup=False,
            )
    # Only the number of cuts without a gain is shown.
    n_even = sum(cut.gain <= 1e-3 for cut in cuts)
    if n_even:
        console.print(f"uneven stages were tried for {n_even} layouts and were no faster")
    console.print(f"method {result.method}: {result.why}")
    console.print(f"space: {result.space}")
    if result.beyond:
        console.print(
            f"{result.framework} cannot run the faster layout: {'; '.join(result.beyond.cannot_run)}"
        )
    n_alike = result.evaluation.alike
    if n_alike:
        console.print(
            f"{n_alike:,} layouts differ from better ones only in what they recompute or offload"
        )
    if result.rejected:
        console.print(
            table(
                "rejected",
                ("why", "layouts"),
                [(k, f"{v:,}") for k, v in result.rejected.items()],
            )
        )


def _changes(improvement: "Improvement") -> str:
    """Describe what an improvement changed in its layout with even stages."""
    texts = []
    for name, (before, after) in improvement.changed.items():
        if name == "partition":
            texts.append("uneven stages")
        elif name == "micro_batch":
            texts.append(f"micro-batches of {after} instead of {before}")
        elif name == "recompute":
            texts.append(f"recompute={after} instead of {before}")
        else:
            texts.append("other layers recomputed in full")
    return ", ".join(texts) or "nothing changed"


def layout_last(console: "Console", heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Right-align the figures and put the layout in the last column.

    The layout has no spaces and is not broken, so that it can be copied; it has a line of its own
    if the terminal is too narrow for both.
    """
    # The layout's line is never wrapped, or else it could not be copied.
    figure_rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *figure_rows, strict=True)]
    longest = max(len(row[-1]) for row in rows)
    fits_one_line = sum(widths) + 2 * len(widths) + longest <= console.width
    for *figures, layout in [(*heads, "layout" * fits_one_line), *rows]:
        line = "  ".join(cell.rjust(width) for cell, width in zip(figures, widths, strict=True))
        below = "  " if fits_one_line else "\n" + " " * (widths[0] + 2)
        console.print(line + (below + layout if layout else ""), soft_wrap=True, markup=False)


def _quantity(name: str) -> tuple[str, Callable[[float], str]]:
    """Heading and number format of a quantity's column."""
    base_name = name
    for unit in ("_bytes", "_s", "_j", "_w"):
        base_name = base_name.removesuffix(unit) if name not in _UNITS else name
    return _UNITS.get(base_name, (name, figure))


def interval(lo_s: float, hi_s: float) -> str:
    """Format an interval with both ends in the unit of the upper one."""
    # Scale the lower end by the ratio of the upper end's figure to its seconds: both are then in
    # the same unit.
    upper, unit = duration(hi_s).split()
    scale = float(upper.replace(",", "")) / hi_s
    ends = [figure(lo_s * scale), upper]

    # Both ends have as many decimals as the one with more.
    decimals = max(len(end.partition(".")[2]) for end in ends)
    lower, upper = (f"{end_s * scale:,.{decimals}f}" for end_s in (lo_s, hi_s))
    return f"{upper} {unit}" if lower == upper else f"{lower}-{upper} {unit}"
