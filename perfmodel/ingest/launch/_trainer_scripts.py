"""Python scripts that train by Hugging Face's Trainer, or trl's, with arguments that stand in the
script.

The script is followed without being executed (`python_script`). The fields of its
`TrainingArguments` (or trl's `SFTConfig` and others) are the Trainer's arguments; the model is the
one that `from_pretrained` names or that a configuration builds, and adapters are those of
`LoraConfig`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog import model_from_config
from perfmodel.catalog.huggingface import FAMILIES, RELATIVES
from perfmodel.errors import PerfModelError
from perfmodel.ingest.launch._adapters import PEFT_OPTIONS
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source
from perfmodel.ingest.launch._finetuning_files import with_named_files
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._harm import SUBJECTS, Harm, harm_of, is_harmless
from perfmodel.ingest.launch._python_calls import Call
from perfmodel.ingest.launch._python_values import (
    MISSING,
    PLAIN,
    Choice,
    ScriptObject,
    Symbol,
    Unknown,
)
from perfmodel.ingest.launch._trainer import TRAINER
from perfmodel.ingest.launch._trainer_names import (
    ACCUMULATION,
    MICRO,
    PROGRAM,
    TRL_CLASS,
    TRL_OLD_LENGTH,
)
from perfmodel.ingest.launch.python_script import Followed, follow, module_beside
from perfmodel.spec import Model

_ARGUMENTS: Final = re.compile(
    r"(^|\.)((Seq2Seq|Reward)?TrainingArguments|(SFT|DPO|KTO|ORPO|CPO|GRPO|Reward|PPO|RLOO|OnlineDPO)Config)$"
)
"""Classes of the Trainer's arguments, of transformers and of trl."""
_LOOKS_LIKE_ONE: Final = re.compile(
    r"\b(\w*TrainingArguments|(SFT|DPO|KTO|ORPO|CPO|GRPO|Reward)Config)\s*\("
)
_SPREAD: Final = "**"
"""Keyword under which an unknown dictionary of arguments stands."""
_LENGTHS: Final = ("max_seq_length", "max_length")
_NO_MODELS: Final = re.compile(
    r"Tokenizer|Processor|Config|Extractor|Peft|Dataset|Pipeline|Scheduler"
)
"""Words in names of classes that load something else than a model."""
_BUILT: Final = re.compile(
    r"(from_config|ForCausalLM|LMHeadModel|ForMaskedLM|ForConditionalGeneration)$"
)
"""Calls that make a model of a configuration."""
_ON_ACCELERATORS: Final = {
    "is_bf16_supported": True,
    "is_bfloat16_supported": True,
    "is_torch_xla_available": False,
}
"""Results of questions that scripts ask of their device: accelerators that train compute in bf16
since 2020."""


def is_trainer_script(text: str) -> bool:
    """Whether a Python script may hold the Trainer's arguments."""
    return _LOOKS_LIKE_ONE.search(text) is not None and "Trainer" in text


