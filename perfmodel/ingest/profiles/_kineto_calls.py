"""Reads operators with shapes and collectives with sizes from Kineto traces, as rows of measurement
tables and as calls of a profile, for accelerators and CPUs."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final

from perfmodel.ingest._files import integer, text
from perfmodel.ingest._rows import CollectiveCalls, ReadOptions, Row
from perfmodel.ingest.profiles._kineto import (
    KinetoFile,
    activities_of,
    launch_of,
    on_one_clock,
    operators_of_kernels,
    parents_of,
)
from perfmodel.ingest.profiles._measured_trace import (
    Activity,
    ActivityKind,
    is_communication,
    numbered,
)
from perfmodel.ingest.profiles._profile import Detail, collective_of
from perfmodel.ingest.profiles._torch_ops import DTYPES, TorchOp, has_row, op_row
from perfmodel.ingest.profiles.chrome import ChromeEvent
from perfmodel.units import DTYPE_BYTES

_COLLECTIVES: Final = {
    "allreduce": ("all_reduce", "In"),
    "all_reduce": ("all_reduce", "In"),
    "allgather": ("all_gather", "Out"),
    "all_gather": ("all_gather", "Out"),
    "reduce_scatter": ("reduce_scatter", "In"),
    "broadcast": ("broadcast", "In"),
    "all_to_all": ("all_to_all", "In"),
    "all_to_allv": ("all_to_all", "In"),
    "alltoall": ("all_to_all", "In"),
    "send": ("send_recv", "In"),
    "recv": ("send_recv", "Out"),
}
"""Name in the trace -> collective, and the side (input or output) that has its size in nccl-tests'
convention."""
_SUFFIXES: Final = (
    "_base",
    "_single",
    "_into_tensor_coalesced",
    "_tensor_coalesced",
    "_coalesced",
    "_into_tensor",
)


def kineto_rows(
    files: Sequence[KinetoFile], options: ReadOptions, skipped: Counter[str]
) -> list[Row]:
    """A row per call of an operator (all kernels that it launched) and per collective."""
    rows: list[Row] = []
    for file in files:
        rows += _operator_rows(file, options, skipped)
    return rows + _collective_rows(files, options, skipped)


def _operator_rows(file: KinetoFile, options: ReadOptions, skipped: Counter[str]) -> Iterator[Row]:
    """Rows of the operators that were timed, each once."""
    device = options.name_of(file.device_name)
    parents = parents_of(file.operators)
    for event, time_us in _timed(file, skipped):
        around = parents[id(event)]
        # On a CPU an operator's time includes that of the operators that it calls.
        if not file.device_work and any(has_row(parent.name) for parent in around):
            continue  # part of an operator that has a row itself
        row = op_row(torch_op(event, around))
        if row is None:
            # An operator with a rule but no shapes was profiled without them; one without a rule is
            # of no family.
            if has_row(event.name) and "Input Dims" not in event.args:
                skipped["no input shapes (profile with record_shapes=True)"] += 1
            elif has_row(event.name) or file.device_work:
                skipped[f"no row for operator {event.name}"] += 1
            continue
        variant = "kineto kernels" if file.device_work else "kineto cpu operator"
        timing = {"time_us": time_us, "software": "torch", "variant": variant}
        yield {"source": "kineto", "device": device} | row | timing


def _timed(file: KinetoFile, skipped: Counter[str]) -> Iterator[tuple[ChromeEvent, float]]:
    """Operators with the times of their kernels, or their own times if no device has kernels."""
    if not file.device_work:
        for event in file.operators:
            if event.duration_us > 0:
                yield event, event.duration_us
        return
    operators: dict[int, ChromeEvent] = {}
    total_us: dict[int, float] = defaultdict(float)
    for kernel, operator in zip(file.device_work, operators_of_kernels(file), strict=True):
        # Copies and collectives are not part of what an operator's shape explains.
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

    def texts(name: str) -> tuple[str, ...]:
        return tuple(value if isinstance(value, str) else "" for value in column(name))

    # Columns that record_shapes=True adds; each has an entry per argument of the operator.
    return TorchOp(
        event.name,
        column("Input Dims") or column("Input dims"),
        texts("Input type"),
        texts("Concrete Inputs"),
        column("Input Strides"),
        tuple(parent.name for parent in around),
    )


def _tuples(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _collective_rows(
    files: Sequence[KinetoFile], options: ReadOptions, skipped: Counter[str]
) -> list[Row]:
    calls = CollectiveCalls()
    for index, file in enumerate(files):
        kernels = [work for work in file.device_work if is_communication(work.name)]
        for kernel in kernels:
            row = collective_row(file, kernel, options, skipped)
            if row is not None and kernel.duration_us > 0:
                calls.add(row, group_of(kernel), index, kernel.duration_us)
    return [row | {"software": "torch-nccl"} for row in calls.rows()]


def group_of(kernel: ChromeEvent) -> str:
    """The ranks in a communication kernel's group; if they are unknown, the group's name."""
    return str(kernel.args.get("Process Group Ranks", kernel.args.get("Process Group Name", "")))


def collective_row(
    file: KinetoFile, kernel: ChromeEvent, options: ReadOptions, skipped: Counter[str]
) -> Row | None:
    """The communication kernel's columns of a measurement row; None without metadata."""
    args, place = kernel.args, kernel.place
    if "Collective name" not in args:
        skipped["communication kernel without its collective's name and size"] += 1
        return None
    name = text(args["Collective name"], "Collective name", place)
    dtype = DTYPES.get(text(args.get("dtype", ""), "dtype", place), "")
    # c10d's names have underscores around them and endings for variants of the call
    # (`_allgather_base`).
    plain = name.strip("_")
    plain = next((plain.removesuffix(end) for end in _SUFFIXES if plain.endswith(end)), plain)
    if plain not in _COLLECTIVES or dtype not in DTYPE_BYTES:
        what = f"element type {args.get('dtype')}" if plain in _COLLECTIVES else name
        skipped[f"no such collective in the tables: {what}"] += 1
        return None
    # nccl-tests state the size of the larger buffer: the input of a reduce-scatter, the output of
    # an all-gather.
    collective, side = _COLLECTIVES[plain]
    elements = integer(args.get(f"{side} msg nelems"), f"{side} msg nelems", place)
    # Send and receive run between two ranks of a group of any size.
    ranks = (
        2 if collective == "send_recv" else integer(args.get("Group size"), "Group size", place, 1)
    )
    if not elements:
        skipped["no bytes"] += 1
        return None
    row: Row = {
        "source": "kineto",
        "device": options.name_of(file.device_name),
        "collective": collective,
        "algorithm": "auto",
        "num_ranks": ranks,
        "bytes": elements * DTYPE_BYTES[dtype],
        "dtype": dtype,
    }
    return row | options.nodes(ranks)


