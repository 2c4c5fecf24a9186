"""Writes the tables and charts of README.md and docs/.

    python scripts/docs/tables.py            write every `<!-- table: NAME -->` ... `<!-- end -->`, and the charts
    python scripts/docs/tables.py --check    write nothing; list the files that would change and exit with 1

The table NAME is the file scripts/results/NAME.json:

    runs      list of {gpu, versions, commit, date, commands}: the commands as they were run, and where
    columns   list of [title, key, format]; the key "a/b" divides, the format is one of str.format ("{}" by default)
    rows      list of objects; a value "=FILE; key=value; ... : key" is read from that row of another table. Rows with
              "listed": false are not shown
    chart     optional: {title, x, x_name, series: [[key, name], ...], format} for docs/assets/NAME.svg

Two tables are computed: `models` from the tests' architectures, `measured` from the files of the page's other tables.
"""

import argparse
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dflash_toolkit.evaluation.report import plots

ROOT = Path(__file__).resolve().parents[2]
RESULTS, ASSETS = ROOT / "scripts" / "results", ROOT / "docs" / "assets"
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", flags=re.S)
PACKAGES = {"torch": "PyTorch", "triton": "Triton", "vllm": "vLLM"}
STYLE = """
text { font: 11px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #4b5563 }
.title { font-size: 13px; font-weight: 600; fill: #1f2937 }
.grid { stroke: #e5e7eb } .axis { stroke: #6b7280 }
.line { fill: none; stroke: var(--c); stroke-width: 2 }
.dot { fill: #ffffff; stroke: var(--c); stroke-width: 1.6 }
.c0 { --c: #9ca3af } .c1 { --c: #2f6bde } .c2 { --c: #16877a } .c3 { --c: #c9660a } .c4 { --c: #a23fb8 }
"""
LEGEND_ROW = 18


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"error: no table `{name}`: {path.relative_to(ROOT)} does not exist")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def value(row: dict[str, Any], key: str) -> Any:
    """The value of a key in a row, or the quotient of the keys "a/b"; None where a value is missing."""
    parts = [resolved(row.get(part)) for part in key.split("/")]
    if None in parts:
        return None
    return parts[0] / math.prod(parts[1:]) if len(parts) > 1 else parts[0]


def resolved(found: Any) -> Any:
    """A value, or the value that "=FILE; key=value; ... : key" points to."""
    if not (isinstance(found, str) and found.startswith("=")):
        return found
    where, _, key = found[1:].partition(":")
    name, *conditions = (part.strip() for part in where.split(";"))
    wanted = dict(condition.split("=", 1) for condition in conditions)
    rows = [row for row in load(name)["rows"] if all(str(row.get(key)) == each for key, each in wanted.items())]
    if len(rows) != 1:
        raise SystemExit(f"error: `{found}` matches {len(rows)} rows of scripts/results/{name}.json, not one")
    return value(rows[0], key.strip())


def cell(row: dict[str, Any], key: str, form: str = "{}") -> str:
    """A cell's text; a format with names, such as "{plain:.0f} tok/s", reads several keys."""
    if re.search(r"\{\w", form):
        return form.format(**{name: resolved(found) for name, found in row.items()})
    found = value(row, key)
    return "" if found is None else form.format(found)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def from_file(name: str) -> str:
    table = load(name)
    columns = table["columns"]
    return markdown(
        [title for title, *_ in columns],
        [[cell(row, *each) for _, *each in columns] for row in table["rows"] if row.get("listed", True)],
    )


def measured(names: Sequence[str]) -> str:
    """The tables by machine, versions, commit and date."""
    found = dict[tuple[str, ...], list[str]]()
    for name in names:
        for run in load(name).get("runs", []):
            versions = ", ".join(
                f"{PACKAGES[key]} {run['versions'][key]}" for key in PACKAGES if key in run["versions"]
            )
            gpu = re.sub(r"NVIDIA | 80GB HBM3", "", run["gpu"])
            files = found.setdefault((gpu, versions, run["commit"], run["date"]), [])
            files += [name] if name not in files else []
    rows = [[", ".join(files), *run] for run, files in found.items()]
    return markdown(["file in `scripts/results/`", "GPU", "versions", "commit", "date"], rows)


