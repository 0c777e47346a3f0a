"""Kinds of settings that perfmodel misread or refused in a seventh sample of public files: scripts
that train.

Files are rewritten: their names and numbers are others.
"""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel.catalog import read_network
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.workload import parameter_count


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def assumed(launch: Launch) -> str:
    return " ".join(launch.assumed)


def doubts(launch: Launch) -> str:
    return " ".join(launch.may_be_wrong)


# --- Colossal-AI ---------------------------------------------------------------------------------

BENCHMARK = "colossalai run --nproc_per_node 8 benchmark.py"
CHAT = (
    "colossalai run --nproc_per_node 8 train_sft.py --pretrain meta-llama/Llama-2-7b-hf "
    "--dataset a b --batch_size 2 --max_len 1024 --accumulation_steps 4 --mixed_precision fp16"
)
STAGES = {
    "gemini": 3,
    "gemini_auto": 3,
    "zero2": 2,
    "zero2_cpu": 2,
    "3d": 1,
    "3d_cpu": 1,
    "hybrid_parallel": 1,
    "ddp": 0,
}
OFFLOADED = ("zero2_cpu", "3d_cpu")


@pytest.mark.parametrize("plugin", STAGES)
def test_a_plugin_of_colossalai_says_what_is_sharded(plugin: str) -> None:
    degrees = "--tp 2 --zero_stage 1" if plugin in ("3d", "3d_cpu", "hybrid_parallel") else ""
    launch = read("run.sh", f"{CHAT} --plugin {plugin} {degrees}\n")
    assert launch.layout is not None
    assert (launch.format, launch.framework) == ("colossalai", "colossalai")
    assert launch.layout.zero == STAGES[plugin]
    assert launch.layout.tp == (2 if degrees else 1)
    assert (launch.layout.offload_states == "optimizer") == (plugin in OFFLOADED)
    # A replica takes `batch_size` sequences between two accumulations, whatever shares it.
    assert launch.global_batch == 2 * 4 * launch.layout.dp
    assert (launch.seq_len, launch.job_fields["dtype"]) == (1024, "fp16")
    assert ("gemini_auto" in doubts(launch)) == (plugin == "gemini_auto")


@pytest.mark.parametrize("stage", [1, 2])
def test_the_later_switch_of_offloading_needs_a_stage(stage: int) -> None:
    command = f"{CHAT} --plugin 3d --tp 4 --zero_cpu_offload"
    staged = read("run.sh", f"{command} --zero_stage {stage}\n").layout
    plain = read("run.sh", f"{command}\n").layout
    assert staged is not None
    assert plain is not None
    assert (staged.zero, staged.offload_states) == (stage, "optimizer")
    assert (plain.zero, plain.offload_states) == (0, "none")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("-c 13b -p gemini -l 2048 -b 3 -g", "--config 13b --plugin gemini --max_length 2048 --batch_size 3 --grad_checkpoint"),
        ("-x -c 70b", "--xformers --config 70b"),
        ("-p 3d -b 8 --tp 2 --pp 2 --mbs 2", "--plugin 3d --batch_size 8 --tp 2 --pp 2 --mbs 2"),
    ],
)  # fmt: skip
def test_short_options_are_the_long_ones(short: str, long: str) -> None:
    first, second = (
        read("run.sh", f"{BENCHMARK} {short}\n"),
        read("run.sh", f"{BENCHMARK} {long}\n"),
    )
    assert first.layout is not None
    assert (first.layout, first.model, first.global_batch, first.seq_len) == (
        second.layout,
        second.model,
        second.global_batch,
        second.seq_len,
    )
    assert (first.job_fields, first.assumed) == (second.job_fields, second.assumed)


def test_x_is_a_switch_in_one_program_and_the_precision_in_others() -> None:
    switch = read("run.sh", f"{BENCHMARK} -x -b 4\n")
    assert (switch.job_fields["flash_attention"], switch.job_fields["dtype"]) == (True, "bf16")
    other = read(
        "run.sh",
        "colossalai run --nproc_per_node 8 finetune.py -p zero2 -x fp16 -b 4 "
        "--model_path meta-llama/Llama-2-7b-hf\n",
    )
    assert other.job_fields["dtype"] == "fp16"
    assert "flash_attention" not in other.job_fields


@pytest.mark.parametrize(
    ("size", "billions"),
    [("7b", 6.74), ("13b", 13.02), ("65b", 65.29), ("70b", 68.98)],
)
def test_a_benchmark_names_a_size_of_llama(size: str, billions: float) -> None:
    launch = read("run.sh", f"{BENCHMARK} -c {size}\n")
    assert launch.model is not None
    assert parameter_count(launch.model) / 1e9 == pytest.approx(billions, abs=0.01)
    assert f"configuration {size}" in assumed(launch)
    with pytest.raises(LaunchFileError, match="must be a configuration of the examples"):
        read("run.sh", f"{BENCHMARK} -c 1t\n")


