"""Files and commands of fine-tuning front ends: what each says, with the files that it names, and
what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, launch_format, parse_launch, read_launch

FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
template: llama3
dataset: identity
cutoff_len: 4096
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
bf16: true
flash_attn: fa2
"""
AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
adapter: lora
lora_r: 32
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
datasets:
  - path: x
    type: alpaca
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_torch
bf16: auto
flash_attention: true
gradient_checkpointing: true
fsdp:
  - full_shard
  - auto_wrap
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  max_seq_len: 4096
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: True
batch_size: 2
gradient_accumulation_steps: 4
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
dtype: bf16
compile: False
enable_activation_checkpointing: True
"""
TRAINER = json.dumps(
    {
        "model_name_or_path": "meta-llama/Llama-3.1-8B",
        "max_length": 4096,
        "packing": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-5,
        "logging_steps": 10,
    }
)
SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
lora_rank: 32
target_modules: [q_proj, k_proj, v_proj, o_proj]
torch_dtype: bfloat16
max_length: 4096
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
deepspeed: zero3
attn_impl: flash_attn
"""
XTUNER = """
import torch
from peft import LoraConfig

pretrained_model_name_or_path = 'meta-llama/Meta-Llama-3-8B'
max_length = 4096
pack_to_max_length = True
batch_size = 2
accumulative_counts = 2
accumulative_counts *= 2
optim_type = AdamW
model = dict(
    type=SupervisedFinetune,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        torch_dtype=torch.bfloat16),
    lora=dict(type=LoraConfig, r=4 * 8, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']))
optim_wrapper = dict(
    type=AmpOptimWrapper, optimizer=dict(type=optim_type, lr=1e-4), accumulative_counts=accumulative_counts,
    dtype='bfloat16')
train_dataloader = dict(batch_size=batch_size)
"""


class Facts(NamedTuple):
    """What a file says on 8 devices."""

    format: str
    framework: str
    model: str
    layout: dict[str, Any]
    job: dict[str, Any]


FILES = {
    "factory.yaml": FACTORY,
    "axolotl.yml": AXOLOTL,
    "torchtune.yaml": TORCHTUNE,
    "trainer.json": TRAINER,
    "swift.yaml": SWIFT,
    "xtuner.py": XTUNER,
}
LORA = {"frozen": True, "adapter_rank": 32}
FACTS = {
    "factory.yaml": Facts(
        "llama-factory",
        "pytorch",
        "llama3-8b",
        {"recompute": "full"},
        {"dtype": "bf16", "flash_attention": True},
    ),
    "axolotl.yml": Facts(
        "axolotl", "fsdp", "llama3-8b", {"zero": 3, "recompute": "full"}, {"dtype": "bf16"} | LORA
    ),
    "torchtune.yaml": Facts(
        "torchtune",
        "fsdp",
        "llama3-8b",
        {"zero": 3, "recompute": "full"},
        {"dtype": "bf16", "optimizer": "adam16bit", "grad_dtype": "bf16"},
    ),
    "trainer.json": Facts(
        "hf-trainer",
        "fsdp",
        "llama3-8b",
        {"zero": 3, "recompute": "full"},
        {"dtype": "bf16", "optimizer": "adam"},
    ),
    "swift.yaml": Facts(
        "ms-swift",
        "deepspeed",
        "qwen2-7b",
        {"zero": 3, "recompute": "full"},
        {"dtype": "bf16"} | LORA,
    ),
    "xtuner.py": Facts(
        "xtuner", "pytorch", "llama3-8b", {"zero": 0, "recompute": "full"}, {"dtype": "bf16"} | LORA
    ),
}


def read(name: str, *replacements: tuple[str, str], text: str = "", **given: Any) -> Launch:
    """One of `FILES`, or another text under its name, with parts of it replaced."""
    text = text or FILES[name]
    for before, after in replacements:
        assert before in text, before
        text = text.replace(before, after)
    return parse_launch(text, name, **{"devices": 8, **given})


@pytest.mark.parametrize("name", FACTS)
def test_what_a_file_says(name: str) -> None:
    launch, facts = read(name), FACTS[name]
    assert (launch.format, launch.framework) == (facts.format, facts.framework)
    assert launch.model == pm.model(facts.model)
    assert launch.missing == launch.may_be_wrong == launch.ignored == ()
    assert launch.layout is not None
    assert (launch.layout.dp, launch.layout.micro_batch, launch.global_batch) == (8, 2, 64)
    assert {key: launch.layout.value(key) for key in facts.layout} == facts.layout
    assert launch.seq_len == 4096
    assert facts.job.items() <= dict(launch.job_fields).items()
    assert pm.predict(launch.problem("dgx-h100"), layout=launch.layout).step_time_s > 0


@pytest.mark.parametrize("name", FACTS)
def test_devices_are_asked_for(name: str) -> None:
    launch = parse_launch(FILES[name], name)
    assert launch.layout is None
    assert any("give --devices" in sentence for sentence in launch.missing)


DEEPSPEED_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
}
WITH_DEEPSPEED = {
    "factory.yaml": ("bf16: true", "bf16: true\ndeepspeed: configs/ds.json"),
    "axolotl.yml": ("fsdp:\n  - full_shard\n  - auto_wrap", "deepspeed: configs/ds.json"),
    "trainer.json": ('"fsdp": "full_shard auto_wrap"', '"deepspeed": "configs/ds.json"'),
    "swift.yaml": ("deepspeed: zero3", "deepspeed: configs/ds.json"),
}


