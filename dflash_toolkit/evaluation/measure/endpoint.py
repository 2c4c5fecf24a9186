"""Measures a server that reports its drafts: vLLM, SGLang or dflash-serve.

Prompts are sent to /v1/completions as token ids, so every engine decodes the same. The drafts of a request are read
from what the server reports:

- dflash-serve reports every step if `stream_options` contains `include_dflash`.
- vLLM adds `metrics.speculative_decoding` to the usage of a response if it was started with
  `--per-request-spec-decode-metrics detailed` (every step) or `summary` (counts).
- SGLang adds `sglext.spec_tokens_details` (counts) to a response if the request sets `return_spec_tokens_details`.
- Otherwise vLLM counts in /metrics (`vllm:spec_decode_num_drafts`, ..._num_accepted_tokens_per_pos). The change of the
  counters between two requests belongs to one request, so no other client may use the server at that time. For
  concurrent requests only the sum is known.

With counts, a chunk of the stream is a step if there are as many chunks as steps. If a server joins chunks, only the
counts are left: the steps of an answer are right, but their order is unknown.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ...config import UserError
from ...fingerprint import template_digest
from ...generation import FinishReason, Generation, Step
from ...models.spec import context_limit
from ...models.target_files import load_config, load_tokenizer
from ...openai_http import TryAgainError, base_url, find_model, open_reply, request_json, stream_json, without_login
from ...sampling import SamplingParams
from .decoders import EngineDecoder, OnStep, ReferenceDecoder, ThreadedDecoder
from .pairs import Pair

TIMEOUT_S = 600.0  # without a byte from the server
SETTLE_S = 5.0  # longest wait until the counters include a response
STILL_S = 0.2  # counters that did not change for this long include it
UNKNOWN = 1 << 16  # the block size before the first drafts
COUNTER = re.compile(r"^(vllm:spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.M)
POSITION = re.compile(r'position="(\d+)"')
OURS = "dflash-toolkit"  # `owned_by` of dflash-serve's models
START_OPTIONS = {  # options that make a server draft, by `owned_by` of its models
    "vllm": "start it with --speculative-config",
    "sglang": "start it with --speculative-algorithm DFLASH",
    OURS: "start it with --drafter",
}
STREAM_OPTIONS = {OURS: "include_dflash", "vllm": "include_usage"}  # options that make a server report drafts
CERTAIN = -1e-6  # a log-probability above this comes from a bias
PROBE = SamplingParams(max_tokens=24, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts of drafts of one request, or of all requests of a server."""

    steps: int
    drafted: int
    reached: tuple[int, ...]  # steps that accepted the draft in each slot

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Drafts":
        drafted = [step for step in steps if step.drafted]
        longest = max((step.drafted for step in drafted), default=0)
        reached = tuple(sum(step.accepted > slot for step in drafted) for slot in range(longest))
        return cls(len(drafted), sum(step.drafted for step in drafted), reached)

    def since(self, before: "Drafts") -> "Drafts":
        # a server lists a position once a draft has reached it
        reached = tuple(now - then for now, then in zip_longest(self.reached, before.reached, fillvalue=0))
        return Drafts(self.steps - before.steps, self.drafted - before.drafted, reached)

    @property
    def accepted(self) -> int:
        return sum(self.reached)

    def lengths(self) -> list[int]:
        """Returns the number of accepted drafts of each step, in ascending order instead of the order of the steps."""
        exactly = [a - b for a, b in zip((self.steps, *self.reached), (*self.reached, 0), strict=True)]
        return [length for length, steps in enumerate(exactly) for _ in range(steps)]


