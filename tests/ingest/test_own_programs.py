"""Programs that people write around DeepSpeed and Accelerate, files that scripts write themselves,
and training of several models at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from known_settings import facts

import perfmodel as pm
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import parse_launch, read_launch

CONFIGURATION = {
    "train_batch_size": "$BATCH",
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
JSON = json.dumps(CONFIGURATION, indent=2).replace('"$BATCH"', "$BATCH")
ONE_LINE = json.dumps(CONFIGURATION).replace('"$BATCH"', "$BATCH")
COMMAND = (
    "deepspeed --num_gpus=8 tune.py --deepspeed_config=$FILE --model_name meta-llama/Meta-Llama-3-8B "
    "--batch_size $((BATCH / 8)) --max_length 2048 --activation_checkpointing\n"
)
WAYS_TO_WRITE = {
    "cat with the file behind": f"cat <<EOF > $FILE\n{JSON}\nEOF\n",
    "cat with the file before": f'cat > "$FILE" << EOF\n{JSON}\nEOF\n',
    "tee": f"tee $FILE <<EOF\n{JSON}\nEOF\n",
    "a pipe into tee": f"cat <<EOF | tee $FILE > /dev/null\n{JSON}\nEOF\n",
    "echo": 'echo "' + ONE_LINE.replace('"', '\\"') + '" > $FILE\n',
    "printf": "printf '%s\\n' \"" + ONE_LINE.replace('"', '\\"') + '" > ${FILE} 2>/dev/null\n',
    "a condition": f'if [ "$MODE" = offload ]; then\ncat > $FILE <<EOF\n{JSON}\nEOF\nelse\necho "{{}}" > $FILE\nfi\n',
    "in two parts": (
        "head=$(cat <<EOF\n" + "\n".join(JSON.splitlines()[:2]) + "\nEOF\n)\n"
        'echo "$head" > $FILE\ncat >> $FILE <<EOF\n' + "\n".join(JSON.splitlines()[2:]) + "\nEOF\n"
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_files_of_deepspeed_that_a_script_writes_are_read(way: str) -> None:
    script = f"MODE=offload\nBATCH=16\nFILE=./$MODE.json\n{WAYS_TO_WRITE[way]}{COMMAND}"
    launch = parse_launch(script, "run.sh")
    assert launch.model == pm.model("llama3-8b")
    assert launch.layout is not None
    layout = launch.layout
    assert (layout.dp, layout.zero, layout.micro_batch, layout.recompute) == (8, 3, 2, "full")
    assert layout.offload_states == "optimizer"
    assert (launch.devices, launch.global_batch, launch.seq_len) == (8, 16, 2048)
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.may_be_wrong == ()
    assert any("assumes the usual meaning of its arguments" in note for note in launch.assumed)


NAMES_OF_MEANING: dict[str, tuple[Any, tuple[str, ...]]] = {
    "micro-batch": (
        2,
        (
            "batch_size",
            "batch_size_training",
            "train_bs",
            "micro_bs",
            "mbs",
            "bsz",
            "micro_batch_size",
            "train_micro_batch_size",
            "per_device_batch_size",
            "per_gpu_train_batch_size",
            "batch_size_per_gpu",
            "micro_train_batch_size",
            "per_device_train_batch_size",
        ),
    ),
    "accumulation": (
        3,
        (
            "gradient_accumulation_steps",
            "grad_accum_steps",
            "grad_accum",
            "grad_acc_steps",
            "gradient_accumulation_step",
            "gradient_accumulation",
            "accumulation_steps",
        ),
    ),
    "engine": ("engine.json", ("deepspeed_config", "ds_config", "ds_file")),
    "length": (
        1024,
        (
            "max_length",
            "seq_length",
            "seq_len",
            "sequence_length",
            "context_length",
            "max_len",
            "seqlen",
            "max_sequence_length",
        ),
    ),
    "model": (
        "meta-llama/Meta-Llama-3-8B",
        (
            "model_name_or_path",
            "pretrain",
            "model_path",
            "model_id",
            "pretrained_model_name_or_path",
            "model_name",
        ),
    ),
    "tensor parallelism": (2, ("ds_tensor_parallel_size", "tensor_parallel_size")),
}
"""A value and the names by which programs ask for it."""


@pytest.mark.parametrize("meaning", NAMES_OF_MEANING)
def test_names_of_one_meaning_are_read_alike(meaning: str) -> None:
    others = ("model", "micro-batch", "length", "engine")
    engine = json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    fixed = {NAMES_OF_MEANING[name][1][0]: NAMES_OF_MEANING[name][0] for name in others}
    value, names = NAMES_OF_MEANING[meaning]
    fixed.pop(names[0], None)

    def read(flags: dict[str, Any]) -> dict[str, float]:
        words = " ".join(f"--{name} {value}" for name, value in (fixed | flags).items())
        script = f"echo '{engine}' > engine.json\ndeepspeed --num_gpus 8 tune.py {words}\n"
        return facts(parse_launch(script, "run.sh"))

    first = read({names[0]: value})
    assert first["framework.deepspeed"] == 1.0
    for name in names[1:]:
        assert read({name: value}) == first, name


def test_a_file_that_no_branch_writes_is_named_as_missing() -> None:
    script = f"BATCH=16\nFILE=./x.json\nif false; then\n{WAYS_TO_WRITE['tee']}fi\n{COMMAND}"
    launch = parse_launch(script, "run.sh")
    assert any("x.json was not found" in doubt for doubt in launch.may_be_wrong)


def test_configurations_of_front_ends_may_be_written_by_the_script() -> None:
    launch = parse_launch(
        "cat > train.yaml <<EOF\nmodel_name_or_path: Qwen/Qwen2-7B\nstage: sft\nfinetuning_type: full\n"
        "cutoff_len: 4096\nper_device_train_batch_size: 2\nbf16: true\npacking: true\nEOF\nNPROC_PER_NODE=4 "
        "llamafactory-cli train train.yaml\n",
        "run.sh",
    )
    assert (launch.devices, launch.global_batch, launch.seq_len) == (4, 8, 4096)
    assert launch.model == pm.model("qwen2-7b")


OPENRLHF = (
    "read -r -d '' training_commands <<EOF\n"
    "openrlhf.cli.PROGRAM \\\n --max_len 4096 --train_batch_size 128 --micro_train_batch_size 2 \\\n"
    " --pretrain meta-llama/Llama-2-7b-hf --zero_stage 2 --bf16 --flash_attn --gradient_checkpointing MORE\nEOF\n"
    "deepspeed LAUNCH--module $training_commands\n"
)


def test_a_batch_of_the_step_beside_one_of_a_device() -> None:
    launch = parse_launch(
        OPENRLHF.replace("PROGRAM", "train_sft")
        .replace("LAUNCH", "--num_gpus 8 ")
        .replace("MORE", ""),
        "run.sh",
    )
    assert launch.layout is not None
    assert (launch.devices, launch.global_batch, launch.seq_len) == (8, 128, 4096)
    assert (launch.layout.micro_batch, launch.layout.zero, launch.layout.recompute) == (
        2,
        2,
        "full",
    )
    assert launch.job_fields["dtype"] == "bf16"
    assert not any("grad_accum" in note for note in launch.assumed)


def test_devices_do_not_follow_from_an_accumulation_that_nobody_states() -> None:
    text = OPENRLHF.replace("PROGRAM", "train_sft").replace("LAUNCH", "").replace("MORE", "")
    launch = parse_launch(text, "run.sh")
    assert (launch.devices, launch.layout) == (None, None)
    assert any("--devices" in sentence for sentence in launch.missing)
    file = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}'
    assert parse_launch(file, "ds.json", model="llama3-8b").devices is None
    stated = file.replace('"zero', '"gradient_accumulation_steps": 4, "zero')
    assert parse_launch(stated, "ds.json", model="llama3-8b").devices == 8


def test_ranks_of_ring_attention_share_a_sequence() -> None:
    text = OPENRLHF.replace("PROGRAM", "train_sft").replace("LAUNCH", "--num_gpus 8 ")
    launch = parse_launch(text.replace("MORE", "--ring_attn_size 2"), "run.sh")
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.cp_kind, launch.layout.dp) == (2, "ring", 4)


@pytest.mark.parametrize("program", ["train_dpo", "train_rm", "train_kto", "train_kd", "train_prm"])
def test_programs_of_further_models_or_passes_say_so(program: str) -> None:
    text = (
        OPENRLHF.replace("PROGRAM", program).replace("LAUNCH", "--num_gpus 8 ").replace("MORE", "")
    )
    launch = parse_launch(text, "run.sh")
    assert any("further models or passes" in doubt for doubt in launch.may_be_wrong)


def test_a_stage_without_a_file_is_deepspeed_in_16_bits() -> None:
    launch = parse_launch(
        "accelerate launch --num_processes 8 --config_file made.yaml bench.py --model_name meta-llama/Meta-Llama-3-8B "
        "--zero_stage 3 --gradient_accumulation_steps 2 --batch_size 4 --seq_length 1024\n",
        "run.sh",
    )
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero, launch.global_batch) == ("deepspeed", 3, 64)
    assert launch.job_fields["dtype"] == "bf16"


NOT_OF_LANGUAGE = (
    "torchrun --nproc_per_node 8 train.py --model resnet50 --batch-size 32\n",
    "deepspeed --num_gpus 8 bench.py --batch_size 32\n",
    "accelerate launch tune.py --model_name gpt2\n",
)


@pytest.mark.parametrize("command", NOT_OF_LANGUAGE)
def test_programs_that_say_too_little_are_refused(command: str) -> None:
    with pytest.raises(
        LaunchFileError, match=r"it runs \w+\.py, whose arguments perfmodel does not know"
    ):
        parse_launch(command, "run.sh")


REINFORCEMENT: dict[str, tuple[str, str]] = {
    "DeepSpeed-Chat": (
        "deepspeed main.py --actor_model_name_or_path facebook/opt-13b --critic_model_name_or_path facebook/opt-350m "
        "--per_device_training_batch_size 16 --actor_zero_stage 3 --critic_zero_stage 3 --actor_lora_dim 128",
        "--model facebook/opt-13b --devices N --global-batch N --layout dp=N,zero=3,micro_batch=16",
    ),
    "whose actor is an argument": (
        "ACTOR=$1\ndeepspeed main.py --actor_model_name_or_path $ACTOR --actor_zero_stage $2",
        "--model NAME --devices N --global-batch N --layout dp=N,zero=N ",
    ),
    "OpenRLHF": (
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2-7B --reward_pretrain x/rm "
        "--zero_stage 3 --micro_train_batch_size 4",
        "--model Qwen/Qwen2-7B --devices N --global-batch N --layout dp=N,zero=3,micro_batch=4",
    ),
}


@pytest.mark.parametrize("tool", REINFORCEMENT)
def test_reinforcement_is_refused_with_what_to_ask_instead(tool: str) -> None:
    command, remedy = REINFORCEMENT[tool]
    with pytest.raises(LaunchFileError, match="trains by reinforcement") as refusal:
        parse_launch(f"{command}\n", "run.sh")
    assert remedy in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ("--nodes=your_number_of_nodes --gres=gpu:8 --ntasks-per-node=8", None),
        ("--nodes=${N} --gpus-per-node=8", None),
        ("--nodes=4 --gres=gpu:8", 32),
        ("-N 4 --ntasks-per-node=8", 32),
        ("-N ${N} --ntasks=32", 32),
    ],
)
def test_a_number_of_nodes_that_nobody_knows_leaves_the_devices_open(
    options: str, devices: int | None
) -> None:
    text = (
        f"#!/bin/bash\n#SBATCH {options}\nsrun python pretrain_gpt.py --num-layers 24 --hidden-size 1024 "
        "--num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 "
        "--tensor-model-parallel-size 2\n"
    )
    assert parse_launch(text, "run.sh").devices == devices


OFFLOADED: dict[str, tuple[dict[str, Any], bool]] = {
    "a share": ({"device": "cpu", "ratio": 0.3}, True),
    "all": ({"device": "cpu", "ratio": 1.0}, False),
    "unsaid": ({"device": "cpu"}, False),
}


@pytest.mark.parametrize("case", OFFLOADED)
def test_a_share_of_the_optimizer_on_the_device_is_an_open_fact(case: str) -> None:
    offload, is_open = OFFLOADED[case]
    text = json.dumps(
        {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {"enabled": True}}
    )
    launch = parse_launch(text, "ds.json", model="llama3-8b", devices=8)
    assert any("offload_optimizer.ratio" in doubt for doubt in launch.may_be_wrong) == is_open


MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 1024 --micro-batch-size 1 --global-batch-size 64 --bf16 MORE\n"
)


@pytest.mark.parametrize(
    ("more", "is_open"),
    [
        ("--stage dpo", True),
        ("--stage orpo --dpo-beta 0.1", True),
        ("--kd --load-teacher /models/x", True),
        ("--export-kd-teacher-load /models/x", True),
        ("--stage sft", False),
        ("", False),
    ],
)
def test_objectives_of_forks_of_megatron(more: str, is_open: bool) -> None:
    launch = parse_launch(MEGATRON.replace("MORE", more), "run.sh")
    assert any("further models or passes" in doubt for doubt in launch.may_be_wrong) == is_open


@pytest.mark.parametrize(
    ("tokenizer", "extra", "vocabulary"),
    [
        ("Qwen2Tokenizer", 293, 151_936),
        ("Qwen2Tokenizer", 421, 152_064),
        ("LLama3Tokenizer", 256, 128_256),
        ("LLama3Tokenizer", 0, 128_256),
        ("LLamaTokenizer", 0, 32_000),
        ("DeepSeekV2Tokenizer", 2400, 102_400),
        ("DeepSeekV2Tokenizer", 467, 129_280),
    ],
)
def test_rows_beyond_the_tokens_of_a_tokenizer(tokenizer: str, extra: int, vocabulary: int) -> None:
    """As the scripts of Pai-Megatron-Patch state them for the models that they are called after."""
    more = f"--patch-tokenizer-type {tokenizer} --extra-vocab-size {extra}"
    launch = parse_launch(MEGATRON.replace("MORE", more), "run.sh")
    assert getattr(launch.model, "vocab", None) == vocabulary
    assert not any(
        "vocabulary" in note for note in (*launch.assumed, *launch.may_be_wrong, *launch.ignored)
    )


def test_variables_before_the_name_of_a_script_are_not_called_the_environments(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON.replace("MORE", "--tensor-model-parallel-size $TP"))
    launch = read_launch(f"TP=4 {path}")
    assert launch.layout is not None
    assert launch.layout.tp == 4
    assert not any("environment" in sentence for sentence in launch.ignored)


VERL = """
ENTRYPOINT=${{ENTRYPOINT:-"-m verl.trainer.{trainer}"}}
torchrun --standalone --nnodes=2 --nproc_per_node=4 $ENTRYPOINT data.train_batch_size=32 data.max_length=2048 \\
    {model}=Qwen/Qwen3-8B optim.lr=1e-5 +data.response_dict_keys=['answer'] trainer.logger=['console','file'] {more}
