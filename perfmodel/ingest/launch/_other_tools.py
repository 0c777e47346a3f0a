"""Recognises files of unsupported tools, some of which share keys with supported formats."""

from fnmatch import fnmatchcase
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entries

_TOOLS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("litgpt", ("out_dir", "train.*", "eval.*")),
    ("litgpt", ("out_dir", "train.*", "checkpoint_dir")),
    ("NeMo Automodel", ("step_scheduler.*", "model.*")),
    ("a training of the flash-attention repository", ("datamodule.*", "trainer.*")),
    ("a training of the flash-attention repository", ("train.gpu_mem",)),
    ("maxdiffusion", ("diffusion_scheduler_config*",)),
    ("maxdiffusion", ("ici_*_parallelism", "pretrained_model_name_or_path")),
    ("maxdiffusion", ("ici_*_parallelism", "unet_checkpoint")),
    ("OLMo", ("global_train_batch_size", "tokenizer.identifier")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.include_bias")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.weight_tying")),
    ("OLMo", ("global_train_batch_size", "model.mlp_ratio", "model.flash_attention")),
    ("llm-foundry before MPT", ("global_train_batch_size", "model.mlp_ratio", "model.attn_impl")),
    ("verl", ("actor_rollout_ref.*",)),
    ("AReaL", ("allocation_mode", "actor.*")),
    ("SkyRL", ("trainer.policy.*", "generator.*")),
    ("prime-rl", ("trainer.*", "orchestrator.*")),
    ("torchtune's recipe of reinforcement", ("policy_model._component_",)),
    ("fairseq", ("distributed_training.*", "task.*")),
    ("Lightning", ("seed_everything", "trainer.*")),
    ("a Kubernetes job", ("apiVersion", "kind")),
)
"""Tools, and keys (patterns) that their files have all of, as no file has that is read."""
_MODEL_OF_HUGGING_FACE: Final = ("architectures", "model_type")
"""Keys of a model's `config.json`, which is no launch file."""


def refuse_other_tools(entries: Entries, place: str) -> None:
    """Raise `LaunchFileError`, which names the tool, for a file of an unsupported tool."""
    if all(name in entries for name in _MODEL_OF_HUGGING_FACE):
        raise LaunchFileError(
            f"{place}: this looks like the config of a Hugging Face model; give it with --model instead"
        )
    # Their keys overlap with those of formats that are read (`trainer.*`, `model.*`), and mean other things there.
    for tool, patterns in _TOOLS:
        if all(_has(entries, pattern) for pattern in patterns):
            message = f"looks like {tool}, which perfmodel does not read; give --model, --layout and so on instead"
            raise LaunchFileError(f"{place}: {message}")


def _has(entries: Entries, pattern: str) -> bool:
    return any(fnmatchcase(key, pattern) for key in entries)