class Server:
    """One endpoint and its model.

    Args:
        url: with or without the trailing /v1. Requests carry OPENAI_API_KEY.
        model: None selects the only model of the server.

    Raises:
        UserError: the server does not answer, or does not have the model.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = base_url(url).removesuffix("/v1")
        self.shown = without_login(self.url)
        card = find_model(url, model, TIMEOUT_S, "--served-model-name NAME")
        self.model, self.owner = card["id"], str(card.get("owned_by", ""))
        self.max_model_len: int | None = card.get("max_model_len")
        # in other servers a seed gives other tokens with drafts than without
        self.repeats_plain = self.owner == OURS and card.get("draft_sample_method") == "greedy"
        self.kv_cache_dtype = card.get("kv_cache_dtype", "auto")  # from dflash-serve
        self.longest_draft: int = card.get("num_speculative_tokens", 0)  # from dflash-serve, which varies the length

    @contextlib.contextmanager
    def _one_attempt(self) -> Iterator[None]:
        try:
            yield
        except TryAgainError as error:
            raise UserError(f"endpoint {self.shown}: {error}") from error

    def counters(self) -> Drafts | None:
        """Returns the counts of all requests so far; None if the server does not count drafts in /metrics."""
        try:
            with self._one_attempt(), open_reply(f"{self.url}/metrics", TIMEOUT_S) as response:
                text = response.read().decode(errors="replace")
        except UserError:
            return None
        return read_counters(text)

    def version(self) -> str:
        for path in ("/version", "/server_info"):
            with contextlib.suppress(UserError, LookupError), self._one_attempt():
                return f"{self.owner} {request_json(self.url + path, TIMEOUT_S)['version']}"
        return self.owner

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of a streamed completion. Raises UserError."""
        body = {"model": self.model, "stream": True, "return_token_ids": True, **body}
        if self.owner == "sglang":
            body["return_spec_tokens_details"] = True
        if self.owner in STREAM_OPTIONS:
            body["stream_options"] = {STREAM_OPTIONS[self.owner]: True}
        with self._one_attempt():
            for event in stream_json(f"{self.url}/v1/completions", TIMEOUT_S, body):
                if "error" in event:
                    raise UserError(f"endpoint {self.shown}: {event['error']}")
                for choice in event.get("choices", ()):
                    if choice.get("finish_reason") not in (None, "stop", "length"):
                        raise UserError(f"endpoint {self.shown} ended an answer: {choice['finish_reason']}")
                yield event

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the reply as a whole. Raises UserError."""
        with self._one_attempt():
            return request_json(self.url + path, TIMEOUT_S, {"model": self.model, **body})


def read_counters(text: str) -> Drafts | None:
    """Returns the draft counters of a page of metrics, summed over engines; None if it has no such counters."""
    totals: dict[str, float] = {}
    reached: dict[int, float] = {}
    for name, labels, value in COUNTER.findall(text):
        if name.endswith("_per_pos"):
            if position := POSITION.search(labels):
                reached[int(position[1])] = reached.get(int(position[1]), 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)
    try:
        steps, drafted = (int(totals[f"vllm:spec_decode_num_{what}"]) for what in ("drafts", "draft_tokens"))
    except LookupError:
        return None
    return Drafts(steps, drafted, tuple(int(reached.get(i, 0.0)) for i in range(max(reached, default=-1) + 1)))


class EndpointPair(Pair):
    """A served target and its drafter.

    Args:
        target: its tokenizer is used, and its config if the server does not report the context length.
        plain: another server of the target, without a drafter; not needed for dflash-serve.
        concurrency: number of concurrent requests of a report.
        tokenizer: the target's, with the template of prompts (default: loaded).

    Raises:
        UserError: a server does not answer, or does not report drafts, or not per request although `concurrency` is
            above 1.
    """

    name = "endpoint"

    def __init__(
        self,
        target: str,
        url: str,
        model: str | None = None,
        plain: str | None = None,
        concurrency: int = 1,
        tokenizer: Any = None,
    ) -> None:
        self._server = Server(url, model)
        self._reports_drafts = False  # in responses, not only in /metrics
        self.tokenizer = tokenizer or load_tokenizer(target)
        config = load_config(target)
        self.context_limit = min(self._server.max_model_len or 1 << 62, context_limit(config))
        self.vocabulary = config.get_text_config(decoder=True).vocab_size
        self.device, self.dtype, self.draft_sample_method = torch.device("cpu"), torch.float32, "greedy"
        self._plain: Callable[..., Iterator[dict[str, Any]]] | None = None
        other = None if plain is None else Server(plain, model)
        if other is not None:
            self._plain = other.stream
        # plain decoding must sample as drafting does
        self._repeats = self._server.repeats_plain and (other is None or other.owner == OURS)
        if other is None and self._server.owner == OURS:
            off = {"speculative": {"num_speculative_tokens": 0}}
            self._plain = lambda body: self._server.stream(body | off)
        prompt = self.tokenizer("Once upon a time").input_ids
        self.block_size = UNKNOWN
        _, drafts = self._drafted(prompt, PROBE, None)
        drafted = -(-drafts.drafted // max(drafts.steps, 1))
        self.block_size = 1 + max(len(drafts.reached), drafted, self._server.longest_draft)
        self.concurrency = concurrency
        if concurrency > 1 and not self._reports_drafts:
            vllm = "start it with --per-request-spec-decode-metrics detailed, or " * (self._server.owner == "vllm")
            raise UserError(
                f"max_concurrency is {concurrency}, but endpoint {self._server.shown} counts the drafts of all "
                f"requests together, so acceptance by request, its mean and its intervals would be missing; {vllm}"
                f"remove --max-concurrency (--concurrency measures pooled acceptance under load)"
            )
        self.where = f"{self._server.shown}, {self._server.version()}"
        self.facts = {
            "target": target,
            "served_model": self._server.model,
            "endpoint": self.where,
            "plain_endpoint": None if other is None else other.shown,
            "max_concurrency": concurrency,
            "chat_template_sha256": template_digest(self.tokenizer),
            "drafter_kind": None,
            "block_size": self.block_size,
            "draft_sample_method": None,
        }
        if self._server.kv_cache_dtype != "auto":
            self.facts["kv_cache_dtype"] = self._server.kv_cache_dtype

    @property
    def decodes_plainly(self) -> bool:
        """Whether plain decoding can be measured too."""
        return self._plain is not None

    def repeats_plain(self, params: SamplingParams) -> bool:
        return params.temperature == 0.0 or self._repeats

    def decoder(self, draft: bool) -> EngineDecoder | ReferenceDecoder:
        raise UserError("an endpoint has no decoder in this process")

    def decoder_for(self, draft: bool, concurrency: int) -> ThreadedDecoder:
        return ThreadedDecoder(self._decode_concurrently if draft else self._decode_plainly, concurrency)

    def counted(self) -> Drafts | None:
        time.sleep(STILL_S)  # until earlier requests are counted
        return self._server.counters()

    def steps_since(self, before: Drafts | None, answers: Sequence[Generation]) -> int:
        """Counts steps in the responses, or else in the server's counters."""
        if any(answer.steps for answer in answers):
            return super().steps_since(before, answers)
        committed = sum(len(answer.tokens) - 1 for answer in answers)
        drafts = self._counted_since(before, committed)
        if not drafts.steps:
            return 0  # the server counts nothing
        return drafts.steps + max(committed - drafts.steps - drafts.accepted, 0)  # the rest are steps without a draft

    def _decode_concurrently(self, prompt_ids: list[int], params: SamplingParams, on_step: OnStep | None) -> Generation:
        """Returns one of several answers in flight, with its steps if the response reports them."""
        if self._reports_drafts:
            return self._drafted(prompt_ids, params, on_step)[0]
        return _read(self._server.stream(_body(prompt_ids, params)), on_step)[0]

    def _decode_plainly(self, prompt_ids: list[int], params: SamplingParams, on_step: OnStep | None) -> Generation:
        return self.decode(prompt_ids, params, draft=False, on_step=on_step)

    def decode(
        self, prompt_ids: list[int], params: SamplingParams, *, draft: bool, on_step: OnStep | None = None
    ) -> Generation:
        if draft:
            return self._drafted(prompt_ids, params, on_step)[0]
        assert self._plain is not None
        answer, _, _ = _read(self._plain(_body(prompt_ids, params)), on_step)
        answer.steps = [Step(0, 0, (token,)) for token in answer.tokens[1:]]
        return answer

    def _drafted(
        self, prompt_ids: list[int], params: SamplingParams, on_step: OnStep | None
    ) -> tuple[Generation, Drafts]:
        before = None if self._reports_drafts else self._server.counters()
        answer, chunks, details = _read(self._server.stream(_body(prompt_ids, params)), on_step)
        if not answer.tokens:
            raise UserError(f"endpoint {self._server.shown}: it does not return token ids (return_token_ids)")
        tokens = answer.tokens[1:]  # the first token comes from the prefill
        counts = request_counts(details)
        self._reports_drafts = self._reports_drafts or bool(counts or details.get("steps"))
        steps = details["steps"][1:] if details.get("steps") else _listed(details, len(tokens))
        if steps:
            answer.steps = exact_steps(tokens, steps)
            drafts = counts or Drafts.of(answer.steps)
        else:
            drafts = counts or self._counted_since(before, len(tokens))
            sizes = [size for size in (chunks[0] - 1, *chunks[1:]) if size]
            answer.steps = steps_of(tokens, sizes, drafts, self.block_size - 1)
        if tokens and not drafts.steps and self.block_size == UNKNOWN:
            way = START_OPTIONS.get(self._server.owner, "vLLM, SGLang and dflash-serve report them, with a drafter")
            raise UserError(
                f"endpoint {self._server.shown} does not report drafts, in /metrics or in a response, so acceptance "
                f"length, acceptance by position and accepted lengths would be missing; {way}"
            )
        return answer, drafts

    def _counted_since(self, before: Drafts | None, committed: int) -> Drafts:
        """Returns the change of the server's counters, once they include `committed` tokens."""
        deadline = time.monotonic() + SETTLE_S
        drafts, since = Drafts(0, 0, ()), None
        while before is not None and (now := self._server.counters()) is not None:
            drafts, last = now.since(before), drafts
            if drafts.steps + drafts.accepted >= committed:
                break
            # steps without a draft are not counted, so counters that no longer change are complete
            since = since if drafts == last else None
            since = since or time.monotonic()
            if time.monotonic() > min(deadline, since + STILL_S):
                break
            time.sleep(0.02)
        return drafts

    def regret(self, ids: list[int], token: int) -> float:
        """As `Pair.regret`; nan if the server does not report log-probabilities of the target."""
        try:
            if self._server.owner == "sglang":  # its log-probabilities include the bias
                greedy = {"max_new_tokens": 1, "temperature": 0.0}
                wanted = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [token]}
                reply = self._server.post("/generate", {"input_ids": ids, "sampling_params": greedy, **wanted})
                meta = reply["meta_info"]
                return float(meta["output_top_logprobs"][0][0][0] - meta["output_token_ids_logprobs"][0][0][0])
            body = _body(ids, SamplingParams(max_tokens=1)) | {"logit_bias": {str(token): 100}, "logprobs": 1}
            logprobs = self._server.post("/v1/completions", body)["choices"][0]["logprobs"]
            best, found = max(logprobs["top_logprobs"][0].values()), logprobs["token_logprobs"][0]
        except (LookupError, TypeError, ValueError):
            return float("nan")
        # vLLM with --logprobs-mode processed_logprobs includes the bias
        return float("nan") if found > CERTAIN else float(best - found)


