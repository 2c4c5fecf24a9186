"""Servers and chats for tests of responses: requests, replies and tokenizers."""

import contextlib
from collections.abc import Callable
from typing import Any

from conftest import EOS, TEMPLATE, VOCAB, make_tokenizer
from programs import user
from servers import Fake

from dflash_toolkit import SamplingParams
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure.decoders import Chat, Response
from dflash_toolkit.generation import Generation
from dflash_toolkit.train.responses.conversation import LiveConversation
from dflash_toolkit.train.responses.endpoint import EndpointBackend

WORDS = make_tokenizer()
FINE = [*WORDS("fine").input_ids, EOS]
CHAT = Chat([user("ask")])
GONE = 404, {"detail": "Not Found"}
TOOL = {"type": "function", "function": {"name": "f"}}
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE.replace(
    "<|end|>", "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}<|end|>"
)
PARAMS = SamplingParams(max_tokens=30)


def backend(fake: Fake, **options: Any) -> EndpointBackend:
    given = {"vocab_size": VOCAB, "concurrency": 1, "pause_s": 0.01} | options
    return EndpointBackend([fake.url], WORDS, (EOS,), **given)


def ask_completion(fake: Fake, **options: Any) -> Any:
    with contextlib.closing(backend(fake, **options)) as one:
        one.submit(7, [1, 2, 3], SamplingParams(max_tokens=9, seed=5))
        return one.wait()


def chat_reply(
    content: str | None, *, count: int | None = None, prompt: int | None = None, reason: str = "stop", **more: Any
) -> dict[str, Any]:
    """A reply; `more` is the rest of its message."""
    written = len(WORDS(content or "").input_ids) + 1 if count is None else count
    usage = {"completion_tokens": written} | ({} if prompt is None else {"prompt_tokens": prompt})
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage}


def only_chat(reply: Callable[[dict[str, Any]], tuple[int, Any]]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """A server without /v1/completions."""
    return lambda body, number: reply(body) if "messages" in body else GONE


def ask_chat(fake: Fake, reply: dict[str, Any], *, chat: Chat = CHAT, tokenizer: Any = WORDS, **more: Any) -> Response:
    """Returns the answer to a chat when the server sends `reply`."""
    fake.reply = only_chat(lambda body: (200, reply))
    with contextlib.closing(backend(fake, **more)) as one:
        one._tokenizer = tokenizer
        prompt = encode_chat(tokenizer, chat.messages, more.get("thinking"), chat.tools)
        one.submit(7, prompt, SamplingParams(max_tokens=99, seed=5), chat)
        return one.wait()


def of_third(with_3: dict[str, Any], without: dict[str, Any]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """Makes the server answer one of the nine prompts differently."""
    return only_chat(lambda body: (200, with_3 if "3" in body["messages"][0]["content"] else without))


def tokenizer_with(template: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def response_tokens(text: str) -> list[int]:
    return [*WORDS(text).input_ids, EOS]


def respond(talk: LiveConversation, tokens: list[int], reason: str = "stop") -> None:
    assert talk.request is not None
    talk.on_response(Response(0, Generation(tokens, finish_reason=reason)))
