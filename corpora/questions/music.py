"""Music of known instrument, key, mode, tempo, number of instruments and direction, rendered by fluidsynth.

A piece is a list of notes that a seed draws. `FluidSynth` renders many pieces in one call of the program, with the
General MIDI instruments of a sound font. No two questions share a piece.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile

from corpora.questions.choices import Draft
from corpora.sources.voices import RATE

LICENCE = "MIT"  # the sound font's; the pieces are drawn here
DRUMS = 9  # the MIDI channel of percussion
KICK, SNARE, HIHAT = 36, 38, 42
TICKS_PER_SECOND = 960  # 480 ticks a quarter note at 120 beats a minute

INSTRUMENTS: dict[str, tuple[int, int, int]] = {
    "piano": (0, 48, 84),
    "harpsichord": (6, 48, 80),
    "glockenspiel": (9, 72, 96),
    "marimba": (12, 48, 84),
    "church organ": (19, 48, 80),
    "accordion": (21, 55, 84),
    "acoustic guitar": (24, 45, 76),
    "distorted guitar": (30, 40, 72),
    "violin": (40, 57, 88),
    "cello": (42, 38, 64),
    "harp": (46, 48, 88),
    "trumpet": (56, 56, 80),
    "saxophone": (65, 52, 78),
    "clarinet": (71, 52, 82),
    "flute": (73, 62, 91),
    "bagpipe": (109, 55, 76),
    "banjo": (105, 50, 79),
    "steel drum": (114, 55, 84),
    "sitar": (104, 48, 76),
    "choir": (52, 50, 76),
}
"""General MIDI program, lowest and highest pitch (MIDI number) of each."""
TONICS = ("C", "C sharp", "D", "E flat", "E", "F", "F sharp", "G", "A flat", "A", "B flat", "B")
MAJOR, MINOR = (0, 2, 4, 5, 7, 9, 11), (0, 2, 3, 5, 7, 8, 11)  # harmonic minor, whose dominant is major
TEMPOS = {"slow": 55, "moderate": 85, "fast": 130, "very fast": 190}
"""Beats per minute; a piece differs by up to 5 %."""
COUNTS = ("one", "two", "three", "four")
DIRECTIONS = ("up", "down", "up, then back", "down, then back")
MODES = ("both major", "both minor", "major first", "minor first")


@dataclass(frozen=True)
class Note:
    """`start` and `duration` in seconds, `pitch` and `velocity` as MIDI numbers."""

    start: float
    duration: float
    pitch: int
    velocity: int = 96
    channel: int = 0


@dataclass(frozen=True)
class Piece:
    """Notes, and the General MIDI program of each channel."""

    notes: tuple[Note, ...]
    programs: tuple[tuple[int, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Until the last note ends, with time for it to fade."""
        return max(n.start + n.duration for n in self.notes) + 0.5


Render = Callable[[Sequence[Piece]], list[np.ndarray]]
"""Mono float32 [T] at 16 kHz for each piece."""


def music_drafts(split: str, count: int, seed: int, render: Render) -> list[Draft]:
    """About `count` questions, equally many of every kind; all pieces are rendered at once."""
    kinds: dict[str, tuple[Callable[[random.Random, str], Piece], Sequence[str], str, str]] = {
        "instrument": (instrument_piece, list(INSTRUMENTS), "Which instrument is playing?", "medium"),
        "key": (key_piece, [f"{t} {m}" for t in TONICS for m in ("major", "minor")], "In which key is it?", "hard"),
        "mode": (mode_piece, MODES, "Two phrases follow each other. Are they in major or in minor?", "hard"),
        "tempo": (tempo_piece, list(TEMPOS), "How fast is the music?", "easy"),
        "instruments": (ensemble_piece, COUNTS, "How many instruments play at the same time?", "hard"),
        "direction": (direction_piece, DIRECTIONS, "How does the melody move?", "easy"),
    }
    planned: list[tuple[str, str, Piece]] = []
    for kind, (make, answers, _, _) in kinds.items():
        rounds = max(round(count / len(kinds) / len(answers)), 1)
        for n, answer in enumerate(answers * rounds if isinstance(answers, list) else list(answers) * rounds):
            name = f"music-{kind}-{split}-{n:04d}"
            planned.append((name, answer, make(random.Random(f"{seed}/{name}"), answer)))
    waves = render([piece for _, _, piece in planned])
    drafts = []
    for (name, answer, _), wave in zip(planned, waves, strict=True):
        kind = name.split("-")[1]
        _, answers, question, difficulty = kinds[kind]
        fixed = tuple(answers) if len(answers) == 4 else ()
        drafts.append(
            Draft(name, "music", kind, question, answer, partial(_itself, wave), (name,), LICENCE, difficulty, fixed)
        )
    return drafts


