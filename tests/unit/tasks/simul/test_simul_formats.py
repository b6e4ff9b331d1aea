"""Streams from files: each format's own layout, and one clear line for everything that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance
from audiorl.tasks.simul.formats import Word, align_clauses, clauses, read_streams, write_streams
from audiorl.tasks.simul.streams import Stream, Unit
from audiorl.tasks.simul.talks import read_segments

RATE = 16_000
ENGLISH_SPANISH = {"source_language": "en", "target_language": "es"}


def tone(seconds: float) -> np.ndarray:
    return (0.3 * np.sin(np.arange(round(seconds * RATE)) * 0.2)).astype(np.float32)


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def row(**changes: Any) -> dict[str, Any]:
    units = [{"start": 0.5, "end": 1.5, "source": "wait", "target": "espere", "target_seconds": 1.2}]
    made = {"id": "a", "audio": "a.wav", **ENGLISH_SPANISH, "units": units, **changes}
    return {k: v for k, v in made.items() if v is not ...}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a.wav and b.wav of 5 s."""
    for name in ("a", "b"):
        soundfile.write(tmp_path / f"{name}.wav", tone(5.0), RATE)
    return tmp_path


# -------------------------------------------------------------------------------------------------------- our own rows


def test_a_row(folder: Path) -> None:
    loaded = read_streams(lines(folder / "s.jsonl", row(metadata={"topic": "x"}, speaker="m")))
    (stream,) = loaded.samples
    assert (stream.id, stream.seconds, stream.source_language, stream.target_language) == ("a", 5.0, "en", "es")
    assert stream.units == (Unit(0.5, 1.5, "espere", "wait", 1.2),)
    assert stream.audio.path == str(folder / "a.wav") and stream.metadata == {"topic": "x", "speaker": "m"}
    assert loaded.summary().endswith("s.jsonl: 1 sample")
    for ends in ({"duration": 2.0}, {"end": 3.0}):
        (part,) = read_streams(lines(folder / "s.jsonl", row(start=1.0, **ends))).samples
        assert part.seconds == 2.0 and (part.audio.start, part.audio.duration) == (1.0, 2.0)
    held = {"path": "a.wav", "start": 1.0}
    for given, seconds in (({}, 4.0), ({"duration": 0.5}, 0.5), ({"duration": 0.5, "seconds": 2.0}, 2.0)):
        audio = {**held, "duration": given.get("duration")}
        unit = {**UNIT, "target_seconds": given.get("seconds"), "target_audio": audio}
        (spoken,) = read_streams(lines(folder / "s.jsonl", row(units=[unit]))).samples
        assert spoken.units[0].target_seconds == seconds
    for units in ([], None):
        (bare,) = read_streams(lines(folder / "s.jsonl", row(units=units))).samples
        assert bare.units == () and bare.reference == ""
    three = lines(folder / "s.jsonl", row(), row(id="b"), row(id="b"))
    assert [s.id for s in read_streams(three, limit=2).samples] == ["a", "b"]


