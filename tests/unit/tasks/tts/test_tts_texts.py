"""Texts to be said from every kind of file, as prompts and as examples, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.seedtts import TextToSay
from audiorl.tasks.tts.prompts import utterance_example, utterance_sample
from audiorl.tasks.tts.texts import bundled_utterances, read_utterances
from audiorl.types import Message

RATE = 16_000


def record(path: Path, seconds: float) -> None:
    soundfile.write(path, 0.1 * np.sin(np.arange(round(seconds * RATE)) / 9), RATE)


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_manifest(tmp_path: Path) -> None:
    record(tmp_path / "a.wav", 1.0)
    record(tmp_path / "v.wav", 0.5)
    path = write(
        tmp_path,
        {"id": "1", "text": " Good morning. ", "audio": "a.wav", "speaker": "A", "language": "en"},
        {"text": "Good night.", "audio": "a.wav", "start": 0.2, "duration": 0.3}
        | {"prompt_audio": "v.wav", "prompt_text": "Hi."},
        {"id": 3, "sentence": "Nobody said this."},
    )
    first, second, third = read_utterances(path, check_audio=True).samples
    assert (first.name, first.text, first.speaker, first.language) == ("1", "Good morning.", "A", "en")
    assert first.recording is not None and first.recording.path == str(tmp_path / "a.wav") and first.prompt is None
    assert second.name == "rows-0002" and second.prompt_text == "Hi."
    assert second.recording is not None and (second.recording.start, second.recording.duration) == (0.2, 0.3)
    assert second.prompt is not None and second.prompt.path == str(tmp_path / "v.wav")
    assert (second.prompt.start, second.prompt.duration) == (0.0, None)  # the part is of audio
    assert third == TextToSay("3", "Nobody said this.")
    assert [u.name for u in read_utterances(path, limit=2).samples] == ["1", "rows-0002"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"audio": "a.wav"}, "row 2, field 'text': missing; give the text to say"),
        ({"text": "  ", "audio": "a.wav"}, "row 2, field 'text'"),
        ({"text": "x", "prompt_audio": "a.wav"}, "row 2, field 'prompt_text'.*give the text of prompt_audio"),
        ({"text": "x", "prompt_audio": "no.wav", "prompt_text": "y"}, "row 2, field 'prompt_audio'.*no.wav: missing"),
        ({"text": "x", "audio_path": "no.wav"}, "row 2, field 'audio_path'.*no.wav: missing"),
        ({"text": "x", "speaker": ["A"]}, "row 2, field 'speaker'"),
        ({"text": "x", "id": " "}, "row 2, field 'id': ' ' is not an id"),
        ({"text": "x", "id": "first"}, "row 2, field 'id': 'first' also names row 1"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    record(tmp_path / "a.wav", 0.5)
    path = write(tmp_path, {"id": "first", "text": "Hello."}, row)
    with pytest.raises(ValueError, match=message):
        read_utterances(path, check_audio=True)
    loaded = read_utterances(path, check_audio=True, on_error="skip")
    assert [u.name for u in loaded.samples] == ["first"] and len(loaded.skipped) == 1


def test_lists_and_plain_texts(tmp_path: Path) -> None:
    record(tmp_path / "p.wav", 0.5)
    (tmp_path / "meta.lst").write_text("a|Hi.|p.wav|Good morning.|p.wav\nb|Hi.|p.wav|Good night.\n")
    first, second = read_utterances(tmp_path / "meta.lst", check_audio=True).samples
    assert first.recording is not None and first.recording.path == str(tmp_path / "p.wav")
    assert second.recording is None and second.prompt_text == "Hi."
    (tmp_path / "lines.txt").write_text("One.\n\n Two.\n")
    found = read_utterances(tmp_path / "lines.txt").samples
    assert found == (TextToSay("lines-0001", "One."), TextToSay("lines-0003", "Two."))
    (tmp_path / "lines.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"lines\.txt: holds no text; write one a line"):
        read_utterances(tmp_path / "lines.txt")
    (tmp_path / "p.wav").unlink()
    with pytest.raises(ValueError, match=r"meta\.lst: row 1, field 'recording': .*p\.wav: missing"):
        read_utterances(tmp_path / "meta.lst", check_audio=True)


def test_bundled_recordings() -> None:
    english = bundled_utterances("bundled:en", max_seconds=1.0)
    assert english and {u.language for u in english} == {"en"} and all(u.recording and u.speaker for u in english)
    assert len(bundled_utterances("bundled", max_seconds=1.0)) > len(english)
    with pytest.raises(ValueError, match="no bundled texts are called 'bundled:de'"):
        bundled_utterances("bundled:de")


def clip(seconds: float) -> AudioClip:
    return AudioClip(array=np.zeros(round(seconds * RATE), np.float32), sample_rate=RATE)


def test_what_a_prompt_knows_of_its_references() -> None:
    """Two letters in 0.5 s make a pace; a recording counts for more, but not for the voice."""
    voice, own = clip(0.5), clip(2.0)
    plain = utterance_sample(TextToSay("a", "Good."))
    assert plain.messages == (Message("user", ("Good.",)),) and plain.references == ("Good.",)
    assert plain.metadata == {"respond": "speech"}
    cloned = utterance_sample(TextToSay("b", "Good.", "H i!", voice, speaker="A", language="en"))
    assert [m.role for m in cloned.messages] == ["user", "assistant", "user"]
    assert cloned.messages[1].content == (voice,) and cloned.messages[0].content == ("H i!",)
    assert cloned.metadata["reference_seconds"] == pytest.approx(4 / 2 * 0.5)
    assert cloned.metadata["reference_audio"] is voice
    assert (cloned.metadata["speaker"], cloned.metadata["language"]) == ("A", "en")
    both = utterance_sample(TextToSay("c", "Good.", "Hi.", voice, own))
    assert both.metadata["reference_seconds"] == 2.0 and both.metadata["reference_audio"] is voice
    alone = utterance_sample(TextToSay("d", "Good.", recording=own, speaker="A"), tag=True)
    assert alone.metadata["reference_audio"] is own and alone.messages[-1].content == ("[A] Good.",)
    assert alone.references == ("Good.",)


def test_only_recordings_are_learned_from() -> None:
    own = clip(1.0)
    example = utterance_example(TextToSay("a", "Good.", recording=own))
    assert example.speech == (own,) and example.target == ""
    with pytest.raises(ValueError, match="'a': has no recording to train on"):
        utterance_example(TextToSay("a", "Good."))
