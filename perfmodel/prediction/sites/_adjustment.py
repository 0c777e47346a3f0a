"""Adjustments of the cost models to measured runs: named physical parameters and their effect on
times."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost import EventTimes
from perfmodel.cost.learn import END_TO_END_FILE, WeightFiles
from perfmodel.display import json_text
from perfmodel.errors import CalibrationError
from perfmodel.files import UNSEALED, parse_json, require_intact, sealed
from perfmodel.ingest.tables import write_bytes
from perfmodel.ops import FAMILIES, Collective, Op, family_with_bmm
from perfmodel.prediction.sites._fitted_runs import FittedRuns
from perfmodel.spec import Framework
from perfmodel.units import duration, figure

TINY_S: Final = 1e-300
"""A time below all others, to avoid division by zero."""
SCHEMA: Final = "end-to-end/3"
"""Version of the file's schema."""
END_TO_END: Final = "end-to-end"
"""Provenance of times that runs have moved, or confirmed."""

KERNEL_FACTORS: Final = (*FAMILIES, "bmm")
"""Log factors of kernels' time by op family; `bmm` are batched products of small matrices, as in
unfused attention; `gemm` are all other products."""
_KINDS: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
_TIERS: Final = ("intra_node", "inter_node")
HOST_FACTORS: Final = ("host_op_s", "kernel_gap_s")
"""Log factors of fields of `Framework`."""
LOSSES: Final = ("tp_overlap_loss", "dp_overlap_loss", "straggling", "step_overhead_s")
"""Fields of `Framework` that are 0 unless runs say otherwise, and never negative."""
SKEW: Final = "collective_skew_s"
"""Field of `Framework` that a profile corrects by the measured waits of ranks; whole runs cannot
determine it."""


def loss_text(name: str, value: float) -> str:
    """Format what a parameter of `LOSSES` or `SKEW` adds: a time, or a share in per cent."""
    if name.endswith("_s"):
        return duration(value)
    percent = 100 * value
    return "0%" if abs(percent) < 0.005 else f"{figure(percent, 2)}%"


def _link_factors() -> Iterator[str]:
    for tier in _TIERS:
        yield f"{tier}.alpha"
        for kind in _KINDS:
            yield f"{tier}.{kind}.beta"


LINK_FACTORS: Final = tuple(_link_factors())
"""Log factors of collectives by network tier: `alpha` of their latency, `beta` of the rest of a
collective's time (inverse bandwidth)."""
PARAMETERS: Final = (*KERNEL_FACTORS, *LINK_FACTORS, *HOST_FACTORS, *LOSSES, SKEW)
"""Everything that runs can move."""


