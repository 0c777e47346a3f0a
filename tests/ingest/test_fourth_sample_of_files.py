"""Kinds of settings that perfmodel misread or refused in relatives of the shrunk inputs, and in a
fourth sample of public launch files.

Files are rewritten: their names and numbers are others.
"""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.spec import Transformer
from perfmodel.workload import parameters

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 "
    "--micro-batch-size 2 --global-batch-size 64 --bf16"
)


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def transformer(launch: Launch) -> Transformer:
    assert isinstance(launch.model, Transformer)
    return launch.model


def doubts(launch: Launch) -> str:
    return " ".join(launch.may_be_wrong)


# --- Oumi ----------------------------------------------------------------------------------------

OUMI = """
    model:
      model_name: meta-llama/Llama-3.1-8B-Instruct
      model_max_length: 4096
      torch_dtype_str: bfloat16
      chat_template: llama3
    data:
      train:
        datasets: [{dataset_name: some/data}]
    training:
      trainer_type: TRL_SFT
      per_device_train_batch_size: 2
      gradient_accumulation_steps: 4
      optimizer: adamw_torch_fused
      enable_gradient_checkpointing: true
      log_model_summary: false
      output_dir: out
"""
SAME_AS_OUMI = """
    model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
    max_length: 4096
    torch_dtype: bfloat16
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
    optim: adamw_torch_fused
    gradient_checkpointing: true
    packing: false
"""


@pytest.mark.parametrize(
    ("of_oumi", "of_trainer"),
    [
        ("", ""),
        ("fsdp: {enable_fsdp: false, cpu_offload: true}", ""),
        ("peft: {lora_r: 64}", ""),
        (
            "fsdp: {enable_fsdp: true, sharding_strategy: HYBRID_SHARD, mixed_precision: bf16}",
            "bf16: true\nfsdp_config: {sharding_strategy: HYBRID_SHARD}",
        ),
        (
            "fsdp: {enable_fsdp: true, mixed_precision: bf16, cpu_offload: true}",
            "bf16: true\nfsdp_config: {sharding_strategy: FULL_SHARD, offload_params: true}",
        ),
    ],
)
def test_oumi_s_blocks_mean_what_the_trainer_s_arguments_mean(
    of_oumi: str, of_trainer: str
) -> None:
    ours = read("train.yaml", f"{dedent(OUMI)}{of_oumi}\n", devices=16)
    trainer = read("train.yaml", f"{dedent(SAME_AS_OUMI)}{of_trainer}\n", devices=16)
    assert (ours.format, trainer.format) == ("oumi", "hf-trainer")
    for field in ("model", "layout", "framework", "global_batch", "seq_len", "job_fields"):
        assert getattr(ours, field) == getattr(trainer, field)
    assert not ours.may_be_wrong
    assert not ours.ignored


def test_adapters_of_oumi_count_only_where_its_switch_is_on() -> None:
    adapters = "peft: {lora_r: 16, q_lora: true, lora_target_modules: [q_proj, v_proj]}\n"
    tuned = read("t.yaml", dedent(OUMI).replace("output_dir: out", "use_peft: true") + adapters)
    whole = read("t.yaml", dedent(OUMI) + adapters)
    assert tuned.job_fields["adapter_rank"] == 16
    assert tuned.job_fields["base_weights"] == "nf4"
    assert "adapter_rank" not in whole.job_fields


@pytest.mark.parametrize(("stage", "zero"), [("ZERO_0", 1), ("ZERO_2", 2), ("ZERO_3", 3)])
def test_stages_of_deepspeed_have_names_in_oumi(stage: str, zero: int) -> None:
    """DeepSpeed's engine keeps fp32 copies of weights that were loaded in 16 bits."""
    block = f"""
    deepspeed:
      enable_deepspeed: true
      zero_stage: {stage}
      precision: BF16
      offload_optimizer: {{device: CPU}}
    """
    launch = read("train.yaml", dedent(OUMI) + dedent(block), devices=8)
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.offload_states) == (zero, "optimizer")
    assert (launch.job_fields["dtype"], launch.job_fields.get("optimizer")) == ("bf16", "adam")


