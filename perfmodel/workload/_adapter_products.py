"""Multiply-adds of low-rank adapters (LoRA) in the layers of a transformer."""

from collections.abc import Mapping

from perfmodel.spec import AdapterModule, Job, Transformer
from perfmodel.workload._attention import projection_outputs
from perfmodel.workload._pointwise import inner_outputs
from perfmodel.workload._weights import head_dims


def adapter_products(
    model: Transformer, job: Job, letters: Mapping[str, int], s_out: float
) -> float:
    """Multiply-adds of a sequence in adapters.

    Args:
        letters: number of sub-layers by letter of `MIXERS`.
        s_out: tokens of the sequence in the decoder.
    """
    # Latent attention has an adapter beside its output alone, and so has cross-attention.
    before, behind = attention_adapters(model, job)
    feed_forward = ffn_adapters(model, job, model.ffn_hidden)
    attention_by_letter = {
        "*": (before, behind),
        "W": attention_adapters(model.in_window, job),
        "Q": attention_adapters(model, job, own_keys=False),
        "V": attention_adapters(model.in_window, job, own_keys=False),
    }
    per_token = letters["-"] * feed_forward
    for letter, adapters in attention_by_letter.items():
        per_token += letters[letter] * sum(adapters)
    # Layers with a feed-forward of their own size add what it has beyond an empty one.
    per_token += ffn_adapters(model, job, model.uneven_inner) - ffn_adapters(model, job, 0)
    per_rank = job.tokens_per_sequence * per_token
    per_rank += model.decoder_layers * s_out * (before + 2 * behind + feed_forward)

    # Streams of text and image have adapters of their own, as far as they leave a layer; the last
    # product of a single stream takes what attention and the feed-forward give.
    if model.inputs.text_condition:
        s, text_tokens = job.tokens_per_sequence, model.inputs.text_condition.tokens
        stream = before + behind + feed_forward
        single = before + _single_stream_adapters(model, job)
        per_rank += letters["X"] * s * behind
        per_rank += letters["D"] * (s + text_tokens) * stream
        per_rank += letters["O"] * (s * stream + text_tokens * before)
        per_rank += letters["N"] * (s + text_tokens) * single
    return float(job.fine_tuning.adapter_rank * per_rank)


def ffn_adapters(model: Transformer, job: Job, inner: int) -> int:
    """Multiply-adds per token and unit of rank in adapters of a feed-forward with this many inner
    elements."""
    first = inner_outputs(model, inner)
    return _adapted(job, first, model.hidden) + _adapted(job, {"linear_fc2": model.hidden}, inner)


def _single_stream_adapters(model: Transformer, job: Job) -> int:
    """Multiply-adds per token and unit of rank in adapters of a single-stream layer, besides those
    of queries, keys and values."""
    first = _adapted(job, inner_outputs(model, model.ffn_hidden), model.hidden)
    last_inputs = model.heads * model.value_dim + model.ffn_hidden
    return first + _adapted(job, {"linear_fc2": model.hidden}, last_inputs)


def _adapted(job: Job, products: Mapping[AdapterModule, int], k: int) -> int:
    """Multiply-adds per token and unit of rank in adapters of products with `k` inputs, by their
    outputs."""
    # An adapter of a product of k inputs and n outputs takes k + n.
    return sum(k + n for name, n in products.items() if name in job.fine_tuning.adapter_modules)


def attention_adapters(model: Transformer, job: Job, *, own_keys: bool = True) -> tuple[int, int]:
    """Multiply-adds per token and unit of rank in adapters before and after one attention's core.

    Args:
        own_keys: False where keys and values are those of an earlier layer.
    """
    _, d_v = head_dims(model)
    behind = _adapted(job, {"linear_proj": model.hidden}, model.heads * d_v)
    if model.latent_attention:
        return 0, behind
    outputs = projection_outputs(
        model, heads=model.heads, kv_heads=model.kv_heads if own_keys else 0
    )
    return _adapted(job, outputs, model.hidden), behind
