"""A key-value cache whose rows have different lengths: rows join it and leave it while others go on.

Every row writes its tokens to columns of its own, so a forward pass copies nothing but the new tokens.

Shapes: B rows, L new tokens, S columns in use, W columns that the buffers hold, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_COLUMNS = 64  # buffers grow by multiples of this


@dataclass
class _Place:
    """Where the tokens of one forward pass go, shared by all layers."""

    rows: Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.long))
    """[B, 1] int64, on the cache's device."""
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """[B, L] int64, on the cache's device."""
    width: int = 0
    """S: the columns in use after the pass."""
    together: bool = False
    """Whether all rows write to the last L columns."""


class RowLayer(DynamicLayer):
    """Keys and values [B, heads, W, D] of one decoder layer, written at the columns that `place` names."""

    def __init__(self, place: _Place):
        super().__init__()
        self._place = place
        self._width = 0
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, heads, L, D]; return all [B, heads, S, D], as views of the buffers."""
        place = self._place
        states = key_states, value_states
        if not self.buffers or self.buffers[0].shape[2] < place.width:
            room = -(-place.width * 3 // 2 // _COLUMNS) * _COLUMNS
            self.buffers = [_widened(b, x, room) for b, x in zip(self.buffers or (None, None), states, strict=True)]
        for buffer, x in zip(self.buffers, states, strict=True):
            if place.together:
                buffer[:, :, place.width - x.shape[2] : place.width] = x
            else:
                buffer[place.rows, :, place.columns] = x.transpose(1, 2).to(buffer.dtype)
        self.is_initialized, self._width = True, place.width
        keys, values = (b[:, :, : place.width] for b in self.buffers)
        return keys, values

    def join(self, keys: Tensor, values: Tensor, repeat: Tensor, room: int) -> None:
        """Append rows `repeat` [n] of keys and values [R, heads, L, D], with room for `room` columns."""
        states = keys, values
        self.buffers = self.buffers or [x.new_zeros(0, x.shape[1], 0, x.shape[3]) for x in states]
        for i, x in enumerate(states):
            rows, _, columns, _ = self.buffers[i].shape
            joined = x.new_zeros(rows + len(repeat), x.shape[1], max(room, columns), x.shape[3])
            joined[:rows, :, :columns] = self.buffers[i]
            joined[rows:, :, : x.shape[2]] = x[repeat]
            self.buffers[i] = joined
        self.is_initialized, self._width = True, max(self._width, keys.shape[2])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [b[indices] for b in self.buffers]

    def get_seq_length(self) -> int:
        """Columns in use before the next forward pass."""
        return self._width


def _widened(buffer: Tensor | None, like: Tensor, room: int) -> Tensor:
    """`buffer` with `room` columns. New ones are zeros, not leftovers of memory: what is masked is multiplied by 0."""
    wide = like.new_zeros(like.shape[0], like.shape[1], room, like.shape[3])
    if buffer is not None:
        wide[:, :, : buffer.shape[2]] = buffer
    return wide


def _select(layer: Any, rows: Tensor) -> None:
    """Keep these rows of a layer of any kind. Layers with linear attention only have a method to reorder them."""
    if hasattr(layer, "recurrent_states"):
        layer.reorder_cache(rows)
    else:
        layer.batch_select_indices(rows)


class RowCache:
    """The cache of a batch; `layers` is what the decoder gets as its `past_key_values`.

    Layers that keep something else than all keys and values, such as sliding windows, linear attention and the memory
    of an encoder, stay as they are. Rows of such a cache must be equally long and begin together: `aligned`.
    """

    def __init__(self, empty: DynamicCache):
        self.layers = empty
        self._place = _Place()
        self.aligned = type(empty) is not DynamicCache or any(type(x) is not DynamicLayer for x in empty.layers)
        for i, layer in enumerate(empty.layers):
            if type(layer) is DynamicLayer:
                empty.layers[i] = RowLayer(self._place)

    @property
    def width(self) -> int:
        """S."""
        return self._place.width

    def at(self, columns: Tensor, width: int, together: bool = False) -> None:
        """Before a forward pass: its tokens go to `columns` [B, L], and `width` columns are in use then.

        `together`: they are the last L columns below `width` in every row.
        """
        place = self._place
        place.rows = torch.arange(len(columns), device=columns.device)[:, None]
        place.columns, place.width, place.together = columns, width, together

    def after_all(self) -> None:
        """Before a forward pass of one token a row: it goes after the last column."""
        self._place.width, self._place.together = self.width + 1, True

    def join(self, prefilled: DynamicCache, repeat: Tensor, room: int) -> None:
        """Append rows `repeat` [n] of a prefilled cache, with room for `room` columns in every row.

        An aligned cache must be empty.
        """
        columns = prefilled.get_seq_length()
        for i, new in enumerate(prefilled.layers):
            if type(new) is DynamicLayer:
                self._rows[i].join(new.keys, new.values, repeat, room)
            else:
                _select(new, repeat)
                self.layers.layers[i : i + 1] = [new]
        self._place.width = max(self.width, columns)

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        for layer in self.layers.layers:
            _select(layer, rows)

    def select(self, rows: Tensor) -> RowCache:
        """Copy some rows."""
        out = RowCache(DynamicCache())
        out.layers.layers = [RowLayer(out._place) for _ in self._rows]
        out._place.width = self.width
        for mine, theirs in zip(self._rows, out._rows, strict=True):
            theirs.buffers = [b[rows, :, : self.width] for b in mine.buffers]
        return out

    def write_back(self, part: RowCache, rows: Tensor) -> None:
        """Put the rows of a copy back in place."""
        self._place.width = max(self.width, part.width)
        for mine, theirs in zip(self._rows, part._rows, strict=True):
            if mine.buffers[0].shape[2] < part.width:
                room = theirs.buffers[0].shape[2]
                mine.buffers = [_widened(b, b, room) for b in mine.buffers]
            for buffer, x in zip(mine.buffers, theirs.buffers, strict=True):
                buffer[rows, :, : part.width] = x[:, :, : part.width]

    @property
    def _rows(self) -> list[RowLayer]:
        return self.layers.layers  # type: ignore[return-value]
