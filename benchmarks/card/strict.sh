#!/bin/bash
# Strict mode on a bare card machine: its tests, then tokens per second without and with it, in turns. From the root:
#   bash benchmarks/card/strict.sh [arguments of benchmarks/throughput.py]
# ROUNDS of each kind, STEPS measured after SKIP. Writes $OUT/tests-strict.log and a JSON line per run to
# $OUT/strict.jsonl; prints each run's tokens per second and the ratio of the medians. Fails if a test does.
source benchmarks/card/setup.sh
ROUNDS=${ROUNDS:-2}
STEPS=${STEPS:-300}
SKIP=${SKIP:-300}
[ $# -gt 0 ] || set -- --load aime --mode fixed --budget 1024 --interval 256 --max-running 128
python3 -P -m pytest -m gpu -p no:cacheprovider --tb=short -rfEs tests/strict > "$OUT/tests-strict.log" 2>&1
status=$?
tail -15 "$OUT/tests-strict.log"
lines="$OUT/strict.jsonl"
: > "$lines"
for round in $(seq "$ROUNDS"); do
    for flag in "" --deterministic; do
        name="strict ${flag:+on}"
        [ -n "$flag" ] || name="strict off"
        timeout "${LIMIT:-150}" python3 benchmarks/throughput.py "$@" $flag --name "$name" \
            --skip-steps "$SKIP" --steps "$STEPS" > "$OUT/strict-run.log" 2>&1
        if tail -1 "$OUT/strict-run.log" | grep -q '^{'; then
            tail -1 "$OUT/strict-run.log" >> "$lines"
        else
            echo "round $round, ${flag:-off}: FAILED, its last words:"
            tail -5 "$OUT/strict-run.log"
        fi
    done
done
python3 -P - "$lines" <<'PYTHON'
import json
import statistics
import sys

rates = {False: [], True: []}
for line in open(sys.argv[1]):
    run = json.loads(line)
    rates[run["deterministic"]].append(run["tok_s"])
for is_strict, found in rates.items():
    print("strict" if is_strict else "usual ", [round(rate) for rate in found], "tok/s")
if all(rates.values()):
    off, on = (statistics.median(rates[kind]) for kind in (False, True))
    print(f"strict mode keeps {on / off:.2f} of the speed")
PYTHON
exit $status