def test_audio_and_languages_from_the_caller(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("rows") / "s.jsonl"
    with pytest.raises(ValueError, match=r"s\.jsonl: row 1, field 'audio': .*a\.wav: missing; check the path"):
        read_streams(lines(elsewhere, row()))
    assert len(read_streams(elsewhere, audio_root=folder).samples) == 1
    with pytest.raises(ValueError, match="no such folder"):
        read_streams(elsewhere, audio_root=folder / "none")
    with pytest.raises(ValueError, match=r"field 'target_language': 'es' where 'fr' was asked for"):
        read_streams(elsewhere, audio_root=folder, target_language="fr")
    bare = lines(folder / "s.jsonl", row(source_language=..., target_language=...))
    with pytest.raises(ValueError, match=r"row 1, field 'source_language': missing; give it in the file or as source_"):
        read_streams(bare)
    (stream,) = read_streams(bare, source_language="en", target_language="fr").samples
    assert (stream.source_language, stream.target_language) == ("en", "fr")


def test_streams_written_are_read_back(speech: list[Utterance], tmp_path: Path) -> None:
    wav = np.concatenate([u.clip.load() for u in speech[:3]])
    clip, seconds = AudioClip(array=wav, sample_rate=RATE), len(wav) / RATE
    units = (Unit(0.1, 1.0, "uno", "one", 0.7, speaker="ann"), Unit(1.0, 1.2, "dos", speaker="bo"))
    made = [
        Stream("x/1", clip, seconds, units, "en", "es"),
        Stream("x/2", clip, seconds, (), "en", "es", {"topic": "nothing"}),
    ]
    written = write_streams(tmp_path / "out", made)
    assert (tmp_path / "out/audio/x_1.flac").is_file()
    for read in (read_streams(tmp_path / "out").samples, read_streams(tmp_path / "out/streams.jsonl").samples):
        for a, b, c in zip(made, written, read, strict=True):
            assert (a.id, a.units, a.seconds, a.metadata) == (b.id, b.units, b.seconds, b.metadata)
            assert (a.id, a.units, a.seconds, a.metadata) == (c.id, c.units, c.seconds, c.metadata)
            assert np.abs(c.audio.load() - wav).max() < 2e-5 and np.array_equal(b.audio.load(), c.audio.load())
    again = write_streams(tmp_path / "again", read)
    assert again[0].audio.path == read[0].audio.path, "files stay where they are"
    assert read_streams(tmp_path / "again").samples[0].units == made[0].units
    same = [Stream(id, clip, seconds, (), "en", "es") for id in ("x/1", "x 1")]
    with pytest.raises(ValueError, match=r"streams 'x/1' and 'x 1' would share audio/x_1\.flac"):
        write_streams(tmp_path / "same", same)
    assert not (tmp_path / "same" / "streams.jsonl").exists()


def test_a_long_stream_is_cut(folder: Path) -> None:
    units = [{"start": k, "end": k + 0.8, "source": f"s{k}", "target": f"t{k}"} for k in range(5)]
    loaded = read_streams(lines(folder / "s.jsonl", row(units=units)), max_seconds=2.0)
    found = [(s.id, s.seconds, s.reference) for s in loaded.samples]
    assert found == [("a@0.00", 2.0, "t0 t1"), ("a@2.00", 2.0, "t2 t3"), ("a@4.00", 1.0, "t4")]


def test_without_looking_at_the_audio(folder: Path) -> None:
    rows = lines(folder / "s.jsonl", row(audio="gone.wav", seconds=7.0), row(id="b", audio="gone.wav"))
    assert [s.seconds for s in read_streams(rows, check_audio=False).samples] == [7.0, 1.5]
    with pytest.raises(ValueError, match="field 'seconds': missing; give the audio's length"):
        read_streams(lines(folder / "s.jsonl", row(units=[])), check_audio=False)


UNIT = {"start": 0.5, "end": 1.5, "target": "x"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"units": 3}, "field 'units': 3 is not a list; give"),
        ({"units": ["x"]}, r"field 'units\[0\]': 'x' is not an object"),
        ({"units": [UNIT, {"start": 2, "end": 3}]}, r"field 'units\[1\]\.target': missing; give the text"),
        ({"units": [{**UNIT, "end": "x"}]}, r"field 'units\[0\]\.end': 'x' is not a time"),
        ({"units": [{**UNIT, "start": -1}]}, r"field 'units\[0\]\.start': -1 is not a time; give seconds, 0 or more"),
        ({"units": [{**UNIT, "speaker": 7}]}, r"field 'units\[0\]\.speaker': 7 is not a text"),
        (
            {"units": [{**UNIT, "target_audio": {"path": "no.wav"}}]},
            r"field 'units\[0\]\.target_audio': .*no\.wav: missing",
        ),
        ({"units": [{**UNIT, "end": 0.5}]}, "field 'units': stream 'a': unit 1 lasts from 0.5 to 0.5 s"),
        ({"units": [UNIT, UNIT]}, "field 'units': stream 'a': unit 2 begins at 0.5 s, before the previous one ends"),
        ({"units": [{**UNIT, "end": 6}]}, "field 'units': stream 'a': unit 1 ends at 6 s, after the audio's 5 s"),
        ({"units": ...}, "field 'units': missing; give units, or source and target"),
        ({"audio": "none.wav"}, "field 'audio': .*none.wav: missing; check the path"),
        ({"audio": ...}, "field 'audio': missing or empty"),
        ({"start": 9.0}, "field 'audio': .*start 9 s lies past the end at 5.00 s"),
        ({"sample_rate": 8000}, "field 'audio': .*declared as 8000 Hz but the file has 16000 Hz"),
        ({"source_language": 3}, "field 'source_language': 3 is not a language"),
        ({"metadata": "x"}, "field 'metadata': 'x' is not an object"),
    ],
)
def test_rows_that_cannot_be_used(folder: Path, changes: dict[str, Any], said: str) -> None:
    rows = lines(folder / "s.jsonl", row(id="good"), row(**changes))
    with pytest.raises(ValueError, match=rf"s\.jsonl: row 2, {said}"):
        read_streams(rows)
    loaded = read_streams(rows, on_error="skip")
    assert [s.id for s in loaded.samples] == ["good"] and len(loaded.skipped) == 1
    assert "1 sample, 1 row skipped (first: " in loaded.summary()


