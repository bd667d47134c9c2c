#!/bin/bash
# Runs of benchmarks/throughput.py, one after the other; each one's JSON line goes to $OUT/results.jsonl.
#   bash benchmarks/card/goals.sh "--load short" "--load aime --mode fixed --budget 2048"
source benchmarks/card/setup.sh
for arguments in "$@"
do
    echo "== $arguments"
    # shellcheck disable=SC2086
    timeout 580 python3 benchmarks/throughput.py $arguments 2>&1 | tee -a "$OUT/runs.log" | tail -1 | tee -a "$OUT/results.jsonl"
done
