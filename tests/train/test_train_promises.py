"""Progress, requests and counts of dflash-train and dflash-data."""

import functools
import io
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
import torch
from conftest import TEMPLATE, Clock, make_dflash2, make_drafter
from programs import Program, altered, says, write
from response_servers import FINE, WORDS
from response_servers import ask_completion as ask
from servers import Fake, whole

from dflash_toolkit import Drafter, Target, UserError, progress, save_drafter
from dflash_toolkit.data import sources
from dflash_toolkit.progress import Progress
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import Parts
from dflash_toolkit.runtime.weights import DrafterWeights
from dflash_toolkit.train.config import OptimOptions, TrainConfig
from dflash_toolkit.train.optim.optimizers import make_optimizer
from dflash_toolkit.train.responses import backends
from dflash_toolkit.train.run.cost import resume_bytes

# ---- progress --------------------------------------------------------------------------------------------------


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


# ---- servers ---------------------------------------------------------------------------------------------------


def answered_together(fake: Fake, at_a_time: int) -> list[int]:
    """Lets the server wait for `at_a_time` requests; returns the number of open requests at each arrival."""
    gate, lock = threading.Barrier(at_a_time), threading.Lock()
    there, seen = 0, list[int]()

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        nonlocal there
        with lock:
            there += 1
            seen.append(there)
        time.sleep(0.02)  # for one too many to show
        try:
            gate.wait(60)
        except threading.BrokenBarrierError:
            return 400, {"error": {"message": f"fewer than {at_a_time} at a time"}}
        finally:
            with lock:
                there -= 1
        return 200, whole("fine")

    fake.reply = reply
    return seen


def test_at_most_batch_size_requests_run_at_once(fake: Fake, command: Program) -> None:
    seen = answered_together(fake, 3)
    command("--batch-size", 3)
    assert len(seen) == len(command.rows()) == 9 and max(seen) == 3


def test_several_servers_share_the_questions(fake: Fake, command: Program) -> None:
    seen = answered_together(fake, 2)
    urls = fake.url, fake.url.replace("127.0.0.1", "localhost")
    command("--endpoint", *urls, "--batch-size", 2, "prompts.max_prompts=8")
    hosts = [headers["Host"].partition(":")[0] for headers in fake.headers]
    assert sorted(hosts) == ["127.0.0.1"] * 4 + ["localhost"] * 4, "each thread has a server of its own"
    assert len({tuple(body["prompt"]) for body in fake.asked}) == 8 and max(seen) == 2


@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [
        (429, "30", [30.0, 30.0, 30.0]),
        (503, "2.5", [2.5, 2.5, 4.0]),
        (429, "0", [1.0, 2.0, 4.0]),
        (503, "86400", [60.0, 60.0, 60.0]),
    ],
)
def test_retry_after_sets_the_pause(
    status: int, header: str, expected: list[float], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float | None] = []
    wait = threading.Event.wait

    def pause(event: threading.Event, timeout: float | None = None) -> bool:
        if not threading.current_thread().name.startswith("ask-"):
            return wait(event, timeout)
        pauses.append(timeout)
        return False

    monkeypatch.setattr(threading.Event, "wait", pause)
    fake.sends = {"Retry-After": header}
    fake.reply = lambda body, number: (status, {}) if number < 4 else (200, whole("fine"))
    assert ask(fake, retries=3, pause_s=1.0).tokens == FINE
    assert pauses == expected
    fake.reply = lambda body, number: (status, {})
    with pytest.raises(UserError, match="no response after 1 attempts"):
        ask(fake, retries=0)
    assert pauses == expected, "no pause before giving up"


# ---- prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "opened"), [([], ""), (["thinking=true"], "T"), (["thinking=false"], "F")])
def test_thinking_reaches_the_prompt_that_is_answered(
    option: list[str], opened: str, fake: Fake, command: Program, tmp_path: Path
) -> None:
    mode = (
        "{% if add_generation_prompt and enable_thinking is defined %}{{ 'T' if enable_thinking else 'F' }}{% endif %}"
    )
    thinks = altered(command.target, tmp_path / "thinks")
    (thinks / "chat_template.jinja").write_text(TEMPLATE + mode)
    command("--target", thinks, *option)
    expected = {WORDS.decode(WORDS(f"<|user|>ask {i} of it<|end|><|assistant|>{opened}").input_ids) for i in range(9)}
    assert {WORDS.decode(body["prompt"]) for body in fake.asked} == expected
    assert {WORDS.decode(row["tokens"][: row["prompt_tokens"]]) for row in command.rows()} == expected


