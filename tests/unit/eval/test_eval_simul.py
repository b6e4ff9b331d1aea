"""Simultaneous translation: scoring folders, and interpreting with a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.eval import simul
from audiorl.eval.metrics.latency import play
from audiorl.protocols import Request, Schedule
from audiorl.report import charts
from audiorl.report.charts import read_tradeoff
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.formats import write_streams
from audiorl.tasks.simul.logs import Instance, read_log, write_log
from audiorl.tasks.simul.schedules import AlignAtt, EDAtt, LocalAgreement, Offline, Reviewed, WaitK
from audiorl.tasks.simul.streams import Stream, Unit
from audiorl.types import Rollout, Segment
from tests.conftest import make_omni


def said(prediction: str, delays: list[float], reference: str, index: int = 0, source: str = "a.wav") -> Instance:
    elapsed = tuple(d + 100 for d in delays)
    return Instance(index, prediction, tuple(delays), elapsed, len(delays), reference, source, 2000.0)


def simulate(*argv: object, engine: Any = None) -> dict[str, Any]:
    return simul.main(tyro.cli(simul.SimulOptions, args=[str(word) for word in argv]), engine)


def test_scores_a_folder(tmp_path: Path, capsys) -> None:
    instances = [said("a b c d", [1000, 1000, 2000, 2000], "a b c d"), said("", [], "a", 1)]
    write_log(tmp_path, instances, "speech", "text")
    scores = simulate("--score", tmp_path, "--language", "en")
    assert scores["AL"] == pytest.approx(2500 / 3)
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert saved == scores
    assert (saved["unit"], saved["language"], saved["silent"], saved["target_type"]) == ("word", "en", 1, "text")
    names = ["BLEU", "chrF", "chrF++", "TER", "WordF1", "LengthRatio", "Repetition", "AL", "LAAL"]
    assert [name for name in saved if name in names] == names and "AL_CA" in saved
    shown = capsys.readouterr().out
    assert "833.333" in shown and "with computation" in shown


def test_nothing_was_said(tmp_path: Path, capsys) -> None:
    write_log(tmp_path, [said("", [], "a")], "speech", "text")
    simulate("--score", tmp_path, "--language", "de")
    saved = json.loads((tmp_path / "scores.json").read_text())
    assert (saved["AL"], saved["BLEU"], saved["TER"], saved["LengthRatio"]) == (None, 0, 100, 0)
    assert "│ AL " in capsys.readouterr().out


def test_right_to_left_and_written_sources(tmp_path: Path, capsys) -> None:
    one = Instance(0, "مرحبا بكم", (1, 2), (0, 0), 2, "مرحبا بكم", "hello you", 2)
    write_log(tmp_path, [one], "text", "text")
    assert simulate("--score", tmp_path, "--language", "ar")["chrF"] == pytest.approx(100)
    assert "latencies in words" in capsys.readouterr().out
    with pytest.raises(ValueError, match="latencies are words"):
        simulate("--plot", tmp_path / "x.png", tmp_path)


def test_speech_output_with_transcripts(tmp_path: Path) -> None:
    intervals = tuple(play([500, 1500], [400, 400]))
    one = Instance(0, "wavs/0.wav", (500, 1500), (), 1.4, "a b c d", "a.wav", 2000, (400, 400), 500, intervals)
    write_log(tmp_path, [one], "speech", "speech")
    scores = simulate("--score", tmp_path, "--language", "en")
    assert "BLEU" not in scores and scores["DiscontinuitySum"] == 600
    (tmp_path / "asr_transcripts.txt").write_text("a b c d\n")
    assert simulate("--score", tmp_path, "--language", "en")["BLEU"] == pytest.approx(100)


def test_unsegmented_streams(tmp_path: Path) -> None:
    folder, segments = tmp_path / "log", tmp_path / "s.yaml"
    write_log(folder, [said("a b c d", [1000, 1500, 3000, 3500], "", source="talk.wav")], "speech", "text")
    segments.write_text("- {wav: talk.wav, offset: 0, duration: 2}\n- {wav: talk.wav, offset: 2, duration: 2}\n")
    (tmp_path / "s.en").write_text("a b\nc d\n")
    scores = simulate("--score", folder, "--language", "en", "--segments", segments, "--references", tmp_path / "s.en")
    # From each start 1000, 1500 with step 1000: (1000 + 500) / 2, twice.
    assert scores["StreamLAAL"] == scores["LongYAAL"] == 750
    assert scores["StreamLAAL_CA"] == 850 and scores["segments"] == str(segments)


def test_plot(tmp_path: Path) -> None:
    for name, delays in (("wait1", [500, 1000]), ("wait3/a", [1500, 2000]), ("wait3/b", [1000, 2000])):
        write_log(tmp_path / name, [said("a b", delays, "a b")], "speech", "text")
        simulate("--score", tmp_path / name, "--language", "en")
    png = tmp_path / "plots" / "out.png"
    assert simulate("--plot", png, tmp_path / "wait1", tmp_path / "wait3") == {}
    assert png.read_bytes().startswith(b"\x89PNG")
    # LAAL of [1000, 2000] and [1500, 2000] with step 1000, in seconds: 1 and 1.25; a line, fastest first.
    assert read_tradeoff(tmp_path / "wait3", "chrF", "LAAL") == [(1.0, 100.0), (1.25, 100.0)]


def test_folders_that_cannot_be_scored(tmp_path: Path) -> None:
    def refused(message: str, *argv: object) -> None:
        with pytest.raises((ValueError, OSError), match=message):
            simulate(*argv)

    score, plot = ("--score", tmp_path, "--language", "en"), ("--plot", tmp_path / "x.png")
    refused("give --score DIR")
    refused("--language: give the code", *score[:2])
    refused("--references: belongs to --segments", *score, "--references", tmp_path)
    refused(r"config.yaml: no such file", *score)
    refused("those of --plot", tmp_path)
    refused("give the folders to plot", *plot)
    refused("no scores.json there or one folder below", *plot, tmp_path)
    (tmp_path / "scores.json").write_text('{"LAAL": null, "chrF": 3}')
    refused(r"scores.json: LAAL: None; score the folder", *plot, tmp_path)
    write_log(tmp_path, [said("a", [1], "a")], "speech", "text")
    refused("No such file", *score, "--sources", tmp_path / "none")


@dataclass
class Echo:
    """An engine that writes each turn's reference, 0.1 s of computing a turn."""

    asked: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    schedules: list[Schedule | None] = field(default_factory=list)
    fail_after: int | None = None
    silent: bool = False
    policy_version: int = 0

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise KeyboardInterrupt
        if any(t.audio.load().any() for r in requests for t in r.sample.turns):  # silence warms up
            self.asked += [r.sample.id for r in requests]
            self.sizes.append(len(requests))
            self.schedules += [r.schedule for r in requests]
        return [self._written(r) for r in requests]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    def _written(self, request: Request) -> Rollout:
        segments = tuple(
            Segment(
                prompt_ids=torch.arange(3),
                ids=torch.arange(2),
                logprobs=torch.zeros(2),
                text="" if self.silent else turn.reference,
                source_time=turn.end,
                emit_time=turn.end + 0.1 * (t + 1),
            )
            for t, turn in enumerate(request.sample.turns)
        )
        return Rollout(request.sample, segments, request.sample.id)


