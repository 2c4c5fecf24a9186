"""What the documents show is so: tables are those of scripts/results, commands parse, Python imports what exists."""

import importlib.util
import random
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

from dflash_toolkit.config import given_values, parse_cli
from dflash_toolkit.doctor.cli import DoctorConfig
from dflash_toolkit.evaluation import check, compare
from dflash_toolkit.evaluation.cli import EvalConfig
from dflash_toolkit.serve.cli import ServeConfig
from dflash_toolkit.serve.external import split
from dflash_toolkit.serve.pasted import in_our_words
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.data_cli import DataConfig

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCES = [found for page in PAGES for found in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S)]
EVALUATION = {"check": check, "compare": compare}
PROGRAMS: dict[str, Callable[[list[str]], object]] = {
    "dflash-train": lambda words: configure(*given_values(TrainConfig, words, "dflash-train", "")),
    "dflash-data": lambda words: parse_cli(DataConfig, words, "dflash-data", ""),
    "dflash-eval": lambda words: (
        EVALUATION[words[0]].parse(words[1:])
        if words[0] in EVALUATION
        else parse_cli(EvalConfig, words, "dflash-eval", "")
    ),
    "dflash-serve": lambda words: parse_cli(ServeConfig, in_our_words(split(words)[0]), "dflash-serve", ""),
    "dflash-doctor": lambda words: parse_cli(DoctorConfig, words, "dflash-doctor", ""),
}


def shell_lines() -> list[str]:
    text = "\n".join(body for kind, body in FENCES if kind == "bash").replace("\\\n", " ")
    return sorted({line.split(" #")[0].strip() for line in text.splitlines() if line.strip()} - {""})


LINES = shell_lines()


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "scripts" / "docs" / "tables.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("requests", "k", "accept"), [(1, 3, 0.8), (5, 7, 0.865), (40, 2, 0.3), (3, 0, 0.5)])
def test_the_longest_of_some_requests_takes_as_many_steps_as_dice_say(
    tables: ModuleType, requests: int, k: int, accept: float
) -> None:
    dice = random.Random(0)

    def steps() -> int:
        written = count = 0
        while written < 30:
            written, count = written + 1 + next((i for i in range(k) if dice.random() >= accept), k), count + 1
        return count

    thrown = [max(steps() for _ in range(requests)) for _ in range(2000)]
    error = statistics.stdev(thrown) / len(thrown) ** 0.5
    assert tables.steps_of_longest(requests, 30, k, accept) == pytest.approx(
        statistics.mean(thrown), abs=4 * error + 1e-9
    )


def test_tables_are_those_of_the_results(tables: ModuleType) -> None:
    assert [page for page in tables.pages() if tables.rewritten(page) != page.read_text()] == [], "run `make tables`"
    shown = {name for page in tables.pages() for _, name, _ in tables.MARKED.findall(page.read_text())}
    assert shown == set(tables.TABLES), "every table stands on a page"


@pytest.mark.parametrize("line", LINES)
def test_a_command_can_be_run_and_has_no_old_name(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(line)
    name = Path(program).name
    if name in PROGRAMS:
        PROGRAMS[name](words)
    elif name in ("torchrun", "deepspeed"):
        launcher, trainer, words_of_it = line.partition(" dflash_toolkit.train.cli ")
        assert trainer and launcher.endswith((" -m", " --module"))
        PROGRAMS["dflash-train"](shlex.split(words_of_it))
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert words[0] in targets
    elif name.startswith("python"):
        files = [ROOT / word for word in words if word.endswith(".py")]
        assert files and all(file.is_file() for file in files)
        if words[0] != "-m":
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            text = files[0].read_text()
            if "add_loads(" in text:  # which adds some of its options
                text += (ROOT / "dflash_toolkit/benchmark.py").read_text()
            assert [flag for flag in flags if f'"{flag}"' not in text] == []
    assert "notice:" not in capsys.readouterr().err


def test_every_program_is_shown() -> None:
    assert {Path(line.split()[0]).name for line in LINES} >= set(PROGRAMS) | {"make"}


@pytest.mark.parametrize("body", [body for kind, body in FENCES if kind == "python"])
def test_python_compiles_and_imports_what_exists(body: str) -> None:
    compile(body, "documents", "exec")
    exec("\n".join(x for x in body.splitlines() if x.startswith(("from ", "import "))), {})


@pytest.mark.parametrize("diff", [body for kind, body in FENCES if kind == "diff"])
def test_a_worked_diff_changes_lines_that_are_there(diff: str) -> None:
    source = ""
    for line in diff.splitlines():
        if line.startswith(("--- ", "+++ ")):
            path = ROOT / line[4:]
            source = " ".join(path.read_text().split()) if path.is_file() else ""
        elif source and not line.startswith("+"):
            assert [part for part in line[1:].split("...") if " ".join(part.split()) not in source] == []
