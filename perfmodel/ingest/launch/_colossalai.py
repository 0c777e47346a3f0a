"""Commands of Colossal-AI's examples and applications, which choose a plugin of its Booster.

`examples/language/llama/benchmark.py`, `applications/Colossal-LLaMA/train.py` and
`applications/ColossalChat/examples/training_scripts/` of hpcaitech/ColossalAI.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry
from perfmodel.ingest.launch._finetuning import (
    Adapters,
    is_on,
    objective_fields,
    padding_note,
    sharded_sequences,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._llm_foundry import fsdp_offload
from perfmodel.ingest.launch._model import LLAMA_LAYERS
from perfmodel.ingest.launch._table import (
    NUMBER,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    read_only,
    words,
)
from perfmodel.ingest.launch._trainer import WORLD_RULE, named_model
from perfmodel.ingest.launch._trainer_names import DEFAULTS, PROGRAM
from perfmodel.ingest.launch.shell import Word

_PLUGIN: Final = "plugin"
_PLUGINS: Final = (
    "gemini",
    "gemini_auto",
    "gemini_cuda",
    "gemini_cpu",
    "zero1",
    "zero1_cpu",
    "zero2",
    "zero2_cpu",
    "low_level_zero",
    "3d",
    "3d_cpu",
    "hybrid_parallel",
    "moe",
    "ddp",
    "torch_ddp",
    "torch_ddp_fp16",
    "fsdp",
    "fsdp_cpu",
    "torch_fsdp",
)
"""Words for plugins of the Booster in Colossal-AI's programs."""
_LAUNCHER: Final = "colossalai"
_BENCHMARK: Final = "benchmark.py"
_MODEL: Final = "model_name_or_path"
_MICRO: Final = "mbs"
_SIZE: Final = "config"
_LENGTH: Final = "max_length"
_PRECISION: Final = "mixed_precision"
_RECOMPUTE: Final = "grad_checkpoint"
_FLASH: Final = "use_flash_attn"
_ZERO: Final = "zero_stage"
_OFFLOAD: Final = "zero_cpu_offload"
_SEQUENCE: Final = ("sp", "sp_mode", "enable_sequence_parallelism")
_GEMINI: Final = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
_FROZEN: Final = "freeze_non_embeds_params"
_NAMES: Final[Mapping[str, str]] = {
    "micro_batch_size": "batch_size",
    "max_len": _LENGTH,
    "microbatch_size": _MICRO,
    "mbs": _MICRO,
    "zero": _ZERO,
    "gradient_accumulation_steps": "accumulation_steps",
    "use_grad_checkpoint": _RECOMPUTE,
    "xformers": _FLASH,
    "flash_attention": _FLASH,
    "pretrain": _MODEL,
    "pretrained": _MODEL,
    "model_path": _MODEL,
    "pretrained_model_name_or_path": _MODEL,
}
"""Arguments that some programs have under another name."""
_SHORT: Final[Mapping[str, str]] = {
    "-c": _SIZE,
    "-p": _PLUGIN,
    "-b": "batch_size",
    "-g": _RECOMPUTE,
    "-l": _LENGTH,
    "-a": _FLASH,
}
"""Short options, which mean the same in all programs that have them (`-x` does not)."""


@dataclass(frozen=True)
class _Program:
    """A program of Colossal-AI, by its name and arguments, and its defaults."""

    name: re.Pattern[str]
    """Pattern of the program's file name."""
    mark: str
    """An argument that all of its commands have, or empty."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PROGRAMS: Final = (
    # `--mixed_precision` does not exist in the benchmarks, which run in bf16.
    _Program(
        re.compile(r"^benchmark\.py$"),
        "",
        {
            _SIZE: "7b",
            _PLUGIN: "gemini",
            "batch_size": 2,
            _LENGTH: 4096,
            _MICRO: 1,
            _PRECISION: "bf16",
        },
    ),
    # Colossal-LLaMA
    _Program(
        re.compile(r"^train\.py$"),
        "pretrained",
        {
            _PLUGIN: "gemini",
            "batch_size": 2,
            _LENGTH: 8192,
            _MICRO: 1,
            _PRECISION: "fp16",
            "accumulation_steps": 1,
        },
    ),
    # ColossalChat
    _Program(
        re.compile(r"^train_sft\.py$"),
        "pretrain",
        {
            _PLUGIN: "gemini",
            "batch_size": 4,
            _LENGTH: 512,
            _PRECISION: "bf16",
            "accumulation_steps": 8,
        },
    ),
    _Program(
        re.compile(r"^train_(dpo|kto|orpo|rm)\.py$"),
        "pretrain",
        {
            _PLUGIN: "gemini",
            "batch_size": 4,
            _LENGTH: 2048,
            _PRECISION: "fp16",
            "accumulation_steps": 8,
        },
    ),
    # The examples for Llama 2, which share their arguments.
    _Program(
        re.compile(r"^(finetune|pretrain|train)\.py$"),
        "model_path",
        {_PLUGIN: "gemini", "batch_size": 2, _LENGTH: 4096, _PRECISION: "fp16"},
    ),
    _Program(
        re.compile(r"^(pretrain|train)\.py$"),
        _SIZE,
        {_PLUGIN: "gemini", "batch_size": 2, _LENGTH: 4096, _PRECISION: "fp16"},
    ),
)
"""Programs whose defaults are known; the first that fits a command is its program."""


def is_of_colossalai(texts: Sequence[str]) -> bool:
    """Whether a command starts a program that chooses a plugin of Colossal-AI's Booster."""
    names = [PurePosixPath(text).name for text in texts]
    by_launcher = any(
        name == _LAUNCHER and names[i + 1 : i + 2] == ["run"] for i, name in enumerate(names)
    )
    for i, text in enumerate(texts):
        name, sign, value = text.partition("=")
        if name == "--plugin" or (name == "-p" and by_launcher):
            word = value if sign else " ".join(texts[i + 1 : i + 2])
            return word in _PLUGINS
    # The benchmarks need no argument at all.
    return by_launcher and _BENCHMARK in names


