"""Rows of the measurement tables from Kineto traces: operators with shapes, NCCL kernels with sizes."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from perfmodel.ingest._chrome import ChromeEvent
from perfmodel.ingest._files import integer, text
from perfmodel.ingest._kineto import KinetoFile, operators_of_kernels, parents_of
from perfmodel.ingest._measured_trace import is_communication
from perfmodel.ingest._options import ReadOptions
from perfmodel.ingest._rows import CollectiveCalls, Row
from perfmodel.ingest._torch_ops import DTYPES, TorchOp, has_row, op_row
from perfmodel.units import DTYPE_BYTES

_COLLECTIVES: Final = {
    "allreduce": ("all_reduce", "In"), "all_reduce": ("all_reduce", "In"),
    "allgather": ("all_gather", "Out"), "all_gather": ("all_gather", "Out"),
    "reduce_scatter": ("reduce_scatter", "In"), "broadcast": ("broadcast", "In"),
    "all_to_all": ("all_to_all", "In"), "all_to_allv": ("all_to_all", "In"), "alltoall": ("all_to_all", "In"),
    "send": ("send_recv", "In"), "recv": ("send_recv", "Out"),
}  # fmt: skip
"""Name in the trace -> collective, and on which side its size by nccl-tests' rule lies."""
_SUFFIXES: Final = ("_base", "_single", "_into_tensor_coalesced", "_tensor_coalesced", "_coalesced", "_into_tensor")


def kineto_rows(files: Sequence[KinetoFile], options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """A row per call of an operator (all kernels that it launched) and per collective."""
    rows = [row for file in files for row in _operator_rows(file, options, skipped)]
    return rows + _collective_rows(files, options, skipped)


def _operator_rows(file: KinetoFile, options: ReadOptions, skipped: Counter[str]) -> Iterator[Row]:
    device, parents = options.name_of(file.device_name), parents_of(file.operators)
    for event, time_us in _timed(file, skipped):
        around = parents[id(event)]
        if not file.device_work and any(has_row(parent.name) for parent in around):
            continue  # part of an operator that has a row itself
        row = op_row(torch_op(event, around))
        if row is None:
            if has_row(event.name) and "Input Dims" not in event.args:
                skipped["no input shapes (profile with record_shapes=True)"] += 1
            elif has_row(event.name) or file.device_work:
                skipped[f"no row for operator {event.name}"] += 1
            continue
        variant = "kineto kernels" if file.device_work else "kineto cpu operator"
        yield {"source": "kineto", "device": device} | row | {
            "time_us": time_us, "software": "torch", "variant": variant,
        }  # fmt: skip


def _timed(file: KinetoFile, skipped: Counter[str]) -> Iterator[tuple[ChromeEvent, float]]:
    """Operators and their times: of their kernels, or their own where no device has any."""
    if not file.device_work:
        for event in file.operators:
            if event.duration_us > 0:
                yield event, event.duration_us
        return
    operators: dict[int, ChromeEvent] = {}
    total_us: dict[int, float] = defaultdict(float)
    for kernel, operator in zip(file.device_work, operators_of_kernels(file), strict=True):
        if is_communication(kernel.name) or kernel.category.lower() != "kernel":
            continue
        if operator is None:
            skipped["kernel without the operator that launched it"] += 1
        else:
            operators[id(operator)] = operator
            total_us[id(operator)] += kernel.duration_us
    for number, time_us in total_us.items():
        if time_us > 0:
            yield operators[number], time_us


def torch_op(event: ChromeEvent, around: Sequence[ChromeEvent]) -> TorchOp:
    """One call of an operator, with the calls around it."""

    def column(name: str) -> tuple[Any, ...]:
        value = event.args.get(name, [])
        return _tuples(value) if isinstance(value, list) else ()

    def words(name: str) -> tuple[str, ...]:
        return tuple(value if isinstance(value, str) else "" for value in column(name))

    return TorchOp(
        event.name,
        column("Input Dims"),
        words("Input type"),
        words("Concrete Inputs"),
        column("Input Strides"),
        tuple(parent.name for parent in around),
    )


def _tuples(value: Any) -> Any:
    """Lists as tuples all the way down."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _collective_rows(files: Sequence[KinetoFile], options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    calls = CollectiveCalls()
    for index, file in enumerate(files):
        for kernel in file.device_work:
            if is_communication(kernel.name):
                row = collective_row(file, kernel, options, skipped)
                if row is not None and kernel.duration_us > 0:
                    calls.add(row, group_of(kernel), index, kernel.duration_us)
    return [row | {"software": "torch-nccl"} for row in calls.rows()]


def group_of(kernel: ChromeEvent) -> str:
    """Ranks of a communication kernel's group, else the group's name."""
    return str(kernel.args.get("Process Group Ranks", kernel.args.get("Process Group Name", "")))


def collective_row(file: KinetoFile, kernel: ChromeEvent, options: ReadOptions, skipped: Counter[str]) -> Row | None:
    """The row of a communication kernel's own columns; none for one without metadata."""
    args, where = kernel.args, kernel.where
    if "Collective name" not in args:
        skipped["communication kernel without its collective's name and size"] += 1
        return None
    name = text(args["Collective name"], "Collective name", where)
    dtype = DTYPES.get(text(args.get("dtype", ""), "dtype", where), "")
    plain = name.strip("_")
    plain = next((plain.removesuffix(end) for end in _SUFFIXES if plain.endswith(end)), plain)
    if plain not in _COLLECTIVES or dtype not in DTYPE_BYTES:
        what = f"element type {args.get('dtype')}" if plain in _COLLECTIVES else name
        skipped[f"no such collective in the tables: {what}"] += 1
        return None
    collective, side = _COLLECTIVES[plain]
    elements = integer(args.get(f"{side} msg nelems"), f"{side} msg nelems", where)
    ranks = 2 if collective == "send_recv" else integer(args.get("Group size"), "Group size", where, 1)
    if not elements:
        skipped["no bytes"] += 1
        return None
    row: Row = {
        "source": "kineto", "device": options.name_of(file.device_name), "collective": collective, "algorithm": "auto",
        "num_ranks": ranks, "bytes": elements * DTYPE_BYTES[dtype], "dtype": dtype,
    }  # fmt: skip
    return row | options.nodes(ranks)
