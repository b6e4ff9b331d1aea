"""Models that speak: frames of codes among tokens, and a second feed-forward branch of the decoder for them.

Shapes: B, L batch and length, T = B·L positions, H decoder width, N tokens and frames of a speech, Q codebooks, F codec
frames. A codec's frames [Q, F] are F + Q + 1 frames of the delay pattern (`tokenizers_audio.delay`), in which codebook
k is delayed by k frames.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from audiorl.models.backbone import Backbone
from tokenizers_audio.delay import deinterleave, interleave, sampled_codes_mask
from tokenizers_audio.protocol import AudioTokenizer

LAYOUT_KEY = "audiorl_speech"
"""The key of a dualized model's config.json that holds its `FrameLayout`."""
CODEC_KEY = "audiorl_codec"
"""The key that holds the identity of the codec that its codes belong to."""
DUALIZABLE = ("llama", "qwen2", "qwen3", "qwen2_5_omni_text")
"""Decoders whose layers are norm, attention, norm, feed-forward, with nothing in between."""
_TOKENS = ("<|speech_bos|>", "<|speech|>", "<|speech_eos|>")


@dataclass(frozen=True)
class FrameLayout:
    """How speech is written among tokens: `begin_id`, then rows of frames, then `end_id`.

    Each of `codebooks` has `size` codes, of which the last two, `bos` and `eos`, begin and end it. A frame's id is
    `frame_id`, or `delay_id` in the rows in which some codebook has ended; a model reads its codes, not this id. Rows
    that the delay pattern forces and `end_id` are never sampled.
    """

    codebooks: int
    size: int
    bos: int
    eos: int
    begin_id: int
    frame_id: int
    delay_id: int
    end_id: int

    def __post_init__(self) -> None:
        if self.codebooks < 1 or self.size < 3 or {self.bos, self.eos} != {self.size - 2, self.size - 1}:
            raise ValueError(
                f"{self.codebooks} codebooks of {self.size} codes with BOS {self.bos} and EOS {self.eos}: the size "
                "must count both, as the last two codes (1024 codes make a codebook_size of 1026)"
            )

    def check(self, codec: AudioTokenizer) -> None:
        """Raise ValueError unless the model can write this codec's codes."""
        if (codec.num_codebooks, codec.codebook_size) != (self.codebooks, self.codes):
            raise ValueError(
                f"the codec has {codec.num_codebooks} codebooks of {codec.codebook_size} codes, the model writes "
                f"{self.codebooks} of {self.codes}; they do not belong together"
            )

    @property
    def codes(self) -> int:
        """Codes of a codebook that a codec writes."""
        return self.size - 2

    @property
    def delay(self) -> int:
        """Rows from a frame's first code until the frame is complete."""
        return self.codebooks

    def rows(self, frames: int) -> int:
        """Return how many rows speech of so many codec frames has before the one that closes it."""
        return frames + self.delay + 1

    def tokens(self, codes: Tensor, text: Tensor | None = None) -> SpeechTokens:
        """Lay speech [Q, F] out as its frames and `end_id`; the caller writes `begin_id` before it.

        `text` is `Prompt.text`, which talkers need.
        """
        assert len(codes) == self.codebooks and bool(((codes >= 0) & (codes < self.codes)).all())
        frames = interleave(codes.long().cpu(), self.bos, self.eos)
        no_codes = torch.full((1, self.codebooks), -1)
        return SpeechTokens(
            ids=torch.cat([self.ids(frames), torch.tensor([self.end_id])]),
            codes=torch.cat([frames, no_codes]),
            code_mask=torch.cat([sampled_codes_mask(frames, self.bos, self.eos), no_codes >= 0]),
        )

    def ids(self, frames: Tensor) -> Tensor:
        """Return the ids [N] of frames [N, Q]."""
        return torch.where((frames == self.eos).any(-1), self.delay_id, self.frame_id)

    def head_without_bos(self, weight: Tensor) -> Tensor:
        """[Q·size, H] -> [Q·(size - 1), H], the weights of codes that a sampler may choose."""
        by_codebook = weight.view(self.codebooks, self.size, -1)
        return torch.cat([by_codebook[:, : self.bos], by_codebook[:, self.bos + 1 :]], 1).flatten(0, 1)

    def frames(self, rows: Tensor) -> Tensor:
        """Return the complete frames [Q, F] in rows [N, Q] of one speech."""
        return deinterleave(rows, self.bos, self.eos)

    def codec_of(self, codec: AudioTokenizer, prompt_ids: Tensor) -> AudioTokenizer:
        """Return `codec` as it decodes the speech after a prompt [P]."""
        return codec

    def closes(self, codes: Sequence[int]) -> bool:
        """Tell whether a row [Q] ends speech without being a part of it."""
        return False

    def speeches(self, codes: Tensor) -> list[Tensor]:
        """Return the complete frames [Q, F] of each speech in codes [N, Q], which are -1 where there is no frame."""
        is_frame = codes[:, 0] >= 0
        edges = torch.diff(nn.functional.pad(is_frame.int(), (1, 1)))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        return [self.frames(codes[a:b]) for a, b in zip(starts, ends, strict=True)]