@pytest.mark.parametrize(
    ("wav", "said"),
    [
        (np.zeros(2 * RATE, np.float32), "2.0 s of silence, yet with units; name the right recording"),
        (tone(0.03), "stream 'a' lasts 30 ms; give at least 100 ms of audio"),
        (np.full(RATE, np.nan, np.float32), "16000 of 16000 samples are NaN or infinite"),
        (np.zeros(0, np.float32), "holds no samples"),
    ],
)
def test_audio_that_cannot_be_used(folder: Path, wav: np.ndarray, said: str) -> None:
    soundfile.write(folder / "a.wav", wav, RATE, subtype="FLOAT")
    with pytest.raises(ValueError, match=rf"row 1, field 'audio': .*{said}"):
        read_streams(lines(folder / "s.jsonl", row()))
    if len(wav) == 2 * RATE:  # silence without units is a stream
        assert read_streams(lines(folder / "s.jsonl", row(units=[]))).samples[0].seconds == 2.0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "missing; check the path"),
        ("empty.jsonl", b"", "empty; write one JSON object a line"),
        ("x.txt", b"hello", "no data file"),
        ("x.yaml", b"- {wav: \xff}", "not readable as YAML"),
        ("x.yaml", b"- {wav: [", "not readable as YAML"),
        ("x.yaml", b"wav: a", "no list of segments"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: {said}"):
        read_streams(tmp_path / name, on_error="skip", **ENGLISH_SPANISH)


def test_bytes_folders_and_options_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a folder with streams\.jsonl, one \.yaml or RealSI's \.json; it holds"):
        read_streams(tmp_path)
    with pytest.raises(ValueError, match="max_seconds must be positive, got 0"):
        read_streams(tmp_path, max_seconds=0)
    rows = lines(folder / "s.jsonl", row())
    rows.write_bytes(rows.read_bytes() + b'{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="row 2: byte 0xe9 at column 12 is not UTF-8; save the file as UTF-8"):
        read_streams(rows)
    assert len(read_streams(rows, on_error="skip").samples) == 1


# -------------------------------------------------------------------------------------------- pairs with word timings


def words(text: str, every: float = 0.5) -> list[dict[str, Any]]:
    return [{"word": w, "start": k * every, "end": k * every + 0.4} for k, w in enumerate(text.split())]


def pair(source: str, target: str, **changes: Any) -> dict[str, Any]:
    return {"audio": "a.wav", "source": source, "target": target, "words": words(source), **changes, **ENGLISH_SPANISH}


@pytest.mark.parametrize(
    ("made", "units"),
    [
        (
            pair("Wait, please; thank you.", "Espere, por favor; gracias."),
            (
                Unit(0.0, 0.4, "Espere,", "Wait,"),
                Unit(0.5, 0.9, "por favor;", "please;"),
                Unit(1.0, 1.9, "gracias.", "thank you."),
            ),
        ),
        # unequal clauses: the whole pair; without words it lasts as long as its audio
        (pair("Wait, please.", "Espere por favor."), (Unit(0.0, 0.9, "Espere por favor.", "Wait, please."),)),
        (pair("Wait, you.", "Espere, tú.", words=None), (Unit(0.0, 5.0, "Espere, tú.", "Wait, you."),)),
    ],
)
def test_a_pair_in_clauses(folder: Path, made: dict[str, Any], units: tuple[Unit, ...]) -> None:
    (stream,) = read_streams(lines(folder / "s.jsonl", made)).samples
    assert stream.id == "a.wav:1" and stream.units == units


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"words": words("Wait now")}, "field 'words': the words 'Wait now' stand where the source has 'Wait, please"),
        ({"words": words("Wait please now")}, "field 'words': the word 'now' follows after the source has ended"),
        ({"words": words("Wait")}, "field 'words': the words 'Wait' stand where the source has"),
        ({"words": ["Wait"]}, r"field 'words\[0\]': 'Wait' is not an object; give {word, start, end}"),
        ({"words": [{"word": "Wait", "start": 0}]}, r"field 'words\[0\]\.end': missing; give seconds"),
        ({"words": words("Wait, please.", 9.0)}, "field 'words': .* ends at 9.4 s, after the audio's 5 s"),
        ({"source": "  "}, "field 'source': missing or empty; give the source text"),
        ({"target": None}, "field 'target': missing or empty; give the target text"),
    ],
)
def test_pairs_that_cannot_be_used(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"row 1, {said}"):
        read_streams(lines(folder / "s.jsonl", {**pair("Wait, please.", "Espere por favor."), **changes}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Wait, 3.5 minutes: please hold…", ["Wait,", "3.5 minutes:", "please hold…"]),
        ("one clause", ["one clause"]),
        ("He said: “Stop!” Then he left.", ["He said:", "“Stop!”", "Then he left."]),
        ("你好，世界。再见！", ["你好，", "世界。", "再见！"]),
        ("真的？！太好了。", ["真的？！", "太好了。"]),
        ("What?!  Really? ", ["What?!", "Really?"]),
        ("مرحبا، كيف حالك؟", ["مرحبا،", "كيف حالك؟"]),
        ("... to leave , press 2 .", ["... to leave ,", "press 2 ."]),
        ("Well -- yes!! No?", ["Well -- yes!!", "No?"]),
        ("", []),
        ("…", ["…"]),
    ],
)
def test_clauses(text: str, found: list[str]) -> None:
    assert clauses(text) == found


