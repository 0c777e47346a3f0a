"""A table of runs is read strictly: by keys of job files, by closed vocabularies, and never from
notes."""

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from prepared_runs import prepare
from test_case_rows import MOE, ROW

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.errors import PerfModelError
from perfmodel.spec import Model, Sectioned, Transformer
from perfmodel.validation import Case, predict_run, read_case, read_runs
from perfmodel.validation.rows import read_rows, rows_of, unread_words, with_plain_columns
from perfmodel.validation.rows.phrases import read_phrases
from perfmodel.validation.rows.vocabulary import DTYPE, RECOMPUTE, SHARDING, read_switches

UNREAD_PARTS = {"Inc.", "subsidiaries"}
"""Parts of a firm's name in the record."""


def model_table(model: Model) -> dict[str, Any]:
    """A model as a file states it: by the keys of its sections."""
    if not isinstance(model, Transformer):
        return asdict(model)
    return {
        key: asdict(value) if is_dataclass(value) else value
        for key, value in model.values().items()
    }


def told(case: Case) -> dict[str, Any]:
    """What a case states, as a parsed job file."""
    fields = {name: case.job.value(name) for name in case.stated_job}
    fields |= {
        "global_batch": case.job.global_batch,
        "seq_len": case.job.seq_len,
        "dtype": case.job.dtype,
    }
    kinds = {"Transformer": "transformer", "Mlp": "mlp", "ConvNet": "convnet", "UNet": "unet"}
    levels = [
        {
            "name": level.name,
            "size": level.size,
            "bandwidth_gb_per_s": level.bandwidth_bytes_per_s / 1e9,
            "latency_us": level.latency_s / 1e-6,
            "contention": level.contention,
            "source": level.source,
            "rank_latency_us": level.rank_latency_s / 1e-6,
        }
        for level in case.cluster.levels
    ]
    data = {
        "model": model_table(case.model) | {"kind": kinds[type(case.model).__name__]},
        "cluster": {
            "name": case.cluster.name,
            "device": case.cluster.device.name,
            "levels": levels,
            "source": case.cluster.source,
        },
        "framework": case.framework.label,
        "job": fields,
        "layout": case.stated_layout,
    }
    return json.loads(json.dumps(data))


