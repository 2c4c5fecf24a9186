"""Progress, requests and counts of dflash-train and dflash-data."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TEMPLATE, Clock, make_drafter
from programs import Program, altered, says, write
from response_servers import FINE, WORDS
from response_servers import ask_completion as ask
from servers import Fake, whole

from dflash_toolkit import Target, UserError, save_drafter
from dflash_toolkit.data import sources

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
