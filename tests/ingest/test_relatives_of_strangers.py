"""Relatives of the files in `strangers/`: the same kinds of thing said in other ways, each in a few lines of text."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.prediction import predict
from perfmodel.workload import parameter_count


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text).lstrip("\n"), name, **given)


NEMO_T5 = """
    trainer: {devices: 8, num_nodes: 1, precision: bf16}
    model:
      micro_batch_size: 4
      global_batch_size: 64
      seq_length: 512
      max_position_embeddings: 512
      encoder: {num_layers: 12, hidden_size: 768, ffn_hidden_size: 2048, num_attention_heads: 12, activation: geglu}
      decoder: {num_layers: 6, hidden_size: 768, ffn_hidden_size: 2048, num_attention_heads: 12, activation: geglu}
"""


def test_an_encoder_and_a_decoder_of_nemo() -> None:
    launch = read("t5.yaml", NEMO_T5)
    net: Any = launch.model
    assert (net.layers, net.decoder_layers, net.block.gated_ffn, net.ffn_hidden) == (12, 6, True, 2048)
    assert (launch.seq_len, net.decoder_seq_len, launch.devices) == (512, 128, 8)
    assert launch.may_be_wrong == ()


def test_a_decoder_of_other_sizes_than_its_encoder_is_doubted() -> None:
    launch = read("t5.yaml", NEMO_T5.replace("decoder: {num_layers: 6, hidden_size: 768", "decoder: {hidden_size: 512"))
    (doubt,) = launch.may_be_wrong
    assert "the decoder's hidden_size differ" in doubt


def test_sequences_of_bert_in_nemo() -> None:
    text = """
        trainer: {devices: 8, num_nodes: 2, precision: bf16}
        model:
          {micro_batch_size: 4, global_batch_size: 256, seq_length: 256, num_layers: 12, hidden_size: 768,
           num_attention_heads: 12, bert_binary_head: true, tokenizer: {type: bert-large-uncased}}
    """
    launch = read("bert.yaml", text)
    net: Any = launch.model
    assert (launch.seq_len, net.attention.causal, net.vocab) == (256, False, 30522)
    assert launch.may_be_wrong == ()


NAMED_MODELS = {
    "maxtext.yml": """
        model_name: deepseek3-671b
        per_device_batch_size: 2
        ici_fsdp_parallelism: 16
        max_target_length: 4096
    """,
    "primus.yaml": """
        modules:
          pre_trainer:
            framework: megatron
            model: llama3.1_8B.yaml
            overrides: {micro_batch_size: 2, global_batch_size: 128, seq_length: 8192, tensor_model_parallel_size: 1}
    """,
    "foundry.yaml": """
        max_seq_len: 4096
        model: {name: hf_causal_lm, pretrained_model_name_or_path: meta-llama/Llama-2-7b-hf}
        global_train_batch_size: 64
        device_train_microbatch_size: 2
        precision: amp_bf16
        fsdp_config: {sharding_strategy: FULL_SHARD}
    """,
}


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_the_vocabulary_of_a_named_model_is_not_assumed(name: str) -> None:
    launch = read(name, NAMED_MODELS[name], devices=16)
    assert launch.model is not None
    assert not any("vocabulary" in sentence for sentence in launch.assumed)


def test_a_table_that_others_take_over_says_nothing_where_it_stands() -> None:
    text = """
        batches: &batches {micro_batch_size: 1, global_batch_size: 64}
        sizes: &sizes {num_layers: 24, hidden_size: 2048, num_attention_heads: 16}
        trainer: {devices: 8, num_nodes: 1, precision: bf16}
        model:
          <<: *batches
          <<: *sizes
          encoder_seq_length: 2048
    """
    launch = read("nemo.yaml", text)
    assert launch.may_be_wrong == launch.ignored == ()
    assert launch.model is not None
    assert parameter_count(launch.model) == pytest.approx(1.316e9, rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"mixed_precision": "fp16"}])
def test_a_file_of_deepspeed_that_is_not_there_does_not_mean_fp32(more: dict[str, str], tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\nnum_processes: 8\n"
    text += "".join(f"{key}: {value}\n" for key, value in more.items())
    launch = parse_launch(text, str(tmp_path / "run.yaml"), model="llama3-8b", global_batch=64)
    assert launch.job_fields["dtype"] == more.get("mixed_precision", "bf16")
    assert any("gone.json" in doubt for doubt in launch.may_be_wrong)


def test_deepspeed_shares_sequences_by_heads() -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 4,
              "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}  # fmt: skip
    launch = parse_launch(json.dumps(config), "ds.json", devices=16, model="llama3-8b", seq_len=32768)
    assert launch.layout is not None
    assert (launch.layout.cp, launch.layout.cp_kind, launch.layout.dp) == (4, "ulysses", 4)
    assert launch.may_be_wrong == ()


MAXTEXT_EXPERTS = """
    model_name: mixtral-8x7b
    per_device_batch_size: 4
    ici_fsdp_parallelism: 16
    ici_expert_parallelism: 4
    max_target_length: 4096
