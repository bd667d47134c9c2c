"""Model files are strangers' files: what they announce is checked before it is believed.

A file here is small and its header lies. Whatever would allocate by the lie is watched.
"""

import ast
import base64
import json
import os
import pickle
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zipage_lang
from zipage_lang.evaluation.code_tests import _unpacked
from zipage_lang.frontend.tokenizer import load_tokenizer
from zipage_lang.runtime.model_links import check_links
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.config import read_common
from zipage_lang.runtime.models.gguf_file import GgufFile, read_gguf_texts
from zipage_lang.runtime.models.registry import open_model
from zipage_lang.runtime.models.weights import (
    MAX_JSON_BYTES,
    SafetensorsWeights,
    open_safetensors,
    read_json,
)

ROOT = Path(zipage_lang.__file__).parent.parent
ROOMS = ("zipage_lang", "frontend", "runtime", "radix_cache", "kernels", "server", "training")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
MANY = (2**20, 2**32, 2**60, 2**64 - 1)
SMALL = 30 * 2**20  # bytes that a refusal may take


@pytest.fixture
def frugal():
    """Inside, Python must not have allocated much at any time."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < SMALL, f"{peak / 2**20:.0f} MiB for a file of some bytes"


# -- GGUF ----------------------------------------------------------------------------------------


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def head(num_tensors=0, num_pairs=0, *, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def array(kind, count, content=b""):
    return text("k") + struct.pack("<IIQ", 9, kind, count) + content


def tensor(shape=(4,), kind=0, offset=0, num_axes=None):
    axes = len(shape) if num_axes is None else num_axes
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text("t") + struct.pack("<I", axes) + dims + struct.pack("<IQ", kind, offset)


LIES = {
    "pairs": [head(0, n) for n in MANY],
    "tensors": [head(n, 0) for n in MANY],
    "text": [head(0, 1) + struct.pack("<Q", n) for n in MANY],
    "array of bytes": [head(0, 1) + array(0, n) for n in MANY],
    "array of doubles": [head(0, 1) + array(12, n) for n in MANY],
    "array of strings": [head(0, 1) + array(8, n) for n in MANY],
    "array in an array": [head(0, 1) + array(9, n) for n in MANY],
    "axes": [head(1) + tensor((4,) * 5), head(1) + tensor((4,), num_axes=2**31)],
    "axis": [head(1) + tensor((n,)) for n in MANY],
    "product of axes": [head(1) + tensor((2**32, 2**32)), head(1) + tensor((2**16,) * 4)],
    "no axis length": [head(1) + tensor((0,)), head(1) + tensor((4, 0, 4))],
    "offset": [head(1) + tensor((4,), offset=n) for n in MANY],
    "coding": [head(1) + tensor((4,), kind=n) for n in (99, 2**31)],
    "kind of value": [head(0, 1) + text("k") + struct.pack("<I", 99)],
    "not UTF-8": [head(0, 1) + struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<IB", 0, 0)],
    "version": [head(version=n) for n in (0, 1, 4, 2**31)],
    "alignment": [
        head(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0),
        head(1, 1) + text("general.alignment") + struct.pack("<II", 4, 2**31) + tensor(),
    ],
    "nothing": [b"", b"GGUF", b"GGUF\x03"],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_gguf_header_that_lies_is_refused_at_no_cost(tmp_path, frugal, lie):
    for number, content in enumerate(LIES[lie]):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        for read in (GgufFile, lambda each: read_gguf_texts(each, "k")):
            with pytest.raises(ValueError, match=rf"{number}\.gguf"):
                read(path)


def test_arrays_of_numbers_take_no_more_than_a_share_of_their_file(tmp_path, frugal):
    """Each within the bound of one, but together many times what their bytes are."""
    one = array(0, 2**20, bytes(2**20))
    path = tmp_path / "a.gguf"
    path.write_bytes(head(0, 40) + one * 40)
    tracemalloc.stop()  # four arrays are kept before the bound is met
    with pytest.raises(ValueError, match="numbers in arrays"):
        GgufFile(path)
    tracemalloc.start()


def test_a_gguf_file_that_does_not_lie_is_read(tmp_path):
    path = tmp_path / "a.gguf"
    lead = head(1, 1) + array(4, 3, struct.pack("<3I", 1, 2, 3)) + tensor((2, 2))
    padded = lead + bytes(-len(lead) % 32)
    path.write_bytes(padded + struct.pack("<4f", 1, 2, 3, 4))
    file = GgufFile(path)
    assert file.metadata == {"k": [1, 2, 3]}
    assert file.read("t").tolist() == [[1, 2], [3, 4]]


# -- safetensors ---------------------------------------------------------------------------------


def safetensors(header, body=b"", *, header_len=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if header_len is None else header_len) + raw + body


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


WRONG = {
    "length": [safetensors(entry(), bytes(8), header_len=n) for n in (10**4, 10**9, *MANY)],
    "shorter than its length": [b"", b"\x08", bytes(8), struct.pack("<Q", 1)],
    "no JSON": [safetensors(b"{" * 200), safetensors(b"\xff\xfe"), safetensors([1])],
    "shape": [safetensors(entry((n,)), bytes(8)) for n in (1, 3, 2**62, 2**64 - 1, -1)],
    "product": [safetensors(entry((2**33, 2**33)), bytes(8))],
    "offsets": [
        safetensors(entry(offsets=pair), bytes(8))
        for pair in ((0, 16), (8, 0), (4, 12), (2**63, 2**63 + 8), (-8, 0))
    ],
    "dtype": [safetensors(entry(dtype=name), bytes(8)) for name in ("OBJECT", "", "PY")],
    "pickle": [b"\x80\x04\x95cos\nsystem\n", b"PK\x03\x04" + bytes(60)],
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_safetensors_file_that_lies_is_refused_at_no_cost(tmp_path, frugal, kind):
    for number, content in enumerate(WRONG[kind]):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{number}\.safetensors"):
            open_safetensors(path)


def test_our_own_check_of_the_header_comes_before_the_librarys(tmp_path, monkeypatch):
    """Whatever the library does with a length, it never gets to see one that can't be."""
    asked = []
    monkeypatch.setattr("safetensors.safe_open", lambda *args, **fields: asked.append(args))
    for header_len in (9, 10**8 + 1, 2**63):
        path = tmp_path / f"{header_len}.safetensors"
        path.write_bytes(struct.pack("<Q", header_len) + b"{}      ")
        with pytest.raises(ValueError, match=f"a header of {header_len} bytes is announced"):
            open_safetensors(path)
    assert not asked
    whole = tmp_path / "whole.safetensors"
    whole.write_bytes(struct.pack("<Q", 8) + b"{}      ")
    open_safetensors(whole)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/../../outside.safetensors",
        "sub/inside.safetensors",
        "..",
        ".",
        "",
        "pytorch_model.bin",
        "model.safetensors\x00",
        "..\\outside.safetensors\n",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_names_nothing_but_safetensors_beside_it(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (tmp_path / "outside.safetensors", folder / "model.safetensors"):
        save_file({"t": torch.zeros(1)}, path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"t": shard}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        SafetensorsWeights(folder)


# -- configs -------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ABSURD = {
    "vocab_size": 10**8,
    "hidden_size": 10**9,
    "intermediate_size": 10**9,
    "num_hidden_layers": 10**6,
    "num_attention_heads": 10**6,
    "num_key_value_heads": 10**7,
    "head_dim": 10**6,
    "max_position_embeddings": 2**25,
}


