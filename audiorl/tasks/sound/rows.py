"""Rows of sounds to learn or to ask for: JSON lines, JSON, CSV, parquet or saved data sets, with these columns::

    {"id": "1", "caption": "A dog barks twice.", "audio": "1.flac", "thought": "…", "video": "1.npy", "video_rate": 16}
    {"caption": "Rain on a roof.", "duration": 4.0}                    # to be made, not to be learned

`caption` may be called text; all others are optional, as long as there is a duration or an audio file. Other columns
stay in the sample's metadata; `events`, which rewards ask for, must fit in the sound. Relative paths start from
`audio_root`, by default the manifest's folder. Manifests of `audiorl data build-scenes`, scenes and edits, are read
too: an edit's instruction is its caption, `before` what is there already, and `mask` the spans to be made anew.

Rows of speech say so by a column `task`, or all of a file by an option; `text` is then what is said::

    {"task": "enhance", "audio": "clean.flac", "text": "Good morning."}  # noise and rooms are made up in training
    {"task": "enhance", "before": "noisy.flac", "audio": "clean.flac"}  # or recorded
    {"task": "tts", "text": "Good night.", "prompt_audio": "voice.flac", "prompt_text": "Good morning.", "audio": …}

All but `text` may be missing of a row of tts: without a voice any speaks, and without `audio` it is asked for, as long
as the `duration` says, or as letters take in the prompt.

The files of published sets are read as they are: AudioCaps (audiocap_id, youtube_id, start_time, caption), VGGSound
(without a line of names), AudioCoT and AudioCanvas (id, caption, caption_cot). Their recordings are looked for below
`audio_root` under the names ID, YID (AudioSet's), ID_START and ID_00START, whatever their suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from audiorl.audio import AUDIO_SUFFIXES, AudioError, load_clip, probe, seconds
from audiorl.data.formats import AUDIO_FIELDS, Style, audio_field, clip_of
from audiorl.data.manifest import Format, Loaded, read_values
from audiorl.data.rows import Row, files_below
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.scenes import PublishedColumns, SoundColumns, Task
from audiorl.tasks.sound.scenes import check_mask, events_of, write_thought
from audiorl.tasks.tts.prompts import expected_seconds
from audiorl.types import Message, Sample

SUFFIXES = (*AUDIO_SUFFIXES, ".mp4", ".mkv")
"""Files that hold a sound."""
CLIPS = ("before", "after", "prompt_audio")
NOT_KEPT = (*AUDIO_FIELDS, *CLIPS, "id", "task", "caption", "text", "video")


def read_sounds(
    path: Any, *, task: Task = "sound", scenes: bool = False, check_audio: bool = False, **options: Any
) -> Loaded[Sample]:
    """Return a sample a row, whose message is the caption and whose reference is what is said; `task`: of rows without
    one; `scenes`: each row must have events, and is asked with the thought that they make where it has none. The other
    arguments are those of `read_samples`.

    Its metadata hold `audio`, `before`, `after` and `prompt_audio` (AudioClips), `thought`, `duration` in seconds,
    `video` (a path) with `video_rate`, and the other columns; of speech `reference_audio` and `reference_seconds` for
    rewards. Raises ValueError naming file, row and field.
    """

    @cache
    def recordings(root: Path) -> dict[str, Path]:
        return {file.stem: file for file in files_below(root, *SUFFIXES)}

    def of_row(row: Row, style: Style, format: Format) -> tuple[Sample, Sample]:
        if {"youtube_id", "caption_cot"} & row.data.keys() and not row.data.keys() & set(AUDIO_FIELDS):
            row = replace(row, data=_published(row.data, style.root, recordings(style.root)))
        sample = _sample(row, style, task, scenes)
        for field in ("audio", *CLIPS) if check_audio else ():
            if (clip := sample.metadata.get(field)) is not None:
                try:
                    load_clip(clip, probe(clip).sample_rate)
                except AudioError as error:
                    raise FieldError(field, str(error)) from error
        return sample, sample

    return read_values(path, "auto", of_row, detect=lambda row: "native", **options)


def _sample(row: Row, style: Style, default: Task, scenes: bool) -> Sample:
    columns = check(row.data, SoundColumns)
    task = columns.task or default
    about: dict[str, Any] = {k: v for k, v in row.data.items() if k not in NOT_KEPT and v is not None}
    if any(row.data.get(field) is not None for field in AUDIO_FIELDS):
        about["audio"] = clip_of(row, style, audio_field(row))
    for field in CLIPS:
        if (file := row.data.get(field)) is not None:
            about[field] = clip_of(Row(row.file, row.number, {"audio": file}), style, "audio")
    if columns.video is not None:
        about["video"] = str(style.root / columns.video)
    name = f"{Path(row.file).stem}-{row.number:04d}" if columns.id is None else str(columns.id).strip()
    if task != "sound":
        return speech_sound(name, task, columns.text or "", about, columns.caption or "")
    if thought := row.data.get("caption_cot"):
        about.setdefault("thought", thought)
    named = (columns.caption, columns.text, columns.instruction)
    caption = next((text for text in (named[::-1] if "before" in about else named) if text), None)
    if caption is None and columns.thought is None:
        raise FieldError("caption", f"missing; say what is to be heard (the columns are {', '.join(row.data)})")
    if columns.duration is None:
        if not {"audio", "before"} & set(about):
            raise FieldError("duration", "missing; give the seconds of a sound that is to be made")
        try:
            about["duration"] = seconds(about.get("audio") or about["before"])
        except AudioError as error:
            raise FieldError("audio", str(error)) from error
    if columns.mask is not None:
        if "before" not in about:
            raise FieldError("mask", "of what is made anew in before, which is missing; give it, or leave mask out")
        about["mask"] = check_mask(columns.mask, about["duration"])
    is_scene = scenes or columns.events is not None
    if is_scene:
        about.setdefault("channels", 1)
        if columns.video and columns.video_rate is None:
            raise FieldError("video_rate", "missing; give the frames a second of the video")
        if columns.event and not ("before" in about and columns.mask and columns.kind):
            raise FieldError("event", "that of an edit, whose before, mask or kind is missing; give them all")
    sample = Sample(name, (Message("user", ((caption or "").strip(),)),), task="sound", metadata=about)
    if is_scene:
        events = events_of(sample)
        if scenes:
            sample = replace(sample, metadata={"thought": write_thought(events), **about})
    return sample


def _published(data: Mapping[str, Any], root: Path, recordings: Mapping[str, Path]) -> dict[str, Any]:
    """Return the columns of a row of a published set as ours. recordings: the files below root by their stems."""
    row = check(data, PublishedColumns)
    name, caption = row.youtube_id or row.id, row.caption or row.label
    for field, value, needed in (("id", name, "youtube_id or id"), ("caption", caption, "caption or label")):
        if value is None:
            raise FieldError(field, f"missing; give {needed} (the columns are {', '.join(data)})")
    start = "" if row.start_time is None else f"{row.start_time:g}"
    stems = [f"{y}{name}{s}" for s in ("", f"_{start}", f"_{start:0>6}") for y in ("", "Y")]
    file = next((recordings[stem] for stem in stems if stem in recordings), None)
    if file is None:
        raise FieldError("audio", f"{root}: no recording {name} below it; give audio_root, or skip the row (on_error)")
    id = row.audiocap_id or (f"{name}_{start}" if start else name)
    columns = {"id": id, "caption": caption, "audio": str(file.absolute())}
    return columns | {k: v for k, v in (("thought", row.caption_cot), ("split", row.split)) if v}


def speech_sound(id: str, task: Task, text: str, about: Mapping[str, Any], caption: str = "") -> Sample:
    """Return a sample of the task enhance or tts. about: its metadata without what follows from them. Raises FieldError
    for what is missing."""
    more = dict(about)
    if task == "enhance" and not {"audio", "before"} & set(more):
        raise FieldError("audio", "missing; give the clean recording, or as before the noisy one")
    if task == "tts" and not text.strip():
        raise FieldError("text", "missing; give what is to be said")
    if task == "tts" and "prompt_audio" in more and not more.get("prompt_text"):
        raise FieldError("prompt_text", "missing; give what prompt_audio says")
    if "duration" not in more:
        known = next((field for field in ("audio", "before", "prompt_audio") if field in more), None)
        if known is None:
            raise FieldError("duration", "missing; give seconds, or prompt_audio, a voice that takes its time")
        try:
            more["duration"] = (
                expected_seconds(text, more["prompt_text"], more[known])
                if known == "prompt_audio"
                else seconds(more[known])
            )
        except AudioError as error:
            raise FieldError(known, str(error)) from error
    if not more["duration"] > 0:
        raise FieldError("duration", f"{text!r} takes no time to be said; give seconds, or a text with letters")
    voice = more.get("prompt_audio", more.get("audio"))
    more |= {"reference_seconds": more["duration"]} | ({} if voice is None else {"reference_audio": voice})
    references = (text.strip(),) if text.strip() else ()
    return Sample(id, (Message("user", (caption.strip(),)),), references, task=task, metadata=more)