def test_a_command_of_oumi_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(dedent(OUMI))
    script = tmp_path / "run.sh"
    command = "oumi distributed torchrun -m oumi train -c train.yaml"
    script.write_text(
        f"export NPROC_PER_NODE=4\n{command} --training.per_device_train_batch_size 3\n"
    )
    launch = parse_launch(script.read_text(), str(script), devices=4)
    assert launch.layout is not None
    assert (launch.format, launch.layout.micro_batch, launch.global_batch) == ("oumi", 3, 48)


def test_reinforcement_of_oumi_is_a_doubt() -> None:
    launch = read("train.yaml", OUMI.replace("TRL_SFT", "TRL_GRPO"), devices=8)
    assert "trainer_type=TRL_GRPO" in doubts(launch)


# --- Megatron's arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "flags", "published"),
    [
        (4096, "--multiple-of 256", 11_008),
        (5120, "--multiple-of 256", 13_824),
        (6656, "--multiple-of 256", 17_920),
        (8192, "--multiple-of 4096 --hidden-dim-multiplier 1.3", 28_672),
        (4096, "--multiple-of 1024 --hidden-dim-multiplier 1.3", 14_336),
    ],
)
def test_sizes_of_llama_s_feed_forwards_follow_from_a_multiple(
    hidden: int, flags: str, published: int
) -> None:
    command = MEGATRON.replace("--hidden-size 2048", f"--hidden-size {hidden} --swiglu {flags}")
    launch = read("run.sh", command)
    assert transformer(launch).ffn_hidden == published
    assert not launch.may_be_wrong


@pytest.mark.parametrize("word", ["rwkv", "hyena", "vl", "dit", "diffusion"])
@pytest.mark.parametrize("is_yaml", [True, False])
def test_programs_of_other_models_are_doubted(word: str, is_yaml: bool) -> None:
    """FlagScale names the program in its own table."""
    if is_yaml:
        text = f"""
        experiment:
          task: {{type: train, backend: megatron, entrypoint: ./train/train_{word}.py}}
          runner: {{nnodes: 1, nproc_per_node: 8}}
        system: {{tensor_model_parallel_size: 1}}
        model: {{num_layers: 24, hidden_size: 2048, num_attention_heads: 16, seq_length: 1024,
          max_position_embeddings: 1024, micro_batch_size: 2, global_batch_size: 64}}
        """
        launch = read("train.yaml", text)
    else:
        launch = read("run.sh", MEGATRON.replace("pretrain_gpt", f"pretrain_{word}"))
    assert launch.devices == 8
    assert f"train_{word}.py" in doubts(launch)


@pytest.mark.parametrize("flag", ["--reglu", "--fused-swiglu", "--quick-glu", "--liglu"])
def test_gates_by_other_names_are_doubts_about_the_model(flag: str) -> None:
    assert "the model may be wrong" in doubts(read("run.sh", f"{MEGATRON} {flag}"))


def test_a_rank_of_adapters_alone_is_a_doubt() -> None:
    launch = read("run.sh", f"{MEGATRON} --lora-rank 8 --lora-alpha 16")
    assert "--lora-rank 8" in doubts(launch)
    swift = "megatron sft --model Qwen/Qwen2.5-7B --train_type full --lora_rank 8 --max_length 2048"
    assert "adapters" not in doubts(read("run.sh", f"{swift} --micro_batch_size 1", devices=8))


@pytest.mark.parametrize(
    "flag", ["--tp-comm-overlap", "--fp8-format hybrid", "--tp-comm-overlap-cfg x.yaml"]
)
def test_flags_of_transformer_engine_are_of_core(flag: str) -> None:
    """`--use-flash-attn` is of both generations; local layers are of the older one."""
    command = f"{MEGATRON} --use-flash-attn {flag}"
    assert read("run.sh", command).framework == "megatron-core"
    assert read("run.sh", f"{command} --transformer-impl local").framework == "megatron-lm"


