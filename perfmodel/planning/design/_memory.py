"""How much memory a layout needs."""

from dataclasses import asdict, dataclass
from typing import Any

from perfmodel import catalog
from perfmodel.prediction import StepProblem, check_layout, needed_memory
from perfmodel.spec import Layout


@dataclass(frozen=True)
class MemoryNeeded:
    """Memory that makes a layout fit."""

    layout: str
    memory_bytes: float
    """Of a device, at least: the fullest rank's peak over the share that fragmentation leaves usable."""
    peak_bytes: float
    """Of the fullest pipeline rank."""
    has_bytes: float
    """Of the cluster's device."""
    parts_bytes: dict[str, float]
    """Of the fullest rank's peak."""
    devices: tuple[str, ...]
    """Catalog devices with enough, the smallest first."""

    @property
    def fits(self) -> bool:
        """Whether it fits as it is."""
        return self.memory_bytes <= self.has_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"fits": self.fits}


def memory_to_fit(problem: StepProblem, layout: Layout) -> MemoryNeeded:
    """The least device memory with which a layout fits: exact under the memory model.

    peak <= memory (1 - margin), so memory = peak / (1 - margin).

    Raises:
        LayoutError: a layout that cannot run whatever the memory.
    """
    check_layout(problem.model, problem.cluster, problem.job, layout)
    memory = max(needed_memory(problem, layout), key=lambda stage: stage.peak)
    need = problem.framework.memory_to_hold(memory.peak)
    parts = {name: value for name, value in memory.to_dict().items() if name != "peak"}
    known = [catalog.device(name) for name in catalog.devices() if name != "cpu"]
    enough = sorted((device.memory_bytes, device.name) for device in known if device.memory_bytes >= need)
    names = tuple(name for _, name in enough)
    return MemoryNeeded(str(layout), need, memory.peak, problem.cluster.device.memory_bytes, parts, names)
