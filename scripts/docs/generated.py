"""Write the tables of docs/models.md and docs/train.md that come from the package, not from scripts/results.

python scripts/docs/generated.py            write every `<!-- generated: NAME -->` ... `<!-- end -->`
python scripts/docs/generated.py --check    write nothing; exit with 1 if a page would change
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from transformers.models.auto import modeling_auto

from dflash_toolkit.models.dflash.architecture import architectures
from dflash_toolkit.models.dflash.serving import SERVED, block_scale
from dflash_toolkit.models.published import PUBLISHED, Published
from dflash_toolkit.models.spec import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/models.md", "docs/train.md")
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.S)
Rows = list[list[str]]

TOO_LARGE = ("Qwen3.5-122B-A10B",)  # for one GPU, and the engine takes one
Z_LAB_CLIENT = ("Qwen3ForCausalLM", "LlamaForCausalLM")  # its README: "only Qwen3 and LLaMA-3.1"


def computed(architecture: str) -> bool:
    """Returns whether our engine computes a target whose config.json names this class."""
    names = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    kinds = {kind for each in names for kind, name in each.items() if name == architecture}
    return any(kind in ARCHITECTURES or f"{kind}_text" in ARCHITECTURES for kind in kinds)


def servers(each: Published) -> list[str]:
    """Returns what reads a pair's target and its drafter, as far as this project knows."""
    known = {one.title: one for one in architectures()}.get(each.kind)
    if known is None or not each.architecture:
        return []
    found = []
    # the speculators form of DFlash 2 is a layout of its own
    readable = each.form == "z-lab" or each.kind == "DFlash"
    if readable and computed(each.architecture) and each.target not in TOO_LARGE:
        found.append("our engine")
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        scaled = block_scale(engine, each.architecture, 2) != 1.0
        reads = each.form == "z-lab" or engine == "vllm"
        if engine in SERVED[each.architecture] and not scaled and reads:
            found.append(name)
    if each.form == "z-lab" and each.architecture in Z_LAB_CLIENT:
        found.append("z-lab's client")
    return found


def published_drafters() -> Rows:
    rows = [["target", "drafter", "kind", "block", "served by", "licence", "source", "note"]]
    for each in PUBLISHED:
        name = f"[{each.drafter}](https://huggingface.co/{each.drafter})"
        kind = each.kind if each.form == "z-lab" else f"{each.kind}, {each.form} form"
        block = str(each.block_size) if each.block_size else "-"
        served = ", ".join(servers(each)) or "not checked"
        rows.append([each.target, name, kind, block, served, each.licence or "-", each.source, each.note])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {"published-drafters": published_drafters}


def markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, f"|{'---|' * len(rows[0])}")
    return "\n".join(lines)


def rewritten(page: Path) -> str:
    """Returns a page with its generated tables as they are now."""
    text = page.read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}\n{markdown(TABLES[found[2]]())}\n\n{found[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/ that come from the package.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    check = parser.parse_args().check
    changed = [page for page in (ROOT / name for name in PAGES) if rewritten(page) != page.read_text(encoding="utf-8")]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: {'differs from the package' if check else 'written'}")
        if not check:
            page.write_text(rewritten(page), encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
