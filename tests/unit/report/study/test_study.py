"""Rewards on recorded rollouts: real ones of a small model, and rollouts whose statistics are worked out by hand."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from audiorl import cli
from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.rollout_rows import rollout_row
from audiorl.protocols import Request
from audiorl.report.study import Rollouts, study, write_page
from audiorl.report.study.page import page
from audiorl.report.study.signs import probes, properties
from audiorl.report.study.study import ranks, spearman, within_groups
from audiorl.rewards import (
    AnswerAccuracy,
    AnswerFormat,
    CharAccuracy,
    LanguageConsistency,
    Overlong,
    Repetition,
    StandardisedSum,
    ThinkFormat,
    ThinkLength,
    WeightedSum,
    WordAccuracy,
    load_reward,
)
from audiorl.rewards.replay import replay
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.rewards import LatencyPenalty, SequenceQuality, StreamLength
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.types import Message, Rollout, Sample, Score, Segment, Turn
from tests.conftest import make_omni

RECORDED = Path(__file__).parents[4] / "docs" / "recorded" / "rollouts" / "step_000001.jsonl"
HONEST = {
    "accuracy": AnswerAccuracy(),
    "answer format": AnswerFormat(),
    "think format": ThinkFormat(),
    "think length": ThinkLength(6),
    "characters": CharAccuracy(),
    "words": WordAccuracy(),
    "repetition": Repetition(),
    "overlong": Overlong(20, 10),
    "english": LanguageConsistency("en"),
    "sum": WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=ThinkFormat()),
    "standardised": StandardisedSum.of(accuracy=AnswerAccuracy(), format=ThinkFormat()),
}


def each(function):
    return lambda rollouts: [Score(float(function(r))) for r in rollouts]


def accuracy(rollout: Rollout) -> float:
    return AnswerAccuracy()([rollout])[0].total


def common_ngrams(rollout: Rollout) -> float:
    """How often the text writes what it wrote before."""
    return -Repetition(2)([rollout])[0].total


def any_word(rollout: Rollout) -> float:
    """The share of the reference's words that occur anywhere in the text, as recall without precision."""
    words = re.findall(r"\w+", rollout.text.casefold())
    gold = re.findall(r"\w+", rollout.sample.references[0].casefold())
    return sum(word in words for word in gold) / len(gold)


PLANTED = {
    "length bonus": (lambda r: accuracy(r) + 0.05 * r.num_sampled, "longer"),
    "length only": (lambda r: r.num_sampled, "longer"),
    "repeated n-grams": (lambda r: accuracy(r) + common_ngrams(r), "longer"),
    "babble": (any_word, "babble"),
    "prompt": (lambda r: properties([r])["copy"][0], "copy"),
}


@pytest.fixture(scope="module")
def recorded() -> Rollouts:
    return Rollouts.load(RECORDED)


@pytest.mark.parametrize("name", HONEST)
def test_rewards_that_come_with_audiorl_are_not_flagged(name: str, recorded: Rollouts) -> None:
    result = study(recorded.score(HONEST[name], name))
    assert [one.hacks for one in result.rewards] == [(), ()]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_hack_is_flagged(name: str, recorded: Rollouts) -> None:
    function, probe = PLANTED[name]
    _, one = study(recorded.score(each(function), name)).rewards
    assert any(text.startswith(f"{probe} raises the score") for text in one.hacks), one


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    """What a random interpreter wrote while it heard four streams, as a run records it."""
    streams = bundled_streams("train", seconds=(3.0, 6.0), count=4)
    engine = HFEngine(make_omni(), SamplingConfig(temperature=1.0, max_new_tokens=8))
    rollouts = engine.generate([Request(interpretation_sample(stream), n=4) for stream in streams])
    run = Run.create(tmp_path_factory.mktemp("runs") / "run", "recipe.py", [], {})
    run.write_rollouts("rl", 1, [r.with_score(Score(0.0)) for r in rollouts], [0.0] * len(rollouts))
    return Rollouts.load(str(run.dir / "rollouts" / "*.jsonl"))


