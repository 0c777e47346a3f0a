"""`perfmodel emulate`: a training script as some ranks of a cluster that is not there."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._emit import reporting
from perfmodel.cli._flags import add_framework, add_json, framework_of, layout_of
from perfmodel.cli._launch import add_from
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.execution.emulation import Prices
    from perfmodel.planning.what_if import Scenario
    from perfmodel.spec import Cluster

_SWEPT_EVERY = 4
_MOST_POINTS: Final = 1000
_BUSY_S: Final = 2e-3


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "emulate", help="run an unmodified training script as if it were some ranks of a cluster: -- python train.py"
    )
    command.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks the script believes in")
    command.add_argument("--cluster", required=True, help="catalog name or TOML: where the emulated ranks are")
    command.add_argument("--real-ranks", default="0", metavar="R,...", help="ranks that run the script (default 0)")
    command.add_argument(
        "--apart", action="store_true", help="real ranks exchange no data either: they wait for one another only"
    )
    command.add_argument("--calibration", type=Path, metavar="DIR", help="made by 'perfmodel fit', of the collectives")
    command.add_argument(
        "--prices", metavar="FILE|MODULE:FUNCTION",
        help="times of collectives instead of the calibration's: csv (collective,ranks,bytes,time_s[,core_s]) "
        "or a function of perfmodel.spec.Collective",
    )  # fmt: skip
    command.add_argument(
        "--occupancy", type=Path, metavar="FILE", help="csv as for --prices: core_s, processor time of collectives"
    )
    command.add_argument(
        "--measure", type=Path, metavar="FILE",
        help="instead of a script: measure times and core time of torch's collectives between N ranks here",
    )  # fmt: skip
    command.add_argument(
        "--delay", action="append", default=[], metavar="KIND=TIME", help="added to collectives, all_reduce=2ms"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="network, as for whatif: inter_node_bandwidth=2x",
    )
    command.add_argument(
        "--straggler", type=float, default=1.0, metavar="F", help="emulated ranks take F times as long"
    )
    command.add_argument("--jitter", type=float, metavar="S", help="log-normal spread of emulated ranks' compute time")
    command.add_argument("--fail", metavar="RANK@CALL", help="an emulated rank that dies at a collective of the world")
    command.add_argument("--sweep", metavar="KIND=FIRST:LAST:COUNT", help="delays in turn, as all_reduce=0:10ms:11")
    command.add_argument(
        "--every", type=int, default=_SWEPT_EVERY, metavar="I", help="iterations for which each delay of a sweep stays"
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the sweep's curve")
    command.add_argument("--seed", type=int, default=0, help="of jitter")
    command.add_argument(
        "--pin",
        action="store_true",
        help="keep every real rank on a core of its own, on which threads of collectives come first",
    )
    command.add_argument("--timeout", type=float, default=300.0, metavar="S", help="longest silence of a rank")
    command.add_argument("--out", type=Path, metavar="DIR", help="tables, and the timeline for Perfetto")
    command.add_argument("--model", help="with --layout and --global-batch: compare with the prediction")
    add_from(command)
    command.add_argument("--layout", help="as for predict")
    add_framework(command)
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")
    command.add_argument("--seq-len", type=int, metavar="S", help="tokens per sequence (default: the model's)")
    command.add_argument("--dtype", default="fp32", choices=("bf16", "fp16", "fp32", "tf32"))
    command.add_argument("script", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="as from a shell")
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report, and the files written.

    Raises:
        PerfModelError: impossible settings, and whatever ends an emulation, with rank, call and number.
    """
    from perfmodel import catalog
    from perfmodel.execution.emulation import Emulation, emulate, emulated_curve, measure_prices
    from perfmodel.ingest.tables import write_text
    from perfmodel.measure import usable_cores

    if arguments.measure:
        table = measure_prices(arguments.world_size)
        write_text(arguments.measure, table.to_csv(index=False))
        return {"measured": table.to_dict(orient="records"), "written": [str(arguments.measure)]}
    delays_s, scenario = _asked(arguments)
    known = [arguments.model, arguments.layout, arguments.global_batch]
    if any(value is not None for value in known) and None in known:
        raise PerfModelError("emulate: a prediction to compare with takes --model, --layout and --global-batch")
    if arguments.every < 1:
        raise PerfModelError(f"emulate: --every must be at least 1 iteration, got {arguments.every}")
    if arguments.png and not arguments.sweep:
        raise PerfModelError("emulate: --png draws a curve; give --sweep KIND=FIRST:LAST:COUNT too")
    if arguments.sweep and arguments.model:
        raise PerfModelError("emulate: with --sweep iterations differ; give --delay to compare one with --model")
    cluster = scenario.cluster(catalog.cluster(arguments.cluster))
    cluster.require(arguments.world_size, "the emulated world")
    prices, measured = _prices(arguments, cluster)
    script = tuple(arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script)
    if len(script) == 1 and script[0].endswith(".ir"):
        return _program(arguments, Path(script[0]), cluster, prices, delays_s)
    swept, sweep_s = _sweep(arguments.sweep)
    predicted = _predicted(arguments, scenario, delays_s) if arguments.model else None
    result = emulate(
        Emulation(
            command=script,
            world_size=arguments.world_size,
            ranks_per_node=cluster.devices_per_node,
            real_ranks=_ranks(arguments.real_ranks),
            prices=prices,
            cores=usable_cores() if arguments.pin else (),
            timeout_s=arguments.timeout,
            conditions=measured
            | _conditions(arguments)
            | {
                "delays_s": delays_s,
                "swept": swept,
                "sweep_s": sweep_s,
                "sweep_every": arguments.every,
                "apart": arguments.apart,
            },
        ),
        arguments.out,
    )
    report: dict[str, Any] = {"cluster": cluster.name} | result.to_dict()
    report["never_called"] = _never_called({*delays_s, *filter(None, [swept])}, result.collectives().kind)
    written = _write(result, arguments.out) if arguments.out else []
    if swept:
        curve = emulated_curve(result, swept, sweep_s, arguments.every)
        report["curve"] = curve.to_dict()
        if arguments.png:
            from perfmodel.viz import draw_emulated_curve, save_figure

            save_figure(draw_emulated_curve(curve), arguments.png)
            written.append(str(arguments.png))
    elif report["iterations"]:
        report["slack_s"] = _slack(result)
    if predicted is not None and report["iterations"]:
        iteration_s, memory_bytes = predicted
        report["predicted"] = {
            "iteration_s": iteration_s,
            "iteration_error": iteration_s / report["iteration_s"] - 1,
            "memory_bytes": memory_bytes,
            "memory_error": memory_bytes / max(1, report["training_memory_bytes"]) - 1,
        }
    return report | {"written": written}


