"""`make demo-live` on a tiny pair: the demo ends when tokens per step have risen."""

from pathlib import Path

import pytest
from bigram_targets import bigram_target
from conftest import LONG_RUN, make_drafter

from dflash_toolkit import save_drafter
from scripts.demo import live


@pytest.mark.skipif(not LONG_RUN, reason="make test-long runs it")
def test_the_live_demo_ends_when_acceptance_rises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = bigram_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    save_drafter(make_drafter(target), tmp_path / "drafter")
    words = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--max-tokens", "16"]
    assert live.main([*words, "--share", "1", "--rate", "1e-2", "--seconds", "300"]) == 0
    printed = capfd.readouterr().out
    assert "acceptance rose: 1." in printed and "drafter version 1, learnt from " in printed
