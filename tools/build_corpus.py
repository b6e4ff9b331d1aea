"""Build a small parallel speech corpus from the Asterisk core sounds that Debian packages.

    python tools/build_corpus.py OUT --download                       # fetches the packages with apt-get
    python tools/build_corpus.py OUT --packages FOLDER_WITH_DEBS      # .deb files from anywhere
    python tools/build_corpus.py OUT --tree /                         # the packages are installed (or unpacked there)

Each language needs two packages: `asterisk-core-sounds-XX-g722` (16 kHz recordings) and `asterisk-core-sounds-XX`
(their transcripts). The result is one folder:

    manifest.jsonl       one row a clip: id, key, language, text, audio (relative path), duration (s), speaker, licence
    XX/KEY.opus          mono Opus made from 16 kHz audio; a key is the prompt's name, the same in every language
    ATTRIBUTION.md       who recorded what, under which licence, and what was changed
    LICENSE-*.txt        the licence texts

The same key is the same prompt, so two languages are parallel speech and parallel text. Typing errors in the
transcripts stay as printed. Left out, and counted: sound effects and silences; clips without a transcript; clips whose
transcript mixes spoken and unspoken words; clips over --max-seconds; clips that are silent, clipped or implausibly
short or long for their text. `audiorl.data.corpus.corpus(OUT)` reads the folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import soundfile

RATE = 16_000  # G.722 is wideband; PyAV decodes it to 16 kHz mono


@dataclass(frozen=True)
class Source:
    """A language's recordings: folder name, who speaks, the licence, and the credits that the packages ask to keep."""

    folder: str
    speaker: str
    licence: str
    credit: str


SOURCES = {
    "en": Source(
        "en_US_f_Allison",
        "Allison Smith",
        "CC-BY-SA-3.0",
        "Recorded by Allison Smith (http://www.theivrvoice.com). (c) 2003-2010.",
    ),
    "es": Source(
        "es_MX_f_Allison",
        "Allison Smith",
        "CC-BY-SA-3.0",
        "Recorded by Allison Smith (http://www.theivrvoice.com). (c) 2003-2010.",
    ),
    "fr": Source(
        "fr_CA_f_June",
        "June Wallack",
        "CC-BY-SA-3.0",
        "Recorded by June Wallack (http://www.junewallack.com); translated into French by Clod Patry, Kristopher "
        "Lalletti and June Wallack; financial contributions by Unlimitel and BGM Informatique. (c) 2006-2008.",
    ),
    "it": Source(
        "it_IT_m_Carlo",
        "Carlo Flora",
        "CC-BY-3.0",
        "Recorded by Carlo Flora (http://www.carloflora.com, http://www.segreterietelefoniche.it); translated by "
        "Silvia Petrin. (c) 2012.",
    ),
    "ru": Source(
        "ru_RU_f_IvrvoiceRU", "IvrvoiceRU", "CC-BY-3.0", "Provided by Maxim Topal (http://www.ivrvoice.ru). (c) 2010."
    ),
}
LICENCE_NAMES = {
    "CC-BY-SA-3.0": ("Creative Commons Attribution-ShareAlike 3.0", "https://creativecommons.org/licenses/by-sa/3.0/"),
    "CC-BY-3.0": ("Creative Commons Attribution 3.0", "https://creativecommons.org/licenses/by/3.0/"),
}
# Tones and animals; some languages describe them in words, so the transcript alone does not tell.
SOUND_EFFECTS = {
    "ascending-2tone",
    "beep",
    "beeperr",
    "confbridge-join",
    "confbridge-leave",
    "descending-2tone",
    "tt-monkeys",
}


def packages(language: str) -> tuple[str, str]:
    return f"asterisk-core-sounds-{language}-g722", f"asterisk-core-sounds-{language}"


def download(languages: list[str], folder: Path) -> None:
    names = [name for language in languages for name in packages(language)]
    subprocess.run(["apt-get", "download", *names], cwd=folder, check=True)