def test_words_may_be_cut_otherwise_than_the_text() -> None:
    spoken = [Word("你", 0.0, 0.2), Word("好", 0.2, 0.4), Word("，", 0.4, 0.5), Word("世界。", 0.6, 1.0)]
    expected = (Unit(0.0, 0.5, "Hello,", "你好，"), Unit(0.6, 1.0, "world.", "世界。"))
    assert align_clauses("你好，世界。", "Hello, world.", spoken) == expected


# ------------------------------------------------------------------------------------------------------------- RealSI


def utterance(start: Any, end: Any, source: Any = "好", target: Any = "good", **changes: Any) -> dict[str, Any]:
    made = {"sub_start_time": start, "sub_end_time": end, "sub_src_text": source, "sub_trg_text": target, "term": []}
    return {**made, **changes}


def talk(*segments: list[dict[str, Any]], vid: str = "zh2en-01-tech") -> dict[str, Any]:
    made = [{"start_time": 0, "end_time": 0, "src_text": "", "trg_text": "", "utterance": s} for s in segments]
    return {"vid": vid, "duration": 4000, "segment": made}


@pytest.fixture
def realsi(tmp_path: Path) -> Callable[..., Path]:
    """The set's own layout: data/zh2en/json/VID.json, data/zh2en/audio/VID.*."""
    (tmp_path / "json").mkdir()
    (tmp_path / "audio").mkdir()

    def write(made: Any, vid: str = "zh2en-01-tech") -> Path:
        path = tmp_path / "json" / f"{vid}.json"
        path.write_text(json.dumps(made, indent=4, ensure_ascii=False), encoding="utf-8")
        soundfile.write(tmp_path / "audio" / f"{vid}.flac", tone(5.0), RATE)
        return path

    return write


