"""The counter of hard words sees names, strings, comments and documents, and fails above the allowance of a folder."""

from pathlib import Path

import pytest

from scripts import words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("after_it = 1  # follows the sum\n", []),
        ("def tree_tell(): ...\nclass TreesTold: ...\nIN_WHOSE = 1\n", ["tell", "Told", "WHOSE"]),
        ('raise UserError(f"{name} stands beside {other}")\n', ["stands", "beside"]),
        ('"""What a request asks for."""\n', ['"""What']),
        ("Drafting in vain. Of these, one\n", ["in vain", "Of"]),
        ("n = 1  # that of so many rows. Where it goes on anew\n", ["# that", "so many", "Where", "goes on", "anew"]),
        ("## What limits it?\n\n## Where bits differ\n", []),
        ("Returns the rows that it takes. That depends on where they are. A value goes into it\n", []),
        ("position = file.tell()\n_pad stands for 'none'; intelligent beliefs\n", []),
        ('print("done\\nwho")\n', ["who"]),
    ],
)
def test_words_are_found_in_names_and_strings(text: str, found: list[str]) -> None:
    assert [word.strip() for _, word in words.occurrences(text)] == found


def test_words_count_per_folder(tmp_path: Path) -> None:
    for path, text in {
        "docs/a.md": "a\n",
        "docs/extend/b.md": "behind\n\n",
        "dflash_toolkit/data/c.py": "told = 1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    counts = words.count(["docs/a.md", "docs/extend/b.md", "dflash_toolkit/data/c.py"], tmp_path)
    assert counts == {"docs": (3, 1), "dflash_toolkit/data": (1, 1)}


def test_bars_and_arrows_are_not_words() -> None:
    assert words.words_in("| a | 1.5x | -> |\n|---|---|\n") == 2


def test_words_above_the_allowance_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ALLOWED", {"serve": 20})
    counts = {"docs": words.Count(1000, 6), "serve": words.Count(1000, 20), "train": words.Count(10, words.MINIMUM)}
    assert [line.split(":")[0] for line in words.failures(counts, words.DOCUMENT_WORDS)] == ["docs"]
    assert [line.split(":")[0] for line in words.failures({}, words.DOCUMENT_WORDS + 1)] == ["documents"]


def test_vendored_and_licence_files_are_skipped() -> None:
    files = words.tracked_files()
    assert {"README.md", "Makefile", "serve/page/page.js", "train/loop.py"} <= set(files)
    assert not [path for path in files if "vendor" in path or "LICENSE" in path]
