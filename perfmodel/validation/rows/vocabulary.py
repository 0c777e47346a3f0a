"""Vocabularies of word columns: known phrases and their meanings (`read_phrases`), and the switches
of a launch."""

import re
from functools import lru_cache
from typing import Final

from perfmodel.display import shorten_reprs
from perfmodel.spec.notation import SCHEDULE_ALIASES, SCHEDULES
from perfmodel.validation.rows.phrases import Phrase, plain_words

# --- element types
# ------------------------------------------------------------------------------------------------

_BF16: Final = r"(?:(?:bf|bfloat|brain float) 16)"
_FP16: Final = r"(?:(?:fp|float|f) 16|half(?: precision)?)"
_FP32: Final = r"(?:(?:fp|float|f) 32|single(?: precision)?|full precision|float|32 bit)"
_FP8: Final = r"(?:(?:fp|float) 8)(?: full)?(?: e\dm\d(?:fn)?)?|e4m3(?:fn)?|e5m2"
_ANY_TYPE: Final = rf"(?:{_BF16}|{_FP16}|{_FP32}|{_FP8}|tf 32)"
_GRADIENTS: Final = r"(?:gradients?|grads?|reduc(?:e|tion)|all reduce)(?: (?:reduc(?:e|tion)|all reduce|accumulation|dtype))*"
_OF_OTHERS: Final = (
    r"(?:(?:main|master) (?:weights|params|parameters|copy)|optimi[sz]er(?: states?)?|states?|moments?|master"
    r"|accum\w*|loss|softmax|norms?|embeddings?|router|residuals?|logits|buffers?)"
)
"""Parts of a step whose element type is not that of its matrix products."""

DTYPE: Final = (
    Phrase(r"(?:fp|float|mxfp) 4|e2m1", "fp4"),
    Phrase(r"nvfp 4", "nvfp4"),
    Phrase(_FP8, "fp8"),
    Phrase(r"mx fp 8(?: cublas)?(?: rceil)?|fp 8 mx", "mxfp8"),
    Phrase(r"fp 8 cs", "fp8 current"),
    Phrase(r"fp 8 sc", "fp8 blockwise"),
    Phrase(r"(?:fp|float) 8 tensor wise", "fp8 tensorwise"),
    Phrase(r"(?:fp|float) 8 row wise(?! with)", "fp8 rowwise"),
    Phrase(r"int 8(?: matmuls)?|w8a8", "int8"),
    Phrase(r"8 bits?", "8 bits"),
    Phrase(_BF16, "bf16"),
    Phrase(r"tf 32|tensor float 32", "tf32"),
    Phrase(rf"{_FP16}|amp|16 mixed|16 true", "fp16"),
    Phrase(rf"{_FP32}|o0|32 true", "fp32"),
    Phrase(r"bf16/fp16|fp16/bf16", "bf16"),
    # The levels of Apex's `amp` are of fp16 (its documentation, opt_levels); what others call mixed
    # is of 16 bits.
    Phrase(r"(?:apex )?o[123]", "levels of amp"),
    Phrase(r"mixed(?: precision)?|16 bits?", "16 bits"),
    # Adapters train beside weights that are stored in fewer bits than products are computed in.
    Phrase(
        r"(?:bnb )?nf 4|q lora|load in 4 ?bit|(?:bnb )?4 bits?(?: base(?: weights)?| weights| quanti[sz]\w+)?",
        "base nf4",
    ),
    Phrase(r"w4a16|double quant\w*", "base nf4"),
    Phrase(
        r"load in 8 ?bit|llm int8(?:\(\))?|w8a16|(?:bnb )?8 bits? (?:base(?: weights)?|weights)",
        "base int8",
    ),
    Phrase(r"delayed(?: scaling)?", "delayed"),
    Phrase(r"current(?: scaling)?", "current"),
    Phrase(r"block(?: wise|s)?(?: scal(?:ing|ed))?|sub channel|128x128(?: blocks?)?", "blockwise"),
    Phrase(r"(?:per )?row(?: wise)?", "rowwise"),
    Phrase(r"row wise with gw hp", "rowwise with wide weight gradients"),
    Phrase(r"tensor wise|per tensor", "tensorwise"),
    Phrase(r"attention (?:in )?fp8|fp8 attention", "attention in 8 bits"),
    Phrase(r"attention (?:in )?bf16|bf16 attention", "attention in 16 bits"),
    Phrase(r"pure(?= (?:bf16|fp16))|true", "16 bits alone"),
    Phrase(rf"{_BF16}(?!,) {_GRADIENTS}|{_GRADIENTS}(?!,) (?:in )?{_BF16}", "bf16 gradients"),
    Phrase(rf"{_FP32}(?!,) {_GRADIENTS}|{_GRADIENTS}(?!,) (?:in )?{_FP32}", "fp32 gradients"),
    Phrase(
        rf"{_ANY_TYPE}(?!,) {_OF_OTHERS}(?: {_OF_OTHERS})*|{_OF_OTHERS}(?!,)(?: in)? {_ANY_TYPE}"
    ),
    Phrase(r"aqt", "aqt"),
    Phrase(
        r"(?:fp8|float8) params?|fp8 params 1|(?:fp8|float8|bf16) all gather|all gather (?:fp8|float8|bf16)"
    ),
    Phrase(r"(?:dynamic |static )?loss scal(?:e|ing|er)|grad(?:ient)? scaler"),
    Phrase(
        r"hybrid|compiled?|nocompile|eager|prototype|te|transformer engine|grouped|most|linear|layers?"
        r"|precision|precomputed scale|tf32 peak \d+|page folder says fp8|scaling|recipe|master|weights|dtype"
        r"|param(?:eter)?s?|compute|computation|matmuls?|gemms?|training|activations"
    ),
)
"""Element types and recipes of columns `dtype` and `dtype_recipe`."""

