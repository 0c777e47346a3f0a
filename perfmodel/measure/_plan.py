"""Sweep plans: the ops to measure, read from and written to TOML grids."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Final, NamedTuple

from perfmodel.catalog import checked
from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.files import parse_toml, read_text
from perfmodel.ingest.tables import write_text
from perfmodel.measure.backends import ALIGNMENT, INTERCONNECT, MEASURED_FAMILIES, NcclTests
from perfmodel.measure.ranks import EmulatedNetwork
from perfmodel.measure.tables import Point
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import Collective, KernelOp, Op
from perfmodel.units import dtype_bytes, require_whole

LARGEST: Final = 2**53
"""Largest whole number of an op's sizes; beyond it they are not exact as floats."""
LOAD_S: Final = 3.0
"""Default seconds of work before a kernel is timed under load."""
CACHES: Final = ("warm", "cold", "loaded")
"""State before a call: the op's data in the caches, or not; or in the caches of a device that has
worked for a while (`load_s`)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements of one run of `run_plan` on one device."""

    device: str
    """Text of the `device` column."""
    rule: StoppingRule
    """Stopping rule for kernels."""
    collective_rule: StoppingRule
    """Rule that says when enough samples of a collective were taken."""
    kernels: tuple[KernelOp, ...]
    """Kernels to be measured with their data in the caches."""
    collectives: tuple[Collective, ...]
    kernel_table: str
    """File name of the kernels' table."""
    collective_table: str
    """File name of the collectives' table."""
    attempts: int
    """Largest number of measurements of a row that other work disturbs."""
    patience_s: float
    """Longest wait for a quiet machine in one pass over the collectives, which need the whole
    machine."""
    cold_kernels: tuple[KernelOp, ...] = ()
    """Kernels to be measured with their data out of the caches, in addition to warm measurements or
    instead of them."""
    loaded_kernels: tuple[KernelOp, ...] = ()
    """Kernels to be measured at the clock that the device keeps under load."""
    load_s: float = LOAD_S
    """Seconds for which such a kernel runs before its first sample."""
    beside_kernels: tuple[tuple[KernelOp, Collective], ...] = ()
    """Kernels to be measured on all ranks of a collective, alone and while it runs."""
    beside_table: str = "kernels_beside.csv"
    """File name of their table."""
    interconnect: str = INTERCONNECT
    """Text of the `interconnect` column of collectives."""
    any_device: bool = False
    """Whether to measure the accelerator of this machine even if it is not the one that `device`
    names."""
    nccl_tests: NcclTests | None = None
    """How nccl-tests is started, for the backend of that name."""
    emulated_network: EmulatedNetwork | None = None
    """Links between the nodes of collectives that this machine emulates by network namespaces."""

    @property
    def kernel_points(self) -> tuple[Point, ...]:
        """Rows of the kernel table, warm ones first, those of a loaded device last."""
        cold = [Point(op, cold=True) for op in self.cold_kernels]
        loaded = [Point(op, loaded=True) for op in self.loaded_kernels]
        return (*map(Point, self.kernels), *cold, *loaded)

    @property
    def beside_points(self) -> tuple[Point, ...]:
        """Rows of the table of kernels during collectives; each kernel is first measured alone."""
        points: dict[Point, None] = {}
        for op, collective in self.beside_kernels:
            points[Point(op)] = None
            points[Point(op, beside=collective)] = None
        return tuple(points)

    @property
    def collective_points(self) -> tuple[Point, ...]:
        """Rows of the table of collectives."""
        return tuple(map(Point, self.collectives))


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan in its TOML form."""

    device: str
    kernels: tuple[dict[str, Any], ...] = ()
    collectives: tuple[dict[str, Any], ...] = ()
    rule: dict[str, Any] = field(default_factory=dict)
    collective_rule: dict[str, Any] | None = None
    """Stopping rule for collectives; `rule` if not given."""
    kernel_table: str = "kernels.csv"
    collective_table: str = "collectives.csv"
    attempts: int = 3
    patience_s: float = 0.0
    load_s: float = LOAD_S
    beside_table: str = "kernels_beside.csv"
    interconnect: str = INTERCONNECT
    any_device: bool = False
    nccl_tests: dict[str, Any] | None = None
    emulated_network: dict[str, Any] | None = None

    def plan(self) -> Plan:
        """The plan with its grids expanded."""
        require_whole("plan", {"attempts": self.attempts})
        for name in ("patience_s", "load_s"):
            seconds = getattr(self, name)
            if not 0 <= seconds < float("inf"):
                raise CalibrationError(
                    f"{name} must be a finite number of at least 0, got {seconds}"
                )

        # Expand the grids.
        tests, network = self.nccl_tests, self.emulated_network
        collective_rule = self.rule if self.collective_rule is None else self.collective_rule
        kernels: list[KernelOp] = []
        cold_kernels: list[KernelOp] = []
        loaded_kernels: list[KernelOp] = []
        kernels_in = {"warm": kernels, "cold": cold_kernels, "loaded": loaded_kernels}
        beside_kernels: list[tuple[KernelOp, Collective]] = []
        for i, grid in enumerate(self.kernels):
            for op, cache, collective in _kernels(grid, i):
                if collective is None:
                    kernels_in[cache].append(op)
                else:
                    beside_kernels.append((op, collective))
        collectives: list[Collective] = []
        for i, grid in enumerate(self.collectives):
            collectives += _collectives(grid, i, tests is not None)

        # A plan has the fields of its file, with a record for each table.
        records: dict[str, Any] = {
            "rule": _make(StoppingRule, self.rule, "rule"),
            "collective_rule": _make(StoppingRule, collective_rule, "collective_rule"),
            "kernels": tuple(kernels),
            "cold_kernels": tuple(cold_kernels),
            "loaded_kernels": tuple(loaded_kernels),
            "beside_kernels": tuple(beside_kernels),
            "collectives": tuple(collectives),
            "nccl_tests": None,
            "emulated_network": None,
        }
        if tests is not None:
            records["nccl_tests"] = _make(NcclTests, tests, "nccl_tests")
        if network is not None:
            records["emulated_network"] = _make(EmulatedNetwork, network, "emulated_network")
        values = {field_info.name: getattr(self, field_info.name) for field_info in fields(self)}
        return Plan(**values | records)


def read_plan(path: Path | str) -> Plan:
    """Read a plan.

    A `[[kernels]]` or `[[collectives]]` entry is a grid: every list stands for all of its values,
    and a key that names several fields (`"m,n" = [[8, 8], [64, 8]]`) varies them together. `cache`
    of kernels is "warm" (default), "cold", "loaded" or a list of these; `beside` a collective, or a
    list of these.

    Raises:
        CalibrationError: for a file that is not TOML, misses a key or has an unknown one, or
            describes an impossible op; the message names file and entry.
    """
    path = Path(path)
    try:
        data = parse_toml(read_text(path))
    except OSError as error:
        raise CalibrationError(f"{path}: not a readable plan ({error.strerror})") from None
    except ValueError as error:
        raise CalibrationError(f"{path}: not a readable plan ({error})") from None

    # The most frequent mistakes are reported before types are checked.
    known = {field_info.name for field_info in fields(PlanFile)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise CalibrationError(
            f"{path}: unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    if not isinstance(data.get("device"), str):
        raise CalibrationError(f"{path}: device is missing; name the measured device")
    try:
        return checked(PlanFile, data, "plan").plan()
    except PerfModelError as error:
        raise CalibrationError(f"{path}: {error}") from None


def expand(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All points of a grid, the last key varying fastest."""
    # Each key is an axis: a list of what it says of its fields.
    axes: list[list[dict[str, Any]]] = []
    for key, value in grid.items():
        names = [name.strip() for name in key.split(",")]
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        points = [v if len(names) > 1 else [v] for v in values]
        if any(not isinstance(p, list) or len(p) != len(names) for p in points):
            raise CalibrationError(f"{key}: every value must be a list of {len(names)} entries")
        axes.append([dict(zip(names, p, strict=True)) for p in points])

    # A point takes one entry of every axis.
    expanded = []
    for combination in product(*axes):
        point: dict[str, Any] = {}
        for axis_fields in combination:
            point |= axis_fields
        expanded.append(point)
    return expanded


