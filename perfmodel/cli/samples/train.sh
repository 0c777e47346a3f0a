#!/bin/bash
# Megatron-LM: Llama 3 8B on two nodes.
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
  --swiglu --normalization RMSNorm --disable-bias-linear \
  --use-rotary-position-embeddings --untie-embeddings-and-output-weights \
  --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192 \
  --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer \
  --micro-batch-size 1 --global-batch-size 128 --bf16
