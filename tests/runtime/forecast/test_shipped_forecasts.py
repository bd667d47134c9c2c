"""The models that come with the package or are pulled by name need no calibration.

Knows nothing of how good their forecasts are.
"""

import pytest
import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime import forecast_source
from zipage_lang.runtime.engine_parts import kv_shape
from zipage_lang.runtime.model_store import resolve_model
from zipage_lang.runtime.models.registry import load_model


@pytest.mark.parametrize("name", ["smollm2-135m", "zipage-tiny-reasoner"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_known_models_forecasts_are_shipped_in_every_number_format(
    name, dtype, monkeypatch, tmp_path
):
    def may_not_be_made(*_args, **_options):
        raise AssertionError(f"{name} has no forecast that fits it")

    monkeypatch.setenv("ZIPAGE_HOME", str(tmp_path))
    path = resolve_model_elsewhere(name, monkeypatch)
    monkeypatch.setattr(forecast_source, "make_forecast", may_not_be_made)
    backend = choose_backend("cpu", dtype)
    loaded = load_model(path, dtype, backend, None)
    shape = kv_shape(loaded, dtype)
    forecast = forecast_source.load_or_make_forecast(path, loaded, shape, backend)
    assert forecast.key.shape == (shape.num_layers, shape.num_kv_heads, shape.head_dim)
    assert float(forecast.key.abs().max()) > 0
    assert not any(tmp_path.iterdir())


def resolve_model_elsewhere(name, monkeypatch):
    """The model's path in the real cache folder, which the test must not read forecasts of."""
    with monkeypatch.context() as patch:
        patch.delenv("ZIPAGE_HOME")
        return resolve_model(name)
