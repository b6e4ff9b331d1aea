import dataclasses
import json
import math
from pathlib import Path

import pytest

from audiorl.eval.metrics.latency import latency_unit
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.tasks.simul.logs import Instance, read_log, write_log
from audiorl.tasks.simul.quality import bleu_tokenizer, quality_score
from audiorl.tasks.simul.scoring import score

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "simuleval_1.1.4.json").read_text(encoding="utf-8"))


def said(prediction: str, delays: list[float], reference: str | None = "a b c d", index: int = 0, **more) -> Instance:
    return Instance(
        index=index,
        prediction=prediction,
        delays=tuple(delays),
        elapsed=tuple(more.pop("elapsed", ())),
        prediction_length=len(delays),
        reference=reference,
        source=more.pop("source", "a.wav"),
        source_length=more.pop("source_length", 2000.0),
        **more,
    )


@pytest.mark.parametrize("place", range(len(VECTORS["logs"])))
def test_corpus_scores_equal_simuleval(place: int, tmp_path: Path) -> None:
    log = VECTORS["logs"][place]
    (tmp_path / "instances.log").write_text("".join(json.dumps(line) + "\n" for line in log["instances"]))
    (tmp_path / "config.yaml").write_text(f"source_type: {log['source_type']}\ntarget_type: {log['target_type']}\n")
    instances = read_log(tmp_path)
    if log["target_type"] == "speech":  # SimulEval knows the elapsed times of speech while it runs, and logs none
        instances = [
            dataclasses.replace(i, elapsed=tuple(elapsed)) for i, elapsed in zip(instances, log["elapsed"], strict=True)
        ]
    scores = score(
        instances,
        log["target_type"],
        "zh" if log["unit"] == "char" else "en",
        source_type=log["source_type"],
        quality=(),
        use_reference_length=log["use_reference_length"],
    )
    same = {"NumChunks_CA", "DiscontinuitySum_CA", "DiscontinuityAve_CA", "DiscontinuityNum_CA"}
    expected = {name: value for name, value in log["scores"].items() if name not in same}
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6, rel=0)
    assert ("AL_CA" in scores) == (log["source_type"] == "speech")
    assert (scores["instances"], scores["silent"]) == (12, 1)
    for name in same & set(log["scores"]):
        assert log["scores"][name] == log["scores"][name.removesuffix("_CA")]  # counted once is enough


def test_means_and_what_is_left_out() -> None:
    rows = [
        said("a b c d", [1000, 1000, 2000, 2000], elapsed=[1100, 1200, 2300, 2400]),
        said("", [], index=1),
        said("a", [500], "a", index=2, elapsed=[700]),
    ]
    scores = score(rows, "text", "en")
    assert scores["AL"] == scores["LAAL"] == pytest.approx((2500 / 3 + 500) / 2)
    # With elapsed times, step 500: (1100 + 700 + 1300) / 3 up to the first one past the end; and 700.
    assert scores["AL_CA"] == pytest.approx((3100 / 3 + 700) / 2)
    assert scores["StartOffset"] == 750 and "FLAL" not in scores  # which is of paragraphs
    assert scores["EndOffset"] == (0 - 1500) / 2
    assert scores["NumChunks"] == 2.5
    assert scores["YAAL"] == pytest.approx((750 + 500) / 2)
    assert (scores["instances"], scores["silent"]) == (3, 1)
    assert 0 < scores["BLEU"] < 100  # what was not written costs quality
    unmeasured = [*rows[:2], dataclasses.replace(rows[2], elapsed=())]
    for cumulative in (False, True):
        found = score(unmeasured, "text", "en", cumulative_elapsed=cumulative)
        assert not any(name.endswith("_CA") for name in found)


def test_a_policy_that_never_spoke() -> None:
    scores = score([said("", [])], "text", "de")
    assert scores["BLEU"] == scores["chrF"] == 0
    assert math.isnan(scores["AL"])
    assert math.isnan(scores["NumChunks"])
    assert (scores["instances"], scores["silent"]) == (1, 1)
    segments = {0: [ReferenceSegment(0, 1000, "a b")]}
    long = score([said("", [], None)], "text", "de", segments=segments)
    assert math.isnan(long["StreamLAAL"])
    assert math.isnan(long["LongYAAL"])
    assert long["BLEU"] == 0
    spoken = said("0.wav", [], durations=(), intervals=(), prediction_offset=2000.0)
    assert math.isnan(score([spoken], "speech", "de")["DiscontinuitySum"])


def test_characters_are_the_units_of_chinese() -> None:
    rows = [said("今天天气好", [400, 400, 800, 1200, 2000], "今天天气很好")]
    scores = score(rows, "text", "zh")
    # Step 2000/6: lags 400, 400 - 333, 800 - 667, 1200 - 1000, 2000 - 1333; the last one ends the source.
    assert scores["LAAL"] == pytest.approx((4800 - 10 * 2000 / 6) / 5)
    assert scores["BLEU"] > 30  # the zh tokenizer sees five characters, 13a a single word
    with pytest.raises(ValueError, match="instance 0: delays: 5 for 1 words of prediction"):
        score(rows, "text", "en")
    assert [bleu_tokenizer(x) for x in ("zh-Hans", "yue", "ja", "jpn", "de", "ar")] == ["zh"] * 2 + ["char"] * 2 + [
        "13a"
    ] * 2
    assert latency_unit("ja") == "char" and [bleu_tokenizer(x) for x in ("th", "my")] == ["char"] * 2
    assert quality_score("bleu", ["今日は良い天気"], ["今日は良い天気"], "ja") == pytest.approx(100)


