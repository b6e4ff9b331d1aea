"""The answers that the transformers engine decodes side by side, with their key-value cache, and the step itself.

`GroupBatch` holds a prompt once for all its answers, and a step reads it once. `RowBatch` holds it in every row of the
cache: for a single answer to each prompt, for a few groups among many single answers, such as paused ones, and for
models whose layers keep something else than all keys and values or whose attention is not to be replaced.

Under `torch.compile` (`SamplingConfig.compile`) shapes are symbolic: a compiled step serves any number of answers and
prompts, but one answer, one prompt and one answer to a prompt are cases of their own, each compiled when it first
occurs. On CUDA the mode is "reduce-overhead": steps are recorded as CUDA graphs, one for each shape, so the columns of
the cache that they read grow by `WIDTH` at a time.

Shapes: R prompts that were prefilled, P prompts of the batch, B rows of the cache, S columns of the prompts, H decoder
width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from audiorl.algos.prompt_attention import PromptAttention
from audiorl.algos.varlen import compute_dtype
from audiorl.models.attention import as_mask, no_mask, takes_prompts
from audiorl.models.policy import AudioPolicy
from audiorl.rollout.cache import RowCache, RowLayer

WIDTH = 128
"""Columns of the rows' own tokens by which a compiled step grows."""
RECOMPILES = 64
"""Compiled steps of one process. Beyond it torch runs steps as they are, and says so."""


@dataclass
class Prefill:
    """Prompts that went through the decoder, padded on the left: [R, S]."""

    cache: DynamicCache
    hidden: Tensor
    """[R, H]: the last hidden states."""
    lengths: list[int]
    """[R], in tokens."""


@dataclass
class PendingBatch:
    """Prompts that may join a batch."""

    prompts: int = 0
    rows: int = 0
    """Answers to all of them together."""
    max_prompt_len: int = 0
    max_new_tokens: int = 0
    """The most tokens or frames that one of the answers may add."""


class RowBatch:
    """Each row of the cache holds its prompt and what was sampled, in the columns from `first` to `last`."""

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
        self._ends: list[int] = []  # the columns up to each row's last one, as `_last` says on the device
        self._room = 0  # columns that the longest row may come to
        self._first = torch.zeros(0, dtype=torch.long)  # [B], on the device
        self._last = torch.zeros(0, dtype=torch.long)  # [B], on the device

    @property
    def aligned(self) -> bool:
        """All rows must begin together."""
        return self._cache.aligned

    def tokens(self, active: Sequence[int], joining: PendingBatch) -> int:
        """Count the columns of all rows together when rows `active` stay and others join."""
        room = max(self._room if active else 0, joining.max_prompt_len + joining.max_new_tokens)
        return (len(active) + joining.rows) * room

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        if not rows:
            self._empty()
            return
        self.rollouts, self._ends = [self.rollouts[b] for b in rows], [self._ends[b] for b in rows]
        chosen = torch.tensor(rows, device=self._first.device)
        self._first, self._last = self._first[chosen], self._last[chosen]
        self._cache.keep(chosen)

    def join(self, prefill: Prefill, repeat: Sequence[int], rollouts: Sequence[int], most: int) -> None:
        """Append a row for each of `rollouts`, samples of the prompts `repeat`, that adds `most` tokens at most."""
        device, columns = prefill.hidden.device, max(prefill.lengths)
        rows = torch.tensor(repeat, device=device)
        first = torch.tensor([columns - prefill.lengths[r] for r in repeat], device=device)
        new = prefill.hidden[rows], first, torch.full_like(first, columns - 1)
        if self.rollouts:
            before = self.hidden, self._first, self._last
            self.hidden, self._first, self._last = (torch.cat(pair) for pair in zip(before, new, strict=True))
        else:
            self.hidden, self._first, self._last = new
        self.rollouts += rollouts
        self._ends += [columns] * len(rollouts)
        self._room = max(self._room, columns + most)
        self._cache.join(prefill.cache, rows, self._room)

    def forward(self, inputs: dict[str, Any]) -> None:
        """Run one token of every row through the decoder."""
        # A row that has ended may go on beyond its room; what it writes there is never read.
        self._last = (self._last + 1).clamp(max=self._room - 1)
        self._ends = [min(end + 1, self._room) for end in self._ends]
        width = max(self._ends)
        columns = torch.arange(width, device=self._first.device)
        mask = columns >= self._first[:, None]
        if self.aligned:
            self._cache.after_all()
            mask = mask.long()
        else:
            self._cache.at(self._last[:, None], width, together=min(self._ends) == width)
            visible = (mask & (columns <= self._last[:, None]))[:, None, None]
            mask = as_mask(self._decoder, visible, inputs["inputs_embeds"].dtype)
        out = self._decoder(
            **inputs,
            attention_mask=mask,
            position_ids=(self._last - self._first)[:, None],
            past_key_values=self._cache.layers,
            use_cache=True,
        )
        self.hidden = out.last_hidden_state[:, -1]


