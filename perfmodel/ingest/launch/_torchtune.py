"""torchtune's YAML (`recipes/configs` and `recipes/*_finetune_distributed.py` of
pytorch/torchtune)."""

import re
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any, Final

from perfmodel.ingest.launch._adapters import peft_fields
from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._finetuning import (
    Adapters,
    accumulation_fields,
    is_on,
    mesh_rule,
    objective_fields,
    optimizer_fields,
    padding_note,
    torch_framework,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._llm_foundry import fsdp_offload, stage_of_resharding
from perfmodel.ingest.launch._model import LLAMA_LAYERS, catalog_model, gated_width
from perfmodel.ingest.launch._table import (
    FLAG,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    key,
    read_only,
    words,
)
from perfmodel.ingest.launch._trainer import WORLD_RULE

_BUILDER: Final = "model._component_"
_LORA_KEYS: Final = (
    _BUILDER,
    "model.lora_rank",
    "model.lora_attn_modules",
    "model.apply_lora_to_mlp",
    "model.apply_lora_to_output",
    "model.quantize_base",
    "model.lora_dropout",
    "model.use_dora",
)
_CATALOG_NAMES: Final = {
    "llama3_3_70b": "llama3_1_70b",
    "phi3_mini": "phi_3_mini",
    "phi4_14b": "phi_4",
}
"""Builders whose model has another name in the catalog."""
_MOST_PARTS: Final = 8
"""Most parts of a builder's name for which every spelling is tried."""


def model_name(builder: str) -> str:
    """Catalog name of the model that a builder makes: `lora_llama3_1_8b` is `llama3.1-8b`.

    A builder's name has underscores for the dots of versions and sizes, so that every reading is
    looked up.
    """
    name = builder.rpartition(".")[2]
    name = re.sub(r"^(qlora|lora|dora|qdora)_", "", name)
    name = re.sub(r"_(instruct|base|chat)$", "", name)
    # Elsewhere, the number of parameters that a token uses (`30b_a3b`) marks a model with experts;
    # here it is this word.
    name = re.sub(r"_moe_(\d+b_a\d+b)$", r"_\1", name)
    name = _CATALOG_NAMES.get(name, name)
    parts = name.split("_")
    if len(parts) > _MOST_PARTS:
        return name
    # A dot can stand only between two digits.
    choices = []
    for before, after in pairwise(parts):
        choices.append(".-" if before[-1:].isdigit() and after[:1].isdigit() else "-")
    for marks in product(*choices):
        spelled = parts[0] + "".join(
            mark + part for mark, part in zip(marks, parts[1:], strict=True)
        )
        if catalog_model(spelled) is not None:
            return spelled
    return name


_OF_LLAMA: Final = LLAMA_LAYERS | {"model.tied_embeddings": False}
_FAMILIES: Final[dict[str, Fields]] = {
    "llama2": _OF_LLAMA,
    "llama3": _OF_LLAMA,
    "llama3_1": _OF_LLAMA,
    "llama3_2": _OF_LLAMA | {"model.tied_embeddings": True},
    "mistral": _OF_LLAMA,
    "qwen2": _OF_LLAMA | {"model.qkv_bias": True},
    "qwen3": _OF_LLAMA | {"model.qk_norm": True},
}
"""Builders that take the sizes of a model (`torchtune/models/*/_component_builders.py`), and what
each fixes."""
_SIZES: Final = {
    "model.num_layers": "model.layers",
    "model.embed_dim": "model.hidden",
    "model.num_heads": "model.heads",
    "model.num_kv_heads": "model.kv_heads",
    "model.vocab_size": "model.vocab",
    "model.intermediate_dim": "model.ffn_hidden",
    "model.head_dim": "model.head_dim",
}
_MODEL_KEYS: Final = (
    _BUILDER,
    *_SIZES,
    "model.tie_word_embeddings",
    "model.q_proj_bias",
    "model.k_proj_bias",
    "model.v_proj_bias",
    "model.q_norm",
    "model.k_norm",
)


_SHIPPED: Final = re.compile(
    r"(?:[\w.-]+/)*(?P<family>\w+)/(?P<size>[\d.]+B\w*?|mini)_(?P<kind>full|lora|qlora|dora|qdora)(?:_\w+)?"
)
"""Name of a configuration that comes with torchtune, such as `llama3_1/70B_lora`."""


def shipped_configuration(name: str, line: int) -> dict[str, Entry]:
    """What the name of a configuration that comes with torchtune says, and what all of these share
    (`recipes/configs`); empty for other names."""
    shipped = _SHIPPED.fullmatch(name.removesuffix(".yaml"))
    if shipped is None:
        return {}
    family, size, kind = shipped["family"], shipped["size"].lower(), shipped["kind"]
    builder = f"{family}_{size.replace('.', '_')}"
    settings: dict[str, Any] = {"dtype": "bf16", "enable_activation_checkpointing": True}
    if kind != "full":
        builder = f"{kind}_{builder}"
        settings["model.lora_attn_modules"] = ["q_proj", "v_proj", "output_proj"]
        settings["model.apply_lora_to_mlp"] = True
    settings[_BUILDER] = f"torchtune.models.{family}.{builder}"
    return {key: Entry(value, line) for key, value in settings.items()}


def _model(settings: Mapping[str, Any]) -> Fields:
    """A model by the name of its builder, or by the sizes that a family's builder takes."""
    builder = TEXT.read(settings[_BUILDER])
    family = re.sub(r"^(qlora|lora|dora|qdora)_", "", builder.rpartition(".")[2])
    if family not in _FAMILIES:
        return {"model": model_name(builder)}
    fields = dict(_FAMILIES[family])
    for name, field in _SIZES.items():
        if settings.get(name) is not None:
            fields[field] = WHOLE.read(settings[name])
    if "model.hidden" in fields:
        fields.setdefault("model.ffn_hidden", gated_width(fields["model.hidden"]))
    if "model.tie_word_embeddings" in settings:
        fields["model.tied_embeddings"] = is_on(settings["model.tie_word_embeddings"])
    biases = [settings.get(f"model.{name}_proj_bias") for name in ("q", "k", "v")]
    if any(bias is not None for bias in biases):
        fields["model.qkv_bias"] = any(is_on(bias) for bias in biases)
    norms = [settings.get(f"model.{name}_norm") for name in ("q", "k")]
    if any(norm is not None for norm in norms):
        fields["model.qk_norm"] = any(is_on(norm) for norm in norms)
    return fields


def _adapters(settings: Mapping[str, Any]) -> Fields:
    """Adapters, by builders whose names begin with `lora_` or `qlora_`."""
    name = str(settings.get(_BUILDER, "")).rpartition(".")[2]
    if not name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        return {}
    # Products of the attention are listed, those of the feed-forward and the head are switches.
    targets = settings.get("model.lora_attn_modules")
    targets = list(targets) if isinstance(targets, list) else []
    if is_on(settings.get("model.apply_lora_to_mlp")):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if is_on(settings.get("model.apply_lora_to_output")):
        targets.append("output")
    is_quantized = name.startswith("q") or is_on(settings.get("model.quantize_base"))
    adapters = Adapters(
        rank=settings.get("model.lora_rank", 8),
        targets=targets,
        dropout=settings.get("model.lora_dropout", 0),
        bits=4 if is_quantized else 0,
    )
    is_dora = "dora" in name or is_on(settings.get("model.use_dora"))
    return adapters.fields | peft_fields({"use_dora": is_dora})


def _types(settings: Mapping[str, Any]) -> Fields:
    """Optimizer and precision: with `dtype: bf16`, torchtune keeps weights, gradients and moments
    in 16 bits."""
    if "optimizer._component_" in settings:
        fields = optimizer_fields(settings["optimizer._component_"])
    else:
        fields = {}
    dtype = words({"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}).read(
        settings.get("dtype", "fp32")
    )
    fields["dtype"] = dtype
    # torchtune has neither autocast nor master weights: it trains the weights in the type in which
    # it loads them.
    if dtype == "bf16":
        fields["grad_dtype"] = "bf16"
        if fields.get("optimizer", "adam") == "adam":
            fields["optimizer"] = "adam16bit"
    return fields


def _sharding(settings: Mapping[str, Any]) -> Fields:
    """FSDP sharding; weights are gathered again for backward by default."""
    zero = stage_of_resharding(settings.get("fsdp_reshard_after_forward"))
    return {"zero": zero} | fsdp_offload(zero, is_on(settings.get("fsdp_cpu_offload")))


_NO_TRAINING: Final = ("max_new_tokens", "enable_kv_cache", "tasks")
"""Keys of torchtune's recipes that generate text or evaluate, which have no optimizer."""


def _require_training(settings: Mapping[str, Any]) -> Fields:
    if any(name in settings for name in _NO_TRAINING) and "optimizer._component_" not in settings:
        raise BadValue(
            "belongs to a recipe that generates or evaluates; give the configuration of a training recipe"
        )
    return {}


def _in_backward(settings: Mapping[str, Any]) -> Fields:
    if not is_on(settings["optimizer_in_bwd"]):
        return {}
    return {
        "doubt.gradients": "memory may be wrong: optimizer_in_bwd frees gradients early, but the prediction counts them"
    }


def _chunked(settings: Mapping[str, Any]) -> Fields:
    """Loss functions that never hold all logits."""
    name = str(settings["loss._component_"]).rpartition(".")[2]
    # `LinearCrossEntropyLoss` takes hidden states and computes logits chunk by chunk; the older
    # chunked losses take logits, which exist as a whole by then.
    if objective_fields(name, "loss"):
        return objective_fields(name, "loss")
    if "Linear" in name:
        return {"chunked_loss": True}
    if "Chunked" not in name:
        return {}
    return {
        "note.loss": f"{name} computes logits in chunks, but the prediction counts them in full"
    }


_FURTHER_MODELS: Final = ("ref_checkpointer._component_", "teacher_model._component_")
"""Keys of models that run together with the trained one: a preference reference, a teacher."""


def _further_models(settings: Mapping[str, Any]) -> Fields:
    names = " and ".join(settings)
    return {
        "doubt.models": (
            f"the training method may be wrong: {names} names a further model, which runs alongside the one that is predicted"
        )
    }


def _checkpointing(settings: Mapping[str, Any]) -> Fields:
    # The switch recomputes whole layers.
    is_checkpointed = is_on(settings["enable_activation_checkpointing"])
    return {"recompute": "full" if is_checkpointed else "none"}


TORCHTUNE: Final = LaunchFormat(
    name="torchtune",
    syntax="yaml",
    frameworks=("torchtune",),
    framework=torch_framework,
    marks=(_BUILDER,),
    table=(
        WORLD_RULE,
        Rule(
            keys=(*_NO_TRAINING, "optimizer._component_"),
            read=_require_training,
            optional=_NO_TRAINING,
        ),
        Rule(keys=_MODEL_KEYS, read=_model, fields=("model",)),
        Rule(keys=_LORA_KEYS, read=_adapters, fields=("adapter_rank",)),
        Rule(
            keys=("batch_size", "gradient_accumulation_steps"),
            fields=("micro_batch",),
            read=lambda settings: accumulation_fields(
                settings, "batch_size", "gradient_accumulation_steps", 1
            ),
        ),
        read_only("tokenizer.max_seq_len", "seq_len"),
        Rule(
            keys=("dataset.packed", "batch_size"),
            read=lambda settings: padding_note(
                "max_seq_len", is_on(settings.get("dataset.packed"))
            ),
        ),
        Rule(
            keys=("dtype", "optimizer._component_"),
            read=_types,
            fields=("dtype",),
            defaults={"dtype": "fp32"},
        ),
        Rule(
            keys=("fsdp_cpu_offload", "fsdp_reshard_after_forward", "batch_size"),
            read=_sharding,
            fields=("zero",),
        ),
        Rule(
            keys=("enable_activation_checkpointing",),
            defaults={"recompute": "none"},
            fields=("recompute",),
            read=_checkpointing,
        ),
        read_only("enable_activation_offloading", "offload", FLAG),
        Rule(keys=("compile",), read=lambda settings: {}),
        Rule(keys=("optimizer_in_bwd",), read=_in_backward),
        Rule(keys=("loss._component_",), read=_chunked),
        Rule(keys=_FURTHER_MODELS, read=_further_models),
        key("tensor_parallel_dim", "tp", default=1, write=lambda fields: {}),
        key("context_parallel_dim", "cp", default=1, write=lambda fields: {}),
        mesh_rule("data_parallel_shard_dim", "data_parallel_replicate_dim"),
    ),
    harmless=patterns(
        "model.attn_dropout model.scale_factor model.rope_base model.norm_eps model.max_seq_len",
        "tokenizer.* checkpointer.* dataset.* dataset dataset_val* optimizer.* lr_scheduler.* metric_logger.*",
        "profiler.* model.lora_alpha model.lora_dropout seed shuffle epochs max_steps_per_epoch",
        "clip_grad_norm log_* output_dir device resume_from_checkpoint save_* custom_sharded_layers",
        "memory_efficient_fsdp_wrap ac_* cudnn_deterministic_mode compile.* run_val_every_n_steps",
        "batch_size_val loss.* model_type loss base_dir async_checkpointing*",
        "ref_checkpointer.* teacher_checkpointer.* teacher_model.* kd_loss.* kd_ratio",
        "tensor_parallel_plan* <script> config warmup_steps dataset_* parallelize*",
    ),
)
