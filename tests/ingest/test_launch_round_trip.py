"""Layouts written as launch files and read back: the same layout, or a reason."""

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thinned import one_in

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import LaunchFileError, LayoutError
from perfmodel.ingest.launch import (
    FORMATS,
    comparable,
    launch_file,
    parse_launch,
    read_launch,
)
from perfmodel.spec import Layout, Model, partition_by_cost

FILES = Path(__file__).parent / "launch_files"
ENDINGS = {"arguments": ".sh", "json": ".json", "toml": ".toml", "yaml": ".yaml"}
FRAMEWORKS = [form.frameworks[0] for form in FORMATS]
MODELS = ("gpt3-6.7b", "llama3-8b", "llama3-70b", "mixtral-8x7b", "mpt-7b")
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp", "pp-tp-cp-ep-dp", "ep-dp-tp-cp-pp")
FLAGS = ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather", "tp_overlap")
ALWAYS = {"sequence_parallel": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
KINDS = ("ring", "all_gather", "ulysses")
LOOPED = ("interleaved", "breadth-first")

CAN: dict[str, dict[str, tuple[object, ...]]] = {
    "megatron-core": {
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "vpp": (1, 2, 4),
        "recompute": ("none", "selective", "full"),
        "zero": (0, 1, 2, 3),
        "recompute_full_layers": (None, (2,)),
        "order": ORDERS[:2],
        "cp_kind": KINDS,
        "ep_overlap": (False, True),
        "replicate": (1, 2),
        "offload_layers": (0, 4),
        **dict.fromkeys(FLAGS, (False, True)),
    },
    "nemo": {
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "vpp": (1, 2, 4),
        "recompute": ("none", "selective", "full"),
        "zero": (0, 1, 3),
        "recompute_full_layers": (None, (2,)),
        "cp_kind": KINDS,
        "offload_layers": (0, 4),
        **dict.fromkeys(FLAGS, (False, True)),
    },
    "megatron-bridge": {
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "vpp": (1, 2, 4),
        "recompute": ("none", "selective", "full"),
        "zero": (0, 1, 2, 3),
        "recompute_full_layers": (None, (2,)),
        "cp_kind": KINDS,
        "ep_overlap": (False, True),
        "replicate": (1, 2),
        "offload_layers": (0, 4),
        **dict.fromkeys(FLAGS, (False, True)),
    },
    "deepspeed": {
        "pp": (1,),
        "zero": (0, 1, 2, 3),
        "overlap_grad_reduce": (False, True),
        "replicate": (1, 2),
        "offload_states": ("none", "optimizer", "weights"),
    },
    "torchtitan": {
        "cp": (1, 2),
        "cp_kind": ("ring", "gathered_ring"),
        "ep": (1, 2, 4),
        "zero": (0, 2, 3),
        "recompute": ("none", "full"),
        "schedule": ("1f1b", "gpipe", "zb-v", *LOOPED),
        "tp_overlap": (False, True),
        "replicate": (1, 2),
        "offload_states": ("none", "optimizer", "weights"),
    },
    "nanotron": {
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "zero": (0, 1),
        "recompute": ("none", "full"),
        "schedule": ("1f1b", "gpipe"),
        "sequence_parallel": (False, True),
        "tp_overlap": (False, True),
    },
    "llm-foundry": {
        "pp": (1,),
        "zero": (0, 2, 3),
        "recompute": ("none", "full"),
        "offload": (False, True),
    },
    "maxtext": {
        "cp": (1, 2),
        "ep": (1, 2),
        "zero": (0, 1, 3),
        "recompute": ("none", "selective", "full"),
        "vpp": (1, 2, 4),
        "schedule": ("gpipe",),
        "sequence_parallel": (False, True),
    },
    "fsdp": {
        "tp": (1,),
        "pp": (1,),
        "zero": (0, 2, 3),
        "recompute": ("none", "full"),
        "offload_states": ("none", "optimizer", "weights"),
    },
}
"""What each framework can do, from its documentation: such layouts must be written, not refused."""


def back(text: str, framework: str, layout: Layout, model: str | None) -> Layout:
    """The layout of an exported file, as a user reads it who knows the machine and the model."""
    form = next(form for form in FORMATS if form.frameworks[0] == framework)
    launch = parse_launch(text, f"file{ENDINGS[form.syntax]}", devices=layout.devices, model=model)
    assert launch.format == form.name
    assert launch.layout is not None, launch.missing
    return launch.layout


def as_it_runs(layout: Layout, framework: str, model: Model | str | None) -> Layout:
    """The layout with the pipeline stages that a framework cuts by itself."""
    if framework != "nanotron" or model is None or layout.partition is not None:
        return layout
    return layout.replace(partition=partition_by_cost(catalog.model(model), layout.pp))


def job_of(layout: Layout, micro_batches: int, framework: str = "") -> pm.Job:
    """A job that the layout divides, in a type in which the framework runs it."""
    # its optimizer for bf16 shards states without ZeRO too
    unsharded = framework == "deepspeed" and layout.zero == 0
    return pm.Job(
        global_batch=layout.dp * layout.micro_batch * micro_batches,
        seq_len=2048,
        dtype="fp16" if unsharded else "bf16",
    )


@st.composite
def possible(draw: st.DrawFn, framework: str) -> tuple[Layout, str]:
    """A layout that the framework can run, and a model."""
    can = {"tp": (1, 2, 4), "pp": (1, 2, 4), "dp": (1, 2, 4, 8), "micro_batch": (1, 2, 3)} | CAN[
        framework
    ]
    values = {name: draw(st.sampled_from(choices), label=name) for name, choices in can.items()}
    if framework == "torchtitan":
        values |= ALWAYS
    # it reduces after the last backward, and gathers after the step
    if framework == "nanotron" and values["zero"]:
        values |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
    if framework.startswith(("megatron", "nemo")) and values["zero"] > 1:
        values["pp"] = 1
        # its FSDP overlaps what it shards, whatever the settings say
        values["overlap_grad_reduce"] = True
        if values["zero"] == 3:
            values["overlap_param_gather"] = True
    if framework == "torchtitan" and values["zero"] == 0:  # DDP goes with no other parallelism
        values |= {"tp": 1, "pp": 1, "cp": 1}
    # one device has nothing to shard
    if framework == "fsdp" and 0 in (
        values["zero"],
        values["dp"] - 1,
    ):
        values["recompute"] = "none"
    if values.get("replicate") == values["dp"]:  # groups of one rank shard nothing
        values["replicate"] = 1
    if framework in ("torchtitan", "fsdp"):  # what FSDP shards it offloads, all of it
        fitting = {0: "none", 2: "optimizer", 3: "weights"}[
            values["zero"] if values["dp"] > 1 else 0
        ]
        values["offload_states"] = fitting if values["offload_states"] != "none" else "none"
    if values["pp"] == 1:
        values |= {"schedule": "1f1b", "vpp": 1}
    elif values.get("schedule") in LOOPED:
        values["vpp"] = draw(st.sampled_from((2, 4)))
    if values["recompute"] != "none" if "recompute" in values else False:
        values.pop("recompute_full_layers", None)
    if values["pp"] > 1 or values.get("recompute") != "none" or values.get("recompute_full_layers"):
        values.pop("offload_layers", None)
    try:
        layout = Layout(**values)
    except LayoutError:
        assume(False)
        raise
    # MaxText's experts spread over replicas, and their axis shards all weights
    shards_weights = layout.zero == 3 if layout.ep > 1 else layout.zero < 3 or layout.dp > 1
    assume(framework != "maxtext" or (layout.dp % layout.ep == 0 and shards_weights))
    # nanotron's experts spread over replicas, and beside tensor parallelism tokens must be shared
    # out
    shared_out = layout.ep == 1 or layout.tp == 1 or layout.sequence_parallel
    assume(framework != "nanotron" or (layout.dp % layout.ep == 0 and shared_out))
    return layout, draw(st.sampled_from(MODELS), label="model")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=60)
