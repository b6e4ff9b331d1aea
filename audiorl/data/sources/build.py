"""Build a corpus: recordings of the sources, checked, as 16 kHz Opus with one manifest.

    OUT/manifest.jsonl       one row a clip: id, key, language, text, translation (English), audio (relative path),
                             duration (s), speaker, licence
    OUT/VOICE/NAME.opus      mono Opus made from 16 kHz audio
    OUT/ATTRIBUTION.md       who recorded what, under which licence, and what was changed
    OUT/LICENSE-*.txt        the licence texts
    OUT/voices/VOICE.json    what was built of a voice, so that an interrupted build goes on after the last voice

The same key is the same prompt, so two languages are parallel speech and parallel text. Left out, and counted: sound
effects and silences; recordings without a clear transcript; clips that are too long, silent, clipped, or implausibly
short or long for their text. `audiorl.data.corpus.corpus(OUT)` reads the folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from audiorl.data.sources import asterisk
from audiorl.data.sources.packages import package_files
from audiorl.data.sources.voice import RATE, Recording, Voice

SOURCES = {asterisk.SOURCE: asterisk.INTRODUCTION}
"""The introduction of each source in ATTRIBUTION.md."""
VOICES: tuple[Voice, ...] = asterisk.VOICES
LICENCE_NAMES = {
    "CC-BY-SA-3.0": ("Creative Commons Attribution-ShareAlike 3.0", "https://creativecommons.org/licenses/by-sa/3.0/"),
    "CC-BY-3.0": ("Creative Commons Attribution 3.0", "https://creativecommons.org/licenses/by/3.0/"),
}


@dataclass(frozen=True)
class Encoding:
    """How clips are written and which are left out."""

    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""
    max_seconds: float = 30.0
    """Clips that last longer, in seconds, are left out."""


@dataclass(frozen=True)
class BuiltVoice:
    """The rows of one voice in the manifest, and how many recordings were left out for which reason."""

    encoding: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def minutes(self) -> float:
        return sum(row["duration"] for row in self.rows) / 60


def select_voices(sources: Sequence[str], languages: Sequence[str] | None = None) -> list[Voice]:
    """The voices of these sources in these languages, all languages by default. Raises ValueError for other names."""
    for source in sources:
        if source not in SOURCES:
            raise ValueError(f"no source is called {source!r}; choose from {', '.join(SOURCES)}")
    voices = [v for v in VOICES if v.source in sources]
    for language in languages or ():
        if all(v.language != language for v in voices):
            present = ", ".join(sorted({v.language for v in voices}))
            raise ValueError(f"{', '.join(sources)}: no recordings in {language!r}, only in {present}")
    return [v for v in voices if languages is None or v.language in languages]


def build(
    out: Path,
    voices: Sequence[Voice],
    packages: Path | None = None,
    tree: Path | None = None,
    encoding: Encoding = Encoding(),
) -> None:
    """Write the corpus of these voices to the folder `out` and print what it holds.

    Run it again after an interruption, or with more voices: those that are complete are not built again. `packages`
    and `tree` as for `package_files`. Raises ValueError for packages that are not there, for a folder that holds
    other things and for one that was built with another encoding.
    """
    if not 6_000 <= encoding.bitrate <= 256_000:
        raise ValueError(f"bitrate must be in 6000..256000 bits per second, got {encoding.bitrate}")
    if out.exists() and any(out.iterdir()) and not (out / "voices").is_dir():
        raise ValueError(f"{out}: not empty; name a new folder or empty this one first")
    (out / "voices").mkdir(parents=True, exist_ok=True)
    missing = [voice for voice in voices if _read_built(out, voice, encoding) is None]
    names = list(dict.fromkeys(name for voice in missing for name in voice.packages))
    if missing:
        with package_files(names, packages, tree) as root, Progress() as progress:
            for voice in missing:
                build_voice(voice, root, out, encoding, progress)
    write_corpus(out, _all_voices(out))


def build_voice(voice: Voice, root: Path, out: Path, encoding: Encoding, progress: Progress) -> BuiltVoice:
    """Write the clips of one voice and OUT/voices/VOICE.json."""
    recordings = list(voice.recordings(root))
    left_out: Counter[str] = Counter()
    rows = []
    for recording in progress.track(recordings, description=voice.folder):
        reason = recording.left_out
        wav = np.zeros(0, np.float32) if reason else recording.read()
        reason = reason or complaint(wav, recording.text, encoding.max_seconds)
        if reason:
            left_out[reason] += 1
            continue
        audio = f"{voice.folder}/{recording.name}.opus"
        encode_opus(wav, out / audio, encoding.bitrate)
        rows.append(_row(voice, recording, audio, soundfile.info(out / audio).duration))
    (out / f"LICENSE-{voice.licence}.txt").write_text(voice.licence_text(root), encoding="utf-8")
    built = BuiltVoice(asdict(encoding), rows, dict(left_out.most_common()))
    file = _built_file(out, voice)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(built), ensure_ascii=False, indent=0), encoding="utf-8")
    partial.rename(file)
    return built


def write_corpus(out: Path, built: dict[Voice, BuiltVoice]) -> None:
    """The manifest and the attribution of all voices that OUT holds; prints a table of them."""
    with open(out / "manifest.jsonl", "w", encoding="utf-8") as file:
        for content in built.values():
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in content.rows)
    (out / "ATTRIBUTION.md").write_text(attribution(list(built)), encoding="utf-8")
    table = Table("source", "language", "speaker", "clips", "minutes", "left out")
    for voice, content in built.items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in content.left_out.items())
        clips = str(len(content.rows))
        table.add_row(voice.source, voice.language, voice.speaker, clips, f"{content.minutes:.1f}", reasons)
    Console().print(table)
    rows = sum(len(content.rows) for content in built.values())
    minutes = sum(content.minutes for content in built.values())
    print(f"{out}: {rows} clips, {minutes:.1f} minutes, {len({v.speaker for v in built})} speakers")


def complaint(wav: np.ndarray, text: str, max_seconds: float) -> str:
    """Why a clip [T] is left out, or "".

    Levels are in dB relative to full scale; speech runs at 5 to 25 letters a second.
    """
    seconds = len(wav) / RATE
    if seconds > max_seconds:
        return f"longer than {max_seconds:g} s"
    if seconds < 0.2:
        return "shorter than 0.2 s"
    level = 20 * np.log10(np.sqrt(np.mean(wav**2)) + 1e-9)
    if level < -45:
        return "silent"
    if np.mean(np.abs(wav) > 0.999) > 0.001:
        return "clipped"
    letters = sum(c.isalnum() for c in text)
    if letters > 30 * seconds or (seconds > 3 and letters < 2 * seconds):
        return "text does not fit the duration"
    return ""


def encode_opus(wav: np.ndarray, path: Path, bitrate: int) -> None:
    """Write float32 [T] at RATE Hz. Raises ValueError where the file does not last as long as the waveform."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # libsndfile maps a compression level of 0..1 to 256..6 kbit/s. Its own files read back exactly; the ogg files
    # that FFmpeg writes for some clips under a second do not open in libsndfile.
    level = 1 - (bitrate - 6_000) / 250_000
    soundfile.write(path, np.clip(wav, -1, 1), RATE, format="OGG", subtype="OPUS", compression_level=level)
    duration = soundfile.info(path).duration
    if abs(duration - len(wav) / RATE) > 0.05:
        raise ValueError(f"{path}: {duration:.2f} s after encoding, {len(wav) / RATE:.2f} s before")


