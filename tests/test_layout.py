"""The structure of the code base: imports between modules, packaged files, and the cost of an import."""

import ast
import functools
import importlib
import re
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from dependencies import OPTIONAL
from paths import ROOT

import dflash_toolkit
from dflash_toolkit.models.dflash.architecture import BUILT_IN
from dflash_toolkit.serve.endpoints import ADMIN, KEYED, OPEN

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGED = ("train", "serve")  # dflash_toolkit/train and dflash_toolkit/serve are links to them
PROGRAMS = (*PACKAGED, "scripts")
SOURCES = sorted(
    path.relative_to(ROOT) for folder in ("dflash_toolkit", *PROGRAMS) for path in (ROOT / folder).rglob("*.py")
)

# A unit is a module of the library or a whole folder; the longest name counts. It imports from the levels below its own
# only, so that a drafter never imports the target, nor the target a drafter.
LEVELS = [
    {"version"},
    {"benchmark", "config", "kernels", "lazy", "models.rope", "network", "progress", "roofline", "threads"},
    {"command_line"},
    {
        "evaluation.report.schema",
        "generation",
        "models.layer_spec",
        "models.quantized",
        "openai_http",
        "sampling",
        "string_pattern",
    },
    {"models.families"},
    {
        "checkpoint",
        "models.cache",
        "models.drafting",
        "models.packed",
        "models.restrictions",
        "models.sharded",
        "models.spec",
        "models.structure",
        "models.temperature",
    },
    {"calibration", "draft_tree", "fingerprint", "json_schema", "stop_tokens", "templates"},
    {"models.device", "models.target_files"},
    {"data", "files", "models", "models.dflash", "models.target", "tracking"},
    {"grammar", *(f"models.{folder}" for folder in BUILT_IN)},  # the backbone finds them by name
    {"confidence", "decode", "grammar_process", "record"},
    {"options", "preflight"},
    {"acceptance", "runtime"},
    {"doctor"},
    {"public names"},  # dflash_toolkit/__init__.py
    {"evaluation"},
    {"train", "serve"},
    {"__main__", "scripts"},  # benchmarks and the demo drive the programs
]
ADAPTER = "serve/adapt.py"  # the only module of serve that imports train
LEVEL = {unit: level for level, units in enumerate(LEVELS) for unit in units}


def package_of(path: PurePosixPath) -> list[str]:
    """The package that relative imports of a file start from; train/ and serve/ are installed inside ours."""
    parts = list(path.parts[:-1])
    return parts if parts[0] in ("dflash_toolkit", "scripts") else ["dflash_toolkit", *parts]


@functools.cache
def imports_of(path: PurePosixPath, source: str) -> set[str]:
    """Absolute dotted names of everything that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = package_of(path)
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = [*base, *(node.module.split(".") if node.module else [])]
            names |= {".".join([*start, alias.name]) for alias in node.names}
    return names


def unit_of(dotted: str) -> str | None:
    """The unit of ours that a dotted name belongs to, or None."""
    first, *rest = dotted.split(".")
    if first in PROGRAMS:
        return first
    if first != "dflash_toolkit":
        return None
    known = [".".join(rest[:end]) for end in range(len(rest), 0, -1)]
    return next((name for name in known if name in LEVEL), "public names")


def unit_of_file(path: PurePosixPath) -> str:
    if path.parts[0] in PROGRAMS:
        return path.parts[0]
    if path.name == "__init__.py" and len(path.parts) == 2:
        return "public names"
    parts = path.with_suffix("").parts
    longest_first = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
    return next((name for name in longest_first if name in LEVEL), parts[1])


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Imports that break an arrow, one sentence each."""
    own = unit_of_file(path)
    if own not in LEVEL:
        return [f"{path}: give {own!r} a level in {Path(__file__).name}"]
    found = []
    for name in sorted(imports_of(path, source)):
        unit = unit_of(name)
        if unit is None or (str(path) == ADAPTER and unit == "train"):
            continue
        if unit == own != "scripts" and name.split(".")[0] in PROGRAMS:  # scripts are files, not a package
            found.append(f"{path} imports {name}: import siblings relatively")
        elif unit == "evaluation" and own == "serve":
            found.append(f"{path} imports {name}: serving does not evaluate")
        elif unit != own and LEVEL[unit] >= LEVEL[own]:
            found.append(f"{path} imports {name}: {own} is not above {unit}")
    return found


