"""A multimodal diffusion transformer over packed sounds (MM-DiT, SD3, arXiv 2403.03206; for sound MMAudio, 2412.15322,
and ThinkSound, 2506.21448).

Words of the prompt and latent frames are two streams with weights of their own that attend to each other in the *joint*
blocks; *single* blocks follow, of the frames alone. Every block is modulated by the time t and the caption as a whole
(AdaLN). Frames know when they are by rotary embeddings; video features are gated into them, and audio that is there
already (context: of an edit, of a voice, or noisy speech) stands beside the noisy latents. What is said is spread
evenly over the frames, letter by letter (average upsampling, ZipVoice, arXiv 2506.13053). Each may be missing.

Shapes: B sounds laid end to end, F frames and W words of all of them, D latent channels, H width, V video features.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from audiorl.algos.varlen import Attention, SegmentAttention, Segments, choose_kernel, compute_dtype
from audiorl.config.flow import FlowModelConfig


@dataclass(frozen=True, eq=False)
class SoundPrompt:
    """The conditions of one sound of F frames; each but the frames may be missing."""

    frames: int
    caption: str = ""
    thought: str = ""
    context: Tensor | None = None
    """[F, D + 1]: latents of audio that is there already, 0 elsewhere, and 1 where it is, 0 elsewhere."""
    video: Tensor | None = None
    """[F, V] features at the time of each frame."""
    said: str = ""
    """What is said, from the first frame to the last."""
    voice: int = 0
    """Frames of the context at the beginning that show the voice, and are no part of the sound."""


@lru_cache(65_536)
def word_rows(word: str, rows: int) -> tuple[int, ...]:
    """Return the rows of a word and of its parts of 3 letters (fastText, arXiv 1607.04606), by a fixed hash.

    >>> len(word_rows("dogs", 1000))
    5
    """
    marked = f"<{word}>"
    parts = [word, *(marked[i : i + 3] for i in range(len(marked) - 2))]
    return tuple(zlib.crc32(part.encode()) % rows for part in parts)


def words_of(text: str) -> list[str]:
    """Return lower-case words, numbers and signs. Digits are words of their own, so that numbers are read by places.

    >>> words_of("A dog at 1.25 s")
    ['a', 'dog', 'at', '1', '.', '2', '5', 's']
    """
    return re.findall(r"\d|[^\W\d]+|[^\w\s]", text.lower())


def letters_of(said: str, frames: int) -> Tensor:
    """Return the UTF-8 byte + 1 of the text in small letters that each frame [F] says; 0 without text.

    >>> letters_of("Oh", 5).tolist()
    [112, 112, 112, 105, 105]
    """
    text = [byte + 1 for byte in said.lower().encode()] or [0]
    return torch.tensor(text)[torch.arange(frames) * len(text) // frames]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of numbers of x [rows, heads, width] by angles [rows, width / 2] (RoPE, arXiv 2104.09864)."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def angles_of(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return the angles [rows, width / 2] of rows that are numbered within each segment."""
    places = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0)
    speeds = 10_000 ** (-torch.arange(width // 2) / (width // 2))
    return (places[:, None].float() * speeds).to(device, non_blocking=True)


def repeated(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return values [B, …] for each of the rows [rows, …] of B segments."""
    counts = torch.tensor(lengths, device="cpu").to(values.device, non_blocking=True)
    return values.repeat_interleave(counts, 0, output_size=sum(lengths))


class FlowStream(nn.Module):
    """One stream's part of a block: norms, attention's maps, feed-forward, all modulated by c [B, H] if given.

    ends: the stream ends here. Its rows are attended to, and nothing else becomes of them.
    """

    def __init__(self, width: int, heads: int, modulated: bool = True, ends: bool = False):
        super().__init__()
        self.heads, self.ends = heads, ends
        self.qkv = nn.Linear(width, (2 if ends else 3) * width)
        self.key_scale = nn.Parameter(torch.ones(width // heads))
        if not ends:
            self.query_scale = nn.Parameter(torch.ones(width // heads))
            self.out = nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, (2 if ends else 6) * width) if modulated else None
        if self.modulation is not None:  # blocks begin as if they were not there (AdaLN-zero, DiT, arXiv 2212.09748)
            nn.init.zeros_(self.modulation.weight)
            nn.init.zeros_(self.modulation.bias)

    def modulate(self, c: Tensor | None, lengths: Sequence[int]) -> tuple[Tensor | float, ...]:
        """Return (shift, scale, gate) of attention and of the feed-forward, [rows, H] each; of a stream that ends the
        first two."""
        if self.modulation is None or c is None:
            return (0.0, 1.0, 1.0, 0.0, 1.0, 1.0)
        parts = self.modulation(silu(c)).chunk(2 if self.ends else 6, -1)
        return tuple(repeated(1 + part if i % 3 == 1 else part, lengths) for i, part in enumerate(parts))

    def project(self, x: Tensor, mod: tuple[Tensor | float, ...], angles: Tensor | None) -> list[Tensor]:
        """Return query, key and value, [rows, heads, H / heads] each; of a stream that ends key and value."""

        def turned(part: Tensor, scale: Tensor) -> Tensor:
            part = rms_norm(part, part.shape[-1:]) * scale
            return part if angles is None else rotate(part, angles)

        qkv = self.qkv(layer_norm(x, x.shape[-1:]) * mod[1] + mod[0])
        *query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(2 if self.ends else 3, -1))
        return [*(turned(part, self.query_scale) for part in query), turned(key, self.key_scale), value]

    def finish(self, x: Tensor, attended: Tensor, mod: tuple[Tensor | float, ...]) -> Tensor:
        """Return x after attention, [rows, heads, H / heads], and the feed-forward."""
        x = x + mod[2] * self.out(attended.flatten(-2))
        hidden = self.up(layer_norm(x, x.shape[-1:]) * mod[4] + mod[3])
        return x + mod[5] * self.down(nn.functional.gelu(hidden, approximate="tanh"))


@dataclass(frozen=True)
class Packing:
    """How a pack attends: words, frames, both of a sound side by side, and frames to both."""

    words: SegmentAttention
    frames: SegmentAttention
    both: SegmentAttention
    from_frames: SegmentAttention
    order: Tensor  # [W + F]: the rows of words and then frames, sound by sound
    inverse: Tensor
    word_angles: Tensor
    frame_angles: Tensor
    word_lengths: list[int]
    frame_lengths: list[int]

    @classmethod
    def of(cls, words: list[int], frames: list[int], like: Tensor, head: int, attention: Attention) -> Packing:
        device = like.device
        kernel = choose_kernel(attention, device, compute_dtype(like), head)

        def segments(queries: list[int], keys: list[int]) -> SegmentAttention:
            return SegmentAttention(kernel, Segments.of_lengths(queries, keys, False, device))

        both = [w + f for w, f in zip(words, frames, strict=True)]
        rows: list[Tensor] = []
        word, frame = 0, sum(words)
        for w, f in zip(words, frames, strict=True):
            rows += [torch.arange(word, word + w), torch.arange(frame, frame + f)]
            word, frame = word + w, frame + f
        order = torch.cat(rows)
        return cls(
            segments(words, words),
            segments(frames, frames),
            segments(both, both),
            segments(frames, both),
            order.to(device, non_blocking=True),
            order.argsort().to(device, non_blocking=True),
            angles_of(words, head, device),
            angles_of(frames, head, device),
            words,
            frames,
        )


def attend(attention: SegmentAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[rows, heads, width] each -> the same."""
    query, key, value = (x.to(value.dtype).transpose(0, 1)[None] for x in (query, key, value))
    return attention(query, key, value)[0]


class JointBlock(nn.Module):
    """Words and frames attend to each other, with weights of their own. No words come out of the last one."""

    def __init__(self, config: FlowModelConfig, last: bool):
        super().__init__()
        self.words = FlowStream(config.width, config.heads, ends=last)
        self.frames = FlowStream(config.width, config.heads)

    def forward(self, words: Tensor, frames: Tensor, c: Tensor, pack: Packing) -> tuple[Tensor, Tensor]:
        of_words = self.words.modulate(c, pack.word_lengths)
        of_frames = self.frames.modulate(c, pack.frame_lengths)
        # Words have no place in time: frames are found by what they turn to, at any distance.
        *word_query, word_key, word_value = self.words.project(words, of_words, None)
        query, key, value = self.frames.project(frames, of_frames, pack.frame_angles)

        def beside(words: Tensor, frames: Tensor) -> Tensor:
            return torch.cat([words.to(frames.dtype), frames]).index_select(0, pack.order)

        key, value = beside(word_key, key), beside(word_value, value)
        if self.words.ends:
            return words, self.frames.finish(frames, attend(pack.from_frames, query, key, value), of_frames)
        attended = attend(pack.both, beside(word_query[0], query), key, value).index_select(0, pack.inverse)
        before, after = attended.split([len(words), len(frames)])
        return self.words.finish(words, before, of_words), self.frames.finish(frames, after, of_frames)


class FlowNetwork(nn.Module):
    """The velocity of packed latents. Begins with velocity 0."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, config: FlowModelConfig, latent_channels: int):
        super().__init__()
        width, heads = config.width, config.heads
        self.config, self.latent_channels = config, latent_channels
        self.checkpointing = False
        self.attention: Attention = "auto"
        self.table = nn.EmbeddingBag(config.text_rows, width, mode="mean")
        self.begin = nn.Parameter(0.02 * torch.randn(2, width))  # of a caption, of a thought
        self.text = nn.ModuleList(FlowStream(width, heads, modulated=False) for _ in range(config.text_blocks))
        self.caption = nn.Linear(width, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.into = nn.Linear(2 * latent_channels + 1, width)
        self.video = nn.Linear(config.video, 2 * width) if config.video else None
        self.joint = nn.ModuleList(JointBlock(config, i == config.joint_blocks - 1) for i in range(config.joint_blocks))
        self.single = nn.ModuleList(FlowStream(width, heads) for _ in range(config.single_blocks))
        self.letters = nn.Parameter(torch.zeros(257, width))
        self.last_modulation = nn.Linear(width, 2 * width)
        self.last = nn.Linear(width, latent_channels)
        for zero in (self.last_modulation, self.last):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)
        # Of the latents of sounds, channel by channel: the flow sees mean 0 and deviation 1.
        self.register_buffer("mean", torch.zeros(latent_channels))
        self.register_buffer("deviation", torch.ones(latent_channels))

    def forward(self, x: Tensor, t: Tensor, prompts: Sequence[SoundPrompt]) -> Tensor:
        """Return v [F, D] float32 of x [F, D] at t [B]."""
        device, frames = x.device, [p.frames for p in prompts]
        texts, places, lengths, captions = self._texts(prompts)
        word_lengths = [lengths[place] for place in places]
        head = self.config.width // self.config.heads
        pack = Packing.of(word_lengths, frames, self.begin, head, self.attention)
        states = self._read(texts, lengths)
        pooled = torch.stack([part[:n].mean(0) for part, n in zip(states.split(lengths), captions, strict=True)])
        starts = torch.tensor([0, *lengths]).cumsum(0)
        rows = torch.cat([torch.arange(int(starts[i]), int(starts[i]) + lengths[i]) for i in places])
        words = states.index_select(0, rows.to(device, non_blocking=True))
        which = torch.tensor(places).to(device, non_blocking=True)
        c = self.time(waves(t, 256)) + self.caption(pooled).index_select(0, which)
        hidden = self.into(torch.cat([x, self._context(prompts, x)], -1))
        said = torch.cat([letters_of(p.said, p.frames) for p in prompts]).to(device, non_blocking=True)
        hidden = hidden + nn.functional.embedding(said, self.letters, padding_idx=0)
        if self.video is not None:
            hidden = self._with_video(hidden, prompts)
        again = self.checkpointing and torch.is_grad_enabled()
        for block in self.joint:
            args = (words, hidden, c, pack)
            words, hidden = checkpoint(block, *args, use_reentrant=False) if again else block(*args)
        for block in cast(Iterable[FlowStream], self.single):
            run = self._single
            hidden = (
                checkpoint(run, block, hidden, c, pack, use_reentrant=False) if again else run(block, hidden, c, pack)
            )
        shift, scale = (repeated(part, frames) for part in self.last_modulation(silu(c)).chunk(2, -1))
        return self.last(layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift).float()

    @staticmethod
    def _single(block: FlowStream, hidden: Tensor, c: Tensor, pack: Packing) -> Tensor:
        mod = block.modulate(c, pack.frame_lengths)
        return block.finish(hidden, attend(pack.frames, *block.project(hidden, mod, pack.frame_angles)), mod)

    def _texts(
        self, prompts: Sequence[SoundPrompt]
    ) -> tuple[list[tuple[list[str], list[str]]], list[int], list[int], list[int]]:
        """Return the different texts, (words of the caption, of the thought); which one each prompt has; how many
        words each has, and how many of them are the caption's, the marks at their begin counted."""
        different: dict[tuple[str, str], int] = {}
        places = [different.setdefault((p.caption, p.thought), len(different)) for p in prompts]
        texts = [(words_of(caption), words_of(thought)) for caption, thought in different]
        captions = [1 + len(caption) for caption, _ in texts]
        return texts, places, [n + 1 + len(thought) for n, (_, thought) in zip(captions, texts, strict=True)], captions

    def _read(self, texts: Sequence[tuple[list[str], list[str]]], lengths: list[int]) -> Tensor:
        """Return the states [W, H] of different texts: the mark of a caption, its words, the mark of a thought, …"""
        device = self.begin.device
        rows = [word_rows(word, self.config.text_rows) for both in texts for part in both for word in part]
        flat = torch.tensor([row for word in rows for row in word], dtype=torch.long).to(device, non_blocking=True)
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)[:-1].to(device, non_blocking=True)
        words = self.table(flat, offsets) if rows else self.begin[:0]
        pieces: list[Tensor] = []
        counts = [len(part) for both in texts for part in both]
        for number, part in enumerate(words.split(counts)):
            pieces += [self.begin[number % 2, None], part]
        x = torch.cat(pieces)
        pack = Packing.of(lengths, [0] * len(lengths), x, self.config.width // self.config.heads, self.attention)
        for block in cast(Iterable[FlowStream], self.text):
            mod = block.modulate(None, lengths)
            x = block.finish(x, attend(pack.words, *block.project(x, mod, pack.word_angles)), mod)
        return layer_norm(x, x.shape[-1:])

    def _context(self, prompts: Sequence[SoundPrompt], x: Tensor) -> Tensor:
        """Return [F, D + 1], 0 for sounds without context."""
        none = x.new_zeros(1, self.latent_channels + 1)
        parts = [none.expand(p.frames, -1) if p.context is None else p.context.to(x) for p in prompts]
        return torch.cat(parts)

    def _with_video(self, hidden: Tensor, prompts: Sequence[SoundPrompt]) -> Tensor:
        """Add video features to the frames of sounds that have some, by a gate that the features open."""
        assert self.video is not None
        none = hidden.new_zeros(1, self.config.video)
        features = torch.cat([none.expand(p.frames, -1) if p.video is None else p.video.to(hidden) for p in prompts])
        there = torch.tensor([float(p.video is not None) for p in prompts]).to(hidden, non_blocking=True)
        value, gate = self.video(features).chunk(2, -1)
        return hidden + repeated(there, [p.frames for p in prompts])[:, None] * gate.sigmoid() * value


def waves(t: Tensor, width: int) -> Tensor:
    """Return [B, width]: sines and cosines of times t [B] in [0, 1] at frequencies from 1 to 1/10,000 of 1,000·t."""
    speeds = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=t.device) / (width // 2))
    angles = 1000 * t.float()[:, None] * speeds
    return torch.cat([angles.cos(), angles.sin()], -1)
