"""Measures the steps of a runner on an empty batch."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from .programs.context import Part
from .request import StepShape
from .runner import StepRunner
from .sampler import Mode
from .timing import Shape, Times, measured_times, seconds_of
from .trees.budget import ROWS

SAMPLES = 3  # per step; a start waits for them


def measure_steps(runner: StepRunner, shapes: Collection[Shape]) -> Times:
    """Returns the seconds of steps.

    The batch is empty. For steps over trees and steps that write recurrent states, it has requests without a context.
    Tokens that choose experts are random. Graphs are kept except those of random tokens.
    """
    on_gpu, lengths = runner.device.type == "cuda", runner.state.lengths

    def clock(step: Callable[[], object]) -> float:
        lengths.zero_()
        return seconds_of(step, runner.device)

    with contextlib.ExitStack() as around:
        if runner.target.spec.routes:
            around.enter_context(random_tokens(runner))
        if runner.trees or runner.state.recurrent:
            around.enter_context(full_batch(runner))
        steps: dict[Shape, Callable[[], object]] = {
            (bucket, *shape): launcher(runner, bucket, StepShape(shape[-1], *shape[:-1])) for bucket, *shape in shapes
        }
        for step in steps.values():
            clock(step)
        again_s = 0.5 if on_gpu else 5.0
        return measured_times(steps, clock, SAMPLES, again_s)


def launcher(runner: StepRunner, rows: int, shape: StepShape) -> Callable[[], object]:
    """Returns a function that runs a greedy step of that shape. It does not change an empty batch."""
    part = Part.whole_step(rows, shape)
    if runner.device.type == "cuda":
        return runner.graph(part)[0].replay
    return lambda: runner.run_part(part)


def run_all_parts(runner: StepRunner, rows: int, block: int, mode: Mode) -> None:
    """Runs a step over blocks in which all rows choose in one mode, without a graph."""
    runner.run_part(Part("propose", rows, block))
    runner.run_part(Part("read", rows, block))
    runner.run_part(Part("choose", rows, block, mode))
    runner.run_part(Part("end", rows, block))


@contextlib.contextmanager
def random_tokens(runner: StepRunner) -> Iterator[None]:
    """Within the block, steps of an empty batch start with random tokens and verify random tokens.

    Equal rows would all choose the same experts. Graphs of such steps are dropped at the end.
    """
    generator = torch.Generator(runner.device).manual_seed(0)
    state, rows, vocab = runner.state, runner.max_num_seqs, runner.target.spec.vocab_size
    shape = (rows + max(rows * runner.max_block, ROWS[-1]),)
    tokens = torch.randint(vocab, shape, generator=generator, device=runner.device)
    with runner.graphs.set_aside():
        runner.context.random_tokens = tokens[rows:]
        state.last_token.copy_(tokens[:rows])
        try:
            yield
        finally:
            state.last_token.zero_()
            runner.context.random_tokens = None


@contextlib.contextmanager
def full_batch(runner: StepRunner) -> Iterator[None]:
    """Within the block, an empty batch is full of greedy requests without a context, with room for whole trees.

    They write to the null block, and each to recurrent states of its own. At the end, all state that steps have
    advanced is restored.
    """
    state = runner.state
    fields = [*runner.advanced(), state.active, state.sampler.ends_at]
    saved = [field.clone() for field in fields]
    state.active.fill_(True)
    state.states[0].copy_(torch.arange(1, 1 + runner.max_num_seqs, device=runner.device))
    state.sampler.ends_at.fill_(runner.reach)
    try:
        yield
    finally:
        for field, value in zip(fields, saved, strict=True):
            field.copy_(value)
