"""What a client may send: the OpenAI request bodies, and the one error form in which everything else is refused.

Types are strict (`"max_tokens": "5"` is an error). A parameter that would change the answer and that this server
does not implement is refused by name; one that would not (`user`, `metadata`, ...) is ignored.
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
COMPLETION_LOGPROBS = 5  # OpenAI's limit for /v1/completions; a chat may ask for MAX_LOGPROBS
MOST_STOPS = 16  # strings; OpenAI takes four, tasks of lm-eval have more
MOST_OF_A_PROMPT = 128  # answers, OpenAI's limit
MOST_BIASED = 1024  # tokens; they are added for every answer
MOST_SCORES = 1 << 19  # log-probabilities of the prompts of one request, the most probable tokens' included
MOST_ANSWERS = 1024  # of one request, to all of its prompts
MOST_MESSAGES = 8192
MOST_OF_A_MESSAGE = 1024  # parts, or calls
MOST_TOOLS = 1024
MOST_STOP_IDS = 1024
T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # a million things that are wrong take as long to list


# of OpenAI's parameters, those that change nothing of an answer
IGNORED = {
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "session_id",
}  # fmt: skip


class ApiError(Exception):
    """An error the client sees as `{"error": {"message", "type", "param", "code"}}` with HTTP `status`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        param = self.param and clipped(self.param, 200)
        return {"error": {"message": clipped(self.message, 1000), "type": kind, "param": param, "code": self.code}}


def clipped(text: str, most: int) -> str:
    """The text without its middle, if it has more than `most` characters: what a client sent may be megabytes."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[len(text) - most // 2 :]}"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False  # with it: every chunk says what its answer has cost so far
    include_dflash: bool | None = False  # chunks say which text was drafted, step by step


class Speculative(_Strict):
    """How a request is drafted for."""

    model_config = ConfigDict(extra="forbid")
    # 0 turns the drafter off; other lengths the server chooses
    num_speculative_tokens: int | None = Field(None, ge=0, le=0)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    name: str
    arguments: str  # JSON, as far as the model wrote it

    def plain(self) -> dict[str, Any]:
        """With the arguments as chat templates take them: a mapping, or the text that is none."""
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
        """The call as chat templates take it."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": self.type, "function": self.function.plain()}


