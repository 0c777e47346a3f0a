"""Interfaces of backends that measure kernels and collectives."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final, Protocol

from perfmodel import catalog
from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure.ranks import CollectiveSession, RankGroup, RankSession
from perfmodel.measure.tables import (
    SOURCE,
    Point,
    Row,
    collective_columns,
    op_columns,
    timing_columns,
)
from perfmodel.measure.timing import (
    Meter,
    NoMeter,
    Sample,
    SampleCalls,
    StoppingRule,
    machine_meter,
    pinned_to_one_core,
    run_for,
    time_calls,
)
from perfmodel.ops import Collective, KernelOp
from perfmodel.spec import BACKENDS

INTERCONNECT: Final = "loopback"
"""`interconnect` column if a plan names none: ranks on one host without special links."""


class Backend(Protocol):
    """Interface of a framework on one device."""

    @property
    def accelerator(self) -> str | None:
        """The accelerator's name as its driver gives it; `None` for a CPU."""
        ...

    @property
    def software(self) -> str:
        """Text of the tables' `software` column: framework, version and platform."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """Python packages whose versions belong on the card."""
        ...

    @property
    def method(self) -> Row:
        """Description of the timing method, for the card."""
        ...

    @property
    def meter(self) -> Meter:
        """The interference meter."""
        ...

    def check(self, op: KernelOp, *, cold: bool = False) -> None:
        """Raise `PerfModelError` unless the op can be measured on this device."""
        ...

    def variant(self, op: KernelOp) -> str:
        """`variant` column, if the framework computes the op differently from its family."""
        ...

    def sampler(self, op: KernelOp, *, cold: bool = False) -> SampleCalls:
        """Build the op with its inputs on the device; the sampler runs and times calls.

        With `cold`, the caches are flushed before every call, outside the time that counts.
        """
        ...

    def overhead_sampler(self) -> SampleCalls:
        """Sampler of an almost empty call, for the overhead in every time."""
        ...


def require(name: str) -> None:
    """Raise `PerfModelError` unless the backend measures in this process and is installed."""
    # nccl-tests runs as separate programs.
    if name not in BACKENDS[:2]:
        raise UnknownNameError("backend", name, BACKENDS)
    if find_spec(name) is None:
        raise PerfModelError(
            f"backend {name} needs {name}; install it: pip install 'perfmodel[{name}]'"
        )


@contextmanager
def open_backend(name: str) -> Iterator[Backend]:
    """The backend on this machine's device, ready to measure kernels.

    On a CPU this process keeps to one core with one thread meanwhile; frameworks size their thread
    pools when they first run something, so open this before.

    Raises:
        PerfModelError: for an unknown backend, or one that is not installed.
    """
    # Imported when asked for, as either package may be missing, and after the process keeps to one
    # core.
    require(name)
    with pinned_to_one_core() as unpin:
        if name == "torch":
            from perfmodel.measure.backends._torch_backend import torch_backend

            opened = torch_backend()
        else:
            from perfmodel.measure.backends._jax_backend import jax_backend

            opened = jax_backend()
        with opened as backend:
            # On an accelerator compilers and the launching thread may use every core.
            if backend.accelerator:
                unpin()
            yield backend


_SHORTEST_S = 1e-9
"""`min_sample_s` of cold samples, which cannot be bundled and end after one call."""


def kernel_row(
    backend: Backend, point: Point, device_name: str, rule: StoppingRule, load_s: float = 0.0
) -> Row:
    """Measure one op: its row of the table.

    Args:
        load_s: seconds for which a `loaded` row's op runs before its first sample.
    """
    # The rule is lengthened to what the meter resolves; quality is judged by the plan's own.
    op = point.kernel
    sampling_rule = replace(rule, min_sample_s=_SHORTEST_S) if point.cold else rule
    sampling_rule = sampling_rule.resolved_by(backend.meter)
    sample = backend.sampler(op, cold=point.cold)
    if point.loaded:
        run_for(sample, load_s, sampling_rule.min_sample_s)
    timing = time_calls(sample, sampling_rule)
    return {
        "source": SOURCE,
        "device": device_name,
        **op_columns(op),
        **timing_columns(timing, rule, backend.variant(op), state=point.state),
        "software": backend.software,
    }


def call_overhead_s(backend: Backend, rule: StoppingRule) -> float:
    """Time of an almost empty call, which is part of every measured time."""
    return time_calls(backend.overhead_sampler(), rule.resolved_by(backend.meter)).median_s


@dataclass(frozen=True)
class Transport:
    """Interface of the transport between ranks."""

    name: str
    """What the `algorithm` column of tables says."""
    session: type[RankSession]
    """Class of the session that each rank runs."""
    package: str
    """Python package that it comes with."""

    @property
    def software(self) -> str:
        """Package and version of the library, and the backend: the `software` column of tables."""
        return f"{self.package}{version(self.package).partition('+')[0]}-{self.name}"

    def accelerator(self) -> str | None:
        """Name of the devices that hold the data, as their driver gives it; `None` for CPUs."""
        if self.name != "nccl":
            return None
        from perfmodel.ops.programs import torch_module

        return torch_module().cuda.get_device_name(0)

    @property
    def method(self) -> Row:
        """Description of the timing method, for the card."""
        if self.name == "nccl":
            return {"collective_calls": "CUDA graphs, between CUDA events"}
        return {}

    def check_ranks(self, num_ranks: int) -> None:
        """Raise `CalibrationError` unless this machine has a device for each rank."""
        if self.name != "nccl":
            return
        from perfmodel.ops.programs import torch_module

        devices = torch_module().cuda.device_count()
        if num_ranks > devices:
            raise CalibrationError(
                f"NCCL needs one GPU per rank: the plan has {num_ranks} ranks, this machine {devices} GPUs; use "
                "fewer ranks, or start processes on several nodes (--launched)"
            )

    def meter(self) -> Meter:
        """The meter for interference, which affects gloo's threads but not NCCL's kernels."""
        return NoMeter() if self.name == "nccl" else machine_meter()


def transport_of(backend: str) -> Transport:
    """JAX's gloo; or torch's NCCL where there are CUDA GPUs, else torch's gloo.

    Raises:
        PerfModelError: where torch is not installed.
    """
    # JAX's ranks of one machine are CPU processes, whatever accelerators it has.
    require(backend)
    if backend == "jax":
        return Transport("gloo", CollectiveSession, "jax")
    from perfmodel.measure.ranks import GlooSession, NcclSession
    from perfmodel.ops.programs import torch_module

    session = NcclSession if torch_module().cuda.is_available() else GlooSession
    return Transport(session.transport, session, "torch")


def collective_row(
    group: RankGroup,
    op: Collective,
    device_name: str,
    rule: StoppingRule,
    meter: Meter,
    transport: Transport,
    interconnect: str,
) -> Row:
    """Measure one collective on a running group: its row of the table."""
    # All ranks run as many calls, so that one sampler stands for the group.
    group.load(op)
    timing = time_calls(lambda calls: group.sample(calls, meter), rule.resolved_by(meter))
    return {
        "source": SOURCE,
        "device": device_name,
        "interconnect": interconnect,
        "algorithm": transport.name,
        **collective_columns(op),
        **timing_columns(timing, rule, state=Point(op).state),
        "software": transport.software,
    }


def beside_row(
    group: RankGroup,
    point: Point,
    device_name: str,
    rule: StoppingRule,
    meter: Meter,
    software: str,
) -> Row:
    """Measure one kernel on all ranks of a group, alone or during the group's collective: its row
    of the table.

    Args:
        group: group whose loaded collective is the one that the point names, if it names one.
        software: software of the kernels (`Backend.software`).
    """
    timing = time_calls(KernelBeside(group, point, meter), rule.resolved_by(meter))
    return {
        "source": SOURCE,
        "device": device_name,
        **op_columns(point.kernel),
        **timing_columns(timing, rule, state=point.state),
        "software": software,
    }


MOST_COLLECTIVES: Final = 1 << 16
"""Most collectives that are run during one sample of a kernel."""


class KernelBeside:
    """Samples a kernel on all ranks of a group, while collectives outlast each sample."""

    def __init__(self, group: RankGroup, point: Point, meter: Meter) -> None:
        self._group, self._point, self._meter = group, point, meter
        self._collectives = 0 if point.beside is None else 1

    def __call__(self, calls: int) -> Sample:
        """Run and time calls.

        Raises:
            CalibrationError: the collectives end before the kernel does, however many are made.
        """
        while self._collectives <= MOST_COLLECTIVES:
            sample, outlasted = self._group.sample_kernel(
                self._point.kernel, calls, self._collectives, self._meter
            )
            if outlasted:
                return sample
            # A sample that ran partly alone counts for nothing.
            self._collectives *= 2
        raise CalibrationError(
            f"{self._point.kernel.label}: {MOST_COLLECTIVES:,} collectives end before the kernel does; give larger ones"
        )


def check_device(planned: str, accelerator: str | None) -> None:
    """Refuse to write rows of one device under the name of another.

    A device outside the catalog may have any name in the plan; a device of the catalog must be the
    one that is found.

    Args:
        planned: the plan's `device`.
        accelerator: the name that its driver gives it; `None` for a CPU.

    Raises:
        CalibrationError: if the plan names a catalog device and another one is found.
    """
    try:
        known = catalog.device(planned)
    except PerfModelError:
        return

    # The catalog has no flag for CPUs: they are the devices without a link to a host, but for TPUs.
    if accelerator is None:
        if known.host_bandwidth_bytes_per_s is None and known.vendor != "Google":
            return
        device_found = "a CPU"
    elif same_device(known.name, accelerator):
        return
    else:
        device_found = accelerator
    raise CalibrationError(
        f"the plan's device is {planned}, but this machine has {device_found}; run on the planned device, or name "
        "this one in the plan (any_device = true accepts any device)"
    )


def same_device(name: str, accelerator: str) -> bool:
    """Whether a catalog name and a driver's name can mean the same device."""
    # The chip is the first word with a number in it, such as A100.
    ours = _name_words(name)
    theirs = _name_words(accelerator)
    chips = [
        word for word in ours if re.fullmatch(r"[A-Z]*\d+[A-Z]*", word) and not _is_memory(word)
    ]
    chip = chips[0] if chips else ours[0]
    if chip not in theirs:
        return False

    # Forms of one chip differ in memory and slot; a name that states neither fits all of them.
    memory = list(filter(_is_memory, ours))
    their_memory = list(filter(_is_memory, theirs))
    if memory and their_memory and memory != their_memory:
        return False
    return ("PCIE" in ours) == ("PCIE" in theirs) and ("NVL" in ours) == ("NVL" in theirs)


def _name_words(name: str) -> list[str]:
    """Words of a device's name in upper case; `1080 Ti` is one word, `v5 lite` is v5e."""
    name = re.sub(r"(v\d) lite", r"\1e", name.strip(), flags=re.IGNORECASE)
    name = re.sub(r"(TPU[ -]v5)$", r"\1p", name, flags=re.IGNORECASE)
    name = re.sub(r"(\d) Ti\b", r"\1Ti", name, flags=re.IGNORECASE)
    return re.split(r"[\s_-]+", name.upper())


def _is_memory(word: str) -> bool:
    """Whether a word of a name is the size of the memory, such as 80GB."""
    return re.fullmatch(r"\d+GB", word) is not None
