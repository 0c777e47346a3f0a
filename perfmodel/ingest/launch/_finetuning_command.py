"""Command lines of fine-tuning: `llamafactory-cli train run.yaml`, `swift sft --model ...`,
`axolotl train run.yml`, `tune run ... --config run.yaml`, `xtuner train run.py`, and scripts of
Hugging Face's Trainer under any launcher."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import (
    LAUNCHING,
    command_entries,
    followed_script,
)
from perfmodel.ingest.launch._axolotl import AXOLOTL
from perfmodel.ingest.launch._colossalai import (
    COLOSSALAI,
    colossalai_settings,
    colossalai_words,
    is_of_colossalai,
)
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, included_entries, yaml_value
from perfmodel.ingest.launch._finetuning_files import (
    FINETUNING,
    accelerate_flags,
    finetuning_format,
    with_named_files,
)
from perfmodel.ingest.launch._finetuning_processes import (
    Training,
    doubts_on_spread_models,
    world_entries,
)
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY
from perfmodel.ingest.launch._open_instruct import (
    OLMO_CORE,
    behind_submitter,
    trains_on_olmo_core,
)
from perfmodel.ingest.launch._oumi import OUMI
from perfmodel.ingest.launch._own_programs import (
    OWN_FORM,
    OWN_NAMES,
    in_words_of_trainer,
    makes_engine,
    refuse_several_models,
)
from perfmodel.ingest.launch._read_entries import read_json, read_yaml
from perfmodel.ingest.launch._swift import SWIFT
from perfmodel.ingest.launch._torchtune import TORCHTUNE, shipped_configuration
from perfmodel.ingest.launch._trainer import EVALUATIONS, TRAINER, only_evaluates
from perfmodel.ingest.launch._trainer_names import MICRO, PROGRAM, TRL_COMMAND, WORLD
from perfmodel.ingest.launch._verl import VERL
from perfmodel.ingest.launch._xtuner import XTUNER, read_python
from perfmodel.ingest.launch.shell import Command, Word

_LOOKS_LIKE_ONE: Final = re.compile(
    r"per[-_]device[-_](train[-_])?batch[-_]size|llamafactory|\bswift\b|\baxolotl\b|\btrl\s+\w|\btune\s+run\b|\boumi\b|\bxtuner\b"
    r"|\.py\s+\S+\.(ya?ml|json)\b|(^|[\s/\"'=(])(deepspeed|accelerate\s+launch)\s|deepspeed_config|actor|reward_pretrain|verl\.trainer"
    r"|colossalai|--plugin"
)
"""Patterns of which every fine-tuning script matches at least one, such as a file of arguments
after a program, or a launcher of user-written programs."""
_PROGRAMS: Final[tuple[tuple[re.Pattern[str], LaunchFormat], ...]] = (
    (
        re.compile(r"(^|\s|/)llamafactory-cli\s+train\b|llamafactory[./]\S*(launcher|cli)"),
        LLAMA_FACTORY,
    ),
    (re.compile(r"(^|\s|/)swift\s+(sft|pt|rlhf)\b|swift[./]cli[./](sft|pt|rlhf)"), SWIFT),
    (re.compile(r"(^|\s|/)axolotl\s+train\b|axolotl\.cli\.train"), AXOLOTL),
    (re.compile(r"(^|\s|/)oumi\s+train\b"), OUMI),
    (re.compile(r"(^|\s|/)tune\s+run\b"), TORCHTUNE),
    (re.compile(r"(^|\s|/)xtuner\s+train\b|xtuner/tools/train\.py"), XTUNER),
    (re.compile(r"verl[./]trainer[./]\w*sft_trainer"), VERL),
    (TRL_COMMAND, TRAINER),
)
"""Prefixes of the commands of front ends."""


def _known_arguments(form: LaunchFormat) -> frozenset[str]:
    """Arguments of a front end, written with hyphens."""
    names: set[str] = set()
    for rule in form.table:
        names |= {key.replace("_", "-") for key in rule.keys}
    return frozenset(names)


# A program expands abbreviations of its own arguments alone: `--model_id` of one is no
# `--model_id_or_path` of another.
_KNOWN: Final = {form.name: _known_arguments(form) for form in (*FINETUNING, VERL, COLOSSALAI)}
_OF_PROGRAMS: Final = _KNOWN[TRAINER.name] | OWN_NAMES
_NO_ABBREVIATIONS: Final = frozenset(
    name
    for name in frozenset[str]().union(*_KNOWN.values())
    if any(longer.startswith(name) for longer in _OF_PROGRAMS)
)
"""Arguments of front ends that begin like others (`--lora_target`, `--lora_target_modules`)."""
_KNOWN_OF_PROGRAMS: Final = _OF_PROGRAMS | _NO_ABBREVIATIONS
_SWITCHES: Final = frozenset(
    {
        "do-train",
        "do-eval",
        "do-predict",
        "packing",
        "trust-remote-code",
        "tf32",
        "gradient-checkpointing",
    }
)
"""Flags of dataclasses that need no value, so that a following word may not belong to them."""
_SETTING: Final = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_FILES: Final = (".yaml", ".yml", ".json", ".py")


def may_fine_tune(text: str) -> bool:
    """Whether a script may contain fine-tuning, by a quick look at its words; interpreting every
    script would take long."""
    return _LOOKS_LIKE_ONE.search(text) is not None


def finetuning_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a script's fine-tuning command and of the file that it names; None for other
    scripts.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.
    """
    script, job = followed_script(text, place, arguments, variables)
    certain = [command for command in script.commands if command.certain]
    neighbours = Neighbours(Path(place).parent, script.files)
    candidates = [_training(command, place, neighbours) for command in certain or script.commands]
    understood = [training for training in candidates if training is not None]
    trainings = [training for training in understood if not _is_evaluation(training)]
    if understood and not trainings:
        line = understood[0].command.argv[0].line
        raise LaunchFileError(
            f"{place}, line {line}: it predicts or evaluates and does not train (do_train is not set); give the "
            "command that trains"
        )
    if not trainings:
        _refuse_absent_settings(certain, place, neighbours)
        return None
    # Scripts that fine-tune, merge and evaluate: the command with the most settings trains.
    best = max(trainings, key=lambda training: len(training.entries))
    base, notes, absent = _named_file(best, neighbours)
    # Processes that a launcher starts become one number; its own notation (`gpu`, `1:4`) means
    # nothing elsewhere.
    stated = {name: entry for name, entry in best.entries.items() if name not in WORLD}
    # Flags win over the file that the command names, as in all of these front ends.
    entries = base | stated
    if absent:
        # The absent file may also say that the run trains.
        entries = {name: entry for name, entry in entries.items() if name not in EVALUATIONS}
    world, remarks = world_entries(best, job, neighbours)
    unread = len(trainings) - 1
    if unread:
        line = best.command.argv[0].line
        remarks.append(
            f"the script has {unread + 1} fine-tuning commands; perfmodel reads the one on line {line}"
        )
    source = Source(
        place=place,
        entries=entries | world,
        notes=(*script.notes, *notes, *remarks),
        doubts=(*absent, *doubts_on_spread_models(best, world)),
    )
    # These name no further files, and state their own devices.
    if best.form in (VERL, OLMO_CORE, COLOSSALAI):
        return source, best.form
    return with_named_files(source, best.form, neighbours)


