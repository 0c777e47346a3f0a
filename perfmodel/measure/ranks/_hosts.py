"""Hosts as network namespaces, joined by links of set bandwidth and latency (Linux, root).

Processes of one host reach other hosts only through its shaped link, as on a real network, and one
another through the loopback interface. So one machine has groups within and between nodes. Where
the kernel cannot add the latency of links, a switch in user space delays every frame.
"""

import ctypes
import fcntl
import os
import selectors
import shutil
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.processes import end_with_spawner
from perfmodel.units import positive

_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = Path("/var/run/netns")
_MTU: Final = 9000
"""Maximum size of frames: large, as in data centres, so that the cores remain free for ranks."""
_BURST_BYTES: Final = 16384
"""Bytes that a link sends at once after a pause; small, so that a message takes its size divided by
the bandwidth."""
_SEND_BUFFER_BYTES: Final = 131072
"""Bytes that a sender may have in flight before it waits for the link; fixed, so that earlier
traffic does not change it. A link of long latency gets twice its bandwidth-delay product."""
_QUEUE_S: Final = 2.0
"""Waiting time at which a link drops messages, longer than the senders' windows allow."""
_MAX_HOSTS: Final = 64
_numbers = count()
"""Counter of this process's groups of hosts, for unique names of interfaces."""


@dataclass(frozen=True)
class Host:
    """Host on which a rank runs."""

    address: str
    """Address by which the other hosts reach it."""
    namespace: str
    """Network namespace on this machine."""

    def enter(self) -> None:
        """Move this thread, and those it starts, onto the host; for a rank's fresh process.

        The host's name becomes its address, which is how collective libraries find the interface to
        listen on. Ranks that share a core run at real-time priority, so that one that has just got
        its message need not wait for the end of another's time slice, several milliseconds that no
        real host would take.

        Raises:
            CalibrationError: without the right to do so.
        """
        # A separate namespace for names, in which the host name can be set.
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(_NAMESPACES / self.namespace, os.O_RDONLY)
        try:
            if libc.setns(handle, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS):
                raise CalibrationError(
                    f"cannot enter namespace {self.namespace}: {os.strerror(ctypes.get_errno())}"
                )
        finally:
            os.close(handle)
        socket.sethostname(self.address)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@dataclass(frozen=True, kw_only=True)
