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
from tests.support.prosody import glide, harmonics
from tests.support.speech_models import save_ctc

RATE = 16_000
HALF = math.sqrt(0.5)
Use = Callable[[Any], None]


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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
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
    texts = {5: "hello world", 6: "don't stop at bonceb stop"}
    return ByLength(texts, {1: [1, 0], 2: [0, 1], 5: [1, 0], 6: [HALF, HALF]})


def options(meta: Path, /, **changes: Any) -> Any:
    """Score the recordings of `meta` in OUT/../scores."""
    folder = meta.parents[1]
    given = {"asr": "asr", "meta": meta, "audio": folder / "out", "out": folder / "scores"}
    return tts.TTSOptions(**given | changes)


def test_seed_tts_eval_by_hand(use: Use, meta: Path, tmp_path: Path, capsys) -> None:
    use(judge())
    scores = tts.main(options(meta, speaker="speaker"))
    # a: 0 of 2; b: one inserted of 4; c and d: all words lost
    assert scores["mean_wer"]["mean"] == pytest.approx((0 + 1 / 4 + 1 + 1) / 4)
    assert scores["wer"] == pytest.approx((1 + 2 + 1) / (2 + 4 + 2 + 1))
    assert (scores["utterances"], scores["missing"], scores["unreadable"], scores["above_half"]) == (4, 1, 1, 2)
    assert scores["similarity"]["mean"] == pytest.approx((1 + HALF + 0 + 0) / 4)
    assert json.loads((tmp_path / "scores" / "scores.json").read_text()) == scores
    printed = capsys.readouterr()
    assert "56.25" in printed.out and "counted as wrong: c: missing" in printed.err and "d.wav" in printed.err
    page = (tmp_path / "scores" / "page.html").read_text()
    assert page.index("c · WER 100.0%") < page.index("a · WER 0.0%") and "no audio" in page
    assert "<b>once" not in page and page.count("<audio") == 4 + 2  # four prompts and what was generated


def test_prosody_next_to_that_of_the_prompts(use: Use, meta: Path, tmp_path: Path) -> None:
    use(judge())
    for path, semitones, seconds in (("set/p1.wav", 6, 0.5), ("out/a.wav", 2, 0.5), ("out/b.flac", 4, 0.6)):
        soundfile.write(tmp_path / path, glide(semitones, RATE, seconds), RATE)
    scores = tts.main(options(meta))
    assert scores["f0_range"]["mean"] == pytest.approx(0.9 * 3, abs=0.15) and scores["f0_range"]["n"] == 2
    assert scores["f0_range"]["low"] < scores["f0_range"]["mean"] < scores["f0_range"]["high"]
    assert scores["pauses"]["mean"] == 0 and scores["energy_range"]["mean"] < 3
    rows = {row["id"]: row for row in lines(tmp_path / "scores" / "results.jsonl")}
    assert rows["a"]["f0_range"] == pytest.approx(0.9 * 2, abs=0.15)
    assert rows["a"]["reference_prosody"]["f0_range"] == pytest.approx(0.9 * 6, abs=0.2)
    page = (tmp_path / "scores" / "page.html").read_text()
    assert page.count("<svg class='contour'") == 4 + 2 and "F0 range (semitones)" in page


def test_a_second_call_hears_only_what_is_new(use: Use, meta: Path, tmp_path: Path) -> None:
    first = judge()
    use(first)
    tts.main(options(meta, batch_size=1))
    record(tmp_path / "out" / "c.wav", 7)
    record(tmp_path / "out" / "a.wav", 8)  # generated again
    second = ByLength({7: "one two", 8: "goodbye"})
    use(second)
    scores = tts.main(options(meta, batch_size=1))
    assert first.heard == second.heard == 2 and scores["missing"] == 0
    record(tmp_path / "set" / "p2.wav", 3)  # another voice to compare b and d with; d cannot be read
    third = judge()
    use(third)
    tts.main(options(meta, batch_size=1))
    assert third.heard == 1
    assert scores["mean_wer"]["mean"] == pytest.approx((1 + 1 / 4 + 0 + 1) / 4)
    with pytest.raises(ValueError, match="asr: 'asr' -> 'other'"):
        tts.main(options(meta, asr="other"))


