"""What an importer returns: kernels, collectives and what could not be mapped, with their FLOPs and bytes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import pandas as pd

from perfmodel.importers._estimate import StepEstimate, estimate
from perfmodel.importers._rows import CollectiveRow, KernelRow, Unmapped
from perfmodel.spec import Cluster, Device


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """One execution of an imported program, as one device runs it."""

    name: str
    kernels: tuple[KernelRow, ...]
    collectives: tuple[CollectiveRow, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    """What no kernel or collective stands for: named, never dropped."""
    n_devices: int = 1
    """Ranks that the program runs on."""
    memory_bytes: float | None = None
    """Most memory that the program's compiler says a device needs, where it says so."""

    @property
    def flops(self) -> float:
        """FLOPs of one execution on one device, as XLA counts them: a multiply-add is two, every other
        arithmetic operation one, transcendental functions none; what is unmapped is included."""
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
        """Sizes of the collectives that the device takes part in, counted as `spec.Collective` does."""
        return sum(c.count * c.bytes for c in self.collectives)

    @property
    def unmapped_flops(self) -> float:
        return sum(u.count * u.flops for u in self.unmapped)

    @property
    def unmapped_share(self) -> float:
        """Share of `flops` that is unmapped."""
        return self.unmapped_flops / self.flops if self.flops else float(bool(self.unmapped))

    @cached_property
    def _frame(self) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        for k in self.kernels:
            rows.append({"role": "kernel", "family": k.op.family, "source": k.source, "dtype": k.op.dtype,
                         "count": k.count, "flops": k.flops, "bytes": k.bytes, **_shape(k.op)})  # fmt: skip
        for c in self.collectives:
            rows.append({"role": "collective", "family": c.collective, "source": c.source, "dtype": c.dtype,
                         "count": c.count, "flops": 0.0, "bytes": c.bytes, "num_ranks": c.num_ranks,
                         "groups": len(c.groups)})  # fmt: skip
        for u in self.unmapped:
            rows.append({"role": "unmapped", "family": "", "source": f"{u.name}: {u.reason}", "dtype": "",
                         "count": u.count, "flops": u.flops, "bytes": 0.0})  # fmt: skip
        columns = ["role", "family", "source", "dtype", "count", "flops", "bytes"]
        return pd.DataFrame(rows, columns=None if rows else columns)

    def to_frame(self) -> pd.DataFrame:
        """One row per distinct kernel, collective and unmapped op; `flops` and `bytes` are of one execution."""
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
        self, target: Cluster | Device | str, *, calibration: Path | None = None, peak_dtype: str | None = None
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
        return estimate(self.kernels, self.collectives, target, self.n_devices, self.memory_bytes,
                        calibration, peak_dtype)  # fmt: skip

    def _repr_html_(self) -> str:
        return self.to_frame().to_html()


_NOT_SHAPE: Final = ("op", "dtype", "pass_", "accumulate")


def _shape(op: Any) -> Mapping[str, Any]:
    return {f.name: getattr(op, f.name) for f in fields(op) if f.name not in _NOT_SHAPE}
