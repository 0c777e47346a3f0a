"""Arguments of Megatron-LM and its forks that take no value, and those that change neither time nor
memory of a step.

Names that are harmless in all frameworks are in `perfmodel.ingest.launch._harm`.
"""

from typing import Final

_SWITCHES: Final = {
    "precision": "bf16 fp16 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32",
    "feed-forward": "swiglu geglu quick-geglu squared-relu use-fused-swiglu",
    "model": "group-query-attention untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm",
    "positions": "use-rotary-position-embeddings use-llama2-rotary-position-embeddings no-position-embedding",
    "more positions": "use-alibi-position-embeddings no-pos-emb kd",
    "latent attention": "multi-latent-attention multi-head-latent-attention post-norm is-hybrid-model",
    "data parallelism": "use-distributed-optimizer use-megatron-fsdp use-custom-fsdp use-torch-fsdp2",
    "overlap": "overlap-grad-reduce overlap-param-gather tp-comm-overlap overlap-moe-expert-parallel-comm",
    "overlap and schedule of forks": "moe-fb-overlap use-dualpipev",
    "order and pipeline": "sequence-parallel use-tp-pp-dp-mapping no-pipeline-parallel",
    "attention": "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
    "recompute": "recompute-activations checkpoint-activations recompute-activation-function recompute-norm",
    "generation": "use-mcore-models use-legacy-models deepspeed",
    "megablocks": "moe-expert-model-parallelism",
    "experts": "moe-grouped-gemm moe-enable-deepep moe-pad-expert-input-to-capacity shared-expert-gate",
    "dropping": "disable-moe-token-dropping",
    "graphs": "enable-cuda-graph external-cuda-graph",
    "offload": "cpu-optimizer optimizer-cpu-offload",
    "gates": "attention-output-gate use-gated-attention moe-shared-expert-gate use-dynamic-batch-size",
    "norms": "post-self-attn-layernorm post-mlp-layernorm",
}
SWITCHES: Final = frozenset(" ".join(_SWITCHES.values()).split())
"""Arguments that take no value, of those that are read."""

_HARMLESS: Final = {
    "optimizer": "moe-grouped-gemm start-weight-decay end-weight-decay initial-loss-scale adam-* clip-grad",
    "processes": "distributed-* sbatch-* no-async-tensor-model-parallel-allreduce local-ranks-filter",
    "generation": "use-mcore-models use-legacy-models enable-experimental deepspeed deepspeed-config use-dist-ckpt",
    "vocabulary": "make-vocab-size-divisible-by embedding-init-method-std embed-layernorm input-embeds-norm",
    "positions": "rotary-* position-embedding-base rope-scaling-* mscale* beta-fast beta-slow no-rope-fusion",
    "rope": "rope-type use-rope-scaling glu-linear-offset abort-on-unmet-*",
    "what BLOOM's runs added": "sync-tp-duplicated-parameters kill-switch-path",
    "norms": "norm-epsilon layernorm-epsilon apply-layernorm-1p no-persist-layer-norm",
    "attention": "attention-softmax-in-fp32 attention-mask-type shape-order sparse-mode *query-key-layer-scaling",
    "masks of forks": "cp-attention-mask-type",
    "masks": "no-masked* masked-softmax-fusion query-pre-attn-scalar kv-head-repeat-before-uly-alltoall",
    "kernels": "openai-gelu bias-*-fusion no-bias-*-fusion cross-entropy-* use-fused-* te-rng-tracker",
    "router": "moe-router-load-balancing-type moe-router-dtype moe-router-pre-softmax moe-router-score-function",
    "more of it": "moe-router-topk-scaling-factor moe-router-enable-expert-bias moe-router-bias-update-rate seq-aux",
    "its losses": "moe-aux-loss-coeff moe-z-loss-coeff moe-loss-coeff norm-topk-prob routed-scaling-factor",
    "its kernels": "moe-router-fusion moe-router-force-load-* moe-permute-fusion moe-input-jitter-eps",
    "experts": "moe-token-drop-policy moe-per-layer-logging moe-use-legacy-grouped-gemm create-moe-param-group",
    "capacity": "moe-min-capacity moe-eval-capacity-factor",
    "8 bits": "fp8-margin fp8-interval fp8-amax-* use-precision-aware-optimizer",
    "adapters of FlagScale": "peft-type lora-dropout-position lora-*-init-method load-adapter",
    "megablocks": "moe-loss-weight moe-jitter-eps moe-lbl-in-fp32 DDP-impl",
    "3D parallelism": "zero-contigious-gradients zero-reduce-scatter contigious-checkpointing checkpoint-num-layers",
    "adapters": "lora-fusion lora-load lora-alpha lora-dropout",
    "what is off anyway": "no-add-gate no-untie-embeddings-and-output-weights no-attention-softmax-in-fp32",
    "Hugging Face": "hf-model-name-or-path convert-from-hf convert-to-hf stderr-sink-level legacy-tokenizer",
    "kernels of rotary embeddings": "apply-rope-fusion",
    "Megatron-SWIFT": "packing padding-free save-safetensors max-epochs cached-dataset",
    "slime": "rollout-* num-rollout n-samples-per-prompt colocate hf-checkpoint ref-load *advantage* *kl-* eps-clip*",
    "its losses and server": "entropy-coef sglang-* rm-type balance-data debug-train-only megatron-to-hf-mode",
    "forks": "model-type-hf use-tutel deepspeed-activation-checkpointing is-hybrid-model bert-no-binary-head",
    "scales": "original-max-position-embeddings scale-depth scale-emb dim-model-base embed-scale",
    "forks that start processes themselves": "rank local-rank dist-url",
    "checks": "output-multiplier-scale check-for-* no-check-for-* record-memory-history memory-snapshot-path",
    "more checks": "empty-unused-memory-level hysteresis",
    "defaults": "add-bias-linear add-position-embedding no-data-sharding synchronize-each-layer no-enable-linear-qkv",
    "small": "clone-scatter-output-in-embedding defer-embedding-wgrad-compute high-priority-stream-groups onnx-safe",
    "old": "apply-residual-connection-post-layernorm no-scatter-gather-tensors-in-pipeline fp16-lm-cross-entropy",
    "tasks": "task inference mask-factor sample-rate add-eos-token hf-chat-template max-new-tokens",
    "start": "use-cpu-initialization no-initialization use-ring-exchange-p2p calculate-per-token-loss",
}
HARMLESS: Final = tuple(" ".join(_HARMLESS.values()).split())
"""Arguments (patterns) that do not change the time or memory of a step, or that every run sets
alike."""
