"""The part of an attention that one context-parallel rank computes."""

from dataclasses import dataclass, replace

from perfmodel.ops import Attention, MemoryBound
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import Comm
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """One rank's part of an attention."""

    steps: tuple[Attention, ...]
    """Forward kernels; each has one backward kernel."""
    forward_comm: tuple[Comm, ...] = ()
    """Exchanges of keys and values, or of heads, in the forward pass."""
    backward_comm: tuple[Comm, ...] = ()
    """Exchanges of the backward pass, gradients among them."""
    merges: tuple[MemoryBound, ...] = ()
    """Kernels that add a step's results to those of earlier steps."""
    gradient_merges: tuple[MemoryBound, ...] = ()
    """Kernels that add a step's gradients to those of earlier steps."""


def context_parallel(local: ShardSizes, attention: Attention) -> ContextPart:
    """The part of an attention with this rank's queries over all keys and values.

    Ranks wait for each other in every exchange, so the one with most visible keys counts. A causal
    sequence is balanced by giving rank i the chunks i and 2 cp - 1 - i of 2 cp, so that each
    computes 1/cp of the visible pairs (zigzag ring attention; Transformer Engine,
    `AttnFuncWithCPAndKVP2P`). Split into contiguous parts, the last rank sees all keys: 2 - 1/cp
    times the mean.

    Args:
        attention: attention of the rank's queries to the keys of the whole sequence.
    """
    match local.shard.cp_kind:
        case "ulysses":
            return _ulysses(local, attention)
        case "all_gather":
            return _gathered(local, attention)
        case kind:
            return _ring(local, attention, gathered=kind == "gathered_ring")


def _ring(local: ShardSizes, attention: Attention, *, gathered: bool) -> ContextPart:
    """Attention in cp steps, each with the keys and values of one rank, which pass around a ring or
    are gathered.

    Liu et al., arXiv 2310.01889.
    """
    cp = local.shard.cp
    q = attention.seq_q
    other_ranks = local.shard.cp - 1
    keys_per_rank = attention.seq_kv // cp

    # A window at least as long as the keys of a step hides none of them.
    def step(keys: int, causal: bool) -> Attention:
        window = attention.window if attention.window < keys else 0
        return replace(attention, seq_kv=keys, causal=causal, window=window)

    # The first step has the rank's own keys, under the causal mask. Each other step has the keys of
    # one other rank. In a balanced causal ring that is half a square (all queries with the earlier
    # half of the keys, or the later half of the queries with all keys); otherwise it is all keys of
    # earlier tokens, which are spread over the ranks too.
    half = keys_per_rank - q // 2 if attention.causal and local.shard.cp_balanced else keys_per_rank

    # Keys and values make cp - 1 hops, each beside a step. In backward they do so again, and their
    # gradients make cp, back to where they belong: the last with no step beside it. Where keys and
    # values are gathered, only the first step could run meanwhile, which is not counted on.
    kv = _keys_and_values(local, attention, 1 / cp)
    kv = replace(kv, collective="send_recv", count=other_ranks, beside_attention=True)
    gradients = replace(kv, count=other_ranks, beside_attention=True)
    last = replace(kv, count=1, beside_attention=False)
    all_kv = replace(_keys_and_values(local, attention, 1.0), collective="all_gather")

    # Each step's result is added to those before, with its statistics, and so are gradients of
    # queries, and of keys and values as they pass: in the type of the steps' results by one kernel
    # (`flash_attn_fwd_out_correction_init` and `AttnFuncWithCPAndKVP2P.backward` of Transformer
    # Engine), in fp32 by several (`_SDPAMerger` of torch.distributed's context parallelism).
    rows = local.sequences * q
    values = attention.heads * (attention.head_dim_v or attention.head_dim)
    dtype = None if local.job.kernels.fuses("attention_merge") else "fp32"
    summed = memory(
        local.precision, "add", rows, attention.heads * attention.head_dim, 2, dtype=dtype
    )
    passed = memory(
        local.precision,
        "add",
        local.sequences * keys_per_rank,
        _width(attention),
        2,
        dtype=dtype,
    )
    first_step = step(keys_per_rank, attention.causal)
    step_of_other_rank = step(half, causal=False)
    return ContextPart(
        steps=(first_step, *(step_of_other_rank,) * other_ranks),
        forward_comm=(all_kv,) if gathered else (kv,),
        backward_comm=(all_kv if gathered else kv, gradients, last),
        merges=_merge(local, rows, values) * other_ranks,
        gradient_merges=(summed, passed) * other_ranks,
    )


