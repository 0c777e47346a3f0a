"""Kinds of settings that perfmodel misread or refused in a sixth sample of public files: training
in `$(...)`, defaults of programs that are known, and paths of models on machines that are not.

Files are rewritten: their names and numbers are others.
"""

from textwrap import dedent
from typing import Any

import pytest

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.workload import parameter_count


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def assumed(launch: Launch) -> str:
    return " ".join(launch.assumed)


def doubts(launch: Launch) -> str:
    return " ".join(launch.may_be_wrong)


# --- Commands whose output a script keeps --------------------------------------------------------

TITAN = (
    "torchrun --nproc_per_node=$GPUS -m torchtitan.train --module llama3 --config llama3_8b "
    "--parallelism.tensor_parallel_degree 2"
)
KEPT = {
    "a variable": f'GPUS=4\nlog=$({TITAN} 2>&1)\necho "$log"\n',
    "a function with arguments": (
        'run() { local GPUS="$1" out; shift\n'
        '  out=$(torchrun --nproc_per_node=$GPUS -m torchtitan.train "$@" 2>&1 | tail -n 3)\n'
        '  echo "$out"; }\n'
        "run 4 --module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 2\n"
    ),
    "with variables of its own": f"GPUS=4\nif x=$(OMP_NUM_THREADS=8 {TITAN}); then echo $x; fi\n",
    "in backquotes": f"GPUS=4\nout=`{TITAN}`\n",
}


@pytest.mark.parametrize("way", KEPT)
def test_a_training_whose_output_is_kept_is_read(way: str) -> None:
    launch = read("run.sh", KEPT[way])
    plain = read("run.sh", f"GPUS=4\n{TITAN}\n")
    assert (launch.devices, launch.seq_len, launch.layout) == (4, 8192, plain.layout)
    assert launch.model == plain.model
    assert launch.may_be_wrong == ()


def test_a_program_that_only_looks_something_up_is_no_training() -> None:
    with pytest.raises(LaunchFileError, match="not a launch file"):
        read("run.sh", "PORT=$(python free_port.py --from 29500)\necho $PORT\n")


@pytest.mark.parametrize("given", ["--module llama3", "--config llama3_8b"])
def test_a_command_of_torchtitan_without_a_recipe_says_so(given: str) -> None:
    """The arguments may stand in `"$@"`."""
    open_command = read(
        "run.sh", 'torchrun --nproc_per_node 8 -m torchtitan.train --training.steps 9 "$@"\n'
    )
    assert "names no recipe" in doubts(open_command)
    named = read("run.sh", f"torchrun --nproc_per_node 8 -m torchtitan.train {given}\n")
    assert "names no recipe" not in doubts(named)


# --- OpenRLHF ------------------------------------------------------------------------------------

OLDER = {
    "--pretrain": "--model.model_name_or_path",
    "--max_len": "--data.max_len",
    "--train_batch_size": "--train.batch_size",
    "--micro_train_batch_size": "--train.micro_batch_size",
    "--zero_stage": "--ds.zero_stage",
    "--adam_offload": "--ds.adam_offload",
    "--gradient_checkpointing": "--model.gradient_checkpointing_enable",
    "--packing_samples": "--ds.packing_samples",
    "--param_dtype": "--ds.param_dtype",
    "--lora_rank": "--ds.lora.rank",
    "--ring_attn_size": "--ds.ring_attn_size",
    "--learning_rate": "--adam.lr",
    "--save_path": "--ckpt.output_dir",
}
"""Arguments of OpenRLHF, and their names since 2026."""
BASE = "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --pretrain meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    "flags",
    [
        "--max_len 4096 --train_batch_size 64 --micro_train_batch_size 1 --zero_stage 3",
        "--zero_stage 3 --adam_offload --gradient_checkpointing --packing_samples",
        "--max_len 8192 --param_dtype bf16 --ring_attn_size 2 --learning_rate 5e-6",
        "--lora_rank 16 --zero_stage 2 --train_batch_size 32 --save_path out",
        "",
    ],
)
def test_both_notations_of_openrlhf_mean_the_same(flags: str) -> None:
    older = f"{BASE} {flags}\n"
    newer = " ".join(OLDER.get(word, word) for word in older.split()) + "\n"
    first, second = read("run.sh", older), read("run.sh", newer)
    assert first.layout is not None
    assert (first.layout, first.global_batch, first.seq_len) == (
        second.layout,
        second.global_batch,
        second.seq_len,
    )
    assert (first.job_fields, first.assumed) == (second.job_fields, second.assumed)
    assert (first.framework, second.ignored) == ("deepspeed", ())


DEFAULTS = {"--zero_stage": 2, "--train_batch_size": 128, "--micro_train_batch_size": 8}


