"""Answers from a server: dflash-serve itself, and one that fails in every way that servers do."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, VOCAB, make_tokenizer
from openai import APIStatusError
from test_data_cli import argv, lines, user, write
from test_serve_api import client_of, complete, serving
from test_serve_engine import make_engine

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, generate
from dflash_toolkit.data.prompts import encode_chat
from train.data_cli import main
from train.responses.endpoint import EndpointBackend
from train.responses.openai_http import base_url, find_models, seconds

WORDS = make_tokenizer()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "p.jsonl", [{"prompt": f"ask {i} of it"} for i in range(9)])


def answers(path: Path) -> dict[tuple[int, int], list[int]]:
    return {(row["index"], row["sample"]): row["tokens"] for row in lines(path)}


class Command:
    """`dflash-data` that asks the fake server, about nine prompts; each output is a run of its own."""

    def __init__(self, fake: "Fake", target: Path, prompts: Path, folder: Path, capsys: Any) -> None:
        self._asked, self._folder, self._capsys = (fake, target, prompts), folder, capsys

    def __call__(self, *more: str, code: int = 0, output: str = "a.jsonl", batch: int = 1) -> list[str]:
        """The lines that it writes to stderr; `code` is how it has to end."""
        fake, target, prompts = self._asked
        words = argv(target, prompts, self._folder / output, "--endpoint", fake.url, "--batch-size", str(batch))
        self._capsys.readouterr()
        assert main([*words, *more]) == code
        return self._capsys.readouterr().err.splitlines()

    def answers(self, output: str = "a.jsonl") -> dict[tuple[int, int], list[int]]:
        return answers(self._folder / output)


@pytest.fixture
def command(fake: "Fake", target_dir: Path, prompts: Path, tmp_path: Path, capsys: Any) -> Command:
    return Command(fake, target_dir, prompts, tmp_path, capsys)


def test_dflash_serve_writes_what_the_engine_writes(
    target: Target, drafter: Drafter, target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    for i, more in enumerate(((), ("temperature=1.1", "samples=2", "top_k=40"))):
        with serving(make_engine(target, drafter)) as one, serving(make_engine(target, drafter)) as other:
            there = argv(target_dir, prompts, tmp_path / f"there{i}.jsonl", "--endpoint", one, f"{other}/v1", *more)
            assert main([*there, "--batch-size", "3"]) == 0
        assert main(argv(target_dir, prompts, tmp_path / f"here{i}.jsonl", *more)) == 0
        assert answers(tmp_path / f"there{i}.jsonl") == answers(tmp_path / f"here{i}.jsonl") != {}


@pytest.mark.parametrize("stop", [[], ["X"]])
def test_dflash_serve_returns_token_ids_if_asked_for(target: Target, drafter: Drafter, stop: list[str]) -> None:
    ids = target.tokenizer.encode("The sky")
    expected = generate(target, drafter, ids, SamplingParams(max_new_tokens=16)).tokens
    wanted = {"return_token_ids": True}
    with serving(make_engine(target, drafter)) as url:
        client = client_of(url)
        answer = complete(client, temperature=0, max_tokens=16, stop=stop, extra_body=wanted)
        choice = answer.choices[0].to_dict()
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"] == expected[: answer.usage.completion_tokens]
        assert "token_ids" not in complete(client).choices[0].to_dict()
        with pytest.raises(APIStatusError, match="not supported for streamed answers"):
            complete(client, stream=True, extra_body=wanted)


# ---- a server that fails -------------------------------------------------------------------------------------


class Fake:
    """What a server is to do: `reply` makes the status and body of a completion from the request and its number."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any], int], tuple[int, Any]] = lambda body, number: (200, whole("fine"))
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = ["tiny"]
        self.listing = 200  # the status of the list of models
        self.url = ""


def whole(text: str, *, ids: list[int] | None = None, reason: str = "stop", count: int | None = None) -> dict[str, Any]:
    written = len(WORDS(text).input_ids) + (reason == "stop")
    choice = {"index": 0, "text": text, "finish_reason": reason} | ({} if ids is None else {"token_ids": ids})
    return {"choices": [choice], "usage": {"completion_tokens": written if count is None else count}}


