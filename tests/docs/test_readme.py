"""What the README shows exists: commands, flags, keys, files, imports."""

import re
import shlex

import pytest
from paths import ROOT

from dflash_toolkit.config import parse_cli
from dflash_toolkit.doctor.cli import DoctorConfig
from dflash_toolkit.evaluation.cli import EvalConfig
from serve.cli import ServeConfig
from train.config import TrainConfig
from train.data_cli import DataConfig

README = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/training.md", "docs/engine.md"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.S)
PROGRAMS = {
    "dflash-train": TrainConfig, "dflash-data": DataConfig, "dflash-eval": EvalConfig, "dflash-serve": ServeConfig,
    "dflash-doctor": DoctorConfig,
}  # fmt: skip


def shell_lines() -> list[str]:
    text = "\n".join(body for kind, body in BLOCKS if kind == "bash").replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("line", [x for x in shell_lines() if x.split()[0] in PROGRAMS])
def test_a_command_of_the_readme_parses(line: str) -> None:
    program, *arguments = shlex.split(line)
    parse_cli(PROGRAMS[program], arguments, program, "")


@pytest.mark.parametrize("line", [x for x in shell_lines() if x.split()[0] in ("torchrun", "deepspeed")])
def test_a_launch_of_the_readme_parses(line: str) -> None:
    launcher, arguments = line.split(" dflash_toolkit.train.cli ")
    assert launcher.endswith((" -m", " --module"))
    parse_cli(TrainConfig, shlex.split(arguments), "dflash-train", "")


def test_the_readme_shows_every_program() -> None:
    assert {line.split()[0] for line in shell_lines()} >= set(PROGRAMS) | {"make"}


@pytest.mark.parametrize("line", [x for x in shell_lines() if x.startswith("make ")])
def test_a_make_target_of_the_readme_exists(line: str) -> None:
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)


def test_python_of_the_readme_compiles_and_its_imports_exist() -> None:
    blocks = [body for kind, body in BLOCKS if kind == "python"]
    assert blocks
    for body in blocks:
        compile(body, "README.md", "exec")
        exec("\n".join(x for x in body.splitlines() if x.startswith(("from ", "import "))), {})


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[\w-]+/)+[\w.-]+\.\w+)`", README))))
def test_a_file_the_readme_names_exists(path: str) -> None:
    made_by_the_demo = path.startswith(("demo/", "out/"))
    assert made_by_the_demo or (ROOT / path).exists()
