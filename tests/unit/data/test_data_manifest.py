"""Every kind of manifest over real recordings becomes samples, the same at every reading."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.data.formats import KEYS, TEMPO_MARKS
from audiorl.data.manifest import read_samples
from audiorl.data.sets import split_held_out
from audiorl.data.views import views_of
from audiorl.types import Sample

UTTERANCES = bundled_speech(("en",), min_seconds=0.5, max_seconds=2)[:4]
QUESTION = {"id": "q1", "audio": "a0.wav", "question": "Which?", "choices": ["a dog", "a cat"], "answer": "a cat"}
AVQA = {
    "id": 184,
    "video_name": "-HIPq7T3eFI_000011",
    "question_text": "What is the main source of sound in the video?",
    "multi_choice": ["Car", "motorcycle", "siren", "gun fire"],
    "answer": 0,
    "question_relation": "Both",
    "question_type": "Come From",
}
PREPARED = AVQA | {"audio_path": "a0.wav"}
MUSIC = {
    "location": "data_aug2/-0SdAVK79lg_1.wav",
    "prompt_bt": "The time signature is 3/4.",
    "prompt_bpm": "The tempo of this song is Allegro moderato.",
    "prompt_key": "The key is F#m.",
    "key": ["F#", "minor"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """a0.wav … a3.wav and the files that AVQA and MUSIC name: real recordings at 16 kHz."""
    for i, u in enumerate(UTTERANCES):
        soundfile.write(tmp_path / f"a{i}.wav", u.clip.load(16_000), 16_000)
    (tmp_path / "data_aug2").mkdir()
    shutil.copy(tmp_path / "a0.wav", tmp_path / "-HIPq7T3eFI_000011.wav")
    shutil.copy(tmp_path / "a0.wav", tmp_path / MUSIC["location"])  # type: ignore[arg-type]
    return tmp_path


def write(path: Path, *rows: Mapping[str, Any] | str) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def prompt(sample: Sample) -> str:
    return str(sample.messages[0].content[1])


def assert_hears(clip: AudioClip, utterance: Utterance, part: slice = slice(None)) -> None:
    np.testing.assert_allclose(clip.load(16_000), utterance.clip.load(16_000)[part], atol=1e-4)


def test_native_questions_and_transcripts_in_one_file(folder: Path) -> None:
    rows = (
        {**QUESTION, "answer": 1, "difficulty": "hard", "clean_audio": "a1.wav", "rationale": "It meows."},
        {"id": "u1", "audio": "a1.wav", "text": "good morning", "language": "en"},
        {"id": "o1", "audio": "a2.wav", "question": "Say it.", "answer": ["one", "a one"], "task": "open"},
    )
    loaded = read_samples(write(folder / "m.jsonl", *rows), check_audio=True)
    assert loaded.summary() == f"{folder / 'm.jsonl'}: 3 samples"
    q, u, o = loaded.samples
    assert (q.id, q.references, q.choices, q.task) == ("q1", ("a cat",), ("a dog", "a cat"), "qa")
    assert q.metadata["difficulty"] == "hard" and "choices" not in q.metadata
    assert "Which?" in prompt(q) and "- a dog" in prompt(q) and "<think>" in prompt(q)
    assert_hears(views_of([q], "clean")[0].audio[0], UTTERANCES[1])
    assert str(views_of([q], "rationale")[0].messages[-1].content[-1]).endswith("answer: It meows.")
    assert (u.references, u.choices, u.task) == (("good morning",), (), "asr")
    assert u.metadata["language"] == "en" and "English" in prompt(u)
    assert (o.references, o.task) == (("one", "a one"), "open")
    for sample, utterance in zip(loaded.samples, UTTERANCES, strict=False):
        assert_hears(sample.audio[0], utterance)
    in_memory = read_samples(rows, audio_root=folder).samples
    assert [(s.references, s.audio[0].path) for s in in_memory] == [
        (s.references, s.audio[0].path) for s in loaded.samples
    ]


def test_options_of_reading(folder: Path) -> None:
    path = write(folder / "m.jsonl", {"id": "x", "audio": "a0.wav", "answer": "dog"})
    (sample,) = read_samples(path, think=False, question="Which animal is it?").samples
    assert "Which animal is it?" in prompt(sample) and "think" not in prompt(sample)
    path = write(folder / "m.jsonl", {"audio": "gone.wav", "text": "hola"})  # not opened unless asked
    (sample,) = read_samples(path, think=False, question="Transcribe en español.").samples
    assert prompt(sample) == "Transcribe en español." and sample.audio[0].path == str(folder / "gone.wav")
    path = write(folder / "m.jsonl", "{", *({**QUESTION, "id": str(i)} for i in range(5)))
    loaded = read_samples(path, on_error="skip", limit=2)
    assert [s.id for s in loaded.samples] == ["0", "1"] and len(loaded.skipped) == 1
    second = json.dumps({**QUESTION, "id": "q2"})
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QUESTION).encode() + b"\r\n\r\n" + second.encode())
    assert [s.id for s in read_samples(path).samples] == ["q1", "q2"]


def test_json_list_parquet_arrow_and_saved_dataset_read_the_same(folder: Path) -> None:
    import datasets

    encoded = (folder / "a1.wav").read_bytes()
    columns = {"question": "Which?", "choices": ["a", "b"], "answer": "b", "level": 3}
    rows: list[dict[str, Any]] = [
        {"id": "1", "audio": {"bytes": None, "path": str(folder / "a0.wav")}, **columns},
        {"id": "2", "audio": {"bytes": encoded, "path": None}, **columns},
    ]
    (folder / "list.json").write_text(json.dumps([{**r, "audio": f"a{i}.wav"} for i, r in enumerate(rows)]))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "t.parquet")
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    dataset = datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio())
    dataset.save_to_disk(str(folder / "saved"))
    for name in ("list.json", "t.parquet", "stream.arrow", "file.arrow", "saved"):
        samples = read_samples(folder / name, check_audio=True).samples
        assert [(s.id, s.references, s.metadata) for s in samples] == [(i, ("b",), {"level": 3}) for i in "12"], name
        assert_hears(samples[0].audio[0], UTTERANCES[0])
        assert_hears(samples[1].audio[0], UTTERANCES[1])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(str(folder / "splits"))
    with pytest.raises(ValueError, match="a dataset with the splits train, test; name one of these folders"):
        read_samples(folder / "splits")
    assert len(read_samples(folder / "splits" / "test").samples) == 2


def test_class_labels_are_read_by_their_names(folder: Path) -> None:
    """Read a dataset in memory, a table and a saved dataset; where the names are A and B, an answer is an index."""
    from datasets import ClassLabel, Dataset, Features, Sequence, Value

    names = {"label": ClassLabel(names=["cat", "bird"]), "tags": Sequence(ClassLabel(names=["loud", "far"]))}
    columns = Features({"audio": Value("string"), "question": Value("string"), **names})
    rows = {"audio": [str(folder / "a0.wav")] * 3, "question": ["Which?", "Who?", "What?"]}
    dataset = Dataset.from_dict({**rows, "label": [1, 0, -1], "tags": [[0, 1], [], [-1]]}, columns)
    dataset.to_parquet(str(folder / "t.parquet"))
    dataset.save_to_disk(str(folder / "saved"))
    for source in (dataset, dataset.to_iterable_dataset(), folder / "t.parquet", folder / "saved"):
        loaded = read_samples(source, columns={"answer": "label"}, on_error="skip")
        assert [s.references for s in loaded.samples] == [("bird",), ("cat",)]
        assert [s.metadata["tags"] for s in loaded.samples] == [["loud", "far"], []]
        assert [(row.row, row.field) for row in loaded.skipped] == [(3, "answer")]
    choices = {"choices": Sequence(Value("string")), "answer": ClassLabel(names=["A", "B"])}
    asked = {"audio": ["a0.wav"], "question": ["Which?"], "choices": [["a dog", "a cat"]], "answer": [1]}
    columns = Features({name: Value("string") for name in ("audio", "question")} | choices)
    assert read_samples(Dataset.from_dict(asked, columns)).samples[0].references == ("a cat",)


@pytest.mark.parametrize("kind", ["mmau", "mmar"])
def test_mmau_and_mmar(folder: Path, kind: str) -> None:
    """27 rows of MMAU's test-mini offer a choice twice, 4 rows of MMAR an empty one; MMAU's test has no answers."""
    row: dict[str, Any] = {
        "id": "1",
        "audio_id" if kind == "mmau" else "audio_path": "./a2.wav",
        "question": "How often?",
        "choices": ["one", "two ", "two", ""],
        "answer": "two",
        "category": ["Reasoning"],
        **({"modality": "speech"} if kind == "mmar" else {"task": "speech"}),
    }
    path = folder / f"{kind}.json"
    for given in ("auto", kind):
        path.write_text(json.dumps([row]))
        (sample,) = read_samples(path, given, check_audio=True).samples
        assert (sample.id, sample.choices, sample.references) == ("1", ("one", "two"), ("two",))
        assert sample.task == ("speech" if kind == "mmau" else "qa") and sample.metadata["category"] == ["Reasoning"]
        assert_hears(sample.audio[0], UTTERANCES[2])
    for answer in ("", None):
        path.write_text(json.dumps([row | {"answer": answer}]))
        (sample,) = read_samples(path, need_answer=False).samples
        assert sample.references == () and sample.choices == ("one", "two")
        with pytest.raises(ValueError, match="row 1, field 'answer': empty"):
            read_samples(path)
    path.write_text(json.dumps([row | {"choices": ["two", "two", ""]}]))
    with pytest.raises(ValueError, match="two or more different choices"):
        read_samples(path)


def test_nemo_manifest_selects_parts(folder: Path) -> None:
    rows = (
        {"audio_filepath": "a0.wav", "offset": 0.1, "duration": 0.3, "text": "a part"},
        {"audio_filepath": "a0.wav", "duration": UTTERANCES[0].duration, "text": "the whole"},
    )
    part, whole = read_samples(write(folder / "asr.jsonl", *rows), "asr", check_audio=True).samples
    assert (part.references, part.task) == (("a part",), "asr") and part.id != whole.id
    assert_hears(part.audio[0], UTTERANCES[0], slice(1600, 6400))
    assert_hears(whole.audio[0], UTTERANCES[0])


def test_a_part_may_be_named_by_its_end(folder: Path) -> None:
    named = {"start": 0.1, "end": 0.4}
    parts = [named, {"offset": 0.1, "end_time": 0.4}, {**named, "end": 9, "duration": 0.3}, {"end": "of a talk"}]
    rows = [{"id": str(i), "audio": "a0.wav", "text": "a part", **part} for i, part in enumerate(parts)]
    turns = [{"role": "user", "content": [{"type": "audio", "audio": "a0.wav", **named}, "What is said?"]}]
    *cut, whole = read_samples(write(folder / "m.jsonl", *rows), check_audio=True).samples
    (turn,) = read_samples(write(folder / "turns.jsonl", {"prompt": turns, "answer": "a part"})).samples
    (folder / "m.csv").write_text("audio,text,start,end\na0.wav,a part,0.1,0.4\n")
    for sample in (*cut, turn, *read_samples(folder / "m.csv").samples):
        assert_hears(sample.audio[0], UTTERANCES[0], slice(1600, 6400))
    assert_hears(whole.audio[0], UTTERANCES[0])
    assert whole.metadata["end"] == "of a talk"


@pytest.mark.parametrize("kind", ["auto", "asr", "librispeech"])
def test_librispeech_folder(folder: Path, kind: str) -> None:
    chapter = folder / "test-clean/1089/134686"
    chapter.mkdir(parents=True)
    for i in range(2):
        wav, rate = soundfile.read(folder / f"a{i}.wav")
        soundfile.write(chapter / f"1089-134686-000{i}.flac", wav, rate)
    write(chapter / "1089-134686.trans.txt", "1089-134686-0000 HE HOPED", "1089-134686-0001 STUFF IT")
    first, second = read_samples(folder / "test-clean", kind, check_audio=True, think=False).samples
    assert (first.id, first.references, first.task) == ("1089-134686-0000", ("HE HOPED",), "asr")
    assert first.metadata == {"language": "en", "speaker": "1089", "text": "HE HOPED"}
    assert views_of([first], "transcript")[0].messages[-1].content[0] == "HE HOPED\n"
    assert_hears(second.audio[0], UTTERANCES[1])
    (chapter / "1089-134686-0001.flac").unlink()
    with pytest.raises(ValueError, match=r"trans\.txt: row 2, field 'audio': no 1089-134686-0001\.flac"):
        read_samples(folder / "test-clean", kind)


def test_wenetspeech_segments(folder: Path) -> None:
    segments: list[dict[str, Any]] = [
        {"sid": "Y1_S0", "begin_time": 0.1, "end_time": 0.4, "text": "你好", "subsets": ["TEST_NET"]},
        {"sid": "Y1_S1", "begin_time": 0.4, "end_time": 0.3, "text": "再见"},
    ]
    path = folder / "WenetSpeech.json"
    path.write_text(json.dumps({"audios": [{"aid": "Y1", "path": "a3.wav", "segments": segments}]}))
    loaded = read_samples(path, on_error="skip", check_audio=True)
    (sample,) = loaded.samples
    assert (sample.id, sample.references, sample.metadata["language"]) == ("Y1_S0", ("你好",), "zh")
    assert_hears(sample.audio[0], UTTERANCES[3], slice(1600, 6400))
    (skipped,) = loaded.skipped
    assert str(skipped) == f"{path}: row 2, field 'end_time': 0.3 does not lie after begin_time 0.4; correct the times"


def test_gigaspeech_is_in_the_language_that_it_names(folder: Path) -> None:
    segments = [{"sid": "POD_S0", "begin_time": 0.1, "end_time": 0.4, "text_tn": "AS THEY'RE LEAVING <COMMA>"}]
    audios = [{"aid": "POD", "path": "a3.wav", "segments": segments}]
    path = folder / "GigaSpeech.json"
    path.write_text(json.dumps({"dataset": "GigaSpeech", "language": "EN", "audios": audios}))
    (sample,) = read_samples(path, columns={"text": "text_tn"}).samples
    assert sample.metadata["language"] == "en" and "English" in prompt(sample)
    path.write_text(json.dumps({"language": 3, "audios": audios}))
    with pytest.raises(ValueError, match="row 1, field 'language': 3 is not a language"):
        read_samples(path, columns={"text": "text_tn"})


def test_the_bundled_manifest_is_readable_too() -> None:
    from importlib import resources

    path = Path(str(resources.files("audiorl"))) / "assets/speech/manifest.jsonl"
    loaded = read_samples(path, think=False, limit=50)
    assert [s.id for s in loaded.samples] == [u.id for u in bundled_speech()][:50]
    assert all(s.task == "asr" for s in loaded.samples)


# -- AVQA and MusicBench -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "avqa"])
def test_avqa_leaves_out_what_needs_the_picture(folder: Path, kind: str) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"id": 1, "question_relation": "View"},
        {"id": 2, "question_text": "What color is the car in the video?"},
        {"id": 3, "question_relation": "Sound", "question_text": "Who speaks?", "answer": 2},
    )
    path = folder / "train_qa.json"
    path.write_text(json.dumps([AVQA | change for change in changes]))
    loaded = read_samples(path, kind, check_audio=True)
    assert [(s.id, s.references) for s in loaded.samples] == [("184", ("Car",)), ("3", ("siren",))]
    assert loaded.left_out == {"answered by the picture alone": 1, "asks for a color": 1} and not loaded.skipped
    assert loaded.summary() == f"{path}: 2 samples, left out: 1 (answered by the picture alone), 1 (asks for a color)"
    first = loaded.samples[0]
    assert prompt(first).startswith("What is the main source of sound in the audio?")
    assert first.audio[0].path == str(folder / "-HIPq7T3eFI_000011.wav")
    assert first.metadata["recording"] == "-HIPq7T3eFI_000011" and first.metadata["question_type"] == "Come From"
    path = write(folder / "avqa.jsonl", PREPARED | {"question_relation": "View"})
    assert len(read_samples(path, check_audio=True).samples) == 1, "prepared rows are read as they are"


def test_avqa_finds_other_kinds_of_files_and_names_a_missing_one(folder: Path) -> None:
    path = write(folder / "avqa.jsonl", AVQA, AVQA | {"id": 1, "video_name": "gone_000001"})
    with pytest.raises(ValueError, match=r"row 2, field 'video_name': .*gone_000001\.wav: missing"):
        read_samples(path, check_audio=True)
    wav, rate = soundfile.read(folder / "a0.wav")
    soundfile.write(folder / "gone_000001.flac", wav, rate)
    assert read_samples(path, check_audio=True).samples[1].audio[0].path == str(folder / "gone_000001.flac")


def test_avqa_asks_about_the_audio(folder: Path) -> None:
    questions = {
        "What happened in the video?": "What happened in the audio?",
        "Video: who speaks in these videos?": "Audio: who speaks in these audio?",
        "Is it a videotape?": "Is it a videotape?",
    }
    rows = [PREPARED | {"id": i, "question_text": q} for i, q in enumerate(questions)]
    samples = read_samples(write(folder / "avqa.jsonl", *rows)).samples
    assert [prompt(s).split("\n")[0] for s in samples] == list(questions.values())
    music = {name: value for name, value in PREPARED.items() if name != "video_name"}
    (sample,) = read_samples(write(folder / "mb.jsonl", music | {"question_text": "Which video?"})).samples
    assert "Which video?" in prompt(sample), "only AVQA's clips come from videos"


@pytest.mark.parametrize(
    ("change", "choices", "answer"),
    [
        ({}, AVQA["multi_choice"], "Car"),
        ({"multi_choice": ["car", "bus ", "bus", "rain"], "answer": 2}, ["car", "bus", "rain"], "bus"),
        ({"multi_choice": [1, 2, 3, 4], "answer": 2}, ["1", "2", "3", "4"], "3"),
        ({"answer": 2.0}, AVQA["multi_choice"], "siren"),
        ({"answer": "3"}, AVQA["multi_choice"], "gun fire"),
        ({"multi_choice": ["90", "120", "60"], "answer": "60"}, ["90", "120", "60"], "60"),
    ],
)
def test_answers_as_published(folder: Path, change: dict[str, Any], choices: list[str], answer: str) -> None:
    row = PREPARED | change
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    for path in (write(folder / "rows.jsonl", row), folder / "rows.parquet"):
        (sample,) = read_samples(path, check_audio=True).samples
        assert (sample.choices, sample.references) == (tuple(choices), (answer,))


@pytest.mark.parametrize("kind", ["auto", "musicbench"])
def test_musicbench_rows_become_questions(folder: Path, kind: str) -> None:
    path = write(folder / "MusicBench_train.json", MUSIC)
    key, tempo, metre = read_samples(path, kind, check_audio=True).samples
    assert [s.id for s in (key, tempo, metre)] == [f"{k}_-0SdAVK79lg_1" for k in ("key", "tempo", "metre")]
    assert [s.task for s in (key, tempo, metre)] == ["key", "tempo", "metre"]
    assert [s.references[0] for s in (key, tempo, metre)] == ["F# minor", "Allegro moderato", "3/4"]
    assert all(len(set(s.choices)) == 4 and s.references[0] in s.choices for s in (key, tempo, metre))
    assert all(choice.removesuffix(" minor") in KEYS for choice in key.choices) and "6/8" not in metre.choices
    low, high = TEMPO_MARKS["Allegro moderato"]
    for mark in set(tempo.choices) - {"Allegro moderato"}:
        assert TEMPO_MARKS[mark][0] > high or TEMPO_MARKS[mark][1] < low
    assert {s.metadata["recording"] for s in (key, tempo, metre)} == {"-0SdAVK79lg"}
    assert key.audio[0].path == str(folder / "data_aug2/-0SdAVK79lg_1.wav")
    assert [s.choices for s in read_samples(path, kind).samples] == [s.choices for s in (key, tempo, metre)]
    assert TEMPO_MARKS["Prestissimo"] == (200, float("inf")) and len(TEMPO_MARKS) == 19


@pytest.mark.parametrize(
    ("change", "tasks", "answers"),
    [
        ({"key": ["Gb", "major"]}, "key tempo metre", ["F# major", "Allegro moderato", "3/4"]),
        ({"key": ["A#", "minor"]}, "key tempo metre", ["Bb minor", "Allegro moderato", "3/4"]),
        ({"key": [None, None]}, "tempo metre", ["Allegro moderato", "3/4"]),
        ({"key": None, "prompt_bt": "The beat counts to 4."}, "tempo", ["Allegro moderato"]),
        ({"prompt_bpm": "This song goes at 153.0 beats per minute."}, "key metre", ["F# minor", "3/4"]),
        ({"prompt_bpm": "It is played at the pace of vivace."}, "key tempo metre", ["F# minor", "Vivace", "3/4"]),
        ({"prompt_bpm": "", "prompt_bt": "The time signature is 5/4."}, "key metre", ["F# minor", "5/4"]),
    ],
)
def test_a_row_gives_the_questions_that_it_can(folder: Path, change: Any, tasks: str, answers: list[str]) -> None:
    samples = read_samples(write(folder / "mb.jsonl", MUSIC | change), "musicbench").samples
    assert " ".join(s.task for s in samples) == tasks
    assert [s.references[0] for s in samples] == answers


def test_what_musicbench_leaves_out_is_counted(folder: Path) -> None:
    nothing = {"key": None, "prompt_bt": "", "prompt_bpm": "", "location": "data/aaaaaaaaaaa.wav"}
    again = {"main_caption": "The same clip in other words."}
    loaded = read_samples(write(folder / "mb.jsonl", MUSIC, MUSIC | again, MUSIC | nothing))
    assert len(loaded.samples) == 3
    assert loaded.left_out == {"asks what an earlier row asks": 3, "gives no key, tempo mark or time signature": 1}


def test_right_choices_have_no_favourite_place(folder: Path) -> None:
    rows = [MUSIC | {"location": f"data/{i:011}.wav", "key": [KEYS[i % 12], "major"]} for i in range(400)]
    samples = read_samples(write(folder / "mb.jsonl", *rows)).samples
    places = Counter((s.task, s.choices.index(s.references[0])) for s in samples)
    assert len(places) == 12 and all(70 < count < 130 for count in places.values())


def test_copies_of_a_held_out_recording_are_not_trained_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [MUSIC | {"location": f"data_aug2/{i:011}_{copy}.wav"} for i in range(20) for copy in (1, 2, 3)]
    samples = read_samples(write(folder / "mb.jsonl", *rows)).samples
    train, held_out = split_held_out([("music", samples)], [], 6)
    assert Counter(s.task for s in held_out) == {"key": 2, "tempo": 2, "metre": 2}
    recordings = {s.metadata["recording"] for s in held_out}
    assert not recordings & {s.metadata["recording"] for s in train}
    left_out = 9 * len(recordings) - 6
    assert len(train) == 180 - 6 - left_out
    assert f"left out of training: {left_out} rows about held-out recordings" in capsys.readouterr().out
