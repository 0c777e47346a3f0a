"""Sequences of varied lengths: attention goes by their second moment, all else by their mean."""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.catalog import model
from perfmodel.errors import LayoutError
from perfmodel.ops import Attention, Gemm
from perfmodel.prediction import predict
from perfmodel.spec import Job, Layout
from perfmodel.workload import Shard, blocks, step_flops

JOB = Job(global_batch=64, seq_len=4096)
SHARD = Shard(micro_batch=16)


def products(name: str, job: Job, shard: Shard) -> float:
    """FLOPs of forward products of a micro-batch that are no attention."""
    kernels = [
        (op, n * count)
        for block, count in blocks(model(name), job, shard)
        for op, n in block.forward
    ]
    return sum(op.flops * n for op, n in kernels if isinstance(op, Gemm) and op.op != "bmm")


def scores(name: str, job: Job, shard: Shard) -> float:
    """Pairs of queries and keys of a forward pass of the first attention."""
    layer = next(block for block, _ in blocks(model(name), job, shard) if "layer" in block.name)
    core = next(op for op, _ in layer.forward if isinstance(op, Attention) or op.op == "bmm")
    if isinstance(core, Attention):
        return float(core.batch * core.seq_q * core.seq_kv)
    return core.batch * core.m * core.n / model(name).heads


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", ["llama2-7b", "bert-large"])
@given(share=st.floats(0.05, 1.0), spread=st.floats(0.0, 1.0))
def test_attention_goes_by_the_second_moment_and_all_else_by_the_first(name, flash, share, spread):
    seq_len = 512
    mean = share * seq_len
    # between equal lengths and either all or nothing
    square = mean**2 + spread * (mean * seq_len - mean**2)
    whole = Job(global_batch=64, seq_len=seq_len, dtype="fp16", flash_attention=flash)
    job = replace(whole, mean_tokens=mean, rms_tokens=sqrt(square))
    assert products(name, job, SHARD) == pytest.approx(
        share * products(name, whole, SHARD), rel=0.02
    )
    rounding = 2 / sqrt(square / share / seq_len)  # of a sequence's length to whole tokens
    expected = square / seq_len**2 * scores(name, whole, SHARD)
    assert scores(name, job, SHARD) == pytest.approx(expected, rel=max(0.02, rounding))


@pytest.mark.parametrize("name", ["llama2-7b", "bert-large", "mixtral-8x7b", "gpt-oss-20b"])
def test_lengths_that_are_all_the_same_are_no_others(name):
    same = replace(JOB, mean_tokens=4096, rms_tokens=4096)
    assert blocks(model(name), same, SHARD) == blocks(model(name), JOB, SHARD)
    assert step_flops(model(name), same).total_causal == pytest.approx(
        step_flops(model(name), JOB).total_causal
    )


def test_without_a_second_moment_evenly_spread_lengths_are_taken_at_half_the_length():
    half = replace(JOB, mean_tokens=2048)
    assert half.attended_tokens * half.tokens_per_sequence == pytest.approx(4096**2 / 3)
    assert replace(JOB, mean_tokens=4096).attended_tokens == 4096


def test_packed_documents_compute_all_tokens_and_attend_to_their_own():
    packed = replace(JOB, rms_tokens=sqrt(4096 * 512))  # eight documents of 512 tokens
    assert products("llama2-7b", packed, SHARD) == products("llama2-7b", JOB, SHARD)
    assert scores("llama2-7b", packed, SHARD) * 8 == scores("llama2-7b", JOB, SHARD)
    whole, parts = (step_flops(model("llama2-7b"), job) for job in (JOB, packed))
    assert parts.attention_forward * 8 == pytest.approx(whole.attention_forward)
    assert parts.layers_forward == whole.layers_forward


@pytest.mark.parametrize("cp_kind", ["ring", "ulysses", "all_gather"])
def test_shorter_sequences_make_no_step_longer(cp_kind):
    """Of as many whole tiles; tokens that divide by nothing multiply less well than the next ones
    that do."""
    layout = Layout(tp=2, cp=2, dp=2, micro_batch=2, cp_kind=cp_kind)

    def step_s(mean_tokens: float) -> float:
        job = Job(global_batch=16, seq_len=8192, mean_tokens=mean_tokens)
        return predict("llama2-7b", "dgx-a100", layout, job=job).step_time_s

    tiled = range(1536, 8193, 1024)
    of_tiles_s = [step_s(tokens) for tokens in tiled]
    for shorter_s, longer_s in pairwise(of_tiles_s):
        assert shorter_s < longer_s
    for tokens, next_s in zip(tiled, of_tiles_s, strict=True):
        assert step_s(tokens - 101) <= next_s * 1.05


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ({"mean_tokens": 0}, "mean_tokens must be above 0"),
        ({"mean_tokens": 5000}, "at most seq_len=4096"),
        ({"mean_tokens": 1024, "rms_tokens": 3000}, "rms_tokens must be above 0 and at most 2048"),
        ({"rms_tokens": -1}, "rms_tokens must be above 0"),
        ({"mean_tokens": 1024, "cached_tokens": 16}, "cached_tokens"),
    ],
)
def test_moments_that_no_lengths_have_are_refused(moments, message):
    with pytest.raises(LayoutError, match=message):
        replace(JOB, **moments)


def test_stacks_that_are_not_divided_by_length_are_refused():
    with pytest.raises(LayoutError, match="mean_tokens"):
        blocks(model("t5-11b"), Job(global_batch=8, seq_len=512, mean_tokens=100), Shard())


@pytest.mark.parametrize("name", ["bert-large", "llama2-7b"])
def test_heads_of_labels_compute_no_vocabulary(name):
    """Neither its products, nor its logits, nor a copy of the tied embedding on the last pipeline
    stage."""
    job = Job(global_batch=8, seq_len=384)
    words, *labels = (
        blocks(model(name), replace(job, head=head), SHARD)[-1][0]
        for head in ("vocabulary", "token_labels", "sequence_label")
    )
    for head in labels:
        assert all(op.n < model(name).vocab / 2 for op, _ in head.forward if isinstance(op, Gemm))
        assert head.activation_bytes.none < words.activation_bytes.none / 5
        assert head.tied_params == 0
    flops = [
        step_flops(model(name), replace(job, head=head)).head_forward
        for head in ("vocabulary", "token_labels")
    ]
    assert flops[1] < flops[0] / 100
