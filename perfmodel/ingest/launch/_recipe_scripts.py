"""Python scripts of NeMo 2 and Megatron-Bridge that take a recipe and change it.

The script is followed without being executed (`python_script`). This module interprets its values:
which calls make a recipe, which of several is run, and the settings that its attributes, arguments
and replaced parts state. What only an undecided condition changes is read as if the condition did
not hold, and said at the head of the answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry, Neighbours, Source
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._harm import Harm, harm_of, is_harmless
from perfmodel.ingest.launch._hook_file import nemo_entries, nemo_key, with_precision
from perfmodel.ingest.launch._nemo import BRIDGE
from perfmodel.ingest.launch._precision_recipes import precision_of
from perfmodel.ingest.launch._python_values import (
    MISSING,
    Choice,
    ScriptObject,
    Symbol,
    Unknown,
    is_same,
)
from perfmodel.ingest.launch._recipe_models import MODEL_OF_CATALOG, class_of, model_of_recipe
from perfmodel.ingest.launch._recipe_tables import (
    nemo_name,
    recipe_tables,
    unknown_recipe,
    whole_devices,
    with_unknown_recipe,
)
from perfmodel.ingest.launch._xtuner import plain_value
from perfmodel.ingest.launch.python_script import Followed, follow, module_beside

_RECIPE_CALL: Final = re.compile(
    r"\b((pretrain|finetune)_recipe|\w+_(pretrain|finetune|sft|peft)_config)\b"
)
"""Functions of NeMo 2 and Megatron-Bridge that make a recipe."""
_OF_BRIDGE: Final = ("_pretrain_config", "_sft_config", "_peft_config", "_finetune_config")
_RUN: Final = re.compile(r"(^|\.)(run|add|pretrain|finetune|train|distill|build|main)$")
"""Calls that a script hands the recipe to that it runs."""
_NAME: Final = "perfmodel.name"
"""Attribute of a recipe that holds its framework and name."""
_CHANGES_NOTHING: Final = re.compile(
    r"(^|[._])(print\w*|pprint|log\w*|info|debug|warning|save\w*|dump\w*|write\w*|to_yaml|to_dict|asdict|validate\w*"
    r"|check\w*|verify\w*|show\w*|display\w*|isinstance|hasattr|len|str|repr|type|id|deepcopy|copy|fiddle[\w.]*"
    r"|\w*omegaconf\w*|OmegaConf[\w.]*|\w*overrides?|get_\w*|append|items|dryrun|\w*executor\w*|\w*plugins?)$",
    re.IGNORECASE,
)
"""Calls of code from outside that get a recipe and leave its settings alone."""


@dataclass(frozen=True)
class _Recipe:
    """A recipe that a script makes."""

    thing: ScriptObject
    framework: str
    name: str
    line: int
    function: str = ""
    """The script's function that makes it, if nothing in the script calls that function."""


@dataclass
class _Settings:
    """Settings of a recipe after the script has changed it."""

    entries: dict[str, Entry] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    """Settings that an undecided condition changes; the last outcome is read."""
    notes: list[str] = field(default_factory=list)


def makes_recipe(text: str) -> bool:
    """Whether a Python script may call a function that makes a recipe."""
    return _RECIPE_CALL.search(text) is not None


