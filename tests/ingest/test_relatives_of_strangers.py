"""Relatives of the files in `strangers/`: the same kinds of thing said in other ways, each in a few
lines of text."""

import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import (
    BadValue,
    Launch,
    parse_launch,
    pipeline_segments,
    read_launch,
    shape,
)
from perfmodel.prediction import predict
from perfmodel.spec import Transformer
from perfmodel.workload import parameter_count

FILES = Path(__file__).parent / "launch_files"


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
    assert (net.layers, net.decoder_layers, net.block.gated_ffn, net.ffn_hidden) == (
        12,
        6,
        True,
        2048,
    )
    assert (launch.seq_len, net.decoder_seq_len, launch.devices) == (512, 128, 8)
    assert launch.may_be_wrong == ()


def test_a_decoder_of_other_sizes_than_its_encoder_is_doubted() -> None:
    launch = read(
        "t5.yaml",
        NEMO_T5.replace("decoder: {num_layers: 6, hidden_size: 768", "decoder: {hidden_size: 512"),
    )
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
def test_a_file_of_deepspeed_that_is_not_there_does_not_mean_fp32(
    more: dict[str, str], tmp_path: Path
) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\nnum_processes: 8\n"
    text += "".join(f"{key}: {value}\n" for key, value in more.items())
    launch = parse_launch(text, str(tmp_path / "run.yaml"), model="llama3-8b", global_batch=64)
    assert launch.job_fields["dtype"] == more.get("mixed_precision", "bf16")
    assert any("gone.json" in doubt for doubt in launch.may_be_wrong)


def test_deepspeed_shares_sequences_by_heads() -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": 4,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
    }
    launch = parse_launch(
        json.dumps(config), "ds.json", devices=16, model="llama3-8b", seq_len=32768
    )
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
        (
            "capacity_factor: 1.25\n    sparse_matmul: false",
            {"expert_capacity_factor": 1.25, "einsum_dispatch": True},
        ),
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
    launch = parse_launch(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {arguments} {batches} {flag}\n", "run.sh"
    )
    (doubt,) = launch.may_be_wrong
    assert doubt.startswith("the model may be wrong: 1 unread flag")


PRIMUS = """
    modules:
      pre_trainer:
        framework: megatron
        model: ${PRIMUS_MODEL:deepseek_v2_lite}.yaml
        overrides: {micro_batch_size: 4, global_batch_size: 640, expert_model_parallel_size: 8, OVERRIDE}
"""


@pytest.mark.parametrize(
    "override", ["multi_latent_attention: false", "num_layers: 4", "num_experts: 16"]
)
def test_what_a_file_of_primus_changes_of_a_named_model_is_a_doubt(override: str) -> None:
    launch = read("run.yaml", PRIMUS.replace("OVERRIDE", override), devices=8)
    (doubt,) = launch.may_be_wrong
    assert override.partition(":")[0].replace("_", "-") in doubt
    assert read("run.yaml", PRIMUS.replace(", OVERRIDE", ""), devices=8).may_be_wrong == ()


def test_weights_in_eight_bits_alone_have_no_copies() -> None:
    arguments = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000"
    batches = "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 --fp8-format hybrid"
    command = (
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models {arguments} {batches}"
    )
    launches = [
        parse_launch(f"{command} {more}\n", "run.sh") for more in ("", "--fp8-param-gather")
    ]
    copied, alone = (
        predict(launch.problem("dgx-h100"), layout=launch.layout).memory.weights
        for launch in launches
    )
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
    [
        "casperhansen/llama-3-70b-fp16",
        "meta-llama/Meta-Llama-3-70B-Instruct",
        "unsloth/llama-3-70b-bnb-4bit",
    ],
)
def test_copies_of_models_on_hubs_are_the_models(name: str) -> None:
    assert catalog.model(name).name == "llama3-70b"


NEOX = """
    {
      "pipe-parallel-size": 0, "model-parallel-size": 1, "num-layers": 12, "hidden-size": 768,
      "num-attention-heads": 12, "seq-length": 1024, "max-position-embeddings": 1024, "norm": "rmsnorm",
      "pos-emb": "rotary", "no-weight-tying": true, "train_micro_batch_size_per_gpu": 4, "partition-activations": true,
      "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, "cpu_offload": true},
      "fp16": {"enabled": true},
    }
"""


def test_a_neox_file_without_positions_has_no_table_of_them() -> None:
    rotary = read("run.yml", NEOX, devices=8)
    none = read("run.yml", NEOX.replace('"rotary"', '"none"'), devices=8)
    assert (rotary.model.inputs.positions, none.model.inputs.positions) == ("rope", "none")
    assert parameter_count(rotary.model) == parameter_count(none.model)
    assert rotary.ignored == rotary.may_be_wrong == ()


def test_norms_of_neox_may_have_no_parameters() -> None:
    text = NEOX.replace('"rmsnorm"', '"non_parametric_layernorm", "use_bias_in_attn_linear": false')
    net: Any = read("run.yml", text, devices=8).model
    assert (net.norms.norm, net.norms.norm_parameters, net.block.bias) == (
        "layer_norm",
        False,
        False,
    )


def test_weights_that_neox_offloads_are_on_the_host() -> None:
    stated = '"cpu_offload": true, "cpu_offload_params": true'
    launches = [
        read("run.yml", NEOX.replace('"cpu_offload": true', text), devices=8)
        for text in ('"x": 1', stated)
    ]
    assert [launch.layout.offload_states for launch in launches if launch.layout] == [
        "none",
        "weights",
    ]
    assert read("run.yml", NEOX, devices=8).layout.offload_states == "optimizer"


def test_layers_of_transformer_engine_in_neox_multiply_in_8_bits() -> None:
    text = NEOX.replace(
        '"fp16"', '"te_fp8_format": "hybrid", "te_mha": SWITCH, "te_fp8_margin": 0, "fp16"'
    )
    dtypes = [
        read("run.yml", text.replace("SWITCH", switch), devices=8).job_fields["dtype"]
        for switch in ("true", "false")
    ]
    assert dtypes == ["fp8", "fp16"]


