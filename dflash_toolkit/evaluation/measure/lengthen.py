"""Lengthens prompts with the text of other prompts, so that the same questions are measured at several lengths."""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...config import UserError
from .measurement import EncodedPrompt, text_of
from .sweeps import chosen

CLOSE = 0.95  # minimum share of the requested length
ATTEMPTS = 20


def lengthened(
    tokenizer: Any, sets: Mapping[str, Sequence[EncodedPrompt]], lengths: Sequence[int], count: int, seed: int
) -> dict[int, list[EncodedPrompt]]:
    """Returns up to `count` prompts, evenly from all sets, at each length: the same questions in the same order.

    Other prompts of the set and their recorded answers stand before the question, in an order that depends on the seed.
    A longer context ends with the shorter one. A prompt has at most `length` tokens and at least CLOSE of them.

    Args:
        lengths: in ascending order.

    Raises:
        UserError: no prompt is short enough, there is only one prompt, or the template does not allow the length.
    """
    everything = [prompt for prompts in sets.values() for prompt in prompts]
    fitting = {name: [p for p in prompts if len(p.token_ids) <= lengths[0]] for name, prompts in sets.items()}
    places = chosen(fitting, count)
    if not places:
        shortest = min(len(prompt.token_ids) for prompt in everything)
        raise UserError(f"context_length {lengths[0]}: the shortest prompt has {shortest} tokens; give larger lengths")
    if too_long := len(everything) - sum(map(len, fitting.values())):
        print(
            f"context_length: skipped {too_long} of {len(everything)} prompts, longer than {lengths[0]} tokens",
            file=sys.stderr,
        )
    found: dict[int, list[EncodedPrompt]] = {length: [] for length in lengths}
    for name, place in places:
        prompt = fitting[name][place]
        others = [other for other in sets[name] if other.asked != prompt.asked] or everything
        filling = _filling(tokenizer, prompt, others, 2 * lengths[-1], seed)
        for length in lengths:
            ids = _of_length(tokenizer, prompt, filling, length)
            found[length].append(replace(prompt, token_ids=ids, rest=None))
    return found


def _filling(
    tokenizer: Any, prompt: EncodedPrompt, others: Sequence[EncodedPrompt], tokens: int, seed: int
) -> list[int]:
    """Returns at least `tokens` tokens of other prompts and their answers, repeated if needed. Raises UserError."""
    texts = [f"{o.asked}\n\n{o.recorded}".strip() + "\n\n" for o in others if o.asked != prompt.asked]
    random.Random(f"{seed}/{prompt.id}").shuffle(texts)
    if not texts:
        raise UserError(f"context_length: prompt {prompt.id!r} is lengthened with other prompts; give at least two")
    ids: list[int] = []
    for text in texts:  # a large set only as far as needed
        ids += tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= tokens:
            return ids
    return ids * (tokens // len(ids) + 1)


def _of_length(tokenizer: Any, prompt: EncodedPrompt, filling: Sequence[int], length: int) -> list[int]:
    """Returns the prompt after the end of `filling`. Raises UserError if it cannot have this length."""
    if prompt.encode_after is None:
        raise UserError(f"context_length: prompt {prompt.id!r} has no message of the user; remove it")
    best, used, tried = prompt.token_ids, length - len(prompt.token_ids), {0}
    while used not in tried and len(tried) <= ATTEMPTS:
        tried.add(used)
        # the first token may be the rest of a character
        ids = prompt.encode_after(text_of(tokenizer, filling[-used:]).lstrip("\ufffd"))
        if len(best) < len(ids) <= length:
            best = ids
        # text of several tokens may become fewer or more of them
        used = min(max(used + length - len(ids), 0), len(filling))
    if len(best) < CLOSE * length:
        raise UserError(
            f"context_length {length}: prompt {prompt.id!r} can have {len(best)} tokens or more than {length}; give "
            f"other lengths"
        )
    return best
