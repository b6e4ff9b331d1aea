"""The question benchmark: choices that do not give the answer away, clips that hold what the question asks for, splits
that share nothing."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.data.manifest import read_samples
from audiorl.eval.metrics.choice import mmau_match
from corpora.questions import sounds
from corpora.questions.build import SPLITS, build_questions
from corpora.questions.choices import Draft, Question, text_only_accuracy, with_choices
from corpora.questions.music import (
    COUNTS,
    DIRECTIONS,
    INSTRUMENTS,
    MAJOR,
    MINOR,
    MODES,
    TEMPOS,
    TONICS,
    FluidSynth,
    Note,
    Piece,
    direction_piece,
    ensemble_piece,
    key_piece,
    midi_file,
    mode_piece,
    tempo_piece,
)
from corpora.questions.speech import HELD_OUT_SPEAKERS
from corpora.questions.speech import VOICES as MEN_AND_WOMEN
from corpora.sources.build import UNSEEN, VOICES

RATE = 16_000
SOUND_FONT = Path("/usr/share/sounds/sf2/FluidR3_GM.sf2")


def draft(i: int, answer: str, kind: str = "k", **more: object) -> Draft:
    return Draft(f"{kind}{i}", "sound", kind, "Which?", answer, lambda: np.zeros(1, np.float32), (str(i),), "x", **more)  # type: ignore[arg-type]


# -- choices -----------------------------------------------------------------------------------------------------------


def test_every_text_is_wrong_three_times_as_often_as_right() -> None:
    answers = [f"answer {i % 12}" for i in range(240)]
    questions = with_choices([draft(i, answer) for i, answer in enumerate(answers)], seed=0)
    assert [q.draft.id for q in questions] == [f"k{i}" for i in range(240)]
    assert all(len(set(q.choices)) == 4 and q.draft.answer in q.choices for q in questions)
    wrong = Counter(choice for q in questions for choice in q.choices if choice != q.draft.answer)
    assert all(abs(wrong[f"answer {k}"] - 60) <= 2 for k in range(12))
    assert Counter(q.choices.index(q.draft.answer) for q in questions) == dict.fromkeys(range(4), 60)
    assert questions == with_choices([q.draft for q in questions], seed=0)
    assert questions != with_choices([q.draft for q in questions], seed=1)


def test_answers_that_are_too_frequent_lose_questions() -> None:
    answers = ["often"] * 50 + ["a"] * 10 + ["b"] * 10 + ["c"] * 10 + ["d"] * 5
    questions = with_choices([draft(i, answer) for i, answer in enumerate(answers)], seed=0)
    counts = Counter(q.draft.answer for q in questions)
    assert 4 * max(counts.values()) <= len(questions) and counts["d"] == 5
    assert with_choices([draft(i, answer) for i, answer in enumerate("aabbcc")], seed=0) == []


def test_choices_have_different_words_and_pools_do_not_mix() -> None:
    texts = ["good morning", "morning, good", "one", "two", "three", "four", "five"]
    drafts = [draft(i, text, pool="en") for i, text in enumerate(texts)]
    drafts += [draft(10 + i, f"palabra {i}", pool="es") for i in range(6)]
    for q in with_choices(drafts, seed=3):
        assert {choice.startswith("palabra") for choice in q.choices} == {q.draft.pool == "es"}
        for choice in q.choices:
            assert mmau_match(q.draft.answer, choice, q.choices) == (choice == q.draft.answer)


def test_a_text_only_classifier_finds_a_leak_and_is_at_chance_without_one() -> None:
    rng = random.Random(0)
    names = [f"name {i}" for i in range(20)]

    def leaky(first: int) -> list[Question]:  # the first five names are always right
        drafts = [draft(first + i, rng.choice(names[:5])) for i in range(200)]
        return [Question(d, tuple(rng.sample([d.answer, *rng.sample(names[5:], 3)], 4))) for d in drafts]

    assert text_only_accuracy(leaky(0), leaky(1000)) == 1.0
    sets = [with_choices([draft(i, rng.choice(names)) for i in range(count)], seed=count) for count in (2000, 1000)]
    accuracy = text_only_accuracy(*sets)
    assert abs(accuracy - 0.25) < 2.6 * np.sqrt(0.25 * 0.75 / len(sets[1]))


# -- music -------------------------------------------------------------------------------------------------------------


def melody(piece: Piece) -> list[int]:
    return [note.pitch for note in sorted(piece.notes, key=lambda n: n.start)]


@pytest.mark.parametrize("seed", range(5))
def test_melodies_move_in_the_direction_of_the_answer(seed: int) -> None:
    for direction in DIRECTIONS:
        steps = np.sign(np.diff(melody(direction_piece(random.Random(seed), direction))))
        half = len(steps) // 2
        expected = {"up": [1, 1], "down": [-1, -1], "up, then back": [1, -1], "down, then back": [-1, 1]}[direction]
        assert set(steps[:half]) == {expected[0]} and set(steps[half:]) == {expected[1]}


@pytest.mark.parametrize("seed", range(3))
def test_keys_and_modes_hold_their_notes(seed: int) -> None:
    for n, tonic in enumerate(TONICS):
        for mode, scale in (("major", MAJOR), ("minor", MINOR)):
            pitches = {(p - n) % 12 for p in melody(key_piece(random.Random(seed), f"{tonic} {mode}"))}
            assert pitches <= set(scale) and scale[2] in pitches and 0 in pitches
    for modes in MODES:
        piece = mode_piece(random.Random(seed), modes)
        gap = max(np.diff(sorted(n.start for n in piece.notes)))
        starts = sorted(n.start for n in piece.notes)
        second = starts[1 + int(np.argmax(np.diff(starts)))]
        tonics = [n.pitch % 12 for n in piece.notes if n.duration == 0.8]
        assert gap > 1 and len(set(tonics)) == 1
        thirds = []
        for part in ([n for n in piece.notes if n.start < second], [n for n in piece.notes if n.start >= second]):
            steps = {(n.pitch - tonics[0]) % 12 for n in part}
            assert (4 in steps) != (3 in steps)
            thirds.append("major" if 4 in steps else "minor")
        expected = {"both major": ["major"] * 2, "both minor": ["minor"] * 2}
        assert thirds == expected.get(modes, ["major", "minor"] if modes == "major first" else ["minor", "major"])


def test_tempo_and_number_of_instruments() -> None:
    for tempo, beats in TEMPOS.items():
        piece = tempo_piece(random.Random(1), tempo)
        onsets = sorted({n.start for n in piece.notes})
        assert 60 / np.median(np.diff(onsets)) == pytest.approx(beats, rel=0.06)
    for count in COUNTS:
        piece = ensemble_piece(random.Random(1), count)
        assert len({n.channel for n in piece.notes}) == len({p for _, p in piece.programs}) == COUNTS.index(count) + 1


def test_midi_files_hold_every_note() -> None:
    pieces = [Piece((Note(0.0, 0.5, 60), Note(0.5, 0.5, 64, 80, 1)), ((0, 73), (1, 40)))] * 2
    data = midi_file(pieces, [0.0, 10.0, 20.0])
    assert data[:4] == b"MThd" and struct.unpack(">HHH", data[8:14]) == (0, 1, 480)
    assert data[14:18] == b"MTrk" and struct.unpack(">I", data[18:22])[0] == len(data) - 22
    assert data.endswith(b"\xff\x2f\x00") and data.count(b"\x90\x3c\x60") == 2 and data.count(b"\x91\x40\x50") == 2
    assert data.count(b"\xc0\x49") == 2


@pytest.mark.skipif(not SOUND_FONT.exists() or not shutil.which("fluidsynth"), reason="fluidsynth is not installed")
def test_fluidsynth_plays_the_notes() -> None:
    pieces = [Piece((Note(0.0, 1.0, pitch),), ((0, INSTRUMENTS["flute"][0]),)) for pitch in (69, 81)]
    for wave, hz in zip(FluidSynth(SOUND_FONT)(pieces), (440, 880), strict=True):
        spectrum = np.abs(np.fft.rfft(wave[4000:12000] * np.hanning(8000)))
        assert np.argmax(spectrum) * RATE / 8000 == pytest.approx(hz, rel=0.02)


# -- sounds ------------------------------------------------------------------------------------------------------------


def level(wav: np.ndarray) -> np.ndarray:
    """Level in dB of tenths of a second."""
    frames = wav[: len(wav) // 1600 * 1600].reshape(-1, 1600)
    return 20 * np.log10(np.sqrt((frames**2).mean(axis=1)) + 1e-6)


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "sound.ogg"
    soundfile.write(path, 0.3 * rng.standard_normal(RATE), RATE, format="OGG", subtype="VORBIS")
    return path


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_sound_is_repeated_as_often_as_the_answer_says(sound: Path, times: int) -> None:
    loud = level(sounds.repeated(sound, times, "seed")) > -40
    assert np.count_nonzero(np.diff(np.concatenate([[0], loud.astype(int)])) == 1) == times


def test_loudness_changes_as_the_answer_says(sound: Path) -> None:
    ends = {}
    for change in sounds.LOUDNESS:
        levels = level(sounds.with_loudness(sound, change))
        ends[change] = [levels[:5].mean(), levels[18:22].mean(), levels[-5:].mean()]
    assert ends["it gets louder"][2] - ends["it gets louder"][0] > 20
    assert ends["it gets quieter"][0] - ends["it gets quieter"][2] > 20
    assert max(ends["it stays the same"]) - min(ends["it stays the same"]) < 3
    first, middle, last = ends["it swells and fades"]
    assert middle - first > 15 and middle - last > 15


def test_names_are_split() -> None:
    train, held_out = sounds.split_names(list(sounds.ANIMALS), 0)
    assert not set(train) & set(held_out) and len(held_out) == 14 == round(len(sounds.ANIMALS) / 3)
    assert len(set(sounds.ANIMALS.values()) | set(sounds.THINGS.values())) == len(sounds.ANIMALS) + len(sounds.THINGS)


# -- speech ------------------------------------------------------------------------------------------------------------


def test_held_out_speakers_are_voices_of_the_corpus_and_hold_all_unseen_ones() -> None:
    by_folder = {voice.folder: voice.speaker for voice in VOICES}
    assert set(HELD_OUT_SPEAKERS) <= set(by_folder.values())
    assert {by_folder[folder] for folder in UNSEEN} <= set(HELD_OUT_SPEAKERS)
    assert {f"Tux Paint {language}" for language in MEN_AND_WOMEN} <= set(by_folder.values())


# -- the whole ---------------------------------------------------------------------------------------------------------

SPEAKERS = {
    "en": ["Allison Smith", "Tux Paint en"],
    "es": ["Allison Smith", "July E. Jiménez", "Tux Paint es"],
    "fr": ["June Wallack", "Armelle Desjardins", "Tux Paint fr"],
    "it": ["Carlo Flora", "Paola Dal Zot"],
    "ru": ["IvrvoiceRU", "Tux Paint ru"],
    **{code: [f"Tux Paint {code}"] for code in ("bg", "ca", "da", "ro", "be", "el")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a corpus with the voices of all sources, a tree of unpacked packages), both of made-up sounds."""
    rng = np.random.default_rng(0)
    speech, tree = tmp_path_factory.mktemp("speech"), tmp_path_factory.mktemp("tree")
    soundfile.write(speech / "a.wav", 0.1 * rng.standard_normal(RATE), RATE)
    rows = [
        {
            "id": f"{code}-{name}/{key}",
            "key": f"key {key}",
            "language": code,
            "text": f"{code} text {key}",
            "translation": "" if code == "en" else f"English text {key}",
            "audio": "a.wav",
            "duration": 1.0,
            "speaker": name,
            "licence": "GPL-2.0-or-later" if name.startswith("Tux") else "CC-BY-SA-3.0",
        }
        for code, names in SPEAKERS.items()
        for name in names
        for key in range(60)
    ]
    (speech / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (speech / "ATTRIBUTION.md").write_text("# Attribution\n\n- Recorded by people.\n")
    (speech / "LICENSE-CC-BY-SA-3.0.txt").write_text("text")
    for path in (sounds.ANIMALS | sounds.THINGS).values():
        file = tree / sounds.STAMPS / f"{path}.ogg"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, 0.2 * rng.standard_normal(4000), RATE, format="OGG", subtype="VORBIS")
    (tree / "usr/share/doc/fluid-soundfont-gm").mkdir(parents=True)
    (tree / "usr/share/doc/fluid-soundfont-gm/copyright").write_text("MIT")
    return speech, tree