def factors_of(op: Op) -> tuple[str, str]:
    """Names of the log factors on an op's latency and on the rest of its time."""
    if not isinstance(op, Collective):
        name = family_with_bmm(op)
        return name, name
    tier = _TIERS[op.num_nodes > 1]
    return f"{tier}.alpha", f"{tier}.{op.collective}.beta"


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """Parameters of one device, fitted to its runs."""

    device: str
    """Device of the runs; other devices are not changed."""
    values: tuple[tuple[str, float], ...]
    """Log corrections by parameter; parameters left out are 0."""
    informed: frozenset[str] = frozenset()
    """Parameters that the runs narrowed: times that rest on them are `end-to-end`."""
    half_width: tuple[tuple[str, float], ...] = ()
    """Log half-width, by parameter, of the 90 % intervals of the events that the parameter moved in
    the runs."""
    runs: FittedRuns | None = None
    """Runs that the parameters were fitted to; None before any run."""

    @cached_property
    def value_of(self) -> dict[str, float]:
        """Value of each parameter."""
        return dict.fromkeys(PARAMETERS, 0.0) | dict(self.values)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters that were fitted, in the order of the slopes of the runs."""
        return tuple(name for name, _ in self.values)

    def moved(self, name: str, step: float) -> "Adjustment":
        """The adjustment with one parameter changed."""
        return replace(
            self, values=tuple((self.value_of | {name: self.value_of[name] + step}).items())
        )

    def at(self, names: Sequence[str], values: Iterable[float]) -> "Adjustment":
        """The adjustment with other values."""
        return replace(self, values=tuple(zip(names, map(float, values), strict=True)))

    @property
    def noise(self) -> float:
        """Standard deviation of run-to-run noise in log(measured / predicted)."""
        if self.runs is None:
            return 0.0
        return float(self.runs.known.scales.weight @ self.runs.noise_variance) ** 0.5

    def without_runs(self) -> "Adjustment":
        """Return the same parameters without the runs that they were fitted to."""
        return replace(self, runs=None)

    def times(
        self,
        ops: Sequence[Op],
        times: EventTimes,
        latency_s: Float64[np.ndarray, "n"],
        certain_s: Float64[np.ndarray, "n"],
    ) -> EventTimes:
        """Times of events after the factors: certain + latency e^alpha + (time - latency - certain)
        e^beta.

        Args:
            latency_s: seconds of each event if it carried nothing; 0 for kernels.
            certain_s: seconds that no factor scales; 0 for collectives.
        """
        # Hockney's model (1994): latency and the rest of an event's time are scaled separately.
        factor = {
            name: float(np.exp(self.value_of[name])) for name in (*KERNEL_FACTORS, *LINK_FACTORS)
        }
        parameters = [factors_of(op) for op in ops]
        latency_factor = np.array([factor[latency] for latency, _ in parameters])
        throughput_factor = np.array([factor[throughput] for _, throughput in parameters])

        # An empty message takes no time at all, hence the floor.
        latency_share = np.minimum(latency_s / np.maximum(times.time_s, TINY_S), 1.0)
        certain_share = np.minimum(certain_s / np.maximum(times.time_s, TINY_S), 1.0)
        scale = (
            latency_factor * latency_share
            + throughput_factor * (1 - latency_share - certain_share)
            + certain_share
        )

        # Times that rest on a parameter which runs narrowed are theirs.
        provenance = list(times.provenance)
        for i, (_, throughput) in enumerate(parameters):
            if throughput in self.informed:
                provenance[i] = END_TO_END
        return replace(times.scaled(scale), provenance=tuple(provenance))

    def framework(self, framework: Framework) -> Framework:
        """The framework with host costs and losses adjusted."""
        scaled = {
            name: framework.value(name) * float(np.exp(self.value_of[name]))
            for name in HOST_FACTORS
        }
        added = {name: framework.value(name) + self.value_of[name] for name in (*LOSSES, SKEW)}
        return framework.replace(**scaled, **added)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "values": dict(self.values),
            "informed": sorted(self.informed),
            "half_width": dict(self.half_width),
            "runs": self.runs.to_dict() if self.runs else None,
        }

    @classmethod
    def from_dict(cls, device: str, value: Mapping[str, Any]) -> "Adjustment":
        """Read what `to_dict` returns."""
        unknown = set(value["values"]) - set(PARAMETERS)
        if unknown:
            raise ValueError(f"unknown parameter {min(unknown)}")
        return cls(
            device=device,
            values=tuple((str(k), float(v)) for k, v in value["values"].items()),
            informed=frozenset(value["informed"]),
            half_width=tuple((str(k), float(v)) for k, v in value["half_width"].items()),
            runs=FittedRuns.from_dict(value["runs"]) if value["runs"] else None,
        )


def save_adjustments(folder: Path, adjustments: Mapping[str, Adjustment]) -> Path:
    """Write the adjustments of devices into a calibration directory."""
    path = folder / END_TO_END_FILE
    devices = {device: adjustment.to_dict() for device, adjustment in adjustments.items()}
    content = {"schema": SCHEMA, "checksum": UNSEALED, "devices": devices}
    write_bytes(path, sealed(json_text(content, indent=1).encode() + b"\n"))
    return path


def adjustments(weights: WeightFiles) -> dict[str, Adjustment]:
    """Adjustments by device in a calibration; empty if it has none.

    Raises:
        CalibrationError: the file is truncated or of another schema version.
    """
    if END_TO_END_FILE not in weights.names:
        return {}
    path = weights.folder / END_TO_END_FILE
    # Another version's file is refused by its schema before its checksum, since the remedy is
    # another.
    try:
        written = weights.read(END_TO_END_FILE)
        content = parse_json(written)
        if content["schema"] != SCHEMA:
            raise CalibrationError(
                f"{path}: the file has schema {content['schema']!r}, but this version reads {SCHEMA!r}; fit again"
            )
        require_intact(written, path)
        return {
            device: Adjustment.from_dict(device, value)
            for device, value in content["devices"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(
            f"{path}: the file is truncated or does not hold fitted parameters ({error}); fit again"
        ) from None