@given(data=st.data())
def test_what_a_framework_can_run_comes_back_as_it_was(framework: str, data: st.DataObject) -> None:
    layout, model = data.draw(possible(framework))
    text = pm.export_launch(
        layout, framework, model=model, job=job_of(layout, 4 * layout.pp, framework)
    )
    assert comparable(back(text, framework, layout, model)) == comparable(
        as_it_runs(layout, framework, model)
    )


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    """Any layout, most of which most frameworks cannot run."""
    pp = draw(st.sampled_from((1, 2, 4)))
    try:
        return Layout(
            tp=draw(st.sampled_from((1, 2, 3, 8))),
            pp=pp,
            dp=draw(st.integers(1, 6)),
            cp=draw(st.integers(1, 2)),
            ep=draw(st.sampled_from((1, 2))),
            vpp=draw(st.sampled_from((1, 2))) if pp > 1 else 1,
            micro_batch=draw(st.integers(1, 4)),
            zero=draw(st.integers(0, 3)),
            schedule=draw(st.sampled_from(("1f1b", "gpipe", "zb-h1", "chimera", "interleaved"))),
            recompute=draw(st.sampled_from(("none", "selective", "full"))),
            offload=draw(st.booleans()),
            offload_layers=draw(st.sampled_from((0, 0, 2))),
            order=draw(st.sampled_from(ORDERS)),
            partition=draw(st.sampled_from((None, (8,) * pp, tuple(range(4, 4 + pp))))),
            recompute_full_layers=draw(st.sampled_from((None, (1,), (2,) * pp, tuple(range(pp))))),
            **{name: draw(st.booleans()) for name in FLAGS},
        )
    except LayoutError:
        assume(False)
        raise


