"""Collectives timed between local processes."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import CalibrationError
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


def transfer_time_s(
    send_s: Float[np.ndarray, "calls 2"], receive_s: Float[np.ndarray, "calls 2"]
) -> Float[np.ndarray, " calls"]:
    """Seconds of every point-to-point transfer: the shorter of its send and receive call.

    A transfer begins when the later of the two calls is launched and ends when both return, so that the call that
    was launched first contains its waiting for the other; the shorter holds the transfer alone (DistSim section
    4.2, after dPRO). Each side's clock is read for its own calls only: the clocks need not agree.

    Args:
        send_s: start and end of every send call on the sender's clock.
        receive_s: start and end of the receive call of the same transfer on the receiver's clock.

    Raises:
        CalibrationError: for sides with different numbers of calls, or a call that ends before it starts.
    """
    send_s, receive_s = np.asarray(send_s, float), np.asarray(receive_s, float)
    if send_s.shape != receive_s.shape or send_s.ndim != 2 or send_s.shape[1] != 2:
        raise CalibrationError(
            "send and receive calls must be two equal lists of (start, end); "
            f"got shapes {send_s.shape} and {receive_s.shape}"
        )
    of_sides = np.stack([send_s[:, 1] - send_s[:, 0], receive_s[:, 1] - receive_s[:, 0]])
    if not (of_sides >= 0).all():
        raise CalibrationError("a send or receive call ends before it starts; its start and end are of two clocks")
    return of_sides.min(axis=0)
