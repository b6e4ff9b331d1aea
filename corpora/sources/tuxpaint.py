"""The stamps of Tux Paint: short spoken descriptions of drawn objects, the same objects in every language.

A stamp X has the texts in X.txt, whose first line is English and whose others are `CODE.utf8=text`, and recordings in
X_desc_CODE.ogg; X_desc.ogg is English. Several stamps have the same text ("The letter J." filled and outlined).

Some recordings are older than the texts. Those of English and some of Spanish and French were checked (see
`voices.confirmed`), and recordings are left out from which a recogniser reads something else. The other texts are as
published. The English recordings name the object without the article of the text, so it is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from corpora.sources.packages import gpl_2_text
from corpora.sources.voices import SourceRecording, Voice, read_audio

SOURCE = "tuxpaint"
INTRODUCTION = """\
The stamps of Tux Paint are copyright 2002-2022 by Bill Kendrick and contributors (https://tuxpaint.org), packaged by
Debian as tuxpaint-stamps-default. The names below are those that its changelog gives for the spoken descriptions."""
CHECKED = ("en", "es", "fr")
"""Languages with tables of verdicts: for all recordings in English, for a part of them in the others."""
MAX_CER = 0.5
"""Maximum character error rate of the recogniser's transcript. The texts belong to the recordings, so that most of the
errors are the recogniser's."""
STAMPS = Path("usr/share/tuxpaint/stamps")
CREDITS = {
    "en": "",
    "fr": "Jacques Chion",
    "es": "Estefanía Ortiz",
    "ca": "Pere Pujal Carabantes",
    "ro": "",
    "ru": "",
    "bg": "Krasimir Petkov",
    "be": "Kseniya Buraya",
    "el": "Kiriaki Serafeim",
    "da": "Joe Dalton",
    "nl": "",
}
"""Language to the contributor of its spoken descriptions, "" where the changelog names none."""


def stamp_texts(path: Path) -> dict[str, str]:
    """Language to text of one stamp's .txt file."""
    first, *others = path.read_text(encoding="utf-8-sig").splitlines() or [""]
    texts = {"en": first.strip()}
    for line in others:
        language, marker, text = line.partition(".utf8=")
        if marker:
            texts[language] = text.strip()
    return texts


def stamps(root: Path, language: str) -> Iterator[SourceRecording]:
    """Yield the spoken descriptions in one language. Raises ValueError where there are none."""
    folder = root / STAMPS
    ending = "_desc.ogg" if language == "en" else f"_desc_{language}.ogg"
    paths = sorted(folder.rglob(f"*{ending}"))
    if not paths:
        raise ValueError(f"{folder}: no *{ending}; is tuxpaint-stamps-default installed or unpacked here?")
    for path in paths:
        name = path.relative_to(folder).as_posix().removesuffix(ending)
        file = folder / f"{name}.txt"
        texts = stamp_texts(file) if file.is_file() else {}
        text = texts.get(language, "")
        if language == "en":
            text = re.sub("^(An?|The) ", "", text).capitalize()
        translation = "" if language == "en" else texts.get("en", "")
        reason = "" if text else "no transcript"
        yield SourceRecording(name, f"tuxpaint/{name}", text, translation, partial(read_audio, path), reason)


def _voice(language: str, contributor: str) -> Voice:
    return Voice(
        source=SOURCE,
        folder=f"tuxpaint-{language}",
        language=language,
        speaker=f"Tux Paint {language}",
        licence="GPL-2.0-or-later",
        credit=f"Spoken descriptions by {contributor or 'contributors of Tux Paint'}.",
        packages=("tuxpaint-stamps-default", "base-files"),
        recordings=partial(stamps, language=language),
        licence_text=gpl_2_text,
        max_cer=MAX_CER if language in CHECKED else None,
        unchecked=True,
    )


VOICES = tuple(_voice(language, contributor) for language, contributor in CREDITS.items())
