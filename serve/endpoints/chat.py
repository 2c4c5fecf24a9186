"""POST /v1/chat/completions."""

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from dflash_toolkit.data.prompts import template_variables
from dflash_toolkit.runtime.connection import PreparedRequest
from dflash_toolkit.sampling import MAX_LOGPROBS, Grammar

from ..body import Strict
from ..logprobs import TokenStrings
from ..openapi import DECODED, AnswerMetrics, ChatLogprobs, PromptLogprob, Usage, operation
from ..parsing import Parsers, after_reasoning, structural_tag
from ..parsing.output import Start
from ..protocol import ApiError, GenerationRequest, Int64, List, clipped
from ..replies import Replies, ReplyForm
from ..service import Service
from .chat_messages import ChatMessage

MAX_MESSAGES = 8192
MAX_TOOLS = 1024
MakeForm: TypeAlias = Callable[[PreparedRequest, TokenStrings | None], ReplyForm]


class Function(Strict):
    open: ClassVar[bool] = True  # templates may render other fields
    name: str = Field(pattern=r"^[\w.:/-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

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


class Allowed(Strict):
    """The functions that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: List[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]


class AllowedChoice(Strict):
    """The form of `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Thinking(Strict):
    """Anthropic's and DeepSeek's switch of the reasoning."""

    type: str | None = None

    @property
    def on(self) -> bool:
        return self.type != "disabled"


class Reasoning(Strict):
    """OpenRouter's and SGLang's switch of the reasoning."""

    effort: str | None = None
    enabled: bool | None = None


SWITCHES = ("enable_thinking", "thinking")  # names of the same variable in templates
Choice: TypeAlias = Literal["none", "auto", "required"]
ChoiceObject: TypeAlias = Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]
CHOICE_OBJECT: TypeAdapter[NamedChoice | AllowedChoice] = TypeAdapter(ChoiceObject)
NAMED = '{"type": "function", "function": {"name": ...}}'
ALLOWED = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'


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
    enable_thinking: bool | None = None  # other servers' names of these two
    thinking: Thinking | bool | None = None
    reasoning: Reasoning | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: List[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | ChoiceObject | None = None
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

    @field_validator("tool_choice", mode="wrap", json_schema_input_type=Choice | ChoiceObject | None)
    @classmethod
    def _check_choice(cls, choice: Any, handler: Any, info: ValidationInfo) -> Any:
        if choice not in (None, "none", "auto", "required"):
            try:
                choice = CHOICE_OBJECT.validate_python(choice)
            except ValidationError as error:
                raise ValueError(f"must be none, auto, required, {NAMED} or {ALLOWED}") from error
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if choice == "required" and not names:
            raise ValueError("is 'required', but `tools` is empty; add a tool or omit tool_choice")
        chosen = [choice.function.name] if isinstance(choice, NamedChoice) else []
        chosen += choice.allowed_tools.names if isinstance(choice, AllowedChoice) else []
        if unknown := next((name for name in chosen if name not in names), None):
            raise ValueError(f"names {clipped(repr(unknown), 200)}, but `tools` has {', '.join(names) or 'no tool'}")
        return choice

    @property
    def named(self) -> str | None:
        """Returns the function that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def allowed(self) -> list[str] | None:
        """Returns the functions that may be called; None: all."""
        return self.tool_choice.allowed_tools.names if isinstance(self.tool_choice, AllowedChoice) else None

    @property
    def required(self) -> bool:
        """Returns whether a function must be called."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        return mode == "required" or self.named is not None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, best: int | None, info: ValidationInfo) -> int | None:
        if best and not info.data.get("logprobs"):
            raise ValueError(f"is {best}, but `logprobs` is not true; set `logprobs: true`")
        return best

    def parsers(self, of_server: Parsers) -> Parsers:
        """Returns the server's parsers; a forced call has Hermes' form if the target's form is unknown."""
        return replace(of_server, tool_calls=of_server.tool_calls or "hermes") if self.required else of_server

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
    def template_variables(self) -> dict[str, Any]:
        """Returns the requested variables of the chat template, without messages and tools."""
        found = dict[str, Any]()
        if (effort := self.reasoning_effort or (self.reasoning and self.reasoning.effort)) is not None:
            found = dict.fromkeys(SWITCHES, effort != "none") | {"reasoning_effort": effort}
        thinking = self.thinking.on if isinstance(self.thinking, Thinking) else self.thinking
        for switch in (self.reasoning and self.reasoning.enabled, thinking, self.enable_thinking):
            if switch is not None:
                found |= dict.fromkeys(SWITCHES, switch)
        named = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        if not isinstance(switch := named.get("enable_thinking", False), bool):
            message = f"enable_thinking is {clipped(repr(switch), 100)}; it must be true or false"
            raise ApiError(400, message, param="chat_template_kwargs.enable_thinking")
        return found | named

    def unused(self, known: Collection[str]) -> dict[str, str]:
        """Returns the fields that have no effect, each with the reason.

        Args:
            known: the variables that the template uses.
        """
        reason = f"is not used by the target's chat template, which uses: {', '.join(sorted(known)) or 'none'}"
        # many clients send `enable_thinking: false` to every model
        found = [
            f"chat_template_kwargs.{name}"
            for name, value in (self.chat_template_kwargs or {}).items()
            if name not in known and value is not None and not (name == "enable_thinking" and value is False)
        ]
        if not {"reasoning_effort", *SWITCHES} & {*known}:
            found += [name for name in ("reasoning_effort", "thinking", "reasoning") if getattr(self, name) is not None]
            found += ["enable_thinking"] if self.enable_thinking else []
        return dict.fromkeys(found, reason)

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
            # a forced call needs no format; otherwise the answer has calls or the format
            by_format = given is not None and given[0] == "response_format"
            tag = structural_tag(
                form,
                [tool.model_dump() for tool in self.tools],
                required=self.required,
                named=self.named,
                allowed=self.allowed,
                parallel=self.parallel_tool_calls is not False,
                start=start,
                content=given[1] if given and by_format else None,
            )
            if tag is not None:
                if given is not None and not by_format:
                    message = f"`{given[0]}` cannot be combined with a tool call, which has its own grammar; omit it"
                    raise ApiError(400, message, param=given[0])
                return ("tool_choice" if self.required or self.allowed else "tools"), Grammar(
                    "structural_tag", json.dumps(tag)
                )
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
    tokenizer, parsers = service.engine.tokenizer, body.parsers(service.parsers)
    tools = body.tools_for(parsers.tool_calls)
    wanted = body.template_variables
    known = template_variables(tokenizer, tools) if wanted else ()
    variables = {name: value for name, value in wanted.items() if name in known}
    request.state.ignored += service.unknown.report(body.unused(known))
    cut = body.cut(service.context_limit)

    def encoded() -> list[int]:
        return service.encoder.chat(
            [message.plain() for message in body.messages], tools, variables, cut, parsers.tool_calls or "hermes"
        )

    return await service.pools.run(request, encoded), tools


async def answer(service: Service, request: Request, body: ChatRequest, form: MakeForm | None = None) -> Response:
    """Answers a chat request; `form` replaces the reply form of this endpoint."""
    tokenizer, parsers = service.engine.tokenizer, body.parsers(service.parsers)
    ids, tools = await prompt_of(service, request, body)
    start = parsers.start_of(tokenizer, ids)
    grammar = body.grammar_for(parsers.tool_calls, start)
    requests = await service.requests(body, [ids], "messages", request, grammar)
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
    parallel, named = body.parallel_tool_calls is not False, body.named is not None
    output_parsers = [parsers.of_answer(start, tools, parallel, named) for _ in requests]
    return await service.respond(request, body, requests, replies, output_parsers, parsers.markers(bool(tools)))
