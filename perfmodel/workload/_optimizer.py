"""The optimizer step."""

from perfmodel.ops import OptimizerStep
from perfmodel.spec import Job
from perfmodel.units import dtype_bytes
from perfmodel.workload._local import storage_dtype

NORM_AND_CLIP_BYTES = 4 + 8
UNSCALE_BYTES = 6 + 8


def optimizer_op(n_params_local: int, job: Job, sharded: bool = False, *, tensors: int = 1) -> OptimizerStep:
    """The update of the parameters whose states this device holds.

    Traffic per parameter with fp32 states (mixed-precision Adam): gradient read, master weight,
    momentum and variance read and written, weight in the compute type written; before it the gradients are read for
    their norm and rescaled to clip it (4 + 8 bytes), and fp16 gradients are copied to fp32 and rid of the loss scale
    (6 + 8 bytes; Megatron-LM, DeepSpeed and FSDP do each in a pass of its own). SGD keeps momentum
    only. In fp32 training weight and master are one. Plain SGD reads gradient and weight and writes the weight.

    Args:
        n_params_local: parameters updated here (already divided by the sharding degree).
        sharded: states live in one flat buffer (ZeRO), so that the update is a single kernel.
        tensors: separate parameter tensors otherwise.
    """
    weight = storage_dtype(job.dtype)
    states = 3 if job.optimizer == "adam" else 2
    updated = 2 * 4 * states + (0 if weight == "fp32" else dtype_bytes(weight))
    if job.optimizer == "plain-sgd":
        updated = 2 * dtype_bytes(weight)
    traffic = dtype_bytes(job.grad_dtype) + updated
    if weight != "fp32" and job.optimizer == "adam":
        traffic += NORM_AND_CLIP_BYTES + (UNSCALE_BYTES if weight == "fp16" else 0)
    return OptimizerStep(
        op="adam" if job.optimizer == "adam" else "sgd",
        n_params=n_params_local,
        bytes_per_param=float(traffic),
        tensors=1 if sharded else tensors,
    )