@pytest.fixture
def fake() -> Iterator[Fake]:
    state = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(state.listing, {"data": [{"id": name} for name in state.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(body)
            state.headers.append(dict(self.headers))
            status, reply = state.reply(body, len(state.asked))
            if status == 0:
                self.connection.close()  # in the middle of everything
            else:
                self.send(status, reply)

        def send(self, status: int, reply: Any) -> None:
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


def backend(fake: Fake, **options: Any) -> EndpointBackend:
    return EndpointBackend(
        [fake.url], WORDS, (EOS,), **{"vocab_size": VOCAB, "concurrency": 1, "pause_s": 0.01, **options}
    )


def ask(fake: Fake, **options: Any) -> Any:
    one = backend(fake, **options)
    try:
        one.submit(7, [1, 2, 3], SamplingParams(max_new_tokens=9, seed=5))
        return one.wait()
    finally:
        one.close()


def test_the_prompt_goes_as_token_ids_and_every_sampler_setting_is_said(fake: Fake, monkeypatch: Any) -> None:
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


FAILURES = [(503, {"error": {"message": "busy"}}), (429, {}), (500, b"oops"), (524, b"of a proxy"), (0, None)]
FAILURES += [(200, {"choices": None, "error": {"message": "busy"}}), (200, b"<html>")]


@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_that_may_pass_is_tried_again(fake: Fake, failure: tuple[int, Any]) -> None:
    fake.reply = lambda body, number: failure if number < 4 else (200, whole("fine"))
    assert ask(fake).tokens == [*WORDS("fine").input_ids, EOS]
    assert len(fake.asked) == 4


def test_pauses_grow_and_at_last_it_gives_up_in_one_line(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: bool(pauses.append(timeout)))
    fake.reply = lambda body, number: (503, {"error": {"message": "busy\nstill"}})
    with pytest.raises(UserError, match=r"no answer after 5 attempts \(HTTP 503: busy still\)") as caught:
        ask(fake, retries=4, pause_s=1.0)
    assert [p for p in pauses if p in (1.0, 2.0, 4.0, 8.0)] == [1.0, 2.0, 4.0, 8.0]
    assert "\n" not in str(caught.value) and len(fake.asked) == 5


def test_a_server_that_takes_too_long_is_asked_again(fake: Fake) -> None:
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
        ((200, [1]), "no JSON object"),
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
def test_answers_written_before_the_server_failed_are_kept_and_not_asked_for_again(
    api: str, fake: Fake, command: Command
) -> None:
    def fine(body: dict[str, Any], number: int) -> tuple[int, Any]:
        reply = whole("fine")
        reply["choices"][0]["message"] = {"role": "assistant", "content": "fine"}
        return (200, reply) if ("messages" in body) == (api == "chat") else (404, {"detail": "Not Found"})

    first = 6 if api == "chat" else 5  # the first finds no completions
    fake.reply = lambda body, number: fine(body, number) if number <= first else (400, {"error": {"message": "bad"}})
    path = "chat/completions" if api == "chat" else "completions"
    assert f"{fake.url}/v1/{path}: HTTP 400: bad" in command(code=2)[-1]
    assert len(command.answers()) == 5
    fake.reply = fine
    fake.asked.clear()
    command()
    assert sum(("messages" in body) == (api == "chat") for body in fake.asked) == 4
    prompt = encode_chat(WORDS, [user("ask 8 of it")])
    assert command.answers()[8, 0] == [*prompt, *WORDS("fine").input_ids, EOS] and len(command.answers()) == 9


def test_stop_ids_that_cannot_be_read_do_not_vanish(fake: Fake, target_dir: Path, command: Command) -> None:
    broken = Path(shutil.copytree(target_dir, target_dir.parent / "broken", dirs_exist_ok=True))
    (broken / "generation_config.json").write_text("{ half")
    assert "generation_config.json" in command("--target", str(broken), code=2)[-1]
    assert fake.asked == []


def test_a_key_that_cannot_be_sent_is_not_shown(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sec\nret")
    with pytest.raises(UserError, match="OPENAI_API_KEY cannot be sent") as caught:
        ask(fake)
    assert "sk-sec" not in str(caught.value)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")  # as a file holds it
    ask(fake)


def test_an_address_that_cannot_be_read_is_named() -> None:
    with pytest.raises(UserError, match=r"endpoint 'http://\[::1:80' is no address"):
        base_url("http://[::1:80")
    with pytest.raises(UserError, match=r"endpoint 'http://a..b:8000/v1/models' is no address"):
        find_models(["http://a..b:8000"], None, 1.0)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_was_broken_off_is_asked_for_again(fake: Fake, reason: str | None) -> None:
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        broken = whole("half an")
        broken["choices"][0]["finish_reason"] = reason
        return (200, whole("a whole") if number > 2 else broken)

    fake.reply = reply
    assert ask(fake, retries=3).tokens[:-1] == list(WORDS("a whole").input_ids) and len(fake.asked) == 3
    fake.reply = lambda body, number: reply(body, 1)
    with pytest.raises(UserError, match="broken off"):
        ask(fake, retries=1)


def test_a_run_is_not_gone_on_with_by_another_model_or_runtime(
    fake: Fake, command: Command, target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.reply = lambda body, number: (200, whole("fine")) if number <= 5 else (400, {})
    record, local = tmp_path / "a.run.json", argv(target_dir, prompts, tmp_path / "a.jsonl")
    command(code=2)
    written = json.loads(record.read_text())
    assert (written["runtime"], written["model"]) == ("endpoint", "tiny")
    fake.models, fake.reply = ["other"], lambda body, number: (200, whole("fine"))
    assert "holds answers of another run (model: 'tiny', now 'other')" in command(code=2)[-1]
    assert main(local) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "holds answers of another run (runtime: 'endpoint', now 'engine')" in said
    assert len(command.answers()) == 5 and json.loads(record.read_text()) == written
    # a record of before either was written down
    record.write_text(json.dumps({k: v for k, v in written.items() if k not in ("runtime", "model")}))
    command()
    written = json.loads(record.read_text())
    assert len(command.answers()) == 9 and written["model"] == "other" and "9 answers" in written["finished"]
    assert main(local) == 0, "nothing is left to answer"


def test_a_pause_is_asked_for_in_seconds_or_by_a_date() -> None:
    asked = (None, "", "7", "-3", "0.5", "soon", "Wed, 99 Foo 2020 00:00:00 GMT", formatdate(0, usegmt=True))
    assert [seconds(header) for header in asked] == [0, 0, 7, 0, 0.5, 0, 0, 0]
    assert 3000 < seconds(formatdate(time.time() + 3600, usegmt=True)) <= 3600
