"""Blocks of a model: kernels, collectives, parameters and bytes on one device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

from perfmodel.errors import LayoutError
from perfmodel.ops import CollectiveKind, Exchange, Gemm, KernelOp
from perfmodel.spec import ContextParallel, Layout

Kernels = tuple[tuple[KernelOp, int], ...]
"""Kernels in order of execution, each with how often it runs in a row."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a layout that determines shapes; the key for deduplicating blocks."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel degree inside experts; `None`: `tp`."""
    micro_batch: int = 1
    sequence_parallel: bool = False
    cp_kind: ContextParallel = "ring"
    cp_balanced: bool = True
    ep_overlap: bool = False

    def __post_init__(self) -> None:
        degrees = {
            "tp": self.tp,
            "cp": self.cp,
            "ep": self.ep,
            "etp": self.expert_tp,
            "micro_batch": self.micro_batch,
        }
        for name, degree in degrees.items():
            if degree < 1:
                raise LayoutError(f"shard: {name} must be at least 1, got {degree}")

    @classmethod
    def of(cls, layout: Layout) -> "Shard":
        """The shard on a device of `layout`."""
        forms = layout.forms
        return cls(
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            micro_batch=layout.micro_batch,
            **{
                name: forms[name]
                for name in ("sequence_parallel", "cp_kind", "cp_balanced", "ep_overlap")
            },
        )

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree inside experts."""
        return self.tp if self.etp is None else self.etp


class ExpertChoice(NamedTuple):
    """The choice of experts, which determines how many ranks a token is sent to."""

    topk: int
    """Experts that each token chooses."""
    groups: int = 1
    """Groups that the experts are divided into."""
    groups_kept: int = 1
    """Groups that a token may choose its experts from."""

    def reached(self, parts: int) -> float:
        """Mean number of `parts` (equal groups of experts) with at least one of a token's experts.

        Choices are taken to be independent, so these are non-empty bins (Johnson and Kotz, "Urn
        Models", 1977, section 3.2).
        """
        # Groups that are spread over parts: the choices fall on the parts of the groups kept.
        if self.groups <= parts:
            parts_kept = parts * self.groups_kept / self.groups
            return parts_kept * (1 - (1 - 1 / max(1.0, parts_kept)) ** self.topk)

        # Groups that do not fall on parts limit nothing.
        groups_per_part, remaining_groups = divmod(self.groups, parts)
        if remaining_groups:
            return ExpertChoice(self.topk).reached(parts)

        # Several groups per part. It holds j of the kept ones with the chance of so many white
        # balls in a draw without replacement, and is then missed by all choices with (1 - j /
        # kept)^topk.
        missed = []
        for j in range(min(groups_per_part, self.groups_kept) + 1):
            draws = comb(groups_per_part, j) * comb(
                self.groups - groups_per_part, self.groups_kept - j
            )
            missed.append(draws * (1 - j / self.groups_kept) ** self.topk)
        return parts * (1 - sum(missed) / comb(self.groups, self.groups_kept))


@dataclass(frozen=True, kw_only=True)
class Comm:
    """A collective inside a block, before it is placed on a network."""

    collective: CollectiveKind
    bytes: float
    """Size as nccl-tests counts it, see `perfmodel.ops.Collective`."""
    group: Literal["tp", "cp", "ep", "etp", "dp"]
    count: int = 1
    overlappable: bool = False
    """Whether the op is independent of a neighbouring kernel (weight gradient, attention), so that
    it can overlap with it."""
    beside_attention: bool = False
    """Whether it can overlap only with the attention kernels of its phase."""
    follows: bool = False
    """Whether it runs only a few short kernels after another collective of the same ranks. The
    ranks are then synchronised, so that none waits, and there is no product with which `tp_overlap`
    could overlap ring steps."""
    choice: ExpertChoice | None = None
    """How tokens choose experts, if each token is sent to every rank only once; `bytes` then count
    one copy of each token."""
    exchange: Exchange | None = None
    """The library that carries it out, if it is a specialised one."""


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes that one micro-batch saves for backward, under each recompute mode."""

    none: float
    """Everything that backward reads."""
    selective: float
    """All except activations of the recomputed modules: core attention (Korthikanti section 5), or
    the job's `recompute_modules`."""
    full: float
    """Only the block's input."""


@dataclass(frozen=True, kw_only=True)
class BlockOps:
    """One block of the model for one micro-batch on one device.

    Times, memory and FLOPs of a stage are sums over its blocks. Backward work is split into what
    produces the input gradient (with all element-wise backward kernels) and the weight gradients.
    """

    name: str
    """Name for display only."""
    forward: Kernels
    is_layer: bool = True
    """Whether a pipeline may be cut before and after the block; embeddings and heads stay with a
    neighbouring layer."""
    backward_input: Kernels = ()
    """Gradients of inputs, and all element-wise backward kernels."""
    backward_weight: Kernels = ()
    """Events that compute gradients of weights."""
    recompute_selective: Kernels = ()
    """Forward work repeated in backward under selective recompute."""
    recompute_full: Kernels = ()
    """Forward work repeated in backward under full recompute."""
    forward_comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    recompute_selective_comm: tuple[Comm, ...] = ()
    """Collectives that go with `recompute_selective`."""
    recompute_full_comm: tuple[Comm, ...] = ()
    """Collectives that go with `recompute_full`."""
    params: int = 0
    """Parameters that this device holds of this block (experts included, `tied_params`
    excluded)."""
    expert_params: int = 0
    """The part of `params` in routed experts, replicated over `Layout.edp` ranks only."""
    frozen_params: int = 0
    """The part of `params` outside routed experts that is frozen while the rest is trained."""
    tied_params: int = 0
    """Parameters shared with the first embedding; stored a second time only if the two are on
    different stages."""
    shared_params: int = 0
    """Parameters shared with an earlier block; stored a second time on ranks without that block,
    once for all that share them there."""
    shares_with: int = 0
    """Place of that block among the model's blocks."""
    activation_bytes: ActivationBytes = ActivationBytes(none=0.0, selective=0.0, full=0.0)
    workspace_bytes: float = 0.0
    """Transient peak inside the block, in addition to `activation_bytes`."""
    boundary_bytes: float = 0.0
    """Activation that one device sends if the next block is on another stage."""
    boundary_comm: tuple[Comm, ...] = ()
    """Collectives that complete a sharded transfer at the receiving stage."""

    def weight_shapes(self, *, experts: bool) -> Counter[tuple[int, int]]:
        """Number of trained matrices by shape, in routed experts or outside."""
        # Every weight matrix has one product for its gradient, whose output is as large as it. A
        # grouped product's gradient has the dimensions of its forward: rows, then the weight's two.
        shapes: Counter[tuple[int, int]] = Counter()
        for op, count in self.backward_weight:
            if isinstance(op, Gemm) and op.grouped == experts:
                shape = (op.n, op.k) if experts else (op.m, op.n)
                shapes[shape] += count * op.groups
        return shapes


Blocks = tuple[tuple[BlockOps, int], ...]
"""Blocks in model order, each with how often it repeats."""


def layer_count(blocks: Sequence[tuple[BlockOps, int]]) -> int:
    """Layers that a pipeline can be cut between."""
    return sum(n for block, n in blocks if block.is_layer)


def matmul_flops(kernels: Kernels) -> float:
    """FLOPs in matrix products, attention and convolutions (element-wise work is not counted)."""
    return sum(op.flops * count for op, count in kernels if op.uses_matrix_units)
