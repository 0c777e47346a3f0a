"""LLaMA-Factory's second generation of keys, whose settings are those of plugins."""

import json
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.ingest.launch import parse_launch, read_launch

FILE = """
model: Qwen/Qwen3-4B
model_class: llm
template: qwen3_nothink
kernel_config:
  name: auto
  include_kernels: auto
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: data/sft.yaml
output_dir: ./outputs
micro_batch_size: 2
global_batch_size: 64
cutoff_len: 4096
learning_rate: 1.0e-4
max_steps: 10
"""
PLUGINS = [
    # bf16, recomputed layers and fully sharded states are defaults of its code
    ("", {"zero": 3, "recompute": "full", "micro_batch": 2}, {"dtype": "bf16"}, False),
    ("enable_activation_checkpointing: false", {"recompute": "none"}, {}, False),
    ("bf16: false", {}, {"dtype": "fp32"}, False),
    (
        "peft_config: {name: lora, r: 16, target_modules: all}",
        {},
        {"adapter_rank": 16, "frozen": True},
        False,
    ),
    (
        "peft_config: {name: lora, r: 16}\nquant_config: {name: bnb, quantization_bit: 4}",
        {},
        {"base_weights": "nf4"},
        False,
    ),
    ("peft_config: {name: freeze, freeze_trainable_layers: 2}", {}, {}, True),
]


@pytest.mark.parametrize(("more", "layout", "job", "is_open"), PLUGINS)
def test_plugins(more: str, layout: dict, job: dict, is_open: bool) -> None:
    launch = parse_launch(FILE + more, "v1.yaml", devices=8)
    assert launch.model == pm.model("qwen3-4b")
    assert (launch.global_batch, launch.seq_len, launch.missing, launch.ignored) == (
        64,
        4096,
        (),
        (),
    )
    assert {name: launch.layout.value(name) for name in layout} == layout
    assert job.items() <= dict(launch.job_fields).items()
    assert bool(launch.may_be_wrong) == is_open
    assert launch.layout is not None
    assert pm.predict(launch.problem("dgx-h100"), layout=launch.layout).step_time_s > 0


def test_context_parallelism() -> None:
    text = FILE.replace("  dcp_path: null", "  cp_mode: ulysses\n  cp_size: 2")
    layout = parse_launch(text, "v1.yaml", devices=8).layout
    assert layout is not None
    assert (layout.cp, layout.cp_kind, layout.dp) == (2, "ulysses", 4)


def test_the_file_of_deepspeed_that_it_names(tmp_path: Path) -> None:
    settings = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    file = tmp_path / "v1.yaml"
    file.write_text(
        FILE.replace("name: fsdp2\n  dcp_path: null", "name: deepspeed\n  config_file: ds.json")
    )
    launch = read_launch(file, devices=8)
    assert launch.framework.startswith("deepspeed")
    assert launch.layout is not None
    assert (launch.layout.zero, launch.job_fields["dtype"], launch.global_batch) == (2, "bf16", 64)
