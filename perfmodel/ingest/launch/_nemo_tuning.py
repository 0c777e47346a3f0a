"""NeMo 1's fine-tuning: its data and adapters (`megatron_gpt_finetuning_config.yaml`), and
distillation."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._finetuning import Adapters
from perfmodel.ingest.launch._table import Fields, Rule, read_only

_TRAINING_DATA: Final = "model.data.train_ds."
_SCHEME: Final = "model.peft.peft_scheme"
_LORA: Final = "model.peft.lora_tuning."
_PEFT_KEYS: Final = (
    _SCHEME,
    f"{_LORA}target_modules",
    f"{_LORA}adapter_dim",
    f"{_LORA}adapter_dropout",
)
_TARGETS: Final = {
    "attention_qkv": ("linear_qkv",),
    "attention_dense": ("linear_proj",),
    "attention": ("linear_qkv", "linear_proj"),
    "mlp_fc1": ("linear_fc1",),
    "mlp_fc2": ("linear_fc2",),
    "mlp": ("linear_fc1", "linear_fc2"),
    "all": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
"""Products of a layer by NeMo's words for them (nemo/collections/nlp/parts/peft_config.py)."""


def _adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA by NeMo's words; a doubt about other schemes, and nothing for a fine-tuning of all
    weights."""
    scheme = str(settings.get(_SCHEME)).lower()
    if scheme in ("none", "null"):
        return {}
    if scheme != "lora":
        return {
            "doubt.trained": (
                f"the training method may be wrong: perfmodel does not know peft_scheme {scheme}; all weights are trained"
            )
        }
    modules: list[str] = []
    for word in as_list(settings.get(f"{_LORA}target_modules", "attention_qkv")):
        modules += _TARGETS.get(str(word), (str(word),))
    return Adapters(
        rank=settings.get(f"{_LORA}adapter_dim", 32),
        targets=modules,
        dropout=settings.get(f"{_LORA}adapter_dropout"),
    ).fields


def _taught(settings: Mapping[str, Any]) -> Fields:
    return {
        "doubt.stage": (
            "the training method may be wrong: model.kd_teacher_restore_from_path names a further model, which runs alongside "
            "the one that is predicted"
        )
    }


_FROZEN_BASES: Final = ("model.gpt_model_file", "model.language_model_path")
"""Keys of adapter tuning and of prompt learning, which freeze the model of the file that they
name."""


def _frozen_base(settings: Mapping[str, Any]) -> Fields:
    """The doubt about NeMo's first programs for adapters and prompts, whose default trains none of
    the model's own weights."""
    return {
        "doubt.trained": (
            f"the training method may be wrong: {next(iter(settings))} belongs to programs that train adapters or prompts "
            "of a frozen model, but all weights are predicted to be trained"
        )
    }


TUNING_RULES: Final = (
    # The data of training state their own batch, from which the rest of the file usually takes it.
    read_only(f"{_TRAINING_DATA}micro_batch_size", "micro_batch"),
    read_only(f"{_TRAINING_DATA}global_batch_size", "global_batch"),
    read_only(f"{_TRAINING_DATA}max_seq_length", "seq_len"),
    Rule(keys=_PEFT_KEYS, read=_adapters, fields=("adapter_rank",)),
    Rule(keys=("model.kd_teacher_restore_from_path",), read=_taught),
    Rule(keys=_FROZEN_BASES, read=_frozen_base),
)
"""Rules for keys of a fine-tuning; where both are stated, the data's own batch wins."""
