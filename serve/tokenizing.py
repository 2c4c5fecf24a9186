"""Converts texts and conversations to token ids."""

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import with_call_ids
from dflash_toolkit.data.prompts import Message, Tool, apply_template, template_shows

from .protocol import ApiError, Cut
from .text import special_tokens
from .tools_as_text import calls_as_text, tools_as_text

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Encoder:
    """Encodes texts and conversations, from any thread.

    Args:
        limit: tokens of the context. A text with more bytes than they can hold is refused before it is encoded.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._longest = max(len(token.encode()) for token in tokenizer.get_vocab())
        tokenizer.encode("a")  # the first call sets truncation, which is not safe from several threads
        # `tokenizer.encode` calls this backend, and computes offsets that are not needed here
        kind = type(tokenizer)
        plain = kind.encode is PreTrainedTokenizerFast.encode
        plain = plain and getattr(kind, "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
        self._backend = tokenizer.backend_tokenizer if plain else None
        with contextlib.suppress(ApiError):  # compiles the template before the first request
            self.chat([{"role": "user", "content": "a"}])

    def text(self, text: str, special: bool = True, cut: Cut | None = None) -> list[int]:
        """Encodes a text. Raises ApiError (400) if it has too many bytes for the context and no `cut`."""
        if cut is not None:  # encodes only characters that the kept tokens can cover
            most = cut.most * self._longest + 1
            text = text[:most] if cut.side == "right" else text[max(0, len(text) - most) :]
            ids = self._ids(text, special)
            marks = special_tokens(self._tokenizer) if special else {}
            return cut.of(ids, next((i for i, token in enumerate(ids) if token not in marks), 0))
        data = text.encode(errors="replace")  # arguments of calls may have lone surrogates, which no tokenizer encodes
        if (size := len(data)) > (most := self._limit * self._longest):
            raise ApiError(
                400,
                f"the text has {size} bytes, but a context of {self._limit} tokens holds at most {most}; shorten it",
                code="context_length_exceeded",
            )
        return self._ids(data.decode(), special)

    def _ids(self, text: str, special: bool) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)  # without offsets
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = NOTHING,
        cut: Cut | None = None,
        form: str = "hermes",
    ) -> list[int]:
        """Renders a conversation with the chat template and encodes it.

        Args:
            variables: variables for the template.
            form: the form of calls for a template that does not show tools or calls.

        Raises:
            ApiError: (400) as `text`, or the template refuses the messages.
        """
        messages = with_call_ids(messages)
        shows_tools, shows_calls = template_shows(self._tokenizer, tools)
        if not shows_calls:
            messages = calls_as_text(messages, form)
        if tools and not shows_tools:
            messages, tools = tools_as_text(messages, tools, form), ()
        try:
            rendered = apply_template(
                self._tokenizer, messages, variables, tools, tokenize=False, add_generation_prompt=True
            )
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from error
        return self.text(rendered, special=False, cut=cut)
