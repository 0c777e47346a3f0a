"""Arguments of Hugging Face's Trainer, and of MS-Swift, which extends them (LLaMA-Factory:
`_llama_factory`).

`transformers/training_args.py`; trl `SFTConfig` and `ModelConfig`; ms-swift, Command Line
Parameters. All are read from YAML, from JSON, and as flags of a command (`_finetuning_command`).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import (
    ATTENTION,
    FSDP_KEYS,
    Adapters,
    accumulation_fields,
    bits_by_name,
    checkpointing_fields,
    fsdp_fields,
    is_on,
    objective_fields,
    optimizer_fields,
    optimizer_rule,
    padding_note,
    sharded_sequences,
    torch_framework,
    tuning_fields,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._table import (
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    read_only,
    words,
)

MICRO: Final = "per_device_train_batch_size"
ACCUMULATION: Final = "gradient_accumulation_steps"
PROGRAM: Final = "<script>"
"""The entry that names the Python program of a command."""
OWN_PROGRAM: Final = "<own program>"
"""The entry that names a user-written training program (`_own_programs`)."""
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


def _number(settings: Mapping[str, Any], *names: str) -> int | None:
    """The first of several settings that is stated."""
    for name in names:
        if name in settings:
            return WHOLE.read(settings[name])
    return None


def world_fields(settings: Mapping[str, Any]) -> Fields:
    """Devices of the job: Accelerate files and argument dumps state the total, other launchers the
    devices per node."""
    # Accelerate's `--num_processes` counts all machines, torchrun's `--nproc_per_node` one of them.
    processes = _number(settings, "num_processes", "world_size")
    nodes = _number(settings, "nnodes", "num_nodes", "num_machines")
    per_node = _number(settings, "nproc_per_node", "num_gpus")
    if processes is None and per_node is None:
        return {"nodes": nodes} if nodes else {}
    fields: Fields = {
        "devices": processes if processes is not None else (nodes or 1) * (per_node or 1)
    }
    return fields | ({"nodes": nodes} if nodes else {})


WORLD_RULE: Final = Rule(keys=WORLD, read=world_fields, fields=("devices",))


def trainer_batches(settings: Mapping[str, Any]) -> Fields:
    """The Trainer's defaults are 8 sequences per device and no accumulation. A program of a user's
    own may call its batch anything, and has none of these defaults."""
    if OWN_PROGRAM in settings and MICRO not in settings:
        return {}
    return accumulation_fields(settings, MICRO, ACCUMULATION, default_micro=8)


_QLORA: Final = "use_qlora"
"""The switch of open-instruct's programs for adapters on weights in 4 bits, whose products are in
bf16."""
_HALF_KEYS: Final = ("bf16", "fp16", "fp8", "torch_dtype", "dtype", "pure_bf16", _QLORA)
_TORCH_TYPES: Final = words(
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


def half_of(settings: Mapping[str, Any]) -> str:
    """Element type of matrix products: that of the active switch, else fp32."""
    return next((name for name in ("fp8", "bf16", "fp16") if is_on(settings.get(name))), "fp32")


def _precision(settings: Mapping[str, Any]) -> Fields:
    """Precision by the Trainer's switches, and the type that weights are loaded in."""
    fields: Fields = {"dtype": half_of(settings)}
    if is_on(settings.get(_QLORA)) and fields["dtype"] == "fp32":
        return {"dtype": "bf16"}
    if is_on(settings.get("pure_bf16")):
        # LLaMA-Factory's pure_bf16 casts the model itself and turns autocast off.
        # without fp32 copies of the weights, which are what the optimizer's states are kept like
        return {"dtype": "bf16", "optimizer": "adam16bit", "grad_dtype": "bf16"}
    # Without a switch for autocast, products run in the type that the weights were loaded in.
    loaded = _TORCH_TYPES.read(settings.get("torch_dtype", settings.get("dtype", "auto")))
    if loaded in ("bf16", "fp16") and not any(name in settings for name in ("bf16", "fp16", "fp8")):
        fields["dtype"] = loaded
    return fields


def _packed(settings: Mapping[str, Any]) -> Fields:
    return padding_note("its longest length", any(is_on(settings.get(name)) for name in PACKINGS))


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
)
_CONFIGURATION: Final = "config_name"
_PARTS_OF_LENGTH: Final = ("max_source_length", "max_target_length")