def test_groups_without_their_switch_have_no_effect_and_are_named() -> None:
    launch = read("run.sh", f"{MEGATRON} --num-query-groups 4")
    assert transformer(launch).kv_heads == 16
    assert any("num-query-groups 4" in text for text in launch.assumed)
    equal = read("run.sh", f"{MEGATRON} --num-query-groups 16")
    assert not any("num-query-groups" in text for text in equal.assumed)


def test_a_schedule_of_flagscale() -> None:
    command = f"{MEGATRON} --pipeline-model-parallel-size 2 --use-dualpipev"
    launch = read("run.sh", command)
    assert launch.layout is not None
    assert launch.layout.schedule == "dualpipe-v"


def test_tiktoken_has_a_vocabulary_by_default() -> None:
    command = MEGATRON.replace("--vocab-size 32000", "--tokenizer-type TikTokenizer")
    assert transformer(read("run.sh", command)).vocab == 131_072


@pytest.mark.parametrize(
    "frequency",
    [
        "[0]*2+[1]*(24-2)",
        "([0]*(1+1) + [1]*(2*11))",
        "[0]*2+[1 for _ in range(22)]",
        "[0 for layer in range(4-2)] + [1]*22",
        "[0,0]+[1]*22",
    ],
)
def test_expressions_of_layers_with_experts(frequency: str) -> None:
    command = f"{MEGATRON} --num-experts 8 --moe-layer-freq '{frequency}'"
    experts = transformer(read("run.sh", command)).experts
    assert experts is not None
    assert (experts.first_dense_layers, experts.every) == (2, 1)


@pytest.mark.parametrize(
    "frequency", ["[1]*10**9", "[1 for i in open('x')]", "[1]*24+[0]*(0*9999999)"]
)
def test_other_expressions_of_layers_are_refused(frequency: str) -> None:
    with pytest.raises(LaunchFileError, match="moe-layer-freq"):
        read("run.sh", f'{MEGATRON} --num-experts 8 --moe-layer-freq "{frequency}"')


@pytest.mark.parametrize("option", ["--ntasks-per-node=4", "--tasks-per-node=4"])
def test_tasks_of_a_node_have_two_names(option: str) -> None:
    command = MEGATRON.replace("--nproc_per_node 8", "--nproc_per_node $SLURM_NTASKS_PER_NODE")
    script = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH {option}\n{command} --nnodes $SLURM_NNODES\n"
    launch = read("run.sh", script.replace("pretrain_gpt.py", "--nnodes 2 pretrain_gpt.py", 1))
    assert launch.devices == 8


def test_a_script_that_needs_arguments_says_so() -> None:
    command = MEGATRON.replace("--nproc_per_node 8", "--nproc_per_node $GPUS")
    loop = f'read -r GPUS MICRO <<< "$*"\nfor m in $MICRO; do\n{command}\ndone\n'
    script = f"if [ $# -lt 2 ]; then exit 1; fi\n{loop}"
    with pytest.raises(LaunchFileError, match=r"write them after its name.*run\.sh 8 24"):
        read("run.sh", script)
    assert read("run.sh", script, arguments=("8", "2")).devices == 8


# --- NeMo and Lightning --------------------------------------------------------------------------

NEMO = """
    trainer: {devices: 8, num_nodes: 1, precision: bf16}
    model:
      micro_batch_size: 1
      global_batch_size: 8
      encoder_seq_length: 1024
      num_layers: 4
      hidden_size: 2048
      num_attention_heads: 16
      ffn_hidden_size: SIZE
"""


@pytest.mark.parametrize(
    "size",
    [
        "${multiply:${.hidden_size}, 4}",
        "${mul:${model.hidden_size},4}",
        "${eval:'4*${.hidden_size}'}",
        '${eval:"(${.hidden_size} + 2048) * 6 // 3"}',
        "${oc.decode:8192}",
        "${oc.select:model.unknown,8192}",
        "${sum:4096,${oc.select:model.hidden_size},2048}",
        "8192",
    ],
)
def test_resolvers_are_computed(size: str) -> None:
    launch = read("nemo.yaml", NEMO.replace("SIZE", size))
    assert transformer(launch).ffn_hidden == 8192