@pytest.mark.parametrize("framework", FRAMEWORKS)
@settings(max_examples=60)
@given(layout=any_layout(), model=st.sampled_from((None, *MODELS)))
def test_any_layout_comes_back_or_is_refused_with_a_reason(
    framework: str, layout: Layout, model: str | None
) -> None:
    try:
        text = pm.export_launch(layout, framework, model=model, job=job_of(layout, 4))
    except LaunchFileError as error:
        said = str(error)
    else:
        assert comparable(back(text, framework, layout, model)) == comparable(
            as_it_runs(layout, framework, model)
        )
        return
    assert "cannot state" in said
    assert "\n" not in said


BY_SCRIPT: dict[str, dict[str, tuple[object, ...]]] = {
    "deepspeed": {"recompute": ("none", "selective", "full"), "pp": (1, 2, 4), "ep": (1, 2)},
    "fsdp": {"tp": (1, 2), "pp": (1, 2)},
}
"""What these frameworks can do besides, by their training script."""


@pytest.mark.parametrize("framework", one_in(3, FRAMEWORKS))
@settings(max_examples=40)
@given(data=st.data())
def test_what_a_file_cannot_carry_is_named(framework: str, data: st.DataObject) -> None:
    """Whatever the file and the sentences beside it leave open is the same as was asked for."""
    layout, model = data.draw(possible(framework))
    for name, choices in BY_SCRIPT.get(framework, {}).items():
        # Groups of DeepSpeed that hold copies of weights divide all devices, not those of a stage.
        if layout.replicate > 1 or (name == "ep" and layout.dp % 2):
            continue
        layout = layout.replace(**{name: data.draw(st.sampled_from(choices), label=name)})
    job = job_of(layout, 4 * layout.pp, framework)
    file = launch_file(layout, framework, model=model, job=job)
    named = " ".join(file.left_to_script)
    form = next(form for form in FORMATS if form.frameworks[0] == framework)
    place = f"file{ENDINGS[form.syntax]}"
    # With what the training script sets, the file gives the whole layout.
    complete = parse_launch(
        file.text, place, devices=layout.devices, model=model, layout=file.by_script
    )
    assert complete.layout is not None
    assert comparable(complete.layout) == comparable(as_it_runs(layout, framework, model))
    for name in form.in_script:
        is_usual = layout.value(name) == Layout().value(name)
        assert (f"{name}=" in file.by_script) is not is_usual
        assert (f"{name}={layout.value(name)} is not in this file" in named) is not is_usual
    # What it does not state of the model and the job is named too.
    stated = {
        "seq_len": complete.seq_len,
        "global_batch": complete.global_batch,
        "dtype": complete.job_fields.get("dtype"),
    }
    for name, value in stated.items():
        assert (value != getattr(job, name)) is (f"{name}={getattr(job, name)}" in named)
    # In formats that have comments, the file itself says so.
    for sentence in file.left_to_script[:-1] if form.syntax != "json" else ():
        assert f"# {sentence}" in file.text


@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        ("deepspeed", "dp=8,zero=3,recompute=full"),
        ("deepspeed", "dp=4,pp=2,zero=1"),
        ("deepspeed", "dp=8,ep=2,zero=1"),
        ("fsdp", "tp=2,dp=4,zero=3"),
    ],
)
def test_what_only_a_script_can_set_is_no_reason_to_write_another_layout(
    framework: str, layout: str
) -> None:
    asked = Layout.parse(layout)
    model = "mixtral-8x7b" if asked.ep > 1 else "llama3-8b"
    job = job_of(asked, 4)
    file = launch_file(asked, framework, model=model, job=job)
    assert "in the training script" in file.left_to_script[0]
    assert f"model={model}" in file.left_to_script[-1]
    with pytest.raises(LaunchFileError, match="cannot state"):
        pm.export_launch(asked, framework, model=model, job=job)


