"""How prompts become token ids: by the target's chat template, by one from a file, or as plain text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import UserError

FORMATS = ("chat", "text")
# the template of plain text: what `encode_text` encodes, and a digest of its own
TEXT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def choose_template(tokenizer: Any, chat_template: str | None = None, prompt_format: str = "chat") -> Any:
    """Returns the tokenizer with the chosen template.

    Args:
        chat_template: a file; None keeps the tokenizer's own template.
        prompt_format: one of `FORMATS`.

    Raises:
        UserError: the file cannot be read, or is not a template.
    """
    if prompt_format == "text":
        tokenizer.chat_template = TEXT
    elif chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"chat_template {chat_template}: cannot be read ({error})") from error
        _check_syntax(tokenizer, chat_template)
    return tokenizer


def _check_syntax(tokenizer: Any, file: str) -> None:
    """Raises UserError if the tokenizer's template, from a file, cannot be parsed."""
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(f"chat_template {file}: line {error.lineno}: {error.message}; correct the file") from error
    except Exception:  # a template may refuse this conversation
        return


def is_text(tokenizer: Any) -> bool:
    """Whether prompts are completed as they are."""
    return bool(tokenizer.chat_template == TEXT)


def encode_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int]:
    """Returns the token ids of one prompt as /v1/completions encodes it, and of its completion, which ends the text.

    Raises:
        UserError: the messages are not one prompt of the user, with or without an answer.
    """
    roles = [message["role"] for message in messages]
    if tools or roles not in (["user"], ["user", "assistant"]):
        found = "tools" if tools else f"messages of {', '.join(roles) or 'no role'}"
        raise UserError(f"prompt_format text completes a single prompt, and this row has {found}; give `prompt` alone")
    ids = list(tokenizer.encode(messages[0]["content"]))
    if len(messages) > 1:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids += [*tokenizer.encode(messages[1]["content"], add_special_tokens=False), *end]
    return ids
