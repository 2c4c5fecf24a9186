"""Servers that refuse a field, list no models, say too little or render another prompt; calls and ends in a chat."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, TEMPLATE
from programs import Program, altered, assistant, user, write
from response_servers import CHAT, FINE, WORDS, backend, of_third, only_chat
from response_servers import ask_chat as ask
from response_servers import ask_completion as complete
from response_servers import chat_reply as said
from response_servers import tokenizer_with as words
from response_servers import tool_call as call
from servers import Fake, whole

from dflash_toolkit import SamplingParams, UserError
from dflash_toolkit.data.conversations import with_call_ids
from dflash_toolkit.data.prompts import encode_chat, read_chat
from dflash_toolkit.evaluation.measure.decoders import Chat
from dflash_toolkit.train.responses.chat_endpoint import chat_fields
from dflash_toolkit.train.responses.conversation import recorded_rows

EXTRAS = {"top_k", "min_p", "repetition_penalty", "return_token_ids"}


# ---- fields that are refused -----------------------------------------------------------------------------------


def refusing(*fields: str, values: dict[str, Any] | None = None) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """A server that does not know some fields, or not with these values."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        wrong = [name for name in fields if name in body]
        wrong += [name for name, value in (values or {}).items() if body.get(name) == value]
        if wrong:
            return 422, {"error": f"invalid {wrong[0]}"}
        return 200, said("fine") if "messages" in body else whole("fine")

    return reply


@pytest.mark.parametrize(
    ("server", "left_out"),
    [
        (refusing("return_token_ids"), {"return_token_ids"}),
        (refusing("min_p"), EXTRAS),
        (refusing(values={"top_p": 1.0}), EXTRAS | {"top_p", "seed"}),
        (refusing("seed"), EXTRAS | {"top_p", "seed"}),
    ],
    ids=["token ids", "min_p", "top_p of 1", "seed"],
)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_refused_fields_are_dropped_with_a_notice(
    api: str, server: Any, left_out: set[str], fake: Fake, command: Program
) -> None:
    fake.reply = server
    (line,) = [line for line in command(f"server.api={api}", "--batch-size", 3) if line.startswith("asking")]
    assert command.answers()[8, 0] == encode_chat(WORDS, [user("ask 8 of it")]) + FINE
    missing = [(EXTRAS | {"top_p", "seed", "max_tokens"}) - body.keys() for body in fake.asked]
    # concurrent requests may be refused as well, before or after the others
    assert missing.count(left_out) == 9 and sum(left_out > each for each in missing) <= 3 * len(left_out)
    path = "chat/completions" if api == "chat" else "completions"
    assert line.startswith(f"asking {fake.url}/v1/{path} without ") and ", for " in line and "HTTP 422: invalid" in line
    assert set(line.split(" without ")[1].split(", for ")[0].split(", ")) == left_out


def test_required_top_p_is_never_dropped(fake: Fake) -> None:
    fake.reply = refusing("top_p")
    with closing(backend(fake)) as one:
        one.submit(1, [1, 2], SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9))
        with pytest.raises(UserError, match=r"invalid top_p; not tried without top_p \(top_p needs it\)"):
            one.wait()


@pytest.mark.parametrize("failure", [(500, {"error": "no such thing"}), (200, {"error": "no such thing"})])
def test_a_server_that_keeps_failing_at_completions_may_have_chats(
    failure: tuple[int, Any], fake: Fake, command: Program
) -> None:
    fake.reply = lambda body, number: (200, said("fine")) if "messages" in body else failure
    *said_so, last = command("server.retries=0", code=2)
    assert last.endswith("to resume, with server.api=chat if it only has that API") and "no such thing" in last
    assert not any("asking" in line for line in [*said_so, last]), "not known to have completions"
    command("server.retries=0", "server.api=chat")
    assert len(command.answers()) == 9


@pytest.mark.parametrize(("listing", "models"), [(404, []), (405, []), (200, ["org/*"]), (200, ["*"])])
def test_a_model_name_is_trusted_without_a_list_of_models(listing: int, models: list[str], fake: Fake) -> None:
    fake.listing, fake.models = listing, models
    assert complete(fake, model="tiny").tokens == FINE and fake.asked[0]["model"] == "tiny"
    with pytest.raises(UserError, match=r"server\.model=NAME"):
        complete(fake)
    fake.listing = 401
    with pytest.raises(UserError, match="HTTP 401"):
        complete(fake, model="tiny")


# ---- replies that say too little -------------------------------------------------------------------------------


def heard_by_one(fake: Fake, count: int) -> list[list[int]]:
    """Returns the tokens of several answers, one after the other."""
    heard = []
    with closing(backend(fake)) as one:
        for key in range(count):
            one.submit(key, [1, 2], SamplingParams(max_tokens=9))
            heard.append(one.wait().tokens)
    return heard


def test_a_server_that_counts_nothing_ends_the_run_in_one_line(fake: Fake) -> None:
    silent = whole("fine") | {"usage": None}
    fake.reply = lambda body, number: (200, silent)
    with pytest.raises(UserError, match=r"token_ids nor usage.completion_tokens"):
        complete(fake)
    replies = [whole("fine"), silent, whole("fine")]
    fake.reply = lambda body, number: (200, replies[number - 1])
    fake.asked.clear()
    assert heard_by_one(fake, 3) == [FINE, [], FINE], "one that does now and then loses an answer"