def test_a_comment_of_a_written_file_keeps_what_the_script_sets(tmp_path: Path) -> None:
    asked = Layout.parse("tp=2,dp=4,zero=3")
    file = launch_file(asked, "fsdp", model="llama3-8b", job=job_of(asked, 4))
    path = tmp_path / "run.yaml"
    path.write_text(file.text)
    layout = read_launch(path, model="llama3-8b", global_batch=16).layout
    assert layout is not None
    assert comparable(layout) == comparable(asked)


SMALL = st.builds(
    Layout,
    tp=st.sampled_from((1, 2)),
    pp=st.sampled_from((1, 2)),
    dp=st.sampled_from((1, 2)),
    zero=st.integers(0, 3),
    order=st.sampled_from(ORDERS),
    schedule=st.sampled_from(("1f1b", "gpipe")),
    recompute_full_layers=st.sampled_from((None, (0,), (2,), (2, 2))),
    **dict.fromkeys(FLAGS, st.booleans()),
)


@settings(max_examples=15)
@given(layout=SMALL)
def test_layouts_that_compare_equal_run_alike(layout: Layout) -> None:
    """What comparisons leave out changes neither time nor memory."""
    assume(layout.pp > 1 or layout.recompute_full_layers != (2, 2))
    first, second = (
        pm.predict("gpt3-1.3b", "dgx-a100", one, global_batch=8 * layout.dp)
        for one in (layout, comparable(layout))
    )
    assert first.step_time_s == pytest.approx(second.step_time_s, rel=1e-9)
    assert first.memory.peak == pytest.approx(second.memory.peak, rel=1e-9)


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        *(
            (name, model)
            for name in ("megatron-core",)
            for model in (*MODELS, "deepseek-v3", "gpt3-175b", "qwen3-8b")
        ),
        *((name, model) for name in ("nemo", "megatron-bridge") for model in MODELS),
        ("megatron-bridge", "qwen3-8b"),
        *(
            (name, model)
            for name in ("nanotron", "maxtext")
            for model in ("llama3-8b", "llama3-70b", "mixtral-8x7b")
        ),
        *(
            ("torchtitan", model)
            for model in ("llama3-8b", "llama3-70b", "llama3.1-405b", "deepseek-v3")
        ),
        *(("llm-foundry", model) for model in ("mpt-7b", "mpt-30b")),
    ],
)
def test_models_that_a_format_holds_come_back(framework: str, model: str) -> None:
    layout = Layout(dp=16, zero=0, sequence_parallel=framework == "torchtitan")
    text = pm.export_launch(layout, framework, model=model, job=job_of(layout, 4))
    form = next(form for form in FORMATS if form.frameworks[0] == framework)
    launch = parse_launch(text, f"file{ENDINGS[form.syntax]}")
    assert launch.model is not None
    assert launch.model.name == model
    assert launch.global_batch == 64
    assert launch.seq_len == 2048


@pytest.mark.parametrize("framework", ["torchtitan", "nanotron", "llm-foundry"])
def test_models_that_a_format_cannot_hold_are_left_to_the_user(framework: str) -> None:
    layout = Layout(dp=8, zero=0, sequence_parallel=framework == "torchtitan")
    text = pm.export_launch(layout, framework, model="gpt3-6.7b", job=job_of(layout, 4))
    assert "# model gpt3-6.7b: this format has no key for the model" in text


