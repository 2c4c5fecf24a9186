"""Splits an answer's text into content, reasoning and tool calls as it arrives."""

from collections.abc import Sequence
from typing import Any, Literal

from . import harmony
from .calls import Tools
from .deltas import Delta, ToolDelta, merged
from .forms import FORMS
from .reading import MalformedError, Reading
from .values import Text

THINK, THINK_END = "<think>", "</think>"
# the start of an answer; either: <think> is optional; messages: all of it has gpt-oss's harmony format
Start = Literal["content", "reasoning", "either", "messages"]


class OutputParser:
    """Splits one answer. The joined deltas do not depend on how the text is cut into pieces.

    Drops only markers, and white space around tool calls. A call that cannot be read stays in the content. Once a part
    of a call's arguments has been sent, they become valid JSON, whatever follows. Only `finish(cut=True)` leaves them
    incomplete, as other servers do, so that no client runs a call with cut values.

    A call within the reasoning is part of the reasoning. If the reasoning never ends, it is a call.

    Args:
        start: what the text begins with; after `content` there is no reasoning.
        form: a name of `FORMS`; None leaves all calls in the content.
        tools: OpenAI's `tools`; their schemas decide the types of values.
        parallel: keep calls after the first; otherwise they are dropped.
        named: the client has named the function, so the answer ends with "stop", not "tool_calls".
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
        self._text.ends = self._form.ends if self._form else ()
        self.begun = 0  # tool calls
        self.thinking = False  # within the reasoning
        self._unended = False  # the text has no end of the reasoning
        self._incomplete = False  # the arguments of the last call are cut
        self._space: str | None = "" if form is not None else None  # white space that may be around a call
        self._line_start = True
        self._reading = self._messages() if start == "messages" else self._read(start)
        self.reasoning_end = harmony.END if start == "messages" else THINK_END  # marker after the reasoning

    @property
    def called(self) -> bool:
        """Returns whether the model has chosen to call a tool; OpenAI's finish reason for a named call is "stop"."""
        return self.begun > 0 and not self._named and not self._incomplete

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that more text completes."""
        self._text.add(text)
        next(self._reading, None)
        return self._pop_deltas()

    def finish(self, cut: bool = False) -> list[Delta]:
        """Returns the deltas of the text that was held back.

        Args:
            cut: the model did not end the answer itself.
        """
        self._text.ended, self._text.cut = True, cut
        next(self._reading, None)
        return self._pop_deltas()

    def _pop_deltas(self) -> list[Delta]:
        deltas, self._deltas = merged(self._deltas), []
        return deltas

    # ---- reading ---------------------------------------------------------------------------------------------

    def _read(self, start: Start) -> Reading[None]:
        if start != "content":
            yield from self._reasoning(start)
        starts = self._form.starts if self._form else ()
        while marker := (yield from self._text.through(starts, self.emit)):
            if self._form and marker in self._form.line_start and not self._line_start:
                self.emit(marker)
            else:
                yield from self._call(marker)
        if self._space and not self.begun:
            self._deltas.append(Delta(self._space))

    def _messages(self) -> Reading[None]:
        try:
            yield from harmony.read(self._text, self, with_tools=self._form is not None)
        except MalformedError:
            self._incomplete = True

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
            self.emit(before)
        if not self.thinking:
            return
        starts = tuple(start for start in self._form.starts if start not in self._form.line_start) if self._form else ()
        while marker := (yield from self._text.through((THINK_END, *starts), self.emit)):
            if marker == THINK_END or (yield from self._drafted_call(marker)):
                break
        self.thinking = False

    def _drafted_call(self, start: str) -> Reading[bool]:
        """Reads a possible call within the reasoning after its start; returns whether the reasoning has ended."""
        assert self._form is not None
        held = [start, (yield from self._text.space())]
        following = yield from self._text.peek()
        if following not in self._form.opening.get(start, following):
            self.emit("".join(held))
            return False
        ended = ""
        if not self._unended:
            ended = yield from self._text.through((THINK_END,), held.append)
            self._unended = not ended
        if ended or self._text.cut:
            self.emit("".join(held))
            return bool(ended)
        self._text.restore("".join(held))  # the model has forgotten to end its reasoning
        yield from self._text.one_of(start)
        return (yield from self._call(start))

    def _call(self, start: str) -> Reading[bool]:
        """Reads a possible tool call after its start; returns whether it is one."""
        assert self._form is not None and self._form.read is not None
        begun = self.begun
        self._text.mark(len(start))
        try:
            yield from self._form.read(start, self._text, self, self._tools)
        except MalformedError:
            self.emit(self._text.unmark())
            self._incomplete = self._text.at_end and self._text.cut and self.begun > begun
        return self.begun > begun

    def emit(self, text: str) -> None:
        """Adds text that is not a call to the reasoning, or to the content."""
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

    # ---- `Calls`, which forms report to ----------------------------------------------------------------------

    def begin(self, name: str, id: str | None = None) -> None:
        """Begins a call; the text that was read for it is not content."""
        assert self._form is not None
        self._text.unmark()
        self.begun += 1
        self._space, self._line_start, self.thinking = "", True, False
        if self._wanted:
            self._deltas.append(Delta(tool=ToolDelta(self.begun - 1, id or self._form.new_id(), name)))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        if self._wanted:
            self._deltas.append(Delta(tool=ToolDelta(self.begun - 1, arguments=text)))

    @property
    def _wanted(self) -> bool:
        return self._parallel or self.begun == 1
