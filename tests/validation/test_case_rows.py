"""What a row of published runs says is what is predicted; what it leaves open is named."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from mutations import VALUES, mutations, refusal
from published_rows import KORTHIKANTI_22B

from perfmodel import catalog
from perfmodel.catalog import cluster_for
from perfmodel.errors import PerfModelError
from perfmodel.spec import Transformer
from perfmodel.validation import read_case, read_runs, validate_cases
from perfmodel.validation.rows import open_shapes, read_rows, rows_of, with_heads
from perfmodel.workload import parameter_count

ROW = KORTHIKANTI_22B | {
    "source": "a table",
    "framework": None,
    "family": "llama",
    "model": "m",
    "device": "H100-SXM5-80GB",
    "tp": 2,
    "dp": 4,
    "recompute": "none",
    "params_b": None,
    "global_batch": 32,
    "num_microbatches": 2,
    "kv_heads": 8,
    "dtype": "bf16",
}
MOE = ROW | {
    "family": "moe",
    "n_experts": 8,
    "top_k": 2,
    "ffn_hidden": 4096,
    "ep": 4,
    "sequence_parallel": 1,
}
V3 = ROW | {
    "model": "deepseekv3",
    "family": "moe",
    "tp": 1,
    "dp": 8,
    "ep": 8,
    "layers": None,
    "hidden": None,
    "heads": None,
    "kv_heads": None,
    "ffn_hidden": None,
    "vocab": None,
    "params_b": None,
}


@pytest.mark.parametrize(
    "words",
    [
        "fp8",
        "FP8",
        "float8",
        "float8-rowwise",
        "float8_tensorwise",
        "mxfp8",
        "fp8-mx",
        "fp8-cs",
        "FP8 delayed hybrid",
        "fp8 delayed (attention fp8)",
        "fp8 (round default, not in the log)",
        "e4m3",
        "fp8 current scaling",
        "bf16+fp8",
    ],
)
@pytest.mark.parametrize("column", ["dtype", "dtype_recipe"])
def test_eight_bit_recipes_are_fp8(words, column):
    case = read_case(ROW | {"dtype": None} | {column: words})
    assert case.job.dtype == "fp8"
    assert "dtype" not in case.assumed


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("fp8 rowwise", "rowwise"),
        ("float8-rowwise", "rowwise"),
        ("rowwise_with_gw_hp", "rowwise_with_gw_hp"),
        ("fp8 rowwise_with_gw_hp, bf16 all-gather", "rowwise_with_gw_hp"),
    ],
)
def test_recipes_per_row_say_what_weight_gradients_are_of(words, recipe):
    assert read_case(ROW | {"dtype": "fp8", "dtype_recipe": words}).job.narrow.fp8_recipe == recipe


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("bf16 (pure bf16 assumed)", "bf16"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("fp32", "fp32"),
        ("tf32", "tf32"),
    ],
)
def test_other_words_for_element_types(words, dtype):
    assert read_case(ROW | {"dtype": words}).job.dtype == dtype


def test_an_empty_micro_batch_follows_or_is_assumed_and_said(tmp_path):
    follows = read_case(ROW | {"micro_batch": None})
    assert (follows.layout.micro_batch, follows.assumed) == (4, ())
    assumed = read_case(ROW | {"micro_batch": None, "num_microbatches": None})
    assert (assumed.layout.micro_batch, assumed.assumed) == (1, ("micro_batch",))
    counted = read_case(ROW | {"micro_batch": None, "global_batch": None})
    assert (counted.layout.micro_batch, counted.job.global_batch, counted.assumed) == (
        1,
        8,
        ("micro_batch",),
    )
    path = tmp_path / "runs.csv"
    pd.DataFrame(
        [ROW, ROW | {"case_id": "open", "micro_batch": None, "num_microbatches": None}]
    ).to_csv(path)
    report = validate_cases([path], out=tmp_path / "p.csv")
    assert (report["all"]["n"], report["skipped"], report["assumed"]["micro_batch"]) == (2, {}, 1)
    named = pd.read_csv(tmp_path / "p.csv")["assumed"].fillna("")
    assert ["micro_batch" in names for names in named] == [False, True]


@pytest.mark.parametrize("missing", ["tp", "pp", "dp"])
def test_one_open_degree_follows_from_the_devices(missing):
    assert read_case(ROW | {missing: None}).layout == read_case(ROW).layout


def test_an_open_batch_follows_from_the_throughput():
    row = ROW | {
        "global_batch": None,
        "measured_iter_time_s": 2.0,
        "measured_tokens_per_s_per_device": 4096.0,
    }
    assert read_case(row).job.global_batch == 32  # 4096 tokens/s x 2 s x 8 devices / 2048


def test_heads_are_those_of_the_table_s_other_rows_of_that_width_where_these_agree():
    sizes = ROW | {"model": "ours", "kv_heads": None}
    table = [
        sizes | {"heads": 32},
        sizes | {"heads": None},
        sizes | {"heads": None, "source": "another"},
    ]
    alone, filled, other = map(read_case, rows_of(with_heads(pd.DataFrame(table))))
    assert (alone.model.heads, filled.model.heads) == (32, 32)
    assert ("heads" in alone.assumed, "heads" in filled.assumed) == (False, True)
    assert other.model.heads == 48  # the nearest to 128 elements each
    split = [sizes | {"heads": 64}, sizes | {"heads": 96}, sizes | {"heads": None}]
    assert np.isnan(with_heads(pd.DataFrame(split))["heads"][2])


def test_experts_in_a_row_need_no_catalog_entry():
    model = read_case(MOE).model
    assert (model.experts.count, model.experts.topk, model.experts.ffn_hidden) == (8, 2, 4096)
    assert (model.layers, model.hidden, model.block.gated_ffn) == (48, 6144, True)
    dense_first = read_case(MOE | {"first_dense_layers": 2}).model
    assert dense_first.experts.first_dense_layers == 2


@pytest.mark.parametrize(
    ("flags", "dispatcher", "overlap"),
    [
        ("1F1B expert-communication overlap; HybridEP; CUDA graph", "hybridep", True),
        ("overlap_ep=0; deepep=1", "deepep", False),
        ("", "alltoall", False),
    ],
)
def test_dispatch_that_the_launch_tells_is_predicted(flags, dispatcher, overlap):
    case = read_case(MOE | {"framework": "megatron-bridge@2026", "launch_and_overlap": flags})
    assert (case.job.experts.expert_dispatcher, case.layout.overlap.ep_overlap) == (
        dispatcher,
        overlap,
    )


@pytest.mark.parametrize(
    ("flags", "graphs", "overlap"),
    [
        (None, "none", True),
        ("mcore_cuda_graph=0; layer_cuda_graph=0; lora_a2a=1", "none", True),
        ("tp_comm_overlap=1; layer_cuda_graph=1; lora_a2a=1", "layers", True),
        ("mcore_cuda_graph=1; layer_cuda_graph=0", "layers", True),
        ("ub_tp_comm_overlap=false", "none", False),
        ("tp_comm_overlap=True; mcore distributed optimizer", "none", True),
    ],
)
def test_switches_of_the_launch_are_read(flags, graphs, overlap):
    case = read_case(ROW | {"framework": "nemo@2024", "launch_and_overlap": flags})
    assert (case.job.kernels.cuda_graphs, case.layout.overlap.tp_overlap) == (graphs, overlap)


@pytest.mark.parametrize(
    ("framework", "recipe"),
    [
        ("nemo@2025", "current"),
        ("megatron-core@2025", "current"),
        ("megatron-bridge@2025", "current"),
        ("torchtitan@2025", "tensorwise"),
    ],
)
def test_tensorwise_scales_are_what_the_framework_calls_so(framework, recipe):
    for words in ("fp8 tensorwise", "fp8 tensorwise hybrid"):
        assert (
            read_case(
                ROW | {"framework": framework, "dtype": words, "dtype_recipe": words}
            ).job.narrow.fp8_recipe
            == recipe
        )


def test_the_operation_fuser_is_read_from_the_launch():
    for flags, fused in (
        (None, False),
        ("use_te_ops=0", False),
        ("use_te_ops=1; lora_a2a=1", True),
    ):
        case = read_case(ROW | {"framework": "nemo@2025", "launch_and_overlap": flags})
        assert case.job.kernels.operation_fuser == fused


def test_adapters_exchange_where_the_launch_says_so():
    row = ROW | {"framework": "nemo@2024", "model": "m-lora"}
    for flags, exchanges in ((None, False), ("lora_a2a=0", False), ("lora_a2a=1", True)):
        assert (
            read_case(row | {"launch_and_overlap": flags}).job.fine_tuning.adapter_all_to_all
            == exchanges
        )
    assert not read_case(
        ROW | {"launch_and_overlap": "lora_a2a=1"}
    ).job.fine_tuning.adapter_all_to_all


@pytest.mark.parametrize(
    ("sharding", "zero", "replicate"),
    [
        ("none", 0, 1),
        ("DeepSpeed ZeRO-1", 1, 1),
        ("ZeRO-1 over 4 ranks", 1, 4),
        ("ZeRO-1 over all ranks", 1, 1),
        ("FSDP SHARD_GRAD_OP", 2, 1),
        ("FSDP over 8 data ranks, replicated over the other 2", 3, 2),
        ("FSDP inside the slice (size 4), data parallel over 4 slice(s)", 3, 4),
        ("Megatron FSDP group 8", 3, 2),
        ("HSDP", 3, 2),
        ("FSDP 16", 3, 1),
        ("distributed optimizer (distributed fused Adam)", 1, 1),
    ],
)
def test_what_replicas_shard_and_over_how_many_of_them(sharding, zero, replicate):
    row = ROW | {
        "zero_stage": None,
        "tp": 1,
        "pp": 1,
        "dp": 16,
        "n_devices": 16,
        "sharding": sharding,
    }
    layout = read_case(row | {"global_batch": 32}).layout
    assert (layout.zero, layout.replicate) == (zero, replicate)
    stated = read_case(row | {"global_batch": 32, "zero_stage": 2}).layout
    assert (stated.zero, stated.replicate) == (2, replicate)


def test_deepspeed_is_the_framework_whose_zero_a_row_runs():
    row = ROW | {
        "framework": "nemo@2024",
        "sharding": "DeepSpeed ZeRO-3",
        "pp": 1,
        "zero_stage": None,
    }
    assert read_case(row | {"dp": 8 // ROW["tp"]}).framework.label == "deepspeed@2024"


def test_on_gaudi_megatron_deepspeed_is_habanas_and_nemo_is_deepspeed():
    row = ROW | {
        "framework": "megatron-deepspeed@2023",
        "device": "Gaudi2",
        "dtype": "bf16",
        "intra_link": "",
    }
    assert read_case(row).framework.label == "megatron-deepspeed-gaudi@2023"
    tuned = read_case(
        row
        | {"framework": "nemo@2024", "tp": 1, "pp": 1, "dp": ROW["n_devices"], "recompute": None}
        | {"zero_stage": None}
    )
    assert (tuned.framework.label, tuned.framework.host.execution) == (
        "deepspeed-gaudi@2024",
        "compiled",
    )
    assert (tuned.layout.zero, tuned.layout.recompute) == (3, "full")
    assert (
        read_case(row | {"device": "A100-SXM4-80GB"}).framework.label == "megatron-deepspeed@2023"
    )


def test_weights_in_16_bits_alone_have_their_states_so_too():
    for dtype in ("bf16", "fp16"):
        job = read_case(
            ROW | {"dtype": dtype, "dtype_recipe": f"{dtype} (pure {dtype} assumed)"}
        ).job
        assert (job.optimizer, job.gradients.grad_dtype) == ("adam16bit", dtype)
    assert read_case(ROW).job.optimizer == "adam"


def test_adapters_that_a_name_or_columns_tell():
    columns = {"job.frozen": "true", "job.adapter_rank": 8}
    said = (
        ({}, False, 0),
        ({"model": "m-LoRA"}, True, 16),
        (columns, True, 8),
        (columns | {"model": "m-lora"}, True, 8),
    )
    for cells, frozen, rank in said:
        case = read_case(ROW | cells)
        assert (case.job.fine_tuning.frozen, case.job.fine_tuning.adapter_rank) == (frozen, rank)
        assert ("adapter_rank" in case.assumed) == (rank == 16)


@pytest.mark.parametrize(
    ("change", "dense", "assumed"),
    [
        ({}, 3, ()),
        ({"layers": 4}, 1, ("dense layers",)),
        ({"layers": 1}, 0, ("dense layers",)),
        ({"layers": 4, "first_dense_layers": 1}, 1, ()),
        ({"layers": 4, "model.experts.first_dense_layers": 0}, 0, ()),
        ({"layers": 8, "first_dense_layers": 2}, 2, ()),
    ],
)
def test_a_cut_of_a_model_does_not_keep_all_its_dense_layers(change, dense, assumed):
    case = read_case(V3 | change)
    assert case.model.layers == change.get("layers", 61)
    assert case.model.experts.first_dense_layers == dense
    assert case.assumed == assumed


def test_a_name_may_end_with_the_size_of_its_model():
    named = {"family": "moe-mla", "first_dense_layers": 3}
    assert read_case(V3 | named | {"model": "deepseek-v3-671B"}).model == catalog.model(
        "deepseek-v3"
    )
    # Another size is another model.
    with pytest.raises(PerfModelError):
        read_case(V3 | named | {"model": "deepseek-v3-16B"})


@pytest.mark.parametrize(
    "size",
    [
        {"hidden": 4096, "heads": 32},
        {"n_experts": 64},
        {"top_k": 4},
        {"vocab": 32000},
        {"layers": 12},
        {"ffn_hidden": 1024},
    ],
)
@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseekv2", "grok1-314B", "gpt oss 120b"]
)
def test_a_stated_size_wins_over_the_name(name, size):
    row = V3 | {"model": name, "ep": 1} | size
    model = read_case(row).model
    stated = {name: getattr(model, name) for name in ("hidden", "heads", "vocab", "layers")}
    stated |= {
        "n_experts": model.experts.count,
        "top_k": model.experts.topk,
        "ffn_hidden": model.experts.ffn_hidden,
    }
    assert {key: stated[key] for key in size} == size


def test_a_model_of_two_stacks_is_found_by_its_shape_and_has_its_recipe_s_lengths():
    row = ROW | {
        "model.decoder_seq_len": 128,
        "model": "t5-3b",
        "family": "t5",
        "layers": 24,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 32,
        "ffn_hidden": 5120,
        "seq_len": 512,
        "vocab": None,
    }
    model = read_case(row).model
    assert (model.hidden, model.ffn_hidden, model.head_dim, model.block.gated_ffn) == (
        2048,
        5120,
        64,
        True,
    )
    assert model.decoder_seq_len == 128


@pytest.mark.parametrize(
    ("cells", "gbit", "latency_us"),
    [
        (
            {
                "inter_link": "Ethernet",
                "inter_link_as_stated": "Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet NIC",
            },
            400,
            5,
        ),
        (
            {
                "inter_link": "Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Ethernet NIC"
            },
            400,
            5,
        ),
        (
            {
                "inter_link": "RoCE",
                "inter_link_as_stated": "BF3 200Gbps for NS and 2xBF3 400Gbps for EW",
            },
            100,
            6,
        ),
        ({"inter_link": "InfiniBand 8x50 GB/s"}, 400, 5),
        ({"inter_link": "EFA v2 3200"}, 400, 15),
        ({"nics_per_node": 4, "nic_gbit_per_s": 400, "inter_link": "8x 200 Gb/s RoCE"}, 200, 6),
        ({"inter_link": "InfiniBand", "nics_per_node": 4, "nic_gbit_per_s": 200}, 100, 5),
        (
            {
                "inter_link": "InfiniBand NDR",
                "nics_per_node": 2,
                "nic_gbit_per_s": 400,
                "inter_link_as_stated": "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s",
            },
            400,
            5,
        ),
        (
            {
                "inter_link": "InfiniBand",
                "nic_gbit_per_s": 100,
                "inter_link_as_stated": "100GbE InfiniBand",
            },
            400,
            5,
        ),
        ({"inter_link": "Ethernet", "inter_link_as_stated": "3x 100 GbE per card"}, 300, 25),
        ({"inter_link": "8x HDR 200 Gbps InfiniBand per node"}, 200, 5),
        ({"inter_link": None}, 400, 5),
    ],
)
def test_the_network_of_a_row(cells, gbit, latency_us):
    level = read_case(ROW | cells).cluster.levels[-1]
    assert level.bandwidth_bytes_per_s == pytest.approx(gbit * 1e9 / 8)
    assert level.latency_s == pytest.approx(latency_us * 1e-6)


SIZED_MODELS = [
    model
    for model in catalog.every_model()
    if isinstance(model, Transformer)
    and not model.hybrid.mixers
    # Rows of the plain families have the experts that their columns tell, which say nothing of
    # shared ones or of layers without.
    and (model.experts is None or not model.name.startswith(("gpt-", "llama-")))
    and model.inputs.patches is None
]


@pytest.mark.parametrize("model", SIZED_MODELS, ids=lambda model: model.name)
def test_a_family_of_the_catalog_in_other_sizes_is_like_its_models(model: Transformer) -> None:
    """A model that nobody here has seen, of a family of the catalog, has the parameters that the
    table states."""
    other = replace(model, vocab=model.vocab + 1024, name="m")
    sizes = {
        name: getattr(other, name)
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "head_dim", "vocab")
    }
    if model.experts:
        sizes["ffn_hidden"] = model.experts.ffn_hidden
        sizes |= {"n_experts": model.experts.count, "top_k": model.experts.topk}
    billions = parameter_count(other) / 1e9
    row = ROW | {"family": model.name.split("-")[0], "params_b": billions, "ep": 1} | sizes
    read = read_case(row | {"tp": 1, "dp": 8, "seq_len": 512}).model
    assert parameter_count(read) == pytest.approx(parameter_count(other), rel=0.02)


def test_a_family_that_no_model_of_the_catalog_has_is_refused() -> None:
    with pytest.raises(PerfModelError, match="family soup without a catalog entry"):
        read_case(ROW | {"family": "soup"})


def test_what_cannot_be_laid_out_keeps_its_head_and_loses_its_figures(tmp_path):
    path = tmp_path / "runs.csv"
    wrong = [{"device": "Abacus"}, {"tp": 64, "n_devices": 256, "heads": 60}, {"ep": 3}, {"ep": 5}]
    pd.DataFrame([ROW | change | {"case_id": i} for i, change in enumerate(wrong)]).to_csv(path)
    skipped = validate_cases([path])["skipped"]
    assert skipped["cannot be laid out: unknown device 'Abacus'"] == 1
    assert skipped["cannot be laid out: layout: ep=N must divide dp*cp=N"] == 2
    assert sum(skipped.values()) == 4
    assert all(";" not in reason for reason in skipped)


def test_runs_of_doubtful_status_are_predicted_but_not_compared(tmp_path):
    path = tmp_path / "runs.csv"
    rows = [
        {"case_id": s, "status": s, "measured_peak_memory_gb": 50}
        for s in ("ok", "duplicate", "suspect", "oom")
    ]
    pd.DataFrame([ROW | row for row in rows]).to_csv(path)
    report = validate_cases([path], out=tmp_path / "p.csv")
    assert report["all"]["n"] == 1
    assert pd.read_csv(tmp_path / "p.csv")["predicted_iter_time_s"].notna().all()
    assert report["skipped"] == {
        f"predicted, but not compared: the run's status is {s}": 1
        for s in ("duplicate", "suspect", "oom")
    }


def test_only_sound_runs_with_a_time_are_fitted_to():
    """`read_runs` drops a run of doubtful status and one without a step time, each for that
    alone."""
    rows = []
    for status, seconds in product(("ok", None, "oom", "suspect"), (1.5, None)):
        name = f"{status} {seconds}"
        rows.append(ROW | {"case_id": name, "status": status, "measured_iter_time_s": seconds})
    runs, skipped = read_runs(pd.DataFrame(rows))
    assert [run.name for run in runs] == ["ok 1.5", "None 1.5"]
    assert skipped == {"no step time was measured": 6}


def test_a_mutated_row_is_a_sound_case_or_refused():
    for what, row in mutations(MOE, tuple(v for v in VALUES if not isinstance(v, list | dict))):
        cells = {k: None if isinstance(v, float) and v != v else v for k, v in row.items()}
        try:
            case = read_case(cells)
        except PerfModelError as error:
            refusal(error, what)
            continue
        assert case.layout.devices == 8, what
        assert case.job.num_microbatches(case.layout) >= 1, what
        assert case.cluster.capacity >= case.layout.devices, what


def test_every_device_and_network_of_the_published_runs_is_known(data_dir):
    for path in sorted((data_dir / "published").glob("*.csv")):
        table = pd.read_csv(path, low_memory=False)
        if "inter_link" not in table:
            continue
        columns = [c for c in ("inter_link", "inter_link_as_stated") if c in table]
        for name in table["device"].dropna().unique():
            assert catalog.device(name).dtypes, name
        for column in columns:
            for words in table[column].dropna().unique():
                assert cluster_for("H100-SXM5-80GB", 8, "", words).levels, words


SHAPELESS = ROW | dict.fromkeys(
    ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "params_b")
)


@pytest.mark.parametrize("family", ["gpt", "llama", "dense"])
@pytest.mark.parametrize("name", ["ours-300M", "ours 1.3B", "gemma9-31b", "ours-175B", "ours-1T"])
def test_a_shape_that_only_family_and_parameters_tell_has_these_parameters_and_is_said(
    family, name
):
    row = SHAPELESS | {"model": name, "family": family}
    case = read_case(row)
    assert "shape" in case.assumed
    billions = (
        float(re.split(r"[- ]", name)[-1][:-1]) * {"m": 1e-3, "b": 1, "t": 1e3}[name[-1].lower()]
    )
    shapes = open_shapes(row)
    assert sum(probability for _, probability in shapes) == 1
    assert len({cells["hidden"] for cells, _ in shapes}) == 3
    for cells, _ in shapes:
        completed = read_case(row | cells)
        assert completed.contradictions == ()
        assert parameter_count(completed.model) == pytest.approx(billions * 1e9, rel=0.1)
    by_column = read_case(row | {"model": "ours", "params_b": billions})
    assert (by_column.model.layers, by_column.model.hidden) == (
        case.model.layers,
        case.model.hidden,
    )


@pytest.mark.parametrize(
    "cells",
    [
        {"model": "ours"},
        {"model": "ours-7b-of-13b"},
        {"family": "moe", "model": "ours-30B-A3B"},
        {"family": "unet"},
    ],
)
def test_a_shape_that_nothing_tells_is_refused(cells):
    with pytest.raises(PerfModelError, match="shape is not stated"):
        read_case(SHAPELESS | {"model": "ours", "family": "gpt"} | cells)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("meta-llama/Meta-Llama-3-8B", 32),
        ("Qwen/Qwen3-30B-A3B", 48),
        ("mixtral-8x7b", 32),
        ("llama2-70b", 80),
    ],
)
def test_a_model_of_the_catalog_needs_no_columns_of_its_shape(name, layers):
    model = read_case(SHAPELESS | {"model": name, "family": None}).model
    assert model.layers == layers
    assert open_shapes(SHAPELESS | {"model": name, "family": "llama"}) == []


def test_a_step_time_that_is_not_stated_follows_from_the_throughput(tmp_path):
    rates = ROW | {"measured_iter_time_s": None, "measured_tokens_per_s_per_device": 4096.0}
    rows = [
        rates,
        rates | {"global_batch": None, "micro_batch": 4},
        rates | {"global_batch": None, "num_microbatches": None},
        rates | {"measured_tokens_per_s_per_device": 0},
        rates | {"measured_iter_time_s": 3.0},
    ]
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(path)
    # 32 sequences of 2048 tokens on 8 devices.
    np.testing.assert_allclose(
        read_rows(path)["measured_iter_time_s"].astype(float), [2, 2, np.nan, np.nan, 3]
    )
