"""What frameworks do where a launch file says nothing: smallest files, and each default by
itself."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import FORMATS, parse_launch

DEEPSPEED = '{"train_micro_batch_size_per_gpu": 4, %s}'
STAGE_3 = '"zero_optimization": {"stage": 3%s}'
TORCHTITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n%s\n[training]\n%s\n'
MEGATRON = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 "
    "--global-batch-size 64 %s\n"
)
NANOTRON = (
    "parallelism: {dp: 4, tp: 2, pp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}\n"
    "tokens: {micro_batch_size: 2, sequence_length: 4096, batch_accumulation_per_replica: 4}\n"
    "optimizer: {zero_stage: 0}\n"
)
ACCELERATE = "distributed_type: %s\nnum_processes: 16\n%s\n"
FOUNDRY = (
    "max_seq_len: 2048\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 4\n"
    "fsdp_config: {sharding_strategy: FULL_SHARD}\n"
    "model: {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 24}\n"
)
MAXTEXT = "base_config: base.yml\nmodel_name: llama2-7b\nper_device_batch_size: 2\n"
NEMO = (
    "trainer: {devices: 8, num_nodes: 2}\nmodel: {micro_batch_size: 1, global_batch_size: 32, num_layers: 24, "
    "hidden_size: 1024, num_attention_heads: 16, encoder_seq_length: 2048}\n"
)
SERIAL = "overlap_grad_reduce=false,overlap_param_gather=false"


def read(name: str, text: str) -> tuple[pm.Layout, Any]:
    """The layout of a file on 16 devices, and all that is read."""
    launch = parse_launch(text, name, devices=16)
    assert launch.layout is not None
    return launch.layout, launch


@pytest.mark.parametrize(
    ("name", "text", "framework", "layout", "global_batch", "seq_len", "job"),
    [
        (
            "a.sh",
            MEGATRON % "",
            "megatron-core",
            f"dp=16,micro_batch=2,{SERIAL}",
            64,
            2048,
            {"dtype": "fp32"},
        ),
        (
            "a.json",
            DEEPSPEED % (STAGE_3 % ""),
            "deepspeed",
            "dp=16,micro_batch=4,zero=3",
            64,
            None,
            {"dtype": "fp32"},
        ),
        # a local batch of 8, sequences of 2048 tokens, every second layer recomputed, FSDP that
        # gathers again
        (
            "a.toml",
            TORCHTITAN % ("", ""),
            "torchtitan",
            "dp=16,micro_batch=8,zero=3,sequence_parallel=true,recompute_full_layers=16",
            128,
            2048,
            {"dtype": "bf16"},
        ),
        # micro-batches of one sequence in a pipeline, whose FSDP keeps what it gathered
        (
            "a.toml",
            TORCHTITAN % ("pipeline_parallel_degree = 2", ""),
            "torchtitan",
            "pp=2,dp=8,micro_batch=1,zero=2,sequence_parallel=true,recompute_full_layers=8",
            64,
            2048,
            {"dtype": "bf16"},
        ),
        (
            "a.yaml",
            NANOTRON,
            "nanotron",
            "tp=2,dp=8,micro_batch=2,sequence_parallel=true",
            64,
            4096,
            {"dtype": "bf16"},
        ),
        (
            "a.yaml",
            ACCELERATE % ("FSDP", ""),
            "fsdp",
            "dp=16,zero=3",
            None,
            None,
            {"dtype": "fp32"},
        ),
        (
            "a.yaml",
            ACCELERATE % ("MULTI_GPU", ""),
            "pytorch",
            "dp=16,zero=0",
            None,
            None,
            {"dtype": "fp32"},
        ),
        (
            "a.yaml",
            ACCELERATE % ("DEEPSPEED", "mixed_precision: bf16"),
            "deepspeed",
            "dp=16,zero=2,overlap_grad_reduce=false",
            None,
            None,
            {"dtype": "bf16"},
        ),
        (
            "a.yaml",
            FOUNDRY,
            "llm-foundry",
            "dp=16,micro_batch=4,zero=3",
            64,
            2048,
            {"dtype": "bf16", "grad_dtype": "fp32"},
        ),
        (
            "a.yml",
            MAXTEXT,
            "maxtext",
            "dp=16,micro_batch=2,zero=3,recompute=full",
            32,
            2048,
            {"dtype": "bf16"},
        ),
        ("a.yaml", NEMO, "nemo@2023", "dp=16,zero=1", 32, 2048, {}),
    ],
)
def test_the_smallest_file_is_filled_in_as_its_framework_does(
    name: str,
    text: str,
    framework: str,
    layout: str,
    global_batch: int | None,
    seq_len: int | None,
    job: dict[str, Any],
) -> None:
    found, launch = read(name, text)
    assert launch.framework == framework
    assert found == pm.Layout.parse(layout)
    assert (launch.global_batch, launch.seq_len) == (global_batch, seq_len)
    assert job.items() <= dict(launch.job_fields).items()


@pytest.mark.parametrize(
    ("stage", "said", "reduces", "gathers"),
    [
        (3, "", True, True),
        (3, ', "overlap_comm": false', False, True),
        (3, ', "stage3_prefetch_bucket_size": 0', True, False),
        (2, "", False, True),
        (2, ', "overlap_comm": true', True, True),
        (1, ', "overlap_comm": true', True, True),
    ],
)
def test_deepspeed_overlaps_by_default_under_stage_3_alone(
    stage: int, said: str, reduces: bool, gathers: bool
) -> None:
    layout, _ = read("a.json", DEEPSPEED % f'"zero_optimization": {{"stage": {stage}{said}}}')
    assert (
        layout.zero,
        layout.overlap.overlap_grad_reduce,
        layout.overlap.overlap_param_gather,
    ) == (
        stage,
        reduces,
        gathers,
    )


@pytest.mark.parametrize(
    ("parallelism", "training", "micro_batch", "global_batch"),
    [
        ("", "", 8, 128),
        ("", "local_batch_size = 2", 2, 32),
        ("", "local_batch_size = 2\nglobal_batch_size = 64", 2, 64),
        ("", "local_batch_size = 2\nglobal_batch_size = -1", 2, 32),
        ("pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 4", "", 4, 64),
        ("pipeline_parallel_degree = 2", "local_batch_size = 16", 1, 128),
    ],
)
def test_torchtitan_takes_eight_sequences_a_replica(
    parallelism: str, training: str, micro_batch: int, global_batch: int
) -> None:
    layout, launch = read("a.toml", TORCHTITAN % (parallelism, training))
    assert (layout.micro_batch, launch.global_batch) == (micro_batch, global_batch)


@pytest.mark.parametrize(
    ("said", "zero", "replicate"),
    [
        ("", 3, 1),
        ('fsdp_reshard_after_forward = "never"', 2, 1),
        ('pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"', 3, 1),
        ("data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 16", 0, 1),
        ("data_parallel_shard_degree = 4\ndata_parallel_replicate_degree = 4", 3, 4),
    ],
)
def test_torchtitan_shards_weights_and_gathers_them_again_outside_pipelines(
    said: str, zero: int, replicate: int
) -> None:
    layout, _ = read("a.toml", TORCHTITAN % (said, ""))
    assert (layout.zero, layout.replicate) == (zero, replicate)


@pytest.mark.parametrize(
    ("schedule", "name", "vpp"),
    [
        ("1F1B", "1f1b", 1),
        ("GPipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("LoopedBFS", "breadth-first", 2),
        ("ZBVZeroBubble", "zb-v", 1),
        ("DualPipeV", "dualpipe-v", 1),
    ],
)
def test_looped_schedules_of_torch_have_two_virtual_stages(
    schedule: str, name: str, vpp: int
) -> None:
    said = f'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "{schedule}"'
    layout, _ = read("a.toml", TORCHTITAN % (said, ""))
    assert (layout.schedule, layout.vpp) == (name, vpp)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("", {"zero": 0, "recompute": "none", "sequence_parallel": False}),
        ("--use-distributed-optimizer", {"zero": 1}),
        ("--use-torch-fsdp2", {"zero": 3}),
        ("--recompute-activations", {"recompute": "selective"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"recompute": "full"},
        ),
        ("--overlap-grad-reduce", {"overlap_grad_reduce": True, "overlap_param_gather": False}),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            {"tp": 2, "dp": 8, "sequence_parallel": True},
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6",
            {"pp": 2, "vpp": 2},
        ),
        ("--context-parallel-size 4", {"cp": 4, "dp": 4}),
    ],
)
def test_megatron_does_nothing_that_it_is_not_told(said: str, fields: dict[str, Any]) -> None:
    layout, _ = read("a.sh", MEGATRON % said)
    assert {name: layout.value(name) for name in fields} == fields


@pytest.mark.parametrize(("said", "dtype"), [("", "fp32"), ("--bf16", "bf16"), ("--fp16", "fp16")])
def test_megatron_computes_in_fp32_unless_told(said: str, dtype: str) -> None:
    _, launch = read("a.sh", MEGATRON % said)
    assert launch.job_fields["dtype"] == dtype


@pytest.mark.parametrize(("passes", "global_batch"), [(1, 16 * 4), (3, 3 * 16 * 4)])
def test_batches_are_sequences_a_device_times_replicas_times_passes(
    passes: int, global_batch: int
) -> None:
    _, launch = read("a.json", DEEPSPEED % f'"gradient_accumulation_steps": {passes}')
    assert launch.global_batch == global_batch


def test_accelerate_gathers_weights_again_unless_told() -> None:
    for said, zero in (
        ("", 3),
        ("  fsdp_reshard_after_forward: false", 2),
        ("  fsdp_sharding_strategy: 2", 2),
    ):
        layout, _ = read(
            "a.yaml", ACCELERATE % ("FSDP", f"fsdp_config:\n  fsdp_version: 2\n{said}")
        )
        assert layout.zero == zero


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("${model.micro_batch_size}", 2),
        ("${.micro_batch_size}", 2),  # beside it
        ("${..trainer.num_nodes}", 4),  # beside what holds it
    ],
)
def test_references_of_omegaconf_count_from_the_root_or_by_dots_from_their_own_place(
    reference: str, expected: int
) -> None:
    text = (
        "trainer: {devices: 4, num_nodes: 4}\n"
        "model:\n  micro_batch_size: 2\n  global_batch_size: 64\n  num_layers: 24\n  hidden_size: 1024\n"
        f"  num_attention_heads: 16\n  encoder_seq_length: 2048\n  tensor_model_parallel_size: {reference}\n"
    )
    layout, _ = read("a.yaml", text)
    assert layout.tp == expected


@pytest.mark.parametrize(
    ("said", "partition"),
    [
        ("--decoder-first-pipeline-num-layers 3", (3, 7, 7, 7)),
        ("--decoder-last-pipeline-num-layers 6", (6, 6, 6, 6)),
        (
            "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 3",
            (5, 8, 8, 3),
        ),
    ],
)
def test_stages_of_megatron_whose_number_is_unsaid_share_what_is_left(
    said: str, partition: tuple[int, ...]
) -> None:
    layout, _ = read("a.sh", MEGATRON % f"--pipeline-model-parallel-size 4 {said}")
    assert layout.partition in (partition, None if len(set(partition)) == 1 else partition)
    with pytest.raises(LaunchFileError, match="is not a multiple of"):
        read(
            "a.sh",
            MEGATRON % "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
        )


class AskedSettings(dict[str, Any]):
    """Settings of a file that remember which of them a reader asks for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.asked: set[str] = set()

    def get(self, name: str, otherwise: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, otherwise)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


