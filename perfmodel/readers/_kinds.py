"""Names of kernels and instructions: which of them compute, communicate or copy."""

import re
from typing import Final

from perfmodel.readers._measured_trace import ActivityKind

_PREFIXES: Final = ("nccl", "rccl", "hccl", "gloo:", "c10d::")
_HLO: Final = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
    r"(-start|-done)?(\.\d+)?"
)
_COPIES: Final = ("Memcpy", "Memset", "memcpy", "memset", "copy-start", "copy-done")


def is_communication(name: str) -> bool:
    """Whether a kernel or operator moves data between devices."""
    return name.lower().startswith(_PREFIXES) or "nccl" in name.lower() or bool(_HLO.fullmatch(name))


def kind_of(*names: str) -> ActivityKind:
    """Of an activity with these names."""
    if any(map(is_communication, names)):
        return ActivityKind.COMMUNICATION
    return ActivityKind.COPY if names[0].startswith(_COPIES) else ActivityKind.COMPUTE
