"""Sizes on one device: a transformer's figures divided by a shard's degrees."""

from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Final

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec import AdapterModule, Job, Model, Transformer, WideModule
from perfmodel.units import divisors, dtype_bytes
from perfmodel.workload._block import Shard

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp, so that shards stay aligned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Element types of a job's kernels."""

    dtype: str
    """Element type of matrix products."""
    recipe: str
    """Scaling recipe of 8- and 4-bit operands (`Job.fp8_recipe`)."""
    act_dtype: str
    """Element type of stored activations, attention and element-wise kernels (16 bit under fp8, fp4
    and int8)."""
    act_bytes: int
    """Bytes of an element of `act_dtype`."""
    accumulate: bool
    """Whether the product itself adds weight gradients to an fp32 buffer."""
    frozen: bool = False
    """Whether weights have no gradients."""
    wide_norms: bool = False
    """Whether norms of narrower activations run in fp32 (`Job.wide_norms`)."""
    base: str = ""
    """Storage of weights that are converted to 16 bits for every product (`Job.base_weights`)."""

    @property
    def wide_dtype(self) -> str:
        """Element type of products that are never quantised (that of activations)."""
        # In a TF32 job activations are fp32 tensors that every product rounds to TF32 (torch
        # `allow_tf32`, which covers batched products too).
        return self.dtype if self.dtype == "tf32" else self.act_dtype

    @property
    def of_norms(self) -> "Precision":
        """The types that norms compute in."""
        if not self.wide_norms:
            return self
        return replace(self, act_dtype="fp32", act_bytes=dtype_bytes("fp32"), wide_norms=False)

    @classmethod
    def of(cls, job: Job) -> "Precision":
        """The types that `job` computes in."""
        act = storage_dtype(job.dtype)
        return cls(
            dtype=job.dtype,
            recipe=job.narrow.fp8_recipe,
            act_dtype=act,
            act_bytes=dtype_bytes(act),
            accumulate=job.gradients.grad_dtype == "fp32"
            and act != "fp32"
            and not job.adds_half_gradients,
            frozen=job.fine_tuning.frozen,
            wide_norms=job.kernels.wide_norms and dtype_bytes(act) < dtype_bytes("fp32"),
            base=job.fine_tuning.base_weights,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSizes:
    """Sizes of one stack on one rank (encoder or decoder). Lengths in tokens, sizes in elements."""

    job: Job
    """Job whose step is computed."""
    shard: Shard
    """Degrees that the sizes are divided by."""
    sequences: int
    """Sequences of a micro-batch. Sequences of varied lengths count as the number of equal ones
    that take the same time in attention."""
    seq_len: int
    """Tokens of a whole sequence."""
    seq_local: int
    """Tokens of one sequence on this device (seq_len / cp)."""
    tokens: int
    """Tokens of a micro-batch on this device (sequences * seq_local), the rows of products inside
    tensor-parallel regions."""
    norm_tokens: int
    """Rows outside tensor-parallel regions: `tokens`, or a tp-th of it with sequence
    parallelism."""
    hidden: int
    """Elements of a token's hidden state, which is not divided."""
    heads: int
    """Attention heads of queries on this device."""
    kv_heads: int
    """Heads of keys and values on this device, at least 1."""
    ffn: int
    """Inner size of the dense feed-forward on this device."""
    vocab: int
    """Rows of this device's shard of the padded vocabulary; 0 if the input is patches."""
    precision: Precision

    @property
    def unquantised(self) -> "ShardSizes":
        """Sizes for unquantised products."""
        precision = replace(self.precision, dtype=self.precision.wide_dtype, base="")
        return replace(self, precision=precision)

    def for_module(self, module: WideModule) -> "ShardSizes":
        """Sizes for products that the job may keep wider than others (`Job.wide_modules`)."""
        if module not in self.job.narrow.wide_modules:
            return self
        if module != "mamba_output":
            return self.unquantised

        # Mamba's output projection is kept in 8 bits in an fp4 job; in an fp8 job it is no wider
        # than others.
        if self.precision.dtype == "fp4":
            return replace(self, precision=replace(self.precision, dtype="fp8", recipe="mxfp8"))
        return self

    def with_heads(self, model: Transformer) -> "ShardSizes":
        """These sizes with the rank's part of the heads of `model`."""
        return replace(self, heads=model.heads // self.tp, kv_heads=_rank_kv_heads(model, self.tp))

    @property
    def act_bytes(self) -> int:
        """Bytes of one stored activation."""
        return self.precision.act_bytes

    @property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.shard.tp

    def adapts(self, *modules: AdapterModule) -> bool:
        """Whether any of these products has adapters."""
        return self.job.fine_tuning.adapter_rank > 0 and not set(modules).isdisjoint(
            self.job.fine_tuning.adapter_modules
        )

    @property
    def keys(self) -> int:
        """Number of keys for the last token: the step's tokens and cached ones."""
        return self.seq_len + self.job.cached_tokens

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and dropouts are sharded along the sequence."""
        return self.shard.sequence_parallel and self.shard.tp > 1

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the whole hidden activation of this device's tensor-parallel group."""
        return float(self.tokens * self.hidden * self.act_bytes)

    @property
    def norm_bytes(self) -> float:
        """Bytes of the hidden activation as stored outside tensor-parallel regions."""
        return float(self.norm_tokens * self.hidden * self.act_bytes)


MASKED_TOKENS: Final = (20, 128)
"""Slots for masked tokens by length of the sequence (google-research/bert README)."""


def masked_tokens(tokens: float) -> int:
    """Number of masked tokens that the head computes (`Job.masked_head`)."""
    places, tokens_per_period = MASKED_TOKENS
    return ceil(tokens * places / tokens_per_period)


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary padded to a multiple of `VOCAB_MULTIPLE` * tp (Megatron-LM's default)."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def storage_dtype(dtype: str) -> str:
    """Element type in which activations are stored when products run in `dtype`."""
    return {"fp8": "bf16", "fp4": "bf16", "int8": "bf16", "tf32": "fp32"}.get(dtype, dtype)


def local_sizes(
    model: Transformer, job: Job, shard: Shard, seq_len: int, *, of: str = "sequence length"
) -> ShardSizes:
    """Divide `model` by `shard`.

    Key and value heads are replicated where tp exceeds them, as Megatron-LM does.

    Args:
        of: what `seq_len` is, for messages.

    Raises:
        LayoutError: if heads, kv_heads, ffn_hidden or the sequence do not divide; names the remedy.
    """
    _require_divided_heads(model, shard)
    if model.attention.window_heads is not None:
        _require_divided_heads(model.in_window, shard)

    # Load-balanced under a causal mask, each context-parallel rank has two chunks of the sequence.
    tp, cp = shard.tp, shard.cp
    balanced = (
        cp > 1 and model.attention.causal and shard.cp_balanced and shard.cp_kind != "ulysses"
    )
    chunks = 2 * cp if balanced else cp
    sequence_parallel = shard.sequence_parallel and tp > 1

    # Context parallelism divides the sequence, sequence parallelism a context-parallel rank's part
    # once more.
    parts_of_sequence = [(cp, "cp"), (chunks, "2*cp")]
    if sequence_parallel:
        parts_of_sequence.append((tp * cp, "tp*cp of sequence_parallel"))
    for parts, description in parts_of_sequence:
        if seq_len % parts:
            raise LayoutError(
                f"{model.name}: {of} {seq_len} is not divisible by {parts} ({description})",
                Reason.SEQUENCE,
            )

    if cp > 1 and not job.kernels.flash_attention:
        raise LayoutError(
            f"{model.name}: cp={cp} needs flash attention; set flash_attention or cp=1",
            Reason.UNFUSED_CONTEXT,
        )

    # Documents of varied lengths: attention is priced on equal sequences, everything else on their
    # tokens.
    sequences = shard.micro_batch
    tokens = shard.micro_batch * seq_len // cp
    if job.varied_lengths:
        sequences, seq_len = _equal_sequences(job, shard.micro_batch, chunks)
        tokens = ceil(shard.micro_batch * job.tokens_per_sequence / cp)
    return ShardSizes(
        job=job,
        shard=shard,
        sequences=sequences,
        seq_len=seq_len,
        seq_local=seq_len // cp,
        tokens=tokens,
        norm_tokens=-(-tokens // tp) if sequence_parallel else tokens,
        hidden=model.hidden,
        heads=model.heads // tp,
        kv_heads=_rank_kv_heads(model, tp),
        ffn=model.ffn_hidden // tp,
        vocab=0 if model.inputs.patches else padded_vocab(model.vocab, tp) // tp,
        precision=Precision.of(job),
    )


def _rank_kv_heads(model: Transformer, tp: int) -> int:
    """Heads of keys and values on a rank; they are replicated if there are more ranks than
    heads."""
    return max(1, _expanded_kv_heads(model) // tp)


def _expanded_kv_heads(model: Transformer) -> int:
    """Heads of keys and values that attention sees: latent attention expands them to all heads."""
    return model.kv_heads if model.latent_attention is None else model.heads


def _require_divided_heads(model: Transformer, shard: Shard) -> None:
    """Raise `LayoutError` unless heads and feed-forward divide over tensor- and context-parallel
    ranks."""
    tp, cp = shard.tp, shard.cp
    kv_heads = _expanded_kv_heads(model)
    divide(model, Reason.HEADS, f"{model.heads} attention heads are", model.heads, "tp", tp)
    for size in sorted({model.ffn_hidden, *model.inner_sizes}):
        divide(model, Reason.HIDDEN, f"ffn_hidden={size} is", size, "tp", tp)

    # Ulysses exchanges sequence for heads, so that these are divided once more.
    if shard.cp_kind == "ulysses":
        heads = model.heads // tp
        rank_kv_heads = kv_heads // tp
        divide(
            model,
            Reason.HEADS,
            f"{heads} attention heads of a rank are",
            heads,
            "cp (of cp_kind=ulysses)",
            cp,
        )
        if rank_kv_heads > 1 and rank_kv_heads % cp and cp % rank_kv_heads:
            raise LayoutError(
                f"{model.name}: cp={cp} of cp_kind=ulysses must divide the {rank_kv_heads} kv_heads of a rank or be a "
                "multiple of them",
                Reason.KV_HEADS,
            )

    # Fewer heads of keys and values than ranks are copied, each for as many ranks.
    if kv_heads % tp and tp % kv_heads:
        raise LayoutError(
            f"{model.name}: tp={tp} must divide kv_heads={kv_heads} or be a multiple of it",
            Reason.KV_HEADS,
        )


def _equal_sequences(job: Job, micro_batch: int, chunks: int) -> tuple[int, int]:
    """Number and length of equal sequences that take as long in attention as a micro-batch of
    varied lengths.

    Args:
        chunks: parts that context parallelism divides a sequence into.
    """
    # Their lengths' squares add up to the same, and, up to rounding, so do their lengths.
    tokens = micro_batch * job.tokens_per_sequence
    squares = tokens * job.attended_tokens
    sequences = max(1, round(tokens / job.attended_tokens))
    length = sqrt(squares / sequences)
    return sequences, max(1, round(length / chunks)) * chunks


def require_whole_sequence(model: Model, local: ShardSizes, description: str) -> None:
    """Raise `LayoutError` under context parallelism, which `description` does not support."""
    if local.shard.cp > 1:
        raise LayoutError(
            f"{model.name}: {description} cannot be split along the sequence; use cp=1",
            Reason.UNSPLIT,
            "cp",
        )


def divide(
    model: Model, reason: Reason, description: str, value: int, dimension: str, degree: int
) -> None:
    """Raise `LayoutError` for `reason`, with the possible degrees, unless `degree` divides
    `value`."""
    if value % degree:
        fitting = ", ".join(map(str, divisors(value, limit=64)))
        raise LayoutError(
            f"{model.name}: {description} not divisible by {dimension}={degree}; choose {dimension} among {fitting}",
            reason,
        )
