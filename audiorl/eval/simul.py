"""Simultaneous translation: interpret streams with a model, score a SimulEval log, plot quality against latency.

    audiorl eval simul --model runs/simul --streams bundled:es/test --out results/simul
    audiorl eval simul --score results/talks --language zh --segments tst.yaml --references tst.zh
    audiorl eval simul --plot tradeoff.png results/wait3 results/wait5 results/policy

A model interprets greedily, chunk by chunk, as in training. Writes to --out: rollouts.jsonl (streams as they finish; a
second call continues from there), instances.log and config.yaml (SimulEval's log), segments.yaml with segments.LANGUAGE
(the references as MuST-C keeps them, for --segments), settings.json and scores.json (all scores, units and settings).
Streams without references are logged in OUT/unscored, not scored. Several chunk lengths or schedules are operating
points: one subfolder each, and tradeoff.png. Scores with computation count the computing since the last write; --score
--cumulative-elapsed --segments OUT/segments.yaml computes them again. A folder of speech output is scored for quality
when it holds asr_transcripts.txt, one line per instance.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import tyro

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.config.checks import refuse
from audiorl.data.schema import check_limit
from audiorl.eval._common import Judges, Row, check_settings, print_table, run_evaluation
from audiorl.eval._common import write_scores as write_json
from audiorl.eval.metrics.latency import latency_unit
from audiorl.protocols import Request, RolloutEngine, Schedule
from audiorl.tasks.simul.logs import read_log, read_types, write_speech_log
from audiorl.tasks.simul.quality import Quality, bleu_tokenizer, default_quality
from audiorl.tasks.simul.schedules import AlignAtt, EDAtt, LocalAgreement, Offline, Reviewed, WaitK, words_per_chunk
from audiorl.tasks.simul.scoring import degeneracy, score
from audiorl.tasks.simul.streams import MIN_SECONDS, ChunkConfig, Stream, interpretation_sample
from audiorl.tasks.simul.talks import match_segments, read_segments

# What interpreting and drawing need is imported there: a log is scored without torch, transformers and matplotlib.
if TYPE_CHECKING:
    from audiorl.rollout.hf import HFEngine

TRANSCRIPTS = "asr_transcripts.txt"
SETTINGS = "settings.json"
SCHEDULES = (
    "policy, offline, wait-K, local-agreement-N, alignatt-FRAMES, edatt-ALPHA or edatt-ALPHA-FRAMES, such as wait-3, "
    "local-agreement-2, alignatt-8 and edatt-0.3"
)
BUNDLED = 20
"""How many bundled streams there are to interpret, unless --limit asks for another number."""


@dataclass(frozen=True)
class SimulOptions:
    """Interpret streams with a model, score a log of simultaneous translation, or plot scored ones."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Scored folders to plot; one whose subfolders are scored becomes a line."""
    model: str | None = None
    """Interpret with this Hugging Face model folder or hub id, checkpoint, or run folder (its newest checkpoint)."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    streams: str | None = None
    """What `audiorl.tasks.simul.formats.read_streams` reads, or bundled:TARGET/SPLIT: 20 streams of English prompts."""
    out: Path | None = None
    """Folder for rollouts, log and scores."""
    source_language: str = ""
    """Code of the streams' language, where their file does not name it."""
    target_language: str = ""
    """Code of the language to translate into, where the streams' file does not name it or has several."""
    chunk_seconds: tuple[float, ...] = (ChunkConfig().seconds,)
    """Length of a chunk; several make as many operating points."""
    context: float = ChunkConfig().context
    """Seconds before a chunk that the audio encoder reads with it."""
    max_new_tokens: int = 48
    """Most tokens after one chunk; with --schedule offline and wait-K, which write what is left after the last one, so
    many for every chunk."""
    codec: str | None = None
    """The audio tokenizer of a model that speaks; by default the folder codec/ in or above the model's."""
    asr: str | None = None
    """A recogniser that listens to the tracks for ASR-BLEU, as `audiorl.speech_models.load_recogniser` reads it."""
    speaker: str | None = None
    """A speaker encoder of tracks and sources, as `audiorl.speech_models.load_speaker_encoder` reads it."""
    audio_temperature: float = 0.4
    """Softmax temperature of codec codes; text is greedy."""
    audio_top_p: float = 0.9
    """Codes are sampled from the most probable ones whose probabilities sum to this."""
    max_frames: int = 250
    """Most codec frames after one chunk, as --max-new-tokens."""
    schedule: tuple[str, ...] = ("policy",)
    """What decides when to write: policy, offline, wait-K, local-agreement-N, alignatt-FRAMES, edatt-ALPHA[-FRAMES]
    (docs/simultaneous.md explains them). Several make as many operating points."""
    attention_layers: tuple[int, ...] = ()
    """Decoder layers, from 0, whose attention alignatt and edatt read; by default all."""
    rate: float | None = None
    """Target words (or characters) a second that wait-K writes; by default as many as the references have."""
    batch_size: int = 1
    """Streams side by side. Times with computation are those of a single stream with 1 only."""
    limit: int | None = None
    """Only the first streams."""
    audio_root: Path | None = None
    """Where relative audio paths start; by default the folder of the streams' file."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    score: Path | None = None
    """Score the log in this folder."""
    language: str | None = None
    """Code of the output's language: decides on words or characters, and on BLEU's tokenizer."""
    segments: Path | None = None
    """Reference segments of unsegmented streams, .yaml, .json or .jsonl: wav, offset, duration (s), reference."""
    references: Path | None = None
    """References of the segments, one a line, where their file does not hold them."""
    sources: Path | None = None
    """Source sentences for COMET, one a line per instance or segment."""
    quality: tuple[Quality, ...] | None = None
    """Quality scores to compute; comet downloads a model. By default what loads none, and semantic if installed."""
    use_reference_length: bool = True
    """Latency against the reference's length; off it is that of the output. StreamLAAL and LongYAAL always take the
    reference's."""
    cumulative_elapsed: bool = False
    """Elapsed times hold all computing since the start, as SimulEval logs them: count that since the last write."""
    plot: Path | None = None
    """Draw chrF against latency (StreamLAAL where all have it, else LAAL) of the folders into this PNG."""


