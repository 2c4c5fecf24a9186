"""Decodes prompt sets with a drafter that train_real.py has trained; prompts may be lengthened."""

import argparse
import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import SamplingParams, Target, load_drafter
from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.data.prompts import read_prompt_sets
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.evaluation.measure.encoding import encode_sets
from dflash_toolkit.evaluation.measure.lengthen import lengthened
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt
from dflash_toolkit.evaluation.measure.pairs import EnginePair
from dflash_toolkit.evaluation.measure.run import evaluate
from dflash_toolkit.evaluation.measure.sweeps import chosen as chosen_evenly
from dflash_toolkit.evaluation.measure.sweeps import load_point
from dflash_toolkit.evaluation.report.files import write_report
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table, number

Sets = dict[str, list[EncodedPrompt]]
FIGURES = ("requests", "verify_steps", "tau_pooled", "tau_mean", "tokens_per_second")
LOAD = ("requests", "tau_pooled", "tokens_per_second", "plain_tokens_per_second", "speedup")
COMPARED = ("plain_tokens_per_second", "speedup", "identical_to_plain")


def decode(
    target: Target, folder: Path, report: Path, sets: Sets, plain: set[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Decodes prompt sets with the drafter in `folder`, those in `plain` also without; figures by set and pooled.

    Then it decodes a mixture of the sets with each of `args.requests` requests at a time.
    """
    release()
    runtime = EnginePair.load(target, load_drafter(str(folder)))
    longer = lengthened_sets(runtime, args)
    found: dict[str, Any] = {}
    drafted: dict[str, list[Any]] = {}
    for baseline in (False, True):
        chosen = {name: prompts for name, prompts in sets.items() if (name in plain) == baseline}
        if not baseline:
            chosen |= {
                f"{name}, {n} tokens": prompts for n, by_set in longer.items() for name, prompts in by_set.items()
            }
        if not chosen:
            continue
        params = SamplingParams(max_tokens=args.tokens)
        result = evaluate(runtime, chosen, params, baseline=baseline, show_progress=True)
        write_report(result, report.with_name(f"{report.name}-plain") if baseline else report)
        for name, of_set in result.sets.items():
            figures = of_set.to_json()
            found[name] = {key: rounded(figures[key]) for key in (*FIGURES, *(COMPARED if baseline else ()))}
            drafted[name] = [measurement.drafted for measurement in of_set.measurements]

    def pooled(names: Sequence[str]) -> Acceptance:
        return Acceptance.of([each for name in names for each in drafted[name]], runtime.block_size)

    short = pooled(args.pool)
    contexts = {
        str(n): {
            "tau": rounded(pooled([f"{name}, {n} tokens" for name in by_set]).tau_pooled),
            "sets": {name: found[f"{name}, {n} tokens"]["tau_pooled"] for name in by_set},
            "requests": sum(map(len, by_set.values())),
        }
        for n, by_set in longer.items()
    }
    loads = {}
    for count in args.requests:
        prompts = [sets[name][i].token_ids for name, i in chosen_evenly(sets, 2 * count)]
        point = load_point(runtime, prompts, SamplingParams(max_tokens=args.tokens), count, baseline=bool(plain))
        loads[str(count)] = {key: rounded(point[key]) for key in LOAD if point[key] is not None}
    return {
        "sets": {name: found[name] for name in sets},
        "pooled": {"tau": rounded(short.tau_pooled), "tokens_per_second": rounded(short.tokens_per_second)},
    } | {name: figures for name, figures in {"contexts": contexts, "loads": loads}.items() if figures}


def lengthened_sets(runtime: EnginePair, args: argparse.Namespace) -> dict[int, Sets]:
    """Returns prompts of each set with --context-length tokens; all prompts of a set lengthen the first ones."""
    lengths = sorted(args.context_length)
    if not lengths:
        return {}
    whole = encode_sets(runtime, read_prompt_sets(args.prompts), [None], False, Skipped())[None]
    found = {name: lengthened(runtime.tokenizer, {name: of}, lengths, args.limit, 0) for name, of in whole.items()}
    return {length: {name: by_length[length] for name, by_length in found.items()} for length in lengths}


def table(result: dict[str, Any], sets: Sequence[str]) -> str:
    """Acceptance length by run and set, and by prompt length, for the terminal."""
    header = ("Run", "Steps", "Epochs", "Sequences/s", "Held out", *sets, "Pooled", "Tokens/s")
    rows = []
    for run in result["runs"]:
        pooled = run.get("pooled", {})
        figures = [run["epochs"], run["sequences_per_second"], run["held_out_tau"]]
        figures += [run["sets"][name]["tau_pooled"] for name in sets]
        figures += [pooled.get("tau"), pooled.get("tokens_per_second")]
        rows.append((run["name"], str(run["steps"]), *map(number, figures)))
    shown = render_table(Table("", header, tuple(rows)))
    lengths = list(result["runs"][0].get("contexts", ()))
    if not lengths:
        return shown
    by_length = [(run["name"], *(number(run["contexts"][n]["tau"]) for n in lengths)) for run in result["runs"]]
    return f"{shown}\n\n{render_table(Table('', ('Prompt tokens', *lengths), tuple(by_length)))}"


def rounded(value: float | None) -> float | None:
    """A figure as JSON has it: what could not be measured is null."""
    return round(value, 4) if value is not None and math.isfinite(value) else None


def release() -> None:
    """Frees the memory of objects that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