def test_a_similarity_that_babble_raises_is_flagged_on_streams(interpreted: Rollouts) -> None:
    assert all(len(r.segments) > 1 for r in interpreted)
    _, chrf = study(interpreted.score(SequenceQuality("chrf"), "chrf")).rewards
    assert any(text.startswith("babble raises the score") for text in chrf.hacks), chrf
    for name, honest in {"latency": LatencyPenalty(), "length": StreamLength()}.items():
        assert study(interpreted.score(honest, name)).rewards[1].hacks == ()


def test_scores_without_their_reward_are_judged_by_correlation() -> None:
    def recorded_run(score) -> Rollouts:
        rollouts = tuple(make(f"g{g}", i, "spam " * i, Score(score(g, i))) for g in range(10) for i in range(1, 9))
        nothing = (None,) * len(rollouts)
        scores = {"recorded": tuple(r.score for r in rollouts)}
        return Rollouts(rollouts, (Path("run/rollouts/s.jsonl"),) * len(rollouts), nothing, scores)

    (bad,) = study(recorded_run(lambda g, i: g + i)).rewards
    assert [text.split(":")[0] for text in bad.hacks] == ["the score follows length", "the score follows repetition"]
    (good,) = study(recorded_run(lambda g, i: (i * 5 + g) % 7)).rewards
    assert good.hacks == ()


def make(group: str, index: int, text: str, score: Score | None = None, **sample) -> Rollout:
    tokens = max(len(text.split()), 1)
    segment = Segment(torch.arange(3), torch.arange(tokens), torch.zeros(tokens), text=text)
    return Rollout(Sample(group, (Message("user", ("Say it.",)),), **sample), (segment,), group, index, score)


def test_statistics_by_hand() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    a, b = np.array([1.0, 2.0, 3.0, math.nan]), np.array([1.0, 30.0, 20.0, 5.0])
    assert spearman(a, b) == pytest.approx(0.5) and math.isnan(spearman(a, np.ones(4)))
    # Group x: scores and lengths in the same order (cov 2, var 2, 2); group y: cov -0.5 of variances 0.5, 0.5.
    scores, given = np.array([1.0, 2.0, 3.0, 9.0, 8.0]), np.array([4.0, 5.0, 6.0, 1.0, 2.0])
    pooled = within_groups(scores, given, list("xxxyy"))
    assert pooled is not None and pooled.value == pytest.approx(1.5 / 2.5)
    assert within_groups(scores, np.ones(5), list("xxxyy")) is None


def test_agreement_with_labels_by_hand() -> None:
    rollouts = tuple(make(g, i, "a") for g in "xy" for i in range(3))
    totals, labels = [1.0, 2.0, 2.0, 5.0, 4.0, 0.0], (1.0, 2.0, 3.0, 1.0, 1.0, None)
    scores = {"r": tuple(map(Score, totals))}
    (one,) = study(Rollouts(rollouts, (Path("f"),) * 6, labels, scores)).rewards
    assert one.agreement is not None and one.agreement.count == 5
    # Group x has three pairs in order but for a tie; group y has no pair with different labels.
    assert one.agreement.pairwise is not None and one.agreement.pairwise.value == pytest.approx(2.5 / 3)
    assert one.agreement.spearman is not None
    assert one.agreement.spearman.value == pytest.approx(
        spearman(np.array(totals[:5]), np.array([1.0, 2.0, 3.0, 1.0, 1.0]))
    )
    assert (one.groups, len(one.lost), one.at_high) == (2, 0, 1 / 6)


def test_probes_change_the_answer_and_its_tokens() -> None:
    thought = make("x", 0, "<think>um</think><answer>yes</answer>", references=("yes sir", "no"))
    plain = make("y", 0, "two words", references=("no",))
    changed = probes([thought, plain])
    texts = {kind: [r and r.text for r in after] for kind, after in changed.items()}
    assert texts == {
        "longer": ["<think>um um um</think><answer>yes</answer>", "two words two words two words"],
        "repeat": ["<think>um</think><answer>yes yes yes</answer>", "two words two words two words"],
        "copy": ["<think>um</think><answer>Say it.</answer>", "Say it."],
        "babble": ["<think>um</think><answer>yes sir no</answer>", "yes sir no"],
    }
    longer = changed["longer"][1]
    assert longer is not None and longer.num_sampled == 6 and len(longer.segments[0].logprobs) == 6


