"""Every causal language model that transformers builds from the defaults of its configuration,
counted beside ours."""

import json
import math
from typing import Any

import pytest

from perfmodel.catalog import model_from_config
from perfmodel.errors import PerfModelError
from perfmodel.workload import parameters

DECODERS_ALONE = frozenset(
    {
        "bart",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "whisper",
    }
)
"""Families whose class for this purpose has no encoder."""
LEFT_OUT = {
    "afmoe": 31 * 64,  # biases that balance experts, which are not trained
    "apertus": 32 * 2,  # parameters of the activation
    "apertus1p5_text": 32 * 2,
    "axk1": 60 * 7168,  # norms of what experts give
    "beam": 52 * 48,  # biases of attention's gates
    # this class has neither the pooler nor the head of sentences
    "bert": -(768 * 768 + 768 + 2 * 768 + 2),
    "big_bird": -(2 * 768 + 2),
    "codegen": 28 * 5 * 4096 + 50_400,  # biases of feed-forward and head, as of GPT-J
    "ctrl": 246_534,  # bias of the head
    "ernie4_5_moe": 27 * 64,  # biases that balance experts, which are not trained
    "fuyu": (30 * 30 * 3 + 1) * 4096,  # embedding of the patches of images
    "gptj": 28 * 5 * 4096 + 50_400,
    "laguna": 39 * 256,  # biases that balance experts, which are not trained
    "longcat_flash": 28 * 256 * 2 * 2048 * 6144,  # matrices of experts that compute nothing
    "modernbert-decoder": -768,  # the first layer has no norm
    "phi": 51_200,  # bias of the head
    "roformer": 1536 * 64,  # sines of positions, which are not trained
}
"""Parameters of classes that are left out of ours."""


def _parameters_of_class(transformers: Any, config: Any) -> int | None:
    """None where the defaults build no model."""
    torch = pytest.importorskip("torch")
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:
        return None
    module.tie_weights()
    return sum(
        math.prod(weight.shape)
        for weight in {id(weight): weight for weight in module.parameters()}.values()
    )


@pytest.mark.slow
def test_every_causal_class_has_the_parameters_that_are_counted() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: zoo)"
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    differing: dict[str, int] = {}
    n_read = 0
    for family in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - DECODERS_ALONE):
        try:
            config = transformers.CONFIG_MAPPING[family]()
        except Exception:
            # Some families have no defaults that belong together.
            continue
        try:
            stated = json.loads(json.dumps({**config.to_dict(), "model_type": family}, default=str))
            model = model_from_config(stated)
        except PerfModelError:
            continue
        # Of a model with a tower only the language model is counted.
        of_class = None if "tower" in model.left_out else _parameters_of_class(transformers, config)
        if of_class is None:
            continue
        n_read += 1
        counted = parameters(model)
        left_out = of_class - (counted.total - counted.further_tokens)
        if left_out != LEFT_OUT.get(family, 0):
            differing[family] = left_out
    assert differing == {}
    assert n_read > 100


NOT_AS_THE_CLASS = {
    # biases of gates, and of attention's output
    ("afmoe", "attention_bias"),
    ("beam", "attention_bias"),
    ("laguna", "attention_bias"),
    ("lfm3", "attention_bias"),
    # every GPT-OSS has them
    ("gpt_oss", "attention_bias"),
    ("persimmon", "qk_layernorm"),
    # its norms of queries and keys have no shifts
    ("stablelm", "qk_layernorm"),
    # whose class ignores them
    ("mpt", "no_bias"),
}
"""Switches that move our parameters otherwise than the class's, or not at all."""
NO_SHAPES = ("tie_", "use_cache", "is_", "add_cross", "output_", "return_dict", "torchscript")
"""Beginnings of keys that are tried elsewhere, or that change no decoder."""


@pytest.mark.slow
def test_switches_move_parameters_as_the_class_does_or_are_named() -> None:
    """Every boolean of every family's defaults is turned over: a bias, a norm, a gate that we do
    not count is named in what is left out."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: zoo)"
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def counted(config: Any, family: str) -> tuple[int, str] | None:
        stated = json.loads(json.dumps({**config.to_dict(), "model_type": family}, default=str))
        try:
            model = model_from_config(stated)
        except PerfModelError:
            return None
        return parameters(model).total - parameters(model).further_tokens, model.left_out

    silent: set[tuple[str, str]] = set()
    n_tried = 0
    for family in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - DECODERS_ALONE):
        try:
            config = transformers.CONFIG_MAPPING[family](num_hidden_layers=4)
        except Exception:
            continue
        ours, of_class = counted(config, family), _parameters_of_class(transformers, config)
        if ours is None or of_class is None or "tower" in ours[1]:
            continue
        for key, value in config.to_dict().items():
            if not isinstance(value, bool) or key.startswith(NO_SHAPES):
                continue
            try:
                changed = transformers.CONFIG_MAPPING[family].from_dict(
                    {**config.to_dict(), key: not value}
                )
            except Exception:
                continue
            moved = _parameters_of_class(transformers, changed)
            ours_moved = counted(changed, family)
            if moved is None or ours_moved is None:
                continue
            n_tried += 1
            as_class = moved - of_class == ours_moved[0] - ours[0]
            if not as_class and ours_moved[1] == ours[1]:
                silent.add((family, key))
    assert silent - NOT_AS_THE_CLASS == set()
    assert n_tried > 200