def test_a_talk_of_realsi(realsi: Callable[..., Path]) -> None:
    """The declared 4 s are less than the last utterance's end; utterances that overlap a little are parted."""
    term = {"src": "轮询", "trg": "round robin"}
    first = [utterance(280, 1040, "首先，", "First of all,"), utterance(1080, 3400, "就是", "I...", term=[term])]
    path = realsi(talk(first, [utterance(2870, 4200)]))
    (stream,) = read_streams(path).samples
    assert (stream.id, stream.seconds) == ("zh2en-01-tech", 5.0)
    assert (stream.source_language, stream.target_language) == ("zh", "en")
    said = [(0.28, 1.04, "First of all,", "首先，"), (1.08, 3.4, "I...", "就是"), (3.4, 4.2, "good", "好")]
    assert stream.units == tuple(Unit(*unit) for unit in said)
    assert stream.audio.path == str(path.parent.parent / "audio/zh2en-01-tech.flac")
    assert stream.metadata == {"segments": [[0.28, 3.4], [3.4, 4.2]], "terms": [term]}
    assert read_streams(path, check_audio=False).samples[0].seconds == 4.2


def test_talks_in_one_list(realsi: Callable[..., Path]) -> None:
    good, bad = talk([utterance(0, 500), utterance(500, 700)]), talk([utterance(0, 500), utterance(900, 900)], vid="x")
    loaded = read_streams(realsi([good, bad]), on_error="skip", source_language="zh", target_language="en")
    assert [s.id for s in loaded.samples] == ["zh2en-01-tech"] and loaded.skipped[0].row == 4


@pytest.mark.parametrize(
    ("utterances", "said"),
    [
        ([utterance(0, 1500), utterance(400, 2000)], "row 2, field 'sub_start_time': lasts from 0.4 to 2 s, but the"),
        ([utterance(0, 1500), utterance(1400, 1500)], "row 2, field 'sub_start_time': lasts from 1.4 to 1.5 s, but"),
        ([utterance(2000, 3000), utterance(0, 900)], "row 2, .* the previous one until 3 s; sort them, or correct"),
        ([utterance(0, 900), utterance(900, 900)], "row 2, .* lasts from 0.9 to 0.9 s; give an end after the start"),
        ([utterance(0, 900), utterance(900, None)], "row 2, field 'sub_end_time': missing; give ms"),
        ([utterance(0, 900, target=7)], "row 1, field 'sub_trg_text': 7 is not a text"),
        ([utterance(0, 5200)], "row 1, field 'sub_end_time': .*unit 1 ends at 5.2 s, after the audio's 5 s"),
        (["x"], "row 1: 'x' is not an object"),
        (None, "row 1, field 'utterance': missing"),
    ],
)
def test_talks_that_cannot_be_used(realsi: Callable[..., Path], utterances: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"zh2en-01-tech\.json: {said}"):
        read_streams(realsi(talk(utterances)))


def test_a_talk_without_its_audio(realsi: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"row 1, field 'vid': .*zh2en-03-edu\.wav: missing"):
        read_streams(realsi(talk([utterance(0, 500)], vid="zh2en-03-edu")))


# ------------------------------------------------------------------------------------------------------------- MuST-C


@pytest.fixture
def mustc(tmp_path: Path) -> Path:
    """data/tst/txt/tst.yaml with tst.en and tst.es, data/tst/wav/ted_1.wav and ted_2.wav of 5 s."""
    (tmp_path / "txt").mkdir()
    (tmp_path / "wav").mkdir()
    for name in ("ted_1", "ted_2"):
        soundfile.write(tmp_path / "wav" / f"{name}.wav", tone(5.0), RATE)
    (tmp_path / "txt/tst.yaml").write_text(
        "- {duration: 1.25, offset: 0.5, rW: 9, uW: 0, speaker_id: spk.767, wav: ted_1.wav}\n"
        "- {duration: 2.0, offset: 1.75, rW: 9, uW: 0, speaker_id: spk.767, wav: ted_1.wav}\n"
        "- {duration: 1, offset: 0, rW: 9, uW: 0, speaker_id: spk.2, wav: ted_2.wav}\n"
    )
    (tmp_path / "txt/tst.en").write_text("Back in New York,\nI build.\nHi.\n")
    (tmp_path / "txt/tst.es").write_text("En Nueva York,\nconstruyo.\nHola.\n")
    return tmp_path / "txt/tst.yaml"