class ChatMessage(_Strict):
    """One turn. `developer` is OpenAI's newer word for `system`; chat templates know the older one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    # an assistant's may be null
    content: List[TextPart] = Field(None, validate_default=True, max_length=MOST_OF_A_MESSAGE)
    tool_calls: List[ToolCall] | None = Field(None, max_length=MOST_OF_A_MESSAGE)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what vLLM calls it
    function_call: None = None  # OpenAI's older word for a tool call

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
    def _of_an_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only a message of the assistant may have this")
        return value

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
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
    model_config = ConfigDict(extra="allow")  # what a template may show
    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class NamedTool(_Strict):
    """The function that `tool_choice` names."""

    name: str


class NamedChoice(_Strict):
    """How it is named."""

    type: Literal["function"]
    function: NamedTool


Choice: TypeAlias = Literal["none", "auto", "required"]


class Cut(NamedTuple):
    """What is kept of a prompt that is too long."""

    most: int  # tokens
    side: Literal["left", "right"] | None  # where it is cut; None: on the left, behind what begins a text

    def of(self, ids: list[int], head: int = 0) -> list[int]:
        """The tokens that are kept.

        Args:
            head: tokens that begin a text.
        """
        if len(ids) <= self.most:
            return ids
        head = 0 if self.side else min(head, self.most)
        return ids[: self.most] if self.side == "right" else ids[:head] + ids[len(ids) - (self.most - head) :]


class GenerationRequest(Structured, _Strict):
    """What both endpoints share. `null` means the default, as it does for OpenAI."""

    model_config = ConfigDict(extra="allow")  # what is not declared is looked up in `unsupported`

    # parameter -> the values that ask for nothing; any other value is refused
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
    n: int | None = Field(None, ge=1, le=MOST_OF_A_PROMPT)  # answers to each prompt
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0.0, le=HOTTEST)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)  # -1 and 0 keep every token
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=LEAST_PENALTY, le=MOST_PENALTY)  # 1 is none
    logit_bias: dict[str, float] | None = None  # token id, as JSON keys are strings, -> what is added to its logit
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)  # nothing ends an answer before it has so many
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)  # lower is earlier
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # so many are kept; -1: what the context holds
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = Field(None, pattern=r"^[\w.:-]{1,128}$")
    speculative: Speculative | None = None
    stop: List[str] | None = Field(None, max_length=MOST_STOPS)
    stop_token_ids: List[int] | None = Field(None, max_length=MOST_STOP_IDS)
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False  # as vLLM and SGLang: `token_ids` and `prompt_token_ids` beside the text
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # as vLLM

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
    def _of_tokens(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and len(bias) > MOST_BIASED:
            raise ValueError(f"names {len(bias)} tokens; at most {MOST_BIASED} may be biased")
        for token, value in (bias or {}).items():
            # int() refuses thousands of digits; "01" would be another name for "1"
            if not (token.isascii() and token.isdigit() and len(token) < 16 and str(int(token)) == token):
                raise ValueError(f"{token[:20]!r} is not a token id")
            if not -100.0 <= value <= 100.0:
                raise ValueError(f"the bias of token {token} must be in -100..100")
        return bias

    @field_validator("prompt_logprobs")
    @classmethod
    def _of_whole_answers(cls, wanted: int | None, info: ValidationInfo) -> int | None:
        if wanted is not None and info.data.get("stream"):
            raise ValueError("is not supported for streamed answers")
        return wanted

    @field_validator("stream_options")
    @classmethod
    def _of_streams(cls, options: Any, info: ValidationInfo) -> Any:
        if options is not None and not info.data.get("stream"):
            raise ValueError("needs `stream: true`")
        return options

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request body. Raises ApiError (400) that names the first parameter at fault."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise describe(error) from error
        extra = request.model_extra or {}
        for name in extra:
            if name not in cls.unsupported and name not in IGNORED:
                near = difflib.get_close_matches(name, cls.model_fields, 1)
                hint = f"; did you mean `{near[0]}`?" if near else ""
                raise ApiError(
                    400,
                    f"`{name[:100]}` is no parameter of this server{hint}",
                    param=name[:100],
                    code="unknown_parameter",
                )
        for name, harmless in cls.unsupported.items():
            value = extra.get(name)
            # by type too: for Python 1 is True
            if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
                message = f"`{name}` is not supported by this server; leave it out"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        request.check()
        try:
            request.grammar()
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        return request

    def check(self) -> None:
        """Raises ApiError (400) for what does not go together."""

    @property
    def answers(self) -> int:
        """To each prompt."""
        return self.n or 1

    @property
    def prompt_alone(self) -> bool:
        """Whether there is to be no answer."""
        return False

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has a usage of its own."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def follow(self) -> bool:
        """Whether chunks say where their text is from."""
        return bool(self.stream and self.stream_options and self.stream_options.include_dflash)

    @property
    def asked_tokens(self) -> int | None:
        """The longest answer, as the client asked for it."""
        return self.max_tokens

    def cut(self, limit: int) -> Cut | None:
        """What is kept of a prompt. Raises ApiError (400) for more tokens than the context, `limit`, has."""
        kept = self.truncate_prompt_tokens
        if kept is not None and kept > limit:
            message = f"truncate_prompt_tokens is {kept}; the context has {limit}"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        return None if kept is None else Cut(limit - 1 if kept < 0 else kept, self.truncation_side)

    def length(self, most: int) -> int:
        """The most tokens of an answer, where there may be `most`."""
        return min(self.asked_tokens or most, most)

    def least(self, most: int, grammar: str | None) -> int:
        """The fewest tokens of an answer that may have `most`.

        Args:
            grammar: the parameter that says what the answer is to be, if one does.

        Raises:
            ApiError: (400) that is more than it may have, or its end is where what it is to be is complete.
        """
        least = self.min_tokens or 0
        if least > most:
            message = f"min_tokens is {least}, but the answer may have {most} tokens at most"
            raise ApiError(400, message, param="min_tokens")
        if least and grammar:
            message = f"`min_tokens`: what `{grammar}` asks for ends where it is complete; leave one of them out"
            raise ApiError(400, message, param="min_tokens")
        return least

    def best_tokens(self) -> int | None:
        """How many to report beside each token; None: no log-probabilities at all."""
        raise NotImplementedError

    def best_prompt_tokens(self) -> int | None:
        """The same beside each token of the prompt."""
        return self.prompt_logprobs

    def sampling(
        self, most: int, defaults: Mapping[str, float], eos: int | None, grammar: Grammar | None = None
    ) -> SamplingParams:
        """How to decode; without a seed a random one is taken.

        Args:
            most: tokens that an answer may have.
            defaults: what holds where the request names no value; without one it is OpenAI's.
            eos: the tokenizer's own end of a turn, which a checkpoint's configurations need not name.
            grammar: what the answer is to be.
        """

        def asked(name: str, otherwise: float) -> float:
            value: float | None = getattr(self, name)
            return defaults.get(name, otherwise) if value is None else value

        temperature = asked("temperature", 1.0)
        ends = (self.stop_token_ids or []) + ([] if eos is None or self.ignore_eos else [eos])
        return SamplingParams(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=max(asked("top_p", 1.0), LEAST_TOP_P),
            top_k=max(int(asked("top_k", 0)), 0),
            min_p=asked("min_p", 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=asked("repetition_penalty", 1.0),
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
        "add_special_tokens": (False,),  # a template has its own
        "echo": (False,),
        "documents": ([],),
    }

    messages: List[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None  # of the target's template
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: List[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = True

    @field_validator("tools")
    @classmethod
    def _named_once(cls, tools: list[Tool] | None) -> list[Tool] | None:
        seen: set[str] = set()
        for name in (tool.function.name for tool in tools or ()):
            if name in seen:
                raise ValueError(f"two tools have the name {name!r}")
            seen.add(name)
        return tools

    @field_validator("tool_choice", mode="wrap", json_schema_input_type=Choice | NamedChoice | None)
    @classmethod
    def _of_the_tools(cls, choice: Any, handler: Any, info: ValidationInfo) -> Any:
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
            if not isinstance(name, str):
                raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')
            if name not in (tool.function.name for tool in info.data.get("tools") or ()):
                raise ValueError(f"names {name!r}, which is none of the tools")
            return NamedTool(name=name)
        if choice not in (None, "none", "auto", "required"):
            raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": ...}}')
        if choice == "required" and not info.data.get("tools"):
            raise ValueError("is required, but there are no tools")
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, best: int | None, info: ValidationInfo) -> int | None:
        if best and not info.data.get("logprobs"):
            raise ValueError("`logprobs` must be true if this is set")
        return best

    def tools_for(self, form: str | None) -> list[dict[str, Any]]:
        """The tools that may be called, as chat templates take them.

        Args:
            form: the server's parser of tool calls, if it has one.

        Raises:
            ApiError: (400) this server cannot do what is asked with them.
        """
        if not self.tools or self.tool_choice == "none":
            return []
        if form is None:
            message = "`tools`: it is not known how this target writes tool calls; start with --tool-call-parser"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        return [tool.plain() for tool in self.tools]

    @property
    def tells_the_template(self) -> bool:
        """Whether `variables` are asked for."""
        return bool(self.chat_template_kwargs) or self.reasoning_effort is not None

    def variables(self, known: Collection[str]) -> dict[str, Any]:
        """What the chat template is told beside messages and tools.

        Args:
            known: the variables that it looks at.

        Raises:
            ApiError: (400) it does not look at what is asked for.
        """
        told = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        if not isinstance(told.get("enable_thinking", False), bool):
            raise ApiError(400, "enable_thinking must be true or false", param="chat_template_kwargs.enable_thinking")
        if told.get("enable_thinking") is False and "enable_thinking" not in known:
            del told["enable_thinking"]  # of a template without thoughts many clients ask for none
        if unknown := next((name for name in told if name not in known), None):
            knows = ", ".join(sorted(known)) or "none"
            message = f"the target's chat template takes no {unknown[:100]!r}; those that it takes: {knows}"
            raise ApiError(400, message, param=f"chat_template_kwargs.{unknown[:100]}")
        if (effort := self.reasoning_effort) is None:
            return told
        if not {"reasoning_effort", "enable_thinking"} & set(known):
            message = "`reasoning_effort`: the target's chat template has no such switch; leave it out"
            raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
        asked = {"enable_thinking": effort != "none"} | told | {"reasoning_effort": effort}
        return {name: value for name, value in asked.items() if name in known}

    def grammar_for(self, form: str | None, start: Start) -> tuple[str, Grammar] | None:
        """What the answer is to be, a tool's call too, and the parameter that says so.

        Args:
            form: the server's parser of tool calls, if it has one.
            start: what the answer begins with.

        Raises:
            ApiError: (400) a call is to come and something else too.
        """
        asked = self.grammar()
        if form is not None and self.tools and self.tool_choice != "none":
            named = self.tool_choice.name if isinstance(self.tool_choice, NamedTool) else None
            tools = [tool.model_dump() for tool in self.tools]
            required, parallel = self.tool_choice == "required", self.parallel_tool_calls is not False
            tag = structural_tag(form, tools, required=required, named=named, parallel=parallel, start=start)
            if tag is not None:
                if asked is not None:
                    message = f"`{asked[0]}`: a tool call has a form of its own; leave it out"
                    raise ApiError(400, message, param=asked[0])
                return ("tool_choice" if required or named else "tools"), Grammar("structural_tag", json.dumps(tag))
        return asked and (asked[0], after_reasoning(asked[1], start))

    @property
    def asked_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def best_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions: prompts, as text or as token ids."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    prompt: List[str | List[int]]  # one prompt may come without the list around it
    max_tokens: int | None = Field(None, ge=0)  # 0: the prompt alone
    logprobs: int | None = Field(None, ge=0, le=COMPLETION_LOGPROBS)
    echo: bool | None = False
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _all(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, 1, info.data.get("n") or 1):
            raise ValueError("is supported where it is `n`: every answer is returned")
        return best_of

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str | list[int]])
    @classmethod
    def _prompts(cls, prompt: Any, info: ValidationInfo) -> Any:
        several = isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt)
        prompts = prompt if several else [prompt]
        if len(prompts) * (info.data.get("n") or 1) > MOST_ANSWERS:
            raise ValueError(f"asks for more than {MOST_ANSWERS} answers, `n` to each prompt; send several requests")
        for one in prompts:
            if not isinstance(one, str) and not (isinstance(one, list) and all(type(item) is int for item in one)):
                raise ValueError("must be a string, a list of token ids, or a list of such prompts")
            if not one:
                raise ValueError("must not be empty")
        return prompts

    def check(self) -> None:
        if self.prompt_alone and not self.echo and self.prompt_logprobs is None:
            message = (
                "`max_tokens` is 0 and neither `echo` nor `prompt_logprobs` asks for the prompt; ask for one token"
            )
            raise ApiError(400, message, param="max_tokens")

    @property
    def prompt_alone(self) -> bool:
        return self.max_tokens == 0

    def length(self, most: int) -> int:
        # with nothing to tell of the prompt the engine ends a request with a token, which nobody sees
        least = 1 if self.best_prompt_tokens() is None else 0
        return min(COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, least), most)

    def best_tokens(self) -> int | None:
        return self.logprobs

    def best_prompt_tokens(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((best for best in asked if best is not None), default=None)


def ignores_its_end(name: str) -> ApiError:
    return ApiError(400, f"`ignore_eos`: what `{name}` asks for ends with an end-of-sequence token", param="ignore_eos")


def describe(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body, with the parameter's place in OpenAI's notation."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first['msg']})", code="invalid_json")
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place}: {message}" if place else f"the body: {message}", param=place or None)
