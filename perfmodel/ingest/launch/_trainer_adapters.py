"""Adapters and frozen weights of programs around Hugging Face's Trainer."""

import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._adapters import PEFT_OPTIONS, peft_fields
from perfmodel.ingest.launch._finetuning import (
    FSDP_KEYS,
    Adapters,
    bits_by_name,
    fsdp_fields,
    is_on,
    optimizer_fields,
)
from perfmodel.ingest.launch._table import WHOLE_OR_NONE, Fields
from perfmodel.ingest.launch._trainer_names import (
    MODEL_KEYS,
    PROGRAM,
    QLORA,
    QUANTIZED,
    TORCH_TYPES,
)


def bits_of(settings: Mapping[str, Any]) -> int:
    """Bits of frozen weights, from a switch or a number; 0 if not stated."""
    # bitsandbytes' switches, or a number of bits that LLaMA-Factory and Swift take for either.
    if is_on(settings.get("load_in_4bit")) or is_on(settings.get(QLORA)):
        return 4
    if is_on(settings.get("load_in_8bit")):
        return 8
    stated = WHOLE_OR_NONE.read(settings.get("quantization_bit", settings.get("quant_bits", 0)))
    # Checkpoints that were quantized before are named after it, and no switch says it again.
    return stated or bits_by_name(
        next((settings[name] for name in MODEL_KEYS if name in settings), "")
    )


ADAPTER_SWITCHES: Final = ("use_peft", "lora_enable", "use_lora")
"""Switches of adapters: trl's, and those of LLaVA's and Qwen's programs."""


def trains_adapters(settings: Mapping[str, Any]) -> bool:
    """Whether a program of the Trainer trains adapters beside frozen weights: it has settings of
    theirs, and none of its switches is off."""
    stated = any(name in settings for name in (*ADAPTER_SWITCHES, "lora_r", "lora_rank"))
    return stated and all(is_on(settings.get(name, True)) for name in ADAPTER_SWITCHES)


def _frozen_weights(settings: Mapping[str, Any], loaded: str | None) -> Fields:
    """Storage of the weights beside adapters, which autocast leaves as they were loaded.

    Transformers 4 loads them in fp32 unless a dtype is given, as TRL does (`ModelConfig.dtype`),
    Transformers 5 in the type of the checkpoint; DeepSpeed's engine casts them (`bf16.enabled`).
    """
    is_narrow = any(is_on(settings.get(name)) for name in ("bf16", "fp16"))
    if not is_narrow or is_on(settings.get("deepspeed")) or bits_of(settings):
        return {}
    if loaded == "fp32":
        return {"base_weights": "fp32"}
    if any(name in settings for name in ("torch_dtype", "dtype", "config_file")):
        return {}
    return {
        "note.loaded": (
            "frozen weights are in 16 bits, because the file does not state torch_dtype; Transformers 4 and TRL "
            "load them in 32 by default, which takes twice as much memory"
        )
    }


def loaded_states(settings: Mapping[str, Any]) -> Fields:
    """Gradients and moments of a model that is loaded in 16 bits, and frozen weights.

    They have the type of its weights, which autocast leaves alone. DeepSpeed and Accelerate's FSDP
    make fp32 copies of the weights, and peft keeps those of adapters in fp32.
    """
    loaded = TORCH_TYPES.read(settings.get("torch_dtype", settings.get("dtype", "auto")))
    if trains_adapters(settings):
        return _frozen_weights(settings, loaded)
    is_sharded = bool(fsdp_fields({name: settings[name] for name in FSDP_KEYS if name in settings}))
    if (
        loaded != "bf16"
        or is_sharded
        or any(is_on(settings.get(name)) for name in ("deepspeed", "config_file"))
    ):
        return {}
    optimizer = optimizer_fields(settings.get("optim", "adamw_torch"))
    if optimizer.get("optimizer") != "adam":
        return {}
    return {"optimizer": "adam16bit", "grad_dtype": "bf16"}


_CHAT_ADAPTERS: Final = ("lora_dim", "lora_module_name", "only_optimize_lora")
_TRAINS_ADAPTERS: Final = re.compile(
    r"(^|[^a-z])(q?lora|dora|peft|adapters?)([^a-z]|$)", re.IGNORECASE
)
"""Names of programs that train adapters."""
TRL_ADAPTERS: Final = (
    *ADAPTER_SWITCHES,
    "lora_r",
    "lora_rank",
    "lora_target_modules",
    "lora_dropout",
    "lora_modules_to_save",
    "peft_type",
    *PEFT_OPTIONS,
    *_CHAT_ADAPTERS,
    *QUANTIZED,
)


def _chat_adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA in DeepSpeed-Chat's notation (dschat/utils/module/lora.py): on every product of the
    layers; rank 0 means none."""
    rank = WHOLE_OR_NONE.read(settings["lora_dim"])
    if not rank:
        return {}
    fields = Adapters(rank=rank, targets="all").fields
    if not is_on(settings.get("only_optimize_lora", False)):
        fields["doubt.trained"] = (
            "the training method may be wrong: without only_optimize_lora, embeddings and norms are "
            "trained as well as adapters, but the prediction freezes them"
        )
    return fields


def trl_adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA in the notation of trl's `ModelConfig`; its switch, if stated, must be on."""
    if "lora_dim" in settings:
        return _chat_adapters(settings)
    stated = any(name in settings for name in (*ADAPTER_SWITCHES, "lora_r", "lora_rank"))
    trained = trains_adapters(settings)
    # Programs that copy LLaVA's or Qwen's switch have their ranks and targets too
    # (`llava/train/train.py`, `finetune.py` of QwenLM/Qwen); trl takes its own rank, and peft's
    # targets for most models.
    is_copy = "lora_enable" in settings or "use_lora" in settings
    usual_rank = 64 if is_copy else 16
    usual_targets = "all-linear" if is_copy else "q_proj,v_proj"
    # trl drops every other setting of adapters without `use_peft`; scripts of their own often have
    # only the ranks.
    bits = bits_of(settings)
    program = str(settings.get(PROGRAM, ""))
    if not stated and not bits and _TRAINS_ADAPTERS.search(program):
        return {
            "doubt.trained": f"the training method may be wrong: the name of {program} suggests "
            "adapters, but none of its arguments for them was understood; all weights are "
            "predicted to be trained"
        }
    if trained:
        rank = settings.get("lora_r", settings.get("lora_rank"))
        targets = settings.get("lora_target_modules")
        assumed = []
        if rank is None:
            assumed.append(f"rank {usual_rank}")
        if not targets:
            assumed.append("all linear layers" if is_copy else "q_proj and v_proj")
        fields = Adapters(
            rank=usual_rank if rank is None else rank,
            targets=targets or usual_targets,
            dropout=settings.get("lora_dropout"),
            bits=bits,
        ).fields
        fields |= peft_fields(settings)
        if assumed:
            fields["note.adapters"] = (
                f"adapters: {', '.join(assumed)} (the file does not state it; most programs with "
                "these arguments have this default)"
            )
        return fields
    if bits:
        return {
            "doubt.trained": f"the training method may be wrong: weights in {bits} bits are frozen, but "
            "the file names no adapters"
        }
    return {}
