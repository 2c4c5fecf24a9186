"""Write the tables of README.md and docs/ from scripts/results/*.json, and that of targets from the tests.

    python scripts/docs/tables.py            write every `<!-- table: NAME -->` ... `<!-- end -->`
    python scripts/docs/tables.py --check    write nothing; name the files that differ and exit with 1

A table is a function here; its name is the marker's. Under each table on a page of docs/ stand the machine, the file
and the commands, read from the same file. Programs are shown where they are now.
"""

import argparse
import importlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.S)
ACCEPT = 0.865  # probability that a drafted position is accepted, in the comparison with vLLM
MOVED = {  # programs in the files, and where they are now
    "bench_attention.py": "bench/attention.py",
    "bench_features.py": "bench/features.py",
    "bench_first_token.py": "bench/first_token.py",
    "bench_fp8.py": "bench/fp8.py",
    "bench_prefill.py": "bench/flash_attention.py",
    "bench_start.py": "bench/start.py",
    "bench_step.py": "bench/step.py",
    "bench_train.py": "bench/train_step.py",
    "fp8_acceptance.py": "bench/fp8_acceptance.py",
    "peer_vllm.py": "peers/vllm_decode.py",
    "peer_vllm_step.py": "peers/vllm_step.py",
    "train_real.py": "bench/train_real.py",
}
RENAMED = {"--useless": "--zero-acceptance"}  # flags of programs
POOLED = ("gsm8k", "mbpp", "humaneval", "mt_bench")
SETS = (*POOLED, "math500")
HEADS = ("DFlash", "convolution alone", "selector alone", "DFlash 2")  # kinds of drafters


@dataclass
class Table:
    """Header and cells, and where in which file they come from."""

    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    sources: list[tuple[str, ...]] = field(default_factory=list)  # file, keys

    def read(self, file: str, *keys: str) -> Any:
        """What stands there, which is now a source of this table."""
        self.sources.append((file, *keys))
        return load(file, *keys)

    def columns(self, names: str) -> None:
        self.header = names.split(" | ")

    def add(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])


def load(file: str, *keys: str) -> Any:
    found = json.loads((RESULTS / f"{file}.json").read_text())
    for key in keys:
        found = found[key]
    return found


def by_batch(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["batch"]: row for row in rows}


def scaled(row: dict[str, Any], block: int) -> float:
    """Tokens a second if a step gave as many tokens as the probability promises: how many it gave is chance."""
    return float(row["tokens_per_second"]) / row["tokens_per_step"] * (1 - ACCEPT**block) / (1 - ACCEPT)


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# ---- README ----------------------------------------------------------------------------------------------------


def beside_vllm(table: Table) -> Iterator[tuple[int, int, dict[str, Any], dict[str, Any], float, float, int, float]]:
    """Batch, block, our step, our plain step, our tokens a second, vLLM's and its k, and vLLM's plain ones."""
    chosen = table.read("step_qwen3_8b_h200", "chosen")
    plain = table.read("step_qwen3_8b_h200", "plain")
    engines = table.read("peer_vllm_qwen3_8b_h200", "same_job")["engines"]
    theirs = {name: by_batch(engine["rows"]) for name, engine in engines.items()}
    alone = by_batch(plain["rows"])
    for row in chosen["rows"]:
        batch, block = row["batch"], round(row["median_block"])
        best, k = max((scaled(theirs[f"k{k}"][batch], k + 1), k) for k in (15, 7))
        yield batch, block, row, alone[batch], scaled(row, block), best, k, theirs["plain"][batch]["tokens_per_second"]


def results(table: Table) -> None:
    table.columns("what | this toolkit | compared with | ratio")
    run = table.read("train_qwen05_h200", "pipeline")["runs"][-1]
    small, plain = run["sets"]["gsm8k"], run["sets"]["gsm8k"]["plain_tokens_per_second"]
    same = f"{small['identical_to_plain'] * small['requests']:.0f} of {small['requests']} answers identical"
    (plain_run,), (later,) = (
        table.read("train_qwen15_h200", key)["runs"] for key in ("eight_minutes", "eight_minutes_dflash2")
    )
    larger, peer = later["sets"]["gsm8k"], table.read("peer_vllm_qwen15_h200", "dflash2")
    other = plain_run["sets"]["gsm8k"]["plain_tokens_per_second"]
    theirs, version = peer["sets"]["gsm8k"]["decode_tokens_per_second"], peer["versions"]["vllm"]
    for pair, found, beside, speeds in (
        ("0.5B, DFlash", small, f"{plain:.0f} tok/s plain, {same}", (plain,)),
        ("1.5B, DFlash 2", larger, f"{other:.0f} tok/s plain; {theirs:.0f} in vLLM {version}", (other, theirs)),
    ):
        table.add(
            f"decode gsm8k, Qwen2.5-Coder-{pair} ({found['tau_pooled']:.2f} tokens a step)",
            f"{found['tokens_per_second']:.0f} tok/s",
            beside,
            "; ".join(times(found["tokens_per_second"] / speed) for speed in speeds),
        )
    vllm = load("peer_vllm_qwen3_8b_h200", "same_job", "versions", "vllm")
    for batch, _, _, _, ours, best, _, _ in beside_vllm(table):
        if batch in (1, 32):
            table.add(
                f"serve {batch} request{'s' if batch > 1 else ''} at a time, Qwen3-8B shape",
                f"{ours:.0f} tok/s",
                f"{best:.0f} tok/s, vLLM {vllm} with a DFlash drafter",
                times(ours / best),
            )
    one, four = (
        table.read("train_step_qwen3_8b_h200", f"{gpus}_adamw")["rows"][0]["samples_per_second"]
        for gpus in ("one_gpu", "four_gpus")
    )
    table.add(
        "train DFlash for the Qwen3-8B shape on four GPUs",
        f"{four:.1f} sequences/s",
        f"{one:.1f} on one GPU",
        times(four / one),
    )


# ---- decoding --------------------------------------------------------------------------------------------------


def serving(table: Table) -> None:
    table.columns(
        "batch | plain tok/s | vLLM plain | ratio | DFlash tok/s (block) | vLLM DFlash (k) | ratio | a full step | MBU"
    )
    roofline = load("step_qwen3_8b_h200", "block16")["rows"][0]["roofline_ms"]  # every weight once, whatever the batch
    for batch, block, row, plain, ours, best, k, vllm_plain in beside_vllm(table):
        alone, full = plain["tokens_per_second"], row["ms_of_a_full_step"]
        table.add(
            batch,
            f"{alone:.0f}",
            f"{vllm_plain:.0f}",
            times(alone / vllm_plain),
            f"{ours:.0f} ({block})",
            f"{best:.0f} ({k})",
            times(ours / best),
            f"{full:.1f} ms",
            percent(roofline / full),
        )


