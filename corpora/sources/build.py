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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from audiorl.data.corpus import normalised
from audiorl.data.rows import write_json_lines
from audiorl.data.schema import check, parse_json
from audiorl.languages import language_code
from corpora.sources import asterisk, other_prompts, synthetic, tuxpaint
from corpora.sources.packages import package_files
from corpora.sources.voices import RATE, SourceRecording, Voice, confirmed

SOURCES = {
    asterisk.SOURCE: asterisk.INTRODUCTION,
    **other_prompts.INTRODUCTIONS,
    tuxpaint.SOURCE: tuxpaint.INTRODUCTION,
    synthetic.SOURCE: synthetic.INTRODUCTION,
}
"""The introduction of each source in ATTRIBUTION.md."""
VOICES: tuple[Voice, ...] = (*asterisk.VOICES, *other_prompts.VOICES, *tuxpaint.VOICES)
LICENCE_NAMES = {
    "CC-BY-SA-3.0": ("Creative Commons Attribution-ShareAlike 3.0", "https://creativecommons.org/licenses/by-sa/3.0/"),
    "CC-BY-3.0": ("Creative Commons Attribution 3.0", "https://creativecommons.org/licenses/by/3.0/"),
    "CC-BY-SA-3.0-IT": (
        "Creative Commons Attribuzione - Condividi allo stesso modo 3.0 Italia",
        "https://creativecommons.org/licenses/by-sa/3.0/it/",
    ),
    "GPL-2.0-only": ("GNU General Public License 2", "https://www.gnu.org/licenses/old-licenses/gpl-2.0.html"),
    "GPL-2.0-or-later": (
        "GNU General Public License 2 or later",
        "https://www.gnu.org/licenses/old-licenses/gpl-2.0.html",
    ),
    "LicenseRef-BSD-Armelle": ("BSD-style licence of Michel Gutierrez", ""),
}


UNSEEN = ("es-co", "fr-armelle", "tuxpaint-en", "tuxpaint-es", "tuxpaint-fr")
"""The voices of the test set of unseen speakers."""
UNSEEN_CLIPS = 80


@dataclass(frozen=True)
class Encoding:
    """How clips are written and which are left out."""

    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""
    max_seconds: float = 30.0
    """Clips that last longer, in seconds, are left out."""


@dataclass(frozen=True)
class BuiltVoice:
    """OUT/voices/VOICE.json: a voice, how it was built, its rows of the manifest, and how many recordings were left out
    for which reason. `build_voice` fills it in."""

    source: str
    folder: str
    language: str
    speaker: str
    licence: str
    credit: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    left_out: dict[str, int]

    @property
    def minutes(self) -> float:
        return sum(row["duration"] for row in self.rows) / 60


def select_voices(sources: Sequence[str], languages: Sequence[str] | None = None) -> list[Voice]:
    """Return the voices of these sources in these languages, all languages by default. Raises ValueError for other
    names."""
    for source in sources:
        if source not in SOURCES:
            raise ValueError(f"no source is called {source!r}; choose from {', '.join(SOURCES)}")
    voices = [v for v in VOICES if v.source in sources]
    languages = None if languages is None else [language_code(language) for language in languages]
    for language in languages or ():
        if all(v.language != language for v in voices):
            present = ", ".join(sorted({v.language for v in voices}))
            raise ValueError(f"{', '.join(sources)}: no recordings in {language!r}, only in {present}")
    return [v for v in voices if languages is None or v.language in languages]


def unseen_voices(clips: int = UNSEEN_CLIPS) -> list[Voice]:
    """Return the voices of the test set of unseen speakers, each with `clips` recordings of different, confirmed
    texts."""
    voices = {voice.folder: voice for voice in VOICES}
    return [
        replace(v, recordings=partial(_sample, v, clips), max_cer=None, settings={"clips": clips})
        for v in map(voices.__getitem__, UNSEEN)
    ]


def _sample(voice: Voice, clips: int, root: Path) -> Iterator[SourceRecording]:
    """`clips` usable recordings, in an order by hash that does not depend on which others there are; then by name."""
    usable = [r for r in confirmed(replace(voice, unchecked=False), root) if not r.left_out]
    usable.sort(key=lambda r: sha256(r.name.encode()).digest())
    different = {normalised(r.text): r for r in reversed(usable)}
    first = [r for r in usable if different[normalised(r.text)] is r][:clips]
    yield from sorted(first, key=lambda r: r.name)


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
    missing = [voice for voice in voices if not _is_built(out, voice, encoding)]
    names = list(dict.fromkeys(name for voice in missing for name in voice.packages))
    if missing:
        with package_files(names, packages, tree) as root, Progress() as progress:
            for voice in missing:
                build_voice(voice, root, out, encoding, progress)
    write_corpus(out)