def _length_of_parts(settings: Mapping[str, Any]) -> Fields:
    """Longest sequence of programs that cut the prompt and the answer, one after the other
    (ChatGLM's)."""
    if len(settings) < len(_PARTS_OF_LENGTH):
        return {}
    return {"seq_len": sum(WHOLE.read(length) for length in settings.values())}


_LENGTHS: Final = ("max_seq_length", "max_length", "max_seq_len", "block_size", "model_max_length")


def named_model(settings: Mapping[str, Any]) -> Fields:
    """The model by its identifier on a hub, or by the name of its folder.

    Where the configuration is taken from another place than the weights, it says what the model is.
    """
    configuration = settings.get(_CONFIGURATION)
    if isinstance(configuration, str) and "/" in configuration:
        return {"model": configuration}
    name = next((settings[key] for key in MODEL_KEYS if key in settings), configuration)
    return {"model": TEXT.read(name)}


QUANTIZED: Final = ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", _QLORA)


def bits_of(settings: Mapping[str, Any]) -> int:
    """Bits of frozen weights, from a switch or a number; 0 if not stated."""
    # bitsandbytes' switches, or a number of bits that LLaMA-Factory and Swift take for either.
    if is_on(settings.get("load_in_4bit")) or is_on(settings.get(_QLORA)):
        return 4
    if is_on(settings.get("load_in_8bit")):
        return 8
    stated = WHOLE_OR_NONE.read(settings.get("quantization_bit", settings.get("quant_bits", 0)))
    # Checkpoints that were quantized before are named after it, and no switch says it again.
    return stated or bits_by_name(
        next((settings[name] for name in MODEL_KEYS if name in settings), "")
    )


def _fused(settings: Mapping[str, Any]) -> Fields:
    """Liger's kernels of norms, rotary embeddings, activations, and of head and loss together,
    which is its default."""
    if not any(is_on(value) for value in settings.values()):
        return {}
    return {"eager_kernels": (), "chunked_loss": True, "in_place_activation": True}


_LIGER: Final = ("use_liger_kernel", "use_liger", "enable_liger_kernel")
_EVERY: Final = "activation_checkpointing_kwargs.every_n_layers"
_RECOMPUTE: Final = (
    "activation_checkpointing",
    "gradient_checkpointing",
    "fsdp_config.activation_checkpointing",
    "fsdp_config.fsdp_activation_checkpointing",
)


def _recompute(settings: Mapping[str, Any]) -> Fields:
    # The Trainer's switch and that of its FSDP block ask for the same; one of them is enough.
    requests = [value for name, value in settings.items() if name != _EVERY and is_on(value)]
    fields = checkpointing_fields(requests[0] if requests else False)
    period = settings.get(_EVERY, 1)
    if requests and period != 1:
        fields["doubt.recompute"] = (
            f"memory may be wrong: the file recomputes one of {period} layers (every_n_layers), but the "
            "prediction recomputes all"
        )
    return fields


RECOMPUTE_RULE: Final = Rule(
    keys=(*_RECOMPUTE, _EVERY), read=_recompute, defaults={"recompute": "none"}
)
"""Rule for recomputation: the switch of Transformers' Trainer, or that of its FSDP block."""


def _searched(settings: Mapping[str, Any]) -> Fields:
    if not is_on(settings["auto_find_batch_size"]):
        return {}
    return {
        "note.batch": "per_device_train_batch_size as stated; auto_find_batch_size may make it smaller"
    }


def precision_rule(default: str) -> Rule:
    """The rule for the element type, with its default."""
    return Rule(keys=_HALF_KEYS, read=_precision, fields=("dtype",), defaults={"dtype": default})


_ADAPTER_SWITCHES: Final = ("use_peft", "lora_enable", "use_lora")
"""Switches of adapters: trl's, and those of LLaVA's and Qwen's programs."""


def trains_adapters(settings: Mapping[str, Any]) -> bool:
    """Whether a program of the Trainer trains adapters beside frozen weights: it has settings of
    theirs, and none of its switches is off."""
    stated = any(name in settings for name in (*_ADAPTER_SWITCHES, "lora_r", "lora_rank"))
    return stated and all(is_on(settings.get(name, True)) for name in _ADAPTER_SWITCHES)


