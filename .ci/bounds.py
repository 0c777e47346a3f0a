"""Run the smoke set at the lowest versions of the dependencies and at the newest, on every Python
that is supported.

`pyproject.toml` is the one home of the bounds: `jax>=0.7.1` there becomes the constraint
`jax==0.7.1` here. Each combination gets a virtual environment of its own with the wheel in it, so
that the checkout is out of reach. A Python that this machine lacks is skipped with a line that says
so.

    python .ci/bounds.py            # all combinations
    python .ci/bounds.py --list     # the constraints at the lowest versions
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMBINATIONS = (("3.11", "lowest"), ("3.12", "newest"), ("3.13", "newest"))
"""Python 3.11 with the newest is what the other tests run on; the lowest versions have no wheels
for later Pythons."""
EXTRA = "viz"
"""Installed with the package: the one extra that small environments of users have."""
REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)>=(?P<version>[0-9.]+)$")


def lowest_versions(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Lowest version of every dependency, and of those of the extra, by name.

    Raises:
        ValueError: a dependency is not written as NAME>=VERSION, so that it has no lower bound to
            be tested.
    """
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    versions = {}
    for requirement in project["dependencies"] + project["optional-dependencies"][EXTRA]:
        parts = REQUIREMENT.match(requirement)
        if parts is None:
            raise ValueError(
                f"{pyproject}: {requirement!r} must be NAME>=VERSION, which CI tests at VERSION"
            )
        versions[parts["name"]] = parts["version"]
    return versions


def constraints() -> str:
    """Text of a constraints file for pip that pins every dependency to its lowest version."""
    return "".join(f"{name}=={version}\n" for name, version in lowest_versions().items())


def interpreter(version: str) -> str | None:
    """A Python of this version that runs; None where this machine has none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        sys.executable,
        shutil.which(f"python{version}"),
        *sorted(pyenv.glob(f"{version}.*/bin/python")),
    ]
    for candidate in filter(None, candidates):
        # a shim on the path may stand for a version that is not installed
        command = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return str(candidate)
    return None


def build_wheel(folder: Path) -> Path:
    """The wheel of the checkout, built into a folder."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def smoke(python: str, versions: str, wheel: Path, folder: Path) -> None:
    """Install the wheel with the lowest or the newest dependencies into a fresh environment and run
    the smoke set."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    program = str(folder / "bin" / "python")
    pip = [
        program,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-compile",
        "--disable-pip-version-check",
        f"{wheel}[{EXTRA}]",
    ]
    if versions == "lowest":
        pinned = folder / "constraints.txt"
        pinned.write_text(constraints(), "utf-8")
        pip += ["--constraint", str(pinned)]
    subprocess.run(pip, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PERFMODEL_CACHE"] = str(folder / "cache")
    subprocess.run(
        [program, str(ROOT / ".ci" / "smoke.py")], cwd=folder, env=environment, check=True
    )


def main() -> int:
    """Exit status: 0 if every combination that this machine can run passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="print the constraints at the lowest versions"
    )
    if parser.parse_args().list:
        print(constraints(), end="")
        return 0
    failed = []
    with tempfile.TemporaryDirectory(prefix="perfmodel-bounds-") as name:
        wheel = build_wheel(Path(name))
        for version, versions in COMBINATIONS:
            python = interpreter(version)
            if python is None:
                print(
                    f"SKIPPED Python {version}, {versions} dependencies: no python{version} here",
                    flush=True,
                )
                continue
            print(f"Python {version}, {versions} dependencies", flush=True)
            environment = Path(name) / f"{version}-{versions}"
            try:
                smoke(python, versions, wheel, environment)
            except subprocess.CalledProcessError as error:
                print(
                    f"FAILED Python {version}, {versions} dependencies: {error}",
                    file=sys.stderr,
                    flush=True,
                )
                failed.append(version)
            # an environment takes about a gigabyte
            shutil.rmtree(environment, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
