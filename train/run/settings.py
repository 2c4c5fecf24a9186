"""The settings of a run that must stay the same when it resumes."""

import dataclasses
import functools
from typing import Any

from dflash_toolkit import DrafterConfig
from dflash_toolkit.config import to_mapping

from ..config import TrainConfig
from .start import SIGHT

# options that may change when a run resumes: they change no weight or, if the number of processes times `accumulate`
# changes, only how many micro batches form a step
FREE_OPTIONS = (
    "log_every", "save_every", "save_minutes", "evaluate_every", "evaluate_runtime", "final_tokens", "features",
    "feature_dir", "feature_gpu_share", "feature_cache_gb", "wandb", "speculators", "zero", "fsdp",
    "fsdp_reshard_after_forward", "target_tensor_parallel_size", "accumulate", "splits", "recompute", "head_rows",
    "export_selector", "feature_endpoint", "offload_target",
)  # fmt: skip
ENDS = ("epochs", "steps", "minutes")  # end of a run; a longer run continues a shorter one


def asked(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of responses without those that change only the speed."""
    return {k: v for k, v in config["responses"].items() if k not in ("batch_size", "draft")}


def fingerprint(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that must stay the same when a run resumes."""
    # file contents are in the hashes; devices and threads change only the speed
    places = (
        "output",
        "data",
        "synthesis",
        "held_out",
        "response_files",
        "trust_responses",
        "chat_template",  # its digest is `template_hash`
        "prompt_format",
        "init_from",
        "push_to_hub",
        "license",
        "device",
        "threads",
        "estimate",
        "estimate_gpu",
        "estimate_price",
    )
    config = {k: v for k, v in record["config"].items() if k not in places}
    for part in ("run", "optim", "loss"):
        config[part] = {k: v for k, v in config[part].items() if k not in (*FREE_OPTIONS, *ENDS)}
    # the drafter's shape has the attention options, and resume points of earlier releases lack them
    config["drafter"] = {k: v for k, v in config["drafter"].items() if k not in SIGHT}
    config["responses"] = asked(config)
    start = {"start": record["start"]["sha256"]} if "start" in record else {}
    same = ("drafter", "target_digest", "data_hash", "template_hash")
    return {"config": config} | {k: record[k] for k in same} | start


@functools.cache
def defaults() -> dict[str, Any]:
    """Returns a fingerprint's settings by default: records of earlier releases lack options that were added since."""
    shape = {field.name: field.default for field in dataclasses.fields(DrafterConfig)}
    shape = {key: list(value) if isinstance(value, tuple) else value for key, value in shape.items()}
    record = dict.fromkeys(("target_digest", "data_hash", "template_hash"))
    found = fingerprint({**record, "config": to_mapping(TrainConfig(target="")), "drafter": shape})
    return {key: found[key] for key in ("config", "drafter")}


def first_difference(old: Any, new: Any, defaults: Any = None, where: str = "") -> str | None:
    """Returns the first difference of two nested mappings, as `key: old, now new`.

    Args:
        defaults: a nested mapping; a key that one of the two lacks has its value.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        usual = defaults if isinstance(defaults, dict) else {}
        for key in [*old, *(k for k in new if k not in old)]:
            default = usual.get(key)
            path = f"{where}.{key}" if where else str(key)
            if found := first_difference(old.get(key, default), new.get(key, default), default, path):
                return found
        return None
    return None if old == new else f"{where}: {old!r}, now {new!r}"
