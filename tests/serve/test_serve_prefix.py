"""The prefix cache as clients see it: `cache_salt`, prefixes per API key, and the metrics of saved tokens."""

import re
from typing import Any

import pytest
from conftest import make_drafter, make_target
from fastapi.testclient import TestClient
from live_server import make_app, make_engine
from reciting import make_reciting

from dflash_toolkit import Drafter, Target
from dflash_toolkit.acceptance import prompt_length_group

PAGE = 4  # tokens of a page, see `make_engine`
TEXT = "Please count to one hundred, slowly and without any mistake"
MESSAGES = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": TEXT, "max_tokens": 5},
    "chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "responses": {"input": TEXT, "max_output_tokens": 5},
    "messages": {"messages": MESSAGES, "max_tokens": 5},
}


def cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return details["cached_tokens"] if details else usage.get("cache_read_input_tokens") or 0


def counts(client: TestClient, **headers: str) -> dict[str, float]:
    text = re.sub(',?model_name="org/tiny",?', "", client.get("/metrics", headers=headers).text).replace("{}", "")
    return {name: float(value) for name, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("route", BODIES)
def test_only_equal_salts_share_a_prefix(target: Target, drafter: Drafter, route: str) -> None:
    client = TestClient(make_app(make_engine(target, drafter)))
    body, found, texts = {"model": "org/tiny", "temperature": 0} | BODIES[route], [], set[str]()
    for salt in ("a", "b", None, "a", "b", None):
        reply = client.post(f"/v1/{route}", json=body | {"cache_salt": salt}).json()
        found.append(cached(reply["usage"]))
        texts.add(
            str([reply.get(name) for name in ("content", "output_text")] + [*map(_text, reply.get("choices", ()))])
        )
    assert found[:3] == [0, 0, 0] and found[3] == found[4] == found[5] > 0
    assert len(texts) == 1


def _text(choice: dict[str, Any]) -> Any:
    return choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_prefix_is_separate_per_key_on_request(kind: str, per_key: bool) -> None:
    """So are the states of a target with recurrent layers."""
    target = make_target(kind)
    drafter = make_drafter(target)
    keys, body = ("k0", "k1"), {"model": "org/tiny", "prompt": [7] * 40, "max_tokens": 3}
    client = TestClient(make_app(make_engine(target, drafter), api_keys=keys, prefix_cache_per_key=per_key))
    found = []
    for key, salt in (("k0", None), ("k1", None), ("k1", "0:"), ("k1", None), ("k0", "a"), ("k1", "a"), ("k0", "a")):
        headers = {"Authorization": f"Bearer {key}"}
        found.append(
            cached(client.post("/v1/completions", json=body | {"cache_salt": salt}, headers=headers).json()["usage"])
        )
    hit = max(found)
    assert 30 < hit < 40
    assert found == ([0, 0, 0, hit, 0, 0, hit] if per_key else [0, hit, 0, hit, 0, hit, hit])
    metrics = counts(client, **headers)
    saved = [sum(found[place] for place in places) for places in ((0, 4, 6), (1, 2, 3, 5))]
    for key, tokens in enumerate(saved):
        assert metrics[f'dflash:prompt_tokens_cached_by_api_key_total{{api_key="{key}"}}'] == tokens
    assert metrics['dflash:prompt_tokens_by_api_key_total{api_key="1"}'] == 4 * 40
    length = prompt_length_group(40)
    assert metrics[f'dflash:prompt_tokens_cached_by_prompt_length_total{{prompt_tokens="{length}"}}'] == sum(saved)
    assert metrics["vllm:prompt_tokens_cached_total"] == metrics["vllm:prefix_cache_hits_total"] == sum(saved)
    assert metrics["vllm:prompt_tokens_total"] == metrics["vllm:prefix_cache_queries_total"] == 7 * 40
    assert metrics["dflash:prefix_cache_hit_rate"] == pytest.approx(sum(saved) / 280)


def test_a_chat_finds_its_last_turn_up_to_removed_thoughts() -> None:
    """The template of the reciting target writes no thoughts into the history, so only the answers differ."""
    reciter = make_reciting()
    client, answered = TestClient(make_app(make_engine(reciter, make_drafter(reciter)), "m")), 0
    messages = [{"role": "user", "content": TEXT}]
    for _ in range(3):
        body = {"model": "m", "messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
        reply = client.post("/v1/chat/completions", json=body | {"max_tokens": 60, "temperature": 0}).json()
        usage, message = reply["usage"], reply["choices"][0]["message"]
        assert message["reasoning_content"]
        assert answered - PAGE <= cached(usage) <= answered
        answered = usage["prompt_tokens"]
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "more"}]


def test_prefix_metrics_count_answers_that_a_stop_string_ends(target: Target, drafter: Drafter) -> None:
    client = TestClient(make_app(make_engine(target, drafter)))
    body = {"model": "org/tiny", "prompt": [7] * 40, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    reply = client.post("/v1/completions", json=body | {"stop": text[4:6]}).json()
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] < 40
    metrics = counts(client)
    assert metrics["vllm:prefix_cache_queries_total"] == 80
    assert metrics["vllm:prefix_cache_hits_total"] == cached(reply["usage"]) > 0


def test_without_a_request_the_hit_rate_is_zero(target: Target) -> None:
    client = TestClient(make_app(make_engine(target, None)))
    assert counts(client)["dflash:prefix_cache_hit_rate"] == 0
