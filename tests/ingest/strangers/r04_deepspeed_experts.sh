#!/bin/bash
DIR=`pwd`
SEQ_LEN=2048
MODEL_SIZE=0.35
NUM_LAYERS=24
HIDDEN_SIZE=1024
NUM_ATTN_HEADS=16
GLOBAL_BATCH_SIZE=256
BATCH_SIZE=4
MP_SIZE=1
NUM_GPUS=64
EP_SIZE=128
if [[ $EP_SIZE -gt $NUM_GPUS ]]; then
    EP_PARALLEL_SIZE=$NUM_GPUS
else
    EP_PARALLEL_SIZE=$EP_SIZE
fi
NUM_NODES=$(( ${NUM_GPUS} / 8 ))
ACTIVATION_CHECKPOINT="false"
NAME="gpt-${MODEL_SIZE}B-mp-${MP_SIZE}"
if [[ $EP_SIZE -gt 1 ]]; then
    NAME="${NAME}-ep-${EP_SIZE}"
fi
megatron_options=" \
    --adam-beta1 0.9 --adam-beta2 0.95 \
    --tensor-model-parallel-size ${MP_SIZE} \
    --moe-expert-parallel-size ${EP_PARALLEL_SIZE} \
    --num-experts ${EP_SIZE} \
    --moe-loss-coeff 0.01 \
    --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 \
    --micro-batch-size ${BATCH_SIZE} --global-batch-size ${GLOBAL_BATCH_SIZE} \
    --num-layers ${NUM_LAYERS} --hidden-size ${HIDDEN_SIZE} --num-attention-heads ${NUM_ATTN_HEADS} \
    --seq-length ${SEQ_LEN} --max-position-embeddings ${SEQ_LEN} \
    --train-tokens 300000000000 --lr 2.0e-4 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \
    --tokenizer-type GPT2BPETokenizer --split 98,2,0 --fp16 --load x --save x"
if [ "${ACTIVATION_CHECKPOINT}" = "true" ]; then
megatron_options="${megatron_options} --checkpoint-activations"
fi
if [[ $EP_SIZE -gt 1 ]]; then
megatron_options="${megatron_options} --create-moe-param-group"
fi
config_json="ds_config_gpt_${NAME}.json"
deepspeed_options=" --deepspeed --deepspeed_config ${config_json} --pipeline-model-parallel-size 1"
if [[ $EP_SIZE -gt 1 ]]; then
deepspeed_options="${deepspeed_options} --no-pipeline-parallel"
fi
run_cmd="deepspeed --num_nodes $NUM_NODES --num_gpus 8 ${DIR}/../../pretrain_gpt.py ${megatron_options} ${deepspeed_options} &> ${NAME}_$(hostname).log"
echo ${run_cmd}
eval ${run_cmd}
