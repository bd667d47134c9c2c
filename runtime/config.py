"""The engine's settings: one frozen dataclass per room, composed in EngineConfig.

Knows nothing of tensors or of what the machine decides (how many blocks fit is a result, not a
setting).
"""

import dataclasses
from collections.abc import Callable
from math import isfinite
from typing import Any, Literal

from zipage_lang.runtime.documented import documented
from zipage_lang.runtime.kv_params import KVParams, KVSettings, Mode, Protect, Reuse, check_kv_field
from zipage_lang.runtime.strict_fields import strict_fields, unknown_name_error

DType = Literal["float32", "bfloat16"]
BackendName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Order = Literal["fcfs", "lpm"]


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda value: isinstance(value, int)),
    "float": ("a finite number", lambda value: isinstance(value, (int, float)) and isfinite(value)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("a string", lambda value: isinstance(value, str)),
}


def _check_kinds(settings: Any) -> None:
    """Raise ValueError for a value that is not of its field's kind."""
    for field in dataclasses.fields(settings):
        name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        kind, _, optional = name.partition(" | ")
        value = getattr(settings, field.name)
        if kind not in _KINDS or (optional and value is None):
            continue
        wanted, is_right = _KINDS[kind]
        is_stray_bool = isinstance(value, bool) and kind != "bool"
        if is_stray_bool or not is_right(value):
            raise ValueError(f"{field.name}={value!r} must be {wanted}")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise ValueError(f"{name}={value} must be at least {low}")


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")


@strict_fields("engine option")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights run, in which number format, on which backend."""

    model: str = documented(
        "smollm2-135m", "a known name, a local folder, a GGUF file or a Hugging Face id"
    )
    dtype: DType = documented("float32", "of weights and KV cache")
    max_model_len: int | None = documented(
        None, "context in tokens; None: what the model's config says"
    )
    backend: BackendName = documented("auto", "auto: cuda where there is a card, else cpu")
    load_format: LoadFormat = documented(
        "auto", "dummy: random weights in the shape that `model` names"
    )
    num_threads: int | None = documented(
        None, "CPU threads of the engine process; None: torch's choice"
    )
    deterministic: bool = documented(
        False, "strict mode: a request's outputs do not depend on what runs beside it; slower"
    )

    def __post_init__(self) -> None:
        _check_kinds(self)
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))
        _one_of("backend", self.backend, ("auto", "cpu", "cuda"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.num_threads is not None:
            _at_least("num_threads", self.num_threads, 1)


@strict_fields("engine option")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The pool of KV blocks and where requests go when it is full."""

    block_size: int = documented(16, "slots per block; also the radix tree's granularity")
    kv_cache_memory: float | None = documented(
        None, "GiB for the pool; None: 1 on a CPU, measured on a card"
    )
    num_blocks: int | None = documented(None, "usable blocks, overrides kv_cache_memory")
    gpu_memory_share: float = documented(
        0.92, "of the card's memory that may be in use, by whoever, measured"
    )
    swap_space: float = documented(0.5, "GiB of host memory for requests that lost their place")
    prefix_caching: bool = documented(
        True, "keep prefixes in the radix tree after their request ends"
    )

    def __post_init__(self) -> None:
        _check_kinds(self)
        _at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            _at_least("num_blocks", self.num_blocks, 1)
        elif self.kv_cache_memory is not None and self.kv_cache_memory <= 0:
            raise ValueError(f"kv_cache_memory={self.kv_cache_memory} must be above 0 GiB")
        if not 0 < self.gpu_memory_share <= 1:
            raise ValueError(f"gpu_memory_share={self.gpu_memory_share} must be above 0, at most 1")
        _at_least("swap_space", self.swap_space, 0)


