"""AVQA's and MusicBench's files as published become questions about audio, the same at every reading."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.formats import KEYS, TEMPO_MARKS
from audiorl.data.manifest import read_samples
from audiorl.data.sets import split_held_out
from audiorl.types import Sample

AVQA = {
    "id": 184,
    "video_name": "-HIPq7T3eFI_000011",
    "video_id": 342,
    "question_text": "What is the main source of sound in the video?",
    "multi_choice": ["Car", "motorcycle", "siren", "gun fire"],
    "answer": 0,
    "question_relation": "Both",
    "question_type": "Come From",
}
MUSICBENCH = {
    "dataset": "MusicBench",
    "location": "data_aug2/-0SdAVK79lg_1.wav",
    "main_caption": "A calm piano piece. The key is F#m.",
    "alt_caption": "A calm piano piece.",
    "prompt_aug": "",
    "prompt_ch": "The chord progression in this song is F#m, D.",
    "prompt_bt": "The time signature is 3/4.",
    "prompt_bpm": "The tempo of this song is Allegro moderato.",
    "prompt_key": "The key is F#m.",
    "beats": [[0.3, 0.8, 1.3], [1.0, 2.0, 3.0]],
    "bpm": 118.0,
    "chords": ["F#m", "D"],
    "chords_time": [0.46, 4.9],
    "key": ["F#", "minor"],
    "keyprob": [0.83],
    "is_audioset_eval_mcaps": False,
}


def prompt(sample: Sample) -> str:
    return str(sample.messages[-1].content[1])


@pytest.fixture
def folder(tmp_path: Path, speech: list[Any]) -> Path:
    """The recordings that the rows name."""
    for name in ("-HIPq7T3eFI_000011.wav", "data_aug2/-0SdAVK79lg_1.wav", "data_aug2/-0SdAVK79lg_2.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        soundfile.write(tmp_path / name, speech[0].clip.load(16_000), 16_000)
    return tmp_path


def avqa_file(folder: Path, *changes: dict[str, Any]) -> Path:
    path = folder / "train_qa.json"
    path.write_text(json.dumps([AVQA | change for change in changes]))
    return path


def musicbench_file(folder: Path, *changes: dict[str, Any]) -> Path:
    path = folder / "MusicBench_train.json"
    path.write_text("".join(json.dumps(MUSICBENCH | change) + "\n" for change in changes))
    return path


@pytest.mark.parametrize("kind", ["auto", "avqa"])
def test_avqa_leaves_out_what_needs_the_picture(folder: Path, kind: str) -> None:
    path = avqa_file(
        folder,
        {},
        {"id": 1, "question_relation": "View"},
        {"id": 2, "question_text": "What color is the car in the video?"},
        {"id": 3, "question_relation": "Sound", "question_text": "Who speaks?", "answer": 2},
    )
    loaded = read_samples(path, kind, check_audio=True)
    assert [(s.id, s.references) for s in loaded.samples] == [("184", ("Car",)), ("3", ("siren",))]
    assert loaded.left_out == {"answered by the picture alone": 1, "asks for a color": 1} and not loaded.skipped
    assert loaded.summary() == (f"{path}: 2 samples, left out: 1 (answered by the picture alone), 1 (asks for a color)")
    first = loaded.samples[0]
    assert prompt(first).startswith("What is the main source of sound in the audio?")
    assert first.audio[0].path == str(folder / "-HIPq7T3eFI_000011.wav")
    assert first.metadata["recording"] == "-HIPq7T3eFI_000011" and first.metadata["question_type"] == "Come From"


def test_prepared_avqa_rows_are_read_as_they_are(folder: Path) -> None:
    path = avqa_file(folder, {"question_relation": "View", "audio_path": "-HIPq7T3eFI_000011.wav"})
    assert len(read_samples(path, check_audio=True).samples) == 1


def test_avqa_finds_other_kinds_of_files_and_names_a_missing_one(folder: Path) -> None:
    path = avqa_file(folder, {}, {"id": 1, "video_name": "gone_000001"})
    with pytest.raises(ValueError, match=r"row 2, field 'video_name': .*gone_000001\.wav: missing"):
        read_samples(path, check_audio=True)
    wav, rate = soundfile.read(folder / "-HIPq7T3eFI_000011.wav")
    soundfile.write(folder / "gone_000001.flac", wav, rate)
    assert [s.audio[0].path for s in read_samples(path, check_audio=True).samples][1] == str(
        folder / "gone_000001.flac"
    )


@pytest.mark.parametrize("kind", ["auto", "musicbench"])
def test_musicbench_rows_become_questions(folder: Path, kind: str) -> None:
    path = musicbench_file(folder, {})
    key, tempo, metre = read_samples(path, kind, check_audio=True).samples
    assert [s.id for s in (key, tempo, metre)] == [f"{k}_-0SdAVK79lg_1" for k in ("key", "tempo", "metre")]
    assert [s.task for s in (key, tempo, metre)] == ["key", "tempo", "metre"]
    assert [s.references[0] for s in (key, tempo, metre)] == ["F# minor", "Allegro moderato", "3/4"]
    assert all(len(set(s.choices)) == 4 and s.references[0] in s.choices for s in (key, tempo, metre))
    assert all(choice.removesuffix(" minor") in KEYS for choice in key.choices)
    assert "6/8" not in metre.choices
    low, high = TEMPO_MARKS["Allegro moderato"]
    for mark in set(tempo.choices) - {"Allegro moderato"}:
        assert TEMPO_MARKS[mark][0] > high or TEMPO_MARKS[mark][1] < low
    assert {s.metadata["recording"] for s in (key, tempo, metre)} == {"-0SdAVK79lg"}
    assert key.audio[0].path == str(folder / "data_aug2/-0SdAVK79lg_1.wav")
    again = read_samples(path, kind).samples
    assert [(s.choices, s.messages[0].content[1]) for s in again] == [
        (s.choices, s.messages[0].content[1]) for s in (key, tempo, metre)
    ]


@pytest.mark.parametrize(
    ("change", "tasks", "answers"),
    [
        ({"key": ["Gb", "major"]}, ["key", "tempo", "metre"], ["F# major", "Allegro moderato", "3/4"]),
        ({"key": ["A#", "minor"]}, ["key", "tempo", "metre"], ["Bb minor", "Allegro moderato", "3/4"]),
        ({"key": [None, None]}, ["tempo", "metre"], ["Allegro moderato", "3/4"]),
        ({"key": None, "prompt_bt": "The beat counts to 4."}, ["tempo"], ["Allegro moderato"]),
        ({"prompt_bpm": "This song goes at 153.0 beats per minute."}, ["key", "metre"], ["F# minor", "3/4"]),
        ({"prompt_bpm": "The song is played at the pace of vivace."}, ["key", "tempo", "metre"], None),
        ({"prompt_bpm": "", "prompt_bt": "The time signature is 5/4."}, ["key", "metre"], ["F# minor", "5/4"]),
    ],
)
def test_a_row_gives_the_questions_that_it_can(
    folder: Path, change: dict[str, Any], tasks: list[str], answers: list[str] | None
) -> None:
    samples = read_samples(musicbench_file(folder, change), "musicbench").samples
    assert [s.task for s in samples] == tasks
    assert answers is None or [s.references[0] for s in samples] == answers


def test_what_musicbench_leaves_out_is_counted(folder: Path) -> None:
    nothing = {"key": None, "prompt_bt": "", "prompt_bpm": "", "location": "data/aaaaaaaaaaa.wav"}
    path = musicbench_file(folder, {}, {"main_caption": "The same clip in other words."}, nothing)
    loaded = read_samples(path)
    assert len(loaded.samples) == 3
    assert loaded.left_out == {"asks what an earlier row asks": 3, "gives no key, tempo mark or time signature": 1}
    with pytest.raises(ValueError, match=r"row 1, field 'location': '' is not a path; give that of the clip"):
        read_samples(musicbench_file(folder, {"location": ""}))


def test_right_choices_have_no_favourite_place(folder: Path) -> None:
    rows = [{"location": f"data/{i:011}.wav", "key": [KEYS[i % 12], "major"]} for i in range(400)]
    places = Counter(
        (s.task, s.choices.index(s.references[0])) for s in read_samples(musicbench_file(folder, *rows)).samples
    )
    assert len(places) == 12 and all(70 < count < 130 for count in places.values())


def test_copies_of_a_held_out_recording_are_not_trained_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"location": f"data_aug2/{i:011}_{copy}.wav"} for i in range(20) for copy in (1, 2, 3)]
    samples = read_samples(musicbench_file(folder, *rows)).samples
    train, held_out = split_held_out([("music", samples)], [], 6)
    assert Counter(s.task for s in held_out) == {"key": 2, "tempo": 2, "metre": 2}
    recordings = {s.metadata["recording"] for s in held_out}
    assert not recordings & {s.metadata["recording"] for s in train}
    left_out = 9 * len(recordings) - 6
    assert len(train) == 180 - 6 - left_out
    assert f"left out of training: {left_out} rows about held-out recordings" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["mmau", "mmar"])
def test_benchmark_rows_with_repeated_empty_and_missing_fields(folder: Path, kind: str) -> None:
    """27 rows of MMAU's test-mini offer a choice twice, 4 rows of MMAR an empty one; MMAU's test has no answers."""
    row: dict[str, Any] = {
        "id": "1",
        "audio_id" if kind == "mmau" else "audio_path": "./-HIPq7T3eFI_000011.wav",
        "question": "How often?",
        "choices": ["one", "two ", "two", ""],
        "answer": "two",
        **({"modality": "speech"} if kind == "mmar" else {"task": "speech"}),
    }
    path = folder / f"{kind}.json"
    path.write_text(json.dumps([row]))
    (sample,) = read_samples(path, check_audio=True).samples
    assert (sample.choices, sample.references) == (("one", "two"), ("two",))
    for answer in ({"answer": ""}, {"answer": None}):
        path.write_text(json.dumps([row | answer]))
        (sample,) = read_samples(path, need_answer=False).samples
        assert sample.references == () and sample.choices == ("one", "two")
        with pytest.raises(ValueError, match="row 1, field 'answer': empty"):
            read_samples(path)
    path.write_text(json.dumps([row | {"choices": ["two", "two", ""]}]))
    with pytest.raises(ValueError, match="two or more different choices"):
        read_samples(path)


def test_clips_of_published_rows_are_clips(folder: Path) -> None:
    (sample,) = read_samples(avqa_file(folder, {})).samples
    assert isinstance(sample.audio[0], AudioClip) and len(sample.audio[0].load()) > 8000
