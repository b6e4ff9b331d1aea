"""Around a trainer of speech: codes that are made once, voices and splits, rewards by weight, judges that listen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance as Recorded
from audiorl.data.seedtts import TextToSay
from audiorl.eval._common import Judges
from audiorl.eval._speech import measure_speech, probe_speech, summarize_speech
from audiorl.eval.metrics.prosody import MEASURES
from audiorl.models import AudioPolicy, load_policy
from audiorl.protocols import Request
from audiorl.recipes._speech import SpeechConfig, texts_of, write_tiny_part
from audiorl.report import write_report
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.tts.prompts import utterance_sample
from audiorl.tasks.tts.rewards import SpeechRewards, speech_reward
from audiorl.tasks.tts.texts import encode_corpus
from tests.support.prosody import glide
from tests.support.speech_models import save_ctc
from tokenizers_audio import load

SAY = SamplingConfig(max_new_tokens=2, max_frames=6)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, codec, asr and speaker below one folder."""
    folder = tmp_path_factory.mktemp("parts")
    for part in ("model", "codec", "asr", "speaker"):
        write_tiny_part(part, folder / part)
    return folder


@pytest.fixture
def policy(parts: Path) -> AudioPolicy:
    return load_policy(parts / "model", codec=load(parts / "codec"))


class Counting:
    """A codec that counts what it encodes, and may stop at one of them."""

    def __init__(self, codec: Any, stop: int | None = None):
        self.codec, self.stop, self.encoded = codec, stop, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def encode(self, wav: torch.Tensor) -> torch.Tensor:
        if self.encoded == self.stop:
            raise KeyboardInterrupt
        self.encoded += 1
        return self.codec.encode(wav)


def test_codes_are_made_once(parts: Path, speech: list[Recorded], tmp_path: Path) -> None:
    clips = [u.clip for u in speech[:25:5]]
    own = load_policy(parts / "model", codec=load(parts / "codec"))
    expected = [own.codes(c) for c in clips]

    def speaking(stop: int | None = None) -> tuple[AudioPolicy, Counting]:
        codec = Counting(load(parts / "codec"), stop)
        return load_policy(parts / "model", codec=codec), codec  # type: ignore[arg-type]

    policy, codec = speaking(stop=3)
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(policy, clips, tmp_path / "codes", per_shard=2)
    assert [f.name for f in sorted((tmp_path / "codes").glob("*.safetensors"))] == ["00000.safetensors"]

    policy, codec = speaking()
    assert encode_corpus(policy, [*clips, clips[0]], tmp_path / "codes", per_shard=2) == 3 == codec.encoded
    policy, codec = speaking()
    assert encode_corpus(policy, clips, tmp_path / "codes") == 0
    found = [policy.codes(c) for c in clips]
    assert codec.encoded == 0 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(policy.copy().codes(clips[1]), expected[1]) and codec.encoded == 0
    assert torch.equal(policy.codes(speech[7].clip), own.codes(speech[7].clip)) and codec.encoded == 1

    other = tmp_path / "other"
    write_tiny_part("codec", other)  # other random weights
    with pytest.raises(ValueError, match="has no codec to encode with"):
        encode_corpus(load_policy(parts / "model"), clips, tmp_path / "codes")
    policy, _ = speaking()
    policy.clip_codes.codec = load(other)
    with pytest.raises(ValueError, match="codes of the codec"):
        encode_corpus(policy, clips, tmp_path / "codes")


