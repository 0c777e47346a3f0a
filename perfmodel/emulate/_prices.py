"""Times of emulated collectives: from the calibration, a table or a user's function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.emulate.environment import check_delay, delayed_as
from perfmodel.errors import PerfModelError, TableError
from perfmodel.files import DAMAGED
from perfmodel.ingest.tables import read_csv
from perfmodel.ops import Collective
from perfmodel.spec import Cluster

if TYPE_CHECKING:
    from perfmodel.cost import PricesCollectives

Seconds = Callable[[Collective], float]
"""A user's function that returns the seconds of a collective."""
COLUMNS: Final = ("collective", "ranks", "bytes", "time_s")
_PRICED_AS: Final[Mapping[str, str]] = {
    "send": "send_recv",
    "recv": "send_recv",
    "reduce": "broadcast",
    "gather": "all_gather",
    "scatter": "all_gather",
    "barrier": "all_reduce",
}
"""Kinds without measurements, with the kind that prices them. A reduction to one rank is a
broadcast run backwards; a gather moves through its root's link what an all-gather moves through
every link (Thakur et al. 2005, section 4)."""


def placed(cluster: Cluster, kind: str, nbytes: int, members: Sequence[int]) -> Collective:
    """Place a call's ranks on the cluster in order."""
    # A message is between two ranks, wherever the group that it belongs to reaches.
    pair = kind in ("send", "recv")
    place = cluster.reach(members)
    return Collective(
        collective=_PRICED_AS.get(kind, kind),  # pyright: ignore[reportArgumentType]
        bytes=nbytes,
        num_ranks=2 if pair else len(members),
        ranks_per_node=min(2, place.ranks_per_node) if pair else place.ranks_per_node,
        level=place.level,
        concurrent=place.concurrent,
        interleaved=1 if pair else place.interleaved,
    )


def modelled(cluster: Cluster, collectives: "PricesCollectives") -> Seconds:
    """Prices from the calibrated model."""
    return lambda op: float(collectives.times(cluster, [op]).time_s[0])


