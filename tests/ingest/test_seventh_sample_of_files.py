"""Kinds of settings that perfmodel misread or refused in a seventh sample of public files: methods
that forks add, options of adapters, and sizes beside the name of a model.

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


COMMAND = (
    "accelerate launch --num_processes 8 sft.py --model_name_or_path Qwen/Qwen2.5-7B --use_peft "
    "--lora_r 8 --lora_target_modules q_proj --max_length 2048 --per_device_train_batch_size 2 "
    "--bf16 {option}\n"
)
SCRIPT = """\
import torch
from peft import {config}, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", torch_dtype=torch.bfloat16)
model = get_peft_model(model, {config}({option}target_modules=["q_proj", "v_proj"]))
args = TrainingArguments(output_dir="o", per_device_train_batch_size=2, bf16=True)
Trainer(model=model, args=args).train()
"""
XTUNER = """\
pretrained_model_name_or_path = 'Qwen/Qwen2.5-7B'
max_length = 2048
batch_size = 2
model = dict(
    type=SupervisedFinetune,
    llm=dict(type=AutoModelForCausalLM.from_pretrained,
             pretrained_model_name_or_path=pretrained_model_name_or_path),
    lora=dict(type=LoraConfig, r=16, {option}target_modules=['q_proj']))
optim_wrapper = dict(type=AmpOptimWrapper, optimizer=dict(type=AdamW), dtype='bfloat16')
"""
WHOLE_MODULES = {
    "axolotl": (
        "run.yaml",
        AXOLOTL.format(line="adapter: lora\nlora_r: 8\nlora_target_linear: true\nOPTION"),
        "lora_modules_to_save: [embed_tokens]",
    ),
    "LLaMA-Factory": (
        "run.yaml",
        FACTORY.format(method="sft").replace("full", "lora") + "OPTION\n",
        "additional_target: embed_tokens",
    ),
    "MS-Swift": (
        "run.sh",
        DORA["MS-Swift"][1].replace("--use_dora true", "OPTION"),
        "--modules_to_save embed_tokens",
    ),
    "trl": ("run.sh", COMMAND.format(option="OPTION"), "--lora_modules_to_save embed_tokens"),
    "a script": (
        "train.py",
        SCRIPT.format(config="LoraConfig", option="OPTION"),
        "modules_to_save=['embed_tokens'], ",
    ),
    "XTuner": ("config.py", XTUNER.format(option="OPTION"), "modules_to_save=['embed_tokens'], "),
}


@pytest.mark.parametrize("program", WHOLE_MODULES)
def test_weights_that_are_trained_whole_beside_adapters_are_named(program: str) -> None:
    name, text, option = WHOLE_MODULES[program]
    with_option = read(name, text.replace("OPTION", option), devices=8)
    without = read(name, text.replace("OPTION", ""), devices=8)
    assert "the training method may be wrong" in doubts(with_option)
    assert "training method" not in doubts(without)


@pytest.mark.parametrize("program", ["trl", "a script", "XTuner"])
def test_dora_of_peft_is_named(program: str) -> None:
    name, text, _ = WHOLE_MODULES[program]
    dora = {"trl": "--use_dora"}.get(program, "use_dora=True, ")
    assert "use_dora is predicted as LoRA" in doubts(
        read(name, text.replace("OPTION", dora), devices=8)
    )


@pytest.mark.parametrize(
    ("config", "word"),
    [("IA3Config", "IA3"), ("PrefixTuningConfig", "PrefixTuning"), ("VeraConfig", "Vera")],
)
def test_methods_of_peft_in_a_script_are_not_full_training(config: str, word: str) -> None:
    launch = read("train.py", SCRIPT.format(config=config, option=""), devices=8)
    assert launch.job_fields["frozen"]
    assert f"peft_type {word} is predicted as LoRA" in doubts(launch)


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


MAXTEXT = """\
{name}
base_emb_dim: 3072
base_num_query_heads: 24
base_num_kv_heads: 8
base_mlp_dim: 9216
base_num_decoder_layers: 20
head_dim: 128
mlp_activations: ["silu", "linear"]
vocab_size: 50000
decoder_block: "llama2"
per_device_batch_size: 2
max_target_length: 2048
"""


def test_the_file_of_a_model_of_maxtext_has_its_own_sizes() -> None:
    """Naming a model that the catalog lacks changes nothing: the file states all of its sizes."""
    named, plain = (
        read("run.yml", MAXTEXT.format(name=name), devices=8)
        for name in ('model_name: "our-3b"', "")
    )
    assert named.model is not None
    assert plain.model is not None
    assert parameter_count(named.model) == parameter_count(plain.model)


def test_a_name_alone_is_looked_up_even_beside_the_sizes_of_base_yml() -> None:
    sizes = (
        "base_emb_dim: 2048\nbase_num_query_heads: 16\nbase_num_kv_heads: 16\nbase_mlp_dim: 7168\n"
    )
    text = f"model_name: our-3b\n{sizes}base_num_decoder_layers: 16\nhead_dim: 128\nper_device_batch_size: 2\n"
    launch = read("run.yml", text, devices=8)
    assert launch.model is None
    assert "no model 'our-3b'" in " ".join(launch.missing)


@pytest.mark.parametrize(
    ("size", "is_named"),
    [
        ("base_num_decoder_layers: 5", True),
        ("base_emb_dim: 8192", True),
        ("base_num_decoder_layers: 32", False),
        ("base_num_decoder_layers: 16", False),
    ],
)
def test_sizes_beside_the_name_of_a_model_of_maxtext(size: str, *, is_named: bool) -> None:
    """MaxText takes the named model's sizes. Those of base.yml are no wish of the user."""
    text = f"model_name: llama3-8b\n{size}\nper_device_batch_size: 2\nmax_target_length: 2048\n"
    launch = read("run.yml", text, devices=8)
    assert launch.model is not None
    assert launch.model.name == "llama3-8b"
    assert (f"states {size.partition(':')[0]} beside model_name" in doubts(launch)) == is_named


