"""Texts for speech synthesis, from files: manifests, Seed-TTS-eval's meta.lst, or plain text with one a line.

A manifest is what `audiorl.data.manifest` reads (JSON lines, a JSON list, parquet, saved datasets, LibriSpeech folders,
WenetSpeech), with these columns, all but text optional::

    {"id": "1", "text": "Good morning.", "audio": "1.flac", "speaker": "A", "language": "en"}
    {"id": "2", "text": "Good night.", "audio": "2.flac", "prompt_audio": "a.flac", "prompt_text": "Hello there."}

`audio` is a recording of the text (with `start` and `duration` a part of it), `prompt_audio` a recording of
`prompt_text` in the voice to imitate. Relative paths start from `audio_root`, by default the manifest's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from audiorl.audio import AudioClip, AudioError, load_clip, probe
from audiorl.data.corpus import bundled_speech
from audiorl.data.formats import AUDIO_FIELDS, Style, audio_field, clip_of
from audiorl.data.manifest import Format, Loaded, Origin, read_values
from audiorl.data.rows import BadRow, Row
from audiorl.data.schema import FieldError, check, check_language, check_limit
from audiorl.data.schema.manifests import UtteranceColumns
from audiorl.data.seedtts import TextToSay, read_meta, read_texts
from audiorl.models import AudioPolicy
from audiorl.types import Sample
from tokenizers_audio import CodeShards, write_shards


def read_utterances(
    path: str | Path,
    *,
    audio_root: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
    check_audio: bool = False,
) -> Loaded[TextToSay]:
    """Return the first `limit` texts of a .lst, a .txt or a manifest; arguments are those of `read_samples`.

    Raises ValueError naming file, row and field; `on_error` is for the rows of manifests.
    """
    path = Path(path)
    check_limit(limit)
    if path.suffix.lower() in (".lst", ".txt"):
        utterances = (read_meta(path) if path.suffix.lower() == ".lst" else read_texts(path))[:limit]
        try:
            for u in utterances if check_audio else ():
                _check(u.recording, "recording")
                _check(u.prompt, "prompt")
        except FieldError as error:
            raise ValueError(str(BadRow(str(path), u.line, error.field, error.message))) from error
        return Loaded(tuple(utterances), (), str(path), {}, tuple(Origin(str(path), u.line) for u in utterances))

    def of_row(row: Row, style: Style, format: Format) -> tuple[Sample, TextToSay]:
        utterance = _utterance(row, style)
        if check_audio:
            _check(utterance.recording, audio_field(row))
            _check(utterance.prompt, "prompt_audio")
        return Sample(utterance.name, ()), utterance

    return read_values(
        path, "auto", of_row, detect=lambda row: "asr", audio_root=audio_root, on_error=on_error, limit=limit
    )


def bundled_utterances(name: str, max_seconds: float | None = None) -> list[TextToSay]:
    """Return the package's own recordings with their texts: `bundled`, or `bundled:en` for one language."""
    kind, _, language = name.partition(":")
    if kind != "bundled" or language not in ("", "en", "es", "fr"):
        raise ValueError(f"no bundled texts are called {name!r}; give bundled, bundled:en, bundled:es or bundled:fr")
    speech = bundled_speech((language,) if language else ("en", "es", "fr"), max_seconds=max_seconds)
    return [TextToSay(u.id, u.text, recording=u.clip, speaker=u.speaker, language=u.language) for u in speech]


def _utterance(row: Row, style: Style) -> TextToSay:
    columns = check(row.data, UtteranceColumns)
    text = columns.text or columns.transcript or columns.transcription or columns.sentence
    if text is None:
        raise FieldError("text", f"missing; give the text to say (the columns are {', '.join(row.data)})")
    name = f"{Path(row.file).stem}-{row.number:04d}" if columns.id is None else str(columns.id).strip()
    speaker, language = (str("" if value is None else value).strip() for value in (columns.speaker, columns.language))
    check_language(language)
    utterance = TextToSay(name, text.strip(), speaker=speaker, language=language)
    if any(row.data.get(field) is not None for field in AUDIO_FIELDS):
        utterance = replace(utterance, recording=clip_of(row, style, audio_field(row)))
    if row.data.get("prompt_audio") is not None:
        if columns.prompt_text is None:
            raise FieldError("prompt_text", "missing; give the text of prompt_audio")
        alone = Row(row.file, row.number, {"prompt_audio": row.data["prompt_audio"]})  # start is that of audio
        prompt = clip_of(alone, style, "prompt_audio")
        utterance = replace(utterance, prompt=prompt, prompt_text=columns.prompt_text.strip())
    return utterance


def _check(clip: AudioClip | None, field: str) -> None:
    try:
        if clip is not None:
            load_clip(clip, probe(clip).sample_rate)
    except AudioError as error:
        raise FieldError(field, str(error)) from error


def encode_corpus(policy: AudioPolicy, clips: Sequence[AudioClip], folder: str | Path, per_shard: int = 500) -> int:
    """Write the codes of `clips` to shards in `folder`, which `policy` reads from then on.

    Clips that are in the folder already are not encoded again; an interrupted call loses at most one shard. Returns how
    many were encoded. Raises ValueError for a policy without a codec, shards of another codec, and unusable audio.
    """
    if policy.codec is None:
        raise ValueError("the policy has no codec to encode with; give it one with set_codec")
    by_key = {clip.key: clip for clip in clips}
    count = write_shards(folder, by_key, lambda key: policy.codes(by_key[key]), policy.codec, per_shard)
    if any(Path(folder).glob("*.safetensors")):
        policy.clip_codes.precomputed = CodeShards(folder, policy.codec)
    return count
