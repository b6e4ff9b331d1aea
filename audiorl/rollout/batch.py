"""The answers that the transformers engine decodes side by side, with their key-value cache, and the step itself.

Rows of the cache have different lengths, join and leave: each writes its tokens to columns of its own, so a forward
pass copies nothing but the new tokens. `GroupBatch` holds a prompt once for all its answers, and a step reads it once.
`RowBatch` holds it in every row: for a single answer to each prompt, for a few groups among many single answers, and
for models whose layers keep something else than all keys and values or whose attention is not to be replaced.

A step asks the device for nothing. On a GPU most decoders run in slots instead (`slots.py`).

Shapes: R prompts that were prefilled, P prompts of the batch, B rows of the cache, L new tokens, S columns in use (of
the prompts in `GroupBatch`), W columns that the buffers hold, H decoder width, D head width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from audiorl.algos.prompt_attention import PromptAttention
from audiorl.algos.varlen import compute_dtype
from audiorl.models.attention import as_mask, no_mask, takes_prompts
from audiorl.models.policy import AudioPolicy

_COLUMNS = 64  # buffers grow by multiples of this

# -- the cache ---------------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where the tokens of one forward pass go, shared by all layers. Not the cache itself: in a cycle of references its
    memory would not be free before the garbage collector ran."""

    rows: Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.long))
    """[B, 1] int64."""
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """[B, L] int64."""
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
        """Return the columns in use before the next forward pass."""
        return self._width


def _widened(buffer: Tensor | None, like: Tensor, room: int) -> Tensor:
    """Copy to `room` columns. New ones are zeros, not leftovers of memory: what is masked is multiplied by 0."""
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
    def rows(self) -> list[RowLayer]:
        """The layers of a cache that is not aligned."""
        return cast(list[RowLayer], self.layers.layers)

    def at(self, columns: Tensor, width: int, together: bool = False) -> None:
        """Before a forward pass: its tokens go to `columns` [B, L], and `width` columns are in use then.

        `together`: they are the last L columns below `width` in every row.
        """
        place = self._place
        place.rows = torch.arange(len(columns), device=columns.device)[:, None]
        place.columns, place.width, place.together = columns, width, together

    def after_all(self) -> None:
        """Before a forward pass of one token a row: it goes after the last column."""
        self._place.width, self._place.together = self._place.width + 1, True

    def join(self, prefilled: DynamicCache, repeat: Tensor, room: int) -> None:
        """Append rows `repeat` [n] of a prefilled cache, with room for `room` columns. An aligned one must be empty."""
        columns = prefilled.get_seq_length()
        for i, new in enumerate(prefilled.layers):
            if type(new) is DynamicLayer:
                self.rows[i].join(new.keys, new.values, repeat, room)
            else:
                _select(new, repeat)
                self.layers.layers[i : i + 1] = [new]
        self._place.width = max(self._place.width, columns)

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        for layer in self.layers.layers:
            _select(layer, rows)

    def select(self, rows: Tensor) -> RowCache:
        """Copy some rows."""
        out = RowCache(DynamicCache())
        out.layers.layers = [RowLayer(out._place) for _ in self.rows]
        width = out._place.width = self._place.width
        for mine, theirs in zip(self.rows, out.rows, strict=True):
            theirs.buffers = [b[rows, :, :width] for b in mine.buffers]
        return out

    def write_back(self, part: RowCache, rows: Tensor) -> None:
        """Put the rows of a copy back in place."""
        width = part._place.width
        self._place.width = max(self._place.width, width)
        for mine, theirs in zip(self.rows, part.rows, strict=True):
            if mine.buffers[0].shape[2] < width:
                mine.buffers = [_widened(b, b, theirs.buffers[0].shape[2]) for b in mine.buffers]
            for buffer, x in zip(mine.buffers, theirs.buffers, strict=True):
                buffer[rows, :, :width] = x[:, :, :width]


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass
class Prefill:
    """Prompts that went through the decoder, padded on the left: [R, S]."""

    cache: DynamicCache
    hidden: Tensor
    """[R, H]: the last hidden states."""
    lengths: list[int]
    """[R], in tokens."""
    ends: list[int]
    """[R]: the position behind each prompt; a picture takes fewer positions than tokens."""


@dataclass
class PendingBatch:
    """Prompts that may join a batch, and the answers (`rows`) to all of them together."""

    prompts: int = 0
    rows: int = 0
    max_prompt_len: int = 0
    max_new_tokens: int = 0
    """The most tokens or frames that one of the answers may add."""


