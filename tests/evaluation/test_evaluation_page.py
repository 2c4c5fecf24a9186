"""The HTML and Markdown report: ticks, plots, verdict, answers, colours and escaping."""

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_toolkit.command_line import list_options
from dflash_toolkit.evaluation.measure.measurement import Difference, Measurement
from dflash_toolkit.evaluation.measure.sweeps import recommendation
from dflash_toolkit.evaluation.report import page
from dflash_toolkit.evaluation.report.answers import worst_and_best
from dflash_toolkit.evaluation.report.markdown import render_markdown
from dflash_toolkit.evaluation.report.page import code, render_page
from dflash_toolkit.evaluation.report.plots import ROW, Series, bars, curves, differences, histogram, ticks
from dflash_toolkit.evaluation.report.publish import write_card
from dflash_toolkit.evaluation.report.results import Environment, Report, Section, noise
from dflash_toolkit.evaluation.report.table import number, times
from dflash_toolkit.evaluation.report.tables import setup_table
from dflash_toolkit.evaluation.report.terminal import show_report
from dflash_toolkit.evaluation.report.verdict import judge, verdict
from dflash_toolkit.files import finite
from dflash_toolkit.generation import Generation, Step
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.training_options import ATTENTION

SIZE = 8
HOSTILE = "<script>alert('x')</script> & `code` | </pre> https://example.com"


def measurement(
    draws: random.Random, name: str, accepted: float, step_s: float, difference: Difference | None = None
) -> Measurement:
    """Returns an answer of 20 steps of `step_s`; slots are accepted at random. A plain step lasts 0.1 s."""
    steps = []
    for _ in range(20):
        taken = 0
        while taken < SIZE - 1 and draws.random() < accepted:
            taken += 1
        steps.append(Step(SIZE - 1, taken, (7,) * (taken + 1)))
    tokens = [7] * (1 + sum(len(step.tokens) for step in steps))
    plain = [7] * len(tokens) if difference is None else [8] * len(tokens)
    return Measurement(
        name,
        12,
        Generation(tokens, steps, "length", 0.2, 20 * step_s),
        Generation(plain, [Step(0, 0, (7,))] * (len(plain) - 1), "length", 0.2, 0.1 * (len(plain) - 1)),
        difference,
        category="easy" if accepted > 0.5 and name < "q4" else "hard",
        prompt_text=HOSTILE,
        token_texts=tuple(f"w{i}<i>\n" if i % 9 == 0 else f" w{i}" for i in range(len(tokens))),
        step_s=(step_s,) * 20,
        plain_step_s=(0.1,) * (len(plain) - 1),
    )


def report_of(
    sets: dict[str, tuple[float, float]], difference: Difference | None = None, requests: int = 8, swept: bool = True
) -> Report:
    """Returns a report over sets, each with a share of accepted drafts and seconds per step."""
    draws = random.Random(0)
    found = {
        name: [measurement(draws, f"q{i}", *how, difference if i == 0 else None) for i in range(requests)]
        for name, how in sets.items()
    }
    section = Section.of(found, 0.0, None, SIZE)
    points = [
        {
            "num_speculative_tokens": n, "requests": 16, "tau_pooled": 1 + n / 4, "tau_pooled_ci95": (n / 4, 2 + n / 4),
            "tokens_per_second": 30.0 + n, "plain_tokens_per_second": 20.0, "speedup": 1.5 + n / 20,
            "speedup_ci95": (1.4 + n / 20, 1.7 + n / 20),
        }
        for n in (1, 3, 7)
    ]  # fmt: skip
    load = [
        {
            "concurrency": n, "requests": 2 * n, "tau_pooled": 3.1, "tokens_per_second": 90.0 + n,
            "plain_tokens_per_second": 40.0 * n, "speedup": 2.5 / n, "speedup_ci95": (2.2 / n, 2.8 / n),
            **{
                f"{plain}{name}_seconds": {"mean": 0.02 * n, "p50": 0.01 * n, "p90": 0.03 * n, "p99": 0.05 * n}
                for plain in ("", "plain_") for name in ("time_to_first_token", "inter_token_latency")
            },
        }
        for n in (1, 2, 4)
    ]  # fmt: skip
    context = [load[0] | {"context_length": 8192, "speedup": 1.01, "speedup_ci95": (0.9, 1.1)}]
    sweeps = {"draft_length": points, "context_length": context, "concurrency": load} if swept else {}
    versions = dict.fromkeys(("dflash_toolkit", "torch", "transformers", "python", "platform", "device"), "1")
    environment = Environment(
        **versions, device_name="a machine", dtype="float32", threads=2, date="2026-01-02T03:04:05"
    )
    arguments = {
        "target": "a/target", "drafter": "a/drafter", "drafter_kind": "dflash", "max_tokens": 64, "seed": 0,
        "draft_sample_method": "greedy",
    }  # fmt: skip
    return Report(environment, arguments, (section,), tuple(noise([section])), sweeps, recommendation(section, sweeps))


