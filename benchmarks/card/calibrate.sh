#!/bin/bash
# Makes the tiny reasoner's forecast of attention, the one that comes with the package. From the root:
#   bash benchmarks/card/calibrate.sh [texts, 128] [tokens of a text, 2048]
# Writes $OUT/forecast.safetensors, which goes beside the model's weights, and $OUT/calibrate.log.
source benchmarks/card/setup.sh
python3 -P - "${1:-128}" "${2:-2048}" "$OUT/forecast.safetensors" 2>&1 <<'PYTHON' | tee "$OUT/calibrate.log"
import logging
import pathlib
import sys
import time

from zipage_lang.runtime.calibrate import calibrate_model
from zipage_lang.runtime.config import ModelConfig

logging.basicConfig(level=logging.INFO, format="%(message)s")
texts, length, out = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
config = ModelConfig(model="zipage-tiny-reasoner", dtype="bfloat16", backend="cuda")
start = time.perf_counter()
print(calibrate_model(config, out, num_texts=texts, max_len=length))
print(f"{time.perf_counter() - start:.1f} s")
PYTHON
exit "${PIPESTATUS[0]}"
