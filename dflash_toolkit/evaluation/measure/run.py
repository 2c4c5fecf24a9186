"""Measures prompt sets with a pair and keeps finished measurements."""

import contextlib
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ...config import UserError
from ...files import finite
from ...fingerprint import json_digest
from ...generation import Generation, PromptError, check_prompt
from ...sampling import SamplingParams
from ..report.results import Environment, Report, Section, Summary, noise
from ..stats.paired import tau_over
from .decoders import Response, ThreadedDecoder
from .distribution import SUSPICIOUS, distribution_test
from .drafting import advice_text, drafting_advice, drafting_points
from .journal import Journal, generation_of
from .lengthen import lengthened
from .measurement import EncodedPrompt, Measurement, Watched, gaps_of, joined, measure, noting, prompts_digest
from .meter import Meter
from .pairs import Pair
from .recall import draft_recall
from .sweeps import Sweeps, chosen, load_point, recommendation

WARM_UP_TOKENS = 8
ROUND = 8  # prompts per round, as a multiple of the concurrency; the load drops at the end of a round


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling parameters, and the prompt sets encoded for them."""

    sets: Mapping[str, Sequence[EncodedPrompt]]  # by name; neither empty nor with empty sets
    params: SamplingParams
    thinking: bool | None = None  # passed to the chat template


def evaluate(
    pair: Pair,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    params: SamplingParams | None = None,
    **more: Any,
) -> Report:
    """Measures prompt sets with one setting, see `evaluate_all`."""
    return evaluate_all(pair, [Setting(sets, params or SamplingParams())], **more)


def evaluate_all(
    pair: Pair,
    settings: Sequence[Setting],
    *,
    baseline: bool = True,
    arguments: Mapping[str, Any] | None = None,
    sweeps: Sweeps | None = None,
    recall: bool = False,
    distribution_samples: int = 0,
    partial: Path | None = None,
    show_progress: bool = False,
) -> Report:
    """Decodes every prompt in every setting with the drafter and, with `baseline`, also without it.

    The next turn of a conversation follows the drafted answer to the turn before.

    Args:
        settings: at least one; each becomes a section of the report.
        arguments: further JSON values for the report.
        sweeps: measured with prompts of the first setting.
        distribution_samples: number of answers per prompt for the distribution test of the first setting that samples;
            0 makes no test.
        recall: also rank tokens of some answers among the drafter's; the pair must have `modules`.
        partial: file that keeps finished requests. A later call reuses those with the same models, pair, prompt,
            sampling, machine and versions, including their times. The caller removes the file after it has written the
            report.

    Raises:
        UserError: there is nothing to decode, a prompt does not fit the target's context, or the disk is full.
    """
    for setting in settings:
        _check_prompts(pair, setting.sets)
    sweeps = sweeps or Sweeps()
    sweeps.check(pair, settings[0].params.max_tokens)
    contexts = _contexts(pair, settings[0], sweeps)
    environment = Environment.of(pair)
    journal = Journal(partial, environment.threads) if partial else None
    prompts = [prompt for setting in settings for found in setting.sets.values() for prompt in found]
    most = max(setting.params.max_tokens for setting in settings)
    longest = max(sweeps.context_length, default=0) + settings[0].params.max_tokens
    room = min(max(longest, *(_room(prompt, most) for prompt in prompts)), pair.context_limit)
    pair.make_room(room)
    turns = sum(1 + (len(prompt.rest.turns) if prompt.rest else 0) for prompt in prompts)
    places = chosen(settings[0].sets, sweeps.requests)
    longer = sum(map(len, contexts.values()))
    swept = len(places) * len(sweeps.draft_length) + longer + len(sweeps.concurrency)
    sampled = next((setting for setting in settings if setting.params.temperature > 0.0), None)
    swept += len(sweeps.drafting_loads) + recall + bool(distribution_samples and sampled)
    if baseline and pair.concurrency > 1:  # drafted and plain answers are separate units of progress
        swept += turns + longer
    meter = Meter(turns + swept) if show_progress else None
    decoding = _Decoding(pair, room, environment, baseline, journal, meter)
    with meter or contextlib.nullcontext():
        sections = tuple(
            Section.of(
                {name: decoding.conversations(found, setting.params) for name, found in setting.sets.items()},
                setting.params.temperature,
                setting.thinking,
                pair.block_size,
                pair.repeats_plain(setting.params),
            )
            for setting in settings
        )
        points = decoding.sweep(sweeps, settings[0], sections[0], places, contexts)
        tested = ranked = None
        if distribution_samples and sampled:
            some = [sampled.sets[name][i] for name, i in places]
            what = "distribution", distribution_samples, asdict(sampled.params), [prompt.token_ids for prompt in some]
            tested = decoding.point(what, lambda: distribution_test(pair, some, sampled.params, distribution_samples))
        if recall:
            modules = pair.modules
            assert modules is not None
            begun = {name: [m for m in found.measurements if m.turn == 1] for name, found in sections[0].sets.items()}
            texts = [(settings[0].sets[name][i].token_ids, begun[name][i].drafted.tokens) for name, i in places]
            ranked = decoding.point(("recall", texts), functools.partial(draft_recall, *modules, texts))
    noted = {**(arguments or {}), **_describe(pair, settings[0], baseline)}
    warnings = (*decoding.warnings(), *noise(sections))
    if tested and tested["p_value"] < SUSPICIOUS:
        warnings += (
            f"The distribution of sampled answers differs from that without the drafter: p = {tested['p_value']}.",
        )
    advice = recommendation(sections[0], points, pair.concurrency)
    if advice and "draft_tree" in points:
        drafting = drafting_advice(points["draft_tree"], serving_command(noted, arguments or {}))
        advice |= {"drafting": drafting, "reason": f"{advice['reason']} {advice_text(drafting)}"}
    return Report(environment, noted, sections, warnings, points, advice, ranked, tested)


class _Decoding:
    """Measures prompts and keeps finished measurements."""

    def __init__(
        self,
        pair: Pair,
        room: int,
        environment: Environment,
        baseline: bool,
        journal: Journal | None,
        meter: Meter | None,
    ) -> None:
        self._pair, self._room, self._baseline, self._journal, self._meter = pair, room, baseline, journal, meter
        machine = asdict(environment)
        for name in ("date", "threads"):  # do not invalidate a measurement
            del machine[name]
        self._same = [machine, pair.name]
        self._threads: set[int] = set()
        self._warm: tuple[int, bool] | None = None  # block size and baseline of the last warm-up

    def conversations(self, prompts: Iterable[EncodedPrompt], params: SamplingParams) -> list[Measurement]:
        """Measures all turns of every prompt."""
        found: list[Measurement] = []
        if self._pair.concurrency > 1:
            return self._concurrent_conversations(list(prompts), params)
        for first in prompts:
            prompt: EncodedPrompt | None = first
            while prompt is not None:
                found.append(self._measurement(prompt, params, self._baseline))
                prompt = self._next(prompt, found[-1].drafted)
        return found

    def _concurrent_conversations(self, prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[Measurement]:
        """Measures in rounds of concurrent requests: some prompts with drafts, then the same prompts plainly.

        Drafted and plain requests never run together, but at about the same time. Every answer is kept as soon as it
        is finished.
        """
        found: list[Measurement] = []
        size = ROUND * self._pair.concurrency
        for start in range(0, len(prompts), size):
            drafted = self._answers(list(enumerate(prompts[start : start + size])), params, True)
            turns = [both for place in sorted(drafted) for both in drafted[place]]
            asked = [(place, replace(prompt, rest=None)) for place, (prompt, _) in enumerate(turns)]
            plain = self._answers(asked, params, False) if self._baseline else {}
            found += [
                joined(self._pair, prompt, params, answer, plain[place][0][1] if plain else None)
                for place, (prompt, answer) in enumerate(turns)
            ]
        return found

    def _answers(
        self, prompts: Sequence[tuple[int, EncodedPrompt]], params: SamplingParams, draft: bool
    ) -> dict[int, list[tuple[EncodedPrompt, Watched]]]:
        """Returns the prompts of each conversation with their answers, by the number of the conversation."""
        pair, meter = self._pair, self._meter
        found: dict[int, list[tuple[EncodedPrompt, Watched]]] = {place: [] for place, _ in prompts}
        waiting = deque(prompts)
        running: dict[int, tuple[str, EncodedPrompt, list[float]]] = {}
        decoder = cast(ThreadedDecoder, pair.decoder_for(draft, pair.concurrency))

        def keep(place: int, prompt: EncodedPrompt, key: str, answer: Watched) -> None:
            found[place].append((prompt, answer))
            if self._journal:
                self._threads.add(self._journal.threads[key])
            if meter:
                meter.answered(answer[0] if draft else None)
            if following := self._next(prompt, answer[0]):
                waiting.append((place, following))

        def finish(response: Response) -> None:
            key, prompt, times = running.pop(response.key)
            gaps = gaps_of(times)
            if self._journal:
                point = {"answer": asdict(response.generation), "step_s": gaps}
                self._journal.append_point(key, finite(point))
            keep(response.key, prompt, key, (response.generation, gaps, None))

        try:
            while waiting or running:
                while waiting and len(running) < pair.concurrency:
                    place, prompt = waiting.popleft()
                    prompted = [prompt.turn, prompt.token_ids]
                    key = json_digest([self._same, pair.facts, "answer", draft, asdict(params), prompt.id, *prompted])
                    if self._journal and (kept := self._journal.points.get(key)):
                        keep(place, prompt, key, (generation_of(kept["answer"]), tuple(kept["step_s"]), None))
                        continue
                    if not self._warm:
                        _warm_up(pair, (True, False) if self._baseline else (True,), prompt, params)
                        self._warm = pair.block_size, self._baseline
                    times: list[float] = []
                    running[place] = key, prompt, times
                    on_step = noting(times, meter.step if meter and draft else None)
                    decoder.submit(place, prompt.token_ids, params, on_step=on_step)
                if running:
                    finish(decoder.wait())
        finally:
            for response in decoder.close():  # after an error, other requests may have finished
                finish(response)
        return found

    def _next(self, prompt: EncodedPrompt, drafted: Generation) -> EncodedPrompt | None:
        if prompt.rest is None:
            return None
        answer = self._pair.tokenizer.decode(drafted.tokens, skip_special_tokens=True)
        following = prompt.next(answer)
        if following is not None and len(following.token_ids) >= self._room:
            print(
                f"prompt {prompt.id!r}: skipped turn {following.turn}, which does not fit the context", file=sys.stderr
            )
            return None
        return following

    def sweep(
        self,
        sweeps: Sweeps,
        setting: Setting,
        section: Section,
        places: Sequence[tuple[str, int]],
        contexts: Mapping[int, Sequence[EncodedPrompt]],
    ) -> dict[str, list[dict[str, Any]]]:
        """Returns the points of every requested sweep, by name."""
        pair, params = self._pair, setting.params
        whole, repeats = pair.block_size, pair.repeats_plain(params)
        prompts = [setting.sets[name][i] for name, i in places]
        begun = {name: [m for m in found.measurements if m.turn == 1] for name, found in section.sets.items()}
        points: dict[str, list[dict[str, Any]]] = {}
        for length in sweeps.draft_length:
            pair.draft_at_most(length)
            drafted = [self._measurement(prompt, params, False) for prompt in prompts]
            plain = [begun[name][i] for name, i in places]
            both = [
                replace(m, plain=p.plain, plain_step_s=p.plain_step_s, plain_joules=p.plain_joules)
                for m, p in zip(drafted, plain, strict=True)
            ]
            figures = Summary.of(both, length + 1, repeats).to_json()
            points.setdefault("draft_length", []).append({"num_speculative_tokens": length, **figures})
        if sweeps.draft_length:
            pair.draft_at_most(whole - 1)
        shortest: list[Generation] = []
        for length, longer in contexts.items():
            found = self.conversations(longer, params)
            answers = [m.drafted for m in found]
            ratio, within = tau_over(shortest, answers, whole) if shortest else (1.0, None)
            shortest = shortest or answers
            figures = {"tau_over_shortest": ratio, "tau_over_shortest_ci95": within}
            figures |= Summary.of(found, whole, repeats).to_json()
            points.setdefault("context_length", []).append({"context_length": length, **figures})
        for concurrency in sweeps.concurrency:
            count = sweeps.at_concurrency(concurrency)
            ids = [prompt.token_ids for prompt in itertools.islice(itertools.cycle(prompts), count)]
            what = "under load", self._baseline, asdict(params), concurrency, ids
            on_step = self._meter.step if self._meter else None
            load = functools.partial(load_point, pair, ids, params, concurrency, self._baseline, on_step)
            points.setdefault("concurrency", []).append(self.point(what, load))
        for concurrency in sweeps.drafting_loads:
            ids = list(
                itertools.islice(itertools.cycle(p.token_ids for p in prompts), sweeps.at_concurrency(concurrency))
            )
            ways = "ways to draft", asdict(params), concurrency, sweeps.draft_tree_nodes, ids
            on_step = self._meter.step if self._meter else None
            how = pair, ids, params, concurrency, sweeps.draft_tree_nodes, on_step
            of_load = self.point(ways, functools.partial(_points, *how))
            points.setdefault("draft_tree", []).extend(of_load["points"])
        return points

    def point(self, what: Sequence[Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result of `measure`, or the kept one if `what` was measured before."""
        key = json_digest([self._same, self._pair.facts, *what])
        found = self._journal.points.get(key) if self._journal else None
        if found is None:
            found = finite(measure())
            if self._journal:
                self._journal.append_point(key, found)
        if self._journal:
            self._threads.add(self._journal.threads[key])
        if self._meter:
            self._meter.passed()
        return found

    def _measurement(self, prompt: EncodedPrompt, params: SamplingParams, baseline: bool) -> Measurement:
        prompted = [prompt.id, prompt.turn, prompt.category, prompt.token_ids]
        key = json_digest([self._same, self._pair.facts, baseline, asdict(params), *prompted])
        if self._journal and key in self._journal.done:
            found = self._journal.done[key]
            self._threads.add(self._journal.threads[key])
            if self._meter:
                self._meter.kept(found)
            return found
        how = self._pair.block_size, baseline
        if self._warm != how:
            _warm_up(self._pair, (True, False) if baseline else (True,), prompt, params)
            self._warm = how
        on_step = self._meter.step if self._meter else None
        found = measure(self._pair, prompt, params, baseline=baseline, on_step=on_step)
        if self._journal:
            self._journal.append(key, found)
            self._threads.add(self._journal.threads[key])
        if self._meter:
            self._meter.finished(found)
        return found

    def warnings(self) -> list[str]:
        """Returns warnings about the conditions of the measurement."""
        if len(self._threads) < 2:
            return []
        counts = " and ".join(map(str, sorted(self._threads)))
        return [f"The run was resumed with another number of threads ({counts}); its times are not comparable."]


