"""Emulated ranks against real ones on this machine:
`python validate/emulation.py [--out DIR] [--only PART...]`.

Parts, each added to the report as it is done: prices, micro, steps, host_prices, hosts, curve,
what_if, scale, memory. The steps take Linux with two cores, hosts also root and iproute2. `--only`
without a part writes the report of what was measured before.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from studies.emulation_report import emulation_report
from studies.emulation_runs import (
    MALLOC,
    PATIENCE_S,
    SCRIPTS,
    come_before_others,
    compared,
    compared_in_turn,
    data_file,
    in_turn,
    priced,
    prices_of,
    run_emulated,
    run_real,
    script,
)

from perfmodel import catalog
from perfmodel.emulate import (
    EmulatedRun,
    Emulation,
    Prices,
    emulate,
    emulated_curve,
    measure_prices,
    replay,
    typical,
)
from perfmodel.ingest.tables import write_json, write_text
from perfmodel.measure import usable_cores
from perfmodel.measure.ranks import EmulatedHosts
from perfmodel.prediction import EAGER, predict
from perfmodel.program import Kind
from perfmodel.spec import Job, Layout

SEEN, UNSEEN = ("resnet", "bert", "recommend"), ("lstm", "vit")
"""Scripts that the method was made with, and others that it was not."""
MODELS = tuple(map(" ".join, product((*SEEN, *UNSEEN), ("ddp", "fsdp"))))
STEPS = 13
ENDLESS = 10**6
"""Steps of a script that is stopped when its turns are over."""
TURN_S, START_S = 1.5, 5.0
"""How long one kind of run is awake, and how long each has to start."""
LINK_BYTES_PER_S = 5e6
"""Of the shaped links between emulated hosts."""
MICRO_ROUNDS = 5


def prices(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what collectives of two ranks take on this machine, for all emulations below."""
    # All that DDP and FSDP call.
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    table = measure_prices(2, kinds, calls=32)
    write_text(data_file(out, "prices"), table.to_csv(index=False))
    return {"jitter": float(table.jitter.iloc[0]), "rows": len(table)}