class _PlannedKernel(NamedTuple):
    """A kernel to measure, with the state of the machine."""

    op: KernelOp
    cache: str
    """One of `CACHES`."""
    beside: Collective | None
    """A collective that runs meanwhile."""


def _kernels(grid: dict[str, Any], index: int) -> list[_PlannedKernel]:
    """The ops of a grid, each with its state of caches or concurrent collective."""
    entry = f"kernels[{index}]"
    family = grid.get("family")
    if not isinstance(family, str) or family not in MEASURED_FAMILIES:
        raise UnknownNameError(f"family of {entry}", str(family), MEASURED_FAMILIES)
    # `pass` is a word of Python, so the op's field is called `pass_`.
    kernels = []
    op_grid = {
        "pass_" if key == "pass" else key: value for key, value in grid.items() if key != "family"
    }
    for point in expand(op_grid):
        if "beside" in point and "cache" in point:
            raise CalibrationError(
                f"{entry}: leave cache out: kernels that are measured during a collective find their data in the caches"
            )
        cache = point.pop("cache", "warm")
        if not isinstance(cache, str) or cache not in CACHES:
            raise UnknownNameError(f"cache of {entry}", str(cache), CACHES)
        collective = None
        if "beside" in point:
            collective = _concurrent_collective(point.pop("beside"), entry)
        kernels.append(
            _PlannedKernel(_make(MEASURED_FAMILIES[family], point, entry), cache, collective)
        )
    return kernels