def recipe_script(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a Python script that takes a recipe and changes it; None for other scripts.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments, or the name of its function whose recipe is wanted.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: no Python, or a recipe that is not known.
    """
    if not makes_recipe(text):
        return None
    neighbours = Neighbours(Path(place).parent)

    def fields_of(maker: str, positional: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        named = _named_by(maker, keywords)
        if named is None:
            return {}
        return {_NAME: named} | _recipe_fields(*named, keywords)

    followed = follow(
        text,
        place,
        arguments=arguments,
        variables=variables,
        fields_of=fields_of,
        module_text=lambda name: module_beside(name, neighbours),
    )
    recipes = _recipes_made(followed)
    run = _that_runs(followed, recipes)
    notes: list[str] = []
    if run is None:
        unused = _of_unused_functions(followed)
        if not unused:
            return None
        wanted = [recipe for recipe in unused if recipe.function in arguments[:1]]
        run = (wanted or unused)[0]
        if len(unused) > 1 and not wanted:
            others = ", ".join(recipe.function for recipe in unused[1:4])
            notes.append(
                f"the script runs none of its {len(unused)} functions that make a recipe; perfmodel reads "
                f"{run.function}; give another one's name after the file ({others})"
            )
    return _read(run, followed, place, arguments, notes)


# --- recipes and the one that runs
# ---------------------------------------------------------------------


def _named_by(maker: str, keywords: Mapping[str, Any]) -> tuple[str, str] | None:
    """Framework and name of the recipe that a call makes; None for other calls."""
    *outer, last = maker.split(".")
    if last == "pretrain_recipe" and outer:
        return "nemo", outer[-1]
    if last == "finetune_recipe" and outer:
        return "nemo", nemo_name(outer[-1], True, keywords.get("peft_scheme", "lora"))
    if last.endswith("_finetune_config"):
        # Until release 0.2 one function made both kinds.
        kind = "sft" if keywords.get("peft", "lora") in (None, "none") else "peft"
        return "megatron-bridge", f"{last.removesuffix('_finetune_config')}_{kind}_config"
    return ("megatron-bridge", last) if last.endswith(_OF_BRIDGE) else None


def _recipes_made(followed: Followed) -> list[_Recipe]:
    recipes = []
    for call in followed.calls:
        named = call.made.fields.get(_NAME) if isinstance(call.made, ScriptObject) else None
        if named is not None:
            recipes.append(_Recipe(call.made, str(named[0]), str(named[1]), call.line))
    return recipes


def _that_runs(followed: Followed, recipes: Sequence[_Recipe]) -> _Recipe | None:
    """The recipe that a script runs: the first that surely is handed to a runner, or else the last
    one made."""
    by_thing = {id(recipe.thing): recipe for recipe in recipes}
    handed = []
    for call in followed.calls:
        if _RUN.search(call.path):
            handed += [
                (call.is_certain, by_thing[id(thing)])
                for thing in call.things
                if id(thing) in by_thing
            ]
    certain = [recipe for is_certain, recipe in handed if is_certain]
    if handed:
        return certain[0] if certain else handed[0][1]
    return recipes[-1] if recipes else None


def _of_unused_functions(followed: Followed) -> list[_Recipe]:
    """Recipes of functions that nothing in the script calls, such as factories of a command
    line."""
    recipes: list[_Recipe] = []
    for name in followed.unused_functions:
        known = {id(recipe.thing) for recipe in _recipes_made(followed)}
        result = followed.call(name)
        made = [recipe for recipe in _recipes_made(followed) if id(recipe.thing) not in known]
        returned = [recipe for recipe in made if recipe.thing is result]
        chosen = returned or made[-1:]
        recipes += [replace(recipe, function=name) for recipe in chosen[:1]]
    return recipes


# --- settings of a recipe
# ------------------------------------------------------------------------------

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


def _recipe_fields(framework: str, name: str, keywords: dict[str, Any]) -> dict[str, Any]:
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


def _read(
    recipe: _Recipe, followed: Followed, place: str, arguments: Sequence[str], notes: Sequence[str]
) -> tuple[Source, LaunchFormat]:
    """Settings and format of a recipe with the script's changes to it."""
    settings = _Settings(notes=list(notes))
    _flatten(recipe.thing, "", settings)
    overrides = _overrides(followed, arguments)
    settings.entries |= overrides
    model, model_notes = model_of_recipe(recipe.thing, settings.entries)
    source = Source(place=place, entries=settings.entries, recipe_model=model)
    if recipe.framework == "nemo":
        source, form = nemo_entries(source)
        devices = whole_devices(settings.entries, place)
    else:
        source, form = replace(source, entries=with_precision(source.entries)), BRIDGE
        devices = _devices_of_executor(followed)
    doubts = [*_doubts(settings, form), *_handed_over(recipe, followed)]
    source = replace(
        source, devices=devices, notes=(*settings.notes, *model_notes), doubts=tuple(doubts)
    )
    known = recipe_tables(recipe.framework)
    if recipe.name in known:
        return source, form
    error = unknown_recipe(recipe.framework, recipe.name, sorted(known), place, recipe.line)
    return with_unknown_recipe(source, recipe.framework, error), form


def _flatten(thing: ScriptObject, prefix: str, settings: _Settings) -> None:
    """Add the attributes of an object, and of its parts, under dotted names."""
    for name, value in thing.fields.items():
        key = f"{prefix}{name}"
        # Of a part that the script only reads nothing is said.
        is_own_part = isinstance(value, ScriptObject) and value.owner is thing and not value.fields
        if name == _NAME or (is_own_part and not value.elements):
            continue
        _add(_NAMES.get(key, key), value, thing.lines.get(name, 0), settings)


_NAMES: Final = {"mixed_precision.precision": "mixed_precision"}
"""Settings that the formats know by another name."""


def _add(key: str, value: Any, line: int, settings: _Settings) -> None:
    """Add a recipe's value under its key to the settings."""
    if key in ("trainer.plugins", "mixed_precision"):
        value = _precision(value)
    match value:
        case Choice():
            _add_choice(key, value, line, settings)
        case Unknown() | ScriptObject(is_unknown=True):
            settings.entries[key] = Entry(f"$({value.text})", line)
            if key == "data":
                # Data from elsewhere have a batch size that is not the recipe's.
                for name in ("global_batch_size", "micro_batch_size", "seq_length"):
                    settings.entries[f"data.{name}"] = Entry(f"$({value.text})", line)
        case ScriptObject():
            if key == "trainer.strategy" and class_of(value).startswith("FSDP"):
                settings.entries["dist.use_torch_fsdp2"] = Entry(True, line)
            if key == "model":
                for inner in value.positional:
                    if isinstance(inner, ScriptObject):
                        _flatten(inner, "model.config.", settings)
            for name, inner in _usual(key, value).items():
                settings.entries[f"{key}.{name}"] = Entry(inner, line)
            _flatten(value, f"{key}.", settings)
            for part in value.elements:
                _add_callback(key, part, settings)
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


def _add_callback(key: str, value: Any, settings: _Settings) -> None:
    """NeMo's callback of overlapped communication holds the settings that Megatron-Bridge has in
    `comm_overlap`."""
    if (
        key == "trainer.callbacks"
        and isinstance(value, ScriptObject)
        and class_of(value) == "MegatronCommOverlapCallback"
    ):
        _flatten(value, "comm_overlap.", settings)


def _add_choice(key: str, choice: Choice, line: int, settings: _Settings) -> None:
    """Read the last outcome of a choice, in which the condition is false, and keep the differences
    of the other outcomes."""
    outcomes: list[dict[str, Entry]] = []
    for value in choice.values:
        outcome = _Settings()
        if value is not MISSING:
            _add(key, value, line or choice.line, outcome)
        settings.choices |= outcome.choices
        outcomes.append(outcome.entries)
    settings.entries |= outcomes[-1]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    for name in names:
        values = tuple(outcome[name].value if name in outcome else MISSING for outcome in outcomes)
        if not all(is_same(value, values[0]) for value in values):
            settings.choices[name] = Choice(values, choice.condition, choice.line)


_DATA_MODULES: Final = {"seq_length": 2048, "micro_batch_size": 4, "global_batch_size": 8}
"""Defaults of NeMo 2's data modules (nemo/collections/llm/gpt/data)."""
_HAS_THESE: Final = re.compile(r"^(Mock|PreTraining|FineTuning|Squad|Dolly|Alpaca)DataModule$")


def _usual(key: str, thing: ScriptObject) -> dict[str, Any]:
    """Defaults of a part that a script puts in the place of the recipe's."""
    name = class_of(thing)
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
    """A precision by the function that makes it: `bf16_with_fp8_mixed()`, or a function of one word
    that names it."""
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
    words = [word for word in value.positional if isinstance(word, str)]
    name = next((word for word in (*words, class_of(value)) if precision_of(word)), None)
    if name is None:
        return Unknown(value.text)
    twin = ScriptObject("", fields=dict(value.fields), lines=dict(value.lines), line=value.line)
    twin.fields["precision"] = name
    return twin


def _overrides(followed: Followed, arguments: Sequence[str]) -> dict[str, Entry]:
    """Settings `a.b=c` behind the script's name, if the script hands these to the recipe."""
    if not any(re.search(r"overrides?", call.path) for call in followed.calls):
        return {}
    settings = {}
    for word in arguments:
        setting = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*\.[\w.]+)=(.*)", word, re.DOTALL)
        if setting:
            settings[setting[1]] = Entry(plain_value(setting[2]), 0)
    return settings