_NO_WORK: Final = re.compile(
    r"(aten::)?(_?(un)?safe_view|_?reshape(_alias|_as)?|view(_as|_as_real|_as_complex)?|t|numpy_T|transpose_?|permute|"
    r"(as|_as)_strided_?|expand(_as)?|(un)?squeeze_?|select|slice|narrow|detach_?|alias|empty(_like|_strided)?|"
    r"new_empty(_strided)?|resize_?|set_|unbind|split(_with_sizes)?|chunk|unflatten(_dense_tensors)?|flatten|"
    r"contiguous|to|_to_copy|type_as|linear|matmul|layer_norm|batch_norm|_batch_norm_impl_index|rms_norm|dropout|"
    r"scaled_dot_product_attention|cross_entropy_loss|nll_loss_nd|conv[123]d|convolution|_convolution|max_pool2d|"
    r"adaptive_avg_pool2d|stack|einsum|item|_local_scalar_dense|result_type|is_.*|lift_fresh|detach|ones|ones_like|"
    r"zeros|zeros_like|softmax|log_softmax)"
)
"""Operators that only view a tensor, or only call other operators."""
_COLLECTIVE_CALL: Final = re.compile(r"(gloo|mpi|ccl|nccl|hccl|xccl):(\w+)")
"""Pattern of the ranges of torch.distributed backends."""
_IGNORED: Final = ("barrier", "monitored_barrier")


