"""Rewards of speech: intelligibility, speaker similarity, duration, silence, clipping, predicted opinion score.

`SpeechJudges` decodes the speech of rollouts and runs the judge models on it. Rewards that share one share its results:
each judge sees a rollout once, and all rollouts of a step in one call::

    judges = SpeechJudges(speech_decoder, recogniser=load_recogniser("judges/whisper-base", "en"))
    WeightedSum.of(words=Intelligibility(judges), length=(Duration(judges), 0.5), sound=NotSilent(judges))

A rollout without speech, or with silence only, scores 0 in all of them (except `Duration` against a reference of 0 s),
so that silence never raises a score. A rollout that was cut off at its token limit is scored by its speech up to there;
`Finished` gives it 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip
from audiorl.eval.metrics.prosody import Prosody, prosody
from audiorl.eval.metrics.speech import clipped_share, cosine, duration_ratio, silent_share
from audiorl.eval.metrics.text import Normalizer, char_errors, normalize, word_errors
from audiorl.protocols import SpeechDecoder
from audiorl.rewards.asr import error_rate, language_of
from audiorl.rewards.tags import final_text
from audiorl.speech_models.protocol import (
    AlignedWord,
    Aligner,
    QualityModel,
    Recogniser,
    SpeakerEncoder,
    TextScorer,
    Waveform,
)
from audiorl.types import Rollout, Sample, Score

T = TypeVar("T")


@dataclass(frozen=True)
class RecordedSpeech(SpeechDecoder):
    """A speech decoder for recorded rollouts, which reads the recording that the run wrote in place of their codes.

    For rewards of `audiorl rewards score` where the codec is not at hand. Recordings have 16 bits.
    """

    sample_rate: int = 24_000

    def waveform(self, rollout: Rollout) -> Waveform | None:
        """The recording, float32 [T]; None where there is none."""
        return None if rollout.spoken_audio is None else rollout.spoken_audio.load(self.sample_rate)


@dataclass(frozen=True, eq=False)
class SpeechJudges:
    """The judge models of speech rewards, with a cache of their results that lives as long as the rollouts.

    `silence`: a 25 ms frame below so many dB is silent. A rollout with silent frames only is not passed to the judges,
    since recognisers tend to output words for silence.
    """

    speech_decoder: SpeechDecoder
    recogniser: Recogniser | None = None
    encoder: SpeakerEncoder | None = None
    quality: QualityModel | None = None
    silence: float = -50.0
    _cache: WeakKeyDictionary[Rollout, dict[str, Any]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    _references: dict[str, NDArray[Any]] = field(default_factory=dict, init=False, repr=False)
    _reference_prosodies: dict[str, Prosody | None] = field(default_factory=dict, init=False, repr=False)

    @property
    def sample_rate(self) -> int:
        return self.speech_decoder.sample_rate

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[Waveform]:
        """The speech of each, [T]; T = 0 without speech. Raises ValueError for samples that are not finite."""
        return self._once("waveform", rollouts, self._decoded)

    def have_speech(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """Whether the speech of each has a frame that is not silent."""
        return [silent_share(wav, self.sample_rate, self.silence) < 1.0 for wav in self.waveforms(rollouts)]

    def transcripts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """The recogniser's transcripts; "" for silence."""
        if self.recogniser is None:
            raise ValueError("SpeechJudges: has no recogniser; pass recogniser=…")
        recogniser = self.recogniser
        return self._ask_judge("transcript", rollouts, lambda w: recogniser.transcribe(w, self.sample_rate), "")

    def aligned_words(self, rollouts: Sequence[Rollout]) -> list[list[AlignedWord]]:
        """The words of the sample's first reference, where they are said and what the recogniser understood there; none
        for silence."""
        aligner: Aligner = self._recogniser_that(
            "align",
            "cannot align words; take one with a CTC head, such as Wav2Vec2 or audiorl/speech_models/character_ctc.py",
        )

        def align(spoken: list[Rollout]) -> list[list[AlignedWord]]:
            return aligner.align(self.waveforms(spoken), self.sample_rate, _first_references(spoken))

        return self._ask_about("words", rollouts, align, [])

    def text_log_probabilities(self, rollouts: Sequence[Rollout]) -> list[float]:
        """ln p of the sample's first reference by the recogniser, in nats for each character; -inf for silence."""
        scorer: TextScorer = self._recogniser_that(
            "log_probabilities", "gives no probabilities of texts; take Whisper or one with a CTC head"
        )

        def ask(spoken: list[Rollout]) -> list[float]:
            texts = _first_references(spoken)
            values = scorer.log_probabilities(self.waveforms(spoken), self.sample_rate, texts)
            return [value / len(text) for value, text in zip(values, texts, strict=True)]

        return self._ask_about("log_probability", rollouts, ask, -math.inf)

    def speaker_embeddings(self, rollouts: Sequence[Rollout]) -> list[NDArray[Any] | None]:
        """The speaker's embedding [D]; None for silence."""
        encoder = self._encoder()
        return self._ask_judge("voice", rollouts, lambda w: list(encoder.embed(w, self.sample_rate)), None)

    def mos_scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Mean opinion scores from 1 to 5; 1 for silence."""
        if self.quality is None:
            raise ValueError("SpeechJudges: has no quality model; pass quality=…")
        quality = self.quality
        return self._ask_judge("opinion", rollouts, lambda w: quality.rate(w, self.sample_rate), 1.0)

    def reference_embedding(self, clip: AudioClip) -> NDArray[Any]:
        """The embedding [D] of a recording."""
        if clip.key not in self._references:
            wav = clip.load(self.sample_rate)
            self._references[clip.key] = self._encoder().embed([wav], self.sample_rate)[0]
        return self._references[clip.key]

    def prosodies(self, rollouts: Sequence[Rollout]) -> list[Prosody | None]:
        """The measures of pitch, level and pauses; None for silence and for less than 0.1 s of voice."""
        return self._ask_judge("prosody", rollouts, lambda w: [prosody(wav, self.sample_rate) for wav in w], None)

    def reference_prosody(self, clip: AudioClip) -> Prosody | None:
        """The same of a recording."""
        if clip.key not in self._reference_prosodies:
            self._reference_prosodies[clip.key] = prosody(clip.load(self.sample_rate), self.sample_rate)
        return self._reference_prosodies[clip.key]

    def _recogniser_that(self, method: str, complaint: str) -> Any:
        """The recogniser, which must have that method."""
        if self.recogniser is None or not hasattr(self.recogniser, method):
            name = "no recogniser" if self.recogniser is None else f"the recogniser {self.recogniser.name}"
            raise ValueError(f"SpeechJudges: {name} {complaint}")
        return self.recogniser

    def _encoder(self) -> SpeakerEncoder:
        if self.encoder is None:
            raise ValueError("SpeechJudges: has no speaker encoder; pass encoder=…")
        return self.encoder

    def _decoded(self, rollouts: Sequence[Rollout]) -> list[Waveform]:
        waves = [np.zeros(0, np.float32) if wav is None else wav for wav in self.speech_decoder.waveforms(rollouts)]
        for rollout, wav in zip(rollouts, waves, strict=True):
            if wav.ndim != 1 or not np.isfinite(wav).all():
                raise ValueError(
                    f"{rollout.name}: its speech has shape {wav.shape} and {int(np.count_nonzero(~np.isfinite(wav)))} "
                    "samples that are not finite; the codec or its weights are broken"
                )
        return waves

    def _ask_judge(
        self, name: str, rollouts: Sequence[Rollout], ask: Callable[[list[Waveform]], Sequence[T]], silent: T
    ) -> list[T]:
        """`_ask_about` the waveforms alone."""
        return self._ask_about(name, rollouts, lambda spoken: ask(self.waveforms(spoken)), silent)

    def _ask_about(
        self, name: str, rollouts: Sequence[Rollout], ask: Callable[[list[Rollout]], Sequence[T]], silent: T
    ) -> list[T]:
        """The judge's results, in one call for all rollouts with speech that are not in the cache."""

        def results(new: list[Rollout]) -> list[T]:
            spoken = [r for r, speaks in zip(new, self.have_speech(new), strict=True) if speaks]
            by_id = dict(zip(map(id, spoken), ask(spoken), strict=True)) if spoken else {}
            return [by_id.get(id(r), silent) for r in new]

        return self._once(name, rollouts, results)

    def _once(self, name: str, rollouts: Sequence[Rollout], compute: Callable[[list[Rollout]], Sequence[T]]) -> list[T]:
        new = list({id(r): r for r in rollouts if name not in self._cache.setdefault(r, {})}.values())
        for rollout, result in zip(new, compute(new) if new else (), strict=True):
            self._cache[rollout][name] = result
        return [self._cache[r][name] for r in rollouts]


