"""Sweeps: measurement, resuming and the recommendation."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import Clock, make_drafter, make_target
from reports import REPORT_FILES, load

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, load_drafter
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.decode import _draft_states
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair, ReferencePair
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.measure import run
from dflash_toolkit.evaluation.measure.decoders import Response, ThreadedDecoder
from dflash_toolkit.evaluation.measure.drafting import advice_text, drafting_advice
from dflash_toolkit.evaluation.measure.pairs import Pair
from dflash_toolkit.evaluation.measure.run import Setting, evaluate_all
from dflash_toolkit.evaluation.measure.sweeps import Sweeps, chosen, load_point, recommendation, under_load
from dflash_toolkit.evaluation.report.results import Section
from dflash_toolkit.generation import Generation


def encoded(name: str, ids: list[int]) -> EncodedPrompt:
    """Returns a prompt of bytes."""
    return EncodedPrompt(name, ids, asked=bytes(ids).decode(), encode_after=lambda text: [*text.encode(), *ids])


SETS = {
    "a": [encoded("a1", list(range(65, 90))), encoded("a2", [70, 71])],
    "b": [encoded("b1", list(range(40, 60)))],
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_the_command_runs_all_sweeps_and_recommends(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("Why is the sky blue?\nWhat is 2+2?\n")
    command = ["--target", target_dir, "--drafter", drafter_dir, "--device", "cpu", "--max-tokens", 8]
    command += ["--prompts", tmp_path / "few.txt", "--output", tmp_path / "report", "--sweep-requests", 2]
    command += ["--draft-length", 2, 7, "--context-length", 60, 200, "--concurrency", 1, 3]
    assert main([str(word) for word in command]) == 0
    report = load(tmp_path / "report")
    sweeps, overall = report["sweeps"], report["overall"]
    assert [point["num_speculative_tokens"] for point in sweeps["draft_length"]] == [2, 7]
    assert [len(point["accepted_lengths"]) for point in sweeps["draft_length"]] == [3, 8]
    assert sweeps["draft_length"][1]["accepted_lengths"] == overall["accepted_lengths"], "as in the report itself"
    for name in ("plain_decode_seconds", "plain_inter_token_latency_seconds"):
        assert sweeps["draft_length"][0][name] == overall[name], "measured once"
    assert [(point["concurrency"], point["requests"]) for point in sweeps["concurrency"]] == [(1, 2), (3, 6)]
    for point in sweeps["concurrency"]:
        assert point["speedup"] == pytest.approx(point["tokens_per_second"] / point["plain_tokens_per_second"])
        low, high = point["speedup_ci95"]
        assert low <= point["speedup"] <= high
        assert point["tau_pooled"] == pytest.approx(overall["tau_pooled"]), "the same prompts, equally often"
        for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token"):
            for spread in (point[f"{name}_seconds"], point[f"plain_{name}_seconds"]):
                assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]
    shown = [(tmp_path / "report" / name).read_text() for name in ("report.md", "report.html")]
    for text, cell in zip(shown, ("| {} |", "<td>{}</td>"), strict=True):
        _, found, table = text.partition("Latency by requests at a time")
        assert found
        for point in sweeps["concurrency"]:
            for name in ("time_to_first_token_seconds", "plain_inter_token_latency_seconds"):
                cells = (cell.format(f"{1000 * point[name][p]:,.1f}") for p in ("p50", "p90", "p99"))
                assert all(each in table for each in cells)
    assert all(
        point["identical_to_plain"] == 1.0 for sweep in ("draft_length", "context_length") for point in sweeps[sweep]
    )
    short, long = sweeps["context_length"]
    assert (short["tau_over_shortest"], short["tau_over_shortest_ci95"]) == (1.0, None)
    assert long["tau_over_shortest"] == pytest.approx(long["tau_pooled"] / short["tau_pooled"])
    low, high = long["tau_over_shortest_ci95"]
    assert low <= long["tau_over_shortest"] <= high
    assert all("τ over the shortest" in text for text in shown)
    assert report["recommendation"]["num_speculative_tokens"] in (2, 7)
    assert report["recommendation"]["reason"] in capsys.readouterr().out
    assert report["arguments"]["block_size"] == 8
    assert {path.name for path in (tmp_path / "report").iterdir()} == REPORT_FILES


def test_runtimes_agree_in_draft_and_context_length_sweeps(target: Target, drafter: Drafter) -> None:
    sweeps, found = Sweeps(draft_length=(1, 4), context_length=(60,)), []
    for pair in (EnginePair.load(target, drafter), ReferencePair(target, make_drafter(target))):
        report = evaluate_all(pair, [Setting(SETS, PARAMS)], sweeps=sweeps)
        found.append([[p["accepted_lengths"] for p in points] for points in report.sweeps.values()])
        assert pair.block_size == 8
    assert found[0] == found[1]


def test_resumed_sweeps_measure_only_new_points(
    target: Target, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def counted(pair: Pair, prompts: Any, params: Any, concurrency: int, *more: Any) -> dict[str, Any]:
        measured.append(concurrency)
        return load_point(pair, prompts, params, concurrency, *more)

    monkeypatch.setattr(run, "load_point", counted)
    pair, partial = EnginePair.load(target, drafter), tmp_path / "partial.jsonl"
    first, second = (
        evaluate_all(
            pair, [Setting(SETS, PARAMS)], sweeps=Sweeps(concurrency=loads, requests=2), partial=partial
        ).sweeps["concurrency"]
        for loads in ((2,), (1, 2))
    )
    assert measured == [2, 1] and second[1:] == first


def test_latencies_under_load_are_measured_per_request(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_toolkit.evaluation.measure.sweeps.time", SimpleNamespace(perf_counter=clock))

    class Scripted:
        """Answers one request after the other, at known times."""

        def __init__(self) -> None:
            self.asked: list[tuple[int, Any]] = []

        def submit(self, key: int, prompt: list[int], params: SamplingParams, on_step: Any) -> None:
            self.asked.append((key, on_step))

        def wait(self) -> Response:
            key, on_step = self.asked.pop(0)
            for seconds in (1.0, 0.25, 0.5):
                clock.now += seconds
                on_step(Generation([1]))
            return Response(key, Generation([1, 2, 3]))

    whole, (first, second) = under_load(cast(ThreadedDecoder, Scripted()), [[1], [2]], PARAMS, 2)
    assert (whole, first.first, first.gaps, first.whole) == (3.5, 1.0, [0.25, 0.5], 1.75)
    assert (second.first, second.gaps, second.whole) == (2.75, [0.25, 0.5], 3.5), "asked together with the first"


def test_sweep_prompts_come_evenly_from_all_sets() -> None:
    assert chosen(SETS, 2) == [("a", 0), ("b", 0)] and chosen(SETS, 9) == [("a", 0), ("b", 0), ("a", 1)]


@pytest.mark.parametrize("runtime", ["engine", "reference"])
def test_recall_equals_that_of_single_drafts(runtime: str, target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Why is the sky blue?\n")
    command = ["--target", target_dir, "--drafter", drafter_dir, "--device", "cpu", "--dtype", "float32", "--recall"]
    command += ["--max-tokens", 10, "--prompts", tmp_path / "one.txt", "--output", tmp_path / "report"]
    assert main([str(word) for word in [*command, "--runtime", runtime]]) == 0
    report = load(tmp_path / "report")
    assert report["arguments"]["runtime"] == runtime and report["overall"]["identical_to_plain"] == 1.0
    target, drafter = Target.load(str(target_dir), "cpu", "float32"), load_drafter(str(drafter_dir)).float()
    prompt = encode_chat(target.tokenizer, [{"role": "user", "content": "Why is the sky blue?"}])
    answer = report["sets"]["one"]["per_request"][0]["token_ids"]
    ranks: list[list[int]] = [[] for _ in range(7)]
    with torch.inference_mode():
        text = torch.tensor([prompt + answer])
        features = target.forward(text, taps=drafter.config.target_layer_ids).features
        for p in range(len(prompt), len(prompt) + len(answer) - 1):
            context = drafter.context_kv(features[:, :p], torch.arange(p)[None])
            logits = _draft_states(target, drafter, context, int(text[0, p]), p)[1]
            for slot, token in enumerate(text[0, p + 1 : p + 8]):
                ranks[slot].append(int((logits[slot] > logits[slot, token]).sum()))
    found = report["draft_recall"]
    assert (found["requests"], found["anchors"]) == (1, len(answer) - 1)
    for k, shares in found["recall_at_k"].items():
        assert shares == pytest.approx([sum(rank < int(k) for rank in slot) / len(slot) for slot in ranks])
    assert max(found["recall_at_k"]["16"]) > 0


def test_unsupported_sweeps_are_refused_before_decoding(target: Target, drafter: Drafter) -> None:
    reference = ReferencePair(make_target(limit=130), make_drafter(make_target()))
    for sweeps, said in (
        (Sweeps(draft_length=(3, 8)), "draft_length 8: the drafter drafts at most 7 tokens"),
        (Sweeps(context_length=(64, 120)), "context_length 120: with an answer of 12 tokens .* limit of 130"),
        (Sweeps(concurrency=(1,)), "the reference decodes one request at a time"),
        (Sweeps(draft_tree_nodes=(8,)), "draft_tree_nodes: only the engine"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate_all(reference, [Setting(SETS, PARAMS)], sweeps=sweeps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "4", "2"], "concurrency is [4, 2]; give numbers >= 1 in ascending order"),
        (["--draft-length", "0"], "draft-length is [0]"),
        (["--sweep-requests", "0"], "sweep-requests is 0"),
        (["--draft-tree-nodes", "16", "64"], "draft-tree-nodes is 64"),
        (["--draft-tree-nodes", "16", "--num-speculative-tokens", "7"], "given with --num-speculative-tokens"),
        (["--draft-tree-nodes", "16", "draft_sample_method=probabilistic"], "given with draft_sample_method"),
    ],
)
def test_invalid_sweeps_are_one_error_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "t", "--drafter", "d", "--prompts", "a=b", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_recommends_fastest_length_and_highest_faster_load(target: Target, drafter: Drafter) -> None:
    report = evaluate_all(EnginePair.load(target, drafter), [Setting(SETS, PARAMS)])
    for m in report.sections[0].sets["a"].measurements + report.sections[0].sets["b"].measurements:
        m.drafted.decode_s, m.plain.decode_s = 1.0, 2.0
    measured = {name: result.measurements for name, result in report.sets.items()}
    section = Section.of(measured, 0.0, None, 8)
    found = recommendation(section, {})
    assert found == found | {"use_drafter": True, "num_speculative_tokens": 7, "max_concurrency": None}
    assert found["speedup"] == pytest.approx(2.0)
    lengths = [
        {"num_speculative_tokens": n, "tokens_per_second": speed, "speedup": speed / 10, "speedup_ci95": within}
        for n, speed, within in ((3, 9.0, (0.8, 0.95)), (5, 9.5, (0.9, 1.1)), (7, math.nan, None))
    ]
    loads = [
        {"concurrency": n, "speedup": within[0], "speedup_ci95": within}
        for n, within in ((1, (2.0, 3.0)), (2, (1.1, 1.2)), (4, (0.9, 1.1)), (8, (1.1, 1.2)))
    ]
    found = recommendation(section, {"draft_length": lengths, "concurrency": loads})
    assert found == found | {"use_drafter": None, "num_speculative_tokens": 5, "max_concurrency": 2}
    assert found["reason"] == (
        "5 drafted tokens are the fastest of 3, 5, 7; one request at a time shows no clear difference: 0.95x as fast "
        "as without a drafter (95 % interval 0.90x to 1.10x); of 1, 2, 4, 8 requests at a time up to 2 are faster "
        "with it."
    )
    assert recommendation(section, {"draft_length": lengths[:1]})["use_drafter"] is False
    found = recommendation(section, {"concurrency": loads[2:]})  # unsure, then faster
    assert found["max_concurrency"] == 0 and "not even the fewest are clearly faster with it" in found["reason"]


# ---- ways to draft ----------------------------------------------------------------------------------------------


def test_draft_methods_are_measured_at_each_load(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("Why is the sky blue?\nWhat is 2+2?\n")
    command = ["--target", target_dir, "--drafter", drafter_dir, "--device", "cpu", "--max-tokens", 6]
    command += ["--prompts", tmp_path / "few.txt", "--output", tmp_path / "report", "--sweep-requests", 2]
    command += ["--draft-tree-nodes", 9]
    assert main([str(word) for word in command]) == 0
    report = load(tmp_path / "report")
    points = report["sweeps"]["draft_tree"]
    ways = [("blocks", 0, None), ("chains", 7, 1), ("trees", 9, None)]
    kinds = [(p["concurrency"], p["drafts"], p["draft_tree"], p["draft_tree_width"]) for p in points]
    assert kinds == [(1, *way) for way in ways]
    for point in points:
        assert point["over_blocks"] == pytest.approx(point["tokens_per_second"] / points[0]["tokens_per_second"])
        assert (point["over_blocks_ci95"] is None) == (point is points[0])
    advice = report["recommendation"]
    serve = f"dflash-serve --target {target_dir} --drafter {drafter_dir} --device cpu"
    (each,) = advice["drafting"]
    assert each["concurrency"] == 1 and each["command"].startswith(serve) and each["command"] in advice["reason"]
    assert advice["reason"] in capsys.readouterr().out
    page, text = ((tmp_path / "report" / name).read_text() for name in ("report.html", "report.md"))
    assert "trees of 9 nodes, 1" in page and "trees of 9 nodes, 1" in text


def way(load: int, kind: str, nodes: int, over: float, within: tuple[float, float] | None) -> dict[str, Any]:
    width = 1 if kind == "chains" else None
    more = {"draft_tree": nodes, "draft_tree_width": width, "tokens_per_second": 50 * over}
    return {"concurrency": load, "drafts": kind, **more, "over_blocks": over, "over_blocks_ci95": within}


def test_clearly_faster_methods_than_blocks_are_recommended() -> None:
    points = [
        way(1, "blocks", 0, 1.0, None), way(1, "chains", 15, 1.01, (0.99, 1.03)), way(1, "trees", 16, 1.1, (1.05, 1.2)),
        way(1, "trees", 63, 1.3, (1.2, 1.4)), way(4, "blocks", 0, 1.0, None), way(4, "trees", 63, 1.1, (1.01, 1.2)),
        way(16, "blocks", 0, 1.0, None), way(16, "chains", 15, 1.06, (1.02, 1.09)),
        way(16, "trees", 63, 1.2, (0.9, 1.5)), way(64, "blocks", 0, 1.0, None), way(64, "chains", 15, 0.9, (0.8, 0.99)),
    ]  # fmt: skip
    advice = drafting_advice(points, ["dflash-serve", "--target", "a target", "--drafter", "d"])
    serve = "dflash-serve --target 'a target' --drafter d"
    assert [(each["drafts"], each["command"]) for each in advice] == [
        ("trees", f"{serve} --draft-tree 63"),
        ("trees", f"{serve} --draft-tree 63"),
        ("chains", f"{serve} --draft-tree 15 --draft-tree-width 1"),
        ("blocks", f"{serve} --no-draft-tree"),
    ]
    assert advice_text(advice) == (
        f"With 1 to 4 requests at a time trees of 63 nodes are the fastest, 1.10x and 1.30x as fast as blocks: "
        f"`{serve} --draft-tree 63`. With 16 requests at a time chains of adaptive length are the fastest, 1.06x as "
        f"fast as blocks: `{serve} --draft-tree 15 --draft-tree-width 1`. With 64 requests at a time no other way is "
        f"clearly faster than blocks: `{serve} --no-draft-tree`."
    )
