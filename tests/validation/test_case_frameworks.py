"""A run is predicted as anybody would predict it who says what its row says and names its
framework."""

from typing import Any

import pandas as pd
import pytest
from published_rows import KORTHIKANTI_22B

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site
from perfmodel.validation import (
    counter_of,
    predict_cases,
    predict_run,
    read_case,
    unstated_share,
    validate_cases,
)
from perfmodel.validation.rows import framework_name, layout_switches, read_rows, recipe_of, rows_of

GPT = KORTHIKANTI_22B | {"flash_attention": None, "notes": None, "memory_kind": None}
TABLE = [
    GPT | {"case_id": name, "framework": name} | more
    for name, more in {
        "megatron-lm@2021": {},
        "megatron-core@2025": {
            "dtype": "bf16",
            "zero_stage": 1,
            "tp": 2,
            "dp": 4,
            "global_batch": 16,
        },
        "nemo@2025": {
            "dtype": "bf16",
            "zero_stage": None,
            "sequence_parallel": None,
            "tp": 4,
            "dp": 2,
            "global_batch": 8,
        },
        "nanotron@2024": {
            "dtype": "bf16",
            "pp": 4,
            "tp": 2,
            "num_microbatches": 8,
            "global_batch": 32,
            "zero_stage": 1,
            "recompute": None,
        },
        "maxtext@2024": {
            "dtype": "bf16",
            "tp": 1,
            "dp": 8,
            "zero_stage": None,
            "recompute": None,
            "global_batch": 32,
        },
        "generic": {},
        "": {"model": "ours", "vocab": None},
        "somebody@2024": {"seq_len": 128, "tokenizer_vocab": 50257, "model": "ours", "vocab": None},
        "nanotron@2001": {},
    }.items()
]


def words(row: dict[str, Any]) -> dict[str, Any]:
    """What a user passes to `predict` who knows the cells of a row, its model, its machine and the
    recipe that it leaves settings to."""
    case = read_case(row)
    preset = recipe_of(row, case.framework, case.model, case.cluster.device, case.job.dtype)
    cells = {"zero": "zero_stage", "sequence_parallel": "sequence_parallel"}
    degrees = {
        name: case.layout.value(name) for name in ("tp", "pp", "dp", "cp", "ep", "micro_batch")
    }
    degrees |= {} if case.layout.etp is None else {"etp": case.layout.etp}
    said = degrees | {
        key: int(float(row[column])) for key, column in cells.items() if given(row, column)
    }
    if given(row, "recompute") or given(row, "recompute_detail"):
        said["recompute"] = case.layout.recompute
    if case.layout.recompute_full_layers:  # counted from what the row measured
        said |= {"recompute": "none", "recompute_full_layers": case.layout.recompute_full_layers[0]}
    if given(row, "schedule") or case.layout.vpp > 1:
        said |= {"schedule": case.layout.schedule, "vpp": case.layout.vpp}
    said |= layout_switches(row)
    said |= preset.layout | {name: case.layout.value(name) for name in ("replicate", "tp_overlap")}
    if given(row, "sharding"):
        said["zero"] = case.layout.zero
    if case.layout.offload:
        said["offload"] = True
    if case.layout.offload_layers:
        said["offload_layers"] = case.layout.offload_layers
    stated = {name: case.job.value(name) for name in case.stated_job | {"cuda_graphs"}}
    job = case.framework.job(
        case.model,
        case.cluster.device,
        global_batch=case.job.global_batch,
        seq_len=case.job.seq_len,
        dtype=case.job.dtype,
        **stated,
    )
    text = ",".join(f"{key}={str(value).lower()}" for key, value in said.items())
    return {
        "model": case.model,
        "cluster": case.cluster,
        "layout": text,
        "global_batch": job.global_batch,
        "job": job,
        "framework": case.framework.label,
    }


def given(row: dict[str, Any], column: str) -> bool:
    return row.get(column) not in (None, "")


def assert_equal(row: dict[str, Any], told: Any) -> None:
    """`pm.predict` against the row of predictions, to the bit."""
    found = pm.predict(**words(row), site=Site(unstated=unstated_share(row)))
    counter = counter_of(str(row.get("memory_kind") or ""), catalog.framework(found.framework))
    assert (found.step_time_s, found.step_time_lo_s, found.step_time_hi_s, found.fits) == (
        told.predicted_iter_time_s,
        told.lo_s,
        told.hi_s,
        told.fits,
    )
    assert found.memory_counted_bytes[counter] == told.predicted_peak_memory_bytes