def _refuse_absent_settings(
    commands: Sequence[Command], place: str, neighbours: Neighbours
) -> None:
    """Raise `LaunchFileError` for a training program whose file of settings is not in the script's
    folder."""
    for command in commands:
        texts = [word.text for word in command.argv]
        names = [Path(text).name for text in texts]
        program = next((i for i, name in enumerate(names) if name.endswith(".py")), None)
        if program is None or not {"accelerate", "deepspeed", "torchrun"} & set(names[:program]):
            continue
        settings = [text.rpartition("=")[2] for text in texts[program + 1 :]]
        absent = [
            text
            for text in settings
            if text.endswith((".yaml", ".yml")) and neighbours.find(text) is None
        ]
        if absent:
            raise LaunchFileError(
                f"{place}: it runs {names[program]} with the settings of {absent[0]}, which is "
                "not in the same folder; put it "
                "there, or give --model, --layout and so on instead"
            )


def _is_evaluation(training: Training) -> bool:
    """Whether a command of the Trainer's kind predicts or evaluates instead of training, and no
    file says otherwise."""
    if _name_of_settings(training) is not None:
        return False
    return only_evaluates({name: entry.value for name, entry in training.entries.items()})


def _training(command: Command, place: str, neighbours: Neighbours) -> Training | None:
    """The command as a fine-tuning command; None for other commands.

    Args:
        command: command of the script.
        place: path of the script.
        neighbours: files that it may name.
    """
    whole_argv, nodes = behind_submitter(command.argv)
    texts = [word.text for word in whole_argv]
    joined = " ".join(texts)
    # By the program's name; else by the Trainer's own flags, which any script
    # passes on; else by the file that stands behind a script.
    form = next((form for pattern, form in _PROGRAMS if pattern.search(joined)), None)
    argv, of_launcher = _without_accelerate(whole_argv)
    if form is None and is_of_colossalai(texts):
        form = COLOSSALAI
        argv = colossalai_words(argv)
    known = _KNOWN_OF_PROGRAMS if form is None else _KNOWN[form.name]
    flags = command_entries(_behind_containers(argv), known, _SWITCHES)
    entries = {name.replace("-", "_"): _single_valued(name, entry) for name, entry in flags.items()}
    entries |= _settings(whole_argv)
    if form is COLOSSALAI:
        refuse_several_models(entries, place)
        entries = colossalai_settings(texts, entries)
    if form is None and MICRO in entries and "tensor_model_parallel_size" not in entries:
        form = OLMO_CORE if trains_on_olmo_core(texts) else finetuning_format(entries) or TRAINER
        if form is TRAINER and makes_engine(entries):
            form = None
    if form is None:
        refuse_several_models(entries, place)
        renamed = in_words_of_trainer(texts, entries)
        if renamed is not None:
            entries, form = renamed, OWN_FORM
    if form is None:
        form = _format_of_named_file(command, neighbours)
    if form is None:
        return None
    entries |= accelerate_flags(of_launcher)
    of_trl = TRL_COMMAND.search(joined)
    if of_trl is not None:
        entries.setdefault(PROGRAM, Entry(f"trl {of_trl[1]}", command.argv[0].line))
    return Training(command, form, entries, nodes)