def _program(
    arguments: argparse.Namespace, path: Path, cluster: "Cluster", prices: "Prices", delays_s: Mapping[str, float]
) -> dict[str, Any]:
    """A program in its text form: JAX kernels of its real ranks, one after another."""
    from dataclasses import replace

    import pandas as pd

    from perfmodel.execution import random_inputs
    from perfmodel.execution.emulation import emulate_program
    from perfmodel.ingest.tables import write_text
    from perfmodel.program.ir import parse_function, undistributed

    of_scripts = {
        "--straggler": arguments.straggler != 1, "--jitter": arguments.jitter is not None, "--fail": arguments.fail,
        "--sweep": arguments.sweep, "--pin": arguments.pin, "--model": arguments.model,
    }  # fmt: skip
    if given := [name for name, value in of_scripts.items() if value]:
        raise PerfModelError(f"emulate: {', '.join(given)} is for scripts; a program takes --delay, --set and --out")
    program = undistributed(parse_function(path.read_text()))
    if program.n_devices != arguments.world_size:
        raise PerfModelError(f"{path}: the program is for {program.n_devices} devices, not {arguments.world_size}")
    inputs = random_inputs(program, arguments.seed)
    delayed = replace(prices, delays_s=delays_s)
    runs = [emulate_program(program, inputs, delayed, rank) for rank in _ranks(arguments.real_ranks)]
    ranks = [
        {"rank": r.rank, "instructions": len(r.instructions), "step_s": r.step_s, "communication_s": r.communication_s}
        for r in runs
    ]
    written = []
    if arguments.out:
        tables = [
            pd.DataFrame(
                {"rank": r.rank, "instruction": r.instructions, "collective": r.collective}
                | {f"repeat{n}_s": spans_s for n, spans_s in enumerate(r.spans_s)}
            )
            for r in runs
        ]
        written.append(str(arguments.out / "instructions.csv"))
        write_text(Path(written[0]), pd.concat(tables).to_csv(index=False))
    called = (kind for r in runs for kind, across in zip(r.instructions, r.collective, strict=True) if across)
    return {
        "cluster": cluster.name, "world_size": arguments.world_size, "ranks": ranks,
        "never_called": _never_called(delays_s, called), "written": written,
    }  # fmt: skip


