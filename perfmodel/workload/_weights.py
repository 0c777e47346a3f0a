"""Weights of the sub-layers of a transformer: elements that a token meets, and parameters."""

from collections.abc import Container
from typing import NamedTuple

from perfmodel.spec import Transformer
from perfmodel.workload._attention import projected
from perfmodel.workload._compressed_attention import (
    COMPRESSED,
    compressed_parameters,
    compressed_weights,
    hyper_parameters,
    hyper_weights,
)
from perfmodel.workload._linear_attention import (
    delta_net_parameters,
    delta_net_weights,
    recurrence_of_net,
    recurrence_of_time_mix,
    recurrence_products,
)
from perfmodel.workload._recurrent import (
    mamba_parameters,
    mamba_weights,
    selective_scan_parameters,
    selective_scan_weights,
    short_conv_parameters,
    short_conv_weights,
    state_space_products,
)
from perfmodel.workload._streams import update_parameters, update_weights
from perfmodel.workload._time_mix import (
    channel_mix_parameters,
    channel_mix_weights,
    time_mix_parameters,
    time_mix_weights,
)


def attention_weights(model: Transformer) -> int:
    """Elements of the projections of one attention."""
    h, a = model.hidden, model.heads

    # Latent attention: down and up projections of queries, then of keys and values, then the
    # output's.
    latent = model.latent_attention
    if latent:
        d_qk = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        q_rank, rank = latent.q_lora_rank, latent.kv_lora_rank
        query = q_rank * (h + a * d_qk) if q_rank else h * a * d_qk
        key_value = h * (rank + latent.qk_rope_head_dim)
        key_value += rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        gates = 0
        if model.attention.attention_gate:
            gates = h * a * latent.v_head_dim
        elif model.attention.head_gate:
            gates = h * a
        return query + key_value + gates + a * latent.v_head_dim * h

    # Queries, output and where there is one the gate have all heads; keys and values fewer.
    return h * (sum(projected(model, heads=a, kv_heads=model.kv_heads)) + a * model.value_dim)


def key_value_weights(model: Transformer) -> int:
    """Elements of the projections to keys and values, without latent attention."""
    return model.hidden * sum(projected(model, heads=0, kv_heads=model.kv_heads))


def ffn_weights(model: Transformer, inner: int, outer: int = 0) -> int:
    """Elements of one feed-forward's weights with inner size `inner`, on `outer` elements or the
    hidden size."""
    return (outer or model.hidden) * inner * (model.inner_projections + 1)


def head_dims(model: Transformer) -> tuple[int, int]:
    """Elements of a head's queries and keys, and of its values."""
    latent = model.latent_attention
    if latent:
        return latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
    return model.head_dim, model.value_dim


class MixerWeights(NamedTuple):
    """Weights of one mixer that is neither attention nor feed-forward."""

    token_weights: int
    """Elements of weights that a token is multiplied with."""
    parameters: int
    """All parameters, without the norm before the mixer."""
    state_products: float = 0.0
    """Multiply-adds per token of two activations, in mixers with a state. Both activations have a
    gradient, whatever is frozen."""


def mixer_weights(model: Transformer, letters: Container[str]) -> dict[str, MixerWeights]:
    """Weights of each mixer of `letters` (of `MIXERS`) that is neither attention nor feed-forward,
    by its letter."""
    h, hybrid = model.hidden, model.hybrid
    by_letter: dict[str, MixerWeights] = {}
    if hybrid.mamba:
        by_letter["M"] = MixerWeights(
            mamba_weights(h, hybrid.mamba),
            mamba_parameters(h, hybrid.mamba),
            state_space_products(hybrid.mamba),
        )
    if hybrid.selective_scan:
        by_letter["S"] = MixerWeights(
            selective_scan_weights(h, hybrid.selective_scan),
            selective_scan_parameters(h, hybrid.selective_scan),
            2 * hybrid.selective_scan.inner * hybrid.selective_scan.state,
        )
    if hybrid.delta_net:
        by_letter["L"] = MixerWeights(
            delta_net_weights(h, hybrid.delta_net),
            delta_net_parameters(h, hybrid.delta_net),
            recurrence_products(recurrence_of_net(hybrid.delta_net), hybrid.delta_net.heads),
        )
    if hybrid.short_conv:
        by_letter["C"] = MixerWeights(
            short_conv_weights(h), short_conv_parameters(h, hybrid.short_conv)
        )
    mix = hybrid.time_mix
    if mix:
        products = 2.0 * mix.inner
        if mix.heads:
            products = recurrence_products(recurrence_of_time_mix(mix), mix.heads)
        for letter, adds_values in (("R", False), ("T", True)):
            by_letter[letter] = MixerWeights(
                time_mix_weights(h, mix, adds_values=adds_values),
                time_mix_parameters(h, mix, adds_values=adds_values),
                products,
            )
    if hybrid.compressed_attention:
        for letter in COMPRESSED:
            by_letter[letter] = MixerWeights(
                compressed_weights(model, hybrid.compressed_attention, letter),
                compressed_parameters(model, hybrid.compressed_attention, letter),
            )
    if hybrid.hyper_connections:
        by_letter["H"] = MixerWeights(
            hyper_weights(h, hybrid.hyper_connections),
            hyper_parameters(h, hybrid.hyper_connections),
        )
    if hybrid.streams:
        by_letter["U"] = MixerWeights(
            update_weights(h, hybrid.streams), update_parameters(model, hybrid.streams)
        )
    # Without time mixing, channel mixing is that of RWKV-4.
    if "K" in letters:
        receptance = mix is None or mix.channel_receptance
        by_letter["K"] = MixerWeights(
            channel_mix_weights(h, model.ffn_hidden, receptance=receptance),
            channel_mix_parameters(h, model.ffn_hidden, receptance=receptance),
        )
    return {letter: weights for letter, weights in by_letter.items() if letter in letters}