def models() -> str:
    """Every architecture that the tests train for and decode, and what serves a drafter of ours with it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from transformers.models.auto import modeling_auto

    from dflash_toolkit.config import UnsupportedModel, UserError
    from dflash_toolkit.models.dflash.serving import READ, SERVED
    from dflash_toolkit.models.quantized import FORM
    from dflash_toolkit.models.spec import ModelSpec
    from dflash_toolkit.serve.external import BY_NAME
    from dflash_toolkit.serve.external_models import Draft

    def yes(works: Callable[..., object], *given: object) -> str:
        try:
            works(*given)
        except (UnsupportedModel, UserError):
            return "no"
        return "yes"

    rows = []
    drafter = Draft("ours", "DFlashDraftModel", speculators=False, block_size=16, raw={})
    for name, each in importlib.import_module("architectures").ARCHITECTURES.items():
        config = each.config()
        text = config.get_text_config(decoder=True)
        kinds = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if text is not config:
            kinds = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        kind = kinds[config.model_type]
        if kind not in SERVED:
            raise SystemExit(
                f"error: SERVED of dflash_toolkit/models/dflash/serving.py lacks {kind} (in the tests: {name})"
            )
        target = {"architectures": [kind], "hidden_size": text.hidden_size}
        others = [yes(drafter.check_served, BY_NAME[other], release, name, target) for other, release in READ.items()]
        sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
        inside = (
            "moe_intermediate_size", "shared_expert_intermediate_size", "linear_key_head_dim", "linear_value_head_dim",
            "global_head_dim", "intermediate_size_mlp",
        )  # fmt: skip
        sizes |= dict.fromkeys(each.options.keys() & set(inside), 128)
        in_blocks = each.config(**sizes).get_text_config(decoder=True)
        in_blocks.quantization_config = dict(FORM)
        rows.append([name, "yes", *(yes(ModelSpec.of_target, ours) for ours in (text, in_blocks)), *others])
    engines = ["our engine", "the same in FP8", f"vLLM {READ['vllm']}", f"SGLang {READ['sglang']}"]
    return markdown(["target", "train, evaluate, examine", *engines], rows)


# ---- charts --------------------------------------------------------------------------------------------------------


def chart(table: dict[str, Any]) -> str:
    """A table's chart as an SVG file, with its title and a legend."""
    spec, rows = table["chart"], table["rows"]
    rows = [row for row in rows if all(str(row.get(key)) == each for key, each in spec.get("only", {}).items())]
    forms = {key: form for _, key, *form in table["columns"]}
    labels = [cell(row, spec["x"], *forms.get(spec["x"], ())) for row in rows]
    series = []
    for i, (key, name) in enumerate(spec["series"]):
        found = (value(row, key) for row in rows)
        series.append(plots.Series(name, f"c{i}", tuple(math.nan if each is None else each for each in found)))
    drawn = plots.curves(
        spec["title"], series, spec["x_name"], labels=labels, top=None, form=spec.get("format", "{:g}").format,
    )  # fmt: skip
    height = plots.HEIGHT + LEGEND_ROW * len(series)
    inside = drawn[drawn.index("\n") : drawn.rindex("</svg>")]
    legend = "".join(
        plots.swatch(each.colour).replace('<svg class="swatch"', f'<svg x="44" y="{y}" width="24" height="12"')
        + f'<text x="76" y="{y + 10}">{escape(each.name)}</text>\n'
        for y, each in ((plots.HEIGHT + LEGEND_ROW * i - 2, each) for i, each in enumerate(series))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.5 * plots.WIDTH:.0f}" '
        f'viewBox="0 -16 {plots.WIDTH} {height + 20}" role="img">\n'
        f"<title>{escape(spec['title'])}</title>\n<style>{STYLE}</style>\n"
        f'<rect x="0" y="-16" width="{plots.WIDTH}" height="{height + 20}" rx="8" fill="#ffffff"/>\n'
        f'<text class="title" x="10" y="4">{escape(spec["title"])}</text>{inside}{legend}</svg>\n'
    )


# ---- pages ---------------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(page: Path) -> str:
    """The page's text with every table written again."""
    text = page.read_text(encoding="utf-8")
    names = [name for _, name, _ in MARKED.findall(text)]

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name == "models":
            body = models()
        elif name == "measured":
            body = measured([name for name in names if name != "measured"])
        else:
            body = from_file(name)
        return f"{match[1]}\n{body}\n{match[3]}"

    return MARKED.sub(fill, text)


def files() -> Iterator[tuple[Path, str]]:
    """Every page with tables and every chart: path and text."""
    for page in pages():
        yield page, rewritten(page)
    for path in sorted(RESULTS.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        if "chart" in table:
            yield ASSETS / f"{path.stem}.svg", chart(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables and charts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    check = parser.parse_args().check
    changed = [(path, text) for path, text in files() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in changed:
        print(f"{path.relative_to(ROOT)}: {'differs from scripts/results' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