def speak(id: str, *units: Unit, target: str = "es", seconds: float = 3.5) -> Stream:
    wav = (0.3 * np.sin(np.arange(round(seconds * 16_000)) / 10)).astype(np.float32)
    return Stream(id, AudioClip(array=wav, sample_rate=16_000), seconds, units, "en", target)


UNITS = (Unit(0.0, 0.9, "uno dos", "one two"), Unit(1.0, 2.8, "tres cuatro", "three four"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three streams, of which "b" has no reference."""
    write_streams(tmp_path / "data", [speak("a", *UNITS), speak("b"), speak("c", *UNITS[:1])])
    return tmp_path / "data" / "streams.jsonl"


def args(file: Path | str, out: Path, *more: str) -> list[str]:
    return ["--model", "m", "--streams", str(file), "--out", str(out), "--chunk-seconds", "1", *more]


def test_interprets_logs_and_scores(file: Path, tmp_path: Path, capsys) -> None:
    with file.open("a") as rows:
        row = {"id": "d", "audio": "none.flac", "source_language": "en", "target_language": "es", "units": []}
        rows.write(json.dumps(row) + "\n")
    engine = Echo()
    scores = simulate(*args(file, tmp_path / "out"), engine=engine)
    assert engine.asked == ["a", "b", "c"] and engine.sizes == [1, 1, 1]
    out, err = capsys.readouterr()
    assert "1 of 3 streams have no reference" in out and "│ skipped " in out
    assert "1 row skipped" in err and "none.flac" in err

    counts = {name: scores[name] for name in ("instances", "silent", "skipped", "unscored")}
    assert counts == {"instances": 2, "silent": 0, "skipped": 1, "unscored": 1}
    assert scores["chrF"] == pytest.approx(100) and scores["bleu_tokenizer"] == "13a"
    # "uno dos" after 1 s and "tres cuatro" after 3 s come after the ends of their units, which began at 0 and 1 s: what
    # counts is when the first word came, 1000 and 2000 ms from there; "c" again 1000.
    assert scores["StreamLAAL"] == pytest.approx((1000 + 2000 + 1000) / 3)
    # Each chunk takes 0.1 s; the second write of "a" is late by the computing since the first: 200 ms.
    assert scores["StreamLAAL_CA"] == pytest.approx((1100 + 2200 + 1100) / 3)
    assert scores["cumulative_elapsed"] is True
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores
    assert scores["run"]["streams"] == "streams.jsonl" and scores["run"]["batch_size"] == 1

    scored, bare = read_log(tmp_path / "out"), read_log(tmp_path / "out" / "unscored")
    assert [i.prediction for i in scored] == ["uno dos tres cuatro", "uno dos"]
    assert (bare[0].source, bare[0].reference) == (str(file.parent / "audio" / "b.flac"), None)
    again = ["--score", str(tmp_path / "out"), "--language", "es", "--cumulative-elapsed"]
    again += ["--segments", str(tmp_path / "out" / "segments.yaml")]
    rescored = simulate(*again)
    assert rescored == {k: v for k, v in scores.items() if k not in ("skipped", "unscored", "cut")}


def test_goes_on_where_it_stopped(file: Path, tmp_path: Path) -> None:
    words = args(file, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        simulate(*words, engine=Echo(fail_after=2))
    with (tmp_path / "out" / "rollouts.jsonl").open("a") as rows:
        rows.write('{"id": "c", "te')  # torn
    engine = Echo()
    scores = simulate(*words, engine=engine)
    assert engine.asked == ["c"]
    whole = simulate(*args(file, tmp_path / "whole"), engine=Echo())
    for name in ("instances.log", "segments.yaml", "rollouts.jsonl"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert scores["segments"] != whole["segments"] and scores["StreamLAAL"] == whole["StreamLAAL"]
    with pytest.raises(ValueError, match=r"other settings \(chunk_seconds: 1.0 -> 2.0\)"):
        simulate(*words, "--chunk-seconds", "2", engine=Echo())


def test_operating_points(file: Path, tmp_path: Path, capsys) -> None:
    argv = args(file, tmp_path / "out")
    argv[-1:] = ["1", "2", "--schedule", "wait-2"]
    engine = Echo()
    simulate(*argv, engine=engine)
    assert (tmp_path / "out" / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    for seconds in (1, 2):
        scores = json.loads((tmp_path / "out" / f"chunk-{seconds}" / "scores.json").read_text())
        assert scores["run"]["chunk_seconds"] == seconds
    # The references have 4 + 2 words in 3.5 + 3.5 s.
    assert engine.schedules[0] == WaitK(2, 6 / 7, "es") and engine.schedules[-1] == WaitK(2, 12 / 7, "es")
    argv[argv.index(str(tmp_path / "out"))] = str(tmp_path / "silent")
    simulate(*argv, engine=Echo(silent=True))
    assert "nothing was written in chunk-1, chunk-2" in capsys.readouterr().out
    assert json.loads((tmp_path / "silent" / "chunk-1" / "scores.json").read_text())["StreamLAAL"] is None


def test_chunks_may_be_shorter_than_any_stream(file: Path, tmp_path: Path) -> None:
    """So the stream that warms up is longer than a chunk."""
    assert simulate(*args(file, tmp_path / "out", "--chunk-seconds", "0.04"), engine=Echo())["instances"] == 2


def test_schedules() -> None:
    def named(schedule: str, streams: Sequence[Stream] = (), **given: Any) -> Schedule | None:
        options = simul.SimulOptions(model="m", schedule=(schedule,), **given)
        return simul.schedule_of(options, schedule, streams or [speak("a", *UNITS)], 0.5)

    assert named("policy") is None and named("offline") == Offline("es")
    assert named("local-agreement-2") == Reviewed(LocalAgreement(2), "es")
    assert named("alignatt-0") == Reviewed(AlignAtt(0), "es")
    assert named("alignatt-8", attention_layers=(3, 4)) == Reviewed(AlignAtt(8, (3, 4)), "es")
    assert named("edatt-0.3") == Reviewed(EDAtt(0.3), "es")
    assert named("edatt-.25-4", attention_layers=(1,)) == Reviewed(EDAtt(0.25, 4, (1,)), "es")
    assert named("wait-3", rate=2.0) == WaitK(3, 1.0, "es")
    assert named("wait-3", [speak("a", *UNITS), speak("b")]) == WaitK(3, 4 * 0.5 / 3.5, "es")
    with pytest.raises(ValueError, match="no references to take the rate from; give --rate"):
        named("wait-3", [speak("b")])
    for name in ("wait3", "wait-1.5", "edatt-", "edatt-1-2-3", "alignatt", "local-agreement", "wait-2\n"):
        with pytest.raises(ValueError, match=rf"--schedule: {re.escape(repr(name))}; give policy, offline, wait-K"):
            named(name)
    for name, problem in {
        "local-agreement-1": "local agreement: n must be at least 2, got 1",
        "edatt-0": "edatt: alpha must be in (0, 1] and frames at least 1, got 0 and 2",
        "edatt-0.5-0": "got 0.5 and 0",
        "wait-0": "k must be at least 1",
    }.items():
        with pytest.raises(ValueError, match=re.escape(problem)):
            named(name)


def test_nothing_to_score(tmp_path: Path, capsys) -> None:
    write_streams(tmp_path / "data", [speak("b")])
    assert simulate(*args(tmp_path / "data", tmp_path / "out"), engine=Echo()) == {}
    assert "1 of 1 streams have no reference" in capsys.readouterr().out
    assert len(read_log(tmp_path / "out" / "unscored")) == 1
    assert not (tmp_path / "out" / "scores.json").exists()


def test_what_cannot_be_interpreted(file: Path, tmp_path: Path) -> None:
    both, out = tmp_path / "both", tmp_path / "out"
    write_streams(both, [speak("a", *UNITS), speak("f", *UNITS, target="fr")])
    for words, message in (
        (["--model", "m"], "give --model, --streams and --out"),
        (args(tmp_path / "none.jsonl", out), r"none.jsonl: missing"),
        (args("bundled:es/all", out), "bundled:es/all: missing"),
        (args(file, out, "--batch-size", "0"), "batch_size must be at least 1"),
        (args(file, out, "--rate", "2"), "--rate: belongs to --schedule wait-K"),
        (args(file, out, "--attention-layers", "1"), "--attention-layers: belongs to --schedule alignatt"),
        (args(file, out, "--schedule", "wait-2", "wait-2"), "--schedule: give one or more, each once"),
        (args(both, out), "translations into es, fr; choose by --target-language"),
        (args(both, out, "--target-language", "de"), "nothing to interpret"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(*words, engine=Echo())
    assert simulate(*args(both, tmp_path / "fr", "--target-language", "fr"), engine=Echo())["skipped"] == 1


def test_a_model_on_bundled_streams(tmp_path: Path) -> None:
    """A tiny random model from disk, alone and two streams at once: the same text."""
    make_omni().save(tmp_path / "model")
    argv = ["--model", str(tmp_path / "model"), "--streams", "bundled:es/test", "--limit", "2", "--device", "cpu"]
    argv += ["--max-new-tokens", "3", "--chunk-seconds", "3.84"]
    simulate(*argv, "--out", str(tmp_path / "one"))
    simulate(*argv, "--out", str(tmp_path / "two"), "--batch-size", "2")
    one, two = read_log(tmp_path / "one"), read_log(tmp_path / "two")
    assert [(i.prediction, i.delays) for i in one] == [(i.prediction, i.delays) for i in two]
    assert all(i.timed for i in one) and any(i.prediction for i in one)
    assert [i.source for i in one] == [s.id for s in bundled_streams("test", "es", count=2)]


def test_several_schedules_of_one_model_make_one_picture(tmp_path: Path, monkeypatch) -> None:
    """Every schedule has its folder; points of one kind are one line; each costs the passes that it says."""
    make_omni().save(tmp_path / "model")
    out = tmp_path / "out"
    argv = ["--model", str(tmp_path / "model"), "--streams", "bundled:es/test", "--limit", "1", "--device", "cpu"]
    argv += ["--max-new-tokens", "3", "--chunk-seconds", "3.84", "--out", str(out), "--schedule"]
    names = ["policy", "wait-2", "local-agreement-2", "alignatt-4", "alignatt-40", "edatt-0.3", "offline"]
    drawn: list[list[str]] = []
    plot = charts.plot_tradeoff

    def draw(folders: Sequence[Path], *args: object, **kw: object) -> Path:
        drawn.append([str(f.relative_to(out)) for f in folders])
        return plot(folders, *args, **kw)

    monkeypatch.setattr(charts, "plot_tradeoff", draw)
    simulate(*argv, *names)
    folders = [
        "policy", "wait/2", "local-agreement/2", "alignatt/4", "alignatt/40", "edatt/0.3", "offline",
    ]  # fmt: skip
    scores = {f: json.loads((out / f / "scores.json").read_text()) for f in folders}
    assert drawn == [["policy", "wait", "local-agreement", "alignatt", "edatt", "offline"]]
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert scores["alignatt/4"]["run"]["schedule"].startswith("Reviewed(review=AlignAtt(frames=4")
    # The last of n turns has the room of all of them; this model writes until there is none.
    (row,) = [json.loads(line) for line in (out / "offline" / "rollouts.jsonl").read_text().splitlines()]
    *silent, last = row["segments"]
    most = 3 * len(row["segments"])
    assert scores["offline"]["run"]["room"] == scores["wait/2"]["run"]["room"] == "all turns"
    assert not any(s["text"] for s in silent) and (last["decoder_passes"], last["stop_reason"]) == (most, "length")
    assert scores["offline"]["cut"] == 1 / len(row["segments"]) and scores["policy"]["cut"] == 1
    assert scores["policy"]["run"]["max_new_tokens"] == 3 and "room" not in scores["policy"]["run"]
    assert scores["policy"]["DecoderPasses"] > 1 and scores["policy"]["run"]["schedule"] is None
    rows = [json.loads(line) for line in (out / "alignatt/4" / "rollouts.jsonl").read_text().splitlines()]
    passes = [s["decoder_passes"] for row in rows for s in row["segments"]]
    assert scores["alignatt/4"]["DecoderPasses"] == pytest.approx(np.mean(passes))


def test_a_log_is_scored_without_torch(tmp_path: Path) -> None:
    row = {"index": 0, "prediction": "guten morgen", "delays": [1000, 2000], "elapsed": [0, 0], "prediction_length": 2}
    row |= {"reference": "guten morgen zusammen", "source": ["b.wav", ""], "source_length": 3000}
    (tmp_path / "instances.log").write_text(json.dumps(row) + "\n")
    (tmp_path / "config.yaml").write_text("source_type: speech\ntarget_type: text\n")
    command = ["eval", "simul", "--score", str(tmp_path), "--language", "de"]
    heavy = "{'torch', 'transformers', 'matplotlib', 'scipy', 'datasets'} & sys.modules.keys()"
    code = f"import sys; from audiorl.cli import main; sys.exit(main({command}) or str({heavy} or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.stderr.strip(), done.stderr
    assert json.loads((tmp_path / "scores.json").read_text())["instances"] == 1
