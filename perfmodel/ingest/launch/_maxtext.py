"""MaxText's YAML (`configs/base.yml` of AI-Hypercomputer/maxtext)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._maxtext_mesh import MESH_KEYS, mesh_degrees, write_mesh
from perfmodel.ingest.launch._maxtext_model import MODEL
from perfmodel.ingest.launch._model import LLAMA_LAYERS
from perfmodel.ingest.launch._table import (
    FLAG,
    NUMBER,
    OPTIMIZER,
    TEXT,
    WHOLE,
    Fields,
    Rule,
    accumulated,
    key,
    layers_per_stage,
    read_only,
    words,
)
from perfmodel.spec.notation import schedule_and_drains

_POLICIES: Final = {
    "full": "full",
    "minimal": "selective",
    "minimal_with_context": "none",
    "minimal_flash": "none",
    "none": "none",
    "save_dot_except_mlpwi": "selective",
    "save_dot_except_mlp": "full",
    "save_dot_with_context_except_mlp": "full",
    "save_qkv_proj": "full",
    "proj": "full",
    "save_out_proj": "full",
    "qkv_proj_offloaded": "full",
    "minimal_offloaded": "selective",
    "minimal_with_quantization": "selective",
    "minimal_with_context_and_quantization": "none",
}
"""The closest kind of recompute for each policy."""
_EXACT: Final = ("full", "minimal", "minimal_with_context", "minimal_flash", "none")
"""Policies that a kind of recompute matches exactly: `minimal` saves results of weight products and
recomputes attention, `full` saves each layer's input."""
_KEPT_BY_CHOICE: Final = (
    "decoder_layer_input",
    "context",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
    "query_proj",
    "key_proj",
    "value_proj",
    "qkv_proj",
    "out_proj",
    "attention_out",
    "moe_mlpwi_0",
    "moe_mlpwi_1",
    "moe_mlpwo",
    "query_wa_proj",
    "kv_wa_proj",
    "mla_q",
    "mla_kv",
)
"""Tensors that `remat_policy: custom` keeps (`device`), offloads or recomputes."""


def _recompute(settings: Mapping[str, Any]) -> Fields:
    """The kind of recompute that is closest to the file's policy."""
    if "remat_policy" not in settings:
        return {}
    # Policies name the tensors that are kept for backward (`get_remat_policy` of
    # MaxText/layers/decoders.py); our kinds of recompute name the operations that run again. Where
    # a policy lies between two kinds, the nearer one is taken and said.
    name = TEXT.read(settings["remat_policy"]).lower()
    # The results of the feed-forward's products are most of a layer's memory, so it matters most
    # whether they are kept.
    if name == "custom":
        wide = [tensor for tensor in _KEPT_BY_CHOICE if "mlpw" in tensor]
        kind = "selective" if any(settings.get(tensor) == "device" for tensor in wide) else "full"
    else:
        kind = words(_POLICIES | {"custom": "full"}).read(name)
    if name in _EXACT:
        return {"recompute": kind}
    return {
        "recompute": kind,
        "note.remat": f"remat_policy {name} is predicted as recompute={kind}, the closest kind",
    }


_DEVICE_BATCH: Final = "per_device_batch_size"
_ACCUMULATION: Final = "gradient_accumulation_steps"
_PIPELINE_PIECES: Final = "num_pipeline_microbatches"
_BATCH: Final = (_DEVICE_BATCH, _ACCUMULATION, _PIPELINE_PIECES)


def _batch(settings: Mapping[str, Any]) -> Fields:
    fields: Fields = {"device_batch": NUMBER.read(settings.get(_DEVICE_BATCH, 12))}
    if _ACCUMULATION in settings:
        fields["grad_accum"] = WHOLE.read(settings[_ACCUMULATION])
    if settings.get(_PIPELINE_PIECES, -1) != -1:
        fields["pipeline_micro_batches"] = WHOLE.read(settings[_PIPELINE_PIECES])
    return fields


