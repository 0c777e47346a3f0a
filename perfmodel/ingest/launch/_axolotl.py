"""axolotl's YAML (`axolotl/utils/schemas` of axolotl-ai-cloud/axolotl)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._finetuning import (
    ATTENTION,
    FSDP_KEYS,
    Adapters,
    accumulation_fields,
    bits_by_name,
    fsdp_fields,
    is_on,
    mesh_rule,
    method_fields,
    optimizer_fields,
    padding_note,
    sharded_sequences,
    torch_framework,
    tuning_fields,
)
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._table import TEXT, WHOLE, Fields, Rule, key, read_only
from perfmodel.ingest.launch._trainer import RECOMPUTE_RULE, WORLD_RULE, half_of

_HALVES: Final = ("bf16", "fp16", "fp8", "bfloat16", "float16")


def _dtype(settings: Mapping[str, Any]) -> str:
    """Element type; `bfloat16` and `float16` are the switches without autocast."""
    if is_on(settings.get("bfloat16")):
        return "bf16"
    if is_on(settings.get("float16")):
        return "fp16"
    return half_of(settings)


def _states(settings: Mapping[str, Any]) -> Fields:
    """Optimizer, and the element type of its states.

    Weights are loaded in the type of the products. DeepSpeed and Accelerate's FSDP make fp32 copies
    of them; without either, weights, gradients and moments have the type that was loaded
    (`axolotl/loaders/model.py`, `torch_dtype`).
    """
    fields = optimizer_fields(settings.get("optimizer", "adamw_torch_fused"))
    is_sharded = bool(fsdp_fields({name: settings[name] for name in FSDP_KEYS if name in settings}))
    if _dtype(settings) != "bf16" or is_sharded or is_on(settings.get("deepspeed")):
        return fields
    # peft keeps weights of adapters in fp32, so that only full fine-tuning has states in 16 bits.
    if fields.get("optimizer") == "adam" and not is_on(settings.get("adapter")):
        fields["optimizer"] = "adam16bit"
    return fields | {"grad_dtype": "bf16"}


def _tuning(settings: Mapping[str, Any]) -> Fields:
    """Trained weights: all of them if no adapter is named."""
    adapter = settings.get("adapter")
    if not is_on(adapter):
        return {}
    # `qlora` implies 4 bits; plain LoRA may load the weights in either.
    bits = bits_by_name(settings.get("base_model", ""))
    if adapter == "qlora" or is_on(settings.get("load_in_4bit")):
        bits = 4
    targets = settings.get("lora_target_modules")
    if is_on(settings.get("lora_target_linear")):
        targets = "all-linear"
    adapters = Adapters(
        rank=settings.get("lora_r", 8),
        targets=targets,
        dropout=settings.get("lora_dropout", 0),
        bits=8 if is_on(settings.get("load_in_8bit")) else bits,
    )
    fields = tuning_fields(adapter, "adapter", adapters)
    if adapters.targets is None and "adapter_rank" in fields:
        fields["note.adapters"] = (
            "adapters on the products of attention (the file names neither lora_target_modules nor lora_target_linear)"
        )
    return fields


_PACKING: Final = "sample_packing"


def _filled(settings: Mapping[str, Any]) -> Fields:
    """Whether sequences have full length, as when they are packed or are pre-training text."""
    is_packed = is_on(settings.get(_PACKING)) or is_on(settings.get("pretraining_dataset"))
    return padding_note("sequence_len", is_packed)


_KERNELS: Final = {
    "flash_attention": True,
    "sdp_attention": True,
    "xformers_attention": True,
    "flex_attention": True,
    "eager_attention": False,
}
"""Switches of attention, and whether its kernel is fused."""


def _attention(settings: Mapping[str, Any]) -> Fields:
    chosen = next((name for name in _KERNELS if is_on(settings.get(name))), None)
    return {} if chosen is None else {"flash_attention": _KERNELS[chosen]}


_LIGER: Final = (
    "liger_rope",
    "liger_rms_norm",
    "liger_glu_activation",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)


def _fused(settings: Mapping[str, Any]) -> Fields:
    """Liger's kernels: those of norms, rotary embeddings and activations together, and its loss
    with the gradient."""
    # Jobs know eager kernels as one group: it is fused if the norms and rotary embeddings of every
    # layer are.
    needed = (is_on(settings.get("liger_rms_norm")), is_on(settings.get("liger_rope")))
    stated: Fields = {"eager_kernels": ()} if all(needed) else {}
    if is_on(settings.get("liger_glu_activation")) or is_on(settings.get("liger_swiglu")):
        stated |= {"in_place_activation": True}
    if is_on(settings.get("liger_fused_linear_cross_entropy")):
        return stated | {"chunked_loss": True}
    if is_on(settings.get("liger_cross_entropy")):
        return stated | {"loss_with_gradient": True}
    return stated


_REWARDS: Final = ("reward_model", "process_reward_model")
"""Switches of models that score a text, of which `reward_model` takes texts in pairs."""


def _further_fields(settings: Mapping[str, Any]) -> Fields:
    """Preference tuning, reinforcement and reward models, whose every word is one of these."""
    fields = method_fields(settings.get("rl"), "rl", ())
    for switch in _REWARDS:
        if is_on(settings.get(switch)):
            fields["doubt.stage"] = (
                f"the training method may be wrong: {switch} trains a model that scores texts, some of them in pairs, but "
                "plain fine-tuning is predicted"
            )
    return fields


_CUT: Final = ("plugins", "cut_cross_entropy")
_PLUGINS: Final = (
    "CutCrossEntropy",
    "ExpertParallel",
    "Liger",
    "LMEval",
    "Spectrum",
    "LLMCompressor",
    "Grokfast",
    "Swanlab",
    "SwanLab",
)
"""Plugins whose own keys say what they change, or that change no step."""


def _is_known_plugin(name: str) -> bool:
    """Whether a plugin's path contains the name of one whose effect is known."""
    return any(known in name for known in _PLUGINS)


