#!/bin/bash
# Ranks are started by MPI, which tells the program how many there are. Written for these tests.
TP=2
VP=2
ranks=${OMPI_COMM_WORLD_SIZE:-16}
RANK_ARGS=(
    --rank ${OMPI_COMM_WORLD_RANK:-0}
    --world-size ${ranks}
    --local-rank ${OMPI_COMM_WORLD_LOCAL_RANK:-0}
    --dist-url tcp://${HEAD:-localhost}:${PORT:-6000}
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP}
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
    --sequence-parallel
)
if [ -n "${VP}" ]; then
    PARALLEL_ARGS+=(
        --num-layers-per-virtual-pipeline-stage ${VP}
    )
fi
if [ -n "${recompute}" ]; then
    PARALLEL_ARGS+=(--recompute-activations)
fi
APP="python3 -u pretrain_gpt.py \
    ${RANK_ARGS[@]} \
    --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 \
    --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32 --bf16 --attention-backend flash \
    --swiglu --disable-bias-linear --position-embedding-type rope --normalization RMSNorm \
    ${PARALLEL_ARGS[@]}"
if [[ $profiling == "torch" ]]; then
    APP+=" --profile"
fi
${APP}