def endpoint(table: Table) -> None:
    """The server with a drafter, one process of HTTP and text, and vLLM's."""
    ours, peer = table.read("endpoint_h100", "drafts"), table.read("endpoint_h100", "vllm")
    table.columns(
        "clients | engine alone, tokens/s | dflash-serve | vllm serve | ratio | vllm serve, whole answers "
        "| first token, engine | dflash-serve | vllm serve"
    )
    vllm, whole = ({row["clients"]: row for row in peer["server"] if row["streamed"] is it} for it in (True, False))
    for row, alone in zip(ours["server"], ours["engine"], strict=False):  # as far as it got
        other = vllm[row["clients"]]
        table.add(
            row["clients"],
            *(f"{each['tokens_per_second']:,.0f}" for each in (alone, row, other)),
            times(row["tokens_per_second"] / other["tokens_per_second"]),
            f"{whole[row['clients']]['tokens_per_second']:,.0f}",
            *(f"{each['first_ms']:.1f} ms" for each in (alone, row, other)),
        )


def endpoint_fronts(table: Table) -> None:
    """The server with a drafter by how many processes of HTTP and text it has."""
    runs = {n: table.read("endpoint_h100", f"fronts_{n}") for n in (1, 2, 4)}
    table.columns(
        "clients | engine alone, tokens/s | 1 process | 2 | 4 | first token, engine | 1 process | 2 | 4 "
        "| gap, worst of 100, 1 process | 2 | 4"
    )
    streamed = {n: [row for row in run["server"] if row["streamed"]] for n, run in runs.items()}
    for i, alone in enumerate(runs[2]["engine"]):
        rows = [streamed[n][i] for n in runs]
        table.add(
            alone["clients"],
            " / ".join(f"{run['engine'][i]['tokens_per_second']:,.0f}" for run in runs.values()),
            *(f"{row['tokens_per_second']:,.0f} ({percent(row['of_engine'])})" for row in rows),
            f"{alone['first_ms']:.1f} ms",
            *(f"{row['first_ms']:.1f} ms" for row in rows),
            *(f"{row['gap_p99_ms']:.1f} ms" for row in rows),
        )


def endpoint_plain(table: Table) -> None:
    """The server without a drafter, four processes of HTTP and text."""
    found = table.read("endpoint_h100", "plain")
    table.columns(
        "clients | engine alone, tokens/s | dflash-serve | of it | a step | gap, worst of 100 | first token, engine "
        "| dflash-serve"
    )
    for row, alone in zip(found["server"], found["engine"], strict=False):  # the streamed ones come first
        table.add(
            row["clients"],
            *(f"{each['tokens_per_second']:,.0f}" for each in (alone, row)),
            percent(row["of_engine"]),
            f"{alone['step_ms']:.2f} ms",
            f"{row['gap_p99_ms']:.1f} ms",
            *(f"{each['first_ms']:.1f} ms" for each in (alone, row)),
        )


def soak(table: Table) -> None:
    """Mixed requests to servers that are killed and stopped meanwhile; the demo's models had two servers on a CPU."""
    demo = [table.read("soak_demo_cpu", server) for server in ("first", "second")]
    runs = [[table.read("soak_cpu")], demo, [table.read("soak_h100")]]
    kinds = {
        "whole": "answered at once", "streamed": "streamed", "slow": "read slowly", "leaves": "left in the middle",
        "several": "for several answers", "responses": "to /v1/responses", "refused": "to be refused",
        "garbage": "garbage",
    }  # fmt: skip
    table.columns(" | a CPU, a tiny random target | a CPU, SmolLM2-135M, two servers | an H100, SmolLM2-135M")

    def add(what: str, count: Callable[[dict[str, Any]], int]) -> None:
        table.add(what, *(f"{sum(map(count, servers)):,}" for servers in runs))

    add("requests", lambda run: run["requests"])
    for kind, said in kinds.items():
        add(f"of them {said}", lambda run, kind=kind: run["counts"][kind])
    add("sent while the server was away", lambda run: run["counts"]["lost to the disturbance"])
    add("answers compared with the one given alone, without drafts", lambda run: run["counts"]["compared"])
    add("of them different", lambda run: run["counts"].get("different", 0))
    add("unexpected statuses, and requests or pages held at the end", lambda run: run["failures"])
    for name, what in (("front_rss_mib", "HTTP and text"), ("engine_rss_mib", "the engine")):
        held = ["; ".join(" and ".join(str(each[name]) for each in run["figures"].values()) for run in servers)
                for servers in runs]  # fmt: skip
        table.add(f"memory of {what}, at 60 % and at the end, MiB", *held)


def real_weights(table: Table) -> None:
    table.columns(f"tokens/s | plain | {' | '.join(SETS)}")
    for key in ("pipeline", "regenerated_four_minutes", "regenerated_two_minutes"):
        run = table.read("train_qwen05_h200", key)["runs"][-1]
        plain = run["sets"]["gsm8k"].get("plain_tokens_per_second")
        table.add(
            f"drafter of {run['minutes']:.0f} minutes",
            f"{plain:.0f}" if plain else "",
            *(f"{run['sets'][name]['tokens_per_second']:.0f}" for name in SETS),
        )


def real_weights_vllm(table: Table) -> None:
    table.columns(f"same drafter, same prompts | {' | '.join(SETS)}")
    found = table.read("peer_vllm_qwen05_h200")
    sets, vllm = [found["sets"][name] for name in SETS], f"vLLM {found['versions']['vllm']}"
    table.add("this engine, tokens/s", *(f"{x['ours']['tokens_per_second']:.0f}" for x in sets))
    table.add(f"{vllm}, tokens/s", *(f"{x['decode_tokens_per_second']:.0f}" for x in sets))
    table.add("this engine, acceptance length", *(f"{x['ours']['tau_pooled']:.2f}" for x in sets))
    table.add(f"{vllm}, acceptance length", *(f"{x['tau_pooled']:.2f}" for x in sets))
    table.add(
        "vLLM's length by ours, where answers are the same", *(f"{x['same_answers']['tau_of_ours']:.3f}" for x in sets)
    )


def parts(table: Table) -> None:
    names = ("gemms", "draft", "head", "attention", "context", "rest")
    table.columns("batch, block | a step, ms | layers' GEMMs | draft | heads | attention | context K/V | rest | MBU")
    for key, block in (("block16", 16), ("block8", 8), ("block4", 4)):
        for row in table.read("step_qwen3_8b_h200", key)["rows"]:
            step = sum(row["parts_us"].values()) / 1e3
            table.add(
                f"{row['batch']}, {block}",
                f"{step:.2f}",
                *(f"{row['parts_us'][name] / 1e3:.2f}" for name in names),
                percent(row["roofline_ms"] / step),
            )


