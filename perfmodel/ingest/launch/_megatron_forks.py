"""Arguments that only forks of Megatron-LM have: for the layout, and for adapters.

Megatron-DeepSpeed: `megatron/arguments.py`. MindSpeed and MindSpeed-LLM:
`mindspeed/features_manager`, `mindspeed_llm/training/arguments.py`. slime:
`slime/backends/megatron_utils/arguments.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry, as_list
from perfmodel.ingest.launch._finetuning import Adapters, method_fields, tuning_fields
from perfmodel.ingest.launch._megatron_model import OFFLOADED_WEIGHTS, idle_layers, stated
from perfmodel.ingest.launch._table import (
    NUMBER,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    read_only,
    words,
)
from perfmodel.spec import RecomputeModule

_RENAMED: Final = {
    # megablocks' Megatron-LM (`third_party/Megatron-LM`, shimmed in `exp/` of megablocks).
    "moe-num-experts": "num-experts",
    "moe-top-k": "moe-router-topk",
    "glu": "geglu",
    # DeepSpeed's Megatron-LM with pipelines (DeepSpeedExamples, Megatron-LM-v1.1.5-3D_parallelism).
    "pipe-parallel-size": "pipeline-model-parallel-size",
    "gas": "gradient-accumulation-steps",
    # FlagScale (`flagscale/train/megatron`: `--peft-type lora`).
    "lora-dim": "lora-r",
}
"""Arguments of forks that are known ones under another name."""
_MEGABLOCKS: Final = "moe-num-experts"
SPREAD_EXPERTS: Final = "moe-expert-model-parallelism"


def in_known_names(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Rename the arguments of forks to the names that Megatron-LM has for the same settings."""
    if not any(name in entries for name in _RENAMED):
        return dict(entries)
    known: dict[str, Entry] = {}
    for name, entry in entries.items():
        full_name = _RENAMED.get(name, name)
        # A script with both has a use of its own for the other one.
        known[name if full_name != name and full_name in entries else full_name] = entry
    if _MEGABLOCKS in entries:
        # megablocks sends a token to one expert unless it is told otherwise.
        known.setdefault("moe-router-topk", replace(entries[_MEGABLOCKS], value="1"))
    return known


_CONTEXT_ALGORITHMS: Final = {
    "megatron_cp_algo": "ring",
    "adaptive_cp_algo": "ring",
    "ulysses_cp_algo": "ulysses",
    "kvallgather_cp_algo": "all_gather",
    "hybrid_cp_algo": "ring",
    "hybrid_adaptive_cp_algo": "ring",
}


def _ulysses(arguments: Mapping[str, Any]) -> Fields:
    """Sequence parallelism of Megatron-DeepSpeed, which distributes heads instead of passing keys
    around."""
    degree = WHOLE.read(arguments["ds-sequence-parallel-size"])
    return {"cp": degree, "cp_kind": "ulysses"} if degree > 1 else {}


def _context_algorithm(arguments: Mapping[str, Any]) -> Fields:
    name = arguments["context-parallel-algo"]
    fields: Fields = {"cp_kind": words(_CONTEXT_ALGORITHMS).read(name)}
    if "hybrid" in name and str(arguments.get("context-parallel-size", 1)) != "1":
        fields["note.context"] = f"{name} is predicted as a ring, without its all-to-alls"
    return fields


def _spread_experts(arguments: Mapping[str, Any]) -> Fields:
    """Experts of megablocks, which are spread over the ranks of data parallelism by a switch."""
    if not stated(arguments, SPREAD_EXPERTS) or "num-experts" not in arguments:
        return {}
    return {"ep_most": WHOLE.read(arguments["num-experts"])}


def _no_pipeline(arguments: Mapping[str, Any]) -> Fields:
    return {"pp": 1} if stated(arguments, "no-pipeline-parallel") else {}


def _offloaded_states(arguments: Mapping[str, Any]) -> Fields:
    if stated(arguments, OFFLOADED_WEIGHTS):
        return {"offload_states": "weights"}
    if not (stated(arguments, "cpu-optimizer") or stated(arguments, "optimizer-cpu-offload")):
        return {}
    share = NUMBER.read(arguments.get(_OFFLOADED_SHARE, 1))
    if share == 1:
        return {"offload_states": "optimizer"}
    doubt = (
        f"memory may be wrong: --{_OFFLOADED_SHARE} {share:g} offloads a part of the optimizer states, but "
        "the prediction offloads all"
    )
    return {"offload_states": "optimizer", "doubt.offload": doubt}


