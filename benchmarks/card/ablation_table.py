"""Prints the JSON lines of `ablations.sh` as a table, each run beside the first one.

Knows nothing of the engine.
"""

import json
import sys
from pathlib import Path
from typing import Any

SHARES = ("planning", "launching", "waiting", "device_idle", "compaction")


def table_line(result: dict[str, Any], first: dict[str, Any]) -> str:
    shares = "".join(f"{result[f'share_{name}']:>13.1%}" for name in SHARES)
    return (
        f"{result['name']:<18}{result['tok_s']:>9.0f}{result['tok_s'] / first['tok_s']:>8.2f}x"
        f"{result['mean_step_ms']:>10.2f}{result['num_tokens'] / result['num_steps']:>9.1f}"
        f"{result['num_compactions']:>9}{result['num_preemptions']:>9}{shares}"
    )


def main() -> None:
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    heads = "".join(f"{name:>13}" for name in SHARES)
    print(
        f"{'':<18}{'tok/s':>9}{'ratio':>9}{'step ms':>10}{'tok/step':>9}"
        f"{'compact.':>9}{'preempt.':>9}{heads}"
    )
    for result in results:
        print(table_line(result, results[0]))


if __name__ == "__main__":
    main()
