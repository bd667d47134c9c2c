"""CURVE keys for engines that are joined over TCP: made, read, and checked, as files.

`make_keys(folder)` writes two folders. `engine/` stays with the engine: its secret key, and in
`clients/` the public keys of those it lets in. `client/` goes to a client: that one's secret key
and the engine's public one. Secret files have mode 0600.
Knows nothing of sockets or engines.
"""

import dataclasses
import stat
from pathlib import Path

import zmq
import zmq.auth

ENGINE, CLIENT = "engine", "client"
KEY_LEN = 40  # Z85 characters


@dataclasses.dataclass(frozen=True)
class KeyPair:
    """Z85 texts, as ZMQ takes them. The secret one is not shown."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class EngineKeys:
    """What an engine needs to listen: its keys and the folder of those it lets in."""

    own: KeyPair
    clients: Path


@dataclasses.dataclass(frozen=True)
class ClientKeys:
    """What a client needs to connect: its keys and the engine's public one."""

    own: KeyPair
    engine: bytes


def make_keys(folder: str | Path) -> tuple[Path, Path]:
    """New keys for an engine and one client; the folders `engine` and `client` in `folder`.

    Raises ValueError where keys are there already: they may be in use.
    """
    check_curve()
    engine, client = Path(folder) / ENGINE, Path(folder) / CLIENT
    for made in (engine, client):
        if made.exists():
            raise ValueError(f"{made} is there already; choose another folder, or remove it")
    for made in (engine, client, engine / "clients"):
        made.mkdir(mode=0o700, parents=True)
    zmq.auth.create_certificates(engine, ENGINE)
    zmq.auth.create_certificates(client, CLIENT)
    for secret in (engine / f"{ENGINE}.key_secret", client / f"{CLIENT}.key_secret"):
        secret.chmod(0o600)
    (engine / f"{ENGINE}.key").rename(client / f"{ENGINE}.key")
    (client / f"{CLIENT}.key").rename(engine / "clients" / f"{CLIENT}.key")
    return engine, client


def read_engine_keys(folder: str | Path) -> EngineKeys:
    """What `make_keys` wrote for the engine. Raises ValueError for what won't do."""
    check_curve()
    clients = Path(folder) / "clients"
    if not any(clients.glob("*.key")):
        raise ValueError(f"{clients} has no client's public key (*.key), so nobody could connect")
    for file in clients.glob("*.key"):
        _public_key(file)
    return EngineKeys(own=_key_pair(Path(folder) / f"{ENGINE}.key_secret"), clients=clients)


def read_client_keys(folder: str | Path) -> ClientKeys:
    """What `make_keys` wrote for a client. Raises ValueError for what won't do."""
    check_curve()
    own = _key_pair(Path(folder) / f"{CLIENT}.key_secret")
    return ClientKeys(own=own, engine=_public_key(Path(folder) / f"{ENGINE}.key"))


def check_curve() -> None:
    """Raises ValueError where this machine's libzmq can't encrypt."""
    if not zmq.has("curve"):
        raise ValueError(
            "this machine's libzmq was built without CURVE (libsodium), which TCP needs; install "
            "pyzmq from its wheel"
        )


def check_address(address: str) -> None:
    """Raises ValueError for what is no tcp://host:port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"address={address!r} must be tcp://host:port")


def _key_pair(file: Path) -> KeyPair:
    public, secret = _read(file)
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"{file} may be read by others (mode {mode:04o}); run: chmod 600 {file}")
    if secret is None or len(secret) != KEY_LEN:
        raise ValueError(f"{file} has no secret key; make new ones with `zipage engine keys`")
    return KeyPair(public, secret)


def _public_key(file: Path) -> bytes:
    return _read(file)[0]


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} is no file of CURVE keys; `zipage engine keys FOLDER` makes them"
        ) from error
    if len(public) != KEY_LEN:
        raise ValueError(f"{file} has no public key of {KEY_LEN} characters")
    return public, secret
