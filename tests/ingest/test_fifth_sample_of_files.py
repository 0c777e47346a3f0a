"""Kinds of settings that perfmodel misread or refused in a fifth sample of public files: front ends
of fine-tuning, settings of DeepSpeed and Accelerate, and programs that only look like Megatron.

Files are rewritten: their names and numbers are others.
"""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.spec import Transformer
from perfmodel.workload import parameter_count

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "linear_proj", "gate_proj", "up_proj", "linear_fc2")


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def doubts(launch: Launch) -> str:
    return " ".join(launch.may_be_wrong)


# --- Programs that have a micro-batch as Megatron has --------------------------------------------

MEGATRON_SIGNS = (
    "--global-batch-size 64",
    "--seq-length 2048",
    "--train-iters 10",
    "--num-layers 4",
)


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc_per_node 8", "colossalai run"])
@pytest.mark.parametrize("flag", ["--micro_batch_size 8", "--micro-batch-size=8"])
def test_a_micro_batch_alone_is_not_megatron(launcher: str, flag: str) -> None:
    with pytest.raises(LaunchFileError, match=r"it runs train\.py"):
        read("run.sh", f"{launcher} train.py --pretrained some/model --strategy zero2 {flag}\n")


@pytest.mark.parametrize("sign", MEGATRON_SIGNS)
def test_a_micro_batch_beside_another_argument_of_megatron_is(sign: str) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 8 train.py --micro-batch-size 8 {sign}\n")
    assert launch.format == "megatron"


def test_the_command_of_megatron_swift_needs_no_other_argument() -> None:
    launch = read(
        "run.sh", "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --micro_batch_size 1\n"
    )
    assert (launch.format, launch.devices) == ("megatron", 8)


ALPACA = "finetune.py --base_model huggyllama/llama-7b --data_path data.json --output_dir out"


@pytest.mark.parametrize(
    ("flags", "batch", "micro_batch", "seq_len", "rank", "modules"),
    [
        ("--micro_batch_size 2", 128, 2, 256, 8, ("q_proj", "v_proj")),
        (
            "--batch_size 64 --micro_batch_size=2 --cutoff_len=512",
            64,
            2,
            512,
            8,
            ("q_proj", "v_proj"),
        ),
        (
            "--cutoff_len 512 --lora_r=16 --lora_target_modules='[q_proj,k_proj]'",
            *(128, 4, 512, 16, ("q_proj", "k_proj")),
        ),
    ],
)
@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc_per_node=4 --master_port=1234"])
def test_alpaca_lora_s_program_and_its_copies(
    launcher: str,
    flags: str,
    batch: int,
    micro_batch: int,
    seq_len: int,
    rank: int,
    modules: tuple[str, ...],
) -> None:
    """Its `batch_size` is that of the whole step, and its weights are loaded in 8 bits."""
    launch = read("run.sh", f"{launcher} {ALPACA} {flags}\n", devices=4)
    assert launch.layout is not None
    assert (launch.format, launch.framework) == ("own-program", "pytorch")
    assert (launch.global_batch, launch.seq_len) == (batch, seq_len)
    assert (launch.layout.micro_batch, launch.layout.recompute) == (micro_batch, "full")
    fields = launch.job_fields
    assert (fields["adapter_rank"], fields["adapter_modules"]) == (rank, modules)
    assert (fields["dtype"], fields["base_weights"]) == ("fp16", "int8")


# --- Several values where one is needed ----------------------------------------------------------


@pytest.mark.parametrize("values", [[0, 1, 2, 3], [1, 2]])
@pytest.mark.parametrize("key", ["zero_optimization.stage", "train_micro_batch_size_per_gpu"])
def test_values_that_a_search_tries_are_none(key: str, values: list[int]) -> None:
    """DeepSpeed's autotuning takes a list of stages and of batches."""
    table, _, inner = key.partition(".")
    settings: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    settings[table] = {inner: values} if inner else values
    with pytest.raises(LaunchFileError, match="whole number"):
        read("ds.json", json.dumps(settings), devices=8)
    neox = {**settings, "num-layers": 4, "hidden-size": 64, "num-attention-heads": 4}
    with pytest.raises(LaunchFileError, match="whole number"):
        read("neox.yml", json.dumps(neox), devices=8)


# --- States on the host --------------------------------------------------------------------------

