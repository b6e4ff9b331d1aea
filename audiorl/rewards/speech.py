"""Rewards of rollouts that spoke: can it be understood, is it the right voice, how long is it, is it silent or clipped.

A `SpeechJudges` says what a rollout's audio is and asks the judges about it, all rollouts of a step at once and each
rollout only once, however many rewards share the judges::

    judges = SpeechJudges(voice, recogniser=load_recogniser("judges/whisper-base", "en"))
    WeightedSum.of(words=Intelligibility(judges), length=(Duration(judges), 0.5), sound=NotSilent(judges))

A rollout that said nothing, or only silence, scores 0 everywhere (`Duration` against a reference of 0 s excepted): to
keep silent is never the way to a better score. One that was cut off at its token limit is scored by what it said until
then; `Finished` tells it apart.
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
from audiorl.judges.protocol import QualityModel, Recogniser, SpeakerEncoder, Waveform
from audiorl.metrics.speaker import cosine
from audiorl.metrics.speech import clipped_share, duration_ratio, silent_share
from audiorl.metrics.text import Normalizer, char_errors, normalize, word_errors
from audiorl.rewards.asr import error_rate, language_of
from audiorl.rewards.tags import final_text
from audiorl.types import Rollout, Sample, Score, SpeechDecoder

T = TypeVar("T")


@dataclass(frozen=True)
class RecordedSpeech:
    """A speech decoder for recorded rollouts, which reads the recording that the run wrote in place of their codes.

    For rewards of `audiorl rewards score` where the codec is not at hand. Recordings have 16 bits.
    """

    sample_rate: int = 24_000

    def waveform(self, rollout: Rollout) -> Waveform | None:
        """The recording, float32 [T]; None where there is none."""
        return None if rollout.spoken_audio is None else rollout.spoken_audio.load(self.sample_rate)


@dataclass(frozen=True, eq=False)
class SpeechJudges:
    """What judges hear in rollouts; every answer is kept for as long as its rollout is.

    Frames of 25 ms below `silence` dB are silent; a rollout without any other is not shown to the judges, which tend to
    hear words in silence.
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

    @property
    def sample_rate(self) -> int:
        return self.speech_decoder.sample_rate

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[Waveform]:
        """What each said, [T]; T = 0 for nothing. ValueError naming the rollout for samples that are not finite."""
        return self._once("waveform", rollouts, lambda new: [self._decoded(r) for r in new])

    def has_speech(self, rollout: Rollout) -> bool:
        """Whether it said anything but silence."""
        return silent_share(self.waveforms([rollout])[0], self.sample_rate, self.silence) < 1.0

    def transcripts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """What the recogniser understands; "" for silence."""
        if self.recogniser is None:
            raise ValueError("SpeechJudges: has no recogniser; give it one to have speech transcribed")
        recogniser = self.recogniser
        return self._ask_judge("transcript", rollouts, lambda w: recogniser.transcribe(w, self.sample_rate), "")

    def speaker_embeddings(self, rollouts: Sequence[Rollout]) -> list[NDArray[Any] | None]:
        """The speaker's embedding [D]; None for silence."""
        encoder = self._encoder()
        return self._ask_judge("voice", rollouts, lambda w: list(encoder.embed(w, self.sample_rate)), None)

    def mos_scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Mean opinion scores from 1 to 5; 1 for silence."""
        if self.quality is None:
            raise ValueError("SpeechJudges: has no quality model; give it one to have speech rated")
        quality = self.quality
        return self._ask_judge("opinion", rollouts, lambda w: quality.rate(w, self.sample_rate), 1.0)

    def reference_embedding(self, clip: AudioClip) -> NDArray[Any]:
        """The embedding [D] of a recording."""
        if clip.key not in self._references:
            wav = clip.load(self.sample_rate)
            self._references[clip.key] = self._encoder().embed([wav], self.sample_rate)[0]
        return self._references[clip.key]

    def _encoder(self) -> SpeakerEncoder:
        if self.encoder is None:
            raise ValueError("SpeechJudges: has no speaker encoder; give it one to have voices compared")
        return self.encoder

    def _decoded(self, rollout: Rollout) -> Waveform:
        wav = self.speech_decoder.waveform(rollout)
        if wav is None:
            return np.zeros(0, np.float32)
        if wav.ndim != 1 or not np.isfinite(wav).all():
            raise ValueError(
                f"{rollout.name}: what it said has shape {wav.shape} and {int(np.count_nonzero(~np.isfinite(wav)))} "
                "samples that are not finite; the codec or its weights are broken"
            )
        return wav

    def _ask_judge(
        self, question: str, rollouts: Sequence[Rollout], ask: Callable[[list[Waveform]], Sequence[T]], silent: T
    ) -> list[T]:
        """The judge's answers, in one call for all that speak and were not asked about before."""

        def answer(new: list[Rollout]) -> list[T]:
            speaking = [r for r in new if self.has_speech(r)]
            found = dict(zip(map(id, speaking), ask(self.waveforms(speaking)), strict=True)) if speaking else {}
            return [found.get(id(r), silent) for r in new]

        return self._once(question, rollouts, answer)

    def _once(
        self, question: str, rollouts: Sequence[Rollout], answer: Callable[[list[Rollout]], Sequence[T]]
    ) -> list[T]:
        new = list({id(r): r for r in rollouts if question not in self._cache.setdefault(r, {})}.values())
        for rollout, found in zip(new, answer(new), strict=True):
            self._cache[rollout][question] = found
        return [self._cache[r][question] for r in rollouts]