@pytest.mark.parametrize(
    ("framework", "layout", "job", "reason"),
    [
        (
            "megatron-core",
            "tp=2,pp=2,dp=2,zero=2",
            {},
            "only without a pipeline; use zero=1 or pp=1",
        ),
        ("megatron-core", "pp=4,schedule=zb-h1", {}, r"schedule=zb-h1 \(Megatron runs 1f1b"),
        ("megatron-core", "dp=2,offload=true", {}, "offload=true"),
        ("torchtitan", "dp=8,zero=1", {}, "use zero=0, 2 or 3"),
        (
            "torchtitan",
            "tp=2,dp=2,zero=0,sequence_parallel=true",
            {},
            "DDP cannot be combined with other parallelism",
        ),
        ("torchtitan", "cp=2,zero=0", {}, "DDP cannot be combined with other parallelism"),
        (
            "torchtitan",
            "tp=2,dp=4,zero=3",
            {},
            r"sequence_parallel=false \(its tensor parallelism always.*use seq",
        ),
        ("torchtitan", "dp=8,zero=3", {"dtype": "fp16"}, "dtype=fp16"),
        ("nanotron", "dp=8,zero=3", {}, "optimizer states only; use zero=0 or 1"),
        ("nanotron", "pp=4,vpp=2", {}, r"vpp=2 \(it has no virtual stages\)"),
        ("deepspeed", "dp=8,zero=0", {}, r"zero=0 \(its BF16 optimizer always shards.*use zero=1"),
        (
            "deepspeed",
            "pp=2,dp=4",
            {},
            r"pp=2 \(a DeepSpeed pipeline is built in the training script",
        ),
        ("llm-foundry", "dp=8,zero=1", {}, "use zero=0, 2 or 3"),
        ("maxtext", "dp=8,zero=2", {}, "zero=2: MaxText has only"),
        (
            "maxtext",
            "dp=8,ep=4,zero=1",
            {},
            "zero=1: MaxText's expert axis also shards weights; use zero=3",
        ),
        ("fsdp", "tp=2,dp=4,zero=3", {}, "use tp=1,pp=1"),
    ],
)
def test_what_a_framework_cannot_run_is_refused(
    framework: str, layout: str, job: dict[str, str], reason: str
) -> None:
    with pytest.raises(LaunchFileError, match=reason):
        pm.export_launch(
            Layout.parse(layout),
            framework,
            model="llama3-8b",
            job=pm.Job(global_batch=64, seq_len=2048, **job),
        )


@pytest.mark.parametrize(("tp", "pp"), [(1, 4), (4, 2)])
def test_stages_that_nanotron_cuts_so_by_itself_are_not_said(tp: int, pp: int) -> None:
    serial = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    layout = Layout(tp=tp, pp=pp, dp=2, zero=1, sequence_parallel=True, tp_overlap=True, **serial)
    cut = partition_by_cost(pm.model("llama3-8b"), pp)
    said, unsaid = (
        pm.export_launch(one, "nanotron", model="llama3-8b", job=job_of(layout, 8))
        for one in (layout.replace(partition=cut), layout)
    )
    assert said == unsaid
    # no setting says it, but whoever reads the file sees which stages will run
    assert f"partition={'-'.join(map(str, cut or ()))}" in said
    assert "partition" not in pm.export_launch(layout, "nanotron", job=job_of(layout, 8))
    other = (cut[0] - 1, *cut[1:-1], cut[-1] + 1)
    with pytest.raises(LaunchFileError, match="it balances the stages itself"):
        pm.export_launch(
            layout.replace(partition=other), "nanotron", model="llama3-8b", job=job_of(layout, 8)
        )


def test_uneven_stages_of_megatron() -> None:
    layout = Layout(pp=4, partition=(7, 9, 9, 7), overlap_grad_reduce=True)
    text = pm.export_launch(layout, "megatron-core", model="llama3-8b", job=job_of(layout, 8))
    assert "--decoder-first-pipeline-num-layers 7 " in text
    assert back(text, "megatron-core", layout, None).partition == (7, 9, 9, 7)
    even = pm.export_launch(
        layout.replace(partition=None), "megatron-core", model="llama3-8b", job=job_of(layout, 8)
    )
    assert "partition" not in even
    with pytest.raises(LaunchFileError, match="partition=6-10-9-7"):
        pm.export_launch(
            layout.replace(partition=(6, 10, 9, 7)), "megatron-core", model="llama3-8b"
        )


def test_every_nth_layer_of_torchtitan() -> None:
    layout = Layout(dp=8, zero=3, sequence_parallel=True, recompute_full_layers=(8,))
    text = pm.export_launch(layout, "torchtitan", model="llama3-8b", job=job_of(layout, 2))
    assert 'selective_ac_option = "4"' in text
    assert back(text, "torchtitan", layout, None).recompute_full_layers == (8,)
    # selective without a number is its checkpoint of operators
    by_operator = layout.replace(recompute_full_layers=None, recompute="selective")
    text = pm.export_launch(
        by_operator, "torchtitan", model="llama3-8b", job=job_of(by_operator, 2)
    )
    assert 'selective_ac_option = "op"' in text
    assert back(text, "torchtitan", by_operator, None).recompute == "selective"


