"""A server that tells what became of its drafts, as a pair that is measured: vLLM, SGLang, dflash-serve.

Prompts go to /v1/completions as token ids, one request at a time or several, so that engines are asked the same. What a
request's drafts became is read where the server says it:

- dflash-serve tells of every step where `stream_options` have `include_dflash`;
- vLLM adds `metrics.speculative_decoding` to the usage of a response, if it was started with
  `--per-request-spec-decode-metrics detailed` (every step) or `summary` (counts);
- SGLang adds `sglext.spec_tokens_details` to a response that asks for it (`return_spec_tokens_details`): counts;
- vLLM else counts in /metrics (`vllm:spec_decode_num_drafts`, ..._num_accepted_tokens_per_pos): between two requests
  the counters have moved by what one request did, so nobody else may use the server meanwhile, and of several requests
  at a time only their sum is known.

Where there are counts a chunk of the stream is a step as long as there are as many chunks as steps. A server that joins
chunks leaves the counts: then the steps of an answer are right, their order is not known.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

from ...config import UserError
from ...fingerprint import template_digest
from ...generation import FinishReason, Generation, Step
from ...models.target import context_limit, load_config, load_tokenizer
from ...sampling import SamplingParams
from .decoders import EngineDecoder, OnStep, Pair, ReferenceDecoder, ThreadedDecoder

TIMEOUT_S = 600.0  # for a response
SETTLED_S = 5.0  # for counters to have what a response did
STILL_S = 0.2
UNKNOWN = 1 << 16  # a block size, before the first drafts
COUNTER = re.compile(r"^(vllm:spec_decode_num_\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.M)
POSITION = re.compile(r'position="(\d+)"')
OURS = "dflash-toolkit"  # owns the models of dflash-serve
WAYS = {
    "vllm": "start it with --speculative-config",
    "sglang": "start it with --speculative-algorithm DFLASH",
    OURS: "start it with --drafter",
}  # to a server that drafts, by what /v1/models says who owns the model
ASKED = {OURS: "include_dflash", "vllm": "include_usage"}  # for what became of drafts
CERTAIN = -1e-6  # a log-probability that only a biased token has, of two that a target confuses
PROBE = SamplingParams(max_tokens=24, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of the drafts of one request, or of all up to now."""

    steps: int
    drafted: int
    reached: tuple[int, ...]  # by slot, steps that accepted the draft in it

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Drafts":
        drafted = [step for step in steps if step.drafted]
        longest = max((step.drafted for step in drafted), default=0)
        reached = tuple(sum(step.accepted > slot for step in drafted) for slot in range(longest))
        return cls(len(drafted), sum(step.drafted for step in drafted), reached)

    def since(self, before: "Drafts") -> "Drafts":
        # positions appear with the first draft that has them
        reached = tuple(now - then for now, then in zip_longest(self.reached, before.reached, fillvalue=0))
        return Drafts(self.steps - before.steps, self.drafted - before.drafted, reached)

    @property
    def accepted(self) -> int:
        return sum(self.reached)

    def lengths(self) -> list[int]:
        """Accepted drafts of each step, in ascending order, which need not be theirs."""
        exactly = [a - b for a, b in zip((self.steps, *self.reached), (*self.reached, 0), strict=True)]
        return [length for length, steps in enumerate(exactly) for _ in range(steps)]