OPENRLHF = (
    "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --pretrain meta-llama/Llama-3.1-8B "
    "--max_len 2048 --train_batch_size 64 --micro_train_batch_size 1 --bf16"
)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_openrlhf_offloads_the_optimizer_alone(stage: int) -> None:
    kept, moved = (
        read("run.sh", f"{OPENRLHF} --zero_stage {stage} {flag}\n").layout
        for flag in ("", "--adam_offload")
    )
    assert kept is not None
    assert moved is not None
    assert (kept.offload_states, moved.offload_states) == ("none", "optimizer")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_stage_3_offloads_weights(stage: int) -> None:
    """Accelerate and both notations of DeepSpeed take the key under every stage."""
    new = {"stage": stage, "offload_param": {"device": "cpu"}}
    old = {"stage": stage, "cpu_offload_params": True}
    accelerate = f"""
        distributed_type: DEEPSPEED
        num_processes: 8
        mixed_precision: bf16
        deepspeed_config: {{zero_stage: {stage}, offload_param_device: cpu}}
    """
    launches = [
        read(
            "ds.json", json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}), devices=8
        )
        for zero in (new, old)
    ]
    launches.append(read("accelerate.yaml", accelerate))
    for launch in launches:
        assert launch.layout is not None
        assert launch.layout.zero == stage
        assert launch.layout.offload_states == ("weights" if stage == 3 else "none")


# --- Adapters whose rank or place is not stated --------------------------------------------------

TRAINER = (
    "torchrun --nproc_per_node 8 {program} --model_name_or_path Qwen/Qwen2-7B --bf16 True "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --model_max_length 1024 {flags}"
)


@pytest.mark.parametrize(
    ("flags", "rank", "modules"),
    [
        ("--use_peft", 16, ("q_proj", "v_proj")),
        ("--use_lora", 64, ALL_LINEAR),
        ("--lora_enable True", 64, ALL_LINEAR),
        ("--use_lora --lora_r 32", 32, ALL_LINEAR),
        ("--use_peft --lora_target_modules k_proj", 16, ("k_proj",)),
    ],
)
def test_defaults_of_adapters_are_assumed_aloud(
    flags: str, rank: int, modules: tuple[str, ...]
) -> None:
    launch = read("run.sh", TRAINER.format(program="finetune.py", flags=flags))
    assert launch.job_fields["adapter_rank"] == rank
    assert launch.job_fields["adapter_modules"] == modules
    assert sum("adapters: " in note for note in launch.assumed) == 1


def test_adapters_that_are_stated_are_not_assumed() -> None:
    flags = "--use_peft --lora_r 8 --lora_target_modules q_proj k_proj"
    launch = read("run.sh", TRAINER.format(program="sft.py", flags=flags))
    assert not any("adapters" in note for note in launch.assumed)


@pytest.mark.parametrize(
    ("flags", "rank", "modules"),
    [
        ("--lora_rank 0", None, None),
        ("--lora_rank 16", 16, ALL_LINEAR),
        ("--lora_rank 16 --target_modules q_proj v_proj", 16, ("q_proj", "v_proj")),
    ],
)
def test_adapters_of_openrlhf(
    flags: str, rank: int | None, modules: tuple[str, ...] | None
) -> None:
    fields = read("run.sh", f"{OPENRLHF} --zero_stage 2 {flags}\n").job_fields
    assert (fields.get("adapter_rank"), fields.get("adapter_modules")) == (rank, modules)


def test_an_argument_of_a_front_end_is_no_abbreviation() -> None:
    """`--lora_target` of LLaMA-Factory begins like an argument of trl."""
    launch = read(
        "run.sh",
        "deepspeed --num_gpus 8 src/train_bash.py --stage sft --do_train --model_name_or_path "
        "Qwen/Qwen2-7B --finetuning_type lora --lora_target q_proj,v_proj --cutoff_len 1024 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 --deepspeed ds_z2.json",
    )
    assert launch.format == "llama-factory"
    assert launch.job_fields["adapter_modules"] == ("q_proj", "v_proj")


# --- Formats -------------------------------------------------------------------------------------

ARGUMENTS: dict[str, Any] = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--vocab-size": 32000,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--bf16": True,
}


