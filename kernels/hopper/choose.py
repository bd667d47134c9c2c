"""How a product is cut into tiles and splits: a rule from bytes and clocks, and what was measured.

Knows nothing of tensors or of the library.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

BLOCK_K = 64
GROUP_ROWS = 64
MAX_CLUSTER = 8
# Up to 96 rows memory binds, whatever they are padded to; above, each row more costs arithmetic.
ROW_SIZES = (16, 32, 64, 96, *range(112, 257, 16))
STEP_ROWS = 16  # sizes so near are cut alike
MAX_ROWS = ROW_SIZES[-1]
MAX_ROWS_BY_GROUPS = {1: 256, 2: 256, 3: 256, 4: 128}  # what the library has kernels for
# Above as many rows three warpgroups have no registers left for splits or for adding to a stream.
MAX_SPLIT_ROWS_OF_3_GROUPS = 192
MAX_UNMEASURED_ROWS = 192  # above, arithmetic binds: cuBLAS, unless ours was measured
# Clusters of each size from 0 that an H200 holds at once if its GPCs have 16 or 18 SMs.
CLUSTERS_HELD = (0, 132, 66, 40, 32, 24, 16, 16, 16)

MEMORY_BYTES_PER_US = 4.28e6
L2_BYTES_PER_US = 5.8e6
SM_BYTES_PER_US = 0.095e6
SM_MEMORY_BYTES_PER_US = 0.045e6  # of which from memory: 96 SMs are enough to use all of it
SM_REMOTE_BYTES_PER_US = 0.035e6
CYCLES_PER_US = 1650
START_US = 1.0  # launch, first bytes, last stores
EXCHANGE_US = 1.0  # two cluster barriers and the first remote read


class HopperConfig(NamedTuple):
    """One way to cut a product."""

    groups: int  # warpgroups of a CTA, 64 weight rows each
    splits: int  # of K, summed within the cluster
    sharers: int  # CTAs of a cluster that share each x tile

    @property
    def cluster_size(self) -> int:
        return self.sharers * self.splits


def padded_rows(num_rows: int) -> int:
    """The rows of x that the kernel computes with. Raises ValueError above MAX_ROWS."""
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows; the Hopper kernel takes at most {MAX_ROWS}")
    return next(size for size in ROW_SIZES if size >= num_rows)


Case = tuple[int, int, int]  # padded rows, out_size, in_size

# (groups, splits, sharers) by case; each serves the next smaller size too, if that has none.
# Found on an H200 for the shapes of Qwen3-8B: up to 192 rows by `benchmarks/card/decode_cuts.py`,
# inside a decode step, the others and the head by `benchmarks/card/products.py sweep`; the rule
# serves all other shapes.
MEASURED: dict[Case, tuple[int, int, int]] = {
    (16, 4096, 4096): (2, 3, 1),
    (32, 4096, 4096): (3, 5, 1),
    (64, 4096, 4096): (3, 4, 1),
    (96, 4096, 4096): (2, 3, 1),
    (128, 4096, 4096): (3, 4, 1),
    (160, 4096, 4096): (3, 4, 1),
    (192, 4096, 4096): (1, 2, 1),
    (16, 24576, 4096): (3, 1, 1),
    (32, 24576, 4096): (3, 1, 1),
    (64, 24576, 4096): (3, 1, 2),
    (96, 24576, 4096): (3, 1, 1),
    (128, 24576, 4096): (3, 1, 1),
    (160, 24576, 4096): (3, 1, 1),
    (192, 24576, 4096): (3, 1, 1),
    (16, 4096, 12288): (4, 6, 1),
    (32, 4096, 12288): (4, 6, 1),
    (64, 4096, 12288): (3, 5, 1),
    (96, 4096, 12288): (3, 5, 1),
    (128, 4096, 12288): (3, 5, 1),
    (160, 4096, 12288): (3, 5, 1),
    (192, 4096, 12288): (1, 2, 1),
    (16, 6144, 4096): (3, 3, 1),
    (32, 6144, 4096): (3, 3, 1),
    (64, 6144, 4096): (3, 3, 1),
    (96, 6144, 4096): (3, 3, 1),
    (128, 6144, 4096): (3, 3, 1),
    (192, 6144, 4096): (1, 1, 1),
    (224, 4096, 4096): (2, 3, 1),
    (224, 24576, 4096): (3, 1, 1),
    (224, 4096, 12288): (2, 3, 2),
    (224, 6144, 4096): (1, 1, 1),
    (256, 24576, 4096): (3, 1, 2),
    (64, 151936, 4096): (3, 1, 1),
    (128, 151936, 4096): (3, 1, 1),
    (256, 151936, 4096): (2, 1, 2),
}

# Where cuBLAS was faster than the best cut.
CUBLAS_IS_FASTER: frozenset[Case] = frozenset(
    {(160, 6144, 4096), (256, 4096, 4096), (256, 4096, 12288), (256, 6144, 4096)}
)
# At these numbers of rows each norm has a launch of its own, which overlaps with the loads of the
# next product's weights. Inside a decode step of 1,390 slots a row norms within products are
# 0.07 ms faster at 112 rows and 0.06 slower at 160; at 144 and 192 it makes no difference.
ROWS_NORMED_APART = range(113, 193)


def beats_cublas(num_rows: int, out_size: int, in_size: int) -> bool:
    """Whether our kernel, cut by `choose_config`, is the one to use."""
    if num_rows > MAX_ROWS:
        return False
    case = _measured_case(num_rows, out_size, in_size)
    if case in CUBLAS_IS_FASTER:
        return False
    return num_rows <= MAX_UNMEASURED_ROWS or case in MEASURED


def _measured_case(num_rows: int, out_size: int, in_size: int) -> Case:
    """Whose measurement serves: that of the padded rows, or of at most STEP_ROWS more."""
    own = padded_rows(num_rows)
    near = [size for size in ROW_SIZES if own <= size <= own + STEP_ROWS]
    cases = [(size, out_size, in_size) for size in near]
    return next((case for case in cases if case in MEASURED or case in CUBLAS_IS_FASTER), cases[0])


@functools.cache
def choose_config(
    num_rows: int,
    out_size: int,
    in_size: int,
    held: tuple[int, ...] = CLUSTERS_HELD,
    *,
    adds: bool = False,
) -> HopperConfig:
    """The cut expected to be fastest for x [num_rows, in_size] and a weight [out_size, in_size].

    Args:
        held: how many clusters of each size the card holds at once, by size from 0.
        adds: whether the product adds to a stream.

    Raises ValueError above MAX_ROWS.
    """
    rows = padded_rows(num_rows)
    measured = MEASURED.get(_measured_case(num_rows, out_size, in_size))
    if measured is not None:
        config = HopperConfig(*measured)
        if _has_registers(rows, config, adds) and _is_as_measured(config, out_size, held):
            return config
    return ranked_configs(num_rows, out_size, in_size, held, adds=adds)[0]


def _is_as_measured(config: HopperConfig, out_size: int, held: tuple[int, ...]) -> bool:
    """Whether this card, too, takes it in as many rounds.

    GPCs differ: cards were seen that hold 30 or 32 clusters of four, 22 or 24 of five. A cut that
    needs one cluster more than there is room for takes nearly twice as long.
    """
    return _num_rounds(config, out_size, held) <= _num_rounds(config, out_size, CLUSTERS_HELD)


def _num_rounds(config: HopperConfig, out_size: int, held: tuple[int, ...]) -> int:
    tile_rows = GROUP_ROWS * config.groups * config.sharers
    num_clusters = (out_size + tile_rows - 1) // tile_rows
    num_held = max(held[config.cluster_size], 1)
    return (num_clusters + num_held - 1) // num_held


def ranked_configs(
    num_rows: int,
    out_size: int,
    in_size: int,
    held: tuple[int, ...] = CLUSTERS_HELD,
    *,
    adds: bool = False,
) -> list[HopperConfig]:
    """All possible cuts, by expected time."""
    rows = padded_rows(num_rows)
    configs = [
        config
        for config in _possible(rows, out_size, in_size)
        if held[config.cluster_size] > 0 and _has_registers(rows, config, adds)
    ]
    return sorted(
        configs, key=lambda config: expected_us(config, num_rows, out_size, in_size, held)
    )


def _has_registers(rows: int, config: HopperConfig, adds: bool) -> bool:
    is_plain = config.splits == 1 and not adds
    return is_plain or config.groups != 3 or rows <= MAX_SPLIT_ROWS_OF_3_GROUPS


def _possible(rows: int, out_size: int, in_size: int) -> Iterator[HopperConfig]:
    for groups, max_rows in MAX_ROWS_BY_GROUPS.items():
        if rows > max_rows:
            continue
        for sharers in (1, 2, 4):
            if rows // sharers % 8 or (sharers - 1) * GROUP_ROWS * groups >= out_size:
                continue
            for splits in range(1, MAX_CLUSTER + 1):
                config = HopperConfig(groups, splits, sharers)
                if config.cluster_size <= MAX_CLUSTER and splits <= in_size // BLOCK_K:
                    yield config


def expected_us(
    config: HopperConfig, num_rows: int, out_size: int, in_size: int, held: tuple[int, ...]
) -> float:
    """The slowest of memory, L2, an SM's own port and its tensor cores, and what is around them."""
    rows = padded_rows(num_rows)
    tile_rows = GROUP_ROWS * config.groups
    tiles = -(-out_size // (tile_rows * config.sharers)) * config.sharers
    num_ctas = tiles * config.splits
    num_places = held[config.cluster_size] * config.cluster_size
    rounds = _num_rounds(config, out_size, held)
    blocks = rounds * -(-(in_size // BLOCK_K) // config.splits)  # one after the other in a CTA
    active = min(num_ctas, num_places)
    weight_bytes = tile_rows * BLOCK_K * 2
    x_bytes = num_rows * BLOCK_K * 2
    busy_us = max(
        blocks * active * weight_bytes / MEMORY_BYTES_PER_US,
        blocks * active * (weight_bytes + x_bytes / config.sharers) / L2_BYTES_PER_US,
        blocks * (weight_bytes + x_bytes) / SM_BYTES_PER_US,
        blocks * weight_bytes / SM_MEMORY_BYTES_PER_US,
        blocks * config.groups * (BLOCK_K // 16) * max(rows / 2, 32) / CYCLES_PER_US,
    )
    return busy_us + START_US + _split_us(config, num_rows)


def _split_us(config: HopperConfig, num_rows: int) -> float:
    if config.splits == 1:
        return 0.0
    own_bytes = 4 * num_rows * GROUP_ROWS * config.groups
    others = (config.splits - 1) / config.splits
    return EXCHANGE_US + own_bytes * others / SM_REMOTE_BYTES_PER_US
