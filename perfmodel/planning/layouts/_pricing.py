"""Computes memory and lower bounds of all layouts of a question.

On nodes of several kinds no two stages cost the same, so there are no grids of layouts. For every
layout of the space, dynamic programming finds the best orders of the kinds and cuts of the layers
(`planning.optimise.balanced`), the most promising first by a bound over all of these.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import islice
from typing import Final

import numpy as np

from perfmodel.display import Report
from perfmodel.errors import LayoutError, Reason, Rejection
from perfmodel.planning.layouts._candidates import Candidates, gather
from perfmodel.planning.layouts._enumerate import enumerate_grids
from perfmodel.planning.layouts._space import SearchSpace
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.optimise import balanced, spread_bound_s
from perfmodel.prediction import StepProblem, evaluate
from perfmodel.prediction.grids import GridCosts, LayoutGrid, price_grids
from perfmodel.prediction.memory import CATEGORIES, peak_memory
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster, Layout
from perfmodel.units import number_of

AT_ONCE: Final = 32
"""Number of layouts whose stages are cut before bounds are compared again."""


def price(
    question: Question,
    rejected: Counter[Rejection],
    report: Report = lambda *_: None,
    at_least: int | None = None,
) -> Candidates:
    """Compute memory and lower bounds of all layouts of a question.

    Args:
        question: job and layouts.
        rejected: gets the number of combinations that cannot run or do not fit, by reason.
        report: called with the name of each stage and how far it is.
        at_least: number of the fastest layouts that must be among the priced ones; None: all
            layouts are priced.

    Raises:
        LayoutError: no layout is possible at all (the message counts the reasons).
    """
    if question.problem.cluster.kinds:
        return _price_on_kinds(question, rejected, report, at_least)
    grids = list(enumerate_grids(question.space, question.problem, rejected))
    if not grids:
        raise _none_possible(question, rejected)
    usable_bytes = question.step_problem.usable_bytes

    def reported(costs):
        for done, cost in enumerate(costs, 1):
            report("price", done, len(grids))
            yield cost

    return gather(
        reported(price_grids(question.step_problem, grids, usable_bytes)),
        usable_bytes,
        rejected,
    )


def _price_on_kinds(
    question: Question, rejected: Counter[Rejection], report: Report, at_least: int | None
) -> Candidates:
    """Price layouts on a cluster with several kinds of nodes.

    The same layout with other orders of kinds and other cuts of the layers is several candidates.
    Layouts that a bound shows to be slower than the `at_least` best are rejected.
    """
    problem = question.step_problem

    # A base is a layout without order of its kinds or cut of its layers. Its bound holds for all
    # orders and cuts.
    bases = list(_bases(question, rejected))
    if not bases:
        raise _none_possible(question, rejected, f" of the kinds of {problem.cluster.name}")
    bound_s = np.array([spread_bound_s(problem, base) for base in bases])

    # Branch and bound over the bases: the most promising are cut first, and the search stops
    # where the next bound is above the last wanted step time.
    order = iter(np.argsort(bound_s, kind="stable").tolist())
    uneven = question.problem.framework.capabilities.uneven_stages or question.space.any_framework
    priced: list[tuple[Layout, float]] = []
    best_s: list[float] = []
    n_open = len(bases)
    while n_open:
        report("price", len(bases) - n_open, len(bases))
        worst_s = best_s[-1] if at_least and len(best_s) == at_least else np.inf
        batch = [bases[i] for i in islice(order, AT_ONCE) if bound_s[i] <= worst_s]
        n_open -= len(batch)
        if not batch:
            rejected[Rejection(Reason.SLOWER)] += n_open
            break
        cuts: list[tuple[Layout, float]] = []
        for base in batch:
            cuts_of_base, least_s = balanced(problem, base, uneven=uneven, worst_s=worst_s)
            cuts += [(cut, least_s) for cut in cuts_of_base]
            if cuts_of_base:
                continue
            # Without a cut, a finite bound says that none beats the worst time wanted, an infinite
            # one that none fits.
            if np.isfinite(least_s):
                rejected[Rejection(Reason.SLOWER)] += 1
            else:
                _, largest_categories = peak_memory(problem, [base])
                rejected[Rejection(Reason.MEMORY, largest_categories[0])] += 1
        if cuts:
            priced += cuts
            best_s = nsmallest(
                at_least or 1, [*best_s, *_best_of_bases(problem, [cut for cut, _ in cuts])]
            )
    return _candidates(problem, priced, bases)


def _best_of_bases(problem: StepProblem, layouts: Sequence[Layout]) -> list[float]:
    """Step time of the fastest order and cut of each base."""
    # Several orders and cuts of one base count once among the best, or else variants of one
    # layout would fill the list and end the search too early.
    best_s: dict[Layout, float] = {}
    for layout, step_s in zip(
        layouts, evaluate(problem, layouts).step_time_s.tolist(), strict=True
    ):
        base = layout.replace(kinds=None, partition=None, recompute_full_layers=None)
        best_s[base] = min(step_s, best_s.get(base, np.inf))
    return list(best_s.values())


def _none_possible(
    question: Question, rejected: Counter[Rejection], on_kinds: str = ""
) -> LayoutError:
    """Return the error that no layout is possible, with the reasons and how often each holds."""
    reasons = "; ".join(f"{reason} ({count:,} tried)" for reason, count in rejected.most_common())
    name = question.problem.model.name
    return LayoutError(
        f"no layout of {name} is possible on {number_of(question.devices, 'device')}{on_kinds}: {reasons}"
    )


def _bases(question: Question, rejected: Counter[Rejection]) -> Iterator[Layout]:
    """Layouts of one stage per pipeline rank, with the most ranks that each kind can have."""
    space, cluster = question.space, question.problem.cluster
    narrowed = _narrowed(space, rejected)
    # Whether a schedule gives every rank one stage, in order, takes a schedule to find out, but
    # depends on its name and the number of stages alone.
    in_order: dict[tuple[str, int], bool] = {}
    for grid in enumerate_grids(narrowed, question.problem, rejected):
        supplies = list(_supplies(cluster, grid.degrees))
        if not supplies:
            rejected[Rejection(Reason.KINDS)] += grid.size
            continue
        for layout in grid.layouts():
            pipeline = layout.effective_schedule, layout.pp
            if pipeline not in in_order:
                in_order[pipeline] = _fills_ranks_in_order(*pipeline)
            if not in_order[pipeline]:
                rejected[Rejection(Reason.ONE_KIND, f"schedule {layout.schedule}")] += 1
                continue
            yield from (layout.replace(kinds=supply) for supply in supplies)


def _fills_ranks_in_order(schedule: str, ranks: int) -> bool:
    """Whether pipeline ranks hold one stage each, in order and without copies."""
    scheduler = get_schedule(schedule)
    return scheduler.stage_map(ranks, scheduler.chunks_for(1)).tolist() == [
        [rank] for rank in range(ranks)
    ]


def _narrowed(space: SearchSpace, rejected: Counter[Rejection]) -> SearchSpace:
    """The space without the fields that dynamic programming decides: full recompute and the layers
    recomputed in full of each stage."""
    searched = {
        "vpp": tuple(n for n in space.vpp if n == 1),
        "order": tuple(order for order in space.order if order.endswith("pp")),
        "offload": tuple(offload for offload in space.offload if not offload),
        "offload_layers": tuple(n for n in space.offload_layers if not n),
    }
    for name, values in searched.items():
        for value in getattr(space, name):
            if value not in values:
                rejected[Rejection(Reason.ONE_KIND, f"{name}={str(value).lower()}")] += 1
        if not values:
            raise LayoutError(
                f"search: no {name} in the space works with several kinds of nodes; leave {name} open, or search "
                "each kind alone",
                Reason.KINDS,
            )

    # Dynamic programming chooses the layers to recompute in full stage by stage, so that they are
    # no dimension of the space here.
    recompute = tuple(mode for mode in space.recompute if mode != "full") or space.recompute
    return replace(space, **searched, recompute=recompute, recompute_full_layers=(None,))


def _supplies(cluster: Cluster, degrees: Layout) -> Iterator[tuple[str, ...]]:
    """All ways to share a layout's pipeline ranks among kinds of nodes, kind by kind."""

    def shared(ranks: int, room: list[tuple[str, int]]) -> Iterator[tuple[str, ...]]:
        """Yield the kind of each of the ranks; `room` holds each kind and its most ranks."""
        if not room:
            if not ranks:
                yield ()
            return

        # Every kind in turn takes from as many ranks as it has room for down to none, the
        # remaining kinds take the rest.
        (name, most), *rest = room
        for used in range(min(most, ranks), -1, -1):
            for used_of_others in shared(ranks - used, rest):
                yield (name,) * used + used_of_others

    yield from shared(degrees.pp, list(cluster.stages_of(degrees).items()))


def _candidates(
    problem: StepProblem, priced: list[tuple[Layout, float]], bases: list[Layout]
) -> Candidates:
    """Every layout as a grid of its own."""
    layouts = [layout for layout, _ in priced]
    peak = peak_memory(problem, layouts)[0] if layouts else np.zeros(0)
    costs = []
    for (layout, least_s), n_bytes in zip(priced, peak.tolist(), strict=True):
        # No two of these layouts share costs; a grid of one point lets the search treat them as
        # any others.
        grid = LayoutGrid.one(layout)
        empty_axes = (
            np.full((1, 1, 1, 1), n_bytes),
            np.zeros((1, 1, 1, 1), int),
            np.zeros(1, int),
            np.zeros(1, int),
        )
        costs.append(
            GridCosts(
                grid,
                *empty_axes,
                np.full((1, 1, 1, 1), least_s, np.float32),
                np.zeros(len(CATEGORIES), int),
            )
        )
    bounds = np.array([least_s for _, least_s in priced], np.float32)
    if not layouts:
        layouts = bases
        peak = peak_memory(problem, bases)[0]
    smallest = int(peak.argmin())
    return Candidates(tuple(costs), bounds, len(priced), (layouts[smallest], float(peak[smallest])))
