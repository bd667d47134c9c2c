"""Forecasts on disk: whole or not at all, found again, and refused where they do not fit."""

import logging

import pytest
import safetensors.torch
import torch

from zipage_lang.kernels.backend import Forecast, choose_backend
from zipage_lang.runtime import forecast_source
from zipage_lang.runtime.engine_parts import kv_shape
from zipage_lang.runtime.forecast_making import MadeForecast
from zipage_lang.runtime.forecast_source import load_or_make_forecast
from zipage_lang.runtime.forecast_store import (
    FORMAT,
    file_at_home,
    file_beside,
    model_identity,
    read_forecast,
    write_forecast,
)
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.registry import load_model


def some_forecast(world, seed=1):
    generator = torch.Generator().manual_seed(seed)
    heads = (world.shape.num_layers, world.shape.num_kv_heads)
    return Forecast(
        torch.randn(*heads, world.shape.head_dim, generator=generator),
        torch.randn(*heads, world.shape.head_dim, generator=generator),
        torch.randn(heads, generator=generator),
        world.frequencies,
    )


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def read(world, file, identity="it"):
    return read_forecast(file, world.shape, world.frequencies, identity)


def obtain(world):
    return load_or_make_forecast(world.path, world.loaded, world.shape, world.backend)


@pytest.fixture
def makes(world, monkeypatch):
    """The forecasts that were made; making one is quick."""
    made = []

    def make(loaded, shape, backend, starts):
        made.append(some_forecast(world, seed=10 + len(made)))
        return MadeForecast(made[-1], "a test")

    monkeypatch.setattr(forecast_source, "make_forecast", make)
    return made


def test_what_is_written_is_read_again(world, tmp_path):
    file = tmp_path / "new" / "folder" / "forecast.safetensors"
    forecast = some_forecast(world)
    write_forecast(file, forecast, "it", "a test")
    assert equal(read(world, file), forecast)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": FORMAT, "identity": "it", "made_from": "a test"}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(world, tmp_path, monkeypatch):
    file = tmp_path / "forecast.safetensors"
    old = some_forecast(world)
    write_forecast(file, old, "it", "a test")

    def refuse(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_forecast(file, some_forecast(world, seed=2), "it", "a test")
    assert equal(read(world, file), old)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]


def damaged(world, file, kind):
    forecast = some_forecast(world)
    if kind == "shapes":
        forecast = forecast._replace(key=forecast.key[:1].contiguous())
    if kind == "finite":
        forecast.age[0, 0] = torch.nan
    if kind == "rotation":
        forecast = forecast._replace(frequencies=forecast.frequencies / 2)
    write_forecast(file, forecast, "another" if kind == "identity" else "it", "a test")
    if kind == "whole":
        file.write_bytes(file.read_bytes()[:-8])
    if kind == "format":
        safetensors.torch.save_file(forecast._asdict(), file, {"format": "else"})


@pytest.mark.parametrize("kind", ["shapes", "finite", "rotation", "identity", "whole", "format"])
def test_a_file_that_does_not_fit_is_refused_by_name(world, tmp_path, kind):
    file = tmp_path / "forecast.safetensors"
    damaged(world, file, kind)
    with pytest.raises(ValueError, match=kind) as error:
        read(world, file)
    assert str(file) in str(error.value)


def test_identity_is_that_of_the_weights_not_of_their_number_format(world_of):
    first = model_identity(world_of().loaded)
    assert first == model_identity(world_of(dtype=torch.float32).loaded)
    assert first != model_identity(world_of(std=0.2).loaded)
    assert first != model_identity(world_of(rope_theta=5000.0).loaded)
    path, backend = resolve_model("zipage-tiny-reasoner"), choose_backend("cpu")
    formats = [load_model(path, dtype, backend, 64) for dtype in (torch.float32, torch.bfloat16)]
    assert len({model_identity(loaded) for loaded in formats}) == 1


def test_a_forecast_is_made_once_and_kept_at_home(world, home, makes, caplog):
    first = obtain(world)
    assert equal(obtain(world), first)
    assert len(makes) == 1
    assert file_at_home(model_identity(world.loaded)).is_file()
    assert home in file_at_home("any").parents


def test_a_forecast_beside_the_model_comes_first(world, home, makes):
    obtain(world)
    ours = some_forecast(world, seed=3)
    write_forecast(file_beside(world.path), ours, model_identity(world.loaded), "a test")
    assert equal(obtain(world), ours)


def test_a_file_that_does_not_fit_is_named_and_made_anew(world, home, makes, caplog):
    file = file_at_home(model_identity(world.loaded))
    write_forecast(file, some_forecast(world), "another", "a test")
    found = obtain(world)
    assert equal(found, makes[0])
    assert [str(file) in message for message in caplog.messages].count(True) == 1
    assert equal(read(world, file, model_identity(world.loaded)), found)


def test_without_a_place_to_keep_it_the_forecast_is_in_memory(world, makes, monkeypatch, caplog):
    blocked = world.path / "config.json"  # a file: no folder can be made below
    monkeypatch.setenv("ZIPAGE_HOME", str(blocked))
    caplog.set_level(logging.WARNING, "zipage.engine")
    assert equal(obtain(world), makes[0])
    assert len([m for m in caplog.messages if "in memory only" in m]) == 1


def test_a_model_without_a_tokenizer_writes_without_prompts(world, home, monkeypatch, caplog):
    asked = []

    def make(loaded, shape, backend, starts):
        asked.append(starts)
        return MadeForecast(some_forecast(world), "a test")

    monkeypatch.setattr(forecast_source, "make_forecast", make)
    obtain(world)
    assert asked == [[]]
    assert "without prompts" in caplog.text


def test_nothing_is_made_or_kept_for_a_model_that_is_only_a_name(world, home, makes):
    path = world.path / "no-such-model"
    forecast = load_or_make_forecast(path, world.loaded, world.shape, world.backend)
    assert not makes
    assert not home.exists()
    assert (forecast.age < 0).all()
    assert forecast.key.shape == (2, 2, 8)


def test_the_tiny_reasoner_comes_with_its_forecast(home, makes):
    path, backend = resolve_model("zipage-tiny-reasoner"), choose_backend("cpu")
    loaded = load_model(path, torch.bfloat16, backend, None)
    forecast = load_or_make_forecast(path, loaded, kv_shape(loaded, torch.bfloat16), backend)
    assert not makes
    assert forecast.key.shape == (8, 2, 64)


def test_a_forecast_beside_the_weights_is_none_of_them(world, tmp_path):
    source = resolve_model("zipage-tiny-reasoner")
    model = load_model(source, torch.float32, world.backend, 64)
    folder = tmp_path / "single"
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tensors = {}
    for shard in source.glob("model-*.safetensors"):
        tensors |= safetensors.torch.load_file(shard)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    write_forecast(file_beside(folder), some_forecast(world), "it", "a test")
    again = load_model(folder, torch.float32, world.backend, 64)
    assert model_identity(again) == model_identity(model)
