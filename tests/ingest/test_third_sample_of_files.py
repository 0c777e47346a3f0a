"""Kinds of settings that perfmodel misread or refused in a third sample of 77 public launch files
and logs.

Files are rewritten: their names and numbers are others.
"""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel.ingest import ReadOptions, read_measurements
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.spec import Transformer
from perfmodel.workload import parameters

TRAINER = (
    "--model_name_or_path bigscience/bloom-560m --per_device_train_batch_size 3 --max_length 512"
)


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


def billions(launch: Launch) -> float:
    assert launch.model is not None
    return round(parameters(launch.model).total / 1e9, 2)


# --- Hugging Face's Trainer ----------------------------------------------------------------------


@pytest.mark.parametrize("flags", ['--fsdp ""', "--deepspeed ''", '--fsdp="" --deepspeed=""'])
def test_empty_options_are_off(flags: str) -> None:
    """Scripts turn an option off by an empty text."""
    launch = read("run.sh", f"torchrun --nproc_per_node 4 sft.py {TRAINER} --bf16 True {flags}\n")
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero) == ("pytorch", 0)


@pytest.mark.parametrize("ending", [" ", "\t", " # 8 x A100", "  # --debug"])
def test_lines_that_go_on_behind_a_backslash_that_is_not_last(ending: str) -> None:
    lines = ["torchrun --nproc_per_node 4 sft.py", "--fp16 True", "--deepspeed z3.json", TRAINER]
    launch = read("run.sh", f" \\{ending}\n    ".join(lines))
    assert (launch.devices, launch.global_batch, launch.seq_len) == (4, 12, 512)
    assert launch.job_fields["dtype"] == "fp16"
    assert any("backslash" in note for note in launch.ignored)


@pytest.mark.parametrize(
    ("flags", "base_weights"),
    [
        ("--use_peft --torch_dtype float32 --bf16", "fp32"),
        ("--lora_r 8 --dtype float32 --fp16", "fp32"),
        ("--use_peft --torch_dtype bfloat16 --bf16", None),
        ("--use_peft --torch_dtype float32 --bf16 --load_in_4bit", "nf4"),
        ("--use_peft --torch_dtype float32 --bf16 --deepspeed zero2.json", None),
        ("--torch_dtype float32 --bf16", None),
    ],
)
def test_frozen_weights_are_stored_as_they_are_loaded(flags: str, base_weights: str | None) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 4 sft.py {TRAINER} {flags}")
    assert launch.job_fields.get("base_weights") == base_weights
    assert not any("do not state" in note for note in launch.assumed)


def test_a_type_of_frozen_weights_that_is_not_stated_is_assumed() -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 4 sft.py {TRAINER} --use_peft --bf16")
    assert any("torch_dtype" in note for note in launch.assumed)


OWN = "deepspeed --num_gpus 2 tune.py --model Qwen/Qwen2-7B --deepspeed z2.json"


@pytest.mark.parametrize(
    ("flags", "global_batch"),
    [
        ("--train_bs 3 --accumulation_steps 4", 24),
        ("--mbs 3 --grad_accum 4 --seqlen 512", 24),
        ("--batch_size_training 5", 10),
        # The Trainer's default is not that of every program.
        ("--sentences 3 --accumulation_steps 4", None),
        ("--sentences 3", None),
    ],
)
def test_batches_of_programs_of_users(flags: str, global_batch: int | None) -> None:
    launch = read("run.sh", f"{OWN} {flags}")
    assert launch.global_batch == global_batch
    assert any("global batch" in text for text in launch.missing) == (global_batch is None)


# --- adapters and optimizers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "partly"),
    [
        (r".*\.layers\.(3|7)\.self_attn\.(q|v)_proj|.*\.mlp\.down_proj", "q_proj, v_proj"),
        (r"model\.layers\.[0-9]\.self_attn\.(q|v)_proj|.*\.mlp\.down_proj", "q_proj, v_proj"),
        (r".*\.layers\.[0-9]+\.(self_attn\.(q|v)|mlp\.down)_proj", ""),
    ],
)
def test_patterns_for_some_layers(pattern: str, partly: str) -> None:
    launch = read(
        "run.yml",
        f"""\
        base_model: meta-llama/Meta-Llama-3-8B
        micro_batch_size: 2
        sequence_len: 1024
        sample_packing: true
        adapter: lora
        lora_r: 16
        lora_target_modules: '{pattern}'
        optimizer: adamw_torch
        bf16: true
        """,
    )
    assert launch.job_fields["adapter_modules"] == ("q_proj", "v_proj", "linear_fc2")
    assert [doubt.partition(" have ")[0].rpartition(": ")[2] for doubt in launch.may_be_wrong] == (
        [partly] if partly else []
    )


