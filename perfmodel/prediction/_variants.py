"""Passes that are not plain: several micro-batches at once, slices of a sequence, overlapped pairs."""

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.errors import LayoutError, Reason
from perfmodel.ops import Attention, KernelOp
from perfmodel.spec import Job
from perfmodel.workload import BlockOps

Variant = tuple[int, int, bool]
"""Micro-batches in one go, slice of the sequence, overlapped with another pass (`Structure.variants`)."""

PLAIN: Variant = (1, 0, False)
_KERNELS = ("forward", "backward_input", "backward_weight", "recompute_selective", "recompute_full")


def sliced_job(job: Job, slices: int) -> Job:
    """The job on one slice of the sequence.

    Raises:
        LayoutError: the sequence does not divide.
    """
    if job.seq_len % slices:
        raise LayoutError(f"sequence length {job.seq_len} is not divisible into {slices} slices", Reason.SLICES)
    return replace(job, seq_len=job.seq_len // slices)


def on_slice(blocks: Sequence[tuple[BlockOps, int]], index: int) -> list[tuple[BlockOps, int]]:
    """Blocks of one slice, whose causal attention also sees the keys and values of the slices before it."""
    return [(_block_on_slice(block, index), repeats) for block, repeats in blocks]


def _block_on_slice(block: BlockOps, index: int) -> BlockOps:
    kernels = {name: tuple((_op_on_slice(op, index), count) for op, count in getattr(block, name)) for name in _KERNELS}
    return replace(block, **kernels)


def _op_on_slice(op: KernelOp, index: int) -> KernelOp:
    if isinstance(op, Attention) and op.causal and op.seq_q == op.seq_kv:
        return replace(op, seq_kv=op.seq_kv * (index + 1))
    return op
