"""Shell scripts of launches, read without a shell: the commands that they start, with their
arguments.

Variables, loops, functions and what schedulers set are followed. Nothing is executed.
"""

from perfmodel.display import shorten_reprs
from perfmodel.ingest.launch.shell._commands import ABSENT, SHELLS
from perfmodel.ingest.launch.shell._scheduler import (
    NUMBERED,
    gpus_per_node,
    mpi_numbers,
    requested,
    slurm_numbers,
    slurm_variables,
)
from perfmodel.ingest.launch.shell._script import Script, run_script
from perfmodel.ingest.launch.shell._state import SETTING_PREFIX, Command, Word
from perfmodel.ingest.launch.shell._values import calculate

shorten_reprs(__name__)