def test_an_unusual_token_count_rejects_the_text(fake: Fake) -> None:
    n = len(FINE)
    for counts, kept in (((n, n, n - 1, n), (1, 1, 0, 1)), ((n - 1, n, n, n - 1), (1, 1, 1, 1)),
                         ((n - 1, n - 1, n), (1, 1, 0)), ((n - 2, n + 1), (0, 0))):  # fmt: skip
        fake.asked.clear()
        fake.reply = lambda body, number, counts=counts: (200, whole("fine", count=counts[number - 1]))
        assert heard_by_one(fake, len(counts)) == [FINE if expected else [] for expected in kept], counts


def test_filtered_responses_are_dropped_without_retry(fake: Fake, command: Program) -> None:
    fake.reply = of_third(said("fi", reason="content_filter"), said("fi"))
    assert "dropped 1 stopped by a content filter" in command("server.api=chat", "--batch-size", 3)[-1]
    assert len(fake.asked) == 9


# ---- the prompt that a server made of a chat -------------------------------------------------------------------


@pytest.mark.parametrize("place", [lambda reply: reply["choices"][0], lambda reply: reply], ids=["choice", "beside"])
def test_returned_prompt_tokens_are_compared(place: Any, fake: Fake) -> None:
    ours = encode_chat(WORDS, CHAT.messages)
    reply = said("fine", prompt=len(ours))
    place(reply)["prompt_token_ids"] = ours
    assert ask(fake, reply).tokens == FINE
    place(reply)["prompt_token_ids"] = [*ours[:-1], 7]
    with pytest.raises(UserError, match=f"{len(ours)} other tokens"):
        ask(fake, reply)


def test_response_without_prompt_token_count_is_accepted(fake: Fake) -> None:
    assert ask(fake, said("fine", prompt=0)).tokens == FINE


def test_dropped_reasoning_rejects_the_response(fake: Fake) -> None:
    assert ask(fake, said("hi", reasoning="so", count=3)).tokens == []
    assert WORDS.decode(ask(fake, said("hi", reasoning=" \n", count=3)).tokens) == "hi<|end|>", "it did not reason"


# ---- what is sent, and ends ------------------------------------------------------------------------------------


def result(text: str, **more: str) -> dict[str, Any]:
    return {"role": "tool", "content": text} | more


def calls(*tool_calls: dict[str, Any]) -> dict[str, Any]:
    return assistant("") | {"tool_calls": [*tool_calls]}


def test_every_call_has_an_id_of_its_own_and_each_result_its_call_s() -> None:
    b, a, c = call("b", q="é"), call("a", q="é") | {"id": "call00000"}, call("c", q="é")
    results = [result("1"), result("2"), result("of none")]
    messages = [user("x"), calls(b, a), *results, calls(c), result("3", tool_call_id="its own")]
    named = with_call_ids(messages)
    sent = chat_fields(Chat(named), None)["messages"]
    made = [one for message in sent for one in message.get("tool_calls", ())]
    ids = [one["id"] for one in made]
    assert ids[1:] == ["call00000", "its own"] and len(set(ids)) == 3
    results = [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert results[:2] == ids[:2] and results[2] not in ids and results[3] == "its own"
    made_up = (ids[0], results[2])
    assert all(len(name) == 9 and name.isalnum() for name in made_up), "as the templates of Mistral want them"
    assert {one["function"]["arguments"] for one in made} == {'{"q": "é"}'}, "as it was written, not escaped"
    assert "id" not in messages[1]["tool_calls"][0], "what was given stays as it is"
    assert with_call_ids(named) == named


def test_results_that_come_in_another_order_keep_their_calls() -> None:
    made = calls(call("a") | {"id": "A"}, call("b") | {"id": "B"}, call("c"))
    results = [result("b", tool_call_id="B"), result("a"), result("c", tool_call_id="C")]
    _, caller, *found = with_call_ids([user("x"), made, *results])
    assert [one["id"] for one in caller["tool_calls"]] == ["A", "B", "C"]
    assert [(one["content"], one["tool_call_id"]) for one in found] == [("b", "B"), ("a", "A"), ("c", "C")]


def test_a_template_that_prints_ids_prints_those_that_are_sent(fake: Fake, command: Program, tmp_path: Path) -> None:
    shown = "{% for c in m.tool_calls %}{{ c.id }}{{ c.function | tojson }}{% endfor %}{{ m.tool_call_id }}<|end|>"
    tokenizer = words(TEMPLATE.replace("<|end|>", shown))

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        theirs = encode_chat(tokenizer, read_chat({"messages": body["messages"]})[0])
        return 200, said("fine", count=5, prompt=len(theirs))

    fake.reply = only_chat(reply)
    talk = [user("a"), calls(call("b", q="é")), result("1")]
    write(tmp_path / "p.jsonl", [{"messages": talk}])
    command("--target", altered(command.target, tmp_path / "t", tokenizer))
    rows = command.rows()
    spoken = [WORDS.decode(row["tokens"][start:end]) for row in rows for start, end in row["spans"]]
    assert spoken == ["fine<|end|>"] * 2
    assert "call00000" in WORDS.decode(rows[1]["tokens"])
    ours, _ = recorded_rows(tokenizer, [*talk, assistant("fine")], (), {EOS})
    assert ours[-1].tokens == rows[1]["tokens"], "recorded responses have the same prompt"
