"""Rules for settings under the names of Megatron-Core's configuration classes."""

from typing import Final

from perfmodel.ingest.launch._megatron_settings import (
    LIMITS,
    context_rule,
    dispatch_rules,
    dropout_rule,
    graph_rule,
    mixture_rules,
    offloaded_layers_rule,
    partition_rule,
    pipeline_layout_rule,
)
from perfmodel.ingest.launch._table import FLAG, SOME, key

CONFIG_LIMITS: Final = LIMITS | {
    "schedule": "Megatron-Core runs 1f1b, and interleaved 1f1b with vpp > 1",
    "offload": "the file has no key for all activations in host memory",
    "order": "ranks are numbered tp-cp-ep-dp-pp",
}


def model_key(field: str) -> str:
    """The key of a field of Megatron-Core's configuration."""
    return f"model.{field}"


MODEL_RULES: Final = (
    # Degrees (megatron/core/model_parallel_config.py). All of them are stated per job, and dp
    # follows from the devices.
    key("model.tensor_model_parallel_size", "tp", default=1),
    key("model.pipeline_model_parallel_size", "pp", default=1),
    key("model.context_parallel_size", "cp", default=1),
    key("model.expert_model_parallel_size", "ep", default=1),
    key("model.expert_tensor_parallel_size", "etp"),
    context_rule("model.cp_comm_type"),
    # Settings of Megatron-Core that its command line has too: one rule for both notations.
    *dispatch_rules(model_key),
    graph_rule(model_key),
    offloaded_layers_rule(model_key, switch=True),
    key("model.sequence_parallel", "sequence_parallel", FLAG),
    partition_rule(
        ("model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage"),
        "model.num_layers",
        "model.pipeline_model_parallel_size",
    ),
    pipeline_layout_rule(
        "model.pipeline_model_parallel_layout", "model.pipeline_model_parallel_size"
    ),
    # Sizes (megatron/core/transformer/transformer_config.py).
    key("model.num_layers", "model.layers"),
    key("model.hidden_size", "model.hidden"),
    key("model.num_attention_heads", "model.heads"),
    key("model.num_query_groups", "model.kv_heads"),
    key("model.ffn_hidden_size", "model.ffn_hidden"),
    key("model.kv_channels", "model.head_dim"),
    dropout_rule("model.hidden_dropout", "model.attention_dropout"),
    *mixture_rules(model_key, "num_moe_experts"),
    key("model.qk_layernorm", "model.qk_norm", FLAG),
    key("model.mtp_num_layers", "model.mtp_layers", SOME),
    # NeMo 1 calls it `qkv_bias` (megatron_qwen2_config.yaml).
    key("model.add_qkv_bias", "model.qkv_bias", FLAG, also=("model.qkv_bias",)),
)
"""Rules for keys that both have: parallelism and architecture, by the names of Megatron-Core's
`TransformerConfig`."""
POSITIONS: Final = {
    "learned_absolute": "learned",
    "rope": "rope",
    "alibi": "alibi",
    "none": "none",
}
