"""Megatron's arguments in YAML or JSON files instead of on a command line.

Megatron-LM's own test cases (`MODEL_ARGS`), its `--yaml-cfg`, Primus (`overrides`) and FlagScale
(`system`, `model`) write them so. Their keys become the entries that a command line
gives, and Megatron's table reads those.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from perfmodel.ingest.launch._arguments import FEWEST, LAUNCHING, SCRIPT
from perfmodel.ingest.launch._entries import Entries, Entry, Source
from perfmodel.ingest.launch._harm import is_harmless
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY
from perfmodel.ingest.launch._megatron import MEGATRON
from perfmodel.ingest.launch._megatron_model import NAMED_MODEL
from perfmodel.ingest.launch._model import catalog_model
from perfmodel.spec import Model, Transformer

_ARGUMENTS: Final = frozenset(chain.from_iterable(rule.keys for rule in MEGATRON.table)) - set(
    LAUNCHING
)
_MARKS: Final = tuple(name for name in MEGATRON.marks if name != "num-attention-heads")
"""Arguments of which every table of Megatron arguments has one; heads alone occur in every model's
configuration."""
_TABLES: Final = (r"(.*\.)?MODEL_ARGS(_\d+)?\.", r"(.*\.)?overrides\.")
"""Prefixes of keys (patterns) that hold only arguments; a file without them may have arguments
anywhere."""
_ELSEWHERE: Final = ("experiment", "action", "ENV_VARS", "hydra")
"""Tables of a file of arguments that hold only launcher arguments."""
_WITH_DEFAULT: Final = re.compile(r"\$\{([A-Za-z_]\w*):-?([^${}]*)\}")
"""An environment variable with its default value, in the notation of Primus."""
_OPPOSITES: Final = {
    "add-bias-linear": "disable-bias-linear",
    "add-position-embedding": "no-position-embedding",
    "share-embeddings-and-output-weights": "untie-embeddings-and-output-weights",
}
"""Names that Megatron's parser uses for switches that turn something off, with the switch."""
_SYNONYMS: Final = {
    "fp8": "fp8-format",
    "num-moe-experts": "num-experts",
    "rotary-pos-emb": "use-rotary-position-embeddings",
}
"""Names in Megatron-Core's configuration, with the argument for each."""


def megatron_arguments(source: Source) -> Source | None:
    """A file's entries as Megatron's command-line arguments; None if it holds no arguments."""
    table, notes = _table_of(source.entries)
    stated: dict[str, Entry] = {}
    for key, entry in source.entries.items():
        name = argument_name(key.rpartition(".")[2])
        if key.startswith(table) and (key.partition(".")[0] not in _ELSEWHERE or name in LAUNCHING):
            stated[name] = replace(entry, value=_argument_value(name, entry.value))
    # Any YAML may have a key or two of these names (`seq-length`, `lr`):
    # several must be Megatron's, one of them its own.
    known = _ARGUMENTS & set(stated)
    is_primus = table.endswith("overrides.") and primus_framework(source.entries) in ON_MEGATRON
    if not is_primus and (len(known) < FEWEST or not known & set(_MARKS)):
        return None
    program = source.entries.get(_PROGRAM)
    if program is not None:
        stated[SCRIPT] = program
    if table.endswith("overrides."):
        stated = _from_primus(source.entries, table) | _in_words_of_megatron(stated)
    return replace(source, entries=as_switches(stated), notes=(*source.notes, *notes))


_PROGRAM: Final = "experiment.task.entrypoint"
"""The program that a file of FlagScale runs."""
_FRAMEWORK: Final = re.compile(r"modules\.\w+\.framework")


def primus_framework(entries: Entries) -> str:
    """The framework on which a file of Primus trains; empty of another file."""
    for key, entry in entries.items():
        if _FRAMEWORK.fullmatch(key):
            return str(entry.value)
    return ""


ON_MEGATRON: Final = ("megatron", "megatron_bridge")
PRIMUS_NAMES: Final = {
    "deepseek_v2_16b": "deepseek-v2-lite",
    "deepseek_v2_lite": "deepseek-v2-lite",
    "deepseek_v3_16b": "deepseek-v2-lite",
    "llama3.3_70b": "llama3-70b",
    "llama4_17b128e": "llama-4-maverick",
    "llama4_17b16e": "llama-4-scout",
}
"""Models with different names in Primus and in the catalog."""


