"""A corpus of the first words of tts-quickstart by two speakers."""

from __future__ import annotations

import json
from pathlib import Path

from audiorl.audio import write_wav
from audiorl.data.corpus import bundled_speech
from audiorl.speech_models.character_ctc import plain
from corpora.recipes import tts_quickstart


def write_two_voices(folder: Path) -> Path:
    """Six words by two speakers: `usual` as recorded, `quiet` at half the level."""
    rows = []
    folder.mkdir(exist_ok=True)
    for u in bundled_speech(("en",), max_seconds=2.0):
        if plain(u.text) in tts_quickstart.WORDS[:6]:
            for speaker, level in (("quiet", 0.5), ("usual", 1.0)):
                name = f"{plain(u.text)}-{speaker}.wav"
                write_wav(folder / name, level * u.clip.load(16_000), 16_000)
                row = {"id": name, "language": "en", "text": u.text, "audio": name, "duration": u.duration}
                rows.append(row | {"speaker": speaker, "licence": u.licence})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
