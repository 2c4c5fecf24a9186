"""Converts texts to token ids and back; serves `/tokenize` and `/detokenize` with vLLM's bodies and replies."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import Message, Tool, apply_template
from dflash_toolkit.runtime import EngineClient

from .protocol import MAX_MESSAGES, ApiError, ChatMessage, Cut, List, describe
from .text import special_tokens
from .thread_pools import ThreadPools

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Encoder:
    """Encodes texts and conversations, from any thread.

    Args:
        limit: tokens of the context. A text with more bytes than they can hold is refused before it is encoded.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._longest = max(len(token.encode()) for token in tokenizer.get_vocab())
        tokenizer.encode("a")  # the first call sets truncation, which is not safe from several threads
        with contextlib.suppress(ApiError):  # compiles the template before the first request
            self.chat([{"role": "user", "content": "a"}])

    def text(self, text: str, special: bool = True, cut: Cut | None = None) -> list[int]:
        """Encodes a text. Raises ApiError (400) if it has too many bytes for the context and no `cut`."""
        if cut is not None:  # encodes only characters that the kept tokens can cover
            most = cut.most * self._longest + 1
            text = text[:most] if cut.side == "right" else text[max(0, len(text) - most) :]
            ids = list(self._tokenizer.encode(text, add_special_tokens=special))
            marks = special_tokens(self._tokenizer) if special else {}
            return cut.of(ids, next((i for i, token in enumerate(ids) if token not in marks), 0))
        size = len(text.encode(errors="replace"))
        if size > (most := self._limit * self._longest):
            raise ApiError(
                400,
                f"the text has {size} bytes, but a context of {self._limit} tokens holds at most {most}; shorten it",
                code="context_length_exceeded",
            )
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = NOTHING,
        cut: Cut | None = None,
    ) -> list[int]:
        """Renders a conversation with the chat template and encodes it.

        Args:
            variables: variables for the template.

        Raises:
            ApiError: (400) as `text`, or the template refuses the messages.
        """
        try:
            rendered = apply_template(
                self._tokenizer, messages, variables, tools, tokenize=False, add_generation_prompt=True
            )
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from error
        return self.text(rendered, special=False, cut=cut)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    model: str | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses a body. Raises ApiError (400) that names the wrong parameter."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise describe(error) from error


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


def tokenizing(
    engine: EngineClient,
    check_model: Callable[[str], None],
    pools: ThreadPools,
    encoder: Encoder,
) -> APIRouter:
    """Creates the routes.

    Args:
        check_model: raises if a model of this name is not served.
    """
    routes, tokenizer = APIRouter(), engine.tokenizer

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await pools.parsed(request, TokenizeRequest.parse)
        if body.model is not None:
            check_model(body.model)

        def encoded() -> list[int]:
            if body.messages is not None:
                return encoder.chat([message.plain() for message in body.messages])
            return encoder.text(body.prompt or "", body.add_special_tokens)

        ids = await pools.run(request, encoded)
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": engine.info.capacity.context_limit,
            "tokens": ids,
            "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        }
        return JSONResponse(reply)

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await pools.parsed(request, DetokenizeRequest.parse)
        if body.model is not None:
            check_model(body.model)
        vocabulary = engine.info.capacity.vocabulary
        if wrong := next((token for token in body.tokens if not 0 <= token < vocabulary), None):
            raise ApiError(400, f"token {wrong} is out of range; use ids in 0..{vocabulary - 1}", param="tokens")
        text = await pools.run(request, lambda: tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False))
        return JSONResponse({"prompt": text})

    return routes
