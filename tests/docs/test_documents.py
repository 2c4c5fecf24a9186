"""The documents are right: tables are those of scripts/results, commands parse, Python imports what exists."""

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from option_parsers import PROGRAMS
from paths import ROOT

import dflash_toolkit
from dflash_toolkit.version import __version__

PACKAGES = ("dflash_toolkit", "train", "serve")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCES = [found for page in PAGES for found in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.S)]
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]


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


def test_tables_and_charts_match_the_results(tables: ModuleType) -> None:
    written = [(path, text) for path, text in tables.files() if not path.is_file() or path.read_text() != text]
    assert [path for path, _ in written] == [], "run `make tables`"


def test_every_result_is_published(tables: ModuleType) -> None:
    pages = "".join(page.read_text() for page in tables.pages())
    kept = {path.stem for path in tables.RESULTS.glob("*.json")} - {"tests-gpu"}  # which docs/correctness.md names
    assert kept == {name for _, name, _ in tables.MARKED.findall(pages)} - {"models", "measured"}
    charts = {name for name in kept if "chart" in tables.load(name)}
    assert charts == {name for name in kept if f"assets/{name}.svg" in pages}


def test_published_commands_name_programs_that_exist(tables: ModuleType) -> None:
    commands = [
        command
        for path in tables.RESULTS.glob("*.json")
        for run in tables.load(path.stem).get("runs", [])
        for command in run.get("commands", [])
    ]
    programs = {word for command in commands for word in shlex.split(command) if word.startswith("scripts/")}
    assert programs and [name for name in programs if not (ROOT / name).is_file()] == []


def test_a_reference_must_match_one_row(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="matches 0 rows"):
        tables.resolved("=requests-8b; requests=7: trees")


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
                text += (ROOT / "scripts/measure.py").read_text()
            assert [flag for flag in flags if f'"{flag}"' not in text] == []
    assert "notice:" not in capsys.readouterr().err


def test_every_program_is_shown() -> None:
    assert {Path(line.split()[0]).name for line in LINES} >= set(PROGRAMS) | {"make"}


@pytest.mark.parametrize("body", [body for kind, body in FENCES if kind == "python"])
def test_python_examples_compile_and_import_existing_names(body: str) -> None:
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


def test_every_link_of_readme_works_on_a_package_page() -> None:
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)", text, flags=re.M)
    assert links and [link for link in links if not link.startswith("https://")] == []
    files = [re.sub(f"^{re.escape(ADDRESS)}/(blob|raw)/main/", "", link) for link in links if link.startswith(ADDRESS)]
    assert len(files) > 20 and [file for file in files if not (ROOT / file).exists()] == []
    named = set(re.findall(r"\]\[(\w+)\]", text))
    assert named == set(re.findall(r"^\[(\w+)\]: ", text, flags=re.M))


def test_repository_address_is_the_same_everywhere() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    assert site["repo_url"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == ADDRESS
    owner = ADDRESS.removeprefix("https://").rpartition("/")[0]
    for page in [*PAGES, ROOT / "SECURITY.md", ROOT / "CODE_OF_CONDUCT.md", *(ROOT / ".github").rglob("*.yml")]:
        assert set(re.findall(rf"{owner}/[\w-]+", page.read_text())) <= {ADDRESS.removeprefix("https://")}, page


def test_versions_of_code_and_citation_are_equal() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


@pytest.mark.parametrize("body", [body for kind, body in FENCES if kind == "python" and "tokenizer" in body])
def test_python_examples_use_the_chat_template(body: str) -> None:
    assert not re.search(r"tokenizer\(", body)
    assert ("generate(" in body) == ("add_generation_prompt=True" in body)


@pytest.mark.parametrize("name", sorted({*dflash_toolkit.__all__, "runtime.load_engine"}))
def test_the_reference_has_every_public_name(name: str) -> None:
    assert f"::: dflash_toolkit.{name}\n" in (ROOT / "docs/api.md").read_text()


def test_the_map_names_every_package() -> None:
    text = (ROOT / "docs/structure.md").read_text()
    folders = {path.parent.relative_to(ROOT) for top in PACKAGES for path in (ROOT / top).rglob("__init__.py")}
    assert [folder for folder in folders if f"`{folder}/`" not in text] == []
