"""Every setting that readers of launch files know, each with the values that mean something else,
alone and in pairs.

`known_settings.csv` keeps what is read of each: model, layout, job and what is assumed. A rule of a
format may read several keys at once, so pairs of its keys whose meaning together does not follow
from each alone are there too. After a change that is meant to move what is read, or a new key, the
values are looked for again (some minutes) by

    PYTHONPATH=tests:tests/ingest python tests/ingest/known_settings.py

The table that is kept was thinned after such a run, to keep its test short: a new run finds about a
third more pairs.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from stored_figures import Figures, StoredCase, read_cases, write_cases

from perfmodel.errors import PerfModelError
from perfmodel.ingest.launch import Launch, parse_launch
from perfmodel.ingest.launch._recognise import recognised
from perfmodel.ingest.launch._table import Rule, Values
from perfmodel.spec import Transformer

TABLE = Path(__file__).with_suffix(".csv")
Settings = Mapping[str, Any]
SIZES: Settings = {
    "num-layers": 24,
    "hidden-size": 2048,
    "num-attention-heads": 16,
    "seq-length": 4096,
    "max-position-embeddings": 4096,
    "vocab-size": 32000,
    "micro-batch-size": 2,
    "global-batch-size": 96,
    "nproc-per-node": 8,
    "nnodes": 2,
}
ROPE: Settings = {
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "bf16": True,
}
EXPERTS: Settings = {
    "num-experts": 8,
    "moe-router-topk": 2,
    "expert-model-parallel-size": 4,
    "moe-ffn-hidden-size": 1024,
}
LATENT: Settings = {
    "multi-latent-attention": True,
    "q-lora-rank": 512,
    "kv-lora-rank": 256,
    "qk-head-dim": 64,
}
STAGES: Settings = {
    "pipeline-model-parallel-size": 4,
    "tensor-model-parallel-size": 2,
    "transformer-impl": "transformer_engine",
}
NEMO: Settings = {
    "trainer.devices": 8,
    "trainer.num_nodes": 2,
    "trainer.precision": "bf16",
    "model.micro_batch_size": 2,
    "model.global_batch_size": 64,
    "model.encoder_seq_length": 2048,
    "model.num_layers": 24,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 16,
    "model.tensor_model_parallel_size": 2,
    "model.pipeline_model_parallel_size": 4,
}
BRIDGE: Settings = {
    "model.num_layers": 24,
    "model.hidden_size": 2048,
    "model.num_attention_heads": 16,
    "model.vocab_size": 32000,
    "model.seq_length": 4096,
    "model.tensor_model_parallel_size": 2,
    "model.pipeline_model_parallel_size": 4,
    "train.global_batch_size": 64,
    "train.micro_batch_size": 2,
    "train.train_iters": 5,
}
NANOTRON: Settings = {
    "model.model_config.hidden_size": 1024,
    "model.model_config.num_hidden_layers": 16,
    "model.model_config.num_attention_heads": 16,
    "model.model_config.vocab_size": 32000,
    "parallelism.dp": 2,
    "parallelism.tp": 2,
    "parallelism.pp": 4,
    "parallelism.pp_engine": "1f1b",
    "parallelism.tp_mode": "REDUCE_SCATTER",
    "tokens.micro_batch_size": 2,
    "tokens.sequence_length": 2048,
    "tokens.batch_accumulation_per_replica": 4,
}
FOUNDRY: Settings = {
    "max_seq_len": 2048,
    "global_train_batch_size": 64,
    "device_train_microbatch_size": 4,
    "model.name": "mpt_causal_lm",
    "model.d_model": 1024,
    "model.n_heads": 16,
    "model.n_layers": 24,
    "fsdp_config.sharding_strategy": "FULL_SHARD",
}
MAXTEXT: Settings = {
    "base_config": "base.yml",
    "base_emb_dim": 1024,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 8,
    "base_mlp_dim": 4096,
    "base_num_decoder_layers": 16,
    "head_dim": 64,
    "vocab_size": 32000,
    "per_device_batch_size": 2,
    "max_target_length": 2048,
    "ici_fsdp_parallelism": 8,
    "ici_tensor_parallelism": 2,
}
LEVANTER: Settings = {
    "model.type": "llama",
    "model.hidden_dim": 1024,
    "model.num_layers": 16,
    "model.num_heads": 16,
    "model.num_kv_heads": 8,
    "model.intermediate_dim": 4096,
    "model.seq_len": 2048,
    "trainer.mp": "p=f32,c=bfloat16",
    "trainer.train_batch_size": 64,
    "trainer.model_axis_size": 2,
}
NEMO_RL: Settings = {
    "grpo.max_num_steps": 60,
    "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "policy.train_global_batch_size": 128,
    "policy.train_micro_batch_size": 2,
    "policy.max_total_sequence_length": 4096,
    "policy.precision": "bfloat16",
    "cluster.gpus_per_node": 8,
    "cluster.num_nodes": 2,
}
FACTORY: Settings = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct",
    "stage": "sft",
    "finetuning_type": "full",
    "cutoff_len": 4096,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}
AXOLOTL: Settings = {
    "base_model": "NousResearch/Meta-Llama-3.1-8B",
    "sequence_len": 4096,
    "sample_packing": True,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "bf16": True,
}
TORCHTUNE: Settings = {
    "model._component_": "torchtune.models.llama3_1.llama3_1_8b",
    "tokenizer.max_seq_len": 4096,
    "dataset.packed": True,
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "dtype": "bf16",
}
TRAINER: Settings = {
    "model_name_or_path": "meta-llama/Llama-3.1-8B",
    "max_length": 4096,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}
SWIFT: Settings = {
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "train_type": "lora",
    "lora_rank": 32,
    "torch_dtype": "bfloat16",
    "max_length": 4096,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
}
BASES: Mapping[str, tuple[str, Settings]] = {
    "megatron": ("run.sh", SIZES),
    "megatron, rope": ("run.sh", {**SIZES, **ROPE}),
    "megatron, experts": ("run.sh", {**SIZES, **ROPE, **EXPERTS}),
    "megatron, latent": ("run.sh", {**SIZES, **ROPE, **EXPERTS, **LATENT}),
    "megatron, stages": ("run.sh", {**SIZES, **STAGES}),
    "megatron, deepspeed": ("run.sh", {**SIZES, "deepspeed": True, "zero-stage": 1, "bf16": True}),
    "nemo": ("run.yaml", NEMO),
    "bridge": ("run.yaml", BRIDGE),
    "nanotron": ("run.yaml", NANOTRON),
    "llm-foundry": ("run.yaml", FOUNDRY),
    "maxtext": ("run.yml", MAXTEXT),
    "levanter": ("run.yaml", LEVANTER),
    "nemo-rl": ("run.yaml", {**NEMO_RL, "policy.dtensor_cfg.enabled": True}),
    "nemo-rl, megatron": ("run.yaml", {**NEMO_RL, "policy.megatron_cfg.enabled": True}),
    "accelerate, fsdp": ("run.yaml", {"distributed_type": "FSDP", "num_processes": 16}),
    "accelerate, deepspeed": ("run.yaml", {"distributed_type": "DEEPSPEED", "num_processes": 16}),
    "accelerate, megatron": ("run.yaml", {"distributed_type": "MEGATRON_LM", "num_processes": 16}),
    "deepspeed": ("run.json", {"train_micro_batch_size_per_gpu": 4, "zero_optimization.stage": 3}),
    "deepspeed, batch": (
        "run.json",
        {"train_batch_size": 64, "zero_optimization.stage": 2, "bf16.enabled": True},
    ),
    "torchtitan": (
        "run.toml",
        {"model.name": "llama3", "model.flavor": "8B", "training.local_batch_size": 4},
    ),
    "torchtitan, stages": (
        "run.toml",
        {
            "model.name": "deepseek_v3",
            "model.flavor": "16B",
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.tensor_parallel_degree": 2,
        },
    ),
    "axolotl": ("run.yaml", AXOLOTL),
    "axolotl, ray": ("run.yaml", {**AXOLOTL, "use_ray": True, "ray_num_workers": 4}),
    "torchtune": ("run.yaml", TORCHTUNE),
    "llama-factory": ("run.yaml", FACTORY),
    "llama-factory, ray": (
        "run.yaml",
        {**FACTORY, "ray_num_workers": 4, "resources_per_worker.GPU": 2},
    ),
    "ms-swift": ("run.yaml", SWIFT),
    "hf-trainer": ("run.yaml", TRAINER),
    "hf-trainer, lora": ("run.yaml", {**TRAINER, "use_peft": True, "lora_r": 8}),
}
"""Small files of every format: the ending of the name and the settings, nested ones by dots."""
DEVICES = 16
"""Devices of what a file does not say by itself."""


def written(name: str, settings: Settings) -> str:
    """A file with these settings, as the format of this name has them."""
    if name.endswith(".sh"):
        words = [
            f"--{key}" if value is True else f"--{key} {value}" for key, value in settings.items()
        ]
        launcher = [
            word
            for word in words
            if word.startswith(("--nproc", "--nnodes", "--num-nodes", "--num-gpus"))
        ]
        flags = [word for word in words if word not in launcher]
        return f"torchrun {' '.join(launcher)} pretrain_gpt.py {' '.join(flags)}\n"
    if name.endswith(".toml"):
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *blocks, last = key.split(".")
        inner = nested
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    # Every JSON is a YAML.
    return json.dumps(nested)


def facts(launch: Launch) -> dict[str, float]:
    """All that a file says: numbers but 0 by their names, and each word as a name that counts
    one."""
    values: dict[str, Any] = {
        "format": launch.format,
        "framework": launch.framework,
        "devices": launch.devices,
    }
    values |= {"global_batch": launch.global_batch, "seq_len": launch.seq_len}
    if launch.layout is not None:
        values |= {f"layout.{key}": value for key, value in launch.layout.values().items()}
    values |= {f"job.{key}": value for key, value in launch.job_fields.items()}
    if isinstance(launch.model, Transformer):
        values |= {f"model.{key}": value for key, value in launch.model.values().items()}
    for name in ("assumed", "may_be_wrong", "ignored", "missing"):
        values[name] = len(getattr(launch, name))
    return {
        name: number
        for key, value in values.items()
        for name, number in _numbers(key, value)
        if number
    }


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """A value as figures: itself, its entries, or a name that counts one."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(f"{name}.{key}", entry)
    elif isinstance(value, bool | int | float):
        yield "".join(name.split()).replace("=", ":"), float(value)
    elif value:
        yield "".join(f"{name}.{value}".split()).replace("=", ":")[:120], 1.0