"""


@pytest.mark.parametrize(
    ("more", "job"),
    [
        ("capacity_factor: 1.25\n    sparse_matmul: false", {"expert_capacity_factor": 1.25}),
        ("capacity_factor: 1.25\n    sparse_matmul: true", {}),
        ("capacity_factor: -1\n    sparse_matmul: false", {}),
        ("weight_dtype: bfloat16", {"optimizer": "adam16bit"}),
        ("weight_dtype: bfloat16\n    mu_dtype: bfloat16", {"optimizer": "adam16bit"}),
        ("weight_dtype: float32", {}),
    ],
)
def test_capacity_and_narrow_weights_of_maxtext(more: str, job: dict[str, Any]) -> None:
    launch = read("maxtext.yml", f"{MAXTEXT_EXPERTS}    {more}\n")
    assert {key: value for key, value in launch.job_fields.items() if key != "dtype"} == job
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize("flag", ["--mystery-size 4", "--other_sizes=2"])
def test_an_unknown_size_makes_the_model_doubtful(flag: str) -> None:
    arguments = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 32000"
    batches = "--max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8"
    launch = parse_launch(f"torchrun --nproc_per_node 8 pretrain_gpt.py {arguments} {batches} {flag}\n", "run.sh")
    (doubt,) = launch.may_be_wrong
    assert doubt.startswith("the model may be wrong: 1 unread flag")


PRIMUS = """
    modules:
      pre_trainer:
        framework: megatron
        model: ${PRIMUS_MODEL:deepseek_v2_lite}.yaml
        overrides: {micro_batch_size: 4, global_batch_size: 640, expert_model_parallel_size: 8, OVERRIDE}
"""


@pytest.mark.parametrize("override", ["multi_latent_attention: false", "num_layers: 4", "num_experts: 16"])
def test_what_a_file_of_primus_changes_of_a_named_model_is_a_doubt(override: str) -> None:
    launch = read("run.yaml", PRIMUS.replace("OVERRIDE", override), devices=8)
    (doubt,) = launch.may_be_wrong
    assert override.partition(":")[0].replace("_", "-") in doubt
    assert read("run.yaml", PRIMUS.replace(", OVERRIDE", ""), devices=8).may_be_wrong == ()


def test_weights_in_eight_bits_alone_have_no_copies() -> None:
    arguments = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000"
    batches = "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 --fp8-format hybrid"
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models {arguments} {batches}"
    launches = [parse_launch(f"{command} {more}\n", "run.sh") for more in ("", "--fp8-param-gather")]
    copied, alone = (predict(launch.problem("dgx-h100"), layout=launch.layout).memory.weights for launch in launches)
    assert copied > 1.9 * alone
    assert launches[1].may_be_wrong == ()


@pytest.mark.parametrize(("mesh", "copies"), [("[2, 4]", 2), ("[8]", 1)])
def test_a_mesh_of_composer_has_copies_of_shards(mesh: str, copies: int) -> None:
    text = NAMED_MODELS["foundry.yaml"].replace("FULL_SHARD", f"FULL_SHARD, device_mesh: {mesh}")
    launch = read("foundry.yaml", text, devices=8)
    assert launch.layout is not None
    assert (launch.layout.dp, launch.layout.replicate) == (8, copies)
    assert launch.may_be_wrong == ()


def test_a_script_of_mindspeed_on_mindspore() -> None:
    text = """
        NPUS_PER_NODE=8
        NNODES=2
        WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
        DISTRIBUTED_ARGS="--master_addr localhost --worker_num $WORLD_SIZE --local_worker_num $NPUS_PER_NODE \\
            --log_dir=msrun_log --join=False --bind_core=True"
        msrun $DISTRIBUTED_ARGS pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \\
            --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1 \\
            --global-batch-size 32 --bf16 --use-mcore-models --tensor-model-parallel-size 2 --num-experts 8 \\
            --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 4 --moe-tp-extend-ep
    """
    launch = read("run.sh", text)
    assert launch.layout is not None
    assert (launch.devices, launch.layout.tp, launch.layout.ep, launch.layout.etp) == (16, 2, 4, 1)
    assert launch.may_be_wrong == launch.ignored == ()


@pytest.mark.parametrize(
    "name",
    ["casperhansen/llama-3-70b-fp16", "meta-llama/Meta-Llama-3-70B-Instruct", "unsloth/llama-3-70b-bnb-4bit"],
)
def test_copies_of_models_on_hubs_are_the_models(name: str) -> None:
    assert catalog.model(name).name == "llama3-70b"