def _frozen_weights(settings: Mapping[str, Any], loaded: str | None) -> Fields:
    """Storage of the weights beside adapters, which autocast leaves as they were loaded.

    Transformers 4 loads them in fp32 unless a dtype is given, as TRL does (`ModelConfig.dtype`),
    Transformers 5 in the type of the checkpoint; DeepSpeed's engine casts them (`bf16.enabled`).
    """
    is_narrow = any(is_on(settings.get(name)) for name in ("bf16", "fp16"))
    if not is_narrow or is_on(settings.get("deepspeed")) or bits_of(settings):
        return {}
    if loaded == "fp32":
        return {"base_weights": "fp32"}
    if any(name in settings for name in ("torch_dtype", "dtype", "config_file")):
        return {}
    return {
        "note.loaded": (
            "frozen weights are in 16 bits, because the file does not state torch_dtype; Transformers 4 and TRL "
            "load them in 32 by default, which takes twice as much memory"
        )
    }


def _loaded_states(settings: Mapping[str, Any]) -> Fields:
    """Gradients and moments of a model that is loaded in 16 bits, and frozen weights.

    They have the type of its weights, which autocast leaves alone. DeepSpeed and Accelerate's FSDP
    make fp32 copies of the weights, and peft keeps those of adapters in fp32.
    """
    loaded = _TORCH_TYPES.read(settings.get("torch_dtype", settings.get("dtype", "auto")))
    if trains_adapters(settings):
        return _frozen_weights(settings, loaded)
    is_sharded = bool(fsdp_fields({name: settings[name] for name in FSDP_KEYS if name in settings}))
    if (
        loaded != "bf16"
        or is_sharded
        or any(is_on(settings.get(name)) for name in ("deepspeed", "config_file"))
    ):
        return {}
    optimizer = optimizer_fields(settings.get("optim", "adamw_torch"))
    if optimizer.get("optimizer") != "adam":
        return {}
    return {"optimizer": "adam16bit", "grad_dtype": "bf16"}


SHARDING_RULE: Final = Rule(keys=FSDP_KEYS, read=fsdp_fields, fields=("zero",))
EVALUATIONS: Final = ("do_predict", "do_eval")
"""Switches of what a run does besides training, or instead of it where `do_train` is not on."""


def only_evaluates(settings: Mapping[str, Any]) -> bool:
    """Whether settings are those of a run that predicts or evaluates. Programs that always train
    have a batch to train with."""
    evaluates = any(is_on(settings.get(name)) for name in EVALUATIONS)
    return evaluates and not is_on(settings.get("do_train")) and MICRO not in settings


def _require_training(settings: Mapping[str, Any]) -> Fields:
    if only_evaluates(settings):
        raise BadValue(
            "without do_train predicts or evaluates; give the settings of a run that trains"
        )
    return {}