def _room(prompt: EncodedPrompt, max_tokens: int) -> int:
    """Returns an upper bound of the tokens of a conversation."""
    if prompt.rest is None:
        return len(prompt.token_ids) + max_tokens
    answer = {"role": "assistant", "content": ""}
    asked = [message for turn in prompt.rest.turns for message in (answer, *turn) if message["role"] != "system"]
    length = len(prompt.rest.encode((*prompt.rest.history, *asked)))
    # re-encoded answers and empty thoughts added by a template may be a bit longer
    return length + (1 + len(prompt.rest.turns)) * (max_tokens + 16) + 64


def _check_prompts(pair: Pair, sets: Mapping[str, Sequence[EncodedPrompt]]) -> None:
    if not sets:
        raise UserError("there is no prompt set to evaluate")
    for name, prompts in sets.items():
        if not prompts:
            raise UserError(f"set {name!r} has no prompts")
        for prompt in prompts:
            try:
                check_prompt(prompt.token_ids, pair.context_limit, pair.vocabulary)
            except PromptError as error:
                raise UserError(f"set {name!r}, prompt {prompt.id!r}: {error}; change or remove it") from error


def _contexts(pair: Pair, setting: Setting, sweeps: Sweeps) -> dict[int, list[EncodedPrompt]]:
    """Returns the prompts of the sweep over context lengths. Raises UserError."""
    if not sweeps.context_length:
        return {}
    found = lengthened(pair.tokenizer, setting.sets, sweeps.context_length, sweeps.requests, setting.params.seed)
    _check_prompts(pair, {f"context_length {length}": prompts for length, prompts in found.items()})
    return found


