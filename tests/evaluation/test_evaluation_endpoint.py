"""dflash-eval --endpoint: a real server of ours, pages of metrics as vLLM writes them, and SGLang's details."""

import http.server
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_serve_api import serving
from test_serve_engine import make_engine

from dflash_toolkit import Drafter, Target
from dflash_toolkit.evaluation.cli import main
from dflash_toolkit.evaluation.decoders import EnginePair
from dflash_toolkit.evaluation.endpoint import Drafts, EndpointPair, Server, read_counters, steps_of
from dflash_toolkit.evaluation.measure import EncodedPrompt
from dflash_toolkit.evaluation.run import evaluate
from dflash_toolkit.evaluation.schema import report_schema
from dflash_toolkit.evaluation.sweeps import load_point
from dflash_toolkit.generation import Step
from dflash_toolkit.sampling import SamplingParams

# ---- a real server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(target: Target, drafter: Drafter) -> Iterator[str]:
    with serving(make_engine(target, drafter, max_model_len=256)) as url:
        yield url


def test_a_served_drafter_is_accepted_step_by_step_as_in_this_process(
    url: str, target: Target, drafter: Drafter, target_dir: Path
) -> None:
    prompts = {"ids": [EncodedPrompt(str(i), list(range(20 + i, 30 + 2 * i))) for i in range(4)]}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    served = EndpointPair(str(target_dir), url)
    here = evaluate(EnginePair.load(target, drafter), prompts, params).to_json()["sections"][0]["sets"]["ids"]
    there = evaluate(served, prompts, params).to_json()["sections"][0]["sets"]["ids"]
    told = ("token_ids", "accepted_per_step", "committed_per_step", "drafted_per_step", "tau", "identical")
    for mine, theirs in zip(here["per_request"], there["per_request"], strict=True):
        assert {key: mine[key] for key in told} == {key: theirs[key] for key in told}
    same = ("tau_pooled", "accepted_lengths", "accepted_per_position", "identical_to_plain", "generated_tokens")
    assert {key: here[key] for key in same} == {key: there[key] for key in same}
    assert served.regret([5, 6, 7], 9) == pytest.approx(EnginePair.load(target, drafter).regret([5, 6, 7], 9), abs=1e-4)