def _cut_loss(settings: Mapping[str, Any]) -> Fields:
    """Cut cross-entropy, which never holds all logits: a plugin that is on unless its own switch
    turns it off."""
    plugins = " ".join(map(str, as_list(settings.get("plugins") or ())))
    is_asked = "CutCrossEntropy" in plugins or is_on(settings.get("cut_cross_entropy"))
    fields: Fields = {}
    if is_asked and is_on(settings.get("cut_cross_entropy", True)):
        fields["chunked_loss"] = True
    unknown = [name for name in plugins.split() if not _is_known_plugin(name)]
    if unknown:
        fields["doubt.plugins"] = (
            f"everything may be wrong: perfmodel does not know how the plugin {', '.join(unknown)} changes the training"
        )
    return fields


def _offloaded_inputs(settings: Mapping[str, Any]) -> Fields:
    """Inputs of layers that wait for backward in host memory, as for
    `gradient_checkpointing: offload`."""
    if not is_on(settings["activation_offloading"]):
        return {}
    note = "activation_offloading copies the inputs of layers to the host, but the prediction keeps them on the device"
    return {"note.checkpoints": note}


def _ray_workers(settings: Mapping[str, Any]) -> Fields:
    """A process per worker of Ray, each with a device."""
    is_used = is_on(settings.get("use_ray")) and "ray_num_workers" in settings
    return {"devices": WHOLE.read(settings["ray_num_workers"])} if is_used else {}


_CONTEXT: Final = ("context_parallel_size", "sequence_parallel_degree")

