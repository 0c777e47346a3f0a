#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=${1:-"checkpoints/oss"}
TOKENIZER_ARG=${3:-"MOCK"}
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
mkdir -p "$(dirname "$CHECKPOINT_PATH")"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_port ${MASTER_PORT:-6000}
)
MODEL_ARGS=(
    --no-masked-softmax-fusion
    --transformer-impl transformer_engine
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --no-rope-fusion
    --normalization RMSNorm
    --num-layers 12
    --hidden-size 512
    --ffn-hidden-size 2048
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 40960
    --use-mcore-models
    --rotary-percent 1.0
    --rope-type rope
    --position-embedding-type rope
    --rotary-base 10000
    --kv-channels 64
    --window-size 127,0          # attention in windows
    --window-attn-skip-freq 2
    --softmax-type learnable
    --activation-func-clamp-value 7.0
    --quick-geglu
    --glu-linear-offset 1.0
)
MOE_ARGS=(
    --num-experts 4
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-ffn-hidden-size 2048
)
DTYPE_ARGS=(
    --bf16
    --main-grads-dtype fp32
    --main-params-dtype fp32
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 4
    --sequence-parallel
)
DATA_ARGS=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]]; then
    DATA_ARGS+=("--mock-data" "--tokenizer-type" "NullTokenizer" "--vocab-size" "128256")
else
    DATA_ARGS+=("--data-path" "$2" "--tokenizer-model" "$TOKENIZER_ARG")
fi
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125 --lr 0.00015)
if [ ! -f "pretrain_gpt.py" ]; then
    echo "Error: pretrain_gpt.py not found"
    exit 1
fi
torchrun ${DISTRIBUTED_ARGS[@]} \
    "pretrain_gpt.py" \
    ${MODEL_ARGS[@]} \
    ${MOE_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]}
set +x
