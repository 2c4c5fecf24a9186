"""Conversations as rows of token ids: with the target's answers turn by turn, or as recorded."""

import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation, Message, Tool, with_call_ids
from dflash_toolkit.data.prompts import apply_template, encode_chat, warn_of_thinking
from dflash_toolkit.evaluation.measure.decoders import Chat, Response
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.sampling import SamplingParams

from .rows import Row, Span

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' own pattern
FINAL_CHANNEL = re.compile(r"<\|channel\|>final\b.*?<\|message\|>")
SPLIT = re.compile(r"""split\(\s*(['"])(.+?)\1""")
TOO_SHORT = "shorter than two tokens"
TOO_LONG = "too long"
REFUSED = "refused by the chat template"
UNKNOWN = "with a token that the target's embedding lacks"


def continued(known: Row | None, index: int, prompt: list[int], answer: list[int]) -> tuple[Row, bool]:
    """Returns the row with one more response, and whether it continues `known`: its prompt begins with those tokens."""
    span = (len(prompt), len(prompt) + len(answer))
    if known is not None and prompt[: len(known.tokens)] == known.tokens:
        return replace(known, tokens=prompt + answer, spans=(*known.spans, span)), True
    return Row(index, len(prompt), prompt + answer, (span,)), False


def said(tokenizer: Any, response: list[int]) -> str:
    """Returns the text of a response for the template of the next turn.

    In harmony, gpt-oss's form, that is the final channel: its template refuses channel tags, and without them thoughts
    would run into the answer. Special tokens at which a template splits the text stay, e.g. Gemma 4's, which drops
    earlier thoughts.
    """
    template = str(tokenizer.chat_template)
    if "<|channel|>" in template:
        _, *final = FINAL_CHANNEL.split(str(tokenizer.decode(response, skip_special_tokens=False)))
        return final[-1] if final else ""
    split = {match[2] for match in SPLIT.finditer(template)}
    if not split:
        return str(tokenizer.decode(response, skip_special_tokens=True))
    added = tokenizer.added_tokens_decoder
    unseen = {token for token, its in added.items() if its.special and its.content not in split}
    return str(tokenizer.decode([token for token in response if token not in unseen], skip_special_tokens=False))


@dataclass(slots=True)
class Part:
    """Turns with token ids that continue each other, so that one row holds all of them."""

    row: Row
    messages: list[Message]
    finish_reason: str


class LiveConversation:
    """Lets the target answer the turns of a conversation one after another.

    A row grows as long as the rendered conversation begins with the row's tokens, responses included. Where it does not
    (templates that drop earlier thinking, texts that are tokenised differently), a new row starts, whose prompt is the
    one that a server would see. A response that was cut ends the conversation. Where the recorded assistant calls
    tools, the target responds too, and the conversation continues with the recorded call and its results, since no
    tools are run.

    Attributes:
        parts: the rows; complete when `request` is None.
        dropped: why there are no rows.
        left_out: reasons why turns are missing from the rows.
    """

    def __init__(
        self,
        index: int,
        sample: int,
        conversation: Conversation,
        tokenizer: Any,
        params: SamplingParams,
        max_length: int,
        thinking: bool | None = None,
        vocab_size: int = sys.maxsize,
    ) -> None:
        self.index, self.sample, self.id = index, sample, conversation.id
        self.parts: list[Part] = []
        self.dropped: str | None = None
        self.left_out: list[str] = []
        self.response_tokens = 0
        self.params = params
        self.tools = conversation.tools
        self._turns = list(conversation.turns)
        self._messages: list[Message] = []
        self._tokenizer, self._max_length, self._thinking = tokenizer, max_length, thinking
        self._vocab_size = vocab_size
        self.request: tuple[list[int], SamplingParams] | None = None
        self._next_turn()

    @property
    def chat(self) -> Chat:
        return Chat(with_call_ids(self._messages), self.tools)

    def _next_turn(self) -> None:
        """Makes the next turn the request, if there is one and it fits."""
        self.request = None
        if not self._turns:
            self._end()
            return
        messages = [*self._messages, *self._turns.pop(0)]
        try:
            ids = encode_chat(self._tokenizer, with_call_ids(messages), self._thinking, self.tools)
        except UserError:
            self._end(REFUSED)
            return
        if max(ids, default=0) >= self._vocab_size:
            self._end(UNKNOWN)
            return
        room = self._max_length - len(ids)
        if room < 2:
            self._end(TOO_LONG)
            return
        self._messages = messages
        self.request = ids, replace(self.params, max_tokens=min(self.params.max_tokens, room))

    def _end(self, reason: str = "") -> None:
        self._turns.clear()
        kept = [part for part in self.parts if part.row.has_anchor]
        if not kept:
            self.dropped = TOO_SHORT if self.parts else reason
        else:
            self.left_out = [f"parts {TOO_SHORT}"] * (len(self.parts) - len(kept))
            self.left_out += [f"later turns {reason}"] if reason else []
        self.parts = kept

    def on_response(self, answer: Response) -> None:
        assert self.request is not None
        ids, _ = self.request
        self.request = None
        if not answer.tokens:
            self._end(answer.dropped)
            return
        self.response_tokens += len(answer.tokens)
        spoken = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        text = said(self._tokenizer, spoken)
        messages = [*self._messages, {"role": "assistant", "content": text}]
        row, goes_on = continued(self.parts[-1].row if self.parts else None, self.index, ids, answer.tokens)
        self.parts[len(self.parts) - goes_on :] = [Part(row, messages, answer.finish_reason)]
        if self._turns and self._turns[0][0]["role"] == "assistant":
            self._next_turn()  # the turn has the recorded call, so the response is not continued
            return
        self._messages = messages
        if answer.finish_reason != "stop" or not text.strip():
            self._end("after an answer that was cut or empty" if self._turns else "")
        else:
            self._next_turn()


