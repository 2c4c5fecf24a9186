"""Puts the results of a release benchmark into scripts/results, one file per published table.

    python scripts/docs/collect.py RAW --commit 0123abc --date 2026-11-28
    make tables

RAW is a folder with the JSON files that the programs under scripts/bench and scripts/peers wrote, named as below.
Only rows and runs are replaced: columns, formats and charts stay as they are in scripts/results. A table is skipped if
one of its files is not in RAW.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[1] / "results"
SETS = ("gsm8k", "mbpp", "humaneval", "mt_bench", "math500")
Row = dict[str, Any]


class Raw:
    """The raw files of one table, and the runs that they are from."""

    def __init__(self, folder: Path, commit: str, date: str) -> None:
        self.folder, self.stamp = folder, {"commit": commit, "date": date}
        self.runs: list[Row] = []

    def __call__(self, name: str, gpus: int = 1) -> Row:
        found: Row = json.loads((self.folder / name).read_text(encoding="utf-8"))
        versions = {
            key: version.partition("+")[0]
            for key, version in found["versions"].items()
            if key in ("torch", "triton", "vllm")
        }
        gpu = found["gpu"] if gpus == 1 else f"{gpus} x {found['gpu']}"
        machine = {"gpu": gpu, "versions": versions} | self.stamp
        command = shlex.join(found["command"])
        for run in self.runs:
            if run.items() >= machine.items():
                run["commands"] += [command] if command not in run["commands"] else []
                break
        else:
            self.runs.append(machine | {"commands": [command]})
        return found

    def optional(self, name: str) -> Row | None:
        """Like a call, but None if the file is missing."""
        return self(name) if (self.folder / name).is_file() else None


# ---- tables ----------------------------------------------------------------------------------------------------------


def decode(raw: Raw) -> Iterable[Row]:
    """Real weights, one request at a time, on the sets that were also decoded plainly or by vLLM."""
    for file, label in (("05", "0.5B"), ("15", "1.5B")):
        ours, theirs = raw(f"train{file}.json")["runs"][-1]["sets"], raw.optional(f"vllm{file}.json")
        vllm = theirs["sets"] if theirs else {}
        for name in (name for name in SETS if "plain_tokens_per_second" in ours[name] or name in vllm):
            yield {
                "target": label, "set": name, "length": ours[name]["tau_pooled"],
                "plain": ours[name].get("plain_tokens_per_second"), "ours": ours[name]["tokens_per_second"],
                "vllm": vllm.get(name, {}).get("decode_tokens_per_second"),
            }  # fmt: skip


def requests_8b(raw: Raw) -> Iterable[Row]:
    """Recorded drafts in blocks and trees, and vLLM's steps with the tokens per step of blocks of their length."""
    ours = raw("replay8b.json")
    speed = {(row["way"], row["requests"]): row["tokens_per_second"] for row in ours["rows"] if not row["failing"]}
    (plain,) = raw("vllm8b_k0.json")["engines"].values()
    alone = {row["batch"]: row["tokens_per_second"] for row in plain["rows"]}
    steps = {k: full_steps(raw(f"vllm8b_k{k}.json"), k) for k in (15, 7, 3)}
    for requests in sorted({requests for _, requests in speed}):
        vllm, k = max(
            (1e3 * requests * ours["tokens_per_step_of_blocks"][str(k + 1)] / ms[requests], k)
            for k, ms in steps.items()
            if requests in ms
        )
        ways = {way: speed.get((way, requests)) for way in ("plain", "blocks", "trees")}
        yield {"requests": requests, **ways, "vllm_plain": alone.get(requests), "vllm": vllm, "k": k}


def trees_27b(raw: Raw) -> Iterable[Row]:
    """Recorded drafts in blocks and trees, for a target with recurrent layers."""
    rows = raw("replay27b.json")["rows"]
    for requests in sorted({row["requests"] for row in rows}):
        yield {"requests": requests} | {
            row["way"]: row["tokens_per_second"] for row in rows if row["requests"] == requests
        }


