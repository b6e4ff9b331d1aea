"""The rewards of text to speech, and the options that weigh them.

No speech, or silence only, scores 0 in all of them (except `Duration` against 0 s). A rollout that was cut off at its
token limit is scored by its speech up to there; `Finished` gives it 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.schema import FieldError
from audiorl.eval.metrics.speech import (
    SI_SDR_RANGE,
    clipped_share,
    cosine,
    duration_ratio,
    si_sdr,
    silent_share,
)
from audiorl.eval.metrics.text import Normalizer, char_errors, normalize, word_errors
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.rewards import Gated, Term, WeightedSum
from audiorl.rewards.answers import final_text, language_of
from audiorl.rewards.asr import fewest_errors
from audiorl.rewards.combine import check_options
from audiorl.speech_models import load_quality_model, load_recogniser, load_speaker_encoder
from audiorl.speech_models.protocol import Waveform
from audiorl.tasks.tts.listening import SpeechModels, first_reference
from audiorl.tasks.tts.prosody import ProsodyRange, own_recording, prosody_norm
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class Intelligibility:
    """1 - WER (or CER) of the recogniser's transcript, in [0, 1], against the closest of the sample's references.

    `against` "text" compares with the rollout's own text instead; without text it scores 0. Normaliser and languages as
    in `audiorl.rewards.asr`. `parts` hold the error rate, which may exceed 1.
    """

    models: SpeechModels
    metric: Literal["wer", "cer"] = "wer"
    normalizer: Normalizer = "basic"
    against: Literal["reference", "text"] = "reference"

    def __post_init__(self) -> None:
        check_options(self, metric=("wer", "cer"), against=("reference", "text"))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        transcripts = self.models.transcripts(rollouts)
        rates = [self._rate(r, transcript) for r, transcript in zip(rollouts, transcripts, strict=True)]
        # An empty transcript scores 0 even against an empty reference, whose error rate would be 0.
        totals = [max(0.0, 1.0 - rate) if said else 0.0 for rate, said in zip(rates, transcripts, strict=True)]
        return [Score(total, {self.metric: rate}) for total, rate in zip(totals, rates, strict=True)]

    def _rate(self, rollout: Rollout, transcript: str) -> float:
        errors = word_errors if self.metric == "wer" else char_errors
        if self.against == "reference":
            return fewest_errors(rollout.sample, transcript, errors, self.normalizer).rate
        written, language = final_text(rollout.text), language_of(rollout.sample)
        if not normalize(written, self.normalizer, language):
            return 1.0
        return errors(written, transcript, self.normalizer, language).rate


@dataclass(frozen=True)
class Likelihood:
    """How probable the recogniser finds the sample's first reference: the geometric mean for a character, in [0, 1].

    Needs Whisper or a recogniser with a CTC head. Used alone it makes speech monotone (arXiv 2509.18531, where ln p is
    the reward): combine it with `ProsodyRange`. `parts` hold ln p for a character.
    """

    models: SpeechModels

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        # JSON knows no -inf: silence is logged as 100 nats.
        values = [max(value, -100.0) for value in self.models.text_log_probabilities(rollouts)]
        return [Score(math.exp(value), {"logprob": value}) for value in values]

    def check(self, sample: Sample) -> None:
        _check_text(self.models.score, sample)


@dataclass(frozen=True)
class WordIntelligibility:
    """The mean over the words of the sample's first reference of 1 - CER, in [0, 1], with credit on each word's frames.

    The text is aligned with the speech, and each word is compared with what the recogniser understood while it is said.
    `per_token` puts a word's share on the last frame that says it, the last word's on the last sampled token, and
    `step_ends` are these tokens. Silence, and a text without words, score 0. Raises ValueError where a rollout has
    speech in several segments, and for a recogniser without a CTC head.
    """

    models: SpeechModels
    normalizer: Normalizer = "basic"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        aligned = self.models.aligned_words(rollouts)
        seconds = [len(wav) / self.models.sample_rate for wav in self.models.waveforms(rollouts)]
        scores = []
        for rollout, length, words in zip(rollouts, seconds, aligned, strict=True):
            if not rollout.num_sampled:
                scores.append(Score(0.0, {"cer": 1.0}))
                continue
            rates = [min(char_errors(w.text, w.transcript, self.normalizer).rate, 1.0) for w in words] or [1.0]
            frames = _spoken_rows(rollout)
            per_token, ends = [0.0] * rollout.num_sampled, list[int]()
            for index, rate in enumerate(rates):
                place = rollout.num_sampled - 1
                if index < len(rates) - 1:
                    # Codebook k is delayed by k rows: a frame's codes lie around the row that is half as many later.
                    place = frames[min(round(len(frames) * words[index].end / length), len(frames) - 1)]
                    place = min(place, rollout.num_sampled - len(rates) + index)
                ends.append(max(place, 0))
                per_token[ends[-1]] += (1.0 - rate) / len(rates)
            cer = sum(rates) / len(rates)
            scores.append(Score(1.0 - cer, {"cer": cer}, per_token=tuple(per_token), step_ends=tuple(ends)))
        return scores

    def check(self, sample: Sample) -> None:
        _check_text(self.models.align, sample)


def _check_text(ask: Callable[[Sequence[str], Sequence[Waveform]], object], sample: Sample) -> None:
    """Raise ValueError for a sample whose first reference the recogniser refuses, which is asked with no sound."""
    try:
        ask([first_reference(sample)], [np.zeros(0, np.float32)])
    except ValueError as error:
        raise FieldError("answer", f"sample {sample.id!r}: {error}") from error


def _spoken_rows(rollout: Rollout) -> list[int]:
    """Return the places of codec frames among the sampled tokens, of the one segment that speaks."""
    rows: list[list[int]] = []
    before = 0
    for segment in rollout.segments:
        if segment.codes is not None:
            rows.append([before + int(i) for i in (segment.codes[:, 0] >= 0).nonzero()[:, 0]])
        before += len(segment.ids)
    if len(rows) > 1:
        raise ValueError(f"{rollout.name}: WordIntelligibility scores one spoken segment; this has {len(rows)}")
    return rows[0] if rows else []


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
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"sample {sample.id!r}: metadata['reference_seconds'] is {seconds!r}, expected seconds")
    return float(seconds)


@dataclass(frozen=True)
class SpeakerSimilarity:
    """Cosine between the speaker embeddings of a rollout and of `reference(sample)`; 0 where it is negative."""

    models: SpeechModels
    reference: Callable[[Sample], AudioClip] = reference_clip

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        embeddings = self.models.speaker_embeddings(rollouts)
        return [
            Score(0.0 if e is None else max(0.0, cosine(e, self.models.reference_embedding(self.reference(r.sample)))))
            for r, e in zip(rollouts, embeddings, strict=True)
        ]


@dataclass(frozen=True)
class Duration:
    """min / max of the duration of the speech and of `reference(sample)` seconds: 0.5 for double or half.

    No speech, or silence only, is 0 s: it scores 0, and 1 against a reference of 0 s. `parts` hold the seconds.
    """

    models: SpeechModels
    reference: Callable[[Sample], float] = reference_seconds

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        waves, heard = self.models.waveforms(rollouts), self.models.have_speech(rollouts)
        for rollout, wav, speaks in zip(rollouts, waves, heard, strict=True):
            seconds = len(wav) / self.models.sample_rate if speaks else 0.0
            scores.append(Score(duration_ratio(seconds, self.reference(rollout.sample)), {"seconds": seconds}))
        return scores


@dataclass(frozen=True)
class NotSilent:
    """1 where at most a share `most` of the 25 ms frames is silent, else 0. `parts` hold the share of silent frames."""

    models: SpeechModels
    most: float = 0.7

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        models = self.models
        shares = [silent_share(w, models.sample_rate, models.silence) for w in models.waveforms(rollouts)]
        return [Score(float(share <= self.most), {"silent": share}) for share in shares]


@dataclass(frozen=True)
class NotClipped:
    """1 where at most a share `most` of the samples is clipped, else 0; no speech scores 0. `parts` hold the share."""

    models: SpeechModels
    most: float = 1e-3

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        shares = [clipped_share(wav) for wav in self.models.waveforms(rollouts)]
        heard = self.models.have_speech(rollouts)
        return [Score(float(x <= self.most and h), {"clipped": x}) for x, h in zip(shares, heard, strict=True)]


@dataclass(frozen=True)
class Finished:
    """1 where the rollout ended by itself, 0 where a segment reached its token limit or there is no speech."""

    models: SpeechModels

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        ended = [all(s.stop_reason != "length" for s in r.segments) for r in rollouts]
        heard = self.models.have_speech(rollouts)
        return [Score(float(e and h)) for e, h in zip(ended, heard, strict=True)]


@dataclass(frozen=True)
class SignalToDistortion:
    """The share of a rollout's power that is the recording `audio` of its sample, 1 / (1 + 10^(-SI-SDR / 10)).

    For speech that is to be a recording sample by sample, such as enhanced speech; 0.5 is an SI-SDR of 0 dB. `parts`
    hold it in dB, as `signal_to_distortion` gives it.
    """

    speech_decoder: SpeechDecoder

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        rate, waves = self.speech_decoder.sample_rate, self.speech_decoder.waveforms(rollouts)
        heard = [np.zeros(0, np.float32) if wav is None else wav for wav in waves]
        clean = [rollout.sample.metadata["audio"] for rollout in rollouts]
        values = [signal_to_distortion(*pair, rate) for pair in zip(clean, heard, strict=True)]
        return [Score(1 / (1 + 10 ** (-value / 10)), {"si_sdr": value}) for value in values]


def signal_to_distortion(clean: AudioClip, wav: Waveform, rate: int) -> float:
    """Return the SI-SDR in dB of what both have; the least where a waveform [T] has nothing, or the recording."""
    reference = clean.load(rate)
    length = min(len(reference), len(wav))
    value = si_sdr(reference[:length], wav[:length]) if length else SI_SDR_RANGE[0]
    return SI_SDR_RANGE[0] if math.isnan(value) else value


@dataclass(frozen=True)
class PredictedMOS:
    """The predicted mean opinion score (1 to 5) as (mos - 1) / 4, clipped to [0, 1]. `parts` hold the score itself."""

    models: SpeechModels

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = self.models.mos_scores(rollouts)
        return [Score(min(max((mos - 1.0) / 4.0, 0.0), 1.0), {"mos": mos}) for mos in scores]


GATED = ("similarity", "quality", "prosody")
"""The rewards that `SpeechRewards.gate` withholds from speech that is not understood."""
WEIGHTED = ("understood", "likelihood", "similarity", "duration", "finished", "silence", "clipping", *GATED[1:])
"""The rewards that `SpeechRewards` weighs, by their names in logs."""


@dataclass(frozen=True)
class SpeechRewards:
    """Weights of the speech rewards. A reward with weight 0 is left out, and its model is not loaded."""

    understood: float = 1.0
    """Weight of 1 - WER (or CER) of the transcript by `asr`."""
    likelihood: float = 0.0
    """Weight of how probable `asr`, Whisper or one with a CTC head, finds the text; give prosody a weight as well."""
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
    """Weight of how usual pitch, level and pauses are beside recordings; understood alone makes speech monotone."""
    gate: float | None = None
    """Character error rate above which similarity, quality and prosody score 0, such as 0.3. None: never."""
    asr: str = "facebook/wav2vec2-large-960h-lv60-self"
    """A recogniser by path or hub id; a literal one, since a strong language model corrects errors of pronunciation."""
    speaker: str = "microsoft/wavlm-base-plus-sv"
    """A speaker encoder by path or hub id."""
    metric: Literal["wer", "cer", "word-cer"] = "wer"
    """Errors by word, by character, or by character within each word's time: credit for step-index, by a CTC head."""
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

    @property
    def asks_asr(self) -> bool:
        """Return whether a reward or the gate asks `asr`."""
        return bool(self.understood or self.likelihood or self.gate is not None)

    def weights(self) -> dict[str, float]:
        """Return the weights by the rewards' names in logs."""
        return {name: getattr(self, name) for name in WEIGHTED}


