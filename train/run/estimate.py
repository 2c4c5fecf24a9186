"""Estimates a run before it starts: hours of every stage, disk, memory, and a shorter command.

Uses configurations alone, neither weights nor network. `rates.py` holds the measured rates.
"""

import itertools
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedConfig

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import open_text, template_variables
from dflash_toolkit.data.sources import Source
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.target_files import load_config, load_tokenizer
from dflash_toolkit.preflight import GIB, size

from ..config import TrainConfig
from ..data_options import own_count
from ..optim.optimizers import uses_muon
from ..prompts.dataset import ROWS as DATASET_ROWS
from .cost import drafter_step_flops, duration, resume_bytes
from .definition import WORK
from .memory import advice, fitted, memory_of, passes_of
from .outlook import Line, outlook
from .rates import (
    ADAMW_MS_PER_BILLION,
    FIXED_S,
    H100,
    H200,
    MUON_MS_PER_BILLION,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SMALL,
    THINKING_TOKENS,
    TRAIN_SHARE,
    TRAIN_SHARE_SMALL,
    Machine,
)
from .speed import CPU, Rate, feature_rate, machine_of, response_rate
from .target_weights import Weights

ROOM = 0.95  # share of the GPU's memory that training may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Cost of a run on one kind of machine. Rates are of all processes together."""

    machine: Machine
    world: int
    prompts: int
    samples: int
    responses: int
    response_tokens: float  # mean of a response
    row_tokens: float  # prompt and response together
    assumed: bool  # whether these lengths are assumed; else they come from rows that were written
    epochs: float
    steps: int
    response_rate: Rate | None  # tokens/s; None if no responses are written
    feature_rate: Rate
    kept: float  # share of the features that is computed only once, not in every epoch
    seconds: dict[str, float]  # by stage
    disk: float  # bytes
    memory: float  # bytes of one GPU
    passes: str  # how a step is made to fit, in words; empty if it is whole
    outlook: list[Line]  # on acceptance length
    advice: str = ""  # on memory, if it is too small
    price: float | None = None  # of a GPU hour
    last_states: float = 0.0  # bytes of the target's last hidden states, for a loss with its distribution

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def fits(self) -> bool:
        return self.memory <= ROOM * self.machine.memory_gib * GIB

    def hours(self, *stages: str) -> float:
        return sum(self.seconds[stage] for stage in stages) / 3600

    def table(self) -> list[Line]:
        """Returns rows of (what, how much, how it was found) for people."""
        lengths = "assumed" if self.assumed else "mean of the rows written so far"
        rows = [
            ("machine", f"{self.world} x {self.machine.name}", ""),
            ("responses", f"{self.prompts:,} prompts x {self.samples}, about {self.response_tokens:,.0f} tokens each",
             lengths),
        ]  # fmt: skip
        if self.response_rate:
            rows.append(("", f"{duration(self.seconds['responses'])} at {self.response_rate.words}",
                         self.response_rate.how))  # fmt: skip
        else:
            rows.append(("", "none to write", ""))
        last = f"{size(self.last_states)} more for the target's last hidden states, if all are kept"
        rows += [
            ("features", f"{duration(self.seconds['features'])} at {self.feature_rate.words}; {self.kept:.0%} kept",
             self.feature_rate.how),
            *([("", last, "the loss compares with its distribution")] if self.last_states else []),
            ("training", f"{duration(self.seconds['training'])}: {self.steps:,} steps, {self.epochs:.3g} epochs",
             "computed from the drafter's FLOPs"),
            ("start and end", duration(self.seconds["start and end"]), "assumed"),
            ("total", duration(self.total), ""),
            *([] if self.price is None else [("cost", f"{self.total / 3600 * self.world * self.price:,.2f}",
                                              f"{self.price:g} for each GPU hour")]),
            ("disk", size(self.disk), "resume points, checkpoints, responses, features on disk"),
            (self.machine.memory_name, f"{size(self.memory)} of {self.machine.memory_gib:.0f} GiB"
             + ("" if self.fits else ": TOO MUCH"), ", ".join(filter(None, ("computed", self.passes)))),
            *self.outlook,
        ]  # fmt: skip
        return rows

    def summary(self) -> list[str]:
        """Returns lines to print before the first stage of a run."""
        stages = ", ".join(f"{name} {duration(value)}" for name, value in self.seconds.items() if value >= 1)
        memory = f"{size(self.memory)} of {self.machine.memory_name}" + (
            "" if self.fits else f", MORE than a {self.machine.name} has"
        )
        rate = f" at {self.response_rate.words} ({self.response_rate.how})" if self.response_rate else ""
        lines = [
            f"estimate for {self.world} x {self.machine.name}: {duration(self.total)} ({stages})",
            f"{self.prompts:,} prompts x {self.samples}: {self.responses:,} responses of about "
            f"{self.response_tokens:,.0f} tokens{rate}; {size(self.disk)} of disk, {memory}; dflash-train --estimate "
            f"prints more",
        ]
        return lines + [self.advice] * bool(self.advice)


