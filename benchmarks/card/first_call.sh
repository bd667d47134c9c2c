#!/bin/bash
# The first look at a card: environment, ceilings, attention right and fast, engine equality, step time.
# From the repository's root: bash benchmarks/card/first_call.sh [stage ...]
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
python3 benchmarks/card/first_call.py --out "$OUT" "$@" 2>&1 | tee "$OUT/first_call.log"
for library in "$HOME"/.cache/flashinfer/*/90a/cached_ops/*/*.so; do
    if [ -f "$library" ]; then cp "$library" "$OUT/"; fi
done
