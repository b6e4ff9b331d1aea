"""The rewards of text to speech by their weights, with the judges that they ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.judges import load_quality_model, load_recogniser, load_speaker_encoder
from audiorl.metrics.text import Normalizer
from audiorl.rewards import Term, WeightedSum
from audiorl.rewards.speech import (
    Duration,
    Finished,
    Intelligibility,
    NotClipped,
    NotSilent,
    PredictedMOS,
    SpeakerSimilarity,
    SpeechJudges,
    reference_clip,
    reference_seconds,
)
from audiorl.types import Reward, Sample, SpeechDecoder


@dataclass(frozen=True)
class SpeechRewards:
    """What speech is rewarded for. Each weight may be 0: the reward is left out, and its judge is not loaded."""

    understood: float = 1.0
    """Weight of 1 - WER (or CER) of what `asr` understands."""
    similarity: float = 0.5
    """Weight of the cosine between the voices of what was said and of the reference, by `speaker`."""
    duration: float = 0.2
    """Weight of min / max of its length and the reference's; without a recording that is the prompt's pace."""
    finished: float = 0.1
    """Weight of ending before the limit on frames."""
    silence: float = 0.1
    """Weight of being silent in at most 70% of its frames."""
    clipping: float = 0.1
    """Weight of at most 0.1% of its samples at the limits."""
    quality: float = 0.0
    """Weight of DNSMOS's opinion, which needs the extra `speech`."""
    asr: str = "facebook/wav2vec2-large-960h-lv60-self"
    """A recogniser by path or hub id (Whisper, any CTC model, `pocketsphinx`). It should be quick and literal: one that
    corrects what it hears forgives what the model mumbles."""
    speaker: str = "microsoft/wavlm-base-plus-sv"
    """A speaker encoder by path or hub id."""
    metric: Literal["wer", "cer"] = "wer"
    """Errors of what `asr` understands: by word (wer) or by character (cer)."""
    normalizer: Normalizer = "basic"
    """Normalisation of both texts before they are compared; see audiorl.metrics.text."""

    def __post_init__(self) -> None:
        for name, weight in self.weights().items():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"rewards.{name} is {weight}; give a weight, or 0 to leave it out")
        if not any(self.weights().values()):
            raise ValueError("rewards: every weight is 0; give at least one")

    def weights(self) -> dict[str, float]:
        """By the rewards' names in logs."""
        names = ("understood", "similarity", "duration", "finished", "silence", "clipping", "quality")
        return {name: getattr(self, name) for name in names}


def speech_reward(
    options: SpeechRewards, voice: SpeechDecoder, samples: Sequence[Sample], language: str | None = None
) -> WeightedSum:
    """The weighted sum of what `options` ask for, once it is certain that every sample has what they compare with.

    `language`: what a multilingual recogniser hears. Raises ValueError naming a sample without a reference.
    """
    o = options
    for sample in samples:
        for weight, look, remedy in (
            (o.similarity, reference_clip, "give it prompt_audio or a recording, or --rewards.similarity 0"),
            (o.duration, reference_seconds, "give it prompt_audio or a recording, or --rewards.duration 0"),
        ):
            if weight:
                try:
                    look(sample)
                except ValueError as error:
                    raise ValueError(f"{error}; {remedy}") from error
    judges = SpeechJudges(
        voice,
        recogniser=load_recogniser(o.asr, language) if o.understood else None,
        encoder=load_speaker_encoder(o.speaker) if o.similarity else None,
        quality=load_quality_model("dnsmos") if o.quality else None,
    )
    rewards: dict[str, Reward] = {
        "understood": Intelligibility(judges, o.metric, o.normalizer),
        "similarity": SpeakerSimilarity(judges),
        "duration": Duration(judges),
        "finished": Finished(judges),
        "silence": NotSilent(judges),
        "clipping": NotClipped(judges),
        "quality": PredictedMOS(judges),
    }
    return WeightedSum(tuple(Term(name, rewards[name], weight) for name, weight in o.weights().items() if weight))
