"""The keys that the settings and the files they name give: clients' and the operator's.

Knows nothing of who sends them or what they open.
"""

import dataclasses
import logging
from pathlib import Path

from zipage_lang.server.config import ServerConfig

MAX_FILE_BYTES = 2**20
SHORT_KEY = 16  # characters; shorter keys may be guessed by trying

log = logging.getLogger("zipage.server")


@dataclasses.dataclass(frozen=True)
class Keys:
    """All of them, without doubles. Their repr does not show them."""

    clients: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    operator: str | None = dataclasses.field(default=None, repr=False)


def read_keys(config: ServerConfig) -> Keys:
    """Raises ValueError that names the file which can't be read or holds no key."""
    clients = config.api_keys
    if config.api_key_file is not None:
        clients = (*clients, *_lines("api_key_file", config.api_key_file))
    operator = config.admin_key
    if config.admin_key_file is not None:
        found = _lines("admin_key_file", config.admin_key_file)
        if len(found) != 1:
            raise ValueError(f"admin_key_file={config.admin_key_file!r} must hold one key")
        operator = found[0]
    keys = Keys(tuple(dict.fromkeys(clients)), operator)
    _warn_of_short(keys)
    return keys


def _lines(name: str, file: str) -> list[str]:
    """The file's keys: one a line; empty lines and those that begin with # are none."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it is over {MAX_FILE_BYTES} bytes")
        lines = [line.strip(" \t\r") for line in content.decode().split("\n")]
    except (OSError, ValueError) as error:  # the file's text may be secret: not shown
        reason = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"{name}={file!r} can't be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{name}={file!r} holds no key; write one a line")
    return keys


def _warn_of_short(keys: Keys) -> None:
    all_keys = [*keys.clients, *([keys.operator] if keys.operator else [])]
    num_short = sum(len(key) < SHORT_KEY for key in all_keys)
    if num_short:
        log.warning(
            "%d of %d keys are shorter than %d characters and may be guessed; make them with "
            "`openssl rand -hex 24`",
            num_short,
            len(all_keys),
            SHORT_KEY,
        )