def test_a_stated_size_of_a_gated_feed_forward_of_neox_is_a_doubt() -> None:
    text = NEOX.replace('"norm"', '"activation": "swiglu", "intermediate_size": 2048, "norm"')
    launch = read("run.yml", text, devices=8)
    (doubt,) = launch.may_be_wrong
    assert "intermediate_size 2048" in doubt
    assert launch.model.ffn_hidden == 2048
    assert (
        read(
            "run.yml", text.replace('"norm"', '"mlp_type": "llama", "norm"', 1), devices=8
        ).may_be_wrong
        == ()
    )


MEGATRON_TABLE = """
    MODEL_ARGS:
      --num-layers: 4
      --hidden-size: 512
      --num-attention-heads: 8
      --seq-length: 512
      --max-position-embeddings: 512
      --vocab-size: 32000
      --micro-batch-size: 1
      --global-batch-size: 64
      --tensor-model-parallel-size: 2
      --bf16: true
      --position-embedding-type: none
      --sequence-parallel: 1
"""


def test_no_positions_and_numbers_for_switches_in_a_table_of_arguments() -> None:
    launch = read("run.yaml", MEGATRON_TABLE, devices=8)
    assert launch.layout is not None
    assert (launch.model.inputs.positions, launch.layout.sequence_parallel) == ("none", True)
    off = read("run.yaml", MEGATRON_TABLE.replace("parallel: 1", "parallel: 0"), devices=8)
    assert off.layout is not None
    assert not off.layout.sequence_parallel


PRIMUS_MAXTEXT = """
    modules:
      pre_trainer:
        framework: maxtext
        model: deepseek_v2_16B.yaml
        overrides:
          dcn_data_parallelism: -1
          ici_fsdp_parallelism: 1
          ici_expert_parallelism: -1
          max_target_length: 4096
          per_device_batch_size: 8
          quantization: "fp8"
          remat_policy: "minimal_flash"
"""


def test_primus_over_maxtext_spreads_experts_over_a_node() -> None:
    """An open axis within slices takes the devices of a slice, and JAX calls every node of GPUs a
    slice."""
    launch = read("run.yaml", PRIMUS_MAXTEXT, devices=16)
    layout: Any = launch.layout
    assert (layout.dp, layout.ep, layout.replicate, layout.zero, layout.micro_batch) == (
        16,
        8,
        2,
        3,
        8,
    )
    assert (launch.model.name, launch.seq_len, launch.job_fields["dtype"]) == (
        "deepseek-v2-lite",
        4096,
        "fp8",
    )
    with pytest.raises(
        LaunchFileError,
        match=("Primus runs this file with hybrid_models, which perfmodel does not read"),
    ):
        read(
            "run.yaml",
            PRIMUS_MAXTEXT.replace("framework: maxtext", "framework: hybrid_models"),
            devices=16,
        )


def test_adapters_of_primus() -> None:
    text = """
        modules:
          post_trainer:
            framework: megatron_bridge
            model: qwen3_30B_A3B.yaml
            overrides:
              hf_model_name_or_path: Qwen/Qwen3-30B-A3B
              use_lora: true
              lora_rank: 32
              lora_target_modules: [q_proj, v_proj]
              micro_batch_size: 1
              global_batch_size: 32
              expert_model_parallel_size: 4
    """
    launch = read("run.yaml", text, devices=8)
    job = launch.job_fields
    assert (job["frozen"], job["adapter_rank"], job["adapter_modules"]) == (
        True,
        32,
        ("q_proj", "v_proj"),
    )
    assert launch.may_be_wrong == ()
    assert (
        "adapter_rank"
        not in read("run.yaml", text.replace("use_lora: true", ""), devices=8).job_fields
    )


def test_llama_factory_on_megatron() -> None:
    text = """
        model_name_or_path: Qwen/Qwen3-30B-A3B-Instruct-2507
        do_train: true
        stage: sft
        finetuning_type: full
        dataset: alpaca_en_demo
        cutoff_len: 4096
        template: qwen3_nothink
        per_device_train_batch_size: 1
        gradient_accumulation_steps: 8
        bf16: true
        pipeline_model_parallel_size: 4
        expert_model_parallel_size: 2
        use_distributed_optimizer: true
        recompute_granularity: full
    """
    launch = read("run.yaml", text, devices=8)
    layout: Any = launch.layout
    assert (layout.pp, layout.dp, layout.ep, layout.zero, layout.recompute) == (4, 2, 2, 1, "full")
    assert (launch.model.name, launch.global_batch, launch.seq_len) == ("qwen3-30b-a3b", 16, 4096)
    assert launch.may_be_wrong == ()
    adapted = read(
        "run.yaml", text.replace("finetuning_type: full", "finetuning_type: lora"), devices=8
    )
    assert any(
        "finetuning-type" in doubt or "finetuning_type" in doubt for doubt in adapted.may_be_wrong
    )


TRAINING = """
    torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 \\
        --seq-length 512 --max-position-embeddings 512 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 8
"""


@pytest.mark.parametrize(
    "text",
    [
        'HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)\nexec bash "${HERE}/train.sh" "$@"\n',
        'HERE=$(cd "$(dirname "$0")" && pwd -P)\nsource ${HERE}/train.sh\n',
        "DIR=$(cd -P $(dirname $0) && pwd)\nsrun bash $DIR/train.sh\n",
    ],
)
def test_a_wrapper_runs_the_script_beside_it_or_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(
        LaunchFileError, match=r"it has no training command; it runs train\.sh \(line 2\)"
    ):
        read_launch(tmp_path / "run.sh")
    (tmp_path / "train.sh").write_text(dedent(TRAINING))
    launch = read_launch(tmp_path / "run.sh")
    assert (launch.model.layers, launch.devices) == (4, 8)


