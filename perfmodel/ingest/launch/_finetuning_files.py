"""Files of fine-tuning front ends, joined with the DeepSpeed and Accelerate files that they
name."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel.ingest.launch._accelerate import ACCELERATE, DEEPSPEED_FILE
from perfmodel.ingest.launch._axolotl import AXOLOTL
from perfmodel.ingest.launch._deepspeed import DEEPSPEED
from perfmodel.ingest.launch._entries import (
    AUTO,
    Entries,
    Entry,
    Neighbours,
    Source,
    included_entries,
)
from perfmodel.ingest.launch._finetuning import is_on
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY, LLAMA_FACTORY_PLUGINS, PLUGIN_FILE
from perfmodel.ingest.launch._oumi import OUMI, in_words_of_trainer, is_oumi
from perfmodel.ingest.launch._read_entries import read_json, read_yaml
from perfmodel.ingest.launch._swift import SWIFT
from perfmodel.ingest.launch._table import BadValue, Fields, Rule
from perfmodel.ingest.launch._torchtune import TORCHTUNE
from perfmodel.ingest.launch._trainer import TRAINER
from perfmodel.ingest.launch._trainer_names import MICRO, OWN_PROGRAM
from perfmodel.ingest.launch._xtuner import XTUNER, is_xtuner

FINETUNING: Final = (
    AXOLOTL,
    TORCHTUNE,
    LLAMA_FACTORY_PLUGINS,
    LLAMA_FACTORY,
    SWIFT,
    OUMI,
    TRAINER,
    XTUNER,
)
"""Formats of front ends, which are read but not written; the first that recognises a file reads
it."""
_CONFIGURATION: Final = "deepspeed"
"""The key that names DeepSpeed's file, or holds its settings."""
_BY_NAME: Final = "<deepspeed by name>"
_PRECISION_UNSEEN: Final = "<precision of a file that is not there>"
_STAGE_FLAG: Final = "zero_stage"
"""Entry for the name of a missing DeepSpeed file."""
_ACCELERATE_FILE: Final = "config_file"
_OF_LAUNCHER: Final = "<accelerate launch> "
"""Prefix of entries that are flags of `accelerate launch`; they override its file."""
_ACCELERATE_BY_NAME: Final = "<accelerate by name>"
"""Entry for the name of a missing Accelerate file."""
_ENGINES: Final = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
"""Flags of `accelerate launch` that choose the engine, with the name of each in its file."""
_ENGINE_TITLES: Final = {
    "DEEPSPEED": "DeepSpeed",
    "FSDP": "PyTorch's FSDP",
    "MEGATRON_LM": "Megatron-LM",
}
_DEEPSPEED_FLAGS: Final = (
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
)
"""Flags of `accelerate launch` whose keys are in the DeepSpeed block of its file."""
_BLOCKS: Final = {
    "fsdp_": "fsdp_config",
    "megatron_lm_": "megatron_lm_config",
    "parallelism_config_": "parallelism_config",
}
"""Blocks of Accelerate's file by the prefixes of their keys, which flags share."""
_PRECISION: Final = "mixed_precision"
_BESIDE_DEEPSPEED: Final = (
    "monitor_config.*",
    "comms_config.*",
    "distributed_type",
    "deepspeed_config.*",
)
"""Further keys that a DeepSpeed file replaces, or that select DeepSpeed."""
_NO_OFFLOAD: Final = re.compile(r"(no|non|without)[-_]?offload")
_STAGE_IN_NAME: Final = re.compile(r"(?:z|zero|stage)[-_]?([0-3])(?![0-9])", re.IGNORECASE)
_TITLES: Final = {
    "axolotl": "axolotl",
    "torchtune": "torchtune",
    "llama-factory": "LLaMA-Factory",
    "llama-factory-v1": "LLaMA-Factory",
    "ms-swift": "MS-Swift",
    "hf-trainer": "Hugging Face's Trainer",
    "oumi": "Oumi",
    "own-program": "the program",
    "roll": "ROLL",
    "xtuner": "XTuner",
}
_BATCHES: Final = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
"""DeepSpeed keys that the front ends fill in from their own settings."""


