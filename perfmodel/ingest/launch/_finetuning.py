"""Settings that fine-tuning front ends share: adapters, sharding, precision and optimizers.

They all run on PyTorch alone, on its FSDP or on DeepSpeed, so that each of their files is predicted
by one of these.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perfmodel.ingest.launch._adapters import adapter_modules
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._llm_foundry import fsdp_offload, sharding, stage_of_resharding
from perfmodel.ingest.launch._table import (
    NUMBER,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    Values,
    words,
)

_BASE_WEIGHTS: Final = {4: "nf4", 8: "int8"}
"""Storage of frozen weights by their number of bits (bitsandbytes)."""
_LORA: Final = ("lora", "qlora", "qalora", "longlora")


_NARROW_NAMES: Final = (
    (re.compile(r"(?<![a-z0-9])(2-?bit|int2)(?![a-z0-9])"), 2),
    (re.compile(r"(?<![a-z0-9])(gptq|awq|nf4|4-?bit|int4|w4a16|fp4|nvfp4|mxfp4)(?![a-z0-9])"), 4),
    (re.compile(r"(?<![a-z0-9])(8-?bit|int8|w8a8|w8a16|fp8)(?![a-z0-9])"), 8),
)
"""Parts of a checkpoint's name that state the number of bits of its weights."""


def bits_by_name(model: Any) -> int:
    """Bits of the weights of a checkpoint that is quantized by its name (`...-GPTQ`,
    `...-bnb-4bit`); 0 for others."""
    lower_name = str(model).lower().replace("_", "-")
    return next((bits for pattern, bits in _NARROW_NAMES if pattern.search(lower_name)), 0)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A file's settings for adapters, whether or not it uses any."""

    rank: Any
    targets: Any = None
    """Products that have adapters: a list, names with commas, or a word for all; None if the file
    does not state them."""
    dropout: Any = None
    bits: int = 0
    """Bits of each frozen weight; 0 if they are stored in the type of the products."""

    @property
    def fields(self) -> Fields:
        """The LoRA fields; all weights except adapters are frozen."""
        fields: Fields = {"frozen": True, "adapter_rank": WHOLE.read(self.rank)} | adapter_modules(
            self.targets
        )
        if self.dropout is not None:
            fields["adapter_dropout"] = NUMBER.read(self.dropout) > 0
        if self.bits in _BASE_WEIGHTS:
            fields["base_weights"] = _BASE_WEIGHTS[self.bits]
        elif self.bits:
            fields["doubt.quantized"] = (
                f"memory may be wrong: the file keeps frozen weights in {self.bits} bits, but the prediction counts 16"
            )
        return fields


def tuning_fields(kind: Any, key: str, adapters: Adapters) -> Fields:
    """Which weights are trained, from a front end's setting for it.

    Args:
        kind: the word, such as `full` or `lora`.
        key: the key that says it.
        adapters: fields of the adapters, used unless the word is `full`.
    """
    word = str(kind).lower()
    if word == "full":
        return {}
    if word == "freeze":
        return {
            "doubt.trained": (
                f"the training method may be wrong: {key}=freeze trains some of the weights, but all are "
                "predicted to be trained"
            )
        }
    fields = adapters.fields
    # DoRA, VeRA and IA3 also train few weights beside frozen ones. LoRA is the closest modelled
    # method.
    if word not in _LORA:
        fields["doubt.trained"] = (
            f"the training method may be wrong: {key} {kind} is predicted as LoRA"
        )
    return fields


def accumulation_fields(
    settings: Mapping[str, Any], micro: str, passes: str, default_micro: int
) -> Fields:
    """Sequences per device and pass, and accumulation steps.

    Args:
        settings: values of the file.
        micro: key of the sequences per device.
        passes: key of the accumulation.
        default_micro: sequences where nothing says them.
    """
    return {
        "micro_batch": WHOLE.read(settings.get(micro, default_micro)),
        "grad_accum": WHOLE.read(settings.get(passes, 1)),
    }


def is_on(value: Any) -> bool:
    """Whether a switch is on; words other than true or false (`auto`, `offload`) are accepted
    too."""
    return value not in (None, False, "", [], 0) and str(value).lower() not in (
        "false",
        "no",
        "none",
        "0",
    )


_OBJECTIVE: Final = re.compile(
    r"(?<![a-z])(dpo|ipo|orpo|kto|cpo|simpo|ppo|grpo|rloo|gkd|kd|rm|prm|reward\w*|rlhf|distill\w*|distillation)(?![a-z])",
    re.IGNORECASE,
)
"""Words in names of programs and losses that mean preference tuning, reinforcement, reward models
or distillation."""