class Server:
    """One endpoint, its model and what it tells.

    Args:
        url: with or without the closing /v1. OPENAI_API_KEY goes along.
        model: None takes the only one it has.

    Raises:
        UserError: it does not answer, or has no such model.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"endpoint {url}: expected http://HOST:PORT")
        self.url = re.sub(r"/v1/?$", "", url).rstrip("/")
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=headers, limits=httpx.Limits(max_connections=None))
        try:
            models = self._get("/v1/models").json()["data"]
            names = [each["id"] for each in models]
            if (model or len(names) > 1) and model not in names:
                raise UserError(f"endpoint {self.shown} has {', '.join(names)}; name one with --served-model-name")
            found = next(each for each in models if model in (None, each["id"]))
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise UserError(f"endpoint {self.shown}: not the reply of /v1/models ({error!r})") from error
        self.model, self.owner = found["id"], str(found.get("owned_by", ""))
        self.max_model_len: int | None = found.get("max_model_len")
        # others decode a seed otherwise with drafts than without
        self.repeats_plain = self.owner == OURS and found.get("draft_sample_method") == "greedy"
        self.longest_draft: int = found.get("num_speculative_tokens", 0)  # dflash-serve, which drafts as it pays

    @property
    def shown(self) -> str:
        """Its address without what a report must not have."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def _get(self, path: str) -> httpx.Response:
        try:
            response = self._http.get(self.url + path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"endpoint {self.shown}: no answer ({error or type(error).__name__})") from error
        if response.status_code != 200:
            raise UserError(f"endpoint {self.shown}{path}: HTTP {response.status_code}")
        return response

    def counters(self) -> Drafts | None:
        """Of all requests up to now; None if there is no such page, or it counts no drafts."""
        try:
            text = self._get("/metrics").text
        except UserError:
            return None
        return read_counters(text)

    def version(self) -> str:
        for path in ("/version", "/server_info"):
            try:
                return f"{self.owner} {self._get(path).json()['version']}"
            except (UserError, ValueError, LookupError, TypeError):
                continue
        return self.owner

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion. Raises UserError."""
        body = {"model": self.model, "stream": True, "return_token_ids": True, **body}
        if self.owner == "sglang":
            body["return_spec_tokens_details"] = True
        if self.owner in ASKED:
            body["stream_options"] = {ASKED[self.owner]: True}
        try:
            with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    said = " ".join(response.text.split())[:300]
                    raise UserError(f"endpoint {self.shown}: HTTP {response.status_code}: {said}")
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise UserError(f"endpoint {self.shown}: {event['error']}")
                        for choice in event.get("choices", ()):
                            if choice.get("finish_reason") not in (None, "stop", "length"):
                                raise UserError(f"endpoint {self.shown} ended an answer: {choice['finish_reason']}")
                        yield event
        except httpx.HTTPError as error:
            raise UserError(f"endpoint {self.shown}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise UserError(f"endpoint {self.shown}: no stream of completions ({error})") from error

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A whole reply. Raises UserError."""
        try:
            response = self._http.post(self.url + path, json={"model": self.model, **body})
            response.raise_for_status()
            found: dict[str, Any] = response.json()
            return found
        except (httpx.HTTPError, ValueError) as error:
            raise UserError(f"endpoint {self.shown}: {error}") from error


def read_counters(text: str) -> Drafts | None:
    """The counters of a page of metrics; None if it has none of drafts."""
    totals: dict[str, float] = {}
    reached: dict[int, float] = {}
    for name, labels, value in COUNTER.findall(text):
        if name.endswith("_per_pos"):
            if position := POSITION.search(labels):
                reached[int(position[1])] = reached.get(int(position[1]), 0.0) + float(value)
        else:
            totals[name] = totals.get(name, 0.0) + float(value)  # of all engines behind it
    try:
        steps, drafted = (int(totals[f"vllm:spec_decode_num_{what}"]) for what in ("drafts", "draft_tokens"))
    except LookupError:
        return None
    return Drafts(steps, drafted, tuple(int(reached.get(i, 0.0)) for i in range(max(reached, default=-1) + 1)))