def finetuning_format(entries: Entries) -> LaunchFormat | None:
    """The front end that the file belongs to; None for other files."""
    # mergekit and others have a `base_model` too.
    has_training_keys = bool({"sequence_len", "micro_batch_size", "adapter"} & set(entries))
    if "base_model" in entries and not has_training_keys:
        return None
    for form in FINETUNING:
        if form is AXOLOTL and "base_model" not in entries:
            continue
        if form is LLAMA_FACTORY_PLUGINS and not {"train_dataset", "cutoff_len"} & set(entries):
            continue
        if form is OUMI and not is_oumi(entries):
            continue
        if form is SWIFT and "tensor_model_parallel_size" in entries:
            continue  # of Megatron-SWIFT, whose arguments are Megatron's
        if form is XTUNER and not is_xtuner(entries):
            continue
        if form.recognises(entries):
            return form
    return None


def with_named_files(
    source: Source, form: LaunchFormat, neighbours: Neighbours
) -> tuple[Source, LaunchFormat]:
    """Join a front end's file with the DeepSpeed and Accelerate files that it names; returns the
    format that reads both.

    Args:
        source: settings of the file or command.
        form: format of the front end.
        neighbours: files that it may name.
    """
    entries = dict(source.entries)
    if form is OUMI:
        entries = in_words_of_trainer(entries)
        source = replace(source, entries=entries)
    if PLUGIN_FILE in entries:
        entries[_CONFIGURATION] = entries.pop(PLUGIN_FILE)
    # The front end's own keys win over Accelerate's, and DeepSpeed's file over both, except for
    # `auto` values.
    accelerate = _accelerate_entries(entries, neighbours)
    entries = {key: entry for key, entry in entries.items() if not key.startswith(_OF_LAUNCHER)}
    if accelerate:
        entries = accelerate | entries
        if DEEPSPEED_FILE in accelerate:
            entries.setdefault(_CONFIGURATION, accelerate[DEEPSPEED_FILE])
    if _is_deepspeed(entries):
        merged = _with_deepspeed(entries, form, neighbours)
        return replace(source, entries=merged), _on_deepspeed(form)
    if accelerate:
        with_precision = replace(source, entries=_with_precision(entries, form))
        return with_precision, _on_accelerate(form, entries)
    return source, _on_torch(form)


def _remark(form: LaunchFormat, framework: str) -> Fields:
    title = _TITLES[form.name]
    return {
        "note.framework": (
            f"{title} runs on {framework}, so {framework} is predicted; overheads of {title} itself are not modelled"
        )
    }


def _on_torch(form: LaunchFormat) -> LaunchFormat:
    return replace(form, always={**form.always, **_remark(form, "PyTorch alone")})


def _on_deepspeed(form: LaunchFormat) -> LaunchFormat:
    """The format of a front end whose files may also hold DeepSpeed's settings."""
    return replace(
        form,
        # The last rule for a field wins: the front end fills in values where DeepSpeed's table
        # would take its own defaults.
        table=(
            *DEEPSPEED.table,
            *form.table,
            Rule(keys=(_BY_NAME, *_OFFLOADED), read=_stage_by_name),
            Rule(keys=(_PRECISION_UNSEEN,), read=_unseen_precision),
        ),
        harmless=(*DEEPSPEED.harmless, *form.harmless, *_BESIDE_DEEPSPEED),
        framework=lambda fields, entries: "deepspeed",
        always={**form.always, **_remark(form, "DeepSpeed")},
    )


def _on_accelerate(form: LaunchFormat, entries: Entries) -> LaunchFormat:
    chosen = entries.get("distributed_type")
    engine = _ENGINE_TITLES.get(str(chosen.value) if chosen else "", "PyTorch alone")
    return replace(
        form,
        table=(*ACCELERATE.table, *form.table, _NAMED_RULE),
        harmless=(*ACCELERATE.harmless, *form.harmless),
        framework=ACCELERATE.framework,
        always={**form.always, **_remark(form, engine)},
    )


