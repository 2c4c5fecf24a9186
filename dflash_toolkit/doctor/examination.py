"""Checks a drafter: its files, sweeps over settings, symptoms. The work of dflash-doctor."""

import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from ..config import UserError, to_mapping
from ..data.prompts import Prompt, encode_chat
from ..data.skipped import Skipped
from ..files import write_json
from ..fingerprint import model_digest
from ..models.device import resolve_dtype, use_device
from ..models.target import Target
from ..models.target_files import load_config, load_tokenizer
from ..preflight import check_target
from ..progress import Progress, disable_library_bars
from ..threads import use_threads
from .cli import PROG, DoctorConfig
from .confidences import check_calibration
from .exported import compare, compare_target
from .files import FILE_CHECKS, Case
from .finding import Finding, has_fault, show, to_json
from .probe import ANSWER_WORK, NEAR, Probe, Scores, Setting
from .sweeps import count_ways, sweep
from .symptoms import (
    Known,
    check_acceptance,
    check_curve,
    check_recall,
    check_serving,
    check_temperature,
    check_thinking,
    enough,
    knows_thinking,
)

MIN_BLOCKS = 32
BUILT_IN = (
    "Explain in a few paragraphs why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A train leaves at 9:40 and arrives at 13:15. How long does it travel? Reason step by step.",
    "List ten facts about the planet Jupiter.",
    "Write a short letter to a landlord about a broken heating.",
    "Translate into French: The library opens at eight and closes at six, except on Sundays.",
    "Compare bicycles and cars as means of transport in a large city.",
    "Write the numbers from 41 to 70, separated by commas.",
)


def report(config: DoctorConfig) -> int:
    """Examines, prints and writes; returns the exit code: 1 for a fault."""
    use_threads(config.threads)
    disable_library_bars()
    where = f"findings go to {config.output}" if config.output else "findings are printed here"
    pair = f"target {config.target}, drafter {config.drafter} on {use_device(config.device)}"
    print(f"{PROG}: {pair}; {where}", file=sys.stderr)
    findings = examine(config)
    show(findings)
    if not has_fault(findings):
        template = ["--chat-template", config.chat_template] if config.chat_template else []
        print(shlex.join(["dflash-serve", "--target", config.target, "--drafter", config.drafter, *template]))
    if config.output:
        write_json(Path(config.output), to_json(findings, to_mapping(config) | {"versions": _versions()}))
    return int(has_fault(findings))


def examine(config: DoctorConfig) -> list[Finding]:
    """Runs every check, in order: files, sweeps, symptoms. Skips measurements that cannot run on the target.

    Raises:
        UserError: the doctor itself cannot work: no such model, no prompts, no chat template.
    """
    where = use_device(config.device)
    resolve_dtype(config.dtype, where)
    prompts = _prompts(config)
    target_config = load_config(config.target)
    check_target(config.target)
    tokenizer = load_tokenizer(config.target, **config.rendering)
    case = Case.read(config.drafter, target_config, tokenizer, config.thinking)
    # reading all weights is slow, so only if there is a record to compare with
    digest = model_digest(config.target) if case.record and case.provenance.get("target_digest") else None
    load = functools.partial(Target.load, config.target, config.device, config.dtype)
    return judge(case, prompts, load, config.max_tokens, digest, config.temperature)


def judge(
    case: Case,
    prompts: Sequence[Prompt],
    load: Callable[[], Target],
    max_tokens: int,
    digest: str | None = None,
    temperature: float = 0.0,
) -> list[Finding]:
    """Runs every check of one drafter; loads the target when it is needed. Raises UserError as `examine`.

    Args:
        digest: of the target's weights, if known.
        temperature: above 0, acceptance at this temperature is compared with that of greedy decoding.
    """
    findings = [finding for check in FILE_CHECKS for finding in check(case)]
    damaged = has_fault([f for f in findings if f.check in ("tensors", "weights")])
    exported = compare(case)
    findings += exported.findings
    encoded = [encode_chat(case.tokenizer, prompt.messages, case.thinking, prompt.tools) for prompt in prompts]
    if not case.measurable:
        return findings

    target = load()
    about_target, target_same = compare_target(case, target, digest)
    findings += about_target
    drafter = case.drafter()
    here = Setting.of(drafter)
    probe = Probe(target, drafter, max_tokens, exported.setting(here).layer_ids)
    modes = 1 + knows_thinking(case) * 2 + (temperature > 0) * 2
    total = modes * len(encoded) * ANSWER_WORK + count_ways(case, exported.setting(here)) + 1
    with Progress("examining", total, unit="passes") as bar:
        try:
            answers = probe.answers(encoded, bar, [prompt.id for prompt in prompts])
            enough(answers, MIN_BLOCKS)
        except UserError as error:
            if not has_fault(findings):
                raise
            # the findings so far remain valid
            return [*findings, Finding("acceptance", "warning", "it was not measured", str(error))]
        swept = sweep(case, probe, answers, bar, exported, damaged=damaged)
        findings += swept.findings
        findings += check_thinking(case, probe, prompts, answers, swept.setting, bar)
        if temperature > 0:
            findings += check_temperature(case, probe, encoded, answers, temperature, findings, bar)
        scores = probe.score(answers, here, near=NEAR)
        if exported.restorable and not exported.as_exported:
            findings.append(_restored(scores, probe.score(answers, exported.setting(here), near=1), findings))
        bar.advance(1, note="judging")
    known = Known(exported, target_same, swept.best_tau)
    findings += check_curve(case, scores, findings, known)
    findings += check_serving(case, answers, scores, findings, known)
    findings += check_recall(case, scores, findings, known)
    findings += check_acceptance(case, answers, scores, findings, known)
    serve = shlex.join(["dflash-serve", "--target", target.name, "--drafter", case.name])
    findings += check_calibration(case, probe, answers, findings, serve)
    return findings


def _restored(now: Scores, exported: Scores, findings: Sequence[Finding]) -> Finding:
    """Reports the acceptance after everything is restored as it was exported."""
    checks = ", ".join(dict.fromkeys(f.check for f in findings if f.severity == "fault"))
    words = f"as it is now {now.tau:.2f} tokens a step; as it was exported ({checks} fixed) {exported.tau:.2f}"
    return Finding("record", "ok", words, figures={"tau": now.tau, "tau_as_exported": exported.tau})


def _prompts(config: DoctorConfig) -> list[Prompt]:
    if not config.sets.prompts:
        texts = BUILT_IN[: config.sets.limit]
        return [Prompt(f"built-in/{i}", ({"role": "user", "content": text},)) for i, text in enumerate(texts, 1)]
    skipped = Skipped(config.sets.strict, "strict")
    found = [prompt for prompts in config.sets.read(skipped).values() for prompt in prompts]
    if skipped.counts:
        print(f"skipped rows: {skipped}", file=sys.stderr)
    return found


def _versions() -> dict[str, Any]:
    try:
        own: str | None = version("dflash-toolkit")
    except PackageNotFoundError:
        own = None  # run from a bare checkout
    return {"dflash_toolkit": own, "torch": torch.__version__, "transformers": transformers.__version__}
