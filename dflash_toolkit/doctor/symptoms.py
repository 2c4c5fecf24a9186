"""Measures acceptance and judges its pattern. A symptom is a fault only if nothing explains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..acceptance import Acceptance
from ..config import UserError
from ..data.prompts import Prompt, encode_chat
from ..generation import Generation
from ..progress import Progress
from .exported import Exported
from .files import Case
from .finding import Finding, Severity, has_fault
from .probe import ANSWER_WORK, Answer, Probe, Scores, Setting, unpaired_gain
from .sweeps import CLEAR_TOKENS, blocks_stride, restores

USELESS_TAU = 1.3  # below, a step costs about what it saves
LOW_TAU = 2.0
USELESS_FIRST = 0.2  # position-1 acceptance
LOW_FIRST = 0.5
UNKNOWN_RECALL = 0.25  # recall of slot 1, among the 16 best
LOW_RECALL = 0.6
GAP_FAULT, GAP_WARNING = 0.8, 0.92  # decoded over teacher-forced tokens a step
GAP_STEPS = 20  # fewer are not judged
RECORDED = 0.6  # measured over recorded tokens a step
CERTAIN_BEFORE, CERTAIN_AFTER = 0.7, 0.15  # for an untrained slot, in a drafter without a record
CLIFF, CLIFF_Z = 0.5, 4.0  # acceptance of a slot over that of the one before, and the required certainty
THINKING_FAULT, THINKING_WARNING = 2.0, 1.4  # accepted drafts in the other mode over those in this
THINKING_Z = 3.0
COLDER = 0.7  # accepted drafts at a temperature over those of greedy decoding
SAMPLED_GAIN = 1.05  # tokens a step with sampled drafts over those with greedy drafts


@dataclass(frozen=True, slots=True)
class Known:
    """Certain facts that the symptoms are judged with."""

    exported: Exported
    target_same: bool  # its outputs are those of the export
    best_tau: float = math.nan  # the best of every way that was tried

    @property
    def as_exported(self) -> bool:
        """Whether drafter and target are those of the export: other causes remain."""
        return self.exported.as_exported and self.target_same

    def open_causes(self, case: Case) -> str:
        """Returns the possible causes of an unexplained low acceptance, with the evidence."""
        if self.as_exported:
            return (
                "weights, configuration and target are those of the export (the record's hashes and hidden states "
                "match), so the possible causes are: prompts unlike those of training, another template, thinking mode "
                "or system prompt, or too little training"
            )
        tried = "" if math.isnan(self.best_tau) else f" (the best of all settings tried reaches {self.best_tau:.2f})"
        causes = [f"no known mistake explains it{tried}; open are"]
        if not self.exported.known:
            causes.append("weights changed or layers lost since the export, which left no record,")
        elif not self.exported.as_exported:
            causes.append("the changes named above,")
        if not self.target_same:
            made_for = case.provenance.get("target")
            causes.append(f"another target{f' than {made_for}' if made_for else ' than it was made for'},")
        return " ".join([*causes, "prompts unlike those of training, too little training"])


def check_acceptance(
    case: Case, answers: Sequence[Answer], scores: Scores, earlier: Sequence[Finding], known: Known
) -> list[Finding]:
    """Measures position-1 acceptance, tokens per step, and the curves by slot, teacher-forced and decoded."""
    slots = scores.hits.shape[1]
    pooled = Acceptance.of([answer.generation for answer in answers], block_size=slots + 1)
    decoded, forced = list(pooled.accepted_given_previous), scores.given_previous
    steps = sum(len(a.generation.steps) for a in answers)
    tau = sum(a.anchors for a in answers) / steps
    measured = f"{tau:.2f} tokens a step, position 1 accepted {forced[0]:.0%}; by slot {_curve(forced)}"
    figures = {
        "tau": tau,
        "tau_teacher_forced": scores.tau,
        "tau_recorded": case.recorded_tau,
        "tau_best_tried": known.best_tau,
        "as_exported": known.as_exported,
        "position_1": forced[0],
        "position_1_decoded": decoded[0],
        "given_previous": forced,
        "given_previous_decoded": decoded,
        "steps": steps,
        "blocks": len(scores.hits),
    }
    severity: Severity = "ok"
    remedy = ""
    if tau < USELESS_TAU or forced[0] < USELESS_FIRST:
        unknown = scores.share(scores.near)[0] < UNKNOWN_RECALL
        # a drafter as exported is not broken, even if it predicts little of these prompts
        severity = "warning" if known.as_exported else "fault"
        knows = "it cannot predict this target's answers here" if unknown else "it predicts little of them"
        remedy = f"as good as none; {knows}: {known.open_causes(case)}"
    elif tau < LOW_TAU or forced[0] < LOW_FIRST:
        severity, remedy = "warning", f"low: {known.open_causes(case)}"
    if severity != "ok" and has_fault(earlier):
        severity, remedy = "warning", "fix the faults named here, then examine it again"
    return [Finding("acceptance", severity, measured, remedy, figures)]


def check_curve(case: Case, scores: Scores, earlier: Sequence[Finding], known: Known) -> list[Finding]:
    """Checks that every slot of the block was trained, and that acceptance falls slowly along them."""
    assert case.config is not None
    present, trained = case.config.block_size, case.provenance.get("trained_block_size")
    if trained is None and case.record is not None:
        trained = case.record["configuration"]["block_size"]
    shares = scores.given_previous
    measured = f"given that those before are right, by slot {_curve(shares)}"
    figures = {"given_previous": shares, "block_size": present, "trained_block_size": trained}
    if isinstance(trained, int) and trained != present:
        more = present > trained
        words = f"block_size is {present}, it was trained with {trained}; {measured}"
        remedy = f"set block_size to {trained} everywhere in config.json: " + (
            f"slots from {trained} on were never trained" if more else "longer blocks can be accepted"
        )
        return [Finding("curve", "fault" if more else "warning", words, remedy, figures)]
    slot = None if has_fault(earlier) else _cliff(scores)
    if slot is None:
        return [Finding("curve", "ok", measured, figures=figures)]
    before, here = shares[slot - 2 : slot]
    words = f"slot {slot} is accepted {here:.0%} of the time, slot {slot - 1} {before:.0%}; {measured}"
    remedy = (
        f"slots from {slot} on were trained differently from those before: look at their labels, weights and mask in "
        f"training; until then serve it with block_size {slot}"
    )
    certain = slot > 2 and min(shares[: slot - 1]) >= CERTAIN_BEFORE and here <= CERTAIN_AFTER
    if known.as_exported or certain:
        return [Finding("curve", "fault", words, remedy, figures)]
    remedy = (
        f"slots from {slot} on are worse than those before; trained differently, or damaged: {known.open_causes(case)}"
    )
    return [Finding("curve", "warning", words, remedy, figures)]


def _cliff(scores: Scores) -> int | None:
    """Returns the first slot, from 2 on, that is accepted clearly less than half as often as the one before."""
    shares, counts = scores.given_previous, scores.asked_given_previous
    for slot in range(2, len(shares) + 1):
        (p, q), (m, n) = shares[slot - 2 : slot], counts[slot - 2 : slot]
        if not n or p < LOW_FIRST or q >= CLIFF * p:
            continue
        pooled = (p * m + q * n) / (m + n)  # two proportions
        if p - q > CLIFF_Z * math.sqrt(pooled * (1 - pooled) * (1 / m + 1 / n)):
            return slot
    return None


def check_recall(case: Case, scores: Scores, earlier: Sequence[Finding], known: Known) -> list[Finding]:
    """Checks whether the drafter does not know the token, or knows it but ranks it too low."""
    recall, best = scores.share(scores.near), scores.share(scores.hits)
    measured = f"slot 1: {recall[0]:.0%} among its 16 best, {best[0]:.0%} the best; by slot {_curve(recall)}"
    figures = {"recall_16": recall, "top_1": best}
    if has_fault(earlier) or best[0] >= LOW_FIRST:
        return [Finding("recall", "ok", measured, figures=figures)]
    if recall[0] < LOW_RECALL:
        remedy = "it does not know the next token"
        if known.as_exported:
            remedy += ": more training data, more like what is served"
    else:
        remedy = "it knows the token but ranks it too low"
        if known.as_exported:
            remedy += ": trained too short, or on responses with other sampling (temperature, another model)"
    if not known.as_exported:
        remedy += f": {known.open_causes(case)}"
    return [Finding("recall", "warning", measured, remedy, figures)]


def check_serving(
    case: Case, answers: Sequence[Answer], scores: Scores, earlier: Sequence[Finding], known: Known
) -> list[Finding]:
    """Compares decoding step by step with the same blocks drafted from the whole answer, and with training's figure."""
    tokens, steps = sum(a.anchors for a in answers), sum(len(a.generation.steps) for a in answers)
    decoded, forced, recorded = tokens / steps, tokens / scores.steps, case.recorded_tau
    measured = f"{decoded:.2f} tokens a step decoded, {forced:.2f} teacher-forced along the same path"
    figures = {"decoded": decoded, "teacher_forced": forced, "recorded": recorded}
    found = []
    if decoded < GAP_WARNING * forced and steps >= GAP_STEPS:
        severity: Severity = "fault" if decoded < GAP_FAULT * forced else "warning"
        remedy = "the features of decoding differ from those of a whole text: try dtype=float32, another device"
        found.append(Finding("serving", severity, measured, remedy, figures))
    if recorded is not None and decoded < RECORDED * recorded:
        words = f"{decoded:.2f} tokens a step here, {recorded:.2f} when it was exported"
        named = has_fault([*earlier, *found])
        remedy = "fix the faults named here" if named else known.open_causes(case)
        found.append(Finding("serving", "warning", words, remedy, figures))
    return found or [Finding("serving", "ok", measured, figures=figures)]


