"""levanter's YAML (`config/*.yaml` and `src/levanter/trainer.py`, `models/*.py` of
stanford-crfm/levanter)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import Adapters
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._model import LLAMA_LAYERS
from perfmodel.ingest.launch._table import (
    FLAG,
    OPTIMIZER,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    read_only,
)
from perfmodel.ingest.launch._tokenizers import GPT2, vocabulary_of

_LLAMA: Final = LLAMA_LAYERS | {"model.tied_embeddings": False}
_GPT2: Final = {
    "model.norm": "layer_norm",
    "model.positions": "learned",
    "model.gated_ffn": False,
    "model.activation": "gelu",
    "model.bias": True,
    "model.tied_embeddings": True,
    "model.dropout": False,
}
_KINDS: Final[dict[str, Fields]] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen": _LLAMA | {"model.qkv_bias": True},
    "qwen3": _LLAMA | {"model.qk_norm": True},
    "olmo": _LLAMA,
    "olmo2": _LLAMA
    | {"model.norm_at": "output", "model.qk_norm": True, "model.qk_norm_of_all_heads": True},
}
"""Settings that a model type fixes (`models/gpt2.py`, `models/llama.py` and those that are derived
from it)."""
_OF_LLAMA: Final = {
    "hidden_dim": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "intermediate_dim": 11008,
}
_OF_MISTRAL: Final = _OF_LLAMA | {"num_kv_heads": 8, "intermediate_dim": 14336}
_SIZES: Final[dict[str, dict[str, int]]] = {
    "gpt2": {"hidden_dim": 768, "num_layers": 12, "num_heads": 12},
    "mistral": _OF_MISTRAL,
    "mixtral": _OF_MISTRAL,
}
"""Sizes that a file need not state, by type of model."""
_SIZE_KEYS: Final = (
    "model.type",
    "model.hidden_dim",
    "model.num_layers",
    "model.num_heads",
    "model.num_kv_heads",
    "model.intermediate_dim",
    "model.use_bias",
    "model.tie_word_embeddings",
    "model.num_local_experts",
    "model.n_routed_experts",
    "model.num_experts_per_tok",
    "data.tokenizer",
    "model.tokenizer",
)


def _model(settings: Mapping[str, Any]) -> Fields:
    """Fields of the model: those fixed by its type, and its sizes with the defaults of that
    type."""
    kind = TEXT.read(settings.get("model.type", "gpt2"))
    if kind not in _KINDS:
        raise BadValue(
            f"must be one of {', '.join(_KINDS)}; give --model for another, got {kind!r}"
        )
    # Configurations of the other types are derived from LLaMA's and share its sizes.
    sizes: dict[str, Any] = dict(_SIZES.get(kind, _OF_LLAMA))
    for name in ("hidden_dim", "num_layers", "num_heads", "num_kv_heads", "intermediate_dim"):
        if f"model.{name}" in settings:
            sizes[name] = WHOLE.read(settings[f"model.{name}"])
    if sizes["num_heads"] % sizes.get("num_kv_heads", 1):
        raise BadValue(
            f"{sizes['num_heads']} heads are not a multiple of the {sizes['num_kv_heads']} key-value heads that "
            f"{kind} has by default; set num_kv_heads, got {sizes['num_heads']!r}"
        )
    fields: Fields = dict(_KINDS[kind])
    fields |= {
        "model.hidden": sizes["hidden_dim"],
        "model.layers": sizes["num_layers"],
        "model.heads": sizes["num_heads"],
        "model.kv_heads": sizes.get("num_kv_heads", sizes["num_heads"]),
        # GPT-2's `mlp_scale`
        "model.ffn_hidden": sizes.get("intermediate_dim", 4 * sizes["hidden_dim"]),
    }
    for name, field in (
        ("use_bias", "model.bias"),
        ("tie_word_embeddings", "model.tied_embeddings"),
    ):
        if f"model.{name}" in settings:
            fields[field] = FLAG.read(settings[f"model.{name}"])
    experts = settings.get("model.num_local_experts", settings.get("model.n_routed_experts"))
    # Only Mixtral routes tokens among the types that are read; all of its feed-forwards are
    # experts.
    if kind == "mixtral":
        fields["experts.count"] = WHOLE.read(experts or 8)
        fields["experts.topk"] = WHOLE.read(settings.get("model.num_experts_per_tok", 2))
        fields["experts.ffn_hidden"] = fields["model.ffn_hidden"]
    # levanter pads a vocabulary only to a size that its mesh divides.
    tokenizer = settings.get("data.tokenizer", settings.get("model.tokenizer"))
    vocab = None if tokenizer is None else vocabulary_of(tokenizer)
    if vocab is not None:
        fields["model.vocab"] = vocab
    return fields


def _start(settings: Mapping[str, Any]) -> Fields:
    """The model of a checkpoint of Hugging Face that the training starts from."""
    name = settings.get("model_name_or_path") or settings.get("initialize_from_hf")
    # A training from nothing takes only the tokenizer of that name.
    if settings.get("initialize_from_hf") is False and "model.type" in settings:
        return {}
    # Behind `@` stands the revision of a repository of the hub.
    return {"model": name.partition("@")[0]} if isinstance(name, str) else {}


_LORA_KEYS: Final = ("lora.r", "lora.alpha", "lora.dropout", "lora.target_modules")


def _adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA (`src/levanter/lora.py`), on all products of the layers unless modules are named."""
    return Adapters(
        rank=settings.get("lora.r", 8),
        targets=settings.get("lora.target_modules", "all-linear"),
        dropout=settings.get("lora.dropout"),
    ).fields


