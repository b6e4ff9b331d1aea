"""The bundled recordings are complete and sane; splits leak nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.data.corpus import (
    Utterance,
    bundled_speech,
    corpus,
    normalised,
    parallel,
    split_by_key,
    unseen_speakers,
)

ROOT = Path(__file__).resolve().parents[3]


def test_every_listed_clip_is_there_and_nothing_else() -> None:
    speech = bundled_speech()
    folder = ROOT / "audiorl/assets/speech"
    assert sorted(u.clip.path or "" for u in speech) == sorted(map(str, folder.rglob("*.opus")))
    assert len({u.id for u in speech}) == len(speech)
    counts = {language: sum(u.language == language for u in speech) for language in ("en", "es", "fr")}
    assert counts == {"en": 548, "es": 472, "fr": 506}
    assert all(u.text.strip() and not set("[]<>") & set(u.text) for u in speech)
    assert (folder / "ATTRIBUTION.md").exists() and (folder / "LICENSE-CC-BY-SA-3.0.txt").exists()


def test_a_sample_of_clips_sounds_like_speech() -> None:
    for u in bundled_speech()[::37]:
        wav = u.clip.load(16_000)
        assert len(wav) / 16_000 == pytest.approx(u.duration, abs=0.01), u.id
        level = 20 * np.log10(np.sqrt(np.mean(wav**2)))
        assert -30 < level < -10, u.id
        spectrum = np.abs(np.fft.rfft(wav)) ** 2
        hz = np.fft.rfftfreq(len(wav), 1 / 16_000)
        assert spectrum[(hz > 80) & (hz < 4000)].sum() > 0.8 * spectrum.sum(), u.id
        assert spectrum[hz > 4000].sum() > 1e-5 * spectrum.sum(), f"{u.id} is narrow-band"


def test_filters() -> None:
    short = bundled_speech(("en",), min_seconds=1.0, max_seconds=2.0)
    assert short and all(u.language == "en" and 1 <= u.duration <= 2 for u in short)
    with pytest.raises(ValueError, match=r"no language 'de', only en, es, fr; `audiorl data build`"):
        bundled_speech(("de",))


def test_parallel_pairs_say_the_same() -> None:
    pairs = parallel(bundled_speech(), "en", "es")
    assert len(pairs) > 400
    assert all((s.language, t.language) == ("en", "es") and s.key == t.key for s, t in pairs)
    texts = {s.text: t.text for s, t in pairs}
    assert texts["seven"] == "siete"


def utterance(key: str, language: str, text: str, speaker: str = "x") -> Utterance:
    return Utterance(f"{language}/{key}/{speaker}", key, language, text, AudioClip(path="-"), 1.0, speaker)


def test_parallel_pairs_voices_one_to_one() -> None:
    rows = [utterance("a", "en", "one", v) for v in "xy"] + [utterance("a", "es", "uno", v) for v in "pqr"]
    assert [(s.speaker, t.speaker) for s, t in parallel(rows, "en", "es")] == [("x", "p"), ("y", "q")]


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_split_shares_neither_keys_nor_texts(fraction: float, seed: int) -> None:
    speech = bundled_speech()
    train, held_out = split_by_key(speech, fraction, seed)
    assert not {u.key for u in train} & {u.key for u in held_out}
    assert not {normalised(u.text) for u in train} & {normalised(u.text) for u in held_out}
    assert fraction <= len(held_out) / len(speech) < fraction + 0.01
    assert sorted(u.id for u in train + held_out) == sorted(u.id for u in speech)
    assert [u.id for u in split_by_key(speech, fraction, seed)[1]] == [u.id for u in held_out]


def test_split_depends_on_the_seed_and_not_on_the_order() -> None:
    speech = bundled_speech(("en",))
    held_out = {u.id for u in split_by_key(speech, 0.2, 0)[1]}
    assert held_out == {u.id for u in split_by_key(speech[::-1], 0.2, 0)[1]}
    assert held_out != {u.id for u in split_by_key(speech, 0.2, 1)[1]}


def test_split_follows_chains_of_equal_texts() -> None:
    # a = b in English, b = c in Spanish: all three stay together although a and c share nothing.
    chain = [
        utterance("a", "en", "Yes!"),
        utterance("b", "en", "yes"),
        utterance("b", "es", "Sí"),
        utterance("c", "es", "si."),
    ]
    others = [utterance(str(i), "en", f"text {i}") for i in range(20)]
    for seed in range(20):
        train, held_out = split_by_key([*chain, *others], 0.3, seed)
        assert sum(u.key in "abc" for u in held_out) in (0, 4), seed
        assert len(train) + len(held_out) == 24
    with pytest.raises(ValueError, match="held_out_fraction"):
        split_by_key(chain, 1.0)


def test_manifest_errors_name_file_row_and_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"manifest\.jsonl: missing; build the folder"):
        corpus(tmp_path)
    (tmp_path / "manifest.jsonl").write_text('{"id": "x", "key": "k"}\n')
    with pytest.raises(ValueError, match=r"manifest\.jsonl: row 1, field 'language': missing; give one that is not em"):
        corpus(tmp_path)
    row = {name: "x" for name in ("id", "key", "language", "text", "audio", "speaker")}
    (tmp_path / "manifest.jsonl").write_text(json.dumps({**row, "duration": 1}))
    with pytest.raises(ValueError, match=r"manifest\.jsonl: row 1, field 'licence': missing; write the recording's"):
        corpus(tmp_path)
    (tmp_path / "manifest.jsonl").write_text(json.dumps({**row, "duration": 1, "licence": ""}))
    with pytest.raises(ValueError, match=r"manifest\.jsonl: row 1, field 'licence': '' is not a licence; write"):
        corpus(tmp_path)


def test_the_bundled_recordings_say_licence_and_translation() -> None:
    speech = {u.id: u for u in bundled_speech()}
    assert {u.licence for u in speech.values()} == {"CC-BY-SA-3.0"}
    assert speech["es/digits/7"].translation == "seven" and speech["en/digits/7"].translation == ""
    english = {u.key: u.text for u in speech.values() if u.language == "en"}
    assert all(u.translation == english.get(u.key, u.translation) for u in speech.values() if u.language != "en")


def test_the_unseen_speakers_are_in_the_repository_with_their_licences(tmp_path: Path) -> None:
    speech = unseen_speakers()
    folder = ROOT / "unseen_speakers"
    assert sorted(u.clip.path or "" for u in speech) == sorted(map(str, folder.rglob("*.opus")))
    assert len({u.speaker for u in speech}) == 5 and len({u.id for u in speech}) == len(speech)
    counts = {s: sum(u.speaker == s for u in speech) for s in {u.speaker for u in speech}}
    assert sum(counts.values()) == 312 and min(counts.values()) == counts["Armelle Desjardins"] == 23
    assert not {u.speaker for u in bundled_speech()} & {u.speaker for u in speech}
    for u in speech[::25]:
        wav = u.clip.load(16_000)
        assert len(wav) / 16_000 == pytest.approx(u.duration, abs=0.01), u.id
        assert 20 * np.log10(np.sqrt(np.mean(wav**2))) > -45, u.id
    for licence in {u.licence for u in speech}:
        assert (folder / f"LICENSE-{licence}.txt").stat().st_size > 1000
    assert all(
        u.speaker.startswith("Tux Paint") or u.speaker in (folder / "ATTRIBUTION.md").read_text() for u in speech
    )
    with pytest.raises(ValueError, match=r"manifest\.jsonl: missing; build the folder"):
        unseen_speakers(tmp_path)


def test_without_a_clone_the_error_says_how_to_build_the_unseen_speakers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("audiorl.data.corpus.resources.files", lambda package: tmp_path / "site-packages" / package)
    with pytest.raises(
        ValueError, match=r"not installed with the package; write them with `audiorl data build FOLDER --"
    ):
        unseen_speakers()
