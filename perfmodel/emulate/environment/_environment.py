"""The emulated environment's server (prices, agreement between ranks, watchdog) and client.

NeuronaBox's controller (section 2.2) keeps a bitmap per operation; here it is the calls that every
real rank reports.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from perfmodel.emulate.environment._orders import Call, EmulationError


@dataclass
class _Meeting:
    """One operation of one channel, with the real members that have reached it."""

    members: tuple[int, ...]
    sequence: int
    calls: dict[int, str] = field(default_factory=dict)
    issued_s: float = 0.0
    since_s: float = 0.0


class Environment:
    """Answers real ranks on a socket until closed."""

    def __init__(
        self, address: str, prices: Callable[[str, int, tuple[int, ...]], tuple[float, float]]
    ) -> None:
        """
        Args:
            address: path of the socket to make.
            prices: function of kind, bytes and members to seconds, and seconds of the core; called
                once per kind, size and group.
        """
        # One logically central controller, as NeuronaBox has for asynchronous operations (section
        # 2.2): only it sees what all real ranks do.
        self._prices, self._listener = prices, Listener(address, "AF_UNIX")
        self._changed = threading.Condition()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._last: dict[int, str] = {}
        self.clock_s = 0.0
        """Clock of the watchdog, which sets it; it stands still while the whole machine is
        suspended."""
        self.failure = ""
        """The first failure; empty if there is none."""
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Stop answering the ranks."""
        with suppress(OSError):
            self._listener.close()

    def fail(self, text: str) -> None:
        """End the emulation with a reason; the first reason is kept."""
        with self._changed:
            self.failure = self.failure or text
            self._changed.notify_all()

    def stuck(self, timeout_s: float, ended: set[int]) -> str:
        """Describe an operation in which a real rank is overdue or deadlocked; else empty."""
        with self._changed:
            # A meeting that lacks a rank which has ended can never complete; one that lacks a
            # living rank gets its patience.
            for (channel, _), meeting in self._meetings.items():
                absent = [rank for rank in meeting.members if rank not in meeting.calls]
                late = self.clock_s - meeting.since_s > timeout_s
                if not absent or not (late or ended & set(absent)):
                    continue
                rank, call = next(iter(meeting.calls.items()))
                reasons = []
                for missing in absent:
                    state = "has ended" if missing in ended else "has not come"
                    reasons.append(
                        f"rank {missing} {state}, and its last call was {self._last.get(missing, 'none')}"
                    )
                operation = f"{call}, {_place_text(channel, meeting.sequence)}"
                return f"deadlock: rank {rank} waits in {operation}; {'; '.join(reasons)}"
        return ""

    def _listen(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with suppress(OSError, EOFError):
            while True:
                # One thread per connection: a rank that waits in a meeting must not hold up the
                # others' requests.
                rank, name, *arguments = connection.recv()
                connection.send(self._answer(rank, name, arguments))

    def _answer(self, rank: int, name: str, arguments: list[Any]) -> tuple[str, Any]:
        try:
            # An error of one rank ends the emulation for all, with the first reason.
            return "ok", getattr(self, f"_on_{name}")(rank, *arguments)
        except Exception as error:
            self.fail(str(error))
            return "error", self.failure

    def _on_group(self, rank: int, group: str, members: tuple[int, ...]) -> None:
        """Record the members of a rank's group, which are the same on all ranks."""
        with self._changed:
            # Prices are of the group's place on the cluster, so all ranks must mean the same
            # members.
            if self._groups.setdefault(group, members) != members:
                known_members = self._groups[group]
                raise ValueError(
                    f"rank {rank}: group {group} has ranks {members}, but other ranks created it with {known_members}"
                )

    def _on_price(self, rank: int, group: str, kind: str, nbytes: int) -> tuple[float, float]:
        return self._prices(kind, nbytes, self._groups[group])

    def _on_failed(self, rank: int, text: str) -> None:
        self.fail(text)

    def _on_meet(
        self,
        rank: int,
        channel: str,
        members: tuple[int, ...],
        sequence: int,
        call: str,
        issued_s: float,
    ) -> float:
        """Time at which the last member reached the operation, which must be the same for all."""
        operation = _place_text(channel, sequence)
        with self._changed:
            meeting = self._meetings.setdefault(
                (channel, sequence), _Meeting(members, sequence, since_s=self.clock_s)
            )
            # A real library would hang or mix the data of calls that do not match; here both ranks
            # are named.
            for other_rank, theirs in meeting.calls.items():
                if theirs != call:
                    raise ValueError(
                        f"{operation}: rank {rank} calls {call}, but rank {other_rank} calls {theirs}"
                    )
            meeting.calls[rank] = call
            # A collective cannot begin before its last member has come.
            meeting.issued_s = max(meeting.issued_s, issued_s)
            self._last[rank] = f"{call}, {operation}"
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.failure or len(meeting.calls) == len(members))
            if self.failure:
                raise ValueError(self.failure)
            self._meetings.pop((channel, sequence), None)
            return meeting.issued_s


def _place_text(channel: str, sequence: int) -> str:
    return f"call #{sequence} of group {channel}"


class EnvironmentClient:
    """A rank's connection to the environment.

    Prices are remembered: a call of the same kind and size in the same group takes as long the next
    time.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self._prices: dict[tuple[str, str, int], tuple[float, float]] = {}
        self._thread_state = threading.local()

    def ask(self, *request: Any) -> Any:
        """One request and its answer, on a connection of the calling thread.

        Raises:
            EmulationError: what the environment objects to, or that it is gone.
        """
        try:
            # Lanes ask from threads of their own; a shared connection would interleave their
            # messages.
            connection = getattr(self._thread_state, "connection", None)
            if connection is None:
                connection = self._thread_state.connection = Client(self._address, "AF_UNIX")
            connection.send((self._rank, *request))
            verdict, value = connection.recv()
        except (OSError, EOFError) as error:
            raise EmulationError(
                f"rank {self._rank}: the connection to the emulated environment was lost ({error})"
            ) from None
        if verdict == "error":
            raise EmulationError(value)
        return value

    def price(self, group: str, call: Call) -> tuple[float, float]:
        """Seconds and CPU seconds of a call."""
        key = (group, call.kind, call.nbytes)
        if key not in self._prices:
            self._prices[key] = self.ask("price", *key)
        return self._prices[key]

    def meet(
        self, channel: str, members: tuple[int, ...], sequence: int, call: Call, issued_s: float
    ) -> float:
        """Time at which the last real member reached the same call."""
        return self.ask("meet", channel, members, sequence, str(call), issued_s)