def test_speech_output(tmp_path: Path) -> None:
    one = said(
        "wavs/0_pred.wav",
        [1000, 2000],
        "a b",
        durations=(1500.0, 700.0),
        intervals=((1000, 1500.0), (2500.0, 700.0)),
        prediction_offset=1000,
    )
    write_log(tmp_path, [one], "speech", "speech")
    scores = score(read_log(tmp_path), "speech", "en")
    assert "BLEU" not in scores  # a path is no translation
    assert "YAAL" not in scores
    assert scores["EndOffset"] == 1200
    assert scores["DiscontinuityNum"] == 0
    # Source tokens of 300 ms end at 300, 600, 900, 1000 and 1300 … 2000. Chunk 1 plays five tokens, 1300 … 2500,
    # against tokens 1, 2, 3, 4, 4; it is one token ahead. Chunk 2: 2800, 3100, 3200 against 1300, 1600, 1900.
    expected = (1300 - 300, 1600 - 600, 1900 - 900, 2200 - 1000, 2500 - 1000, 1500, 1500, 1300)
    assert scores["ATD"] == pytest.approx(sum(expected) / 8)
    assert score([one], "speech", "en", transcripts=["a b"])["chrF"] == pytest.approx(100)
    with pytest.raises(ValueError, match="transcripts: 2 for 1"):
        score([one], "speech", "en", transcripts=["a b", "c"])
    with pytest.raises(ValueError, match="segments: speech output cannot be cut"):
        score([one], "speech", "en", segments={0: []})


def test_long_streams() -> None:
    segments = {
        3: [ReferenceSegment(0, 2000, "a b"), ReferenceSegment(3000, 2000, "c d e f"), ReferenceSegment(5000, 500, "g")]
    }
    delays = [1000.0, 2500, 4000, 4000, 5600]
    stream = said("a b c d e", delays, None, index=3, source_length=5500.0, elapsed=[d + 100 for d in delays])
    scores = score([stream], "text", "en", segments=segments)
    # "a b" | "c d e" | "": see the hand-computed cases of StreamLAAL and LongYAAL.
    assert scores["StreamLAAL"] == pytest.approx((1250 + 3100 / 3) / 2)
    assert scores["LongYAAL"] == pytest.approx((1250 + 750) / 2)
    assert scores["StreamLAAL_CA"] == pytest.approx((1350 + 3400 / 3) / 2)
    assert scores["LongYAAL_CA"] == pytest.approx((1350 + 850) / 2)
    # 100 ms of computing in all, at the first write: the later ones are on time again.
    once = score([stream], "text", "en", segments=segments, cumulative_elapsed=True)
    assert once["StreamLAAL_CA"] == pytest.approx(((1100 + 2500 - 1000) / 2 + 3100 / 3) / 2)
    assert scores["FLAL"] == (1000 - 0 + 4000 - 3000) / 2  # nothing was written for the third
    assert scores["AP"] == pytest.approx(17100 / (5500 * 7))  # the references joined: seven words
    assert 50 < scores["chrF"] < 100
    with pytest.raises(ValueError, match="instance 3: no segments"):
        score([stream], "text", "en", segments={})
    with pytest.raises(ValueError, match="instance 3: reference: none"):
        score([stream], "text", "en")
    with pytest.raises(ValueError, match="instance 3: reference: empty in every segment"):
        score([stream], "text", "en", segments={3: [ReferenceSegment(0, 1, " ")]})


def test_written_sources_count_words() -> None:
    one = said("x y z", [1, 2, 3], "x y z", source="a b c", source_length=3.0, elapsed=[0, 0, 0])
    scores = score([one], "text", "de", source_type="text")
    assert scores["AL"] == scores["ATD"] == 1
    assert "AL_CA" not in scores


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="none to score"):
        score([], "text", "en")
    with pytest.raises(ValueError, match="instance 0: durations"):
        score([said("a", [1])], "speech", "en")
    with pytest.raises(ValueError, match="sources: 1 for 2 references"):
        score([said("a", [1]), said("a", [1], index=1)], "text", "en", sources=["a"])
    with pytest.raises(ValueError, match="comet: needs the source sentences"):
        quality_score("comet", ["a"], ["a"], "en")
    with pytest.raises(ValueError, match="'meteor' is not one of"):
        quality_score("meteor", ["a"], ["a"], "en")  # type: ignore[arg-type]
    for module in ("comet", "bleurt.score"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ImportError, match="pip install unbabel-comet"):
        quality_score("comet", ["a"], ["a"], "en", ["a"])
    with pytest.raises(ImportError, match="BLEURT needs its own package"):
        quality_score("bleurt", ["a"], ["a"], "en")
