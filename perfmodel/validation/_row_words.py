"""What a row of published runs says in words: element type, recompute, network, how replicas shard model states."""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from perfmodel.catalog import Network, stated_network
from perfmodel.spec import CudaGraphs, Fp8Recipe, Model, RecomputeModule, Transformer
from perfmodel.validation._row_cells import Row, Unusable, count, number, text

_DTYPES: Final = (
    (r"fp4|float4|nvfp4|mxfp4|e2m1", "fp4"),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"int8", "int8"),
    (r"bf16|bfloat16", "bf16"),
    (r"tf32", "tf32"),
    (r"fp16|float16|half|amp", "fp16"),
    (r"fp32|float32|single|\bfloat\b", "fp32"),
)
"""First match counts: an 8-bit recipe keeps the rest in 16 bits and says so."""
_RECIPES: Final[tuple[tuple[str, Fp8Recipe], ...]] = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp8|fp8-mx", "mxfp8"),
    (r"delayed", "delayed"),
    (r"current|fp8-cs", "current"),
    (r"block|subchannel|fp8-sc", "blockwise"),
    (r"rowwise", "rowwise"),
    (r"tensorwise", "tensorwise"),
)
_GPT2_VOCAB: Final = 50257
_BERT_VOCAB: Final = 30522
"""Entries of the tokenizers of Radford et al. 2019 and Devlin et al. 2019."""
_MODELLED: Final = ("bf16", "fp16", "fp32", "fp8", "fp4", "int8", "tf32")


def dtype_of(row: Row) -> tuple[str, bool]:
    """The class of element type that a row's products run in, and whether it is assumed.

    `float8-rowwise`, `mxfp8`, `fp8 delayed hybrid` and the like are fp8 by some recipe; the recipe's own column stands
    in where `dtype` is empty.

    Raises:
        Unusable: one that is not modelled.
    """
    stated = text(row, "dtype") or text(row, "dtype_recipe")
    if not stated:
        return "bf16", True
    found = next((name for pattern, name in _DTYPES if re.search(pattern, stated.lower())), stated)
    if found not in _MODELLED:
        raise Unusable(f"dtype {stated} is not modelled")
    return found, False


def fp8_recipe_of(row: Row) -> Fp8Recipe | None:
    """The recipe of 8- and 4-bit products by a row's words; None where it says none."""
    stated = f"{text(row, 'dtype')} {text(row, 'dtype_recipe')}".lower()
    return next((recipe for pattern, recipe in _RECIPES if re.search(pattern, stated)), None)


def keeps_16_bits_alone(row: Row) -> bool:
    """Whether a row says that weights and optimizer states are kept in 16 bits alone (`pure bf16`)."""
    return bool(re.search(r"pure (bf|fp)16", f"{text(row, 'dtype')} {text(row, 'dtype_recipe')}".lower()))


def attends_in_8_bits(row: Row) -> bool:
    """Whether a row's recipe says that attention multiplies in 8 bits too."""
    return "attention fp8" in text(row, "dtype_recipe").lower()


def recompute_of(row: Row) -> str:
    """The mode of recomputation that comes nearest to a row's words; empty where it says nothing.

    `recompute_detail` may tell which modules `selective` repeats (`recompute_modules_of`). Of JAX's policies those
    repeat most of a layer that keep but its projections of attention.
    """
    stated, detail = text(row, "recompute").lower(), text(row, "recompute_detail").lower()
    if not stated and not detail:
        return ""
    if detail.startswith("remat_policy") and not stated:
        return "full" if re.search(r"policy (full|custom|save_qkv|save_out)", detail) else "none"
    return next((kind for kind in ("full", "selective") if stated.startswith(kind)), "none")


def repeated_share(row: Row, model: Model) -> float:
    """Share of a layer's products that a JAX policy repeats which keeps all but the feed-forward's first
    (`save_dot_except_mlpwi`, `save_dot_except_logits_ffn1`): as much as so many layers in full; 0 for others."""
    if not re.search(r"policy \S*except\S*(mlpwi|ffn1)", text(row, "recompute_detail").lower()):
        return 0.0
    if not isinstance(model, Transformer):
        return 0.0
    first = model.ffn_hidden * (2 if model.gated_ffn else 1)
    return first / (first + model.ffn_hidden + 2 * (model.heads + model.kv_heads) * model.head_dim)


