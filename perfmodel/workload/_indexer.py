"""The indexer of DeepSeek sparse attention (arXiv 2512.02556), replicated over ranks of tensor
parallelism."""

from dataclasses import replace

from perfmodel.errors import PerfModelError
from perfmodel.ops import Gemm
from perfmodel.spec import Transformer
from perfmodel.spec.parts import Indexer, LatentAttention
from perfmodel.workload._linear import linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, memory, pointwise


def indexer_pieces(model: Transformer, local: ShardSizes, indexer: Indexer) -> list[Piece]:
    """Projections to small queries, a key and a weight per head; scores of all keys; the choice of
    the best ones (section 2.1; transformers models/deepseek_v32/modeling_deepseek_v32.py
    `DeepseekV32Indexer`).

    The choice has no gradient. A loss of its own trains the indexer, whose inputs are detached
    (section 2.1.1): its products have gradients of their weights alone.
    """
    latent = _latent(model)
    rows, width, precision = local.norm_tokens, indexer.head_dim, local.precision
    # Attention keeps the hidden state, and the compressed queries, for products of its own.
    keys = linear(
        precision, rows, width + indexer.heads, local.hidden, kept_input=0.0, kept_output=1.0
    )
    queries = linear(
        precision, rows, indexer.heads * width, latent.q_lora_rank, kept_input=0.0, kept_output=1.0
    )
    normed = pointwise(precision, [("layer_norm", 1)], rows, width, params=2 * width)
    rotated = pointwise(
        precision, [("rope", 1)], rows, (indexer.heads + 1) * min(latent.qk_rope_head_dim, width)
    )

    # Scores of the heads are weighted and summed as they are made: one product over the elements of
    # all heads, of which the sum alone is written.
    scores = Gemm(
        op="bmm",
        dtype=precision.wide_dtype,
        batch=local.sequences,
        m=local.seq_local,
        n=local.keys,
        k=indexer.heads * width,
    )
    chosen = memory(
        precision, "softmax", local.sequences * local.seq_local, local.keys, dtype="fp32"
    )
    return [
        replace(keys, backward_input=()),
        normed,
        replace(queries, backward_input=()),
        rotated,
        Piece(forward=(scores, chosen), backward_input=(scores, scores)),
    ]


def _latent(model: Transformer) -> LatentAttention:
    """The latent attention that a model with an indexer has.

    Raises:
        PerfModelError: the model has none.
    """
    if model.latent_attention is None:
        raise PerfModelError(
            f"model {model.name}: an indexer needs latent_attention; add it, or leave the indexer out"
        )
    return model.latent_attention


def indexer_weights(model: Transformer, indexer: Indexer) -> int:
    """Elements of the three projections."""
    queries = _latent(model).q_lora_rank * indexer.heads * indexer.head_dim
    return queries + model.hidden * (indexer.head_dim + indexer.heads)


def indexer_parameters(model: Transformer, indexer: Indexer) -> int:
    """Parameters of one indexer, with the norm of its key."""
    return indexer_weights(model, indexer) + 2 * indexer.head_dim
