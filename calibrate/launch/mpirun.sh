#!/usr/bin/env bash
# Calibrate several nodes by mpirun (Open MPI), from the first of them.
#   HOSTS=node-a,node-b PER_NODE=8 calibrate/launch/mpirun.sh PLAN OUT [--backend torch ...]
# MPI only starts the processes. Of another MPI (MPICH, Intel): mpiexec -hosts "$HOSTS" -ppn "$PER_NODE" -n N perfmodel ...
set -euo pipefail

plan=${1:?usage: mpirun.sh PLAN OUT [perfmodel calibrate options]}
out=${2:?usage: mpirun.sh PLAN OUT [perfmodel calibrate options]}
shift 2

IFS=, read -ra hosts <<< "${HOSTS:?host names, comma-separated; the first measures}"
per_node=${PER_NODE:-1}
slots=$(printf "%s:$per_node," "${hosts[@]}")
forward=()
for name in PATH GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME PERFMODEL_LAUNCH_KEY; do
  [[ -v $name ]] && forward+=(-x "$name")
done
# processes bind their ranks to cores themselves
exec mpirun --host "${slots%,}" -np "$((${#hosts[@]} * per_node))" --map-by slot --bind-to none \
  "${forward[@]}" perfmodel calibrate --plan "$plan" --out "$out" --launched "$@"
