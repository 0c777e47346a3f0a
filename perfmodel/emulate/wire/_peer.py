"""The process of the emulated ranks (`python -m perfmodel.emulate.wire._peer`), on any host.

One process without torch stands for all emulated ranks. Real ranks connect to it as if it were the
other ranks, and send their library's messages. It only answers them, message by message
(`_operations`): there is no model, no reduction and no message among emulated ranks.

It reads its orders, a JSON object, from the first line of standard input, and says `ready PORT` on
standard output when real ranks may come. When standard input ends, it writes its records as a JSON
object and ends too.
"""

import json
import os
import signal
import sys
import time
from typing import Any

from perfmodel.emulate.environment import EmulationError, Orders
from perfmodel.emulate.wire._compiled_peer import CompiledPeer, compiled_loop, plain
from perfmodel.emulate.wire._operations import Network
from perfmodel.emulate.wire._python_peer import Peer


def main() -> int:
    """Serve, and write the record."""
    # Byte by byte, so that nothing beyond the line is taken from what the selector watches.
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(sys.stdin.fileno(), 1) or b"\n"
    fields: dict[str, Any] = json.loads(line)
    network = Network(**fields.pop("network"))
    may_compile = bool(fields.pop("compiled"))
    peer = _peer(Orders.from_fields(fields), network, may_compile)
    failure = ""
    begin_s = time.perf_counter()
    cpu_s = time.process_time()
    # The ranks' script may be interrupted; this process ends after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"ready {peer.port}", flush=True)
    try:
        peer.serve()
    except EmulationError as error:
        failure = str(error)
    result = {
        "failure": failure,
        "compiled": peer.compiled,
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - begin_s,
        # The reader of the failure gets one line at the end, which must fit into a pipe.
        "operations": [] if failure else peer.log(),
    }
    print(json.dumps(result), flush=True)
    return 1 if failure else 0


def _peer(orders: Orders, network: Network, may_compile: bool) -> Peer:
    """The message loop in C if it can be built and the orders are plain, else the one in Python."""
    library = compiled_loop() if may_compile and plain(orders) else None
    return Peer(orders, network) if library is None else CompiledPeer(orders, network, library)


if __name__ == "__main__":
    sys.exit(main())
