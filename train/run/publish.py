"""What others get of a run: the model card beside an exported drafter, and its repository on the Hugging Face hub."""

import functools
import os
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import HfApi

from dflash_toolkit.config import UserError, to_mapping
from dflash_toolkit.data.sources import Source
from dflash_toolkit.files import write_text
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.dflash.serving import serving_commands

from ..prompts.dataset import described
from .provenance import config_of

CARD = "README.md"
UPLOADED = ("config.json", "model.safetensors", CARD)
BESIDE = ("best", "last")  # folders of drafters that a run leaves beside the exported one


def write_cards(output: Path, record: dict[str, Any], name: str | None = None) -> None:
    """The model card of each drafter that a run left.

    Args:
        record: of the run, with its result.
        name: of the repository that the exported drafter goes to.

    Raises:
        UserError: a card cannot be written.
    """
    result = record["result"]
    write_text(output / CARD, _card(output, record, result | {"step": result["exported_step"]}, name or output.name))
    for role in BESIDE:
        if role in result:
            write_text(output / role / CARD, _card(output / role, record, result[role], f"{output.name}/{role}"))


def _card(folder: Path, record: dict[str, Any], measured: dict[str, Any], name: str) -> str:
    target, shape = record["target"], to_mapping(read_config(folder))  # its selector may have been left out
    return _template().render(
        metadata=yaml.safe_dump(_metadata(config_of(record)), sort_keys=False),
        name=name,
        target=target,
        shape=shape,
        size=(folder / "model.safetensors").stat().st_size,
        measured=measured,
        serving=serving_commands(target, name, shape, record.get("architecture", "")),
        temperatures=sorted({temperature for sampler in record["samplers"] for temperature in _temperatures(sampler)}),
        prompts=[described(name) for name in _datasets(config_of(record))],
        start=record.get("start", {}).get("drafter"),
        result=record["result"],
        version=record["versions"]["dflash_toolkit"],
    )


@functools.cache  # a run writes up to three cards
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("card.md.jinja")


def _temperatures(sampler: dict[str, Any]) -> set[float]:
    """Of responses that were written so."""
    greedy = {0.0} if sampler.get("greedy_first") else set()
    drawn = {sampler.get("temperature", 0.0)} if not greedy or sampler.get("samples", 1) > 1 else set()
    return greedy | drawn


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What the hub reads of a card."""
    found: dict[str, Any] = {"library_name": "dflash-toolkit", "pipeline_tag": "text-generation"}
    if not os.path.isdir(config["target"]):
        found["base_model"] = config["target"]
    if datasets := _datasets(config):
        found["datasets"] = datasets
    return found | {"tags": ["dflash", "speculative-decoding", "draft-model"]}


def _datasets(config: dict[str, Any]) -> list[str]:
    """Returns the datasets of the hub that prompts came from."""
    names = [] if config["response_files"] else config["data"] or [config["prompts"]["dataset"]]
    found = {source.place.partition(":")[0] for source in map(Source, names) if not source.is_file}
    return sorted(name for name in found if not os.path.isdir(name))


def make_repository(name: str) -> None:
    """The repository on the hub, made unless it is there. Raises UserError, before a run has cost anything."""
    try:
        HfApi().create_repo(name, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"push_to_hub {name}: {_said(error)}; log in with `hf auth login`, or leave it out") from error


def upload(folder: Path, name: str) -> str:
    """Upload the exported drafter and its card; returns the address. Raises UserError."""
    try:
        return (
            HfApi()
            .upload_folder(
                repo_id=name,
                folder_path=folder,
                allow_patterns=list(UPLOADED),
                commit_message="Upload a DFlash drafter",
            )
            .repo_url.url
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"push_to_hub {name}: {_said(error)}; {folder} holds the drafter, and the same command uploads it"
        ) from error


def _said(error: Exception) -> str:
    return " ".join(re.sub(r"For more information check: \S+", "", str(error)).split())
