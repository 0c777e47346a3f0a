"""Collectives timed between local processes."""

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING, Final

from perfmodel.measure._group import RankGroup, check_collective
from perfmodel.measure._harness import StoppingRule, time_calls
from perfmodel.measure._hosts import Host
from perfmodel.measure._meter import Meter, machine_meter
from perfmodel.measure._rows import SOURCE, Row, collective_columns, timing_columns
from perfmodel.spec import Collective

if TYPE_CHECKING:
    import pandas as pd

INTERCONNECT: Final = "loopback"
ALGORITHM: Final = "gloo"


def measure_collectives(
    collectives: Iterable[Collective],
    device_name: str,
    *,
    hosts: Sequence[Host] = (),
    interconnect: str = INTERCONNECT,
    rule: StoppingRule | None = None,
    progress: Callable[[int, Collective], None] | None = None,
) -> "pd.DataFrame":
    """Time collectives between processes over gloo: of this host (TCP on the loopback interface), or of several.

    Ranks are pinned to one core each, in turn where there are fewer cores. A time is that of one
    call, the slowest rank's, in a row of calls each waited for; `send_recv` is a ring shift. Groups
    are started once per run of equal `num_ranks`.

    Args:
        collectives: each with as many nodes as there are hosts, and `bytes` a multiple of `num_ranks` elements.
        device_name: what the `device` column says.
        hosts: where the ranks run; none: all on this host.
        interconnect: what the column of that name says.

    Returns:
        One row per collective with the columns of a measurement table (times in microseconds).

    Raises:
        PerfModelError: for a collective that cannot be run as asked.
        CalibrationError: if a rank fails.
    """
    import pandas as pd

    rule = rule or StoppingRule()
    wanted = list(collectives)
    for op in wanted:
        check_collective(op, max(1, len(hosts)))
    rows: list[Row] = []
    for num_ranks, members in groupby(wanted, key=lambda op: op.num_ranks):
        with RankGroup(num_ranks, hosts=hosts) as group:
            for op in members:
                if progress is not None:
                    progress(len(rows), op)
                row = collective_row(group, op, device_name, rule, machine_meter())
                rows.append(row | {"interconnect": interconnect})
    return pd.DataFrame(rows)


def collective_row(group: RankGroup, op: Collective, device_name: str, rule: StoppingRule, meter: Meter) -> Row:
    """Measure one collective on a running group: its row of the table."""
    group.load(op)
    timing = time_calls(lambda calls: group.sample(calls, meter), rule.resolved_by(meter))
    return {
        "source": SOURCE,
        "device": device_name,
        "interconnect": INTERCONNECT,
        "algorithm": ALGORITHM,
        **collective_columns(op),
        **timing_columns(timing, rule),
        "software": f"jax{version('jax')}-gloo",
    }
