#!/bin/bash
# Train models side by side on one GPU: forge.sh OUT MODEL:MINUTES[:OPTION]...
# OUT receives one archive a model (model.safetensors, training.json) and a log a model.
set -u
out=$1
shift
work=$(mktemp -d)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

# Small models leave the GPU waiting for their launches; sharing it between processes fills the gaps.
if [ $# -gt 1 ] && command -v nvidia-cuda-mps-control > /dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d && trap 'echo quit | timeout 10 nvidia-cuda-mps-control' EXIT
fi

train() {
    local model minutes option
    IFS=: read -r model minutes option <<< "$1"
    case $model in
        vision | rerank) set -- "foundry.$model.train" ;;
        *) set -- foundry.train "$model" ;;
    esac
    python3 -m "$@" --minutes "$minutes" --out "$work/$model" $option > "$out/$model.log" 2>&1
    echo "$model ended with $?"
    [ -d "$work/$model" ] && tar -C "$work" -cf "$out/$model.tar" "$model"
}

for one in "$@"; do train "$one" & done
wait $(jobs -p)
