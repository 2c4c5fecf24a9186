"""dflash-eval --endpoint: a real dflash-serve, metrics in the form of vLLM, and details of SGLang."""

import http.server
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import make_engine, serving
from schemas import validate

from dflash_toolkit import Drafter, Target, UserError
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.measure import run
from dflash_toolkit.evaluation.measure.endpoint import (
    Drafts,
    EndpointPair,
    Server,
    exact_steps,
    read_counters,
    steps_of,
)
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt, Rest
from dflash_toolkit.evaluation.measure.pairs import EnginePair
from dflash_toolkit.evaluation.measure.run import evaluate
from dflash_toolkit.evaluation.measure.sweeps import load_point
from dflash_toolkit.evaluation.report.markdown import render_markdown
from dflash_toolkit.evaluation.report.page import render_page
from dflash_toolkit.evaluation.report.schema import report_schema
from dflash_toolkit.generation import Step
from dflash_toolkit.runtime import SyntheticAcceptance
from dflash_toolkit.sampling import SamplingParams

# ---- a real server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(target: Target, drafter: Drafter) -> Iterator[str]:
    with serving(make_engine(target, drafter, max_model_len=256)) as url:
        yield url


def prompts_of(target: Target) -> dict[str, list[EncodedPrompt]]:
    """Returns four prompts; the second begins a conversation."""
    found = [EncodedPrompt(str(i), list(range(20 + i, 30 + 2 * i))) for i in range(4)]
    asked = ({"role": "user", "content": "And?"},)
    rest = Rest((), (asked,), lambda messages: found[1].token_ids + list(messages[0]["content"].encode()) + [65])
    return {"ids": [found[0], replace(found[1], rest=rest), *found[2:]]}


PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def here(target: Target, drafter: Drafter) -> dict[str, Any]:
    """Returns the results of the same measurement in this process."""
    pair = EnginePair.load(target, drafter)
    return evaluate(pair, prompts_of(target), PARAMS).to_json()["sections"][0]["sets"]["ids"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_endpoint_steps_equal_those_of_the_local_engine(
    concurrency: int, url: str, target: Target, here: dict[str, Any], target_dir: Path
) -> None:
    served = EndpointPair(str(target_dir), url, concurrency=concurrency)
    report = evaluate(served, prompts_of(target), PARAMS)
    there = report.to_json()["sections"][0]["sets"]["ids"]
    keys = ("id", "turn", "prompt_text", "token_ids", "drafted_per_step", "accepted_per_step", "committed_per_step")
    for mine, theirs in zip(here["per_request"], there["per_request"], strict=True):
        assert {key: mine[key] for key in keys} == {key: theirs[key] for key in keys}
        assert theirs["identical"] and theirs["time_to_first_token_seconds"] > 0 and theirs["plain_decode_seconds"] > 0
    same = ("tau_pooled", "accepted_lengths", "accepted_per_position", "identical_to_plain", "generated_tokens")
    assert {key: here[key] for key in same} == {key: there[key] for key in same}
    assert report.arguments["max_concurrency"] == concurrency
    load = "each of 3 requests at a time" if concurrency == 3 else "one request at a time"
    assert load in render_page(report) and load in render_markdown(report)


@pytest.fixture(scope="module")
def accepting(target: Target, drafter: Drafter) -> Iterator[str]:
    """Serves with synthetic acceptance, as random weights accept no drafts."""
    with serving(make_engine(target, drafter, max_model_len=256, synthetic=SyntheticAcceptance(rate=0.7))) as url:
        yield url


def reported_as(form: str, stream: Any, true: dict[tuple[int, ...], list[Step]]) -> Any:
    """Replaces `Server.stream`: drafts are reported as by vLLM 0.33 or SGLang 0.5.23; `true` gets the real steps."""

    def reported(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        answer, steps = list[int](), list[dict[str, Any]]()
        for event in stream(server, body):
            for choice in event.get("choices", ()):
                answer += choice.get("token_ids") or ()
                steps += choice.pop("dflash", ())
            yield event
        true[tuple(body["prompt"])] = exact_steps(answer[1:], steps[1:])
        steps = [step for step in steps[1:] if step["drafted"]]
        histogram = [sum(step["accepted"] == n for step in steps) for n in range(8)]
        counted = {"spec_verify_ct": len(steps), "spec_num_proposed_drafts": sum(step["drafted"] for step in steps)}
        vllm = {"num_spec_steps": len(steps), "num_draft_tokens": counted["spec_num_proposed_drafts"]}
        listed = {f"per_step_{name}": [step[name] for step in steps] for name in ("accepted", "drafted")}
        details = {"acceptance_histogram": histogram, **vllm, **(listed if form == "detailed" else {})}
        yield {
            "sglang": {"sglext": {"spec_tokens_details": counted | {"spec_correct_drafts_histogram": histogram}}},
            "summary": {"usage": {}, "metrics": {"speculative_decoding": details}},
            "detailed": {"usage": {}, "metrics": {"speculative_decoding": details}},
        }[form] | {"choices": []}

    return reported


@pytest.mark.parametrize("form", ["detailed", "summary", "sglang"])
def test_per_request_counts_hold_under_concurrency(
    form: str, accepting: str, target: Target, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true: dict[tuple[int, ...], list[Step]] = {}
    monkeypatch.setattr(Server, "stream", reported_as(form, Server.stream, true))
    pair = EndpointPair(str(target_dir), accepting, concurrency=3)
    monkeypatch.setattr(Server, "counters", lambda _: pytest.fail("counts of all requests"))
    (section,) = evaluate(pair, prompts_of(target), PARAMS, baseline=False).sections
    found = [m.drafted for m in section.sets["ids"].measurements]
    assert len(found) == 5 and section.overall.drafted.tau_pooled > 2
    by_steps = {tuple(token for step in steps for token in step.tokens): steps for steps in true.values()}
    for answer in found:
        steps = by_steps[tuple(answer.tokens[1:])]
        if form == "detailed" and all(step.drafted for step in steps):  # vLLM lists no steps without a draft
            assert answer.steps == steps
        # counts have no order if chunks are joined, and include drafts after the end of an answer
        assert sorted(len(step.tokens) for step in answer.steps) == sorted(len(step.tokens) for step in steps)
        assert answer.acceptance_length == 19 / len(steps)


def test_regret_of_an_endpoint_equals_the_local_one(
    url: str, target: Target, drafter: Drafter, target_dir: Path
) -> None:
    served, here = EndpointPair(str(target_dir), url), EnginePair.load(target, drafter)
    assert served.repeats_plain(SamplingParams(temperature=1.0)), "with drafts or without, one seed is one answer"
    assert served.regret([5, 6, 7], 9) == pytest.approx(here.regret([5, 6, 7], 9), abs=1e-4)


def test_an_error_keeps_finished_concurrent_answers(
    url: str, target: Target, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, partial, asked = EndpointPair(str(target_dir), url, concurrency=2), tmp_path / "partial.jsonl", []
    stream, lock = Server.stream, threading.Lock()

    def counted(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with lock:
            if len(asked) == stop_before:
                raise UserError("the server is gone")
            asked.append(("speculative" in body, tuple(body["prompt"])))
        return stream(server, body)

    monkeypatch.setattr(Server, "stream", counted)
    monkeypatch.setattr(run, "_warm_up", lambda *_: None)
    monkeypatch.setattr(run, "ROUND", 1)
    for stop_before in (2, 5):  # among the drafted answers, among the plain ones
        with pytest.raises(UserError, match="gone"):
            evaluate(pair, prompts_of(target), PARAMS, partial=partial)
        kept = partial.read_text().count("\n")
        assert kept == len(asked) == stop_before, "other requests in flight are kept too"
    stop_before = -1
    report = evaluate(pair, prompts_of(target), PARAMS, partial=partial)
    assert len(asked) == 10 and len(set(asked)) == 10, "five turns, with drafts and without, each once"
    again = evaluate(pair, prompts_of(target), PARAMS, partial=partial)
    assert len(asked) == 10 and again.to_json()["sections"] == report.to_json()["sections"]


def test_pooled_counters_are_refused_for_concurrent_requests(
    url: str, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_toolkit.evaluation.measure.endpoint.STREAM_OPTIONS", {})
    pair = EndpointPair(str(target_dir), url)
    answer = pair.decode([1, 2, 3], PARAMS, draft=True)
    assert sum(len(step.tokens) for step in answer.steps) == 19
    with pytest.raises(UserError, match="max_concurrency is 2"):
        EndpointPair(str(target_dir), url, concurrency=2)


def test_biased_logprobs_give_no_regret(url: str, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EndpointPair(str(target_dir), url)
    reply = {"choices": [{"logprobs": {"top_logprobs": [{"a": 0.0}], "token_logprobs": [0.0]}}]}
    monkeypatch.setattr(Server, "post", lambda *_: reply)
    assert math.isnan(pair.regret([1, 2], 3))


def test_adaptive_servers_report_their_longest_draft(target: Target, drafter: Drafter, target_dir: Path) -> None:
    how = {"num_speculative_tokens": None, "draft_sample_method": "probabilistic"}
    with serving(make_engine(target, drafter, max_model_len=256, **how)) as url:
        pair = EndpointPair(str(target_dir), url)
        assert pair.block_size == drafter.config.block_size
        assert not pair.repeats_plain(SamplingParams(temperature=1.0)), "its drafts are sampled"
        assert "kv_cache_dtype" not in pair.facts


def test_servers_report_a_cache_in_fp8(target: Target, drafter: Drafter, target_dir: Path) -> None:
    with serving(make_engine(target, drafter, max_model_len=256, kv_cache_dtype="fp8")) as url:
        assert EndpointPair(str(target_dir), url).facts["kv_cache_dtype"] == "fp8"


def test_the_command_measures_a_server(url: str, target_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why is the sky blue?"}) + "\n")
    asked = ["--target", str(target_dir), "--prompts", f"sky={prompts}", "--max-tokens", "12"]
    output = tmp_path / "report"
    asked += ["--concurrency", "1", "2", "--sweep-requests", "1"]
    assert main([*asked, "--endpoint", url.replace("//", "//user:secret@"), "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    validate(report, report_schema)
    assert report["environment"]["device"] == "endpoint" and report["arguments"]["served_model"] == "org/tiny"
    assert report["sections"][0]["overall"]["identical_to_plain"] == 1.0
    assert [point["concurrency"] for point in report["sweeps"]["concurrency"]] == [1, 2]
    assert "secret" not in (output / "report.json").read_text() + (output / "report.html").read_text()


def test_invalid_endpoint_options_are_refused_in_one_line(
    url: str, target: Target, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why?"}) + "\n")
    asked = ["--target", str(target_dir), "--prompts", f"sky={prompts}", "--output", str(tmp_path / "report")]

    def refused(*options: str) -> str:
        assert main([*asked, *options]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        return line

    assert "drafter is missing" in refused()
    assert "runtime is given with endpoint" in refused("--endpoint", url, "--runtime", "engine")
    assert "max-concurrency is 2, but models in this process" in refused("--max-concurrency", "2")
    assert "--max-concurrency is 0" in refused("--endpoint", url, "--max-concurrency", "0")
    assert "draft-tree-width is given with endpoint" in refused("--endpoint", url, "--draft-tree-width", "3")
    assert "also give --drafter, the directory of its card" in refused("--endpoint", url, "--write-model-card")
    assert "draft-tree is given with endpoint" in refused("--endpoint", url, "--draft-tree", "8")
    assert "endpoint http://127.0.0.1:9/v1 does not answer" in refused("--endpoint", "http://127.0.0.1:9")
    assert "endpoint 'ftp://h' is not an address" in refused("--endpoint", "ftp://h")
    assert "has org/tiny; name one as --served" in refused("--endpoint", url, "--served-model-name", "x")
    with serving(make_engine(target, None, max_model_len=256)) as plain:
        line = refused("--endpoint", plain)
        assert "does not report drafts" in line and "acceptance by position" in line and "--drafter" in line
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("source", ["steps", "counters"])
def test_acceptance_under_load_equals_that_of_single_requests(
    source: str, url: str, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = EndpointPair(str(target_dir), url)
    prompts = [list(range(20 + i, 30 + 2 * i)) for i in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = [pair.decode(prompt, params, draft=True) for prompt in prompts]
    if source == "counters":  # without drafts in responses
        monkeypatch.setattr(pair._server, "owner", "vllm")
    point = load_point(pair, prompts, params, 3, baseline=False)
    steps = sum(len(answer.steps) for answer in answers)
    # counters include accepted drafts after the end of an answer
    assert point["tau_pooled"] == pytest.approx(4 * 19 / steps, rel=1e-9 if source == "steps" else 0.05)
    assert point["time_to_first_token_seconds"]["p50"] > 0 and point["tokens_per_second"] > 0


# ---- what servers say --------------------------------------------------------------------------------------------

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="2"} 1.7e+09
"""


def test_counters_are_summed_over_engines() -> None:
    assert read_counters(VLLM) == Drafts(4, 12, (3, 2, 1))
    assert read_counters(VLLM + VLLM.replace('engine="0"', 'engine="1"')) == Drafts(8, 24, (6, 4, 2))
    assert read_counters("vllm:num_requests_running 0.0\n") is None
    assert Drafts(4, 12, (3, 2, 1)).lengths() == [0, 1, 2, 3]


def test_chunks_are_steps_unless_the_server_joins_them() -> None:
    drafts = Drafts(3, 9, (2, 2, 0))
    chunks = steps_of(range(7), [3, 1, 3], drafts, 3)
    assert chunks == [Step(3, 2, (0, 1, 2)), Step(3, 0, (3,)), Step(3, 2, (4, 5, 6))]
    joined = steps_of(range(7), [4, 3], drafts, 3)
    assert sorted(step.accepted for step in joined) == [0, 2, 2] and sum(len(step.tokens) for step in joined) == 7
    # the answer ends inside the last block: drafts after its end do not count
    cut = steps_of(range(2), [1, 1], Drafts(2, 6, (1, 1, 1)), 3)
    assert cut == [Step(3, 0, (0,)), Step(3, 1, (1,))]


@contextmanager
def standing_in(drafts: bool, ending: str = "length") -> Iterator[str]:
    """Serves replies in the form of `entrypoints/openai/protocol.py` of SGLang 0.5.23."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known = {
                "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 64}]},
                "/server_info": {"version": "0.5.23"},
            }
            found = known.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(found or {}).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/generate":
                assert asked["return_logprob"] and asked["top_logprobs_num"] == 1 and "logit_bias" not in asked
                (token,) = asked["token_ids_logprob"]
                meta = {
                    "output_top_logprobs": [[[-0.5, 7, None]]],
                    "output_token_ids_logprobs": [[[-2.0, token, None]]],
                }
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"meta_info": meta}).encode())
                return
            assert asked["return_spec_tokens_details"] and asked["return_token_ids"]
            details = {
                "spec_accept_rate": 1 / 3, "spec_accept_length": 2.5, "spec_cap_length": 0.0,
                "spec_block_accept_length": 0.0, "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 6,
                "spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 0, 1], "spec_cap_lens_histogram": [],
            }  # fmt: skip
            of_all = {"id": "0", "object": "text_completion", "created": 1, "model": "m", "usage": None}
            events: list[dict[str, Any]] = [
                of_all | {"choices": [{
                    "index": 0, "text": "", "logprobs": None, "finish_reason": None, "matched_stop": None,
                    "token_ids": ids,
                }]}
                for ids in ([5], [6, 7, 8], [9])
            ]  # fmt: skip
            events[-1]["choices"][0]["finish_reason"] = ending
            events += [of_all | {"choices": [], "sglext": {"spec_tokens_details": details}}] if drafts else []
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_sglang_counts_are_read_from_the_response(target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with standing_in(drafts=True) as url:
        pair = EndpointPair(str(target_dir), f"{url}/v1/")
        assert (pair.block_size, pair.context_limit, pair.decodes_plainly) == (4, 64, False)
        assert pair.where == f"{url}, sglang 0.5.23"
        assert [pair.repeats_plain(SamplingParams(temperature=t)) for t in (0.0, 1.0)] == [True, False]
        answer = pair.decode([1, 2], SamplingParams(max_tokens=5), draft=True)
        assert answer.steps == [Step(3, 2, (6, 7, 8)), Step(3, 0, (9,))] and answer.finish_reason == "length"
        assert pair.regret([1, 2], 9) == 1.5, "without a bias, which SGLang adds before it takes log-probabilities"
    with standing_in(drafts=True, ending="abort") as url, pytest.raises(UserError, match="ended an answer: abort"):
        EndpointPair(str(target_dir), url)
    with standing_in(drafts=False) as url, pytest.raises(Exception, match="speculative-algorithm DFLASH"):
        EndpointPair(str(target_dir), url)
