"""audiorl data build: what it keeps, counts and writes, from packages made here with real recordings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from audiorl.cli import main
from audiorl.data.corpus import bundled_speech, corpus
from audiorl.data.sources import packages
from audiorl.data.sources.packages import package_files
from tests.support.debian import SOUNDS, pack, write_g722, write_transcripts


@pytest.fixture(scope="module")
def speech() -> dict[str, np.ndarray]:
    """Key to waveform of some English recordings."""
    keys = ("activated", "agent-alreadyon")
    return {u.key: u.clip.load(16_000) for u in bundled_speech(("en",)) if u.key in keys}


@pytest.fixture
def root(tmp_path: Path, speech: dict[str, np.ndarray]) -> Path:
    """English and Spanish core sounds as installed: some clean, others to be left out."""
    root = tmp_path / "root"
    english, spanish = (root / SOUNDS / name for name in ("en_US_f_Allison", "es_MX_f_Allison"))
    for key in ("activated", "letters/dollar", "beep", "digits/1M", "no-text", "unclear", "silence/1", "long"):
        write_g722(english / f"{key}.g722", speech["agent-alreadyon" if key == "long" else "activated"])
    write_g722(english / "quiet.g722", speech["activated"] * 1e-4)
    write_g722(english / "mismatch.g722", speech["activated"])
    write_g722(spanish / "activated.g722", speech["activated"])
    lines = (
        "; a comment: with a colon\n\nactivated: Activated.\nactivated: again\nletters/dollar: dollar [$]\n"
        "beep: a beep sounds\ndigits/1m: one\nunclear: your [temporary] greeting\nsilence/1: (1 second of silence)\n"
        f"long: That agent is logged on.\nquiet: Quiet.\nmismatch: {'much too long a text ' * 5}\n"
    )
    write_transcripts(root, "en", lines)
    write_transcripts(root, "es", "activated: Activado.\n")
    return root


def build(out: Path, *options: str | Path) -> None:
    """What `audiorl data build` does; raises its ValueError."""
    from audiorl.cli import _data

    _data(["build", str(out), *map(str, options)])


def test_speech_is_kept_and_the_rest_counted(
    tmp_path: Path, root: Path, speech: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    build(out, "--sources", "asterisk", "--tree", root, "--languages", "en", "--max-seconds", "3")
    utterances = corpus(out)
    assert [(u.key, u.text) for u in utterances] == [
        ("activated", "Activated."),
        ("digits/1M", "one"),
        ("letters/dollar", "dollar"),
    ]
    assert utterances[0].speaker == "Allison Smith"
    wav, original = utterances[0].clip.load(16_000), speech["activated"]
    assert abs(len(wav) - len(original)) <= 2
    envelope = [np.abs(x[: len(x) // 160 * 160]).reshape(-1, 160).mean(1) for x in (wav, original)]
    assert np.corrcoef(envelope[0], envelope[1][: len(envelope[0])])[0, 1] > 0.98
    assert json.loads((out / "voices/en.json").read_text())["left_out"] == {
        "sound effect or silence": 2,
        "no transcript": 1,
        "unclear transcript": 1,
        "longer than 3 s": 1,
        "silent": 1,
        "text does not fit the duration": 1,
    }
    assert "3 clips, 0.1 minutes, 1 speakers" in capsys.readouterr().out
    assert (out / "LICENSE-CC-BY-SA-3.0.txt").read_text().startswith("THE WORK IS PROVIDED\n\n  1. a line")
    assert "Allison Smith" in (out / "ATTRIBUTION.md").read_text()
    row = json.loads((out / "manifest.jsonl").read_text().splitlines()[1])
    assert row["id"] == "en/digits/1M" and row["audio"] == "en/digits/1M.opus" and row["licence"] == "CC-BY-SA-3.0"


def test_a_build_goes_on_after_the_last_complete_voice(tmp_path: Path, root: Path) -> None:
    out, options = tmp_path / "out", ("--sources", "asterisk", "--tree", root)
    build(out, *options, "--languages", "en", "--max-seconds", "3")
    clip = out / "en/activated.opus"
    written = clip.stat().st_mtime_ns
    build(out, *options, "--languages", "en", "es", "--max-seconds", "3")
    assert clip.stat().st_mtime_ns == written
    assert [(u.id, u.translation) for u in corpus(out, ("es",))] == [("es/activated", "Activated.")]
    assert len(corpus(out)) == 4
    with pytest.raises(ValueError, match=r"en\.json: built with .*3\.0.*, not .*30\.0.*; name a new folder"):
        build(out, *options, "--languages", "en")


def test_packages_are_unpacked_from_a_folder(tmp_path: Path, root: Path) -> None:
    debs = tmp_path / "debs"
    for name in ("asterisk-core-sounds-en", "asterisk-core-sounds-en-g722"):
        pack(name, root, debs)
    build(tmp_path / "out", "--sources", "asterisk", "--packages", debs, "--languages", "en")
    assert len(corpus(tmp_path / "out")) == 4
    with pytest.raises(
        ValueError, match=r"debs: no asterisk-core-sounds-es-g722_\*\.deb; get it with `apt-get download"
    ):
        build(tmp_path / "out", "--sources", "asterisk", "--packages", debs, "--languages", "es")
    (debs / "asterisk-core-sounds-es-g722_1.deb").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"es-g722_1\.deb: cannot be unpacked .*; download it again"):
        build(tmp_path / "out", "--sources", "asterisk", "--packages", debs, "--languages", "es")


def test_only_missing_packages_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """apt-get itself is replaced by a script that records its calls: tests run offline."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (tmp_path / "content").mkdir()
    pack("one", tmp_path / "content", tmp_path)
    (bin / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$2" in --print-uris) echo "\'x\' a.deb 2500000 SHA256:0";;\n'
        f"two) exit 100;;\n*) cp {tmp_path}/one_1.0-1_all.deb .;;\nesac\n"
    )
    (bin / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        with package_files(["one"]) as root:
            assert root.is_dir()
    assert [line.split(" -o")[0] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "download --print-uris one",
        "download one",
    ]
    assert "downloading one (1 of 1, 2.5 MB)" in capsys.readouterr().out
    assert (tmp_path / "cache/audiorl/packages/one_1.0-1_all.deb").exists()
    with pytest.raises(ValueError, match=r"apt-get download two failed .*apt-get update"), package_files(["two"]):
        pass
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with (
        pytest.raises(ValueError, match=r"apt-get: not installed; copy two_\*\.deb to a folder"),
        package_files(["two"]),
    ):
        pass


def test_bad_input_is_one_line(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("x")
    with pytest.raises(ValueError, match="other: not empty; name a new folder"):
        build(tmp_path / "other", "--sources", "asterisk", "--tree", root)
    with pytest.raises(ValueError, match="asterisk: no recordings in 'de', only in en, es, fr, it, ru"):
        build(tmp_path / "out", "--sources", "asterisk", "--tree", root, "--languages", "de")
    with pytest.raises(ValueError, match=r"core-sounds-ru\.txt\.gz: missing"):
        build(tmp_path / "out", "--sources", "asterisk", "--tree", root, "--languages", "ru")
    with pytest.raises(ValueError, match=r"bitrate must be in 6000\.\.256000"):
        build(tmp_path / "out", "--sources", "asterisk", "--tree", root, "--bitrate", "1")
    with pytest.raises(ValueError, match="not both"):
        build(tmp_path / "out", "--sources", "asterisk", "--languages", "en", "--tree", root, "--packages", root)
    assert main(["data", "make"]) == 2
    assert (
        capsys.readouterr().err
        == "audiorl: data: no command is called 'make'; they are data build OUT and data build-qa OUT\n"
    )
