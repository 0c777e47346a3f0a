"""One real rank, the others on the wire, against real ranks:
`python validate/emulation_wire.py [--only PART...]`.

Parts, each added to the report (`emulation_wire.md`) as it is done: micro, models, ranks, delay,
turns. Two cores. `--only` without a part writes the report of what was measured before.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from studies.emulation_runs import (
    NOISE_OF_CLAIMS,
    PATIENCE_S,
    at_once,
    blocks_in_turn,
    claims,
    come_before_others,
    in_turn,
    judged,
    script,
    waited_text,
)

from perfmodel.emulate import EmulatedRun, Emulation, Network, emulate
from perfmodel.emulate.wire import compiled_loop
from perfmodel.ingest.tables import write_json, write_text
from perfmodel.measure import usable_cores

KINDS = ("all_reduce", "all_gather")
SIZES = tuple(1 << n for n in (10, 12, 15, 18, 21, 24, 27, 30))
"""Collectives and sizes of the paper's table 1."""
PAPER_TABLE_1_US = {
    "all_reduce": (
        (435.2, 418.8),
        (526.5, 511.0),
        (564.9, 552.3),
        (1326, 1314),
        (7661, 7655),
        (59.0e3, 58.9e3),
        (470e3, 469e3),
        (3760e3, 3760e3),
    ),
    "all_gather": (
        (282.6, 276.2),
        (306.5, 300.2),
        (329.0, 322.6),
        (868.9, 859.6),
        (4928, 4929),
        (37.5e3, 37.5e3),
        (298e3, 298e3),
        (2408e3, 2407e3),
    ),
}
"""The paper's times of a call, real and emulated, by size."""
PAPER_TABLE_3_MS = {"bert": (628, 629), "resnet152": (1063, 1061), "deeplight": (726, 727)}
"""The paper's steps (of DeepLight epochs), real and emulated."""
MODELS = {"bert": 4, "resnet152": 8, "deeplight": 4}
"""Steps of each."""
REDUCED_BYTES = 1 << 24
BARS = {"micro": 0.04, "turns": 0.02}
RANKS = (2, 4, 8, 16, 32, 64)
DELAYS_S = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16)
TURNS = tuple(map(" ".join, product(("resnet", "bert", "recommend", "vit"), ("ddp", "fsdp"))))
TURN_S, START_S, TOTAL_S = 1.5, 15.0, 45.0
ENDLESS = 10**6


def both(command: tuple[str, ...]) -> dict[str, Emulation]:
    """Run two real ranks, then one of them with the other on the wire."""
    common: dict[str, Any] = {
        "command": command,
        "world_size": 2,
        "cores": usable_cores(),
        "timeout_s": 600.0,
    }
    return {
        "real": Emulation(**common, real_ranks=(0, 1)),
        "wire": Emulation(**common, wire=Network()),
    }


def core_s(run: EmulatedRun, rank: int) -> float:
    """Processor seconds of a real rank in a median iteration."""
    table: Any = run.iterations()
    # The first iterations warm up: memory and code are touched for the first time.
    table = table[(table["rank"] == rank) & (table.iteration > 1)]
    return float((table.utilisation * table.time_s).median())


