"""Profiles of training steps: the time of every operator and collective on its device.

A trace without shapes still has the times of its kernels, one without operators their names, and
one rank of many its own. A kernel's family follows from the shapes of its operator, else from the
operator's name, else from the kernel's own name. A kernel that none of these identifies has no
family.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np

from perfmodel.errors import TableError
from perfmodel.ingest._rows import Row
from perfmodel.ingest.profiles._measured_trace import (
    Activity,
    ActivityKind,
    MeasuredTrace,
    trace_of,
)
from perfmodel.ops import FAMILIES, Collective, KernelOp, Op, family_with_bmm


@dataclass(frozen=True)
class Call:
    """One call of an operator or of a collective: the kernels that it launched on one device."""

    name: str
    """Name of the operator, else of the kernel."""
    family: str
    """Op family (`bmm` separately) or kind of collective; empty if the name identifies none."""
    op: Op | None
    """The operation with its shape, if the profile has it; collectives are assumed to lie within
    one node."""
    kind: ActivityKind
    device: int
    step: int
    """Number of the step; -1 outside marked steps."""
    phase: str
    start_s: float
    end_s: float
    time_s: float
    """Sum over its kernels."""
    launched_s: float
    """Time at which the host launched the first kernel; NaN if the profile lacks it, or on CPUs."""
    group: str
    """Group of the ranks of a collective, as the profiler names it."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Calls of all devices on one clock."""

    trace: MeasuredTrace
    """Timeline of the kernels that the calls launched."""
    calls: tuple[Call, ...]
    """Calls in the order in which they start."""
    unread: dict[str, int]
    """Facts that the profile lacks, each with the number of affected calls."""

    @property
    def devices(self) -> int:
        """Number of recorded devices, which may be fewer than the job's."""
        return self.trace.devices

    @property
    def asynchronous(self) -> bool:
        """Whether hosts launch kernels ahead of the devices; false if hosts compute themselves."""
        return any(np.isfinite(call.launched_s) for call in self.calls)

    def step_numbers(self) -> tuple[int, ...]:
        """Steps that every device took part in; [-1] for the whole profile if no step is marked."""
        numbers = []
        for part in self.trace.steps():
            is_marked = (part.step == part.step[0]).all()
            numbers.append(int(part.step[0]) if is_marked else -1)
        return tuple(numbers)

    def step_s(self) -> np.ndarray:
        """Seconds from each step's start to the next one's start; for a single step to its end."""
        parts = self.trace.steps()
        begins_s = np.array([part.start_s.min() for part in parts])
        # From start to start, so that what passes between two steps (data, logging) counts to the
        # first of them.
        if len(parts) > 1:
            return np.diff(begins_s)
        ends_s = np.array([part.end_s.max() for part in parts])
        return ends_s - begins_s

    def in_steps(self) -> tuple[Call, ...]:
        """Calls within the steps of `step_numbers`."""
        # Calls outside of every marked step (warm-up, evaluation) are not part of a step's time.
        numbers = set(self.step_numbers())
        if -1 in numbers:
            return self.calls
        return tuple(call for call in self.calls if call.step in numbers)


@dataclass(frozen=True)
class Detail:
    """Known details of an activity: its call, operator, shape and launch."""

    call: Any
    """Identifies the call: kernels with equal values belong to one call."""
    operator: str = ""
    row: Row | None = None
    launched_s: float = float("nan")
    group: str = ""


def profile_of(detailed: Sequence[tuple[Activity, Detail]], place: object) -> Profile:
    """Join activities of one call into calls, on a clock that starts with the first.

    Raises:
        TableError: no activity of a device.
    """
    if not detailed:
        raise TableError(
            f"{place}: no device has any activity; record at least one step with device events enabled"
        )
    origin_s = min(activity.start_s for activity, _ in detailed)
    # An operator may launch several kernels, not always one after the other: they are one call of
    # one shape.
    kernels: dict[Any, list[tuple[Activity, Detail]]] = defaultdict(list)
    for activity, detail in detailed:
        kernels[activity.device, detail.call].append((activity, detail))
    unread: Counter[str] = Counter()
    calls = [_call(kernels_of_call, origin_s, unread) for kernels_of_call in kernels.values()]
    return Profile(
        trace_of([activity for activity, _ in detailed], place),
        tuple(sorted(calls, key=lambda call: (call.start_s, call.device))),
        dict(unread.most_common()),
    )


