#!/usr/bin/env bash
# An experiment by name; sizes follow from it by arithmetic, and a size of shared experts comes with its flag in one
# quoted element of an array. Written for these tests.
experiment=${1:-shared}
total_inner=8192
case ${experiment} in
    plain)
        n_total=16
        n_shared=0
        expert_layers=1
        ;;
    shared)
        n_total=16
        n_shared=2
        expert_layers="[0]+[1]*7"
        ;;
    *)
        echo "unknown experiment: ${experiment}"
        exit 1
        ;;
esac
for word in "$@"; do
    if [[ $word == --batch=* ]]; then
        batch=${word#*=}
    fi
done
n_experts=$((${n_total} - ${n_shared}))
inner=$((${total_inner} / ${n_total}))
if [[ "${n_shared}" -ge 1 ]]; then
    copies=$((${n_experts} + ${n_shared}))
else
    copies=1
fi

MODEL_ARGS=(
    --num-layers 8
    --hidden-size 1024
    --ffn-hidden-size $((${inner} * ${copies})) # of the dense layer
    --num-attention-heads 8
    --seq-length 2048
    --max-position-embeddings 4096
    --swiglu
    --normalization RMSNorm
    --position-embedding-type rope
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --vocab-size 32000
    --attention-backend flash
    # experts
    --moe-layer-freq ${expert_layers}
    --moe-ffn-hidden-size ${inner}
    --num-experts ${n_experts}
    --moe-router-topk 4
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
if [[ ${n_shared} -ge 1 ]]; then
    MODEL_ARGS+=("--moe-shared-expert-intermediate-size $((${inner} * ${n_shared}))")
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1 \
    --expert-model-parallel-size 2 \
    --use-distributed-optimizer
)
COMMAND="torchrun --nproc_per_node ${GPUS:-8} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${PARALLEL_ARGS[@]} \
    --micro-batch-size 2 --global-batch-size ${batch:-64} --bf16"
echo ${COMMAND}
${COMMAND} | tee log.txt
