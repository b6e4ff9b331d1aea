"""Attention of one new token a row to a prompt that several rows share and to the row's own tokens.

The rows of a prompt are queries of the same keys, which are held and read once. Both parts are of one softmax. On a CPU
the kernel also gives the log-sum-exp of its scores, so the output is σ(a - b)·o_a + σ(b - a)·o_b, where a and b are the
log-sum-exps of the parts and o_a and o_b their outputs. Elsewhere the scores of both parts are put together.

Shapes: P prompts, G slots for the rows of a prompt, B rows, K heads of keys, h query heads of each, S columns of the
prompts, T columns of the rows, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class PromptAttention:
    """What one forward pass of a decoder needs to know, for all its layers."""

    keys: Sequence[Tensor]  # [P, K, S, D] of each layer, in the type in which attention computes
    values: Sequence[Tensor]  # [P, K, S, D] of each layer
    prompt_mask: Tensor | None  # [P, 1, 1, S], added to scores: -inf where a column is padding. None: there is none.
    row_mask: Tensor | None
    """[B, 1, 1, T], added to scores: -inf where a column is not written yet. None: all are written."""
    slots: Tensor | None  # [P * G] int64: the row of each slot, any row where a slot is empty. None: the rows in order.
    places: Tensor | None  # [B] int64: the slot of each row. None: the slots in order.

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [B, K * h, 1, D]; key, value [B, K, T, D] -> [B, 1, K * h, D]."""
        rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3).to(key.dtype)  # [B, K, h, D]
        scale = rows.shape[-1] ** -0.5 if scale is None else scale
        attend = self._two_parts if rows.is_cpu else self._one_softmax
        return attend(layer, rows, key, value, scale).flatten(1, 2).unsqueeze(1)

    def _two_parts(self, layer: int, rows: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        prompts, prompt_lse = _flash_on_cpu(
            self._by_prompt(rows), self.keys[layer], self.values[layer], attn_mask=self.prompt_mask, scale=scale
        )
        out, lse = _flash_on_cpu(rows, key, value, attn_mask=self.row_mask, scale=scale)
        weight = torch.sigmoid(self._by_row(prompt_lse[..., None], rows.shape[2]) - lse[..., None])
        return torch.lerp(out, self._by_row(prompts, rows.shape[2]), weight.to(out.dtype))

    def _one_softmax(self, layer: int, rows: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        of_prompts = _products(self._by_prompt(rows), self.keys[layer]) * scale
        of_rows = _products(rows, key) * scale
        if self.prompt_mask is not None:
            of_prompts = of_prompts + self.prompt_mask
        if self.row_mask is not None:
            of_rows = of_rows + self.row_mask
        scores = torch.cat([self._by_row(of_prompts, rows.shape[2]), of_rows], -1)
        weights = scores.softmax(-1).to(value.dtype)
        to_prompts, to_rows = weights.split([of_prompts.shape[-1], of_rows.shape[-1]], -1)
        return self._by_row(self._by_prompt(to_prompts) @ self.values[layer], rows.shape[2]) + to_rows @ value

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[B, K, h, …] -> [P, K, G * h, …]"""
        x = x if self.slots is None else x.index_select(0, self.slots)
        return x.unflatten(0, (len(self.keys[0]), -1)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor, heads: int) -> Tensor:
        """[P, K, G * h, …] -> [B, K, h, …]"""
        x = x.unflatten(2, (-1, heads)).transpose(1, 2).flatten(0, 1)
        return x if self.places is None else x.index_select(0, self.places)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [R, K, q, D] times keys [R, K, S, D] in float32; bfloat16 rounds a score of 8 by up to 0.03."""
    if queries.is_cuda and queries.dtype != torch.float32:
        flat = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out_dtype=torch.float32)
        return flat.unflatten(0, queries.shape[:2])
    return queries.float() @ keys.float().mT
