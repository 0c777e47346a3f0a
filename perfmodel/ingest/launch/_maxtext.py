"""MaxText's YAML (`configs/base.yml` of AI-Hypercomputer/maxtext): a mesh within slices (`ici_`) and across them
(`dcn_`)."""

from collections.abc import Mapping
from itertools import product
from typing import Any, Final, NamedTuple

from perfmodel.catalog import networks
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._maxtext_model import MODEL
from perfmodel.ingest.launch._table import (
    FLAG,
    NUMBER,
    OPTIMIZER,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    accumulated,
    key,
    layers_per_stage,
    read_only,
    words,
)

AXES: Final = {
    "data": "data",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "expert": "ep",
    "context": "cp",
    "sequence": "cp",
    "tensor": "tp",
    "tensor_transpose": "tp",
    "tensor_sequence": "tp",
    "pipeline": "pp",
    "autoregressive": "",
    "context_autoregressive": "",
}
"""Mesh axes and the dimension that each is. Experts' ranks are replicas for everything else, as `ep` of `dp` here."""
_MESHES: Final = ("ici", "dcn")
_MOST_EXPERT_RANKS: Final = 10**6
"""More ranks than any job spreads experts over, which makes their axis take all ranks."""
_SEQUENCE: Final = "ici_tensor_sequence_parallelism"
"""Tensor parallelism that shards norms along the sequence."""
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
"""Policies that a kind of recompute matches exactly: `minimal` saves results of weight products and recomputes
attention, `full` saves each layer's input."""
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
    # Policies name the tensors that are kept for backward (`get_remat_policy` of MaxText/layers/decoders.py); our kinds
    # of recompute name the operations that run again. Where a policy lies between two kinds, the nearer one is taken
    # and said.
    name = TEXT.read(settings["remat_policy"]).lower()
    # The results of the feed-forward's products are most of a layer's memory, so it matters most whether they are kept.
    if name == "custom":
        wide = [tensor for tensor in _KEPT_BY_CHOICE if "mlpw" in tensor]
        kind = "selective" if any(settings.get(tensor) == "device" for tensor in wide) else "full"
    else:
        kind = words(_POLICIES | {"custom": "full"}).read(name)
    if name in _EXACT:
        return {"recompute": kind}
    return {"recompute": kind, "note.remat": f"remat_policy {name} is predicted as recompute={kind}, the closest kind"}


class _Axes(NamedTuple):
    """Axes of a mesh, within slices and across them together."""

    sizes: dict[str, int]
    """Degree of each axis, as far as it is stated."""
    open: set[str]
    """Axes that take the remaining devices."""
    slices_are_open: bool
    """Whether the file leaves the number of slices to the machine."""
    slices_are_nodes: bool
    """Whether it does so, and each slice is a node of GPUs."""


def _axes(settings: Mapping[str, Any]) -> _Axes:
    """Multiply the degrees of every axis (raises `BadValue` for a value that is no degree)."""
    sizes = {"data": 1, "fsdp": 1, "ep": 1, "cp": 1, "tp": 1, "pp": 1}
    open_axes: set[str] = set()
    # base.yml leaves fsdp open within a slice and data across slices. One axis of each mesh may be open at most, so
    # that an open data axis within slices closes that of fsdp.
    stated = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1} | dict(settings)
    if settings.get("ici_data_parallelism") == -1 and "ici_fsdp_parallelism" not in settings:
        stated["ici_fsdp_parallelism"] = 1
    # JAX calls a node of GPUs a slice; a file need not state the number of slices.
    slices_are_open = stated["dcn_data_parallelism"] == -1
    slices_are_nodes = str(stated.pop("hardware", "")).startswith("gpu") and slices_are_open
    for name, size in stated.items():
        axis = AXES.get(name.split("_", 1)[1].removesuffix("_parallelism"), "")
        # Axes of inference are no axes of training.
        if name in ("shard_optimizer_over_data",) or not axis:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
            raise BadValue(f"must be -1 (all that are left) or a degree, got {size!r}")
        if size == -1:
            # The file does not state slices: an open axis across them counts as part of that within them.
            open_axes.add(axis if name.startswith("ici_") else "")
        else:
            sizes[axis] *= size
    return _Axes(sizes, open_axes - {""}, slices_are_open, slices_are_nodes)


