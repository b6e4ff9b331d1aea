"""Streams of the bundled recordings: what is heard when, that nothing leaks, that a number names a stream."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.audio import seconds as clip_seconds
from audiorl.data.corpus import Utterance, normalised
from audiorl.data.silence import trimmed
from audiorl.tasks.simul.bundled import bundled_streams, draw_streams, prompt_pairs, trimmed_recording
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.streams import Stream
from tests.support.streams import build_stream

RATE = 16_000
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def train() -> list[Stream]:
    return bundled_streams("train", count=12)


def array(stream: Stream) -> np.ndarray:
    assert stream.audio.array is not None
    return stream.audio.array


def level(wav: np.ndarray) -> float:
    """dB relative to full scale."""
    return float(20 * np.log10(np.sqrt(np.mean(np.square(wav, dtype=np.float64)))))


# --------------------------------------------------------------------------------------------------------- laying out


def burst(seconds: float, before: float = 0.0, after: float = 0.0) -> np.ndarray:
    """A tone between silences."""
    tone = 0.3 * np.sin(np.arange(round(seconds * RATE)) * 0.5)
    return np.pad(tone, (round(before * RATE), round(after * RATE))).astype(np.float32)


def said(key: str, language: str, text: str, wav: np.ndarray, speaker: str = "") -> Utterance:
    clip = AudioClip(array=wav, sample_rate=RATE)
    return replace(Utterance(f"{language}/{key}", key, language, text, clip, len(wav) / RATE, ""), speaker=speaker)


def prompt(key: str, seconds: float, target_seconds: float) -> tuple[np.ndarray, Utterance, Utterance]:
    wav = burst(seconds, 0.3, 0.4)
    return wav, said(key, "en", f"{key} in", wav), said(key, "es", f"{key} out", burst(target_seconds, 0.2, 0.1))


def test_prompts_follow_each_other_with_pauses() -> None:
    made = build_stream("x", [prompt("a", 1.0, 2.0), prompt("b", 0.5, 0.7)], (0.25, 0.25), np.random.default_rng(0))
    assert [(u.source, u.target) for u in made.units] == [("a in", "a out"), ("b in", "b out")]
    # 50 ms are left on both sides of the speech, of the target's too.
    assert [(u.start, u.end) for u in made.units] == [pytest.approx((0.0, 1.1)), pytest.approx((1.35, 1.95))]
    assert [u.target_seconds for u in made.units] == pytest.approx([2.1, 0.8])
    assert made.seconds == pytest.approx(2.2) == len(array(made)) / RATE, "a pause follows the last prompt too"
    assert (made.source_language, made.target_language) == ("en", "es")
    wav = array(made)
    assert np.abs(wav[800:-4000][: RATE - 1600] - burst(1.0)[: RATE - 1600]).max() < 2e-3
    for start, end in ((1.11, 1.34), (1.96, 2.2)):
        assert level(wav[round(start * RATE) : round(end * RATE)]) == pytest.approx(-75, abs=0.5), "room tone"


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.03, 0.02), (0.5, 0.0), (0.0, 1.0), (0.3, 0.7)])
def test_silence_around_speech_is_cut(before: float, after: float) -> None:
    cut = trimmed(burst(0.5, before, after))
    assert len(cut) / RATE == pytest.approx(0.5 + min(before, 0.05) + min(after, 0.05), abs=0.01)


def test_no_recording_loses_a_part_that_is_heard() -> None:
    for a, _ in prompt_pairs("test")[::4]:
        wav = a.clip.load()
        cut = trimmed(wav)
        place = next(k for k in range(len(wav)) if np.array_equal(wav[k : k + 400], cut[:400]))
        lost = np.concatenate([wav[:place], wav[place + len(cut) :]])
        assert not len(lost) or np.abs(lost).max() < 0.1 * np.abs(wav).max()


# -------------------------------------------------------------------------------------------------------- the bundled


def test_streams_are_as_long_as_asked(train: list[Stream]) -> None:
    assert all(10 <= s.seconds <= 30 for s in train)
    assert max(s.seconds for s in train) - min(s.seconds for s in train) > 5
    for s in bundled_streams("test", "fr", count=3, seconds=(60, 60)):
        assert s.seconds == 60.0 and s.units[-1].end > 50


def test_units_are_where_their_recordings_are_heard(train: list[Stream]) -> None:
    recordings = {a.key: (a, b) for a, b in prompt_pairs("train")}
    pauses = []
    for s in train[:4]:
        wav = array(s)
        for unit, key in zip(s.units, s.metadata["prompts"].split(), strict=True):
            a, b = recordings[key]
            assert (unit.source, unit.target) == (a.text, b.text)
            assert unit.target_seconds == clip_seconds(trimmed_recording(b))
            speech = trimmed(a.clip.load())
            start = round(unit.start * RATE)
            assert round(unit.end * RATE) == start + len(speech)
            assert np.abs(wav[start : start + len(speech)] - speech).max() < 2e-3
        starts = [u.start for u in s.units[1:]]
        pauses += [start - u.end for u, start in zip(s.units, starts, strict=False)]
    assert 0.2 - 1e-3 <= min(pauses) < 0.4 and 1.0 < max(pauses) <= 1.2 + 1e-3
    assert trimmed_recording(b) is trimmed_recording(b), "decoded once"


def test_no_prompt_and_no_text_is_in_both_splits() -> None:
    keys, texts = [], []
    splits: tuple[Literal["train", "test"], ...] = ("train", "test")
    for split in splits:
        pairs = [p for target in ("es", "fr") for p in prompt_pairs(split, target, max_prompt_seconds=60)]
        keys.append({u.key for p in pairs for u in p})
        texts.append({normalised(u.text) for p in pairs for u in p})
        heard = {k for s in bundled_streams(split, count=5, seed=3) for k in s.metadata["prompts"].split()}
        assert heard <= keys[-1]
    assert not keys[0] & keys[1] and not texts[0] & texts[1]
    assert len(prompt_pairs("train")) > 250 and len(prompt_pairs("test")) > 100


def test_single_letters_and_long_prompts_are_left_out() -> None:
    pairs = prompt_pairs("train", max_prompt_seconds=60) + prompt_pairs("test", max_prompt_seconds=60)
    assert not {f"letters/{c}" for c in "abcdefghijklmnopqrstuvwxyz"} & {a.key for a, _ in pairs}
    assert ("vm-and", "y") in {(a.key, b.text) for a, b in pairs}
    assert max(a.duration for a, _ in pairs) > 15 and max(a.duration for a, _ in prompt_pairs("train")) <= 8.0


def test_a_stream_is_named_by_its_number_and_seed(train: list[Stream]) -> None:
    again = bundled_streams("train", count=3)
    for a, b in zip(train, again, strict=False):
        assert (a.id, a.units) == (b.id, b.units) and np.array_equal(array(a), array(b))
    other = bundled_streams("train", count=3, seed=1)
    assert [s.id for s in again] == [f"en-es/train/0/000{k}" for k in range(3)]
    assert {s.metadata["prompts"] for s in other}.isdisjoint(s.metadata["prompts"] for s in train)
    assert len({s.metadata["prompts"] for s in train}) == len(train)


def test_prompts_said_by_a_voice_of_ones_own() -> None:
    asked: list[str] = []

    def speak(utterance: Utterance, rng: np.random.Generator) -> np.ndarray:
        asked.append(utterance.text)
        return burst(0.5 + float(rng.uniform(0, 0.5)))

    (made,) = bundled_streams("train", count=1, seconds=(5, 8), speak=speak)
    assert [u.source for u in made.units] == asked[: len(made.units)]
    assert all(0.49 < u.end - u.start < 1.01 for u in made.units)
    with pytest.raises(ValueError, match=r"en/.*: 1\.00 s of silence; give speech"):
        bundled_streams("train", count=1, speak=lambda utterance, rng: np.zeros(RATE, np.float32))


def test_prompts_that_another_person_recorded() -> None:
    """Of their prompts those of the split, in their recordings and words; the translation stays."""
    train, test = prompt_pairs("train", "en", "es"), prompt_pairs("test", "en", "es")
    assert {a.key for a, _ in prompt_pairs("all", "en", "es")} == {a.key for a, _ in (*train, *test)}
    translations = [b.text for _, b in test]
    first, second, third = [(a, b) for a, b in test if translations.count(b.text) == 1][:3]
    voice = [
        said(first[0].key, "es", "otro", burst(0.7), "someone"),
        said(second[0].key, "es", "más largo", burst(9.0), "someone"),
        said(third[0].key, "fr", "autre", burst(0.7), "someone"),
        said(train[0][0].key, "es", "de train", burst(0.7), "someone"),
    ]
    pairs = prompt_pairs("test", "en", "es", voice=voice)
    assert [(a.text, b.key, b.text) for a, b in pairs] == [("otro", first[1].key, first[1].text)]
    (made,) = bundled_streams("test", "en", "es", count=1, seconds=(1, 3), voice=voice)
    assert made.id == "es-en/test/someone/0/0000"
    assert [(u.source, u.target) for u in made.units] == [("otro", first[1].text)]
    assert made.units[0].end == pytest.approx(0.7, abs=0.01)


def test_what_cannot_be_drawn() -> None:
    for options, message in (
        ({"target": "it"}, r"no recordings in 'it', only en, es, fr; `audiorl data build`"),
        ({"seconds": (30.0, 10.0)}, "seconds must be"),
        ({"seconds": (0.0, 10.0)}, "seconds must be"),
        ({"seconds": (600, 900)}, r"stream en-es/test/0/0000 is to last 600 to 900 s, which 1\d\d prompts of .* not"),
        ({"seconds": (0.2, 0.3)}, "do not fill; choose other lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            next(draw_streams("test", **options))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- a built corpus


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder such as `audiorl data build` writes, in Italian and English."""
    folder, rows = tmp_path / "corpus", []
    for language, longer in (("en", 0.0), ("it", 0.2)):
        (folder / language).mkdir(parents=True)
        for k, letter in enumerate("abcdefghijkl"):
            name, seconds = f"{language}/p{k}", 0.5 + 0.1 * k + longer
            soundfile.write(folder / f"{name}.wav", burst(seconds), RATE)
            text = f"{'prompt' if language == 'en' else 'frase'} {letter}"
            row = {"id": name, "key": f"p{k}", "language": language, "text": text, "audio": f"{name}.wav"}
            rows.append(row | {"duration": seconds, "speaker": "x", "licence": "X"})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "ATTRIBUTION.md").write_text("# Attribution\n")
    (folder / "LICENSE-X.txt").write_text("licence\n")
    return folder