def colossalai_words(argv: Sequence[Word]) -> list[Word]:
    """The command with long options in place of the program's short ones."""
    long_words: list[Word] = []
    is_behind_program = False
    for i, word in enumerate(argv):
        name = _SHORT.get(word.text, "") if is_behind_program else ""
        if is_behind_program and word.text == "-x":
            # The benchmarks' switch for fused attention; elsewhere the precision.
            has_value = i + 1 < len(argv) and not argv[i + 1].text.startswith("-")
            name = _PRECISION if has_value else _FLASH
        long_words.append(Word(f"--{name}", word.line) if name else word)
        is_behind_program = is_behind_program or word.text.endswith(".py")
    return long_words


def colossalai_settings(texts: Sequence[str], entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Settings of a command under the names of this format, with the program's defaults.

    Args:
        texts: words of the command.
        entries: arguments of the program, by names with underscores.
    """
    stated = {
        _NAMES.get(name, name): entry
        for name, entry in entries.items()
        # A variable that is empty in the script states no model.
        if not (_NAMES.get(name, name) == _MODEL and not isinstance(entry.value, str))
    }
    line = next((entry.line for entry in entries.values()), 0)
    path = next((text for text in texts if text.endswith(".py")), "")
    name = PurePosixPath(path).name
    stated[PROGRAM] = Entry(name, line)
    program = next(
        (
            program
            for program in _PROGRAMS
            if program.name.search(name) and (not program.mark or program.mark in entries)
        ),
        None,
    )
    if program is None:
        return stated
    absent = {key: value for key, value in program.defaults.items() if key not in stated}
    # Only pipelines cut the batch of a replica.
    if "pp" not in stated:
        absent.pop(_MICRO, None)
    if _MODEL in stated:
        absent.pop(_SIZE, None)
    if absent:
        settings = ", ".join(f"{key}={value}" for key, value in absent.items())
        stated[DEFAULTS] = Entry(f"{settings} (defaults of Colossal-AI's {name})", line)
    return {key: Entry(value, line) for key, value in absent.items()} | stated


def _number(settings: Mapping[str, Any], name: str, usual: int) -> int:
    return WHOLE_OR_NONE.read(settings.get(name, usual))


def _degrees(settings: Mapping[str, Any]) -> Fields:
    """Degrees of tensor and pipeline parallelism, and chunks of interleaved pipelines."""
    fields: Fields = {"tp": WHOLE.read(settings.get("tp", 1))}
    plugin = str(settings.get(_PLUGIN))
    if plugin in ("3d", "3d_cpu", "hybrid_parallel", "moe"):
        fields["pp"] = WHOLE.read(settings.get("pp", 1))
        # Programs with this word set the degrees themselves (tp=4 and pp=2 in the examples for
        # Llama 2).
        if plugin in ("hybrid_parallel", "moe") and not {"tp", "pp"} & set(settings):
            fields["doubt.layout"] = (
                f"the layout, the precision and memory may be wrong: the program sets the degrees of {plugin}, which the "
                "command does not state; give --layout tp=N,pp=N"
            )
        style = settings.get("pp_style", "1f1b")
        if style == "interleaved":
            fields |= {"vpp": WHOLE.read(settings.get("n_chunks", 1)), "schedule": "interleaved"}
        elif style == "zbv":
            fields["schedule"] = "zb-v"
    return fields


def _states(settings: Mapping[str, Any]) -> Fields:
    """What shards the model's states, and what of them stays on the host."""
    plugin = words({name: name for name in _PLUGINS}).read(settings.get(_PLUGIN, "gemini"))
    if plugin.startswith("gemini"):
        return _gemini(plugin, settings)
    if plugin.startswith(("fsdp", "torch_fsdp")):
        return {"zero": 3} | fsdp_offload(3, plugin.endswith("_cpu"))
    if "ddp" in plugin:
        return {"zero": 0}
    on_host = plugin.endswith("_cpu") or is_on(settings.get(_OFFLOAD))
    stage = _number(settings, _ZERO, 0)
    if plugin.startswith("zero") or plugin == "low_level_zero":
        stage = 2 if plugin.startswith("zero2") else 1
    # Without sharding there is nothing to offload (`HybridParallelPlugin`, `cpu_offload`).
    offload = {"offload_states": "optimizer"} if on_host and stage else {}
    return {"zero": stage} | offload


def _gemini(plugin: str, settings: Mapping[str, Any]) -> Fields:
    """Chunks of Gemini: weights, gradients and states are sharded, and may stay on the host."""
    fields: Fields = {"zero": 3}
    copies = WHOLE.read(settings.get("extra_dp", 1))
    if copies > 1:
        fields["replicate"] = copies
    if plugin == "gemini_auto":
        fields["doubt.offload"] = (
            "memory may be wrong: gemini_auto moves states to the host as memory demands, but the prediction keeps them "
            "on the device"
        )
        return fields
    if plugin == "gemini_cpu":
        return fields | {"offload_states": "weights"}
    shares = [NUMBER.read(settings.get(name, int("shard" in name))) for name in _GEMINI]
    sharded, optimizer, weights = shares
    if weights == 1:
        fields["offload_states"] = "weights"
    elif optimizer == 1:
        fields["offload_states"] = "optimizer"
    if sharded < 1 or 0 < optimizer < 1 or 0 < weights < 1:
        fields["doubt.offload"] = (
            "memory may be wrong: the command shards or offloads a share of the states "
            f"({', '.join(f'{name}={share:g}' for name, share in zip(_GEMINI, shares, strict=True))}), but the "
            "prediction takes all or none"
        )
    return fields


def _shared_sequences(settings: Mapping[str, Any]) -> Fields:
    """Sequence parallelism: of the ranks that share weights, or of further ranks."""
    ranks = WHOLE.read(settings.get("sp", 1))
    mode = settings.get("sp_mode", "all_to_all" if ranks > 1 else "split_gather")
    if mode in ("split_gather", "ring"):
        # These share sequences among the tensor-parallel ranks (`HybridParallelPlugin`,
        # `sequence_parallelism_mode`).
        is_used = ranks > 1 or is_on(settings.get("enable_sequence_parallelism"))
        return {"sequence_parallel": is_used and WHOLE.read(settings.get("tp", 1)) > 1}
    kinds = words({"all_to_all": "ulysses", "ring_attn": "ring"})
    return sharded_sequences(ranks, kinds.read(mode))


def _batches(settings: Mapping[str, Any]) -> Fields:
    """Sequences of a replica between two accumulations, and of a pass through the pipeline."""
    fields: Fields = {"grad_accum": WHOLE.read(settings.get("accumulation_steps", 1))}
    if "batch_size" in settings:
        fields["local_batch"] = WHOLE.read(settings["batch_size"])
        # ColossalChat's pipelines get the batch as one piece.
        pieces = settings.get(_MICRO, settings["batch_size"])
        fields["pipeline_micro_batch"] = WHOLE.read(pieces)
    return fields


_SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "100m": {"layers": 4, "hidden": 1024, "heads": 32, "kv_heads": 32, "ffn_hidden": 2048},
    "5b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 11008},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 11008},
    "13b": {"layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn_hidden": 13824},
    "30b": {"layers": 60, "hidden": 6656, "heads": 52, "kv_heads": 52, "ffn_hidden": 17888},
    "65b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn_hidden": 22016},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672},
}
"""`MODEL_CONFIGS` of the examples for Llama."""
_LLAMA: Final = LLAMA_LAYERS | {"model.vocab": 32000, "model.tied_embeddings": False}


