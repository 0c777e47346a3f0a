#!/bin/bash
#PBS -l select=4:ncpus=64:ngpus=4
#PBS -l walltime=01:00:00
NHOSTS=4
NGPU_PER_HOST=4
NGPUS=$(( NHOSTS * NGPU_PER_HOST ))
ARCH=(
  "--num-layers=32"
  "--hidden-size=4096"
  "--ffn-hidden-size=11008"
  "--num-attention-heads=32"
)
declare -a PARALLEL
PARALLEL+=("--tensor-model-parallel-size=4")
PARALLEL+=("--pipeline-model-parallel-size=1")
ALL="${ARCH[*]} ${PARALLEL[*]}"
EXEC="pretrain_gpt_alcf.py"
CMD="mpiexec --verbose --envall -n ${NGPUS} -ppn ${NGPU_PER_HOST} --hostfile hosts python3 ${EXEC} ${ALL} \
  --swiglu --normalization rmsnorm --use-rotary-position-embeddings --untie-embeddings-and-output-weights \
  --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --num-key-value-heads 32 \
  --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model \
  --micro-batch-size 1 --global-batch-size 64 --bf16 --use-flash-attn-v2 \
  --no-pipeline-parallel --deepspeed --deepspeed_config=ds_config.json --zero-stage=1"
echo "${CMD}"
eval "${CMD}" |& tee out.log
