"""Reads columns of words: element type, network, launch, framework; names unknown words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.catalog import frameworks
from perfmodel.catalog.networks import Network, stated_network, unread_link_words
from perfmodel.spec import CudaGraphs, Device, Fp8Recipe, Framework, Model
from perfmodel.validation.rows._cells import Row, Unusable, count, number, text
from perfmodel.validation.rows._layout_words import (
    recompute_of,
    stages_named,
    unread_schedule_words,
)
from perfmodel.validation.rows.phrases import Reading, read_phrases
from perfmodel.validation.rows.vocabulary import DTYPE, RECOMPUTE, SHARDING, read_switches

_DTYPE_BY_MEANING: Final = (
    ("fp4", ("fp4", "nvfp4")),
    (
        "fp8",
        ("fp8", "mxfp8", "fp8 current", "fp8 blockwise", "fp8 tensorwise", "fp8 rowwise"),
    ),
    ("int8", ("int8",)),
    ("bf16", ("bf16",)),
    ("tf32", ("tf32",)),
    ("fp16", ("fp16", "levels of amp")),
    ("fp32", ("fp32",)),
)
"""Element types by meaning of words, in order of precedence: with an 8-bit recipe, the rest stays
in 16 bits."""
_MIXED: Final = ("16 bits", "16 bits alone", "base nf4", "base int8")
"""Meanings of words by which products are computed in 16 bits of some type."""
_WIDER: Final = {
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
}
"""Element types in which a device without units for one computes instead, in order of
preference."""
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
"""Recipes that frameworks with Transformer Engine use for 8-bit training where the row does not
name one."""
_COMPILES: Final = re.compile(
    r"(?<![\w.-])(?<!no )(?<!not )(?<!without )(?:torch\.)?compiled?(?![\w-])"
)
"""Words for torch.compile in a framework's description, but not `nocompile` or
`without torch.compile`."""
_LAYERS_OF_TRANSFORMER_ENGINE: Final = re.compile(r"transformer ?engine", re.IGNORECASE)
"""Words for Transformer Engine's layers in a framework's description."""
_PACKS_CONVERSATIONS: Final = re.compile(r"(?<![a-z])(?:swift|axolotl)(?![a-z])", re.IGNORECASE)
"""Trainers whose launch files put conversations together in a sequence, each attending to itself
alone: ModelScope SWIFT (examples/megatron: `--packing true`, attention by position ids) and axolotl
(`sample_packing`, its multipack patches). Read with the results of runs of SWIFT in view."""
_GPT2_VOCAB: Final = 50257
_BERT_VOCAB: Final = 30522
"""Entries of the tokenizers of Radford et al. 2019 and Devlin et al. 2019."""


@dataclass(frozen=True)
class StatedDtype:
    """The element type of a row's matrix products."""

    dtype: str
    is_assumed: bool = False
    """Whether no word of the row settles it."""
    contradiction: str = ""
    """A sentence about a stated type for which the row's device has no units; else empty."""


def dtype_of(row: Row, device: Device) -> StatedDtype:
    """The element type of a row's matrix products on its device.

    `float8-rowwise`, `mxfp8`, `fp8 delayed hybrid` and the like are fp8 by some recipe; the
    recipe's own column stands in where `dtype` is empty or not understood. A run on a device
    without units for a stated type was measured all the same: it computed in the next wider one, or
    one of the two cells is wrong.
    """
    usual = device.usual_dtype
    for column in ("dtype", "dtype_recipe"):
        reading = read_phrases(text(row, column), DTYPE)
        stated = _dtype_in_words(reading, device)
        # Words for mixed precision leave open which type of 16 bits is meant; the device has one,
        # or both are as fast.
        if not stated and reading.first(*_MIXED):
            stated = usual
        if not stated:
            continue
        if stated in device.dtypes:
            return StatedDtype(stated)
        wider = next((dtype for dtype in _WIDER.get(stated, ()) if dtype in device.dtypes), usual)
        # Frameworks pass over a request for TF32 where there are no units for it.
        if stated == "tf32":
            return StatedDtype(wider)
        return StatedDtype(
            wider,
            contradiction=f"{column}={stated} and {device.name} without {stated} (taken as {wider})",
        )
    return StatedDtype(usual, is_assumed=True)


def names_dtype(row: Row) -> bool:
    """Whether a row's words name an element type, however narrowly."""
    reading = _dtype_reading(row)
    if any(reading.first(*meanings) for _, meanings in _DTYPE_BY_MEANING):
        return True
    return bool(reading.first(*_MIXED, "8 bits"))


def _dtype_in_words(reading: Reading, device: Device) -> str:
    """The element type of matrix products that words name; empty if they name none."""
    for dtype, meanings in _DTYPE_BY_MEANING:
        if reading.first(*meanings):
            return dtype
    if reading.has_meaning("8 bits"):
        return "int8" if "int8" in device.dtypes and "fp8" not in device.dtypes else "fp8"
    return ""


def _dtype_reading(row: Row) -> Reading:
    """Return the combined reading of a row's two columns of element types."""
    return read_phrases(f"{text(row, 'dtype')} {text(row, 'dtype_recipe')}", DTYPE)


def fp8_recipe_of(row: Row, framework: Framework) -> Fp8Recipe | None:
    """The 8- or 4-bit recipe named by a row; None if not stated."""
    reading = _dtype_reading(row)
    for meaning, recipe in _RECIPES.items():
        if not reading.has_meaning(meaning):
            continue
        # Megatron and what stands on it call Transformer Engine's current scaling "tensorwise"
        # (Megatron-Core megatron/training/arguments.py, `--fp8-recipe`); torchao's recipe of that
        # name casts anew for every product.
        if (
            recipe == "tensorwise"
            and framework.job_defaults("fp8")["fp8_recipe"] in _OF_TRANSFORMER_ENGINE
        ):
            return "current"
        return recipe
    return None