def _write_batch(fields: Fields) -> Mapping[str, Any]:
    passes = accumulated(fields, "MaxText states the batch per device")
    devices = fields["dp"] * fields["tp"] * fields["pp"] * fields["cp"]
    # A batch passes the pipeline at once and is cut there: accumulation becomes micro-batches of
    # the pipeline, unless the schedule itself runs several times.
    if fields["pp"] > 1:
        _, drains = schedule_and_drains(fields["schedule"])
        several_runs = {_ACCUMULATION: drains} if drains > 1 else {}
        per_device = fields["global_batch"] / (devices * drains)
        return {_DEVICE_BATCH: per_device, _PIPELINE_PIECES: passes // drains, **several_runs}
    return {_DEVICE_BATCH: fields["micro_batch"] * fields["dp"] / devices, _ACCUMULATION: passes}


def _stages(settings: Mapping[str, Any]) -> Fields:
    return {"layers_per_chunk": WHOLE.read(settings["num_layers_per_pipeline_stage"])}


def _write_stages(fields: Fields) -> Mapping[str, Any]:
    if fields["pp"] == 1:
        return {}
    layers = layers_per_stage(
        fields, f"pp={fields['pp']}: MaxText", "use another pp, or give the model"
    )
    return {"num_layers_per_pipeline_stage": layers}


def _tiles(settings: Mapping[str, Any]) -> Fields:
    return {"chunked_loss": True} if WHOLE.read(settings["num_vocab_tiling"]) > 1 else {}


_DTYPES: Final = words({"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"})


_QUANTIZED: Final = {
    "int8": {"dtype": "int8"},
    "te_fp8_delayedscaling": {"dtype": "fp8", "fp8_recipe": "delayed"},
    "te_fp8_currentscaling": {"dtype": "fp8", "fp8_recipe": "current"},
    "te_mxfp8": {"dtype": "fp8", "fp8_recipe": "mxfp8"},
    "te_nvfp4": {"dtype": "fp4"},
}
"""Element types of quantized products, by name of the quantization."""


def _dtype(settings: Mapping[str, Any]) -> Fields:
    """Element type of the products: of a quantization, else of activations."""
    plain = {"dtype": _DTYPES.read(settings.get("dtype", "bfloat16"))}
    # The switch of 2023, before quantizations had names.
    if FLAG.read(settings.get("int8_training", False)) and "quantization" not in settings:
        return {"dtype": "int8"}
    name = str(settings.get("quantization", "")).lower()
    if name in ("", "none"):
        return plain
    # Names have endings for what else is quantized (`te_fp8_delayedscaling_...`): the beginning
    # decides.
    known = next(
        (
            fields
            for start, fields in _QUANTIZED.items()
            if name == start or name.startswith(f"{start}_")
        ),
        None,
    )
    if known is not None:
        return dict(known)
    if name.startswith(("fp8", "nanoo_fp8", "te_fp8")):
        return {"dtype": "fp8"}
    return plain | {
        "doubt.quantization": f"the precision may be wrong: perfmodel does not know quantization {name}"
    }


_CAPACITY: Final = "capacity_factor"


def _capacity(settings: Mapping[str, Any]) -> Fields:
    """Most tokens of an expert; the capacity applies only if tokens are dropped, not in sparse
    products."""
    # -1 is not a capacity; sparse products (megablox) take as many tokens as come.
    capacity = NUMBER.read(settings.get(_CAPACITY, -1))
    if capacity <= 0 or settings.get("sparse_matmul", True) is True:
        return {}
    return {"expert_capacity_factor": capacity, "einsum_dispatch": True}


def _weights(settings: Mapping[str, Any]) -> Fields:
    """Element type of weights and their optimizer states; 32 bits by default."""
    name = TEXT.read(settings.get("weight_dtype", "float32"))
    if name == "float32":
        return {}
    optimizer = OPTIMIZER.read(settings["opt_type"]) if "opt_type" in settings else "adam"
    if (
        name == "bfloat16"
        and optimizer in ("adam", "adamw")
        and settings.get("mu_dtype", "") in ("", name)
    ):
        # Moments have the type of the weights unless `mu_dtype` says another (MaxText
        # `optimizers.py`).
        return {"optimizer": "adam16bit"}
    return {
        "doubt.weights": (
            f"memory may be wrong: the file keeps weights and optimizer states in {name}, but the "
            "prediction counts float32"
        )
    }


def _write_dtype(fields: Fields) -> Mapping[str, Any]:
    if fields.get("dtype") == "fp8":
        return {"dtype": "bfloat16", "quantization": "fp8"}
    if fields.get("dtype") == "int8":
        return {"dtype": "bfloat16", "quantization": "int8"}
    return {"dtype": _DTYPES.write(fields.get("dtype"))}


HALF_CHIPS: Final = "<halves of chips>"
"""The entry of a slice of TPU7x, whose chips are two devices of JAX each."""
_OF_HALVES: Final = (
    "the layout may be wrong: MaxText counts two devices of JAX for every chip of TPU7x, but the prediction counts "
    "whole chips; give --devices and the degrees of --layout in chips"
)


MAXTEXT: Final = LaunchFormat(
    name="maxtext",
    syntax="yaml",
    frameworks=("maxtext",),
    defaults_file="base.yml",
    marks=(
        "per_device_batch_size",
        "ici_*_parallelism",
        "dcn_*_parallelism",
        "max_target_length",
        "base_emb_dim",
    ),
    table=(
        # Mesh and batches. The batch is stated per device of all axes, so that it may be a
        # fraction.
        Rule(
            keys=(*MESH_KEYS, "shard_optimizer_over_data", "hardware"),
            read=mesh_degrees,
            write=write_mesh,
        ),
        Rule(keys=_BATCH, read=_batch, write=_write_batch, defaults={"device_batch": 12.0}),
        Rule(keys=("num_layers_per_pipeline_stage",), read=_stages, write=_write_stages),
        # Lengths and element types: of products, of weights (and so of optimizer states), of
        # gradients.
        key("max_target_length", "seq_len", default=2048),
        Rule(
            keys=("dtype", "quantization", "int8_training"),
            read=_dtype,
            write=_write_dtype,
            defaults={"dtype": "bf16"},
        ),
        read_only("opt_type", "optimizer", OPTIMIZER),
        Rule(keys=("weight_dtype", "opt_type", "mu_dtype"), read=_weights),
        Rule(keys=(_CAPACITY, "sparse_matmul"), read=_capacity),
        key("grad_dtype", "grad_dtype", words({"float32": "fp32", "bfloat16": "bf16"})),
        Rule(
            keys=("remat_policy", *_KEPT_BY_CHOICE),
            read=_recompute,
            write=lambda fields: {
                "remat_policy": next(p for p in _EXACT if _POLICIES[p] == fields["recompute"])
            },
        ),
        key(
            # Kernels of attention (MaxText/layers/attentions.py): only dot_product writes the
            # scores to memory.
            "attention",
            "flash_attention",
            words(
                {
                    "autoselected": True,
                    "flash": True,
                    "cudnn_flash_te": True,
                    "dot_product": False,
                    "cudnn_flash_jax": True,
                }
            ),
        ),
        # Exchange of keys and values between ranks that share a sequence, and a loss that computes
        # logits in tiles.
        read_only(
            "context_parallel_strategy",
            "cp_kind",
            words({"all_gather": "all_gather", "ring": "ring", "ulysses": "ulysses"}),
        ),
        read_only("context_parallel_load_balance", "cp_balanced", FLAG),
        Rule(keys=("num_vocab_tiling",), read=_tiles),
        Rule(keys=(HALF_CHIPS,), read=lambda settings: {"doubt.chips": _OF_HALVES}),
        *MODEL,
    ),
    always=LLAMA_LAYERS | {"overlap_grad_reduce": True, "overlap_param_gather": True},
    harmless=(
        # Names, places, data, logs and checkpoints of a run.
        "run_name",
        "base_config",
        "base_output_directory",
        "dataset_*",
        "tokenizer_*",
        "steps",
        "learning_rate*",
        "enable_checkpointing",
        "async_checkpointing",
        "checkpoint_*",
        "save_*",
        "load_*",
        "profiler*",
        "log_*",
        "hf_*",
        "enable_goodput_recording",
        "monitor_goodput",
        "gcs_metrics",
        "metrics_file",
        "reuse_example_batch",
        "use_iota_embed",
        # Numbers of optimizer, data and evaluation.
        "jax_cache_dir",
        "adam_*",
        "gradient_clipping_threshold",
        "grain_*",
        "eval_*",
        "enable_*",
        "skip_*",
        "cosine_*",
        "warmup_*",
        "data_shuffle_seed",
        "init_weights_seed",
        # Constants of the model.
        "normalization_layer_epsilon",
        "kv_quant_*",
        "rope_*",
        "*max_position_embeddings",
        "routed_scaling_factor",
        "routed_score_func",
        "beta_fast",
        "beta_slow",
        "mscale",
        # How arrays lie on the mesh, which follows from its degrees, and tilings of kernels.
        "mesh_axes",
        "logical_axis_rules",
        "data_sharding",
        "scan_layers",
        "allow_split_physical_axes",
        "custom_mesh",
        "ring_scan_unroll",
        "use_max_logit_estimate",
        "cost_estimate_*",
        "use_random_routing",
        "param_scan_axis",
        "max_prefill_predict_length",
        "prompt",
        "sa_*",
        "w?_tile_*",
        "use_tokamax_*",
        "use_qwix_quantization",
        "*_calibration_method",
        "use_custom_sort_vjp",
        "shard_exp_on_fsdp",
        "moe_fsdp_use_two_stage_all_gather",
        "collect_stack_trace",
        "stack_trace_*",
        "use_vertex_tensorboard",
        "vertex_*",
        "max_corpus_chars",
        "upload_*",
        "compile_topology*",
        "compiled_trainstep_file",
        "dropout_rate",
        "logits_dot_in_fp32",
        "packing",
        "num_slices",
        "normalize_embedding_logits",
        "megablox",
        "sparse_matmul",
        "load_balance_loss_weight",
        "add_bos",
        "add_eos",
        "hide_profiler_step_metric",
        "num_pipeline_repeats",
    ),
    limits={
        "schedule": "its pipeline is gpipe, and breadth-first with vpp > 1",
        "overlap_grad_reduce": "XLA decides what overlaps",
        "overlap_param_gather": "XLA decides what overlaps",
        "tp_overlap": "XLA decides what overlaps",
        "recompute_full_layers": "its policies apply to all layers",
        "partition": "its stages have equal numbers of layers",
        "offload": "perfmodel does not write policies that offload",
        "order": "the order of its mesh is fixed",
    },
)