def estimate(
    config: TrainConfig, target: PreTrainedConfig, machine: Machine | None = None, *, world: int = 1,
    thinking: bool = False, server: bool = False, linear_attention: bool | None = None, work: Path | None = None,
    measured: float | None = None,
) -> Estimate:  # fmt: skip
    """Estimates a run from configurations alone, without weights or network.

    Args:
        target: the configuration of the language model.
        machine: default: this machine, see `machine_of`.
        world: number of processes, each with its own GPU.
        thinking: whether responses have thinking.
        server: whether responses come from vLLM with 256 concurrent requests instead of this run.
        linear_attention: whether that extra is installed (default: checked here).
        work: directory of a run that may have started; mean lengths of its rows are used.
        measured: tokens/s of the responses of all processes, if this run has written some.
    """
    machine = machine or machine_of(config, target)
    cpu = machine.name == CPU
    weights, shape = Weights.of_target(target), _shape(config, target)
    config = config.with_loss_of(shape.architecture)
    prompts, samples = _prompts_of(config)
    found = _lengths_in(config, work)
    cap = config.responses.max_tokens
    answered, length = found or (
        min(cap, THINKING_TOKENS if thinking else RESPONSE_TOKENS),
        min(cap, THINKING_TOKENS if thinking else RESPONSE_TOKENS) + PROMPT_TOKENS,
    )
    length = min(length, config.prompts.max_length)
    answered = min(answered, length)
    responses = prompts * samples
    writes = config.responses.regenerate and not config.response_files
    rate = None
    if writes or server:
        rate = response_rate(config, target, weights, machine, PROMPT_TOKENS + answered / 2, server)
        rate = Rate(measured, "measured in this run") if measured else Rate(rate.tokens_per_second * world, rate.how)

    row = config.prompts.join_to or length
    memory = memory_of(config, target, weights, shape, int(row), world=world, gpu=not cpu)
    room = ROOM * machine.memory_gib * GIB
    config = config if cpu else fitted(config, memory, room)
    tokens, blocks = memory.tokens, memory.blocks
    step_tokens = tokens * config.optim.accumulate
    rows = blocks * shape.block_size
    visible = [min(row / 2, shape.window(layer) or row) for layer in range(shape.num_layers)]  # context tokens
    flops = drafter_step_flops(
        shape, tokens, rows, int(rows * (sum(visible) + shape.num_layers * shape.block_size)),
        blocks * (shape.block_size - 1), shape.vocab_size,
    )  # fmt: skip
    share = TRAIN_SHARE if target.hidden_size >= SMALL else TRAIN_SHARE_SMALL
    parameters = sum(p.numel() for p in memory.drafter.parameters())
    muon = uses_muon(config, gpu=not cpu)
    if muon:
        per_billion = MUON_MS_PER_BILLION / world * H200.tflops / machine.tflops
    else:
        per_billion = ADAMW_MS_PER_BILLION * H200.read_tb_s / machine.read_tb_s
    micro_s = (flops + memory.cost(config)) / (share * machine.tflops * 1e12)
    step_s = config.optim.accumulate * micro_s / world + (0 if cpu else per_billion * parameters / 1e12)

    features = feature_rate(target, weights, shape, machine, linear_attention, whole=config.loss.distribution)
    features = Rate(features.tokens_per_second * world, features.how)
    state = responses * length * shape.hidden_size * (1 if config.run.feature_dtype == "float8" else 2)
    last_states = state * config.loss.distribution
    held = state * len(shape.target_layer_ids) + last_states
    needed = memory.need(config).total
    kept = _kept(config, held, world * (machine.memory_gib * GIB - needed))
    per_token_s = step_s / step_tokens + (1 - kept) / features.tokens_per_second
    once = kept * responses * length / features.tokens_per_second
    epochs, steps = float(config.epochs), config.optim.steps
    if config.optim.minutes:
        seen = 60 * config.optim.minutes / per_token_s
        steps, epochs = max(1, int(seen / step_tokens)), seen / (responses * length)
    elif steps:
        epochs = steps * step_tokens / (responses * length)
    else:
        steps = math.ceil(epochs * responses * length / step_tokens)
    point, checkpoint = resume_bytes(memory.drafter, config, muon), 2 * parameters
    disk = 2 * point + 3 * checkpoint + 10 * responses * length  # JSON, and the corpus with 4 bytes per token
    if config.run.features in ("disk", "hybrid"):
        disk += held
    return Estimate(
        machine=machine, world=world, prompts=prompts, samples=samples, responses=responses,
        response_tokens=answered, row_tokens=length, assumed=found is None, epochs=epochs, steps=steps,
        response_rate=rate, feature_rate=features, kept=kept,
        seconds={
            "responses": responses * answered / rate.tokens_per_second if rate else 0.0,
            "features": once + (1 - kept) * steps * step_tokens / features.tokens_per_second,
            "training": steps * step_s,
            "start and end": FIXED_S,
        },
        disk=disk, last_states=last_states, memory=needed, passes=passes_of(config),
        outlook=outlook(
            weights.dense + weights.embedding + weights.experts, shape.architecture.kind,
            epochs * responses * answered, responses * answered, 3600 / per_token_s * answered / length, world, work,
        ),
        advice="" if cpu or needed <= room else advice(config, memory, needed, room), price=config.estimate_price,
    )  # fmt: skip