def _first_references(rollouts: Sequence[Rollout]) -> list[str]:
    return [r.sample.references[0] if r.sample.references else "" for r in rollouts]


@dataclass(frozen=True)
class Intelligibility:
    """1 - WER (or CER) of the recogniser's transcript, in [0, 1], against the closest of the sample's references.

    `against` "text" compares with the rollout's own text instead; without text it scores 0. Normaliser and languages as
    in `audiorl.rewards.asr`. `parts` hold the error rate, which may exceed 1.
    """

    judges: SpeechJudges
    metric: Literal["wer", "cer"] = "wer"
    normalizer: Normalizer = "basic"
    against: Literal["reference", "text"] = "reference"

    def __post_init__(self) -> None:
        if self.metric not in ("wer", "cer"):
            raise ValueError(f"Intelligibility: metric {self.metric!r} is not one of 'wer', 'cer'")
        if self.against not in ("reference", "text"):
            raise ValueError(f"Intelligibility: against {self.against!r} is not one of 'reference', 'text'")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        transcripts = self.judges.transcripts(rollouts)
        return [self._score(r, transcript) for r, transcript in zip(rollouts, transcripts, strict=True)]

    def _score(self, rollout: Rollout, transcript: str) -> Score:
        rate = self._rate(rollout, transcript)
        # An empty transcript scores 0 even against an empty reference, whose error rate would be 0.
        return Score(max(0.0, 1.0 - rate) if transcript else 0.0, {self.metric: rate})

    def _rate(self, rollout: Rollout, transcript: str) -> float:
        errors = word_errors if self.metric == "wer" else char_errors
        if self.against == "reference":
            return error_rate(rollout.sample, transcript, errors, self.normalizer)
        written, language = final_text(rollout.text), language_of(rollout.sample)
        if not normalize(written, self.normalizer, language):
            return 1.0
        return errors(written, transcript, self.normalizer, language).rate