def micro(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The paper's table 1: real runs, each followed by an emulation that was told what it found.
    The medians over the rounds count, for the speed of a shared machine may change between two
    runs."""
    sizes, kinds = (
        (1 << 10, 1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24),
        ("all_reduce", "all_gather"),
    )
    rounds = []
    for number in range(MICRO_ROUNDS):
        real = measure_prices(2, kinds, sizes, calls=24)
        # Prices are read back from a file, as an emulation in use reads them.
        with tempfile.TemporaryDirectory() as folder:
            write_text(data_file(Path(folder), "micro"), real.to_csv(index=False))
            table = prices_of(Path(folder), "micro")
        emulated = measure_prices(2, kinds, sizes, calls=24, prices=priced(table))
        rounds.append(real.assign(emulated_s=emulated.time_s, round=number))
    rows = pd.concat(rounds, ignore_index=True)
    rows["overhead"] = rows.emulated_s / rows.time_s - 1
    # How far real calls differ between rounds bounds what an overhead can be told from.
    same: Any = rows.groupby(["collective", "bytes"], sort=False)
    rows["change"] = same.time_s.pct_change().abs()
    write_text(data_file(out, "micro"), rows.to_csv(index=False, float_format="%.6g"))
    medians = same[["time_s", "emulated_s", "overhead", "change"]].median().reset_index()
    names = {"time_s": "told_s", "change": "noise"}
    return {"rounds": MICRO_ROUNDS, "rows": medians.rename(columns=names).to_dict("records")}


def steps(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run real and emulated ranks in turn; the slower rank counts.

    Emulated are `both` ranks, which wait for one another (`Orders.apart`) while their calls take
    what the prices say, and `each` by itself on its own core, both awake. The cores of a shared
    machine are not independent: a rank runs faster while its neighbour waits, which real ranks do
    at the same time and ranks that are not in step do not.
    """
    table = prices_of(out)
    result = {}
    prices = priced(table)

    def emulated(command: tuple[str, ...], *ranks: int) -> Emulation:
        """Run some of two ranks in the emulator, each on a core of its own."""
        return Emulation(
            command=command,
            world_size=2,
            real_ranks=ranks,
            prices=prices,
            cores=tuple(usable_cores()[rank] for rank in ranks),
            conditions=table.conditions | {"apart": len(ranks) > 1},
        )

    for name in arguments.models or MODELS:
        model, how = name.split()
        # The turns end the script; it may not end before.
        command = script(model, ENDLESS, **({"FSDP": 1} if how == "fsdp" else {}))
        real = Emulation(command=command, world_size=2, real_ranks=(0, 1), cores=usable_cores())
        kinds = {
            "real": [real],
            "both": [emulated(command, 0, 1)],
            "each": [emulated(command, 0), emulated(command, 1)],
        }
        iterations = in_turn(
            kinds,
            turn_s=arguments.turn_seconds,
            total_s=arguments.seconds,
            start_s=START_S,
            patience_s=arguments.patience,
        )

        # Turns of earlier calls count too: quiet minutes of a shared machine are collected.
        path = data_file(out, f"steps_{name.replace(' ', '_')}")
        former = pd.read_csv(path) if path.exists() else pd.DataFrame()
        first_turn = former.turn.max() + 1 if len(former) else 0
        iterations = iterations.assign(turn=iterations.turn + first_turn)
        all_iterations = pd.concat([former, iterations], ignore_index=True)
        write_text(path, all_iterations.to_csv(index=False, float_format="%.6g"))
        result[name] = compared_in_turn(all_iterations)
        print(name, result[name], file=sys.stderr)
        saved(out, "steps", result)
    return result


def host_prices(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what collectives take between hosts in namespaces with shaped links.

    Sizes are not those of the script: it is emulated from prices of other messages.
    """
    kinds, sizes = ("all_reduce", "broadcast", "all_gather"), (1 << 8, 1 << 14, 1 << 18, 1 << 20)
    for ranks in arguments.ranks:
        with EmulatedHosts(ranks, LINK_BYTES_PER_S) as emulated:
            table = measure_prices(ranks, kinds, sizes, calls=12, hosts=emulated.hosts)
        write_text(data_file(out, f"hosts{ranks}"), table.assign(jitter=0.0).to_csv(index=False))
    return {}


def hosts(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The script on such hosts, and emulated: rank 0 alone, and all ranks apart.

    Where ranks outnumber the cores, they compute at the same time and by so much more slowly than
    one alone: its emulated others are told to.
    """
    result = {}
    command = script("mlp", 16, WIDTH=192)
    for ranks in arguments.ranks:
        # Ranks that share a core take turns on it.
        crowded = {"straggler": max(1.0, ranks / len(usable_cores()))}
        real, apart, alone = [], [], []
        with EmulatedHosts(ranks, LINK_BYTES_PER_S) as emulated:
            table = prices_of(out, f"hosts{ranks}")
            prices = priced(table)
            together = table.conditions | {"apart": True}
            for _ in range(arguments.launches):  # in turns: the speed of a shared machine drifts
                real.append(run_real(command, ranks, hosts=emulated.hosts).iteration_s())
                apart.append(
                    run_real(command, ranks, prices=prices, conditions=together).iteration_s()
                )
                alone.append(run_emulated(command, ranks, table, conditions=crowded).iteration_s())
        result[f"{ranks} ranks"] = compared(real, alone) | {
            "apart_error": compared(real, apart)["error"]
        }
    return result


def curve(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The paper's figure 4: iteration times as every all-reduce is delayed by more and more."""
    delays_s = tuple(np.linspace(0, 0.01, 11).tolist())
    every = 4
    result = {}
    table = prices_of(out)
    for name, occupancy in (
        ("library on the core (gloo)", table),
        ("library beside it (GPU)", None),
    ):
        # One run sweeps all delays three times, so that the machine's drift meets each of them.
        run = emulate(
            Emulation(
                command=script("bert", every * len(delays_s) * 3 + 1, BUCKET_MB=1, BATCH=3),
                world_size=2,
                prices=Prices(catalog.cluster("localhost"), table.time_s, occupancy),
                cores=usable_cores()[:1],
                conditions={"swept": "all_reduce", "sweep_s": delays_s, "sweep_every": every},
            )
        )
        result[name] = emulated_curve(run, "all_reduce", delays_s, every).to_dict()
    return result


def what_if(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Emulate less bandwidth and slower ranks, and predict both from one undisturbed run.

    Half the bandwidth doubles what the network takes; with a straggler everybody's next collective
    waits until it has computed as long as it does.
    """
    table = prices_of(out)
    result = {}

    def run(slower: float, **conditions: object) -> EmulatedRun:
        """Run the script on a network that is `slower` times as slow, under further conditions."""
        # Three times what gloo takes here, so that communication is a part of the step worth
        # changing.
        network = Prices(catalog.cluster("localhost"), lambda op: slower * 3 * table.time_s(op))
        return emulate(
            Emulation(
                command=script("bert", STEPS, BUCKET_MB=1, BATCH=3),
                world_size=2,
                prices=network,
                conditions=conditions,
                cores=usable_cores()[:1],
            )
        )

    # The first iterations warm up; the rest gives one typical iteration as a timeline.
    base = run(1.0)
    numbers = base.iterations().iteration.to_numpy()[3:]
    timeline = replay(typical(base.ranks[0], numbers))
    kinds = timeline.structure.class_kind
    passes_s = np.isin(kinds, (Kind.FORWARD, Kind.BACKWARD)) * timeline.durations_s

    # Each condition adds seconds to the durations that it lengthens.
    for name, emulated, more_s in (
        ("as it is", base, 0 * passes_s),
        ("half the bandwidth", run(2.0), timeline.stated_s),
        ("a quarter of the bandwidth", run(4.0), 3 * timeline.stated_s),
        ("ranks 1.2 times as slow", run(1.0, straggler=1.2), 0.2 * passes_s),
        ("ranks 1.5 times as slow", run(1.0, straggler=1.5), 0.5 * passes_s),
    ):
        predicted_s = replace(timeline, durations_s=timeline.durations_s + more_s).time_s()
        result[name] = {
            "emulated_s": float(np.median(emulated.iteration_s())),
            "predicted_s": predicted_s,
        }
    return result


def scale(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Calls answered per second and memory, by world size, where calls take no time in the
    model."""
    result = {}
    for ranks in (2, 64, 1024):
        with tempfile.TemporaryDirectory() as folder:
            # The script writes down how many calls were answered per second.
            rate = Path(folder) / "rate"
            no_time = Prices(catalog.cluster("localhost"), lambda _: 0.0)
            run = emulate(
                Emulation(
                    command=script("many_calls", 2000, rate),
                    world_size=ranks,
                    prices=no_time,
                    cores=usable_cores()[:1],
                )
            )
            result[str(ranks)] = {
                "calls_per_s": float(rate.read_text()),
                "peak_memory_bytes": run.to_dict()["peak_memory_bytes"],
            }
    return result


def memory(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a real rank since it joined its world, of the same rank emulated, and as
    predicted.

    What the libraries take for themselves, as a context does on a GPU, is what a model of next to
    no size takes.
    """
    model = catalog.model(str(SCRIPTS / "gpt.toml"))
    batch = 4
    result = {}
    no_time = Prices(catalog.cluster("localhost"), lambda _: 0.0)
    # memory that is not needed goes back to the system
    options = {"MALLOC_MMAP_THRESHOLD_": 1 << 16, "MALLOC_TRIM_THRESHOLD_": 1 << 16, "BATCH": batch}

    def taken_bytes(run: EmulatedRun) -> int:
        """Peak memory of a run since its ranks joined their world."""
        return run.to_dict()["training_memory_bytes"]

    for how, zero in (("ddp", 0), ("fsdp", 3)):
        # Under FSDP2 states, gradients and weights are sharded: ZeRO's third stage.
        options |= {"FSDP": 1} if zero else {}
        smallest = script("gpt", 4, SMALL=1, **options)
        context_bytes = taken_bytes(
            emulate(Emulation(command=smallest, world_size=2, prices=no_time))
        )
        for ranks in (2, 8):
            command = script("gpt", 4, **options)
            job = Job(
                global_batch=ranks * batch, seq_len=model.seq_len, dtype="fp32", fused_kernels=False
            )
            layout = Layout(dp=ranks, zero=zero, micro_batch=batch)
            prediction = predict(
                model,
                catalog.cluster("localhost"),
                layout,
                global_batch=job.global_batch,
                job=job,
                framework=EAGER.replace(context_bytes=float(context_bytes)),
            )
            emulated = emulate(Emulation(command=command, world_size=ranks, prices=no_time))
            figures = {
                "predicted_bytes": prediction.memory.peak,
                "emulated_bytes": taken_bytes(emulated),
                "context_bytes": context_bytes,
            }
            # The machine has cores for two real ranks.
            if ranks == 2:
                figures["real_bytes"] = taken_bytes(run_real(command, ranks))
            result[f"gpt {how}, {ranks} ranks"] = figures | {"parts": prediction.memory.to_dict()}
    return result


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "prices": prices,
    "micro": micro,
    "steps": steps,
    "host_prices": host_prices,
    "hosts": hosts,
    "curve": curve,
    "what_if": what_if,
    "scale": scale,
    "memory": memory,
}


def saved(out: Path, part: str, figures: dict[str, Any]) -> dict[str, Any]:
    """The report so far, to which a part's figures are added and which is written down."""
    path = out / "emulation.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    report[part] = report.get(part, {}) | figures
    write_json(path, report)
    return report


def main() -> int:
    """Run the parts, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the reports (md, json, csv)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=tuple(PARTS), help="some of the parts, or none"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, help="of the steps")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], help="on emulated hosts")
    parser.add_argument(
        "--launches", type=int, default=5, help="of every configuration on emulated hosts"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="of all turns of a model of the steps"
    )
    parser.add_argument(
        "--turn-seconds",
        type=float,
        default=TURN_S,
        help="of which one turn is awake; shorter ones average more of the machine's drifts",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds for which the turns of a model wait for quiet",
    )
    arguments = parser.parse_args()
    os.environ.update(MALLOC)
    chosen = tuple(PARTS) if arguments.only is None else arguments.only
    # Measuring needs the cores before other programs; writing the report does not.
    if chosen:
        come_before_others()
    # With no part asked for, the report is written from what is there.
    report: dict[str, Any] = saved(arguments.out, "prices", {})
    for part in chosen:
        report = saved(arguments.out, part, PARTS[part](arguments.out, arguments))
    text = emulation_report(report)
    write_text(arguments.out / "emulation.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
