"""The endpoint over a real socket with the real OpenAI client."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest
import uvicorn
from conftest import make_drafter, make_target

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.prompts import encode_chat
from serve.app import BODY_LIMIT, create_app
from serve.cli import bind, main
from serve.engine import Engine

MESSAGES = [{"role": "user", "content": "hello"}]
KEY = "secret"


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    target = make_target(limit=256)
    drafter = make_drafter(target)
    listener = bind("127.0.0.1", 0)
    app = create_app(Engine(target, drafter), "tiny", KEY)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield SimpleNamespace(url=url, target=target, drafter=drafter)
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture
def client(served: SimpleNamespace) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)


def expected(target: Target, drafter: Drafter, ids: list[int], **params: object) -> tuple[str, object]:
    result = generate(target, drafter, ids, SamplingParams(**params))  # type: ignore[arg-type]
    return target.tokenizer.decode(result.tokens, skip_special_tokens=True), result


def test_a_greedy_chat_answer_is_the_library_s_own(served: SimpleNamespace, client: openai.OpenAI) -> None:
    ids = encode_chat(served.target.tokenizer, MESSAGES)
    text, result = expected(served.target, served.drafter, ids, max_new_tokens=40)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == result.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(result.tokens))
    dflash = answer.usage.model_dump()["dflash"]
    assert dflash["verify_steps"] == len(result.steps)
    assert dflash["drafted"] == sum(s.drafted for s in result.steps)
    assert dflash["acceptance_length"] == pytest.approx(result.acceptance_length, abs=1e-4)


def test_a_streamed_answer_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "temperature": 0.9, "seed": 5, "max_completion_tokens": 50}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_a_seed_reproduces_and_no_seed_varies(client: openai.OpenAI) -> None:
    def ask(**extra: int) -> str:
        answer = client.completions.create(model="tiny", prompt="abc", temperature=1.5, max_tokens=24, **extra)
        return answer.choices[0].text

    assert ask(seed=3) == ask(seed=3)
    assert len({ask() for _ in range(4)}) > 1


def test_completions_take_text_a_list_and_token_ids(served: SimpleNamespace, client: openai.OpenAI) -> None:
    ids = served.target.tokenizer("abc").input_ids
    text, _ = expected(served.target, served.drafter, ids, max_new_tokens=16)
    for prompt in ("abc", ["abc"], ids):
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0)
        assert answer.choices[0].text == text
    streamed = client.completions.create(model="tiny", prompt="abc", temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == text


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 60}
    full = client.completions.create(**ask).choices[0].text
    stop = full[11:14]
    cut = client.completions.create(**ask, stop=["never so", stop])
    assert cut.choices[0].text == full[: full.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = client.completions.create(**ask, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in pieces) == full[: full.index(stop)]


def test_stop_token_ids_and_ignore_eos_are_honoured(served: SimpleNamespace, client: openai.OpenAI) -> None:
    ids = served.target.tokenizer("abc").input_ids
    _, result = expected(served.target, None, ids, max_new_tokens=30, ignore_eos=True)
    extra = {"ignore_eos": True, "stop_token_ids": [result.tokens[9]]}
    answer = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=30, extra_body=extra)
    assert answer.usage.completion_tokens == result.tokens.index(result.tokens[9]) + 1
    assert answer.choices[0].finish_reason == "stop"


def test_requests_sent_together_each_get_their_own_answer(served: SimpleNamespace, client: openai.OpenAI) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(lambda p: client.completions.create(model="tiny", prompt=p, temperature=0), prompts)
    for prompt, answer in zip(prompts, asked, strict=True):
        ids = served.target.tokenizer(prompt).input_ids
        assert answer.choices[0].text == expected(served.target, served.drafter, ids, max_new_tokens=16)[0]


def test_a_client_that_leaves_stops_its_decoding(served: SimpleNamespace, client: openai.OpenAI) -> None:
    def generated() -> float:
        text = httpx.get(f"{served.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        return float(next(x for x in text.splitlines() if x.startswith("dflash_generated_tokens_total")).split()[1])

    before = generated()
    extra = {"ignore_eos": True}
    with client.completions.create(
        model="tiny", prompt="leave", temperature=0, max_tokens=240, stream=True, extra_body=extra
    ) as stream:
        next(iter(stream))
    client.completions.create(model="tiny", prompt="after", temperature=0, max_tokens=1)
    assert generated() - before < 200


def test_models_health_and_metrics(served: SimpleNamespace, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert (
        "dflash_verify_steps_total"
        in httpx.get(f"{served.url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    )


CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (CHAT | {"model": "other"}, 404, "model", "model_not_found"),
        (CHAT | {"messages": []}, 400, "messages", None),
        (CHAT | {"messages": [{"role": "user", "content": 7}]}, 400, "messages", None),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", None),
        (CHAT | {"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages", "context_length_exceeded"),
        (CHAT | {"temperature": "hot"}, 400, "temperature", None),
        (CHAT | {"temperature": -1}, 400, "temperature", None),
        (CHAT | {"top_p": 0}, 400, "top_p", None),
        (CHAT | {"max_tokens": 0}, 400, "max_tokens", None),
        (CHAT | {"n": 2}, 400, "n", "unsupported_parameter"),
        (CHAT | {"logprobs": True}, 400, "logprobs", "unsupported_parameter"),
        (CHAT | {"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
        (CHAT | {"presence_penalty": 0.5}, 400, "presence_penalty", "unsupported_parameter"),
        (CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
        (CHAT | {"stop": ["a", "b", "c", "d", "e"]}, 400, "stop", None),
        ({"messages": MESSAGES}, 400, "model", None),
        ([1, 2], 400, None, None),
    ],
    ids=lambda value: None if isinstance(value, dict | list) else str(value),
)
def test_a_bad_request_gets_openai_s_error_form(
    served: SimpleNamespace, body: object, status: int, param: str | None, code: str | None
) -> None:
    answer = post(served, json.dumps(body).encode())
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"] and error["type"]


def post(served: SimpleNamespace, body: object, path: str = "/v1/chat/completions", key: str = KEY) -> httpx.Response:
    return httpx.post(served.url + path, content=body, headers={"authorization": f"Bearer {key}"})  # type: ignore[arg-type]


def test_neutral_values_of_unsupported_parameters_and_harmless_extras_are_accepted(served: SimpleNamespace) -> None:
    extras = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "user": "me", "metadata": {}, "tools": None}
    assert post(served, json.dumps(CHAT | extras).encode()).status_code == 200


def test_malformed_json_an_empty_prompt_and_a_bad_token_id_are_refused(served: SimpleNamespace) -> None:
    assert post(served, b"{nope").status_code == 400
    for prompt in ("", [], [99999], ["a", "b"]):
        answer = post(served, json.dumps({"model": "tiny", "prompt": prompt}).encode(), "/v1/completions")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_an_over_long_body_is_refused_by_its_header_and_by_counting(served: SimpleNamespace) -> None:
    assert post(served, b" " * (BODY_LIMIT + 1)).status_code == 413

    def parts() -> Iterator[bytes]:  # chunked: no Content-Length
        for _ in range(BODY_LIMIT // 65536 + 2):
            yield b" " * 65536

    assert post(served, parts()).status_code == 413


def test_a_wrong_key_an_unknown_path_and_a_wrong_method_are_refused(served: SimpleNamespace) -> None:
    wrong = post(served, json.dumps(CHAT).encode(), key="other")
    assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    unknown = httpx.get(f"{served.url}/v1/nothing")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_url"
    method = httpx.get(f"{served.url}/v1/chat/completions")
    assert method.status_code == 405 and method.json()["error"]["code"] == "method_not_allowed"


def test_a_port_in_use_is_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--target", "/no/such/target", "--port", str(taken.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot listen on 127.0.0.1") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "70000"),
        (["--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["--port", "0", "--target", "/no/such/dir"], "/no/such/dir"),
        (["--port", "0", "--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["--prot", "1"], None),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], named: str | None, target_dir: object, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments if "--target" in arguments else ["--target", str(target_dir), *arguments]
    if named is None:
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        return
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and named in lines[0]
