"""Where a run's numbers go: metrics.jsonl (truncated to the resume point on resume), the progress bar, W&B."""

import json
import math
from pathlib import Path
from typing import Any

from dflash_toolkit.config import UserError


class MetricsLog:
    """Appends one JSON object per line to `path` and mirrors it to W&B when a project is given."""

    def __init__(self, path: Path, resume_step: int, wandb_project: str | None, config: dict[str, Any]) -> None:
        self._path = path
        kept = _lines_up_to(path, resume_step)
        partial = path.with_suffix(".partial")
        try:
            partial.write_text("".join(kept))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._unwritable(error) from error
        self._wandb = _start_wandb(wandb_project, path, config) if wandb_project else None

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log `values` at `step`. NaN becomes null. Raises UserError when the disk is full."""
        clean = {"step": step} | {k: _plain(v) for k, v in values.items()}
        try:
            with self._path.open("a", encoding="utf-8") as file:  # closing flushes, and may fail like a write
                file.write(json.dumps(clean) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error
        if self._wandb is not None:
            flat = {k: v for k, v in clean.items() if not isinstance(v, list)}
            flat |= {f"{k}/{i}": v for k, vs in clean.items() if isinstance(vs, list) for i, v in enumerate(vs, 1)}
            self._wandb.log(flat, step=step)

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"{self._path}: cannot be written ({error.strerror}); free some space and run again")

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Complete lines of steps the resume point includes; what came later will be computed again."""
    if not path.exists() or step == 0:
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]


def import_wandb() -> Any:
    """The wandb module. Raises UserError where it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise UserError("run.wandb needs wandb: pip install 'dflash-toolkit[train]'") from error
    return wandb


def _start_wandb(project: str, path: Path, config: dict[str, Any]) -> Any:
    wandb = import_wandb()
    try:
        return wandb.init(project=project, config=config, dir=str(path.parent), resume="allow", id=_run_id(path))
    except wandb.errors.Error as error:  # not logged in, no network
        reason = " ".join(str(error).split())
        raise UserError(f"run.wandb={project}: {reason} (WANDB_MODE=offline logs without an account)") from error


def _run_id(path: Path) -> str:
    """A resumed run continues the same W&B run."""
    name = path.with_name("wandb_id")
    if not name.exists():
        import secrets

        name.write_text(secrets.token_hex(4))
    return name.read_text()
