"""Which weights a name stands for: another fine-tune under the same name writes other responses."""

from dflash_toolkit.config import UserError
from dflash_toolkit.fingerprint import model_digest


def target_digest(name: str) -> str | None:
    """Returns the sha256 over a target's weights and scales and its configuration's computation (`model_digest`).

    None if the weights are not on this machine. Raises UserError for files that cannot be read.
    """
    try:
        return model_digest(name)
    except UserError as error:
        raise UserError(f"target {name}: {error}") from error
