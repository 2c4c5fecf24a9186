"""scripts/bench/tokens.py with a real pair: digests of what its engine decodes."""

import json
from pathlib import Path

import pytest

from scripts.bench import tokens as program


def test_digests_of_a_pair_are_equal_in_every_mode(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"ask {i} of it"}) + "\n" for i in range(5)))
    output = tmp_path / "digests.json"
    words = ["--target", target_dir, "--drafter", drafter_dir, "--data", f"own={data}", "--tokens", 6, "--limit", 2]
    words += ["--max-model-len", 64, "--device", "cpu", "--output", output]
    for expected in ((), ("--expect", output)):
        monkeypatch.setattr("sys.argv", ["tokens.py", *map(str, [*words, *expected])])
        assert program.main() == 0
    found = json.loads(output.read_text())
    assert found["compared"] == 6 and found["different"] == []
    assert len(set(found["digests"].values())) == 1, "drafts change no token"
