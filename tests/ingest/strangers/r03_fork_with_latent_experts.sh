#!/bin/bash
export HCCL_CONNECT_TIMEOUT=3600
NPUS_PER_NODE=16
MASTER_ADDR=localhost #master node
NNODES=4
NODE_RANK=0
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
CKPT_LOAD_DIR="your model ckpt path"
TOKENIZER_PATH="your tokenizer path"
TP=1
PP=4
EP=16
CP=1
CP_TYPE='ulysses_cp_algo'
NUM_LAYERS=16
SEQ_LEN=4096
MBS=1
GBS=256

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR
"
MLA_ARGS="
    --multi-latent-attention \
    --qk-pos-emb-head-dim 64 \
    --qk-head-dim 128 \
    --q-lora-rank 1536 \
    --kv-lora-rank 512 \
    --v-head-dim 128 \
    --qk-layernorm \
"
MOE_ARGS="
    --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall \
    --use-fused-moe-token-permute-and-unpermute \
    --first-k-dense-replace 1 \
    --moe-layer-freq 1 \
    --n-shared-experts 1 \
    --num-experts 64 \
    --moe-router-topk 8 \
    --moe-ffn-hidden-size 2048 \
    --moe-router-load-balancing-type none \
    --moe-router-num-groups 8 \
    --moe-router-group-topk 4 \
    --moe-router-topk-scaling-factor 2.5 \
    --seq-aux \
    --norm-topk-prob \
    --moe-router-score-function sigmoid \
    --moe-router-enable-expert-bias \
"
GPT_ARGS="
    --spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec \
    --noop-layers 14,15 \
    --shape-order BNSD \
    --use-mcore-models \
    --use-flash-attn \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --expert-model-parallel-size ${EP} \
    --sequence-parallel \
    --context-parallel-size ${CP} \
    --context-parallel-algo  ${CP_TYPE} \
    --num-layers ${NUM_LAYERS} \
    --hidden-size 7168 \
    --ffn-hidden-size 18432 \
    --num-attention-heads 128 \
    --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path ${TOKENIZER_PATH} \
    --seq-length ${SEQ_LEN} --max-position-embeddings 163840 \
    --micro-batch-size ${MBS} --global-batch-size ${GBS} \
    --make-vocab-size-divisible-by 1 --vocab-size 129280 \
    --lr 1.0e-5 --train-iters 2000 --lr-decay-style cosine \
    --untie-embeddings-and-output-weights --disable-bias-linear \
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02 \
    --position-embedding-type rope --normalization RMSNorm \
    --use-fused-rotary-pos-emb --use-rotary-position-embeddings --use-fused-swiglu --use-fused-rmsnorm --swiglu \
    --no-masked-softmax-fusion --attention-softmax-in-fp32 \
    --weight-decay 1e-2 --no-load-optim --no-load-rng --bf16 --distributed-timeout-minutes 120 \
    --use-distributed-optimizer \
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS \
    $MLA_ARGS \
    $MOE_ARGS \
    --distributed-backend nccl \
    --load ${CKPT_LOAD_DIR} \
    | tee logs/train.log
