#!/usr/bin/env bash
# Calibrate several nodes by torchrun: the same line on every node, but for NODE_RANK (0 on the first, which measures).
#   NODES=2 NODE_RANK=0 MASTER_ADDR=node-a PER_NODE=8 calibrate/launch/torchrun.sh PLAN OUT [--backend torch ...]
# PER_NODE: processes, that is ranks, per node; as many as the plan's largest ranks_per_node.
set -euo pipefail

plan=${1:?usage: torchrun.sh PLAN OUT [perfmodel calibrate options]}
out=${2:?usage: torchrun.sh PLAN OUT [perfmodel calibrate options]}
shift 2

exec torchrun \
  --nnodes "${NODES:-2}" --node-rank "${NODE_RANK:?number of this node, from 0}" --nproc-per-node "${PER_NODE:-1}" \
  --master-addr "${MASTER_ADDR:?host name of node 0}" --master-port "${MASTER_PORT:-29500}" --max-restarts 0 \
  --no-python perfmodel calibrate --plan "$plan" --out "$out" --launched "$@"
