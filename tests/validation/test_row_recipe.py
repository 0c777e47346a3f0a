"""What a row leaves to the performance recipe of its release is what that recipe sets."""

import re

import pandas as pd
import pytest
from prepared_runs import prepare
from test_case_rows import ROW

from perfmodel import catalog
from perfmodel.catalog import recipe
from perfmodel.spec import Transformer
from perfmodel.validation import RowRun, read_case
from perfmodel.validation.rows import rows_of
from perfmodel.validation.unstated import completions
from perfmodel.validation.unstated.priors import choice_priors

V3 = ROW | {
    "model": "deepseekv3",
    "framework": "megatron-bridge@2026",
    "device": "GB200-NVL72",
    "dtype": "mxfp8",
    "tp": 1,
    "dp": 64,
    "pp": 4,
    "vpp": 4,
    "ep": 64,
    "n_devices": 256,
    "global_batch": 4096,
    "micro_batch": 1,
    "recompute": None,
    "num_microbatches": None,
    "layers": None,
    "hidden": None,
    "heads": None,
    "kv_heads": None,
    "ffn_hidden": None,
    "vocab": None,
    "params_b": None,
    "seq_len": 4096,
}


def at(release: str, **cells: object):
    return read_case(V3 | {"recipe_release": f"v{release}"} | cells)


def test_releases_differ_in_what_their_recipes_set():
    early, late = at("26.02"), at("26.06")
    assert (early.job.kernels.cuda_graphs, early.layout.overlap.ep_overlap) == ("layers", False)
    assert (late.job.kernels.cuda_graphs, late.layout.overlap.ep_overlap) == ("step", True)
    assert early.layout.recompute == late.layout.recompute == "selective"
    assert (
        early.job.activations.recompute_modules
        == late.job.activations.recompute_modules
        == ("mla_up_proj",)
    )
    assert early.recompute_stated
    assert at("26.06", device="GB300-NVL72").layout.recompute == "none"
    assert (early.job.experts.fused_experts, late.job.experts.fused_experts) == (False, True)
    assert not late.job.narrow.fp8_attention
    assert at("26.06", device="GB300-NVL72", flash_attention=1).job.narrow.fp8_attention
    assert not at("26.06", device="GB300-NVL72", flash_attention=0).job.narrow.fp8_attention


def test_what_a_row_says_goes_before_its_recipe():
    said = at("26.06", recompute="full", recompute_detail="full")
    assert said.layout.recompute == "full"
    assert not read_case(V3).layout.overlap.ep_overlap


def test_the_last_stage_has_fewer_layers_for_what_else_it_has():
    assert at("26.06").layout.partition == (*[4] * 15, 1)
    assert at("26.06", pp=8, dp=32, ep=32, vpp=1).layout.partition == (*[8] * 7, 5)
    # two layers a stage are less than three
    assert at("26.06", pp=8, dp=32, ep=32, vpp=4).layout.partition is None


@pytest.mark.parametrize(("gflop", "modules"), [(259.9, 1), (249.7, 0), (None, 0)])
def test_rates_tell_whether_further_tokens_are_predicted(gflop, modules):
    rates = {
        "measured_tokens_per_s_per_device": 5000,
        "measured_tflops_per_device": gflop and 5 * gflop,
    }
    model = at("26.06", **rates).model
    assert (model.name, model.mtp.mtp_layers) == ("deepseek-v3", modules)


def test_every_recipe_names_models_and_devices_of_the_catalog():
    names = ("megatron-bridge", "megatron-deepspeed", "nemo", "pax", "pytorch")
    known = [one for name in names for one in catalog._recipes._recipes(name)]
    assert len(known) > 2
    for one in known:
        assert [catalog.model(name).name for name in one.models] == list(one.models)
        assert [catalog.device(name).name for name in one.devices] == list(one.devices)


