#!/bin/bash
# Check scripts one after the other, each under a time limit; logs go to $OUT, a short end of each is shown.
#   bash benchmarks/card/checks.sh "60 sampling_check.py" "120 decode_cuts.py"
source benchmarks/card/setup.sh
for line in "$@"
do
    read -r limit script arguments <<< "$line"
    log="$OUT/${script%.*}.log"
    started=$SECONDS
    # shellcheck disable=SC2086
    timeout "$limit" python3 "benchmarks/card/$script" $arguments > "$log" 2>&1
    echo "== $script: rc $?, $((SECONDS - started)) s"
    tail -n "${LINES_SHOWN:-60}" "$log" | cut -c1-180
done