def knows_thinking(case: Case) -> bool:
    """Whether the template has a thinking mode."""
    return "enable_thinking" in str(case.tokenizer.chat_template)


def check_thinking(
    case: Case, probe: Probe, prompts: Sequence[Prompt], answers: list[Answer], setting: Setting, bar: Progress
) -> list[Finding]:
    """Checks whether the drafter does better on prompts rendered with the thinking mode on, or off."""
    if not knows_thinking(case):
        return [Finding("thinking", "ok", "the template knows no thinking mode")]

    def render(mode: bool | None) -> list[list[int]]:
        return [encode_chat(case.tokenizer, prompt.messages, mode, prompt.tools) for prompt in prompts]

    here = render(case.thinking)
    modes = [answers["thinking"] for answers in case.answered_by if "thinking" in answers]
    trained = render(modes[0]) if modes and modes.count(modes[0]) == len(case.answered_by) else None
    base = probe.score(answers, setting, stride=blocks_stride(answers))
    found = []
    for mode in (False, True):
        there = render(mode)
        others = [] if there == here else probe.answers(there, bar)
        if not others:
            continue
        other = probe.score(others, setting, stride=blocks_stride(others))
        difference, as_trained = unpaired_gain(other, base), there == trained
        ratio = (other.tau - 1) / max(base.tau - 1, 1e-9)
        severity: Severity = "ok"
        if difference.z >= THINKING_Z and difference.tokens >= CLEAR_TOKENS:
            # other answers may just be easier, so without a record a larger gain is needed
            fault, warning = (THINKING_WARNING, 1.0) if as_trained else (THINKING_FAULT, THINKING_WARNING)
            certain = ratio >= fault and restores(case, other.tau, base.tau)
            severity = "fault" if certain else "warning" if ratio >= warning else "ok"
        name = f"enable_thinking={str(mode).lower()}"
        words = f"as examined {base.tau:.2f} tokens a step, with {name} {other.tau:.2f}"
        remedy = ""
        if severity == "fault":
            remedy = f"it was trained for {name}: serve it so, or train one for this mode"
        elif severity == "warning":
            remedy = f"it is better with {name}: serve it so, if that is what it was trained for"
        figures = {"tau": base.tau, "tau_other": other.tau, "z": difference.z, "trained_so": as_trained}
        found.append(Finding("thinking", severity, words, remedy, figures))
    return found or [Finding("thinking", "ok", "the template renders these prompts the same in every mode")]