def first_token(table: Table) -> None:
    table.columns("tokens of the prompt | Qwen3-8B, ms | prompts/s | Qwen2.5-0.5B, ms | prompts/s")
    small = {row["length"]: row for row in table.read("first_token_h200", "qwen2.5-0.5b")["rows"]}
    for row in table.read("first_token_h200", "qwen3-8b")["rows"]:
        if row["length"] in (16, 64, 128, 300, 512, 1024):
            shown = [row["captured"], small.get(row["length"], {}).get("captured")]
            cells = [(f"{x['ms']:.1f}", f"{x['prompts_per_second']:.0f}") if x else ("", "") for x in shown]
            table.add(row["length"], *cells[0], *cells[1])


def start(table: Table) -> None:
    table.columns(
        "Qwen3-8B shape | process to first answer, blocks, s | of that loading, s "
        "| process to first answer, busy host, blocks, s | busy host, draft trees, s"
    )
    names = {
        "compiled": "kernels compiled, files cached",
        "compiled, files not cached": "kernels compiled, from disk",
        "nothing compiled": "first start on a machine, files cached",
    }
    alone, busy = table.read("start_qwen3_8b_h200"), table.read("start_qwen3_8b_h200", "draft_trees")
    for key, label in names.items():
        row = alone["starts"][key][0]
        others = (busy[way][key][0] for way in ("blocks", "trees"))
        table.add(label, f"{row['process_s']:.1f}", f"{row['load_s']:.1f}", *(f"{r['process_s']:.1f}" for r in others))


def batched_prefill(table: Table) -> None:
    """Prompts of several requests one by one, and in batches."""
    table.columns(" | one by one | in batches | gain")
    ways, found = ("one_by_one", "batched"), table.read("batched_prefill_h200")
    table.read("batched_prefill_h200", "first_tokens")
    for shape, label in (("qwen3-8b", "Qwen3-8B"), ("qwen2.5-0.5b", "Qwen2.5-0.5B")):
        for one, batched in zip(*(found["first_tokens"][shape][way] for way in ways), strict=True):
            before, after = (row["captured"]["prompts_per_second"] for row in (one, batched))
            name = f"{label}, {one['length']} tokens, prompts/s"
            table.add(name, f"{before:.0f}", f"{after:.0f}", by(after, before))
    for one, batched in zip(*(found["loads"][way] for way in ways), strict=True):
        before, after = one["tokens_per_second"], batched["tokens_per_second"]
        name = f"Qwen2.5-0.5B, {one['requests']} requests at a time, {one['way']}, tokens/s"
        table.add(name, f"{before:,.0f}", f"{after:,.0f}", by(after, before))


def zero_acceptance(table: Table) -> None:
    kinds = ("plain 256", "first 256", "later 256", "plain 64", "first 64", "later 64")
    runs = {kind: by_batch(table.read("step_qwen3_8b_h200", "zero_acceptance_drafts", kind)["rows"]) for kind in kinds}
    table.columns("batch | 256 tokens, first answers | 256 tokens, later | 64 tokens, first answers | 64 tokens, later")

    def longer(which: str, tokens: int, batch: int) -> str:
        plain, drafted = (runs[f"{kind} {tokens}"][batch]["tokens_per_second"] for kind in ("plain", which))
        return f"{100 * (plain / drafted - 1):.1f} %"

    for batch in (1, 8, 32):
        table.add(batch, *(longer(which, tokens, batch) for tokens in (256, 64) for which in ("first", "later")))


def mixed(table: Table) -> None:
    table.columns(
        "zero acceptance | ms a step of all | a plain step | ms a token of those | of others | longer than plain"
    )
    plain = by_batch(table.read("step_qwen3_8b_h200", "plain_before_early_start")["rows"])  # of the same job
    for key in ("1 of 8", "4 of 8", "1 of 32", "16 of 32"):
        (row,) = table.read("step_qwen3_8b_h200", "mixed", key)["rows"]
        alone = plain[row["batch"]]["ms_of_a_full_step"]
        shown = [row["ms_of_a_full_step"], alone, row["ms_per_token_zero_acceptance"], row["ms_per_token_others"]]
        table.add(key, *(f"{ms:.2f}" for ms in shown), percent(row["ms_per_token_zero_acceptance"] / alone - 1))


def prefill_attention(table: Table) -> None:
    table.columns("tokens before, in the chunk | this engine, us | PyTorch SDPA, us | FlashAttention-3, us")
    for row in table.read("prefill_attention_qwen3_8b_h200")["rows"]:
        table.add(
            f"{row['before']}, {row['chunk']}",
            *(f"{row[f'{way}_us']:.0f}" for way in ("ours", "torch", "flash_attn_3")),
        )


def flash_attention(table: Table) -> None:
    names = {"ours": "this engine", "torch": "PyTorch", "flex": "compiled flex", "FlashAttention-4": "FlashAttention-4"}
    table.columns(f"us a layer | {' | '.join(names.values())}")
    for row in table.read("flash_attention_h200")["rows"]:
        if row["use"] == "prefill":
            what = f"{row['shape']}: {row['chunk']} tokens of a prompt behind {row['before']}"
        else:
            what = f"{row['shape']}: {row['documents']} documents of {row['tokens']} in a training row"
        table.add(what, *(f"{row[f'{way} us']:.0f}" if f"{way} us" in row else "" for way in names))


def fp8_drafts(table: Table) -> None:
    shown = (1, 16, 64, 128, 256)
    table.columns(f"us, bf16 and fp8 | {' | '.join(f'{n} rows' for n in shown)}")
    labels = {"qwen3-8b": "Qwen3-8B", "qwen3-4b": "Qwen3-4B", "qwen2.5-0.5b": "Qwen2.5-0.5B"}
    for shape, label in labels.items():
        rows = {row["rows"]: row for row in table.read("fp8_h200", shape)["rows"]}
        for part in ("head", "layer"):
            cells = [f"{rows[n][f'{part}_bf16_us']:.0f}, {rows[n][f'{part}_fp8_us']:.0f}" for n in shown]
            table.add(f"{label}: the {part}", *cells)


def fp8_acceptance(table: Table) -> None:
    table.columns("draft | answers | verify steps | tokens a step")
    for name, sets in table.read("fp8_acceptance_h200", "eight_at_a_time")["variants"].items():
        total = {key: sum(found[key] for found in sets.values()) for key in ("requests", "tokens", "verify_steps")}
        label = {"full": "as loaded", "head": "head in fp8", "head and layers": "head and layers in fp8"}[name]
        table.add(label, total["requests"], total["verify_steps"], f"{total['tokens'] / total['verify_steps']:.3f}")


# ---- training --------------------------------------------------------------------------------------------------