def columns(case: Case, folder: Path) -> dict[str, Any]:
    """What a case states, as the cells of a row whose columns are keys of job files."""
    data = told(case)
    cluster = folder / "cluster.toml"
    levels = ",\n".join(
        "  {" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in level.items()) + "}"
        for level in data["cluster"]["levels"]
    )
    cluster.write_text(
        f"name = {json.dumps(case.cluster.name)}\ndevice = {json.dumps(case.cluster.device.name)}\n"
        f"source = {json.dumps(case.cluster.source)}\nlevels = [\n{levels}\n]\n"
    )
    cells: dict[str, Any] = {"case_id": case.case_id, "source": "s", "framework": data["framework"]}
    cells["cluster"] = str(cluster)

    def fill(table: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                fill(f"{table}.{name}", value)
            elif value is not None:
                cells[f"{table}.{name}"] = (
                    json.dumps(value) if isinstance(value, list | bool) else value
                )

    if data["model"]["kind"] == "transformer":
        fill("model", data["model"])
    else:
        cells["model"] = case.model.name
    fill("job", data["job"])
    fill("layout", dict(part.split("=", 1) for part in case.stated_layout.split(",")))
    return cells


@pytest.fixture(scope="module")
def sample(data_dir):
    """A row of every table of both collections."""
    rows = []
    for folder in ("published", "published2"):
        for path in sorted((data_dir / folder).glob("*.csv")):
            if path.stem in ("collectives", "predictor_reference"):
                continue
            table = prepare(read_rows(path))
            rows += rows_of(table.iloc[[len(table) // 3, len(table) // 2]])
    return rows


def test_a_job_file_and_columns_say_what_a_row_says_bit_for_bit(sample, tmp_path):
    compared = 0
    for row in sample:
        try:
            case = read_case(row)
        except PerfModelError:
            continue
        problem, layout_text = catalog.problem_and_layout(
            job_files.job_from_toml(told(case), "job.toml")
        )
        layout, _ = case.framework.layout(str(layout_text), problem.model)
        assert (problem.model, problem.job, problem.framework) == (
            case.model,
            case.job,
            case.framework,
        ), row["case_id"]
        assert layout == case.layout, row["case_id"]
        assert problem.cluster.levels == pytest.approx(case.cluster.levels) or _alike(
            problem.cluster, case.cluster
        )
        again = read_case(columns(case, tmp_path))
        for name in ("model", "job", "framework", "layout"):
            assert getattr(again, name) == getattr(case, name), (row["case_id"], name)
        assert _alike(again.cluster, case.cluster), row["case_id"]
        compared += 1
    assert compared > 50


def _alike(one: Any, other: Any) -> bool:
    """Whether two clusters are alike but for the last bit of figures that went through other
    units."""
    for level, same in zip(one.levels, other.levels, strict=True):
        figures = [
            (n.bandwidth_bytes_per_s, n.latency_s, n.contention, n.rank_latency_s)
            for n in (level, same)
        ]
        if (level.name, level.size) != (same.name, same.size) or not np.allclose(
            *figures, rtol=1e-12, atol=0
        ):
            return False
    return (one.device, one.name) == (other.device, other.name)


@pytest.mark.parametrize(
    ("column", "value", "part", "name", "read"),
    [
        ("layout.offload_states", "optimizer", "layout", "offload_states", "optimizer"),
        ("layout.cp_kind", "ulysses", "layout", "cp_kind", "ulysses"),
        ("layout.tp_overlap", "0", "layout", "tp_overlap", False),
        ("layout.zero", 3.0, "layout", "zero", 3),
        (
            "layout.recompute_full_layers",
            "3-3-3-3",
            "layout",
            "recompute_full_layers",
            (3, 3, 3, 3),
        ),
        ("job.optimizer", "muon", "job", "optimizer", "muon"),
        ("job.masked_head", 1, "job", "masked_head", True),
        (
            "job.adapter_modules",
            '["q_proj", "v_proj"]',
            "job",
            "adapter_modules",
            ("q_proj", "v_proj"),
        ),
        ("job.input_samples_per_s", 2500, "job", "input_samples_per_s", 2500),
        ("job.generation_s", 41.5, "job", "generation_s", 41.5),
        ("job.head", "token_labels", "job", "head", "token_labels"),
        ("job.mean_tokens", 246.5, "job", "mean_tokens", 246.5),
        ("job.rms_tokens", 300, "job", "rms_tokens", 300),
        ("job.expert_capacity_factor", 1.25, "job", "expert_capacity_factor", 1.25),
        (
            "job.recompute_modules",
            '["mlp", "moe_act"]',
            "job",
            "recompute_modules",
            ("mlp", "moe_act"),
        ),
        ("job.cuda_graphs", "step", "job", "cuda_graphs", "step"),
        ("framework.execution", "compiled", "framework", "execution", "compiled"),
        ("framework.host_op_s", 2e-6, "framework", "host_op_s", 2e-6),
        ("model.gated_ffn", "false", "model", "gated_ffn", False),
        ("model.vocab", 32000, "model", "vocab", 32000),
        ("network.nics_per_node", 4, "cluster", "levels", None),
        ("network.bandwidth_gb_per_s", 12.5, "cluster", "levels", None),
    ],
)
def test_every_key_of_a_job_file_may_be_a_column(column, value, part, name, read):
    row = ROW | {"pp": 4, "tp": 1, "dp": 2, "global_batch": 16, "zero_stage": 1, column: value}
    case = read_case(row)
    record = getattr(case, part)
    found = record.value(name) if isinstance(record, Sectioned) else getattr(record, name)
    if part == "cluster":
        assert found[-1].bandwidth_bytes_per_s == 12.5e9
    else:
        assert found == read
    for table in (pd.DataFrame([row | {"measured_iter_time_s": 1.0}]),):  # as `fit --runs` has it
        (run,), _ = read_runs(table)
        assert (run.layout, run.job, run.model) == (case.layout, case.job, case.model)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"layout.florp": 1}, "unknown layout key"),
        ({"job.florp": 1}, "unknown key 'florp'"),
        ({"job.optimizer": "florp"}, "optimizer"),
        ({"framework.florp": 1}, "florp"),
        ({"network.florp": 1}, "florp: unknown key"),
        ({"model.florp": 1}, "florp"),
        ({"job.recompute_modules": "florp"}, "recompute_modules"),
        ({"cluster": "florp"}, "unknown cluster"),
        ({"network.inter_link": "8x 400 GB/s"}, "check bits"),
    ],
)
def test_keys_and_values_that_there_are_not_are_refused(cells, said):
    with pytest.raises(PerfModelError, match=said):
        read_case(ROW | cells)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"dp": 2}, "tp*pp*dp*cp=4 and n_devices=8"),
        ({"num_microbatches": 5}, "micro_batch*num_microbatches*dp=80 and global_batch=32"),
        ({"params_b": 70}, "params_b=70 and"),
        ({"measured_peak_memory_gb": 120}, "measured_peak_memory_gb=120 and"),
        ({"layout.tp": 4, "layout.dp": 2}, "layout.tp=4 and tp=2"),
        ({"zero_stage": 1, "sharding": "FSDP full shard"}, "zero_stage=1 and sharding"),
        ({"recompute": "none", "recompute_detail": "full"}, "recompute=none and recompute_detail"),
        ({"dtype": "bf16", "dtype_recipe": "fp8 delayed"}, "dtype=bf16 and dtype_recipe"),
        ({"cluster": "dgx-a100"}, "device=H100-SXM5-80GB and cluster=dgx-a100"),
        (
            {"inter_link": "8x 200 Gb/s RoCE", "nics_per_node": 4},
            "nics_per_node=4 and the network's words",
        ),
    ],
)
def test_contradictions_between_columns_are_said(cells, said):
    stated = ROW | {"micro_batch": 4} | cells
    case = read_case(stated)
    assert any(said in each for each in case.contradictions), case.contradictions
    assert read_case(with_plain_columns(stated)).contradictions == case.contradictions
    assert not read_case(ROW | {"micro_batch": 4}).contradictions