def _devices_of_executor(followed: Followed) -> int | None:
    """Devices of the job that NeMo-Run's executor asks for; None if there is none."""
    for call in followed.calls:
        if isinstance(call.made, ScriptObject) and call.path.endswith(
            ("SlurmExecutor", "LocalExecutor")
        ):
            nodes = call.made.fields.get("nodes", 1)
            each = call.made.fields.get("ntasks_per_node", call.made.fields.get("gpus_per_node"))
            if isinstance(nodes, int) and isinstance(each, int):
                return nodes * each
    return None


# --- what stays open
# -----------------------------------------------------------------------------------


def _doubts(settings: _Settings, form: LaunchFormat) -> list[str]:
    """Sentences on settings that an undecided condition changes."""
    sentences = []
    for name, choice in settings.choices.items():
        key = nemo_key(name) if form is not BRIDGE else name
        rules = [rule for rule in form.table if key in rule.keys and rule.fields]
        if not rules and (is_harmless(key, form.harmless) or harm_of(key) is Harm.TIME):
            continue
        fields = [field for rule in rules for field in rule.fields]
        others = " or ".join(dict.fromkeys(_shown(value) for value in choice.values[:-1]))
        sentences.append(
            f"{_subject(fields)} may be wrong: {name} is {others} if {choice.condition} (line "
            f"{choice.line}), which the script alone does not decide; perfmodel assumes "
            f"{_shown(choice.values[-1])}"
        )
    return sentences


