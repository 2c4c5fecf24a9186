"""POST /v1/completions."""

from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from dflash_toolkit.sampling import MAX_LOGPROBS

from ..logprobs import Echo
from ..openapi import DECODED, AnswerMetrics, PromptLogprob, Usage, operation
from ..protocol import ApiError, GenerationRequest, Int64, List
from ..replies import Replies
from ..service import Service

COMPLETION_TOKENS = 16  # OpenAI's default length; a chat answer may fill the context
MAX_ANSWERS = 1024  # to all prompts of a request


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions: prompts as text or as token ids."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    prompt: List[str | List[int]]  # a single prompt need not be in a list
    max_tokens: Int64 | None = Field(None, ge=0)  # 0: no answer, only the prompt
    max_completion_tokens: Int64 | None = Field(None, ge=1)  # the chat route's name; `max_tokens` goes first
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # the chat route's name
    echo: bool | None = False
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _equals_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, 1, n := info.data.get("n") or 1):
            raise ValueError(f"is {best_of}, but must equal `n` ({n}), because every answer is returned; omit it")
        return best_of

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str | list[int]])
    @classmethod
    def _prompts(cls, prompt: Any, info: ValidationInfo) -> Any:
        several = isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt)
        prompts = prompt if several else [prompt]
        if len(prompts) * (info.data.get("n") or 1) > MAX_ANSWERS:
            raise ValueError(f"times `n` is more than {MAX_ANSWERS} answers; send several requests")
        for one in prompts:
            if not isinstance(one, str) and not (isinstance(one, list) and all(type(item) is int for item in one)):
                raise ValueError("must be a string, a list of token ids, or a list of such prompts")
            if not one:
                raise ValueError("must not be empty")
        return prompts

    def check(self) -> None:
        if self.prompt_alone and not self.echo and self.prompt_logprobs is None:
            message = "`max_tokens` is 0, so set `echo` or `prompt_logprobs`, or request at least one token"
            raise ApiError(400, message, param="max_tokens")

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def prompt_alone(self) -> bool:
        return self.max_tokens == 0

    def length(self, most: int) -> int:
        # the engine needs one token to end a request that has no prompt log-probabilities; it is not returned
        least = 1 if self.best_prompt_tokens() is None else 0
        wanted = self.requested_tokens
        return min(COMPLETION_TOKENS if wanted is None else max(wanted, least), most)

    def best_tokens(self) -> int | None:
        return self.logprobs if self.logprobs is not None else self.top_logprobs or None

    def best_prompt_tokens(self) -> int | None:
        wanted = [self.prompt_logprobs, self.best_tokens() if self.echo else None]
        return max((best for best in wanted if best is not None), default=None)


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    finish_reason: Literal["stop", "length"] | None  # null in the chunks before the last
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """The answers, or a chunk of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


def routes(service: Service) -> APIRouter:
    found = APIRouter()
    described = operation("Continue prompts", Completion, DECODED, body=CompletionRequest, events=Completion)

    @found.post("/v1/completions", openapi_extra=described)
    async def completions(request: Request) -> Response:
        pools, encoder = service.pools, service.encoder
        body = await pools.parsed(request, CompletionRequest.parse)
        service.check_model(body.model)
        decode, cut = service.engine.tokenizer.decode, body.cut(service.context_limit)

        def encoded(prompt: str | list[int]) -> list[int]:
            return encoder.text(prompt, cut=cut) if isinstance(prompt, str) else cut.of(prompt) if cut else prompt

        def text_of(prompt: str | list[int], ids: list[int]) -> str:
            whole = isinstance(prompt, str) and (cut is None or len(ids) < cut.most)
            return str(prompt) if whole else decode(ids, clean_up_tokenization_spaces=False)

        prompts = await pools.run(request, lambda: list(map(encoded, body.prompt)))
        requests = await service.requests(body, prompts, "prompt", request, body.grammar())
        strings = service.strings_for(body)
        shown = (
            await pools.run(request, lambda: list(map(text_of, body.prompt, prompts))) if strings or body.echo else []
        )
        echoes = [Echo(*prompt, body.best_tokens()) for prompt in zip(prompts, shown, strict=True)] if body.echo else []
        ids = [one.prompt_ids for one in requests] if body.return_token_ids else ()
        lengths = list(map(len, shown))
        name = body.request_id or request.state.request_id
        replies = Replies("text", body.model, body.include_usage, strings, lengths, body.answers, name, prompt_ids=ids)
        return await service.respond(request, body, requests, replies, echoes=echoes)

    return found
