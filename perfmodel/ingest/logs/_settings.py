"""Reads the settings that a log states: these are what really ran, even if the launch script
differs."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

_Read = Callable[[str], Any]


def _whole_number(text: str) -> int | None:
    match = re.match(r"\d[\d,]*$", text.strip())
    return int(match[0].replace(",", "")) if match else None


def _flag(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text.strip().lower())


def _recompute(text: str) -> str | None:
    return {"none": "none", "full": "full", "selective": "selective"}.get(
        text.strip().strip("'\"").lower()
    )


_NAMED: Final[dict[str, tuple[str, _Read]]] = {
    # the arguments of Megatron-LM and the settings of NeMo and Megatron-Bridge
    "world_size": ("devices", _whole_number),
    "tensor_model_parallel_size": ("tp", _whole_number),
    "pipeline_model_parallel_size": ("pp", _whole_number),
    "context_parallel_size": ("cp", _whole_number),
    "expert_model_parallel_size": ("ep", _whole_number),
    "micro_batch_size": ("micro_batch", _whole_number),
    "global_batch_size": ("global_batch", _whole_number),
    "seq_length": ("seq_len", _whole_number),
    "sequence_parallel": ("sequence_parallel", _flag),
    "overlap_grad_reduce": ("overlap_grad_reduce", _flag),
    "overlap_param_gather": ("overlap_param_gather", _flag),
    "tp_comm_overlap": ("tp_overlap", _flag),
    "recompute_granularity": ("recompute", _recompute),
    # DeepSpeed's configuration and llm-foundry's
    "train_batch_size": ("global_batch", _whole_number),
    "global_train_batch_size": ("global_batch", _whole_number),
    "train_micro_batch_size_per_gpu": ("micro_batch", _whole_number),
    "max_seq_len": ("seq_len", _whole_number),
    # MaxText
    "max_target_length": ("seq_len", _whole_number),
    "global_batch_size_to_train_on": ("global_batch", _whole_number),
}
"""Name of a setting -> field of layout or job, and the parser of its value."""
_LINE: Final = re.compile(
    rf"(?<![\w-])({'|'.join(_NAMED)})\s*(?:\.{{2,}}|:|\s{{2,}})\s*(\S.*?)\s*$"
)
"""`name ..... value` (Megatron-LM, DeepSpeed), `name: value` (NeMo, llm-foundry, MaxText)."""
_SENTENCES: Final = (
    # Megatron-LM
    re.compile(r"using world size: (?P<devices>\d+)"),
    re.compile(r"\btensor-model-parallel size: (?P<tp>\d+)"),
    re.compile(r"\bpipeline-model-parallel size: (?P<pp>\d+)"),
    re.compile(r"\bcontext-parallel size: (?P<cp>\d+)"),
    # torchtitan
    re.compile(
        r"local batch size:? \d+, global batch size:? (?P<global_batch>\d+).*?sequence length:? (?P<seq_len>\d+)"
    ),
    re.compile(
        r"Building device mesh with parallelism: .*?\bpp=(?P<pp>\d+).*?\bcp=(?P<cp>\d+).*?\btp=(?P<tp>\d+)"
    ),
    # the Trainer of Hugging Face
    re.compile(r"Total train batch size \(w\. parallel[^=]*= (?P<global_batch>[\d,]+)"),
    re.compile(r"Instantaneous batch size per device = (?P<micro_batch>[\d,]+)"),
    # Composer
    re.compile(r"trainer/device_train_microbatch_size: (?P<micro_batch>\d+)"),
)
_TITAN_MESH: Final = re.compile(r"Building \d-D device mesh with \[([^\]]*)\], \[([^\]]*)\]")
_NANOTRON: Final = re.compile(r"ParallelismArgs\((.{0,400})", re.DOTALL)


def settings_of(lines: Sequence[str], step_lines: Iterable[int]) -> dict[str, Any]:
    """Settings of a run by name, from its log; of several statements the last one counts.

    Args:
        lines: lines of the log.
        step_lines: indices of the lines that report a step. Their fields are not settings.
    """
    settings: dict[str, Any] = {}
    step_indices = frozenset(step_lines)
    for index, line in enumerate(lines):
        # Reports of steps have fields with the same names, `global batch size: 1024`, whose values
        # may be rounded.
        if index in step_indices:
            continue
        # Later lines are closer to the actual run: a list of arguments, then sentences of the
        # framework and its mesh.
        name_and_value = _LINE.search(line)
        if name_and_value is not None:
            field, parse = _NAMED[name_and_value[1]]
            value = parse(name_and_value[2])
            if value is not None:
                settings[field] = value
        for pattern in _SENTENCES:
            sentence = pattern.search(line)
            if sentence is not None:
                settings |= {
                    field: _whole_number(text) for field, text in sentence.groupdict().items()
                }
        mesh = _TITAN_MESH.search(line)
        if mesh is not None:
            settings |= _from_mesh(mesh)
    # nanotron prints its configuration as one Python object over many lines.
    parallelism = _NANOTRON.search("\n".join(lines))
    if parallelism is not None:
        for field in ("dp", "pp", "tp"):
            degree = re.search(rf"\b{field}=(\d+)", parallelism[1])
            if degree is not None:
                settings[field] = int(degree[1])
    return settings


def _from_mesh(mesh: re.Match[str]) -> dict[str, int]:
    """Degrees in torchtitan's line about its device mesh: `['dp_shard', 'tp'], [8, 4]`."""
    names = [name.strip(" '\"") for name in mesh[1].split(",")]
    sizes = [int(size) for size in mesh[2].split(",") if size.strip().isdecimal()]
    degrees = dict(zip(names, sizes, strict=False))
    return {name: degrees[name] for name in ("tp", "pp", "cp") if name in degrees}
