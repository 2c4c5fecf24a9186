"""/v1/chat/completions: a chat as that API has it, and the target's own tokens of what a server says there."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import MALFORMED, Message, read_chat
from dflash_toolkit.evaluation.measure.decoders import Chat

from .conversation import rendered_response


def chat_fields(chat: Chat, thinking: bool | None) -> dict[str, Any]:
    """What a request says of the prompt."""
    fields: dict[str, Any] = {"messages": _sent(chat.messages)}
    if chat.tools:
        fields["tools"] = list(chat.tools)
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    return fields


def _sent(messages: list[Message]) -> list[Message]:
    """Messages of a template as the API wants them: arguments are text."""
    sent = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                calls.append(call | {"function": call["function"] | {"arguments": arguments}})
            message = message | {"tool_calls": calls}
        sent.append(message)
    return sent


def is_our_prompt(url: str, theirs: int | Sequence[int], ours: list[int], *, agreed: bool) -> bool:
    """Whether a server made our tokens, or as many, of a chat.

    Args:
        theirs: its tokens, or their number where it says no more.
        agreed: it did so for another chat.

    Raises:
        UserError: it does not, and never did.
    """
    count, same = (theirs, theirs == len(ours)) if isinstance(theirs, int) else (len(theirs), list(theirs) == ours)
    if not (same or agreed):
        other = "other " if count == len(ours) else ""
        raise UserError(
            f"{url}: the prompt has {count} {other}tokens there and {len(ours)} with the target's own chat template, "
            f"so that the answer is to another prompt; serve the target with its own template, in the mode of "
            f"--thinking"
        )
    return same


def plain_text(message: dict[str, Any]) -> str | None:
    """All that an assistant's message says, if it is nothing but content."""
    return None if _reasoning(message) or message.get("tool_calls") else message.get("content") or ""


def rendered_message(
    message: dict[str, Any],
    prompt: list[int],
    chat: Chat,
    tokenizer: Any,
    stop_ids: Collection[int],
    thinking: bool | None,
) -> list[int] | None:
    """The tokens of an assistant's message as the target's template writes it.

    None: it cannot behind this prompt, or leaves out what the message says.
    """
    given = {"role": "assistant", "content": message.get("content") or "", "tool_calls": message.get("tool_calls")}
    try:
        (said,) = read_chat({"messages": [given]})[0]
        answer = rendered_response(tokenizer, prompt, [*chat.messages, said], chat.tools, stop_ids, thinking)
        if reasoning := _reasoning(message):
            said |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates know one name or the other
            thought = rendered_response(tokenizer, prompt, [*chat.messages, said], chat.tools, stop_ids, thinking)
            answer = None if thought == answer and reasoning.strip() else thought  # it leaves the reasoning out
        return answer
    except (*MALFORMED, UserError):  # a call whose arguments are no JSON, a template without tools
        return None


def _reasoning(message: dict[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")
