"""Vocabularies of word columns: known phrases and their meanings; unknown words are reported.

A column's text is read phrase by phrase, the longest known phrase first. What no phrase explains is not matched to
anything: it is returned, and named in `assumed`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from perfmodel.display import shorten_reprs


@dataclass(frozen=True)
class Phrase:
    """A known phrase of a column."""

    pattern: str
    """Regular expression over lower-case text; its groups are figures of the meaning."""
    meaning: str = ""
    """Name of the phrase's meaning; empty for a phrase without effect."""


@dataclass(frozen=True)
class Reading:
    """The meaning of a cell's text."""

    said: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Meanings in the order in which they occur, each with its figures."""
    unread: tuple[str, ...] = ()
    """Words that no phrase explains."""

    def has_meaning(self, meaning: str) -> bool:
        """Whether the text contains a phrase with this meaning."""
        return any(name == meaning for name, _ in self.said)

    def figure(self, meaning: str) -> int | None:
        """The first whole number in a phrase with this meaning; None if there is none."""
        for name, figures in self.said:
            if name == meaning and figures:
                return int(figures[0])
        return None

    def first(self, *meanings: str) -> str:
        """The first of these meanings in the text; empty if there is none."""
        return next((name for name, _ in self.said if name in meanings), "")

    def all_of(self, *meanings: str) -> tuple[str, ...]:
        """Return the meanings that the text contains, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.said if name in meanings))


_WORD: Final = re.compile(r"[^\s,;()+|]*[a-z0-9][^\s,;()+|]*")
_FILLER_WORDS: Final = """
    a an the of in on to by for with and as at from is are not or other others otherwise default assumed stated
    inferred config configuration round kind usual
"""
"""Filler words, which are skipped without being reported."""
_FILLERS: Final = frozenset(_FILLER_WORDS.split())
_REMARK: Final = re.compile(r"\([^()]*\)")


@lru_cache(maxsize=1024)
def read_phrases(text: str, vocabulary: tuple[Phrase, ...]) -> Reading:
    """Parse a text with a vocabulary. Unknown remarks in brackets are ignored."""
    lowered = text.lower()
    meanings: list[tuple[str, tuple[str, ...]]] = []
    unread: list[str] = []
    # Phrases are taken from left to right, at every place the longest that fits.
    position = 0
    while position < len(lowered):
        # A remark in brackets is read for what is known in it. Its unknown words are no statement
        # about the setting.
        remark = _REMARK.match(lowered, position) if lowered[position] == "(" else None
        if remark:
            inside = read_phrases(remark[0][1:-1], vocabulary)
            meanings += inside.said
            position = remark.end()
            continue
        if not lowered[position].isalnum():
            position += 1
            continue
        phrase, match = _longest(lowered, position, vocabulary)
        if match is not None:
            if phrase.meaning:
                meanings.append((phrase.meaning, tuple(figure for figure in match.groups() if figure)))
            position = match.end()
            continue
        word = _WORD.match(lowered, position)
        if word is None:
            position += 1
            continue
        if word[0] not in _FILLERS:
            unread.append(word[0])
        position = word.end()
    return Reading(tuple(meanings), tuple(dict.fromkeys(unread)))


def _longest(text: str, position: int, vocabulary: Sequence[Phrase]) -> tuple[Phrase, re.Match[str] | None]:
    """The phrase of a vocabulary that matches the longest text from a position on."""
    best, best_match = vocabulary[0], None
    for phrase in vocabulary:
        # A phrase must not end inside a word.
        match = re.compile(rf"(?:{phrase.pattern})(?![a-z0-9])").match(text, position)
        longest = position if best_match is None else best_match.end()
        if match is not None and match.end() > longest:
            best, best_match = phrase, match
    return best, best_match


