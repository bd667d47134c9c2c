"""What `zipage calibrate` does: makes a model's forecast of attention ahead of time.

Knows nothing of engines or of the command line.
"""

from pathlib import Path

import torch

from zipage_lang.kernels.backend import choose_backend
from zipage_lang.runtime.calibration_prompts import as_starts, prompts_for, read_prompts
from zipage_lang.runtime.config import ModelConfig
from zipage_lang.runtime.engine_parts import DTYPES, kv_shape, load_configured
from zipage_lang.runtime.forecast_making import choose_text_size, make_forecast
from zipage_lang.runtime.forecast_store import file_at_home, model_identity, write_forecast


def calibrate_model(
    config: ModelConfig,
    out: Path | None = None,
    *,
    prompts: Path | None = None,
    num_texts: int | None = None,
    max_len: int | None = None,
) -> Path:
    """Make the forecast and write it; returns the file.

    Args:
        config: which model, in which number format, on which backend.
        out: the file; None: in the cache folder, where engines look for it.
        prompts: JSON lines that the model's texts start with; None: those beside the model, else
            general ones.
        num_texts, max_len: how much text the model writes; None: as an engine would.

    Raises ValueError, RuntimeError or OSError with what to do.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    dtype = DTYPES[config.dtype]
    backend = choose_backend(config.backend, dtype)
    path, loaded = load_configured(config, dtype, backend)
    shape = kv_shape(loaded, dtype)
    asked = prompts_for(path) if prompts is None else read_prompts(prompts)
    size = choose_text_size(
        shape, loaded.max_model_len, backend.device, num_texts=num_texts, max_len=max_len
    )
    starts = as_starts(path, asked, loaded.arch.vocab_size)
    made = make_forecast(loaded, shape, backend, size=size, starts=starts)
    identity = model_identity(loaded)
    file = out or file_at_home(identity)
    write_forecast(file, made.forecast, identity, made.about)
    return file
