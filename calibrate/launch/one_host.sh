#!/usr/bin/env bash
# Calibrate this host: kernels, and collectives between its own processes. No launcher is needed.
#   calibrate/launch/one_host.sh PLAN OUT [--backend torch ...]
set -euo pipefail

plan=${1:?usage: one_host.sh PLAN OUT [perfmodel calibrate options]}
out=${2:?usage: one_host.sh PLAN OUT [perfmodel calibrate options]}
shift 2

perfmodel calibrate --plan "$plan" "$@" --dry-run
exec perfmodel calibrate --plan "$plan" --out "$out" "$@"