def _mesh(settings: Mapping[str, Any]) -> Fields:
    """Degrees of parallelism and sharding by a mesh; an axis of -1 takes the remaining devices."""
    axes = _axes(settings)
    sizes, open_axes = axes.sizes, axes.open
    fields: Fields = {name: sizes[name] for name in ("tp", "pp", "cp", "ep")}
    fields["sequence_parallel"] = any(settings.get(f"{mesh}_tensor_sequence_parallelism", 1) > 1 for mesh in _MESHES)
    if sizes["pp"] > 1:
        # JAX differentiates the loop over all forwards: backwards begin when the last forward has ended.
        fields["schedule"] = "gpipe"
    if not open_axes and axes.slices_are_open:
        fields["note.slices"] = (
            "one slice: the file leaves the number of slices (dcn_data_parallelism) to the machine; --devices sets more"
        )
    if not open_axes:
        # Ranks of the expert axis hold other tokens, so that they are replicas of all that is no expert.
        fields["dp"] = sizes["data"] * sizes["fsdp"] * sizes["ep"]
    elif open_axes == {"ep"}:
        # Experts are spread over as many replicas as the devices make, within a node if each node is a slice.
        fields["ep_most"] = networks.DEVICES_PER_NODE if axes.slices_are_nodes else _MOST_EXPERT_RANKS
        del fields["ep"]
    elif not open_axes <= {"data", "fsdp"}:
        raise BadValue("must be a degree, because only data, fsdp and expert axes can take what is left; got -1")
    return fields | _sharding(axes, shards_states=settings.get("shard_optimizer_over_data") is True)


def _sharding(axes: _Axes, shards_states: bool) -> Fields:
    """The ZeRO stage of a mesh, and the ranks over which it shards; `shards_states`: a setting for the data axis."""
    sizes, open_axes = axes.sizes, axes.open
    fields: Fields = {}
    # The fsdp axis shards weights and all that belongs to them, and so does that of experts (`logical_axis_rules` of
    # base.yml: `embed`); without these the data axis may shard optimizer states.
    sharded = bool(open_axes & {"fsdp", "ep"}) or sizes["fsdp"] > 1 or sizes["ep"] > 1
    if sharded and not open_axes & {"fsdp", "ep"}:
        # The data axis holds copies of what the others shard, and so do further slices.
        fields["shard_ranks"] = sizes["fsdp"] * sizes["ep"]
    elif sharded and axes.slices_are_nodes:
        fields["shard_ranks"] = "node"
        fields["note.slices"] = "each node is a slice, which shards weights by itself; the nodes are copies"
    elif sharded and sizes["data"] > 1:
        fields["replicate"] = sizes["data"]
    if sharded:
        fields["zero"] = 3
    else:
        fields["zero"] = int(shards_states)
    return fields


def _write_mesh(fields: Fields) -> Mapping[str, Any]:
    """Degrees of the axes within a slice (raises `LaunchFileError` for a layout that MaxText's mesh cannot hold)."""
    if fields["zero"] == 2:
        raise LaunchFileError(
            "zero=2: MaxText has only zero=1 (optimizer states sharded on its data axis) and zero=3 (weights on "
            "its fsdp axis); use one of these"
        )
    # The inverse of `_mesh`: replicas that are no expert ranks are divided between copies (data) and shards (fsdp).
    shards = fields["dp"] // fields["ep"]
    if fields["dp"] % fields["ep"]:
        raise LaunchFileError(
            f"ep={fields['ep']}: MaxText spreads experts over replicas, so ep must divide dp={fields['dp']}"
        )
    sharded = fields["zero"] == 3
    copies = fields["replicate"]
    if sharded and shards % copies:
        raise LaunchFileError(f"replicate={copies}: MaxText's data axis must divide dp/ep = {shards}")
    if sharded and 1 < shards == copies and fields["ep"] == 1:
        raise LaunchFileError(
            "zero=3 with replicate=dp: no ranks are left for MaxText's fsdp axis; use a smaller replicate"
        )
    if not sharded and fields["ep"] > 1:
        raise LaunchFileError(f"zero={fields['zero']}: MaxText's expert axis also shards weights; use zero=3")
    # dcn axes span slices; this file assumes a single slice.
    values = {
        "dcn_data_parallelism": 1,
        "ici_data_parallelism": copies if sharded else shards,
        "ici_fsdp_parallelism": shards // copies if sharded else 1,
        _SEQUENCE if fields["sequence_parallel"] else "ici_tensor_parallelism": fields["tp"],
        "ici_pipeline_parallelism": fields["pp"],
        "ici_context_parallelism": fields["cp"],
        "ici_expert_parallelism": fields["ep"],
    }
    return values | ({"shard_optimizer_over_data": True} if fields["zero"] == 1 else {})


_BATCH: Final = ("per_device_batch_size", "gradient_accumulation_steps", "num_pipeline_microbatches")


