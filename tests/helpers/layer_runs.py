"""Records which layers of a target run."""

import pytest

from dflash_toolkit import Target


def count_runs(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the layers that run from now on, in order."""
    ran: list[int] = []
    for i, layer in enumerate(target.layers):

        def forward(*args: object, i: int = i, real: object = layer.forward, **kwargs: object) -> object:
            ran.append(i)
            return real(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", forward)
    return ran
