"""Files of llm-foundry, GPT-NeoX, levanter and NeMo 1 as people have them: facts that were read
wrong or not at all."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.spec import Transformer
from perfmodel.workload import parameter_count


def read(name: str, text: str, devices: int | None = 8, **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), name, devices=devices, **given)


def model_of(launch: Launch) -> Transformer:
    assert isinstance(launch.model, Transformer)
    return launch.model


FOUNDRY = """
    max_seq_len: 512
    model:
      name: mpt_causal_lm
      d_model: 256
      n_heads: 4
      n_layers: 2
      vocab_size: 1000
    MORE
    global_train_batch_size: 64
    device_train_microbatch_size: 4
    precision: amp_bf16
    tp_config: {strategy: ffn, tensor_parallel_degree: 1}
"""


def foundry(more: str) -> str:
    """A file of llm-foundry with further settings of the model, divided by `|`."""
    settings = "".join(f"\n  {setting}" for setting in more.split("|") if setting)
    return dedent(FOUNDRY).replace("\nMORE", settings)


@pytest.mark.parametrize(
    ("more", "parameters"),
    [
        # Weights, biases and norms of a layer; embeddings and learned positions; the last norm
        # (`MPTConfig`).
        ("", 2 * (12 * 256**2 + 13 * 256) + 1512 * 256 + 2 * 256),
        ("no_bias: true", 2 * (12 * 256**2 + 2 * 256) + 1512 * 256 + 256),
        (
            "no_bias: true|tie_word_embeddings: false",
            2 * (12 * 256**2 + 2 * 256) + 2512 * 256 + 256,
        ),
        (
            "no_bias: true|norm_type: low_precision_rmsnorm",
            2 * (12 * 256**2 + 2 * 256) + 1512 * 256 + 256,
        ),
        (
            "no_bias: true|ffn_config: {ffn_type: mptglu, ffn_hidden_size: 512, ffn_act_fn: {name: silu}}",
            2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 1512 * 256 + 256,
        ),
    ],
)
def test_models_of_mpt(more: str, parameters: int) -> None:
    """Products have biases and embeddings are tied unless the file says otherwise."""
    launch = read("run.yaml", foundry(more))
    assert parameter_count(model_of(launch)) == parameters
    assert launch.may_be_wrong == ()


def test_windows_of_mpt() -> None:
    launch = read("run.yaml", foundry("attn_config: {rope: true, sliding_window_size: 128}"))
    assert model_of(launch).attention.window == 128


NEOX = """
    {
      "pipe_parallel_size": 1, "model_parallel_size": 1,
      "num_layers": 8, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "max_position_embeddings": 512,
      "pos_emb": "rotary", "no_weight_tying": true, "moe_num_experts": 4, "moe_top_k": 2, MORE
      "train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}
    }
"""


@pytest.mark.parametrize(
    ("more", "every"), [("", 2), ('"expert_interval": 4,', 4), ('"moe_expert_interval": 1,', 1)]
)
def test_layers_with_experts_of_gpt_neox(more: str, every: int) -> None:
    experts = model_of(read("run.yml", NEOX.replace("MORE", more))).experts
    assert experts is not None
    assert (experts.count, experts.topk, experts.every) == (4, 2, every)


def test_devices_of_gpt_neox() -> None:
    launch = read("run.yml", NEOX.replace("MORE", '"global_num_gpus": 64,'), devices=None)
    assert (launch.devices, launch.global_batch) == (64, 256)


LEVANTER = """
    model: {type: llama, hidden_dim: 512, num_layers: 4, num_heads: 4, num_kv_heads: 4, intermediate_dim: 1024}
    train_seq_len: 1024
    trainer: {mp: "p=f32,c=bfloat16", train_batch_size: SIZE}
"""


@pytest.mark.parametrize(
    "size", ["[[0, 64], [1000, 128]]", "[{start: 0, value: 64}, {start: 1000, value: 128}]"]
)
def test_batches_of_levanter_that_grow(size: str) -> None:
    launch = read("run.yaml", LEVANTER.replace("SIZE", size))
    assert (launch.global_batch, launch.seq_len) == (128, 1024)
    assert any("reads the last" in note for note in launch.assumed)


NEMO_SETTINGS = """
    trainer: {devices: 8, num_nodes: 1, precision: bf16}
    model:
      restore_from_path: /checkpoints/base.nemo
      peft: {peft_scheme: SCHEME, lora_tuning: {target_modules: [attention_qkv, mlp], adapter_dim: 16}}
      tensor_model_parallel_size: 2
      micro_batch_size: 4
      global_batch_size: 128
      megatron_amp_O2: true
      data: {train_ds: {max_seq_length: 1024, micro_batch_size: 1, global_batch_size: 64}}
