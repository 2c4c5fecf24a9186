"""Prompts for a run: from files or a public dataset, rendered by the target's chat template, split for measuring."""

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.progress import Progress
from dflash_toolkit.prompts import (
    MALFORMED,
    Prompt,
    encode_chat,
    file_hash,
    read_chat,
    read_prompts,
    split_messages,
    template_hash,
)
from dflash_toolkit.sources import kind_of, load_rows
from dflash_toolkit.target import load_config

from .answer_file import read_training_rows
from .answers import Question, Row
from .config import TrainConfig
from .dialogue import REFUSED, recorded_rows


@dataclass(slots=True)
class PromptData:
    """Rendered prompts of a run."""

    training: list[Question]
    recorded: dict[int, Prompt]  # with answers of the data's own, by question index; used only without regeneration
    held_out: list[list[int]]
    digest: str  # of everything read
    rows: list[Row] = field(default_factory=list)  # of answers files, which leave nothing to ask
    samplers: list[dict[str, Any]] = field(default_factory=list)  # that wrote them


def load_prompts(config: TrainConfig, tokenizer: Any) -> PromptData:
    """Read, render and split.

    Raises:
        UserError: unreadable or malformed files, no network for the public dataset, a prompt that leaves no room,
            or, where it is not to be written, has no answer.
    """
    if config.answer_files:
        return _from_answers(config, tokenizer)
    limit = config.prompts.max_prompts or None
    if config.data:
        prompts = [p for path in config.data for p in _read(path, limit)][:limit]
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

    # in a public dataset a few prompts will not fit; in the user's own file that is a mistake
    strict = bool(config.data)
    rendered = _render(prompts, config, tokenizer, strict)
    asked = [ids for ids in _render(held_out, config, tokenizer, strict or bool(config.held_out)) if ids]
    # a prompt that stands there twice is not trained on and measured on; files of one's own are what one wants
    kept_out = set() if config.held_out else {tuple(ids) for ids in asked}
    questions = [Question(i, ids) for i, ids in enumerate(rendered) if ids and tuple(ids) not in kept_out]
    if not questions:
        raise UserError("no prompt is left to train on; give more data or a smaller prompts.held_out")
    lacking = [prompts[q.index].id for q in questions if not prompts[q.index].rest]
    if lacking and not config.answers.regenerate:
        raise UserError(f"prompt {lacking[0]} has no answer; answers.regenerate=true lets the target write it")
    return PromptData(questions, {i: p for i, p in enumerate(prompts) if p.rest}, asked, digest)


def _read(path: str, limit: int | None) -> list[Prompt]:
    try:
        return read_prompts(path, limit)
    except UserError as error:
        if Path(path).is_file() and kind_of(Path(path)) in (".json", ".parquet", ".txt"):
            way_out = "dflash-data reads such a file, and --answers takes what it writes"
            raise UserError(f"{error}; --data is read as JSON lines: {way_out}") from error
        raise


def _render(prompts: list[Prompt], config: TrainConfig, tokenizer: Any, strict: bool) -> list[list[int]]:
    """Token ids of every prompt; an empty list for one that does not fit, or that the template refuses, unless `strict`
    makes that an error."""
    room = config.prompts.max_length - 2
    rendered = []
    refused = 0
    with Progress("prompts", len(prompts)) as progress:
        for prompt in prompts:
            try:
                ids = encode_chat(tokenizer, prompt.messages, config.answers.thinking, prompt.tools)
            except UserError as error:
                if strict or not tokenizer.chat_template:
                    raise UserError(f"prompt {prompt.id}: {error}") from error
                ids = []
                refused += 1
            if len(ids) > room and strict:
                raise UserError(
                    f"prompt {prompt.id} has {len(ids)} tokens, prompts.max_length is {config.prompts.max_length}: "
                    f"no room for an answer; raise it or shorten the prompt"
                )
            rendered.append(ids if len(ids) <= room else [])
            progress.advance()
        if dropped := sum(not ids for ids in rendered) - refused:
            progress.print(f"dropped {dropped} of {len(prompts)} prompts: longer than prompts.max_length allows")
        if refused:
            progress.print(f"dropped {refused} of {len(prompts)} prompts: {REFUSED}")
    return rendered