SETTINGS: tuple[Any, ...] = (
    True,
    False,
    1,
    2,
    4096,
    1e-3,
    "1",
    "none",
    "full",
    "selective",
    "bf16",
    "fp8",
    "1F1B",
    "x",
    [1, 2],
    {"a": 1},
)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.frameworks[0])
def test_a_rule_asks_for_no_setting_that_it_does_not_know(form: Any) -> None:
    """A rule is given those of its keys that a file has: whatever else it asks for would never be
    there."""
    for rule in form.table:
        files: list[dict[str, Any]] = [{}]
        for value in SETTINGS:
            files += [{key: value} for key in rule.keys]
            files.append(dict.fromkeys(rule.keys, value))
        for settings in files:
            asked = AskedSettings(settings)
            # Values of other kinds than the settings have may end in any error.
            with suppress(Exception):
                rule.read(asked)
            assert asked.asked <= set(rule.keys), rule.keys


@pytest.mark.parametrize(
    "flag",
    [
        "--deepspeed",
        "--moe-expert-parallel-size 2",
        "--expert-interval 2",
        "--ds-sequence-parallel-size 2",
    ],
)
def test_experts_of_megatron_deepspeed_are_known_by_any_of_its_flags(flag: str) -> None:
    """One expert a token in every second layer, where Megatron-Core has two in all."""
    _, launch = read("a.sh", MEGATRON % f"--num-experts 16 {flag}")
    assert (launch.model.experts.topk, launch.model.experts.every) == (1, 2)
    _, launch = read("a.sh", MEGATRON % "--num-experts 16")
    assert (launch.model.experts.topk, launch.model.experts.every) == (2, 1)


@pytest.mark.parametrize(("kind", "devices"), [('"NO"', 1), ("NO", 1), ("MULTI_GPU", 16)])
def test_accelerate_starts_one_process_without_a_kind_of_distribution(
    kind: str, devices: int
) -> None:
    launch = parse_launch(ACCELERATE % (kind, ""), "a.yaml")
    assert launch.devices == devices


def test_folders_with_names_of_models_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model by its sizes is compared with those of the catalog, and not with what lies beside."""
    (tmp_path / "gpt2-xl").mkdir()
    (tmp_path / "llama2-7b").mkdir()
    for folder in tmp_path.iterdir():
        (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    _, launch = read("a.sh", MEGATRON % "")
    assert launch.model.layers == 24
