"""Public architectures of Hugging Face's `transformers`, tiny and with random weights, made from
configurations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

BATCH, LENGTH, VOCAB, HIDDEN, CLASSES = 4, 8, 32, 16, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 2 * LENGTH,  # longer than the sequence
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
OF_GPT = {
    "vocab_size": VOCAB,
    "n_positions": 2 * LENGTH,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
}
OF_BART = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
OF_IMAGES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": CLASSES,
}


@dataclass(frozen=True)
class Architecture:
    """A recipe for one model, and the arguments that it is called with."""

    model: str
    """Class of the model; its configuration's class is `config`."""
    config: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] = lambda torch: text(torch)
    values: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the inputs beforehand (`--input-value`)."""
    shared_layers: bool = False
    """All layers are one and the same, so that there is nothing to cut a pipeline by."""


@dataclass(frozen=True)
class Made:
    """A model of one architecture, with what it is called with."""

    module: Any
    inputs: dict[str, Any]
    values: Mapping[str, Any]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Weights under their names and inputs, as a program takes them."""
        state = {name: tensor.detach().numpy() for name, tensor in self.module.state_dict().items()}
        return state | {name: tensor.numpy() for name, tensor in self.inputs.items()}

    def loss(self) -> Any:
        return self.module(**self.inputs).loss


def text(torch: Any, *, masked: bool = False) -> dict[str, Any]:
    """Tokens and the tokens to predict."""
    tokens, labels = (torch.randint(1, VOCAB, (BATCH, LENGTH)) for _ in range(2))
    mask = {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.int64)} if masked else {}
    return {"input_ids": tokens, **mask, "labels": labels}


def masked_text(torch: Any) -> dict[str, Any]:
    return text(torch, masked=True)


def placed_text(torch: Any) -> dict[str, Any]:
    """Tokens with their positions, which RoBERTa otherwise counts from the tokens, leaving padding
    out."""
    return {**text(torch), "position_ids": torch.from_numpy(POSITIONS)}


def images(torch: Any, size: int = 16) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def sound(torch: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 8, 2 * LENGTH), "labels": text(torch)["labels"]}


POSITIONS = np.tile(np.arange(LENGTH), (BATCH, 1)) + 1
MASK = {"attention_mask": 1}
BY_TOKEN = {"experts_implementation": "batched_mm"}
"""Every token takes the weights of its experts, instead of experts their tokens, whose numbers
depend on data."""


def causal(name: str, sizes: Mapping[str, Any]) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", sizes, masked_text, MASK)


def encoder(name: str, sizes: Mapping[str, Any]) -> Architecture:
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", sizes)


def classifier(name: str, sizes: Mapping[str, Any], size: int = 16) -> Architecture:
    return Architecture(
        f"{name}ForImageClassification", f"{name}Config", sizes, lambda torch: images(torch, size)
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", OF_GPT, masked_text, MASK),
    "llama": causal("Llama", GROUPED),
    "bert": encoder("Bert", SIZES),
    "vit": classifier("ViT", OF_IMAGES),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "roberta": encoder("Roberta", SIZES),
    "roberta with positions": Architecture(
        "RobertaForMaskedLM",
        "RobertaConfig",
        SIZES,
        placed_text,
        {"position_ids": POSITIONS.tolist()},
    ),
    "distilbert": encoder(
        "DistilBert",
        {
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 32,
            "pad_token_id": 0,
        },
    ),
    "albert": Architecture(
        "AlbertForMaskedLM", "AlbertConfig", {**SIZES, "embedding_size": 8}, shared_layers=True
    ),
    "electra": encoder("Electra", {**SIZES, "embedding_size": 8}),
    "deberta-v2": encoder("DebertaV2", SIZES),
    "modernbert": encoder(
        "ModernBert", {**SIZES, "local_attention": 4, "cls_token_id": 3, "sep_token_id": 4}
    ),
    "mixtral": causal("Mixtral", {**GROUPED, "num_local_experts": 4, **BY_TOKEN}),
    "qwen3-moe": causal(
        "Qwen3Moe",
        {
            **GROUPED,
            "head_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            **BY_TOKEN,
        },
    ),
    "olmoe": causal("Olmoe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, **BY_TOKEN}),
    "opt": causal(
        "OPT",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 32,
            "max_position_embeddings": 2 * LENGTH,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    "gpt-neox": causal("GPTNeoX", {**SIZES, "rotary_pct": 0.5}),
    "gpt-j": causal("GPTJ", {**OF_GPT, "rotary_dim": 4}),
    "gpt-neo": causal(
        "GPTNeo",
        {
            "vocab_size": VOCAB,
            "max_position_embeddings": 2 * LENGTH,
            "hidden_size": HIDDEN,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "mistral": causal("Mistral", {**GROUPED, "sliding_window": 4}),
    "qwen2": causal("Qwen2", GROUPED),
    "qwen3": causal("Qwen3", {**GROUPED, "head_dim": 4}),
    "gemma": causal("Gemma", {**SIZES, "num_key_value_heads": 1, "head_dim": 4}),
    "gemma2": causal("Gemma2", {**GROUPED, "head_dim": 4, "sliding_window": 4}),
    "phi": causal("Phi", SIZES),
    "bloom": causal(
        "Bloom", {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4}
    ),
    "falcon": causal(
        "Falcon",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {**OF_BART, "max_position_embeddings": 2 * LENGTH},
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **OF_BART,
            "num_mel_bins": 8,
            "max_source_positions": LENGTH,
            "max_target_positions": 2 * LENGTH,
        },
        sound,
    ),
    "deit": classifier("DeiT", OF_IMAGES),
    "swin": classifier(
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
            "num_labels": CLASSES,
        },
    ),
    "convnext": classifier(
        "ConvNext",
        {
            "hidden_sizes": [4, 8, 12, 16],
            "depths": [1, 1, 1, 1],
            "image_size": 32,
            "num_labels": CLASSES,
        },
        size=32,
    ),
    "resnet": classifier(
        "ResNet",
        {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": CLASSES},
    ),
}
SORTED: Mapping[str, Architecture] = {
    name: replace(
        architecture, sizes={k: v for k, v in architecture.sizes.items() if k not in BY_TOKEN}
    )
    for name, architecture in ARCHITECTURES.items()
    if BY_TOKEN.items() <= architecture.sizes.items()
}
"""Mixtures as they are by default: tokens are sorted by their experts, for one grouped product."""


def make(torch: Any, transformers: Any, architecture: Architecture, dtype: Any = None) -> Made:
    """A model with weights that all differ from one another, without dropout."""
    torch.manual_seed(0)
    config = getattr(transformers, architecture.config)(**architecture.sizes)
    config.use_cache = False
    module = getattr(transformers, architecture.model)(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    inputs = architecture.inputs(torch)
    return Made(module if dtype is None else module.to(dtype), inputs, architecture.values)