@pytest.mark.parametrize("size", ["${eval:'__import__(1)'}", "${eval:'9**9**9'}", "${eval:1/0}"])
def test_expressions_of_other_things_than_numbers_are_not_evaluated(size: str) -> None:
    with pytest.raises(LaunchFileError, match="ffn_hidden_size"):
        read("nemo.yaml", NEMO.replace("SIZE", size))


def test_a_trainer_of_lightning_is_not_nemo() -> None:
    text = "trainer: {devices: 8, num_nodes: 2}\nmodel: {type: unet, in_channels: 3}\n"
    with pytest.raises(LaunchFileError, match="Lightning"):
        read("train.yaml", text)


# --- DeepSpeed, Accelerate, torchtitan, llm-foundry ----------------------------------------------


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        ('"torch_autocast": {"enabled": true}', "bf16"),
        ('"torch_autocast": {"enabled": true, "dtype": "float16"}', "fp16"),
        ('"torch_autocast": {"enabled": false, "dtype": "float16"}', "fp32"),
    ],
)
def test_autocast_of_deepspeed(table: str, dtype: str) -> None:
    text = f'{{"train_batch_size": 8, "zero_optimization": {{"stage": 2}}, {table}}}'
    launch = read("ds.json", text, devices=8, model="gpt3-350m")
    assert launch.job_fields["dtype"] == dtype
    assert not launch.may_be_wrong


def test_narrow_masters_of_deepspeed_are_a_doubt() -> None:
    half = '"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}'
    launch = read("ds.json", f'{{"train_batch_size": 8, {half}}}', devices=8, model="gpt3-350m")
    assert "fp16_master_weights_and_grads" in doubts(launch)


def test_tensor_parallelism_of_accelerate() -> None:
    text = (
        "distributed_type: TP\nnum_processes: 16\nmixed_precision: bf16\ntp_config: {tp_size: 4}\n"
    )
    launch = read("a.yaml", text, model="llama3-8b", global_batch=8)
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.dp) == (4, 4)


@pytest.mark.parametrize(("kind", "zero"), [("ddp", 0), ("fsdp", 3)])
def test_the_one_degree_of_torchtitan_has_a_type(kind: str, zero: int) -> None:
    text = f"""
    [model]
    name = "llama3"
    flavor = "8B"
    [training]
    batch_size = 1
    data_parallel_degree = 8
    data_parallel_type = "{kind}"
    """
    launch = read("train.toml", text, devices=8)
    assert launch.layout is not None
    assert launch.layout.zero == zero


@pytest.mark.parametrize(
    ("options", "dtype", "is_named"),
    [
        ("[float8]\nenable_fsdp_float8_all_gather = true", "bf16", True),
        ('[quantize.linear.mx]\nrecipe_name = "mxfp8_cublas"', "bf16", True),
        ("[quantize.linear.float8]\nenable_fsdp_float8_all_gather = false", "bf16", False),
        ("[float8]\nenable_float8_linear = true", "fp8", False),
    ],
)
def test_options_of_8_bits_without_a_converter_are_named(
    options: str, dtype: str, is_named: bool
) -> None:
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n{options}\n'
    launch = read("train.toml", text, devices=8)
    assert launch.job_fields["dtype"] == dtype
    assert any("converter" in note for note in launch.assumed) is is_named


@pytest.mark.parametrize(("gpus", "given"), [("gpus: 16", {}), ("cluster: x", {"devices": 16})])
def test_batches_of_a_device_in_llm_foundry(gpus: str, given: dict[str, int]) -> None:
    text = f"""
    compute: {{{gpus}}}
    max_seq_len: 1024
    model: {{name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 4, vocab_size: 50368}}
    device_train_batch_size: 8
    device_train_microbatch_size: 4
    precision: amp_bf16
    fsdp_config: {{sharding_strategy: FULL_SHARD}}
    """
    launch = read("mpt.yaml", text, **given)
    assert launch.layout is not None
    assert (launch.global_batch, launch.layout.micro_batch) == (128, 4)
    assert not launch.may_be_wrong
    assert parameters(transformer(launch)).total > 0


