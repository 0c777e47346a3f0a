"""One profile of one layout against other layouts, on processes of this machine.

`python validate/profiles.py [--out DIR]`.

Needs torch with gloo. Two cores should be free of others' work: what these take shows as noise. A
machine's speed drifts by more than what is looked for, so configurations take short turns, each of
which sees all of the drift.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from studies.profile_ranks import RankCase, serve

from perfmodel import catalog
from perfmodel.calibration import ProfileFit, amount, fit_profile
from perfmodel.cost.learn import fit_calibration
from perfmodel.ingest.tables import write_text
from perfmodel.prediction import predict
from perfmodel.spec import Cluster, Framework, Layout, NetworkLevel, Problem, Transformer

MODEL: Final = Transformer(
    name="small",
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=8,
    head_dim=64,
    ffn_hidden=2048,
    vocab=1024,
    seq_len=256,
    tied_embeddings=False,
    dropout=False,
)
SERIAL: Final = Framework(name="serial").replace(
    execution="compiled",
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    zero_overlaps=False,
)
"""What `profile_ranks` does: hosts compute themselves, and wait for what they send."""
CASES: Final = tuple(
    RankCase(Layout.parse(text), batch)
    for text, batch in (
        ("tp=2", 4),
        ("tp=2,micro_batch=2", 4),
        ("tp=2", 2),
        ("dp=2", 4),
        ("dp=2", 8),
        ("dp=2,micro_batch=2", 8),
        ("pp=2", 4),
        ("pp=2", 8),
        ("pp=2,micro_batch=2", 8),
        ("tp=1", 2),
        ("tp=1,micro_batch=2", 4),
    )
)
DATASETS: Final = Path(__file__).parents[1] / "datasets"
PROFILED: Final = 0
"""Which of them is profiled."""
TABLES: Final = ("cpu_torch_kernels.csv", "cpu_torch_collectives.csv")
"""Of `datasets`: what is known of such cores without the profile."""
_QUANTILE: Final = 0.25
"""Of steps: others only ever make one longer."""


@dataclass(frozen=True)
class Compared:
    """One configuration, measured and predicted."""

    case: str
    measured_s: float
    noise: float
    """Relative spread of the turns."""
    before_s: float
    after_s: float


@dataclass(frozen=True)
class ProfileStudy:
    """All configurations, the profiled one first."""

    fit: ProfileFit
    rows: tuple[Compared, ...]

    def errors(self, kinds: Sequence[str] = ("tp=2", "dp=2", "pp=2", "")) -> tuple[float, float]:
        """Mean relative errors of the layouts that were not profiled, before and after."""
        errors = []
        for row in self.rows[1:]:  # without the profiled one
            if any(kind in row.case for kind in kinds):
                before = abs(row.before_s / row.measured_s - 1)
                after = abs(row.after_s / row.measured_s - 1)
                errors.append((before, after))
        mean_before, mean_after = np.mean(errors, axis=0).tolist()
        return mean_before, mean_after

    def text(self) -> str:
        """Format the study as a page."""
        before, after = self.errors()
        lines = [
            "# One profile of one layout",
            "",
            f"{len(self.rows)} configurations of a small transformer on one or two processes of a core each (gloo), "
            f"one of them profiled ({self.rows[0].case}); without the profile the tables of such cores in `datasets` "
            f"are what is known. Mean error of the others: {before:.1%} without the profile, {after:.1%} with it; "
            f"largest noise of a measurement {max(row.noise for row in self.rows):.1%}.",
            "",
            "| configuration | measured, ms | noise | before | after |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.case} | {1e3 * r.measured_s:.1f} | {r.noise:.1%} | {r.before_s / r.measured_s - 1:+.1%} | "
            f"{r.after_s / r.measured_s - 1:+.1%} |"
            for r in self.rows
        ]
        lines += ["", "| of the others | before | after |", "|---|---|---|"]
        for name, kind in (
            ("tensor parallel", "tp=2"),
            ("data parallel", "dp=2"),
            ("pipeline", "pp=2"),
        ):
            before, after = self.errors((kind,))
            lines.append(f"| {name} | {before:.1%} | {after:.1%} |")
        lines += ["", "| parameter | profile | ms per step behind it |", "|---|---|---|"]
        lines += [
            f"| {c.name} | {amount(c)} | {1e3 * c.seconds:.3g} |"
            for c in self.fit.report.corrections
        ]
        return "\n".join([*lines, ""])


def profile_study(rounds: int, steps: int) -> ProfileStudy:
    """Run every configuration in turns, profile one, predict all with and without its profile."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        stamps = _run(rounds, steps, folder)
        measured = {n: _quantiles(stamps, n, rounds) for n in range(len(CASES))}
        # The fastest of the traced turns was disturbed least: its traces are the profile.
        traced_s = _quantiles(stamps, -1, rounds)[1]
        files = sorted((folder / f"turn{int(np.argmin(traced_s))}").glob("*.json"))
        # Without its profile a layout is predicted from tables of such cores alone.
        chosen = CASES[PROFILED]
        base, out = folder / "tables", folder / "profile"
        fit_calibration([DATASETS / name for name in TABLES], base)
        fitted = fit_profile(
            _problem(chosen), chosen.layout, files, base=base, out=out, step_s=measured[PROFILED][0]
        )
        # All with the same two calibrations, the profiled case among them.
        rows = [_compared(case, *measured[n], base, out) for n, case in enumerate(CASES)]
    return ProfileStudy(fitted, (rows[PROFILED], *rows[:PROFILED], *rows[PROFILED + 1 :]))