CHAT_DEFAULTS = {"--batch_size": 4, "--max_len": 512, "--accumulation_steps": 8}


@pytest.mark.parametrize("absent", CHAT_DEFAULTS)
def test_defaults_of_a_program_of_colossalai_are_taken_and_named(absent: str) -> None:
    command = (
        "colossalai run --nproc_per_node 8 train_sft.py --pretrain huggyllama/llama-7b "
        "--plugin zero2 --mixed_precision bf16"
    )
    stated = " ".join(f"{name} {value}" for name, value in CHAT_DEFAULTS.items() if name != absent)
    complete = " ".join(f"{name} {value}" for name, value in CHAT_DEFAULTS.items())
    left_out = read("run.sh", f"{command} {stated}\n")
    whole = read("run.sh", f"{command} {complete}\n")
    assert (left_out.layout, left_out.global_batch, left_out.seq_len) == (
        whole.layout,
        whole.global_batch,
        whole.seq_len,
    )
    assert f"={CHAT_DEFAULTS[absent]} (defaults of Colossal-AI's" in assumed(left_out)
    assert "defaults of Colossal-AI's" not in assumed(whole)


@pytest.mark.parametrize("hosts", ["hosts.txt", "$HOSTFILE"])
def test_a_list_of_hosts_that_is_not_there_leaves_the_devices_a_guess(hosts: str) -> None:
    command = f"colossalai run --nproc_per_node 8 --hostfile {hosts} benchmark.py -c 7b"
    launch = read("run.sh", f"HOSTFILE=nodes\n{command}\n")
    assert "is a guess: the nodes are listed in" in " ".join(launch.ignored)


def test_degrees_that_a_program_sets_itself_are_doubtful() -> None:
    command = "torchrun --nproc_per_node 8 train.py --mode pretrain --config 7b"
    open_degrees = read("run.sh", f"{command} --plugin hybrid_parallel\n")
    assert "the program sets the degrees of hybrid_parallel" in doubts(open_degrees)
    assert doubts(read("run.sh", f"{command} --plugin zero2\n")) == ""


@pytest.mark.parametrize("rank", [0, 8])
def test_adapters_of_colossalchat_switch_recomputation_off(rank: int) -> None:
    launch = read("run.sh", f"{CHAT} --plugin zero2 --grad_checkpoint --lora_rank {rank}\n")
    assert launch.layout is not None
    assert launch.layout.recompute == ("none" if rank else "full")
    assert launch.job_fields.get("adapter_rank", 0) == rank


def test_reinforcement_with_a_reward_model_is_refused() -> None:
    command = (
        "colossalai run --nproc_per_node 8 train_ppo.py --pretrain Qwen/Qwen2.5-3B "
        "--rm_pretrain Qwen/Qwen2.5-3B --plugin zero2 --train_batch_size 8\n"
    )
    with pytest.raises(LaunchFileError, match="trains by reinforcement"):
        read("run.sh", command)
    preferences = CHAT.replace("train_sft", "train_dpo").replace("max_len", "max_length")
    assert "the training method may be wrong" in doubts(
        read("run.sh", f"{preferences} --plugin zero2\n")
    )


def test_another_program_with_a_plugin_is_not_of_colossalai() -> None:
    with pytest.raises(LaunchFileError, match="does not know"):
        read("run.sh", "torchrun --nproc_per_node 8 train.py --plugin logger --batch_size 4\n")


# --- Tokenizers ----------------------------------------------------------------------------------

LLAMA = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 8 --seq-length 2048 --micro-batch-size 1 --global-batch-size 8 "
)


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "GPT2BPETokenizer", "Llama3Tokenizer"])
@pytest.mark.parametrize(
    ("folder", "vocabulary"),
    [("Mistral-7B-v0.3", 32768), ("Qwen3-8B", 151936), ("Meta-Llama-3-8B", 128256)],
)
def test_a_type_of_tokenizers_loads_the_vocabulary_of_its_file(
    kind: str, folder: str, vocabulary: int
) -> None:
    launch = read(
        "run.sh", f"{LLAMA} --tokenizer-type {kind} --tokenizer-model /m/{folder}/tokenizer.model\n"
    )
    assert launch.model is not None
    assert getattr(launch.model, "vocab") == vocabulary  # noqa: B009