SHARED: Final = (
    Rule(keys=(*EVALUATIONS, "do_train", MICRO), read=_require_training),
    # How many processes run, and what each of them keeps.
    WORLD_RULE,
    SHARDING_RULE,
    optimizer_rule("optim"),
    # Kernels.
    Rule(keys=_LIGER, read=_fused),
    Rule(keys=("auto_find_batch_size",), read=_searched),
    # States no field, but chooses the framework (`torch_framework`).
    Rule(keys=("torch_compile",), read=lambda settings: {}),
    read_only("use_flash_attn", "flash_attention", ATTENTION),
    read_only("attn_implementation", "flash_attention", ATTENTION),
    # Files that are read before the table is (`with_named_files`).
    Rule(keys=("deepspeed", "config_file"), read=lambda settings: {}),
)
"""Rules of the Trainer's own arguments."""
HARMLESS: Final = patterns(
    "*dataset* num_train_epochs *epochs* *samples* *template* data_seed *dataloader* *tokenizer*",
    "remove_unused_columns *preprocessing* label_* chat_template* *system* *split* streaming *prompt* image_*",
    "video_* average_tokens_across_devices *_token ignore_data_skip data_path data_files packing_*",
    "pad_to_multiple_of train_file validation_file eos_token length_column_name load_data_args",
    "truncation_strategy mask_history train_on_prompt lazy_tokenize",
    "*_steps *_strategy report_to run_name *hub* plot_loss logging* include_num_* include_inputs* metric_for*",
    "include_for_metrics include_tokens_per_second disable_tqdm log_*",
    "push_to_hub* model_author project batch_eval_metrics skip_memory_metrics debug add_version",
    "freeze_multi_modal_projector",
    "output_dir overwrite_* resume_from_checkpoint cache_dir *_cache load_best_model_at_end",
    "*_checkpointing_kwargs* place_model_on_device load_args create_checkpoint_symlink export_*",
    "offload_folder use_kv_cache",
    "*learning_rate* max_grad_norm seed *beta* *weight_decay* warmup* neftune_* lora_alpha lr_scheduler*",
    "optim_args adam_* prediction_loss_only loss_scale sft_alpha",
    "lora_dropout *lora_plus* loraplus_* use_rslora lora_bias lora_task_type bnb_* adapter_name_or_path",
    "double_quantization quantization_method quantization_type use_peft freeze_vit freeze_aligner",
    "freeze_vision_tower",
    "ddp_* fsdp_config.*_wrap* fsdp_config.*cpu_ram* fsdp_config.*prefetch* fsdp_config.*state_dict*",
    "fsdp_config.*use_orig* fsdp_config.*sync_module* fsdp_config.xla* fsdp_config.min_num_params",
    "fsdp_config.*limit_all_gathers accelerator_config* per_device_eval_batch_size device_map main_process_port",
    "machine_rank deepspeed_multinode_launcher parallelism_config* fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params local_rank enable_deepspeed_config* ray_*",
    "do_* trust_remote_code *_num_workers *_num_proc val_size tf32 *revision* greater_* bf16_full_eval",
    "fp16_full_eval upcast_* use_cpu low_cpu_mem_usage rope_scaling* half_precision_backend torch_compile_*",
    "use_reentrant_gc no_cuda <script> config task_type liger_kernel_config* jit_mode_eval past_index model_type",
    "mp_parameters use_legacy* tp_size hf_* prefix custom_register_path check_model strict *_freq acc_*",
    "ring_head_stride sequential ignore_args_error use_hf train_from_scratch infer_* model_kwargs*",
)
"""Arguments that change neither time nor memory of a step: data, logs, checkpoints, learning
rates."""


_CHAT_ADAPTERS: Final = ("lora_dim", "lora_module_name", "only_optimize_lora")
_TRAINS_ADAPTERS: Final = re.compile(
    r"(^|[^a-z])(q?lora|dora|peft|adapters?)([^a-z]|$)", re.IGNORECASE
)
"""Names of programs that train adapters."""
_TRL_ADAPTERS: Final = (
    *_ADAPTER_SWITCHES,
    "lora_r",
    "lora_rank",
    "lora_target_modules",
    "lora_dropout",
    *_CHAT_ADAPTERS,
    *QUANTIZED,
)


def _chat_adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA in DeepSpeed-Chat's notation (dschat/utils/module/lora.py): on every product of the
    layers; rank 0 means none."""
    rank = WHOLE_OR_NONE.read(settings["lora_dim"])
    if not rank:
        return {}
    fields = Adapters(rank=rank, targets="all").fields
    if not is_on(settings.get("only_optimize_lora", False)):
        fields["doubt.trained"] = (
            "what is trained may be wrong: without only_optimize_lora, embeddings and norms are "
            "trained as well as adapters, but the prediction freezes them"
        )
    return fields


def _trl_adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA in the notation of trl's `ModelConfig`; its switch, if stated, must be on."""
    if "lora_dim" in settings:
        return _chat_adapters(settings)
    stated = any(name in settings for name in (*_ADAPTER_SWITCHES, "lora_r", "lora_rank"))
    trained = trains_adapters(settings)
    # LLaVA's program has a higher rank than trl (`llava/train/train.py`).
    usual_rank = 64 if "lora_enable" in settings else 16
    # trl drops every other setting of adapters without `use_peft`; scripts of their own often have
    # only the ranks.
    bits = bits_of(settings)
    program = str(settings.get(PROGRAM, ""))
    if not stated and not bits and _TRAINS_ADAPTERS.search(program):
        return {
            "doubt.trained": f"what is trained may be wrong: the name of {program} suggests "
            "adapters, but none of its arguments for them was understood; all weights are "
            "predicted to be trained"
        }
    if trained:
        rank = settings.get("lora_r", settings.get("lora_rank", usual_rank))
        return Adapters(
            rank=rank,
            targets=settings.get("lora_target_modules"),
            dropout=settings.get("lora_dropout"),
            bits=bits,
        ).fields
    if bits:
        return {
            "doubt.trained": f"what is trained may be wrong: weights in {bits} bits are frozen, but "
            "the file names no adapters"
        }
    return {}