@pytest.mark.parametrize(("optimizer", "doubts"), [("adamw_torch_4bit", 1), ("adamw_bnb_8bit", 0)])
def test_states_in_4_bits_are_a_doubt(optimizer: str, doubts: int) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 4 sft.py {TRAINER} --optim {optimizer}")
    assert launch.job_fields["optimizer"] == "adam8bit"
    assert len(launch.may_be_wrong) == doubts


SWIFT = "NPROC_PER_NODE=4 swift sft --dataset x"


@pytest.mark.parametrize(
    ("flags", "model", "modules", "global_batch", "seq_len"),
    [
        # Versions 1 and 2.
        ("--model_type qwen1half-7b-chat --sft_type lora", "qwen1.5-7b", 3, 16, 2048),
        (
            "--model_type llama3-8b-instruct --batch_size 6 --max_length 512",
            "llama3-8b",
            3,
            24,
            512,
        ),
        (
            "--model_id_or_path meta-llama/Llama-2-13b-chat-hf --model_type llama2-13b-chat "
            "--lora_target_modules ALL --batch_size 2 --gradient_accumulation_steps 4",
            "llama2-13b",
            7,
            32,
            2048,
        ),
        # Since version 3 a type is an architecture.
        ("--model Qwen/Qwen2-7B --model_type qwen2 --max_length 512", "qwen2-7b", 7, 16, 512),
    ],
)
def test_versions_of_swift(
    flags: str, model: str, modules: int, global_batch: int, seq_len: int
) -> None:
    launch = read("run.sh", f"{SWIFT} {flags}")
    assert launch.model is not None
    assert (launch.model.name, launch.seq_len, launch.global_batch) == (
        model,
        seq_len,
        global_batch,
    )
    assert len(launch.job_fields["adapter_modules"]) == modules
    assert (launch.may_be_wrong, launch.ignored) == ((), ())


@pytest.mark.parametrize(("task", "doubts"), [("embedding", 1), ("seq_cls", 1), ("causal_lm", 0)])
def test_tasks_without_a_head_over_the_vocabulary(task: str, doubts: int) -> None:
    flags = f"--model Qwen/Qwen2-7B --max_length 512 --tuner_type full --task_type {task}"
    launch = read("run.sh", f"{SWIFT} {flags}")
    assert len([text for text in launch.may_be_wrong if "the model" in text]) == doubts


def test_files_of_data_are_no_files_of_settings() -> None:
    flags = "--model Qwen/Qwen2-7B --max_length 512 --custom_dataset_info ./data.json"
    assert read("run.sh", f"{SWIFT} {flags}").may_be_wrong == ()


# --- torchtitan ----------------------------------------------------------------------------------

TITAN = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"


def test_names_with_hyphens() -> None:
    """torchtitan's parser takes both spellings."""
    flags = (
        "--training.local_batch_size 2 --training.seq_len 1024 --activation_checkpoint.mode full "
        "--parallelism.tensor_parallel_degree 4"
    )
    plain, hyphens = (
        read("run.sh", f"{TITAN} {text}") for text in (flags, flags.replace("_", "-"))
    )
    assert plain.layout is not None
    assert (plain.layout, plain.seq_len, plain.ignored) == (
        hyphens.layout,
        hyphens.seq_len,
        hyphens.ignored,
    )
    assert (plain.layout.tp, plain.layout.recompute, plain.ignored) == (4, "full", ())


@pytest.mark.parametrize(
    ("flags", "seq_len", "micro_batch", "global_batch"),
    [
        # One row of several documents, of the longest length each.
        ("num_tokens_per_microbatch_per_dp_rank=4096 max_context_length=1024", 1024, 4, 32),
        (
            "num-tokens-per-microbatch-per-dp-rank=4096 max-context-length=1024 "
            "num-tokens-per-train-step=65536",
            1024,
            4,
            64,
        ),
        # No document is longer than the row.
        ("num_tokens_per_microbatch_per_dp_rank=512", 512, 1, 8),
    ],
)
def test_batches_in_tokens(flags: str, seq_len: int, micro_batch: int, global_batch: int) -> None:
    words = " ".join(f"--training.{flag}" for flag in flags.split())
    launch = read("run.sh", f"{TITAN} {words}")
    assert launch.layout is not None
    assert (launch.seq_len, launch.layout.micro_batch) == (seq_len, micro_batch)
    assert (launch.global_batch, launch.ignored) == (global_batch, ())


