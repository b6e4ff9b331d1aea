"""Generated speech by judges whose answers are known, and by real ones; nothing that is missing is passed over."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from audiorl.config import SamplingConfig
from audiorl.data.seedtts import read_meta
from audiorl.eval import tts
from audiorl.eval._conversation_generation import PieceConfig
from audiorl.models import load_policy
from audiorl.protocols import Request
from audiorl.recipes._speech import write_tiny_part
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.tts.prompts import utterance_sample
from tests.conftest import make_text
from tests.support.prosody import glide
from tests.support.speech_models import save_ctc

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
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """use(judge): let it listen, not those that the options name."""

    def use(judge: Any) -> None:
        monkeypatch.setattr("audiorl.eval._common.load_recogniser", lambda *args, **options: judge)
        monkeypatch.setattr("audiorl.eval._common.load_speaker_encoder", lambda *args: judge)

    return use


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
        {5: "hello world", 6: "don't stop at bonceb stop"}, {1: [1, 0], 2: [0, 1], 5: [1, 0], 6: [half, half]}
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_seed_tts_eval_by_hand(use: Callable[[Any], None], meta: Path, tmp_path: Path, capsys) -> None:
    use(judge())
    options = tts.TTSOptions(asr="asr", speaker="speaker", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores")
    scores = tts.main(options)
    # a: 0 of 2; b: one inserted of 4; c and d: all words lost
    assert scores["mean_wer"]["mean"] == pytest.approx((0 + 1 / 4 + 1 + 1) / 4)
    assert scores["wer"] == pytest.approx((1 + 2 + 1) / (2 + 4 + 2 + 1))
    assert (scores["utterances"], scores["missing"], scores["unreadable"], scores["above_half"]) == (4, 1, 1, 2)
    assert scores["similarity"]["mean"] == pytest.approx((1 + math.sqrt(0.5) + 0 + 0) / 4)
    assert json.loads((tmp_path / "scores" / "scores.json").read_text()) == scores
    printed = capsys.readouterr()
    assert "56.25" in printed.out and "counted as wrong: c: missing" in printed.err and "d.wav" in printed.err
    page = (tmp_path / "scores" / "page.html").read_text()
    assert page.index("c · WER 100.0%") < page.index("a · WER 0.0%") and "no audio" in page
    assert "<b>once" not in page and page.count("<audio") == 4 + 2  # four prompts and what was generated


def test_prosody_next_to_that_of_the_prompts(use: Callable[[Any], None], meta: Path, tmp_path: Path, capsys) -> None:
    use(judge())
    for path, semitones, seconds in (("set/p1.wav", 6, 0.5), ("out/a.wav", 2, 0.5), ("out/b.flac", 4, 0.6)):
        soundfile.write(tmp_path / path, glide(semitones, RATE, seconds), RATE)
    options = tts.TTSOptions(asr="asr", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores")
    scores = tts.main(options)
    assert scores["f0_range"]["mean"] == pytest.approx(0.9 * 3, abs=0.15) and scores["f0_range"]["n"] == 2
    assert scores["f0_range"]["low"] < scores["f0_range"]["mean"] < scores["f0_range"]["high"]
    assert scores["pauses"]["mean"] == 0 and scores["energy_range"]["mean"] < 3
    rows = {row["id"]: row for row in lines(tmp_path / "scores" / "results.jsonl")}
    assert rows["a"]["f0_range"] == pytest.approx(0.9 * 2, abs=0.15)
    assert rows["a"]["reference_prosody"]["f0_range"] == pytest.approx(0.9 * 6, abs=0.2)
    assert "F0 range (semitones)" in capsys.readouterr().out
    page = (tmp_path / "scores" / "page.html").read_text()
    assert page.count("<svg class='contour'") == 4 + 2 and "pauses %" in page


def test_a_second_call_hears_only_what_is_new(use: Callable[[Any], None], meta: Path, tmp_path: Path) -> None:
    options = tts.TTSOptions(asr="asr", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores", batch_size=1)
    first = judge()
    use(first)
    tts.main(options)
    assert first.heard == 2
    record(tmp_path / "out" / "c.wav", 7)
    record(tmp_path / "out" / "a.wav", 8)  # generated again
    second = ByLength({7: "one two", 8: "goodbye"})
    use(second)
    scores = tts.main(options)
    assert second.heard == 2 and scores["missing"] == 0
    assert scores["mean_wer"]["mean"] == pytest.approx((1 + 1 / 4 + 0 + 1) / 4)
    with pytest.raises(ValueError, match="asr: 'asr' -> 'other'"):
        tts.main(tts.TTSOptions(asr="other", meta=meta, audio=tmp_path / "out", out=tmp_path / "scores"))


def test_chinese_by_characters_in_simplified_ones(use: Callable[[Any], None], tmp_path: Path) -> None:
    pytest.importorskip("zhconv")
    record(tmp_path / "out" / "a.wav", 5)
    (tmp_path / "meta.lst").write_text("a|今天天气好。\n", encoding="utf-8")
    use(ByLength({5: "今天天氣很好"}))
    options = tts.TTSOptions(
        asr="asr", meta=tmp_path / "meta.lst", audio=tmp_path / "out", out=tmp_path / "s", language="zh"
    )
    assert tts.main(options)["mean_wer"]["mean"] == pytest.approx(1 / 5)  # one inserted; 氣 is 气


def test_conversations_by_hand(use: Callable[[Any], None], tmp_path: Path) -> None:
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
    use(ByLength({7: "hi there", 5: "how old are you", 6: "wine"}, {7: [1, 0], 5: [half, half], 6: [0, 1]}))
    scores = tts.main(
        tts.TTSOptions(asr="asr", speaker="speaker", turns=tmp_path / "talks.jsonl", out=tmp_path / "scores")
    )
    # one: an insertion and a substitution over 6 words; two: 3 of 3 lost
    assert scores["mean_wer"]["mean"] == pytest.approx((2 / 6 + 1) / 2)
    assert (scores["utterances"], scores["recordings"], scores["missing"]) == (2, 4, 1)
    intra, inter = half, (0 + half) / 2  # of the pairs of A's turns; of A's turns with B's
    assert scores["intra"]["mean"] == pytest.approx(intra, abs=1e-5) and scores["intra"]["n"] == 1
    assert scores["inter"]["mean"] == pytest.approx(inter, abs=1e-5)
    assert scores["similarity"] == pytest.approx(math.sqrt(intra * (1 - inter)), abs=1e-5)
    assert (tmp_path / "scores" / "page.html").read_text().count("<audio") == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": None}, "give one of --meta, --texts and --cases, with --audio or --model, or"),
        ({"turns": "set/meta.lst"}, "give one of --meta, --texts and --cases"),
        ({"texts": "set/meta.lst"}, "give one of --meta, --texts and --cases"),
        ({"meta": None, "turns": "set/meta.lst"}, "--audio: belongs to a list of texts"),
        ({"codec": "c"}, "--codec: belongs to --model"),
        ({"asr": None}, "--asr: name a recogniser"),
        ({"audio": "nowhere"}, "nowhere is no folder"),
        ({"audio": "set"}, r"none of the 4 recordings is there, such as a\.wav"),
        ({"limit": 0}, "--limit"),
        ({"speaker": "speaker", "meta": "set/lost.lst"}, r"p3\.wav: missing"),
        ({"meta": "set/dots.lst"}, r"'a': the text '\.\.\.' is nothing but"),
    ],
)
def test_bad_input(
    use: Callable[[Any], None], meta: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "set" / "lost.lst").write_text("a|p|p3.wav|Hello\n")
    (tmp_path / "set" / "dots.lst").write_text("a|p|p1.wav|...\n")
    use(judge())
    paths = {k: tmp_path / v if k in ("meta", "texts", "turns", "audio") and v else v for k, v in changes.items()}
    given = {"asr": "asr", "meta": meta, "audio": tmp_path / "out", "out": tmp_path / "scores", **paths}
    with pytest.raises(ValueError, match=message):
        tts.main(tts.TTSOptions(**given))


# -- speech that a checkpoint generates --------------------------------------------------------------------------------

SAY = SamplingConfig(max_new_tokens=2, max_frames=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Higgs Audio V2, with its codec in the folder above, as runs have them."""
    run = tmp_path_factory.mktemp("run")
    write_tiny_part("model", run / "checkpoints" / "step")
    write_tiny_part("codec", run / "codec")
    return run / "checkpoints" / "step"


