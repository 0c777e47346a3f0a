"""Hugging Face configurations of models of several parts: the language model is read, towers are
counted and named."""

import re
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from perfmodel.catalog.huggingface._experts import EXPERT_KEYS
from perfmodel.catalog.huggingface._families import FAMILIES
from perfmodel.catalog.huggingface._relatives import RELATIVES
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.errors import PerfModelError

LANGUAGE_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which the configuration of a language model stands."""
DEFAULT_FAMILIES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "paligemma": "gemma",
}
"""Family of the language model if its own configuration does not state it."""
TIE: Final = "tie_word_embeddings"
OLD_TIES: Final = frozenset(
    (
        "fast_vlm",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "hunyuan_vl",
        "llava",
        "llava_next_video",
        "llava_onevision",
        "minimax_m3_vl",
        "paddleocr_vl",
        "qwen2_5_vl",
        "qwen2_vl",
        "shieldgemma2",
        "video_llama_3",
    )
)
"""Models of several parts whose output head is also tied if only the language model's own
configuration says so (`models/*/configuration_*.py` of transformers 5.24)."""
VISION_ENCODERS: Final = ("siglip", "clip")
"""Models of two parts that stand for their vision encoder."""


def language_model(
    config: Mapping[str, Any], place: str, version: str = ""
) -> tuple[Mapping[str, Any], str, list[str]]:
    """Configuration and family of the language model, and descriptions of parts left out.

    Args:
        config: configuration of the whole model.
        place: name of the configuration in messages.
        version: version of transformers that saved the file, where a part does not state it.

    Raises:
        PerfModelError: no family is named, or a model of several parts does not describe its
            language model.
    """
    version = str(config.get("transformers_version", version))
    family = config.get("model_type", config.get("_class_name"))
    if not isinstance(family, str):
        raise PerfModelError(f"{place}: model_type: missing; it names the family")
    # Contrastive models have two towers of equal rank; language models are built on the vision
    # tower.
    if family in VISION_ENCODERS:
        return _part(config, "vision_config", place), f"{family}_vision_model", []
    left_out = [_tower(key, part) for key, part in config.items() if _is_tower(key, part)]
    part_key = next((key for key in LANGUAGE_PARTS if isinstance(config.get(key), dict)), None)
    if part_key is None and family in DEFAULT_FAMILIES:
        part_key = LANGUAGE_PARTS[0]
    if part_key is None:
        return config, known_family(family), left_out
    part = _part(config, part_key, place)
    # A drafter of another model is more than the language model that it names.
    if family.endswith("_assistant"):
        return config, family, left_out
    if any(isinstance(part.get(key), dict) for key in LANGUAGE_PARTS):
        # Qwen-Omni's thinker is itself a model of several parts
        inner, inner_family, further = language_model(part, place, version)
        return inner, inner_family, [*left_out, *further]
    if version.partition(".")[0] == "5":
        part = _with_tie(part, config.get(TIE), family)
    # Parts of older files leave their family to the class of the whole model.
    part_family = part.get("model_type")
    if not isinstance(part_family, str):
        part_family = DEFAULT_FAMILIES.get(family, family)
    return part, known_family(part_family), left_out


def _with_tie(part: Mapping[str, Any], outer_tie: Any, family: str) -> Mapping[str, Any]:
    """The configuration of a language model, with the tie of its embeddings that the whole model's
    states.

    Since transformers 5 the head belongs to the whole model, whose configuration decides where it
    says anything. In files of earlier versions the language model's own configuration decides.
    """
    if not isinstance(outer_tie, bool):
        return part
    is_tied_inside = family in OLD_TIES and part.get(TIE) is True
    return {**part, TIE: outer_tie or is_tied_inside}


def known_family(family: str) -> str:
    """The family's reader name: the text part of Gemma 3 (`gemma3_text`) is read as `gemma3`."""
    for name in (family, family.removesuffix("_text"), family.removesuffix("_text_model")):
        if name in FAMILIES or name in RELATIVES:
            return name
    return family


