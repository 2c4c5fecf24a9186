"""The server through the real `openai` client and a real socket, on tiny models."""

import concurrent.futures
import http.client
import inspect
import json
import logging
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live_server import (
    LATE_S,
    MESSAGES,
    chat,
    client,
    client_of,
    complete,
    engine,
    error_of,
    gated,
    joined,
    make_engine,
    refusal,
    serving,
    text_of,
    url,
    wait_until,
)
from openai import APIError, APIStatusError, OpenAI

from dflash_toolkit import Drafter, SamplingParams, Target, generate
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.serve.endpoints.chat import ChatRequest
from dflash_toolkit.serve.endpoints.completions import CompletionRequest
from dflash_toolkit.serve.protocol import Cut
from dflash_toolkit.serve.text import _borders
from dflash_toolkit.serve.thread_pools import MAX_BODY

__all__ = ["client", "engine", "url"]  # fixtures
ENDLESS = {"ignore_eos": True}


# ---- answers -------------------------------------------------------------------------------------------------


def test_answer_has_the_requested_model_name(target: Target) -> None:
    with serving(make_engine(target, None), served_model_name=("org/tiny", "also")) as url:
        client = client_of(url)
        for name in ("org/tiny", "also"):
            body = {"model": name, "messages": MESSAGES, "max_tokens": 2}
            assert client.chat.completions.create(**body).model == name
            assert {chunk.model for chunk in client.chat.completions.create(**body, stream=True)} == {name}
            assert client.completions.create(model=name, prompt="a", max_tokens=2).model == name
            assert client.responses.create(model=name, input="a", max_output_tokens=2).model == name


def test_greedy_chat_equals_generate(client: OpenAI, target: Target, drafter: Drafter) -> None:
    ids = encode_chat(target.tokenizer, MESSAGES)
    expected = generate(target, drafter, ids, SamplingParams(max_tokens=20))
    answer = chat(client, temperature=0)
    assert answer.object == "chat.completion" and answer.model == "org/tiny" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(target, expected)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.to_dict() == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(expected.tokens),
        "total_tokens": len(ids) + len(expected.tokens),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "dflash": {
            "verify_steps": len(expected.steps),
            "drafted": sum(step.drafted for step in expected.steps),
            "accepted": sum(step.accepted for step in expected.steps),
            "acceptance_length": expected.acceptance_length,
            "target_version": 0,
            "drafter_version": 0,
        },
    }


def test_prompt_as_text_list_or_tokens_is_equal(client: OpenAI, target: Target, drafter: Drafter) -> None:
    ids = target.tokenizer.encode("The sky")
    expected = text_of(target, generate(target, drafter, ids, SamplingParams(max_tokens=16)))
    for prompt in ("The sky", ["The sky"], ids, [ids]):
        answer = client.completions.create(model="org/tiny", prompt=prompt, temperature=0)
        assert answer.object == "text_completion"
        assert answer.choices[0].text == expected, "16 tokens is OpenAI's default"


def test_the_drafter_changes_the_statistics_only(client: OpenAI, target: Target) -> None:
    drafted = chat(client, seed=3, max_tokens=24)
    with serving(make_engine(target, None)) as url:
        plain = chat(client_of(url), seed=3, max_tokens=24)
    assert plain.choices[0] == drafted.choices[0]
    assert plain.usage.completion_tokens == drafted.usage.completion_tokens
    assert plain.usage.dflash["drafted"] == 0 < drafted.usage.dflash["drafted"]
    assert plain.usage.dflash["acceptance_length"] == 1.0


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.sampled
def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI, ask: Callable[..., Any], seed: int) -> None:
    ask(client, max_tokens=1)  # puts the prompt into the cache
    answer = ask(client, seed=seed)
    choice = answer.choices[0]
    whole = choice.message.content if ask is chat else choice.text
    text, reason, usage = joined(ask(client, seed=seed, stream=True, stream_options={"include_usage": True}))
    assert (text, reason, usage) == (whole, choice.finish_reason, answer.usage)
    assert joined(ask(client, seed=seed, stream=True))[2] is None