def requests_fp8(raw: Raw) -> Iterable[Row]:
    """Tokens per second as measured, each engine with its own synthetic acceptance."""
    for shape, label in (("qwen3.8-27b-fp8", "Qwen3.8-27B"), ("qwen3.6-35b-a3b-fp8", "Qwen3.6-35B-A3B")):
        rows = raw(f"ours_{shape}.json")["rows"]
        speed = {("ours", row["block"], row["batch"]): row["tokens_per_second"] for row in rows}
        for k in (0, 7):
            theirs = raw.optional(f"vllm_{shape}_k{k}.json")
            for engine in theirs["engines"].values() if theirs else ():
                speed |= {("vllm", k + 1, row["batch"]): row["tokens_per_second"] for row in engine["rows"]}
        for batch in sorted({batch for _, _, batch in speed}):
            yield {"target": label, "requests": batch} | {
                f"{engine}_{way}": speed.get((engine, block, batch))
                for engine in ("ours", "vllm")
                for block, way in ((1, "plain"), (8, "drafts"))
            }


def step_times(raw: Raw) -> Iterable[Row]:
    """Milliseconds per step, plain and with blocks of 8, and the share of the read bandwidth of plain steps."""
    shapes = {"gpt-oss-20b": "gpt-oss-20b", "gemma-4-31b": "Gemma 4 31B", "qwen3-8b-awq": "Qwen3-8B AWQ"}
    for shape, label in shapes.items():
        found: dict[int, Row] = {}
        ours = raw.optional(f"steps-{shape}.json")
        for row in ours["rows"] if ours else ():
            each, ms = found.setdefault(row["batch"], {}), row["ms_of_a_full_step"]
            each |= {"plain": ms, "share": row["roofline_ms"] / ms} if row["block"] == 1 else {"drafts": ms}
        for k, way in (0, "vllm_plain"), (7, "vllm_drafts"):
            theirs = raw.optional(f"vllm-{shape}-k{k}.json")
            for engine in theirs["engines"].values() if theirs else ():
                for row in engine["rows"]:
                    found.setdefault(row["batch"], {})[way] = row["ms_per_step"]
        yield from ({"target": label, "requests": batch} | each for batch, each in found.items())


def server(raw: Raw) -> Iterable[Row]:
    """The engine alone, dflash-serve, and the faster of two ways to run vllm serve, by streaming clients."""
    ours = raw("serve_ours.json")
    vllm = [streamed(raw("serve_vllm_k15.json"))]
    if adaptive := raw.optional("serve_vllm_adaptive.json"):
        vllm.append(streamed(adaptive))
    for engine in ours["engine"]:
        clients, row = engine["clients"], streamed(ours)[engine["clients"]]
        best = max((rows[clients] for rows in vllm if clients in rows), key=lambda row: row["tokens_per_second"])
        yield {
            "clients": clients, "engine": engine["tokens_per_second"], "ours": row["tokens_per_second"],
            "vllm": best["tokens_per_second"], "first": row["first_ms"], "vllm_first": best["first_ms"],
        }  # fmt: skip


def streamed(found: Row) -> dict[int, Row]:
    return {row["clients"]: row for row in found["server"] if row["streamed"]}


def training_minutes(raw: Raw) -> Iterable[Row]:
    """Drafters by GPU minutes and prompts, to which `dflash-train --estimate` fits its curve. Tokens are millions."""
    files = sorted(path.name for path in raw.folder.glob("curve*.json"))
    for name in files or ["curve.json"]:
        gpus = json.loads((raw.folder / name).read_text(encoding="utf-8"))["gpus"]
        found = raw(name, gpus)
        for run in found["runs"]:
            yield {
                "target": found["target"].removesuffix("-Instruct"), "parameters": found["target_parameters"] / 1e9,
                "kind": run["kind"], "gpu": found["gpu"].removeprefix("NVIDIA ").partition(" ")[0],
                "gpu_minutes": run["gpu_minutes"]["training"], "total_minutes": run["gpu_minutes"]["total"],
                "cost": run.get("cost"), "prompts": run["prompts"], "response_tokens": run["response_tokens"] / 1e6,
                "seen_tokens": run["seen_tokens"] / 1e6, "speed": run["pooled"]["tokens_per_second"],
                "speed_32": run.get("loads", {}).get("32", {}).get("tokens_per_second"),
                **{key: run["sets"][key]["tau_pooled"] for key in SETS},
            }  # fmt: skip


def int4(raw: Raw) -> Iterable[Row]:
    """The products of a layer in INT4 and in bf16, added up."""
    found = raw("matrices.json")["rows"]
    for rows in dict.fromkeys(row["rows"] for row in found):
        parts = [row for row in found if row["rows"] == rows]
        int4_us, bf16_us, roofline_us = (sum(row[key] for row in parts) for key in ("us", "bf16_us", "roofline_us"))
        yield {"rows": rows, "int4_us": int4_us, "bf16_us": bf16_us, "share": roofline_us / int4_us}