def acceptance(table: Table) -> None:
    table.columns(f"acceptance length | {' | '.join(POOLED)} | these four, pooled | math500 | steps | sequences/s")
    runs = {
        "pipeline": "two answers a prompt",
        "pipeline_h100": "two answers a prompt, on an H100",
        "regenerated_four_minutes": "two answers a prompt",
        "regenerated_two_minutes": "two answers a prompt",
        "given_two_and_eight_minutes": "one given answer a prompt",
        "four_minutes": "one given answer a prompt",
    }
    for key, data in runs.items():
        for run in reversed(table.read("train_qwen05_h200", key)["runs"]):
            sets = run["sets"]
            lengths = [
                *(sets[name]["tau_pooled"] for name in POOLED),
                run["pooled"]["tau"],
                sets["math500"]["tau_pooled"],
            ]
            table.add(
                f"{run['minutes']:.0f} minutes, {data}",
                *(f"{tau:.2f}" for tau in lengths),
                run["steps"],
                f"{run['sequences_per_second']:.0f}",
            )


def responses(table: Table) -> None:
    """Several responses to a prompt against more passes over one; every key of the file is one job."""
    table.columns(f"responses to a prompt | epochs | {' | '.join(POOLED)} | these four, pooled | tokens/s, pooled")
    for key in load("train_responses_h100"):
        job = table.read("train_responses_h100", key)
        (run,) = job["runs"]
        samples, temperature = (option_of(job["command"], name) for name in ("--samples", "--temperature"))
        drawn = int(samples) - 1
        table.add(
            f"{samples}: greedy, {drawn} at temperature {float(temperature):g}" if drawn else "1, greedy",
            f"{run['epochs']:.1f}",
            *(f"{run['sets'][name]['tau_pooled']:.2f}" for name in POOLED),
            f"{run['pooled']['tau']:.2f}",
            f"{run['pooled']['tokens_per_second']:.0f}",
        )


def option_of(command: list[str], name: str) -> str:
    """The word behind an option."""
    return command[command.index(name) + 1]


def draft_heads(table: Table) -> None:
    """The kinds of drafters, by minutes of training; every key of the file is one job."""
    table.columns(
        f"target, drafter | responses | {' | '.join(POOLED)} | these four, pooled | to DFlash | math500 "
        "| tokens/s, pooled | to DFlash | steps | sequences/s"
    )
    found = []
    for file in ("train_dflash2_h100", "train_dflash2_h200", "train_qwen15_h200"):
        for key in load(file):
            job = table.read(file, key)
            target, on = job["target"].partition(",")[0], ", H200" if "H200" in job["gpu"] else ""
            found += [
                (target, run["minutes"], on, job["answers"]["rows"], HEADS.index(head_of(run)), run)
                for run in job["runs"]
                if "pooled" in run
            ]
    plain = {(target, *data): run["pooled"] for target, *data, head, run in found if head == 0}
    for target, minutes, on, responses, head, run in sorted(found, key=lambda each: each[:5]):
        base, pooled, sets = plain.get((target, minutes, on, responses)) if head else None, run["pooled"], run["sets"]
        taus = [f"{sets[name]['tau_pooled']:.2f}" if name in sets else "" for name in SETS]
        gains = [
            f"{100 * (pooled[key] / base[key] - 1):+.1f} %" if base else "" for key in ("tau", "tokens_per_second")
        ]
        table.add(
            f"{target}, {minutes:g} minutes{on}, {HEADS[head]}",
            f"{responses:,}",
            *taus[:-1],
            f"{pooled['tau']:.2f}",
            gains[0],
            taus[-1],
            f"{pooled['tokens_per_second']:.0f}",
            gains[1],
            run["steps"],
            f"{run['sequences_per_second']:.0f}",
        )


def heads_vllm(table: Table) -> None:
    """Both kinds for one target: plainly, here and in vLLM."""
    table.columns(f"tokens/s | {' | '.join(SETS)}")
    for kind, key in (("dflash", "eight_minutes"), ("dflash2", "eight_minutes_dflash2")):
        (run,) = table.read("train_qwen15_h200", key)["runs"]
        peer = table.read("peer_vllm_qwen15_h200", kind)
        title, vllm = {"dflash": HEADS[0], "dflash2": HEADS[-1]}[kind], f"vLLM {peer['versions']['vllm']}"
        ours, theirs = ([each["sets"][name] for name in SETS] for each in (run, peer))
        if "plain_tokens_per_second" in ours[0]:
            table.add("this engine, plain", *(f"{x.get('plain_tokens_per_second', 0):.0f}".lstrip("0") for x in ours))
        table.add(f"this engine, {title}", *(f"{x['tokens_per_second']:.0f}" for x in ours))
        table.add(f"{vllm}, {title}", *(f"{x['decode_tokens_per_second']:.0f}" for x in theirs))
        table.add(
            f"vLLM's acceptance length by ours, {title}", *(f"{x['same_answers']['tau_of_ours']:.3f}" for x in theirs)
        )


def heads_compared(table: Table) -> None:
    """DFlash 2 against DFlash, request by request, as `dflash-eval compare` has it."""
    table.columns(
        "set | requests | acceptance length: DFlash | DFlash 2 | difference | p | tokens/s: DFlash | DFlash 2 "
        "| difference | p"
    )
    section = table.read("compare_dflash2_h100")["comparison"]["sections"][0]
    for name, scope in (*section["sets"].items(), ("all, pooled", section["overall"])):
        first, second = scope["runs"]
        cells = []
        for key, digits in (("tau_pooled", 2), ("tokens_per_second", 0)):
            apart = second["difference"][key]
            low, high = (f"{end:+.{digits}f}" for end in apart["ci95"])
            chance = "< 0.001" if apart["p_value"] < 0.001 else f"{apart['p_value']:.3f}"
            cells += [f"{run[key]:.{digits}f}" for run in (first, second)]
            cells += [f"{apart['value']:+.{digits}f} [{low}, {high}]", chance]
        table.add(name, scope["requests"], *cells)


def head_of(run: dict[str, Any]) -> str:
    """Which of HEADS a run trained, by its settings."""
    given = dict(word.split("=", 1) for word in run["settings"])
    if given.get("drafter.kind", "dflash") == "dflash":
        return HEADS[0]
    left_out = [given.get(f"drafter.{size}") == "0" for size in ("selector_rank", "conv_kernel_size")]
    return HEADS[1 + left_out.index(True)] if any(left_out) else HEADS[3]


def settings(table: Table) -> None:
    table.columns("two minutes of | steps | epochs | held out, teacher-forced | acceptance length | tokens/s")
    runs = {}
    for job in ("base", "optimizers_and_layers", "weights_taps_and_kl"):
        runs |= {run["name"]: run for run in table.read("train_qwen05_h200", "ablation", job)["runs"]}
    for run in sorted(runs.values(), key=lambda run: -run["pooled"]["tau"]):
        label = ", ".join(f"`{item}`" for item in run["settings"]) or "the defaults: Muon, D-PACE, 5 taps, 5 layers"
        table.add(
            label,
            run["steps"],
            f"{run['epochs']:.1f}",
            f"{run['held_out_tau']:.2f}",
            f"{run['pooled']['tau']:.2f}",
            f"{run['pooled']['tokens_per_second']:.0f}",
        )


