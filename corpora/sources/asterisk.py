"""The Asterisk core sounds: studio recordings of telephone prompts with transcripts, in five languages.

A key is the prompt's name. It is the same in every language, so two languages are parallel speech and parallel text.
Typing errors in the transcripts stay as printed. Symbols and remarks that are not spoken are removed from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from audiorl.data.rows import gunzipped
from corpora.sources.packages import licence_paragraph
from corpora.sources.voices import SourceRecording, Voice, read_audio

SOURCE = "asterisk"
INTRODUCTION = """\
The Asterisk core sounds were published by Digium, Inc. (http://www.digium.com), which also contributed financially, at
http://downloads.asterisk.org/pub/telephony/asterisk/, and packaged by Debian as asterisk-core-sounds. Remarks that are
not spoken were removed from the transcripts."""
SOUND_EFFECTS = {
    "ascending-2tone",
    "beep",
    "beeperr",
    "confbridge-join",
    "confbridge-leave",
    "descending-2tone",
    "tt-monkeys",
}
"""Tones and animals. Some languages describe them in words, so the transcript alone does not tell."""
SOUNDS = Path("usr/share/asterisk/sounds")


def transcripts(root: Path, language: str) -> dict[str, str]:
    """Key to text, as printed. Of a key listed twice the first line counts."""
    path = root / f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    if not path.exists():
        raise ValueError(f"{path}: missing; is the package asterisk-core-sounds-{language} installed or unpacked here?")
    texts: dict[str, str] = {}
    for line in gunzipped(path).decode("utf-8-sig").splitlines():
        key, colon, text = line.partition(":")
        if colon and not line.startswith(";"):
            texts.setdefault(key.strip(), text.strip())
    return texts


def spoken_text(text: str) -> str | None:
    """Return the words that are said: symbols and closing remarks in brackets go; None where it stays unclear.

    >>> spoken_text("dollar [$]"), spoken_text('IAX (note: does not say "2")')
    ('dollar', 'IAX')
    >>> spoken_text("[ tono de error ]"), spoken_text("Sus saludos [temporales] estan en uso")
    ('', None)
    """
    text = re.sub(r"[\[(][^\w\])]*[\])]", " ", text)
    text = re.sub(r"\s*[\[(<][^\])>]*[\])>]\W*$", "", text)
    text = " ".join(text.split())
    return None if re.search(r"[\[\]()<>]", text) else text


def find_recordings(root: Path, folder: str, suffix: str) -> dict[str, Path]:
    """Key to recording of one voice's folder below SOUNDS, sorted by key."""
    sounds = root / SOUNDS / folder
    if not sounds.is_dir():
        raise ValueError(f"{sounds}: missing; are the packages of this voice installed or unpacked here?")
    return {p.relative_to(sounds).with_suffix("").as_posix(): p for p in sorted(sounds.rglob(f"*{suffix}"))}


def prompts(root: Path, language: str, folder: str, suffix: str) -> Iterator[SourceRecording]:
    """Yield the recordings of one folder with the core sounds' transcripts, and the English ones as translations."""
    texts = _Texts(transcripts(root, language))
    english = texts if language == "en" else _Texts(transcripts(root, "en"))
    for key, path in find_recordings(root, folder, suffix).items():
        text = texts.spoken(key)
        translation = "" if language == "en" else english.spoken(key) or ""
        reason = "unclear transcript" if text is None else "" if text else "no transcript"
        if key in SOUND_EFFECTS or key.startswith("silence/"):
            reason = "sound effect or silence"
        yield SourceRecording(key, key, text or "", translation, partial(read_audio, path), reason)


class _Texts:
    """Transcripts by key, or by key without case where the spelling of the file's name differs."""

    def __init__(self, printed: dict[str, str]):
        self.printed = printed
        self.folded = {key.lower(): text for key, text in printed.items()}

    def spoken(self, key: str) -> str | None:
        return spoken_text(self.printed.get(key) or self.folded.get(key.lower(), ""))


def _core_sounds(language: str, folder: str, speaker: str, licence: str, credit: str) -> Voice:
    texts = f"asterisk-core-sounds-{language}"
    return Voice(
        source=SOURCE,
        folder=language,
        language=language,
        speaker=speaker,
        licence=licence,
        credit=credit,
        packages=tuple(dict.fromkeys((f"{texts}-g722", texts, "asterisk-core-sounds-en"))),
        recordings=partial(prompts, language=language, folder=folder, suffix=".g722"),
        licence_text=lambda root: licence_paragraph(root / f"usr/share/doc/{texts}/copyright", licence),
    )


VOICES = (
    _core_sounds(
        "en",
        "en_US_f_Allison",
        "Allison Smith",
        "CC-BY-SA-3.0",
        "Recorded by Allison Smith (http://www.theivrvoice.com). (c) 2003-2010.",
    ),
    _core_sounds(
        "es",
        "es_MX_f_Allison",
        "Allison Smith",
        "CC-BY-SA-3.0",
        "Recorded by Allison Smith (http://www.theivrvoice.com). (c) 2003-2010.",
    ),
    _core_sounds(
        "fr",
        "fr_CA_f_June",
        "June Wallack",
        "CC-BY-SA-3.0",
        "Recorded by June Wallack (http://www.junewallack.com); translated into French by Clod Patry, Kristopher "
        "Lalletti and June Wallack; financial contributions by Unlimitel and BGM Informatique. (c) 2006-2008.",
    ),
    _core_sounds(
        "it",
        "it_IT_m_Carlo",
        "Carlo Flora",
        "CC-BY-3.0",
        "Recorded by Carlo Flora (http://www.carloflora.com, http://www.segreterietelefoniche.it); translated by "
        "Silvia Petrin. (c) 2012.",
    ),
    _core_sounds(
        "ru",
        "ru_RU_f_IvrvoiceRU",
        "IvrvoiceRU",
        "CC-BY-3.0",
        "Provided by Maxim Topal (http://www.ivrvoice.ru). (c) 2010.",
    ),
)
