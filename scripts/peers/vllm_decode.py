"""Decodes prompt sets with vLLM and one of our drafters, and compares with our engine's results on them.

    python scripts/peers/vllm_decode.py --target MODEL --drafter OUT/drafter-8m --limit 80 --plain gsm8k \
        --prompts gsm8k=gsm8k_test.jsonl 'mbpp=mbpp.jsonl[800:]' --ours OUT/result.json --output peer.json

One request at a time, greedy, with the same token ids and stop tokens as `dflash-eval` and `bench/train_real.py`.
It compares with a result of either, if that has the same prompts. `--plain` also decodes one set without the
drafter, in another engine. Needs an environment with vllm (0.26 or 0.33) and this project.

For each set, `seconds` and `tokens_per_second` include prefill; `decode_tokens_per_second` excludes prefill and
first tokens, as our reports do. `tau` is from vLLM's counters, 1 + accepted / drafts, and counts drafts accepted
after the end of an answer. `tau_pooled` is the figure of our reports: committed tokens by steps; `tau_of_ours`
divides it by ours. After a near-tie the engines may write different texts, so `same_answers` compares only equal
answers. The result file is written after every set.
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from dflash_toolkit.acceptance import ratio
from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt, prompts_digest
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.results import answer_hash
from dflash_toolkit.evaluation.report.schema import read_report
from dflash_toolkit.evaluation.report.table import Table, number
from dflash_toolkit.files import finite, write_json
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.spec import context_limit
from dflash_toolkit.models.target_files import load_config, load_generation_config, load_tokenizer
from dflash_toolkit.stop_tokens import stop_tokens
from dflash_toolkit.train.responses.vllm_backend import import_vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders

WARM_UP = 3  # untimed requests
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
COMPARED = ("tau_pooled", "tokens_per_second", "plain_tokens_per_second")  # fields of our report
Sets = dict[str, list[EncodedPrompt]]


class Work(NamedTuple):
    """The work of one engine."""

    options: dict[str, Any]  # arguments of vllm.LLM
    sampling: dict[str, Any]  # arguments of vllm.SamplingParams
    sets: dict[str, list[list[int]]]


class Answer(NamedTuple):
    """One answer, of either side."""

    sha256: str  # as in reports
    tokens: int
    steps: int  # steps that verified a block


class Counts(NamedTuple):
    """vLLM's counts for one set."""

    requests: int
    tokens: int  # generated: first and stop tokens included
    seconds: float
    decode_seconds: float  # from an answer's first token to its last, by the engine's own clock
    drafts: int | None  # steps that verified a block; None without a drafter
    accepted: int | None
    answers: list[Answer]  # none without a drafter


OnSet = Callable[[dict[str, Counts], dict[str, Any]], object]  # called with the results of `decode` for the sets so far


