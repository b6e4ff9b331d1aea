"""The bundled recordings are complete and sane; splits leak nothing; the builder does what its docstring says."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
import types
from pathlib import Path

import av
import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech, corpus, normalised, parallel, split_by_key

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
    with pytest.raises(ValueError, match=r"no language 'de', only en, es, fr; tools/build_corpus\.py"):
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
    with pytest.raises(ValueError, match=r"manifest\.jsonl: row 1: field 'language' is missing"):
        corpus(tmp_path)


@pytest.fixture
def builder() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("build_corpus", ROOT / "tools/build_corpus.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_g722(path: Path, wav: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((wav[None] * 32767).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)


def test_the_builder_keeps_speech_and_counts_the_rest(
    tmp_path: Path, builder: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_key = {u.key: u.clip.load(16_000) for u in bundled_speech(("en",))}
    tree, sounds = tmp_path / "root", tmp_path / "root/usr/share/asterisk/sounds/en_US_f_Allison"
    for key in ("activated", "letters/dollar", "beep", "digits/1M", "no-text", "unclear", "silence/1", "long"):
        write_g722(sounds / f"{key}.g722", by_key["agent-alreadyon" if key == "long" else "activated"])
    write_g722(sounds / "quiet.g722", by_key["activated"] * 1e-4)
    write_g722(sounds / "mismatch.g722", by_key["activated"])
    doc = tree / "usr/share/doc/asterisk-core-sounds-en"
    doc.mkdir(parents=True)
    transcripts = (
        "; a comment: with a colon\n\nactivated: Activated.\nactivated: again\nletters/dollar: dollar [$]\n"
        "beep: a beep sounds\ndigits/1m: one\nunclear: your [temporary] greeting\nsilence/1: (1 second of silence)\n"
        f"long: That agent is logged on.\nquiet: Quiet.\nmismatch: {'much too long a text ' * 5}\n"
    )
    (doc / "core-sounds-en.txt.gz").write_bytes(gzip.compress(transcripts.encode()))
    licence = "\n".join([" THE WORK IS PROVIDED", " .", *(["   1. a line of the licence's terms"] * 40)])
    (doc / "copyright").write_text(f"Files: *\nLicense: CC-BY-SA-3.0\n\nLicense: CC-BY-SA-3.0\n{licence}\n")
    arguments = ["--tree", str(tree), "--languages", "en", "--max-seconds", "3"]
    monkeypatch.setattr(sys, "argv", ["build_corpus", str(tmp_path / "out"), *arguments])
    builder.main()

    built = corpus(tmp_path / "out")
    assert [(u.key, u.text) for u in built] == [
        ("activated", "Activated."),
        ("digits/1M", "one"),
        ("letters/dollar", "dollar"),
    ]
    assert built[0].speaker == "Allison Smith"
    wav = built[0].clip.load(16_000)
    assert abs(len(wav) - len(by_key["activated"])) <= 2
    envelope = [np.abs(x[: len(x) // 160 * 160]).reshape(-1, 160).mean(1) for x in (wav, by_key["activated"])]
    assert np.corrcoef(envelope[0], envelope[1][: len(envelope[0])])[0, 1] > 0.98
    report = capsys.readouterr().out
    assert "3 clips" in report
    for reason in (
        "'sound effect or silence': 2",
        "'no transcript': 1",
        "'unclear transcript': 1",
        "'longer than 3 s': 1",
        "'silent': 1",
        "'text does not fit the duration': 1",
    ):
        assert reason in report, reason
    text = (tmp_path / "out/LICENSE-CC-BY-SA-3.0.txt").read_text()
    assert text.startswith("THE WORK IS PROVIDED\n\n  1. a line")
    assert "Allison Smith" in (tmp_path / "out/ATTRIBUTION.md").read_text()
    row = json.loads((tmp_path / "out/manifest.jsonl").read_text().splitlines()[1])
    assert row["id"] == "en/digits/1M" and row["audio"] == "en/digits/1M.opus" and row["licence"] == "CC-BY-SA-3.0"
    with pytest.raises(ValueError, match="not empty; name a new folder"):
        builder.main()
