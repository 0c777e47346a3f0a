"""Layouts of a published search under this model, fastest first: every layout of its space that
fits, by `search`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from perfmodel.cost import PricesKernels
from perfmodel.planning.layouts import SearchSpace, search
from perfmodel.prediction import EAGER
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem

USUAL: Final = SearchSpace(
    tp=(1,),
    pp=(1,),
    cp=(1,),
    ep=(1,),
    vpp=(1,),
    micro_batch=(1,),
    schedule=("1f1b",),
    zero=(0,),
    recompute=("none",),
    sequence_parallel=(False,),
)
"""What the spaces of these papers are made from."""


@dataclass(frozen=True, eq=False)
class Ranked:
    """Predicted step time of layouts that fit, in order of step time."""

    layouts: tuple[Layout, ...]
    step_s: Float[np.ndarray, " layouts"]

    def only(self, chosen: ArrayLike) -> "Ranked":
        """The layouts that a mask chooses."""
        chosen_places = np.flatnonzero(chosen)
        return Ranked(
            tuple(self.layouts[i] for i in chosen_places.tolist()), self.step_s[chosen_places]
        )

    def place(self, layout: Layout) -> int | None:
        """Place of a layout, 0 for the fastest; None if it is not among them."""
        # Layouts that say the same in different words are one.
        canonical = layout.canonical
        for place, candidate in enumerate(self.layouts):
            if candidate.canonical == canonical:
                return place
        return None


def rank(
    model: Model,
    cluster: Cluster,
    job: Job,
    devices: int,
    space: SearchSpace | Callable[[Problem], SearchSpace],
    *,
    constraints: Sequence[str] = (),
    framework: Framework = EAGER,
    kernels: PricesKernels | None = None,
) -> Ranked:
    """Evaluate every layout of a space that fits and satisfies the constraints.

    `kernels`: prices instead of the shipped calibration's.

    Raises:
        LayoutError: no layout of the space can be laid out.
    """
    result = search(
        model,
        cluster,
        devices=devices,
        global_batch=job.global_batch,
        job=job,
        space=space,
        top=1,
        method="enumerate",
        constraints=constraints,
        framework=framework,
        kernels=kernels,
        every=True,
        distinct=False,
    )
    ranking = result.ranking()
    # `ranking` has layouts in the order in which they were evaluated.
    order = np.argsort(result.evaluation.step_time_s, kind="stable").tolist()
    return Ranked(tuple(ranking[i][0] for i in order), np.array([ranking[i][1] for i in order]))
