"""The tables of docs/ that come from the package are current."""

import importlib.util
from types import ModuleType

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generated", ROOT / "scripts" / "docs" / "generated.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_generated_tables_are_current(generated: ModuleType) -> None:
    found = []
    for name in generated.PAGES:
        page = ROOT / name
        found += generated.MARKED.findall(page.read_text(encoding="utf-8"))
        assert generated.rewritten(page) == page.read_text(encoding="utf-8"), f"run `make tables`: {name}"
    assert {name for _, name, _ in found} == set(generated.TABLES)


def test_published_drafters_list_only_servers_that_read_them(generated: ModuleType) -> None:
    served = {each.drafter: generated.servers(each) for each in generated.PUBLISHED}
    assert served["z-lab/Qwen3-8B-DFlash-b16"] == ["our engine", "vLLM", "SGLang", "z-lab's client"]
    assert served["z-lab/gpt-oss-20b-DFlash"] == ["our engine", "vLLM", "SGLang"]
    assert served["z-lab/gemma-4-31B-it-DFlash"] == ["our engine", "vLLM"]  # SGLang scales a plain drafter's blocks
    assert served["z-lab/gemma-4-26B-A4B-it-DFlash"] == ["our engine", "vLLM"]
    assert served["RedHatAI/Qwen3-8B-speculator.dflash2"] == ["vLLM"]  # a form of its own
    assert served["z-lab/Kimi-K2.5-DFlash"] == []
