"""Answers in the target's own words: batched generation into a JSONL file that survives any kill.

A row is `{"index", "prompt_tokens", "tokens"}`: token ids of prompt and answer, as the chat template and the target
made them. Nothing is re-tokenised later.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.progress import Progress
from dflash_toolkit.target import Target

from .config import AnswerKnobs


@dataclass(frozen=True, slots=True)
class Row:
    """One training text."""

    index: int  # of its prompt in the data
    prompt_tokens: int  # the first so many tokens are the prompt, the rest is supervised
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered prompt waiting for its answer."""

    index: int
    tokens: list[int]


def read_rows(path: Path) -> list[Row]:
    """The complete rows of an answers file; a line torn by a kill is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open(path, "r+b") as handle:
            handle.truncate(whole)
    return [Row(**json.loads(line)) for line in data[:whole].splitlines()]


def regenerate(target: Target, questions: list[Question], path: Path, knobs: AnswerKnobs, max_length: int) -> list[Row]:
    """Answer every question that `path` does not hold yet, appending as batches finish.

    Args:
        max_length: prompt and answer together; longer answers are cut.

    Returns:
        All rows, in the order of `questions`.

    Raises:
        UserError: the disk is full.
    """
    done = {row.index: row for row in read_rows(path)}
    # the longest prompts first: memory peaks in the first batch, and a batch holds prompts of one length
    todo = sorted((q for q in questions if q.index not in done), key=lambda q: (-len(q.tokens), q.index))
    with Progress("answers", len(questions), unit="tok") as progress:
        progress.advance(len(done), units=0)
        for start in range(0, len(todo), knobs.batch_size):
            batch = todo[start : start + knobs.batch_size]
            rows = _answer(target, batch, knobs, max_length)
            _append(rows, path)
            done |= {row.index: row for row in rows}
            progress.advance(len(rows), units=sum(len(r.tokens) - r.prompt_tokens for r in rows))
    return [done[q.index] for q in questions]


def _append(rows: list[Row], path: Path) -> None:
    try:
        with open(path, "a", encoding="utf-8") as handle:  # closing flushes, and may fail like a write
            handle.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again") from error


@torch.inference_mode()
def _answer(target: Target, batch: list[Question], knobs: AnswerKnobs, max_length: int) -> list[Row]:
    longest = max(len(q.tokens) for q in batch)
    room = max_length - longest
    if room < 2:
        raise UserError(
            f"prompt {batch[0].index} has {longest} tokens, prompts.max_length is {max_length}: no room for an answer"
        )
    pad = target.config.pad_token_id
    if pad is None:
        pad = target.stop_token_ids[0] if target.stop_token_ids else 0
    ids = torch.full((len(batch), longest), pad, device=target.device)
    attention = torch.zeros_like(ids)
    for i, question in enumerate(batch):  # padded on the left
        ids[i, longest - len(question.tokens) :] = torch.tensor(question.tokens, device=target.device)
        attention[i, longest - len(question.tokens) :] = 1
    torch.manual_seed(batch[0].index)  # what is sampled does not depend on what an earlier run left to do
    sampling = {"temperature": knobs.temperature, "top_p": knobs.top_p} if knobs.temperature else {}
    out = target.model.generate(
        input_ids=ids,
        attention_mask=attention,
        generation_config=GenerationConfig(
            max_new_tokens=min(knobs.max_new_tokens, room),
            do_sample=knobs.temperature > 0,
            eos_token_id=list(target.stop_token_ids) or None,
            pad_token_id=pad,
            repetition_penalty=1.0,  # else filled in from the checkpoint's own generation_config
            top_k=0 if knobs.temperature else None,
            **sampling,
        ),
    )
    rows = []
    for question, answer in zip(batch, out[:, longest:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(answer) if token in target.stop_token_ids), len(answer))
        rows.append(Row(question.index, len(question.tokens), question.tokens + answer[:end]))
    return rows
