"""POST /v1/chat/completions."""

import json
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, ValidationInfo, field_validator

from dflash_toolkit.data.prompts import template_variables
from dflash_toolkit.runtime.client import PreparedRequest
from dflash_toolkit.sampling import MAX_LOGPROBS, Grammar

from ..body import Strict
from ..logprobs import TokenStrings
from ..openapi import DECODED, AnswerMetrics, ChatLogprobs, PromptLogprob, Usage, operation
from ..parsing import after_reasoning, structural_tag
from ..parsing.output import Start
from ..protocol import ApiError, GenerationRequest, Int64, List, clipped
from ..replies import Replies, ReplyForm
from ..service import Service

MAX_MESSAGES = 8192
MAX_MESSAGE_PARTS = 1024  # parts, or calls
MAX_TOOLS = 1024
MakeForm: TypeAlias = Callable[[PreparedRequest, TokenStrings | None], ReplyForm]


class TextPart(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "annotations"})

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str  # JSON; the model may have written it incompletely

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates; the arguments become a mapping if they are a JSON object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": self.type, "function": self.function.plain()}


class ChatMessage(Strict):
    """One turn. `developer` is OpenAI's newer name of `system`; chat templates know the older one."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "audio", "cache_control", "refusal"})

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


class Function(Strict):
    open: ClassVar[bool] = True  # templates may render other fields
    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool for chat templates."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class NamedTool(Strict):
    """Names the function that must be called."""

    name: str


class NamedChoice(Strict):
    """The form of `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedTool


Choice: TypeAlias = Literal["none", "auto", "required"]


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
    max_completion_tokens: Int64 | None = Field(None, ge=1)
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


class CalledFunctionReply(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCallReply] = []


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = []
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    metrics: AnswerMetrics | None = None
    prompt_token_ids: list[int] = []


class FunctionDelta(BaseModel):
    name: str = ""
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] = []
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None
    prompt_token_ids: list[int] = []


def routes(service: Service) -> APIRouter:
    found = APIRouter()
    described = operation(
        "Answer a conversation", ChatCompletion, DECODED, body=ChatRequest, events=ChatCompletionChunk
    )

    @found.post("/v1/chat/completions", openapi_extra=described)
    async def chat(request: Request) -> Response:
        return await answer(service, request, await service.pools.parsed(request, ChatRequest.parse))

    return found


async def prompt_of(service: Service, request: Request, body: ChatRequest) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the prompt of a chat request, and the tools that may be called."""
    service.check_model(body.model)
    tools = body.tools_for(service.parsers.tool_calls)
    known = template_variables(service.engine.tokenizer, tools) if body.has_template_variables else ()
    variables, cut = body.variables(known), body.cut(service.context_limit)

    def encoded() -> list[int]:
        return service.encoder.chat([message.plain() for message in body.messages], tools, variables, cut)

    return await service.pools.run(request, encoded), tools


async def answer(service: Service, request: Request, body: ChatRequest, form: MakeForm | None = None) -> Response:
    """Answers a chat request; `form` replaces the reply form of this endpoint."""
    tokenizer, parsers = service.engine.tokenizer, service.parsers
    ids, tools = await prompt_of(service, request, body)
    start = parsers.start_of(tokenizer, ids)
    grammar = body.grammar_for(parsers.tool_calls, start)
    requests = await service.requests(body, [ids], "messages", request.state.key, grammar)
    strings = service.strings_for(body)
    shown = [one.prompt_ids for one in requests] if body.return_token_ids else ()
    replies: ReplyForm = Replies(
        "chat",
        body.model,
        body.include_usage,
        strings,
        answers_per_prompt=body.answers,
        unique=body.request_id or request.state.request_id,
        prompt_ids=shown,
    )
    if form is not None:
        replies = form(requests[0], strings)
    parallel, named = body.parallel_tool_calls is not False, isinstance(body.tool_choice, NamedTool)
    output_parsers = [parsers.of_answer(start, tools, parallel, named) for _ in requests]
    return await service.respond(request, body, requests, replies, output_parsers, parsers.markers(bool(tools)))
