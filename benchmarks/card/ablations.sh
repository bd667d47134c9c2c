#!/bin/bash
# One load with everything on, then with one thing off at a time, each for the same number of steps of the
# steady phase. A JSON line each in $OUT/ablations.jsonl, and a table at the end.
#   bash benchmarks/card/ablations.sh [arguments of benchmarks/throughput.py]
# ONLY="all on,grouping off" leaves the others out.
# SKIP steps run unmeasured first: past K + E of them, so that compactions are under way. Then STEPS are measured.
source benchmarks/card/setup.sh
SKIP=${SKIP:-1400}
STEPS=${STEPS:-600}
MAX_RUNNING=${MAX_RUNNING:-256}
QUERY_SLOTS=${QUERY_SLOTS:-48}
[ $# -gt 0 ] || set -- --load aime --mode fixed --budget 1024 --interval 256
lines="$OUT/ablations.jsonl"
: > "$lines"

measure() { # name, query slots, further arguments
    local name=$1 slots=$2
    shift 2
    case ",${ONLY:-$name}," in *",$name,"*) ;; *) return ;; esac
    echo "== $name"
    timeout "${LIMIT:-130}" python3 benchmarks/throughput.py "$@" --name "$name" --skip-steps "$SKIP" \
        --steps "$STEPS" --max-running "$MAX_RUNNING" --num-query-slots "$slots" \
        > "$OUT/ablation.log" 2>&1
    if tail -1 "$OUT/ablation.log" | grep -q '^{'; then
        tail -1 "$OUT/ablation.log" >> "$lines"
    else
        echo "FAILED, its last words:"
        tail -5 "$OUT/ablation.log"
    fi
}

measure "all on" "$QUERY_SLOTS" "$@"
measure "graphs off" "$QUERY_SLOTS" "$@" --no-graphs
measure "overlap off" "$QUERY_SLOTS" "$@" --no-overlap
measure "hybrid off" "$MAX_RUNNING" "$@" # a query slot for everyone
measure "prefix cache off" "$QUERY_SLOTS" "$@" --no-prefix-cache
measure "grouping off" "$QUERY_SLOTS" "$@" --no-grouping # only the attention launches that serve any step
rm -f "$OUT/ablation.log"
python3 benchmarks/card/ablation_table.py "$lines"