@pytest.mark.parametrize(
    ("model", "device", "dtype", "release", "found"),
    [
        ("qwen3-235b-a22b", "H100-SXM5-80GB", "current", "25.09", {}),
        (
            "qwen3-235b-a22b",
            "H100-SXM5-80GB",
            "current",
            "26.04",
            {"tp_overlap": False, "ep_overlap": True, "expert_dispatcher": "alltoall"},
        ),
        ("nobody's", "H100-SXM5-80GB", "bf16", "26.04", {}),
    ],
)
def test_a_recipe_is_found_by_model_device_element_type_and_release(
    model, device, dtype, release, found
):
    assert recipe("megatron-bridge", model, device, dtype, release) == found
    assert recipe("no-framework", model, device, dtype, release) == {}


LLAMA = V3 | {
    "model": "llama3-70b",
    "tp": 1,
    "pp": 1,
    "vpp": 1,
    "ep": 1,
    "dp": 64,
    "n_devices": 64,
    "micro_batch": 2,
    "global_batch": 256,
    "dtype": "fp8",
    "seq_len": 8192,
    "zero_stage": 3,
    "sharding": "Megatron FSDP group 64",
}


@pytest.mark.parametrize(
    ("device", "dtype", "release", "layers"),
    [
        ("GB200-NVL72", "fp8", "25.09", 40),
        ("GB200-NVL72", "fp8", "26.04", 40),
        ("GB200-NVL72", "bf16", "26.02", 20),
        ("GB300-NVL72", "fp8", "26.06", 20),
        ("B200-SXM-180GB", "fp8", "25.11", 5),
        ("B200-SXM-180GB", "fp8", "25.09", 0),
    ],
)
def test_fsdp_has_as_many_layers_on_the_host_as_its_recipe_says(device, dtype, release, layers):
    row = LLAMA | {"device": device, "dtype": dtype, "recipe_release": f"v{release}"}
    case = read_case(row)
    assert (case.layout.offload_layers, case.layout.recompute, case.layout.zero) == (
        layers,
        "none",
        3,
    )
    assert case.layout.recompute_full_layers == (None if layers else (5,))
    assert case.recompute_stated
    assert (
        read_case(row | {"recompute": "full", "recompute_detail": "full"}).layout.offload_layers
        == 0
    )
    assert (
        read_case(
            row
            | {
                "tp": 2,
                "pp": 4,
                "vpp": 5,
                "dp": 8,
                "zero_stage": 1,
                "sharding": None,
                "micro_batch": 1,
            }
        ).layout.offload_layers
        == 0
    )


def test_a_recipe_without_releases_is_of_several_frameworks():
    pax = V3 | {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "dp": 256,
        "ep": 1,
        "micro_batch": 8,
        "global_batch": 2048,
        "dtype": "bf16",
    }
    pax |= {
        "model": "gpt3-5B",
        "framework": "pax-te@2025",
        "family": "gpt",
        "device": "H100-SXM5-80GB",
    }
    pax |= {"seq_len": 2048, "flash_attention": None, "recipe_release": "default"}
    read = read_case(pax)
    assert (read.layout.recompute, read.recompute_stated) == ("selective", True)
    assert read.job.activations.recompute_modules == ("core_attn", "layernorm", "mlp_act")
    assert read.job.kernels.flash_attention
    assert not read_case(pax | {"model": "gpt3-126M"}).job.kernels.flash_attention
    assert not read_case(pax | {"recipe_release": ""}).recompute_stated
    assert recipe("pax", "gpt3-5b", "H100-SXM5-80GB", "bf16", "") == recipe(
        "pax-te", "gpt3-5b", "A100", "fp8", "25.04"
    )
    assert recipe("megatron-bridge", "llama3-8b", "GB200-NVL72", "current", "") == {}


