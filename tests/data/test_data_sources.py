"""dflash-data reads every usual format of row and file."""

import bz2
import gzip
import json
import lzma
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from damage import damage
from programs import says, user, write
from tool_messages import CALL, RESULT

from dflash_toolkit import UserError
from dflash_toolkit.command_line import parse_cli
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import read_prompt_sets, read_prompts
from dflash_toolkit.data.sources import Batches, Malformed, Source
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_cli import DataConfig

# ---- files -----------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "first"}, {"id": "b", "prompt": "second"}]


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def make(path: Path) -> Path:
    """`ROWS` in the form that the name asks for."""
    if path.suffix == ".parquet":
        datasets = pytest.importorskip("datasets")
        with path.open("wb") as file:
            datasets.Dataset.from_list([{"id": None, **row} for row in ROWS]).to_parquet(file)
        return path
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    texts = {".jsonl": lines, ".ndjson": lines, ".txt": "first\n\nsecond\n", ".json": json.dumps(ROWS),
             ".csv": "id,prompt\n,first\nb,\"second\"\n", ".tsv": "id\tprompt\n\tfirst\nb\tsecond\n"}  # fmt: skip
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.write_bytes(pack(texts[next(s for s in path.suffixes if s in texts)].encode()))
    return path


def asked(name: object, *args: object) -> list[str]:
    """Returns the prompts of the conversations of a source."""
    return [found.asked for found in Source(str(name)).read(*args) if isinstance(found, Conversation)]


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2", "a.jsonl.zst", "a.json", "a.json.gz", "a.txt", "a.parquet",
     "a.csv", "a.csv.gz", "a.tsv", "a.tsv.zst"],
)  # fmt: skip
def test_every_file_format_gives_prompts_in_order(name: str, tmp_path: Path) -> None:
    path = make(tmp_path / name)
    assert asked(path) == ["first", "second"] and len(Source(str(path)).digest("train")) == 64
    (found,) = read_prompt_sets([f"chat={path}"]).values()
    assert [prompt.messages for prompt in found] == [(user("first"),), (user("second"),)]
    (found,) = read_prompt_sets([f"chat={path}[1:]"], limit=1).values()
    assert [prompt.messages for prompt in found] == [(user("second"),)]
    assert asked(f"{path}[1:9]") == ["second"]
    with pytest.raises(UserError, match="no such rows; the range begins with row 2"):
        asked(f"{path}[2:]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps({"version": 1, "data": ROWS}), ["first", "second"]),
        (json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]), ["first", "second"]),
        (json.dumps({"messages": [user("only")]}), ["only"]),
    ],
    ids=["an object around the array", "JSON lines", "a single conversation"],
)
def test_json_that_is_no_bare_array(text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert asked(tmp_path / "a.json") == expected


def test_a_malformed_row_is_named_by_its_line_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n\n{nope\n{"reply": 1}\n{"prompt": "b"}\n')
    first, broken, odd, last = Source(str(tmp_path / "a.jsonl")).read()
    assert isinstance(first, Conversation) and isinstance(last, Conversation)
    assert (
        isinstance(broken, Malformed)
        and broken.where.endswith("/a.jsonl, line 3")
        and "not valid JSON" in broken.reason
    )
    assert isinstance(odd, Malformed) and odd.where.endswith("/a.jsonl, line 4")
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, 3]')
    _, odd = Source(str(tmp_path / "a.json")).read()
    assert isinstance(odd, Malformed) and odd.where.endswith("/a.json, row 2")


def test_a_table_is_read_by_the_columns_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffQuestion;Answer\n"two\nlines; ""x""";b\n\nc;d;e\n;f\n', encoding="utf-8")
    first, wide, empty = Source(str(path)).read()
    assert isinstance(first, Conversation) and first.asked == 'two\nlines; "x"' and first.recorded[1]["content"] == "b"
    assert isinstance(wide, Malformed) and wide.reason == "more cells than the header has columns"
    assert isinstance(empty, Malformed) and empty.where == f"{path}, row 4"


def test_a_folder_and_a_pattern_are_read_in_order_of_names(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for name in ("b/2.jsonl.gz", "a.csv", "b/1.txt", ".hidden/c.jsonl", "notes.md"):
        (logs / name).parent.mkdir(parents=True, exist_ok=True)
        if name == "notes.md":
            (logs / name).write_text("no rows")
        else:
            make(logs / name)
    found = list(Source(str(logs)).read())
    assert [each.id for each in found if isinstance(each, Conversation)] == [
        "a.csv/1", "b", "b/1.txt/1", "b/1.txt/3", "b/2.jsonl.gz/1", "b",
    ]  # fmt: skip
    assert asked(f"{logs}/b/*.jsonl*") == asked(f"{logs}/**/2*") == ["first", "second"]
    assert asked(f"x={logs}/*/[12]*[1:3]") == ["second", "first"], "a range counts the rows of all files"
    assert Source(str(logs)).digest() != Source(f"{logs}/b/*").digest()
    with pytest.raises(UserError, match=r"logs/\*\.parquet: no such file"):
        asked(f"{logs}/*.parquet")


def test_folder_with_split_names_is_read_as_a_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for name in ("train.jsonl", "test.jsonl"):
        write(tmp_path / name, says(name))
    assert asked(tmp_path, "train") == ["train.jsonl"] and asked(tmp_path, "test") == ["test.jsonl"]


def test_a_batch_output_is_joined_to_its_input_by_custom_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = "/v1/chat/completions"
    questions = [{"custom_id": x, "url": chat, "body": {"model": "m", "messages": [user(x)]}} for x in "abc"]
    body = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
    answers = [{"id": "1", "custom_id": x, "response": {"status_code": 200, "body": body}, "error": None} for x in "ca"]
    failed = {"id": "2", "custom_id": "b", "response": None, "error": {"code": "expired"}}
    inputs = write(tmp_path / "in.jsonl", questions)
    outputs = write(tmp_path / "out.jsonl", [*answers, failed])
    found = list(Source(f"{tmp_path}/*.jsonl").read())
    assert [each.asked for each in found if isinstance(each, Conversation)] == ["a", "b", "c"] == [*"abc"][: len(found)]
    replies = [each.recorded[1:] for each in found if isinstance(each, Conversation)]
    assert [bool(reply) for reply in replies] == [True, False, True] and replies[0][0]["content"] == "yes"
    assert "body.model, method" not in (said := capsys.readouterr().err) and "body.model, url (all rows)" in said
    together = Batches.of([str(outputs), str(inputs)])
    assert list(Source(str(outputs)).read(batches=together)) == []
    assert len(list(Source(str(inputs)).read(batches=together))) == 3
    (*_, alone) = Source(str(outputs)).read()
    assert isinstance(alone, Malformed) and "give the batch's input file too" in alone.reason


ODD_NAMES = ["a[1]*?.jsonl", "a[1]*?.parquet", "b c#1%20.jsonl", "a[1].jsonl.gz", "a\\b.jsonl.xz", "c::d.jsonl"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_no_pattern(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "e::f[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    make(folder / f"a1xy{Path(name).suffix}".replace(".gz", ".jsonl").replace(".xz", ".jsonl"))  # what it would match
    rows = [{"prompt": "a\u2028b"}, {"messages": [user("c"), CALL, RESULT]}, {"prompt": "d", "tools": [{"name": "f"}]}]
    if name.endswith(".parquet"):
        make(folder / name)
    else:
        lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
        (folder / name).write_bytes(pack(b"\xef\xbb\xbf" + lines.encode()))
    expected = ["first", "second"] if name.endswith(".parquet") else ["a\u2028b", "c", "d"]
    assert asked(name) == expected


def test_a_file_is_read_without_network_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "no folder").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "no folder" / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    looked_up: list[object] = []

    def look_up(*args: object, **_: object) -> None:
        looked_up.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in ("a.jsonl", "a.txt", "a.parquet", "a.jsonl.gz"):
        assert asked(make(tmp_path / name)) == ["first", "second"]
    assert looked_up == []


def test_only_parquet_and_datasets_need_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = make(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json", "a.txt"):
        path = make(tmp_path / name)
        assert asked(path) == [prompt.messages[0]["content"] for prompt in read_prompts(path)] == ["first", "second"]
    with pytest.raises(UserError, match=r"a\.parquet needs datasets: .*\[train\]'$"):
        asked(parquet)
    with pytest.raises(UserError, match=r"some/set needs datasets: .*, or give a file$"):
        asked("some/set")


def test_name_and_range_are_parsed_unless_a_file_has_that_name(tmp_path: Path) -> None:
    for name in ("gsm8k=a.jsonl", "a.jsonl[0:1]", "a.jsonl"):
        path = write(tmp_path / name, [{"question": f"{name} {i}"} for i in range(3)])
    assert asked(tmp_path / "gsm8k=a.jsonl") == [f"gsm8k=a.jsonl {i}" for i in range(3)]
    assert asked(tmp_path / "a.jsonl[0:1]") == [f"a.jsonl[0:1] {i}" for i in range(3)]
    (text,) = asked(f"gsm8k={path}[1:2]")
    assert text.splitlines()[0] == "a.jsonl 1" and "step by step" in text
    plain = Source(str(path)).digest("train")
    others = [f"{path}[1:2]", f"gsm8k={path}", f"{path}[1:]"]
    assert len({plain, *(Source(name).digest("train") for name in others)}) == 4
    assert Source(f"shop={path}").digest("train") == plain
    with pytest.raises(UserError, match="no such rows"):
        Source(f"{path}[2:2]")


def test_a_named_source_of_the_command_line_is_no_override() -> None:
    argv = ["--target", "t", "--data", "gsm8k=a.jsonl", "b.jsonl[:3]", "prompts.form=none", "output=o.jsonl"]
    config = parse_cli(DataConfig, argv, "dflash-data", "")
    assert (config.data, config.prompts.form, config.output) == (("gsm8k=a.jsonl", "b.jsonl[:3]"), "none", "o.jsonl")
    assert parse_cli(TrainConfig, argv, "dflash-train", "").data == config.data
    with pytest.raises(UserError, match=r"prompts.form.*gsm8k, math500"):
        parse_cli(DataConfig, [*argv, "prompts.form=gsm"], "dflash-data", "")


def test_a_file_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    first = json.dumps({"prompt": "first"}) + "\n"
    (tmp_path / "a.jsonl").write_bytes(first.encode() + b"x" * 1_000_000 + b"\n\xff")
    source = Source(str(tmp_path / "a.jsonl")).read()
    assert isinstance(next(source), Conversation), "the rest is broken, and not read yet"


PACKED = {".gz": gzip.compress(b'{"prompt": "first"}' * 99), ".xz": lzma.compress(b'{"prompt": "first"}' * 99)}
BROKEN: dict[str, tuple[str, bytes | str | None, str]] = {
    "no UTF-8": ("a.jsonl", b'{"prompt": "gr\xfc\xdf"}\n', "cannot be read"),
    **{f"{end}, cut": (f"a.jsonl{end}", data[:-12], "cannot be read") for end, data in PACKED.items()},
    **{
        f"{end}, flipped": (f"a.jsonl{end}", data[:25] + b"\xff" * 9 + data[34:], "cannot be read")
        for end, data in PACKED.items()
    },
    "JSON lines that are not there": ("a.jsonl", None, "no such file"),
    "parquet that is not there": ("a.parquet", None, "no such file"),
    "half an array": ("a.json", "[1, 2", "not valid JSON"),
    "a number": ("a.json", "3", "expected an array of rows, got int"),
    "two arrays": ("a.json", '{"a": [], "b": []}', "got an object"),
    "empty": ("a.jsonl", "\n", "holds no prompts"),
    "no gzip": ("a.jsonl.gz", "no gzip", "cannot be read"),
    "no parquet": ("a.parquet", "no parquet", "a.parquet"),
}


@pytest.mark.parametrize(("name", "content", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_read_is_one_line(name: str, content: Any, reason: str, tmp_path: Path) -> None:
    if content is not None:
        damage(tmp_path / name, content)
    with pytest.raises(UserError, match=reason) as caught:
        asked(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_dataset_is_streamed_in_an_order_that_the_seed_fixes(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", says(*map(str, range(30))))

    def read(shuffle: int, seed: int = 0) -> list[str]:
        return asked(folder, "train", shuffle, seed)

    assert read(0) == [str(i) for i in range(30)]
    (found,) = read_prompt_sets([f"shop={folder}[3:9]"], limit=4).values()
    assert [prompt.messages[0]["content"] for prompt in found] == ["3", "4", "5", "6"]
    assert asked(f"{folder}[3:5]", "train", 100, 1) == ["3", "4"], "a range means the rows in their order"
    assert read(100, 1) == read(100, 1) != read(100, 2)
    assert sorted(read(100, 1)) == sorted(read(0)) != read(100, 1)
    source = Source(str(folder))
    assert source.digest("train") != source.digest("test")


def test_an_unavailable_dataset_is_one_line() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="dataset no-such/set:main cannot be loaded") as caught:
        asked("no-such/set:main")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, f"[{'9' * 5000}]"], ids=["deep", "long"])
def test_json_that_python_does_not_read_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        asked(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"cannot read config\.json"):
        read_config(tmp_path)
