"""The command: which stages the options ask for, the recordings in one or several processes, and what is written."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from audiorl.data.rows import write_json_lines
from audiorl.errors import Interrupted, install
from audiorl.languages import whisper_code
from audiorl.run.progress import Progress
from audiorl.run.records import locked
from audiorl.speech_models import load_quality_model, load_speaker_encoder, load_speech_detector
from corpora.annotate.options import Annotate
from corpora.annotate.recognisers import Captioner, NamedRecogniser, recognisers
from corpora.annotate.recordings import Source, list_sources
from corpora.annotate.rows import Rows, cut, rows
from corpora.annotate.speakers import Voices
from corpora.annotate.stages import Captions, LanguageOfAudio, LanguageOfText, Quality, Sounds, SpeechSegments
from corpora.annotate.store import Annotated, Stage, annotate, stored_results
from corpora.annotate.transcripts import Transcripts

STAGES = "stages"
"""The folder of stored results in OUT."""


def run(options: Annotate) -> Rows:
    """Annotate what the options name, write OUT and print what it holds.

    Raises ValueError for bad input and where no row is left, Interrupted when the user stops it.
    """
    options.check()
    check_installed(options)
    sources, unusable, others = list_sources(options.inputs, options.out)
    out = options.out
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / STAGES).is_dir())):
        raise ValueError(f"--out {out}: not empty, and not written by this command; name a new folder")
    (out / STAGES).mkdir(parents=True, exist_ok=True)
    if others:
        listing = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5))
        print(f"annotate: files that are not audio by their name: {sum(others.values())} ({listing})")
    with locked(out):
        steps = stages(options)
        problems = _annotate_all(options, sources, steps)
        recordings = [
            (source, Annotated({}, problem))
            if (problem := problems.get(source.id))
            else (source, Annotated(stored_results(out / STAGES, source, steps)))
            for source in sources
        ]
        transcripts = [stage for stage in steps if isinstance(stage, Transcripts)]
        result = rows(recordings, transcripts, options)
        result.left_out[:0] = unusable
        written = result.manifest
        if options.cut:
            written = cut(result.manifest, {source.id: source for source in sources}, out)
        write_json_lines(out / "manifest.jsonl", written)
        write_json_lines(out / "left_out.jsonl", result.left_out)
        if options.sounds:
            write_json_lines(out / "sounds.jsonl", result.sounds)
        summary = _summary(options, sources, result)
        (out / "annotate.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _print(out, summary, problems)
    if not result.manifest:
        first = result.reasons().most_common(1)[0][0] if result.left_out else "no speech"
        raise ValueError(f"annotate: no row is left; most often: {first}; {out / 'left_out.jsonl'} lists every reason")
    return result


def check_installed(options: Annotate) -> None:
    """Raise ValueError naming the extra that a stage of these options needs."""
    packages = [("faster_whisper", "voice activity detection", "")]
    if options.quality == "dnsmos":
        packages.append(("speechmos", "--quality dnsmos", "; or give --quality none"))
    if options.speaker is not None:
        packages.append(("scipy", "--speaker", "; or leave it out"))
    for package, what, otherwise in packages:
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise ValueError(f"annotate: {what} needs {name}: {install('corpora')}{otherwise}")


def stages(options: Annotate) -> list[Stage]:
    """Return the stages of these options in order. Raises ValueError for models that cannot be loaded here."""
    named = recognisers(options.asr, options.language, options.device)
    longest = options.max_seconds
    if any(recogniser.is_policy for recogniser in named):  # many read 30 s and refuse more; slow speech is longer
        longest = min(longest, 30.0 * min(options.speeds))
    steps: list[Stage] = [
        SpeechSegments(load_speech_detector(), options.threshold, options.pause, longest, options.padding)
    ]
    steps += _language_and_transcripts(options, named)
    steps.append(Quality(load_quality_model(options.quality) if options.quality != "none" else None))
    if options.speaker is not None:
        steps.append(Voices(load_speaker_encoder(options.speaker, options.device), options.speaker))
    if options.sounds:
        steps.append(Sounds(options.max_seconds))
    if options.caption is not None:
        captioner = Captioner(options.caption, options.caption_prompt, options.device)
        steps.append(Captions(captioner))
        if options.sounds:
            steps.append(Captions(captioner, "sounds"))
    return steps


def _language_and_transcripts(options: Annotate, named: Sequence[NamedRecogniser]) -> list[Stage]:
    language = whisper_code(options.language) if options.language else None

    def of(recogniser: NamedRecogniser, after_language: bool = True) -> list[Stage]:
        return [Transcripts(recogniser, speed, language, after_language) for speed in options.speeds]

    if options.language is not None:
        return [step for recogniser in named for step in of(recogniser) if recogniser.covers(options.language)]
    identifier = next((recogniser for recogniser in named if recogniser.multilingual), None)
    if identifier is not None:
        identified: Stage = LanguageOfAudio(identifier, options.one_language)
        return [identified, *(step for recogniser in named for step in of(recogniser))]
    first, *others = named
    own = of(first, after_language=False)
    return [
        own[0],
        LanguageOfText(own[0].name, options.one_language, first.languages),
        *own[1:],
        *(step for recogniser in others for step in of(recogniser)),
    ]


def _annotate_all(options: Annotate, sources: Sequence[Source], steps: Sequence[Stage]) -> dict[str, str]:
    """Run the stages on every recording that lacks results. Returns what is wrong with unusable ones, by their id."""
    folder = options.out / STAGES
    missing = [s for s in sources if len(stored_results(folder, s, steps)) < len(steps)]
    done = len(sources) - len(missing)
    if done:
        print(f"annotate: {done} of {len(sources)} recordings are done already")
    problems: dict[str, str] = {}
    try:
        with Progress("annotate", len(sources), done) as progress:
            for source, problem in _runtime(options, steps)(options, missing):
                done += 1
                if problem:
                    problems[source.id] = problem
                progress.update(done, {})
    except KeyboardInterrupt:
        raise Interrupted(
            f"annotate: stopped; {done} of {len(sources)} recordings are done; the same command goes on from here"
        ) from None
    return problems


Outcome = Iterator[tuple[Source, str]]


def _runtime(options: Annotate, steps: Sequence[Stage]) -> Callable[[Annotate, Sequence[Source]], Outcome]:
    if options.runtime == "ray":
        return _on_ray
    if options.workers > 1:
        return _in_processes

    def here(options: Annotate, sources: Sequence[Source]) -> Outcome:
        for source in sources:
            yield source, annotate(options.out / STAGES, source, steps).problem

    return here


def _in_processes(options: Annotate, sources: Sequence[Source]) -> Outcome:
    threads = str(max(1, (os.cpu_count() or 1) // options.workers))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(options.workers, max(len(sources), 1)), spawn, initializer=_start_process, initargs=(options,)
    )
    try:
        by_future = {pool.submit(work, source): source for source in sources}
        for future in as_completed(by_future):
            yield by_future[future], future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "annotate: a worker process ended without a word, often for lack of memory; run the command again, it goes "
            "on from here, with fewer --workers"
        ) from error
    except BaseException:
        for process in multiprocessing.active_children():  # they still compute
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Path, list[Stage]] | None = None


def _start_process(options: Annotate) -> None:
    """Ctrl-C is the parent's to handle; if the parent is killed, the process ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start_worker(options)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def start_worker(options: Annotate) -> None:
    """Prepare this process for `work`."""
    global _worker
    _worker = options.out / STAGES, stages(options)


