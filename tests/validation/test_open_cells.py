"""What a row leaves open of degrees, batch and element type is filled in by every plausible value,
and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.validation import RowRun, read_case
from perfmodel.validation.rows import with_plain_columns
from perfmodel.validation.unstated import (
    ACCUMULATION,
    ACCUMULATION_CHAIN,
    IN_PARTS,
    WHOLE_SHARE,
    completions,
    filled_rows,
    model_features,
)
from perfmodel.validation.unstated.priors import choice_priors

ROW = {
    "case_id": "one",
    "source": "s",
    "model": "llama3-8b",
    "device": "H100",
    "n_devices": 32,
    "devices_per_node": 8,
    "tp": 2,
    "pp": 2,
    "dp": 8,
    "cp": 1,
    "vpp": 1,
    "micro_batch": 2,
    "global_batch": 64,
    "layers": 32,
    "sequence_parallel": 1,
}
FEATURES = model_features(
    catalog.model("llama3-8b"),
    catalog.device("H100"),
    8192,
    catalog.framework("megatron-core@2025"),
    2025,
)


def filled(row, micro_batch=None, narrow=None, names_schedules=False):
    """Filled rows, and the names of what was open."""
    found = filled_rows(
        row, FEATURES, choice_priors(), micro_batch, narrow, names_schedules=names_schedules
    )
    names = list(dict.fromkeys(name for each in found for name in each.chosen))
    return [each.cells for each in found], names


def test_a_row_that_states_all_is_left_as_it_is():
    assert filled(ROW) == ([ROW], [])


def test_degrees_that_nothing_tells():
    rows, names = filled(ROW | {"tp": None, "pp": None, "dp": None})
    assert names == ["degrees"]
    degrees = {(row["tp"], row["pp"], row["dp"]) for row in rows}
    assert degrees == {
        (t, p, 32 // (t * p)) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16) if t * p <= 32
    }
    open_too, _ = filled(ROW | {"tp": None, "pp": None, "dp": None, "cp": None})
    assert {row["cp"] for row in open_too} == {1, 2, 4, 8}
    assert all(row["tp"] * row["pp"] * row["cp"] * row["dp"] == 32 for row in open_too)
    rows, _ = filled(ROW | {"tp": None, "dp": None, "global_batch": 4})
    # replicas share the batch
    assert {(row["tp"], row["pp"], row["dp"]) for row in rows} == {
        (4, 2, 4),
        (8, 2, 2),
    }


def test_over_how_many_replicas_weights_are_sharded():
    row = ROW | {"tp": 1, "pp": 1, "dp": 32, "sharding": "FSDP+DP"}
    rows, names = filled(row)
    assert names == ["replicate"]
    assert [case.layout.replicate for case in map(read_case, rows)] == [4, 2, 1]
    for told in ({"sharding": "FSDP"}, {"sharding": "FSDP over 16 devices, replicated beyond"}):
        assert filled(row | told) == ([row | told], [])


def test_one_open_degree_follows_from_the_devices():
    row = ROW | {"dp": None}
    assert filled(row) == ([row], [])  # as `spread_of` has it


def test_degrees_that_contradict_the_devices():
    rows, names = filled(ROW | {"dp": 2})
    assert names == ["dp"]
    assert [row["dp"] for row in rows] == [8]
    odd = ROW | {"dp": 2, "tp": 3}
    assert filled(odd) == ([odd], [])


@pytest.mark.parametrize(
    ("batch", "sizes"), [(64, (1, 2, 4, 8)), (16, (1, 2)), (8, (1,)), (24, (1,))]
)
def test_micro_batches_that_divide_a_replica_s_share(batch, sizes):
    rows, names = filled(ROW | {"micro_batch": None, "global_batch": batch})
    assert names == ["micro_batch"]
    assert tuple(row["micro_batch"] for row in rows) == sizes


@given(
    share=st.integers(2, 96),
    framework=st.sampled_from(("maxtext", "fsdp", "megatron-core", "nanotron")),
)
def test_without_a_pipeline_all_that_a_replica_gets_is_as_likely_as_such_runs_do_not_accumulate(
    share, framework
):
    features = replace(FEATURES, framework=framework)
    row = ROW | {"pp": 1, "dp": 16, "micro_batch": None, "global_batch": 16 * share}
    priors = choice_priors()
    rows = filled_rows(row, features, priors, None, None, names_schedules=False)
    weights = {each.cells["micro_batch"]: each.weight for each in rows}
    assert sum(weights.values()) == pytest.approx(1)
    whole, _ = priors.probabilities(
        ACCUMULATION, features.contexts(ACCUMULATION_CHAIN), (WHOLE_SHARE, IN_PARTS)
    )
    assert weights[share] == pytest.approx(whole)
    assert all(share % size == 0 for size in weights)


@given(share=st.integers(2, 96))
def test_a_pipeline_takes_its_share_in_parts_as_often_as_sizes_are_used(share):
    row = ROW | {"micro_batch": None, "global_batch": 8 * share}
    sizes = {
        each.cells["micro_batch"]
        for each in filled_rows(row, FEATURES, choice_priors(), None, None, names_schedules=False)
    }
    assert sizes == {size for size in (1 << k for k in range(11)) if share % size == 0}


def test_what_a_framework_takes_by_default_is_not_open():
    row = ROW | {"micro_batch": None}
    assert filled(row, micro_batch=8) == ([row], [])


def test_chunks_of_stages_that_nothing_tells_divide_their_layers_or_are_powers_of_two():
    row = ROW | {"vpp": None}
    assert [one["vpp"] for one in filled(row)[0]] == [1, 2, 4, 8, 16]
    assert [one["vpp"] for one in filled(row | {"layers": 12, "schedule": "1f1b"})[0]] == [
        1,
        2,
        3,
        4,
        6,
    ]
    for told in ({"schedule": "zb-1p"}, {"pp": 1, "dp": 16}):
        assert filled(row | told) == ([row | told], [])


def test_the_name_of_a_schedule_tells_whether_it_interleaves():
    row = ROW | {"vpp": None}
    # Where launches name schedules, 1F1B is that of one chunk per stage. Elsewhere it may have
    # several.
    for name in ("1f1b", "1F1B"):
        one_chunk = row | {"schedule": name}
        assert filled(one_chunk, names_schedules=True) == ([one_chunk], [])
        assert [filled_row["vpp"] for filled_row in filled(one_chunk)[0]] == [1, 2, 4, 8, 16]
    assert [filled_row["vpp"] for filled_row in filled(row, names_schedules=True)[0]] == [
        1,
        2,
        4,
        8,
        16,
    ]
    for name in ("interleaved", "Interleaved-1F1B", "1F1B-I"):
        rows, names = filled(row | {"schedule": name})
        assert (names, [filled_row["vpp"] for filled_row in rows]) == (["vpp"], [2, 4, 8, 16])
        one_layer = row | {"schedule": name, "layers": 2}
        assert [filled_row["vpp"] for filled_row in filled(one_layer)[0]] == [1]
        stated = row | {"schedule": name, "vpp": 3}
        assert filled(stated) == ([stated], [])


def test_an_element_type_that_nothing_tells_is_open_where_framework_and_device_have_a_narrow_one():
    row = ROW | {"dtype": None}
    assert filled(row) == ([row], [])
    rows, names = filled(row, narrow="fp8")
    assert (names, [one["dtype"] for one in rows]) == (["dtype"], ["bf16", "fp8"])
    for told in ({"dtype": "bf16"}, {"dtype_recipe": "fp8 delayed"}):
        assert filled(row | told, narrow="fp8") == ([row | told], [])
    frameworks = {
        "nemo@2024": {"bf16", "fp8"},
        "torchtitan@2024": {"bf16", "fp8"},
        "nanotron@2024": {"bf16"},
    }
    for framework, dtypes in frameworks.items():
        found, _ = completions(RowRun(row | {"framework": framework}), None, choice_priors())
        assert {each.case.job.dtype for each in found} == dtypes
        assert all("dtype" in each.case.assumed for each in found)
    on_a100 = RowRun(row | {"framework": "nemo@2024", "device": "A100-SXM4-80GB"})
    on_a100, _ = completions(on_a100, None, choice_priors())
    assert {each.case.job.dtype for each in on_a100} == {"bf16"}


def test_open_values_multiply_and_their_priors_are_products():
    row = ROW | {"tp": None, "dp": None, "micro_batch": None, "global_batch": 16}
    rows = filled_rows(row, FEATURES, choice_priors(), None, None, names_schedules=False)
    cells = [each.cells for each in rows]
    assert len(rows) == len({(row["tp"], row["micro_batch"]) for row in cells}) == 1 + 2 + 3 + 4
    assert all(
        row["tp"] * row["pp"] * row["dp"] == 32 and 16 // row["dp"] % row["micro_batch"] == 0
        for row in cells
    )
    by_tp = {each["tp"]: [] for each in cells}
    for each in rows:
        by_tp[each.cells["tp"]].append((each.cells["micro_batch"], each.weight))
    ratios = {tp: dict(found)[1] / dict(found)[2] for tp, found in by_tp.items() if len(found) > 1}
    assert list(ratios.values()) == pytest.approx([next(iter(ratios.values()))] * len(ratios))


def on_tpus(devices, **stated):
    """Completions of a run on slices of 256 chips that states no degrees."""
    row = ROW | {
        "device": "TPU-v5e",
        "n_devices": devices,
        "devices_per_node": 4,
        "tp": None,
        "pp": 1,
        "dp": None,
        "global_batch": 2 * devices,
        "micro_batch": 1,
        "zero_stage": 3,
        "framework": "maxtext@2024",
    }
    found, _ = completions(RowRun(row | stated), None, choice_priors())
    return found


@pytest.mark.parametrize("slices", [1, 2, 16])
def test_tensor_parallelism_of_tpus_is_bounded_by_the_slice_and_copies_lie_on_slices(slices):
    found = on_tpus(256 * slices)
    assert max(each.case.layout.tp for each in found) > 4
    assert {each.case.layout.replicate for each in found} == {1, slices}
    stated = on_tpus(
        256 * slices, sharding="FSDP over 16 devices, replicated beyond", tp=1, dp=256 * slices
    )
    assert {each.case.layout.replicate for each in stated} == {16 * slices}


def test_shards_of_gpus_are_not_bounded_by_their_nodes():
    found, _ = completions(
        RowRun(ROW | {"tp": 1, "pp": 1, "dp": 32, "zero_stage": 3}), None, choice_priors()
    )
    assert {each.case.layout.replicate for each in found} == {1}


def test_schedules_are_named_by_launches_of_torchtitan_alone():
    by_name = {
        name for name in catalog.frameworks() if catalog.framework(name).launch.names_schedules
    }
    assert by_name == {"torchtitan", "torchtitan-compile"}


def test_a_shape_that_only_family_and_parameters_tell_has_several_widths():
    row = ROW | {"model": "ours-30B", "family": "llama", "layers": None}
    rows, names = filled(row)
    assert names == ["shape"]
    assert len({cells["hidden"] for cells in rows}) == 3
    assert {read_case(cells).model.layers for cells in rows} == {40, 54, 86}


def test_words_that_are_not_understood_leave_a_cell_open():
    unread = ROW | {"dtype": "florp", "schedule": "florp", "vpp": None}
    stated_nothing = ROW | {"dtype": None, "schedule": None, "vpp": None}
    assert (
        filled(unread, narrow="fp8")[1]
        == filled(stated_nothing, narrow="fp8")[1]
        == ["vpp", "dtype"]
    )
    named = {"dtype": "mixed precision", "schedule": "interleaved 1F1B (v=2)"}
    assert filled(with_plain_columns(unread | named), narrow="fp8")[1] == []


def test_a_default_micro_batch_holds_only_where_it_divides_the_batch():
    row = ROW | {"micro_batch": None, "global_batch": 64, "tp": 1, "pp": 1, "dp": 32}
    assert filled(row, micro_batch=2) == ([row], [])
    rows, names = filled(row, micro_batch=8)
    assert names == ["micro_batch"]
    assert {each["micro_batch"] for each in rows} == {1, 2}


def filled_with_experts(row, experts):
    """Degrees of expert parallelism of the filled rows, and the names of what was open."""
    rows = filled_rows(
        row, FEATURES, choice_priors(), 2, None, names_schedules=False, experts=experts
    )
    names = {name for filled_row in rows for name in filled_row.chosen}
    return [filled_row.cells.get("ep") for filled_row in rows], names


@given(
    experts=st.integers(1, 512),
    tp=st.sampled_from([1, 2, 4, 8]),
    dp=st.integers(1, 256),
    left_to_devices=st.sampled_from(["", "tp", "dp"]),
)
def test_experts_without_a_degree_are_shared_out_in_every_way(experts, tp, dp, left_to_devices):
    row = ROW | {"tp": tp, "dp": dp, "n_devices": 2 * tp * dp, "global_batch": 2 * dp}
    if left_to_devices:
        row |= {left_to_devices: None}
    degrees, names = filled_with_experts(row, experts)
    assert names == {"ep"}
    assert degrees == [
        ep for ep in (1, 2, 4, 8, 16, 32, 64) if experts % ep == 0 and tp * dp % ep == 0
    ]


def test_a_stated_degree_of_experts_stays_and_dense_models_have_none():
    assert filled_with_experts(ROW | {"ep": 4}, 64) == ([4], set())
    assert filled_with_experts(ROW, 0) == ([None], set())
