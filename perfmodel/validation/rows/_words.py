"""Reads word columns of published runs: element type, recompute, network, sharding."""

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from perfmodel.catalog import frameworks
from perfmodel.catalog.networks import Network, stated_network, unread_link_words
from perfmodel.spec import CudaGraphs, Fp8Recipe, Framework, Model, RecomputeModule, Transformer
from perfmodel.validation.rows._cells import Row, Unusable, count, number, text
from perfmodel.validation.rows.vocabulary import (
    DTYPE,
    RECOMPUTE,
    SHARDING,
    Reading,
    read_phrases,
    read_switches,
)

_DTYPE_BY_MEANING: Final = (
    ("fp4", ("fp4", "nvfp4")),
    (
        "fp8",
        ("fp8", "mxfp8", "fp8 current", "fp8 blockwise", "fp8 tensorwise", "fp8 rowwise"),
    ),
    ("int8", ("int8",)),
    ("bf16", ("bf16", "16 bits alone")),
    ("tf32", ("tf32",)),
    ("fp16", ("fp16",)),
    ("fp32", ("fp32",)),
)
"""Element types by meaning of words, in order of precedence: with an 8-bit recipe, the rest stays in 16 bits."""
_RECIPES: Final[Mapping[str, Fp8Recipe]] = {
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "delayed": "delayed",
    "current": "current",
    "fp8 current": "current",
    "blockwise": "blockwise",
    "fp8 blockwise": "blockwise",
    "rowwise": "rowwise",
    "rowwise with wide weight gradients": "rowwise_with_gw_hp",
    "fp8 rowwise": "rowwise",
    "tensorwise": "tensorwise",
    "fp8 tensorwise": "tensorwise",
}
_OF_TRANSFORMER_ENGINE: Final = ("delayed", "current", "mxfp8")
"""Recipes that frameworks with Transformer Engine use for 8-bit training where the row does not name one."""
_COMPILES: Final = re.compile(r"(?<![\w.-])(?<!no )(?<!not )(?<!without )(?:torch\.)?compiled?(?![\w-])")
"""Words for torch.compile in a framework's description, but not `nocompile` or `without torch.compile`."""
_LAYERS_OF_TRANSFORMER_ENGINE: Final = re.compile(r"transformer ?engine", re.IGNORECASE)
"""Words for Transformer Engine's layers in a framework's description."""
_PACKS_CONVERSATIONS: Final = re.compile(r"(?<![a-z])(?:swift|axolotl)(?![a-z])", re.IGNORECASE)
"""Trainers whose launch files put conversations together in a sequence, each attending to itself alone: ModelScope
SWIFT (examples/megatron: `--packing true`, attention by position ids) and axolotl (`sample_packing`, its multipack
patches). Read with the results of runs of SWIFT in view."""
_GPT2_VOCAB: Final = 50257
_BERT_VOCAB: Final = 30522
"""Entries of the tokenizers of Radford et al. 2019 and Devlin et al. 2019."""


def dtype_of(row: Row) -> tuple[str, bool]:
    """The element type of a row's matrix products, and whether it is assumed.

    `float8-rowwise`, `mxfp8`, `fp8 delayed hybrid` and the like are fp8 by some recipe; the recipe's own column stands
    in where `dtype` is empty.

    Raises:
        Unusable: one that is not modelled.
    """
    stated = text(row, "dtype") or text(row, "dtype_recipe")
    if not stated:
        return "bf16", True
    reading = read_phrases(stated, DTYPE)
    for dtype, meanings in _DTYPE_BY_MEANING:
        if reading.first(*meanings):
            return dtype, False
    raise Unusable(f"dtype {stated} is not modelled")


def _dtype_reading(row: Row) -> Reading:
    """Return the combined reading of a row's two columns of element types."""
    return read_phrases(f"{text(row, 'dtype')} {text(row, 'dtype_recipe')}", DTYPE)