_FACTORY_NAMES: Final = {
    "model_name_or_path": NAMED_MODEL,
    "per_device_train_batch_size": "micro-batch-size",
    "gradient_accumulation_steps": "gradient-accumulation-steps",
    "cutoff_len": "seq-length",
}
"""Keys of LLaMA-Factory that correspond to Megatron arguments."""
_FACTORY_PLAIN: Final = {"stage": ("sft", "pt"), "finetuning_type": ("full",)}
"""Values of LLaMA-Factory's keys for plain Megatron training."""


def factory_arguments(source: Source) -> Source | None:
    """A LLaMA-Factory file that trains with Megatron-Core (`mcore_adapter`), as arguments of
    Megatron.

    None of a file that says no degree of Megatron's. Weights are trained in the file's precision,
    and Core's distributed optimizer only where the file asks for it.
    """
    if not any(
        f"{kind}_model_parallel_size" in source.entries for kind in ("tensor", "pipeline", "expert")
    ):
        return None
    stated: dict[str, Entry] = {}
    for key, entry in source.entries.items():
        name = _FACTORY_NAMES.get(key, argument_name(key))
        is_plain = entry.value in _FACTORY_PLAIN.get(key, ())
        # Keys of the front end alone, on data and logs, say nothing here.
        if name in (*_ARGUMENTS, NAMED_MODEL) or not (
            is_plain or is_harmless(key, LLAMA_FACTORY.harmless)
        ):
            stated[name] = replace(entry, value=_argument_value(name, entry.value))
    return replace(source, entries=as_switches(stated))


def _table_of(entries: Entries) -> tuple[str, list[str]]:
    """The table of arguments to read, as the prefix of its keys, and a note if there are
    several."""
    for pattern in _TABLES:
        matches = (re.match(pattern, key) for key in entries)
        tables = list(dict.fromkeys(match[0] for match in matches if match))
        if len(tables) > 1:
            note = f"{len(tables)} tables hold arguments; perfmodel reads {tables[0].rstrip('.')}"
            return tables[0], [note]
        if tables:
            return tables[0], []
    return "", []


def argument_name(key: str) -> str:
    """The name of the argument for a key: `--num_layers`, `num_layers` and `num-layers` are the
    same."""
    name = key.removeprefix("--").replace("_", "-")
    return _SYNONYMS.get(name, name)


def value_with_defaults(value: Any) -> Any:
    """A value with the variables of the environment that have a default replaced, and words as YAML
    reads them."""
    if not isinstance(value, str):
        return value
    # Then as YAML would have read it, had no variable stood there.
    text = _WITH_DEFAULT.sub(lambda match: os.environ.get(match[1], match[2]), value)
    known = {"true": True, "false": False, "null": None, "none": None, "": None}
    return known.get(text.lower(), text)


def _argument_value(name: str, value: Any) -> Any:
    """The value of an argument; `none` means no positions for that argument, and leaves out any
    other."""
    if name == "position-embedding-type" and str(value).lower() == "none":
        return "none"
    return value_with_defaults(value)


def as_switches(stated: Mapping[str, Entry]) -> dict[str, Entry]:
    """Convert values to command-line arguments, where switches that are off are left out."""
    arguments: dict[str, Entry] = {}
    for name, entry in stated.items():
        if name in _OPPOSITES:
            name = _OPPOSITES[name]
            entry = replace(entry, value=entry.value is False)
        # Megatron-Core's configuration has functions where the command line has a switch for each
        # gate.
        if name == "activation-func" and entry.value in ("swiglu", "geglu"):
            name = str(entry.value)
            entry = replace(entry, value=True)
        if entry.value is not False and entry.value is not None:
            arguments[name] = entry
    return arguments


def _from_primus(entries: Entries, table: str) -> dict[str, Entry]:
    """Settings of a Primus file outside its overrides, and the defaults of Primus' trainer and
    models."""
    stated = dict(_PRIMUS_DEFAULTS)
    model = entries.get(f"{table.removesuffix('overrides.')}model")
    overridden = {
        key.removeprefix(table): entry for key, entry in entries.items() if key.startswith(table)
    }
    if model is None or "hidden_size" in overridden:
        return stated
    stated |= primus_arguments(str(value_with_defaults(model.value)).removesuffix(".yaml"), model)
    # Changes to a named model would be lost if only its name were kept.
    for name in _OF_MODELS & set(overridden):
        entry = overridden[name]
        # Under a name that no rule knows it is reported as unread, and its words make it one about
        # the model.
        stated[_key_of_named_model(name)] = replace(entry, value=str(entry.value))
    return stated


