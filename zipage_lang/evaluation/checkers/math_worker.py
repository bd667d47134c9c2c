"""The process that compares expressions: a JSON pair a line in, `true` or `false` a line out.

Knows nothing of who asks, nor of time limits: whoever asks ends it.
"""

import json
import resource
import sys

from zipage_lang.evaluation.checkers.latex_math import same_value

MAX_MEMORY = 4 * 2**30  # bytes of address space; sympy itself takes under one


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        left, right = json.loads(line)
        print(json.dumps(_are_equal(left, right)), flush=True)


def _are_equal(left: str, right: str) -> bool:
    try:
        return same_value(left, right)
    except (ArithmeticError, AttributeError, MemoryError, NotImplementedError, RecursionError):
        return False  # sympy's ways to say that it can't tell
    except (TypeError, ValueError):
        return False  # text that is no expression, or one that has no such value


if __name__ == "__main__":
    main()
