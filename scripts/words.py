"""Counts words that make our prose hard to read, per folder, and fails above an allowance (`make words`).

The count covers all text of a file: documents, help, messages, comments and names (split at underscores and capitals).
With files as arguments, prints every place in them.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".html", ".js", ".css", ".sh", ""}
SKIPPED = re.compile(r"vendor/|LICENSE|CODE_OF_CONDUCT|scripts/words\.py|tests/scripts/test_words\.py")
DOCUMENTS = re.compile(r"docs/.*\.md|README\.md|CONTRIBUTING\.md|CHANGELOG\.md")

DIALECT = re.compile(
    "alike|behind|besides?|everybody|lies?|mend(s|ed)?|neighbours?|nobody|somebody|spoil[st]|stands?|stood"
    "|tell(s|ing)?|told|who|whoever|whom|whose",
    re.IGNORECASE,
)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
LITERAL = re.compile(r"\.tell\(|\\[nt]|stands? (?:in )?for|(?i:stand[-_]?in)")  # file.tell(), escapes, ordinary phrases
PHRASE = re.compile(
    r"\b(?:in vain|anew|so many|takes? in|go(?:es)? on|wherever|whichever)\b"
    r"|(?:\"\"\"|(?<!#)# |(?<=\. ))(?:Of|Such|Those|What|Whatever|Where|Which)(?= )|(?:\"\"\"|# )That(?= )",
    re.IGNORECASE,
)

# Occurrences per 1,000 lines. Folders that are not listed have DEFAULT; MINIMUM occurrences are always allowed.
DEFAULT = 3
MINIMUM = 3
ALLOWED: dict[str, int] = {}
DOCUMENT_WORDS = 22_000


class Count(NamedTuple):
    lines: int
    found: int

    @property
    def rate(self) -> float:
        return 1000 * self.found / max(self.lines, 1)


def occurrences(text: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and the word or phrase of each occurrence."""
    for number, line in enumerate(LITERAL.sub(lambda match: " " * len(match[0]), text).split("\n"), 1):
        yield from ((number, word) for word in WORD.findall(line) if DIALECT.fullmatch(word))
        yield from ((number, phrase[0]) for phrase in PHRASE.finditer(line))


def folder_of(path: str) -> str:
    """Returns the folder that a file is counted in: two levels of the library and of its tests, one of all others."""
    parts = Path(path).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] in {("dflash_toolkit",), ("tests",)} else 1]) or "."


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = (path for path in listing.stdout.splitlines() if (ROOT / path).is_file() and not (ROOT / path).is_symlink())
    return [path for path in files if Path(path).suffix in SUFFIXES and not SKIPPED.search(path)]


def count(paths: list[str], root: Path = ROOT) -> dict[str, Count]:
    """Returns lines and occurrences by folder."""
    counts: dict[str, Count] = {}
    for path in paths:
        text = (root / path).read_text(encoding="utf-8")
        lines, found = counts.get(folder_of(path), Count(0, 0))
        counts[folder_of(path)] = Count(lines + text.count("\n"), found + sum(1 for _ in occurrences(text)))
    return counts


def failures(counts: dict[str, Count], document_words: int) -> list[str]:
    """Returns a line for each folder above its allowance, and one if the documents are too long."""
    failed = []
    for folder, found in counts.items():
        allowed = ALLOWED.get(folder, DEFAULT)
        if found.found > MINIMUM and found.rate > allowed:
            failed.append(f"{folder}: {found.rate:.1f} per 1,000 lines, {allowed} are allowed")
    if document_words > DOCUMENT_WORDS:
        failed.append(f"documents: {document_words:,} words, {DOCUMENT_WORDS:,} are allowed")
    return failed


def words_in(text: str) -> int:
    """Returns the number of words that have a letter or a digit: no bars of tables, no arrows."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders in which to print places")
    paths = parser.parse_args().paths
    files = tracked_files()
    if paths:
        for path in (path for path in files if any((ROOT / path).is_relative_to(chosen.resolve()) for chosen in paths)):
            lines = (ROOT / path).read_text(encoding="utf-8").split("\n")
            for number, word in occurrences("\n".join(lines)):
                print(f"{path}:{number}: {word}: {lines[number - 1].strip()[:100]}")
        return
    counts = count(files)
    documents = [ROOT / path for path in files if DOCUMENTS.fullmatch(path)]
    document_words = sum(words_in(path.read_text(encoding="utf-8")) for path in documents)
    print(f"{'folder':32}{'lines':>8}{'found':>8}{'per 1,000':>12}{'allowed':>10}")
    for folder, found in sorted(counts.items()):
        print(f"{folder:32}{found.lines:8}{found.found:8}{found.rate:12.1f}{ALLOWED.get(folder, DEFAULT):10}")
    print(f"{'documents, in words':32}{document_words:28}{DOCUMENT_WORDS:22}")
    if failed := failures(counts, document_words):
        sys.exit("\n".join(["", *failed, "run scripts/words.py FOLDER to see the places"]))


if __name__ == "__main__":
    main()
