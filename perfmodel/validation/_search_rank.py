"""Layouts of a published search under this model, fastest first."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from perfmodel.cost import PricesKernels
from perfmodel.errors import LayoutError
from perfmodel.prediction import EAGER, Framework, check_layout, step_model
from perfmodel.spec import Cluster, Job, Layout, Model


@dataclass(frozen=True, eq=False)
class Ranked:
    """Predicted step time and memory of layouts, in order of step time."""

    layouts: tuple[Layout, ...]
    step_s: Float[np.ndarray, " layouts"]
    peak_bytes: Float[np.ndarray, " layouts"]
    fits: Bool[np.ndarray, " layouts"]
    """Below the memory of a device, less the framework's margin."""

    @property
    def feasible(self) -> "Ranked":
        """Those that fit."""
        return self.only(self.fits)

    def only(self, chosen: ArrayLike) -> "Ranked":
        """Those that a mask chooses."""
        kept = np.flatnonzero(chosen)
        layouts = tuple(self.layouts[i] for i in kept.tolist())
        return Ranked(layouts, self.step_s[kept], self.peak_bytes[kept], self.fits[kept])

    def place(self, layout: Layout) -> int | None:
        """Place of a layout, 0 for the fastest; None if it is not among them."""
        return self.layouts.index(layout) if layout in self.layouts else None


def rank(
    model: Model,
    cluster: Cluster,
    job: Job,
    layouts: Iterable[Layout],
    framework: Framework = EAGER,
    kernels: PricesKernels | None = None,
) -> Ranked:
    """Evaluate layouts exactly; those that cannot be laid out (a degree that does not divide) are left out.

    `kernels`: prices instead of the shipped calibration's.
    """
    fixed = step_model(model, cluster, job, None, framework)
    if kernels is not None:
        fixed = fixed.repriced(kernels, fixed.collectives)
    possible = [layout for layout in dict.fromkeys(layouts) if _possible(model, cluster, job, layout)]
    if not possible:
        return Ranked((), np.zeros(0), np.zeros(0), np.zeros(0, bool))
    step_s = fixed.evaluate(possible).step_time_s
    peak_bytes, _ = fixed.peak_memory(possible)
    order = np.argsort(step_s, kind="stable")
    fits = peak_bytes <= cluster.device.memory_bytes * (1 - framework.memory_margin)
    return Ranked(tuple(possible[i] for i in order), step_s[order], peak_bytes[order], fits[order])


def _possible(model: Model, cluster: Cluster, job: Job, layout: Layout) -> bool:
    try:
        check_layout(model, cluster, job, layout)
    except LayoutError:
        return False
    return True
