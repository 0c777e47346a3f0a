"""Times and core seconds of the collectives of torch's gloo on this machine, for tables of prices."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.execution.emulation._launch import Emulation, emulate
from perfmodel.execution.emulation._operations import Network
from perfmodel.execution.emulation._prices import COLUMNS, Prices
from perfmodel.measure import Host, usable_cores

if TYPE_CHECKING:
    import pandas as pd

MEASURED: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")

SIZES: Final = (64, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)


def measure_prices(
    world_size: int,
    kinds: Sequence[str] = MEASURED,
    sizes: Sequence[int] = SIZES,
    *,
    calls: int = 30,
    hosts: Sequence[Host] = (),
    prices: Prices | None = None,
    wire: Network | None = None,
) -> "pd.DataFrame":
    """Collectives among processes of this machine, each with a core of its own as far as they reach.

    Args:
        world_size: ranks.
        kinds: of collectives.
        sizes: bytes, sized as in `perfmodel.spec.Collective`.
        calls: of each kind and size, after some computing each.
        hosts: of the ranks, one each; by default they share this one.
        prices: of an emulated cluster; then rank 0 alone is real, and what is measured is the emulation.
        wire: likewise, with the other ranks on the wire.

    Returns:
        collective, ranks, bytes, time_s, core_s (processor time of rank 0's process per call), means of calls; jitter
        (standard deviation of the log of a rank's time for the same work); copies_per_s (speed of the core, see
        `_clock.Core`: the median, at which all processor times are stated, whatever it was when each was measured).
    """
    import pandas as pd

    alone = prices is not None or wire is not None
    with tempfile.TemporaryDirectory(prefix="perfmodel-") as folder:
        out = Path(folder) / "rows.json"
        emulate(
            Emulation(
                command=(sys.executable, "-m", f"{__package__}._measured_rank", str(out), ",".join(kinds),
                         ",".join(map(str, sizes)), str(calls)),
                world_size=world_size, real_ranks=(0,) if alone else tuple(range(world_size)), prices=prices,
                wire=wire, cores=usable_cores(), hosts=tuple(hosts),
            )
        )  # fmt: skip
        table = pd.DataFrame(json.loads(out.read_text()), columns=[*COLUMNS, "core_s", "jitter", "copies_per_s"])
    return table if alone else at_one_speed(table)


def at_one_speed(table: "pd.DataFrame") -> "pd.DataFrame":
    """Processor times as on a core of the median speed: that of a shared machine drifts while it is measured.

    Args:
        table: time_s, core_s, and copies_per_s when each row was measured.

    Returns:
        The same with one copies_per_s; what a call waits is left alone.
    """
    usual = float(table.copies_per_s.median())
    faster = table.copies_per_s / usual
    works_s = table[["core_s", "time_s"]].min(axis=1)
    return table.assign(
        time_s=table.time_s + works_s * (faster - 1), core_s=table.core_s * faster, copies_per_s=usual
    )  # fmt: skip
