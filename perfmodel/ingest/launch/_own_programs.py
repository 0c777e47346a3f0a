"""Commands of user-written training programs around DeepSpeed or Accelerate, and of programs with
several models.

Such a program has arguments of its own making. Those for the model, the batch and the length have
few names, which are translated here to those of Hugging Face's Trainer (DeepSpeedExamples
`training/`, `benchmarks/`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._format import undefined
from perfmodel.ingest.launch._openrlhf import is_of_openrlhf, openrlhf_arguments
from perfmodel.ingest.launch._table import read_only
from perfmodel.ingest.launch._trainer import TRAINER
from perfmodel.ingest.launch._trainer_names import (
    ACCUMULATION,
    HALF_ASSUMED,
    MICRO,
    OWN_PROGRAM,
    PROGRAM,
    TENSOR,
)

_WHOLE_BATCH: Final = "train_batch_size"
_DEVICE_BATCH: Final = "train_micro_batch_size_per_gpu"
_OF_DIFFUSERS: Final = "pretrained_model_name_or_path"
"""The argument by which diffusers' scripts name their model."""
OWN_FORM: Final = replace(
    TRAINER,
    name="own-program",
    table=(
        *TRAINER.table,
        read_only(_WHOLE_BATCH, "global_batch"),
        read_only(_DEVICE_BATCH, "micro_batch"),
    ),
)
"""Format of commands of such programs, once their arguments are renamed to the Trainer's."""
_NAMES: Final[Mapping[str, str]] = {
    "batch_size": MICRO,
    "batch_size_training": MICRO,
    "train_bs": MICRO,
    "micro_bs": MICRO,
    "mbs": MICRO,
    "bsz": MICRO,
    "micro_batch_size": MICRO,
    "train_micro_batch_size": MICRO,
    "per_device_batch_size": MICRO,
    "per_gpu_train_batch_size": MICRO,
    "batch_size_per_gpu": MICRO,
    "micro_train_batch_size": MICRO,
    "grad_accum_steps": ACCUMULATION,
    "grad_accum": ACCUMULATION,
    "grad_acc_steps": ACCUMULATION,
    "gradient_accumulation_step": ACCUMULATION,
    "gradient_accumulation": ACCUMULATION,
    "accumulation_steps": ACCUMULATION,
    "deepspeed_config": "deepspeed",
    "ds_config": "deepspeed",
    "ds_file": "deepspeed",
    "seq_length": "max_length",
    "seq_len": "max_length",
    "sequence_length": "max_length",
    "context_length": "max_length",
    "max_len": "max_length",
    "seqlen": "max_length",
    "max_sequence_length": "max_length",
    "pretrain": "model_name_or_path",
    "packing_samples": "packing",
    "param_dtype": "torch_dtype",
    "ds_tensor_parallel_size": TENSOR,
    "optimizer": "optim",
    "flash_attn": "attn_implementation",
    "use_flash_attn": "attn_implementation",
    "model_path": "model_name_or_path",
    "model_id": "model_name_or_path",
    _OF_DIFFUSERS: "model_name_or_path",
}
"""Arguments of such programs, with the corresponding names of Hugging Face's Trainer."""
OWN_NAMES: Final = frozenset(
    name.replace("_", "-") for name in (*_NAMES, "adam_offload", "target_modules", "cutoff_len")
)
"""Arguments of such programs, written with hyphens."""
_MODELS: Final = ("model_name_or_path", "model_name", "model", "base_model")
_SIZES: Final = ("num_layers", "hidden_size", "num_attention_heads")
"""Arguments of Megatron's programs, which state sizes instead of a model's name."""
_LAUNCHERS: Final = ("deepspeed", "accelerate")
_OF_ENGINE: Final = (
    "zero_stage",
    *(name for name, meant in _NAMES.items() if meant == "deepspeed"),
)
_ACTORS: Final = (
    "actor_model_name_or_path",
    "actor_rollout_ref.model.path",
    "actor.model_name_or_path",
)
"""Arguments of programs that train an actor together with a critic (DeepSpeed-Chat's third step;
verl)."""
_SLIME: Final = "actor_num_gpus_per_node"
"""An argument of slime's programs, which state sizes of the model only where Megatron trains it."""
_REWARDS: Final = ("reward_pretrain", "remote_rm_url", "critic_pretrain", "rm_pretrain")
"""Arguments of programs of OpenRLHF and ColossalChat with several models, which call the actor
`pretrain`."""