def _format_of_named_file(command: Command, neighbours: Neighbours) -> LaunchFormat | None:
    """The front end whose file follows a Python program directly (`train.py config.yaml`, as for
    HfArgumentParser) or behind `--config` (as for TrlParser).

    None where there is no such file, or one of something else.
    """
    texts = [part for word in command.argv for part in _flag_and_value(word.text)]
    programs = [i for i, text in enumerate(texts) if text.endswith(".py")]
    behind = texts[programs[-1] + 1 :] if programs else []
    if "--config" in behind:
        behind = behind[behind.index("--config") + 1 :]
    if not behind or not behind[0].endswith((".yaml", ".yml", ".json")):
        return None
    try:
        configuration = _read_beside(behind[0], neighbours)
    except LaunchFileError:
        # Data of another program, which need not be a configuration.
        return None
    if configuration is None:
        return None
    entries, _ = configuration
    return finetuning_format(entries)


def _flag_and_value(text: str) -> list[str]:
    """`--flag=value` in two, other words whole."""
    return text.split("=", 1) if text.startswith("--") else [text]


def _single_valued(name: str, entry: Entry) -> Entry:
    """The entry of a flag, with one value where the flag takes only one."""
    if isinstance(entry.value, list) and name in ("config", "model", "deepspeed", *LAUNCHING):
        # A word after the value of a single-valued flag is a separate argument.
        return Entry(entry.value[0], entry.line)
    return entry


def _settings(argv: Sequence[Word]) -> dict[str, Entry]:
    """Settings `key=value` of a command.

    torchtune and LLaMA-Factory take them behind the name of a file, programs on Hydra (verl) behind
    that of a module; there a `+` adds a key.
    """
    entries: dict[str, Entry] = {}
    begun = False
    before = ""
    for word in argv:
        setting = _SETTING.fullmatch(word.text.lstrip("+"))
        if setting and begun:
            entries[setting[1]] = Entry(yaml_value(setting[2]), word.line)
        is_module = before in ("-m", "--module") and "torch.distributed" not in word.text
        begun = begun or is_module or word.text == "--config" or word.text.endswith(_FILES)
        before = word.text
    return entries


def _without_accelerate(argv: Sequence[Word]) -> tuple[Sequence[Word], dict[str, Entry]]:
    """A command without the flags of `accelerate launch` before its program, and these flags by
    name.

    Flags that say how many processes run stay in the command, as those of every launcher do.
    """
    texts = [word.text for word in argv]
    launchers = [i for i, text in enumerate(texts) if Path(text).name == "accelerate"]
    if not launchers or texts[launchers[-1] + 1 : launchers[-1] + 2] != ["launch"]:
        return argv, {}
    begin = launchers[-1] + 2
    programs = [
        i
        for i in range(begin, len(texts))
        if texts[i].endswith(".py") or texts[i] in ("-m", "--module")
    ]
    end = programs[0] if programs else len(texts)

    # A flag and its value stand in one word or in two.
    launcher_arguments = list(argv[:begin])
    entries: dict[str, Entry] = {}
    name = ""
    for word in argv[begin:end]:
        if word.text.startswith("--"):
            name, sign, value = word.text[2:].partition("=")
            name = name.replace("-", "_")
            entries[name] = Entry(yaml_value(value) if sign else True, word.line)
        elif name and entries[name].value is True:
            entries[name] = Entry(yaml_value(word.text), word.line)
        if name.replace("_", "-") in LAUNCHING:
            launcher_arguments.append(word)
    return [*launcher_arguments, *argv[end:]], entries


