"""Sweep plans: which ops to measure, written as TOML grids."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog import checked
from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure._collectives import INTERCONNECT
from perfmodel.measure._harness import StoppingRule
from perfmodel.measure._hosts import EmulatedNetwork
from perfmodel.measure._nccl_tests import ALIGNMENT, NcclTests
from perfmodel.measure._programs import MEASURED_FAMILIES
from perfmodel.measure._rows import Point
from perfmodel.ops import Collective, KernelOp
from perfmodel.units import dtype_bytes, whole

LARGEST: Final = 2**53
"""Whole numbers beyond are none of an op's sizes, nor exact as floats."""
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


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan as TOML states it."""

    device: str
    kernels: tuple[dict[str, Any], ...] = ()
    collectives: tuple[dict[str, Any], ...] = ()
    rule: dict[str, Any] = field(default_factory=dict)
    collective_rule: dict[str, Any] | None = None
    """`rule` if not given."""
    kernel_table: str = "kernels.csv"
    collective_table: str = "collectives.csv"
    attempts: int = 3
    patience_s: float = 0.0
    interconnect: str = INTERCONNECT
    any_device: bool = False
    nccl_tests: dict[str, Any] | None = None
    emulated_network: dict[str, Any] | None = None

    def plan(self) -> Plan:
        """The same with its grids expanded."""
        whole("plan", {"attempts": self.attempts})
        if not 0 <= self.patience_s < float("inf"):
            raise CalibrationError(f"patience_s must be a finite number of at least 0, got {self.patience_s}")
        tests, network = self.nccl_tests, self.emulated_network
        collective_rule = self.rule if self.collective_rule is None else self.collective_rule
        points = [point for i, grid in enumerate(self.kernels) for point in _kernels(grid, i)]
        return Plan(
            device=self.device,
            rule=_make(StoppingRule, self.rule, "rule"),
            collective_rule=_make(StoppingRule, collective_rule, "collective_rule"),
            kernels=tuple(op for op, cache in points if cache == "warm"),
            cold_kernels=tuple(op for op, cache in points if cache == "cold"),
            collectives=tuple(
                op for i, grid in enumerate(self.collectives) for op in _collectives(grid, i, tests is not None)
            ),
            kernel_table=self.kernel_table,
            collective_table=self.collective_table,
            attempts=self.attempts,
            patience_s=self.patience_s,
            interconnect=self.interconnect,
            any_device=self.any_device,
            nccl_tests=None if tests is None else _make(NcclTests, tests, "nccl_tests"),
            emulated_network=None if network is None else _make(EmulatedNetwork, network, "emulated_network"),
        )


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
    except (OSError, ValueError, RecursionError) as error:
        raise CalibrationError(f"{path}: not a readable plan ({error})") from None
    known = {f.name for f in fields(PlanFile)}
    if unknown := sorted(set(data) - known):
        raise CalibrationError(f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if not isinstance(data.get("device"), str):
        raise CalibrationError(f"{path}: device is missing; name the device whose table this makes")
    try:
        return checked(PlanFile, data, "plan").plan()
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
    if not isinstance(family, str) or family not in MEASURED_FAMILIES:
        raise UnknownNameError(f"family of {where}", str(family), MEASURED_FAMILIES)
    ops = []
    for point in expand({"pass_" if k == "pass" else k: v for k, v in grid.items() if k != "family"}):
        cache = point.pop("cache", "warm")
        if not isinstance(cache, str) or cache not in CACHES:
            raise UnknownNameError(f"cache of {where}", str(cache), CACHES)
        ops.append((_make(MEASURED_FAMILIES[family], point, where), cache))
    return ops


def _collectives(grid: dict[str, Any], index: int, nccl_tests: bool) -> list[Collective]:
    where = f"collectives[{index}]"
    ops = []
    for point in expand(grid):
        given = point.get("bytes")
        op: Collective = _make(Collective, {"dtype": "fp32", "ranks_per_node": point.get("num_ranks"), **point}, where)
        if isinstance(given, int):
            # whole elements per rank, as close below the wanted size as they come
            unit = (ALIGNMENT if nccl_tests else dtype_bytes(op.dtype)) * op.num_ranks
            op = replace(op, bytes=given - given % unit)
        ops.append(op)
    return ops


def _make(kind: type, values: dict[str, Any], where: str) -> Any:
    if not isinstance(values, dict):
        raise CalibrationError(f"{where}: must be a table of keys, got {values!r}")
    known = {f.name for f in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise UnknownNameError(f"key of {where}", unknown[0], known)
    made = checked(kind, values, where)
    for f in fields(kind):
        value = getattr(made, f.name)
        least = 0 if f.default == 0 or isinstance(value, float) else 1
        if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= LARGEST:
            raise CalibrationError(f"{where}: {f.name} must be between {least} and {LARGEST}, got {value!r:.40}")
        if f.name == "dtype":
            dtype_bytes(str(value))
    return made
