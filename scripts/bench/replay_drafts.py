"""Measures tokens per second at the shape of a model with the recorded drafts of another pair.

    python scripts/bench/replay_drafts.py trace.pt --shape qwen3-8b --requests 1 4 8 16 32 64 --output replay.json
    python scripts/bench/replay_drafts.py trace.pt --requests 8 32 --failing 1 --output failing.json

`record_drafts.py` writes the trace. The model has random weights and does all of its work; then the drafter's
predictions and the target's tokens are replaced by those of the trace, so that a node of a tree is accepted as
often as in real use. Answers of one set are concatenated to rows of `--length` tokens. A round starts with one row
per request. It is timed from the first token of the last request to the end of the first request, so every timed
step has all requests. Each way of drafting decodes the same rows, after one round that does not count. `--failing`
also runs batches in which that many requests accept no draft, and reports their speed and that of the others. The
file also has the mean tokens per step of blocks of each length, to convert the step times of another engine into
tokens per second.
"""

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit import SamplingParams
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.models.device import use_device
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.draft_length import block_sizes
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.step_times import launcher

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders
from scripts.shapes import named_shape, random_drafter, random_target

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0},
    "blocks": {"draft_tree": 0},
    "chains": {"draft_tree": 15, "draft_tree_width": 1},
    "trees": {"draft_tree": 63, "draft_tree_width": 8},
}


def in_rows(recorded: Sequence[dict[str, Any]], length: int, seed: int) -> list[dict[str, Any]]:
    """Concatenates the answers of each set, without prompts, to rows of `length` tokens; drops incomplete rows.

    After the end of an answer every draft is wrong.
    """
    dice, rows = random.Random(seed), list[dict[str, Any]]()
    for name in dict.fromkeys(each["set"] for each in recorded):
        answers = [each for each in recorded if each["set"] == name]
        dice.shuffle(answers)
        tokens, ids, log_probs = list[Tensor](), list[Tensor](), list[Tensor]()
        for each in answers:
            tokens.append(each["tokens"][each["prompt"] :])
            # no draft follows the last token: use an unlikely token with a low probability
            ids += [each["ids"], torch.full_like(each["ids"][:1], -1)]
            log_probs += [each["lp"], torch.full_like(each["lp"][:1], -20)]
            if sum(map(len, tokens)) >= length:
                row = {"set": name, "prompt": 0, "tokens": torch.cat(tokens)[:length]}
                rows.append(row | {"ids": torch.cat(ids)[: length - 1], "lp": torch.cat(log_probs)[: length - 1]})
                tokens, ids, log_probs = [], [], []
    dice.shuffle(rows)
    return rows


class Trace:
    """Recorded answers on the device, then the same answers again with drafts that are always wrong."""

    def __init__(self, recorded: Sequence[dict[str, Any]], slots: int, vocabulary: int, device: torch.device) -> None:
        self.count, shape = len(recorded), recorded[0]["ids"].shape[1:]
        longest = max(len(each["ids"]) for each in recorded)
        self.lengths = [len(each["ids"]) for each in recorded]
        if shape[0] < slots:
            raise UserError(f"the trace has {shape[0]} slots and the drafter drafts {slots}; take another --shape")
        self.truth = torch.zeros(2 * self.count, longest + slots + 2, dtype=torch.int64, device=device)
        self.ids = torch.zeros(2 * self.count, longest, slots, shape[1], dtype=torch.int64, device=device)
        self.log_probs = torch.full(self.ids.shape, -20.0, device=device)
        for i, each in enumerate(recorded):
            text = each["tokens"][each["prompt"] :].long().to(device) % vocabulary
            ids = each["ids"][:, :slots].long().to(device) % vocabulary
            for at in (i, self.count + i):
                self.truth[at, : len(text)] = text
                self.ids[at, : len(ids)] = ids
                self.log_probs[at, : len(ids)] = each["lp"][:, :slots].to(device, torch.float32)
        failing = self.ids[self.count :]
        failing += 1
        slot = 1 + torch.arange(longest, device=device)[:, None] + torch.arange(slots, device=device)
        right = failing == self.truth[self.count :, slot][..., None]  # another candidate may be the true token
        failing[right] += vocabulary // 2
        failing %= vocabulary


