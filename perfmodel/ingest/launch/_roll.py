"""YAML of ROLL (alibaba/ROLL, `roll/configs`): the training half of its pipelines.

A block of the file is the worker that trains. Its arguments are those of Hugging Face's Trainer and
of LLaMA-Factory, and its strategy DeepSpeed, PyTorch's FSDP2 or Megatron-Core, so that the readers
of those read it.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entries, Entry, Neighbours, Source
from perfmodel.ingest.launch._finetuning import is_on
from perfmodel.ingest.launch._finetuning_files import with_named_files
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY
from perfmodel.ingest.launch._megatron import MEGATRON
from perfmodel.ingest.launch._megatron_yaml import factory_arguments
from perfmodel.ingest.launch._table import WHOLE, BadValue, Fields, Rule
from perfmodel.ingest.launch._trainer_names import ACCUMULATION, MICRO

_WORKERS: Final = ("actor_train", "sft_train", "dpo_train", "student")
"""Blocks of workers that train; a file of distillation has a student, and all others the first
three."""
_STRATEGY: Final = "strategy_args.strategy_name"
_CONFIG: Final = "strategy_args.strategy_config"
_LENGTHS: Final = ("prompt_length", "response_length")
_CHOSEN: Final = "chosen_key"
"""A key that only files of preferences have, whose samples are two sequences each."""
_RANGE: Final = re.compile(r"list\(range\((?:(\d+),)?(\d+)\)\)")
_SIZE: Final = "fsdp_size"
_COPIES: Final = "<copies of FSDP's shards>"
_OWN: Final = {
    "model_args.disable_gradient_checkpointing": "disable_gradient_checkpointing",
    "model_args.lora_rank": "lora_rank",
    "model_args.lora_target": "lora_target",
    "model_args.lora_dropout": "lora_dropout",
    "model_args.attn_implementation": "flash_attn",
    "model_args.ulysses_size": "sequence_parallel_size",
    "model_args.adapter_name_or_path": "adapter_name_or_path",
    "training_args.optim": "optim",
    f"training_args.{MICRO}": MICRO,
    f"training_args.{ACCUMULATION}": ACCUMULATION,
    "use_sequence_packing": "packing",
    "use_dynamic_batching_in_train": "use_dynamic_batching_in_train",
}
"""Keys of a worker, and LLaMA-Factory's for them."""


def _worker(entries: Entries) -> str | None:
    return next((block for block in _WORKERS if f"{block}.{_STRATEGY}" in entries), None)


def roll_settings(source: Source) -> tuple[Source, LaunchFormat] | None:
    """Settings and format of a file of ROLL by the strategy of the worker that trains; None of
    another file."""
    block = _worker(source.entries)
    if block is None:
        return None
    worker = {
        key.removeprefix(f"{block}."): entry
        for key, entry in source.entries.items()
        if key.startswith(f"{block}.")
    }
    is_megatron = str(worker[_STRATEGY].value).startswith("megatron")
    stated = _for_worker(source.entries, worker)
    # Its own files of DeepSpeed's settings are named by a reference, and need not lie beside the
    # file.
    doubts = tuple(doubt for doubt in source.doubts if "deepspeed_" not in doubt)
    source = replace(source, doubts=doubts, devices=_devices(worker))
    remarks = _remarks(block)
    if is_megatron:
        for kind in ("tensor", "pipeline"):
            stated.setdefault(f"{kind}_model_parallel_size", Entry(1, 0))
        # Megatron-Core's attention is fused, even if Transformers' setting names another kernel.
        stated.pop("flash_attn", None)
        stated |= _config(worker)
        arguments = factory_arguments(replace(source, entries=stated))
        if arguments is None:
            return None
        return (arguments, replace(MEGATRON, always={**MEGATRON.always, **remarks}))
    form = replace(
        LLAMA_FACTORY,
        name="roll",
        table=(
            *LLAMA_FACTORY.table,
            Rule(keys=(_COPIES,), read=lambda settings: {"replicate": settings[_COPIES]}),
        ),
        always={**LLAMA_FACTORY.always, **remarks},
    )
    stated |= _sharding(source, worker)
    return with_named_files(
        replace(source, entries=stated), form, Neighbours(Path(source.place).parent)
    )


