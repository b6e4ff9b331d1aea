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
from audiorl.types import Rollout, Sample

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
    _references: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def sample_rate(self) -> int:
        return self.speech_decoder.sample_rate

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[Waveform]:
        """Return the speech of each, [T]; T = 0 without speech. Raises ValueError for samples that are not finite."""

        def decode(new: list[Rollout]) -> list[Waveform]:
            waves = [np.zeros(0, np.float32) if wav is None else wav for wav in self.speech_decoder.waveforms(new)]
            for rollout, wav in zip(new, waves, strict=True):
                if wav.ndim != 1 or not np.isfinite(wav).all():
                    raise ValueError(
                        f"{rollout.name}: its speech has shape {wav.shape} and {np.count_nonzero(~np.isfinite(wav))} "
                        "samples that are not finite; the codec or its weights are broken"
                    )
            return waves

        return self._once("waveform", rollouts, decode)

    def have_speech(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """Return whether the speech of each has a frame that is not silent."""
        return [silent_share(wav, self.sample_rate, self.silence) < 1.0 for wav in self.waveforms(rollouts)]

    def transcripts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return the recogniser's transcripts; "" for silence."""
        recogniser = _given(self.recogniser, "recogniser")
        return self._ask("transcript", rollouts, lambda _, w: recogniser.transcribe(w, self.sample_rate), "")

    def aligned_words(self, rollouts: Sequence[Rollout]) -> list[list[AlignedWord]]:
        """Return the words of the first references, where they are said and what was understood; none for silence."""
        return self._ask("words", rollouts, self.align, [])

    def align(self, texts: Sequence[str], waveforms: Sequence[Waveform]) -> list[list[AlignedWord]]:
        """Return the words of each text, see `Aligner`. Raises ValueError for a recogniser that is none."""
        aligner = _given(self.recogniser, "recogniser")
        if not isinstance(aligner, Aligner):
            raise ValueError(
                f"SpeechModels: the recogniser {aligner.name} cannot align words; take one with a CTC head, such as "
                "Wav2Vec2 or CharacterCTC"
            )
        return aligner.align(waveforms, self.sample_rate, texts)

    def text_log_probabilities(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return ln p of the first references by the recogniser, in nats for each character; -inf for silence."""
        return self._ask("log_probability", rollouts, self.score, -math.inf)

    def score(self, texts: Sequence[str], waveforms: Sequence[Waveform]) -> list[float]:
        """Return ln p of each text for each of its characters, see `TextScorer`. Raises ValueError for a recogniser
        that is none."""
        scorer = _given(self.recogniser, "recogniser")
        if not isinstance(scorer, TextScorer):
            raise ValueError(
                f"SpeechModels: the recogniser {scorer.name} gives no probabilities of texts; take Whisper or one with "
                "a CTC head"
            )
        values = scorer.log_probabilities(waveforms, self.sample_rate, texts)
        return [value / len(text) for value, text in zip(values, texts, strict=True)]

    def speaker_embeddings(self, rollouts: Sequence[Rollout]) -> list[NDArray[Any] | None]:
        """Return the speaker's embedding [D]; None for silence."""
        encoder = _given(self.encoder, "encoder")
        return self._ask("voice", rollouts, lambda _, w: list(encoder.embed(w, self.sample_rate)), None)

    def mos_scores(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return mean opinion scores from 1 to 5; 1 for silence."""
        quality = _given(self.quality, "quality")
        return self._ask("opinion", rollouts, lambda _, w: quality.rate(w, self.sample_rate), 1.0)

    def prosodies(self, rollouts: Sequence[Rollout]) -> list[Prosody | None]:
        """Return the measures of pitch, level and pauses; None for silence and for less than 0.1 s of voice."""
        return self._ask("prosody", rollouts, lambda _, w: [prosody(wav, self.sample_rate) for wav in w], None)

    def reference_embedding(self, clip: AudioClip) -> NDArray[Any]:
        """Return the embedding [D] of a recording."""
        encoder = _given(self.encoder, "encoder")
        return self._of_reference("voice", clip, lambda wav: encoder.embed([wav], self.sample_rate)[0])

    def reference_prosody(self, clip: AudioClip) -> Prosody | None:
        """Return the measures of a recording; None for less than 0.1 s of voice."""
        return self._of_reference("prosody", clip, lambda wav: prosody(wav, self.sample_rate))

    def _of_reference(self, name: str, clip: AudioClip, ask: Callable[[Waveform], T]) -> T:
        if (name, clip.key) not in self._references:
            self._references[name, clip.key] = ask(clip.load(self.sample_rate))
        result: T = self._references[name, clip.key]
        return result

    def _ask(
        self, name: str, rollouts: Sequence[Rollout], ask: Callable[[list[str], list[Waveform]], Sequence[T]], silent: T
    ) -> list[T]:
        """Return the results for (first references, waveforms), in one call for all that speak and are not cached."""

        def results(new: list[Rollout]) -> list[T]:
            spoken = [r for r, speaks in zip(new, self.have_speech(new), strict=True) if speaks]
            texts = [first_reference(r.sample) for r in spoken]
            found = ask(texts, self.waveforms(spoken)) if spoken else ()
            by_id = dict(zip(map(id, spoken), found, strict=True))
            return [by_id.get(id(r), silent) for r in new]

        return self._once(name, rollouts, results)

    def _once(self, name: str, rollouts: Sequence[Rollout], compute: Callable[[list[Rollout]], Sequence[T]]) -> list[T]:
        new = list({id(r): r for r in rollouts if name not in self._cache.setdefault(r, {})}.values())
        for rollout, result in zip(new, compute(new) if new else (), strict=True):
            self._cache[rollout][name] = result
        return [self._cache[r][name] for r in rollouts]


def first_reference(sample: Sample) -> str:
    """Return the text that should be said, "" for a sample without references."""
    return sample.references[0] if sample.references else ""


def _given(model: T | None, name: str) -> T:
    if model is None:
        raise ValueError(f"SpeechModels: has no {name}; pass {name}=…")
    return model
