"""Op descriptors: what one event computes or moves, independent of model, layout and device.

The fields are the columns of the measurement tables, so that a row of a table and an event of
a program are the same thing. All are hashable: equal ops are one event (DistSim section 4.1:
events are told apart by operator name, parameters and input shape, and for communication by
whether they stay inside a node).
"""

from dataclasses import dataclass
from typing import Literal

from perfmodel.units import dtype_bytes

Pass = Literal["fwd", "bwd", "dgrad", "wgrad", "bwd_one_gemm", "grad_accum", "optimizer_update"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """`batch` products C[m, n] = A[m, k] B[k, n] (for `grouped_linear`, `groups` products of m rows).

    `dgrad` and `wgrad` rows carry the m, n, k of the gradient product itself; `bwd` carries the
    forward's m, n, k and stands for both gradient products.
    """

    op: str = "linear"
    dtype: str = "bf16"
    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1
    pass_: Pass = "fwd"
    accumulate: bool = False
    """Weight gradient accumulated into an fp32 buffer."""

    family = "gemm"

    @property
    def flops(self) -> float:
        """2mnk per product, twice that for `bwd` (both gradients)."""
        return 2.0 * self.batch * self.groups * self.m * self.n * self.k * (2 if self.pass_ == "bwd" else 1)

    @property
    def bytes(self) -> float:
        """Compulsory traffic: both inputs read, the output written (and read if accumulated)."""
        size = dtype_bytes(self.dtype)
        a, b, c = self.m * self.k, self.k * self.n, self.m * self.n
        per = (a + b + c) * size + (c * (8 - size) if self.accumulate else 0)
        if self.pass_ == "bwd":
            per = (2 * c + 2 * a + 2 * b) * size
        return float(per * self.batch * self.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Fused (flash) attention over `batch` sequences; `bwd` recomputes the scores."""

    op: str = "attention"
    dtype: str = "bf16"
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int = 0
    """Value head size; 0 means equal to `head_dim`."""
    causal: bool = True
    window: int = 0
    """Sliding window in tokens; 0 means none."""
    phase: str = "training"
    pass_: Pass = "fwd"

    family = "attention"

    @property
    def flops(self) -> float:
        """Matmul FLOPs of the visible part of the score matrix; backward counts 2.5 x forward
        (five products instead of two, flash attention 2, arXiv 2307.08691 section 3.1)."""
        q, kv = float(self.seq_q), float(self.seq_kv)
        pairs = q * kv
        if self.causal:
            # query i (from the end) sees kv - (q - 1 - i) keys
            pairs = q * kv - q * (q - 1) / 2 if kv >= q else kv * (kv + 1) / 2
        if 0 < self.window < kv:
            pairs = min(pairs, q * self.window)
        per = 2.0 * pairs * (self.head_dim + (self.head_dim_v or self.head_dim))
        return self.batch * self.heads * per * (2.5 if self.pass_ == "bwd" else 1.0)

    @property
    def bytes(self) -> float:
        """Q, K, V read and the output written once; backward also reads and writes gradients."""
        dv = self.head_dim_v or self.head_dim
        q = self.heads * self.seq_q * (self.head_dim + dv)
        kv = self.kv_heads * self.seq_kv * (self.head_dim + dv)
        return float(self.batch * (q + kv) * dtype_bytes(self.dtype) * (2.5 if self.pass_ == "bwd" else 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBound:
    """Element-wise and row-wise kernels over a rows x hidden tensor."""

    op: str
    dtype: str = "bf16"
    rows: int
    hidden: int
    n_inputs: int = 1
    pass_: Pass = "fwd"

    family = "memory"

    @property
    def flops(self) -> float:
        return float(self.rows) * self.hidden

    @property
    def bytes(self) -> float:
        """(inputs + 1 output) x elements x element size; `bwd` reads one more (the saved value)."""
        n = self.n_inputs + 1 + (1 if self.pass_ == "bwd" else 0)
        return float(self.rows) * self.hidden * n * dtype_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Table lookup of `tokens` rows (forward) or scatter-add of their gradients (`bwd`)."""

    op: str = "embedding"
    dtype: str = "bf16"
    tokens: int
    hidden: int
    vocab: int
    pass_: Pass = "fwd"

    family = "embedding"

    @property
    def flops(self) -> float:
        return float(self.tokens) * self.hidden if self.pass_ != "fwd" else 0.0

    @property
    def bytes(self) -> float:
        """Rows read and written; backward reads, adds and writes."""
        return float(self.tokens) * self.hidden * dtype_bytes(self.dtype) * (3 if self.pass_ == "bwd" else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """One fused optimizer update of `n_params` local parameters."""

    op: str = "adam"
    dtype: str = "fp32"
    n_params: int
    bytes_per_param: float = 30.0
    """Memory traffic per parameter: Adam with fp32 states and a 2-byte copy reads the gradient (4),
    master, momentum, variance (12) and writes them (12) and the 2-byte weight (2) = 30."""
    tensors: int = 1
    pass_: Pass = "optimizer_update"

    family = "optimizer"

    @property
    def flops(self) -> float:
        return 12.0 * self.n_params

    @property
    def bytes(self) -> float:
        return self.bytes_per_param * self.n_params


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """2-D convolution, NCHW."""

    op: str = "conv2d"
    dtype: str = "fp32"
    batch: int
    c_in: int
    h_in: int
    w_in: int
    c_out: int
    k_h: int
    k_w: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    groups: int = 1
    pass_: Pass = "fwd"

    family = "conv"

    @property
    def h_out(self) -> int:
        return (self.h_in + 2 * self.pad_h - self.k_h) // self.stride_h + 1

    @property
    def w_out(self) -> int:
        return (self.w_in + 2 * self.pad_w - self.k_w) // self.stride_w + 1

    @property
    def flops(self) -> float:
        """Direct-convolution FLOPs; `bwd` counts both gradients."""
        macs = self.batch * self.c_out * self.h_out * self.w_out * self.c_in * self.k_h * self.k_w / self.groups
        return 2.0 * macs * (2 if self.pass_ == "bwd" else 1)

    @property
    def bytes(self) -> float:
        x = self.batch * self.c_in * self.h_in * self.w_in
        w = self.c_out * self.c_in * self.k_h * self.k_w / self.groups
        y = self.batch * self.c_out * self.h_out * self.w_out
        return (x + w + y) * dtype_bytes(self.dtype) * (2.0 if self.pass_ == "bwd" else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoE:
    """Fused expert feed-forward of one rank after routing (gate, up and down products)."""

    op: str = "moe"
    dtype: str = "bf16"
    tokens: int
    """Tokens of the rank before routing; each visits `topk` of `experts` experts."""
    hidden: int
    inter: int
    topk: int
    experts: int
    moe_tp: int = 1
    moe_ep: int = 1
    distribution: str = "balanced"
    pass_: Pass = "fwd"

    family = "moe"

    @property
    def flops(self) -> float:
        """Three products of hidden x inter per routed token on this rank (gated feed-forward)."""
        routed = self.tokens * self.topk / self.moe_ep
        f = 6.0 * routed * self.hidden * self.inter / self.moe_tp
        return f * (2 if self.pass_ == "bwd" else 1)

    @property
    def bytes(self) -> float:
        routed = self.tokens * self.topk / self.moe_ep
        active = min(self.experts / self.moe_ep, routed)
        weights = 3.0 * active * self.hidden * self.inter / self.moe_tp
        act = routed * (2 * self.hidden + 3 * self.inter / self.moe_tp)
        return (weights + act) * dtype_bytes(self.dtype) * (2 if self.pass_ == "bwd" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over a group of ranks, sized as nccl-tests does.

    `bytes`: all_reduce the buffer; all_gather the gathered output; reduce_scatter the full input;
    all_to_all the buffer of one rank; send_recv the message; broadcast the buffer.
    """

    collective: CollectiveKind
    bytes: float
    num_ranks: int
    ranks_per_node: int
    """Ranks of this group that share a node (innermost network level)."""
    dtype: str = "bf16"
    level: int = 0
    """Outermost network level of the cluster that the group spans."""
    concurrent: int = 1
    """Groups of this kind that share each node's outgoing links at the same time."""

    @property
    def family(self) -> str:
        """One regressor family per collective kind."""
        return self.collective

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)


KernelOp = Gemm | Attention | MemoryBound | Embedding | OptimizerStep | Convolution | MoE
Op = KernelOp | Collective