@pytest.mark.parametrize("absent", DEFAULTS)
def test_defaults_of_openrlhf_are_taken_and_named(absent: str) -> None:
    stated = " ".join(f"{name} {value}" for name, value in DEFAULTS.items() if name != absent)
    complete = " ".join(f"{name} {value}" for name, value in DEFAULTS.items())
    left_out = read("run.sh", f"{BASE} --max_len 2048 --bf16 {stated}\n")
    whole = read("run.sh", f"{BASE} --max_len 2048 --bf16 {complete}\n")
    assert (left_out.layout, left_out.global_batch) == (whole.layout, whole.global_batch)
    assert f"{absent[2:]}={DEFAULTS[absent]} (OpenRLHF's defaults)" in assumed(left_out)
    assert "OpenRLHF" not in assumed(whole)


def test_a_precision_that_a_program_leaves_open_is_named() -> None:
    assert "dtype=bf16 (the command states no precision)" in assumed(read("run.sh", BASE + "\n"))
    assert "no precision" not in assumed(read("run.sh", f"{BASE} --bf16\n"))


# --- Sequences of an update ----------------------------------------------------------------------


@pytest.mark.parametrize(("prompts", "answers", "sequences"), [(16, 16, 256), (64, 8, 512)])
def test_a_batch_of_verl_counts_prompts(prompts: int, answers: int, sequences: int) -> None:
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts} "
        f"actor_rollout_ref.rollout.n={answers} trainer.n_gpus_per_node=8 trainer.nnodes=1\n"
    )
    with pytest.raises(LaunchFileError, match=f"--global-batch {sequences} "):
        read("run.sh", command)


# --- MaxText without a file ----------------------------------------------------------------------

MAXTEXT_PROGRAMS = (
    "-m MaxText.train src/MaxText/configs/base.yml",
    "-m MaxText.train",
    "MaxText/train.py MaxText/configs/base.yml",
    "-m maxtext.trainers.pre_train.train",
)


@pytest.mark.parametrize("program", MAXTEXT_PROGRAMS)
def test_maxtext_has_a_default_for_every_setting(program: str) -> None:
    launch = read("run.sh", f"python3 {program} run_name=x steps=10\n", devices=4)
    assert launch.model is not None
    # `base.yml`: 16 layers of 2,048, batches of 12, lengths of 2,048.
    assert round(parameter_count(launch.model) / 1e9, 2) == 1.1
    assert (launch.global_batch, launch.seq_len) == (48, 2048)
    assert "maxtext@2026's own sizes" in assumed(launch)


@pytest.mark.parametrize("program", MAXTEXT_PROGRAMS)
def test_settings_of_maxtext_count_with_and_without_a_file(program: str) -> None:
    launch = read(
        "run.sh",
        f"XLA_FLAGS=a=b python3 {program} base_emb_dim=256 base_num_decoder_layers=4 "
        "base_num_query_heads=4 base_num_kv_heads=4 head_dim=64 base_mlp_dim=1024 vocab_size=50257 "
        "per_device_batch_size=4 max_target_length=512 ici_fsdp_parallelism=8 dcn_data_parallelism=1\n",
    )
    assert launch.layout is not None
    assert (launch.devices, launch.global_batch, launch.seq_len) == (8, 32, 512)
    assert launch.layout.zero == 3
    assert "own sizes" not in assumed(launch)


# --- Lengths and switches of trl's own programs --------------------------------------------------

TRL_PROGRAMS = (
    "accelerate launch --num_processes 4 examples/scripts/sft.py",
    "accelerate launch --num_processes 4 trl/scripts/sft.py",
    "accelerate launch --num_processes 4 /opt/trl/scripts/dpo.py",
    "NPROC_PER_NODE=4 trl sft",
)
TRL_ARGUMENTS = "--model_name_or_path Qwen/Qwen2.5-0.5B --per_device_train_batch_size 2"


@pytest.mark.parametrize("program", TRL_PROGRAMS)
def test_trl_cuts_sequences_at_its_own_length(program: str) -> None:
    launch = read("run.sh", f"{program} {TRL_ARGUMENTS}\n", devices=4)
    assert launch.layout is not None
    assert launch.seq_len == 1024
    assert "trl's default max_length" in assumed(launch)
    assert (launch.job_fields["dtype"], launch.layout.recompute) == ("bf16", "full")
    assert "dtype=bf16, recompute=full (trl's defaults since 0.20" in assumed(launch)


@pytest.mark.parametrize("program", TRL_PROGRAMS)
def test_what_a_command_of_trl_states_wins(program: str) -> None:
    stated = "--max_length 512 --fp16 True --gradient_checkpointing False"
    launch = read("run.sh", f"{program} {TRL_ARGUMENTS} {stated}\n", devices=4)
    assert launch.layout is not None
    assert launch.seq_len == 512
    assert (launch.job_fields["dtype"], launch.layout.recompute) == ("fp16", "none")
    assert "trl's default max_length" not in assumed(launch)
    assert "recompute=full (trl's defaults" not in assumed(launch)


def test_another_program_of_that_name_is_not_trl_s() -> None:
    command = f"accelerate launch --num_processes 4 my/sft.py {TRL_ARGUMENTS}\n"
    assert read("run.sh", command).seq_len is None


# --- Defaults of LLaMA-Factory and axolotl -------------------------------------------------------

