"""What the training framework adds to the sum of its kernels: named, physical constants."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Host and allocator costs of a training framework (defaults: eager PyTorch, Megatron-LM like)."""

    host_launch_s: float = 6e-6
    """Host time to issue one kernel; a phase of many short kernels runs no faster than its launches."""
    kernel_gap_s: float = 1.0e-6
    """Device idle time between two dependent kernels of one stream."""
    context_bytes: float = 1.0e9
    """CUDA context, library handles and communicator buffers that no tensor accounts for."""
    memory_margin: float = 0.04
    """Share of device memory that fragmentation makes unusable; a layout fits below the rest."""
    relative_error: float = 0.06
    """90 % half-width of what no kernel table knows: clocks, stragglers, unmodelled work."""
