"""Arguments of MS-Swift, which extend those of Hugging Face's Trainer.

ms-swift, Command Line Parameters.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import (
    ATTENTION,
    Adapters,
    method_fields,
    sharded_sequences,
    torch_framework,
    tuning_fields,
)
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._table import WHOLE, Fields, Rule, read_only
from perfmodel.ingest.launch._trainer import (
    HARMLESS,
    SHARED,
    named_model,
    packing_fields,
    precision_rule,
    recompute_fields,
    world_fields,
)
from perfmodel.ingest.launch._trainer_adapters import bits_of
from perfmodel.ingest.launch._trainer_names import (
    ACCUMULATION,
    MICRO,
    MODEL_KEYS,
    PACKINGS,
    QUANTIZED,
    WORLD,
)

_OLD_SWIFT: Final = ("batch_size", "lora_target_modules", "model_type")
"""Arguments of Swift's versions 1 and 2 that have other names since."""
_OLD_TARGETS: Final = {"ALL": "all-linear", "AUTO": "all-linear", "DEFAULT": "q_proj k_proj v_proj"}
"""Words of these versions for products with adapters; by default those of queries, keys and
values."""


def _names_old_model(settings: Mapping[str, Any]) -> bool:
    """Whether `model_type` names a model with its size (`qwen1half-7b-chat`), as in versions 1 and
    2; since then it names an architecture."""
    kind = str(settings.get("model_type", ""))
    return (
        "model" not in settings
        and re.search(r"(^|[-_])\d+(\.\d+|_\d+)?b([-_]|$)", kind) is not None
    )


def _is_old_swift(settings: Mapping[str, Any]) -> bool:
    """Whether arguments are of Swift's versions 1 and 2 (`swift/llm/utils/argument.py`)."""
    return any(name in settings for name in _OLD_SWIFT[:2]) or _names_old_model(settings)


def _swift_model(settings: Mapping[str, Any]) -> Fields:
    if any(name in settings for name in MODEL_KEYS):
        return named_model({name: settings[name] for name in MODEL_KEYS if name in settings})
    if not _names_old_model(settings):
        return {}
    return {"model": str(settings["model_type"]).replace("1half", "1.5")}


def _old_length(settings: Mapping[str, Any]) -> Fields:
    """The default sequence length of versions 1 and 2, where the settings do not state one."""
    if "max_length" in settings or not _is_old_swift(settings):
        return {}
    return {"seq_len": 2048, "note.length": "max_length=2048 (default of Swift's versions 1 and 2)"}


def _swift_tuning(settings: Mapping[str, Any]) -> Fields:
    # The argument was renamed twice; all three names are still taken.
    key = next((name for name in _SWIFT_KINDS if name in settings), _SWIFT_KINDS[0])
    default = "DEFAULT" if _is_old_swift(settings) else "all-linear"
    targets = settings.get("target_modules", settings.get("lora_target_modules", default))
    adapters = Adapters(
        rank=settings.get("lora_rank", settings.get("lora_r", 8)),
        targets=_OLD_TARGETS.get(targets, targets) if isinstance(targets, str) else targets,
        dropout=settings.get("lora_dropout", 0.05),
        bits=bits_of(settings),
    )
    return tuning_fields(settings.get(key, "lora"), key, adapters)


def _swift_batches(settings: Mapping[str, Any]) -> Fields:
    """Batches of Swift, which by default accumulates to 16 sequences per step
    (`swift/llm/argument/train_args.py`)."""
    micro = WHOLE.read(settings.get(MICRO, settings.get("batch_size", 1)))
    if ACCUMULATION in settings:
        return {"micro_batch": micro, "grad_accum": WHOLE.read(settings[ACCUMULATION])}
    devices = world_fields({name: settings[name] for name in WORLD if name in settings}).get(
        "devices"
    )
    if devices is None:
        note = f"{ACCUMULATION}=1 is assumed; if the file does not state it, Swift accumulates up to 16 sequences"
        return {"micro_batch": micro, "grad_accum": 1, "note.accumulation": note}
    # Ranks that share a sequence are one replica.
    ranks = devices // WHOLE.read(settings.get("sequence_parallel_size", 1))
    return {"micro_batch": micro, "grad_accum": max(1, -(-16 // max(1, micro * ranks)))}


def _rlhf(settings: Mapping[str, Any]) -> Fields:
    return method_fields(settings["rlhf_type"], "rlhf_type", ())


_HEADS: Final = ("embedding", "seq_cls", "reranker")
"""Tasks of Swift whose model has no head over the vocabulary."""


def _head(settings: Mapping[str, Any]) -> Fields:
    task = str(settings["task_type"]).lower()
    if task not in _HEADS:
        return {}
    return {
        "doubt.head": f"the model may be wrong: task_type={task} has no head over the vocabulary, but the prediction does"
    }


_SWIFT_KINDS: Final = ("tuner_type", "train_type", "sft_type")
SWIFT: Final = LaunchFormat(
    name="ms-swift",
    syntax="yaml",
    frameworks=("ms-swift",),
    framework=torch_framework,
    marks=(*_SWIFT_KINDS, "model_id_or_path"),
    table=(
        *SHARED,
        # Swift loads weights in the checkpoint's type, which is bf16 of nearly all, and computes in
        # it.
        precision_rule("bf16"),
        Rule(
            keys=(
                MICRO,
                ACCUMULATION,
                *WORLD,
                "sequence_parallel_size",
                "model",
                "model_id_or_path",
                *_OLD_SWIFT,
            ),
            read=_swift_batches,
        ),
        Rule(keys=(*MODEL_KEYS, "model_type"), read=_swift_model, fields=("model",)),
        read_only("max_length", "seq_len"),
        Rule(keys=("max_length", "model", *_OLD_SWIFT), read=_old_length),
        Rule(
            keys=(
                *_SWIFT_KINDS,
                "lora_rank",
                "lora_r",
                "lora_dropout",
                "target_modules",
                *MODEL_KEYS,
                *QUANTIZED,
                *_OLD_SWIFT,
            ),
            read=_swift_tuning,
            fields=("adapter_rank",),
        ),
        Rule(keys=(*PACKINGS, "max_length"), read=packing_fields),
        Rule(
            keys=("activation_checkpointing", "gradient_checkpointing"),
            read=recompute_fields,
            defaults={"recompute": "full"},
        ),
        read_only("attn_impl", "flash_attention", ATTENTION),
        Rule(
            keys=("sequence_parallel_size",),
            fields=("cp",),
            read=lambda settings: sharded_sequences(settings["sequence_parallel_size"], "ulysses"),
        ),
        Rule(keys=("rlhf_type",), read=_rlhf),
        Rule(keys=("task_type",), read=_head),
    ),
    harmless=HARMLESS,
)
