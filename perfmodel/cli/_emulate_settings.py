"""Flags of `perfmodel emulate`: prices, delays, network, conditions, and a prediction."""

import argparse
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._files import add_from, add_job_file, job_fields, require
from perfmodel.cli._flags import add_framework, add_seq_len, framework_of, layout_of
from perfmodel.emulate.environment import check_delay
from perfmodel.errors import PerfModelError
from perfmodel.units import parse_seconds, require_seed

if TYPE_CHECKING:
    from perfmodel.emulate import Network, Prices
    from perfmodel.planning.what_if import Scenario
    from perfmodel.spec import Cluster

SHAPED: Final = "shaped"
"""Word of `--peer` for a network namespace behind a link of set bandwidth and latency."""
_MOST_POINTS: Final = 1000
_SWEPT_EVERY: Final = 4


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add all flags but the script."""
    _add_ranks(command)
    _add_answers(command)
    _add_prices(command)
    _add_faults(command)
    _add_sweep(command)
    _add_run(command)
    _add_predicted_job(command)
    command.set_defaults(devices=None)
    require(command, "world_size", "cluster")


def _add_ranks(command: argparse.ArgumentParser) -> None:
    """Add the flags of the world that the script sees, and of the ranks that really run."""
    command.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks that the script sees (default: the layout's)",
    )
    command.add_argument("--cluster", help="cluster of the emulated ranks: catalog name or TOML")
    command.add_argument(
        "--real-ranks",
        default="0",
        metavar="R,...",
        help="numbers of the ranks that run the script, e.g. 0,8 (default 0)",
    )
    command.add_argument(
        "--apart",
        action="store_true",
        help="real ranks exchange no data; they only wait for one another",
    )


def _add_answers(command: argparse.ArgumentParser) -> None:
    """Add the flags that say how emulated ranks answer: in process or over a network."""
    command.add_argument(
        "--wire",
        action="store_true",
        help="send real messages: one process answers for the emulated ranks with gloo's messages over a network",
    )
    command.add_argument(
        "--peer",
        metavar="HOST",
        help="with --wire: host on which ssh starts the process that answers (default: this "
        "host); `shaped`: this host, behind a local link with the cluster's bandwidth and latency",
    )
    command.add_argument(
        "--classes",
        type=int,
        metavar="K",
        help="group identical ranks (after two trial iterations) and run one per group, K at a time",
    )


def _add_prices(command: argparse.ArgumentParser) -> None:
    """Add the flags of collective times: from a calibration, or a user's table or function."""
    command.add_argument(
        "--calibration",
        type=Path,
        metavar="DIR",
        help="calibration for collective times, made by 'perfmodel fit'",
    )
    command.add_argument(
        "--prices",
        metavar="FILE|MODULE:FUNCTION",
        help="take the times of collectives from a csv (collective,ranks,bytes,time_s[,core_s]), "
        "or from a function of perfmodel.ops.Collective, instead of the calibration",
    )
    command.add_argument(
        "--occupancy",
        type=Path,
        metavar="FILE",
        help="CSV file with the columns of --prices; core_s is the CPU time of a collective",
    )
    command.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="instead of a script: measure time and CPU time of torch's collectives between N local ranks",
    )
    command.add_argument(
        "--delay",
        action="append",
        default=[],
        metavar="KIND=TIME",
        help="delay added to collectives, such as all_reduce=2ms",
    )
    add_job_file(
        command,
        "network, as for whatif: inter_node_bandwidth=2x; or ",
        positional=False,
        layout=True,
    )


def _add_faults(command: argparse.ArgumentParser) -> None:
    """Add the flags of faults: slow ranks, ranks whose times vary, a rank that dies."""
    command.add_argument(
        "--straggler",
        type=float,
        default=1.0,
        metavar="F",
        help="emulated ranks take F times as long",
    )
    command.add_argument(
        "--jitter",
        type=float,
        metavar="S",
        help="log-normal spread of emulated ranks' compute time",
    )
    command.add_argument(
        "--fail",
        metavar="RANK@CALL",
        help="make an emulated rank fail at the CALL-th collective of all ranks",
    )