@pytest.mark.parametrize(
    ("line", "vocabulary"),
    [
        ("--tokenizer-type QwenTokenizerFS --tokenizer-path /data/tokenizer", 151936),
        ("--tokenizer-type DeepSeekV3Tokenizer", 129280),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x/Meta-Llama-3-8B", 128256),
    ],
)
def test_types_of_tokenizers_of_forks_tell_a_family(line: str, vocabulary: int) -> None:
    text = TRAINING.replace("--vocab-size 32000", line)
    launch = read("run.sh", text)
    assert launch.model.vocab == vocabulary
    assert any("vocabulary" in sentence for sentence in launch.assumed)


def test_a_recipe_of_torchtune_that_generates_does_not_train() -> None:
    text = "model:\n  _component_: torchtune.models.llama3.llama3_8b\nmax_new_tokens: 300\ntop_k: 300\ndtype: bf16\n"
    with pytest.raises(LaunchFileError, match="belongs to a recipe that generates or evaluates"):
        parse_launch(text, "generation.yaml", devices=8)


LEVANTER = """
    data: {tokenizer: mine/tokenizer-of-64k}
    model: {type: KIND, hidden_dim: 64, num_heads: 4, num_layers: 2, intermediate_dim: 128, num_kv_heads: 4}
    trainer: {mp: "p=f32,c=bfloat16", train_batch_size: 32, per_device_parallelism: 4}
"""


def test_models_of_levanter_that_follow_llama_differ_in_attention() -> None:
    models: dict[str, Any] = {}
    for kind in ("llama", "qwen", "qwen3", "olmo2"):
        models[kind] = read("run.yaml", LEVANTER.replace("KIND", kind), devices=8).model
    assert [models[kind].attention.qkv_bias for kind in models] == [False, True, False, False]
    assert [models[kind].attention.qk_norm for kind in models] == [False, False, True, True]
    assert models["olmo2"].norms.norm_at == "output"


def test_a_tokenizer_of_levanter_that_nobody_knows_is_assumed() -> None:
    launch = read("run.yaml", LEVANTER.replace("KIND", "llama"), devices=8)
    assert launch.model.vocab == 50257
    assert any("vocabulary of 50,257" in sentence for sentence in launch.assumed)


def test_adapters_of_levanter_beside_a_model_of_the_hub() -> None:
    text = """
        initialize_from_hf: "mosaicml/mpt-7b@68e1a8e0"
        lora: {r: 32, alpha: 32.0, target_modules: [Wqkv]}
        trainer: {mp: "p=f32,c=bfloat16", train_batch_size: 64, per_device_parallelism: 4}
    """
    launch = read("run.yaml", text, devices=8)
    assert launch.model.name == "mpt-7b"
    assert (launch.job_fields["adapter_rank"], launch.job_fields["adapter_modules"]) == (
        32,
        ("linear_qkv",),
    )


@pytest.mark.parametrize(
    ("line", "doubted"),
    [
        ("use_galore: true", "memory"),
        ("use_badam: true", "memory"),
        ("qat: {group_size: 32}", "the precision"),
        ("attention: flash", ""),
        ("attn_implementation: kernels-community/vllm-flash-attn3", ""),
        ("activation_offloading: true", ""),
    ],
)
def test_settings_of_axolotl_are_read_or_doubted_by_what_they_are_about(
    line: str, doubted: str
) -> None:
    text = (
        "base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\n"
        + line
        + "\n"
    )
    doubts = parse_launch(text, "run.yaml", devices=8).may_be_wrong
    assert [doubt.partition(" may be wrong")[0] for doubt in doubts] == (
        [doubted] if doubted else []
    )


def test_a_plugin_of_axolotl_cuts_the_loss_into_pieces() -> None:
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\n"
    plugin = "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
    assert parse_launch(text + plugin, "run.yaml", devices=8).job_fields["chunked_loss"]
    off = parse_launch(text + plugin + "cut_cross_entropy: false\n", "run.yaml", devices=8)
    assert "chunked_loss" not in off.job_fields


@pytest.mark.parametrize(
    ("switches", "overwrites"),
    [
        ("liger_glu_activation: true", True),
        ("liger_swiglu: true", True),
        ("liger_rms_norm: true", False),
        ("liger_glu_activation: false", False),
    ],
)
def test_liger_s_activation_of_axolotl_overwrites_its_inputs(
    switches: str, overwrites: bool
) -> None:
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 4096\nmicro_batch_size: 1\nbf16: true\n"
    plugin = "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n"
    launch = parse_launch(f"{text}{plugin}{switches}\n", "run.yaml", devices=8)
    assert launch.job_fields.get("in_place_activation", False) == overwrites


@pytest.mark.parametrize("is_on", [True, False])
def test_liger_s_kernels_of_a_trainer_are_one_switch(is_on: bool) -> None:
    text = f"""
        model_name_or_path: Qwen/Qwen3-8B
        stage: sft
        finetuning_type: full
        cutoff_len: 4096
        per_device_train_batch_size: 1
        bf16: true
        enable_liger_kernel: {str(is_on).lower()}
    """
    fields = parse_launch(dedent(text), "run.yaml", devices=8).job_fields
    named = ("eager_kernels", "chunked_loss", "in_place_activation")
    liger = {"eager_kernels": (), "chunked_loss": True, "in_place_activation": True}
    assert {name: fields[name] for name in named if name in fields} == (liger if is_on else {})


LLAVA = """
    llm = "meta-llama/Meta-Llama-3-8B-Instruct"
    tower = "openai/clip-vit-large-patch14-336"
    max_length = int(2048 - (336 / 14) ** 2)
    batch_size = 4
    accumulative_counts = 2
    model = dict(
        type=LLaVAModel,
        freeze_llm=FROZEN,
        freeze_visual_encoder=True,
        llm=dict(type=AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path=llm),
        visual_encoder=dict(type=CLIPVisionModel.from_pretrained, pretrained_model_name_or_path=tower),
    )
"""


def test_a_vision_tower_of_xtuner_is_named_and_sizes_are_calculated() -> None:
    launch = read("run.py", LLAVA.replace("FROZEN", "False"), devices=8)
    assert launch.seq_len == 1472
    (doubt,) = launch.may_be_wrong
    assert "the vision tower openai/clip-vit-large-patch14-336" in doubt
    assert len(read("run.py", LLAVA.replace("FROZEN", "True"), devices=8).may_be_wrong) == 2


