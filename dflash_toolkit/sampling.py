"""How a request picks its tokens. Without torch: command lines are checked before it is imported."""

import math
from dataclasses import dataclass
from typing import Literal

from .config import UserError

# how drafts are picked: the most probable tokens, or at the request's temperature (vLLM's names)
DraftSampleMethod = Literal["greedy", "probabilistic"]
MAX_LOGPROBS = 20  # the limit of OpenAI's API
GRAMMARS = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}
# the range of divisors and factors of logits in fp32
COLDEST, HOTTEST, LEAST_TOP_P, LEAST_PENALTY, MOST_PENALTY = 1e-5, 100.0, 1e-6, 0.01, 100.0


class BiasError(UserError):
    """A biased token that the target does not have."""


class GrammarError(UserError):
    """A grammar that cannot be read, or followed any further."""

    def __init__(self, message: str = "the grammar allows no token of the target here; the answer cannot go on"):
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer up to the token that ends it.

    Raises:
        ValueError: an empty text or a kind that is not known.
    """

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag"]
    # a JSON schema; a regular expression; a JSON list of strings; a grammar in EBNF (GBNF) or Lark; xgrammar's JSON
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise ValueError(f"a grammar's kind is {self.kind!r}; it must be one of {', '.join(GRAMMARS)}")
        if not self.text:
            raise ValueError(f"the {self.name} is empty")

    @property
    def name(self) -> str:
        return GRAMMARS[self.kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request samples tokens, and when its answer ends.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus sampling; 1 keeps every token.
        top_k: keep the most probable tokens; 0 keeps every token.
        min_p: keep tokens at least this probable, relative to the most probable one.
        seed: of the random numbers; one seed gives the same answer with and without a drafter.
        repetition_penalty: on tokens of the prompt and the answer (Keskar et al. 2019); 1 is none.
        presence_penalty: subtracted once from the logit of a token that the answer contains.
        frequency_penalty: subtracted for each time that the answer contains a token.
        logit_bias: pairs of a token and what is added to its logit; -inf bans it.
        begin_suppress_tokens: tokens that are not chosen as the first of an answer.
        logprobs: return the log-probabilities of each chosen token and of this many best ones; None returns none.
        prompt_logprobs: the same for the tokens of the prompt.
        max_tokens: longest answer; 0 only with `prompt_logprobs`.
        min_tokens: no token that ends the answer is chosen before it has this many tokens.
        stop_token_ids: end the answer, in addition to the target's own end-of-sequence tokens.
        ignore_eos: do not stop at the target's end-of-sequence tokens.
        return_taps: return the taps of prompt and answer, the drafter's input, see `Generation.taps`.
        drafting: False drafts nothing for this request; with draft blocks the whole batch then decodes plainly.
        grammar: only tokens that it allows are chosen; the answer may end where it is complete.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 512
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_taps: bool = False
    drafting: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or COLDEST <= self.temperature <= HOTTEST):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or in [{COLDEST}, {HOTTEST}]")
        if not LEAST_TOP_P <= self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be in [{LEAST_TOP_P}, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be >= 0 (0 keeps every token)")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]")
        if not LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be in [{LEAST_PENALTY}, {MOST_PENALTY}] "
                f"(1 is none)"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_PENALTY:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in +-{MOST_PENALTY} (0 is none)")
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in 0..{MAX_LOGPROBS}")
        for token, bias in self.logit_bias:
            if not bias < math.inf:  # nor NaN
                raise ValueError(f"logit_bias of token {token} is {bias}; it must be a number or -inf, which bans it")
            if self.grammar and bias == -math.inf:
                raise ValueError(f"logit_bias bans token {token}, which a grammar may be in need of; give a number")
        if self.grammar and self.ignore_eos:
            raise ValueError("ignore_eos is set; an answer with a grammar ends with an end-of-sequence token")
        if self.max_tokens < (least := 1 if self.prompt_logprobs is None else 0):
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be >= {least}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be in 0..{self.max_tokens}, max_tokens")
        if self.grammar and self.min_tokens:
            raise ValueError("min_tokens is set; an answer with a grammar ends where that is complete")

    def check_bias(self, vocabulary: int) -> None:
        """Raises BiasError for a biased token that the target does not have."""
        for token, _ in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise BiasError(f"logit_bias names token {token}; the target has tokens 0..{vocabulary - 1}")

    @property
    def edits_logits(self) -> bool:
        """Whether the logits depend on more than the context: on counts of tokens, a bias, or the answer's length."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        edited = bool(self.logit_bias or self.begin_suppress_tokens)
        return penalties != (1.0, 0.0, 0.0) or edited or self.min_tokens > 0


def int64_seed(seed: int) -> int:
    """Returns the signed 64-bit integer with the same low bits."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low
