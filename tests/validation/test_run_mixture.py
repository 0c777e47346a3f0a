"""A run of which not everything is stated: what it may have been, whoever describes it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site, explain, step_problem
from perfmodel.validation import described_job, predict_cases, predict_run, read_case
from perfmodel.validation.unstated import (
    CONVERSATION_TOKENS,
    OPEN_CHOICES,
    case_features,
    real_tokens,
)
from perfmodel.validation.unstated.priors import choice_priors
from perfmodel.workload import parameter_count

ROW = {
    "case_id": "one",
    "source": "s",
    "status": "ok",
    "framework": "megatron-core@2025",
    "model": "llama3-8b",
    "device": "H100-SXM5-80GB",
    "n_devices": 16,
    "devices_per_node": 8,
    "inter_link": "8x400 Gb/s InfiniBand",
    "dtype": "bf16",
    "seq_len": 8192,
    "tp": 2,
    "pp": 1,
    "dp": 8,
    "cp": 1,
    "ep": 1,
    "vpp": 1,
    "micro_batch": 1,
    "global_batch": 64,
    "recompute": "none",
    "zero_stage": 1,
    "sequence_parallel": 1,
    "flash_attention": 1,
    "launch_and_overlap": "overlap_grad_reduce=1; overlap_param_gather=1; tp_comm_overlap=0; layer_cuda_graph=0",
}
EMPTIED = {
    "recompute": "recompute",
    "zero_stage": "zero",
    "sequence_parallel": "sequence_parallel",
    "flash_attention": "flash_attention",
    "micro_batch": "micro_batch",
    "inter_link": "network",
    "framework": "framework",
}
"""Cells, and the choice that each leaves open."""


def test_a_run_that_states_all_is_one_prediction():
    run = predict_run(ROW)
    case = read_case(ROW)
    alone = explain(
        step_problem(case.model, case.cluster, case.job, None, case.framework, Site()), case.layout
    )
    assert len(run.completions) == 1
    assert (run.step_time_s, run.step_time_lo_s, run.step_time_hi_s) == (
        alone.step_time_s,
        alone.step_time_lo_s,
        alone.step_time_hi_s,
    )
    assert (run.fits, run.fits_probability) == (alone.fits, alone.fits_probability)
    assert run.memory_counted_bytes == alone.memory_counted_bytes
    assert (run.effects, run.open_deviation) == ((), 0.0)


@pytest.mark.parametrize(("cell", "choice"), EMPTIED.items())
def test_an_emptied_cell_is_integrated_over_and_named(cell, choice):
    whole, emptied = predict_run(ROW), predict_run(ROW | {cell: None})
    assert choice in {effect.name for effect in emptied.effects}
    assert any(text.split(" (")[0] == choice for text in emptied.assumed)
    assert len(emptied.completions) > 1
    assert emptied.weights.sum() == pytest.approx(1)
    assert emptied.step_time_lo_s < emptied.step_time_s < emptied.step_time_hi_s
    # Not to say it never narrows what is known by much.
    width = np.log(emptied.step_time_hi_s / emptied.step_time_lo_s)
    assert width > 0.9 * np.log(whole.step_time_hi_s / whole.step_time_lo_s)


@pytest.mark.parametrize("devices", [16, 1024])
def test_who_competes_tunes_a_small_machine_like_a_large_one(devices: int) -> None:
    """What a submission leaves open is taken as fast as on the largest machines, where people tune
    most."""
    open_row = ROW | {
        "n_devices": devices,
        "global_batch": 4 * devices,
        "tp": None,
        "dp": None,
        "micro_batch": None,
    }
    usual = predict_run(open_row)
    competing = predict_run(open_row | {"source": "MLPerf Training v9.9"})
    if devices > 512:
        assert competing.step_time_s == usual.step_time_s
    else:
        assert competing.step_time_s < usual.step_time_s
        assert competing.open_deviation < usual.open_deviation


def test_who_competes_and_states_all_is_predicted_like_anybody() -> None:
    assert (
        predict_run(ROW | {"source": "MLPerf Training v9.9"}).to_dict()
        == predict_run(ROW).to_dict()
    )


def open_choices_of(**cells) -> set[str]:
    return {text.split(" (")[0] for text in predict_run(ROW | cells).assumed}


def test_a_switch_that_a_run_does_not_state_is_open_where_its_framework_has_it():
    silent = "overlap_grad_reduce=1; overlap_param_gather=1; layer_cuda_graph=0"
    assert "tp_overlap" not in open_choices_of()
    assert "tp_overlap" in open_choices_of(launch_and_overlap=silent)
    assert "tp_overlap" not in open_choices_of(
        launch_and_overlap=silent, framework="torchtitan@2025"
    )


def test_every_open_choice_tells_its_value():
    """Also those that a run states by a switch of its own: they are counted."""
    case = read_case(ROW)
    for choice in OPEN_CHOICES:
        # Switches tell what they are of every run; the others where they are relevant.
        if choice.matters(case) or choice.name in (
            "chunked_loss",
            "fp8_activation_inputs",
            "operation_fuser",
        ):
            assert choice.value(case)


def test_a_run_of_experts_may_hide_their_exchanges_behind_another_micro_batch():
    experts = {
        "model": "qwen3-30b-a3b",
        "tp": 1,
        "pp": 2,
        "dp": 8,
        "ep": 8,
        "seq_len": 4096,
        "etp": 1,
    }
    assert "ep_overlap" in open_choices_of(**experts, vpp=3)
    # It takes two model chunks in a pipeline, and layers that are not repeated as a whole.
    assert "ep_overlap" not in open_choices_of(**experts)
    assert "ep_overlap" not in open_choices_of(**experts, vpp=3, recompute="full")
    assert "ep_overlap" not in open_choices_of(**experts, vpp=3, framework="megatron-core@2024")


def test_experts_of_maxtext_may_have_dropped_tokens():
    cells = {
        "model": "mixtral-8x7b",
        "tp": 1,
        "pp": 1,
        "dp": 8,
        "ep": 1,
        "seq_len": 4096,
        "recompute": "full",
    }
    cells |= {"launch_and_overlap": None, "framework": "maxtext@2025"}
    run = predict_run(ROW | cells)
    capacities = {
        (c.job.experts.expert_capacity_factor, c.job.experts.einsum_dispatch)
        for c in run.completions
    }
    assert capacities == {(None, False), (1.25, True)}
    for settled in (
        {"framework": "maxtext@2026"},
        {"model": "llama2-7b"},
        {"job.expert_capacity_factor": 1.0},
    ):
        assert "expert_capacity_factor" not in open_choices_of(**cells | settled)


def test_a_node_may_have_one_adapter_of_the_rate_that_is_told_or_several():
    run = predict_run(ROW | {"inter_link": "100 Gb/s RoCE"})
    rates = {case.cluster.levels[-1].bandwidth_bytes_per_s for case in run.completions}
    assert rates <= {12.5e9 / parts for parts in (1, 2, 4, 8)}
    assert len(rates) > 1
    counted = predict_run(ROW | {"inter_link": "100 Gb/s RoCE", "nics_per_node": 2})
    assert len(counted.completions) == 1


def test_a_framework_with_several_dispatchers_leaves_open_which_exchanges_tokens():
    experts = ROW | {"model": "mixtral-8x7b", "ep": 8, "seq_len": 4096}
    run = predict_run(experts)
    assert {case.job.experts.expert_dispatcher for case in run.completions} == {
        "alltoall",
        "deepep",
        "hybridep",
    }
    assert any(text.startswith("expert_dispatcher") for text in run.assumed)
    # Its kernels are written for Hopper and what came after.
    older = predict_run(experts | {"device": "A100-SXM4-80GB"})
    assert {case.job.experts.expert_dispatcher for case in older.completions} == {"alltoall"}
    # DeepEP reaches eight ranks by NVLink, so that nobody takes it in a rack.
    rack = predict_run(experts | {"device": "GB200-NVL72"})
    assert {case.job.experts.expert_dispatcher for case in rack.completions} == {
        "alltoall",
        "hybridep",
    }
    stated = predict_run(experts | {"job.expert_dispatcher": "deepep"})
    assert {case.job.experts.expert_dispatcher for case in stated.completions} == {"deepep"}


@pytest.mark.parametrize(
    ("framework", "model", "graphs"),
    [
        ("nemo@2024", "llama3-8b", {"none", "layers"}),
        ("nemo@2025", "llama3-8b", {"none", "layers", "step"}),
        # The host has to know the sizes of experts' products, unless kernels read them on the
        # device.
        ("nemo@2025", "mixtral-8x7b", {"none", "layers"}),
        ("nemo@2026", "mixtral-8x7b", {"none", "layers", "step"}),
        ("megatron-core@2025", "llama3-8b", {"none"}),
    ],
)
def test_graphs_of_layers_or_of_the_step_are_open_where_the_framework_has_them(
    framework, model, graphs
):
    row = ROW | {
        "framework": framework,
        "model": model,
        "seq_len": 4096,
        "launch_and_overlap": None,
    }
    run = predict_run(row)
    assert {case.job.kernels.cuda_graphs for case in run.completions} == graphs


def test_the_choice_that_moves_most_comes_first():
    run = predict_run(ROW | {"recompute": None, "flash_attention": None, "inter_link": None})
    variances = [effect.variance for effect in run.effects]
    assert variances == sorted(variances, reverse=True)
    assert [text.split(" (")[0] for text in run.assumed[: len(run.effects)]] == [
        each.name for each in run.effects
    ]


def test_the_same_question_has_the_same_answer():
    row = ROW | {"framework": None, "recompute": None, "micro_batch": None}
    first, again = predict_run(row), predict_run(dict(row))
    assert (first.step_time_s, first.assumed, first.weights.tolist()) == (
        again.step_time_s,
        again.assumed,
        again.weights.tolist(),
    )


def test_no_framework_is_a_mixture_of_the_known_ones():
    run = predict_run(ROW | {"framework": None, "year": 2024, "launch_and_overlap": None})
    names = {case.framework.name for case in run.completions}
    assert len(names) >= 3
    assert "generic" not in names
    assert (
        "maxtext" not in names
        or run.weights[[case.framework.name == "maxtext" for case in run.completions]].max() < 0.5
    )
    named = predict_run(
        ROW | {"framework": "pytorch-rocm@2024", "launch_and_overlap": None, "tp": 1, "dp": 16}
    )
    assert {case.framework.name for case in named.completions} == {"pytorch"}


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72", "tpu-v5p-pod"])
def test_a_machine_is_as_large_as_its_devices_make_it(cluster):
    """Whatever links them: people try as hard with 128 devices of two racks as with those of 16
    nodes."""
    case = read_case(ROW)
    scales = []
    for devices in (64, 128, 1024):
        large = replace(case.relaid(dp=devices // 2), cluster=catalog.cluster(cluster))
        scales.append(case_features(large, 2025).scale)
    assert scales == ["up to 8 nodes", "8 to 64 nodes", "above 64 nodes"]


NEEDS = ["up to 0.25", "0.25 to 0.5", "0.5 to 1", "1 to 2", "above 2"]
"""Classes of the memory that a run needs without recomputation, from little to much."""


def need(**cells) -> int:
    """Place of a run's class in `NEEDS`."""
    return NEEDS.index(case_features(read_case(ROW | cells), 2025).need.removesuffix(" of memory"))