@pytest.mark.parametrize("name", WITH_DEEPSPEED)
def test_a_file_of_deepspeed_beside_the_file_is_read_with_it(name: str, tmp_path: Path) -> None:
    before, after = WITH_DEEPSPEED[name]
    path = tmp_path / name
    path.write_text(FILES[name].replace(before, after))
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED_FILE))
    launch = read_launch(path, devices=8)
    assert launch.framework == "deepspeed"
    assert launch.layout is not None
    assert (
        launch.layout.zero,
        launch.layout.offload_states,
        launch.layout.overlap.overlap_grad_reduce,
    ) == (
        2,
        "optimizer",
        True,
    )
    assert (launch.global_batch, launch.layout.micro_batch) == (64, 2)
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize("name", WITH_DEEPSPEED)
@pytest.mark.parametrize(
    ("file", "zero", "offload"),
    [
        # DeepSpeed's optimizer for bf16 shards its states
        (
            "examples/deepspeed/ds_z0_config.json",
            1,
            "none",
        ),
        ("examples/deepspeed/ds_z2_config.json", 2, "none"),
        ("examples/deepspeed/ds_z2_offload_config.json", 2, "optimizer"),
        ("deepspeed_configs/zero1.json", 1, "none"),
        ("deepspeed_configs/zero3_bf16.json", 3, "none"),
        ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", 3, "weights"),
        ("zero3_offload", 3, "weights"),
        ("default-zero3", 3, "none"),
    ],
)
def test_the_name_of_a_file_of_deepspeed_that_is_not_there_tells_its_stage(
    name: str, file: str, zero: int, offload: str
) -> None:
    before, after = WITH_DEEPSPEED[name]
    launch = read(name, (before, after.replace("configs/ds.json", file)))
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero, launch.layout.offload_states) == (
        "deepspeed",
        zero,
        offload,
    )
    assert any(f"is taken from the name of {file}" in sentence for sentence in launch.assumed)


@pytest.mark.parametrize("name", WITH_DEEPSPEED)
def test_a_name_that_speaks_of_a_part_in_host_memory_leaves_memory_open(name: str) -> None:
    before, after = WITH_DEEPSPEED[name]
    launch = read(
        name, (before, after.replace("configs/ds.json", "ds_z3_partial_offload_config.json"))
    )
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.offload_states) == (3, "none")
    assert any(
        "which part of the states lies in host memory" in sentence
        for sentence in launch.may_be_wrong
    )


@pytest.mark.parametrize("name", WITH_DEEPSPEED)
def test_a_file_of_deepspeed_whose_name_tells_nothing_is_a_doubt(name: str) -> None:
    launch = read(name, WITH_DEEPSPEED[name])
    assert launch.framework == "deepspeed"
    assert any(
        "configs/ds.json was not found in the same folder" in sentence
        for sentence in launch.may_be_wrong
    )


def test_settings_of_deepspeed_inside_a_file() -> None:
    settings = json.dumps(DEEPSPEED_FILE)
    launch = read("trainer.json", ('"fsdp": "full_shard auto_wrap"', f'"deepspeed": {settings}'))
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero, launch.job_fields["dtype"]) == (
        "deepspeed",
        2,
        "bf16",
    )


ADAPTERS = [
    (
        "factory.yaml",
        "finetuning_type: full",
        "finetuning_type: lora\nlora_rank: 16\nlora_target: all",
        16,
    ),
    ("factory.yaml", "finetuning_type: full", "lora_target: q_proj,k_proj,v_proj,o_proj", 8),
    ("axolotl.yml", "lora_r: 32", "lora_r: 8", 8),
    ("swift.yaml", "lora_rank: 32", "lora_rank: 64", 64),
    ("swift.yaml", "train_type: lora", "tuner_type: lora", 32),
    ("torchtune.yaml", "llama3_1.llama3_1_8b", "llama3_1.lora_llama3_1_8b\n  lora_rank: 64", 64),
    ("trainer.json", '"bf16": true', '"bf16": true, "use_peft": true, "lora_r": 16', 16),
    ("xtuner.py", "r=4 * 8", "r=64", 64),
]


@pytest.mark.parametrize(("name", "before", "after", "rank"), ADAPTERS)
def test_adapters(name: str, before: str, after: str, rank: int) -> None:
    launch = read(name, (before, after))
    assert (launch.job_fields["frozen"], launch.job_fields["adapter_rank"]) == (True, rank)
    assert launch.may_be_wrong == ()


DROPOUT = [
    # a file, what is replaced, and what stands there with a dropout; whether there is one where a
    # file says nothing
    (
        "factory.yaml",
        "finetuning_type: full",
        "finetuning_type: lora\nlora_rank: 16",
        "\nlora_dropout: {}",
        False,
    ),
    ("axolotl.yml", "lora_r: 32", "lora_r: 32", "\nlora_dropout: {}", False),
    ("swift.yaml", "lora_rank: 32", "lora_rank: 32", "\nlora_dropout: {}", True),
    (
        "torchtune.yaml",
        "llama3_1.llama3_1_8b",
        "llama3_1.lora_llama3_1_8b\n  lora_rank: 64",
        "\n  lora_dropout: {}",
        False,
    ),
    (
        "trainer.json",
        '"bf16": true',
        '"bf16": true, "use_peft": true, "lora_r": 16',
        ', "lora_dropout": {}',
        None,
    ),
    ("xtuner.py", "r=4 * 8", "r=32", ", lora_dropout={}", False),
]