def _never_called(delayed: Iterable[str], called: Iterable[str]) -> list[str]:
    """Kinds that were to take longer, of which there was none."""
    from perfmodel.execution.emulation._orders import delayed_as

    return sorted({*delayed} - {delayed_as(kind) for kind in called})


def _prices(arguments: argparse.Namespace, cluster: "Cluster") -> "tuple[Prices, dict[str, float]]":
    """With what is known of the machine that core times were measured on."""
    from perfmodel.execution.emulation import Prices, PriceTable, modelled, plugged

    occupancy = PriceTable.read(arguments.occupancy) if arguments.occupancy else None
    measured = occupancy.conditions if occupancy else {}
    name = arguments.prices
    if name and ":" in name and not Path(name).exists():
        return Prices(cluster, plugged(name), occupancy), measured
    if name:
        table = PriceTable.read(Path(name))
        return Prices(cluster, table.time_s, occupancy or table), table.conditions | measured
    from perfmodel.cost import CollectiveModel

    calibrated = CollectiveModel.load(arguments.calibration)
    return Prices(cluster, modelled(cluster, calibrated), occupancy), measured


def _asked(arguments: argparse.Namespace) -> "tuple[dict[str, float], Scenario]":
    """Delays by kind, and the network as it is to be.

    Raises:
        PerfModelError: what is set twice, or would change nothing.
    """
    from perfmodel.execution.emulation import parse_seconds
    from perfmodel.execution.emulation._orders import check_delay
    from perfmodel.planning.what_if import NETWORK, Scenario

    scenario = Scenario.parse(arguments.set)
    delays_s = dict(scenario.delays_s)
    for setting in scenario.settings:
        if not setting.name.endswith("_delay_s") and setting.name not in NETWORK:
            raise PerfModelError(
                f"emulate: the script computes for real, so that {setting.name} cannot be set; --set takes "
                f"{', '.join(NETWORK)} and delays, --straggler makes other ranks slower"
            )
        if setting.name in NETWORK and arguments.prices:
            raise PerfModelError(f"emulate: --prices know nothing of {setting.name}; leave one of the two out")
    for text in arguments.delay:
        kind, _, value = text.partition("=")
        delay_s = parse_seconds(value)
        check_delay(kind, delay_s)
        if kind in delays_s:
            raise PerfModelError(f"emulate: the delay of {kind} is set twice; give it once")
        delays_s[kind] = delay_s
    return delays_s, scenario