def read(name: str, settings: Settings) -> Figures:
    """Reading of a file with these settings, as figures."""
    try:
        text = written(name, settings)
        launch = parse_launch(text, name)
        if launch.devices is None and not name.endswith(".sh"):
            launch = parse_launch(text, name, devices=DEVICES)
        return facts(launch)
    except PerfModelError as error:
        return {f"refused.{type(error).__name__}": 1.0}


def cases() -> Iterator[StoredCase]:
    """Readings, by the present code, of every file of the table."""
    for case in read_cases(TABLE):
        name, settings = BASES[case.base.removeprefix(REFUSED)]
        change = {} if case.name == case.base else json.loads(case.name)
        yield StoredCase(case.base, case.name, read(name, {**settings, **change}))


# --- looking for values
# -------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 12, -1, 0.5)
MOST_NUMBERS = 3
"""Most numbers of one key: what is read of one says what is read of all."""
ON_OFF = (True, False)
REFUSED = "refused: "
"""Before the name of a base whose change is refused: such a row has no figures of it."""


def looked_for() -> Iterator[StoredCase]:
    """Every base with each value of each key that reads otherwise than others, and such pairs of
    keys of one rule."""
    told: set[str] = set()
    values_of: dict[tuple[str, str], list[Any]] = {}
    for base, (name, settings) in BASES.items():
        plain = read(name, settings)
        yield StoredCase(base, base, plain)
        form = recognised(written(name, settings), name)[1]
        known: set[str] = set()
        for rule in form.table:
            telling: dict[str, list[tuple[Any, Figures]]] = {}
            for key in rule.keys:
                if key.startswith(("sbatch", "<")):
                    continue
                # What says nothing in one file of a format hardly does in another.
                values = values_of.get((form.name, key))
                values = [*ON_OFF, *NUMBERS, *sorted(_texts(rule))] if values is None else values
                telling[key] = list(_telling_values(name, settings, plain, key, values))
                values_of.setdefault(
                    (form.name, key), [True, 2, *(value for value, _ in telling[key])]
                )
                for value, figures in telling[key] if key not in known else ():
                    yield from _new_case(base, {key: value}, plain, figures, told)
            known |= set(rule.keys)
            for (key_a, values_a), (key_b, values_b) in combinations(telling.items(), 2):
                seen: set[str] = set()
                for (a, figures_a), (b, figures_b) in product(values_a, values_b):
                    change = {key_a: a, key_b: b}
                    figures = read(name, {**settings, **change})
                    follows = _sum_of_changes(plain, figures_a, figures_b)
                    text = str(_changes(plain, figures))
                    if (
                        figures != follows
                        and text not in seen
                        and _differs(figures, figures_a, figures_b)
                    ):
                        seen.add(text)
                        yield from _new_case(base, change, plain, figures, told)


