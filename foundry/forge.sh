#!/bin/bash
# Train all language models on one GPU, the hybrid beside the others: forge.sh OUT HYBRID DENSE WINDOW DRAFT [SHARE]
# The numbers are minutes of training. OUT receives one archive a model and a log.
set -u
out=$1 share=${6:-1.0} work=$(mktemp -d)
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

train() {
    python3 -m foundry.train "$1" --minutes "$2" --out "$work/$1" --writers "$3" --share "$share" > "$work/$1.log" 2>&1
    echo "$1 ended with $?"
    tail -n 60 "$work/$1.log" | cut -c1-600
    [ -d "$work/$1" ] && tar -C "$work" -cf "$out/$1.tar" "$1"
}

train hybrid "$2" 6 &
train dense "$3" 7
train window "$4" 7
train draft "$5" 7
wait
cat "$work"/*.log > "$out/log.txt"