# --- recompute
# ------------------------------------------------------------------------------------------------

_CHECKPOINTING: Final = (
    r"(?:(?:gradient|grad|activations?|act) )?(?:checkpoint(?:s|ing|ed)?|ckpt|recomput(?:e|ed|ing|ation)"
    r"|re ?materiali[sz](?:e|ed|ing|ation)|remat)(?: activations?)?|ac"
)
_LAYERS: Final = (
    r"(?:(?:of )?(?:the |all )?(?:transformer |decoder |encoder )?(?:layers?|blocks?))"
    r"(?: (?:per|of each|of every|in each) (?:pipeline )?(?:stage|rank))?"
)

RECOMPUTE: Final = (
    Phrase(r"none|off|false|disabled|not used|never", "none"),
    Phrase(r"no(?=$|[,)])|without(?=$|[,)])", "none"),
    Phrase(r"n|0(?:\.0)?", "none", is_whole_cell=True),
    Phrase(rf"{_CHECKPOINTING}", "some"),
    Phrase(r"true|on|enabled|yes", "some"),
    Phrase(r"y|1(?:\.0)?|with|used", "some", is_whole_cell=True),
    Phrase(
        rf"full|per (?:transformer )?(?:block|layer)|block wise|whole {_LAYERS}|every layer|all {_LAYERS}",
        "full",
    ),
    # Megatron-LM's methods: `uniform` repeats all layers in groups of a number, `block` a number of
    # them in each stage.
    Phrase(
        r"uniform(?:(?: method)?(?: recompute)?(?: num)?(?: layers)? (\d+)(?: layers?)?)?",
        "uniform",
    ),
    Phrase(r"(?:full )?block", "full"),
    Phrase(rf"(?:full )?block (\d+)(?: {_LAYERS})?|(?:the )?(?:first )?(\d+) {_LAYERS}", "layers"),
    Phrase(r"(?:recompute )?num layers (\d+)", "layers"),
    # Shares of the layers.
    Phrase(
        rf"(\d+) (?:out of|of|in|/) (?:the )?(\d+)(?: {_LAYERS})?|(\d+) layers? (?:out of|of|in) (\d+)",
        "share",
    ),
    Phrase(rf"(\d+) %(?: {_LAYERS})?", "percent"),
    Phrase(rf"(?:a )?half(?: {_LAYERS})?|alternat(?:e|ing) {_LAYERS}", "half"),
    Phrase(rf"(?:a |(\d) )?thirds?(?: {_LAYERS})?", "thirds"),
    Phrase(rf"(?:a |(\d) )?quarters?(?: {_LAYERS})?", "quarters"),
    Phrase(rf"(?:every|each) (\d+)(?:st|nd|rd|th)? {_LAYERS}", "every"),
    Phrase(r"selective|recompute activations|per op|op|sac|layer", "selective"),
    # Parts of layers, by the names that Megatron-Core's `recompute_modules` has for them.
    Phrase(r"attention core|(?:core |self )?attention|(?:core )?attn", "core_attn"),
    Phrase(r"(?:layer |rms )?norms?", "layernorm"),
    Phrase(r"mlp|ffn|feed forward", "mlp"),
    Phrase(r"mlp act|swi glu|ge lu|activation functions?", "mlp_act"),
    Phrase(r"moe", "moe"),
    Phrase(r"moe act|act", "moe_act"),
    Phrase(r"shared experts?", "shared_experts"),
    Phrase(r"mla up proj", "mla_up_proj"),
    # Policies of JAX's compilers.
    Phrase(
        r"(?:remat policy )?(?:save qkv proj|save out proj|qkv proj offloaded|nothing saveable|save nothing)"
        r"|remat policy full",
        "policy full",
    ),
    Phrase(r"(?:remat policy )?custom", "policy custom"),
    Phrase(
        r"(?:remat (?:policy )?)?(?:minimal|save dot except logits|dots saveable|checkpoint dots|save dots"
        r"|(?:checkpoint )?dots with no batch dims(?: saveable)?)",
        "policy products",
    ),
    Phrase(
        r"(?:remat (?:policy )?)?minimal (?:flash|with context)", "policy products and attention"
    ),
    Phrase(
        r"remat policy none|(?:remat policy )?(?:everything saveable|save everything)",
        "policy none",
    ),
    Phrase(r"(?:remat (?:policy )?)?minimal offloaded", "policy offload"),
    Phrase(r"(?:remat policy )?save dot except(?: logits)? (?:mlpwi|ffn1)", "policy feed-forward"),
    Phrase(
        r"(?:(?:cpu|host|activations?) )*offload(?:ed|ing)?(?: (?:of )?activations)?(?: to (?:the )?(?:host|cpu)"
        r"(?: memory)?)?",
        "offload",
    ),
    Phrase(
        r"q, k, v, qkv out projections kept device|q|k|v|qkv|out|projections|kept|device|reference|implementation"
        r"|verified|torchtitan default|\w+(?: \w+)? toml|benchmark|hf|modules?|layers?|policy"
        r"|shape|recompute (?:granularity|method|modules?)|granularity|method|mode|group size|all activations"
    ),
)
"""Columns `recompute` and `recompute_detail`."""