def test_powers_of_strangers_do_not_fill_the_memory() -> None:
    text = LLAVA.replace("FROZEN", "False").replace("(336 / 14) ** 2", "9 ** 9 ** 9")
    with pytest.raises(LaunchFileError, match="which the file does not define"):
        read("run.py", text, devices=8)


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("Et*3|(tt|)*6mL", [3, 2, 2, 2, 2, 2, 2, 0]),
        ("Et|(tt|)*3tL", [1, 2, 2, 2, 1]),
        ("Ett|tt|tt|ttL", [2, 2, 2, 2]),
        (r"Et*3\\\\|\\\\(tt\\\\|\\\\)*6mL", [3, 2, 2, 2, 2, 2, 2, 0]),
    ],
)
def test_a_layout_of_a_pipeline_names_the_layers_of_every_virtual_stage(
    text: str, segments: list[int]
) -> None:
    assert pipeline_segments(text) == segments


@pytest.mark.parametrize("text", ["Exyz|L", "Et*3|(tt|", "(t*99999|)*99999"])
def test_a_layout_of_a_pipeline_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadValue, match=r"must be a layout|more than"):
        pipeline_segments(text)


@pytest.mark.parametrize(
    ("layout", "partition", "vpp"), [("Et*5|(tt|)*2tttL", (7, 5), 2), ("Et*5|t*7L", (5, 7), 1)]
)
def test_stages_take_turns_on_the_virtual_stages_of_a_layout(
    layout: str, partition: tuple[int, ...], vpp: int
) -> None:
    text = MEGATRON_TABLE.replace("--num-layers: 4", "--num-layers: 12").rstrip(" ")
    more = f"      --pipeline-model-parallel-size: 2\n      --pipeline-model-parallel-layout: '{layout}'\n"
    stages: Any = read("run.yaml", text + more, devices=4).layout
    assert (stages.partition, stages.vpp) == (partition, vpp)


def test_virtual_stages_that_stages_cannot_share_are_refused() -> None:
    more = "      --pipeline-model-parallel-size: 2\n      --pipeline-model-parallel-layout: 'Et|tt|tL'\n"
    with pytest.raises(
        LaunchFileError, match="3 virtual stages, which is not a multiple of 2 stages"
    ):
        read("run.yaml", MEGATRON_TABLE.rstrip(" ") + more, devices=4)


def test_modules_of_recompute_stand_in_brackets_too() -> None:
    more = (
        "      --recompute-granularity: selective\n      --recompute-modules: '[layernorm mlp]'\n"
    )
    launch = read("run.yaml", MEGATRON_TABLE.rstrip(" ") + more, devices=4)
    assert launch.job_fields["recompute_modules"] == ("layernorm", "mlp")


def test_qlora_of_mindspeed_keeps_frozen_weights_in_4_bits() -> None:
    text = TRAINING.rstrip() + " --lora-r 8 --lora-alpha 16 --qlora\n"
    job = read("run.sh", text).job_fields
    assert (job["adapter_rank"], job["base_weights"]) == (8, "nf4")


MAXTEXT_COMMAND = """
    ARGS="model_name=llama3.1-8b per_device_batch_size=2 max_target_length=4096 ici_fsdp_parallelism=-1 MORE"
    xpk workload create --device-type=v6e-8 --command="set -e && export LIBTPU_INIT_ARGS=' --xla_x=true ' && \\
    python3 -m MaxText.train MaxText/configs/base.yml ${ARGS} | tee train.log; CODE=1; exit \\${CODE}"
"""


def test_a_command_of_maxtext_with_its_settings_before_it() -> None:
    launch = read("run.sh", MAXTEXT_COMMAND.replace("MORE", "num_vocab_tiling=8"), devices=8)
    assert (launch.model.name, launch.seq_len, launch.job_fields["chunked_loss"]) == (
        "llama3-8b",
        4096,
        True,
    )
    assert launch.may_be_wrong == launch.ignored == ()


@pytest.mark.parametrize(
    "program",
    [
        "python3 MaxText/decode.py",
        "python3 -m MaxText.decode",
        "python3 -m maxtext.inference.maxengine.maxengine_server",
        "python3 -m MaxText.load_and_quantize_checkpoint",
        "python MaxText/inference_microbenchmark.py",
    ],
)
def test_programs_of_maxtext_that_do_not_train_are_refused(program: str) -> None:
    """They take the same settings, so that only the program's name tells them from a training."""
    settings = "base.yml model_name=llama2-7b per_device_batch_size=4 max_target_length=2048 ici_tensor_parallelism=4"
    with pytest.raises(
        LaunchFileError, match=r"run.sh, line 1: \w+(.py)? of MaxText does not train"
    ):
        read("run.sh", f"{program} {settings}\n", devices=4)
    train = "python3 -m MaxText.train base.yml model_name=llama3.1-8b per_device_batch_size=2\n"
    launch = read("run.sh", f"{program} {settings}\n{train}", devices=4)
    assert launch.model.name == "llama3-8b"


def test_sizes_that_override_a_named_model_of_maxtext_are_doubted() -> None:
    more = "override_model_config=true head_dim=256 base_num_query_heads=16"
    (doubt,) = read("run.sh", MAXTEXT_COMMAND.replace("MORE", more), devices=8).may_be_wrong
    assert "base_num_query_heads, head_dim of llama3.1-8b" in doubt


def test_rings_of_maxtext() -> None:
    more = "ici_context_parallelism=4 context_parallel_strategy=ring context_parallel_load_balance=false"
    layout: Any = read("run.sh", MAXTEXT_COMMAND.replace("MORE", more), devices=8).layout
    assert (layout.cp, layout.cp_kind, layout.cp_balanced) == (4, "ring", False)


CHAT = """
    CUDA_VISIBLE_DEVICES=0,1 deepspeed main.py --offload --dtype bf16 --model_name_or_path meta-llama/Llama-2-7b-hf \\
        --per_device_train_batch_size 4 --max_seq_len 512 --gradient_accumulation_steps 1 --gradient_checkpointing \\
        --zero_stage STAGE --deepspeed --output_dir out
"""