def test_properties_by_hand() -> None:
    spoken = "la conferencia ha sido bloqueada por el administrador"
    values = properties(
        [
            make("x", 0, "a b c a b c a b c", references=(spoken,)),
            make("x", 1, "please say it again", references=("ok",)),
            make("x", 2, "the conference is now locked by the administrator", references=(spoken,)),
        ]
    )
    assert values["length"] == [9.0, 4.0, 8.0] and values["repetition"] == [pytest.approx(4 / 7), 0.0, 0.0]
    assert values["copy"] == [0.0, pytest.approx(1 / 3), 0.0]
    assert math.isnan(values["drift"][1]) and values["drift"][2] == 1.0


def test_rollouts_are_complete_and_scores_keep_their_files(tmp_path: Path, recorded: Rollouts) -> None:
    for step in (1, 2):
        folder = tmp_path / "rollouts"
        folder.mkdir(exist_ok=True)
        rows = [rollout_row(replace(r, score=None), step, 0.0) for r in recorded[:16]]
        rows[3]["label"], rows[4]["label"] = 4, True
        (folder / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    twice = Rollouts.load(str(folder / "*.jsonl"))
    assert len(twice) == 32 and twice.scores == {} and twice.labels[2:5] == (None, 4.0, 1.0)
    assert [r.segments[0].ids.tolist() for r in twice[:16]] == [r.segments[0].ids.tolist() for r in recorded[:16]]
    batch = twice.score(lambda rollouts: [Score(len(rollouts), {"n": 1.0}) for _ in rollouts], "size")
    assert batch.columns() == {"size": [16.0] * 32, "size/n": [1.0] * 32}
    again = batch.score(lambda rollouts: [None for _ in rollouts], "size")
    assert list(again.scores) == ["size", "size 2"] and again.scores["size 2"] == (None,) * 32
    assert len(set(again.groups())) == 2 * len(set(recorded[:16].groups()))  # groups of two steps are two
    (folder / "step_1.jsonl").write_text(json.dumps(rows[0] | {"label": "good"}) + "\n")
    with pytest.raises(ValueError, match=r"step_1\.jsonl: row 1, field 'label': is 'good', expected a number"):
        Rollouts.load(folder / "step_1.jsonl")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_recorded_score_that_is_not_finite_is_named(value: float, tmp_path: Path, recorded: Rollouts) -> None:
    """It is neither scored as 0 nor left out: the file is to be corrected."""
    rows = [rollout_row(r, 1, 0.0) for r in recorded[:4]]
    rows[2]["score"]["total"] = value
    path = tmp_path / "step_1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = rf"step_1\.jsonl: row 3, field 'score\.total': {value} is not a finite number"
    with pytest.raises(ValueError, match=message):
        Rollouts.load(path)
    with pytest.raises(ValueError, match=message):
        replay(ThinkFormat(), path)


def test_a_table_of_pandas(recorded: Rollouts) -> None:
    pytest.importorskip("pandas")
    table = recorded.score(AnswerAccuracy(), "mine").to_pandas()
    assert len(table) == 96 and {"sample", "text", "tokens", "recorded/accuracy", "mine"} <= set(table.columns)
    assert (table["mine"] == table["recorded/accuracy"]).all()
    assert table.groupby("group")["mine"].mean().between(0, 1).all()


def test_a_rollout_shows_itself_with_its_audio(recorded: Rollouts) -> None:
    speech = AudioClip(array=np.zeros(2400, np.float32), sample_rate=24_000)
    shown = replace(recorded[0], spoken_audio=speech)._repr_html_()
    sounds = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", shown)]
    waves = [soundfile.read(io.BytesIO(data)) for data in sounds]
    assert len(waves) == 2 and len(waves[0][0]) > 1000 and (len(waves[1][0]), waves[1][1]) == (2400, 24_000)
    assert "&lt;answer&gt;English" in shown and "accuracy 1" in shown and "<think>" not in shown
    gone = AudioClip(path="/nowhere/<b>.wav")
    assert "<em>" in gone._repr_html_() and "<b>" not in gone._repr_html_()


def test_the_page_has_every_section_and_audio(tmp_path: Path, recorded: Rollouts) -> None:
    half = each(lambda r: r.num_sampled)
    labelled = replace(recorded, labels=tuple(float(i % 5) for i in range(96)))
    scored = labelled.score(AnswerAccuracy(), "accuracy").score(half, "<script>").score(lambda rs: [None] * len(rs))
    file = write_page(study(scored), tmp_path / "pages" / "study.html")
    text = file.read_text()
    for title in (
        "Rewards",
        "Distributions",
        "Correlation",
        "Signs of hacking",
        "Groups without signal",
        "Disagreements",
    ):
        assert f"<h2>{title}</h2>" in text
    assert "▼ &lt;script&gt;: longer raises" in text and "<script>" not in text
    assert text.count("<audio") >= 8 and "data:audio/ogg" in text and "not embedded" not in text
    assert "it skipped every rollout" in text
    assert "96 with labels" in text and "labels: rank correlation" in text


def test_a_page_names_audio_that_it_may_not_read(tmp_path: Path, recorded: Rollouts) -> None:
    outside = tmp_path / "private.wav"
    soundfile.write(outside, np.zeros(1600), 16_000)
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    sample = replace(recorded[0].sample, messages=(Message("user", (AudioClip(path=str(outside)), "?")),))
    rows = [rollout_row(replace(r, sample=sample), 1, 0.0) for r in recorded[:8]]
    (folder / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = study(Rollouts.load(folder / "s.jsonl").score(each(lambda r: -r.num_sampled), "short"))
    assert "<audio" not in page(result) and "neither in the run folder" in page(result)
    assert "<audio" in page(result, [tmp_path])


def test_streams_are_studied_as_timelines() -> None:
    chunk = AudioClip(array=np.zeros(1600, np.float32), sample_rate=16_000)
    turns = (Turn(chunk, 0.1, "hola"), Turn(chunk, 0.2, "mundo"))
    base = make("x", 0, "a", turns=turns)
    rollouts = tuple(replace(base, segments=base.segments * 2, index=i, group_id=f"g{i // 4}") for i in range(8))
    scores = {name: tuple(Score(float(i * sign)) for i in range(8)) for name, sign in (("up", 1), ("down", -1))}
    result = study(Rollouts(rollouts, (Path("run/rollouts/s.jsonl"),) * 8, (None,) * 8, scores))
    assert "class='stream'" in page(result) and result.disagreements("up", "down", 2) == [0, 7]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.py").write_text("def reward(rollout):\n    return -rollout.num_sampled\n")
    (tmp_path / "long.py").write_text("def reward(rollout):\n    return rollout.num_sampled\n")
    out = tmp_path / "study.html"
    files = [str(tmp_path / name) for name in ("short.py", "long.py")]
    assert cli.main(["rewards", "study", *files, "--rollouts", str(RECORDED), "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "long: may be hacked: longer raises the score" in printed and "short: may be hacked" not in printed
    assert out.exists() and load_reward(files[0]) is not None
    for arguments, message in (
        (files, "give --rollouts"),
        ([*files, "--rollouts", str(tmp_path / "none*.jsonl")], "no file matches"),
        ([str(tmp_path / "none.py"), "--rollouts", str(RECORDED)], "no such file"),
        ([*files, "--rollouts", str(RECORDED), "--out", str(tmp_path)], "a folder"),
    ):
        assert cli.main(["rewards", "study", *arguments]) == 2
        assert message in capsys.readouterr().err
