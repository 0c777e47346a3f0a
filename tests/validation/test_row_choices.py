"""What a row of published runs leaves open is filled in by every plausible value, and by nothing else."""

import pytest

from perfmodel.validation._case_rows import read_case, read_cases
from perfmodel.validation._row_choices import MICRO_BATCHES, plausible_rows

ROW = {
    "case_id": "one", "source": "s", "model": "llama3-8b", "device": "H100", "n_devices": 32, "devices_per_node": 8,
    "tp": 2, "pp": 2, "dp": 8, "cp": 1, "vpp": 1, "micro_batch": 2, "global_batch": 64, "layers": 32, "notes": "",
    "sequence_parallel": 1,
}  # fmt: skip


def test_a_row_that_states_all_is_left_as_it_is():
    assert plausible_rows(ROW) == ([ROW], ())


def test_sequence_parallelism_where_no_framework_is_told():
    rows, names = plausible_rows(ROW | {"sequence_parallel": None})
    assert names == ("sequence_parallel",)
    assert [row["sequence_parallel"] for row in rows] == [0, 1]
    for told in ({"framework": "megatron-core@2025"}, {"tp": 1, "dp": 16}):
        row = ROW | {"sequence_parallel": None} | told
        assert plausible_rows(row) == ([row], ())


def test_degrees_that_nothing_tells():
    rows, names = plausible_rows(ROW | {"tp": None, "pp": None, "dp": None})
    assert names == ("degrees",)
    degrees = {(row["tp"], row["pp"], row["dp"]) for row in rows}
    assert degrees == {(t, p, 32 // (t * p)) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 32}
    open_too, _ = plausible_rows(ROW | {"tp": None, "pp": None, "dp": None, "cp": None})
    assert {row["cp"] for row in open_too} == {1, 2, 4, 8}
    assert all(row["tp"] * row["pp"] * row["cp"] * row["dp"] == 32 for row in open_too)
    rows, _ = plausible_rows(ROW | {"tp": None, "dp": None, "global_batch": 4})
    assert {(row["tp"], row["pp"], row["dp"]) for row in rows} == {(4, 2, 4), (8, 2, 2)}  # replicas share the batch


def test_over_how_many_replicas_weights_are_sharded():
    row = ROW | {"tp": 1, "pp": 1, "dp": 32, "sharding": "FSDP", "notes": "GPT 5B (FSDP+DP, MBS=2)"}
    rows, names = plausible_rows(row)
    assert names == ("replicate",)
    assert [case.layout.replicate for case in map(read_case, rows)] == [4, 2, 1]
    for told in ({"notes": "FSDP"}, {"sharding": "FSDP over 16 devices, replicated beyond"}):
        assert plausible_rows(row | told) == ([row | told], ())


def test_graphs_of_layers_where_nothing_of_the_launch_is_told():
    row = ROW | {"tp": None, "pp": None, "dp": None}
    rows, names = plausible_rows(row, layer_graphs=True)
    assert names == ("cuda_graphs", "degrees")
    assert len(rows) == 2 * len(plausible_rows(row)[0])
    for told in ({"launch_and_overlap": "tp_comm_overlap=1"}, ROW):
        assert "cuda_graphs" not in plausible_rows(row | told, layer_graphs=True)[1]


def test_one_open_degree_follows_from_the_devices():
    row = ROW | {"dp": None}
    assert plausible_rows(row) == ([row], ())  # as `spread_of` has it


def test_degrees_that_contradict_the_devices():
    rows, names = plausible_rows(ROW | {"dp": 2})
    assert names == ("dp",)
    assert [row["dp"] for row in rows] == [8]
    odd = ROW | {"dp": 2, "tp": 3}
    assert plausible_rows(odd) == ([odd], ())


@pytest.mark.parametrize(("batch", "sizes"), [(64, MICRO_BATCHES), (16, (1, 2)), (8, (1,)), (24, (1,))])
def test_micro_batches_that_divide_a_replica_s_share(batch, sizes):
    rows, names = plausible_rows(ROW | {"micro_batch": None, "global_batch": batch})
    assert names == ("micro_batch",)
    assert tuple(row["micro_batch"] for row in rows) == sizes


def test_what_a_framework_takes_by_default_is_not_open():
    row = ROW | {"micro_batch": None}
    assert plausible_rows(row, micro_batch=8) == ([row], ())


def test_chunks_of_stages_that_nothing_tells_divide_their_layers_or_are_powers_of_two():
    row = ROW | {"vpp": None}
    assert [one["vpp"] for one in plausible_rows(row)[0]] == [1, 2, 4, 8, 16]
    assert [one["vpp"] for one in plausible_rows(row | {"layers": 12, "schedule": "1f1b"})[0]] == [1, 2, 3, 4, 6]
    for told in ({"schedule": "zb-1p"}, {"pp": 1, "dp": 16}):
        assert plausible_rows(row | told) == ([row | told], ())


def test_an_element_type_that_nothing_tells_is_open_where_framework_and_device_have_a_narrow_one():
    row = ROW | {"dtype": None}
    assert plausible_rows(row) == ([row], ())
    rows, names = plausible_rows(row, narrow="fp8")
    assert (names, [one["dtype"] for one in rows]) == (("dtype",), ["bf16", "fp8"])
    for told in ({"dtype": "bf16"}, {"dtype_recipe": "fp8 delayed"}):
        assert plausible_rows(row | told, narrow="fp8") == ([row | told], ())
    frameworks = {"nemo@2024": {"bf16", "fp8"}, "torchtitan@2024": {"bf16"}}
    for framework, dtypes in frameworks.items():
        cases = read_cases(row | {"framework": framework})
        assert {case.job.dtype for case in cases} == dtypes
        assert all("dtype" in case.assumed for case in cases)
    on_a100 = read_cases(row | {"framework": "nemo@2024", "device": "A100-SXM4-80GB"})
    assert {case.job.dtype for case in on_a100} == {"bf16"}


def test_open_values_multiply():
    rows, names = plausible_rows(ROW | {"tp": None, "dp": None, "micro_batch": None, "global_batch": 16})
    assert names == ("degrees", "micro_batch")
    assert len(rows) == len({(row["tp"], row["micro_batch"]) for row in rows}) == 1 + 2 + 3 + 4
    assert all(row["tp"] * row["pp"] * row["dp"] == 32 and 16 // row["dp"] % row["micro_batch"] == 0 for row in rows)


def test_a_batch_of_the_notes():
    (row,), _ = plausible_rows(ROW | {"global_batch": None, "notes": "batch per DP rank 36; no model parallelism"})
    assert row["global_batch"] == 36 * 8