def _conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    if not 0 < arguments.straggler < float("inf"):
        raise PerfModelError(f"emulate: --straggler must be positive and finite, got {arguments.straggler:g}")
    if arguments.jitter is not None and not 0 <= arguments.jitter < 2:
        raise PerfModelError(f"emulate: --jitter must be between 0 and 2, got {arguments.jitter:g}")
    conditions: dict[str, Any] = {"straggler": arguments.straggler, "seed": arguments.seed}
    if arguments.jitter is not None:
        conditions["jitter"] = arguments.jitter
    if arguments.fail:
        rank, _, call = arguments.fail.partition("@")
        real = _ranks(arguments.real_ranks)
        numbers = rank.isdecimal() and call.isdecimal() and int(call) > 0
        if not numbers or int(rank) in real or int(rank) >= arguments.world_size:
            raise PerfModelError(
                f"emulate: --fail is RANK@CALL with an emulated rank, as 3@100; got {arguments.fail!r}"
            )
        conditions |= {"fail_rank": int(rank), "fail_call": int(call)}
    return conditions


def _sweep(text: str | None) -> tuple[str, tuple[float, ...]]:
    import numpy as np

    from perfmodel.execution.emulation import parse_seconds
    from perfmodel.execution.emulation._orders import check_delay

    if not text:
        return "", ()
    kind, _, span = text.partition("=")
    parts = span.split(":")
    if len(parts) != 3 or not parts[2].isdecimal() or int(parts[2]) < 2:
        raise PerfModelError(f"emulate: a sweep is KIND=FIRST:LAST:COUNT, like all_reduce=0:10ms:11; got {text!r}")
    if int(parts[2]) > _MOST_POINTS:
        raise PerfModelError(f"emulate: a sweep has at most {_MOST_POINTS:,} points; got {text!r}")
    first_s, last_s = (parse_seconds(part) for part in parts[:2])
    check_delay(kind, first_s)
    return kind, tuple(np.linspace(first_s, last_s, int(parts[2])).tolist())


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PerfModelError(f"emulate: --real-ranks is like 0 or 0,8; got {text!r}") from None


def _write(result: Any, out: Path) -> list[str]:
    from perfmodel.execution.emulation import measured_trace
    from perfmodel.ingest import write_measured_trace
    from perfmodel.ingest.tables import write_text

    written = [out / "collectives.csv", out / "iterations.csv"]
    write_text(written[0], result.collectives().to_csv(index=False))
    write_text(written[1], result.iterations().to_csv(index=False))
    if len(result.iterations()):
        written.append(out / "timeline.json.gz")
        write_measured_trace(measured_trace(result), written[-1], "emulation")
    return list(map(str, written))


def _slack(result: Any) -> dict[str, dict[str, float]]:
    """By kind of collective: how many are felt, and what delay of each would be hidden."""
    import numpy as np

    from perfmodel.execution.emulation import replay, typical

    rank = result.ranks[0]
    count = int((rank.marks.name == "iteration_end").sum())
    found = replay(typical(rank, np.arange(min(4, count - 1), count)))
    kinds = sorted({kind for kind in found.kinds if kind})
    return {
        kind: {
            "count": float(found.of(kind).sum()), "felt": found.felt(kind), "hidden_s": found.slack_s(kind),
        }
        for kind in kinds
    }  # fmt: skip


