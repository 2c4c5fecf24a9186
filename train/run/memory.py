"""GPU memory of training, computed from shapes, and how a step is divided so that it fits.

Measured peaks of scripts/bench/train_step.py, H200, Qwen3-8B, 8,192 tokens and 2,048 blocks (4470a42
train_step_qwen3_8b_h200): 48.6 GiB with Muon, 52.5 with AdamW, 35.2 with optim.recompute, 52.8 with optim.accumulate=4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from transformers import PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.preflight import size

from ..config import TrainConfig, why_target_stays
from ..features.gpu_memory import MARGIN
from ..features.source import FORWARD_TOKENS
from ..optim.optimizers import uses_muon
from ..optim.schedule import packing
from .cost import drafter_step_flops, resume_bytes
from .target_weights import Weights, computes

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
EAGER = 2.2  # activations without torch.compile to those with it: 4470a42 train_sharded_qwen3_8b_h100, ZeRO-3
CONVOLUTION = 4.5  # hidden states that the convolutions of a layer keep: 4470a42 train_dflash2_h100, 0.5B


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one GPU at the peak of a step, without stored features."""

    target: float
    drafter: float  # weights, gradients and the optimiser's state
    step: float  # features and activations

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.step


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """The memory of training a drafter of this shape.

    Args:
        tokens, blocks: of a micro step.
        world: processes that train together, each with its own GPU.
        copied: whether the engine for held-out prompts has its own copy of a target in FP8 (docs/limits.md).
    """

    weights: Weights
    drafter: Drafter  # needs no storage
    tokens: int
    blocks: int
    world: int = 1
    gpu: bool = True
    copied: bool = False

    def need(self, config: TrainConfig) -> Need:
        """Returns the memory with the options of `config`; splits and recompute that are not given are off.

        The peak is in the backward pass of the last layer, in the optimiser's step, or in the target's forward pass.
        """
        optim, shape = config.optim, self.drafter.config
        held = optim.accumulate > 1 or (optim.splits or 1) > 1 or bool(optim.recompute)  # gradients, at the peak
        state, gradients, casts = self._drafter(config)
        wide = 2 if self.gpu else 4
        tokens = wide * self.tokens * (shape.feature_size + shape.hidden_size * (1 + config.loss.distribution))
        tokens += wide * self.tokens * 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        backward = casts + gradients * held + tokens + self._pass(config)
        stepping = gradients + 12 * shape.hidden_size * max(shape.intermediate_size, shape.feature_size)
        a_token = 3 * shape.intermediate_size + 6 * shape.hidden_size + 2 * shape.feature_size
        forward = wide * max(FORWARD_TOKENS, config.prompts.row_tokens) * a_token if self.gpu else 0.0
        target, drafter = self._target(config), state + max(gradients, casts + gradients * held)
        if config.run.offload_target:  # the features are computed before the drafter is on the GPU
            ends = 2.0 * self.weights.embedding
            return Need(ends, drafter, max(state + max(backward, stepping), target + forward - ends) - drafter)
        peak = max(backward, stepping, forward + gradients * (optim.accumulate > 1))
        return Need(target, drafter, max(0.0, state + peak - drafter))

    def cost(self, config: TrainConfig) -> float:
        """Returns the FLOPs that splits and recompute add to a micro step: contexts and layers computed again."""
        shape = self.drafter.config
        rows = self.blocks * shape.block_size
        context = drafter_step_flops(shape, self.tokens, 0, 0, 0, 0)
        layers = drafter_step_flops(shape, 0, rows, 0, 0, 0) / 3
        return ((config.optim.splits or 1) - 1) * context + bool(config.optim.recompute) * layers

    def _target(self, config: TrainConfig) -> float:
        weights = self.weights
        if config.run.feature_endpoint:
            return 2.0 * weights.embedding
        nbytes: float = weights.nbytes
        if weights.mxfp4:  # transformers computes them in 16 bits
            nbytes = 2.0 * (weights.embedding + weights.dense + weights.experts)
        elif weights.fp8 and self.copied:
            nbytes *= 2
        return nbytes / config.run.target_tensor_parallel_size

    def _drafter(self, config: TrainConfig) -> tuple[float, float, float]:
        """Returns the bytes of weights and optimiser state, of gradients, and of 16-bit casts of the weights."""
        parameters = sum(p.numel() for p in self.drafter.parameters())
        weights = gradients = 4.0 * parameters
        fixed = sum(tensor.nbytes for tensor in self.drafter.buffers())
        casts = 2.0 * parameters if self.gpu else 0.0
        state: float = resume_bytes(self.drafter, config, uses_muon(config, self.gpu))
        if config.run.fsdp or config.run.zero == 3:
            state, gradients = state / self.world, gradients / self.world
            if config.run.zero or config.run.fsdp_reshard_after_forward:
                casts *= min(1, 2 / self.drafter.config.num_layers)  # a layer and the next one
        elif config.run.zero:
            state = weights + state / self.world
        return state + fixed, gradients, casts

    def _pass(self, config: TrainConfig) -> float:
        """Returns the bytes of the activations of a pass over the blocks."""
        shape, optim, wide = self.drafter.config, config.optim, 2 if self.gpu else 4
        rows = -(-self.blocks // (optim.splits or 1)) * shape.block_size
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer = 4 * shape.hidden_size + 3 * heads + 4 * kv_heads + 3 * shape.intermediate_size
        if shape.conv_kernel_size:
            layer += int(CONVOLUTION * shape.hidden_size)
        kept = layer + shape.num_layers * shape.hidden_size if optim.recompute else layer * shape.num_layers
        if self.gpu and (config.run.compile == "off" or config.run.zero == 3):
            kept = int(EAGER * kept)
        # features before and after every layer, some in fp32, gates and messages; never recomputed
        rank, message = (shape.sizes.get(name, 0) for name in ("transfer_rank", "message_size"))
        kept += shape.num_layers * (10 * rank + 5 * message)
        backward = rows * 2 * shape.intermediate_size
        logits = min(config.loss.head_rows, rows) * shape.vocab_size * (1 + config.loss.distribution)
        loss = logits + rows * shape.selector_top_k * shape.selector_rank
        if rank:  # codes of the true tokens, refined rows, and the rows that the head's part of the state adds
            loss += rows * (3 * rank + 2 * message + 6 * shape.hidden_size)
        return wide * (rows * (kept + 2 * shape.hidden_size) + max(backward, loss))


def memory_of(
    config: TrainConfig, target: PreTrainedConfig, weights: Weights, shape: DrafterConfig, length: int, *,
    world: int = 1, gpu: bool = True,
) -> TrainingMemory:  # fmt: skip
    """Returns the memory of a run. Args: length: tokens of a row that is not packed."""
    tokens, blocks = packing(config, torch.device("cuda" if gpu else "cpu"))
    if not tokens:
        tokens, blocks = config.optim.batch_size * length, config.optim.batch_size * config.loss.anchors
    decodes = bool(config.held_out or config.prompts.held_out) and config.run.evaluate_runtime != "reference"
    with torch.device("meta"):
        drafter = Drafter(shape)
    return TrainingMemory(weights, drafter, tokens, blocks, world, gpu, decodes and computes(target))


def still_needed(config: TrainConfig, target: PreTrainedConfig, drafter: Drafter, world: int) -> float:
    """Returns the bytes that steps allocate once the target and the drafter's weights are on the GPU."""
    weights = Weights.of_target(target)
    memory = memory_of(config, target, weights, drafter.config, config.prompts.row_tokens, world=world)
    need = memory.need(config)
    return need.drafter + need.step - sum(p.nbytes for p in drafter.parameters())


def passes_of(config: TrainConfig) -> str:
    """Returns how a step is made to fit, in words; nothing if it is whole."""
    splits, recompute = config.optim.splits or 1, config.optim.recompute
    parts = [f"{splits} passes (optim.splits={splits})"] * (splits > 1)
    parts += ["recomputed activations (optim.recompute=true)"] * bool(recompute)
    return " and ".join(
        parts + ["the target in host memory (run.offload_target=true)"] * bool(config.run.offload_target)
    )


def choices(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yields configurations with every division of a step, in the order of preference; given values stay."""
    optim, run = config.optim, config.run
    offload = (False, True) if run.offload_target is None and not why_target_stays(config) else (run.offload_target,)
    recompute = (False, True) if optim.recompute is None else (optim.recompute,)
    splits = SPLITS if optim.splits is None else (optim.splits,)
    for away, again, count in product(offload, recompute, splits):
        divided = replace(optim, splits=count, recompute=again)
        yield replace(config, optim=divided, run=replace(run, offload_target=away))


def fitted(config: TrainConfig, memory: TrainingMemory, room: float) -> TrainConfig:
    """Returns the cheapest configuration with a step of at most `room` bytes, or the smallest step if none fits."""
    every = [(each, memory.need(each).total) for each in choices(config)]
    fitting = [each for each, total in every if total <= room]
    return min(fitting, key=memory.cost) if fitting else min(every, key=lambda each: each[1])[0]


def check_memory(config: TrainConfig, memory: TrainingMemory, free: int, total: int) -> tuple[TrainConfig, str]:
    """Returns the configuration that fits into a GPU's free memory, and a line if it is not the usual one.

    Args:
        free, total: bytes of the GPU before anything is loaded.

    Raises:
        UserError: nothing fits; the message names options and what each saves.
    """
    room = free - MARGIN * total
    found, usual = fitted(config, memory, room), next(choices(config))
    need = memory.need(found)
    if need.total > free:
        raise UserError(
            f"training takes at least {size(need.total)} of GPU memory (target {size(need.target)}, drafter and "
            f"optimiser {size(need.drafter)}, step {size(need.step)}), but {size(free)} of {size(total)} are free; "
            f"{advice(config, memory, need.total, room)}"
        )
    if found == usual:
        return found, ""
    return found, (
        f"a whole step would take {size(memory.need(usual).total)} of GPU memory, and {size(free)} are free; with "
        f"{passes_of(found)} it takes {size(need.total)}, and the update is the same"
    )


def advice(config: TrainConfig, memory: TrainingMemory, least: float, room: float) -> str:
    """Returns options that save memory and how much each saves. Args: least: the memory of the smallest step."""
    saved: dict[str, float] = {}
    for words, changed, other in _ways(config, memory):
        saved[words] = least - other.need(fitted(changed, other, 0.0)).total
    enough = [words for words, less in saved.items() if least - less <= room]
    listed = enough or sorted((words for words, less in saved.items() if less > 0), key=lambda words: -saved[words])
    ways = "; ".join(f"{words} ({size(saved[words])} less)" for words in listed)
    if not ways:
        return "use a smaller target"
    return f"{'any of these is enough' if enough else 'several of these may be enough'}: {ways}"


def _ways(config: TrainConfig, memory: TrainingMemory) -> Iterator[tuple[str, TrainConfig, TrainingMemory]]:
    """Yields ways to need less: words, the options, and the memory of another drafter or of more GPUs."""
    optim, run, shape = config.optim, config.run, memory.drafter.config
    if optim.splits is not None:
        yield "no optim.splits", replace(config, optim=replace(optim, splits=None)), memory
    if optim.recompute is False:
        yield "optim.recompute=true", replace(config, optim=replace(optim, recompute=True)), memory
    if optim.ema:
        yield "optim.ema=0", replace(config, optim=replace(optim, ema=0.0)), memory
    if optim.optimizer == "adamw":
        yield "optim.optimizer=muon", replace(config, optim=replace(optim, optimizer="muon")), memory
    if run.compile == "off":
        yield "run.compile=auto", replace(config, run=replace(run, compile="auto")), memory
    stored = replace(
        config, held_out=(), prompts=replace(config.prompts, held_out=0),
        run=replace(run, features="disk", offload_target=None),
    )  # fmt: skip
    if why_target_stays(config) and not why_target_stays(stored):
        yield "run.features=disk prompts.held_out=0", stored, memory
    elif run.offload_target is False:
        yield "no run.offload_target", stored, memory
    if not config.init_from:
        plain = {name: 0 for part in shape.architecture.parts for name in part.sizes}
        with torch.device("meta"):
            if any(getattr(shape, name) for name in plain):
                yield "drafter.kind=dflash", config, replace(memory, drafter=Drafter(shape.resized(**plain)))
            if shape.num_layers > 2:
                small = replace(shape, num_layers=2, layer_types=shape.layer_types[:2])
                yield "drafter.layers=2", config, replace(memory, drafter=Drafter(small))
    if not run.zero:
        sharded = replace(config, run=replace(run, fsdp=True))
        yield "run.fsdp=true on twice as many GPUs", sharded, replace(memory, world=2 * memory.world)
