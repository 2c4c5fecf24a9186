"""Answers from a server: dflash-serve itself, and one that fails in every way that servers do."""

import json
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, TEMPLATE
from damage import damage
from live_server import client_of, complete, make_engine, serving
from programs import Program, altered, assistant, user
from response_servers import FINE, WORDS
from response_servers import ask_completion as ask
from servers import Fake, whole

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.openai_http import base_url, find_models, seconds


def test_dflash_serve_and_the_engine_write_equal_responses(
    target: Target, drafter: Drafter, dflash_data: Program
) -> None:
    for more in ((), ("temperature=1.1", "samples=2", "top_k=40")):
        there, here = (f"{name}{len(more)}.jsonl" for name in ("there", "here"))
        with serving(make_engine(target, drafter)) as one, serving(make_engine(target, drafter)) as other:
            dflash_data("--endpoint", one, f"{other}/v1", "--batch-size", "3", *more, output=there)
        dflash_data(*more, output=here)
        assert dflash_data.answers(there) == dflash_data.answers(here) != {}


@pytest.mark.parametrize("stop", [[], ["X"]])
def test_dflash_serve_returns_token_ids_on_request(target: Target, drafter: Drafter, stop: list[str]) -> None:
    ids = target.tokenizer.encode("The sky")
    expected = generate(target, drafter, ids, SamplingParams(max_tokens=16)).tokens
    wanted = {"return_token_ids": True}
    with serving(make_engine(target, drafter)) as url:
        client = client_of(url)
        answer = complete(client, temperature=0, max_tokens=16, stop=stop, extra_body=wanted)
        choice = answer.choices[0].to_dict()
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"] == expected[: answer.usage.completion_tokens]
        assert "token_ids" not in complete(client).choices[0].to_dict()


# ---- a server that fails -------------------------------------------------------------------------------------


def test_requests_have_token_ids_and_all_sampling_fields(fake: Fake, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    ask(fake)
    (body,) = fake.asked
    assert body == {
        "model": "tiny", "prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0.0, "seed": 5, "stream": False,
        "return_token_ids": True, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert fake.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("reply", "tokens", "reason"),
    [
        (whole("x", ids=[5, 6, EOS]), [5, 6, EOS], "stop"),
        (whole("x", ids=[5, 6]), [5, 6, EOS], "stop"),  # some leave the stop token out
        (whole("x", ids=[5, 6], reason="length"), [5, 6], "length"),
        (whole("x", ids=[5, 6] * 5), [5, 6, 5, 6, 5, 6, 5, 6, 5], "length"),  # more than it was asked for
        (whole("nine of it"), WORDS("nine of i").input_ids, "length"),
        (whole("hi"), [*WORDS("hi").input_ids, EOS], "stop"),
        (whole("hi", count=2), [*WORDS("hi").input_ids, EOS], "stop"),
        (whole("hi", reason="length"), WORDS("hi").input_ids, "length"),
        (whole("hi", count=7), [], "stop"),  # other tokens than those of its text
    ],
)
def test_the_tokens_are_the_server_s_own_or_none(fake: Fake, reply: Any, tokens: list[int], reason: str) -> None:
    fake.reply = lambda body, number: (200, reply)
    answer = ask(fake)
    assert (answer.key, answer.tokens, answer.finish_reason) == (7, tokens, reason)


BUSY = {"error": {"message": "busy"}}
FAILURES = [(503, BUSY), (429, {}), (500, b"oops"), (524, b"of a proxy"), (0, None), (200, b"<html>")]
FAILURES += [(200, {"choices": None} | BUSY)]


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_that_may_pass_is_tried_again(fake: Fake, failure: tuple[int, Any]) -> None:
    fake.reply = lambda body, number: failure if number < 4 else (200, whole("fine"))
    assert ask(fake).tokens == FINE and len(fake.asked) == 4


def test_pauses_grow_and_at_last_it_gives_up_in_one_line(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: bool(pauses.append(timeout)))
    fake.reply = lambda body, number: (503, {"error": {"message": "busy\nstill"}})
    with pytest.raises(UserError, match=r"5 attempts \(HTTP 503: busy still\)") as caught:
        ask(fake, retries=4, pause_s=1.0)
    assert [p for p in pauses if p in (1.0, 2.0, 4.0, 8.0)] == [1.0, 2.0, 4.0, 8.0]
    assert "\n" not in str(caught.value) and len(fake.asked) == 5


def test_a_timeout_is_retried(fake: Fake) -> None:
    late = threading.Event()

    def slow(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if number == 1:
            late.wait(60)
        return 200, whole("fine")

    fake.reply = slow
    assert ask(fake, timeout_s=0.5, retries=50).finish_reason == "stop"
    late.set()
    assert len(fake.asked) >= 2


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ((400, {"error": {"message": "too many tokens"}}), "HTTP 400: too many tokens"),
        ((404, {"message": "no model"}), "HTTP 404: no model"),
        ((200, {"choices": []}), "not the reply of /v1/completions"),
        ((200, [1]), "JSON object"),
    ],
)
def test_an_error_that_stays_ends_the_run_at_once(fake: Fake, reply: tuple[int, Any], named: str) -> None:
    fake.reply = lambda body, number: reply
    with pytest.raises(UserError, match=named):
        ask(fake)
    assert len(fake.asked) == (4 if reply[0] == 400 else 1), "with less and less, if it is the request"


