#!/usr/bin/env bash
#SBATCH --job-name=perfmodel-calibrate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
# Calibrate several nodes under SLURM; options of sbatch override the lines above:
#   sbatch --account=project --partition=gpu --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 \
#     calibrate/launch/slurm.sh PLAN OUT [--backend torch ...]
# `sacctmgr show assoc user=$USER` lists accounts, `sinfo -s` partitions. Where the site runs containers by pyxis, name
# an image that holds perfmodel, and the folders of PLAN and OUT:
#   CONTAINER=/shared/perfmodel.sqsh MOUNTS=/shared:/shared sbatch ... calibrate/launch/slurm.sh PLAN OUT
# One task is one rank. A job stopped at its time limit goes on where it was when it is submitted again.
set -euo pipefail

plan=${1:?usage: sbatch slurm.sh PLAN OUT [perfmodel calibrate options]}
out=${2:?usage: sbatch slurm.sh PLAN OUT [perfmodel calibrate options]}
shift 2

container=()
if [ -n "${CONTAINER:-}" ]; then
  container+=("--container-image=$CONTAINER" --no-container-mount-home)
  [ -z "${MOUNTS:-}" ] || container+=("--container-mounts=$MOUNTS")
fi

# every task sees all GPUs and cores of its node, and takes its own
exec srun --kill-on-bad-exit=1 --cpu-bind=none --gpu-bind=none ${container[@]+"${container[@]}"} \
  perfmodel calibrate --plan "$plan" --out "$out" --launched "$@"
