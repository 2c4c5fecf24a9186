"""Requests, and the results and shapes of their steps."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ..config import UserError
from ..generation import Generation, Offered, PromptLogprobs, Step, TokenLogprobs, check_prompt, commit
from ..sampling import GrammarError, SamplingParams
from .pages import PageNode
from .trees.trust import Trust

if TYPE_CHECKING:
    from ..grammar import Matcher  # needs torch, which clients do not import


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest request that an engine can hold."""

    context_limit: int  # prompt and answer together, in tokens
    vocabulary: int  # prompt ids are below this

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Returns the most tokens that the answer may have.

        Raises:
            PromptError: an empty prompt, one that leaves no room for an answer, or an id outside the vocabulary.
            BiasError: a biased token outside the vocabulary.
        """
        check_prompt(prompt_ids, self.context_limit, self.vocabulary, answered=params.max_tokens > 0)
        params.check_bias(self.vocabulary)
        return min(params.max_tokens, self.context_limit - len(prompt_ids))


class StepShape(NamedTuple):
    """The size of a step."""

    block: int  # the most tokens that a request commits; 1 is plain decoding
    rows: int = 0  # rows of all draft trees together, anchors included; 0: every request has a block


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a prefill (one token) or a step (1..S tokens) for one row."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if the request asks for them
    prompt: PromptLogprobs | None = None  # with the first token, if the request asks for them
    finite: bool = True  # whether the target's states that chose the tokens are finite
    poisons: bool = False  # keys and values that are NaN or infinite may be left in the request's pages
    depth: int | None = None  # depth of the request's draft tree; None: a block was drafted
    offered: Offered = ()  # see `Step`


class NotFiniteError(UserError):
    """The target computed NaN or infinity for a request, twice after the same tokens."""

    def __init__(self) -> None:
        super().__init__(
            "the target computed NaN or infinity for this request; its weights may be damaged, or dtype too narrow"
        )


class RollingAcceptance:
    """The recent conditional acceptance rate: the accepted share of the drafted tokens that were verified.

    It is an exponential average over blocks. The prior is light: a few bad blocks end drafting, but not a single one.
    The prior may be the rate of other requests, as their first blocks predict the next block of this one.

    Args:
        prior: the expected rate at the start.
        weight: weight of the prior, in verified tokens.
        decay: factor that each block applies to the weight of earlier blocks.

    Attributes:
        tried: whether any block was verified.
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
        """Whether any block was verified, of its own or of its prior."""
        return self.tried or (isinstance(self._prior, RollingAcceptance) and self._prior.known)

    def observe(self, drafted: int, accepted: int) -> None:
        """Adds a block: its accepted tokens were verified and, unless all were accepted, also the next one."""
        self.tried = True
        self._weight *= self._decay
        self._accepted = self._decay * self._accepted + accepted
        self._judged = self._decay * self._judged + min(accepted + 1, drafted)


class Origin(TypedDict, total=False):
    """How a client's request is queued and cached."""

    key: str  # API key; the wait queue is fair between keys (`wait_queue.py`)
    priority: int  # lower is earlier, as in vLLM
    cache_salt: str  # requests share cached prefixes only if their salts are equal, as in vLLM
    store: bool  # whether `Capture` may keep its tokens