# ---- recorded conversations ------------------------------------------------------------------------------------


def recorded_rows(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    stop_ids: Collection[int],
    thinking: bool | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Returns the rows of a recorded conversation, with every assistant turn supervised, and counts of dropped turns.

    A template with generation tags renders the conversation once and marks the assistant's tokens. With other templates
    each turn's prompt must begin the rendered turn token for token; the rest is the response, and turns are joined as
    in `LiveConversation`. Every response ends after its first stop token. Turns with `weight` 0 are only context.

    Args:
        messages: read up to the last assistant turn.
        stop_ids: tokens that end a response, see `stop_tokens`.
    """
    left_out: Counter[str] = Counter()
    rows: list[Row] = []
    messages = with_call_ids(messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [i for i in answers if messages[i].get("weight") != 0]
    if answers and not turns:
        return [], Counter({"with weight 0 only": 1})
    try:
        if turns == answers != [] and _has_generation_tags(tokenizer, tools):
            tokens, spans = _masked(tokenizer, messages[: turns[-1] + 1], thinking, tools)
            if not spans:
                return [], Counter({"without a token in generation tags": 1})
            spans = tuple((start, _end(tokens, start, end, stop_ids)) for start, end in spans)
            return [Row(0, spans[0][0], tokens[: spans[-1][1]], spans)], left_out
        for i in turns:
            prompt = encode_chat(tokenizer, messages[:i], thinking, tools)
            answer = rendered_response(tokenizer, prompt, messages[: i + 1], tools, stop_ids, thinking)
            if answer is None:  # maybe a reply without the thoughts that the template's prompt begins
                prompt = _before_thoughts(tokenizer, prompt)
                answer = rendered_response(tokenizer, prompt, messages[: i + 1], tools, stop_ids, thinking)
            if answer is None:
                left_out["that do not follow their prompt token for token"] += 1
                continue
            row, goes_on = continued(rows[-1] if rows else None, 0, prompt, answer)
            rows[len(rows) - goes_on :] = [row]
    except UserError as error:
        lost = str(error).partition("it leaves out ")[2]
        left_out[f"{REFUSED}, which leaves out {lost}" if lost else REFUSED] += 1
    return rows, left_out


def _before_thoughts(tokenizer: Any, prompt: list[int]) -> list[int]:
    """Returns a prompt without the `<think>` that a chat template writes at its end, if it does."""
    opened = tokenizer("<think>", add_special_tokens=False).input_ids
    for end in range(len(prompt), len(prompt) - 3, -1):  # line breaks may follow
        if prompt[end - len(opened) : end] == opened and not tokenizer.decode(prompt[end:]).strip():
            return prompt[: end - len(opened)]
    return prompt


def rendered_response(
    tokenizer: Any,
    prompt: list[int],
    messages: Sequence[Message],
    tools: Sequence[Tool],
    stop_ids: Collection[int],
    thinking: bool | None,
) -> list[int] | None:
    """Returns the template's tokens of the last message after a prompt, up to and including its first stop token.

    None: the rendered messages do not begin with the prompt token for token. Raises as `encode_chat` does.
    """
    whole = encode_chat(tokenizer, messages, thinking, tools, ask=False)
    if whole[: len(prompt)] != prompt:
        return None
    return whole[len(prompt) : _end(whole, len(prompt), len(whole), stop_ids)]


def _end(tokens: Sequence[int], start: int, end: int, stop_ids: Collection[int]) -> int:
    """Returns where a response in [start, end) ends: after its first stop token."""
    return next((at + 1 for at in range(start, end) if tokens[at] in stop_ids), end)


def load_chat_tokenizer(target: str, thinking: bool | None, rendering: Mapping[str, Any]) -> Any:
    """Loads a target's tokenizer, see `load_tokenizer`. Raises UserError if it has no chat template."""
    tokenizer = load_tokenizer(target, **rendering)
    encode_chat(tokenizer, [{"role": "user", "content": "?"}], thinking)
    warn_of_thinking(tokenizer, thinking)
    return tokenizer


def _has_generation_tags(tokenizer: Any, tools: Sequence[Tool]) -> bool:
    if not getattr(tokenizer, "is_fast", False):  # others do not map characters to tokens
        return False
    template = tokenizer.get_chat_template(None, list(tools) or None) if tokenizer.chat_template else ""
    return GENERATION.search(template) is not None


def _masked(
    tokenizer: Any, messages: Sequence[Message], thinking: bool | None, tools: Sequence[Tool]
) -> tuple[list[int], tuple[Span, ...]]:
    """Returns the token ids of a chat and every [start, end) in generation tags."""
    switches = {} if thinking is None else {"enable_thinking": thinking}
    found = apply_template(tokenizer, messages, switches, tools, return_dict=True, return_assistant_tokens_mask=True)
    mask = [0, *found["assistant_masks"], 0]
    edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
    return list(found["input_ids"]), tuple(zip(edges[::2], edges[1::2], strict=True))
