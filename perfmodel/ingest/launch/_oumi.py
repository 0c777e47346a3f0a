"""YAML of Oumi (`oumi/core/configs/params`): arguments of Hugging Face's Trainer, PEFT, FSDP and
DeepSpeed in blocks, partly by other names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entries, Entry
from perfmodel.ingest.launch._finetuning import is_on, method_fields
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._table import Fields, Rule
from perfmodel.ingest.launch._trainer import TRAINER
from perfmodel.ingest.launch._trainer_names import MICRO

_NAMES: Final = {
    "model.model_name": "model_name_or_path",
    "model.model_max_length": "max_length",
    "model.torch_dtype_str": "torch_dtype",
    "model.attn_implementation": "attn_implementation",
    "model.enable_liger_kernel": "use_liger_kernel",
    "model.trust_remote_code": "trust_remote_code",
    "model.chat_template": "chat_template",
    "training.optimizer": "optim",
    "training.compile": "torch_compile",
    "training.enable_gradient_checkpointing": "gradient_checkpointing",
    "peft.q_lora": "load_in_4bit",
    "fsdp.sharding_strategy": "fsdp_config.sharding_strategy",
    "fsdp.cpu_offload": "fsdp_config.offload_params",
    "data.train.pack": "packing",
    "deepspeed.deepspeed_config_path": "deepspeed",
}
"""Keys of Oumi, with the Trainer's for each."""
_SHORTENED: Final = ("training.trainer_kwargs.", "training.", "peft.")
"""Blocks whose other keys have the names of the Trainer's arguments."""
_SWITCHED: Final = {
    "fsdp.": "fsdp.enable_fsdp",
    "deepspeed.": "deepspeed.enable_deepspeed",
    "peft.": "training.use_peft",
}
"""Blocks that count only if a switch is on."""
_OF_ZERO: Final = re.compile(
    r"(offload_\w+|stage3_\w+|(reduce|allgather)_\w+|overlap_comm|contiguous_gradients"
    r"|round_robin_gradients|sub_group_size|memory_efficient_linear)(\..+)?"
)
"""Keys of Oumi's block of DeepSpeed that are in the table `zero_optimization` of its file."""
_KIND: Final = "trainer_type"


def _objective(settings: Mapping[str, Any]) -> Fields:
    return method_fields(settings[_KIND], _KIND, ("trl_sft", "hf", "oumi"))


OUMI: Final[LaunchFormat] = replace(
    TRAINER,
    name="oumi",
    frameworks=("oumi",),
    marks=("model.model_name", f"training.{_KIND}"),
    table=(*TRAINER.table, Rule(keys=(_KIND,), read=_objective)),
    harmless=(
        *TRAINER.harmless,
        *patterns(
            "data.* model.tokenizer_* model.load_pretrained_weights model.device_map fsdp.* enable_* telemetry.* "
            "profiler.* include_* use_deterministic empty_device_cache_steps dep_log_level save_* metrics_function "
            "peft_save_mode lora_task_type lora_init_weights use_bnb_nested_quant llm_int8_* nccl_* "
            "try_resume_* log_* grpo.* gkd.* gold.* reward_function* verl_config_overrides.* full_determinism",
        ),
    ),
)
"""The format of Oumi; its entries are read after `in_words_of_trainer`."""


def is_oumi(entries: Entries) -> bool:
    """Whether a file is Oumi's, by the blocks that it has for the model and for the trainer."""
    return all(mark in entries for mark in OUMI.marks)


def in_words_of_trainer(entries: Entries) -> dict[str, Entry]:
    """Oumi's settings under the names of the Trainer's arguments."""
    renamed: dict[str, Entry] = {}
    for key, entry in entries.items():
        switch = next((s for block, s in _SWITCHED.items() if key.startswith(block)), None)
        is_off = switch is not None and not (switch in entries and is_on(entries[switch].value))
        if is_off:
            continue
        name = _name_of(key)
        if name is not None:
            renamed[name] = _value_of(key, entry)
    _add_precision(entries, renamed)
    if _is_on(entries, "fsdp.enable_fsdp"):
        renamed.setdefault("fsdp_config.sharding_strategy", Entry("FULL_SHARD", 0))
    if _is_on(entries, "deepspeed.enable_deepspeed") and "deepspeed" not in renamed:
        # Oumi hands DeepSpeed every setting, also those that it leaves at its own defaults.
        renamed.setdefault("deepspeed.zero_optimization.stage", Entry(0, 0))
        renamed.setdefault("deepspeed.zero_optimization.overlap_comm", Entry(False, 0))
    if _is_on(entries, "training.use_peft"):
        renamed.setdefault("lora_r", Entry(8, 0))
    else:
        renamed.pop("use_peft", None)
    renamed.setdefault(MICRO, Entry(8, 0))
    renamed.setdefault("packing", Entry(False, 0))
    return renamed


def _is_on(entries: Entries, name: str) -> bool:
    return name in entries and is_on(entries[name].value)


def _name_of(key: str) -> str | None:
    """The Trainer's name for a key of Oumi; None for a switch that is followed here."""
    if key in _SWITCHED.values() and key != "training.use_peft":
        return None
    if key in _NAMES:
        return _NAMES[key]
    for block in _SHORTENED:
        if key.startswith(block):
            return key.removeprefix(block)
    if not key.startswith("deepspeed."):
        return key
    name = key.removeprefix("deepspeed.")
    if name == "zero_stage":
        return "deepspeed.zero_optimization.stage"
    if name == "precision":
        return None
    return f"deepspeed.zero_optimization.{name}" if _OF_ZERO.fullmatch(name) else key


def _value_of(key: str, entry: Entry) -> Entry:
    """A value as DeepSpeed writes it: Oumi has names for stages (`ZERO_3`) and devices (`CPU`)."""
    if key == "deepspeed.zero_stage":
        return replace(entry, value=str(entry.value).rpartition("_")[2])
    if key.endswith(".device") and isinstance(entry.value, str):
        return replace(entry, value=entry.value.lower())
    return entry


_HALVES: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}


def _add_precision(entries: Entries, renamed: dict[str, Entry]) -> None:
    """Add the switch of mixed precision, which three blocks may state; without one, products and
    optimizer states have the type that the weights are loaded in."""
    renamed.pop("mixed_precision_dtype", None)
    renamed.pop("fsdp.mixed_precision", None)
    for key in ("training.mixed_precision_dtype", "fsdp.mixed_precision"):
        stated = entries.get(key)
        half = _HALVES.get(str(stated.value).lower()) if stated is not None else None
        if stated is not None and half is not None:
            renamed[half] = replace(stated, value=True)
            return
    precision = entries.get("deepspeed.precision")
    if precision is not None and _is_on(entries, "deepspeed.enable_deepspeed"):
        half = _HALVES.get(str(precision.value).lower())
        if half is not None:
            renamed[f"deepspeed.{half}.enabled"] = replace(precision, value=True)
        return
    loaded = entries.get("model.torch_dtype_str")
    is_bf16 = loaded is not None and _HALVES.get(str(loaded.value).lower()) == "bf16"
    is_adam = (
        "adam" in str(entries["training.optimizer"].value)
        if "training.optimizer" in entries
        else True
    )
    is_full = not _is_on(entries, "training.use_peft")
    if is_bf16 and is_adam and is_full and _is_on(entries, "fsdp.enable_fsdp"):
        renamed["pure_bf16"] = Entry(True, loaded.line if loaded is not None else 0)