# --- sharding
# ------------------------------------------------------------------------------------------------

_HYBRID: Final = r"hsdp|hybrid(?:ly)? shard(?:ed|ing)?(?: data parallel)?|mics(?: shard size)?"
_RANKS: Final = r"(?:(?:data )?(?:ranks?|devices?|gpus?|chips?))"
_FSDP: Final = r"(?:pytorch |megatron |simple |per parameter )?fsdp"

SHARDING: Final = (
    Phrase(r"none|replicated", "zero 0"),
    Phrase(r"(?:fsdp )?(?:not? |un |without )shard(?:ed|ing)?", "no shards"),
    Phrase(r"no(?=$|[,)])", "zero 0"),
    # Data parallelism by itself shards nothing, and a sharded optimizer beside it is what
    # distributed optimizers are.
    Phrase(r"(?:plain |pure )?(?:ddp|dp|data parallel(?:ism)?)(?: only)?|horovod", "replicas"),
    # Stages of ZeRO: by number, or by the name that a framework has for one.
    Phrase(
        r"(?:(?:deepspeed|ds) )?(?:zero|z)(?: stage)? ([0-3])|(?:group )?shard(?:ing|ed) stage ([0-3])|stage ([0-3])",
        "stage",
    ),
    Phrase(
        rf"{_FSDP}(?:[12]| v?[12])?|full shard|fully shard(?:ed)?(?: data parallel)?|optim grads params",
        "zero 3",
    ),
    Phrase(rf"{_HYBRID}|fsdp (?:within|inside) (?:a |the |each )?node", "hybrid"),
    Phrase(rf"(?:{_HYBRID}) (\d+)(?: {_RANKS})?", "hybrid"),
    Phrase(rf"(?:{_HYBRID}) (\d+) x (\d+)", "copies and shards"),
    Phrase(rf"(?:{_FSDP} )?shard grad op|optim grads|sharded ddp", "zero 2"),
    Phrase(
        r"(?:megatron |mcore )?(?:use )?(?:distributed|dist|sharded) (?:optimi[sz]er|optim|opt)(?: states?)?"
        r"|distributed fused adam|zero dp|optimi[sz]er (?:states? )?(?:sharding|partitioning)"
        r"|zero redundancy optimi[sz]er|oss|weight update sharding",
        "zero 1",
    ),
    # The states in the notation of the paper on ZeRO: optimizer, gradients, parameters.
    Phrase(r"p os", "zero 1"),
    Phrase(r"p os \+ g", "zero 2"),
    Phrase(r"p os \+ g \+ p", "zero 3"),
    Phrase(r"distributed optimizer not stated|zero stage not read|sharding not stated"),
    Phrase(r"overlapped(?: grad reduce and param gather)?|overlapped grad reduce", "overlapped"),
    Phrase(rf"over (\d+)(?: {_RANKS})?", "group"),
    Phrase(r"over all ranks|over the rest"),
    # Ranks among which the states are sharded, where these are not all.
    Phrase(r"group (\d+)|(?:shard )?size (\d+)|shard (\d+)|ici fsdp (\d{2,})", "group"),
    Phrase(rf"(\d+) {_RANKS}", "group"),
    Phrase(
        rf"{_FSDP}[12]? (?:size |degree )?([3-9]|\d\d+)(?: x (?:dp|ddp|replicas?) \d+)?",
        "fsdp group",
    ),
    Phrase(r"(?:dp|data parallel) shard(?: degree)? (\d+)", "fsdp group"),
    Phrase(r"(?:(?:dp|data parallel) )?replicate(?: degree)? (\d+)|(\d+) replicas", "copies"),
    Phrase(r"inside (?:a |the )?(?:node|slice)", "inside"),
    Phrase(r"data parallel over (\d+) slices?\(?s?\)?|replicated (\d+) times"),
    Phrase(r"fsdp \+ dp", "fsdp and dp"),
    Phrase(r"replicated over the other (\d+)|replicated beyond"),
    Phrase(
        r"(?:with )?cpu adam offload|optimizer offload(?:ing)?|offload(?:ed)? optimizer(?: states?)?(?: (?:to )?cpu)?"
        r"|zero offload",
        "offload optimizer",
    ),
    Phrase(r"(?:with )?(?:(?:cpu|nvme) )?offload(?:ing)?(?: of parameters)?", "offload"),
    Phrase(
        r"offload (?:of )?(?:params?|parameters|weights)(?: (?:and|,) optimizer)?(?: (?:to )?cpu)?",
        "offload weights",
    ),
    Phrase(r"zero infinity", "infinity"),
    Phrase(r"(?:parameters )?kept gathered after forward", "keeps weights"),
    Phrase(r"re shard(?:ing)?(?: after forward)?", "gathers weights again"),
    Phrase(r"(?:zero )?hpz(?: partition size)?(?: over)?(?: (\d+)(?: ranks)?)?", "hpz"),
    Phrase(r"zero\+\+", "zero++"),
    Phrase(r"ici fsdp(?: transpose)?(?: 1)?|dcn fsdp(?: \d+)?"),
    Phrase(
        r"deepspeed|megatron|fairscale|paddle|pytorch|torch|ranks|devices|times|earlier|rounds|slice\(s\)|slices?|code"
        r"|that|commit|repository|routed experts fsdp|sharding(?: strategy)?|full|data|size|zero|strategy"
    ),
)
"""Column `sharding`."""

