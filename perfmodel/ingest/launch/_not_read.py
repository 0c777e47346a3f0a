"""Refusals of launch files that are recognised but not read: files of other tools, and scripts of
unknown programs."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import followed_script, script_at
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._harm import listed
from perfmodel.ingest.launch._table import Rule
from perfmodel.ingest.launch.shell import SHELLS, Script

_TOOLS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("litgpt", ("out_dir", "train.*", "eval.*")),
    ("litgpt", ("out_dir", "train.*", "checkpoint_dir")),
    ("NeMo Automodel", ("step_scheduler.*", "model.*")),
    ("NeMo Automodel", ("model._target_", "distributed.*", "training.*")),
    ("PaddleNLP", ("per_device_train_batch_size", "tensor_parallel_degree", "sharding")),
    ("PaddleNLP", ("per_device_train_batch_size", "sharding_parallel_degree")),
    ("PaddleNLP", ("per_device_train_batch_size", "unified_checkpoint")),
    ("open_lm", ("train-num-samples", "batch-size")),
    ("a Primus file with a list of modules", ("modules", "platform")),
    ("a training of the flash-attention repository", ("datamodule.*", "trainer.*")),
    ("a training of the flash-attention repository", ("train.gpu_mem",)),
    ("maxdiffusion", ("diffusion_scheduler_config*",)),
    ("maxdiffusion", ("ici_*_parallelism", "pretrained_model_name_or_path")),
    ("maxdiffusion", ("ici_*_parallelism", "unet_checkpoint")),
    ("OLMo", ("global_train_batch_size", "tokenizer.identifier")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.include_bias")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.weight_tying")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.flash_attention")),
    ("OLMo", ("global_train_batch_size", "model.block_type")),
    ("OLMo", ("global_train_batch_size", "model.layer_norm_type")),
    ("OLMo", ("global_train_batch_size", "model.max_sequence_length")),
    ("OLMo", ("global_train_batch_size", "model.mlp_hidden_size")),
    ("OLMo", ("global_train_batch_size", "model.embedding_size")),
    ("OLMo", ("global_train_batch_size", "data.memmap_dtype")),
    ("OLMo", ("global_train_batch_size", "fsdp.wrapping_strategy")),
    ("llm-foundry before MPT", ("global_train_batch_size", "model.mlp_ratio", "model.attn_impl")),
    ("verl", ("actor_rollout_ref.*",)),
    ("AReaL", ("allocation_mode", "actor.*")),
    ("SkyRL", ("trainer.policy.*", "generator.*")),
    ("prime-rl", ("trainer.*", "orchestrator.*")),
    ("torchtune's recipe of reinforcement", ("policy_model._component_",)),
    ("fairseq", ("distributed_training.*", "task.*")),
    ("Lightning", ("seed_everything", "trainer.*")),
    ("Lightning", ("trainer._target_", "trainer.*")),
    ("a Kubernetes job", ("apiVersion", "kind")),
)
"""Tools, and keys (patterns) that their files have all of, as no file has that is read."""
_MODEL_OF_HUGGING_FACE: Final = ("architectures", "model_type")
"""Keys of a model's `config.json`, which is not a launch file."""


def refuse_other_tools(entries: Entries, place: str) -> None:
    """Raise `LaunchFileError`, which names the tool, for a file of an unsupported tool."""
    if all(name in entries for name in _MODEL_OF_HUGGING_FACE):
        raise LaunchFileError(
            f"{place}: this looks like the config of a Hugging Face model; give it with --model instead"
        )
    # Their keys overlap with those of formats that are read (`trainer.*`, `model.*`), and mean
    # other things there.
    for tool, patterns in _TOOLS:
        if all(_has(entries, pattern) for pattern in patterns):
            message = f"looks like {tool}, which perfmodel does not read; give --model, --layout and so on instead"
            raise LaunchFileError(f"{place}: {message}")


_PYTHON_TOOLS: Final = {
    "xtuner.v1": "a configuration of XTuner 1",
    "olmo_core": "a script of OLMo-core",
    "axlearn": "a trainer of AXLearn",
    "composer": "a script of Composer",
    "litgpt": "a script of litgpt",
    "nemo_automodel": "a script of NeMo Automodel",
    "levanter": "a script of levanter",
    "lightning": "a script of Lightning",
    "pytorch_lightning": "a script of Lightning",
}
"""Packages whose programs are not read, by the modules that a Python file imports."""
_IMPORTED: Final = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