@pytest.mark.parametrize("kind", ["native_sparse_attention", "linear"])
def test_kinds_of_attention_of_llm_foundry_that_are_not_known_are_doubts(kind: str) -> None:
    text = """
    max_seq_len: 1024
    model: {{name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 4, vocab_size: 50368,
      attn_config: {{attn_type: {}, kv_n_heads: 4}}}}
    global_train_batch_size: 8
    """
    assert kind in doubts(read("mpt.yaml", text.format(kind), devices=8))
    assert not doubts(read("mpt.yaml", text.format("grouped_query_attention"), devices=8))


def test_bert_and_positions_of_llm_foundry() -> None:
    bert = """
    max_seq_len: 128
    tokenizer_name: bert-base-uncased
    model: {name: hf_bert, pretrained_model_name: bert-base-uncased}
    global_train_batch_size: 64
    """
    assert transformer(read("bert.yaml", bert, devices=8)).name == "bert-base"
    mpt = """
    max_seq_len: 128
    model: {name: mpt_causal_lm, d_model: 1024, n_heads: 16, n_layers: 4, vocab_size: 50368,
      learned_pos_emb: false, fc_type: torch}
    global_train_batch_size: 64
    """
    launch = read("mpt.yaml", mpt, devices=8)
    assert transformer(launch).inputs.positions == "none"
    assert not launch.may_be_wrong


# --- MindSpeed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "modules", "is_doubt"),
    [
        ("--recompute-activation-function", ("mlp_act", "moe_act"), False),
        ("--recompute-norm", ("layernorm",), False),
        (
            "--recompute-activation-function --recompute-norm",
            ("mlp_act", "moe_act", "layernorm"),
            False,
        ),
        (
            "--recompute-activation-function --recompute-activation-function-num-layers 2",
            ("mlp_act", "moe_act"),
            True,
        ),
    ],
)
def test_mindspeed_recomputes_activations_and_norms(
    flags: str, modules: tuple[str, ...], is_doubt: bool
) -> None:
    launch = read("run.sh", f"{MEGATRON} --use-mcore-models {flags}")
    assert launch.layout is not None
    assert launch.layout.recompute == "selective"
    assert launch.job_fields["recompute_modules"] == modules
    assert bool(launch.may_be_wrong) is is_doubt


def test_further_recomputation_beside_layers_in_full_is_a_doubt() -> None:
    full = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    launch = read("run.sh", f"{MEGATRON} {full} --recompute-norm")
    assert launch.layout is not None
    assert launch.layout.recompute_full_layers == (2,)
    assert "--recompute-norm" in doubts(launch)


# --- Files beside a script -----------------------------------------------------------------------


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    "program",
    [
        f"pretrain_gpt.py {MEGATRON.partition('.py ')[2]} --deepspeed",
        "sft.py --model_name_or_path gpt2 --per_device_train_batch_size 2 --max_length 512 --bf16",
    ],
)
def test_hosts_of_deepspeed_beside_the_script(program: str, is_there: bool, tmp_path: Path) -> None:
    if is_there:
        (tmp_path / "hosts").write_text("# two nodes\nnode1 slots=8\nnode2 slots=8\n")
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed --hostfile hosts {program}\n")
    launch = parse_launch(script.read_text(), str(script))
    assert launch.devices == (16 if is_there else None)


def test_an_undefined_value_names_the_file_that_may_define_it() -> None:
    script = f"source ./sizes_of_mine.sh\n{MEGATRON.replace('24', '$LAYERS')}\n"
    with pytest.raises(LaunchFileError, match=r"LAYERS.*sizes_of_mine\.sh .*was not found"):
        read("run.sh", script)