@pytest.mark.parametrize("table", ["MODEL_ARGS", "model_args"])
@pytest.mark.parametrize("underscored", [True, False])
def test_arguments_of_megatron_in_json_are_those_of_yaml(table: str, underscored: bool) -> None:
    arguments = {
        (name.removeprefix("--").replace("-", "_") if underscored else name): value
        for name, value in ARGUMENTS.items()
    }
    text = json.dumps({"ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1}, table: arguments})
    of_json, of_yaml = (read(name, text, devices=8) for name in ("model.json", "model.yaml"))
    assert of_json.format == "megatron"
    assert of_json.layout == of_yaml.layout
    assert of_json.global_batch == of_yaml.global_batch == 32
    for launch in (of_json, of_yaml):
        assert isinstance(launch.model, Transformer)
    assert of_json.model is not None
    assert of_yaml.model is not None
    assert parameter_count(of_json.model) == parameter_count(of_yaml.model)


@pytest.mark.parametrize(("quick", "exact"), [("quick-gelu", "gelu"), ("quick-geglu", "geglu")])
def test_the_quick_gelu_of_nemo(quick: str, exact: str) -> None:
    text = """
        trainer: {{devices: 8, num_nodes: 1, precision: bf16}}
        model:
          micro_batch_size: 2
          global_batch_size: 16
          encoder_seq_length: 2048
          num_layers: 12
          hidden_size: 1024
          num_attention_heads: 16
          ffn_hidden_size: 4096
          activation: {activation}
    """
    models = [read("gpt.yaml", text.format(activation=word)).model for word in (quick, exact)]
    assert models[0] == models[1]


def test_a_model_s_path_alone_is_not_xtuner() -> None:
    text = """
        model: {model_path: meta-llama/Llama-3.1-8B, load_in_4bit: true, lora_rank: 64}
        train: {batch_size: 512, seq_length: 256, gradient_accumulation_steps: 16}
        deepspeed: {zero_optimization: {stage: 2}}
    """
    with pytest.raises(LaunchFileError, match="not a launch file"):
        read("train.yml", text)


@pytest.mark.parametrize("key", ["tiled_mlp", "alst_sequence_tiling", "tiled_logits"])
def test_parts_of_sequences_one_after_another_are_a_doubt_about_memory(key: str) -> None:
    text = f"""
        base_model: meta-llama/Llama-3.1-8B
        sequence_len: 4096
        micro_batch_size: 1
        gradient_accumulation_steps: 1
        bf16: true
        {key}: true
    """
    assert "memory may be wrong" in doubts(read("train.yml", text, devices=8))


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("torchrun --nproc_per_node=8 -m rl.trainer.ppo env.path=envs/game.py", "rl.trainer.ppo"),
        ("torchrun --nproc_per_node=8 train_gpt.py config/small.py --rounds=5", "train_gpt.py"),
        ("python launch.py --nproc 8 train_gpt.py --rounds=5", "train_gpt.py"),
    ],
)
def test_a_refusal_names_the_program(command: str, program: str) -> None:
    with pytest.raises(LaunchFileError, match=rf"it runs {program},"):
        read("run.sh", f"{command}\n")


# --- Scripts that run others ---------------------------------------------------------------------

NEMO_COMMAND = (
    "torchrun --nproc_per_node 8 megatron_gpt_pretraining.py --config-name=gpt trainer.devices=8 "
    "trainer.num_nodes=1 "
    "trainer.precision=bf16 model.num_layers=$LAYERS model.hidden_size=1024 "
    "model.num_attention_heads=16 model.encoder_seq_length=2048 model.micro_batch_size=1 "
    "model.global_batch_size=16 model.tensor_model_parallel_size=2"
)
MAXTEXT_COMMAND = (
    "python3 MaxText/train.py MaxText/configs/base.yml run_name=x base_num_decoder_layers=$LAYERS "
    "per_device_batch_size=1 ici_fsdp_parallelism=8 dcn_data_parallelism=1 max_target_length=2048"
)


@pytest.mark.parametrize("call", ["./inner.sh", "bash inner.sh", "source inner.sh", ". ./inner.sh"])
@pytest.mark.parametrize(
    ("command", "form"), [(NEMO_COMMAND, "nemo"), (MAXTEXT_COMMAND, "maxtext")]
)
def test_a_wrapper_is_read_as_the_script_that_it_runs(
    call: str, command: str, form: str, tmp_path: Path
) -> None:
    (tmp_path / "inner.sh").write_text(f"#!/bin/bash\n: ${{LAYERS:=4}}\n{command}\n")
    wrapper = tmp_path / "small.sh"
    wrapper.write_text(f"#!/bin/bash\nexport LAYERS=12\n{call}\n")
    launch = read_launch(wrapper)
    assert (launch.format, launch.devices) == (form, 8)
    assert isinstance(launch.model, Transformer)
    assert launch.model.layers == 12
