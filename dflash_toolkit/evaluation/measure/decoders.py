"""Decoders of prompts: the engine that `dflash-serve` runs, and the readable definition in `decode.py`.

Both implement `Decoder`, and so do vLLM and endpoints in train/responses/.
"""

import gc
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from ...data.prompts import Message, Tool
from ...decode import stream
from ...generation import FinishReason, Generation
from ...models.dflash.network import Drafter
from ...models.target import Target
from ...runtime import Engine
from ...runtime.request import Request
from ...sampling import DraftSampleMethod, SamplingParams


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a prompt, for servers that apply the chat template themselves."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """The result of a request."""

    key: int  # passed to `submit`
    generation: Generation
    dropped: str = "of unknown tokens"  # why it has no tokens, if it has none

    @property
    def tokens(self) -> list[int]:
        """Its tokens with the stop token; empty if the response must be dropped."""
        return self.generation.tokens

    @property
    def finish_reason(self) -> FinishReason:
        return self.generation.finish_reason or "length"


class Decoder(Protocol):
    """Decodes several prompts at a time and returns them in the order in which they finish."""

    width: int  # number of requests to keep submitted

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        """Starts to decode a prompt. Raises UserError if it cannot be decoded."""

    def wait(self) -> Response:
        """Returns the next finished response; a request must be in flight. Raises UserError."""

    def close(self) -> None:
        """Releases memory and threads."""


OnStep = Callable[[Generation], None]  # called with the growing generation


class EngineDecoder:
    """Decodes with continuous batching on the engine that `dflash-serve` runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: dict[int, Request] = {}
        self._finished: deque[Response] = deque()
        self._rows = engine.options.max_num_seqs or 1
        self.width = 2 * self._rows  # so a finished request can be replaced at once

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
        self._waiting.append((key, self._engine.request(prompt, params, on_progress)))

    def _refill_batch(self) -> None:
        assert self._engine is not None
        free = self._rows - len(self._running)
        while self._waiting and free > 0:
            key, request = self._waiting.popleft()
            self._running[key] = request
            self._engine.scheduler.add(request)
            free -= 1

    def wait(self) -> Response:
        assert self._engine is not None, "closed"
        while not self._finished:
            self._refill_batch()
            if not self._engine.step():
                raise RuntimeError("nothing was submitted")
        while not self._running and not self._waiting and self._engine.step():
            pass  # the step in flight after the last response would delay the next prompt
        return self._finished.popleft()

    def prepare(self) -> None:
        """Captures every step it may choose, as a server does at startup."""
        assert self._engine is not None, "closed"
        while self._engine.prepare(everything=True):
            pass

    def cancel(self) -> None:
        """Drops all submitted requests."""
        assert self._engine is not None, "closed"
        for request in self._running.values():
            self._engine.cancel(request)
        self._waiting.clear()
        self._running.clear()
        self._finished.clear()

    def close(self) -> None:
        self._engine = None  # frees its memory for training
        free_memory()


class ReferenceDecoder:
    """Decodes one prompt at a time by `decode.py` on Hugging Face modules."""

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
        """Drops all submitted requests."""
        self._submitted.clear()

    def close(self) -> None:
        self._target = None
        free_memory()


class ThreadedDecoder:
    """Sends up to `width` concurrent requests to a server, each in its own thread.

    Args:
        decode: decodes one prompt; called in a thread.
    """

    def __init__(self, decode: Callable[[list[int], SamplingParams, OnStep | None], Generation], width: int) -> None:
        self._decode, self.width = decode, width
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
        future = self._threads.submit(self._decode, prompt, params, on_step)
        future.add_done_callback(lambda done: self._finished.put((key, done)))

    def wait(self) -> Response:
        key, done = self._finished.get()
        return Response(key, done.result())

    def close(self) -> list[Response]:
        """Waits for running requests and returns the successful responses that `wait` has not returned."""
        self._threads.shutdown(cancel_futures=True)
        left = [self._finished.get() for _ in range(self._finished.qsize())]
        return [Response(key, done.result()) for key, done in left if not done.cancelled() and not done.exception()]


def decode_all(
    decoder: EngineDecoder | ReferenceDecoder,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    on_step: OnStep | None = None,
) -> list[Generation]:
    """Decodes prompts and returns them in order; calls `on_step` with the growing generations. Raises UserError."""
    found: dict[int, Generation] = {}
    try:
        for key, prompt in enumerate(prompts):
            decoder.submit(key, prompt, params, on_step=on_step)
        while len(found) < len(prompts):
            response = decoder.wait()
            found[response.key] = response.generation
    except BaseException:  # including Ctrl-C
        decoder.cancel()
        raise
    return [found[key] for key in range(len(prompts))]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
