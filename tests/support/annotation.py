"""Recordings with pauses made of the bundled speech, and a recogniser that counts its calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audiorl.data.corpus import Utterance
from audiorl.data.silence import trimmed

RATE = 16_000
PAUSE = 1.0
"""Seconds before, between and after the clips of a recording."""

JUDGE = '''"""A recogniser that writes how long a clip is in words, and a line for each call."""
from pathlib import Path

LOG = Path(__file__).with_suffix(".log")
WORDS = "one two three four five six seven eight nine ten eleven twelve".split()


class Counting:
    name = "counting"

    def transcribe(self, waveforms, sample_rate):
        with open(LOG, "a") as file:
            file.write(f"{len(waveforms)}\\n")
        return [" ".join(WORDS[: max(1, round(3 * len(wav) / sample_rate))]) for wav in waveforms]


def load(device):
    return Counting()
'''


def joined(utterances: list[Utterance]) -> np.ndarray:
    """Clips with PAUSE seconds of soft noise around each."""
    pause = np.zeros(round(PAUSE * RATE), np.float32)
    pieces = [pause]
    for utterance in utterances:
        pieces += [trimmed(utterance.clip.load(RATE)), pause]
    wav = np.concatenate(pieces)
    return wav + 1e-3 * np.random.default_rng(0).standard_normal(len(wav)).astype(np.float32)


def spans_of(utterances: list[Utterance]) -> list[tuple[float, float]]:
    """Start and end in seconds of the clips in `joined`, which begin and end with 50 ms of silence."""
    spans, position = [], PAUSE
    for utterance in utterances:
        length = len(trimmed(utterance.clip.load(RATE))) / RATE
        spans.append((position, position + length))
        position += length + PAUSE
    return spans


def calls(judge: Path) -> int:
    """Segments that it transcribed so far."""
    log = judge.with_suffix(".log")
    return sum(map(int, log.read_text().split())) if log.exists() else 0
