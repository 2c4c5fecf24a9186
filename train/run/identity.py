"""Which weights a name stands for: another fine-tune under the same name writes other responses."""

from dflash_toolkit.config import UserError
from dflash_toolkit.fingerprint import model_digest


def target_digest(name: str) -> str | None:
    """sha256 over all weights and scales of a target and what its configuration computes with them (`model_digest`).

    None where no weights are on this machine. Raises UserError for files that cannot be read.
    """
    try:
        return model_digest(name)
    except UserError as error:
        raise UserError(f"target {name}: {error}") from error
