"""Measures warm starts: a drafter that was made for a target is trained on for the fine-tuned target.

    python scripts/bench/warm_start.py --target DIR --drafter DIR --answers gsm8k_train.jsonl --output OUT \
        --data gsm8k_train.jsonl 'mbpp.jsonl[:800]' --prompts gsm8k=gsm8k_test.jsonl mt_bench=mt_bench.jsonl --minutes 3

1. Fine-tunes the last layers of the target on answers of another style and saves it as OUT/target.
2. This target answers the prompts of --data (`dflash-data`): OUT/responses.jsonl.
3. Trains drafters for equal minutes on these responses (`dflash-train --init-from`): one for each of --rates, one for
   each of --blocks with the default rate, and for each block size one from random weights, for comparison.
4. Measures each, and the drafter as it was (`dflash-eval`, greedy, one request at a time, no plain decoding):
   "before" on the original target, "unchanged" on the fine-tuned one.

Every stage is a command that users run, so a run includes its own compilation and features; --minutes are those of
training alone. Run the same command again to resume. Training options may follow as key=value. Writes
OUT/result.json after every measurement.
"""

import argparse
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dflash_toolkit import UserError, load_drafter
from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.sources import Malformed, Source
from dflash_toolkit.evaluation.cli import main as dflash_eval
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.target_files import load_config, load_generation_config, load_tokenizer
from dflash_toolkit.progress import Progress
from dflash_toolkit.stop_tokens import stop_tokens
from dflash_toolkit.train.cli import main as dflash_train
from dflash_toolkit.train.data_cli import main as dflash_data
from dflash_toolkit.train.responses.conversation import recorded_rows
from dflash_toolkit.train.responses.rows import Row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="folder of the original target")
    add("--drafter", required=True, help="drafter of the original target")
    add("--answers", nargs="+", required=True, metavar="SOURCE", help="conversations to fine-tune the target on")
    add("--output", type=Path, required=True)
    add("--data", nargs="+", metavar="SOURCE", help="prompts of the training responses (default: those of --answers)")
    add("--prompts", nargs="+", required=True, metavar="NAME=FILE", help="sets to measure")
    add("--limit", type=int, default=80, help="prompts per set")
    add("--tokens", type=int, default=512, help="longest response, in training and measuring")
    add("--max-prompts", type=int, default=5000, help="prompts that the fine-tuned target answers")
    add("--samples", type=int, default=2, help="responses per prompt: one greedy, the others sampled")
    add("--batch", type=int, default=128, help="responses written concurrently")
    add("--minutes", type=float, default=3.0, help="minutes of training of each drafter")
    add("--rates", type=float, nargs="*", default=[3e-4, 1e-3, 3e-3], help="learning rates of warm starts")
    add("--blocks", type=int, nargs="*", default=[16], help="other block sizes to warm-start")
    add("--tune-layers", type=int, default=8, help="last layers that the fine-tuning changes")
    add("--tune-steps", type=int, default=300, help="steps of the fine-tuning; 0 keeps the target as it is")
    add("--tune-rate", type=float, default=5e-5, help="learning rate of the fine-tuning")
    add("--tune-rows", type=int, default=16, help="conversations of a step of the fine-tuning")
    add("--device", default="auto")
    add("overrides", nargs="*", metavar="key=value", help="training options")
    return parser.parse_intermixed_args(argv)


# ---- the fine-tuned target ---------------------------------------------------------------------------------------


def fine_tuned(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains the last layers of the target on the answers, saves it, and returns its losses."""
    tokenizer, device = load_tokenizer(args.target), resolve_device(args.device)
    rows = conversations(args, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(device).train()
    model.requires_grad_(False)
    layers = model.get_decoder().layers[-args.tune_layers :]
    trained = [parameter.requires_grad_(True) for parameter in layers.parameters()]
    optimizer = torch.optim.AdamW(trained, args.tune_rate, weight_decay=0.0)
    random = torch.Generator().manual_seed(0)
    losses = []
    with Progress("fine-tuning", args.tune_steps) as bar:
        for step in range(args.tune_steps):
            for group in optimizer.param_groups:
                group["lr"] = args.tune_rate * (1 - step / args.tune_steps)
            batch = [rows[i] for i in torch.randint(len(rows), (args.tune_rows,), generator=random).tolist()]
            loss = answer_loss(model, batch, device)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            bar.advance(1, note=f"loss {losses[-1]:.3f}")
    partial = folder.with_suffix(".partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    some = max(1, args.tune_steps // 10)
    ends = {"first": losses[:some], "last": losses[-some:]}
    return {"conversations": len(rows), **{f"{name}_loss": sum(of) / some for name, of in ends.items() if of}}


def conversations(args: argparse.Namespace, tokenizer: Any) -> list[Row]:
    """Returns the conversations with at most `tokens` twice over, with the spans of their answers. Raises UserError."""
    stops = stop_tokens(load_config(args.target), load_generation_config(args.target), tokenizer)
    rows = []
    for name in args.answers:
        for each in Source(name).read():
            if isinstance(each, Malformed):
                raise UserError(f"{name}: {each}")
            rows += recorded_rows(tokenizer, each.recorded, each.tools, stops)[0]
    rows = [row for row in rows if len(row.tokens) <= 2 * args.tokens]
    if not rows:
        raise UserError(
            f"{', '.join(args.answers)}: no conversation with an answer of at most {2 * args.tokens} tokens"
        )
    return rows


def answer_loss(model: Any, rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """Returns the mean cross-entropy of the answers' tokens."""
    ids = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.tokens)] = torch.as_tensor(list(row.tokens))
        for start, end in row.spans:
            labels[i, start:end] = ids[i, start:end]
    ids, labels = ids.to(device), labels.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=ids).logits  # padding follows the row, so no earlier token sees it
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