def speech_reward(
    options: SpeechRewards,
    voice: SpeechDecoder,
    samples: Sequence[Sample],
    language: str | None = None,
    group: str = "rewards",
) -> WeightedSum:
    """Return the weighted sum of the rewards in `options`, with `language` for a multilingual recogniser.

    group: what the recipe calls `options` on its command line.
    Raises ValueError naming a sample without a reference that they need or with a text that `asr` cannot use, and for
    prosody where none has a recording.
    """
    o = options
    for sample in samples:
        for name, look in (("similarity", reference_clip), ("duration", reference_seconds)):
            try:
                if getattr(o, name):
                    look(sample)
            except ValueError as error:
                what = "give it a recording in audio, or a voice in prompt_audio (not for a talker)"
                raise ValueError(f"{error}; {what}, or --{group}.{name} 0") from error
    models = SpeechModels(
        voice,
        recogniser=load_recogniser(o.asr, language) if o.asks_asr else None,
        encoder=load_speaker_encoder(o.speaker) if o.similarity else None,
        quality=load_quality_model("dnsmos") if o.quality else None,
    )
    words = WordIntelligibility(models, o.normalizer)
    rewards: dict[str, Reward] = {
        "understood": words if o.metric == "word-cer" else Intelligibility(models, o.metric, o.normalizer),
        "likelihood": Likelihood(models),
        "similarity": SpeakerSimilarity(models),
        "duration": Duration(models),
        "finished": Finished(models),
        "silence": NotSilent(models),
        "clipping": NotClipped(models),
        "quality": PredictedMOS(models),
    }
    if o.prosody:
        clips = {clip.key: clip for sample in samples if (clip := own_recording(sample)) is not None}
        if not clips:
            raise ValueError(
                f"{group}.prosody: no text has a recording, whose pitch, level and pauses are the usual ones; give "
                f"texts audio or prompt_audio, or --{group}.prosody 0"
            )
        rewards["prosody"] = ProsodyRange(models, prosody_norm(list(clips.values()), models.sample_rate))
    if o.gate is not None:
        understood = Intelligibility(models, "cer", o.normalizer)
        rewards |= {name: Gated(rewards[name], understood, 1 - o.gate) for name in GATED if name in rewards}
    total = WeightedSum(tuple(Term(name, rewards[name], weight) for name, weight in o.weights().items() if weight))
    for sample in samples:
        total.check(sample)
    return total