def _warm_up(pair: Pair, drafts: Iterable[bool], prompt: EncodedPrompt, params: SamplingParams) -> None:
    """Decodes a few untimed tokens, as the first kernels of a process are slow."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), ignore_eos=True)
    for draft in drafts:
        pair.decode(prompt.token_ids, short, draft=draft)


def _points(*how: Any) -> dict[str, Any]:
    return {"points": drafting_points(*how)}


def serving_command(noted: Mapping[str, Any], arguments: Mapping[str, Any], *, drafter: bool = True) -> list[str]:
    """Returns the command that serves the pair as measured, or the target alone, without options of drafting."""
    words = ["dflash-serve", "--target", str(noted["target"])]
    words += ["--drafter", str(noted.get("drafter", "DRAFTER"))] if drafter else []
    for name in ("device", "dtype", "draft_dtype", "kv_cache_dtype"):
        if arguments.get(name, "auto") != "auto":
            words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    template = arguments.get("chat_template")
    return [*words, *(["--chat-template", str(template)] if template else [])]


def _describe(pair: Pair, setting: Setting, baseline: bool) -> dict[str, Any]:
    return {
        "runtime": pair.name,
        **pair.facts,
        "device": str(pair.device),
        "dtype": str(pair.dtype).removeprefix("torch."),
        "baseline": baseline,
        **asdict(setting.params),
        "thinking": setting.thinking,
        "stop_token_ids": list(setting.params.stop_token_ids),
        "prompt_tokens_sha256": {name: prompts_digest(prompts) for name, prompts in setting.sets.items()},
    }