# ---- runs --------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Returns the name and the options of every training."""
    start = load_drafter(args.drafter).config
    shape = [f"drafter.kind={start.architecture.kind}", f"drafter.layers={start.num_layers}",
             f"drafter.target_layer_ids={list(start.target_layer_ids)}"]  # fmt: skip
    warm = ["--init-from", args.drafter]
    own = start.block_size
    runs = [(f"b{own} warm {rate:g}", [*warm, f"optim.learning_rate={rate}"]) for rate in args.rates]
    runs += [(f"b{own} random", [*shape, f"drafter.block_size={own}"])]
    for block in args.blocks:
        runs += [(f"b{block} warm", [*warm, f"drafter.block_size={block}"])]
        runs += [(f"b{block} random", [*shape, f"drafter.block_size={block}"])]
    return runs


def command(main: Callable[[list[str]], int], words: Sequence[str]) -> None:
    """Runs a command of the toolkit. Raises UserError if it fails; it has printed why."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print("\n$", main.__module__.split(".")[1], *words, file=sys.stderr)
    if code := main(list(words)):
        raise UserError(f"the command above ended with exit code {code}; run this program again to resume")


class Study:
    """The stages of a study, each of which is skipped if its result exists."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._path = args, args.output / "result.json"
        head = setting("bench/warm_start.py", [without_folders(word) for word in args.argv])
        self.result: dict[str, Any] = {**head, "target": Path(args.target).name, "seconds": {}, "runs": {}}
        if self._path.exists():
            self.result = json.loads(self._path.read_text())
            if self.result["command"] != head["command"]:
                raise UserError(f"{self._path} is of another command; choose another --output or remove it")

    def stage(self, name: str, work: Callable[[], dict[str, Any] | None]) -> None:
        """Runs a stage and writes what it returns; `seconds` has its duration."""
        if name not in self.result["seconds"]:
            began = time.perf_counter()
            self.result |= {name: found} if (found := work()) else {}
            self.result["seconds"][name] = round(time.perf_counter() - began, 1)
            write_json(self._path, self.result)

    def measure(self, name: str, target: str, drafter: str, training: dict[str, Any] | None = None) -> None:
        """Decodes the prompt sets; writes the run's acceptance lengths."""
        if name in self.result["runs"]:
            return
        args, report = self._args, self._args.output / f"report-{folder_of(name)}"
        options = ["--target", target, "--drafter", drafter, "--output", str(report), "--limit", str(args.limit)]
        options += ["--max-tokens", str(args.tokens), "--no-baseline", "--device", args.device]
        command(dflash_eval, [*options, "--prompts", *args.prompts])
        section = json.loads((report / "report.json").read_text())["sections"][0]
        kept = ("tau_pooled", "tau_pooled_ci95", "requests", "verify_steps")
        sets = {name: {key: found[key] for key in kept} for name, found in section["sets"].items()}
        sets["pooled"] = {key: section["overall"][key] for key in kept}
        self.result["runs"][name] = {"sets": sets} | (training or {})
        write_json(self._path, self.result)

    def table(self) -> str:
        """Returns acceptance lengths by run and set."""
        names = list(next(iter(self.result["runs"].values()))["sets"])
        rows = [
            (name, str(run.get("steps", "")), *(number(run["sets"][each]["tau_pooled"]) for each in names))
            for name, run in self.result["runs"].items()
        ]
        return render_table(Table("", ("Run", "Steps", *names), tuple(rows)))


def folder_of(name: str) -> str:
    return name.replace(" ", "-")


def run(args: argparse.Namespace) -> None:
    """The whole study. Raises UserError."""
    args.output.mkdir(parents=True, exist_ok=True)
    study, tuned, responses = Study(args), str(args.output / "target"), str(args.output / "responses.jsonl")
    study.measure("before", args.target, args.drafter)
    study.stage("tuning", lambda: fine_tuned(args, Path(tuned)))
    study.measure("unchanged", tuned, args.drafter)
    words = ["--target", tuned, "--output", responses, "--device", args.device, "--samples", str(args.samples)]
    words += [] if args.samples > 1 else ["--temperature", "0"]
    words += ["--max-tokens", str(args.tokens), "--batch-size", str(args.batch)]
    words += [f"prompts.max_prompts={args.max_prompts}", "--data", *(args.data or args.answers)]
    study.stage("responses", lambda: command(dflash_data, words))
    for name, options in plan(args):
        output = str(args.output / f"drafter-{folder_of(name)}")
        words = ["--target", tuned, "--responses", responses, "--output", output, "--device", args.device]
        words += [f"optim.minutes={args.minutes:g}", "run.evaluate_every=0", *options, *args.overrides]
        study.stage(name, lambda words=words: command(dflash_train, words))  # type: ignore[misc]
        record = json.loads(Path(output, "run.json").read_text())["result"]
        study.measure(name, tuned, output, {key: record[key] for key in ("steps", "training_seconds")})
        print(f"\n{study.table()}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 an error (one line), 130 interrupted (run again to resume)."""
    args = parse(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
