#!/bin/bash
#SBATCH -N 2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
python tools/preprocess_data.py --input corpus.json --tokenizer-type GPT2BPETokenizer --workers 8
COMMON="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
COMMON+=" --vocab-size 51200 --tensor-model-parallel-size 2 --bf16 --micro-batch-size 4 --global-batch-size 256"
for STEP in pretrain; do
  if [ "$STEP" == "pretrain" ] ; then ARGS="$COMMON --use-distributed-optimizer"; fi
  srun --mpi=pmix --container-image nvcr.io#nvidia/pytorch:24.01 --container-mounts /a:/b \
    bash -c "cd /opt/megatron; python -u pretrain_gpt.py ${ARGS} --save \$PWD/ck"
done
python tools/report.py --num-layers 24
