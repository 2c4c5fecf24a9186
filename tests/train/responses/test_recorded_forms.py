"""Recorded answers with reasoning, weights and calls written as text: which tokens a drafter learns from."""

import json
from typing import Any

import pytest
from conftest import EOS, TEMPLATE
from programs import assistant, user
from response_servers import PARAMS, WORDS
from response_servers import respond as answer
from response_servers import response_tokens as said
from response_servers import tokenizer_with as words

from dflash_toolkit.data.conversations import conversation
from dflash_toolkit.data.messages import REASONING
from dflash_toolkit.train.responses.conversation import REFUSED, LiveConversation, recorded_rows

THOUGHT = "{% if m.NAME and loop.last %}<think>{{ m.NAME }}</think>{% endif %}{{ m['content'] }}"
TAGGED = TEMPLATE.replace(
    "{{ m['content'] }}<|end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}",
)
CHAT = [user("a"), assistant("b"), user("c"), assistant("d")]


def learned(template: str, messages: list[dict[str, Any]]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Returns each supervised text with the text before it, and the counts of what is dropped."""
    found = conversation({"messages": messages}, "x")
    rows, dropped = recorded_rows(words(template), found.recorded, found.tools, {EOS})
    texts = [
        (WORDS.decode(row.tokens[:start]), WORDS.decode(row.tokens[start:end]))
        for row in rows
        for start, end in row.supervised
    ]
    return texts, dict(dropped)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", REASONING)
def test_reasoning_reaches_the_template_under_its_name(name: str, given: str) -> None:
    template = TEMPLATE.replace("{{ m['content'] }}", THOUGHT.replace("NAME", name))
    chat = [user("a"), assistant("b") | {given: "t"}, user("c"), assistant("d") | {given: "u"}]
    texts, dropped = learned(template, chat)
    assert [text for _, text in texts] == ["<think>t</think>b<|end|>", "<think>u</think>d<|end|>"] and not dropped
    assert "think" not in texts[1][0], "the template leaves out earlier reasoning"


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_reasoning_that_the_template_leaves_out_is_refused(template: str) -> None:
    ((_, text),), dropped = learned(template, [user("a"), assistant("b") | {"reasoning": "\n"}])
    assert text == "b<|end|>" and not dropped, "blank reasoning may be left out"
    texts, dropped = learned(template, [user("a"), assistant("b") | {"reasoning": "t"}])
    assert (texts, dropped) == ([], {f"{REFUSED}, which leaves out reasoning": 1})


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED])
def test_turns_with_weight_0_are_only_context(template: str) -> None:
    ((before, text),), dropped = learned(template, [user("a"), assistant("b") | {"weight": 0}, *CHAT[2:]])
    assert text == "d<|end|>" and "b<|end|>" in before and not dropped
    assert learned(template, [user("a"), assistant("b") | {"weight": 0}]) == ([], {"with weight 0 only": 1})


@pytest.mark.parametrize("opened", ["<think>", "<think>\n"])
def test_plain_replies_are_kept_if_the_prompt_opens_think(opened: str) -> None:
    template = TEMPLATE.replace("<|assistant|>{% endif %}", f"<|assistant|>{opened}{{% endif %}}")
    assert template != TEMPLATE
    texts, dropped = learned(template, CHAT)
    assert [text for _, text in texts] == ["b<|end|>", "d<|end|>"] and not dropped
    assert texts[0][0].endswith("<|assistant|>") and "think" not in texts[1][0]
    ((before, text),), _ = learned(template, [user("a"), assistant(f"{opened}t</think>b")])
    assert before.endswith(opened) and text == "t</think>b<|end|>"


def test_a_call_written_as_text_goes_before_its_result() -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "={{ c.function | tojson }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tool = {"type": "function", "function": {"name": "price"}}
    call = '<tool_call>{"name": "price", "arguments": {"of": "x"}}</tool_call>'
    turns = [("system", f"<tools>[{json.dumps(tool)}]</tools>"), ("human", "a"), ("gpt", call)]
    turns += [("tool", "<tool_response>7</tool_response>"), ("gpt", "Seven.")]
    row = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([tool])}
    talk = LiveConversation(0, 0, conversation(row, "x"), words(template), PARAMS, 1000)
    answer(talk, said("No."))
    assert talk.request is not None
    expected = (
        f'[{json.dumps(tool)}]<user>a<assistant>={{"name": "price", "arguments": {{"of": "x"}}}}<tool>7<assistant>'
    )
    assert WORDS.decode(talk.request[0]) == expected