def density(table: Table) -> None:
    table.columns("66 seconds of | steps | sequences/s | held out, teacher-forced")
    labels = {
        "d12k": "12288 tokens, 2304 blocks a step (the default)",
        "d24k": "24576 tokens, 2304 blocks",
        "d12kb1": "12288 tokens, 1152 blocks",
    }
    for run in table.read("train_qwen05_h200", "ablation", "sparser_blocks")["runs"]:
        table.add(labels[run["name"]], run["steps"], f"{run['sequences_per_second']:.0f}", f"{run['held_out_tau']:.2f}")


def training_step(table: Table) -> None:
    table.columns(" | sequences/s | target, ms | drafter, ms | optimiser, ms | MFU | memory, GiB")
    rows = [
        ("one_gpu", 0, "512 anchors a row, 4 rows, Muon"),
        ("one_gpu", 1, "2047 anchors, 1 row, Muon"),
        ("one_gpu_adamw", 0, "512 anchors, 4 rows, AdamW"),
        ("one_gpu_adamw", 1, "2047 anchors, 1 row, AdamW"),
        ("one_gpu_recomputed_activations", 0, "512 anchors, 4 rows, Muon, `optim.recompute=true`"),
        ("one_gpu_accumulating_4", 0, "512 anchors, 4 times 4 rows, Muon, `optim.accumulate=4`"),
        ("two_gpus", 0, "two GPUs, Muon"),
        ("four_gpus", 0, "four GPUs, Muon"),
        ("two_gpus_adamw", 0, "two GPUs, AdamW"),
        ("four_gpus_adamw", 0, "four GPUs, AdamW"),
    ]
    for key, index, label in rows:
        step(table, label, table.read("train_step_qwen3_8b_h200", key)["rows"][index])


def step(table: Table, label: str, row: dict[str, Any]) -> None:
    ms = row["parts_ms"]
    table.add(
        label,
        f"{row['samples_per_second']:.2f}",
        *(f"{ms[part]:.0f}" for part in ("target", "drafter", "optimizer")),
        percent(row["mfu"]),
        f"{row['peak_gib']:.1f}",
    )


def sharding(table: Table) -> None:
    table.columns("two GPUs | sequences/s | target, ms | drafter, ms | optimiser, ms | MFU | memory of each, GiB")
    for row in sorted(table.read("train_sharded_qwen3_8b_h100")["rows"], key=lambda row: str(row["way"])):
        step(table, row["way"], row)


def sharded_target(table: Table) -> None:
    table.columns("target on two GPUs | features, tokens/s | training, sequences/s | memory of each, GiB")
    for shape, label in (("qwen3-30b-a3b", "Qwen3-30B-A3B"), ("qwen3.5-9b", "Qwen3.5-9B")):
        for row in table.read("sharded_target_h100", shape)["rows"]:
            held = "in two slices" if row["processes_to_a_target"] > 1 else "whole on each"
            rates = (
                f"{row[key]:.{digits}f}" if key in row else row["error"]
                for key, digits in (("tokens_per_second", 0), ("sequences_per_second", 2))
            )
            peak = max(value for key, value in row.items() if key.endswith("_peak_gib"))
            table.add(f"{label}, {held}", *rates, f"{peak:.1f}")


def target_features(table: Table) -> None:
    table.columns("tokens/s of the target | documents | packed | one by one | memory, GiB")
    labels = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3.5-9b": "Qwen3.5-9B"}
    for result in table.read("target_features_h100")["results"]:
        label = labels[result["shape"]]
        if result["shape"] == "qwen3.5-9b":
            label += ", flash-linear-attention" if result["flash_linear_attention"] else ", without it"
        for row in result["rows"]:
            rates = (f"{row[f'{way}_tokens_per_second']:,}" for way in ("packed", "one_by_one"))
            table.add(label, f"{row['documents']} of {row['tokens']} tokens", *rates, f"{row['peak_gib']:.1f}")


PLAIN = {
    "qwen3-8b": "Qwen3-8B, bf16",
    "qwen3-8b-fp8": "Qwen3-8B, FP8",
    "qwen3.8-27b-fp8": "Qwen3.8-27B, FP8",
    "qwen3.6-35b-a3b-fp8": "Qwen3.6-35B-A3B, FP8",
}

H200_TB_S = 4.5  # that an H200 reads, measured

DOUBTFUL = 0.2  # where equal runs leave so much of a step open, their row says nothing


def doubt(row: dict[str, Any]) -> float:
    """How far vLLM's step may be off, as a share of it: the fastest of equal runs count, so by the second fastest."""
    if "long_s" not in row:
        return float(row["spread"])
    (long, later), (short, second) = (sorted(row[key])[:2] for key in ("long_s", "short_s"))
    return float((later - long + second - short) / (long - short))


def plain_steps(table: Table) -> None:
    """What plain steps take on the GPU, and how near that is to reading every byte once."""
    table.columns("a plain step | ms, batch 1 | 8 | 32 | of the roofline, batch 1 | 8 | 32")
    for shape, label in PLAIN.items():
        rows = table.read("step_plain_fp8_h100", shape)["rows"]
        times, shares = ([f"{row['ms_per_step']:.2f}" for row in rows], [f"{100 * row['mbu']:.0f} %" for row in rows])
        table.add(label, *times, *shares)
    for shape in ("qwen3.8-27b-fp8", "qwen3.6-35b-a3b-fp8"):
        found = table.read("shapes_fp8_h200", shape, "ours_plain")
        slower = float(option_of(found["command"], "--read-tb-s")) / H200_TB_S  # than what it can read
        rows = found["rows"]
        shares = [f"{100 * row['mbu'] * slower:.0f} %" for row in rows]
        table.add(f"{PLAIN[shape]}, H200", *(f"{row['ms_per_step']:.2f}" for row in rows), *shares)


def shapes(table: Table) -> None:
    """Steps of ours and of vLLM on the shapes that people serve; equal acceptance, so tokens/s go as the steps do."""
    table.columns("ms a step | batch 1 | 8 | 32 | vLLM, batch 1 | 8 | 32 | speed-up over vLLM, batch 1 | 8 | 32")
    later = load("shapes_fp8_h200")
    for shape, label in PLAIN.items():
        for kind, drafts in (("plain", "plain"), ("drafts", "blocks of 8")) if shape in load("shapes_fp8_h100") else ():
            on_h200 = f"ours_{kind}" in later.get(shape, {})
            file, drafts = ("shapes_fp8_h200", f"{drafts}, H200") if on_h200 else ("shapes_fp8_h100", drafts)
            ours = [row["ms_per_step"] for row in table.read(file, shape, f"ours_{kind}")["rows"]]
            theirs: list[float | None] = [None] * len(ours)
            if f"vllm_{kind}" in load(file, shape):
                (engine,) = table.read(file, shape, f"vllm_{kind}")["engines"].values()
                theirs = [row["ms_per_step"] if doubt(row) < DOUBTFUL else None for row in engine["rows"]]
            ratios = [times(b / a) if b else "" for a, b in zip(ours, theirs, strict=True)]
            shown = [f"{ms:.2f}" if ms else "" for ms in theirs]
            table.add(f"{label}, {drafts}", *(f"{ms:.2f}" for ms in ours), *shown, *ratios)