def spoken_by_hand(checkpoint: Path, meta: Path, seed: int) -> dict[str, np.ndarray]:
    """What each utterance sounds like, one at a time."""
    from tokenizers_audio import load

    policy = load_policy(checkpoint, codec=load(checkpoint.parents[1] / "codec"))
    found = {}
    for u in read_meta(meta):
        (rollout,) = HFEngine(policy, SAY).generate([Request(utterance_sample(u), seed=seed)])
        wav = CodecSpeechDecoder.of(policy).waveform(rollout)
        found[u.name] = np.zeros(0) if wav is None else wav
    return found


def test_a_checkpoint_says_the_list(use: Callable[[Any], None], checkpoint: Path, meta: Path, tmp_path: Path) -> None:
    def options(**changes: Any) -> Any:
        given = {"model": str(checkpoint), "meta": meta, "out": tmp_path / "s", "sampling": SAY, "seed": 5}
        return tts.TTSOptions(**given | {"generation_batch_size": 2} | changes)

    assert tts.main(options()) == {}
    folder = tmp_path / "s" / "audio"
    expected = spoken_by_hand(checkpoint, meta, seed=5)
    rows = {row["id"]: row for row in lines(folder / "generated.jsonl")}
    assert list(rows) == ["a", "b", "c", "d"] and sum(len(wav) > 0 for wav in expected.values()) >= 2
    for name, wav in expected.items():
        assert rows[name]["seconds"] == pytest.approx(len(wav) / 24_000)
        assert (folder / f"{name}.wav").exists() == bool(len(wav))
        if len(wav):
            np.testing.assert_allclose(soundfile.read(folder / f"{name}.wav")[0], np.clip(wav, -1, 1), atol=1e-4)
    assert not [f for f in folder.iterdir() if "partial" in f.name]

    save_ctc(tmp_path / "asr", "group")
    scores = tts.main(options(asr=str(tmp_path / "asr")))
    assert scores["utterances"] == 4 and scores["missing"] == sum(not len(w) for w in expected.values())
    with pytest.raises(ValueError, match="seed: 5 -> 6"):
        tts.main(options(seed=6))
    with pytest.raises(ValueError, match="holds files that were not generated here"):
        tts.main(options(audio=tmp_path / "out", out=tmp_path / "other"))


