"""Files of programs that also tune preferences and train by reinforcement: NeMo RL and ROLL."""

import pytest

import perfmodel as pm
from perfmodel.ingest.launch import parse_launch

NEMO_RL = """
{objective}: {{max_num_epochs: 1, max_num_steps: 60, seed: 42}}
checkpointing: {{enabled: true, checkpoint_dir: results}}
policy:
  model_name: meta-llama/Llama-3.1-8B-Instruct
  tokenizer: {{name: "${{policy.model_name}}"}}
  train_global_batch_size: 128
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  dtensor_cfg:
    enabled: {is_fsdp}
    activation_checkpointing: true
    tensor_parallel_size: 2
    context_parallel_size: 1
    sequence_parallel: true
    lora_cfg: {{enabled: false, dim: 8}}
  sequence_packing: {{enabled: true, train_mb_tokens: "${{mul:${{policy.max_total_sequence_length}}, 2}}"}}
  optimizer: {{name: torch.optim.AdamW, kwargs: {{lr: 5.0e-6}}}}
  megatron_cfg:
    enabled: {is_megatron}
    activation_checkpointing: false
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    expert_model_parallel_size: 1
    expert_tensor_parallel_size: 1
    sequence_parallel: true
    optimizer: {{optimizer: adam, use_distributed_optimizer: true, params_dtype: float32}}
    distributed_data_parallel_config: {{grad_reduce_in_fp32: false, overlap_grad_reduce: true}}
cluster: {{gpus_per_node: 8, num_nodes: 2}}
"""


@pytest.mark.parametrize("objective", ["sft", "dpo", "rm", "grpo", "distillation"])
@pytest.mark.parametrize("is_megatron", [True, False])
def test_the_training_half_of_nemo_rl(objective: str, is_megatron: bool) -> None:
    backends = {"is_megatron": str(is_megatron).lower(), "is_fsdp": str(not is_megatron).lower()}
    launch = parse_launch(NEMO_RL.format(objective=objective, **backends), "run.yaml")
    layout = launch.layout
    assert layout is not None
    assert launch.model == pm.model("llama3-8b")
    # A sample of preferences is a pair of sequences.
    each = 2 if objective in ("dpo", "rm") else 1
    assert (launch.devices, launch.seq_len, launch.job_fields["dtype"]) == (16, 4096, "bf16")
    assert (launch.global_batch, layout.micro_batch) == (128 * each, 2 * each)
    if is_megatron:
        assert launch.framework == "megatron-core"
        assert (layout.tp, layout.pp, layout.dp, layout.zero, layout.recompute) == (
            4,
            2,
            2,
            1,
            "none",
        )
        assert (layout.sequence_parallel, layout.overlap.overlap_grad_reduce) == (True, True)
        assert launch.job_fields["grad_dtype"] == "bf16"
    else:
        assert launch.framework == "fsdp"
        assert (layout.tp, layout.pp, layout.dp, layout.zero, layout.recompute) == (
            2,
            1,
            8,
            3,
            "full",
        )
    assert bool(launch.may_be_wrong) == (objective != "sft")
    assert not launch.ignored


ROLL = """
defaults: [../config/deepspeed_zero3@_here_, ../config/deepspeed_zero3_cpuoffload@_here_]
{model}: meta-llama/Meta-Llama-3-8B
{length}
lora_target: q_proj,v_proj
{block}:
  model_args: {{dtype: bf16, attn_implementation: fa2, disable_gradient_checkpointing: false{adapters}}}
  training_args: {{per_device_train_batch_size: 2, gradient_accumulation_steps: 4, learning_rate: 1.0e-6}}
  strategy_args:
    strategy_name: {strategy}
    strategy_config: {config}
  device_mapping: {devices}
  infer_batch_size: 4
actor_infer: {{strategy_args: {{strategy_name: vllm}}, device_mapping: "list(range(0,4))"}}
"""
ROLL_STRATEGIES = {
    "megatron_train": "{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true, "
    "use_distributed_optimizer: true, recompute_granularity: full, additional_configs: {gdn_backend: torch}}",
    "deepspeed_train": "${deepspeed_zero3_cpuoffload}",
    "fsdp2_train": "{fsdp_size: 8, reshard_after_forward: true, offload_policy: false}",
}


@pytest.mark.parametrize(
    "devices", ["list(range(0,16))", "list(range(8)) + list(range(16,24))", str(list(range(16)))]
)
@pytest.mark.parametrize("strategy", ROLL_STRATEGIES)
@pytest.mark.parametrize("block", ["sft_train", "actor_train", "student"])
def test_the_training_half_of_roll(block: str, strategy: str, devices: str) -> None:
    is_sft = block == "sft_train"
    text = ROLL.format(
        model="student_pretrain" if block == "student" else "pretrain",
        length="sequence_length: 4096" if is_sft else "prompt_length: 1024\nresponse_length: 3072",
        adapters="",
        block=block,
        strategy=strategy,
        config=ROLL_STRATEGIES[strategy],
        devices=devices,
    )
    launch = parse_launch(text, "run.yaml")
    layout = launch.layout
    assert layout is not None
    assert launch.model == pm.model("llama3-8b")
    assert (launch.devices, launch.seq_len, launch.job_fields["dtype"]) == (16, 4096, "bf16")
    assert (layout.micro_batch, layout.recompute) == (2, "full")
    assert launch.global_batch == 2 * 4 * layout.dp
    if strategy == "megatron_train":
        assert launch.framework == "megatron-core"
        assert (layout.tp, layout.pp, layout.dp, layout.zero) == (2, 2, 4, 1)
    elif strategy == "deepspeed_train":
        assert launch.framework == "deepspeed"
        assert (layout.dp, layout.zero, layout.offload_states) == (16, 3, "weights")
    else:
        assert launch.framework == "fsdp"
        assert (layout.dp, layout.zero, layout.replicate) == (16, 3, 2)
    assert bool(launch.may_be_wrong) == (not is_sft)
    assert "frozen" not in launch.job_fields


def test_rolls_preferences_are_pairs_and_its_adapters_freeze_the_rest() -> None:
    text = ROLL.format(
        model="chosen_key: chosen\npretrain",
        length="sequence_length: 512",
        adapters=', lora_target: "${lora_target}", lora_rank: 16',
        block="actor_train",
        strategy="deepspeed_train",
        config=ROLL_STRATEGIES["deepspeed_train"],
        devices="list(range(0,8))",
    )
    launch = parse_launch(text, "run.yaml")
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.global_batch) == (4, 4 * 4 * 8)
    assert (launch.job_fields["frozen"], launch.job_fields["adapter_rank"]) == (True, 16)
