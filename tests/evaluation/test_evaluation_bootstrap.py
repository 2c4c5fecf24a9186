"""Coverage of bootstrap intervals, and refusal of invalid reports."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.report.schema import read_report
from dflash_toolkit.evaluation.stats.bootstrap import interval, intervals, resampled_sums, student_quantile
from dflash_toolkit.evaluation.stats.paired import tau_over
from dflash_toolkit.generation import Generation, Step

SLOTS, A, B = 4, 3.0, 2.0  # acceptance rates of requests have the distribution Beta(A, B)
STEPS = 18  # maximum per answer


def planted(requests: int, seed: int) -> tuple[list[Generation], list[Generation]]:
    """Returns drafted and plain answers; each request accepts drafts with its own probability."""
    rng = np.random.default_rng(seed)
    easy = rng.beta(A, B, requests)
    accepted = (rng.random((requests, STEPS, SLOTS)) < easy[:, None, None]).cumprod(-1).sum(-1).tolist()
    drafted, plain = [], []
    for row, length in zip(accepted, rng.integers(STEPS // 3, STEPS + 1, requests), strict=True):
        row = row[:length]  # lengths of answers differ
        steps = [Step(SLOTS, count, (7,) * (count + 1)) for count in row]
        tokens = sum(count + 1 for count in row)
        seconds = rng.uniform(0.8, 1.2, 2)
        drafted.append(Generation([7] * (1 + tokens), steps, "length", 0.1, len(row) * float(seconds[0])))
        one = [Step(0, 0, (7,))] * tokens
        plain.append(Generation([7] * (1 + tokens), one, "length", 0.1, tokens * float(seconds[1])))
    return drafted, plain


@pytest.mark.slow
def test_bootstrap_intervals_cover_at_their_confidence() -> None:
    moments = tuple(itertools.accumulate(((A + k) / (A + B + k) for k in range(SLOTS)), lambda x, y: x * y))
    tau = 1 + sum(moments)
    truth = {
        "tau_pooled": tau,
        "tau_mean": tau,
        "speedup": tau,
        "tokens_per_second": tau,
        "plain_tokens_per_second": 1.0,
    }
    seeds, held = 100, dict.fromkeys([*truth, *range(SLOTS)], 0)
    for seed in range(seeds):
        found = intervals(*planted(20, seed), SLOTS + 1)
        for name, value in truth.items():
            low, high = found[name]
            held[name] += low <= value <= high
        for slot, (low, high) in enumerate(found["accepted_per_position"]):
            held[slot] += low <= moments[slot] <= high
    assert all(count >= 90 for count in held.values()), held
    assert 0.93 * seeds <= sum(held.values()) / len(held) <= 0.98 * seeds, held


def test_intervals_equal_those_of_explicit_resampling() -> None:
    drafted, plain = planted(12, 0)
    found = intervals(drafted, plain, SLOTS + 1)
    assert found == intervals(drafted, plain, SLOTS + 1)
    rng, draws = np.random.default_rng(1), []
    for _ in range(500):
        places = rng.integers(0, 12, 12)
        draws.append(Acceptance.of([drafted[i] for i in places], SLOTS + 1))
    for name in ("tau_pooled", "tau_mean", "accepted_given_previous"):
        values = np.array([getattr(draw, name) for draw in draws]).reshape(500, -1).T
        for replicates, within in zip(values, np.reshape(found[name], (-1, 2)), strict=True):
            assert interval(replicates, 12) == pytest.approx(tuple(within), abs=0.15 * (within[1] - within[0]))
    whole = Acceptance.of(drafted, SLOTS + 1)
    assert found["tau_pooled"][0] < whole.tau_pooled < found["tau_pooled"][1]


def test_no_interval_for_one_request_or_without_steps() -> None:
    drafted, plain = planted(1, 0)
    found = intervals(drafted, plain, SLOTS + 1)
    assert found["tau_pooled"] is found["speedup"] is None and found["accepted_per_position"] == (None,) * SLOTS
    found = intervals([Generation([7], [], "stop", 0.1, 0.0)] * 3, [], SLOTS + 1)
    assert found["tau_mean"] is found["plain_tokens_per_second"] is found["accepted_given_previous"][0] is None


def test_turns_of_a_conversation_are_resampled_together() -> None:
    drafted, _ = planted(10, 0)
    twice = [answer for answer in drafted for _ in range(2)]  # the second adds no information
    assert intervals(twice, [], SLOTS + 1, [True, False] * 10) == intervals(drafted, [], SLOTS + 1)
    low, high = intervals(twice, [], SLOTS + 1)["tau_pooled"]
    wide = intervals(drafted, [], SLOTS + 1)["tau_pooled"]
    assert high - low < 0.85 * (wide[1] - wide[0])


def test_resampling_in_parts_gives_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = np.arange(24.0).reshape(12, 2)
    whole = resampled_sums(figures)
    monkeypatch.setattr("dflash_toolkit.evaluation.stats.bootstrap.AT_ONCE", 12 * 300)
    assert (resampled_sums(figures) == whole).all() and whole.shape == (2000, 2)


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (39, 2.023)])
def test_quantiles_of_student_t_match_tables(freedom: int, t: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(t, rel=0.01)


def test_a_ratio_of_tau_pairs_the_same_requests() -> None:
    """Requests differ much, but each commits half as many tokens per step the second time."""

    def answers(share: int) -> list[Generation]:
        lengths = [share * n for n in (1, 1, 2, 2)]
        return [Generation([7] * (1 + 5 * n), [Step(SLOTS, n - 1, (7,) * n)] * 5, "length", 0.1, 1.0) for n in lengths]

    assert tau_over(answers(2), answers(1), SLOTS + 1) == (0.5, (0.5, 0.5))
    assert tau_over(answers(2)[:1], answers(1)[:1], SLOTS + 1) == (0.5, None), "one request"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param({"schema": 1, "sets": {}}, "schema_version is 1, but", id="old"),
        pytest.param({"schema_version": 3}, "schema_version is 3", id="newer"),
        pytest.param({"runs": []}, "it has no schema_version", id="another file"),
        pytest.param([], "it has no schema_version", id="list"),
    ],
)
def test_invalid_reports_are_refused_in_one_line(content: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=said) as raised:
        read_report(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)
    path.write_text("{")
    with pytest.raises(UserError, match="no report of dflash-eval"):
        read_report(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_report(tmp_path / "none.json")