def accelerate_flags(flags: Entries) -> dict[str, Entry]:
    """Flags of `accelerate launch` as entries that `with_named_files` reads beside its file.

    Args:
        flags: flags before the program, by names with underscores.
    """
    entries: dict[str, Entry] = {}
    for name, entry in flags.items():
        block = next(
            (block for beginning, block in _BLOCKS.items() if name.startswith(beginning)), ""
        )
        if name == _ACCELERATE_FILE:
            entries[name] = entry
        elif name in _ENGINES:
            entries[f"{_OF_LAUNCHER}distributed_type"] = replace(entry, value=_ENGINES[name])
        elif name in _DEEPSPEED_FLAGS:
            entries[f"{_OF_LAUNCHER}deepspeed_config.{name}"] = entry
        elif block:
            entries[f"{_OF_LAUNCHER}{block}.{name}"] = entry
        elif name == _PRECISION:
            entries[f"{_OF_LAUNCHER}{name}"] = replace(
                entry, value="no" if entry.value is False else entry.value
            )
    return entries


def _accelerate_entries(entries: Entries, neighbours: Neighbours) -> dict[str, Entry]:
    """Entries of Accelerate, from the file of `accelerate launch --config_file` and from flags,
    which override it."""
    of_launcher = {
        key.removeprefix(_OF_LAUNCHER): entry
        for key, entry in entries.items()
        if key.startswith(_OF_LAUNCHER)
    }
    named = entries.get(_ACCELERATE_FILE)
    if named is None or not isinstance(named.value, str):
        return of_launcher
    file = neighbours.find(named.value)
    if file is None:
        return _engine_by_name(named) | of_launcher
    source = read_yaml(file.text, str(file.path), file.path.parent)
    return included_entries(source.entries, file.path, named.line) | of_launcher


def _engine_by_name(named: Entry) -> dict[str, Entry]:
    """Settings implied by the name of an Accelerate file, such as `deepspeed_zero3.yaml` or
    `fsdp.yaml`."""
    file_name = Path(str(named.value)).name.lower()
    # Nearly all such files train in 16 bits.
    entries = {_ACCELERATE_BY_NAME: named, _PRECISION: replace(named, value="bf16")}
    stage = _STAGE_IN_NAME.search(file_name)
    if "fsdp" in file_name:
        entries["distributed_type"] = replace(named, value="FSDP")
    elif stage is not None:
        entries["distributed_type"] = replace(named, value="DEEPSPEED")
        entries["deepspeed_config.zero_stage"] = replace(named, value=int(stage[1]))
    return entries


def _missing_file(settings: Mapping[str, Any]) -> Fields:
    """The doubt about a missing Accelerate file."""
    if _ACCELERATE_BY_NAME not in settings:
        return {}
    engine = _ENGINE_TITLES.get(str(settings.get("distributed_type")))
    if engine:
        assumed = f"{engine} (from the file's name) in bf16 is assumed"
    else:
        assumed = "plain data parallelism in bf16 is assumed"
    return {
        "doubt.accelerate": (
            f"the layout, the precision and memory may be wrong: {settings[_ACCELERATE_BY_NAME]}, the file of "
            f"accelerate launch, was not found in the script's folder; {assumed} where no flag "
            "says otherwise"
        )
    }


_NAMED_RULE: Final = Rule(keys=(_ACCELERATE_BY_NAME, "distributed_type"), read=_missing_file)


def _is_deepspeed(entries: Mapping[str, Entry]) -> bool:
    named = entries.get(_CONFIGURATION)
    return (named is not None and is_on(named.value)) or any(
        key.startswith("deepspeed.") for key in entries
    )


