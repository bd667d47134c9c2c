"""Small helpers for the example tests. Knows nothing of the state machine's oracle."""

from collections.abc import Callable, Sequence

import pytest

from zipage_lang.radix_cache.block_table import BlockTable
from zipage_lang.radix_cache.prefix_cache import PrefixCache

Open = Callable[..., BlockTable]


@pytest.fixture
def cache() -> PrefixCache:
    """Ten blocks of two slots."""
    return PrefixCache(10, 2)


@pytest.fixture
def open_table(cache: PrefixCache) -> Open:
    """Match and open in one go."""

    def open_one(
        token_ids: Sequence[int], *, namespace: str = "", signature: str | None = "sig"
    ) -> BlockTable:
        return cache.open(cache.match(token_ids, namespace=namespace, signature=signature))

    return open_one


@pytest.fixture
def prefill(cache: PrefixCache, open_table: Open) -> Open:
    """Open, append all that is missing and commit it."""

    def prefill_one(token_ids: Sequence[int], **where: str) -> BlockTable:
        table = open_table(token_ids, **where)
        assert cache.append(table, len(token_ids) - table.logical_len) is not None
        cache.commit(table, token_ids, len(token_ids))
        return table

    return prefill_one


@pytest.fixture
def compact(cache: PrefixCache) -> Callable[[BlockTable, int, int], None]:
    """Plan and finish in one go."""

    def compact_one(table: BlockTable, protected_len: int, num_keep: int) -> None:
        blocks = cache.plan_compaction(table, protected_len, num_keep)
        assert blocks is not None
        cache.finish_compaction(table, blocks, resident_len=protected_len + num_keep)

    return compact_one