STATED = {
    "flash_attention": 0,
    "recompute": "full",
    "zero_stage": 1,
    "sequence_parallel": 0,
    "vpp": 1,
}
"""What every row of `TABLE` must say for nothing to be open."""


def test_runs_of_many_frameworks_that_state_all_are_predicted_as_anybody_would() -> None:
    table = [
        row | STATED
        for row in TABLE
        if row["framework"].partition("@")[0] in ("megatron-lm", "nanotron")
    ]
    for row, told in zip(table, predict_cases(pd.DataFrame(table)).itertuples(), strict=True):
        assert told.skipped_reason is None
        if told.completions == 1:
            assert_equal(row, told)
    assert sum(predict_cases(pd.DataFrame(table))["completions"] == 1) >= 2


def test_runs_that_leave_settings_open_say_so_and_are_wider() -> None:
    runs = pd.DataFrame(TABLE)
    for row, told in zip(TABLE, predict_cases(runs).itertuples(), strict=True):
        assert told.skipped_reason is None
        if told.completions > 1:
            assert isinstance(told.assumed, str), row["case_id"]
        assert told.lo_s < told.predicted_iter_time_s < told.hi_s


def test_frameworks_that_are_not_known_are_assumed_and_said() -> None:
    by_name = {row["case_id"]: read_case(row) for row in TABLE}
    assert "framework" in by_name["somebody@2024"].assumed
    assert by_name["somebody@2024"].framework == catalog.framework("generic")
    assert by_name["nanotron@2001"].framework.since == 2024
    assert "framework" in by_name["nanotron@2001"].assumed
    assert by_name[""].assumed == ("vocab",)
    assert set(by_name["somebody@2024"].assumed) == {"framework", "vocab"}
    # a multiple of tp
    assert (by_name["somebody@2024"].job.seq_len, by_name["somebody@2024"].model.vocab) == (
        128,
        50264,
    )


@pytest.mark.parametrize(("framework", "vocab"), [("generic", 50264), ("megatron-lm@2022", 51200)])
def test_a_vocabulary_that_is_not_stated_is_padded_as_the_framework_pads(
    framework: str, vocab: int
) -> None:
    # of tp, or 128 tp
    assert (
        read_case(GPT | {"model": "ours", "vocab": None, "framework": framework}).model.vocab
        == vocab
    )


def test_the_name_of_a_source_changes_nothing() -> None:
    names = ("Korthikanti", "ultrascale-playbook", "mosaicml", "BigScience", "NVIDIA NeMo", "x")
    runs = pd.DataFrame([GPT | {"source": name} for name in names])
    predicted = predict_cases(runs).drop(columns="case_id")
    assert all(row == predicted.iloc[0].tolist() for row in predicted.to_numpy().tolist())


def test_one_framework_for_all_and_other_constants_for_a_source(tmp_path) -> None:
    runs = pd.DataFrame(TABLE[:1])
    own, generic = predict_cases(runs), predict_cases(runs, framework="generic")
    assert own["predicted_iter_time_s"][0] > generic["predicted_iter_time_s"][0]
    hot = predict_cases(runs, site_of=lambda _: Site(sustained=(("Ampere", 0.3),)))
    assert hot["predicted_iter_time_s"][0] > own["predicted_iter_time_s"][0]
    runs.to_csv(tmp_path / "runs.csv")
    report = validate_cases([tmp_path / "runs.csv"], framework="generic")
    assert report["all"]["bias"] == pytest.approx(generic["predicted_iter_time_s"][0] / 1.42 - 1)


@pytest.mark.slow
def test_every_published_row_is_asked_as_anybody_would(data_dir) -> None:
    """Equal questions, over all rows; equal answers to the first of every source and framework."""
    asked, first = 0, {}
    for file in sorted((data_dir / "published").glob("*.csv")):
        table = read_rows(file)
        if "micro_batch" not in table:
            continue
        for row in rows_of(table):
            try:
                case = read_case(row)
            except PerfModelError:
                continue
            said = words(row)
            layout, problem = said.pop("layout"), catalog.problem(**said)
            asked_for, _ = problem.framework.layout(layout, problem.model)
            assert (asked_for, problem.job, problem.framework) == (
                case.layout,
                case.job,
                case.framework,
            ), case.case_id
            asked += 1
            first.setdefault((row["source"], row["framework"]), row)
    assert asked > 3000
    runs = pd.DataFrame(list(first.values())).astype(object)
    for row, told in zip(first.values(), predict_cases(runs).itertuples(), strict=True):
        # what leaves something open is several questions
        if told.skipped_reason is None and told.completions == 1:
            assert_equal(row, told)


