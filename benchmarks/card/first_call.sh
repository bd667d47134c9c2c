#!/bin/bash
# The first look at a card: environment, ceilings, attention right and fast, engine equality, step time.
# From the repository's root: bash benchmarks/card/first_call.sh
source benchmarks/card/setup.sh
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv
# Kernels built on another system may not load here; then FlashInfer builds them itself.
python3 - "$site/flashinfer/data/aot" <<'PYTHON' || rm -rf "$site/flashinfer/data/aot"
import pathlib
import sys

import torch
import tvm_ffi

for library in pathlib.Path(sys.argv[1]).glob("*/*.so"):
    tvm_ffi.load_module(str(library))
    print("loads:", library.name)
PYTHON
# A process each: a bad memory access makes the rest of its process fail.
for stages in "environment ceilings attention_right attention_fast" "model_step products" engine_equal
do
    # shellcheck disable=SC2086
    timeout 170 python3 benchmarks/card/first_call.py --out "$OUT" $stages 2>&1 | tee -a "$OUT/first_call.log"
done
for library in "$HOME"/.cache/flashinfer/*/90a/cached_ops/*/*.so; do
    if [ -f "$library" ]; then cp "$library" "$OUT/"; fi
done