def play(pieces: Sequence[Piece]) -> list[np.ndarray]:
    """A sine per piece in place of a synthesizer."""
    times = np.arange(4000) / RATE
    return [0.5 * np.sin(2 * np.pi * 440 * times).astype(np.float32) for _ in pieces]


@pytest.mark.slow
def test_the_benchmark(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speech, tree = folders
    out = tmp_path / "qa"
    questions = build_questions(out, speech, (192, 96), tree=tree, render=play)
    assert "text only" in capsys.readouterr().out
    rows = {name: json.loads((out / f"{name}.json").read_text()) for name in SPLITS}
    used = {name: {source for row in rows[name] for source in row["sources"]} for name in SPLITS}
    assert not used["train"] & used["held_out"]
    spoken = {name: [s.split("/") for s in used[name] if "/" in s and "stamps" not in s] for name in SPLITS}
    for part in (0, 1):  # speakers, prompts
        train, held_out = ({names[part] for names in spoken[name]} for name in SPLITS)
        assert not train & held_out and len(held_out) >= 7
    for name in SPLITS:
        loaded = read_samples(out / f"{name}.json", "mmau", check_audio=True)
        assert len(loaded.samples) == len(rows[name]) == len(questions[name])
        assert Counter(row["task"] for row in rows[name]).keys() == {"speech", "sound", "music"}
        kinds = Counter(row["sub-category"] for row in rows[name])
        assert len(kinds) == 16 and min(kinds.values()) >= 4
        for row in rows[name]:
            assert row["licence"] and row["difficulty"] in ("easy", "medium", "hard") and len(row["choices"]) == 4
            for choice in row["choices"]:
                assert mmau_match(row["answer"], choice, row["choices"]) == (choice == row["answer"]), row
        places = Counter(row["choices"].index(row["answer"]) for row in rows[name])
        assert max(places.values()) - min(places.values()) <= 3 * 16
    accuracy = text_only_accuracy(questions["train"], questions["held_out"])
    assert abs(accuracy - 0.25) < 3 * np.sqrt(0.25 * 0.75 / len(questions["held_out"]))
    credits = (out / "ATTRIBUTION.md").read_text()
    assert "Recorded by people" in credits and "Tux Paint" in credits and "Frank Wen" in credits
    assert sorted(p.name for p in out.glob("LICENSE-*")) == ["LICENSE-CC-BY-SA-3.0.txt", "LICENSE-MIT.txt"]
    listed = {row["audio_id"].removeprefix("./") for name in SPLITS for row in rows[name]}
    assert {p.relative_to(out).as_posix() for p in out.rglob("*.opus")} == listed
