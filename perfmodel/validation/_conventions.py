"""What a published table leaves unsaid, but its framework's documentation says.

Each entry states facts about the software of a source (which overlaps it has, what it accumulates
in), never a number tuned to its rows. A cell of the table always wins over an entry here.
"""

from dataclasses import dataclass, replace

from perfmodel.prediction import COMPILED, EAGER, AttentionKernel, Framework, attention_slowdown, sustained, unknown
from perfmodel.spec import Device, EagerKernel, Job
from perfmodel.validation._memory_facts import memory_facts


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Settings of a source's runs where its table has an empty cell."""

    zero: int = 0
    recompute: str = "none"
    flash_attention: bool = True
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    grad_dtype: str = "fp32"
    keep_gathered: bool = False
    half_gradients: bool = False
    all_reduce_gradients: bool = False
    """All three as in `Job`."""
    weighted_experts: bool = False
    """As in `Job`."""
    zero_overlaps: bool = True
    """False: with ZeRO, gradients are reduced after the last backward and weights gathered after the step."""
    forward_bookkeeping: int = 0
    backward_bookkeeping: int = 0
    """Both as in `Framework`."""
    eager_kernels: tuple[EagerKernel, ...] = ()
    """Kinds of element-wise work that the framework does not fuse."""
    vocab: int = 51200
    heads: int | None = None
    """None for the number nearest to 128 elements per head."""
    seq_len: int | None = None
    decoder_seq_len: int = 0
    """Decoder tokens of encoder-decoder models; 0 for as many as the encoder's."""
    compiled: bool = False
    """The step is one compiled program (XLA), or replayed from a graph."""
    stops_recompute: bool = False
    """As in `Job`; compiled steps do anyway."""
    selective_layers: bool = False
    """`selective` recompute means whole layers, as many as the ratio of hardware to model FLOPs tells."""
    attention: AttentionKernel = "fastest"
    """Generation of the fused attention kernel."""
    blocking_sends: bool = False
    """Transfers between pipeline stages hold up the sender's kernels."""


