"""`perfmodel import`: converts files of benchmarks and profilers to tables and traces."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._flags import add_json
from perfmodel.cli._show import reporting, written
from perfmodel.display import say, say_verbatim
from perfmodel.errors import PerfModelError, TableError
from perfmodel.units import duration, plural

if TYPE_CHECKING:
    import pandas as pd

    from perfmodel.spec import Cluster


_CONTENTS: Final = {"compute": "kernels", "collective": "collectives"}
"""Names of the rows of each kind of table."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "import",
        help="convert the output of nccl-tests, OSU, torch, Nsight Systems or JAX profilers into a measurement table",
    )
    command.add_argument(
        "format",
        metavar="FORMAT",
        help="format of the files: nccl-tests, osu, kineto, nsys, xplane, jax-trace, perfmodel or auto",
    )
    command.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files of ranks or repeats, or JAX's log directory",
    )
    # What is written: rows of a table, a trace to compare with, or both.
    command.add_argument(
        "--out", type=Path, metavar="TABLE", help="table to write (csv, csv.gz, parquet)"
    )
    command.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="also write the timeline as a trace (json or json.gz), which 'perfmodel compare' reads",
    )
    command.add_argument(
        "--kind", default="", help="keep only rows of this kind: compute or collective"
    )
    # What logs of benchmarks leave out, or get wrong, the user states.
    command.add_argument(
        "--device",
        default="",
        metavar="NAME",
        help="name of the device, if the files state none or a wrong one",
    )
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks of the collectives, if the files do not state it",
    )
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="number of ranks per node")
    command.add_argument(
        "--collective",
        default="",
        metavar="KIND",
        help="collective that was timed, if the log does not name it",
    )
    command.add_argument(
        "--cluster",
        metavar="NAME",
        help="cluster where the collectives ran; it names their links and the device",
    )
    command.add_argument(
        "--interconnect",
        default="",
        metavar="WORDS",
        help="names of the links, such as 'NVLink3 + InfiniBand HDR' or 'RoCE@50GB/s', if "
        "--cluster does not state them",
    )
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return rows, reasons for skipped ones, and the files written.

    Raises:
        PerfModelError: nothing to write, files that the readers refuse, or no row for a table that
            was asked for.
    """
    from perfmodel import ingest

    if not (arguments.out or arguments.timeline):
        raise PerfModelError(
            "import: nothing to write; give --out TABLE (rows) or --timeline FILE (trace)"
        )
    format = arguments.format
    if format == "auto":
        format = ingest.detect_format(arguments.files[0])
    report: dict[str, Any] = {"format": format, "written": []}
    if arguments.timeline:
        from perfmodel.ingest.profiles import chrome

        trace = ingest.read_trace(format, arguments.files)
        chrome.write_measured_trace(trace, arguments.timeline, format)
        report |= {
            "activities": trace.n,
            "devices": trace.devices,
            "duration_s": trace.batch_time_s,
        }
        report["written"].append(str(arguments.timeline))
    if arguments.out:
        try:
            report |= _rows(arguments, format)
        except TableError as error:
            # A trace without shapes has a timeline all the same, which is written already.
            if not arguments.timeline:
                raise
            report["no_table"] = str(error)
        tables = [table["file"] for table in report.get("tables", ())]
        report["written"] = tables + report["written"]
    return report


def _rows(arguments: argparse.Namespace, format: str) -> dict[str, Any]:
    """Write the tables, and report on them.

    Raises:
        TableError: no row, files that the readers refuse.
        PerfModelError: an unknown device or cluster.
    """
    from perfmodel import ingest

    options = ingest.ReadOptions(
        device=arguments.device,
        ranks=arguments.ranks,
        ranks_per_node=arguments.ranks_per_node,
        collective=arguments.collective,
    )

    # Links are named before files are read, so that a wrong name costs no time.
    interconnect, cluster = _links(arguments)
    measured = ingest.import_measurements(format, arguments.files, options)
    tables = measured.tables(arguments.kind, arguments.files[0])
    report: dict[str, Any] = {}
    if "collective" in tables:
        tables["collective"] = _with_interconnect(
            interconnect, cluster, tables["collective"], arguments.files[0]
        )
        report["set_aside"] = _set_aside(tables["collective"])
    return report | measured.to_dict() | {"tables": _write_tables(arguments.out, tables)}


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    for table in report.get("tables", ()):
        say(
            f"wrote {table['file']}: {table['rows']} {plural('row', table['rows'])} of "
            f"{_CONTENTS[table['kind']]} ({table['what']})"
        )
        if not table["device"]:
            say("  no device named in the files; give --device NAME to use these rows for fitting")
    for reason, count in report.get("set_aside", {}).items():
        say(f"  fit will set aside {count}: {reason}")
    for reason, count in report.get("skipped", {}).items():
        say(f"skipped {count}: {reason}")
    if "activities" in report:
        say(
            f"{report['activities']} activities of {report['devices']} "
            f"{plural('device', report['devices'])} over {duration(report['duration_s'])}"
        )
        written(report["written"][-1:])
    if "no_table" in report:
        say(f"no table was written: {report['no_table']}")
    usable = [table["file"] for table in report.get("tables", ()) if table["device"]]
    if usable:
        say_verbatim(f"next: perfmodel validate kernels {shlex.join(map(str, usable))}")


def _links(arguments: argparse.Namespace) -> "tuple[str, Cluster | None]":
    """Links in the notation of the `interconnect` column (empty if not stated), and the cluster.

    Raises:
        PerfModelError: both are given, or the cluster is unknown.
    """
    from perfmodel import catalog
    from perfmodel.cost import interconnect_of

    if arguments.cluster is None:
        return arguments.interconnect.strip(), None
    if arguments.interconnect:
        raise PerfModelError(
            "import: --cluster names the links already; give it or --interconnect, not both"
        )
    cluster = catalog.cluster(arguments.cluster)
    return interconnect_of(cluster), cluster


def _with_interconnect(
    interconnect: str, cluster: "Cluster | None", table: "pd.DataFrame", file: Path
) -> "pd.DataFrame":
    """A table of collectives with its links.

    Raises:
        TableError: nothing was said, an interconnect of unknown links, or a cluster of other
            devices.
    """
    from perfmodel.cost.learn.collectives.links import is_known

    if not interconnect:
        raise TableError(
            f"{file}: the file has collectives but does not name their links; name them with --cluster "
            "NAME or "
            "--interconnect 'NVLink3 + InfiniBand HDR' (or keep only the kernels: --kind compute)"
        )
    table = table.assign(interconnect=interconnect)
    if cluster is not None:
        table = _with_cluster(cluster, table, file)
    # An unknown name would be priced like an arbitrary link, far off and without a warning.
    for device in sorted(set(table["device"])):
        if not any(is_known(interconnect, device, between) for between in (False, True)):
            raise TableError(
                f"{file}: interconnect {interconnect!r} does not name a known link; give one such as "
                "'NVLink3 + InfiniBand HDR', 'PCIe4' or 'RoCE@50GB/s', or give --cluster"
            )
    return table


def _with_cluster(cluster: "Cluster", table: "pd.DataFrame", file: Path) -> "pd.DataFrame":
    """The table with the cluster's device, and its ranks per node if the file states none."""
    from perfmodel.cost.learn.collectives import device_name

    device = cluster.device.name
    other_devices = sorted(
        {name for name in table["device"] if name and device_name(name) != device}
    )
    if other_devices:
        raise TableError(
            f"{file}: the ranks ran on {', '.join(other_devices)}, but {cluster.name} has "
            f"{device}; give another --cluster, or --device"
        )

    # Ranks fill nodes one after another unless the file says how many a node has.
    packed = table["num_ranks"].clip(upper=cluster.devices_per_node)
    per_node = (
        table["ranks_per_node"].fillna(packed) if "ranks_per_node" in table.columns else packed
    )
    nodes = -(-table["num_ranks"] // per_node)
    return table.assign(
        device=device,
        ranks_per_node=per_node.astype("Int64"),
        num_nodes=nodes.astype("Int64"),
    )


def _set_aside(table: "pd.DataFrame") -> dict[str, int]:
    """Number of rows that will not be fitted, by reason."""
    from perfmodel.cost.learn.collectives import collective_rows, counted, set_aside

    rows = collective_rows(table)
    return counted(rows, set_aside(rows))


def _write_tables(out: Path, tables: "dict[str, pd.DataFrame]") -> list[dict[str, Any]]:
    """Write one file, or one per kind if the input has both kinds."""
    from perfmodel.ingest.tables import read_table, write_table

    written = []
    for kind, table in tables.items():
        path = out
        if len(tables) > 1 and kind == "collective":
            name, dot, suffixes = path.name.partition(".")
            path = path.with_name(f"{name}.collectives{dot}{suffixes}")
        write_table(path, table)

        # Read the written file back: the report describes it, and a table that `fit` would refuse
        # fails here.
        checked = read_table(path)
        what = checked["op_family" if kind == "compute" else "collective"].value_counts()
        facts = {"device": ", ".join(sorted(set(checked["device"]))), "rows": len(checked)}
        facts["what"] = ", ".join(f"{count} {name}" for name, count in what.items())
        written.append({"file": str(path), "kind": kind} | facts)
    return written
