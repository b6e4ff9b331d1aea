"""Say scripts of conversations, and long texts, with a checkpoint: piece by piece, then joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip, load_clip, write_wav
from audiorl.data.rows import write_json_lines
from audiorl.data.seedtts import Conversation
from audiorl.eval._speech import generate_speech
from audiorl.eval.metrics.prosody import level_steps, pitch_steps
from audiorl.eval.metrics.speech import real_time_factor
from audiorl.rollout.speech import StreamingEngine
from audiorl.tasks.tts.prompts import TurnPiece, check_voices, piece_sample, pieces_of
from audiorl.types import Rollout, Sample

SAID = "conversations.jsonl"
"""The file of conversations that were said, as `audiorl.data.seedtts.read_conversations` reads it."""
FADE = 0.005
"""Seconds at both ends of a piece that are faded: nothing clicks where pieces meet."""


@dataclass(frozen=True)
class PieceConfig:
    """How conversations and long texts are divided and joined."""

    characters: int = 200
    """Most characters of a piece, which is generated as a whole."""
    context: int = 2
    """Pieces before it that are in its prompt with their speech, whoever says them; 0: only the voices."""
    pause: float = 0.3
    """Seconds of silence between turns."""
    own_voice: bool = False
    """Prompts have the voice of the piece's speaker, pieces of the same, and no tags: for models that were trained to
    continue one voice (`tts-sft --clone`), and cannot tell which of several is meant."""

    def __post_init__(self) -> None:
        for name, least in (("characters", 1), ("context", 0), ("pause", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"pieces.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Generated:
    """Counts and times of a call of `generate_conversations`."""

    pieces: int
    seconds: float
    """Seconds of speech, in all pieces."""
    cut: int
    """Pieces that reached the most frames."""
    silent: int
    """Pieces that said nothing."""
    first_audio: float
    """Median over conversations of the seconds until the first block of speech of the first piece; NaN without any."""
    real_time_factor: float
    """Median over pieces of the seconds of computing per second of speech, in a batch with others; NaN without any."""
    steps: dict[str, float]
    """Median differences of level_step (dB) and pitch_step (semitones of the median F0) from one side of a joint within
    a turn to the other; usual_level_step and usual_pitch_step are those in the middle of pieces, where nothing was
    joined. Those that nothing was measured of are left out."""


def generate_conversations(
    engine: StreamingEngine,
    conversations: Sequence[Conversation],
    folder: str | Path,
    settings: Mapping[str, Any],
    config: PieceConfig,
    *,
    batch_size: int = 8,
    seed: int = 0,
) -> Generated:
    """Say every conversation into FOLDER/ID.wav, its pieces into FOLDER/ID/TURN-PART.wav.

    FOLDER/conversations.jsonl has the turns with their places in these recordings. Conversations are generated side by
    side, each piece after the ones before it. A later call continues as that of `generate_speech` does. Raises
    ValueError for a voice that cannot be read or is too short, and as `generate_speech` does.
    """
    folder = Path(folder)
    for conversation in conversations:
        check_voices(conversation)
    settings = {**settings, "pieces": asdict(config)}

    def timing(rollout: Rollout) -> dict[str, float]:
        speech = engine.speech(rollout)
        return {"first_audio": speech.ready[0], "compute_seconds": speech.seconds}

    pieces = {c.id: pieces_of(c, config.characters) for c in conversations}
    rows: dict[str, dict[str, Any]] = {}
    for number in range(max(map(len, pieces.values()))):
        samples = [
            _next_sample(c, pieces[c.id], number, folder, config) for c in conversations if number < len(pieces[c.id])
        ]
        said = generate_speech(
            engine, engine, samples, folder, settings, batch_size=batch_size, seed=seed, describe=timing
        )
        rows |= {row["id"]: row for row in said}
    steps: dict[str, list[float]] = defaultdict(list)
    joined = [_join(c, pieces[c.id], folder, config.pause, engine.sample_rate, steps) for c in conversations]
    write_json_lines(folder / SAID, joined)
    names = ("level_step", "usual_level_step", "pitch_step", "usual_pitch_step")
    return Generated(
        len(rows),
        sum(row["seconds"] for row in rows.values()),
        sum(row["stop_reason"] == "length" for row in rows.values()),
        sum(not row["seconds"] for row in rows.values()),
        _median([row["first_audio"] for p in pieces.values() if "first_audio" in (row := rows[p[0].id])]),
        _median([real_time_factor(r["compute_seconds"], r["seconds"]) for r in rows.values() if "first_audio" in r]),
        {name: _median(steps[name]) for name in names if steps[name]},
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else float("nan")


def _next_sample(
    conversation: Conversation, pieces: Sequence[TurnPiece], number: int, folder: Path, config: PieceConfig
) -> Sample:
    next_piece = pieces[number]
    earlier = [piece for piece in pieces[:number] if not config.own_voice or piece.speaker == next_piece.speaker]
    spoken = [(piece, folder / f"{piece.id}.wav") for piece in earlier]
    before = [(piece, AudioClip(path=str(path))) for piece, path in spoken if path.is_file()]
    return piece_sample(conversation, next_piece, before[-config.context :] if config.context else [], config.own_voice)


def _join(
    conversation: Conversation,
    pieces: Sequence[TurnPiece],
    folder: Path,
    pause: float,
    rate: int,
    steps: dict[str, list[float]],
) -> dict[str, Any]:
    """Write FOLDER/ID.wav and return its row; add the differences within its turns to `steps`."""
    by_turn: dict[int, list[NDArray[np.float32]]] = defaultdict(list)
    for piece in pieces:
        path = folder / f"{piece.id}.wav"
        if path.is_file():
            by_turn[piece.turn].append(_faded(load_clip(AudioClip(path=str(path)), rate), rate))
    waves: list[NDArray[np.float32]] = []
    turns: list[dict[str, Any]] = []
    silence = np.zeros(round(pause * rate), np.float32)
    for number, turn in enumerate(conversation.turns):
        row: dict[str, Any] = {"speaker": turn.speaker, "text": turn.text}
        if number not in by_turn:
            turns.append(row | {"audio": f"{conversation.id}/{number:03d} (nothing said)"})
            continue
        start = sum(map(len, waves)) / rate
        parts = by_turn[number]
        waves += [*parts, silence]
        turns.append(row | {"start": start, "duration": sum(map(len, parts)) / rate})
        for name, measure in (("level_step", level_steps), ("pitch_step", pitch_steps)):
            for before, after in pairwise(parts):
                steps[name] += measure(before, after, rate)
            for part in parts:
                steps[f"usual_{name}"] += measure(part[: len(part) // 2], part[len(part) // 2 :], rate)
    name = f"{conversation.id}.wav"
    write_wav(folder / name, np.concatenate(waves) if waves else silence, rate)
    voices = {
        speaker: {"audio": str(Path(clip.path or "").resolve()), "text": text}
        | ({"start": clip.start, "duration": clip.duration} if clip.duration is not None else {})
        for speaker, (text, clip) in conversation.voices.items()
    }
    return {"id": conversation.id, "audio": name, "voices": voices, "turns": turns}


def _faded(wav: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    ramp = np.linspace(0, 1, min(round(FADE * rate), len(wav) // 2), dtype=np.float32)
    wav = wav.copy()
    if len(ramp):
        wav[: len(ramp)] *= ramp
        wav[-len(ramp) :] *= ramp[::-1]
    return wav
