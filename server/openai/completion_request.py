"""What /v1/completions takes, as pydantic reads and documents it.

Knows nothing of engines or of what the fields become.
"""

from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from zipage_lang.server.bodies import Items
from zipage_lang.server.openai.chat_request import ResponseFormat
from zipage_lang.server.openai.fields import SamplingFields, otherwise

Prompt = Annotated[
    StrictStr | Items[StrictStr] | Items[StrictInt] | Items[Items[StrictInt]],
    otherwise("must be a text, token ids, or a list of either; all of one kind"),
]


class CompletionRequest(SamplingFields):
    """A text, or several, to go on with."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "default", "prompt": "Once upon a time", "max_tokens": 16},
                {"prompt": ["A cat", "A dog"], "max_tokens": 8, "temperature": 0, "logprobs": 2},
                {"prompt": [[5, 9, 12]], "echo": True, "logprobs": 1, "max_tokens": 1},
            ]
        }
    )

    prompt: Prompt = Field(
        description="a text, token ids, or a list of either; choices count through them in order"
    )
    max_tokens: StrictInt | None = Field(None, ge=0, description="16 without one")
    max_completion_tokens: StrictInt | None = Field(None, ge=0, description="wins over max_tokens")
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    echo: StrictBool | None = Field(None, description="the prompt leads the text")
    best_of: StrictInt | None = Field(None, ge=1, description="must equal n")
    suffix: StrictStr | None = Field(None, description="refused: the model does not fill in")
    response_format: ResponseFormat | None = None
    add_special_tokens: StrictBool | None = Field(
        None, description="whether a text gets the tokenizer's own special tokens; true"
    )