def fp8_recipe_of(row: Row, framework: Framework) -> Fp8Recipe | None:
    """The 8- or 4-bit recipe named by a row; None if not stated."""
    reading = _dtype_reading(row)
    for meaning, recipe in _RECIPES.items():
        if not reading.has_meaning(meaning):
            continue
        # Megatron and what stands on it call Transformer Engine's current scaling "tensorwise" (Megatron-Core
        # megatron/training/arguments.py, `--fp8-recipe`); torchao's recipe of that name casts anew for every product.
        if recipe == "tensorwise" and framework.job_defaults("fp8")["fp8_recipe"] in _OF_TRANSFORMER_ENGINE:
            return "current"
        return recipe
    return None


def keeps_16_bits_alone(row: Row) -> bool:
    """Whether a row states that weights and optimizer states are only in 16 bits (`pure bf16`)."""
    return _dtype_reading(row).has_meaning("16 bits alone")


def attends_in_8_bits(row: Row) -> bool:
    """Whether a row's recipe states 8-bit attention."""
    return _dtype_reading(row).has_meaning("attention in 8 bits")


def _recompute_readings(row: Row) -> tuple[Reading, Reading]:
    """Return the readings of the columns `recompute` and `recompute_detail`."""
    return read_phrases(text(row, "recompute"), RECOMPUTE), read_phrases(text(row, "recompute_detail"), RECOMPUTE)


_RECOMPUTE_MODES: Final = {
    "none": "none",
    "full": "full",
    "layers": "full",
    "every": "selective",
    "selective": "selective",
    "policy full": "full",
    "policy custom": "full",
    "policy none": "none",
    "policy products": "selective",
    "policy products and attention": "selective",
    "policy offload": "selective",
    "policy feed-forward": "selective",
}


def recompute_of(row: Row) -> str:
    """The recomputation mode closest to a row's words; empty if not stated.

    `recompute_detail` may tell which modules `selective` repeats (`recompute_modules_of`). Of JAX's policies those
    repeat most of a layer that keep but its projections of attention.
    """
    # The column `recompute` counts before its detail, and names of modules alone mean `selective`.
    stated, detail = _recompute_readings(row)
    for reading in (stated, detail):
        mode = reading.first(*_RECOMPUTE_MODES)
        if mode:
            return _RECOMPUTE_MODES[mode]
        if reading.all_of(*get_args(RecomputeModule)):
            return "selective"
    return ""


