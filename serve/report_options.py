"""Takes options of dflash-serve from the recommendation in a report of dflash-eval."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.report.schema import read_report

from .config import OWN, ServeConfig

if TYPE_CHECKING:
    from torch import Tensor

RUNTIME = "engine"  # `runtime` in reports of our engine

DRAFTING = {"num_speculative_tokens", "draft_tree", "draft_tree_width"}  # given ones replace all of the report's


def recommended(path: str, config: ServeConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recommended options that are not given: the way to draft and the number of requests at a time.

    Raises:
        UserError: the report cannot be read, has no recommendation, or was measured with another drafter.
    """
    report = read_report(Path(path))
    advice, arguments = report["recommendation"], report["arguments"]
    if advice is None:
        raise UserError(f"from_report is {path}, which has no recommendation; measure with a baseline (--baseline)")
    if config.drafter is None:
        raise UserError(f"from_report is {path}, but no drafter is given; add --drafter {arguments.get('drafter')}")
    _check_drafter(path, config.drafter, arguments.get("drafter_sha256"))
    found: dict[str, Any] = {}
    if most := advice["max_concurrency"]:
        found["max_num_seqs"] = most
    if advice["use_drafter"] is False:
        found = {"num_speculative_tokens": 0}
    elif config.external.engine != OWN:
        found["num_speculative_tokens"] = advice["num_speculative_tokens"]
    elif ways := advice.get("drafting"):
        load = config.runtime.max_num_seqs or most or 1
        way = max((w for w in ways if w["concurrency"] <= load), key=lambda w: w["concurrency"], default=ways[0])
        found["draft_tree"] = way["draft_tree"]
        if way["draft_tree_width"]:
            found["draft_tree_width"] = way["draft_tree_width"]
    elif report["sweeps"].get("draft_length"):  # else the engine chooses, as it does without a report
        found["num_speculative_tokens"] = advice["num_speculative_tokens"]
    if DRAFTING & given.keys():
        found = {key: value for key, value in found.items() if key not in DRAFTING}
    return {key: value for key, value in found.items() if key not in given}


def other_target(path: str, target: str) -> str | None:
    """Returns the target that a report was measured with, if its name differs."""
    measured = read_report(Path(path))["arguments"].get("target")
    same = measured is None or os.path.basename(os.path.normpath(measured)) == os.path.basename(
        os.path.normpath(target)
    )
    return None if same else measured


def check_target(path: str, tensors: Iterable[tuple[str, "Tensor"]], dtype: str) -> None:
    """Checks that a report of our engine was measured with these weights. Raises UserError if not."""
    from dflash_toolkit.fingerprint import sample_digest

    report = read_report(Path(path))
    arguments = report["arguments"]
    measured = arguments.get("target_sample_sha256")
    if arguments["runtime"] != RUNTIME or report["environment"]["dtype"] != dtype or measured is None:
        return  # other names or other rounding
    if sample_digest(tensors) != measured:
        raise UserError(
            f"from_report is {path}, which was measured with other weights of the target; measure this one with "
            f"dflash-eval"
        )


def _check_drafter(path: str, drafter: str, measured: str | None) -> None:
    if measured is None:  # a report of an endpoint
        return
    from dflash_toolkit.fingerprint import drafter_digest
    from dflash_toolkit.models.dflash.checkpoint import load_drafter

    if drafter_digest(load_drafter(drafter)) != measured:
        raise UserError(
            f"from_report is {path}, which was measured with other weights than those of drafter {drafter}; measure "
            f"this one with dflash-eval"
        )