def test_a_server_of_several_models_wants_a_name(fake: Fake) -> None:
    fake.models = ["a", "b"]
    with pytest.raises(UserError, match=r"has a, b; name one as server\.model=NAME"):
        ask(fake)
    ask(fake, model="b")
    assert fake.asked[0]["model"] == "b"


def test_an_address_may_be_given_with_or_without_v1() -> None:
    for url in ("http://h:8000", "http://h:8000/v1/", "h:8000"):
        assert base_url(url) == "http://h:8000/v1"
    assert base_url("https://h/api") == "https://h/api/v1"


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_earlier_responses_survive_a_server_failure(api: str, fake: Fake, command: Program) -> None:
    def fine(body: dict[str, Any], number: int) -> tuple[int, Any]:
        reply = whole("fine")
        reply["choices"][0]["message"] = assistant("fine")
        return (200, reply) if ("messages" in body) == (api == "chat") else (404, {"detail": "Not Found"})

    first = 6 if api == "chat" else 5  # the first finds no completions
    fake.reply = lambda body, number: fine(body, number) if number <= first else (400, {"error": {"message": "bad"}})
    path = "chat/completions" if api == "chat" else "completions"
    assert f"{fake.url}/v1/{path}: HTTP 400: bad" in command.refuses()
    assert len(command.answers()) == 5
    fake.reply = fine
    fake.asked.clear()
    command()
    assert sum(("messages" in body) == (api == "chat") for body in fake.asked) == 4
    assert command.answers()[8, 0] == encode_chat(WORDS, [user("ask 8 of it")]) + FINE and len(command.answers()) == 9


def test_stop_ids_that_cannot_be_read_do_not_vanish(fake: Fake, command: Program, tmp_path: Path) -> None:
    broken = altered(command.target, tmp_path / "broken", generation_config="{ half")
    assert "generation_config.json" in command.refuses("--target", broken)
    assert fake.asked == []


def test_requests_ban_the_tokens_that_the_target_suppresses(fake: Fake, command: Program, tmp_path: Path) -> None:
    mine = altered(command.target, tmp_path / "mine", generation_config={"suppress_tokens": [65]})
    command("--target", mine)
    assert {tuple(body["logit_bias"].items()) for body in fake.asked} == {(("65", -100.0),)}
    first = altered(command.target, tmp_path / "first", generation_config={"begin_suppress_tokens": [65]})
    assert "begin_suppress_tokens" in command.refuses("--target", first, output="first.jsonl")
    assert not (tmp_path / "first.prompts.jsonl").exists()