@pytest.mark.parametrize("name", ABSURD)
@pytest.mark.parametrize("kind", [int, "beyond floats", float, str, bool, list])
def test_an_absurd_size_in_a_config_is_refused_before_anything_is_allocated(frugal, name, kind):
    value = 10**400 if kind == "beyond floats" else [1] if kind is list else kind(ABSURD[name])
    with pytest.raises(ValueError):
        read_common({**CONFIG, name: value})


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[1]",
        "NaN",
        "",
        '{"vocab_size": ' + "9" * 5000 + "}",
        b"\xff\xfe\x00",
    ],
)
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"config\.json"):
        open_model(tmp_path)


def test_a_huge_config_is_refused_unread(tmp_path, frugal):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # sparse: takes no disk
    with pytest.raises(ValueError, match=r"config\.json.*bytes, more than"):
        read_json(path)


# -- links ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a file to steal beside it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "id_rsa").write_text("-----BEGIN PRIVATE KEY-----")
    return model


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer.json", "sub/a.jinja"])
def test_a_link_to_somebodys_file_is_not_followed(folder, where):
    link = folder / where
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(folder.parent / "id_rsa")
    with pytest.raises(ValueError, match="is a link to"):
        resolve_model(str(folder))


def test_a_link_to_somebodys_folder_is_not_followed(folder):
    (folder / "additional_chat_templates").symlink_to(folder.parent, target_is_directory=True)
    with pytest.raises(ValueError, match="is a link to"):
        check_links(folder)