@pytest.mark.parametrize("file", ["/teams/ours/code30k.model", "/corpora/ja60K/tokenizer.model"])
def test_a_file_that_nobody_knows_makes_the_vocabulary_of_its_type_an_assumption(file: str) -> None:
    command = f"{LLAMA} --tokenizer-type Llama2Tokenizer --tokenizer-model"
    unknown = read("run.sh", f"{command} {file}\n")
    assert f"a vocabulary of 32,000, as Llama2Tokenizer usually has (that of {file}" in assumed(
        unknown
    )
    for common in ("$TOKENIZER", "/data/tokenizer.model", "/weights/Llama-2-7b-hf/tokenizer.model"):
        assert "vocabulary" not in assumed(read("run.sh", f"{command} {common}\n"))


# --- Scripts that pass arguments on --------------------------------------------------------------

PASSED = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048"


@pytest.mark.parametrize("starter", ["bash ./runner/start.sh", "./launch/start.sh", "sh start.sh"])
def test_a_script_that_is_not_there_may_add_arguments(starter: str) -> None:
    launch = read("run.sh", f"{starter} {PASSED} --global-batch-size 8\n", devices=8)
    assert "everything that the command does not state may be wrong" in doubts(launch)
    assert "start.sh (line 1), which is not in the same folder" in doubts(launch)
    plain = read("run.sh", f"bash numa.sh python pretrain_gpt.py {PASSED}\n", devices=8)
    assert "everything" not in doubts(plain)


@pytest.mark.parametrize(
    "starter",
    ["examples/run_slurm_pretrain.sh", "runner/launch/slurm_pretrain.sh", "local_pretrain.sh"],
)
def test_starters_of_primus_take_their_file_from_a_variable(starter: str) -> None:
    """Its precision is that of Primus' files, and no longer fp32."""
    script = (
        "export NNODES=2\n"
        "export EXP=examples/megatron/configs/MI300X/llama3.1_8B-pretrain.yaml\n"
        f"bash ./{starter} --global_batch_size 256 --tensor_model_parallel_size 2\n"
    )
    launch = read("run.sh", script)
    assert launch.layout is not None
    assert (launch.devices, launch.layout.tp, launch.global_batch) == (16, 2, 256)
    assert launch.job_fields["dtype"] == "bf16"


@pytest.mark.parametrize("program", ["fairseq-train", "/opt/bin/ours-train", "onmt_train"])
@pytest.mark.parametrize("data", ["", '"$1" '])
def test_a_program_that_is_no_python_file_is_named(program: str, data: str) -> None:
    script = f"{program} {data}--arch big --optimizer adam --fp16 --attention-dropout 0.1\n"
    name = program.rpartition("/")[2]
    with pytest.raises(LaunchFileError, match=f"it runs {name}, whose arguments"):
        read("run.sh", script)


# --- Switches of programs around the Trainer -----------------------------------------------------

TUNING = (
    "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 2 --bf16 True "
    "--model_max_length 1024"
)


@pytest.mark.parametrize("switch", ["--q_lora False", "--lora_enable false", "--offload_it False"])
def test_a_switch_that_is_off_in_words_is_off(switch: str) -> None:
    command = f"torchrun --nproc_per_node 8 train.py {TUNING}"
    off = read("run.sh", f"{command} {switch}\n")
    assert (doubts(off), off.layout) == ("", read("run.sh", f"{command}\n").layout)


@pytest.mark.parametrize(
    ("switches", "is_fused"),
    [
        ("--flash_attn True", True),
        ("--flash_attn False", False),
        ("--flash_attn False --xformers True", True),
        ("--use_flash_attn True", True),
    ],
)
def test_switches_of_fused_attention(switches: str, is_fused: bool) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 8 train.py {TUNING} {switches}\n")
    assert launch.job_fields["flash_attention"] is is_fused


@pytest.mark.parametrize("hosts", ["localhost:$GPUS", "localhost", "a:0,1@b"])
@pytest.mark.parametrize("sign", [" ", "="])
def test_devices_that_a_variable_leaves_open_are_asked_for(hosts: str, sign: str) -> None:
    command = f"deepspeed --include{sign}{hosts} train.py {TUNING} --deepspeed zero3.json\n"
    assert read("run.sh", command).devices is None
    counted = read("run.sh", command.replace(hosts, "a:0,1,2@b:0,1,2"))
    assert counted.devices == 6


@pytest.mark.parametrize("name", ["lion", "adafactor", "sgd"])
def test_a_program_of_a_user_names_its_optimizer(name: str) -> None:
    launch = read(
        "run.sh",
        "deepspeed --num_gpus 4 tune.py --model_name facebook/opt-1.3b --batch_size 2 --max_length 512 "
        f"--zero_stage 2 --optimizer {name}\n",
    )
    assert (launch.job_fields["optimizer"], doubts(launch)) == (name, "")