def in_blocks(recorded: Sequence[dict[str, Any]], block: int) -> tuple[int, int]:
    """Tokens and steps of all answers, decoded in blocks of one length: what an engine that drafts no other ones does.

    The first token of an answer comes from its prefill.
    """
    tokens = steps = 0
    for each in recorded:
        text, ids, at = each["tokens"][each["prompt"] :].tolist(), each["ids"][:, : block - 1, 0].tolist(), 0
        while at < len(ids):
            following = text[at + 1 : at + block]
            at += 1 + next(
                (i for i, (a, b) in enumerate(zip(ids[at], following, strict=False)) if a != b), len(following)
            )
            steps += 1
        tokens += len(text) - 1
    return tokens, steps


def plant(engine: Engine, trace: Trace, prompt: int) -> dict[tuple[int, ...], int]:
    """Let the engine draft and choose what the trace holds; which answer belongs to a prompt is written there."""
    runner, owners = engine.runner, dict[tuple[int, ...], int]()
    which = torch.zeros(runner.max_num_seqs, dtype=torch.int64, device=runner.device)
    add, move = runner.add, runner.move
    verifier, state, ops = runner.verifier, runner.state, runner.ops

    def added(row: int, request: Request, place: int = 0) -> Any:
        which[row] = owners[tuple(request.prompt_ids)]
        return add(row, request, place)

    def moved(source: int, target: int) -> None:
        which[target] = which[source]
        move(source, target)

    def truth(rows: Tensor, positions: Tensor) -> Tensor:
        """Returns the recorded values at these positions of the requests in these rows."""
        at = (positions.long() - prompt).clamp(0, trace.truth.shape[1] - 1)
        return trace.truth[which[rows], at]

    def thought(batch: int, block: int) -> tuple[Tensor, Tensor]:
        at = (state.lengths[:batch].long() - prompt).clamp(0, trace.ids.shape[1] - 1)
        return tuple(part[which[:batch], at, : block - 1] for part in (trace.ids, trace.log_probs))  # type: ignore[return-value]

    commit, commit_trees = verifier.commit, verifier.commit_trees

    def committed(draft: Tensor, choice: Tensor, now: Any) -> Any:
        batch, block = choice.shape
        slots = torch.arange(1, block + 1, device=choice.device)
        rows = torch.arange(batch, device=choice.device)[:, None].expand(-1, block)
        return commit(draft, truth(rows, state.lengths[:batch, None] + slots), now)

    def trees_committed(tree: Any, choice: Tensor, *rest: Any, **more: Any) -> Any:
        return commit_trees(tree, truth(tree.requests.clamp(min=0).long(), tree.positions + 1), *rest, **more)

    runner.add, runner.move = added, moved  # type: ignore[method-assign]
    verifier.commit, verifier.commit_trees = committed, trees_committed  # type: ignore[method-assign]
    if (proposer := runner.proposer) is not None:
        propose, children = proposer.propose, proposer.children

        def proposed(last: Tensor, rows: Any, block: int) -> Draft:
            propose(last, rows, block)
            return Draft(thought(len(last), block)[0][..., 0].contiguous())

        def grown(last: Tensor, rows: Any, block: int, calibration: Tensor, width: int) -> tuple[Tensor, ...]:
            children(last, rows, block, calibration, width)
            ids, log_probs = (part.contiguous() for part in thought(len(last), block))
            none = torch.zeros(ids.shape[:2], device=ids.device)
            return *ops.draft_children(log_probs, none, ids, calibration, width), ids

        proposer.propose, proposer.children = proposed, grown  # type: ignore[method-assign,assignment]
    runner.graphs.captured.clear()  # the ones captured for their times hold the random drafter
    return owners