def _compared(
    case: RankCase, measured_s: float, turns_s: list[float], base: Path, profiled: Path
) -> Compared:
    """Compare one configuration's measured step with predictions from the tables alone, and from
    the profile too."""
    problem = _problem(case)
    before_s = predict(problem, layout=case.layout, calibration=base).step_time_s
    after_s = predict(problem, layout=case.layout, calibration=profiled).step_time_s
    return Compared(case.name, measured_s, float(np.std(turns_s) / measured_s), before_s, after_s)


def _problem(case: RankCase) -> Problem:
    """The problem that predicts a configuration."""
    cluster = _cluster()
    job = SERIAL.job(MODEL, cluster.device, global_batch=case.global_batch, dtype="fp32")
    return Problem(model=MODEL, cluster=cluster, job=job, framework=SERIAL)


def _cluster() -> Cluster:
    """This machine as a cluster whose devices are the cores that the tables measured."""
    core = catalog.device("EPYC-Genoa-core")
    level = NetworkLevel(
        name="loopback",
        size=2,
        bandwidth_bytes_per_s=core.link_bandwidth_bytes_per_s,
        latency_s=50e-6,
    )
    return Cluster(name="two cores", device=core, levels=(level,))


Stamps = dict[tuple[int, int], dict[int, list[tuple[float, float]]]]
"""By configuration (-1: the one profiled) and turn, each rank's starts and ends of steps."""


def _run(rounds: int, steps: int, folder: Path) -> Stamps:
    """Run all configurations on two processes, in turns, and collect the stamps of their steps."""
    context = get_context("spawn")
    out = context.SimpleQueue()
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Two processes for all cases: one that starts anew would find other caches.
    arguments = (2, port, MODEL, list(CASES), rounds, steps, (PROFILED, folder), out)
    ranks = [context.Process(target=serve, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    stamps_of: Stamps = defaultdict(dict)
    # Both ranks report every configuration of a round, and the profiled one reports once more,
    # traced.
    for _ in range(rounds * (2 * len(CASES) + CASES[PROFILED].layout.devices)):
        number, turn, rank, stamps = out.get()
        stamps_of[number, turn][rank] = stamps
    for rank in ranks:
        rank.join()
    return stamps_of


def _quantiles(stamps: Stamps, number: int, rounds: int) -> tuple[float, list[float]]:
    """Seconds of a step, over all turns and turn by turn: from the last rank's start to the last
    rank's end."""
    devices = CASES[number if number >= 0 else PROFILED].layout.devices
    steps_s = []
    for turn in range(rounds):
        # shape (ranks, steps, 2): start and end
        starts_and_ends = np.array([stamps[number, turn][rank] for rank in range(devices)])
        last_start, last_end = starts_and_ends.max(axis=0).T
        steps_s.append(last_end - last_start)
    turns_s = [float(np.quantile(turn_s, _QUANTILE)) for turn_s in steps_s]
    return float(np.quantile(np.concatenate(steps_s), _QUANTILE)), turns_s


def main() -> None:
    """Run all, write the report, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder for profiles.md"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of all configurations")
    parser.add_argument("--steps", type=int, default=2, help="steps of a configuration in a turn")
    arguments = parser.parse_args()
    study = profile_study(arguments.rounds, arguments.steps)
    write_text(arguments.out / "profiles.md", study.text())
    print(study.text())


if __name__ == "__main__":
    main()