@strict_fields("engine option")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much runs in a step and who goes first."""

    max_running: int = documented(64, "requests that may hold a row at once")
    max_step_tokens: int = documented(
        512, "token budget of a step: decodes first, then prefill chunks"
    )
    max_chunk_len: int | None = documented(
        None, "prefill tokens of one request per step; None: the budget"
    )
    order: Order = documented("fcfs", "lpm: longest cached prefix first")
    turn_len: int = documented(
        512, "tokens drawn per turn; the displaced of an earlier turn go first"
    )
    growth_reserve: int = documented(
        256, "tokens a running request may grow before new ones get the memory"
    )
    max_skips: int = documented(64, "lpm: a request passed over this often goes first")
    overlap: bool | None = documented(
        None, "plan a step while the last one runs; None: where there is a card"
    )
    cuda_graphs: bool = documented(True, "decode steps as CUDA graphs, on backends that have them")
    max_waiting: int = documented(100_000, "requests queued before new ones are refused")
    max_waiting_per_tenant: int | None = documented(
        None, "the same for the requests of one tenant; None: no bound of its own"
    )

    def __post_init__(self) -> None:
        _check_kinds(self)
        _one_of("order", self.order, ("fcfs", "lpm"))
        for name in ("max_running", "max_step_tokens", "turn_len", "max_skips", "max_waiting"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_chunk_len", "max_waiting_per_tenant"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)


@strict_fields("engine option")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Defaults for how a request's KV cache is bounded; a request may ask for its own."""

    kv_mode: Mode = documented("off", "fixed: compact when due; adaptive: only under pressure")
    kv_budget: int = documented(2048, "K: tail tokens kept per (layer, KV head)")
    evict_interval: int = documented(256, "E: tail tokens that may pile up on top of K")
    policy: str = documented("zipage2", "a name, or name:parameter=value:.. (docs/policies.md)")
    protect: Protect = documented("prompt", "none: the prompt competes too, as in the paper")
    kv_reuse: Reuse = documented(
        "compacted", "exact: never continue from a compacted node of the tree"
    )
    num_query_slots: int | None = documented(
        None, "query rings for scoring; None: one per 4 rows, 16 at least"
    )

    def __post_init__(self) -> None:
        _check_kinds(self)
        check_kv_field("mode", self.kv_mode)
        check_kv_field("budget", self.kv_budget)
        check_kv_field("interval", self.evict_interval)
        check_kv_field("policy", self.policy)
        check_kv_field("protect", self.protect)
        check_kv_field("reuse", self.kv_reuse)
        if self.num_query_slots is not None:
            _at_least("num_query_slots", self.num_query_slots, 1)

    def resolve(self, asked: KVParams | None, num_prompt_tokens: int) -> KVSettings:
        """Fill what the caller left open with the engine's defaults."""
        kv = asked or KVParams()
        protect = kv.protect or self.protect
        protected_len = num_prompt_tokens if kv.protected_len is None else kv.protected_len
        return KVSettings(
            mode=kv.mode or self.kv_mode,
            budget=kv.budget or self.kv_budget,
            interval=kv.interval or self.evict_interval,
            policy=kv.policy or self.policy,
            protected_len=0 if protect == "none" else min(protected_len, num_prompt_tokens),
            reuse=kv.reuse or self.kv_reuse,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All of an engine's settings. Each part is handed only to the room it belongs to."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    compression: CompressionConfig = dataclasses.field(default_factory=CompressionConfig)

    def __post_init__(self) -> None:
        if self.model.deterministic and self.compression.kv_mode == "adaptive":
            raise ValueError(
                "kv_mode='adaptive' compacts when others need memory, which deterministic=True "
                "rules out; use kv_mode='fixed' or 'off'"
            )

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Build from flat option names, as `zipage.Engine(...)` takes them.

        Raises ValueError for an unknown name (the nearest known one is named) or a bad value.
        """
        parts: dict[str, dict[str, Any]] = {field.name: {} for field in dataclasses.fields(cls)}
        homes = option_homes()
        for name, value in options.items():
            if name not in homes:
                raise unknown_name_error("engine option", name, homes)
            parts[homes[name]][name] = value
        return cls(
            model=ModelConfig(**parts["model"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            compression=CompressionConfig(**parts["compression"]),
        )


def option_homes() -> dict[str, str]:
    """Flat option name -> the EngineConfig part it belongs to."""
    parts = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "compression": CompressionConfig,
    }
    return {field.name: home for home, part in parts.items() for field in dataclasses.fields(part)}