def _mesh(settings: Mapping[str, Any]) -> Fields:
    """Tensor parallelism over `model`, copies over `replica`, and all other devices over `data`."""
    fields: Fields = {
        "tp": WHOLE.read(
            settings.get("trainer.model_axis_size", settings.get("trainer.mesh.axes.model", 1))
        ),
        "pp": 1,
        "cp": WHOLE.read(settings.get("trainer.mesh.axes.context", 1)),
        # Its `model` axis shards the logical axes mlp and heads, and no sequence between them.
        "sequence_parallel": False,
    }
    copies = 1
    for name in (
        "trainer.replica_ici_axis_size",
        "trainer.replica_dcn_axis_size",
        "trainer.mesh.axes.replica",
    ):
        size = settings.get(name, 1)
        # An open axis across slices: the file does not say how many slices there are.
        if size != -1:
            copies *= WHOLE.read(size)
    if copies > 1:
        fields["replicate"] = copies
    # FSDP is an axis mapping: weights are sharded along the named logical axis, and not at all
    # where none is named.
    shards = settings.get("trainer.fsdp_axis", "embed")
    fields["zero"] = 3 if shards not in (None, "", [], "null") else 0
    return fields


def _batch(settings: Mapping[str, Any]) -> Fields:
    """The global batch, of which a schedule's last counts."""
    size = settings.get("trainer.train_batch_size", 32)
    fields: Fields = {}
    if isinstance(size, list):
        # `[[0, 256], [1000, 512]]`: the batch from each step on; most of the run has the last.
        last = size[-1] if size else size
        if isinstance(last, dict):
            last = [last.get("value")]
        size = last[-1] if isinstance(last, list) and last else last
        fields["note.batch"] = (
            f"global_batch={size} (the file raises the batch step by step; perfmodel reads the last; "
            "--global-batch sets another)"
        )
    fields["global_batch"] = WHOLE.read(size)
    per_device = settings.get("trainer.per_device_parallelism", -1)
    if per_device != -1:
        # Sequences per device of the data axis at once; further ones of the batch are accumulated.
        fields["micro_batch"] = WHOLE.read(per_device)
    else:
        fields["grad_accum"] = 1
    return fields


_TYPES: Final = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "float32": "fp32",
    "f32": "fp32",
}


def _precision(settings: Mapping[str, Any]) -> Fields:
    """jmp's policy: `p=f32,c=bfloat16` keeps weights in 32 bits and computes in 16."""
    policy = TEXT.read(settings["trainer.mp"])
    parts = dict(part.strip().partition("=")[::2] for part in policy.split(","))
    # `p` parameters, `c` computation, `o` output; a policy of one word holds for all.
    compute = (
        parts.get("c") or parts.get("compute") or parts.get("p") or parts.get("params") or policy
    )
    if compute not in _TYPES:
        raise BadValue(f"must be a policy such as p=f32,c=bfloat16, got {policy!r}")
    fields: Fields = {"dtype": _TYPES[compute]}
    weights = parts.get("p") or parts.get("params")
    if weights in _TYPES and _TYPES[weights] == "bf16":
        # optax keeps moments in the type of the weights.
        fields["optimizer"] = "adam16bit"
    return fields


def _recompute(settings: Mapping[str, Any]) -> Fields:
    value = settings["model.gradient_checkpointing"]
    if value in (True, "recompute", "full"):
        return {"recompute": "full"}
    if value in (False, "none"):
        return {"recompute": "none"}
    return {
        "recompute": "full",
        "note.remat": f"gradient_checkpointing {value} is predicted as recompute=full",
    }


