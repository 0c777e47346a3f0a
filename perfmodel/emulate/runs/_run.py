"""Records of the real ranks, as tables and as a timeline."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.emulate.environment import EmulationError
from perfmodel.emulate.wire import OPERATION_COLUMNS, PEER
from perfmodel.ingest.profiles import merged_intervals

if TYPE_CHECKING:
    import pandas as pd

_WARM_UP: Final = 3
"""Iterations left out of medians, in which memory is allocated and caches fill."""


@dataclass(frozen=True, eq=False)
class RankRun:
    """One real rank; times on the host's monotonic clock."""

    rank: int
    world_size: int
    collectives: "pd.DataFrame"
    """One row per call, columns of `_record.COLLECTIVE_COLUMNS`."""
    marks: "pd.DataFrame"
    """Moments of the script's own thread: name, wall_s, thread_s (its processor time), process_s
    (all threads')."""
    peak_bytes: int
    """Largest resident memory."""
    start_bytes: int
    """Resident memory when the script joined its world."""
    code_bytes: int = 0
    """Pages of libraries' code that were loaded since then; a prediction of memory does not count
    them."""
    overhead_s: float = 0.0
    """Overhead of emulating a call, which was subtracted; far above 1 ms on a busy machine."""
    parameters: tuple[tuple[int, ...], ...] = ()
    """Shapes of the tensors that the first optimizer updates: the rank's part of the model."""

    @property
    def training_bytes(self) -> int:
        """Largest memory for the training itself."""
        return self.peak_bytes - self.start_bytes - self.code_bytes

    @property
    def ends(self) -> Any:
        """Rows of the marks at which its iterations ended."""
        return self.marks[self.marks.name == "iteration_end"]

    def iterations(self) -> "pd.DataFrame":
        """One row per iteration after the first: time_s, its parts, and the activity of the core
        and the network.

        Columns: rank, iteration, start_s, time_s, forward_s, backward_s, optimizer_s,
        communication_s (some collective is under way), exposed_s (of it, the script's thread does
        not run), overlap (1 - exposed share), utilisation (processor time of the process over
        time_s).
        """
        import pandas as pd

        ends = self.ends
        rows = []
        for number in range(1, len(ends)):
            start = ends.iloc[number - 1]
            end = ends.iloc[number]
            inside: Any = self.marks[
                (self.marks.wall_s > start.wall_s) & (self.marks.wall_s <= end.wall_s)
            ]
            span_s = float(end.wall_s - start.wall_s)
            # Forward is the rest: scripts mark no forward pass.
            backward_s = _seconds_between(inside, "backward", "backward_end")
            optimizer_s = _seconds_between(inside, "optimizer", "iteration_end")
            # The thread spent the rest of the iteration, beyond its processor time, waiting.
            # Communication explains at most its own length of that.
            own_s = float(end.thread_s - start.thread_s)
            under_way_s = _under_way_s(self.collectives, float(start.wall_s), float(end.wall_s))
            exposed_s = float(np.clip(span_s - own_s, 0.0, under_way_s))
            rows.append(
                {
                    "rank": self.rank,
                    "iteration": number,
                    "start_s": float(start.wall_s),
                    "time_s": span_s,
                    "forward_s": span_s - backward_s - optimizer_s,
                    "backward_s": backward_s,
                    "optimizer_s": optimizer_s,
                    "communication_s": under_way_s,
                    "exposed_s": exposed_s,
                    "overlap": 1 - exposed_s / under_way_s if under_way_s else 1.0,
                    "utilisation": float(end.process_s - start.process_s) / span_s,
                }
            )
        return pd.DataFrame(rows)


@dataclass(frozen=True)
class PeerRun:
    """Work on the wire of the process that stood for the other ranks."""

    cpu_s: float
    """Processor time of the peer, which is less than that of the ranks that it emulates."""
    wall_s: float
    messages: int
    nbytes: int
    """Data that it received and sent."""
    compiled: bool = False
    """Whether its messages were answered in C."""


@dataclass(frozen=True, eq=False)
class EmulatedRun:
    """All real ranks of one run."""

    ranks: tuple[RankRun, ...]
    peer: PeerRun | None = None
    """Record of the peer process; None if no rank was emulated on the wire."""

    def iterations(self) -> "pd.DataFrame":
        """Iterations of all ranks, see `RankRun.iterations`."""
        import pandas as pd

        return pd.concat([rank.iterations() for rank in self.ranks], ignore_index=True)

    def collectives(self) -> "pd.DataFrame":
        """Calls of all ranks, with the rank as first column."""
        import pandas as pd

        return pd.concat([r.collectives.assign(rank=r.rank) for r in self.ranks], ignore_index=True)

    def iteration_s(self) -> Float[np.ndarray, " iterations"]:
        """Time of each iteration after the first `_WARM_UP`, on its slowest rank."""
        table = _steady_iterations(self.iterations())
        if not len(table):
            raise EmulationError(
                "the script made fewer than two optimizer steps, so no iteration can be timed; run more steps"
            )
        return _slowest_s(table)

    def to_dict(self) -> dict[str, Any]:
        """Figures of the whole run, for JSON."""
        peer = {} if self.peer is None else {"wire": asdict(self.peer)}
        summary: dict[str, Any] = peer | {
            "world_size": self.ranks[0].world_size,
            "real_ranks": [rank.rank for rank in self.ranks],
            "overhead_s": max(rank.overhead_s for rank in self.ranks),
            "collectives": sum(len(rank.collectives) for rank in self.ranks),
            "peak_memory_bytes": max(rank.peak_bytes for rank in self.ranks),
            "training_memory_bytes": max(rank.training_bytes for rank in self.ranks),
        }
        steady = _steady_iterations(self.iterations())
        if not len(steady):
            return summary | {"iterations": 0}
        spans_s = _slowest_s(steady)
        parts = (
            "forward_s",
            "backward_s",
            "optimizer_s",
            "communication_s",
            "exposed_s",
            "overlap",
            "utilisation",
        )
        return summary | {
            "iterations": len(spans_s),
            "iteration_s": float(np.median(spans_s)),
            "iteration_p10_s": float(np.quantile(spans_s, 0.1)),
            "iteration_p90_s": float(np.quantile(spans_s, 0.9)),
            **{part: float(steady[part].median()) for part in parts},
        }


