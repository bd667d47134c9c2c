#!/bin/bash
# Several lists of commands at once, one list per card of the machine. From the root:
#   bash benchmarks/card/lanes.sh LIST [LIST ...]
# A list is a text file with one command a line; the n-th list sees only card n. Each command's output goes to
# the lane's log; what its commands leave in $OUT and the log come back as $OUT/lane-n.tgz.
source benchmarks/card/setup.sh
export ZIPAGE_CARD_READY=1
back=$OUT
export ZIPAGE_CARD_BACK=$OUT # for what is too large for a lane's archive

lane() { # number, list
    local number=$1 list=$2 started command
    export CUDA_VISIBLE_DEVICES=$number OUT=/tmp/lane-$number
    mkdir -p "$OUT"
    while IFS= read -r command; do
        case $command in '' | '#'*) continue ;; esac
        started=$SECONDS
        bash -c "$command" > "$OUT/now.log" 2>&1 < /dev/null
        echo "#### lane $number, $((SECONDS - started)) s, exit $?: $command"
        cut -c1-200 "$OUT/now.log" | tail -n "${LINES_SHOWN:-12}"
        { echo "#### $command"; cat "$OUT/now.log"; } >> "$OUT/lane.log"
        tar -czf "$back/lane-$number.tgz" -C "$OUT" .
    done < "$list"
}

number=0
for list in "$@"; do
    lane $number "$list" &
    number=$((number + 1))
done
wait