@pytest.mark.parametrize(("name", "before", "after", "setting", "default"), DROPOUT)
def test_adapters_drop_some_of_their_input_where_a_file_says_so(
    name: str, before: str, after: str, setting: str, default: bool | None
) -> None:
    assert read(name, (before, after)).job_fields.get("adapter_dropout") is default
    for dropout, drops in (("0.1", True), ("0.0", False), ("0", False)):
        launch = read(name, (before, after + setting.format(dropout)))
        assert launch.job_fields["adapter_dropout"] is drops
        assert launch.may_be_wrong == ()


WHOLE = [
    ("factory.yaml", "", ""),
    ("axolotl.yml", "adapter: lora", "adapter:"),
    ("swift.yaml", "train_type: lora", "train_type: full"),
    ("torchtune.yaml", "", ""),
    ("trainer.json", '"bf16": true', '"bf16": true, "use_peft": false, "lora_r": 16'),
]


@pytest.mark.parametrize(("name", "before", "after"), WHOLE)
def test_every_weight_is_trained(name: str, before: str, after: str) -> None:
    assert "frozen" not in read(name, (before, after)).job_fields


ALL = ("q_proj", "k_proj", "v_proj", "linear_proj", "gate_proj", "up_proj", "linear_fc2")
QUANTIZED = [
    ("factory.yaml", "finetuning_type: full", "finetuning_type: lora\nquantization_bit: 4", 4),
    ("axolotl.yml", "adapter: lora", "adapter: qlora\nload_in_4bit: true", 4),
    ("axolotl.yml", "adapter: lora", "adapter: lora\nload_in_8bit: true", 8),
    ("swift.yaml", "train_type: lora", "train_type: lora\nquant_bits: 4", 4),
    ("torchtune.yaml", "llama3_1.llama3_1_8b", "llama3_1.qlora_llama3_1_8b", 4),
    ("trainer.json", '"bf16": true', '"bf16": true, "lora_r": 16, "load_in_4bit": true', 4),
    (
        "xtuner.py",
        "torch_dtype=torch.bfloat16",
        "quantization_config=dict(type=Bits, load_in_4bit=True)",
        4,
    ),
]


@pytest.mark.parametrize(("name", "before", "after", "bits"), QUANTIZED)
def test_frozen_weights_in_few_bits(name: str, before: str, after: str, bits: int) -> None:
    launch = read(name, (before, after))
    assert launch.job_fields["base_weights"] == {4: "nf4", 8: "int8"}[bits]
    assert launch.may_be_wrong == ()
    assert launch.layout is not None
    narrow, wide = (
        pm.predict(one.problem("dgx-h100"), layout=one.layout)
        for one in (launch, replace(launch, job_fields={**launch.job_fields, "base_weights": ""}))
    )
    assert narrow.memory.weights < wide.memory.weights


def test_frozen_weights_in_bits_that_are_not_counted_are_a_doubt() -> None:
    launch = read(
        "factory.yaml", ("finetuning_type: full", "finetuning_type: lora\nquantization_bit: 3")
    )
    assert launch.may_be_wrong == (
        "memory may be wrong: the file keeps frozen weights in 3 bits, but the prediction counts 16",
    )
    launch = read("trainer.json", ('"bf16": true', '"bf16": true, "load_in_4bit": true'))
    assert "weights in 4 bits are frozen, but the file names no adapters" in launch.may_be_wrong[0]


MODULES = [
    ("axolotl.yml", "[q_proj, k_proj, v_proj, o_proj]", "[q_proj, v_proj]", ("q_proj", "v_proj")),
    (
        "axolotl.yml",
        "lora_target_modules: [q_proj, k_proj, v_proj, o_proj]",
        "lora_target_linear: true",
        ALL,
    ),
    (
        "factory.yaml",
        "finetuning_type: full",
        "finetuning_type: lora\nlora_target: q_proj,v_proj",
        ("q_proj", "v_proj"),
    ),
    ("factory.yaml", "finetuning_type: full", "finetuning_type: lora", ALL),
    # peft takes a text as a regular expression for whole names
    *(
        ("axolotl.yml", "[q_proj, k_proj, v_proj, o_proj]", f"'{pattern}'", modules)
        for pattern, modules in (
            (
                r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
                ALL,
            ),
            (r"model\.layers\.\d+\.self_attn\.(q|v)_proj", ("q_proj", "v_proj")),
            (r".*\.(up|down)_proj", ("up_proj", "linear_fc2")),
            (r"^(?!.*visual).*(o_proj)$", ("linear_proj",)),
        )
    ),
    ("swift.yaml", "[q_proj, k_proj, v_proj, o_proj]", "all-linear", ALL),
    (
        "torchtune.yaml",
        "llama3_1.llama3_1_8b",
        "x.lora_llama3_1_8b\n  lora_attn_modules: [q_proj, output_proj]\n  apply_lora_to_mlp: True",
        ("q_proj", "linear_proj", "gate_proj", "up_proj", "linear_fc2"),
    ),
]