def objective_fields(word: Any, key: str = "") -> Fields:
    """Record the doubt that an objective raises, if it runs other models or further passes. Only
    training on plain text raises none.

    Args:
        word: the objective that a file states, or the name of a program or loss.
        key: the key that says it; empty for the program itself.
    """
    # `DPOLoss` is one word, and so is `train_dpo.py`.
    spaced = re.sub(
        r"([a-z])([A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\3 \2", str(word).rpartition("/")[2]
    ).replace("_", " ")
    if not _OBJECTIVE.search(spaced):
        return {}
    said = f"{key}={word}" if key else word
    return {
        "doubt.stage": (
            f"the training method may be wrong: {said} runs further models or passes, but plain fine-tuning is "
            "predicted"
        )
    }


def method_fields(word: Any, key: str, plain: Collection[str]) -> Fields:
    """Record the doubt that a training method raises, by a key that states nothing else.

    Forks add methods of their own, so that every word but the plain ones raises it.

    Args:
        word: the method that a file states.
        key: the key that says it.
        plain: the methods that run one model once, in lower case.
    """
    if not is_on(word) or str(word).lower() in plain:
        return {}
    known = objective_fields(word, key)
    if known:
        return known
    return {
        "doubt.stage": (
            f"the training method may be wrong: perfmodel does not know {key}={word}; plain fine-tuning is predicted"
        )
    }


_OPTIMIZER_WORDS: Final = (
    ("adafactor", "adafactor"),
    ("adam", "adam"),
    ("lion", "lion"),
    ("muon", "muon"),
    ("sgd", "sgd"),
)
"""Parts of the names of optimizers; the first that fits decides."""
_NOT_PLAIN: Final = (
    "galore",
    "apollo",
    "lomo",
    "badam",
    "shampoo",
    "adam_mini",
    "soap",
    "dion",
    "lisa",
)
"""Optimizers whose states differ from those of the optimizer that their names begin with."""


def optimizer_fields(name: Any) -> Fields:
    """The optimizer that a name of Hugging Face's Trainer, torch or bitsandbytes stands for
    (`adamw_torch_fused`, `paged_adamw_8bit`, `torch.optim.AdamW`)."""
    if not isinstance(name, str):
        raise BadValue(f"must be the name of an optimizer, got {name!r}")
    lower_name = name.rpartition(".")[2].lower()
    known = next((optimizer for part, optimizer in _OPTIMIZER_WORDS if part in lower_name), None)
    if known is None or any(part in lower_name for part in _NOT_PLAIN):
        return {"doubt.optimizer": f"memory may be wrong: optimizer {name} is predicted as Adam"}
    # bitsandbytes quantizes states block by block; of its optimizers only 8-bit Adam has a record
    # of states here.
    narrow = any(part in lower_name for part in ("8bit", "8_bit", "4bit"))
    if narrow and known == "adam":
        # torchao's 4-bit states are the closest to these, and take half as much.
        if "4bit" in lower_name:
            return {
                "optimizer": "adam8bit",
                "doubt.optimizer": f"memory may be wrong: the states of optimizer {name} are predicted in 8 bits",
            }
        return {"optimizer": "adam8bit"}
    fields: Fields = {"optimizer": known}
    if narrow:
        fields["doubt.optimizer"] = (
            f"memory may be wrong: the states of optimizer {name} are predicted in 16 bits"
        )
    if lower_name.startswith("paged"):
        fields["note.optimizer"] = (
            f"optimizer {name} may move its states to the host, but the prediction keeps them on the device"
        )
    return fields


def optimizer_rule(*names: str) -> Rule:
    """The rule that reads an optimizer from its name."""
    return Rule(
        keys=names,
        fields=("optimizer",),
        read=lambda settings: optimizer_fields(next(iter(settings.values()))),
    )


_ATTENTION: Final = {
    "fa2": True,
    "fa3": True,
    "fa": True,
    "sdpa": True,
    "auto": True,
    "flash": True,
    "flash_attn": True,
    "flash_attention": True,
    "flash_attention2": True,
    "flash_attention3": True,
    "flash_attention_2": True,
    "flash_attention_3": True,
    "flash_attention_4": True,
    # OLMo-core's backends (`nn/attention/backend.py`); that of torch is its fused attention.
    "flash_2": True,
    "flash_3": True,
    "flash_4": True,
    "te": True,
    "torch": True,
    "flex_attention": True,
    "xformers": True,
    "disabled": False,
    "off": False,
    "eager": False,
    "true": True,
    "false": False,
    True: True,
    False: False,
}
_ATTENTION_WORDS: Final = words(_ATTENTION)


def _read_attention(value: Any) -> bool:
    # Kernels of the hub are named by their repository: `kernels-community/vllm-flash-attn3`.
    if isinstance(value, str) and "/" in value and ("flash" in value or "attn" in value):
        return True
    return _ATTENTION_WORDS.read(value)


ATTENTION: Final = Values(_read_attention, _ATTENTION_WORDS.write)
"""Whether attention is fused, by the names of kernels in Transformers and the front ends."""


