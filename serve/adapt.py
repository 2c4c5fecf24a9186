"""The server's side of a drafter that learns from its traffic. No other module of `serve` imports `train`."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.checkpoint import load_drafter, save_drafter
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import WIDTH_FOR_PARTS
from dflash_toolkit.models.target_files import load_config, load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.wire import Adaptation
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.live.process import TrainerProcess
from dflash_toolkit.train.objective.target_head import HeadWeights
from dflash_toolkit.train.online import AVERAGE
from dflash_toolkit.train.optim.optimizers import peak_rate
from dflash_toolkit.train.run.prepare import drafter_config
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

if TYPE_CHECKING:
    from .config import ServeConfig

log = logging.getLogger("dflash_toolkit.serve")
PACK_TOKENS, SHARED_PACK_TOKENS = 12288, 4096  # tokens of a training batch on a GPU of its own, and on the engine's
BYTES_PER_PARAMETER = 28  # fp32: weights, gradients, two moments, average, and two served versions
WORKSPACE = 8 << 30  # bytes of a training step, of the head and of CUDA
LEAST_SHARE = 0.2  # share of the GPU's memory that the engine keeps
SHARED_PACK_BLOCKS = 384
FIRST_LAYERS = 2  # layers of a new drafter for a small target: it learns in half the time, and five are little better
ANCHORS = 8  # blocks of a request and step on a CPU: few blocks of many requests teach more than many blocks of one


def first_drafter(config: "ServeConfig") -> Drafter:
    """Returns the drafter to start from, in fp32: the given one, or random weights.

    Raises:
        UserError: it cannot be loaded, or the target has no unused token for the mask.
    """
    if config.drafter is not None:
        return load_drafter(config.drafter, dtype=torch.float32)
    target, tokenizer = load_config(config.target), load_tokenizer(config.target)
    layers = FIRST_LAYERS if target.hidden_size < WIDTH_FOR_PARTS else None
    shape = TrainConfig(target=config.target, drafter=DrafterOptions(layers=layers))
    return Drafter.fresh(drafter_config(shape, target, tokenizer), 0)


def training_options(device: torch.device, rate: float | None, *, fresh: bool, shared: bool) -> TrainConfig:
    """Returns the options of training.

    Args:
        rate: learning rate; None is the usual one.
        fresh: the drafter starts from random weights; otherwise the learning rate is low.
        shared: the engine uses the same device.
    """
    on_gpu = device.type == "cuda"
    tokens, blocks = (SHARED_PACK_TOKENS, SHARED_PACK_BLOCKS) if shared else (PACK_TOKENS, None)
    optim = OptimOptions(
        ema=AVERAGE, learning_rate=rate, pack_tokens=tokens if on_gpu else None, pack_blocks=blocks if on_gpu else None,
        recompute=on_gpu,
    )  # fmt: skip
    optim = replace(optim, learning_rate=peak_rate(optim, on_gpu, warm=not fresh))
    # the step is not compiled: that takes a minute, in which a day-0 drafter learns much
    return TrainConfig(target="", optim=optim, loss=LossOptions(anchors=ANCHORS), run=RunOptions(compile="off"))


def with_room(runtime: EngineOptions, drafter: Drafter, trainer: str | None) -> EngineOptions:
    """Returns the engine's options with memory of its GPU left for a trainer on the same one, unless they name a share.

    Args:
        trainer: device of the trainer; None is the engine's.
    """
    given = runtime.gpu_memory_utilization is not None or runtime.kv_cache_tokens is not None
    if given or trainer is not None or not torch.cuda.is_available():
        return runtime
    total = torch.cuda.mem_get_info()[1]
    needed = BYTES_PER_PARAMETER * sum(p.numel() for p in drafter.parameters()) + WORKSPACE
    return replace(runtime, gpu_memory_utilization=max(runtime.memory_share(total) - needed / total, LEAST_SHARE))


class Adapting:
    """Trains the drafter of an engine in another process. An `EngineLoop` calls it between two steps.

    Args:
        drafter: that of the engine.

    Attributes:
        trainer: the process.
    """

    def __init__(self, engine: Engine, drafter: Drafter, config: "ServeConfig") -> None:
        target, options = engine.runner.target, config.adaptation
        head = HeadWeights(target.embedding, target.head, None, load_config(config.target))
        device = torch.device(options.adapt_device) if options.adapt_device else target.embedding.device
        place = target.embedding.device
        shared = device.type == place.type and device.index in (None, place.index)
        training = training_options(device, options.adapt_learning_rate, fresh=config.drafter is None, shared=shared)
        self._output = Path(options.adapt_output) if options.adapt_output else None
        self._engine, self._drafter = engine, drafter  # in fp32
        self._saved: queue.SimpleQueue[tuple[Callable[[str | None], object], str | None]] = queue.SimpleQueue()
        self.trainer = TrainerProcess(
            engine, head, drafter, training, device=device, share=options.adapt_share if shared else 1.0,
            memory=int(options.adapt_memory_gib * 2**30), fresh=config.drafter is None, on_swap=self._swapped,
        )  # fmt: skip

    def poll(self) -> None:
        """See `TrainerProcess.poll`."""
        self.trainer.poll()
        while not self._saved.empty():
            done, error = self._saved.get()
            done(error)

    def roll_back(self) -> str | None:
        """Serves the version before the current one again; returns why that is impossible, if it is."""
        return self.trainer.roll_back()

    def report(self) -> Adaptation:
        """Returns the trainer's state, for metrics and /v1/drafter."""
        status = self.trainer.status
        return Adaptation(
            steps=status.steps,
            requests=status.records,
            bytes=status.nbytes,
            learnt_from=status.learnt_from,
            held_out_acceptance_length=status.held_out,
            live_acceptance_length=status.live,
            promotions=status.promotions,
            rollbacks=status.rollbacks,
            busy_share=status.busy_share,
            error=self.trainer.error,
        )

    def close(self) -> None:
        self.trainer.close()

    def save(self, folder: str | None, done: Callable[[str | None], object] = lambda error: None) -> None:
        """Writes the served drafter to a directory, in a thread.

        Args:
            folder: None is a directory of --adapt-output, named by the version.
            done: called by `poll` with what is wrong, or None.
        """
        if folder is not None:
            place = Path(folder)
        elif self._output is not None:
            place = self._output / f"version-{self._engine.drafter_version}"
        else:
            done("give `path`, a directory on the server, or start it with --adapt-output")
            return
        drafter = self._drafter  # a new one follows each swap, so this one stays as it is

        def work() -> None:
            error = None
            try:
                save_drafter(drafter, place)
            except (OSError, UserError) as problem:
                error = f"{place}: the drafter was not saved ({problem})"
                log.error(error)
            self._saved.put((done, error))

        threading.Thread(target=work, name="save drafter", daemon=True).start()

    def _swapped(self, tensors: dict[str, torch.Tensor]) -> None:
        self._drafter = Drafter.of_tensors(self._drafter.config, tensors)
        if self._output is not None:
            self.save(None)
