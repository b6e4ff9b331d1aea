"""Let a policy say held-out texts, and measure what was understood: recordings, rows and an entry of eval.json."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.audio import AudioClip, write_wav
from audiorl.config import SamplingConfig
from audiorl.data.rows import write_json_lines
from audiorl.eval._generate import read_rows
from audiorl.eval._judging import Judges
from audiorl.eval._summaries import paired_changes, speech_measures, summarize_outside, summarize_speech
from audiorl.eval.metrics.prosody import MEASURES, prosody
from audiorl.eval.metrics.speech import cosine, silent_share
from audiorl.eval.metrics.text import Normalizer, char_errors, word_errors
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.speech_models.protocol import SpeakerEncoder
from audiorl.types import Rollout, Sample

RATE = 16_000
"""Hz at which reference recordings are read."""
Speak = Callable[[AudioPolicy, Sequence[Sample], SamplingConfig], list[Rollout]]


def say(policy: AudioPolicy, samples: Sequence[Sample], sampling: SamplingConfig, seed: int = 0) -> list[Rollout]:
    """One rollout a text, as `sampling` says; `seed` fixes each of them."""
    return HFEngine(policy, sampling).generate([Request(s, seed=seed) for s in samples])


def measure_speech(
    run: Run,
    name: str,
    policy: AudioPolicy,
    samples: Sequence[Sample],
    sampling: SamplingConfig,
    judges: Judges,
    normalizer: Normalizer = "basic",
    baseline: str = "before",
    outside: bool = True,
    speak: Speak = say,
) -> dict[str, Any]:
    """Say every text once, as a phase of the run.

    eval/NAME/*.wav hold the recordings, eval/NAME.jsonl what the recogniser understood of each, and the entry NAME of
    eval.json {accuracy: mean of 1 - min(CER, 1), low, high (95% bootstrap), wer, cer, seconds, cut, n}. With a
    speaker encoder also similarity, the cosine with the voice of metadata["reference_audio"]: 0 for silence, and left
    out for texts that have none. f0_range, energy_range and pauses (`audiorl.eval.metrics.prosody`) are left out
    for speech
    without voice; `reference_prosody` is that of the metadata's recordings. Where eval/BASELINE.jsonl is there,
    `changes` are the paired differences from it.

    outside: no phase asks these judges, and the entry says so. speak: another way to say the texts, such as the best of
    several samples.
    """
    assert judges.recogniser is not None, "speech is measured by what a recogniser understands"
    if not run.finished(name):
        rollouts, waves, transcripts = _transcribed(policy, samples, sampling, judges, speak)
        rate = CodecSpeechDecoder.of(policy).sample_rate
        rows = []
        for number, (rollout, wav, text) in enumerate(zip(rollouts, waves, transcripts, strict=True)):
            reference = rollout.sample.references[0]
            path = Path("eval") / name / f"{number:04d}.wav"
            write_wav(run.dir / path, wav, rate)
            row: dict[str, Any] = (
                {"id": rollout.sample.id, "text": reference, "transcript": text, "spoken_audio": {"path": str(path)}}
                | {"cer": char_errors(reference, text, normalizer).rate}
                | {"wer": word_errors(reference, text, normalizer).rate}
                | {"seconds": len(wav) / rate, "cut": rollout.segments[-1].stop_reason == "length"}
                | prosody_columns(wav, rate)
                | _reference(rollout.sample, run.dir)
            )
            rows.append(row if judges.encoder is None else row | _similarity(judges.encoder, rollout.sample, wav, rate))
        write_json_lines(run.dir / "eval" / f"{name}.jsonl", rows)
        result = summarize_speech(rows)
        measures = {row["id"]: speech_measures(row) for row in rows}
        if outside:
            judged = [{k: v for k, v in m.items() if k not in MEASURES} for m in measures.values()]
            result |= summarize_outside(judged)
        earlier = run.dir / "eval" / f"{baseline}.jsonl"
        if name != baseline and earlier.exists():
            result["changes"] = paired_changes({r["id"]: speech_measures(r) for r in read_rows(earlier)}, measures)
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    recordings = f" (references {r['f0_range']:.1f})" if (r := result.get("reference_prosody")) else ""
    lively = f"F0 range {result['f0_range']:.1f} semitones{recordings}, " if "f0_range" in result else ""
    alike = f"voice {result['similarity']:.2f}, " if "similarity" in result else ""
    print(
        f"{name}: {result['accuracy']:.1%} of characters understood ({judges.recogniser.name}), "
        f"WER {result['wer']:.1%}, {alike}{lively}{result['seconds']:.2f} s, {result['cut']:.0%} cut off, "
        f"{result['n']} texts",
        flush=True,
    )
    return result


def prosody_columns(wav: np.ndarray, rate: int) -> dict[str, float]:
    """The measures of prosody for a row; {} for speech without 0.1 s of voice."""
    measured = prosody(wav, rate)
    return {} if measured is None else {name: getattr(measured, name) for name in MEASURES}


def _reference(sample: Sample, folder: Path) -> dict[str, Any]:
    """Where the recording of metadata["reference_audio"] lies, and its prosody; one without a file is written once."""
    clip = sample.metadata.get("reference_audio")
    if not isinstance(clip, AudioClip):
        return {}
    place: dict[str, Any] = {"path": clip.path, "start": clip.start, "duration": clip.duration}
    if clip.path is None:
        path = Path("eval") / "reference" / f"{hashlib.sha256(clip.key.encode()).hexdigest()[:16]}.wav"
        if not (folder / path).exists():
            write_wav(folder / path, clip.load(RATE), RATE)
        place = {"path": str(path)}
    return {"reference_audio": place, "reference_prosody": prosody_columns(clip.load(RATE), RATE)}


def _similarity(encoder: SpeakerEncoder, sample: Sample, wav: np.ndarray, rate: int) -> dict[str, float]:
    clip = sample.metadata.get("reference_audio")
    if not isinstance(clip, AudioClip):
        return {}
    if silent_share(wav, rate) == 1.0:
        return {"similarity": 0.0}
    reference, spoken = encoder.embed([clip.load(rate), wav], rate)
    return {"similarity": cosine(reference, spoken)}


def probe_speech(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    sampling: SamplingConfig,
    judges: Judges,
    normalizer: Normalizer = "basic",
) -> Callable[[], dict[str, float]]:
    """A function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        rollouts, _, texts = _transcribed(policy, samples, sampling, judges)
        rates = [char_errors(r.sample.references[0], t, normalizer).rate for r, t in zip(rollouts, texts, strict=True)]
        return {"accuracy": float(np.mean([1 - min(rate, 1.0) for rate in rates]))}

    return now


def _transcribed(
    policy: AudioPolicy, samples: Sequence[Sample], sampling: SamplingConfig, judges: Judges, speak: Speak = say
) -> tuple[list[Rollout], list[np.ndarray], list[str]]:
    """(rollouts, waveforms [T], what the recogniser understood); a rollout without speech has an empty waveform."""
    rollouts = speak(policy, samples, sampling)
    speech_decoder = CodecSpeechDecoder.of(policy)
    waves = [np.zeros(0, np.float32) if wav is None else wav for wav in speech_decoder.waveforms(rollouts)]
    assert judges.recogniser is not None, "speech is measured by what a recogniser understands"
    return rollouts, waves, judges.recogniser.transcribe(waves, speech_decoder.sample_rate)
