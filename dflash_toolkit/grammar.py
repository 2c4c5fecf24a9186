"""Structured answers: the tokens that a grammar allows next. The only module that imports xgrammar.

A grammar is compiled once for a vocabulary and then shared; a `Matcher` is the position of one answer in it. The
tokens that are allowed next are a bit mask of the vocabulary, 32 tokens to an int32, the lowest bit first.
"""

import contextlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .json_schema import DEEPEST, Rewritten, UnsupportedSchema
from .sampling import Grammar, GrammarError
from .string_pattern import StringPattern

LONGEST = 256 << 10  # characters of a grammar
CACHED = 256 << 20  # bytes of compiled grammars to keep
MOST_SPACE = 32  # characters of white space between two parts of JSON


def words_of(vocabulary: int) -> int:
    """Returns the number of int32 words of a mask."""
    return -(-vocabulary // 32)


class Matcher:
    """The position of one answer in its grammar."""

    def __init__(self, compiled: Any, ends: Collection[int]) -> None:
        self._compiled, self._ends = compiled, frozenset(ends)
        self._matcher = _xgrammar().GrammarMatcher(compiled, override_stop_tokens=sorted(self._ends))

    def fresh(self) -> "Matcher":
        """Returns a matcher at the beginning of the same grammar."""
        return Matcher(self._compiled, self._ends)

    def accept(self, tokens: Sequence[int]) -> int:
        """Advances by the next tokens of the answer; returns how many of them the grammar allows."""
        for i, token in enumerate(tokens):
            if not self._matcher.accept_token(token):
                return i
        return len(tokens)

    def masks(self, draft: Sequence[int], words: int) -> Tensor:
        """Returns the tokens allowed after the answer and after each prefix of `draft` that is allowed itself.

        Returns:
            int32 [n, words] on the host, the masks after `draft[:0]`, `draft[:1]`, ...: the n-th drafted token, if
            there is one, is not allowed or ends the answer.
        """
        matcher, rows = self._matcher, 0
        masks = torch.empty(len(draft) + 1, words, dtype=torch.int32)
        for token in [*draft, None]:
            matcher.fill_next_token_bitmask(masks, rows)
            rows += 1
            if token is None or token in self._ends or not int(masks[rows - 1, token // 32]) >> token % 32 & 1:
                break
            matcher.accept_token(token)
        matcher.rollback(rows - 1)
        return masks[:rows]


def masks_of(matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]], words: int) -> tuple[Tensor, Tensor]:
    """Returns the masks of a batch of blocks, see `mask_logits_`.

    Args:
        drafts: [B] of S - 1 tokens each, which follow the B matchers' positions; None is a request without a grammar.

    Returns:
        Masks int32 [N, words], and int32 [B * S], the mask of each position. Positions after a drafted token that is
        not allowed have none (-1), as nothing is committed there.
    """
    block = len(drafts[0]) + 1
    found: list[Tensor] = []
    at = torch.full((len(drafts), block), -1, dtype=torch.int32)
    count = 0
    for row, (matcher, draft) in enumerate(zip(matchers, drafts, strict=True)):
        if matcher is not None:
            masks = matcher.masks(draft, words)
            at[row, : len(masks)] = torch.arange(count, count := count + len(masks))
            found.append(masks)
    return torch.cat(found), at.flatten()


class Grammars:
    """Compiles grammars for one vocabulary and caches them. Thread-safe.

    Args:
        tokenizer: Hugging Face's; used when the first grammar is compiled.
        vocabulary: rows of the target's head.
        eos: the target's end-of-sequence tokens, which are not text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, frozenset(eos)
        self._compiled: OrderedDict[Grammar, Future[Any]] = OrderedDict()  # the most recently used one is last
        self._vocabularies: dict[bool, _Vocabulary] = {}  # without special tokens, and with them
        self._lock, self._first = threading.Lock(), threading.Lock()

    def ready(self, grammar: Grammar) -> bool:
        """Whether `compile` returns at once."""
        with self._lock:
            return grammar in self._compiled and self._compiled[grammar].done()

    def compile(self, grammar: Grammar, parsed: str | None = None) -> Any:
        """Returns the compiled grammar, which may take seconds; cached, and compiled only once for concurrent callers.

        Args:
            parsed: the result of `Trial.run`, which saves reading the grammar.

        Raises:
            GrammarError: it cannot be read, needs an unsupported feature, or the tokenizer cannot be used.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            is_first = found is None
            if found is None:
                found = self._compiled[grammar] = Future()
            self._compiled.move_to_end(grammar)
        if is_first:
            try:
                found.set_result(self._compile(grammar, parsed))
            except BaseException as error:
                found.set_exception(error)
            self._discard(grammar)
        return found.result()

    def _compile(self, grammar: Grammar, parsed: str | None = None) -> Any:
        read_grammar = read(grammar) if parsed is None else _xgrammar().Grammar.deserialize_json(parsed)
        vocabulary = self._vocabulary_for(grammar)
        with _one_line_errors(grammar):
            return _compiler(vocabulary.info).compile_grammar(read_grammar)

    def trial_vocabularies(self) -> tuple[str, str]:
        """Returns what `Trial` needs, as text. Raises GrammarError, see `compile`."""
        with self._first:
            plain, marked = (self._vocabulary_with(marked).info.serialize_json() for marked in (False, True))
        return plain, marked

    def _discard(self, new: Grammar) -> None:
        """Removes grammars that failed, and the least recently used ones above the cache's size."""
        with self._lock:
            done = {key: one for key, one in self._compiled.items() if one.done()}
            taken = 0
            for grammar in reversed(done):
                failed = done[grammar].exception() is not None
                taken += 0 if failed else done[grammar].result().memory_size_bytes
                if failed or (taken > CACHED and grammar != new):
                    del self._compiled[grammar]

    def matcher(self, grammar: Grammar, stop_ids: Collection[int]) -> Matcher:
        """Returns a matcher for an answer that ends with one of `stop_ids`; those that are text end no grammar.

        Raises:
            GrammarError: see `compile`; or it allows no answer, or there is no token to end one with.
        """
        compiled = self.compile(grammar)
        text = self._vocabulary_for(grammar).text
        ends = [token for token in stop_ids if 0 <= token < self._vocabulary and token not in text]
        if not ends:
            raise GrammarError(
                f"a {grammar.name} needs a token that ends the answer and the target declares none; "
                f"name one in stop_token_ids"
            )
        matcher = Matcher(compiled, ends)
        if not matcher.masks((), words_of(self._vocabulary)).any():
            raise GrammarError(f"the {grammar.name} allows no answer in this target's tokens")
        return matcher

    def _vocabulary_for(self, grammar: Grammar) -> "_Vocabulary":
        """Returns the vocabulary for a grammar, made at the first use."""
        with self._first:
            return self._vocabulary_with(grammar.kind == "structural_tag")

    def _vocabulary_with(self, marked: bool) -> "_Vocabulary":
        if marked not in self._vocabularies:
            self._vocabularies[marked] = self._new_vocabulary(marked)
        return self._vocabularies[marked]

    def _new_vocabulary(self, marked: bool) -> "_Vocabulary":
        xgrammar, tokenizer = _xgrammar(), self._tokenizer
        if tokenizer is None:
            raise GrammarError("structured answers need the target's tokenizer, but none is loaded")
        try:
            found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocabulary)
        except ValueError as error:
            raise GrammarError(f"structured answers do not support this tokenizer ({error})") from error
        # special tokens are not part of an answer's text; but tags may be written with them
        silent = {*self._eos, tokenizer.eos_token_id}
        if not marked:
            added = tokenizer.added_tokens_decoder.items()
            silent |= {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
        pieces = [b"" if i in silent else piece for i, piece in enumerate(found.decoded_vocab)]
        info = xgrammar.TokenizerInfo(
            pieces,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary,
            stop_token_ids=[],  # every matcher names its own
            add_prefix_space=found.add_prefix_space,
        )
        return _Vocabulary(info, frozenset(i for i, piece in enumerate(pieces) if piece))


class _Vocabulary(NamedTuple):
    info: Any  # xgrammar's
    text: frozenset[int]  # tokens with text


class Trial:
    """Compiles grammars and discards the results, in a process that may be killed (`grammar_process.py`).

    A compiled grammar can be sent to another process only as text that grows with the square of its rules: 57 MB for a
    schema of 300 optional properties, and 620 MB for 1000, which takes 30 times as long to write as to compile.

    Args:
        vocabularies: see `Grammars.trial_vocabularies`.
    """

    def __init__(self, vocabularies: Sequence[str]) -> None:
        self._infos = [_xgrammar().TokenizerInfo.deserialize_json(each) for each in vocabularies]

    def run(self, grammar: Grammar) -> str:
        """Returns the grammar as it was read, for `Grammars.compile`. Raises GrammarError, as `Grammars.compile`."""
        read_grammar = read(grammar)
        parsed = str(read_grammar.serialize_json())
        with _one_line_errors(grammar):
            _compiler(self._infos[grammar.kind == "structural_tag"]).compile_grammar(read_grammar)
        return parsed


def _compiler(info: Any) -> Any:
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    return _xgrammar().GrammarCompiler(info, max_threads=threads, cache_enabled=False)


def read(grammar: Grammar) -> Any:
    """Returns xgrammar's form of a grammar, which needs no vocabulary.

    Raises:
        GrammarError: it cannot be read, or has parts that the compiler would ignore or take too long for.
    """
    if len(grammar.text) > LONGEST:
        raise GrammarError(f"the {grammar.name} has {len(grammar.text)} characters; the maximum is {LONGEST}")
    if "\0" in grammar.text:
        raise GrammarError(f"the {grammar.name} contains a NUL character")
    reader = _xgrammar().Grammar
    if grammar.kind in ("json", "structural_tag"):
        text, patterns = _rewritten(grammar)
        with _one_line_errors(grammar):
            return _tightened(
                (reader.from_json_schema if grammar.kind == "json" else reader.from_structural_tag)(text), patterns
            )
    with _one_line_errors(grammar):
        if grammar.kind == "regex":
            return reader.from_regex(grammar.text)
        if grammar.kind == "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text))
            return reader.from_ebnf("root ::= " + " | ".join(choices))
        return (reader.from_ebnf if "::=" in grammar.text else reader.from_lark)(grammar.text)


def _rewritten(grammar: Grammar) -> tuple[str, dict[str, StringPattern]]:
    """Returns the text of a grammar with its JSON schemas as xgrammar follows them, and their patterns."""
    patterns: dict[str, StringPattern] = {}

    def follow(schema: Any) -> Any:
        found = Rewritten(schema, len(patterns))
        if found.schema is False:
            raise UnsupportedSchema("it allows no value")
        patterns.update(found.patterns)
        return found.schema

    def inside(tag: Any) -> Any:
        if isinstance(tag, dict):
            return {key: follow(each) if key == "json_schema" else inside(each) for key, each in tag.items()}
        return [inside(each) for each in tag] if isinstance(tag, list) else tag

    try:
        asked = json.loads(grammar.text)
        return json.dumps(follow(asked) if grammar.kind == "json" else inside(asked)), patterns
    except RecursionError as error:
        raise GrammarError(f"the {grammar.name} is more than {DEEPEST} levels deep") from error
    except UnsupportedSchema as error:
        raise GrammarError(f"the {grammar.name} cannot be used: {error}") from error
    except ValueError as error:
        raise GrammarError(f"the {grammar.name} is not valid JSON ({error})") from error


# one character of a string of limited length; xgrammar allows control characters in it
CHARACTER, ALLOWED = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
SPACE = r"[ \n\r\t]*"
# the rules of a further property's name; with an escape it could repeat the name of another property
NAME = re.compile(r"^[\w-]*_addl_key\w* ::= .*$", re.MULTILINE)
ESCAPE = r' | ("\\" basic_escape basic_string_sub)'
PATTERN = re.compile(r'^([\w-]+) ::= Regex\("(\^pattern-\d+\$)", json_string=true\)$', re.MULTILINE)


def _tightened(grammar: Any, patterns: Mapping[str, StringPattern]) -> Any:
    """Returns xgrammar's grammar of JSON schemas with what these forbid: its rules as text, some of them changed."""
    text = str(grammar).replace(CHARACTER, ALLOWED)
    text = text.replace(SPACE, f"{SPACE[:-1]}{{0,{MOST_SPACE}}}")
    text = NAME.sub(lambda rule: rule[0].replace(ESCAPE, ""), text)
    text = PATTERN.sub(lambda rule: "\n".join(patterns[rule[2]].rules(rule[1])), text)
    return _xgrammar().Grammar.from_ebnf(text)


@contextlib.contextmanager
def _one_line_errors(grammar: Grammar) -> Iterator[None]:
    """Shortens xgrammar's errors: removes the place in its sources, and most of a long text that it cites."""
    try:
        yield
    except (RuntimeError, UnicodeDecodeError) as error:  # the second where it cites a part of a character
        text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
        said = " ".join(re.sub(r"^(\[[^]]*\] \S+: )?(Check failed: \(.*?\) is false: )?", "", text.strip()).split())
        said = "it needs too much memory" if "std::bad_alloc" in said else said
        said = said if len(said) < 300 else f"{said[:300]}..."
        raise GrammarError(f"the {grammar.name} cannot be used: {said}") from error


def _xgrammar() -> Any:
    """Returns the xgrammar module. Raises GrammarError if it is not installed."""
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        raise GrammarError(
            "structured answers need xgrammar; install it with: pip install 'dflash-toolkit[serve]'"
        ) from error
    return xgrammar
