"""Who answers: the runtime's engine, or the readable reference where the engine cannot compute the target."""

import gc
import sys
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import Message, Tool
from dflash_toolkit.decode import generate
from dflash_toolkit.models.target import Target, load_config, resolve_dtype, use_device
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import load_parts, read_drafter
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Response:
    """What came back for a request."""

    key: int  # that it was asked with
    tokens: list[int]  # stop token included; none for a response to leave out
    finish_reason: str  # stop or length
    dropped: str = "of unknown tokens"  # why there are none


@dataclass(frozen=True, slots=True)
class Chat:
    """What a prompt was rendered from, for servers that render it themselves."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()


class Backend(Protocol):
    """Answers requests, several at a time, in the order in which they are finished."""

    width: int  # requests worth having asked at a time

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        """Begin to answer a prompt. Raises UserError for one that cannot be answered."""

    def wait(self) -> Response:
        """The next finished response; something must have been submitted. Raises UserError."""

    def close(self) -> None:
        """Give back what it holds."""


class EngineBackend:
    """Continuous batching on the engine that `dflash-serve` runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._finished: deque[Response] = deque()
        self.width = 2 * (engine.options.max_num_seqs or 1)  # whoever ends finds the next one waiting

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        def on_progress(request: Request, step: object) -> None:
            if request.finished:
                self._finished.append(Response(key, request.tokens, request.generation.finish_reason or "length"))

        assert self._engine is not None, "closed"
        self._engine.submit(prompt, params, on_progress)

    def wait(self) -> Response:
        assert self._engine is not None, "closed"
        while not self._finished:
            if not self._engine.step():
                raise RuntimeError("nothing was asked")
        return self._finished.popleft()

    def close(self) -> None:
        self._engine = None  # training needs its memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ReferenceBackend:
    """`decode.py`, one prompt at a time."""

    width = 1

    def __init__(self, target: Target) -> None:
        self._target: Target | None = target
        self._asked: deque[tuple[int, list[int], SamplingParams]] = deque()

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        self._asked.append((key, prompt, params))

    def wait(self) -> Response:
        key, prompt, params = self._asked.popleft()
        assert self._target is not None, "closed"
        generation = generate(self._target, None, prompt, params)
        return Response(key, generation.tokens, generation.finish_reason or "length")

    def close(self) -> None:
        self._target = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_backend(
    target: str,
    *,
    runtime: str = "auto",
    drafter: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch: int,
    context: int,
) -> Backend:
    """Load a target to answer with.

    Args:
        runtime: one of `config.RUNTIMES`; auto is the engine, or, with a line that says why not, the reference.
        drafter: speeds the engine up; the responses stay the same. The reference has no use for one.
        batch: responses written at a time.
        context: prompt and response together, in tokens.

    Raises:
        UserError: missing or broken weights, no such device, too little memory, or (`runtime="engine"`) a target that
            the engine does not compute.
    """
    if runtime != "reference":
        draft = None
        if drafter is not None:  # before the target, which takes longest, and whatever answers in the end
            where = use_device(device)
            draft = read_drafter(drafter, load_config(target), where, resolve_dtype(dtype, where))
        try:
            parts = load_parts(target, draft, device, dtype)
        except UserError as error:
            if runtime == "engine":
                raise
            how = "one prompt at a time" + (" and without the drafter" if drafter else "")
            print(f"the reference answers, {how}, for the engine cannot: {error}", file=sys.stderr)
        else:
            limit = min(context, parts.target.spec.context_limit)
            return EngineBackend(parts.engine(EngineOptions(max_num_seqs=batch, max_model_len=limit)))
    return ReferenceBackend(Target.load(target, device, dtype))
