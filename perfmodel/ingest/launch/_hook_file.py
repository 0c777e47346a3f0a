"""Files that the lines of `perfmodel hook` write: the arguments of a run as its framework parsed
them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog import model_from_config
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import SCRIPT
from perfmodel.ingest.launch._bridge import BRIDGE
from perfmodel.ingest.launch._deepspeed import DEEPSPEED
from perfmodel.ingest.launch._entries import Entries, Entry, Neighbours, Source
from perfmodel.ingest.launch._finetuning_files import with_named_files
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._hooks import HOOKS
from perfmodel.ingest.launch._maxtext import MAXTEXT
from perfmodel.ingest.launch._megatron import MEGATRON
from perfmodel.ingest.launch._megatron_yaml import megatron_arguments
from perfmodel.ingest.launch._nanotron import NANOTRON
from perfmodel.ingest.launch._torchtitan import TORCHTITAN
from perfmodel.ingest.launch._torchtitan_precision import BY_OPERATOR, SELECTIVE_OPTION
from perfmodel.ingest.launch._trainer import TRAINER

KIND: Final = "perfmodel_hook"
"""The key by which such a file is recognised."""
_SETTINGS: Final = "settings."
_DEFAULTS: Final = "defaults."


def hook_settings(source: Source, config: Mapping[str, Any] | None) -> tuple[Source, LaunchFormat]:
    """Entries of a hook's file, converted to the framework's own format.

    Args:
        source: the file, one with the key `KIND`.
        config: the model's configuration of Hugging Face in it.

    Raises:
        LaunchFileError: of a framework that has no hook, or without settings.
    """
    place = source.place
    kind = source.entries[KIND].value
    if not isinstance(kind, str) or kind not in _READERS:
        raise LaunchFileError(f"{place}: {KIND} must be one of {', '.join(HOOKS)}, got {kind!r}")
    settings = _settings(source.entries)
    if not settings:
        raise LaunchFileError(
            f"{place}: this file holds no settings; write it again with the lines that perfmodel hook {kind} prints"
        )
    processes = source.entries.get("devices", Entry(None, 0)).value
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise LaunchFileError(
            f"{place}: devices must be a whole number of at least 1, got {processes!r}"
        )
    program = str(source.entries.get("program", Entry("", 0)).value)
    # From here on the file is one of the framework's own format, with nothing left to be guessed.
    read, form = _READERS[kind](replace(source, entries=settings), program)
    model = model_from_config(config, place=place) if config else None
    return replace(read, devices=processes, model=model, written={}), form


def _settings(entries: Entries) -> dict[str, Entry]:
    """Settings of a run; those equal to the framework's defaults are marked."""
    settings: dict[str, Entry] = {}
    for key, entry in entries.items():
        if not key.startswith(_SETTINGS):
            continue
        name = key.removeprefix(_SETTINGS)
        default = entries.get(_DEFAULTS + name)
        # A framework's parsed arguments hold hundreds of values that nobody set. Only those that
        # differ from the defaults beside them are the user's, and only these may be reported as
        # unread.
        is_default = default is not None and default.value == entry.value
        settings[name] = replace(entry, is_default=is_default)
    return settings


_DERIVED: Final = patterns(
    "world_size rank local_rank data_parallel_size model_parallel_size transformer_pipeline_model_parallel_size",
    "encoder_num_layers encoder_seq_length virtual_pipeline_model_parallel_size variable_seq_lengths kv_channels",
    "params_dtype main_*_dtype exp_avg*_dtype model_type do_*",
    "consumed_* iteration curr_iteration skipped_train_samples num_floating_point_operations_so_far",
)
"""Arguments that Megatron derives from the others."""