def _steady_iterations(table: "pd.DataFrame") -> Any:
    """Iterations without the first ones, if there are enough others."""
    if len(table) and table.iteration.max() > 2 * _WARM_UP:
        return table[table.iteration > _WARM_UP]
    return table


def _slowest_s(table: Any) -> Float[np.ndarray, " iterations"]:
    """Time of each iteration on its slowest rank."""
    return table.groupby("iteration").time_s.max().to_numpy()


def read_run(folder: Path) -> EmulatedRun:
    """Read the files that the ranks left in a folder.

    Raises:
        EmulationError: no rank left a file, because the script ended without joining its world.
    """
    import pandas as pd

    ranks = []
    for path in folder.glob("rank*.json"):
        # Ranks write their record when they end, so what is there is complete.
        data: dict[str, Any] = json.loads(path.read_text())
        data |= {name: pd.DataFrame(data[name]) for name in ("collectives", "marks")}
        data["parameters"] = tuple(map(tuple, data["parameters"]))
        ranks.append(RankRun(**data))
    if not ranks:
        raise EmulationError(
            "the script ended without initialising torch.distributed, so nothing was emulated"
        )
    ranks.sort(key=lambda rank: rank.rank)

    # With real messages, the process that answered them left a record of what went over the wire.
    if not (folder / PEER).exists():
        return EmulatedRun(tuple(ranks))
    peer: dict[str, Any] = json.loads((folder / PEER).read_text())
    operations = pd.DataFrame(peer["operations"], columns=list(OPERATION_COLUMNS))
    message_bytes = operations[["in_bytes", "out_bytes"]]
    n_messages = int(operations.messages.sum())
    nbytes = int(message_bytes.to_numpy().sum())
    peer_run = PeerRun(peer["cpu_s"], peer["wall_s"], n_messages, nbytes, peer["compiled"])
    return EmulatedRun(tuple(_on_the_wire(rank, operations) for rank in ranks), peer_run)


def _on_the_wire(rank: RankRun, operations: "pd.DataFrame") -> RankRun:
    """The rank's run with the times of its collectives from the emulated ranks' log.

    `bytes` counts the busier direction; `in_bytes` and `out_bytes` count what the emulated ranks
    received and sent.
    """
    import pandas as pd

    calls: Any = operations[operations["rank"] == rank.rank]
    calls = calls.sort_values("first_s")
    # On the wire the library makes its calls by itself; only the peer process saw them. An
    # operation belongs to the iteration in which it began.
    ends_s = rank.ends.wall_s.to_numpy()
    columns = {
        "group": calls.group,
        "lane": "",
        "ranks": calls.ranks,
        "sequence": calls.sequence,
        "kind": calls.kind,
        "bytes": calls[["in_bytes", "out_bytes"]].max(axis=1),
        "iteration": np.searchsorted(ends_s, calls.first_s),
        "issued_s": calls.first_s,
        "thread_s": 0.0,
        "start_s": calls.first_s,
        "end_s": calls.last_s,
        "delay_s": calls.begin_s - calls.first_s,
        "core_s": 0.0,
        "wait_start_s": 0.0,
        "wait_end_s": 0.0,
    }
    columns |= {"in_bytes": calls.in_bytes, "out_bytes": calls.out_bytes}
    return replace(rank, collectives=pd.DataFrame(columns).reset_index(drop=True))


def _seconds_between(marks: "pd.DataFrame", first: str, last: str) -> float:
    """Seconds between marks of two names, summed over their pairs in order."""
    # A pass that is cut off by the end of the record has no pair.
    starts = marks[marks.name == first].wall_s.to_numpy()
    ends = marks[marks.name == last].wall_s.to_numpy()
    pairs = min(len(starts), len(ends))
    return float((ends[:pairs] - starts[:pairs]).sum())


def _under_way_s(calls: "pd.DataFrame", low_s: float, high_s: float) -> float:
    """Seconds of an interval in which some call is in progress."""
    # Calls of several groups overlap, so intervals are merged before they are summed.
    spans: Any = calls[(calls.end_s > low_s) & (calls.start_s < high_s)]
    starts_s = spans["start_s"].to_numpy(float).clip(low_s, high_s)
    ends_s = spans["end_s"].to_numpy(float).clip(low_s, high_s)
    starts_s, ends_s = merged_intervals(starts_s, ends_s)
    return float((ends_s - starts_s).sum())
