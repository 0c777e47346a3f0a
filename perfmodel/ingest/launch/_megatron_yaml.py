"""Megatron's arguments written as a table of YAML or JSON instead of a command line.

Megatron-LM's own test cases (`MODEL_ARGS`), its `--yaml-cfg`, Primus (`overrides`), FlagScale (`system`, `model`) and
GPT-NeoX write them so. Their keys become the entries that a command line gives, and Megatron's table reads those.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from perfmodel.ingest.launch._arguments import FEWEST, LAUNCHING
from perfmodel.ingest.launch._entries import Entries, Entry, Source
from perfmodel.ingest.launch._megatron import MEGATRON
from perfmodel.ingest.launch._megatron_model import NAMED_MODEL
from perfmodel.ingest.launch._model import catalog_model

_ARGUMENTS: Final = frozenset(chain.from_iterable(rule.keys for rule in MEGATRON.table)) - set(LAUNCHING)
_MARKS: Final = tuple(name for name in MEGATRON.marks if name != "num-attention-heads")
"""Arguments of which a table of Megatron's has one; heads stand in every configuration of a model."""
_TABLES: Final = (r"(.*\.)?MODEL_ARGS(_\d+)?\.", r"(.*\.)?overrides\.")
"""Beginnings of keys (patterns) that hold arguments and nothing else; a file without them holds them everywhere."""
_ELSEWHERE: Final = ("experiment", "action", "ENV_VARS", "hydra")
"""Tables of a file of arguments that hold none but those of the launcher."""
_WITH_DEFAULT: Final = re.compile(r"\$\{([A-Za-z_]\w*):-?([^${}]*)\}")
"""A variable of the environment and the value where it is not set, as Primus writes it."""
_OPPOSITES: Final = {
    "add-bias-linear": "disable-bias-linear",
    "add-position-embedding": "no-position-embedding",
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
}
"""Names under which Megatron's parser keeps a switch turned off, and the switch."""
_SYNONYMS: Final = {
    "fp8": "fp8-format",
    "num-moe-experts": "num-experts",
    "rotary-pos-emb": "use-rotary-position-embeddings",
}
"""Names of Megatron-Core's configuration, and the argument for each."""


def megatron_arguments(source: Source) -> Source | None:
    """The entries of a file as a command line of Megatron would give them; None of a file that holds no arguments."""
    table, notes = _table_of(source.entries)
    stated: dict[str, Entry] = {}
    for key, entry in source.entries.items():
        name = _argument_name(key.rpartition(".")[2])
        if key.startswith(table) and (key.partition(".")[0] not in _ELSEWHERE or name in LAUNCHING):
            stated[name] = replace(entry, value=_value_of(entry.value))
    # Any YAML may have a key or two of these names (`seq-length`, `lr`):
    # several must be Megatron's, one of them its own.
    known = _ARGUMENTS & set(stated)
    is_primus = table.endswith("overrides.") and _primus_framework(source.entries) == "megatron"
    if not is_primus and (len(known) < FEWEST or not known & set(_MARKS)):
        return None
    if table.endswith("overrides."):
        stated = _of_primus(source.entries, table) | stated
    return replace(source, entries=_as_switches(stated), notes=(*source.notes, *notes))


_OVERRIDES: Final = re.compile(r"modules\.\w+\.overrides\.")
_FRAMEWORK: Final = re.compile(r"modules\.\w+\.framework")


def _primus_framework(entries: Entries) -> str:
    """The framework on which a file of Primus trains; empty of another file."""
    for key, entry in entries.items():
        if _FRAMEWORK.fullmatch(key):
            return str(entry.value)
    return ""


def primus_torchtitan(source: Source) -> Source | None:
    """The settings that a file of Primus gives to torchtitan; None of another file."""
    if _primus_framework(source.entries) != "torchtitan":
        return None
    stated: dict[str, Entry] = {}
    model = None
    for key, entry in source.entries.items():
        table = _OVERRIDES.match(key)
        if table:
            stated[key.removeprefix(table[0])] = replace(entry, value=_value_of(entry.value))
        elif re.fullmatch(r"modules\.\w+\.model", key):
            name = str(_value_of(entry.value)).removesuffix(".yaml")
            # Its files of models are named after their precision too: `llama3.1_8B-fp8`.
            model = catalog_model(name) or catalog_model(name.rpartition("-")[0])
    return replace(source, entries=stated, model=source.model or model)


def neox_arguments(source: Source) -> Source | None:
    """The entries of a file of GPT-NeoX as a command line of Megatron-DeepSpeed would give them; None of another."""
    return replace(source, entries=_of_neox(source.entries)) if _is_neox(source.entries) else None