@pytest.mark.parametrize(("stage", "offloaded"), [(2, "optimizer"), (3, "weights")])
def test_programs_that_build_the_configuration_of_deepspeed(stage: int, offloaded: str) -> None:
    launch = read("run.sh", CHAT.replace("STAGE", str(stage)))
    layout: Any = launch.layout
    assert (layout.zero, layout.offload_states, layout.recompute, layout.dp) == (
        stage,
        offloaded,
        "full",
        2,
    )
    assert (launch.global_batch, launch.seq_len, launch.may_be_wrong) == (8, 512, ())


SWIFT = """
    NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Instruct-2507 --max_length 2048 --micro_batch_size 2 \\
        --global_batch_size 16 --expert_model_parallel_size 4 --model_author swift --model_name robot
"""


def test_switches_of_megatron_swift() -> None:
    plain = read("run.sh", SWIFT)
    assert (plain.may_be_wrong, dict(plain.job_fields)["dtype"]) == ((), "bf16")
    narrow = read(
        "run.sh", SWIFT.rstrip() + " --fp8_recipe blockwise --fp8_format e4m3 --mtp_num_layers 1\n"
    )
    assert dict(narrow.job_fields)["dtype"] == "fp8"
    assert "--mtp-num-layers adds modules for further tokens" in narrow.may_be_wrong[0]


@pytest.mark.parametrize(("share", "is_doubt"), [("1", False), ("1.0", False), ("0.4", True)])
def test_a_part_of_optimizer_states_in_host_memory_is_a_doubt(share: str, is_doubt: bool) -> None:
    launch = read(
        "run.sh",
        SWIFT.rstrip() + f" --optimizer_cpu_offload true --optimizer_offload_fraction {share}\n",
    )
    assert launch.layout is not None
    assert launch.layout.offload_states == "optimizer"
    assert (
        any("offloads a part of the optimizer states" in doubt for doubt in launch.may_be_wrong)
        == is_doubt
    )


TITAN = """
    [model]
    name = "llama3"
    flavor = "8B"
    [optimizer]
    name = "AdamW"
    [training]
    local_batch_size = 1
    seq_len = 8192
    dtype = "float32"
    [parallelism]
    data_parallel_shard_degree = 8
"""


def test_weights_of_torchtitan_in_16_bits_have_such_states() -> None:
    wide, narrow = read("run.toml", TITAN), read("run.toml", TITAN.replace("float32", "bfloat16"))
    assert [dict(launch.job_fields).get("optimizer") for launch in (wide, narrow)] == [
        "adam",
        "adam16bit",
    ]


MAXTEXT_SLICES = "model_name: llama2-7b\nper_device_batch_size: 4\nmax_target_length: 4096\n"


@pytest.mark.parametrize(
    ("more", "replicate", "ep"),
    [
        ("", 1, 1),
        ("hardware: tpu\n", 1, 1),
        # Every node of GPUs is a slice, and the open axes are those of base.yml.
        ("hardware: gpu\n", 8, 1),
        ("hardware: gpu_multiprocess\ndcn_data_parallelism: -1\nici_fsdp_parallelism: -1\n", 8, 1),
        ("hardware: gpu\ndcn_data_parallelism: 4\n", 4, 1),
        ("hardware: gpu\ndcn_data_parallelism: 1\ndcn_fsdp_parallelism: -1\n", 1, 1),
        (
            "hardware: gpu\nici_fsdp_parallelism: 1\nici_expert_parallelism: -1\nmodel_name: mixtral-8x7b\n",
            8,
            8,
        ),
        # Degrees within a slice that are all stated: more devices are copies of it.
        ("ici_fsdp_parallelism: 16\n", 4, 1),
        ("ici_fsdp_parallelism: 16\nici_data_parallelism: 2\n", 4, 1),
    ],
)
def test_slices_of_maxtext_are_copies_of_one_another(more: str, replicate: int, ep: int) -> None:
    kept = [
        line for line in MAXTEXT_SLICES.splitlines() if line.partition(":")[0] + ":" not in more
    ]
    launch = parse_launch("\n".join(kept) + "\n" + more, "x.yml", devices=64)
    assert launch.layout is not None
    layout = launch.layout
    assert (layout.dp, layout.zero, layout.replicate, layout.ep) == (64, 3, replicate, ep)
    assert launch.global_batch == 256
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    ("options", "devices", "replicate"),
    [
        ("--tpu-type=v6e-256 --num-slices=2", 512, 2),
        ("--device-type v6e-16", 16, 1),
        ("--device_type=v5p-128 --num_slices=1", 64, 1),
        ("--tpu-type=v4-32", 16, 1),
        ("--tpu-type=v5litepod-256 --num-slices=4", 1024, 4),
        ("--tpu-type=v6e-256 --num-slices=$SLICES", None, 1),
        ("--tpu-type=tpu7x-4x4x8", 256, 1),
    ],
)
def test_kinds_of_tpus_say_how_many_chips_there_are(
    options: str, devices: int | None, replicate: int
) -> None:
    text = (
        f'xpk workload create {options} --command "python3 -m MaxText.train configs/base.yml model_name=llama2-7b '
        'per_device_batch_size=4 max_target_length=4096 ici_fsdp_parallelism=-1"\n'
    )
    launch = parse_launch(text, "x.sh")
    assert launch.devices == devices
    assert launch.global_batch == (None if devices is None else 4 * devices)
    assert launch.layout is None or launch.layout.replicate == replicate


def test_primus_trains_maxtext_on_gpus() -> None:
    text = """
modules:
  pre_trainer:
    framework: maxtext
    config: pre_trainer.yaml
    model: mixtral_8x7B.yaml
    overrides:
      dcn_data_parallelism: -1
      ici_fsdp_parallelism: 1
      ici_data_parallelism: 1
      ici_expert_parallelism: -1
      max_target_length: 4096
      per_device_batch_size: 12
      quantization: nanoo_fp8
"""
    launch = parse_launch(text, "x.yaml", devices=32)
    assert launch.layout is not None
    assert (launch.layout.ep, launch.layout.replicate, launch.layout.zero) == (8, 4, 3)


