"""How products are cut: whatever is chosen, the card and the library must be able to run.

Knows nothing of the kernel but its limits.
"""

import re
from pathlib import Path

import pytest

from zipage_lang.kernels.hopper import build, choose
from zipage_lang.kernels.hopper.choose import (
    BLOCK_K,
    CLUSTERS_HELD,
    GROUP_ROWS,
    MAX_CLUSTER,
    MAX_ROWS,
    MEASURED,
    ROW_SIZES,
    HopperConfig,
    beats_cublas,
    choose_config,
    expected_us,
    padded_rows,
    ranked_configs,
)

# out_size, in_size: qkv, o, gate and up, down
SHAPES = {
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
    "Qwen3-8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
    "Qwen3-14B": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
    "Qwen3-32B": [(10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)],
    "Llama-8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "heads": [(151936, 1024), (151936, 5120), (128256, 4096)],
    "odd": [(64, 64), (64, 4096), (320, 192), (1088, 704)],
}
ROW_COUNTS = [1, 2, 15, 16, 17, 33, 64, 65, 96, 100, 128, 129, 160, 161, 191, 192, 193, 224, 256]
REGISTERS = 512  # a lane, for the warps of one of an SM's four parts
FEEDER_REGISTERS = 32  # a thread, where it hands registers over
OTHER_REGISTERS = 24  # a thread needs beside its accumulators
SHARED_BYTES, STAGE_ROOM = 225 * 1024, 207 * 1024


def assert_can_run(config, num_rows, out_size, in_size, held=CLUSTERS_HELD, *, adds=False):
    rows, tile_rows = padded_rows(num_rows), GROUP_ROWS * config.groups
    # Each warpgroup has a warp in every part. The feeder takes an equal share, or leaves all but
    # a few.
    share = REGISTERS // (config.groups + 1)
    if rows // 2 + OTHER_REGISTERS > share:
        share = (REGISTERS - FEEDER_REGISTERS) // config.groups
        assert (config.groups, config.splits, adds) == (3, 1, False), config
    assert rows // 2 + OTHER_REGISTERS <= share, config
    assert 1 <= config.cluster_size == config.sharers * config.splits <= MAX_CLUSTER, config
    assert held[config.cluster_size] > 0, config
    assert 1 <= config.splits <= in_size // BLOCK_K, config  # no CTA without a block of K
    assert (config.sharers - 1) * tile_rows < out_size, config  # nor a sharer without a tile
    assert rows % (8 * config.sharers) == 0, config  # parts of x are whole swizzle atoms
    stage_bytes = tile_rows * BLOCK_K * 2 + rows * BLOCK_K * 2
    assert STAGE_ROOM // stage_bytes >= 2, config
    if config.splits > 1:
        assert rows * (tile_rows + 4) * 4 <= SHARED_BYTES, config


@pytest.mark.parametrize("model", SHAPES)
def test_every_cut_can_run(model):
    for shape in SHAPES[model]:
        for num_rows in ROW_COUNTS:
            ranked = ranked_configs(num_rows, *shape)
            assert ranked
            assert len(set(ranked)) == len(ranked)
            for config in ranked:
                assert_can_run(config, num_rows, *shape)
            adding = ranked_configs(num_rows, *shape, adds=True)
            for config in adding:
                assert_can_run(config, num_rows, *shape, adds=True)
            assert choose_config(num_rows, *shape, adds=True) in adding
            assert choose_config(num_rows, *shape) in ranked


@pytest.mark.parametrize("model", SHAPES)
def test_cuts_are_ranked_by_expected_time(model):
    for shape in SHAPES[model]:
        ranked = ranked_configs(100, *shape)
        times = [expected_us(config, 100, *shape, CLUSTERS_HELD) for config in ranked]
        assert times == sorted(times)
        assert times[0] > 0


def test_a_card_that_holds_no_large_clusters_is_given_none():
    held = (0, 132, 60, *[0] * 6)
    for num_rows in ROW_COUNTS:
        for config in ranked_configs(num_rows, 1024, 3072, held):
            assert_can_run(config, num_rows, 1024, 3072, held)
    alone = (0, 132, *[0] * 7)
    assert {config[1:] for config in ranked_configs(64, 1024, 3072, alone)} == {(1, 1)}


def test_a_weight_with_fewer_tiles_than_multiprocessors_is_split():
    for num_rows in (16, 64, 128):
        tiles = 1024 // (GROUP_ROWS * choose_config(num_rows, 1024, 3072).groups)
        assert tiles * choose_config(num_rows, 1024, 3072).splits > 16


def test_measured_cuts_are_possible_and_are_chosen():
    for (rows, *shape), cut in MEASURED.items():
        assert rows in ROW_SIZES, f"{rows} rows are never looked up"
        config = HopperConfig(*cut)
        assert_can_run(config, rows, *shape)
        assert config in ranked_configs(rows, *shape)
        smaller = ROW_SIZES[ROW_SIZES.index(rows) - 1] + 1 if rows > ROW_SIZES[0] else 1
        assert choose_config(smaller, *shape) == choose_config(rows, *shape) == config