# --- trl -----------------------------------------------------------------------------------------

TRL_MODEL = "--model_name_or_path Qwen/Qwen3-1.7B --per_device_train_batch_size 2"


@pytest.mark.parametrize("program", ["grpo", "rloo", "gkd", "online_dpo", "ppo", "dpo", "reward"])
@pytest.mark.parametrize("form", ["trl {}", "accelerate launch examples/scripts/{}.py"])
def test_every_program_of_trl_that_runs_further_models_says_so(program: str, form: str) -> None:
    launch = read("run.sh", f"{form.format(program)} {TRL_MODEL} --num_processes 4\n", devices=4)
    assert "runs further models or passes" in doubts(launch)
    plain = read("run.sh", f"{form.format('sft')} {TRL_MODEL}\n", devices=4)
    assert "further models" not in doubts(plain)


def test_the_command_of_trl_takes_its_settings_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-1.7B\nper_device_train_batch_size: 3\nmax_length: 2048\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("trl sft --config run.yaml --gradient_accumulation_steps 4\n")
    launch = read_launch(script, devices=2)
    assert (launch.global_batch, launch.seq_len, launch.may_be_wrong) == (24, 2048, ())
    assert launch.job_fields["dtype"] == "bf16"
    script.write_text("trl sft --config absent.yaml --model_name_or_path Qwen/Qwen3-1.7B\n")
    assert "its settings file absent.yaml was not found" in doubts(read_launch(script, devices=2))


@pytest.mark.parametrize(
    ("loss", "is_chunked"),
    [("", True), ("--loss_type chunked_nll", True), ("--loss_type nll", False)],
)
@pytest.mark.parametrize("program", ["trl sft", "accelerate launch trl/scripts/sft.py"])
def test_fine_tuning_by_trl_keeps_the_scores_of_a_chunk(
    program: str, loss: str, is_chunked: bool
) -> None:
    launch = read("run.sh", f"{program} {TRL_MODEL} {loss}\n", devices=2)
    assert launch.job_fields["chunked_loss"] is is_chunked
    assert ("chunked_loss=true (trl's default" in assumed(launch)) == (not loss)
    other = read("run.sh", f"accelerate launch train.py {TRL_MODEL}\n", devices=2)
    assert "chunked_loss" not in other.job_fields


# --- Others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "processes", "engine", "spreads"),
    [("0,1,2,3", 2, "", True), ("0,1", 2, "", False), ("0,1,2,3", 2, "--deepspeed zero2", False)],
)
def test_processes_that_see_several_devices_spread_their_layers(
    visible: str, processes: int, engine: str, spreads: bool
) -> None:
    launch = read(
        "run.sh",
        f"CUDA_VISIBLE_DEVICES={visible} NPROC_PER_NODE={processes} swift sft --model Qwen/Qwen3-8B "
        f"--per_device_train_batch_size 1 {engine}\n",
    )
    assert launch.devices == processes
    assert ("spreads its layers over 2 of the 4 visible" in doubts(launch)) == spreads


OLMO = "global_train_batch_size: 512\nmax_duration: 100\nmodel:\n  d_model: 64\n  n_layers: 2\n  n_heads: 2\n"


@pytest.mark.parametrize(
    "key",
    [
        "  block_type: sequential",
        "  layer_norm_type: default",
        "  mlp_hidden_size: 128",
        "  max_sequence_length: 2048",
        "  embedding_size: 50304",
    ],
)
def test_a_file_of_olmo_needs_no_tokenizer_to_be_told(key: str) -> None:
    with pytest.raises(LaunchFileError, match="looks like OLMo, which perfmodel does not read"):
        read("run.yaml", f"{OLMO}{key}\n")


@pytest.mark.parametrize("rate", ["100 Gb/s", "200 Gbps"])
@pytest.mark.parametrize("names", ["Ethernet InfiniBand", "InfiniBand Ethernet"])
def test_one_rate_of_two_networks_is_open(rate: str, names: str) -> None:
    assert read_network(f"{rate} {names}").not_understood == (
        "Ethernet and InfiniBand at one rate",
    )
    for clear in (f"{rate} InfiniBand", f"{rate} Ethernet", f"{rate} Ethernet, InfiniBand"):
        assert read_network(clear).not_understood == ()


@pytest.mark.parametrize(
    ("flag", "subject"),
    [("--sparsity interspersed", "the model"), ("--checkpoint-in-cpu", "memory")],
)
def test_attention_of_a_part_and_inputs_on_the_host_are_doubts(flag: str, subject: str) -> None:
    launch = read("run.sh", f"{LLAMA} {flag}\n")
    assert f"{subject} may be wrong" in doubts(launch)