def _table_of(entries: Entries) -> tuple[str, list[str]]:
    """The table of arguments that is read, as the beginning of its keys, and a note where there are several."""
    for pattern in _TABLES:
        matches = (re.match(pattern, key) for key in entries)
        tables = list(dict.fromkeys(match[0] for match in matches if match))
        if len(tables) > 1:
            return tables[0], [f"of {len(tables)} tables of arguments {tables[0].rstrip('.')} is read"]
        if tables:
            return tables[0], []
    return "", []


def _argument_name(key: str) -> str:
    """A key as an argument is named: `--num_layers`, `num_layers` and `num-layers` are the same."""
    name = key.removeprefix("--").replace("_", "-")
    return _SYNONYMS.get(name, name)


def _value_of(value: Any) -> Any:
    """A value with the variables of the environment that have a default replaced, and words as YAML reads them."""
    if not isinstance(value, str):
        return value
    # Then as YAML would have read it, had no variable stood there.
    text = _WITH_DEFAULT.sub(lambda match: os.environ.get(match[1], match[2]), value)
    known = {"true": True, "false": False, "null": None, "none": None, "": None}
    return known.get(text.lower(), text)


def _as_switches(stated: Mapping[str, Entry]) -> dict[str, Entry]:
    """Arguments of a command line: a switch that is off is not on it."""
    arguments: dict[str, Entry] = {}
    for name, entry in stated.items():
        if name in _OPPOSITES:
            name, entry = _OPPOSITES[name], replace(entry, value=entry.value is False)
        # Megatron-Core's configuration has functions where the command line has a switch for each gate.
        if name == "activation-func" and entry.value in ("swiglu", "geglu"):
            name, entry = str(entry.value), replace(entry, value=True)
        if entry.value is not False and entry.value is not None:
            arguments[name] = entry
    return arguments


def _of_primus(entries: Entries, table: str) -> dict[str, Entry]:
    """What a file of Primus says beside its overrides, and what its own trainer sets without being asked
    (`primus/configs/modules/megatron/trainer_base.yaml`): 16 bits, and sequences of 4,096 tokens."""
    stated = {"bf16": Entry(True, 0), "seq-length": Entry(4096, 0)}
    model = entries.get(f"{table.removesuffix('overrides.')}model")
    overridden = {key.removeprefix(table): entry for key, entry in entries.items() if key.startswith(table)}
    if model is None or "hidden_size" in overridden:
        return stated
    stated[NAMED_MODEL] = replace(model, value=str(_value_of(model.value)).removesuffix(".yaml"))
    # What is overridden of the model that is named would be lost beside its name.
    for name in _OF_MODELS & set(overridden):
        entry = overridden[name]
        # Under a name that no rule knows it is reported as unread, and its words make it one about the model.
        stated[f"{name.replace('_', '-')}-of-the-named-model"] = replace(entry, value=str(entry.value))
    return stated


_OF_MODELS: Final = {
    "num_layers",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "qk_layernorm",
    "mtp_num_layers",
    "swiglu",
}
"""Overrides that change a model which is named."""


_NEOX_ONLY: Final = ("pipe-parallel-size", "no-weight-tying", "pos-emb", "gpt-j-residual", "attention-config")
_NEOX_NAMES: Final = {
    "pipe-parallel-size": "pipeline-model-parallel-size",
    "train-micro-batch-size-per-gpu": "micro-batch-size",
    "train-batch-size": "global-batch-size",
    "gas": "gradient-accumulation-steps",
    "zero-optimization.stage": "zero-stage",
    "optimizer.type": "optimizer",
    "no-weight-tying": "untie-embeddings-and-output-weights",
    "pos-emb": "position-embedding-type",
    "intermediate-size": "ffn-hidden-size",
    "num-kv-heads": "num-key-value-heads",
    "moe-num-experts": "num-experts",
    "moe-top-k": "moe-router-topk",
    "partition-activations": "distribute-saved-activations",
}
"""Keys of GPT-NeoX (`configs/neox_arguments.md`) and the arguments of Megatron-DeepSpeed for them."""
_NEOX_NORMS: Final = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "te_rmsnorm": "RMSNorm",
    "te_layernorm": "LayerNorm",
}
_NEOX_POSITIONS: Final = {"sinusoidal": "none", "rpe": "relative"}
_NEOX_GATES: Final = ("swiglu", "geglu", "reglu")
_NEOX_HARMLESS: Final = (
    "zero-optimization.",
    "optimizer.params.",
    "fp16.",
    "bf16.",
    "scheduler.",
    "activation",
    "mlp-type",
    "norm",
    "precision",
    "attention-config",
    "gpt-j-residual",
    "init-method",
    "output-layer-init-method",
    "steps-per-print",
    "wall-clock-breakdown",
    "rotary-pct",
    "rotary-emb-base",
    "scaled-",
    "data-types.",
    "checkpoint-num-layers",
    "synchronize-each-layer",
    "distribute-saved-activations",
    "gradient-clipping",
    "zero-allow-untested-optimizer",
    "keep-last-n-checkpoints",
    "checkpoint-factor",
    "checkpoint-scale",
    "extra-save-iters",
    "checkpoint.",
    "output-layer-parallelism",
)
"""Beginnings of keys that say nothing of time or memory, or that are read here."""


