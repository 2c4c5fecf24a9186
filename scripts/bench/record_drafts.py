"""Records a drafter's predictions after every token of the target's own greedy answers, for `replay_drafts.py`.

    python scripts/bench/record_drafts.py --target MODEL --drafter OUT/drafter-dflash --output trace.pt \
        --prompts gsm8k=gsm8k_test.jsonl mt_bench=mt_bench.jsonl --limit 40

The trace is a list of answers: `set`, `prompt` (tokens of it), `tokens` of both, and for every anchor `ids` and `lp`,
[anchors, S - 1, k]: the best tokens of every slot and their log-probabilities. Slots are taken to be independent, so
the drafter may have no selector.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, load_drafter
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.doctor.probe import Answer, Probe, Setting
from dflash_toolkit.kernels.loss_terms import LogitScale
from dflash_toolkit.runtime import EngineOptions, load_engine


class Recorder(Probe):
    """`drafts` yields anchors [A], and log-probabilities and tokens [A, S - 1, k]."""

    def _chosen(
        self, drafter: Drafter, setting: Setting, hidden: Tensor, logits: Tensor, anchors: Tensor, near: int
    ) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        LogitScale(setting.output_multiplier, setting.final_logit_softcapping).apply_(wide)
        best = wide.log_softmax(-1).topk(near, dim=-1)
        return best.values.half(), best.indices.int()

    def record(self, prompt: Sequence[int], answer: Sequence[int], best: int) -> dict[str, object] | None:
        """Returns None for an answer of one token, which has no anchor."""
        tokens = torch.tensor([[*prompt, *answer]], device=self.target.device)
        taps = self.drafter.config.target_layer_ids
        with torch.inference_mode():
            features = self.target.forward(tokens, taps=taps).features
        assert features is not None
        hidden = dict(zip(taps, features[0].chunk(len(taps), dim=-1), strict=True))
        whole = Answer(tokens[0], len(prompt), None, hidden)  # type: ignore[arg-type]  # how it was decoded is not read
        parts = [*self.drafts(self.drafter, whole, Setting.of(self.drafter), 1, best)]
        if not parts:
            return None
        lp, ids = (torch.cat([part[i] for part in parts]).cpu() for i in (1, 2))
        return {"prompt": len(prompt), "tokens": tokens[0].int().cpu(), "ids": ids, "lp": lp}


def run(args: argparse.Namespace) -> None:
    asked = read_prompt_sets(args.prompts, args.limit)
    target = Target.load(args.target, args.device, args.dtype)
    drafter = load_drafter(args.drafter, target.device, target.dtype)
    if drafter.selector is not None:
        raise UserError(
            f"drafter {args.drafter} has a selector; recorded slots must be independent, so use plain DFlash"
        )
    tokens = (args.batch + 1) * args.max_model_len
    options = EngineOptions(max_num_seqs=args.batch, max_model_len=args.max_model_len, kv_cache_tokens=tokens)
    engine, tokenizer = load_engine(target, options=options)  # starts sooner than with the drafter
    recorder, found = Recorder(target, drafter, args.max_tokens), list[dict[str, object]]()
    for name, rows in asked.items():
        prompts = [encode_chat(tokenizer, row.messages) for row in rows]
        answers = engine.generate(prompts, SamplingParams(max_tokens=args.max_tokens))
        for prompt, answer in zip(prompts, answers, strict=True):
            if recorded := recorder.record(prompt, answer.tokens, args.best):
                found.append({"set": name} | recorded)
        print(name, sum(each["set"] == name for each in found), "answers", flush=True)
        torch.save(found, args.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--limit", type=int, default=40, help="prompts per set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--best", type=int, default=8, help="best tokens recorded per slot")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
