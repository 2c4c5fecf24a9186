"""/v1/chat/completions: a chat as that API has it, and the target's own tokens of what a server says there."""

import json
from collections.abc import Collection
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.prompts import MALFORMED, Message, read_chat

from .backends import Chat
from .dialogue import rendered_answer


def chat_fields(chat: Chat, thinking: bool | None) -> dict[str, Any]:
    """What a request says of the prompt."""
    fields: dict[str, Any] = {"messages": _sent(chat.messages)}
    if chat.tools:
        fields["tools"] = list(chat.tools)
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    return fields


def _sent(messages: list[Message]) -> list[Message]:
    """Messages of a template as the API wants them: arguments are text, and a result names the call that it is of."""
    sent = []
    count = 0
    names = iter(())
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                calls.append({"id": f"call_{count}", **call, "function": call["function"] | {"arguments": arguments}})
                count += 1
            names = iter([call["id"] for call in calls])
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            message = {"tool_call_id": next(names, "call_0"), **message}
        sent.append(message)
    return sent


def check_prompt(url: str, theirs: int | None, ours: int) -> None:
    """Raises UserError if a server made another number of tokens of a chat, as far as it says."""
    if theirs not in (None, ours):
        raise UserError(
            f"{url}: the prompt has {theirs} tokens there and {ours} with the target's own chat template, so that the "
            f"answer is to another prompt; serve the target with its own template, in the mode of sampler.thinking"
        )


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
    """The tokens of an assistant's message as the target's template writes it; None if it cannot behind this prompt."""
    given = {"role": "assistant", "content": message.get("content") or "", "tool_calls": message.get("tool_calls")}
    try:
        (said,) = read_chat({"messages": [given]})[0]
        if reasoning := _reasoning(message):
            said |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates know one name or the other
        return rendered_answer(tokenizer, prompt, [*chat.messages, said], chat.tools, stop_ids, thinking)
    except (*MALFORMED, UserError):  # a call whose arguments are no JSON, a template without tools
        return None


def _reasoning(message: dict[str, Any]) -> Any:
    return message.get("reasoning_content") or message.get("reasoning")