def fsdp_options(value: Any) -> list[str]:
    """Options in the Trainer's `fsdp`: `"full_shard auto_wrap"`, a list of them, or `true` since
    Transformers 5."""
    if isinstance(value, list):
        return [str(option).lower() for option in value]
    return ["full_shard"] if value is True else str(value).lower().replace(",", " ").split()


_STRATEGIES: Final = (
    "full_shard",
    "shard_grad_op",
    "no_shard",
    "hybrid_shard",
    "hybrid_shard_zero2",
)
FSDP_KEYS: Final = (
    "fsdp",
    "fsdp_version",
    "fsdp_config.sharding_strategy",
    "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.reshard_after_forward",
    "fsdp_config.fsdp_reshard_after_forward",
    "fsdp_config.offload_params",
    "fsdp_config.fsdp_offload_params",
    "fsdp_config.fsdp_version",
    "fsdp_config.version",
)
"""Keys of PyTorch's FSDP in Hugging Face's Trainer and in axolotl."""


def fsdp_fields(settings: Mapping[str, Any]) -> Fields:
    """ZeRO stage of PyTorch's FSDP, by the keys of `FSDP_KEYS`; no field if it is off."""
    # Three generations of keys: words of `--fsdp`, a strategy by name (FSDP1), and
    # whether weights are sharded again after forward (FSDP2). Keys of the block
    # have the prefix `fsdp_` in Accelerate's notation and none in the Trainer's.
    options = fsdp_options(settings["fsdp"]) if is_on(settings.get("fsdp")) else []

    def option(name: str) -> Any:
        return settings.get(f"fsdp_config.{name}", settings.get(f"fsdp_config.fsdp_{name}"))

    strategy = next((word for word in options if word in _STRATEGIES), None) or option(
        "sharding_strategy"
    )
    reshards = option("reshard_after_forward")
    if strategy is None and not options and reshards is None and not _is_second(settings):
        return {}
    # Accelerate takes a strategy's name here too.
    if strategy is None and reshards is not None and str(reshards).lower() not in ("true", "false"):
        strategy = reshards
    if strategy is not None:
        name = str(strategy).upper()
        fields = sharding("_HYBRID_SHARD_ZERO2" if name == "HYBRID_SHARD_ZERO2" else name)
    else:
        fields = {"zero": stage_of_resharding(reshards)}
    on_host = "offload" in options or is_on(option("offload_params"))
    return fields | (fsdp_offload(fields["zero"], on_host) if fields["zero"] else {})


def _is_second(settings: Mapping[str, Any]) -> bool:
    """Whether a file selects the second version of FSDP, which by default shards everything."""
    versions = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
    return any(str(settings.get(name)) == "2" for name in versions)


def torch_framework(fields: Fields, entries: Entries) -> str:
    """The catalog's framework for plain PyTorch."""
    if not fields.get("zero"):
        return "pytorch"
    compiled = any(
        is_on(entries[name].value) for name in ("torch_compile", "compile") if name in entries
    )
    return "fsdp-compile" if compiled else "fsdp"


def checkpointing_fields(value: Any) -> Fields:
    """Recomputation of whole layers; some of axolotl's values also offload each layer's input to
    the host."""
    if not is_on(value):
        return {"recompute": "none"}
    fields: Fields = {"recompute": "full"}
    if str(value).lower() in ("offload", "offload_disk", "unsloth"):
        fields["note.checkpoints"] = (
            f"{value} copies the inputs of layers to the host, but the prediction keeps them on the device"
        )
    return fields


def padding_note(length: str, is_packed: bool) -> Fields:
    """The note on sequences shorter than the full length."""
    if is_packed:
        return {}
    return {
        "note.padding": f"every sequence has the full length ({length}); without packing, most are shorter"
    }


def mesh_rule(shards: str, copies: str, experts: str = "") -> Rule:
    """The rule for a mesh of devices: ranks that shard states, copies of them, and ranks that hold
    different experts.

    Args:
        shards: key of the ranks that shard; 0 or -1 leaves them to the number of devices.
        copies: key of their copies.
        experts: key of the ranks of experts, an axis of its own; empty for none.
    """

    def read(settings: Mapping[str, Any]) -> Fields:
        ranks = int(NUMBER.read(settings.get(shards, 1)))
        replicate = int(NUMBER.read(settings.get(copies, 1)))
        ep = int(NUMBER.read(settings.get(experts, 1)))
        fields: Fields = {
            name: degree for name, degree in (("replicate", replicate), ("ep", ep)) if degree > 1
        }
        # Degrees that are all stated say how many devices there are.
        return fields | (
            {"dp": ranks * replicate * max(1, ep)} if shards in settings and ranks > 0 else {}
        )

    return Rule(
        keys=tuple(filter(None, (shards, copies, experts))), fields=("replicate",), read=read
    )


def sharded_sequences(ranks: Any, kind: str) -> Fields:
    """Context parallelism: the ranks that share a sequence."""
    degree = WHOLE_OR_NONE.read(ranks)
    return {"cp": degree, "cp_kind": kind} if degree > 1 else {}
