"""A launch file with the changes that a search lists, made in its text, runs the other layout."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from perfmodel.ingest.launch import (
    FileChanges,
    SettingChange,
    changed_settings,
    comparable,
    read_launch,
)
from perfmodel.spec import Layout, Transformer

FILES = Path(__file__).parent / "launch_files"

MEGATRON = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --bf16 --sequence-parallel \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --micro-batch-size 1 \\
  --global-batch-size 64 --recompute-activations
"""
MAXTEXT = """base_config: base.yml
model_name: llama2-70b
per_device_batch_size: 4
max_target_length: 4096
ici_fsdp_parallelism: 8
dcn_data_parallelism: 4
remat_policy: full
"""
TRAINER = """deepspeed --num_nodes 4 --num_gpus 8 train.py --model_name_or_path meta-llama/Llama-2-7b \\
  --deepspeed ds.json --bf16 True --per_device_train_batch_size 2 \\
  --gradient_accumulation_steps 4 --gradient_checkpointing True --model_max_length 4096
"""
DEEPSPEED = """{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
"zero_optimization": {"stage": 3, "overlap_comm": true}}
"""
AXOLOTL = """base_model: NousResearch/Llama-2-7b-hf
adapter: lora
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
bf16: auto
gradient_checkpointing: true
deepspeed: ds.json
"""
FACTORY = """model_name_or_path: meta-llama/Llama-2-7b-hf
stage: sft
finetuning_type: lora
dataset: alpaca_en_demo
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def changes_to(path: Path, notation: str, devices: int | None = None) -> FileChanges:
    launch = read_launch(path, devices=devices)
    problem = launch.problem("dgx-h100")
    assert isinstance(problem.model, Transformer)
    layout = Layout.parse(notation)
    return changed_settings(launch, layout, problem.job, model=problem.model, devices_per_node=8)


def with_changes(path: Path, changes: FileChanges) -> None:
    """Edit the files as a reader of the diff does."""
    for change in changes.settings:
        file = Path(change.file)
        text = file.read_text("utf-8")
        if file.suffix == ".sh":
            edited = edited_script(text, change)
        else:
            edited = edited_configuration(text, change)
        file.write_text(edited, "utf-8")


def edited_script(text: str, change: SettingChange) -> str:
    if change.before is None:
        return f"{text.rstrip()} {change.after}\n"
    assert change.before in text
    return re.sub(rf"{re.escape(change.before)}(?!\S)", change.after or "", text)


def edited_configuration(text: str, change: SettingChange) -> str:
    root: dict[str, Any] = yaml.safe_load(text)
    *parents, name = change.name.split(".")
    table = root
    for parent in parents:
        table = table.setdefault(parent, {})
    if change.before is not None:
        assert yaml.safe_load(change.before) == {change.name: table[name]}
    table.pop(name, None)
    if change.after is not None:
        table[name] = yaml.safe_load(change.after)[change.name]
    return json.dumps(root) if change.file.endswith(".json") else yaml.safe_dump(root)


@pytest.mark.parametrize(
    ("name", "text", "devices", "notation"),
    [
        ("m.sh", MEGATRON, None, "tp=4,dp=8,zero=1,recompute=none,sequence_parallel=true"),
        ("m.sh", MEGATRON, None, "tp=2,pp=4,dp=4,vpp=2,schedule=interleaved,micro_batch=2"),
        ("m.yml", MAXTEXT, None, "tp=2,dp=16,zero=3"),
        ("m.yml", MAXTEXT, None, "dp=32,zero=3,recompute=full,micro_batch=4"),
        ("hf.sh", TRAINER, None, "dp=32,zero=2,micro_batch=1"),
        ("hf.sh", TRAINER, None, "dp=32,zero=3,micro_batch=8,recompute=full"),
        ("a.yml", AXOLOTL, 8, "dp=8,zero=1,micro_batch=1"),
        ("f.yaml", FACTORY, 8, "dp=8,micro_batch=2"),
    ],
)
def test_a_file_with_the_listed_changes_runs_the_other_layout(
    name: str, text: str, devices: int | None, notation: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    (tmp_path / "ds.json").write_text(DEEPSPEED, "utf-8")
    before = read_launch(path, devices=devices)
    changes = changes_to(path, notation, devices)
    assert changes.settings
    assert not changes.by_hand
    with_changes(path, changes)

    after = read_launch(path, devices=devices)
    assert after.layout is not None
    wanted = comparable(Layout.parse(notation))
    assert comparable(after.layout) == wanted
    assert after.global_batch == before.global_batch
    # A diff lists only what is needed: the changed file needs no further change.
    assert not changes_to(path, notation, devices).settings


@pytest.mark.parametrize("name", ["nemo_gpt.yaml", "nanotron_3d.yaml"])
def test_a_files_own_layout_needs_no_change(name: str) -> None:
    launch = read_launch(FILES / name)
    assert launch.layout is not None
    assert changes_to(FILES / name, launch.layout.label) == FileChanges(settings=())


def test_fields_without_a_key_are_left_to_the_user(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(FACTORY, "utf-8")
    changes = changes_to(path, "tp=2,dp=4", 8)
    assert "tp=2" in changes.by_hand
