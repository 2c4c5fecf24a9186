"""A request on its way through the runtime."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import UserError
from ..generation import Generation, Offered, PromptLogprobs, Step, TokenLogprobs, check_prompt, commit
from ..sampling import GrammarError, SamplingParams
from .trees.trust import Trust

if TYPE_CHECKING:
    from ..grammar import Matcher  # which needs torch, as those who ask an engine do not


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold of one request; its cache holds as much."""

    context_limit: int  # prompt and answer together, in tokens
    vocabulary: int  # prompt ids must be below this

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """The tokens that the answer may have.

        Raises:
            PromptError: an empty prompt, one that leaves no room for an answer, or an id outside the vocabulary.
            BiasError: a biased token outside the vocabulary.
        """
        check_prompt(prompt_ids, self.context_limit, self.vocabulary, answered=params.max_tokens > 0)
        params.check_bias(self.vocabulary)
        return min(params.max_tokens, self.context_limit - len(prompt_ids))


class StepShape(NamedTuple):
    """How large a step is."""

    block: int  # tokens that a request commits at most; 1 is plain decoding
    rows: int = 0  # of draft trees, all requests together and their anchors included; 0: a block of every request


@dataclass(frozen=True, slots=True)
class Committed:
    """What one row got from a prefill (one token) or a step (1..S tokens)."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a token, if the request asked for them
    prompt: PromptLogprobs | None = None  # with the first token, if the request asked for them
    finite: bool = True  # so are the target's states that chose the tokens
    poisons: bool = False  # keys and values that are NaN or infinite may be left in the request's pages
    depth: int | None = None  # of the request's draft tree; None: a block was drafted
    offered: Offered = ()  # see `Step`


class NotFiniteError(UserError):
    """The target computed NaN or infinity for a request, twice behind the same tokens."""

    def __init__(self) -> None:
        super().__init__(
            "the target computed NaN or infinity for this request; its weights may be damaged, or dtype too narrow"
        )


class RollingAcceptance:
    """A recent conditional acceptance: of the drafted tokens that were judged, the share that was taken.

    An exponential average over blocks, started with a prior so that one bad block does not end drafting, and a light
    one so that a few do. What is expected of others is a prior too, as it is now: what the others of a batch had from
    their first blocks speaks of this one's next.

    Args:
        prior: the rate that is expected before anything is known.
        weight: judged tokens that the prior counts for.
        decay: of what came before, at every block.

    Attributes:
        tried: whether a block was judged at all.
    """

    def __init__(self, prior: "float | RollingAcceptance" = 0.7, weight: float = 1.5, decay: float = 0.9) -> None:
        self._prior, self._weight, self._decay = prior, weight, decay
        self._accepted = self._judged = 0.0
        self.tried = False

    @property
    def rate(self) -> float:
        prior = self._prior.rate if isinstance(self._prior, RollingAcceptance) else self._prior
        return (self._accepted + self._weight * prior) / (self._judged + self._weight)

    @property
    def known(self) -> bool:
        """Whether any block was judged, of its own or of those that its prior is made of."""
        return self.tried or (isinstance(self._prior, RollingAcceptance) and self._prior.known)

    def observe(self, drafted: int, accepted: int) -> None:
        """One block: the accepted tokens were judged and, unless all were accepted, so was the one behind them."""
        self.tried = True
        self._weight *= self._decay
        self._accepted = self._decay * self._accepted + accepted
        self._judged = self._decay * self._judged + min(accepted + 1, drafted)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, its answer so far and what it holds. Only the scheduler writes the last group of fields."""

    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int  # of generated tokens: max_tokens or what the context leaves
    on_progress: Callable[["Request", Step | None], None] | None = None  # None: prefill, error
    key: str = ""  # whose it is: turns go round the keys, then round a key's requests
    group: str = ""  # what was asked for together, of a key, is computed one after the other; "": it alone
    priority: int = 0  # lower is earlier
    name: str = ""  # for the log

    generation: Generation = field(default_factory=Generation)
    acceptance: RollingAcceptance = field(default_factory=RollingAcceptance)
    trust: Trust = field(default_factory=Trust)
    submitted_s: float = field(default_factory=time.perf_counter)

    pages: list[int] = field(default_factory=list)
    state: int = 0  # slot of its recurrent states; 0 while it has no pages either
    initial_state: int = 0  # slot that its states are copied from; 0: they start empty, or were copied
    keep_states_at: tuple[int, ...] = ()  # tokens, in whole pages, after which its prefill keeps states
    prefilled: int = 0  # tokens of `known_ids` whose keys and values are in the pages
    cached_tokens: int = 0  # of them, those that a prefix hit brought
    scored: list[Any] = field(default_factory=list)  # log-probabilities of the prompt's chunks, as the device left them
    row: int | None = None  # in the batch; None while waiting or prefilling
    epoch: int = 0  # counts the times it lost its row; results launched before that are void
    blocks_in_flight: list[int] = field(default_factory=list)  # sizes of blocks launched and not yet read
    cancelled: bool = False
    error: Exception | None = None  # what ended it alone; its answer stays as far as it was read
    poisoned: bool = False  # its pages must not be read by others
    retried: bool = False  # it is computed a second time, as something was not finite
    prefilled_alone: bool = False  # in no batch, as one that it was in failed
    matcher: "Matcher | None" = None  # of its grammar, behind `tokens`

    def with_seed(self, seed: int) -> "Request":
        """The same prompt once more, for an answer of its own; before anything was decoded."""
        return replace(
            self,
            params=replace(self.params, seed=seed),
            generation=Generation(),
            acceptance=copy.copy(self.acceptance),
            trust=Trust(),
            pages=[],
            state=0,
            scored=[],
            blocks_in_flight=[],
            matcher=self.matcher and self.matcher.fresh(),
        )

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    @property
    def drafts(self) -> bool:
        """Whether anything may be drafted for it: not where its draft may hold the token that was NaN."""
        return self.params.drafting and not self.retried

    @property
    def finished(self) -> bool:
        return self.generation.finish_reason is not None or self.error is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether its prefill is to leave the log-probabilities of the prompt, and so must compute all of it."""
        return self.params.prompt_logprobs is not None and not self.tokens

    @property
    def known_ids(self) -> list[int]:
        """The tokens that must be in the cache before the next step: all but the last one generated."""
        return self.prompt_ids + self.tokens[:-1]

    @property
    def length(self) -> int:
        """Tokens in the cache, as far as results were read."""
        return len(self.prompt_ids) + max(len(self.tokens) - 1, 0)

    @property
    def reach(self) -> int:
        """Tokens in the cache at most, once every launched step has run."""
        return self.length + sum(self.blocks_in_flight)

    @property
    def surely_ends(self) -> bool:
        """Whether the steps in flight reach the token limit even if each commits one token only."""
        unread_first = not self.tokens  # the prefill's token is in flight too
        return len(self.tokens) + unread_first + len(self.blocks_in_flight) >= self.limit

    def add_first(self, committed: Committed) -> None:
        """The token that the prefill chose."""
        self._take(committed, 1)
        self.generation.prompt_logprobs = committed.prompt
        self.generation.prefill_s = time.perf_counter() - self.submitted_s

    def add_step(self, block: int, committed: Committed) -> Step:
        """What one decoding step committed; the answer takes what comes before its end."""
        accepted = len(committed.tokens) - 1
        slots = block - 1 if committed.depth is None else committed.depth
        drafted = min(slots, self.limit - len(self.tokens) - 1)
        if slots:
            self.acceptance.observe(slots, accepted)
        elif committed.depth is not None:
            self.acceptance.tried = True  # and its drafts were worth no row
        kept = self._take(committed, drafted + 1)
        step = Step(drafted, min(accepted, drafted, len(kept)), tuple(kept), committed.offered[: len(kept)])
        generation = self.generation
        generation.steps.append(step)
        generation.decode_s = time.perf_counter() - self.submitted_s - generation.prefill_s
        return step

    def _take(self, committed: Committed, most: int) -> list[int]:
        tokens = committed.tokens[:most]
        allowed = self.matcher.accept(tokens) if self.matcher else len(tokens)
        kept = commit(self.generation, tokens[:allowed], self.stop_ids, self.limit)
        if allowed < len(tokens) and self.generation.finish_reason is None:
            self.error = GrammarError()
        if committed.logprobs is not None:
            self.generation.logprobs += committed.logprobs[: len(kept)]
        return kept
