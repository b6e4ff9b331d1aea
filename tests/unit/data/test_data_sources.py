"""audiorl data build: what it keeps, counts and writes, from packages made here with real recordings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.cli import main
from audiorl.data.corpus import bundled_speech, corpus
from audiorl.data.sources import packages, verdicts
from audiorl.data.sources.build import VOICES, _sample, unseen_voices
from audiorl.data.sources.packages import package_files
from audiorl.data.sources.verdicts import Verdict, read_verdicts, write_verdicts
from audiorl.data.sources.voice import Recording, Voice, read_audio
from tests.support.debian import SOUNDS, pack, write_g722, write_gpl, write_gsm, write_stamp, write_transcripts


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
    with pytest.raises(ValueError, match=r"en\.json: built with .*3\.0.*, now .*30\.0.*; name a new folder"):
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


# ---------------------------------------------------------------------------------------------------- other speakers


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package's tables of verdicts, for two voices."""
    folder = tmp_path / "verdicts"
    prompts = [("activated", 0.1, None), ("agent-pass", 0.2, None), ("digits/7", 0.4, 0), ("digits/8", 0.4, 3)]
    write_verdicts(folder / "es-co.tsv", [Verdict(name, cer, rank, "x") for name, cer, rank in prompts])
    stamps = [("animals/yak", 0.5, 0), ("animals/ram", 0.6, 1), ("animals/pig", 0.0, 0)]
    write_verdicts(folder / "tuxpaint-en.tsv", [Verdict(name, cer, rank, "x") for name, cer, rank in stamps])
    monkeypatch.setattr(verdicts, "TABLES", folder)
    return folder


def test_prompts_of_other_speakers_have_the_text_that_is_confirmed(
    tmp_path: Path, root: Path, tables: Path, speech: dict[str, np.ndarray]
) -> None:
    for key in ("activated", "agent-pass", "digits/7", "digits/8", "digits/9", "pesos"):
        write_gsm(root / SOUNDS / "es" / f"{key}.gsm", speech["activated"])
    lines = "activated: Activado.\nagent-pass: Clave\ndigits/7: siete\ndigits/8: ocho\ndigits/9: nueve\n"
    write_transcripts(root, "es", lines)
    write_gpl(root)
    build(tmp_path / "out", "--sources", "asterisk-es-co", "--tree", root)
    utterances = corpus(tmp_path / "out")
    assert [(u.id, u.text, u.translation) for u in utterances] == [
        ("es-co/activated", "Activado.", "Activated."),
        ("es-co/digits/7", "siete", ""),
    ]
    assert {(u.speaker, u.licence) for u in utterances} == {("July E. Jiménez", "GPL-2.0-only")}
    left_out = json.loads((tmp_path / "out/voices/es-co.json").read_text())["left_out"]
    assert left_out == {"text not confirmed": 3, "no transcript": 1}
    wav, original = utterances[0].clip.load(16_000), speech["activated"]
    assert abs(len(wav) - len(original)) < 640  # GSM has blocks of 20 ms
    assert "July E. Jiménez" in (tmp_path / "out/ATTRIBUTION.md").read_text()
    assert "Version 2" in (tmp_path / "out/LICENSE-GPL-2.0-only.txt").read_text()


def test_stamps_have_the_text_of_their_language_and_english(
    tmp_path: Path, root: Path, tables: Path, speech: dict[str, np.ndarray]
) -> None:
    wav = speech["activated"]
    lines = "A pig.\nca.utf8=Un porc.\nca@valencia.utf8=Un porquet.\nda.utf8=\n"
    write_stamp(root, "animals/pig", lines, {"": wav, "ca": wav, "da": wav})
    write_stamp(root, "animals/yak", "A yak.\nca.utf8=Un iac.\n", {"": wav, "ca": np.zeros_like(wav)})
    write_stamp(root, "animals/ram", "A ram.\n", {"": wav})
    write_gpl(root)
    build(tmp_path / "out", "--sources", "tuxpaint", "--languages", "en", "ca", "da", "--tree", root)
    assert [(u.id, u.key, u.text, u.translation) for u in corpus(tmp_path / "out")] == [
        ("tuxpaint-ca/animals/pig", "tuxpaint/animals/pig", "Un porc.", "A pig."),
        ("tuxpaint-en/animals/pig", "tuxpaint/animals/pig", "Pig.", ""),
        ("tuxpaint-en/animals/yak", "tuxpaint/animals/yak", "Yak.", ""),
    ]
    reasons = {
        name: json.loads((tmp_path / f"out/voices/tuxpaint-{name}.json").read_text())["left_out"]
        for name in ("ca", "en", "da")
    }
    assert reasons == {"ca": {"silent": 1}, "en": {"text not confirmed": 1}, "da": {"no transcript": 1}}
    with pytest.raises(ValueError, match=r"stamps: no \*_desc_nl\.ogg; is tuxpaint-stamps-default installed"):
        build(tmp_path / "out", "--sources", "tuxpaint", "--languages", "nl", "--tree", root)