def _body(prompt_ids: list[int], params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    body: dict[str, Any] = {
        "prompt": prompt_ids,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
    }
    for name in ("top_p", "top_k", "min_p"):
        if getattr(params, name) != getattr(default, name):
            body[name] = getattr(params, name)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    return body


def _read(events: Iterator[dict[str, Any]], on_step: OnStep | None) -> tuple[Generation, list[int], dict[str, Any]]:
    """Returns the answer without its steps, the number of tokens of each chunk, and what the server reports: `steps`
    of dflash-serve, or the details of SGLang or vLLM."""
    answer = Generation()
    chunks: list[int] = []
    details: dict[str, Any] = {}
    first = last = began = time.perf_counter()
    for event in events:
        details |= (event.get("sglext") or {}).get("spec_tokens_details") or {}
        details |= (event.get("metrics") or {}).get("speculative_decoding") or {}
        for choice in event.get("choices", ()):
            details.setdefault("steps", []).extend(choice.get("dflash", ()))
            reason: FinishReason | None = choice.get("finish_reason")
            answer.finish_reason = reason or answer.finish_reason
            if ids := choice.get("token_ids"):
                last = time.perf_counter()
                first = first if chunks else last
                answer.tokens += ids
                chunks.append(len(ids))
                if on_step:
                    on_step(answer)
    answer.prefill_s, answer.decode_s = first - began, last - first
    return answer, chunks, details


def request_counts(details: dict[str, Any]) -> Drafts | None:
    """Returns the counts that SGLang or vLLM reports for one request; None if there are none."""
    names = ("spec_correct_drafts_histogram", "spec_num_proposed_drafts"), ("acceptance_histogram", "num_draft_tokens")
    for histogram, drafted in names:
        if steps := details.get(histogram):
            return Drafts(sum(steps), details[drafted], tuple(sum(steps[length:]) for length in range(1, len(steps))))
    return None


def _listed(details: dict[str, Any], committed: int) -> list[dict[str, Any]]:
    """Returns the steps that vLLM lists, in dflash-serve's form; none if it leaves out steps without a draft."""
    listed = zip(details.get("per_step_drafted") or (), details.get("per_step_accepted") or (), strict=True)
    steps = [{"drafted": drafted, "accepted": accepted, "tokens": accepted + 1} for drafted, accepted in listed]
    return steps if sum(step["tokens"] for step in steps) >= committed else []


def exact_steps(tokens: Sequence[int], reported: Sequence[dict[str, Any]]) -> list[Step]:
    """Returns the steps that committed `tokens`, as dflash-serve reports them. A stop string may end within a step."""
    found, start = [], 0
    for each in reported:
        committed = tuple(tokens[start : start + each["tokens"]])
        start += each["tokens"]
        found.append(Step(each["drafted"], min(each["accepted"], len(committed)), committed))
    return [step for step in found if step.tokens]


def steps_of(tokens: Sequence[int], chunks: Sequence[int], drafts: Drafts, longest: int) -> list[Step]:
    """Returns the steps that committed `tokens`, which came in `chunks` (sizes); see the top of this module.

    Drafts of the last step beyond the end of the answer do not count as accepted, as in all reports.
    """
    undrafted = max(len(tokens) - drafts.steps - drafts.accepted, 0)  # steps without a draft commit one token
    in_order = len(chunks) == drafts.steps + undrafted and all(size - 1 <= longest for size in chunks)
    sizes = list(chunks) if in_order else [length + 1 for length in (*[0] * undrafted, *drafts.lengths())]
    cut = drafts.accepted - sum(size - 1 for size in sizes)  # accepted drafts beyond the end
    each = -(-drafts.drafted // max(drafts.steps, 1))
    found: list[Step] = []
    start = 0
    for number, size in enumerate(sizes):
        committed = tuple(tokens[start : start + size])
        start += size
        if not committed:
            break
        accepted = min(size - 1 + (cut > 0 and number == len(sizes) - 1), len(committed))
        found.append(Step(each, accepted, committed))
    return found
