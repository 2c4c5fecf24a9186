"""Counts the bytes of tensors, also on the meta device, where nothing is allocated."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class CountBytes(TorchDispatchMode):
    """Counts the storages that operations create within the block.

    Attributes:
        held: bytes of those that are alive.
        peak: the most that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and (storage := each.untyped_storage())._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size
