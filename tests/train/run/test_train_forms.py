"""dflash-train on files as users have them: each trains a drafter, and what it did not read is listed."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import Program, assistant, train_argv, user, write

ASKED = [f"name {word} please" for word in ("one", "two", "six", "ten", "red", "big")]


def sharegpt(folder: Path) -> Path:
    chats = [[{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}] for text in ASKED]
    rows = [{"id": str(i), "conversations": chat} for i, chat in enumerate([*chats, [], chats[0][1:]])]
    (folder / "sharegpt.json").write_text(json.dumps(rows))
    return folder / "sharegpt.json"


def wildchat(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    turns = [[user(text) | {"language": "English"}, assistant("yes") | {"language": None}] for text in ASKED]
    rows = [{"conversation_id": str(i), "model": "m", "conversation": turn} for i, turn in enumerate(turns)]
    with open(folder / "wildchat.parquet", "wb") as file:
        datasets.Dataset.from_list(rows).to_parquet(file)
    return folder / "wildchat.parquet"


def dolly(folder: Path) -> Path:
    rows = [{"instruction": text, "context": "in a shop", "response": "yes", "category": "qa"} for text in ASKED]
    return write(folder / "dolly.jsonl", rows)


def batch(folder: Path) -> Path:
    bodies = [{"model": "m", "messages": [user(text)]} for text in ASKED]
    return write(folder / "batch.jsonl", [{"custom_id": str(i), "body": body} for i, body in enumerate(bodies)])


def logs(folder: Path) -> Path:
    (folder / "logs").mkdir()
    for number in (0, 1):
        rows = [
            {"request": {"messages": [user(text)]}, "response": {"choices": [{"message": assistant("yes")}]}}
            for text in ASKED[3 * number :][:3]
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "logs" / f"{number}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder / "logs"


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (sharegpt, None),
        (wildchat, "wildchat.parquet: not read: conversation[].language, conversation_id, model (all rows)"),
        (dolly, None),
        (batch, "batch.jsonl: not read: body.model (all rows)"),
        (logs, None),
    ],
    indirect=["data"],
)
def test_every_form_of_file_trains_a_drafter(data: Path, said: str | None, dflash_train: Program) -> None:
    argv = [
        "optim.steps=1", "prompts.held_out=1", "run.evaluate_prompts=1", "responses.max_tokens=6",
        "prompts.strict=false", "prompts.similarity=1",
    ]  # fmt: skip
    heard = replace(dflash_train, argv=lambda *words: train_argv(*words, *argv))()
    listed: list[Any] = [line for line in heard if "not read" in line]
    assert listed == ([said] if said else [])
    assert (dflash_train.output / "model.safetensors").exists()
    counts = dflash_train.record()["data"]
    assert counts["prompts"] + counts["held_out"] == len(ASKED)