_OFFLOADED_SHARE: Final = "optimizer-offload-fraction"
_STAGES: Final = (
    "noop-layers",
    "num-layers",
    "num-layer-list",
    "pipeline-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
)


def _stages(arguments: Mapping[str, Any]) -> Fields:
    """Layers of every stage: MindSpeed lists them, or makes some layers of equal stages idle."""
    pp = WHOLE.read(arguments.get("pipeline-model-parallel-size", 1))
    if "num-layer-list" in arguments and pp > 1:
        sizes = tuple(
            WHOLE_OR_NONE.read(part.strip()) for part in str(arguments["num-layer-list"]).split(",")
        )
        if len(sizes) != pp:
            raise BadValue(
                f"must have a number for each of {pp} stages, got {arguments['num-layer-list']!r}"
            )
        return {"partition": sizes}
    idle = idle_layers(arguments.get("noop-layers"))
    if not idle or "num-layers" not in arguments or pp == 1:
        return {}
    layers = WHOLE.read(arguments["num-layers"])
    layers_per_chunk = WHOLE.read(
        arguments.get("num-layers-per-virtual-pipeline-stage", max(1, layers // pp))
    )
    if layers % (pp * layers_per_chunk):
        raise BadValue(
            f"layers cannot be divided into {pp} stages of {layers_per_chunk}; got {arguments['num-layers']!r}"
        )
    # MindSpeed counts idle layers to make stages of equal length: a model of 61 layers says 64, of
    # which 3 do nothing.
    sizes = [0] * pp
    for layer in range(layers):
        # Stages take their chunks of layers in turn.
        sizes[layer // layers_per_chunk % pp] += layer not in idle
    # Layers per chunk are counted with idle ones, which the model no longer has: chunks are stated
    # instead.
    return {
        "partition": tuple(sizes),
        "vpp": layers // (pp * layers_per_chunk),
        "layers_per_chunk": None,
    }


_LORA: Final = (
    "lora-r",
    "lora-rank",
    "use-lora",
    "lora-alpha",
    "lora-dropout",
    "lora-target-modules",
    "qlora",
)


def _adapters(arguments: Mapping[str, Any]) -> Fields:
    """LoRA of MindSpeed-LLM (`--lora-r`) and of Primus (`use_lora`): all weights except adapters
    are frozen."""
    # Megatron-SWIFT's `--lora-rank` comes with words of its own (`_swift`).
    default_rank = arguments.get("lora-rank", 8) if stated(arguments, "use-lora") else 0
    rank = arguments.get("lora-r", default_rank)
    if not WHOLE_OR_NONE.read(rank):
        if "lora-rank" in arguments and not _is_swift(arguments):
            return {
                "doubt.adapters": (
                    f"the training method may be wrong: --lora-rank {arguments['lora-rank']} is the rank of "
                    "adapters, but training of all weights is predicted"
                )
            }
        return {}
    return Adapters(
        rank=rank,
        targets=arguments.get("lora-target-modules"),
        dropout=arguments.get("lora-dropout"),
        bits=4 if stated(arguments, "qlora") else 0,
    ).fields


_STATE_TYPES: Final = ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")


def _state_types(arguments: Mapping[str, Any]) -> Fields:
    """Element types of gradients and optimizer states (`--use-precision-aware-optimizer` of
    Megatron-Core)."""
    fields: Fields = {}
    if "main-grads-dtype" in arguments:
        fields["grad_dtype"] = words({"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}).read(
            arguments["main-grads-dtype"]
        )
    # Layouts know one element type of optimizer states, fp32.
    narrow = [
        f"--{name} {arguments[name]}"
        for name in _STATE_TYPES[1:]
        if arguments.get(name, "fp32") != "fp32"
    ]
    if narrow:
        fields["doubt.states"] = f"memory may be wrong: {', '.join(narrow)} is predicted as fp32"
    return fields


def _capacity(arguments: Mapping[str, Any]) -> Fields:
    if stated(arguments, "disable-moe-token-dropping"):
        return {}
    return {"expert_capacity_factor": NUMBER.read(arguments["moe-train-capacity-factor"])}


_SWIFT_ONLY: Final = ("max-length", "tuner-type", "train-type", "load-safetensors", "mcore-model")
_SWIFT: Final = (
    *_SWIFT_ONLY,
    "model",
    "load",
    "num-layers",
    "lora-rank",
    "lora-dropout",
    "target-modules",
    "torch-dtype",
    "fp8-format",
    "mtp-num-layers",
    "model-author",
    "model-name",
    "use-distributed-optimizer",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
)


def _is_swift(arguments: Mapping[str, Any]) -> bool:
    # A script that states the sizes of the model starts Megatron itself.
    return "num-layers" not in arguments and any(name in arguments for name in _SWIFT_ONLY)


def _swift(arguments: Mapping[str, Any]) -> Fields:
    """Megatron-SWIFT (`megatron sft`): a model by its identifier, and its own defaults.

    These are bf16, the distributed optimizer, experts whole on their ranks, and training of every
    weight (ms-swift, Megatron-SWIFT Command Line Parameters).
    """
    if not _is_swift(arguments):
        return {}
    fields: Fields = {"dtype": words(_TORCH_TYPES).read(arguments.get("torch-dtype", "bfloat16"))}
    if arguments.get("fp8-format"):
        fields["dtype"] = "fp8"
    if str(arguments.get("mtp-num-layers", 0)) != "0":
        fields["doubt.mtp"] = (
            "the model may be wrong: --mtp-num-layers adds modules for further tokens, which perfmodel leaves out; "
            "give --model with a TOML that has mtp_layers"
        )
    fields["zero"] = 0 if str(arguments.get("use-distributed-optimizer")).lower() == "false" else 1
    if "expert-model-parallel-size" in arguments and "expert-tensor-parallel-size" not in arguments:
        fields["etp"] = 1
    if "max-length" in arguments:
        fields["seq_len"] = WHOLE.read(arguments["max-length"])
    # Converted checkpoints are called after their model, with the ending that Megatron-SWIFT's
    # examples have.
    checkpoint = arguments.get("model", arguments.get("mcore-model", arguments.get("load")))
    if isinstance(checkpoint, str):
        fields["model"] = checkpoint.rstrip("/").removesuffix("-mcore")
    kind = arguments.get("tuner-type", arguments.get("train-type", "full"))
    adapters = Adapters(
        rank=arguments.get("lora-rank", 8),
        targets=arguments.get("target-modules", "all-linear"),
        dropout=arguments.get("lora-dropout"),
    )
    return fields | tuning_fields(kind, "tuner-type", adapters)


_TORCH_TYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

_OBJECTIVES: Final = ("stage", "dpo-beta", "kd", "load-teacher", "export-kd-teacher-load")
"""Arguments that state the purpose of a fork's run (MindSpeed-LLM), and arguments of preference
tuning and distillation (Megatron-DeepSpeed's compression, Megatron-LM's
`examples/post_training`)."""


def _objective(arguments: Mapping[str, Any]) -> Fields:
    fields = method_fields(arguments.get("stage"), "--stage", ("sft", "pretrain", "pt"))
    if fields:
        return fields
    names = [name for name, value in arguments.items() if name != "stage" and value is not False]
    if not names:
        return {}
    return {
        "doubt.stage": (
            f"the training method may be wrong: --{names[0]} belongs to training that runs further models or passes, but "
            "plain training is predicted"
        )
    }


_SLIME_DEVICES: Final = "actor-num-gpus-per-node"
_SLIME: Final = (
    _SLIME_DEVICES,
    "actor-num-nodes",
    "loss-type",
    "rollout-max-response-len",
    "max-tokens-per-gpu",
    "use-dynamic-batch-size",
    "fp16",
    "fp8-format",
)
"""Arguments of slime, which trains on text that it generates, or by plain fine-tuning."""


def _slime(arguments: Mapping[str, Any]) -> Fields:
    """The training half of slime: its devices, its own defaults, and doubts about parts that are
    not predicted."""
    if _SLIME_DEVICES not in arguments:
        return {}
    devices = WHOLE.read(arguments[_SLIME_DEVICES]) * WHOLE.read(
        arguments.get("actor-num-nodes", 1)
    )
    fields: Fields = {"devices": devices, "zero": 1}
    # `_set_default_megatron_args`: the distributed optimizer always, and bf16 unless a script asks
    # for fp16.
    if not arguments.get("fp8-format"):
        fields["dtype"] = "fp16" if stated(arguments, "fp16") else "bf16"
    # Sequences are as long as their data; `--seq-length` is only what positions allow.
    longest = arguments.get("rollout-max-response-len")
    if longest is not None:
        fields["seq_len"] = WHOLE.read(longest)
    lengths = "sequences are as long as the data"
    if stated(arguments, "use-dynamic-batch-size") and "max-tokens-per-gpu" in arguments:
        lengths += f", packed into passes of {WHOLE.read(arguments['max-tokens-per-gpu'])} tokens"
    length_text = (
        "the model's own length" if longest is None else f"--rollout-max-response-len {longest}"
    )
    fields["doubt.lengths"] = (
        f"the batch may be wrong: {lengths}, but {length_text} is predicted; give --seq-len"
    )
    if as_list(arguments.get("loss-type"))[:1] != ["sft_loss"]:
        fields["doubt.stage"] = (
            "the training method may be wrong: text is generated and scored before every step, but only the training step "
            "of the actor is predicted"
        )
    return fields


ABSENT_FILE: Final = "<absent file>"
"""Entry for the name of a missing Primus file."""


def _absent_file(arguments: Mapping[str, Any]) -> Fields:
    return {
        "doubt.file": (
            f"the layout, the precision and memory may be wrong: {arguments[ABSENT_FILE]} was "
            "not found in the script's folder; the model is taken from its name, and the rest "
            "from flags and Primus's own defaults"
        )
    }


_REPEATED: Final[Mapping[str, tuple[RecomputeModule, ...]]] = {
    "recompute-activation-function": ("mlp_act", "moe_act"),
    "recompute-norm": ("layernorm",),
}
"""Switches of MindSpeed for recomputation (`mindspeed/features_manager/recompute`), with the
modules that each repeats."""
_REPEATED_LAYERS: Final = tuple(f"{name}-num-layers" for name in _REPEATED)


def _repeated_modules(arguments: Mapping[str, Any]) -> Fields:
    """Recomputation of activation functions and norms, which MindSpeed switches on one by one."""
    switches = [name for name in _REPEATED if stated(arguments, name)]
    if not switches:
        return {}
    named = " and ".join(f"--{name}" for name in switches)
    if "recompute-granularity" in arguments:
        return {
            "doubt.recompute": (
                f"memory may be wrong: {named} may repeat more than the other recomputation does, and "
                "nothing more is predicted"
            )
        }
    modules: list[RecomputeModule] = []
    for name in switches:
        modules += _REPEATED[name]
    fields: Fields = {"recompute": "selective", "recompute_modules": tuple(modules)}
    if any(name in arguments for name in _REPEATED_LAYERS):
        fields["doubt.recompute"] = (
            f"memory may be wrong: {named} is for some layers, but the prediction recomputes those modules in all"
        )
    return fields


FORKS: Final = (
    Rule(
        keys=(*_REPEATED, *_REPEATED_LAYERS, "recompute-granularity"),
        read=_repeated_modules,
        fields=("recompute",),
    ),
    Rule(keys=(ABSENT_FILE,), read=_absent_file),
    Rule(keys=_SLIME, read=_slime, fields=("devices",)),
    Rule(keys=("ds-sequence-parallel-size",), read=_ulysses, fields=("cp",)),
    Rule(
        keys=("context-parallel-algo", "context-parallel-size"),
        fields=("cp_kind",),
        read=lambda arguments: (
            _context_algorithm(arguments) if "context-parallel-algo" in arguments else {}
        ),
    ),
    read_only("moe-expert-parallel-size", "ep_most"),
    Rule(keys=(SPREAD_EXPERTS, "num-experts"), read=_spread_experts, fields=("ep_most",)),
    # MindSpeed: experts spread over ranks of tensor parallelism instead of being cut by them.
    Rule(
        keys=("moe-tp-extend-ep",),
        fields=("etp",),
        read=lambda arguments: {"etp": 1} if stated(arguments, "moe-tp-extend-ep") else {},
    ),
    Rule(keys=("no-pipeline-parallel",), read=_no_pipeline, fields=("pp",)),
    Rule(
        keys=("cpu-optimizer", "optimizer-cpu-offload", OFFLOADED_WEIGHTS, _OFFLOADED_SHARE),
        read=_offloaded_states,
        fields=("offload_states",),
    ),
    Rule(keys=_STAGES, read=_stages, fields=("partition",)),
    read_only("schedules-method", "schedule", words({"dualpipev": "dualpipe-v"})),
    # FlagScale's Megatron-LM.
    read_only("use-dualpipev", "schedule", words({True: "dualpipe-v"})),
    Rule(
        keys=(*_LORA, *_SWIFT_ONLY, "num-layers"),
        read=lambda arguments: _adapters(arguments) if set(arguments) & set(_LORA) else {},
        fields=("adapter_rank",),
    ),
    Rule(keys=_SWIFT, read=_swift, fields=("model",), optional=("model", "load", "mcore-model")),
    Rule(keys=_OBJECTIVES, read=_objective),
    Rule(keys=_STATE_TYPES, read=_state_types, fields=("grad_dtype",)),
    Rule(
        keys=("moe-train-capacity-factor", "disable-moe-token-dropping"),
        fields=("expert_capacity_factor",),
        read=lambda arguments: (
            _capacity(arguments) if "moe-train-capacity-factor" in arguments else {}
        ),
    ),
)
"""Rules of arguments of forks, read and never written."""