def test_default_configurations_of_a_launcher_are_its_recipes():
    row = V3 | {
        "framework": "nemo@2023",
        "device": "A100-SXM4-80GB",
        "dtype": "bf16",
        "vpp": 1,
        "ep": 1,
        "pp": 1,
    }
    row |= {"tp": 2, "dp": 8, "n_devices": 16, "seq_len": 512, "recipe_release": "default"}
    overlaps = {
        name: read_case(row | {"model": name}).layout.overlap.overlap_grad_reduce
        for name in ("mt5-3b", "gpt3-5b")
    }
    assert overlaps == {"mt5-3b": False, "gpt3-5b": True}
    assert read_case(
        row | {"model": "mt5-3b", "recipe_release": ""}
    ).layout.overlap.overlap_grad_reduce
    bert = row | {
        "model": "bert-base",
        "framework": "pytorch@2020",
        "tp": 1,
        "dp": 16,
        "recipe_release": "default",
    }
    assert not read_case(bert).layout.overlap.overlap_grad_reduce
    assert read_case(bert | {"recipe_release": ""}).layout.overlap.overlap_grad_reduce


@pytest.mark.parametrize(
    ("notes", "blocks"),
    [("source section 'Re-do'", True), ("CUDA launch blocking state not stated", False)],
)
def test_launch_scripts_beside_a_page_are_its_recipes(notes, blocks):
    row = V3 | {
        "framework": "megatron-deepspeed@2022",
        "device": "A100-SXM4-80GB",
        "dtype": "fp16",
        "vpp": 1,
        "ep": 1,
    }
    row |= {
        "model": "gpt3-175b",
        "tp": 8,
        "pp": 8,
        "dp": 4,
        "n_devices": 256,
        "seq_len": 2048,
        "notes": notes,
    }
    page = "bigscience-workshop/bigscience@9e64ede:train/{}/chronicles-prequel.md"
    pages = [row | {"url_or_repo": page.format(name)} for name in ("tr11-176B-ml", "tr10-104B-ml")]
    its_own, other = map(read_case, rows_of(prepare(pd.DataFrame(pages))))
    assert its_own.job.kernels.blocking_launches == blocks
    assert not other.job.kernels.blocking_launches


@pytest.mark.parametrize(
    ("tag", "sharded", "replicas"), [("v24.11.1", True, {4}), ("v25.04", False, {1, 2, 4})]
)
def test_a_recipe_of_launch_scripts_is_found_by_the_tag_of_the_page(tag, sharded, replicas):
    row = V3 | {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "dp": 32,
        "ep": 1,
        "micro_batch": 4,
        "n_devices": 32,
        "global_batch": 128,
    }
    row |= {
        "model": "gpt-5B (paxml)",
        "framework": "pax@2024",
        "family": "gpt",
        "device": "H100-SXM5-80GB",
    }
    row |= {
        "layers": 24,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 32,
        "ffn_hidden": 16384,
        "vocab": 50304,
    }
    row |= {
        "dtype": "fp8",
        "seq_len": 2048,
        "zero_stage": 3,
        "sharding": "FSDP+DP",
        "devices_per_node": 8,
    }
    row |= {"recipe_release": re.sub(r"\.1$", "", tag), "flash_attention": None}
    found = [completion.case for completion in completions(RowRun(row), None, choice_priors())[0]]
    assert {case.layout.replicate for case in found} == replicas
    assert {case.layout.overlap.overlap_param_gather for case in found} == {not sharded}
    assert all(("replicate" in case.assumed) != sharded for case in found)
    assert all(case.recompute_stated and case.layout.recompute == "selective" for case in found)


def test_a_recipe_says_what_stays_wide():
    row = V3 | {
        "model": "nemotron-3-super",
        "device": "GB300-NVL72",
        "pp": 1,
        "vpp": 1,
        "n_devices": 64,
    }
    row |= {"recipe_release": "v26.06"}
    narrow, wider = (read_case(row | {"dtype": dtype}).job for dtype in ("nvfp4", "mxfp8"))
    assert narrow.narrow.wide_last_layers == 14
    assert set(narrow.narrow.wide_modules) == {
        "attention",
        "latent",
        "further_tokens",
        "mamba_output",
    }
    assert (wider.narrow.wide_last_layers, wider.narrow.wide_modules) == (0, ("further_tokens",))


