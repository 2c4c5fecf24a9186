"""An answer's text as it comes, split into content, reasoning and tool calls."""

from collections.abc import Sequence
from typing import Any, Literal

from .deltas import Delta, ToolDelta, merged
from .forms import FORMS, TOOL_CALL, Tools
from .reading import MalformedError, Reading, Text

THINK, THINK_END = "<think>", "</think>"
Start = Literal["content", "reasoning", "either"]  # what an answer starts with; either: it opens <think> or does not


class OutputParser:
    """Splits one answer. Whatever pieces the text comes in, the deltas joined are the same.

    Only markers are lost, and white space alone around tool calls. A call that cannot be read stays in the content as
    it is; one that stops being JSON within its arguments, which have been sent, goes on as content there.

    Args:
        start: what the text starts with; with `content` there is no reasoning.
        form: a name of `FORMS`; None leaves all calls in the content.
        tools: OpenAI's `tools`, by whose schemas values get types.
        parallel: whether calls behind the first are wanted; if not, they are dropped.
        named: the client has named the function, so that a call is no news.
    """

    def __init__(
        self,
        start: Start = "content",
        form: str | None = None,
        tools: Sequence[Any] = (),
        parallel: bool = True,
        named: bool = False,
    ) -> None:
        self._named = named
        self._form = FORMS[form] if form is not None else None
        functions = [tool["function"] for tool in tools]
        self._tools: Tools = {each["name"]: each.get("parameters") or {} for each in functions}
        self._parallel = parallel
        self._text, self._deltas = Text(), list[Delta]()
        self.begun = 0  # tool calls
        self.thinking = False  # what comes now is reasoning
        self._space: str | None = "" if form is not None else None  # white space that stands alone so far
        self._line_start = True
        self._reading = self._read(start)

    @property
    def called(self) -> bool:
        """Whether there is a tool call of the model's own choice; OpenAI calls an end behind another one a stop."""
        return self.begun > 0 and not self._named

    def feed(self, text: str) -> list[Delta]:
        """What more of the text brings."""
        self._text.add(text)
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Delta]:
        """What was held back, now that nothing follows."""
        self._text.ended = True
        next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = merged(self._deltas), []
        return deltas

    # ---- reading ---------------------------------------------------------------------------------------------

    def _read(self, start: Start) -> Reading[None]:
        if start != "content":
            yield from self._reasoning(start)
        starts = self._form.starts if self._form else ()
        while marker := (yield from self._text.through(starts, self._say)):
            if self._form and marker in self._form.line_start and not self._line_start:
                self._say(marker)
            else:
                yield from self._call(marker)
        if self._space and not self.begun:
            self._deltas.append(Delta(self._space))

    def _reasoning(self, start: Start) -> Reading[None]:
        self._text.mark()
        yield from self._text.space()
        try:
            opened = yield from self._text.one_of(THINK)
        except MalformedError:
            opened = ""
        before = self._text.unmark()
        self.thinking = start == "reasoning" or bool(opened)
        if not opened:
            self._say(before)
        if not self.thinking:
            return
        # a model that forgets to end its reasoning before it calls a tool
        starts = (TOOL_CALL,) if self._form and TOOL_CALL in self._form.starts else ()
        while marker := (yield from self._text.through((THINK_END, *starts), self._say)):
            if marker == THINK_END or (yield from self._call(marker)):
                break
        self.thinking = False

    def _call(self, start: str) -> Reading[bool]:
        """Read what may be a tool call behind its start; whether it is one."""
        assert self._form is not None
        begun = self.begun
        self._text.mark(len(start))
        try:
            yield from self._form.read(start, self._text, self, self._tools)
        except MalformedError:
            self._say(self._text.unmark())
        return self.begun > begun

    def _say(self, text: str) -> None:
        """Text that is no call."""
        if not text:
            return
        if self.thinking:
            self._deltas.append(Delta(reasoning=text))
            return
        if self._form and self._form.line_start:
            line = text.rpartition("\n")[2]
            self._line_start = not line.strip() and (self._line_start or len(line) < len(text))
        if self._space is not None:
            text = self._space + text
            if text.isspace():
                self._space = text
                return
            self._space = None
        self._deltas.append(Delta(text))

    # ---- what a form reports ---------------------------------------------------------------------------------

    def begin(self, name: str, id: str | None = None) -> None:
        """A call begins; what was read of it is no content."""
        assert self._form is not None
        self._text.unmark()
        self.begun += 1
        self._space, self._line_start, self.thinking = "", True, False
        if self._wanted:
            self._deltas.append(Delta(tool=ToolDelta(self.begun - 1, id or self._form.new_id(), name)))

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that began last."""
        if self._wanted:
            self._deltas.append(Delta(tool=ToolDelta(self.begun - 1, arguments=text)))

    @property
    def _wanted(self) -> bool:
        return self._parallel or self.begun == 1