def _megatron(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    """Settings and format of a run of Megatron-LM that the hook recorded."""
    stated = {}
    for key, entry in source.entries.items():
        is_derived = any(fnmatchcase(key, pattern) for pattern in _DERIVED)
        needs_both = key.startswith("encoder") and "t5" in program
        # A size at its default (of latent attention, say) has no meaning if the switch that belongs
        # to it is off.
        if not entry.is_default and (not is_derived or needs_both):
            stated[key] = entry
    # The rest has the form of a YAML table of arguments.
    arguments = megatron_arguments(replace(source, entries=stated))
    if arguments is None:
        raise LaunchFileError(
            f"{source.place}: this file holds too few arguments of Megatron; write it again after get_args()"
        )
    entries = dict(arguments.entries)
    if program:
        entries[SCRIPT] = Entry(program, 0)
    return replace(arguments, entries=entries), MEGATRON


def _bridge(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return replace(source, entries=with_precision(source.entries)), BRIDGE


def with_precision(entries: Entries) -> dict[str, Entry]:
    """Settings with the name of their precision added, because a run holds only its switches."""
    settings = dict(entries)

    def is_on(name: str) -> bool:
        keys = [table + name for table in ("model.", "mixed_precision.", "trainer.plugins.")]
        return any(key in entries and entries[key].value for key in keys)

    # Megatron's mixed-precision recipes are functions that set switches; their name is gone when
    # they have run.
    half = next((name for name in ("bf16", "fp16") if is_on(name)), None)
    stated = entries.get("mixed_precision")
    if half is not None and (stated is None or stated.value is None):
        precision = "fp8" if is_on("fp8") else f"{half}_mixed"
        settings["mixed_precision"] = Entry(precision, 0)
    return settings


_NEMO_TABLES: Final = (
    ("model.config.", "model."),
    ("trainer.strategy.ddp.", "ddp."),
    ("trainer.strategy.", "model."),
    ("data.seq_length", "model.seq_length"),
    ("data.micro_batch_size", "train.micro_batch_size"),
    ("data.global_batch_size", "train.global_batch_size"),
    ("optim.config.", "optimizer."),
    ("trainer.plugins.precision", "mixed_precision"),
    ("trainer.plugins.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32"),
    ("trainer.plugins.", "trainer.plugins."),
)
"""Prefixes of keys in NeMo 2 recipes, and those of the same settings in Megatron-Bridge."""
_NEMO: Final = replace(
    BRIDGE,
    name="nemo",
    frameworks=("nemo",),
    harmless=(
        *BRIDGE.harmless,
        *patterns("trainer.* log.* resume.* data.* optim.* model.tokenizer*"),
    ),
)
"""Format of NeMo 2 recipes: fields of Megatron-Core's configuration under the names of
Megatron-Bridge."""


def nemo_key(key: str) -> str:
    """Name that Megatron-Bridge has for a setting of a NeMo 2 recipe."""
    start, name = next(((a, b) for a, b in _NEMO_TABLES if key.startswith(a)), ("", ""))
    return name + key.removeprefix(start)


def nemo_entries(source: Source) -> tuple[Source, LaunchFormat]:
    """Settings of a recipe of NeMo 2 under the names that Megatron-Bridge has for them."""
    renamed: dict[str, Entry] = {}
    for key, entry in source.entries.items():
        new_name = nemo_key(key)
        # Degrees of the strategy and lengths of the data replace those of the model's
        # configuration.
        if new_name not in renamed or not key.startswith("model."):
            renamed[new_name] = entry
    precision = renamed.get("mixed_precision")
    if precision is not None and isinstance(precision.value, str):
        # The precision plugin keeps Lightning's name of it and says FP8 beside that.
        fp8 = source.entries.get("trainer.plugins.fp8")
        recipe = source.entries.get("trainer.plugins.fp8_recipe")
        if fp8 is not None and fp8.value is not None:
            if recipe is not None and isinstance(recipe.value, str):
                narrow = f"fp8 {recipe.value}"
            else:
                narrow = "fp8"
            renamed["mixed_precision"] = replace(precision, value=narrow)
    return replace(source, entries=with_precision(renamed)), _NEMO


_CONVERTERS: Final = {"Float8": "float8", "MX": "mx"}
"""Prefixes of torchtitan's converter classes, with their former names."""


def _nemo(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return nemo_entries(source)


def torchtitan_entries(source: Source) -> tuple[Source, LaunchFormat]:
    """Settings of torchtitan; since 2026 the model's specification and converters are objects."""
    entries: dict[str, Entry] = {}
    for key, entry in source.entries.items():
        # Objects by class, as the configuration of 2026 has them, become the keys and words of the
        # tables before.
        if key in ("model_spec.name", "model_spec.flavor"):
            entries[key.replace("model_spec", "model")] = entry
        elif key == "model_converters.converters" and isinstance(entry.value, list):
            entries["model.converters"] = replace(entry, value=_converters(entry.value))
        elif key == "activation_checkpoint._target_":
            mode = next(
                (
                    name
                    for start, name in _CHECKPOINTS.items()
                    if str(entry.value).startswith(start)
                ),
                None,
            )
            entries["activation_checkpoint.mode"] = replace(entry, value=mode or entry.value)
        elif key == "loss._target_" and str(entry.value).startswith("Chunked"):
            entries["loss.chunked"] = replace(entry, value=True)
        elif key == "activation_checkpoint" and entry.value is None:
            entries["activation_checkpoint.mode"] = replace(entry, value="none")
        elif not key.endswith("_target_") and not key.startswith(
            ("model_spec.", "model_converters.")
        ):
            entries[key] = entry
    quantized = _quantized(source.entries)
    if quantized and "model.converters" not in entries:
        entries["model.converters"] = Entry([quantized], 0)
    if not _OF_2026.isdisjoint(source.entries):
        entries.setdefault(SELECTIVE_OPTION, Entry(BY_OPERATOR, 0))
    return replace(source, entries=_in_sequences(entries)), _TORCHTITAN


_OF_2026: Final = frozenset(("model_spec.name", "activation_checkpoint._target_"))
"""Keys that only configurations in Python have, in which selective recompute is always by operator
(torchtitan/config/configs.py, `ActivationCheckpointConfig`)."""


_LENGTH: Final = "training.seq_len"
_LOCAL: Final = "training.local_batch_size"
_LONGEST: Final = "training.max_context_length"
_PIECE_TOKENS: Final = "training.num_tokens_per_microbatch_per_dp_rank"
_STEP_TOKENS: Final = "training.num_tokens_per_train_step"
_PIECES: Final = "parallelism.num_pp_microbatches"


def _in_sequences(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Settings with batches in sequences, where they are in tokens as in torchtitan since
    mid-2026.

    A micro-batch is one row of packed documents of at most `max_context_length` tokens
    (`trainer.py`: an iteration has `num_pp_microbatches` of them per rank, a step as many
    iterations as `num_tokens_per_train_step` needs). Numbers of tokens that no whole number of
    sequences has are left, and named as not read.
    """
    named = [name for name in (_LONGEST, _PIECE_TOKENS, _STEP_TOKENS, _PIECES) if name in entries]
    if not named:
        return dict(entries)
    try:
        stated = {
            name: int(entries[name].value)
            for name in (*named, _LENGTH, _LOCAL)
            if name in entries and not isinstance(entries[name].value, bool)
        }
    except (TypeError, ValueError):
        return dict(entries)
    length = stated.get(_LONGEST, stated.get(_LENGTH, 2048))
    # Until then a local batch had as many tokens, and the recipes' are still in sequences.
    tokens = stated.get(_PIECE_TOKENS, stated.get(_LOCAL, 8) * stated.get(_LENGTH, 2048))
    step_tokens = stated.get(_STEP_TOKENS, -1)
    length = min(length, tokens)
    if length <= 0 or tokens % length or (step_tokens > 0 and step_tokens % length):
        return dict(entries)

    def entry(name: str, number: int) -> Entry:
        return replace(entries[name], value=number) if name in entries else Entry(number, 0)

    renamed = {name: value for name, value in entries.items() if name not in named}
    renamed[_LENGTH] = entry(_LONGEST, length)
    pieces = stated.get(_PIECES, 1)
    renamed[_LOCAL] = entry(_PIECE_TOKENS, tokens // length * pieces)
    if pieces > 1:
        renamed["parallelism.pipeline_parallel_microbatch_size"] = entry(_PIECES, tokens // length)
    if step_tokens > 0:
        renamed["training.global_batch_size"] = entry(_STEP_TOKENS, step_tokens // length)
    return renamed


_CHECKPOINTS: Final = {"Full": "full", "Selective": "selective", "No": "none"}
"""Prefixes of torchtitan's activation checkpointing classes since 2026, with the mode of each."""
_QUANTIZED_LINEAR: Final = {
    "Float8Linear": "quantize.linear.float8",
    "MXFP8Linear": "mx",
    "NVFP4Linear": "nvfp4",
}
"""Classes that replace linear layers in a model's specification, with the converter of each."""


def _quantized(entries: Entries) -> str:
    """The converter that changed the linear layers of a model's specification; empty if none
    did."""
    lists = [
        str(entry.value)
        for key, entry in entries.items()
        if key.startswith("model_spec.model.") and isinstance(entry.value, list)
    ]
    for text, (name, converter) in product(lists, _QUANTIZED_LINEAR.items()):
        if f"'{name}." in text:
            return converter
    return ""


def _torchtitan(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return torchtitan_entries(source)


_TORCHTITAN: Final = replace(
    TORCHTITAN,
    harmless=(
        *TORCHTITAN.harmless,
        *patterns("dataloader.* validator.* tokenizer.* loss.* hf_assets_path dump_folder"),
    ),
)
"""The torchtitan format with the tables of its Python configurations."""


def _converters(converters: list[Any]) -> list[str]:
    # Converters are objects since 2026 and were names before; the table of rules knows the names.
    names = []
    for converter in converters:
        target = (
            str(converter.get("_target_", "")) if isinstance(converter, dict) else str(converter)
        )
        name = next(
            (short for start, short in _CONVERTERS.items() if target.startswith(start)), target
        )
        names.append(name)
    return names


def _deepspeed(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return source, DEEPSPEED


def _trainer(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return with_named_files(source, TRAINER, Neighbours(Path(source.place).parent))


def _maxtext(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return source, MAXTEXT


def _nanotron(source: Source, program: str) -> tuple[Source, LaunchFormat]:
    return source, NANOTRON


_READERS: Final[Mapping[str, Callable[[Source, str], tuple[Source, LaunchFormat]]]] = {
    "megatron": _megatron,
    "megatron-bridge": _bridge,
    "nemo": _nemo,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "hf-trainer": _trainer,
    "maxtext": _maxtext,
    "nanotron": _nanotron,
}
"""Readers of the settings of each hook, by its name."""