_PRIMUS_DEFAULTS: Final[Mapping[str, Entry]] = {
    "bf16": Entry(True, 0),
    "seq-length": Entry(4096, 0),
    "use-distributed-optimizer": Entry(True, 0),
    "sequence-parallel": Entry(True, 0),
}
"""Defaults of Primus.

`primus/configs/modules/megatron/trainer_base.yaml` has 16 bits and sequences of 4,096 tokens,
`pre_trainer.yaml` the distributed optimizer, and
`primus/configs/models/megatron/language_model.yaml` sequence parallelism.
"""


def primus_arguments(model: str, entry: Entry | None = None) -> dict[str, Entry]:
    """Arguments of a run of Primus of which only the model's name is known.

    Args:
        model: name of the model in Primus.
        entry: entry of the file that names it.
    """
    name = PRIMUS_NAMES.get(model.lower(), model)
    # Files of models that are tuned by adapters are called after both.
    name = name.removesuffix("_lora") if catalog_model(name) is None else name
    return {**_PRIMUS_DEFAULTS, NAMED_MODEL: replace(entry or Entry(name, 0), value=name)}


def as_arguments(stated: Mapping[str, Entry]) -> dict[str, Entry]:
    """Arguments of Primus' command line as Megatron's: those that change a named model are reported
    as unread."""
    arguments: dict[str, Entry] = {}
    model = catalog_model(str(stated[NAMED_MODEL].value)) if NAMED_MODEL in stated else None
    for name, entry in stated.items():
        key = name.replace("-", "_")
        changes_model = key in _OF_MODELS and model is not None
        if changes_model and _says_the_same(key, entry.value, model):
            continue
        argument = argument_name(name)
        arguments[_key_of_named_model(key) if changes_model else argument] = replace(
            entry,
            value=str(entry.value) if changes_model else _argument_value(argument, entry.value),
        )
    return as_switches(arguments)


_PRECISION: Final = "precision-config"
_ADAPTERS: Final = "peft"
_SCALINGS: Final = {
    "mxfp8": "mxfp8",
    "current": "tensorwise",
    "subchannel": "blockwise",
    "delayed": "delayed",
}
"""Parts of the names of Megatron-Bridge's precisions, with Megatron's names of 8-bit recipes."""


def _in_words_of_megatron(stated: Mapping[str, Entry]) -> dict[str, Entry]:
    """Convert Primus overrides for Megatron-Bridge, whose precision and adapters have other names
    (`megatron/bridge/training/mixed_precision.py`, `peft/lora.py`)."""
    arguments = dict(stated)
    precision = arguments.pop(_PRECISION, None)
    if precision is not None and isinstance(precision.value, str):
        name = precision.value.lower()
        arguments["fp16" if name.startswith("fp16") else "bf16"] = replace(precision, value=True)
        if "fp8" in name:
            arguments["fp8-format"] = replace(precision, value="hybrid")
            scaling = next((word for part, word in _SCALINGS.items() if part in name), "delayed")
            arguments["fp8-recipe"] = replace(precision, value=scaling)
    adapters = arguments.get(_ADAPTERS)
    if adapters is None:
        return arguments
    if str(adapters.value).lower() in ("none", "null", "false"):
        del arguments[_ADAPTERS]
        return arguments
    # The recipe knows rank and targets; the library's own defaults stand for them, and the word
    # stays in doubt.
    arguments["use-lora"] = replace(adapters, value=True)
    if not {"lora-rank", "lora-r"} & set(arguments):
        arguments["lora-rank"] = replace(adapters, value="32")
    arguments.setdefault("lora-target-modules", replace(adapters, value=list(_BRIDGE_TARGETS)))
    return arguments


_BRIDGE_TARGETS: Final = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _key_of_named_model(name: str) -> str:
    return f"{name.replace('_', '-')}-of-the-named-model"


def _says_the_same(name: str, value: Any, model: Model | None) -> bool:
    """Whether an override repeats the model's own value."""
    if not isinstance(model, Transformer):
        return False
    if name == "num_layers":
        return value == model.layers
    return (
        name == "moe_layer_freq"
        and value == 1
        and model.experts is not None
        and not model.experts.first_dense_layers
    )


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
"""Overrides that change a named model."""
