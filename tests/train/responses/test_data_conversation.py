"""Conversations of several turns: what is asked next, what becomes one row, and when it ends."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import EOS, TEMPLATE, make_tokenizer

from dflash_toolkit import SamplingParams
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.decoders import Chat, Response
from dflash_toolkit.generation import Generation
from train.responses.conversation import LiveConversation
from train.responses.generate import seed_of, submit_all
from train.responses.rows import Row

PARAMS = SamplingParams(max_new_tokens=30)
WORDS = make_tokenizer()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def dialogue(*turns: str, max_length: int = 500, tokenizer: object = WORDS) -> LiveConversation:
    asked = Conversation("x", tuple((user(turn),) for turn in turns))
    return LiveConversation(4, 1, asked, tokenizer, PARAMS, max_length)


def said(text: str) -> list[int]:
    return [*WORDS(text).input_ids, EOS]


def answer(talk: LiveConversation, tokens: list[int], reason: str = "stop") -> None:
    assert talk.request is not None
    talk.on_response(Response(0, Generation(tokens, finish_reason=reason)))


def test_turns_that_continue_each_other_are_one_row_with_a_span_for_each_answer() -> None:
    talk = dialogue("one", "two")
    first = encode_chat(WORDS, [user("one")])
    assert talk.request == (first, PARAMS)
    answer(talk, said("yes"))
    second = encode_chat(WORDS, [user("one"), assistant("yes"), user("two")])
    assert talk.request == (second, PARAMS)
    answer(talk, said("no!"))
    assert talk.request is None and talk.dropped is None and talk.answer_tokens == 8
    (part,) = talk.parts
    spans = ((len(first), len(first) + 4), (len(second), len(second) + 4))
    assert part.row == Row(4, len(first), second + said("no!"), spans)
    assert [part.row.tokens[a:b] for a, b in spans] == [said("yes"), said("no!")]
    assert part.messages == [user("one"), assistant("yes"), user("two"), assistant("no!")]


def test_a_turn_that_does_not_continue_the_tokens_becomes_a_row_of_its_own() -> None:
    talk = dialogue("one", "two")
    broken = [*WORDS("a").input_ids, WORDS("\u00e9").input_ids[0], EOS]  # half a character: its text has other tokens
    answer(talk, broken)
    assert talk.request is not None
    prompt = talk.request[0]
    answer(talk, said("yes"))
    first, second = (part.row for part in talk.parts)
    assert first.tokens[first.prompt_tokens :] == broken
    assert second == Row(4, len(prompt), prompt + said("yes"), ((len(prompt), len(prompt) + 4),))


def test_a_template_that_forgets_earlier_answers_gives_rows_that_are_what_a_server_sees() -> None:
    forgetful = make_tokenizer()
    forgetful.chat_template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('|')[-1] }}")
    talk = dialogue("one", "two", tokenizer=forgetful)
    answer(talk, said("think|yes"))
    assert talk.request is not None
    assert talk.request[0] == encode_chat(WORDS, [user("one"), assistant("yes"), user("two")])
    answer(talk, said("no!"))
    assert [part.row.answer_tokens for part in talk.parts] == [10, 4]


@pytest.mark.parametrize(
    "end",
    [
        lambda talk: answer(talk, WORDS("cut").input_ids, "length"),
        lambda talk: answer(talk, [*WORDS("  ").input_ids, EOS]),
    ],
    ids=["cut", "without text"],
)
def test_an_answer_that_cannot_be_gone_on_from_ends_the_conversation(end: Callable[[LiveConversation], None]) -> None:
    talk = dialogue("one", "two")
    end(talk)
    assert talk.request is None and len(talk.parts) == 1


def test_room_shrinks_with_every_turn_and_without_it_the_conversation_ends() -> None:
    first = len(encode_chat(WORDS, [user("one")]))
    talk = dialogue("one", "two", "3", max_length=first + 16)
    assert talk.request is not None and talk.request[1].max_new_tokens == 16
    answer(talk, said("yes"))
    assert talk.request is not None and talk.request[1].max_new_tokens == first + 16 - len(talk.request[0]) < 16
    answer(talk, said("no"))
    assert talk.request is None and talk.dropped is None and len(talk.parts[0].row.spans) == 2
    tight = dialogue("one", max_length=first + 1)
    assert tight.request is None and tight.dropped == "too long"


def test_answers_without_an_anchor_or_of_unknown_tokens_leave_no_row() -> None:
    for tokens, reason in (([EOS], "shorter than two tokens"), ([], "of unknown tokens")):
        talk = dialogue("one")
        answer(talk, tokens)
        assert talk.request is None and talk.parts == [] and talk.dropped == reason


def test_what_is_left_out_of_a_conversation_that_survives_is_said() -> None:
    first = len(encode_chat(WORDS, [user("one")]))
    tight = dialogue("one", "two", max_length=first + 6)
    answer(tight, said("yes"))
    assert tight.dropped is None and tight.left_out == ["later turns too long"]
    picky = make_tokenizer()
    picky.chat_template = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    refused = dialogue("one", "two", tokenizer=picky)
    answer(refused, said("yes"))
    assert refused.dropped is None and refused.left_out == ["later turns refused by the chat template"]
    cut = dialogue("one", "two")
    answer(cut, said("yes")[:-1], "length")
    assert cut.left_out == ["later turns after an answer that was cut or empty"]
    forgetful = make_tokenizer()
    forgetful.chat_template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('|')[-1] }}")
    parted = dialogue("one", "two", tokenizer=forgetful)
    answer(parted, said("think|yes"))
    answer(parted, [EOS])
    assert len(parted.parts) == 1 and parted.left_out == ["parts shorter than two tokens"]
    short = dialogue("one", "two")
    answer(short, [EOS])
    assert short.dropped == "shorter than two tokens" and short.left_out == []
    whole = dialogue("one")
    answer(whole, said("yes")[:-1], "length")
    assert whole.left_out == [] and tight.parts[0].row.answer_tokens == 4


def test_messages_that_the_template_refuses_are_dropped_with_their_reason() -> None:
    refusing = make_tokenizer()
    refusing.chat_template = "{{ raise_exception('no') }}"
    assert dialogue("one", tokenizer=refusing).dropped == "refused by the chat template"


class Backwards:
    """Answers the newest request first."""

    width = 3

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []
        self.most = 0

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        self.asked.append((key, prompt))
        self.most = max(self.most, len(self.asked))

    def wait(self) -> Response:
        key, _ = self.asked.pop()
        return Response(key, Generation(said("yes"), finish_reason="stop"))

    def close(self) -> None:
        pass


def test_no_more_is_begun_than_the_backend_has_use_for_and_every_conversation_ends_once() -> None:
    backend, begun = Backwards(), list[int]()

    def conversations() -> Iterator[LiveConversation]:
        for i in range(7):
            begun.append(i)
            yield dialogue(*["ask"] * (1 + i % 3), max_length=7 if i == 5 else 500)

    ended = []
    for talk in submit_all(backend, conversations()):
        ended.append(talk)
        assert len(begun) - len(ended) <= 3
    assert len({id(talk) for talk in ended}) == len(ended) == 7 and backend.most == 3
    assert sum(bool(talk.dropped) for talk in ended) == 1


def test_a_seed_is_that_of_its_prompt_and_sample_alone() -> None:
    seeds = [seed_of(seed, index, sample) for seed in range(4) for index in range(50) for sample in range(4)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(3, 7, 1) == seed_of(3, 7, 1)
