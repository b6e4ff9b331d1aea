"""Rewards of rollouts that spoke: known sounds, known texts, and every way to say nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance
from audiorl.protocols import SpeechDecoder
from audiorl.rewards import WeightedSum
from audiorl.speech_models import AlignedWord, load_recogniser
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.rewards import (
    Duration,
    Finished,
    Intelligibility,
    Likelihood,
    NotClipped,
    NotSilent,
    PredictedMOS,
    SpeakerSimilarity,
    WordIntelligibility,
    reference_clip,
    reference_seconds,
)
from audiorl.types import Message, Rollout, Sample, Segment, Turn

RATE = 8000


def tone(seconds: float, hertz: float = 200.0, amplitude: float = 0.3) -> np.ndarray:
    time = np.arange(round(seconds * RATE)) / RATE
    return (amplitude * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@dataclass
class Said(SpeechDecoder):
    """A voice that says what is laid down for each rollout, and counts how often it is asked and for how many."""

    waves: dict[str, np.ndarray | None]
    sample_rate: int = RATE
    asked: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[np.ndarray | None]:
        self.calls.append(len(rollouts))
        return super().waveforms(rollouts)

    def waveform(self, rollout: Rollout) -> np.ndarray | None:
        self.asked.append(rollout.sample.id)
        return self.waves[rollout.sample.id]


@dataclass
class ByLength:
    """Judges that know clips by their length in samples, and count their calls."""

    texts: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, list[float]] = field(default_factory=dict)
    opinions: dict[int, float] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    name: str = "by length"

    def transcribe(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> list[str]:
        self.calls.append(len(waveforms))
        assert sample_rate == RATE
        return [self.texts[len(w)] for w in waveforms]

    def embed(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> np.ndarray:
        self.calls.append(len(waveforms))
        return np.array([self.vectors[len(w)] for w in waveforms], np.float32)

    def rate(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> list[float]:
        self.calls.append(len(waveforms))
        return [self.opinions[len(w)] for w in waveforms]


def rollout(
    id: str, *references: str, text: str = "", stop: str = "eos", clips: Sequence[AudioClip] = (), **metadata: object
) -> Rollout:
    sample = Sample(id=id, messages=(Message("user", tuple(clips)),), references=references, metadata=metadata)
    segment = Segment(torch.arange(3), torch.arange(2), torch.zeros(2), text, stop_reason=stop)  # type: ignore[arg-type]
    return Rollout(sample=sample, segments=(segment,), group_id="g")


SILENT = {"nothing": None, "empty": np.zeros(0, np.float32), "silence": np.zeros(RATE, np.float32)}
SILENT |= {"hum": np.full(RATE, 1e-3, np.float32)}  # -60 dB


def totals(reward, rollouts: Sequence[Rollout]) -> list[float]:
    return [s.total for s in reward(rollouts)]


def test_intelligibility_by_words_and_characters() -> None:
    voice = Said({"a": tone(1.0), "b": tone(2.0), "c": tone(0.5)})
    judge = ByLength({8000: "the cat sat", 16_000: "one two three four", 4000: "hello"})
    models = SpeechModels(voice, recogniser=judge)
    rollouts = [rollout("a", "The cat sat down."), rollout("b", "hello"), rollout("c", "nothing", "Hello!")]
    scores = Intelligibility(models)(rollouts)
    assert [s.total for s in scores] == pytest.approx([0.75, 0.0, 1.0])  # the best reference counts; never below 0
    assert [s.parts["wer"] for s in scores] == pytest.approx([0.25, 4.0, 0.0])
    by_characters = Intelligibility(models, metric="cer")(rollouts[:1])
    assert by_characters[0].total == pytest.approx(1 - 5 / 16)  # " down" of "the cat sat down"
    assert judge.calls == [3]  # all at once, and only once


def test_what_it_wrote_itself_as_the_reference() -> None:
    voice = Said({"a": tone(1.0), "b": tone(1.0), "c": None})
    models = SpeechModels(voice, recogniser=ByLength({8000: "good morning"}))
    reward = Intelligibility(models, against="text")
    wrote = rollout("a", text="<think>hm</think><answer>Good evening</answer>")
    assert totals(reward, [wrote, rollout("b"), rollout("c")]) == [0.5, 0.0, 0.0]  # b wrote nothing, c neither


def test_saying_nothing_never_pays() -> None:
    judge = ByLength({8000: "hello"}, {8000: [1.0, 0.0]}, {8000: 4.0})
    models = SpeechModels(Said({**SILENT, "loud": tone(1.0)}), judge, judge, judge)
    clip = AudioClip(array=tone(1.0), sample_rate=RATE)
    *quiet, loud = (rollout(id, "hello", text="hello", clips=[clip], reference_seconds=1.0) for id in (*SILENT, "loud"))
    plain = (Intelligibility, SpeakerSimilarity, Duration, NotSilent, NotClipped, Finished, PredictedMOS)
    for reward in (Intelligibility(models, against="text"), *(kind(models) for kind in plain)):
        assert totals(reward, quiet) == [0.0] * 4, reward
        assert totals(reward, [loud])[0] > 0.5, reward
    assert judge.calls == [1, 1, 1, 1]  # the clip of reference is one of the four; silence was never judged
    unheard = [replace(r, sample=replace(r.sample, metadata={"reference_seconds": 0.0})) for r in (*quiet, loud)]
    assert totals(Duration(models), unheard) == [1.0, 1.0, 1.0, 1.0, 0.0]  # nothing was to be said


def test_speaker_similarity_is_the_cosine() -> None:
    half = math.sqrt(0.5)
    judge = ByLength(vectors={8000: [1.0, 0.0], 16_000: [half, half], 4000: [-1.0, 0.0]})
    voice = Said({"same": tone(1.0), "near": tone(2.0), "far": tone(0.5)})
    models = SpeechModels(voice, encoder=judge)
    clip = AudioClip(array=tone(1.0), sample_rate=RATE)
    rollouts = [rollout(id, clips=[clip]) for id in ("same", "near", "far")]
    assert totals(SpeakerSimilarity(models), rollouts) == pytest.approx([1.0, half, 0.0])
    assert judge.calls == [3, 1]  # three rollouts, and the one clip that all are compared with


def test_where_the_reference_voice_comes_from() -> None:
    first, second = (AudioClip(array=tone(1.0, hertz), sample_rate=RATE) for hertz in (100, 200))
    assert reference_clip(rollout("a", clips=[first]).sample) is first
    assert reference_clip(rollout("a", clips=[first, second], reference_audio=second).sample) is second
    assert reference_clip(rollout("a", reference_audio="x.wav").sample).path == "x.wav"
    with pytest.raises(ValueError, match="'a': no metadata\\['reference_audio'\\] and 2 clips"):
        reference_clip(rollout("a", clips=[first, second]).sample)


def test_duration_both_ways_and_against_nothing() -> None:
    said = {"a": tone(2.0), "b": tone(1.0), "c": tone(1.0), "d": tone(1.0), "e": None}
    wanted = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0, "e": 0}
    scores = Duration(SpeechModels(Said(said)))([rollout(id, reference_seconds=s) for id, s in wanted.items()])
    assert [s.total for s in scores] == pytest.approx([0.5, 0.5, 1.0, 0.0, 1.0])
    assert [s.parts for s in scores] == [{"seconds": s} for s in (2.0, 1.0, 1.0, 1.0, 0.0)]


def test_reference_seconds_of_streams_and_of_none() -> None:
    clip = AudioClip(array=tone(1.0), sample_rate=RATE)
    turns = (Turn(clip, 1.0), Turn(clip, 2.0, "sí", reference_seconds=0.5), Turn(clip, 3.0, "no", reference_seconds=1))
    assert reference_seconds(Sample("s", (), turns=turns)) == 1.5
    unknown = Sample("s", (), turns=(*turns, Turn(clip, 4.0, "quizás")))
    given = [Sample("s", (), metadata={"reference_seconds": value}) for value in ("2", -1.0, math.nan)]
    for sample in (unknown, Sample("s", ()), *given):
        with pytest.raises(ValueError, match=r"'s': metadata\['reference_seconds'\] is"):
            reference_seconds(sample)


def test_silence_and_clipping_have_limits() -> None:
    mostly = np.concatenate([tone(1.0), np.zeros(3 * RATE, np.float32)])  # three quarters silent
    square = np.sign(tone(1.0, 200.5)).astype(np.float32)
    models = SpeechModels(Said({"mostly": mostly, "square": square, "tone": tone(1.0)}))
    rollouts = [rollout(id) for id in ("mostly", "square", "tone")]
    assert totals(NotSilent(models), rollouts) == [0.0, 1.0, 1.0]
    assert totals(NotSilent(models, most=0.75), rollouts) == [1.0, 1.0, 1.0]
    assert NotSilent(models)(rollouts)[0].parts["silent"] == pytest.approx(0.75)
    assert totals(NotClipped(models), rollouts) == [1.0, 0.0, 1.0]


def test_a_generation_that_never_ended_is_scored_and_told_apart() -> None:
    models = SpeechModels(Said({"a": tone(1.0), "b": tone(1.0)}), recogniser=ByLength({8000: "hello hello"}))
    cut, done = rollout("a", "hello hello", stop="length"), rollout("b", "hello hello")
    assert totals(Intelligibility(models), [cut, done]) == [1.0, 1.0]
    assert totals(Finished(models), [cut, done]) == [0.0, 1.0]


def test_opinions_fill_the_unit_interval() -> None:
    judge = ByLength(opinions={8000: 3.0, 16_000: 5.2, 4000: 0.9})
    models = SpeechModels(Said({"a": tone(1.0), "b": tone(2.0), "c": tone(0.5)}), quality=judge)
    scores = PredictedMOS(models)([rollout(id) for id in "abc"])
    assert [s.total for s in scores] == [0.5, 1.0, 0.0]
    assert scores[0].parts == {"mos": 3.0}


def test_rewards_share_what_was_heard() -> None:
    """One decoding and one transcription for a sum of rewards, again for a second call, and for new rollouts only."""
    voice = Said({"a": tone(1.0), "b": tone(2.0)})
    judge = ByLength({8000: "hello", 16_000: "hello"})
    models = SpeechModels(voice, recogniser=judge)
    reward = WeightedSum.of(
        words=Intelligibility(models), letters=(Intelligibility(models, "cer"), 0.5), sound=NotSilent(models)
    )
    first = rollout("a", "hello")
    (score,) = reward([first])
    assert score.total == 2.5 and score.parts["words/wer"] == 0.0
    reward([first, rollout("b", "hello")])
    assert judge.calls == voice.calls == [1, 1] and voice.asked == ["a", "b"]
    assert totals(Intelligibility(models), [first, first]) == [1.0, 1.0]


def test_broken_sound_names_the_rollout() -> None:
    for wav in (np.array([0.0, np.nan], np.float32), np.zeros((2, 4), np.float32)):
        with pytest.raises(ValueError, match=r"'a' \(group g, answer 0\): its speech has shape"):
            NotSilent(SpeechModels(Said({"a": wav})))([rollout("a")])


def test_models_references_and_settings_are_checked() -> None:
    voice, clip = Said({"a": tone(1.0)}), AudioClip(array=tone(1.0), sample_rate=RATE)
    models, heard = SpeechModels(voice), SpeechModels(voice, recogniser=ByLength({8000: "hello"}))
    said = [rollout("a", "hello", clips=[clip])]
    for call, message in (
        (lambda: Intelligibility(models)(said), "no recogniser"),
        (lambda: SpeakerSimilarity(models)(said), "no encoder"),
        (lambda: PredictedMOS(models)(said), "no quality"),
        (lambda: Likelihood(heard)(said), "gives no probabilities"),
        (lambda: WordIntelligibility(heard)([spoken("a", "good morning")]), "CTC head"),
        (lambda: Likelihood(heard).check(rollout("a", "hello").sample), "'a': .* gives no probabilities"),
        (lambda: WordIntelligibility(heard).check(rollout("a", "hello").sample), "'a': .* CTC head"),
        (lambda: Intelligibility(heard)([rollout("a")]), "'a' has no reference transcript"),
        (lambda: Intelligibility(models, metric="mer"), "metric 'mer'"),  # type: ignore[arg-type]
        (lambda: Intelligibility(models, against="x"), "against 'x'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_human_speech_is_more_intelligible_than_noise(speech: list[Utterance]) -> None:
    """A real recogniser: prompts as they are, under noise, and another prompt's text."""
    pytest.importorskip("pocketsphinx")
    spoken = [u for u in speech if u.language == "en" and len(u.text.split()) >= 6][:3]
    waves = {u.id: u.clip.load(16_000) for u in spoken}
    noise = np.random.default_rng(0).standard_normal(80_000).astype(np.float32)
    drowned = {id: (0.05 * wav + 0.3 * noise[: len(wav)]).astype(np.float32) for id, wav in waves.items()}
    judge = load_recogniser("pocketsphinx")
    rollouts = [rollout(u.id, u.text) for u in spoken]
    clear, buried = (
        totals(Intelligibility(SpeechModels(Said(w, 16_000), recogniser=judge)), rollouts) for w in (waves, drowned)
    )
    assert np.mean(clear) > 0.5 and np.mean(buried) < 0.2


