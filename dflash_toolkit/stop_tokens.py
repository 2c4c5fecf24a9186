"""The tokens that end an answer: one rule for data, training, evaluation, the engine and the server."""

import itertools
from typing import TYPE_CHECKING, Any

from .config import UserError
from .models.structure import end_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

MARK = "dflash"  # a response that no chat template changes


def stop_tokens(
    config: "PreTrainedConfig", generation: "GenerationConfig | None", tokenizer: Any = None
) -> tuple[int, ...]:
    """Returns the ids of all tokens that end an answer of a target.

    These are the token that the chat template writes after a response, the tokenizer's end-of-sequence token, and
    those of generation_config.json and config.json, in this order. Any of the four may lack the one that a model uses.

    Raises:
        UserError: an invalid id.
    """
    found = [] if tokenizer is None else [chat_end(tokenizer), tokenizer.eos_token_id]
    for eos in (getattr(generation, "eos_token_id", None), config.eos_token_id):
        ids = end_ids(eos)
        if any(type(token) is not int for token in ids):
            raise UserError(
                f"target {config.name_or_path}: eos_token_id {eos!r} is neither a token id nor a list of them"
            )
        found += ids
    return tuple(dict.fromkeys(token for token in found if token is not None))


def chat_end(tokenizer: Any) -> int | None:
    """Returns the special token that the chat template writes after every response; None if there is none.

    A template may write another token after the last response (gpt-oss) or a further one (Phi-3), so what follows a
    response counts only as far as it is the same before another question.
    """
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        chats = [tokenizer.apply_chat_template(c, tokenize=False) for c in ([question, answer], [question, answer] * 2)]
    except Exception:  # jinja's own errors and whatever a template raises for these messages
        return None
    if any(MARK not in chat for chat in chats):
        return None
    last, earlier = (tokenizer(chat.partition(MARK)[2], add_special_tokens=False).input_ids for chat in chats)
    always = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
    special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    return next((token for token in reversed(always) if token in special), None)
