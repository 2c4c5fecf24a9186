"""The commands as a user starts them: help, version, what an import costs, and how they are interrupted."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from dflash_toolkit import __version__
from dflash_toolkit.__main__ import COMMANDS
from dflash_toolkit.command_line import default_note, kind_of, list_options, parse_cli
from dflash_toolkit.doctor import cli as doctor
from dflash_toolkit.evaluation import check, compare
from dflash_toolkit.evaluation import cli as evaluate
from dflash_toolkit.serve import cli as serve
from dflash_toolkit.serve.config import ServeConfig
from dflash_toolkit.train import cli as train
from dflash_toolkit.train import data_cli as data
from dflash_toolkit.train import export_cli
from dflash_toolkit.train.config import TrainConfig

OPTIONS: dict[str, tuple[Any, type]] = {
    "dflash-train": (train, TrainConfig),
    "dflash-train export": (export_cli, export_cli.ExportConfig),
    "dflash-data": (data, data.DataConfig),
    "dflash-eval": (evaluate, evaluate.EvalConfig),
    "dflash-eval check": (check, check.CheckConfig),
    "dflash-eval compare": (compare, compare.CompareConfig),
    "dflash-serve": (serve, ServeConfig),
    "dflash-doctor": (doctor, doctor.DoctorConfig),
}
CLIS = sorted(
    ".".join(("dflash_toolkit", *path.relative_to(ROOT).with_suffix("").parts)).replace(
        "toolkit.dflash_toolkit", "toolkit"
    )
    for folder in ("dflash_toolkit", "train", "serve")
    for path in (ROOT / folder).rglob("*.py")
    if path.stem in ("cli", "data_cli")
)


def python(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, **more)


def test_every_cli_module_is_a_command() -> None:
    assert sorted({module for module, _ in COMMANDS.values()}) == CLIS


@pytest.mark.parametrize("module", CLIS)
def test_help_and_version_import_neither_torch_nor_transformers(module: str) -> None:
    of_module = {"evaluation": [["check"], ["compare"]], "train": [["export"]]}
    subcommands = of_module.get(module.split(".")[1], []) if module.endswith(".cli") else []
    program = (
        "import runpy, sys\n"
        "for words in {words}:\n"
        "    sys.argv = ['x', *words]\n"
        "    try: runpy.run_module('{module}', run_name='__main__', alter_sys=False)\n"
        "    except SystemExit as end: assert end.code == 0, end.code\n"
        "    else: raise AssertionError('it did nothing')\n"
        "print(sorted(sys.modules.keys() & {{'torch', 'transformers'}}))\n"
    )
    words = [[*before, flag] for before in [[], *subcommands] for flag in ("--help", "--version")]
    done = python("-c", program.format(words=words, module=module))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr
    assert __version__ in done.stdout


def test_the_package_lists_and_starts_the_commands() -> None:
    done = python("-m", "dflash_toolkit")
    assert done.returncode == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == [f"dflash-{name}" for name in COMMANDS]
    assert python("-m", "dflash_toolkit", "serve", "--version").stdout == f"dflash-serve {__version__}\n"
    assert python("-m", "dflash_toolkit", "sevre").returncode == 2


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_ctrl_c_while_modules_are_imported_is_one_line(name: str, tmp_path: Path) -> None:
    # the interrupt comes from a module that every command imports: at that moment, whatever the machine's speed
    # (a shell may have started the tests with the signal ignored)
    handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    interrupt = f"import os, signal, time\n{handler}\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "yaml.py").write_text(interrupt)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", "dflash_toolkit", name, "--help", env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# ---- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_every_help_text_begins_with_a_word_and_gives_the_default(command: str) -> None:
    for key, option in list_options(OPTIONS[command][1]):
        text = option.field.metadata["help"] + default_note(option.field)
        assert re.match(r"(?!(of|and|what|where|which|whose|how many|for|in|so|the|a) )[a-zA-Z]", text), (key, text)
        assert len(re.findall(r"\((?:default: |required)", text)) == 1, (key, text)
        assert re.fullmatch(r"[A-Z]+|\{[\w,-]+\}", kind_of(option)) and kind_of(option) != "VALUE", key


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_common_options_are_few_and_the_example_is_accepted(command: str) -> None:
    module, options = OPTIONS[command]
    common = [key for key, option in list_options(options) if option.field.metadata["common"]]
    assert 1 <= len(common) <= 18
    words = shlex.split(module.EXAMPLE)[len(command.split()) :]
    if hasattr(module, "parse"):
        module.parse(words)
    else:
        parse_cli(options, words, command, "")


def test_thinking_is_switched_the_same_way_in_every_command() -> None:
    least = {
        "dflash-train": [],
        "dflash-data": ["--data", "x", "--output", "x.jsonl"],
        "dflash-eval": ["--drafter", "x", "--prompts", "a=b"],
        "dflash-doctor": ["--drafter", "x"],
    }
    for command, words in least.items():
        for typed, value in (("--thinking", True), ("--no-thinking", False), ("--thinking off", False)):
            config: Any = parse_cli(OPTIONS[command][1], ["--target", "x", *words, *typed.split()], command, "")
            holder = getattr(config, "responses", None) or getattr(config, "sampler", None)
            found = (holder or getattr(config, "sampling", None) or config).thinking
            assert found in (value, (value,)), (command, typed)
