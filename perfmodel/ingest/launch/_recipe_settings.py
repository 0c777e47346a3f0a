"""Settings of a recipe of NeMo 2 or Megatron-Bridge after a script has changed it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from perfmodel.ingest.launch._bridge import BRIDGE
from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._harm import Harm, harm_of, is_harmless
from perfmodel.ingest.launch._hook_file import nemo_key
from perfmodel.ingest.launch._precision_recipes import precision_of
from perfmodel.ingest.launch._python_values import (
    MISSING,
    Choice,
    ScriptObject,
    Symbol,
    Unknown,
    is_same,
)
from perfmodel.ingest.launch._recipe_models import MODEL_OF_CATALOG, class_of
from perfmodel.ingest.launch._recipe_tables import recipe_tables

RECIPE_NAME: Final = "perfmodel.name"
"""Attribute of a recipe that holds its framework and name."""


@dataclass
class RecipeSettings:
    """Settings of a recipe after the script has changed it."""

    entries: dict[str, Entry] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    """Settings that an undecided condition changes; the last outcome is read."""
    notes: list[str] = field(default_factory=list)


_NEMO_ARGUMENTS: Final = {
    "num_nodes": "trainer.num_nodes",
    "num_gpus_per_node": "trainer.devices",
    "tensor_parallelism": "trainer.strategy.tensor_model_parallel_size",
    "pipeline_parallelism": "trainer.strategy.pipeline_model_parallel_size",
    "virtual_pipeline_parallelism": "trainer.strategy.virtual_pipeline_model_parallel_size",
    "context_parallelism": "trainer.strategy.context_parallel_size",
    "expert_parallelism": "trainer.strategy.expert_model_parallel_size",
    "sequence_parallelism": "trainer.strategy.sequence_parallel",
    "precision": "trainer.plugins.precision",
    "global_batch_size": "data.global_batch_size",
    "micro_batch_size": "data.micro_batch_size",
    "seq_length": "data.seq_length",
}
"""Arguments of NeMo 2's recipes (nemo/collections/llm/recipes), with the settings that they set."""
_BRIDGE_ARGUMENTS: Final = {
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "sequence_parallel": "model.sequence_parallel",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "model.seq_length",
    "precision_config": "mixed_precision",
    "mixed_precision_recipe": "mixed_precision",
}
"""Arguments of Megatron-Bridge's recipes until release 0.2 (megatron/bridge/recipes), with their
settings."""
_IDLE_ARGUMENTS: Final = patterns(
    "dir name fn mock log_dir data_paths data_args_path train_data_path valid_data_path test_data_path blend split",
    "blend_weights_path num_workers lr min_lr max_lr lr_warmup_iters lr_decay_iters warmup_steps constant_steps",
    "max_steps train_iters eval_interval eval_iters save_interval resume_path pretrained_checkpoint checkpoint_path",
    "use_null_tokenizer seed wandb_project wandb_entity wandb_exp_name log_every_n_steps val_check_interval hf_path",
    "limit_val_batches limit_test_batches gradient_clip_val num_train_samples log_interval optimizer_type",
)
"""Arguments of recipes that change no step."""
_UNSET: Final = object()