def _concurrent_collective(stated: Any, entry: str) -> Collective:
    """The collective that runs during a kernel."""
    if not isinstance(stated, dict):
        raise CalibrationError(
            f"{entry}: beside must be a table of a collective's keys, got {stated!r}"
        )
    return _collective(stated, f"{entry}.beside", nccl_tests=False)


def _collectives(grid: dict[str, Any], index: int, nccl_tests: bool) -> list[Collective]:
    """The ops of a grid, on one node unless it says otherwise."""
    return [_collective(point, f"collectives[{index}]", nccl_tests) for point in expand(grid)]


def _collective(point: dict[str, Any], entry: str, nccl_tests: bool) -> Collective:
    """The largest collective of at most the stated size with whole elements per rank."""
    stated_bytes = point.get("bytes")
    op: Collective = _make(
        Collective, {"dtype": "fp32", "ranks_per_node": point.get("num_ranks"), **point}, entry
    )
    if isinstance(stated_bytes, int):
        unit = (ALIGNMENT if nccl_tests else dtype_bytes(op.dtype)) * op.num_ranks
        op = replace(op, bytes=stated_bytes - stated_bytes % unit)
    return op


def _make(kind: type, values: dict[str, Any], entry: str) -> Any:
    """Build a record from an entry of the plan, and check keys, types and numbers."""
    if not isinstance(values, dict):
        raise CalibrationError(f"{entry}: must be a table of keys, got {values!r}")
    known = {field_info.name for field_info in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UnknownNameError(f"key of {entry}", unknown[0], known)

    # Whole numbers are sizes, of at least 1 unless 0 is their default.
    built = checked(kind, values, entry)
    for field_info in fields(kind):
        value = getattr(built, field_info.name)
        minimum = 0 if field_info.default == 0 or isinstance(value, float) else 1
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not minimum <= value <= LARGEST
        ):
            raise CalibrationError(
                f"{entry}: {field_info.name} must be between {minimum} and {LARGEST}, got {value!r:.40}"
            )
        if field_info.name == "dtype":
            dtype_bytes(str(value))
    return built


