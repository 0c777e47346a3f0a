#!/bin/bash
set -e
ENV=${1:-dsw}
MODEL_SIZE=${2:-7B}
BATCH_SIZE=${3:-1}
GLOBAL_BATCH_SIZE=${4:-64}
SEQ_LEN=${5:-4096}
PR=${6:-bf16}
TP=${7:-2}
PP=${8:-1}
AC=${9:-sel}
DO=${10:-true}
FL=${11:-true}
SP=${12:-true}
MEGATRON_PATH=/workspace/Megatron-LM
export PYTHONPATH=${MEGATRON_PATH}:$PYTHONPATH
export CUDA_DEVICE_MAX_CONNECTIONS=1
if [ $ENV = dsw ]; then
  MASTER_ADDR=localhost
  NNODES=1
  NODE_RANK=0
  GPUS_PER_NODE=8
elif [ $ENV = dlc ]; then
  NNODES=${WORLD_SIZE}
  NODE_RANK=${RANK}
  GPUS_PER_NODE=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR"

if [ $MODEL_SIZE = 7B ]; then
NUM_LAYERS=28
HIDDEN_SIZE=3584
NUM_ATTN_HEADS=28
INTERMEDIATE_SIZE=18944
NUM_KEY_VALUE_HEADS=4
gqa_options=" --group-query-attention --num-query-groups ${NUM_KEY_VALUE_HEADS}"
elif [ $MODEL_SIZE = 0.5B ]; then
NUM_LAYERS=24
HIDDEN_SIZE=896
NUM_ATTN_HEADS=14
INTERMEDIATE_SIZE=4864
gqa_options=""
fi

if [ $AC = full ]; then
    activation_checkpoint_options=" \
        --recompute-method uniform \
        --recompute-granularity full"
elif [ $AC = sel ]; then
    activation_checkpoint_options=" \
        --recompute-activations"
elif [ $AC = none ]; then
    activation_checkpoint_options=" "
fi
if [ $PR = fp16 ]; then
    pr_options=" --fp16 --initial-loss-scale 65536"
elif [ $PR = bf16 ]; then
    pr_options=" --bf16"
fi
if [ $DO = true ]; then
    do_options=" --use-distributed-optimizer"
elif [ $DO = false ]; then
    do_options=""
fi
if [ $FL = true ]; then
    flash_options=" --use-flash-attn"
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" --sequence-parallel"
fi
TRAIN_ITERS=$(( 100000000 / ${GLOBAL_BATCH_SIZE} / ${SEQ_LEN} ))
NAME="pretrain-${MODEL_SIZE}-gbs-${GLOBAL_BATCH_SIZE}"
mkdir -p "/tmp/tensorboard/${NAME}"
options=" \
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style linear --adam-beta1 0.9 --adam-beta2 0.95 \
    --clip-grad 1.0 --init-method-std 0.006 --dataloader-type cyclic \
    --train-iters ${TRAIN_ITERS} \
    --micro-batch-size ${BATCH_SIZE} \
    --global-batch-size ${GLOBAL_BATCH_SIZE} \
    --num-layers ${NUM_LAYERS} \
    --hidden-size ${HIDDEN_SIZE} \
    --num-attention-heads ${NUM_ATTN_HEADS} \
    --ffn-hidden-size ${INTERMEDIATE_SIZE} \
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} \
    --log-interval 1 --eval-interval 10000 --save-interval 1000 \
    --tensorboard-dir /tmp/tensorboard/${NAME} \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --no-load-optim --no-load-rng --num-workers 8 \
    --tokenizer-type Qwen2Tokenizer --padded-vocab-size 152064 \
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 \
    --use-rotary-position-embeddings --rotary-percent 1.0 --rotary-base 1000000 \
    --untie-embeddings-and-output-weights --disable-bias-linear --add-qkv-bias \
    --transformer-impl transformer_engine --use-mcore-models"

run_cmd="torchrun $DISTRIBUTED_ARGS ../qwen2/pretrain_qwen.py
 ${options} ${activation_checkpoint_options} ${pr_options} ${do_options} ${flash_options} ${sp_options} ${gqa_options}"
echo ${run_cmd}
eval ${run_cmd}
set +x
