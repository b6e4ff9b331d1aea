"""Accuracy of transcripts, and outputs that a clipped 1 - WER rewards as much as honest ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.data.corpus import bundled_speech
from audiorl.data.manifest import read_samples
from audiorl.data.no_speech import KINDS, RATE, no_speech_samples, sound
from audiorl.rewards import CharAccuracy, Hallucination, HotwordAccuracy, Repetition, WeightedSum, WordAccuracy
from audiorl.types import Message

TWO = ["Kerberos", "Zabbix"]


def total(reward, rollout) -> float:
    (score,) = reward([rollout])
    return score.total


@pytest.mark.parametrize(
    ("reward", "text", "references", "expected"),
    [
        # the/a substituted, down inserted: 2 errors over 4 words
        (WordAccuracy(), "A cat sat, here down!", ("the cat sat here",), 0.5),
        (WordAccuracy(normalizer="none"), "A cat sat, here down!", ("the cat sat here",), 0.25),  # "sat," differs too
        (WordAccuracy(), "<think>hm</think><answer>the cat sat here</answer>", ("The cat sat here.",), 1.0),
        (WordAccuracy(), "one two three four", ("hello",), 0.0),  # 1 substitution, 3 insertions: WER 4
        (WordAccuracy(clip=False), "one two three four", ("hello",), -3.0),
        (WordAccuracy(), "good bye", ("goodbye", "good bye"), 1.0),  # the best reference
        (WordAccuracy(), "<think>hello", ("hello",), 0.0),
        (CharAccuracy(), "今天 天汽好", ("今天天气好。",), 0.8),
        (WordAccuracy(), "今天 天汽好", ("今天天气好。",), 0.0),
    ],
)
def test_accuracy(make_rollout, reward, text: str, references: tuple[str, ...], expected: float) -> None:
    assert total(reward, make_rollout(text, references=references)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reward", "text", "hotwords", "expected", "parts"),
    [
        # "start the kerberos daemon": 3 words of weight 1 and one of weight 3
        (HotwordAccuracy(), "Start the Kerberos daemon.", TWO, 1.0, (0, 0)),
        (HotwordAccuracy(), "start the carbon daemon", ["Kerberos"], 1 - 3 / 6, (1, 0)),
        (HotwordAccuracy(), "start a kerberos daemon", ["Kerberos"], 1 - 1 / 6, (0, 0)),
        # a distractor in place of the hotword: 3 for the error and 1 for the false hotword
        (HotwordAccuracy(), "start the zabbix daemon", TWO, 1 - 4 / 6, (1, 1)),
        # one that is inserted is an error in a hotword, too
        (
            HotwordAccuracy(false_weight=0.5),
            "start the kerberos zabbix daemon",
            ["Kerberos", "Zabbix"],
            1 - 3.5 / 6,
            (0, 1),
        ),
        (HotwordAccuracy(weight=1, false_weight=0), "start the zabbix daemon", TWO, 0.75, (1, 1)),
        (HotwordAccuracy(), "zabbix zabbix zabbix zabbix", TWO, 0.0, (1, 4)),
        (
            HotwordAccuracy(clip=False),
            "zabbix zabbix zabbix zabbix",
            TWO,
            1 - (3 + 3 + 4) / 6,
            (1, 4),
        ),
        (HotwordAccuracy(), "start a kerberos daemon", None, 0.75, None),  # `WordAccuracy`
    ],
)
def test_hotwords_weigh_more(make_rollout, reward, text: str, hotwords, expected: float, parts) -> None:
    listed = {"hotwords": hotwords} if hotwords else {}
    (score,) = reward([make_rollout(text, references=("start the kerberos daemon",), **listed)])
    assert score.total == pytest.approx(expected)
    assert dict(score.parts) == ({} if parts is None else {"missed": parts[0], "false": parts[1]})


def test_scripts_without_spaces_are_compared_by_characters_with_hotwords_and_without(make_rollout) -> None:
    said, written = "今天天气很好我们去公园玩", "今天天气很好我们去花园玩"
    for listed, expected in (({}, 1 - 1 / 12), ({"hotwords": ["天气"]}, 1 - 1 / (10 + 3 * 2))):
        reward = HotwordAccuracy()
        assert total(reward, make_rollout(written, references=(said,), **listed)) == pytest.approx(expected)


def test_hotwords_where_nobody_speaks_and_of_several_references(make_rollout) -> None:
    reward, listed = HotwordAccuracy(), {"hotwords": ["Ann", "Anne"]}
    assert total(reward, make_rollout("call anne", references=("call ann", "call anne"), **listed)) == 1.0
    assert total(reward, make_rollout("", references=("",), **listed)) == 1.0
    assert total(reward, make_rollout("ann", references=("",), **listed)) == 0.0
    with pytest.raises(ValueError, match="'Kerberos' is not a list of words"):
        reward.check(make_rollout("a", references=("a",), hotwords="Kerberos").sample)
    with pytest.raises(ValueError, match="'Um' is empty after 'english' normalisation"):
        HotwordAccuracy("english").check(make_rollout("a", references=("a",), hotwords=["Um"]).sample)
    with pytest.raises(ValueError, match="false_weight is -1"):
        HotwordAccuracy(false_weight=-1)


def test_digits_are_spelled_out_in_the_samples_language(make_rollout) -> None:
    said = {"references": ("ich bin einundzwanzig",)}
    assert total(WordAccuracy(), make_rollout("ich bin 21", language="de", **said)) == 1.0
    assert total(WordAccuracy(), make_rollout("ich bin 21", **said)) < 1.0


@pytest.mark.parametrize("reward", [WordAccuracy(), CharAccuracy()])
def test_missing_and_empty_references_name_the_sample(make_rollout, reward) -> None:
    with pytest.raises(ValueError, match="'clip-7' has no reference"):
        reward([make_rollout("hi")])
    with pytest.raises(ValueError, match=r"'clip-7': the reference transcript '\.\.\.' is empty"):
        reward([make_rollout("hi", references=("...",))])


@pytest.fixture
def rollout_of(make_rollout):
    """rollout_of(text, reference, seconds): a rollout for so many seconds of audio."""

    def make(text: str, reference: str | None, seconds: float, **options):
        rollout = make_rollout(text, references=() if reference is None else (reference,), **options)
        clip = AudioClip(array=np.zeros(round(16_000 * seconds), np.float32), sample_rate=16_000)
        return replace(rollout, sample=replace(rollout.sample, messages=(Message("user", (clip,)),)))

    return make


GUARDED = WeightedSum.of(
    accuracy=WordAccuracy(), hallucination=(Hallucination(), 0.5), repetition=(Repetition(beyond_reference=True), 0.2)
)


def test_parts_by_hand(rollout_of) -> None:
    # 1 s holds 5 + 2 words; 12 are written: 4 hits, 8 insertions over a reference of 4 words, at least 5
    (score,) = Hallucination()([rollout_of("please hold the line " + "now " * 8, "please hold the line", 1.0)])
    assert score.parts == {"insertions": 1.0, "overrun": pytest.approx(5 / 7)}
    assert score.total == -1.0
    (score,) = Hallucination()([rollout_of("please hold the line now", "please hold the line", 1.0)])
    assert score.parts == {"insertions": pytest.approx(1 / 5), "overrun": 0.0}
    text = "language English<asr_text>please hold the line"  # of Qwen3-ASR
    assert Hallucination()([rollout_of(text, "please hold the line", 1.0)])[0].total == 0
    (score,) = Hallucination(max_rate=1.0)([rollout_of("a b c d e f", "a b c d e f", 1.0)])
    assert score.parts == {"insertions": 0.0, "overrun": 1.0}  # 1 + 2 words fit, as many again are too many
    (score,) = Hallucination("char")([rollout_of("今天天气好啊啊", "今天天气好", 1.0)])
    assert score.parts == {"insertions": pytest.approx(2 / 25), "overrun": 0.0}


HACKS = {
    "babble on a clip that it does not understand": "and then " * 40,
    "text in brackets, which the normaliser drops": "activated (" + "he said that it was late " * 3 + ")",
    "text in angle brackets": "activated <the music plays on and on and on>",
    "text outside of the answer": "I think that this might be it <answer>activated</answer>",
    "thoughts that never end": "<think>well this could be anything at all",
}


@pytest.mark.parametrize("text", HACKS.values(), ids=list(HACKS))
def test_what_costs_nothing_without_guards(rollout_of, text: str) -> None:
    accuracy, reference = WordAccuracy(), "activated"
    honest = "activated" if accuracy([rollout_of(text, reference, 1.0)])[0].total == 1.0 else "active"
    pair = [rollout_of(text, reference, 1.0), rollout_of(honest, reference, 1.0)]
    hacked, plain = (score.total for score in accuracy(pair))
    assert hacked == plain  # the reward alone sees no difference
    hacked, plain = (score.total for score in GUARDED(pair))
    assert hacked < plain - 0.1


def test_fillers_that_the_english_normaliser_drops(rollout_of) -> None:
    rollout = rollout_of("activated " + "um uh " * 10, "activated", 1.0)
    assert WordAccuracy("english")([rollout])[0].total == 1.0
    assert Hallucination(normalizer="english")([rollout])[0].parts["overrun"] == 1.0


def test_silence_means_silence(rollout_of) -> None:
    """Without speech the fewest words are best, and none is better than any."""
    written = ["", "thanks", "thanks for watching", "thanks for watching see you next time"]
    rollouts = [rollout_of(text, "", 3.0) for text in written]
    totals = [score.total for score in GUARDED(rollouts)]
    assert totals[0] == 1.0
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4
    assert CharAccuracy()(rollouts)[0].total == 1.0
    with pytest.raises(ValueError, match=r"'\.\.\.' is empty"):  # a damaged transcript is no silence
        Hallucination()([rollout_of("", "...", 1.0)])
    with pytest.raises(ValueError, match="no reference"):
        Hallucination()([rollout_of("", None, 1.0)])


def test_speech_may_repeat_what_people_repeat(rollout_of) -> None:
    said = "zero zero zero zero zero"
    right, loop = rollout_of(said, said, 3.0), rollout_of(said, "zero one", 3.0)
    assert Repetition()([right])[0].total < 0
    assert Repetition(beyond_reference=True)([right])[0].total == 0.0
    assert Repetition(beyond_reference=True)([loop])[0].total == Repetition()([loop])[0].total == pytest.approx(-2 / 3)


def test_right_transcripts_of_real_speech_cost_nothing(make_rollout) -> None:
    rollouts = []
    for u in bundled_speech():
        rollout = make_rollout(u.text, references=(u.text,))
        rollouts.append(replace(rollout, sample=replace(rollout.sample, messages=(Message("user", (u.clip,)),))))
    for reward in (Hallucination(), Hallucination("char"), Repetition(beyond_reference=True)):
        assert {score.total for score in reward(rollouts)} == {0.0}


def test_a_sample_without_audio_is_named(make_rollout) -> None:
    with pytest.raises(ValueError, match="'clip-7' has no audio"):
        Hallucination()([make_rollout("a", references=("a",))])


def test_clips_without_speech(tmp_path) -> None:
    samples = no_speech_samples(13)
    assert {s.metadata["kind"] for s in samples} == set(KINDS)
    assert [s.audio[0].key for s in samples] == [s.audio[0].key for s in no_speech_samples(13)]
    assert len({s.id for s in samples}) == 13
    for sample in samples:
        wav, level = sample.audio[0].load(RATE), sample.metadata["level"]
        assert 2 <= len(wav) / RATE <= 8
        clicks = sample.metadata["kind"] == "clicks"
        loudness = np.abs(wav).max() if clicks else np.sqrt(np.mean(wav.astype(np.float64) ** 2))
        assert loudness == pytest.approx(0.0 if level is None else 10 ** (level / 20), rel=0.01)
    pink, white = (np.abs(np.fft.rfft(sound(k, 4.0, -30.0, np.random.default_rng(0)))) ** 2 for k in ("pink", "white"))
    assert pink[:4000].sum() > 3 * pink[4000:].sum()
    assert white[:4000].sum() < white[4000:].sum()
    with pytest.raises(ValueError, match="no recordings"):
        no_speech_samples(5, music=tmp_path)


def test_a_manifest_says_that_nobody_speaks(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"audio": "a.wav", "text": "", "task": "no_speech"}\n')
    (sample,) = read_samples(file).samples
    assert (sample.references, sample.task) == (("",), "no_speech")
    file.write_text('{"audio": "a.wav", "text": ""}\n')
    with pytest.raises(ValueError, match="field 'text'"):
        read_samples(file)
