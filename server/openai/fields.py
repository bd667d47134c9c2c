"""The fields that all generating requests share, as pydantic reads and documents them.

Fields that are not listed are ignored, as OpenAI's clients expect; null stands for the default.
Knows nothing of engines or of what the fields become.
"""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.types import Strict
from pydantic_core import PydanticCustomError

from zipage_lang.server.bodies import Items, values_of
from zipage_lang.server.names import Name, PlainText

Real = Annotated[float, Strict()]  # a whole number is one too; a text is none
Json = dict[str, Any]
MAX_SAMPLES = 128  # of one prompt


def otherwise(told: str) -> WrapValidator:
    """One plain sentence in place of an error for each kind of value that a field may have."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("wrong_kind", told) from error

    return WrapValidator(check)


Stop = Annotated[
    StrictStr | Items[StrictStr] | None, otherwise("must be a text or a list of texts")
]


class Body(BaseModel):
    """A JSON object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells besides its text."""

    include_usage: StrictBool | None = Field(
        None, description="one last chunk with the whole usage and no choices"
    )
    continuous_usage_stats: StrictBool | None = Field(
        None, description="every chunk tells the usage so far; implies include_usage"
    )


class KVFields(BaseModel):
    """How this request's KV cache is bounded; what is left out has the engine's default."""

    model_config = ConfigDict(extra="allow")  # KVParams refuses what it doesn't know, by name

    mode: StrictStr | None = Field(None, description="off, fixed or adaptive")
    budget: StrictInt | None = Field(None, description="tail tokens kept per layer and KV head")
    interval: StrictInt | None = Field(None, description="tail tokens that pile up on top")
    policy: StrictStr | None = Field(None, description="which tokens are kept (docs/policies.md)")
    protect: StrictStr | None = Field(None, description="prompt or none")
    protected_len: StrictInt | None = Field(
        None, description="leading tokens that are never compacted"
    )
    reuse: StrictStr | None = Field(None, description="compacted or exact")


class SamplingFields(Body):
    """Sampling, and how the request is treated; OpenAI's fields first, then extensions."""

    model: StrictStr | None = Field(
        None, description="any name, unless the server is strict about it", max_length=512
    )
    temperature: Real | None = Field(
        None, ge=0, le=100, description="0 is greedy; null: the model's own default, else 1"
    )
    top_p: Real | None = Field(None, gt=0, le=1)
    n: StrictInt | None = Field(None, ge=1, le=MAX_SAMPLES, description="choices per prompt")
    seed: StrictInt | None = Field(
        None, ge=-(2**63), lt=2**64, description="the same seed repeats the same choices"
    )
    stop: Stop = Field(None, description="texts that end the output; they are not part of it")
    presence_penalty: Real | None = Field(None, ge=-2, le=2)
    frequency_penalty: Real | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Real], values_of(Real)] | None = Field(
        None, description="token id -> added to its logit"
    )
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None

    top_k: StrictInt | None = Field(None, ge=-1, description="0 and -1: off")
    min_p: Real | None = Field(None, ge=0, le=1)
    repetition_penalty: Real | None = Field(None, ge=0.001, le=100)
    min_tokens: StrictInt | None = Field(None, ge=0)
    ignore_eos: StrictBool | None = None
    stop_token_ids: Items[StrictInt] | None = None
    skip_special_tokens: StrictBool | None = None
    regex: StrictStr | None = Field(None, description="the answer matches it")
    ebnf: StrictStr | None = Field(None, description="the answer is derived from its rule `root`")
    lark: StrictStr | None = Field(None, description="the answer is derived from its rule `start`")
    json_schema: Json | StrictStr | None = Field(None, description="the answer is JSON of it")
    structured_outputs: Json | None = Field(
        None, description="vLLM's: one of json, json_object, regex, choice, grammar, structural_tag"
    )
    guided_json: Json | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Items[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    kv: KVFields | None = Field(None, description="how the KV cache is bounded")
    cache_salt: StrictStr | None = Field(
        None, description="requests with different salts share no cached prefix"
    )
    priority: StrictInt | None = Field(
        None, ge=-(2**31), lt=2**31, description="lower goes first; 0 is the default"
    )
    session_id: PlainText | None = Field(
        None, description="requests of one session can be aborted together"
    )
    request_id: Name | None = Field(None, description="the name of this request")
    rid: Name | None = Field(None, description="SGLang's name of request_id")

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def tells_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def tells_usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
