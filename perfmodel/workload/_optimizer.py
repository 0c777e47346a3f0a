"""The optimizer step."""

from collections import Counter

from perfmodel.ops import Gemm, KernelOp, OptimizerStep
from perfmodel.spec import OPTIMIZERS, Job
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import BlockOps
from perfmodel.workload._local import storage_dtype

NORM_AND_CLIP_BYTES = 4 + 8
"""Bytes per parameter: the gradient read for the norm; read and written again to clip it."""
UNSCALE_BYTES = 6 + 8
"""Bytes per parameter: an fp16 gradient copied to fp32; read and written again to take the loss scale off."""
AVERAGE_BYTES = 4 + 8
"""Bytes per parameter: the weight read; its average read and written."""


def optimizer_op(n_params_local: int, job: Job) -> OptimizerStep:
    """The update of the parameters whose states this device holds, by one kernel.

    The traffic per parameter is that of mixed-precision Adam with fp32 states, or of another optimizer as `OPTIMIZERS`
    has it.

    Args:
        n_params_local: parameters updated here (already divided by the sharding degree).
    """
    # States and master weight are read and written, the weight in the compute type is written. In fp32 training
    # weight and master are one; without a master copy the weight itself is read and written.
    weight, kind = storage_dtype(job.dtype), OPTIMIZERS[job.optimizer]
    if kind.master:
        updated = 2 * (4 + kind.state_bytes) + (0 if weight == "fp32" else dtype_bytes(weight))
    else:
        updated = 2 * (dtype_bytes(weight) + kind.state_bytes)
    traffic = kind.gradient_reads * dtype_bytes(job.gradients.grad_dtype) + updated + kind.further_bytes
    if job.weight_average:
        traffic += AVERAGE_BYTES

    # Before the update gradients are clipped, and fp16 ones rid of the loss scale: Megatron-LM, DeepSpeed and FSDP
    # do each in a pass of its own.
    if weight != "fp32" and kind.clips:
        traffic += NORM_AND_CLIP_BYTES
        if weight == "fp16":
            traffic += UNSCALE_BYTES
    return OptimizerStep(op=kind.kernel, n_params=n_params_local, bytes_per_param=float(traffic))


def orthogonalisation(block: BlockOps, job: Job, *, experts: bool) -> Counter[KernelOp]:
    """The bf16 products by which Muon orthogonalises the updates of a layer's matrices.

    The matrices are those of the layer's routed experts, or those outside them. Tensor-parallel ranks do so with their
    own shards (the block-wise mode of Megatron-Core's Muon).
    """
    products: Counter[KernelOp] = Counter()
    steps = OPTIMIZERS[job.optimizer].newton_schulz
    if not steps or not block.is_layer:
        return products

    # Of a matrix X of a rows and b >= a columns a Newton-Schulz iteration is A = X X', A A, and (b A + c A A) X,
    # 2 a^2 b + 2 a^3 + 2 a^2 b FLOPs.
    for shape, count in block.weight_shapes(experts=experts).items():
        a, b = sorted(shape)
        for n, k in ((a, b), (a, a), (b, a)):
            products[Gemm(dtype="bf16", m=a, n=n, k=k)] += steps * count
    return products
