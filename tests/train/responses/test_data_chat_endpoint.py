"""Answers from servers that have only /v1/chat/completions: the rows are those that /v1/completions gives."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import EOS, TEMPLATE, make_target
from live_server import make_engine, serving
from programs import Program, altered, assistant, user, write
from response_servers import CHAT, FINE, GONE, TOOL, WITH_TOOLS, WORDS, backend, of_third, only_chat
from response_servers import ask_chat as ask
from response_servers import chat_reply as said
from response_servers import tokenizer_with as words
from servers import Fake
from tool_messages import CALL, RESULT

from dflash_toolkit import SamplingParams, UserError
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure.decoders import Chat

OPENAI = {"model", "messages", "tools", "max_tokens", "temperature", "seed", "stream", "top_p"}
THINKS = TEMPLATE.replace(
    "{{ m['content'] }}", "{% if m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content }}"
)


def test_the_rows_are_those_of_the_completions_api(fake: Fake, dflash_data: Program, tmp_path: Path) -> None:
    target = make_target(tied=False)
    with torch.no_grad():  # printable characters alone, which are tokenised as they were written
        head = target.model.lm_head.weight
        head[94:EOS], head[EOS + 1 :], head[EOS] = 0, 0, 3 * head[EOS]
    dflash_data.target = tmp_path / "target"
    target.model.save_pretrained(dflash_data.target)
    target.tokenizer.save_pretrained(dflash_data.target)
    talks = [{"messages": [user(f"ask {i}"), assistant(""), user("more")]} for i in range(4)]
    write(tmp_path / "p.jsonl", talks)
    fake.models = ["org/tiny"]
    with serving(make_engine(target, None)) as url:

        def after(body: dict[str, Any]) -> tuple[int, Any]:
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            found = reply.json()
            del found["choices"][0]["token_ids"], found["prompt_token_ids"]
            return reply.status_code, found

        fake.reply = only_chat(after)
        for more in ((), ("temperature=0.8", "samples=2", "top_k=9")):
            there, here = f"chat{len(more)}.jsonl", f"completions{len(more)}.jsonl"
            said = "\n".join(dflash_data("--endpoint", fake.url, "--batch-size", "3", *more, output=there))
            assert said.count(f"asking {fake.url}/v1/chat/completions, for {fake.url}/v1/completions: HTTP 404") == 1
            assert "unknown tokens" not in said
            assert dflash_data("--endpoint", url, *more, output=here).count(f"asking {url}/v1/completions") == 1
            through_chat, through_completions = (
                sorted(dflash_data.rows(output), key=lambda row: (row["index"], row["sample"], row["part"]))
                for output in (there, here)
            )
            assert through_chat == through_completions and len(through_chat) > 2 * (1 + bool(more))
            assert any(len(row["spans"]) == 2 for row in through_chat), "later turns are asked too"


# ---- which API -------------------------------------------------------------------------------------------------


REFUSALS = [
    GONE,
    (405, {"detail": "Method Not Allowed"}),
    (501, {"error": {"message": "not implemented"}}),
    (400, {"message": "The model does not support Completions API"}),
    (400, {"error": {"message": "cannot unmarshal array into field prompt of type string"}}),
    (422, {"error": "prompt: expected a string"}),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal[0]))
def test_refused_completions_switch_to_chat(refusal: tuple[int, Any], fake: Fake, command: Program) -> None:
    fake.reply = lambda body, number: (200, said("fine")) if "messages" in body else refusal
    command()
    tried = 4 if refusal[0] in (400, 422) else 1  # with less and less, too
    assert ["messages" in body for body in fake.asked] == [False] * tried + [True] * 9
    asked = [user("ask 8 of it")]
    assert command.answers()[8, 0] == encode_chat(WORDS, asked) + FINE
    assert fake.asked[-1] == {
        "model": "tiny", "messages": asked, "max_tokens": 12, "temperature": 0.0, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "seed": fake.asked[-1]["seed"], "stream": False,
        "return_token_ids": True,
    }  # fmt: skip


def test_configured_server_api_is_the_only_one_tried(fake: Fake, command: Program) -> None:
    fake.reply = only_chat(lambda body: (200, said("fine")))
    assert f"{fake.url}/v1/completions: HTTP 404" in command.refuses("server.api=completions")
    assert not any("asking" in line for line in command("server.api=chat"))
    assert ["messages" in body for body in fake.asked] == [False] + [True] * 9
    fake.reply = lambda body, number: GONE
    last = command.refuses(output="b.jsonl")
    assert f"{fake.url}/v1/completions: HTTP 404" in last and f"{fake.url}/v1/chat/completions: HTTP 404" in last


# ---- strict servers --------------------------------------------------------------------------------------------


def strict(known: set[str]) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        unknown = sorted(body.keys() - known)
        return (422, {"error": {"message": f"unknown field {unknown[0]}"}}) if unknown else (200, said("fine"))

    return reply


@pytest.mark.parametrize("length", ["max_tokens", "max_completion_tokens"])
def test_a_strict_server_gets_openai_fields_only(length: str, fake: Fake, command: Program) -> None:
    fake.reply = only_chat(strict(OPENAI - {"max_tokens"} | {length}))
    command()
    in_vain = 1 + (3 if length == "max_completion_tokens" else 2)  # the first finds no completions
    assert len(fake.asked) == in_vain + 9, "it refuses once"
    assert [length in body for body in fake.asked[in_vain:]] == [True] * 9 and fake.asked[-1][length] == 12


@pytest.mark.parametrize(
    ("option", "field", "wanted"),
    [
        ("thinking=false", "chat_template_kwargs", {"enable_thinking": False}),
        ("top_k=5", "top_k", 5),
        ("min_p=0.1", "min_p", 0.1),
    ],
)
def test_required_field_is_never_dropped(option: str, field: str, wanted: Any, fake: Fake, command: Program) -> None:
    fake.reply = only_chat(strict(OPENAI))
    needs = f"{field} ({option.split('=')[0]} needs it)"
    last = command.refuses(option, "temperature=1")
    assert last.endswith(f"HTTP 422: unknown field {field}; not tried without {needs}")
    fake.reply = only_chat(strict(OPENAI | {field}))  # it knows this one and no other
    command(option, "temperature=1")
    assert fake.asked[-1][field] == wanted and fake.asked[-1].keys() <= OPENAI | {field}


# ---- the target's own tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "text", "reason"),
    [
        (said("hi"), "hi<|end|>", "stop"),
        (said("hi", count=2), "hi<|end|>", "stop"),
        (said("hi", count=2, reason="length"), "hi", "length"),
        (said("hi", count=7), "", "stop"),  # other tokens than those of its text
        (said("\ufffd", count=4), "", "stop"),  # bytes that are no character may be any three
        (said(None), "<|end|>", "stop"),
        (said("hi", reasoning_content="so", count=12), "<t>so</t>hi<|end|>", "stop"),
        (said("hi", reasoning="so", count=11), "<t>so</t>hi<|end|>", "stop"),
        (said("hi", reasoning="so", count=3), "", "stop"),  # it thought without being counted
    ],
)
def test_a_message_is_rendered_by_the_targets_template(reply: Any, text: str, reason: str, fake: Fake) -> None:
    answer = ask(fake, reply, tokenizer=words(THINKS))
    assert (WORDS.decode(answer.tokens), answer.finish_reason) == (text, reason)


def test_token_ids_of_the_server_override_its_counts(fake: Fake) -> None:
    reply = said("hi", count=99)
    reply["choices"][0]["token_ids"] = [5, 6, EOS]
    assert ask(fake, reply).tokens == [5, 6, EOS]


def test_reasoning_under_another_prompt_is_rejected(fake: Fake) -> None:
    opens = words(THINKS.replace("prompt %}<|assistant|>", "prompt %}<|assistant|><o>"))
    assert ask(fake, said("hi", reasoning="so", count=12), tokenizer=opens).tokens == []
    assert WORDS.decode(ask(fake, said("so</o>hi"), tokenizer=opens).tokens) == "so</o>hi<|end|>"


def test_template_tokens_before_plain_text_count(fake: Fake) -> None:
    channel = "{% if m.role == 'assistant' %}<f>{% endif %}{{ m.content }}"
    channels = words(TEMPLATE.replace("{{ m['content'] }}", channel))
    assert WORDS.decode(ask(fake, said("hi", count=6), tokenizer=channels).tokens) == "<f>hi<|end|>"
    assert WORDS.decode(ask(fake, said("hi", count=3), tokenizer=channels).tokens) == "hi<|end|>", "it said no more"


def calling(arguments: str, count: int) -> dict[str, Any]:
    call = {"id": "x1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return said(None, tool_calls=[call], count=count, reason="tool_calls")


def test_a_tool_call_is_rendered_by_the_targets_template(fake: Fake) -> None:
    text = '<call>{"name": "f", "arguments": {"q": "b"}}'
    count, chat = len(text), Chat([user("ask")], (TOOL,))
    answer = ask(fake, calling('{"q":"b"}', count), chat=chat, tokenizer=words(WITH_TOOLS))
    assert (WORDS.decode(answer.tokens), answer.finish_reason) == (f"{text}<|end|>", "stop")
    assert ask(fake, calling('{"q":', count), chat=chat, tokenizer=words(WITH_TOOLS)).tokens == []
    callless = words("{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE)
    assert ask(fake, calling('{"q":"b"}', 1), chat=chat, tokenizer=callless).tokens == [], "a template without calls"


def test_tools_calls_and_results_are_sent_as_the_api_has_them(fake: Fake, command: Program, tmp_path: Path) -> None:
    text = '<call>{"name": "f", "arguments": {}}'
    fake.reply = only_chat(lambda body: (200, calling("{}", len(text)) if len(body["messages"]) == 1 else said("b")))
    write(tmp_path / "p.jsonl", [{"messages": [user("a"), CALL, RESULT], "tools": json.dumps([TOOL])}])
    command("--target", altered(command.target, tmp_path / "t", words(WITH_TOOLS)), "max_tokens=99")
    first, second = fake.asked[1:]
    assert first["tools"] == second["tools"] == [TOOL] and first["messages"] == [user("a")]
    function = CALL["tool_calls"][0]["function"]
    as_text = function | {"arguments": json.dumps(function["arguments"])}
    calls = [{"id": "call00000", "type": "function", "function": as_text}]
    assert second["messages"][1:] == [
        assistant(CALL["content"]) | {"tool_calls": calls},
        RESULT | {"tool_call_id": "call00000"},
    ]
    (row,) = command.rows()
    spoken = [WORDS.decode(row["tokens"][start:end]) for start, end in row["spans"]]
    assert spoken == [f"{text}<|end|>", "b<|end|>"], "the recorded call is the one that was made"


def test_answers_of_unknown_tokens_are_dropped_and_counted(fake: Fake, command: Program) -> None:
    fake.reply = of_third(said("fine", count=4), said("fine", count=9))
    assert "1 responses, 5 tokens; dropped 8 of unknown tokens" in command()[-1]
    assert command.answers().keys() == {(3, 0)}


def test_a_response_to_another_prompt_is_rejected(fake: Fake, command: Program) -> None:
    ours = len(encode_chat(WORDS, [user("ask 0 of it")]))
    fake.reply = only_chat(lambda body: (200, said("fine", prompt=ours + 4)))
    last = command.refuses()
    assert f"the prompt has {ours + 4} tokens there but {ours} with" in last
    assert "serve the target with its own template" in last and "thinking" in last
    fake.reply = of_third(said("fine", prompt=ours + 1), said("fine", prompt=ours))
    assert "dropped 1 to another prompt" in command()[-1]
    assert len(command.answers()) == 8


def test_a_reply_of_another_form_ends_the_run(fake: Fake, command: Program) -> None:
    fake.reply = only_chat(lambda body: (200, {"choices": []}))
    assert "not the reply of /v1/chat/completions (IndexError" in command.refuses()


@pytest.mark.parametrize(
    "error", [{"error": {"message": "overloaded", "code": 429}}, {"error": "overloaded"}, {"message": "overloaded"}]
)
def test_an_error_with_status_200_is_retried_and_shown(fake: Fake, error: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"no response after 3 attempts \(overloaded\)"):
        ask(fake, error, retries=2)
    replies = [error, said("ask")]
    fake.reply = only_chat(lambda body: (200, replies.pop(0)))
    with contextlib.closing(backend(fake)) as one:
        one.submit(1, encode_chat(WORDS, CHAT.messages), SamplingParams(max_tokens=99), CHAT)
        assert one.wait().tokens and not replies


def test_a_late_refusal_does_not_change_other_requests(fake: Fake) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"error": "too large"}) if body.get("max_tokens") == 77 else (200, said("ask"))

    fake.reply = only_chat(reply)
    with contextlib.closing(backend(fake)) as one:
        for number, most in enumerate((99, 77, 99)):
            one.submit(number, encode_chat(WORDS, CHAT.messages), SamplingParams(max_tokens=most), CHAT)
            with pytest.raises(UserError, match="too large") if most == 77 else contextlib.nullcontext():
                assert one.wait().tokens
    bodies = [body for body in fake.asked if "messages" in body]
    assert len(bodies) == 3 and all(body["repetition_penalty"] == 1.0 and "max_tokens" in body for body in bodies)