def _sized_model(settings: Mapping[str, Any]) -> Fields:
    """The model by the name of a configuration in the program, or by its identifier on a hub."""
    size = TEXT.read(settings[_SIZE])
    if size in _SIZES:
        sizes = {f"model.{name}": value for name, value in _SIZES[size].items()}
        note = f"model: configuration {size} of Colossal-AI's examples for Llama"
        return sizes | _LLAMA | {"note.model": note}
    if "/" in size:
        return {"model": size}
    raise BadValue(
        f"must be a configuration of the examples for Llama ({', '.join(_SIZES)}), got {size!r}"
    )


def _precision(settings: Mapping[str, Any]) -> Fields:
    plugin = str(settings.get(_PLUGIN, ""))
    named = settings.get(_PRECISION)
    fields: Fields = {}
    # The benchmarks' FSDP runs in fp16, and one word of an example names the precision.
    is_benchmark = settings.get(PROGRAM) == _BENCHMARK
    if plugin == "torch_ddp_fp16" or (is_benchmark and plugin in ("fsdp", "fsdp_cpu")):
        fields["dtype"] = "fp16"
    elif named is not None:
        fields["dtype"] = words({"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}).read(named)
    elif plugin == "torch_ddp":
        fields["dtype"] = "fp32"
    else:
        fields |= {"dtype": "fp16", "note.dtype": "dtype=fp16 (the command states no precision)"}
    # The plugin of plain data parallelism has no master weights beside those that the program
    # loads.
    if plugin == "ddp":
        fields["doubt.masters"] = (
            "memory may be wrong: plugin ddp trains the 16-bit weights themselves, but the prediction counts fp32 "
            "master weights"
        )
    return fields


def _recompute(settings: Mapping[str, Any]) -> Fields:
    """Recomputation of whole layers, which ColossalChat turns off under adapters."""
    has_adapters = _number(settings, "lora_rank", 0) > 0
    is_used = is_on(settings.get(_RECOMPUTE)) and not has_adapters
    return {"recompute": "full" if is_used else "none"}


def _adapters(settings: Mapping[str, Any]) -> Fields:
    rank = WHOLE_OR_NONE.read(settings["lora_rank"])
    return Adapters(rank=rank, targets="all-linear").fields if rank else {}


def _frozen(settings: Mapping[str, Any]) -> Fields:
    if not is_on(settings[_FROZEN]):
        return {}
    return {
        "doubt.trained": (
            f"the training method may be wrong: {_FROZEN} trains the embedding alone, but all weights are predicted to "
            "be trained"
        )
    }


COLOSSALAI: Final = LaunchFormat(
    name="colossalai",
    syntax="arguments",
    frameworks=("colossalai",),
    marks=(_PLUGIN,),
    table=(
        WORLD_RULE,
        Rule(
            keys=(_PLUGIN, "tp", "pp", "pp_style", "n_chunks"),
            read=_degrees,
            fields=("tp", "pp"),
        ),
        Rule(
            keys=(_PLUGIN, _ZERO, _OFFLOAD, "extra_dp", *_GEMINI),
            read=_states,
            fields=("zero",),
        ),
        Rule(keys=(*_SEQUENCE, "tp"), read=_shared_sequences),
        Rule(keys=("batch_size", _MICRO, "accumulation_steps"), read=_batches),
        Rule(keys=(_SIZE,), read=_sized_model, fields=("model",)),
        Rule(keys=(_MODEL,), read=named_model, fields=("model",)),
        read_only(_LENGTH, "seq_len"),
        Rule(keys=(_PLUGIN, _PRECISION, PROGRAM), read=_precision, fields=("dtype",)),
        Rule(keys=(_PLUGIN, _RECOMPUTE, "lora_rank"), read=_recompute, fields=("recompute",)),
        Rule(keys=("lora_rank",), read=_adapters, fields=("adapter_rank",)),
        Rule(keys=(_FROZEN,), read=_frozen),
        Rule(
            keys=(_FLASH,),
            read=lambda settings: {"flash_attention": is_on(settings[_FLASH])},
            fields=("flash_attention",),
        ),
        Rule(
            keys=(PROGRAM,),
            read=lambda settings: objective_fields(settings[PROGRAM]),
        ),
        Rule(keys=(DEFAULTS,), read=lambda settings: {"note.program": settings[DEFAULTS]}),
        # The benchmarks make sequences of full length.
        Rule(
            keys=(_LENGTH, PROGRAM),
            read=lambda settings: padding_note(_LENGTH, settings.get(PROGRAM) == _BENCHMARK),
        ),
    ),
    harmless=patterns(
        "*dataset* *_dir *_path *epoch* num_steps ignore_steps lr *learning_rate* weight_decay weigth_decay grad_clip",
        "*warmup* save_interval config_file *checkpoint_path tokenizer* pad_token padding_mode *wandb* log_* profile nsys",
        "merge_lora_weights lora_train_bias beta num_samples benchmark mode task_name load use_neft skip_save* host*",
        "master_* memory_limit disable_async_reduce prefetch_num no_cache overlap_* load_checkpoint seed",
    ),
)
"""The format of their commands, which is read and not written."""
