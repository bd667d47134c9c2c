"""Engine options: defaults, ranges, unknown names, and how a request's KV settings come about."""

import dataclasses
import re

import pytest

from zipage_lang.runtime.config import (
    CacheConfig,
    CompressionConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    option_homes,
)
from zipage_lang.runtime.kv_params import KVParams, KVSettings

BAD_OPTIONS = [
    ("dtype", "float16", "must be one of float32, bfloat16"),
    ("backend", "tpu", "must be one of auto, cpu, cuda"),
    ("max_model_len", 1, "must be at least 2"),
    ("num_threads", 0, "must be at least 1"),
    ("block_size", 0, "must be at least 1"),
    ("num_blocks", 0, "must be at least 1"),
    ("kv_cache_memory", 0, "must be above 0 GiB"),
    ("kv_cache_memory", -1.5, "must be above 0 GiB"),
    ("gpu_memory_share", 0, "must be above 0, at most 1"),
    ("gpu_memory_share", 1.5, "must be above 0, at most 1"),
    ("swap_space", -0.5, "must be at least 0"),
    ("max_running", 0, "must be at least 1"),
    ("max_step_tokens", 0, "must be at least 1"),
    ("max_chunk_len", 0, "must be at least 1"),
    ("order", "lifo", "must be one of fcfs, lpm"),
    ("max_skips", 0, "must be at least 1"),
    ("max_waiting", 0, "must be at least 1"),
    ("kv_mode", "on", "must be one of off, fixed, adaptive"),
    ("kv_budget", 0, "at least 1"),
    ("kv_budget", 1.5, "must be a whole number"),
    ("evict_interval", 0, "at least 1"),
    ("policy", "", "must be the name of a policy"),
    ("protect", "all", "must be one of prompt, none"),
    ("kv_reuse", "no", "must be one of compacted, exact"),
    ("num_query_slots", 0, "must be at least 1"),
]


@pytest.mark.parametrize(("name", "value", "fix"), BAD_OPTIONS)
def test_bad_option_is_refused_with_value_and_fix(name, value, fix):
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        EngineConfig.from_options(**{name: value})
    assert repr(value) in str(caught.value)
    named = {"kv_budget": "kv budget", "evict_interval": "kv interval", "policy": "kv policy"}
    named |= {"kv_mode": "kv mode", "kv_reuse": "kv reuse", "protect": "kv protect"}
    assert str(caught.value).startswith((name, named.get(name, name)))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("kv_buget", "kv_budget"),
        ("blocksize", "block_size"),
        ("evict_intervall", "evict_interval"),
        ("max_runing", "max_running"),
    ],
)
def test_unknown_option_names_the_nearest(wrong, right):
    with pytest.raises(
        ValueError, match=f"unknown engine option '{wrong}'; did you mean '{right}'"
    ):
        EngineConfig.from_options(**{wrong: 1})


def test_unknown_option_with_no_near_name_lists_all():
    with pytest.raises(
        ValueError, match=r"unknown engine option 'zzz'; known: .*block_size.*order"
    ):
        EngineConfig.from_options(zzz=1)


@pytest.mark.parametrize("part", [ModelConfig, CacheConfig, SchedulerConfig, CompressionConfig])
def test_each_part_refuses_unknown_names_by_itself(part):
    with pytest.raises(ValueError, match="unknown engine option"):
        part(colour="red")


def test_flat_options_reach_their_part():
    config = EngineConfig.from_options(
        model="a", num_blocks=7, order="lpm", kv_mode="fixed", kv_budget=8
    )
    assert config.model == ModelConfig(model="a")
    assert config.cache == CacheConfig(num_blocks=7)
    assert config.scheduler == SchedulerConfig(order="lpm")
    assert config.compression == CompressionConfig(kv_mode="fixed", kv_budget=8)


def test_no_options_give_the_defaults():
    assert EngineConfig.from_options() == EngineConfig()


def test_option_names_are_unique_across_parts():
    parts = (ModelConfig, CacheConfig, SchedulerConfig, CompressionConfig)
    names = [field.name for part in parts for field in dataclasses.fields(part)]
    assert len(names) == len(set(names)) == len(option_homes())


def test_num_blocks_overrides_the_memory_size():
    assert CacheConfig(num_blocks=3, kv_cache_memory=0).num_blocks == 3


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().cache.block_size = 2


ENGINE = CompressionConfig(
    kv_mode="fixed", kv_budget=64, evict_interval=16, policy="streaming", kv_reuse="exact"
)


def test_request_without_wishes_takes_the_engines_settings():
    wanted = KVSettings(
        mode="fixed", budget=64, interval=16, policy="streaming", protected_len=30, reuse="exact"
    )
    assert ENGINE.resolve(None, 30) == ENGINE.resolve(KVParams(), 30) == wanted


@pytest.mark.parametrize(
    "wish",
    [
        {"mode": "off"},
        {"budget": 1},
        {"interval": 1},
        {"policy": "random"},
        {"protected_len": 0},
        {"reuse": "compacted"},
    ],
)
def test_one_wish_changes_one_setting(wish):
    assert ENGINE.resolve(KVParams(**wish), 30) == dataclasses.replace(
        ENGINE.resolve(None, 30), **wish
    )


@pytest.mark.parametrize(
    ("asked", "num_prompt", "protected"), [(None, 9, 9), (4, 9, 4), (40, 9, 9), (0, 9, 0)]
)
def test_protection_never_reaches_past_the_prompt(asked, num_prompt, protected):
    assert ENGINE.resolve(KVParams(protected_len=asked), num_prompt).protected_len == protected


@pytest.mark.parametrize("where", ["request", "engine"])
def test_protect_none_leaves_nothing_protected(where):
    if where == "request":
        settings = ENGINE.resolve(KVParams(protect="none", protected_len=5), 9)
    else:
        settings = dataclasses.replace(ENGINE, protect="none").resolve(None, 9)
    assert settings.protected_len == 0


def test_request_may_protect_its_prompt_where_the_engine_does_not():
    engine = dataclasses.replace(ENGINE, protect="none")
    assert engine.resolve(KVParams(protect="prompt"), 9).protected_len == 9