@dataclass(frozen=True, eq=False)
class SpeechTokens:
    """Tokens and frames of a speech: ids [N], codes [N, Q] (-1 where there is no frame), code_mask [N, Q]."""

    ids: Tensor
    codes: Tensor
    code_mask: Tensor


@dataclass(frozen=True)
class TalkerLayout(FrameLayout):
    """How a talker writes speech: frames without delay, then a row whose code of codebook 0 is one of `stops`.

    `size` counts the codes alone; the head of codebook 0 also writes stops. `frame_id` is the text's pad.
    """

    stops: tuple[int, ...] = ()
    trained: tuple[int, ...] = field(default=(), compare=False)
    """Codebooks with a loss, the others are replayed; (): all."""

    def __post_init__(self) -> None:
        if wrong := [k for k in self.trained if not 0 <= k < self.codebooks]:
            raise ValueError(f"--codebooks {wrong[0]}: the talker has codebooks 0 to {self.codebooks - 1}")

    @property
    def delay(self) -> int:
        return 0

    def rows(self, frames: int) -> int:
        return frames

    @property
    def codes(self) -> int:
        return self.size

    def mask(self, codes: Tensor) -> Tensor:
        """Return which of sampled codes [N, Q] count: bool [N, Q]."""
        trained = torch.tensor([not self.trained or k in self.trained for k in range(self.codebooks)])
        return (codes >= 0) & trained

    def tokens(self, codes: Tensor, text: Tensor | None = None) -> SpeechTokens:
        """Lay speech [Q, F] out beside the rest of its text [K]: F frames and the row that stops."""
        assert text is not None and len(codes) == self.codebooks and bool(((codes >= 0) & (codes < self.size)).all())
        stop = torch.full((1, self.codebooks), -1)
        stop[0, 0] = self.stops[-1]
        rows = torch.cat([codes.long().cpu().T, stop])
        return SpeechTokens(text[torch.arange(len(rows)).clamp(max=len(text) - 1)], rows, self.mask(rows))

    def frames(self, rows: Tensor) -> Tensor:
        return rows[(rows[:, 0] >= 0) & (rows[:, 0] < self.size)].T

    def codec_of(self, codec: AudioTokenizer, prompt_ids: Tensor) -> AudioTokenizer:
        of_voice: Callable[[Tensor], AudioTokenizer] | None = getattr(codec, "of_voice", None)
        return codec if of_voice is None else of_voice(prompt_ids)

    def closes(self, codes: Sequence[int]) -> bool:
        return codes[0] in self.stops

    def speeches(self, codes: Tensor) -> list[Tensor]:
        return [self.frames(codes)]


def by_codebook(values: float | Sequence[float], codebooks: int) -> list[float]:
    """Return a value for each codebook: one for all, or of each, the last for those after it."""
    given = [float(values)] if isinstance(values, (int, float)) else list(map(float, values))
    return (given + given[-1:] * codebooks)[:codebooks]