def repeated_layers(row: Row, model: Model, stages: int) -> int | None:
    """Number of fully recomputed layers per stage in a row's words (`full block 21 layers`, `every 2nd layer`); None if
    not stated.
    """
    if not isinstance(model, Transformer):
        return None
    readings = _recompute_readings(row)
    for reading in readings:
        layers = reading.figure("layers")
        if layers is not None:
            return layers
        every = reading.figure("every")
        if every:
            return round(-(-model.layers // stages) / every)
    return None


def offloads_activations(row: Row) -> bool:
    """Whether a row states offloading of activations (`minimal_offloaded`)."""
    return any(reading.has_meaning("policy offload") for reading in _recompute_readings(row))


def leaves_policy_open(row: Row) -> bool:
    """Whether a row uses a custom recomputation policy without stating it (`custom`)."""
    says_custom = any(reading.has_meaning("policy custom") for reading in _recompute_readings(row))
    return says_custom and not text(row, "recompute_detail")


_BETWEEN_PRODUCTS: Final[tuple[RecomputeModule, ...]] = ("layernorm", "mlp_act", "moe_act")
"""Modules of a layer between products of weights and attention."""
_POLICY_MODULES: Final[dict[str, tuple[RecomputeModule, ...]]] = {
    "policy products": ("core_attn", *_BETWEEN_PRODUCTS),
    "policy products and attention": _BETWEEN_PRODUCTS,
    "policy offload": ("core_attn", *_BETWEEN_PRODUCTS),
    # A compiler leaves out the feed-forward's last product, whose result nothing needs.
    "policy feed-forward": ("core_attn", "layernorm", "mlp"),
}
"""Modules that are recomputed under JAX's policies that save results of products with weights (JAX documentation,
`jax.checkpoint_policies`: checkpoint_dots_with_no_batch_dims), on the device or on the host. Products of attention have
batch dimensions."""


def recompute_modules_of(row: Row) -> tuple[RecomputeModule, ...]:
    """Return the modules of `selective` recomputation in Megatron-Core's names; empty if not stated."""
    readings = _recompute_readings(row)
    named: tuple[str, ...] = (
        *readings[0].all_of(*get_args(RecomputeModule)),
        *readings[1].all_of(*get_args(RecomputeModule)),
    )
    for reading in readings:
        named += _POLICY_MODULES.get(reading.first(*_POLICY_MODULES), ())
    return tuple(module for module in get_args(RecomputeModule) if module in named)


_ASSUMED_ADAPTER_RANK: Final = 16
"""Rank of MLPerf's LoRA benchmark, assumed if only a model's name indicates adapters."""


def adapter_rank_of(row: Row) -> int | None:
    """Rank of LoRA adapters implied by a model's name (`llama2-70b-lora`); None if all weights are trained."""
    has_adapters = re.search(r"(?<![a-z])lora(?![a-z])", text(row, "model").lower()) is not None
    return _ASSUMED_ADAPTER_RANK if has_adapters else None


def launch_switches(row: Row) -> Mapping[str, bool]:
    """Launch switches in a row's `launch_and_overlap`, by the setting they change (`LAUNCH_SWITCHES`)."""
    return read_switches(text(row, "launch_and_overlap"))[0]


def graphs_of(switches: Mapping[str, bool]) -> CudaGraphs:
    """Return the scope of CUDA graphs from a launch's switches: the whole step, or layers (NeMo, Megatron-Core)."""
    if switches.get("graph of the step"):
        return "step"
    return "layers" if switches.get("graphs of layers") else "none"


_LAYOUT_SWITCHES: Final = ("overlap_grad_reduce", "overlap_param_gather", "ep_overlap")
_SHARDING_OVERLAPS: Final = ("overlap_grad_reduce", "overlap_param_gather")


def layout_switches(row: Row) -> dict[str, bool]:
    """Layout fields for overlap, from the launch switches."""
    switches = launch_switches(row)
    stated = {name: switches[name] for name in _LAYOUT_SWITCHES if name in switches}
    if read_phrases(text(row, "sharding"), SHARDING).has_meaning("overlapped"):
        stated = dict.fromkeys(_SHARDING_OVERLAPS, True) | stated
    return stated


def seq_len_of(row: Row, model: Model) -> tuple[int, bool]:
    """Tokens per sequence: from the column, else assumed from the model."""
    if number(row, "seq_len") is not None:
        return count(row, "seq_len"), False
    return model.seq_len, True


def vocab_of(row: Row) -> tuple[int, bool]:
    """Vocabulary, and whether it still has to be padded: from its column, from the tokenizer's column, else from the
    tokenizer of the family's first model (BERT or GPT-2)."""
    # A stated vocabulary is as it ran, and padded already. A tokenizer's size still has to be
    # padded.
    if number(row, "vocab") is not None:
        return count(row, "vocab"), False
    if number(row, "tokenizer_vocab") is not None:
        return count(row, "tokenizer_vocab"), True
    return _BERT_VOCAB if text(row, "family").lower().startswith("bert") else _GPT2_VOCAB, True


_VOCABULARY_BY_COLUMN: Final = {
    "dtype": DTYPE,
    "dtype_recipe": DTYPE,
    "recompute": RECOMPUTE,
    "recompute_detail": RECOMPUTE,
    "sharding": SHARDING,
}


def unread_words(row: Row) -> tuple[str, ...]:
    """Words in a row that cannot be read, each with its column."""
    network, _ = network_of(row)
    unread = {
        "inter_link": network.not_understood,
        "intra_link": unread_link_words(text(row, "intra_link")),
    }
    for column, vocabulary in _VOCABULARY_BY_COLUMN.items():
        unread[column] = read_phrases(text(row, column), vocabulary).unread
    _, unread["launch_and_overlap"] = read_switches(text(row, "launch_and_overlap"))

    # The remarks become a list that is separated by commas, so that none may stand inside one.
    remarks = []
    for column, column_words in unread.items():
        for word in column_words:
            remarks.append(f"{column} {word!r} not understood".replace(",", ""))
    return tuple(remarks)


def network_of(row: Row) -> tuple[Network, tuple[str, ...]]:
    """The network between nodes from a row's words, and contradictions within them and with the columns of adapters,
    which take precedence (`cluster_for`)."""
    network, contradictions = stated_network(text(row, "inter_link"), text(row, "inter_link_as_stated"))
    adapters, rate = adapters_of(row)
    for name, in_words, stated in (
        ("nics_per_node", network.adapters, adapters),
        ("nic_gbit_per_s", network.gbit_per_s, rate),
    ):
        # Words that only name a kind of network contradict no number.
        if network.detail == 2 and stated is not None and in_words != stated:
            contradictions += (f"{name}={stated:g} and the network's words {network.words!r}",)
    return network, contradictions


def adapters_of(row: Row) -> tuple[int | None, float | None]:
    """Network adapters per node and the rate of one in Gbit/s; None if not stated.

    Raises:
        Unusable: a rate that is not above zero.
    """
    adapters = count(row, "nics_per_node") if number(row, "nics_per_node") is not None else None
    rate = number(row, "nic_gbit_per_s")
    if rate is not None and rate <= 0:
        raise Unusable("nic_gbit_per_s is not above zero")
    return adapters, rate


def _stages_named(reading: Reading) -> frozenset[int]:
    """Stages of ZeRO that words for sharding may mean: FSDP by itself is stage 2 or 3."""
    stage = reading.figure("stage")
    if stage is not None:
        return frozenset({stage})
    if reading.first("zero 2", "keeps weights"):
        return frozenset({2})
    if reading.first("zero 3", "hybrid", "fsdp group"):
        return frozenset({2, 3})
    meaning = reading.first("zero 0", "zero 1")
    return frozenset({int(meaning[-1])} if meaning else ())


def _dtypes_named(cell_text: str) -> frozenset[str]:
    """Element types that words name; TF32 means data in fp32."""
    reading = read_phrases(cell_text, DTYPE)
    dtypes = {dtype for dtype, meanings in _DTYPE_BY_MEANING if reading.first(*meanings)}
    possible = dtypes | {"tf32"} if "fp32" in dtypes else dtypes
    return frozenset(possible)


def contradictions_in_words(row: Row) -> tuple[str, ...]:
    """Sentences about contradictions between a row's word columns and other columns."""
    contradictions = []

    # Columns contradict each other if their readings share no possible value.
    stage = number(row, "zero_stage")
    named = _stages_named(read_phrases(text(row, "sharding"), SHARDING))
    if stage is not None and named and stage not in named:
        contradictions.append(f"zero_stage={stage:g} and sharding={text(row, 'sharding')}")
    modes = {recompute_of({"recompute": text(row, name)}) for name in ("recompute", "recompute_detail")} - {""}
    if len(modes) > 1:
        contradictions.append(
            f"recompute={text(row, 'recompute')} and recompute_detail={text(row, 'recompute_detail')}"
        )
    if text(row, "dtype") and text(row, "dtype_recipe"):
        kinds = _dtypes_named(text(row, "dtype"))
        recipe_kinds = _dtypes_named(text(row, "dtype_recipe"))
        if kinds and recipe_kinds and kinds.isdisjoint(recipe_kinds):
            contradictions.append(f"dtype={text(row, 'dtype')} and dtype_recipe={text(row, 'dtype_recipe')}")
    return tuple(contradictions)


def framework_name(row: Row) -> str:
    """The framework of a row, as `name@year`, by the columns of framework, device and sharding together.

    DeepSpeed's own ZeRO is run by DeepSpeed, whatever else the column names. On Gaudi, Megatron-DeepSpeed is Habana's
    fork, and NeMo, which needs NVIDIA's devices, is what Intel names beside DeepSpeed in its MLPerf submissions
    (mlcommons/training_results_v4.0 Intel-HabanaLabs/benchmarks/llm_finetune). A framework whose launch compiles, or
    whose layers are Transformer Engine's, is a separate entry of the catalog.
    """
    # The same name means another code base on other hardware or with another sharding.
    name = text(row, "framework")
    if text(row, "device").lower().startswith("gaudi"):
        if name.startswith("nemo"):
            return name.replace("nemo", "deepspeed-gaudi")
        if name.startswith("megatron-deepspeed"):
            return name.replace("megatron-deepspeed", "megatron-deepspeed-gaudi")
    if "deepspeed" in text(row, "sharding").lower() and "deepspeed" not in name and name:
        return f"deepspeed{name[name.index('@') :]}" if "@" in name else "deepspeed"

    # torch.compile is a switch of a launch, and an entry of its own in the catalog.
    name_only, separator, year = name.partition("@")
    compiled, te_name = f"{name_only}-compile", f"{name_only}-te"
    if compiled in frameworks() and _compiles(row):
        return f"{compiled}{separator}{year}"
    # Where it is the default, the switch turned off is the separate entry.
    eager = f"{name_only}-eager"
    if eager in frameworks() and launch_switches(row).get("compile") is False:
        return f"{eager}{separator}{year}"

    # So are layers of Transformer Engine, where a framework has others by default.
    names_te = _LAYERS_OF_TRANSFORMER_ENGINE.search(text(row, "framework_as_stated"))
    return f"{te_name}{separator}{year}" if te_name in frameworks() and names_te else name


def may_pack_conversations(row: Row) -> bool:
    """Whether a row's trainer packs conversations into sequences, so that their lengths are open."""
    return any(_PACKS_CONVERSATIONS.search(text(row, name)) for name in ("framework", "framework_as_stated"))


def _compiles(row: Row) -> bool:
    """Whether a row's launch settings, or its source's name for the framework, state compilation."""
    if launch_switches(row).get("compile"):
        return True
    return bool(_COMPILES.search(text(row, "framework_as_stated").lower()))


def sharding_of(row: Row, dp: int, pp: int) -> dict[str, Any]:
    """The layout fields `zero`, `replicate` and `offload_states` from a row's `zero_stage` and `sharding`.

    Weights that FSDP shards stay gathered between the micro-batches of a pipeline (arXiv 2407.21783, section 3.3.2;
    torchtitan's default). `HSDP` without a number shards inside a node.

    Raises:
        Unusable: a `zero_stage` that is no whole number.
    """
    # Numbers in the column `zero_stage` go before words, which may mean two stages.
    reading = read_phrases(text(row, "sharding"), SHARDING)
    names_fsdp = bool(reading.first("zero 3", "fsdp group", "hybrid", "zero 2"))
    is_fsdp = names_fsdp and not reading.first("stage", "zero 1")
    zero = reading.figure("stage")
    if number(row, "zero_stage") is not None:
        zero = count(row, "zero_stage", least=0)
    elif zero is None:
        meaning = reading.first("zero 0", "zero 1", "zero 2", "zero 3", "fsdp group", "hybrid")
        if meaning:
            zero = int(meaning[-1]) if meaning.startswith("zero") else 3
            zero = 2 if reading.has_meaning("zero 2") else zero

    # Weights that stay gathered between micro-batches are not sharded as in stage 3.
    if is_fsdp and zero is not None and (pp > 1 or reading.has_meaning("keeps weights")):
        zero = min(zero, 2)

    # Where fewer ranks than there are replicas share the weights, each group of them holds a copy.
    stated: dict[str, Any] = {} if zero is None else {"zero": zero}
    ranks = reading.figure("group") or reading.figure("fsdp group") or 0
    if reading.has_meaning("hybrid") and not ranks:
        ranks = max(1, count(row, "devices_per_node", 8) // count(row, "tp", 1))
    if stated.get("zero", 1) and 0 < ranks < dp and dp % ranks == 0:
        stated["replicate"] = dp // ranks
    # FSDP's offload moves weights with their states, that of any other ZeRO states alone.
    if stated.get("zero") == 3 and reading.has_meaning("offload") and is_fsdp:
        stated["offload_states"] = "weights"
    elif stated.get("zero") and reading.first("offload", "offload optimizer"):
        stated["offload_states"] = "optimizer"
    return stated