@pytest.fixture
def manifest(speech: list[Recorded], tmp_path: Path) -> Path:
    """Six recordings of speakers A and B; the first text is also said by the other speaker."""
    rows = []
    for i, u in enumerate([*speech[:25:5], speech[0]]):
        soundfile.write(tmp_path / f"{i}.wav", u.clip.load(16_000), 16_000)
        rows.append({"id": str(i), "text": u.text, "audio": f"{i}.wav", "speaker": "AB"[i % 2]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_held_out_texts_are_not_trained_on(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (str(manifest),)
    seeds = {texts_of(SpeechConfig(data=data, held_out_count=1, data_seed=i))[1][0].name: i for i in range(20)}
    capsys.readouterr()
    train, held_out = texts_of(SpeechConfig(data=data, held_out_count=1, data_seed=seeds["0"]))
    assert [u.name for u in held_out] == ["0"] and [u.name for u in train] == ["1", "2", "3", "4"]
    assert "1 of 5 texts are left out" in capsys.readouterr().out
    train, held_out = texts_of(SpeechConfig(data=data, held_out=("bundled:es",), max_seconds=2.0))
    assert len(train) == len([u for u in train if u.recording]) and held_out
    with pytest.raises(ValueError, match="name what to train on"):
        texts_of(SpeechConfig())
    with pytest.raises(ValueError, match="every text is held out"):
        texts_of(SpeechConfig(data=data, held_out=data))


def test_voices_come_from_the_same_speaker_or_from_one_recording(manifest: Path) -> None:
    config = SpeechConfig(data=(str(manifest),), held_out_count=1, clone=True, seed=3)
    train, held_out = texts_of(config)
    recordings = {u.recording.path: u for u in [*train, *held_out] if u.recording}
    for u in (*train, *held_out):
        assert u.prompt is not None
        donor = recordings[u.prompt.path]
        assert donor.speaker == u.speaker and donor.text == u.prompt_text != u.text
    assert all(u.prompt.path != held_out[0].recording.path for u in train)  # type: ignore[union-attr]
    assert [u.prompt_text for u in texts_of(config)[0]] == [u.prompt_text for u in train]
    voice = str(manifest.parent / "0.wav")
    train, held_out = texts_of(replace(config, clone=False, voice=voice, voice_text="Hello."))
    assert {(u.prompt.path, u.prompt_text) for u in (*train, *held_out) if u.prompt} == {(voice, "Hello.")}
    for changes, message in (
        ({"clone": False, "voice": voice}, "--voice: give what is said in it"),
        ({"voice": voice, "voice_text": "x"}, "--clone: takes voices from the data"),
        ({"held_out_count": 3}, "no other recording of speaker"),
        ({"clone": False, "voice": "no.wav", "voice_text": "x"}, r"no\.wav: missing"),
    ):
        with pytest.raises(ValueError, match=message):
            texts_of(replace(config, **changes))


def test_rewards_by_their_weights(parts: Path, policy: AudioPolicy, speech: list[Recorded]) -> None:
    own = speech[0].clip
    samples = [utterance_sample(TextToSay("a", "Good morning.", "Hi.", own, own))]
    options = SpeechRewards(asr=str(parts / "asr"), speaker=str(parts / "speaker"), metric="cer", understood=2.0)
    reward = speech_reward(options, CodecSpeechDecoder.of(policy), samples)
    rollouts = HFEngine(policy, SAY).generate([Request(s, 3) for s in samples])
    for score in reward(rollouts):
        weights = {"understood": 2.0, "similarity": 0.5, "duration": 0.2}
        weights |= dict.fromkeys(("finished", "silence", "clipping"), 0.1)
        assert score.total == pytest.approx(sum(w * score.parts[name] for name, w in weights.items()))
        assert "quality" not in score.parts and "understood/cer" in score.parts
    only: dict[str, Any] = dict.fromkeys(SpeechRewards().weights(), 0.0) | {"finished": 1.0}
    nowhere = SpeechRewards(asr="nowhere", speaker="nowhere", **only)
    assert [t.name for t in speech_reward(nowhere, CodecSpeechDecoder.of(policy), samples).terms] == ["finished"]


def test_prosody_and_the_gate_are_rewards(parts: Path, policy: AudioPolicy, speech: list[Recorded]) -> None:
    own = speech[0].clip
    samples = [utterance_sample(TextToSay("a", "Good morning.", "Hi.", own, own))]
    options = SpeechRewards(asr=str(parts / "asr"), speaker=str(parts / "speaker"), prosody=0.3, gate=0.2)
    rollouts = HFEngine(policy, SAY).generate([Request(s, 3) for s in samples])
    for score in speech_reward(options, CodecSpeechDecoder.of(policy), samples)(rollouts):
        assert score.parts["similarity"] == score.parts["prosody"] == 0  # nobody understands this model
        assert score.parts["similarity/open"] == score.parts["prosody/open"] == 0
        assert {"prosody/f0_range", "prosody/energy_range", "prosody/pauses"} <= score.parts.keys()
        assert "finished/open" not in score.parts
    gated_only = SpeechRewards(asr=str(parts / "asr"), understood=0, similarity=0, prosody=0.3, gate=0.2)
    assert speech_reward(gated_only, CodecSpeechDecoder.of(policy), samples)(rollouts)[0] is not None
    plain = [utterance_sample(TextToSay("a", "Good morning."))]
    alone = dict.fromkeys(SpeechRewards().weights(), 0.0) | {"prosody": 1.0}
    with pytest.raises(ValueError, match=r"rewards\.prosody: no text has a recording"):
        speech_reward(SpeechRewards(**alone), CodecSpeechDecoder.of(policy), plain)  # type: ignore[arg-type]


def test_rewards_without_a_reference_are_refused_before_training(
    parts: Path, policy: AudioPolicy, tmp_path: Path
) -> None:
    plain, voice = [utterance_sample(TextToSay("a", "Good morning."))], CodecSpeechDecoder.of(policy)
    for weights, message in (
        ({"similarity": 0}, r"'a': metadata\['reference_seconds'\].*--rewards\.duration 0"),
        ({"duration": 0}, r"'a': no metadata\['reference_audio'\].*--rewards\.similarity 0"),
    ):
        with pytest.raises(ValueError, match=message):
            speech_reward(SpeechRewards(asr=str(parts / "asr"), **weights), voice, plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not for a talker\), or --speech\.similarity 0"):
        speech_reward(SpeechRewards(asr=str(parts / "asr")), voice, plain, group="speech")
    options = SpeechRewards(asr=str(parts / "asr"), similarity=0, duration=0)
    assert len(speech_reward(options, voice, plain).terms) == 4
    letters = replace(options, asr=str(save_ctc(tmp_path / "letters")))
    for text, weights, message in (
        ("Call 911.", {"metric": "word-cer"}, "'b': .*letters: 'Call 911.' has the character '1'.*spell it out"),
        ("Call 911.", {"understood": 0, "likelihood": 1}, "'b': .* has the character '1'"),
        ("…", {"understood": 0, "likelihood": 1}, "'b': text '…' has no words"),
    ):
        with pytest.raises(ValueError, match=message):
            speech_reward(replace(letters, **weights), voice, [*plain, utterance_sample(TextToSay("b", text))])  # type: ignore[arg-type]
    nothing: dict[str, Any] = dict.fromkeys(SpeechRewards().weights(), 0.0)
    for wrong, message in (
        (nothing, "every weight is 0"),
        ({"clipping": -1}, r"rewards\.clipping is -1"),
        ({"gate": 1.5}, r"rewards\.gate is 1\.5"),
        ({"gate": 0.3, "similarity": 0}, r"rewards\.gate: similarity, quality, prosody all have weight 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeechRewards(**wrong)


@dataclass
class Knows:
    """Writes down one text, and embeds clips by their length: those of `seconds` as [1, 0]."""

    seconds: float
    name: str = "knows"
    text: str = "good"

    def transcribe(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> list[str]:
        return [self.text for _ in waveforms]

    def embed(self, waveforms: Sequence[np.ndarray], sample_rate: int) -> np.ndarray:
        same = [abs(len(w) / sample_rate - self.seconds) < 1e-3 for w in waveforms]
        return np.array([[1.0, 0.0] if s else [0.6, 0.8] for s in same], np.float32)


def test_measured_speech_is_compared_with_the_voice_that_is_wanted(policy: AudioPolicy, tmp_path: Path) -> None:
    own = AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000)
    samples = [utterance_sample(TextToSay("a", "Good.", recording=own)), utterance_sample(TextToSay("b", "Good."))]
    run, judge = Run.create(tmp_path / "run", "r.py", [], SAY), Knows(1.0)
    result = measure_speech(run, "before", policy, samples, SAY, Judges(judge, judge))
    rows = [json.loads(line) for line in (run.dir / "eval" / "before.jsonl").read_text().splitlines()]
    said = soundfile.read(run.dir / rows[0]["spoken_audio"]["path"])[0]
    assert rows[0]["similarity"] == pytest.approx(0.6 if np.abs(said).max(initial=0) > 0.01 else 0.0)
    assert "similarity" not in rows[1] and result["similarity"] == pytest.approx(rows[0]["similarity"])
    assert result["accuracy"] == 1.0 and result["n"] == 2
    assert set(result["outside"]) == {"accuracy", "wer", "cer", "similarity"} and "changes" not in result
    again = measure_speech(run, "plain", policy, samples, SAY, Judges(judge), outside=False)
    assert "similarity" not in again and "outside" not in again
    compared = {"accuracy", "cer", "wer", *(name for name in MEASURES if name in again)}
    assert again["changes"] == {name: [0.0, 0.0, 0.0] for name in compared}
    said = [utterance_sample(TextToSay("a", "Gut 3.", language="de"))]
    judge.text = "gut drei"  # numbers are spelled out, as the reward does
    assert measure_speech(run, "german", policy, said, SAY, Judges(judge))["cer"] == 0.0
    assert probe_speech(policy, said, SAY, Judges(judge))()["accuracy"] == 1.0
    rows = [{**row, "similarity": x} for row, x in zip(rows, (0.5, 1.0), strict=True)]
    assert summarize_speech(rows)["similarity"] == 0.75


def test_measured_speech_has_prosody_next_to_that_of_its_recording(
    policy: AudioPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AudioClip(array=glide(6, 16_000).astype(np.float32), sample_rate=16_000)
    samples = [utterance_sample(TextToSay(name, "Good.", recording=own)) for name in "ab"]
    run, judge = Run.create(tmp_path / "run", "r.py", [], SAY), Knows(1.0)

    rate = CodecSpeechDecoder.of(policy).sample_rate
    for name, semitones in (("before", 4), ("after", 1)):
        waves = [glide(semitones, rate).astype(np.float32), None]
        monkeypatch.setattr(CodecSpeechDecoder, "waveforms", lambda self, rollouts, waves=waves: waves)
        measure_speech(run, name, policy, samples, SAY, Judges(judge))
    rows = [json.loads(line) for line in (run.dir / "eval" / "after.jsonl").read_text().splitlines()]
    assert rows[0]["f0_range"] == pytest.approx(0.9, abs=0.1) and "f0_range" not in rows[1]
    assert rows[0]["reference_prosody"]["f0_range"] == pytest.approx(5.4, abs=0.1)
    (written,) = (run.dir / "eval" / "reference").iterdir()
    assert rows[0]["reference_audio"] == rows[1]["reference_audio"] == {"path": str(written.relative_to(run.dir))}
    after = run.result("after")
    assert after["f0_range"] == rows[0]["f0_range"] and after["intervals"]["f0_range"] == [rows[0]["f0_range"]] * 2
    assert "f0_range" not in after["outside"] and after["changes"]["f0_range"][0] == pytest.approx(-2.7, abs=0.1)
    page = write_report(run.dir).read_text()
    # The reference of both texts; before and after of the one that was said.
    assert page.count("class='contour'") == 2 + 2 and "F0 range (semitones)" in page