def plugged(name: str) -> Seconds:
    """Return the user's function `module:function`, from a collective to seconds.

    Raises:
        PerfModelError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise PerfModelError(
            f"prices: no function {name!r} ({error}); give FILE.csv or module:function"
        ) from None


@dataclass(frozen=True)
class PriceTable:
    """Times by kind, ranks and bytes, from a packet-level simulator or from measurements."""

    path: Path
    curves: Mapping[tuple[str, int], np.ndarray]
    """Rows of bytes, time_s, core_s by kind and ranks, ordered by bytes."""
    jitter: float = 0.0
    """Standard deviation of the log of a rank's compute time, if it was measured with the
    prices."""
    copies_per_s: float = 0.0
    """Speed of the core on which `core_s` was measured; 0 if unknown."""

    @classmethod
    def read(cls, path: Path) -> "PriceTable":
        """Read a CSV of collective, ranks, bytes, time_s and, if known, core_s (its processor
        time), jitter and copies_per_s.

        Raises:
            TableError: columns or values that are missing or impossible.
        """
        import pandas as pd

        try:
            table = read_csv(path, comment="#", skipinitialspace=True)
        except FileNotFoundError:
            raise
        except (ValueError, pd.errors.ParserError, *DAMAGED) as error:
            raise TableError(f"{path}: not a table ({error})") from None
        # A table of times alone is enough; processor times and the machine's speed are known only
        # from measurements.
        missing = [name for name in COLUMNS if name not in table]
        if missing:
            raise TableError(
                f"{path}: column {', '.join(missing)} missing; needed: {', '.join(COLUMNS)}"
            )
        if "core_s" not in table:
            table["core_s"] = 0.0
        values = (
            table[["ranks", "bytes", "time_s", "core_s"]]
            .apply(pd.to_numeric, errors="coerce")
            .to_numpy(float)
        )
        bad = ~np.isfinite(values).all(axis=1) | (values < 0).any(axis=1) | (values[:, 0] < 2)
        if bad.any():
            raise TableError(
                f"{path}: row {int(np.argmax(bad))} needs ranks >= 2 and finite numbers of at least 0"
            )
        curves = {}
        groups: Any = table.groupby(["collective", "ranks"])
        for (kind, ranks), rows in groups:
            curves[str(kind), int(ranks)] = rows.sort_values("bytes")[
                ["bytes", "time_s", "core_s"]
            ].to_numpy(float)
        machine = {
            name: float(table[name].iloc[0])
            for name in ("jitter", "copies_per_s")
            if name in table and len(table)
        }
        return cls(path, curves, **machine)

    @property
    def conditions(self) -> dict[str, float]:
        """Jitter and core speed of the machine that was measured, for `Emulation.conditions`."""
        return {"jitter": self.jitter, "copies_per_s": self.copies_per_s}

    def time_s(self, op: Collective) -> float:
        """Time by linear interpolation between rows, proportional to bytes beyond them.

        Raises:
            PerfModelError: a kind or number of ranks that the table does not hold.
        """
        return self._interpolated(op, 1)

    def core_s(self, op: Collective) -> float:
        """CPU time, interpolated alike, if need be from other numbers of ranks; 0 without data.

        A ring takes n - 1 steps (all-reduce twice as many), each of which costs something, and
        moves (n - 1) / n of the buffer through every rank (Thakur et al. 2005, section 4); the time
        of the smallest message is taken to be that of the steps.
        """
        # The nearest number of ranks, scaled as a ring's time.
        measured = [ranks for kind, ranks in self.curves if kind == op.collective]
        if not measured:
            return 0.0
        ranks = min(measured, key=lambda n: abs(n - op.num_ranks))
        core_of_ranks_s = self._interpolated(replace(op, num_ranks=ranks), 2)
        if op.collective in ("send_recv", "broadcast"):
            return core_of_ranks_s
        steps = min(core_of_ranks_s, float(self.curves[op.collective, ranks][0, 2]))
        # Steps grow with n - 1, bytes through a rank with (n - 1) / n.
        rank_ratio = (op.num_ranks - 1) / (ranks - 1)
        return steps * rank_ratio + (core_of_ranks_s - steps) * rank_ratio * ranks / op.num_ranks

    def _interpolated(self, op: Collective, column: int) -> float:
        """Interpolate a column of the table at the size of a collective."""
        rows = self.curves.get((op.collective, op.num_ranks))
        if rows is None:
            raise PerfModelError(
                f"{self.path}: the script called {op.collective} on {op.num_ranks} ranks, which the table "
                "lacks; add rows for it"
            )
        # Large messages are bound by bandwidth, so time grows with bytes.
        interpolated_s = float(np.interp(op.bytes, rows[:, 0], rows[:, column]))
        largest_bytes = rows[-1, 0]
        if op.bytes > largest_bytes > 0:
            return interpolated_s * op.bytes / largest_bytes
        return interpolated_s


@dataclass(frozen=True)
class Prices:
    """Times of collectives in the emulated environment."""

    cluster: Cluster
    seconds: Seconds
    occupancy: PriceTable | None = None
    """Processor time that collectives take from their rank's core; None if they take none
    (GPUs)."""
    delays_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds added to every collective of a kind, one of `_orders.DELAYED`."""

    def __post_init__(self) -> None:
        for kind, delay_s in self.delays_s.items():
            check_delay(kind, delay_s)

    def __call__(self, kind: str, nbytes: int, members: Sequence[int]) -> tuple[float, float]:
        """Seconds of a call, and its CPU seconds.

        Raises:
            PerfModelError: what the prices do not know, or a plug-in's answer that is not a time.
        """
        # A group of one communicates with nobody.
        if len(members) == 1:
            return 0.0, 0.0
        op = placed(self.cluster, kind, nbytes, members)
        time_s = float(self.seconds(op))
        if not 0 <= time_s < float("inf"):
            raise PerfModelError(
                f"prices: the time of {op.collective} of {op.bytes} bytes must be finite and at least 0, got "
                f"{time_s!r} s"
            )
        busy_s = 0.0 if self.occupancy is None else min(time_s, self.occupancy.core_s(op))
        return time_s + self.delays_s.get(delayed_as(kind), 0.0), busy_s
