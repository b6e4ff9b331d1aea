"""The answers that a GPU decodes side by side, in slots that stay where they are, and the step for one token of each.

The cache of a call is made once: a prompt has a slot of columns that all its answers read, an answer a slot of its own.
Answers that end leave their slot to the next ones, and as few are left they move together, so that a step computes the
next power of 2 of rows. Slots without an answer are computed too and never read. So a step always works on the same
tensors, whoever is in them, and one CUDA graph for each power of 2 serves a call (`graphs.py`).

The layers run by `kernels.py`, the same whether a step is captured or not. On a CPU `batch.py` decodes.

Shapes: P slots of prompts, B slots of answers (rows), G answers of a prompt at most, S and W columns of a prompt and of
a row, K heads of keys, D head width, H decoder width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from audiorl.algos.varlen import compute_dtype
from audiorl.distributed.local import free_bytes
from audiorl.models.attention import head_width, takes_prompts
from audiorl.models.policy import AudioPolicy
from audiorl.rollout import kernels
from audiorl.rollout.batch import Prefill

FUSED = ("llama", "qwen2", "qwen3", "qwen2_5_omni_text", "qwen3_omni_moe_text", "mistral")
"""Decoders whose layers are norm, attention, norm, feed-forward, with nothing in between."""
_MROPE = ("qwen2_5_omni_text", "qwen3_omni_moe_text")


def takes_slots(policy: AudioPolicy) -> bool:
    """Tell if the policy's decoder can run in slots: it is one of `FUSED`, writes text, and attends to everything."""
    decoder = policy.backbone.decoder(policy.model)
    return policy.speech is None and decoder.config.model_type in FUSED and takes_prompts(decoder)


