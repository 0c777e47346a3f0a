"""Op descriptors: what one event computes or moves, independent of model, layout and device.

The fields are the columns of the measurement tables, so that a row of a table and an event of
a program are the same thing. All are hashable: equal ops are one event (DistSim section 4.1:
events are told apart by operator name, parameters and input shape, and for communication by
whether they stay inside a node).
"""

from dataclasses import dataclass
from typing import Any, Literal

from perfmodel.spec._work import (
    NUMBERS,
    attention_work,
    conv_work,
    embedding_work,
    gemm_work,
    memory_work,
    moe_work,
    optimizer_work,
)
from perfmodel.units import dtype_bytes

Pass = Literal["fwd", "bwd", "dgrad", "wgrad", "bwd_one_gemm", "grad_accum", "optimizer_update"]
NONGATED_MOE = "moe_nongated"
"""Name of experts without a gate: two products per token."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"]


def _columns(op: Any) -> dict[str, Any]:
    """Fields of a kernel as the formulas of its work read them."""
    return {name: getattr(op, name) for name in op.__slots__} | {
        "element_bytes": dtype_bytes(op.dtype), "bwd": int(op.pass_ == "bwd"),
    }  # fmt: skip


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
        return float(gemm_work(NUMBERS, _columns(self)).flops)

    @property
    def bytes(self) -> float:
        """Compulsory traffic: both inputs read, the output written (and read if accumulated)."""
        return float(gemm_work(NUMBERS, _columns(self)).bytes)


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
        """Matmul FLOPs of the visible part of the score matrix; backward counts 2.5 x forward."""
        return float(attention_work(NUMBERS, self._columns()).flops)

    @property
    def bytes(self) -> float:
        """Q and the K and V within the window read and the output written once; backward also moves gradients."""
        return float(attention_work(NUMBERS, self._columns()).bytes)

    def _columns(self) -> dict[str, Any]:
        own = {"head_dim_v": self.head_dim_v or self.head_dim, "mixed_n_decode": 0, "mixed_kv_decode": 0}
        return _columns(self) | own


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
        """One operation per element."""
        return float(memory_work(NUMBERS, _columns(self)).flops)

    @property
    def bytes(self) -> float:
        """(inputs + 1 output) x elements x element size; `bwd` reads one more (the saved value)."""
        return float(memory_work(NUMBERS, _columns(self)).bytes)


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
        """One operation per element."""
        return float(embedding_work(NUMBERS, _columns(self)).flops)

    @property
    def bytes(self) -> float:
        """Rows read and written; backward reads, adds and writes."""
        return float(embedding_work(NUMBERS, _columns(self)).bytes)


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
        """12 per parameter."""
        return float(optimizer_work(NUMBERS, _columns(self)).flops)

    @property
    def bytes(self) -> float:
        """`bytes_per_param` for each."""
        return float(optimizer_work(NUMBERS, _columns(self)).bytes)


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
        return float(conv_work(NUMBERS, _columns(self)).flops)

    @property
    def bytes(self) -> float:
        """Image, kernel and result moved once each; `bwd` for both gradients."""
        return float(conv_work(NUMBERS, _columns(self)).bytes)


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
        """Three products of hidden x inter per routed token on this rank (two without a gate)."""
        return float(moe_work(NUMBERS, self._columns()).flops)

    @property
    def bytes(self) -> float:
        """Weights of the experts that tokens reach, and activations."""
        return float(moe_work(NUMBERS, self._columns()).bytes)

    def _columns(self) -> dict[str, Any]:
        return _columns(self) | {"nongated": int(self.op == NONGATED_MOE)}


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
    relayed_bytes: float = 0.0
    """Of an all-to-all over nodes: what each rank sends on inside its node at the same time, of all that its node
    receives. The collective takes as long as the longer of the two."""

    @property
    def family(self) -> str:
        """One regressor family per collective kind."""
        return self.collective

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)


KernelOp = Gemm | Attention | MemoryBound | Embedding | OptimizerStep | Convolution | MoE
Op = KernelOp | Collective