def test_sizes_of_heads_and_norms_of_nanotron() -> None:
    text = (FILES / "nanotron_3d.yaml").read_text()
    before = parse_launch(text, "x.yaml").model
    sizes = "    hidden_size:"
    assert sizes in text
    wider = text.replace(
        sizes, f"    head_dim: 128\n    use_qk_norm: true\n    attention_dropout: 0.1\n{sizes}", 1
    )
    launch = parse_launch(wider, "x.yaml")
    assert isinstance(before, Transformer)
    assert isinstance(launch.model, Transformer)
    assert (before.head_dim, launch.model.head_dim, launch.model.attention.qk_norm) == (
        64,
        128,
        True,
    )
    assert launch.may_be_wrong == ()


def test_settings_of_llm_foundry_that_change_nothing() -> None:
    text = (FILES / "llm_foundry_hf.yaml").read_text()
    more = "    convert_to: mpt\n    trust_remote_code: true\n    use_train_metrics: true\n"
    launch = parse_launch(
        text.replace("  model:\n", f"  model:\n{more}", 1) + "metadata:\n  run_group: x\n", "x.yaml"
    )
    assert launch.may_be_wrong == parse_launch(text, "x.yaml").may_be_wrong


NEMO_MAMBA = """
trainer:
  num_nodes: 1
  devices: 8
  precision: bf16
model:
  mcore_gpt: true
  tensor_model_parallel_size: 8
  micro_batch_size: 1
  global_batch_size: 8
  encoder_seq_length: 4096
  vocab_size: 256000
  num_layers: 8
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 16
  ngroups_mamba: 8
"""


@pytest.mark.parametrize("mixers", ["MMMMMMMM", "M-M*M-M-"])
def test_mamba_of_nemo_is_that_of_megatron(mixers: str) -> None:
    # Without a pattern all layers are of Mamba.
    pattern = "" if mixers == "MMMMMMMM" else f'  hybrid_override_pattern: "{mixers}"\n'
    launch = parse_launch(NEMO_MAMBA + pattern, "x.yaml")
    words = (
        "--tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 8 --seq-length 4096 --num-layers 8 "
        "--padded-vocab-size 256000 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 "
        f"--mamba-num-groups 8 --hybrid-override-pattern {mixers}"
    )
    megatron = parse_launch(
        f"torchrun --nproc_per_node 8 pretrain_mamba.py --bf16 {words}\n", "x.sh"
    )
    assert isinstance(launch.model, Transformer)
    assert isinstance(megatron.model, Transformer)
    assert launch.model.hybrid is not None
    assert launch.model.hybrid == megatron.model.hybrid
    assert launch.model.hybrid.mixers == mixers
    assert launch.may_be_wrong == ()


def test_a_teacher_of_nemo_is_a_doubt() -> None:
    plain = parse_launch(NEMO_MAMBA, "x.yaml")
    taught = parse_launch(
        NEMO_MAMBA + "  kd_teacher_restore_from_path: /models/teacher.nemo\n", "x.yaml"
    )
    assert taught.model == plain.model
    assert any("kd_teacher_restore_from_path" in doubt for doubt in taught.may_be_wrong)
    assert not any("kd_teacher" in doubt for doubt in plain.may_be_wrong)


@pytest.mark.parametrize(
    "words", ["--model_name=llama3_1_405b_8192 --steps=5", "--model_name llama3_1_405b_8192"]
)
def test_a_benchmark_of_maxtext_is_named_with_where_its_settings_are(words: str) -> None:
    text = f"MODEL=x\npython3 -m benchmarks.benchmark_runner xpk --device_type=v6e-256 --num_slices=2 {words}\n"
    with pytest.raises(
        LaunchFileError, match=r"line 2: benchmark_runner looks llama3_1_405b_8192 up in MaxText's"
    ):
        parse_launch(text, "run.sh")


QWEN3_NEXT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --num-layers 48 --hidden-size 2048 "
    "--ffn-hidden-size 5120 --num-attention-heads 16 --num-query-groups 2 --group-query-attention --kv-channels 256 "
    "--qk-layernorm --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 151936 --seq-length 8192 --attention-dropout 0 "
    "--hidden-dropout 0 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-gate "
    "--moe-shared-expert-intermediate-size 512 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--attention-output-gate --expert-model-parallel-size 8 "
)
DELTA_NETS = (
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 "
    "--linear-num-value-heads 32"
)


@pytest.mark.parametrize(
    "layers",
    [
        f"--experimental-attention-variant gated_delta_net --linear-attention-freq 4 {DELTA_NETS}",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4",
        f"--linear-attention-type gated_delta_net --linear-attention-freq '([1]*3+[0]*1)*12' {DELTA_NETS}",
        f"--spec slime_plugins.models.qwen3_next get_qwen3_next_spec --linear-attention-freq 4 {DELTA_NETS}",
    ],
)
@pytest.mark.parametrize("experts", ["", "--moe-layer-freq 1", "--moe-layer-freq \"'([1]*48)'\""])
def test_gated_delta_nets_of_megatron_are_those_of_qwen3_next(layers: str, experts: str) -> None:
    launch = read("run.sh", f"{QWEN3_NEXT} {layers} {experts}")
    assert launch.model == catalog.model("qwen3-next-80b-a3b")
    assert not launch.may_be_wrong


def test_delta_nets_stand_before_dense_feed_forwards_too() -> None:
    launch = read(
        "run.sh",
        f"{QWEN3_NEXT} --linear-attention-freq 4 {DELTA_NETS} --moe-layer-freq '([0]*2+[1]*46)'",
    )
    assert isinstance(launch.model, Transformer)
    assert launch.model.stack[:5] == ("L-", "L-", "LE", "*E", "LE")


