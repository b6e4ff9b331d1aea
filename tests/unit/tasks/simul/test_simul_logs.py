"""Logs as SimulEval writes and reads them, and reference segmentations."""

import dataclasses
import json
from pathlib import Path

import pytest

from audiorl.eval.metrics.latency import play
from audiorl.tasks.simul.logs import Instance, read_log, read_types, write_log
from audiorl.tasks.simul.talks import match_segments, read_segments

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "simuleval_1.1.4.json").read_text(encoding="utf-8"))

LINE = {
    "index": 0, "prediction": "we go", "delays": [960, 1600.0], "elapsed": [1010.5, 1702.0], "prediction_length": 2,
    "reference": "we walk", "source": ["talk.wav", "samplerate: 16000 Hz"], "source_length": 2400.0,
}  # fmt: skip
SPOKEN = LINE | {
    "prediction": "wavs/0_pred.wav", "prediction_length": 0.8, "elapsed": [], "durations": [700.0, 100.0],
    "prediction_offset": 960, "intervals": [[960, 700.0], [1660.0, 100.0]],
}  # fmt: skip


def save(folder: Path, *lines: object, target: str = "text", source: str = "speech") -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "instances.log").write_text(text, encoding="utf-8")
    (folder / "config.yaml").write_text(f"source_type: {source}\ntarget_type: {target}\n")
    return folder


def instance(**changes) -> Instance:
    one = Instance(0, "we go", (960, 1600.0), (1010.5, 1702.0), 2, "we walk", ("talk.wav",), 2400.0)
    return dataclasses.replace(one, **changes)


@pytest.mark.parametrize("place", range(len(VECTORS["logs"])))
def test_reads_what_simuleval_writes_and_writes_it_again(place: int, tmp_path: Path) -> None:
    log = VECTORS["logs"][place]
    first = read_log(save(tmp_path / "a", *log["instances"], target=log["target_type"], source=log["source_type"]))
    assert [i.delays for i in first] == [tuple(line["delays"]) for line in log["instances"]]
    assert all(i.speech == (log["target_type"] == "speech") for i in first)
    write_log(tmp_path / "b", first, log["source_type"], log["target_type"])
    assert read_log(tmp_path / "b") == first
    written = [json.loads(line) for line in (tmp_path / "b" / "instances.log").read_text("ascii").splitlines()]
    assert written == log["instances"]  # the same fields with the same values
    assert read_types(tmp_path / "b") == (log["source_type"], log["target_type"])


def test_played_intervals_are_those_simuleval_logs() -> None:
    lines = [line for log in VECTORS["logs"] if log["target_type"] == "speech" for line in log["instances"]]
    for line in lines:
        assert [list(i) for i in play(line["delays"], line["durations"])] == line["intervals"]
    assert len(lines) == 36


def test_fields(tmp_path: Path) -> None:
    (one,) = read_log(save(tmp_path, LINE))
    assert one == instance(source=("talk.wav", "samplerate: 16000 Hz")) and one.timed
    (two,) = read_log(save(tmp_path, SPOKEN, target="speech"))
    assert two.durations == (700.0, 100.0) and two.intervals == ((960, 700.0), (1660.0, 100.0)) and not two.timed
    silence = {**LINE, "prediction": "", "delays": [], "elapsed": [], "prediction_length": 0}
    (silent,) = read_log(save(tmp_path, silence))
    assert (silent.delays, silent.prediction_length) == ((), 0)
    (text,) = read_log(save(tmp_path, {**LINE, "elapsed": [0, 0], "source": "wir gehen"}, source="text"))
    assert not text.timed  # SimulEval writes zeros where the source is text
    (long,) = read_log(save(tmp_path, {**LINE, "reference": None}))
    assert long.reference is None
    pieces = {**LINE, "prediction_spm": ["▁we", "▁g", "o"], "delays": [1, 2, 3], "elapsed": [], "prediction_length": 3}
    assert len(read_log(save(tmp_path, pieces))[0].delays) == 3


