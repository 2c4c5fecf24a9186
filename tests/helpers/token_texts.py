"""Tokenizers of two kinds, tokens to decode with them, and reference results."""

import itertools
from typing import Any

from conftest import VOCAB, make_tokenizer
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_toolkit.serve.logprobs import TokenStrings

BYTES = make_tokenizer()


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with Llama 2's decoder: `▁` is a space except at the start, unknown characters are bytes."""
    vocab = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3, "▁é": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


PIECES = sentencepiece_like()


def encode(text: str) -> list[int]:
    return BYTES.encode(text)


def cut(items: Any, cuts: list[int]) -> list[Any]:
    """Cuts `items` into pieces that end at the given indices (modulo the length)."""
    places = sorted({0, len(items), *(c % (len(items) + 1) for c in cuts)})
    return [items[a:b] for a, b in itertools.pairwise(places)]


texts = st.text(alphabet="ab é→😀\ufffd", max_size=12)

byte_ids = st.lists(st.integers(0, VOCAB - 1), max_size=20) | texts.map(encode)

cuts = st.lists(st.integers(0, 100), max_size=6)


def first_stop(text: str, stops: list[str], include: bool = False, least: int = 0) -> str:
    """Returns the text up to the first stop string that ends after `least` bytes, by reading each character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts and len(text[:end].encode()) > least:
            return text[: end if include else min(starts)]
    return text


BYTE_OF = {BYTES.convert_tokens_to_ids(letter): bytes([byte]) for byte, letter in bytes_to_unicode().items()}


def named(token: int) -> tuple[str, list[int] | None]:
    """Returns a token's name in a chat, and its bytes."""
    if token not in BYTE_OF:
        return BYTES.decode([token]), None
    raw = BYTE_OF[token]
    return (raw.decode() if raw.isascii() else f"\\x{raw.hex()}"), list(raw)


def text_name(token: int) -> str:
    """Returns a token's name in a completion."""
    name, raw = named(token)
    return name if raw is None or raw[0] < 128 else f"bytes:{name}"


SPELLING = TokenStrings(BYTES)
