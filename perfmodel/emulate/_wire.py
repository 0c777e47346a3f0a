"""The other ranks of a world as a process on the wire: started and ended here, joined by the real ranks' own gloo."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from perfmodel.emulate._gloo_messages import rank_info
from perfmodel.emulate._operations import Network
from perfmodel.emulate._orders import EmulationError, Orders

PEER: Final = "peer.json"
"""File in which the process of the emulated ranks leaves what it noted."""
OPERATION_COLUMNS: Final = (
    *("rank", "group", "ranks", "sequence", "kind", "in_bytes", "out_bytes", "messages"),
    *("first_s", "begin_s", "last_s"),
)
TIMEOUT: Final = timedelta(minutes=30)
"""Timeout of groups that a script gives none, as torch has it."""
_END_S: Final = 20.0


def on_the_wire(c10d: Any, orders: Orders, members: Callable[[], tuple[int, ...]]) -> type:
    """torch's gloo process group, which finds the emulated ranks' addresses where those of real ones would be.

    All else is the library's own: it connects to them and sends them its messages. Tensors on a GPU it stages through
    the host itself; a script that asks for NCCL, whose messages nobody but NCCL answers, gets gloo too.

    Args:
        c10d: `torch.distributed.distributed_c10d`.
        orders: of this rank.
        members: of the group that is being made.
    """
    library: Any = c10d.ProcessGroupGloo

    class OnTheWire(library):
        def __init__(self, store: Any, place: int, size: int, timeout: timedelta | None = None) -> None:
            ranks = members()
            port, base = _join(orders, ranks)
            store = c10d.PrefixStore("wire", store)
            for peer, rank in enumerate(ranks):
                if rank not in orders.real_ranks:
                    # the key that gloo gives a rank of its first device
                    store.set(f"0/{peer}", rank_info(port, range(base + peer * size, base + (peer + 1) * size)))
            options = library._Options()
            options._devices = [library.create_device(hostname="127.0.0.1")]
            options._timeout = timeout or TIMEOUT
            super().__init__(store, place, size, options)

    return OnTheWire


def check_first_ranks(dist: Any, orders: Orders) -> None:
    """Refuse DDP among ranks of which the first is emulated: it takes parameters and the order of buckets from there.

    Args:
        dist: `torch.distributed`.
        orders: of this rank.
    """
    check = dist._verify_params_across_processes

    def checked(group: Any, *rest: Any) -> None:
        first = dist.get_process_group_ranks(group)[0]
        if first not in orders.real_ranks:
            raise EmulationError(
                f"rank {orders.rank}: DistributedDataParallel goes by rank {first}, the first of its group, which is "
                f"on the wire only and has no model; make it real: --real-ranks {first}"
            )
        check(group, *rest)

    dist._verify_params_across_processes = checked


def _join(orders: Orders, members: tuple[int, ...]) -> tuple[int, int]:
    """Port of the emulated ranks, and the first of the numbers by which ranks of the group call them."""
    name = ",".join(map(str, members))
    try:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(orders.wire)
            with connected.makefile("rw") as line:
                line.write(json.dumps([orders.rank, name, members]) + "\n")
                line.flush()
                port, base = json.loads(line.readline())
    except (OSError, ValueError) as error:
        raise EmulationError(f"rank {orders.rank}: the emulated ranks are gone ({error})") from None
    return port, base


@contextmanager
def peers(orders: Orders, network: Network) -> Iterator["subprocess.Popen[str]"]:
    """The process that stands for all emulated ranks; when it ends it leaves `PEER` in the orders' folder."""
    fields: Mapping[str, Any] = {**json.loads(orders.to_json()), "network": asdict(network)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("_peer.py")), json.dumps(fields)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise EmulationError("emulation: the process of the emulated ranks did not start")
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()


def end(process: "subprocess.Popen[str]") -> None:
    """Let it leave what it noted."""
    if process.stdin is not None:
        process.stdin.close()
    process.wait(_END_S)


def failure_of(folder: Path) -> str:
    """Why it ended."""
    path = folder / PEER
    return (json.loads(path.read_text())["failure"] if path.exists() else "") or "their process ended"