def _merge(local: ShardSizes, rows: int, width: int) -> tuple[MemoryBound, ...]:
    """Kernels that add a step's results of [rows, width] to those before, rescaled by their
    statistics."""
    # One kernel that rescales and adds.
    if local.job.kernels.fuses("attention_merge"):
        return (memory(local.precision, "add", rows, width, 2),)

    # Or a conversion to fp32, a difference, a product and another difference.
    names = (("mul_scalar", 1), ("add", 2), ("mul", 2), ("add", 2))
    return tuple(
        memory(local.precision, name, rows, width, inputs, dtype="fp32") for name, inputs in names
    )


def _gathered(local: ShardSizes, attention: Attention) -> ContextPart:
    """Attention after all keys and values have been gathered, again in backward.

    Transformer Engine `AttnFuncWithCPAndKVAllGather`. Nothing runs beside the collectives.
    """
    cp, keys = local.shard.cp, attention.seq_kv
    gather = replace(_keys_and_values(local, attention, 1.0), collective="all_gather")

    # The two chunks of a balanced rank run one by one: of the first rank the first chunk of the
    # sequence, which sees fewest keys, and the last, which sees all.
    steps = (attention,)
    if attention.causal and local.shard.cp_balanced:
        chunk = attention.seq_q // 2
        early_keys = keys - (2 * cp - 1) * chunk
        early = replace(
            attention,
            seq_q=chunk,
            seq_kv=early_keys,
            window=attention.window if attention.window < early_keys else 0,
        )
        steps = (early, replace(attention, seq_q=chunk))

    # Gradients of keys and values are reduced to where they belong.
    return ContextPart(
        steps=steps,
        forward_comm=(gather,),
        backward_comm=(gather, replace(gather, collective="reduce_scatter")),
    )


def _ulysses(local: ShardSizes, attention: Attention) -> ContextPart:
    """Attention of 1 / cp of the heads over the whole sequence; queries, keys and values are
    exchanged before, results after.

    DeepSpeed Ulysses, arXiv 2309.14509.
    """
    # Keys and values of fewer heads than ranks are copied for as many ranks as share them.
    cp = local.shard.cp
    kv_heads = max(attention.kv_heads, cp)
    values = attention.head_dim_v or attention.head_dim
    columns = attention.heads * attention.head_dim + kv_heads * (attention.head_dim + values)

    column_bytes = local.sequences * attention.seq_q * local.act_bytes
    exchange = Comm(collective="all_to_all", bytes=float(column_bytes * columns), group="cp")
    back = replace(exchange, bytes=float(column_bytes * attention.heads * values))
    kernel = replace(
        attention,
        seq_q=attention.seq_q * cp,
        heads=attention.heads // cp,
        kv_heads=max(1, attention.kv_heads // cp),
    )
    return ContextPart(
        steps=(kernel,), forward_comm=(exchange, back), backward_comm=(back, exchange)
    )


def _keys_and_values(local: ShardSizes, attention: Attention, share: float) -> Comm:
    """An exchange of `share` of the sequence's keys and values."""
    tokens = local.sequences * attention.seq_kv * share
    n_bytes = tokens * _width(attention) * dtype_bytes(attention.dtype)
    return Comm(collective="send_recv", bytes=float(n_bytes), group="cp")


def _width(attention: Attention) -> int:
    """Elements of a token's keys and values."""
    return attention.kv_heads * (attention.head_dim + (attention.head_dim_v or attention.head_dim))
