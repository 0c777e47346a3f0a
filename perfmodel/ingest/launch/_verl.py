"""Settings of verl's supervised fine-tuning (`verl/trainer/config/sft_trainer.yaml`,
`sft_trainer_engine.yaml`).

Its commands change them by `key=value`; it trains on PyTorch's FSDP, or on Megatron-Core.
"""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._finetuning import Adapters, is_on, padding_note, sharded_sequences
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._llm_foundry import fsdp_offload
from perfmodel.ingest.launch._table import TEXT, WHOLE, WHOLE_OR_NONE, Fields, Rule, words
from perfmodel.ingest.launch._trainer import WORLD_RULE
from perfmodel.ingest.launch._trainer_names import PROGRAM

_ENGINE: Final = "engine"
_DEGREES: Final = {
    "engine.tensor_model_parallel_size": "tp",
    "engine.pipeline_model_parallel_size": "pp",
    "engine.virtual_pipeline_model_parallel_size": "vpp",
    "engine.context_parallel_size": "cp",
    "engine.expert_model_parallel_size": "ep",
    "engine.expert_tensor_parallel_size": "etp",
    # NeMo Automodel as an engine.
    "engine.tp_size": "tp",
    "engine.pp_size": "pp",
    "engine.cp_size": "cp",
    "engine.ep_size": "ep",
}
"""Degrees of Megatron-Core and of NeMo Automodel as engines."""
_HOST_OPTIMIZER: Final = "optim.override_optimizer_config.optimizer_cpu_offload"
_MEGATRON_RECOMPUTE: Final = "engine.override_transformer_config.recompute_granularity"
_SEQUENCE: Final = "engine.sequence_parallel"
_ULYSSES: Final = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
_OFFLOADS: Final = (
    "model.fsdp_config.cpu_offload",
    "model.fsdp_config.offload_params",
    "engine.offload_policy",
)
"""Switches for states on the host: either the first two together or the last alone."""
_MODEL_KEYS: Final = ("model.partial_pretrain", "model.path")
_LENGTH: Final = "data.max_length"
_USUAL_LENGTH: Final = 1024
_DYNAMIC: Final = "data.use_dynamic_bsz"
_GLOBAL_BATCH: Final = "data.train_batch_size"
_DEVICE_BATCH: Final = "data.micro_batch_size_per_gpu"
_OLD_DEVICE_BATCH: Final = "data.micro_batch_size"
_BATCHES: Final = (_GLOBAL_BATCH, _DEVICE_BATCH, _OLD_DEVICE_BATCH)
_RECOMPUTE: Final = (
    "model.enable_gradient_checkpointing",
    "engine.activation_checkpointing",
    _MEGATRON_RECOMPUTE,
)


def _is_first_generation(settings: Mapping[str, Any]) -> bool:
    """Whether the program is the trainer for FSDP alone, whose defaults differ from those of
    engines."""
    return "fsdp_sft" in str(settings.get(PROGRAM, ""))


def _degrees(settings: Mapping[str, Any]) -> Fields:
    return {
        field: WHOLE.read(settings[name])
        for name, field in _DEGREES.items()
        if settings.get(name) is not None
    }


def _layout(settings: Mapping[str, Any]) -> Fields:
    """Layout and memory of the engine that the file names."""
    if settings.get(_ENGINE) == "megatron":
        # The distributed optimizer unless a script turns it off (verl/workers/config/engine.py
        # `McoreEngineConfig`).
        fields: Fields = {
            "zero": int(is_on(settings.get("engine.use_distributed_optimizer", True)))
        }
        fields |= _degrees(settings)
        if is_on(settings.get(_HOST_OPTIMIZER)):
            fields["offload_states"] = "optimizer"
        if fields.get("ep", 1) == 1:
            fields.pop("etp", None)
        # On unless a script turns it off, where there are ranks to share the sequence.
        shares = is_on(settings.get(_SEQUENCE, True))
        return fields | {"sequence_parallel": shares and fields.get("tp", 1) > 1}
    # FULL_SHARD, or FSDP2 that shards weights again after the forward pass.
    cpu_offload, offload_params, offload_policy = (is_on(settings.get(name)) for name in _OFFLOADS)
    on_host = offload_policy or (cpu_offload and offload_params)
    fields = {"zero": 3} | fsdp_offload(3, on_host) | _degrees(settings)
    for name in _ULYSSES:
        if name in settings:
            fields |= sharded_sequences(settings[name], "ulysses")
    return fields


