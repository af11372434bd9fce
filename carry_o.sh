#!/bin/bash
# bash carry_o.sh SECONDS: missing rows of the reproduction on this GPU, for so many seconds in all.
# Wants data in $DPSUR_DATA (default: carry_data) and packages in carry_pkgs.
set -u
began=$(date +%s)
seconds=${1:-540}
here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
export OUT=${OUT:-/tmp/o_out}
export DPSUR_DATA=${DPSUR_DATA:-$here/carry_data}
export DPSUR_COMMIT=${DPSUR_COMMIT:-04882b14bd2c47a78efad49a2082fabf8e9a34a1}
export DPSUR_CACHE=${DPSUR_CACHE:-/tmp/dpsur_cache}
export PYTHONPATH=$here/src:$here:$here/carry_pkgs PYTHONUNBUFFERED=1
mkdir -p "$OUT" "$DPSUR_CACHE"
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps_o_$$ CUDA_MPS_LOG_DIRECTORY=/tmp/mps_o_log_$$
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
stop() { echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1; }
# an older daemon, in the usual place, blocks a new one
( unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY; stop )
if nvidia-cuda-mps-control -d; then echo "MPS started"; else echo "no MPS: processes take turns"; fi
trap stop EXIT
left=$(( seconds - ( $(date +%s) - began ) - 8 ))
timeout $(( left + 5 )) python3 carry_o.py --out "$OUT" --seconds "$left" 2>&1 | tee "$OUT/o_log.txt"
stop
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv
echo "carry_o.sh took $(( $(date +%s) - began )) s"
