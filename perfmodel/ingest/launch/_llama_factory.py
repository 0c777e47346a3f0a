"""LLaMA-Factory's YAML: the arguments of Transformers' Trainer with its own
(`llamafactory/hparams`), and the second generation of its keys (`llamafactory/v1/config`)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import (
    ATTENTION,
    Adapters,
    fsdp_fields,
    is_on,
    method_fields,
    padding_note,
    sharded_sequences,
    torch_framework,
    tuning_fields,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._table import TEXT, WHOLE, Fields, Rule, key, read_only
from perfmodel.ingest.launch._trainer import (
    HARMLESS,
    SHARED,
    WORLD_RULE,
    named_model,
    precision_rule,
    trainer_batches,
)
from perfmodel.ingest.launch._trainer_adapters import bits_of
from perfmodel.ingest.launch._trainer_names import (
    ACCUMULATION,
    MICRO,
    MODEL_KEYS,
    PACKINGS,
    QUANTIZED,
)


def _factory_tuning(settings: Mapping[str, Any]) -> Fields:
    # Defaults of `FinetuningArguments` (llamafactory/hparams/finetuning_args.py): LoRA of rank 8 on
    # all linear layers.
    kind = settings.get("finetuning_type", "lora")
    adapters = Adapters(
        rank=settings.get("lora_rank", 8),
        targets=settings.get("lora_target", "all"),
        dropout=settings.get("lora_dropout", 0),
        bits=bits_of(settings),
    )
    return tuning_fields(kind, "finetuning_type", adapters)


_HALVES: Final = ("bf16", "fp16", "pure_bf16", "deepspeed")
"""Settings that choose the type of products."""


def _frozen_half(settings: Mapping[str, Any]) -> Fields:
    """Products beside frozen weights where no switch chooses their type: LLaMA-Factory loads the
    weights in the type of the checkpoint (`llamafactory/model/patcher.py` `patch_config`), and
    makes fp32 only of those that it trains."""
    is_stated = any(is_on(settings.get(name)) for name in _HALVES)
    if is_stated or settings.get("finetuning_type", "lora") not in ("lora", "oft"):
        return {}
    return {
        "dtype": "bf16",
        "note.half": (
            "dtype=bf16 (the file states no precision, and LLaMA-Factory keeps frozen weights in the type of the "
            "checkpoint; --dtype sets another)"
        ),
    }


def _factory_stage(settings: Mapping[str, Any]) -> Fields:
    # Reward models, DPO and PPO run a reference model or a critic beside the one that is trained.
    return method_fields(settings["stage"], "stage", ("pt", "sft"))


def _factory_packing(settings: Mapping[str, Any]) -> Fields:
    """Packing of sequences, which is the default for pre-training."""
    is_packed = any(is_on(settings.get(name)) for name in PACKINGS) or settings.get("stage") == "pt"
    return padding_note("cutoff_len", is_packed)


def _factory_recompute(settings: Mapping[str, Any]) -> Fields:
    """Recomputation of layers, which LLaMA-Factory does by default."""
    return {
        "recompute": "none" if is_on(settings.get("disable_gradient_checkpointing")) else "full"
    }


def _ray_workers(settings: Mapping[str, Any]) -> Fields:
    """Devices under Ray: every worker has as many as its resources say."""
    if "ray_num_workers" not in settings:
        return {}
    return {
        "devices": WHOLE.read(settings["ray_num_workers"])
        * WHOLE.read(settings.get("resources_per_worker.GPU", 1))
    }


LLAMA_FACTORY: Final = LaunchFormat(
    name="llama-factory",
    syntax="yaml",
    frameworks=("llama-factory",),
    framework=torch_framework,
    marks=("finetuning_type", "cutoff_len", "lora_target"),
    table=(
        *SHARED,
        Rule(
            keys=("ray_num_workers", "resources_per_worker.GPU"),
            read=_ray_workers,
            fields=("devices",),
        ),
        precision_rule("fp32"),
        Rule(keys=(*_HALVES, "finetuning_type", *MODEL_KEYS), read=_frozen_half, fields=("dtype",)),
        Rule(
            keys=(MICRO, ACCUMULATION),
            read=trainer_batches,
            defaults={"micro_batch": 8, "grad_accum": 1},
        ),
        Rule(keys=MODEL_KEYS, read=named_model, fields=("model",)),
        # `cutoff_len` (llamafactory/hparams/data_args.py) cuts text, and packing fills it.
        # llamafactory/hparams/data_args.py
        key("cutoff_len", "seq_len", default=2048, write=lambda fields: {}),
        Rule(
            keys=(
                "finetuning_type",
                "lora_rank",
                "lora_target",
                "lora_dropout",
                *MODEL_KEYS,
                *QUANTIZED,
            ),
            read=_factory_tuning,
            fields=("adapter_rank",),
        ),
        Rule(keys=("stage",), read=_factory_stage),
        Rule(keys=(*PACKINGS, "stage", "cutoff_len"), read=_factory_packing),
        Rule(
            keys=("disable_gradient_checkpointing", "gradient_checkpointing", "use_unsloth_gc"),
            read=_factory_recompute,
            defaults={"recompute": "full"},
        ),
        read_only("flash_attn", "flash_attention", ATTENTION),
        read_only("attn", "flash_attention", ATTENTION),
        Rule(
            keys=("sequence_parallel_size",),
            fields=("cp",),
            read=lambda settings: sharded_sequences(settings["sequence_parallel_size"], "ulysses"),
        ),
    ),
    harmless=(
        *HARMLESS,
        *patterns(
            "fp8_* mask_* streaming* interleave* tool_format default_system mix_*",
        ),
    ),
)


def _plugin_tuning(settings: Mapping[str, Any]) -> Fields:
    """Trained weights by `peft_config` and `quant_config`; all weights without the former."""
    kind = settings.get("peft_config.name")
    if not is_on(kind):
        return {}
    if is_on(settings.get("quant_config.name")):
        bits = settings.get("quant_config.quantization_bit", 4)
    else:
        bits = 0
    adapters = Adapters(
        rank=settings.get("peft_config.r", 8),
        targets=settings.get("peft_config.target_modules", "all"),
        dropout=settings.get("peft_config.lora_dropout", 0),
        bits=WHOLE.read(bits) if bits else bits_of({"model": settings.get("model", "")}),
    )
    return tuning_fields(kind, "peft_config.name", adapters)


def _plugin_sharding(settings: Mapping[str, Any]) -> Fields:
    """ZeRO stage and context parallelism by `dist_config`; DeepSpeed has a separate file."""
    fields: Fields = {}
    if str(settings.get("dist_config.name")).lower() == "fsdp2":
        fields = fsdp_fields(
            {
                "fsdp_version": 2,
                "fsdp_config.reshard_after_forward": settings.get(
                    "dist_config.reshard_after_forward", True
                ),
                "fsdp_config.offload_params": settings.get("dist_config.offload_params", False),
            }
        )
    kind = str(settings.get("dist_config.cp_mode", "ulysses"))
    return fields | sharded_sequences(settings.get("dist_config.cp_size", 1), kind)


def _plugin_packing(settings: Mapping[str, Any]) -> Fields:
    strategy = str(settings.get("batching_strategy", "normal")).lower()
    return padding_note("cutoff_len", strategy in ("dynamic_batching", "dynamic_padding_free"))


PLUGIN_FILE: Final = "dist_config.config_file"
"""The key of the second generation that names DeepSpeed's file."""


