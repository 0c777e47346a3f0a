"""Published runs: rows become cases, what cannot is named, figures are right."""

import json

import numpy as np
import pandas as pd
import pytest
from published_rows import KORTHIKANTI_22B

from perfmodel.cli import main
from perfmodel.errors import TableError
from perfmodel.validation import errors, predict_run, read_case, validate_cases
from perfmodel.validation.rows import Unusable

SELECTIVE = KORTHIKANTI_22B | {
    "case_id": "k22s",
    "recompute": "selective",
    "sequence_parallel": 1,
    "measured_iter_time_s": 1.10,
}
KORTHIKANTI_175B = KORTHIKANTI_22B | {
    "case_id": "k175",
    "model": "gpt-175B",
    "params_b": 174.6,
    "layers": 96,
    "hidden": 12288,
    "heads": 96,
    "ffn_hidden": 49152,
    "n_devices": 64,
    "pp": 8,
    "vpp": 3,
    "schedule": "interleaved-1f1b",
    "micro_batch": 1,
    "num_microbatches": 64,
    "global_batch": 64,
    "measured_iter_time_s": 18.13,
}


def _file(tmp_path, *rows):
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_published_steps_are_within_ten_per_cent(tmp_path):
    report = validate_cases(
        [_file(tmp_path, KORTHIKANTI_22B, SELECTIVE, KORTHIKANTI_175B)], out=tmp_path / "p.csv"
    )
    assert report["all"]["n"] == 3
    assert report["all"]["mean_ape"] < 0.10
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert predicted["case_id"].tolist() == ["k22", "k22s", "k175"]
    assert (predicted["lo_s"] < predicted["predicted_iter_time_s"]).all()
    assert predicted["skipped_reason"].isna().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tp": None, "dp": None, "n_devices": None}, "tp and dp are not stated"),
        (
            {"family": "hybrid mamba2 + moe", "model": "x"},
            "family hybrid mamba2 + moe without a catalog entry",
        ),
        ({"family": "moe", "model": "x"}, "n_experts is not stated"),
        ({"family": "moe", "model": "x", "n_experts": 8}, "top_k is not stated"),
        ({"family": "moe", "n_experts": 8, "top_k": 2, "etp": 1}, "need sequence_parallel=true"),
        (
            {"n_devices": 16, "inter_link": "none (one node)", "dp": 2, "global_batch": 8},
            "has 8 (all that its outermost level",
        ),
        (
            {"hidden": None, "heads": None, "layers": None, "model": "nobody-9B"},
            "not in the catalog",
        ),
        ({"tp": 3}, "do not multiply"),
        ({"device": "Abacus"}, "Abacus"),
        ({"tp": "many"}, "not a number"),
        ({"heads": 60}, "heads"),
    ],
)
def test_a_row_that_cannot_run_is_named_not_dropped(tmp_path, change, reason):
    report = validate_cases(
        [_file(tmp_path, KORTHIKANTI_22B, KORTHIKANTI_22B | change)], out=tmp_path / "p.csv"
    )
    assert report["all"]["n"] == 1
    assert sum(report["skipped"].values()) == 1
    assert reason in str(pd.read_csv(tmp_path / "p.csv")["skipped_reason"][1])


def test_what_a_row_leaves_open_is_predicted_between_its_plausible_values(tmp_path):
    stated = SELECTIVE | {
        "global_batch": 16,
        "num_microbatches": None,
        "framework": "megatron-lm@2022",
    }
    open_row = stated | {"case_id": "open", "micro_batch": None}
    each = [stated | {"case_id": str(size), "micro_batch": size} for size in (1, 2, 4, 8)]
    report = validate_cases([_file(tmp_path, open_row, *each)], out=tmp_path / "p.csv")
    predicted = pd.read_csv(tmp_path / "p.csv").set_index("case_id")
    likely = predicted.loc[["1", "2", "4", "8"]]
    found = predicted.loc["open"]
    times_s = likely["predicted_iter_time_s"]
    assert times_s.min() < found["predicted_iter_time_s"] < times_s.max()
    assert found["hi_s"] / found["lo_s"] > (likely["hi_s"] / likely["lo_s"]).max()
    # Every completion of the open row has a wider spread than the row that states it: more of it is
    # unstated.
    assert found["lo_s"] > 0.95 * likely["lo_s"].min()
    assert found["hi_s"] < 1.05 * likely["hi_s"].max()
    assert found["unstated_share"] == pytest.approx(likely["unstated_share"].iloc[0] + 0.2)
    assert found["assumed"].startswith("micro_batch (")
    assert report["assumed"]["micro_batch"] == 1