def mixture_parts(table: Table) -> None:
    """Where the time of a step with blocks goes on a mixture of experts."""
    parts = ("experts", "gemms", "delta nets", "head", "attention")
    table.columns(f"ms of a step's kernels | {' | '.join(parts)} | rest | a step of all requests")
    for row in table.read("step_qwen3_6_35b_a3b_fp8_h200")["rows"]:
        spent = row["parts_us"]
        rest = sum(us for name, us in spent.items() if name not in parts)
        shown = [f"{us / 1e3:.2f}" for us in (*(spent[name] for name in parts), rest)]
        table.add(f"batch {row['batch']}", *shown, f"{row['ms_of_a_full_step']:.2f}")


def expert_cuts(table: Table) -> None:
    """What a layer's experts take as the steps above have cut them, and as they are cut."""
    table.columns("us of a layer's experts | as in the steps above | as the engine does now | less by")
    for row in table.read("experts_qwen3_6_35b_a3b_fp8_h200")["rows"]:
        now = experts_us(row)
        before = row["gate_up"]["us"] + row["down"]["us"] + (row["group"]["us"] if row["rows"] > 32 else 0)
        table.add(f"{row['rows']} rows", f"{before:.0f}", f"{now:.0f}", f"{100 * (1 - now / before):.0f} %")


def experts_us(row: dict[str, Any]) -> float:
    """Of a sweep's row with the cuts that the engine takes, rows gathered."""
    from dflash_toolkit.kernels.triton.experts import experts_tile
    from dflash_toolkit.models.spec import ModelSpec, MoeSpec
    from dflash_toolkit.runtime.shapes import named_shape

    spec = ModelSpec.of_target(named_shape("qwen3.6-35b-a3b-fp8"))
    moe = next(layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec))
    total: float = row["group"]["us"]
    for part, k in (("gate_up", spec.hidden_size), ("down", moe.intermediate_size)):
        tile, taken = experts_tile(row["rows"], moe.top_k + moe.shared, moe.experts, k, fp8=True)
        cut = {"gathered": True, "tile": [tile.block_n, tile.warps, tile.stages], "taken": taken}
        if cut == {"gathered": row["rows"] > 32, "tile": [64, 4, 4], "taken": 32}:  # taken when the sweep was made
            total += row[part]["us"]
        else:
            (found,) = (each["us"] for each in row[f"{part}_cuts"] if cut.items() <= each.items())
            total += found
    return total


def delta_prompts(table: Table) -> None:
    """Gated delta nets of a prompt, by our kernels and by the library's."""
    table.columns("us of a layer | tokens of a prompt | this engine | flash-linear-attention | speed-up")
    for row in table.read("delta_prompt_h200")["prompts"]:
        ours, theirs = row["triton_us"], row["fla_us"]
        label = {"qwen3.8-27b": "Qwen3.8-27B", "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B"}[row["shape"]]
        table.add(label, row["tokens"], f"{ours:.0f}", f"{theirs:.0f}", times(theirs / ours))


def memory(table: Table) -> None:
    """What many long requests of a hybrid take."""
    table.columns("target and drafter | requests | tokens of each, at the end | tokens of KV cache | GiB in use")
    found = table.read("step_qwen3_8_27b_fp8_memory_h100")
    (row,) = found["rows"]
    longest = row["prompt"] + int(option_of(found["command"], "--long"))
    cache, used = f"{row['kv_cache_tokens']:,}", f"{row['device_gib']:.1f}"
    table.add(PLAIN[found["shape"]], row["batch"], f"{longest:,}", cache, used)


WAYS = ("plain", "blocks", "chains", "trees")
VLLM_STEPS = "peer_vllm_step_qwen3_8b_h200"


def draft_trees(table: Table) -> None:
    """The same recorded drafts verified in blocks, in chains of their own length and in trees."""
    table.columns(
        "requests at a time | plain | blocks | chains of own length | trees | trees to blocks | vLLM, its best k "
        "| trees to vLLM"
    )
    replayed = table.read("replay_drafts_qwen3_8b_h200")
    speed = {(row["way"], row["requests"]): row["tokens_per_second"] for row in replayed["rows"] if not row["failing"]}
    steps = {k: full_steps(table.read(VLLM_STEPS, f"k{k}"), k) for k in (15, 7, 3)}
    for requests in sorted({requests for _, requests in speed}):
        each = {way: speed[way, requests] for way in WAYS}
        theirs = max(  # with the tokens that those blocks are accepted with
            requests * replayed["tokens_per_step_of_blocks"][str(k + 1)] / of_batch[requests] * 1e3
            for k, of_batch in steps.items()
        )
        shown = *(f"{value:,.0f}" for value in each.values()), by(each["trees"], each["blocks"]), f"{theirs:,.0f}"
        table.add(requests, *shown, times(each["trees"] / theirs))


def full_steps(found: dict[str, Any], k: int) -> dict[int, float]:
    """Milliseconds of vLLM's steps by requests, as if all of them took part in every step.

    What was timed ends with the last token of the last request, and is divided there by the steps of a mean one.
    Divided by those of the longest one, as here, steps are too short, if anything: those that few take part in take
    less.
    """

    def more(requests: int) -> float:
        """Steps of long answers than of short ones; the first token is the prefill's."""
        long, short = (steps_of_longest(requests, found[key] - 1, k, found["accept"]) for key in ("long", "short"))
        return long - short

    rows = found["engines"][f"k{k}"]["rows"]
    return {row["batch"]: row["ms_per_step"] * more(1) / more(row["batch"]) for row in rows}


def steps_of_longest(requests: int, tokens: int, k: int, accept: float) -> float:
    """Steps, on average, of the one of so many requests that takes the most for so many tokens.

    Args:
        k, accept: tokens that a step drafts, and the probability of each that it is accepted if those before it were.
    """
    committed = np.array([*(accept**i * (1 - accept) for i in range(k)), accept**k])  # probabilities of 1, 2, ... k + 1
    written, steps = np.eye(1, tokens)[0], 0.0  # probabilities of 0, 1, ... of one request that is not done
    while (unfinished := written.sum()) > 1e-12:
        steps += 1 - (1 - unfinished) ** requests
        written = np.convolve(np.append(0.0, committed), written)[:tokens]
    return float(steps)


TREE_SHAPES = {"qwen3_8b": "Qwen3-8B", "qwen05": "Qwen2.5-0.5B"}