def keeps_16_bits_alone(row: Row) -> bool:
    """Whether a row states that weights and optimizer states are only in 16 bits (`pure bf16`)."""
    return _dtype_reading(row).has_meaning("16 bits alone")


def gradient_dtype_of(row: Row) -> str:
    """The element type in which a row's gradients are reduced; empty if not stated."""
    return _dtype_reading(row).first("bf16 gradients", "fp32 gradients").partition(" ")[0]


def base_weights_of(row: Row) -> str:
    """Storage of frozen weights beside adapters: `nf4`, `int8`, or empty if not stated."""
    return _dtype_reading(row).first("base nf4", "base int8").removeprefix("base ")


def attends_in_8_bits(row: Row) -> bool:
    """Whether a row's recipe states 8-bit attention."""
    return _dtype_reading(row).has_meaning("attention in 8 bits")


_ASSUMED_ADAPTER_RANK: Final = 16
"""Rank of MLPerf's LoRA benchmark, assumed if only a model's name or the storage of its weights
indicates adapters."""


def adapter_rank_of(row: Row) -> int | None:
    """Rank of LoRA adapters implied by a model's name (`llama2-70b-lora`) or by narrow weights
    (`nf4`); None if all weights are trained."""
    names_adapters = re.search(r"(?<![a-z])q?lora(?![a-z])", text(row, "model").lower()) is not None
    # Weights that are stored in 4 or 8 bits cannot be trained, only adapters beside them.
    return _ASSUMED_ADAPTER_RANK if names_adapters or base_weights_of(row) else None


def launch_switches(row: Row) -> Mapping[str, bool]:
    """Launch switches in a row's `launch_and_overlap`, by the setting that they change."""
    return read_switches(text(row, "launch_and_overlap"))[0]


def graphs_of(switches: Mapping[str, bool]) -> CudaGraphs:
    """Return the scope of CUDA graphs that a launch's switches state: a whole step, or layers."""
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
    """Vocabulary, and whether it still has to be padded: from its column, from the tokenizer's
    column, else from the tokenizer of the family's first model (BERT or GPT-2)."""
    # A stated vocabulary is as it ran, and padded already. A tokenizer's size still has to be
    # padded.
    if number(row, "vocab") is not None:
        return count(row, "vocab"), False
    if number(row, "tokenizer_vocab") is not None:
        return count(row, "tokenizer_vocab"), True
    if text(row, "family").lower().startswith("bert"):
        return _BERT_VOCAB, True
    return _GPT2_VOCAB, True


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
    unread["schedule"] = unread_schedule_words(row)
    _, unread["launch_and_overlap"] = read_switches(text(row, "launch_and_overlap"))

    # The remarks become a list that is separated by commas, so that none may stand inside one.
    remarks = []
    for column, column_words in unread.items():
        for word in column_words:
            remarks.append(f"{column} {word!r} not understood".replace(",", ""))
    return tuple(remarks)


def network_of(row: Row) -> tuple[Network, tuple[str, ...]]:
    """The network between nodes from a row's words, and contradictions within them and with the
    columns of adapters, which take precedence (`cluster_for`)."""
    network, contradictions = stated_network(
        text(row, "inter_link"), text(row, "inter_link_as_stated")
    )
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
    named = stages_named(read_phrases(text(row, "sharding"), SHARDING))
    if stage is not None and named and stage not in named:
        contradictions.append(f"zero_stage={stage:g} and sharding={text(row, 'sharding')}")
    modes = {
        recompute_of({"recompute": text(row, name)}) for name in ("recompute", "recompute_detail")
    } - {""}
    if len(modes) > 1:
        contradictions.append(
            f"recompute={text(row, 'recompute')} and recompute_detail={text(row, 'recompute_detail')}"
        )
    if text(row, "dtype") and text(row, "dtype_recipe"):
        kinds = _dtypes_named(text(row, "dtype"))
        recipe_kinds = _dtypes_named(text(row, "dtype_recipe"))
        if kinds and recipe_kinds and kinds.isdisjoint(recipe_kinds):
            contradictions.append(
                f"dtype={text(row, 'dtype')} and dtype_recipe={text(row, 'dtype_recipe')}"
            )
    return tuple(contradictions)


def framework_name(row: Row) -> str:
    """The framework of a row as `name@year` or `name`; empty if it is not stated.

    A column that names DeepSpeed's ZeRO means DeepSpeed, even if it names others too. On Gaudi,
    Megatron-DeepSpeed is Habana's fork, and NeMo, which needs NVIDIA's devices, is what Intel names
    beside DeepSpeed in its MLPerf submissions (mlcommons/training_results_v4.0
    Intel-HabanaLabs/benchmarks/llm_finetune). A framework whose launch compiles, or whose layers
    are Transformer Engine's, is a separate entry of the catalog.
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
    """Whether a row's trainer packs conversations, whose lengths are then open."""
    return any(
        _PACKS_CONVERSATIONS.search(text(row, name))
        for name in ("framework", "framework_as_stated")
    )


def _compiles(row: Row) -> bool:
    """Whether a row's launch settings or its framework's name state compilation."""
    if launch_switches(row).get("compile"):
        return True
    return bool(_COMPILES.search(text(row, "framework_as_stated").lower()))
