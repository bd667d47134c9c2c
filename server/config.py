"""The server's settings: one frozen dataclass; flags and the reference page are made from it.

Knows nothing of HTTP, of engines or of how a setting is acted upon.
"""

import dataclasses
from typing import Any, Literal, get_args

from zipage_lang.runtime.documented import documented
from zipage_lang.runtime.strict_fields import strict_fields

ToolFormat = Literal["auto", "hermes", "llama"]
LogFormat = Literal["text", "json"]


@strict_fields("server option")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server listens, whom it lets in and how much it takes on.

    Parameters: the fields below; each one's meaning is its metadata's "help". Errors: ValueError
    for an unknown field or a value out of range.
    """

    host: str = documented("127.0.0.1", "address to listen on; 0.0.0.0 is every network")
    port: int = documented(8000, "port to listen on; 0 takes any")
    api_keys: tuple[str, ...] = documented(
        (),
        "keys that clients must send as a bearer token, one per client whose requests are to "
        "be kept apart; none: everybody is let in",
    )
    api_key_file: str | None = documented(
        None, "a file of such keys, one a line: unlike flags it does not show in ps"
    )
    admin_key: str | None = documented(
        None,
        "the operator's key: for metrics, the live page, the cache and everybody's requests; "
        "unset: whoever is let in where there are no keys or one, nobody where there are several",
    )
    admin_key_file: str | None = documented(None, "a file that holds the operator's key")
    share_prefixes: bool = documented(
        False,
        "let clients of different keys share cached prefixes; they can then measure by the "
        "time to the first token what others have sent",
    )
    max_samples_per_key: int | None = documented(
        None,
        "samples of one key that may run or wait; further ones get a 429; unset: half of all "
        "where there are several keys",
    )
    open_metrics: bool = documented(
        False, "answer /metrics without a key, for scrapers in a network of your own"
    )
    allowed_hosts: tuple[str, ...] = documented(
        (),
        "names by which the server may be called; * is every one; unset: every one, or where it "
        "has no keys and listens on this machine alone, this machine's own",
    )
    served_model_name: str | None = documented(
        None, "the name clients see; without it the model's own"
    )
    strict_model: bool = documented(False, "refuse requests that name another model, with a 404")
    max_body_mib: float = documented(16.0, "largest request body in MiB; larger ones get a 413")
    max_waiting: int = documented(
        1024, "samples that may wait beyond the engine's rows; further ones get a 503"
    )
    rate_limit: int | None = documented(
        None, "requests a minute per key, or per address without keys; then a 429"
    )
    drain_timeout: float = documented(
        30.0, "seconds that running requests get to finish on SIGTERM"
    )
    engine_timeout: float = documented(
        300.0,
        "seconds without a sign of life, longer than any step, after which the engine is replaced; "
        "/ready says 503 from a quarter of it on",
    )
    tool_format: ToolFormat = documented(
        "auto", "how the model writes tool calls: hermes, llama; auto asks its template"
    )
    cors_origins: tuple[str, ...] = documented(
        (), "web origins whose pages may call the server; * is every one"
    )
    log_format: LogFormat = documented("text", "log lines as text, or as one JSON object each")
    log_requests: bool = documented(False, "log a line for each request")
    otel_endpoint: str | None = documented(
        None, "where OpenTelemetry traces go (OTLP); needs the extra otel"
    )
    dashboard: bool = documented(True, "serve the live page at /dashboard")

    def __post_init__(self) -> None:
        for name in ("api_keys", "cors_origins", "allowed_hosts"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name in _TEXTS:
            _check_text(name, getattr(self, name), is_optional=name != "host")
        if self.admin_key is not None and not (self.admin_key and isinstance(self.admin_key, str)):
            raise ValueError("admin_key must be a text that is not empty")  # secret: not shown
        if self.admin_key is not None and self.admin_key_file is not None:
            raise ValueError("give admin_key or admin_key_file, one of them")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        _check_number("port", self.port, 0, 65535, is_whole=True)
        _check_number("max_waiting", self.max_waiting, 0, 10**6, is_whole=True)
        _check_number("max_body_mib", self.max_body_mib, 0.001, 1024)
        _check_number("drain_timeout", self.drain_timeout, 0, 86400)
        _check_number("engine_timeout", self.engine_timeout, 0.1, 10**6)
        for name in ("rate_limit", "max_samples_per_key"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 1, 10**6, is_whole=True)
        _check_choice("tool_format", self.tool_format, get_args(ToolFormat))
        _check_choice("log_format", self.log_format, get_args(LogFormat))

    def __repr__(self) -> str:
        return f"ServerConfig({self.told})"

    @property
    def told(self) -> dict[str, Any]:
        """All settings, but of the keys only how many there are."""
        settings = dataclasses.asdict(self)
        settings["api_keys"] = len(self.api_keys)
        settings["admin_key"] = self.admin_key is not None
        return settings


_TEXTS = ("host", "api_key_file", "admin_key_file", "served_model_name", "otel_endpoint")
_SWITCHES = ("share_prefixes", "open_metrics", "strict_model", "log_requests", "dashboard")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts as a tuple; a lone text is a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"{name} must be texts that are not empty")  # may be secret: not shown
    return tuple(texts)


def _check_text(name: str, value: Any, *, is_optional: bool) -> None:
    if value is None and is_optional:
        return
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r} must be a text that is not empty")


def _check_number(
    name: str, value: Any, low: float, high: float, *, is_whole: bool = False
) -> None:
    kinds = (int,) if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{name}={value!r} must be {kind} from {low:g} to {high:g}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
