"""What is read from each of the launch files of the tests, kept in `known_launches.csv`.

Every file is read as it is, and with devices and a batch of the caller. A change that is meant to
move what is read, or a new file, is followed by

    PYTHONPATH=tests python tests/ingest/known_launches.py
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stored_figures import StoredCase, write_cases

from perfmodel.errors import PerfModelError
from perfmodel.ingest.launch import Launch, read_launch
from perfmodel.spec import Job
from perfmodel.workload import parameters, step_flops

TABLE = Path(__file__).with_suffix(".csv")
FOLDERS = ("launch_files", "strangers")
GIVEN: dict[str, dict[str, Any]] = {"64 devices": {"devices": 64}, "batch": {"global_batch": 192}}
"""What the caller says beside the file."""


def figures(launch: Launch) -> dict[str, float]:
    """What is read as names that count one each, and sizes of the model as numbers."""
    words = [f"format.{launch.format}", f"framework.{launch.framework}"]
    if launch.layout is not None:
        words += [f"layout.{pair}" for pair in str(launch.layout).split(",")]
    words += [f"job.{name}.{value}" for name, value in launch.job_fields.items()]
    figures = dict.fromkeys(("".join(word.replace("=", ".").split()) for word in words), 1.0)
    sizes = {
        "devices": launch.devices,
        "global_batch": launch.global_batch,
        "seq_len": launch.seq_len,
    }
    figures |= {name: float(value) for name, value in sizes.items() if value is not None}
    for name in ("assumed", "may_be_wrong", "ignored", "missing"):
        figures[name] = float(len(getattr(launch, name)))
    if launch.model is not None:
        for group in (
            parameters(launch.model),
            step_flops(launch.model, Job(global_batch=8, seq_len=1024)),
        ):
            figures |= {f"model.{name}": float(value) for name, value in vars(group).items()}
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """Readings of every launch file."""
    here = Path(__file__).parent
    files = [
        file for folder in FOLDERS for file in sorted((here / folder).rglob("*")) if file.is_file()
    ]
    for file in files:
        base = str(file.relative_to(here))
        for name, given in {base: {}, **GIVEN}.items():
            try:
                yield StoredCase(base, name, figures(read_launch(file, **given)))
            except PerfModelError as error:
                yield StoredCase(base, name, {f"refused.{type(error).__name__}": 1.0})


if __name__ == "__main__":
    write_cases(TABLE, cases())
