"""The replay of recorded blocks: a trace whose probabilities are true, for which rows are worth choosing."""

import json
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

from dflash_toolkit.runtime.budget import row_buckets

BLOCKS = (1, 4, 16)


def recorded(
    dice: torch.Generator, sure: float, answer: int = 60, slots: int = 15, best: int = 4, belief: float = 1.0
) -> dict[str, object]:
    """An answer whose tokens are among the drafter's as often as it says, which it says with `belief` times the
    log-odds."""
    tokens = torch.randint(100, (5 + answer,), generator=dice)
    first = (sure + 0.15 * torch.randn(answer - 1, slots, generator=dice)).clamp(0.05, 0.95)
    p = torch.stack([first, *((1 - first) * 0.6 * 0.4**rank for rank in range(best - 1))], dim=-1)
    drawn = torch.multinomial(torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).flatten(0, 1), 1, generator=dice)
    ids = 100 + torch.arange(best).expand(answer - 1, slots, best).clone()  # tokens that no answer has
    for i, rank in enumerate(drawn.flatten().tolist()):
        anchor, slot = divmod(i, slots)
        if rank < best and (at := 5 + 1 + anchor + slot) < len(tokens):
            ids[anchor, slot, rank] = tokens[at]
    return {
        "set": "made",
        "prompt": 5,
        "tokens": tokens.int(),
        "ids": ids.int(),
        "lp": (belief * p.logit()).sigmoid().log().half(),
    }


@pytest.mark.parametrize("belief", [0.5, 2.5])
@pytest.mark.parametrize("row_s", [2e-5, 3e-4], ids=["rows are cheap", "rows are dear"])
@pytest.mark.parametrize("sure", [0.15, 0.5, 0.85])
def test_rows_are_chosen_no_worse_than_lengths_whatever_the_drafter_believes(
    belief: float, row_s: float, sure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine does: lengths of blocks follow what was accepted, where no trees are taken."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import budget as script

    dice = torch.Generator().manual_seed(1)
    answers = [script.Answer(recorded(dice, sure, answer=200, belief=belief)) for _ in range(4)]
    times = {(4, s): 5e-3 + 4 * s * row_s for s in BLOCKS}
    times |= {(4, m, s): 5.05e-3 + m * row_s for m in row_buckets(4) for s in BLOCKS[1:]}
    found = script.compared(answers, 4, BLOCKS, times, steps=200, seeds=2)
    assert found["rows"] > found["lengths"] - 0.02, found
    assert found["rows"] > 4 / times[4, 1] / found["tokens_per_second"] - 1.02, "nor than plain decoding"


def test_chosen_rows_beat_one_block_length_on_a_trace_with_true_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = torch.Generator().manual_seed(0)
    torch.save([recorded(dice, sure) for sure in (0.8, 0.3, 0.6) * 2], tmp_path / "trace.pt")
    seconds = [[b, s, 5e-3 + 2e-5 * b * s] for b in (1, 4) for s in BLOCKS]
    seconds += [[b, m, 16, 5e-3 + 2e-5 * m + 1e-5 * b * 16] for b in (1, 4) for m in (16, 32, 48, 64)]
    seconds += [[4, m, 16, 5e-3 + 2e-5 * m + 1e-5 * 4 * 16] for m in (96, 128, 160, 192, 256)]
    seconds += [[b, 16, 4, 5e-3 + 2e-5 * 16 + 1e-5 * b * 4] for b in (1, 4)]
    (tmp_path / "times.json").write_text(json.dumps({"key": "made", "seconds": seconds}))
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    import budget as script

    output = tmp_path / "budget.json"
    arguments = ["--times", str(tmp_path / "times.json"), "--requests", "1", "4", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["budget.py", str(tmp_path / "trace.pt"), *arguments, "--steps", "200"])
    script.main()
    for batch in json.loads(output.read_text())["batches"]:
        assert batch["tokens_per_second"] > batch["requests"] / 5.2e-3, "drafts pay"
        assert batch["rows"] > 0.1 and batch["rows"] > batch["lengths"]
