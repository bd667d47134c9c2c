#!/bin/bash
# Ten minutes of mixed work on the card, then a card that is really full. From the repository's root:
#   bash benchmarks/card/soak.sh
# SOAK_SECONDS may be set. The soak steps an engine in its own process: memory of card and host must stay
# flat, tables must empty, fixed requests must say the same after every round; see tests/end_to_end/test_soak.py.
# Where the server's dependencies are installed, benchmarks/soak.py --backend cuda --dtype bfloat16
# --deterministic true soaks the whole tree of processes.
export SOAK_SECONDS=${SOAK_SECONDS:-600}
WORKERS=1 bash benchmarks/card/test_gpu.sh soak tests/memory/test_card.py
