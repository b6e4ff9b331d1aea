"""The speech of rollouts, decoded once, and what speech models find in it.

`SpeechModels` decodes the speech of rollouts and runs a recogniser, a speaker encoder and a quality model on it.
Rewards that share one share its results: each model sees a rollout once, and all rollouts of a step in one call::

    models = SpeechModels(speech_decoder, recogniser=load_recogniser("whisper-base", "en"))
    WeightedSum.of(words=Intelligibility(models), length=(Duration(models), 0.5), sound=NotSilent(models))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip
from audiorl.eval.metrics.prosody import Prosody, prosody
from audiorl.eval.metrics.speech import silent_share
from audiorl.protocols import SpeechDecoder
from audiorl.speech_models.protocol import (
    AlignedWord,
    Aligner,
    QualityModel,
    Recogniser,
    SpeakerEncoder,
    TextScorer,
    Waveform,
)
from audiorl.types import Rollout

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class SpeechModels:
    """The models that speech rewards ask, with a cache of their results that lives as long as the rollouts.

    `silence`: a 25 ms frame below so many dB is silent. A rollout with silent frames only is not passed to the models,
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
        """Return the speech of each, [T]; T = 0 without speech. Raises ValueError for samples that are not finite."""
        return self._once("waveform", rollouts, self._decoded)

    def have_speech(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """Return whether the speech of each has a frame that is not silent."""
        return [silent_share(wav, self.sample_rate, self.silence) < 1.0 for wav in self.waveforms(rollouts)]

    def transcripts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return the recogniser's transcripts; "" for silence."""
        if self.recogniser is None:
            raise ValueError("SpeechModels: has no recogniser; pass recogniser=…")
        recogniser = self.recogniser
        return self._ask_waveforms("transcript", rollouts, lambda w: recogniser.transcribe(w, self.sample_rate), "")

    def aligned_words(self, rollouts: Sequence[Rollout]) -> list[list[AlignedWord]]:
        """Return the words of the first references, where they are said and what was understood; none for silence."""
        aligner = self.recogniser
        if not isinstance(aligner, Aligner):
            raise self._lacks("cannot align words; take one with a CTC head, such as Wav2Vec2 or CharacterCTC")

        def align(spoken: list[Rollout]) -> list[list[AlignedWord]]:
            return aligner.align(self.waveforms(spoken), self.sample_rate, _first_references(spoken))

        return self._ask_about("words", rollouts, align, [])

    def text_log_probabilities(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return ln p of the first references by the recogniser, in nats for each character; -inf for silence."""
        scorer = self.recogniser
        if not isinstance(scorer, TextScorer):
            raise self._lacks("gives no probabilities of texts; take Whisper or one with a CTC head")

        def ask(spoken: list[Rollout]) -> list[float]:
            texts = _first_references(spoken)
            values = scorer.log_probabilities(self.waveforms(spoken), self.sample_rate, texts)
            return [value / len(text) for value, text in zip(values, texts, strict=True)]

        return self._ask_about("log_probability", rollouts, ask, -math.inf)

    def speaker_embeddings(self, rollouts: Sequence[Rollout]) -> list[NDArray[Any] | None]:
        """Return the speaker's embedding [D]; None for silence."""
        encoder = self._encoder()
        return self._ask_waveforms("voice", rollouts, lambda w: list(encoder.embed(w, self.sample_rate)), None)

    def mos_scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return mean opinion scores from 1 to 5; 1 for silence."""
        if self.quality is None:
            raise ValueError("SpeechModels: has no quality model; pass quality=…")
        quality = self.quality
        return self._ask_waveforms("opinion", rollouts, lambda w: quality.rate(w, self.sample_rate), 1.0)

    def reference_embedding(self, clip: AudioClip) -> NDArray[Any]:
        """Return the embedding [D] of a recording."""
        if clip.key not in self._references:
            wav = clip.load(self.sample_rate)
            self._references[clip.key] = self._encoder().embed([wav], self.sample_rate)[0]
        return self._references[clip.key]

    def prosodies(self, rollouts: Sequence[Rollout]) -> list[Prosody | None]:
        """Return the measures of pitch, level and pauses; None for silence and for less than 0.1 s of voice."""
        return self._ask_waveforms("prosody", rollouts, lambda w: [prosody(wav, self.sample_rate) for wav in w], None)

    def reference_prosody(self, clip: AudioClip) -> Prosody | None:
        """Return the measures of a recording; None for less than 0.1 s of voice."""
        if clip.key not in self._reference_prosodies:
            self._reference_prosodies[clip.key] = prosody(clip.load(self.sample_rate), self.sample_rate)
        return self._reference_prosodies[clip.key]

    def _lacks(self, complaint: str) -> ValueError:
        name = "no recogniser" if self.recogniser is None else f"the recogniser {self.recogniser.name}"
        return ValueError(f"SpeechModels: {name} {complaint}")

    def _encoder(self) -> SpeakerEncoder:
        if self.encoder is None:
            raise ValueError("SpeechModels: has no speaker encoder; pass encoder=…")
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

    def _ask_waveforms(
        self, name: str, rollouts: Sequence[Rollout], ask: Callable[[list[Waveform]], Sequence[T]], silent: T
    ) -> list[T]:
        """`_ask_about` the waveforms alone."""
        return self._ask_about(name, rollouts, lambda spoken: ask(self.waveforms(spoken)), silent)

    def _ask_about(
        self, name: str, rollouts: Sequence[Rollout], ask: Callable[[list[Rollout]], Sequence[T]], silent: T
    ) -> list[T]:
        """Return the model's results, in one call for all rollouts with speech that are not in the cache."""

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