class Queueing(Origin, total=False):
    """How an engine's request is queued and cached."""

    group: str  # requests of one group, which were sent together, run one after the other; "": no group
    name: str  # for the log


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its answer so far, and its resources. Only the scheduler writes the last group of fields."""

    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int  # maximum generated tokens: max_tokens, or fewer if the context is full
    on_progress: Callable[["Request", Step | None], None] | None = None  # step is None for a prefill or an error
    key: str = ""  # see `Queueing`, as for the next five
    group: str = ""
    priority: int = 0
    name: str = ""
    cache_salt: str = ""
    store: bool = True

    generation: Generation = field(default_factory=Generation)
    acceptance: RollingAcceptance = field(default_factory=RollingAcceptance)
    trust: Trust = field(default_factory=Trust)
    submitted_s: float = field(default_factory=time.perf_counter)

    pages: list[int] = field(default_factory=list)
    state: int = 0  # slot of its recurrent states; 0 without pages
    initial_state: int = 0  # slot that its states are copied from; 0: they start empty, or were copied
    keep_states_at: tuple[int, ...] = ()  # tokens, in whole pages, after which its prefill keeps states
    snapshot: tuple[int, int] | None = None  # slot of states that its block in flight may reach, and their tokens
    answer_state: PageNode | None = None  # the page of its answer after which states are kept
    prefilled: int = 0  # tokens of `known_ids` with keys and values in the pages
    cached_tokens: int = 0  # prefilled tokens that came from a prefix hit
    scored: list[Any] = field(default_factory=list)  # pending log-probabilities of the prompt's chunks
    row: int | None = None  # its row in the batch; None while waiting or prefilling
    epoch: int = 0  # number of times it lost its row; results launched before are void
    blocks_in_flight: list[int] = field(default_factory=list)  # sizes of launched blocks that were not read yet
    cancelled: bool = False
    error: Exception | None = None  # the error that ended it; its answer keeps the tokens that were read
    poisoned: bool = False  # other requests must not read its pages
    retried: bool = False  # it is computed a second time, after a value that was not finite
    prefilled_alone: bool = False  # never prefilled in a batch again, as one of its batches failed
    matcher: "Matcher | None" = None  # state of its grammar after `tokens`

    def with_seed(self, seed: int) -> "Request":
        """Returns a request for another answer to the same prompt; only before anything was decoded."""
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
        """Whether it may have drafts; not if they may contain a token that was NaN."""
        return self.params.drafting and not self.retried

    @property
    def finished(self) -> bool:
        return self.generation.finish_reason is not None or self.error is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether its prefill computes log-probabilities of the prompt, and so cannot use a prefix."""
        return self.params.prompt_logprobs is not None and not self.tokens

    @property
    def known_ids(self) -> list[int]:
        """The tokens in the cache before the next step: all but the last generated one."""
        return self.prompt_ids + self.tokens[:-1]

    @property
    def length(self) -> int:
        """Number of tokens in the cache, according to the results that were read."""
        return len(self.prompt_ids) + max(len(self.tokens) - 1, 0)

    @property
    def reach(self) -> int:
        """The maximum tokens in the cache after all launched steps."""
        return self.length + sum(self.blocks_in_flight)

    @property
    def surely_ends(self) -> bool:
        """Whether the steps in flight reach the token limit even if each of them commits one token."""
        unread_first = not self.tokens  # the prefill's token is also in flight
        return len(self.tokens) + unread_first + len(self.blocks_in_flight) >= self.limit

    def add_first(self, committed: Committed) -> None:
        """Adds the token that the prefill chose."""
        self._add(committed, 1)
        self.generation.prompt_logprobs = committed.prompt
        self.generation.prefill_s = time.perf_counter() - self.submitted_s

    def add_step(self, block: int, committed: Committed) -> Step:
        """Adds the tokens that a step committed, up to the end of the answer."""
        accepted = len(committed.tokens) - 1
        slots = block - 1 if committed.depth is None else committed.depth
        drafted = min(slots, self.limit - len(self.tokens) - 1)
        if slots:
            self.acceptance.observe(slots, accepted)
        elif committed.depth is not None:
            self.acceptance.tried = True  # its drafts were not worth a row
        kept = self._add(committed, drafted + 1)
        step = Step(drafted, min(accepted, drafted, len(kept)), tuple(kept), committed.offered[: len(kept)])
        generation = self.generation
        generation.steps.append(step)
        generation.decode_s = time.perf_counter() - self.submitted_s - generation.prefill_s
        return step

    def _add(self, committed: Committed, most: int) -> list[int]:
        tokens = committed.tokens[:most]
        allowed = self.matcher.accept(tokens) if self.matcher else len(tokens)
        kept = commit(self.generation, tokens[:allowed], self.stop_ids, self.limit)
        if allowed < len(tokens) and self.generation.finish_reason is None:
            self.error = GrammarError()
        if committed.logprobs is not None:
            self.generation.logprobs += committed.logprobs[: len(kept)]
        return kept
