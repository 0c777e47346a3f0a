"""Frameworks: every fact has a source, versions are the nearest earlier ones, and mistakes are
named."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.schedule import get_schedule
from perfmodel.spec import Framework, Layout

ASKED = """
    colossalai fsdp fsdp-compile internevo llm-foundry maxtext megatron-bridge megatron-core
    megatron-deepspeed megatron-deepspeed-gaudi megatron-lm mxnet nanotron nemo oneflow
    paddlepaddle pax pax-te pytorch tensorflow tensorflow-xla deepspeed deepspeed-gaudi
    torchtitan generic accelerate trl axolotl llama-factory ms-swift torchtune litgpt
    lightning-thunder olmo-core open_lm levanter axlearn t5x gpt-neox fast-llm nemo-automodel
    xtuner llm.c maxdiffusion hf-trainer primus mindspeed verl paddlenlp pytorch-compile nanogpt
    pytorch-te transformer-engine composer mosaicml
"""
"""Frameworks that published runs name."""
EVERY = [one for name in catalog.frameworks() for one in catalog.framework_versions(name)]


def test_the_catalog_has_what_runs_name() -> None:
    names = set(catalog.frameworks())
    assert {catalog.framework(name).name for name in ASKED.split()} <= names


@pytest.mark.parametrize("framework", EVERY, ids=lambda f: f.label)
def test_facts_have_sources_and_name_what_exists(framework: Framework) -> None:
    assert framework.sources
    for name in framework.capabilities.schedules:
        get_schedule(name)
    plain = framework.layout("tp=1")[0]
    assert framework.cannot_run(plain) == (), "its own defaults run"
    piped = framework.layout("tp=2,pp=2,dp=2")[0]
    if framework.capabilities.pipeline_parallel and framework.capabilities.tensor_parallel:
        assert framework.cannot_run(piped) == ()


def test_generic_is_the_record_s_own_defaults() -> None:
    generic, plain = catalog.framework("generic"), Framework()
    told = ("sources",)
    assert all(
        getattr(generic, f.name) == getattr(plain, f.name)
        for f in fields(plain)
        if f.name not in told
    )
    assert generic.layout("8M16P8D") == (Layout.parse("8M16P8D"), "")


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("megatron-lm@2021", 2021),
        ("megatron-lm@2022", 2022),
        ("megatron-lm", 2023),
        ("megatron-lm@2026", 2023),
        ("nanotron@2025", 2024),
        ("Megatron@2021", 2021),
    ],
)
def test_the_nearest_earlier_version_counts(name: str, since: int) -> None:
    assert catalog.framework(name).since == since


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("megatron", "megatron-core@2025"),
        ("Megatron", "megatron-core@2025"),
        ("megatron@2024", "megatron-core@2024"),
        ("megatron@2023", "megatron-lm@2023"),
        ("megatron@2021", "megatron-lm@2021"),
        ("mcore", "megatron-core@2025"),
        ("fsdp", "fsdp@2026"),
        ("PyTorch FSDP", "fsdp@2026"),
        ("pytorch_fsdp@2023", "fsdp@2023"),
        ("ddp", "pytorch@2026"),
        ("torch", "pytorch@2026"),
        ("libai@2021", "oneflow@2021"),
        ("HF Trainer", "accelerate@2026"),
        ("hf-trainer@2024", "accelerate@2023"),
        ("thunder", "lightning-thunder@2024"),
        ("open-lm@2024", "open_lm@2023"),
        ("PaddleNLP", "paddlepaddle@2023"),
    ],
)
def test_what_people_call_a_framework(name: str, label: str) -> None:
    assert catalog.framework(name).label == label


@pytest.mark.parametrize("name", catalog.frameworks())
def test_a_year_that_is_not_known_yet_is_refused_with_the_newest_version(name: str) -> None:
    newest = catalog.framework(name)
    latest = max(framework.since for framework in EVERY)
    assert catalog.framework(f"{name}@{latest}") == newest
    for year in (latest + 1, 2030, 9999):
        with pytest.raises(
            PerfModelError,
            match=(
                f"the catalog ends in {latest}; the newest version of this framework is {newest.label}"
            ),
        ):
            catalog.framework(f"{name}@{year}")


@pytest.mark.parametrize(
    ("name", "operators_of_norms"),
    [
        ("torchtitan@2024", True),
        ("torchtitan@2025", True),
        ("torchtitan@2026", False),
        ("torchtitan-compile@2024", False),
        ("torchtitan-compile@2025", False),
        ("torchtitan-compile@2026", False),
        ("open_lm@2024", False),
    ],
)
def test_rms_norms_of_torch_are_one_kernel_where_a_compiler_or_torch_2_9_makes_it(
    name: str, operators_of_norms: bool
) -> None:
    kernels = catalog.framework(name).job_defaults("bf16")["eager_kernels"]
    assert ("norm" in kernels) == operators_of_norms


def test_versions_of_a_file_count_until_the_catalog_s_newest(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('[2040]\nzero = { value = 1, source = "our plans" }')
    assert catalog.framework(f"{path}@2040").since == 2040
    with pytest.raises(PerfModelError, match="the catalog ends in 2040"):
        catalog.framework(f"{path}@2041")


def test_versions_keep_what_they_do_not_change() -> None:
    old, new = catalog.framework("megatron-lm@2021"), catalog.framework("megatron-lm@2022")
    assert (old.communication.blocking_sends, new.communication.blocking_sends) == (True, True)
    assert old.capabilities.recomputes == ("none", "full")
    assert new.capabilities.recomputes == ("none", "selective", "full")
    assert set(old.sources) < set(new.sources)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("megatorn-lm", "did you mean"),
        ("megatron-lm@19", "must be a year"),
        ("nanotron@2019", "earliest version in the catalog is nanotron@2024"),
        ("megatron@2019", "earliest version in the catalog is megatron-lm@2021"),
        ("@2024", "the name before @ is missing"),
    ],
)
def test_names_that_are_none_are_refused(name: str, words: str) -> None:
    with pytest.raises((UnknownNameError, PerfModelError), match=words):
        catalog.framework(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "a table of facts per year"),
        ("[2024]\nzero = 1", "zero: must be"),
        ('[2024]\nzerro = { value = 1, source = "x" }', "zerro"),
        ('[2024]\nbased_on = "x@2020"', "there is no earlier version 'x@2020'"),
        ('[2024]\nzero = { value = "one", source = "x" }', "zero"),
    ],
)
def test_files_with_mistakes_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(PerfModelError, match=words):
        catalog.framework(str(tmp_path / "mine.toml"))


def test_a_file_of_one_s_own_builds_on_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(
        '[2023]\nbased_on = "nanotron@2024"\n[2025]\nbased_on = "ours@2023"\nzero = { value = 1, source = "our fork" }'
    )
    ours = catalog.framework(str(tmp_path / "ours.toml"))
    assert (ours.label, ours.default_layout.zero, ours.default_job.gradients.half_gradients) == (
        "ours@2025",
        1,
        True,
    )
    assert "our fork" in ours.sources
    assert catalog.framework(f"{tmp_path}/ours.toml@2024").default_layout.zero == 0


def test_what_is_unsaid_is_filled_and_said_and_what_is_said_wins() -> None:
    nemo = catalog.framework("nemo@2025")
    layout, assumed = nemo.layout("tp=8,pp=2,dp=4")
    assert (layout.zero, layout.sequence_parallel) == (1, True)
    has = "zero=1, sequence_parallel=true, tp_overlap=true"
    assert assumed == f"taken from the defaults of nemo@2025: {has}; override them in the layout"
    layout, assumed = nemo.layout("tp=8,pp=2,dp=4,zero=0,sequence_parallel=false,tp_overlap=false")
    assert (layout.zero, layout.sequence_parallel, assumed) == (0, False, "")
    layout, assumed = nemo.layout("pp=2,dp=4")
    assert (layout.sequence_parallel, layout.overlap.tp_overlap, layout.remarks) == (
        False,
        False,
        (),
    )
    assert "tp_overlap" not in assumed
    assert "sequence_parallel" not in assumed
    with pytest.raises(LayoutError, match="given twice"):
        nemo.layout("8M2P4D,tp=8")


def test_overlap_follows_the_zero_stage_where_it_does() -> None:
    nanotron = catalog.framework("nanotron@2024")
    assert nanotron.layout("dp=8")[0].overlap.overlap_grad_reduce
    assert not nanotron.layout("dp=8,zero=1")[0].overlap.overlap_grad_reduce
    assert nanotron.layout("dp=8,zero=1,overlap_grad_reduce=true")[0].overlap.overlap_grad_reduce


def test_job_defaults_follow_the_element_type() -> None:
    nemo = catalog.framework("nemo@2023")
    assert not nemo.job_defaults("bf16")["flash_attention"]
    assert nemo.job_defaults("fp8")["flash_attention"]
    assert catalog.framework("maxtext").job_defaults("bf16")["stops_recompute"]
    assert catalog.framework("maxtext").job_defaults("fp32")["grad_dtype"] == "fp32"


def test_what_means_nothing_for_a_model_is_not_said_of_it() -> None:
    def said(framework: str, model: str) -> str:
        job = catalog.framework(framework).job(
            catalog.model(model), catalog.device("a100-sxm4-80gb"), global_batch=8
        )
        return " ".join(job.assumed)

    assert "masked_head" in said("tensorflow", "bert-large")
    assert "masked_head" not in said("tensorflow", "gpt3-175b")
    assert "repeated_keys" in said("torchtitan@2024", "llama3-8b")
    # a key for every query as it is
    assert "repeated_keys" not in said("torchtitan@2024", "llama2-7b")
    assert "weighted_experts" not in said("nemo@2025", "llama3-8b")
    assert "eager_kernels=clamp" in said("megatron-core@2025", "gpt-oss-20b")
    assert "eager_kernels" not in said("megatron-core@2025", "gpt3-175b")  # it cuts no activations
    assert "rope" not in said("torchtitan@2024", "gpt3-175b")


def test_what_a_framework_cannot_run_is_named() -> None:
    core = catalog.framework("megatron-core@2025")
    assert core.cannot_run(Layout(tp=8, pp=4, dp=4, zero=1, vpp=2)) == ()
    assert core.cannot_run(Layout(tp=8, pp=4, dp=4, zero=2)) == (
        "megatron-core@2025 cannot run zero=2 in a pipeline",
    )
    assert core.cannot_run(Layout(dp=4, zero=2)) == ()
    assert "schedule=zb-h1" in core.cannot_run(Layout(pp=4, schedule="zb-h1"))[0]
    assert "vpp=2" in catalog.framework("nanotron").cannot_run(Layout(pp=4, vpp=2))[-1]


def test_selective_recompute_is_what_the_framework_means_by_it() -> None:
    model, titan, core = (
        catalog.model("llama3-8b"),
        catalog.framework("torchtitan"),
        catalog.framework("megatron-core"),
    )
    for framework in (titan, core):
        for layout_text in (
            "dp=8,recompute=selective",
            "dp=8,recompute=full",
            "dp=8,recompute_full_layers=3",
        ):
            layout, _ = framework.layout(layout_text, model)
            assert framework.layout(framework.notation(layout, model), model)[0] == layout
    assert titan.layout("dp=8", model)[0].recompute == "selective"
    assert titan.job_defaults("bf16")["recompute_modules"] == ("second_products",)
    assert core.job_defaults("bf16")["recompute_modules"] == ("core_attn",)


def test_a_framework_may_mean_whole_layers_by_selective_recompute() -> None:
    model = catalog.model("llama3-8b")
    compiled = catalog.framework("fsdp-compile")
    halves = replace(compiled, launch=replace(compiled.launch, selective_share=0.5))
    layout, assumed = halves.layout("tp=2,pp=2,dp=2,recompute=selective", model)
    assert (layout.recompute, layout.recompute_full_layers) == ("none", (8,))  # half of 16
    assert "recompute_full_layers=8" in assumed
    text = halves.notation(Layout(dp=8, zero=3, recompute="selective"), model)
    assert "recompute_full_layers=none" in text


@pytest.mark.parametrize(("stages", "batch_per_replica"), [(1, 32), (4, 32), (8, 8), (16, 4)])
def test_a_pipeline_of_torchtitan_2024_makes_a_micro_batch_per_stage(
    stages: int, batch_per_replica: int
) -> None:
    framework = catalog.framework("torchtitan@2024")
    micro_batch = framework.usual_micro_batch(stages, batch_per_replica)
    if stages == 1:
        assert micro_batch == framework.default_layout.micro_batch
    else:
        assert micro_batch == max(1, batch_per_replica // stages)
    later = catalog.framework("torchtitan@2025")
    assert later.usual_micro_batch(stages, batch_per_replica) == (8 if stages == 1 else 1)
    assert Framework(micro_batch=3).usual_micro_batch(stages, batch_per_replica) == 3


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "fsdp-compile", "pytorch"])
def test_torch_prefers_cudnn_attention_from_2026_on(name: str) -> None:
    """`sdp_utils.cpp` of PyTorch 2.13; FlashAttention-2 came first in 2.9."""
    assert catalog.framework(f"{name}@2025").attention == "torch-flash-2"
    assert catalog.framework(f"{name}@2026").attention == "torch-fastest"


@pytest.mark.parametrize(
    "name", ["accelerate", "axolotl", "deepspeed", "fsdp", "llama-factory", "ms-swift", "trl"]
)
def test_transformers_loops_over_experts_until_they_are_one_grouped_product(name: str) -> None:
    loop, grouped = catalog.framework(f"{name}@2025"), catalog.framework(f"{name}@2026")
    # The loop issues eleven operators for each expert, and a layer has two grouped products.
    assert loop.host.grouped_launch_s == pytest.approx(11 / 2 * loop.host.host_op_s, rel=0.02)
    assert grouped.host.grouped_launch_s == 0


@pytest.mark.parametrize(
    ("zero", "reduces", "gathers"),
    [(0, False, False), (1, False, False), (2, True, False), (3, True, True)],
)
def test_what_megatron_shards_it_exchanges_beside_kernels(
    zero: int, reduces: bool, gathers: bool
) -> None:
    """`arguments.py`: the sharding strategies of its FSDP turn the overlaps on, which are off by
    default."""
    layout = catalog.framework("megatron-core@2025").layout(f"dp=8,zero={zero}")[0]
    assert (layout.overlap.overlap_grad_reduce, layout.overlap.overlap_param_gather) == (
        reduces,
        gathers,
    )
    stated = catalog.framework("megatron-core@2025").layout(
        f"dp=8,zero={zero},overlap_param_gather=false"
    )[0]
    assert not stated.overlap.overlap_param_gather


@pytest.mark.parametrize(("year", "overlaps"), [(2021, False), (2022, False), (2023, True)])
def test_fsdp_prefetches_in_backward_from_its_second_version_on(year: int, overlaps: bool) -> None:
    framework = catalog.framework(f"fsdp@{year}")
    assert framework.default_layout.overlap.overlap_grad_reduce is overlaps
    assert framework.default_layout.overlap.overlap_param_gather
