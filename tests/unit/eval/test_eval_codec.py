"""Real codecs, tiny and random, on human speech: the table against values computed one by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import tokenizers_audio
from audiorl.data.corpus import Utterance
from audiorl.eval import codec
from audiorl.eval.metrics.speech import mel_distance, si_sdr, stft_distance
from audiorl.speech_models import load_recogniser
from tests.support.codecs import save_dac_16k, save_encodec
from tests.support.speech_models import save_ctc, save_xvector

RATE = 16_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dac, encodec, asr and speaker below one folder."""
    folder = tmp_path_factory.mktemp("models")
    save_dac_16k(folder / "dac")
    save_encodec(folder / "encodec")
    save_ctc(folder / "asr", "group")
    save_xvector(folder / "speaker")
    return folder


@pytest.fixture
def folder(speech: list[Utterance], tmp_path: Path) -> Path:
    """Three recordings of about a second with transcripts."""
    audio = tmp_path / "audio"
    audio.mkdir()
    for i, u in enumerate(speech[10:310:100]):
        soundfile.write(audio / f"clip {i}.wav", u.clip.load(RATE)[:RATE], RATE)
        (audio / f"clip {i}.txt").write_text(u.text + "\n")
    return audio


def options(models: Path, folder: Path, *names: str, **changes: Any) -> Any:
    paths = tuple(str(models / name) for name in names)
    return codec.CodecOptions(codecs=paths, audio=str(folder), out=folder.parent / "out", **changes)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_are_those_of_the_parts(models: Path, folder: Path, capsys) -> None:
    judges = {"asr": str(models / "asr"), "speaker": str(models / "speaker")}
    scores = codec.main(options(models, folder, "dac", "encodec@2", batch_size=2, **judges))
    out = folder.parent / "out"
    assert json.loads((out / "scores.json").read_text()) == scores
    assert scores["sample_rate"] == RATE  # that of the recordings and of one codec, below the other's 24 kHz
    assert list(scores["codecs"]) == ["dac", "encodec@2"]

    dac = tokenizers_audio.load(models / "dac")
    counts = np.zeros((dac.num_codebooks, dac.codebook_size))
    found: dict[str, list[float]] = {"stft": [], "mel": [], "si_sdr": []}
    for i in range(3):
        wav, _ = soundfile.read(folder / f"clip {i}.wav", dtype="float32")
        codes = dac.encode(torch.from_numpy(wav))
        copy = dac.decode(codes)[0, : len(wav)].numpy()
        found["stft"].append(stft_distance(wav, copy))
        found["mel"].append(mel_distance(wav, copy, RATE))
        found["si_sdr"].append(si_sdr(wav, copy))
        for book, row in enumerate(codes[0].numpy()):
            counts[book] += np.bincount(row, minlength=dac.codebook_size)
        kept, rate = soundfile.read(out / "dac" / "audio" / f"clip_{i}.wav.flac", dtype="float32")
        assert rate == dac.sample_rate and np.abs(kept - np.clip(copy, -1, 1)).max() < 1e-4
        assert torch.equal(
            tokenizers_audio.load_codes(out / "dac" / "codes" / f"clip_{i}.wav.safetensors", dac), codes[0]
        )
    own = scores["codecs"]["dac"]
    for name, values in found.items():
        assert own[name]["mean"] == pytest.approx(np.mean(values), abs=1e-6) and own[name]["n"] == 3
        assert own[name]["low"] <= own[name]["mean"] <= own[name]["high"]
    p = counts / counts.sum(1, keepdims=True)
    entropy = -(p * np.log2(np.where(p > 0, p, 1))).sum(1)
    assert own["entropy"] == pytest.approx(entropy.mean(), abs=1e-9)
    assert own["used"] == pytest.approx((counts > 0).mean())
    assert [b["perplexity"] for b in own["codebooks"]] == pytest.approx(2**entropy)
    assert own["bitrate"] == dac.frame_rate * 3 * 6 and own["entropy_bitrate"] < own["bitrate"]
    assert own["encode_rtf"] > 0 and own["decode_rtf"] > 0

    assert scores["codecs"]["encodec@2"]["num_codebooks"] == 2
    assert scores["reference"] == "transcripts"
    recogniser = load_recogniser(models / "asr")
    heard = [row["hypothesis"] for row in lines(out / "original" / "clips.jsonl")]
    originals = [soundfile.read(folder / f"clip {i}.wav", dtype="float32")[0] for i in range(3)]
    assert heard == recogniser.transcribe(originals, RATE)
    assert scores["original"]["wer"] > 0 and own["mean_wer"]["n"] == 3
    assert -1 <= own["similarity"]["low"] <= own["similarity"]["high"] <= 1

    page = (out / "page.html").read_text()
    assert page.count("<audio") == 9 and "SI-SDR" in page and "encodec@2" in page
    assert "frames/s" in capsys.readouterr().out


