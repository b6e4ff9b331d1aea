"""What is made of clips once and read often: encoder outputs, mel features, codes."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class ClipCache:
    """Tensors by `AudioClip.key`, bounded in bytes; the least recently used is dropped first."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._tensors: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, key: str) -> Tensor | None:
        if key in self._tensors:
            self._tensors.move_to_end(key)
            return self._tensors[key]
        return None

    def clear(self) -> None:
        self._tensors.clear()
        self._bytes = 0

    def put(self, key: str, tensor: Tensor) -> None:
        self._tensors[key] = tensor
        self._bytes += tensor.nbytes
        while self._bytes > self._max_bytes and len(self._tensors) > 1:
            _, dropped = self._tensors.popitem(last=False)
            self._bytes -= dropped.nbytes
