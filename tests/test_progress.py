"""Progress on a terminal, in a log file, and of dflash-data and dflash-train."""

import functools
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from conftest import Clock
from programs import Program
from servers import Fake

from dflash_toolkit import progress
from dflash_toolkit.progress import Progress


def shown(clock: Clock, patch: pytest.MonkeyPatch, total: int | None, *, terminal: bool) -> str:
    """Returns stderr after 40 of `total` parts, 4 s and 30 words each."""
    stderr = io.StringIO()
    console = rich.console.Console(
        file=stderr, width=120, force_terminal=terminal, color_system=None, get_time=clock, legacy_windows=False
    )
    patch.setattr(rich.console, "Console", lambda **_: console)
    patch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    with Progress("stage", total, unit="word") as bar:
        for _ in range(40):
            clock.now += 4
            bar.advance(1, units=30, note="so far")
    return stderr.getvalue()


def test_a_bar_shows_rate_and_time_left(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    drawn = re.findall(r"stage .+", shown(clock, monkeypatch, 100, terminal=True))
    assert "40/100 7.5 word/s 0:04:00 left so far" in drawn[-1], "60 parts of 4 s"


def test_a_log_file_gets_a_line_with_rate_and_time_left_now_and_then(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = re.findall(r"^stage .+$", shown(clock, monkeypatch, 100, terminal=False), re.MULTILINE)
    assert said[0] == "stage 3/100 7.5 word/s 0:06:28 left so far"
    assert said[12] == "stage 39/100 7.5 word/s 0:04:04 left so far"
    assert sum(" left so far" in line for line in said) == 14, "every third part, and the last one"


def test_a_log_line_without_total_has_no_time_left(clock: Clock, monkeypatch: Any) -> None:
    assert "stage 3 7.5 word/s so far\n" in shown(clock, monkeypatch, None, terminal=False)


@pytest.fixture
def talkative(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of progress at every turn, by the clock."""
    console = functools.partial(rich.console.Console, get_time=clock, force_terminal=False)
    monkeypatch.setattr(rich.console, "Console", console)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", -1.0)


@pytest.mark.usefixtures("talkative")
def test_dflash_data_shows_answered_tokens_a_second_and_time_left(clock: Clock, fake: Fake, command: Program) -> None:
    fake.reply = clock.costs(2, fake.reply)
    assert "responses 7/9 2.5 tok/s 0:00:04 left" in "\n".join(command()), "five tokens every two seconds"


@pytest.mark.usefixtures("talkative")
def test_dflash_train_shows_tokens_a_second_and_time_left(timed: Clock, dflash_train: Program) -> None:
    shown = "\n".join(dflash_train("optim.steps=5", "run.evaluate_every=0", "run.save_every=100"))
    said = re.search(r"^training 3/5 ([\d.]+) tok/s 0:00:02 left loss [\d.]+", shown, re.MULTILINE)
    found = [line["tokens_per_second"] for line in dflash_train.metrics() if "loss" in line]
    assert said and float(said[1]) == pytest.approx(sum(found[:3]) / 3, abs=0.06)
