"""Collectives timed between local processes."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from perfmodel.measure._backend import require
from perfmodel.measure._group import RankGroup
from perfmodel.measure._harness import StoppingRule, time_calls
from perfmodel.measure._meter import Meter, NoMeter, machine_meter
from perfmodel.measure._rank import CollectiveSession, RankSession
from perfmodel.measure._rows import SOURCE, Row, collective_columns, timing_columns
from perfmodel.ops import Collective

INTERCONNECT: Final = "loopback"
"""`interconnect` column where a plan does not name one: ranks on one host without links of their own."""


@dataclass(frozen=True)
class Transport:
    """What moves the data between ranks."""

    name: str
    """`algorithm` column."""
    session: type[RankSession]
    """What each rank runs."""
    package: str
    """Python package that it comes with."""

    @property
    def software(self) -> str:
        """`software` column."""
        return f"{self.package}{version(self.package).partition('+')[0]}-{self.name}"

    def accelerator(self) -> str | None:
        """Name of the devices that hold the data, as their driver gives it; `None` for CPUs."""
        if self.name != "nccl":
            return None
        from perfmodel.ops import torch_module

        return torch_module().cuda.get_device_name(0)

    def meter(self) -> Meter:
        """Others disturb gloo's threads, not NCCL's kernels."""
        return NoMeter() if self.name == "nccl" else machine_meter()


JAX_GLOO: Final = Transport("gloo", CollectiveSession, "jax")


def transport_of(backend: str) -> Transport:
    """JAX's gloo; or torch's NCCL where there are CUDA GPUs, else torch's gloo.

    Raises:
        PerfModelError: where torch is not installed.
    """
    require(backend)
    if backend == "jax":
        return JAX_GLOO
    from perfmodel.measure._torch_rank import GlooSession, NcclSession
    from perfmodel.ops import torch_module

    session = NcclSession if torch_module().cuda.is_available() else GlooSession
    return Transport(session.transport, session, "torch")


def collective_row(
    group: RankGroup,
    op: Collective,
    device_name: str,
    rule: StoppingRule,
    meter: Meter,
    transport: Transport = JAX_GLOO,
    interconnect: str = INTERCONNECT,
) -> Row:
    """Measure one collective on a running group: its row of the table."""
    group.load(op)
    timing = time_calls(lambda calls: group.sample(calls, meter), rule.resolved_by(meter))
    return {
        "source": SOURCE,
        "device": device_name,
        "interconnect": interconnect,
        "algorithm": transport.name,
        **collective_columns(op),
        **timing_columns(timing, rule),
        "software": transport.software,
    }