def _with_deepspeed(
    entries: dict[str, Entry], form: LaunchFormat, neighbours: Neighbours
) -> dict[str, Entry]:
    """Entries joined with DeepSpeed's settings, where `auto` is replaced by the front end's
    value."""
    # A hook's file holds DeepSpeed's settings themselves, a launch file the name of their file.
    merged = {key: entry for key, entry in entries.items() if not key.startswith("deepspeed.")}
    inside = {
        key.removeprefix("deepspeed."): entry
        for key, entry in entries.items()
        if key.startswith("deepspeed.")
    }
    named = entries.get(_CONFIGURATION)
    if not inside and named is not None:
        built = _STAGE_FLAG in entries and not isinstance(named.value, str)
        inside = _built_by_program(merged) if built else _deepspeed_entries(named, neighbours)
        _take_stage(merged, inside)
    dtype = _dtype_of(merged, form)
    # The Trainer's own switches state the precision; a user-written program takes it from
    # DeepSpeed's file.
    if _BY_NAME in inside and OWN_PROGRAM in merged and not _states_precision(merged, form):
        dtype = "bf16"
        merged[_PRECISION_UNSEEN] = inside[_BY_NAME]
    # Without its own switch, the Trainer follows Accelerate's settings.
    launched = merged.pop(_PRECISION, None)
    if launched is not None and not _states_precision(merged, form):
        dtype = str(launched.value)
    # Rules of the front ends ask whether DeepSpeed runs, wherever its settings stand.
    merged.setdefault(_CONFIGURATION, Entry(True, 0))
    for key, entry in inside.items():
        # `transformers` checks these against its own arguments and refuses others, so that the
        # front end's are enough.
        if key in _BATCHES and (MICRO in merged or entry.value == AUTO):
            continue
        if key in ("bf16.enabled", "fp16.enabled") and entry.value == AUTO:
            merged[key] = replace(entry, value=key.startswith(dtype))
        elif entry.value != AUTO:
            merged[key] = entry
    if not any(key in merged for key in ("bf16.enabled", "fp16.enabled")):
        merged[f"{dtype}.enabled"] = Entry(dtype in ("bf16", "fp16"), 0)
    # DeepSpeed's own table knows these two as switches of its own.
    for half in ("bf16", "fp16"):
        if half in merged:
            merged[half] = replace(merged[half], value=is_on(merged[half].value))
    return merged


def _built_by_program(entries: dict[str, Entry]) -> dict[str, Entry]:
    """DeepSpeed settings that a program derives from its own flags, which are removed from
    `entries` (DeepSpeed-Chat, dschat/utils/ds_utils.py `get_train_ds_config`)."""
    stage = entries.pop(_STAGE_FLAG)
    offload = entries.pop("offload", None)
    # OpenRLHF's switch keeps the optimizer's states alone on the host, under every stage
    # (`openrlhf/utils/deepspeed/deepspeed_utils.py`, `get_train_ds_config`).
    offloaded_adam = entries.pop("adam_offload", None)
    inside = {"zero_optimization.stage": stage}
    # Its programs run in 16 bits where no flag says otherwise (`--dtype`, which older ones do not
    # have).
    if not any(name in entries for name in ("bf16", "fp16", "dtype", "torch_dtype")):
        entries["fp16"] = replace(stage, value=True)
    if offload is not None and is_on(offload.value):
        inside["zero_optimization.offload_optimizer.device"] = replace(offload, value="cpu")
        if str(stage.value) == "3":
            inside["zero_optimization.offload_param.device"] = replace(offload, value="cpu")
    if offloaded_adam is not None and is_on(offloaded_adam.value):
        inside["zero_optimization.offload_optimizer.device"] = replace(offloaded_adam, value="cpu")
    return inside


def _take_stage(entries: dict[str, Entry], inside: dict[str, Entry]) -> None:
    """Move a program's own flag for the stage to DeepSpeed's settings where these state none, and
    drop it where they state the same.

    A flag that contradicts the file stays, to be named as not read: DeepSpeed sees the file alone.
    """
    flag = entries.get(_STAGE_FLAG)
    if flag is None:
        return
    stated = inside.setdefault("zero_optimization.stage", flag)
    if str(stated.value) == str(flag.value):
        del entries[_STAGE_FLAG]


