"""The rewards of text to speech: their weights, and the judges that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.audio import AudioClip
from audiorl.eval.metrics.text import Normalizer
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.rewards import Gated, Term, WeightedSum
from audiorl.rewards.prosody import ProsodyRange, own_recording, prosody_norm
from audiorl.rewards.speech import (
    Duration,
    Finished,
    Intelligibility,
    Likelihood,
    NotClipped,
    NotSilent,
    PredictedMOS,
    SpeakerSimilarity,
    SpeechJudges,
    WordIntelligibility,
    reference_clip,
    reference_seconds,
)
from audiorl.speech_models import load_quality_model, load_recogniser, load_speaker_encoder
from audiorl.types import Sample

GATED = ("similarity", "quality", "prosody")
"""The rewards that `SpeechRewards.gate` withholds from speech that is not understood."""


@dataclass(frozen=True)
class SpeechRewards:
    """Weights of the speech rewards. A reward with weight 0 is left out, and its judge is not loaded."""

    understood: float = 1.0
    """Weight of 1 - WER (or CER) of the transcript by `asr`."""
    likelihood: float = 0.0
    """Weight of how probable `asr` finds the text (`Likelihood`); Whisper or a recogniser with a CTC head. Give prosody
    a weight as well."""
    similarity: float = 0.5
    """Weight of the cosine between the speaker embeddings of the speech and of the reference, by `speaker`."""
    duration: float = 0.2
    """Weight of min / max of the durations of the speech and of the reference (see `reference_seconds`)."""
    finished: float = 0.1
    """Weight of ending before the limit on frames."""
    silence: float = 0.1
    """Weight of having at most 70% silent frames."""
    clipping: float = 0.1
    """Weight of having at most 0.1% clipped samples."""
    quality: float = 0.0
    """Weight of the mean opinion score predicted by DNSMOS, which needs the extra `speech`."""
    prosody: float = 0.0
    """Weight of how usual the ranges of pitch and level and the pauses are, compared with the texts' own recordings, or
    with the voice's. Rewards of intelligibility alone make speech monotone."""
    gate: float | None = None
    """The character error rate above which similarity, quality and prosody score 0, such as 0.3, so that babble does
    not earn them. None: they always count."""
    asr: str = "facebook/wav2vec2-large-960h-lv60-self"
    """A recogniser by path or hub id (Whisper, any CTC model, `pocketsphinx`). Choose a fast and literal one: a
    recogniser with a strong language model corrects errors of pronunciation that the reward should see."""
    speaker: str = "microsoft/wavlm-base-plus-sv"
    """A speaker encoder by path or hub id."""
    metric: Literal["wer", "cer", "word-cer"] = "wer"
    """Errors of what `asr` understands: by word (wer), by character (cer), or by character within the time of each word
    (word-cer), which `--rl.advantage step-index` credits to the frames of that word. word-cer needs a recogniser with
    a CTC head."""
    normalizer: Normalizer = "basic"
    """Normalisation of both texts before they are compared; see audiorl.eval.metrics.text."""

    def __post_init__(self) -> None:
        for name, weight in self.weights().items():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"rewards.{name} is {weight}; give a weight, or 0 to leave it out")
        if not any(self.weights().values()):
            raise ValueError("rewards: every weight is 0; give at least one")
        if self.gate is not None and not 0 <= self.gate < 1:
            raise ValueError(f"rewards.gate is {self.gate}; give a character error rate in [0, 1), such as 0.3")
        if self.gate is not None and not any(getattr(self, name) for name in GATED):
            raise ValueError(f"rewards.gate: {', '.join(GATED)} all have weight 0; give one of them a weight")

    def weights(self) -> dict[str, float]:
        """By the rewards' names in logs."""
        names = (
            "understood",
            "likelihood",
            "similarity",
            "duration",
            "finished",
            "silence",
            "clipping",
            "quality",
            "prosody",
        )
        return {name: getattr(self, name) for name in names}


def speech_reward(
    options: SpeechRewards, voice: SpeechDecoder, samples: Sequence[Sample], language: str | None = None
) -> WeightedSum:
    """The weighted sum of the rewards in `options`. Every sample is first checked for the references that they need.

    `language`: the language for a multilingual recogniser. Raises ValueError naming a sample without a reference, and
    for prosody where no sample has a recording.
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
        recogniser=load_recogniser(o.asr, language) if o.understood or o.likelihood or o.gate is not None else None,
        encoder=load_speaker_encoder(o.speaker) if o.similarity else None,
        quality=load_quality_model("dnsmos") if o.quality else None,
    )
    rewards: dict[str, Reward] = {
        "understood": (
            WordIntelligibility(judges, o.normalizer)
            if o.metric == "word-cer"
            else Intelligibility(judges, o.metric, o.normalizer)
        ),
        "likelihood": Likelihood(judges),
        "similarity": SpeakerSimilarity(judges),
        "duration": Duration(judges),
        "finished": Finished(judges),
        "silence": NotSilent(judges),
        "clipping": NotClipped(judges),
        "quality": PredictedMOS(judges),
    }
    if o.prosody:
        rewards["prosody"] = ProsodyRange(judges, prosody_norm(_recordings(samples), judges.sample_rate))
    if o.gate is not None:
        understood = Intelligibility(judges, "cer", o.normalizer)
        rewards |= {name: Gated(rewards[name], understood, 1 - o.gate) for name in GATED if name in rewards}
    return WeightedSum(tuple(Term(name, rewards[name], weight) for name, weight in o.weights().items() if weight))


def _recordings(samples: Sequence[Sample]) -> list[AudioClip]:
    """Those of the samples, each once. Raises ValueError where no sample has one."""
    clips = {clip.key: clip for sample in samples if (clip := own_recording(sample)) is not None}
    if not clips:
        raise ValueError(
            "rewards.prosody: no text has a recording, whose pitch, level and pauses are the usual ones; give texts "
            "audio or prompt_audio, or --rewards.prosody 0"
        )
    return list(clips.values())