def _part(config: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    part = config.get(key)
    if not isinstance(part, dict):
        raise PerfModelError(f"{place}: {key}: missing; it describes the model")
    return part


def _is_tower(key: str, part: Any) -> bool:
    """Whether a key holds the configuration of a part other than the language model."""
    if key in LANGUAGE_PARTS or not key.endswith("_config") or not isinstance(part, dict):
        return False
    return any(
        word in key
        for word in (
            "vision",
            "audio",
            "speech",
            "image",
            "video",
            "talker",
            "token2wav",
            "code2wav",
        )
    )


def _tower(key: str, part: Mapping[str, Any]) -> str:
    """A sentence on a part that is left out, with its approximate number of parameters if its sizes
    are stated."""
    # The size tells a reader whether the omitted part matters beside the language model.
    tower = key.removesuffix("_config").replace("_", " ")
    parameters = encoder_parameters(part)
    size = f"of about {parameters / 1e9:.2f} B parameters " if parameters else ""
    return f"the {tower} tower {size}is left out; only the language model is counted"


def further_modules(config: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """A sentence on modules that predict further tokens, where a configuration has more than its
    family's class counts; empty without any."""
    modules = _number(config, "num_mtp_modules", "num_mtp_layers", "num_nextn_predict_layers")
    missing = modules - int(fields.get("mtp_layers", 0))
    if missing <= 0 or config.get("use_mtp") is False:
        return ""
    if missing == 1:
        return "the module that predicts a further token is left out"
    return f"{missing} modules that predict further tokens are left out"


_BIAS_KEY: Final = re.compile(r"(^|_)bias$")
_NOT_TRAINED: Final = re.compile(r"rout|expert|correction|sink|position|score")
"""Words in the keys of biases that are not part of a product, or not trained."""


def biases_not_counted(
    config: Mapping[str, Any], read_keys: Collection[str], fields: Mapping[str, Any]
) -> str:
    """A sentence on unread keys that switch biases on or off, if they contradict the biases that
    the model is described with; empty if none does.

    Args:
        read_keys: keys that the reader knows.
        fields: fields of the described model.
    """
    has_biases = bool(fields.get("bias", True))
    differing = []
    for key, value in config.items():
        if not _BIAS_KEY.search(key) or _NOT_TRAINED.search(key) or not isinstance(value, bool):
            continue
        counted = has_biases
        if "qkv" in key:
            counted = has_biases or bool(fields.get("qkv_bias"))
        elif "conv" in key:
            # Convolutions of Mamba have biases, short ones have none.
            counted = bool(fields.get("mamba") or fields.get("selective_scan"))
        elif key == "decoder_bias":
            counted = True
        elif key == "norm_bias":
            counted = fields.get("norm_bias") or has_biases
        # Readers know these two keys, but count the first only where all products have biases, and
        # the second nowhere in latent attention.
        depends = key == "mlp_bias" or (key == "attention_bias" and _is_latent(fields))
        is_read = key in read_keys and not depends
        if not is_read and value != counted:
            differing.append(f"{key}={str(value).lower()}")
    return f"{' and '.join(differing)} is left out" if differing else ""


def _is_latent(fields: Mapping[str, Any]) -> bool:
    return fields.get("latent_attention") is not None


_EXPERT_COUNTS: Final = (
    "num_experts",
    *(key for key, name in EXPERT_KEYS.items() if name == "num_experts"),
)
_PARTS_OF_LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "experts": _EXPERT_COUNTS,
    "latent_attention": ("kv_lora_rank",),
}
"""Parts of layers by fields of `Transformer`, and the keys that say how large each is."""
_TABLES_OF_LAYERS: Final = ("ffn_config", "moe", "moe_config", "attn_config")
"""Keys that hold a table on the parts of layers."""


def check_parts_are_of_family(
    config: Mapping[str, Any], reader_keys: AbstractSet[str], fields: Mapping[str, Any]
) -> None:
    """Raise `CannotDescribeError` where a configuration states experts or latent attention that the
    class of its family does not have.

    Hugging Face's class would ignore them, but a program that writes them trains another model than
    this class: neither count can be trusted.

    Args:
        reader_keys: keys that the family's reader has fields for, without other names of them.
        fields: fields of the described model.
    """
    tables = [config]
    for key in _TABLES_OF_LAYERS:
        if isinstance(config.get(key), dict):
            tables.append(config[key])
    for part, keys in _PARTS_OF_LAYERS.items():
        # A reader that knows the key says itself which layers have the part: none, in a pattern
        # without it.
        if fields.get(part) is not None or not reader_keys.isdisjoint(keys):
            continue
        for table in tables:
            stated = [key for key in keys if _is_several(table.get(key))]
            if stated:
                raise CannotDescribeError(
                    f"the configuration states {stated[0]}={table[stated[0]]}, "
                    f"but this family has no {part.replace('_', ' ')}"
                )


def _is_several(count: Any) -> bool:
    """Whether a value, or the largest of a list with an entry per layer, is more than one."""
    counts = count if isinstance(count, list) else [count]
    return any(
        isinstance(number, int) and not isinstance(number, bool) and number > 1 for number in counts
    )


_HEADS_OF_LABELS: Final[Mapping[str, str]] = {
    "ForQuestionAnswering": "token_labels",
    "ForTokenClassification": "token_labels",
    "ForSequenceClassification": "sequence_label",
    "ForMultipleChoice": "sequence_label",
}
"""Endings of classes whose head predicts labels, and the word of `Job.head` for it."""


def head_of_class(config: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """A sentence on the head of the class that a configuration names, where it is not the head over
    the vocabulary that is counted; empty if it is, or no class is named."""
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(name, str) or fields.get("patches"):
        return ""
    for ending, head in _HEADS_OF_LABELS.items():
        if name.endswith(ending):
            return (
                f"{name} has a head of labels: give --set job.head={head}, or else a head over the "
                "vocabulary is counted"
            )
    # Classes of decoders are often named so though they have a head.
    if name.endswith("Model") and not fields.get("causal", True):
        return f"{name} has no head, but one over the vocabulary is counted"
    return ""


def encoder_parameters(part: Mapping[str, Any]) -> int:
    """Parameters of a plain encoder by its sizes: projections of attention, feed-forward, patches,
    positions and norms; 0 if the sizes are not stated."""
    hidden = _number(part, "hidden_size", "embed_dim", "d_model", "width")
    layers = _number(part, "num_hidden_layers", "depth", "encoder_layers", "layers")
    if not hidden or not layers:
        return 0
    # Qwen2-VL calls the width of the language model hidden_size and its own embed_dim
    hidden = _number(part, "embed_dim") or hidden
    inner = _number(part, "intermediate_size", "encoder_ffn_dim") or round(
        hidden * float(part.get("mlp_ratio") or 4)
    )
    gated = part.get("hidden_act") in ("silu", "swish") or part.get("use_swiglu_ffn") is True
    # Four square projections with biases, two or three of the feed-forward, two norms a layer of 2
    # hidden sizes each.
    attention = 4 * hidden * hidden + 4 * hidden
    feed_forward = (3 if gated else 2) * hidden * inner + inner + hidden
    # Patches are projected by one matrix, and each has a position of its own.
    patch = _number(part, "patch_size")
    channels = _number(part, "num_channels", "in_channels", "in_chans") or 3
    patches = patch * patch * channels * hidden
    positions = 0
    image = _number(part, "image_size")
    if patch and image:
        positions = (image // patch) ** 2 * hidden
    return layers * (attention + feed_forward + 4 * hidden) + patches + positions + 2 * hidden


def _number(part: Mapping[str, Any], *keys: str) -> int:
    """The first positive whole number among some keys; 0 if there is none."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
