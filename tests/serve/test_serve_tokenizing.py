"""Tokens of texts and conversations, as the server counts them."""

from typing import Any

import pytest
from fastapi.testclient import TestClient
from test_serve_engine import make_engine

from dflash_toolkit import Target, __version__
from dflash_toolkit.data.prompts import encode_chat
from serve.app import create_app

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def client(target: Target) -> TestClient:
    return TestClient(create_app(make_engine(target, None), "m"))


def test_tokens_go_there_and_back(client: TestClient, target: Target) -> None:
    tokenizer = target.tokenizer
    reply = client.post("/tokenize", json={"model": "m", "prompt": "a blue sky", "return_token_strs": True}).json()
    ids = tokenizer.encode("a blue sky")
    assert reply["tokens"] == ids and reply["count"] == len(ids) and reply["max_model_len"] > 0
    assert reply["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == encode_chat(tokenizer, MESSAGES) and chat["token_strs"] is None
    asked = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/detokenize", {"tokens": [100000]}, "token 100000 is not in"),
        ("/detokenize", {"tokens": [-1]}, "token -1 is not in"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, path: str, body: dict[str, Any], said: str) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]
    assert client.post(path, json={"model": "other", "prompt": "a", "tokens": [1]}).status_code in (400, 404)


def test_the_version_is_told_to_everybody(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}