def recipe_fields(framework: str, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a recipe as its function makes it; arguments that set one are taken out of
    `keywords`."""
    fields: dict[str, Any] = {}
    for key, value in recipe_tables(framework).get(name, {}).items():
        if key == "model":
            value = ScriptObject(MODEL_OF_CATALOG, [value])
        # Scripts change a precision's own settings too:
        # `cfg.mixed_precision.grad_reduce_in_fp32 = False`.
        fields[key] = (
            ScriptObject("", fields={"precision": value}) if key == "mixed_precision" else value
        )
    table = _NEMO_ARGUMENTS if framework == "nemo" else _BRIDGE_ARGUMENTS
    for argument, setting in table.items():
        value = keywords.pop(argument, _UNSET)
        if value is not _UNSET and not (value is None and setting in fields):
            fields[setting] = value
    for argument in _IDLE_ARGUMENTS:
        keywords.pop(argument, None)
    # The name of the recipe already says what these did (`_named_by`).
    if name.endswith(("_peft", "_sft", "_peft_config", "_sft_config")):
        for argument in ("peft_scheme", "peft"):
            if keywords.get(argument, "lora") in (None, "none", "lora"):
                keywords.pop(argument, None)
    return fields


def add_attributes(instance: ScriptObject, prefix: str, settings: RecipeSettings) -> None:
    """Add the attributes of an object, and of its parts, under dotted names."""
    for name, value in instance.fields.items():
        key = f"{prefix}{name}"
        # Of a part that the script only reads nothing is said.
        is_own_part = (
            isinstance(value, ScriptObject) and value.owner is instance and not value.fields
        )
        if name == RECIPE_NAME or (is_own_part and not value.elements):
            continue
        _add(_NAMES.get(key, key), value, instance.lines.get(name, 0), settings)


_NAMES: Final = {"mixed_precision.precision": "mixed_precision"}
"""Settings that the formats know by another name."""


def _add(key: str, value: Any, line: int, settings: RecipeSettings) -> None:
    """Add a recipe's value under its key to the settings."""
    # Which model it is, `model_of_recipe` reads.
    if isinstance(value, ScriptObject) and value.maker == MODEL_OF_CATALOG and not value.fields:
        return
    if key in ("trainer.plugins", "mixed_precision"):
        value = _precision(value)
    match value:
        case Choice():
            _add_choice(key, value, line, settings)
        case Unknown() | ScriptObject(is_unknown=True):
            # Data from elsewhere have a batch size that is not the recipe's.
            data_keys = ("data.global_batch_size", "data.micro_batch_size", "data.seq_length")
            for name in (key, *data_keys) if key == "data" else (key,):
                settings.entries[name] = Entry(f"$({value.text})", line)
        case ScriptObject():
            _add_object(key, value, line, settings)
        case Symbol():
            settings.entries[key] = Entry(value.path, line)
        case list() | tuple():
            for part in value:
                _add_callback(key, part, settings)
            plain = [part.path if isinstance(part, Symbol) else part for part in value]
            settings.entries[key] = Entry(
                [part for part in plain if not isinstance(part, ScriptObject)], line
            )
        case int() | float() | str() | bool() | dict() | None:
            settings.entries[key] = Entry(value, line)
        case _:
            settings.entries[key] = Entry("$(...)", line)


def _add_object(key: str, instance: ScriptObject, line: int, settings: RecipeSettings) -> None:
    """Add the settings of an object that a recipe makes under a key."""
    if key == "trainer.strategy" and class_of(instance).startswith("FSDP"):
        settings.entries["dist.use_torch_fsdp2"] = Entry(True, line)
    if key == "model":
        for config in instance.positional:
            if isinstance(config, ScriptObject):
                add_attributes(config, "model.config.", settings)

    # The script's attributes take precedence over the defaults of the object's class.
    for name, value in _usual(key, instance).items():
        settings.entries[f"{key}.{name}"] = Entry(value, line)
    add_attributes(instance, f"{key}.", settings)
    for part in instance.elements:
        _add_callback(key, part, settings)


def _add_callback(key: str, value: Any, settings: RecipeSettings) -> None:
    """Add the settings of NeMo's callback for overlapped communication, under Megatron-Bridge's
    names (`comm_overlap`)."""
    if (
        key == "trainer.callbacks"
        and isinstance(value, ScriptObject)
        and class_of(value) == "MegatronCommOverlapCallback"
    ):
        add_attributes(value, "comm_overlap.", settings)


def _add_choice(key: str, choice: Choice, line: int, settings: RecipeSettings) -> None:
    """Read the last outcome of a choice, in which the condition is false, and keep the differences
    of the other outcomes."""
    outcomes: list[dict[str, Entry]] = []
    for value in choice.values:
        outcome = RecipeSettings()
        if value is not MISSING:
            _add(key, value, line or choice.line, outcome)
        settings.choices |= outcome.choices
        outcomes.append(outcome.entries)
    settings.entries |= outcomes[-1]
    for name in dict.fromkeys(chain.from_iterable(outcomes)):
        values = tuple(outcome[name].value if name in outcome else MISSING for outcome in outcomes)
        if not all(is_same(value, values[0]) for value in values):
            settings.choices[name] = Choice(values, choice.condition, choice.line)


_DATA_MODULES: Final = {"seq_length": 2048, "micro_batch_size": 4, "global_batch_size": 8}
"""Defaults of NeMo 2's data modules (nemo/collections/llm/gpt/data)."""
_HAS_THESE: Final = re.compile(r"^(Mock|PreTraining|FineTuning|Squad|Dolly|Alpaca)DataModule$")


def _usual(key: str, instance: ScriptObject) -> dict[str, Any]:
    """Defaults of a part that a script puts in the place of the recipe's part."""
    name = class_of(instance)
    if key == "data" and _HAS_THESE.match(name):
        return _DATA_MODULES
    if key == "peft" and name in ("LoRA", "DoRA", "CanonicalLoRA"):
        return {"dim": 32}
    if key == "trainer" and name == "Trainer":
        return {"num_nodes": 1}
    if key == "trainer.strategy" and name == "MegatronStrategy":
        return {
            "sequence_parallel": False,
            "ddp.overlap_grad_reduce": False,
            "ddp.overlap_param_gather": False,
        }
    return {}


def _precision(value: Any) -> Any:
    """A precision under the name that its function has (`bf16_with_fp8_mixed()`), or that its
    argument states."""
    if isinstance(value, (list, tuple)):
        plugins = [
            part
            for part in value
            if isinstance(part, ScriptObject) and re.search(r"recision|mixed", class_of(part))
        ]
        return _precision(plugins[0]) if plugins else value
    if (
        not isinstance(value, ScriptObject)
        or not value.maker
        or ("recision" in class_of(value) and value.fields)
    ):
        return value
    candidates = [argument for argument in value.positional if isinstance(argument, str)]
    candidates.append(class_of(value))
    name = next((name for name in candidates if precision_of(name)), None)
    if name is None:
        return Unknown(value.text)
    twin = ScriptObject("", fields=dict(value.fields), lines=dict(value.lines), line=value.line)
    twin.fields["precision"] = name
    return twin


def setting_doubts(settings: RecipeSettings, form: LaunchFormat) -> list[str]:
    """Sentences on settings that an undecided condition changes."""
    sentences = []
    for name, choice in settings.choices.items():
        key = nemo_key(name) if form is not BRIDGE else name
        rules = [rule for rule in form.table if key in rule.keys and rule.fields]
        if not rules and (is_harmless(key, form.harmless) or harm_of(key) is Harm.TIME):
            continue
        fields: list[str] = []
        for rule in rules:
            fields += rule.fields
        sentences.append(choice.doubt(_subject(fields), name, _shown))
    return sentences


def _shown(value: Any) -> str:
    return "the recipe's own" if value is MISSING else str(value)


def _subject(fields: Sequence[str]) -> str:
    if any(name.startswith(("model.", "experts.", "latent.")) for name in fields):
        return "the model"
    if "dtype" in fields:
        return "the precision"
    return "the batch" if set(fields) & {"global_batch", "seq_len", "micro_batch"} else "the layout"
