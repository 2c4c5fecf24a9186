"""Sweeps: run the drafter in other ways than configured. One that is clearly better names the mistake.

All ways of all families compete. The best one that is clearly better is a fault; it is then taken as given and the
rest compete again, so that the shadow of one mistake is not reported as another, and two mistakes are both found.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..progress import Progress
from ..target import RESERVED_WORDS
from .files import Case, rope_of, rope_words
from .finding import Finding
from .probe import Answer, Probe, Scores, Setting, gain

CLEAR_Z = 4.0  # standard errors; some thirty ways are tried
CLEAR_TOKENS = 0.1  # accepted drafts a block
CLEAR_SHARE = 0.05  # of the drafts that are accepted now
STRICT_RATIO = 2.0  # what a fault of the trainer must multiply the accepted drafts by
STRICT_TOKENS = 0.25
COMMON_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
MASKS_TRIED = 8
BLOCKS = 256  # more are judged only where a way is compared with decoding itself


@dataclass(frozen=True, slots=True)
class Way:
    """One other way to run the drafter."""

    words: str
    setting: Setting
    remedy: str


@dataclass(frozen=True, slots=True)
class Family:
    """Ways that answer one question.

    `strict`: no key of config.json can mend it, and a healthy drafter may well profit from what it must not have (the
    anchor's own feature says what comes next), so being better is not enough: the drafter must be poor without it.
    """

    check: str
    ways: Callable[[Case, Setting], Iterator[Way]]
    configured: Callable[[Setting], str]
    strict: bool = False


def layer_ids(case: Case, now: Setting) -> Iterator[Way]:
    """All taps one layer lower or higher. -1 is the embedding, the last layer comes normed, as HF returns them."""
    last = int(case.target.num_hidden_layers) - 1
    for shift in (-1, 1):
        ids = tuple(i + shift for i in now.layer_ids)
        if min(ids) < -1 or max(ids) > last:
            continue
        if min(ids) < 0 or max(ids) == last:
            edge = "the embedding's output" if min(ids) < 0 else "the last layer's normed output"
            remedy = f"it was trained on {edge}, which no server taps: train again with layers 0..{last - 1}"
        elif case.speculators:
            remedy = f"set aux_hidden_state_layer_ids to {[i + 1 for i in ids]} in config.json: that form stores id + 1"
        else:
            remedy = (
                f"the ids are off by one: set dflash_config.target_layer_ids to {list(ids)} in config.json (id l is "
                f"the output of layer l, Hugging Face's hidden_states[l + 1])"
            )
        yield Way(f"taps {list(ids)}", replace(now, layer_ids=ids), remedy)


def rope(case: Case, now: Setting) -> Iterator[Way]:
    """The target's own theta and scaling, the common thetas, and no scaling."""
    theta, scaling = rope_of(case.target)
    own = theta or now.rope_theta
    tried = [(theta, now.rope_scaling) for theta in (own, *COMMON_THETAS)]
    tried += [(theta, other) for other in (scaling, None) for theta in (own, now.rope_theta)]
    inside = " of transformer_layer_config" if case.speculators else ""
    for theta, other in dict.fromkeys(tried):
        if (theta, other) == (now.rope_theta, now.rope_scaling):
            continue
        base = json.dumps(theta)
        remedy = f"set rope_theta and rope_parameters.rope_theta{inside} to {base} in config.json"
        if other != now.rope_scaling:
            group = json.dumps((other.parameters if other else {"rope_type": "default"}) | {"rope_theta": theta})
            both = f"rope_parameters (and rope_scaling, if there){inside}"
            remedy = f"set rope_theta to {base} and {both} to {group} in config.json"
        whose = " (the target's)" if theta == own and other in (scaling, now.rope_scaling) else ""
        yield Way(rope_words(theta, other) + whose, replace(now, rope_theta=theta, rope_scaling=other), remedy)


def mask_row(case: Case, now: Setting) -> Iterator[Way]:
    """Rows that a trainer is likely to have used: the tokenizer's mask, unused and reserved rows, neighbours, pad."""
    rows, tokenizer = int(case.target.vocab_size), case.tokenizer
    added = tokenizer.get_added_vocab().items()
    reserved = [token for text, token in added if any(word in text.lower() for word in (*RESERVED_WORDS, "mask"))]
    likely = [tokenizer.mask_token_id, len(tokenizer), rows - 1, now.mask_token_id - 1, now.mask_token_id + 1]
    likely += [tokenizer.pad_token_id, max(reserved, default=None), min(reserved, default=None), 0]
    tried = [i for i in dict.fromkeys(likely) if i is not None and 0 <= i < rows and i != now.mask_token_id]
    for token in tried[:MASKS_TRIED]:
        keys = "dflash_config.mask_token_id"
        if case.speculators:
            keys = f"mask_token_id (and {keys}, if there)"
        remedy = f"set {keys} to {token} in config.json"
        yield Way(f"mask {token}", replace(now, mask_token_id=token), remedy)


def causality(case: Case, now: Setting) -> Iterator[Way]:
    """The block bidirectional instead of causal, or the other way round."""
    other = not (now.is_causal or (now.is_causal is None and case.config and "sliding" in str(case.config.layer_types)))
    remedy = f"set is_causal to {str(other).lower()} in config.json"
    if case.speculators:
        remedy = f"set sliding_window_non_causal to {str(not other).lower()} in config.json"
        if other and case.config and "full_attention" in case.config.layer_types:
            remedy = (
                "that form has no causal layers of full attention: export it again in the other form, is_causal true"
            )
    yield Way("causal" if other else "bidirectional", replace(now, is_causal=other), remedy)


def context(case: Case, now: Setting) -> Iterator[Way]:
    """The anchor's own feature visible, or the last one before it missing."""
    yield Way(
        "the anchor's own feature visible", replace(now, context_end=now.context_end + 1),
        "it was trained with the anchor's own feature in the context, which does not exist yet when decoding: train "
        "again with context strictly before the anchor",
    )  # fmt: skip
    yield Way(
        "the last feature missing", replace(now, context_end=now.context_end - 1),
        "it was trained without the feature just before the anchor: train again with context up to the anchor",
    )  # fmt: skip


def positions(case: Case, now: Setting) -> Iterator[Way]:
    """Blocks one position earlier or later against their context."""
    for shift in (-1, 1):
        remedy = f"it was trained with slot k at position anchor + k {'+' if shift > 0 else '-'} 1: train again"
        yield Way(f"positions {shift:+d}", replace(now, block_shift=now.block_shift + shift), remedy)


def labels(case: Case, now: Setting) -> Iterator[Way]:
    """Slots that predict a neighbour's token."""
    for shift in (-1, 1):
        remedy = (
            f"slot k predicts the token at anchor + k {'+' if shift > 0 else '-'} 1: the trainer shifted its labels; "
            f"train again with the token at the slot's own position"
        )
        yield Way(f"labels {shift:+d}", replace(now, label_shift=shift), remedy)


FAMILIES = (
    Family("layer ids", layer_ids, lambda now: f"taps {list(now.layer_ids)}"),
    Family("rope", rope, lambda now: rope_words(now.rope_theta, now.rope_scaling)),
    Family("mask row", mask_row, lambda now: f"mask {now.mask_token_id}"),
    Family("causality", causality, lambda now: f"is_causal {str(now.is_causal).lower()}"),
    Family("context", context, lambda now: "context strictly before the anchor", strict=True),
    Family("positions", positions, lambda now: "slot k at anchor + k", strict=True),
    Family("labels", labels, lambda now: "slot k predicts its own position", strict=True),
)


@dataclass(frozen=True, slots=True)
class Tried:
    """A way and how it did."""

    family: Family
    way: Way
    scores: Scores

    def clearly_better(self, base: Scores) -> bool:
        difference, accepted = gain(self.scores, base), base.tau - 1
        if difference.z < CLEAR_Z or difference.tokens < max(CLEAR_TOKENS, CLEAR_SHARE * accepted):
            return False
        strict = self.family.strict
        return not strict or (difference.tokens >= STRICT_TOKENS and self.scores.tau - 1 >= STRICT_RATIO * accepted)


def blocks_stride(answers: list[Answer]) -> int:
    """How far apart the anchors are that a sweep looks at."""
    return math.ceil(sum(answer.anchors for answer in answers) / BLOCKS)


def sweep(case: Case, probe: Probe, answers: list[Answer]) -> tuple[list[Finding], Setting]:
    """Let every family try its ways; also returns the setting with every mistake mended."""
    now, stride = Setting.of(probe.drafter), blocks_stride(answers)
    base = probe.score(answers, now, stride=stride)
    found: dict[str, Finding] = {}
    while True:
        ways = [(f, way) for f in FAMILIES if f.check not in found for way in f.ways(case, now)]
        tried = []
        with Progress("sweeping", len(ways)) as bar:
            for family, way in ways:
                tried.append(Tried(family, way, probe.score(answers, way.setting, stride=stride)))
                bar.advance(1)
        better = [t for t in tried if t.clearly_better(base)]
        if not better:
            break
        best = max(better, key=lambda t: t.scores.tau)
        found[best.family.check] = Finding(
            best.family.check,
            "fault",
            f"{best.family.configured(now)}: {base.tau:.2f} tokens a step; {best.way.words}: {best.scores.tau:.2f}",
            best.way.remedy,
            _figures(base, [t for t in tried if t.family is best.family]),
        )
        now, base = best.way.setting, best.scores
    for family in FAMILIES:
        own = [t for t in tried if t.family is family]
        if own:
            best = max(own, key=lambda t: t.scores.tau)
            words = f"{family.configured(now)}: {base.tau:.2f} tokens a step; {best.way.words}: {best.scores.tau:.2f}"
            found[family.check] = Finding(family.check, "ok", words, figures=_figures(base, own))
    return [found[family.check] for family in FAMILIES if family.check in found], now


def _figures(base: Scores, tried: list[Tried]) -> dict[str, object]:
    ways = {t.way.words: {"tau": t.scores.tau, "z": gain(t.scores, base).z} for t in tried}
    return {"tau": base.tau, "ways": ways}
