"""Weights & Biases, for the commands that log to it."""

import os
from typing import Any

from .config import UserError


def import_wandb(option: str) -> Any:
    """Returns the wandb module. Raises UserError, which names the `option` that needs it, if it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise UserError(f"{option} needs wandb: pip install 'dflash-toolkit[train]'") from error
    return wandb


def log_in(option: str, project: str) -> None:
    """Finds the account that `project` is logged to, or asks for it. Raises UserError if there is none."""
    wandb = import_wandb(option)
    if os.environ.get("WANDB_MODE") == "offline":  # login would warn that it does nothing
        return
    try:
        wandb.login()
    except wandb.errors.Error as error:
        raise _refused(option, project, error) from error


def start_run(option: str, project: str, **given: Any) -> Any:
    """Returns `wandb.init` of the given values. Raises UserError if it fails, for example without a network."""
    wandb = import_wandb(option)
    try:
        return wandb.init(project=project, **given)
    except wandb.errors.Error as error:
        raise _refused(option, project, error) from error


def _refused(option: str, project: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"{option}={project}: {reason} (WANDB_MODE=offline logs without an account)")