DTYPE: Final = (
    Phrase(r"fp4|float4|mxfp4|e2m1", "fp4"),
    Phrase(r"nvfp4", "nvfp4"),
    Phrase(r"fp8_full|fp8|float8|e4m3|e5m2", "fp8"),
    Phrase(r"mxfp8(?:_cublas)?(?:_rceil)?|fp8[-_]mx", "mxfp8"),
    Phrase(r"fp8[-_]cs", "fp8 current"),
    Phrase(r"fp8[-_]sc", "fp8 blockwise"),
    Phrase(r"(?:fp8|float8)[-_]tensorwise", "fp8 tensorwise"),
    Phrase(r"(?:fp8|float8)[-_]rowwise", "fp8 rowwise"),
    Phrase(r"int8(?: matmuls)?", "int8"),
    Phrase(r"bf16|bfloat16", "bf16"),
    Phrase(r"tf32", "tf32"),
    Phrase(r"fp16|float16|half|amp", "fp16"),
    Phrase(r"fp32|float32|single|float", "fp32"),
    Phrase(r"bf16/fp16", "bf16"),
    Phrase(r"delayed(?: scaling)?", "delayed"),
    Phrase(r"current(?: scaling)?", "current"),
    Phrase(r"block(?:wise)?(?: scaling)?|sub-?channel", "blockwise"),
    Phrase(r"row-?wise", "rowwise"),
    Phrase(r"row-?wise_with_gw_hp", "rowwise with wide weight gradients"),
    Phrase(r"tensor-?wise", "tensorwise"),
    Phrase(r"attention (?:in )?fp8|fp8 attention", "attention in 8 bits"),
    Phrase(r"attention (?:in )?bf16|bf16 attention", "attention in 16 bits"),
    Phrase(r"pure (?:bf16|fp16)(?: weights)?", "16 bits alone"),
    Phrase(r"aqt", "aqt"),
    Phrase(r"(?:fp8|float8) params?|fp8_params=1|(?:fp8|float8|bf16) all-gather|all-gather (?:fp8|float8|bf16)"),
    Phrase(
        r"hybrid|compiled?|nocompile|eager|prototype|o[0-3]|te|transformer engine|grouped|most|linear|layers?|mixed"
        r"|precision|precomputed scale|tf32 peak \d+|page folder says fp8|scaling|recipe|master|weights"
    ),
)
"""Element types and recipes of columns `dtype` and `dtype_recipe`."""

RECOMPUTE: Final = (
    Phrase(r"none|no|off|false|recompute=false|gradient checkpointing off", "none"),
    Phrase(
        r"full|uniform|per block|recompute=true|true|on|gradient checkpointing|activation checkpointing",
        "full",
    ),
    Phrase(r"(?:full,? )?block,? (\d+) layers", "layers"),
    Phrase(r"uniform,? (\d+)", "full"),
    Phrase(r"selective|recompute-activations|per op|op|sac", "selective"),
    Phrase(r"(?:selective,? )?every (\d+)(?:st|nd|rd|th)? layers?", "every"),
    Phrase(r"(?:selective )?\(?layer\)?", "selective"),
    # Parts of layers, by the names that Megatron-Core's `recompute_modules` has for them.
    Phrase(r"attention core|core attention|core_attn|attn", "core_attn"),
    Phrase(r"layer-?norms?|norms?", "layernorm"),
    Phrase(r"mlp", "mlp"),
    Phrase(r"mlp_act", "mlp_act"),
    Phrase(r"moe", "moe"),
    Phrase(r"moe_act|act", "moe_act"),
    Phrase(r"shared_experts?", "shared_experts"),
    Phrase(r"mla_up_proj", "mla_up_proj"),
    Phrase(
        r"(?:remat_policy )?(?:save_qkv_proj|save_out_proj|qkv_proj_offloaded|full)",
        "policy full",
    ),
    Phrase(r"(?:remat_policy )?custom", "policy custom"),
    Phrase(r"(?:remat_policy )?minimal|remat_policy save_dot_except_logits", "policy products"),
    Phrase(r"(?:remat_policy )?minimal_(?:flash|with_context)", "policy products and attention"),
    Phrase(r"remat_policy none", "policy none"),
    Phrase(r"(?:remat_policy )?minimal_offloaded", "policy offload"),
    Phrase(r"remat_policy \S*except\S*(?:mlpwi|ffn1)", "policy feed-forward"),
    Phrase(r"not stated|kind not stated"),
    Phrase(
        r"q, k, v, qkv out projections kept device|q|k|v|qkv|out|projections|kept|device|reference|implementation"
        r"|verified|torchtitan default \S+|\S+\.toml|benchmark|hf|modules?|layers?|recompute|policy|remat_policy"
        r"|shape|layer"
    ),
)
"""Columns `recompute` and `recompute_detail`."""

SHARDING: Final = (
    Phrase(r"none|no|ddp|ddp only|replicated", "zero 0"),
    # Stages of ZeRO: by number, or by the name that a framework has for one.
    Phrase(r"zero(?:[- ]?stage)?[- ]?(\d)|sharding stage (\d)|stage (\d)", "stage"),
    Phrase(r"fsdp\d?|full[_ ]shard|fully sharded", "zero 3"),
    Phrase(r"hsdp|hybrid[_ ]shard", "hybrid"),
    Phrase(r"(?:fsdp )?shard_grad_op", "zero 2"),
    Phrase(
        r"(?:megatron |mcore )?distributed optimizer|distopt|distributed fused adam|zero-dp",
        "zero 1",
    ),
    Phrase(r"distributed optimizer not stated|zero stage not read|sharding not stated"),
    Phrase(r"overlapped(?: grad reduce and param gather)?|overlapped grad reduce", "overlapped"),
    Phrase(r"over (\d+)(?: data)?(?: ranks| devices| gpus)?", "group"),
    Phrase(r"over all ranks|over the rest"),
    # Ranks among which the states are sharded, where these are not all.
    Phrase(r"group (\d+)|size (\d+)|ici_fsdp=(\d{2,})", "group"),
    Phrase(r"fsdp\d? (\d+)", "fsdp group"),
    Phrase(r"inside (?:a |the )?(?:node|slice)", "inside"),
    Phrase(r"data parallel over (\d+) slices?\(?s?\)?|replicated (\d+) times"),
    Phrase(r"fsdp ?\+ ?dp", "fsdp and dp"),
    Phrase(r"replicated over the other (\d+)|replicated beyond"),
    Phrase(
        r"(?:with )?cpu adam offload|optimizer offload|offloaded optimizer|zero-offload",
        "offload optimizer",
    ),
    Phrase(r"(?:with )?(?:cpu )?offload(?: of parameters)?|zero-infinity", "offload"),
    Phrase(r"parameters kept gathered after forward", "keeps weights"),
    Phrase(r"hpz over (\d+) ranks|hpz", "hpz"),
    Phrase(r"ici_fsdp=-1|ici_fsdp=1?|ici_fsdp_transpose=-?\d*|dcn_fsdp=\d*"),
    Phrase(
        r"deepspeed|megatron|fairscale|paddle|pytorch|torch|ranks|devices|times|earlier|rounds|slice\(s\)|slices?|code"
        r"|that|commit|repository|routed experts fsdp|sharding|full|data|size"
    ),
)
"""Column `sharding`."""