class GroupBatch:
    """The cache holds each prompt once, padded on the left, and in every row what was sampled, from column 0 on.

    The rows of a prompt follow one another. `compiled`: steps run under `torch.compile`, with fewer shapes.
    """

    aligned = False

    def __init__(self, policy: AudioPolicy, compiled: bool = False):
        self.policy = policy
        self._decoder = policy.backbone.decoder(policy.model)
        self._compiled = compiled
        self._step = compiled_step(policy.device.type) if compiled else decode_step
        self._empty()

    def _empty(self) -> None:
        self.rollouts: list[int] = []
        """Which rollout each row belongs to."""
        self.hidden = torch.zeros(0)
        """[B, H]: what the next token is sampled from."""
        self._cache = RowCache(self.policy.new_cache())
        self._keys: list[Tensor] = []  # [P, heads, S, D] of each layer
        self._values: list[Tensor] = []
        self._lengths: list[int] = []  # of the P prompts, in tokens
        self._prompts: list[int] = []  # the prompt of each row
        self._counts: list[int] = []  # tokens of each row in the cache, as `_written` says on the device
        self._room = 0  # columns of a row
        self._written = torch.zeros(0, dtype=torch.long)  # [B], on the device
        self._begins = torch.zeros(0, dtype=torch.long)  # [B], on the device: the length of each row's prompt
        self._attention: PromptAttention | None = None  # but for `row_mask`

    def tokens(self, active: Sequence[int], joining: PendingBatch) -> int:
        """Count the columns of all prompts and rows together when rows `active` stay and others join."""
        stay = {self._prompts[b] for b in active}
        longest = max([joining.max_prompt_len, *(self._lengths[p] for p in stay)])
        room = max(self._room if active else 0, joining.max_new_tokens)
        return (len(stay) + joining.prompts) * longest + (len(active) + joining.rows) * room

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and prompts without rows."""
        if not rows:
            self._empty()
            return
        self.rollouts, self._counts = [self.rollouts[b] for b in rows], [self._counts[b] for b in rows]
        chosen = torch.tensor(rows, device=self._written.device)
        self._written, self._begins = self._written[chosen], self._begins[chosen]
        self._cache.keep(chosen)
        prompts = [self._prompts[b] for b in rows]
        stay = sorted(set(prompts))
        if len(stay) < len(self._lengths):
            self._lengths = [self._lengths[p] for p in stay]
            numbers, width = torch.tensor(stay, device=chosen.device), max(self._lengths)
            for states in (self._keys, self._values):
                states[:] = [x[numbers, :, -width:] for x in states]
        self._prompts = [stay.index(p) for p in prompts]
        self._attention = None

    def join(self, prefill: Prefill, repeat: Sequence[int], rollouts: Sequence[int], most: int) -> None:
        """Append a row for each of `rollouts`, samples of the prompts `repeat`, that adds `most` tokens at most.

        `repeat` is ascending and leaves no prompt out.
        """
        device, dtype = prefill.hidden.device, compute_dtype(prefill.hidden)
        rows = torch.tensor(repeat, device=device)
        begins = torch.tensor([prefill.lengths[r] for r in repeat], device=device)
        new = prefill.hidden[rows], begins, torch.zeros_like(begins)
        if self.rollouts:
            before = self.hidden, self._begins, self._written
            self.hidden, self._begins, self._written = (torch.cat(pair) for pair in zip(before, new, strict=True))
        else:
            self.hidden, self._begins, self._written = new
        self.rollouts += rollouts
        self._prompts += [len(self._lengths) + r for r in repeat]
        self._lengths += prefill.lengths
        self._counts += [0] * len(rollouts)
        self._room = max(self._room, most)
        nothing = [(x.keys[:, :, :0].to(dtype), x.values[:, :, :0].to(dtype)) for x in prefill.cache.layers]
        for layer, states in zip(self._cache.layers.layers, nothing, strict=True):
            assert isinstance(layer, RowLayer)
            layer.join(*states, rows, self._room)
        for i, layer in enumerate(prefill.cache.layers):
            for all_states, x in ((self._keys, layer.keys.to(dtype)), (self._values, layer.values.to(dtype))):
                all_states[i : i + 1] = [_stacked(all_states[i], x) if i < len(all_states) else x]
        self._attention = None

    def forward(self, inputs: dict[str, Any]) -> None:
        """Run one token of every row through the decoder."""
        # A row that has ended may go on beyond its room; what it writes there is never read.
        columns = self._written.clamp(max=self._room - 1)
        self._counts = [min(count + 1, self._room) for count in self._counts]
        width = max(self._counts)
        together = min(self._counts) == width and not self._compiled
        if self._compiled:
            width = min(-(-width // WIDTH) * WIDTH, self._room)
        self._cache.at(columns[:, None], width, together)
        row_mask = None
        if not together:
            row_mask = _added(torch.arange(width, device=columns.device) > columns[:, None], self._keys[0].dtype)
        if self._attention is None:
            self._attention = self._prompt_attention()
        attention = replace(self._attention, row_mask=row_mask)
        positions = (self._begins + columns)[:, None]
        self.hidden = self._step(self._decoder, inputs, self._cache.layers, attention, positions)
        self._written = columns + 1

    def _prompt_attention(self) -> PromptAttention:
        device, width = self._written.device, self._keys[0].shape[2]
        mask = None
        if self._compiled or min(self._lengths) < width:
            padding = width - torch.tensor(self._lengths, device=device)
            mask = _added(torch.arange(width, device=device) < padding[:, None], self._keys[0].dtype)
        sizes = Counter(self._prompts)
        most = max(*sizes.values(), 2 if self._compiled else 1)  # torch compiles a size of 1 separately
        slots = places = None
        if self._compiled or min(sizes.values()) < most:
            filled = [[b for b, of in enumerate(self._prompts) if of == p] for p in range(len(self._lengths))]
            by_slot = [b for rows in filled for b in rows + rows[:1] * (most - len(rows))]
            by_row = [p * most + k for p, rows in enumerate(filled) for k in range(len(rows))]
            slots, places = torch.tensor(by_slot, device=device), torch.tensor(by_row, device=device)
        if self._compiled:
            mark_static(self._keys)
            mark_static(self._values)
            mark_static(b for layer in self._cache.layers.layers for b in cast(RowLayer, layer).buffers)
        return PromptAttention(self._keys, self._values, mask, None, slots, places)


Batch = RowBatch | GroupBatch


def new_batch(policy: AudioPolicy, answers: Sequence[int], compiled: bool = False) -> Batch:
    """Return an empty batch for prompts with so many answers each. `compiled`: see `check_compiles`."""
    if compiled:
        return GroupBatch(policy, compiled=True)
    rows = RowBatch(policy)
    if rows.aligned or not takes_prompts(policy.backbone.decoder(policy.model)):
        return rows
    # Attention to the prompts computes as many rows for each as the largest group has.
    most = max(answers, default=0)
    return GroupBatch(policy) if most > 1 and most * len(answers) <= 2 * sum(answers) else rows


def _stacked(before: Tensor, new: Tensor) -> Tensor:
    """Return the prompts of both [·, heads, ·, D], padded on the left."""
    width = max(before.shape[2], new.shape[2])
    out = new.new_zeros(len(before) + len(new), new.shape[1], width, new.shape[3])
    out[: len(before), :, width - before.shape[2] :] = before
    out[len(before) :, :, width - new.shape[2] :] = new
    return out


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden [R, columns] bool -> [R, 1, 1, columns], to be added to scores."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -torch.inf)[:, None, None]


# -- the step ----------------------------------------------------------------------------------------------------------


def decode_step(
    decoder: Any, inputs: dict[str, Any], cache: Any, prompts: PromptAttention, positions: Tensor
) -> Tensor:
    """Run one token of every row through the decoder: hidden states [B, H] from positions [B, 1]."""
    hidden: Tensor = decoder(
        **inputs,
        attention_mask=no_mask(positions.device),
        prompts=prompts,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return hidden[:, -1]


@cache
def compiled_step(device: str) -> Callable[..., Tensor]:
    """Return `decode_step`, compiled for a type of device at its first call."""
    # torch._dynamo takes a second to import
    from torch._dynamo.config import patch as patch_dynamo  # type: ignore[attr-defined]
    from torch.fx.experimental._config import patch as patch_shapes  # type: ignore[attr-defined]

    graphs = device == "cuda"
    mode = "reduce-overhead" if graphs else None
    run = torch.compile(decode_step, dynamic=True, mode=mode)

    def step(*args: Any) -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        # Equal sizes of one call, such as 64 rows and 64 columns, are not equal in the next.
        with patch_dynamo(recompile_limit=RECOMPILES), patch_shapes(use_duck_shape=False):
            return run(*args)

    return step


def mark_static(tensors: Iterable[Tensor]) -> None:
    """Mark what CUDA graphs read and write in place; else a step that writes to its arguments is not recorded."""
    for x in tensors:
        if x.is_cuda:
            torch._dynamo.mark_static_address(x)


def check_compiles(policy: AudioPolicy) -> None:
    """Raise ValueError where the decode step of a policy cannot be compiled."""
    decoder = policy.backbone.decoder(policy.model)
    if policy.speech is not None:
        raise ValueError("sampling.compile: the step of a model that speaks is not compiled; turn it off")
    if RowCache(policy.new_cache()).aligned or not takes_prompts(decoder):
        raise ValueError(
            f"sampling.compile: {type(decoder).__name__} has sliding windows, linear attention, cross-attention or "
            "eager attention, whose step is not compiled; turn it off"
        )
    if missing := _missing_compiler(policy.device.type):
        raise ValueError(f"sampling.compile: {missing}")


def _missing_compiler(device: str) -> str | None:
    """Return what torch.compile lacks on this type of device."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "torch compiles for this GPU with triton, which is missing or does not know it"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch compiles for the CPU with a C++ compiler, and none was found; install g++, or name one in CXX"
    return None
