"""Rules for settings of Megatron-Core, whether they are arguments or keys of a configuration."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._table import (
    MANY,
    NUMBER,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    Values,
    key,
    words,
)
from perfmodel.spec import RecomputeModule

SHARDING: Final = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO stages by the names of `--data-parallel-sharding-strategy`."""

LIMITS: Final = {
    "partition": (
        "the stages between the first and the last must have equal numbers of layers, and the file must state the model"
    ),
    "recompute_full_layers": (
        "Megatron recomputes the same number of layers in every stage, and nothing else selectively"
    ),
}
"""Reasons why Megatron-Core cannot run some settings of a layout in any notation."""


def zero_of(sharded: bool, distributed: bool, strategy: str | None) -> Fields:
    """ZeRO stage of Megatron's data parallelism: 1 for the distributed optimizer; Megatron-FSDP
    states its own."""
    if sharded:
        name = strategy or "optim_grads_params"
        if name not in SHARDING:
            raise BadValue(f"must be one of {', '.join(SHARDING)}; got {name!r}")
        return {"zero": SHARDING[name]}
    return {"zero": 1 if distributed else 0}


def strategy_of_zero(stage: int) -> str:
    """The `--data-parallel-sharding-strategy` of a ZeRO stage."""
    return next(name for name, of_stage in SHARDING.items() if of_stage == stage)


def require_no_pipeline(fields: Fields) -> None:
    """Refuse sharded gradients and weights with a pipeline.

    A stage keeps both for all micro-batches, so that Megatron's FSDP has no pipeline.
    """
    if fields["zero"] >= 2 and fields["pp"] > 1:
        raise LaunchFileError(
            f"zero={fields['zero']} with pp={fields['pp']}: Megatron shards gradients and weights "
            "only without a pipeline; use zero=1 or pp=1"
        )


def recompute_of(granularity: Any, method: Any, layers: Any) -> Fields:
    """Recomputation by Megatron's three settings: `block` recomputes that many layers of every
    stage in full."""
    if granularity in (None, "none"):
        return {"recompute": "none"}
    if granularity == "selective":
        return {"recompute": "selective"}
    if granularity != "full":
        raise BadValue(f"must be full or selective, got {granularity!r}")
    # Only the first so many layers of a stage are recomputed; the rest keep all their activations,
    # which is a layout's recompute=none.
    if method == "block":
        return {"recompute": "none", "recompute_full_layers": (WHOLE_OR_NONE.read(layers),)}
    return {"recompute": "full"}


_MODULES: Final = tuple(module for module in get_args(RecomputeModule) if module != "mlp_act")
"""Modules that Megatron-Core can recompute."""


def modules_rule(name: str, joined: Callable[[Sequence[str]], Any]) -> Rule:
    """The rule for the modules that selective recomputation repeats, if they are more than core
    attention.

    Args:
        joined: several modules as one value of the file.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        value = settings[name]
        # In a table of arguments several words stand in one text, with brackets or without:
        # `"[layernorm mlp]"`.
        modules = (
            value if isinstance(value, list) else str(value).strip("[]").replace(",", " ").split()
        )
        unknown = [module for module in modules if module not in _MODULES]
        if unknown:
            raise BadValue(
                f"has no modules {', '.join(map(str, unknown))}; there are {', '.join(_MODULES)}; got {value!r}"
            )
        return {"recompute_modules": tuple(modules)}

    def write(fields: Fields) -> Mapping[str, Any]:
        modules = tuple(
            module for module in fields.get("recompute_modules", ()) if module in _MODULES
        )
        # The core of attention alone is Megatron's default, and needs no words.
        is_default = fields["recompute"] == "selective" and modules not in ((), ("core_attn",))
        return {name: joined(modules) if is_default else None}

    return Rule(keys=(name,), read=read, write=write)


class RecomputeSettings(NamedTuple):
    """Megatron's three settings of recomputation; None for one that is left out."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None


def recompute_settings(fields: Fields) -> RecomputeSettings:
    """Megatron's settings for a layout's recomputation; reading them back shows what they cannot
    express."""
    # `uniform` with groups of one layer keeps each layer's input, as full recompute means here.
    full_layers = fields.get("recompute_full_layers")
    if fields["recompute"] == "full":
        return RecomputeSettings("full", "uniform", 1)
    if full_layers and len(set(full_layers)) == 1 and full_layers[0] > 0:
        return RecomputeSettings("full", "block", full_layers[0])
    if fields["recompute"] == "selective":
        return RecomputeSettings("selective")
    return RecomputeSettings()


