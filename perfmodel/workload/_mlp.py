"""Multi-layer perceptrons (DistIR, arXiv 2111.05426, section 5): square dense layers with ReLU."""

from dataclasses import replace

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec import Job, Mlp
from perfmodel.workload._block import BlockOps, Comm, Shard
from perfmodel.workload._linear import linear
from perfmodel.workload._local import Precision, divide
from perfmodel.workload._piece import Piece, assemble, pointwise


def mlp_blocks(model: Mlp, job: Job, shard: Shard) -> tuple[tuple[BlockOps, int], ...]:
    """One block per layer; under tensor parallelism one per column- and row-parallel pair of layers.

    Raises:
        LayoutError: if tp does not divide the hidden size or leaves an unpaired layer.
    """
    tp, hidden, precision = shard.tp, model.hidden, Precision.of(job)
    rows = shard.micro_batch * job.seq_len
    divide(model, Reason.HIDDEN, f"hidden={hidden} is", hidden, "tp", tp)
    if tp > 1 and model.layers % 2:
        raise LayoutError(
            f"{model.name}: tp={tp} pairs layers, but there are {model.layers}; use tp=1", Reason.PAIRED_LAYERS
        )
    if shard.cp > 1 or shard.ep > 1 or shard.expert_tp != tp:
        raise LayoutError(
            f"{model.name}: cp={shard.cp} and ep={shard.ep} must be 1 and etp={shard.expert_tp} left "
            "out, it has no sequence or experts to split",
            Reason.UNSPLIT, "cp or ep",
        )  # fmt: skip
    n_bytes = float(rows) * hidden * precision.act_bytes

    def layer(name: str, pieces: list[Piece]) -> BlockOps:
        return assemble(name, pieces, train=job.mode == "train", input_bytes=n_bytes, workspace_bytes=n_bytes,
                        boundary_bytes=n_bytes)  # fmt: skip

    def relu(width: int) -> Piece:
        # in place, its output is all that is kept, as the next layer's input; else its gradient is taken of its input
        saved = 0.0 if job.fused_kernels else float(rows) * width * precision.act_bytes
        return pointwise(precision, [("relu", 1)], rows, width, saved_bytes=saved)

    if tp == 1:
        return ((layer("mlp_layer", [linear(precision, rows, hidden, hidden), relu(hidden)]), model.layers),)
    reduce = Comm(collective="all_reduce", bytes=n_bytes, group="tp")
    inner = hidden // tp
    pair = [
        linear(precision, rows, inner, hidden, backward_comm=(replace(reduce, overlappable=True),)),
        relu(inner),
        linear(precision, rows, hidden, inner, forward_comm=(reduce,)),
        relu(hidden),
    ]
    return ((layer("mlp_pair", pair), model.layers // 2),)
