"""Stacks: one device under one software, the unit that measurements belong to."""

import re
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.learn._machine import Figures

EAGER_SOURCES: Final = frozenset({"neusight", "aceso", "sailor_aceso", "pipedream"})
"""Sources timed one eager call at a time: their times hide behind a host-side launch floor."""

TRAINING_ORDER: Final = (
    "estimate_train_time", "simumax", "vllm-0.24.0", "vllm-0.14.0", "vllm", "vidur", "llmservingsim",
    "sglang", "trtllm", "xla_perf_tables", "neusight", "sailor_aceso", "aceso", "deepbench", "pipedream",
)  # fmt: skip
"""Sources and software by how closely they stand for a training job on torch with cuBLAS, best first.

Training profilers come first, then torch/cuBLAS routes of serving stacks, own kernels of serving
stacks, and eager timings last because their small kernels hide behind the launch floor.
"""


def product(software: str) -> str:
    """Name of a software without its version.

    >>> product("trtllm-1.3.0rc20")
    'trtllm'
    """
    return re.split(r"[-_ ]?v?\d", software, maxsplit=1)[0]


@dataclass(frozen=True)
class Stack:
    """A device under a software, and the kinds that were measured on it."""

    figures: Figures
    source: str
    software: str
    kinds: dict[str, int]
    """Kind -> rows it was fitted on."""

    @property
    def key(self) -> str:
        """Unique label."""
        return f"{self.figures.name}|{self.source}|{self.software}"

    @property
    def eager(self) -> bool:
        """Whether its times include the host's launch."""
        return self.source in EAGER_SOURCES

    def matches(self, software: str) -> bool:
        """Whether a software asked for by name is this one (full name, source or source/software)."""
        return software in (self.software, self.source, f"{self.source}/{self.software}")

    def preference(self) -> tuple[int, str]:
        """Sort key: the best stand-in for a training job first."""
        for rank, name in enumerate(TRAINING_ORDER):
            if self.source == name or self.software.startswith(name):
                return rank, self.software
        return -1, self.software  # a user's own measurement comes before all shipped ones

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a weights file's metadata."""
        return {"figures": self.figures.to_dict(), "source": self.source, "software": self.software,
                "kinds": self.kinds}  # fmt: skip

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Stack":
        """Inverse of `to_dict`."""
        return cls(Figures(**value["figures"]), value["source"], value["software"], dict(value["kinds"]))