def test_imports_follow_the_documented_layers() -> None:
    assert [said for path in SOURCES for said in violations(PurePosixPath(path), (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dflash_toolkit/models/dflash/network.py", "from ..target import Target"),
        ("dflash_toolkit/models/dflash/network.py", "from ..dflash2.selector import CandidateSelector"),
        ("dflash_toolkit/models/target.py", "from dflash_toolkit.models.dflash.network import Drafter"),
        ("dflash_toolkit/models/dflash/network.py", "def f():\n    from ... import decode"),
        ("dflash_toolkit/kernels/triton/attention.py", "from ...models.dflash.network import Drafter"),
        ("dflash_toolkit/decode.py", "import dflash_toolkit.evaluation"),
        ("dflash_toolkit/decode.py", "from dflash_toolkit import Target"),
        ("dflash_toolkit/decode.py", "import train.loop"),
        ("dflash_toolkit/models/dflash/checkpoint.py", "from dflash_toolkit.train import loop"),
        ("dflash_toolkit/models/dflash/checkpoint.py", "from ...serve import app"),
        ("dflash_toolkit/evaluation/measure/run.py", "from ...train import loop"),
        ("dflash_toolkit/runtime/engine.py", "from ..evaluation import measure"),
        ("train/loop.py", "from dflash_toolkit.serve import app"),
        ("train/loop.py", "from ..serve import app"),
        ("train/loop.py", "from train.objective.blocks import Blocks"),
        ("serve/app.py", "import train"),
        ("serve/app.py", "from dflash_toolkit.evaluation.measure.measurement import measure"),
        ("train/loop.py", "import scripts.bench"),
        ("dflash_toolkit/utils.py", ""),
    ],
)
def test_import_from_a_higher_layer_is_found(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) != []


# ---- dependencies ----------------------------------------------------------------------------------


def third_party(path: Path) -> set[str]:
    names = imports_of(PurePosixPath(path), (ROOT / path).read_text())
    tops = {name.split(".")[0] for name in names if unit_of(name) is None}
    return tops - set(sys.stdlib_module_names)


def declared(requirements: list[str]) -> set[str]:
    """Import names of requirements like `prometheus-client>=0.22`."""
    names = {requirement.split(">")[0].split("=")[0].split("[")[0].strip() for requirement in requirements}
    return {{"pyyaml": "yaml"}.get(name.lower(), name.replace("-", "_")) for name in names}


CORE = declared(PROJECT["project"]["dependencies"])
EXTRAS = declared([r for group in PROJECT["project"]["optional-dependencies"].values() for r in group])


def test_every_third_party_import_is_a_declared_dependency() -> None:
    # scripts of the peers run in those projects' environments, not in ours
    peers = {"zlab.py": {"dflash"}, "parse.py": {"sglang"}}
    clients = {"agents", "instructor", "langchain_core", "langchain_openai", "litellm", "llama_index", "openai"}
    peers |= {"client_calls.py": clients, "anthropic_calls.py": {"anthropic"}}
    undeclared = {str(path): third_party(path) - CORE - EXTRAS - peers.get(path.name, set()) for path in SOURCES}
    assert {path: names for path, names in undeclared.items() if names} == {}


# how kernels are launched, what several are made of, and the choice among them
SUPPORT = {"clamped", "delta", "features", "formats", "launch", "loss_terms", "ops", "paged", "reference", "routing"}
SUPPORT |= {"tree"}
SUPPORT |= {"hopper.attention", "hopper.grid", "hopper.layer", "hopper.pipeline", "hopper.sort_rows", "hopper.tiles"}
SUPPORT |= {"triton.attention", "triton.argmax", "triton.convolution", "triton.delta", "triton.delta_row", "triton.fp8"}
SUPPORT |= {"triton.fp8_blocks", "triton.int4", "triton.linear", "triton.merge", "triton.mxfp4", "triton.pages"}
SUPPORT |= {"triton.pdl", "triton.tile"}
# no kernel imports them
DEFINITIONS = {"ops", "reference"}


def test_a_kernel_file_imports_no_other_and_the_reference_only_torch() -> None:
    kernels = [path for path in SOURCES if path.parts[:2] == ("dflash_toolkit", "kernels")]
    for path in kernels:
        names = imports_of(PurePosixPath(path), (ROOT / path).read_text())
        ours = {name for name in names if unit_of(name)}
        assert {unit_of(name) for name in ours} <= {"kernels"}, path
        if path.stem not in ("gpu", "ops"):  # they choose among all
            inner = {name.removeprefix("dflash_toolkit.kernels.") for name in ours}
            assert {name for name in inner if not any(f"{name}.".startswith(f"{s}.") for s in SUPPORT)} == set(), path
        if path.parts[2] in ("hopper", "triton"):
            assert not {name.split(".")[2] for name in ours if name.count(".") > 1} & DEFINITIONS, path
        if path.parts[2] == "reference":
            assert not any(name.split(".")[2:3] in (["gpu"], ["hopper"], ["triton"]) for name in ours), path
        if path.stem == "loss" or path.parts[2] in ("formats", "reference"):
            assert third_party(path) <= {"torch"}, path


def test_only_one_module_asks_what_a_gpu_can_do() -> None:
    asks = re.compile(r"get_device_capability|get_device_properties|compute_capability|is_hopper")
    folders = [("dflash_toolkit", folder) for folder in ("kernels", "runtime", "models")]
    asking = [str(path) for path in SOURCES if path.parts[:2] in folders and asks.search((ROOT / path).read_text())]
    assert asking == ["dflash_toolkit/kernels/features.py"]


def test_listed_changes_touch_at_most_six_files_that_exist() -> None:
    table = (ROOT / "docs/structure.md").read_text().partition("## Where a change goes")[2].split("```")[1]
    changes = [re.findall(r"(\+ )?(\S+/\S+\.py)", change) for change in table.split("\n\n")]
    assert len(changes) == 4 and all(len(files) <= 6 for files in changes)
    assert [
        path for files in changes for new, path in files if (ROOT / "dflash_toolkit" / path).exists() == bool(new)
    ] == []


def test_every_endpoint_module_is_served() -> None:
    served = {make.__module__.rpartition(".")[2] for make in (*KEYED, *OPEN, *ADMIN)}
    files = {path.stem: path.read_text() for path in (ROOT / "serve/endpoints").glob("*.py")}
    assert served == {name for name, source in files.items() if "def routes(" in source}


@pytest.mark.parametrize("name", sorted(OPTIONAL - {"triton"}))
def test_an_optional_dependency_is_imported_by_one_file_at_most(name: str) -> None:
    programs = [path for path in SOURCES if path.parts[:2] != ("scripts", "peers")]  # run where that project is
    users = {str(path) for path in programs if name in third_party(path)}
    if name == "fastapi":  # the framework of all routes, which have files of their own
        users = {user.partition("/")[0] for user in users}
    assert len(users) <= 1, users


@pytest.mark.parametrize("unit", ["", ".doctor", ".evaluation", ".runtime"])
def test_lazy_names_are_listed_and_are_no_modules(unit: str) -> None:
    package = importlib.import_module(f"dflash_toolkit{unit}")
    assert all(hasattr(package, public) for public in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    assert set(package.__all__) & {module.stem for module in Path(package.__file__ or "").parent.iterdir()} == set()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_every_public_name_is_listed_once_and_in_order() -> None:
    assert dflash_toolkit.__all__ == sorted(set(dflash_toolkit.__all__))


def test_no_program_file_shadows_another_module() -> None:
    taken = CORE | EXTRAS | OPTIONAL | sys.stdlib_module_names
    assert [path for path in SOURCES if path.parts[0] in PROGRAMS and path.stem in taken] == []


def test_the_wheel_carries_every_data_file_of_the_packages() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for folder in ("dflash_toolkit", *PACKAGED):
        for path in (ROOT / folder).rglob("*"):
            place = path.relative_to(ROOT)
            if path.is_dir() or path.suffix == ".py" or "__pycache__" in place.parts:
                continue
            package = ".".join(package_of(PurePosixPath(place)))
            named = patterns.get(package, []) + patterns.get(package.rpartition(".")[0], [])  # or of the folder above
            assert any(place.match(pattern) for pattern in named), f"{place}: name it in package-data of {package}"


@pytest.mark.parametrize("name", PACKAGED)
def test_a_program_is_importable_inside_the_package_only(name: str) -> None:
    module = importlib.import_module(f"dflash_toolkit.{name}")
    assert Path(module.__path__[0]).resolve() == ROOT / name
    with pytest.raises(ImportError, match=f"import dflash_toolkit.{name} instead"):
        importlib.import_module(name)
    assert name not in sys.modules


@functools.cache
def imports_of_tests() -> dict[Path, set[str]]:
    paths = (ROOT / "tests").rglob("*.py")
    return {path: imports_of(PurePosixPath("tests/x.py"), path.read_text()) for path in paths}


def test_no_test_imports_a_program_by_its_short_name() -> None:
    for path, names in imports_of_tests().items():
        assert not {name.split(".")[0] for name in names} & set(PACKAGED), path


def test_no_test_module_imports_another() -> None:
    """What several tests share is in tests/helpers, so that each of them can be moved or removed alone."""
    modules = {path.stem for path in imports_of_tests() if path.stem.startswith("test_")}
    for path, names in imports_of_tests().items():
        assert not {part for name in names for part in name.split(".")} & modules, path


def test_every_test_module_has_a_name_of_its_own() -> None:
    names = [path.name for path in imports_of_tests()]
    assert sorted(names) == sorted(set(names))
