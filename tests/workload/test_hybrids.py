"""Hybrids: a mixer per layer, Mamba-2 counted by hand and as published."""

from dataclasses import replace

import pytest

from perfmodel import catalog, predict
from perfmodel.cost import KernelModel
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Job
from perfmodel.spec.parts import DeltaNet, Mamba, SelectiveScan, ShortConv
from perfmodel.workload import Shard, blocks, matmul_flops, parameters, step_flops

NANO = catalog.model("nemotron-3-nano")
JOB = Job(global_batch=1, seq_len=8192)
SMALL = replace(
    NANO,
    name="small",
    layers=2,
    mixers="M*",
    hidden=256,
    heads=4,
    kv_heads=4,
    head_dim=64,
    ffn_hidden=512,
    vocab=1024,
    experts=None,
    mamba=Mamba(heads=8, head_dim=64, state=16, groups=4, conv_kernel=4, chunk=32),
)


def test_parameters_are_those_published():
    """31.6 B, of which 3.6 B are active (Nemotron 3 Nano's model card)."""
    found = parameters(NANO)
    assert found.total / 1e9 == pytest.approx(31.6, rel=2e-3)
    assert found.active / 1e9 == pytest.approx(3.6, rel=1e-2)


def test_experts_in_a_latent_size():
    """120.6 B, of which 12.7 B are active with the embeddings (Nemotron 3 Super's report: 120 B, 12
    B)."""
    net = catalog.model("nemotron-3-super")
    found = parameters(net)
    assert found.total / 1e9 == pytest.approx(120.6, rel=1e-3)
    assert found.active / 1e9 == pytest.approx(12.7, rel=1e-2)
    routed = next(b for b, _ in blocks(net, JOB, Shard(ep=8)) if b.name == "moe_layer")
    sent = [c.bytes for c in routed.forward_comm if c.group == "ep"]
    assert sent == [8192 * 22 * 1024 * 2] * 2  # a quarter of the hidden size travels


def test_a_mixer_by_hand():
    inner, state, tokens = 8 * 64, 2 * 4 * 16, 64
    mamba = next(
        b
        for b, _ in blocks(SMALL, replace(JOB, seq_len=tokens), Shard())
        if b.name == "mamba_layer"
    )
    projections = 256 * (2 * inner + state + 8) + inner * 256
    convolution = (inner + state) * 5
    # the last two: gated norm, layer's norm
    assert mamba.params == projections + convolution + 3 * 8 + inner + 256
    # of each of two chunks of 32 tokens
    scores, context = (
        2 * 4 * 32 * 32 * 16,
        2 * 8 * 32 * 32 * 64,
    )
    states = 2 * (2 * 8 * 32 * 16 * 64)  # what a chunk leaves, and what it finds
    assert matmul_flops(mamba.forward) == 2 * tokens * projections + 2 * (scores + context + states)
    backward = matmul_flops(mamba.backward_input) + matmul_flops(mamba.backward_weight)
    assert backward == 2 * matmul_flops(mamba.forward)


def test_kernels_of_the_state_pass_over_tensors_states_and_scores():
    """Of mamba_ssm 2.2, ssd_combined.py: tensors of the inner size and what enters and leaves the
    state in 16 bits; states of chunks and scores in 32, of which 16-bit copies count half."""
    inner, groups, state, chunk = 8 * 64, 4, 16, 32
    mamba = next(
        b for b, _ in blocks(SMALL, replace(JOB, seq_len=64), Shard()) if b.name == "mamba_layer"
    )
    states, sides, scores = inner * state / chunk, groups * state, groups * chunk
    expected = {
        "fwd": 2 * (3 * inner + 4 * sides) + 4 * (3 * states + 2 * scores),
        "bwd": 2 * (11 * inner + 14 * sides) + 4 * (8.5 * states + 7 * scores),
    }
    found = {
        op.pass_: op
        for op, _ in (*mamba.forward, *mamba.backward_input)
        if op.family == "recurrence"
    }
    assert {name: op.bytes_per_token for name, op in found.items()} == expected
    assert {op.tokens for op in found.values()} == {64}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_share_out_the_heads(tp):
    whole, part = (
        blocks(SMALL, replace(JOB, seq_len=64), Shard(tp=n, sequence_parallel=True))
        for n in (1, tp)
    )
    for (one, n), (shard, m) in zip(whole, part, strict=True):
        assert (one.name, n) == (shard.name, m)
        if one.name == "mamba_layer":
            assert tp * matmul_flops(shard.forward) == matmul_flops(one.forward)
            # the layer's norm is on every rank
            assert tp * (shard.params - 256) == one.params - 256


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("letter", "mixer", "widest"),
    [
        # gate, what is convolved, and its gradient
        (
            "M",
            {"mamba": SMALL.hybrid.mamba},
            3 * 8 * 64,
        ),
        ("S", {"selective_scan": SelectiveScan(inner=640, state=16, step_rank=16)}, 2 * 640),
        ("L", {"delta_net": DeltaNet(heads=4, key_heads=2, head_dim=96, key_dim=64)}, 2 * 4 * 96),
        ("C", {"short_conv": ShortConv(kernel=3)}, 3 * 256),
        ("-", {}, 512),
    ],
)
def test_a_layer_works_in_its_widest_activation_and_the_gradient_of_it(letter, mixer, widest, tp):
    """Beside the gradient of the hidden state, of 256 elements here; a rank has its part of what is
    inside."""
    tokens = 64
    net = replace(SMALL, mixers=f"*{letter}", **({"mamba": None} | mixer))
    layers = [b for b, _ in blocks(net, replace(JOB, seq_len=tokens), Shard(tp=tp)) if b.is_layer]
    inside = max(widest // tp, 256)
    assert layers[-1].workspace_bytes == tokens * 2 * (256 + 2 * inside)


def test_work_grows_with_the_sequence_and_not_with_its_square():
    only = replace(SMALL, mixers="MM")
    short, long = (step_flops(only, replace(JOB, seq_len=s)).forward for s in (1024, 2048))
    assert long == 2 * short
    assert (
        step_flops(SMALL, replace(JOB, seq_len=2048)).forward
        > 2 * step_flops(SMALL, replace(JOB, seq_len=1024)).forward
    )


def test_hybrids_are_predicted():
    found = predict(NANO, "dgx-h100", "dp=16,ep=8,zero=1", global_batch=16)
    piped = predict(NANO, "dgx-h100", "pp=4,dp=4,ep=4,zero=1", global_batch=16)
    assert 0 < found.mfu < 1
    assert piped.step_time_s > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixers": "MEX"}, "a letter per layer"),
        ({"mixers": "M"}, "a letter per layer"),
        ({"mamba": None}, "give mamba if mixers has a M"),
        ({"mixers": "**"}, "give mamba if mixers has a M"),
        ({"mixers": "ME"}, "experts for E"),
    ],
)
def test_mixers_that_do_not_fit_the_model(changes, says):
    with pytest.raises(PerfModelError, match=says):
        replace(SMALL, **changes)