def chunk_settings(fields: Fields) -> tuple[int | None, int | None]:
    """Layers per virtual stage if they divide evenly, else virtual stages per rank; empty without
    virtual stages."""
    if fields["vpp"] == 1:
        return None, None
    layers = fields.get("model.layers", 0)
    # Both notations mean the same; Megatron takes only the second where layers do not divide.
    if layers and layers % (fields["pp"] * fields["vpp"]) == 0:
        return layers // (fields["pp"] * fields["vpp"]), None
    return None, fields["vpp"]


def nodes_of(fields: Fields) -> tuple[int, int]:
    """Number of nodes and devices per node; a single node if the devices do not fill whole
    nodes."""
    devices, per_node = fields["devices"], fields["devices_per_node"]
    per_node = per_node if devices % per_node == 0 else devices
    return devices // per_node, per_node


def partition_rule(ends: tuple[str, str], layers: str, stages: str) -> Rule:
    """The rule for the layers of each stage when the first and last are set and the others share
    the rest.

    Args:
        ends: keys of the layers of the first and of the last stage.
        layers: key of the model's layers.
        stages: key of the pipeline's stages.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        pp = WHOLE.read(settings.get(stages, 1))
        if not any(name in settings for name in ends) or layers not in settings or pp < 2:
            return {}
        stated = [WHOLE_OR_NONE.read(settings[name]) if name in settings else None for name in ends]
        all_layers = WHOLE.read(settings[layers])
        # A first or last stage without a stated number shares the remaining layers with the inner
        # stages.
        equal_stages = stated.count(None) + pp - 2
        remaining_layers = all_layers - sum(number or 0 for number in stated)
        if (
            remaining_layers < 0
            or (equal_stages and remaining_layers % equal_stages)
            or (not equal_stages and remaining_layers)
        ):
            raise BadValue(
                f"leaves {remaining_layers} of {all_layers} layers to {equal_stages} stages, and {remaining_layers} is "
                f"not a multiple of {equal_stages}"
            )
        layers_per_stage = remaining_layers // equal_stages if equal_stages else 0
        first, last = (layers_per_stage if number is None else number for number in stated)
        return {"partition": (first, *[layers_per_stage] * (pp - 2), last)}

    def write(fields: Fields) -> Mapping[str, Any]:
        # Only the two ends can differ, and all stages between must be equal.
        cut = list(fields.get("partition") or ()) if "model.layers" in fields else []
        is_default = len(cut) == fields["pp"] >= 2 and len(set(cut[1:-1])) <= 1
        return {ends[0]: cut[0], ends[1]: cut[-1]} if is_default else {}

    return Rule(keys=(*ends, layers, stages), read=read, write=write)


_METHOD: Final = "pp-partition-method"


def _stages_of_method(settings: Mapping[str, Any]) -> Fields:
    """Stages cut by DeepSpeed's rule for Megatron-DeepSpeed, such as `type:transformer|embedding`
    (`PipelineModule._partition_layers`)."""
    pp = WHOLE.read(settings.get("pipeline-model-parallel-size", 1))
    if _METHOD not in settings or "num-layers" not in settings or pp < 2:
        return {}
    method = str(settings[_METHOD]).strip("'\"").lower()
    layers = WHOLE.read(settings["num-layers"])
    if method == "type:transformer" and layers % pp == 0:
        return {}
    # Embeddings at both ends of the model count as a layer each.
    if method == "type:transformer|embedding" and (layers + 2) % pp == 0:
        per_stage = (layers + 2) // pp
        return {"partition": (per_stage - 1, *[per_stage] * (pp - 2), per_stage - 1)}
    return {
        "doubt.partition": f"the layout may be wrong: --{_METHOD} {method} cuts {layers} layers into {pp} stages "
        "that perfmodel does not work out; --layout partition=... sets them"
    }


METHOD_RULE: Final = Rule(
    keys=(_METHOD, "num-layers", "pipeline-model-parallel-size"), read=_stages_of_method
)

_REPEATED: Final = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([A-Za-z])\*(\d+)")
"""A group or letter of a pipeline's layout, with its number of repetitions."""
_LONGEST_LAYOUT: Final = 100_000
"""Most letters of a pipeline's layout."""


