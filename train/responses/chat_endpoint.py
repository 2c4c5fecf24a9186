"""/v1/chat/completions: requests in that API's form, and the target's own tokens of its replies."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import MALFORMED, Message, read_chat
from dflash_toolkit.evaluation.measure.decoders import Chat

from .conversation import rendered_response


def chat_fields(chat: Chat, thinking: bool | None) -> dict[str, Any]:
    """Returns the fields of a request that hold the prompt."""
    fields: dict[str, Any] = {"messages": _sent(chat.messages)}
    if chat.tools:
        fields["tools"] = list(chat.tools)
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    return fields


def _sent(messages: list[Message]) -> list[Message]:
    """Converts a template's messages to the API's form, with arguments as text."""
    sent = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "weight"}
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                calls.append(call | {"function": call["function"] | {"arguments": arguments}})
            message = message | {"tool_calls": calls}
        sent.append(message)
    return sent


def is_our_prompt(url: str, theirs: int | Sequence[int], ours: list[int], *, agreed: bool) -> bool:
    """Whether the server rendered a chat to our tokens, or to as many.

    Args:
        theirs: the server's tokens, or their number.
        agreed: whether it did so for an earlier chat.

    Raises:
        UserError: it does not, and never did.
    """
    count, same = (theirs, theirs == len(ours)) if isinstance(theirs, int) else (len(theirs), list(theirs) == ours)
    if not (same or agreed):
        other = "other " if count == len(ours) else ""
        raise UserError(
            f"{url}: the prompt has {count} {other}tokens there but {len(ours)} with the target's own chat template; "
            f"serve the target with its own template, in the mode of --thinking"
        )
    return same


def plain_text(message: dict[str, Any]) -> str | None:
    """Returns the content of an assistant's message that has nothing else, or None."""
    return None if _reasoning(message) or message.get("tool_calls") else message.get("content") or ""


def rendered_message(
    message: dict[str, Any],
    prompt: list[int],
    chat: Chat,
    tokenizer: Any,
    stop_ids: Collection[int],
    thinking: bool | None,
) -> list[int] | None:
    """Returns the tokens of an assistant's message as the target's template renders it.

    None: the template cannot render it after this prompt, or drops a part of it.
    """
    given = {"role": "assistant", "content": message.get("content") or "", "tool_calls": message.get("tool_calls")}
    try:
        (said,) = read_chat({"messages": [given | {"reasoning": _reasoning(message)}]})[0]
        return rendered_response(tokenizer, prompt, [*chat.messages, said], chat.tools, stop_ids, thinking)
    except (*MALFORMED, UserError):  # arguments of a call that are not JSON, a template without tools or reasoning
        return None


def _reasoning(message: dict[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")
