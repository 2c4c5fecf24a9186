"""Sends objects with tensors through a pipe between processes: the bytes of a tensor pass without a copy of it.

Shared memory would be faster, but containers have little of it, and a process without room in it is killed.
"""

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places, self._kept = dict[int, int](), list[Tensor]()  # a tensor that comes twice is sent once

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self._kept.append(obj)
            self.tensors.append(obj.detach().cpu().contiguous())
        return self._places[id(obj)], obj.dtype, tuple(obj.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes) -> None:
        super().__init__(io.BytesIO(body))
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: Any) -> Tensor:
        place, dtype, shape = pid
        if place == len(self.tensors):
            self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[place]


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Sends an object. Tensors are received on the CPU. Raises OSError if the other side has closed."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(message)
    connection.send_bytes(file.getvalue())
    for tensor in pickler.tensors:
        if tensor.numel():
            connection.send_bytes(_bytes_of(tensor))


def receive(connection: "Connection[Any, Any]") -> Any:
    """Waits for an object. Raises EOFError or OSError if the other side has closed."""
    unpickler = _Unpickler(connection.recv_bytes())
    message = unpickler.load()
    for tensor in unpickler.tensors:
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
    return message


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