def test_what_is_not_split():
    with pytest.raises(LayoutError, match="use cp=1"):
        predict(NANO, "dgx-h100", "cp=2,dp=4,ep=8", global_batch=16)
    with pytest.raises(LayoutError, match="mamba groups=4 are not divisible by tp=8"):
        blocks(
            replace(SMALL, heads=8, kv_heads=8, head_dim=32), replace(JOB, seq_len=64), Shard(tp=8)
        )
    with pytest.raises(PerfModelError, match="must be a multiple of groups=3"):
        Mamba(heads=8, head_dim=64, state=16, groups=3)


def test_recurrences_take_what_was_measured():
    """12.6 M tokens/s forward of 8,192 tokens on H100 (128 heads of 64 by 128 in one group, chunks
    of 256), the other of the two measurements that the rate is the mean of being as far off the
    other way."""
    net = replace(SMALL, mamba=Mamba(heads=128, head_dim=64, state=128, groups=1, chunk=256))
    mamba = next(b for b, _ in blocks(net, JOB, Shard()) if b.name == "mamba_layer")
    (forward,) = (op for op, _ in mamba.forward if op.family == "recurrence")
    (backward,) = (op for op, _ in mamba.backward_input if op.family == "recurrence")
    device = catalog.device("H100-SXM5-80GB")
    forward_s, backward_s = KernelModel.load().times(device, [forward, backward]).time_s
    assert forward_s == pytest.approx(8192 / 12.6e6, rel=0.2)
    assert 2 < backward_s / forward_s < 4
    faster = replace(device, clock_hz=2 * device.clock_hz)
    assert KernelModel.load().times(faster, [forward]).time_s[0] < forward_s


def test_modules_for_further_tokens_may_share_their_weights():
    """Of Nemotron 3 Super: attention and experts each, once in parameters and in every use in
    FLOPs."""
    plain, further = catalog.model("nemotron-3-super"), catalog.model("nemotron-3-super-mtp")
    own = replace(further, mtp_repeated=False)
    added = parameters(further).total - parameters(plain).total
    assert parameters(own).total - parameters(plain).total == 2 * added
    per_token = [step_flops(net, JOB).total_causal / 8192 / 1e9 for net in (plain, further)]
    # Megatron-Bridge's tables: 84.7 GFLOP
    assert per_token[1] / per_token[0] == pytest.approx(1.13, rel=0.01)
    held = sum(block.params * n for block, n in blocks(further, JOB, Shard()))
    assert held - sum(block.params * n for block, n in blocks(plain, JOB, Shard())) == added


def test_an_adapter_has_its_input_gathered_in_16_bits():
    job = replace(JOB, seq_len=64, dtype="fp8", fp8_recipe="delayed", frozen=True)

    def gathered(rank):
        shard = Shard(tp=2, sequence_parallel=True)
        layers = blocks(SMALL, replace(job, adapter_rank=rank), shard)
        layer = next(b for b, _ in layers if b.name == "attention_layer")
        return [
            one.bytes
            for one in layer.forward_comm
            if one.collective == "all_gather" and not one.follows
        ]

    plain, shared = gathered(0), gathered(16)
    # of what follows attention nothing but the product takes the input
    assert shared == [
        2 * plain[0],
        *plain[1:],
    ]


@pytest.mark.parametrize(
    ("dtype", "recipe", "share"),
    [("bf16", "", 1.0), ("fp8", "current", 0.5), ("fp4", "nvfp4", 9 / 32)],
)
def test_ranks_gather_what_is_quantised(dtype, recipe, share):
    job = replace(JOB, seq_len=64, dtype=dtype, fp8_recipe=recipe)
    layer = next(
        b
        for b, _ in blocks(SMALL, job, Shard(tp=2, sequence_parallel=True))
        if b.name == "attention_layer"
    )
    for comms in (layer.forward_comm, layer.backward_comm):
        gathered = {one.bytes for one in comms if one.collective == "all_gather"}
        scattered = {one.bytes for one in comms if one.collective == "reduce_scatter"}
        assert gathered == {share * 64 * 256 * 2}
        assert scattered == {64 * 256 * 2}