class Requests:
    """Prompts of random tokens, each with a recorded answer."""

    def __init__(self, engine: Engine, trace: Trace, prompt: int, seed: int) -> None:
        self._engine, self._trace, self._prompt, self._dice = engine, trace, prompt, random.Random(seed)
        self._owners = plant(engine, trace, prompt)

    def submit(self, answer: int) -> Request:
        """The next request; its answer may be one of those that fail."""
        ids = tuple(self._dice.randrange(self._engine.vocabulary) for _ in range(self._prompt))
        self._owners[ids] = answer
        tokens = self._trace.lengths[answer % self._trace.count]
        return self._engine.submit(ids, SamplingParams(max_tokens=max(tokens, 2), ignore_eos=True))

    def load(self, at_a_time: int, failing: int, rounds: int, answers: Iterator[int]) -> dict[str, float]:
        """A number of requests together, of which `failing` fail: tokens a second of all, and of one of each kind."""
        counts, took = [0, 0], 0.0
        for _ in range(rounds):
            kinds = [number < failing for number in range(at_a_time)]
            running = [(self.submit(next(answers) + bad * self._trace.count), bad) for bad in kinds]
            while not all(request.tokens for request, _ in running):
                self._engine.step()
            before = [len(request.tokens) for request, _ in running]
            with no_collection():  # in which round one would fall is chance
                began = time.perf_counter()
                while not any(request.finished for request, _ in running):
                    self._engine.step()
                took += time.perf_counter() - began
            for (request, bad), count in zip(running, before, strict=True):
                counts[bad] += len(request.tokens) - count
                self._engine.cancel(request)
            while self._engine.step():
                pass  # steps that were still in flight
        good, bad = counts
        each = {"tokens_per_second": (good + bad) / took, "seconds": took}
        each |= {"of_each": good / took / (at_a_time - failing)} if at_a_time > failing else {}
        return each | ({"of_each_failing": bad / took / failing} if failing else {})


def capture(engine: Engine, requests: Sequence[int]) -> None:
    """Captures the greedy steps of batches of these numbers of requests."""
    runner = engine.runner
    for batch in {runner.bucket(each) for each in requests}:
        for shape in engine.step_shapes(batch):
            launcher(runner, batch, shape)
    runner.graphs.started = True


def run(args: argparse.Namespace) -> None:
    recorded = [each for each in torch.load(args.trace) if args.sets is None or each["set"] in args.sets]
    recorded = in_rows(recorded, args.length, seed=0)
    if not recorded:
        raise UserError(f"{args.trace} holds no {args.length} tokens of these sets; make it with more answers")
    device = use_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = named_shape(args.shape)
    target = random_target(ModelSpec.of_target(config), device, dtype)
    drafter = random_drafter(drafter_shape(config), device, dtype)
    trace = Trace(recorded, drafter.config.block_size - 1, target.spec.vocab_size, device)
    words, found = [without_folders(word) for word in sys.argv[1:]], list[dict[str, Any]]()
    blocks = [block for block in block_sizes(drafter.config.block_size) if block > 1]
    fixed = {block: round(tokens / steps, 4) for block in blocks for tokens, steps in [in_blocks(recorded, block)]}
    for way in args.ways:
        options = EngineOptions(
            max_num_seqs=max(args.requests), max_model_len=args.prompt + max(trace.lengths) + 1, prefix_cache=False,
            **WAYS[way],
        )  # fmt: skip
        engine = Engine(target, drafter, (), options)
        requests = Requests(engine, trace, args.prompt, seed=0)
        with torch.inference_mode():
            capture(engine, args.requests)
        for at_a_time, failing in itertools.product(args.requests, sorted({0, args.failing})):
            engine.reset_acceptance()
            answers = itertools.cycle(range(trace.count))  # the same for every way
            rounds = 1 if way == "plain" or failing == at_a_time else -(-args.answers // at_a_time)
            requests.load(at_a_time, failing, 1, itertools.cycle(range(trace.count)))
            row = requests.load(at_a_time, failing, rounds, answers)
            rounded = {name: round(value, 2) for name, value in row.items()}
            found.append({"way": way, "requests": at_a_time, "failing": failing} | rounded)
            print(found[-1], flush=True)
            if args.output:
                said = {"ways": WAYS, "tokens_per_step_of_blocks": fixed, "rows": found}
                write_json(args.output, setting("bench/replay_drafts.py", words) | said)
        del engine, requests
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    header = ("requests", "failing", "way", "tokens/s", "of each", "of each failing")
    names = ("tokens_per_second", "of_each", "of_each_failing")
    rows = [
        (str(r["requests"]), str(r["failing"]), r["way"], *(number(r[name]) if name in r else "" for name in names))
        for r in sorted(found, key=lambda r: (r["requests"], r["failing"]))
    ]
    print(render_table(Table("", header, tuple(rows))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sets", nargs="+", help="only answers of these sets")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64], help="concurrent requests")
    parser.add_argument(
        "--failing", type=int, default=0, metavar="N", help="also measure batches in which N requests accept no draft"
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--prompt", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("--length", type=int, default=512, help="row length in tokens")
    parser.add_argument("--answers", type=int, default=32, help="minimum rows per load; one round without drafts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
