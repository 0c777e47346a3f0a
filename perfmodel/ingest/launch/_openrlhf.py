"""Commands of OpenRLHF's programs of one model: their defaults, and both notations of their
arguments (`openrlhf/cli/train_sft.py`)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._trainer_names import DEFAULTS, KNOWN

_PROGRAM: Final = re.compile(r"openrlhf[./]cli[./]train_(sft|dpo|rm|kto|kd|prm)(\.py)?$")
_OLDER_NAMES: Final[Mapping[str, str]] = {
    "model.model_name_or_path": "pretrain",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "data.max_len": "max_len",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.ring_attn_head_stride": "ring_head_stride",
}
"""Arguments of 2026, which stand in groups, with the names that they had before."""
_GROUPS: Final = re.compile(r"^(ds)\.")
"""Groups whose other arguments kept their names behind the group's."""
_OF_OTHERS: Final = re.compile(r"^(data|ckpt|logger|eval|adam|muon|train|model|rm)\.|^optim$")
"""Groups of arguments that change neither time nor memory: data, checkpoints, logs, rates."""
_ENGINE: Final[Mapping[str, Any]] = {
    "zero_stage": 2,
    "train_batch_size": 128,
    "micro_train_batch_size": 8,
}
_LENGTH: Final[Mapping[str, Any]] = {"max_len": 2048}


def is_of_openrlhf(texts: Sequence[str]) -> bool:
    """Whether a command runs a program of OpenRLHF that trains one model."""
    return any(_PROGRAM.search(text) for text in texts)


def openrlhf_arguments(texts: Sequence[str], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Rename the arguments of an OpenRLHF command to their older names, and add its defaults."""
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        older = _OLDER_NAMES.get(name, _GROUPS.sub("", name))
        if not _OF_OTHERS.search(older):
            renamed[older] = entry
    # Stages and batches are the same in all programs; preference tuning has other lengths.
    defaults = dict(_ENGINE)
    if any("train_sft" in text for text in texts):
        defaults |= _LENGTH
    absent = {name: value for name, value in defaults.items() if name not in renamed}
    line = next(iter(entries.values())).line
    filled = {name: Entry(value, line) for name, value in absent.items()}
    settings = ", ".join(f"{name}={value}" for name, value in absent.items())
    filled[DEFAULTS] = Entry(f"{settings} (OpenRLHF's defaults)" if absent else KNOWN, line)
    return _with_adapters(renamed | filled)


def _with_adapters(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Arguments with OpenRLHF's defaults for adapters: rank 0 for none, and adapters on all linear
    layers."""
    rank = entries.get("lora_rank")
    if rank is None:
        return entries
    if str(rank.value) == "0":
        del entries["lora_rank"]
        return entries
    targets = entries.pop("target_modules", Entry("all-linear", rank.line))
    entries.setdefault("lora_target_modules", targets)
    return entries
