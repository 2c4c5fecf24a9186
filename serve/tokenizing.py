"""`/tokenize` and `/detokenize`, with vLLM's bodies and replies."""

from collections.abc import Callable
from typing import Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.runtime import EngineClient

from .protocol import ApiError, ChatMessage, describe


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises ApiError (400) that names what is wrong."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise describe(error) from error


class TokenizeRequest(_Body):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool = True  # of a text; a chat template has its own
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and not self.add_generation_prompt:
            raise ValueError("add_generation_prompt: false is not supported")
        return self


class DetokenizeRequest(_Body):
    """The body of POST /detokenize."""

    tokens: list[int]


def tokenizing(
    engine: EngineClient,
    check_model: Callable[[str], None],
    read_body: Callable[[Request], Any],
    in_thread: Callable[[Callable[[], Any]], Any],
) -> APIRouter:
    """The routes.

    Args:
        check_model: raises for the name of a model that is not served.
        read_body: of a request.
        in_thread: runs what takes long beside the event loop.
    """
    routes, tokenizer = APIRouter(), engine.tokenizer

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = TokenizeRequest.parse(await read_body(request))
        if body.model is not None:
            check_model(body.model)

        def encoded() -> list[int]:
            if body.messages is not None:
                return list(encode_chat(tokenizer, [message.plain() for message in body.messages]))
            return list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens))

        try:
            ids = await in_thread(encoded)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from error
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.info.capacity.context_limit,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }
        return JSONResponse(reply)

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = DetokenizeRequest.parse(await read_body(request))
        if body.model is not None:
            check_model(body.model)
        vocabulary = engine.info.capacity.vocabulary
        if wrong := next((token for token in body.tokens if not 0 <= token < vocabulary), None):
            raise ApiError(400, f"token {wrong} is not in 0..{vocabulary - 1}", param="tokens")
        text = await in_thread(lambda: tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return JSONResponse({"prompt": text})

    return routes
