"""Sweeps a server's layouts and batches: Pareto front of tokens/s per user and per device."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from perfmodel.catalog.job_files import JobFile
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.serving._request import ServingKeywords, ServingProblem, serving_problem
from perfmodel.serving._serving import Serving, largest, served_with, server_of
from perfmodel.spec import Cluster, Framework, Layout, Model, Transformer
from perfmodel.units import divisors, require_whole

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ServingSweep:
    """Servers that fit and meet the limits."""

    servings: tuple[Serving, ...]
    rejected: dict[str, str]
    """Layouts without a server that fits, each with the reason."""

    @property
    def pareto(self) -> tuple[Serving, ...]:
        """The Pareto front of tokens/s per user (fastest first) and per device."""
        # Fastest for users first: a later one belongs to the front only if it gives devices more
        # than all before it.
        front: list[Serving] = []
        for serving in sorted(
            self.servings,
            key=lambda s: (-s.tokens_per_s_per_user, -s.tokens_per_s_per_device),
        ):
            if not front or serving.tokens_per_s_per_device > front[-1].tokens_per_s_per_device:
                front.append(serving)
        return tuple(front)

    @property
    def best(self) -> Serving:
        """The server with the most tokens/s per device."""
        return self.pareto[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `perfmodel serve --sweep --json` prints them."""
        return {
            "evaluated": len(self.servings),
            "pareto": [serving.to_dict() for serving in self.pareto],
            "rejected": self.rejected,
        }

    def to_frame(self) -> "pd.DataFrame":
        """A row per server."""
        import pandas as pd

        return pd.DataFrame([serving.to_dict() for serving in self.servings])


def serve_sweep(
    model: Model | JobFile | str,
    cluster: Cluster | str | None = None,
    *,
    devices: int | None = None,
    layouts: Sequence[Layout | str] | None = None,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    **options: Unpack[ServingKeywords],
) -> ServingSweep:
    """Predict servers on a number of devices, or for some layouts, with powers of two as batches
    and the largest batch that fits and meets the limits.

    Args:
        layouts: layouts to try; by default every tp, pp and dp on `devices`, with experts over tp
            or dp as well.
        options: as `serve` takes them, without `batch`, which is swept. All other arguments are
            those of `serve`.

    Raises:
        PerfModelError: as `serve`, or if no layout does, or a batch is given.
    """
    if options.get("batch") is not None:
        raise PerfModelError("serve: a sweep chooses batches itself; leave out --batch (`batch`)")
    problem = serving_problem(model, cluster, options, calibration=calibration, framework=framework)
    if layouts is None:
        require_whole("serve", {"devices": devices})
        problem.cluster.require(int(devices or 0), "the sweep")
        layouts = _layouts(problem, int(devices or 0))
    tried = [Layout.parse(layout) if isinstance(layout, str) else layout for layout in layouts]
    servings: list[Serving] = []
    rejected: dict[str, str] = {}
    for layout in tried:
        server = server_of(problem, layout, layout.dp)
        try:
            most_requests = largest(server, problem.options)
        except PerfModelError as error:
            rejected[layout.label] = str(error)
            continue
        # Larger batches trade speed of a user for throughput: powers of two trace the curve up to
        # the most that fits.
        batches = {
            layout.dp << i for i in range((most_requests.requests.batch // layout.dp).bit_length())
        }
        for batch in sorted(batches - {most_requests.requests.batch}):
            servings.append(served_with(server, batch))
        servings.append(most_requests)
    if not servings:
        first_reason = next(
            iter(rejected.values()), "no number of devices divides the model evenly"
        )
        raise PerfModelError(f"serve: no layout fits and meets the limits; {first_reason}")
    return ServingSweep(tuple(servings), rejected)


def _layouts(problem: ServingProblem, devices: int) -> list[Layout]:
    """All layouts of the devices by tp (inside a node), pp and dp that the model supports; experts
    are sharded like the rest, or spread over the ranks of tp or dp."""
    experts = isinstance(problem.model, Transformer) and problem.model.experts
    layouts = []
    for tp in divisors(devices, problem.cluster.devices_per_node):
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            layouts.append(Layout(tp=tp, pp=pp, dp=dp))
            # Experts over the tensor ranks, each whole (`etp=1`), or over the replicas.
            if experts and dp == 1 < tp:
                layouts.append(Layout(tp=tp, pp=pp, ep=tp, etp=1))
            if experts and tp == 1 < dp:
                layouts.append(Layout(pp=pp, dp=dp, ep=dp))
    return [layout for layout in layouts if _divides(problem, layout)]


def _divides(problem: ServingProblem, layout: Layout) -> bool:
    """Whether a layout divides the model, by building the smallest step on it."""
    try:
        # Building one small step is the test: whatever does not divide raises.
        server_of(problem, layout, layout.dp).step(1, 0, 1)
    except LayoutError:
        return False
    return True
