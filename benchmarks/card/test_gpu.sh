#!/bin/bash
# The tests that carry the mark gpu, on a bare card machine; elsewhere it is `make test-gpu`. From the root:
#   bash benchmarks/card/test_gpu.sh [kernels] [engine] [soak] [sanitizer] [any path under tests/]
# Without arguments: kernels, engine and a short soak. SOAK_SECONDS, FRESH_SEED (else today's second) and
# WORKERS may be set. Writes $OUT/tests-<part>.log and $OUT/junit-<part>.xml; fails if any part does.
# The embedded model's tests are skipped unless build/model-part-0 and -1 (split_model.sh) were carried here.
source benchmarks/card/setup.sh
[ $# -gt 0 ] || set -- kernels engine soak
FRESH_SEED=${FRESH_SEED:-$(($(date +%s) % 100000))}
WORKERS=${WORKERS:-8}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false

store="${ZIPAGE_HOME:-$HOME/.cache/zipage}/models/smollm2-135m"
if [ -f build/model-part-0 ] && [ -f build/model-part-1 ]; then
    mkdir -p "$store"
    cat build/model-part-0 build/model-part-1 > "$store/SmolLM2-135M-Instruct.Q4_1.gguf"
fi

# Tests take no notice of each other; each worker compiles what it meets first. Work stealing came with 3.2.
spread=()
if python3 -P -c 'import xdist; assert [*map(int, xdist.__version__.split(".")[:2])] >= [3, 2]' 2> /dev/null; then
    spread=(-n "$WORKERS" --dist worksteal)
fi

# -P: the root must stay off sys.path, its folder `kernels` would hide another package of that name.
gpu_tests() { # part, pytest's arguments
    local part=$1 started=$SECONDS status
    shift
    python3 -P -m pytest -m gpu -p no:cacheprovider --fresh-seed "$FRESH_SEED" --durations=12 --tb=short -rfEs \
        --junitxml="$OUT/junit-$part.xml" "$@" > "$OUT/tests-$part.log" 2>&1
    status=$?
    echo "== $part: exit $status after $((SECONDS - started)) s, --fresh-seed $FRESH_SEED"
    grep -E '^(FAILED|ERROR|SKIPPED|E  )|passed|failed|error' "$OUT/tests-$part.log" | awk '!seen[$0]++' | cut -c 1-220 | head -60
    grep -A 6 'slowest' "$OUT/tests-$part.log"
    [ $status -eq 0 ] || failed=1
}

failed=0
for part in "$@"; do
    case $part in
        kernels) gpu_tests kernels "${spread[@]}" tests/kernels ;;
        engine) gpu_tests engine "${spread[@]}" tests/end_to_end/test_card_equality.py ;;
        soak) gpu_tests soak -s --soak-seconds "${SOAK_SECONDS:-20}" tests/end_to_end/test_soak.py ;;
        sanitizer) bash benchmarks/card/sanitize.sh || failed=1 ;;
        *) gpu_tests "$(basename "${part%%.py*}")" "$part" ;;
    esac
done
exit $failed
