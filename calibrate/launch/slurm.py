"""Calibrate several nodes under SLURM from Python, by submitit (extra `cluster`), resubmitted
until it is done.

python calibrate/launch/slurm.py PLAN OUT --nodes 2 --per-node 8 --gpus-per-node 8 \
    --partition gpu --account project --container /shared/perfmodel.sqsh --backend torch

Options that it does not know go to `perfmodel calibrate`. A job that its time limit ends is queued
again by submitit and goes on with the next row. `--cluster local --nodes 1` runs the same processes
on this host, to try it.
"""

import argparse
import sys
from pathlib import Path

import submitit  # pyright: ignore[reportMissingImports]


class Calibrate:
    """The task of each process of the job: one rank."""

    def __init__(self, plan: Path, out: Path, options: list[str]) -> None:
        self.arguments = ["calibrate", "--plan", str(plan), "--out", str(out), *options]

    def __call__(self) -> None:
        from perfmodel.cli import main

        task = submitit.JobEnvironment()
        place = [
            "--launched",
            "--process",
            str(task.global_rank),
            "--processes",
            str(task.num_tasks),
        ]
        if main([*self.arguments, *place]):
            raise RuntimeError("the calibration did not finish; its standard error says why")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Run the task again after a preemption: measured rows stay on disk."""
        return submitit.helpers.DelayedSubmission(self)


def slurm_options(given: argparse.Namespace) -> dict[str, object]:
    """The options that submitit hands to sbatch and srun; the site chooses those that were not
    given."""
    options: dict[str, object] = {}
    for name in ("partition", "account", "qos", "constraint"):
        if value := getattr(given, name):
            options[f"slurm_{name}"] = value

    # The container belongs to the steps: the job's script runs outside it.
    step = []
    if given.container:
        step.append(f"--container-image={given.container}")
        step.append("--no-container-mount-home")
    if given.mounts:
        step.append(f"--container-mounts={given.mounts}")
    if step:
        options["slurm_srun_args"] = step
    return options


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument(
        "--per-node", type=int, default=1, help="processes, that is ranks, per node"
    )
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument(
        "--partition", help="which nodes; `sinfo -s` lists them (default: the site's)"
    )
    parser.add_argument(
        "--account", help="who is charged; `sacctmgr show assoc user=$USER` lists yours"
    )
    parser.add_argument("--qos")
    parser.add_argument("--constraint", help="features that the nodes must have, such as a GPU")
    parser.add_argument(
        "--container", help="image with perfmodel inside, for sites with pyxis (--container-image)"
    )
    parser.add_argument(
        "--mounts", help="SOURCE:TARGET,... seen in the container; PLAN and OUT must be among them"
    )
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--cluster", help="slurm or local (default: slurm where it is installed)")
    given, options = parser.parse_known_args()
    executor = submitit.AutoExecutor(folder=given.out / "jobs", cluster=given.cluster)
    executor.update_parameters(
        nodes=given.nodes,
        tasks_per_node=given.per_node,
        gpus_per_node=given.gpus_per_node or None,
        timeout_min=given.minutes,
    )
    if slurm := slurm_options(given):
        executor.update_parameters(**slurm)
    job = executor.submit(Calibrate(given.plan.resolve(), given.out.resolve(), options))
    print(f"job {job.job_id}; logs in {given.out / 'jobs'}", file=sys.stderr)
    job.results()
    return 0


if __name__ == "__main__":
    sys.exit(main())