SLIME = """
    #!/bin/bash
    arr=()
    for ((i=0; i<24; i++)); do arr+=($(( i < 1 ? 0 : 1 ))); done
    printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
    MODEL_ARGS=(
       --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --swiglu --vocab-size 32000
       --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 131072
       --use-rotary-position-embeddings --moe-ffn-hidden-size 512 --moe-router-topk 2 --num-experts 8
       --moe-layer-freq "$MOE_LAYER_FREQ"
    )
    ray start --head --num-gpus 8
    ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
       --actor-num-nodes 2 --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} --tensor-model-parallel-size 2 \\
       --global-batch-size 128 --use-dynamic-batch-size --max-tokens-per-gpu 9216 LOSS ${EVAL_ARGS[@]}
"""
"""In the shape of the scripts of slime, which have their own defaults and start no process by
torchrun."""


@pytest.mark.parametrize(
    ("loss", "seq_len", "is_plain"),
    [
        ("--loss-type sft_loss", 131_072, True),
        ("--rollout-max-response-len 8192 --advantage-estimator grpo", 8192, False),
        ("--n-samples-per-prompt 8 --rollout-max-response-len 4096 --fp16", 4096, False),
    ],
)
def test_the_training_half_of_slime(loss: str, seq_len: int, is_plain: bool) -> None:
    launch = read("run.sh", SLIME.replace("LOSS", loss))
    assert isinstance(launch.model, Transformer)
    assert launch.layout is not None
    assert launch.model.stack[:2] == ("*-", "*E")
    assert (launch.devices, launch.layout.tp, launch.layout.dp, launch.layout.zero) == (16, 2, 8, 1)
    assert (launch.global_batch, launch.seq_len) == (128, seq_len)
    assert launch.job_fields["dtype"] == ("fp16" if "--fp16" in loss else "bf16")
    assert "packed into passes of 9216 tokens" in launch.may_be_wrong[0]
    assert (
        any("the training method" in sentence for sentence in launch.may_be_wrong) is not is_plain
    )


@pytest.mark.parametrize(
    "argument",
    [
        "--experimental-attention-variant dsa",
        "--linear-attention-freq 4",
        "--linear-key-head-dim 64",
    ],
)
def test_other_layers_than_attention_are_doubted(argument: str) -> None:
    launch = read("run.sh", f"{QWEN3_NEXT} {argument}")
    assert launch.may_be_wrong[0].startswith("the model may be wrong: ")


MAXTEXT_SIZES = {
    "base_num_decoder_layers": ("layers", 16, 24),
    "base_emb_dim": ("hidden", 2048, 4096),
    "base_num_query_heads": ("heads", 16, 32),
    "base_num_kv_heads": ("kv_heads", 16, 8),
    "base_mlp_dim": ("ffn_hidden", 7168, 9216),
    "head_dim": ("head_dim", 128, 64),
}
"""Keys of MaxText's `base.yml`, the fields that they say, its own sizes and others."""


@pytest.mark.parametrize("left_out", [*MAXTEXT_SIZES, "all", "none"])
def test_sizes_that_a_command_of_maxtext_leaves_out_are_those_of_its_base(left_out: str) -> None:
    stated = {key: sizes[2] for key, sizes in MAXTEXT_SIZES.items() if left_out not in (key, "all")}
    settings = " ".join(f"{key}={size}" for key, size in stated.items())
    launch = read(
        "run.sh",
        f"python3 MaxText/train.py MaxText/configs/base.yml per_device_batch_size=1 {settings}",
    )
    for key, (field, usual, _) in MAXTEXT_SIZES.items():
        assert getattr(launch.model, field) == stated.get(key, usual)
        assert any(f" {field}={usual}" in sentence for sentence in launch.assumed) == (
            key not in stated
        )


@pytest.mark.parametrize(
    ("scale", "sizes"),
    [
        (1, (16, 2048, 16, 7168)),
        (2, (16, 2048, 32, 14336)),
        (4, (16, 4096, 32, 14336)),
        (8, (32, 4096, 32, 14336)),
        (16, (32, 4096, 64, 28672)),
        (64, (64, 8192, 64, 28672)),
    ],
)
def test_a_scale_of_maxtext_doubles_heads_then_the_width_then_layers(
    scale: int, sizes: tuple[int, ...]
) -> None:
    launch = read(
        "run.yml",
        f"base_config: base.yml\nper_device_batch_size: 1\nglobal_parameter_scale: {scale}\n",
    )
    net: Any = launch.model
    assert (net.layers, net.hidden, net.heads, net.ffn_hidden) == sizes
    assert (net.kv_heads, net.head_dim) == (sizes[2], 128)


@pytest.mark.parametrize("scale", [0, 3, 12])
def test_a_scale_of_maxtext_that_is_no_power_of_two_is_refused(scale: int) -> None:
    with pytest.raises(LaunchFileError, match="global_parameter_scale must be"):
        read("run.yml", f"per_device_batch_size: 1\nglobal_parameter_scale: {scale}\n")


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("v6e-256", 256),
        ("v6e-16x16", 256),
        ("v5p-128", 64),
        ("v5p-4x4x4", 64),
        ("tpu7x-128", 128),
        ("tpu7x-4x4x4", 128),
    ],
)
def test_devices_of_a_slice_by_its_name_or_topology(kind: str, devices: int) -> None:
    train = "python3 -m MaxText.train MaxText/configs/base.yml model_name=llama3.1-8b per_device_batch_size=2"
    launch = read(
        "run.sh", f'xpk workload create --tpu-type={kind} --num-slices=2 --command="{train}"'
    )
    assert (launch.devices, launch.global_batch) == (2 * devices, 4 * devices)
    # A chip of the newest generation is two devices of JAX, and one of the catalog's.
    assert any(
        "two devices of JAX" in sentence for sentence in launch.may_be_wrong
    ) == kind.startswith("tpu7x")


