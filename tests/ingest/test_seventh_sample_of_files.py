"""Kinds of settings that perfmodel misread or refused in a seventh sample of public files: methods
that forks add, options of adapters, and sizes beside the name of a model.

Files are rewritten: their names and numbers are others.
"""

from textwrap import dedent
from typing import Any

import pytest

from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.workload import parameter_count


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def doubts(launch: Launch) -> str:
    return " ".join(launch.may_be_wrong)


# --- Training methods ----------------------------------------------------------------------------

FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-7B
stage: {method}
finetuning_type: full
cutoff_len: 2048
per_device_train_batch_size: 2
bf16: true
"""
AXOLOTL = """\
base_model: Qwen/Qwen2.5-7B
sequence_len: 2048
micro_batch_size: 2
bf16: true
{line}
"""
SWIFT = """\
#!/bin/bash
NPROC_PER_NODE=8 swift rlhf --rlhf_type {method} --model Qwen/Qwen2.5-7B --max_length 2048 \\
  --per_device_train_batch_size 2 --torch_dtype bfloat16
"""
OUMI = """\
model: {{model_name: Qwen/Qwen2.5-7B, model_max_length: 2048, torch_dtype_str: bfloat16}}
training: {{trainer_type: {method}, per_device_train_batch_size: 2}}
"""
METHODS = {
    "LLaMA-Factory": ("run.yaml", lambda method: FACTORY.format(method=method)),
    "axolotl": ("run.yaml", lambda method: AXOLOTL.format(line=f"rl: {method}")),
    "MS-Swift": ("run.sh", lambda method: SWIFT.format(method=method)),
    "Oumi": ("run.yaml", lambda method: OUMI.format(method=method)),
}


@pytest.mark.parametrize("method", ["dpo", "rm", "ttl", "online_distil", "xyz2"])
@pytest.mark.parametrize("program", METHODS)
def test_a_method_that_is_not_plain_training_is_named(program: str, method: str) -> None:
    name, file = METHODS[program]
    launch = read(name, file(method), devices=8)
    assert "the training method may be wrong" in doubts(launch)
    assert method in doubts(launch)


@pytest.mark.parametrize(
    ("program", "method"),
    [("LLaMA-Factory", "sft"), ("LLaMA-Factory", "pt"), ("Oumi", "TRL_SFT"), ("axolotl", "false")],
)
def test_plain_training_raises_no_doubt(program: str, method: str) -> None:
    name, file = METHODS[program]
    assert "training method" not in doubts(read(name, file(method), devices=8))


@pytest.mark.parametrize("switch", ["reward_model", "process_reward_model"])
def test_axolotls_models_that_score_texts_are_named(switch: str) -> None:
    on, off = (
        read("run.yaml", AXOLOTL.format(line=f"{switch}: {value}"), devices=8)
        for value in ("true", "false")
    )
    assert switch in doubts(on)
    assert not doubts(off)


LEVANTER = """\
model: {{type: llama, hidden_dim: 1024, num_layers: 8, num_heads: 8, num_kv_heads: 8,
  intermediate_dim: 4096, seq_len: 2048}}
