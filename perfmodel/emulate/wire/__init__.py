"""Gloo's messages between real ranks and a process that answers for emulated ranks.

`_operations` says what a collective sends and when, `_gloo_messages` how that is written. `_peer`
is the program that answers, by the loop of `_python_peer` or, where a C compiler is, by that of
`_compiled_peer`; `_wire` starts it.
"""

from typing import TYPE_CHECKING

from perfmodel._lazy import lazy_names

if TYPE_CHECKING:
    from perfmodel.emulate.wire._compiled_peer import compiled_loop, plain
    from perfmodel.emulate.wire._gloo_messages import (
        DATA,
        HEADER,
        KINDS,
        RECV_READY,
        SEND_READY,
        Connection,
        Header,
        Incoming,
        connects_to,
    )
    from perfmodel.emulate.wire._operations import (
        KEPT_BYTES,
        NEVER_S,
        RETURNS_OWN,
        Calls,
        Links,
        Message,
        Network,
        Operation,
    )
    from perfmodel.emulate.wire._python_peer import ring_source
    from perfmodel.emulate.wire._wire import (
        OPERATION_COLUMNS,
        PEER,
        TIMEOUT,
        PeerPlace,
        PeerProcess,
        check_first_ranks,
        clock_ahead_s,
        join,
        on_the_wire,
        peers,
        wait_for_real_ranks,
    )

__getattr__, __dir__ = lazy_names(__name__)
