"""`perfmodel import-model`: costs of a model from a JAX function, compiled module or ONNX file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_calibration, add_json
from perfmodel.cli._show import reporting, written
from perfmodel.display import new_console, table
from perfmodel.errors import PerfModelError
from perfmodel.units import duration, figure, scaled, span

if TYPE_CHECKING:
    from perfmodel.ir.importers import OpTable

_SHOWN_ROWS = 15


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "import-model",
        help="show FLOPs, bytes, collectives and predicted time of a JAX, compiled or ONNX model",
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="FILE.py:FUNCTION, where FUNCTION() returns a JAX function and the tuple of its (abstract) arguments; "
        "FILE.onnx; or the text of a compiled module (FILE.hlo, FILE.txt)",
    )
    command.add_argument(
        "--target",
        metavar="NAME",
        help="cluster or device to predict the time on (name or TOML)",
    )
    command.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="number of fake devices for which a sharded JAX function is compiled (default 1: "
        "trace it unsharded)",
    )
    add_dimensions(command)
    command.add_argument(
        "--trip-count",
        type=int,
        metavar="T",
        help="iterations to assume for loops that do not state their number",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write all kernels and collectives (csv, csv.gz, parquet)",
    )
    add_calibration(command)
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return totals, unmapped ops and, with a target, the predicted time.

    Raises:
        PerfModelError: a source of another kind or without such a function, or what the importers
            refuse.
    """
    from perfmodel.ingest.tables import write_table

    table = _table(arguments)
    report: dict[str, Any] = table.to_dict()
    if arguments.target:
        estimate = table.predict(arguments.target, calibration=arguments.calibration)
        report["prediction"] = estimate.to_dict()
        frame = estimate.to_frame()
    else:
        frame = table.to_frame()

        # Without predicted times, rows are ordered by their FLOPs.
        frame = frame.iloc[(-frame["count"] * frame["flops"]).argsort()]
        frame = frame.loc[:, ["family", "source", "count", "flops", "bytes"]]
    if arguments.out:
        write_table(arguments.out, frame)
        report["written"] = [str(arguments.out)]
    report["rows"] = frame.head(_SHOWN_ROWS).to_dict(orient="records")
    return report


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    console = new_console()
    flops = scaled(report["flops"], "FLOP")
    traffic = scaled(report["traffic_bytes"], "B")
    sent = scaled(report["communicated_bytes"], "B")
    console.print(
        f"{report['name']}: {flops}, {traffic} of traffic and {sent} of collectives per device, {report['n_devices']} "
        "device(s)"
    )
    predicted = report.get("prediction")
    if predicted:
        interval = span(
            duration(predicted["step_time_lo_s"]), duration(predicted["step_time_hi_s"])
        )
        console.print(
            f"predicted {duration(predicted['step_time_s'])} ({interval}); {duration(predicted['overlapped_time_s'])} if all "
            f"communication were hidden; MFU {predicted['mfu']:.1%}"
        )

    # Operations without a kernel are missing from the prediction: say how much they would weigh.
    for item in report["unmapped"]:
        share = item["count"] * item["flops"] / report["flops"] if report["flops"] else 1.0
        console.print(f"not mapped: {item['name']} ({share:.2%} of FLOPs): {item['reason']}")
    if report["rows"]:
        cells = []
        for row in report["rows"]:
            cells.append([_cell(name, value) for name, value in row.items()])
        console.print(table("", report["rows"][0], cells))
    written(report.get("written", ()))


def _cell(name: str, value: Any) -> str:
    """A value with the unit that its column's name has."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return str(value)
    units = {"flops": "FLOP", "bytes": "B"}
    if name.endswith("_s"):
        return duration(value)
    return scaled(value, units[name]) if name in units else figure(value)


def _table(arguments: argparse.Namespace) -> "OpTable":
    """Read the source's kernels and collectives, by the kind of source that its suffix tells."""
    from perfmodel.ir import importers

    # The kind of source follows from its suffix.
    path, _, function = arguments.source.partition(":")
    suffix = Path(path).suffix
    if suffix == ".onnx":
        return importers.read_onnx(path, dims=dict(map(dimension, arguments.dim)))
    if suffix in (".hlo", ".txt"):
        return importers.read_sharded(Path(path), trip_count=arguments.trip_count)
    if suffix == ".py" and function:
        _fake_devices(arguments.devices)
        fn, args = importers.loaded(Path(path), function)
        read = importers.read_sharded if arguments.devices > 1 else importers.trace
        return importers.of_the_file(
            Path(path),
            lambda: read(fn, *args, trip_count=arguments.trip_count, name=function),
            inside=True,
        )
    raise PerfModelError(
        f"{arguments.source}: not FILE.py:FUNCTION, FILE.onnx, FILE.hlo or FILE.txt"
    )


def _fake_devices(count: int) -> None:
    """CPU devices to compile for; must come before JAX starts its backend.

    A compilation from the cache would come without the text of its module.
    """
    import jax

    if count > 1:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_enable_compilation_cache", False)


def add_dimensions(command: argparse.ArgumentParser) -> None:
    """Add the flag --dim."""
    command.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of a named dimension (ONNX; repeatable)",
    )


def dimension(text: str) -> tuple[str, int]:
    """Parse the `NAME=SIZE` of --dim."""
    name, _, size = text.partition("=")
    if not name or not size.isdigit():
        raise PerfModelError(f"--dim {text!r} is not NAME=SIZE")
    return name, int(size)
