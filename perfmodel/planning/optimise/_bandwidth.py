"""A budget of bandwidth, split over the links of a pipeline."""

import time
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._cutting_planes import convex_bound
from perfmodel.planning.optimise._pipeline import Certificate
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import Shares
from perfmodel.planning.what_if import Scenario, model_in_scenario
from perfmodel.prediction import StepProblem, durations, layout_batches, prepared
from perfmodel.program import Kind
from perfmodel.spec import Layout
from perfmodel.timeline import makespan

_FASTER: Final = 4.0
"""Factor on bandwidths by which transfers are divided into latency and a part that shrinks with
bandwidth."""
_SAME_SHARE: Final = 1e-6
_LEAST: Final = 0.05
"""Least share of every link."""
_DATA_PARALLEL: Final = (Kind.GRAD_REDUCE, Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD)


@dataclass(frozen=True, eq=False)
class BandwidthResult:
    """Bandwidth shares of the links, and the resulting step time."""

    links: dict[str, float]
    """Bandwidth of each link as a multiple of its present value; the multiples sum to the number of
    links."""
    step_time_s: float
    equal_s: float
    """Step time with all multiples 1."""
    certificate: Certificate
    """Lower bound over all splits of the same budget."""
    seconds: float

    @property
    def gap(self) -> float:
        """Largest relative distance of the step time from the lower bound."""
        return self.certificate.gap(self.step_time_s)

    @property
    def not_launchable(self) -> str:
        """Why no framework in the catalog can run this split; empty if no link changes."""
        if all(abs(multiple - 1) < _SAME_SHARE for multiple in self.links.values()):
            return ""
        return "no framework in the catalog can set bandwidth shares; switches with queues per traffic class can"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        certificate = self.certificate.to_dict(self.step_time_s)
        return vars(self) | {"certificate": certificate, "not_launchable": self.not_launchable}


def split_bandwidth(problem: StepProblem, layout: Layout) -> BandwidthResult:
    """Find the best split of a fixed total bandwidth over the pipeline's links.

    A link for every direction of every hop between stages, and for every stage's data-parallel
    group. Transfers take latency + volume / share, so the step is convex in the shares and the
    result comes with a close bound. (`perfmodel.step_time_function` knows the network's levels, not
    single links.)

    Args:
        problem: model, job, cluster and cost models.
        layout: a layout whose schedule flushes.

    Raises:
        LayoutError: nothing to split, or a schedule without a flush.
    """
    began = time.perf_counter()
    relaxation, links = bandwidth_problem(problem, layout)

    # From equal shares, and enough steps for a convex problem. The cutting planes then prove how
    # good it is.
    relaxed = relax(relaxation, n_starts=1, steps=800)
    bounded = convex_bound(relaxation, relaxed.values)
    shares = np.array(bounded.values["links"])
    equal_shares = np.ones(len(links))
    return BandwidthResult(
        links=dict(zip(links, shares.tolist(), strict=True)),
        step_time_s=_step_s(relaxation, {"links": shares}),
        equal_s=_step_s(relaxation, {"links": equal_shares}),
        certificate=Certificate(
            bounded.lower_bound, "", "cutting planes of critical paths (the step is convex)"
        ),
        seconds=time.perf_counter() - began,
    )


def bandwidth_problem(problem: StepProblem, layout: Layout) -> tuple[Relaxation, list[str]]:
    """The split as a relaxation with the unknown `links`, and the names of the links."""
    (batch,) = layout_batches(problem, [layout])
    if batch.spec.steps > 1:
        raise LayoutError(
            f"bandwidth can be split only for synchronous schedules, which {layout.schedule} is not; use another, "
            "such as 1f1b"
        )
    structure = prepared(batch.spec).structure

    # Price the layout a second time on links that are `_FASTER` times as fast. The difference is
    # the part of each transfer that scales with bandwidth: t - t' = volume (1 - 1 / faster); the
    # rest is latency.
    scenario = Scenario.parse(
        [f"{tier}_node_bandwidth={_FASTER:g}x" for tier in ("intra", "inter")]
    )
    faster = model_in_scenario(problem, scenario)
    now_s = durations(problem, layout_batches(problem, [layout])[0])[0]
    then_s = durations(faster, layout_batches(faster, [layout])[0])[0]
    names = [
        _link(kind, stage)
        for kind, stage in zip(structure.class_kind, structure.class_stage, strict=True)
    ]
    links = sorted(
        {name for name, seconds in zip(names, now_s, strict=True) if name and seconds > 0}
    )
    if len(links) < 2:
        raise LayoutError(
            f"layout {layout.label} has fewer than two links, so bandwidth cannot be split"
        )
    link_of_class = np.array([links.index(name) if name in links else 0 for name in names])

    # Faster links shorten only volume over bandwidth; the rest is latency.
    has_link = np.array([name in links for name in names])
    volume_s = np.where(has_link, (now_s - then_s) / (1 - 1 / _FASTER), 0.0)
    volume_s = np.clip(volume_s, 0.0, now_s)
    constants = {"latency": now_s - volume_s, "volume": volume_s, "link_of_class": link_of_class}
    variables = {"links": Shares(len(links), float(len(links)), _LEAST)}
    return Relaxation(variables, prepared(batch.spec).compiled, _durations, constants), links


def _durations(values: Values) -> Float[Array, " classes"]:
    return (
        values["latency"] + values["volume"] / jnp.asarray(values["links"])[values["link_of_class"]]
    )


def _step_s(relaxation: Relaxation, values: Values) -> float:
    """Return the makespan in double precision."""
    c = relaxation.constants
    return float(
        makespan(
            relaxation.one_program, c["latency"] + c["volume"] / values["links"][c["link_of_class"]]
        )
    )


def _link(kind: int, stage: int) -> str:
    """The link that a class of events crosses; empty for computation."""
    if kind == Kind.SEND_FORWARD:
        return f"stage {stage} to {stage + 1}"
    if kind == Kind.SEND_BACKWARD:
        return f"stage {stage} to {stage - 1}"
    return f"data-parallel group of stage {stage}" if kind in _DATA_PARALLEL else ""
