"""Checks what a command needs before its first expensive stage: a supported target, writable folders, disk space."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .config import UnsupportedModel, UserError

if TYPE_CHECKING:
    from .models.dflash.config import DrafterConfig

GIB = 2**30
ANSWER_BYTES = 12  # bytes per response token: its id as text in JSON, then in the mapped rows
QUANTIZED_BY: dict[str, tuple[str, ...]] = {  # packages that transformers needs for the weights
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors", "accelerate"),
}


def check_target(name: str, runtime: str = "reference", drafter: "DrafterConfig | None" = None) -> None:
    """Checks the architecture of a target, and that a drafter fits it, from configurations; it reads no weights.

    Args:
        runtime: engine, reference (the modules of transformers), or auto, which takes the first that works.

    Raises:
        UserError: the configuration cannot be read, the architecture is not supported, a package that reads its
            weights is missing, or the drafter does not fit.
    """
    from .models.dflash.checkpoint import check_fits
    from .models.quantized import dequantized_format
    from .models.spec import ModelSpec
    from .models.target_files import check_architecture, load_config

    config = load_config(name)
    if drafter is not None:
        check_fits(drafter, config)
    if runtime != "reference":
        try:
            ModelSpec.of_target(config)
            return
        except UnsupportedModel:
            if runtime == "engine":
                raise
    quantization = getattr(config, "quantization_config", None)
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""
    for package in () if dequantized_format(config) else QUANTIZED_BY.get(method, ()):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"target {name}: it is quantized by {method}, and the package {package} is not installed; install it "
                f"with: pip install 'dflash-toolkit[quantized]'"
            )
    check_architecture(name)


def make_folder(folder: Path, asked: str) -> None:
    """Makes a folder that can be written to. Raises UserError; `asked` names the option."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{asked}: cannot be created ({error.strerror})") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{asked}: {folder} cannot be written to; give another")


def check_new_folder(folder: Path, asked: str) -> None:
    """Checks that the folder, or its nearest existing parent, is writable, without creating it."""
    above = folder.absolute()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise UserError(f"{asked}: cannot be written, for {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{asked}: {above} cannot be written to; give another")


def check_space(folder: Path, needed: int, what: str) -> int:
    """Returns the bytes that are free where `folder` is. Raises UserError if they are fewer than `needed`."""
    above = folder.absolute()
    while not above.exists():
        above = above.parent
    free = shutil.disk_usage(above).free
    if free < needed:
        raise UserError(
            f"{folder}: {what} take {size(needed)}, but only {size(free)} are free; free some space, or choose "
            f"another --output"
        )
    return free


def disk_line(parts: dict[str, int], folder: Path, way_out: str) -> str:
    """Returns a line for the user: the most that a run writes to a folder, and what is free there.

    Args:
        parts: bytes of each kind of file, upper bounds.
        way_out: what to do if the bound is more than what is free.
    """
    free, most = shutil.disk_usage(folder).free, sum(parts.values())
    short = "" if free >= most else f"; that may be too little: {way_out}"
    what = ", ".join(f"{name} {size(count)}" for name, count in parts.items())
    return f"disk: at most {size(most)} ({what}); {size(free)} free in {folder}{short}"


def size(count: float) -> str:
    """Formats bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.3g} MiB"
