import json
from pathlib import Path

import pytest
import tyro

from audiorl.eval import simul
from audiorl.eval.metrics.latency import play
from audiorl.report.charts import read_tradeoff
from audiorl.tasks.simul.logs import Instance, write_log


def said(prediction: str, delays: list[float], reference: str, index: int = 0, source: str = "a.wav") -> Instance:
    elapsed = tuple(d + 100 for d in delays)
    return Instance(index, prediction, tuple(delays), elapsed, len(delays), reference, source, 2000.0)


def test_scores_a_folder(tmp_path: Path, capsys) -> None:
    instances = [said("a b c d", [1000, 1000, 2000, 2000], "a b c d"), said("", [], "a", 1)]
    write_log(tmp_path, instances, "speech", "text")
    scores = simul.main(tyro.cli(simul.SimulOptions, args=["--score", str(tmp_path), "--language", "en"]))
    assert scores["AL"] == pytest.approx(2500 / 3)
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved == scores
    assert (saved["unit"], saved["language"], saved["silent"], saved["target_type"]) == ("word", "en", 1, "text")
    names, values = (line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines())
    assert names[:9] == ["BLEU", "chrF", "chrF++", "TER", "WordF1", "LengthRatio", "Repetition", "AL", "LAAL"]
    assert dict(zip(names, values, strict=True))["AL"] == "833.333"
    assert "AL_CA" in names
    assert "silent" not in names
    shown = capsys.readouterr().out
    assert "0.833 s" in shown
    assert "with computation" in shown


def test_nothing_was_said(tmp_path: Path, capsys) -> None:
    write_log(tmp_path, [said("", [], "a")], "speech", "text")
    simul.main(simul.SimulOptions(score=tmp_path, language="de"))
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved["AL"] is None
    assert saved["BLEU"] == 0
    assert (saved["TER"], saved["LengthRatio"]) == (100, 0)
    assert (tmp_path / "scores.tsv").read_text().splitlines()[1].endswith("0.000\t0.000" + 10 * "\t")
    assert "│ AL " in capsys.readouterr().out


def test_right_to_left_and_written_sources(tmp_path: Path, capsys) -> None:
    one = Instance(0, "مرحبا بكم", (1, 2), (0, 0), 2, "مرحبا بكم", "hello you", 2)
    write_log(tmp_path, [one], "text", "text")
    scores = simul.main(simul.SimulOptions(score=tmp_path, language="ar"))
    assert scores["chrF"] == pytest.approx(100)
    assert "1.000 words" in capsys.readouterr().out
    with pytest.raises(ValueError, match="latencies are words"):
        simul.main(simul.SimulOptions(plot=tmp_path / "x.png", folders=(tmp_path,)))


def test_speech_output_with_transcripts(tmp_path: Path) -> None:
    intervals = tuple(play([500, 1500], [400, 400]))
    one = Instance(0, "wavs/0.wav", (500, 1500), (), 1.4, "a b c d", "a.wav", 2000, (400, 400), 500, intervals)
    write_log(tmp_path, [one], "speech", "speech")
    scores = simul.main(simul.SimulOptions(score=tmp_path, language="en"))
    assert "BLEU" not in scores
    assert scores["DiscontinuitySum"] == 600
    (tmp_path / "asr_transcripts.txt").write_text("a b c d\n")
    assert simul.main(simul.SimulOptions(score=tmp_path, language="en"))["BLEU"] == pytest.approx(100)


def test_unsegmented_streams(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    write_log(folder, [said("a b c d", [1000, 1500, 3000, 3500], "", source="talk.wav")], "speech", "text")
    segments = tmp_path / "s.yaml"
    segments.write_text("- {wav: talk.wav, offset: 0, duration: 2}\n- {wav: talk.wav, offset: 2, duration: 2}\n")
    (tmp_path / "s.en").write_text("a b\nc d\n")
    options = simul.SimulOptions(score=folder, language="en", segments=segments, references=tmp_path / "s.en")
    scores = simul.main(options)
    # From each start 1000, 1500 with step 1000: (1000 + 500) / 2, twice.
    assert scores["StreamLAAL"] == scores["LongYAAL"] == 750
    assert scores["StreamLAAL_CA"] == 850
    assert scores["segments"] == str(segments)
    with pytest.raises(ValueError, match="--references: belongs to --segments"):
        simul.main(simul.SimulOptions(score=folder, language="en", references=segments))


def test_plot(tmp_path: Path) -> None:
    for name, delays in (("wait1", [500, 1000]), ("wait3/a", [1500, 2000]), ("wait3/b", [1000, 2000])):
        write_log(tmp_path / name, [said("a b", delays, "a b")], "speech", "text")
        simul.main(simul.SimulOptions(score=tmp_path / name, language="en"))
    png = tmp_path / "plots" / "out.png"
    args = ["--plot", str(png), str(tmp_path / "wait1"), str(tmp_path / "wait3"), "--plot-quality", "BLEU"]
    assert simul.main(tyro.cli(simul.SimulOptions, args=args)) == {}
    assert png.read_bytes().startswith(b"\x89PNG")
    # LAAL of [1000, 2000] and [1500, 2000] with step 1000, in seconds: 1 and 1.25; a line, fastest first.
    assert read_tradeoff(tmp_path / "wait3", "chrF", "LAAL") == [(1.0, 100.0), (1.25, 100.0)]


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --score DIR"):
        simul.main(simul.SimulOptions())
    with pytest.raises(ValueError, match="--language: give the code"):
        simul.main(simul.SimulOptions(score=tmp_path))
    with pytest.raises(ValueError, match=r"config.yaml: no such file"):
        simul.main(simul.SimulOptions(score=tmp_path, language="en"))
    with pytest.raises(ValueError, match="those of --plot"):
        simul.main(simul.SimulOptions(folders=(tmp_path,)))
    with pytest.raises(ValueError, match="give the folders to plot"):
        simul.main(simul.SimulOptions(plot=tmp_path / "x.png"))
    with pytest.raises(ValueError, match=r"no scores.json there or one folder below"):
        simul.main(simul.SimulOptions(plot=tmp_path / "x.png", folders=(tmp_path,)))
    (tmp_path / "scores.json").write_text('{"LAAL": null, "chrF": 3}')
    with pytest.raises(ValueError, match=r"scores.json: LAAL: None; score the folder"):
        simul.main(simul.SimulOptions(plot=tmp_path / "x.png", folders=(tmp_path,)))
    write_log(tmp_path, [said("a", [1], "a")], "speech", "text")
    with pytest.raises(ValueError, match="no such file"):
        simul.main(simul.SimulOptions(score=tmp_path, language="en", sources=tmp_path / "none"))
