"""Conversations of several turns: what is asked next, what becomes one row, and when it ends."""

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import EOS, TEMPLATE, make_tokenizer
from programs import assistant, user
from response_servers import PARAMS, WORDS
from response_servers import respond as answer
from response_servers import response_tokens as said

from dflash_toolkit import SamplingParams
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.evaluation.measure.decoders import Chat, Response
from dflash_toolkit.generation import Generation
from dflash_toolkit.train.responses.conversation import LiveConversation
from dflash_toolkit.train.responses.generate import seed_of, submit_all
from dflash_toolkit.train.responses.rows import Row

FIRST = len(encode_chat(WORDS, [user("one")]))
FORGETFUL = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('|')[-1] }}")
REFUSES = "{{ raise_exception('no') }}"
PICKY = "{% if messages | length > 1 %}" + REFUSES + "{% endif %}" + TEMPLATE


def dialogue(*turns: str, room: int = 480, template: str = TEMPLATE) -> LiveConversation:
    """Returns a conversation with room for this many tokens after the first prompt."""
    asked, tokenizer = Conversation("x", tuple((user(turn),) for turn in turns)), make_tokenizer()
    tokenizer.chat_template = template
    return LiveConversation(4, 1, asked, tokenizer, PARAMS, FIRST + room)


def test_continuing_turns_are_one_row_with_spans() -> None:
    talk = dialogue("one", "two")
    first = encode_chat(WORDS, [user("one")])
    assert talk.request == (first, PARAMS)
    answer(talk, said("yes"))
    second = encode_chat(WORDS, [user("one"), assistant("yes"), user("two")])
    assert talk.request == (second, PARAMS)
    answer(talk, said("no!"))
    assert talk.request is None and talk.dropped is None and talk.response_tokens == 8
    (part,) = talk.parts
    spans = ((len(first), len(first) + 4), (len(second), len(second) + 4))
    assert part.row == Row(4, len(first), second + said("no!"), spans)
    assert [part.row.tokens[a:b] for a, b in spans] == [said("yes"), said("no!")]
    assert part.messages == [user("one"), assistant("yes"), user("two"), assistant("no!")]


def test_a_turn_that_changes_tokens_starts_a_row() -> None:
    talk = dialogue("one", "two")
    broken = [*WORDS("a").input_ids, WORDS("\u00e9").input_ids[0], EOS]  # half a character: its text has other tokens
    answer(talk, broken)
    assert talk.request is not None
    prompt = talk.request[0]
    answer(talk, said("yes"))
    first, second = (part.row for part in talk.parts)
    assert first.tokens[first.prompt_tokens :] == broken
    assert second == Row(4, len(prompt), prompt + said("yes"), ((len(prompt), len(prompt) + 4),))


def test_forgetful_templates_give_rows_as_served() -> None:
    talk = dialogue("one", "two", template=FORGETFUL)
    answer(talk, said("think|yes"))
    assert talk.request is not None
    assert talk.request[0] == encode_chat(WORDS, [user("one"), assistant("yes"), user("two")])
    answer(talk, said("no!"))
    assert [part.row.response_tokens for part in talk.parts] == [10, 4]