def main(options: SimulOptions, engine: RolloutEngine | None = None) -> Row:
    """Do what the options say and return the scores (empty where only a picture was drawn)."""
    if options.plot is not None:
        from audiorl.report.charts import plot_tradeoff

        print(f"wrote {plot_tradeoff(options.folders, options.plot)}")
        return {}
    if options.folders:
        raise ValueError("folders without an option are those of --plot OUT.png; one folder is scored by --score DIR")
    if options.model or options.streams:
        return interpret(options, engine)
    if options.score is None:
        raise ValueError("give --score DIR to score a log, --plot OUT.png and scored folders, or --model to interpret")
    scores = score_folder(options, options.score)
    print_scores(scores, str(options.score))
    return scores


def score_folder(options: SimulOptions, folder: Path) -> Row:
    """Score a log; write scores.json, with what they were computed with, into its folder."""
    language = options.language
    if not language:
        raise ValueError("--language: give the code of the output's language, such as de, zh or ar")
    if options.references is not None and options.segments is None:
        raise ValueError("--references: belongs to --segments, the file of their times")
    instances = read_log(folder)
    source_type = read_types(folder)[0]
    target_type: Literal["text", "speech"] = "speech" if instances[0].speech else "text"
    quality = default_quality(language) if options.quality is None else options.quality
    heard = target_type == "speech" and (folder / TRANSCRIPTS).is_file()
    segments = None
    if options.segments is not None:
        segments = match_segments(instances, read_segments(options.segments, options.references))
    used = {"use_reference_length": options.use_reference_length, "cumulative_elapsed": options.cumulative_elapsed}
    scores: Row = score(
        instances,
        target_type,
        language,
        source_type=source_type,
        quality=quality,
        segments=segments,
        transcripts=_lines(folder / TRANSCRIPTS) if heard else None,
        sources=_lines(options.sources) if options.sources else None,
        **used,
    )
    scores |= {"language": language, "unit": latency_unit(language), "source_type": source_type}
    scores |= {"target_type": target_type, "bleu_tokenizer": bleu_tokenizer(language), **used}
    scores["segments"] = str(options.segments) if options.segments else None
    if target_type == "text" and quality and all(i.reference is not None for i in instances):
        # Scores of segments count repetition within each.
        scores["degenerate"] = list(degeneracy(instances, language, None if options.segments else scores).signs)
    if (folder / SETTINGS).is_file():
        scores["run"] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    write_scores(folder, scores)
    return scores


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