_PREFERENCES: Final = ("beta", "max_prompt_length", "max_completion_length", "num_generations")
"""Arguments that only trl's configurations of preference tuning and reinforcement have."""


def _objective(settings: Mapping[str, Any]) -> Fields:
    """Preference tuning and reinforcement, by the name of the program or by arguments that only
    they have."""
    fields = objective_fields(settings.get(PROGRAM, ""), "the program")
    if fields or all(name == PROGRAM for name in settings):
        return fields
    name = next(name for name in settings if name != PROGRAM)
    return {
        "doubt.stage": (
            f"what is trained may be wrong: {name} belongs to training that runs further models or passes, but plain "
            "fine-tuning is predicted"
        )
    }


def _own_program(settings: Mapping[str, Any]) -> Fields:
    return {
        "note.program": (
            f"perfmodel does not know {settings[OWN_PROGRAM]} and assumes the usual meaning of "
            "its arguments: batch "
            "size per device and pass, and sequences of full length"
        )
    }


TRAINER: Final = LaunchFormat(
    name="hf-trainer",
    syntax="yaml",
    frameworks=("hf-trainer",),
    framework=torch_framework,
    marks=(MICRO,),
    table=(
        *SHARED,
        precision_rule("fp32"),
        Rule(keys=(MICRO, ACCUMULATION, OWN_PROGRAM), read=trainer_batches),
        Rule(keys=(*MODEL_KEYS, _CONFIGURATION), read=named_model, fields=("model",)),
        Rule(keys=_PARTS_OF_LENGTH, read=_length_of_parts, fields=("seq_len",)),
        read_only(_LENGTHS[0], "seq_len"),
        *(read_only(name, "seq_len") for name in _LENGTHS[1:]),
        Rule(
            keys=(*_TRL_ADAPTERS, *MODEL_KEYS, PROGRAM),
            read=_trl_adapters,
            fields=("adapter_rank",),
        ),
        Rule(
            keys=(
                *("optim", "deepspeed", "config_file", "lora_r", "lora_rank"),
                *(name for name in _HALF_KEYS if name != _QLORA),
                *_ADAPTER_SWITCHES,
                *FSDP_KEYS,
                *QUANTIZED,
                *MODEL_KEYS,
            ),
            read=_loaded_states,
        ),
        Rule(keys=PACKINGS, read=_packed),
        RECOMPUTE_RULE,
        Rule(keys=(OWN_PROGRAM,), read=_own_program),
        read_only(TENSOR, "tp"),
        Rule(keys=(PROGRAM, *_PREFERENCES), read=_objective),
        Rule(
            keys=("ring_attn_size",),
            fields=("cp",),
            read=lambda settings: sharded_sequences(settings["ring_attn_size"], "ring"),
        ),
    ),
    harmless=HARMLESS,
)


_OLD_SWIFT: Final = ("batch_size", "lora_target_modules", "model_type")
"""Arguments of Swift's versions 1 and 2 that have other names since."""
_OLD_TARGETS: Final = {"ALL": "all-linear", "AUTO": "all-linear", "DEFAULT": "q_proj k_proj v_proj"}
"""Words of these versions for products with adapters; by default those of queries, keys and
values."""


def _names_old_model(settings: Mapping[str, Any]) -> bool:
    """Whether `model_type` names a model with its size (`qwen1half-7b-chat`), as in versions 1 and
    2; since then it names an architecture."""
    kind = str(settings.get("model_type", ""))
    return (
        "model" not in settings
        and re.search(r"(^|[-_])\d+(\.\d+|_\d+)?b([-_]|$)", kind) is not None
    )


def _is_old_swift(settings: Mapping[str, Any]) -> bool:
    """Whether arguments are of Swift's versions 1 and 2 (`swift/llm/utils/argument.py`)."""
    return any(name in settings for name in _OLD_SWIFT[:2]) or _names_old_model(settings)


def _swift_model(settings: Mapping[str, Any]) -> Fields:
    if any(name in settings for name in MODEL_KEYS):
        return named_model({name: settings[name] for name in MODEL_KEYS if name in settings})
    if not _names_old_model(settings):
        return {}
    return {"model": str(settings["model_type"]).replace("1half", "1.5")}


def _old_length(settings: Mapping[str, Any]) -> Fields:
    """The longest sequence of versions 1 and 2 where nothing says it."""
    if "max_length" in settings or not _is_old_swift(settings):
        return {}
    return {"seq_len": 2048, "note.length": "max_length=2048 (default of Swift's versions 1 and 2)"}