_MEGATRON_2021 = Conventions(
    # Megatron-LM before 2023: gradients reduced after the last backward, no fused attention; its cross entropy is a
    # series of torch operators on fp32 logits (megatron/mpu/cross_entropy.py), and every transfer between stages ends
    # in a device synchronisation (megatron/p2p_communication.py)
    flash_attention=False,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    eager_kernels=("cross_entropy",),
    blocking_sends=True,
)
_BY_SOURCE: tuple[tuple[str, Conventions], ...] = (
    ("Megatron-LM", _MEGATRON_2021),
    ("Korthikanti", _MEGATRON_2021),
    # Megatron-DeepSpeed; the simulator's configs say fp16, no ZeRO, no gradient bucketing
    ("vTrain", replace(_MEGATRON_2021, grad_dtype="fp16", vocab=50304)),
    # Megatron-DeepSpeed with ZeRO-1 and, before 2022-02-28, fp16 accumulation; the runs of the first sweep that state
    # their heads have 96
    ("BigScience", replace(_MEGATRON_2021, grad_dtype="fp16", vocab=250880, heads=96)),
    ("Zero Bubble", Conventions(flash_attention=False, overlap_grad_reduce=False, vocab=50304)),
    # the recipes use the distributed optimizer, fused attention and sequence parallelism with tp
    ("NVIDIA NeMo", Conventions(zero=1, sequence_parallel=True)),
    ("NVIDIA Megatron-Bridge", Conventions(zero=1, sequence_parallel=True)),
    # its T5 and mT5 recipes pre-train on 512 encoder and 128 decoder tokens
    ("NeMo framework launcher", Conventions(flash_attention=False, recompute="selective", decoder_seq_len=128)),
    # Megatron-LM 0.14 run without communication overlap
    ("SimuMax", Conventions(overlap_grad_reduce=False, overlap_param_gather=False, blocking_sends=True,
                            weighted_experts=True)),
    # nanotron: fp32 gradients beside 16-bit ones; FlashAttention-2 with its fused norm and rotary kernels; SwiGLU and
    # the fp32 sharded cross-entropy are eager; `tp_recompute_allgather` is true by default; every 16-bit gradient
    # lives until the end of a micro-batch's backward, when all are added to the fp32 ones; with ZeRO there is no
    # DistributedDataParallel, and `sync_gradients_across_dp` all-reduces at the end. Operators counted in its llama
    # layer: 30 forward (six over masks; products beside a gather in three parts) and 38 backward, of which 19 and 25
    # are counted as kernels here; `send_tensors` waits for what it sends
    (
        "ultrascale",
        Conventions(
            eager_kernels=("activation", "cross_entropy", "attention_layout"), attention="flash-2", half_gradients=True,
            all_reduce_gradients=True, zero_overlaps=False, blocking_sends=True, forward_bookkeeping=11,
            backward_bookkeeping=13,
        ),
    ),
    # FSDP, mixed_precision=DEFAULT: bf16 weights and fp32 reduction; attn_impl=triton, fused cross-entropy
    ("mosaicml", Conventions(eager_kernels=("activation",), attention="flash-1-triton")),
    # torch.compile over the blocks, scaled_dot_product_attention (FlashAttention-2); some blocks are checkpointed, by
    # torch's checkpoint without reentry, which stops early
    ("fms-fsdp", Conventions(attention="flash-2", stops_recompute=True, selective_layers=True)),
    # the sequence length of every BERT pre-training benchmark of that report
    ("OneFlow DLPerf v1.0", Conventions(flash_attention=False, vocab=30522, seq_len=128, grad_dtype="fp16")),
    ("OneFlow DLPerf", Conventions(flash_attention=False, vocab=50304, grad_dtype="fp16")),
    # XLA keeps bf16 gradients of bf16 computations for the reduction
    ("MaxText", Conventions(zero=3, grad_dtype="bf16", compiled=True)),
    ("NVIDIA JAX-Toolbox", Conventions(grad_dtype="bf16", flash_attention=False, compiled=True)),
    ("InternEvo", Conventions(grad_dtype="bf16", attention="flash-2")),
)  # fmt: skip


def conventions(source: str) -> Conventions:
    """The conventions of a source by the start of its name; plain defaults for an unknown one."""
    for start, found in _BY_SOURCE:
        if source.startswith(start):
            return found
    return Conventions()


def framework_of(source: str, device: Device) -> Framework:
    """Host costs and kernels of a source's runs on a device, nothing in them fitted on the source itself."""
    usual = conventions(source)
    base, memory = COMPILED if usual.compiled else EAGER, memory_facts(source)
    return replace(
        base, attention_slowdown=attention_slowdown(usual.attention, device), sustained=sustained(without=source),
        blocking_sends=usual.blocking_sends,
        forward_bookkeeping=usual.forward_bookkeeping, backward_bookkeeping=usual.backward_bookkeeping,
        unknown=unknown(without=source), bucket_bytes=memory.bucket_bytes, ddp_buckets=memory.ddp_buckets,
        cached_weight_gradients=memory.cached_weight_gradients,
    )  # fmt: skip


def job_of(
    source: str, *, global_batch: int, seq_len: int, dtype: str, flash_attention: bool | None, frozen: bool = False
) -> Job:
    """The job that a published row ran."""
    usual = conventions(source)
    return Job(
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        flash_attention=usual.flash_attention if flash_attention is None else flash_attention,
        grad_dtype="fp32" if dtype == "fp32" else usual.grad_dtype,
        eager_kernels=usual.eager_kernels,
        keep_gathered=usual.keep_gathered,
        half_gradients=usual.half_gradients,
        all_reduce_gradients=usual.all_reduce_gradients,
        weighted_experts=usual.weighted_experts,
        frozen=frozen,
        stops_recompute=usual.stops_recompute or usual.compiled,
    )