_FRONT_ENDS: Final = ("swift", "llamafactory-cli", "axolotl", "tune", "xtuner", "trl")
_SUBCOMMANDS: Final = ("sft", "pt", "rlhf", "train", "run", "dpo", "kto", "reward", "grpo", "rloo")
"""Programs of front ends, which have no ending that tells a program, and the words behind them."""


def _behind_containers(argv: Sequence[Word]) -> Sequence[Word]:
    """A command without what starts its front end (`timeout`, `apptainer exec`); options that set
    the number of processes stay."""
    names = [Path(word.text).name for word in argv]
    starts = [
        i
        for i, name in enumerate(names[:-1])
        if name in _FRONT_ENDS and names[i + 1] in _SUBCOMMANDS
    ]
    program = starts[0] if starts else 0
    launcher_options: list[Word] = []
    takes_value = False
    for word in argv[:program]:
        is_flag = word.text.startswith("-")
        if is_flag:
            name, sign, _ = word.text.lstrip("-").partition("=")
            launches = name.replace("_", "-") in LAUNCHING
            takes_value = launches and not sign
            if launches:
                launcher_options.append(word)
        elif takes_value:
            launcher_options.append(word)
            takes_value = False
    return [*launcher_options, *argv[program:]]


def _named_file(
    training: Training, neighbours: Neighbours
) -> tuple[dict[str, Entry], list[str], tuple[str, ...]]:
    """Entries and notes of the settings file that a command names; a doubt if the file is not
    beside the script."""
    name = _name_of_settings(training)
    if name is None:
        return {}, [], ()
    settings = _read_beside(name, neighbours)
    if settings is not None:
        return *settings, ()
    doubt = (
        f"everything that the command does not state may be wrong: its settings file {name} "
        "was not found in the script's folder"
    )
    shipped: dict[str, Entry] = {}
    if training.form is TORCHTUNE:
        shipped = shipped_configuration(name, training.command.argv[0].line)
    return shipped, [], (doubt,)


def _name_of_settings(training: Training) -> str | None:
    """The file of settings that a command names and that its flags may leave open; None if it names
    none."""
    # A command that states its model and batch states the rest too, and `--config` is then
    # something else's (Accelerate's).
    states_model = any(name in training.entries for name in ("model_name_or_path", "model"))
    states_both = states_model and MICRO in training.entries
    is_complete = training.form in (SWIFT, TRAINER) and states_both
    if is_complete or training.form in (OWN_FORM, COLOSSALAI):
        return None
    name = _name_of_file(training)
    # Python files are not configurations, except XTuner's.
    is_program = name is not None and name.endswith(".py") and training.form is not XTUNER
    return None if is_program else name


def _read_beside(name: str, neighbours: Neighbours) -> tuple[dict[str, Entry], list[str]] | None:
    """Entries and notes of a file, found by its path from the script or by its name alone; None if
    it does not exist."""
    suffix = Path(name).suffix
    file = neighbours.find(name) if suffix in _FILES else None
    if file is None:
        return None
    place = str(file.path)
    if suffix == ".py":
        source = read_python(file.text, place)
    elif suffix == ".json":
        source = read_json(file.text, place)
    else:
        source = read_yaml(file.text, place, file.path.parent)
    return included_entries(source.entries, file.path, 0), list(source.notes)


def _name_of_file(training: Training) -> str | None:
    """The file of settings that a command names: in `--config`, or the first word that is such a
    file name."""
    config = training.entries.get("config")
    if config is not None and isinstance(config.value, str):
        return config.value
    texts = [word.text for word in training.command.argv]
    # Before the subcommand stand the launcher's own files.
    begin = next(
        (i for i, text in enumerate(texts) if text in ("train", "sft", "pt", "axolotl.cli.train")),
        0,
    )
    if training.form is TRAINER:
        begin = max((i for i, text in enumerate(texts) if text.endswith(".py")), default=0)
    for before, text in pairwise(texts[begin:]):
        # Values of arguments are other files, such as those of data.
        flag = before.lstrip("-").replace("_", "-")
        is_value = before.startswith("--") and "=" not in before and flag not in _SWITCHES
        if is_value:
            continue
        if text.endswith(_FILES) and not text.startswith("-") and "deepspeed" not in text:
            return text
    if training.form is XTUNER and begin + 1 < len(texts) and not texts[begin + 1].startswith("-"):
        return texts[begin + 1]
    return None