def within_an_hour(config: TrainConfig, found: Estimate) -> list[str]:
    """Returns options that shorten a run to about an hour; none if it is short enough or nothing helps."""
    room = 3600 - found.seconds["start and end"]
    if found.total <= 3600:
        return []
    if config.response_files or config.optim.minutes or config.optim.steps:
        left = room - found.seconds["responses"]
        return [f"optim.minutes={max(1, int(left // 60))}"] if left > 60 else []
    prompts = int(found.prompts * room / (found.total - found.seconds["start and end"]))
    digits = max(0, len(str(prompts)) - 2)
    prompts = prompts // 10**digits * 10**digits
    return [f"prompts.max_prompts={prompts}"] if prompts else []


def _shape(config: TrainConfig, target: PreTrainedConfig) -> DrafterConfig:
    given = asdict(config.drafter)
    if given["mask_token_id"] is None:
        given["mask_token_id"] = int(target.vocab_size) - 1
    try:
        return drafter_shape(target, **given)
    except ValueError as error:
        raise UserError(f"drafter: {error}") from error


def thinks(config: TrainConfig) -> bool:
    """Returns whether responses have thinking, by the options, else by the chat template."""
    if config.responses.thinking is not None:
        return config.responses.thinking
    try:
        return "enable_thinking" in template_variables(load_tokenizer(config.target, **config.rendering))
    except UserError:
        return False


