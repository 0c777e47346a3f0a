"""The wheel made from the source archive works outside the checkout, with its weights, catalog and
assets."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output; without the checkout on the path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Programs of a fresh environment that has the wheel, and this one's packages for all else."""
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "sdist",
        "--directory",
        folder,
        cwd=ROOT,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        folder,
        cwd=source,
    )
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    programs = folder / "venv" / "bin"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "--disable-pip-version-check",
    ]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = (folder / "venv" / "lib").glob("*/site-packages")
    # .pth files of a folder that is named in one are not read: the checkout stays out
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_the_installed_command_predicts_and_draws(installed, tmp_path):
    job = [
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--global-batch",
        "16",
        "--layout",
        "tp=2,pp=4",
    ]
    prediction = json.loads(run(installed / "perfmodel", "predict", *job, "--json", cwd=tmp_path))
    assert prediction["step_time_s"] > 0
    assert (
        prediction["provenance"].get("measured", 0) + prediction["provenance"].get("learned", 0)
        > 0.5
    )
    run(installed / "perfmodel", "timeline", *job, "--html", "step.html", cwd=tmp_path)
    assert "<canvas" in (tmp_path / "step.html").read_text()


def test_the_installed_package_is_the_wheels(installed, tmp_path):
    report = json.loads(run(installed / "perfmodel", "doctor", "--json", cwd=tmp_path))
    assert Path(report["installed_in"]).is_relative_to(installed.parent)
    shipped = {
        path.stem
        for path in (ROOT / "perfmodel" / "cost" / "learn" / "weights").glob("*.safetensors")
    }
    assert len(shipped) > 5
    assert shipped <= set(report["calibration"])


def test_the_installed_package_is_typed(installed):
    (packages,) = (installed.parent / "lib").glob("*/site-packages")
    assert (packages / "perfmodel" / "py.typed").is_file()
