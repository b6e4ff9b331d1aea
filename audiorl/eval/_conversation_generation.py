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
from audiorl.eval._common import Row
from audiorl.eval._speech import generate_speech
from audiorl.eval.metrics.prosody import level_steps, pitch_steps
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


def generate_conversations(
    engine: StreamingEngine,
    conversations: Sequence[Conversation],
    folder: Path,
    settings: Mapping[str, Any],
    config: PieceConfig,
    *,
    batch_size: int,
    seed: int,
) -> Row:
    """Say every conversation into FOLDER/ID.wav, its pieces into FOLDER/ID/TURN-PART.wav; print counts and times.

    FOLDER/conversations.jsonl has the turns with their places in these recordings. Conversations are generated side by
    side, each piece after the ones before it. Returns median differences of level_step (dB) and pitch_step (semitones)
    from one side of a joint within a turn to the other, as far as there are any; usual_level_step and usual_pitch_step
    are those in the middle of pieces. Raises ValueError for a voice that cannot be read or is too short.
    """
    for conversation in conversations:
        check_voices(conversation)
    settings = {**settings, "pieces": asdict(config)}
    pieces = {c.id: pieces_of(c, config.characters) for c in conversations}

    def timing(rollout: Rollout) -> dict[str, float]:
        speech = engine.speech(rollout)
        return {"first_audio": speech.ready[0], "compute_seconds": speech.seconds}

    def prompt(conversation: Conversation, number: int) -> Sample:
        wanted = pieces[conversation.id][number]
        earlier = [p for p in pieces[conversation.id][:number] if not config.own_voice or p.speaker == wanted.speaker]
        spoken = [(piece, AudioClip(path=str(folder / f"{piece.id}.wav"))) for piece in earlier]
        before = [(piece, clip) for piece, clip in spoken if Path(str(clip.path)).is_file()]
        return piece_sample(conversation, wanted, before[-config.context :] if config.context else [], config.own_voice)

    rows: dict[str, Row] = {}
    for number in range(max(map(len, pieces.values()))):
        samples = [prompt(c, number) for c in conversations if number < len(pieces[c.id])]
        said = generate_speech(
            engine, engine, samples, folder, settings, batch_size=batch_size, seed=seed, describe=timing
        )
        rows |= {row["id"]: row for row in said}
    steps: dict[str, list[float]] = defaultdict(list)
    joined = [_join(c, pieces[c.id], folder, config.pause, engine.sample_rate, steps) for c in conversations]
    write_json_lines(folder / SAID, joined)
    first = [row["first_audio"] for p in pieces.values() if "first_audio" in (row := rows[p[0].id])]
    factors = [row["compute_seconds"] / row["seconds"] for row in rows.values() if "first_audio" in row]
    print(
        f"{len(conversations)} conversations said in {folder}: {len(rows)} pieces, "
        f"{sum(row['seconds'] for row in rows.values()):.1f} s, "
        f"{sum(row['stop_reason'] == 'length' for row in rows.values())} cut off, "
        f"{sum(not row['seconds'] for row in rows.values())} silent; first audio after {_median(first):.2f} s, "
        f"real-time factor {_median(factors):.2f} (medians, {batch_size} together)"
    )
    names = ("level_step", "usual_level_step", "pitch_step", "usual_pitch_step")
    return {name: _median(steps[name]) for name in names if steps[name]}


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else float("nan")


def _join(
    conversation: Conversation,
    pieces: Sequence[TurnPiece],
    folder: Path,
    pause: float,
    rate: int,
    steps: dict[str, list[float]],
) -> Row:
    """Write FOLDER/ID.wav and return its row; add the differences within its turns to `steps`."""
    by_turn: dict[int, list[NDArray[np.float32]]] = defaultdict(list)
    for piece in pieces:
        path = folder / f"{piece.id}.wav"
        if path.is_file():
            wav = load_clip(AudioClip(path=str(path)), rate).copy()
            ramp = np.linspace(0, 1, min(round(FADE * rate), len(wav) // 2), dtype=np.float32)
            wav[: len(ramp)] *= ramp
            wav[len(wav) - len(ramp) :] *= ramp[::-1]
            by_turn[piece.turn].append(wav)
    waves: list[NDArray[np.float32]] = []
    turns: list[Row] = []
    silence = np.zeros(round(pause * rate), np.float32)
    for number, turn in enumerate(conversation.turns):
        row: Row = {"speaker": turn.speaker, "text": turn.text}
        if number not in by_turn:
            turns.append(row | {"audio": f"{conversation.id}/{number:03d} (nothing said)"})
            continue
        parts = by_turn[number]
        turns.append(row | {"start": sum(map(len, waves)) / rate, "duration": sum(map(len, parts)) / rate})
        waves += [*parts, silence]
        for name, measure in (("level_step", level_steps), ("pitch_step", pitch_steps)):
            for before, after in pairwise(parts):
                steps[name] += measure(before, after, rate)
            for part in parts:
                steps[f"usual_{name}"] += measure(part[: len(part) // 2], part[len(part) // 2 :], rate)
    name = f"{conversation.id}.wav"
    write_wav(folder / name, np.concatenate(waves) if waves else silence, rate)
    voices = {
        speaker: {"audio": str(Path(clip.path or "").resolve()), "text": text} | clip.part
        for speaker, (text, clip) in conversation.voices.items()
    }
    return {"id": conversation.id, "audio": name, "voices": voices, "turns": turns}
