"""Chooses the parsers of a target from options or its chat template."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_toolkit.config import UserError

from . import harmony
from .forms import FORMS, OTHER_NAMES
from .json_forms import CALLS_BEGIN, FENCE, TOOL_CALL, TOOL_CALLS
from .output import THINK, THINK_END, OutputParser, Start
from .xml_forms import ARG_KEY, DSML, FUNCTION, PARAMETER

AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS = (AUTO, NONE, *FORMS, *OTHER_NAMES)
REASONING_PARSERS = (AUTO, NONE, "qwen3", "deepseek_r1", "openai_gptoss")
CHANNELS = (harmony.CHANNEL, harmony.MESSAGE)
TAIL = 16  # last tokens of a prompt, which may open the reasoning
OPENED = re.compile(rf"({THINK}|{THINK_END})\s*$")


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of a server.

    Attributes:
        tool_calls: a name of `FORMS`; None: tools cannot be used.
        reasoning: qwen3 (the model or its template opens <think>), deepseek_r1 (an answer may begin within the
            reasoning, without a tag), openai_gptoss (gpt-oss's channels), or None.
    """

    tool_calls: str | None = None
    reasoning: str | None = None

    @classmethod
    def choose(cls, tokenizer: Any, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> "Parsers":
        """Chooses the parsers that the options name; `auto` detects them in the tokenizer's chat template.

        Raises:
            UserError: an option has an unknown value.
        """
        for name, value, choices in (
            ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS),
            ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
        ):
            if value not in choices:
                raise UserError(f"{name}: {value!r} is not one of {', '.join(choices)}")
        template = _template(tokenizer)
        calls = _form_of(template) if tool_call_parser == AUTO else OTHER_NAMES.get(tool_call_parser, tool_call_parser)
        reasoning = _reasoning_of(template) if reasoning_parser == AUTO else reasoning_parser
        return cls(None if calls == NONE else calls, None if reasoning == NONE else reasoning)

    def of_answer(
        self, start: Start, tools: Sequence[Any] = (), parallel: bool = True, named: bool = False
    ) -> OutputParser | None:
        """Returns the parser of one answer; None: all of it is content.

        Args:
            start: what the answer begins with.
            tools: tools that may be called; without any, calls stay in the content.
            parallel, named: see `OutputParser`.
        """
        form = self.tool_calls if tools else None
        return None if start == "content" and form is None else OutputParser(start, form, tools, parallel, named)

    def start_of(self, tokenizer: Any, prompt: Sequence[int]) -> Start:
        """Returns what an answer to a chat's prompt begins with."""
        if self._has_messages:
            return "messages"
        if self.reasoning is None:
            return "content"
        tail = tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False)
        if opened := OPENED.search(tail):
            return "reasoning" if opened[1] == THINK else "content"
        return "reasoning" if self.reasoning == "deepseek_r1" else "either"

    @property
    def _has_messages(self) -> bool:
        return self.tool_calls == "openai" or self.reasoning == "openai_gptoss"

    def markers(self, with_tools: bool) -> Collection[str]:
        """Returns the markers that a parser needs, which may be special tokens."""
        if self._has_messages:
            return harmony.SPECIAL
        form = FORMS[self.tool_calls] if with_tools and self.tool_calls else None
        return (*((THINK, THINK_END) if self.reasoning else ()), *(form.special if form else ()))


def _template(tokenizer: Any) -> str:
    """Returns the text of all chat templates; a tokenizer may have several by name."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))


def _form_of(template: str) -> str:
    plain = template.replace("\\", "")  # quotes in a string of the template may be escaped
    marks = {
        "openai": CHANNELS,
        "deepseek_v32": (DSML,),
        "deepseek_v3": (CALLS_BEGIN, FENCE),
        "deepseek_v31": (CALLS_BEGIN,),
        "qwen3_coder": (TOOL_CALL, FUNCTION, PARAMETER),
        "glm45": (TOOL_CALL, ARG_KEY),
        "hermes": (TOOL_CALL, '"arguments"'),
        "mistral": (TOOL_CALLS,),
        "llama4_pythonic": ("<|header_start|>", '"parameters"'),
        "llama3_json": ("<|start_header_id|>", '"parameters"'),
    }
    return next((form for form, texts in marks.items() if all(text in plain for text in texts)), NONE)


def _reasoning_of(template: str) -> str:
    if all(text in template for text in CHANNELS):
        return "openai_gptoss"
    if THINK_END not in template:
        return NONE
    # DeepSeek's full-width bars; newer templates open the reasoning in the prompt
    return "deepseek_r1" if "<\uff5cAssistant\uff5c>" in template and THINK not in template else "qwen3"