def _attention(settings: Mapping[str, Any]) -> Fields:
    backend = str(settings.get("model.attn_backend", "default")).lower()
    return {
        "flash_attention": backend != "vanilla"
        and FLAG.read(settings.get("model.use_flash_attention", True))
    }


_DISTILLS: Final = ("student.type", "teacher.type")


def _distills(settings: Mapping[str, Any]) -> Fields:
    """A student that is trained beside a teacher, whose passes are not part of the prediction."""
    raise BadValue(
        "belongs to distillation, which runs a teacher alongside the trained model; perfmodel predicts one model's "
        f"training step: give --model, --layout and so on instead of the file, got {next(iter(settings.values()))!r}"
    )


_PREFERENCES: Final = (
    "beta",
    "reference_free",
    "reference_model_path",
    "dpo_data.chosen_field",
    "dpo_data.train_urls",
)
"""Keys that only preference tuning has (`main/train_dpo.py`)."""


def _prefers(settings: Mapping[str, Any]) -> Fields:
    """The doubt about preference tuning, which runs pairs of texts through the model and, unless it
    is free of a reference, through a second one."""
    return {
        "doubt.stage": (
            f"the training method may be wrong: {next(iter(settings))} belongs to preference tuning, which runs pairs of "
            "texts and further models, but plain training is predicted"
        )
    }


LEVANTER: Final = LaunchFormat(
    name="levanter",
    syntax="yaml",
    frameworks=("levanter",),
    marks=("trainer.train_batch_size", "trainer.per_device_parallelism", "trainer.mp"),
    table=(
        Rule(keys=_DISTILLS, read=_distills),
        Rule(keys=_PREFERENCES, read=_prefers),
        Rule(
            keys=("initialize_from_hf", "model_name_or_path", "model.type"),
            read=_start,
            fields=("model",),
        ),
        Rule(
            keys=_SIZE_KEYS, read=_model, fields=("model.layers",), defaults={"model.vocab": GPT2}
        ),
        Rule(keys=_LORA_KEYS, read=_adapters, fields=("adapter_rank",)),
        Rule(
            keys=(
                "trainer.train_batch_size",
                "trainer.model_axis_size",
                "trainer.mesh.axes.model",
                "trainer.mesh.axes.context",
                "trainer.mesh.axes.replica",
                "trainer.replica_ici_axis_size",
                "trainer.replica_dcn_axis_size",
                "trainer.fsdp_axis",
            ),
            read=_mesh,
            fields=("tp",),
        ),
        Rule(
            keys=("trainer.train_batch_size", "trainer.per_device_parallelism"),
            read=_batch,
            fields=("global_batch",),
        ),
        read_only("model.seq_len", "seq_len"),
        read_only("train_seq_len", "seq_len"),
        Rule(keys=("trainer.mp",), read=_precision, fields=("dtype",), defaults={"dtype": "fp32"}),
        Rule(
            keys=("model.gradient_checkpointing",),
            read=_recompute,
            fields=("recompute",),
            defaults={"recompute": "full"},
        ),
        Rule(
            keys=("model.attn_backend", "model.use_flash_attention"),
            read=_attention,
            fields=("flash_attention",),
        ),
        read_only("optimizer.type", "optimizer", OPTIMIZER),
    ),
    always={"overlap_grad_reduce": True, "overlap_param_gather": True},
    harmless=patterns(
        "data.* data optimizer.* trainer.tracker.* trainer.tracker trainer.wandb.* trainer.checkpointer.*",
        "trainer.num_train_steps trainer.steps_per_eval trainer.max_eval_batches trainer.tensor_parallel_axes",
        "trainer.batch_axis trainer.per_device_eval_parallelism trainer.seed trainer.log_* trainer.ray.*",
        "trainer.distributed.* trainer.id trainer.load_checkpoint* trainer.initialize_from trainer.jax_config.*",
        "trainer.profiler* trainer.mesh.axes.data trainer.watch.* trainer.shutdown_at_exit trainer.require_accelerator",
        "model.flash_attention_block_size model.rope* model.initializer_range model.layer_norm_epsilon",
        "model.scale_attn_by_inverse_layer_idx model.upcast_attn model.reorder_and_upcast_attn model.scan_layers",
        "model.gradient_checkpointing_block_size model.activation_function model.use_layer_norm_weight",
        "model.reference_checkpoint model.sliding_window use_hf_model_config out_dir hf_save_* hf_upload epoch",
        "data_seed z_loss_weight log_entropy eval_harness* tokenizer fcm_prob pad_tokenizer_to_match_model",
        "model.embed_pdrop model.resid_pdrop model.attn_pdrop model_cache_dir max_tune_length",
    ),
)