def _batch(settings: Mapping[str, Any]) -> Fields:
    fields: Fields = {"device_batch": NUMBER.read(settings.get(_BATCH[0], 12))}
    if _BATCH[1] in settings:
        fields["grad_accum"] = WHOLE.read(settings[_BATCH[1]])
    if settings.get(_BATCH[2], -1) != -1:
        fields["pipeline_micro_batches"] = WHOLE.read(settings[_BATCH[2]])
    return fields


def _write_batch(fields: Fields) -> Mapping[str, Any]:
    passes = accumulated(fields, "MaxText states the batch per device")
    devices = fields["dp"] * fields["tp"] * fields["pp"] * fields["cp"]
    # A batch passes the pipeline at once and is cut there: accumulation becomes micro-batches of the pipeline.
    if fields["pp"] > 1:
        return {_BATCH[0]: fields["global_batch"] / devices, _BATCH[2]: passes}
    return {_BATCH[0]: fields["micro_batch"] * fields["dp"] / devices, _BATCH[1]: passes}


def _stages(settings: Mapping[str, Any]) -> Fields:
    return {"layers_per_chunk": WHOLE.read(settings["num_layers_per_pipeline_stage"])}


def _write_stages(fields: Fields) -> Mapping[str, Any]:
    if fields["pp"] == 1:
        return {}
    layers = layers_per_stage(fields, f"pp={fields['pp']}: MaxText", "use another pp, or give the model")
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
    # Names have endings for what else is quantized (`te_fp8_delayedscaling_...`): the beginning decides.
    known = next(
        (fields for start, fields in _QUANTIZED.items() if name == start or name.startswith(f"{start}_")), None
    )
    if known is not None:
        return dict(known)
    if name.startswith(("fp8", "nanoo_fp8", "te_fp8")):
        return {"dtype": "fp8"}
    return plain | {"doubt.quantization": f"the precision may be wrong: perfmodel does not know quantization {name}"}


_CAPACITY: Final = "capacity_factor"


def _capacity(settings: Mapping[str, Any]) -> Fields:
    """Most tokens of an expert; the capacity applies only if tokens are dropped, not in sparse products."""
    # -1 is no capacity; sparse products (megablox) take as many tokens as come.
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
    if name == "bfloat16" and optimizer in ("adam", "adamw") and settings.get("mu_dtype", "") in ("", name):
        # Moments have the type of the weights unless `mu_dtype` says another (MaxText `optimizers.py`).
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

_NAMES: Final = tuple(f"{mesh}_{axis}_parallelism" for mesh, axis in product(_MESHES, AXES))

MAXTEXT: Final = LaunchFormat(
    name="maxtext",
    syntax="yaml",
    frameworks=("maxtext",),
    defaults_file="base.yml",
    marks=("per_device_batch_size", "ici_*_parallelism", "dcn_*_parallelism", "max_target_length", "base_emb_dim"),
    table=(
        # Mesh and batches. The batch is stated per device of all axes, so that it may be a fraction.
        Rule(keys=(*_NAMES, "shard_optimizer_over_data", "hardware"), read=_mesh, write=_write_mesh),
        Rule(keys=_BATCH, read=_batch, write=_write_batch, defaults={"device_batch": 12.0}),
        Rule(keys=("num_layers_per_pipeline_stage",), read=_stages, write=_write_stages),
        # Lengths and element types: of products, of weights (and so of optimizer states), of gradients.
        key("max_target_length", "seq_len", default=2048),
        Rule(
            keys=("dtype", "quantization", "int8_training"), read=_dtype, write=_write_dtype, defaults={"dtype": "bf16"}
        ),
        read_only("opt_type", "optimizer", OPTIMIZER),
        Rule(keys=("weight_dtype", "opt_type", "mu_dtype"), read=_weights),
        Rule(keys=(_CAPACITY, "sparse_matmul"), read=_capacity),
        key("grad_dtype", "grad_dtype", words({"float32": "fp32", "bfloat16": "bf16"})),
        Rule(
            keys=("remat_policy", *_KEPT_BY_CHOICE),
            read=_recompute,
            write=lambda fields: {"remat_policy": next(p for p in _EXACT if _POLICIES[p] == fields["recompute"])},
        ),
        key(
            # Kernels of attention (MaxText/layers/attentions.py): only dot_product writes the scores to memory.
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
        # Exchange of keys and values between ranks that share a sequence, and a loss that computes logits in tiles.
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
    always={
        "model.norm": "rms_norm",
        "model.positions": "rope",
        "model.bias": False,
        "model.dropout": False,
        "model.gated_ffn": True,
        "model.activation": "silu",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
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
