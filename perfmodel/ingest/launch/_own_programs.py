"""Commands of training programs that people write themselves, around DeepSpeed or Accelerate, and of several models.

Such a program has arguments of its own making. Those for the model, the batch and the length have few names, which
are translated here to those of Hugging Face's Trainer (DeepSpeedExamples `training/`, `benchmarks/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._format import undefined
from perfmodel.ingest.launch._trainer import ACCUMULATION, MICRO, OWN_PROGRAM, PROGRAM, TRAINER

OWN_FORM: Final = replace(TRAINER, name="own-program")
"""The format of such commands once their arguments are called as the Trainer's."""
_NAMES: Final[Mapping[str, str]] = {
    "batch_size": MICRO,
    "micro_batch_size": MICRO,
    "train_micro_batch_size": MICRO,
    "per_device_batch_size": MICRO,
    "per_gpu_train_batch_size": MICRO,
    "batch_size_per_gpu": MICRO,
    "micro_train_batch_size": MICRO,
    "grad_accum_steps": ACCUMULATION,
    "gradient_accumulation": ACCUMULATION,
    "accumulation_steps": ACCUMULATION,
    "deepspeed_config": "deepspeed",
    "ds_config": "deepspeed",
    "seq_length": "max_length",
    "seq_len": "max_length",
    "sequence_length": "max_length",
    "context_length": "max_length",
    "max_len": "max_length",
    "pretrain": "model_name_or_path",
    "packing_samples": "packing",
    "adam_offload": "offload",
    "flash_attn": "attn_implementation",
    "use_flash_attn": "attn_implementation",
    "model_path": "model_name_or_path",
    "model_id": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
}
"""Arguments of such programs, and what Hugging Face's Trainer calls the same."""
_MODELS: Final = ("model_name_or_path", "model_name", "model", "base_model")
_SIZES: Final = ("num_layers", "hidden_size", "num_attention_heads")
"""Arguments of Megatron's programs, which state sizes instead of a model's name."""
_LAUNCHERS: Final = ("deepspeed", "accelerate")
_ACTORS: Final = ("actor_model_name_or_path", "actor_rollout_ref.model.path", "actor.model_name_or_path")
"""Arguments of programs that train an actor beside a critic (DeepSpeed-Chat's third step; verl)."""
_REWARDS: Final = ("reward_pretrain", "remote_rm_url", "critic_pretrain")
"""Arguments of OpenRLHF's programs of several models, which call the actor `pretrain`."""


def in_words_of_trainer(texts: Sequence[str], entries: Mapping[str, Entry]) -> dict[str, Entry] | None:
    """Entries of a command under the names of Hugging Face's Trainer; None unless a program of its own fine-tunes.

    Args:
        texts: words of the command.
        entries: its arguments, by names with underscores.
    """
    names = [Path(text).name for text in texts]
    program = _program_at(names)
    if program is None or any(size in entries for size in _SIZES):
        return None
    # Without one of these launchers, programs with such arguments are of every kind (torchvision's, for one).
    is_launched = any(name in _LAUNCHERS for name in names[:program])
    if not is_launched and not {"deepspeed_config", "zero_stage"} & set(entries):
        return None
    renamed: dict[str, Entry] = {}
    for name, entry in entries.items():
        renamed[_NAMES.get(name, name)] = entry
    model = next((renamed[name] for name in _MODELS if name in renamed), None)
    if model is None or not isinstance(model.value, str) or not (set(_NAMES.values()) - set(_MODELS)) & set(renamed):
        return None

    # A stage without a file asks the program to make DeepSpeed's settings, in 16 bits as everybody does it today.
    if "zero_stage" in renamed and "deepspeed" not in renamed:
        renamed["deepspeed"] = Entry(True, renamed["zero_stage"].line)
        if not {"bf16", "fp16", "dtype", "torch_dtype"} & set(renamed):
            renamed["bf16"] = Entry(True, renamed["zero_stage"].line)
    # A batch of the whole step beside one of a device are what DeepSpeed itself is told.
    if "train_batch_size" in renamed and MICRO in renamed and ACCUMULATION not in renamed:
        renamed["train_micro_batch_size_per_gpu"] = renamed.pop(MICRO)
    renamed.pop("module", None)
    name = Entry(names[program], model.line)
    return renamed | {OWN_PROGRAM: name, PROGRAM: name}


def _program_at(names: Sequence[str]) -> int | None:
    """Position of the program in a command: a file of Python, or a module behind `--module`."""
    for i, name in enumerate(names):
        if name.endswith(".py"):
            return i
        if name in ("-m", "--module") and i + 1 < len(names) and "torch.distributed" not in names[i + 1]:
            return i + 1
    return None


def refuse_several_models(entries: Mapping[str, Entry], place: str) -> None:
    """Raise `LaunchFileError` for a command that trains by reinforcement, with what can be asked instead."""
    actor = next((str(entries[name].value) for name in _ACTORS if name in entries), None)
    if actor is None and any(name in entries for name in _REWARDS) and "pretrain" in entries:
        actor = str(entries["pretrain"].value)
    if actor is None:
        return
    actor = "NAME" if undefined(actor) else actor
    stage = entries.get("actor_zero_stage", entries.get("zero_stage"))
    micro = entries.get("per_device_training_batch_size", entries.get("micro_train_batch_size"))
    layout = ["dp=N"]
    if stage is not None:
        layout.append(f"zero={'N' if undefined(stage.value) else stage.value}")
    if micro is not None:
        layout.append(f"micro_batch={'N' if undefined(micro.value) else micro.value}")
    raise LaunchFileError(
        f"{place}: it trains by reinforcement: an actor generates text, further models score it, and several are "
        f"trained; perfmodel predicts one model's training step; for the actor's, give --model {actor} --devices N "
        f"--global-batch N --layout {','.join(layout)} and no --from"
    )