def test_a_recipe_may_leave_tensor_parallel_collectives_alone():
    row = V3 | {"pp": 1, "vpp": 1, "tp": 2, "dp": 32, "n_devices": 64, "recipe_release": "v26.06"}
    row |= {"model": "nemotron-3-super", "device": "GB200-NVL72", "dtype": "nvfp4"}
    assert not read_case(row).layout.overlap.tp_overlap
    # Megatron-Bridge cuts them into ring steps elsewhere
    assert read_case(row | {"recipe_release": ""}).layout.overlap.tp_overlap


@pytest.mark.parametrize(
    ("cells", "switch"),
    [
        ({"notes": "torch.compile=yes; iteration time derived"}, "; compile=1"),
        ({"notes": "batch 1; torch.compile; median"}, "; compile=1"),
        ({"notes": "torch.compile=no; iteration time derived"}, "; compile=0"),
        ({"notes": "torch.compile off, fused AdamW"}, "; compile=0"),
        ({"notes": "one logged step; no compile"}, ""),
        ({"framework_as_stated": "torchtitan@2026-07 compile"}, "; compile=1"),
        ({"dtype_recipe": "fp8 compile"}, "; compile=1"),
        ({"dtype_recipe": "fp8 nocompile prototype"}, ""),
    ],
)
def test_notes_tell_whether_a_launch_compiles(cells: dict[str, str], switch: str) -> None:
    row = {
        "notes": "",
        "framework": "torchtitan@2025",
        "launch_and_overlap": "overlap_dp=1",
    } | cells
    (launch,) = prepare(pd.DataFrame([row]))["launch_and_overlap"]
    assert launch == f"overlap_dp=1{switch}"


@pytest.mark.parametrize(
    ("stated", "framework"),
    [("ATorch FSDP", "atorch@2023"), ("PyTorch FSDP", "fsdp@2023"), (None, "fsdp@2023")],
)
def test_rows_of_atorch_are_of_its_own_entry(stated: str | None, framework: str) -> None:
    row = {"notes": "", "framework": "fsdp@2023", "framework_as_stated": stated}
    assert prepare(pd.DataFrame([row]))["framework"].tolist() == [framework]


@pytest.mark.parametrize(
    ("page", "recompute", "settings"),
    [
        (
            "FlagOpen/FlagPerf@1b5:training/nvidia/llama2_7b-deepspeed/README.md",
            None,
            ("true", "none"),
        ),
        (
            "FlagOpen/FlagPerf@1b5:training/nvidia/llama2_7b-deepspeed/README.md",
            "full",
            ("true", "full"),
        ),
        (
            "FlagOpen/FlagPerf@1b5:training/nvidia/llama2_7b-megatron-deepspeed/README.md",
            None,
            (None, None),
        ),
        ("other/benchmarks@1b5:training/nvidia/llama2_7b-deepspeed/README.md", None, (None, None)),
    ],
)
def test_scripts_of_a_benchmark_tell_what_their_page_leaves_out(
    page: str, recompute: str | None, settings: tuple[str | None, str | None]
) -> None:
    row = {
        "notes": "",
        "url_or_repo": page,
        "recompute": recompute,
        "job.saves_gathered_weights": None,
    }
    prepared_row = prepare(pd.DataFrame([row])).iloc[0]
    assert (prepared_row["job.saves_gathered_weights"], prepared_row["recompute"]) == settings


