"""One of everything that an installed perfmodel does with its dependencies, in about a minute.

Needs nothing but the package and what the package depends on, so that it runs where no test tool is
installed: at the lowest versions of the dependencies and at the newest. `python smoke.py` prints a
line per check; the first that fails ends it with a traceback.
"""

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

import perfmodel as pm
from perfmodel.ingest.tables import write_table

JOB = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "16"]


def command(folder: Path, *words: str) -> str:
    """Standard output of a perfmodel command; what it says on standard error ends the check if it
    fails."""
    program = Path(sysconfig.get_path("scripts")) / "perfmodel"
    done = subprocess.run(
        [str(program), *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(
            f"perfmodel {' '.join(words)}: exit status {done.returncode}\n{done.stderr}"
        )
    return done.stdout


def check_predict(folder: Path) -> None:
    prediction = pm.predict("gpt3-1.3b", "dgx-a100", "tp=2,pp=4", global_batch=16)
    assert prediction.step_time_lo_s < prediction.step_time_s < prediction.step_time_hi_s
    assert len(prediction.to_frame()) > 5
    command(folder, "predict", *JOB, "--layout", "tp=2,pp=4,schedule=interleaved,vpp=2", "--json")


def check_predict_experts(folder: Path) -> None:
    job = ["--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--global-batch", "64"]
    command(
        folder, "predict", *job, "--layout", "tp=2,pp=2,dp=8,ep=4,sequence_parallel=true", "--json"
    )


def check_search(folder: Path) -> None:
    assert "next: perfmodel predict" in command(
        folder, "search", *JOB, "--devices", "8", "--top", "3"
    )


def check_gradient(folder: Path) -> None:
    import jax

    step_time = pm.step_time_function("gpt3-1.3b", "dgx-a100", "tp=2,pp=4", global_batch=16)
    gradient = jax.grad(step_time)(step_time.nominal)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert any((leaf != 0).any() for leaf in leaves)


def check_tables(folder: Path) -> None:
    command(folder, "samples", str(folder / "samples"))
    table = pm.read_table(folder / "samples" / "kernels.csv")
    for suffix in (".csv", ".csv.gz", ".parquet"):
        path = folder / f"copy{suffix}"
        write_table(path, table)
        assert len(pm.read_table(path)) == len(table)


def check_fit(folder: Path) -> None:
    command(folder, "fit", "samples/kernels.csv", "--out", "fitted")
    command(folder, "predict", *JOB, "--layout", "tp=2,pp=4", "--calibration", "fitted", "--json")


def check_launch_file(folder: Path) -> None:
    command(folder, "predict", "--from", "samples/train.sh", "--cluster", "dgx-a100", "--json")


def check_schedules(folder: Path) -> None:
    command(
        folder, "schedules", "--stages", "4", "--micro-batches", "8", "--times", "1,1,1", "--json"
    )


def check_picture(folder: Path) -> None:
    command(
        folder,
        "timeline",
        *JOB,
        "--layout",
        "tp=2,pp=4",
        "--png",
        "step.png",
        "--html",
        "step.html",
    )
    assert (folder / "step.png").stat().st_size > 1000


CHECKS = (
    check_predict,
    check_predict_experts,
    check_search,
    check_gradient,
    check_tables,
    check_fit,
    check_launch_file,
    check_schedules,
    check_picture,
)


def main() -> None:
    """Run all checks in a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        for check in CHECKS:
            started_s = time.monotonic()
            check(Path(name))
            print(f"{check.__name__} {time.monotonic() - started_s:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
