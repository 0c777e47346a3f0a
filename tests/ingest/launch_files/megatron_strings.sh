#!/usr/bin/env bash
# arguments in one quoted string, sizes by a condition, the launcher through srun

SIZE=${SIZE:-7b}
NNODES=2

if [[ "$SIZE" == "7b" ]]; then
    LAYERS=32
    HIDDEN=4096
    HEADS=32
    FFN=11008
else
    LAYERS=40
    HIDDEN=5120
    HEADS=40
    FFN=13824
fi
TP=2
PP=2
VPP_LAYERS=4

options=" \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage ${VPP_LAYERS} \
    --num-layers $LAYERS --hidden-size $HIDDEN --num-attention-heads $HEADS --ffn-hidden-size $FFN \
    --swiglu --normalization RMSNorm --use-rotary-position-embeddings \
    --untie-embeddings-and-output-weights --disable-bias-linear \
    --hidden-dropout 0.0 --attention-dropout 0.0 \
    --seq-length 4096 --tokenizer-type Llama2Tokenizer --tokenizer-model /models/tokenizer.model \
    --micro-batch-size 2 --global-batch-size 64 --bf16 --use-flash-attn \
    --recompute-activations --overlap-grad-reduce"

run_cmd="torchrun --nproc_per_node=8 --nnodes=${NNODES} pretrain_gpt.py ${options}"
srun -l --output=out.log sh -c "${run_cmd}"
