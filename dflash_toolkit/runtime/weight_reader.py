"""Reads checkpoints in a thread, so that decoding continues, and hands them to the engine's loop."""

import logging
import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.reader import weight_files
from ..config import UserError
from .engine import Engine
from .wire import Replaced, ReplaceWeights

log = logging.getLogger(__name__)


class WeightReader:
    """Replaces the weights of an engine from directories. All methods are called in the loop's thread.

    Attributes:
        woken: readable when `finish` has something to do.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "weights")
        self._done: queue.SimpleQueue[tuple[Any, ReplaceWeights, Any]] = queue.SimpleQueue()
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.setblocking(False)

    def add(self, front: Any, message: ReplaceWeights) -> None:
        """Starts to read a directory."""

        def work() -> None:
            try:
                found = self._read(message)
            except Exception as error:  # for the reply
                found = error
            self._done.put((front, message, found))
            self._waker.send(b"x")

        self._thread.submit(work)

    def finish(self) -> list[tuple[Any, Replaced]]:
        """Replaces the weights that were read; returns the replies, with the front ends that asked."""
        self.woken.recv(1 << 10)
        replies = []
        while not self._done.empty():
            front, message, found = self._done.get()
            error = None
            try:
                if isinstance(found, Exception):
                    raise found
                if message.part == "drafter":
                    self._engine.load_drafter(found)
                else:
                    self._engine.update_target(found)
            except UserError as mistake:
                error = str(mistake)
            except Exception:
                log.exception("the weights in %s were not used", message.folder)
                error = "the weights could not be used; see the server's log"
            replies.append((front, Replaced(message.number, error, self._engine.versions)))
        return replies

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        for end in (self.woken, self._waker):
            end.close()

    def _read(self, message: ReplaceWeights) -> Any:
        """Returns a drafter, or the tensors of a target. Raises UserError."""
        from safetensors.torch import load_file

        from ..models.dflash.checkpoint import load_drafter
        from ..models.spec import ModelSpec
        from ..models.target_files import load_config

        folder, runner = Path(message.folder), self._engine.runner
        if not folder.is_dir():
            raise UserError(f"model_path {message.folder!r} is not a directory on the server")
        if message.part == "drafter":
            return load_drafter(str(folder), dtype=runner.dtype)
        own, spec = runner.target.spec, ModelSpec.of_target(load_config(str(folder)))
        if replace(spec, tied_head=own.tied_head) != own:
            raise UserError(f"model_path {message.folder!r} holds another model than the served one; restart for it")
        if not (files := weight_files(folder)):
            raise UserError(f"model_path {message.folder!r} holds no *.safetensors file")
        try:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        except Exception as error:  # safetensors has its own, and OSError
            raise UserError(f"model_path {message.folder!r}: a file is damaged ({error})") from error
