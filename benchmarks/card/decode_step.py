"""A decode step of 128 requests at 2,304 resident tokens, against what copy bandwidth allows.

    python3 benchmarks/card/decode_step.py [rows] [kv_len] [--flashinfer]

With `--flashinfer` its kernels attend, not ours. Ends in one JSON line. Knows nothing of the
scheduler.
"""

import json
import sys
from typing import Any

from model_step import time_model
from timing import copy_rate

from zipage_lang.kernels.attention import FlashInferAttention


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--flashinfer"]
    num_rows, kv_len = (int(word) for word in (words or ["128", "2304"]))
    if len(words) < len(sys.argv) - 1:
        FlashInferAttention.hopper_for = lambda *_: None
    copy = copy_rate()
    print(f"copy {copy / 1e12:.3f} TB/s")
    report: dict[str, Any] = {}
    time_model(report, copy, num_rows=num_rows, kv_len=kv_len)
    print(json.dumps({"copy_bytes_per_s": copy, **report}))


if __name__ == "__main__":
    main()
