"""What mkdocs runs while it builds the site: a page for each command, made from the dataclass of its options.

A name in backticks that looks like a file of this repository must be one; otherwise `mkdocs build --strict` fails.
"""

import dataclasses
import logging
import re
import types
import typing
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dflash_toolkit.config import list_options

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`((?:dflash_toolkit|train|serve|scripts|tests|docs|configs|examples)/[\w./-]*\w/?)`")
log = logging.getLogger("mkdocs.hooks.files")


def commands() -> dict[str, tuple[type, str]]:
    """Of each command its options and what it is for."""
    from dflash_toolkit.doctor import cli as doctor
    from dflash_toolkit.evaluation import cli as evaluate
    from dflash_toolkit.serve import cli as serve
    from dflash_toolkit.train import cli as train
    from dflash_toolkit.train import data_cli as data
    from dflash_toolkit.train.config import TrainConfig

    found = {
        "dflash-train": (train, TrainConfig),
        "dflash-data": (data, data.DataConfig),
        "dflash-eval": (evaluate, evaluate.EvalConfig),
        "dflash-serve": (serve, serve.ServeConfig),
        "dflash-doctor": (doctor, doctor.DoctorConfig),
    }
    return {
        name: (
            options,
            getattr(module, "DESCRIPTION", None) or (module.__doc__ or "").partition(": ")[2].partition("\n\n")[0],
        )
        for name, (module, options) in found.items()
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, (options, description) in commands().items():
        page = command_page(name, options, description)
        files.append(File.generated(config, f"commands/{name}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for path in sorted(set(NAMED.findall(markdown))):
        if not (ROOT / path).exists():
            log.warning("%s names `%s`, which does not exist", page.file.src_uri, path)
    return markdown


def command_page(name: str, options: type, description: str) -> str:
    """Markdown: what the command is for, and a table for each group of its options."""
    groups: dict[str, list[str]] = {"": []}
    for key, (field, hint) in list_options(options):
        flag, short = f"--{key.replace('_', '-')}", field.metadata["flag"]
        names = [flag] if not short else [f"--{short}"] if "." not in key else [flag, f"--{short}"]
        kind = " ".join(f"`{choice}`" for choice in field.metadata["choices"]) or kind_of(hint)
        cells = [" or ".join(f"`{name}`" for name in names), kind, default_of(field), field.metadata["help"]]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        groups.setdefault(key.rpartition(".")[0], []).append(f"| {row} |")
    lines = [f"# {name}", "", description.strip()]
    for group, rows in groups.items():
        lines += ["", f"## {group or 'Options'}", "", "| option | type | default | |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def kind_of(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(kind_of(inner) for inner in typing.get_args(hint) if inner is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"list of {kind_of(typing.get_args(hint)[0])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[hint]


def default_of(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default is None or field.default == ():
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
