"""What the place of a run adds to the facts of its framework: clocks under load, and what the record says of sites."""

from dataclasses import dataclass
from math import exp
from typing import Final

from perfmodel.cost import TENSOR_TYPES
from perfmodel.ops import Attention, Op
from perfmodel.prediction._adjustment import Adjustment
from perfmodel.prediction._attention_kernels import attention_slowdown
from perfmodel.prediction._memory_spread import MemorySpread, memory_spread
from perfmodel.prediction._population import GENERIC, Belief, Population, population
from perfmodel.prediction._skew import skew_s
from perfmodel.prediction._sustained import Sustained, sustained
from perfmodel.spec import Device, Framework

EAGER: Final = Framework()
"""What predictions take where no framework is named."""
COMPILED: Final = Framework(execution="compiled")
"""A step that is one compiled program."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Constants of a place, those of an unknown one by default."""

    sustained: Sustained | None = None
    """By architecture, log of the time of matrix products and attention in a training step relative to the same kernels
    under their power limit (`perfmodel.cost.under_load`). None for what all published sources say of those whose power
    nobody measured, read when first needed."""
    skew_s: float | None = None
    """Spread of the times at which ranks that hosts drive operator by operator reach a collective, beyond their
    framework's own; None for what all published sources say, read when first needed."""
    power_limited: bool = True
    """Whether the power limit of the device holds (`perfmodel.cost.sustained_seconds`)."""
    population: Population | None = None
    """What is believed of the site before any of its runs; None for what all published sources say, read when first
    needed."""
    memory: MemorySpread | None = None
    """How far measured peaks of memory lie from predicted ones; None for what all published sources say."""
    unstated: float = 0.0
    """Share of the run's settings that nobody stated."""

    @classmethod
    def without(cls, source: str) -> "Site":
        """Constants fitted without a published source, for reports that hold its own runs against them."""
        memory = memory_spread(without=source)
        return cls(sustained=sustained(source), skew_s=skew_s(source), population=population(source), memory=memory)

    def memory_spread(self) -> MemorySpread:
        """`memory`, with what is read when first needed."""
        return memory_spread() if self.memory is None else self.memory

    def clock(self, op: Op, device: Device) -> float:
        """Time of an event in a training step relative to its time under the power limit."""
        if not op.uses_matrix_units or op.dtype not in TENSOR_TYPES:
            return 1.0
        slower = sustained() if self.sustained is None else self.sustained
        return exp(dict(slower).get(device.architecture, 0.0))

    def spread_s(self, framework: Framework) -> float:
        """Spread of the times at which the ranks of a group reach a collective; steps that are one program, or are
        replayed, have none of the site's."""
        if framework.execution != "eager":
            return framework.collective_skew_s
        return framework.collective_skew_s + (skew_s() if self.skew_s is None else self.skew_s)

    def belief(self, framework: Framework, device: Device) -> Belief:
        """What is believed of the site's runs before any of them."""
        known = population() if self.population is None else self.population
        return known.belief(framework, device)

    def expected(self, framework: Framework, device: Device) -> Adjustment | None:
        """What the published record makes of the cost models for a framework and device: the median site. None for
        `generic`, which is the physics alone: no framework that anybody ran."""
        return None if framework.name == GENERIC else self.belief(framework, device).expected(device)


def generation(framework: Framework, op: Op, device: Device) -> float:
    """Time of an event with a framework's kernels relative to the cost models' time for it."""
    return attention_slowdown(framework.attention, device) if isinstance(op, Attention) else 1.0
