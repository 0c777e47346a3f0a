"""Seconds from a newcomer's question to its answer: the journeys of README, every command in a
process of its own.

    python benchmarks/journeys.py            a table of this checkout
    python benchmarks/journeys.py --page     put the table into docs/explanation/seconds.md
    python benchmarks/journeys.py --before CHECKOUT
                                             beside those of another one, run in turn

Seconds are those of processors, which other programs of a machine change least. The first run of a
command finds empty caches, as after an installation; the second number is the best of those after
it.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parents[1]
PAGE: Final = HERE / "docs" / "explanation" / "seconds.md"
AGAIN: Final = 2
"""Runs after the first."""
GPT3: Final = "--model gpt3-175b --cluster dgx-a100 --global-batch 1536"
LLAMA: Final = "--model llama3-70b --cluster dgx-h100"
GRADIENT: Final = """
import jax, perfmodel as pm
step_s = pm.step_time_function("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)
jax.block_until_ready(step_s.value_and_grad(step_s.nominal))
"""


@dataclass(frozen=True)
class Journey:
    """A question and what answers it."""

    name: str
    """Name of its ratio in `bench.json`."""
    question: str
    command: str
    """Words after `perfmodel`, or Python that begins with a new line."""
    most_s: float | None = None
    """Seconds that the answer may take, where there is a limit."""
    limits_first: bool = False
    """Whether the limit also holds for the first run, with empty caches."""

    @property
    def argv(self) -> list[str]:
        """Arguments of Python."""
        if self.command.startswith("\n"):
            return ["-c", self.command]
        return ["-m", "perfmodel", *self.command.split()]

    @property
    def shown(self) -> str:
        """The command as a table has it."""
        if self.command == GRADIENT:
            return "pm.step_time_function(...).value_and_grad(...)"
        return (
            self.command.strip() if self.command.startswith("\n") else f"perfmodel {self.command}"
        )


JOURNEYS: Final = (
    Journey("import", "Is it installed?", "\nimport perfmodel", 0.3),
    Journey("help", "What can it do?", "--help", 0.5),
    Journey("catalog", "What does it know?", "catalog", 0.5),
    Journey("models", "Which models does it know?", "catalog models", 0.5),
    Journey(
        "plan",
        "Which layout is best?",
        f"search {GPT3} --devices 1024 --framework megatron-core --top 2 --script --out plan.json "
        "--trace plan.trace.json.gz --png plan.png",
        6.0,
    ),
    Journey(
        "predict",
        "How long does a step of this layout take?",
        f"predict {GPT3} --layout tp=8,pp=16,dp=8",
        2.0,
    ),
    Journey(
        "predict_file",
        "How long does my script's step take?",
        "predict --from train.sh --cluster dgx-h100",
    ),
    Journey(
        "search_file",
        "What should my script say instead?",
        "search --from train.sh --cluster dgx-h100",
    ),
    Journey(
        "check", "Is my run healthy?", "check --from train.sh --log train.log --cluster dgx-h100"
    ),
    Journey(
        "clusters",
        "Which cluster?",
        "compare-clusters llama3-70b --clusters h100:256,b200:128 --global-batch 512 --tokens 1T",
    ),
    Journey(
        "whatif",
        "What would a faster network do?",
        f"whatif {LLAMA} --layout tp=8,pp=4,dp=8 --global-batch 512 --set inter_node_bandwidth=2x",
    ),
    Journey(
        "serve",
        "How fast would it answer?",
        f"serve {LLAMA} --prompt-tokens 1024 --output-tokens 256",
    ),
    Journey(
        "report",
        "What do I show to those who decide?",
        f"report {GPT3} --devices 1024 --framework megatron-core --html report.html",
        20.0,
    ),
    Journey(
        "gradient",
        "How does the step time depend on its parameters?",
        GRADIENT,
        5.0,
        limits_first=True,
    ),
)


@dataclass(frozen=True)
class Seconds:
    """Processor seconds of a command."""

    first: float
    """With empty caches."""
    again: float
    """The best of later runs."""


def processor_seconds(checkout: Path, argv: Sequence[str], folder: Path) -> float:
    """Processor seconds of Python on the package of a checkout.

    Args:
        folder: where it runs, with the caches of this checkout inside.
    """
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "PERFMODEL_CACHE": str(folder / "cache"),
    }
    # A package that is installed has its byte code, whatever this shell says of writing it.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *argv], check=True, cwd=folder, env=environment, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_in_turn(
    checkouts: Sequence[Path], journeys: Sequence[Journey]
) -> dict[str, list[Seconds]]:
    """Seconds of every journey on every checkout, by the journey's name; checkouts take turns at
    every run."""
    seconds = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(i) for i in range(len(checkouts))]
        for checkout, folder in zip(checkouts, folders, strict=True):
            folder.mkdir()
            # This also compiles the package, which an installation has done.
            processor_seconds(checkout, ["-m", "perfmodel", "samples", "."], folder)
            processor_seconds(checkout, ["-m", "perfmodel", "doctor"], folder)
        # Checkouts take turns at every run, so that the machine's drift meets both.
        for journey in journeys:
            runs: list[list[float]] = [[] for _ in checkouts]
            for _ in range(1 + AGAIN):
                for taken, checkout, folder in zip(runs, checkouts, folders, strict=True):
                    taken.append(processor_seconds(checkout, journey.argv, folder))
            seconds[journey.name] = [Seconds(taken[0], min(taken[1:])) for taken in runs]
            print(
                f"{journey.name}: {seconds[journey.name][-1].again:.2f} s",
                file=sys.stderr,
                flush=True,
            )
    return seconds


def run() -> dict[str, dict[str, object]]:
    """Seconds of the journeys that have a limit, as a ratio of it."""
    limited = [journey for journey in JOURNEYS if journey.most_s]
    results: dict[str, dict[str, object]] = {}
    for journey in limited:
        (seconds,) = seconds_in_turn([HERE], [journey])[journey.name]
        # A limit on the first run is one on what a newcomer waits for.
        limited_s = seconds.first if journey.limits_first else seconds.again
        results[f"journeys/{journey.name}"] = {
            "ratio": limited_s / (journey.most_s or 1.0),
            "baseline": f"{journey.most_s} s of processors",
            "unit": "x",
            "target": "<= 1",
            "seconds": seconds.again,
            "seconds_with_empty_caches": seconds.first,
        }
    return results


def table(seconds: dict[str, list[Seconds]]) -> str:
    """The journeys as a table: seconds with empty caches and again, before and now."""
    has_before = any(len(of_checkouts) > 1 for of_checkouts in seconds.values())
    heads = ["question", "command"]
    if has_before:
        heads.append("before: first, again")
    heads += ["first, again [s]", "limit [s]"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * (len(heads) - 2)}"]
    for journey in JOURNEYS:
        if journey.name not in seconds:
            continue
        cells = [journey.question, f"`{journey.shown}`"]
        for of_checkout in seconds[journey.name]:
            cells.append(f"{of_checkout.first:.2f}, {of_checkout.again:.2f}")
        cells.append(f"{journey.most_s:g}" if journey.most_s else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, new_table: str) -> str:
    """The page with a new table between its markers."""
    before, _, rest = page.partition("<!-- seconds:begin")
    marker, _, rest = rest.partition("-->\n")
    _, end, after = rest.partition("<!-- seconds:end -->")
    return f"{before}<!-- seconds:begin{marker}-->\n{new_table}\n{end}{after}"


def main() -> None:
    """Run the journeys, print their table, and put it into the page where that is asked for."""
    parser = argparse.ArgumentParser(
        description="Processor seconds from a newcomer's question to its answer."
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout, run in turn with this one",
    )
    parser.add_argument(
        "--page", action="store_true", help=f"put the table into {PAGE.relative_to(HERE)}"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"journeys to run: {', '.join(j.name for j in JOURNEYS)}",
    )
    arguments = parser.parse_args()
    checkouts = [arguments.before.resolve(), HERE] if arguments.before else [HERE]
    journeys = [
        journey for journey in JOURNEYS if not arguments.names or journey.name in arguments.names
    ]
    # The page is of all journeys and of one checkout.
    if arguments.page and (arguments.before or arguments.names):
        parser.error("--page takes all journeys of this checkout; leave out --before and NAME")
    new_table = table(seconds_in_turn(checkouts, journeys))
    print(new_table)
    if arguments.page:
        PAGE.write_text(with_table(PAGE.read_text(), new_table))


if __name__ == "__main__":
    main()