class Rows(list[Any]):
    """A streamed dataset whose rows say how they were drawn."""

    def shuffle(self, *, seed: int, buffer_size: int) -> "Rows":
        return Rows({"prompt": f"{row['prompt']}, seed {seed}, of {buffer_size}"} for row in reversed(self))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ([], ["train b, seed 0, of 10000", "train a, seed 0, of 10000"]),
        (["prompts.split=test"], ["test b, seed 0, of 10000", "test a, seed 0, of 10000"]),
        (["prompts.shuffle=7", "seed=3"], ["train b, seed 3, of 7", "train a, seed 3, of 7"]),
        (["prompts.shuffle=0", "seed=3"], ["train a", "train b"]),
    ],
    ids=str,
)
def test_split_shuffle_and_seed_choose_the_rows_of_a_dataset(
    options: list[str], asked: list[str], command: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, dataset: str, subset: str, *, split: str, streaming: bool) -> Rows:
        assert (name, dataset, subset, streaming) == ("org/asks:hard", "org/asks", "hard", True)
        return Rows({"prompt": f"{split} {which}"} for which in "ab")

    monkeypatch.setattr(sources, "load_rows", load)
    command("--data", "org/asks:hard", "prompts.similarity=1", *options)
    assert [row["turns"][0][0]["content"] for row in command.rows("a.prompts.jsonl")] == asked


@pytest.mark.parametrize(("similarity", "kept"), [("0.6", 1), ("0.8", 2), ("0.9", 3), ("1", 3)])
def test_similarity_is_the_threshold_of_duplicates(similarity: str, kept: int, command: Program, prompts: Path) -> None:
    words = [f"w{i}" for i in range(22)]  # 20 runs of three
    near, far = [*words[:-1], "x", "y"], [*words[:-4], *"abcd"]  # with 19 of 22 and 16 of 24 in common
    write(prompts, says(*map(" ".join, (words, near, far))))
    said = "\n".join(command(f"prompts.similarity={similarity}"))
    assert f"{kept} prompts; left out: {3 - kept} near duplicates" in said


# ---- the drafter that answers ----------------------------------------------------------------------------------


def test_the_drafter_of_dflash_data_drafts(
    drafter: Drafter, drafter_dir: Path, dflash_data: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Engine, DrafterWeights | None]] = []
    real = Parts.engine

    def make(parts: Parts, options: EngineOptions) -> Engine:
        made.append((real(parts, options), parts.drafter))
        return made[0][0]

    monkeypatch.setattr(Parts, "engine", make)
    # whole blocks, or it might find that drafting does not pay
    monkeypatch.setattr(backends, "EngineOptions", functools.partial(EngineOptions, num_speculative_tokens=7))
    dflash_data("--drafter", drafter_dir)
    ((engine, draft),) = made
    assert draft is not None and draft.config == drafter.config
    assert torch.equal(draft.fc.bfloat16(), drafter.fc.weight.bfloat16())
    assert engine.stats.requests == 9 and engine.stats.drafted > 0


# ---- what is decayed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_applies_to_matrices_only(kind: str, target: Target) -> None:
    drafter = make_dflash2(target).train().requires_grad_(True)
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.5)
            p.grad = torch.zeros_like(p)  # all that moves a weight is the decay
    before = [p.detach().clone() for p in drafter.parameters()]
    options = OptimOptions(optimizer=kind, learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(drafter.named_parameters(), options)
    optimizer.step()
    assert {p.dim() for p in before} == {1, 2, 3}
    for (name, after), p in zip(drafter.named_parameters(), before, strict=True):
        decayed = p.dim() == 2 and "codebook" not in name  # a row of which is a token's own
        assert torch.allclose(after, p * (0.95 if decayed else 1.0)), name
    moments = [value for part in optimizer.parts for state in part.state.values() for value in state.values()]
    kept = sum(value.numel() for value in [*drafter.parameters(), *moments] if value.dim())
    assert resume_bytes(drafter, TrainConfig(target="t", optim=options)) == 4 * kept


# ---- what is counted as training -------------------------------------------------------------------------------


def rates(run: Program) -> list[float]:
    """Sequences a second, line by line."""
    return [line["sequences_per_second"] for line in run.metrics() if "loss" in line]


@pytest.mark.parametrize("often", ["run.evaluate_every=2", "run.save_every=3"])
def test_an_evaluation_or_a_save_does_not_make_training_slower(often: str, timed: Clock, dflash_train: Program) -> None:
    began = timed.now
    dflash_train("optim.steps=8", "run.evaluate_every=0", "run.save_every=100", often)
    assert rates(dflash_train) == [2.0] * 8, "two rows a step"
    assert timed.now - began == 8 + (400 + 1000 if "evaluate" in often else 100 + 3000)


def test_measuring_the_start_uses_no_training_minutes(
    timed: Clock, target: Target, dflash_train: Program, tmp_path: Path
) -> None:
    save_drafter(make_drafter(target, taps=2, layers=1, block_size=4), tmp_path / "start")
    clocked = ("optim.steps=0", "optim.minutes=0.1", "run.evaluate_every=0", "run.save_every=100")
    dflash_train("--init-from", tmp_path / "start", *clocked)
    assert rates(dflash_train) == [2.0] * 6, "a tenth of a minute, a second a step"
    assert [line["step"] for line in dflash_train.metrics() if "acceptance_length" in line] == [0, 6]
