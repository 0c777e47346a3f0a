"""Result of an importer: kernels, collectives, unmapped ops, with FLOPs, bytes and times."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, EventTimes, KernelModel, event_times
from perfmodel.cost.learn import weight_files
from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ir.importers._rows import CollectiveRow, KernelRow, Unmapped
from perfmodel.ops import KernelOp
from perfmodel.prediction import COMPILED, Site
from perfmodel.spec import Cluster, Device


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Predicted time of one execution of an imported program."""

    step_time_s: float
    """Step time with all kernels and collectives one after another, without overlap."""
    step_time_lo_s: float
    """Lower end of the 90 % range, which includes kernels that no table knows."""
    step_time_hi_s: float
    overlapped_time_s: float
    """Step time if communication overlapped fully with computation: the larger of the two."""
    kernel_time_s: float
    collective_time_s: float
    tflops_per_device: float
    mfu: float
    """Time of the matrix products at peak rate, relative to the step time."""
    memory_bytes: float | None
    fits: bool | None
    """Whether the memory suffices; None if the import does not state how much is needed."""
    provenance: dict[str, float]
    """Share of the time by provenance."""
    rows: pd.DataFrame = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}

    def to_frame(self) -> pd.DataFrame:
        """One row per distinct kernel and collective with its time, the slowest first."""
        return self.rows.copy()

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def resolve(target: Cluster | Device | str) -> Cluster | Device:
    """A cluster or device by its catalog name (raises `UnknownNameError`)."""
    if not isinstance(target, str):
        return target
    # A file can only be a cluster's, so that the error is about it.
    try:
        return catalog.cluster(target)
    except UnknownNameError:
        if target.endswith(".toml"):
            raise
    try:
        return catalog.device(target)
    except UnknownNameError:
        raise UnknownNameError(
            "cluster or device", target, (*catalog.clusters(), *catalog.devices())
        ) from None


def _times(
    kernels: Sequence[KernelRow],
    collectives: Sequence[CollectiveRow],
    place: Cluster | Device,
    calibration: Path | None,
) -> EventTimes:
    """Time of each row: kernels, with the gap before the next one, then collectives."""
    # Compiled programs launch kernels back to back; the gap between them is the compiled
    # framework's.
    weights = weight_files(calibration)
    model = KernelModel.of(weights)
    ops = [row.op for row in kernels]
    if isinstance(place, Cluster):
        sent = [row.on(place) for row in collectives]
        times = event_times([*ops, *sent], place, model, CollectiveModel.of(weights))
    else:
        times = model.times(place, ops)
    return times.plus(
        np.repeat([COMPILED.host.kernel_gap_s, 0.0], [len(kernels), len(collectives)])
    )


