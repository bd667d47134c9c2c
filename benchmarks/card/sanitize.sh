# compute-sanitizer over the kernels of a compaction at small sizes; after `source benchmarks/card/setup.sh`.
# Each tool has SANITIZER_SECONDS (100). Ends with 0 when the tools found nothing or cannot run here (it says
# which), with 1 when one found something or did not end. All they said is in $OUT/sanitize_<tool>.txt.
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer \
    /usr/local/cuda*/compute-sanitizer/compute-sanitizer 2>/dev/null | head -1)
if [ -z "$tool" ]; then
    echo "compute-sanitizer: not on this machine"
    exit 0
fi
script=benchmarks/card/sanitize.py
# No caching allocator: a read past a tensor's end must leave its allocation.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
python3 $script || exit 1  # compiles, so that the tool sees no compiler
status=0
for kind in memcheck racecheck; do
    log="${OUT:-/tmp}/sanitize_$kind.txt"
    started=$SECONDS
    timeout "${SANITIZER_SECONDS:-100}" "$tool" --tool $kind --target-processes application-only \
        --error-exitcode 9 --print-limit 20 python3 $script > "$log" 2>&1
    code=$?
    took="$((SECONDS - started)) s"
    if [ $code -eq 0 ] && grep -q "^ran:" "$log"; then
        echo "$kind: clean after $took ($(grep -h 'SUMMARY' "$log" | tail -1))"
    elif [ $code -eq 124 ]; then
        echo "$kind: not done within $took"
        status=1
    elif grep -qiE "not supported|unable to|failed to (initialize|launch)|no device|Target application terminated|Device not" "$log" \
        && ! grep -qE "Invalid __|hazard|Race reported" "$log"; then
        echo "$kind: the tool refuses this device or machine: $(grep -iE 'not supported|unable|failed|no device|terminated|Device not' "$log" | head -1)"
    else
        echo "$kind: exit $code after $took"
        grep -E 'Invalid|Race reported|hazard|=========     (at|by)|SUMMARY|Error' "$log" | head -40
        tail -5 "$log"
        status=1
    fi
done
exit $status