def test_streams_of_a_built_corpus_by_the_command_line(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("build_streams", ROOT / "tools/build_streams.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path / "out"
    options = ["--corpus", str(built), "--target", "it", "--split", "train", "--seconds", "3", "5", "--count", "3"]
    monkeypatch.setattr(sys, "argv", ["build_streams", str(out), *options])
    module.main()
    assert "out: 3 streams, 0." in capsys.readouterr().out
    direct = bundled_streams("train", "it", count=3, seconds=(3, 5), folder=built)
    for found, made in zip(read_streams(out).samples, direct, strict=True):
        assert found.id == made.id and made.target_language == "it"
        for a, b in zip(found.units, made.units, strict=True):
            assert replace(a, target_audio=None) == replace(b, target_audio=None)
            assert b.target.startswith("frase") and b.target_seconds == pytest.approx(b.end - b.start + 0.2, abs=0.011)
            assert a.target_audio is not None and b.target_audio is not None
            assert Path(str(a.target_audio.path)).samefile(str(b.target_audio.path))
    assert len(list((out / "audio").glob("*.flac"))) == 3
    assert "It is under the same licences." in (out / "ATTRIBUTION.md").read_text()
    assert (out / "LICENSE-X.txt").exists()
    with pytest.raises(ValueError, match="not empty; name a new folder"):
        module.main()