class Batch:
    """Rows of a cache. What each has is counted twice: in `_counts` on the host, in `_written` on the device."""

    aligned = False
    """All rows must begin together."""

    def __init__(self, policy: AudioPolicy):
        self.policy = policy
        self._decoder = policy.backbone.decoder(policy.model)
        self._empty()

    def _empty(self) -> None:
        self.rollouts: list[int] = []
        """Which rollout each row belongs to."""
        self.hidden = torch.zeros(0)
        """[B, H]: what the next token is sampled from."""
        self._cache = RowCache(self.policy.new_cache())
        self._counts: list[int] = []  # columns of each row in use
        self.room = 0  # columns that the longest row may come to
        self._begins = torch.zeros(0, dtype=torch.long)  # [B]
        self._offset = torch.zeros(0, dtype=torch.long)  # [B]: the position of column 0
        self._written = torch.zeros(0, dtype=torch.long)  # [B]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        if not rows:
            self._empty()
            return
        self.rollouts, self._counts = [self.rollouts[b] for b in rows], [self._counts[b] for b in rows]
        chosen = torch.tensor(rows, device=self._written.device)
        self._begins, self._offset, self._written = (x[chosen] for x in (self._begins, self._offset, self._written))
        self._cache.keep(chosen)

    def _append(
        self, hidden: Tensor, begins: Tensor, offset: Tensor, written: Tensor, rollouts: Sequence[int], count: int
    ) -> None:
        new = {"hidden": hidden, "_begins": begins, "_offset": offset, "_written": written}
        for name, tensor in new.items():
            setattr(self, name, torch.cat([getattr(self, name), tensor]) if self.rollouts else tensor)
        self.rollouts += rollouts
        self._counts += [count] * len(rollouts)

    def tokens(self, active: Sequence[int], joining: PendingBatch) -> int:
        """Count the columns of all rows (and prompts) together when rows `active` stay and others join."""
        raise NotImplementedError

    def join(self, prefill: Prefill, repeat: Sequence[int], rollouts: Sequence[int], most: int) -> None:
        """Append a row for each of `rollouts`, samples of the prompts `repeat`, that adds `most` tokens at most.

        `repeat` is ascending and leaves no prompt out.
        """
        raise NotImplementedError

    def forward(self, inputs: dict[str, Any]) -> None:
        """Run one token of every row through the decoder."""
        raise NotImplementedError

    def _advance(self) -> tuple[int, bool]:
        """Count the next token of every row: the columns then in use, and whether all rows write to the last one."""
        self._counts = [min(count + 1, self.room) for count in self._counts]
        width = max(self._counts)
        return width, min(self._counts) == width


class RowBatch(Batch):
    """Each row holds its prompt and what was sampled, in the columns from `_begins` to `_written`."""

    def _empty(self) -> None:
        super()._empty()
        self.aligned = self._cache.aligned

    def tokens(self, active: Sequence[int], joining: PendingBatch) -> int:
        room = max(self.room if active else 0, joining.max_prompt_len + joining.max_new_tokens)
        return (len(active) + joining.rows) * room

    def join(self, prefill: Prefill, repeat: Sequence[int], rollouts: Sequence[int], most: int) -> None:
        device, columns = prefill.hidden.device, max(prefill.lengths)
        rows = torch.tensor(repeat, device=device)
        begins = torch.tensor([columns - prefill.lengths[r] for r in repeat], device=device)
        offset = torch.tensor([prefill.ends[r] - columns for r in repeat], device=device)
        self._append(prefill.hidden[rows], begins, offset, torch.full_like(begins, columns - 1), rollouts, columns)
        self.room = max(self.room, columns + most)
        self._cache.join(prefill.cache, rows, self.room)

    def forward(self, inputs: dict[str, Any]) -> None:
        width, together = self._advance()
        # A row that has ended may go on beyond its room; what it writes there is never read.
        last = self._written.add_(1).clamp_(max=self.room - 1)
        columns = torch.arange(width, device=last.device)
        mask = columns >= self._begins[:, None]
        if self.aligned:
            self._cache.after_all()
            mask = mask.long()
        else:
            self._cache.at(last[:, None], width, together)
            visible = (mask & (columns <= last[:, None]))[:, None, None]
            mask = as_mask(self._decoder, visible, inputs["inputs_embeds"].dtype)
        out = self._decoder(
            **inputs,
            attention_mask=mask,
            position_ids=(last + self._offset)[:, None],
            past_key_values=self._cache.layers,
            use_cache=True,
        )
        self.hidden = out.last_hidden_state[:, -1]


