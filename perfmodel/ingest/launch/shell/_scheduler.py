"""Nodes, tasks and GPUs that a job requests from its scheduler, and the variables that SLURM sets
from them.

Source: sbatch(1), section OUTPUT ENVIRONMENT VARIABLES.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

NUMBERED: Final = (
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "cpus-per-task",
)
"""Options of sbatch and srun that are numbers; `gres-gpus` is that of `--gres=gpu:N`, per node."""
_SHORT: Final = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
_OTHER_NAMES: Final = {"tasks-per-node": "ntasks-per-node"}
"""Long options of sbatch with two names (`slurm_opt.c`)."""
_DIRECTIVE: Final = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_PBS: Final = re.compile(r"^#PBS[ \t]+-l[ \t]+(?:select|nodes)=(\d+)(\S*)", re.MULTILINE)
_GRID: Final = re.compile(r"^#\$[ \t]+-l[ \t]+rt_A?F=(\d+)", re.MULTILINE)
"""Whole nodes that a job of ABCI asks Grid Engine for (its documentation, Job Execution
Resource)."""
_MPI: Final = {
    "-n": "ntasks",
    "-np": "ntasks",
    "--np": "ntasks",
    "--ntasks": "ntasks",
    "-N": "ntasks-per-node",
    "-ppn": "ntasks-per-node",
    "--ppn": "ntasks-per-node",
    "-npernode": "ntasks-per-node",
    "--npernode": "ntasks-per-node",
}
"""Options of mpirun and its relatives."""


def directives(text: str) -> list[str]:
    """Options of the `#SBATCH` lines of a script, each a word."""
    options: list[str] = []
    for line in _DIRECTIVE.findall(text):
        before_comment, _, _ = line.partition(" #")
        options += before_comment.split()
    return options


def requested(text: str) -> dict[str, int]:
    """Numbers that the `#SBATCH` (or `#PBS`) lines of a script request."""
    numbers: dict[str, int] = {}
    for nodes, options in _PBS.findall(text):
        numbers["nodes"] = int(nodes)
        per_node = re.search(r":(?:ngpus|gpus|ppn)=(\d+)", options)
        if per_node:
            numbers["gpus-per-node"] = int(per_node[1])
    for nodes in _GRID.findall(text):
        numbers["nodes"] = int(nodes)
    return numbers | slurm_numbers(directives(text))


def slurm_numbers(options: Sequence[str]) -> dict[str, int]:
    """Numbers among the options of sbatch or srun, by the long name of the option."""
    numbers: dict[str, int] = {}
    nodes_are_known = True
    for i, option in enumerate(options):
        following = options[i + 1] if i + 1 < len(options) else ""
        # getopt's three spellings: `-N 4`, `-N4` and `--nodes=4`.
        short = re.fullmatch(r"-([NnGc])=?(\S*)", option)
        if short:
            name = _SHORT[short[1]]
            value = short[2] or following
        elif option.startswith("--"):
            name, sign, value = option[2:].partition("=")
            name = _OTHER_NAMES.get(name, name)
            value = value if sign else following
        else:
            continue
        value = value.strip("\"'")
        if name == "gres":
            gpus = re.search(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?", value)
            if gpus:
                numbers["gres-gpus"] = int(gpus[1] or 1)
        elif name in NUMBERED:
            # A number may have a type before it: `--gpus=a100:8`.
            number = re.match(r"(?:[A-Za-z][\w.-]*:)?(\d+)", value)
            if number:
                numbers[name] = int(number[1])
            elif name == "nodes":
                nodes_are_known = False
    if nodes_are_known:
        return numbers
    # A number of nodes that is only a variable or a placeholder leaves open how many devices there
    # are in all.
    return {
        name: number
        for name, number in numbers.items()
        if name in ("nodes", "ntasks", "gpus", "cpus-per-task")
    }


def mpi_numbers(options: Sequence[str], has_nodes: bool) -> dict[str, int]:
    """Processes, and those per node, among the options of mpirun.

    Args:
        options: words behind it.
        has_nodes: whether the number of nodes is known otherwise.
    """
    numbers: dict[str, int] = {}
    is_open = False
    for option, following in pairwise(options):
        is_open |= _MPI.get(option) == "ntasks" and not following.isdecimal()
        if option in _MPI and following.isdecimal():
            numbers[_MPI[option]] = int(following)
        if option in ("--map-by", "-map-by"):
            per_node = re.fullmatch(r"ppr:(\d+):node(:.*)?", following)
        else:
            per_node = None
        if per_node:
            numbers["ntasks-per-node"] = int(per_node[1])
    # Processes of a node do not tell how many there are on nodes that nobody counts.
    if is_open and not has_nodes:
        numbers.pop("ntasks-per-node", None)
    return numbers


def slurm_variables(numbers: Mapping[str, int]) -> dict[str, str]:
    """Variables that SLURM sets in a job of these numbers."""
    if not numbers:
        return {}
    nodes = numbers.get("nodes", 1)
    # Without a number of tasks SLURM starts one per node.
    tasks = numbers.get("ntasks", nodes * numbers.get("ntasks-per-node", 1))
    # Scripts multiply these to get their world size. The script is followed as rank 0 would run it.
    known: dict[str, int | None] = {
        "SLURM_NNODES": numbers.get("nodes"),
        # Grid Engine: submit(1), section ENVIRONMENTAL VARIABLES
        "NHOSTS": numbers.get("nodes"),
        "SLURM_JOB_NUM_NODES": numbers.get("nodes"),
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_NTASKS_PER_NODE": numbers.get("ntasks-per-node"),
        "SLURM_GPUS": numbers.get("gpus"),
        "SLURM_GPUS_PER_NODE": numbers.get("gpus-per-node"),
        "SLURM_GPUS_ON_NODE": gpus_per_node(numbers),
        "SLURM_GPUS_PER_TASK": numbers.get("gpus-per-task"),
        "SLURM_CPUS_PER_TASK": numbers.get("cpus-per-task"),
        "SLURM_PROCID": 0,
        "SLURM_NODEID": 0,
        "SLURM_LOCALID": 0,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def gpus_per_node(numbers: Mapping[str, int]) -> int | None:
    """GPUs per node, if an option states them."""
    # From the option that says it directly to those that it must be divided out of.
    if "gpus-per-node" in numbers:
        return numbers["gpus-per-node"]
    if "gres-gpus" in numbers:
        return numbers["gres-gpus"]
    if "gpus" in numbers and numbers["gpus"] % numbers.get("nodes", 1) == 0:
        return numbers["gpus"] // numbers.get("nodes", 1)
    if "gpus-per-task" in numbers and "ntasks-per-node" in numbers:
        return numbers["gpus-per-task"] * numbers["ntasks-per-node"]
    return None