def _new_case(
    base: str, change: Settings, plain: Figures, figures: Figures, told: set[str]
) -> Iterator[StoredCase]:
    """A case that changes something else than the same settings did in the bases before."""
    is_refused = any(name.startswith("refused") for name in figures)
    text = json.dumps(change)
    what = (
        f"{base.partition(',')[0]} {text} {'refused' if is_refused else _changes(plain, figures)}"
    )
    if what not in told:
        told.add(what)
        yield StoredCase(f"{REFUSED}{base}" if is_refused else base, text, figures)


def _differs(figures: Figures, *others: Figures) -> bool:
    return all(figures != other for other in others)


def _changes(plain: Figures, figures: Figures) -> list[tuple[str, float | None]]:
    names = plain.keys() | figures.keys()
    return sorted(
        (name, figures.get(name)) for name in names if plain.get(name) != figures.get(name)
    )


def _sum_of_changes(plain: Figures, a: Figures, b: Figures) -> Figures:
    """Figures that both changes give together if they are independent."""
    changed = dict(plain)
    for name, value in (*_changes(plain, a), *_changes(plain, b)):
        if value is None:
            changed.pop(name, None)
        else:
            changed[name] = value
    return changed


def _telling_values(
    name: str, settings: Settings, plain: Figures, key: str, values: Sequence[Any]
) -> Iterator[tuple[Any, Figures]]:
    """Values of a key, each of which reads otherwise than the file without it and than those
    before."""
    seen = [plain]
    numbers = 0
    for value in values:
        is_number = type(value) is not bool and not isinstance(value, str)
        if (is_number and numbers == MOST_NUMBERS) or settings.get(key) == value:
            continue
        figures = read(name, {**settings, key: value})
        if figures not in seen:
            seen.append(figures)
            numbers += is_number
            yield value, figures


