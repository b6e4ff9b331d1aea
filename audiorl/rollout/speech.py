"""The speech of rollouts as waveforms: decoded afterwards, or while it is generated.

    for block in speech_blocks(policy, speech_sample("id", "Good morning.")):
        player.write(block)  # float32 [T] at policy.codec.sample_rate Hz

Codebook k of a frame is sampled k steps late (`tokenizers_audio.delay`), so a frame is complete Q steps after it began.
Blocks of complete frames go through the codec's stream, whose output, end to end, is that of `CodecSpeechDecoder` up
to the rounding of float32; Qwen3-Omni's decoder reads only 25 frames before a block (`TalkerDecoder`). The first block
is ready after Q + block_frames steps and the look-ahead of the codec's decoder, however long the text is.

Shapes: T samples, Q codebooks, F frames.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiorl.config import SamplingConfig
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import FrameLayout
from audiorl.protocols import Ended, Request, SpeechDecoder
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.types import Rollout, Sample, Segment
from tokenizers_audio.batches import decode_all
from tokenizers_audio.protocol import AudioTokenizer

Wave = NDArray[np.float32]
BLOCK_FRAMES = 4
"""Frames of a block, by default. A block costs one call of the codec's decoder."""
_SILENCE = np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class CodecSpeechDecoder(SpeechDecoder):
    """Decodes rollouts with a codec, each once; the waveforms are cached as long as the rollout exists.

    Speech that was cut off is decoded up to its last complete frame.
    """

    codec: AudioTokenizer
    layout: FrameLayout
    _cache: WeakKeyDictionary[Rollout, list[Wave]] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    @classmethod
    def of(cls, policy: AudioPolicy) -> CodecSpeechDecoder:
        """Return the decoder of a policy that speaks. Raises ValueError where it has no codec."""
        if policy.speech is None or policy.codec is None:
            raise ValueError(
                "the policy has no speech decoder: dualize it or take Higgs, and give it a codec (set_codec)"
            )
        return cls(policy.codec, policy.speech)

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    def waveform(self, rollout: Rollout) -> Wave | None:
        """Return all speech of the rollout, float32 [T]; None if it has none."""
        return self.waveforms([rollout])[0]

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[Wave | None]:
        """Return `waveform` of each. Speech of equally many frames goes through the codec together."""
        new = [r for r in dict.fromkeys(rollouts) if r not in self._cache]
        waves = iter(self._decoded([s for r in new for s in r.segments]))
        for rollout in new:
            self._cache[rollout] = [next(waves) for _ in rollout.segments]
        spoken = [[wav for wav in self._cache[r] if len(wav)] for r in rollouts]
        return [np.concatenate(parts) if parts else None for parts in spoken]

    def by_segment(self, rollout: Rollout) -> list[Wave]:
        """Return the speech of each segment, float32 [T]; T = 0 for none."""
        self.waveforms([rollout])
        return self._cache[rollout]

    def decode(self, segment: Segment) -> Wave:
        """Return the speech of one segment, float32 [T]; T = 0 for none."""
        return self._decoded([segment])[0]

    def _decoded(self, segments: Sequence[Segment]) -> list[Wave]:
        speeches: dict[AudioTokenizer, list[tuple[int, Tensor]]] = defaultdict(list)
        for place, segment in enumerate(segments):
            if segment.codes is not None:
                codec = self.layout.codec_of(self.codec, segment.prompt_ids)
                speeches[codec] += [(place, c) for c in self.layout.speeches(segment.codes) if c.shape[1]]
        parts: list[list[Wave]] = [[] for _ in segments]
        for codec, own in speeches.items():
            for (place, _), wav in zip(own, decode_all(codec, [codes for _, codes in own]), strict=True):
                parts[place].append(wav.numpy())
        return [np.concatenate(p) if p else _SILENCE for p in parts]


@dataclass(frozen=True, eq=False)
class StreamedSpeech:
    """The speech of a rollout, made by `StreamingEngine` and `speech_blocks`."""

    blocks: tuple[Wave, ...]
    """Each float32 [T]."""
    ready: tuple[float, ...]
    """When each block was decoded, seconds since generation began."""
    seconds: float
    """When its last step was sampled and decoded, in the same seconds."""

    @property
    def first_audio(self) -> float | None:
        """Seconds until the first block; None for a rollout without speech."""
        return self.ready[0] if self.ready else None