@pytest.mark.parametrize(
    ("per_device", "accumulations", "replicas"), [(8, 4, 8), (8, 4, 32), (6, 2, 1), (4, 1, 16)]
)
def test_openlm_divides_the_batch_of_a_device_into_micro_batches(
    per_device: int, accumulations: int, replicas: int
) -> None:
    tokens_per_s, seq_len = 1e5, 2048
    collected_batch = per_device * accumulations * replicas
    row = {
        "notes": f"micro-batch {per_device} and {accumulations} accumulations of the page's command",
        "url_or_repo": "github mlfoundations/open_lm@9bb:MOE.md",
        "dp": replicas,
        "micro_batch": per_device,
        "num_microbatches": accumulations,
        "global_batch": collected_batch,
        "measured_iter_time_s": collected_batch * seq_len / tokens_per_s,
    }
    prepared_row = prepare(pd.DataFrame([row])).iloc[0]
    micro_batches = prepared_row["micro_batch"] * prepared_row["num_microbatches"]
    assert micro_batches == per_device
    assert prepared_row["global_batch"] == per_device * replicas
    # Tokens per second are what was measured.
    tokens = prepared_row["global_batch"] * seq_len
    assert tokens / prepared_row["measured_iter_time_s"] == pytest.approx(tokens_per_s)
    elsewhere = prepare(pd.DataFrame([row | {"url_or_repo": "github other/trainer"}])).iloc[0]
    assert elsewhere["global_batch"] == collected_batch


def test_notes_tell_which_layers_have_experts_and_how_many_tokens_these_take() -> None:
    notes = (
        "experts in every OTHER layer (moe-freq 2), which no column can say; capacity factor 1.25"
    )
    cells = {"family": "moe", "n_experts": 8, "top_k": 2, "layers": 12, "framework": "open_lm@2024"}
    (prepared_row,) = rows_of(prepare(pd.DataFrame([ROW | cells | {"notes": notes}])))
    case = read_case(prepared_row)
    assert isinstance(case.model, Transformer)
    assert case.model.experts is not None
    assert case.model.experts.every == 2
    assert case.job.experts.expert_capacity_factor == 1.25


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    ("page", "notes", "tp_overlaps", "gradients_overlap"),
    [
        (
            "MooreThreads/SimuMax@4dc:docs/b200.json",
            "Megatron-LM 0.14, no comm overlap, fp32",
            False,
            False,
        ),
        (
            "github NVIDIA/Megatron-LM@core_v0.15.3:t.png (README performance section)",
            "",
            True,
            True,
        ),
        ("github NVIDIA/Megatron-LM@core_v0.15.3:docs/other.md", "", None, True),
        (
            "github pytorch/torchtitan@b5b:benchmarks/t.md",
            "torch.compile=no; async tensor parallel",
            True,
            True,
        ),
        (
            "github pytorch/torchtitan@b5b:benchmarks/t.md",
            "torch.compile=no; vanilla tensor parallel",
            False,
            True,
        ),
    ],
)
def test_pages_and_notes_tell_what_communication_overlaps(
    tp: int, page: str, notes: str, tp_overlaps: bool | None, gradients_overlap: bool
) -> None:
    row = ROW | {
        "url_or_repo": page,
        "notes": notes,
        "tp": tp,
        "dp": 8 // tp,
        "framework": "megatron-core@2025",
    }
    row |= {"n_devices": 8, "pp": 1, "sharding": "overlapped grad reduce and param gather"}
    row |= dict.fromkeys(("layout.tp_overlap", "layout.overlap_grad_reduce"))
    if not gradients_overlap:
        row["sharding"] = None
    (prepared_row,) = rows_of(prepare(pd.DataFrame([row])))
    case = read_case(prepared_row)
    assert ("tp_overlap" in case.stated) == (
        tp_overlaps is not None and (tp > 1 or not gradients_overlap)
    )
    assert case.layout.overlap.tp_overlap == bool(tp_overlaps and tp > 1)
    assert case.layout.overlap.overlap_grad_reduce == gradients_overlap


