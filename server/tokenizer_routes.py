"""The model's tokenizer over HTTP. Knows nothing of generation."""

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from zipage_lang.server.api_error import ApiError
from zipage_lang.server.bodies import Items
from zipage_lang.server.json_response import JsonResponse
from zipage_lang.server.service import Service


class TokenizeRequest(BaseModel):
    """A text, or chat messages that the model's template makes one of.

    Special tokens are added to a `prompt` unless told otherwise; a template writes its own.
    """

    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [{"prompt": "The quick brown fox"}]}
    )

    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True


class Tokens(BaseModel):
    """The tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(BaseModel):
    """Tokens whose text is wanted."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [{"tokens": [504]}]})

    tokens: Items[int]
    skip_special_tokens: bool = False


class Text(BaseModel):
    """The text twice, under the names that different clients read."""

    prompt: str
    text: str


class TokenizerInfo(BaseModel):
    """Special tokens and the chat template."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int


class TokenizerFiles(BaseModel):
    """What a client needs to tokenize by itself: file names and their texts."""

    files: dict[str, str]


def make_router(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["tokenizer"])

    @router.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of messages."""
        text, is_chat = await _text_of(body, service)
        adds = body.add_special_tokens
        tokens = await service.encode(
            text, add_special_tokens=not is_chat if adds is None else adds
        )
        max_model_len = service.ready.max_model_len
        return JsonResponse(
            {"tokens": tokens, "count": len(tokens), "max_model_len": max_model_len}
        )

    @router.post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        vocab_size = service.ready.vocab_size
        wrong = next((t for t in body.tokens if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400, f"token id {wrong} is not one of 0 to {vocab_size - 1}", param="tokens"
            )
        text = await service.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return JsonResponse({"prompt": text, "text": text})

    @router.get("/tokenizer_info", response_model=TokenizerInfo)
    async def tokenizer_info() -> Response:
        """Special tokens and the chat template."""
        tokenizer = service.llm.tokenizer
        names = ("eos_token", "bos_token", "pad_token", "unk_token")
        return JsonResponse(
            {
                **{name: tokenizer.special_tokens.get(name) for name in names},
                "chat_template": tokenizer.chat_template,
                "vocab_size": tokenizer.vocab_size,
            }
        )

    @router.get("/tokenizer_files", response_model=TokenizerFiles)
    async def tokenizer_files() -> Response:
        """The tokenizer itself, for clients that tokenize by themselves."""
        files = await asyncio.to_thread(service.llm.tokenizer.files)  # they go over the disk
        return JsonResponse({"files": files})

    return router


async def _text_of(body: TokenizeRequest, service: Service) -> tuple[str, bool]:
    """The text and whether a template made it."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.prompt is not None:
        return body.prompt, False
    tokenizer = service.llm.tokenizer
    try:  # in a thread: how long a template takes is not known before
        text = await asyncio.to_thread(
            tokenizer.render_chat,
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return text, True