def attribution(voices: Sequence[Voice]) -> str:
    """The text of ATTRIBUTION.md."""
    lines = ["# Attribution", ""]
    for source in dict.fromkeys(voice.source for voice in voices):
        lines += [SOURCES[source], ""]
        for voice in voices:
            if voice.source == source:
                name, url = LICENCE_NAMES[voice.licence]
                lines.append(
                    f"- `{voice.folder}/`: {voice.credit} Licence: {name} ({url}), see LICENSE-{voice.licence}.txt."
                )
        lines.append("")
    lines += [
        "Changes: the recordings were converted to Opus at 16 kHz; sound effects, silences and some clips were left",
        "out. The audio itself was not cut or filtered. The converted recordings and the manifest are under the same",
        "licences as the recordings.",
        "",
    ]
    return "\n".join(lines)


def _row(voice: Voice, recording: Recording, audio: str, duration: float) -> dict[str, Any]:
    return {
        "id": f"{voice.folder}/{recording.name}",
        "key": recording.key,
        "language": voice.language,
        "text": recording.text,
        "translation": recording.translation,
        "audio": audio,
        "duration": round(duration, 3),
        "speaker": voice.speaker,
        "licence": voice.licence,
    }


def _built_file(out: Path, voice: Voice) -> Path:
    return out / "voices" / f"{voice.folder}.json"


def _all_voices(out: Path) -> dict[Voice, BuiltVoice]:
    """Every voice that `out` holds completely, in the order of VOICES."""
    built = {voice: _read_built(out, voice) for voice in VOICES}
    return {voice: content for voice, content in built.items() if content is not None}


def _read_built(out: Path, voice: Voice, encoding: Encoding | None = None) -> BuiltVoice | None:
    """None where the voice is not complete. Raises ValueError where it has another encoding."""
    file = _built_file(out, voice)
    if not file.exists():
        return None
    built = BuiltVoice(**json.loads(file.read_text(encoding="utf-8")))
    if encoding is not None and built.encoding != asdict(encoding):
        raise ValueError(f"{file}: built with {built.encoding}, not {asdict(encoding)}; name a new folder")
    return built
