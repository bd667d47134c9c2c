"""Which settings each command shows as flags, and under which headings.

Knows nothing of how flags are made or what commands do.
"""

from zipage_lang.flags import FlagGroup
from zipage_lang.runtime.config import (
    CacheConfig,
    CompressionConfig,
    ModelConfig,
    SchedulerConfig,
)
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.server.config import ServerConfig

SAMPLED = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
SAMPLED_MORE = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "regex",
    "json_schema",
)

ENGINE_GROUPS = (
    FlagGroup(heading="Model", settings=ModelConfig, skip=("model",)),
    FlagGroup(heading="KV compression", settings=CompressionConfig),
    FlagGroup(heading="Memory", settings=CacheConfig),
    FlagGroup(heading="Scheduling", settings=SchedulerConfig),
)

# What a sweep varies is not among them.
EVAL_GROUPS = (
    ENGINE_GROUPS[0],
    FlagGroup(heading="KV compression", settings=CompressionConfig, only=("num_query_slots",)),
    *ENGINE_GROUPS[2:],
)
# Before the engine's, so that `--max-waiting` is the server's.
SERVER_GROUPS = (
    FlagGroup(
        heading="Server",
        settings=ServerConfig,
        environment={"api_keys": "ZIPAGE_API_KEY", "admin_key": "ZIPAGE_ADMIN_KEY"},
    ),
)


def program_groups() -> tuple[FlagGroup, ...]:
    """Flags of how a program's calls draw where they do not say it themselves."""
    fields = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
    return (FlagGroup(heading="Calls' defaults", settings=SamplingParams, only=fields),)


def sampling_groups(temperature: float, max_tokens: int) -> tuple[FlagGroup, ...]:
    """Flags of how a text is drawn, with the command's own defaults."""
    return (
        FlagGroup(
            heading="Sampling",
            settings=SamplingParams,
            only=(*SAMPLED, *SAMPLED_MORE),
            defaults={"temperature": temperature, "max_tokens": max_tokens},
        ),
    )
