"""Whose a call is: one tenant per API key, and what each may name, share and see.

What a caller names (requests, groups, parents, held states) is known to the engine under the
tenant's own prefix, so nobody can reach, collide with or learn of what another tenant named.
Knows nothing of HTTP or of engines.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Iterator
from typing import Any

from zipage_lang.server.api_error import TYPES, ApiError
from zipage_lang.server.keys import Keys

NAME_BYTES = 8
SALT_BYTES = 16  # of a salt's hash: caches are told apart by it, whatever the salt's length


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who shares an API key.

    Parameters:
        name: a hash of the key under a secret of this process; "" where there are no keys at all.
        is_operator: may see and do what concerns everybody.
        has_key: came in by a key; otherwise only an address tells callers apart.
        has_neighbours: there are other tenants.
        shares_prefixes: its cached prefixes serve others too, and theirs serve it.
    """

    name: str
    is_operator: bool
    has_key: bool
    has_neighbours: bool
    shares_prefixes: bool

    def engine_id(self, name: str) -> str:
        """The engine's name of what this tenant calls `name`."""
        return f"{self.name}/{name}" if self.name else name

    def own_words(self, text: str) -> str:
        """A text of the engine's, with the tenant's own names in it."""
        return text.replace(f"{self.name}/", "") if self.name else text

    def namespace(self, salt: str) -> str:
        """Which cached prefixes a request may share: no two (tenant, salt) have the same.

        Raises UnicodeEncodeError for a salt with a lone surrogate.
        """
        root = "" if self.shares_prefixes else self.name
        if not salt:
            return root
        digest = hashlib.blake2b(salt.encode(), digest_size=SALT_BYTES)
        return f"{root}:{digest.hexdigest()}"

    def engine_fields(self, *, namespace: str, group_id: str, parent_id: str | None) -> Any:
        """Fields of an AddRequest, made of what the caller named."""
        return {
            "tenant": self.name,
            "namespace": self.namespace(namespace),
            "group_id": self.engine_id(group_id) if group_id else "",
            "parent_id": None if parent_id is None else self.engine_id(parent_id),
        }

    def check_priority(self, priority: int) -> None:
        """Raise ApiError 403 for a priority that would go before other tenants' requests."""
        if priority < 0 and not self.is_operator:
            raise ApiError(
                403,
                f"priority={priority} would go before other clients' requests, which only the "
                "operator's may; use 0 or more",
                type=TYPES[403],
                param="priority",
                code="operator_only",
            )


class Tenants:
    """Everybody who may call, found by the key that is sent.

    The operator is who has the operator's key. Without one it is everybody where there are no keys,
    the only client where there is one key, and nobody where clients could spy on each other.
    `anybody`: whom a call without a known key is; None: such a call is not let in.
    """

    def __init__(self, keys: Keys, *, share_prefixes: bool = False) -> None:
        self._secret = secrets.token_bytes(32)
        self._share_prefixes = share_prefixes
        lone = keys.clients[0] if len(keys.clients) == 1 else None
        self._operator = keys.operator or lone
        known = dict.fromkeys((*keys.clients, *([self._operator] if self._operator else [])))
        self._has_keys = bool(known)
        self.num_tenants = len(known) + (not keys.clients)
        self._by_digest = [(self._digest(key.encode()), self._tenant(key)) for key in known]
        self.anybody = None if keys.clients else self._tenant("")

    def find(self, sent: bytes) -> Tenant | None:
        """Whose key that is. Looks at all keys: how long it takes tells nothing of them."""
        digest, found = self._digest(sent), None
        for known, tenant in self._by_digest:
            if hmac.compare_digest(digest, known):
                found = tenant
        return found

    @property
    def names(self) -> list[str]:
        """Of those with keys, in the order of the keys; the operator's comes last."""
        return [tenant.name for _, tenant in self._by_digest]

    def _tenant(self, key: str) -> Tenant:
        return Tenant(
            name=self._digest(key.encode())[:NAME_BYTES].hex() if self._has_keys else "",
            is_operator=key == self._operator or not self._has_keys,
            has_key=bool(key),
            has_neighbours=self.num_tenants > 1,
            shares_prefixes=self._share_prefixes,
        )

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


_current: contextvars.ContextVar[Tenant | None] = contextvars.ContextVar(
    "zipage_tenant", default=None
)


def current_tenant() -> Tenant | None:
    """Whose call is being served; None outside of one, and where anybody may come in."""
    return _current.get()


@contextlib.contextmanager
def call_of(tenant: Tenant | None) -> Iterator[None]:
    """What runs inside is a call of that tenant."""
    token = _current.set(tenant)
    try:
        yield
    finally:
        _current.reset(token)


def operator_only(tenant: Tenant) -> None:
    """Raise ApiError 403 for a call that is not the operator's."""
    if tenant.is_operator:
        return
    raise ApiError(
        403,
        "this concerns all clients of the server, so it is for its operator: send the key that was "
        "set with --admin-key (or ZIPAGE_ADMIN_KEY)",
        type=TYPES[403],
        code="operator_only",
    )