@pytest.fixture(scope="module")
def report() -> Report:
    """Returns a report with a faster set, a slower set, and a set with a name that looks like an HTML tag."""
    return report_of({"gsm8k": (0.8, 0.15), "chat": (0.2, 0.2), "<b>odd": (0.6, 0.15)})


# ---- plots ------------------------------------------------------------------------------------------------


@given(st.floats(-100, 100), st.floats(0.01, 1e6))
def test_ticks_are_few_and_round_and_enclose_the_range(low: float, size: float) -> None:
    found = ticks(low, low + size)
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert 2 <= len(found) <= 6
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-4)
    slack = 1e-6 * steps[0] + 1e-9
    assert found[0] <= low + slack and found[-1] >= low + size - slack
    digits = f"{steps[0]:.6e}".partition("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "2.5", "5")


@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        pytest.param((30, 2, 7, 3, 5, 4, 4, 29), ["0 %", "10 %", "20 %", "30 %", "40 %"], id="tenths"),
        pytest.param((5, 5, 4, 5), ["0 %", "10 %", "20 %", "30 %"], id="a fourth"),
        pytest.param((9, 0), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"], id="all"),
        pytest.param((0, 0), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"], id="none"),
    ],
)
def test_share_axes_have_round_ticks(counts: tuple[int, ...], labels: list[str]) -> None:
    assert re.findall(r'class="tick"[^>]*>([\d.]+ %)<', histogram("h", counts, 1.0, "c0")) == labels


def boxes(svg: str, tag: str) -> Iterator[tuple[float, float, float, float]]:
    """Returns left, top, right and bottom of every bar, or of every text at its maximum width."""
    for mark in re.finditer(rf"<{tag} ([^>]*)>([^<]*)", svg):
        found = dict(re.findall(r'([\w-]+)="([^"]*)"', mark[1]))
        if "x" not in found:  # part of the pattern
            continue
        x, y = float(found["x"]), float(found["y"])
        if tag == "rect":
            yield x, y, x + float(found["width"]), y + float(found["height"])
        else:
            width = 7.5 * len(unescape(mark[2]))
            left = x - {"start": 0.0, "middle": width / 2, "end": width}[found["text-anchor"]]
            yield left, y - 10, left + width, y + 3


def apart(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize("tau", [1.0, 1.02, 4.5, 7.9, 8.0])
def test_labels_do_not_overlap_bars(tau: float) -> None:
    tallest = [0] * SIZE
    tallest[round(tau) - 1] = 50
    series = [
        Series("a set", "c0", (tau,)),
        Series("of nothing", "c1", (math.nan,)),
        Series("name " * 9, "c2", (0.01,)),
    ]
    drawn = histogram("h", tallest, tau, "c0"), bars("b", series, times, "as fast", losses=True)
    for svg in drawn:
        assert all(apart(text, bar) for text in boxes(svg, "text") for bar in boxes(svg, "rect"))
        assert all(apart(*pair) for pair in itertools.combinations(boxes(svg, "text"), 2))
        assert all(box[0] >= 0 and box[2] <= 440.1 for box in boxes(svg, "rect"))
    assert len(list(boxes(drawn[1], "rect"))) == 2


def test_intervals_are_drawn_and_in_titles() -> None:
    svg = bars("b", [Series("a", "c0", (2.0,), ((1.5, 2.5),))], number, "none")
    assert svg.count('class="whisker') == 3 and "2.00, 95 % interval 1.50 to 2.50" in svg
    svg = curves("c", [Series("a", "c0", (0.5, math.nan, 0.25), ((0.4, 0.6), None, None))], "slot k")
    assert svg.count('class="whisker') == 1 and svg.count('class="dot') == 2
    assert re.search(r'class="line c0" d="M[\d. ]+M[\d. ]+"', svg)  # a gap


def test_losses_are_hatched_and_labelled() -> None:
    svg = bars("b", [Series("a", "c0", (0.74,)), Series("b", "c1", (1.4,))], times, "as fast", losses=True)
    assert svg.count('class="bar c0 lost"') == 1 and svg.count('class="bar c1"') == 1
    assert "▼ slower 0.74x" in svg and svg.count("▼") == 1
    assert f'height="{2 * ROW}' not in svg
    assert "slower" not in bars("b", [Series("a", "c0", (0.74,))], times, "as fast")


# ---- the verdict ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speedup", "within", "outcome"),
    [
        pytest.param(1.4, (1.2, 1.6), "good", id="faster"),
        pytest.param(0.74, (0.7, 0.8), "bad", id="slower"),
        pytest.param(1.1, (0.9, 1.3), "unsure", id="the interval holds 1"),
        pytest.param(1.4, None, "good", id="one request"),
        pytest.param(None, None, "unknown", id="no baseline"),
        pytest.param(math.nan, None, "unknown", id="no step"),
    ],
)
def test_a_speedup_is_judged_by_its_interval(
    speedup: float | None, within: tuple[float, float] | None, outcome: str
) -> None:
    assert judge(speedup, within) == outcome


def test_the_verdict_lists_slower_sets(report: Report) -> None:
    found = verdict(report)
    said = dict(found.points)
    assert found.outcome == "good" and found.with_drafter and "95 % interval" in found.headline
    assert found.headline.startswith("Faster: ")
    assert said["Where does it lose?"].startswith("Slower in chat (0.6") and "gsm8k" not in said["Where does it lose?"]
    assert "7 drafted tokens a step, up to 2 requests at a time." in said["What to serve with?"]
    assert said["Exact?"].startswith("Yes: all 24 answers are those of plain ")


def test_the_verdict_lists_slower_loads() -> None:
    """Also if every set is faster."""
    fast = report_of({"gsm8k": (0.8, 0.15)})
    assert dict(verdict(fast).points)["Where does it lose?"] == (
        "Every set is faster. Slower with 4 requests at a time (0.62x). Not sure with prompts of 8,192 tokens (1.01x)."
    )
    one = [point | {"speedup": 0.9, "speedup_ci95": (0.8, 0.95)} for point in fast.sweeps["concurrency"][:1]]
    said = dict(verdict(replace(fast, sweeps={"concurrency": one})).points)["Where does it lose?"]
    assert said == "Every set is faster. Slower with one request at a time (0.90x)."
    calm = replace(fast, sweeps={})
    assert dict(verdict(calm).points)["Where does it lose?"] == "Nowhere: every set is faster."


def test_acceptance_is_grouped_by_prompt_length(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.sections[0].by_prompt_tokens == {}, "every prompt has 12 tokens"
    assert "by_prompt_tokens" not in report.sections[0].to_json()
    draws, lengths = random.Random(1), (512, 513, 8192, 2048, 40_000, 1)
    found = [
        replace(measurement(draws, f"q{i}", 0.5, 0.1), prompt_tokens=tokens, turn=1 + i % 2)
        for i, tokens in enumerate(lengths)
    ]
    found[1] = replace(found[1], id="q0")  # the second turn of the first conversation, in another group
    section = Section.of({"a": found[:3], "b": found[3:]}, 0.0, None, SIZE)
    groups = {"1-512": (0, 5), "513-2048": (1, 3), "2049-8192": (2,), "32769-": (4,)}
    assert list(section.by_prompt_tokens) == list(groups)
    for group, places in groups.items():
        values = finite(section.to_json()["by_prompt_tokens"][group])
        assert values == finite(Section.of({"a": [found[i] for i in places]}, 0.0, None, SIZE).overall.to_json())
        assert values["requests"] == len(places) and (values["tau_pooled_ci95"] is None) == (len(places) == 1)
    shown = replace(report, sections=(section,))
    tau, caption = section.by_prompt_tokens["513-2048"].drafted.tau_pooled, "All sets, by the prompt's length in tokens"
    show_report(shown, tmp_path)
    write_card(tmp_path / "README.md", shown, "dflash-eval")
    card, printed = (tmp_path / "README.md").read_text(), capsys.readouterr().out
    for text in (render_markdown(shown), unescape(render_page(shown)), card, printed):
        _, found_caption, table = text.partition(caption)
        assert found_caption and f"{tau:.2f}" in table.partition("513-2048")[2][:200]


@pytest.mark.parametrize(
    ("points", "words"),
    [
        pytest.param([(1024, 1.0, None)], None, id="one length"),
        pytest.param([(1024, 1.0, None), (8192, 0.91, (0.85, 0.97))], "8,192 prompt tokens is 0.91x of", id="stable"),
        pytest.param([(1024, 1.0, None), (8192, 0.8, (0.6, 1.1))], "chance: raise --sweep-requests", id="unsure"),
        pytest.param(
            [(1024, 1.0, None), (8192, 0.8, (0.7, 0.9)), (16384, 0.5, (0.4, 0.6))],
            "0.80x of that with 1,024 (95 % interval 0.70x to 0.90x), for the same questions. Train", id="falls",
        ),
    ],
)  # fmt: skip
def test_the_verdict_compares_long_and_short_prompts(
    report: Report, points: list[tuple[int, float, tuple[float, float] | None]], words: str | None
) -> None:
    swept = [
        report.sweeps["context_length"][0]
        | {"context_length": length, "tau_over_shortest": ratio, "tau_over_shortest_ci95": within}
        for length, ratio, within in points
    ]
    said = dict(verdict(replace(report, sweeps={"context_length": swept})).points).get("Long prompts?")
    assert said is None if words is None else said is not None and words in said
    assert "dflash-train" in (said or "") if words and "Train" in words else "dflash-train" not in (said or "")


def test_the_verdict_names_options_that_training_has(report: Report) -> None:
    shorter, longer = ({"tau_over_shortest": ratio, "tau_over_shortest_ci95": None} for ratio in (1.0, 0.5))
    point = report.sweeps["context_length"][0]
    swept = [point | shorter | {"context_length": 512}, point | longer | {"context_length": 8192}]
    said = dict(verdict(replace(report, sweeps={"context_length": swept})).points)["Long prompts?"]
    assert "--prompts.join-to 8320," in said, "with the answer, in a multiple of 128"
    named = re.findall(r"--([\w.-]+\w)", said.partition("dflash-train")[2])
    assert len(named) == 3 and {name.replace("-", "_") for name in named} <= {
        key for key, _ in list_options(TrainConfig)
    }
    assert "sliding_attention" in ATTENTION


def test_the_verdict_names_longer_prompts_with_lower_tau(report: Report) -> None:
    draws = random.Random(2)
    for accepted, lower in ((0.3, True), (0.8, False)):
        short = [measurement(draws, f"q{i}", 0.8, 0.1) for i in range(8)]
        long = [replace(measurement(draws, f"r{i}", accepted, 0.1), prompt_tokens=9000) for i in range(8)]
        section = Section.of({"a": [*short, *long]}, 0.0, None, SIZE)
        points = dict(verdict(replace(report, sections=(section,), sweeps={})).points)
        assert ("Long prompts?" in points) == lower
        assert not lower or "with 8193-32768. These are other prompts" in points["Long prompts?"]


def test_shares_of_few_steps_are_not_drawn(report: Report) -> None:
    """The table still lists them."""
    steps = [sum(s.drafted.accepted_lengths[slot:]) for _, s in report.labelled for slot in range(SIZE - 1)]
    enough = sum(count >= page.COUNTED for count in steps)
    assert 0 < enough < len(steps)
    drawn = render_page(report).partition("<h3>Slot k accepted, given slot k-1</h3>")[2].partition("</svg>")[0]
    assert len(re.findall(r'<path class="dot', drawn)) == enough


def test_a_slow_drafter_has_a_bad_verdict() -> None:
    slow = report_of({"chat": (0.2, 0.2)}, swept=False)
    html = render_page(slow)
    assert verdict(slow).outcome == "bad" and not verdict(slow).with_drafter and 'class="card verdict bad"' in html
    assert re.search(r'class="card tile bad"><span>Speed-up</span>\s*<b><i aria-hidden="true">✗</i> 0\.\d+x', html)
    assert "Without the drafter" in html and "--draft-length and --concurrency" in html
    assert "Slower: 0." in render_markdown(slow)


@pytest.mark.parametrize(
    ("regret", "outcome", "words"),
    [
        pytest.param(0.003, "good", "Yes, up to rounding: 1 of 8", id="tie"),
        pytest.param(
            2.5, "bad", "No: 1 of 8 answers differ from plain decoding, with a regret of 2.50 nats", id="defect"
        ),
        pytest.param(math.nan, "bad", "with a regret of no number", id="broken logits"),
    ],
)
def test_small_regret_is_a_tie_and_large_regret_a_defect(regret: float, outcome: str, words: str) -> None:
    found = verdict(report_of({"a": (0.8, 0.1)}, Difference(3, 8, 7, " <p>", " q", regret)))
    assert found.exactness == outcome and words in dict(found.points)["Exact?"]
    assert (found.outcome, found.headline[:10]) == (
        ("bad", "Not exact.") if outcome == "bad" else ("good", "Faster: 3.")
    )


@pytest.mark.parametrize(("chance", "words"), [(0.4, "show no difference"), (0.004, "another distribution")])
def test_distribution_test_and_recall_are_shown(report: Report, chance: float, words: str) -> None:
    shares = {"1": [0.5] * 7, "4": [0.7] * 7, "16": [0.9, None] + [0.8] * 5}
    recall = {"requests": 4, "anchors": 1234, "recall_at_k": shares}
    more = replace(report, recall=recall, distribution={"p_value": chance, "samples": 64})
    html = render_page(more)
    assert words in html and html.count('role="img"') == render_page(report).count('role="img"') + 1
    assert "1,234 drafts" in html and "1,234 drafts" in render_markdown(more)


# ---- answers ----------------------------------------------------------------------------------------------


def test_tokens_are_marked_as_accepted_corrected_or_own(report: Report) -> None:
    worst, best = worst_and_best(report)
    lengths = [m.drafted.acceptance_length for s in report.sets.values() for m in s.measurements]
    assert worst[0].figures.startswith(f"τ {min(lengths):.2f}") and best[0].figures.startswith(f"τ {max(lengths):.2f}")
    assert len(worst) == len(best) == 3
    first = next(m for m in report.sets["chat"].measurements if m.drafted.acceptance_length == min(lengths))
    shown = [token for step in worst[0].steps for token in step.tokens]
    assert tuple(token.text for token in shown) == first.token_texts and not worst[0].left_out
    expected = ["own"]
    for step in first.drafted.steps:
        expected += ["accepted"] * step.accepted + ["corrected" if step.accepted < step.drafted else "own"]
    assert [token.kind for token in shown] == expected
    assert not any(token.siblings or token.note for token in shown)


def test_tree_alternatives_are_shown_with_the_tokens(report: Report) -> None:
    steps = [
        Step(3, 2, (5, 6, 9), (((4, 0.6), (5, 0.31), (1, 0.02), (2, 0.01), (3, 0.005)), ((6, 0.9),), ((8, 0.5),))),
        Step(7, 1, (5, 6)),  # a block
    ]
    answer = Generation([7, *(token for step in steps for token in step.tokens)], steps, "length", 0.2, 1.0)
    texts = tuple({token: f"<{token}>" for token in (1, 2, 3, 5, 6, 8)}.items() | {(4, "\n")})
    one = Measurement("q", 3, answer, None, None, offered_texts=texts, token_texts=tuple("abcdef"))
    section = Section.of({"set": [one]}, 0.0, None, SIZE)
    over_trees = replace(report, sections=(section,), sweeps={}, recommendation=None)
    ((shown,), _) = worst_and_best(over_trees)
    tokens = [token for step in shown.steps for token in step.tokens]
    assert [token.kind for token in tokens] == [
        "own",
        "accepted bought",
        "accepted",
        "corrected",
        "accepted",
        "corrected",
    ]
    offered = [("⏎", "drafted with 60.0 %"), ("<1>", "drafted with 2.0 %"), ("<2>", "drafted with 1.0 %")]
    assert [list(token.siblings) for token in tokens] == [[], offered, [], [("<8>", "drafted with 50.0 %")], [], []]
    assert tokens[1].note == "step 1: 2 of 3 drafts accepted; drafted with 31.0 %, rank 2 of 5"
    assert tokens[3].note.endswith("; another token was drafted") and not tokens[4].note
    html = render_page(over_trees)
    assert '<i title="drafted with 2.0 %">&lt;1&gt;</i>' in html and "as the drafter computes it" in html
    row = over_trees.to_json()["sections"][0]["sets"]["set"]["per_request"][0]
    assert row["offered_texts"]["4"] == "\n" and len(row["offered_per_step"]) == 2 and not row["offered_per_step"][1]


@pytest.mark.parametrize(("requests", "shown"), [(1, (1, 0)), (2, (1, 1)), (5, (2, 2))])
def test_worst_and_best_answers_do_not_overlap(requests: int, shown: tuple[int, int]) -> None:
    assert tuple(map(len, worst_and_best(report_of({"a": (0.5, 0.1)}, requests=requests)))) == shown


def test_requests_are_shown_with_the_user_message(report: Report) -> None:
    asked, unknown = (
        replace(report.sets["chat"].measurements[0], id=f"count/{i}", prompt_text="<|user|>Count.<|end|>", asked=text)
        for i, text in enumerate(("Count.", ""))
    )
    shown = replace(report, sections=(Section.of({"count": [asked, unknown]}, 0.0, None, SIZE),))
    answers = [answer for found in worst_and_best(shown) for answer in found]
    assert {a.name.partition(" (")[0]: a.prompt for a in answers} == {
        "count/0": "Count.", "count/1": "<|user|>Count.<|end|>",
    }  # fmt: skip


# ---- the page ---------------------------------------------------------------------------------------------


def test_pages_escape_text_and_load_nothing(report: Report) -> None:
    html = render_page(report)
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\((?!#)|(src|href)=", html)
    assert html.count("&lt;script&gt;") == 6 and "<b>odd" not in html and "<i>\n" not in html
    assert "alert(&#39;x&#39;)" in html and html.count("</pre>") == 12
    assert "`" not in html.replace("`code`", "")  # in the prompt
    assert "<code>engine</code>" in html


def test_many_sets_draw_only_lowest_and_highest() -> None:
    shares = [0.5, 0.9, 0.6, 0.2, 0.5, 0.6, 0.7]
    html = render_page(report_of({f"set {i}": (share, 0.1) for i, share in enumerate(shares)}, swept=False))
    legend = re.findall(r"</svg>([^<]*)</li>", html)
    assert legend == ["set 3", "set 1", "all sets"]
    assert html.count('role="img"') == 2 + 2 + 3  # bars of all sets, curves and histograms


def test_text_between_backticks_becomes_code() -> None:
    assert code("a `b` <c> `") == "a <code>b</code> &lt;c&gt; `"


def test_the_setup_shows_the_values_that_were_used(report: Report) -> None:
    """The report of an endpoint also has the options of the client."""
    asked = replace(report, arguments=report.arguments | {"dtype": "bfloat16", "threads": None})
    rows = dict(setup_table(asked).rows)
    assert "revision" not in dict(setup_table(replace(asked, arguments=asked.arguments | {"revision": None})).rows)
    assert rows["dtype"] == "float32" and rows["threads"] == "2" and rows["max_tokens"] == "64"


def test_cells_break_after_intervals_and_before_brackets() -> None:
    assert page.figure("+0.69 [+0.55, +0.85], p < 0.001").split(" ") == [
        "+0.69\u00a0[+0.55,\u00a0+0.85],", "p\u00a0<\u00a00.001",
    ]  # fmt: skip
    assert page.figure("76 % (+2)").split(" ") == ["76\u00a0%", "(+2)"]


@pytest.mark.parametrize(("value", "shown"), [(0.6912, "+0.69"), (-38.66, "-38.66"), (-1238.66, "-1,239")])
def test_differences_have_enough_digits(value: float, shown: str) -> None:
    svg = differences("d", [("a", "run", "c1", value, (value - 0.5, value + 0.5))])
    assert f">{shown}</text>" in svg and f"a, run: {shown}, 95 % interval" in svg


def test_markdown_starts_with_the_verdict(report: Report) -> None:
    text = render_markdown(report)
    assert text.index("Faster: ") < text.index("Where does it lose?") < text.index("Results per prompt set")
    assert "Requests at a time: every point" in text and "Results by category" in text


def test_colours_have_enough_contrast() -> None:
    css = Path(page.__file__).with_name("page.css").read_text()
    themes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(themes) == 2

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in themes:
        found = dict(re.findall(r"--(\w+): (#\w{6})", theme))
        of = {name: luminance(colour) for name, colour in found.items()}
        wanted = [(name, back, 4.5) for name in ("text", "soft") for back in ("page", "card")]
        wanted += [(name, "card", 4.5) for name in ("good", "bad", "unsure", "unknown")]
        wanted += [("text", back, 4.5) for back in ("accepted", "corrected")]
        wanted += [(f"c{i}", "card", 3.0) for i in range(8)]
        for front, back, least in wanted:
            light, dark = max(of[front], of[back]), min(of[front], of[back])
            assert (light + 0.05) / (dark + 0.05) >= least, f"{front} on {back}"