HARMONY = """{% for m in messages %}{% if '<|channel|>' in m['content'] %}{{ raise_exception('tags') }}{% endif %}
{{- '<|start|>' + m['role'] + ('<|channel|>final' if m['role'] == 'assistant' else '') + '<|message|>' + m['content'] }}
{{- '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


@pytest.mark.parametrize(
    ("tail", "next_turn"),
    [
        ("<|channel|>final<|message|>yes", "yes"),
        ("<|channel|>final <|constrain|>json<|message|>yes", "yes"),
        ("<|channel|>commentary to=functions.f<|message|>{}", None),  # a call, which is not run
        ("", None),
    ],
)
def test_the_next_turn_gets_the_final_channel(tail: str, next_turn: str | None) -> None:
    tokenizer = make_tokenizer()
    tags = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.chat_template = HARMONY
    asked = Conversation("x", ((user("one"),), (user("two"),)))
    talk = LiveConversation(4, 1, asked, tokenizer, PARAMS, 400)
    tokens = tokenizer("<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + tail).input_ids
    answer(talk, [*tokens, EOS])
    assert talk.parts[0].row.tokens[-len(tokens) - 1 : -1] == tokens, "the response itself is trained on whole"
    if next_turn is None:
        assert talk.request is None and talk.left_out == [CUT]
        return
    assert talk.request is not None
    assert talk.request[0] == encode_chat(tokenizer, [user("one"), assistant(next_turn), user("two")])


QWEN = """{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}
{{- m['content'].split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m['content'] }}{% endif %}
{{- '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
GEMMA = """{% macro strip(text) %}{% for part in text.split('<channel|>') %}{{ part.split('<|channel>')[0] }}
{%- endfor %}{% endmacro %}{% if enable_thinking is defined and enable_thinking %}
{{- '<|turn>system\\n<|think|><turn|>' }}{% endif %}
{%- for m in messages %}{{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}
{{- strip(m['content']) if m['role'] == 'assistant' else m['content'] }}{{ '<turn|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize(
    ("template", "tags", "words", "special", "response"),
    [
        (QWEN, [], ["<think>", "</think>"], "<|end|>", "<think>\nhm\n</think>\n\nyes"),
        (QWEN, ["<think>", "</think>"], [], "<|end|>", "<think>\nhm\n</think>\n\nyes"),
        (GEMMA, ["<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|think|>"], [], "<turn|>",
         "<|channel>thought\nhm<channel|>yes"),
    ],
    ids=["qwen", "qwen-special", "gemma"],
)  # fmt: skip
def test_thoughts_are_trained_on_but_templated_in_next_turns(
    template: str, tags: list[str], words: list[str], special: str, response: str, thinking: bool | None
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.add_tokens(words)
    tokenizer.chat_template = template
    asked = Conversation("x", ((user("one"),), (user("two"),)))
    talk = LiveConversation(4, 1, asked, tokenizer, PARAMS, 400, thinking)
    assert talk.request is not None
    first = talk.request[0]
    assert first == encode_chat(tokenizer, [user("one")], thinking)
    plain = encode_chat(tokenizer, [user("one")])
    assert (first == plain) == (thinking is not (template is not QWEN)), "what is not the template's own"
    tokens = [*tokenizer(response).input_ids, tokenizer.convert_tokens_to_ids(special)]
    answer(talk, tokens)
    assert talk.request is not None
    second = talk.request[0]
    assert second == encode_chat(tokenizer, [user("one"), assistant("yes"), user("two")], thinking)
    answer(talk, tokens)
    rows = [part.row for part in talk.parts]
    assert [row.tokens for row in rows] == [first + tokens, second + tokens]
    assert all(row.spans == ((row.prompt_tokens, len(row.tokens)),) for row in rows)


def test_a_conversation_ends_without_room() -> None:
    talk = dialogue("one", "two", "3", room=16)
    assert talk.request is not None and talk.request[1].max_tokens == 16
    answer(talk, said("yes"))
    assert talk.request is not None and talk.request[1].max_tokens == FIRST + 16 - len(talk.request[0]) < 16
    answer(talk, said("no"))
    assert talk.request is None and talk.dropped is None and len(talk.parts[0].row.spans) == 2


CUT = "later turns after an answer that was cut or empty"


@pytest.mark.parametrize(
    ("turns", "options", "answers", "parts", "dropped", "left_out"),
    [
        (["one", "two"], {}, ["cut..."], 1, None, [CUT]),
        (["one", "two"], {}, ["  "], 1, None, [CUT]),
        (["one", "two"], {"room": 6}, ["yes"], 1, None, ["later turns too long"]),
        (["one", "two"], {"template": PICKY}, ["yes"], 1, None, ["later turns refused by the chat template"]),
        (["one", "two"], {"template": FORGETFUL}, ["think|yes", ""], 1, None, ["parts shorter than two tokens"]),
        (["one", "two"], {}, [""], 0, "shorter than two tokens", []),  # no anchor
        (["one"], {}, ["unknown"], 0, "of unknown tokens", []),
        (["one"], {}, ["cut..."], 1, None, []),
        (["one"], {"room": 1}, [], 0, "too long", []),
        (["one"], {"template": REFUSES}, [], 0, "refused by the chat template", []),
    ],
)
def test_an_early_end_of_a_conversation_has_a_reason(
    turns: list[str], options: Any, answers: list[str], parts: int, dropped: str | None, left_out: list[str]
) -> None:
    talk = dialogue(*turns, **options)
    for text in answers:
        tokens = {"unknown": [], "cut...": said(text)[:-1]}.get(text, said(text))
        answer(talk, tokens, "length" if text == "cut..." else "stop")
    assert (talk.request, len(talk.parts), talk.dropped, talk.left_out) == (None, parts, dropped, left_out)


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


def test_submit_all_keeps_within_the_backends_width() -> None:
    backend, begun = Backwards(), list[int]()

    def conversations() -> Iterator[LiveConversation]:
        for i in range(7):
            begun.append(i)
            yield dialogue(*["ask"] * (1 + i % 3), room=1 if i == 5 else 480)

    ended = []
    for talk in submit_all(backend, conversations()):
        ended.append(talk)
        assert len(begun) - len(ended) <= 3
    assert len({id(talk) for talk in ended}) == len(ended) == 7 and backend.most == 3
    assert sum(bool(talk.dropped) for talk in ended) == 1


def test_response_seed_depends_only_on_prompt_and_sample() -> None:
    seeds = [seed_of(seed, index, sample) for seed in range(4) for index in range(50) for sample in range(4)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
