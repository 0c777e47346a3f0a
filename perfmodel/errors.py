"""The package's exceptions. Each says what is wrong, where, and what to do. Text from outside is
cleaned before it is quoted."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Final

# --- texts of others
# -----------------------------------------------------------------------------------
#
# Replaces escape sequences in untrusted text, such as names in files, before it is shown.


# Characters that reorder or hide text, control characters but tab and line feed.
_MARKS: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"

# Whole escape sequences, so that no part of them remains: strings for the terminal, then commands
# to it.
_STRINGS: Final = r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
_COMMANDS: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"
STEERING: Final = f"{_STRINGS}|{_COMMANDS}|{_MARKS}"
"""Pattern of the characters that `plain_text` replaces."""
REPLACEMENT: Final = "\ufffd"
"""Stands where `plain_text` replaced something, as it does for bytes that are not text: a reader
sees that the name is another one."""
_LINE_END: Final = r"\r(?=\n)"
_STEERING: Final = re.compile(f"(?P<line_end>{_LINE_END})|{STEERING}")


def plain_text(text: str) -> str:
    """Replace escape sequences, control characters and bidirectional marks of a text by
    `REPLACEMENT`."""
    # Nearly all texts are plain, which is quick to see.
    if text.isascii() and text.isprintable():
        return text
    return _STEERING.sub(lambda match: "" if match["line_end"] else REPLACEMENT, text)


# --- errors
# --------------------------------------------------------------------------------------------


MOST_NAMES: Final = 40
"""Known names that a message lists in full."""
FEW_NAMES: Final = 12
"""Examples that a message lists where there are more names."""


class PerfModelError(ValueError):
    """Bad input: one clear line that names the offending thing and the remedy.

    The command line prints the message to stderr and exits with status 2. The message may quote
    names from files, so it is printed as plain text wherever it is printed.
    """

    def __str__(self) -> str:
        return plain_text(super().__str__())


class UnknownNameError(PerfModelError):
    """A name that is not in the catalog, the op families or the schedules."""

    def __init__(self, kind: str, name: str, known: Iterable[str], remedy: str = "") -> None:
        super().__init__(kind, name, tuple(known), remedy)

    # Close names are looked for when the message is read: whoever only asks whether there is such a
    # name does not wait for it.
    def __str__(self) -> str:
        kind, name, known, remedy = self.args
        known = sorted(set(known))
        close = get_close_matches(name.lower(), [k.lower() for k in known], n=3, cutoff=0.5)
        close_names = [k for k in known if k.lower() in close]
        hint = f"known: {_examples(known)}"
        if close_names:
            hint = f"did you mean {' or '.join(map(repr, close_names))}?"
        message = f"unknown {kind} {name!r}; {hint}"
        if remedy:
            message += f"; {remedy}"
        return plain_text(message)


def _examples(names: list[str]) -> str:
    """Names in a list, or evenly spread examples where there are many."""
    # Every n-th of the sorted names, so that examples are not all of one vendor or family.
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:: len(names) // FEW_NAMES + 1])} and more; 'perfmodel catalog' lists all"


class Reason(Enum):
    """Reasons why a layout is rejected, as errors name them and searches count them.

    Each has a sentence, in which `{}` stands for its subject (`Rejection.about`), and the fields of
    a layout or problem that one can change to remove it.
    """

    DEVICES = "tp*cp*pp does not divide the devices", ("tp", "cp", "pp", "devices")
    CAPACITY = "more devices than the cluster has", ("devices",)
    BATCH = (
        "global batch not divisible by dp*micro_batch",
        ("tp", "cp", "pp", "micro_batch", "devices", "global_batch"),
    )
    HEADS = "attention heads not divisible by tp", ("tp",)
    KV_HEADS = "neither tp nor the number of key-value heads is a multiple of the other", ("tp",)
    HIDDEN = "hidden size not divisible by tp", ("tp",)
    PAIRED_LAYERS = "tp needs an even number of layers, but the model has an odd number", ("tp",)
    SEQUENCE = "sequence length not divisible by cp (and tp)", ("cp", "tp", "sequence_parallel")
    UNFUSED_CONTEXT = "context parallelism needs fused attention", ("cp",)
    EXPERT_RANKS = "ep does not divide dp*cp", ("tp", "cp", "pp", "ep", "devices")
    FOLDED_RANKS = "ep*etp does not divide tp*cp*dp", ("tp", "cp", "pp", "ep", "etp", "devices")
    EXPERTS = "experts not divisible by ep", ("ep",)
    EXPERT_HIDDEN = "width of experts not divisible by tp", ("tp", "etp")
    EXPERT_SEQUENCE = "experts need sequence parallelism", ("tp", "ep", "sequence_parallel")
    UNSPLIT = "the model has nothing to split by {}", ("tp", "cp", "ep")
    STAGES = "more stages than layers", ("pp", "schedule")
    UNEVEN_CHUNKS = "layers not divisible by pp*vpp", ("pp", "vpp")
    CHUNKS = "schedule {} fixes the number of chunks per device", ("vpp", "schedule")
    SCHEDULE = (
        "schedule {} does not support these numbers of stages and micro-batches",
        ("tp", "cp", "pp", "micro_batch", "schedule", "devices", "global_batch"),
    )
    SCHEDULE_STAGES = "schedule {} has more stages than layers", ("pp", "schedule")
    SLICES = "sequence length not divisible into the slices of schedule {}", ("schedule",)
    PER_STAGE = "{} does not fit the stages and their layers", ("pp",)
    KINDS = (
        "the devices of a stage are on several kinds of nodes",
        ("tp", "cp", "pp", "schedule", "order", "devices"),
    )
    ONE_KIND = (
        "{} cannot be searched over several kinds of nodes",
        ("schedule", "vpp", "order", "offload", "offload_layers"),
    )
    HOST_LINK = "the device has no link to host memory", ("offload", "offload_layers")
    OFFLOADED_LAYERS = (
        "offloading only some layers needs a pipeline or recompute",
        ("pp", "recompute", "offload_layers"),
    )
    FRAMEWORK = "{}", ("framework",)
    MEMORY = (
        "out of memory, mostly {}",
        (
            "tp",
            "cp",
            "pp",
            "ep",
            "micro_batch",
            "zero",
            "recompute",
            "sequence_parallel",
            "offload",
            "offload_layers",
            "devices",
            "memory_bytes",
        ),
    )
    CONSTRAINT = "cannot satisfy {}", ("constraint",)
    CONSTRAINTS = "does not satisfy the constraints", ("constraint",)
    SLOWER = "cannot be among the best: a lower bound on their time is longer", ()
    WORSE = (
        "cannot be among the best: the objective is worse even at a lower bound on their time",
        (),
    )
    DOMINATED = "dominated even at a lower bound, or cannot satisfy the constraints", ()
    VARIANT = "no faster than a variant that fits and recomputes or offloads less", ()
    NOT_EVALUATED = "not evaluated", ()

    def __init__(self, sentence: str, frees: tuple[str, ...]) -> None:
        self.sentence = sentence
        self.frees = frees


@dataclass(frozen=True)
class Rejection:
    """The reason for a rejection, with its subject where the reason has one: a schedule, a part of
    memory, a constraint."""

    reason: Reason
    about: str = ""

    def __str__(self) -> str:
        return plain_text(self.reason.sentence.format(self.about))


class LayoutError(PerfModelError):
    """A layout that cannot run this model on this cluster."""

    def __init__(self, message: str, reason: Reason | None = None, about: str = "") -> None:
        super().__init__(message)
        self.rejection = Rejection(reason, about) if reason else None
        """Reason that searches count; None for invalid notations and for schedules from files."""

    # Pickled with all of its arguments, so that workers send it whole.
    def __reduce__(self) -> tuple:
        rejection = self.rejection
        if rejection is None:
            return type(self), (str(self),)
        return type(self), (str(self), rejection.reason, rejection.about)


class TableError(PerfModelError):
    """A measurement table that is malformed, truncated or has impossible values."""


class LaunchFileError(PerfModelError):
    """A broken launch file of a training framework, or a layout that the framework's launch file
    cannot express."""


class CalibrationError(PerfModelError):
    """Weights or fitted constants that are missing, truncated or of another schema version."""


class NoDataError(PerfModelError):
    """Raised with `--strict` when a prediction would extrapolate beyond measured data."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