@dataclass(frozen=True)
class Likelihood:
    """How probable the recogniser finds the sample's first reference: the geometric mean for a character, in [0, 1].

    It goes on rising where a transcript has no errors left, towards the speech that suits the recogniser best: used
    alone it makes speech monotone (arXiv 2509.18531, where ln p is the reward). Combine it with `ProsodyRange`. Needs
    Whisper or a recogniser with a CTC head (`TextScorer`). `parts` hold ln p for a character.
    """

    judges: SpeechJudges

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        # JSON knows no -inf: silence is logged as 100 nats.
        values = [max(value, -100.0) for value in self.judges.text_log_probabilities(rollouts)]
        return [Score(math.exp(value), {"logprob": value}) for value in values]


@dataclass(frozen=True)
class WordIntelligibility:
    """The mean over the words of the sample's first reference of 1 - CER, in [0, 1], with credit on each word's frames.

    Needs a recogniser with a CTC head (`Aligner`): the text is aligned with the speech, and each word is compared with
    what the recogniser understood while it is said. `per_token` puts a word's share on the last frame that says it, the
    last word's on the last sampled token, and `step_ends` are these tokens: for the advantages `step-index` and
    `process`, and for `gae`. Silence, and a text without words, score 0.
    Raises ValueError where a rollout has speech in several segments, and for a recogniser that cannot align.
    """

    judges: SpeechJudges
    normalizer: Normalizer = "basic"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        waves, aligned = self.judges.waveforms(rollouts), self.judges.aligned_words(rollouts)
        seconds = [len(wav) / self.judges.sample_rate for wav in waves]
        return [self._score(*row) for row in zip(rollouts, seconds, aligned, strict=True)]

    def _score(self, rollout: Rollout, seconds: float, words: Sequence[AlignedWord]) -> Score:
        if not rollout.num_sampled:
            return Score(0.0, {"cer": 1.0})
        rates = [min(char_errors(w.text, w.transcript, self.normalizer).rate, 1.0) for w in words] or [1.0]
        values = [(1.0 - rate) / len(rates) for rate in rates]
        per_token, ends = [0.0] * rollout.num_sampled, list[int]()
        frames = _spoken_rows(rollout)
        for index, value in enumerate(values):
            place = rollout.num_sampled - 1
            if index < len(values) - 1:
                # Codebook k is delayed by k rows: a frame's codes lie around the row that is half as many rows later.
                place = frames[min(round(len(frames) * words[index].end / seconds), len(frames) - 1)]
                place = min(place, rollout.num_sampled - len(values) + index)
            ends.append(max(place, 0))
            per_token[ends[-1]] += value
        cer = sum(rates) / len(rates)
        return Score(1.0 - cer, {"cer": cer}, per_token=tuple(per_token), step_ends=tuple(ends))