# -- interpreting ------------------------------------------------------------------------------------------------------


def interpret(options: SimulOptions, engine: RolloutEngine | None = None) -> Row:
    """Interpret the streams at each operating point. Return the scores of the last one ({} without references)."""
    kinds = [_kind(name)[0] for name in options.schedule]
    lists = {"--chunk-seconds": options.chunk_seconds, "--schedule": options.schedule}
    repeated = next((name for name, values in lists.items() if not values or len(set(values)) < len(values)), "")
    refuse(
        (
            not (options.model and options.streams and options.out),
            "give --model, --streams and --out to interpret, or --score DIR to score a log",
        ),
        (repeated, f"{repeated}: give one or more, each once"),
        (options.rate is not None and "wait" not in kinds, "--rate: belongs to --schedule wait-K"),
        (
            options.attention_layers and not {"alignatt", "edatt"}.intersection(kinds),
            "--attention-layers: belongs to --schedule alignatt-FRAMES and edatt-ALPHA",
        ),
    )
    assert options.out is not None
    streams, skipped = streams_of(options)
    points = []
    for name in options.schedule:
        for seconds in options.chunk_seconds:
            kind, value = _kind(name)
            parts = [value] if len(options.schedule) > 1 and value else []
            parts += [f"chunk-{seconds:g}"] if len(options.chunk_seconds) > 1 else []
            folder = (options.out / kind if len(options.schedule) > 1 else options.out) / "-".join(parts)
            points.append((folder, ChunkConfig(seconds, options.context), schedule_of(options, name, streams, seconds)))
    engine = engine or _engine(options)
    scores: Row = {}
    late: list[str] = []
    for folder, chunks, schedule in points:
        scores = _operating_point(folder, engine, streams, chunks, schedule, skipped, options)
        late += [str(folder.relative_to(options.out))] if scores and math.isnan(scores["LAAL"]) else []
    if len(points) > 1 and scores:
        if late:
            print(f"no tradeoff.png: nothing was written in {', '.join(late)}")
        else:
            from audiorl.report.charts import plot_tradeoff

            curves = [options.out / kind for kind in dict.fromkeys(kinds)] if len(kinds) > 1 else [options.out]
            print(f"wrote {plot_tradeoff(curves, options.out / 'tradeoff.png')}")
    return scores


def _engine(options: SimulOptions) -> HFEngine:
    """Load the model, greedy in text; one that speaks with its codec."""
    from audiorl.eval._speech import load_with_codec
    from audiorl.rollout.hf import HFEngine

    assert options.model
    policy = load_with_codec(options.model, options.codec, options.device)
    given = [name for name in ("codec", "asr", "speaker") if getattr(options, name)]
    if policy.speech is None and given:
        raise ValueError(f"--{given[0]}: {options.model} writes text only; give a model that speaks")
    return HFEngine(policy, _sampling(options))


def _sampling(options: SimulOptions) -> SamplingConfig:
    return SamplingConfig(
        temperature=0.0,
        max_new_tokens=options.max_new_tokens,
        audio_temperature=options.audio_temperature,
        audio_top_p=options.audio_top_p,
        max_frames=options.max_frames,
    )