def _add_sweep(command: argparse.ArgumentParser) -> None:
    """Add the flags of a sweep, in which one run tries all delays, a few iterations each."""
    command.add_argument(
        "--sweep",
        metavar="KIND=FIRST:LAST:COUNT",
        help="try several delays, such as all_reduce=0:10ms:11",
    )
    command.add_argument(
        "--every",
        type=int,
        default=_SWEPT_EVERY,
        metavar="I",
        help="iterations per delay of a sweep",
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the sweep's curve")
    command.add_argument("--seed", type=int, default=0, help="seed of the jitter (default 0)")


def _add_run(command: argparse.ArgumentParser) -> None:
    """Add the flags of the run itself: cores, time limit and output folder."""
    command.add_argument(
        "--pin",
        action="store_true",
        help="pin every real rank to its own core and let its collective threads run first",
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="stop if a rank calls no collective for S seconds",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the tables and the timeline (Perfetto)"
    )


def _add_predicted_job(command: argparse.ArgumentParser) -> None:
    """Add the flags of the model and layout whose predicted step the run is compared with."""
    command.add_argument(
        "--model",
        help="also compare with a prediction: JOB.toml, or a model together with --layout and "
        "--global-batch",
    )
    add_from(command)
    command.add_argument("--layout", help="parallel layout, e.g. tp=8,dp=2")
    add_framework(command)
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")
    add_seq_len(command)
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "tf32"), help="element type (default fp32)"
    )


def prices_of(
    arguments: argparse.Namespace, cluster: "Cluster"
) -> "tuple[Prices, dict[str, float]]":
    """Collective prices with CPU times measured on this machine."""
    from perfmodel.emulate import Prices, PriceTable, modelled, plugged

    # Three sources of prices: a function, a table, or the calibration. Occupancy says how much of
    # a core each collective takes.
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


def wire_of(arguments: argparse.Namespace, cluster: "Cluster") -> "Network | None":
    """Return latency and bandwidth that `--wire` adds: those of the level that joins all ranks.

    Nothing is on top where the emulated cluster is this machine.
    """
    from perfmodel.emulate import Network

    if not arguments.wire:
        if arguments.peer:
            raise PerfModelError("emulate: --peer needs --wire; give both")
        return None

    # On the wire nothing is priced: messages take as long as they take.
    priced_flags = {
        "--prices": arguments.prices,
        "--occupancy": arguments.occupancy,
        "--calibration": arguments.calibration,
        "--sweep": arguments.sweep,
        "--apart": arguments.apart,
    }
    misplaced = [name for name, value in priced_flags.items() if value]
    if misplaced:
        raise PerfModelError(
            f"emulate: {', '.join(misplaced)} cannot be combined with --wire, where messages take real time; "
            "leave one out"
        )
    if cluster.name == "localhost":
        if arguments.peer == SHAPED:
            raise PerfModelError(
                "emulate: --peer shaped needs the network of a cluster, and localhost has none; give --cluster"
            )
        return Network()
    if arguments.peer == SHAPED:
        # The link itself is as slow as the cluster's.
        return Network()
    level = cluster.levels[cluster.level_of(arguments.world_size)]
    return Network(level.latency_s, level.bandwidth_bytes_per_s)


@contextmanager
def placed(arguments: argparse.Namespace, cluster: "Cluster") -> "Iterator[dict[str, Any]]":
    """Context with the fields of `Emulation` that place real ranks and the process of `--wire`."""
    from perfmodel.emulate import PeerPlace
    from perfmodel.measure.ranks import EmulatedHosts

    if arguments.peer is None:
        yield {}
    elif arguments.peer != SHAPED:
        yield {"peer": PeerPlace.named(arguments.peer)}
    else:
        level = cluster.levels[cluster.level_of(arguments.world_size)]
        with EmulatedHosts(2, level.bandwidth_bytes_per_s, level.latency_s) as emulated:
            # Gloo connects to the lower address, which the emulated ranks therefore have.
            peer_host, real_host = emulated.hosts
            real_ranks = len(ranks_of(arguments.real_ranks))
            yield {"peer": PeerPlace.on_host(peer_host), "hosts": (real_host,) * real_ranks}


def delays_and_network(arguments: argparse.Namespace) -> "tuple[dict[str, float], Scenario]":
    """Delays by kind of collective, and the changed network.

    Raises:
        PerfModelError: what is set twice, or would change nothing.
    """
    from perfmodel.planning.what_if import NETWORK, Scenario

    scenario = Scenario.parse(arguments.set)
    delays_s = dict(scenario.delays_s)
    # A script computes at this machine's own speed: only its network and its delays are emulated.
    for setting in scenario.settings:
        if not setting.name.endswith("_delay_s") and setting.name not in NETWORK:
            raise PerfModelError(
                f"emulate: {setting.name} cannot be set, because the script really computes; --set takes "
                f"{', '.join(NETWORK)} and delays, and --straggler slows other ranks"
            )
        if setting.name in NETWORK and arguments.prices:
            raise PerfModelError(
                f"emulate: {setting.name} does not change --prices; leave one of the two out"
            )
    for text in arguments.delay:
        kind, _, value = text.partition("=")
        delay_s = parse_seconds(value)
        check_delay(kind, delay_s)
        if kind in delays_s:
            raise PerfModelError(f"emulate: the delay of {kind} is given twice; give it once")
        delays_s[kind] = delay_s
    return delays_s, scenario


