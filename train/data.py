"""Prompts for a run: from files or a public dataset, rendered by the target's chat template, split for measuring."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.prompts import Prompt, encode_chat, file_hash, read_prompts, split_messages

from .answers import Question, Row
from .config import TrainConfig


@dataclass(slots=True)
class PromptData:
    """Rendered prompts of a run."""

    training: list[Question]
    answers: dict[int, str]  # the data's own answers, by question index; used only without regeneration
    held_out: list[list[int]]
    digest: str  # of everything read


def load_prompts(config: TrainConfig, tokenizer: Any) -> PromptData:
    """Read, render and split.

    Raises:
        UserError: unreadable or malformed files, no network for the public dataset, a prompt that leaves no room.
    """
    limit = config.prompts.max_prompts or None
    if config.data:
        prompts = [p for path in config.data for p in read_prompts(path, limit)][:limit]
        digest = file_hash(list(config.data))
    else:
        prompts, digest = _from_hub(config)
    if config.held_out:
        held_out = [p for path in config.held_out for p in read_prompts(path)]
        digest = hashlib.sha256((digest + file_hash(list(config.held_out))).encode()).hexdigest()
    else:
        count = min(config.prompts.held_out, len(prompts) // 2)
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(config.run.seed)).tolist()
        chosen = set(order[:count])
        held_out = [p for i, p in enumerate(prompts) if i in chosen]
        prompts = [p for i, p in enumerate(prompts) if i not in chosen]

    def render(prompt: Prompt) -> list[int]:
        ids = encode_chat(tokenizer, prompt.messages, config.answers.thinking)
        if len(ids) > config.prompts.max_length - 2:
            raise UserError(
                f"prompt {prompt.id} has {len(ids)} tokens, prompts.max_length is {config.prompts.max_length}: "
                f"no room for an answer; raise it or shorten the prompt"
            )
        return ids

    questions = [Question(i, render(p)) for i, p in enumerate(prompts)]
    answers = {i: p.answer for i, p in enumerate(prompts) if p.answer is not None}
    return PromptData(questions, answers, [render(p) for p in held_out], digest)


def _from_hub(config: TrainConfig) -> tuple[list[Prompt], str]:
    name = config.prompts.dataset
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"reading {name} needs datasets: pip install 'dflash-toolkit[train]', or give --data FILE"
        ) from error
    try:
        data = datasets.load_dataset(name, split=config.prompts.split)
    except Exception as error:  # the hub client raises a dozen kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"dataset {name} cannot be loaded ({reason}); without a network give --data FILE") from error
    data = data.shuffle(seed=config.run.seed)
    if config.prompts.max_prompts:
        data = data.select(range(min(config.prompts.max_prompts, len(data))))
    prompts = [_from_row(row, i) for i, row in enumerate(data)]
    kept = [p for p in prompts if p is not None]
    if not kept:
        raise UserError(f"dataset {name} has no `messages`, `conversations` or `prompt` column; give --data FILE")
    return kept, f"{name}/{config.prompts.split}/{data._fingerprint}"


ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


def _from_row(row: dict[str, Any], index: int) -> Prompt | None:
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        return Prompt(str(index), ({"role": "user", "content": row["prompt"]},)) if row.get("prompt") else None
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from"))
        messages.append({"role": ROLES.get(role, role), "content": turn.get("content", turn.get("value")) or ""})
    asked, answer = split_messages(messages)
    return Prompt(str(index), tuple(asked), answer) if asked and asked[-1]["content"].strip() else None


def rows_from_answers(data: PromptData, tokenizer: Any, stop_id: int | None, max_length: int) -> list[Row]:
    """Rows from the answers the data holds: the rendered prompt, the answer's tokens, the end-of-sequence token.

    Raises:
        UserError: a prompt has no answer.
    """
    rows = []
    for question in data.training:
        if question.index not in data.answers:
            raise UserError(f"prompt {question.index} has no answer; answers.regenerate=true lets the target write it")
        answer = tokenizer(data.answers[question.index], add_special_tokens=False).input_ids
        tokens = question.tokens + list(answer) + ([] if stop_id is None else [stop_id])
        rows.append(Row(question.index, len(question.tokens), tokens[:max_length]))
    return rows


def with_anchors(rows: list[Row]) -> list[Row]:
    """Rows that hold at least one anchor: two supervised tokens in a row."""
    return [row for row in rows if len(row.tokens) - row.prompt_tokens >= 2]