def _batches(settings: Mapping[str, Any]) -> Fields:
    """The global batch, and the sequences of a pass: as stated, or as many as its token budget
    holds."""
    fields: Fields = {"global_batch": WHOLE.read(settings.get(_GLOBAL_BATCH, 256))}
    dynamic = is_on(settings.get(_DYNAMIC, not _is_first_generation(settings)))
    if not dynamic:
        stated = settings.get(_DEVICE_BATCH, settings.get(_OLD_DEVICE_BATCH, 4))
        # A script may leave it to the command's further arguments, as 0.
        return fields | {"micro_batch": WHOLE_OR_NONE.read(stated) or 1}
    # Ranks that share sequences hold the tokens of all of them.
    shared = next((WHOLE.read(settings[name]) for name in _ULYSSES if name in settings), 1)
    tokens = WHOLE.read(settings.get("data.max_token_len_per_gpu", 8192)) * shared
    length = WHOLE.read(settings.get(_LENGTH, _USUAL_LENGTH))
    fields["micro_batch"] = max(1, tokens // length)
    fields["note.batch"] = (
        f"micro_batch={fields['micro_batch']}: use_dynamic_bsz fills a pass with {tokens} tokens "
        f"(here sequences of {length})"
    )
    return fields


def _length(settings: Mapping[str, Any]) -> Fields:
    length = WHOLE.read(settings.get(_LENGTH, _USUAL_LENGTH))
    return {"seq_len": length} | padding_note(_LENGTH, is_on(settings.get("use_remove_padding")))


def _precision(settings: Mapping[str, Any]) -> Fields:
    """Products are in bf16; weights are kept in fp32 unless the file says otherwise."""
    named = settings.get(
        "model.fsdp_config.model_dtype", settings.get("engine.model_dtype", "fp32")
    )
    weight_dtype = words(
        {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
    ).read(named)
    if weight_dtype == "bf16":
        return {"dtype": "bf16", "optimizer": "adam16bit", "grad_dtype": "bf16"}
    return {"dtype": "bf16"}


def _recompute(settings: Mapping[str, Any]) -> Fields:
    # Megatron-Core's own setting is handed to it as it is.
    if settings.get(_MEGATRON_RECOMPUTE) is not None:
        return {
            "recompute": words({"full": "full", "selective": "selective"}).read(
                settings[_MEGATRON_RECOMPUTE]
            )
        }
    stated = next(
        (settings[name] for name in _RECOMPUTE if name in settings),
        not _is_first_generation(settings),
    )
    return {"recompute": "full" if is_on(stated) else "none"}


def _adapters(settings: Mapping[str, Any]) -> Fields:
    rank = WHOLE_OR_NONE.read(settings["model.lora_rank"]) if "model.lora_rank" in settings else 0
    if rank:
        return Adapters(
            rank=rank, targets=settings.get("model.target_modules", "all-linear")
        ).fields
    return {}


def _fused(settings: Mapping[str, Any]) -> Fields:
    if not is_on(settings["model.use_liger"]):
        return {}
    return {"eager_kernels": (), "chunked_loss": True, "in_place_activation": True}


def _framework(fields: Fields, entries: Entries) -> str:
    return (
        "megatron-core" if _ENGINE in entries and entries[_ENGINE].value == "megatron" else "fsdp"
    )


VERL: Final = LaunchFormat(
    name="verl-sft",
    syntax="yaml",
    frameworks=("verl",),
    framework=_framework,
    always={
        "note.framework": "verl runs on PyTorch's FSDP or Megatron-Core; overheads of verl itself are not modelled"
    },
    marks=("model.partial_pretrain", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    table=(
        WORLD_RULE,
        Rule(
            keys=_MODEL_KEYS,
            read=lambda settings: {"model": TEXT.read(next(iter(settings.values())))},
            fields=("model",),
            optional=_MODEL_KEYS,
        ),
        Rule(
            keys=(PROGRAM, *_BATCHES, _DYNAMIC, "data.max_token_len_per_gpu", _LENGTH, *_ULYSSES),
            read=_batches,
        ),
        Rule(keys=(PROGRAM, _LENGTH, "use_remove_padding"), read=_length, fields=("seq_len",)),
        Rule(
            keys=(
                PROGRAM,
                _ENGINE,
                "engine.use_distributed_optimizer",
                _SEQUENCE,
                *_DEGREES,
                *_ULYSSES,
                *_OFFLOADS,
                _HOST_OPTIMIZER,
            ),
            read=_layout,
        ),
        Rule(
            keys=(PROGRAM, "model.fsdp_config.model_dtype", "engine.model_dtype"),
            read=_precision,
            fields=("dtype",),
        ),
        Rule(keys=(PROGRAM, *_RECOMPUTE), read=_recompute, fields=("recompute",)),
        Rule(
            keys=("model.lora_rank", "model.target_modules"),
            read=_adapters,
            fields=("adapter_rank",),
        ),
        Rule(keys=("model.use_liger",), read=_fused),
    ),
    harmless=patterns(
        "trainer.* optim optim.* data.* checkpoint.* model.lora_alpha model.trust_remote_code model.tokenizer_path",
        "model.external_lib model.use_remove_padding model.fsdp_config.wrap_policy.* model.use_shm engine.strategy",
        "engine.override_transformer_config.recompute_method engine.override_transformer_config.recompute_num_layers",
        "engine.override_transformer_config.attention_backend engine.use_mbridge engine.vanilla_mbridge model",
        "engine.wrap_policy.* engine.dtype model.strategy model.override_config.* profiler.* engine.seed",
    ),
)
