"""Telephone prompts by other speakers, which have the keys of the Asterisk core sounds and no transcripts.

The speakers say translations of their own, which are often not those of the core sounds. A prompt takes the core
sounds' text of its key only where a recogniser confirms it, see `voices.confirmed`; the others are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from corpora.sources import asterisk
from corpora.sources.packages import gpl_2_text, licence_paragraph
from corpora.sources.voices import Voice

MAX_CER = 0.15
"""Maximum character error rate of the recogniser's transcript against the text."""


def _voice(
    source: str,
    name: str,
    language: str,
    files: tuple[str, str],
    speaker: str,
    licence: str,
    credit: str,
    packages: tuple[str, ...],
    licence_text: Callable[[Path], str],
) -> Voice:
    """Return the voice `name`; `files` are the folder below asterisk.SOUNDS and the ending of its recordings."""
    folder, suffix = files
    return Voice(
        source=source,
        folder=name,
        language=language,
        speaker=speaker,
        licence=licence,
        credit=credit,
        packages=(*packages, f"asterisk-core-sounds-{language}", "asterisk-core-sounds-en"),
        recordings=partial(asterisk.prompts, language=language, folder=folder, suffix=suffix),
        licence_text=licence_text,
        max_cer=MAX_CER,
    )


def _armelle_licence(root: Path) -> str:
    path = root / "usr/share/doc/asterisk-prompt-fr-armelle/copyright"
    if not path.is_file():
        raise ValueError(f"{path}: missing; is asterisk-prompt-fr-armelle installed or unpacked here?")
    text = path.read_text(encoding="utf-8")
    return text.partition("License:\n")[2].partition("The Debian packaging")[0].strip() + "\n"


INTRODUCTIONS = {
    "asterisk-es-co": "Prompts for Asterisk in Colombian Spanish, packaged by Debian as asterisk-prompt-es-co.",
    "asterisk-fr-armelle": "Prompts for Asterisk in French, packaged by Debian as asterisk-prompt-fr-armelle.",
}
VOICES = (
    _voice(
        "asterisk",
        "it-menardi",
        "it",
        ("it_IT_f_Menardi", ".wav"),
        "Paola Dal Zot",
        "CC-BY-SA-3.0-IT",
        "Recorded by Marco Menardi and his wife Paola Dal Zot (the voice); the recordings, their updates and further "
        "voices are at http://www.voip.ammdomus.it. (c) 2006-2011.",
        ("asterisk-prompt-it-menardi-wav", "asterisk-prompt-it-menardi"),
        lambda root: licence_paragraph(root / "usr/share/doc/asterisk-prompt-it-menardi/copyright", "CC-SA-BY-3.0"),
    ),
    _voice(
        "asterisk-es-co",
        "es-co",
        "es",
        ("es", ".gsm"),
        "July E. Jiménez",
        "GPL-2.0-only",
        "Recorded by Avatar Ltda. (http://www.avatar.com.co/) with the voice of July E. Jiménez. (c) 2006.",
        ("asterisk-prompt-es-co", "base-files"),
        gpl_2_text,
    ),
    _voice(
        "asterisk-fr-armelle",
        "fr-armelle",
        "fr",
        ("fr", ".gsm"),
        "Armelle Desjardins",
        "LicenseRef-BSD-Armelle",
        "Voice: Armelle Desjardins. (c) 2006 Michel Gutierrez.",
        ("asterisk-prompt-fr-armelle",),
        _armelle_licence,
    ),
)
