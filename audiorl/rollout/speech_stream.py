"""Speech that is decoded while it is generated, so that it can be played after its first block.

    for block in speech_blocks(policy, speech_sample("id", "Good morning.")):
        player.write(block)  # float32 [T] at policy.codec.sample_rate Hz

Codebook k of a frame is sampled k rows late (`tokenizers_audio.delay`), so a frame is complete Q rows after it began.
Blocks of complete frames go through the codec's stream, whose output, end to end, is that of `CodecSpeechDecoder` up
to the rounding of float32. The first block is ready after Q + block_frames rows and the look-ahead of the codec's
decoder, however long the text is.

Shapes: T samples, Q codebooks, F frames.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from weakref import WeakKeyDictionary

import numpy as np
import torch

from audiorl.config import SamplingConfig
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import FrameLayout
from audiorl.protocols import Ended, Request, SpeechDecoder
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.rollout.speech_decoder import CodecSpeechDecoder, Wave
from audiorl.types import Rollout, Sample
from tokenizers_audio.delay import deinterleave
from tokenizers_audio.protocol import AudioTokenizer

BLOCK_FRAMES = 4
"""Frames of a block, by default. A block costs one call of the codec's decoder."""


class SpeechStream:
    """The speech of one rollout, decoded from its rows as they are sampled."""

    def __init__(self, codec: AudioTokenizer, layout: FrameLayout, block_frames: int = BLOCK_FRAMES):
        if block_frames < 1:
            raise ValueError(f"block_frames is {block_frames}; a block must have at least 1 frame")
        self._layout, self._block_frames = layout, block_frames
        self._codec = codec.streaming()
        self._rows: list[Sequence[int]] = []  # of the speech that is open
        self._decoded = 0  # frames of it that the codec has

    def push(self, codes: Sequence[int] | None) -> Wave:
        """The samples [T] that the next row makes final; T is 0 for most rows.

        codes: [Q] of a row of the delay pattern; None for a token, which ends a speech that is open.
        """
        if codes is not None:
            self._rows.append(codes)
            ready = len(self._rows) - self._layout.codebooks - self._decoded
            return self._decode() if ready >= self._block_frames else _nothing()
        if not self._rows:
            return _nothing()
        wave = np.concatenate([self._decode(), self._codec.flush().float().cpu().numpy()])
        self._rows, self._decoded = [], 0
        return wave

    def _decode(self) -> Wave:
        codes = deinterleave(torch.tensor(self._rows), self._layout.bos, self._layout.eos)[:, self._decoded :]
        self._decoded += codes.shape[1]
        return self._codec.decode(codes).float().cpu().numpy() if codes.shape[1] else _nothing()


def _nothing() -> Wave:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class StreamedSpeech:
    """What a rollout said, made by `StreamingEngine` and `speech_blocks`."""

    blocks: tuple[Wave, ...]
    """Each float32 [T]."""
    ready: tuple[float, ...]
    """When each block was decoded, seconds since generation began."""
    seconds: float
    """When its last row was sampled and decoded, in the same seconds."""

    @property
    def first_audio(self) -> float | None:
        """Seconds until the first block; None for a rollout that said nothing."""
        return self.ready[0] if self.ready else None


def speech_blocks(
    policy: AudioPolicy,
    sample: Sample,
    sampling: SamplingConfig | None = None,
    *,
    seed: int = 0,
    block_frames: int = BLOCK_FRAMES,
) -> Generator[Wave, None, tuple[Rollout, StreamedSpeech]]:
    """The speech of one rollout, block by block, each float32 [T] at the codec's rate, while the next is generated.

    The blocks, end to end, are `CodecSpeechDecoder.waveform` of the rollout that `HFEngine` gives for this seed. The
    generator's return value is that rollout, and its blocks with the times at which they were ready, whenever they were
    read. Generation runs in a thread of its own; leave the policy alone until the last block. To stop earlier,
    `close()` the generator. Raises ValueError for a policy without a codec.
    """
    decoder = CodecSpeechDecoder.of(policy)
    stream = SpeechStream(decoder.codec, decoder.layout, block_frames)
    queue: SimpleQueue[Wave | BaseException | tuple[Rollout, StreamedSpeech]] = SimpleQueue()
    stopped = threading.Event()
    blocks: list[Wave] = []
    ready: list[float] = []
    began = time.perf_counter()

    def on_step(buffers: Sequence[SegmentBuffer]) -> None:
        if stopped.is_set():
            raise _Stopped
        if len(wave := stream.push(buffers[0].codes[-1])):
            blocks.append(wave)
            ready.append(time.perf_counter() - began)
            queue.put(wave)

    def generate() -> None:
        try:
            (rollout,) = HFEngine(policy, sampling, on_step).generate([Request(sample, seed=seed)])
            seconds = time.perf_counter() - began
            queue.put((rollout, StreamedSpeech(tuple(blocks), tuple(ready), seconds)))
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


class _Stopped(Exception):
    """Nobody reads the blocks any more."""


@dataclass
class _Speaking:
    """A rollout in progress."""

    stream: SpeechStream
    rows: int = 0
    """Rows of its buffer that were read."""
    blocks: list[Wave] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    seconds: float = 0.0


class StreamingEngine(SpeechDecoder):
    """A `RolloutEngine` that decodes speech while it is generated, and the `SpeechDecoder` of its rollouts.

    It measures what somebody who listens waits for. A block costs one call of the codec for each rollout; where only
    the whole recording counts, `HFEngine` and `CodecSpeechDecoder` decode it in one call. Streams with turns raise
    ValueError.
    """

    def __init__(self, policy: AudioPolicy, sampling: SamplingConfig | None = None, block_frames: int = BLOCK_FRAMES):
        self._decoder = CodecSpeechDecoder.of(policy)
        self._policy, self._sampling, self._block_frames = policy, sampling, block_frames
        self._speech: WeakKeyDictionary[Rollout, StreamedSpeech] = WeakKeyDictionary()

    @property
    def sample_rate(self) -> int:
        return self._decoder.sample_rate

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """As `HFEngine.generate`."""
        streams = next((r.sample.id for r in requests if r.sample.turns), None)
        if streams is not None:
            raise ValueError(f"sample {streams!r} has turns; this engine speaks answers, HFEngine interprets streams")
        speaking: list[_Speaking] = []
        began = time.perf_counter()

        def on_step(buffers: Sequence[SegmentBuffer]) -> None:
            if not speaking:
                layout = self._decoder.layout
                speaking.extend(
                    _Speaking(SpeechStream(self._decoder.codec, layout, self._block_frames)) for _ in buffers
                )
            for one, buffer in zip(speaking, buffers, strict=True):
                if one.rows == len(buffer.ids):
                    continue  # not in the batch yet, or ended
                one.rows = len(buffer.ids)
                wave = one.stream.push(buffer.codes[-1])
                one.seconds = time.perf_counter() - began
                if len(wave):
                    one.blocks.append(wave)
                    one.ready.append(one.seconds)

        rollouts = HFEngine(self._policy, self._sampling, on_step).generate(requests, ended)
        for one, rollout in zip(speaking, rollouts, strict=True):
            self._speech[rollout] = StreamedSpeech(tuple(one.blocks), tuple(one.ready), one.seconds)
        return rollouts

    def speech(self, rollout: Rollout) -> StreamedSpeech:
        """What a rollout of this engine said, and when."""
        return self._speech[rollout]

    def waveform(self, rollout: Rollout) -> Wave | None:
        """All speech of a rollout of this engine, float32 [T]; None if it has none."""
        blocks = self._speech[rollout].blocks
        return np.concatenate(blocks) if blocks else None
