"""What the training framework adds to the sum of its kernels: named, physical constants."""

from dataclasses import dataclass
from math import exp, log, sqrt

from perfmodel.prediction._sustained import Sustained, sustained
from perfmodel.prediction._unknown import Shares, Unknown, unknown
from perfmodel.spec import Attention, Convolution, Device, Gemm, MoE, Op

_SUSTAINED = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Host and allocator costs of a training framework (defaults: eager PyTorch, Megatron-LM like)."""

    host_op_s: float = 66e-6
    """Host time to issue one operator: Python, autograd and dispatch of the few kernels that it is in an eager
    framework. A block of short operators runs no faster than this; 0 for a compiled step (XLA, CUDA graphs).
    Small models show it as a floor per layer that neither batch nor tensor parallelism lowers: 4.5 ms for forward
    and backward of a nanotron layer of 68 operators (30 and 38, counted in its source)."""
    forward_bookkeeping: int = 0
    backward_bookkeeping: int = 0
    """Operators that a layer's passes issue beyond the kernels counted here: sums over masks, products in parts,
    partial sums. They take the host's time and next to none of the device's."""
    kernel_gap_s: float = 1.0e-6
    """Device idle time between two dependent kernels of one stream."""
    attention_slowdown: float = 1.0
    """Time of fused attention relative to the fastest kernels measured on the device: older generations of the
    kernel are slower. FlashAttention-2 on H100 takes 1.5 to 2 times as long as FlashAttention-3 (Shah et al. 2024,
    arXiv 2407.08608, abstract); for earlier ones the ratios are assumed (`_attention_kernels`)."""
    sustained: Sustained | None = None
    """By architecture, log of the time of 16-bit matrix products and attention in a training step relative to the same
    kernels timed alone: under sustained load the power limit lowers the clock. None for what all published sources
    say, read when first needed."""
    tp_overlap_loss: float = 0.0
    """Share of a block's hidden collectives that shows after all: they take part of the device from the kernels
    they hide behind."""
    blocking_sends: bool = False
    """A transfer between stages holds up the sender's kernels (one stream for everything, as in DistIR, section 2.1)
    instead of running beside them."""
    dp_overlap_loss: float = 0.0
    """The same of gradient reductions and weight gathers that run beside passes."""
    straggling: float = 0.0
    """Relative spread of the ranks' speeds. A step waits for the slowest of n ranks, which takes
    exp(spread sqrt(2 ln n)) of the usual time (mean of the largest of n normal draws, to first order)."""
    step_overhead_s: float = 0.0
    """Time of a step that no kernel accounts for: data loading, logging, bookkeeping."""
    context_bytes: float = 1.0e9
    """CUDA context, library handles and communicator buffers that no tensor accounts for."""
    bucket_bytes: float = 320e6
    """Copies of gradients that a reduction holds in flight: two buckets of 40 M fp32 elements (Megatron-LM's default
    size before its buffers were reduced in place); 0 where they are reduced where they lie (Megatron-LM's contiguous
    gradient buffers, without overlap)."""
    ddp_buckets: bool = False
    """Without ZeRO, torch's DistributedDataParallel keeps a 16-bit bucket of every gradient besides."""
    cached_weight_gradients: bool = False
    """Gradients accumulate inside the products, and autograd is handed a dummy of the weight's shape instead, kept for
    each distinct shape (Transformer Engine's `get_dummy_wgrad`)."""
    memory_margin: float = 0.04
    """Share of device memory that fragmentation makes unusable; a layout fits below the rest."""
    faster: float = 0.08
    slower: float = 0.25
    """Where most runs lie, relative to the prediction: what calibration by whole runs expects of one site before it has
    any, and what importers know of graphs. Kernels timed alone run at clocks and with caches that training does not
    sustain, and stragglers, contention and unmodelled work only ever add."""
    unknown: Unknown | None = None
    """What of the step no kernel table knows, for its 90 % interval; None for what the residuals of all published
    sources say, read when first needed."""
    unstated: float = 0.0
    """Share of the run's settings that had to be assumed."""

    def half_widths(self, shares: Shares) -> tuple[float, float]:
        """Log half-widths, below and above, of a step with these shares of what is known badly."""
        known = unknown() if self.unknown is None else self.unknown
        return known.half_widths({**shares, "unstated": self.unstated})

    @property
    def costs_steps(self) -> bool:
        """Whether a step takes more than its events and the gaps between them."""
        return self.dp_overlap_loss > 0 or self.straggling > 0 or self.step_overhead_s > 0

    def slowdown(self, op: Op, device: Device) -> float:
        """Time of an event in training relative to the cost models' time for it."""
        if not isinstance(op, (Attention, Convolution, Gemm, MoE)):
            return 1.0
        slower = sustained() if self.sustained is None else self.sustained
        clock = exp(dict(slower).get(device.architecture, 0.0)) if op.dtype in _SUSTAINED else 1.0
        return clock * (self.attention_slowdown if isinstance(op, Attention) else 1.0)

    def slowest_of(self, ranks: int) -> float:
        """Time of the slowest of so many ranks, relative to the usual one."""
        return exp(self.straggling * sqrt(2 * log(ranks)))


EAGER = Framework()
COMPILED = Framework(host_op_s=0.0)
"""A step that is one compiled program."""