def recompute_modules_of(row: Row) -> tuple[RecomputeModule, ...]:
    """What `selective` recomputation repeats, by a row's words in the names of Megatron-Core; empty where they name
    none of them."""
    words = re.split(r"[^a-z_]+", text(row, "recompute_detail").lower())
    return tuple(name for name in get_args(RecomputeModule) if name in words)


def dispatcher_of(row: Row) -> str:
    """The dispatcher of tokens that a row's notes name; empty where they name none."""
    notes = text(row, "notes").lower()
    words = (("hybridep", "hybridep"), ("deepep", "deepep"), ("all-to-all dispatcher", "alltoall"))
    return next((name for word, name in words if word in notes), "")


def adapter_rank_of(row: Row) -> int | None:
    """Rank of a row's LoRA adapters by its notes, 0 where they do not say it; None where all weights are trained."""
    notes = text(row, "notes")
    if not re.search(r"\blora\b", notes, re.IGNORECASE):
        return None
    rank = re.search(r"LoRA rank (\d+)", notes)
    return int(rank[1]) if rank else 0


def launch_flags(row: Row) -> dict[str, bool]:
    """Switches of the launch that a row's `launch_and_overlap` states (`tp_comm_overlap=1; layer_cuda_graph=0`)."""
    stated = (part.partition("=") for part in text(row, "launch_and_overlap").lower().split(";"))
    return {name.strip(): value.strip() in ("1", "true") for name, sign, value in stated if sign}


def graphs_of(flags: Mapping[str, bool]) -> CudaGraphs:
    """What runs from CUDA graphs by a launch's switches: NVIDIA's submissions to MLPerf have graphs of layers, made by
    NeMo (`layer_cuda_graph`, `external_cuda_graph`) or by Megatron-Core (`mcore_cuda_graph`, `enable_cuda_graph`)."""
    names = ("layer_cuda_graph", "mcore_cuda_graph", "enable_cuda_graph", "external_cuda_graph")
    return "layers" if any(flags.get(name) for name in names) else "none"


def overlaps_tensor_parallel(flags: Mapping[str, bool]) -> bool | None:
    """Whether a launch hides tensor-parallel collectives behind products; None where it does not say."""
    return next((flags[name] for name in ("tp_comm_overlap", "ub_tp_comm_overlap") if name in flags), None)


_DATA_PARALLEL_FLAGS: Final = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_param_sync": "overlap_param_gather",
}
"""Switches of Megatron-LM and NeMo, and the fields of a layout that they are."""


def data_parallel_overlaps(flags: Mapping[str, bool]) -> dict[str, bool]:
    """Fields of a layout that say whether gradients are reduced and weights gathered beside kernels, as far as a launch
    states them."""
    return {field: flags[flag] for flag, field in _DATA_PARALLEL_FLAGS.items() if flag in flags}


def overlaps_experts(row: Row) -> bool | None:
    """Whether a row's notes say that dispatch and combine run beside kernels; None where they do not say."""
    found = re.search(r"expert-communication overlap (on|off)", text(row, "notes").lower())
    return found[1] == "on" if found else None


def seq_len_of(row: Row, model: Model) -> tuple[int, bool]:
    """Tokens per sequence: of their column, or of the notes (`sequence length 128`); else the model's, and then
    assumed."""
    if number(row, "seq_len") is not None:
        return count(row, "seq_len"), False
    noted = re.search(r"sequence length (\d+)", text(row, "notes").lower())
    return (int(noted[1]), True) if noted else (model.seq_len, True)


def vocab_of(row: Row) -> tuple[int, bool]:
    """Vocabulary, and whether the tokenizer's own size still has to be padded: of its column; of the notes (`V=50257`,
    `vocabulary about 250k`); else the tokenizer of the family's first model, BERT's or GPT-2's."""
    if number(row, "vocab") is not None:
        return count(row, "vocab"), False
    notes = text(row, "notes").lower()
    if noted := re.search(r"\bv=(\d+)\b", notes):
        return int(noted[1]), True
    if noted := re.search(r"\bvocabulary about (\d+)k\b|\b(\d+)k vocabulary\b", notes):
        return int(noted[1] or noted[2]) * 1000, True
    return _BERT_VOCAB if text(row, "family").lower().startswith("bert") else _GPT2_VOCAB, True