_LABELS: Final = ("family", "op", "collective", "dtype", "pass", "accumulate", "causal", "phase")
"""Keys in which consecutive ops must agree to share an entry."""


_OPS_OF_PLANS: Final = (
    "kernels",
    "cold_kernels",
    "loaded_kernels",
    "beside_kernels",
    "collectives",
)
"""Fields of a plan that are ops, which its text states as entries."""


def write_plan(path: Path | str, plan: Plan) -> None:
    """Write a plan that `read_plan` reads back unchanged, if collectives divide evenly."""
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as TOML; consecutive ops that differ only in sizes share an entry."""
    # Plain values come first, as TOML wants it, then tables, then ops; what is as by default is
    # left out.
    plain_values, tables = {}, {}
    for field_info in fields(plan):
        name = field_info.name
        value = getattr(plan, field_info.name)
        if value == field_info.default or name in _OPS_OF_PLANS:
            continue
        if is_dataclass(value):
            tables[name] = value
        else:
            plain_values[name] = value
    parts = ["\n".join(_lines(plain_values.items()))]
    for name, table in tables.items():
        parts.append(f"[{name}]\n" + "\n".join(_lines(vars(table).items())))
    parts += _entries("kernels", map(_columns, plan.kernels))
    parts += _entries("kernels", ({**_columns(op), "cache": "cold"} for op in plan.cold_kernels))
    parts += _entries(
        "kernels", ({**_columns(op), "cache": "loaded"} for op in plan.loaded_kernels)
    )
    beside = (
        {**_columns(op), "beside": _columns(collective)} for op, collective in plan.beside_kernels
    )
    parts += _entries("kernels", beside)
    parts += _entries("collectives", map(_columns, plan.collectives))
    return "\n\n".join(parts) + "\n"


def _entries(table: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Entries of a table of ops, one for neighbours of one kind."""

    def kind(row: dict[str, Any]) -> tuple[list[str], list[Any]]:
        return list(row), [row.get(name) for name in _LABELS]

    entries = []
    for _, same_kind in groupby(rows, key=kind):
        entries.append(f"[[{table}]]\n" + "\n".join(_grid(list(same_kind))))
    return entries


def _columns(op: Op) -> dict[str, Any]:
    """Fields that tell the op from the default one."""
    columns: dict[str, Any] = {} if isinstance(op, Collective) else {"family": op.family}
    for field_info in fields(op):
        name = field_info.name
        value = getattr(op, field_info.name)
        if value == field_info.default and name not in ("dtype", "pass_"):
            continue
        # Sizes of collectives are whole bytes, which plans state as integers.
        if name == "bytes":
            value = int(value)
        columns["pass" if name == "pass_" else name] = value
    return columns


def _grid(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of an entry for ops of one kind: common keys, then a joint key of the others."""
    names = list(rows[0])

    def differs(name: str) -> bool:
        return any(row[name] != rows[0][name] for row in rows)

    joint = list(filter(differs, names))
    # If the same op occurs twice, the entries are equal, and any key shows how often.
    joint = joint or (names[-1:] if len(rows) > 1 else [])
    yield from _lines((name, rows[0][name]) for name in names if name not in joint)
    if joint:
        joint_values = []
        for row in rows:
            row_values = [row[name] for name in joint]
            joint_values.append(row_values if len(joint) > 1 else row_values[0])
        yield f"{_key(','.join(joint))} = {_value(joint_values)}"


def _lines(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Keys and values as lines of TOML."""
    return (f"{_key(name)} = {_value(value)}" for name, value in items)


def _key(name: str) -> str:
    """A key of TOML, quoted if it is a joint one."""
    return json.dumps(name) if "," in name else name


def _value(value: Any) -> str:
    """A value of TOML."""
    if isinstance(value, dict):
        return f"{{ {', '.join(_lines(value.items()))} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    # JSON's strings, numbers, booleans and lists are TOML's, but for escaped characters beyond the
    # basic plane and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
