"""Which process of a launch this is: torchrun, mpirun and srun start one command many times and number the copies."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.errors import CalibrationError

LAUNCHERS: Final = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Who sets which variables: a process's number and how many there are."""
NODE: Final = "PERFMODEL_NODE"
"""Variable that names the node where its host name does not tell it from others."""
_OTHERS: Final = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK", "WORLD_SIZE")
_PREFIXES: Final = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process among those that a launcher started."""

    launcher: str
    index: int
    """Process 0 measures, the others do what it tells them."""
    count: int
    node: str
    host: str | None = None
    """Address at which the others reach process 0; none: found through the folder of the tables."""
    port: int | None = None


def find_launch(
    environ: Mapping[str, str] = os.environ,
    *,
    process: int | None = None,
    processes: int | None = None,
    coordinator: str | None = None,
) -> Launch | None:
    """This process's place, by the arguments or else the launcher's environment; `None` without either.

    Args:
        process: its number, with `processes`, how many there are.
        coordinator: `HOST:PORT` at which process 0 is to be reached.

    Raises:
        CalibrationError: for numbers that contradict each other.
    """
    host, port = _host_and_port(coordinator)
    if (process is None) != (processes is None):
        raise CalibrationError("calibrate: --process I and --processes N go together")
    if process is not None and processes is not None:
        launcher, index, count = "--process", process, processes
    else:
        found = [names for names in LAUNCHERS if environ.keys() >= {*names[1:]}]
        if not found:
            return None
        launcher, number, total = found[0]
        try:
            index, count = int(environ[number]), int(environ[total])
        except ValueError:
            raise CalibrationError(
                f"{number}={environ[number]!r} and {total}={environ[total]!r}: a process's number and how many there "
                "are; start by torchrun, mpirun or srun, or give --process I --processes N"
            ) from None
        if launcher == "torchrun" and host is None:
            host = environ.get("MASTER_ADDR")
    if not 0 <= index < count:
        raise CalibrationError(f"{launcher}: process {index} of {count}; processes are numbered from 0 to {count - 1}")
    node = environ.get(NODE) or socket.gethostname()
    return Launch(launcher=launcher, index=index, count=count, node=node, host=host, port=port)


def forget_launcher() -> None:
    """Take a launcher's variables out of the environment: frameworks would join its group instead of ours."""
    for name in [name for name in os.environ if name in _OTHERS or name.startswith(_PREFIXES)]:
        del os.environ[name]


def _host_and_port(coordinator: str | None) -> tuple[str | None, int | None]:
    if coordinator is None:
        return None, None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CalibrationError(f"--coordinator {coordinator}: not HOST:PORT, as node-a:29600")
    return host, int(port)