def pipeline_segments(layout: str) -> list[int]:
    """Layers of each virtual stage of a pipeline, in the order of the forward pass.

    A layout such as `Et*3|(tt|)*6mL` has a letter for each layer (`t`), for the embedding (`E`),
    the head (`L`) and modules of further tokens (`m`), and a bar between virtual stages
    (`megatron/core/transformer/ pipeline_parallel_layer_layout.py`).
    """

    def repeated(match: re.Match[str]) -> str:
        group, times, letter, letter_times = match.groups()
        text, count = (letter, letter_times) if letter else (group, times or "1")
        if len(text) * int(count) > _LONGEST_LAYOUT:
            raise BadValue(f"names more than {_LONGEST_LAYOUT:,} layers, got {layout!r}")
        return text * int(count)

    # Quotes and backslashes are left over from shells.
    text = re.sub(r"[\\\s'\",]", "", layout)
    while _REPEATED.search(text):
        text = _REPEATED.sub(repeated, text)
        if len(text) > _LONGEST_LAYOUT:
            raise BadValue(f"names more than {_LONGEST_LAYOUT:,} layers, got {layout!r}")
    if not re.fullmatch(r"[EtmL|]+", text):
        raise BadValue(f"must be a layout such as Et*3|(tt|)*6L, got {layout!r}")
    return [segment.count("t") for segment in text.split("|")]


def pipeline_layout_rule(name: str, stages: str) -> Rule:
    """The rule for the layers of each stage in a pipeline layout string; virtual stages are dealt
    to the stages in turn.

    Args:
        name: key of the layout.
        stages: key of the pipeline's stages.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        value = settings.get(name)
        if not isinstance(value, str):
            return {}
        pp = WHOLE.read(settings.get(stages, 1))
        segments = pipeline_segments(value)
        if len(segments) % pp:
            raise BadValue(
                f"has {len(segments)} virtual stages, which is not a multiple of {pp} stages, got {value!r}"
            )
        if pp == 1:
            return {}
        per_stage = tuple(sum(segments[stage::pp]) for stage in range(pp))
        return {"partition": per_stage, "vpp": len(segments) // pp, "layers_per_chunk": None}

    return Rule(keys=(name, stages), read=read, fields=("partition",))


def mixture_rules(name: Callable[[str], str], count: str) -> tuple[Rule, ...]:
    """Experts and their router (`megatron/core/transformer/transformer_config.py`, `moe_*`).

    Args:
        name: key of a field of Megatron-Core's configuration.
        count: field of the number of experts, whose name differs in the command-line arguments.
    """
    return (
        key(name(count), "experts.count"),
        key(name("moe_router_topk"), "experts.topk"),
        key(name("moe_router_num_groups"), "experts.groups", MANY),
        key(name("moe_router_group_topk"), "experts.groups_kept", MANY),
        key(name("moe_ffn_hidden_size"), "experts.ffn_hidden"),
        key(
            name("moe_shared_expert_intermediate_size"), "experts.shared_ffn_hidden", WHOLE_OR_NONE
        ),
    )


def latent_rules(name: Callable[[str], str]) -> tuple[Rule, ...]:
    """Multi-head latent attention, by keys of Megatron-Core's `MLATransformerConfig`."""
    return (
        key(name("q_lora_rank"), "latent.q_lora_rank", WHOLE_OR_NONE),
        key(name("kv_lora_rank"), "latent.kv_lora_rank"),
        key(name("qk_head_dim"), "latent.qk_nope_head_dim"),
        key(name("qk_pos_emb_head_dim"), "latent.qk_rope_head_dim"),
        key(name("v_head_dim"), "latent.v_head_dim"),
    )


def offloaded_layers_rule(name: Callable[[str], str], switch: bool) -> Rule:
    """Layers whose activations Transformer Engine copies to the host
    (megatron/core/model_parallel_config.py, `cpu_offloading_num_layers`).

    Args:
        name: key of a field of Megatron-Core's configuration.
        switch: whether a key of its own (`cpu_offloading`) turns it on; of an argument its number
            does.
    """
    switched_on = name("cpu_offloading")
    layers = name("cpu_offloading_num_layers")
    activations = name("cpu_offloading_activations")
    weights = name("cpu_offloading_weights")

    def read(settings: Mapping[str, Any]) -> Fields:
        if settings.get(weights) and (not switch or settings.get(switched_on)):
            raise BadValue(
                "also offloads weights, which perfmodel cannot predict; turn it off to offload activations alone"
            )
        # A configuration keeps the number of layers also where the switch is off.
        off = (switch and not settings.get(switched_on)) or settings.get(activations) is False
        return {"offload_layers": 0 if off else WHOLE_OR_NONE.read(settings.get(layers, 0))}

    def write(fields: Fields) -> Mapping[str, Any]:
        n = fields.get("offload_layers") or None
        return {layers: n} | ({switched_on: True, weights: False} if switch and n else {})

    keys = (switched_on, layers, activations, weights) if switch else (layers, activations, weights)
    return Rule(keys=keys, read=read, write=write)


