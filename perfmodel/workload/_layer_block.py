"""Layers of a transformer as blocks: what they keep, work in and send to the next stage."""

from perfmodel.workload._block import BlockOps, Comm
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, assemble


def layer_block(
    name: str,
    local: ShardSizes,
    pieces: list[Piece],
    *,
    passed_on_bytes: float = 0.0,
    widest: int = 0,
    gradients: int = 2,
    streams: int = 1,
) -> BlockOps:
    """A layer that may be recomputed.

    Its workspace holds the gradient of the hidden state, and `gradients` tensors as large as the
    widest activation (`widest` elements, or the dense feed-forward's): the gradients of its input
    and of its result.
    """
    # Full recompute keeps the input alone, sharded along the sequence as norms see it.
    boundary_bytes, boundary_comm = sent_on(local, passed_on_bytes)
    elements = widest or local.tokens * max(local.ffn, local.hidden)
    return assemble(
        name,
        pieces,
        train=local.job.mode == "train",
        input_bytes=streams * local.norm_bytes,
        workspace_bytes=local.hidden_bytes + float(gradients) * elements * local.act_bytes,
        boundary_bytes=boundary_bytes,
        boundary_comm=boundary_comm,
        stops_recompute=local.job.activations.stops_recompute,
        modules=local.job.activations.recompute_modules,
    )


def sent_on(local: ShardSizes, passed_on_bytes: float) -> tuple[float, tuple[Comm, ...]]:
    """Bytes each device sends to the next stage, and how the receivers complete them.

    With sequence parallelism a rank sends its own part of the sequence. Without it, ranks of a
    tensor-parallel group hold equal activations: each sends a tp-th and the receivers gather
    (scatter/gather optimisation, SC21 arXiv 2104.04473 section 4.1).
    """
    # Either way a rank sends a tp-th; only without sequence parallelism the whole is needed after.
    all_bytes = local.hidden_bytes + passed_on_bytes
    if local.tp == 1 or local.sequence_parallel:
        return all_bytes / local.tp, ()
    return all_bytes / local.tp, (Comm(collective="all_gather", bytes=all_bytes, group="tp"),)
