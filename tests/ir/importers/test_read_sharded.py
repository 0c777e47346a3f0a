"""Partitioned modules: every collective with bytes and group, and the bytes that a `Layout`
predicts."""

import re
from collections import Counter
from pathlib import Path

import pytest
import sharded_gpt as gpt

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.ir.importers import read_sharded
from perfmodel.spec import Job, Layout, Transformer
from perfmodel.workload import Shard, blocks, matmul_flops

TP_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
DP_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))


def of_layout(layout):
    """Blocks of the same model as the workload knows them."""
    model = Transformer(
        name="gpt",
        layers=gpt.LAYERS,
        hidden=gpt.HIDDEN,
        heads=gpt.HEADS,
        kv_heads=gpt.HEADS,
        head_dim=gpt.HIDDEN // gpt.HEADS,
        ffn_hidden=4 * gpt.HIDDEN,
        vocab=gpt.VOCAB,
        seq_len=gpt.SEQ,
        positions="learned",
        tied_embeddings=False,
        dropout=False,
    )
    job = Job(global_batch=gpt.BATCH, seq_len=gpt.SEQ, dtype="fp32", flash_attention=False)
    return blocks(model, job, Shard.of(layout))


def test_a_layout_predicts_the_bytes_that_gspmd_emits(fake_devices):
    texts, _ = fake_devices
    table = read_sharded(texts["gpt"])
    moved = Counter()
    for row in table.collectives:
        assert row.collective == "all_reduce"
        assert row.groups in (TP_GROUPS, DP_GROUPS)
        moved[row.groups] += row.count * row.bytes
    parts = of_layout(Layout(tp=gpt.TP, dp=gpt.DP, micro_batch=gpt.BATCH // gpt.DP))
    events = [(c, n) for block, n in parts for c in (*block.forward_comm, *block.backward_comm)]
    assert moved[TP_GROUPS] == sum(n * c.count * c.bytes for c, n in events)
    loss_bytes = 4
    assert moved[DP_GROUPS] == 4 * sum(n * block.params for block, n in parts) + loss_bytes
    phases = ("forward", "backward_input", "backward_weight")
    assert table.matmul_flops == sum(
        n * matmul_flops(getattr(b, p)) for b, n in parts for p in phases
    )


def test_flops_are_those_that_xla_counts(fake_devices):
    """XLA also counts an addition per element of an all-reduce."""
    texts, counted = fake_devices
    table = read_sharded(texts["gpt"])
    assert table.flops + table.communicated_bytes / 4 == pytest.approx(counted["gpt"], rel=1e-5)


def test_every_kind_of_collective_is_found(fake_devices):
    texts, _ = fake_devices
    table = read_sharded(texts["every_collective"])
    local = 32 * 32 * 4
    ring = tuple((base + i, base + (i + 1) % 4) for base in (0, 4) for i in range(4))
    assert {(c.collective, c.bytes, c.groups, c.count) for c in table.collectives} == {
        ("all_reduce", local, TP_GROUPS, 1),
        ("all_reduce", local, (tuple(range(8)),), 1),
        ("all_gather", 4 * local, TP_GROUPS, 1),
        ("reduce_scatter", 4 * local, TP_GROUPS, 1),
        ("all_to_all", 4 * local, DP_GROUPS, 1),
        ("send_recv", local, ring, 1),
    }
    assert table.n_devices == 8


@pytest.mark.parametrize("name", ["gpt", "every_collective", "half_precision_scan"])
def test_as_many_collectives_as_the_text_has(fake_devices, name):
    texts, _ = fake_devices
    written = re.findall(r"= .*? (all-[a-z-]+|reduce-scatter|collective-permute)\(", texts[name])
    inside_loop = 3 if name == "half_precision_scan" else 1
    found = sum(c.count for c in read_sharded(texts[name]).collectives)
    loops = len(re.findall(r"channel_id=[123],", texts[name])) if inside_loop > 1 else 0
    assert found == len(written) + (inside_loop - 1) * loops


def test_what_the_cpu_compiler_widened_is_counted_as_it_was_written(fake_devices):
    texts, _ = fake_devices
    table = read_sharded(texts["half_precision_scan"])
    assert {(c.bytes, c.dtype, c.count) for c in table.collectives if c.bytes > 4} == {
        (8 * 64 * 2, "bf16", 6),  # an activation each way and layer
        (2 * 64 * 64 * 2, "bf16", 3),  # the gradients of a layer's weights
    }
    products = [k for k in table.kernels if k.op.family == "gemm"]
    assert {k.op.dtype for k in products} == {"bf16"}
    assert sum(k.count for k in products) == 3 * 2 * 3
    assert table.matmul_flops == 3 * 2 * 3 * (2 * 8 * 64 * 64)
    assert not table.unmapped


def test_predicted_on_a_cluster(fake_devices):
    texts, _ = fake_devices
    table = read_sharded(texts["gpt"])
    estimate = table.predict("dgx-h100")
    assert estimate.step_time_lo_s < estimate.step_time_s < estimate.step_time_hi_s
    assert estimate.collective_time_s > 0
    assert estimate.overlapped_time_s <= estimate.step_time_s
    assert sum(estimate.provenance.values()) == pytest.approx(1.0)
    assert estimate.to_frame()["time_s"].sum() == pytest.approx(estimate.step_time_s)
    with pytest.raises(PerfModelError, match="name a cluster instead of the device"):
        table.predict(catalog.device("h100-sxm"))


GPU_MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=16

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%async (p: bf16[4,8]) -> bf16[1,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %rs = bf16[1,8]{1,0} reduce-scatter(bf16[4,8]{1,0} %p), replica_groups=[4,4]<=[16], dimensions={0}, to_apply=%region
}

%body (s: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %s = (s32[], bf16[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element((s32[], bf16[4,8]{1,0}) %s), index=0
  %x = bf16[4,8]{1,0} get-tuple-element((s32[], bf16[4,8]{1,0}) %s), index=1
  %w = bf16[8,8]{1,0} constant({...})
  %gemm = (bf16[4,8]{1,0}, s8[1024]{0}) custom-call(bf16[4,8]{1,0} %x, bf16[8,8]{1,0} %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %y = bf16[4,8]{1,0} get-tuple-element((bf16[4,8]{1,0}, s8[1024]{0}) %gemm), index=0
  %start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %y), replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
  %done = bf16[16,8]{1,0} all-gather-done((bf16[4,8]{1,0}, bf16[16,8]{1,0}) %start)
  %half = bf16[4,8]{1,0} slice(bf16[16,8]{1,0} %done), slice={[0:4], [0:8]}
  ROOT %next = (s32[], bf16[4,8]{1,0}) tuple(s32[] %i, bf16[4,8]{1,0} %half)
}

%condition (s: (s32[], bf16[4,8])) -> pred[] {
  %s.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element((s32[], bf16[4,8]{1,0}) %s.1), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(s32[] %i.1, s32[] %n), direction=LT
}

ENTRY %main (x: bf16[4,8]) -> bf16[1,8] {
  %x.2 = bf16[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %state = (s32[], bf16[4,8]{1,0}) tuple(s32[] %zero, bf16[4,8]{1,0} %x.2)
  %loop = (s32[], bf16[4,8]{1,0}) while((s32[], bf16[4,8]{1,0}) %state), condition=%condition, body=%bodyBACKEND
  %y.2 = bf16[4,8]{1,0} get-tuple-element((s32[], bf16[4,8]{1,0}) %loop), index=1
  %rs-start = ((bf16[4,8]{1,0}), bf16[1,8]{1,0}) async-start(bf16[4,8]{1,0} %y.2), calls=%async
  ROOT %rs-done = bf16[1,8]{1,0} async-done(((bf16[4,8]{1,0}), bf16[1,8]{1,0}) %rs-start)
}
"""  # noqa: E501


def test_asynchronous_forms_library_products_and_loops():
    text = GPU_MODULE.replace("BACKEND", ', backend_config={"known_trip_count":{"n":"5"}}')
    table = read_sharded(text)
    strided = tuple(tuple(range(i, 16, 4)) for i in range(4))
    consecutive = tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))
    assert {(c.collective, c.bytes, c.groups, c.dtype, c.count) for c in table.collectives} == {
        ("all_gather", 16 * 8 * 2, strided, "bf16", 5),
        ("reduce_scatter", 4 * 8 * 2, consecutive, "bf16", 1),
    }
    (product,) = (k for k in table.kernels if k.op.family == "gemm")
    assert (product.op.m, product.op.n, product.op.k, product.count) == (4, 8, 8, 5)


def test_a_loop_of_unknown_length_is_named_with_its_flops(tmp_path: Path):
    text = GPU_MODULE.replace("BACKEND", "")
    table = read_sharded(text)
    (loop,) = table.unmapped
    assert (loop.name, loop.flops) == ("while", 2 * 4 * 8 * 8)
    assert "trip_count" in loop.reason
    assert "collectives of 256 bytes" in loop.reason
    assert table.unmapped_share == 1.0
    path = tmp_path / "module.hlo"
    path.write_text(text)
    assert read_sharded(path, trip_count=5) == read_sharded(
        text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func @main()", "not an HLO module"),
        ("HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n", "pass the complete text"),
        (
            "HloModule m\n\nENTRY %e () -> f32[<=4] {\n  ROOT %x = f32[<=4]{0} parameter(0)\n}\n",
            "line 4.*dynamic",
        ),
        (
            "HloModule m\n\nENTRY %e () -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
            "  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups=rows(2), to_apply=%add\n}\n",
            "HLO %r: replica groups 'rows.2.'",
        ),
        (
            "HloModule m\n\nENTRY %e () -> f32[4] {\n  ROOT %x = f32[4]{0} parameter(0\n}\n",
            "line 4.*cannot be read",
        ),
    ],
)
def test_bad_modules(text, message):
    with pytest.raises(PerfModelError, match=message):
        read_sharded(text)


def test_point_to_point_and_unknown_calls_are_named():
    text = """HloModule m, num_partitions=2

ENTRY %e (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %after = token[] after-all()
  %sent = (f32[4]{0}, u32[], token[]) send(%x, %after), channel_id=1
  %done = token[] send-done(%sent), channel_id=1
  ROOT %r = f32[4]{0} custom-call(%x), custom_call_target="mine"
}
"""
    assert {u.name for u in read_sharded(text).unmapped} >= {"send", "mine"}


def test_staged_reductions_are_one_kernel():
    text = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %e (x: f32[64,128]) -> f32[128] {
  %x = f32[64,128]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %part = f32[4,128]{1,0} reduce-window(%x, %zero), window={size=16x1 stride=16x1}, to_apply=%add
  ROOT %r = f32[128]{0} reduce(%part, %zero), dimensions={0}, to_apply=%add
}
"""
    (kernel,) = read_sharded(text).kernels
    assert kernel.bytes == 4 * (64 * 128 + 128)
    assert kernel.flops == 63 * 128


def test_something_else_is_refused():
    with pytest.raises(PerfModelError, match="int is not a sharded program"):
        read_sharded(3)