def unpack(languages: list[str], debs: Path, folder: Path) -> None:
    """Unpack each language's two packages into `folder`."""
    for name in (n for language in languages for n in packages(language)):
        archives = sorted(debs.glob(f"{name}_*.deb"))
        if not archives:
            raise ValueError(f"{debs}: no {name}_*.deb; get it with `apt-get download {name}` or use --download")
        subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(folder)], check=True)


def read_transcripts(tree: Path, language: str) -> dict[str, str]:
    """Key to text, as printed. Of a key listed twice the first line counts."""
    path = tree / f"usr/share/doc/asterisk-core-sounds-{language}/core-sounds-{language}.txt.gz"
    if not path.exists():
        raise ValueError(f"{path}: missing; is the package asterisk-core-sounds-{language} installed or unpacked here?")
    texts: dict[str, str] = {}
    for line in gzip.decompress(path.read_bytes()).decode("utf-8-sig").splitlines():
        key, colon, text = line.partition(":")
        if colon and not line.startswith(";"):
            texts.setdefault(key.strip(), text.strip())
    return texts


def find_recordings(tree: Path, language: str) -> dict[str, Path]:
    """Key to recording, sorted by key."""
    # Other packages add further voices, such as a second Italian: the folder is named after country and voice.
    root = tree / "usr/share/asterisk/sounds" / SOURCES[language].folder
    if not root.is_dir():
        raise ValueError(f"{root}: missing; is asterisk-core-sounds-{language}-g722 installed or unpacked here?")
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in sorted(root.rglob("*.g722"))}


def spoken_text(text: str) -> str | None:
    """The words that are said: symbols and closing remarks in brackets go; None where it stays unclear.

    >>> spoken_text("dollar [$]"), spoken_text('IAX (note: does not say "2")')
    ('dollar', 'IAX')
    >>> spoken_text("[ tono de error ]"), spoken_text("Sus saludos [temporales] estan en uso")
    ('', None)
    """
    text = re.sub(r"[\[(][^\w\])]*[\])]", " ", text)
    text = re.sub(r"\s*[\[(<][^\])>]*[\])>]\W*$", "", text)
    text = " ".join(text.split())
    return None if re.search(r"[\[\]()<>]", text) else text


def decode_g722(path: Path) -> np.ndarray:
    """16 kHz mono float32 [T]."""
    with av.open(str(path), format="g722") as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        if not frames:
            return np.zeros(0, dtype=np.float32)
        if stream.rate != RATE:
            raise ValueError(f"{path}: decoded at {stream.rate} Hz, expected {RATE}")
    return np.concatenate(frames, axis=1)[0].astype(np.float32) / 32768


