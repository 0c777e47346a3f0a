"""Attention over a sequence that is split among ranks: kernels, exchanges and merges of the rank with most to do."""

from dataclasses import dataclass, replace

from perfmodel.ops import Attention, MemoryBound, Op
from perfmodel.spec import Job, Model, Transformer
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import Comm
from perfmodel.workload._local import Local
from perfmodel.workload._piece import memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """One rank's part of an attention."""

    steps: tuple[Attention, ...]
    """Forward kernels; each has one backward kernel."""
    forward_comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    merges: tuple[MemoryBound, ...] = ()
    """Kernels that add a step's results to those of the steps before."""
    gradient_merges: tuple[MemoryBound, ...] = ()


def context_parallel(local: Local, whole: Attention) -> ContextPart:
    """The part of an attention with this rank's queries over all keys and values.

    Ranks wait for each other in every exchange, so the one with most visible keys counts. A causal sequence is balanced
    by giving rank i the chunks i and 2 cp - 1 - i of 2 cp, so that each computes 1/cp of the visible pairs (zigzag ring
    attention; Transformer Engine, `AttnFuncWithCPAndKVP2P`). Split into contiguous parts, the last rank sees all keys:
    2 - 1/cp times the mean.

    Args:
        whole: with the rank's queries and the keys of the whole sequence.
    """
    if local.shard.cp == 1:
        return ContextPart(steps=(whole,))
    match local.shard.cp_kind:
        case "ulysses":
            return _ulysses(local, whole)
        case "all_gather":
            return _gathered(local, whole)
        case kind:
            return _ring(local, whole, gathered=kind == "gathered_ring")


def undivided(model: Model, job: Job, op: Op) -> Attention | None:
    """The attention over a training step's whole sequence that one over fewer of its queries or keys is a part of: of a
    context-parallel rank, a step of its ring or a slice of a sequence. None of all else, and where the model itself has
    attention over less than that."""
    if not isinstance(model, Transformer) or model.decoder_layers or model.chunked_window or job.mode != "train":
        return None
    if job.varied_lengths:  # no attention is over a whole sequence
        return None
    if not isinstance(op, Attention) or op.seq_q + op.seq_kv == 2 * job.seq_len:
        return None
    return replace(op, seq_q=job.seq_len, seq_kv=job.seq_len, causal=model.causal)


def _ring(local: Local, whole: Attention, *, gathered: bool) -> ContextPart:
    """cp steps: one with the rank's own keys, under the causal mask, then those of one other rank each: of a balanced
    causal ring half a square (all queries with the earlier half of the keys, or the later half with all keys), and all
    keys of tokens before those of the step, which are spread over the ranks too.

    Keys and values make cp - 1 hops, each beside a step. In backward they do so again, and their gradients make cp,
    back to where they belong: the last with no step beside it. Where they are gathered, only the first step runs
    meanwhile, which is not counted on. Each step's result is added to those before, with its statistics, and so are
    gradients of queries, and of keys and values as they pass: in the type of the steps' results by one kernel
    (`flash_attn_fwd_out_correction_init` and `AttnFuncWithCPAndKVP2P.backward` of Transformer Engine), in fp32 by
    several (`_SDPAMerger` of torch.distributed's context parallelism).
    """
    cp, q, others = local.shard.cp, whole.seq_q, local.shard.cp - 1
    seen = whole.seq_kv // cp

    def step(keys: int, causal: bool) -> Attention:
        return replace(whole, seq_kv=keys, causal=causal, window=whole.window if whole.window < keys else 0)

    half = seen - q // 2 if whole.causal and local.shard.cp_balanced else seen
    kv = replace(_keys_and_values(local, whole, 1 / cp), collective="send_recv", count=others, beside_attention=True)
    gradients = replace(kv, count=others, beside_attention=True)
    last = replace(kv, count=1, beside_attention=False)
    rows = local.sequences * q
    values = whole.heads * (whole.head_dim_v or whole.head_dim)
    dtype = None if local.job.fuses("attention_merge") else "fp32"
    summed = memory(local.precision, "add", rows, whole.heads * whole.head_dim, 2, dtype=dtype)
    passed = memory(local.precision, "add", local.sequences * seen, _width(whole), 2, dtype=dtype)
    all_kv = replace(_keys_and_values(local, whole, 1.0), collective="all_gather")
    return ContextPart(
        steps=(step(seen, whole.causal), *(step(half, False),) * others),
        forward_comm=(all_kv,) if gathered else (kv,),
        backward_comm=(all_kv if gathered else kv, gradients, last),
        merges=_merge(local, rows, values) * others,
        gradient_merges=(summed, passed) * others,
    )


def _merge(local: Local, rows: int, width: int) -> tuple[MemoryBound, ...]:
    """One kernel that rescales and adds; or a conversion to fp32, a difference, a product and another difference."""
    if local.job.fuses("attention_merge"):
        return (memory(local.precision, "add", rows, width, 2),)
    names = (("mul_scalar", 1), ("add", 2), ("mul", 2), ("add", 2))
    return tuple(memory(local.precision, name, rows, width, inputs, dtype="fp32") for name, inputs in names)


def _gathered(local: Local, whole: Attention) -> ContextPart:
    """Keys and values are gathered, again in backward, and their gradients reduced to where they belong, with nothing
    beside (Transformer Engine, `AttnFuncWithCPAndKVAllGather`); the two chunks of a balanced rank run one by one."""
    cp, keys = local.shard.cp, whole.seq_kv
    gather = replace(_keys_and_values(local, whole, 1.0), collective="all_gather")
    steps = (whole,)
    if whole.causal and local.shard.cp_balanced:
        chunk = whole.seq_q // 2
        seen = keys - (2 * cp - 1) * chunk
        early = replace(whole, seq_q=chunk, seq_kv=seen, window=whole.window if whole.window < seen else 0)
        steps = (early, replace(whole, seq_q=chunk))
    return ContextPart(
        steps=steps,
        forward_comm=(gather,),
        backward_comm=(gather, replace(gather, collective="reduce_scatter")),
    )


def _ulysses(local: Local, whole: Attention) -> ContextPart:
    """A cp-th of the heads over the whole sequence: queries, keys and values are exchanged before, results after.

    Keys and values of fewer heads than ranks are copied for as many ranks as share them.
    """
    cp = local.shard.cp
    rows, kv_heads = local.sequences * whole.seq_q, max(whole.kv_heads, cp)
    own = rows * local.act_bytes
    values = whole.head_dim_v or whole.head_dim
    there = Comm(
        collective="all_to_all",
        bytes=float(own * (whole.heads * whole.head_dim + kv_heads * (whole.head_dim + values))),
        group="cp",
    )
    back = replace(there, bytes=float(own * whole.heads * values))
    kernel = replace(whole, seq_q=whole.seq_q * cp, heads=whole.heads // cp, kv_heads=max(1, whole.kv_heads // cp))
    return ContextPart(steps=(kernel,), forward_comm=(there, back), backward_comm=(back, there))


def _keys_and_values(local: Local, whole: Attention, share: float) -> Comm:
    """An exchange of so large a share of the sequence's keys and values."""
    tokens = local.sequences * whole.seq_kv * share
    n_bytes = tokens * _width(whole) * dtype_bytes(whole.dtype)
    return Comm(collective="send_recv", bytes=float(n_bytes), group="cp")


def _width(whole: Attention) -> int:
    """Elements of a token's keys and values."""
    return whole.kv_heads * (whole.head_dim + (whole.head_dim_v or whole.head_dim))