def tree_steps(table: Table) -> None:
    """Steps over blocks and over draft trees, as engines have measured them."""
    rows = (32, 64, 128, 256)
    table.columns(
        f"ms a step | requests | plain | blocks of 8 | blocks of 16 | trees of {rows[0]} rows "
        f"| {' | '.join(map(str, rows[1:]))}"
    )
    for shape, label in TREE_SHAPES.items():
        found = table.read(f"step_times_trees_{shape}_h200")["seconds"]
        took = {tuple(step): f"{1e3 * seconds:.2f}" for *step, seconds in found}
        for requests in (1, 4, 8, 16, 32, 64):
            steps = [(requests, block) for block in (1, 8, 16)] + [(requests, each, 16) for each in rows]
            table.add(label, requests, *(took.get(step, "") for step in steps))


def replayed_rows(table: Table) -> None:
    """What trees bring under the step times that an engine has measured, whatever else a step waits for."""
    shapes = TREE_SHAPES
    sets = {"all": "five sets", "gsm8k": "gsm8k", "mt_bench": "mt_bench"}
    pairs = list(itertools.product(shapes, sets))
    names = [f"{shapes[shape]}, {sets[name]}" for shape, name in pairs]
    table.columns(" | ".join(["requests at a time", *names, "Qwen3-8B, steps as long as with DFlash 2, five sets"]))
    pairs.append(("qwen3_8b_dflash2", "all"))
    found = [table.read("replayed_rows_cpu", shape, name)["batches"] for shape, name in pairs]
    for rows in zip(*found, strict=True):
        table.add(rows[0]["requests"], *(by(1 + row["rows"], 1.0) for row in rows))


def failing_drafts(table: Table) -> None:
    """One request whose drafts are never right among others: its pace and theirs."""
    table.columns(
        "requests at a time | plain | blocks: the others | the failing one | chains: the others | the failing one "
        "| trees: the others | the failing one"
    )
    rows = table.read("replay_drafts_qwen3_8b_h200")["rows"]
    pace = {(row["way"], row["requests"]): row for row in rows if row["failing"] and row["requests"] > 1}
    for requests in sorted({requests for _, requests in pace}):
        cells = [f"{pace['plain', requests]['of_each']:.0f}"]
        for way in WAYS[1:]:
            row = pace[way, requests]
            cells += [f"{row['of_each']:.0f}", f"{row['of_each_failing']:.0f}"]
        table.add(requests, *cells)


def draft_trees_real(table: Table) -> None:
    """A real pair with answers of its own, by what the engine drafts."""
    table.columns(
        "set, requests at a time | plain | blocks | chains of own length | trees | trees to blocks "
        "| vLLM, its best k | blocks to vLLM"
    )
    rows = table.read("tree_load_qwen05_h200")["rows"]
    speed = {(row["set"], row["requests"], row["way"]): row["tokens_per_second"] for row in rows if not paused(row)}
    vllm = dict[tuple[str, int], float]()
    for row in table.read("peer_vllm_requests_qwen05_h200")["rows"]:
        asked = row["set"], row["requests"]
        vllm[asked] = max(vllm.get(asked, 0.0), row["tokens_per_second"])
    for asked, theirs in sorted(vllm.items()):
        each = {way: speed.get((*asked, way)) for way in WAYS}
        blocks, trees = each["blocks"], each["trees"]
        table.add(
            f"{asked[0]}, {asked[1]}",
            *(f"{value:,.0f}" if value else "" for value in each.values()),
            by(trees, blocks) if trees and blocks else "",
            f"{theirs:,.0f}",
            times(blocks / theirs) if blocks else "",
        )


def draft_trees_dflash2(table: Table) -> None:
    """The same with a drafter of DFlash 2."""
    table.columns("set, requests at a time | plain | blocks | chains of own length | trees | trees to blocks")
    rows = table.read("tree_load_dflash2_qwen05_h200")["rows"]
    speed = {(row["set"], row["requests"], row["way"]): row["tokens_per_second"] for row in rows if not paused(row)}
    for name, requests in dict.fromkeys((row["set"], row["requests"]) for row in rows):
        each = {way: speed.get((name, requests, way)) for way in WAYS}
        blocks, trees = each["blocks"], each["trees"]
        shown = (f"{value:,.0f}" if value else "" for value in each.values())
        table.add(f"{name}, {requests}", *shown, by(trees, blocks) if trees and blocks else "")


def paused(row: dict[str, Any]) -> bool:
    """Whether one step was a fifth of so short a load."""
    return bool(row["longest_step_ms"] > 200 * row["seconds"])


def by(value: float, base: float) -> str:
    """How much more it is."""
    return f"{round(100 * (value / base - 1)):+d} %".replace("+0", "0")


def targets(table: Table) -> None:
    """What other weights than dense bf16 ones bring, plain and with blocks of 8."""
    runs = {  # of a row that two files have, the later one counts
        "Qwen3-8B, bf16": ["step_qwen3_8b_dflash2_h100"],
        "Qwen3-8B, FP8": ["step_qwen3_8b_fp8_h100", "step_qwen3_8b_fp8_drafted_h100"],
        "Qwen3-30B-A3B, bf16": ["step_qwen3_30b_a3b_h100"],
        "Qwen3.8-27B, FP8": ["step_qwen3_8_27b_fp8_h100", "step_qwen3_8_27b_fp8_batch32_h100"],
        "Qwen3.6-35B-A3B, FP8": ["step_qwen3_6_35b_a3b_fp8_h100"],
    }
    later, speeds = {label: shape for shape, label in PLAIN.items()}, dict[str, dict[tuple[int, int], float]]()
    table.columns("tokens/s | plain, batch 1 | 8 | 32 | a draft is accepted with | DFlash, batch 1 | 8 | 32")
    for label, files in runs.items():
        found = [table.read(file) for file in files]
        rows = (row for each in found for row in each["rows"] if row["drafter_kind"] == "dflash")
        # above 1 the rows of a request had the same experts, as with random weights those behind one context have
        rows = (row for row in rows if row["mbu"] <= 1)
        speed = {(row["block"], row["batch"]): row["tokens_per_second"] for row in rows}
        if label in later:
            rows = table.read("step_plain_fp8_h100", later[label])["rows"]
            rows += [row for each in found if "before" in each for row in each["rows"] if row["block"] == 1]
            speed |= {(1, row["batch"]): row["tokens_per_second"] for row in rows}
        cells = [[f"{speed[b, n]:.0f}" if (b, n) in speed else "" for n in (1, 8, 32)] for b in (1, 8)]
        table.add(label, *cells[0], found[0]["accept"] if any(cells[1]) else "", *cells[1])
        speeds[label] = speed
        if label == "Qwen3-8B, FP8":
            bf16 = speeds["Qwen3-8B, bf16"]
            cells = [[times(speed[b, n] / bf16[b, n]) for n in (1, 8, 32)] for b in (1, 8)]
            table.add("Qwen3-8B, FP8 to bf16", *cells[0], "", *cells[1])