def test_what_a_bias_made_certain_is_no_regret(url: str, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EndpointPair(str(target_dir), url)
    told = {"choices": [{"logprobs": {"top_logprobs": [{"a": 0.0}], "token_logprobs": [0.0]}}]}
    monkeypatch.setattr(Server, "post", lambda *_: told)
    assert math.isnan(pair.regret([1, 2], 3))


def test_a_server_that_drafts_as_it_pays_is_known_by_its_longest_draft(
    target: Target, drafter: Drafter, target_dir: Path
) -> None:
    chosen = make_engine(target, drafter, max_model_len=256, num_speculative_tokens=None)
    with serving(chosen) as url:
        assert EndpointPair(str(target_dir), url).block_size == drafter.config.block_size


def test_the_command_measures_a_server(url: str, target_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "Why is the sky blue?"}) + "\n")
    asked = ["--target", str(target_dir), "--prompts", f"sky={prompts}", "--max-tokens", "12"]
    output = tmp_path / "report"
    asked += ["--concurrency", "1", "2", "--sweep-requests", "1"]
    assert main([*asked, "--endpoint", url.replace("//", "//user:secret@"), "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    jsonschema.validate(report, report_schema())
    assert report["environment"]["device"] == "endpoint" and report["arguments"]["served_model"] == "org/tiny"
    assert report["sections"][0]["overall"]["identical_to_plain"] == 1.0
    assert [point["concurrency"] for point in report["sweeps"]["concurrency"]] == [1, 2]
    assert "secret" not in (output / "report.json").read_text() + (output / "report.html").read_text()


def test_what_cannot_be_measured_is_one_line(
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
    assert "draft_tree is given with endpoint" in refused("--endpoint", url, "--draft-tree", "8")
    assert "endpoint http://127.0.0.1:9: no answer" in refused("--endpoint", "http://127.0.0.1:9")
    assert "expected http://HOST:PORT" in refused("--endpoint", "localhost")
    assert "has org/tiny; name one with --served-model-name" in refused("--endpoint", url, "--served-model-name", "x")
    with serving(make_engine(target, None, max_model_len=256)) as plain:
        assert "does not tell what became of drafts" in refused("--endpoint", plain)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("told", ["steps", "counters"])
def test_under_load_a_level_has_the_acceptance_of_one_request_at_a_time(
    told: str, url: str, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = EndpointPair(str(target_dir), url)
    prompts = [list(range(20 + i, 30 + 2 * i)) for i in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = [pair.decode(prompt, params, draft=True) for prompt in prompts]
    if told == "counters":  # what a server says that tells nothing in its responses
        monkeypatch.setattr(pair._server, "owner", "vllm")
    point = load_point(pair, prompts, params, 3, baseline=False)
    steps = sum(len(answer.steps) for answer in answers)
    # counters also have drafts that were accepted behind an answer's end
    assert point["tau_pooled"] == pytest.approx(4 * 19 / steps, rel=1e-9 if told == "steps" else 0.05)
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


def test_counters_are_added_over_the_engines_of_a_server() -> None:
    assert read_counters(VLLM) == Drafts(4, 12, (3, 2, 1))
    assert read_counters(VLLM + VLLM.replace('engine="0"', 'engine="1"')) == Drafts(8, 24, (6, 4, 2))
    assert read_counters("vllm:num_requests_running 0.0\n") is None
    assert Drafts(4, 12, (3, 2, 1)).lengths() == [0, 1, 2, 3]


def test_steps_are_chunks_and_what_only_counters_tell_has_no_order() -> None:
    drafts = Drafts(3, 9, (2, 2, 0))
    chunks = steps_of(range(7), [3, 1, 3], drafts, 3)
    assert chunks == [Step(3, 2, (0, 1, 2)), Step(3, 0, (3,)), Step(3, 2, (4, 5, 6))]
    joined = steps_of(range(7), [4, 3], drafts, 3)
    assert sorted(step.accepted for step in joined) == [0, 2, 2] and sum(len(step.tokens) for step in joined) == 7
    # the answer ends inside the last block: what was accepted behind its end does not count
    cut = steps_of(range(2), [1, 1], Drafts(2, 6, (1, 1, 1)), 3)
    assert cut == [Step(3, 0, (0,)), Step(3, 1, (1,))]


@contextmanager
def standing_in(drafts: bool) -> Iterator[str]:
    """SGLang's replies, of the forms that its 0.5.23 has: nothing else of it is here."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            known = {
                "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 64}]},
                "/get_server_info": {"version": "0.5.23"},
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
            told = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [1, 0, 1]}
            events: list[dict[str, Any]] = [{"choices": [{"token_ids": ids}]} for ids in ([5], [6, 7, 8], [9])]
            events[-1]["choices"][0]["finish_reason"] = "length"
            events += [{"choices": [], "sglext": {"spec_tokens_details": told}}] if drafts else []
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_sglang_tells_beside_the_answer(target_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with standing_in(drafts=True) as url:
        pair = EndpointPair(str(target_dir), f"{url}/v1/")
        assert (pair.block_size, pair.context_limit, pair.decodes_plainly) == (4, 64, False)
        assert pair.where == f"{url}, sglang 0.5.23"
        answer = pair.decode([1, 2], SamplingParams(max_tokens=5), draft=True)
        assert answer.steps == [Step(3, 2, (6, 7, 8)), Step(3, 0, (9,))] and answer.finish_reason == "length"
        assert pair.regret([1, 2], 9) == 1.5, "without a bias, which SGLang adds before it takes log-probabilities"
    with standing_in(drafts=False) as url, pytest.raises(Exception, match="speculative-algorithm DFLASH"):
        EndpointPair(str(target_dir), url)
