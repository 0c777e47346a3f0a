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