def _call(kernels: list[tuple[Activity, Detail]], origin_s: float, unread: Counter[str]) -> Call:
    """Join the kernels of one call; facts that the profile lacks are counted in `unread`."""
    # The first kernel stands for the call: where it runs, in which step and pass, and when it
    # began.
    first, detail = min(kernels, key=lambda pair: pair[0].start_s)
    kind = first.kind
    op = None if detail.row is None else op_of(detail.row)
    family = _family(op, detail.operator, first)
    if kind != ActivityKind.COPY and op is None:
        missing = "which operator ran"
        if family:
            missing = "their shapes (or a collective's kind, size or ranks)"
        unread[missing] += 1
    return Call(
        name=detail.operator or first.name,
        family=family,
        op=op,
        kind=kind,
        device=first.device,
        step=first.step,
        phase=first.phase,
        start_s=first.start_s - origin_s,
        end_s=max(activity.end_s for activity, _ in kernels) - origin_s,
        time_s=sum(activity.end_s - activity.start_s for activity, _ in kernels),
        launched_s=min(detail.launched_s for _, detail in kernels) - origin_s,
        group=detail.group,
    )


def op_of(row: Row) -> Op | None:
    """The operation that a table row describes; None if a size is missing."""
    if "collective" in row:
        ranks = int(row["num_ranks"])
        # A profile does not tell nodes: all ranks count as within one until its user says
        # otherwise.
        per_node = int(row.get("ranks_per_node") or ranks)
        kind = row["collective"]
        dtype = row.get("dtype") or "fp32"
        return Collective(
            collective=kind,
            bytes=float(row["bytes"]),
            num_ranks=ranks,
            ranks_per_node=per_node,
            dtype=dtype,
        )
    kernel: type[KernelOp] = FAMILIES[row["op_family"]].op
    arguments: dict[str, Any] = {"dtype": "fp32"}
    for field in fields(kernel):
        if row.get(field.name) not in (None, ""):
            arguments[field.name] = row[field.name]
    if row.get("pass"):
        arguments["pass_"] = row["pass"]
    try:
        return kernel(**arguments)
    except TypeError:
        return None


def _family(op: Op | None, operator: str, activity: Activity) -> str:
    # From the surest evidence to the least: a shape, the phase that the user marked, then names.
    if op is not None:
        return family_with_bmm(op)
    if activity.kind == ActivityKind.COPY:
        return ""
    if activity.kind == ActivityKind.COMMUNICATION:
        return collective_of(operator) or collective_of(activity.name)
    if activity.phase == "optimizer":
        return "optimizer"
    return family_of(operator) or family_of(activity.name)


_COLLECTIVE_NAMES: Final = (
    ("all_reduce", r"all_?-?reduce"),
    ("all_gather", r"all_?-?gather"),
    ("reduce_scatter", r"reduce_?-?scatter"),
    ("all_to_all", r"all_?-?to_?-?all"),
    ("send_recv", r"send|recv|collective-permute"),
    ("broadcast", r"broadcast"),
)
_FAMILY_NAMES: Final = (
    # Names that mean one thing come before words that stand in many names: `embedding` before
    # `gather`, `conv` before `gemm`, as implicit GEMMs are convolutions.
    ("optimizer", r"adam|adagrad|\blamb(_|\b)|\bsgd\b|multi_tensor_apply|_foreach_"),
    ("embedding", r"embedding|index_?select|indexing_backward"),
    ("attention", r"attention|flash|fmha|mha_"),
    ("conv", r"conv|implicit_?gemm|winograd|cudnn_fft|im2col|miopen.*fwd|miopen.*bwd|\bigemm"),
    ("bmm", r"\bbmm|baddbmm|batched_gemm"),
    (
        "gemm",
        r"gemm|cublas|cutlass|xmma|addmm|\bmm\b|_mm\b|matmul|linear|^cijk_|\bdot\b|^dot|^fc-|hipblaslt|nvjet",
    ),
    (
        "memory",
        r"norm|gelu|relu|silu|sigmoid|softmax|tanh|dropout|elementwise|vectorized|reduce|loss|cat|copy|fill|"
        r"pool|fusion|add|mul|sub|div|sum|mean|exp|log|sqrt|where|gather|scatter|transpose|index|zero|broadcast|"
        r"convert|clamp|threshold|triton|stack|mask|arange|sort|cumsum|rsqrt|pow|wrapped_",
    ),
)
"""Op families by patterns in names of operators, of kernels of cuBLAS, CUTLASS, cuDNN, rocBLAS
(`Cijk`), MIOpen and Triton, and of XLA instructions; the first match counts."""


@lru_cache(maxsize=65536)
def family_of(name: str) -> str:
    """The op family that the name of an operator or kernel implies; empty if none.

    Torch's own operators that no pattern knows are element-wise.
    """
    # `aten::mm` is an operator of a library; C++ kernels have `::` too, behind templates that are
    # no identifiers.
    space, colons, operator = name.lower().partition("::")
    name_only = operator if colons and space.isidentifier() else name.lower()
    for family, pattern in _FAMILY_NAMES:
        if re.search(pattern, name_only):
            return family
    return "memory" if space == "aten" else ""


@lru_cache(maxsize=4096)
def collective_of(name: str) -> str:
    """The kind of collective that the name of a kernel or operator implies; empty if none."""
    lower = name.lower()
    return next((kind for kind, pattern in _COLLECTIVE_NAMES if re.search(pattern, lower)), "")
