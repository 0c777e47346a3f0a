"""Python scripts with the arguments of Hugging Face's Trainer, or trl's."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import Launch, parse_launch, read_launch
from perfmodel.workload import parameter_count


def read(text: str, *arguments: str, devices: int | None = 8, **given: Any) -> Launch:
    return parse_launch(
        dedent(text).lstrip("\n"), "train.py", arguments=arguments, devices=devices, **given
    )


SCRIPT = """
    import argparse
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

    def parse():
        parser = argparse.ArgumentParser()
        parser.add_argument("--name", default="meta-llama/Llama-3.1-8B")
        parser.add_argument("--batch", type=int, default=4)
        parser.add_argument("--lora", action="store_true")
        return parser.parse_args()

    def main():
        args = parse()
        tokenizer = AutoTokenizer.from_pretrained(args.name)
        model = AutoModelForCausalLM.from_pretrained(args.name, torch_dtype=torch.bfloat16)
        if args.lora:
            model = get_peft_model(model, LoraConfig(r=32, target_modules=["q_proj", "v_proj"]))
        def cut(examples):
            return tokenizer(examples["text"], truncation=True, max_length=1024)
        data = load().map(cut, batched=True)
        arguments = TrainingArguments(
            output_dir="out",
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=8,
            bf16=torch.cuda.is_bf16_supported(),
            fp16=not torch.cuda.is_bf16_supported(),
            gradient_checkpointing=True,
            fsdp="full_shard auto_wrap",
            learning_rate=lr_of(args),
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()

    if __name__ == "__main__":
        main()
"""


def test_arguments_of_a_script() -> None:
    launch = read(SCRIPT)
    assert launch.layout is not None
    assert (launch.layout.micro_batch, launch.layout.zero, launch.layout.recompute) == (
        4,
        3,
        "full",
    )
    assert (launch.global_batch, launch.seq_len, launch.job_fields["dtype"]) == (
        4 * 8 * 8,
        1024,
        "bf16",
    )
    assert launch.model == catalog.model("llama3-8b")
    assert "adapter_rank" not in launch.job_fields
    assert launch.may_be_wrong == ()
    adapted = read(SCRIPT, "--lora", "--batch", "2")
    assert (adapted.job_fields["adapter_rank"], adapted.global_batch) == (32, 2 * 8 * 8)


def test_a_launcher_states_devices_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    (tmp_path / "run.sh").write_text(
        "torchrun --nnodes=2 --nproc_per_node=8 train.py --batch 1 --name Qwen/Qwen3-8B\n"
    )
    launch = read_launch(tmp_path / "run.sh")
    assert (launch.devices, launch.global_batch, launch.model) == (
        16,
        8 * 16,
        catalog.model("qwen3-8b"),
    )


def test_arguments_that_the_trainer_gets_are_read() -> None:
    text = """
        from trl import SFTConfig, SFTTrainer
        other = SFTConfig(per_device_train_batch_size=1, max_length=512)
        own = SFTConfig(per_device_train_batch_size=2, max_length=4096, packing=True, bf16=True)
        trainer = SFTTrainer(model="Qwen/Qwen3-8B", args=own)
    """
    launch = read(text)
    assert (launch.global_batch, launch.seq_len, launch.model) == (
        16,
        4096,
        catalog.model("qwen3-8b"),
    )
    # trl cuts sequences at 1,024 tokens if nothing is said.
    assert read(text.replace(", max_length=4096", "")).seq_len == 1024


def test_quantized_weights_with_adapters() -> None:
    text = """
        from unsloth import FastLanguageModel
        model, tokenizer = FastLanguageModel.from_pretrained("Qwen/Qwen3-8B", max_seq_length=2048, load_in_4bit=True)
        model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "k_proj"])
        trainer = SFTTrainer(model=model, args=TrainingArguments(per_device_train_batch_size=2, bf16=True))
    """
    launch = read(text)
    assert (launch.job_fields["adapter_rank"], launch.job_fields["base_weights"]) == (16, "nf4")
    assert launch.seq_len == 2048


def test_a_model_that_the_script_builds() -> None:
    text = """
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        config = LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
                             num_attention_heads=8, max_position_embeddings=256)
        model = LlamaForCausalLM(config)
        trainer = Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=32, fp16=True))
    """
    launch = read(text)
    assert launch.model is not None
    layer = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
    assert parameter_count(launch.model) == 2 * 32_000 * 512 + 4 * layer + 512
    unknown = read(text.replace("hidden_size=512", "hidden_size=width()"))
    assert unknown.model is None
    assert any("hidden_size" in note for note in unknown.ignored)


def test_settings_of_deepspeed_in_the_script() -> None:
    text = """
        stage = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        config = {"bf16": {"enabled": "auto"}, "zero_optimization": stage, "train_batch_size": "auto"}
        arguments = TrainingArguments(per_device_train_batch_size=1, bf16=True, deepspeed=config)
        Trainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=arguments)
    """
    launch = read(text)
    assert launch.framework.partition("@")[0] == "deepspeed"
    assert launch.layout is not None
    assert launch.layout.zero == 2


def test_what_the_script_does_not_decide_is_said() -> None:
    text = """
        arguments = TrainingArguments(per_device_train_batch_size=4 if big_gpu() else 1, bf16=True, output_dir=where())
        Trainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=arguments)
    """
    launch = read(text)
    assert launch.global_batch == 8
    (doubt,) = launch.may_be_wrong
    assert "per_device_train_batch_size is 4 if big_gpu() (line 1)" in doubt
    (doubt,) = read(text.replace("bf16=True", "**more()")).may_be_wrong[1:]
    assert "a dictionary" in doubt


def test_a_batch_that_nobody_states_is_refused_by_name() -> None:
    text = (
        "Trainer(args=TrainingArguments(per_device_train_batch_size=sizes().batch), model=None)\n"
    )
    with pytest.raises(LaunchFileError, match=r"line 1: per_device_train_batch_size is .*sizes\("):
        read(text)


TRL_SCRIPT = """
    from trl import {0}Config, {0}Trainer
    arguments = {0}Config(output_dir="out", {1})
    trainer = {0}Trainer({2}"Qwen/Qwen3-8B", args=arguments)
