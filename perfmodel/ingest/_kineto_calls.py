"""Calls of operators and collectives in Kineto traces, of accelerators and of CPUs."""

import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Final

from perfmodel.ingest._chrome import ChromeEvent
from perfmodel.ingest._kineto import (
    KinetoFile,
    activities_of,
    launch_of,
    on_one_clock,
    operators_of_kernels,
    parents_of,
)
from perfmodel.ingest._kineto_rows import collective_row, group_of, torch_op
from perfmodel.ingest._measured_trace import Activity, ActivityKind, numbered
from perfmodel.ingest._options import ReadOptions
from perfmodel.ingest._profile import Detail, collective_of
from perfmodel.ingest._rows import Row
from perfmodel.ingest._torch_ops import DTYPES, op_row
from perfmodel.units import DTYPE_BYTES

_NO_WORK: Final = re.compile(
    r"(aten::)?(_?(un)?safe_view|_?reshape(_alias|_as)?|view(_as|_as_real|_as_complex)?|t|numpy_T|transpose_?|permute|"
    r"(as|_as)_strided_?|expand(_as)?|(un)?squeeze_?|select|slice|narrow|detach_?|alias|empty(_like|_strided)?|"
    r"new_empty(_strided)?|resize_?|set_|unbind|split(_with_sizes)?|chunk|unflatten(_dense_tensors)?|flatten|"
    r"contiguous|to|_to_copy|type_as|linear|matmul|layer_norm|batch_norm|_batch_norm_impl_index|rms_norm|dropout|"
    r"scaled_dot_product_attention|cross_entropy_loss|nll_loss_nd|conv[123]d|convolution|_convolution|max_pool2d|"
    r"adaptive_avg_pool2d|stack|einsum|item|_local_scalar_dense|result_type|is_.*|lift_fresh|detach|ones|ones_like|"
    r"zeros|zeros_like|softmax|log_softmax)"
)
"""Operators that only look at a tensor, or call others for all that they do."""
_COLLECTIVE_CALL: Final = re.compile(r"(gloo|mpi|ccl|nccl|hccl|xccl):(\w+)")
"""Ranges in which a backend of torch.distributed works."""
_IGNORED: Final = ("barrier", "monitored_barrier")


def kineto_calls(files: Sequence[KinetoFile]) -> list[tuple[Activity, Detail]]:
    """Activities of all ranks on one clock, each with the call that it belongs to."""
    found: list[tuple[tuple[int, int], Activity, Detail]] = []
    for number, (file, shift_us) in enumerate(on_one_clock(files)):
        each = _of_device(file, shift_us, number) if file.device_work else _of_host(file, shift_us, number)
        found += [((file.rank, activity.device), activity, detail) for activity, detail in each]
    devices = numbered((key, activity) for key, activity, _ in found)
    return [(activity, detail) for activity, (_, _, detail) in zip(devices, found, strict=True)]


def _of_device(file: KinetoFile, shift_us: float, number: int) -> list[tuple[Activity, Detail]]:
    """Kernels, with the operators that launched them."""
    operators = operators_of_kernels(file)
    activities = activities_of(file, file.device_work, operators, shift_us)
    around = parents_of(file.operators)
    known: dict[int, Row | None] = {}
    options, skipped, found = ReadOptions(), Counter[str](), []
    for position, (event, operator, activity) in enumerate(zip(file.device_work, operators, activities, strict=True)):
        launch = launch_of(file, event)
        launched_s = float("nan") if launch is None else (launch.end_us + shift_us) * 1e-6
        if activity.kind != ActivityKind.COMPUTE or operator is None:
            communicates = activity.kind == ActivityKind.COMMUNICATION
            row = collective_row(file, event, options, skipped) if communicates else None
            name = "" if operator is None or communicates else operator.name
            detail = Detail((number, "kernel", position), name, row, launched_s, group_of(event))
        else:
            if id(operator) not in known:
                known[id(operator)] = op_row(torch_op(operator, around[id(operator)]))
            detail = Detail((number, id(operator)), operator.name, known[id(operator)], launched_s)
        found.append((activity, detail))
    return found


def _of_host(file: KinetoFile, shift_us: float, number: int) -> list[tuple[Activity, Detail]]:
    """Operators that compute and lie in no other such one, and what the communication library's own threads do."""
    around = parents_of(file.operators)
    work = [e for e in file.operators if _works(e.name) and not any(_works(parent.name) for parent in around[id(e)])]
    calls = [e for e in file.ranges if (m := _COLLECTIVE_CALL.fullmatch(e.name)) and m[2] not in _IGNORED]
    details = [Detail((number, id(e)), e.name, op_row(torch_op(e, around[id(e)]))) for e in work]
    details += [Detail((number, id(e)), e.name, _collective(e, file)) for e in calls]
    activities = activities_of(file, [*work, *calls], None, shift_us)
    return list(zip(activities, details, strict=True))


def _works(name: str) -> bool:
    space, colons, _ = name.partition("::")
    return bool(colons) and space not in ("autograd", "torch", "c10d", "profiler") and not _NO_WORK.fullmatch(name)


def _collective(event: ChromeEvent, file: KinetoFile) -> Row | None:
    """The row of a backend's range: kind by its name, size by its input, among all ranks of the job's only group."""
    kind = collective_of(event.name)
    shapes, dtypes = event.args.get("Input Dims", []), event.args.get("Input type", [])
    dtype = DTYPES.get(str(dtypes[0]), "") if isinstance(dtypes, list) and dtypes else ""
    elements = _elements(shapes)
    if not kind or dtype not in DTYPE_BYTES or not elements or file.world_size < 2:
        return None
    ranks = 2 if kind == "send_recv" else file.world_size
    size = elements * DTYPE_BYTES[dtype] * (ranks if kind == "all_gather" else 1)
    return {"collective": kind, "num_ranks": ranks, "bytes": size, "dtype": dtype}


def _elements(shapes: Any) -> int:
    """Elements of all tensors in a list of shapes."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    if all(type(size) is int and size >= 0 for size in shapes):
        return prod(shapes)
    return sum(_elements(shape) for shape in shapes)