def _texts(rule: Rule) -> set[str]:
    """Words that a rule compares its values with: constants of its functions and of the tables that
    these use."""
    texts: set[str] = set()
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 6:
            return
        seen.add(id(thing))
        match thing:
            case str():
                if (
                    0 < len(thing) <= 40
                    and " " not in thing
                    and "$" not in thing
                    and thing not in rule.keys
                ):
                    texts.add(thing)
            case FunctionType():
                if thing.__module__.startswith("perfmodel.ingest"):
                    visit(thing.__code__, depth + 1)
                    for cell in thing.__closure__ or ():
                        visit(cell.cell_contents, depth + 1)
                    for used in thing.__code__.co_names:
                        if not isinstance(thing.__globals__.get(used), type):
                            visit(thing.__globals__.get(used), depth + 1)
            case CodeType():
                for constant in thing.co_consts:
                    if not (isinstance(constant, str) and constant == thing.co_consts[0]):
                        visit(constant, depth + 1)
            case Mapping():
                for entry in thing:
                    visit(entry, depth + 1)
            case tuple() | list() | set() | frozenset():
                for entry in thing:
                    visit(entry, depth + 1)
            case Values():
                visit(thing.read, depth + 1)
            case _:
                pass

    read_function: Callable[..., Any] = rule.read
    visit(read_function, 0)
    return texts


if __name__ == "__main__":
    write_cases(TABLE, looked_for())