@pytest.mark.parametrize(("name", "before", "after", "modules"), MODULES)
def test_products_that_have_adapters(
    name: str, before: str, after: str, modules: tuple[str, ...]
) -> None:
    launch = read(name, (before, after))
    assert launch.job_fields["adapter_modules"] == modules
    assert launch.may_be_wrong == ()


@pytest.mark.parametrize(
    "targets",
    [
        "[q_proj, in_proj]",
        # a pattern that takes exponential time, and one that is none
        r"'(([a-z_.0-9]+)+)+Q'",
        "'model.layers.*.self_attn.(q_proj'",
    ],
)
def test_adapters_on_other_products_are_a_doubt(targets: str) -> None:
    launch = read("axolotl.yml", ("[q_proj, k_proj, v_proj, o_proj]", targets))
    assert len(launch.may_be_wrong) == 1
    assert launch.may_be_wrong[0].startswith("the training method may be wrong: adapters on ")


@pytest.mark.parametrize(
    ("checkpoint", "base_weights"),
    [
        ("Meta-Llama-3-8B-Instruct", None),
        ("Meta-Llama-3-8B-Instruct-GPTQ", "nf4"),
        ("Meta-Llama-3-8B-Instruct-AWQ", "nf4"),
        ("llama-3-8b-Instruct-bnb-4bit", "nf4"),
        ("Meta-Llama-3-8B-Instruct-int8", "int8"),
    ],
)
def test_checkpoints_that_are_quantized_by_their_name(
    checkpoint: str, base_weights: str | None
) -> None:
    named = ("meta-llama/Meta-Llama-3-8B-Instruct", f"someone/{checkpoint}")
    launch = read("factory.yaml", ("finetuning_type: full", "finetuning_type: lora"), named)
    assert launch.job_fields.get("base_weights") == base_weights
    assert launch.model == pm.model("llama3-8b")


SHARDED = [
    ("trainer.json", '"full_shard auto_wrap"', '"shard_grad_op auto_wrap"', 2, "none"),
    ("trainer.json", '"full_shard auto_wrap"', '["full_shard", "offload"]', 3, "weights"),
    ("trainer.json", '"full_shard auto_wrap"', "true", 3, "none"),
    ("trainer.json", '"full_shard auto_wrap"', '""', 0, "none"),
    ("axolotl.yml", "  - full_shard\n", "", 3, "none"),
    (
        "axolotl.yml",
        "fsdp:\n  - full_shard\n  - auto_wrap",
        "fsdp_version: 2\nfsdp_config:\n  offload_params: true",
        3,
        "weights",
    ),
    (
        "axolotl.yml",
        "fsdp:\n  - full_shard\n  - auto_wrap",
        "fsdp_config:\n  fsdp_version: 2\n  reshard_after_forward: false",
        2,
        "none",
    ),
    ("torchtune.yaml", "dtype: bf16", "dtype: bf16\nfsdp_cpu_offload: true", 3, "weights"),
]


@pytest.mark.parametrize(("name", "before", "after", "zero", "offload"), SHARDED)
def test_what_fsdp_shards(name: str, before: str, after: str, zero: int, offload: str) -> None:
    launch = read(name, (before, after))
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.offload_states) == (zero, offload)
    assert launch.framework == ("fsdp" if zero else "pytorch")


OPTIMIZERS = [
    ("trainer.json", "adamw_torch_fused", "paged_adamw_8bit", "adam8bit"),
    ("trainer.json", "adamw_torch_fused", "adafactor", "adafactor"),
    ("trainer.json", "adamw_torch_fused", "adamw_bnb_8bit", "adam8bit"),
    ("axolotl.yml", "adamw_torch", "muon", "muon"),
    ("torchtune.yaml", "torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", "adam8bit"),
    ("xtuner.py", "optim_type = AdamW", "optim_type = SGD", "sgd"),
]


@pytest.mark.parametrize(("name", "before", "after", "optimizer"), OPTIMIZERS)
def test_optimizers(name: str, before: str, after: str, optimizer: str) -> None:
    assert read(name, (before, after)).job_fields["optimizer"] == optimizer


def test_an_optimizer_that_nobody_knows_is_a_doubt() -> None:
    launch = read("trainer.json", ("adamw_torch_fused", "galore_adamw"))
    assert any("galore_adamw" in sentence for sentence in launch.may_be_wrong)


@pytest.mark.parametrize(
    ("builder", "model"),
    [
        ("torchtune.models.llama3_1.llama3_1_8b", "llama3.1-8b"),
        ("torchtune.models.llama3_2.lora_llama3_2_1b", "llama3.2-1b"),
        ("torchtune.models.qwen2_5.qwen2_5_0_5b", "qwen2.5-0.5b"),
        ("torchtune.models.qwen2_5.qlora_qwen2_5_7b_instruct", "qwen2.5-7b"),
        ("torchtune.models.qwen2.qwen2_1_5b", "qwen2-1.5b"),
        ("torchtune.models.llama2.llama2_70b", "llama2-70b"),
    ],
)
def test_builders_of_torchtune_name_models_of_the_catalog(builder: str, model: str) -> None:
    launch = parse_launch(
        TORCHTUNE.replace("torchtune.models.llama3_1.llama3_1_8b", builder),
        "recipe.yaml",
        devices=8,
    )
    assert launch.model == pm.model(model)