def micro(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 1: a block of calls one after another in the real world, one in the emulated world, and
    so on."""
    # The command is filled in below, once its pipes are there.
    worlds = both(("true",))
    command = partial(script, "blocks")
    with at_once():
        table = blocks_in_turn(
            worlds["real"],
            worlds["wire"],
            lambda *paths: command(*paths, ",".join(KINDS), ",".join(map(str, SIZES))),
        )
    rows = []
    for (kind, nbytes), blocks in table.groupby(["collective", "bytes"]):
        # Two halves of the same real blocks differ by noise alone.
        even = blocks.real_s[blocks.block % 2 == 0].median()
        odd = blocks.real_s[blocks.block % 2 == 1].median()
        rows.append(
            {
                "collective": kind,
                "bytes": nbytes,
                "time_s": float(blocks.real_s.median()),
                "wire_s": float(blocks.emulated_s.median()),
                # Blocks that follow each other are compared, so that the machine's drift cancels.
                "overhead": float((blocks.emulated_s / blocks.real_s).median() - 1),
                "noise": float(abs(even / odd - 1)),
                "blocks": len(blocks),
            }
        )
    return rows


def models(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 3: iterations of real and emulated models, and processor time by process."""
    rows = []
    for name in arguments.models or MODELS:
        runs = {
            kind: emulate(emulation)
            for kind, emulation in both(script("sized", name, MODELS[name])).items()
        }
        # The peer is the process that answers for all ranks that are not real.
        peer = runs["wire"].peer
        if peer is None:
            raise RuntimeError(f"{name}: nobody was on the wire")
        times_s = {
            kind: run.iterations().groupby("iteration").time_s.max() for kind, run in runs.items()
        }
        rows.append(
            {
                "model": name,
                "real_s": float(times_s["real"].median()),
                "wire_s": float(times_s["wire"].median()),
                "real_sd_s": float(times_s["real"].std()),
                "wire_sd_s": float(times_s["wire"].std()),
                "real_core_s": core_s(runs["real"], 1),
                "peer_core_s": peer.cpu_s / MODELS[name],
                "bytes_per_step": peer.nbytes / MODELS[name],
            }
        )
    return rows


def ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Processor time of the process that answers for all other ranks, as the world grows, beside
    that of the one real rank."""
    rows = []
    steps = 12
    for world_size in RANKS:
        # One reduction a step: what the peer does per message is all there is.
        command = script("reduce", REDUCED_BYTES, steps)
        run = emulate(
            Emulation(command=command, world_size=world_size, cores=usable_cores(), wire=Network())
        )
        if run.peer is None:
            raise RuntimeError("nobody was on the wire")
        rows.append(
            {
                "ranks": world_size,
                "iteration_s": float(run.iterations().time_s.median()),
                "rank_core_s": core_s(run, 0),
                "peer_core_s": run.peer.cpu_s / steps,
                "messages": run.peer.messages / steps,
            }
        )
    return rows


def delay(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Figure 4: iteration times as every all-reduce is delayed."""
    rows = []
    for delay_s in DELAYS_S:
        emulation = both(script("bert", 16))["wire"]
        delayed = Emulation(
            **{**vars(emulation), "conditions": {"delays_s": {"all_reduce": delay_s}}}
        )
        run = emulate(delayed)
        # How many reductions a step has decides where the curve bends.
        reductions = (run.collectives().kind == "all_reduce").sum() / 16
        rows.append(
            {
                "delay_s": delay_s,
                "iteration_s": float(run.to_dict()["iteration_s"]),
                "calls": float(reductions),
            }
        )
    return rows


def turns(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One rank alone and two real ones, awake in turn; turns of which others took more of the cores
    count less."""
    rows = []
    for name in arguments.models or TURNS:
        model, how = name.split()
        kinds = both(script(model, ENDLESS, **({"FSDP": 1} if how == "fsdp" else {})))
        # A second emulated world keeps the other core as busy as the second real rank does.
        neighbour = replace(kinds["wire"], cores=usable_cores()[1::-1])
        table = in_turn(
            {"real": [kinds["real"]], "wire": [kinds["wire"], neighbour]},
            turn_s=TURN_S,
            total_s=TOTAL_S,
            start_s=START_S,
            patience_s=arguments.patience,
        )
        # Others' work makes turns longer: the half of them with least of it counts.
        quiet: Any = table[table.stolen <= table.groupby("kind").stolen.transform("median")]
        quiet = quiet.assign(core_s=quiet.utilisation * quiet.time_s)
        medians: Any = quiet.groupby("kind")[["time_s", "core_s"]].median()
        # Processor time is compared beside wall time, which other programs change more.
        errors = medians.loc["wire"] / medians.loc["real"] - 1
        real: Any = quiet[quiet.kind == "real"]
        even = real[real.turn % 2 == 0][["time_s", "core_s"]].median()
        odd = real[real.turn % 2 == 1][["time_s", "core_s"]].median()
        noise = (even / odd - 1).abs()
        rows.append(
            {
                "script": name,
                "real_s": float(medians.time_s["real"]),
                "wire_s": float(medians.time_s["wire"]),
                "error": float(errors.time_s),
                "noise": float(noise.time_s),
                "core_error": float(errors.core_s),
                "core_noise": float(noise.core_s),
                "stolen": float(quiet.stolen.median()),
                "iterations": int((quiet.kind == "wire").sum()),
                "waited_s": float(table.groupby(["kind", "turn"]).waited_s.first().sum()),
            }
        )
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "micro": micro,
    "models": models,
    "ranks": ranks,
    "delay": delay,
    "turns": turns,
}
"""Part of the report -> what measures its rows."""


def _paper_overhead(row: dict[str, Any]) -> str:
    """Overhead of the paper's emulated call over its real one."""
    real_us, emulated_us = PAPER_TABLE_1_US[row["collective"]][SIZES.index(row["bytes"])]
    return f"{emulated_us / real_us - 1:+.1%}"


def _judged_call(row: dict[str, Any]) -> str:
    """Verdict on whether a call's overhead is below the bar, given its noise."""
    # Noise may hide an overhead as well as make one.
    if row["overhead"] + row["noise"] <= BARS["micro"]:
        return "yes"
    return "no" if row["overhead"] - row["noise"] > BARS["micro"] else "too noisy"


def _core_noise_text(row: dict[str, Any]) -> str:
    """The noise of a rank's processor time, where it was measured, as text."""
    return f"{row['core_noise']:.1%}" if "core_noise" in row else "not measured"


def _judged_core(row: dict[str, Any]) -> str:
    """Verdict on whether a rank's processor time is within the bar; earlier runs lack its noise."""
    return (
        judged(row["core_error"], row["core_noise"], BARS["turns"])
        if "core_noise" in row
        else "not judged"
    )


def _ms(seconds: float) -> str:
    """Format a time for a table, in milliseconds below a second."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


COLUMNS: dict[str, tuple[str, str, dict[str, Callable[[dict[str, Any]], str]]]] = {
    "micro": (
        "Collectives by themselves (NeuronaBox, table 1)",
        "Two ranks. As in the paper, calls follow one another, after warm-up; of less than 16 MiB 100 make a block. "
        "Blocks of the real and of the emulated world take turns, so that the machine's drift meets both; both ran at "
        "real-time priority. Overhead: "
        "median of each emulated block over the real one before it. Noise: the real world's even blocks against its "
        f"odd ones. Within: the overhead is at most {BARS['micro']:.0%}, as the paper words its bar, even with the "
        "noise added; too noisy: only without it. The caption of the paper's table says 2 % for all-gathers; "
        "in the table the emulated calls take 0 to 4 % less than the real ones.",
        {
            "collective": lambda r: r["collective"],
            "bytes": lambda r: str(r["bytes"]),
            "real": lambda r: _ms(r["time_s"]),
            "other on the wire": lambda r: _ms(r["wire_s"]),
            "overhead": lambda r: f"{r['overhead']:+.1%}",
            "the paper's": _paper_overhead,
            "noise": lambda r: f"{r['noise']:.1%}",
            "within": lambda r: _judged_call(r),
            "blocks": lambda r: str(r["blocks"]),
        },
    ),
    "models": (
        "Models of the paper's sizes (tables 2 and 3)",
        "Two ranks, DDP; median step and its standard deviation. Core: processor seconds a step of the second rank and "
        "of the process that stands for it. Steps have next to no data, so that messages are most of them.",
        {
            "model": lambda r: r["model"],
            "real": lambda r: f"{_ms(r['real_s'])} ± {_ms(r['real_sd_s'])}",
            "other on the wire": lambda r: f"{_ms(r['wire_s'])} ± {_ms(r['wire_sd_s'])}",
            "difference": lambda r: f"{r['wire_s'] / r['real_s'] - 1:+.1%}",
            "the paper's": lambda r: (
                f"{PAPER_TABLE_3_MS[r['model']][1] / PAPER_TABLE_3_MS[r['model']][0] - 1:+.1%}"
            ),
            "core, second rank": lambda r: _ms(r["real_core_s"]),
            "core, on the wire": lambda r: _ms(r["peer_core_s"]),
            "bytes a step": lambda r: f"{r['bytes_per_step'] / 2**20:.0f} MiB",
        },
    ),
    "ranks": (
        "One process for more and more ranks",
        f"An all-reduce of {REDUCED_BYTES / 2**20:.0f} MiB a step. Real ranks would take their number "
        "less one times the core of the real one.",
        {
            "ranks": lambda r: str(r["ranks"]),
            "step": lambda r: _ms(r["iteration_s"]),
            "core, the real rank": lambda r: _ms(r["rank_core_s"]),
            "core, all others": lambda r: _ms(r["peer_core_s"]),
            "all others would take": lambda r: _ms((r["ranks"] - 1) * r["rank_core_s"]),
            "messages a step": lambda r: f"{r['messages']:.0f}",
        },
    ),
    "delay": (
        "Delay of every all-reduce (figure 4)",
        "A small BERT, each delay a run of its own.",
        {
            "delay": lambda r: _ms(r["delay_s"]),
            "step": lambda r: _ms(r["iteration_s"]),
            "all-reduces a step": lambda r: f"{r['calls']:.1f}",
        },
    ),
    "turns": (
        "One real rank alone against two",
        "Ranks keep to a core each. Medians of iterations of runs that are awake in turn, in the quieter half of the "
        f"turns; bar {BARS['turns']:.0%}. Core: the rank's processor time an iteration, which others' load moves less. "
        "Taken: core seconds a second that others took. Noise: the real run's even turns against its odd ones; an "
        f"error is judged only where its noise is at most {NOISE_OF_CLAIMS:.0%}.",
        {
            "script": lambda r: r["script"],
            "real": lambda r: _ms(r["real_s"]),
            "alone": lambda r: _ms(r["wire_s"]),
            "error": lambda r: f"{r['error']:+.1%}",
            "noise": lambda r: f"{r['noise']:.1%}",
            "within": lambda r: judged(r["error"], r["noise"], BARS["turns"]),
            "core": lambda r: f"{r['core_error']:+.1%}",
            "its noise": lambda r: _core_noise_text(r),
            "core within": lambda r: _judged_core(r),
            "taken": lambda r: f"{r['stolen']:.2f}",
            "iterations": lambda r: str(r["iterations"]),
        },
    ),
}


def report(results: dict[str, Any]) -> str:
    """Format the page of all parts that were measured so far."""
    lines = [
        "# One rank real, the others on the wire",
        "",
        "`python validate/emulation_wire.py` printed this.",
        "",
    ]
    for part, (title, note, columns) in COLUMNS.items():
        if part not in results:
            continue
        load = results[part]["load"]
        lines += [
            f"## {title}",
            "",
            f"{note} Processes that wanted a core meanwhile: {load:.1f} of 2 cores.",
            "",
        ]
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in results[part]["rows"]:
            cells = [cell(row) for cell in columns.values()]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, *missed(results), ""])


def missed(results: dict[str, Any]) -> list[str]:
    """Sentences on what is above its bar, and on how busy the machine was."""
    lines = ["## What is missing or missed", ""]
    if calls := results.get("micro", {}).get("rows", ()):
        lines.append(f"- {COLUMNS['micro'][0]}: {_calls_text(calls)}")
    if steps := results.get("turns", {}).get("rows", ()):
        judgements = [judged(row["error"], row["noise"], BARS["turns"]) for row in steps]
        lines.append(
            f"- {COLUMNS['turns'][0]}: {claims(judgements, BARS['turns'])}. {waited_text(steps)}"
        )
        lines.append(_cores_text(steps, results["turns"].get("neighbour", False)))
    # Load is told, as it is the first thing to ask of figures that miss their bar.
    if loads := [result["load"] for result in results.values()]:
        lines.append(
            f"- {min(loads):.0f} to {max(loads):.0f} processes wanted the 2 cores meanwhile. Two real ranks suffer "
            "from that more than one whose peer sleeps; run this on a quiet machine before steps are judged."
        )
    lines += [
        _language_text(results),
        "- Two cores of a shared host slow each other: while a real second rank computes, the first is slower than "
        "beside a process that waits. Ranks on nodes of their own do not show this.",
        "- No GPU and no NCCL was at hand.",
    ]
    return lines


def _calls_text(rows: Sequence[dict[str, Any]]) -> str:
    """Sentence on how many overheads are within the bar, and which are not."""
    bar = BARS["micro"]
    judgements = [_judged_call(row) for row in rows]
    longer = sorted(
        (row for row in rows if row["overhead"] > bar), key=lambda row: -row["overhead"]
    )
    close = sum(abs(row["overhead"]) <= bar for row in rows)
    # By size of the miss, the worst first.
    missed_by = ", ".join(
        f"{row['collective']} of {row['bytes']} {row['overhead']:+.1%}" for row in longer
    )
    return (
        f"{len(rows) - len(longer)} of {len(rows)} take at most {bar:.0%} longer than real ones, "
        f"{judgements.count('yes')} of them even with the noise added{f'; longer: {missed_by}' if longer else ''}. "
        f"{close} are within {bar:.0%} either way. Where emulated calls are faster, they lack the second real "
        "rank's own work at least. An all-gather's answer is the rank's own data, which have "
        "to arrive before they can be sent back; a real neighbour sends at once."
    )


def _cores_text(rows: Sequence[dict[str, Any]], neighbour: bool) -> str:
    """Sentence on processor times, and on what kept the second core busy."""
    # Such turns flatter the emulation.
    if not neighbour:
        return (
            "- These turns were measured before a second emulated world kept the other core as busy as a second real "
            "rank does: beside a core that waits, the real rank runs faster. Run "
            "`python validate/emulation_wire.py --only turns` on a quiet machine."
        )
    judgements = [_judged_core(row) for row in rows]
    return (
        f"- Of processor times {judgements.count('yes')} of {len(rows)} are within {BARS['turns']:.0%}, "
        f"{judgements.count('no')} are not, {judgements.count('too noisy')} are too noisy. A second emulated world "
        "kept the other core as busy as a second real rank does."
    )


def _language_text(results: dict[str, Any]) -> str:
    """Sentence on which message loop was measured."""
    parts = [
        part
        for part in ("micro", "turns")
        if part in results and not results[part].get("compiled", False)
    ]
    if not parts:
        return "- Messages were answered by the loop in C."
    return (
        f"- {' and '.join(parts)}: messages were answered in Python, whose code is cold after every pause, so that a "
        "small call takes longer than by gloo's own thread. The other parts were answered by the loop in C, which is "
        "used where a C compiler is."
    )


def main() -> int:
    """Measure the parts that are asked for; print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--models", nargs="*", help="of the parts models and turns")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds for which the turns of a script wait for quiet",
    )
    arguments = parser.parse_args()
    results_file = arguments.out / "emulation_wire.json"
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    if arguments.only:
        come_before_others()
    for part in arguments.only:
        rows = PARTS[part](arguments)
        results[part] = {
            "rows": rows,
            # Others' load and the message loop decide how far the figures can be trusted.
            "load": os.getloadavg()[1],
            "compiled": compiled_loop() is not None,
            "neighbour": part == "turns",
        }
        # Each part takes minutes: what was measured is kept before the next one begins.
        write_json(results_file, results)
        write_text(arguments.out / "emulation_wire.md", report(results))
    write_text(arguments.out / "emulation_wire.md", report(results))
    print(report(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
