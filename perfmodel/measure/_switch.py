"""A switch in user space that delays every frame: the latency of links where the kernel cannot add it."""

import fcntl
import os
import selectors
import struct
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

TAP_MTU: Final = 32768
"""Large frames keep the switch's own work small."""
_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_GROUP_BIT: Final = 1
"""Of a frame's first byte: for several receivers."""


def serve_switch(pipe: Connection, taps: Sequence[str], latency_s: float) -> None:
    """Make the devices, answer "ready", and forward between them until the pipe closes."""
    handles = [_open_tap(name) for name in taps]
    pipe.send("ready")
    forward(pipe, handles, latency_s)


def forward(pipe: Connection, handles: Sequence[int], latency_s: float) -> None:
    """Hand every frame to the port of its receiver (to all others while that is unknown), `latency_s` after it came."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # a constant delay keeps frames in order
    port_of: dict[bytes, int] = {}
    with selectors.SelectSelector() as selector:  # epoll would round waits up to milliseconds
        selector.register(pipe, selectors.EVENT_READ)
        for handle in handles:
            os.set_blocking(handle, False)
            selector.register(handle, selectors.EVENT_READ)
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for key, _ in selector.select(timeout_s):
                if key.fileobj is pipe:
                    return
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
    try:
        frame = os.read(handle, TAP_MTU + 64)
    except OSError:  # the interface is down
        return
    due_s = time.monotonic() + latency_s
    receiver, sender = frame[:6], frame[6:12]
    port_of[sender] = handle
    known = None if frame[0] & _GROUP_BIT else port_of.get(receiver)
    for port in handles if known is None else (known,):
        if port != handle:
            waiting.append((due_s, port, frame))


def _send(handle: int, frame: bytes) -> None:
    try:
        os.write(handle, frame)
    except OSError:  # full or down: the frame is lost, as on a wire
        return


def _open_tap(name: str) -> int:
    handle = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return handle
