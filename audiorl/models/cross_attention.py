"""Decoders of encoder-decoder models over the input of decoder-only ones: audio placeholders, then text.

An encoder-decoder model reads audio by cross-attention, not as a part of its text. To share packing, prompts that are
encoded once for a group, engines and losses with the other families, its prompts begin with audio placeholders too. The
placeholders carry the encoder's output. They are no input of the decoder's layers: they are its *memory*, the keys and
values of cross-attention, and text positions do not count them. A token of text attends to the text before it in its
span and its parent, and to all memory of both.

Shapes: T positions of a packed batch, R prompts, B rollouts, S positions of padded prompts, L positions of text, M
positions of a memory, H model width, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from audiorl.algos.varlen import Attention, SegmentAttention, Segments, Spans
from audiorl.models.attention import packed_attention

SelfAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query, key, value [B, heads, L, D] of the text -> [B, heads, L, D]."""
Memory = Callable[[Tensor], Tensor]
"""query [B, heads, L, D] -> what it reads of the memory, [B, heads, L, D]."""
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""query and key [B, heads, L, D] -> the same, turned by their positions."""


class CrossAttentionDecoder(nn.Module):
    """A decoder of transformers that also takes packed batches (`spans`) and prompts with a `CrossAttentionCache`.

    A family derives from this and from its decoder, and says what its parts are called and how it places tokens.
    With neither it is the decoder of transformers.
    """

    norm_names = "input_layernorm", "post_attention_layernorm", "final_layernorm"
    """Of a layer's norms: before attention to the text, to the memory, and before the feed-forward block."""
    output_name = "o_proj"
    last_norm = "norm"
    layers: nn.ModuleList
    config: Any
    gradient_checkpointing: bool

    def place(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """Return the first layer's input for embeddings [..., L, H] of text at positions [..., L] or [L]."""
        raise NotImplementedError

    def rotation(self, hidden: Tensor, positions: Tensor) -> Rotation | None:
        """Return what turns queries and keys [B, heads, L, D] by their positions; None where no layer does."""
        return None

    def feed_forward(self, layer: Any, x: Tensor) -> Tensor:
        out: Tensor = layer.mlp(x)
        return out

    @property
    def max_positions(self) -> int:
        """The most tokens of text."""
        return int(getattr(self.config, "max_target_positions", None) or self.config.max_position_embeddings)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        is_audio: Tensor | None = None,
        spans: Spans | None = None,
        attention: Attention = "auto",
        trained_audio: bool = True,
        **kwargs: Any,
    ) -> Any:
        """`is_audio` is true at memory: [T] with `spans`, on the CPU; [R, S] in prompts, which are padded on the left
        and masked by `attention_mask` [R, S]; None for text alone. Positions of memory give zeros. Without
        `trained_audio` no gradient of them is computed."""
        if spans is not None:
            assert inputs_embeds is not None and is_audio is not None
            hidden = self._packed(inputs_embeds[0], is_audio, spans, attention, trained_audio)
            return BaseModelOutput(last_hidden_state=hidden[None])
        if isinstance(past_key_values, CrossAttentionCache):
            assert inputs_embeds is not None
            if is_audio is not None:
                assert attention_mask is not None
                inputs_embeds = past_key_values.begin(self, inputs_embeds, attention_mask.bool(), is_audio)
            return BaseModelOutput(last_hidden_state=self._cached(inputs_embeds, past_key_values))
        return super().forward(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )

    def _packed(
        self, embeds_TH: Tensor, is_audio: Tensor, spans: Spans, attention: Attention, trained_audio: bool
    ) -> Tensor:
        texts = [0, *accumulate((~is_audio).long().tolist())]  # tokens of text before each position
        text_spans = [(texts[a], texts[b], texts[c], texts[d]) for a, b, c, d in spans]
        places = torch.cat([torch.arange(d - c, d - c + b - a) for a, b, c, d in text_spans])
        text_places, memory_places = (
            mask.nonzero()[:, 0].to(embeds_TH.device, non_blocking=True) for mask in (~is_audio, is_audio)
        )
        memory_lengths, reader_lengths = memories_of(is_audio, spans)
        memory = (embeds_TH if trained_audio else embeds_TH.detach())[memory_places][None]
        self._check_length(int(places.max()) + 1 if len(places) else 0)
        positions = places.to(embeds_TH.device, non_blocking=True)[None]
        hidden = self.place(embeds_TH[text_places][None], positions)
        rotate = self.rotation(hidden, positions)

        attend = packed_attention(self, text_spans, attention, hidden)
        segments = Segments.of_lengths(reader_lengths, memory_lengths, False, hidden.device)
        read_memory = SegmentAttention(attend.kernel, segments)

        def self_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value).transpose(1, 2)

        for layer in self.layers:
            keys, values = memory_keys(layer, memory)

            def read(query: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                return read_memory(query, keys, values).transpose(1, 2)

            hidden = self._layer(layer, hidden, self_attention, read, rotate)
        norm: nn.Module = getattr(self, self.last_norm)
        text_LH = norm(hidden)[0]
        return text_LH.new_zeros(len(embeds_TH), text_LH.shape[1]).index_copy(0, text_places, text_LH)

    def _cached(self, embeds_BLH: Tensor, cache: CrossAttentionCache) -> Tensor:
        before, new = cache.get_seq_length(), embeds_BLH.shape[1]
        padding = cache.padding
        places = torch.arange(before, before + new, device=embeds_BLH.device)
        positions = (places - padding[:, None]).clamp(min=0)
        if before + new > self.max_positions:  # only then is it worth waiting for the device
            self._check_length(int(positions.max()) + 1)
        hidden = self.place(embeds_BLH, positions)
        rotate = self.rotation(hidden, positions)
        seen = torch.arange(before + new, device=embeds_BLH.device)
        visible = (seen <= places[:, None]) & (seen >= padding[:, None, None])
        visible = (visible | (seen == places[:, None]))[:, None]  # padding sees itself: a row without keys gives NaN
        for layer, texts, memory in zip(self.layers, cache.text_layers, cache.memory_layers, strict=True):

            def self_attention(query: Tensor, key: Tensor, value: Tensor, texts: Any = texts) -> Tensor:
                keys, values = texts.update(key, value)
                return scaled_dot_product_attention(query, keys, values, attn_mask=visible)

            hidden = self._layer(layer, hidden, self_attention, memory.read, rotate)
        norm: nn.Module = getattr(self, self.last_norm)
        out: Tensor = norm(hidden)
        return out

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_positions:
            raise ValueError(
                f"the model reads and writes {self.max_positions} tokens of text at most; shorten the request or lower "
                "sampling.max_new_tokens"
            )

    def _layer(self, *inputs: Any) -> Tensor:
        """Run a layer: see `_run`."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            again: Tensor = checkpoint(self._run, *inputs, use_reentrant=False)
            return again
        return self._run(*inputs)

    def _run(
        self, layer: Any, hidden: Tensor, attention: SelfAttention, memory: Memory, rotate: Rotation | None
    ) -> Tensor:
        text, cross = layer.self_attn, layer.encoder_attn
        before_text, before_memory, before_last = (getattr(layer, name) for name in self.norm_names)
        after_text, after_memory = (getattr(part, self.output_name) for part in (text, cross))
        x = before_text(hidden)
        query, key, value = (_heads(text, project(x)) for project in (text.q_proj, text.k_proj, text.v_proj))
        if rotate is not None:
            query, key = rotate(query, key)
        out = attention(query, key, value)
        hidden = hidden + after_text(out.transpose(1, 2).flatten(2))
        out = memory(_heads(cross, cross.q_proj(before_memory(hidden))))
        hidden = hidden + after_memory(out.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(layer, before_last(hidden))


def _heads(attention: Any, x: Tensor) -> Tensor:
    """[B, L, H] -> [B, heads, L, D]."""
    return x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def memory_keys(layer: Any, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, heads, M, D] of a memory [B, M, H] for a layer's cross-attention."""
    cross = layer.encoder_attn
    return _heads(cross, cross.k_proj(memory)), _heads(cross, cross.v_proj(memory))


def memories_of(is_audio: Tensor, spans: Spans) -> tuple[list[int], list[int]]:
    """Count the positions of each memory and the tokens of text that read it: those of its span and of all its
    children, which follow it. is_audio: [T] bool."""
    audio = [0, *accumulate(is_audio.long().tolist())]
    memories, readers = [], []
    for first, end, _, below in spans:
        size = audio[end] - audio[first]
        if not below:
            memories.append(size)
            readers.append(0)
        assert not below or not size, "audio after the prompt"
        readers[-1] += end - first - size
    return memories, readers


class CrossAttentionCache(DynamicCache):
    """A layer of text for each layer of the decoder, then a layer of memory for each.

    All rollouts of a prompt share its memory: it is never copied.
    """

    def __init__(self, num_layers: int):
        super().__init__()
        self._num_layers = num_layers
        self.layers = [DynamicLayer() for _ in range(num_layers)]

    @property
    def text_layers(self) -> Sequence[Any]:
        return self.layers[: self._num_layers]

    @property
    def memory_layers(self) -> Sequence[MemoryLayer]:
        return self.layers[self._num_layers :]

    @property
    def padding(self) -> Tensor:
        """Return [B]: the positions of padding before the text of each rollout."""
        return self.memory_layers[0].padding

    def begin(self, decoder: CrossAttentionDecoder, embeds_RSH: Tensor, mask: Tensor, is_audio: Tensor) -> Tensor:
        """Keep the memory of prompts that begin with audio. Returns the text [R, L, H], padded on the left."""
        text = mask & ~is_audio.to(mask.device)
        lengths = text.sum(1)
        longest = int(lengths.max())
        memories = [embeds[audio] for embeds, audio in zip(embeds_RSH, is_audio.to(embeds_RSH.device), strict=True)]
        for layer in decoder.layers:
            pairs = [memory_keys(layer, m[None]) for m in memories]
            self.layers.append(MemoryLayer(pairs, longest - lengths))
        return embeds_RSH[:, -longest:]


class MemoryLayer(DynamicLayer):
    """Keys and values [1, heads, M, D] of each prompt's memory, and the rollouts that read it."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], padding: Tensor):
        super().__init__()
        self._pairs = pairs
        self.padding = padding
        self._prompts = list(range(len(pairs)))  # of each rollout, ascending

    def read(self, query: Tensor) -> Tensor:
        """Attend with query [B, heads, L, D]: a prompt's rollouts are further queries of one attention."""
        pieces = []
        for prompt, (keys, values) in enumerate(self._pairs):
            rows = [b for b, p in enumerate(self._prompts) if p == prompt]
            if rows:
                q = query[rows[0] : rows[-1] + 1]
                flat = q.transpose(0, 1).flatten(1, 2)[None]
                out = scaled_dot_product_attention(flat, keys, values)[0]
                pieces.append(out.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1))
        return torch.cat(pieces)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.padding = self.padding[indices]
        self._prompts = [self._prompts[i] for i in indices.tolist()]
