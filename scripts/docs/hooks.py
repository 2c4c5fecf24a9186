"""Writes the pages of the commands and checks names while mkdocs builds the site.

Each command gets a page made from the dataclass of its options. A file of this repository, or an option of a command,
that a page names in backticks must exist; otherwise `mkdocs build --strict` fails.
"""

import dataclasses
import importlib
import logging
import re
import types
import typing
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dflash_toolkit.command_line import list_options
from dflash_toolkit.version import __version__

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"`((?:dflash_toolkit|train|serve|scripts|tests|docs|configs|examples)/[\w./-]*\w/?)`")
FIELDS = re.compile(r"<!-- fields: ([\w.]+)\.(\w+) -->")  # replaced by a table of the options of that dataclass
OPTION = re.compile(r"<code>(--[a-z][^<\s]*(?: [^<\s]{1,20})?|[a-z_]+\.[a-z_]+(?:=[^<\s]*)?)</code>")
LONGEST = 48  # characters that stay on one line; a longer one would not fit on a phone
log = logging.getLogger("mkdocs.hooks.names")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Shows the version in the header of every page."""
    config.site_name = f"{config.site_name} {__version__}"
    return config


def commands() -> dict[str, tuple[type, str]]:
    """Returns the options and the purpose of each command."""
    from dflash_toolkit.doctor import cli as doctor
    from dflash_toolkit.evaluation import check, compare
    from dflash_toolkit.evaluation import cli as evaluate
    from dflash_toolkit.serve import cli as serve
    from dflash_toolkit.serve.config import ServeConfig
    from dflash_toolkit.train import cli as train
    from dflash_toolkit.train import data_cli as data
    from dflash_toolkit.train import export_cli
    from dflash_toolkit.train.config import TrainConfig

    found = {
        "dflash-train": (train, TrainConfig),
        "dflash-train export": (export_cli, export_cli.ExportConfig),
        "dflash-data": (data, data.DataConfig),
        "dflash-eval": (evaluate, evaluate.EvalConfig),
        "dflash-eval check": (check, check.CheckConfig),
        "dflash-eval compare": (compare, compare.CompareConfig),
        "dflash-serve": (serve, ServeConfig),
        "dflash-doctor": (doctor, doctor.DoctorConfig),
    }
    return {
        name: (options, f"{module.DESCRIPTION}\n\n```bash\n{module.EXAMPLE}\n```")
        for name, (module, options) in found.items()
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each command."""
    for name, (options, description) in commands().items():
        page = command_page(name, options, description)
        files.append(File.generated(config, f"commands/{name.replace(' ', '-')}.md", content=page))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks what docs/assets/site.css lays out: option names, and tables of options."""
    if page.file.generated_by is not None:
        html = html.replace("<table>", '<div class="options"><table>').replace("</table>", "</table></div>")
    return OPTION.sub(
        lambda found: f'<code class="option">{found[1]}</code>' if len(found[1]) <= LONGEST else found[0], html
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in tables of fields, and warns of files and options that do not exist."""
    markdown = FIELDS.sub(lambda found: fields_table(found[1], found[2]), markdown)
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S)
    for path in sorted(set(FILE.findall(text))):
        if not (ROOT / path).exists():
            log.warning("%s names `%s`, which does not exist", page.file.src_uri, path)
    known = {key: option for options, _ in commands().values() for key, option in list_options(options)}
    flags = {f"--{key.replace('_', '-')}" for key in known} | {"--config", "--version", "--help"}
    flags |= {f"--{option.field.metadata['flag']}" for option in known.values() if option.field.metadata["flag"]}
    groups = {key.partition(".")[0] for key in known if "." in key}
    for word in sorted({word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}):
        name = word.partition("=")[0].removesuffix(":")
        group = re.match(r"([a-z_]+)\.(?!json$|yaml$|py$)[a-z_]+$", name)
        wrong = group and group[1] in groups and name not in known
        known_flag = name in flags or name.replace("--no-", "--") in flags or name == "--"
        if wrong or (name.startswith("--") and not known_flag):
            log.warning("%s names the option `%s`, which no command has", page.file.src_uri, name)
    return markdown


def fields_table(module: str, name: str) -> str:
    """Returns a table of the options of a dataclass."""
    rows = [
        f"| `{key}` | {kind_of(hint)} | {default_of(field)} | {field.metadata['help'].replace('|', chr(92) + '|')} |"
        for key, (field, hint) in list_options(getattr(importlib.import_module(module), name))
    ]
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])


def command_page(name: str, options: type, description: str) -> str:
    """Markdown: what the command is for, and a table for each group of its options."""
    groups: dict[str, list[str]] = {"Common options": [], "": []}
    for key, (field, hint) in list_options(options):
        flag, short = f"--{key.replace('_', '-')}", field.metadata["flag"]
        names = [flag] if not short else [f"--{short}"] if "." not in key else [flag, f"--{short}"]
        kind = " ".join(f"`{choice}`" for choice in field.metadata["choices"]()) or kind_of(hint)
        group = "Common options" if field.metadata["common"] else key.rpartition(".")[0]
        cells = [" or ".join(f"`{name}`" for name in names), kind, default_of(field), field.metadata["help"]]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        groups.setdefault(group, []).append(f"| {row} |")
    lines = [f"# {name}", "", description.strip()]
    for group, rows in ((group, rows) for group, rows in groups.items() if rows):
        lines += [
            "",
            f"## {group or 'Advanced options'}",
            "",
            "| option | type | default | |",
            "|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def kind_of(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(kind_of(inner) for inner in typing.get_args(hint) if inner is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"list of {kind_of(typing.get_args(hint)[0])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[hint]


def default_of(field: Any) -> str:
    if field.default is dataclasses.MISSING or "(required)" in field.metadata["help"]:
        return "required"
    if field.default is None or field.default == ():
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
