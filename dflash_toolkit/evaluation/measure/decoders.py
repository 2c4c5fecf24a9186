"""What decodes prompts: the engine that `dflash-serve` runs, or the readable definition in `decode.py`.

`Decoder` is the protocol of both; vLLM and endpoints have it too (train/responses/).
"""

import contextlib
import gc
import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...config import UnsupportedModel, UserError
from ...data.prompts import Message, Tool
from ...decode import stream
from ...draft_tree import width_for
from ...fingerprint import drafter_digest, sample_digest, template_digest
from ...generation import FinishReason, Generation
from ...models.dflash.network import Drafter
from ...models.target import Target, load_config, load_tokenizer
from ...runtime import Engine, EngineOptions
from ...runtime.engine import resolve_draft_dtype
from ...runtime.load import Parts, load_parts
from ...runtime.request import Request
from ...sampling import DraftSampleMethod, SamplingParams

CERTAIN = 1e6  # a bias that no logit outweighs


@dataclass(frozen=True, slots=True)
class Chat:
    """What a prompt was rendered from, for servers that render it themselves."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """What came back for a request."""

    key: int  # that it was submitted with
    generation: Generation
    dropped: str = "of unknown tokens"  # why there are no tokens, where there are none

    @property
    def tokens(self) -> list[int]:
        """Stop token included; none for a response to leave out."""
        return self.generation.tokens

    @property
    def finish_reason(self) -> FinishReason:
        return self.generation.finish_reason or "length"


class Decoder(Protocol):
    """Decodes prompts, several at a time, in the order in which they are finished."""

    width: int  # requests worth having submitted at a time

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        """Begin to decode a prompt. Raises UserError for one that cannot be decoded."""

    def wait(self) -> Response:
        """The next finished response; something must have been submitted. Raises UserError."""

    def close(self) -> None:
        """Give back what it holds."""


OnStep = Callable[[Generation], None]  # gets the growing generation


class EngineDecoder:
    """Continuous batching on the engine that `dflash-serve` runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._running: dict[int, Request] = {}
        self._finished: deque[Response] = deque()
        self.width = 2 * (engine.options.max_num_seqs or 1)  # whoever ends finds the next one waiting

    def submit(
        self,
        key: int,
        prompt: list[int],
        params: SamplingParams,
        chat: Chat | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        def on_progress(request: Request, step: object) -> None:
            if on_step is not None:
                on_step(request.generation)
            if request.finished:
                del self._running[key]
                self._finished.append(Response(key, request.generation))

        assert self._engine is not None, "closed"
        self._running[key] = self._engine.submit(prompt, params, on_progress)

    def wait(self) -> Response:
        assert self._engine is not None, "closed"
        while not self._finished:
            if not self._engine.step():
                raise RuntimeError("nothing was submitted")
        while not self._running and self._engine.step():
            pass  # a step behind the last response's end, which would delay the next prompt
        return self._finished.popleft()

    def prepare(self) -> None:
        """Capture every step that it may choose, as a server does before it starts."""
        assert self._engine is not None, "closed"
        while self._engine.prepare():
            pass

    def cancel(self) -> None:
        """Nobody waits any more for what was submitted."""
        assert self._engine is not None, "closed"
        for request in self._running.values():
            self._engine.cancel(request)
        self._running.clear()
        self._finished.clear()

    def close(self) -> None:
        self._engine = None  # training needs its memory
        free_memory()


class ReferenceDecoder:
    """`decode.py` on plain Hugging Face modules, one prompt at a time."""

    width = 1

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        draft_sample_method: DraftSampleMethod = "greedy",
        draft_tree: int = 0,
        draft_tree_width: int | None = None,
    ) -> None:
        self._target: Target | None = target
        self._drafter, self._how = drafter, (draft_sample_method, draft_tree, draft_tree_width)
        self._submitted: deque[tuple[int, list[int], SamplingParams, OnStep | None]] = deque()

    def submit(
        self,
        key: int,
        prompt: list[int],
        params: SamplingParams,
        chat: Chat | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self._submitted.append((key, prompt, params, on_step))

    def wait(self) -> Response:
        key, prompt, params, on_step = self._submitted.popleft()
        assert self._target is not None, "closed"
        for generation in stream(self._target, self._drafter, prompt, params, *self._how):
            if on_step is not None:
                on_step(generation)
        return Response(key, generation)

    def cancel(self) -> None:
        """Nobody waits any more for what was submitted."""
        self._submitted.clear()

    def close(self) -> None:
        self._target = None
        free_memory()


class ThreadedDecoder:
    """Requests to a server, `width` at a time, each in a thread of its own.

    Args:
        ask: decodes one prompt to its end, in a thread.
    """

    def __init__(self, ask: Callable[[list[int], SamplingParams, OnStep | None], Generation], width: int) -> None:
        self._ask, self.width = ask, width
        self._threads = ThreadPoolExecutor(width)
        self._finished: queue.SimpleQueue[tuple[int, Future[Generation]]] = queue.SimpleQueue()

    def submit(
        self,
        key: int,
        prompt: list[int],
        params: SamplingParams,
        chat: Chat | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        future = self._threads.submit(self._ask, prompt, params, on_step)
        future.add_done_callback(lambda done: self._finished.put((key, done)))

    def wait(self) -> Response:
        key, done = self._finished.get()
        return Response(key, done.result())

    def close(self) -> list[Response]:
        """Also waits for what has begun; returns what nobody waited for, less what failed."""
        self._threads.shutdown(cancel_futures=True)
        left = [self._finished.get() for _ in range(self._finished.qsize())]
        return [Response(key, done.result()) for key, done in left if not done.cancelled() and not done.exception()]


def decode_all(
    decoder: EngineDecoder | ReferenceDecoder,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    on_step: OnStep | None = None,
) -> list[Generation]:
    """Decode prompts to their ends, in their order; `on_step` gets the growing generations. Raises UserError."""
    found: dict[int, Generation] = {}
    try:
        for key, prompt in enumerate(prompts):
            decoder.submit(key, prompt, params, on_step=on_step)
        while len(found) < len(prompts):
            response = decoder.wait()
            found[response.key] = response.generation
    except BaseException:  # Ctrl-C too: nobody waits for these any more
        decoder.cancel()
        raise
    return [found[key] for key in range(len(prompts))]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- a pair that is measured -----------------------------------------------------------------------------------


class Pair(ABC):
    """A target and its drafter, ready to decode one prompt at a time."""

    name: str
    tokenizer: Any  # the target's
    device: torch.device
    dtype: torch.dtype
    context_limit: int  # of the target: prompt and answer together, in tokens
    vocabulary: int  # prompt ids must be below this
    block_size: int  # S; every step drafts S - 1 tokens
    draft_sample_method: DraftSampleMethod
    facts: dict[str, Any]  # what tells this target and drafter from others, as JSON values
    concurrency: int = 1  # requests that a report has in flight
    modules: tuple[Target, Drafter] | None = None  # of Hugging Face, where there are some beside what decodes
    where: str | None = None  # the server that decodes, where it is not this process
    takes_trees: bool = True  # else chains alone

    def make_room(self, tokens: int) -> None:  # noqa: B027, caches that grow by themselves need nothing
        """From now on a prompt and its answer have at most so many tokens together."""

    def draft_at_most(self, tokens: int) -> None:
        """From now on a step drafts so many tokens, at most as many as the drafter was loaded for."""
        raise UserError(f"draft_length: the {self.name} cannot be told how much to draft")

    def counted(self) -> Any:
        """What `steps_since` begins at."""
        return None

    def steps_since(self, before: Any, answers: Sequence[Generation]) -> int:
        """Steps that decoded `answers`, of which nothing else was decoded since `before`."""
        return sum(len(answer.steps) for answer in answers)

    def decoder_for(self, draft: bool, concurrency: int) -> EngineDecoder | ThreadedDecoder:
        """What decodes so many requests at a time; the caller closes it. Raises UserError."""
        raise UserError(f"concurrency: the {self.name} decodes one request at a time; it needs --runtime engine")

    def served(self, concurrency: int, draft_tree: int, draft_tree_width: int | None) -> EngineDecoder:
        """What decodes so many requests at a time as `dflash-serve` does, which chooses lengths and rows; the caller
        closes it. Raises UserError."""
        raise UserError(f"draft_tree_nodes: the {self.name} is no server; it needs --runtime engine")

    def repeats_plain(self, params: SamplingParams) -> bool:
        """Whether answers are to be the plain ones, and not only distributed as those."""
        return self.draft_sample_method == "greedy" or params.temperature == 0.0

    @abstractmethod
    def decoder(self, draft: bool) -> EngineDecoder | ReferenceDecoder:
        """What decodes, with the drafter or without it. Raises UserError."""

    def decode(
        self, prompt_ids: list[int], params: SamplingParams, *, draft: bool, on_step: OnStep | None = None
    ) -> Generation:
        """Decode one prompt to its end; `on_step` gets the growing answer. Raises UserError."""
        return decode_all(self.decoder(draft), [prompt_ids], params, on_step)[0]

    def regret(self, ids: list[int], token: int) -> float:
        """Nats by which `token` behind `ids` is less probable than the target's best, both unfiltered in fp32."""
        # log-probabilities are those of the unbiased logits, whatever a bias makes the decoder choose
        params = SamplingParams(logit_bias=((token, CERTAIN),), logprobs=1, max_tokens=1)
        found = self.decode(ids, params, draft=False).logprobs[0]
        return found.best[0][1] - found.chosen


def _of_trees(nodes: int, width: int | None) -> dict[str, int | None]:
    """What a run over trees is known by; nothing of one over blocks."""
    return {"draft_tree": nodes, "draft_tree_width": width} if nodes else {}


class ReferencePair(Pair):
    """`decode.py` on plain Hugging Face modules.

    Args:
        draft_tree: nodes that a step verifies; 0: chains.
        draft_tree_width: children of a node at most; None: what suits the target, see `width_for`.

    Raises:
        UserError: a tree for a target that takes none.
    """

    name = "reference"

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        draft_sample_method: DraftSampleMethod = "greedy",
        draft_tree: int = 0,
        draft_tree_width: int | None = None,
    ) -> None:
        if draft_tree:
            draft_tree_width = target.tree_width(draft_tree_width)
        drafter = drafter.to(target.device, target.dtype)
        drafting = ReferenceDecoder(target, drafter, draft_sample_method, draft_tree, draft_tree_width)
        self._decoders = {True: drafting, False: ReferenceDecoder(target)}
        self.draft_sample_method = draft_sample_method
        self.tokenizer, self.device, self.dtype = target.tokenizer, target.device, target.dtype
        self.context_limit, self.block_size = target.context_limit, drafter.config.block_size
        self.vocabulary = target.embedding.num_embeddings
        tensors = target.model.named_parameters()
        facts = _facts(target.name, target.config, target.tokenizer, tensors, drafter)
        how = {"draft_dtype": "full", "draft_sample_method": draft_sample_method}  # of dtypes it has one
        self.facts = facts | how | _of_trees(draft_tree, draft_tree_width)
        self._drafter = drafter
        self.modules = target, drafter

    def draft_at_most(self, tokens: int) -> None:
        self._drafter.config = self._drafter.config.with_block_size(tokens + 1)
        self.block_size = self.facts["block_size"] = tokens + 1

    def decoder(self, draft: bool) -> ReferenceDecoder:
        return self._decoders[draft]


class EnginePair(Pair):
    """Two engines over the same target weights: one drafts a full block every step, one has no drafter.

    Each is made when it is first needed, with room for one prompt and its answer.

    Args:
        draft_tree: nodes that a step verifies; 0: chains.
        draft_tree_width: children of a node at most; None: what suits the target, see `width_for`.

    Raises:
        ValueError: a `draft_dtype` or `draft_sample_method` that the engine does not know.
        UserError: see `width_for`.
    """

    name = "engine"

    def __init__(
        self,
        parts: Parts,
        tokenizer: Any,
        facts: dict[str, Any],
        draft_dtype: str = "auto",
        draft_sample_method: DraftSampleMethod = "greedy",
        draft_tree: int = 0,
        draft_tree_width: int | None = None,
    ) -> None:
        assert parts.drafter is not None
        target, self._parts = parts.target, parts
        if draft_tree:
            draft_tree_width = width_for(draft_tree_width, target.spec.recurrent)
        self.device, self.dtype = target.embedding.device, target.embedding.dtype
        self._options = EngineOptions(
            max_num_seqs=1,
            prefix_cache=False,
            draft_dtype=resolve_draft_dtype(draft_dtype, self.device, self.dtype),
            draft_sample_method=draft_sample_method,
            draft_tree=draft_tree,
            draft_tree_width=draft_tree_width,
        )
        self.draft_sample_method = draft_sample_method
        how = {"draft_dtype": self._options.draft_dtype, "draft_sample_method": draft_sample_method}
        self.tokenizer, self.facts = tokenizer, facts | how | _of_trees(draft_tree, draft_tree_width)
        self.context_limit, self.block_size = target.spec.context_limit, parts.drafter.config.block_size
        self.vocabulary = target.spec.vocab_size
        self.takes_trees = not target.spec.recurrent
        self._context = self.context_limit
        self._decoders: dict[bool, EngineDecoder] = {}  # by whether it drafts

    @classmethod
    def load(
        cls,
        target: str | Target,
        drafter: Drafter,
        device: str = "auto",
        dtype: str = "auto",
        draft_dtype: str = "auto",
        draft_sample_method: DraftSampleMethod = "greedy",
        draft_tree: int = 0,
        draft_tree_width: int | None = None,
        share: bool = False,
    ) -> "EnginePair":
        """As `load_parts` does, and raises what it raises; `drafter` moves to the device."""
        if isinstance(target, str):
            name, config, tokenizer = target, load_config(target), load_tokenizer(target)
        else:
            name, config, tokenizer = target.name, target.config, target.tokenizer
        with _way_out():
            parts = load_parts(target, drafter, device, dtype, share=share)
        tensors = parts.target.parameter_views(stacked=True)  # by the names of modules, as the reference has them
        facts = _facts(name, config, tokenizer, tensors.items(), drafter)
        pair = cls(parts, tokenizer, facts, draft_dtype, draft_sample_method, draft_tree, draft_tree_width)
        pair.modules = None if isinstance(target, str) else (target, drafter)
        return pair

    def make_room(self, tokens: int) -> None:
        self._context = min(tokens, self.context_limit)
        self._decoders.clear()

    def draft_at_most(self, tokens: int) -> None:
        self.block_size = self.facts["block_size"] = tokens + 1
        self._decoders.pop(True, None)

    def decoder(self, draft: bool) -> EngineDecoder:
        if draft not in self._decoders:
            self._decoders[draft] = self._made(draft, 1, tell_trees=True)
        return self._decoders[draft]

    def decoder_for(self, draft: bool, concurrency: int) -> EngineDecoder:
        self._decoders.clear()  # it needs their memory
        free_memory()
        return self._made(draft, concurrency)

    def served(self, concurrency: int, draft_tree: int, draft_tree_width: int | None) -> EngineDecoder:
        self._decoders.clear()
        free_memory()
        trees = {"draft_tree": draft_tree, "draft_tree_width": draft_tree_width}
        decoder = self._made(True, concurrency, **trees, num_speculative_tokens=None)
        decoder.prepare()
        return decoder

    def _made(self, draft: bool, concurrency: int, **more: Any) -> EngineDecoder:
        tokens = self.block_size - 1 if draft else 0  # a report is about whole blocks: nothing is chosen
        how = {"max_num_seqs": concurrency, "max_model_len": self._context, "num_speculative_tokens": tokens}
        options = replace(self._options, **how | more)
        try:
            parts = self._parts if draft else replace(self._parts, drafter=None)
            return EngineDecoder(parts.engine(options))
        except UserError as error:
            # the reference does not draft in fp8; and without its copy of the head there is more room
            way = "--runtime reference" if options.draft_dtype == "full" else "--draft-dtype full"
            way += ", or leave trees out of the sweep" if more.get("draft_tree") else ""
            raise UserError(
                f"the engine has no room for a prompt and answer of {self._context} tokens ({error}); "
                f"lower max_tokens or use {way}"
            ) from error


@contextlib.contextmanager
def _way_out() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        kind = UnsupportedModel if isinstance(error, UnsupportedModel) else UserError
        raise kind(f"{error}; --runtime reference decodes without the engine") from error


# ---- what was decoded with -----------------------------------------------------------------------------------


def _facts(
    name: str, config: Any, tokenizer: Any, tensors: Iterable[tuple[str, Tensor]], drafter: Drafter
) -> dict[str, Any]:
    return {
        "target": name,
        "target_num_layers": config.num_hidden_layers,
        "target_sample_sha256": sample_digest(tensors),
        "chat_template_sha256": template_digest(tokenizer),
        "drafter_kind": drafter.config.architecture.kind,
        "drafter_sha256": drafter_digest(drafter),
        "block_size": drafter.config.block_size,
        "target_layer_ids": list(drafter.config.target_layer_ids),
        "mask_token_id": drafter.config.mask_token_id,
    }
