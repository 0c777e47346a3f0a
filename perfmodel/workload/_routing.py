"""Where a router sends tokens, and how they get to the experts' ranks and back.

Dispatch and combine follow Megatron-LM's dispatchers (`perfmodel.spec.Dispatcher`): with an
all-to-all each token travels once per chosen expert over the expert-parallel ranks, otherwise once
per node and rank; where experts are sharded over ranks that hold different tokens, the dispatched
tokens are then gathered over these, and reduced back after.
"""

from dataclasses import dataclass, replace

from perfmodel.errors import LayoutError, Reason
from perfmodel.ops import Exchange, Gemm, KernelOp
from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.workload._block import Comm, ExpertChoice
from perfmodel.workload._local import ShardSizes, divide
from perfmodel.workload._piece import Piece, memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Token counts of the device with the busiest experts, and its experts' sizes."""

    rows: int
    """Tokens that this device routes."""
    sent: int
    """Token copies that it sends, or gets back: one per chosen expert."""
    load: float
    """Token copies that reach its experts, relative to those that it sends."""
    processed: int
    """Token copies that reach its experts."""
    local_experts: int
    """Experts of this device."""
    hidden: int
    """Elements of a token as sent to experts."""
    inner: int
    """Inner size of an expert's shard."""
    shared: bool
    """Whether all expert-parallel ranks hold all tokens, so that nothing is dispatched and results
    are summed."""
    gathered: bool
    """Whether dispatched tokens are gathered over the ranks that shard an expert, because these
    hold different tokens."""
    choice: ExpertChoice
    """How tokens choose experts."""
    fused: bool
    """Whether one kernel copies tokens, runs the experts and adds up their results, as in inference
    servers, where gated experts were measured. Training runs grouped products (`TEGroupedMLP` of
    Megatron-Core)."""

    @property
    def active_experts(self) -> int:
        """Number of experts on this device that receive tokens."""
        return max(1, min(self.local_experts, self.processed))

    @property
    def rows_per_expert(self) -> int:
        """Token copies per active expert."""
        return -(-self.processed // self.active_experts)


def route(model: Transformer, local: ShardSizes, experts: Experts) -> Routing:
    """Distribute the shard's tokens over all experts evenly, except for the busiest rank's load.

    The load is `ExpertTokens.load`; one rank that holds all experts gets no more than there is.
    Errors are those of `expert_feed_forward`.
    """
    # Experts over expert-parallel ranks, their inner sizes over tensor-parallel ones.
    shard = local.shard
    tp, ep, etp = shard.tp, shard.ep, shard.expert_tp
    divide(model, Reason.EXPERTS, f"{experts.count} experts are", experts.count, "ep", ep)
    for field, width, dimension, degree in (
        ("ffn_hidden", experts.ffn_hidden, "etp" if shard.etp else "tp", etp),
        ("shared_ffn_hidden", experts.shared_ffn_hidden, "tp", tp),
    ):
        divide(
            model,
            Reason.EXPERT_HIDDEN,
            f"{field}={width} of its experts is",
            width,
            dimension,
            degree,
        )

    # In inference ranks of tensor parallelism hold all tokens, and each runs its own experts on
    # those that chose them.
    shared = (
        local.job.mode == "inference" and not local.sequence_parallel and etp == 1 and ep == tp > 1
    )
    if tp > 1 and (ep > 1 or etp != tp) and not local.sequence_parallel and not shared:
        raise LayoutError(
            f"{model.name}: experts over ep={ep} and etp={etp} with tp={tp} need sequence_parallel=true, because "
            "otherwise every tensor-parallel rank would send the same tokens",
            Reason.EXPERT_SEQUENCE,
        )

    # How much busier the busiest rank is than the mean: at most all tokens choose its experts,
    # unless a capacity says how many each gets.
    rows = local.norm_tokens
    gathered = etp > 1 and (local.sequence_parallel or tp == 1)
    load = local.job.experts.load if ep > 1 or local.job.experts.expert_capacity_factor else 1.0
    if local.job.experts.expert_capacity_factor is None:
        load = min(load, float(ep))
    copies = rows * experts.topk * (etp if gathered else 1) * load / (ep if shared else 1)
    return Routing(
        rows=rows,
        sent=rows * experts.topk,
        load=load,
        processed=max(1, round(copies)),
        shared=shared,
        local_experts=experts.count // ep,
        hidden=experts.latent or local.hidden,
        inner=experts.ffn_hidden // etp,
        gathered=gathered,
        choice=ExpertChoice(experts.topk, experts.groups, experts.groups_kept),
        fused=model.block.gated_ffn and local.job.mode == "inference",
    )


def dispatch(local: ShardSizes, routing: Routing) -> Piece:
    """Bring tokens to their experts, in order of experts; backward sums the gradients of a token's
    copies."""
    to_experts, from_experts = _exchange(local, routing)
    copies, sums = _permutation(local, routing)
    if multiplies_by_masks(local.job):
        # Places are not a function of the router's weights: the mask of the dispatch has no
        # gradient.
        copies = (_to_places(local, routing),)
        sums = (_from_places(local, routing),)
    return Piece(
        forward=copies,
        backward_input=sums,
        forward_comm=to_experts,
        backward_comm=(*from_experts, *_partial_sums(local, routing)),
    )


def combine(local: ShardSizes, routing: Routing) -> Piece:
    """Return the experts' outputs and add each token's copies, weighted by the router.

    Keeps the outputs, of which the router's gradient is made, unless the experts themselves apply
    its weights.
    """
    to_experts, from_experts = _exchange(local, routing)
    copies, sums = _permutation(local, routing)
    weighs = not local.job.experts.weighted_experts
    saved_bytes = float(routing.sent) * routing.hidden * local.act_bytes if weighs else 0.0
    kernels: tuple[KernelOp, ...] = ()
    if multiplies_by_masks(local.job):
        # The mask of the combine has the router's weights, so that both of its product's operands
        # have gradients.
        rows = local.sequences * local.seq_local
        places = _places(local, routing)
        masks = memory(local.precision, "add", rows, places)
        kernels = (masks,)
        sums = (masks, _from_places(local, routing))
        copies = (replace(_from_places(local, routing), pass_="bwd"), masks)
        saved_bytes = float(routing.processed) * routing.hidden * local.act_bytes
        saved_bytes += float(rows) * places * (1 + local.act_bytes)
    return Piece(
        forward=sums,
        backward_input=copies,
        forward_comm=(*from_experts, *_partial_sums(local, routing)),
        backward_comm=to_experts,
        saved_bytes=saved_bytes,
        reads_result=weighs,
        inner_forward=kernels,
    )


def _permutation(
    local: ShardSizes, routing: Routing
) -> tuple[tuple[KernelOp, ...], tuple[KernelOp, ...]]:
    """Kernels that copy tokens into order of experts, and those that add the copies up again."""

    # Each reads and writes every row that it moves.
    def moved(rows: int, inputs: int = 1) -> KernelOp:
        return memory(local.precision, "add", rows, routing.hidden, inputs)

    if routing.fused:
        return (), ()

    # DeepEP and HybridEP send tokens, which kernels of their own copy where they arrive, and add up
    # before they go back (DeepEP's hybrid-ep branch, csrc/hybrid_ep/executor/executor.cu:
    # `permute_launcher` in `dispatch_postprocess`, `unpermute_launcher` in `combine_preprocess`;
    # Megatron-Core's `moe_permute_fusion_into_hybridep`, which joins them, is off by default).
    if local.job.experts.expert_dispatcher != "alltoall" and local.shard.ep > 1:
        return (moved(routing.processed),), (moved(routing.processed),)

    # An all-to-all dispatcher copies the tokens that it sends, and sorts those that it receives by
    # local expert (Megatron-LM `moe_utils.permute`, `sort_chunks_by_idxs`).
    by_expert = (
        (moved(routing.processed),) if local.shard.ep > 1 and routing.local_experts > 1 else ()
    )
    return (moved(routing.sent), *by_expert), (
        *by_expert,
        moved(routing.rows, routing.choice.topk),
    )


def multiplies_by_masks(job: Job) -> bool:
    """Whether tokens come to their experts by products with masks
    (`ExpertTokens.einsum_dispatch`)."""
    return job.experts.einsum_dispatch and job.experts.expert_capacity_factor is not None


def _places(local: ShardSizes, routing: Routing) -> int:
    """Number of slots of all experts for the tokens of one sequence (MaxText `generate_masks`)."""
    return max(1, round(local.seq_local * routing.choice.topk * routing.load))


def _to_places(local: ShardSizes, routing: Routing) -> Gemm:
    """Product that copies the tokens of every sequence into the slots of all experts."""
    dtype = local.precision.wide_dtype
    places = _places(local, routing)
    return Gemm(
        op="bmm", dtype=dtype, batch=local.sequences, m=places, n=routing.hidden, k=local.seq_local
    )


def _from_places(local: ShardSizes, routing: Routing) -> Gemm:
    """Product that sums the results in the slots of every token."""
    dtype = local.precision.wide_dtype
    places = _places(local, routing)
    return Gemm(
        op="bmm", dtype=dtype, batch=local.sequences, m=local.seq_local, n=routing.hidden, k=places
    )


def _exchange(local: ShardSizes, routing: Routing) -> tuple[tuple[Comm, ...], tuple[Comm, ...]]:
    """Collectives towards the experts, and those back."""
    row_bytes = routing.hidden * local.act_bytes
    to_experts: tuple[Comm, ...] = ()
    from_experts: tuple[Comm, ...] = ()

    # Over expert-parallel ranks: an all-to-all sends a copy per chosen expert; the libraries send
    # each token once to every rank that needs it, how many these are follows from the choice.
    if local.shard.ep > 1 and not routing.shared:
        once = local.job.experts.expert_dispatcher != "alltoall"
        copies = routing.rows if once else routing.sent
        sent = Comm(
            collective="all_to_all",
            bytes=float(copies * row_bytes) * routing.load,
            group="ep",
            overlappable=local.shard.ep_overlap,
            choice=routing.choice if once else None,
        )
        to_experts = from_experts = (sent,)
        if once:
            library = local.job.experts.expert_dispatcher
            to_experts = (replace(sent, exchange=Exchange(library, "dispatch")),)
            from_experts = (replace(sent, exchange=Exchange(library, "combine")),)

    # Then over the ranks that shard an expert.
    if routing.gathered:
        n_bytes = float(routing.processed * row_bytes)
        to_experts = (*to_experts, Comm(collective="all_gather", bytes=n_bytes, group="etp"))
        from_experts = (
            Comm(collective="reduce_scatter", bytes=n_bytes, group="etp"),
            *from_experts,
        )
    return to_experts, from_experts


def _partial_sums(local: ShardSizes, routing: Routing) -> tuple[Comm, ...]:
    """The sum over tensor-parallel ranks that is needed if, without sequence parallelism, all of
    them route all tokens."""
    if local.tp == 1 or local.sequence_parallel:
        return ()
    return (
        Comm(
            collective="all_reduce",
            bytes=float(local.tokens * routing.hidden * local.act_bytes),
            group="tp",
        ),
    )
