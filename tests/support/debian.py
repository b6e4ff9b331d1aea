"""Debian packages and the files that they install, with recordings from real encoders."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr

SOUNDS = "usr/share/asterisk/sounds"


def write_g722(path: Path, wav: np.ndarray) -> None:
    """Float32 [T] at 16 kHz as headerless G.722."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((wav[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)


def write_transcripts(root: Path, language: str, lines: str, licence: str = "CC-BY-SA-3.0") -> None:
    """The files of the package asterisk-core-sounds-LANGUAGE below `root`: transcripts and copyright."""
    doc = root / f"usr/share/doc/asterisk-core-sounds-{language}"
    doc.mkdir(parents=True, exist_ok=True)
    (doc / f"core-sounds-{language}.txt.gz").write_bytes(gzip.compress(lines.encode()))
    text = "\n".join([" THE WORK IS PROVIDED", " .", *(["   1. a line of the licence's terms"] * 40)])
    (doc / "copyright").write_text(f"Files: *\nLicense: {licence}\n\nLicense: {licence}\n{text}\n")


def pack(name: str, root: Path, folder: Path, version: str = "1.0-1") -> Path:
    """A real package NAME_VERSION_all.deb in `folder` that installs the files below `root`."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    (root / "DEBIAN").mkdir(exist_ok=True)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: a <a@b.org>\nDescription: d\n"
    (root / "DEBIAN/control").write_text(control)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}_{version}_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", str(root), str(file)], check=True, capture_output=True)
    shutil.rmtree(root / "DEBIAN")
    return file


def write_gsm(path: Path, wav: np.ndarray) -> None:
    """Float32 [T] at 16 kHz as headerless GSM 06.10 at 8 kHz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    narrow = soxr.resample(wav, 16_000, 8_000)
    soundfile.write(path, narrow, 8_000, format="RAW", subtype="GSM610")


def write_stamp(root: Path, name: str, lines: str, recordings: dict[str, np.ndarray]) -> None:
    """A stamp of Tux Paint below `root`: its text file and, by ending ("" is English), Ogg Vorbis at 44.1 kHz."""
    file = root / "usr/share/tuxpaint/stamps" / f"{name}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(lines, encoding="utf-8")
    for language, wav in recordings.items():
        ending = f"_desc_{language}.ogg" if language else "_desc.ogg"
        soundfile.write(file.with_name(f"{file.stem}{ending}"), soxr.resample(wav, 16_000, 44_100), 44_100)


def write_gpl(root: Path) -> None:
    """The licence that the package base-files installs."""
    file = root / "usr/share/common-licenses/GPL-2"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("GNU GENERAL PUBLIC LICENSE\nVersion 2, June 1991\n")