class SpeechStream:
    """The speech of one rollout, decoded from its frames as they are sampled; times are seconds since `began`."""

    def __init__(
        self, codec: AudioTokenizer, layout: FrameLayout, block_frames: int = BLOCK_FRAMES, began: float = 0.0
    ):
        self._layout, self._block_frames, self._began = layout, block_frames, began
        self._codec = codec.streaming()
        self._frames: list[Sequence[int]] = []  # of the speech that is open, by the delay pattern
        self._decoded = 0  # complete frames that the codec has
        self._steps, self._seconds = 0, 0.0  # of the buffer that was read
        self._blocks: list[Wave] = []
        self._ready: list[float] = []

    def push(self, codes: Sequence[int] | None) -> Wave:
        """Return the samples [T] that the next frame makes final; T is 0 for most frames.

        codes: [Q] of a frame of the delay pattern; None for a token, which ends a speech that is open.
        """
        if codes is not None and not self._layout.closes(codes):
            self._frames.append(codes)
            ready = len(self._frames) - self._layout.delay - self._decoded
            return self._decode() if ready >= self._block_frames else _SILENCE
        if not self._frames:
            return _SILENCE
        wave = np.concatenate([self._decode(), self._codec.flush().float().cpu().numpy()])
        self._frames, self._decoded = [], 0
        return wave

    def _decode(self) -> Wave:
        codes = self._layout.frames(torch.tensor(self._frames))[:, self._decoded :]
        self._decoded += codes.shape[1]
        return self._codec.decode(codes).float().cpu().numpy() if codes.shape[1] else _SILENCE

    def read(self, buffer: SegmentBuffer) -> Wave:
        """Return the samples [T] that the last step of `buffer` makes final."""
        if self._steps == len(buffer.ids):
            return _SILENCE  # not in the batch yet, or ended
        self._steps = len(buffer.ids)
        wave = self.push(buffer.codes[-1])
        self._seconds = time.perf_counter() - self._began
        if len(wave):
            self._blocks.append(wave)
            self._ready.append(self._seconds)
        return wave

    def speech(self) -> StreamedSpeech:
        """Return all that was read."""
        return StreamedSpeech(tuple(self._blocks), tuple(self._ready), self._seconds)


class StreamingEngine(SpeechDecoder):
    """A `RolloutEngine` that decodes speech while it is generated, and the `SpeechDecoder` of its rollouts.

    It measures how long a listener waits; otherwise `CodecSpeechDecoder` decodes whole recordings in one call.
    """

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig | None = None):
        self._decoder = CodecSpeechDecoder.of(policy)
        self._policy, self._sampling = policy, sampling
        self._speech: WeakKeyDictionary[Rollout, StreamedSpeech] = WeakKeyDictionary()

    @property
    def sample_rate(self) -> int:
        return self._decoder.sample_rate

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Generate as `HFEngine.generate` does."""
        for r in requests:
            if r.sample.turns:
                raise ValueError(f"sample {r.sample.id!r} has turns; this engine speaks answers, not streams")
        prompts = [self._policy.prompt(r.sample).ids for r in requests for _ in range(r.n)]
        layout = self._decoder.layout
        codecs = [layout.codec_of(self._decoder.codec, ids) for ids in prompts]
        speaking: list[SpeechStream] = []
        began = time.perf_counter()

        def on_step(buffers: Sequence[SegmentBuffer]) -> None:
            for k, buffer in enumerate(buffers):
                if k == len(speaking):
                    speaking.append(SpeechStream(codecs[k], layout, began=began))
                speaking[k].read(buffer)

        rollouts = HFEngine(self._policy, self._sampling, on_step).generate(requests, ended)
        for one, rollout in zip(speaking, rollouts, strict=True):
            self._speech[rollout] = one.speech()
        return rollouts

    def speech(self, rollout: Rollout) -> StreamedSpeech:
        """Return what a rollout of this engine said, and when."""
        return self._speech[rollout]

    def waveform(self, rollout: Rollout) -> Wave | None:
        """Return all speech of a rollout of this engine, float32 [T]; None if it has none."""
        blocks = self._speech[rollout].blocks
        return np.concatenate(blocks) if blocks else None


class _Stopped(Exception):
    """Nobody reads the blocks any more."""


def speech_blocks(
    policy: AudioPolicy,
    sample: Sample,
    sampling: SamplingConfig | None = None,
    *,
    seed: int = 0,
    block_frames: int = BLOCK_FRAMES,
) -> Generator[Wave, None, tuple[Rollout, StreamedSpeech]]:
    """Yield the speech of one rollout in blocks, each float32 [T] at the codec's rate, while the next is generated.

    End to end they are `CodecSpeechDecoder.waveform` of the rollout that `HFEngine` gives for this seed. The
    generator's return value is that rollout, and its blocks with the times at which they were ready. Generation runs in
    a thread of its own: leave the policy alone until the last block, or `close()` the generator. Raises ValueError for
    a policy without a codec.
    """
    decoder = CodecSpeechDecoder.of(policy)
    codec = decoder.layout.codec_of(decoder.codec, policy.prompt(sample).ids)
    speaking = SpeechStream(codec, decoder.layout, block_frames, time.perf_counter())
    queue: SimpleQueue[Wave | BaseException | tuple[Rollout, StreamedSpeech]] = SimpleQueue()
    stopped = threading.Event()

    def on_step(buffers: Sequence[SegmentBuffer]) -> None:
        if stopped.is_set():
            raise _Stopped
        if len(wave := speaking.read(buffers[0])):
            queue.put(wave)

    def generate() -> None:
        try:
            (rollout,) = HFEngine(policy, sampling, on_step).generate([Request(sample, seed=seed)])
            queue.put((rollout, speaking.speech()))
        except BaseException as error:
            queue.put(error)  # for the thread that reads the blocks

    thread = threading.Thread(target=generate, name="speech_blocks", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), tuple):
            if isinstance(item, BaseException):
                raise item
            yield item
        return item
    finally:
        stopped.set()
        thread.join()