@pytest.mark.parametrize("ask", [chat, complete])
def test_chunks_have_token_ids_and_continuous_usage(client: OpenAI, ask: Callable[..., Any], url: str) -> None:
    options: dict[str, Any] = {"seed": 2, "n": 2, "stop": ["e"], "extra_body": {"return_token_ids": True} | ENDLESS}
    ask(client, max_tokens=1)  # puts the prompt into the cache
    whole = ask(client, **options)
    usages = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(client, stream=True, stream_options=usages, **options)
    assert last.usage == whole.usage and not last.choices
    for index, choice in enumerate(whole.choices):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == index]
        ids: list[int] = []
        for chunk in mine:
            ids += getattr(chunk.choices[0], "token_ids", None) or []
            assert chunk.usage.completion_tokens == len(ids)
            assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens
        assert ids == choice.token_ids
        first, *others = [chunk if ask is chat else chunk.choices[0] for chunk in mine]
        assert first.prompt_token_ids == (whole if ask is chat else choice).prompt_token_ids
        assert not any(hasattr(other, "prompt_token_ids") for other in others)


@pytest.mark.parametrize(("level", "ask"), [("summary", complete), ("detailed", chat)])
def test_answer_has_vllm_draft_metrics(
    target: Target, drafter: Drafter, client: OpenAI, level: str, ask: Callable[..., Any]
) -> None:
    longest = drafter.config.block_size - 1
    assert not hasattr(ask(client, max_tokens=2), "metrics")
    with serving(make_engine(target, drafter), drafter="d", per_request_spec_decode_metrics=level) as url:
        asking = client_of(url)
        answer = ask(asking, temperature=0, max_tokens=16)
        usages = {"include_usage": True}
        *_, last = ask(asking, temperature=0, max_tokens=16, stream=True, stream_options=usages)
        assert not hasattr(ask(asking, n=2, max_tokens=2), "metrics"), "of which of them?"
    found, spent = answer.metrics["speculative_decoding"], answer.usage.dflash
    assert last.metrics["speculative_decoding"] == found
    assert found["num_draft_tokens"] == spent["drafted"] > 0
    assert found["num_accepted_draft_tokens"] == spent["accepted"]
    assert found["num_spec_tokens"] == longest and len(found["acceptance_histogram"]) == longest + 1
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(found["acceptance_histogram"])) == spent["accepted"]
    assert found["mean_acceptance_length"] == 1 + spent["accepted"] / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == spent["accepted"] / spent["drafted"]
    assert ("per_step_drafted" in found) == (level == "detailed")
    if level == "detailed":
        assert sum(found["per_step_drafted"]) == spent["drafted"]
        assert sum(found["per_step_accepted"]) == spent["accepted"]


@pytest.mark.parametrize("prompt", ["a" * 700 + "bcd", [*range(97, 117)] * 30 + [5, 6, 7]], ids=["text", "tokens"])
def test_prompt_can_be_truncated_to_fit(client: OpenAI, target: Target, prompt: Any) -> None:
    ids = target.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    for wanted, kept in (({"truncate_prompt_tokens": 3}, ids[-3:]), ({"truncate_prompt_tokens": -1}, ids[-511:]),
                        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5])):  # fmt: skip
        extra = wanted | {"return_token_ids": True, "logit_bias": {"65": 100}}
        choice = complete(client, prompt=prompt, max_tokens=1, logprobs=0, extra_body=extra).choices[0]
        assert choice.prompt_token_ids == kept
        assert choice.logprobs.text_offset[0] == len(target.tokenizer.decode(kept))
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
        extra = {"truncate_prompt_tokens": 8, "return_token_ids": True}
        answer = chat(client, messages=messages, max_tokens=1, extra_body=extra)
        assert answer.prompt_token_ids == encode_chat(target.tokenizer, messages)[-8:]