def encode_opus(wav: np.ndarray, path: Path, bitrate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # libsndfile maps a compression level of 0..1 to 256..6 kbit/s. Its own files read back exactly; the ogg files
    # that FFmpeg writes for some clips under a second do not open in libsndfile.
    level = 1 - (bitrate - 6_000) / 250_000
    soundfile.write(path, wav, RATE, format="OGG", subtype="OPUS", compression_level=level)


def complaint(wav: np.ndarray, text: str, max_seconds: float) -> str | None:
    """Why a clip is left out, or None. Levels in dB relative to full scale; speech runs at 5 to 25 letters a second."""
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
    return None


def build_language(
    tree: Path, language: str, out: Path, bitrate: int, max_seconds: float
) -> tuple[list[dict], Counter]:
    """Write the language's clips; their manifest rows and how many recordings were left out for which reason."""
    texts = read_transcripts(tree, language)
    folded = {key.lower(): text for key, text in texts.items()}
    source, rows = SOURCES[language], []
    left_out: Counter[str] = Counter()
    for key, recording in find_recordings(tree, language).items():
        text = spoken_text(texts.get(key) or folded.get(key.lower(), ""))
        if key in SOUND_EFFECTS or key.startswith("silence/"):
            left_out["sound effect or silence"] += 1
            continue
        if not text:
            left_out["unclear transcript" if text is None else "no transcript"] += 1
            continue
        wav = decode_g722(recording)
        reason = complaint(wav, text, max_seconds)
        if reason:
            left_out[reason] += 1
            print(f"  {language}/{key}: {reason} ({len(wav) / RATE:.1f} s, {text[:60]!r})")
            continue
        audio = f"{language}/{key}.opus"
        encode_opus(wav, out / audio, bitrate)
        duration = soundfile.info(out / audio).duration
        if abs(duration - len(wav) / RATE) > 0.05:
            raise ValueError(f"{out / audio}: {duration:.2f} s after encoding, {len(wav) / RATE:.2f} s before")
        rows.append(
            {
                "id": f"{language}/{key}",
                "key": key,
                "language": language,
                "text": text,
                "audio": audio,
                "duration": round(duration, 3),
                "speaker": source.speaker,
                "licence": source.licence,
            }
        )
    return rows, left_out


def licence_text(copyright_file: Path, licence: str) -> str:
    """The stand-alone paragraph `License: NAME` of a Debian copyright file, unindented."""
    paragraphs = re.split(r"\n(?=\S)", copyright_file.read_text())
    bodies = [p.partition("\n")[2] for p in paragraphs if p.partition("\n")[0].strip() == f"License: {licence}"]
    body = max(bodies, key=len, default="")
    if len(body) < 1000:
        raise ValueError(f"{copyright_file}: holds no text of {licence}")
    return textwrap.dedent(re.sub(r"^ \.[ \t]*$", "", body, flags=re.M)).strip() + "\n"


def attribution(languages: list[str]) -> str:
    lines = [
        "# Attribution",
        "",
        "The recordings in this folder are the Asterisk core sounds, published by Digium, Inc.",
        "(http://www.digium.com), which also contributed financially, at",
        "http://downloads.asterisk.org/pub/telephony/asterisk/ and packaged by Debian as asterisk-core-sounds.",
        "",
    ]
    for language in languages:
        source = SOURCES[language]
        name, url = LICENCE_NAMES[source.licence]
        lines += [f"- `{language}/`: {source.credit} Licence: {name} ({url}), see LICENSE-{source.licence}.txt."]
    return "\n".join(
        [
            *lines,
            "",
            "Changes: the G.722 recordings were converted to Opus; sound effects, silences and some clips were left",
            "out; remarks that are not spoken were removed from the transcripts. The audio itself was not cut or",
            "filtered.",
            "The converted recordings and the manifest are under the same licences.",
            "",
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to create; must be empty or absent")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--download", action="store_true", help="fetch the packages with apt-get download")
    where.add_argument("--packages", type=Path, metavar="FOLDER", help="folder with the .deb files")
    where.add_argument("--tree", type=Path, metavar="ROOT", help="where the packages are installed or unpacked, e.g. /")
    parser.add_argument("--languages", nargs="+", default=["en", "es", "fr"], choices=sorted(SOURCES))
    parser.add_argument("--bitrate", type=int, default=24_000, help="bits per second (default: %(default)s)")
    parser.add_argument("--max-seconds", type=float, default=30.0, help="leave longer clips out (default: %(default)s)")
    return parser.parse_args()


def trees(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path]]:
    """Each language with the folder that holds its unpacked packages."""
    if args.download:
        download(args.languages, scratch)
    for language in args.languages:
        if args.tree:
            yield language, args.tree
        else:
            root = scratch / f"tree-{language}"
            unpack([language], args.packages or scratch, root)
            yield language, root


def main() -> None:
    args = parse_arguments()
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out}: not empty; name a new folder or empty this one first")
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for language, tree in trees(args, Path(scratch)):
            clips, left_out = build_language(tree, language, args.out, args.bitrate, args.max_seconds)
            rows += clips
            minutes = sum(r["duration"] for r in clips) / 60
            size = sum((args.out / r["audio"]).stat().st_size for r in clips) / 1e6
            print(f"{language}: {len(clips)} clips, {minutes:.1f} minutes, {size:.1f} MB; left out {dict(left_out)}")
            notice = tree / f"usr/share/doc/asterisk-core-sounds-{language}/copyright"
            licence = SOURCES[language].licence
            (args.out / f"LICENSE-{licence}.txt").write_text(licence_text(notice, licence))
    with open(args.out / "manifest.jsonl", "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (args.out / "ATTRIBUTION.md").write_text(attribution(args.languages))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_corpus: {error}")
