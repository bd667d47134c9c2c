#!/bin/bash
# Trains the tiny reasoner on one card; alone, or as a line of a list of lanes.sh. From the repository's root:
#   bash benchmarks/card/train.sh trial    80 s: speed, memory, waiting for data, and that all that follows works
#   bash benchmarks/card/train.sh first    first half, 9 minutes in all
#   bash benchmarks/card/train.sh second   second half, on the same machine; ends with the finished model
# MINUTES=8 shortens a half; further arguments go to training/train.py as they are. What comes back: the weights as
# shards of at most 14 MiB, and all other files of the model with the log as reasoner-PIECE.tgz. Checkpoints stay on the
# machine in /tmp/reasoner; a half that broke off is gone on with by `second`.
piece=${1:-trial}
more=("${@:2}")
back=${ZIPAGE_CARD_BACK:-${OUT:-/tmp/out}}
package=/tmp/training-package
rm -rf "$package" && mkdir -p "$package" "$back" && cp -r zipage_lang "$package/" || exit 1
export PYTHONPATH=$package PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton # the second half compiles nothing anew

folder=/tmp/reasoner
minutes=${MINUTES:-8.8}
case $piece in
    trial) folder=/tmp/reasoner-trial; rm -rf "$folder"
        set -- --minutes 1.3 --reserve 16 --check-every 20 --problems 48 ;;
    first) rm -rf "$folder"
        set -- --minutes "$minutes" --until 0.5 ;;
    second) set -- --minutes "$minutes" --until 1 --resume "$folder" ;;
    *) echo "train.sh: piece '$piece' is none of trial, first, second"; exit 2 ;;
esac
mkdir -p "$folder"
python3 training/train.py --out "$folder" "$@" "${more[@]}" 2>&1 | tee "$folder/$piece.out"
result=${PIPESTATUS[0]}

if [ -d "$folder/model" ]; then
    [ "$piece" = trial ] || cp "$folder"/model/*.safetensors "$back/"
    tar -czf "$back/reasoner-$piece.tgz" --exclude '*.safetensors' -C "$folder" model log.jsonl "$piece.out"
else
    cp "$folder/$piece.out" "$back/reasoner-$piece.txt"
fi
echo "train.sh $piece: exit $result"
exit "$result"
