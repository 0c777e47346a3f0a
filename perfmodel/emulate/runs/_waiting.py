"""Collectives that a real rank waits in, and whether two real ranks wait in different ones.

Ranks that call different collectives wait for each other's messages for as long as their library
has patience. Where all members of a group are real, no process of ours sees their messages. But
torch's flight recorder keeps the last calls of every process: each rank reads it twice a second and
reports the call that it waits in, and the process that started the ranks compares the reports.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

RECORDED_CALLS: Final = 64
"""Calls that the flight recorder keeps; torch's own default of 2,000 would take milliseconds to
read."""
RECORDER_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
_LOOK_S: Final = 0.5


class _Call(NamedTuple):
    """A collective of a group, as its rank issued it."""

    group: str
    number: int
    kind: str


def waiting_path(folder: Path, rank: int) -> Path:
    """Path of the file that a rank writes while it waits in a collective."""
    return folder / f"rank{rank}.waiting"


def watch_waiting(folder: Path, rank: int, torch: Any) -> None:
    """Start a thread that writes a file whenever this rank waits in a collective; does nothing if
    torch cannot report it.

    Args:
        folder: folder of the run.
        rank: this one.
        torch: module with the flight recorder of calls; versions that do not record gloo's calls
            tell nothing.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return

    def look() -> None:
        oldest: tuple[Any, ...] = ()
        while True:
            time.sleep(_LOOK_S)
            outstanding = _entries(dump, only_active=True)
            # A call that was there at the last look already has waited for half a second.
            before = oldest
            oldest = tuple(entry["record_id"] for entry in outstanding[:1])
            if oldest and oldest == before:
                _write(waiting_path(folder, rank), outstanding, _entries(dump, only_active=False))

    threading.Thread(target=look, daemon=True).start()


def _entries(dump: Callable[..., bytes], *, only_active: bool) -> list[dict[str, Any]]:
    """Collectives in the flight recorder, oldest first, without the script's own messages."""
    recorded = json.loads(dump(includeCollectives=True, onlyActive=only_active)).get("entries", ())
    entries = []
    for entry in sorted(recorded, key=lambda entry: entry["record_id"]):
        # A call that has ended is "retired"; a version that kept it among the active ones would
        # seem to wait.
        if not entry["is_p2p"] and not (only_active and entry["retired"]):
            entries.append(entry)
    return entries


def _write(
    path: Path, outstanding: Sequence[dict[str, Any]], recorded: Sequence[dict[str, Any]]
) -> None:
    """Write the call in which the rank waits, and its last calls, atomically."""
    data = {"waiting": [*map(_call_of, outstanding)], "calls": [*map(_call_of, recorded)]}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(data))
    partial.replace(path)


def _call_of(entry: dict[str, Any]) -> _Call:
    kind = str(entry["profiling_name"]).rpartition(":")[2]
    return _Call(str(entry["process_group"][0]), int(entry["collective_seq_id"]), kind)


def disagreement(folder: Path, ranks: Sequence[int]) -> str:
    """Describe the first call that two waiting ranks made differently; empty if there is none.

    Args:
        folder: folder of the run.
        ranks: the real ones.
    """
    waiting: dict[int, list[_Call]] = {}
    calls: dict[int, dict[tuple[str, int], str]] = {}
    for rank in ranks:
        path = waiting_path(folder, rank)
        if path.exists():
            calls_of_rank = json.loads(path.read_text())
            waiting[rank] = [_Call(*call) for call in calls_of_rank["waiting"]]
            calls[rank] = {(group, number): kind for group, number, kind in calls_of_rank["calls"]}

    # Every rank is compared, not only those that wait: another may be past this call, as a
    # broadcast's source waits for nobody.
    waiting_calls = []
    for rank, outstanding in waiting.items():
        waiting_calls += zip(repeat(rank), outstanding)
    for (rank, call), other_rank in product(waiting_calls, calls):
        kind = calls[other_rank].get((call.group, call.number), call.kind)
        if kind != call.kind:
            return (
                f"call #{call.number} of group {call.group} is {call.kind} on rank {rank}, "
                f"but {kind} on rank {other_rank}"
            )
    return ""