def _is_neox(entries: Entries) -> bool:
    """Whether a file is of GPT-NeoX: its model beside DeepSpeed's keys, or words that only it has."""
    names = {_argument_name(key.partition(".")[0]) for key in entries}
    if "num-layers" not in names:
        return False
    return bool(names & set(_NEOX_ONLY)) or bool(names & {"train-micro-batch-size-per-gpu", "zero-optimization"})


def _of_neox(entries: Entries) -> dict[str, Entry]:
    """The entries of a file of GPT-NeoX as arguments of Megatron-DeepSpeed."""
    # GPT-NeoX is Megatron on DeepSpeed under other names. Names are translated first, then settings whose values mean
    # something else than in Megatron.
    stated = {key.replace("_", "-"): replace(entry, value=_value_of(entry.value)) for key, entry in entries.items()}
    lines = {name: entry.line for name, entry in stated.items()}
    values = {name: entry.value for name, entry in stated.items()}
    arguments: dict[str, Entry] = {"deepspeed": Entry(True, 0)}
    for name, entry in stated.items():
        if name.startswith(_NEOX_HARMLESS) and name not in _NEOX_NAMES:
            continue
        arguments[_NEOX_NAMES.get(name, name)] = entry

    def say(name: str, value: Any, because: str) -> None:
        arguments[name] = Entry(value, lines.get(because, 0))

    # A pipeline of no stages is none; a model without any runs outside of DeepSpeed's pipeline engine.
    if values.get("pipe-parallel-size") == 0:
        say("pipeline-model-parallel-size", 1, "pipe-parallel-size")
    precision = str(values.get("precision", "")).lower()
    # NeoX says the precision in a word of its own, or leaves it to DeepSpeed's tables.
    if precision in ("bfloat16", "bf16") or values.get("bf16.enabled") is True:
        say("bf16", True, "precision")
    elif precision in ("fp16", "half") or values.get("fp16.enabled") is True:
        half = "bf16" if values.get("fp16.type") == "bfloat16" else "fp16"
        say(half, True, "fp16.enabled")
    if "norm" in values:
        say("normalization", _NEOX_NORMS.get(values["norm"], values["norm"]), "norm")
    position = values.get("pos-emb")
    if position in _NEOX_POSITIONS:
        say("position-embedding-type", _NEOX_POSITIONS[position], "pos-emb")
    # `[[["flash"], 32]]`: kinds of attention and on how many layers; one that is fused speaks for all.
    if any("flash" in str(part) for part in _flattened(values.get("attention-config"))):
        say("use-flash-attn", True, "attention-config")
    # Attention and feed-forward side by side, on one norm where they share it (`gpt_j_tied`).
    if values.get("gpt-j-residual") is True:
        tied = values.get("gpt-j-tied") is True
        say("parallel-blocks", "one_norm" if tied else "two_norms", "gpt-j-residual")
    if values.get("zero-optimization.cpu-offload") is True or "zero-optimization.offload-optimizer.device" in values:
        say("cpu-optimizer", True, "zero-optimization.cpu-offload")
    _add_gate(values, say)
    return _as_switches(arguments)


def _add_gate(values: Mapping[str, Any], say: Callable[[str, Any, str], None]) -> None:
    """The feed-forward of LLaMA: a gate, and two thirds of the size rounded up (`megatron/model/transformer.py`)."""
    activation = str(values.get("activation", "")).lower()
    gate = "swiglu" if values.get("mlp-type") == "llama" else activation
    if gate not in _NEOX_GATES:
        return
    if gate == "reglu":
        say("glu-activation", "reglu", "activation")
    else:
        say(gate, True, "activation")
    hidden = values.get("hidden-size")
    if "intermediate-size" not in values and isinstance(hidden, int):
        say("ffn-hidden-size", -(-int(2 * hidden * 4 / 3) // 256) * 256, "activation")


def _flattened(value: Any) -> list[Any]:
    """The values in lists of lists."""
    if not isinstance(value, list):
        return [value]
    parts: list[Any] = []
    for part in value:
        parts += _flattened(part)
    return parts
