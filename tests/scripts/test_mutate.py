"""`make mutate` plants the faults that it says, and knows those that tests catch from those that survive."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from paths import ROOT

from scripts.faults import faults, sample

MODULE = '''"""A module."""


def clamp(value: int, top: int = 10) -> int:
    """Between 0 and top."""
    while value > top and not value < 0:
        value = top
    return value
'''
CATCHES = """from small.core import clamp


def test_clamp_limits_values_to_both_bounds() -> None:
    assert [clamp(v) for v in (-5, 3, 99)] == [-5, 3, 10]
"""
PROGRAM = """
import json, sys
import hypothesis.strategies  # or each worker would trace its import
from dataclasses import asdict
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from scripts import mutate
root, journal = Path(sys.argv[3]), Path(sys.argv[4])
found = mutate.run(root, {"part/core.py": ["test_core.py"]}, journal, 0, 0, int(sys.argv[5]), least_s=0.5)
print(json.dumps([asdict(result) for result in found]))
print(mutate.report(found, ["part/core.py"]))
"""


def test_faults_change_one_thing_but_no_text_or_annotation() -> None:
    found = [(fault.line, fault.before, fault.after) for fault in faults(MODULE)]
    assert found == [
        (4, "10", "11"), (4, "10", "9"),
        (6, "value > top and (not value < 0)", "value > top or not value < 0"),
        (6, "value > top", "value >= top"), (6, "value > top", "value <= top"), (6, "not value < 0", "value < 0"),
        (6, "value < 0", "value <= 0"), (6, "value < 0", "value >= 0"), (6, "0", "1"), (6, "0", "-1"),
        (8, "return value", "return None"),
    ]  # fmt: skip
    plain = ast.unparse(ast.parse(MODULE)).splitlines()
    for fault in faults(MODULE):
        changed = fault.source.splitlines()
        assert len(changed) == len(plain) and sum(a != b for a, b in zip(plain, changed, strict=True)) == 1


def test_sample_is_stable_and_part_of_a_larger_sample() -> None:
    source = "\n".join(MODULE.replace("clamp", name) for name in "abcde")
    few, more = sample("a", source, 10, 3), sample("a", source, 30, 3)
    assert len(few) == 10 and few == sample("a", source, 10, 3) != sample("a", source, 10, 4)
    assert set(few) < set(more) < set(sample("a", source, 0, 3)) == set(faults(source))


def test_mutation_run_finds_survivors_and_resumes(tmp_path: Path) -> None:
    root, journal = tmp_path / "project", tmp_path / "out/journal.jsonl"
    for path, text in {"part/__init__.py": "", "part/core.py": MODULE, "tests/test_core.py": CATCHES}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "small").symlink_to("part")  # as dflash_toolkit/train
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(ROOT / "dflash_toolkit"), str(root), str(journal)]

    def results(processes: int) -> tuple[dict[tuple[str, str], str], str]:
        done = subprocess.run([*command, str(processes)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        listed, _, table = done.stdout.partition("\n")
        return {(r["before"], r["after"]): r["outcome"] for r in json.loads(listed)}, table

    found, table = results(2)
    assert found.pop(("value > top", "value >= top")) == "loops"
    assert {change for change, outcome in found.items() if outcome == "survived"} == {
        ("value < 0", "value <= 0"),
        ("0", "1"),
        ("0", "-1"),
    }
    assert "| part/core.py | 11 | 8 | 73% |" in table and "part/core.py:6\n  - 0\n  + -1" in table
    assert (root / "part/core.py").read_text() == MODULE

    lines = sorted(journal.read_text().splitlines(keepends=True), key=lambda line: '"loops"' not in line)
    journal.write_text("".join(lines[:8]) + lines[8][:20])
    assert results(1)[0].keys() == {*found, ("value > top", "value >= top")}
    kept = [json.loads(line) for line in journal.read_text().splitlines()]
    assert journal.read_text().startswith("".join(lines[:8])) and len(kept) == 11, "eight are not tried again"
