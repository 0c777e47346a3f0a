"""Commands whose program takes its settings from a file beside the script."""

from pathlib import Path

import pytest

from perfmodel.ingest.launch import Launch, read_launch

NANOTRON = """
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 24,
    num_attention_heads: 32, num_key_value_heads: 32, vocab_size: 49152, max_position_embeddings: 4096,
    tie_word_embeddings: true}
parallelism: {dp: 4, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}
tokens: {batch_accumulation_per_replica: 8, micro_batch_size: 2, sequence_length: 4096}
"""
FOUNDRY = """
model: {name: mpt_causal_lm, d_model: 2048, n_heads: 16, n_layers: 24, expansion_ratio: 4, vocab_size: 50368,
  max_seq_len: 2048}
max_seq_len: 2048
global_train_batch_size: 256
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true}
"""
LEVANTER = """
model: {type: llama, seq_len: 4096, hidden_dim: 4096, intermediate_dim: 11008, num_layers: 32, num_heads: 32,
  num_kv_heads: 32}
data: {tokenizer: meta-llama/Llama-2-7b-hf}
trainer: {mp: "p=f32,c=bfloat16", train_batch_size: 1024, per_device_parallelism: 8}
"""
NEOX = """
{"pipe_parallel_size": 1, "model_parallel_size": 2, "num_layers": 24, "hidden_size": 2048,
 "num_attention_heads": 16, "seq_length": 2048, "max_position_embeddings": 2048, "pos_emb": "rotary",
 "no_weight_tying": true, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
 "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}
"""
NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16}
model: {micro_batch_size: 1, global_batch_size: 64, tensor_model_parallel_size: 2,
  pipeline_model_parallel_size: 1, encoder_seq_length: 4096, max_position_embeddings: 4096, num_layers: 32,
  hidden_size: 4096, ffn_hidden_size: 11008, num_attention_heads: 32, normalization: rmsnorm, bias: false,
  activation: fast-swiglu, position_embedding_type: rope, share_embeddings_and_output_weights: false,
  tokenizer: {library: huggingface, type: meta-llama/Llama-2-7b-hf}}
"""
COMMANDS = {
    "nanotron": (NANOTRON, "torchrun --nproc_per_node=8 run_train.py --config-file {}"),
    "nanotron under Slurm": (
        NANOTRON,
        "srun -N 1 --ntasks-per-node 8 python -u run_train.py --config-file={}",
    ),
    "llm-foundry": (FOUNDRY, "composer train/train.py {} max_duration=10ba"),
    "levanter": (LEVANTER, "python -m levanter.main.train_lm --config_path {}"),
    "GPT-NeoX": (NEOX, "python ./deepy.py train.py -d . {}"),
    "NeMo": (NEMO, "python megatron_gpt_pretraining.py --config-path=. --config-name={}"),
}
BATCHES = {
    "nanotron": " tokens.batch_accumulation_per_replica=4",
    "llm-foundry": " global_train_batch_size=128",
    "levanter": " --trainer.train_batch_size 512",
    "NeMo": " model.global_batch_size=32",
}
"""Settings of a command that halve the batch."""


def read(
    name: str, tmp_path: Path, more: str = "", devices: int | None = 8
) -> tuple[Launch, Launch]:
    """What is read of the command, and of the file that it names."""
    settings, command = COMMANDS[name]
    file = tmp_path / "settings.yaml"
    file.write_text(settings)
    script = tmp_path / "run.sh"
    script.write_text(f"export OMP_NUM_THREADS=1\n{command.format(file.name)}{more}\n")
    return read_launch(script, devices=devices), read_launch(file, devices=devices)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_read_as_the_file_that_it_names(name: str, tmp_path: Path) -> None:
    by_command, by_file = read(name, tmp_path)
    assert by_command.layout == by_file.layout is not None
    assert by_command.job_fields == by_file.job_fields
    assert (by_command.devices, by_command.global_batch) == (by_file.devices, by_file.global_batch)
    assert by_command.may_be_wrong == by_file.may_be_wrong
    assert by_command.model is not None
    assert by_file.model is not None


@pytest.mark.parametrize("name", BATCHES)
def test_settings_of_the_command_win_over_its_file(name: str, tmp_path: Path) -> None:
    by_command, by_file = read(name, tmp_path, BATCHES[name])
    assert by_file.global_batch is not None
    assert by_command.global_batch == by_file.global_batch / 2


def test_devices_are_those_that_the_launcher_starts(tmp_path: Path) -> None:
    by_command, _ = read("nanotron", tmp_path, devices=None)
    assert by_command.devices == 8


def test_a_later_file_wins_over_an_earlier_one(tmp_path: Path) -> None:
    """GPT-NeoX takes the model and the cluster from files of their own."""
    (tmp_path / "local.yml").write_text('{"gradient_accumulation_steps": 2}\n')
    by_command, by_file = read("GPT-NeoX", tmp_path, " local.yml")
    assert by_file.global_batch is not None
    assert by_command.global_batch == by_file.global_batch / 2