def streams_of(options: SimulOptions) -> tuple[list[Stream], int]:
    """Read the streams to interpret, in one target language; print and count the rows that cannot be used."""
    from audiorl.tasks.simul.bundled import bundled_streams
    from audiorl.tasks.simul.formats import read_streams

    assert options.streams
    check_limit(options.limit)
    bundled = re.fullmatch(r"bundled:(\w+)/(train|test)", options.streams)
    if bundled:
        count = BUNDLED if options.limit is None else options.limit
        return bundled_streams(bundled[2], bundled[1], count=count), 0  # type: ignore[arg-type]
    loaded = read_streams(
        options.streams,
        source_language=options.source_language,
        target_language=options.target_language,
        audio_root=options.audio_root,
        on_error="skip",
        limit=options.limit,
    )
    if loaded.skipped:
        print(f"{loaded.summary()}\n{loaded.listing()}", file=sys.stderr)
    languages = sorted({s.target_language for s in loaded.samples})
    if not languages:
        raise ValueError(f"{options.streams}: nothing to interpret")
    if len(languages) > 1:
        raise ValueError(f"{options.streams}: translations into {', '.join(languages)}; choose by --target-language")
    return list(loaded.samples), len(loaded.skipped)


def _kind(schedule: str) -> tuple[str, str]:
    """Split "local-agreement-2" into its name and its numbers, "local-agreement" and "2"."""
    kind, value = re.fullmatch(r"(.*?)(?:-([\d.][\d.-]*))?", schedule, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    return kind, value


def schedule_of(options: SimulOptions, name: str, streams: Sequence[Stream], chunk_seconds: float) -> Schedule | None:
    """Return the schedule that one of --schedule names; None for "policy"."""
    language, layers = streams[0].target_language, options.attention_layers
    kind, value = _kind(name)
    share = re.fullmatch(r"(\d+|\d*\.\d+)(?:-(\d+))?", value)
    if name == "policy":
        return None
    if name == "offline":
        return Offline(language)
    if kind == "edatt" and share:
        frames = {} if share[2] is None else {"frames": int(share[2])}
        return Reviewed(EDAtt(float(share[1]), layers=layers, **frames), language)
    if kind not in ("wait", "local-agreement", "alignatt") or not re.fullmatch(r"\d+", value):
        raise ValueError(f"--schedule: {name!r}; give {SCHEDULES}")
    count = int(value)
    if kind == "local-agreement":
        return Reviewed(LocalAgreement(count), language)
    if kind == "alignatt":
        return Reviewed(AlignAtt(count, layers), language)
    if options.rate is not None:
        return WaitK(count, options.rate * chunk_seconds, language)
    references = [s for s in streams if s.reference]
    if not references:
        raise ValueError("--schedule wait-K: the streams have no references to take the rate from; give --rate")
    return WaitK(count, words_per_chunk(references, chunk_seconds), language)


def _operating_point(
    folder: Path,
    engine: RolloutEngine,
    streams: Sequence[Stream],
    chunks: ChunkConfig,
    schedule: Schedule | None,
    skipped: int,
    options: SimulOptions,
) -> Row:
    """Interpret the streams into `folder`; score those that have a reference, and what was said of them."""
    from audiorl.eval._streams import SEGMENTS, interpret_into, measure_spoken, sampling_of, write_interpreted
    from audiorl.rollout.hf import HFEngine
    from audiorl.rollout.speech import CodecSpeechDecoder

    assert options.streams
    sampling = sampling_of(schedule, _sampling(options), streams, chunks)
    settings = {
        "model": options.model,
        "streams": options.streams if options.streams.startswith("bundled:") else Path(options.streams).name,
        "chunk_seconds": chunks.seconds,
        "context": chunks.context,
        "max_new_tokens": options.max_new_tokens,
        "schedule": None if schedule is None else repr(schedule),
        "batch_size": options.batch_size,
    }
    if sampling != _sampling(options):
        settings["room"] = "all turns"
    speech_decoder = None
    if isinstance(engine, HFEngine) and engine.policy.speech is not None:
        speech_decoder = CodecSpeechDecoder.of(engine.policy)
        settings |= {name: getattr(options, name) for name in ("audio_temperature", "audio_top_p", "max_frames")}
    check_settings(folder / SETTINGS, settings)
    # A chunk of silence first, or the first stream's times would hold what the first call of all takes.
    seconds = max(chunks.seconds, MIN_SECONDS)
    silence = AudioClip(array=np.zeros(round(16_000 * seconds), np.float32), sample_rate=16_000)
    silent = replace(streams[0], audio=silence, seconds=seconds, units=())
    engine.generate([Request(interpretation_sample(silent, chunks))])
    if isinstance(engine, HFEngine):
        engine = HFEngine(engine.policy, sampling)
    rollouts = interpret_into(folder / "rollouts.jsonl", engine, streams, chunks, schedule, options.batch_size)
    both = list(zip(streams, rollouts, strict=True))
    scored, others = ([pair for pair in both if bool(pair[0].reference) == wanted] for wanted in (True, False))
    for where, pairs in ((folder, scored), (folder / "unscored", others)):
        if pairs:
            write_interpreted(where, *zip(*pairs, strict=True))
    if others:
        print(f"{len(others)} of {len(both)} streams have no reference: logged in {folder / 'unscored'}, not scored")
    if not scored:
        return {}
    language, texts = streams[0].target_language, (folder / SEGMENTS).with_suffix(f".{streams[0].source_language}")
    sources = options.sources or (texts if texts.is_file() else None)
    scoring = replace(
        options,
        language=language,
        segments=folder / SEGMENTS,
        sources=sources,
        references=None,
        cumulative_elapsed=True,
    )
    scores = score_folder(scoring, folder) | {"skipped": skipped, "unscored": len(others)}
    turns = [s for r in rollouts for s in r.segments]
    scores["cut"] = float(np.mean([s.stop_reason == "length" for s in turns]))
    passes = [s.decoder_passes for s in turns]
    if None not in passes:
        scores["DecoderPasses"] = float(np.mean(passes))  # type: ignore[arg-type]
    write_scores(folder, scores)
    print_scores(scores, str(folder))
    if speech_decoder is not None:
        judges = Judges.load(options.asr, options.speaker, language, options.device, numerals=False)
        streams, rollouts = (list(part) for part in zip(*scored, strict=True))  # type: ignore[assignment]
        folder = folder / "speech"
        write_speech_log(folder, rollouts, speech_decoder)
        measured, transcripts = measure_spoken(streams, rollouts, speech_decoder, judges)
        if options.asr:
            (folder / TRANSCRIPTS).write_text("".join(f"{text}\n" for text in transcripts), encoding="utf-8")
        scoring = replace(options, language=language, segments=None, references=None, sources=None, quality=())
        scores["speech"] = score_folder(scoring, folder) | measured
        write_scores(folder, scores["speech"])
        print_scores(scores["speech"], str(folder))
    return scores


# -- scores in files and for people ------------------------------------------------------------------------------------


def write_scores(folder: Path, scores: Row) -> None:
    """Write scores.json, null where a value is not defined."""
    write_json(folder, {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in scores.items()})


def print_scores(scores: Row, title: str) -> None:
    """Print the scores as scores.json has them, latencies with their computation-aware variant."""

    def shown(name: str) -> str:
        value = scores.get(name, "")
        return str(value) if not isinstance(value, float) else "-" if math.isnan(value) else f"{value:.3f}"

    names = [name for name, value in scores.items() if type(value) in (int, float) and not name.endswith("_CA")]
    rows = [[name, shown(name), shown(f"{name}_CA")] for name in names]
    rows += [["degenerate", sign, ""] for sign in scores.get("degenerate", ())]
    unit = "words" if scores["source_type"] == "text" else "ms"
    size = scores.get("run", {}).get("batch_size", 1)
    computation = "with computation" if size == 1 else f"with computation ({size} streams at once)"
    print_table([f"metric (latencies in {unit})", "value", computation], rows, title)


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