def in_words_of_trainer(
    texts: Sequence[str], entries: Mapping[str, Entry]
) -> dict[str, Entry] | None:
    """Entries of a command under the names of Hugging Face's Trainer; None if it does not fine-tune
    with a program of its own.

    Args:
        texts: words of the command.
        entries: arguments of the program, by names with underscores.
    """
    names = [Path(text).name for text in texts]
    program = _program_at(names)
    if program is None or any(size in entries for size in _SIZES):
        return None
    if _is_alpaca(entries):
        return _from_alpaca(names[program], entries)
    if is_of_openrlhf(texts):
        entries = openrlhf_arguments(texts, entries)
    # Without one of these launchers, programs with such arguments are of every kind (torchvision's,
    # for one).
    is_launched = any(name in _LAUNCHERS for name in names[:program])
    if not is_launched and not {"deepspeed_config", "zero_stage"} & set(entries):
        return None
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        meant = _NAMES.get(name, name)
        # A file of DeepSpeed's settings says more than its switch.
        if meant == "deepspeed" and isinstance(getattr(renamed.get(meant), "value", None), str):
            continue
        renamed[meant] = entry
    model = next((renamed[name] for name in _MODELS if name in renamed), None)
    if (
        model is None
        or not isinstance(model.value, str)
        or not (set(_NAMES.values()) - set(_MODELS)) & set(renamed)
    ):
        return None

    # A stage without a file asks the program to make DeepSpeed's settings, in 16 bits as everybody
    # does it today.
    if "zero_stage" in renamed and "deepspeed" not in renamed:
        renamed["deepspeed"] = Entry(True, renamed["zero_stage"].line)
        if not {"bf16", "fp16", "dtype", "torch_dtype"} & set(renamed):
            renamed["bf16"] = Entry(True, renamed["zero_stage"].line)
            renamed[HALF_ASSUMED] = Entry("bf16", renamed["zero_stage"].line)
    # diffusers' scripts call the batch of a device so (`examples/dreambooth`).
    if _OF_DIFFUSERS in entries and _WHOLE_BATCH in renamed and MICRO not in renamed:
        renamed[MICRO] = renamed.pop(_WHOLE_BATCH)
    # A batch of the whole step together with one per device are the settings that DeepSpeed
    # receives.
    if _WHOLE_BATCH in renamed and MICRO in renamed and ACCUMULATION not in renamed:
        renamed[_DEVICE_BATCH] = renamed.pop(MICRO)
    renamed.pop("module", None)
    name = Entry(names[program], model.line)
    return renamed | {OWN_PROGRAM: name, PROGRAM: name}


_ALPACA: Final[Mapping[str, str]] = {
    "base_model": "model_name_or_path",
    "batch_size": _WHOLE_BATCH,
    "micro_batch_size": _DEVICE_BATCH,
    "cutoff_len": "max_length",
}
"""Arguments of alpaca-lora's program and its many copies, which call the batch of the whole step
`batch_size` (`finetune.py` of tloen/alpaca-lora)."""
_ALPACA_DEFAULTS: Final[Mapping[str, object]] = {
    _WHOLE_BATCH: 128,
    _DEVICE_BATCH: 4,
    "max_length": 256,
    "lora_r": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "load_in_8bit": True,
    "fp16": True,
    # peft's preparation of weights in 8 bits turns it on.
    "gradient_checkpointing": True,
}


def _is_alpaca(entries: Mapping[str, Entry]) -> bool:
    """Whether a command is of alpaca-lora's kind."""
    names = set(entries)
    return {"base_model", "data_path"} <= names and bool({"micro_batch_size", "cutoff_len"} & names)


