"""Launch files of the real shape: what each says, what it assumes, what it leaves open."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import perfmodel as pm
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import comparable, export_launch, parse_launch, read_launch
from perfmodel.spec import Job

FILES = Path(__file__).parent / "launch_files"
_MEGATRON = "pretrain_gpt.py --num-attention-heads 32 --micro-batch-size 1"
NO_OVERLAP = "overlap_grad_reduce=false,overlap_param_gather=false"


class Said(NamedTuple):
    """What a file says; the model by its name in the catalog, or by figures where the catalog has
    none."""

    framework: str
    model: str | dict[str, Any] | None
    layout: str
    global_batch: int | None
    seq_len: int | None
    job: dict[str, Any]
    given: Mapping[str, Any] = MappingProxyType({})
    """What must be given because the file does not say."""


SAID = {
    "megatron_gpt3.sh": Said(
        framework="megatron-core",
        model="gpt3-175b",
        layout=f"8M16P1D,zero=1,sequence_parallel=true,{NO_OVERLAP}",
        global_batch=1536,
        seq_len=2048,
        job={"dtype": "bf16"},
    ),
    "megatron_strings.sh": Said(
        framework="megatron-lm",
        model="llama2-7b",
        layout="tp=2,pp=2,dp=4,vpp=4,micro_batch=2,recompute=selective,overlap_param_gather=false",
        global_batch=64,
        seq_len=4096,
        job={"dtype": "bf16", "flash_attention": True},
    ),
    "megatron_mixtral.slurm": Said(
        framework="megatron-core",
        model="mixtral-8x7b",
        layout="pp=4,dp=16,ep=8,zero=1",
        global_batch=256,
        seq_len=4096,
        job={"dtype": "bf16"},
    ),
    "megatron_arguments.txt": Said(
        framework="megatron-core",
        model={"layers": 24, "hidden": 2048, "ffn_hidden": 8192, "vocab": 51200},
        layout=f"tp=2,dp=8,micro_batch=4,recompute_full_layers=3,{NO_OVERLAP}",
        global_batch=512,
        seq_len=2048,
        job={"dtype": "fp16"},
        given={"devices": 16},
    ),
    "megatron_deepspeed.sh": Said(
        framework="megatron-deepspeed",
        model={"layers": 24, "hidden": 2304},
        layout="tp=4,pp=2,dp=4,micro_batch=2,zero=1,recompute=full",
        global_batch=512,
        seq_len=2048,
        job={"dtype": "fp16"},
    ),
    "nemo_llama.yaml": Said(
        framework="nemo@2024",
        model="llama3-8b",
        layout="tp=4,pp=2,cp=2,dp=2,vpp=4,zero=1,recompute=selective,sequence_parallel=true,tp_overlap=true",
        global_batch=128,
        seq_len=8192,
        job={"dtype": "bf16"},
    ),
    "nemo_gpt.yaml": Said(
        framework="nemo@2023",
        model={"layers": 24, "hidden": 1024, "vocab": 50257, "dropout": True},
        layout="dp=8,micro_batch=4,recompute=full",
        global_batch=64,
        seq_len=2048,
        job={"dtype": "fp16"},
    ),
    "bridge_70b.yaml": Said(
        framework="megatron-bridge",
        model="llama3-70b",
        layout="tp=4,pp=4,cp=2,dp=2,vpp=5,zero=1,sequence_parallel=true,tp_overlap=true",
        global_batch=128,
        seq_len=8192,
        job={"dtype": "bf16", "grad_dtype": "bf16"},
        given={"devices": 64},
    ),
    "bridge_fsdp.yaml": Said(
        framework="megatron-bridge",
        model=None,
        layout="dp=32,zero=3,recompute_full_layers=5",
        global_batch=64,
        seq_len=4096,
        job={},
        given={"devices": 32},
    ),
    "deepspeed_zero3.json": Said(
        framework="deepspeed",
        model=None,
        layout="dp=16,zero=3,micro_batch=4",
        global_batch=256,
        seq_len=None,
        job={"dtype": "bf16", "optimizer": "adam"},
    ),
    "deepspeed_offload.json": Said(
        framework="deepspeed",
        model=None,
        layout="dp=4,zero=1,micro_batch=2,overlap_grad_reduce=false,offload_states=optimizer",
        global_batch=64,
        seq_len=None,
        job={"dtype": "fp16"},
        given={"devices": 4},
    ),
    "torchtitan_8b.toml": Said(
        framework="torchtitan",
        model="llama3-8b",
        layout="dp=8,zero=3,recompute=selective,sequence_parallel=true",
        global_batch=8,
        seq_len=8192,
        job={"dtype": "bf16"},
        given={"devices": 8},
    ),
    "torchtitan_405b.toml": Said(
        framework="torchtitan",
        model="llama3.1-405b",
        layout="tp=8,pp=7,dp=8,vpp=2,schedule=interleaved,micro_batch=2,zero=2,recompute=full,sequence_parallel=true,"
        "tp_overlap=true",
        global_batch=128,
        seq_len=8192,
        job={"dtype": "fp8"},
    ),
    "torchtitan_2024.toml": Said(
        framework="torchtitan-compile@2024",
        model="llama3-70b",
        layout="tp=8,dp=16,micro_batch=8,zero=3,sequence_parallel=true",
        global_batch=128,
        seq_len=4096,
        job={"dtype": "bf16"},
    ),
    "nanotron_3d.yaml": Said(
        framework="nanotron",
        model="llama-like-1b",
        layout=f"tp=4,pp=2,dp=4,micro_batch=2,zero=1,sequence_parallel=true,tp_overlap=true,partition=11-5,{NO_OVERLAP}",
        global_batch=128,
        seq_len=4096,
        job={"dtype": "bf16", "grad_dtype": "fp32"},
    ),
    "nanotron_afab.yaml": Said(
        framework="nanotron",
        model={
            "layers": 12,
            "kv_heads": 4,
            "gated_ffn": True,
            "tied_embeddings": False,
            "norm": "rms_norm",
        },
        layout="pp=4,schedule=gpipe,recompute=full,partition=4-4-4-0",
        global_batch=8,
        seq_len=2048,
        job={"dtype": "bf16", "grad_dtype": "bf16"},
    ),
    "llm_foundry_7b.yaml": Said(
        framework="llm-foundry",
        model="mpt-7b",
        layout="dp=32,zero=3,micro_batch=8,recompute=full",
        global_batch=1024,
        seq_len=2048,
        job={"dtype": "bf16", "grad_dtype": "bf16", "flash_attention": True},
        given={"devices": 32},
    ),
    "llm_foundry_hf.yaml": Said(
        framework="llm-foundry",
        model="llama2-13b",
        layout="dp=16,zero=2",
        global_batch=64,
        seq_len=4096,
        job={"dtype": "bf16", "grad_dtype": "fp32"},
    ),
    "maxtext_tpu.yml": Said(
        framework="maxtext",
        model="llama2-7b",
        layout="tp=4,dp=32,zero=3,replicate=2,micro_batch=16,recompute=full",
        global_batch=512,
        seq_len=4096,
        job={"dtype": "bf16", "flash_attention": True},
    ),
    "maxtext_pipeline.yml": Said(
        framework="maxtext",
        model="llama3-8b",
        layout="pp=4,dp=8,vpp=2,micro_batch=2,schedule=breadth-first",
        global_batch=128,
        seq_len=8192,
        job={"dtype": "fp8"},
    ),
    "levanter_8b.yaml": Said(
        framework="levanter",
        model="llama3-8b",
        layout="tp=2,dp=32,zero=3,micro_batch=4,recompute=full",
        global_batch=512,
        seq_len=4096,
        job={"dtype": "bf16"},
        given={"devices": 64},
    ),
    "accelerate_fsdp.yaml": Said(
        framework="fsdp",
        model=None,
        layout="dp=16,zero=3,recompute=full",
        global_batch=None,
        seq_len=None,
        job={"dtype": "bf16"},
    ),
    "accelerate_megatron.yaml": Said(
        framework="megatron-lm",
        model=None,
        layout="tp=4,pp=2,dp=2,zero=1,recompute=selective,sequence_parallel=true,overlap_grad_reduce=false",
        global_batch=None,
        seq_len=None,
        job={"dtype": "fp16"},
    ),
}


def test_every_file_is_tried() -> None:
    assert {path.name for path in FILES.iterdir()} == set(SAID)
    assert len(SAID) >= 20


@pytest.mark.parametrize("name", SAID)
def test_what_a_file_says(name: str) -> None:
    said = SAID[name]
    launch = read_launch(FILES / name, **said.given)
    assert launch.framework == said.framework
    assert launch.layout is not None
    assert comparable(launch.layout) == comparable(pm.Layout.parse(said.layout))
    assert launch.devices == launch.layout.devices
    assert (launch.global_batch, launch.seq_len) == (said.global_batch, said.seq_len)
    assert said.job.items() <= dict(launch.job_fields).items()
    if isinstance(said.model, str):
        assert launch.model == pm.model(said.model)
    elif said.model is None:
        assert launch.model is None
        assert any("--model" in line for line in launch.missing)
    else:
        assert said.model.items() <= launch.model.values().items()
    assert (said.global_batch is None) == any("--global-batch" in line for line in launch.missing)


@pytest.mark.parametrize("name", [name for name, said in SAID.items() if "devices" in said.given])
def test_devices_that_a_file_leaves_open_are_asked_for(name: str) -> None:
    launch = read_launch(FILES / name)
    assert launch.layout is None
    assert any("--devices" in line for line in launch.missing)


def test_what_is_unsaid_is_said() -> None:
    launch = read_launch(FILES / "torchtitan_2024.toml")
    assumed, batch = launch.assumed
    assert (
        batch == "global_batch=128 (the file states no accumulation; --global-batch sets another)"
    )
    assert (
        assumed
        == "ep=1, schedule=1f1b, dtype=bf16, tp_overlap=false (torchtitan-compile@2024's defaults)"
    )
    (assumed,) = read_launch(FILES / "accelerate_fsdp.yaml").assumed[-1:]
    assert assumed.startswith("micro_batch=1")


@pytest.mark.parametrize(
    ("name", "was", "becomes", "said"),
    [
        (
            "maxtext_tpu.yml",
            "remat_policy: full",
            "remat_policy: save_qkv_proj",
            "remat_policy save_qkv_proj is predicted as recompute=full",
        ),
        (
            "deepspeed_offload.json",
            '"cpu"',
            '"nvme"',
            "states on NVMe are predicted as if they were in host memory",
        ),
    ],
)
def test_what_is_read_only_nearly_is_said(name: str, was: str, becomes: str, said: str) -> None:
    text = (FILES / name).read_text()
    assert was in text
    launch = parse_launch(text.replace(was, becomes), name, devices=8)
    assert any(said in line for line in launch.assumed)
    assert launch.layout is not None


@pytest.mark.parametrize(
    ("schedule", "pieces", "micro_batch"),
    [
        ("1F1B", "", 8),
        ("Interleaved1F1B", "", 4),
        ("1F1B", "pipeline_parallel_microbatches = 32", 1),
    ],
)
def test_pipelines_of_2024_cut_a_local_batch_into_as_many_as_stages(
    schedule, pieces, micro_batch
) -> None:
    """The default of `pipeline_parallel_microbatches` in torchtitan's config_manager.py of December
    2024."""
    text = (FILES / "torchtitan_2024.toml").read_text().replace("batch_size = 8", "batch_size = 32")
    said = f'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "{schedule}"\n{pieces}'
    layout = parse_launch(
        text.replace("pipeline_parallel_degree = 1", said), "torchtitan_2024.toml"
    ).layout
    assert layout is not None
    assert (layout.pp, layout.micro_batch) == (4, micro_batch)
    uneven = text.replace("pipeline_parallel_degree = 1", said).replace(
        "batch_size = 32", "batch_size = 31"
    )
    if micro_batch > 1:
        with pytest.raises(LaunchFileError, match="equal micro-batches"):
            parse_launch(uneven, "torchtitan_2024.toml")


def test_what_is_compiled_is_a_framework_that_writes_so() -> None:
    text = (FILES / "torchtitan_2024.toml").read_text()
    assert parse_launch(text, "a.toml").framework.startswith("torchtitan-compile")
    assert (
        parse_launch(text.replace("compile = true", "compile = false"), "a.toml").framework
        == "torchtitan@2024"
    )
    layout = parse_launch(text, "a.toml").layout
    assert layout is not None
    for name in ("torchtitan", "torchtitan-compile"):
        written = export_launch(layout, name, model="llama3-70b")
        assert parse_launch(written, "a.toml", devices=layout.devices).framework == name


@pytest.mark.parametrize(
    ("name", "was", "becomes", "says"),
    [
        (
            "torchtitan_8b.toml",
            "replicate_degree = 1\ndata_parallel_shard_degree = -1",
            "replicate_degree = 4\ndata_parallel_shard_degree = 16",
            {"dp": 64, "replicate": 4, "zero": 3},
        ),
        (
            "torchtitan_8b.toml",
            "replicate_degree = 1",
            "replicate_degree = 2",
            {"dp": 64, "replicate": 2, "zero": 3},
        ),
        (
            "llm_foundry_7b.yaml",
            "FULL_SHARD",
            "HYBRID_SHARD",
            {"dp": 64, "replicate": 8, "zero": 3},
        ),
        (
            "llm_foundry_7b.yaml",
            "FULL_SHARD",
            "_HYBRID_SHARD_ZERO2",
            {"dp": 64, "replicate": 8, "zero": 2},
        ),
        ("accelerate_fsdp.yaml", "FULL_SHARD", "4", {"replicate": 2, "zero": 3}),
        (
            "accelerate_fsdp.yaml",
            "fsdp_offload_params: false",
            "fsdp_offload_params: true",
            {"offload_states": "weights"},
        ),
        (
            "deepspeed_offload.json",
            '"offload_optimizer"',
            '"mics_shard_size": 16, "offload_optimizer"',
            {"replicate": 4, "offload_states": "optimizer"},
        ),
    ],
)
def test_groups_that_shard_and_states_on_the_host_are_read(
    name: str, was: str, becomes: str, says: dict
) -> None:
    text = (FILES / name).read_text()
    assert was in text
    layout = parse_launch(
        text.replace(was, becomes), name, devices=None if "accel" in name else 64
    ).layout
    assert layout is not None
    assert {field: layout.value(field) for field in says} == says


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("megatron_gpt3.sh", ()),
        ("megatron_mixtral.slurm", ()),  # grouped products are what is predicted
        ("bridge_70b.yaml", ()),
        ("deepspeed_offload.json", ()),
        ("deepspeed_zero3.json", ()),
        ("torchtitan_8b.toml", ()),
        ("torchtitan_2024.toml", ()),
        ("nanotron_3d.yaml", ()),
        ("llm_foundry_7b.yaml", ()),
        (
            "maxtext_tpu.yml",
            (
                "base.yml (line 1), which the file builds on, was not found in the same folder; "
                "its settings are missing here",
            ),
        ),
        ("accelerate_fsdp.yaml", ()),
        ("levanter_8b.yaml", ()),
    ],
)
def test_what_is_not_understood_is_named_with_its_line(name: str, ignored: tuple[str, ...]) -> None:
    launch = read_launch(FILES / name)
    assert set(ignored) <= set(launch.ignored)
    assert len(launch.ignored) <= len(ignored) + 1


def test_a_batch_that_the_caller_gives_is_not_assumed() -> None:
    file = FILES / "torchtitan_2024.toml"
    for given, is_assumed in (
        ({}, True),
        ({"seq_len": 2048}, True),
        ({"global_batch": 512}, False),
    ):
        assumed = read_launch(file, **given).assumed
        assert any(sentence.startswith("global_batch=") for sentence in assumed) == is_assumed, (
            given
        )


MAXTEXT = "base_config: base.yml\nmodel_name: llama2-7b\nper_device_batch_size: 2\n"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"global_batch": 512}, "global_batch"),
        ({"seq_len": 512}, "seq_len"),
        ({"dtype": "fp32"}, "dtype"),
        ({"layout": "zero=1"}, "zero"),
        ({"layout": "recompute=none"}, "recompute"),
    ],
)
def test_a_default_is_said_unless_the_caller_states_the_field(
    given: dict[str, Any], key: str
) -> None:
    """And what the caller states hides no other."""

    def said(**given: Any) -> set[str]:
        sentences = " ".join(parse_launch(MAXTEXT, "run.yml", devices=8, **given).assumed)
        return set(re.findall(r"\b(\w+)=", sentences))

    every = {"seq_len", "dtype", "zero", "recompute", "global_batch"}
    assert said() == every
    assert said(**given) == every - {key}


def test_a_given_layout_keeps_the_copies_that_a_file_states() -> None:
    launch = read_launch(FILES / "maxtext_tpu.yml", layout="micro_batch=2")
    assert launch.layout is not None
    assert (launch.layout.replicate, launch.layout.micro_batch) == (2, 2)


def test_a_group_of_a_given_layout_is_of_tensor_context_and_pipeline_ranks() -> None:
    """What is left of the devices are replicas; degrees that do not divide them are refused."""
    file = FILES / "megatron_gpt3.sh"
    launch = read_launch(file, layout="tp=4,cp=2,pp=4", devices=128)
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.dp) == (2, 4)
    with pytest.raises(LaunchFileError, match=r"128 devices are not a multiple of .* = 96"):
        read_launch(file, layout="tp=4,cp=3,pp=8", devices=128)


@pytest.mark.parametrize(
    ("replicas", "cp", "ep"), [(2, 1, 2), (8, 1, 8), (16, 1, 8), (2, 2, 4), (4, 4, 8)]
)
def test_experts_lie_on_no_more_replicas_than_there_are(replicas: int, cp: int, ep: int) -> None:
    """DeepSpeed's experts for as many ranks at most; replicas and the ranks of a sequence hold
    them."""
    text = (
        f"deepspeed --num_gpus {replicas * cp} pretrain_gpt.py --num-layers 24 --hidden-size 2048 --seq-length 2048 "
        "--num-attention-heads 16 --vocab-size 51200 --micro-batch-size 2 --global-batch-size 512 --bf16 "
        f"--num-experts 8 --moe-expert-parallel-size 8 --context-parallel-size {cp}"
    )
    launch = parse_launch(text, "run.sh")
    assert launch.layout is not None
    assert (launch.layout.dp, launch.layout.cp, launch.layout.ep) == (replicas, cp, ep)


def test_what_surely_runs_counts_before_what_a_branch_may_run() -> None:
    """Beside programs that train nothing, too."""
    flags = (
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 51200 "
        "--micro-batch-size 2 --global-batch-size 512 --bf16"
    )
    train = f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} --tensor-model-parallel-size"
    text = f'python prepare.py --out data\nif [ -n "$BIG" ]; then\n  {train} 8\nfi\n{train} 2\n'
    launch = parse_launch(text, "run.sh")
    assert launch.layout is not None
    assert launch.layout.tp == 2


def test_a_model_of_another_library_without_its_name_is_asked_for() -> None:
    text = (FILES / "llm_foundry_hf.yaml").read_text()
    unnamed = "".join(
        line
        for line in text.splitlines(keepends=True)
        if "pretrained_model_name_or_path" not in line
    )
    launch = parse_launch(unnamed, "foundry.yaml")
    assert launch.model is None
    assert any("--model" in sentence for sentence in launch.missing)


def test_flags_win_over_the_file() -> None:
    file = FILES / "megatron_gpt3.sh"
    other = read_launch(file, layout="tp=4", global_batch=512, model="gpt3-13b")
    assert other.layout is not None
    # the devices of the file are divided anew
    assert (other.layout.tp, other.layout.pp, other.layout.dp) == (4, 16, 2)
    assert (other.layout.zero, other.global_batch, other.model) == (1, 512, pm.model("gpt3-13b"))
    more = read_launch(file, devices=1024)
    assert more.layout is not None
    assert (more.layout.dp, more.devices) == (8, 1024)
    with pytest.raises(
        LaunchFileError, match=r"megatron_gpt3.sh: 128 devices are not a multiple of .* = 48"
    ):
        read_launch(file, layout="tp=3")


def test_steps_of_accumulation_are_no_micro_batch(tmp_path: Path) -> None:
    text = (FILES / "llm_foundry_hf.yaml").read_text()
    file = tmp_path / "accumulated.yaml"
    file.write_text(
        text.replace("device_train_microbatch_size: auto", "device_train_grad_accum: 2")
    )
    layout = read_launch(file).layout
    assert layout is not None
    assert (layout.dp, layout.micro_batch) == (16, 2)  # of 64 sequences


def test_variables_of_a_script_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIZE", "13b")
    model = read_launch(FILES / "megatron_strings.sh").model
    assert model is not None
    assert (model.name, model.layers) == ("llama2-13b", 40)
    monkeypatch.setenv("MICRO", "2")
    launch = read_launch(FILES / "megatron_mixtral.slurm")
    assert launch.layout is not None
    assert launch.layout.micro_batch == 2
    assert (
        "MICRO=2 was taken from your shell's environment, which may differ from the cluster's"
        in launch.ignored
    )


def test_hydra_defaults_beside_the_file_are_composed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text(
        "num_layers: 12\nhidden_size: 768\nnum_attention_heads: 12\ntensor_model_parallel_size: 2\n"
    )
    (tmp_path / "base.yaml").write_text(
        "trainer: {devices: 8, num_nodes: 1}\nmodel: {encoder_seq_length: 512}\n"
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        "defaults:\n  - base\n  - model: small\n  - override hydra/launcher: local\n"
        "model:\n  micro_batch_size: 1\n  global_batch_size: 16\n  tensor_model_parallel_size: 4\n"
    )
    launch = read_launch(path)
    assert launch.layout is not None
    assert launch.model is not None
    # what the file itself says replaces what it is composed of
    assert (launch.layout.tp, launch.layout.dp, launch.model.layers, launch.seq_len) == (
        4,
        2,
        12,
        512,
    )
    assert not launch.ignored


def test_a_launch_file_is_a_problem() -> None:
    launch = read_launch(FILES / "nanotron_3d.yaml")
    assert launch.layout is not None
    assert launch.model is not None
    problem = launch.problem("dgx-h100")
    job = problem.job
    assert (job.global_batch, job.seq_len, job.dtype) == (128, 4096, "bf16")
    assert (problem.model, problem.devices, problem.framework.name) == (
        launch.model,
        32,
        "nanotron",
    )
    assert pm.predict(problem, layout=launch.layout).devices == 32
    with pytest.raises(LaunchFileError, match=r"accelerate_fsdp.yaml: .*--model"):
        read_launch(FILES / "accelerate_fsdp.yaml").problem("dgx-h100")


@pytest.mark.parametrize(
    ("arguments", "dispatcher", "capacity"),
    [
        ("--moe-token-dispatcher-type alltoall", "alltoall", None),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "deepep", None),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            "hybridep",
            None,
        ),
        ("--moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity", None, 1.25),
        ("--moe-expert-capacity-factor 1.25", None, None),
    ],
)
def test_dispatch_of_tokens_is_read(
    arguments: str, dispatcher: str | None, capacity: float | None
) -> None:
    text = f"pretrain_gpt.py --num-attention-heads 32 --micro-batch-size 1 --num-experts 8 {arguments}\n"
    launch = parse_launch(text, "run.sh", devices=8)
    assert launch.job_fields.get("expert_dispatcher") == dispatcher
    assert launch.job_fields.get("expert_capacity_factor") == capacity


@pytest.mark.parametrize(
    ("arguments", "graphs"),
    [
        ("", None),
        ("--enable-cuda-graph", "layers"),
        ("--external-cuda-graph", "layers"),
        ("--cuda-graph-impl none", "none"),
        ("--cuda-graph-impl transformer_engine", "layers"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "step"),
    ],
)
def test_cuda_graphs_are_read(arguments: str, graphs: str | None) -> None:
    text = f"pretrain_gpt.py --num-attention-heads 32 --micro-batch-size 1 {arguments}\n"
    assert parse_launch(text, "run.sh", devices=8).job_fields.get("cuda_graphs") == graphs


def test_cuda_graphs_of_parts_of_layers_are_named() -> None:
    text = "pretrain_gpt.py --num-attention-heads 32 --micro-batch-size 1 --cuda-graph-impl local"
    launch = parse_launch(f"{text} --cuda-graph-scope attn\n", "run.sh", devices=8)
    assert launch.job_fields["cuda_graphs"] == "none"
    assert any("CUDA graphs for attn" in one for one in launch.assumed)


def test_kinds_of_context_parallelism_are_read() -> None:
    words = "--num-attention-heads 32 --micro-batch-size 1 --context-parallel-size 2 --cp-comm-type"
    for name, kind in {"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"}.items():
        launch = parse_launch(f"pretrain_gpt.py {words} {name}\n", "run.sh", devices=8)
        assert launch.layout is not None
        assert launch.layout.cp_kind == kind
    with pytest.raises(LaunchFileError, match="must be one of p2p"):
        parse_launch(f"pretrain_gpt.py {words} star\n", "run.sh", devices=8)


@pytest.mark.parametrize(
    ("name", "text", "optimizer", "modules"),
    [
        (
            "a.sh",
            f"{_MEGATRON} --optimizer dist_muon --recompute-granularity selective "
            "--recompute-modules core_attn moe_act",
            "muon",
            ("core_attn", "moe_act"),
        ),
        ("a.sh", f"{_MEGATRON} --optimizer adam", "adam", None),
        ("a.sh", f"{_MEGATRON} --optimizer a_new_one", None, None),
        ("a.json", '{"train_batch_size": 8, "optimizer": {"type": "FusedLion"}}', "lion", None),
        (
            "a.toml",
            '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nname = "AdamW"\n',
            "adam",
            None,
        ),
        (
            "a.yaml",
            "train: {micro_batch_size: 1, global_batch_size: 8}\noptimizer: {optimizer: muon}\n"
            "model: {recompute_granularity: selective, recompute_modules: [layernorm]}\n",
            "muon",
            ("layernorm",),
        ),
    ],
)
def test_optimizers_and_recomputed_modules_are_read(
    name: str, text: str, optimizer: str | None, modules: tuple[str, ...] | None
) -> None:
    stated = parse_launch(text, name).job_fields
    assert (stated.get("optimizer"), stated.get("recompute_modules")) == (optimizer, modules)


def test_a_module_that_megatron_does_not_have_is_refused() -> None:
    with pytest.raises(
        LaunchFileError, match="recompute-modules has no modules attn; there are core_attn"
    ):
        parse_launch(f"{_MEGATRON} --recompute-modules attn mlp", "a.sh")


@pytest.mark.parametrize(
    ("arguments", "grad_dtype"),
    [
        ("--fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp32"),
        ("--bf16", "fp32"),
        ("--bf16 --grad-reduce-in-bf16", "bf16"),
    ],
)
def test_element_types_of_megatron_s_gradients_are_read(arguments: str, grad_dtype: str) -> None:
    said = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1"
    text = f"{said} --max-position-embeddings 512 --global-batch-size 8 {arguments}"
    launch = parse_launch(text, "arguments.txt", devices=8)
    found = (
        pm.framework(launch.framework).job_defaults(launch.job_fields["dtype"]) | launch.job_fields
    )
    assert found["grad_dtype"] == grad_dtype


def test_further_tokens_and_modules_come_back_as_they_were_written() -> None:
    model, job = (
        pm.model("deepseek-v3-mtp"),
        pm.problem(
            "deepseek-v3-mtp",
            "dgx-h100",
            global_batch=64,
            job={"recompute_modules": ("core_attn", "mla_up_proj"), "optimizer": "muon"},
        ).job,
    )
    layout = pm.Layout.parse("pp=8,dp=8,ep=8,zero=1,recompute=selective,sequence_parallel=true")
    text = export_launch(layout, "megatron-core", model=model, job=job)
    assert "--mtp-num-layers 1" in text
    assert "--recompute-modules core_attn mla_up_proj" in text
    back = parse_launch(text, "a.sh")
    assert back.model == model
    assert back.job_fields["optimizer"] == "muon"


@pytest.mark.parametrize(
    ("name", "text", "layers"),
    [
        (
            "train.sh",
            "torchrun --nproc-per-node 8 p.py --num-layers 24 --micro-batch-size 2 --tensor-model-parallel-size 1 "
            "--cpu-offloading-num-layers 9",
            9,
        ),
        (
            "bridge.yaml",
            "train: {global_batch_size: 64, micro_batch_size: 2}\n"
            "model: {cpu_offloading: true, cpu_offloading_num_layers: 9, cpu_offloading_weights: false}",
            9,
        ),
        (
            "bridge.yaml",
            "train: {global_batch_size: 64, micro_batch_size: 2}\n"
            "model: {cpu_offloading: false, cpu_offloading_num_layers: 9, cpu_offloading_weights: true}",
            0,
        ),
    ],
)
def test_layers_on_the_host_are_read_where_they_are_turned_on(name, text, layers):
    assert parse_launch(text, name, devices=8, model="gpt2-345m").layout.offload_layers == layers


def test_weights_on_the_host_layer_by_layer_are_refused():
    text = (
        "train: {micro_batch_size: 2}\nmodel: {cpu_offloading: true, cpu_offloading_weights: true}"
    )
    with pytest.raises(LaunchFileError, match="weights"):
        parse_launch(text, "bridge.yaml", devices=8)


ON, OFF, LEFT_OPEN = True, False, "auto"


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"bf16": {"enabled": ON}}, "bf16"),
        ({"bf16": {"enabled": LEFT_OPEN}}, "bf16"),
        ({"bf16": LEFT_OPEN}, "bf16"),
        ({"bfloat16": {"enabled": LEFT_OPEN}}, "bf16"),
        ({"fp16": {"enabled": LEFT_OPEN, "loss_scale": 0}}, "fp16"),
        ({"fp16": LEFT_OPEN}, "fp16"),
        ({"amp": {"enabled": LEFT_OPEN, "opt_level": LEFT_OPEN}}, "fp16"),
        ({"fp16": {"enabled": LEFT_OPEN}, "bf16": {"enabled": LEFT_OPEN}}, "bf16"),
        ({"bf16": {"enabled": LEFT_OPEN}, "fp16": {"enabled": ON}}, "fp16"),
        ({"bf16": {"enabled": OFF}, "fp16": {"enabled": LEFT_OPEN}}, "fp16"),
        ({"bf16": {"enabled": OFF}, "fp16": {"enabled": OFF}}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_deepspeed_leaves_the_element_type_to_a_trainer_that_is_meant_to_set_it(
    tmp_path: Path, settings: dict[str, Any], dtype: str
) -> None:
    """Hugging Face's Trainer replaces `auto` by its own flags: a file that has it for a type is
    meant for that type."""
    path = tmp_path / "ds_config.json"
    batch = {"train_micro_batch_size_per_gpu": LEFT_OPEN, "gradient_accumulation_steps": LEFT_OPEN}
    path.write_text(
        json.dumps(
            {"zero_optimization": {"stage": 2, "overlap_comm": LEFT_OPEN}} | batch | settings
        )
    )
    launch = read_launch(path, devices=8)
    fields = dict(launch.job_fields)
    assert fields["dtype"] == dtype
    assert not launch.ignored
    decided = LEFT_OPEN not in str(settings) or "True" in str(settings)
    assert any("auto" in remark for remark in launch.assumed) != decided


DEEPSPEED_FILES = {
    "ds_config.json": '{{"train_micro_batch_size_per_gpu": 1, "{dtype}": {{"enabled": true}}, '
    '"zero_optimization": {{"stage": {stage}}}}}',
    "auto.json": '{{"train_micro_batch_size_per_gpu": 1, "{dtype}": {{"enabled": "auto"}}, '
    '"zero_optimization": {{"stage": {stage}}}}}',
    "megatron_deepspeed.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 1 "
    "--micro-batch-size 1 --deepspeed --zero-stage {stage} --{dtype}\n",
    "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: {dtype}\n"
    "deepspeed_config:\n  zero_stage: {stage}\n",
}


@pytest.mark.parametrize("name", DEEPSPEED_FILES)
@pytest.mark.parametrize(
    ("dtype", "stage", "runs"), [("bf16", 0, 1), ("bf16", 1, 1), ("bf16", 3, 3), ("fp16", 0, 0)]
)
def test_bf16_without_zero_is_sharded_by_deepspeed_s_optimizer(
    tmp_path: Path, name: str, dtype: str, stage: int, runs: int
) -> None:
    path = tmp_path / name
    path.write_text(DEEPSPEED_FILES[name].format(dtype=dtype, stage=stage))
    launch = read_launch(path, devices=8)
    assert launch.layout is not None
    assert launch.layout.zero == runs
    assert any("BF16 optimizer" in remark for remark in launch.assumed) == (runs != stage)
    if runs != stage:
        assert dict(launch.job_fields)["grad_dtype"] == "fp32"


def test_plain_megatron_keeps_the_stage_that_it_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --num-attention-heads 8 --bf16\n"
    )
    launch = read_launch(path, devices=8)
    assert launch.layout is not None
    assert launch.layout.zero == 0


@pytest.mark.parametrize(
    ("total", "schedule"), [(8, "1f1b"), (16, "1f1b*2"), (64, "1f1b*8"), (None, "1f1b")]
)
def test_torchtitan_runs_through_its_pipeline_for_every_local_batch(
    total: int | None, schedule: str
) -> None:
    """torchtitan's train.py calls the schedule's step once for each accumulation."""
    stated = f"global_batch_size = {total}\n" if total else ""
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n'
        f"[training]\nlocal_batch_size = 4\n{stated}seq_len = 4096\n"
        "[parallelism]\npipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2\n"
        'pipeline_parallel_schedule = "1F1B"\npipeline_parallel_microbatch_size = 1\n'
    )
    launch = parse_launch(text, "run.toml", devices=8)
    assert launch.layout is not None
    assert launch.layout.schedule == schedule
    assert launch.global_batch == (total or 8)
    written = export_launch(
        launch.layout,
        "torchtitan",
        model="llama3-8b",
        job=Job(global_batch=total or 8, seq_len=4096),
    )
    assert "local_batch_size = 4" in written


def test_maxtext_runs_through_its_pipeline_for_every_accumulation() -> None:
    text = (
        "model_name: llama3-8b\nper_device_batch_size: 1\ngradient_accumulation_steps: 4\n"
        "ici_pipeline_parallelism: 4\nici_fsdp_parallelism: 2\nnum_pipeline_microbatches: 4\n"
        "max_target_length: 4096\n"
    )
    launch = parse_launch(text, "run.yml", devices=8)
    assert launch.layout is not None
    assert launch.layout.schedule == "gpipe*4"
    assert (launch.layout.micro_batch, launch.global_batch) == (1, 32)
    written = export_launch(
        launch.layout, "maxtext", model="llama3-8b", job=Job(global_batch=32, seq_len=4096)
    )
    assert "gradient_accumulation_steps: 4" in written
    assert "num_pipeline_microbatches: 4" in written
