"""OpenAI's request bodies and errors.

Types are strict (`"max_tokens": "5"` is an error). A parameter that this server does not implement is refused by name
if it would change the answer, and ignored otherwise (`user`, `metadata`, ...).
"""

import difflib
import json
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

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

from .parsing import after_reasoning, structural_tag
from .parsing.output import Start
from .structured import Structured

COMPLETION_TOKENS = 16  # OpenAI's default length for /v1/completions; a chat answer may fill the context
COMPLETION_LOGPROBS = 5  # OpenAI's limit for /v1/completions; a chat may have MAX_LOGPROBS
MAX_STOPS = 16  # strings; OpenAI accepts four, tasks of lm-eval have more
MAX_N = 128  # answers to a prompt, OpenAI's limit
MAX_BIASED_TOKENS = 1024
MAX_PROMPT_LOGPROBS = 1 << 19  # in one request, those of the most probable tokens included
MAX_ANSWERS = 1024  # to all prompts of a request
MAX_MESSAGES = 8192
MAX_MESSAGE_PARTS = 1024  # parts, or calls
MAX_TOOLS = 1024
MAX_STOP_IDS = 1024
T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # listing the errors of a million items would take long


# OpenAI's parameters that do not change the answer
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id"}


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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # with include_usage: every chunk has a usage
    include_dflash: bool | None = False  # chunks report which text was drafted, step by step


class Speculative(_Strict):
    """Draft options of a request."""

    model_config = ConfigDict(extra="forbid")
    # 0 turns the drafter off; the server chooses other lengths
    num_speculative_tokens: int | None = Field(None, ge=0, le=0)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    name: str
    arguments: str  # JSON; the model may have written it incompletely

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates; the arguments become a mapping if they are a JSON object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": self.type, "function": self.function.plain()}


class ChatMessage(_Strict):
    """One turn. `developer` is OpenAI's newer name of `system`; chat templates know the older one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # an assistant's may be null
    content: List[TextPart] = Field(None, validate_default=True, max_length=MAX_MESSAGE_PARTS)
    tool_calls: List[ToolCall] | None = Field(None, max_length=MAX_MESSAGE_PARTS)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name
    function_call: None = None  # OpenAI's older name of a tool call

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _as_parts(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") == "assistant":
            return []
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError("must be a string or a list of text parts")
        return content

    @field_validator("tool_calls", "reasoning_content", "reasoning")
    @classmethod
    def _check_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and (role := info.data.get("role")) != "assistant":
            raise ValueError(f"is allowed only in a message with role assistant, not {role}")
        return value

    def plain(self) -> dict[str, Any]:
        """Returns the message for chat templates."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "".join(part.text for part in self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates know one name or the other
        if self.role == "tool":
            message |= {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key)) is not None}
        return message


class Function(_Strict):
    model_config = ConfigDict(extra="allow")  # templates may render other fields
    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool for chat templates."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class NamedTool(_Strict):
    """Names the function that must be called."""

    name: str


class NamedChoice(_Strict):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedTool


Choice: TypeAlias = Literal["none", "auto", "required"]


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


