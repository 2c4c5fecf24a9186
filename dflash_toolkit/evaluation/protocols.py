"""Published measurements: their settings, their results, and comparisons with ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report.results import Report
    from .report.table import Table

QWEN3_8B = "Qwen/Qwen3-8B"


@dataclass(frozen=True, slots=True)
class Protocol:
    """A published measurement: greedy, without thinking, first turns, one request at a time."""

    source: str
    published: Mapping[str, Mapping[str, float]]  # mean acceptance length by kind of drafter and set
    limit: int | None = None  # prompts per set
    max_tokens: int = 2048
    target: str = QWEN3_8B
    figure: str = "tau_mean"  # our name of the published figure
    share: float | None = None  # share of the published value that is required
    engine: str = ""
    block_size: int = 16

    @property
    def sets(self) -> tuple[str, ...]:
        """Sets of all kinds of drafters, in order."""
        return tuple(dict.fromkeys(name for row in self.published.values() for name in row))


PROTOCOLS = {
    # table 1, blocks of 16 at temperature 0; without mbpp, as z-lab's prompts lack its tests
    "paper": Protocol(
        "the DFlash paper (arXiv 2602.06036, table 1) with z-lab's client",
        {
            "dflash": {
                "gsm8k": 6.54,
                "math500": 7.87,
                "aime25": 7.08,
                "humaneval": 6.50,
                "livecodebench": 7.27,
                "mt_bench": 4.24,
            }
        },
        engine="Hugging Face modules, on one H200",
    ),
    # test_dflash_acceptance_rates of tests/v1/e2e/spec_decode/test_spec_decode.py
    "vllm": Protocol(
        "vLLM's acceptance test, which asks for 95 % of the paper's lengths (of gsm8k's 97.5 %, for it is a part)",
        {"dflash": {"mt_bench": 4.24, "humaneval": 6.50, "gsm8k": 6.54 * 0.975}},
        limit=200,
        share=0.95,
        engine="vLLM",
        block_size=17,  # its num_speculative_tokens is 16
    ),
    # Model-Optimizer's pull request 2342: both kinds with the same training
    "modelopt": Protocol(
        "ModelOpt's drafters of both kinds with the same training (Model-Optimizer, pull request 2342)",
        {"dflash": {"gsm8k": 6.341, "math500": 7.909}, "dflash2": {"gsm8k": 7.252, "math500": 8.999}},
        engine="SGLang, on one H100",
    ),
}


def fixed_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a protocol fixes; `given` are the command's options that differ from the defaults.

    Raises:
        ValueError: an option has another value.
    """
    protocol = PROTOCOLS[name]
    fixed: dict[str, Any] = {
        "max_tokens": protocol.max_tokens,
        "temperature": (0.0,),
        "thinking": (False,),
        "multi_turn": False,
        "form": "auto",
        "limit": protocol.limit,
    }
    for option, value in given.items():
        if option in fixed and value != fixed[option] and not (option == "limit" and value and not protocol.limit):
            raise ValueError(f"{option} is given with protocol, which sets it; remove one of them")
    return fixed | {key: value for key, value in given.items() if key == "limit"}


def published_table(report: "Report", name: str) -> "Table":
    """Compares our figures with the published ones; the report must use this protocol."""
    from .report.table import Table, number

    protocol = PROTOCOLS[name]
    kind = report.arguments.get("drafter_kind") or "dflash"
    row = protocol.published.get(kind, {})
    header = ("Set", "Requests", "Ours", "Published", "Of it", *(("Asked for",) if protocol.share else ()))
    rows = []
    for set_name, result in report.sets.items():
        ours, theirs = getattr(result.summary.drafted, protocol.figure), row.get(set_name)
        cells = [set_name, str(result.summary.drafted.answers), number(ours)]
        cells += [number(theirs), f"{100 * ours / theirs:.1f} %"] if theirs else ["-", "-"]
        if protocol.share:
            low = protocol.share * theirs if theirs else None
            cells.append("-" if low is None else f"{number(low)}: {'yes' if ours >= low else 'no'}")
        rows.append(tuple(cells))
    return Table(f"Compared with {protocol.source}", header, tuple(rows))


def caveats(report: "Report", name: str) -> list[str]:
    """Returns the reasons why the comparison may not hold."""
    protocol, arguments = PROTOCOLS[name], report.arguments
    found = [f"It was measured with {protocol.engine}; another engine rounds differently, which changes some answers."]
    if arguments["target"] != protocol.target:
        found.append(f"The target is {arguments['target']}, the published one is {protocol.target}.")
    if arguments["block_size"] != protocol.block_size:
        found.append(f"Blocks have {arguments['block_size']} tokens, the published ones {protocol.block_size}.")
    kind = arguments.get("drafter_kind")
    if kind is not None and kind not in protocol.published:
        found.append(f"Nothing is published for drafters of kind {kind}, only for kind dflash.")
    if kind is None:
        found.append("The server does not report the kind of its drafter; the published figures are for DFlash.")
    if missing := [each for each in protocol.sets if each not in report.sets]:
        found.append(f"Not measured: {', '.join(missing)}.")
    if protocol.limit is None and arguments.get("limit"):
        found.append("Only some prompts were measured; the published figures use all of them.")
    return found
