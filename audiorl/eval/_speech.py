"""Let a policy speak: texts into a folder of recordings, and held-out texts as a phase of a run, with its scores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.audio import AUDIO_SUFFIXES, AudioClip, write_wav
from audiorl.config import SamplingConfig
from audiorl.data.rows import file_below, write_json_lines
from audiorl.eval._common import (
    Judges,
    Row,
    check_settings,
    evaluation_config,
    finished_rows,
    generate_all,
    paired_changes,
    read_rows,
    summarize,
    summarize_outside,
)
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.eval.metrics.prosody import MEASURES, prosody
from audiorl.eval.metrics.speech import cosine, silent_share
from audiorl.eval.metrics.text import Normalizer, char_errors, word_errors
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.export import codec_of
from audiorl.models.families import read_config
from audiorl.models.families.talker import TalkerPolicy
from audiorl.models.lora import is_adapter
from audiorl.protocols import Request, RolloutEngine, SpeechDecoder
from audiorl.rewards.answers import language_of
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample
from tokenizers_audio import load as load_codec

RATE = 16_000
"""Hz at which reference recordings are read."""
ROWS = "generated.jsonl"
Speak = Callable[[AudioPolicy, Sequence[Sample], SamplingConfig], list[Rollout]]


# -- a folder of recordings --------------------------------------------------------------------------------------------


def load_speaking(model: str | Path, codec: str | Path | None = None, device: str = "auto") -> AudioPolicy:
    """Load a checkpoint as `load_with_codec` does, of a whole Omni model its talker. Raises ValueError for a model that
    writes text only."""
    whole = {} if is_adapter(model) else read_config(model)
    talker = "talker_config" in whole and bool(whole.get("enable_audio_output", True))
    policy = load_with_codec(model, codec, device, talker)
    if policy.speech is None:
        raise ValueError(f"{model}: writes text only; give a model that speaks (see audiorl/recipes/tts_sft.py)")
    return policy


def load_with_codec(
    model: str | Path, codec: str | Path | None = None, device: str = "auto", talker: bool = False
) -> AudioPolicy:
    """Load a checkpoint for evaluation, and its codec where it speaks; `talker` is that of `load_policy`.

    Without a `codec` it is the one that `codec_of` finds. Raises ValueError for none, and for one that is not the
    model's.
    """
    policy = load_policy(model, evaluation_config(device), talker=talker)
    if policy.speech is not None:
        codec = codec or codec_of(model)
        if codec is None and isinstance(policy, TalkerPolicy):
            policy.set_codec(policy.own_decoder())
            return policy
        if codec is None:
            raise ValueError(f"{model}: no folder codec/ in it or above it; name its audio tokenizer with --codec")
        policy.set_codec(load_codec(codec))
    return policy


def recording_of(folder: Path, name: str) -> AudioClip | None:
    """Return the recording of a text, NAME with one of AUDIO_SUFFIXES; None where there is no file."""
    return next((AudioClip(path=str(p)) for s in AUDIO_SUFFIXES if (p := folder / f"{name}{s}").is_file()), None)


def generate_speech(
    engine: RolloutEngine,
    speech_decoder: SpeechDecoder,
    samples: Sequence[Sample],
    folder: Path,
    settings: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int,
    describe: Callable[[Rollout], Mapping[str, float]] = lambda rollout: {},
) -> list[Row]:
    """Say every sample once: FOLDER/ID.wav, and a row {id, seconds, stop_reason, tokens, …} in FOLDER/generated.jsonl.

    A sample that said nothing has 0 seconds and no file; `describe` adds columns to the rows of the others. A later
    call with the same `settings` says what is missing. Raises ValueError for a folder that holds anything else.
    """
    for sample in samples:
        file_below(folder, sample.id)
    if not (folder / "generation.json").exists() and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds files that were not generated here; choose an empty folder")
    check_settings(folder / "generation.json", {**settings, "seed": seed})
    rows = finished_rows(folder / ROWS)
    present = {id: row for id, row in rows.items() if not row["seconds"] or (folder / f"{id}.wav").is_file()}
    if len(present) < len(rows):  # forget the rows whose recordings are gone
        write_json_lines(folder / ROWS, present.values())

    def write(rollout: Rollout) -> dict[str, float]:
        wav = speech_decoder.waveform(rollout)
        if wav is None or not len(wav):
            return {"seconds": 0.0}
        path = folder / f"{rollout.sample.id}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial.wav")  # a file with this name is a whole one
        write_wav(partial, wav, speech_decoder.sample_rate)
        os.replace(partial, path)
        return {"seconds": len(wav) / speech_decoder.sample_rate, **describe(rollout)}

    return generate_all(engine, samples, folder / ROWS, batch_size, seed, write)


# -- held-out texts as a phase of a run --------------------------------------------------------------------------------


def say(policy: AudioPolicy, samples: Sequence[Sample], sampling: SamplingConfig) -> list[Rollout]:
    """Return one rollout a text, each with seed 0."""
    return HFEngine(policy, sampling).generate([Request(s, seed=0) for s in samples])


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
    """Say every text once, as a phase of the run: eval/NAME/*.wav, eval/NAME.jsonl and the entry NAME of eval.json.

    The entry has accuracy (mean of 1 - min(CER, 1)) with its 95 % interval, wer, cer, seconds, cut and n, prosody of
    speech with voice, and with a speaker encoder similarity, the cosine with the voice of metadata["reference_audio"]:
    0 for silence. Where eval/BASELINE.jsonl is there, `changes` are the paired differences from it. outside: no phase
    asks these judges, and the entry says so. speak: another way to say the texts, such as the best of several samples.
    """
    if not run.finished(name):
        rollouts, waves, transcripts = _transcribed(policy, samples, sampling, judges, speak)
        rate = CodecSpeechDecoder.of(policy).sample_rate
        rows = []
        for number, (rollout, wav, text) in enumerate(zip(rollouts, waves, transcripts, strict=True)):
            reference, language = rollout.sample.references[0], language_of(rollout.sample)
            path = Path("eval") / name / f"{number:04d}.wav"
            write_wav(run.dir / path, wav, rate)
            row: Row = (
                {"id": rollout.sample.id, "text": reference, "transcript": text, "spoken_audio": {"path": str(path)}}
                | {"cer": char_errors(reference, text, normalizer, language).rate}
                | {"wer": word_errors(reference, text, normalizer, language).rate}
                | {"seconds": len(wav) / rate, "cut": rollout.segments[-1].stop_reason == "length"}
                | prosody_columns(wav, rate)
            )
            clip = rollout.sample.metadata.get("reference_audio")
            if isinstance(clip, AudioClip):
                row["reference_audio"] = kept_clip(clip, run.dir)
                row["reference_prosody"] = prosody_columns(clip.load(RATE), RATE)
                if judges.encoder is not None:
                    silent = silent_share(wav, rate) == 1.0
                    row["similarity"] = 0.0 if silent else cosine(*judges.encoder.embed([clip.load(rate), wav], rate))
            rows.append(row)
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
    listener = judges.recogniser.name if judges.recogniser else ""
    print(
        f"{name}: {result['accuracy']:.1%} of characters understood ({listener}), WER {result['wer']:.1%}, "
        f"{alike}{lively}{result['seconds']:.2f} s, {result['cut']:.0%} cut off, {result['n']} texts",
        flush=True,
    )
    return result


def kept_clip(clip: AudioClip, folder: Path) -> dict[str, Any]:
    """Return where a recording lies; one without a file is written into `folder` once."""
    if clip.path is not None:
        return {"path": str(Path(clip.path).absolute()), **clip.part}  # a relative one starts elsewhere for its reader
    path = Path("eval") / "reference" / f"{hashlib.sha256(clip.key.encode()).hexdigest()[:16]}.wav"
    if not (folder / path).exists():
        write_wav(folder / path, clip.load(RATE), RATE)
    return {"path": str(path)}


def prosody_columns(wav: np.ndarray, rate: int) -> dict[str, float]:
    """Return the measures of prosody for a row; {} for speech without 0.1 s of voice."""
    measured = prosody(wav, rate)
    return {} if measured is None else {name: getattr(measured, name) for name in MEASURES}


def speech_measures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures of a row of `measure_speech`, error rates at most 1."""
    measures = {name: min(row[name], 1.0) for name in ("wer", "cer")} | {"accuracy": 1 - min(row["cer"], 1.0)}
    return measures | {name: row[name] for name in ("similarity", *MEASURES) if name in row}


def summarize_speech(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `summarize` of the share of characters understood, with means of the other columns of `measure_speech`.

    Error rates count as 1 at most: babble is not worse than silence. `intervals` are those of prosody.
    """
    columns = {name: [min(row[name], 1.0) for row in rows] for name in ("wer", "cer")}
    columns |= {name: [row[name] for row in rows] for name in ("seconds", "cut")}
    for name in ("similarity", *MEASURES):
        if values := [row[name] for row in rows if name in row]:
            columns[name] = values
    result = summarize([1 - cer for cer in columns["cer"]], "accuracy", columns)
    if recordings := [row["reference_prosody"] for row in rows if row.get("reference_prosody")]:
        result["reference_prosody"] = mean_prosody(recordings)
    if intervals := {name: list(bootstrap_interval(columns[name])) for name in MEASURES if name in columns}:
        result["intervals"] = intervals
    return result


def mean_prosody(recordings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure of prosody over recordings."""
    return {name: float(np.mean([r[name] for r in recordings])) for name in MEASURES}


def probe_speech(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    sampling: SamplingConfig,
    judges: Judges,
    normalizer: Normalizer = "basic",
) -> Callable[[], dict[str, float]]:
    """Return a function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        rollouts, _, texts = _transcribed(policy, samples, sampling, judges, say)
        rates = [
            char_errors(r.sample.references[0], t, normalizer, language_of(r.sample)).rate
            for r, t in zip(rollouts, texts, strict=True)
        ]
        return {"accuracy": float(np.mean([1 - min(rate, 1.0) for rate in rates]))}

    return now


def _transcribed(
    policy: AudioPolicy, samples: Sequence[Sample], sampling: SamplingConfig, judges: Judges, speak: Speak
) -> tuple[list[Rollout], list[np.ndarray], list[str]]:
    """Return (rollouts, waveforms [T], transcripts); a rollout without speech has an empty waveform."""
    assert judges.recogniser is not None, "speech is measured by what a recogniser understands"
    rollouts = speak(policy, samples, sampling)
    speech_decoder = CodecSpeechDecoder.of(policy)
    waves = [np.zeros(0, np.float32) if wav is None else wav for wav in speech_decoder.waveforms(rollouts)]
    return rollouts, waves, judges.recogniser.transcribe(waves, speech_decoder.sample_rate)
