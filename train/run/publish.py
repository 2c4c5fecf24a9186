"""Publication of a run: model cards of its drafters, and a repository on the Hugging Face hub."""

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
from dflash_toolkit.models.dflash.architecture import of_sizes
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.dflash.serving import serving_commands

from ..prompts.dataset import DEFAULT, described

CARD = "README.md"
HUB = "https://huggingface.co"
UPLOADED = ("config.json", "model.safetensors", CARD)
OTHER_ROLES = ("best", "last")  # subdirectories of drafters next to the exported one


def write_cards(output: Path, record: dict[str, Any], name: str | None = None) -> None:
    """Writes the model card of each drafter of a run.

    Args:
        record: of the run, with its result.
        name: repository of the exported drafter.

    Raises:
        UserError: a card cannot be written.
    """
    result = record["result"]
    write_text(output / CARD, _card(output, record, result | {"step": result["exported_step"]}, name or output.name))
    for role in OTHER_ROLES:
        if role in result:
            write_text(output / role / CARD, _card(output / role, record, result[role], f"{output.name}/{role}"))


def _card(folder: Path, record: dict[str, Any], measured: dict[str, Any], name: str) -> str:
    target, shape = record["target"], to_mapping(read_config(folder))  # may be exported without its selector
    return _template().render(
        metadata=yaml.safe_dump(_metadata(record["config"]), sort_keys=False),
        name=name,
        target=target,
        shape=shape,
        size=(folder / "model.safetensors").stat().st_size,
        measured=measured,
        followed=record["result"].get("measured_during_training"),
        serving=serving_commands(target, name, shape, record.get("architecture", "")),
        rendering=_rendering(record["config"]),
        temperatures=sorted({temperature for sampler in record["samplers"] for temperature in _temperatures(sampler)}),
        prompts=[described(name) for name in _datasets(record["config"])],
        start=record.get("start", {}).get("drafter"),
        result=record["result"],
        title=of_sizes(shape).title,
        cut=record.get("data", {}).get("cut", 0),
        version=record["versions"]["dflash_toolkit"],
    )


@functools.cache  # a run writes up to three cards
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("card.md.jinja")


def _rendering(config: dict[str, Any]) -> str:
    """Returns how the prompts of training were rendered, if not by the target's chat template."""
    if config.get("prompt_format") == "text":
        return "Prompts were completed as they are, without a chat template: serve it for /v1/completions."
    if template := config.get("chat_template"):
        return f"Prompts were rendered by the chat template `{Path(template).name}`: serve it with --chat-template."
    return ""


def _temperatures(sampler: dict[str, Any]) -> set[float]:
    """Returns the temperatures of a sampler's responses."""
    greedy = {0.0} if sampler.get("greedy_first") else set()
    drawn = {sampler.get("temperature", 0.0)} if not greedy or sampler.get("samples", 1) > 1 else set()
    return greedy | drawn


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a card for the hub."""
    found: dict[str, Any] = {"library_name": "dflash-toolkit", "pipeline_tag": "text-generation"}
    if not os.path.isdir(config["target"]):
        found["base_model"] = config["target"]
    if datasets := _datasets(config):
        found["datasets"] = datasets
    if licence := config.get("license"):
        found["license"] = licence
    elif DEFAULT in datasets:
        found |= {"license": "other", "license_name": "see-datasets", "license_link": f"{HUB}/datasets/{DEFAULT}"}
    return found | {"tags": ["dflash", "speculative-decoding", "draft-model"]}


def _datasets(config: dict[str, Any]) -> list[str]:
    """Returns the hub's datasets among the sources of prompts."""
    names = [] if config["response_files"] else config["data"] or [config["prompts"]["dataset"]]
    found = {source.place.partition(":")[0] for source in map(Source, names) if not source.is_file}
    return sorted(name for name in found if not os.path.isdir(name))


def make_repository(name: str) -> None:
    """Creates the repository on the hub if it does not exist. Raises UserError, before a run has cost anything."""
    try:
        HfApi().create_repo(name, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"push_to_hub {name}: {_message(error)}; log in with `hf auth login`, or leave out push_to_hub"
        ) from error


def upload(folder: Path, name: str) -> str:
    """Uploads the exported drafter and its card; returns the address. Raises UserError."""
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
            f"push_to_hub {name}: {_message(error)}; run the same command again to upload {folder}"
        ) from error


def _message(error: Exception) -> str:
    return " ".join(re.sub(r"For more information check: \S+", "", str(error)).split())
