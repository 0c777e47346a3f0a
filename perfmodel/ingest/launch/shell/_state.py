"""The state of a followed shell script: its expanded words, variables and commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from perfmodel.ingest.launch.shell import _tree as tree


@dataclass(frozen=True)
class Word:
    """A word of a command after expansion; parts that could not be expanded are left as written."""

    text: str
    line: int
    is_uncounted: bool = field(default=False, compare=False)
    """Whether it stands for any number of words: its value is not known, and no quotes hold it
    together."""


LAUNCH_VARIABLES: Final = (
    "NPROC_PER_NODE",
    "NNODES",
    "CUDA_VISIBLE_DEVICES",
    "NGPU",
    "CONFIG_FILE",
    "MODULE",
    "CONFIG",
    "EXP",
    "GPUS_PER_NODE",
)
"""Variables that set the number of processes or the recipe of programs."""
SETTING_PREFIX: Final = "M_"
"""Start of the names of variables that are settings of MaxText (`M_MAX_TARGET_LENGTH`; its
pyconfig.py)."""


@dataclass(frozen=True)
class Command:
    """A program that a script runs, with its arguments."""

    argv: tuple[Word, ...]
    """The program, or the launcher that starts it, and the arguments."""
    certain: bool = True
    """Whether the command certainly runs: no condition that cannot be evaluated guards it, and it
    is not only printed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of `LAUNCH_VARIABLES`, and those with `SETTING_PREFIX`, that are set when the
    command runs."""


Value = dict[str, Word]
"""A variable: the elements of an array by index; a plain variable has only index 0."""


@dataclass
class State:
    """Variables, functions and commands of the part of a script that has been followed."""

    place: str
    environment: Mapping[str, str]
    name: str
    """Name of the script, `$0`."""
    arguments: list[Word]
    """`$1` and those after it."""
    variables: dict[str, Value] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    """Names that stand for other variables (`declare -n`)."""
    functions: dict[str, tree.Node] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files that the script itself writes."""
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Scripts that are run or sourced but are not in the same folder."""
    taken: dict[str, str] = field(default_factory=dict)
    """Variables of the environment that were used."""
    steps: int = 0
    expanded_chars: int = 0
    """Number of characters that expansions have produced so far."""
    stopped_at: int = 0
    """Line of the `exit` that ended the script; 0 for none."""