INTERLEAVED_NAMES: Final = ("interleaved", "interleaved-1f1b", "1f1b-i")
"""Names in the column `schedule` for 1F1B with several model chunks per stage."""

LAUNCH_SWITCHES: Final = {
    "tp_comm_overlap": "tp_overlap",
    "ub_tp_comm_overlap": "tp_overlap",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_gather": "overlap_param_gather",
    "overlap_param_sync": "overlap_param_gather",
    "overlap_ep": "ep_overlap",
    "overlap_moe_expert_parallel_comm": "ep_overlap",
    "layer_cuda_graph": "graphs of layers",
    "mcore_cuda_graph": "graphs of layers",
    "enable_cuda_graph": "graphs of layers",
    "external_cuda_graph": "graphs of layers",
    "full_cuda_graph": "graph of the step",
    "full_iteration_cuda_graph": "graph of the step",
    "lora_a2a": "lora_a2a",
    "blocking_launches": "blocking_launches",
    "cuda_launch_blocking": "blocking_launches",
    "hybridep": "hybridep",
    "deepep": "deepep",
    "fused_experts": "fused_experts",
    "use_te_ops": "operation_fuser",
    "use_transformer_engine_op_fuser": "operation_fuser",
    "bf16_gradient_reduction": "bf16 gradients",
    "compile": "compile",
    # known, and without a setting of their own here
    "fp8_params": "",
    "fp8_param_gather": "",
    "tp_pp_dp_rank_order": "",
    "defer_embedding_wgrad": "",
    "asym_pp_embed": "",
    "overlap_p2p": "",
    "scan_layers": "",
    "delayed_wgrad": "",
    "paged_stash": "",
    "router_and_permute_fusion": "",
    "distributed_optimizer": "distributed_optimizer",
    "mcore_distributed_optimizer": "distributed_optimizer",
    "eager": "",
}
"""Switches `name=value` of column `launch_and_overlap` (spaces and hyphens in names are underscores), and the settings
that they change; empty for known switches without effect here."""
LAUNCH_PHRASES: Final = {
    "full-iteration cuda graph": "full_cuda_graph",
    "full cuda graph": "full_cuda_graph",
    "cuda graph": "layer_cuda_graph",
    "cuda graphs": "layer_cuda_graph",
    "fused grouped mlp": "fused_experts",
    "hybridep dispatcher inside nvlink domain": "hybridep",
    "1f1b expert-communication overlap": "overlap_ep",
    "asymmetric embedding and loss stages": "asym_pp_embed",
}
"""Phrases of that column for switches that are on."""
_TRUE: Final = frozenset({"1", "true", "on", "yes", ""})
_FALSE: Final = frozenset({"0", "false", "off", "no"})


@lru_cache(maxsize=512)
def read_switches(text: str) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Switches of a launch by the setting they change, and the parts of the text that are not understood. A setting
    with several switches is on if any of them is."""
    switches: dict[str, bool] = {}
    unread = []
    for part in re.split(r"[;,]|\s{2,}", text):
        phrase = part.strip()
        if not phrase:
            continue

        # `name` alone switches on, as `name=1` does. `name=` is neither.
        name, sign, value = (piece.strip().lower() for piece in phrase.partition("="))
        key = LAUNCH_PHRASES.get(name, name).replace("-", "_").replace(" ", "_")
        is_known = key in LAUNCH_SWITCHES and value in _TRUE | _FALSE
        if not is_known or (sign and value == ""):
            unread.append(phrase.replace(",", ""))
            continue
        meaning = LAUNCH_SWITCHES[key]
        if meaning:
            switches[meaning] = switches.get(meaning, False) or value in _TRUE
    return switches, tuple(unread)


shorten_reprs(__name__)
