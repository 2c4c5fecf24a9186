"""Sweeps: run the drafter with other settings than configured. A clearly better one may name the mistake.

All ways of all families compete. The best one that is clearly better is applied and the rest compete again, so that
a side effect of one mistake is not reported as another, and two mistakes are both found. They are faults only if
together they restore most of the recorded acceptance (or, without a record, a plausible one), and each is needed for
it: a way that merely helps is not the cause, and its remedy would be wrong.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from ..models.dflash.architecture import architectures
from ..models.spec import logit_scale
from ..models.target_files import RESERVED_WORDS
from ..progress import Progress
from .conversions import conversions
from .edits import Edit, edits, likely_orders
from .exported import Exported
from .files import Case, rope_of, rope_words, scale_words
from .finding import Finding, Severity
from .probe import Answer, Probe, Scores, Setting, gain
from .remedies import causality_remedy, layer_ids_remedy, mask_remedy, rope_remedy, scale_remedy

CLEAR_Z = 4.0  # standard errors; some sixty ways are tried
CLEAR_TOKENS = 0.1  # accepted drafts a block
CLEAR_SHARE = 0.05  # share of the drafts that are accepted now
STRICT_RATIO = 2.0  # factor on the accepted drafts for a fault of the trainer
STRICT_TOKENS = 0.25
FROM_NOTHING = 10.0  # the same if there is no other evidence, as the drafter is bad even with it
MOST = 0.6  # share of the accepted drafts that were recorded
PLAUSIBLE_TAU = 2.0  # tokens a step that a trained drafter reaches on nearly any text
PLAUSIBLE_SHARE = 0.2  # instead, for a very short block, of its drafts
PLAUSIBLE_RATIO = 1.3  # factor on the accepted drafts for a remedy that restores a drafter
COMMON_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
MASKS_TRIED = 8
BLOCKS = 256  # more are judged only to compare a way with decoding itself
QUICK = 4  # a way that is no better on every fourth of them is not tried on all


@dataclass(frozen=True, slots=True)
class Way:
    """Another setting to run the drafter with."""

    words: str
    setting: Setting
    remedy: str


@dataclass(frozen=True, slots=True)
class Family:
    """Ways that answer one question.

    `certain`: a clearly better way is right, even if it does not restore the acceptance.

    `strict`: no key of config.json can fix it, and a healthy drafter may well gain from information that it must not
    have (the anchor's own feature predicts the next token), so being better is not enough: the drafter must be poor
    without it.
    """

    check: str
    ways: Callable[[Case, Setting], Iterator[Way]]
    configured: Callable[[Setting], str]
    strict: bool = False
    certain: bool = False


def layer_ids(case: Case, now: Setting) -> Iterator[Way]:
    """Yields all taps one layer lower or higher. -1 is the embedding; the last layer comes normed, as HF returns it."""
    last = int(case.target.num_hidden_layers) - 1
    for shift in (-1, 1):
        ids = tuple(i + shift for i in now.layer_ids)
        if min(ids) < -1 or max(ids) > last:
            continue
        if min(ids) < 0 or max(ids) == last:
            edge = "the embedding's output" if min(ids) < 0 else "the last layer's normed output"
            remedy = f"it was trained on {edge}, which no server taps: train again with layers 0..{last - 1}"
        else:
            remedy = layer_ids_remedy(case, ids)
            if not case.speculators:
                remedy = f"the ids are off by one: {remedy} (id l is the output of layer l, HF's hidden_states[l + 1])"
        yield Way(f"taps {list(ids)}", replace(now, layer_ids=ids), remedy)


def tap_order(case: Case, now: Setting) -> Iterator[Way]:
    """Yields the same taps in other orders."""
    for order in likely_orders(len(now.layer_ids)):
        ids = tuple(now.layer_ids[i] for i in order)
        yield Way(f"taps {list(ids)}", replace(now, layer_ids=ids), layer_ids_remedy(case, ids))


def rope(case: Case, now: Setting) -> Iterator[Way]:
    """Yields the target's own theta and scaling, the common thetas, and no scaling."""
    theta, scaling = rope_of(case.target)
    own = theta or now.rope_theta
    tried = [(theta, now.rope_scaling) for theta in (own, *COMMON_THETAS)]
    tried += [(theta, other) for other in (scaling, None) for theta in (own, now.rope_theta)]
    for theta, other in dict.fromkeys(tried):
        if (theta, other) == (now.rope_theta, now.rope_scaling):
            continue
        remedy = rope_remedy(case, theta, other, now.rope_scaling)
        note = " (the target's)" if theta == own and other in (scaling, now.rope_scaling) else ""
        yield Way(rope_words(theta, other) + note, replace(now, rope_theta=theta, rope_scaling=other), remedy)


def mask_row(case: Case, now: Setting) -> Iterator[Way]:
    """Yields rows that trainers often use: the tokenizer's mask, unused and reserved rows, adjacent ones, pad."""
    rows, tokenizer = int(case.target.vocab_size), case.tokenizer
    added = tokenizer.get_added_vocab().items()
    reserved = [token for text, token in added if any(word in text.lower() for word in (*RESERVED_WORDS, "mask"))]
    likely = [tokenizer.mask_token_id, len(tokenizer), rows - 1, now.mask_token_id - 1, now.mask_token_id + 1]
    likely += [tokenizer.pad_token_id, max(reserved, default=None), min(reserved, default=None), 0]
    tried = [i for i in dict.fromkeys(likely) if i is not None and 0 <= i < rows and i != now.mask_token_id]
    for token in tried[:MASKS_TRIED]:
        yield Way(f"mask {token}", replace(now, mask_token_id=token), mask_remedy(case, token))


def causality(case: Case, now: Setting) -> Iterator[Way]:
    """Yields the block bidirectional instead of causal, or the inverse."""
    other = not (now.is_causal or (now.is_causal is None and case.config and "sliding" in str(case.config.layer_types)))
    words = "causal" if other else "bidirectional"
    yield Way(words, replace(now, is_causal=other), causality_remedy(case, other))


def logit_scales(case: Case, now: Setting) -> Iterator[Way]:
    """Yields the target's own multiplier and soft cap, and none: a selector adds its scores after them."""
    if case.config is None or not case.config.has_selector:
        return
    present = (now.output_multiplier, now.final_logit_softcapping)
    own = logit_scale(case.target)
    for multiplier, cap in dict.fromkeys([(own.multiplier, own.cap), (1.0, None), (1.0, present[1])]):
        if (multiplier, cap) != present:
            setting = replace(now, output_multiplier=multiplier, final_logit_softcapping=cap)
            yield Way(scale_words(multiplier, cap), setting, scale_remedy(multiplier, cap))


def selector(case: Case, now: Setting) -> Iterator[Way]:
    """Yields every slot's own best token, independent of the token before."""
    if case.config is not None and case.config.has_selector and now.selector:
        yield Way(
            "every slot's own best token",
            replace(now, selector=False),
            f'the selector does harm: train it longer, or leave it out: python -c "from dflash_toolkit import *; '
            f"save_drafter(load_drafter('{case.name}').without_selector(), 'OUT')\"",
        )


def across_blocks(case: Case, now: Setting) -> Iterator[Way]:
    """Yields convolutions that read from the last slots of the block before, as in a packed row."""
    if case.config is not None and case.config.architecture.around_spec(case.config):
        yield Way(
            "convolutions across blocks",
            replace(now, across_blocks=True),
            "it was trained with convolutions that read the block before in a packed row, where a server has zeros: "
            "train again with convolutions inside each block",
        )


def edited(check: str) -> Callable[[Case, Setting], Iterator[Way]]:
    """Returns a function that yields the corrections of weights of one check."""

    def ways(case: Case, now: Setting) -> Iterator[Way]:
        assert case.config is not None
        for edit in (*edits(case.config), *conversions(case.config)):
            if edit.check == check:
                yield Way(edit.words, replace(now, edits=(*now.edits, edit)), edit.remedy)

    return ways


def context(case: Case, now: Setting) -> Iterator[Way]:
    """Yields the anchor's own feature visible, and the last one before it missing."""
    yield Way(
        "the anchor's own feature visible",
        replace(now, context_end=now.context_end + 1),
        "it was trained with the anchor's own feature in the context, which does not exist yet when decoding: train "
        "again with context strictly before the anchor",
    )
    yield Way(
        "the last feature missing",
        replace(now, context_end=now.context_end - 1),
        "it was trained without the feature just before the anchor: train again with context up to the anchor",
    )


def positions(case: Case, now: Setting) -> Iterator[Way]:
    """Yields blocks one position earlier or later relative to their context."""
    for shift in (-1, 1):
        remedy = f"it was trained with slot k at position anchor + k {'+' if shift > 0 else '-'} 1: train again"
        yield Way(f"positions {shift:+d}", replace(now, block_shift=now.block_shift + shift), remedy)


def labels(case: Case, now: Setting) -> Iterator[Way]:
    """Yields slots that predict the token before or after theirs."""
    for shift in (-1, 1):
        remedy = (
            f"slot k predicts the token at anchor + k {'+' if shift > 0 else '-'} 1: the trainer shifted its labels; "
            f"train again with the token at the slot's own position"
        )
        yield Way(f"labels {shift:+d}", replace(now, label_shift=shift), remedy)


def _weights(check: str) -> Family:
    return Family(check, edited(check), lambda now: "as stored")


FAMILIES = (
    Family("layer ids", layer_ids, lambda now: f"taps {list(now.layer_ids)}"),
    Family("tap order", tap_order, lambda now: f"taps {list(now.layer_ids)}"),
    Family("rope", rope, lambda now: rope_words(now.rope_theta, now.rope_scaling)),
    Family("mask row", mask_row, lambda now: f"mask {now.mask_token_id}"),
    Family("causality", causality, lambda now: f"is_causal {str(now.is_causal).lower()}"),
    *map(_weights, ("layer order", "rope rows", "gate and up", "q and k norms", "norm weights")),
    *map(_weights, ("k and v", "q heads", "fc blocks")),
    *map(_weights, ("convolution taps", "convolution sides", "convolution places", "kernel rows")),
    *(_weights(swap.check) for each in architectures() for part in each.parts for swap in part.swaps),
    Family("logit scale", logit_scales, lambda now: scale_words(now.output_multiplier, now.final_logit_softcapping)),
    Family("selector", selector, lambda now: "tokens chosen by pairs", certain=True),
    Family("convolution", across_blocks, lambda now: "convolutions inside each block", strict=True),
    Family("context", context, lambda now: "context strictly before the anchor", strict=True),
    Family("positions", positions, lambda now: "slot k at anchor + k", strict=True),
    Family("labels", labels, lambda now: "slot k predicts its own position", strict=True),
)


@dataclass(frozen=True, slots=True)
class Tried:
    """A way and its scores."""

    family: Family
    way: Way
    scores: Scores
    base: Scores  # as configured, on the same blocks

    @property
    def clearly_better(self) -> bool:
        return clearly_better(self.scores, self.base, strict=self.family.strict)


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of the sweeps."""

    findings: list[Finding]
    setting: Setting  # with the causes of the low acceptance fixed
    best_tau: float  # the best of anything tried


@dataclass(frozen=True, slots=True)
class _Link:
    """One mistake of the chain."""

    tried: Tried
    before: Setting
    figures: dict[str, object]


def clearly_better(scores: Scores, base: Scores, *, strict: bool = False) -> bool:
    """Whether it is better beyond chance and by enough to matter."""
    difference, accepted = gain(scores, base), base.tau - 1
    if difference.z < CLEAR_Z or difference.tokens < max(CLEAR_TOKENS, CLEAR_SHARE * accepted):
        return False
    return not strict or (difference.tokens >= STRICT_TOKENS and scores.tau - 1 >= STRICT_RATIO * accepted)


def restores(case: Case, tau: float, base: float) -> bool:
    """Whether `tau` tokens per step are most of the expected number, compared with `base` as it is."""
    if case.recorded_tau is not None:
        return tau - 1 >= MOST * (case.recorded_tau - 1)
    assert case.config is not None
    plausible = min(PLAUSIBLE_TAU, 1 + PLAUSIBLE_SHARE * (case.config.block_size - 1))
    return tau >= plausible and tau - 1 >= PLAUSIBLE_RATIO * (base - 1)


def blocks_stride(answers: list[Answer]) -> int:
    """Returns the distance of the anchors that a sweep judges."""
    return math.ceil(sum(answer.anchors for answer in answers) / BLOCKS)


def count_ways(case: Case, now: Setting) -> int:
    """Returns the number of ways that one round of the sweeps tries."""
    return sum(1 for family in FAMILIES for _ in family.ways(case, now))


def sweep(
    case: Case,
    probe: Probe,
    answers: list[Answer],
    bar: Progress,
    exported: Exported | None = None,
    *,
    damaged: bool = False,
) -> Swept:
    """Tries the ways of every family.

    Args:
        bar: advances by one per way; further rounds make it longer.
        exported: the result for the record; the drafter is run as it was exported, as far as that is known.
        damaged: the files have another fault; then no way that helps is reported as a fault.
    """
    exported = exported or Exported()
    start = now = exported.setting(Setting.of(probe.drafter))
    stride = blocks_stride(answers)
    first = base = probe.score(answers, now, stride=stride)
    chain: list[_Link] = []
    tried: list[Tried] = []
    best_tau = base.tau
    while True:
        done = {link.tried.family.check for link in chain}
        ways = [(f, way) for f in FAMILIES if f.check not in done for way in f.ways(case, now)]
        if chain:
            bar.grow(len(ways))
        quick = probe.score(answers, now, stride=QUICK * stride)
        tried = []
        for family, way in ways:
            scores, compared = probe.score(answers, way.setting, stride=QUICK * stride), quick
            if scores.tau > quick.tau:
                scores, compared = probe.score(answers, way.setting, stride=stride), base
            tried.append(Tried(family, way, scores, compared))
            bar.advance(1, note=family.check)
        best_tau = max([best_tau, *(t.scores.tau for t in tried if t.base is base)])
        better = [t for t in tried if t.clearly_better]
        if not better:
            break
        best = max(better, key=lambda t: t.scores.tau)
        chain.append(_Link(best, now, _figures([t for t in tried if t.family is best.family])))
        now, base = best.way.setting, best.scores
    allowed = not damaged and (not exported.known or exported.restorable)
    from_nothing = any(t.tried.family.strict for t in chain) and base.tau - 1 >= FROM_NOTHING * (first.tau - 1)
    explained = allowed and (restores(case, base.tau, first.tau) or (from_nothing and case.recorded_tau is None))
    found: dict[str, Finding] = {}
    for link in chain:
        # a drafter that is as exported is wrong only if a way changes much: then its trainer, or the record, was wrong
        much = not exported.restorable or base.tau - 1 >= PLAUSIBLE_RATIO * (first.tau - 1)
        needed = len(chain) == 1 or clearly_better(base, probe.score(answers, _without(now, link), stride=stride))
        fault = (explained and needed and much) or (link.tried.family.certain and allowed)
        found[link.tried.family.check] = _verdict(case, link, "fault" if fault else "warning" if allowed else "ok")
    for family in FAMILIES:
        own = [t for t in tried if t.family is family]
        if own:
            best = max(own, key=lambda t: t.scores.tau)
            words = f"{family.configured(now)}: {base.tau:.2f} tokens a step; {best.way.words}: {best.scores.tau:.2f}"
            found[family.check] = Finding(family.check, "ok", words, figures=_figures(own))
    findings = [found[family.check] for family in FAMILIES if family.check in found]
    return Swept(findings, now if explained else start, best_tau)


def _verdict(case: Case, link: _Link, severity: Severity) -> Finding:
    tried, check = link.tried, link.tried.family.check
    was, is_now = tried.base.tau, tried.scores.tau
    words = f"{tried.family.configured(link.before)}: {was:.2f} tokens a step; {tried.way.words}: {is_now:.2f}"
    if severity == "fault":
        return Finding(check, severity, words, tried.way.remedy, link.figures)
    if case.recorded_tau is None:
        level = "which is not the acceptance of a good drafter"
    else:
        level = f"and {case.recorded_tau:.2f} were recorded"
    remedy = f"this helps, but does not explain it ({is_now:.2f} tokens a step, {level}): look for the cause elsewhere"
    return Finding(check, severity, words, remedy if severity == "warning" else "", link.figures)


def _without(final: Setting, link: _Link) -> Setting:
    """Returns the final setting without the change of this link."""
    before, after = link.before, link.tried.way.setting
    changed = [f.name for f in fields(Setting) if getattr(before, f.name) != getattr(after, f.name)]
    back = {name: getattr(before, name) for name in changed if name != "edits"}
    added: set[Edit] = set(after.edits) - set(before.edits)
    return replace(final, **back, edits=tuple(edit for edit in final.edits if edit not in added))


def _figures(tried: list[Tried]) -> dict[str, object]:
    ways = {t.way.words: {"tau": t.scores.tau, "tau_now": t.base.tau, "z": gain(t.scores, t.base).z} for t in tried}
    return {"tau": tried[0].base.tau, "ways": ways}