def _shown(value: Any) -> str:
    return "the recipe's own" if value is MISSING else str(value)


def _subject(fields: Sequence[str]) -> str:
    if any(name.startswith(("model.", "experts.", "latent.")) for name in fields):
        return "the model"
    if "dtype" in fields:
        return "the precision"
    return "the batch" if set(fields) & {"global_batch", "seq_len", "micro_batch"} else "the layout"


def _handed_over(recipe: _Recipe, followed: Followed) -> list[str]:
    """Sentences on functions from outside that get the recipe and may change it before it runs."""
    parts = {id(thing) for thing in _all_parts(recipe.thing)}
    sentences = []
    for call in followed.calls:
        gets_it = [thing for thing in call.things if id(thing) in parts]
        if not gets_it or call.made is recipe.thing:
            continue
        if _RUN.search(call.path):
            break
        if not _CHANGES_NOTHING.search(call.path) and not call.path.startswith(
            ("torch.", "nemo_run.", "run.")
        ):
            sentences.append(
                f"the layout may be wrong: line {call.line} hands the recipe to {call.text}, which is not in this "
                "file; put the file that defines it into the script's folder"
            )
    return list(dict.fromkeys(sentences))


def _all_parts(thing: ScriptObject, seen: set[int] | None = None) -> Iterator[ScriptObject]:
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield thing
    for value in thing.fields.values():
        if isinstance(value, ScriptObject) and not value.maker:
            yield from _all_parts(value, seen)
