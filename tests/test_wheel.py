"""The wheel has every file that the programs need, and the five commands run from it."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow  # the wheel is built
FOLDERS = ("dflash_toolkit", "train", "serve")
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what an earlier build left in build/ would get into it."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(output)], cwd=source, check=True, capture_output=True)
    return next(output.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    inside = {f"dflash_toolkit/{name}" if name.split("/")[0] in FOLDERS[1:] else name for name in expected}
    assert names == inside


def test_the_five_commands_run_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In an environment of their own, which has what they depend on, and not this checkout."""
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    # a path in a .pth file brings a folder's packages, but not its own .pth files, of which one is this checkout's
    site = next(home.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    assert {path.name for path in (home / "bin").glob("dflash-*")} == set(COMMANDS)
    program = f"""
import contextlib, importlib.metadata, sys
import dflash_toolkit
assert dflash_toolkit.__file__.startswith({str(home)!r}), dflash_toolkit.__file__
for command in importlib.metadata.distribution("dflash-toolkit").entry_points:
    sys.argv = [command.name, "--version"]
    with contextlib.suppress(SystemExit):
        command.load()()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # maybe this checkout
    command = [python, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(COMMANDS)
