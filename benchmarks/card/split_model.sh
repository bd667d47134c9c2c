#!/bin/bash
# The embedded model is larger than one call may carry: puts it into two files that travel in two calls, the
# second together with .whl and .built. test_gpu.sh joins them. From the repository's root.
model=$(.venv/bin/python -P -c 'from zipage_lang.runtime.model_store import resolve_model as r; print(r("smollm2-135m"))')
head -c 64200000 "$model" > build/model-part-0
tail -c +64200001 "$model" > build/model-part-1
ls -l build/model-part-0 build/model-part-1