def _from_alpaca(program: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of a command of alpaca-lora's kind, with the program's defaults."""
    line = entries["base_model"].line
    renamed = {name: Entry(value, line) for name, value in _ALPACA_DEFAULTS.items()}
    for name, entry in entries.items():
        renamed[_ALPACA.get(name, name)] = entry
    # Fire, which reads the arguments, takes a list in brackets.
    targets = renamed["lora_target_modules"]
    if isinstance(targets.value, str):
        names = re.findall(r"[\w.-]+", targets.value)
        renamed["lora_target_modules"] = replace(targets, value=names)
    name_of_program = Entry(program, line)
    return renamed | {OWN_PROGRAM: name_of_program, PROGRAM: name_of_program}


def makes_engine(entries: Mapping[str, Entry]) -> bool:
    """Whether a program with flags of the Trainer has flags of its own for DeepSpeed: for its file,
    or for a stage.

    `--deepspeed` names a file for the Trainer; without one it is DeepSpeed's own switch
    (`deepspeed.add_config_arguments`).
    """
    named = entries.get("deepspeed")
    names_file = named is not None and isinstance(named.value, str)
    return not names_file and any(name in entries for name in _OF_ENGINE)


def _program_at(names: Sequence[str]) -> int | None:
    """Position of the program in a command: a Python file, or a module after `--module`."""
    for i, name in enumerate(names):
        if name.endswith(".py"):
            return i
        if (
            name in ("-m", "--module")
            and i + 1 < len(names)
            and "torch.distributed" not in names[i + 1]
        ):
            return i + 1
    return None


def refuse_several_models(entries: Mapping[str, Entry], place: str) -> None:
    """Raise `LaunchFileError` for a command that trains by reinforcement, and say which of its
    models can be predicted."""
    actor = next((str(entries[name].value) for name in _ACTORS if name in entries), None)
    if actor is None and any(name in entries for name in _REWARDS) and "pretrain" in entries:
        actor = str(entries["pretrain"].value)
    if (
        actor is None
        and _SLIME in entries
        and "hf_checkpoint" in entries
        and "num_layers" not in entries
    ):
        actor = str(entries["hf_checkpoint"].value)
    if actor is None:
        return
    # The error suggests the flags that predict the actor's own training.
    flags = [f"--model {'NAME' if undefined(actor) else actor}", f"--devices {_devices(entries)}"]
    for flag, names in _ASKED.items():
        flags.append(f"--{flag} {_stated(entries, *names)}")
    prompts = _stated(entries, f"{_VERL_ACTOR}ppo_mini_batch_size")
    answers = _stated(entries, "actor_rollout_ref.rollout.n")
    if prompts != _OPEN and answers != _OPEN:
        # verl counts prompts, each of which has several answers (`fsdp_workers.py`).
        flags[-1] = f"--global-batch {int(prompts) * int(answers)}"
    layout = ["dp=N"]
    for field, names in _LAYOUT.items():
        value = _stated(entries, *names)
        if value != _OPEN or any(name in entries for name in names):
            layout.append(f"{field}={value}")
    raise LaunchFileError(
        f"{place}: it trains by reinforcement: an actor generates text, further models score it, and several are "
        f"trained; perfmodel predicts one model's training step; for the actor's, give {' '.join(flags)} --layout "
        f"{','.join(layout)} and no --from"
    )


_OPEN: Final = "N"
"""Stands for a number that the command does not state."""
_VERL_ACTOR: Final = "actor_rollout_ref.actor."
_ASKED: Final[Mapping[str, tuple[str, ...]]] = {
    "global-batch": (f"{_VERL_ACTOR}ppo_mini_batch_size", "train_batch_size", "global_batch_size"),
}
"""Flags of a prediction, with the arguments that state their values for the actor."""
_LAYOUT: Final[Mapping[str, tuple[str, ...]]] = {
    "tp": (f"{_VERL_ACTOR}megatron.tensor_model_parallel_size", "ds_tensor_parallel_size"),
    "pp": (f"{_VERL_ACTOR}megatron.pipeline_model_parallel_size",),
    "zero": ("actor_zero_stage", "zero_stage"),
    "micro_batch": (
        "per_device_training_batch_size",
        "micro_train_batch_size",
        f"{_VERL_ACTOR}ppo_micro_batch_size_per_gpu",
    ),
}
"""Keys of a layout, with the arguments that state them for the actor."""
_WORLDS: Final = (
    ("trainer.n_gpus_per_node", "trainer.nnodes"),
    ("actor_num_gpus_per_node", "actor_num_nodes"),
)
"""Arguments for the devices of a node and the nodes of the actor."""


def _stated(entries: Mapping[str, Entry], *names: str) -> str:
    """The first of some arguments that has a number in the command."""
    for name in names:
        if name in entries and str(entries[name].value).isdecimal():
            return str(entries[name].value)
    return _OPEN


def _devices(entries: Mapping[str, Entry]) -> str:
    for per_node, nodes in _WORLDS:
        numbers = [_stated(entries, per_node), _stated(entries, nodes) if nodes in entries else "1"]
        if all(number.isdecimal() for number in numbers):
            return str(int(numbers[0]) * int(numbers[1]))
    return _OPEN
