"""Scores of generated speech after Seed-TTS-eval: is it understood, and is it the right voice?

In order: `judge_items` asks the judges about each recording, `scored` counts errors, the other functions make scores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from audiorl.audio import AudioClip, AudioError
from audiorl.eval._generate import Row, complete_rows
from audiorl.eval._judging import Judges
from audiorl.eval._speech import RATE, prosody_columns
from audiorl.eval._summaries import mean_prosody, summarize
from audiorl.eval.metrics.prosody import MEASURES, slope_per_minute
from audiorl.eval.metrics.speech import cosine, voice_cosines
from audiorl.eval.metrics.text import CorpusErrors, ErrorCounts, compared, utterance_errors


@dataclass(frozen=True)
class Item:
    """A text and the recording that should say it, None where there is no file; `prompt` is the reference voice."""

    id: str
    text: str
    clip: AudioClip | None
    prompt: AudioClip | None = None
    group: str = ""
    """The conversation of a turn."""
    speaker: str = ""
    voices: Mapping[str, AudioClip] = field(default_factory=dict)
    """The voices of a turn's conversation by speaker, where they are known."""

    @cached_property
    def fingerprint(self) -> str:
        """Of the recording as it is now: what was judged before must be the same."""
        assert self.clip is not None and self.clip.path is not None
        content = Path(self.clip.path).read_bytes()
        return hashlib.sha256(content + f"{self.clip.start} {self.clip.duration}".encode()).hexdigest()[:16]


Judged = tuple[Item, Row, ErrorCounts]
"""A text with its recording, what the judges made of it, and the errors."""


def judge_items(items: Sequence[Item], judges: Judges, out: Path, batch_size: int) -> dict[str, Row]:
    """A row an item by id: {"id", "file", "seconds", "hypothesis", "voice"?, "similarity"?}, or {"id", "problem"}.

    Rows are kept in OUT/results.jsonl, from which a later call goes on. The similarity is with the prompt; of a turn
    without prompt the voice is kept. Speech with voice has f0_range, energy_range and pauses, too, and
    `reference_prosody` has those of the prompt.
    """
    rows: dict[str, Row] = {i.id: {"id": i.id, "problem": "missing"} for i in items if i.clip is None}

    def judge(batch: Sequence[Item]) -> list[Row]:
        waves: dict[str, np.ndarray] = {}
        for item in batch:
            try:
                assert item.clip is not None
                waves[item.id] = item.clip.load(RATE)
            except AudioError as error:
                rows[item.id] = {"id": item.id, "problem": str(error)}
        readable = [item for item in batch if item.id in waves]
        for item, row in zip(readable, judges.judge(list(waves.values()), RATE) if readable else [], strict=True):
            voice = row.pop("voice", None)
            wav = waves[item.id]
            row = {"id": item.id, "file": item.fingerprint, "seconds": len(wav) / RATE, **row}
            row |= prosody_columns(wav, RATE)
            if item.prompt is not None:
                row["reference_prosody"] = prompt_prosody(item.prompt)
            if voice is not None and item.prompt is not None:
                assert judges.encoder is not None
                row["similarity"] = cosine(voice, judges.encoder.embed([item.prompt.load(RATE)], RATE)[0])
            elif voice is not None and item.group:
                row["voice"] = [round(float(x), 6) for x in voice]
                row["start"] = 0.0 if item.clip is None else item.clip.start
                if item.voices:
                    row["cosines"] = {name: cosine(voice, v) for name, v in reference_voices(item).items()}
            rows[item.id] = row
        return [rows[item.id] for item in batch]

    of_prompts: dict[str, dict[str, float]] = {}

    def prompt_prosody(clip: AudioClip) -> dict[str, float]:
        """{} for a prompt that cannot be read, which is an error with --speaker only."""
        name = str((clip.path, clip.start, clip.duration))
        if name not in of_prompts:
            try:
                of_prompts[name] = prosody_columns(clip.load(RATE), RATE)
            except AudioError:
                of_prompts[name] = {}
        return of_prompts[name]

    embedded: dict[str, np.ndarray] = {}

    def reference_voices(item: Item) -> dict[str, np.ndarray]:
        assert judges.encoder is not None
        for clip in item.voices.values():
            if clip.key not in embedded:
                embedded[clip.key] = judges.encoder.embed([clip.load(RATE)], RATE)[0]
        return {name: embedded[clip.key] for name, clip in item.voices.items()}

    there = {item.id: item for item in items if item.clip is not None}
    return rows | complete_rows(
        out / "results.jsonl",
        there,
        judge,
        batch_size,
        is_current=lambda item, row: row.get("file") == item.fingerprint,
    )