def build_voice(voice: Voice, root: Path, out: Path, encoding: Encoding, progress: Progress) -> None:
    """Write the clips of one voice and OUT/voices/VOICE.json."""
    recordings = list(confirmed(voice, root))
    left_out: Counter[str] = Counter()
    rows = []
    for recording in progress.track(recordings, description=voice.folder):
        reason = recording.left_out
        wav = np.zeros(0, np.float32) if reason else within_full_scale(recording.read())
        reason = reason or complaint(wav, recording.text, encoding.max_seconds)
        if reason:
            left_out[reason] += 1
            continue
        audio = f"{voice.folder}/{recording.name}.opus"
        encode_opus(wav, out / audio, encoding.bitrate)
        rows.append(_row(voice, recording, audio, soundfile.info(out / audio).duration))
    if voice.licence_text:
        (out / f"LICENSE-{voice.licence}.txt").write_text(voice.licence_text(root), encoding="utf-8")
    built = BuiltVoice(
        source=voice.source,
        folder=voice.folder,
        language=voice.language,
        speaker=voice.speaker,
        licence=voice.licence,
        credit=voice.credit,
        settings=_settings(voice, encoding),
        rows=rows,
        left_out=dict(left_out.most_common()),
    )
    file = out / "voices" / f"{voice.folder}.json"
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(built), ensure_ascii=False, indent=0), encoding="utf-8")
    unfinished.rename(file)


def read_voices(out: Path) -> list[BuiltVoice]:
    """Return every voice that the folder holds completely, by the name of its folder."""
    files = sorted((out / "voices").glob("*.json"))
    return [_built(file) for file in files]


def _built(file: Path) -> BuiltVoice:
    try:
        return check(parse_json(file.read_bytes()), BuiltVoice)
    except ValueError as error:
        raise ValueError(f"{file}: damaged ({error}); delete this file to build the voice again") from error


def write_corpus(out: Path) -> None:
    """Write the manifest and the attribution of all voices that `out` holds; print a table of them."""
    voices = read_voices(out)
    rows = [row for voice in voices for row in voice.rows]
    write_json_lines(out / "manifest.jsonl", rows)
    (out / "ATTRIBUTION.md").write_text(attribution(voices), encoding="utf-8")
    table = Table("source", "language", "speaker", "clips", "minutes", "left out")
    for voice in voices:
        reasons = ", ".join(f"{count} {reason}" for reason, count in voice.left_out.items())
        minutes = f"{_minutes(voice.rows):.1f}"
        table.add_row(voice.source, voice.language, voice.speaker, str(len(voice.rows)), minutes, reasons)
    Console().print(table)
    speakers = len({row["speaker"] for row in rows})
    print(f"{out}: {len(rows)} clips, {_minutes(rows):.1f} minutes, {speakers} speakers")


def within_full_scale(wav: np.ndarray) -> np.ndarray:
    """Scaled down to a peak of 1 where it exceeds that: lossy formats decode loud recordings to larger samples."""
    peak = np.abs(wav).max(initial=0.0)
    return wav / peak if peak > 1 else wav


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
    soundfile.write(path, wav, RATE, format="OGG", subtype="OPUS", compression_level=level)
    duration = soundfile.info(path).duration
    if abs(duration - len(wav) / RATE) > 0.05:
        raise ValueError(f"{path}: {duration:.2f} s after encoding, {len(wav) / RATE:.2f} s before")


def attribution(voices: Sequence[BuiltVoice]) -> str:
    """Return the text of ATTRIBUTION.md."""
    lines = ["# Attribution", ""]
    for source in sorted({voice.source for voice in voices}):
        lines += [SOURCES[source], ""]
        for voice in voices:
            if voice.source == source:
                lines.append(f"- `{voice.folder}/`: {voice.credit} {_licence(voice.licence)}")
        lines.append("")
    lines += [
        "Changes: the recordings were converted to Opus at 16 kHz, those beyond full scale made softer; sound effects,",
        "silences and some clips were left out. The audio itself was not cut or filtered. The converted recordings and",
        "the manifest are under the same licences as the recordings.",
        "",
    ]
    return "\n".join(lines)


def _licence(licence: str) -> str:
    """Return the sentence about a licence in ATTRIBUTION.md."""
    if not licence:
        return "Licence: that of the text, see the manifest."
    name, url = LICENCE_NAMES[licence]
    return f"Licence: {name}{f' ({url})' if url else ''}, see LICENSE-{licence}.txt."


def _minutes(rows: Sequence[dict[str, Any]]) -> float:
    return sum(row["duration"] for row in rows) / 60


def _row(voice: Voice, recording: SourceRecording, audio: str, duration: float) -> dict[str, Any]:
    return {
        "id": f"{voice.folder}/{recording.name}",
        "key": recording.key,
        "language": voice.language,
        "text": recording.text,
        "translation": recording.translation,
        "audio": audio,
        "duration": round(duration, 3),
        "speaker": recording.speaker or voice.speaker,
        "licence": recording.licence or voice.licence,
    }


def _settings(voice: Voice, encoding: Encoding) -> dict[str, Any]:
    return {**asdict(encoding), **voice.settings}


def _is_built(out: Path, voice: Voice, encoding: Encoding) -> bool:
    """Return whether the folder holds the voice. Raises ValueError where it was built with other settings."""
    file = out / "voices" / f"{voice.folder}.json"
    if not file.exists():
        return False
    settings = _built(file).settings
    if settings != _settings(voice, encoding):
        raise ValueError(
            f"{file}: built with {settings}, now {_settings(voice, encoding)}; name a new folder, or delete this file "
            "to build the voice again"
        )
    return True