def read_mustc(path: Path, **options: Any) -> Any:
    return read_streams(path, **ENGLISH_SPANISH, **options)


def test_talks_of_mustc(mustc: Path) -> None:
    first, second = read_mustc(mustc).samples
    assert (first.id, first.seconds, first.metadata) == ("ted_1", 5.0, {"speaker": "spk.767"})
    assert first.units == (
        Unit(0.5, 1.75, "En Nueva York,", "Back in New York,", speaker="spk.767"),
        Unit(1.75, 3.75, "construyo.", "I build.", speaker="spk.767"),
    )
    assert second.audio.path == str(mustc.parent.parent / "wav/ted_2.wav") and second.reference == "Hola."
    assert [s.id for s in read_mustc(mustc.parent).samples] == ["ted_1", "ted_2"]
    mustc.with_suffix(".en").unlink()
    assert read_mustc(mustc).samples[0].units[0].source == ""


def test_texts_of_mustc_that_do_not_fit(mustc: Path) -> None:
    with pytest.raises(ValueError, match=r"tst\.yaml: give source_language=…; there are texts in en, es"):
        read_streams(mustc)
    with pytest.raises(ValueError, match=r"tst\.de: missing; tst\.yaml has texts in en, es"):
        read_streams(mustc, source_language="en", target_language="de")
    mustc.with_suffix(".es").write_bytes(b"En Nueva York,\nconstruyo.\nOl\xe9.\n")
    bad = r"row 3, field 'target': ted_2\.wav: tst\.es: byte 0xe9 at column 3 of line 3"
    with pytest.raises(ValueError, match=bad):
        read_mustc(mustc)
    assert [s.id for s in read_mustc(mustc, on_error="skip").samples] == ["ted_1"]
    mustc.with_suffix(".es").write_text("uno\ndos\n")
    with pytest.raises(ValueError, match=r"tst\.es: 2 lines for 3 segments in tst\.yaml; give one line a segment"):
        read_mustc(mustc)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("offset: 1.75", "offset: 0.6", "row 2, field 'offset': ted_1.wav: lasts from 0.6 to 2.6 s, but the previous"),
        ("offset: 0.5", "offset: 4.0", "row 2, field 'offset': ted_1.wav: lasts from 1.75 to 3.75 s, but the previous"),
        ("duration: 2.0", "duration: 9.0", "row 1, field 'duration': stream 'ted_1': unit 2 ends at 10.75 s, after"),
        ("duration: 2.0", "duration: x", "row 2, field 'duration': ted_1.wav: 'x' is not a time"),
        ("wav: ted_2.wav", "wav: none.wav", "row 3, field 'wav': .*none.wav: missing"),
        ("wav: ted_2.wav", "wav: ''", "row 3, field 'wav': '' is not a text"),
    ],
)
def test_segments_that_cannot_be_used(mustc: Path, old: str, new: str, said: str) -> None:
    mustc.write_text(mustc.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"tst\.yaml: {said}"):
        read_mustc(mustc)
    loaded = read_mustc(mustc, on_error="skip")
    assert len(loaded.samples) == 1 and len(loaded.skipped) == 1, "one bad segment spoils its talk only"


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "- " * 100_000, "{a: " * 100_000, "? " * 100_000, "\n".join(" " * i + "-" for i in range(3000))],
)
def test_deep_yaml_does_not_end_the_process(tmp_path: Path, text: str) -> None:
    """libyaml's loader for Python overflows the stack."""
    for read in (read_streams, read_segments):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"a\.yaml: .*(nested in more than|YAML)"):
            read(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("- {wav: a.wav, offset: 0, duration: 1, reference: '" + "[{" * 500 + "'}\n")
    assert len(read_segments(tmp_path / "a.yaml")) == 1