def dropout_rule(*names: str) -> Rule:
    """The rule for dropout, which is on or off for the whole model."""
    return Rule(
        keys=names,
        read=lambda settings: {
            "model.dropout": any(NUMBER.read(value) > 0 for value in settings.values())
        },
        write=lambda fields: {} if fields.get("model.dropout", True) else dict.fromkeys(names, 0.0),
    )


def recompute_rule(names: tuple[str, str, str]) -> Rule:
    """The rule for the granularity, method and number of layers of recomputation."""
    return Rule(
        keys=names,
        read=lambda settings: recompute_of(*(settings.get(name) for name in names)),
        write=lambda fields: dict(zip(names, recompute_settings(fields), strict=True)),
    )


_CONTEXT: Final = words(
    {"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "ulysses"}
)


def context_rule(name: str) -> Rule:
    """The rule for how Transformer Engine exchanges keys and values; by default around a ring."""
    return key(
        name,
        "cp_kind",
        Values(_CONTEXT.read, lambda kind: None if kind == "ring" else _CONTEXT.write(kind)),
    )


def graph_rule(name: Callable[[str], str]) -> Rule:
    """The rule for CUDA graphs: none, one per layer, or one of the whole step.

    Megatron-Core captures layers itself (`enable_cuda_graph`, later `cuda_graph_impl` local) or
    leaves it to Transformer Engine (`external_cuda_graph`); the scope asks for the whole step.
    Graphs of parts of layers are taken as none (`megatron/core/transformer/transformer_config.py`
    of 0.12 and 0.15).

    Args:
        name: key of a field of Megatron-Core's configuration.
    """
    core = name("enable_cuda_graph")
    external = name("external_cuda_graph")
    kind = name("cuda_graph_impl")
    scope = name("cuda_graph_scope")

    def read(settings: Mapping[str, Any]) -> Fields:
        # The two switches are older than `cuda_graph_impl`, and files of both generations are
        # about.
        on = any(str(settings.get(flag)).lower() == "true" for flag in (core, external))
        if not on and str(settings.get(kind, "none")).lower() == "none":
            return {"cuda_graphs": "none"}
        named = {str(part) for part in as_list(settings.get(scope) or "full")}
        if "full_iteration" in named:
            return {"cuda_graphs": "step"}
        if "full" in named:
            return {"cuda_graphs": "layers"}
        return {
            "cuda_graphs": "none",
            "note.cuda_graphs": f"CUDA graphs for {', '.join(sorted(named))} are not modelled",
        }

    def write(fields: Fields) -> Mapping[str, Any]:
        graphs = fields.get("cuda_graphs", "none")
        if graphs == "none":
            return {}
        return {kind: "local", scope: "full_iteration" if graphs == "step" else None}

    return Rule(keys=(core, external, kind, scope), read=read, write=write)


def dispatch_rules(name: Callable[[str], str]) -> tuple[Rule, ...]:
    """Rules of the dispatch of tokens to experts
    (`megatron/core/transformer/transformer_config.py`, `moe_*`).

    Args:
        name: key of a field of Megatron-Core's configuration.
    """
    kind = name("moe_token_dispatcher_type")
    deepep = name("moe_enable_deepep")
    backend = name("moe_flex_dispatcher_backend")
    factor = name("moe_expert_capacity_factor")
    padded = name("moe_pad_expert_input_to_capacity")
    backends = words({"deepep": "deepep", "hybridep": "hybridep"})

    def read(settings: Mapping[str, Any]) -> Fields:
        # DeepEP is a backend of the flex dispatcher and ignored with others.
        if settings.get(kind, "flex") == "flex" and (settings.get(backend) or settings.get(deepep)):
            return {"expert_dispatcher": backends.read(settings.get(backend) or "deepep")}
        return {"expert_dispatcher": "alltoall"} if settings.get(kind) == "alltoall" else {}

    def write(fields: Fields) -> Mapping[str, Any]:
        dispatcher = fields.get("expert_dispatcher", "alltoall")
        if dispatcher == "alltoall":
            return {kind: dispatcher if fields.get("experts.count") else None}
        return {kind: "flex", backend: dispatcher}

    def read_capacity(settings: Mapping[str, Any]) -> Fields:
        # Without padding a capacity only drops tokens above it, and the sizes are those of the
        # routing.
        holds = settings.get(padded) in (True, "true", "True") and factor in settings
        return {"expert_capacity_factor": NUMBER.read(settings[factor])} if holds else {}

    def write_capacity(fields: Fields) -> Mapping[str, Any]:
        value = fields.get("expert_capacity_factor")
        return {factor: value, padded: None if value is None else True}

    return (
        Rule(keys=(kind, deepep, backend), read=read, write=write),
        Rule(keys=(factor, padded), read=read_capacity, write=write_capacity),
    )
