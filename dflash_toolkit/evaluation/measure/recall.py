"""Ranks the target's tokens among the drafter's most probable ones, on Hugging Face modules."""

from collections.abc import Iterable
from typing import Any

import torch

from ...acceptance import ratio
from ...doctor.probe import Answer, Probe
from ...doctor.probe import Setting as Rules
from ...generation import Generation
from ...models.dflash.network import Drafter
from ...models.target import Target

BEST = (1, 4, 16)  # as in training's metrics


def draft_recall(target: Target, drafter: Drafter, answers: Iterable[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Counts by slot how often the answer's token is among the drafter's 1, 4 and 16 best; every token is an anchor.

    Args:
        answers: prompts and answers, as token ids.
    """
    probe, rules, slots = Probe(target, drafter, 1), Rules.of(drafter), drafter.config.block_size - 1
    found = torch.zeros(len(BEST), slots, dtype=torch.int64)
    judged, anchors, count = torch.zeros(slots, dtype=torch.int64), 0, 0
    for prompt, tokens in answers:
        answer = _read(target, rules.layer_ids, prompt, tokens)
        for at, _, best in probe.drafts(probe.drafter, answer, rules, stride=1, near=max(BEST)):
            place = at[:, None] + torch.arange(1, slots + 1, device=at.device)
            there = place < len(answer.tokens)
            label = answer.tokens[place.clamp(max=len(answer.tokens) - 1)]
            same = (best == label[:, :, None]) & there[:, :, None]  # [A, S - 1, 16], best first
            found += torch.stack([same[:, :, :k].any(-1).sum(0) for k in BEST]).cpu()
            judged += there.sum(0).cpu()
            anchors += len(at)
        count += 1
    shares = [[ratio(n, m) for n, m in zip(row, judged.tolist(), strict=True)] for row in found.tolist()]
    return {"requests": count, "anchors": anchors, "recall_at_k": dict(zip(map(str, BEST), shares, strict=True))}


@torch.inference_mode()
def _read(target: Target, layer_ids: tuple[int, ...], prompt: list[int], answer: list[int]) -> Answer:
    tokens = torch.tensor([prompt + answer], device=target.device)
    features = target.forward(tokens, taps=layer_ids).features
    assert features is not None
    hidden = dict(zip(layer_ids, features[0].chunk(len(layer_ids), dim=-1), strict=True))
    return Answer(tokens[0], len(prompt), Generation(), hidden)
