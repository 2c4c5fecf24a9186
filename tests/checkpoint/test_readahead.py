"""Reading ahead: what is read and what not, and that it begins before torch and transformers are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dependencies import OPTIONAL
from paths import ROOT

import dflash_toolkit
import dflash_toolkit.evaluation
import dflash_toolkit.runtime
from dflash_toolkit.checkpoint import readahead, reader
from dflash_toolkit.checkpoint.readahead import cached, read_ahead

LAZY = (dflash_toolkit, dflash_toolkit.runtime, dflash_toolkit.evaluation)
PART = 4096


def fresh(program: str, *arguments: str) -> str:
    """Returns the output of a new process."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small files have several parts, and the memory is the tests' own, whatever the machine's."""
    monkeypatch.setattr(readahead.os, "cpu_count", lambda: readahead.CORES)
    monkeypatch.setattr(readahead, "PART", PART)
    monkeypatch.setattr(readahead, "READ", PART // 4)
    monkeypatch.setattr(readahead, "cached", lambda *_: False)  # the tests have just written them
    (tmp_path / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:   1048576 kB\nBuffers: 1 kB\n")
    monkeypatch.setattr(readahead, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(readahead, "CONTAINER", (tmp_path / "memory.max",))


def checkpoint(folder: Path, **sizes: int) -> str:
    """A directory of files of so many bytes; they need not hold tensors."""
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / f"{name}.safetensors").write_bytes(bytes(size))
    return str(folder)


def bytes_read(*checkpoints: str | None) -> int:
    reading = read_ahead(*checkpoints)
    reading.join()
    return reading.bytes


# ---- what is read -------------------------------------------------------------------------------------


def test_every_byte_of_every_file_is_read_once(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target", a=2 * PART + 5, b=PART, c=0, d=7, e=PART + PART // 2)
    drafter = checkpoint(tmp_path / "drafter", model=3)
    assert bytes_read(drafter, target) == 4 * PART + PART // 2 + 15
    assert bytes_read(None, target) == 4 * PART + PART // 2 + 12


def test_files_that_the_loader_skips_are_not_read(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "whole", model=10, adapter=500)
    assert bytes_read(whole) == 10
    sharded = checkpoint(tmp_path / "sharded", one=20, two=30, consolidated=500)
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors", "z": "one.safetensors"}}
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bytes_read(sharded) == 50


def test_readahead_reads_hub_ids_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--target"
    checkpoint(repository / "snapshots" / "5eed", model=40)
    checkpoint(repository / "snapshots" / "01d", model=500)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("5eed")
    assert bytes_read("some/target") == 40
    assert bytes_read("some/other") == 0


def test_missing_or_broken_files_are_left_to_the_loader(tmp_path: Path) -> None:
    broken = checkpoint(tmp_path / "broken", one=20)
    (tmp_path / "broken" / "model.safetensors.index.json").write_text("{")
    incomplete = checkpoint(tmp_path / "incomplete", one=20)
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (tmp_path / "incomplete" / "model.safetensors.index.json").write_text(json.dumps(index))
    good = checkpoint(tmp_path / "good", model=7)
    wrong = [str(tmp_path / "nowhere"), "./nowhere", "", "a\0b", "x" * 5000, broken, incomplete]
    assert bytes_read(*wrong, good) == 7


def test_deleted_file_ends_readahead(tmp_path: Path) -> None:
    reading = readahead.ReadAhead([(tmp_path / "gone", 9 * PART)])
    reading.join()
    assert reading.bytes == 0


def test_cached_parts_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = checkpoint(tmp_path / "target", a=3 * PART, b=10)
    asked: list[int] = []

    def known(_: int, start: int, size: int) -> bool:
        asked.append(start)
        return start == PART

    monkeypatch.setattr(readahead, "cached", known)
    assert bytes_read(target) == 2 * PART + 10 and sorted(asked) == [0, 0, PART, 2 * PART]


def test_cached_parts_of_a_file_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as file:
        descriptor = file.fileno()
        assert cached(descriptor, 0, 1 << 20) and cached(descriptor, 2 << 20, 8 << 20)
        assert not cached(descriptor, 4 << 20, 1 << 20), "there is nothing after the end"
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = [cached(descriptor, start, 1 << 20) for _ in range(3) for start in (0, 1 << 20, 3 << 20)]
        if all(found):
            pytest.skip("a file system in memory")
        assert not any(found), "to ask does not fetch"
        os.pread(descriptor, 1 << 20, 2 << 20)
        assert cached(descriptor, 2 << 20, 1 << 20) and not cached(descriptor, 0, 4 << 20)


def test_without_mincore_nothing_counts_as_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))

    def without_mincore(_: None) -> object:
        return object()

    monkeypatch.setattr(readahead.ctypes, "CDLL", without_mincore)
    with path.open("rb") as file:
        assert not cached(file.fileno(), 0, 1 << 20)


# ---- what fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meminfo", "limit", "fits"),
    [
        ("MemAvailable: 200 kB\n", None, True),
        ("MemAvailable: 199 kB\n", None, False),
        ("MemFree: 900 kB\n", None, False),
        (None, None, False),
        ("MemAvailable: 900 kB\n", "max\n", True),
        ("MemAvailable: 900 kB\n", f"{200 << 10}\n", True),
        ("MemAvailable: 900 kB\n", f"{199 << 10}\n", False),
    ],
)
def test_files_larger_than_half_of_the_memory_are_not_read(
    tmp_path: Path, meminfo: str | None, limit: str | None, fits: bool
) -> None:
    target = checkpoint(tmp_path / "target", a=60 << 10, b=40 << 10)
    (tmp_path / "meminfo").unlink()
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert bytes_read(target) == (100 << 10 if fits else 0)


