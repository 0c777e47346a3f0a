"""Accelerators and their nominal figures."""

from dataclasses import dataclass, fields

from perfmodel.errors import PerfModelError
from perfmodel.units import dtype_bytes, positive


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Dense peak rates in FLOP/s per element type; `None` where the device has no such unit."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    """Matrix rate for fp32 storage (TF32 on NVIDIA, on AMD matrix fp32, from CDNA 3 on xf32)."""
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                positive(f"peak rate {field.name}", value)

    def flops_per_s(self, dtype: str) -> float:
        """Peak FLOP/s of `dtype`, or of the nearest wider type that the device supports."""
        for name in _FALLBACK.get(dtype, (dtype, "fp32")):
            value = getattr(self, name, None)
            if value is not None:
                return value
        raise PerfModelError(f"no peak rate is known for dtype {dtype!r}; add it to the device entry")


_FALLBACK = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64", "fp32"),
}
"""Types whose peak stands for that of a type, the first that a device has: narrow products run in wider units."""


_WHOLE_FP32 = ("CDNA1", "CDNA2")
"""Architectures whose matrix units multiply fp32 without shortening it."""
USUAL_DTYPES = ("bf16", "fp16", "fp32")
"""Usual element types of training; the default is the first that a device has."""
BACKENDS = ("jax", "torch", "nccl-tests")
"""Backends that measure kernels and collectives; `nccl-tests` measures collectives only, with its own programs."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or CPU socket) with its nominal vendor figures."""

    name: str
    vendor: str
    architecture: str
    die: str = ""
    """The die: devices with the same die have the same multiprocessors. Empty: not shared with other devices."""
    memory_bytes: float
    """Capacity of the device's own memory."""
    memory_bandwidth_bytes_per_s: float
    """Nominal bandwidth of reads and writes together."""
    peak: PeakRates
    compute_units: int
    """Multiprocessors (NVIDIA SM, AMD CU, TPU core, CPU core)."""
    clock_hz: float
    """Boost clock."""
    exponentials_per_clock: int = 16
    """Exponentials per clock and multiprocessor."""
    l2_bytes: float
    link_bandwidth_bytes_per_s: float
    """One-way bandwidth of the device's own scale-up link (NVLink, PCIe, ICI), all lanes together."""
    host_bandwidth_bytes_per_s: float | None = None
    """One-way bandwidth between device and host memory (PCIe or a coherent link)."""
    power_w: float | None = None
    """Nominal (thermal design) power."""
    idle_power_w: float | None = None
    """Idle power at full clocks."""
    reached_share: float | None = None
    """Largest share of peak that matrix products reach, for devices without measured kernels."""
    usd_per_hour: float | None = None
    """List price per device and hour, in US dollars."""
    price_source: str = ""
    """The provider of the list price."""
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        figures = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "compute_units": self.compute_units,
            "clock_hz": self.clock_hz,
            "exponentials_per_clock": self.exponentials_per_clock,
            "l2_bytes": self.l2_bytes,
            "link_bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s,
        }
        for name, value in figures.items():
            positive(f"device {self.name}: {name}", value)

        # Figures that not every vendor tells.
        for name in (
            "host_bandwidth_bytes_per_s",
            "power_w",
            "idle_power_w",
            "usd_per_hour",
        ):
            value = getattr(self, name)
            if value is not None:
                positive(f"device {self.name}: {name}", value)
        if not self.dtypes:
            raise PerfModelError(f"device {self.name}: peak: give the rate of at least one dtype")
        if self.reached_share is not None and not 0 < self.reached_share <= 1:
            raise PerfModelError(f"device {self.name}: reached_share must be above 0 and at most 1")

    def require(self, dtype: str) -> None:
        """Raise `PerfModelError` if the device does not support `dtype` (`UnknownNameError` if no device does)."""
        dtype_bytes(dtype)
        if dtype not in self.dtypes:
            raise PerfModelError(f"device {self.name} has no {dtype}; choose a dtype among {', '.join(self.dtypes)}")

    def flops_per_s(self, dtype: str) -> float:
        """Peak of matrix products of `dtype` in FLOP/s (`PeakRates.flops_per_s`)."""
        # Up to CDNA 2 AMD's matrix units take fp32 as it is, twice as fast as its vector units (`PeakRates.tf32`);
        # from CDNA 3 on that is a shorter type.
        multiplies_fp32 = self.vendor == "AMD" and self.architecture in _WHOLE_FP32
        type_of_units = "tf32" if dtype == "fp32" and multiplies_fp32 else dtype
        return self.peak.flops_per_s(type_of_units)

    @property
    def scales_blocks(self) -> bool:
        """Whether the matrix units support block scaling of narrow types."""
        # Such units came with those of 4 bits (NVIDIA Blackwell, AMD CDNA4).
        return self.peak.fp4 is not None

    @property
    def usual_dtype(self) -> str:
        """The default element type: the first usual one that the device supports, else its first."""
        return next((name for name in USUAL_DTYPES if name in self.dtypes), USUAL_DTYPES[0])

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that have a peak rate."""
        return tuple(field.name for field in fields(self.peak) if getattr(self.peak, field.name) is not None)
