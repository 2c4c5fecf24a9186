"""OpenAI's request bodies, as far as this server honours them, and OpenAI's form of an error."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_toolkit import SamplingParams

# parameters that would change the answer, and the values at which they do not; anything else is refused by name
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "audio": (),
}


class ApiError(Exception):
    """Leaves a handler as `{"error": {...}}` with an HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": kinds.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints share. Unknown harmless keys (`user`, `metadata`, ...) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False

    def stops(self) -> list[str]:
        """Stop strings. Raises ApiError for an empty one or more than four."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 4 or any(not s for s in stops):
            raise ApiError(400, "stop takes at most 4 strings, none of them empty", "stop")
        return stops

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Sampling parameters with OpenAI's defaults. Raises ApiError for a value outside its range."""
        try:
            return SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(self.top_k or 0, 0),  # -1 also means all
                min_p=self.min_p or 0.0,
                seed=secrets.randbits(63) if self.seed is None else self.seed,
                max_new_tokens=max_new_tokens,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
            )
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from error


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """The message as the chat template reads it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int]


def parse(model: type[Any], body: Any) -> Any:
    """Validate a decoded JSON body. Raises ApiError that names the parameter."""
    if not isinstance(body, dict):
        raise ApiError(400, "the request body must be a JSON object")
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(value == n and type(value) in (type(n), int, float) for n in neutral):
            raise ApiError(400, f"{name}={value!r} is not supported by this server", name, "unsupported_parameter")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}", param) from error
