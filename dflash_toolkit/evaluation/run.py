"""Go through prompt sets with a target and its drafter, keeping what is done."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import UserError
from ..decode import Generation, SamplingParams, generate
from ..drafter import Drafter
from ..progress import Progress
from ..prompts import template_hash
from ..target import Target
from .journal import Journal, Key
from .measure import EncodedPrompt, Measurement, measure
from .report import Environment, Report, SetReport, Summary

WARM_UP_TOKENS = 8


def evaluate(
    target: Target,
    drafter: Drafter,
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
            prompts, sampling, arguments, machine and versions) takes them, times included, and decodes only
            the rest. The caller removes it once the report is safe.

    Raises:
        UserError: nothing to decode, a prompt that does not fit the target's context, or a full disk.
    """
    params = params or SamplingParams()
    _check_prompts(target, sets)
    environment = Environment.of(target)
    noted = {**(arguments or {}), **_describe(target, drafter, sets, params, baseline)}
    journal = Journal(partial, _fingerprint(environment, noted)) if partial else None
    done: dict[Key, Measurement] = dict(journal.done) if journal else {}
    pending = [(name, i) for name, prompts in sets.items() for i in range(len(prompts)) if (name, i) not in done]

    if pending:
        name, first = pending[0]
        _warm_up(target, (drafter, None) if baseline else (drafter,), sets[name][first], params)
    meter = _Meter(len(done) + len(pending), done.values()) if show_progress else None
    with meter or contextlib.nullcontext():
        for name, i in pending:
            on_step = meter.step if meter else None
            measurement = measure(target, drafter, sets[name][i], params, baseline=baseline, on_step=on_step)
            done[name, i] = measurement
            if journal:
                journal.append((name, i), measurement)
            if meter:
                meter.finished(measurement)

    size = drafter.config.block_size
    results = {name: tuple(done[name, i] for i in range(len(prompts))) for name, prompts in sets.items()}
    return Report(
        environment,
        noted,
        {name: SetReport(Summary.of(measurements, size), measurements) for name, measurements in results.items()},
        Summary.of([m for measurements in results.values() for m in measurements], size),
    )


def _check_prompts(target: Target, sets: Mapping[str, Sequence[EncodedPrompt]]) -> None:
    if not sets:
        raise UserError("there is no prompt set to evaluate")
    for name, prompts in sets.items():
        if not prompts:
            raise UserError(f"set {name!r} holds no prompts")
        for prompt in prompts:
            where, length = f"set {name!r}, prompt {prompt.id!r}", len(prompt.token_ids)
            if length == 0:
                raise UserError(f"{where}: the prompt is empty")
            if length >= target.context_limit:
                raise UserError(
                    f"{where}: {length} tokens leave no room for an answer in the target's context of "
                    f"{target.context_limit}; shorten or remove it"
                )


def _warm_up(target: Target, drafters: Iterable[Drafter | None], prompt: EncodedPrompt, params: SamplingParams) -> None:
    """A few tokens that nobody times: the first kernels of a process are slow."""
    short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for drafter in drafters:
        generate(target, drafter, prompt.token_ids, short)


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
    target: Target,
    drafter: Drafter,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    params: SamplingParams,
    baseline: bool,
) -> dict[str, Any]:
    config = drafter.config
    return {
        "target": target.name,
        "target_num_layers": target.config.num_hidden_layers,
        "target_sample_sha256": _sample_hash(target.model),
        "chat_template_sha256": template_hash(target.tokenizer),
        "drafter_sha256": _weights_hash(drafter),
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "baseline": baseline,
        **asdict(params),
        "stop_token_ids": list(params.stop_token_ids),
        "prompt_tokens_sha256": {
            name: hashlib.sha256(json.dumps([asdict(p) for p in prompts]).encode()).hexdigest()
            for name, prompts in sets.items()
        },
    }


def _fingerprint(environment: Environment, arguments: dict[str, Any]) -> str:
    stable = asdict(replace(environment, date=""))
    return hashlib.sha256(json.dumps([stable, arguments], sort_keys=True).encode()).hexdigest()


def _weights_hash(drafter: Drafter) -> str:
    """sha256 over names and bf16 bytes, as a checkpoint stores them: the same in every compute dtype."""
    digest = hashlib.sha256()
    for name, parameter in drafter.named_parameters():
        digest.update(name.encode())
        weights = parameter.detach().to("cpu", torch.bfloat16).contiguous()
        digest.update(weights.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sample_hash(model: nn.Module) -> str:
    """sha256 over the first values of every tensor: tells checkpoints apart without reading it all."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:64].cpu().float().numpy().tobytes())
    return digest.hexdigest()
