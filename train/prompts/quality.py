"""Judges texts that a target wrote as a user: what is no prompt is left out, with a reason."""

import re
import unicodedata
import zlib
from collections import Counter

LEAST_CHARACTERS, LEAST_WORDS = 12, 3
LONGEST_WORD = 80  # characters; longer ones are noise or data
LEAST_READABLE = 0.6  # share of letters, digits and spaces
MOST_COMPRESSED = 0.25  # compressed size of a text that repeats itself
REPETITIVE_FROM = 200  # characters; shorter texts compress badly
MAIN_SCRIPT = 0.7  # share of the letters in the asked script
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
MARKS = re.compile(r"<\|[^|>]*\|>|</?s>|\[/?INST\]|<(start|end)_of_turn>|^(assistant|user|system)\s*:", re.I | re.M)
ANSWER = re.compile(  # the beginning of an assistant's answer or refusal
    r"(i'm sorry|i am sorry|sorry, (but )?i|i apologi[sz]e|i can(no|')t|i'm (unable|not able)|"
    r"i'm (just )?an? (ai|language model|assistant)|as an? (ai|language model|assistant)|unfortunately, i|"
    r"(sure|certainly|of course|absolutely)[!,.]|here(')?s (a|an|the|your)\b|here (is|are) (a|an|the|some|your)\b|"
    r"hello! how can i|how (can|may) i (help|assist) you)",
    re.I,
)
SHORT, NOISE, REPETITION = "too short", "unreadable", "repetitive"
TEMPLATE, LIKE_AN_ANSWER, OTHER_SCRIPT = "with marks of a template", "like an answer or a refusal", "in another script"


def fault_of(text: str, script: str | None = None) -> str | None:
    """Returns why a text is not used as a prompt, or None.

    Args:
        script: the script that most letters must have, as Unicode names it: latin, cyrillic, cjk, ...
    """
    words = text.split()
    if len(text) < LEAST_CHARACTERS or len(words) + len(CJK.findall(text)) < LEAST_WORDS:
        return SHORT
    readable = sum(character.isalnum() or character.isspace() for character in text) / len(text)
    strange = any((unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\n\t\r") or c == "\ufffd" for c in text)
    if strange or readable < LEAST_READABLE or any(len(word) > LONGEST_WORD and not CJK.search(word) for word in words):
        return NOISE
    raw = text.encode(errors="surrogatepass")
    if len(text) >= REPETITIVE_FROM and len(zlib.compress(raw)) / len(raw) < MOST_COMPRESSED:
        return REPETITION
    if MARKS.search(text):
        return TEMPLATE
    if ANSWER.match(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lstrip("\"'*# ")):
        return LIKE_AN_ANSWER
    return OTHER_SCRIPT if script and _share(text, script.upper()) < MAIN_SCRIPT else None


def _share(text: str, script: str) -> float:
    """Returns the share of the letters that have this script."""
    found = Counter(unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha())
    return found[script] / max(1, found.total())
