"""Activation memory against Korthikanti et al., arXiv 2205.05198, section 4 and table 2."""

import pytest

from perfmodel.catalog import model
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks

B = 2
GPT = model("gpt-22b")
S, H, A, L, V = GPT.seq_len, GPT.hidden, GPT.heads, GPT.layers, GPT.vocab
UNFUSED = Job(global_batch=B, seq_len=S, dtype="fp16", flash_attention=False)


def parts(job=UNFUSED, **shard):
    return {block.name: block for block, _ in blocks(GPT, job, Shard(micro_batch=B, **shard))}


def test_one_device_equation_1():
    layer = parts()["dense_layer"].activation_bytes
    assert layer.none == pytest.approx(S * B * H * (34 + 5 * A * S / H))


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallel_equation_2(t):
    layer = parts(tp=t)["dense_layer"].activation_bytes
    assert layer.none == pytest.approx(S * B * H * (10 + 24 / t + 5 * A * S / (H * t)))


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallel_equation_4(t):
    layer = parts(tp=t, sequence_parallel=True)["dense_layer"].activation_bytes
    assert layer.none == pytest.approx(S * B * H / t * (34 + 5 * A * S / H))


@pytest.mark.parametrize("t", [2, 8])
def test_selective_recompute_equation_6(t):
    layer = parts(tp=t, sequence_parallel=True)["dense_layer"].activation_bytes
    assert layer.selective == pytest.approx(S * B * H / t * 34)
    tensor_only = parts(tp=t)["dense_layer"].activation_bytes
    assert tensor_only.selective == pytest.approx(S * B * H * (10 + 24 / t))


def test_full_recompute_keeps_the_input():
    assert parts()["dense_layer"].activation_bytes.full == 2 * S * B * H
    assert parts(tp=8)["dense_layer"].activation_bytes.full == 2 * S * B * H
    assert (
        parts(tp=8, sequence_parallel=True)["dense_layer"].activation_bytes.full
        == 2 * S * B * H / 8
    )


def test_input_and_output_layers_section_4_3():
    ends = parts(tp=8, sequence_parallel=True)
    assert ends["embedding"].activation_bytes.none == S * B * H / 8  # dropout mask
    assert ends["head"].activation_bytes.none == pytest.approx(4 * S * B * H / 8 * (1 + V / H))


def test_flash_attention_keeps_one_statistic_per_row():
    flash = Job(global_batch=B, seq_len=S, dtype="fp16")
    layer = parts(job=flash)["dense_layer"].activation_bytes
    assert layer.none - layer.selective == 4 * B * A * S
    assert layer.selective == parts()["dense_layer"].activation_bytes.selective


def test_context_parallelism_divides_everything():
    flash = Job(global_batch=B, seq_len=S, dtype="bf16")
    whole, quarter = parts(job=flash), parts(job=flash, cp=4)
    for name in whole:
        assert quarter[name].activation_bytes.none == whole[name].activation_bytes.none / 4


def test_fp32_training_keeps_twice_the_bytes_less_the_masks():
    fp32 = parts(job=Job(global_batch=B, seq_len=S, dtype="fp32", flash_attention=False))[
        "dense_layer"
    ]
    masks = S * B * H * 2 + B * A * S * S
    fp16 = parts()["dense_layer"].activation_bytes.none
    assert fp32.activation_bytes.none == 2 * (fp16 - masks) + masks


def test_llama_layer_written_out():
    """GQA, gated feed-forward, no dropout: norm inputs and outputs, Q K V, output, gate, value,
    product."""
    llama = model("llama3-8b")
    s, h, d, f = llama.seq_len, llama.hidden, llama.head_dim, llama.ffn_hidden
    layer = blocks(llama, Job(global_batch=1, seq_len=s), Shard())[1][0].activation_bytes
    q, kv = llama.heads * d, llama.kv_heads * d
    assert layer.none == 2 * s * (4 * h + q + 2 * kv + q + 3 * f) + 4 * s * llama.heads


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp32", 4)])
def test_an_rms_norm_of_operators_keeps_an_fp32_copy_and_what_its_weight_multiplies(dtype, width):
    """Instead of its input: 4 bytes an element more, whatever the type. A layer norm is one kernel
    everywhere."""
    llama = model("llama3-8b")
    plain = Job(global_batch=1, seq_len=llama.seq_len, dtype=dtype)
    eager = Job(global_batch=1, seq_len=llama.seq_len, dtype=dtype, eager_kernels=("norm",))
    fused, apart = (blocks(llama, job, Shard())[1][0].activation_bytes for job in (plain, eager))
    tensor = llama.seq_len * llama.hidden
    assert apart.none - fused.none == 2 * 4 * tensor
    assert apart.full == fused.full == width * tensor

    gpt_eager = Job(
        global_batch=B, seq_len=S, dtype="fp16", flash_attention=False, eager_kernels=("norm",)
    )
    assert (
        parts(job=gpt_eager)["dense_layer"].activation_bytes
        == parts()["dense_layer"].activation_bytes
    )


def test_the_encoder_output_is_kept_once():
    t5 = model("t5-large")
    s, h, f = 512, t5.hidden, t5.ffn_hidden
    parts = {
        b.name: b for b, _ in blocks(t5, Job(global_batch=1, seq_len=s, dtype="bf16"), Shard())
    }
    statistics = 4 * s * t5.heads
    # norm, Q K V, output, dropout mask
    one_attention = 2 * s * (2 * h + 3 * h + h) + s * h + statistics
    cross = one_attention  # its keys and values come from elsewhere but are as large
    ffn = 2 * s * (2 * h + f) + s * h
    assert parts["decoder_layer"].activation_bytes.none == one_attention + cross + ffn
    assert parts["decoder_embedding"].activation_bytes.none == 2 * 2 * s * h + s * h


def test_inference_keeps_nothing():
    job = Job(global_batch=B, seq_len=S, mode="inference")
    for block in parts(job=job).values():
        assert block.activation_bytes.none == 0
        assert not block.backward_input
        assert not block.backward_weight
        assert not block.backward_comm
