"""Names of the arguments that programs around Hugging Face's Trainer share."""

import re
from typing import Final

from perfmodel.ingest.launch._table import words

MICRO: Final = "per_device_train_batch_size"
ACCUMULATION: Final = "gradient_accumulation_steps"
PROGRAM: Final = "<script>"
"""The entry that names the Python program of a command."""
OWN_PROGRAM: Final = "<own program>"
"""The entry that names a user-written training program (`_own_programs`)."""
DEFAULTS: Final = "<defaults>"
"""The entry that names defaults of a known program, as a sentence says them."""
KNOWN: Final = "known"
"""The value of `DEFAULTS` for a known program that leaves nothing open."""
HALF_ASSUMED: Final = "<half>"
"""The entry for products in 16 bits that a program's arguments leave open."""
TENSOR: Final = "tensor_parallel_size"
"""The entry for DeepSpeed's tensor parallelism, under every name that programs have for it."""
WORLD: Final = (
    "nproc_per_node",
    "nnodes",
    "num_nodes",
    "num_gpus",
    "num_processes",
    "num_machines",
    "world_size",
)
"""Entries for the number of processes that a launcher starts, from the command line or a file."""
TRL_LENGTH: Final = 1024
"""Default of `max_length` in trl's configurations (trl/trainer/sft_config.py)."""
TRL_COMMAND: Final = re.compile(
    r"(?:^|\s|/)trl\s+"
    r"(sft|dpo|kto|reward|grpo|rloo|ppo|gkd|orpo|cpo|distillation|online[-_]dpo)(?=\s|$)"
)
"""trl's command, which starts the program of that name. Those behind `reward` run further models or
passes, as the doubt about them says."""
TRL_CLASS: Final = re.compile(r"(?:^|\.)(SFT|DPO|KTO|ORPO|CPO|GRPO|Reward)Config$")
"""Classes of trl's arguments in Python scripts."""
OF_TRL: Final = re.compile(
    r"(^|/)(examples|trl)/scripts/(sft|dpo|kto|orpo|cpo|reward|grpo|rloo)\w*\.py$"
    r"|^trl (sft|dpo|kto|orpo|cpo|grpo|rloo|reward)$"
)
"""Values of `PROGRAM` for what has trl's defaults: its programs by their path, its command, and
scripts that make its arguments."""
OF_TRL_TUNING: Final = re.compile(r"(^|/)(examples|trl)/scripts/sft\w*\.py$|^trl sft$")
"""Values of `PROGRAM` for trl's plain fine-tuning."""
TRL_GENERATES: Final = re.compile(r"grpo|rloo")
"""Names of trl's programs whose sequences are a prompt and a generated answer."""
TRL_OLD_LENGTH: Final = "max_seq_length"
"""The name of `max_length` before version 0.20 of trl, which refuses it."""
QLORA: Final = "use_qlora"
"""The switch of open-instruct's programs for adapters on weights in 4 bits, whose products are in
bf16."""
TORCH_TYPES: Final = words(
    {
        "bfloat16": "bf16",
        "bf16": "bf16",
        "float16": "fp16",
        "fp16": "fp16",
        "float32": "fp32",
        "fp32": "fp32",
        "auto": None,
    }
)
PACKINGS: Final = ("packing", "neat_packing", "group_by_length", "padding_free")
MODEL_KEYS: Final = (
    "model_name_or_path",
    "model_id_or_path",
    "model",
    "model_name",
    "base_model",
    # Programs of Qwen's and LLaVA's followers.
    "model_id",
    "model_path",
    "pretrained_model_name_or_path",
)
QUANTIZED: Final = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", QLORA)