def test_a_second_call_goes_on(models: Path, folder: Path) -> None:
    asked = options(models, folder, "dac", batch_size=1)
    first = codec.main(asked)
    file = folder.parent / "out" / "dac" / "clips.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    changed = {**json.loads(rows[0]), "stft": 100.0}
    file.write_text(json.dumps(changed) + "\n" + rows[1] + rows[2][:20])  # killed while it wrote the third
    second = codec.main(asked)
    kept = [row["stft"] for row in lines(file)]
    assert len(kept) == 3 and kept[0] == 100.0  # not computed again
    wanted = (100.0 + sum(json.loads(row)["stft"] for row in rows[1:])) / 3
    assert second["codecs"]["dac"]["stft"]["mean"] == pytest.approx(wanted)
    assert second["codecs"]["dac"]["si_sdr"] == first["codecs"]["dac"]["si_sdr"]
    third = codec.main(options(models, folder, "dac", "encodec", limit=2))
    assert third["recordings"] == 2 and third["codecs"]["encodec"]["stft"]["n"] == 2
    assert len(lines(file)) == 3
    shorter = soundfile.read(folder / "clip 1.wav")[0][: RATE // 2]
    soundfile.write(folder / "clip 1.wav", shorter, RATE)  # is measured anew, and it alone
    codec.main(asked)
    rows = {row["id"]: row for row in lines(file)}
    assert rows["clip 1.wav"]["seconds"] == pytest.approx(0.5, abs=0.1) and rows["clip 0.wav"]["stft"] == 100.0


def test_results_of_another_codec_are_not_mixed_in(models: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "dac"
    shutil.copytree(models / "encodec", other)
    codec.main(options(models, folder, "dac", limit=1))
    with pytest.raises(ValueError, match="other settings"):
        codec.main(options(tmp_path / "other", folder, "dac", limit=1))
    with pytest.raises(ValueError, match="sample_rate: 16000 -> 8000"):
        codec.main(options(models, folder, "dac", sample_rate=8000))
    paths = (str(models / "dac"), str(other))
    names = list(codec.load_codecs(codec.CodecOptions(codecs=paths, audio="bundled", out=tmp_path)))
    assert len(set(names)) == 2 and all("/" not in name for name in names)


def test_without_transcripts_the_originals_are_the_reference(models: Path, folder: Path) -> None:
    (folder / "clip 1.txt").unlink()
    scores = codec.main(options(models, folder, "dac", asr=str(models / "asr"), metric="cer"))
    assert scores["original"]["cer"] == 0.0 and "understood in the originals" in scores["reference"]
    assert scores["codecs"]["dac"]["cer"] > 0.0


def test_bundled_recordings_are_held_out(tmp_path: Path) -> None:
    def listed(**changes: Any) -> list[Any]:
        return codec.recordings_of(codec.CodecOptions(codecs=("x",), out=tmp_path, **changes))

    english = listed(audio="bundled:en", limit=5)
    assert len(english) == 5 and {r.language for r in english} == {"en"} and all(r.text for r in english)
    with pytest.raises(ValueError, match="there are recordings in en, es, fr"):
        listed(audio="bundled:de")


def test_bad_input(models: Path, folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for names, audio, changes, message in (
        (("dac",), tmp_path / "nowhere", {}, "missing; give bundled"),
        (("dac",), tmp_path / "empty", {}, "no recording to be used"),
        (("speaker",), folder, {}, "no codec that this package reads"),
        (("dac", "dac"), folder, {}, "given twice"),
        ((), folder, {}, "give one or more"),
        (("dac",), folder, {"limit": 0}, "--limit"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.main(options(models, audio, *names, **changes))
    (folder / "broken.wav").write_bytes(b"RIFF")
    (folder / "empty.flac").write_bytes(b"")
    soundfile.write(folder / "nan.wav", np.full(100, np.nan), RATE, subtype="FLOAT")
    soundfile.write(folder / "stereo 48k.wav", 0.1 * np.ones((24_000, 2)), 48_000)
    scores = codec.main(options(models, folder, "dac"))
    said = capsys.readouterr().err
    assert scores["recordings"] == 4  # the stereo one is used
    for name in ("broken.wav", "empty.flac", "nan.wav"):
        assert name in said
    (folder / "stereo_48k.wav").write_bytes((folder / "stereo 48k.wav").read_bytes())
    with pytest.raises(ValueError, match="share a file name"):
        codec.main(options(models, folder, "dac"))


def test_time_ends_when_the_device_of_the_codec_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        def encode(self, wav: torch.Tensor) -> torch.Tensor:
            assert wav.device.type == "meta"
            return torch.zeros(1, 2, 3, dtype=torch.long)

        def decode(self, codes: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, 8)

    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    codec.through(Elsewhere(), np.zeros(8, np.float32), "meta")  # type: ignore[arg-type]
    assert waited == ["meta", "meta"]
