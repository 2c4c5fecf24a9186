"""Write the tables of docs/models.md and docs/train.md that come from the package, not from scripts/results.

python scripts/docs/generated.py            write every `<!-- generated: NAME -->` ... `<!-- end -->`
python scripts/docs/generated.py --check    write nothing; exit with 1 if a page would change
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from dflash_toolkit.config import read_yaml
from dflash_toolkit.kernels import features
from dflash_toolkit.kernels.features import KNOWN
from dflash_toolkit.models.dflash.architecture import architectures
from dflash_toolkit.models.dflash.serving import SERVED, block_scale
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.published import NOTES, PUBLISHED, Published
from dflash_toolkit.models.spec import ARCHITECTURES, ModelSpec
from dflash_toolkit.preflight import GIB, size
from dflash_toolkit.roofline import SHEETS
from dflash_toolkit.runtime.fit import Budget, fit, planner_for
from dflash_toolkit.runtime.options import EngineOptions
from dflash_toolkit.train.config import configure
from dflash_toolkit.train.run.estimate import estimate
from dflash_toolkit.train.run.rates import H100, H200, Machine
from dflash_toolkit.train.run.target_weights import computes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.shapes import named_shape

ROOT = Path(__file__).resolve().parents[2]

PAGES = ("docs/models.md", "docs/train.md")
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", flags=re.S)
Rows = list[list[str]]

TOO_LARGE = ("Qwen3.5-122B-A10B",)  # for one GPU, and the engine takes one
Z_LAB_CLIENT = ("Qwen3ForCausalLM", "LlamaForCausalLM")  # its README: "only Qwen3 and LLaMA-3.1"


# ---- the targets that people run most, with their real sizes

# configs/NAME.yaml: the architecture of its target in config.json
RECIPES = {
    "qwen3-8b": "Qwen3ForCausalLM",
    "qwen3-8b-long": "Qwen3ForCausalLM",
    "llama-3.1-8b": "LlamaForCausalLM",
    "qwen3.5-9b": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-27b-fp8": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-35b-a3b-fp8": "Qwen3_5MoeForConditionalGeneration",
    "qwen3-coder-30b-a3b": "Qwen3MoeForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
}
_SHAPES = {
    "qwen3-8b-long": "qwen3-8b",
    "llama-3.1-8b": "llama3.1-8b",
    "qwen3.6-27b-fp8": "qwen3.8-27b-fp8",  # one shape
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",  # one shape but for the longest context
}


def config_of(name: str) -> PreTrainedConfig:
    """Returns the configuration of a recipe's target, without weights."""
    return named_shape(_SHAPES.get(name, name))


def computed(architecture: str) -> bool:
    """Returns whether our engine computes a target with this class in its config.json."""
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
        if engine in SERVED[each.architecture] and engine in known.releases and not scaled and reads:
            found.append(name)
    if each.form == "z-lab" and known.releases and each.architecture in Z_LAB_CLIENT:
        found.append("z-lab's client")
    return found


def published_drafters() -> Rows:
    rows = [["target", "drafter", "kind", "block", "served by", "note"]]
    for each in PUBLISHED:
        name = f"[{each.drafter}](https://huggingface.co/{each.drafter})" + (" *" if each.source == NOTES else "")
        kind = each.kind if each.form == "z-lab" else f"{each.kind}, {each.form} form"
        block = str(each.block_size) if each.block_size else "-"
        served = ", ".join(servers(each)) or "not checked"
        note = "; ".join(filter(None, [each.note, each.licence and f"licence: {each.licence}"]))
        rows.append([each.target, name, kind, block, served, note])
    return rows


def training_cost() -> Rows:
    """The recipes of configs/ as `dflash-train --estimate` sees them, on the smaller GPU that holds the run."""
    rows = [["target", "GPU", "responses", "training", "disk", "memory"]]
    for name in RECIPES:
        config, target = configure(read_yaml(ROOT / "configs" / f"{name}.yaml"), name), config_of(name)
        served = not computes(target)
        config = replace(config, response_files=())  # as many prompts as the recipe says, written by now or not
        found = [
            estimate(config, target, each, thinking=False, server=served, linear_attention=True)
            for each in (H100, H200)
        ]
        one = next(each for each in found if each.fits and named_gpu(name) == each.machine.name)
        assert one.response_rate
        mark = "" if one.response_rate.how.startswith("measured") else " *"
        training = f"{one.hours('features', 'training'):.0f} h" + ("" if one.feature_rate.how == "measured" else " *")
        memory = f"{one.memory / GIB:.0f} GiB"
        target_link = f"[{config.target.split('/')[-1]}](https://huggingface.co/{config.target})"
        target_link += ", [long contexts](#long-contexts)" if config.prompts.join_to else ""
        rows.append(
            [target_link, one.machine.name, f"{one.hours('responses'):.0f} h{mark}", training, size(one.disk), memory]
        )
    return rows