@pytest.mark.parametrize(
    ("kind", "devices"),
    [("v6e-256", 256), ("v5e-16", 16), ("v5p-128", 64), ("v4-8", 4), ("tpu7x-128", 128)],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_devices_of_slices_that_settings_compile_for(kind: str, devices: int, slices: int) -> None:
    settings = {
        "model_name": "llama3.1-8b",
        "per_device_batch_size": 2,
        "compile_topology": kind,
        "compile_topology_num_slices": slices,
    }
    command = "python3 -m MaxText.train_compile MaxText/configs/base.yml " + " ".join(
        f"{name}={value}" for name, value in settings.items()
    )
    table = "".join(f"{name}: {value}\n" for name, value in settings.items())
    for launch in (read("run.sh", command), read("run.yml", table)):
        assert (launch.devices, launch.global_batch) == (devices * slices, 2 * devices * slices)
        assert launch.layout is not None
        assert launch.layout.replicate == slices
        assert any(
            "two devices of JAX" in sentence for sentence in launch.may_be_wrong
        ) == kind.startswith("tpu7x")


@pytest.mark.parametrize("stated", ["''", "a3", "v6e-many"])
def test_a_topology_that_states_no_chips_leaves_devices_open(stated: str) -> None:
    text = f"model_name: llama3.1-8b\nper_device_batch_size: 2\ncompile_topology: {stated}\n"
    assert read("run.yml", f"{text}compile_topology_num_slices: -1\n").devices is None


NEOX_LAYERS = """
    {
      "pipe_parallel_size": 0, "model_parallel_size": 1, "num_layers": 12, "hidden_size": 768,
      "num_attention_heads": 12, "seq_length": 2048, "norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": true,
      "attention_config": KINDS, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
      "precision": "bfloat16", "vocab_size": 50304
    }
"""


@pytest.mark.parametrize(
    "kinds", ['[[["global"], 12]]', '[[["flash"], "all"]]', '[[["global", "flash"], 6]]']
)
def test_layers_of_neox_with_full_attention_are_those_of_a_decoder(kinds: str) -> None:
    plain = read("run.yml", NEOX_LAYERS.replace('"attention_config": KINDS,', ""), devices=8)
    listed = read("run.yml", NEOX_LAYERS.replace("KINDS", kinds), devices=8)
    assert shape(listed.model) == shape(plain.model)
    assert listed.may_be_wrong == ()


@pytest.mark.parametrize("kind", ["rwkv", "local", "sparse_fixed", "bigbird", "gmlp"])
def test_layers_of_neox_of_other_kinds_are_a_doubt(kind: str) -> None:
    launch = read(
        "run.yml", NEOX_LAYERS.replace("KINDS", f'[[["global", "{kind}"], 6]]'), devices=8
    )
    assert any(
        kind in doubt and doubt.startswith("the model may be wrong")
        for doubt in launch.may_be_wrong
    )


def test_layers_of_neox_may_be_the_first_mamba() -> None:
    """A mixer stands alone in its layer: 2 x 768 channels, 16 states and steps of rank 48
    (`mamba.py`)."""
    whole = read("run.yml", NEOX_LAYERS.replace("KINDS", '[[["mamba"], 12]]'), devices=8).model
    half = read(
        "run.yml", NEOX_LAYERS.replace("KINDS", '[[["mamba", "flash"], 6]]'), devices=8
    ).model
    assert isinstance(whole, Transformer)
    assert isinstance(half, Transformer)
    inner, state, rank, hidden = 1536, 16, 48, 768
    mixer = hidden * 2 * inner + inner * (4 + 1) + inner * (rank + 2 * state) + rank * inner + inner
    mixer += inner * state + inner + inner * hidden + hidden
    assert parameter_count(whole) == 12 * mixer + 2 * 50_304 * hidden + hidden
    assert half.stack == ("S", "*-") * 6


NANOTRON = """
    model:
      dtype: bfloat16
      model_config:
        IS: true
        hidden_size: 1024
        intermediate_size: 2048
        max_position_embeddings: 4096
        num_attention_heads: 16
        num_hidden_layers: 4
        num_key_value_heads: 2
        tie_word_embeddings: false
        vocab_size: 32000
        MORE
    optimizer: {zero_stage: 0}
    parallelism: {dp: 4, pp: 1, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
    tokens: {batch_accumulation_per_replica: 8, micro_batch_size: 3, sequence_length: 4096}
"""
NANOTRON_EXPERTS = "moe_config: {num_experts: 4, top_k: 1, moe_intermediate_size: 512, EXPERTS}"


@pytest.mark.parametrize(
    ("experts", "layers", "shared"),
    [
        ("layers: [-1]", 4, 0),
        ("layers: [1, 3]", 2, 0),
        ("layers: [0, 1, 3]", 3, 0),
        (
            "layers: [2, 3], enable_shared_expert: true, shared_expert_intermediate_size: 768",
            2,
            768,
        ),
        ("enable_shared_expert: true", 4, 2048),
    ],
)
def test_experts_of_nanotron_by_the_sizes_of_its_own_layer(
    experts: str, layers: int, shared: int
) -> None:
    """`src/nanotron/nn/moe.py`: a router, gated experts, and one behind a gate that every token
    passes."""
    text = NANOTRON.replace("IS", "is_qwen2_config")
    text = text.replace("MORE", NANOTRON_EXPERTS.replace("EXPERTS", experts))
    launch = read("run.yaml", text)
    assert launch.model is not None
    attention = 2 * 1024 * 1024 + 2 * 2 * 64 * 1024
    mixture = 4 * 3 * 512 * 1024 + 4 * 1024 + 3 * shared * 1024 + (1024 if shared else 0)
    dense = (4 - layers) * 3 * 2048 * 1024
    expected = 4 * attention + layers * mixture + dense + 9 * 1024 + 2 * 32_000 * 1024
    assert parameter_count(launch.model) == expected
    assert launch.may_be_wrong == ()


def test_starcoder_of_nanotron_is_no_llama() -> None:
    text = NANOTRON.replace("IS", "is_starcoder2_config").replace("MORE", "multi_query: true")
    model = read("run.yaml", text).model
    assert isinstance(model, Transformer)
    assert (model.kv_heads, model.block.gated_ffn, model.norms.norm) == (1, False, "layer_norm")
    # `Starcoder2Config`: biases everywhere, and dropouts behind attention and feed-forward.
    assert (model.block.bias, model.block.dropout, model.block.activation) == (True, True, "gelu")
