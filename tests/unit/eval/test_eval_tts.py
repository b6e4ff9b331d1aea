"""Generated speech by judges whose answers are known, and by real ones; nothing that is missing is passed over."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.data.corpus import Utterance
from tests.unit.judges.conftest import save_ctc, save_xvector

RATE = 16_000


@dataclass
class ByLength:
    """Understands and embeds recordings by their tenths of a second, and counts what it hears."""

    texts: dict[int, str]
    vectors: dict[int, list[float]] = field(default_factory=dict)
    heard: int = 0
    name: str = "by length"

    def transcribe(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> list[str]:
        self.heard += len(waveforms)
        return [self.texts[round(10 * len(w) / sample_rate)] for w in waveforms]

    def embed(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> np.ndarray:
        return np.array([self.vectors[round(10 * len(w) / sample_rate)] for w in waveforms], np.float32)


def record(path: Path, tenths: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.sin(np.arange(tenths * RATE // 10) / 9), RATE)


@pytest.fixture
def tts(load_eval, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """eval/tts.py; `use` gives it a judge in place of those it would load."""
    module = load_eval("tts")

    def use(judge: Any) -> None:
        monkeypatch.setattr(module, "load_recogniser", lambda *args: judge)
        monkeypatch.setattr(module, "load_speaker_encoder", lambda *args: judge)

    module.use = use  # type: ignore[attr-defined]
    return module


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """Four utterances: right, one of four words wrong, missing, not readable. Prompts of 0.1 and 0.2 s."""
    file = tmp_path / "set" / "meta.lst"
    record(tmp_path / "set" / "p1.wav", 1)
    record(tmp_path / "set" / "p2.wav", 2)
    file.write_text(
        "a|p|p1.wav|Hello, world!\nb|p|p2.wav|Don't stop at <b>once</b>.\nc|p|p1.wav|One two.\nd|p|p2.wav|Three.\n"
    )
    record(tmp_path / "out" / "a.wav", 5)
    record(tmp_path / "out" / "b.flac", 6)
    (tmp_path / "out" / "d.wav").write_bytes(b"RIFF")
    return file


def judge() -> ByLength:
    half = math.sqrt(0.5)
    return ByLength(
        {5: "hello world", 6: "don't stop at bonceb stop"},
        {1: [1, 0], 2: [0, 1], 5: [1, 0], 6: [half, half]},
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_seed_tts_eval_by_hand(tts: ModuleType, meta: Path, tmp_path: Path, capsys) -> None:
    tts.use(judge())
    options = tts.Options(asr="asr", speaker="speaker", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores")
    scores = tts.run(options)
    # a: 0 of 2; b: one inserted of 4; c and d: all words lost
    assert scores["mean_wer"]["mean"] == pytest.approx((0 + 1 / 4 + 1 + 1) / 4)
    assert scores["wer"] == pytest.approx((1 + 2 + 1) / (2 + 4 + 2 + 1))
    assert (scores["utterances"], scores["missing"], scores["unreadable"], scores["above_half"]) == (4, 1, 1, 2)
    assert scores["similarity"]["mean"] == pytest.approx((1 + math.sqrt(0.5) + 0 + 0) / 4)
    assert json.loads((tmp_path / "scores" / "scores.json").read_text()) == scores
    printed = capsys.readouterr()
    assert "56.25" in printed.out and "counted as wrong: c: missing" in printed.err and "d.wav" in printed.err
    page = (tmp_path / "scores" / "page.html").read_text()
    assert page.index("c · WER 100.0%") < page.index("a · WER 0.0%") and "nothing was said" in page
    assert "<b>once" not in page and page.count("<audio") == 4 + 2  # four prompts and what was generated


def test_a_second_call_hears_only_what_is_new(tts: ModuleType, meta: Path, tmp_path: Path) -> None:
    options = tts.Options(asr="asr", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores", batch_size=1)
    first = judge()
    tts.use(first)
    tts.run(options)
    assert first.heard == 2
    record(tmp_path / "out" / "c.wav", 7)
    record(tmp_path / "out" / "a.wav", 8)  # generated again
    second = ByLength({7: "one two", 8: "goodbye"})
    tts.use(second)
    scores = tts.run(options)
    assert second.heard == 2 and scores["missing"] == 0
    assert scores["mean_wer"]["mean"] == pytest.approx((1 + 1 / 4 + 0 + 1) / 4)
    with pytest.raises(ValueError, match="asr: 'asr' -> 'other'"):
        tts.run(tts.Options(asr="other", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores"))


def test_chinese_by_characters_in_simplified_ones(tts: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("zhconv")
    record(tmp_path / "out" / "a.wav", 5)
    (tmp_path / "meta.lst").write_text("a|今天天气好。\n", encoding="utf-8")
    tts.use(ByLength({5: "今天天氣很好"}))
    options = tts.Options(
        asr="asr", meta=tmp_path / "meta.lst", audio=tmp_path / "out", out=tmp_path / "s", language="zh"
    )
    assert tts.run(options)["mean_wer"]["mean"] == pytest.approx(1 / 5)  # one inserted; 氣 is 气


def test_conversations_by_hand(tts: ModuleType, tmp_path: Path) -> None:
    record(tmp_path / "whole.wav", 9)
    record(tmp_path / "b1.wav", 6)
    turns = [
        {"speaker": "A", "text": "Hi there.", "audio": "a.wav"},
        {"speaker": "A", "text": "How are you?", "start": 0.0, "duration": 0.5},
        {"speaker": "B", "text": "Fine.", "audio": "b1.wav"},
    ]
    record(tmp_path / "a.wav", 7)
    alone = {"id": "two", "turns": [{"speaker": "A", "text": "Gone for good", "audio": "nowhere.wav"}]}
    rows = [{"id": "one", "audio": "whole.wav", "turns": turns}, alone]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    half = math.sqrt(0.5)
    tts.use(ByLength({7: "hi there", 5: "how old are you", 6: "wine"}, {7: [1, 0], 5: [half, half], 6: [0, 1]}))
    scores = tts.run(tts.Options(asr="asr", speaker="speaker", turns=tmp_path / "talks.jsonl", out=tmp_path / "scores"))
    # one: an insertion and a substitution over 6 words; two: 3 of 3 lost
    assert scores["mean_wer"]["mean"] == pytest.approx((2 / 6 + 1) / 2)
    assert (scores["utterances"], scores["recordings"], scores["missing"]) == (2, 4, 1)
    intra, inter = half, (0 + half) / 2  # of the pairs of A's turns; of A's turns with B's
    assert scores["intra"]["mean"] == pytest.approx(intra, abs=1e-5) and scores["intra"]["n"] == 1
    assert scores["inter"]["mean"] == pytest.approx(inter, abs=1e-5)
    assert scores["similarity"] == pytest.approx(math.sqrt(intra * (1 - inter)), abs=1e-5)
    assert (tmp_path / "scores" / "page.html").read_text().count("<audio") == 3


def test_real_judges(tts: ModuleType, speech: list[Utterance], tmp_path: Path) -> None:
    """What was generated is the prompt itself: the same voice, understood as the recogniser understands it."""
    save_ctc(tmp_path / "asr", "group")
    save_xvector(tmp_path / "speaker")
    text = []
    for i, u in enumerate(speech[:200:100]):
        for folder in ("set", "out"):
            (tmp_path / folder).mkdir(exist_ok=True)
            soundfile.write(tmp_path / folder / f"u{i}.wav", u.clip.load(RATE), RATE)
        text.append(f"u{i}|{u.text}|u{i}.wav|{u.text}\n")
    (tmp_path / "set" / "meta.lst").write_text("".join(text))
    scores = tts.run(
        tts.Options(
            asr=str(tmp_path / "asr"),
            speaker=str(tmp_path / "speaker"),
            meta=tmp_path / "set" / "meta.lst",
            audio=tmp_path / "out",
            out=tmp_path / "scores",
        )
    )
    assert scores["similarity"]["mean"] == pytest.approx(1.0, abs=1e-5)
    recogniser = tts.load_recogniser(tmp_path / "asr")
    heard = recogniser.transcribe([u.clip.load(RATE) for u in speech[:200:100]], RATE)
    assert [row["hypothesis"] for row in lines(tmp_path / "scores" / "results.jsonl")] == heard


def test_bad_input(tts: ModuleType, meta: Path, tmp_path: Path) -> None:
    def run(**changes: Any) -> None:
        given = {"asr": "asr", "meta": meta, "audio": tmp_path / "out", "out": tmp_path / "scores", **changes}
        tts.run(tts.Options(**given))

    tts.use(judge())
    with pytest.raises(ValueError, match="give --meta with --audio, or --turns"):
        run(meta=None)
    with pytest.raises(ValueError, match="--audio: belongs to --meta"):
        run(meta=None, turns=meta)
    with pytest.raises(ValueError, match="nowhere is no folder"):
        run(audio=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"none of the 4 recordings is there, such as a\.wav"):
        run(audio=tmp_path / "empty")
    with pytest.raises(ValueError, match="--limit"):
        run(limit=0)
    (tmp_path / "set" / "p1.wav").unlink()
    with pytest.raises(ValueError, match=r"p1\.wav: missing"):
        run(speaker="speaker")
    meta.write_text("a|p|p1.wav|...\n")
    with pytest.raises(ValueError, match=r"'a': the text '\.\.\.' is nothing but"):
        run(out=tmp_path / "other")
