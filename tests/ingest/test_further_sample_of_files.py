"""Kinds of settings that perfmodel misread in a second sample of public launch files, 89 of them.

Files are rewritten: their names and numbers are others.
"""

from textwrap import dedent
from typing import Any

import pytest

from perfmodel.ingest.launch import Launch, parse_launch

TRAINER = "--model_name_or_path bigscience/bloom-560m --per_device_train_batch_size 3 --gradient_accumulation_steps 2"
MAXTEXT = "python3 MaxText/train.py MaxText/configs/base.yml ici_fsdp_parallelism=4 per_device_batch_size=2"


def read(name: str, text: str, **given: Any) -> Launch:
    return parse_launch(dedent(text), name, **given)


# --- DeepSpeed beside flags of Hugging Face's Trainer
# ----------------------------------------------------


@pytest.mark.parametrize("flag", ["deepspeed_config", "ds_config", "ds_file"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_of_deepspeed_under_a_programs_own_name(flag: str, stage: int) -> None:
    launch = read(
        "run.sh",
        f"deepspeed --num_gpus 4 tune.py {TRAINER} --block_size 512 --{flag} conf/zero{stage}.json",
    )
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero) == ("deepspeed", stage)
    assert (launch.devices, launch.global_batch) == (4, 24)
    assert any(f"zero{stage}.json" in note for note in (*launch.assumed, *launch.may_be_wrong))


def test_a_nameless_file_of_deepspeed_that_is_absent_is_doubted() -> None:
    launch = read(
        "run.sh",
        f"deepspeed --num_gpus 4 tune.py {TRAINER} --block_size 512 --deepspeed_config a/b.json",
    )
    assert any("b.json was not found" in doubt for doubt in launch.may_be_wrong)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_a_program_makes_settings_of(stage: int) -> None:
    launch = read(
        "run.sh",
        f"deepspeed --num_gpus 2 tune.py {TRAINER} --max_length 512 --bf16 --zero_stage ${{STAGE:-{stage}}}",
    )
    assert launch.layout is not None
    assert (launch.framework, launch.layout.zero, launch.job_fields["dtype"]) == (
        "deepspeed",
        stage,
        "bf16",
    )
    assert not any("zero_stage" in doubt for doubt in launch.may_be_wrong)


# --- switches and types of the Trainer
# -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "recompute"),
    [
        ("no", "none"),
        ("False", "none"),
        ("0", "none"),
        ("n", "none"),
        ("yes", "full"),
        ("true", "full"),
        ("", "full"),
    ],
)
def test_words_that_turn_a_switch_off(word: str, recompute: str) -> None:
    """All words that transformers' `string_to_bool` takes."""
    launch = read(
        "run.sh",
        f"torchrun --nproc_per_node 2 sft.py {TRAINER} --gradient_checkpointing {word} --bf16 yes",
    )
    assert launch.layout is not None
    assert launch.layout.recompute == recompute


@pytest.mark.parametrize("flag", ["--torch_dtype bfloat16", "--torch_dtype bfloat16 --bf16 true"])
def test_weights_that_are_loaded_in_16_bits_are_trained_in_them(flag: str) -> None:
    """The Trainer makes no copy in 32 bits: AdamW's states have the type of the weights."""
    launch = read("run.sh", f"torchrun --nproc_per_node 2 sft.py {TRAINER} --max_length 512 {flag}")
    assert (launch.job_fields.get("optimizer"), launch.job_fields.get("grad_dtype")) == (
        "adam16bit",
        "bf16",
    )


@pytest.mark.parametrize(
    "flag",
    [
        "--bf16 true",
        "--torch_dtype float32 --bf16 true",
        "--torch_dtype bfloat16 --bf16 true --use_peft",
    ],
)
def test_other_weights_keep_states_in_32_bits(flag: str) -> None:
    launch = read("run.sh", f"torchrun --nproc_per_node 2 sft.py {TRAINER} --max_length 512 {flag}")
    assert launch.job_fields.get("optimizer") != "adam16bit"


# --- MaxText
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["export M_MAX_TARGET_LENGTH={}\n", "M_MAX_TARGET_LENGTH={} "])
@pytest.mark.parametrize("length", [512, 131072])
def test_variables_that_are_settings_of_maxtext(prefix: str, length: int) -> None:
    assert read("run.sh", prefix.format(length) + MAXTEXT).seq_len == length
    both = read("run.sh", f"{prefix.format(64)}{MAXTEXT} max_target_length={length}")
    assert both.seq_len == length


@pytest.mark.parametrize(
    ("sizes", "is_doubted"),
    [
        ("base_num_heads=16", True),
        ("base_num_heads=16 mlp_activations=['silu','linear']", False),
        ("base_num_query_heads=16 base_num_kv_heads=16", False),
    ],
)
def test_feed_forwards_of_old_maxtext_are_doubted(sizes: str, is_doubted: bool) -> None:
    launch = read("run.sh", f"{MAXTEXT} base_emb_dim=2048 base_mlp_dim=8192 {sizes}")
    assert any("base_num_heads" in doubt for doubt in launch.may_be_wrong) == is_doubted


# --- torchtitan and LLaMA-Factory
# ------------------------------------------------------------------------

TITAN = """
    [model]
    name = "llama3"
    flavor = "8B"
    [training]
    local_batch_size = 2
    seq_len = 4096
    [optimizer]
    name = "AdamW"
    lr = 3e-4
    {line}
"""


@pytest.mark.parametrize("line", ["early_step_in_backward = true", 'state_dtype = "bfloat16"'])
def test_settings_of_torchtitans_optimizer_that_change_its_states_are_doubted(line: str) -> None:
    plain = read("run.toml", TITAN.format(line="eps = 1e-8"), devices=8)
    changed = read("run.toml", TITAN.format(line=line), devices=8)
    name = line.split()[0]
    assert not any(name in doubt for doubt in plain.may_be_wrong)
    assert any(name in doubt for doubt in changed.may_be_wrong)


FACTORY = """
    model_name_or_path: meta-llama/Llama-3.1-8B
    stage: sft
    finetuning_type: full
    template: llama3
    cutoff_len: 1024
    bf16: true
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 3
"""


def test_workers_of_ray_are_devices_of_llama_factory() -> None:
    launch = read("run.yaml", FACTORY + "    ray_num_workers: 6\n")
    assert (launch.devices, launch.global_batch) == (6, 36)


def test_depths_that_are_mixed_change_the_model() -> None:
    launch = read("run.yaml", FACTORY + "    mixture_of_depths: convert\n", devices=2)
    assert any("model" in doubt and "mixture_of_depths" in doubt for doubt in launch.may_be_wrong)


# --- references
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["others", "tasks_of.others"])
def test_a_reference_to_an_absent_block_with_a_key_of_the_same_name(block: str) -> None:
    """What stands in the block may be merged from another file."""
    text = f"""
        tasks: ${{{block}.tasks}}
        max_seq_len: 1024
        model: {{name: mpt_causal_lm, d_model: 256, n_heads: 4, n_layers: 2, expansion_ratio: 4, vocab_size: 500}}
        global_train_batch_size: 16
        device_train_microbatch_size: 2
        precision: amp_bf16
        fsdp_config: {{sharding_strategy: FULL_SHARD}}
    """
    launch = read("run.yaml", text, devices=4)
    assert (launch.global_batch, launch.seq_len) == (16, 1024)