def test_a_killed_generation_loses_no_recording(
    use: Callable[[Any], None], checkpoint: Path, meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tts.TTSOptions(
        model=str(checkpoint), meta=meta, out=tmp_path / "s", sampling=SAY, seed=5, generation_batch_size=1
    )
    folder, original, calls = tmp_path / "s" / "audio", HFEngine.generate, 0

    def killed(self: HFEngine, requests: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, requests)

    monkeypatch.setattr(HFEngine, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        tts.main(options)
    first = {f.name: f.stat().st_mtime_ns for f in folder.glob("*.wav")}
    assert first and calls == 3
    tts.main(options)
    assert calls == 5  # the two that were left
    assert all((folder / name).stat().st_mtime_ns == at for name, at in first.items())
    expected = {name: wav for name, wav in spoken_by_hand(checkpoint, meta, 5).items() if len(wav)}
    assert {f.stem for f in folder.glob("*.wav")} == set(expected)
    before = {f.name: f.read_bytes() for f in folder.glob("*.wav")}
    calls = 10
    next(iter(folder.glob("*.wav"))).unlink()
    tts.main(options)
    assert calls == 11 and {f.name: f.read_bytes() for f in folder.glob("*.wav")} == before


def test_a_checkpoint_says_a_script(use: Callable[[Any], None], checkpoint: Path, tmp_path: Path, capsys) -> None:
    for name, tenths in (("a", 6), ("b", 8)):
        record(tmp_path / f"{name}.wav", tenths)
    voices = {n.upper(): {"audio": f"{n}.wav", "text": f"I am {n}."} for n in "ab"}
    turns = [("A", "Hello there. How are you?"), ("B", "Fine."), ("A", "Good.")]
    scripts = [
        {"id": "two", "voices": voices, "turns": [{"speaker": s, "text": t} for s, t in turns]},
        {"id": "one", "voices": {"A": voices["A"]}, "turns": [{"speaker": "A", "text": "Hello. Hello. Hello."}]},
    ]
    file = tmp_path / "scripts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in scripts))

    def options(**changes: Any) -> Any:
        given = {"model": str(checkpoint), "turns": file, "out": tmp_path / "s", "sampling": SAY, "seed": 3}
        return tts.TTSOptions(**given | {"pieces": PieceConfig(characters=13, context=1, pause=0.5)} | changes)

    assert tts.main(options()) == {}
    folder = tmp_path / "s" / "audio"
    rows = {row["id"]: row["seconds"] for row in lines(folder / "generated.jsonl")}
    # side by side: the first pieces of both, the second ones, …
    for row in lines(folder / "generated.jsonl"):
        if row["seconds"]:  # the first block is ready before the last one
            assert 0 < row["first_audio"] <= row["compute_seconds"]
    assert "real-time factor" in capsys.readouterr().out
    assert list(rows) == ["two/000-00", "one/000-00", "two/000-01", "one/000-01", "two/001-00", "two/002-00"]
    assert sum(seconds > 0 for seconds in rows.values()) >= 4
    talks = {row["id"]: row for row in lines(folder / "conversations.jsonl")}
    said = [turn for turn in talks["two"]["turns"] if "start" in turn]
    whole = soundfile.info(folder / "two.wav").duration
    assert whole == pytest.approx(sum(t["duration"] for t in said) + 0.5 * len(said), abs=1e-3)
    for number in range(len(turns)):
        seconds = sum(rows[id] for id in rows if id.startswith(f"two/{number:03d}"))
        assert talks["two"]["turns"][number].get("duration", 0) == pytest.approx(seconds, abs=1e-3)

    # A second call says nothing again, and what was said is scored turn by turn.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.wav")}
    judge = ByLength({n: "hello" for n in range(100)}, {n: [0.0, 1.0] for n in range(100)} | {6: [1, 0], 8: [0, 1]})
    use(judge)
    scores = tts.main(options(asr="asr", speaker="speaker"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (scores["utterances"], scores["recordings"]) == (2, 4)
    nearest_b = sum("start" in t for t in talks["two"]["turns"] if t["speaker"] == "B")  # every recording sounds like B
    assert scores["own_voice"]["mean"] == pytest.approx(nearest_b / 3) and scores["own_voice"]["n"] == 3
    assert scores["voice_similarity"]["n"] == 4
    with pytest.raises(ValueError, match="pieces"):
        tts.main(options(pieces=PieceConfig(characters=20)))


@pytest.mark.slow
def test_steps_at_joints_of_known_pieces(use: Callable[[Any], None], checkpoint: Path, tmp_path: Path, capsys) -> None:
    """6 dB and 4 semitones at the joint, nothing in the middle of pieces; said by an earlier call."""
    file, out = tmp_path / "scripts.jsonl", tmp_path / "s"
    row = {"id": "one", "turns": [{"speaker": "A", "text": "Hello. Hello."}]}
    file.write_text(json.dumps(row))
    options = tts.TTSOptions(
        model=str(checkpoint), turns=file, out=out, sampling=SAY, pieces=PieceConfig(characters=6), asr="asr"
    )
    use(ByLength({n: "hello" for n in range(100)}))
    tts.main(options)
    for part, hertz, level in ((0, 120.0, 0.06), (1, 120 * 2 ** (4 / 12), 0.03)):
        time = np.arange(round(1.2 * RATE)) / RATE
        buzz = sum(np.sin(2 * np.pi * k * hertz * time) / k for k in range(1, 11))
        soundfile.write(out / "audio" / "one" / f"000-{part:02d}.wav", level * buzz, RATE)
    capsys.readouterr()
    tts.main(options)
    scores = json.loads((out / "scores.json").read_text())
    shown = (capsys.readouterr().out, (out / "page.html").read_text())
    assert scores["level_step"] == pytest.approx(6.02, abs=0.3)
    assert scores["usual_level_step"] == pytest.approx(0, abs=0.3)
    assert "level step at joints, dB: 6.0 (0.0 in the middle of pieces)" in shown[0]
    assert "level step at joints, dB" in shown[1]
    assert scores["pitch_step"] == pytest.approx(4, abs=0.3)
    assert scores["usual_pitch_step"] == pytest.approx(0, abs=0.3)
    assert "pitch step at joints, semitones: 4.0 (0.0 in the middle of pieces)" in shown[0]
    assert "pitch step at joints, semitones" in shown[1]


def test_checkpoints_that_cannot_speak(checkpoint: Path, meta: Path, tmp_path: Path) -> None:
    make_text().save(tmp_path / "text")
    write_tiny_part("model", tmp_path / "alone" / "a" / "b" / "c" / "d")
    (tmp_path / "up.jsonl").write_text('{"id": "../up", "text": "x"}\n')
    with pytest.raises(ValueError, match=r"'\.\./up' is no name of a file"):
        given = {"texts": tmp_path / "up.jsonl", "codec": str(checkpoint.parents[1] / "codec")}
        tts.main(tts.TTSOptions(model=str(checkpoint), out=tmp_path / "s", **given))
    for model, message in (
        (tmp_path / "text", "text: writes text only; give a model that speaks"),
        (tmp_path / "alone" / "a" / "b" / "c" / "d", "no folder codec/ in it or above it; name its audio tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            tts.main(tts.TTSOptions(model=str(model), meta=meta, out=tmp_path / "s"))