def test_a_size_without_a_measurement_is_cut_as_the_next_one_if_that_is_near(monkeypatch):
    choose_config.cache_clear()
    monkeypatch.setattr(choose, "CUBLAS_IS_FASTER", frozenset({(256, 640, 320)}))
    by_rule = choose_config(80, 640, 320)
    monkeypatch.setitem(MEASURED, (192, 640, 320), (1, 5, 1))
    monkeypatch.setitem(MEASURED, (128, 640, 320), (1, 4, 1))
    choose_config.cache_clear()
    assert choose_config(170, 640, 320) == choose_config(192, 640, 320) == (1, 5, 1)
    assert choose_config(112, 640, 320) == (1, 4, 1)
    assert choose_config(80, 640, 320) == by_rule
    monkeypatch.setitem(MEASURED, (176, 640, 320), (1, 3, 1))
    choose_config.cache_clear()
    assert choose_config(170, 640, 320) == (1, 3, 1)
    assert choose_config(177, 640, 320) == (1, 5, 1)
    monkeypatch.setitem(MEASURED, (240, 640, 320), (1, 1, 1))
    assert beats_cublas(230, 640, 320)
    assert not beats_cublas(241, 640, 320)
    choose_config.cache_clear()


def test_no_cut_is_kept_for_what_cublas_does():
    assert not MEASURED.keys() & choose.CUBLAS_IS_FASTER


def test_our_kernel_is_used_where_it_was_measured_or_rows_are_few_unless_cublas_won(monkeypatch):
    assert beats_cublas(192, 640, 320)
    assert not beats_cublas(193, 640, 320)
    monkeypatch.setitem(MEASURED, (224, 640, 320), (1, 1, 1))
    monkeypatch.setattr(choose, "CUBLAS_IS_FASTER", frozenset({(192, 640, 320)}))
    assert beats_cublas(193, 640, 320)
    assert not beats_cublas(225, 640, 320)
    assert not beats_cublas(161, 640, 320)
    assert beats_cublas(160, 640, 320)
    monkeypatch.setitem(MEASURED, (256, 640, 320), (1, 1, 1))
    assert beats_cublas(256, 640, 320)
    assert not beats_cublas(257, 640, 320)


def test_a_measured_cut_without_registers_to_add_is_not_chosen_to_add(monkeypatch):
    choose_config.cache_clear()
    monkeypatch.setitem(MEASURED, (256, 640, 320), (3, 1, 1))
    assert choose_config(256, 640, 320) == (3, 1, 1)
    assert choose_config(256, 640, 320, adds=True).groups < 3
    choose_config.cache_clear()


# As the cards that were lent said, from 0: their GPCs differ.
CARDS_SEEN = [CLUSTERS_HELD, (0, 132, 66, 39, 30, 22, 17, 15, 15)]


@pytest.mark.parametrize("held", CARDS_SEEN)
def test_measured_cuts_take_no_second_round_on_a_card_that_holds_fewer_clusters(held):
    """A cluster too many nearly doubles a product: (2, 4, 1) has 32 of four, one card holds 30."""
    for (rows, out_size, in_size), cut in MEASURED.items():
        num_clusters = -(-out_size // (GROUP_ROWS * cut[0] * cut[2]))
        rounds = -(-num_clusters // CLUSTERS_HELD[cut[1] * cut[2]])
        config = choose_config(rows, out_size, in_size, held)
        num_clusters = -(-out_size // (GROUP_ROWS * config.groups * config.sharers))
        assert -(-num_clusters // held[config.cluster_size]) <= rounds, (rows, out_size, config)


def test_a_measured_cut_is_not_used_where_its_last_cluster_would_wait(monkeypatch):
    choose_config.cache_clear()
    monkeypatch.setitem(MEASURED, (128, 4096, 12288), (2, 4, 1))
    assert choose_config(128, 4096, 12288, CLUSTERS_HELD) == (2, 4, 1)
    assert choose_config(128, 4096, 12288, CARDS_SEEN[1]) != (2, 4, 1)
    choose_config.cache_clear()


def test_rows_are_padded_to_the_next_size_and_refused_above_the_largest():
    for num_rows in range(1, MAX_ROWS + 1):
        size = padded_rows(num_rows)
        assert num_rows <= size
        assert not any(num_rows <= other < size for other in ROW_SIZES)
    for refuse in (padded_rows, lambda num_rows: choose_config(num_rows, 4096, 4096)):
        with pytest.raises(ValueError, match=f"{MAX_ROWS + 1} rows.*at most {MAX_ROWS}"):
            refuse(MAX_ROWS + 1)


def test_the_library_has_kernels_for_the_same_sizes():
    source = (Path(build.FOLDER) / "linear.cu").read_text()
    sizes = re.search(r"kRowSizes\[\] = \{([\d, ]+)\}", source).group(1)
    assert tuple(int(size) for size in sizes.split(",")) == ROW_SIZES
    params = (Path(build.FOLDER) / "params.cuh").read_text()
    for name, value in (("kBlockK", BLOCK_K), ("kGroupM", GROUP_ROWS)):
        assert f"{name} = {value};" in params
    assert f"kMaxCluster = {MAX_CLUSTER};" in source