def test_micro_batches_of_a_pipeline_in_tokens() -> None:
    launch = read(
        "run.sh",
        f"{TITAN} --parallelism.pipeline_parallel_degree 2 --parallelism.num-pp-microbatches 4 "
        "--training.num-tokens-per-microbatch-per-dp-rank 2048 --training.max-context-length 1024",
    )
    assert launch.layout is not None
    assert (launch.layout.pp, launch.layout.micro_batch, launch.global_batch) == (2, 2, 32)


def test_tokens_that_no_sequences_have_are_named() -> None:
    launch = read("run.sh", f"{TITAN} --training.num-tokens-per-train-step 1000")
    assert any("num_tokens_per_train_step" in name for name in launch.ignored)


@pytest.mark.parametrize("framework", ["torchtitan", "maxtext"])
def test_a_model_of_primus_that_nobody_knows_is_asked_for(framework: str) -> None:
    """The sizes are not those of the framework's defaults."""
    launch = read(
        "run.yaml",
        f"""\
        modules:
          pre_trainer:
            framework: {framework}
            model: other_9B.yaml
            overrides:
              steps: 50
              per_device_batch_size: 2
        """,
    )
    assert launch.model is None
    assert any("other_9B" in text for text in launch.missing)


# --- forks of Megatron-LM ------------------------------------------------------------------------

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --seq-length 256 "
    "--num-attention-heads 8 --max-position-embeddings 256 --vocab-size 1024 --bf16"
)


@pytest.mark.parametrize(
    ("flags", "count", "topk", "ep"),
    [
        ("--moe-num-experts=16", 16, 1, 1),
        ("--moe-num-experts 4 --moe-top-k 2 --moe-expert-model-parallelism", 4, 2, 4),
        ("--moe-num-experts=16 --moe-expert-model-parallelism", 16, 1, 8),
    ],
)
def test_experts_of_megablocks(flags: str, count: int, topk: int, ep: int) -> None:
    launch = read("run.sh", f"{MEGATRON} --micro-batch-size 2 --global-batch-size 64 {flags}")
    assert isinstance(launch.model, Transformer)
    experts = launch.model.experts
    assert experts is not None
    assert launch.layout is not None
    assert (experts.count, experts.topk, launch.layout.ep) == (count, topk, ep)
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(("dense", "first"), [("-1", 0), ("0", 0), ("2", 2)])
def test_dense_layers_in_front_of_mindspeed(dense: str, first: int) -> None:
    flags = f"--num-experts 8 --moe-layer-freq -1 --first-k-dense-replace {dense}"
    launch = read("run.sh", f"{MEGATRON} --micro-batch-size 2 --global-batch-size 64 {flags}")
    assert isinstance(launch.model, Transformer)
    assert launch.model.experts is not None
    assert launch.model.experts.first_dense_layers == first


def test_a_gate_of_megablocks() -> None:
    gated, plain = (
        read("run.sh", f"{MEGATRON} --moe-num-experts=16 --micro-batch-size 2 {flag}")
        for flag in ("--glu", "")
    )
    assert billions(gated) == pytest.approx(1.5 * billions(plain), rel=0.05)


def test_pipelines_of_deepspeeds_first_megatron() -> None:
    launch = read(
        "run.sh",
        f"{MEGATRON.replace('torchrun --nproc_per_node 8', 'deepspeed --num_gpus 8')} "
        "--model-parallel-size 2 --pipe-parallel-size 2 --batch-size 3 --gas 4 --deepspeed "
        "--zero-stage 1 --zero-contigious-gradients --checkpoint-activations "
        "--checkpoint-num-layers 1",
    )
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.pp, launch.layout.dp) == (2, 2, 2)
    assert (launch.layout.micro_batch, launch.global_batch) == (3, 24)
    assert (launch.layout.recompute, launch.may_be_wrong) == ("full", ())


def test_adapters_of_flagscale() -> None:
    launch = read(
        "run.yaml",
        """\
        system:
          tensor_model_parallel_size: 1
          use_distributed_optimizer: true
          precision:
            bf16: true
          checkpoint:
            peft_type: lora
            lora_target_modules: [linear_proj, linear_qkv]
            lora_dim: 16
            lora_dropout: 0.1
            lora_in_init_method: zero
        model:
          use_mcore_models: true
          num_layers: 4
          hidden_size: 256
          num_attention_heads: 4
          seq_length: 128
          max_position_embeddings: 128
          micro_batch_size: 1
          global_batch_size: 8
        data:
          tokenizer:
            vocab_size: 1024
        """,
        devices=8,
    )
    assert (launch.job_fields["frozen"], launch.job_fields["adapter_rank"]) == (True, 16)
    assert launch.job_fields["adapter_modules"] == ("linear_proj", "linear_qkv")
    assert launch.may_be_wrong == ()


# --- logs of nccl-tests --------------------------------------------------------------------------