def test_chinese_by_characters_in_simplified_ones(use: Use, meta: Path, tmp_path: Path) -> None:
    pytest.importorskip("zhconv")
    meta.write_text("a|今天天气好。\n", encoding="utf-8")
    use(ByLength({5: "今天天氣很好"}))
    assert tts.main(options(meta, language="zh"))["mean_wer"]["mean"] == pytest.approx(1 / 5)  # one inserted; 氣 is 气


def test_conversations_by_hand(use: Use, tmp_path: Path) -> None:
    for name, tenths in (("whole", 9), ("b1", 6), ("a", 7)):
        record(tmp_path / f"{name}.wav", tenths)
    turns = [
        {"speaker": "A", "text": "Hi there.", "audio": "a.wav"},
        {"speaker": "A", "text": "How are you?", "start": 0.0, "duration": 0.5},
        {"speaker": "B", "text": "Fine.", "audio": "b1.wav"},
    ]
    alone = {"id": "two", "turns": [{"speaker": "A", "text": "Gone for good", "audio": "nowhere.wav"}]}
    talks, rows = tmp_path / "talks.jsonl", [{"id": "one", "audio": "whole.wav", "turns": turns}, alone]
    talks.write_text("".join(json.dumps(r) + "\n" for r in rows))
    use(ByLength({7: "hi there", 5: "how old are you", 6: "wine"}, {7: [1, 0], 5: [HALF, HALF], 6: [0, 1]}))
    scores = tts.main(tts.TTSOptions(asr="asr", speaker="speaker", turns=talks, out=tmp_path / "scores"))
    # one: an insertion and a substitution over 6 words; two: 3 of 3 lost
    assert scores["mean_wer"]["mean"] == pytest.approx((2 / 6 + 1) / 2)
    assert (scores["utterances"], scores["recordings"], scores["missing"]) == (2, 4, 1)
    intra, inter = HALF, (0 + HALF) / 2  # of the pairs of A's turns; of A's turns with B's
    assert scores["intra"]["mean"] == pytest.approx(intra, abs=1e-5) and scores["intra"]["n"] == 1
    assert scores["inter"]["mean"] == pytest.approx(inter, abs=1e-5)
    assert scores["similarity"] == pytest.approx(math.sqrt(intra * (1 - inter)), abs=1e-5)
    assert (tmp_path / "scores" / "page.html").read_text().count("<audio") == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meta": None}, "give one of --meta, --texts and --cases, with --audio or --model, or"),
        ({"turns": "set/meta.lst"}, "give one of --meta, --texts and --cases"),
        ({"meta": None, "turns": "set/meta.lst"}, "--audio: belongs to texts"),
        ({"codec": "c"}, "--codec: belongs to --model"),
        ({"asr": None}, "--asr: name a recogniser"),
        ({"audio": "nowhere"}, "nowhere is no folder"),
        ({"audio": "set"}, r"none of the 4 recordings is there, such as a\.wav"),
        ({"limit": 0}, "--limit"),
        ({"speaker": "speaker", "meta": "set/lost.lst"}, r"p3\.wav: missing"),
        ({"meta": "set/dots.lst"}, r"'a': the text '\.\.\.' is nothing but"),
    ],
)
def test_bad_input(use: Use, meta: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "set" / "lost.lst").write_text("a|p|p3.wav|Hello\n")
    (tmp_path / "set" / "dots.lst").write_text("a|p|p1.wav|...\n")
    use(judge())
    paths = {k: tmp_path / v if k in ("meta", "turns", "audio") and v else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        tts.main(options(meta, **paths))


# -- speech that a checkpoint generates --------------------------------------------------------------------------------

SAY = SamplingConfig(max_new_tokens=2, max_frames=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Higgs Audio V2, with its codec in the folder above, as runs have them."""
    run = tmp_path_factory.mktemp("run")
    write_tiny_part("model", run / "checkpoints" / "step")
    write_tiny_part("codec", run / "codec")
    return run / "checkpoints" / "step"


def saying(checkpoint: Path, tmp_path: Path, **changes: Any) -> Any:
    given = {"model": str(checkpoint), "out": tmp_path / "s", "sampling": SAY, "seed": 5}
    return tts.TTSOptions(**given | changes)


def spoken_by_hand(checkpoint: Path, meta: Path) -> dict[str, np.ndarray]:
    """What each utterance sounds like, one at a time."""
    from tokenizers_audio import load

    policy = load_policy(checkpoint, codec=load(checkpoint.parents[1] / "codec"))
    found = {}
    for u in read_meta(meta):
        (rollout,) = HFEngine(policy, SAY).generate([Request(utterance_sample(u), seed=5)])
        wav = CodecSpeechDecoder.of(policy).waveform(rollout)
        found[u.name] = np.zeros(0) if wav is None else wav
    return found


def test_a_checkpoint_says_the_list(
    use: Use, checkpoint: Path, meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after two texts; what it said then stays, and a recording that is lost is said again."""
    folder, original, calls = tmp_path / "s" / "audio", HFEngine.generate, 0
    expected = spoken_by_hand(checkpoint, meta)

    def killed(self: HFEngine, requests: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, requests)

    monkeypatch.setattr(HFEngine, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        tts.main(saying(checkpoint, tmp_path, meta=meta, generation_batch_size=1))
    first = {f.name: f.stat().st_mtime_ns for f in folder.glob("*.wav")}
    assert tts.main(saying(checkpoint, tmp_path, meta=meta, generation_batch_size=2)) == {}
    assert first and calls == 4  # the two that were left, together
    assert all((folder / name).stat().st_mtime_ns == at for name, at in first.items())
    rows = {row["id"]: row for row in lines(folder / "generated.jsonl")}
    assert list(rows) == ["a", "b", "c", "d"] and sum(len(wav) > 0 for wav in expected.values()) >= 2
    for name, wav in expected.items():
        assert rows[name]["seconds"] == pytest.approx(len(wav) / 24_000)
        assert (folder / f"{name}.wav").exists() == bool(len(wav))
        if len(wav):
            np.testing.assert_allclose(soundfile.read(folder / f"{name}.wav")[0], np.clip(wav, -1, 1), atol=1e-4)
    assert not [f for f in folder.iterdir() if "partial" in f.name]

    before = {f.name: f.read_bytes() for f in folder.glob("*.wav")}
    next(iter(folder.glob("*.wav"))).unlink()
    save_ctc(tmp_path / "asr", "group")
    scores = tts.main(saying(checkpoint, tmp_path, meta=meta, asr=str(tmp_path / "asr")))
    assert calls == 5 and {f.name: f.read_bytes() for f in folder.glob("*.wav")} == before
    assert scores["utterances"] == 4 and scores["missing"] == sum(not len(w) for w in expected.values())


def test_a_checkpoint_says_a_script(use: Use, checkpoint: Path, tmp_path: Path, capsys) -> None:
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
    given = {"turns": file, "seed": 3, "pieces": PieceConfig(characters=13, context=1, pause=0.5)}
    assert tts.main(saying(checkpoint, tmp_path, **given)) == {}
    folder = tmp_path / "s" / "audio"
    rows = {row["id"]: row["seconds"] for row in lines(folder / "generated.jsonl")}
    # side by side: the first pieces of both, the second ones, …
    assert list(rows) == ["two/000-00", "one/000-00", "two/000-01", "one/000-01", "two/001-00", "two/002-00"]
    assert sum(seconds > 0 for seconds in rows.values()) >= 4
    for row in lines(folder / "generated.jsonl"):
        if row["seconds"]:  # the first block is ready before the last one
            assert 0 < row["first_audio"] <= row["compute_seconds"]
    assert "real-time factor" in capsys.readouterr().out
    talks = {row["id"]: row for row in lines(folder / "conversations.jsonl")}
    said = [turn for turn in talks["two"]["turns"] if "start" in turn]
    whole = soundfile.info(folder / "two.wav").duration
    assert whole == pytest.approx(sum(t["duration"] for t in said) + 0.5 * len(said), abs=1e-3)
    for number in range(len(turns)):
        seconds = sum(rows[id] for id in rows if id.startswith(f"two/{number:03d}"))
        assert talks["two"]["turns"][number].get("duration", 0) == pytest.approx(seconds, abs=1e-3)

    # A second call says nothing again, and what was said is scored turn by turn.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.wav")}
    use(ByLength({n: "hello" for n in range(100)}, {n: [0.0, 1.0] for n in range(100)} | {6: [1, 0], 8: [0, 1]}))
    scores = tts.main(saying(checkpoint, tmp_path, **given, asr="asr", speaker="speaker"))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (scores["utterances"], scores["recordings"]) == (2, 4)
    nearest_b = sum("start" in t for t in talks["two"]["turns"] if t["speaker"] == "B")  # every recording sounds like B
    assert scores["own_voice"]["mean"] == pytest.approx(nearest_b / 3) and scores["own_voice"]["n"] == 3
    assert scores["voice_similarity"]["n"] == 4
    with pytest.raises(ValueError, match="pieces"):
        tts.main(saying(checkpoint, tmp_path, **given | {"pieces": PieceConfig(characters=20)}))


@pytest.mark.slow
def test_steps_at_joints_of_known_pieces(use: Use, checkpoint: Path, tmp_path: Path, capsys) -> None:
    """6 dB and 4 semitones at the joint, nothing in the middle of pieces; said by an earlier call."""
    file, out = tmp_path / "scripts.jsonl", tmp_path / "s"
    file.write_text(json.dumps({"id": "one", "turns": [{"speaker": "A", "text": "Hello. Hello."}]}))
    given = saying(checkpoint, tmp_path, turns=file, pieces=PieceConfig(characters=6), asr="asr")
    use(ByLength({n: "hello" for n in range(100)}))
    tts.main(given)
    for part, hertz, level in ((0, 120.0, 1.2), (1, 120 * 2 ** (4 / 12), 0.6)):
        buzz = level * harmonics(np.full(round(1.2 * RATE), hertz), RATE)
        soundfile.write(out / "audio" / "one" / f"000-{part:02d}.wav", buzz, RATE)
    capsys.readouterr()
    tts.main(given)
    scores = json.loads((out / "scores.json").read_text())
    assert scores["level_step"] == pytest.approx(6.02, abs=0.3) and scores["pitch_step"] == pytest.approx(4, abs=0.3)
    assert scores["usual_level_step"] == pytest.approx(0, abs=0.3)
    assert scores["usual_pitch_step"] == pytest.approx(0, abs=0.3)
    shown = capsys.readouterr().out
    assert "level step at joints, dB: 6.0" in shown
    assert "pitch step at joints, semitones" in (out / "page.html").read_text()


def test_what_cannot_be_generated(checkpoint: Path, meta: Path, tmp_path: Path) -> None:
    make_text().save(tmp_path / "text")
    alone = tmp_path / "alone" / "a" / "b" / "c" / "d"
    write_tiny_part("model", alone)
    (tmp_path / "up.jsonl").write_text('{"id": "../up", "text": "x"}\n')
    for changes, message in (
        ({"meta": None, "texts": tmp_path / "up.jsonl"}, r"'\.\./up' is no name of a file"),
        ({"model": str(tmp_path / "text")}, "text: writes text only; give a model that speaks"),
        ({"model": str(alone)}, "no folder codec/ in it or above it; name its audio tokenizer"),
        ({"audio": tmp_path / "out"}, "holds files that were not generated here"),
    ):
        with pytest.raises(ValueError, match=message):
            tts.main(saying(checkpoint, tmp_path, **{"meta": meta} | changes))