def _swift_tuning(settings: Mapping[str, Any]) -> Fields:
    # The argument was renamed twice; all three names are still taken.
    key = next((name for name in _SWIFT_KINDS if name in settings), _SWIFT_KINDS[0])
    default = "DEFAULT" if _is_old_swift(settings) else "all-linear"
    targets = settings.get("target_modules", settings.get("lora_target_modules", default))
    adapters = Adapters(
        rank=settings.get("lora_rank", settings.get("lora_r", 8)),
        targets=_OLD_TARGETS.get(targets, targets) if isinstance(targets, str) else targets,
        dropout=settings.get("lora_dropout", 0.05),
        bits=bits_of(settings),
    )
    return tuning_fields(settings.get(key, "lora"), key, adapters)


def _swift_batches(settings: Mapping[str, Any]) -> Fields:
    """Batches of Swift, which by default accumulates to 16 sequences per step
    (`swift/llm/argument/train_args.py`)."""
    micro = WHOLE.read(settings.get(MICRO, settings.get("batch_size", 1)))
    if ACCUMULATION in settings:
        return {"micro_batch": micro, "grad_accum": WHOLE.read(settings[ACCUMULATION])}
    devices = world_fields({name: settings[name] for name in WORLD if name in settings}).get(
        "devices"
    )
    if devices is None:
        note = f"{ACCUMULATION}=1 is assumed; if the file does not state it, Swift accumulates up to 16 sequences"
        return {"micro_batch": micro, "grad_accum": 1, "note.accumulation": note}
    # Ranks that share a sequence are one replica.
    ranks = devices // WHOLE.read(settings.get("sequence_parallel_size", 1))
    return {"micro_batch": micro, "grad_accum": max(1, -(-16 // max(1, micro * ranks)))}


def _rlhf(settings: Mapping[str, Any]) -> Fields:
    return objective_fields(settings["rlhf_type"], "rlhf_type")


_HEADS: Final = ("embedding", "seq_cls", "reranker")
"""Tasks of Swift whose model has no head over the vocabulary."""


def _head(settings: Mapping[str, Any]) -> Fields:
    task = str(settings["task_type"]).lower()
    if task not in _HEADS:
        return {}
    return {
        "doubt.head": f"the model may be wrong: task_type={task} has no head over the vocabulary, but the prediction does"
    }


_SWIFT_KINDS: Final = ("tuner_type", "train_type", "sft_type")
SWIFT: Final = LaunchFormat(
    name="ms-swift",
    syntax="yaml",
    frameworks=("ms-swift",),
    framework=torch_framework,
    marks=(*_SWIFT_KINDS, "model_id_or_path"),
    table=(
        *SHARED,
        # Swift loads weights in the checkpoint's type, which is bf16 of nearly all, and computes in
        # it.
        precision_rule("bf16"),
        Rule(
            keys=(
                MICRO,
                ACCUMULATION,
                *WORLD,
                "sequence_parallel_size",
                "model",
                "model_id_or_path",
                *_OLD_SWIFT,
            ),
            read=_swift_batches,
        ),
        Rule(keys=(*MODEL_KEYS, "model_type"), read=_swift_model, fields=("model",)),
        read_only("max_length", "seq_len"),
        Rule(keys=("max_length", "model", *_OLD_SWIFT), read=_old_length),
        Rule(
            keys=(
                *_SWIFT_KINDS,
                "lora_rank",
                "lora_r",
                "lora_dropout",
                "target_modules",
                *MODEL_KEYS,
                *QUANTIZED,
                *_OLD_SWIFT,
            ),
            read=_swift_tuning,
            fields=("adapter_rank",),
        ),
        Rule(keys=(*PACKINGS, "max_length"), read=_packed),
        Rule(
            keys=("activation_checkpointing", "gradient_checkpointing"),
            read=_recompute,
            defaults={"recompute": "full"},
        ),
        read_only("attn_impl", "flash_attention", ATTENTION),
        Rule(
            keys=("sequence_parallel_size",),
            fields=("cp",),
            read=lambda settings: sharded_sequences(settings["sequence_parallel_size"], "ulysses"),
        ),
        Rule(keys=("rlhf_type",), read=_rlhf),
        Rule(keys=("task_type",), read=_head),
    ),
    harmless=HARMLESS,
)
