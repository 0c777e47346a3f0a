"""Rows from Nsight Systems reports: kernels under the NVTX ranges that PyTorch's `emit_nvtx(record_shapes=True)`
(or `nsys profile --pytorch=autograd-shapes-nvtx`) pushes for every operator with its shapes."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

from perfmodel.readers._kinds import is_communication
from perfmodel.readers._nsys import NsysFile, Record, launched_ns
from perfmodel.readers._options import ReadOptions
from perfmodel.readers._rows import Row
from perfmodel.readers._torch_ops import TorchOp, op_row

_OPERATOR: Final = re.compile(r"(?P<name>aten::\w+),.*?sizes = (?P<sizes>\[[\[\]\d,\s]*\])")
_DTYPE: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "half": "fp16", "f16": "fp16"}
_DTYPE_WORD: Final = re.compile(r"bfloat16|bf16|fp16|half|(?<![b\d])f16", re.I)


def nsys_rows(files: Sequence[NsysFile], options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """A row per call of an operator: the kernels that it launched."""
    return [row for file in files for row in _of_file(file, options, skipped)]


def _of_file(file: NsysFile, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    calls = _operator_calls(file)
    of_call: dict[int, list[Record]] = defaultdict(list)
    for kernel in file.kernels:
        if is_communication(kernel["name"]):
            skipped["communication kernel: Nsight Systems does not record its size"] += 1
            continue
        at_ns, thread = launched_ns(file, kernel)
        call = _innermost(calls.get(thread, []), at_ns)
        if call is None:
            skipped["kernel outside of any operator's NVTX range with shapes (emit_nvtx(record_shapes=True))"] += 1
        else:
            of_call[id(call)].append(kernel | {"call": call})
    rows = []
    for kernels in of_call.values():
        op: TorchOp = kernels[0]["call"][2]
        row = op_row(op)
        if row is None:
            skipped[f"no row for operator {op.name}"] += 1
            continue
        found = {_DTYPE[w.lower()] for k in kernels for w in _DTYPE_WORD.findall(k["name"])}
        device = options.name_of(file.device_names.get(int(kernels[0]["deviceId"]), ""))
        time_us = sum(k["end"] - k["start"] for k in kernels) * 1e-3
        if time_us > 0:
            row = row | {"dtype": found.pop() if len(found) == 1 else ""}
            rows.append(
                {"source": "nsys", "device": device} | row
                | {"time_us": time_us, "software": "torch", "variant": "nsys kernels"}
            )  # fmt: skip
    return rows


Call = tuple[int, int, TorchOp]
"""Start and end in nanoseconds, and the operator."""


def _operator_calls(file: NsysFile) -> dict[int, list[Call]]:
    """Operators' ranges by thread, sorted by start."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for row in file.ranges:
        if found := _OPERATOR.search(str(row["name"])):
            try:
                shapes: Any = ast.literal_eval(found["sizes"])
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            op = TorchOp(found["name"], tuple(tuple(s) if isinstance(s, list) else () for s in shapes), ())
            calls[row.get("globalTid") or 0].append((row["start"], row["end"], op))
    for of_thread in calls.values():
        of_thread.sort(key=lambda call: (call[0], -call[1]))
    return calls


def _innermost(calls: list[Call], at_ns: int) -> Call | None:
    """The last call to begin among those that are open (calls of a thread nest)."""
    from bisect import bisect_right

    for index in range(bisect_right(calls, at_ns, key=lambda call: call[0]) - 1, -1, -1):
        if calls[index][1] >= at_ns:
            return calls[index]
    return None