def test_synthetic_voices_speak_the_texts_of_the_corpus_and_of_a_file(tmp_path: Path, root: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "mine.tsv"
    file.write_text("es\tBuenos días.\tGood morning.\nes\tHasta luego.\n", encoding="utf-8")
    options = ("--sources", "asterisk", "synthetic", "--languages", "es", "--tree", root)
    build(out, *options, "--texts", file, "--texts-licence", "CC0-1.0", "--synthetic-clips", "2")
    spoken = [u for u in corpus(out) if u.id.startswith("synthetic-es/")]
    assert [(u.id, u.key, u.text, u.translation, u.licence) for u in spoken[::2]] == [
        ("synthetic-es/activated-0", "activated", "Activado.", "Activated.", "CC-BY-SA-3.0"),
        ("synthetic-es/texts/mine-000001-0", "texts/mine-000001", "Buenos días.", "Good morning.", "CC0-1.0"),
        ("synthetic-es/texts/mine-000002-0", "texts/mine-000002", "Hasta luego.", "", "CC0-1.0"),
    ]
    assert len(spoken) == 6 and all(u.speaker.startswith("espeak-ng es") for u in spoken)
    assert len({u.speaker for u in spoken}) > 2
    assert np.abs(spoken[0].clip.load(16_000)).max() > 0.05
    with pytest.raises(ValueError, match=r"synthetic-es\.json: built with .*; name a new folder, or delete this file"):
        build(out, *options, "--synthetic-clips", "2")
    with pytest.raises(ValueError, match="needs --texts-licence and the source synthetic"):
        build(out, *options, "--texts", file)
    file.write_text("Buenos días.\n")
    with pytest.raises(ValueError, match=r"mine\.tsv: row 1: not LANGUAGE, tab, TEXT"):
        build(out, *options, "--texts", file, "--texts-licence", "CC0-1.0")
    with pytest.raises(ValueError, match="empty: no texts to speak; add another source, or --texts FILE"):
        build(tmp_path / "empty", "--sources", "synthetic")


def test_the_unseen_speakers_are_a_sample_of_different_texts(tmp_path: Path) -> None:
    """Of six usable recordings, two of which say the same, three: the same ones whatever else there is."""

    def voice(names: str) -> Voice:
        def recordings(root: Path) -> Iterator[Recording]:
            for name in names:
                text = "Same." if name in "ab" else f"text {name}"
                yield Recording(name, name, text, "", lambda: np.zeros(1, np.float32), "silent" if name == "z" else "")

        return replace(VOICES[0], recordings=recordings)

    chosen = [r.name for r in _sample(voice("abcdefz"), 3, tmp_path)]
    assert len(chosen) == 3 and chosen == sorted(chosen) and "z" not in chosen
    assert len(list(_sample(voice("abz"), 3, tmp_path))) == 1
    assert {r.name for r in _sample(voice("abcdefz"), 2, tmp_path)} < set(chosen)
    assert [v.folder for v in unseen_voices()] == ["es-co", "fr-armelle", "tuxpaint-en", "tuxpaint-es", "tuxpaint-fr"]


def test_the_tables_of_verdicts_are_there_and_read() -> None:
    checked = [voice.folder for voice in VOICES if voice.max_cer is not None]
    assert sorted(f"{name}.tsv" for name in checked) == sorted(f.name for f in verdicts.TABLES.glob("*.tsv"))
    for name in checked:
        table = read_verdicts(verdicts.TABLES / f"{name}.tsv")
        assert len(table) > 60 and all(v.cer >= 0 and (v.rank is None or v.rank >= 0) for v in table.values())


def test_gsm_is_read_at_16_khz(tmp_path: Path, speech: dict[str, np.ndarray]) -> None:
    write_gsm(tmp_path / "a.gsm", speech["activated"])
    wav = read_audio(tmp_path / "a.gsm")
    spectra = [np.abs(np.fft.rfft(x, 16_000))[:3400] for x in (wav, speech["activated"])]
    assert np.corrcoef(*spectra)[0, 1] > 0.9


def test_loud_recordings_are_scaled_and_clipped_ones_left_out(
    tmp_path: Path, root: Path, speech: dict[str, np.ndarray]
) -> None:
    """Ogg Vorbis decodes to samples beyond full scale; a recording that was cut off there has a plateau."""
    loud = speech["activated"] / np.abs(speech["activated"]).max() * 1.4
    write_stamp(root, "food/loud", "x\nca.utf8=Fort.\n", {"ca": loud})
    write_stamp(root, "food/cut", "x\nca.utf8=Tallat.\n", {"ca": loud})
    soundfile.write(
        root / "usr/share/tuxpaint/stamps/food/cut_desc_ca.ogg", np.clip(10 * loud, -1, 1), 16_000, format="WAV"
    )
    write_gpl(root)
    build(tmp_path / "out", "--sources", "tuxpaint", "--languages", "ca", "--tree", root)
    (only,) = corpus(tmp_path / "out")
    assert only.text == "Fort." and 0.8 < np.abs(only.clip.load(16_000)).max() < 1.1
    assert json.loads((tmp_path / "out/voices/tuxpaint-ca.json").read_text())["left_out"] == {"clipped": 1}
