"""Go through prompt sets with a pair, keeping what is done."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config import UserError
from ..fingerprint import json_digest
from ..generation import Generation, PromptError, check_prompt
from ..progress import Progress
from ..sampling import SamplingParams
from .decoders import Pair
from .journal import Journal, Key
from .measure import EncodedPrompt, Measurement, measure, prompts_digest
from .report import Environment, Report, Section

WARM_UP_TOKENS = 8


def evaluate(
    pair: Pair,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    params: SamplingParams | None = None,
    *,
    baseline: bool = True,
    arguments: Mapping[str, Any] | None = None,
    partial: Path | None = None,
    show_progress: bool = False,
) -> Report:
    """Decode every prompt of every set with the drafter and, with `baseline`, without it too.

    Args:
        sets: at least one set of at least one prompt, by name.
        arguments: further JSON values to note in the report.
        partial: file that keeps finished requests. A later call that would measure the same thing (models,
            pair, prompts, sampling, arguments, machine and versions) takes them, times included, and decodes only
            the rest. The caller removes it once the report is safe.

    Raises:
        UserError: nothing to decode, a prompt that does not fit the target's context, or a full disk.
    """
    params = params or SamplingParams()
    _check_prompts(pair, sets)
    environment = Environment.of(pair)
    noted = {**(arguments or {}), **_describe(pair, sets, params, baseline)}
    journal = Journal(partial, _fingerprint(environment, noted)) if partial else None
    done: dict[Key, Measurement] = dict(journal.done) if journal else {}
    pending = [(name, i) for name, prompts in sets.items() for i in range(len(prompts)) if (name, i) not in done]

    if pending:
        longest = max(len(prompt.token_ids) for prompts in sets.values() for prompt in prompts)
        pair.make_room(longest + params.max_tokens)
        name, first = pending[0]
        _warm_up(pair, (True, False) if baseline else (True,), sets[name][first], params)
    meter = _Meter(len(done) + len(pending), done.values()) if show_progress else None
    with meter or contextlib.nullcontext():
        for name, i in pending:
            on_step = meter.step if meter else None
            measurement = measure(pair, sets[name][i], params, baseline=baseline, on_step=on_step)
            done[name, i] = measurement
            if journal:
                journal.append((name, i), measurement)
            if meter:
                meter.finished(measurement)

    size, repeats = pair.block_size, pair.repeats_plain(params)
    results = {name: tuple(done[name, i] for i in range(len(prompts))) for name, prompts in sets.items()}
    thinking = noted.get("thinking")
    return Report(environment, noted, (Section.of(results, params.temperature, thinking, size, repeats),))


def _check_prompts(pair: Pair, sets: Mapping[str, Sequence[EncodedPrompt]]) -> None:
    if not sets:
        raise UserError("there is no prompt set to evaluate")
    for name, prompts in sets.items():
        if not prompts:
            raise UserError(f"set {name!r} holds no prompts")
        for prompt in prompts:
            try:
                check_prompt(prompt.token_ids, pair.context_limit, pair.vocabulary)
            except PromptError as error:
                raise UserError(f"set {name!r}, prompt {prompt.id!r}: {error}; change or remove it") from error


def _warm_up(pair: Pair, drafts: Iterable[bool], prompt: EncodedPrompt, params: SamplingParams) -> None:
    """A few tokens that nobody times: the first kernels of a process are slow."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), ignore_eos=True)
    for draft in drafts:
        pair.decode(prompt.token_ids, short, draft=draft)


class _Meter:
    """The progress bar: requests done, tokens decoded per second, tau up to now."""

    def __init__(self, total: int, done: Iterable[Measurement]) -> None:
        self._bar = Progress("evaluating", total, unit="tok")
        drafted = [m.drafted for m in done]
        self._committed = sum(len(g.tokens) - 1 for g in drafted)
        self._steps = sum(len(g.steps) for g in drafted)
        self._bar.advance(len(drafted), units=0)

    def __enter__(self) -> "_Meter":
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def step(self, growing: Generation) -> None:
        """The drafted answer has grown by its last step, or by the prefill's first token."""
        if not growing.steps:
            self._bar.advance(0, units=1)
            return
        new = len(growing.steps[-1].tokens)
        self._committed += new
        self._steps += 1
        self._bar.advance(0, units=new, note=f"tau {self._committed / self._steps:.2f}")

    def finished(self, measurement: Measurement) -> None:
        self._bar.advance(1, units=len(measurement.plain.tokens) if measurement.plain else 0)


# ---- what was measured -------------------------------------------------------------------------------------


def _describe(
    pair: Pair,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    params: SamplingParams,
    baseline: bool,
) -> dict[str, Any]:
    sampling = asdict(params)
    return {
        "runtime": pair.name,
        **pair.facts,
        "device": str(pair.device),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "baseline": baseline,
        **sampling,
        "stop_token_ids": list(params.stop_token_ids),
        "prompt_tokens_sha256": {name: prompts_digest(prompts) for name, prompts in sets.items()},
    }


def _fingerprint(environment: Environment, arguments: dict[str, Any]) -> str:
    stable = asdict(replace(environment, date=""))
    return json_digest([stable, arguments])