FLAGS = (
    "--model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 --bf16 True --gradient_checkpointing True "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --packing True --learning_rate 1e-5"
)
COMMANDS = [
    (f"torchrun --nproc_per_node 8 train.py {FLAGS}", 8),
    (f"torchrun --nnodes=2 --nproc_per_node=4 train.py \\\n  {FLAGS}", 8),
    (f"deepspeed --num_gpus 8 train.py {FLAGS}", 8),
    (f"deepspeed --include localhost:0,1,2,3 train.py {FLAGS}", 4),
    (f"accelerate launch --num_processes 16 train.py {FLAGS}", 16),
    (f"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch train.py {FLAGS}", 4),
    (f"N=4\nARGS=(\n  {FLAGS}\n)\ntorchrun --nproc_per_node $N train.py ${{ARGS[@]}}", 4),
    (
        f"NPROC_PER_NODE=4 swift sft --train_type full {FLAGS.replace('_name_or_path', '').replace('seq_', '')}",
        4,
    ),
    (
        f"export NPROC_PER_NODE=4\nswift sft --train_type full --model Qwen/Qwen2.5-7B {FLAGS}".replace(
            "seq_", ""
        ),
        4,
    ),
    (
        f"FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train {FLAGS}".replace(
            "max_seq_length", "finetuning_type full --cutoff_len"
        ),
        16,
    ),
    (
        f"CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train {FLAGS}".replace(
            "max_seq_length", "finetuning_type full --cutoff_len"
        ),
        2,
    ),
]


@pytest.mark.parametrize(("script", "devices"), COMMANDS)
def test_flags_of_a_command_and_the_processes_of_its_launcher(script: str, devices: int) -> None:
    launch = parse_launch(f"#!/bin/bash\n{script}\n", "run.sh")
    assert launch.layout is not None
    assert (launch.devices, launch.layout.dp, launch.layout.micro_batch) == (devices, devices, 2)
    assert (launch.global_batch, launch.seq_len) == (8 * devices, 2048)
    assert launch.model == pm.model("qwen2.5-7b")
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.layout.recompute == "full"
    assert "frozen" not in launch.job_fields


NAMING = {
    "factory.yaml": "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train conf/factory.yaml {}",
    "axolotl.yml": "accelerate launch --num_processes 8 -m axolotl.cli.train axolotl.yml",
    "torchtune.yaml": "tune run --nproc_per_node 8 full_finetune_distributed --config ./torchtune.yaml {}",
    "xtuner.py": "NPROC_PER_NODE=8 xtuner train xtuner.py",
    "swift.yaml": "NPROC_PER_NODE=8 swift sft swift.yaml",
    "trainer.json": "torchrun --nproc_per_node 8 train.py trainer.json",
}


@pytest.mark.parametrize("name", NAMING)
def test_a_command_is_read_with_the_file_that_it_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / "run.sh").write_text(NAMING[name].format(""))
    launch, alone = read_launch(tmp_path / "run.sh"), read(name)
    assert (launch.devices, launch.format, launch.framework) == (8, alone.format, alone.framework)
    assert (launch.layout, launch.model, launch.global_batch) == (
        alone.layout,
        alone.model,
        alone.global_batch,
    )
    assert launch.job_fields == alone.job_fields


@pytest.mark.parametrize(
    ("name", "setting"),
    [("factory.yaml", "per_device_train_batch_size=1"), ("torchtune.yaml", "batch_size=1")],
)
def test_settings_behind_the_file_win(name: str, setting: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / "run.sh").write_text(NAMING[name].format(setting))
    launch = read_launch(tmp_path / "run.sh")
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.global_batch) == (1, 32)


def test_the_file_of_accelerate_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nmixed_precision: 'no'\n"
        "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
    )
    (tmp_path / "run.sh").write_text(
        f"accelerate launch --config_file conf/fsdp.yaml train.py {FLAGS}"
    )
    launch = read_launch(tmp_path / "run.sh")
    assert launch.layout is not None
    assert (launch.framework, launch.devices, launch.layout.zero) == ("fsdp", 16, 2)
    assert (launch.global_batch, launch.job_fields["dtype"]) == (128, "bf16")


def test_files_of_other_programs_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("[1, 2]")
    (tmp_path / "run.sh").write_text(
        f"python prepare.py data.json\ntorchrun --nproc_per_node 8 train.py {FLAGS}\n"
    )
    assert read_launch(tmp_path / "run.sh").global_batch == 64


@pytest.mark.parametrize("number", ["gpu", "auto", "${GPUS}"])
def test_processes_that_a_launcher_counts_itself_are_asked_for(number: str) -> None:
    script = f"torchrun --nproc_per_node {number} train.py {FLAGS}"
    assert any("give --devices" in sentence for sentence in parse_launch(script, "run.sh").missing)
    assert parse_launch(script, "run.sh", devices=8).global_batch == 64


def test_swift_accumulates_to_16_sequences() -> None:
    script = (
        "NPROC_PER_NODE={} swift sft --model Qwen/Qwen2.5-7B --train_type full --max_length 2048\n"
    )
    batches = [parse_launch(script.format(n), "run.sh").global_batch for n in (1, 2, 4, 16, 32)]
    assert batches == [16, 16, 16, 16, 32]


def test_nothing_of_a_python_configuration_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    text = XTUNER + f"\nopen({str(mark)!r}, 'w')\nbatch = __import__('os').system('touch {mark}')\n"
    launch = read("xtuner.py", text=text)
    assert launch.global_batch == 64
    assert not mark.exists()