def test_degrees_that_nobody_stated_are_integrated_over(tmp_path):
    row = SELECTIVE | {
        "tp": None,
        "pp": None,
        "dp": None,
        "cp": None,
        "num_microbatches": None,
        "global_batch": 8,
    }
    report = validate_cases(
        [_file(tmp_path, row, SELECTIVE | {"tp": 4}, SELECTIVE)], out=tmp_path / "p.csv"
    )
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert report["assumed"]["degrees"] == 1
    assert report["assumed"]["dp"] == 1
    # two of three degrees; one follows
    assert predicted["unstated_share"][0] == pytest.approx(2 / 5)
    apart = predicted["hi_s"] / predicted["lo_s"]
    assert apart[0] > apart[2]
    assert predicted["completions"][0] > 1
    assert predicted["open_deviation"][0] > predicted["open_deviation"][1]


@pytest.mark.parametrize(
    ("cells", "etp"),
    [
        ({"tp": 2, "dp": 4, "ep": 4}, None),  # as the framework has it: tp
        ({"tp": 2, "dp": 4, "ep": 8}, 1),  # experts find their ranks in no other way
        ({"tp": 4, "dp": 2, "ep": 4}, 2),
        ({"tp": 4, "dp": 2, "ep": 2, "etp": 1}, 1),
        ({"tp": 4, "dp": 2, "ep": 2, "etp": 4}, None),
    ],
)
def test_ranks_of_experts_are_read_or_follow(cells, etp):
    row = (
        SELECTIVE
        | {
            "family": "moe",
            "n_experts": 8,
            "top_k": 2,
            "model": "x",
            "global_batch": 8,
            "etp": None,
        }
        | cells
    )
    assert read_case(row | {"num_microbatches": None}).layout.etp == etp


@pytest.mark.parametrize(
    ("recompute", "detail", "mode"),
    [
        ("selective", "selective core_attn", "selective"),
        ("selective", "selective core_attn+layernorm", "selective"),
        ("selective", "selective moe_act", "selective"),
        (None, "remat_policy full", "full"),
        (None, "remat_policy save_dot_except_mlpwi", "selective"),
        ("full", "full per block", "full"),
        (None, "remat_policy minimal", "selective"),
        ("minimal_flash", None, "selective"),
        ("minimal_offloaded", None, "selective"),
        (None, "remat_policy none", "none"),
        ("none", "none", "none"),
    ],
)
def test_details_of_recomputation_tell_which_mode_is_nearest(recompute, detail, mode):
    row = KORTHIKANTI_22B | {"recompute": recompute, "recompute_detail": detail}
    assert read_case(row).layout.recompute == mode


def test_details_of_recomputation_name_what_is_repeated():
    row = KORTHIKANTI_22B | {
        "recompute": "selective",
        "recompute_detail": "selective moe_act+core_attn",
    }
    assert set(read_case(row).job.activations.recompute_modules) == {"moe_act", "core_attn"}
    assert read_case(KORTHIKANTI_22B).job.activations.recompute_modules == ("core_attn",)


@pytest.mark.parametrize(
    ("policy", "repeats_attention"),
    [
        ("minimal", True),
        ("minimal_offloaded", True),
        ("minimal_flash", False),
        ("minimal_with_context", False),
    ],
)
def test_policies_that_keep_products_repeat_what_is_between_them(
    policy: str, repeats_attention: bool
) -> None:
    modules = read_case(KORTHIKANTI_22B | {"recompute": policy}).job.activations.recompute_modules
    assert {"layernorm", "mlp_act"} <= set(modules)
    assert ("core_attn" in modules) == repeats_attention