def estimate_here(config: TrainConfig, world: int, measured: float | None = None) -> Estimate:
    """Returns the estimate for this machine; reads the target's config.json and, if present, its tokenizer.

    Args:
        measured: as for `estimate`.
    """
    work = Path(config.output_dir) / WORK
    return estimate(
        config, load_config(config.target), world=world, thinking=thinks(config), work=work, measured=measured
    )


def announced(config: TrainConfig, world: int, measured: float | None = None) -> list[str]:
    """Returns the lines of a run on what it takes, and options for a shorter run. Arguments as `estimate_here`."""
    found = estimate_here(config, world, measured)
    shorter = within_an_hour(config, found)
    return [*found.summary(), *([f"for about an hour add {shlex.join(shorter)}"] if shorter else [])]


def show(config: TrainConfig, words: Sequence[str]) -> None:
    """Prints the estimate and a command that takes an hour. Args: words: of the command line."""
    found = estimate_here(config, int(os.environ.get("WORLD_SIZE", "1")))
    console = Console()
    table = Table(title=f"dflash-train for {config.target}", title_justify="left")
    for heading in ("", "estimate", "how it was found"):
        table.add_column(heading, overflow="fold")
    for row in found.table():
        table.add_row(*map(Text, row))
    console.print(table)
    if found.advice:
        console.print(Text(f"GPU memory: {found.advice}"), soft_wrap=True)
    if found.machine is H100:
        console.print("no GPU was found on this machine: the estimate is for an H100 with 80 GB")
    if shorter := within_an_hour(config, found):
        line = shlex.join(["dflash-train", *(word for word in words if word != "--estimate"), *shorter])
        console.print(Text(f"about an hour: {line}"), soft_wrap=True)


def _prompts_of(config: TrainConfig) -> tuple[int, int]:
    """Returns numbers of prompts and of responses per prompt: the options', or fewer if the files are shorter."""
    names = config.response_files or config.data
    counts = [_lines(name, config) for name in names] or [DATASET_ROWS]
    asked = config.prompts.max_prompts or DATASET_ROWS
    there = sum(count for count in counts if count is not None)
    if None in counts:
        prompts = asked  # a source is missing, or must be read whole to count it
    elif config.response_files:
        prompts = there
    else:
        prompts = min(asked, there)
    samples = config.responses.samples if config.responses.regenerate and not config.response_files else 1
    return max(1, prompts), samples


def _lines(name: str, config: TrainConfig) -> int | None:
    """Returns the lines of a local JSONL or text file; None if that needs reading it all."""
    if count := own_count(name):
        return count
    source = Source(name, config.prompts.form)
    path = Path(source.place)
    if not (source.is_file and path.is_file()):
        return None
    if not any(kind in path.suffixes for kind in (".jsonl", ".ndjson", ".txt")):
        return None
    with open_text(path) as lines:
        count = sum(1 for line in lines if line.strip())
    return max(0, min(count, source.stop or count) - source.start)


def _lengths_in(config: TrainConfig, work: Path | None) -> tuple[float, float] | None:
    """Returns the mean tokens of a response and of a row in the files of a run; None if there are none."""
    paths = [Path(name) for name in config.response_files] or (sorted(work.glob("answers*.jsonl")) if work else [])
    answered = length = rows = 0
    for path in paths:
        if not path.is_file():
            continue
        with open_text(path) as lines:
            for line in itertools.islice(lines, 1000):
                try:
                    row = json.loads(line)
                    answered += sum(end - start for start, end in row["spans"])
                    length += len(row["tokens"])
                    rows += 1
                except (ValueError, LookupError, TypeError):
                    break  # a torn or foreign line
    return (answered / rows, length / rows) if rows else None


def _kept(config: TrainConfig, held: float, room: float) -> float:
    """Returns the share of the features that is computed only once."""
    run = config.run
    if run.features in ("memory", "disk", "hybrid"):
        return 1.0
    if run.features == "online" or config.optim.steps:
        return 0.0
    if held <= max(0.0, run.feature_gpu_share * room):
        return 1.0
    return min(1.0, run.feature_cache_gb * GIB / held)
