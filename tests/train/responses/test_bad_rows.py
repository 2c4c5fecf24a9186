"""One bad row never ends a run: it is skipped and counted with its reason."""

from pathlib import Path

import pytest
from conftest import make_tokenizer
from programs import Program, altered, says, user, write

from dflash_toolkit.train.responses.corpus import Corpus

BEYOND = "<beyond>"  # token 320 of a tokenizer for 300 rows of the embedding
REASON = "with a token that the target's embedding lacks"


@pytest.fixture
def enlarged(target_dir: Path, tmp_path: Path) -> Path:
    """A target with more tokens than rows of the embedding."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*(f"<more{i}>" for i in range(59)), BEYOND], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(BEYOND) >= 300
    return altered(target_dir, tmp_path / "enlarged", tokenizer)


@pytest.mark.parametrize("runtime", ["engine", "reference"])
def test_a_prompt_beyond_the_embedding_is_skipped(
    runtime: str, enlarged: Path, dflash_data: Program, tmp_path: Path
) -> None:
    data = write(tmp_path / "p.jsonl", says(f"what is {BEYOND}?", "name a fruit", "and a colour"))
    given = ["--target", enlarged, "--data", data, "--runtime", runtime, "--device", "cpu"]
    said = "\n".join(dflash_data(*given))
    assert f"dropped 1 {REASON} (first: p.jsonl/1)" in said and len(dflash_data.rows()) == 2
    assert "p.jsonl/1" in dflash_data.refuses(*given, "prompts.strict=true", output="other/a.jsonl")


def test_a_recorded_row_beyond_the_embedding_is_skipped(enlarged: Path, dflash_train: Program, tmp_path: Path) -> None:
    texts = [("what is it", f"it is {BEYOND} I think"), ("name a fruit", "a pear or a plum"), ("say it", "as you like")]
    rows = [{"messages": [user(asked), {"role": "assistant", "content": said}]} for asked, said in texts]
    data = write(tmp_path / "p.jsonl", rows)
    given = [
        "--target",
        enlarged,
        "--data",
        data,
        "responses.regenerate=false",
        "prompts.held_out=0",
        "optim.steps=1",
        "drafter.mask_token_id=299",
    ]
    said = "\n".join(dflash_train(*given))
    assert f"dropped responses of the data: 1 {REASON} (first: p.jsonl/1)" in said
    assert len(Corpus.open(dflash_train.output / "work/corpus")) == 2


def test_responses_cut_at_the_limit_are_counted(dflash_data: Program, dflash_train: Program) -> None:
    said = dflash_data("max_tokens=3")
    assert any(line.startswith("warning: 9 of 9 responses are cut at the limit; raise --max-tokens") for line in said)
    assert any("9 of 9 cut at the limit" in line for line in said)
    said = dflash_train("responses.max_tokens=3", "responses.samples=1", "optim.steps=1", "prompts.held_out=0")
    assert any("responses are cut at the limit; raise responses.max_tokens" in line for line in said)
    assert dflash_train.record()["data"]["cut"] > 1


def test_the_training_command_repeats_the_similarity(dflash_data: Program) -> None:
    dflash_data("prompts.similarity=1")
    assert dflash_data.out.strip().endswith("prompts.similarity=1")