def test_memory_that_torchtitan_and_kempnerforge_log_is_in_gib() -> None:
    rows = [
        {"notes": "", "memory_unit": "GB", "memory_kind": kind, "framework": framework}
        for kind, framework in (
            ("as logged by torchtitan", "torchtitan@2025"),
            ("torch reserved", "torchtitan@2025"),
            ("as logged", "kempnerforge@2026"),
            ("as logged", "fsdp@2026"),
        )
    ]
    assert prepare(pd.DataFrame(rows))["memory_unit"].tolist() == ["GiB", "GB", "GiB", "GB"]


def test_notes_tell_whether_liger_s_kernels_run_and_the_optimizer_is_sharded() -> None:
    rows = [
        {"notes": "step 10; Liger kernels; one sequence per rank", "zero_stage": None},
        {"notes": "prefer_reduce_scatter (optimizer states sharded)", "zero_stage": None},
        {"notes": "optimizer states sharded", "zero_stage": 2},
    ]
    table = prepare(pd.DataFrame(rows).assign(framework="deepspeed@2026", case_id="a"))
    assert [None if pd.isna(stage) else int(stage) for stage in table["zero_stage"]] == [None, 1, 2]
    stated = {"framework": "deepspeed@2026", "job.chunked_loss": "true", "job.eager_kernels": "[]"}
    stated |= {"job.in_place_activation": "true"}
    assert {name: table[name].tolist()[0] for name in stated} == stated
    liger, plain = read_case(ROW | stated).job, read_case(ROW | {"framework": "deepspeed@2026"}).job
    assert liger.loss.chunked_loss
    assert not plain.loss.chunked_loss
    assert liger.activations.in_place_activation
    assert not plain.activations.in_place_activation
    assert liger.kernels.eager_kernels == ()
    assert plain.kernels.eager_kernels


@pytest.mark.parametrize(
    ("notes", "settings"),
    [
        ("image and text encoders run in the step", ("false", "false", None)),
        ("EMA; image encoder runs in the step", ("false", None, "true")),
        ("text encoders run in the step; micro-batch 4", (None, "false", None)),
        ("latents and text are cached; DEMAND of 4", (None, None, None)),
    ],
)
def test_notes_tell_what_a_step_of_diffusion_runs_beside_the_network(
    notes: str, settings: tuple[str | None, ...]
) -> None:
    names = ["job.cached_latents", "job.cached_text", "job.weight_average"]
    row = dict.fromkeys(names) | {"notes": notes}
    prepared_row = prepare(pd.DataFrame([row])).iloc[0]
    assert tuple(prepared_row[name] for name in names) == settings


@pytest.mark.parametrize(
    ("page", "device", "notes", "read"),
    [
        ("pytorch/ao@1:a.md", "B200-SXM-180GB", "power limited", "B200-SXM-180GB 750W"),
        ("pytorch/ao@1:a.md", "B200-SXM-180GB", "torch.compile", "B200-SXM-180GB"),
        ("pytorch/ao@1:a.md", "MI300X", "power limited", "MI300X"),
        ("other/pages@1:a.md", "B200-SXM-180GB", "power limited", "B200-SXM-180GB"),
    ],
)
def test_devices_that_a_page_calls_power_limited_have_their_limit(
    page: str, device: str, notes: str, read: str
) -> None:
    row = {"notes": notes, "url_or_repo": page, "device": device}
    assert prepare(pd.DataFrame([row]))["device"].tolist() == [read]


@pytest.mark.parametrize(
    ("notes", "optimizer"),
    [
        ("batch 20 per GPU, SGD, parameters offloaded", "plain-sgd"),
        ("pre-training, LAMB; head of masked tokens only", "lamb"),
        ("LAMB", "lamb"),
        ("not LAMB but Adam; SGDs", None),
    ],
)
def test_notes_tell_the_optimizer(notes: str, optimizer: str | None) -> None:
    row = {"notes": notes, "job.optimizer": None}
    assert prepare(pd.DataFrame([row]))["job.optimizer"].tolist() == [optimizer]
