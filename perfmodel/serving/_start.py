"""Chooses layout and batch of a server if they are not given."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Unpack

from perfmodel.catalog.job_files import JobFile
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.serving._request import ServingKeywords, ServingProblem, serving_problem
from perfmodel.serving._serving import Serving, largest, served, server_of
from perfmodel.spec import Cluster, Framework, Layout, Model
from perfmodel.units import divisors, duration

USUAL_TTFT_S: Final = 1.0
USUAL_TPOT_S: Final = 0.05
"""Default limits of an interactive service: a second to the first token, then 20 tokens per
second."""
_ROOM: Final = 64
"""Requests that the cache of a replica should have room for: with fewer a server hardly batches."""


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """A server with an operating point, and the settings that were chosen for it."""

    serving: Serving
    chosen: tuple[str, ...]
    """Sentences on the settings that were left open, with the values chosen for them."""


def starting_point(
    model: Model | JobFile | str,
    cluster: Cluster | str | None = None,
    layout: Layout | str = "",
    *,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    **options: Unpack[ServingKeywords],
) -> StartingPoint:
    """Choose a sensible operating point: the layout and batch that are not given.

    The layout is the smallest that has room for some requests and meets the limits; the batch is
    the largest that meets them. Without limits, those of an interactive service apply.

    Args:
        model, cluster, layout, calibration, framework, options: as `serve` takes them.

    Raises:
        PerfModelError, LayoutError, UnknownNameError: as `serve`.
    """
    problem = serving_problem(model, cluster, options, calibration=calibration, framework=framework)
    chosen: list[str] = []
    layout = layout or problem.layout
    if not layout:
        layout = _smallest(problem)
        chosen.append(f"the layout is the smallest with room for {_ROOM} requests")
    laid_out = Layout.parse(layout) if isinstance(layout, str) else layout
    if problem.options.batch is not None:
        return StartingPoint(
            serving=served(server_of(problem, laid_out, problem.options.batch)),
            chosen=tuple(chosen),
        )

    server = server_of(problem, laid_out, laid_out.dp)
    # One limit that is given is taken alone: adding the usual other one might leave nothing.
    if problem.options.ttft_limit_s is not None or problem.options.tpot_limit_s is not None:
        return StartingPoint(serving=largest(server, problem.options), chosen=tuple(chosen))
    usual = replace(problem.options, ttft_limit_s=USUAL_TTFT_S, tpot_limit_s=USUAL_TPOT_S)
    limits = f"{duration(USUAL_TTFT_S)} to the first token and {duration(USUAL_TPOT_S)} for each after it"
    try:
        serving = largest(server, usual)
    except PerfModelError:
        # Long prompts, or a small layout, are slower than that with a single request: then all that
        # fit.
        serving = largest(server, problem.options)
        chosen.append(f"the batch is the largest that fits, because no batch meets {limits}")
    else:
        chosen.append(f"the batch is the largest that meets {limits}")
    return StartingPoint(serving=serving, chosen=tuple(chosen))


def _smallest(problem: ServingProblem) -> Layout:
    """The fewest devices, by tp in a node, then pp, that hold model and some requests."""
    cluster = problem.cluster
    # Tensor parallelism inside a node, whose links can bear an all-reduce per layer; beyond it
    # pipeline stages.
    node = cluster.devices_per_node
    sizes = [Layout(tp=tp) for tp in divisors(node)]
    sizes += [Layout(tp=node, pp=pp) for pp in (2, 4, 8, 16)]
    fits: Layout | None = None
    for layout in sizes:
        try:
            serving = served(server_of(problem, layout, 1))
        except LayoutError:
            continue
        # Sizes ascend, so the first with room is the smallest; a layout that only just holds the
        # model is second best.
        if serving.memory.most_requests >= _ROOM:
            return layout
        if fits is None and serving.fits:
            fits = layout
    if fits is None:
        raise PerfModelError(
            f"serve: {problem.model.name} does not fit on {cluster.name} in any layout that was tried (one or "
            f"more nodes of {node} devices); give --layout, or use narrower weights"
        )
    return fits
