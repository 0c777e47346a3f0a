"""Arguments of Hugging Face's Trainer, from YAML, JSON or the flags of a command.

`transformers/training_args.py`; trl `SFTConfig` and `ModelConfig`. Programs that extend the Trainer
have modules of their own: MS-Swift (`_swift`), LLaMA-Factory (`_llama_factory`).
"""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import (
    ATTENTION,
    FSDP_KEYS,
    accumulation_fields,
    checkpointing_fields,
    fsdp_fields,
    is_on,
    objective_fields,
    optimizer_rule,
    padding_note,
    sharded_sequences,
    torch_framework,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._table import TEXT, WHOLE, BadValue, Fields, Rule, read_only
from perfmodel.ingest.launch._trainer_adapters import (
    ADAPTER_SWITCHES,
    TRL_ADAPTERS,
    loaded_states,
    trl_adapters,
)
from perfmodel.ingest.launch._trainer_names import (
    ACCUMULATION,
    DEFAULTS,
    HALF_ASSUMED,
    KNOWN,
    MICRO,
    MODEL_KEYS,
    OF_TRL,
    OF_TRL_TUNING,
    OWN_PROGRAM,
    PACKINGS,
    PROGRAM,
    QLORA,
    QUANTIZED,
    TENSOR,
    TORCH_TYPES,
    TRL_GENERATES,
    TRL_LENGTH,
    WORLD,
)


def _number(settings: Mapping[str, Any], *names: str) -> int | None:
    """The value of the first of several settings that is stated."""
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
    """Batch per device and accumulation, by default 8 sequences and no accumulation; a user's own
    program has no such defaults."""
    if OWN_PROGRAM in settings and MICRO not in settings:
        return {}
    return accumulation_fields(settings, MICRO, ACCUMULATION, default_micro=8)


_HALF_KEYS: Final = ("bf16", "fp16", "fp8", "torch_dtype", "dtype", "pure_bf16", QLORA)


def half_of(settings: Mapping[str, Any]) -> str:
    """Element type of matrix products: that of the active switch, else fp32."""
    return next((name for name in ("fp8", "bf16", "fp16") if is_on(settings.get(name))), "fp32")


def _precision(settings: Mapping[str, Any]) -> Fields:
    """Precision by the Trainer's switches, and the type that weights are loaded in."""
    fields: Fields = {"dtype": half_of(settings)}
    if is_on(settings.get(QLORA)) and fields["dtype"] == "fp32":
        return {"dtype": "bf16"}
    if is_on(settings.get("pure_bf16")):
        # LLaMA-Factory's pure_bf16 casts the model itself and turns autocast off.
        # without fp32 copies of the weights, which are what the optimizer's states are kept like
        return {"dtype": "bf16", "optimizer": "adam16bit", "grad_dtype": "bf16"}
    # Without a switch for autocast, products run in the type that the weights were loaded in.
    loaded = TORCH_TYPES.read(settings.get("torch_dtype", settings.get("dtype", "auto")))
    if loaded in ("bf16", "fp16") and not any(name in settings for name in ("bf16", "fp16", "fp8")):
        fields["dtype"] = loaded
    return fields


def packing_fields(settings: Mapping[str, Any]) -> Fields:
    return padding_note("its longest length", any(is_on(settings.get(name)) for name in PACKINGS))


_CONFIGURATION: Final = "config_name"
_PARTS_OF_LENGTH: Final = ("max_source_length", "max_target_length")


def _length_of_parts(settings: Mapping[str, Any]) -> Fields:
    """Longest sequence of programs that cut the prompt and the answer, one after the other
    (ChatGLM's)."""
    if len(settings) < len(_PARTS_OF_LENGTH):
        return {}
    return {"seq_len": sum(WHOLE.read(length) for length in settings.values())}


_LENGTHS: Final = ("max_seq_length", "max_length", "max_seq_len", "block_size", "model_max_length")


def _length_of_trl(settings: Mapping[str, Any]) -> Fields:
    """The length at which trl cuts sequences where nothing says it (`max_length` of `SFTConfig`,
    `DPOConfig` and others)."""
    program = str(settings.get(PROGRAM, ""))
    if len(settings) > 1 or not OF_TRL.search(program) or TRL_GENERATES.search(program):
        return {}
    return {
        "seq_len": TRL_LENGTH,
        "note.length": f"seq_len={TRL_LENGTH:,} (trl's default max_length; --seq-len sets another)",
    }


_TRL_SWITCHES: Final = ("bf16", "fp16", "gradient_checkpointing")


def _switches_of_trl(settings: Mapping[str, Any]) -> Fields:
    """Precision and recomputation of trl's trainers where no switch says them.

    Since version 0.20 `SFTConfig` and its relatives recompute, and compute in bf16 unless fp16 is
    on (trl/trainer/base_config.py; a bf16 of None is one that nothing states).
    """
    if not OF_TRL.search(str(settings.get(PROGRAM, ""))):
        return {}
    fields: Fields = {}
    if settings.get("bf16") is None and not is_on(settings.get("fp16")):
        fields["dtype"] = "bf16"
    if "gradient_checkpointing" not in settings:
        fields["recompute"] = "full"
    if not fields:
        return {}
    settled = ", ".join(f"{name}={value}" for name, value in fields.items())
    note = f"{settled} (trl's defaults since 0.20; earlier ones are fp32 and none)"
    return fields | {"note.switches": note}


_TRL_LOSS: Final = "loss_type"


def _loss_of_trl(settings: Mapping[str, Any]) -> Fields:
    """Whether trl's plain fine-tuning computes its loss chunk by chunk, so that the scores of a
    whole batch are never kept (`loss_type` of trl/trainer/sft_config.py)."""
    if not OF_TRL_TUNING.search(str(settings.get(PROGRAM, ""))):
        return {}
    stated = settings.get(_TRL_LOSS)
    if stated is not None:
        return {"chunked_loss": str(stated) == "chunked_nll"}
    note = (
        "chunked_loss=true (trl's default of 2026; earlier versions keep the scores of all tokens)"
    )
    return {"chunked_loss": True, "note.loss": note}


def named_model(settings: Mapping[str, Any]) -> Fields:
    """The model by its identifier on a hub, or by the name of its folder.

    Where the configuration is taken from another place than the weights, it says what the model is.
    """
    configuration = settings.get(_CONFIGURATION)
    if isinstance(configuration, str) and "/" in configuration:
        return {"model": configuration}
    name = next((settings[key] for key in MODEL_KEYS if key in settings), configuration)
    return {"model": TEXT.read(name)}


def _fused(settings: Mapping[str, Any]) -> Fields:
    """Fused kernels of Liger: norms, rotary embeddings, activations, and (by default) the head with
    the loss."""
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


def recompute_fields(settings: Mapping[str, Any]) -> Fields:
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
    keys=(*_RECOMPUTE, _EVERY), read=recompute_fields, defaults={"recompute": "none"}
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


SHARDING_RULE: Final = Rule(keys=FSDP_KEYS, read=fsdp_fields, fields=("zero",))
_FUSED_ATTENTION: Final = ("use_flash_attn", "flash_attn", "use_flash_attention", "xformers")
"""Switches of programs (FastChat's and its followers') for kernels of fused attention."""


def _attention(settings: Mapping[str, Any]) -> Fields:
    return {"flash_attention": any(ATTENTION.read(value) for value in settings.values())}


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
    Rule(keys=_FUSED_ATTENTION, read=_attention, fields=("flash_attention",)),
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
    "input_key output_key label_key pretrain_mode",
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


_PREFERENCES: Final = ("beta", "max_prompt_length", "max_completion_length", "num_generations")
"""Arguments that only trl's configurations of preference tuning and reinforcement have."""


def _objective(settings: Mapping[str, Any]) -> Fields:
    """Preference tuning and reinforcement, by the name of the program or by arguments that only
    they have."""
    fields = objective_fields(settings.get(PROGRAM, ""))
    if fields or all(name == PROGRAM for name in settings):
        return fields
    name = next(name for name in settings if name != PROGRAM)
    return {
        "doubt.stage": (
            f"the training method may be wrong: {name} belongs to training that runs further models or passes, but plain "
            "fine-tuning is predicted"
        )
    }


def _own_program(settings: Mapping[str, Any]) -> Fields:
    """The note on a program whose arguments are not known, or on the defaults of a known one."""
    defaults = settings.get(DEFAULTS)
    if defaults is not None:
        return {} if defaults == KNOWN else {"note.program": defaults}
    return {
        "note.program": (
            f"perfmodel does not know {settings[OWN_PROGRAM]} and assumes the usual meaning of "
            "its arguments: batch "
            "size per device and pass, and sequences of full length"
        )
    }


def _half_assumed(settings: Mapping[str, Any]) -> Fields:
    return {"note.dtype": f"dtype={settings[HALF_ASSUMED]} (the command states no precision)"}


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
        Rule(
            keys=(PROGRAM, *_LENGTHS, *_PARTS_OF_LENGTH),
            read=_length_of_trl,
            fields=("seq_len",),
        ),
        read_only(_LENGTHS[0], "seq_len"),
        *(read_only(name, "seq_len") for name in _LENGTHS[1:]),
        Rule(
            keys=(*TRL_ADAPTERS, *MODEL_KEYS, PROGRAM),
            read=trl_adapters,
            fields=("adapter_rank",),
        ),
        Rule(
            keys=(
                *("optim", "deepspeed", "config_file", "lora_r", "lora_rank"),
                *(name for name in _HALF_KEYS if name != QLORA),
                *ADAPTER_SWITCHES,
                *FSDP_KEYS,
                *QUANTIZED,
                *MODEL_KEYS,
            ),
            read=loaded_states,
        ),
        Rule(keys=PACKINGS, read=packing_fields),
        RECOMPUTE_RULE,
        Rule(keys=(PROGRAM, *_TRL_SWITCHES), read=_switches_of_trl),
        Rule(keys=(PROGRAM, _TRL_LOSS), read=_loss_of_trl),
        Rule(keys=(OWN_PROGRAM, DEFAULTS), read=_own_program),
        Rule(keys=(HALF_ASSUMED,), read=_half_assumed),
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
