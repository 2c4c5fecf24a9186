"""The strict loader: a mistake is one line that names the key, and the later source wins."""

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit.command_line import parse_cli, run_command
from dflash_toolkit.config import Options, UserError, from_mapping, option, options, read_yaml, to_mapping
from dflash_toolkit.runtime import EngineOptions

COMMANDS = {
    "dflash-train": "dflash_toolkit.train.cli",
    "dflash-data": "dflash_toolkit.train.data_cli",
    "dflash-serve": "dflash_toolkit.serve.cli",
    "dflash-eval": "dflash_toolkit.evaluation.cli",
    "dflash-doctor": "dflash_toolkit.doctor.cli",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimiser(Options):
    lr: float = option(6e-4, "peak learning rate", within="> 0")
    warmup: int = option(0, "warm-up steps")
    nesterov: bool = option(False, "look ahead", flag="ahead")
    betas: tuple[float, ...] = option((0.9, 0.95), "Adam's two decays")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranges(Options):
    lr: float = option(6e-4, within="> 0")
    seed: int = option(0, within=f"in 0..{2**63 - 1}")
    decay: float | None = option(None, within="in (0, 1]")
    ema: float = option(0.0, within="in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared(Options):
    max_tokens: int = option(64, "longest answer")
    drafts: int = option(7, "drafted tokens a step", within=">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    target: str = option(help="the target, 100 % of it", common=True, metavar="PATH")
    data: tuple[str, ...] = option((), "prompt files")
    taps: tuple[int, ...] = option((), "layer ids")
    sets: tuple[str, ...] = option((), "files by name", named=True)
    steps: int = option(100, "optimiser steps")
    attention: str = option("flex", "which attention", choices=("flex", "sdpa"))
    resume: bool = option(False, "continue a run")
    limit: int | None = option(None, "prompts to read")
    note: str | None = option(None, "a word on the run")
    optimiser: Optimiser = options(Optimiser)
    shared: Shared = options(Shared, flat=True)


def build(**values: object) -> Settings:
    return from_mapping(Settings, {"target": "tiny", **values}, "run.yaml")


def parse(*argv: str) -> Settings:
    return parse_cli(Settings, argv, "prog", "A program.")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


# ---- mappings --------------------------------------------------------------------------------------


def test_defaults_fill_missing_parameters() -> None:
    assert build() == Settings(target="tiny")
    assert build(optimiser={"warmup": 5}).optimiser == Optimiser(warmup=5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepps": 3}, "run.yaml: stepps: unknown key; did you mean `steps`?"),
        ({"optimiser": {"warmpu": 3}}, "run.yaml: optimiser.warmpu: unknown key; did you mean `warmup`?"),
        ({"optimiser": {"zzz": 3}}, "run.yaml: optimiser.zzz: unknown key; known keys: betas, lr, nesterov, warmup"),
        ({"steps": "8"}, "run.yaml: steps: expected a whole number, got '8'"),
        ({"steps": 8.0}, "run.yaml: steps: expected a whole number, got 8.0"),
        ({"steps": True}, "run.yaml: steps: expected a whole number, got True"),
        ({"steps": None}, "run.yaml: steps: expected a whole number, got None"),
        ({"resume": 1}, "run.yaml: resume: expected on or off, got 1"),
        ({"resume": "yes"}, "run.yaml: resume: expected on or off, got 'yes'"),
        ({"target": 7}, "run.yaml: target: expected text, got 7"),
        ({"limit": "all"}, "run.yaml: limit: expected a whole number, got 'all'"),
        ({"attention": "fa2"}, "run.yaml: attention: 'fa2' is not one of flex, sdpa"),
        ({"data": "a.jsonl"}, "run.yaml: data: expected a list, got 'a.jsonl'"),
        ({"data": ["a.jsonl", 3]}, "run.yaml: data[1]: expected text, got 3"),
        ({"optimiser": 3}, "run.yaml: optimiser: expected a mapping of keys to values, got 3"),
        ({"optimiser": {"lr": "fast"}}, "run.yaml: optimiser.lr: expected a number, got 'fast'"),
        ({"optimiser": {"lr": True}}, "run.yaml: optimiser.lr: expected a number, got True"),
        ({"optimiser": {"betas": [0.9, "x"]}}, "run.yaml: optimiser.betas[1]: expected a number, got 'x'"),
        ({"optimiser": {"lr": -1.0}}, "run.yaml: optimiser.lr is -1.0; it must be > 0"),
        ({1: 2}, "run.yaml: 1: unknown key"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_that_names_the_key(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_mapping(Settings, {"target": "tiny"} | values, "run.yaml")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"lr": 1e-9}, {"lr": 0.0}), ({"lr": 1e300}, {"lr": math.inf}), ({"lr": 1.0}, {"lr": math.nan}),
        ({"seed": 0}, {"seed": -1}), ({"seed": 2**63 - 1}, {"seed": 2**63}),
        ({"decay": 1.0}, {"decay": 0.0}), ({"decay": None}, {"decay": 1.1}),
        ({"ema": 0.0}, {"ema": 1.0}), ({"ema": 0.99}, {"ema": -0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_ranges_hold_their_ends_as_written(inside: dict[str, Any], outside: dict[str, Any]) -> None:
    Ranges(**inside)
    with pytest.raises(ValueError, match=f"{next(iter(outside))} is .*; it must be "):
        Ranges(**outside)


def test_a_choice_is_checked_without_a_command_line() -> None:
    with pytest.raises(ValueError, match="draft_dtype is 'fp4'; it must be one of auto, fp8, full"):
        EngineOptions(draft_dtype="fp4")


def test_a_required_key_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"^run\.yaml: target is required; give --target$"):
        from_mapping(Settings, {"steps": 3}, "run.yaml")


def test_numbers_are_accepted_as_floats_however_yaml_reads_them(write: Callable[[str], str]) -> None:
    values = read_yaml(write("target: t\noptimiser: {lr: 6e-4, betas: [0, 1e-1]}\n"))
    assert values["optimiser"]["lr"] == "6e-4", "YAML 1.1 reads this as text"
    optimiser = from_mapping(Settings, values).optimiser
    assert optimiser == Optimiser(lr=6e-4, betas=(0.0, 0.1))
    assert all(type(beta) is float for beta in optimiser.betas)


def test_optional_options_take_null_and_lists_become_tuples() -> None:
    assert build(limit=None).limit is None
    assert build(limit=3).limit == 3
    assert build(data=["a", "b"], taps=[1, 2]) == Settings(target="tiny", data=("a", "b"), taps=(1, 2))


@given(
    st.builds(
        Settings,
        target=st.text(max_size=5),
        data=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        steps=st.integers(),
        resume=st.booleans(),
        limit=st.none() | st.integers(),
        optimiser=st.builds(Optimiser, lr=st.floats(1e-9, 1e3), warmup=st.integers()),
    )
)
@settings(deadline=None, derandomize=True)
def test_a_configuration_written_as_a_mapping_is_read_back_equal(config: Settings) -> None:
    assert from_mapping(Settings, to_mapping(config)) == config


def test_the_written_mapping_holds_plain_values() -> None:
    written = to_mapping(Settings(target="t", taps=(1, 2)))
    assert written["taps"] == [1, 2]
    assert written["optimiser"] == {"lr": 6e-4, "warmup": 0, "nesterov": False, "betas": [0.9, 0.95]}


# ---- files -----------------------------------------------------------------------------------------


def test_an_empty_file_is_an_empty_mapping(write: Callable[[str], str]) -> None:
    assert read_yaml(write("")) == {}
    assert read_yaml(write("# nothing but a comment\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("7", "expected"),
        ("[" * 5000, "not valid YAML"),
    ],
    ids=lambda value: value[:9],
)
def test_a_file_that_is_no_mapping_is_one_line(write: Callable[[str], str], text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"config file {path}: ") and "\n" not in str(caught.value)


def test_a_file_that_is_missing_a_directory_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for name, reason in (("nothing.yaml", "No such file"), (".", "directory"), ("binary", "not valid YAML")):
        with pytest.raises(UserError, match=reason):
            read_yaml(tmp_path / name)


# ---- command lines ---------------------------------------------------------------------------------


def test_the_later_source_wins_file_then_flags_then_overrides(write: Callable[[str], str]) -> None:
    file = write("target: from-file\nsteps: 1\nnote: from-file\noptimiser: {lr: 0.1, warmup: 1}\n")
    config = parse("note=typed", "--config", file, "--steps", "2", "--note", "flagged", "optimiser.lr=0.3")
    assert (config.target, config.steps, config.note) == ("from-file", 2, "typed")
    assert config.optimiser == Optimiser(lr=0.3, warmup=1), "an override changes its key and leaves the group"


@pytest.mark.parametrize(
    "typed",
    [
        "--target t --data a b steps=3 optimiser.lr=0.5",
        "--data a b --target t steps=3 optimiser.lr=0.5",
        "steps=3 optimiser.lr=0.5 --data a b --target t",
        "--target t --steps 3 data=[a,b] optimiser.lr=0.5",
        "steps=24 optimiser.lr=0.5 --target t --data a b steps=3",
        "--target t --data a b steps=3 steps=24 --limit null steps=3 optimiser.lr=0.5",
    ],
)
def test_list_flags_and_overrides_come_in_any_order(typed: str) -> None:
    expected = Settings(target="t", data=("a", "b"), steps=3, optimiser=Optimiser(lr=0.5))
    assert parse(*typed.split()) == expected


def test_a_path_with_an_equals_sign_stays_in_its_list() -> None:
    assert parse("--target", "t", "--data", "out/lr=3.jsonl", "b").data == ("out/lr=3.jsonl", "b")


def test_a_name_that_is_a_option_s_stays_a_name() -> None:
    found = parse("--target", "t", "--sets", "chat=a", "note=b", "resume=c", "optimiser.lr=0.5", "--steps", "3")
    assert found.sets == ("chat=a", "note=b", "resume=c")
    assert (found.note, found.resume, found.steps, found.optimiser.lr) == (None, False, 3, 0.5)


def test_flags_are_read_by_the_type_of_their_option() -> None:
    config = parse("--target", "7", "--steps", "3", "--resume", "--taps", "1", "2", "--limit", "9")
    assert config == Settings(target="7", steps=3, resume=True, taps=(1, 2), limit=9)
    assert parse("--target", "t", "--no-resume").resume is False
    assert parse("target=true", "taps=[1, 2]", "resume=true", "optimiser.lr=1e-3") == Settings(
        target="true", taps=(1, 2), resume=True, optimiser=Optimiser(lr=1e-3)
    )


def test_null_unsets_a_value_of_the_file(write: Callable[[str], str]) -> None:
    config = parse("--config", write("target: t\nlimit: 5\nnote: hello\n"), "limit=null", "note=null")
    assert (config.limit, config.note) == (None, None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("steps",), "'steps': expected key=value"),
        (("stepps=3",), "unknown key; did you mean `steps`?"),
        (("optimiser.lrr=3",), "optimiser.lrr: unknown key; did you mean `lr`?"),
        (("steps=many",), "steps: expected a whole number, got 'many'"),
        (("steps.x=1",), "steps: expected a whole number"),
        (("steps=3", "steps.x=1"), "`steps` holds a value, not a group"),
        (("optimiser=3",), "optimiser: expected a mapping"),
        (("steps=[",), "'[': not a value"),
        (("--steps", "[1"), "'[1': not a value"),
        (("--attention", "fa2"), "'fa2' is not one of flex, sdpa"),
        (("--config", "/nowhere.yaml"), "config file /nowhere.yaml: No such file"),
        (("--steps",), "--steps: expected one argument"),
        (("--data", "--resume"), "--data: expected at least one argument"),
        (("--resume=3",), "resume: expected on or off, got 3"),
        (("--stepps", "3"), "--stepps: unknown flag; did you mean --steps?"),
        (("--step", "3"), "--step: unknown flag; did you mean --steps?"),
        (("--limi=3",), "--limi: unknown flag; did you mean --limit?"),
        (("--no-resum",), "--no-resum: unknown flag; did you mean --no-resume?"),
        (("--data", "a", "b", "--stepps=3", "note=x"), "--stepps: unknown flag; did you mean --steps?"),
        (("--warmup", "3"), "--warmup: unknown flag; did you mean --optimiser.warmup?"),
        (("--warmpu=3",), "--warmpu: unknown flag; did you mean --optimiser.warmup?"),
        (("--optimiser.warmpu=3",), "--optimiser.warmpu: unknown flag; did you mean --optimiser.warmup?"),
        (("--optimiser.nesterov", "maybe"), "optimiser.nesterov: expected on or off, got 'maybe'"),
        (("--drafts", "-1"), "drafts is -1; it must be >= 0"),
        (("--optimiser.lr", "-1"), "optimiser.lr is -1.0; it must be > 0"),
        (("max_token=3",), "max_token: unknown key; did you mean `max_tokens`?"),
        (("shared.drafts=3",), "shared: unknown key"),
        (("--zzz", "3"), "--zzz: unknown flag; see prog --help"),
        (("-z",), "-z: unknown flag; see prog --help"),
    ],
    ids=str,
)
def test_a_mistake_on_the_command_line_is_one_line(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse("--target", "t", *argv)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_in_the_file_names_the_file(write: Callable[[str], str]) -> None:
    file = write("target: t\nsteps: many\n")
    with pytest.raises(UserError, match=rf"^{re.escape(file)}: steps: expected a whole number, got 'many'$"):
        parse("--config", file)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_mistyped_flag_is_one_line_in_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(COMMANDS[command]).main
    for typed in (["--taget", "x"], ["--taget=x"]):
        assert main(typed) == 2
        assert capsys.readouterr() == ("", "error: --taget: unknown flag; did you mean --target?\n")
    assert main(["--target", "x", "--threads"]) == 2
    assert capsys.readouterr() == ("", "error: --threads: expected one argument\n")
    rest = {
        "dflash-data": ["--data", "x", "--output", "x.jsonl"],
        "dflash-doctor": ["--drafter", "x"],
        "dflash-eval": ["--drafter", "x", "--prompts", "a=b"],
    }
    assert main(["--target", "x", "--threads", "0", *rest.get(command, [])]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "threads is 0; it must be in 1..4096" in err


def help_of(capsys: pytest.CaptureFixture[str], command: Callable[[], object]) -> str:
    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_key_with_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, lambda: parse_cli(Settings, ["--help"], "prog", "A program.", "prog --target x"))
    common, _, advanced = text.partition("advanced options:")
    assert "--target PATH" in common and "--config PATH" in common and "--steps" not in common
    assert text.endswith("example:\n  prog --target x\n")
    advanced = " ".join(advanced.split())
    for expected in (
        "--attention {flex,sdpa} which attention (default: flex)",
        "--steps INT optimiser steps (default: 100)",
        "--data NAME [NAME ...] prompt files",
        "--resume [{on,off}] continue a run (default: off)",
        "advanced options: optimiser: --optimiser.lr FLOAT peak learning rate (default: 0.0006)",
        "--optimiser.betas FLOAT [FLOAT ...] Adam's two decays (default: 0.9 0.95)",
        "--optimiser.nesterov [{on,off}], --ahead [{on,off}] look ahead (default: off)",
        "longest answer (default: 64)",
    ):
        assert expected in advanced
    assert "the target, 100 % of it (required)" in " ".join(common.split())
    assert "--no-resume" not in text, "opposites are not shown"


def test_switches_take_on_off_no_value_or_no(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, value in {
        "--resume": True, "--resume on": True, "--resume off": False, "--no-resume": False, "resume=off": False,
        "--resume true": True, "--optimiser.nesterov": True, "--ahead": True, "--no-ahead": False,
        "--no-optimiser.nesterov": False, "optimiser.nesterov=on": True, "--resume steps=3": True,
        "steps=3 --ahead optimiser.lr=0.5": True,
    }.items():  # fmt: skip
        config = parse("--target", "t", *typed.split())
        resume = config.optimiser.nesterov if "ahead" in typed or "nesterov" in typed else config.resume
        assert resume is value, typed
        assert config.steps == (3 if "steps=3" in typed else 100)


def test_errors_name_an_option_once_as_it_was_typed(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("target: t\nmax_tokens: many\n")
    for typed, line in {
        "--max-tokens many": "--max-tokens: expected a whole number, got 'many'",
        "--max_tokens many": "--max-tokens: expected a whole number, got 'many'",
        "max_tokens=many": "max_tokens: expected a whole number, got 'many'",
        f"--config {file}": f"{file}: max_tokens: expected a whole number, got 'many'",
        "--drafts -1": "--drafts is -1; it must be >= 0",
        "--optimiser.lr -1": "--optimiser.lr is -1.0; it must be > 0",
        "optimiser.lr=-1": "optimiser.lr is -1.0; it must be > 0",
        "--optimiser.nesterov maybe": "--optimiser.nesterov: expected on or off, got 'maybe'",
    }.items():
        assert run_command(lambda typed=typed: parse("--target", "t", *typed.split()) and None) == 2  # type: ignore[misc]
        assert capsys.readouterr().err == f"error: {line}\n"


def test_every_nested_option_has_a_flag() -> None:
    expected = Settings(target="t", optimiser=Optimiser(lr=0.5, warmup=3, nesterov=True, betas=(0.1, 0.2)), steps=4)
    typed = "--target t --optimiser.lr 0.5 --optimiser.warmup 3 --ahead true --optimiser.betas 0.1 0.2 steps=4"
    assert parse(*typed.split()) == expected
    typed = "--target=t --optimiser.betas 0.1 0.2 optimiser.lr=.5 --optimiser.warmup=3 optimiser.nesterov=true steps=4"
    assert parse(*typed.split()) == expected


def test_a_flat_group_has_keys_without_its_name(write: Callable[[str], str]) -> None:
    file = write("target: t\nmax_tokens: 5\n")
    config = parse("--config", file, "--drafts", "3")
    assert config.shared == Shared(max_tokens=5, drafts=3)
    assert to_mapping(config)["max_tokens"] == 5 and "shared" not in to_mapping(config)
    assert parse("--config", file, "max_tokens=6", "--max_tokens", "4").shared.max_tokens == 6


# ---- running ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_command_exit_code_is_the_return_value_of_its_body(returned: int | None, code: int) -> None:
    assert run_command(lambda: returned) == code


def raises(error: BaseException) -> int:
    raise error


def test_an_interrupt_exits_130_and_names_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: raises(KeyboardInterrupt())) == 130
    assert "resume" in capsys.readouterr().err


def test_a_defect_is_not_reported_as_a_user_error() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_too_little_gpu_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
        "free. Including non-PyTorch memory, this process has 138 GiB.\nOf the allocated memory 137 GiB is allocated"
    )

    assert run_command(lambda: raises(torch.OutOfMemoryError(said))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB.") and "smaller" in line
    assert "Including" not in line


def test_too_little_memory_of_a_cpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: torch.empty(1 << 60, dtype=torch.uint8).numel() and None) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: this machine's memory does not suffice (") and "smaller model" in line


@pytest.mark.parametrize("text", ["2024-13-45", "9" * 400], ids=["date", "number"])
def test_invalid_dates_and_infinite_numbers_are_refused(text: str, write: Callable[[str], str]) -> None:
    for argv in (
        ("--target", "x", f"optimiser.lr={text}"),
        ("--config", write(f"target: x\noptimiser: {{lr: {text}}}\n")),
    ):
        with pytest.raises(UserError):
            parse(*argv)