@pytest.mark.parametrize(
    ("column", "words", "unread"),
    [
        ("recompute", "selective florp", "florp"),
        ("recompute_detail", "florp moe_act", "florp"),
        ("sharding", "FSDP florp", "florp"),
        ("dtype_recipe", "fp8 florp", "florp"),
        ("launch_and_overlap", "tp_comm_overlap=1; florp=1", "florp=1"),
        ("inter_link", "8x 400G florp", "florp"),
        ("intra_link", "NVLink florp", "florp"),
        ("launch_and_overlap", "tp_comm_overlap=perhaps", "tp_comm_overlap=perhaps"),
    ],
)
def test_words_that_are_not_understood_are_named_and_not_used(column, words, unread):
    case = read_case(ROW | {column: words})
    assert f"{column} {unread!r} not understood" in case.assumed
    without = read_case(ROW | {column: words.replace(unread, "").strip("; ")})
    assert (case.layout, case.job) == (without.layout, without.job)


def test_every_cell_of_both_collections_is_understood_or_a_number_of_a_part(data_dir):
    vocabularies = {
        "dtype": DTYPE,
        "dtype_recipe": DTYPE,
        "recompute": RECOMPUTE,
        "recompute_detail": RECOMPUTE,
        "sharding": SHARDING,
    }
    for folder in ("published", "published2"):
        for path in sorted((data_dir / folder).glob("*.csv")):
            table = pd.read_csv(path, low_memory=False)
            for column, vocabulary in vocabularies.items():
                for words in table[column].dropna().unique() if column in table else ():
                    assert not read_phrases(str(words), vocabulary).unread, (
                        path.stem,
                        column,
                        words,
                    )
            for words in table["schedule"].dropna().unique() if "schedule" in table else ():
                assert not unread_words({"schedule": str(words)}), (path.stem, words)
            for words in (
                table["launch_and_overlap"].dropna().unique()
                if "launch_and_overlap" in table
                else ()
            ):
                _, unread = read_switches(str(words))
                assert all(
                    "FSDP over 8 local" in part or "replicated beyond" in part for part in unread
                ), words
            links = [
                name
                for name in ("inter_link", "inter_link_as_stated", "intra_link")
                if name in table
            ]
            for _, cells in table[links].drop_duplicates().iterrows():
                row = {name: value for name, value in cells.items() if isinstance(value, str)}
                assert {each.split("'")[1] for each in unread_words(row)} <= UNREAD_PARTS, row