def work(source: Source) -> str:
    """Annotate one recording; returns what is wrong with one that cannot be used, else ""."""
    assert _worker is not None
    folder, steps = _worker
    return annotate(folder, source, steps).problem


def _summary(options: Annotate, sources: Sequence[Source], result: Rows) -> dict[str, Any]:
    """Return what annotate.json holds: the options and the counts."""
    spoken: Counter[str] = Counter()
    for row in result.manifest:
        spoken[row["language"] or "unknown"] += row["duration"]
    summary: dict[str, Any] = {
        "recordings": len(sources),
        "rows": len(result.manifest),
        "hours": round(sum(row["duration"] for row in result.manifest) / 3600, 4),
        "minutes_by_language": {code: round(seconds / 60, 2) for code, seconds in spoken.most_common()},
        "left_out": dict(result.reasons().most_common()),
    }
    if options.speaker is not None:
        summary["speakers"] = len({row["speaker"] for row in result.manifest})
    if options.sounds:
        summary["sounds"] = len(result.sounds)
    confidences = [row["confidence"] for row in result.manifest if "confidence" in row]
    if confidences:
        summary["mean_agreement"] = round(sum(confidences) / len(confidences), 4)
    return {**summary, "options": json.loads(json.dumps(asdict(options), default=str))}


def _print(out: Path, summary: dict[str, Any], problems: dict[str, str]) -> None:
    for problem in list(problems.values())[:20]:
        print(f"  unusable: {problem}", file=sys.stderr)
    languages = ", ".join(f"{code} {minutes:g} min" for code, minutes in summary["minutes_by_language"].items())
    extra = [f"{summary[name]} {name}" for name in ("speakers", "sounds") if name in summary]
    if "mean_agreement" in summary:
        extra.append(f"mean agreement {summary['mean_agreement']:.3f}")
    print("; ".join(filter(None, [f"{summary['recordings']} recordings, {summary['rows']} rows", languages, *extra])))
    if summary["left_out"]:
        listing = ", ".join(f"{count} {reason}" for reason, count in summary["left_out"].items())
        print(f"left out: {listing}: {out / 'left_out.jsonl'}")
    print(out / "manifest.jsonl")


def _on_ray(options: Annotate, sources: Sequence[Source]) -> Iterator[tuple[Source, str]]:
    """(recording, what is wrong with it) as they end, on the workers of a Ray cluster, each with its own models and a
    GPU where the cluster has them. Recordings and OUT must be on disks that all nodes share."""
    from audiorl.distributed.ray_cluster import QUIET, check_answers, import_ray

    ray = import_ray()
    from ray.util import ActorPool

    if options.address is None:
        ray.init(address="local", num_cpus=options.workers, include_dashboard=False, **QUIET)
    else:
        check_answers(options.address)
        ray.init(address=options.address, **QUIET)
    try:
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        absolute = replace(options, out=options.out.absolute())
        actor = ray.remote(_Worker).options(num_cpus=1, num_gpus=gpus)
        pool = ActorPool([actor.remote(absolute) for _ in range(min(options.workers, max(len(sources), 1)))])
        yield from pool.map_unordered(lambda worker, source: worker.work.remote(source), sources)
    finally:
        ray.shutdown()


class _Worker:
    """A Ray actor with its own models."""

    def __init__(self, options: Annotate) -> None:
        start_worker(options)

    def work(self, source: Source) -> tuple[Source, str]:
        return source, work(source)
