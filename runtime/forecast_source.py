"""A model's forecast of attention: found on disk, or made from its own text and kept there.

Knows nothing of what is scored with it.
"""

import logging
from pathlib import Path

from torch import Tensor

from zipage_lang.kernels.backend import Backend, Forecast
from zipage_lang.runtime.calibration_prompts import as_starts, prompts_for
from zipage_lang.runtime.forecast_making import MadeForecast, forecast_by_age, make_forecast
from zipage_lang.runtime.forecast_store import (
    file_at_home,
    file_beside,
    file_in_package,
    model_identity,
    read_forecast,
    write_forecast,
)
from zipage_lang.runtime.kv_cache import KVShape
from zipage_lang.runtime.models.registry import LoadedModel
from zipage_lang.runtime.models.rope import rotary_frequencies

log = logging.getLogger("zipage.engine")


def load_or_make_forecast(
    model_path: Path, loaded: LoadedModel, shape: KVShape, backend: Backend
) -> Forecast:
    """The forecast beside the model, in the cache folder or in this package; else it is made, which
    takes a while and runs the model, and kept in the cache folder for the next time.

    Where that can't be written it is in memory only. Random weights attend to nothing in
    particular: theirs is by age alone. model_path: folder or GGUF file; where there is neither, the
    weights are random.
    """
    frequencies = rotary_frequencies(loaded.arch, loaded.max_model_len)[0].to(backend.device)
    if not model_path.exists():
        return forecast_by_age(shape, frequencies)
    identity = model_identity(loaded)
    found = _found(model_path, shape, frequencies, identity)
    if found is not None:
        return found
    made = _made(model_path, loaded, shape, backend)
    file = file_at_home(identity)
    try:
        write_forecast(file, made.forecast, identity, made.about)
    except OSError as error:
        log.warning("the forecast is kept in memory only, %s can't be written: %s", file, error)
    else:
        log.info("forecast of attention kept in %s", file)
    return made.forecast


def _found(model_path: Path, shape: KVShape, frequencies: Tensor, identity: str) -> Forecast | None:
    for file in (file_beside(model_path), file_at_home(identity), file_in_package(identity)):
        if not file.is_file():
            continue
        try:
            return read_forecast(file, shape, frequencies, identity)
        except ValueError as error:
            log.warning("forecast of attention not used: %s", error)
    return None


def _made(model_path: Path, loaded: LoadedModel, shape: KVShape, backend: Backend) -> MadeForecast:
    try:
        starts = as_starts(model_path, prompts_for(model_path), loaded.arch.vocab_size)
    except ValueError as error:
        log.warning("the model writes without prompts for its forecast of attention: %s", error)
        starts = []
    return make_forecast(loaded, shape, backend, starts=starts)
