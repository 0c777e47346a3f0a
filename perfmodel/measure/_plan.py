"""Sweep plans: which ops to measure, written as TOML grids."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure._collectives import INTERCONNECT
from perfmodel.measure._harness import StoppingRule
from perfmodel.measure._hosts import EmulatedNetwork
from perfmodel.measure._nccl_tests import ALIGNMENT, NcclTests
from perfmodel.measure._rows import Point
from perfmodel.measure._supported import MEASURED_FAMILIES
from perfmodel.spec import Collective, KernelOp
from perfmodel.units import dtype_bytes

CACHES: Final = ("warm", "cold")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one run of `run_plan` measures on one device."""

    device: str
    """What the `device` column says."""
    rule: StoppingRule
    collective_rule: StoppingRule
    kernels: tuple[KernelOp, ...]
    collectives: tuple[Collective, ...]
    kernel_table: str
    collective_table: str
    attempts: int
    """Measurements of one row at most while others disturb it."""
    patience_s: float
    """Longest wait for a quiet machine in one pass over the collectives, which need all of it."""
    cold_kernels: tuple[KernelOp, ...] = ()
    """Kernels to be measured with their data out of the caches, beside or instead of warm."""
    interconnect: str = INTERCONNECT
    """What the `interconnect` column of collectives says."""
    any_device: bool = False
    """Measure whatever accelerator is found, also where it is not the one that `device` names."""
    nccl_tests: NcclTests | None = None
    """How nccl-tests is started, for the backend of that name."""
    emulated_network: EmulatedNetwork | None = None
    """Links between the nodes of collectives that this machine emulates by network namespaces."""

    @property
    def kernel_points(self) -> tuple[Point, ...]:
        """Rows of the kernel table, warm ones first."""
        return (*map(Point, self.kernels), *(Point(op, cold=True) for op in self.cold_kernels))

    @property
    def collective_points(self) -> tuple[Point, ...]:
        """Rows of the table of collectives."""
        return tuple(map(Point, self.collectives))


def read_plan(path: Path | str) -> Plan:
    """Read a plan.

    A `[[kernels]]` or `[[collectives]]` entry is a grid: every list stands for all of its values,
    and a key that names several fields (`"m,n" = [[8, 8], [64, 8]]`) varies them together. `cache` of
    kernels is "warm" (default), "cold" or a list of both.

    Raises:
        CalibrationError: for a file that is not TOML, misses a key or has an unknown one, or
            describes an impossible op; the message names file and entry.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: not a readable plan ({error})") from None
    known = {f.name for f in fields(Plan)} - {"cold_kernels"}
    if unknown := sorted(set(data) - known):
        raise CalibrationError(f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if not isinstance(data.get("device"), str):
        raise CalibrationError(f"{path}: device is missing; name the device whose table this makes")
    try:
        rule = _make(StoppingRule, data.get("rule", {}), "rule")
        points = [point for i, grid in enumerate(data.get("kernels", ())) for point in _kernels(grid, i)]
        tests, network = data.get("nccl_tests"), data.get("emulated_network")
        return Plan(
            device=data["device"],
            rule=rule,
            collective_rule=_make(StoppingRule, data.get("collective_rule", data.get("rule", {})), "collective_rule"),
            kernels=tuple(op for op, cache in points if cache == "warm"),
            cold_kernels=tuple(op for op, cache in points if cache == "cold"),
            collectives=tuple(
                op
                for i, grid in enumerate(data.get("collectives", ()))
                for op in _collectives(grid, i, tests is not None)
            ),
            kernel_table=data.get("kernel_table", "kernels.csv"),
            collective_table=data.get("collective_table", "collectives.csv"),
            attempts=int(data.get("attempts", 3)),
            patience_s=float(data.get("patience_s", 0.0)),
            interconnect=str(data.get("interconnect", INTERCONNECT)),
            any_device=bool(data.get("any_device", False)),
            nccl_tests=None if tests is None else _make(NcclTests, tests, "nccl_tests"),
            emulated_network=None if network is None else _make(EmulatedNetwork, network, "emulated_network"),
        )
    except PerfModelError as error:
        raise CalibrationError(f"{path}: {error}") from None


def expand(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All points of a grid, the last key varying fastest."""
    axes: list[list[dict[str, Any]]] = []
    for key, value in grid.items():
        names = [name.strip() for name in key.split(",")]
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        points = [v if len(names) > 1 else [v] for v in values]
        if any(not isinstance(p, list) or len(p) != len(names) for p in points):
            raise CalibrationError(f"{key}: every value must be a list of {len(names)}")
        axes.append([dict(zip(names, p, strict=True)) for p in points])
    return [{k: v for part in point for k, v in part.items()} for point in product(*axes)]


def _kernels(grid: dict[str, Any], index: int) -> list[tuple[KernelOp, str]]:
    """The ops of a grid, each with its cache."""
    where, family = f"kernels[{index}]", grid.get("family")
    if family not in MEASURED_FAMILIES:
        raise UnknownNameError(f"family of {where}", str(family), MEASURED_FAMILIES)
    ops = []
    for point in expand({"pass_" if k == "pass" else k: v for k, v in grid.items() if k != "family"}):
        cache = point.pop("cache", "warm")
        if cache not in CACHES:
            raise UnknownNameError(f"cache of {where}", str(cache), CACHES)
        ops.append((_make(MEASURED_FAMILIES[family], point, where), cache))
    return ops


def _collectives(grid: dict[str, Any], index: int, nccl_tests: bool) -> list[Collective]:
    where = f"collectives[{index}]"
    ops = []
    for point in expand(grid):
        point = {"dtype": "fp32", "ranks_per_node": point.get("num_ranks", 0), **point}
        if isinstance(point.get("bytes"), int):
            # whole elements per rank, as close below the wanted size as they come
            unit = ALIGNMENT if nccl_tests else dtype_bytes(point["dtype"])
            point["bytes"] -= point["bytes"] % max(1, unit * point.get("num_ranks", 0))
        ops.append(_make(Collective, point, where))
    return ops


def _make(kind: type, values: dict[str, Any], where: str) -> Any:
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise UnknownNameError(f"key of {where}", unknown[0], known)
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < float("inf"):
            raise CalibrationError(f"{where}: {name} must be a finite number not below zero, got {value!r}")
    try:
        return kind(**values)
    except TypeError as error:
        raise CalibrationError(f"{where}: {error}") from None