def kineto_calls(files: Sequence[KinetoFile]) -> list[tuple[Activity, Detail]]:
    """Activities of all ranks on one clock, each with the call that it belongs to."""
    calls: list[tuple[tuple[int, int], Activity, Detail]] = []
    for number, (file, shift_us) in enumerate(on_one_clock(files)):
        if file.device_work:
            calls_of_file = _activities_of_device(file, shift_us, number)
        else:
            calls_of_file = _host_calls(file, shift_us, number)
        calls += [
            ((file.rank, activity.device), activity, detail) for activity, detail in calls_of_file
        ]
    devices = numbered((key, activity) for key, activity, _ in calls)
    return [(activity, detail) for activity, (_, _, detail) in zip(devices, calls, strict=True)]


def _activities_of_device(
    file: KinetoFile, shift_us: float, number: int
) -> list[tuple[Activity, Detail]]:
    """Kernels, with the operators that launched them."""
    operators = operators_of_kernels(file)
    activities = activities_of(file, file.device_work, operators, shift_us)
    around = parents_of(file.operators)
    known: dict[int, Row | None] = {}
    options = ReadOptions()
    skipped = Counter[str]()
    calls = []
    for position, (event, operator, activity) in enumerate(
        zip(file.device_work, operators, activities, strict=True)
    ):
        launch = launch_of(file, event)
        launched_s = float("nan") if launch is None else (launch.end_us + shift_us) * 1e-6
        # A collective's size is in its kernel's own arguments; a kernel that computes has the
        # shapes of its operator, which all kernels of that operator share.
        if activity.kind != ActivityKind.COMPUTE or operator is None:
            communicates = activity.kind == ActivityKind.COMMUNICATION
            row = collective_row(file, event, options, skipped) if communicates else None
            name = "" if operator is None or communicates else operator.name
            detail = Detail((number, "kernel", position), name, row, launched_s, group_of(event))
        else:
            if id(operator) not in known:
                known[id(operator)] = op_row(torch_op(operator, around[id(operator)]))
            detail = Detail((number, id(operator)), operator.name, known[id(operator)], launched_s)
        calls.append((activity, detail))
    return calls


def _host_calls(file: KinetoFile, shift_us: float, number: int) -> list[tuple[Activity, Detail]]:
    """Outermost operators that compute, and the work of the communication library's own threads."""
    around = parents_of(file.operators)
    # On a CPU operators run inside one another: the innermost that does work is counted, not those
    # that call it.
    work = []
    for event in file.operators:
        is_part = any(_works(parent.name) for parent in around[id(event)])
        if _works(event.name) and not is_part:
            work.append(event)
    calls = []
    for event in file.ranges:
        backend_call = _COLLECTIVE_CALL.fullmatch(event.name)
        if backend_call and backend_call[2] not in _IGNORED:
            calls.append(event)
    details = [Detail((number, id(e)), e.name, op_row(torch_op(e, around[id(e)]))) for e in work]
    details += [Detail((number, id(e)), e.name, _collective(e, file)) for e in calls]
    activities = activities_of(file, [*work, *calls], None, shift_us)
    return list(zip(activities, details, strict=True))


def _works(name: str) -> bool:
    space, colons, _ = name.partition("::")
    return (
        bool(colons)
        and space not in ("autograd", "torch", "c10d", "profiler")
        and not _NO_WORK.fullmatch(name)
    )


def _collective(event: ChromeEvent, file: KinetoFile) -> Row | None:
    """The row of a backend's range: kind by its name, size by its input, among all ranks of the
    job's only group."""
    # Backends for CPUs name their ranges (`gloo:all_reduce`) and state no group.
    kind = collective_of(event.name)
    shapes = event.args.get("Input Dims", [])
    dtypes = event.args.get("Input type", [])
    dtype = DTYPES.get(str(dtypes[0]), "") if isinstance(dtypes, list) and dtypes else ""
    elements = _elements(shapes)
    if not kind or dtype not in DTYPE_BYTES or not elements or file.world_size < 2:
        return None
    ranks = 2 if kind == "send_recv" else file.world_size
    # The input of an all-gather is one rank's share of the size that the tables state.
    size = elements * DTYPE_BYTES[dtype] * (ranks if kind == "all_gather" else 1)
    return {"collective": kind, "num_ranks": ranks, "bytes": size, "dtype": dtype}


def _elements(shapes: Any) -> int:
    """Elements of all tensors in a list of shapes."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    # One shape, or a list of them; True would pass for an int.
    if all(type(size) is int and size >= 0 for size in shapes):
        return prod(shapes)
    return sum(_elements(shape) for shape in shapes)
