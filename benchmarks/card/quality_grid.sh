#!/bin/bash
# Sweeps of quality.sh by several processes at once on one card: a small model leaves most of it idle. From the root,
# alone or as a line of a list of lanes.sh:
#   bash benchmarks/card/quality_grid.sh MODEL OPTIONS FIRST LAST COUNT
# OPTIONS: a text file, a line of options of `zipage eval` per sweep, done one after the other. Each process takes its
# part FIRST/COUNT .. LAST/COUNT of every sweep's cells. SECONDS_IN_ALL (520) ends them in time; results are
# $OUT/part-N/quality, and a folder .quality of earlier calls is gone on with.
source benchmarks/card/setup.sh
export ZIPAGE_CARD_READY=1
model=$1 options=$2 first=$3 last=$4 count=$5
SECONDS_IN_ALL=${SECONDS_IN_ALL:-520}

part() { # number
    local line
    export OUT=$OUT/part-$1
    mkdir -p "$OUT"
    while IFS= read -r line; do
        case $line in '' | '#'*) continue ;; esac
        [ $((SECONDS_IN_ALL - SECONDS)) -gt 20 ] || break
        # shellcheck disable=SC2086
        LIMIT_S=$((SECONDS_IN_ALL - SECONDS)) bash benchmarks/card/quality.sh "$model" --mixed --part "$1/$count" \
            --engine kv_cache_memory="${POOL_GIB:-6}" $line < /dev/null
    done < "$options" > "$OUT/log" 2>&1
    echo "part $1: $(tr '\r' '\n' < "$OUT/log" | grep -E 'tok/s|== quality' | tail -2 | cut -c 1-150 | tr '\n' ' ')"
}

for number in $(seq "$first" "$last"); do
    part "$number" &
done
wait
