"""`perfmodel hook` beside the frameworks' own argument parsers, where their packages are installed.

Each test is skipped, and says so, where a package or something that it needs is not there.
"""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from perfmodel.ingest.launch import Launch, hook_lines, read_launch
from perfmodel.workload import parameter_count

TINY = (
    "LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size=256)"
)
TRAINER = f"""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=True, use_cpu=True,
        report_to=[], {{recompute}}=True,
    )
    trainer = Trainer(model=LlamaForCausalLM({TINY}), args=args)
"""
ENGINE = f"""
    from types import SimpleNamespace

    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig

    config = DeepSpeedConfig({{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {{"enabled": True}},
        "zero_optimization": {{"stage": 3}},
    }})
    model_engine = SimpleNamespace(_config=config, module=SimpleNamespace(config={TINY}))
"""
TITAN = """
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args([
        "--module", "llama3", "--config", "{recipe}", "--training.local_batch_size", "2",
        "--parallelism.tensor_parallel_degree", "2",
    ])
"""


def hooked(name: str, script: str, packages: tuple[str, ...], folder: Path) -> Launch:
    """What a hook's lines write behind a script of the framework itself."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    path = folder / "train.py"
    path.write_text(textwrap.dedent(script) + "\n" + hook_lines(name))
    environment = {**os.environ, "WORLD_SIZE": "1", "RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "ModuleNotFoundError" in run.stderr or "ImportError" in run.stderr:
        pytest.skip(f"{packages[0]} cannot be imported here: {run.stderr.strip().splitlines()[-1]}")
    assert run.returncode == 0, run.stderr
    return read_launch(folder / "args.json", devices=8)


@pytest.mark.parametrize("recompute", ["gradient_checkpointing", "activation_checkpointing"])
def test_arguments_of_the_trainer_itself(recompute: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    import transformers

    if recompute not in transformers.TrainingArguments.__dataclass_fields__:
        pytest.skip(f"transformers {transformers.__version__} has no {recompute}")
    script = TRAINER.replace("{recompute}", recompute)
    launch = hooked("hf-trainer", script, ("transformers", "accelerate"), tmp_path)
    assert launch.may_be_wrong == ()
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.layout.recompute, launch.global_batch) == (
        2,
        "full",
        64,
    )
    assert launch.job_fields["dtype"] == "bf16"
    assert launch.model is not None
    assert (
        parameter_count(launch.model)
        == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 256 * 64
    )


def test_the_configuration_of_deepspeed_itself(tmp_path: Path) -> None:
    launch = hooked("deepspeed", ENGINE, ("deepspeed", "transformers"), tmp_path)
    assert launch.may_be_wrong == ()
    assert launch.layout is not None
    assert (launch.layout.zero, launch.layout.micro_batch, launch.global_batch) == (3, 2, 64)
    assert launch.job_fields["dtype"] == "bf16"


@pytest.mark.parametrize(("recipe", "recompute"), [("llama3_8b", "none"), ("llama3_70b", "full")])
def test_the_arguments_of_torchtitan_itself(recipe: str, recompute: str, tmp_path: Path) -> None:
    """And its recipe by the table of recipes says the same."""
    launch = hooked("torchtitan", TITAN.replace("{recipe}", recipe), ("torchtitan",), tmp_path)
    assert launch.may_be_wrong == ()
    assert launch.layout is not None
    assert (launch.layout.tp, launch.layout.micro_batch, launch.seq_len) == (2, 2, 8192)
    assert launch.layout.recompute == recompute
    command = f"torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config {recipe} "
    (tmp_path / "run.sh").write_text(
        command + "--training.local_batch_size 2 --parallelism.tensor_parallel_degree 2\n"
    )
    by_name = read_launch(tmp_path / "run.sh")
    assert (by_name.layout, by_name.global_batch, by_name.model) == (
        launch.layout,
        launch.global_batch,
        launch.model,
    )