def _frame(
    rows: Sequence[KernelRow | CollectiveRow], time_s: np.ndarray, provenance: Sequence[str]
) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "family": [
                row.op.family if isinstance(row, KernelRow) else row.collective for row in rows
            ],
            "source": [row.source for row in rows],
            "count": [row.count for row in rows],
            "time_s": time_s,
            "flops": [row.count * row.flops if isinstance(row, KernelRow) else 0.0 for row in rows],
            "bytes": [row.count * row.bytes for row in rows],
            "provenance": provenance,
        }
    )
    return frame.sort_values("time_s", ascending=False, ignore_index=True)


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """The kernels and collectives of one execution of an imported program on one device."""

    name: str
    kernels: tuple[KernelRow, ...]
    collectives: tuple[CollectiveRow, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    """Operations without a kernel or collective; they are listed, never dropped."""
    n_devices: int = 1
    """Ranks that the program runs on."""
    memory_bytes: float | None = None
    """Peak memory per device as stated by the program's compiler; None if not stated."""

    @property
    def flops(self) -> float:
        """FLOPs of one execution on one device, as XLA counts them: a multiply-add is two, every
        other arithmetic operation one, transcendental functions none; what is unmapped is
        included."""
        return sum(k.count * k.flops for k in self.kernels) + self.unmapped_flops

    @property
    def matmul_flops(self) -> float:
        """The part of `flops` in matrix products, attention and convolutions."""
        return sum(k.count * k.flops for k in self.kernels if k.op.uses_matrix_units)

    @property
    def traffic_bytes(self) -> float:
        """Bytes that the kernels read and write."""
        return sum(k.count * k.bytes for k in self.kernels)

    @property
    def communicated_bytes(self) -> float:
        """Sizes of the device's collectives, counted as `spec.Collective` does."""
        return sum(c.count * c.bytes for c in self.collectives)

    @property
    def unmapped_flops(self) -> float:
        """FLOPs of operations that no op of this package represents."""
        return sum(u.count * u.flops for u in self.unmapped)

    @property
    def unmapped_share(self) -> float:
        """Share of `flops` that is unmapped."""
        return self.unmapped_flops / self.flops if self.flops else float(bool(self.unmapped))

    @cached_property
    def _frame(self) -> pd.DataFrame:
        """One row per kernel and collective."""
        rows: list[dict[str, Any]] = []
        for k in self.kernels:
            rows.append(
                {
                    "role": "kernel",
                    "family": k.op.family,
                    "source": k.source,
                    "dtype": k.op.dtype,
                    "count": k.count,
                    "flops": k.flops,
                    "bytes": k.bytes,
                    **_shape(k.op),
                }
            )
        for c in self.collectives:
            rows.append(
                {
                    "role": "collective",
                    "family": c.collective,
                    "source": c.source,
                    "dtype": c.dtype,
                    "count": c.count,
                    "flops": 0.0,
                    "bytes": c.bytes,
                    "num_ranks": c.num_ranks,
                    "groups": len(c.groups),
                }
            )
        for u in self.unmapped:
            rows.append(
                {
                    "role": "unmapped",
                    "family": "",
                    "source": f"{u.name}: {u.reason}",
                    "dtype": "",
                    "count": u.count,
                    "flops": u.flops,
                    "bytes": 0.0,
                }
            )
        columns = ["role", "family", "source", "dtype", "count", "flops", "bytes"]
        return pd.DataFrame(rows, columns=None if rows else columns)

    def to_frame(self) -> pd.DataFrame:
        """One row per kernel, collective and unmapped op; `flops`, `bytes` of one execution."""
        return self._frame.copy()

    def to_dict(self) -> dict[str, Any]:
        """Totals and the unmapped ops, as plain values."""
        return {
            "name": self.name,
            "n_devices": self.n_devices,
            "flops": self.flops,
            "matmul_flops": self.matmul_flops,
            "traffic_bytes": self.traffic_bytes,
            "communicated_bytes": self.communicated_bytes,
            "memory_bytes": self.memory_bytes,
            "kernels": sum(k.count for k in self.kernels),
            "collectives": sum(c.count for c in self.collectives),
            "unmapped_share": self.unmapped_share,
            "unmapped": [asdict(u) for u in self.unmapped],
        }

    def predict(
        self,
        target: Cluster | Device | str,
        *,
        calibration: Path | None = None,
        peak_dtype: str | None = None,
    ) -> StepEstimate:
        """Time of one execution on a cluster, or on one device if the program has no collectives.

        Args:
            target: a cluster or device, or the catalog name of one.
            peak_dtype: element type whose peak rate `mfu` refers to (default: each product's own).

        Raises:
            UnknownNameError: no cluster or device has that name.
            PerfModelError: a device for a program with collectives, or a cluster that is too small.
            CalibrationError: weights that cannot be read.
        """
        # A bare device serves programs that do not communicate.
        place = resolve(target)
        device = place.device if isinstance(place, Cluster) else place
        if isinstance(place, Cluster):
            place.require(self.n_devices, "the program")
        elif self.collectives:
            raise PerfModelError(
                f"the program communicates between {self.n_devices} devices; name a cluster instead of the device "
                f"{device.name}"
            )

        # Each row's time of one execution, times the number of its executions.
        rows = [*self.kernels, *self.collectives]
        times = _times(self.kernels, self.collectives, place, calibration).scaled(
            np.array([row.count for row in rows])
        )
        time_s = times.time_s
        lo_s = times.lo_s
        hi_s = times.hi_s
        total = float(time_s.sum())
        kernel_s = float(time_s[: len(self.kernels)].sum())

        # MFU: the time that products would take at peak, over the time of the step.
        peak_s = sum(
            row.count * row.flops / device.peak.flops_per_s(peak_dtype or row.op.dtype)
            for row in self.kernels
            if row.op.uses_matrix_units
        )
        flops = sum(row.count * row.flops for row in self.kernels)

        # Which of these times hide behind others is not known, so none do.
        site_prior = Site().site_prior(COMPILED, device)
        shares = {"products": kernel_s / total, "inter_node": 1 - kernel_s / total} if total else {}
        # How uncertain a site is depends on how much of the time is products and how much is
        # communication.
        interval = site_prior.interval(shares)

        # An allocator cannot use the last bytes, and a context takes its own.
        room = COMPILED.memory.usable_bytes(device.memory_bytes) - COMPILED.memory.context_bytes
        return StepEstimate(
            step_time_s=total,
            # A step takes no less than its kernels alone, however short the rest.
            step_time_lo_s=max(
                float(lo_s.sum()) * interval.lower, float(lo_s[: len(self.kernels)].sum())
            ),
            step_time_hi_s=float(hi_s.sum()) * interval.upper,
            overlapped_time_s=max(kernel_s, total - kernel_s),
            kernel_time_s=kernel_s,
            collective_time_s=total - kernel_s,
            tflops_per_device=flops / total / 1e12 if total else 0.0,
            mfu=peak_s / total if total else 0.0,
            memory_bytes=self.memory_bytes,
            fits=None if self.memory_bytes is None else self.memory_bytes <= room,
            provenance=_provenance_shares(times),
            rows=_frame(rows, time_s, times.provenance),
        )

    def _repr_html_(self) -> str:
        return self.to_frame().to_html()


_NOT_SHAPE: Final = ("op", "dtype", "pass_", "accumulate")


def _provenance_shares(times: EventTimes) -> dict[str, float]:
    """Share of the time by where it comes from."""
    total_s = float(times.time_s.sum()) or 1.0
    shares = {}
    for name in sorted(set(times.provenance)):
        is_of_name = np.array([row_name == name for row_name in times.provenance])
        shares[name] = float(sum(times.time_s[is_of_name])) / total_s
    return shares


def _shape(op: KernelOp) -> Mapping[str, Any]:
    return {name: value for name, value in op.stated().items() if name not in _NOT_SHAPE}
