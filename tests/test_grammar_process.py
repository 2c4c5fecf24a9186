"""Trials of grammars in processes that can be killed."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import EOS, VOCAB
from grammar_trials import children, pid_of, tried
from grammars import CASES, TOKENIZER, wide
from live_server import wait_until

from dflash_toolkit import grammar_process as module
from dflash_toolkit.grammar import Grammars
from dflash_toolkit.grammar_process import GrammarProcess, Trying
from dflash_toolkit.sampling import Grammar, GrammarError

GRAMMARS = Grammars(TOKENIZER, VOCAB, [EOS])
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "b"}}


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    found = GrammarProcess(GRAMMARS.trial_vocabularies)
    yield found
    found.close()


@pytest.mark.parametrize("grammar", [*(case for case, _ in CASES.values()), Grammar("structural_tag", json.dumps(TAG))])
def test_grammar_read_in_a_trial_compiles_to_the_same(process: GrammarProcess, grammar: Grammar) -> None:
    parsed = tried(process, grammar)
    assert parsed is not None
    there = Grammars(TOKENIZER, VOCAB, [EOS]).compile(grammar, parsed)
    assert there.serialize_json() == GRAMMARS.compile(grammar).serialize_json()


def test_trial_reports_why_a_grammar_cannot_be_used(process: GrammarProcess) -> None:
    for grammar in (Grammar("regex", "(a"), Grammar("json", '{"not": {}}')):
        with pytest.raises(GrammarError) as here:
            GRAMMARS.compile(grammar)
        with pytest.raises(GrammarError) as there:
            tried(process, grammar)
        assert str(there.value) == str(here.value)


def test_pattern_is_computed_within_its_own_limits(process: GrammarProcess) -> None:
    assert tried(process, Grammar("json", '{"type": "string", "pattern": "^(?=a)a$"}'), cpu_s=1) is not None


def test_trial_ends_at_each_of_its_limits(process: GrammarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(process, wide(0), cpu_s=1) is None
    assert tried(process, wide(0), wall_s=0.01) is None
    monkeypatch.setattr(module, "MEMORY", 1 << 20)
    try:
        assert tried(process, wide(0)) is None  # the memory ended outside the compiler
    except GrammarError as error:
        assert "too much memory" in str(error)
    wait_until(lambda: not children(pid_of(process)))


@pytest.mark.slow
def test_trial_that_is_ended_leaves_no_process(process: GrammarProcess) -> None:
    trying, found = Trying(), list[str | None]()
    thread = threading.Thread(target=lambda: found.append(trying.run(process, wide(1), None, None)))
    thread.start()
    wait_until(lambda: len(children(pid_of(process))) == 1)
    trying.end()
    thread.join()
    trying.close()
    assert found == [None]
    wait_until(lambda: not children(pid_of(process)))


def test_killed_process_starts_again() -> None:
    process = GrammarProcess(GRAMMARS.trial_vocabularies)
    process.start()
    first = pid_of(process)
    os.kill(first, signal.SIGKILL)
    assert process._process is not None
    process._process.wait()
    assert tried(process, Grammar("regex", "a")) is not None and pid_of(process) != first
    process.close()
    assert not Path(f"/proc/{pid_of(process)}").exists()
    assert tried(process, Grammar("regex", "a")) is None, "it is closed"
