#!/bin/bash
# GPT-3 175B as arrays of arguments, the shape of the examples of Megatron-LM

export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=16
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT=$1 # where to save
DATA=$2

LAUNCHER=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 51200
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-iters 1000 # a short run
    --weight-decay 0.1
    --bf16
    --lr 6.0e-5
    --min-lr 6.0e-6
    --clip-grad 1.0
)
PARALLEL=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
	--sequence-parallel
	--use-distributed-optimizer
)

torchrun "${LAUNCHER[@]}" pretrain_gpt.py \
    "${MODEL[@]}" "${TRAINING[@]}" \
    ${PARALLEL[@]} \
    --data-path $DATA --save $CHECKPOINT --log-interval 10 "$@"
