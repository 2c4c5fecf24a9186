"""Runs that go on with something changed or damaged, inputs of another kind, answers that are not as they should be:
one line that names it, or the right thing."""

from pathlib import Path

import pytest
from conftest import answers_of
from programs import altered, says, write
from response_files import eight_responses as answers

from dflash_toolkit.fingerprint import template_digest
from dflash_toolkit.models.target import load_tokenizer
from dflash_toolkit.train.config import TrainConfig

# ---- answers of dflash-data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "ending"), [(None, "off"), (True, "on")])
def test_held_out_prompts_are_rendered_as_those_of_the_answers_were(
    option: bool | None, ending: str, target_dir: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(target_dir))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking is not defined %}unset{% elif enable_thinking %}on{% else %}off{% endif %}"
    )
    mine = str(altered(target_dir, tmp_path / "mine", tokenizer))
    sampler, template = {"temperature": 0.0, "thinking": False}, template_digest(load_tokenizer(mine))
    path = answers(tmp_path / "a.jsonl", target=mine, sampler=sampler, template_hash=template)
    held_out = write(tmp_path / "h.jsonl", says("ask"))
    config = TrainConfig(target=mine, response_files=(str(path),), held_out=(str(held_out),))
    if option is not None:
        object.__setattr__(config.responses, "thinking", option)
    _, held = answers_of(config, tokenizer, tmp_path / "w")
    assert [tokenizer.decode(ids) for ids in held] == [f"ask{ending}"]