BROKEN = [
    (
        "factory.yaml",
        "per_device_train_batch_size: 2",
        "per_device_train_batch_size: two",
        "per_device_train_batch_size",
    ),
    ("factory.yaml", "flash_attn: fa2", "flash_attn: fa9", "flash_attn must be one of"),
    ("axolotl.yml", "micro_batch_size: 2", "micro_batch_size: 0", "micro_batch_size"),
    ("axolotl.yml", "lora_r: 32", "lora_r: many", "lora_r"),
    ("torchtune.yaml", "dtype: bf16", "dtype: bf17", "dtype must be one of"),
    (
        "trainer.json",
        '"optim": "adamw_torch_fused"',
        '"optim": 3',
        "optim must be the name of an optimizer",
    ),
    ("trainer.json", '"full_shard auto_wrap"', '"full_shard auto_wrap", "fsdp_version": "x"', ""),
    ("swift.yaml", "lora_rank: 32", "lora_rank: -1", "lora_rank"),
    ("xtuner.py", "batch_size = 2", "batch_size = len(files)", "which the file does not define"),
    ("xtuner.py", "max_length = 4096", "max_length = ", "not valid Python"),
]


@pytest.mark.parametrize(("name", "before", "after", "message"), BROKEN)
def test_bad_values_are_refused_in_one_line(
    name: str,
    before: str,
    after: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not message:
        read(name, (before, after))
        return
    path = tmp_path / name
    path.write_text(FILES[name].replace(before, after, 1))
    assert main(["predict", "--from", str(path), "--devices", "8", "--cluster", "dgx-h100"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", sorted({facts.format for facts in FACTS.values()}))
def test_files_of_front_ends_are_not_written(name: str) -> None:
    with pytest.raises(LaunchFileError, match="but does not write them"):
        launch_format(name)


MEGATRON_SWIFT = """
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
NPROC_PER_NODE=8 \\
megatron sft \\
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \\
    --load_safetensors true \\
    --pipeline_model_parallel_size 2 \\
    --tensor_model_parallel_size 4 \\
    --expert_model_parallel_size 4 \\
    --moe_grouped_gemm true \\
    --micro_batch_size 1 \\
    --global_batch_size 4 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --max_length 8192 \\
    --packing true \\
    --sequence_parallel true
"""


@pytest.mark.parametrize(
    ("before", "after", "adapters"),
    [
        ("", "", {}),
        ("--model Qwen/Qwen3-30B-A3B-Instruct-2507", "--load Qwen3-30B-A3B-mcore", {}),
        (
            "--packing true",
            "--tuner_type lora --lora_rank 16 --target_modules linear_qkv linear_proj",
            {"frozen": True, "adapter_rank": 16},
        ),
    ],
)
def test_megatron_swift(before: str, after: str, adapters: dict[str, Any]) -> None:
    launch = parse_launch(MEGATRON_SWIFT.replace(before, after), "run.sh")
    assert launch.model == pm.model("qwen3-30b-a3b")
    assert launch.layout is not None
    layout = launch.layout
    assert (layout.tp, layout.pp, layout.ep, layout.dp, layout.zero) == (4, 2, 4, 1, 1)
    assert (layout.sequence_parallel, layout.recompute) == (True, "full")
    assert (launch.framework, launch.seq_len, launch.global_batch) == ("megatron-core", 8192, 4)
    assert {name: launch.job_fields.get(name) for name in adapters} == adapters
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.may_be_wrong == ()


CHAT = (
    "deepspeed --num_gpus 8 main.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 "
    "--max_seq_len 512 --gradient_accumulation_steps 1 --gradient_checkpointing --zero_stage 3 --deepspeed MORE\n"
)


@pytest.mark.parametrize(
    ("more", "dtype", "rank"),
    [
        ("", "fp16", None),
        ("--lora_dim 0", "fp16", None),
        ("--dtype bf16", "bf16", None),
        ("--lora_dim 128 --lora_module_name layers. --only_optimize_lora", "fp16", 128),
        ("--lora_dim 64 --lora_module_name decoder.layers. --offload", "fp16", 64),
    ],
)
def test_deepspeed_chat_runs_in_16_bits_and_may_have_adapters(
    more: str, dtype: str, rank: int | None
) -> None:
    launch = parse_launch(CHAT.replace("MORE", more), "run.sh")
    assert launch.layout is not None
    assert (launch.devices, launch.global_batch, launch.layout.zero) == (8, 32, 3)
    assert launch.job_fields["dtype"] == dtype
    assert launch.job_fields.get("adapter_rank") == rank
    assert launch.job_fields.get("frozen", False) == (rank is not None)
    # Embeddings stay trained unless a flag freezes them, which the prediction cannot say.
    trained_beside = rank is not None and "only_optimize" not in more
    assert any("embeddings and norms" in doubt for doubt in launch.may_be_wrong) == trained_beside


FURTHER_MODELS = {
    "a loss of torchtune": (
        TORCHTUNE + "loss:\n  _component_: torchtune.rlhf.loss.DPOLoss\n",
        "x.yaml",
    ),
    "a teacher": (
        TORCHTUNE + "teacher_model:\n  _component_: torchtune.models.llama3.llama3_8b\n",
        "x.yaml",
    ),
    "a stage of LLaMA-Factory": (FACTORY.replace("stage: sft", "stage: dpo"), "x.yaml"),
    "a reward model of LLaMA-Factory": (FACTORY.replace("stage: sft", "stage: rm"), "x.yaml"),
    "axolotl": (AXOLOTL + "rl: grpo\n", "x.yaml"),
    "trl's own argument": (
        "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nbeta: 0.1\n",
        "x.yaml",
    ),
    "the name of a program": (
        "accelerate launch --num_processes 8 dpo.py --model_name_or_path gpt2 --per_device_train_batch_size 2\n",
        "x.sh",
    ),
    "a class of XTuner": (
        "model = dict(type=ORPO, llm=dict(pretrained_model_name_or_path='meta-llama/Llama-2-7b-hf'), beta=0.1)\n"
        "batch_size = 1\nmax_length = 2048\n",
        "x.py",
    ),
}


@pytest.mark.parametrize("case", FURTHER_MODELS)
def test_training_of_further_models_or_passes_is_an_open_fact(case: str) -> None:
    text, name = FURTHER_MODELS[case]
    launch = parse_launch(text, name, devices=8)
    doubts = [
        doubt
        for doubt in launch.may_be_wrong
        if doubt.startswith("the training method may be wrong")
    ]
    assert any("further model" in doubt for doubt in doubts), launch.may_be_wrong


@pytest.mark.parametrize("text", [TORCHTUNE, FACTORY, AXOLOTL])
def test_training_on_plain_text_is_not(text: str) -> None:
    assert not any(
        "further model" in doubt for doubt in parse_launch(text, "x.yaml", devices=8).may_be_wrong
    )


def test_torchtune_does_not_take_reinforcement_for_fine_tuning() -> None:
    with pytest.raises(LaunchFileError, match="torchtune's recipe of reinforcement"):
        parse_launch(TORCHTUNE.replace("model:", "policy_model:"), "x.yaml")


@pytest.mark.parametrize(
    ("more", "devices", "replicate", "ep"),
    [
        ("dp_shard_size: 4\n", 4, 1, 1),
        ("dp_shard_size: 4\ndp_replicate_size: 2\n", 8, 2, 1),
        ("dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n", 16, 2, 1),
        ("dp_shard_size: 2\ncontext_parallel_size: 2\n", 4, 1, 1),
        ("base_model: Qwen/Qwen3-30B-A3B\ndp_shard_size: 2\nexpert_parallel_size: 2\n", 4, 1, 2),
    ],
)
def test_degrees_of_a_mesh_say_how_many_devices_there_are(
    more: str, devices: int, replicate: int, ep: int
) -> None:
    text = AXOLOTL
    for line in more.splitlines():
        # A key that stands in the file already is replaced.
        name = line.partition(":")[0]
        text = "".join(
            old for old in text.splitlines(keepends=True) if not old.startswith(f"{name}:")
        )
    launch = parse_launch(text + more, "x.yaml")
    assert launch.layout is not None
    assert (launch.devices, launch.layout.replicate, launch.layout.ep) == (devices, replicate, ep)
    assert launch.missing == ()


def test_a_tower_and_its_language_model_in_one_folder() -> None:
    text = (
        "path = 'OpenGVLab/InternVL2-2B'\nmodel = dict(type=InternVL_V1_5, model_path=path, quantization_llm=True, "
        "llm_lora=dict(type=LoraConfig, r=16))\nbatch_size = 4\nmax_length = 8192\n"
    )
    launch = parse_launch(text, "x.py", devices=8)
    assert launch.job_fields["base_weights"] == "nf4"
    assert any("InternVL2-2B" in sentence for sentence in launch.missing)
    assert any("vision tower" in doubt for doubt in launch.may_be_wrong)


ACCELERATE_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    (
        "--multi_gpu --mixed_precision bf16",
        {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
    ),
    ("--mixed_precision=fp16", {"mixed_precision": "fp16"}),
    (
        "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --mixed_precision bf16",
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "bf16",
            "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu"},
        },
    ),
    (
        "--use-fsdp --fsdp-sharding-strategy SHARD_GRAD_OP --fsdp_activation_checkpointing true --mixed-precision bf16",
        {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {
                "fsdp_sharding_strategy": "SHARD_GRAD_OP",
                "fsdp_activation_checkpointing": True,
            },
        },
    ),
    (
        "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward true --mixed_precision bf16 "
        "--parallelism_config_dp_replicate_size 2",
        {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
            "parallelism_config": {"parallelism_config_dp_replicate_size": 2},
        },
    ),
]
"""Flags of `accelerate launch`, and the file that says the same."""
WITHOUT_PRECISION = "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 2 --max_length 2048"


@pytest.mark.parametrize("program", ["train.py", "-m trainer.sft"])
@pytest.mark.parametrize(("flags", "file"), ACCELERATE_SETTINGS)
def test_flags_of_accelerate_mean_what_its_file_says(
    flags: str, file: dict[str, Any], program: str, tmp_path: Path
) -> None:
    """Also behind a file that says otherwise, and never those behind the program, which are the
    program's own."""
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump({"num_processes": 8, **file}))
    (tmp_path / "other.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp8\n"
    )
    scripts = [
        f"accelerate launch --config_file acc.yaml {program} {WITHOUT_PRECISION}",
        f"accelerate launch --num_processes 8 {flags} {program} {WITHOUT_PRECISION}",
    ]
    if "distributed_type" in file:
        scripts.append(
            f"accelerate launch --config_file other.yaml {flags} {program} {WITHOUT_PRECISION}"
        )
    launches = [parse_launch(script, str(tmp_path / "run.sh")) for script in scripts]
    told = [
        (launch.framework, launch.devices, launch.layout, launch.job_fields) for launch in launches
    ]
    assert told[1:] == told[:1] * (len(scripts) - 1)
    assert not any(launch.may_be_wrong or launch.ignored for launch in launches)
    assert launches[0].job_fields["dtype"] == file["mixed_precision"]


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("", "bf16"), ("--bf16", "bf16"), ("--fp16", "fp16"), ("--torch_dtype float16", "fp16")],
)
@pytest.mark.parametrize(
    "launcher", ["--mixed_precision bf16", "--use_deepspeed --deepspeed_config_file zero2.json"]
)
def test_the_precision_of_accelerate_is_that_of_a_program_that_says_none(
    flag: str, dtype: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "zero2.json").write_text(
        '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}'
    )
    script = f"accelerate launch --num_processes 8 --mixed_precision bf16 {launcher} train.py {WITHOUT_PRECISION} {flag}"
    launch = parse_launch(script, str(tmp_path / "run.sh"))
    assert launch.job_fields["dtype"] == dtype
    assert launch.layout is not None
    assert launch.layout.zero == (2 if "zero2" in launcher else 0)