def refuse_python(text: str, place: str) -> None:
    """Raise `LaunchFileError`, which names the tool, for a Python file that imports a training
    program that is not read."""
    for module in _IMPORTED.findall(text):
        for package, described in _PYTHON_TOOLS.items():
            if module == package or module.startswith(f"{package}."):
                raise LaunchFileError(
                    f"{place}: looks like {described}, which perfmodel does not read; give --model, --layout and so on "
                    "instead"
                )


def refuse_plain_lightning(entries: Entries, place: str, table: Sequence[Rule]) -> None:
    """Raise `LaunchFileError` for a file of Lightning that has NeMo's trainer, but none of the keys
    for Megatron.

    Args:
        entries: settings of the file.
        place: path of the file, for messages.
        table: the rules of NeMo's format.
    """
    for rule in table:
        for name in rule.keys:
            if name in entries and not name.startswith("trainer."):
                return
    raise LaunchFileError(
        f"{place}: looks like a training of Lightning without Megatron, which perfmodel does not read; give "
        "--model, --layout and so on instead"
    )


def _has(entries: Entries, pattern: str) -> bool:
    return any(fnmatchcase(key, pattern) for key in entries)


def refuse_script(
    text: str,
    place: str,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None,
    known: frozenset[str],
) -> None:
    """Raise `LaunchFileError` for a shell script without a training command, if the script tells
    why it has none.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.
        known: arguments of training programs.
    """
    script, _ = followed_script(text, place, arguments, variables)
    programs = _programs(script)
    # A wrapper of another script is useless by itself: the user must know which file is missing.
    if script.absent and not programs:
        several = len(script.absent) > 1
        raise LaunchFileError(
            f"{place}: it has no training command; it runs {listed(script.absent)}, which {'are' if several else 'is'} "
            f"not in the same folder; put {'them' if several else 'it'} there, or give the "
            "script that trains"
        )
    if programs:
        raise LaunchFileError(
            f"{place}: it runs {listed(programs)}, whose arguments perfmodel does not know; add the lines that "
            "perfmodel hook prints and give the file that they write, or give --model, --layout and so on instead"
        )
    other_programs = _other_programs(script, known)
    if other_programs:
        raise LaunchFileError(
            f"{place}: it runs {listed(other_programs)}, whose arguments perfmodel does not know; give --model, --layout "
            "and so on instead"
        )
    # Scripts keep arguments in files of their own, which others source.
    stated = {name for name in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text) if name in known}
    if len(stated) >= _FEWEST_ARGUMENTS and not arguments and _POSITIONAL.search(text):
        raise LaunchFileError(
            f"{place}: it starts no training program without arguments of its own; write them after its name, as in "
            f'--from "{PurePath(place).name} 8 24"'
        )
    if len(stated) >= _FEWEST_ARGUMENTS:
        raise LaunchFileError(
            f"{place}: it sets arguments of a training ({listed(sorted(f'--{name}' for name in stated))}) but starts "
            "no program; put it into the folder of the script that sources it, and give that script"
        )


_POSITIONAL: Final = re.compile(r"\$(?:[1-9@*#]|\{[1-9@*#])")
"""Pattern of a shell script's own arguments."""
_FEWEST_ARGUMENTS: Final = 2
"""Fewest arguments of training programs in a script that sets them for others."""


def _other_programs(script: Script, known: frozenset[str]) -> list[str]:
    """Programs that are no Python files (`fairseq-train`), once each: those with arguments as
    programs that train have them."""
    names: list[str] = []
    for command in script.commands:
        position = next((i for i, word in enumerate(command.argv) if word.text[:1] == "-"), 0)
        flags = {word.text[2:].partition("=")[0] for word in command.argv[position:]}
        program = PurePath(command.argv[0].text).name
        if position == 0 or program in SHELLS or program.endswith(".sh"):
            continue
        if len(flags & known) >= _FEWEST_ARGUMENTS and program not in names:
            names.append(program)
    return names


def _programs(script: Script) -> list[str]:
    """Python programs that a script runs, once each."""
    names: list[str] = []
    for command in script.commands:
        position = script_at(command.argv, frozenset())
        name = "" if position is None else command.argv[position].text
        if name and name not in names:
            names.append(name)
    return names
