"""A rank's line to the emulated environment: what a call takes, and whether other real ranks make the same one."""

import threading
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

from perfmodel.execution.emulation._orders import Call, EmulationError


@dataclass(frozen=True, slots=True)
class Plan:
    """When a collective may start and what it then takes."""

    start_s: float
    """When the last real rank came, on the host's monotonic clock."""
    delay_s: float
    core_s: float
    """Processor time that the collective library takes on this rank."""
    over_s: float = 0.0
    """What emulating it takes by itself, to be taken off; a call that queues behind another does not show it."""
    over_core_s: float = 0.0


class Line:
    """Answers are kept: a call of the same kind and size in the same group takes as long the next time."""

    def __init__(self, address: str, rank: int) -> None:
        self._address, self._rank = address, rank
        self._prices: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._of_thread = threading.local()

    def ask(self, *request: Any) -> Any:
        """One request and its answer, on a connection of the calling thread.

        Raises:
            EmulationError: what the environment objects to, or that it is gone.
        """
        try:
            connection = getattr(self._of_thread, "connection", None)
            if connection is None:
                connection = self._of_thread.connection = Client(self._address, "AF_UNIX")
            connection.send((self._rank, *request))
            verdict, value = connection.recv()
        except (OSError, EOFError) as error:
            raise EmulationError(f"rank {self._rank}: the emulated environment is gone ({error})") from None
        if verdict == "error":
            raise EmulationError(value)
        return value

    def price(self, group: str, call: Call) -> tuple[float, float]:
        """Seconds of the call, and those of them for which it takes the core."""
        key = (group, call.kind, call.nbytes)
        if key not in self._prices:
            self._prices[key] = self.ask("price", *key)
        return self._prices[key]

    def meet(self, channel: str, members: tuple[int, ...], sequence: int, call: Call, issued_s: float) -> float:
        """When the last of the real members came to the same call."""
        return self.ask("meet", channel, members, sequence, str(call), issued_s)