def test_truncation_keeps_the_first_special_tokens() -> None:
    assert Cut(3, None).of([0, 1, 2, 3, 4], 1) == [0, 3, 4] and Cut(3, "left").of([0, 1, 2, 3, 4], 1) == [2, 3, 4]
    assert Cut(0, None).of([0, 1], 1) == [] and Cut(5, None).of([0, 1], 1) == [0, 1]


@pytest.mark.parametrize("ask", [chat, complete])
def test_harmless_values_of_unsupported_parameters_are_accepted(client: OpenAI, ask: Callable[..., Any]) -> None:
    kind = ChatRequest if ask is chat else CompletionRequest
    body: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "request_id": "mine.1",
        "n": 1, "stop": [], "logit_bias": {}, "ignore_eos": False, "repetition_penalty": 1, "min_tokens": 0,
        "priority": 0, "skip_special_tokens": True, "include_stop_str_in_output": False, "response_format": None,
        "frequency_penalty": 0, "presence_penalty": 0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [],
    } | {name: values[0] if values else None for name, values in kind.unsupported.items()}  # fmt: skip
    body |= {"parallel_tool_calls": True, "tools": None, "top_logprobs": 0} if ask is chat else {"best_of": 1}
    answer = ask(client, temperature=0, max_tokens=4, extra_body=body)
    assert answer.choices == ask(client, temperature=0, max_tokens=4).choices
    assert answer.id.endswith("-mine.1")
    theirs = inspect.signature((client.chat.completions if ask is chat else client.completions).create).parameters
    ours = {*kind.model_fields, *kind.unsupported, *kind.ignored}
    assert theirs.keys() - ours == {"extra_headers", "extra_query", "extra_body", "timeout"}
    nulls = dict.fromkeys(kind.model_fields.keys() - {"model", "messages", "prompt", "max_tokens", "temperature"})
    assert ask(client, temperature=0, max_tokens=4, extra_body=nulls).choices == answer.choices


def test_events_disable_proxy_buffering(url: str) -> None:
    body = {"model": "org/tiny", "prompt": "a", "max_tokens": 2, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LATE_S) as response:
        assert response.headers["x-accel-buffering"] == "no"