class EmulatedNetwork:
    """The network between emulated hosts.

    Raises:
        PerfModelError: for an invalid bandwidth or latency.
    """

    bandwidth_bytes_per_s: float
    """Bandwidth of each host's link, one way."""
    latency_s: float = 0.0
    """Latency of a message from host to host, beyond this machine's own."""

    def __post_init__(self) -> None:
        positive("emulated network: bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        if not 0 <= self.latency_s < 1:
            raise PerfModelError(
                f"emulated network: latency_s must be between 0 and 1 s, got {self.latency_s!r}"
            )


class EmulatedHosts:
    """Context manager over hosts in separate namespaces, each with a link to a common switch.

    Bandwidth is shaped where a host sends (a token bucket); the latency of the link is added by a
    small switch in user space, which is left out where `latency_s` is 0.

    Raises:
        PerfModelError: for fewer than 2 or more than 64 hosts, or an invalid bandwidth or latency.
        CalibrationError: where the system cannot make them; the message says what is missing.
    """

    def __init__(self, count: int, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not 2 <= count <= _MAX_HOSTS:
            raise PerfModelError(f"emulated hosts: give 2 to {_MAX_HOSTS} hosts, got {count}")
        network = EmulatedNetwork(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
        self._bandwidth_bytes_per_s, self._latency_s = (
            network.bandwidth_bytes_per_s,
            network.latency_s,
        )
        self._prefix = f"pm{os.getpid() % 10**6}x{next(_numbers)}"
        self.hosts = tuple(Host(f"10.213.0.{i + 1}", f"{self._prefix}h{i}") for i in range(count))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        missing = unavailable()
        if missing:
            raise CalibrationError(f"hosts cannot be emulated here: {missing}")

        # Whatever was made is undone if a later step fails, and else on exit.
        with ExitStack() as stack:
            for host in self.hosts:
                _command("ip", "netns", "add", host.namespace)
                stack.callback(_quietly, "ip", "netns", "del", host.namespace)
            if self._latency_s:
                self._join_by_switch(stack)
            else:
                self._join_by_bridge(stack)
            for host in self.hosts:
                self._configure(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _join_by_bridge(self, stack: ExitStack) -> None:
        """Join hosts by a kernel bridge, with a pair of virtual interfaces to each host."""
        bridge = f"{self._prefix}b"
        _command("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_quietly, "ip", "link", "del", bridge)
        _command("ip", "link", "set", bridge, "up")
        for i, host in enumerate(self.hosts):
            port = f"{self._prefix}p{i}"
            _command(
                "ip",
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                "net0",
                "netns",
                host.namespace,
            )
            _command("ip", "link", "set", port, "mtu", str(_MTU), "master", bridge, "up")

    def _join_by_switch(self, stack: ExitStack) -> None:
        """Join hosts by a switch in a separate process, with a TAP interface on each host."""
        # Undone in reverse: close the pipe, which the switch notices, then make sure that its
        # process ends.
        taps = [f"{self._prefix}t{i}" for i in range(len(self.hosts))]
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve_switch, args=(theirs, taps, self._latency_s), daemon=True
        )
        process.start()
        theirs.close()
        stack.callback(process.join, 5.0)
        stack.callback(process.terminate)
        stack.callback(ours.close)
        if not ours.poll(30.0) or ours.recv() != "ready":
            raise CalibrationError("the switch between emulated hosts did not start")
        for tap, host in zip(taps, self.hosts, strict=True):
            _command("ip", "link", "set", tap, "netns", host.namespace, "name", "net0")

    def _configure(self, host: Host) -> None:
        """Give a host its address, and shape what it sends."""
        inside = ("ip", "-n", host.namespace)
        _command(*inside, "address", "add", f"{host.address}/24", "dev", "net0")
        _command(*inside, "link", "set", "lo", "up")
        _command(
            *inside, "link", "set", "net0", "mtu", str(TAP_MTU if self._latency_s else _MTU), "up"
        )

        # What data centres set: a connection keeps its window while the ranks compute.
        buffer_bytes = max(
            _SEND_BUFFER_BYTES, round(4 * self._bandwidth_bytes_per_s * self._latency_s)
        )
        keep_window = "net.ipv4.tcp_slow_start_after_idle=0"
        send_buffer = f"net.ipv4.tcp_wmem=4096 {buffer_bytes} {buffer_bytes}"
        _command("ip", "netns", "exec", host.namespace, "sysctl", "-qw", keep_window, send_buffer)

        # A token bucket: a burst must hold a frame, and the queue what arrives in the time after
        # which a link drops.
        rate_bits_per_s = round(8 * self._bandwidth_bytes_per_s)
        burst_bytes = max(_BURST_BYTES, TAP_MTU + 14) if self._latency_s else _BURST_BYTES
        limit_bytes = round(_QUEUE_S * self._bandwidth_bytes_per_s) + burst_bytes
        add_bucket = ("tc", "-n", host.namespace, "qdisc", "add", "dev", "net0", "root", "tbf")
        rate = (
            "rate",
            f"{rate_bits_per_s}bit",
            "burst",
            f"{burst_bytes}b",
            "limit",
            f"{limit_bytes}b",
        )
        _command(*add_bucket, *rate)


def unavailable() -> str:
    """Tools that this system lacks for emulating hosts; empty if it has all."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "it needs root"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(tools)} not found (package iproute2)" if tools else ""


def _command(*words: str) -> None:
    """Run a command; raise `CalibrationError` with its last words if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CalibrationError(
            f"{' '.join(words)}: {done.stderr.strip() or f'exit status {done.returncode}'}"
        )


def _quietly(*words: str) -> None:
    """Run a command that may fail, such as a removal of something already removed."""
    with suppress(CalibrationError):
        _command(*words)


TAP_MTU: Final = 32768
"""Maximum size of frames of TAP interfaces: large, to keep the switch's own work small."""

# Constants of linux/if_tun.h: the request that makes an interface, of frames (TAP), without a
# header of packet information.
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_GROUP_BIT: Final = 1
"""Bit of a frame's first byte that marks frames for several receivers."""


def serve_switch(pipe: Connection, taps: Sequence[str], latency_s: float) -> None:
    """Make the devices, answer "ready", and forward between them until the pipe closes."""
    end_with_spawner()
    handles = [_open_tap(name) for name in taps]
    pipe.send("ready")
    forward(pipe, handles, latency_s)


def forward(pipe: Connection, handles: Sequence[int], latency_s: float) -> None:
    """Forward every frame to the port of its receiver (to all others while that is unknown),
    `latency_s` after it arrived."""
    # Frames on their way, in order of arrival: a constant delay keeps them in order.
    waiting: deque[tuple[float, int, bytes]] = deque()
    port_of: dict[bytes, int] = {}

    # `select`, as epoll would round waits up to milliseconds.
    with selectors.SelectSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        for handle in handles:
            os.set_blocking(handle, False)
            selector.register(handle, selectors.EVENT_READ)
        while True:
            # Sleep until a frame comes or the first one is due.
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready = [key for key, _ in selector.select(timeout_s)]
            if any(key.fileobj is pipe for key in ready):
                return
            for key in ready:
                _receive(key.fd, handles, latency_s, waiting, port_of)
            now_s = time.monotonic()
            while waiting and waiting[0][0] <= now_s:
                _, handle, frame = waiting.popleft()
                _send(handle, frame)


def _receive(
    handle: int,
    handles: Sequence[int],
    latency_s: float,
    waiting: deque[tuple[float, int, bytes]],
    port_of: dict[bytes, int],
) -> None:
    """Receive a frame from a port, and record when and where it is due."""
    # An interface that is down has no frame to read.
    try:
        frame = os.read(handle, TAP_MTU + 64)
    except OSError:
        return

    # Ethernet: receiver, then sender. A switch learns where a sender is from its frames.
    due_s = time.monotonic() + latency_s
    receiver = frame[:6]
    sender = frame[6:12]
    port_of[sender] = handle
    known = None if frame[0] & _GROUP_BIT else port_of.get(receiver)
    for port in handles if known is None else (known,):
        if port != handle:
            waiting.append((due_s, port, frame))


def _send(handle: int, frame: bytes) -> None:
    """Send a frame to a port; it is lost if the port is full or down, as on a wire."""
    try:
        os.write(handle, frame)
    except OSError:
        return


def _open_tap(name: str) -> int:
    """Make a TAP interface; it exists as long as the handle is open."""
    handle = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle
