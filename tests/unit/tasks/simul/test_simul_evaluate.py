"""What a policy wrote and when, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.eval._streams import instance_of, measure, outside_quality, write_interpreted
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.report.summary import doubts
from audiorl.tasks.simul import quality
from audiorl.tasks.simul.logs import read_log
from audiorl.tasks.simul.scoring import score
from audiorl.tasks.simul.streams import ChunkConfig, Stream, Unit, interpretation_sample, settled
from audiorl.tasks.simul.talks import match_segments, read_segments
from audiorl.types import Rollout, Segment

CHUNKS = ChunkConfig(1.0, 0.0)
"""Chunk t ends at t seconds."""


def stream(*units: Unit, seconds: float = 4.0, id: str = "s", target: str = "es") -> Stream:
    clip = AudioClip(array=np.ones(round(seconds * 1000), np.float32), sample_rate=1000)
    return Stream(id, clip, seconds, units, "en", target)


def wrote(stream: Stream, *texts: str, cut: tuple[int, ...] = (), compute: float = 0.1) -> Rollout:
    """A text after each chunk; `compute` seconds a chunk; turns in `cut` (from 0) had no room to end."""
    sample = interpretation_sample(stream, CHUNKS)
    segments = tuple(
        Segment(
            prompt_ids=torch.arange(2),
            ids=torch.arange(len(text) + 1),
            logprobs=torch.zeros(len(text) + 1),
            text=text,
            stop_reason="length" if t in cut else "eos",
            source_time=turn.end,
            emit_time=turn.end + (t + 1) * compute,
        )
        for t, (text, turn) in enumerate(zip(texts, sample.turns, strict=True))
    )
    return Rollout(sample, segments, "g")


TALK = stream(Unit(0.0, 0.9, "uno dos", "one two"), Unit(1.0, 2.8, "tres cuatro", "three four"))


def test_delays_are_when_a_word_was_complete() -> None:
    """After 1 s "uno d", which goes on as "os" after 2 s; nothing after 3 s; two words after 4 s."""
    instance = instance_of(wrote(TALK, "uno d", "os", "", " tres cuatro "), 3)
    assert instance.prediction == "uno dos tres cuatro"
    assert instance.delays == (1000, 2000, 4000, 4000)
    assert instance.elapsed == pytest.approx((1100, 2200, 4400, 4400))
    assert (instance.index, instance.prediction_length, instance.source_length) == (3, 4, 4000)
    assert (instance.reference, instance.source) == ("uno dos tres cuatro", "s")


def test_a_word_at_which_the_policy_was_cut_off_is_open() -> None:
    """It is complete with the next turn, whatever that writes; a word before a space is complete at once."""
    assert instance_of(wrote(TALK, "uno dos", " tres", "", "", cut=(0,)), 0).delays == (1000, 2000, 2000)
    assert instance_of(wrote(TALK, "uno dos", "", "", "", cut=(0,)), 0).delays == (1000, 2000)
    assert instance_of(wrote(TALK, "uno ", "dos", "", "x", cut=(0, 1, 3)), 0).delays == (1000, 4000)
    assert instance_of(wrote(TALK, "uno ", "dos", " ", "x", cut=(0, 1, 2)), 0).delays == (1000, 3000, 4000)
    # 50 ms at the end are not heard; the last turn ends with them, and only then is it clear that nothing is added.
    rest = instance_of(wrote(stream(seconds=2.05), "a", " b c", cut=(1,)), 0)
    assert rest.delays == (1000, 2050, 2050) and rest.elapsed == pytest.approx((1100, 2250, 2250))
    segments = wrote(TALK, "uno dos", "", "", "", cut=(0,)).segments
    assert [settled(segments[:n], "es") for n in (0, 1, 2)] == ["", "uno ", "uno dos"]


@pytest.mark.parametrize("rest", [0.0, 0.05, 0.15])
def test_what_is_said_last_is_late_by_the_source_whatever_remains_of_it(rest: float) -> None:
    """Nine words after the last chunk: AL stops at the first of them, and nothing came before the source's end."""
    late = stream(Unit(0.0, 1.9, "a b c d e f g h i"), seconds=2.0 + rest)
    scores = measure([late], [wrote(late, *[""] * (1 + (rest > 0.1)), "a b c d e f g h i")])["scores"]
    assert scores["AL"] == scores["LAAL"] == pytest.approx(2000 + 1000 * rest)
    assert scores["YAAL"] is None and scores["EndOffset"] == 0


def test_characters_of_languages_without_spaces_and_blanks() -> None:
    spoken = stream(Unit(0, 2, "你好"), target="zh")
    instance = instance_of(wrote(spoken, "你", "", "好 吗", "", cut=(0,)), 0)
    assert (instance.prediction, instance.delays) == ("你好吗", (1000, 3000, 3000))
    mixed = instance_of(wrote(spoken, "我用 Deep", " ", "Learning写　NumPy", "\n"), 0)
    assert (mixed.prediction, mixed.prediction_length) == ("我用Deep Learning写NumPy", len(mixed.delays))
    assert mixed.units("char") == list("我用DeepLearning写NumPy") and mixed.delays[5:7] == (1000, 3000)
    latin = stream(Unit(0, 1, "我用 Deep Learning 写"), Unit(1, 2, "Python"), target="zh")
    scores = measure([latin], [wrote(latin, "我用Deep Learning", "写Python", "", "")])["scores"]
    assert (scores["BLEU"], scores["WordF1"]) == pytest.approx((100, 100))
    blanks = instance_of(wrote(TALK, " \n", "a\n\tb", "\xa0c\u2028", ""), 0)  # as SimulEval counts them
    assert (blanks.prediction, blanks.delays) == ("a b c", (2000, 2000, 3000))


def test_measured_by_hand() -> None:
    """The first stream is interpreted perfectly, one chunk late; the other one is silent.

    First: units of 2 words each over [0, 900] and [1000, 2800] ms, said at 2000 and 4000 ms. LAAL of the stream, step
    4000 / 4: 2000, 1000, 2000 and out of the source's end, mean 5000 / 3. StreamLAAL: 2000 - 0, and from the start of
    the second unit 4000 - 1000 > 1800, so one word each: (2000 + 3000) / 2.
    """
    streams = [TALK, stream(Unit(0.0, 0.9, "siete", "seven"), id="t")]
    rollouts = [wrote(TALK, "", "uno dos", "", " tres cuatro"), wrote(streams[1], "", "", "", "")]
    result = measure(streams, rollouts)
    assert result["laal"] == pytest.approx(5 / 3)
    assert result["stream_laal"] == pytest.approx(2.5)
    assert (result["n"], result["spoken"], result["cut"]) == (2, 2 / 8, 0)
    assert result["scores"]["silent"] == 1
    assert (result["low"], result["high"]) == pytest.approx((0, 100))
    # Computing 0.1 s a chunk adds up to 200 and 400 ms, but the second write is late by 200 ms only.
    assert result["scores"]["StreamLAAL_CA"] == pytest.approx((2200 + 3200) / 2)
    assert result["scores"]["LAAL_CA"] == pytest.approx((2200 + 1200 + 2200) / 3)
    assert measure(streams[:1], [wrote(TALK, "", "uno dos", "", " tres", cut=(1, 2))])["cut"] == 0.5
    # The interval is that of all streams' chrF, in which a long one has more n-grams, not of the mean of each stream's.
    streams = [TALK, *(replace(streams[1], id=f"t{i}") for i in range(6))]
    result = measure(streams, [wrote(s, "", "uno dos" if s is TALK else "", "", " tres cuatro") for s in streams])
    assert result["low"] < result["chrf"] < result["high"]


def test_a_silent_policy_has_scores() -> None:
    result = measure([TALK], [wrote(TALK, "", "", "", "")])
    assert result["laal"] is None and result["stream_laal"] is None
    assert (result["chrf"], result["bleu"], result["spoken"]) == (0, 0, 0)
    assert result["scores"]["LAAL"] is None and result["scores"]["StreamLAAL"] is None
    assert result["scores"]["silent"] == 1
    json.dumps(result["scores"], allow_nan=False)


def test_without_reference() -> None:
    bare = stream()
    assert instance_of(wrote(bare, "a", "", "", ""), 0).reference is None
    for unscored in (bare, stream(Unit(0, 1, ""))):
        with pytest.raises(ValueError, match="'s': no reference; without one it can be interpreted, not measured"):
            measure([unscored], [wrote(unscored, "a", "", "", "")])


def test_written_folder_scores_the_same(tmp_path: Path) -> None:
    """Three streams: a recording of its own, and two parts of one recording, which go by their ids."""
    own, shared = (AudioClip(path=str(tmp_path / n), duration=4.0) for n in ("own.wav", "talk.wav"))
    streams = [
        replace(TALK, audio=own, id="a"),
        replace(TALK, audio=shared, id="talk@0.00"),
        replace(TALK, audio=replace(shared, start=4.0), id="talk@4.00"),
    ]
    rollouts = [wrote(s, "", "uno  dos", "", " tres cuatro") for s in streams]
    write_interpreted(tmp_path, streams, rollouts)
    instances = read_log(tmp_path)
    assert [i.source for i in instances] == [str(tmp_path / "own.wav"), "talk@0.00", "talk@4.00"]
    segments = match_segments(instances, read_segments(tmp_path / "segments.yaml"))
    assert (tmp_path / "segments.es").read_text().splitlines() == ["uno dos", "tres cuatro"] * 3
    assert (tmp_path / "segments.en").read_text().splitlines() == ["one two", "three four"] * 3
    rows = (tmp_path / "segments.yaml").read_text().splitlines()
    assert rows[2] == "- {wav: talk@0.00, offset: 0.0, duration: 0.9, reference: uno dos}"
    again = read_segments(tmp_path / "segments.yaml", tmp_path / "segments.es")
    assert again == read_segments(tmp_path / "segments.yaml")
    scores = score(instances, "text", "es", segments=segments, cumulative_elapsed=True)
    assert scores == measure(streams, rollouts)["scores"]
    write_interpreted(tmp_path / "bare", [stream()], [wrote(stream(), "", "", "", "")])
    assert not (tmp_path / "bare" / "segments.yaml").exists()


class Words:
    """A sentence encoder that compares texts by their words."""

    def similarities(self, hypotheses: list[str], references: list[str]) -> list[float]:
        return [float(h == r) for h, r in zip(hypotheses, references, strict=True)]


def test_sentence_embeddings_stand_with_the_other_judges_and_may_disagree(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(quality, "installed_encoder", Words)
    streams = [replace(TALK, id=f"s{i}", target_language="en") for i in range(8)]

    def entry(name: str, text: str) -> dict[str, object]:
        rollouts = [wrote(s, "", "uno dos", "", text) for s in streams]
        write_interpreted(tmp_path / name, streams, rollouts)
        return measure(streams, rollouts) | outside_quality(tmp_path, name, streams, "chrf")

    def doubted(entries: dict[str, dict[str, object]]) -> list[str]:
        return [row.metric for doubt in doubts(entries)[1] for row in doubt.rows]

    before, after = entry("before", " tres"), entry("after", " tres cuatr")
    assert before["semantic"] == 0.0 and after["outside"]["semantic"] == [0.0, 0.0]  # type: ignore[index]
    assert after["changes"]["semantic"] == [0.0, 0.0, 0.0]  # type: ignore[index]
    assert "semantic" in doubted({"before": before, "after": after})
    exact = entry("exact", " tres cuatro")
    assert exact["semantic"] == 100.0 and exact["changes"]["semantic"] == [100.0, 100.0, 100.0]  # type: ignore[index]
    assert "semantic" not in doubted({"before": before, "after": exact})
    assert "semantic" not in measure([TALK], [wrote(TALK, "", "uno dos", "", "")])


def test_changes_are_measured_from_the_baseline_of_the_same_streams(tmp_path: Path) -> None:
    """LAAL by hand as in `test_measured_by_hand`: 5/3 s; said after 1 and 3 s, (1000, 0, 1000, 0) ms, 1/2 s."""
    streams = [replace(TALK, id=f"s{i}") for i in range(4)]
    for name, texts in (("before", ("uno", "", "", "")), ("unseen_before", ("", "uno dos", "", " tres cuatro"))):
        write_interpreted(tmp_path / name, streams, [wrote(s, *texts) for s in streams])
    write_interpreted(
        tmp_path / "unseen_after", streams, [wrote(s, "uno dos", "", " tres cuatro", "") for s in streams]
    )
    changes = outside_quality(tmp_path, "unseen_after", streams, "word_f1", "unseen_before")["changes"]
    assert changes["laal"] == pytest.approx([1 / 2 - 5 / 3] * 3)
    assert changes["word_f1"] == [0.0, 0.0, 0.0]
    write_interpreted(tmp_path / "silent", streams, [wrote(s, "", "", "", "") for s in streams])
    assert "laal" not in outside_quality(tmp_path, "silent", streams, "word_f1")["changes"]


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("field", ["emit_time", "source_time"])
def test_a_clock_that_jumps_back_is_an_error(turn: int, field: str) -> None:
    """Forward it may jump: then the computation took that long."""
    rollout = wrote(TALK, "", "uno dos", "", " tres cuatro")

    def jumped(seconds: float) -> Rollout:
        segments = list(rollout.segments)
        moved = replace(segments[turn], **{field: getattr(segments[turn], field) + seconds})
        return replace(rollout, segments=(*segments[:turn], moved, *segments[turn + 1 :]))

    with pytest.raises(
        ValueError, match=rf"stream 's': turn {turn + 1}: written at .*: time goes backwards; interpret"
    ):
        instance_of(jumped(-3600.0), 0)
    if field == "emit_time":
        late = replace(rollout, segments=(*rollout.segments[:3], replace(rollout.segments[3], emit_time=3604.0)))
        assert instance_of(late, 0).elapsed == pytest.approx((2200, 2200, 3_604_000, 3_604_000))


def test_reference_segments_may_overlap() -> None:
    """Two speakers at once: each segment's words are late from its own start, in the order of the starts."""
    instance = instance_of(wrote(TALK, "", "uno dos", "", " tres cuatro"), 0)
    segments = {0: [ReferenceSegment(0, 3000, "uno dos"), ReferenceSegment(1000, 1800, "tres cuatro")]}
    # Words at 2000 and 4000 ms: 2000 - 0 and, of the first, half of its 3000 ms later; 4000 - 1000 after its end.
    assert score([instance], "text", "es", segments=segments)["StreamLAAL"] == pytest.approx((1250 + 3000) / 2)