def test_notes_and_pages_are_never_read():
    notes = (
        "release 26.06; task pre-training; recompute, offload and overlap flags are in the recipe; LoRA rank 8; "
        "V=50257; sequence length 128; first layer dense; decoder length 7; HybridEP; "
        "expert-communication overlap on; FSDP+DP"
    )
    for row in (ROW, MOE):
        assert read_case(row | {"notes": notes, "url_or_repo": "x (tag v24.11)"}) == read_case(row)


def test_the_record_has_its_notes_in_columns_once():
    notes = "release 26.06; task pre-training; recompute flags are in the recipe; LoRA rank 8; sequence length 128"
    rows = [
        ROW | {"notes": notes, "seq_len": None},
        ROW | {"notes": "1 dense layer; batch per DP rank 36", "global_batch": None},
    ]
    first, second = rows_of(prepare(pd.DataFrame(rows)))
    assert (first["recipe_release"], first["seq_len"], first["job.adapter_rank"]) == (
        "v26.06",
        128,
        8,
    )
    assert (second["first_dense_layers"], second["global_batch"]) == (1, 36 * 4)
    plain = pd.DataFrame([ROW | {"notes": "nothing", "url_or_repo": ""}])
    pd.testing.assert_frame_equal(prepare(plain), plain)


ADDS_NOTHING = {
    "inter_link": None,
    "inter_link_as_stated": None,
    "recompute_detail": (RECOMPUTE, {"none", "full", "selective"}),
    "sharding": (SHARDING, {"zero 0", "zero 1", "zero 2", "zero 3", "stage"}),
    "dtype_recipe": (DTYPE, {"bf16", "fp16", "fp32", "tf32", "fp8", "int8", "fp4"}),
}
"""By column of words, what it may say without saying more than the columns of numbers beside it."""
WORDS_AND_NUMBERS = {
    "inter_link": ("nics_per_node", "nic_gbit_per_s"),
    "inter_link_as_stated": ("nics_per_node", "nic_gbit_per_s"),
    "sharding": ("zero_stage",),
    "recompute_detail": ("recompute",),
    "dtype_recipe": ("dtype",),
}


def _adds_nothing(column: str, words: str) -> bool:
    allowed = ADDS_NOTHING[column]
    if allowed is None:
        return True
    vocabulary, meanings = allowed
    return {name for name, _ in read_phrases(words, vocabulary).said} <= meanings


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_an_emptied_column_of_words_changes_less_than_the_interval(data_dir, every):
    tried = 0
    for folder in ("published", "published2"):
        for path in sorted((data_dir / folder).glob("*.csv"))[::every]:
            if path.stem in ("collectives", "predictor_reference", "ultrascale_playbook", "vtrain"):
                continue
            table = prepare(read_rows(path))
            for words, numbers in WORDS_AND_NUMBERS.items():
                if not {words, *numbers} <= set(table.columns):
                    continue
                rows = table[table[[words, *numbers]].notna().all(axis=1)]
                rows = rows[[_adds_nothing(words, str(cell)) for cell in rows[words]]]
                for row in rows_of(rows.iloc[:1]):
                    try:
                        before = predict_run(row)
                    except PerfModelError:
                        continue
                    after = predict_run(row | {words: None})
                    assert before.step_time_lo_s <= after.step_time_s <= before.step_time_hi_s, (
                        row["case_id"],
                        words,
                    )
                    tried += 1
    assert tried > 20 / every