def _spoken_rows(rollout: Rollout) -> list[int]:
    """Which of the sampled rows are codec frames, of the one segment that speaks."""
    spoken = [s for s in rollout.segments if s.codes is not None]
    if len(spoken) > 1:
        raise ValueError(f"{rollout.name}: WordIntelligibility scores one spoken segment; this has {len(spoken)}")
    before = 0
    for s in rollout.segments:
        if s.codes is not None:
            return [before + int(i) for i in (s.codes[:, 0] >= 0).nonzero()[:, 0]]
        before += len(s.ids)
    return []


def reference_clip(sample: Sample) -> AudioClip:
    """sample.metadata["reference_audio"], an AudioClip or a path, or else the only clip in the prompt."""
    reference = sample.metadata.get("reference_audio")
    if isinstance(reference, AudioClip):
        return reference
    if isinstance(reference, str) and reference:
        return AudioClip(path=reference)
    if len(sample.audio) == 1:
        return sample.audio[0]
    raise ValueError(
        f"sample {sample.id!r}: no metadata['reference_audio'] and {len(sample.audio)} clips in the prompt; "
        "name the recording of the wanted voice"
    )


def reference_seconds(sample: Sample) -> float:
    """sample.metadata["reference_seconds"], or else the total duration of the references of its turns."""
    seconds = sample.metadata.get("reference_seconds")
    if seconds is None and sample.turns:
        turns = [t.reference_seconds for t in sample.turns if t.reference]
        seconds = sum(s for s in turns if s is not None) if None not in turns else None
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not (math.isfinite(seconds) and seconds >= 0)
    ):
        raise ValueError(f"sample {sample.id!r}: metadata['reference_seconds'] is {seconds!r}, expected seconds")
    return float(seconds)


@dataclass(frozen=True)
class SpeakerSimilarity:
    """Cosine between the speaker embeddings of a rollout and of `reference(sample)`; 0 where it is negative."""

    judges: SpeechJudges
    reference: Callable[[Sample], AudioClip] = reference_clip

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        embeddings = self.judges.speaker_embeddings(rollouts)
        return [
            Score(0.0 if e is None else max(0.0, cosine(e, self.judges.reference_embedding(self.reference(r.sample)))))
            for r, e in zip(rollouts, embeddings, strict=True)
        ]


@dataclass(frozen=True)
class Duration:
    """min / max of the duration of the speech and of `reference(sample)` seconds: 0.5 for double or half.

    No speech scores 0, and 1 against a reference of 0 s. `parts` hold the seconds.
    """

    judges: SpeechJudges
    reference: Callable[[Sample], float] = reference_seconds

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout, wav in zip(rollouts, self.judges.waveforms(rollouts), strict=True):
            seconds = len(wav) / self.judges.sample_rate
            scores.append(Score(duration_ratio(seconds, self.reference(rollout.sample)), {"seconds": seconds}))
        return scores


@dataclass(frozen=True)
class NotSilent:
    """1 where at most a share `most` of the 25 ms frames is silent, else 0. `parts` hold the share of silent frames."""

    judges: SpeechJudges
    most: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.most < 1:
            raise ValueError(f"NotSilent: most must be in [0, 1), got {self.most}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        judges = self.judges
        shares = [silent_share(w, judges.sample_rate, judges.silence) for w in judges.waveforms(rollouts)]
        return [Score(float(share <= self.most), {"silent": share}) for share in shares]


@dataclass(frozen=True)
class NotClipped:
    """1 where at most a share `most` of the samples is clipped, else 0; no speech scores 0. `parts` hold the share."""

    judges: SpeechJudges
    most: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.most < 1:
            raise ValueError(f"NotClipped: most must be in [0, 1), got {self.most}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        shares = [clipped_share(wav) for wav in self.judges.waveforms(rollouts)]
        return [
            Score(float(share <= self.most and speaks), {"clipped": share})
            for share, speaks in zip(shares, self.judges.have_speech(rollouts), strict=True)
        ]


@dataclass(frozen=True)
class Finished:
    """1 where the rollout ended by itself, 0 where a segment reached its token limit or there is no speech."""

    judges: SpeechJudges

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(float(speaks and all(s.stop_reason != "length" for s in r.segments)))
            for r, speaks in zip(rollouts, self.judges.have_speech(rollouts), strict=True)
        ]


@dataclass(frozen=True)
class PredictedMOS:
    """The predicted mean opinion score (1 to 5) as (mos - 1) / 4, clipped to [0, 1]. `parts` hold the score itself."""

    judges: SpeechJudges

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = self.judges.mos_scores(rollouts)
        return [Score(min(max((mos - 1.0) / 4.0, 0.0), 1.0), {"mos": mos}) for mos in scores]