class GenerationRequest(Structured, _Strict):
    """Parameters that the routes share. `null` means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")  # `parse` looks up undeclared fields in `unsupported`

    # parameter -> values that have no effect; any other value is refused
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        "cache_salt": (),
        "reasoning": (),
        "include_reasoning": (True,),
        "guided_decoding_backend": (),
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
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "mm_payload": ("tensors",),
        "return_mm_kwargs": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
        "repetition_detection": (),
        "stream_interval": (1,),
        "return_weight_versions": (False,),
        "return_token_offsets": (False,),
        "return_prompt_text": (False,),
        "routed_experts_prompt_start": (0,),
        "return_hidden_states": (False,),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "no_stop_trim": (False,),
        "lora_path": (),
        "prediction": (),
        "moderation": (),
        "prompt_cache_options": (),
    }

    model: str
    n: int | None = Field(None, ge=1, le=MAX_N)  # answers to each prompt
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=HOTTEST)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 keep every token
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=LEAST_PENALTY, le=MOST_PENALTY)  # 1 is none
    logit_bias: dict[str, float] | None = None  # token id (JSON keys are strings) -> number added to its logit
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)  # nothing ends an answer earlier
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)  # lower is earlier
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # tokens to keep; -1: as many as fit in the context
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = Field(None, pattern=r"^[\w.:-]{1,128}$")
    speculative: Speculative | None = None
    stop: List[str] | None = Field(None, max_length=MAX_STOPS)
    stop_token_ids: List[int] | None = Field(None, max_length=MAX_STOP_IDS)
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
    def _not_empty(cls, stop: list[str] | None) -> list[str] | None:
        if stop and "" in stop:
            raise ValueError("a stop string must not be empty")
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
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise describe(error) from error
        extra = request.model_extra or {}
        for name in extra:
            if name not in cls.unsupported and name not in IGNORED:
                near = difflib.get_close_matches(name, cls.model_fields, 1)
                hint = f"did you mean `{near[0]}`?" if near else "omit it"
                message = f"`{name[:100]}` is not a parameter of this server; {hint}"
                raise ApiError(400, message, param=name[:100], code="unknown_parameter")
        for name, harmless in cls.unsupported.items():
            value = extra.get(name)
            # compare types too, because 1 == True in Python
            if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
                message = f"`{name}` is not supported by this server; omit it"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
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
        return None if kept is None else Cut(limit - 1 if kept < 0 else kept, self.truncation_side)

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

    def sampling(
        self, most: int, defaults: Mapping[str, float], eos: int | None, grammar: Grammar | None = None
    ) -> SamplingParams:
        """Returns the sampling parameters; chooses a random seed if the request has none.

        Args:
            most: most tokens of an answer.
            defaults: values of parameters that the request omits; OpenAI's defaults apply to the others.
            eos: the tokenizer's own end-of-turn token, which a checkpoint's configurations may not name.
            grammar: constrains the answer.
        """

        def value_of(name: str, otherwise: float) -> float:
            value: float | None = getattr(self, name)
            return defaults.get(name, otherwise) if value is None else value

        temperature = value_of("temperature", 1.0)
        ends = (self.stop_token_ids or []) + ([] if eos is None or self.ignore_eos else [eos])
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
            stop_token_ids=tuple(ends),
            ignore_eos=bool(self.ignore_eos),
            drafting=self.speculative is None or self.speculative.num_speculative_tokens is None,
            grammar=grammar,
        )


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "chat_template": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),  # the template adds them
        "echo": (False,),
        "documents": ([],),
    }

    messages: List[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: List[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = True

    @field_validator("tools")
    @classmethod
    def _unique_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        seen: set[str] = set()
        for name in (tool.function.name for tool in tools or ()):
            if name in seen:
                raise ValueError(f"two tools have the name {name!r}; rename one of them")
            seen.add(name)
        return tools

    @field_validator("tool_choice", mode="wrap", json_schema_input_type=Choice | NamedChoice | None)
    @classmethod
    def _check_choice(cls, choice: Any, handler: Any, info: ValidationInfo) -> Any:
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
            if not isinstance(name, str):
                raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')
            if name not in (names := [tool.function.name for tool in info.data.get("tools") or ()]):
                raise ValueError(f"names {name!r}, but `tools` has {', '.join(names) or 'no tool'}")
            return NamedTool(name=name)
        if choice not in (None, "none", "auto", "required"):
            raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')
        if choice == "required" and not info.data.get("tools"):
            raise ValueError("is 'required', but `tools` is empty; add a tool or omit tool_choice")
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, best: int | None, info: ValidationInfo) -> int | None:
        if best and not info.data.get("logprobs"):
            raise ValueError(f"is {best}, but `logprobs` is not true; set `logprobs: true`")
        return best

    def tools_for(self, form: str | None) -> list[dict[str, Any]]:
        """Returns the tools that may be called, for chat templates.

        Args:
            form: the server's parser of tool calls, if it has one.

        Raises:
            ApiError: (400) the server has no parser.
        """
        if not self.tools or self.tool_choice == "none":
            return []
        if form is None:
            message = "`tools`: the target's form of tool calls is unknown; start the server with --tool-call-parser"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return [tool.plain() for tool in self.tools]

    @property
    def has_template_variables(self) -> bool:
        return bool(self.chat_template_kwargs) or self.reasoning_effort is not None

    def variables(self, known: Collection[str]) -> dict[str, Any]:
        """Returns the variables for the chat template, besides messages and tools.

        Args:
            known: the variables that the template uses.

        Raises:
            ApiError: (400) the template does not use a variable.
        """
        given = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        if not isinstance(thinking := given.get("enable_thinking", False), bool):
            message = f"enable_thinking is {clipped(repr(thinking), 100)}; it must be true or false"
            raise ApiError(400, message, param="chat_template_kwargs.enable_thinking")
        if given.get("enable_thinking") is False and "enable_thinking" not in known:
            del given["enable_thinking"]  # many clients send it to every model
        if unknown := next((name for name in given if name not in known), None):
            knows = ", ".join(sorted(known)) or "none"
            message = f"the target's chat template does not use {unknown[:100]!r}; it uses: {knows}"
            raise ApiError(400, message, param=f"chat_template_kwargs.{unknown[:100]}")
        if (effort := self.reasoning_effort) is None:
            return given
        if not {"reasoning_effort", "enable_thinking"} & set(known):
            message = "`reasoning_effort` is not supported by the target's chat template; omit it"
            raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
        given = {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort}
        return {name: value for name, value in given.items() if name in known}

    def grammar_for(self, form: str | None, start: Start) -> tuple[str, Grammar] | None:
        """Returns the grammar of the answer, tool calls included, and the parameter that sets it.

        Args:
            form: the server's parser of tool calls, if it has one.
            start: what the answer begins with.

        Raises:
            ApiError: (400) both the tools and another parameter set a grammar.
        """
        given = self.grammar()
        if form is not None and self.tools and self.tool_choice != "none":
            named = self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None
            tools = [tool.model_dump() for tool in self.tools]
            required, parallel = self.tool_choice == "required", self.parallel_tool_calls is not False
            tag = structural_tag(form, tools, required=required, named=named, parallel=parallel, start=start)
            if tag is not None:
                if given is not None:
                    message = f"`{given[0]}` cannot be combined with a tool call, which has its own grammar; omit it"
                    raise ApiError(400, message, param=given[0])
                return ("tool_choice" if required or named else "tools"), Grammar("structural_tag", json.dumps(tag))
        return given and (given[0], after_reasoning(given[1], start))

    @property
    def requested_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def best_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions: prompts as text or as token ids."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    prompt: List[str | List[int]]  # a single prompt need not be in a list
    max_tokens: int | None = Field(None, ge=0)  # 0: no answer, only the prompt
    logprobs: int | None = Field(None, ge=0, le=COMPLETION_LOGPROBS)
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
    def prompt_alone(self) -> bool:
        return self.max_tokens == 0

    def length(self, most: int) -> int:
        # the engine needs one token to end a request that has no prompt log-probabilities; it is not returned
        least = 1 if self.best_prompt_tokens() is None else 0
        return min(COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, least), most)

    def best_tokens(self) -> int | None:
        return self.logprobs

    def best_prompt_tokens(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((best for best in wanted if best is not None), default=None)


def ignores_its_end(name: str) -> ApiError:
    message = (
        f"`ignore_eos` cannot be combined with `{name}`, whose answer ends with an end-of-sequence token; omit one"
    )
    return ApiError(400, message, param="ignore_eos")


def describe(error: ValidationError) -> ApiError:
    """Returns the first error of a body, with the parameter's path in OpenAI's notation."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['msg']})", code="invalid_json")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place}: {message}" if place else f"the body: {message}", param=place or None)