"""


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        (
            "data.micro_batch_size_per_gpu=2",
            {"dp": 8, "zero": 3, "micro_batch": 2, "recompute": "none"},
        ),
        (
            "ulysses_sequence_parallel_size=4 use_remove_padding=true",
            {"dp": 2, "cp": 4, "cp_kind": "ulysses"},
        ),
        ("model.enable_gradient_checkpointing=True", {"recompute": "full", "micro_batch": 4}),
        (
            "model.fsdp_config.cpu_offload=true model.fsdp_config.offload_params=true",
            {"offload_states": "weights"},
        ),
        ("model.fsdp_config.cpu_offload=true", {"offload_states": "none"}),
    ],
)
def test_supervised_fine_tuning_of_verl_on_fsdp(more: str, layout: dict[str, Any]) -> None:
    script = VERL.format(trainer="fsdp_sft_trainer", model="model.partial_pretrain", more=more)
    launch = parse_launch(script, "run.sh")
    assert launch.layout is not None
    assert (launch.framework, launch.devices, launch.global_batch, launch.seq_len) == (
        "fsdp",
        8,
        32,
        2048,
    )
    assert launch.model == pm.model("qwen3-8b")
    assert {key: launch.layout.value(key) for key in layout} == layout
    assert launch.job_fields["dtype"] == "bf16"
    assert not launch.may_be_wrong
    assert not launch.ignored


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        (
            "",
            {
                "tp": 1,
                "dp": 8,
                "sequence_parallel": False,
                "zero": 1,
                "micro_batch": 4,
                "recompute": "full",
            },
        ),
        (
            "engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2 "
            "engine.virtual_pipeline_model_parallel_size=null engine.context_parallel_size=1",
            {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
        ),
        (
            "data.max_token_len_per_gpu=16384 engine.tensor_model_parallel_size=4 engine.sequence_parallel=false",
            {"tp": 4, "sequence_parallel": False, "micro_batch": 8},
        ),
        (
            "data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2 engine.use_distributed_optimizer=false",
            {"micro_batch": 2, "zero": 0},
        ),
    ],
)
def test_supervised_fine_tuning_of_verl_on_megatron(more: str, layout: dict[str, Any]) -> None:
    script = VERL.format(
        trainer="sft_trainer", model="model.path", more=f"engine=megatron optim=megatron {more}"
    )
    launch = parse_launch(script, "run.sh")
    assert launch.layout is not None
    assert (launch.framework, launch.devices, launch.global_batch) == ("megatron-core", 8, 32)
    assert {key: launch.layout.value(key) for key in layout} == layout
    assert not launch.may_be_wrong


def test_adapters_of_verl() -> None:
    more = "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear model.fsdp_config.model_dtype=bf16"
    script = VERL.format(trainer="fsdp_sft_trainer", model="model.partial_pretrain", more=more)
    job = parse_launch(script, "run.sh").job_fields
    assert (job["adapter_rank"], job["frozen"], job["optimizer"]) == (32, True, "adam16bit")


ACTORS = {
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 trainer.nnodes=2 "
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=256 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2": (
        "--model Qwen/Qwen3-8B --devices 16 --global-batch 256 --layout dp=N,tp=2,micro_batch=4"
    ),
    "python3 -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 8 --pretrain a/b "
    "--reward_pretrain a/c --train_batch_size 128 --zero_stage 3 --param_dtype bf16": (
        "--model a/b --devices 8 --global-batch 128 --layout dp=N,zero=3"
    ),
    "python3 train.py --train-backend fsdp --hf-checkpoint /m/Qwen3-4B --actor-num-nodes 2 "
    "--actor-num-gpus-per-node 4 --global-batch-size 64 --advantage-estimator grpo": (
        "--model /m/Qwen3-4B --devices 8 --global-batch 64 --layout dp=N"
    ),
}
"""Commands that train an actor by reinforcement, and the question that is left of them."""


@pytest.mark.parametrize("command", ACTORS)
def test_what_is_asked_of_an_actor_is_said(command: str) -> None:
    with pytest.raises(LaunchFileError, match="trains by reinforcement") as error:
        parse_launch(f"{command}\n", "run.sh")
    assert f"give {ACTORS[command]} and no --from" in str(error.value)


OPENRLHF_COMMANDS = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 2048 --train_batch_size 256 --micro_train_batch_size 2 --pretrain meta-llama/Meta-Llama-3-8B \\
   --zero_stage 2 --attn_implementation flash_attention_2 --packing_samples --gradient_checkpointing {more}
EOF
if [[ ${{1}} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


@pytest.mark.parametrize(
    ("more", "dtype", "layout"),
    [
        ("", "bf16", {"dp": 16}),
        ("--bf16", "bf16", {"dp": 16}),
        ("--param_dtype bf16", "bf16", {"dp": 16}),
        ("--param_dtype fp16", "fp16", {"dp": 16}),
        ("--ds_tensor_parallel_size 2", "bf16", {"tp": 2, "dp": 8}),
        ("--ring_attn_size 4 --ring_head_stride 2", "bf16", {"cp": 4, "dp": 4, "cp_kind": "ring"}),
    ],
)
def test_programs_of_openrlhf(more: str, dtype: str, layout: dict[str, Any]) -> None:
    launch = parse_launch(OPENRLHF_COMMANDS.format(more=more), "run.sh", devices=16)
    assert launch.layout is not None
    assert (launch.job_fields["dtype"], launch.global_batch, launch.layout.zero) == (dtype, 256, 2)
    assert {key: launch.layout.value(key) for key in layout} == layout
    assert not launch.may_be_wrong


MASON = "uv run python mason.py --cluster a b --image $IMAGE --num_nodes 4 --gpus 8 --env A=1 -- "
OPEN_INSTRUCT = (
    "open_instruct/PROGRAM.py --model_name_or_path allenai/OLMo-2-1124-7B --max_seq_length 4096 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2"
)
ACCELERATED = (
    "accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed --deepspeed_config_file "
    "configs/ds_configs/stage3_no_offloading_accelerate.conf "
    + OPEN_INSTRUCT.replace("PROGRAM", "finetune")
)


@pytest.mark.parametrize("submitter", [MASON, MASON.replace("--num_nodes 4", "--num_nodes=4"), ""])
def test_processes_behind_a_launcher_of_jobs_are_those_of_a_node(submitter: str) -> None:
    launch = parse_launch(f"{submitter}{ACCELERATED}\n", "run.sh")
    nodes = 4 if submitter else 1
    assert (launch.devices, launch.global_batch) == (8 * nodes, 16 * nodes)
    assert launch.layout is not None
    assert (launch.layout.zero, launch.framework, launch.job_fields["dtype"]) == (
        3,
        "deepspeed",
        "bf16",
    )
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize("program", ["olmo_core_finetune", "dpo"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_programs_on_olmo_core_shard_within_a_node_in_bf16(program: str, nodes: int) -> None:
    text = OPEN_INSTRUCT.replace("PROGRAM", program)
    launch = parse_launch(f"torchrun --nnodes {nodes} --nproc_per_node 8 {text}\n", "run.sh")
    assert launch.framework == "olmo-core"
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.replicate, launch.layout.dp) == (3, nodes, 8 * nodes)
    assert launch.job_fields["dtype"] == "bf16"
    assert any("further models" in doubt for doubt in launch.may_be_wrong) == (program == "dpo")


def test_ranks_that_share_a_sequence_are_of_one_node() -> None:
    text = (
        OPEN_INSTRUCT.replace("PROGRAM", "olmo_core_finetune")
        + " --cp_degree 4 --attn_implementation flash_3"
    )
    launch = parse_launch(f"torchrun --nnodes 2 --nproc_per_node 8 {text}\n", "run.sh")
    assert launch.layout is not None
    layout = launch.layout
    assert (layout.cp, layout.cp_kind, layout.dp, layout.replicate) == (4, "all_gather", 4, 2)
    assert launch.global_batch == 8


def test_a_budget_of_memory_is_a_doubt() -> None:
    text = OPEN_INSTRUCT.replace("PROGRAM", "olmo_core_finetune")
    whole = parse_launch(
        f"torchrun --nproc_per_node 8 {text} --activation_memory_budget 1.0\n", "run.sh"
    )
    part = parse_launch(
        f"torchrun --nproc_per_node 8 {text} --activation_memory_budget 0.5\n", "run.sh"
    )
    assert whole.may_be_wrong == ()
    assert any("activation_memory_budget=0.5" in doubt for doubt in part.may_be_wrong)


def test_the_configuration_says_the_model_where_weights_lie_in_a_folder() -> None:
    text = OPEN_INSTRUCT.replace("PROGRAM", "olmo_core_finetune").replace(
        "allenai/OLMo-2-1124-7B", "/weka/ckpt"
    )
    launch = parse_launch(
        f"torchrun --nproc_per_node 8 {text} --config_name Qwen/Qwen3-8B\n", "run.sh"
    )
    assert launch.model == pm.model("qwen3-8b")


def test_adapters_on_weights_in_4_bits_compute_in_bf16() -> None:
    text = (
        OPEN_INSTRUCT.replace("PROGRAM", "finetune")
        + " --use_lora --use_qlora --lora_rank 64 --use_flash_attn"
    )
    launch = parse_launch(f"accelerate launch --num_processes 8 {text}\n", "run.sh")
    assert (launch.job_fields["dtype"], launch.job_fields["base_weights"]) == ("bf16", "nf4")
    assert launch.may_be_wrong == ()


LAUNCHED = {
    "torchrun": "torchrun --nproc_per_node 8 --nnodes {nodes} train.py TRAINER",
    "torch.distributed.run": "python -m torch.distributed.run --nproc_per_node=8 --nnodes={nodes} train.py TRAINER",
    "deepspeed": "deepspeed --num_gpus 8 --num_nodes {nodes} train.py TRAINER",
    "LLaMA-Factory": "NNODES={nodes} NPROC_PER_NODE=8 llamafactory-cli train --finetuning_type full TRAINER",
    "Swift": "NNODES={nodes} NPROC_PER_NODE=8 swift sft --train_type full --gradient_accumulation_steps 1 TRAINER",
    "torchtitan": "torchrun --nproc_per_node 8 --nnodes {nodes} -m torchtitan.train --module llama3 --config llama3_8b",
    "Megatron-Bridge": "torchrun --nproc_per_node 8 --nnodes {nodes} run_recipe.py --recipe llama3_8b_pretrain_config",
}
TRAINER = "--model_name_or_path Qwen/Qwen2-7B --bf16 true --per_device_train_batch_size 2"


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_nodes_that_nobody_defines_are_not_one_node(launcher: str) -> None:
    """Scripts leave the number of nodes to the cluster because there are several."""
    command = LAUNCHED[launcher].replace("TRAINER", TRAINER)
    two = parse_launch(command.format(nodes=2) + "\n", "run.sh")
    left_open = parse_launch(command.format(nodes="$PLATFORM_NODES") + "\n", "run.sh")
    stated = parse_launch(command.format(nodes="$PLATFORM_NODES") + "\n", "run.sh", devices=16)
    defaulted = parse_launch(command.format(nodes="${PLATFORM_NODES:-2}") + "\n", "run.sh")
    assert (two.devices, left_open.devices, stated.devices, defaulted.devices) == (16, None, 16, 16)
    assert any("PLATFORM_NODES" in note for note in left_open.ignored)
    assert any("--devices" in sentence for sentence in left_open.missing)


def test_nodes_that_only_the_scheduler_knows_are_those_of_the_job() -> None:
    command = LAUNCHED["torchrun"].replace("TRAINER", TRAINER).format(nodes="$PLATFORM_NODES")
    assert parse_launch(f"#!/bin/bash\n#SBATCH --nodes=4\n{command}\n", "run.sh").devices == 32


PRETRAINING = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16"
)
HOSTS = {
    "colossalai run --nproc_per_node 8 --host a,b,c,d": 32,
    "colossalai run --nproc_per_node 8 --host=a": 8,
    "deepspeed --include localhost:4,5,6,7": 4,
    "deepspeed --include='a:0,1@b:0,1,2'": 5,
    "deepspeed -i a:0,1@b:0,1": 4,
    "deepspeed --include a@b": None,
    "mpirun -np 16 -H a:8,b:8": 16,
}


@pytest.mark.parametrize("launcher", HOSTS)
def test_hosts_that_a_launcher_lists_are_counted(launcher: str) -> None:
    assert parse_launch(f"{launcher} {PRETRAINING}\n", "run.sh").devices == HOSTS[launcher]


@pytest.mark.parametrize(
    "program", ["pretrain_llama.py", "pretrain_baichuan.py", "finetune_qwen.py"]
)
def test_programs_that_build_layers_of_their_own_say_so(program: str) -> None:
    """AscendSpeed's programs of 2023 know a family's layers, and their scripts state sizes
    alone."""
    command = f"torchrun --nproc_per_node 8 {PRETRAINING}".replace("pretrain_gpt.py", program)
    plain = parse_launch(f"{command}\n", "run.sh")
    described = parse_launch(
        f"{command} --swiglu --normalization RMSNorm --position-embedding-type rope\n", "run.sh"
    )
    assert any(
        doubt.startswith(f"the model may be wrong: {program}") for doubt in plain.may_be_wrong
    )
    assert described.may_be_wrong == ()


def test_the_precision_in_a_file_of_deepspeed_that_is_not_there_is_an_open_fact() -> None:
    command = COMMAND.replace("$FILE", "ds_zero2.json").replace("$((BATCH / 8))", "4")
    launch = parse_launch(command, "run.sh")
    doubt = (
        "the precision may be wrong: ds_zero2.json was not found in the same folder; bf16 is "
        "assumed"
    )
    assert launch.may_be_wrong == (doubt,)
    assert launch.job_fields["dtype"] == "bf16"
    stated = parse_launch(command.replace("tune.py", "tune.py --fp16"), "run.sh")
    assert (stated.may_be_wrong, stated.job_fields["dtype"]) == ((), "fp16")


@pytest.mark.parametrize("switch", ["--deepspeed ", ""])
@pytest.mark.parametrize("stage", ["--zero_stage 3 ", ""])
@pytest.mark.parametrize("batch", ["--per_device_train_batch_size 2", "--batch_size 2"])
def test_a_file_of_deepspeed_behind_its_own_switch(switch: str, stage: str, batch: str) -> None:
    """`deepspeed.add_config_arguments` adds `--deepspeed --deepspeed_config FILE`."""
    script = (
        f"cat <<EOF > ds.json\n{ONE_LINE.replace('$BATCH', '16')}\nEOF\n"
        f"deepspeed --num_gpus=8 main.py {switch}--deepspeed_config ds.json {stage}{batch} "
        "--model_name_or_path meta-llama/Meta-Llama-3-8B --max_length 2048 --bf16\n"
    )
    launch = parse_launch(script, "run.sh")
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.offload_states) == (3, "optimizer")
    assert launch.global_batch == 16
    assert launch.may_be_wrong == ()


def test_a_stage_that_contradicts_the_file_of_deepspeed_is_named() -> None:
    script = (
        f"cat <<EOF > ds.json\n{ONE_LINE.replace('$BATCH', '16')}\nEOF\n"
        "deepspeed --num_gpus=8 main.py --deepspeed --deepspeed_config ds.json --zero_stage 2 "
        "--per_device_train_batch_size 2 --model_name_or_path meta-llama/Meta-Llama-3-8B --bf16\n"
    )
    launch = parse_launch(script, "run.sh")
    assert launch.layout is not None
    assert launch.layout.zero == 3
    assert any("zero_stage" in doubt for doubt in launch.may_be_wrong)


@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_a_command_win_over_those_of_accelerates_file(nodes: int, tmp_path: Path) -> None:
    """Hybrid sharding copies the states between nodes."""
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
        "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        f"accelerate launch --config_file fsdp.yaml --num_machines {nodes} --num_processes {8 * nodes} "
        "run_clm.py --model_name_or_path mistralai/Mistral-7B-v0.1 --per_device_train_batch_size 2 "
        "--block_size 4096 --bf16\n"
    )
    layout = read_launch(script).layout
    assert layout is not None
    assert (layout.dp, layout.replicate) == (8 * nodes, nodes)


FILE_OF_TRL = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\ntorch_dtype: bfloat16\nbf16: true\n"
    "max_seq_length: 4096\npacking: true\nper_device_train_batch_size: 8\n"
    "gradient_accumulation_steps: 2\ngradient_checkpointing: true\n"
)


@pytest.mark.parametrize("named", ["--config sft.yaml", "--config=sft.yaml", "sft.yaml"])
@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize(
    "launcher", ["torchrun --nproc_per_node 8", "accelerate launch --num_processes 8"]
)
def test_flags_beside_a_file_of_settings_override_it(
    named: str, batch: int | None, launcher: str, tmp_path: Path
) -> None:
    """As the recipes of trl and alignment-handbook are started."""
    (tmp_path / "sft.yaml").write_text(FILE_OF_TRL)
    flag = "" if batch is None else f" --per_device_train_batch_size {batch}"
    script = tmp_path / "run.sh"
    script.write_text(f"{launcher} scripts/run_sft.py {named}{flag}\n")
    launch = read_launch(script)
    assert launch.model == pm.model("llama3-8b")
    assert (launch.devices, launch.global_batch, launch.seq_len) == (8, 16 * (batch or 8), 4096)
    assert launch.layout is not None
    assert launch.layout.recompute == "full"
    assert launch.may_be_wrong == ()
