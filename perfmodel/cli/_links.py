"""The links that imported collectives ran over: files of benchmarks and profilers do not tell them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError, TableError
from perfmodel.spec import Cluster

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Links:
    """What the user says of the links."""

    interconnect: str
    """As the `interconnect` column of tables holds it; empty where nothing was said."""
    cluster: Cluster | None = None

    def applied(self, table: "pd.DataFrame", file: Path) -> "pd.DataFrame":
        """A table of collectives with its links; device and ranks per node by the cluster where the file is silent.

        Raises:
            TableError: nothing was said, an interconnect of unknown links, or a cluster of other devices.
        """
        from perfmodel.cost.learn import is_known

        if not self.interconnect:
            raise TableError(
                f"{file}: collectives, and nothing says over which links they ran; name them with --cluster NAME or "
                "--interconnect 'NVLink3 + InfiniBand HDR' (or take the kernels alone: --kind compute)"
            )
        table = table.assign(interconnect=self.interconnect)
        if self.cluster is not None:
            table = _on(self.cluster, table, file)
        for device in sorted(set(table["device"])):
            if not any(is_known(self.interconnect, device, between) for between in (False, True)):
                raise TableError(
                    f"{file}: interconnect {self.interconnect!r} names no known link; name one, as "
                    "'NVLink3 + InfiniBand HDR', 'PCIe4' or 'RoCE@50GB/s', or give --cluster"
                )
        return table

    def set_aside(self, table: "pd.DataFrame") -> dict[str, int]:
        """Why rows will not be fitted -> how many."""
        from perfmodel.cost.learn import collective_rows, counted, set_aside

        rows = collective_rows(table)
        return counted(rows, set_aside(rows))


def links_of(cluster: str | None, interconnect: str) -> Links:
    """From the two options.

    Raises:
        PerfModelError: both are given, or the cluster is unknown.
    """
    from perfmodel import catalog
    from perfmodel.cost import interconnect_of

    if cluster is None:
        return Links(interconnect.strip())
    if interconnect:
        raise PerfModelError("import: --cluster names the links already; give it or --interconnect, not both")
    found = catalog.cluster(cluster)
    return Links(interconnect_of(found), found)


def _on(cluster: Cluster, table: "pd.DataFrame", file: Path) -> "pd.DataFrame":
    from perfmodel.cost.learn import device_name

    own = cluster.device.name
    others = sorted({name for name in table["device"] if name and device_name(name) != own})
    if others:
        raise TableError(
            f"{file}: ranks on {', '.join(others)}, not on {own} of {cluster.name}; give another --cluster, or --device"
        )
    packed = table["num_ranks"].clip(upper=cluster.devices_per_node)
    per_node = table["ranks_per_node"].fillna(packed) if "ranks_per_node" in table.columns else packed
    nodes = -(-table["num_ranks"] // per_node)
    return table.assign(device=own, ranks_per_node=per_node.astype("Int64"), num_nodes=nodes.astype("Int64"))
