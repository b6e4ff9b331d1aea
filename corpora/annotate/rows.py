"""The results of all recordings as rows of a manifest, and what the filters leave out."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.data.no_speech import TASK
from audiorl.languages import language_code
from corpora.annotate.options import Annotate
from corpora.annotate.recordings import Recording, Source, Span
from corpora.annotate.speakers import decoded, speakers
from corpora.annotate.store import Annotated
from corpora.annotate.transcripts import Transcripts, vote

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What is written: rows to train on, parts without speech, and what was left out with its reason."""

    manifest: list[Row]
    sounds: list[Row]
    left_out: list[Row]

    def reasons(self) -> Counter[str]:
        return Counter(row["reason"] for row in self.left_out)


def rows(recordings: Sequence[tuple[Source, Annotated]], transcripts: Sequence[Transcripts], options: Annotate) -> Rows:
    """One row for each segment, in the order of the recordings."""
    result = Rows([], [], [])
    candidates: list[Row] = []
    embeddings: list[str] = []
    for source, annotated in recordings:
        path = os.path.abspath(str(source.clip.path))
        if annotated.problem:
            problem = {"id": source.id, "audio": path, "reason": "unusable audio", "detail": annotated.problem}
            result.left_out.append(problem)
            continue
        spans = annotated.results["segments"]
        if not spans:
            result.left_out.append({"id": source.id, "audio": path, "reason": "no speech"})
        candidates += [_row(source, annotated.results, i, transcripts, options) for i in range(len(spans))]
        embeddings += annotated.results.get("voices", [])
        captions = annotated.results.get("captions of sounds")
        for i, span in enumerate(annotated.results.get("sounds", [])):
            caption = {} if captions is None else {"sound": captions[i]}
            result.sounds.append({**_place(source, span, options), "text": "", "task": TASK, **caption})
    if embeddings:
        labels = speakers(
            np.stack([decoded(text) for text in embeddings]),
            [row["duration"] for row in candidates],
            options.speaker_threshold,
        )
        width = max(len(str(max(labels) + 1)), 3)
        for row, label in zip(candidates, labels, strict=True):
            row["speaker"] = f"speaker_{label + 1:0{width}d}"
    for row in candidates:
        reason = reason_against(row, options)
        (result.left_out if reason else result.manifest).append({**row, "reason": reason} if reason else row)
    return _without_rare_speakers(result, options.min_speaker_seconds)


def _place(source: Source, span: Span, options: Annotate) -> Row:
    """Return the columns that say which audio is meant."""
    start, end = span
    first = round(source.clip.start + start, 3)
    row: Row = {"id": f"{source.id}@{first:.3f}", "audio": os.path.abspath(str(source.clip.path))}
    row |= {**source.clip.part, "start": first, "duration": round(end - start, 3)}
    licence = {} if options.licence is None else {"licence": options.licence}
    return {**source.columns, **row, **licence}


def _row(
    source: Source, results: Mapping[str, Any], i: int, transcripts: Sequence[Transcripts], options: Annotate
) -> Row:
    language, probability = options.language, None
    if "language" in results:
        language, probability = results["language"][i]
    texts = {stage.name.partition(" ")[2]: results[stage.name][i] for stage in transcripts}
    texts = {name: text for name, text in texts.items() if text is not None}
    choice = vote(list(texts.values()), language) if texts else None
    row = _place(source, tuple(results["segments"][i]), options)
    row["text"] = list(texts.values())[choice.index] if choice else ""
    row["language"] = language
    if probability is not None:
        row["language_probability"] = probability
    if choice and choice.agreement is not None:
        row["confidence"] = choice.agreement
    row["transcripts"] = texts
    row |= results["quality"][i]
    if "captions of segments" in results:
        row["caption"] = results["captions of segments"][i]
    return row


def reason_against(row: Mapping[str, Any], options: Annotate) -> str:
    """Why a row is left out, "" for one that stays; the first of the filters that holds."""
    if row["duration"] < options.min_seconds:
        return f"shorter than {options.min_seconds:g} s"
    wanted = {language_code(language) for language in options.languages}
    if wanted and (not row["language"] or language_code(row["language"]) not in wanted):
        return f"language {row['language']}"
    if not row["transcripts"]:
        return f"no recogniser for {row['language']}"
    if not row["text"]:
        return "empty transcript"
    if options.min_agreement > 0:
        if "confidence" not in row:
            return "one transcript, no agreement"
        if row["confidence"] < options.min_agreement:
            return f"agreement below {options.min_agreement:g}"
    if row.get("mos", 5.0) < options.min_mos:
        return f"MOS below {options.min_mos:g}"
    return ""


def _without_rare_speakers(result: Rows, seconds: float) -> Rows:
    if seconds <= 0:
        return result
    spoken: Counter[str] = Counter()
    for row in result.manifest:
        spoken[row["speaker"]] += row["duration"]
    reason = f"speaker with less than {seconds:g} s"
    rare = [{**row, "reason": reason} for row in result.manifest if spoken[row["speaker"]] < seconds]
    common = [row for row in result.manifest if spoken[row["speaker"]] >= seconds]
    return Rows(common, result.sounds, result.left_out + rare)


def cut(rows: Sequence[Row], sources: Mapping[str, Source], out: Path) -> list[Row]:
    """Return the rows with a FLAC file each in `out`/audio, of 16 bits at the rate of the recording. Files there that
    no row names any more are deleted. `sources`: by the part of a row's id before its last @."""
    import soundfile

    names = set()
    result = []
    for row in rows:
        source = sources[row["id"].rpartition("@")[0]]
        start = row["start"] - source.clip.start
        mark = json.dumps([source.mark, row["start"], row["duration"]])
        digest = hashlib.sha256(mark.encode()).hexdigest()[:24]
        name = f"audio/{digest[:2]}/{digest}.flac"
        names.add(name)
        if not (out / name).is_file():
            recording = Recording(source, {})
            wav = recording.native((start, start + row["duration"]))
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            partial = (out / name).with_suffix(".part")
            soundfile.write(partial, wav.clip(-1, 1), recording.rate, format="FLAC", subtype="PCM_16")
            os.replace(partial, out / name)
        whole = {key: value for key, value in row.items() if key not in ("start", "channel")}
        result.append({**whole, "audio": name, "source": row["audio"], "source_start": row["start"]})
    for file in (out / "audio").rglob("*"):
        if file.is_file() and file.relative_to(out).as_posix() not in names:
            file.unlink()
    return result