"""


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "ORPO", "CPO"])
@pytest.mark.parametrize("keyword", ["", "model="])
@pytest.mark.parametrize(
    ("stated", "dtype", "recompute"),
    [
        ("", "bf16", "full"),
        ("bf16=None", "bf16", "full"),
        ("fp16=False", "bf16", "full"),
        ("fp16=True", "fp16", "full"),
        ("bf16=False", "fp32", "full"),
        ("gradient_checkpointing=False", "bf16", "none"),
        # Only versions before 0.20, which keep transformers' defaults, take this argument.
        ("max_seq_length=1024", "fp32", "none"),
    ],
)
def test_defaults_of_trl_in_scripts(
    kind: str, keyword: str, stated: str, dtype: str, recompute: str
) -> None:
    launch = read(TRL_SCRIPT.format(kind, stated, keyword))
    assert launch.layout is not None
    assert (launch.model, launch.seq_len) == (catalog.model("qwen3-8b"), 1024)
    assert (launch.job_fields["dtype"], launch.layout.recompute) == (dtype, recompute)


def test_scripts_and_commands_of_trl_have_the_same_defaults() -> None:
    script = read(TRL_SCRIPT.format("SFT", "", ""))
    command = parse_launch(
        "trl sft --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 8\n",
        "run.sh",
        devices=8,
    )
    assert (script.layout, script.job_fields, script.seq_len) == (
        command.layout,
        command.job_fields,
        command.seq_len,
    )


SWITCHED_ON = {
    "model.gradient_checkpointing_enable()": True,
    'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})': True,
    "model.enable_gradient_checkpointing()": True,
    "model = peft.prepare_model_for_kbit_training(model)": True,
    "model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)": False,
    "model = peft.prepare_model_for_kbit_training(model, False)": False,
    'model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing="unsloth")': True,
    "model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=False)": False,
    "model.gradient_checkpointing_disable()": False,
    "": False,
}


@pytest.mark.parametrize("call", SWITCHED_ON)
def test_recompute_that_a_script_switches_on_in_its_model(call: str) -> None:
    script = (
        "import peft\nfrom unsloth import FastLanguageModel\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-3B")\n'
        f"{call}\n"
        'args = TrainingArguments(output_dir="o", per_device_train_batch_size=4, bf16=True)\n'
        "Trainer(model=model, args=args).train()\n"
    )
    layout = parse_launch(script, "train.py", devices=8).layout
    assert layout is not None
    assert layout.recompute == ("full" if SWITCHED_ON[call] else "none")