def test_a_policy_that_keeps_products_on_the_host_copies_all_layers_but_the_last() -> None:
    case = read_case(
        KORTHIKANTI_22B | {"recompute": "minimal_offloaded", "framework": "maxtext@2024"}
    )
    assert (case.layout.recompute, case.layout.offload_layers) == (
        "selective",
        case.model.layers - 1,
    )


@pytest.mark.parametrize("policy", ["save_dot_except_mlpwi", "save_dot_except_logits_ffn1"])
def test_a_policy_that_keeps_all_but_the_first_products_of_a_feed_forward_repeats_that(
    policy: str,
) -> None:
    case = read_case(
        KORTHIKANTI_22B | {"recompute": None, "recompute_detail": f"remat_policy {policy}"}
    )
    assert case.layout.recompute_full_layers is None
    assert set(case.job.activations.recompute_modules) == {"core_attn", "layernorm", "mlp"}


def test_a_run_that_cannot_have_fitted_otherwise_recomputed():
    row = KORTHIKANTI_22B | {
        "recompute": None,
        "micro_batch": 12,
        "global_batch": 12,
        "num_microbatches": 1,
    }
    assert not read_case(row).recompute_stated
    assert read_case(KORTHIKANTI_22B).recompute_stated
    run = predict_run(row)
    recomputing = [
        bool(case.layout.recompute_full_layers) or case.layout.recompute == "full"
        for case in run.completions
    ]
    assert run.weights @ np.array(recomputing, float) > 0.9
    assert any(text.startswith("recompute") for text in run.assumed)
    assert run.prediction.memory_needed_bytes <= run.prediction.memory_capacity_bytes
    # What nobody knew before it ran is another matter: much of what it may have been would not have
    # fitted, so that the first tries may all fail.
    assert run.fits_probability < 0.8
    # A run that ran out of memory is not known to have fitted.
    failed = predict_run(row | {"status": "oom"})
    assert failed.fits_probability == pytest.approx(run.fits_probability)
    assert failed.step_time_s < run.step_time_s


@pytest.mark.parametrize(
    ("dtype", "recipe"),
    [("fp8", "fp8 delayed (attention fp8)"), ("nvfp4", "nvfp4 (attention fp8)")],
)
def test_a_run_that_told_its_recompute_keeps_activations_in_8_bits_where_it_would_hardly_fit(
    dtype, recipe
):
    """Whatever narrow type products have: the activation casts what it saves."""
    row = {
        "case_id": "x",
        "source": "s",
        "model": "llama2-70B-lora",
        "family": "llama",
        "device": "B200-SXM-180GB",
        "n_devices": 8,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "dp": 8,
        "micro_batch": 1,
        "global_batch": 8,
        "seq_len": 8192,
        "dtype": dtype,
        "dtype_recipe": recipe,
        "recompute": "none",
        "framework": "nemo@2025",
        "job.frozen": 1,
        "job.adapter_rank": 16,
        "sequence_parallel": 0,
        "zero_stage": 1,
        "layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn_hidden": 28672,
        "vocab": 32000,
    }
    assert read_case(row).recompute_stated
    run = predict_run(row)
    in_8_bits = np.array([case.job.narrow.fp8_activation_inputs for case in run.completions], float)
    assert run.weights @ in_8_bits > 0.5  # more than before it had to fit
    assert all(case.layout.recompute == "none" for case in run.completions)
    assert run.prediction.memory_needed_bytes <= 1.05 * run.prediction.memory_capacity_bytes
    of_parts = predict_run(row | {"dp": 2, "cp": 4, "global_batch": 2})
    in_8_bits = np.array(
        [case.job.narrow.fp8_activation_inputs for case in of_parts.completions], float
    )
    assert of_parts.weights @ in_8_bits == pytest.approx(0.5, abs=0.1)  # it fits either way
    unable = predict_run(row | {"framework": "megatron-lm@2023"})
    assert not any(case.job.narrow.fp8_activation_inputs for case in unable.completions)