def test_a_key_that_cannot_be_sent_is_not_shown(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sec\nret")
    with pytest.raises(UserError, match="OPENAI_API_KEY") as caught:
        ask(fake)
    assert "sk-sec" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")  # as a file holds it
    ask(fake)


def test_an_address_that_cannot_be_read_is_named() -> None:
    with pytest.raises(UserError, match=r"endpoint 'http://\[::1:80' is not an address"):
        base_url("http://[::1:80")
    with pytest.raises(UserError, match=r"endpoint 'http://a..b:8000/v1/models' is not an address"):
        find_models(["http://a..b:8000"], None, 1.0)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_broken_off_response_is_retried(fake: Fake, reason: str | None) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        broken = whole("half an")
        broken["choices"][0]["finish_reason"] = reason
        return (200, whole("a whole") if number > 2 else broken)

    fake.reply = reply
    assert ask(fake, retries=3).tokens[:-1] == list(WORDS("a whole").input_ids) and len(fake.asked) == 3
    fake.reply = lambda body, number: reply(body, 1)
    with pytest.raises(UserError, match="broke off"):
        ask(fake, retries=1)


def test_run_does_not_resume_with_another_model_or_runtime(
    fake: Fake, command: Program, dflash_data: Program, tmp_path: Path
) -> None:
    fake.reply = lambda body, number: (200, whole("fine")) if number <= 5 else (400, {})
    command.refuses()
    record = tmp_path / "a.run.json"
    written = json.loads(record.read_text())
    assert (written["runtime"], written["model"]) == ("endpoint", "tiny")
    fake.models, fake.reply = ["other"], lambda body, number: (200, whole("fine"))
    assert "holds responses of another run (model: 'tiny', now 'other')" in command.refuses()
    assert "holds responses of another run (runtime: 'endpoint', now 'engine')" in dflash_data.refuses()
    assert len(command.answers()) == 5 and json.loads(record.read_text()) == written
    damage(record, {"runtime": None, "model": None})  # a record of before either was written down
    command()
    written = json.loads(record.read_text())
    assert len(command.answers()) == 9 and written["model"] == "other" and "9 responses" in written["finished"]
    dflash_data()  # nothing is left to answer


def test_retry_after_is_seconds_or_a_date() -> None:
    asked = (None, "", "7", "-3", "0.5", "soon", "Wed, 99 Foo 2020 00:00:00 GMT", formatdate(0, usegmt=True))
    assert [seconds(header) for header in asked] == [0, 0, 7, 0, 0.5, 0, 0, 0]
    assert 3000 < seconds(formatdate(time.time() + 3600, usegmt=True)) <= 3600


def answered_together(fake: Fake, at_a_time: int) -> list[int]:
    """Lets the server wait for `at_a_time` requests; returns the number of open requests at each arrival."""
    gate, lock = threading.Barrier(at_a_time), threading.Lock()
    there, seen = 0, list[int]()

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        nonlocal there
        with lock:
            there += 1
            seen.append(there)
        time.sleep(0.02)  # for one too many to show
        try:
            gate.wait(60)
        except threading.BrokenBarrierError:
            return 400, {"error": {"message": f"fewer than {at_a_time} at a time"}}
        finally:
            with lock:
                there -= 1
        return 200, whole("fine")

    fake.reply = reply
    return seen


def test_at_most_batch_size_requests_run_at_once(fake: Fake, command: Program) -> None:
    seen = answered_together(fake, 3)
    command("--batch-size", 3)
    assert len(seen) == len(command.rows()) == 9 and max(seen) == 3


def test_several_servers_share_the_questions(fake: Fake, command: Program) -> None:
    seen = answered_together(fake, 2)
    urls = fake.url, fake.url.replace("127.0.0.1", "localhost")
    command("--endpoint", *urls, "--batch-size", 2, "prompts.max_prompts=8")
    hosts = [headers["Host"].partition(":")[0] for headers in fake.headers]
    assert sorted(hosts) == ["127.0.0.1"] * 4 + ["localhost"] * 4, "each thread has a server of its own"
    assert len({tuple(body["prompt"]) for body in fake.asked}) == 8 and max(seen) == 2


@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [
        (429, "30", [30.0, 30.0, 30.0]),
        (503, "2.5", [2.5, 2.5, 4.0]),
        (429, "0", [1.0, 2.0, 4.0]),
        (503, "86400", [60.0, 60.0, 60.0]),
    ],
)
def test_retry_after_sets_the_pause(
    status: int, header: str, expected: list[float], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []
    wait = threading.Event.wait

    def pause(event: threading.Event, timeout: float | None = None) -> bool:
        if not threading.current_thread().name.startswith("ask-"):
            return wait(event, timeout)
        pauses.append(timeout)
        return False

    monkeypatch.setattr(threading.Event, "wait", pause)
    fake.sends = {"Retry-After": header}
    fake.reply = lambda body, number: (status, {}) if number < 4 else (200, whole("fine"))
    assert ask(fake, retries=3, pause_s=1.0).tokens == FINE
    assert pauses == expected
    fake.reply = lambda body, number: (status, {})
    with pytest.raises(UserError, match="no response after 1 attempts"):
        ask(fake, retries=0)
    assert pauses == expected, "no pause before giving up"


@pytest.mark.parametrize(("option", "opened"), [([], ""), (["thinking=true"], "T"), (["thinking=false"], "F")])
def test_thinking_reaches_the_prompt_that_is_answered(
    option: list[str], opened: str, fake: Fake, command: Program, tmp_path: Path
) -> None:
    mode = (
        "{% if add_generation_prompt and enable_thinking is defined %}{{ 'T' if enable_thinking else 'F' }}{% endif %}"
    )
    thinks = altered(command.target, tmp_path / "thinks")
    (thinks / "chat_template.jinja").write_text(TEMPLATE + mode)
    command("--target", thinks, *option)
    expected = {WORDS.decode(WORDS(f"<|user|>ask {i} of it<|end|><|assistant|>{opened}").input_ids) for i in range(9)}
    assert {WORDS.decode(body["prompt"]) for body in fake.asked} == expected
    assert {WORDS.decode(row["tokens"][: row["prompt_tokens"]]) for row in command.rows()} == expected