def test_names_of_frameworks_may_carry_a_year_and_others_are_refused() -> None:
    layout = Layout(dp=8, zero=3, sequence_parallel=True)
    assert pm.export_launch(layout, "torchtitan@2025") == pm.export_launch(layout, "torchtitan")
    with pytest.raises(pm.PerfModelError, match=r"did you mean .*'torchtitan'"):
        pm.export_launch(layout, "torchtitn")


LIKE = {
    "torchtitan_8b.toml": ("llama3-8b", "tp=2,dp=32,zero=3,sequence_parallel=true,recompute=full"),
    "bridge_70b.yaml": ("llama3-70b", "tp=8,pp=2,dp=4,zero=1,sequence_parallel=true"),
    "llm_foundry_7b.yaml": ("mpt-7b", "dp=32,zero=2,micro_batch=4"),
    "llm_foundry_hf.yaml": ("llama2-13b", "dp=16,zero=3,recompute=full"),
    "deepspeed_zero3.json": (None, "dp=16,zero=2,micro_batch=8"),
    "maxtext_tpu.yml": ("llama2-7b", "tp=2,dp=64,zero=3,recompute=none"),
    "nemo_llama.yaml": ("llama3-8b", "tp=2,dp=16,zero=1"),
    "nanotron_3d.yaml": (
        "llama-like-1b",
        "tp=2,dp=16,zero=1,overlap_grad_reduce=false,overlap_param_gather=false,recompute=full",
    ),
    "accelerate_fsdp.yaml": (None, "dp=16,zero=2,micro_batch=2"),
}
STAYS = {
    "torchtitan_8b.toml": (
        'description = "Llama 3 8B"',
        'flavor = "8B"',
        "log_freq = 10",
        "seq_len = 8192",
    ),
    "bridge_70b.yaml": (
        "ConfigContainer:",
        "    cross_entropy_fusion_impl: te",
        "    seq_length: 8192",
    ),
    "llm_foundry_7b.yaml": (
        "max_seq_len: ${variables.max_seq_len}",
        "  - 0.95",
        "  expansion_ratio: 4",
    ),
    "llm_foundry_hf.yaml": (
        "  cluster: somewhere",
        "    pretrained_model_name_or_path: meta-llama/Llama-2-13b-hf",
    ),
    "deepspeed_zero3.json": ('"type": "AdamW"', '"weight_decay": 0.1', '"gradient_clipping": 1.0'),
    "maxtext_tpu.yml": (
        "model_name: llama2-7b",
        "run_name: bench",
        "attention: flash",
        "ici_tensor_parallelism: 2",
    ),
    "nemo_llama.yaml": (
        "    data_prefix: ???",
        "  mcore_gpt: true",
        "  max_position_embeddings: ${.encoder_seq_length}",
    ),
    "nanotron_3d.yaml": (
        "    learning_rate: 0.0003",
        "  project: bench",
        "    is_llama_config: true",
    ),
    "accelerate_fsdp.yaml": ("rdzv_backend: static", "  fsdp_backward_prefetch: BACKWARD_PRE"),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_file_with_another_layout_in_it_keeps_its_other_settings(
    name: str, tmp_path: Path
) -> None:
    model, text = LIKE[name]
    before = read_launch(FILES / name, devices=64)
    layout = Layout.parse(text)
    job = pm.Job(
        global_batch=256,
        seq_len=before.seq_len or 2048,
        dtype=before.job_fields["dtype"],
        grad_dtype=before.job_fields.get("grad_dtype", "fp32"),
    )
    exported = pm.export_launch(layout, before.format, model=model, job=job, like=FILES / name)
    for line in STAYS[name]:
        assert line in exported
    path = tmp_path / f"again{Path(name).suffix}"
    path.write_text(exported)
    after = read_launch(path, devices=layout.devices)
    assert after.layout is not None
    assert comparable(after.layout) == comparable(as_it_runs(layout, after.framework, after.model))
    assert (after.model, after.framework) == (before.model, before.framework)
    # nothing of the old layout is left beside the new one
    assert {one.partition(" (")[0] for one in after.ignored} <= {
        one.partition(" (")[0] for one in before.ignored
    }


def test_a_file_of_another_framework_is_no_model_for_one() -> None:
    with pytest.raises(
        LaunchFileError, match=r"nemo_llama.yaml: this is a launch file of nemo, not of nanotron"
    ):
        pm.export_launch(
            Layout(dp=8),
            "nanotron",
            like=FILES / "nemo_llama.yaml",
            job=pm.Job(global_batch=8, seq_len=2048),
        )