def _itself(wave: np.ndarray) -> np.ndarray:
    return wave


def instrument_piece(rng: random.Random, name: str) -> Piece:
    """Return a melody in a drawn key, tempo and register."""
    program, low, high = INSTRUMENTS[name]
    return Piece(_melody(rng, low, high, rng.uniform(3.5, 5.0), 0), ((0, program),))


def key_piece(rng: random.Random, key: str) -> Piece:
    """Return a cadence in broken chords with a melody above it."""
    tonic, _, mode = key.rpartition(" ")
    program = INSTRUMENTS[rng.choice(["piano", "harpsichord", "acoustic guitar", "church organ", "accordion"])][0]
    notes = _cadence(rng, TONICS.index(tonic), mode, 0.0, bars=2)
    return Piece(tuple(notes), ((0, program),))


def mode_piece(rng: random.Random, modes: str) -> Piece:
    """Two cadences on drawn tonics."""
    first = {"both major": "major", "both minor": "minor", "major first": "major", "minor first": "minor"}[modes]
    second = first if modes.startswith("both") else {"major": "minor", "minor": "major"}[first]
    program = INSTRUMENTS[rng.choice(["piano", "harpsichord", "acoustic guitar", "church organ", "accordion"])][0]
    tonic = rng.randrange(12)
    notes = _cadence(rng, tonic, first, 0.0, bars=1)
    start = max(n.start + n.duration for n in notes) + 0.6
    notes += _cadence(rng, tonic, second, start, bars=1)
    return Piece(tuple(notes), ((0, program),))


def tempo_piece(rng: random.Random, tempo: str) -> Piece:
    """Drums in four beats with a bass note on each beat."""
    beat = 60 / (TEMPOS[tempo] * rng.uniform(0.95, 1.05))
    root = rng.randrange(33, 45)
    notes = []
    for n in range(round(5.0 / beat)):
        start = n * beat
        notes.append(Note(start, beat * 0.4, KICK if n % 2 == 0 else SNARE, 105, DRUMS))
        notes.append(Note(start, beat * 0.3, HIHAT, 70, DRUMS))
        notes.append(Note(start, beat * 0.8, root + rng.choice([0, 0, 7, 12]), 90, 0))
    return Piece(tuple(notes), ((0, rng.choice([32, 33, 35, 38])),))


def ensemble_piece(rng: random.Random, count: str) -> Piece:
    """One to four instruments, each with a melody of its own from the first to the last second."""
    names = rng.sample(sorted(set(INSTRUMENTS) - {"glockenspiel", "choir"}), COUNTS.index(count) + 1)
    notes: list[Note] = []
    programs = []
    tonic = rng.randrange(12)
    for channel, name in enumerate(names):
        program, low, high = INSTRUMENTS[name]
        notes += _melody(rng, low, high, 4.5, channel, tonic)
        programs.append((channel, program))
    return Piece(tuple(notes), tuple(programs))


def direction_piece(rng: random.Random, direction: str) -> Piece:
    """Return a scale in one direction, or there and back."""
    steps = rng.randint(5, 8)
    line = list(range(steps))
    if direction.endswith("back"):
        line += line[-2::-1]
    if direction.startswith("down"):
        line = [steps - 1 - n for n in line]
    program, low, high = INSTRUMENTS[rng.choice(["piano", "flute", "violin", "trumpet", "clarinet", "marimba"])]
    scale = _scale(rng.randrange(12), rng.choice([MAJOR, MINOR]), low, high)
    offset = rng.randrange(len(scale) - steps + 1)
    length = rng.uniform(0.22, 0.4)
    notes = [Note(n * length, length * 0.95, scale[offset + step]) for n, step in enumerate(line)]
    return Piece(tuple(notes), ((0, program),))


def _scale(tonic: int, mode: Sequence[int], low: int, high: int) -> list[int]:
    return [pitch for pitch in range(low, high + 1) if (pitch - tonic) % 12 in mode]


def _melody(
    rng: random.Random, low: int, high: int, seconds: float, channel: int, tonic: int | None = None
) -> tuple[Note, ...]:
    """Return a line that moves mostly by steps of a scale."""
    scale = _scale(rng.randrange(12) if tonic is None else tonic, rng.choice([MAJOR, MINOR]), low, high)
    beat = rng.uniform(0.28, 0.5)
    place, start = rng.randrange(len(scale)), 0.0
    notes = []
    while start < seconds:
        length = beat * rng.choice([0.5, 1, 1, 1, 2])
        notes.append(Note(start, length * 0.95, scale[place], rng.randint(82, 110), channel))
        start += length
        place = min(max(place + rng.choice([-2, -1, -1, 1, 1, 2]), 0), len(scale) - 1)
    return tuple(notes)