FACTORY = """
    model_name_or_path: Qwen/Qwen3-8B
    stage: sft
    finetuning_type: {kind}
    cutoff_len: 1024
"""


@pytest.mark.parametrize(
    ("kind", "more", "dtype"),
    [
        ("lora", "", "bf16"),
        ("full", "", "fp32"),
        ("lora", "fp16: true", "fp16"),
        ("full", "bf16: true", "bf16"),
    ],
)
def test_frozen_weights_of_llama_factory_keep_their_type(kind: str, more: str, dtype: str) -> None:
    text = dedent(FACTORY.format(kind=kind)) + f"{more}\n"
    launch = parse_launch(text, "run.yaml", devices=4)
    assert launch.layout is not None
    assert launch.job_fields["dtype"] == dtype
    assert ("keeps frozen weights" in assumed(launch)) is (kind == "lora" and not more)
    # The Trainer's default, which the file leaves open.
    assert (launch.layout.micro_batch, launch.global_batch) == (8, 32)


@pytest.mark.parametrize(
    ("targets", "is_open"),
    [("", True), ("lora_target_linear: true", False), ("lora_target_modules: [q_proj]", False)],
)
def test_adapters_of_axolotl_without_targets_are_named(targets: str, is_open: bool) -> None:
    text = f"base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 16\nsequence_len: 512\n{targets}\n"
    launch = parse_launch(text, "run.yml", devices=2)
    assert ("adapters on the products of attention" in assumed(launch)) is is_open


# --- Models on machines that nobody knows --------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "$SCRATCH/Qwen3-8B",
        "${SCRATCH}/models/Qwen3-8B/",
        "/tmp/$SLURM_JOB_ID/Qwen3-8B",
        "$(pwd -P | sed s/a/b/)/Qwen3-8B",
    ],
)
def test_only_the_folder_of_a_model_may_depend_on_the_machine(path: str) -> None:
    command = f"NPROC_PER_NODE=4 swift sft --model {path} --train_type full --max_length 512\n"
    assert read("run.sh", command).model == read("run.sh", command.replace(path, "qwen3-8b")).model


def test_a_model_that_is_itself_open_is_asked_for() -> None:
    with pytest.raises(LaunchFileError, match="give --model"):
        read("run.sh", "NPROC_PER_NODE=4 swift sft --model models/$NAME --train_type full\n")


# --- Programs that only look like others ---------------------------------------------------------


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node=8", "python -u"])
@pytest.mark.parametrize(
    "flags",
    [
        "--model 7b --seq-len 4096 --micro-batch 4",
        "--micro-batch-size 4 --seq-len 4096",
        "--seq-len 4096 --global-batch 64 --micro-batch 4",
    ],
)
def test_abbreviations_alone_are_no_megatron(launcher: str, flags: str) -> None:
    with pytest.raises(LaunchFileError, match=r"it runs train_fsdp\.py"):
        read("run.sh", f"{launcher} train_fsdp.py {flags}\n")


def test_abbreviations_of_megatron_s_arguments_are_read() -> None:
    launch = read(
        "run.sh",
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 4 --hidden-size 256 "
        "--num-attention-heads 4 --micro-batch 2 --seq-len 512\n",
    )
    assert launch.layout is not None
    assert (launch.seq_len, launch.layout.micro_batch) == (512, 2)


@pytest.mark.parametrize(("batch", "passes", "sequences"), [(1, 4, 8), (4, 1, 8)])
def test_a_batch_of_diffusers_is_one_of_a_device(batch: int, passes: int, sequences: int) -> None:
    launch = read(
        "run.sh",
        "accelerate launch --num_processes 2 train_dreambooth.py --resolution=512 "
        f"--pretrained_model_name_or_path=flux.1-dev --train_batch_size={batch} "
        f"--gradient_accumulation_steps={passes}\n",
    )
    assert launch.layout is not None
    assert (launch.global_batch, launch.layout.micro_batch) == (sequences, batch)


@pytest.mark.parametrize("program", ["swift sft --train_type lora", "python finetune.py"])
@pytest.mark.parametrize(("visible", "devices"), [("0", 1), ("6", 1), ("0,1", None), ("", None)])
def test_one_visible_device_is_all_there_is(
    program: str, visible: str, devices: int | None
) -> None:
    command = f"{program} --model_name_or_path qwen3-8b --per_device_train_batch_size 2"
    launch = read("run.sh", f"export CUDA_VISIBLE_DEVICES={visible}\n{command}\n")
    assert launch.devices == devices


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_a_misspelt_switch_of_deepspeed_is_named(half: str) -> None:
    text = f'{{"{half}": {{"enable": true}}, "train_batch_size": 8, "zero_optimization": {{"stage": 1}}}}'
    misspelt = read("ds.json", text, devices=4)
    assert "precision" in doubts(misspelt)
    assert f"{half}.enable" in doubts(misspelt)
    assert not read("ds.json", text.replace("enable", "enabled"), devices=4).may_be_wrong