def _deepspeed_entries(named: Entry, neighbours: Neighbours) -> dict[str, Entry]:
    """Settings of the named DeepSpeed file, or those that its name implies."""
    name = str(named.value)
    file = neighbours.find(name)
    if file is not None:
        return included_entries(read_json(file.text, str(file.path)).entries, file.path, named.line)
    # Files that come with the front ends are called after their stage (`ds_z3_offload_config.json`,
    # `zero2.json`), and are seldom copied beside the launch file.
    entries = {_BY_NAME: Entry(name, named.line)}
    file_name = Path(name).name.lower()
    stage = _STAGE_IN_NAME.search(file_name)
    if stage is None:
        return entries
    entries["zero_optimization.stage"] = Entry(int(stage[1]), named.line)
    if "offload" in file_name and "partial" not in file_name and not _NO_OFFLOAD.search(file_name):
        if not file_name.removesuffix(".json").endswith("params"):
            entries["zero_optimization.offload_optimizer.device"] = Entry("cpu", named.line)
        # Only stage 3 can offload weights.
        if stage[1] == "3":
            entries["zero_optimization.offload_param.device"] = Entry("cpu", named.line)
    return entries


_OFFLOADED: Final = {
    "zero_optimization.offload_optimizer.device": "optimizer states",
    "zero_optimization.offload_param.device": "weights",
}


def _stage_by_name(settings: Mapping[str, Any]) -> Fields:
    """Notes on a DeepSpeed file that was not found: what its name states, or that it states
    nothing."""
    if _BY_NAME not in settings:
        return {}
    name = str(settings[_BY_NAME])
    stage = _STAGE_IN_NAME.search(Path(name).name)
    if stage is None:
        return {
            "doubt.deepspeed": f"the layout, the precision and memory may be wrong: {name} was "
            "not found in the same folder"
        }
    offloads = [what for key, what in _OFFLOADED.items() if settings.get(key) == "cpu"]
    stated = f"zero={stage[1]}" + (
        f" with {' and '.join(offloads)} on the host" if offloads else ""
    )
    fields: Fields = {
        "note.deepspeed": f"{stated} is taken from the name of {name}; the file itself was not found"
    }
    if "partial" in Path(name).name.lower():
        fields["doubt.offload"] = (
            f"memory may be wrong: {name} was not found in the same folder, and its name does "
            "not tell which part of the "
            "states lies in host memory"
        )
    return fields


def _unseen_precision(settings: Mapping[str, Any]) -> Fields:
    name = settings[_PRECISION_UNSEEN]
    return {
        "doubt.precision": f"the precision may be wrong: {name} was not found in the same folder; "
        "bf16 is assumed"
    }


def _states_precision(entries: Entries, form: LaunchFormat) -> bool:
    """Whether the front end's own keys state the element type."""
    keys: set[str] = set()
    for rule in form.table:
        if "dtype" in rule.fields:
            keys.update(rule.keys)
    return not keys.isdisjoint(entries)


def _dtype_of(entries: Mapping[str, Entry], form: LaunchFormat) -> str:
    """The element type stated by the front end's own keys, or its default."""
    for rule in form.table:
        if "dtype" not in rule.fields:
            continue
        values = rule.said({name: entries[name].value for name in rule.keys if name in entries})
        try:
            fields = rule.read(values) if values else rule.defaults
            return fields["dtype"]
        except BadValue:
            # The value is refused where the file is read as a whole.
            return "fp32"
    return "fp32"


def _with_precision(entries: dict[str, Entry], form: LaunchFormat) -> dict[str, Entry]:
    """Entries with the front end's precision in place of that in Accelerate's file, as in the
    Trainer."""
    dtype = _dtype_of(entries, form)
    return entries if dtype == "fp32" else entries | {"mixed_precision": Entry(dtype, 0)}