class FusedDecoder:
    """The layers of a decoder for one token of every row.

    The products with q, k and v are one: their weights are copied side by side when this is made, so make one whenever
    they have changed. All others run as the modules they are, of the policy's own weights; so does an adapter.
    positions: how many there are, to each of which belongs a rotation.
    """

    def __init__(self, decoder: Any, dtype: torch.dtype, positions: int):
        self._decoder, self._dtype = decoder, dtype
        self._qkv = [_side_by_side(layer.self_attn, dtype) for layer in decoder.layers]
        embeddings = decoder.get_input_embeddings().weight
        places = torch.arange(positions, device=embeddings.device).expand(3, 1, -1)
        # M-RoPE has three rows of positions, which are equal for text and audio.
        turns = decoder.rotary_emb(embeddings, places if decoder.config.model_type in _MROPE else places[0])
        self._turns = torch.cat([turn.reshape(-1, positions, turn.shape[-1])[0] for turn in turns], 1)

    def __call__(self, x: Tensor, slots: Slots, rows: int) -> Tensor:
        """Return the last hidden states [rows, H] for the embeddings x [rows, H], which are written over."""
        ops, config, dtype = torch.ops.audiorl, self._decoder.config, self._dtype
        width, eps = slots.keys[0].shape[3], config.rms_norm_eps
        turns = self._turns.index_select(0, slots.begins[:rows] + slots.written[:rows])
        delta = None
        for i, (layer, qkv) in enumerate(zip(self._decoder.layers, self._qkv, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            keys, values = slots.keys[i][:rows], slots.values[i][:rows]
            normed = ops.add_norm(x, delta, layer.input_layernorm.weight, eps, dtype)
            if qkv is None:
                query, key, value = (p(normed) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            else:
                narrow = keys.shape[1] * width
                out = linear(normed, *qkv)
                query, key, value = out.split([out.shape[1] - 2 * narrow, narrow, narrow], 1)
            norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
            weights = [None if norm is None else norm.weight for norm in norms]
            ops.rotary_write(query, key, value, turns, *weights, eps, keys, values, slots.written[:rows])
            attended = ops.attend(
                query,
                keys,
                values,
                slots.prompt_keys[i],
                slots.prompt_values[i],
                slots.lengths,
                slots.members,
                slots.places[:rows],
                slots.written[:rows],
                attention.scaling,
            )
            delta = attention.o_proj(attended)
            normed = ops.add_norm(x, delta, layer.post_attention_layernorm.weight, eps, dtype)
            if hasattr(mlp, "gate_proj"):
                delta = mlp.down_proj(ops.swiglu(mlp.gate_proj(normed), mlp.up_proj(normed)))
            else:  # experts
                delta = mlp(normed[:, None])[:, 0]
        hidden: Tensor = ops.add_norm(x, delta, self._decoder.norm.weight, eps, dtype)
        return hidden


def _side_by_side(attention: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """Copy weights and biases of q, k and v into one; None where one of them has an adapter."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    if not all(isinstance(part, nn.Linear) for part in parts):  # peft's are none; `CastLinear` under autocast is
        return None
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, 3)
    weight = torch.cat([part.weight.detach().to(dtype) for part in parts])
    return weight, torch.cat([b.detach().to(dtype) for b in biases]) if biases else None


class Slots:
    """Slots for a call's prompts and answers, and their cache.

    prompts: the tokens of each prompt and the number of its answers, in the order in which they will join. most: the
    most tokens of an answer. budget: `sampling.max_batch_tokens`. free_rollout: what slots without an answer sample as.
    Raises ValueError where the device has no memory for them.
    """

    def __init__(
        self, policy: AudioPolicy, prompts: Sequence[tuple[int, int]], most: int, budget: int, free_rollout: int
    ):
        decoder, device = policy.backbone.decoder(policy.model), policy.device
        config, self._free = decoder.config, free_rollout
        dtype = compute_dtype(torch.empty(0, dtype=policy.backbone.head(policy.model).weight.dtype, device=device))
        longest, self._group = max(length for length, _ in prompts), max(answers for _, answers in prompts)
        taken, rows = 0, 0
        for _, answers in prompts:
            if taken and (taken + 1) * longest + (rows + answers) * most > budget:
                break
            taken, rows = taken + 1, rows + answers
        rows = max(rows, self._group)
        heads, width = config.num_key_value_heads, head_width(config)
        tokens, layers = taken * longest + rows * most, len(decoder.layers)
        _require_memory(tokens, 2 * layers * heads * width * dtype.itemsize, device)

        def caches(count: int, columns: int) -> list[Tensor]:
            return [torch.zeros(count, heads, columns, width, dtype=dtype, device=device) for _ in range(layers)]

        self.keys, self.values = caches(rows, most), caches(rows, most)  # [B, K, W, D] of each layer
        self.prompt_keys, self.prompt_values = caches(taken, longest), caches(taken, longest)  # [P, K, S, D]
        sizes = [rows] * 5 + [taken, taken * self._group]
        self._table = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        views = self._table.split(sizes)
        self.ids, self.begins, self.written, self.places, self.selected, self.lengths, members = views
        """ids: last tokens [B]; begins: the position behind each row's prompt [B]; written: columns of each row in use
        [B]; places: the slot of each row among those of its prompt [B], -1: none; selected: rollouts [B]; lengths
        [P]."""
        self.members = members.view(taken, self._group)
        """The row of each answer of a prompt, -1 where there is none."""
        self.rollouts: list[int | None] = [None] * rows
        """Which rollout each slot belongs to."""
        self._counts, self._prompt_of, self._last = [0] * rows, [0] * rows, [0] * rows
        self._ends = [1] * taken
        self._lengths = [1] * taken  # an empty slot, too, has a column: nothing is a mean of nothing
        self.rows = _power(rows, rows)
        """How many slots a step computes: the first ones."""
        kernels_of = config.num_attention_heads // heads
        if device.type == "cuda":
            kernels.check(device, dtype, kernels_of, width)
        self._device, self.decoder = device, FusedDecoder(decoder, dtype, longest + most + 1)

    def free(self, stay: Collection[int]) -> tuple[int, int]:
        """Count the slots of prompts and of answers that are free when the answers in slots `stay` stay."""
        return len(self._lengths) - len({self._prompt_of[b] for b in stay}), len(self.rollouts) - len(stay)

    def fewer(self, answers: int) -> bool:
        """Tell if steps could compute fewer rows with so many answers."""
        return _power(answers, len(self.rollouts)) < self.rows

    def advance(self) -> None:
        """Count the next token of every row."""
        self._counts = [count + 1 for count in self._counts]

    def change(
        self,
        stay: dict[int, int],
        prefill: Prefill | None = None,
        joining: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        """Keep the answers in slots `stay`, with the last token of each; append others.

        joining: (rollout, first token) of the answers to each prompt in `prefill`. Nothing may be running unread.
        """
        for b in range(len(self.rollouts)):
            if b not in stay:
                self.rollouts[b] = None
        for b, token in stay.items():
            self._last[b] = token
        used = {self._prompt_of[b] for b in stay}
        free = iter([p for p in range(len(self._lengths)) if p not in used])
        places = {r: next(free) for r, answers in enumerate(joining) if answers}
        if prefill is not None and places:
            chosen = torch.tensor(list(places), device=self._device)
            to = torch.tensor(list(places.values()), device=self._device)
            for i, layer in enumerate(prefill.cache.layers):
                for mine, theirs in ((self.prompt_keys[i], layer.keys), (self.prompt_values[i], layer.values)):
                    end = mine[:, :, mine.shape[2] - theirs.shape[2] :]
                    end.index_copy_(0, to, theirs.index_select(0, chosen).to(mine.dtype))
            empty = iter([b for b, i in enumerate(self.rollouts) if i is None])
            for r, p in places.items():
                self._lengths[p], self._ends[p] = prefill.lengths[r], prefill.ends[r]
                for rollout, token in joining[r]:
                    b = next(empty)
                    self.rollouts[b], self._counts[b], self._prompt_of[b], self._last[b] = rollout, 0, p, token
        self._move_together()
        self._write()

    def _move_together(self) -> None:
        """Move the answers to the first slots, as few as a step can compute."""
        filled = [b for b, i in enumerate(self.rollouts) if i is not None]
        self.rows = _power(len(filled), len(self.rollouts))
        beyond = [b for b in filled if b >= self.rows]
        empty = [b for b in range(self.rows) if self.rollouts[b] is None][: len(beyond)]
        if not beyond:
            return
        for lists in (self.rollouts, self._counts, self._prompt_of, self._last):
            for a, b in zip(beyond, empty, strict=True):
                lists[b] = lists[a]  # type: ignore[index,assignment]
        for b in beyond:
            self.rollouts[b] = None
        source, to = (torch.tensor(x, device=self._device) for x in (beyond, empty))
        for buffer in (*self.keys, *self.values):
            buffer.index_copy_(0, to, buffer.index_select(0, source))

    def _write(self) -> None:
        """Write everything that a step reads of the slots, by one copy to the device."""
        members: list[list[int]] = [[] for _ in self._lengths]
        places = []
        for b, rollout in enumerate(self.rollouts):
            p = self._prompt_of[b]
            places.append(-1 if rollout is None else p * self._group + len(members[p]))
            if rollout is not None:
                members[p].append(b)
        begins = [self._ends[p] for p in self._prompt_of]
        columns = [
            self._last,
            begins,
            [0 if i is None else count for i, count in zip(self.rollouts, self._counts, strict=True)],
            places,
            [self._free if i is None else i for i in self.rollouts],
            self._lengths,
            [b for rows in members for b in rows + [-1] * (self._group - len(rows))],
        ]
        self._table.copy_(torch.tensor([x for column in columns for x in column]))


def _power(count: int, most: int) -> int:
    """Return the least power of 2 that is not below `count`, or `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def _require_memory(tokens: int, token_bytes: int, device: torch.device) -> None:
    free = free_bytes(device)
    if tokens * token_bytes > free:
        raise ValueError(
            f"sampling.max_batch_tokens: a cache of {tokens:,} tokens takes {tokens * token_bytes / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free; at most {free // token_bytes:,} tokens fit"
        )
