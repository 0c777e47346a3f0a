"""Meaning of the keys of launch files, as tables of rules. Each rule is read in both directions, so
that reading and writing cannot diverge.

A rule connects keys of a file with *fields*. Fields are those of `Layout` by their names, those of
`Transformer` behind `model.`, of `Experts` behind `experts.`, of `LatentAttention` behind
`latent.`, of `Mamba` behind `mamba.`, of `DeltaNet` behind `delta.`; `global_batch`, `seq_len`,
`dtype`, `flash_attention`, `grad_dtype`, `optimizer`, `recompute_modules`, `expert_dispatcher`,
`expert_capacity_factor` and `cuda_graphs` of `Job`; and what these follow from:

    devices, nodes, devices_per_node
    grad_accum                sequential micro-batches of a replica (without pipeline)
    local_batch               sequences of a replica between two accumulations
    device_batch              the same per device
    pipeline_micro_batches    into which the pipeline cuts the local batch
    layers_per_chunk          of a virtual pipeline stage
    selective_every           of so many layers one is recomputed as a whole; 0: none is
    shard_ranks               replicas that shard states among themselves; "node": those of a node
    ep_most                   replicas over which experts are spread at most
    model                     catalog name of the model
    note.*                    what is read only nearly, one sentence
    doubt.*                   what may be wrong in the answer, one sentence for its head
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import AUTO, UNSAID

Fields = dict[str, Any]


class BadValue(ValueError):
    """A value that a key cannot have; the message says which values are allowed."""


@dataclass(frozen=True)
class Values:
    """A kind of value: how it is read from files and written to them."""

    read: Callable[[Any], Any]
    """Function from a file's value to the field's; raises `BadValue`, and returns None to leave the
    field open."""
    write: Callable[[Any], Any] = lambda value: value
    """Function from the field's value to the file's; returns None for values without notation,
    whose key is left out."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A two-way rule between some keys and the fields that they state together."""

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Fields]
    """Function from the values of the rule's keys in the file to fields; raises `BadValue`."""
    write: Callable[[Fields], Mapping[str, Any]] = lambda fields: {}
    """Function from fields to values of keys (None: left out); raises `LaunchFileError` with the
    reason if they cannot be written."""
    defaults: Fields = field(default_factory=dict)
    """Fields that the framework fills in if the file does not state them."""
    optional: tuple[str, ...] = ()
    """Keys that hold names. A variable in them that the file does not define does not matter, and
    they are kept as written."""
    fields: tuple[str, ...] = ()
    """Fields that it reads, or the beginning of their names (`model.`). Where the caller states all
    of them, the rule's keys need no value. Empty: it is always needed."""
    auto_keys: tuple[str, ...] = ()
    """Keys for which `auto` is a value of its own instead of leaving the choice to the
    framework."""

    def said(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the rule's keys, without those that leave the choice to the framework."""
        return {
            name: value
            for name, value in values.items()
            if not unsaid(value) or (value == AUTO and name in self.auto_keys)
        }


# Values come from parsers that disagree on types: YAML and TOML give numbers, a shell gives text,
# and a list where more words follow a flag than it takes. Each kind of value is coerced here, once
# for all formats.
def _first(value: Any) -> Any:
    """The value itself, or the first of the words behind a flag.

    A list of several numbers is what a search tries in turn (DeepSpeed's autotuning, sweeps), and
    none of them is the value.
    """
    if not isinstance(value, list) or not value:
        return value
    is_of_shell = all(isinstance(word, str) for word in value)
    return value[0] if is_of_shell or len(value) == 1 else value


def _whole(minimum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        text = _first(value)
        if isinstance(text, float) and text.is_integer():
            text = int(text)
        if isinstance(text, str) and text.replace("_", "").lstrip("-").isdigit():
            text = int(text)
        # In Python True is an integer, but `tensor-parallel: true` is a mistake and no degree of 1.
        if isinstance(text, bool) or not isinstance(text, int) or text < minimum:
            raise BadValue(f"must be a whole number of at least {minimum}, got {value!r}")
        return text

    return read


def _number(value: Any) -> float:
    text = _first(value)
    try:
        if isinstance(text, bool):
            raise ValueError
        return float(text)
    except (TypeError, ValueError):
        raise BadValue(f"must be a number, got {value!r}") from None


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    # Python takes 1 and 0 for true and false, and so do scripts and files of YAML.
    if value in (0, 1, "0", "1"):
        return str(int(value)) == "1"
    if not isinstance(value, bool):
        raise BadValue(f"must be true or false, got {value!r}")
    return value


def _text(value: Any) -> str:
    text = _first(value)
    if not isinstance(text, str) or "${" in text:
        raise BadValue(f"must be a name, got {value!r}")
    return text


WHOLE: Final = Values(_whole(1))
WHOLE_OR_NONE: Final = Values(_whole(0))
SOME: Final = Values(_whole(0), lambda value: value or None)
"""A whole number whose default is 0."""
NUMBER: Final = Values(_number)
FLAG: Final = Values(_flag)
SWITCH: Final = Values(_flag, lambda value: True if value else None)
"""A flag of a command line, which can only be set."""
MANY: Final = Values(WHOLE.read, lambda value: value if value > 1 else None)
"""A whole number whose default is 1."""
TEXT: Final = Values(_text)
PRESENT: Final = Values(lambda value: True)
"""A setting that is on if the key is present, with any value."""

_OPTIMIZERS: Final = {
    "adam": "adam fusedadam adamw decoupledadamw onebitadam cpuadam adampax distributedfusedadam adamwtorchfused",
    "adam8bit": "adam8bit adamw8bit adamwbnb8bit pagedadamw8bit",
    "adafactor": "adafactor",
    "lamb": "lamb fusedlamb onebitlamb",
    "lion": "lion fusedlion decoupledlionw lion32bit",
    "muon": "muon distmuon",
    "sgd": "sgd decoupledsgdw fusedsgd",
}
"""Frameworks' names of optimizers, ignoring case and punctuation; AdamW costs the same as Adam."""


def _optimizer(value: Any) -> str | None:
    name = _text(value).lower().replace("_", "").replace("-", "")
    return next((known for known, names in _OPTIMIZERS.items() if name in names.split()), None)


OPTIMIZER: Final = Values(_optimizer, lambda name: "adam" if name == "adamw" else name)
"""An optimizer; None for an unknown one (see `named_optimizer`)."""


def named_optimizer(name: Any) -> Fields:
    """The field of an optimizer by its name, or a doubt about an unknown one."""
    optimizer = OPTIMIZER.read(name)
    if optimizer is not None:
        return {"optimizer": optimizer}
    return {
        "doubt.optimizer": f"memory may be wrong: optimizer {_first(name)} is predicted as Adam"
    }


def words(meanings: Mapping[Any, Any]) -> Values:
    """A kind of value with fixed words and their meanings, ignoring case; of several words for one
    meaning, the first is written."""
    # Both directions come from one table, so that a written value is read back as the same setting.
    known = {
        word.lower() if isinstance(word, str) else word: meaning
        for word, meaning in meanings.items()
    }
    written: dict[Any, Any] = {}
    for word, meaning in meanings.items():
        written.setdefault(meaning, word)

    def read(value: Any) -> Any:
        text = _first(value)
        text = text.lower() if isinstance(text, str) else text
        if not isinstance(text, (str, int, bool)) or text not in known:
            names = ", ".join(str(word) for word in meanings)
            raise BadValue(f"must be one of {names}; got {value!r}")
        return known[text]

    return Values(read, lambda meaning: written.get(meaning))


def stated_value(settings: Mapping[str, Any]) -> Any:
    """The value of a rule with a single key, whichever of its names the file uses."""
    return next(iter(settings.values()))


def accumulated(fields: Fields, unstated: str) -> int:
    """Micro-batches per replica and step (raises `LaunchFileError`, which begins with `unstated`,
    if no global batch is known)."""
    # One pass of all replicas works on `per_micro_batch` sequences; a step is a whole number of
    # such passes.
    total = fields.get("global_batch")
    per_micro_batch = fields["micro_batch"] * fields["dp"]
    if not total:
        raise LaunchFileError(f"{unstated}; the global batch must be given too")
    if total % per_micro_batch:
        raise LaunchFileError(
            f"global batch {total}: not a multiple of dp*micro_batch = {per_micro_batch}; use a multiple"
        )
    return total // per_micro_batch


def layers_per_stage(fields: Fields, who: str, remedy: str) -> int:
    """Layers of each virtual stage (raises `LaunchFileError`, which names `who` needs this and the
    `remedy`, if the layers do not divide evenly)."""
    layers = fields.get("layers", 0)
    stages = fields["pp"] * fields["vpp"]
    if not layers or layers % stages:
        raise LaunchFileError(
            f"{who} takes the layers per stage, but {layers or 'unknown'} layers cannot be divided into "
            f"{stages} equal stages; {remedy}"
        )
    return layers // stages


def key(
    name: str,
    into: str,
    values: Values = WHOLE,
    *,
    default: Any = None,
    also: tuple[str, ...] = (),
    write: Callable[[Fields], Mapping[str, Any]] | None = None,
) -> Rule:
    """The rule for one key that states one field; the names in `also` are read but not written.

    Args:
        write: function that writes it, where that takes more than this field.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        if values is OPTIMIZER:
            return named_optimizer(stated_value(settings))
        value = values.read(stated_value(settings))
        return {} if value is None else {into: value}

    def write_field(fields: Fields) -> Mapping[str, Any]:
        return {name: None if fields.get(into) is None else values.write(fields[into])}

    defaults = {} if default is None else {into: default}
    return Rule(
        keys=(name, *also), read=read, write=write or write_field, defaults=defaults, fields=(into,)
    )


def read_only(name: str, into: str, values: Values = WHOLE) -> Rule:
    """The rule for a key that is read and never written."""
    return key(name, into, values, write=lambda fields: {})


def write_only(name: str, value: Callable[[Fields], Any]) -> Rule:
    """The rule for a key that follows from others: it is written, and ignored when read."""
    return Rule(keys=(name,), read=lambda settings: {}, write=lambda fields: {name: value(fields)})


def degree(name: str, into: str) -> Rule:
    """The rule for a degree that defaults to 1 and is written only if greater."""
    return key(name, into, MANY, default=1)


def unsaid(value: Any) -> bool:
    """Whether a value leaves the choice to the framework."""
    return value is None or (isinstance(value, str) and value in UNSAID) or value == {}
