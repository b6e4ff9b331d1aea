"""Interpret speech while it is being spoken.

interpreter = Interpreter(load_policy("runs/simul/checkpoints/stage2/step_000040"), "en", "es")
for samples in microphone:                        # float32 [T] at 16 kHz, any T
    print(interpreter.observe(samples), end="")
print(interpreter.finish())
"""

from __future__ import annotations

import numpy as np

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.rollout.streams import LiveStream
from audiorl.tasks.simul.streams import MIN_SECONDS, ChunkConfig, instruction_sample
from audiorl.types import Rollout, Segment, Turn

RATE = 16_000


class Interpreter:
    """Collects audio into chunks; after each the policy writes or stays silent. Greedy by default.

    rate: of the samples, in Hz. Each chunk is resampled together with its context, as that of a file is. history: the
    most seconds of the past that are carried (see `audiorl.rollout.streams`); None: the whole stream. Take no more than
    the length of the streams in training. Raises ValueError for a history of less than two chunks.
    """

    def __init__(
        self,
        policy: AudioPolicy,
        source_language: str,
        target_language: str,
        chunks: ChunkConfig | None = None,
        sampling: SamplingConfig | None = None,
        id: str = "live",
        rate: int = RATE,
        history: float | None = None,
    ):
        chunks = chunks or ChunkConfig()
        sampling = sampling or SamplingConfig(temperature=0.0, max_new_tokens=48)
        turns = None if history is None else int(history / chunks.seconds)
        if turns is not None and turns < 2:
            raise ValueError(
                f"a history of {history} s holds less than two chunks of {chunks.seconds} s; give at least "
                f"{2 * chunks.seconds:g}, or None"
            )
        sample = instruction_sample(id, source_language, target_language)
        self._live = LiveStream(policy, sampling, sample, history=turns)
        self._rate = rate
        self._chunk, self._context = round(chunks.seconds * rate), round(chunks.context * rate)
        self._context_samples = np.zeros(0, np.float32)
        self._pending = np.zeros(0, np.float32)
        self._samples = 0
        self._ended = False

    @property
    def rollout(self) -> Rollout:
        """The stream so far, as a rollout without references; with a `history` the part that is carried."""
        return self._live.rollout

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What was written after each chunk, from the beginning."""
        return self._live.segments

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(segment.text for segment in self.segments)

    def observe(self, samples: np.ndarray) -> str:
        """Take mono float samples [T] at `rate` Hz; returns what is written now, often nothing.

        Raises ValueError for samples of another shape or type, and after `finish`.
        """
        if self._ended:
            raise ValueError("this stream has ended; make an Interpreter for the next one")
        if samples.ndim != 1 or samples.dtype.kind != "f":
            wanted = f"give mono samples [T] of floats in [-1, 1] at {self._rate} Hz"
            raise ValueError(f"{wanted}, got {samples.dtype} {list(samples.shape)}")
        self._pending = np.concatenate([self._pending, samples.astype(np.float32)])
        text = ""
        while len(self._pending) >= self._chunk:
            text += self._interpret(self._chunk)
        return text

    def finish(self) -> str:
        """End the stream: return what is written after the rest of it."""
        self._ended = True
        return self._interpret(len(self._pending)) if len(self._pending) >= MIN_SECONDS * self._rate else ""

    def _interpret(self, count: int) -> str:
        chunk, self._pending = self._pending[:count], self._pending[count:]
        window = np.concatenate([self._context_samples, chunk])
        before = len(self._context_samples) / self._rate
        self._samples += count
        clip = AudioClip(
            array=window, sample_rate=self._rate, start=before, duration=count / self._rate, context=before
        )
        self._context_samples = window[len(window) - min(self._context, len(window)) :]
        return self._live.observe(Turn(clip, self._samples / self._rate)).text