@pytest.mark.parametrize(
    ("name", "framework", "zero"),
    [
        ("configs/deepspeed_zero3.yaml", "deepspeed", 3),
        ("zero2.yml", "deepspeed", 2),
        ("fsdp.yaml", "fsdp", 3),
        ("default.yaml", "pytorch", 0),
    ],
)
def test_a_file_of_accelerate_that_is_not_there_is_doubted(
    name: str, framework: str, zero: int
) -> None:
    launch = parse_launch(
        f"accelerate launch --config_file {name} --num_processes 8 train.py {FLAGS}", "run.sh"
    )
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero) == (framework, zero)
    assert any(name in sentence and "was not found" in sentence for sentence in launch.may_be_wrong)


@pytest.mark.parametrize(
    "name", ["stage3_no_offloading.conf", "zero3_nooffload.json", "ds_z3_without-offload.json"]
)
def test_names_of_files_that_offload_nothing(name: str) -> None:
    launch = parse_launch(f"deepspeed --num_gpus 8 train.py --deepspeed {name} {FLAGS}", "run.sh")
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.offload_states) == (3, "none")


@pytest.mark.parametrize(
    "launcher", ["accelerate launch --num_processes 8", "deepspeed", "torchrun --nproc_per_node 8"]
)
def test_settings_in_a_file_that_is_not_there_are_asked_for(launcher: str) -> None:
    with pytest.raises(
        LaunchFileError,
        match=r"settings of recipes/sft.yaml, which is not in the same folder; put it there",
    ):
        parse_launch(f"{launcher} src/sft.py --config recipes/sft.yaml\n", "run.sh")


