"""OpenAI's request bodies and errors.

Types are strict (`"max_tokens": "5"` is an error). `unknown.py` handles the parameters that no model declares.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from dflash_toolkit.sampling import (
    COLDEST,
    HOTTEST,
    LEAST_PENALTY,
    LEAST_TOP_P,
    MAX_LOGPROBS,
    MOST_PENALTY,
    Grammar,
    SamplingParams,
)

from .body import Strict
from .structured import Structured

MAX_STOPS = 16  # strings; OpenAI accepts four, tasks of lm-eval have more
MAX_STOP_LENGTH = 1024  # characters
MAX_N = 128  # answers to a prompt, OpenAI's limit
MAX_BIASED_TOKENS = 1024
MAX_STOP_IDS = 1024
MAX_SALT_LENGTH = 1024  # characters
T = TypeVar("T")
Body = TypeVar("Body", bound=Strict)
List = Annotated[list[T], Field(fail_fast=True)]  # listing the errors of a million items would take long
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # longer ones do not fit into messages to the engine


class ApiError(Exception):
    """An error that is sent as `{"error": {"message", "type", "param", "code"}}` with HTTP `status`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        param = self.param and clipped(self.param, 200)
        return {"error": {"message": clipped(self.message, 1000), "type": kind, "param": param, "code": self.code}}