# --- schedules
# ------------------------------------------------------------------------------------------------


def _schedule_phrases() -> tuple[Phrase, ...]:
    """A phrase for each way to write a schedule's name, with that name as its meaning."""
    aliases = {name: name for name in SCHEDULES} | SCHEDULE_ALIASES
    names = []
    for alias, name in aliases.items():
        names.append(Phrase(plain_words(alias).replace("+", r"\+"), name))
    return tuple(names)


_CHUNKS: Final = r"(?:virtual (?:pipeline )?(?:stages?|chunks?)|(?:model )?chunks?)(?: per (?:stage|rank|device|gpu))?"

SCHEDULE: Final = (
    Phrase(r"none|no pipeline(?: parallelism)?", "1f1b"),
    # `torch.distributed.pipelining` calls its classes so.
    *(Phrase(f"(?:schedule )?{phrase.pattern}", phrase.meaning) for phrase in _schedule_phrases()),
    Phrase(
        r"interleaving|interleaved? (?:pipeline|schedule)|(?:vpp|virtual pipeline)(?! ?\d)",
        "interleaved",
    ),
    Phrase(r"non interleaved(?: 1f1b)?", "1f1b"),
    # One of several; the paper's first one needs no more memory than 1F1B (arXiv 2401.10241,
    # section 2.3).
    Phrase(r"zero bubble(?: (?:pipeline|schedule))?|zb", "some zero bubble"),
    # Numbers of model chunks per stage, and of micro-batches.
    Phrase(
        r"(?:v|vpp|virtual pipeline(?: (?:model )?parallel)?(?: (?:size|degree))?) (\d+)(?!\.)",
        "chunks",
    ),
    Phrase(
        rf"(\d+) {_CHUNKS}|{_CHUNKS} (\d+)|(?:interleav\w+|degree) (\d+)(?: {_CHUNKS})?|x (\d+)",
        "chunks",
    ),
    Phrase(r"(?:with )?(\d+) micro batch(?:es)?|micro batch(?:es)? (\d+)|m (\d+)", "micro-batches"),
    Phrase(
        r"schedule|scheduling|style|pipeline|pipelining|synchronous|sync|memory efficient|megatron|parallelism"
        r"|deepspeed|pytorch|torch|flush|model|stages?|deepseek(?: v\d)?"
    ),
)
"""Column `schedule`."""

# --- switches of a launch
# ------------------------------------------------------------------------------------------------

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
"""Switches `name=value` of column `launch_and_overlap` (spaces and hyphens in names are
underscores), and the settings that they change; empty for known switches without effect here."""
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
    """Switches of a launch by the setting they change, and the parts of the text that are not
    understood. A setting with several switches is on if any of them is."""
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
