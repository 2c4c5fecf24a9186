"""scripts/bench/shapes.py over stand-ins for the two programs: what is run again, what a limit ends, and the table."""

import json
from pathlib import Path

import pytest

from scripts.bench import shapes as program
from scripts.bench import step
from scripts.peers import vllm_step

BENCH = """
import json, pathlib, sys, time
words = sys.argv[1:]
def after(flag):
    at = words.index(flag) + 1
    return words[at : next((i for i in range(at, len(words)) if words[i].startswith("--")), len(words))]
output, rows = pathlib.Path(after("--output")[0]), []
with (output.parent / "calls").open("a") as calls:
    calls.write(" ".join([output.name, *after("--batch")]) + chr(10))
vllm = "--k" in words
for batch in map(int, after("--batch")):
    if batch == 8 and not vllm and not (output.parent / "again").exists():
        time.sleep(60)
    rows.append({"batch": batch, "ms_per_step": (6.0 if vllm else 4.0) * batch, "mbu": 0.5})
    output.write_text(json.dumps({"engines": {"k": {"rows": rows}}} if vllm else {"rows": rows}))
"""


def test_what_is_measured_stays_and_what_is_missing_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tmp_path / "bench.py"
    bench.write_text(BENCH)
    monkeypatch.setattr(program, "OURS", bench)
    monkeypatch.setattr(program, "PEER", bench)
    monkeypatch.setattr(program, "LEAST_S", 0.0)
    folder, env = tmp_path / "out", tmp_path / "env.sh"
    env.write_text("export PYTHONPATH=/somewhere\n")
    words = ["--output", str(folder), "--shape", "qwen3-8b", "--batch", "1", "8", "--vllm-env", str(env)]
    assert program.main([*words, "--limit-s", "0.7"]) == 0
    out = capsys.readouterr().out
    assert out.count("out of time") == 2 and out.count("done") == 2
    assert "| qwen3-8b | block 8 | 1 | 4.00 | 6.00 | 1.50 | 50% |" in out
    assert "| qwen3-8b | plain | 8 |  | 48.00 |  |  |" in out
    (folder / "again").touch()
    (folder / "calls").unlink()
    assert program.main(words) == 0
    out = capsys.readouterr().out
    assert (folder / "calls").read_text().splitlines() == [
        f"qwen3-8b_ours_{kind}.2.json 8" for kind in ("drafts", "plain")
    ]
    assert out.count("| 32.00 | 48.00 | 1.50 | 50% |") == 2
    for more in (["--table"], ["--total-s", "0"]):
        assert program.main([*words, *more]) == 0
    assert program.main([*words, "--vllm-env", "nowhere"]) == 2


def test_both_programs_take_what_they_are_told(tmp_path: Path) -> None:
    args = program.parse(["--output", str(tmp_path)])
    assert [task.name for task in program.tasks(args)[:3]] == [
        "qwen3.8-27b-fp8_ours_drafts", "qwen3.8-27b-fp8_ours_plain", "qwen3.8-27b-fp8_vllm_drafts",
    ]  # fmt: skip
    for task in program.tasks(args):
        words = program.command(args, task, [1, 8], tmp_path / "x.json")[2:]
        found = vllm_step.parse(words) if task.vllm else step.parse(words)[0]
        assert (found.shape, found.batch, found.accept) == (task.shape, [1, 8], 0.8)
        if task.vllm:
            assert found.k == [7 * task.drafts]
        else:
            assert found.block == [8 if task.drafts else 1]


def test_the_table_needs_no_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"rows": [{"batch": 1, "ms_per_step": 2.0, "mbu": 0.75}]}
    (tmp_path / "qwen3-8b_ours_plain.1.json").write_text(json.dumps(values))
    assert program.main(["--output", str(tmp_path), "--shape", "qwen3-8b", "--batch", "1", "--table"]) == 0
    assert "| qwen3-8b | plain | 1 | 2.00 |  |  | 75% |" in capsys.readouterr().out