def check_temperature(
    case: Case,
    probe: Probe,
    prompts: Sequence[list[int]],
    answers: list[Answer],
    temperature: float,
    earlier: Sequence[Finding],
    bar: Progress,
) -> list[Finding]:
    """Compares acceptance at a temperature with that of greedy decoding, with greedy and with sampled drafts."""
    warm = probe.answers(prompts, bar, temperature=temperature)
    sampled: list[Generation] = []
    for prompt in prompts:
        sampled.append(probe.decode(prompt, temperature, "probabilistic"))
        bar.advance(ANSWER_WORK, note="answering")
    here, there, drawn = (
        sum(len(each.tokens) - 1 for each in group) / max(1, sum(len(each.steps) for each in group))
        for group in ([a.generation for a in answers], [a.generation for a in warm], sampled)
    )
    words = (
        f"greedy {here:.2f} tokens a step, at temperature {temperature:g} {there:.2f}, "
        f"with drafts sampled at this temperature {drawn:.2f}"
    )
    trained = [each["temperature"] for each in case.answered_by if isinstance(each.get("temperature"), int | float)]
    figures = {"tau": here, "tau_at_temperature": there, "tau_sampled_drafts": drawn, "trained_at": trained}
    setting = Setting.of(probe.drafter)
    base, scores = (probe.score(each, setting, stride=blocks_stride(each)) for each in (answers, warm))
    colder = scores.tau - 1 < COLDER * (base.tau - 1) and unpaired_gain(base, scores).z >= THINKING_Z
    if not colder or has_fault(earlier):
        return [Finding("temperature", "ok", words, figures=figures)]
    ways = []
    if drawn >= SAMPLED_GAIN * there:
        ways.append("serve it with --draft-sample-method probabilistic")
    if trained and max(trained) < temperature:
        ways.append(
            f"train on responses sampled at this temperature (responses.temperature={temperature:g}; those of its "
            f"training were sampled at {max(trained):g})"
        )
    if not ways:
        ways.append("the target itself is less certain at this temperature: lower --num-speculative-tokens")
    return [Finding("temperature", "warning", words, "; ".join(ways), figures)]


def enough(answers: Sequence[Answer], blocks: int) -> None:
    """Refuses to judge a drafter by a few blocks. Raises UserError."""
    count = sum(answer.anchors for answer in answers)
    if count < blocks:
        raise UserError(
            f"the target's answers are too short to judge a drafter by ({count} tokens, {blocks} needed): "
            f"give other --prompts, a larger --limit or --max-tokens"
        )


def _curve(shares: Sequence[float]) -> str:
    return " ".join("-" if math.isnan(share) else f"{100 * share:.0f}" for share in shares) + " %"