AXOLOTL: Final = LaunchFormat(
    name="axolotl",
    syntax="yaml",
    frameworks=("axolotl",),
    framework=torch_framework,
    marks=("sequence_len", "sample_packing", "base_model"),
    table=(
        WORLD_RULE,
        Rule(keys=("use_ray", "ray_num_workers"), read=_ray_workers, fields=("devices",)),
        # Keys of the model and of training (src/axolotl/utils/schemas/config.py).
        read_only("base_model", "model", TEXT),
        key("sequence_len", "seq_len", default=512, write=lambda fields: {}),
        Rule(
            keys=("micro_batch_size", "gradient_accumulation_steps"),
            fields=("micro_batch",),
            read=lambda settings: accumulation_fields(
                settings, "micro_batch_size", "gradient_accumulation_steps", 1
            ),
        ),
        # Sharding, precision, and what the optimizer keeps, which depends on both.
        Rule(keys=FSDP_KEYS, read=fsdp_fields, fields=("zero",)),
        Rule(
            keys=_HALVES,
            read=lambda settings: {"dtype": _dtype(settings)},
            fields=("dtype",),
            auto_keys=("bf16",),
            defaults={"dtype": "bf16"},
        ),
        Rule(
            keys=("optimizer", *_HALVES, *FSDP_KEYS, "deepspeed", "adapter"),
            read=_states,
            auto_keys=("bf16",),
        ),
        Rule(
            keys=(
                "adapter",
                "base_model",
                "lora_r",
                "lora_target_modules",
                "lora_target_linear",
                "lora_dropout",
                "load_in_8bit",
                "load_in_4bit",
            ),
            read=_tuning,
            fields=("adapter_rank",),
        ),
        Rule(keys=(_PACKING, "pretraining_dataset", "sequence_len"), read=_filled),
        # Recompute and kernels.
        RECOMPUTE_RULE,
        Rule(keys=tuple(_KERNELS), read=_attention, fields=("flash_attention",)),
        read_only("attn_implementation", "flash_attention", ATTENTION),
        read_only("attention", "flash_attention", ATTENTION),
        Rule(keys=_LIGER, read=_fused),
        Rule(keys=_CUT, read=_cut_loss, optional=_CUT),
        Rule(keys=("activation_offloading",), read=_offloaded_inputs),
        Rule(keys=("torch_compile",), read=lambda settings: {}),
        Rule(keys=("rl", *_REWARDS), read=_further_fields),
        # ring attention of the ring-flash-attn package
        Rule(
            keys=_CONTEXT,
            fields=("cp",),
            read=lambda settings: sharded_sequences(next(iter(settings.values())), "ring"),
        ),
        read_only("tensor_parallel_size", "tp"),
        mesh_rule("dp_shard_size", "dp_replicate_size", "expert_parallel_size"),
    ),
    harmless=patterns(
        "*dataset* *epochs* *_per_epoch *learning_rate* lr_scheduler* warmup* weight_decay *wandb*",
        "val_set_size output_dir special_tokens* tokens* tokenizer* model_type *_steps *_token*",
        "train_on_inputs *chat_template* pad_to_sequence_len group_by_length strict tf32 *hub* lora_alpha",
        "lora_dropout lora_fan_in_fan_out lora_model_dir max_grad_norm *seed* resume_from_checkpoint",
        "auto_resume* trust_remote_code gradient_checkpointing_kwargs* logging* *mlflow* *comet*",
        "early_stopping* save_* eval_* dataloader* *_wrap* *state_dict* fsdp_config.*cpu_ram*",
        "fsdp_config.*prefetch* fsdp_config.*use_orig* fsdp_config.*sync_module*",
        "fsdp_config.*limit_all_gathers fsdp_config.*mixed_precision* is_*_derived_model max_steps adam_*",
        "cosine_* *loss* hf_use_auth_token low_cpu_mem_usage shuffle* test_datasets* flash_attn_* flex_attn_*",
        "torch_compile_* ddp_* use_tensorboard neftune* bnb_config* revision_of_model processor_type",
        "skip_prepare* remove_unused* sample_packing_* eval_sample* experts_implementation heads_k_stride",
        "ring_attn_func lora_*_kernel loraplus* optim_args* debug fp8_enable* <script>",
        "overrides_of_model_config.rope_* overrides_of_model_config.*dropout overrides_of_model_config.*_token_id",
        "overrides_of_model_config.max_position_embeddings overrides_of_model_config.use_cache",
        "overrides_of_model_kwargs* streaming* pretrain_multipack* qlora_sharded* unsloth_* profiler_steps xformers_attention",
        "s2_attention local_rank image_* deepspeed mean_resizing* min_sample_len user_name gpu_memory_limit",
    ),
)