"""


def test_fine_tuning_of_nemo_1() -> None:
    launch = read("run.yaml", NEMO_SETTINGS.replace("SCHEME", "lora"), model="llama3-8b")
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.global_batch, launch.seq_len) == (1, 64, 1024)
    assert (launch.job_fields["frozen"], launch.job_fields["adapter_rank"]) == (True, 16)
    assert launch.job_fields["adapter_modules"] == ("linear_qkv", "linear_fc1", "linear_fc2")
    whole = read("run.yaml", NEMO_SETTINGS.replace("SCHEME", '"none"'), model="llama3-8b")
    assert "adapter_rank" not in whole.job_fields
    (doubt,) = read(
        "run.yaml", NEMO_SETTINGS.replace("SCHEME", "ptuning"), model="llama3-8b"
    ).may_be_wrong
    assert "ptuning" in doubt


@pytest.mark.parametrize("is_beside", [True, False])
def test_commands_of_nemo_1(tmp_path: Path, is_beside: bool) -> None:
    """On Hydra: a file by name, and settings behind it; a `+` adds one that the file does not
    have."""
    settings = "trainer: {devices: 8, num_nodes: 1, precision: 16}\nmodel: {micro_batch_size: 4, global_batch_size: 8}\n"
    if is_beside:
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "mine.yaml").write_text(settings)
    script = tmp_path / "run.sh"
    script.write_text(
        "python /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py --config-path=conf "
        "--config-name=mine trainer.num_nodes=2 trainer.devices=8 trainer.precision=bf16-mixed "
        "model.micro_batch_size=1 model.global_batch_size=64 model.tensor_model_parallel_size=2 "
        "+model.context_parallel_size=2 model.encoder_seq_length=2048 model.optim.name=distributed_fused_adam\n"
    )
    launch = read_launch(script, model="llama3-8b")
    assert launch.layout is not None
    assert (launch.devices, launch.global_batch, launch.seq_len) == (16, 64, 2048)
    assert (launch.layout.tp, launch.layout.cp, launch.layout.zero) == (2, 2, 1)
    assert launch.job_fields["dtype"] == "bf16"
    assert (launch.may_be_wrong == ()) == is_beside


@pytest.mark.parametrize("flag", ["", "-v1", "-v2", "-triton", "-builder"])
def test_attention_of_megatron_deepspeed_is_fused_where_a_flag_asks_for_it(flag: str) -> None:
    command = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json "
        "--tensor-model-parallel-size 2 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 16 --fp16"
    )
    assert parse_launch(command, "run.sh").job_fields["flash_attention"] is False
    asked = parse_launch(f"{command} --use-flash-attn{flag}", "run.sh")
    assert asked.job_fields["flash_attention"] is True


@pytest.mark.parametrize(
    ("more", "is_fused"),
    [
        ("", False),
        ('"attention_config": [[["global"], 8]],', False),
        ('"attention_config": [[["flash"], 8]],', True),
        ('"attention_config": [[["flash", "global"], 4]],', True),
    ],
)
def test_attention_of_gpt_neox_is_global_unless_it_names_another(more: str, is_fused: bool) -> None:
    launch = read("run.yml", NEOX.replace("MORE", more))
    assert launch.job_fields["flash_attention"] is is_fused


def bloom(method: str, layers: int, stages: int) -> Launch:
    """A command in the style of BLOOM's, whose file of DeepSpeed is named after the job."""
    return parse_launch(
        "config_json=./ds_config.$SLURM_JOBID.json\n"
        "deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config $config_json --zero-stage 0 "
        f"--pipeline-model-parallel-size {stages} --num-layers {layers} --hidden-size 2048 "
        "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 "
        f"--global-batch-size 64 --bf16 --pp-partition-method '{method}'\n",
        "run.sh",
    )


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("per_stage", [2, 6])
def test_embeddings_that_count_as_layers_take_one_from_both_ends(
    stages: int, per_stage: int
) -> None:
    """BLOOM's 70 layers on 12 stages: 5, ten times 6, and 5."""
    launch = bloom("type:transformer|embedding", stages * per_stage - 2, stages)
    assert launch.layout is not None
    inner = [per_stage] * (stages - 2)
    assert launch.layout.partition == (per_stage - 1, *inner, per_stage - 1)
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:transformer|embedding"])
def test_cuts_that_are_not_worked_out_are_named(method: str) -> None:
    launch = bloom(method, 16, 4)
    assert any("pp-partition-method" in doubt for doubt in launch.may_be_wrong)
    assert bloom("type:transformer", 16, 4).may_be_wrong == ()


def test_a_degree_that_another_setting_fixes_is_not_called_assumed() -> None:
    """Megatron-DeepSpeed states the most ranks over which experts are spread."""
    launch = parse_launch(
        "deepspeed --num_nodes 8 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json "
        "--tensor-model-parallel-size 1 --moe-expert-parallel-size 64 --num-experts 128 --num-layers 24 "
        "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 4 --global-batch-size 256 --fp16",
        "run.sh",
    )
    assert launch.layout is not None
    assert launch.layout.ep == 64
    assert launch.states("ep")
    assert not any("ep=1" in line for line in launch.assumed)