def _checkpointing(settings: Mapping[str, Any]) -> Fields:
    # The switch recomputes whole layers.
    is_checkpointed = is_on(settings["enable_activation_checkpointing"])
    return {"recompute": "full" if is_checkpointed else "none"}


LLAMA_FACTORY_PLUGINS: Final = LaunchFormat(
    name="llama-factory-v1",
    syntax="yaml",
    frameworks=("llama-factory",),
    framework=torch_framework,
    marks=("model_class", "peft_config.name", "dist_config.name", "kernel_config.name"),
    table=(
        WORLD_RULE,
        read_only("model", "model", TEXT),
        key("cutoff_len", "seq_len", default=2048, write=lambda fields: {}),
        key("micro_batch_size", "micro_batch", default=1, write=lambda fields: {}),
        read_only("global_batch_size", "global_batch"),
        Rule(
            keys=("bf16",),
            fields=("dtype",),
            read=lambda settings: {"dtype": "bf16" if is_on(settings["bf16"]) else "fp32"},
            defaults={"dtype": "bf16"},
        ),
        Rule(
            keys=(
                "dist_config.name",
                "dist_config.reshard_after_forward",
                "dist_config.offload_params",
                "dist_config.cp_mode",
                "dist_config.cp_size",
            ),
            read=_plugin_sharding,
            fields=("zero",),
        ),
        Rule(
            keys=(
                "model",
                "peft_config.name",
                "peft_config.r",
                "peft_config.target_modules",
                "peft_config.lora_dropout",
                "quant_config.name",
                "quant_config.quantization_bit",
            ),
            read=_plugin_tuning,
            fields=("adapter_rank",),
        ),
        Rule(keys=("batching_strategy", "cutoff_len"), read=_plugin_packing),
        Rule(
            keys=("enable_activation_checkpointing",),
            read=_checkpointing,
            defaults={"recompute": "full"},
        ),
        read_only("flash_attn", "flash_attention", ATTENTION),
        # Read before the table is (`with_named_files`).
        Rule(keys=("deepspeed",), read=lambda settings: {}),
    ),
    harmless=patterns(
        "model_class *template* *dataset* *learning_rate* max_steps num_train_epochs seed output_dir save_* *_steps",
        "sample_backend max_new_tokens trust_remote_code lr_scheduler_config* kernel_config* peft_config.lora_alpha",
        "peft_config.freeze_* peft_config.adapter* peft_config.use_rslora dist_config.dcp_path",
        "dist_config.pin_memory max_grad_norm full_determinism resume_from_checkpoint batching_workers init_config*",
        "peft_config.modules_to_save quant_config.double_quantization quant_config.quantization_type sample_*",
    ),
)