def test_missing_cells_are_filled_from_what_is_known():
    case = read_case(
        {k: v for k, v in KORTHIKANTI_22B.items() if k not in ("vocab", "ffn_hidden", "vpp")}
    )
    assert case.model.ffn_hidden == 4 * 6144
    assert case.layout.vpp == 1
    assert case.job.kernels.flash_attention is False
    assert case.layout.overlap.overlap_grad_reduce is False


def test_layers_follow_from_the_parameter_count():
    # BLOOM tuning: 200B of hidden 14400, layers not stated, a multiple of the pipeline depth
    row = {k: v for k, v in KORTHIKANTI_22B.items() if k not in ("layers", "heads", "ffn_hidden")}
    row |= {
        "hidden": 14400,
        "params_b": 200,
        "pp": 4,
        "n_devices": 32,
        "model": "x",
        "vocab": 250880,
    }
    case = read_case(row)
    assert case.model.layers == 80
    assert case.model.heads % 8 == 0
    with pytest.raises(Unusable, match="not stated"):
        read_case({k: v for k, v in row.items() if k != "params_b"})


def test_files_of_another_kind_are_named(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("id,size\n1,2\n")
    report = validate_cases([_file(tmp_path, KORTHIKANTI_22B), other])
    assert list(report["skipped_files"]) == [str(other)]
    assert report["skipped_files"][str(other)].startswith(
        "not a table of runs (no columns model, cluster or device, "
    )
    with pytest.raises(TableError, match="not a table of runs"):
        validate_cases([other])


def test_error_figures():
    figures = errors([1.0, 2.0, 4.0], [1.1, 1.8, 4.0], [0.9, 1.9, 3.0], [1.2, 2.2, 5.0])
    assert figures["n"] == 3
    assert figures["mean_ape"] == pytest.approx(0.2 / 3)
    assert figures["bias"] == pytest.approx(0, abs=1e-12)
    assert figures["spearman"] == pytest.approx(1)
    assert figures["coverage_90"] == 1.0
    assert errors([], [])["mean_ape"] is None


def test_command_line_prints_the_contract(capsys, tmp_path):
    path = _file(tmp_path, KORTHIKANTI_22B, SELECTIVE)
    assert main(["validate", "cases", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {"n", "median_ape", "mean_ape", "p90_ape", "spearman", "coverage_90", "memory"}
    assert set(report["all"]) >= keys
    assert set(report["sources"]["Korthikanti et al. 2022 Table 5"]) >= keys
    assert np.isfinite(report["all"]["mean_ape"])


@pytest.mark.slow
def test_all_published_rows_are_predicted_or_named(data_dir, tmp_path):
    """No row of any public table may crash, and the two Megatron tables stay within 10 %."""
    files = [
        f
        for f in sorted((data_dir / "published").glob("*.csv"))
        if f.stem not in ("vtrain", "ultrascale_playbook")
    ]
    report = validate_cases(files, out=tmp_path / "p.csv")
    rows = pd.concat(
        [pd.read_csv(f, low_memory=False) for f in files if str(f) not in report["skipped_files"]]
    )
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert len(predicted) == len(rows)
    assert (predicted["predicted_iter_time_s"].notna() ^ predicted["skipped_reason"].notna()).all()
    megatron = [
        report["sources"][name]
        for name in ("Korthikanti et al. 2022 Table 5", "Megatron-LM SC21 Table 1")
    ]
    weighted = sum(f["mean_ape"] * f["n"] for f in megatron) / sum(f["n"] for f in megatron)
    assert weighted <= 0.10


def test_selective_checkpointing_of_whole_layers_is_read_from_the_flop_ratio():
    row = KORTHIKANTI_22B | {
        "framework": "fsdp-compile@2024",
        "recompute": "selective",
        "zero_stage": 3,
        "tp": 1,
        "dp": 8,
        "global_batch": 32,
        "measured_mfu": 0.60,
        "measured_hfu": 0.70,
        "flash_attention": 1,
    }
    layout = read_case(row).layout
    # half of 48: 1 + f / 3 = 7 / 6
    assert (layout.recompute, layout.recompute_full_layers) == (
        "none",
        (24,),
    )
    assert read_case(row | {"measured_hfu": None}).layout.recompute == "selective"