def _simplified(text: str) -> str:
    """Traditional Chinese characters as simplified ones, as the benchmark does with what was recognised."""
    try:
        from zhconv import convert
    except ImportError as error:
        raise ImportError("Chinese needs zhconv: pip install 'audiorl[speech]'") from error
    return convert(text, "zh-cn")


def scored(items: Sequence[Item], rows: dict[str, Row], language: str) -> list[Judged]:
    """Each item with its row and its errors; of a recording that cannot be read nothing is understood."""
    judged = []
    for item in items:
        if not compared(item.text, language):
            raise ValueError(f"{item.id!r}: the text {item.text!r} is nothing but punctuation; no error rate exists")
        hypothesis = rows[item.id].get("hypothesis", "")
        hypothesis = _simplified(hypothesis) if language == "zh" and hypothesis else hypothesis
        judged.append((item, rows[item.id], utterance_errors(item.text, hypothesis, language)))
    return judged


def grouped(judged: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Utterances by their id, each alone, and conversations by theirs, turn by turn."""
    groups: dict[str, list[Judged]] = {}
    for entry in judged:
        groups.setdefault(entry[0].group or entry[0].id, []).append(entry)
    return groups


def error_scores(judged: Sequence[Judged]) -> Row:
    """Error rates and prosody, whose means are over the recordings that have voice; its `n` counts them."""
    groups = grouped(judged)
    corpus = CorpusErrors(tuple(sum((e for _, _, e in group), ErrorCounts()) for group in groups.values()))
    problems = [row["problem"] for _, row, _ in judged if "problem" in row]
    scores: Row = {
        "utterances": len(groups),
        "recordings": len(judged),
        "missing": sum(problem == "missing" for problem in problems),
        "unreadable": sum(problem != "missing" for problem in problems),
        "mean_wer": summarize([u.rate for u in corpus.utterances]),
        "wer": corpus.rate,
        "above_half": sum(u.rate > 0.5 for u in corpus.utterances),
    }
    for name in MEASURES:
        if values := [row[name] for _, row, _ in judged if name in row]:
            scores[name] = summarize(values)
    if prompts := [p for _, row, _ in judged if (p := row.get("reference_prosody"))]:
        scores["reference_prosody"] = mean_prosody(prompts)
    return scores


def prompt_similarity(judged: Sequence[Judged]) -> Row:
    """{"similarity"} of each voice with its prompt, 0 without speech; {} where no text has a prompt."""
    values = [row.get("similarity", 0.0) for item, row, _ in judged if item.prompt is not None]
    return {"similarity": summarize(values)} if values else {}


def conversation_voices(judged: Sequence[Judged]) -> Row:
    """Similarities between turns of one speaker ("intra") and of two ("inter"), and with voices that are known."""
    groups = grouped(judged)
    scores = _known_voices(groups)
    cosines = [
        voice_cosines([_voice(row) for _, row, _ in group], [item.speaker for item, _, _ in group])
        for group in groups.values()
    ]
    for name in ("intra", "inter"):
        defined = [value for c in cosines if not math.isnan(value := getattr(c, name))]
        if defined:
            scores[name] = summarize(defined)
    if "intra" in scores and "inter" in scores:
        alike, unlike = max(0.0, scores["intra"]["mean"]), min(1.0, 1.0 - scores["inter"]["mean"])
        scores["similarity"] = math.sqrt(alike * unlike)
    return scores


def _known_voices(groups: Mapping[str, Sequence[Judged]]) -> Row:
    """For conversations whose voices are known: how near each turn is to its own speaker's voice.

    "own_voice": the share of turns that are nearer to it than to every other voice of the conversation;
    "voice_similarity": the mean cosine with it, 0 for a turn without speech; "voice_drift": its change per minute of
    the conversation, the mean over conversations of three turns or more.
    """
    nearest: list[float] = []
    own: list[float] = []
    drifts: list[float] = []
    for group in groups.values():
        similar, starts = [], []
        for item, row, _ in group:
            if (cosines := row.get("cosines")) is not None:
                similar.append(cosines[item.speaker])
                starts.append(row["start"])
                nearest += [float(max(cosines, key=cosines.__getitem__) == item.speaker)] if len(cosines) > 1 else []
            elif item.voices:
                own.append(0.0)
                nearest += [0.0] if len(item.voices) > 1 else []
        own += similar
        drifts += [slope] if not math.isnan(slope := slope_per_minute(similar, starts)) else []
    named = {"own_voice": nearest, "voice_similarity": own, "voice_drift": drifts}
    return {name: summarize(values) for name, values in named.items() if values}


def _voice(row: Row) -> np.ndarray | None:
    return np.array(row["voice"]) if "voice" in row else None
