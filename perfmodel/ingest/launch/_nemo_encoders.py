"""NeMo's models other than causal decoders: BERT and T5; image encoders are only reported."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._table import WHOLE, Fields, Rule, words

_KINDS: Final = (
    "model.bert_binary_head",
    "model.bert_type",
    "model.patch_dim",
    "model.img_h",
    "model.num_classes",
)
"""Keys that only encoders have."""
_SIZES: Final = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "ffn_hidden_size": "model.ffn_hidden",
    "kv_channels": "model.head_dim",
}
"""Sizes of an encoder or decoder (`megatron_t5_config.yaml`), with their fields."""
_DECODER_LENGTH: Final = "model.data.seq_length_dec"
_USUAL_DECODER_LENGTH: Final = 128
"""Default tokens of a decoder (`megatron_t5_config.yaml`)."""
_ENCODER: Final = "model.encoder."
_DECODER: Final = "model.decoder."


def _kind(settings: Mapping[str, Any]) -> Fields:
    """Fields of a model that is not a causal decoder: BERT, or an image encoder, which is only
    reported."""
    if any(name.startswith("model.bert") for name in settings):
        return {"model.causal": False, "model.token_types": 2, "model.pooler_and_mlm_head": True}
    named = ", ".join(name.removeprefix("model.") for name in settings)
    return {
        "doubt.model": f"the model may be wrong: it encodes images ({named}), but is predicted as a decoder"
    }


def encoder_rules(activations: Mapping[str, tuple[str, bool]]) -> tuple[Rule, ...]:
    """Rules of models with an encoder.

    Args:
        activations: function of each activation by name, and whether it is gated.
    """

    def read_stacks(settings: Mapping[str, Any]) -> Fields:
        """Sizes of encoder and decoder; in T5 only the numbers of layers differ."""
        # Only files of encoder-decoders have a block for each stack; all other sizes stand in
        # `model` itself.
        if f"{_ENCODER}num_layers" not in settings:
            return {}
        fields: Fields = {
            "model.decoder_seq_len": WHOLE.read(
                settings.get(_DECODER_LENGTH, _USUAL_DECODER_LENGTH)
            )
        }
        # `Transformer` has one set of sizes for both stacks: where they differ, the encoder's are
        # taken and said.
        unlike = []
        for name, field in _SIZES.items():
            size = settings.get(_ENCODER + name)
            if size is None:
                continue
            fields[field] = WHOLE.read(size)
            if name != "num_layers" and settings.get(_DECODER + name, size) != size:
                unlike.append(name)
        fields["model.decoder_layers"] = WHOLE.read(
            settings.get(f"{_DECODER}num_layers", fields["model.layers"])
        )
        if f"{_ENCODER}activation" in settings:
            kind, gated = words(activations).read(settings[f"{_ENCODER}activation"])
            fields |= {"model.activation": kind, "model.gated_ffn": gated}
        if unlike:
            fields["doubt.decoder"] = (
                f"the model may be wrong: the decoder's {', '.join(unlike)} differ from the encoder's, "
                "which the prediction uses for both"
            )
        return fields

    stacks: list[str] = []
    for start in (_ENCODER, _DECODER):
        stacks += [start + name for name in (*_SIZES, "activation")]
    return (
        Rule(keys=_KINDS, read=_kind),
        Rule(keys=(*stacks, _DECODER_LENGTH), read=read_stacks, fields=("model.",)),
    )
