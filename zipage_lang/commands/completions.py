"""What a shell may complete an option's value to.

Knows nothing of options or shells.
"""

from zipage_lang.runtime.model_store import list_models


def model_names(incomplete: str) -> list[str]:
    """The known models whose names start so."""
    return [model.name for model in list_models() if model.name.startswith(incomplete)]
