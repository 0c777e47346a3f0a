"""The optimizer step."""

from collections import Counter

from perfmodel.ops import Gemm, KernelOp, OptimizerStep
from perfmodel.spec import OPTIMIZERS, Job
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import BlockOps
from perfmodel.workload._local import storage_dtype

CLIPPING_PASSES = 3
"""The gradient is read for the norm; read and written again to clip it."""
UNSCALING_PASSES = 2
"""The gradient is read and written to take the loss scale off."""
WIDEN_BYTES = 6
"""Bytes per parameter: an fp16 gradient copied to fp32."""
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
    reduced_bytes = dtype_bytes(job.gradients.grad_dtype)
    if kind.master:
        updated = 2 * (4 + kind.state_bytes) + (0 if weight == "fp32" else dtype_bytes(weight))
    else:
        # Gradients have the type of such weights by now, whatever they were reduced in (PyTorch
        # torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`: converted to `orig_dtype`).
        reduced_bytes = min(reduced_bytes, dtype_bytes(weight))
        updated = 2 * (dtype_bytes(weight) + kind.state_bytes)
    traffic = kind.gradient_reads * reduced_bytes + updated + kind.further_bytes
    if job.weight_average:
        traffic += AVERAGE_BYTES

    # Before the update gradients are clipped, and fp16 ones rid of the loss scale: Megatron-LM, DeepSpeed and FSDP
    # do each in a pass of its own, on fp32 gradients where there are fp32 weights.
    if weight != "fp32" and kind.clips:
        clipped_bytes = 4 if kind.master else reduced_bytes
        traffic += CLIPPING_PASSES * clipped_bytes
        if weight == "fp16":
            traffic += UNSCALING_PASSES * clipped_bytes + (WIDEN_BYTES if kind.master else 0)
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
