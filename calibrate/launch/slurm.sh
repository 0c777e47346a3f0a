#!/usr/bin/env bash
#SBATCH --job-name=perfmodel-calibrate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
# Calibrate several nodes under SLURM; options of sbatch override the lines above:
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 calibrate/launch/slurm.sh PLAN OUT [--backend torch ...]
# One task is one rank. A job stopped at its time limit goes on where it was when it is submitted again.
set -euo pipefail

plan=${1:?usage: sbatch slurm.sh PLAN OUT [perfmodel calibrate options]}
out=${2:?usage: sbatch slurm.sh PLAN OUT [perfmodel calibrate options]}
shift 2

# every task sees all GPUs and cores of its node, and takes its own
exec srun --kill-on-bad-exit=1 --cpu-bind=none --gpu-bind=none \
  perfmodel calibrate --plan "$plan" --out "$out" --launched "$@"
