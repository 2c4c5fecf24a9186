"""Several answers to a prompt (`n`) and several prompts in a request: each equals the answer alone."""

from typing import Any

import pytest
from conftest import make_tokenizer
from live_server import MESSAGES, chat, client, client_of, complete, engine, make_engine, serving, url, wait_until
from openai import OpenAI

from dflash_toolkit import Drafter, Target
from dflash_toolkit.runtime import AsyncEngine
from dflash_toolkit.serve.answer import Answer, AnswerOptions
from dflash_toolkit.serve.answer import usage as usage_of

__all__ = ["client", "engine", "url"]  # fixtures
USAGE = {"include_usage": True}
ENDLESS = {"ignore_eos": True}


def by_index(chunks: Any) -> tuple[dict[int, list[Any]], Any]:
    """Returns the choices of a stream by answer, and its usage."""
    choices: dict[int, list[Any]] = {}
    usage = None
    for chunk in chunks:
        assert usage is None, "the usage is the last chunk"
        usage = chunk.usage
        for choice in chunk.choices:
            assert not choices.get(choice.index) or choices[choice.index][-1].finish_reason is None
            choices.setdefault(choice.index, []).append(choice)
    return choices, usage


def counted(usage: Any) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def test_each_answer_to_a_chat_has_its_own_seed(client: OpenAI) -> None:
    alone = [chat(client, seed=seed) for seed in (7, 8, 9)]
    several = chat(client, seed=7, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for choice, one in zip(several.choices, alone, strict=True):
        assert (choice.message, choice.finish_reason) == (one.choices[0].message, one.choices[0].finish_reason)
    assert len({choice.message.content for choice in several.choices}) == 3
    assert counted(several.usage) == (alone[0].usage.prompt_tokens, sum(one.usage.completion_tokens for one in alone))
    assert len({choice.message.content for choice in chat(client, n=4).choices}) == 4, "without a seed they differ too"
    greedy = chat(client, temperature=0, n=2)
    assert greedy.choices[0].message == greedy.choices[1].message


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_seeds_at_the_edge_of_their_range(client: OpenAI, seed: int) -> None:
    following = -(2**63) if seed > 0 else seed + 1
    several = complete(client, seed=seed, n=2, max_tokens=8)
    alone = [complete(client, seed=s, max_tokens=8).choices[0].text for s in (seed, following)]
    assert [choice.text for choice in several.choices] == alone


def test_prompts_of_a_list_are_answered_in_its_order(target: Target, drafter: Drafter) -> None:
    prompts = ["The sky", target.tokenizer.encode("Why is"), "b" * 40, "x"]
    with serving(make_engine(target, drafter)) as first, serving(make_engine(target, drafter)) as second:
        ask = {"seed": 3, "max_tokens": 24, "logprobs": 2, "extra_body": {"return_token_ids": True}}
        several = complete(client_of(first), prompt=prompts, n=2, **ask)
        alone = [complete(client_of(second), prompt=p, **ask | {"seed": s}) for p in prompts for s in (3, 4)]
    assert [choice.index for choice in several.choices] == list(range(8))
    for choice, one in zip(several.choices, alone, strict=True):
        ours, theirs = choice.to_dict() | {"index": 0}, one.choices[0].to_dict()
        best, numbers = ([found["logprobs"].pop(name) for found in (ours, theirs)]
                         for name in ("top_logprobs", "token_logprobs"))  # fmt: skip
        assert [list(names) for names in best[0]] == [list(names) for names in best[1]]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4), "a batch adds in another order than a request alone"
        assert ours == theirs, "its offsets and token ids too"
    usages = [one.usage for one in alone]
    assert counted(several.usage) == (
        sum(usage.prompt_tokens for usage in usages[::2]), sum(usage.completion_tokens for usage in usages),
    )  # fmt: skip


def test_usage_sums_answers_and_counts_each_prompt_once() -> None:
    answers = []
    for i in range(4):
        one = Answer(make_tokenizer(), 10 + i // 2, AnswerOptions())
        one.cached_tokens, one.reasoning_tokens = 8 * i, i
        one.versions = 1, i
        one.tokens, one.verify_steps, one.drafted, one.accepted, one.committed = [1] * (i + 1), i, 7 * i, 2 * i, 3 * i
        answers.append(one)
    assert usage_of(answers, 2) == {
        "prompt_tokens": 21, "completion_tokens": 10, "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 6},
        "dflash": {
            "verify_steps": 6, "drafted": 42, "accepted": 12, "acceptance_length": 3.0, "target_version": 1,
            "drafter_version": 3,
        },
    }  # fmt: skip
    assert usage_of(answers[:1], 1)["dflash"]["acceptance_length"] is None, "no step was taken"


def test_stream_interleaves_all_answers(client: OpenAI) -> None:
    for ask, more in ((complete, {"prompt": ["The sky", "b"]}), (chat, {"messages": MESSAGES})):
        whole = ask(client, seed=5, n=2, **more)
        choices, usage = by_index(ask(client, seed=5, n=2, **more, stream=True, stream_options=USAGE))
        assert sorted(choices) == list(range(len(whole.choices)))
        for index, choice in enumerate(whole.choices):
            pieces = choices[index]
            if ask is chat:
                assert pieces[0].delta.role == "assistant"
                text = "".join(piece.delta.content or "" for piece in pieces)
                assert text == choice.message.content
            else:
                assert "".join(piece.text for piece in pieces) == choice.text
            assert pieces[-1].finish_reason == choice.finish_reason
        assert counted(usage) == counted(whole.usage)
        assert by_index(ask(client, n=2, **more, stream=True))[1] is None


def test_stop_string_ends_only_its_answer(engine: AsyncEngine, client: OpenAI) -> None:
    whole = [choice.text for choice in complete(client, seed=5, n=3, extra_body=ENDLESS).choices]
    cut = [text[i : i + 3] for text in whole for i in range(9, 30)]
    stop = next(piece for piece in cut if sum(piece in text for text in whole) == 1)
    stopped = complete(client, seed=5, n=3, stop=stop, extra_body=ENDLESS).choices
    assert [choice.text for choice in stopped] == [text.partition(stop)[0] for text in whole]
    assert sorted(choice.finish_reason for choice in stopped) == ["length", "length", "stop"]
    wait_until(lambda: engine.engine.scheduler.idle)
