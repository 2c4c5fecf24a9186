"""Trains a target by policy gradient and keeps its drafter fresh, so that rollouts stay fast.

python examples/rl_loop.py --target Qwen/Qwen2.5-0.5B-Instruct --drafter out/mine --rounds 100

Each round samples answers with the engine, takes one step of the target and some of the drafter, and copies both into
the running engine. The drafter trains on hidden states that the engine has computed anyway. The reward is a stand-in:
it prefers answers with many different tokens.
"""

import argparse
from collections.abc import Sequence

import torch

from dflash_toolkit import SamplingParams, Target, load_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.runtime import EngineOptions, load_engine
from dflash_toolkit.train.online import OnlineTrainer, Record

QUESTIONS = ("Name a colour.", "Write a haiku about rain.", "What is 17 times 3?", "Why is the sky blue?")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-6, help="of the target")
    args = parser.parse_args(argv)

    target = Target.load(args.target)
    drafter = load_drafter(args.drafter, target.device, target.dtype)
    engine, tokenizer = load_engine(target, drafter, options=EngineOptions(keep_taps=True, gpu_memory_utilization=0.5))
    trainer = OnlineTrainer(target, drafter)
    policy = target.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS] * args.samples

    for number in range(args.rounds):
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=args.max_tokens, return_taps=True, seed=number * 1000 + i)
            for i in range(len(prompts))
        ]
        answers = engine.generate(prompts, sampling)
        rewards = torch.tensor([len(set(answer.tokens)) / args.max_tokens for answer in answers])
        steps = [step for answer in answers for step in answer.steps]
        length = sum(len(step.tokens) for step in steps) / max(len(steps), 1)
        print(f"round {number}: reward {rewards.mean():.3f}, {length:.2f} tokens per step", flush=True)

        optimizer.zero_grad()
        for prompt, answer, advantage in zip(prompts, answers, rewards - rewards.mean(), strict=True):
            ids = torch.tensor([prompt + answer.tokens], device=target.device)
            scores = policy(ids[:, :-1]).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
            chosen = scores.gather(1, ids[0, len(prompt) :, None])
            (-advantage.item() * chosen.mean() / len(prompts)).backward()
        optimizer.step()
        engine.update_target(policy.state_dict())

        records = [
            Record(prompt + answer.tokens, answer.taps, [(len(prompt), len(prompt) + len(answer.tokens))])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        for _ in range(4):
            trainer.step(records)
        engine.update_drafter(trainer.drafter.state_dict())
    print(f"target version {engine.target_version}, drafter version {engine.drafter_version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