@dataclass
class Aligned(ByLength):
    """A recogniser that finds the same words in every clip."""

    words: tuple[AlignedWord, ...] = ()

    def align(self, waveforms: Sequence[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[list[AlignedWord]]:
        return [list(self.words) for _ in texts]


def spoken(id: str, *references: str, frames: int = 8, others: int = 2) -> Rollout:
    """Two tokens of text, then frames of two codebooks, then `others` further tokens."""
    base = rollout(id, *references)
    codes = torch.full((2 + frames + others, 2), -1)
    codes[2 : 2 + frames] = 5
    segment = replace(base.segments[0], ids=torch.arange(len(codes)), logprobs=torch.zeros(codes.shape), codes=codes)
    return replace(base, segments=(segment,))


def test_words_are_credited_on_their_frames() -> None:
    """Half of two seconds is frame 4 of 8, which is token 6; the last word's credit is on the last token."""
    words = AlignedWord("good", "good", 0.0, 1.0), AlignedWord("morning", "", 1.0, 2.0)
    models = SpeechModels(Said({"a": tone(2.0)}), recogniser=Aligned(words=words))
    (score,) = WordIntelligibility(models)([spoken("a", "good morning")])
    assert score.total == 0.5 and score.parts == {"cer": 0.5}
    assert score.per_token == (0, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0) and score.step_ends == (6, 11)


def test_credit_of_more_words_than_tokens_and_of_silence() -> None:
    words = tuple(AlignedWord("a", "a", i / 2, (i + 1) / 2) for i in range(4))
    models = SpeechModels(Said({"a": tone(2.0), "silence": SILENT["silence"]}), recogniser=Aligned(words=words))
    short, silent = WordIntelligibility(models)(
        [spoken("a", "a a a a", frames=1, others=0), spoken("silence", "a a a a")]
    )
    assert short.total == 1 and short.per_token is not None and sum(short.per_token) == 1
    assert [value > 0 for value in short.per_token] == [True] * 3
    assert silent.total == 0 and silent.per_token == (0.0,) * 12 and silent.step_ends == (11,)


@dataclass
class Scored(ByLength):
    """A recogniser to which every text has the same probability."""

    log_probability: float = 0.0

    def log_probabilities(self, waveforms: Sequence[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[float]:
        return [self.log_probability for _ in texts]


def test_the_probability_of_a_character() -> None:
    """Four characters of probability e^-2 together have e^-0.5 each; silence and impossible texts score 0."""
    said = Said({"a": tone(1.0), "silence": SILENT["silence"]})
    rollouts = [rollout("a", "good"), rollout("silence", "good")]
    spoken, silent = Likelihood(SpeechModels(said, recogniser=Scored(log_probability=-2.0)))(rollouts)
    assert spoken.total == pytest.approx(math.exp(-0.5)) and spoken.parts == {"logprob": -0.5}
    assert silent.total < 1e-40 and silent.parts == {"logprob": -100.0}
    (impossible,) = Likelihood(SpeechModels(said, recogniser=Scored(log_probability=-math.inf)))(rollouts[:1])
    assert impossible == silent
