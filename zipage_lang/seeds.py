"""A sampling seed for each call, from the run's root seed and the call's place in the program.

The same program with the same root seed draws the same samples, whatever runs beside it.
Knows nothing of states or engines.
"""

import hashlib
import secrets

Path = tuple[str | int, ...]


def random_root() -> int:
    return secrets.randbits(63)


def derive_seed(root: int, path: Path) -> int:
    """A seed in [0, 2**63). `path` names the call: item, fork and branch numbers, call number."""
    digest = hashlib.blake2b(repr((root, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