def _predicted(
    arguments: argparse.Namespace, scenario: "Scenario", delays_s: Mapping[str, float]
) -> tuple[float, float]:
    """Step time and peak memory of the same layout under the same delays and stragglers, before anything runs.

    Raises:
        PerfModelError: a layout of another number of devices, or stragglers in a pipeline.
    """
    from dataclasses import replace

    from perfmodel import catalog
    from perfmodel.planning.what_if import NAMES, Setting, step_s
    from perfmodel.prediction import check_layout, peak_memory, step_problem

    model, cluster = catalog.model(arguments.model), catalog.cluster(arguments.cluster)
    named = framework_of(arguments)
    job = named.job(
        model,
        cluster.device,
        global_batch=arguments.global_batch,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype,
        flash_attention=False,
    )
    layout = layout_of(arguments, arguments.layout, model)
    if layout.devices != arguments.world_size:
        raise PerfModelError(
            f"emulate: layout {layout} is for {layout.devices} devices, --world-size is {arguments.world_size}"
        )
    check_layout(model, cluster, job, layout)
    framework = replace(named, context_bytes=0.0)  # measured since the script joined its world, on no GPU
    fixed = step_problem(model, cluster, job, arguments.calibration, framework)
    for kind, delay_s in delays_s.items():
        if f"{kind}_delay_s" in NAMES:  # a step has no others
            scenario = scenario.and_also(Setting(f"{kind}_delay_s", "to", delay_s))
    if arguments.straggler > 1:
        if layout.pp > 1:
            raise PerfModelError("emulate: which stages a straggler slows is not said; --model takes no --straggler")
        scenario = scenario.and_also(Setting("slow_factor", "times", arguments.straggler))
    peak_bytes, _ = peak_memory(fixed, [layout])
    return step_s(fixed, layout, scenario), float(peak_bytes[0])


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    if "ranks" in report:
        for r in report["ranks"]:
            print(f"rank {r['rank']} of {report['world_size']} on {report['cluster']}: {1e3 * r['step_s']:.4g} ms, "
                  f"{1e3 * r['communication_s']:.4g} ms of it in collectives")  # fmt: skip
    elif "measured" in report:
        for row in report["measured"]:
            print(
                f"{row['collective']:>15} {row['bytes']:>10} bytes, {row['ranks']} ranks: "
                f"{1e3 * row['time_s']:.3f} ms, {1e3 * row['core_s']:.3f} ms of the core"
            )
    else:
        real = ", ".join(map(str, report["real_ranks"]))
        print(f"rank {real} of {report['world_size']} on {report['cluster']}: {report['collectives']} collectives")
        if report["iterations"]:
            _show_iterations(report)
        print(f"peak memory {report['peak_memory_bytes'] / 2**20:.0f} MiB, "
              f"{report['training_memory_bytes'] / 2**20:.0f} MiB of it since the script joined its world")  # fmt: skip
    if report.get("overhead_s", 0.0) > _BUSY_S:
        print(f"to emulate a call took {1e3 * report['overhead_s']:.3g} ms by itself, which was taken off: "
              "the machine is busy with something else, do not trust times")  # fmt: skip
    for kind in report.get("never_called", ()):
        print(f"no {kind} was called: its delay changed nothing")
    for path in report["written"]:
        print(f"wrote {path}")


def _show_iterations(report: Mapping[str, Any]) -> None:
    print(f"iteration {1e3 * report['iteration_s']:.4g} ms (median of {report['iterations']}; "
          f"{1e3 * report['iteration_p10_s']:.4g} to {1e3 * report['iteration_p90_s']:.4g}): "
          f"forward {1e3 * report['forward_s']:.4g}, backward {1e3 * report['backward_s']:.4g}, "
          f"optimizer {1e3 * report['optimizer_s']:.4g} ms")  # fmt: skip
    print(f"communication {1e3 * report['communication_s']:.4g} ms, {report['overlap']:.0%} of it overlapped; "
          f"core busy {report['utilisation']:.0%}")  # fmt: skip
    for kind, slack in report.get("slack_s", {}).items():
        print(f"{kind}: {slack['felt']:.0f} of {slack['count']:.0f} felt; "
              f"{1e3 * slack['hidden_s']:.3g} ms of delay of each are hidden for the others")  # fmt: skip
    if curve := report.get("curve"):
        print(f"{'delay':>9} {'emulated':>10} {'predicted':>10}")
        for delay_s, emulated_s, predicted_s in zip(
            curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True
        ):
            print(f"{1e3 * delay_s:6.3g} ms {1e3 * emulated_s:7.4g} ms {1e3 * predicted_s:7.4g} ms")
        print(f"{1e3 * curve['hidden_s']:.3g} ms of {curve['collective']} delay are hidden behind computing: "
              f"{curve['felt']:.0f} felt before, {curve['felt_at_most']:.0f} at the end")  # fmt: skip
    if predicted := report.get("predicted"):
        print(f"predicted {1e3 * predicted['iteration_s']:.4g} ms ({predicted['iteration_error']:+.1%}), "
              f"memory {predicted['memory_bytes'] / 2**20:.0f} MiB ({predicted['memory_error']:+.1%})")  # fmt: skip