data: {{tokenizer: meta-llama/Llama-2-7b-hf}}
trainer: {{mp: "p=f32,c=bfloat16", train_batch_size: 64}}
{further}
"""


@pytest.mark.parametrize(
    "further", ["beta: 0.2", "reference_model_path: org/m", "dpo_data: {chosen_field: good}"]
)
def test_levanters_preference_tuning_is_named(further: str) -> None:
    assert "preference tuning" in doubts(
        read("run.yaml", LEVANTER.format(further=further), devices=8)
    )
    assert not doubts(read("run.yaml", LEVANTER.format(further=""), devices=8))


def test_a_training_from_nothing_takes_only_the_tokenizer_of_a_name() -> None:
    further = "initialize_from_hf: {start}\nmodel_name_or_path: meta-llama/Llama-2-7b-hf"
    own = read("run.yaml", LEVANTER.format(further=further.format(start="false")), devices=8)
    named = read("run.yaml", LEVANTER.format(further=further.format(start="true")), devices=8)
    assert own.model is not None
    assert named.model is not None
    assert own.model.layers == 8
    assert named.model.layers == 32


@pytest.mark.parametrize("base", ["gpt_model_file", "language_model_path"])
def test_nemos_adapters_beside_a_frozen_model_are_named(base: str) -> None:
    text = f"""\
    trainer: {{devices: 2, num_nodes: 1, precision: 16}}
    model: {{tensor_model_parallel_size: 1, micro_batch_size: 2, global_batch_size: 8,
      {base}: /models/gpt_2b.nemo, data: {{seq_length: 1024}}}}
    """
    launch = read("run.yaml", text, model="gpt3-1.3b")
    assert f"model.{base} belongs to programs that train adapters" in doubts(launch)


# --- Options of adapters -------------------------------------------------------------------------

FOUNDRY = """\
max_seq_len: 1024
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: Qwen/Qwen2.5-7B
{further}
global_train_batch_size: 64
device_train_microbatch_size: 2
precision: amp_bf16
fsdp_config: {{sharding_strategy: FULL_SHARD, mixed_precision: PURE}}
"""


def foundry(*lines: str) -> Launch:
    further = "\n".join(f"  {line}" for line in lines)
    return read("run.yaml", FOUNDRY.format(further=further), devices=8)


OPTIONS = {
    "use_dora: true": "use_dora",
    "peft_type: IA3": "IA3",
    "modules_to_save: [embed_tokens, lm_head]": "embed_tokens",
    "layers_to_transform: [0, 1, 2]": "layers_to_transform",
    "use_rslora: true": "",
    "lora_alpha: 32": "",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_adapters_that_change_the_training_are_named(option: str) -> None:
    launch = foundry("peft_config:", "  r: 8", "  target_modules: [q_proj, v_proj]", f"  {option}")
    assert launch.job_fields["adapter_rank"] == 8
    assert OPTIONS[option] in doubts(launch)
    assert bool(doubts(launch)) == bool(OPTIONS[option])


DORA = {
    "LLaMA-Factory": (
        "run.yaml",
        FACTORY.format(method="sft").replace("full", "lora") + "use_dora: true\n",
    ),
    "axolotl": ("run.yaml", AXOLOTL.format(line="adapter: lora\nlora_r: 8\npeft_use_dora: true")),
    "MS-Swift": (
        "run.sh",
        "NPROC_PER_NODE=8 swift sft --train_type lora --use_dora true --model Qwen/Qwen2.5-7B "
        "--max_length 2048 --per_device_train_batch_size 2 --torch_dtype bfloat16\n",
    ),
    "torchtune": (
        "run.yaml",
        "model:\n  _component_: torchtune.models.qwen2_5.lora_qwen2_5_7b_base\n  use_dora: True\n"
        "  lora_attn_modules: [q_proj]\ntokenizer: {max_seq_len: 2048}\nbatch_size: 2\ndtype: bf16\n"
        "optimizer: {_component_: torch.optim.AdamW}\n",
    ),
    "llm-foundry": (
        "run.yaml",
        FOUNDRY.format(further="  peft_config: {r: 8, use_dora: true, target_modules: [q_proj]}"),
    ),
}


@pytest.mark.parametrize("program", DORA)
def test_dora_is_not_lora_without_a_word(program: str) -> None:
    name, text = DORA[program]
    launch = read(name, text, devices=8)
    assert launch.job_fields["frozen"]
    assert "the training method may be wrong" in doubts(launch)
    assert "use_dora" in doubts(launch)


# --- Sizes beside the name of a model ------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "is_named"),
    [
        ("num_hidden_layers: 4", True),
        ("hidden_size: 512", True),
        ("vocab_size: 32000", True),
        ("max_position_embeddings: 1024", False),
        ("attention_dropout: 0.1", False),
    ],
)
def test_replaced_sizes_of_a_named_model_are_named(override: str, *, is_named: bool) -> None:
    launch = foundry("config_overrides:", f"  {override}")
    assert ("the model may be wrong" in doubts(launch)) == is_named


def test_a_model_that_a_fork_registers_is_looked_up_by_its_name() -> None:
    known, unknown = (
        read(
            "run.yaml",
            FOUNDRY.replace("hf_causal_lm", name)
            .replace("  pretrained_model_name_or_path: Qwen/Qwen2.5-7B\n", "")
            .format(further=""),
            devices=8,
        )
        for name in ("smollm2-135m", "our_model")
    )
    assert known.model is not None
    assert parameter_count(known.model) == pytest.approx(134.5e6, rel=0.001)
    assert "no model 'our_model'" in " ".join(unknown.missing)