TABLE = """\
#  Rank  6 Group  0 Pid 1623025 on    host device  6 [0xd1] NVIDIA H100 80GB HBM3
#  Rank  7 Group  0 Pid 1623025 on    host device  7 [0xdf] NVIDIA H100 80GB HBM3
#
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
   268435456      67108864     float     sum      -1   1119.8  239.72  419.51      0
"""


@pytest.mark.parametrize(
    "end",
    [
        "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 419.51\n",
        "# Avg bus bandwidth    : 419.51\n",
        "# Collective test concluded: all_reduce_perf\n",
    ],
)
def test_excerpts_with_the_last_ranks_and_one_of_the_last_lines(end: str, tmp_path: Path) -> None:
    """The number of the last rank and the bandwidths tell the test and its ranks."""
    log = tmp_path / "log.txt"
    log.write_text(TABLE + end)
    row = read_measurements("nccl-tests", [log], ReadOptions()).iloc[0]
    assert (row["collective"], row["num_ranks"]) == ("all_reduce", 8)


# --- files that were read right, shortened -------------------------------------------------------

SHORTENED = {
    # name: text, billions of parameters, devices, batch, sequence, type, stage, recompute
    "levanter.yaml": (
        """\
        data: !include data/pile.yaml
        model: {type: gpt2, hidden_dim: 768, num_heads: 12, num_layers: 12, seq_len: 1024}
        trainer: {mp: "p=f32,c=bfloat16", model_axis_size: 1, per_device_parallelism: 8, train_batch_size: 256}
        """,
        (0.12, 8, 256, 1024, "bf16", 3, "full"),
    ),
    "llama_factory.yaml": (
        """\
        model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
        stage: sft
        do_train: true
        finetuning_type: lora
        lora_rank: 8
        template: qwen3_nothink
        cutoff_len: 2048
        ray_num_workers: 4
        per_device_train_batch_size: 1
        gradient_accumulation_steps: 8
        bf16: true
        """,
        (4.02, 4, 32, 2048, "bf16", 0, "full"),
    ),
    "tune.yaml": (
        """\
        model:
          _component_: torchtune.models.llama3_1.llama3_1_8b
        tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
        dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
        batch_size: 4
        optimizer: {_component_: torch.optim.AdamW, fused: true}
        gradient_accumulation_steps: 8
        enable_activation_checkpointing: true
        dtype: bf16
        """,
        (8.03, 8, 256, 1024, "bf16", 3, "full"),
    ),
    "accelerate.sh": (
        """\
        #SBATCH --nodes=2 --gres=gpu:4
        NUM_MACHINES=${SLURM_NNODES:-2}
        for RANK in $(seq 0 $((NUM_MACHINES - 1))); do
        cat > "cfg/machine_${RANK}.yaml" <<EOF
        distributed_type: DEEPSPEED
        mixed_precision: bf16
        num_machines: ${NUM_MACHINES}
        num_processes: $((NUM_MACHINES * 4))
        machine_rank: ${RANK}
        deepspeed_config:
          zero_stage: 3
          offload_optimizer_device: cpu
        EOF
        done
        srun bash -c 'accelerate launch --config_file cfg/machine_${SLURM_PROCID}.yaml train.py \\
          --model_name_or_path mistralai/Mistral-7B-v0.1 --per_device_train_batch_size 2 \\
          --gradient_accumulation_steps 8 --max_seq_length 2048 --gradient_checkpointing'
        """,
        (7.24, 8, 128, 2048, "bf16", 3, "full"),
    ),
    "xpk.sh": (
        """\
        export TPU_TYPE=v5p-1024
        python3 ../xpk.py workload create --tpu-type=${TPU_TYPE} --num-slices=1 --command "python3 \\
        MaxText/train.py MaxText/configs/base.yml model_name=gpt3-175b per_device_batch_size=4 \\
        ici_data_parallelism=8 ici_fsdp_parallelism=8 ici_tensor_parallelism=8 remat_policy=full"
        """,
        (174.62, 512, 2048, 2048, "bf16", 3, "full"),
    ),
}


@pytest.mark.parametrize("name", SHORTENED)
def test_files_of_the_sample(name: str) -> None:
    text, expected = SHORTENED[name]
    states_devices = name in ("llama_factory.yaml", "accelerate.sh", "xpk.sh")
    launch = read(name, text, **({} if states_devices else {"devices": 8}))
    assert launch.layout is not None
    seen = (
        billions(launch),
        launch.devices,
        launch.global_batch,
        launch.seq_len,
        launch.job_fields["dtype"],
        launch.layout.zero,
        launch.layout.recompute,
    )
    assert seen == expected