COMPILED_WORDS = {
    "torchtitan@2025-09 compile": True,
    "torchtitan, torch.compile": True,
    "compiled PyTorch": True,
    "torchtitan@2025-09 eager": False,
    "torchtitan, no compile": False,
    "torchtitan without torch.compile": False,
    "nocompile": False,
    "": False,
}


def test_a_launch_that_compiles_is_the_compiled_framework():
    for name in ("torchtitan@2025", "fsdp@2024", "pytorch", "torchtitan-compile@2025"):
        plain, at, year = name.partition("@")
        compiled = name if plain.endswith("-compile") else f"{plain}-compile{at}{year}"
        row = {"framework": name, "device": "H100"}
        for words, is_compiled in COMPILED_WORDS.items():
            assert framework_name(row | {"framework_as_stated": words}) == (
                compiled if is_compiled else name
            ), words
        for switches, is_compiled in {
            "compile=1": True,
            "compile": True,
            "compile=0": False,
        }.items():
            assert framework_name(row | {"launch_and_overlap": switches}) == (
                compiled if is_compiled else name
            )
        assert catalog.framework(compiled).name == compiled.partition("@")[0]


def test_a_framework_that_compiles_by_default_has_an_entry_for_the_switch_turned_off():
    row = {"framework": "kempnerforge@2026", "device": "H200"}
    assert framework_name(row) == "kempnerforge@2026"
    assert framework_name(row | {"launch_and_overlap": "compile=1"}) == "kempnerforge@2026"
    assert framework_name(row | {"launch_and_overlap": "compile=0"}) == "kempnerforge-eager@2026"
    compiled, eager = (
        catalog.framework("kempnerforge@2026"),
        catalog.framework("kempnerforge-eager@2026"),
    )
    assert set(compiled.default_job.kernels.eager_kernels) < set(
        eager.default_job.kernels.eager_kernels
    )


@pytest.mark.parametrize("name", ["megatron-core@2025", "maxtext@2025", "somebody@2024", ""])
def test_a_framework_without_a_compiled_entry_keeps_its_name(name: str):
    assert (
        framework_name({"framework": name, "device": "H100", "launch_and_overlap": "compile=1"})
        == name
    )


@pytest.mark.parametrize(
    "words", ["PyTorch + TransformerEngine, script in the issue", "DDP with Transformer Engine 1.7"]
)
def test_layers_of_transformer_engine_are_a_framework_of_their_own(words: str):
    row = {"framework": "pytorch@2024", "device": "H100", "framework_as_stated": words}
    assert framework_name(row) == "pytorch-te@2024"
    assert framework_name(row | {"framework_as_stated": "PyTorch"}) == "pytorch@2024"
    # Megatron-Core runs these layers anyway.
    assert framework_name(row | {"framework": "megatron-core@2025"}) == "megatron-core@2025"


AROUND_A_NAME = ("{}", "{} 0.12", "{} v2.1", "{} (nightly)", "JAX ({})", "our fork of {}", "{} + x")


@pytest.mark.parametrize("words", AROUND_A_NAME)
@pytest.mark.parametrize("name", ["nemo", "Megatron-Bridge", "maxtext", "hf-trainer", "torchtitan"])
def test_words_around_a_framework_s_name_leave_it_the_framework(name: str, words: str) -> None:
    """Versions, hosts and forks do not make a framework that nobody knows."""
    frameworks = {}
    for column in (name, words.format(name)):
        row = GPT | {"framework": column, "year": 2025, "dtype": "bf16", "tp": 8}
        run = predict_run(row)
        frameworks[column] = run.case.framework.label
    assert len(set(frameworks.values())) == 1, frameworks
    assert not any(name.startswith("framework") for name in run.assumed)


@pytest.mark.parametrize(
    ("column", "year", "label"),
    [
        ("Megatron-LM", 2025, "megatron-core@2025"),
        ("Megatron-LM", 2023, "megatron-lm@2023"),
        ("megatron-lm@2023", 2025, "megatron-lm@2023"),
    ],
)
def test_megatron_lm_means_megatron_core_once_its_programs_train_that(
    column: str, year: int, label: str
) -> None:
    row = GPT | {"framework": column, "year": year, "dtype": "bf16"}
    assert predict_run(row).case.framework.label == label
