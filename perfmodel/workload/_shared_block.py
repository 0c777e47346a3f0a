"""Weights that several layers share: of whole groups of layers, and of blocks in some (Zamba, arXiv
2405.16712)."""

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.spec import Transformer
from perfmodel.spec.parts import SharedBlock
from perfmodel.workload._attention import projected
from perfmodel.workload._attention_core import attention_core
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, memory
from perfmodel.workload._pointwise import norm, norm_params, rotary, small_norm
from perfmodel.workload._weights import ffn_weights


def shared_block(
    model: Transformer,
    local: ShardSizes,
    block: SharedBlock,
    feed_forward: Sequence[Piece],
    *,
    owner: bool,
) -> list[Piece]:
    """Attention over the hidden state beside the token's embedding, a feed-forward, and a
    projection that is added to the input of what follows (transformers
    models/zamba2/modeling_zamba2.py `Zamba2HybridLayer`).

    Args:
        owner: False where the weights are those of an earlier layer: only adapters and the last
            projection count.
    """
    hidden, heads, kv_heads, d = local.hidden, local.heads, local.kv_heads, model.head_dim
    rows = local.norm_tokens

    # The input of attention is twice as wide as the hidden state, the output is not.
    copied = memory(local.precision, "mul_scalar", rows, 2 * hidden)
    attention = [
        Piece(forward=(copied,), backward_input=(copied,)),
        small_norm(model, local, rows, 2 * hidden),
        column_linear(local, (heads + 2 * kv_heads) * d, 2 * hidden, kept_output=1.0),
    ]
    if model.inputs.positions == "rope":
        attention.append(rotary(local, (heads + kv_heads) * d))
    core = attention_core(
        model,
        local,
        kv_heads=kv_heads,
        d_qk=d,
        d_v=d,
        seq_kv=local.keys,
        causal=model.attention.causal,
        window=0,
    )
    shared = [
        *attention,
        core,
        row_linear(local, hidden, heads * d),
        norm(model, local),
        *feed_forward,
    ]
    if not owner:
        shared = [replace(piece, params=0) for piece in shared]

    # Adapters start on every rank, as low-rank projections of latent attention do; their second
    # products are column-parallel.
    adapters = []
    if block.attention_adapters:
        adapters += [
            linear(local.precision, rows, 3 * block.adapter_rank, 2 * hidden, kept_input=0.0),
            column_linear(local, (heads + 2 * kv_heads) * d, block.adapter_rank),
        ]
    if block.adapter_rank:
        adapters += [
            linear(local.precision, rows, block.adapter_rank, hidden, kept_input=0.0),
            column_linear(local, local.ffn * model.inner_projections, block.adapter_rank),
        ]
    added = memory(local.precision, "add", rows, hidden, 2)
    last = linear(local.precision, rows, hidden, hidden)
    return [*shared, *adapters, last, Piece(forward=(added,), backward_input=(added,))]


def shared_weights(model: Transformer) -> int:
    """Elements of the weights of one block that layers share."""
    inputs = 2 * model.hidden * sum(projected(model, heads=model.heads, kv_heads=model.kv_heads))
    return (
        inputs + model.heads * model.head_dim * model.hidden + ffn_weights(model, model.ffn_hidden)
    )


def own_weights(model: Transformer, block: SharedBlock) -> int:
    """Elements of the weights that every layer with a shared block has of its own."""
    hidden, rank = model.hidden, block.adapter_rank
    weights = hidden * hidden + rank * (hidden + model.ffn_hidden * model.inner_projections)
    if block.attention_adapters:
        weights += rank * (
            6 * hidden + sum(projected(model, heads=model.heads, kv_heads=model.kv_heads))
        )
    return weights


def shared_block_parameters(model: Transformer, block: SharedBlock, layers: int) -> int:
    """Parameters of all shared blocks, with their norms, and of what so many layers have of their
    own."""
    copies = min(block.copies, layers)
    norms = norm_params(model, 2 * model.hidden) + norm_params(model, model.hidden)
    return copies * (shared_weights(model) + norms) + layers * own_weights(model, block)


def owners(model: Transformer) -> list[int]:
    """For each layer the number of the layer whose weights it uses, its own if it shares none with
    earlier ones."""
    # The layers of a group follow one another and use the weights of its first (Transformers
    # modeling_albert.py, `AlbertTransformer`: group i * groups / layers).
    n_layers = len(model.stack)
    groups = model.layer_groups or n_layers
    owner_of = []
    for i in range(n_layers):
        starts_group = i == 0 or i * groups // n_layers > (i - 1) * groups // n_layers
        owner_of.append(i if starts_group else owner_of[-1])

    # Layers with a shared block take the copies in turn.
    if model.hybrid.shared_block:
        with_block = [i for i, word in enumerate(model.stack) if "A" in word]
        for number, i in enumerate(with_block):
            owner_of[i] = with_block[number % model.hybrid.shared_block.copies]
    return owner_of