def pad_codes(codes: Sequence[Tensor | None], lengths: Sequence[int], left: bool = False) -> Tensor | None:
    """Pad codes [L, Q] of prompts of `lengths` to [B, longest, Q], -1 where there is no frame; None without any."""
    width = next((c.shape[1] for c in codes if c is not None), None)
    if width is None:
        return None
    padded = torch.full((len(codes), max(lengths), width), -1)
    for out, c, length in zip(padded, codes, lengths, strict=True):
        if c is not None:
            out[len(out) - length if left else 0 :][:length] = c
    return padded


# -- DualFFN -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Routing:
    """Which positions of a batch are text and which are frames: a permutation that puts the text in front.

    Each branch then works on a slice; a batch of one kind goes straight through its branch. `frame` [T] bool. `order`
    [T] lists the text positions, then the frames; `place` [T] is its inverse. All three are None where all positions
    are of one kind.
    """

    texts: int
    frames: int
    frame: Tensor | None = None
    order: Tensor | None = None
    place: Tensor | None = None

    TEXT: ClassVar[Routing]
    FRAMES: ClassVar[Routing]

    @staticmethod
    def from_mask(frame: Tensor, device: torch.device) -> Routing:
        """Make it from a mask of any shape, on the CPU: a GPU is not waited for."""
        flat = frame.reshape(-1)
        frames = int(flat.sum())
        if not frames:
            return Routing.TEXT
        if frames == len(flat):
            return Routing.FRAMES
        order = torch.argsort(flat.int(), stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Routing(
            len(flat) - frames,
            frames,
            flat.to(device, non_blocking=True),
            order.to(device, non_blocking=True),
            place.to(device, non_blocking=True),
        )


Routing.TEXT = Routing(1, 0)
Routing.FRAMES = Routing(0, 1)


class DualLayer(GradientCheckpointingLayer):
    """A decoder layer with a second branch for frames (DualFFN of Higgs Audio V2); attention is shared.

    Its parts have the names of Higgs checkpoints. Without `routing` all positions are text.
    """

    def __init__(self, layer: Any, input_layernorm: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module):
        """`layer` gives attention and the text branch, the others are the branch for frames."""
        super().__init__()
        self.self_attn = layer.self_attn
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.audio_input_layernorm = input_layernorm
        self.audio_post_attention_layernorm = post_attention_layernorm
        self.audio_mlp = mlp

    def forward(self, hidden_states: Tensor, routing: Routing | None = None, **kwargs: Any) -> Tensor:
        """[B, L, H] -> [B, L, H]. The further arguments of transformers' model are for the attention."""
        if routing is None and "audio_token_mask" in kwargs:
            raise ValueError("this Higgs model is routed: call it through its policy, which says what is a frame")
        kwargs.pop("audio_token_mask", None)  # made by comparing embeddings, which cannot tell
        if routing is None or not routing.frames:
            norm, between, block = self.input_layernorm, self.post_attention_layernorm, self.mlp
        elif not routing.texts:
            norm, between = self.audio_input_layernorm, self.audio_post_attention_layernorm
            block = self.audio_mlp
        else:
            return self._mixed(hidden_states, routing, kwargs)
        attended, _ = self.self_attn(hidden_states=norm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + block(between(hidden_states))

    def _mixed(self, hidden: Tensor, routing: Routing, kwargs: dict[str, Any]) -> Tensor:
        assert routing.frame is not None and routing.order is not None and routing.place is not None
        frame = routing.frame.view(*hidden.shape[:-1], 1)
        # Root mean square norm (arXiv 1910.07467), the weight chosen by what a position is.
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.input_layernorm.variance_epsilon)
        norms: tuple[Any, Any] = (self.audio_input_layernorm, self.input_layernorm)
        weight = torch.where(frame, norms[0].weight, norms[1].weight)
        attended, _ = self.self_attn(hidden_states=weight * exact.to(hidden.dtype), **kwargs)
        hidden = hidden + attended
        in_order = _Permute.apply(hidden.reshape(-1, hidden.shape[-1]), routing.order, routing.place)
        text, frames = in_order.split([routing.texts, routing.frames])
        text = self.mlp(self.post_attention_layernorm(text))
        frames = self.audio_mlp(self.audio_post_attention_layernorm(frames))
        out = _Permute.apply(torch.cat([text, frames]), routing.place, routing.order)
        return hidden + out.view_as(hidden)


class _Permute(torch.autograd.Function):
    """x[order]; the gradient goes back through the inverse, `place`, where indexing would scatter and add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class CodeEmbedding(nn.Module):
    """Codes [..., Q] -> [..., H], summed over codebooks. Named as in Higgs: one table, a codebook after the other."""

    def __init__(self, codebooks: int, size: int, width: int):
        super().__init__()
        self.embed_audio_tokens = nn.Embedding(codebooks * size, width)
        self.size = size

    def forward(self, codes: Tensor) -> Tensor:
        offsets = torch.arange(codes.shape[-1], device=codes.device) * self.size
        summed: Tensor = self.embed_audio_tokens(codes + offsets).sum(-2)
        return summed


def add_branch(model: Any, decoder: Any, layout: FrameLayout) -> None:
    """Put dual layers, code embeddings and a code head into `model`. Raises ValueError where it cannot."""
    kind = decoder.config.model_type
    if kind not in DUALIZABLE:
        raise ValueError(f"a decoder of type {kind!r} cannot be dualized; those of {', '.join(DUALIZABLE)} can")
    for i, layer in enumerate(decoder.layers):
        parts = (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp)
        decoder.layers[i] = DualLayer(layer, *(copy.deepcopy(part) for part in parts))
    weight = decoder.get_input_embeddings().weight
    with torch.random.fork_rng(devices=[]), torch.device(weight.device):
        decoder.embed_audio_tokens = CodeEmbedding(layout.codebooks, layout.size, weight.shape[1]).to(weight.dtype)
        model.audio_lm_head = nn.Linear(weight.shape[1], layout.codebooks * layout.size, bias=False).to(weight.dtype)
    setattr(model.config, LAYOUT_KEY, dataclasses.asdict(layout))


def branch_builder(backbone: Backbone, layout: FrameLayout | None) -> Callable[[Any], None] | None:
    """Return the `build` of `load_model` for a model that speaks as `layout` says."""
    if layout is None:
        return None
    return lambda model: add_branch(model, backbone.decoder(model), layout)


@torch.no_grad()
def init_branch(model: Any, decoder: Any, seed: int) -> None:
    """Give code embeddings and code head random weights that are fixed by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = decoder.get_input_embeddings().weight
    codes, head = decoder.embed_audio_tokens.embed_audio_tokens.weight, model.audio_lm_head.weight
    # A frame is a sum over codebooks: on average as long as the embedding of a token.
    scale = float(tokens.float().pow(2).mean().sqrt()) / (head.shape[0] / decoder.embed_audio_tokens.size) ** 0.5
    for weight, std in ((codes, scale), (head, float(decoder.config.initializer_range))):
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def add_speech_tokens(model: Any, backbone: Backbone, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that open speech, stand for a frame and close it: reserved tokens, or new ones."""
    numbered = {t: re.fullmatch(r"<\|reserved_special_token_(\d+)\|>", t) for t in tokenizer.get_added_vocab()}
    reserved = sorted((int(match[1]), t) for t, match in numbered.items() if match)
    if len(reserved) >= len(_TOKENS):
        return tuple(int(tokenizer.convert_tokens_to_ids(t)) for _, t in reserved[-len(_TOKENS) :])
    tokenizer.add_tokens(list(_TOKENS), special_tokens=True)
    ids = tuple(int(tokenizer.convert_tokens_to_ids(t)) for t in _TOKENS)
    decoder = backbone.decoder(model)
    known = decoder.get_input_embeddings().weight.shape[0]
    if max(ids) >= known:  # large models have embeddings to spare
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
        for weight in (decoder.get_input_embeddings().weight, backbone.head(model).weight):
            weight[known:] = weight[:known].mean(0)
    return ids
