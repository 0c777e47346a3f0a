"""Generations of fused attention kernels: how much longer the older ones take.

The kernel tables hold the fastest kernel of each device (cuDNN, FlashAttention-3 or like it from Hopper on,
FlashAttention-2 before), but frameworks of an earlier day ran what there was. No table of ours times one generation
against another: the ratios are assumptions, of the size that the kernels' authors report, and never fitted to a run.
"""

from dataclasses import replace
from math import sqrt
from typing import Final

from perfmodel.ops import Attention, Op
from perfmodel.spec import AttentionKernel, Device, Job

_SINCE_HOPPER: Final = sqrt(1.5 * 1.75)
"""FlashAttention-3 is 1.5 to 2.0 times as fast as FlashAttention-2 on H100 (Shah et al. 2024, arXiv 2407.08608,
abstract). Assumed: the lower half of that range, since the backward pass, the larger part, gains less; its geometric
mean."""
_OLDER: Final = {
    "flash-2": 1.0,
    "flash-1-triton": sqrt(1.3 * 2.5),
    "flash-1": sqrt(1.7 * 3.0),
}
"""Time relative to FlashAttention-2, assumed: geometric means of 1.3 to 2.5 and of 1.7 to 3.0. Dao 2023 (arXiv
2307.08691, abstract) says of the first that it takes about twice as long."""
_BEFORE_HOPPER: Final = ("Volta", "Turing", "Ampere", "Ada")


FORWARD_SHARE: Final = 2 / 5
"""Products of a flash forward (2) over those of its backward (5)."""


def training_forward(op: Op, device: Device, job: Job) -> Attention | None:
    """The backward whose FLOP rate an attention forward reaches at least; None where the tables time training kernels.

    Of TPUs the tables hold the paged attention of inference servers, whose forward takes longer than a backward. A
    training kernel keeps its keys and values in one piece, and its forward has no atomics and fewer products.
    """
    if not isinstance(op, Attention) or op.pass_ != "fwd" or device.vendor != "Google" or job.mode != "train":
        return None
    return replace(op, pass_="bwd")


def attention_slowdown(kernel: AttentionKernel, device: Device) -> float:
    """Time of a generation of fused attention relative to the fastest measured on a device."""
    if kernel == "fastest" or device.vendor != "NVIDIA":
        return 1.0
    if kernel == "flash-2-then-cudnn":
        return 1.0 if device.architecture == "Blackwell" else attention_slowdown("flash-2", device)
    return _OLDER[kernel] * (1.0 if device.architecture in _BEFORE_HOPPER else _SINCE_HOPPER)