def network_of(row: Row) -> tuple[Network, tuple[str, ...]]:
    """The network between nodes by a row's words, and in what these contradict each other and the columns of adapters,
    which win (`cluster_for`)."""
    network, contradictions = stated_network(text(row, "inter_link"), text(row, "inter_link_as_stated"))
    adapters, rate = adapters_of(row)
    for name, told, stated in (
        ("nics_per_node", network.adapters, adapters),
        ("nic_gbit_per_s", network.gbit_per_s, rate),
    ):
        if network.detail == 2 and stated is not None and told != stated:
            contradictions += (f"{name}={stated:g} and the network's words {network.words!r}",)
    return network, contradictions


def adapters_of(row: Row) -> tuple[int | None, float | None]:
    """Network adapters of a node and the rate of one in Gbit/s, None where columns do not say.

    Raises:
        Unusable: a rate that is not above zero.
    """
    adapters = count(row, "nics_per_node") if number(row, "nics_per_node") is not None else None
    rate = number(row, "nic_gbit_per_s")
    if rate is not None and rate <= 0:
        raise Unusable("nic_gbit_per_s is not above zero")
    return adapters, rate


_STAGES: Final = (
    (r"shard_grad_op", 2), (r"fsdp|hsdp|full.shard", 3), (r"distributed optimizer|distopt", 1), (r"^none$", 0),
)  # fmt: skip
"""Words of `sharding` for ZeRO stages, beside `ZeRO-N`; the first match counts."""
_GROUP: Final = re.compile(r"over (\d+) (?:data )?(?:ranks|devices)|\(size (\d+)\)|group (\d+)|fsdp (\d+)\b")


def framework_name(row: Row) -> str:
    """The framework of a row, as `name@year`: DeepSpeed's own ZeRO is DeepSpeed's, whatever else the column names,
    Megatron-DeepSpeed on Gaudi is Habana's fork, and NeMo, which needs NVIDIA's devices, is what Intel submits to
    MLPerf beside it: DeepSpeed (mlcommons/training_results_v4.0 Intel-HabanaLabs/benchmarks/llm_finetune)."""
    name = text(row, "framework")
    if text(row, "device").lower().startswith("gaudi"):
        if name.startswith("nemo"):
            return name.replace("nemo", "deepspeed-gaudi")
        if name.startswith("megatron-deepspeed"):
            return name.replace("megatron-deepspeed", "megatron-deepspeed-gaudi")
    if "deepspeed" not in text(row, "sharding").lower() or "deepspeed" in name or not name:
        return name
    return f"deepspeed{name[name.index('@') :]}" if "@" in name else "deepspeed"


def sharding_of(row: Row, dp: int, pp: int) -> dict[str, Any]:
    """Fields `zero` and `replicate` of a layout that a row's `zero_stage` and `sharding` state; neither where they say
    nothing.

    Weights that FSDP shards stay gathered between the micro-batches of a pipeline (arXiv 2407.21783, section 3.3.2;
    torchtitan's default). `HSDP` without a number shards inside a node.

    Raises:
        Unusable: a `zero_stage` that is no whole number.
    """
    words, found = text(row, "sharding").lower(), {}
    named = re.search(r"zero-(\d)", words)
    if number(row, "zero_stage") is not None:
        found["zero"] = count(row, "zero_stage", least=0)
    elif named:
        found["zero"] = int(named[1])
    elif (stage := next((stage for word, stage in _STAGES if re.search(word, words)), None)) is not None:
        found["zero"] = stage
    if pp > 1 and "fsdp" in words:
        found["zero"] = min(found["zero"], 2)
    group = _GROUP.search(words)
    ranks = int(next(filter(None, group.groups()))) if group else 0
    if "hsdp" in words and not group:
        ranks = max(1, count(row, "devices_per_node", 8) // count(row, "tp", 1))
    if found.get("zero", 1) and 0 < ranks < dp and dp % ranks == 0:
        found["replicate"] = dp // ranks
    return found
