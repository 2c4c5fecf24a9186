"""Checks whether a drafter's probabilities can be trusted, on which draft trees and adaptive chains depend."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..calibration import Calibration
from ..confidence import JudgedNode, fit, judge
from .files import Case
from .finding import Finding, Severity, has_fault
from .probe import Answer, Probe, clustered
from .remedies import calibration_remedy

ENOUGH = 25  # drafts of a chain that were accepted, and as many that were not; fewer are not judged
SURE_Z = 3.0
NO_INFORMATION = 0.6  # an area under the curve that is certainly lower is close to chance, 0.5
WORSE = 0.05  # nats per node by which a stored calibration predicts worse than the drafter itself
OFF = 1.3  # promised over accepted nodes, or the inverse


def check_calibration(
    case: Case, probe: Probe, answers: Sequence[Answer], earlier: Sequence[Finding], serve: str
) -> list[Finding]:
    """Compares the drafter's probabilities, and the calibration that it carries, with acceptance in its trees.

    Args:
        serve: the command that serves this pair.
    """
    if has_fault(earlier):
        return [Finding("calibration", "ok", "not measured: fix the faults first")]
    texts = [(answer.tokens[: answer.prompt_tokens].tolist(), answer.generation) for answer in answers]
    return [judged(case, judge(probe.target, probe.drafter, texts), serve)]


def judged(case: Case, nodes: Sequence[JudgedNode], serve: str) -> Finding:
    """Judges the probabilities by the nodes with an accepted parent, block by block."""
    assert case.config is not None
    slots = case.config.block_size - 1
    log_probs, at, accepted, best = (torch.tensor(part) for part in zip(*nodes, strict=True))
    chains, trees = (area(log_probs[of], accepted[of]) for of in (best, torch.ones_like(best)))
    cold, stored = Calibration.cold(slots), case.config.calibration if case.config.acceptance_bias else None
    promises = {name: of(log_probs.exp(), at) for name, of in (("stored", stored), ("own", cold)) if of}
    taken, fitted = int(accepted.sum()), fit(nodes, slots)
    figures = {
        "nodes": len(nodes),
        "accepted": taken,
        "promised_stored": float(promises["stored"].sum()) if stored else None,
        "promised_by_the_drafter": float(promises["own"].sum()),
        "auc_chains": chains[0],
        "auc_trees": trees[0],
        "acceptance_slope": fitted.slope if fitted else None,
        "acceptance_bias": list(fitted.bias) if fitted else None,
    }
    said = f"{figures['promised_stored']:.0f} were promised by the stored calibration" if stored else "none is stored"
    measured = (
        f"of {len(nodes)} judged nodes of draft trees {taken} were accepted; {said}, "
        f"{figures['promised_by_the_drafter']:.0f} by the drafter's own probabilities; probabilities of accepted "
        f"nodes are the higher ones with an AUC of {trees[0]:.2f}, {chains[0]:.2f} among the best of each slot"
    )
    chosen = int((accepted & best).sum())
    few = min(chosen, int(best.sum()) - chosen) < ENOUGH
    severity: Severity = "ok"
    words, remedy = f"too few drafts to judge the AUC by; {measured}" if few else measured, ""
    if not few and surely_none(chains):
        useless = (
            "draft trees and chains of their own length cannot pay"
            if surely_none(trees)
            else ("chains of their own length cannot pay, and trees by the order of their tokens alone")
        )
        severity, words = "warning", f"its probabilities do not predict acceptance; {measured}"
        remedy = f"{useless}: serve blocks, `{serve} --no-draft-tree`; longer training makes them informative"
    elif stored:
        block = (best & (at == 1)).long().cumsum(0) - 1
        lost = clustered(_surprise(promises["stored"], accepted) - _surprise(promises["own"], accepted), block)
        sure = (promises["stored"].sum() - taken) / (promises["stored"] * (1 - promises["stored"])).sum().sqrt()
        ratio = float(promises["stored"].sum()) / max(taken, 1)
        if lost.z >= SURE_Z and lost.tokens >= WORSE:
            severity = "warning"
            words = f"the stored calibration is worse than none, as one of another drafter is; {measured}"
        elif abs(float(sure)) >= SURE_Z and not 1 / OFF <= ratio <= OFF:
            severity, words = "warning", f"the stored calibration promises {ratio:.2f} times as much; {measured}"
        if severity != "ok":
            remedy = (
                f"{calibration_remedy(case, fitted)}; till then a server with draft trees begins with wrong ones, "
                f"until its first steps have corrected them"
            )
    return Finding("calibration", severity, words, remedy, figures)


def area(values: Tensor, accepted: Tensor) -> tuple[float, float]:
    """Returns how often an accepted node has a higher value than a rejected one, ties half, and its standard error
    (Hanley and McNeil, 1982); NaN if either kind is missing."""
    ones, zeros = values[accepted].double(), values[~accepted].double().sort().values
    m, n = len(ones), len(zeros)
    if not m or not n:
        return math.nan, math.nan
    below, up_to = (torch.searchsorted(zeros, ones, right=right).double() for right in (False, True))
    a = float((below + up_to).mean()) / 2 / n
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    return a, math.sqrt(max(0.0, a * (1 - a) + (m - 1) * (q1 - a * a) + (n - 1) * (q2 - a * a)) / (m * n))


def surely_none(area: tuple[float, float]) -> bool:
    """Whether an area is close to chance, or below."""
    return area[0] + SURE_Z * area[1] < NO_INFORMATION


def _surprise(promised: Tensor, accepted: Tensor) -> Tensor:
    """Returns the negative log-likelihood, in nats."""
    return -torch.where(accepted, promised, 1 - promised).clamp(min=1e-9).log()
