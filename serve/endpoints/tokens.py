"""POST /tokenize and /detokenize, with vLLM's bodies and replies."""

from typing import Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, model_validator

from ..body import Strict
from ..openapi import operation
from ..protocol import ApiError, List, validate
from ..service import Service
from .chat import MAX_MESSAGES
from .chat_messages import ChatMessage


class _Body(Strict):
    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses a body. Raises ApiError (400) that names the wrong parameter."""
        return validate(cls, body)


class TokenizeRequest(_Body):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: List[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True  # to a text; a chat template adds its own
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have either `prompt` or `messages`")
        if self.messages is not None and not self.add_generation_prompt:
            raise ValueError("`add_generation_prompt` is false, which is not supported; omit it")
        return self


class DetokenizeRequest(_Body):
    """The body of POST /detokenize."""

    tokens: List[int]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


def routes(service: Service) -> APIRouter:
    found, tokenizer, capacity = APIRouter(), service.engine.tokenizer, service.engine.info.capacity
    pools, encoder = service.pools, service.encoder
    described = operation("Tokens of a text or a conversation", Tokenized, (404,), body=TokenizeRequest)

    @found.post("/tokenize", openapi_extra=described)
    async def tokenize(request: Request) -> Response:
        body = await pools.parsed(request, TokenizeRequest.parse)
        if body.model is not None:
            service.check_model(body.model)

        def encoded() -> list[int]:
            if body.messages is not None:
                return encoder.chat([message.plain() for message in body.messages])
            return encoder.text(body.prompt or "", body.add_special_tokens)

        ids = await pools.run(request, encoded)
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": capacity.context_limit,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }
        return JSONResponse(reply)

    described = operation("The text of tokens", Detokenized, (404,), body=DetokenizeRequest)

    @found.post("/detokenize", openapi_extra=described)
    async def detokenize(request: Request) -> Response:
        body = await pools.parsed(request, DetokenizeRequest.parse)
        if body.model is not None:
            service.check_model(body.model)
        most = capacity.vocabulary
        if wrong := next((token for token in body.tokens if not 0 <= token < most), None):
            raise ApiError(400, f"token {wrong} is out of range; use ids in 0..{most - 1}", param="tokens")
        text = await pools.run(request, lambda: tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return JSONResponse({"prompt": text})

    return found