@pytest.mark.parametrize(
    ("flags", "rank"),
    [
        ("--lora_enable True --lora_r 128 --lora_alpha 256", 128),
        ("--lora_enable True", 64),
        ("--use_lora True --lora_r 8", 8),
        ("--use_peft --lora_r 32", 32),
        ("--use_peft", 16),
        ("--lora_enable False --lora_r 128", 0),
        ("--use_lora False --lora_r 8", 0),
        ("--use_peft False --lora_r 8", 0),
    ],
)
def test_switches_of_adapters_by_any_name(flags: str, rank: int) -> None:
    launch = parse_launch(f"torchrun --nproc_per_node 8 train.py {FLAGS} {flags}", "run.sh")
    assert launch.job_fields.get("adapter_rank", 0) == rank
    assert launch.job_fields.get("frozen", False) == (rank > 0)
    assert not launch.may_be_wrong


@pytest.mark.parametrize("hosts", ["localhost:0,1,2,3", "a:0,1@b:0,1"])
@pytest.mark.parametrize("sign", [" ", "="])
def test_devices_that_deepspeed_includes(sign: str, hosts: str) -> None:
    assert parse_launch(f"deepspeed --include{sign}{hosts} train.py {FLAGS}", "run.sh").devices == 4


@pytest.mark.parametrize(
    ("name", "model", "adapter_rank"),
    [
        ("llama3_1/70B_lora", "llama3-70b", 8),
        ("llama3/8B_full_single_device", "llama3-8b", None),
        ("gemma2/9B_qlora_single_device", "gemma-2-9b", 8),
        ("qwen2_5/0.5B_full", "qwen2-0.5b", None),
        ("phi3/mini_lora", "phi-3-mini", 8),
    ],
)
def test_the_name_of_torchtunes_own_configuration_says_what_is_trained(
    name: str, model: str, adapter_rank: int | None
) -> None:
    """The file itself, which comes with torchtune, is seldom beside the script."""
    launch = parse_launch(
        f"tune run --nproc_per_node 8 recipe --config {name} batch_size=2 gradient_accumulation_steps=4\n",
        "run.sh",
    )
    assert launch.model is not None
    assert launch.model.name == model
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.job_fields.get("adapter_rank") == adapter_rank
    assert launch.global_batch == 64
    assert any("was not found in the script's folder" in doubt for doubt in launch.may_be_wrong)