def test_a_few_cores_are_left_to_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = checkpoint(tmp_path / "target", a=10)
    assert bytes_read(target) == 10
    monkeypatch.setattr(readahead.os, "cpu_count", lambda: readahead.CORES - 1)
    assert bytes_read(target) == 0


# ---- when it begins -----------------------------------------------------------------------------------


def test_packages_and_command_lines_are_imported_without_torch() -> None:
    program = """
import sys
import dflash_toolkit, dflash_toolkit.evaluation, dflash_toolkit.evaluation.cli, dflash_toolkit.runtime
import dflash_toolkit.serve.cli
from dflash_toolkit import SamplingParams, UserError
from dflash_toolkit.runtime import EngineOptions, SyntheticAcceptance, load_engine
from dflash_toolkit.options import PromptSetOptions
SamplingParams(), EngineOptions(), dflash_toolkit.serve.config.ServeConfig(target="x")
dflash_toolkit.evaluation.cli.EvalConfig(target="x", drafter="y", sets=PromptSetOptions(prompts=("a=b",)))
print(sys.modules.keys() & {"torch", "transformers"} or "neither")
"""
    assert fresh(program) == "neither"


IN_ANY_ORDER = """
import os, sys, torch.nn.attention.flex_attention, transformers.models.qwen3.modeling_qwen3  # once for all
for names in sys.argv[1:]:
    if not (child := os.fork()):
        exec(names)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


# torch and transformers went first: what they load by themselves (triton, where it is) is not ours to answer for
LOADED = """
before = set(sys.modules)
from dflash_toolkit import *
print(*{name for name in sys.modules.keys() - before}, flush=True)
"""


def test_public_names_import_without_optional_packages() -> None:
    names = [f"from {package.__name__} import {name}" for package in LAZY for name in package.__all__]
    # modules that were not imported by name were attributes of their package before it was lazy, and still are
    modules = "import dflash_toolkit as d; print(d.config.option.__name__, d.runtime.engine.__name__, flush=True)"
    found = fresh(IN_ANY_ORDER, LOADED, *("\n".join([*names[::order], modules]) for order in (1, -1))).splitlines()
    assert found[1:] == ["option dflash_toolkit.runtime.engine"] * 2
    loaded = set(found[0].split())
    assert "dflash_toolkit.decode" in loaded and {name.split(".")[0] for name in loaded} & OPTIONAL == set()
    heavier = tuple(f"dflash_toolkit.{unit}" for unit in ("doctor", "evaluation", "runtime", "train", "serve"))
    assert [name for name in loaded if name.startswith(heavier)] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    for package in LAZY:
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
            _ = package.nothing  # type: ignore[attr-defined]


BEGINNING = """
import json, sys
from dflash_toolkit import UserError
from dflash_toolkit.evaluation import cli as evaluation
from dflash_toolkit.runtime import load, load_engine
from dflash_toolkit.serve import cli as serving

def begin(*checkpoints):
    print(json.dumps([checkpoints, sorted(sys.modules.keys() & {"torch", "transformers"})]))
    raise UserError("seen")

load.read_ahead = evaluation.read_ahead = serving.read_ahead = begin
pair = ["--target", "a/target", "--drafter", "a/drafter"]
assert evaluation.main([*pair, "--prompts", "a=b"]) == 2
assert serving.main(pair) == 2
try:
    load_engine("a/target", "a/drafter")
except UserError:  # there is no such target: what comes first has been seen by then
    pass
"""


def test_files_are_read_ahead_before_torch_is_imported() -> None:
    seen = [json.loads(line) for line in fresh(BEGINNING).splitlines()]
    assert seen == [[["a/drafter", "a/target"], []]] * 3


def test_process_exit_does_not_wait_for_reads(tmp_path: Path) -> None:
    """A pipe without a writer stands for a disk that does not answer."""
    program = """
import os, sys
from pathlib import Path
from dflash_toolkit.checkpoint.readahead import ReadAhead
os.mkfifo(sys.argv[1])
ReadAhead([(Path(sys.argv[1]), 1)])
print("over")
"""
    assert fresh(program, str(tmp_path / "pipe")) == "over"


def test_an_engine_that_is_imported_is_not_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader reads at once then, and reading everything twice would only cost."""
    from dflash_toolkit import UserError
    from dflash_toolkit.runtime import Engine, load_engine
    from dflash_toolkit.runtime import load as loading

    assert Engine.__module__ in sys.modules
    monkeypatch.setattr(loading, "read_ahead", lambda *names: pytest.fail("read ahead"))
    with pytest.raises(UserError, match="no such directory"):
        load_engine("/no/such")