def _cadence(rng: random.Random, tonic: int, mode: str, start: float, bars: int) -> list[Note]:
    """I, IV, V, I in broken chords, `bars` times, from `start` seconds on."""
    scale = MAJOR if mode == "major" else MINOR
    beat = rng.uniform(0.16, 0.24)
    notes = []
    for degree in (0, 3, 4, 0) * bars:
        chord = [scale[(degree + third) % 7] for third in (0, 2, 4)]
        root = 48 + (tonic + chord[0]) % 12
        notes.append(Note(start, beat * 3.8, root - 12 if root > 52 else root, 84))
        pitches = [root + (step - chord[0]) % 12 for step in chord]
        for n in range(4):
            notes.append(Note(start + n * beat, beat, pitches[(0, 1, 2, rng.choice([0, 1]))[n]] + 12, 92))
        start += 4 * beat
    notes.append(Note(start, 0.8, 48 + tonic, 92))
    return notes


def require_fluidsynth() -> None:
    """Raises ValueError where the program is missing."""
    if shutil.which("fluidsynth") is None:
        raise ValueError("fluidsynth: not installed; get it with `apt-get install fluidsynth`")


@dataclass(frozen=True)
class FluidSynth:
    """Renders pieces with the program fluidsynth and a sound font. Raises ValueError where the program is missing."""

    sound_font: Path
    batch: int = 60
    """Pieces in one call of the program: it reads the whole sound font every time."""

    def __call__(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        require_fluidsynth()
        waves: list[np.ndarray] = []
        for start in range(0, len(pieces), self.batch):
            waves += self._render(pieces[start : start + self.batch])
        return waves

    def _render(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        starts = [0.0]
        for piece in pieces:
            starts.append(starts[-1] + piece.seconds + 1.5)  # the reverberation ends before the next begins
        with tempfile.TemporaryDirectory(prefix="audiorl-") as folder:
            score, sound = Path(folder, "pieces.mid"), Path(folder, "pieces.wav")
            score.write_bytes(midi_file(pieces, starts))
            command = ["fluidsynth", "-ni", "-q", "-g", "0.6", "-r", str(RATE), "-O", "s16", "-T", "wav"]
            done = subprocess.run(
                [*command, "-F", str(sound), str(self.sound_font), str(score)], capture_output=True, text=True
            )
            if done.returncode != 0 or not sound.exists():
                raise ValueError(f"fluidsynth failed on {self.sound_font}: {' '.join(done.stderr.split())}")
            wave = soundfile.read(sound, dtype="float32", always_2d=True)[0].mean(axis=1)
        clips = [wave[round(at * RATE) : round((at + p.seconds) * RATE)] for at, p in zip(starts, pieces, strict=False)]
        for clip, piece in zip(clips, pieces, strict=True):
            if len(clip) < 0.9 * piece.seconds * RATE or np.abs(clip).max() < 1e-3:
                raise ValueError(f"{self.sound_font}: a piece is silent or cut short; is this a General MIDI font?")
        return [clip * (0.7 / np.abs(clip).max()) for clip in clips]


def midi_file(pieces: Sequence[Piece], starts: Sequence[float]) -> bytes:
    """Return a standard MIDI file of format 0 in which each piece begins at its start, in seconds."""
    events: list[tuple[int, int, bytes]] = []  # (tick, order within the tick, message)
    for piece, at in zip(pieces, starts, strict=False):
        first = round(at * TICKS_PER_SECOND)
        events += [(first, 0, bytes([0xB0 | channel, 123, 0])) for channel in range(16)]
        events += [(first, 1, bytes([0xC0 | channel, program])) for channel, program in piece.programs]
        for n in piece.notes:
            begin, end = (first + round(t * TICKS_PER_SECOND) for t in (n.start, n.start + n.duration))
            events.append((begin, 3, bytes([0x90 | n.channel, n.pitch, n.velocity])))
            events.append((end, 2, bytes([0x80 | n.channel, n.pitch, 0])))
    end = round(starts[len(pieces)] * TICKS_PER_SECOND)
    track = b"\x00\xff\x51\x03" + (500_000).to_bytes(3, "big")
    now = 0
    for tick, _, message in [*sorted(events), (end, 0, b"\xff\x2f\x00")]:
        track += _variable_length(tick - now) + message
        now = tick
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, 480) + b"MTrk" + struct.pack(">I", len(track)) + track


def _variable_length(value: int) -> bytes:
    """Return a number as MIDI writes it: seven bits a byte, the highest bit set on all but the last."""
    parts = [value & 0x7F]
    while value := value >> 7:
        parts.append(value & 0x7F | 0x80)
    return bytes(reversed(parts))
