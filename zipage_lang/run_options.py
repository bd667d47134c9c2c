"""What a run was asked to do, made into the settings of one run or of a batch's runs.

Knows nothing of bodies, arguments or how a run is started.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from zipage_lang.backend import Backend, as_backend, default_backend
from zipage_lang.budgets import Budget
from zipage_lang.chat import ChatTemplate, Message
from zipage_lang.gen_words import sampling_fields
from zipage_lang.runtime.kv_params import KVParams
from zipage_lang.runtime.sampling_params import SamplingParams
from zipage_lang.seeds import derive_seed, random_root
from zipage_lang.session import RunSettings
from zipage_lang.trace import Trace, open_trace


class RunOptions:
    """What `run` and `run_batch` take alike. Raises NoBackendError without a backend, ValueError
    for a bad sampling field.
    """

    def __init__(
        self,
        *,
        backend: Any = None,
        seed: int | None = None,
        kv: KVParams | None = None,
        trace: "str | os.PathLike[str] | Trace | None" = None,
        budget: Budget | None = None,
        sampling: Mapping[str, Any],
    ) -> None:
        self.backend = choose_backend(backend)
        self._template = _template_of(self.backend)
        self._trace = open_trace(trace)
        self._sampling = SamplingParams(**sampling_fields(sampling))
        self._kv = kv or KVParams()
        self._root_seed = random_root() if seed is None else seed
        self._budget = budget

    def settings(self) -> RunSettings:
        """Of a run alone."""
        return self._settings(self._root_seed)

    def item_settings(self, index: int) -> RunSettings:
        """Of a batch's run: its seed depends on its place alone."""
        return self._settings(derive_seed(self._root_seed, ("item", index)))

    def _settings(self, root_seed: int) -> RunSettings:
        return RunSettings(
            backend=self.backend,
            template=self._template,
            sampling=self._sampling,
            kv=self._kv,
            root_seed=root_seed,
            trace=self._trace,
            budget=self._budget,
        )


def choose_backend(backend: Any) -> Backend:
    """The one given, else the default one. Raises NoBackendError where there is none."""
    return default_backend() if backend is None else as_backend(backend)


def _template_of(backend: Backend) -> ChatTemplate:
    def render(messages: Iterable[Message], add_generation_prompt: bool) -> str:
        return backend.render_chat(list(messages), add_generation_prompt=add_generation_prompt)

    return ChatTemplate(render)