class Ours(NamedTuple):
    """Our engine's measurements: figures by set, and its reports if there are any."""

    run: str | None  # name of the run of bench/train_real.py
    sets: dict[str, dict[str, Any]]
    reports: list[dict[str, Any]]

    def answers(self, name: str) -> list[Answer]:
        """Returns the answers of a set; none if no report has them."""
        rows = [row for report in self.reports for row in report["sets"].get(name, {}).get("per_request", [])]
        return [Answer(row["answer_sha256"], row["tokens"], row["steps"]) for row in rows if "answer_sha256" in row]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True)
    add("--drafter", required=True)
    add("--prompts", nargs="+", required=True, metavar="NAME=FILE", help="prompt sets; FILE[a:b] is rows a..b-1")
    add("--limit", type=int, help="prompts per set")
    add("--max-tokens", type=int, default=512)
    add("--plain", metavar="NAME", help="set to decode also without the drafter")
    add("--ours", type=Path, metavar="FILE", help="result.json of bench/train_real.py, or report.json of dflash-eval")
    add("--run", metavar="NAME", help="run in that result.json (default: as in drafter-NAME, else the last)")
    add("--gpu-memory-utilization", type=float, default=0.5)
    add(
        "--kv-cache-memory-bytes",
        type=int,
        help="fixed cache size instead of a share; other programs may then use the GPU",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs: faster start, for acceptance only")
    add("--output", type=Path, required=True)
    return parser.parse_args(argv)


# ---- what ours measured ------------------------------------------------------------------------------------------


def read_ours(path: Path, drafter: str, name: str | None) -> Ours:
    """The run `name` of a result of bench/train_real.py, or a report of dflash-eval. Raises UserError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "schema_version" in found or "schema" in found:
            report = one_section(path)
            return Ours(None, report["sets"], [report])
        runs = {run["name"]: run["sets"] for run in found["runs"]}
        named_after = Path(drafter).name.removeprefix("drafter-")
        name = name or (named_after if named_after in runs else list(runs)[-1])
        if name not in runs:
            raise UserError(f"--run {name}: {path} has {', '.join(runs)}")
        # a set that was decoded plainly as well is in a report of its own
        reports = [path.parent / f"report-{name}{kind}" / "report.json" for kind in ("", "-plain")]
        return Ours(name, runs[name], [one_section(report) for report in reports if report.exists()])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"--ours {path}: no result of bench/train_real.py or dflash-eval ({error!r})") from error


def one_section(path: Path) -> dict[str, Any]:
    """Sets of the first section of a report of dflash-eval, and its arguments. Raises UserError: it was not greedy."""
    report = read_report(path)
    section = report["sections"][0]
    if section["temperature"]:
        raise UserError(
            f"{path}: its first section is of temperature {section['temperature']}; vllm decodes greedily here"
        )
    return {"sets": section["sets"], "arguments": report["arguments"]}


def check_same(ours: Ours, sets: Sets, max_tokens: int) -> None:
    """Raises UserError if the prompts or answer lengths of ours are known to differ."""
    for name, prompts in sets.items():
        if name not in ours.sets:
            raise UserError(f"--ours has no set {name!r}: {', '.join(ours.sets)}")
        if (count := ours.sets[name]["requests"]) != len(prompts):
            raise UserError(f"--ours decoded {count} prompts of {name!r}, not {len(prompts)}; give the --limit it had")
        for noted in (report["arguments"] for report in ours.reports):
            if noted["prompt_tokens_sha256"].get(name, prompts_digest(prompts)) != prompts_digest(prompts):
                raise UserError(f"--ours decoded other prompts of {name!r}, or by another chat template")
            if noted["max_tokens"] != max_tokens:
                raise UserError(f"--ours had --max-tokens {noted['max_tokens']}, not {max_tokens}")


# ---- what vLLM does ----------------------------------------------------------------------------------------------


def apart(work: Work, on_set: OnSet | None = None) -> tuple[dict[str, Counts], dict[str, Any]]:
    """`decode` in a process of its own: all the memory of one engine is free before the next one starts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(decode, work, on_set).result()


def decode(work: Work, on_set: OnSet | None = None) -> tuple[dict[str, Counts], dict[str, Any]]:
    """Counts by set; version and seconds to start. Raises UserError: vllm refuses the models or the machine.

    Args:
        on_set: called after every set with the counts up to there, in this process.
    """
    vllm = import_vllm()
    began = time.perf_counter()
    try:
        llm = vllm.LLM(**work.options)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"vllm cannot start: {' '.join(str(error).split())}") from error
    start = {"vllm": vllm.__version__, "start_s": round(time.perf_counter() - began, 1)}
    params = vllm.SamplingParams(**work.sampling)
    drafts = "speculative_config" in work.options

    def ask(prompt: list[int]) -> Any:
        return llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]

    def counters() -> list[int]:
        values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
        return [values[name] for name in COUNTERS]

    found: dict[str, Counts] = {}
    try:
        for prompt in next(iter(work.sets.values()))[:WARM_UP]:
            ask(prompt)
        for name, prompts in work.sets.items():
            tokens, seconds, decoding, answers = 0, 0.0, 0.0, []
            counted = [counters()] if drafts else []
            for prompt in prompts:
                began = time.perf_counter()
                answer = ask(prompt)
                seconds += time.perf_counter() - began
                ids = list(answer.outputs[0].token_ids)
                tokens += len(ids)
                decoding += answer.metrics.last_token_ts - answer.metrics.first_token_ts
                if drafts:
                    counted.append(counters())
                    answers.append(Answer(answer_hash(ids), len(ids), counted[-1][0] - counted[-2][0]))
            since = [b - a for a, b in zip(counted[0], counted[-1], strict=True)] if drafts else [None, None]
            found[name] = Counts(len(prompts), tokens, seconds, decoding, *since, answers)
            print(f"{name}: {tokens} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)
            if on_set:
                on_set(found, start)
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process that this one would wait for
    return found, start


def figures(counts: Counts, ours: Mapping[str, Any] | None = None, answers: Sequence[Answer] = ()) -> dict[str, Any]:
    """Returns the entry of one set in the result file; `ours` and `answers` are our engine's results."""
    committed = counts.tokens - counts.requests  # the first token of an answer comes from the prefill
    found: dict[str, Any] = {key: value for key, value in counts._asdict().items() if value is not None}
    del found["answers"]
    found["tokens_per_second"] = ratio(counts.tokens, counts.seconds)
    found["decode_tokens_per_second"] = ratio(committed, counts.decode_seconds)
    if counts.drafts is not None and counts.accepted is not None:
        found["tau"] = 1 + ratio(counts.accepted, counts.drafts)
        found["tau_pooled"] = ratio(committed, counts.drafts)
    if ours is not None:
        found["ours"] = {key: ours[key] for key in COMPARED if ours.get(key) is not None}
        if "tau_pooled" in found and ours.get("tau_pooled"):
            found["tau_of_ours"] = found["tau_pooled"] / ours["tau_pooled"]
    if answers and len(answers) == len(counts.answers):
        found["same_answers"] = same_answers(counts.answers, answers)
    return finite({key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()})


def same_answers(theirs: Sequence[Answer], ours: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance length of both over the answers that are the same, token for token, and the steps it is of."""
    same = [(a, b) for a, b in zip(theirs, ours, strict=True) if a.sha256 == b.sha256]
    committed = sum(a.tokens - 1 for a, _ in same)
    steps = {"drafts": sum(a.steps for a, _ in same), "drafts_of_ours": sum(b.steps for _, b in same)}
    there, here = (ratio(committed, count) for count in steps.values())
    found = {"tau_pooled": there, "ours": here, "tau_of_ours": ratio(there, here)}
    return {"requests": len(same)} | steps | finite({key: round(value, 4) for key, value in found.items()})


# ---- the whole ---------------------------------------------------------------------------------------------------


def encoded(target: str, prompts: Sequence[str], limit: int | None) -> Sets:
    """The sets as bench/train_real.py and dflash-eval encode them. Raises UserError."""
    asked = read_prompt_sets(prompts, limit)
    tokenizer = load_tokenizer(target)
    return {
        name: [EncodedPrompt(p.id, encode_chat(tokenizer, p.messages, tools=p.tools)) for p in rows]
        for name, rows in asked.items()
    }


def save(
    output: Path, head: Mapping[str, Any], ours: Ours | None, counts: Mapping[str, Counts], start: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the result of the sets up to now over the one before; returns it."""
    sets = {n: figures(of, ours.sets[n], ours.answers(n)) if ours else figures(of) for n, of in counts.items()}
    versions = {"versions": head["versions"] | {"vllm": start["vllm"]}}
    result = {**head, **versions, "start_s": start["start_s"], "sets": sets}
    write_json(output, result)
    return result


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, found in result["sets"].items():
        shown = (found["tau"], found["tau_pooled"], found.get("tau_of_ours"), found["decode_tokens_per_second"])
        rows.append((name, str(found["requests"]), *map(number, shown)))
    header = ("Set", "Requests", "tau by counters", "tau", "of ours", "Decoding tokens/s")
    return render_table(Table("", header, tuple(rows)))


def run(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vllm is not installed here: pip install 'dflash-toolkit[vllm]' in an environment of its own (it pins its "
            "torch), and run this there"
        )
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: no such directory")
    sets = encoded(args.target, args.prompts, args.limit)
    if args.plain is not None and args.plain not in sets:
        raise UserError(f"--plain {args.plain}: not one of the sets: {', '.join(sets)}")
    ours = read_ours(args.ours, args.drafter, args.run) if args.ours else None
    if ours:
        check_same(ours, sets, args.max_tokens)
    drafter = locate("drafter", args.drafter)
    block = read_config(drafter).block_size
    config = load_config(args.target)
    longest = max(len(prompt.token_ids) for prompts in sets.values() for prompt in prompts)
    # vLLM schedules whole blocks ahead of what is accepted; it cuts none if there is room after the end
    room = min(longest + args.max_tokens + 4 * block, context_limit(config))
    options = {
        "model": args.target, "dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": room,
        "gpu_memory_utilization": args.gpu_memory_utilization, "enable_prefix_caching": False,
        "disable_log_stats": False, "skip_tokenizer_init": True, "enforce_eager": args.enforce_eager,
        "generation_config": "vllm",  # no repetition penalty and the like: ours decodes without
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
    }  # fmt: skip
    sampling = {
        "temperature": 0.0, "max_tokens": args.max_tokens, "detokenize": False,
        "stop_token_ids": list(stop_tokens(config, load_generation_config(args.target), load_tokenizer(args.target))),
    }  # fmt: skip
    ids = {name: [prompt.token_ids for prompt in prompts] for name, prompts in sets.items()}
    speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": block - 1}
    head = setting("peers/vllm_decode.py", [without_folders(word) for word in args.argv])
    head |= {"target": Path(args.target).name, "drafter": Path(args.drafter).name, "block_size": block}
    head |= {"run_of_ours": ours.run} if ours else {}
    keep = functools.partial(save, args.output, head, ours)
    result = keep(*apart(Work(options | {"speculative_config": speculative}, sampling, ids), keep))
    if args.plain is not None:
        alone, _ = apart(Work(options, sampling, {args.plain: ids[args.plain]}))
        result |= {"plain": {"set": args.plain} | figures(alone[args.plain])}
        write_json(args.output, result)
    print(f"\n{table(result)}\n\n{args.output}")


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    args = parse(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
