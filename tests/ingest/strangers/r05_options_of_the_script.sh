#!/usr/bin/env bash
# train.sh --model-size 1b --tp 2 --nodes 2
MODEL_SIZE="1b"; TP=2; NODES=1; GPUS=8; EXTRA=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --model-size) MODEL_SIZE="$2"; shift 2 ;;
    --tp=*) TP="${1#*=}"; shift ;;
    --tp) TP="$2"; shift 2 ;;
    --nodes|-n) NODES="$2"; shift 2 ;;
    -h|--help) echo "usage"; exit 0 ;;
    --) shift; EXTRA=("$@"); break ;;
    *) EXTRA+=("$1"); shift ;;
  esac
done
declare -A LAYERS=([1b]=16 [8b]=32) HIDDEN=([1b]=2048 [8b]=4096)
case "${MODEL_SIZE,,}" in
  1b) HEADS=32; FFN=8192 ;;
  8b) HEADS=32; FFN=14336 ;;
  *) echo "unknown size ${MODEL_SIZE}" >&2; exit 1 ;;
esac
model_args() {
  local -a args=(
    --num-layers "${LAYERS[$MODEL_SIZE]}" --hidden-size "${HIDDEN[$MODEL_SIZE]}"
    --num-attention-heads "$HEADS" --ffn-hidden-size "$FFN"
    --group-query-attention --num-query-groups 8 --kv-channels 64
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --seq-length 8192 --max-position-embeddings 131072 --tokenizer-type Llama3Tokenizer
  )
  MODEL_ARGS=("${args[@]}")
}
model_args
(( GPUS % TP == 0 )) || { echo "bad tp"; exit 1; }
exec torchrun --nproc-per-node "$GPUS" --nnodes "$NODES" pretrain_gpt.py \
  "${MODEL_ARGS[@]}" \
  --tensor-model-parallel-size "$TP" --sequence-parallel \
  --micro-batch-size 1 --global-batch-size 128 --bf16 \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --attention-dropout 0.0 --hidden-dropout 0.0 "${EXTRA[@]}"