def _from_answers(config: TrainConfig, tokenizer: Any) -> PromptData:
    """Rows that dflash-data wrote; without files of held-out prompts, all rows of some prompts are kept out.

    Prompts of files are rendered as those of the answers were, unless `answers.thinking` says how.
    """
    vocabulary = int(load_config(config.target).vocab_size)
    found = read_training_rows(config.answer_files, config.target, vocabulary, template_hash(tokenizer))
    digest = file_hash([*config.answer_files, *config.held_out])
    if config.held_out:
        modes = {sampler.get("thinking") for sampler in found.samplers}
        if config.answers.thinking is None and len(modes) == 1:
            config = replace(config, answers=replace(config.answers, thinking=modes.pop()))
        prompts = [p for path in config.held_out for p in read_prompts(path)]
        held_out, rows = _render(prompts, config, tokenizer, strict=True), found.rows
    else:
        distinct = len({tuple(row.tokens[: row.prompt_tokens]) for row in found.rows})
        rows, first = hold_out(found.rows, min(config.prompts.held_out, distinct // 2), config.run.seed)
        room = config.prompts.max_length - 2
        held_out = [list(map(int, row.tokens[: row.prompt_tokens])) for row in first if row.prompt_tokens <= room]
    return PromptData([], {}, held_out, digest, [row.cut(config.prompts.max_length) for row in rows], found.samplers)


def _from_hub(config: TrainConfig) -> tuple[list[Prompt], str]:
    name = config.prompts.dataset
    data = load_rows(name, name, split=config.prompts.split)
    data = data.shuffle(seed=config.run.seed)
    if config.prompts.max_prompts:
        data = data.select(range(min(config.prompts.max_prompts, len(data))))
    prompts = [_from_row(row, i) for i, row in enumerate(data)]
    kept = [p for p in prompts if p is not None]
    if not kept:
        raise UserError(f"dataset {name} has no `messages`, `conversations` or `prompt` column; give --data FILE")
    return kept, f"{name}/{config.prompts.split}/{data._fingerprint}"


def _from_row(row: dict[str, Any], index: int) -> Prompt | None:
    """The first question of a row and what follows it; None for a row that has none in a shape that is known."""
    try:
        messages, tools = read_chat(row)
    except MALFORMED:
        return None
    asked, rest = split_messages(messages)
    if [message["role"] for message in asked] not in (["user"], ["system", "user"]):
        return None
    if not isinstance(asked[-1]["content"], str) or not asked[-1]["content"].strip():
        return None
    text = all(isinstance(message["content"], str) for message in rest)
    return Prompt(str(index), tuple(asked), tuple(rest) if text else (), tools)


def rows_from_answers(
    data: PromptData, tokenizer: Any, stop_ids: Collection[int], max_length: int, thinking: bool | None = None
) -> list[Row]:
    """Rows from the answers the data holds, as the chat template renders them (`recorded_rows`), renumbered.

    Raises:
        UserError: an answer is no text, or none fits the template.
    """
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    stops = {*stop_ids, tokenizer.eos_token_id}
    with Progress("answers", len(data.training)) as progress:
        for question in data.training:
            prompt = data.recorded[question.index]
            try:
                "".join(message["content"] for message in prompt.rest).encode()
            except UnicodeError as error:  # half of a surrogate pair
                raise UserError(f"the answer to prompt {prompt.id} is no valid text ({error})") from error
            found, lost = recorded_rows(tokenizer, (*prompt.messages, *prompt.rest), prompt.tools, stops, thinking)
            rows += [replace(row, index=len(rows) + i).cut(max_length) for i, row in enumerate(found)]
            left_out += lost
            progress.advance()
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        if not rows:
            raise UserError(f"none of the data's answers can be trained on: {reasons}")
        if reasons:
            progress.print(f"dropped answers of the data: {reasons}")
    return rows


def with_anchors(rows: list[Row]) -> list[Row]:
    """Rows that hold at least one anchor: two supervised tokens in a row."""
    return [row for row in rows if row.has_anchor]


def usable(rows: list[Row], longest: int, forbidden: set[tuple[int, ...]]) -> tuple[list[Row], dict[str, int]]:
    """Rows to train on, each there once, cut to `longest` and renumbered, and how many were left out for what.

    Args:
        forbidden: prompts (token ids) that are measured on.

    Raises:
        UserError: none is left.
    """
    left_out = dict.fromkeys(("repeated", "in_evaluation", "too_short"), 0)
    measured = {digest(prompt) for prompt in forbidden}
    seen: set[bytes] = set()
    kept: list[Row] = []
    for row in (row.cut(longest) for row in rows):
        tokens = digest(row.tokens)
        if tokens in seen:
            left_out["repeated"] += 1
        elif digest(row.tokens[: row.prompt_tokens]) in measured:
            left_out["in_evaluation"] += 1
        elif not row.has_anchor:
            left_out["too_short"] += 1
        else:
            kept.append(replace(row, index=len(kept)))
        seen.add(tokens)
    if not kept:
        raise UserError(f"none of {len(rows)} answers can be trained on: {left_out}")
    return kept, left_out


def hold_out(rows: list[Row], prompts: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and the first row of each of so many prompts, all of whose rows are kept out.

    Raises:
        UserError: there are not more prompts than that.
    """
    prompts_of = [digest(row.tokens[: row.prompt_tokens]) for row in rows]
    by_prompt = dict(zip(reversed(prompts_of), reversed(rows), strict=True))
    names = list(by_prompt)
    if prompts >= len(names):
        raise UserError(f"{prompts} prompts are to be kept out of training and there are {len(names)}; keep fewer out")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {names[i] for i in order[:prompts]}
    training = [row for row, name in zip(rows, prompts_of, strict=True) if name not in chosen]
    return training, [by_prompt[name] for name in names if name in chosen]


def digest(tokens: npt.ArrayLike) -> bytes:
    """What stands for token ids where they are compared."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()