def test_need_of_memory_falls_with_shards_and_grows_with_the_model_and_its_tokens():
    # 8 billion parameters over two ranks: 16 + 4 + 6 GB of states, and 17 GB for a sequence of 8192
    # tokens, of 80 GB.
    assert NEEDS[need()] == "0.5 to 1"
    assert need(tp=8, dp=2) < need(tp=2) <= need(tp=1, dp=16)
    assert need(zero_stage=3) <= need(zero_stage=1) < need(zero_stage=0)
    lengths = [need(seq_len=length) for length in (2048, 8192, 32768)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    # Recomputation is what the class explains, so it does not move it.
    assert need(recompute="full") == need()
    many_devices = {
        "model": "mixtral-8x7b",
        "n_devices": 64,
        "tp": 1,
        "dp": 64,
        "global_batch": 64,
        "seq_len": 4096,
    }
    assert need(**many_devices, ep=8) < need(**many_devices, ep=1)


def test_need_of_memory_by_hand():
    """States, then activations of 34 bytes per token, element and layer, over the memory of a
    device."""
    case = read_case(ROW | {"model": "gpt3-13b", "seq_len": 2048, "zero_stage": 0})
    params = parameter_count(case.model)
    states = {
        "training": params / 2 * (2 + 4 + 12),
        "frozen": params / 2 * 2,
        "frozen in 8 bits": params / 2 * 1,
    }
    activations = 34 * 2048 / 2 * case.model.hidden * case.model.layers
    jobs = {
        "training": {},
        "frozen": {"frozen": True, "adapter_rank": 16},
        "frozen in 8 bits": {
            "frozen": True,
            "adapter_rank": 16,
            "dtype": "fp8",
            "fp8_params": True,
        },
    }
    for name, fields in jobs.items():
        # The class changes where the device is just as large as a class's bound says.
        needed = states[name] + activations
        classes = []
        for share in (0.99, 1.01):
            part = replace(case.cluster.device, memory_bytes=needed / share)
            sized = replace(case.with_job(**fields), cluster=replace(case.cluster, device=part))
            classes.append(case_features(sized, 2025).need)
        assert classes == ["0.5 to 1 of memory", "1 to 2 of memory"], name


def test_who_has_memory_to_spare_repeats_less():
    """Runs that state their recomputation say so: the more of a device a run fills, the more it
    repeats."""
    priors = choice_priors()
    unrepeated = []
    for name in NEEDS:
        contexts = ("", f"need {name} of memory")
        chances = priors.probabilities("recompute", contexts, ("none", "selective", "full"))
        unrepeated.append(float(chances[0]))
    assert unrepeated == sorted(unrepeated, reverse=True)
    roomy, tight = (
        predict_run(ROW | {"recompute": None, "tp": 8, "dp": 2}),
        predict_run(ROW | {"recompute": None}),
    )

    def share_without(run) -> float:
        return sum(
            w
            for w, c in zip(run.weights, run.completions, strict=True)
            if c.layout.recompute == "none" and not c.layout.recompute_full_layers
        )

    assert share_without(roomy) > share_without(tight)


def test_a_name_means_what_it_meant_in_its_year():
    row = ROW | {"launch_and_overlap": None}
    names = {2021: "megatron-lm", 2025: "megatron-core"}
    for year, name in names.items():
        run = predict_run(row | {"framework": f"megatron@{year}"})
        assert {case.framework.name for case in run.completions} == {name}


def test_a_policy_of_its_own_may_copy_activations_to_the_host():
    """A run that fits only with activations on the host has them there, if its words leave that
    open."""
    columns = {
        "device": "TPU-v6e",
        "n_devices": 8,
        "devices_per_node": 8,
        "tp": 1,
        "pp": 1,
        "dp": 8,
        "zero_stage": 3,
    }
    batch = {"micro_batch": 4, "num_microbatches": 1, "global_batch": 32, "seq_len": 8192}
    row = (
        ROW
        | columns
        | batch
        | {
            "model": "gpt3-1.3b",
            "framework": "maxtext@2025",
            "launch_and_overlap": None,
            "inter_link": None,
        }
    )
    own = predict_run(row | {"recompute": "custom"})
    full = predict_run(row | {"recompute": "full"})
    assert own.fits_probability >= full.fits_probability
    assert any(case.layout.offload_layers for case in own.completions)
    assert not any(case.layout.offload_layers for case in full.completions)


@pytest.mark.parametrize("seq_len", [1024, 8192, 32768])
def test_conversations_that_a_trainer_packs_attend_to_themselves_alone(seq_len):
    """Attention to documents is no longer than to the whole sequence, and the longer that is the
    more it saves."""
    row = ROW | {"seq_len": seq_len, "framework_as_stated": "Megatron-SWIFT"}
    single, packed = predict_run(ROW | {"seq_len": seq_len}), predict_run(row)
    assert "packing" in {effect.name for effect in packed.effects}
    assert packed.step_time_s <= single.step_time_s * (1 + 1e-9)
    for case in packed.completions:
        assert case.job.attended_tokens in (
            seq_len,
            pytest.approx(min(seq_len, 2 * CONVERSATION_TOKENS)),
        )
    # Who states the lengths leaves nothing open.
    stated = predict_run(row | {"job.rms_tokens": seq_len / 2})
    assert "packing" not in {effect.name for effect in stated.effects}
    assert {case.job.rms_tokens for case in stated.completions} == {seq_len / 2}


def test_a_framework_without_a_year_is_that_of_the_row_s_year():
    row = ROW | {"framework": "megatron-lm", "launch_and_overlap": None}
    assert predict_run(row | {"year": 2021}).case.framework.since == 2021
    assert predict_run(row | {"year": 2023}).case.framework.since == 2023
    # Without any year it may be any version.
    versions = {case.framework.label for case in predict_run(row).completions}
    assert {"megatron-lm@2021", "megatron-lm@2023"} <= versions


def test_a_run_that_ran_but_cannot_have_fitted_says_so():
    run = predict_run(ROW | {"micro_batch": 8, "seq_len": 65536, "n_devices": 8, "dp": 4})
    assert run.fits_probability < 0.1
    (said,) = [text for text in run.assumed if text.startswith("memory: predicted to need")]
    # What takes most is what a reader would check first.
    assert said.endswith("GiB")
    assert "; the largest part, activations, takes" in said
    assert 0 < run.contradicts <= 1
    # One that is said to have run out of memory contradicts nothing.
    usual = predict_run(ROW)
    assert "memory" not in " ".join(usual.assumed)
    assert usual.contradicts == 0


WORDS = {
    "global_batch": 64,
    "seq_len": 8192,
    "dtype": "bf16",
    "devices": 16,
    "framework": "megatron-core@2025",
    "flash_attention": True,
    "cuda_graphs": "none",
}
LAYOUT = {
    "tp": 2,
    "pp": 1,
    "dp": 8,
    "cp": 1,
    "micro_batch": 1,
    "recompute": "none",
    "zero": 1,
    "sequence_parallel": "true",
    "overlap_grad_reduce": "true",
    "overlap_param_gather": "true",
    "tp_overlap": "false",
}
OF_WORDS = {"zero_stage": "zero", "inter_link": ""}
"""Names of cells in the notation of layouts, where they differ."""


def described(without: str = ""):
    """The run of `ROW` in the words of a job, without one of its settings."""
    words = {name: value for name, value in WORDS.items() if name != without}
    layout = ",".join(
        f"{name}={value}"
        for name, value in LAYOUT.items()
        if name != OF_WORDS.get(without, without)
    )
    return described_job("llama3-8b", read_case(ROW).cluster, layout, **words)


@pytest.mark.parametrize(
    "cell", ["", "recompute", "zero_stage", "sequence_parallel", "flash_attention", "micro_batch"]
)
def test_a_job_and_a_row_describe_one_run_alike(cell):
    row, job = predict_run(ROW | {cell: None} if cell else ROW), predict_run(described(cell))
    assert (row.step_time_s, row.step_time_lo_s, row.step_time_hi_s, row.fits_probability) == (
        job.step_time_s,
        job.step_time_lo_s,
        job.step_time_hi_s,
        job.fits_probability,
    )
    assert row.assumed == job.assumed


def test_validate_cases_says_what_predict_run_says():
    import pandas as pd

    row = ROW | {"recompute": None}
    told = predict_cases(pd.DataFrame([row])).iloc[0]
    site = Site(unstated=told["unstated_share"])
    run = predict_run(row, None, site)
    assert (told["predicted_iter_time_s"], told["lo_s"], told["hi_s"]) == (
        run.step_time_s,
        run.step_time_lo_s,
        run.step_time_hi_s,
    )
    assert told["assumed"] == ", ".join(run.assumed)


def test_the_command_line_integrates_over_what_flags_leave_open(capsys):
    argv = [
        "predict",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "64",
        "--open",
    ]
    assert main([*argv, "--devices", "16", "--framework", "torchtitan@2025", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["completions"] > 1
    assert {"degrees", "recompute"} <= {choice["name"] for choice in told["open_choices"]}
    run = predict_run(
        described_job(
            "llama3-8b", "dgx-h100", framework="torchtitan@2025", devices=16, global_batch=64
        )
    )
    assert (told["step_time_s"], told["assumed"]) == (run.step_time_s, list(run.assumed))
    assert main([*argv, "--layout", "tp=2,dp=8"]) == 0
    assert "open settings" in capsys.readouterr().out


def test_a_point_prediction_names_what_it_takes_at_its_defaults(capsys):
    argv = ["predict", "--model", "llama3-8b", "--cluster", "dgx-h100", "--global-batch", "64"]
    assert main([*argv, "--layout", "tp=2,dp=8", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["not_stated"]
    assert names[0] == "framework"
    assert {"recompute", "zero", "micro_batch"} <= set(names)
    stated = "tp=2,dp=8,micro_batch=1,recompute=none,zero=1"
    assert main([*argv, "--layout", stated, "--framework", "megatron-core@2025", "--json"]) == 0
    fewer = json.loads(capsys.readouterr().out)["not_stated"]
    assert not {"framework", "recompute", "zero", "micro_batch"} & set(fewer)
    assert main([*argv, "--layout", "tp=2,dp=8"]) == 0
    assert "not stated, so defaults are used: framework" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--devices", "16", "--strict"], "--strict needs one layout with every setting stated"),
        (
            ["--devices", "16", "--tokens", "1e12"],
            "--tokens needs one layout with every setting stated",
        ),
        ([], "--layout"),
    ],
)
def test_what_does_not_go_with_open_is_refused(more, reason, capsys):
    argv = [
        "predict",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "64",
        "--open",
        *more,
    ]
    assert main(argv) == 2
    assert reason in capsys.readouterr().err


def test_a_described_job_names_what_is_wrong():
    with pytest.raises(PerfModelError, match="global_batch is missing"):
        described_job("llama3-8b", "dgx-h100")
    with pytest.raises(PerfModelError, match="unknown keyword of a job 'batch'"):
        described_job("llama3-8b", catalog.cluster("dgx-h100"), global_batch=8, batch=1)


@pytest.mark.parametrize(
    ("device", "choices"), [("V100-SXM2-32GB", {False}), ("A100-SXM4-80GB", {False, True})]
)
def test_devices_before_flash_attention_run_none(device, choices):
    older = {
        "model": "gpt2-345m",
        "seq_len": 1024,
        "dtype": "fp16",
        "framework": "megatron-lm@2023",
    }
    run = predict_run(ROW | older | {"device": device, "inter_link": None, "flash_attention": None})
    assert {case.job.kernels.flash_attention for case in run.completions} == choices


def test_text_of_pretraining_data_fills_less_of_longer_sequences():
    assert [round(real_tokens(length) / length, 2) for length in (64, 128, 256, 512)] == [
        1.0,
        0.83,
        0.66,
        0.52,
    ]


@pytest.mark.parametrize(
    ("framework", "columns", "left_open"),
    [
        ("pytorch@2020", {}, {"padding", "encoder_head"}),
        # its loader sorts by length, and its code gathers masked tokens
        (
            "pytorch@2021",
            {},
            set(),
        ),
        ("tensorflow-xla@2021", {}, {"encoder_head"}),  # compiled steps have fixed shapes
        ("oneflow@2020", {}, {"padding"}),  # its code gathers masked tokens
        ("pytorch@2020", {"job.mean_tokens": 100, "job.masked_head": 1}, set()),
        ("pytorch@2020", {"job.rms_tokens": 100, "job.head": "token_labels"}, set()),
    ],
)
def test_encoders_of_text_leave_padding_and_head_open(framework, columns, left_open):
    plain = {"tp": 1, "dp": 16, "zero_stage": 0, "sequence_parallel": 0, "launch_and_overlap": ""}
    encoder = {"model": "bert-large", "seq_len": 128, "framework": framework, "dtype": "fp16"}
    row = ROW | plain | encoder | columns
    names = {effect.name for effect in predict_run(row).effects}
    assert names & {"padding", "encoder_head"} == left_open


@pytest.mark.parametrize(
    ("seq_len", "head", "most_tokens"),
    [
        (128, "vocabulary", None),  # the shortest pre-training is not sorted
        (512, "vocabulary", real_tokens(512) + 32),  # half a bin is padding
        (384, "token_labels", None),  # a task pads all to its length
    ],
)
def test_a_loader_that_sorts_by_length_pads_half_a_bin(seq_len, head, most_tokens):
    plain = {"tp": 1, "dp": 16, "zero_stage": 0, "sequence_parallel": 0, "launch_and_overlap": ""}
    encoder = {
        "model": "bert-large",
        "seq_len": seq_len,
        "framework": "pytorch@2021",
        "dtype": "fp16",
    }
    jobs = [completion.job for completion in predict_run(ROW | plain | encoder).completions]
    assert {(job.loss.head, job.mean_tokens) for job in jobs} == {(head, most_tokens)}


def test_encoders_of_unstated_length_may_have_either_of_berts_lengths():
    """A batch that only fits at the shorter one had it."""
    plain = {"tp": 1, "dp": 16, "zero_stage": 0, "sequence_parallel": 0, "launch_and_overlap": ""}
    encoder = {"model": "bert-large", "seq_len": None, "framework": "oneflow@2020", "dtype": "fp16"}
    run = predict_run(ROW | plain | encoder)
    lengths = {
        case.job.seq_len: weight for case, weight in zip(run.completions, run.weights, strict=True)
    }
    assert set(lengths) == {128, 512}
    stated = predict_run(ROW | plain | encoder | {"seq_len": 512})
    assert {case.job.seq_len for case in stated.completions} == {512}
    decoder = predict_run(ROW | plain | encoder | {"model": "gpt2-345m"})
    assert {case.job.seq_len for case in decoder.completions} == {1024}