def trainer_script(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a Python script that trains by the Trainer; None for other scripts.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: no Python, or arguments that the script would refuse.
    """
    if not is_trainer_script(text):
        return None
    neighbours = Neighbours(Path(place).parent)
    followed = follow(
        text,
        place,
        arguments=arguments,
        variables=variables,
        module_text=lambda name: module_beside(name, neighbours),
        result_of=lambda path: _ON_ACCELERATORS.get(path.rpartition(".")[2], MISSING),
    )
    call = _arguments_made(followed)
    if call is None:
        for name in followed.unused_functions:
            followed.call(name)
        call = _arguments_made(followed)
    if call is None:
        return None
    fields = {key: value for key, value in call.made.fields.items() if key != _SPREAD}
    entries, doubts = _entries(fields, call.made.lines)
    if _SPREAD in call.made.fields:
        doubts.append(
            f"the layout, the precision and memory may be wrong: line {call.line} takes "
            "arguments from a dictionary that is not known from the script alone"
        )
    entries.setdefault(MICRO, Entry(8, call.line))
    entries.setdefault(ACCUMULATION, Entry(1, call.line))
    entries[PROGRAM] = Entry(_program(followed, call.path), call.line)
    entries |= _length(followed, entries)
    model_entries, model, notes = _model(followed, place)
    entries = model_entries | entries | _adapters(followed) | _recompute(followed)
    source = Source(
        place=place, entries=entries, doubts=tuple(doubts), notes=tuple(notes), recipe_model=model
    )
    return with_named_files(source, TRAINER, neighbours)


def _program(followed: Followed, path: str) -> str:
    """The name of the program that the class of the arguments stands for: it tells the objective,
    and whether trl's defaults hold."""
    of_trl = TRL_CLASS.search(path)
    if of_trl is None:
        name = path.rpartition(".")[2]
        return f"{name.removesuffix('Config').removesuffix('TrainingArguments').lower()}.py"
    # Arguments of trl or its trainers that only earlier versions take: their defaults are those
    # of transformers.
    for call in followed.calls:
        made = call.made
        is_trl = TRL_CLASS.search(call.path) or call.path.endswith("Trainer")
        if is_trl and isinstance(made, ScriptObject) and TRL_OLD_LENGTH in made.fields:
            return f"{of_trl[1].lower()}.py"
    return f"trl {of_trl[1].lower()}"


def _arguments_made(followed: Followed) -> Call | None:
    """The call that makes the Trainer's arguments: those that a Trainer gets, if there are
    several."""
    made = [
        call
        for call in followed.calls
        if isinstance(call.made, ScriptObject) and _ARGUMENTS.search(call.path)
    ]
    trainers = [call for call in followed.calls if call.path.endswith("Trainer")]
    for trainer, arguments in product(trainers, made):
        if any(instance is arguments.made for instance in trainer.instances):
            return arguments
    return made[0] if made else None


def _entries(
    fields: Mapping[str, Any], lines: Mapping[str, int]
) -> tuple[dict[str, Entry], list[str]]:
    """Settings of an object, nested ones with dots, and doubts about those that an undecided
    condition changes."""
    entries: dict[str, Entry] = {}
    doubts: list[str] = []
    for name, value, line in _flat(fields, lines, ""):
        if isinstance(value, Choice):
            entries[name] = Entry(_plain(value.values[-1]), line)
            if not is_harmless(name, TRAINER.harmless):
                subject = SUBJECTS.get(harm_of(name), SUBJECTS[Harm.LAYOUT])
                doubts.append(value.doubt(subject, name, _plain))
        elif not (isinstance(value, Unknown) and is_harmless(name, TRAINER.harmless)):
            entries[name] = Entry(_plain(value), line)
    return entries, doubts


def _flat(
    fields: Mapping[str, Any], lines: Mapping[str, int], prefix: str
) -> Iterator[tuple[str, Any, int]]:
    """Each setting of an object and of the objects in it: its name with dots, its value, and the
    line that states it (0 where that is not known)."""
    for name, value in fields.items():
        line = lines.get(name, 0)
        if isinstance(value, dict) and value:
            inner_fields = {str(key): inner for key, inner in value.items()}
            yield from _flat(inner_fields, {}, f"{prefix}{name}.")
        elif isinstance(value, ScriptObject):
            yield f"{prefix}{name}", Unknown(value.text), line
        else:
            yield f"{prefix}{name}", value, line


def _plain(value: Any) -> Any:
    """A value as a launch file has it; unknown ones as text that counts as undefined."""
    if value is MISSING:
        return None
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Symbol):
        # `torch.bfloat16`, `IntervalStrategy.STEPS`
        return value.path.rpartition(".")[2]
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return f"$({value.text})" if isinstance(value, Unknown) else "$(...)"


