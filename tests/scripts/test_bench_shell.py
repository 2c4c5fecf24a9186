"""Scripts that start several programs, with a Python that only notes what it is asked: what they ask is understood, and
the same command goes on behind what is there."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from scripts.bench import train_real
from scripts.peers import vllm_decode, vllm_step

NOTES = """#!/usr/bin/env bash
[[ $1 == -c ]] && { echo "$GPUS"; exit; }
[[ $1 == *$FAILS ]] && exit 3
note='import json, os, sys; print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:]]))'
flock "$NOTED" python3 -c "$note" "$@" >> "$NOTED"
while (($#)); do [[ $1 == --output ]] && output=$2; shift; done
if [[ $output == *.json || $output == *.pt ]]; then touch "$output"; else
    mkdir -p "$output"; touch "$output/answers.jsonl" "$output/result.json"; echo; echo "== dflash: 8 minutes"
fi
"""
PARSERS = {"train_real.py": train_real.parse, "vllm_decode.py": vllm_decode.parse, "vllm_step.py": vllm_step.parse}


class Shell:
    """Runs a script of scripts/bench in a folder."""

    def __init__(self, folder: Path) -> None:
        self.noted, self._python = folder / "noted.jsonl", folder / "python"
        self._python.write_text(NOTES)
        self._python.chmod(0o755)
        for name in ("target", "drafter", "prompts"):
            (folder / name).mkdir()
        (folder / "env.sh").write_text("export WITH_VLLM=1\n")
        self._folder = folder

    def __call__(self, script: str, *words: str, fails: str = "nothing", gpus: int = 1) -> tuple[int, list[list[str]]]:
        """Exit code, and what the programs were asked: the GPU, the program, its words."""
        self.noted.write_text("")
        extra = {
            "PYTHON": str(self._python),
            "VLLM_PYTHON": str(self._python),
            "NOTED": str(self.noted),
            "FAILS": fails,
            "GPUS": str(gpus),
        }
        command = [str(ROOT / "scripts/bench" / script), *words]
        ended = subprocess.run(command, cwd=self._folder, env=os.environ | extra, capture_output=True, timeout=60)
        return ended.returncode, [json.loads(line) for line in self.noted.read_text().splitlines()]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def understood(asked: list[list[str]]) -> list[str]:
    """The programs' names, once their words are parsed."""
    for _, program, *words in asked:
        if parse := PARSERS.get(Path(program).name):
            parse(words)
    return [Path(program).name for _, program, *_ in asked]


def test_both_kinds_learn_from_the_same_answers_on_two_gpus(shell: Shell) -> None:
    words = ("target", "prompts", "out", "8", "env.sh")
    code, asked = shell("two_kinds.sh", *words)
    assert code == 0 and sorted(understood(asked)) == [*["train_real.py"] * 2, *["vllm_decode.py"] * 2]
    by_gpu = {gpu: [each for each in asked if each[0] == gpu] for gpu in ("0", "1")}
    answers = by_gpu["1"][0][by_gpu["1"][0].index("--answers") + 1]
    assert answers.endswith("out/dflash/answers.jsonl") and "--prompts-train" in by_gpu["0"][0]
    assert all("drafter-dflash2" in " ".join(each) for each in by_gpu["1"][1:])
    assert understood(shell("two_kinds.sh", *words)[1]) == ["vllm_decode.py"] * 2, "what is trained stays"
    assert shell("two_kinds.sh", "target", "prompts", "other", fails="train_real.py") == (1, [])


def test_parts_that_are_there_are_not_measured_again(shell: Shell) -> None:
    words = ("target", "drafter", "prompts", "out", "env.sh")
    code, asked = shell("trees.sh", *words, fails="replay_drafts.py")
    assert code == 3 and understood(asked) == ["tree_load.py", "vllm_requests.py", "record_drafts.py"]
    code, asked = shell("trees.sh", *words)
    assert code == 0 and understood(asked) == ["replay_drafts.py", *["vllm_step.py"] * 3]
    assert shell("trees.sh", *words) == (0, []), "all is there"
    code, asked = shell("trees.sh", *words[:3], "two", "env.sh", gpus=2)
    assert code == 0 and {name: {each[0] for each in asked if name in each[1]} for name in ("vllm_step", "")} == {
        "vllm_step": {"1"}, "": {"0", "1"},
    } and len(asked) == 7  # fmt: skip
    assert shell("trees.sh", *words[:3], "failing", "env.sh", fails="vllm_step.py", gpus=2)[0] == 1
    without = shell("trees.sh", "target", "drafter", "prompts", "other")[1]
    assert understood(without) == ["tree_load.py", "record_drafts.py", "replay_drafts.py"]