def test_right_to_left_chinese_and_odd_line_ends(tmp_path: Path) -> None:
    arabic = instance(prediction="أهلا بكم", reference="أهلاً بكم جميعاً")
    chinese = instance(index=1, prediction="我\u2028们", delays=(1, 2, 3), elapsed=(1, 2, 3), prediction_length=3)
    write_log(tmp_path, [arabic, chinese], "speech", "text")
    assert read_log(tmp_path) == [arabic, chinese]
    raw = json.dumps({**LINE, "prediction": "שלום \u0085 לך"}, ensure_ascii=False) + "\r\n"
    (tmp_path / "instances.log").write_bytes(raw.encode())
    assert read_log(tmp_path)[0].prediction == "שלום \u0085 לך"


def test_simulevals_overwritten_target_type(tmp_path: Path) -> None:
    """After scoring, SimulEval 1.1.4 leaves the source type under both names."""
    assert not read_log(save(tmp_path, LINE, target="speech"))[0].speech
    save(tmp_path, LINE, source="youtube", target="youtube")
    assert read_types(tmp_path) == ("youtube", "speech")
    assert len(read_log(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delays": [1600, 960]}, r"line 2: delays: 960 after 1600 \(entry 1\) goes backwards"),
        ({"delays": [-1, 960]}, r"line 2: delays\[0\]: -1 is not a number from 0"),
        ({"delays": [float("nan"), 960]}, r"delays\[0\]: nan"),
        ({"delays": [960, float("inf")]}, r"delays\[1\]: inf"),
        ({"delays": [True, 960]}, r"delays\[0\]: True"),
        ({"delays": ["960", 961]}, r"delays\[0\]: '960'"),
        ({"delays": 960}, "delays: 960 is not a list of numbers"),
        ({"elapsed": [900, 1702]}, r"elapsed: 900 is below delays\[0\] = 960"),
        ({"elapsed": [1800, 1702]}, "elapsed: 1702 after 1800"),
        ({"elapsed": [1010]}, "elapsed: 1 times for 2 delays"),
        ({"prediction": "we go home"}, r"delays: 2 for 3 words \(8 characters\) of prediction"),
        ({"prediction_length": 3}, "prediction_length: 3, but there are 2 delays"),
        ({"prediction": None}, "prediction: missing; give the text"),
        ({"reference": ["a"]}, "reference: .* is not a text"),
        ({"source": 3}, "source: 3 is not text or a list of texts"),
        ({"source_length": 0}, "source_length: 0 is not a length; give ms, more than 0"),
        ({"index": "1"}, "index: '1' is not a whole number"),
        ({"index": -1}, "index: -1 is not a whole number"),
        ({"index": 7}, "line 2: index: 7 is also that of line 1"),
    ],
)
def test_malformed_fields(changes: dict, message: str, tmp_path: Path) -> None:
    folder = save(tmp_path, {**LINE, "index": 7}, {**LINE, **changes})
    with pytest.raises(ValueError, match=message) as error:
        read_log(folder)
    assert str(folder / "instances.log") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"durations": [700.0]}, "durations: 1 for 2 delays"),
        ({"durations": [700.0, 0]}, r"durations\[1\]: 0 is not a duration; leave out"),
        ({"intervals": [[960, 700.0], [1600.0, 100.0]]}, r"intervals: chunk 1 starts at 1600.0, .* ended \(1660.0\)"),
        ({"intervals": [[900, 700.0], [1660.0, 100.0]]}, r"intervals: chunk 0 .* ready \(960\)"),
        ({"intervals": [960, 1660]}, r"intervals\[0\]: 960 is not \[start, duration\]; give both in ms"),
        *(({name: ...}, f"{name}: missing") for name in SPOKEN),
    ],
)
def test_malformed_speech(changes: dict, message: str, tmp_path: Path) -> None:
    line = {name: value for name, value in {**SPOKEN, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match="line 1: " + message):
        read_log(save(tmp_path, line, target="speech"))


def test_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.yaml: no such file; a log is a folder with instances.log and config"):
        read_log(tmp_path)
    for lines, target, message in (
        ([LINE, json.dumps(LINE)[:40]], "text", "line 2: not JSON"),
        ([LINE, ""], "text", "line 2: empty"),
        ([], "text", "line 1: empty"),
        ([[LINE]], "text", "line 1: expected a JSON object"),
        ([SPOKEN], "text", "line 1: durations: speech output, but target_type"),
        ([SPOKEN, {**LINE, "index": 1}], "speech", "line 2: durations: speech and text outputs in one log"),
        ([LINE], "video", r"config.yaml: target_type: 'video' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            read_log(save(tmp_path, *lines, target=target))
    for config, message in (("source_type speech", "write the lines"), ("{", "write the lines .* not YAML")):
        (tmp_path / "config.yaml").write_text(config)
        with pytest.raises(ValueError, match=f"config.yaml: {message}"):
            read_log(tmp_path)
    save(tmp_path, LINE)
    (tmp_path / "instances.log").write_bytes(json.dumps(LINE).encode() + b'\n{"prediction": "na\xefve"}\n')
    with pytest.raises(ValueError, match=r"instances.log, line 2: not UTF-8"):
        read_log(tmp_path)
    (tmp_path / "instances.log").unlink()
    with pytest.raises(ValueError, match=r"instances.log: no such file"):
        read_log(tmp_path)
    with pytest.raises(ValueError, match="instance 0: delays: 960 after 1600"):
        write_log(tmp_path / "out", [instance(delays=(1600, 960))], "speech", "text")
    assert not (tmp_path / "out").exists()


def test_segments(tmp_path: Path) -> None:
    yaml = tmp_path / "tst.yaml"
    yaml.write_text(
        "- {duration: 2.0, offset: 3.5, speaker_id: a, wav: a.wav}\n- {duration: 1, offset: 0, wav: b.wav}\n"
        "- {duration: 1.5, offset: 1, wav: a.wav}\n"
    )
    references = tmp_path / "tst.ar"
    references.write_text("في البحر\nb\nمرحبا\n", encoding="utf-8")
    recordings = read_segments(yaml, references)
    found = [(s.start, s.duration, s.reference) for s in recordings["a.wav"]]
    assert found == [(1000, 1500, "مرحبا"), (3500, 2000, "في البحر")]
    matched = match_segments([instance(source="/data/wav/b.wav"), instance(index=4, source=("a",))], recordings)
    assert [s.reference for s in matched[0]] == ["b"] and matched[4] == recordings["a.wav"]
    rows = [{"wav": "a", "offset": 0, "duration": 1, "reference": "x"}]
    (tmp_path / "s.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "s.json").write_text(json.dumps(rows))
    assert read_segments(tmp_path / "s.jsonl") == read_segments(tmp_path / "s.json")


def test_malformed_segments(tmp_path: Path) -> None:
    path, good = tmp_path / "s.json", {"wav": "a", "offset": 0, "duration": 1, "reference": "x"}
    for text, message in (
        (json.dumps([{**good, "wav": None}]), "segment 1: wav: missing; name the recording"),
        (json.dumps([{**good, "offset": -1}]), "segment 1: offset: -1"),
        (json.dumps([{**good, "duration": 0}]), "segment 1: duration: 0 is not a duration"),
        (json.dumps([{**good, "duration": "1"}]), "segment 1: duration: '1'"),
        (json.dumps([{**good, "reference": None}]), "segment 1: reference: missing; write it here"),
        ("[", "s.json: not a JSON list"),
        ("{}", "segment 1: wav: missing"),
        ("[]", "s.json: "),
        ("[1]", "s.json: row 1: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_segments(path)
    path.write_text(json.dumps([good]))
    (tmp_path / "ref").write_text("x\ny\n")
    with pytest.raises(ValueError, match="2 lines for 1 segments"):
        read_segments(path, tmp_path / "ref")
    with pytest.raises(ValueError, match=r"no segments for 'b.wav'; the segmentation has a"):
        match_segments([instance(source="b.wav")], read_segments(path))
    with pytest.raises(ValueError, match="also that of instance 0"):
        match_segments([instance(source="a"), instance(index=1, source="a")], read_segments(path))
    path.write_text(json.dumps([good, {**good, "wav": "c"}]))
    with pytest.raises(ValueError, match="no output for c"):
        match_segments([instance(source="a")], read_segments(path))