def test_olmo3_of_maxtext() -> None:
    text = MAXTEXT.format(name="").replace("llama2", "olmo3") + "sliding_window_size: 1024\n"
    model: Any = read("run.yml", text, devices=8).model
    assert model.attention.window == 1024
    assert model.attention.full_attention_every == 4
    assert model.attention.qk_norm_of_all_heads
    assert model.norms.norm_at == "output"


TORCHTUNE = """\
models: /scratch/models
model:
  _component_: torchtune.models.{builder}
  num_layers: 10
  embed_dim: 1536
  num_heads: 12
  num_kv_heads: 4
  vocab_size: 40000
  max_seq_len: 4096
{further}
checkpointer: {{checkpoint_dir: "${{models}}/m"}}
tokenizer: {{path: "${{models}}/m/tokenizer.model", max_seq_len: 2048}}
batch_size: 2
dtype: bf16
optimizer: {{_component_: torch.optim.AdamW}}
"""


@pytest.mark.parametrize(
    ("builder", "further", "parameters"),
    [
        # Layers of 2 h^2 + 2 h kv + 3 h ffn, norms, and the embedding twice; the feed-forward is
        # two thirds of four times the width, 4096.
        ("llama3.llama3", "", 10 * (2 * 1536**2 + 2 * 1536 * 512 + 3 * 1536 * 4096 + 2 * 1536)),
        (
            "mistral.lora_mistral",
            "  intermediate_dim: 6000",
            10 * (2 * 1536**2 + 2 * 1536 * 512 + 3 * 1536 * 6000 + 2 * 1536),
        ),
        (
            "qwen2.qwen2",
            "  intermediate_dim: 6000",
            10 * (2 * 1536**2 + 2 * 1536 * 512 + 3 * 1536 * 6000 + 2 * 1536 + 1536 + 2 * 512),
        ),
    ],
)
def test_builders_of_torchtune_that_take_sizes(builder: str, further: str, parameters: int) -> None:
    launch = read("run.yaml", TORCHTUNE.format(builder=builder, further=further), devices=8)
    assert launch.model is not None
    assert parameter_count(launch.model) == parameters + 2 * 40000 * 1536 + 1536
    # The head of the file is a variable of the settings below it.
    assert "models" not in " ".join(launch.ignored)


def test_a_variable_that_nothing_refers_to_is_a_setting() -> None:
    text = TORCHTUNE.format(builder="llama3.llama3", further="").replace("${models}", "/x")
    assert "models (line 1)" in " ".join(read("run.yaml", text, devices=8).ignored)


# --- Files that are not read ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("c.py", "from xtuner.v1.train import TrainerConfig\nt = TrainerConfig()\n", "XTuner 1"),
        ("c.py", "import olmo_core.train as t\nt.prepare()\n", "OLMo-core"),
        ("c.py", "from axlearn.common import config\n", "AXLearn"),
        (
            "c.yaml",
            "distributed: {ep_size: 2}\nmodel: {_target_: a.b}\ntraining: {steps: 3}\n",
            "NeMo Automodel",
        ),
        ("c.yaml", "train-num-samples: 100\nbatch-size: 4\nmodel: m\n", "open_lm"),
        (
            "c.json",
            '{"model_name_or_path": "m", "per_device_train_batch_size": 1, "sharding": "stage2", '
            '"tensor_parallel_degree": 2}',
            "PaddleNLP",
        ),
        ("c.yaml", "platform: m\nmodules:\n  - {framework: torchtitan}\n", "Primus"),
    ],
)
def test_programs_that_are_not_read_are_named(name: str, text: str, tool: str) -> None:
    with pytest.raises(LaunchFileError, match=tool):
        read(name, text)


def test_zero_in_the_name_of_a_norm_is_no_layout() -> None:
    text = """\
    trainer: {devices: 2, num_nodes: 1, precision: bf16}
    model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, encoder_seq_length: 512,
      micro_batch_size: 2, global_batch_size: 8, layernorm_zero_centered_gamma: true}
    """
    assert "layout" not in doubts(read("run.yaml", text))