class GroupBatch(Batch):
    """The cache holds each prompt once, padded on the left, and in every row what was sampled, from column 0 on.

    The rows of a prompt follow one another; `_begins` is the length of each row's prompt.
    """

    def _empty(self) -> None:
        super()._empty()
        self._keys: list[Tensor] = []  # [P, heads, S, D] of each layer
        self._values: list[Tensor] = []
        self._lengths: list[int] = []  # of the P prompts, in tokens
        self._prompts: list[int] = []  # the prompt of each row
        self._attention: PromptAttention | None = None  # but for `row_mask`

    def tokens(self, active: Sequence[int], joining: PendingBatch) -> int:
        stay = {self._prompts[b] for b in active}
        longest = max([joining.max_prompt_len, *(self._lengths[p] for p in stay)])
        room = max(self.room if active else 0, joining.max_new_tokens)
        return (len(stay) + joining.prompts) * longest + (len(active) + joining.rows) * room

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and prompts without rows."""
        prompts = [self._prompts[b] for b in rows]
        super().keep(rows)
        stay = sorted(set(prompts))
        if rows and len(stay) < len(self._lengths):
            self._lengths = [self._lengths[p] for p in stay]
            numbers, width = torch.tensor(stay, device=self._written.device), max(self._lengths)
            for states in (self._keys, self._values):
                states[:] = [x[numbers, :, -width:] for x in states]
        self._prompts = [stay.index(p) for p in prompts]
        self._attention = None

    def join(self, prefill: Prefill, repeat: Sequence[int], rollouts: Sequence[int], most: int) -> None:
        device, dtype = prefill.hidden.device, compute_dtype(prefill.hidden)
        rows = torch.tensor(repeat, device=device)
        begins = torch.tensor([prefill.lengths[r] for r in repeat], device=device)
        offset = torch.tensor([prefill.ends[r] for r in repeat], device=device)
        self._append(prefill.hidden[rows], begins, offset, torch.zeros_like(begins), rollouts, 0)
        self._prompts += [len(self._lengths) + r for r in repeat]
        self._lengths += prefill.lengths
        self.room = max(self.room, most)
        for i, (layer, new) in enumerate(zip(self._cache.rows, prefill.cache.layers, strict=True)):
            for states, x in ((self._keys, new.keys.to(dtype)), (self._values, new.values.to(dtype))):
                if i == len(states):
                    states.append(x)
                    continue
                before, width = states[i], max(states[i].shape[2], x.shape[2])
                both = x.new_zeros(len(before) + len(x), x.shape[1], width, x.shape[3])
                both[: len(before), :, width - before.shape[2] :] = before
                both[len(before) :, :, width - x.shape[2] :] = x
                states[i] = both
            keys, values = (x[i][: len(prefill.lengths), :, :0] for x in (self._keys, self._values))
            layer.join(keys, values, rows, self.room)
        self._attention = None

    def forward(self, inputs: dict[str, Any]) -> None:
        if self._attention is None:
            self._attention = self._prompt_attention()
        width, together = self._advance()
        # A row that has ended may go on beyond its room; what it writes there is never read.
        columns = self._written.clamp(max=self.room - 1)
        self._cache.at(columns[:, None], width, together)
        row_mask = None
        if not together:
            row_mask = _added(torch.arange(width, device=columns.device) > columns[:, None], self._keys[0].dtype)
        out = self._decoder(
            **inputs,
            attention_mask=no_mask(columns.device),
            prompts=replace(self._attention, row_mask=row_mask),
            position_ids=(self._offset + columns)[:, None],
            past_key_values=self._cache.layers,
            use_cache=True,
        )
        self.hidden = out.last_hidden_state[:, -1]
        self._written.copy_(columns + 1)

    def _prompt_attention(self) -> PromptAttention:
        device, width = self._written.device, self._keys[0].shape[2]
        mask = None
        if min(self._lengths) < width:
            padding = width - torch.tensor(self._lengths, device=device)
            mask = _added(torch.arange(width, device=device) < padding[:, None], self._keys[0].dtype)
        sizes = Counter(self._prompts)
        most = max(sizes.values())
        slots = places = None
        if min(sizes.values()) < most:
            filled = [[b for b, of in enumerate(self._prompts) if of == p] for p in range(len(self._lengths))]
            by_slot = [b for rows in filled for b in rows + rows[:1] * (most - len(rows))]
            by_row = [p * most + k for p, rows in enumerate(filled) for k in range(len(rows))]
            slots, places = torch.tensor(by_slot, device=device), torch.tensor(by_row, device=device)
        return PromptAttention(self._keys, self._values, mask, None, slots, places)


def new_batch(policy: AudioPolicy, answers: Sequence[int]) -> Batch:
    """Return an empty batch for prompts with so many answers each."""
    rows = RowBatch(policy)
    if rows.aligned or not takes_prompts(policy.backbone.decoder(policy.model)):
        return rows
    # Attention to the prompts computes as many rows for each as the largest group has.
    most = max(answers, default=0)
    return GroupBatch(policy) if most > 1 and most * len(answers) <= 2 * sum(answers) else rows


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden [R, columns] bool -> [R, 1, 1, columns], to be added to scores."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)[:, None, None]
