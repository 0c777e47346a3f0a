"""`perfmodel import`: files of benchmarks and profilers to measurement tables and traces."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._emit import reporting
from perfmodel.cli._flags import add_json
from perfmodel.errors import PerfModelError, TableError, UnknownNameError
from perfmodel.units import duration

if TYPE_CHECKING:
    import pandas as pd


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "import", help="output of nccl-tests, OSU, torch, Nsight Systems or JAX profilers as a measurement table"
    )
    command.add_argument(
        "format", metavar="FORMAT", help="nccl-tests, osu, kineto, nsys, xplane, jax-trace, perfmodel, auto"
    )
    command.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="of ranks or repeats; or JAX's log directory"
    )
    command.add_argument("--out", type=Path, metavar="TABLE", help="table to write (csv, csv.gz, parquet)")
    command.add_argument("--timeline", type=Path, metavar="FILE", help="trace to write (json or json.gz), for compare")
    command.add_argument("--kind", default="", help="compute or collective: only this kind of rows")
    command.add_argument(
        "--device", default="", metavar="NAME", help="name of the device, where the files say none or another"
    )
    command.add_argument("--ranks", type=int, metavar="N", help="ranks of the collectives, where the files do not say")
    command.add_argument("--ranks-per-node", type=int, metavar="N", help="the same within a node")
    command.add_argument("--collective", default="", metavar="KIND", help="of logs that do not name their program")
    command.add_argument("--cluster", metavar="NAME", help="where collectives ran: names their links and the device")
    command.add_argument(
        "--interconnect", default="", metavar="WORDS",
        help="instead of --cluster: the links, as 'NVLink3 + InfiniBand HDR'; other rates as 'RoCE@50GB/s'",
    )  # fmt: skip
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows, what was skipped and why, and the files written.

    Raises:
        PerfModelError: nothing to write, files that the readers refuse, or no row for a table that was asked for.
    """
    from perfmodel import ingest
    from perfmodel.cli._links import links_of

    if not (arguments.out or arguments.timeline):
        raise PerfModelError("import: nothing to write; give --out TABLE (rows) or --timeline FILE (trace)")
    format = ingest.detect_format(arguments.files[0]) if arguments.format == "auto" else arguments.format
    report: dict[str, Any] = {"format": format, "written": []}
    if arguments.out:
        options = ingest.ReadOptions(
            device=arguments.device, ranks=arguments.ranks, ranks_per_node=arguments.ranks_per_node,
            collective=arguments.collective,
        )  # fmt: skip
        links = links_of(arguments.cluster, arguments.interconnect)
        found = ingest.import_measurements(format, arguments.files, options)
        tables = _tables(arguments, found)
        if "collective" in tables:
            tables["collective"] = links.applied(tables["collective"], arguments.files[0])
            report["set_aside"] = links.set_aside(tables["collective"])
        report |= found.to_dict() | {"tables": _write_tables(arguments.out, tables)}
        report["written"] += [table["file"] for table in report["tables"]]
    if arguments.timeline:
        trace = ingest.read_trace(format, arguments.files)
        ingest.write_measured_trace(trace, arguments.timeline, format)
        report |= {"activities": trace.n, "devices": trace.devices, "duration_s": trace.batch_time_s}
        report["written"].append(str(arguments.timeline))
    return report


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    for table in report.get("tables", ()):
        print(f"{table['rows']} rows of {table['kind']} ({table['what']}) to {table['file']}")
        if not table["device"]:
            print("  no device named in the files; give --device NAME to use these rows for fitting")
    for reason, count in report.get("set_aside", {}).items():
        print(f"  fit will set aside {count}: {reason}")
    for reason, count in report.get("skipped", {}).items():
        print(f"skipped {count}: {reason}")
    if "activities" in report:
        print(f"{report['activities']} activities of {report['devices']} devices over {duration(report['duration_s'])}")
        print(f"wrote {report['written'][-1]}")


def _tables(arguments: argparse.Namespace, found: Any) -> "dict[str, pd.DataFrame]":
    """The tables to write, by kind.

    Raises:
        TableError: if there is no row for them.
    """
    tables: dict[str, pd.DataFrame] = {"compute": found.kernels, "collective": found.collectives}
    if arguments.kind:
        if arguments.kind not in tables:
            raise UnknownNameError("kind of table", arguments.kind, tables)
        tables = {arguments.kind: tables[arguments.kind]}
    tables = {kind: table for kind, table in tables.items() if len(table)}
    if not tables:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in list(found.skipped.items())[:3])
        raise TableError(f"{arguments.files[0]}: no row for a table in it{f': {reasons}' if reasons else ''}")
    return tables


def _write_tables(out: Path, tables: "dict[str, pd.DataFrame]") -> list[dict[str, Any]]:
    """One file, or one per kind where the files hold both."""
    from perfmodel.ingest.tables import read_table, write_table

    written = []
    for kind, table in tables.items():
        path = out
        if len(tables) > 1 and kind == "collective":
            name, dot, suffixes = path.name.partition(".")
            path = path.with_name(f"{name}.collectives{dot}{suffixes}")
        write_table(path, table)
        checked = read_table(path)
        what = checked["op_family" if kind == "compute" else "collective"].value_counts()
        facts = {"device": ", ".join(sorted(set(checked["device"]))), "rows": len(checked)}
        facts["what"] = ", ".join(f"{count} {name}" for name, count in what.items())
        written.append({"file": str(path), "kind": kind} | facts)
    return written
