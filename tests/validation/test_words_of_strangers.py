"""Words of strangers for layout and element type: synonyms read alike, whatever case, joints,
switches and order."""

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_case_rows import ROW

from perfmodel.catalog import device, problem_and_layout
from perfmodel.errors import PerfModelError
from perfmodel.prediction import layout_of
from perfmodel.spec.notation import schedule_name
from perfmodel.validation import Case, read_case, read_runs
from perfmodel.validation.rows import with_plain_columns

PIPELINE = ROW | {
    "tp": 1,
    "pp": 4,
    "dp": 2,
    "vpp": None,
    "num_microbatches": None,
    "micro_batch": 1,
}
REPLICAS = ROW | {"tp": 1, "dp": 16, "n_devices": 16, "num_microbatches": None, "zero_stage": None}


def layers(number: int) -> dict[str, Any]:
    return {"layout": {"recompute": "none", "recompute_full_layers": (number,)}}


def modules(*names: str) -> dict[str, Any]:
    return {"layout": {"recompute": "selective"}, "job": {"recompute_modules": names}}


def zero(stage: int, **fields: Any) -> dict[str, Any]:
    return {"layout": {"zero": stage} | fields}


FULL, NONE = {"layout": {"recompute": "full"}}, {"layout": {"recompute": "none"}}
# Meanings of a column, each with the wordings that have it.
RECOMPUTE_SYNONYMS = [
    (
        FULL,
        "full | gradient checkpointing | activation_checkpointing: true | checkpointing on | "
        "yes | True | enabled | full remat | AC | recompute=True | all layers | 100 % | "
        "full, uniform 1 | nothing_saveable | "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    (
        NONE,
        "none | no recomputation | gradient_checkpointing=False | without checkpointing | "
        "off | 0 % | activation checkpointing disabled | not used | w/o | everything_saveable",
    ),
    (
        layers(12),
        "block 12 | 12 layers | 12 layers per stage | 1 in 4 layers | 10 layers of 40 | "
        "12/48 layers | 25 % | 25% of the layers | a quarter | every 4th layer | "
        "every fourth layer | recompute_num_layers=12 | full, 12 out of 48 layers",
    ),
    (
        layers(24),
        "every other layer | half | one in two layers | alternate layers | 50% | every 2nd layer",
    ),
    (
        layers(32),
        "2 of 3 layers | two thirds of the layers | activation checkpointing: 2 of 3 layers",
    ),
    (
        modules("core_attn"),
        "selective attention | core_attn | attention only | core attention | "
        "selective (attention core)",
    ),
    (
        modules("layernorm", "mlp"),
        "mlp, layernorm | selective FFN + RMSNorm | layer_norm; feed-forward",
    ),
    (
        {"layout": {"offload_layers": 47}},
        "offload | activation offloading | CPU offload of activations",
    ),
]
SCHEDULE_SYNONYMS = [
    (
        {"layout": {"schedule": "1f1b"}},
        "1F1B | PipeDream-flush | one forward one backward | Schedule1F1B | "
        "non-interleaved 1F1B | 1F1B (PipeDream-Flush) | DAPPLE",
    ),
    (
        {"layout": {"schedule": "interleaved", "vpp": 4}},
        "interleaved 1F1B (v=4) | VPP 4 | interleaved, 4 model chunks | "
        "1F1B-interleaved, vpp=4 | virtual pipeline (4 chunks) | "
        "virtual_pipeline_model_parallel_size=4",
    ),
    (
        {"layout": {"schedule": "gpipe"}},
        "GPipe | AFAB | all-forward-all-backward | F-then-B | ScheduleGPipe",
    ),
    (
        {"layout": {"schedule": "zb-h1"}},
        "ZB1P | ZB-H1 | zb_h1 | ZB-1p | Zero Bubble (ZB-H1) | zero bubble",
    ),
    (
        {"layout": {"schedule": "dualpipe"}},
        "DualPipe | dual pipe | DualPipe (DeepSeek-V3)",
    ),
]
SHARDING_SYNONYMS = [
    (
        zero(0),
        "none | DDP | NO_SHARD | FSDP NO_SHARD | data parallel | not sharded | ZeRO-0",
    ),
    (
        zero(1),
        "ZeRO-1 | distopt | --use-distributed-optimizer | DDP with a distributed optimizer | "
        "zero_stage=1 | optimizer state sharding | ZeroRedundancyOptimizer | P_os",
    ),
    (
        zero(2),
        "ZeRO stage 2 | SHARD_GRAD_OP | FSDP SHARD_GRAD_OP | DeepSpeed stage 2 | "
        "FSDP, no reshard after forward | reshard_after_forward=False",
    ),
    (
        zero(3),
        "FULL_SHARD | FSDP2 | ZeRO-III | ds_z3 | fully sharded | "
        "Fully Sharded Data Parallel | ZeRO++",
    ),
    (
        zero(3, replicate=2),
        "HSDP 2x8 | hybrid shard 8 | MiCS | dp_replicate=2, dp_shard=8 | FSDP over 8 GPUs | "
        "HSDP (shard 8, replicate 2) | HYBRID_SHARD",
    ),
    (
        zero(3, offload_states="weights"),
        "ZeRO-Infinity | FSDP + CPU offload | ZeRO-3, offload parameters",
    ),
    (
        zero(2, offload_states="optimizer"),
        "ZeRO-2 + CPU offload | zero2, optimizer offload",
    ),
    (
        zero(3) | {"job": {"secondary_shards": 8}},
        "ZeRO++ hpz=8 | ZeRO-3 hpZ over 8 ranks | zero_hpz_partition_size=8",
    ),
]
DTYPE_SYNONYMS = [
    (
        {"job": {"dtype": "bf16"}},
        "bf16 | bfloat16 | bf16-mixed | mixed precision | 16-bit | "
        "bf16 + fp32 master weights | BF16 (fp32 optimizer states)",
    ),
    (
        {"job": {"dtype": "bf16", "grad_dtype": "fp32"}},
        "bf16 with fp32 gradients | param_dtype=bf16, reduce_dtype=fp32",
    ),
    (
        {"job": {"dtype": "fp16"}},
        "O1 | O2 | apex O2 | 16-mixed | half precision | fp16 (dynamic loss scaling)",
    ),
    (
        {"job": {"dtype": "fp8"}},
        "BF16/FP8 | fp8-mixed | FP8 hybrid | float8_e4m3fn | 8-bit",
    ),
    (
        {"job": {"dtype": "fp8", "fp8_recipe": "mxfp8"}},
        "MXFP8 | mx-fp8 | fp8 MX",
    ),
    (
        {"job": {"dtype": "int8"}},
        "w8a8 | INT8 (AQT)",
    ),
    (
        {"job": {"dtype": "bf16", "base_weights": "nf4"}},
        "nf4 | QLoRA 4-bit | load_in_4bit | 4-bit base, bf16 compute",
    ),
]
COLUMNS = {
    "recompute": (ROW, RECOMPUTE_SYNONYMS),
    "recompute_detail": (ROW | {"recompute": None}, RECOMPUTE_SYNONYMS),
    "schedule": (PIPELINE, SCHEDULE_SYNONYMS),
    "sharding": (REPLICAS, SHARDING_SYNONYMS),
    "dtype": (ROW | {"device": "B200"}, DTYPE_SYNONYMS),
    "dtype_recipe": (ROW | {"device": "B200", "dtype": None}, DTYPE_SYNONYMS),
}
WORDINGS = [
    (column, words, meaning)
    for column, (_, synonyms) in COLUMNS.items()
    for meaning, wordings in synonyms
    for words in wordings.split(" | ")
]


def unread(case: Case) -> list[str]:
    return [remark for remark in case.assumed if "not understood" in remark]


@given(
    wording=st.sampled_from(WORDINGS),
    case=st.sampled_from([str.lower, str.upper, str.title, str]),
    joint=st.sampled_from([" ", "_", "-", "  "]),
    around=st.sampled_from(["{}", " {} ", "({})", "{}."]),
)
@settings(max_examples=120, deadline=None)
def test_synonyms_read_alike(wording, case, joint, around):
    column, words, meaning = wording
    base, _ = COLUMNS[column]
    spelled = around.format(
        case(words.replace(" ", joint) if "," not in words and "/" not in words else words)
    )
    read = read_case(base | {column: spelled})
    assert unread(read) == []
    for name, value in meaning["layout"].items() if "layout" in meaning else ():
        assert read.layout.value(name) == value, spelled
    for name, value in meaning["job"].items() if "job" in meaning else ():
        assert read.job.value(name) == value, spelled


@pytest.mark.parametrize("column", COLUMNS)
def test_every_wording_has_its_meaning(column):
    base, synonyms = COLUMNS[column]
    for meaning, *wordings in synonyms:
        cases = [read_case(base | {column: words}) for words in wordings]
        for words, case in zip(wordings, cases, strict=True):
            assert unread(case) == [], words
            assert {
                name: case.layout.value(name) for name in meaning.get("layout", {})
            } == meaning.get("layout", {})
            assert {name: case.job.value(name) for name in meaning.get("job", {})} == meaning.get(
                "job", {}
            ), words


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("words", ["unknown", "n/a", "not reported", "-", "florp"])
def test_words_that_state_nothing_leave_the_setting_open(column, words):
    base, _ = COLUMNS[column]
    case, empty = read_case(base | {column: words}), read_case(base | {column: None})
    assert (case.layout, case.job, case.stated) == (empty.layout, empty.job, empty.stated)
    assert unread(case) == ([f"{column} 'florp' not understood"] if words == "florp" else [])


@pytest.mark.parametrize(
    ("column", "words", "without"),
    [
        ("recompute", "full, no offload", "full"),
        ("recompute", "full; offload=False", "full"),
        ("sharding", "ZeRO-3 without CPU offload", "ZeRO-3"),
        ("sharding", "DDP, distributed optimizer off", "DDP"),
        ("dtype", "bf16, no fp8", "bf16"),
    ],
)
def test_what_is_negated_is_not_read_as_said(column, words, without):
    base, _ = COLUMNS[column]
    case = read_case(base | {column: words})
    plain = read_case(base | {column: without})
    assert (case.layout, case.job, unread(case)) == (plain.layout, plain.job, [])


def test_words_for_chunks_fill_the_columns_that_numbers_win_over():
    counted = PIPELINE | {"micro_batch": None, "schedule": "GPipe (8 chunks)"}
    assert with_plain_columns(counted)["num_microbatches"] == 8
    assert read_case(counted).layout.micro_batch == 2  # 32 sequences / 2 replicas / 8 micro-batches
    contradicted = read_case(PIPELINE | {"vpp": 2, "schedule": "interleaved (v=4)"})
    assert contradicted.layout.vpp == 2
    assert "vpp=2 and schedule=interleaved (v=4)" in contradicted.contradictions
    assert "schedule" in read_case(PIPELINE | {"schedule": "zero bubble"}).assumed
    assert (
        "schedule 'chunks' not understood"
        in read_case(PIPELINE | {"schedule": "ZB-V, 4 chunks"}).assumed
    )


@pytest.mark.parametrize(
    ("stage", "words"), [(1, "DDP"), (1, "DDP + distributed optimizer"), (3, "FSDP"), (0, "DDP")]
)
def test_a_sharded_optimizer_beside_data_parallelism_is_no_contradiction(stage, words):
    assert read_case(REPLICAS | {"zero_stage": stage, "sharding": words}).contradictions == ()
    assert read_case(REPLICAS | {"zero_stage": 3, "sharding": "DDP"}).contradictions


@pytest.mark.parametrize(
    ("name", "stated", "computed"),
    [
        ("A100", "fp8", "bf16"),
        ("V100", "bf16", "fp16"),
        ("TPU-v6e", "fp8", "bf16"),
        ("H100", "nvfp4", "fp8"),
    ],
)
def test_a_type_without_units_is_a_contradiction_and_runs_as_the_next_wider(name, stated, computed):
    row = ROW | {"device": name, "intra_link": None, "inter_link": None, "dtype": stated}
    case = read_case(row)
    assert case.job.dtype == computed
    assert any(f"and {device(name).name} without" in sentence for sentence in case.contradictions)
    assert not read_case(row | {"dtype": computed}).contradictions
    assert read_case(row | {"dtype": None}).job.dtype == device(name).usual_dtype


def test_tf32_on_a_device_without_it_is_fp32():
    case = read_case(
        ROW | {"device": "V100", "intra_link": None, "inter_link": None, "dtype": "tf32"}
    )
    assert (case.job.dtype, case.contradictions) == ("fp32", ())


@pytest.mark.parametrize(
    "words", ["ZB1P", "zb_h1", "1F1B interleaved", "AFAB", "F-then-B", "ScheduleInterleaved1F1B"]
)
def test_layouts_and_runs_to_fit_know_a_schedule_by_the_same_names(words):
    registered = schedule_name(words)
    table = PIPELINE | {
        "schedule": words,
        "vpp": 2 if registered == "interleaved" else None,
        "measured_iter_time_s": 1.0,
    }
    (run,), _ = read_runs(pd.DataFrame([table]))
    chunks = ",vpp=2" if registered == "interleaved" else ""
    problem, text = problem_and_layout(
        model="llama3-8b",
        cluster="dgx-h100",
        layout=f"pp=4,dp=2,schedule={words}{chunks}",
        global_batch=32,
    )
    layout, _ = layout_of(problem, text)
    assert layout.schedule == run.layout.schedule == registered
    with pytest.raises(PerfModelError):
        layout_of(problem, "pp=4,dp=2,schedule=florp")