class EndpointPair(Pair):
    """A served target and its drafter.

    Args:
        target: of the tokenizer, and of the config if the server does not say how long its contexts are.
        plain: another server of the target, without a drafter; dflash-serve needs none.
        concurrency: requests that a report has in flight.

    Raises:
        UserError: a server does not answer, or does not tell what became of its drafts, or of those of one request.
    """

    name = "endpoint"

    def __init__(
        self, target: str, url: str, model: str | None = None, plain: str | None = None, concurrency: int = 1
    ) -> None:
        self._server = Server(url, model)
        self._tells = False  # beside an answer, what became of its drafts
        self.tokenizer = load_tokenizer(target)
        config = load_config(target)
        self.context_limit = min(self._server.max_model_len or 1 << 62, context_limit(config))
        self.vocabulary = config.get_text_config(decoder=True).vocab_size
        self.device, self.dtype, self.draft_sample_method = torch.device("cpu"), torch.float32, "greedy"
        self._plain: Callable[..., Iterator[dict[str, Any]]] | None = None
        other = None if plain is None else Server(plain, model)
        if other is not None:
            self._plain = other.stream
        # whoever decodes plainly must draw as the drafting one does
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
        if concurrency > 1 and not self._tells:
            way = "start it with --per-request-spec-decode-metrics detailed, or " * (self._server.owner == "vllm")
            raise UserError(
                f"max_concurrency is {concurrency}, but endpoint {self._server.shown} counts the drafts of all "
                f"requests together, so acceptance by request, its mean and its intervals would be missing; {way}"
                f"leave it out (--concurrency measures pooled acceptance under load)"
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

    @property
    def decodes_plainly(self) -> bool:
        """Whether there is something to be faster than."""
        return self._plain is not None

    def repeats_plain(self, params: SamplingParams) -> bool:
        return params.temperature == 0.0 or self._repeats

    def decoder(self, draft: bool) -> EngineDecoder | ReferenceDecoder:
        raise UserError("an endpoint decodes one request at a time")

    def decoder_for(self, draft: bool, concurrency: int) -> ThreadedDecoder:
        return ThreadedDecoder(self._among if draft else self._plainly, concurrency)

    def counted(self) -> Drafts | None:
        time.sleep(STILL_S)  # what was asked before has been counted then
        return self._server.counters()

    def steps_since(self, before: Drafts | None, answers: Sequence[Generation]) -> int:
        """By the responses, or by the server's counters where those do not tell."""
        if any(answer.steps for answer in answers):
            return super().steps_since(before, answers)
        committed = sum(len(answer.tokens) - 1 for answer in answers)
        drafts = self._told(before, committed)
        if not drafts.steps:
            return 0  # nothing was told
        return drafts.steps + max(committed - drafts.steps - drafts.accepted, 0)  # and those without a draft

    def _among(self, prompt_ids: list[int], params: SamplingParams, on_step: OnStep | None) -> Generation:
        """One answer among others, with its steps where the response tells them."""
        if self._tells:
            return self._drafted(prompt_ids, params, on_step)[0]
        return _read(self._server.stream(_body(prompt_ids, params)), on_step)[0]

    def _plainly(self, prompt_ids: list[int], params: SamplingParams, on_step: OnStep | None) -> Generation:
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
        before = None if self._tells else self._server.counters()
        answer, chunks, details = _read(self._server.stream(_body(prompt_ids, params)), on_step)
        if not answer.tokens:
            raise UserError(f"endpoint {self._server.shown}: it does not return token ids (return_token_ids)")
        tokens = answer.tokens[1:]  # the first token comes from the prefill
        told = told_drafts(details)
        self._tells = self._tells or bool(told or details.get("steps"))
        steps = details["steps"][1:] if details.get("steps") else _listed(details, len(tokens))
        if steps:
            answer.steps = exact_steps(tokens, steps)
            drafts = told or Drafts.of(answer.steps)
        else:
            drafts = told or self._told(before, len(tokens))
            behind = [size for size in (chunks[0] - 1, *chunks[1:]) if size]
            answer.steps = steps_of(tokens, behind, drafts, self.block_size - 1)
        if tokens and not drafts.steps and self.block_size == UNKNOWN:
            way = WAYS.get(self._server.owner, "vLLM, SGLang and dflash-serve do, with a drafter")
            raise UserError(
                f"endpoint {self._server.shown} does not tell what became of drafts, in /metrics or a response, so "
                f"acceptance length, acceptance by position and accepted lengths would be missing; {way}"
            )
        return answer, drafts

    def _told(self, before: Drafts | None, committed: int) -> Drafts:
        """By the server's counters, once they have what was committed."""
        deadline = time.monotonic() + SETTLED_S
        drafts, since = Drafts(0, 0, ()), None
        while before is not None and (now := self._server.counters()) is not None:
            drafts, last = now.since(before), drafts
            if drafts.steps + drafts.accepted >= committed:
                break
            # steps without a draft are not counted: what has not moved for a while has been counted
            since = since if drafts == last else None
            since = since or time.monotonic()
            if time.monotonic() > min(deadline, since + STILL_S):
                break
            time.sleep(0.02)
        return drafts

    def regret(self, ids: list[int], token: int) -> float:
        """Of `token` behind `ids`, in nats; nan where the server does not tell."""
        try:
            if self._server.owner == "sglang":  # adds a bias before it takes log-probabilities, so is asked by id
                greedy = {"max_new_tokens": 1, "temperature": 0.0}
                asked = {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [token]}
                told = self._server.post("/generate", {"input_ids": ids, "sampling_params": greedy, **asked})
                told = told["meta_info"]
                return float(told["output_top_logprobs"][0][0][0] - told["output_token_ids_logprobs"][0][0][0])
            body = _body(ids, SamplingParams(max_tokens=1)) | {"logit_bias": {str(token): 100}, "logprobs": 1}
            told = self._server.post("/v1/completions", body)["choices"][0]["logprobs"]
            best, found = max(told["top_logprobs"][0].values()), told["token_logprobs"][0]
        except (LookupError, TypeError, ValueError):
            return float("nan")
        # certain by the bias: vLLM with --logprobs-mode processed_logprobs tells nothing about the target
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
    """The answer without its steps, the tokens of every chunk, and what the server tells beside: `steps` of ours, or
    the details of SGLang or vLLM."""
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


def told_drafts(details: dict[str, Any]) -> Drafts | None:
    """What SGLang or vLLM counts of one request; None if it does not."""
    names = ("spec_correct_drafts_histogram", "spec_num_proposed_drafts"), ("acceptance_histogram", "num_draft_tokens")
    for histogram, drafted in names:
        if told := details.get(histogram):
            return Drafts(sum(told), details[drafted], tuple(sum(told[length:]) for length in range(1, len(told))))
    return None


def _listed(details: dict[str, Any], committed: int) -> list[dict[str, Any]]:
    """The steps that vLLM lists, in the form of ours; none where some are missing, for they had no draft."""
    told = zip(details.get("per_step_drafted") or (), details.get("per_step_accepted") or (), strict=True)
    steps = [{"drafted": drafted, "accepted": accepted, "tokens": accepted + 1} for drafted, accepted in told]
    return steps if sum(step["tokens"] for step in steps) >= committed else []


def exact_steps(tokens: Sequence[int], told: Sequence[dict[str, Any]]) -> list[Step]:
    """The steps that committed `tokens`, as dflash-serve tells them; a stop string may end the answer within one."""
    found, start = [], 0
    for each in told:
        committed = tuple(tokens[start : start + each["tokens"]])
        start += each["tokens"]
        found.append(Step(each["drafted"], min(each["accepted"], len(committed)), committed))
    return [step for step in found if step.tokens]


def steps_of(tokens: Sequence[int], chunks: Sequence[int], drafts: Drafts, longest: int) -> list[Step]:
    """The steps that committed `tokens`, which came in `chunks`; see the head of this module.

    The last step's drafts may go on behind the answer's end; as in our reports, those do not count as accepted.
    """
    undrafted = max(len(tokens) - drafts.steps - drafts.accepted, 0)  # steps that had no draft, of one token
    in_order = len(chunks) == drafts.steps + undrafted and all(size - 1 <= longest for size in chunks)
    sizes = list(chunks) if in_order else [length + 1 for length in (*[0] * undrafted, *drafts.lengths())]
    cut = drafts.accepted - sum(size - 1 for size in sizes)  # accepted drafts beyond what the chunks show
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