# the largest Qwen3 for each, and its card
CARDS = (("1.7b", "RTX 4070"), ("4b", "RTX 3090"), ("4b", "RTX 4090"), ("4b", "RTX 5090"), ("8b", "L40S"))


def training_cost_of_cards() -> Rows:
    """The defaults with 10,000 prompts on smaller GPUs, as `dflash-train --estimate --estimate-gpu NAME` sees them."""
    rows = [["target", "GPU", "passes per step", "responses", "training", "memory"]]
    for name, card in CARDS:
        config = configure({"target": f"qwen3-{name}", "prompts": {"max_prompts": 10_000}}, name)
        found = estimate(config, named_shape(f"qwen3-{name}"), Machine.of(SHEETS[card]), linear_attention=True)
        passes = found.passes.partition(" ")[0] + (", recomputed" if "recompute" in found.passes else "")
        hours = [f"{found.hours(*stages):.1f} h" for stages in (("responses",), ("features", "training"))]
        rows.append([f"Qwen3-{name.upper()}", card, passes, *hours, f"{found.memory / GIB:.0f} GiB"])
    return rows


def named_gpu(name: str) -> str:
    """Returns the GPU that a recipe's first line names."""
    first = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    return "H200" if "H200" in first else "H100"


# Milliseconds of a step at 1, 8 and 32 requests: plain, and with blocks of 8. Random weights, prompts of 512 tokens,
# `git show 4470a42:scripts/results/shapes_fp8_h100.json` and `..._h200.json`, which hold the commands
STEPS_MS = {
    ("Qwen3-8B FP8", "H100"): ((3.80, 4.26, 5.26), (4.77, 6.61, 9.71)),
    ("Qwen3.6-27B FP8", "H100"): ((11.24, 12.77, 18.84), (13.27, 20.89, 33.99)),
    ("Qwen3.6-35B-A3B FP8", "H200"): ((2.36, 4.67, 10.24), (5.00, 12.38, 20.39)),
}


def break_even() -> Rows:
    """The acceptance length at which a step with a block of 8 is as fast as plain steps."""
    rows = [["tokens per step needed", "GPU", "1 request", "8 requests", "32 requests"]]
    for (target, gpu), (plain, drafted) in STEPS_MS.items():
        rows.append([target, gpu, *(f"{b / a:.1f}" for a, b in zip(plain, drafted, strict=True))])
    return rows


# memory that the driver and CUDA hold, and a desktop with a browser on top of it
CUDA_GIB, DESKTOP_GIB = 0.4, 0.6
SMALL_GPUS = {"RTX 4070": "qwen3-4b", "RTX 5070 Ti": "qwen3-8b-fp8", "RTX 4090": "qwen3-8b", "RTX 5090": "qwen3-8b"}


def small_gpus() -> Rows:
    """Tokens and requests that the engine chooses by default, with the default drafter of each target."""
    rows = [["GPU", "target", "alone", "with a desktop"]]
    cuda = torch.device("cuda")
    for name, shape in SMALL_GPUS.items():
        sheet, config = SHEETS[name], named_shape(shape)
        features._features[cuda] = next(each for each in KNOWN.values() if each.capability == sheet.capability)
        planner = planner_for(ModelSpec.of_target(config), drafter_shape(config), cuda, torch.bfloat16)
        total, row = int(sheet.memory_gib * GIB), [name, shape.title().replace("Fp8", "FP8")]
        for held in (CUDA_GIB, CUDA_GIB + DESKTOP_GIB):
            budget = Budget(EngineOptions().memory_share(total), total, total - int(held * GIB)).bytes
            options, plan = fit(EngineOptions(), planner, budget, cuda)
            assert plan.missing(options, budget) <= 0, f"{shape} on {name}"
            row.append(f"{options.max_model_len:,} ({options.max_num_seqs})")
        rows.append(row)
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "published-drafters": published_drafters,
    "training-cost": training_cost,
    "training-cost-of-cards": training_cost_of_cards,
    "break-even": break_even,
    "small-gpus": small_gpus,
}


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
