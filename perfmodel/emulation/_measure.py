"""Times and core seconds of the collectives of torch's gloo on this machine, for tables of prices."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.emulation._launch import Emulation, emulate
from perfmodel.emulation._prices import COLUMNS, Prices
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
) -> "pd.DataFrame":
    """Collectives among processes of this machine, each with a core of its own as far as they reach.

    Args:
        world_size: ranks.
        kinds: of collectives.
        sizes: bytes, sized as in `perfmodel.spec.Collective`.
        calls: of each kind and size, after some computing each.
        hosts: of the ranks, one each; by default they share this one.
        prices: of an emulated cluster; then rank 0 alone is real, and what is measured is the emulation.

    Returns:
        collective, ranks, bytes, time_s, core_s (processor time of rank 0's process per call), means of calls; jitter
        (standard deviation of the log of a rank's time for the same work).
    """
    import pandas as pd

    with tempfile.TemporaryDirectory(prefix="perfmodel-") as folder:
        out = Path(folder) / "rows.json"
        emulate(
            Emulation(
                command=(sys.executable, "-m", "perfmodel.emulation._measured_rank", str(out), ",".join(kinds),
                         ",".join(map(str, sizes)), str(calls)),
                world_size=world_size, real_ranks=(0,) if prices else tuple(range(world_size)), prices=prices,
                cores=usable_cores(), hosts=tuple(hosts),
            )
        )  # fmt: skip
        return pd.DataFrame(json.loads(out.read_text()), columns=[*COLUMNS, "core_s", "jitter"])