def test_links_of_people_and_of_the_hubs_cache_are_followed(folder, tmp_path):
    other = tmp_path / "disk"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors").symlink_to(other / "model.safetensors")
    (folder / "copy.json").symlink_to("config.json")
    assert resolve_model(str(folder)) == folder

    snapshot = tmp_path / "models--a--b" / "snapshots" / "f00"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text(json.dumps(CONFIG))
    (snapshot / "config.json").symlink_to(Path("../../blobs/abc"))
    assert resolve_model(str(snapshot)) == snapshot


# -- code ----------------------------------------------------------------------------------------

EXECUTED = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
EXCEPTIONS = {
    # The training script's own checkpoint, which is in no model's folder and not in the package.
    ("training/checkpoint.py", "torch.load"),
    # A public data set's tests, by a reader to which no class and no function exists.
    ("zipage_lang/evaluation/code_tests.py", "pickle"),
}


def names_of_call(node):
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id, function.attr
    return "", getattr(function, "attr", getattr(function, "id", ""))


def trees():
    for path in FILES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def unpicklers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules.append(getattr(node, "module", None) or "")
            yield from (each for each in modules if each.split(".")[0] in EXECUTED)
        if isinstance(node, ast.Call) and names_of_call(node) in FORBIDDEN_CALLS:
            yield ".".join(names_of_call(node))


def test_nothing_is_ever_unpickled():
    """In the sources of all rooms but two places, of which each says why."""
    assert {(name, what) for name, tree in trees() for what in unpicklers(tree)} == EXCEPTIONS


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_the_one_reader_of_pickles_runs_nothing(tmp_path):
    marker = tmp_path / "it ran"
    packed = base64.b64encode(zlib.compress(pickle.dumps(Touch(marker)))).decode()
    with pytest.raises(ValueError, match="test cases that name"):
        _unpacked(packed)
    assert not marker.exists()


def test_no_model_s_own_code_is_ever_run():
    """Each loader of transformers is told so; left out, it would ask on a terminal."""
    told, loaders = [], []
    for name, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if names_of_call(node)[1] == "from_pretrained":
                loaders.append(name)
                values = {each.arg: getattr(each.value, "value", None) for each in node.keywords}
                told += [name] * (values.get("trust_remote_code", "unset") is not False)
    assert not told
    assert {"frontend/tokenizer.py", "runtime/calibration_prompts.py"} <= set(loaders)


def test_a_tokenizer_with_code_of_its_own_is_refused_and_its_code_not_run(tmp_path, monkeypatch):
    marker = tmp_path / "it ran"
    source = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Evil: pass\n"
    for name in ("tokenization_evil.py", "configuration_evil.py"):
        (tmp_path / name).write_text(source)
    described = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    assert not marker.exists()
    assert os.listdir(tmp_path)
