"""Optimizers and frozen parts: states, traffic and products by hand, through predictions and
searches."""

from dataclasses import replace

import pytest

from perfmodel import catalog, predict, search
from perfmodel.cli import main
from perfmodel.errors import UnknownNameError
from perfmodel.ops import Gemm
from perfmodel.spec import OPTIMIZERS, Job
from perfmodel.workload import Shard, blocks, optimizer_op, orthogonalisation, parameter_count

LLAMA = catalog.model("llama3.2-1b")
JOB = Job(global_batch=8, seq_len=2048)
# moments, with an fp32 master copy beside 16-bit weights; bytes that an update moves, with fp32
# gradients: gradient, master and moments both ways, the 16-bit weight, norm and clipping; without a
# master copy gradients have the weights' 16 bits
BY_HAND = {
    "adam": (12, 4 + 24 + 2 + 12),
    "adamw": (12, 4 + 24 + 2 + 12),
    "adam8bit": (4 + 2 + 8 / 256, 4 + 8 + 4 + 16 / 256 + 2 + 12),
    "adam16bit": (4, 2 + 2 * (2 + 4) + 6),
    "adafactor": (4, 3 * 4 + 8 + 2),
    # LAMB writes Adam's update, reads it twice, and reads the weights for it and for their norm
    "lamb": (12, 4 + 24 + 2 + 12 + 5 * 4),
    "lion": (8, 4 + 16 + 2 + 12),
    "muon": (8, 4 + 16 + 2 + 12),
    "sgd": (8, 4 + 16 + 2),
    "plain-sgd": (0, 2 + 4),
}


def _predict(layout="dp=8", model=LLAMA, **job):
    return predict(model, "dgx-h100", layout, job=replace(JOB, **job))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_and_traffic_of_an_optimizer(name):
    state, traffic = BY_HAND[name]
    assert optimizer_op(1000, replace(JOB, optimizer=name)).bytes == 1000 * traffic
    found, total = _predict(optimizer=name), parameter_count(LLAMA)
    # embedding and final norm: AdamW's second moment
    outside = 4 * 128_256 * 2048 if name == "muon" else 0
    assert found.memory.optimizer == pytest.approx(state * total + outside, rel=1e-5)
    sharded = _predict("dp=8,zero=1", optimizer=name)
    assert sharded.memory.optimizer == pytest.approx(found.memory.optimizer / 8)
    assert sharded.step_time_s < found.step_time_s


@pytest.mark.parametrize("layout", ["dp=8", "dp=8,zero=1"])
def test_an_average_of_the_weights_is_a_state_more(layout):
    """Four bytes per parameter, sharded as the others are, and a pass that reads two and writes
    one."""
    plain, averaged = (_predict(layout, weight_average=value) for value in (False, True))
    ranks = 8 if "zero" in layout else 1
    more_bytes = averaged.memory.optimizer - plain.memory.optimizer
    assert more_bytes == pytest.approx(4 * parameter_count(LLAMA) / ranks, rel=1e-5)
    moved = [
        optimizer_op(1000, replace(JOB, weight_average=value)).bytes for value in (False, True)
    ]
    assert moved[1] - moved[0] == 12 * 1000
    assert averaged.step_time_s > plain.step_time_s


def test_products_that_orthogonalise_an_update():
    """Five times 4 a^2 b + 2 a^3 FLOPs for each of a layer's four matrices, of a <= b rows and
    columns."""
    job = replace(JOB, optimizer="muon")
    layer = blocks(LLAMA, job, Shard())[1][0]
    shapes = [(2048, 3072), (2048, 2048), (2048, 16384), (2048, 8192)]
    by_hand = sum(5 * (4 * a * a * b + 2 * a**3) for a, b in shapes)
    products = orthogonalisation(layer, job, experts=False)
    assert all(isinstance(op, Gemm) and op.dtype == "bf16" for op in products)
    assert sum(op.flops * n for op, n in products.items()) == by_hand
    head = blocks(LLAMA, job, Shard())[-1][0]
    for block, of in ((head, job), (layer, JOB)):
        assert not orthogonalisation(block, of, experts=False)
    assert not orthogonalisation(layer, job, experts=True)
    experts = next(
        b for b, _ in blocks(catalog.model("mixtral-8x7b"), job, Shard()) if b.name == "moe_layer"
    )
    assert experts.weight_shapes(experts=True) == {(28672, 4096): 8, (4096, 14336): 8}
    assert set(experts.weight_shapes(experts=False)) == {(6144, 4096), (4096, 4096), (8, 4096)}


def test_sharded_states_share_out_the_products():
    whole, plain = (_predict(optimizer=name).step_time_s for name in ("muon", "lion"))
    shared, alone = (
        _predict("dp=8,zero=1", optimizer=name).step_time_s for name in ("muon", "lion")
    )
    assert shared - alone == pytest.approx((whole - plain) / 8, rel=0.05)


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"frozen_embedding": True}])
def test_searches_and_predictions_agree(changes):
    job = replace(JOB, **changes)
    found = search(LLAMA, "dgx-h100", devices=8, job=job)
    best = found.layouts[0]
    assert predict(LLAMA, "dgx-h100", best.layout, job=job).step_time_s == pytest.approx(
        best.step_time_s
    )
    for layout, bound_s in zip(found.layouts, found.bounds_s, strict=True):
        assert bound_s <= layout.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("layout", ["dp=8", "dp=8,zero=1", "dp=8,zero=3"])
def test_a_frozen_embedding_has_no_gradients_and_no_states(layout):
    """Of a tied table, neither has the head."""
    table = 128_256 * 2048
    usual, frozen = _predict(layout), _predict(layout, frozen_embedding=True)
    shards = 8 if "zero" in layout else 1
    assert usual.memory.optimizer - frozen.memory.optimizer == pytest.approx(12 * table / shards)
    assert usual.memory.gradients - frozen.memory.gradients == pytest.approx(
        4 * table / (8 if "3" in layout else 1)
    )
    assert frozen.memory.weights == usual.memory.weights
    assert frozen.step_time_s < usual.step_time_s
    loose = replace(LLAMA, tied_embeddings=False)
    saved = {
        net: _predict(layout, net).memory.optimizer
        - _predict(layout, net, frozen_embedding=True).memory.optimizer
        for net in (LLAMA, loose)
    }
    assert saved[loose] == pytest.approx(saved[LLAMA])  # its head is trained


def test_names_that_nobody_knows():
    with pytest.raises(UnknownNameError, match=r"did you mean .*'adamw'"):
        replace(JOB, optimizer="AdamW2")


def test_flags_of_the_command_line(capsys):
    words = [
        "predict",
        "--model",
        "llama3.2-1b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "8",
        "--seq-len",
        "2048",
        "--layout",
        "dp=8,recompute=selective",
        "--json",
    ]
    flags = [
        "--optimizer",
        "lion",
        "--grad-dtype",
        "bf16",
        "--recompute-modules",
        "core_attn,mlp",
        "--freeze",
        "embedding",
    ]
    assert main([*words, *flags]) == 0
    printed = capsys.readouterr().out
    said = {
        "optimizer": "lion",
        "grad_dtype": "bf16",
        "recompute_modules": ("core_attn", "mlp"),
        "frozen_embedding": True,
    }
    assert f"{_predict('dp=8,recompute=selective', **said).step_time_s:.6g}"[:5] in printed
    assert main([*words, "--optimizer", "adma"]) == 2
    assert "did you mean 'adam'" in capsys.readouterr().err
    assert main([*words, "--recompute-modules", "all"]) == 2
    assert "unknown recompute module 'all'" in capsys.readouterr().err
