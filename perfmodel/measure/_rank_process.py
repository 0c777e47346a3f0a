"""A rank's process on this machine, and the pipe to it."""

import socket
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

from perfmodel.measure._rank import Place, RankSession, serve


class RankProcess:
    """Started at once; `send` and `recv` carry the requests and answers of `serve`."""

    gone = "died; its last words are on standard error"

    def __init__(self, place: Place, session: type[RankSession]) -> None:
        # a fresh interpreter per rank: JAX's threads do not survive a fork
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, place, session), daemon=True)
        self.process.start()
        theirs.close()

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: readable when there is an answer, or no rank any more."""
        return self._pipe.fileno()

    def send(self, request: tuple[Any, ...]) -> None:
        """Send a request; `OSError` where the rank is gone."""
        self._pipe.send(request)

    def recv(self) -> tuple[str, Any]:
        """The next answer; `EOFError` or `OSError` where the rank is gone."""
        return self._pipe.recv()

    def stop(self) -> None:
        """Ask it to leave the group and end."""
        with suppress(OSError):
            self.send(("stop",))

    def end(self, grace_s: float) -> None:
        """Wait for its end, then bring it about."""
        self.process.join(grace_s)
        if self.process.is_alive():
            # a rank stuck in a collective does not heed a polite signal
            self.process.kill()
            self.process.join()
        self.process.close()
        self._pipe.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