def conditions_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return an emulation's conditions besides the network: slowness, jitter, a failing rank."""
    if not 0 < arguments.straggler < float("inf"):
        raise PerfModelError(
            f"emulate: --straggler must be positive and finite, got {arguments.straggler:g}"
        )
    if arguments.jitter is not None and not 0 <= arguments.jitter < 2:
        raise PerfModelError(f"emulate: --jitter must be between 0 and 2, got {arguments.jitter:g}")
    require_seed(arguments.seed)
    conditions: dict[str, Any] = {"straggler": arguments.straggler, "seed": arguments.seed}
    if arguments.jitter is not None:
        conditions["jitter"] = arguments.jitter
    # Only an emulated rank can be made to fail, because a real one is the user's process.
    if arguments.fail:
        rank, _, call = arguments.fail.partition("@")
        real = ranks_of(arguments.real_ranks)
        numbers = rank.isdecimal() and call.isdecimal() and int(call) > 0
        if not numbers or int(rank) in real or int(rank) >= arguments.world_size:
            raise PerfModelError(
                f"emulate: --fail is RANK@CALL with an emulated rank, as 3@100; got {arguments.fail!r}"
            )
        conditions |= {"fail_rank": int(rank), "fail_call": int(call)}
    return conditions


_SWEEP: Final = re.compile(r"(?P<first>[^:]*):(?P<last>[^:]*):(?P<count>\d+)")


def sweep_of(text: str | None) -> tuple[str, tuple[float, ...]]:
    """The kind of collective and the delays in seconds that `--sweep` states, if given."""
    import numpy as np

    if not text:
        return "", ()

    # The first and last delay, and the number of delays, are separated by colons.
    kind, _, span = text.partition("=")
    sweep = _SWEEP.fullmatch(span)
    count = int(sweep["count"]) if sweep else 0
    if sweep is None or count < 2:
        raise PerfModelError(
            f"emulate: a sweep is KIND=FIRST:LAST:COUNT, like all_reduce=0:10ms:11; got {text!r}"
        )
    if count > _MOST_POINTS:
        raise PerfModelError(f"emulate: a sweep has at most {_MOST_POINTS:,} points; got {text!r}")

    first_s = parse_seconds(sweep["first"])
    last_s = parse_seconds(sweep["last"])
    check_delay(kind, first_s)
    return kind, tuple(np.linspace(first_s, last_s, count).tolist())


def ranks_of(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PerfModelError(f"emulate: --real-ranks is like 0 or 0,8; got {text!r}") from None


def predicted_step(
    arguments: argparse.Namespace, scenario: "Scenario", delays_s: Mapping[str, float]
) -> tuple[float, float]:
    """Predict step time and peak memory of the same layout with the same delays and stragglers.

    Raises:
        PerfModelError: a layout of another number of devices, or stragglers in a pipeline.
    """

    from perfmodel import catalog
    from perfmodel.planning.what_if import NAMES, Setting, step_s
    from perfmodel.prediction import check_layout, step_problem_of
    from perfmodel.prediction.memory import peak_memory
    from perfmodel.spec import Problem

    model = catalog.model(arguments.model)
    cluster = catalog.cluster(arguments.cluster)
    named = framework_of(arguments)
    job = named.job(
        model,
        cluster.device,
        global_batch=arguments.global_batch,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype or "fp32",
        **{"flash_attention": False} | job_fields(arguments) | arguments.of_job,
    )
    # The script's memory is measured from when it joined its world, on no GPU: no context is in
    # it.
    framework = named.replace(context_bytes=0.0)
    asked = Problem(model=model, cluster=cluster, job=job, framework=framework)
    layout = layout_of(asked, arguments.layout)
    if layout.devices != arguments.world_size:
        raise PerfModelError(
            f"emulate: layout {layout.label} has {layout.devices} devices, but --world-size is "
            f"{arguments.world_size}; make them equal"
        )
    check_layout(model, cluster, job, layout)
    problem = step_problem_of(asked, arguments.calibration)
    for kind, delay_s in delays_s.items():
        # Collectives that a predicted step does not have cannot delay it.
        if f"{kind}_delay_s" in NAMES:
            scenario = scenario.and_also(Setting(f"{kind}_delay_s", "to", delay_s))
    if arguments.straggler > 1:
        if layout.pp > 1:
            raise PerfModelError(
                "emulate: --straggler cannot be compared with --model under pipeline parallelism, because it "
                "names no stage; leave one out"
            )
        scenario = scenario.and_also(Setting("slow_factor", "times", arguments.straggler))
    peak_bytes, _ = peak_memory(problem, [layout])
    return step_s(problem, layout, scenario), float(peak_bytes[0])