@dataclass(frozen=True)
class Intelligibility:
    """1 - WER (or CER) of what a recogniser understands, in [0, 1], against the sample's references, the best of them.

    `against` "text" takes what the rollout itself wrote in place of the references; where it wrote nothing it scores 0.
    Normaliser and languages as in `audiorl.rewards.asr`. `parts` hold the error rate, which may exceed 1.
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
        return [self._score(r, heard) for r, heard in zip(rollouts, self.judges.transcripts(rollouts), strict=True)]

    def _score(self, rollout: Rollout, heard: str) -> Score:
        rate = self._rate(rollout, heard)
        # Without a word understood nothing is intelligible, whatever an empty reference would say.
        return Score(max(0.0, 1.0 - rate) if heard else 0.0, {self.metric: rate})

    def _rate(self, rollout: Rollout, heard: str) -> float:
        errors = word_errors if self.metric == "wer" else char_errors
        if self.against == "reference":
            return error_rate(rollout.sample, heard, errors, self.normalizer)
        written, language = final_text(rollout.text), language_of(rollout.sample)
        if not normalize(written, self.normalizer, language):
            return 1.0
        return errors(written, heard, self.normalizer, language).rate


def reference_clip(sample: Sample) -> AudioClip:
    """sample.metadata["reference_audio"], an AudioClip or a path, or else the only clip in the prompt."""
    found = sample.metadata.get("reference_audio")
    if isinstance(found, AudioClip):
        return found
    if isinstance(found, str) and found:
        return AudioClip(path=found)
    if len(sample.audio) == 1:
        return sample.audio[0]
    raise ValueError(
        f"sample {sample.id!r}: no metadata['reference_audio'] and {len(sample.audio)} clips in the prompt; "
        "say which voice is meant"
    )


def reference_seconds(sample: Sample) -> float:
    """sample.metadata["reference_seconds"], or else how long the references of its turns last together."""
    found = sample.metadata.get("reference_seconds")
    if found is None and sample.turns:
        turns = [t.reference_seconds for t in sample.turns if t.reference]
        found = sum(s for s in turns if s is not None) if None not in turns else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not (math.isfinite(found) and found >= 0):
        raise ValueError(f"sample {sample.id!r}: metadata['reference_seconds'] is {found!r}, expected seconds")
    return float(found)


@dataclass(frozen=True)
class SpeakerSimilarity:
    """Cosine between the voice of a rollout and that of `reference(sample)`, negative ones as 0."""

    judges: SpeechJudges
    reference: Callable[[Sample], AudioClip] = reference_clip

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        speaker_embeddings = self.judges.speaker_embeddings(rollouts)
        return [
            Score(0.0 if v is None else max(0.0, cosine(v, self.judges.reference_embedding(self.reference(r.sample)))))
            for r, v in zip(rollouts, speaker_embeddings, strict=True)
        ]


@dataclass(frozen=True)
class Duration:
    """min / max of the lengths of what was said and of `reference(sample)` seconds: 0.5 for double or half.

    Nothing said is 0, against a reference of 0 s it is 1. `parts` hold the seconds.
    """

    judges: SpeechJudges
    reference: Callable[[Sample], float] = reference_seconds

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout, wav in zip(rollouts, self.judges.waveforms(rollouts), strict=True):
            said = len(wav) / self.judges.sample_rate
            scores.append(Score(duration_ratio(said, self.reference(rollout.sample)), {"seconds": said}))
        return scores


@dataclass(frozen=True)
class NotSilent:
    """1 where at most `most` of the 25 ms frames are silent, else 0. `parts` hold the share of silent ones."""

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
    """1 where at most `most` of the samples are at the limits, else 0. `parts` hold their share; nothing said is 0."""

    judges: SpeechJudges
    most: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.most < 1:
            raise ValueError(f"NotClipped: most must be in [0, 1), got {self.most}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        waves = self.judges.waveforms(rollouts)
        shares = [clipped_share(wav) for wav in waves]
        return [
            Score(float(share <= self.most and self.judges.has_speech(r)), {"clipped": share})
            for r, share in zip(rollouts, shares, strict=True)
        ]


@dataclass(frozen=True)
class Finished:
    """1 where the rollout ended by itself, 0 where any segment ran into its token limit, or nothing was said."""

    judges: SpeechJudges

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(float(self.judges.has_speech(r) and all(s.stop_reason != "length" for s in r.segments)))
            for r in rollouts
        ]


@dataclass(frozen=True)
class PredictedMOS:
    """A mean opinion score of 1 to 5 as (mos - 1) / 4, kept in [0, 1]. `parts` hold the score itself."""

    judges: SpeechJudges

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        mos_scores = self.judges.mos_scores(rollouts)
        return [Score(min(max((mos - 1.0) / 4.0, 0.0), 1.0), {"mos": mos}) for mos in mos_scores]
