"""The curve of acceptance against training, and what an estimate reads from it."""

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_toolkit.config import UserError
from dflash_toolkit.train.run.curve import Point, fit
from dflash_toolkit.train.run.outlook import PUBLISHED, outlook, point_of_run, published

GRID = [(seen, distinct) for seen in (2.0, 8.0, 30.0, 100.0) for distinct in (2.0, 8.0, 30.0)]


def law(amounts: tuple[float, ...]) -> float:
    return 9 - sum(a * x**-p for a, p, x in zip((4, 3), (0.6, 0.4), amounts, strict=False))


@pytest.mark.parametrize("known", [True, False], ids=["errors-known", "errors-unknown"])
@pytest.mark.parametrize("amounts", [1, 2])
def test_a_fit_recovers_a_known_law_within_its_error(amounts: int, known: bool) -> None:
    places = GRID if amounts == 2 else [(x,) for x in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0)]
    far, near = (300.0, 60.0)[:amounts], (60.0, 20.0)[:amounts]
    missed = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(scale=0.05, size=len(places))
        curve = fit([Point(x, law(x) + n, 0.05 if known else None) for x, n in zip(places, noise, strict=True)])
        for found, true in ((curve.at(far), law(far)), (curve.gain(near, far), law(far) - law(near))):
            assert 0 < found.error < 1
            missed.append(abs(found.tau - true) / found.error)
    assert np.mean(np.array(missed) < 2) > 0.85 and max(missed) < 5


def test_a_fit_meets_exact_points_and_predicts_beyond_them() -> None:
    curve = fit([Point((x, 7.0), 9 - 4 * x**-0.6) for x in (1.0, 3.0, 10.0, 30.0, 100.0)])
    assert curve.varied == (0,), "an amount that is equal in all points has no part in the curve"
    assert curve.at((30.0, 7.0)).tau == pytest.approx(9 - 4 * 30**-0.6, abs=0.01)
    assert curve.at((300.0, 99.0)).tau == pytest.approx(9 - 4 * 300**-0.6, abs=0.02)
    assert curve.at((1e-6, 7.0)).tau == 1


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "0 points with 0 amounts that differ are too few for a curve with 3 parameters; measure at least 3"),
        ([Point((x,), x, 0.1) for x in (1.0, 2.0)], "2 points with 1 .* measure at least 3"),
        ([Point((x,), x) for x in (1.0, 2.0, 3.0)], "3 points with 1 .* measure at least 4"),
        ([Point((x, x % 3), x, 0.1) for x in (1.0, 2.0, 4.0, 5.0)], "4 points with 2 .* 5 parameters; .* least 5"),
        ([Point((2.0,), x, 0.1) for x in (1.0, 2.0, 3.0)], "3 points with 0 amounts that differ"),
        ([Point((x,), 9 - x, 0.1) for x in (1.0, 2.0, 3.0, 4.0)], "does not rise with training over these 4 points"),
    ],
)
def test_points_without_a_curve_are_refused_in_one_line(points: list[Point], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        fit(points)
    assert "\n" not in str(refused.value)


def test_published_drafters_are_near_their_curve() -> None:
    assert published()
    for each in published():
        assert min(curve.gain((x, x), (2 * x, x)).tau for curve in each.curves.values() for x in each.most) > 0
    rows = [
        row for row in json.loads(PUBLISHED.read_text())["rows"] if row["kind"] == "dflash" and "seen_tokens" in row
    ]
    for row in rows:
        tokens = (1e6 * row["seen_tokens"], 1e6 * row["response_tokens"])
        (_, length, how), (_, more, _), *_ = outlook(1e9 * row["parameters"], "dflash", *tokens, 30e6, 1, None)
        chat, maths = (float(part.split()[0]) for part in length.splitlines())
        assert (chat, maths) == pytest.approx((row["mt_bench"], row["gsm8k"]), rel=0.06)
        assert f"runs of {row['target']}" in how and more.startswith("+0."), "inside the measured amounts"
    (_, little, _), *others = outlook(8e9, "dflash", 1e6, 1e6, 1e9, 1, None)
    assert little == "below 1.90 (chat)\nbelow 4.75 (maths)" and not others, "the curve says nothing so far below it"
    (_, _, far), *_ = outlook(8e9, "dspine", 36e9, 36e9, 1e9, 1, None)
    assert "; extrapolated to " in far


def test_an_estimate_reads_the_measurements_of_its_run(tmp_path: Path) -> None:
    def said(measured: int) -> dict[str, tuple[str, str]]:
        lines = [
            {"step": 1, "gpu_minutes": 0.1, "loss": 2.0},
            {"step": 0, "gpu_minutes": 0.0, "acceptance_length": 1.0},
        ]
        lines += [
            {"gpu_minutes": 2 * x, "acceptance_length": 3 - x**-0.5, "acceptance_length_error": 0.01}
            for x in (1, 5, 15, 30)[:measured]
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
        return {name: (value, how) for name, value, how in outlook(8e9, "dflash2", 9e6, 9e6, 9e6, 2, tmp_path)}

    assert "measured so far" not in said(0)
    two = said(2)
    assert two["measured so far"][1].endswith("; no curve: 2 points with 1 amounts that differ are too few for a curve "
                                              "with 3 parameters; measure at least 3")  # fmt: skip
    assert "its next hour" not in two
    four = said(4)
    assert four["measured so far"] == ("2.82 +- 0.01 after 30 min", "held-out prompts of this run")
    value, how = four["its next hour"]
    assert how == "curve of 4 points of this run"
    assert float(value.split()[0]) == pytest.approx(30**-0.5 - 90**-0.5, abs=0.02), "two GPUs: 120 minutes more"
    (tmp_path / "metrics.jsonl").write_text((tmp_path / "metrics.jsonl").read_text().removesuffix('{"torn'))
    point = point_of_run(tmp_path, 2)
    assert (point["gpu_minutes"], point["points"]) == (60, 4) and f"+{point['an_hour_more']:.2f}" == value.split()[0]