def _length(followed: Followed, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Length of sequences: of the arguments, of the Trainer, or to which the tokenizer cuts or
    fills."""
    if any(key in entries and entries[key].value is not None for key in _LENGTHS):
        return {}
    for call in followed.calls:
        if not isinstance(call.made, ScriptObject):
            continue
        fields = call.made.fields
        is_tokenizer = "max_length" in fields and ("truncation" in fields or "padding" in fields)
        for key in (
            _LENGTHS if call.path.endswith(("Trainer", "from_pretrained")) or is_tokenizer else ()
        ):
            if isinstance(fields.get(key), int):
                return {"max_length": Entry(fields[key], call.line)}
    return {}


def _model(followed: Followed, place: str) -> tuple[dict[str, Entry], Model | None, list[str]]:
    """Settings of the model that is trained, and the model if the script builds it of a
    configuration."""
    for call in followed.calls:
        made = call.made
        if not isinstance(made, ScriptObject) or "okenizer" in call.path or "rocessor" in call.path:
            continue
        if call.path.endswith("Model.from_pretrained") or re.search(
            r"Model\w*\.from_pretrained$|LM\.from_pretr", call.path
        ):
            return _loaded(call, made), None, []
        if _BUILT.search(call.path):
            configuration = next((value for value in _configurations(made)), None)
            if configuration is not None:
                return _built(configuration, place)
        if call.path.endswith("Trainer"):
            # trl's trainers load a model that is given by its name, as their first argument.
            model = made.fields.get("model", next(iter(made.positional), None))
            if isinstance(model, str):
                return {"model_name_or_path": Entry(model, call.line)}, None, []
    return {}, None, []


_NAMES: Final = ("pretrained_model_name_or_path", "model_name", "model_id")


def _loaded(call: Call, made: ScriptObject) -> dict[str, Entry]:
    """Settings of a model that is loaded from a hub or a folder."""
    name = next(
        (made.fields[key] for key in _NAMES if key in made.fields),
        (made.positional or [MISSING])[0],
    )
    entries: dict[str, Entry] = {}
    if name is not MISSING:
        entries["model_name_or_path"] = Entry(_plain(name), call.line)
    quantized = made.fields.get("quantization_config")
    stated = {**made.fields, **(quantized.fields if isinstance(quantized, ScriptObject) else {})}
    for key in ("torch_dtype", "dtype", "attn_implementation", "load_in_4bit", "load_in_8bit"):
        value = _plain(stated.get(key))
        if value is not None and not (isinstance(value, str) and value.startswith("$")):
            entries[key] = Entry(value, call.line)
    return entries


def _configurations(made: ScriptObject) -> Iterator[ScriptObject]:
    for value in (made.fields.get("config"), *made.positional):
        if isinstance(value, ScriptObject) and value.maker.endswith("Config"):
            yield value


def _built(
    configuration: ScriptObject, place: str
) -> tuple[dict[str, Entry], Model | None, list[str]]:
    """The model of a configuration in the script, `LlamaConfig(hidden_size=...)`."""
    plain = configuration.maker.rpartition(".")[2].removesuffix("Config")
    family = next(
        (name for name in (*FAMILIES, *RELATIVES) if name.replace("_", "") == plain.lower()), ""
    )
    stated = {key: _plain(value) for key, value in configuration.fields.items()}
    unknown = [
        key for key, value in stated.items() if isinstance(value, str) and value.startswith("$")
    ]
    try:
        if unknown or not family:
            raise PerfModelError(", ".join(unknown) or f"{plain}Config is not known")
        return (
            {},
            model_from_config(
                {"model_type": family, **stated}, place=f"{place}, line {configuration.line}"
            ),
            [],
        )
    except PerfModelError as error:
        return (
            {},
            None,
            [f"the model is not read from line {configuration.line}: {error}".splitlines()[0]],
        )


_PEFT_METHOD: Final = re.compile(
    r"peft\.(\w+\.)*(?!Peft|PromptLearning)(IA3|Vera|LoHa|LoKr|OFT|BOFT|Prefix\w*|Prompt\w*|PTuning"
    r"|Poly|FourierFT|Bone|VBLoRA|HRA|XLora|LNTuning|AdaptionPrompt)Config$"
)
"""Paths of the configurations of peft's methods other than LoRA."""


def _adapters(followed: Followed) -> dict[str, Entry]:
    """LoRA by peft's `LoraConfig`, or by the arguments of unsloth's `get_peft_model`."""
    for call in followed.calls:
        made = call.made
        is_unsloth = (
            call.path.endswith("get_peft_model")
            and isinstance(made, ScriptObject)
            and "r" in made.fields
        )
        is_lora = call.path.endswith("LoraConfig") or is_unsloth
        if not isinstance(made, ScriptObject) or not (is_lora or _PEFT_METHOD.match(call.path)):
            continue
        entries = {
            "use_peft": Entry(True, call.line),
            "lora_r": Entry(_plain(made.fields.get("r", 8)), call.line),
        }
        if not is_lora:
            method = call.path.rpartition(".")[2].removesuffix("Config")
            entries["peft_type"] = Entry(method, call.line)
        for key, name in (
            ("target_modules", "lora_target_modules"),
            ("lora_dropout", "lora_dropout"),
            *((option, option) for option in PEFT_OPTIONS),
        ):
            value = _plain(made.fields.get(key))
            if value is not None:
                entries[name] = Entry(value, call.line)
        return entries
    return {}


_SWITCHED_ON: Final = re.compile(
    r"\.(gradient_checkpointing_enable|enable_gradient_checkpointing|apply_activation_checkpointing)$"
)
"""Calls that make a model repeat its layers' forward passes (transformers, diffusers, torch)."""
_SWITCHED_BY_DEFAULT: Final = re.compile(r"prepare_model_for_(kbit|int8)_training$")
_OPTION: Final = "use_gradient_checkpointing"
"""Option of peft's and unsloth's functions that switch it on in passing."""


def _recompute(followed: Followed) -> dict[str, Entry]:
    """Recompute that the script switches on in its model, whatever the Trainer's arguments say:
    these only switch it on as well."""
    for call in followed.calls:
        option = MISSING
        prepares = _SWITCHED_BY_DEFAULT.search(call.path) is not None
        if isinstance(call.made, ScriptObject):
            behind_model = call.made.positional[1:2] if prepares else ()
            option = call.made.fields.get(_OPTION, next(iter(behind_model), MISSING))
        is_default = prepares and option is MISSING
        # unsloth takes the name of its own variant, which repeats as much.
        is_asked = option is True or option == "unsloth"
        if _SWITCHED_ON.search(call.path) or is_default or is_asked:
            return {"gradient_checkpointing": Entry(True, call.line)}
    return {}
