"""Kinds of models that Megatron's training programs build, by the names of the programs."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from perfmodel.ingest.launch._arguments import SCRIPT, trains_nothing
from perfmodel.ingest.launch._table import WHOLE, BadValue, Fields

_KINDS: Final = (
    SCRIPT,
    "encoder-num-layers",
    "decoder-num-layers",
    "num-layers",
    "encoder-seq-length",
    "decoder-seq-length",
    "seq-length",
    "bert-no-binary-head",
)
_LAYERS_OF_LLAMA: Final = (
    "swiglu",
    "use-fused-swiglu",
    "normalization",
    "use-fused-rmsnorm",
    "position-embedding-type",
    "use-rotary-position-embeddings",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "spec",
)
"""Arguments of which every script with layers like LLaMA's has at least one."""
_FAMILIES: Final = (
    "llama",
    "llama2",
    "llama3",
    "baichuan",
    "baichuan2",
    "qwen",
    "qwen2",
    "mistral",
    "mixtral",
    "internlm",
    "chatglm",
    "chatglm3",
    "aquila",
    "deepseek",
)
"""Words in the names of programs that build a particular model (AscendSpeed's
`pretrain_llama.py`)."""
_NO_DECODERS: Final = (
    "vision",
    "vit",
    "vlm",
    "multimodal",
    "ict",
    "realm",
    "retro",
    "biencoder",
    "dino",
    "inpaint",
    "clip",
    "vl",
    "llava",
    "dit",
    "sora",
    "diffusion",
    "unet",
)
"""Words in the names of programs that do not train a stack of layers on text."""
_OTHER_LAYERS: Final = ("rwkv", "rwkv7", "retnet", "hyena", "griffin", "xlstm")
"""Words in the names of programs whose layers do not attend (FlagScale's `train_rwkv.py`)."""


def kind_of_model(arguments: Mapping[str, Any]) -> Fields:
    """Kind of model of a program that does not train a causal decoder: BERT, T5, or an unsupported
    one."""
    program = PurePosixPath(str(arguments.get(SCRIPT, "")))
    if trains_nothing(program):
        raise BadValue(
            f"must be a program that trains; {program.name} converts checkpoints, generates or evaluates"
        )
    # The arguments of BERT, T5 and GPT are the same: only the name of the program distinguishes
    # them.
    name = program.stem.lower().replace("-", "_")
    parts = name.split("_")
    # BERT trains on pairs of sentences (token types) with a pooler and a head for masked words.
    if "bert" in parts or "bert-no-binary-head" in arguments:
        return {"model.causal": False, "model.token_types": 2, "model.pooler_and_mlm_head": True}
    # T5 has two stacks; without numbers of their own both have the layers of the model.
    if "t5" in parts or "decoder-num-layers" in arguments:
        encoder = arguments.get("encoder-num-layers", arguments.get("num-layers"))
        if encoder is None:
            return {}
        fields: Fields = {
            "model.layers": WHOLE.read(encoder),
            "model.decoder_layers": WHOLE.read(arguments.get("decoder-num-layers", encoder)),
        }
        if "encoder-seq-length" in arguments:
            fields["seq_len"] = WHOLE.read(arguments["encoder-seq-length"])
        if "decoder-seq-length" in arguments:
            fields["model.decoder_seq_len"] = WHOLE.read(arguments["decoder-seq-length"])
        return fields
    if set(parts) & set(_NO_DECODERS):
        return {
            "doubt.model": f"the model may be wrong: {name}.py does not train a causal decoder, but is predicted as one"
        }
    if set(parts) & set(_OTHER_LAYERS):
        return {
            "doubt.model": (
                f"the model may be wrong: {name}.py has other layers than attention, but attention is predicted; "
                "give --model"
            )
        }
    # Forks of 2023 build the layers of a family in the program, and their scripts state its sizes
    # alone.
    states_llama = any(argument in arguments for argument in _LAYERS_OF_LLAMA)
    if set(parts) & set(_FAMILIES) and not states_llama:
        return {
            "doubt.model": (
                f"the model may be wrong: {name}.py defines its own layers, which no argument describes; those of "
                "GPT are predicted; give --model"
            )
        }
    return {}


PROGRAM_KEYS: Final = (*_KINDS, *_LAYERS_OF_LLAMA)
"""Arguments that `kind_of_model` reads."""