def clipped(text: str, most: int) -> str:
    """Shortens a text of more than `most` characters in the middle; it may quote megabytes of a request."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[len(text) - most // 2 :]}"


class StreamOptions(Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # with include_usage: every chunk has a usage
    include_dflash: bool | None = False  # chunks report which text was drafted, step by step


class Speculative(Strict):
    """Draft options of a request."""

    # 0 turns the drafter off; the server chooses other lengths
    num_speculative_tokens: int | None = Field(None, ge=0, le=0)


class Cut(NamedTuple):
    """How to truncate a prompt."""

    most: int  # tokens to keep
    side: Literal["left", "right"] | None  # side to cut; None: left, but keep the special tokens that begin a text

    def of(self, ids: list[int], head: int = 0) -> list[int]:
        """Returns the tokens to keep.

        Args:
            head: number of special tokens that begin the text.
        """
        if len(ids) <= self.most:
            return ids
        head = 0 if self.side else min(head, self.most)
        return ids[: self.most] if self.side == "right" else ids[:head] + ids[len(ids) - (self.most - head) :]


class GenerationRequest(Structured):
    """Parameters that the routes share. `null` means the default, as in OpenAI's API."""

    elsewhere: ClassVar[tuple[str, ...]] = ()  # inherited parameters that the endpoint refuses
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "session_id",
            "user",
            "verbosity",
        }
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "include_reasoning": (True,),
        "guided_whitespace_pattern": (),
        "stop_regex": (),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "logits_processors": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "structural_tag": (),
        "prompt_embeds": (),
        "thinking_token_budget": (),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "min_new_tokens": (0,),
        "typical_p": (1.0, 1),
        "custom_logit_processor": (),
        "watermarking": (False,),
        "logprob_token_ids": ([],),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
        "repetition_detection": (),
        "return_weight_versions": (False,),
        "return_token_offsets": (False,),
        "return_prompt_text": (False,),
        "routed_experts_prompt_start": (0,),
        "return_hidden_states": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "no_stop_trim": (False,),
        "lora_path": (),
        "moderation": (),
    }

    model: str
    n: int | None = Field(None, ge=1, le=MAX_N)  # answers to each prompt
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=HOTTEST)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: Int64 | None = Field(None, ge=-1)  # -1 and 0 keep every token
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=LEAST_PENALTY, le=MOST_PENALTY)  # 1 is none
    logit_bias: dict[str, float] | None = None  # token id (JSON keys are strings) -> number added to its logit
    seed: Int64 | None = None
    max_tokens: Int64 | None = Field(None, ge=1)
    min_tokens: Int64 | None = Field(None, ge=0)  # nothing ends an answer earlier
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)  # lower is earlier
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_LENGTH)  # as in vLLM
    truncate_prompt_tokens: Int64 | None = Field(None, ge=-1)  # tokens to keep; -1: as many as fit next to the answer
    truncation_side: Literal["left", "right"] | None = None
    store: bool | None = None  # whether --adapt may learn from the request; the default is that of the server
    request_id: str | None = Field(None, pattern=r"^[\w.:-]{1,128}$")
    speculative: Speculative | None = None
    stop: List[str] | None = Field(None, max_length=MAX_STOPS)
    stop_token_ids: List[Int64] | None = Field(None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False  # as in vLLM and SGLang: add `token_ids` and `prompt_token_ids`
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # as in vLLM

    @field_validator("stop", mode="before", json_schema_input_type=str | list[str] | None)
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _check_lengths(cls, stop: list[str] | None) -> list[str] | None:
        if stop and "" in stop:
            raise ValueError("a stop string must not be empty")
        if (longest := max(map(len, stop or ()), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(f"a stop string has {longest} characters; shorten it to at most {MAX_STOP_LENGTH}")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and len(bias) > MAX_BIASED_TOKENS:
            raise ValueError(f"has {len(bias)} tokens; bias at most {MAX_BIASED_TOKENS}")
        for token, value in (bias or {}).items():
            # int() refuses thousands of digits; "01" would be a second name of "1"
            if not (token.isascii() and token.isdigit() and len(token) < 16 and str(int(token)) == token):
                raise ValueError(f"{token[:20]!r} is not a token id; use a number such as '42'")
            if not -100.0 <= value <= 100.0:
                raise ValueError(f"the bias of token {token} is {value:g}; it must be in -100..100")
        return bias

    @field_validator("prompt_logprobs")
    @classmethod
    def _not_streamed(cls, wanted: int | None, info: ValidationInfo) -> int | None:
        if wanted is not None and info.data.get("stream"):
            raise ValueError("is not supported with `stream: true`; omit one of them")
        return wanted

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, options: Any, info: ValidationInfo) -> Any:
        if options is not None and not info.data.get("stream"):
            raise ValueError("needs `stream: true`; add it, or omit stream_options")
        return options

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses a request body. Raises ApiError (400) that names the first wrong parameter."""
        request = validate(cls, body)
        request.check()
        try:
            request.grammar()
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return request

    def check(self) -> None:
        """Raises ApiError (400) if parameters contradict each other."""

    @property
    def answers(self) -> int:
        """Returns the number of answers to each prompt."""
        return self.n or 1

    @property
    def prompt_alone(self) -> bool:
        """Returns whether only the prompt is wanted, without an answer."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Returns whether every chunk has a usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def follow(self) -> bool:
        """Returns whether chunks report which text was drafted."""
        return bool(self.stream and self.stream_options and self.stream_options.include_dflash)

    @property
    def requested_tokens(self) -> int | None:
        """Returns the most tokens of an answer that the client requests."""
        return self.max_tokens

    def cut(self, limit: int) -> Cut | None:
        """Returns how to truncate prompts. Raises ApiError (400) if more than `limit` tokens are to be kept."""
        kept = self.truncate_prompt_tokens
        if kept is not None and kept > limit:
            message = f"truncate_prompt_tokens is {kept}, but the context has {limit} tokens; lower it"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        most = max(limit - (self.requested_tokens or 1), 1)
        return None if kept is None else Cut(most if kept < 0 else kept, self.truncation_side)

    def length(self, most: int) -> int:
        """Returns the most tokens of an answer, at most `most`."""
        return min(self.requested_tokens or most, most)

    def least(self, most: int, grammar: str | None) -> int:
        """Returns the fewest tokens of an answer.

        Args:
            most: most tokens of the answer.
            grammar: the parameter that sets a grammar, if there is one.

        Raises:
            ApiError: (400) it is more than `most`, or a grammar decides where the answer ends.
        """
        least = self.min_tokens or 0
        if least > most:
            message = f"min_tokens is {least}, but the answer may have at most {most} tokens; lower min_tokens"
            raise ApiError(400, message, param="min_tokens")
        if least and grammar:
            message = f"`min_tokens` cannot be combined with `{grammar}`, which decides where the answer ends; omit one"
            raise ApiError(400, message, param="min_tokens")
        return least

    def best_tokens(self) -> int | None:
        """Returns how many alternatives to report with each token; None: no log-probabilities."""
        raise NotImplementedError

    def best_prompt_tokens(self) -> int | None:
        """Returns how many alternatives to report with each token of the prompt; None: no log-probabilities."""
        return self.prompt_logprobs

    def sampling(self, most: int, defaults: Mapping[str, float], grammar: Grammar | None = None) -> SamplingParams:
        """Returns the sampling parameters; chooses a random seed if the request has none.

        Args:
            most: most tokens of an answer.
            defaults: values of parameters that the request omits; OpenAI's defaults apply to the others.
            grammar: constrains the answer.
        """

        def value_of(name: str, otherwise: float) -> float:
            value: float | None = getattr(self, name)
            return defaults.get(name, otherwise) if value is None else value

        temperature = value_of("temperature", 1.0)
        return SamplingParams(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=max(value_of("top_p", 1.0), LEAST_TOP_P),
            top_k=max(int(value_of("top_k", 0)), 0),
            min_p=value_of("min_p", 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=value_of("repetition_penalty", 1.0),
            logit_bias=tuple((int(token), value) for token, value in (self.logit_bias or {}).items()),
            logprobs=self.best_tokens(),
            prompt_logprobs=self.best_prompt_tokens(),
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            max_tokens=self.length(most),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            drafting=self.speculative is None or self.speculative.num_speculative_tokens is None,
            grammar=grammar,
        )


def validate(kind: type[Body], raw: bytes) -> Body:
    """Parses a body. Raises ApiError (400) that names the first wrong parameter."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise describe(error) from error


def describe(error: ValidationError) -> ApiError:
    """Returns the first error of a body, with the parameter's path in OpenAI's notation."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['msg']})", code="invalid_json")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place}: {message}" if place else f"the body: {message}", param=place or None)
