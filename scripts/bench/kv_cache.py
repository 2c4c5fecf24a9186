"""Compares a KV cache in fp8 with one in 16 bits: times of steps, and answers.

    python scripts/bench/kv_cache.py --shape qwen3-8b --contexts 8x32000 1x8000 --output times.json
    python scripts/bench/kv_cache.py --target MODEL --drafter DRAFTER --prompts gsm8k=FILE --limit 100 --output new.json

Times are those of captured steps with random weights, plain and with blocks of 16; the drafter's context is read too.
Answers are greedy. `same_tokens` is the share of the tokens of the first engine that the second one also ranks first
after the same tokens. `regret_nats` is the mean log-probability by which the tokens of an answer are below the best
token, both according to the engine with 16 bits.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.files import write_json
from dflash_toolkit.generation import Generation
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import Parts, load_parts

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.step import breakdown, fill, graph_ms
from scripts.measure import setting, without_folders
from scripts.shapes import random_parts

DTYPES = ("auto", "fp8")
BLOCKS = (1, 16)
Scores = list[tuple[float, float, int]]  # log-probability of a token and of the best one, and the token's rank


def times(parts: Parts, contexts: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yields the milliseconds of a step for each dtype, number of requests, context and block length."""
    for dtype in DTYPES:
        for requests, context in contexts:
            reach = context + 256
            options = EngineOptions(
                max_num_seqs=requests, max_model_len=reach, kv_cache_tokens=requests * (reach + 128), draft_tree=0,
                num_speculative_tokens=BLOCKS[-1] - 1, kv_cache_dtype=dtype,
            )  # fmt: skip
            engine = parts.engine(options)
            stacks = [engine.runner.verifier.stack, engine.runner.proposer.stack] if engine.runner.proposer else []
            held = sum(each.nbytes for stack in stacks for each in stack.cached)
            for block in BLOCKS:
                fill(engine, requests, context)
                row = {"dtype": dtype, "requests": requests, "context": context, "block": block, "cache_bytes": held}
                row["ms"] = graph_ms(engine, requests, block)
                fill(engine, requests, context)
                yield row | {"parts_us": breakdown(engine, requests, block)}
            del engine
            gc.collect()
            torch.cuda.empty_cache()


def scores(engine: Engine, prompts: list[list[int]], answers: list[list[int]]) -> Scores:
    """Returns the scores of the tokens of answers, computed by an engine."""
    params, found = SamplingParams(max_tokens=0, prompt_logprobs=1), Scores()
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for prompt, scored in zip(prompts, engine.generate(texts, params), strict=True):
        assert scored.prompt_logprobs is not None
        each = list(scored.prompt_logprobs)[len(prompt) - 1 :]
        found += [(token.chosen, token.best[0][1], rank) for token, rank in each]
    return found


def regret(found: Scores) -> float:
    return sum(best - chosen for chosen, best, _ in found) / len(found)


def compare(parts: Parts, prompts: list[list[int]], max_tokens: int, requests: int) -> dict[str, Any]:
    """Returns how the answers of an engine with fp8 differ from those of an engine with 16 bits."""
    params = SamplingParams(max_tokens=max_tokens)
    engines: dict[str, Engine] = {}
    answers: dict[str, list[Generation]] = {}
    tokens: dict[str, list[list[int]]] = {}
    for dtype in DTYPES:
        options = EngineOptions(
            max_num_seqs=requests, max_model_len=max(map(len, prompts)) + max_tokens, kv_cache_tokens=requests * 4096,
            num_speculative_tokens=None if parts.drafter else 0, kv_cache_dtype=dtype, prefix_cache=False,
        )  # fmt: skip
        engines[dtype] = parts.engine(options)
        answers[dtype] = engines[dtype].generate(prompts, params)
        tokens[dtype] = [each.tokens for each in answers[dtype]]
    steps = {dtype: [step for each in found for step in each.steps] for dtype, found in answers.items()}
    own, other = (scores(engines["auto"], prompts, tokens[dtype]) for dtype in DTYPES)
    read = scores(engines["fp8"], prompts, tokens["auto"])
    pairs = list(zip(*tokens.values(), strict=True))
    return {
        "prompts": len(prompts), "tokens": len(own),
        "same_answers": sum(a == b for a, b in pairs) / len(pairs),
        "same_tokens": sum(rank == 1 for _, _, rank in read) / len(read),
        "same_tokens_16_bits": sum(rank == 1 for _, _, rank in own) / len(own),
        "regret_nats": regret(other), "regret_nats_16_bits": regret(own),
        "acceptance_length": {name: sum(len(s.tokens) for s in each) / len(each) for name, each in steps.items()},
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    if bool(args.shape) == bool(args.target):
        raise UserError("give either --shape or --target")
    result = setting("bench/kv_cache.py", [without_folders(word) for word in args.argv])
    if args.shape:
        contexts = [(int(n), int(context)) for n, context in (each.split("x") for each in args.contexts)]
        result["rows"] = []
        for row in times(random_parts(args.shape, args.layers), contexts):
            result["rows"].append(row)
            print(row, flush=True)
    else:
        tokenizer = load_tokenizer(args.target)
        sets = read_prompt_sets(args.prompts, args.limit)
        prompts = [encode_chat(tokenizer, each.messages) for found in sets.values() for each in found]
        result |= compare(load_parts(args.target, args.drafter), prompts, args.max_tokens, args.requests)
        print(result)
    write_json(args.output, result)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", help="named shape with random weights, for times")
    add("--layers", type=int, help="layers of the shape (default: all)")
    add("--contexts", nargs="+", default=["8x32000", "1x8000"], metavar="REQUESTSxTOKENS")
    add("--target", help="real target, for answers")
    add("--drafter", help="its drafter")
    add("--prompts", nargs="+", default=[], metavar="NAME=SOURCE")
    add("--limit", type=int, default=100, help="prompts of each set")
    add("--max-tokens", type=int, default=256)
    add("--requests", type=int, default=32, help="requests at the same time")
    add("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