def _for_worker(entries: Entries, worker: Entries) -> dict[str, Entry]:
    """Model, batch, length and precision as LLaMA-Factory's keys."""
    stated = {name: worker[key] for key, name in _OWN.items() if key in worker}
    model = worker.get(
        "model_args.model_name_or_path", entries.get("pretrain", entries.get("student_pretrain"))
    )
    if model is not None:
        stated["model_name_or_path"] = model
    if "sequence_length" in entries:
        stated["cutoff_len"] = entries["sequence_length"]
    elif all(name in entries for name in _LENGTHS):
        prompt, response = (entries[name] for name in _LENGTHS)
        stated["cutoff_len"] = replace(response, value=_sum(prompt.value, response.value))
    # Adapters are trained where a target of them is named (roll/models/model_providers.py).
    if "model_args.lora_target" in worker:
        has_adapters = is_on(worker["model_args.lora_target"].value)
    else:
        has_adapters = False
    stated["finetuning_type"] = Entry("lora" if has_adapters else "full", 0)
    if not has_adapters:
        stated = {name: entry for name, entry in stated.items() if not name.startswith("lora_")}
    dtype = worker.get("model_args.dtype", Entry("bf16", 0))
    if dtype.value in ("bf16", "fp16"):
        stated[str(dtype.value)] = replace(dtype, value=True)
    if _CHOSEN in entries and MICRO in stated:
        stated[MICRO] = replace(stated[MICRO], value=_sum(stated[MICRO].value, stated[MICRO].value))
    # The tower of images is left out of the prediction anyway; other frozen parts are not.
    frozen = worker.get("model_args.freeze_module_prefix")
    if frozen is not None and not str(frozen.value).startswith("vision"):
        stated["freeze_module_prefix"] = frozen
    return stated


def _sum(first: Any, second: Any) -> Any:
    """Sum of two whole numbers; of anything else the second, which its reader refuses."""
    try:
        return WHOLE.read(first) + WHOLE.read(second)
    except BadValue:
        return second


def _config(worker: Entries) -> dict[str, Entry]:
    """Settings of the strategy; those that it hands on to the model's configuration stand beside
    its own."""
    prefix = f"{_CONFIG}."
    names = {
        key.removeprefix(prefix): entry for key, entry in worker.items() if key.startswith(prefix)
    }
    return {key.removeprefix("additional_configs."): entry for key, entry in names.items()}


def _sharding(source: Source, worker: Entries) -> dict[str, Entry]:
    """Entries on sharding: DeepSpeed's settings or the name of their file, or those of FSDP2."""
    if str(worker[_STRATEGY].value).startswith("fsdp2"):
        return _fsdp(worker, source.devices)
    named = worker.get(_CONFIG)
    if named is None:
        return {f"deepspeed.{key}": entry for key, entry in _config(worker).items()}

    # `${NAME}` refers to a table of this file; without one, NAME is that of a file of DeepSpeed.
    name = str(named.value).removeprefix("${").removesuffix("}")
    settings = {}
    for key, entry in source.entries.items():
        if key.startswith(f"{name}."):
            settings[f"deepspeed.{key.removeprefix(f'{name}.')}"] = entry
    if settings or not is_on(named.value):
        return settings
    return {"deepspeed": replace(named, value=f"{name}.json")}


def _fsdp(worker: Entries, devices: int | None) -> dict[str, Entry]:
    config = _config(worker)
    stated = {"fsdp_version": Entry(2, 0)}
    for key, name in (
        ("reshard_after_forward", "reshard_after_forward"),
        ("offload_policy", "offload_params"),
    ):
        if key in config:
            stated[f"fsdp_config.{name}"] = config[key]
    # Fewer ranks in a group of shards than there are: copies of the groups (roll
    # `create_device_mesh_with_ulysses`).
    size = config[_SIZE].value if _SIZE in config else 1
    if isinstance(size, int) and devices and 1 < size < devices and devices % size == 0:
        stated[_COPIES] = replace(config[_SIZE], value=devices // size)
    return stated


def _devices(worker: Entries) -> int | None:
    """Number of devices of a worker: of its list, which is an expression of Python."""
    mapping = worker.get("device_mapping")
    if mapping is None:
        return WHOLE.read(worker["world_size"].value) if "world_size" in worker else None
    if isinstance(mapping.value, list):
        return len(mapping.value)
    text = re.sub(r"\s", "", str(mapping.value))
    if re.fullmatch(r"\[\d+(,\d+)*,?\]", text):
        return len(re.findall(r"\d+", text))
    parts = [_RANGE.fullmatch(part) for part in text.split("+")]
    count = 0
    for part in parts:
        if part is None:
            return None
        count += int(part[2]) - int(part[1] or 0)
    return count if count > 0 else None


def _remarks(block: str) -> Fields:
    remarks: Fields = {"note.framework": "overheads of ROLL itself are not modelled"}
    if block != "sft_train":
        remarks["doubt.stage"] = (
            f"the training method may be wrong: {block} runs alongside further models or passes, but only its training step "
            "is predicted"
        )
    return remarks
