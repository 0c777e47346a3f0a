"""A table of the user's own runs is read by `validate cases` and `fit --runs` alike."""

from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.errors import TableError
from perfmodel.spec import Layout
from perfmodel.validation import validate_cases
from perfmodel.validation.rows import read_case, read_runs, read_tables, rows_of

HEAD = "model,cluster,framework,global_batch,seq_len,step_time_s"
ROW = "llama3-8b,dgx-h100,megatron-core,64,4096,2.2"
TABLES = {
    "a layout": (f"{HEAD},layout", f'{ROW},"tp=2,dp=8,zero=1,recompute=full,micro_batch=2"'),
    "DistSim's notation": (f"{HEAD},layout", f"{ROW},2M1P8D"),
    "degrees": (f"{HEAD},tp,pp,dp,micro_batch", f"{ROW},2,1,8,2"),
    "some degrees": (f"{HEAD},tp,devices,micro_batch,optimizer", f"{ROW},2,16,2,sgd"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_both_commands_read_a_users_table_alike(kind: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(TABLES[kind]) + "\n", "utf-8")
    runs, ignored = read_tables([table])
    assert not ignored
    (row,) = rows_of(runs)
    assert (row["case_id"], row["source"]) == ("row 1", "mine")
    case = read_case(row)
    (run,), skipped = read_runs(table)
    assert not skipped
    assert case.layout == run.layout
    assert case.layout.devices == 16
    assert case.job.global_batch == run.job.global_batch == 64
    assert case.job.optimizer == run.job.optimizer == ("sgd" if "degrees" in kind[5:] else "adam")
    assert run.measured_s == row["measured_iter_time_s"] == 2.2


def test_cases_are_compared_with_the_times_of_a_users_table(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(TABLES["a layout"]) + "\n", "utf-8")
    report = validate_cases([table])
    layout = Layout.parse("tp=2,dp=8,zero=1,recompute=full,micro_batch=2")
    predicted = pm.predict(
        "llama3-8b",
        "dgx-h100",
        layout,
        global_batch=64,
        seq_len=4096,
        framework="megatron-core",
    )
    error = abs(predicted.step_time_s / 2.2 - 1)
    assert report["all"]["n"] == 1
    assert report["all"]["mean_ape"] == pytest.approx(error, rel=0.1)


def test_a_table_without_runs_is_refused_with_what_to_write(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("model,layout\nllama3-8b,tp=8\n", "utf-8")
    with pytest.raises(
        TableError, match=r"cluster or device, step_time_s or .* give model, cluster"
    ):
        read_tables([table])