def dflash2_step(table: Table) -> None:
    table.columns("ms of a full step, blocks of 8 | batch 1 | 8 | 32")
    files = ("step_qwen3_8b_dflash2_h100", "step_qwen3_8b_dflash2_batch32_h100")  # of one row the later one counts
    rows = [row for file in files for row in table.read(file)["rows"] if row["block"] == 8]
    full = {(row["drafter_kind"], row["batch"]): row["ms_of_a_full_step"] for row in rows}
    for kind, label in (("dflash", "DFlash"), ("dflash2", "DFlash 2")):
        table.add(label, *(f"{full[kind, batch]:.2f}" for batch in (1, 8, 32)))
    table.add("longer by", *(f"{100 * (full['dflash2', b] / full['dflash', b] - 1):.1f} %" for b in (1, 8, 32)))


def features(table: Table) -> None:
    table.columns("tokens/s of the target | packed rows (the trainer) | padded rows | one row at a time")
    for shape, label in (("qwen2.5-0.5b", "Qwen2.5-0.5B"), ("qwen3-8b", "Qwen3-8B")):
        ways = table.read("features_h200", shape)["ways"]
        shown = (
            ways["trainer"],
            max((ways["padded"], ways["padded in groups"]), key=lambda way: way["tokens_per_second"]),
        )
        table.add(label, *(way["tokens_per_second"] for way in (*shown, ways["alone"])))


# ---- targets ---------------------------------------------------------------------------------------------------


def models(table: Table) -> None:
    """Every architecture that the tests train for and decode, and what serves a drafter of ours with it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from transformers.models.auto import modeling_auto

    from dflash_toolkit.config import UnsupportedModel, UserError
    from dflash_toolkit.models.dflash.serving import READ, SERVED
    from dflash_toolkit.models.quantized import FORM
    from dflash_toolkit.models.spec import ModelSpec
    from dflash_toolkit.serve.external import BY_NAME, Draft

    def yes(works: Callable[..., object], *given: object) -> str:
        try:
            works(*given)
        except (UnsupportedModel, UserError):
            return "no"
        return "yes"

    architectures = importlib.import_module("architectures").ARCHITECTURES
    engines = f"our engine | the same in FP8 | vLLM {READ['vllm']} | SGLang {READ['sglang']}"
    table.columns(f"target | train, evaluate, examine | {engines}")
    drafter = Draft("ours", "DFlashDraftModel", speculators=False, block_size=16, raw={})
    for name, each in architectures.items():
        config = each.config()
        text = config.get_text_config(decoder=True)
        kinds = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if text is not config:
            kinds = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind = kinds[config.model_type]
        if kind not in SERVED:
            raise SystemExit(
                f"error: SERVED of dflash_toolkit/models/dflash/serving.py lacks {kind}, which the tests have as {name}"
            )
        target = {"architectures": [kind], "hidden_size": text.hidden_size}
        others = [yes(drafter.check_served, BY_NAME[other], release, name, target) for other, release in READ.items()]
        sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
        inside = (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "linear_key_head_dim",
            "linear_value_head_dim",
        )
        sizes |= dict.fromkeys(each.options.keys() & set(inside), 128)
        in_blocks = each.config(**sizes).get_text_config(decoder=True)
        in_blocks.quantization_config = dict(FORM)
        table.add(name, "yes", *(yes(ModelSpec.of_target, ours) for ours in (text, in_blocks)), *others)


# ---- pages -----------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Table], None]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        results,
        serving,
        targets,
        plain_steps,
        shapes,
        mixture_parts,
        expert_cuts,
        memory,
        draft_trees,
        tree_steps,
        replayed_rows,
        failing_drafts,
        draft_trees_real,
        draft_trees_dflash2,
        dflash2_step,
        delta_prompts,
        endpoint,
        endpoint_fronts,
        endpoint_plain,
        soak,
        real_weights,
        real_weights_vllm,
        parts,
        first_token,
        batched_prefill,
        start,
        zero_acceptance,
        mixed,
        prefill_attention,
        flash_attention,
        fp8_drafts,
        fp8_acceptance,
        acceptance,
        responses,
        draft_heads,
        heads_vllm,
        heads_compared,
        settings,
        density,
        training_step,
        sharding,
        sharded_target,
        target_features,
        features,
        models,
    )
}


def markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def measured(table: Table) -> str:
    """Machine, file, keys and commands of a table, folded away."""
    machines, commands = [], []
    files: dict[str, list[str]] = {}
    for file, *keys in table.sources:
        found = load(file, *keys)
        versions = found.get("versions", {})
        packages = [
            f"{name} {versions[key].partition('+')[0]}"
            for key, name in (("torch", "PyTorch"), ("triton", "Triton"), ("vllm", "vLLM"))
            if key in versions
        ]
        machines.append(", ".join(filter(None, [found.get("gpu"), *packages])))
        files.setdefault(f"`scripts/results/{file}.json`", []).extend([" / ".join(keys)] if keys else [])
        every = found.get("commands") or [found["command"]]
        commands += [shlex.join(today(command)) for command in every]
    said = "; ".join(dict.fromkeys(filter(None, machines))) + ". "
    said += (
        "; ".join(f"{file}: {', '.join(dict.fromkeys(keys))}" if keys else file for file, keys in files.items()) + "."
    )
    shown = "\n".join(dict.fromkeys(commands))
    inside = f"{said}\n\n```bash\n{shown}\n```"
    return f"\n<details markdown>\n<summary>How it was measured</summary>\n\n{inside}\n\n</details>\n"


def today(command: list[str]) -> list[str]:
    """A command as it is run now; the files keep what was run."""
    words = [RENAMED.get(word, word) for word in command]
    for at in [i for i, word in enumerate(words) if word == "--variant"][::-1]:  # from when every drafter was plain
        if not any(word.startswith("drafter.kind=") for word in itertools.takewhile(not_a_flag, words[at + 2 :])):
            words.insert(at + 2, "drafter.kind=dflash")
    old = {f"scripts/{was}": f"scripts/{now}" for was, now in MOVED.items()}
    return [old.get(word, word) for word in words]


def not_a_flag(word: str) -> bool:
    return not word.startswith("--")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(page: Path) -> str:
    """The page's text with every table made anew."""

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise SystemExit(f"error: {page.relative_to(ROOT)}: no table `{name}`; known: {', '.join(TABLES)}")
        table = Table()
        TABLES[name](table)
        below = measured(table) if table.sources and page.name != "README.md" else ""
        return f"{match[1]}\n{markdown(table)}{below}\n{match[3]}"

    return MARKED.sub(fill, page.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of README.md and docs/ from scripts/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    check = parser.parse_args().check
    changed = [page for page in pages() if rewritten(page) != page.read_text(encoding="utf-8")]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {'differs from scripts/results' if check else 'written'}")
        if not check:
            page.write_text(rewritten(page), encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
