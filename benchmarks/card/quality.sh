#!/bin/bash
# A sweep of `zipage eval` on one card, alone or as a line of a list of lanes.sh. From the repository's root:
#   bash benchmarks/card/quality.sh MODEL [options of `zipage eval`, say --family recall --policy zipage --budget 25%]
# MODEL: a folder that was carried here, or a known name. Results are $OUT/quality; what a folder .quality (or EARLIER)
# holds of earlier calls is gone on with (carry it), so a sweep longer than one call is the same call again. LIMIT_S (540)
# ends it in time, as Ctrl-C does; ROWS (256) run at once. No plots are needed here: `zipage eval --report-only
# --out FOLDER` makes them at home, from the runs of several calls or lanes copied into one FOLDER/runs.
source benchmarks/card/setup.sh
model=$1
shift
out=$OUT/quality
mkdir -p "$out"
earlier=${EARLIER:-.quality}
[ ! -d "$earlier" ] || cp -r "$earlier/." "$out/"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# -P: the root must stay off sys.path, its folder `kernels` would hide another package of that name.
timeout --signal=TERM --kill-after=50 "${LIMIT_S:-540}" python3 -P -m zipage_lang.evaluation --in-process \
    --model "$model" --out "$out" --engine dtype=bfloat16 --engine backend=cuda --engine max_running="${ROWS:-256}" \
    --engine max_step_tokens=4096 --engine swap_space=0 "$@"
status=$?
echo "== quality: exit $status (130 and 124: ended in time, goes on), $(cat "$out"/runs/*.jsonl 2> /dev/null | grep -c '"line":"sample"') samples"
[ $status -eq 124 ] || [ $status -eq 130 ] || exit $status
