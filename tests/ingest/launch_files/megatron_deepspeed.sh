TP=4; PP=2
ZERO=1
deepspeed --num_nodes 4 --num_gpus 8 pretrain_gpt.py \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
  --num-layers 24 --hidden-size 2304 --num-attention-heads 24 --seq-length 2048 --vocab-size 51200 \
  --micro-batch-size 2 --global-batch-size 512 --fp16 --checkpoint-activations \
  --deepspeed --deepspeed_config ds.json --zero-stage $ZERO 2>&1 | tee log.txt