def live(raw: Raw) -> Iterable[Row]:
    """A drafter that learns from its traffic, and plain decoding; each row is the mean of three windows."""
    ways = raw("live.json")["ways"]
    plain = [row["tokens_per_second"] for row in ways["plain"]["rows"]]
    rows = ways["adapted"]["rows"]
    for some in (rows[at : at + 3] for at in range(0, len(rows) - 2, 3)):
        tokens = sum(row["tokens_per_second"] for row in some)
        steps = sum(row["tokens_per_second"] / row["tokens_per_step"] for row in some)
        yield {
            "seconds": some[-1]["second"], "plain": sum(plain) / len(plain), "adapted": tokens / len(some),
            "tau": tokens / steps, "version": some[-1]["drafter_version"],
        }  # fmt: skip


TABLES: dict[str, Callable[[Raw], Iterable[Row]]] = {
    "decode": decode,
    "int4": int4,
    "requests-8b": requests_8b,
    "requests-fp8": requests_fp8,
    "trees-27b": trees_27b,
    "server": server,
    "step-times": step_times,
    "training-minutes": training_minutes,
    "live": live,
}


# ---- vLLM's steps ----------------------------------------------------------------------------------------------------


def full_steps(found: Row, k: int) -> dict[int, float]:
    """Returns milliseconds of vLLM's steps by number of requests, as if all requests took part in every step.

    vllm_step.py times up to the last token of the last request and divides by the steps of a mean request. Here the
    time is divided by the steps of the longest request instead. This makes vLLM's steps too short, if anything.
    """

    def more(requests: int) -> float:
        """Steps of long answers minus those of short ones, without the first token, which prefill makes."""
        long, short = (steps_of_longest(requests, found[key] - 1, k, found["accept"]) for key in ("long", "short"))
        return long - short

    (engine,) = found["engines"].values()
    return {row["batch"]: row["ms_per_step"] * more(1) / more(row["batch"]) for row in engine["rows"]}


def steps_of_longest(requests: int, tokens: int, k: int, accept: float) -> float:
    """Returns the mean steps of the slowest of some requests.

    Args:
        tokens: that each request writes.
        k: tokens drafted per step.
        accept: probability that a drafted token is accepted if those before it were.
    """
    committed = np.array([*(accept**i * (1 - accept) for i in range(k)), accept**k])  # probabilities of 1, 2, ... k + 1
    written, steps = np.eye(1, tokens)[0], 0.0  # probabilities of 0, 1, ... tokens of an unfinished request
    while (unfinished := written.sum()) > 1e-12:
        steps += 1 - (1 - unfinished) ** requests
        written = np.convolve(np.append(0.0, committed), written)[:tokens]
    return float(steps)


# ---- files -----------------------------------------------------------------------------------------------------------


def compact(table: Row) -> str:
    """Returns JSON with one line per row, column and command."""

    def lines(items: Iterable[Any], indent: str) -> str:
        return ",\n".join(indent + json.dumps(item, ensure_ascii=False) for item in items)

    parts = []
    for key, found in table.items():
        if key == "runs":
            runs = []
            for run in found:
                head = json.dumps({name: each for name, each in run.items() if name != "commands"}, ensure_ascii=False)
                runs.append(f'  {head[:-1]}, "commands": [\n{lines(run["commands"], "   ")}\n  ]}}')
            parts.append(' "runs": [\n' + ",\n".join(runs) + "\n ]")
        elif isinstance(found, list):
            parts.append(f' "{key}": [\n{lines(found, "  ")}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(found, ensure_ascii=False)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(row: Row) -> Row:
    return {key: float(f"{each:.5g}") if isinstance(each, float) else each for key, each in row.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, help="folder with the raw results")
    parser.add_argument("--commit", required=True, help="commit that was measured")
    parser.add_argument("--date", required=True, help="day of the measurement")
    args = parser.parse_args()
    for name, rows in TABLES.items():
        raw = Raw(args.raw, args.commit, args.date)
        path = RESULTS / f"{name}.json"
        try:
            found = [rounded(row) for row in rows(raw)]
        except FileNotFoundError as missing:
            print(f"{name}: skipped, {missing.filename} does not exist")
            continue
        if not found:
            print(f"{name}: skipped, no file of {args.raw} has rows for it")
            continue
        table = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(compact({"runs": raw.runs} | table | {"runs": raw.runs, "rows": found}), encoding="utf-8")
        print(f"{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