def test_sampling_parameters_reach_the_sampler(client: OpenAI, target: Target, drafter: Drafter) -> None:
    ids = encode_chat(target.tokenizer, MESSAGES)
    common = {"temperature": 1.0, "seed": 7, "max_tokens": 24}
    plain = generate(target, drafter, ids, SamplingParams(**common))
    stop = {"stop_token_ids": [plain.tokens[9]]}
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    biased = penalties | {"logit_bias": ((65, 3.0),)}
    for options in ({"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.4}, {"temperature": 0.5}, stop, biased):
        expected = text_of(target, generate(target, drafter, ids, SamplingParams(**common | options)))
        assert expected != text_of(target, plain)
        wanted = options | ({"logit_bias": {"65": 3}} if options is biased else {})
        answer = chat(client, seed=7, max_tokens=24, extra_body=wanted)
        assert answer.choices[0].message.content == expected, options


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1, "top_p": 1e-46}])
def test_tiny_temperature_or_top_p_is_greedy(client: OpenAI, options: dict[str, float]) -> None:
    assert chat(client, seed=1, **options).choices[0] == chat(client, temperature=0).choices[0]


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = chat(client, temperature=0).choices[0].message.content
    stop = whole[9:12]  # three characters, so at least two tokens
    stopped = chat(client, temperature=0, stop=[stop, "never said"])
    assert stopped.choices[0].message.content == whole[: whole.find(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert 0 < stopped.usage.completion_tokens < 20
    text, reason, usage = joined(
        chat(client, temperature=0, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    assert (text, reason, usage) == (whole[: whole.find(stop)], "stop", stopped.usage)


def test_answers_to_a_request_share_stop_string_tables(client: OpenAI) -> None:
    _borders.cache_clear()
    stops = ["a" * 1024, "ab" * 512]
    complete(client, n=4, max_tokens=1, extra_body={"stop": stops})
    counts = _borders.cache_info()
    assert (counts.misses, counts.hits) == (2, 6)


def test_stop_string_can_be_included_and_min_tokens_delays_it(client: OpenAI) -> None:
    whole = complete(client, temperature=0).choices[0].text
    stop = whole[9:12]
    end = whole.find(stop) + len(stop)
    *_, last = complete(client, temperature=0, stop=[stop, "never"], stream=True)
    assert last.choices[0].stop_reason == stop
    extra: dict[str, Any] = {"include_stop_str_in_output": True}
    kept = complete(client, temperature=0, stop=stop, extra_body=extra)
    assert kept.choices[0].text == whole[:end] and kept.choices[0].finish_reason == "stop"
    wanted = {"stop": stop, "extra_body": extra | {"min_tokens": kept.usage.completion_tokens}}
    longer = complete(client, temperature=0, **wanted)
    assert longer.choices[0].text.startswith(whole[: end + 1])
    assert joined(complete(client, temperature=0, stream=True, **wanted))[0] == longer.choices[0].text


def test_answer_has_at_least_min_tokens(client: OpenAI) -> None:
    every = list(range(0, 256, 2))
    for least in (0, 7, 30):
        extra = {"min_tokens": least, "stop_token_ids": every, "return_token_ids": True}
        choice = complete(client, seed=4, max_tokens=40, extra_body=extra).choices[0]
        *before, last = choice.token_ids
        assert choice.stop_reason == last
        assert len(before) >= least and last in every and not {*before[:least]} & {*every}
    endless = complete(client, max_tokens=9, extra_body=ENDLESS | {"min_tokens": 9})  # as benchmarks do
    assert endless.usage.completion_tokens == 9 and endless.choices[0].stop_reason is None
    room = refusal(complete, client, prompt="a" * 500, max_tokens=None, extra_body={"min_tokens": 13})
    assert (room.status_code, room.param) == (400, "min_tokens")
    both = refusal(complete, client, extra_body={"min_tokens": 3, "regex": "a"})
    assert (both.status_code, both.param) == (400, "min_tokens") and "regex" in str(both)


def test_special_tokens_are_shown_if_requested(client: OpenAI, target: Target) -> None:
    mark = {"logit_bias": {str(target.tokenizer.convert_tokens_to_ids("<|user|>")): 100}, "max_tokens": 3}
    for extra, text in (({}, ""), ({"skip_special_tokens": False}, "<|user|>" * 3)):
        assert complete(client, extra_body=extra, **mark).choices[0].text == text
        assert chat(client, extra_body=extra, **mark).choices[0].message.content == text


def test_priority_reaches_the_engine_if_enabled(
    target: Target, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refusal(chat, client, extra_body={"priority": -1})
    assert (error.status_code, error.param) == (400, "priority") and "--scheduling-policy" in str(error)
    engine, seen = make_engine(target, None), list[int]()
    real = engine.engine.request

    def request(*args: Any, **options: Any) -> Any:
        seen.append(options["priority"])
        return real(*args, **options)

    monkeypatch.setattr(engine.engine, "request", request)
    with serving(engine, scheduling_policy="priority") as url:
        for priority in (-3, None, 2):
            chat(client_of(url), max_tokens=1, extra_body={"priority": priority})
    assert seen == [-3, 0, 2]


def test_ignore_eos_and_the_two_names_of_the_limit(client: OpenAI) -> None:
    answer = chat(client, max_tokens=3, max_completion_tokens=60, extra_body=ENDLESS)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (60, "length")
    whole_context = complete(client, prompt="a" * 480, max_tokens=32, extra_body=ENDLESS)
    assert whole_context.usage.total_tokens == 512


def test_content_parts_developer_role_and_harmless_extras(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]
    plain = chat(client, temperature=0, messages=[{"role": "system", "content": "Be brief."}, *MESSAGES])
    other = chat(
        client,
        temperature=0,
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "me"}],
        user="someone", metadata={"a": "b"}, store=False, service_tier="auto", n=1, logprobs=False,
        presence_penalty=0, frequency_penalty=0.0, tools=[], response_format={"type": "text"}, seed=None,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert other.choices[0] == plain.choices[0]
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]  # not supported by this target's template
    silent: list[Any] = [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]
    empty: list[Any] = [*MESSAGES, {"role": "assistant", "content": ""}, *MESSAGES]
    found = chat(client, temperature=0, messages=silent, tools=tools, tool_choice="none")
    assert found.choices[0] == chat(client, temperature=0, messages=empty).choices[0]


def test_models_health_and_metrics(url: str, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").to_dict()["max_model_len"] == 512
    assert httpx.get(f"{url}/health", timeout=LATE_S).status_code == 200

    before = counters(url)
    usage = chat(client, temperature=0).usage
    after = counters(url)
    for name, count in (
        ("vllm:generation_tokens", 20),
        ("vllm:prompt_tokens", usage.prompt_tokens),
        ("dflash_verify_steps", usage.dflash["verify_steps"]),
        ("vllm:spec_decode_num_accepted_tokens", usage.dflash["accepted"]),
        ("vllm:spec_decode_num_draft_tokens", usage.dflash["drafted"]),
    ):
        assert after[f"{name}_total"] - before[f"{name}_total"] == count, name
    by_position = sum(value for name, value in after.items() if "per_pos_total{" in name)
    assert by_position == after["vllm:spec_decode_num_accepted_tokens_total"]
    by_length, by_rows = (
        sum(value for name, value in after.items() if name.startswith(f"dflash:steps_by_{what}_total"))
        for what in ("draft_length", "rows")
    )
    assert by_length == by_rows > 0
    assert after["vllm:time_to_first_token_seconds_count"] - before["vllm:time_to_first_token_seconds_count"] == 1
    assert after['dflash_requests_total{outcome="length"}'] > before.get('dflash_requests_total{outcome="length"}', 0)


def counters(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=LATE_S).text.splitlines()
    found = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    # without the name of the only model
    return {
        re.sub(r'\{model_name="org/tiny"\}|,?model_name="org/tiny",?', "", name): float(value)
        for name, _, value in found
    }


# ---- many clients --------------------------------------------------------------------------------------------


def test_concurrent_requests_get_their_own_answers(client: OpenAI) -> None:
    def ask(i: int) -> str:
        options = {"prompt": f"Prompt {i}", "temperature": 0, "max_tokens": 24}
        if i % 2:
            return joined(complete(client, **options, stream=True))[0]
        return complete(client, **options).choices[0].text

    alone = [ask(i) for i in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) == 8


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]], ids=len)
def test_a_client_that_leaves_stops_its_decoding(
    engine: AsyncEngine, url: str, client: OpenAI, prompts: list[str], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_toolkit.serve.endpoints.models.STATS_S", 0.01)  # a stopped engine answers no ping
    body = {"model": "org/tiny", "prompt": prompts, "max_tokens": 400, "stream": streamed, **ENDLESS}
    name = 'dflash_requests_total{outcome="disconnected"}'
    before, address = counters(url).get(name, 0), httpx.URL(url)
    with gated(engine, 10) as gate:
        connection = http.client.HTTPConnection(address.host, address.port or 0, timeout=LATE_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        gate.wait()
        if streamed:
            with connection.getresponse() as response:
                assert response.readline().startswith(b"data: ")
        connection.close()
        wait_until(lambda: counters(url).get(name, 0) == before + len(prompts))
        gate.wait_idle()
        assert gate.done <= 11, "the one that was under way"
    assert complete(client, max_tokens=1, seed=1).usage.completion_tokens == 1, "the worker is free again"


# ---- refusals ------------------------------------------------------------------------------------------------


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG: dict[str, list[Any]] = {  # parameter named in the error -> wrong values, for both endpoints
    "n": [0, 129], "temperature": ["hot", -1, 1e39], "top_p": [0, 1.1], "top_k": [1.5, 10**30], "min_p": [2],
    "seed": [2**64], "presence_penalty": [2.5], "frequency_penalty": [-3], "repetition_penalty": [0, 1e39, 1e-39],
    "logit_bias": [{"a": 2}, {"1": 200}, {"9" * 5000: 1}, {"300": 1}, {"01": 1},
                   dict.fromkeys(map(str, range(2000)), 1)], "max_tokens": [0, "5", True, 10**30],
    "min_tokens": [-1, 2**40, "1"], "priority": [1.5, 2**40, 1], "skip_special_tokens": ["no"],
    "include_stop_str_in_output": [2],
    "stop": [["a"] * 17, "", 3, "a" * 1025, ["b", "a" * 1025]], "bad_words": [["a"]], "regex": ["(a", 5],
    "use_beam_search": [True], "cache_salt": ["", 5, "a" * 1025],
    "structured_outputs.whitespace_pattern": [{"regex": "a", "whitespace_pattern": " "}],
    "truncate_prompt_tokens": [-2, 513], "truncation_side": ["up"], "request_id": ["a b"],
    "prompt_logprobs": [-1, 21, True, "2"], "stop_token_ids[0]": [[2**63], [10**30], [-(10**30)]],
}  # fmt: skip
WRONG_CHATS = WRONG | {
    "tools": [[{"type": "function", "function": {"name": "f"}}]],  # the template does not support tools
    "tool_choice": ["required", "any", {"type": "function", "function": {"name": "f"}}, {"type": "function"}],
    "response_format.type": [{"type": "yaml"}, {}], "chat_template_kwargs": [5],
    "messages[0].role": [[{"role": "critic", "content": "x"}]],
    "messages[0].content": [[{"role": "user", "content": 5}]],
    "messages[0].content[0]": [[{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]],
    "messages[0].content[0].type": [[{"role": "user", "content": [{"type": "image_url"}]}]],
    "messages[0].tool_calls[0].function": [[{"role": "assistant", "content": "", "tool_calls": [{}]}]],
    "messages[0].tool_calls": [[{"role": "user", "content": "", "tool_calls": [CALL]}]],
    "messages[0].function_call": [[{"role": "user", "content": "", "function_call": {"name": "f"}}]],
    "messages": [[], "hi"],
    "parallel_tool_calls": ["no"],
    "logprobs": [1, "yes"], "top_logprobs": [2, 21, -1, True, 1.5, "2"],
}  # fmt: skip
WRONG_COMPLETIONS = WRONG | {
    "best_of": [2], "echo": ["yes", 1], "suffix": ["x"], "add_special_tokens": [False], "prompt_embeds": ["AAAA"],
    "prompt": ["", [], ["a", ""], ["a", 5], [["a"]], [1, "a"], [300], [-1], ["a", [300]], None, ["a"] * 9],
    "logprobs": [21, -1, True, False, "2"],
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])  # an error status, not an event
@pytest.mark.parametrize(
    ("ask", "param"), [(chat, p) for p in WRONG_CHATS] + [(complete, p) for p in WRONG_COMPLETIONS]
)
def test_invalid_parameter_gets_400_with_its_name(
    client: OpenAI, ask: Callable[..., Any], param: str, streamed: bool
) -> None:
    for value in (WRONG_CHATS if ask is chat else WRONG_COMPLETIONS)[param]:
        more = {"logprobs": value != 2} if param == "top_logprobs" else {"n": 128} if param == "prompt" else {}
        error = refusal(ask, client, stream=streamed, extra_body={re.split(r"[.[]", param)[0]: value, **more})
        assert (error.status_code, error.param) == (400, param), value


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[]", b"", b'{"model": "\\ud800"}', b"[" * 100_000])
def test_invalid_body_gets_400(url: str, body: bytes) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=LATE_S)
    assert response.status_code == 400
    error_of(response)


def test_a_prompt_longer_than_the_context_is_refused(client: OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "a" * 600}]
    for error in (refusal(complete, client, prompt="a" * 512), refusal(chat, client, messages=long, stream=True)):
        assert (error.status_code, error.code) == (400, "context_length_exceeded")
        assert error.param == ("messages" if "chat" in str(error.request.url) else "prompt")
    assert complete(client, prompt="a" * 511, max_tokens=1, extra_body=ENDLESS).usage.completion_tokens == 1
    more = refusal(complete, client, prompt="a" * 511, max_tokens=2)
    assert (more.status_code, more.code, more.param) == (400, "context_length_exceeded", "max_tokens")


def test_a_model_that_is_not_served_is_a_404(client: OpenAI) -> None:
    for error in (refusal(chat, client, model="other"), refusal(client.models.retrieve, "other")):
        assert (error.status_code, error.code) == (404, "model_not_found")


def test_unknown_paths_and_wrong_methods(url: str) -> None:
    for path in ("/page.gif", "/v2", "/v1/chat", "/docs"):
        response = httpx.get(f"{url}{path}", timeout=LATE_S)
        assert response.status_code == 404 and path in error_of(response)["message"]
    response = httpx.get(f"{url}/v1/chat/completions", timeout=LATE_S)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error_of(response)


def test_body_over_the_limit_gets_413_also_in_chunks(url: str, client: OpenAI) -> None:
    error = refusal(complete, client, prompt="a" * MAX_BODY)
    assert (error.status_code, error.code) == (413, "request_too_large")
    chunks = (b" " * 65536 for _ in range(MAX_BODY // 65536 + 1))
    response = httpx.post(f"{url}/v1/completions", content=chunks, timeout=LATE_S)
    assert response.status_code == 413 and error_of(response)


def test_client_that_leaves_mid_request_logs_no_error(url: str, caplog: pytest.LogCaptureFixture) -> None:
    name = 'dflash:http_responses_total{status="499"}'
    before = counters(url).get(name, 0)
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)  # usually the server has read the header by now, but both cases must work
    wait_until(lambda: counters(url).get(name, 0) == before + 1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_all_routes_but_health_need_an_api_key(target: Target) -> None:
    with serving(make_engine(target, None), api_keys=["sécret"]) as url:
        for given in ("Bearer wrong", "Bearer sécre", "Bearer", "Basic sécret"):
            headers = {"Authorization": given.encode()}
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")):
                response = httpx.request(method, f"{url}{path}", headers=headers, timeout=LATE_S)
                assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer sécret".encode()}
        right = httpx.get(f"{url}/v1/models", headers=key, timeout=LATE_S)
        assert right.status_code == 200
        assert httpx.get(f"{url}/health", timeout=LATE_S).status_code == 200


def test_internal_failure_is_reported_to_the_client(
    engine: AsyncEngine, client: OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("secret details")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.runner, "decode", fail)
        with pytest.raises(APIStatusError) as caught:
            chat(client, n=3, extra_body=ENDLESS)
        assert caught.value.status_code == 500
        assert "secret" not in str(error_of(caught.value.response))
        for ask, more in ((chat, {}), (complete, {"prompt": ["a", "b"]})):
            with pytest.raises(APIError, match="could not be computed"):
                joined(ask(client, stream=True, extra_body=ENDLESS, **more))
    assert complete(client, n=2, max_tokens=1, extra_body=ENDLESS).usage.completion_tokens == 2, "the next is served"
    assert counters(url)["dflash_requests_open"] == 0
