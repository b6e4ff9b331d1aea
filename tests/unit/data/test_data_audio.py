"""Reading audio: every container gives the same sound, and every kind of unusable audio one clear error."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from audiorl import audio
from audiorl.audio import AudioClip, AudioError, load_clip, probe, seconds
from audiorl.data.corpus import bundled_speech

RATE = 16_000


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    """Three seconds of a real recording, 16 kHz."""
    utterance = next(u for u in bundled_speech(("en",)) if u.key == "agent-alreadyon")
    return utterance.clip.load(RATE)[: 3 * RATE]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    n = min(len(a), len(b))
    return float(np.corrcoef(a[:n], b[:n])[0, 1])


def write_av(path: Path, wav: np.ndarray, codec: str, rate: int = RATE) -> None:
    wav, layout = np.atleast_2d(wav.T), "mono" if wav.ndim == 1 else "stereo"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = layout
        frame = av.AudioFrame.from_ndarray((wav * 32767).astype(np.int16, order="C"), format="s16p", layout=layout)
        frame.sample_rate, frame.pts = rate, 0  # from pts 0 the muxer notes the encoder's delay
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
        packets = [p for f in [*resampler.resample(frame), *resampler.resample(None)] for p in stream.encode(f)]
        for packet in [*packets, *stream.encode(None)]:
            container.mux(packet)


def write(path: Path, wav: np.ndarray) -> Path:
    if path.suffix in (".m4a", ".g722", ".avi"):
        write_av(path, wav, {".m4a": "aac", ".g722": "g722", ".avi": "pcm_s16le"}[path.suffix])
    elif path.suffix == ".opus":
        soundfile.write(path, wav, RATE, format="OGG", subtype="OPUS")
    else:
        soundfile.write(path, wav, RATE)
    return path


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3", "opus", "aiff", "m4a", "g722"])
def test_every_container_gives_the_same_sound_and_the_same_part(
    tmp_path: Path, speech: np.ndarray, suffix: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", speech)
    whole = load_clip(AudioClip(path=str(path)))
    assert whole.dtype == np.float32 and whole.ndim == 1
    assert len(whole) == pytest.approx(len(speech), abs=0.08 * RATE)
    # G.722 delays by 22 samples (its QMF filters), so compare at the best small shift.
    shift = max(range(-40, 41), key=lambda s: correlation(np.roll(whole, s)[:RATE], speech[:RATE]))
    assert correlation(np.roll(whole, shift), speech) > 0.97
    part = load_clip(AudioClip(path=str(path), start=1.3, duration=0.5))
    assert len(part) == 0.5 * RATE
    assert correlation(part, whole[int(1.3 * RATE) :]) > 0.999
    assert probe(AudioClip(path=str(path))).seconds == pytest.approx(3, abs=0.08)


def test_resampling_keeps_the_pitch_and_the_duration(tmp_path: Path) -> None:
    t = np.arange(44_100) / 44_100
    soundfile.write(tmp_path / "tone.wav", 0.5 * np.sin(2 * np.pi * 440 * t), 44_100)
    wav = load_clip(AudioClip(path=str(tmp_path / "tone.wav")), 8000)
    assert len(wav) == 8000
    assert np.argmax(np.abs(np.fft.rfft(wav))) == 440


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = np.full(800, 0.5, np.float32), np.full(800, -0.1, np.float32)
    soundfile.write(tmp_path / "s.wav", np.stack([left, right], 1), RATE, subtype="FLOAT")
    np.testing.assert_allclose(load_clip(AudioClip(path=str(tmp_path / "s.wav"))), 0.2, atol=1e-6)
    np.testing.assert_allclose(AudioClip(array=np.stack([left, right], 1), sample_rate=RATE).load(), 0.2, atol=1e-6)


@pytest.mark.parametrize("suffix", ["wav", "opus", "m4a"])  # m4a: by FFmpeg
def test_a_channel_is_loaded_alone_and_several_are_averaged(tmp_path: Path, suffix: str) -> None:
    """Of a recording with a tone in each channel, also for a part and for an array."""
    time = np.arange(RATE) / RATE
    tones = np.stack([0.4 * np.sin(2 * np.pi * f * time) for f in (500, 1500)], 1).astype(np.float32)
    path = tmp_path / f"a.{suffix}"
    if suffix == "m4a":
        write_av(path, tones, "aac")
    else:
        soundfile.write(path, tones, RATE, **({"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}))
    for where in ({"path": str(path)}, {"data": path.read_bytes()}, {"array": tones, "sample_rate": RATE}):
        for channel, heard in ((0, [500]), (1, [1500]), ((1,), [1500]), ((1, 0), [500, 1500]), (None, [500, 1500])):
            for part in ({}, {"start": 0.4, "duration": 0.5}):
                wav = AudioClip(**where, channel=channel, **part).load(RATE)
                power = np.abs(np.fft.rfft(wav[: RATE // 2]))
                loud = np.flatnonzero(power > 0.1 * power.max()) * RATE / (2 * (len(power) - 1))
                assert sorted({500 * round(f / 500) for f in loud}) == heard
        assert probe(AudioClip(**where, channel=1)).channels == 2
        with pytest.raises(AudioError, match="channel 2 of 2, which count from 0; correct the row's channel"):
            AudioClip(**where, channel=(0, 2)).load()


def test_bytes_and_arrays_load_like_files(tmp_path: Path, speech: np.ndarray) -> None:
    path = write(tmp_path / "a.flac", speech)
    from_bytes = AudioClip(data=path.read_bytes(), start=0.25, duration=1.0).load()
    np.testing.assert_array_equal(from_bytes, AudioClip(path=str(path), start=0.25, duration=1.0).load())
    np.testing.assert_allclose(from_bytes, AudioClip(array=speech, sample_rate=RATE, start=0.25, duration=1.0).load())


def test_loading_an_array_never_shares_its_memory(speech: np.ndarray) -> None:
    original = speech.copy()
    AudioClip(array=speech, sample_rate=RATE).load()[:] = 0
    np.testing.assert_array_equal(speech, original)


def test_key_tells_apart_what_differs_and_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wav = np.linspace(-1, 1, 100, dtype=np.float32)
    assert AudioClip(path="a.wav").key == AudioClip(path=str(tmp_path / "a.wav")).key
    assert AudioClip(array=wav, sample_rate=RATE).key == AudioClip(array=wav.copy(), sample_rate=RATE).key
    different = [
        AudioClip(path="a.wav"),
        AudioClip(path="b.wav"),
        AudioClip(path="a.wav", start=1000.0001),
        AudioClip(path="a.wav", start=1000.0002),
        AudioClip(path="a.wav", duration=1.0),
        AudioClip(array=wav, sample_rate=RATE),
        AudioClip(array=wav, sample_rate=8000),
        AudioClip(array=wav[::-1].copy(), sample_rate=RATE),
        AudioClip(data=wav.tobytes()),
        AudioClip(data=wav.tobytes(), duration=1.0),
        *(AudioClip(path="a.wav", channel=channel) for channel in (0, 1, (0, 1), (1, 2))),
        AudioClip(path="a.wav", start=1.0, channel=0),
    ]
    assert AudioClip(path="a.wav", channel=(1, 0)).key == AudioClip(path="a.wav", channel=(0, 1)).key
    assert len({clip.key for clip in different}) == len(different)


def cut(path: Path, share: float = 0.6) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize(
    "suffix", ["wav", "flac", "ogg", "mp3", "opus", "aiff", "w64", "au", "caf", "voc", "rf64", "avi"]
)
def test_truncated_files_are_refused(tmp_path: Path, speech: np.ndarray, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", speech)
    cut(path)
    with pytest.raises(AudioError, match=rf"a\.{suffix}: (truncated|broken or truncated).*(copy|download) it again"):
        load_clip(AudioClip(path=str(path)))


@pytest.mark.parametrize("suffix", ["ogg", "opus"])
def test_ogg_is_refused_wherever_it_is_cut(tmp_path: Path, speech: np.ndarray, suffix: str) -> None:
    whole = write(tmp_path / f"a.{suffix}", np.tile(speech, 3)).read_bytes()
    load_clip(AudioClip(data=whole))
    for percent in range(1, 100):
        with pytest.raises(AudioError):
            load_clip(AudioClip(data=whole[: len(whole) * percent // 100]))


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3", "opus", "aiff", "caf", "m4a", "avi"])
def test_every_failure_of_a_decoder_is_an_audio_error(tmp_path: Path, speech: np.ndarray, suffix: str) -> None:
    """Bytes changed in the header and anywhere: no other exception, and every error names the file."""
    path = write(tmp_path / f"a.{suffix}", speech[:RATE])
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(40):
        damaged = bytearray(content)
        for place in rng.integers(0, 120 if number % 2 else len(content), 4):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        clip = AudioClip(path=str(path))
        try:
            probe(clip)
            load_clip(clip)
        except AudioError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


def test_a_sampling_rate_in_the_header_that_is_none_is_refused(tmp_path: Path, speech: np.ndarray) -> None:
    path = write(tmp_path / "a.wav", speech)
    for rate in (1, 2**31 - 1):
        content = bytearray(path.read_bytes())
        content[24:28] = rate.to_bytes(4, "little")
        (tmp_path / "b.wav").write_bytes(content)
        with pytest.raises(AudioError, match=rf"b\.wav: {rate} Hz in its header, outside 1000 to 1000000"):
            probe(AudioClip(path=str(tmp_path / "b.wav")))


@pytest.mark.parametrize("suffix", ["ogg", "opus"])
def test_ogg_pages_that_are_damaged_or_missing_are_refused(tmp_path: Path, speech: np.ndarray, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", np.tile(speech, 10))
    whole = path.read_bytes()
    pages = [match.start() for match in re.finditer(b"OggS", whole)] + [len(whole)]
    load_clip(AudioClip(path=str(path)))
    flipped = bytearray(whole)
    flipped[(pages[-2] + pages[-1]) // 2] ^= 4
    with pytest.raises(AudioError, match=r"truncated \(the checksum of Ogg page \d+ is wrong\)"):
        load_clip(AudioClip(data=bytes(flipped)))
    with pytest.raises(AudioError, match=r"Ogg page \d+ does not follow page \d+"):
        load_clip(AudioClip(data=whole[: pages[-3]] + whole[pages[-2] :]))
    path.write_bytes(flipped)  # a file that has changed is looked at again
    with pytest.raises(AudioError, match=r"a\.\w+: truncated \(the checksum"):
        load_clip(AudioClip(path=str(path)))


def test_a_damaged_header_of_an_au_file_is_not_read_as_raw_samples(tmp_path: Path, speech: np.ndarray) -> None:
    path = write(tmp_path / "a.au", speech)
    load_clip(AudioClip(path=str(path)))
    path.write_bytes(b"/" + path.read_bytes()[1:])
    with pytest.raises(AudioError, match=r"a\.au: not readable as audio"):
        load_clip(AudioClip(path=str(path)))


def test_samples_far_beyond_full_scale_are_refused(tmp_path: Path, speech: np.ndarray) -> None:
    load_clip(AudioClip(array=speech * 8, sample_rate=RATE))
    for scale in (32768.0, 1e30):
        with pytest.raises(AudioError, match=r"samples reach .* give floats in \[-1, 1\]"):
            load_clip(AudioClip(array=speech * scale, sample_rate=RATE))
    soundfile.write(tmp_path / "a.wav", speech * 32768, RATE, subtype="FLOAT")
    with pytest.raises(AudioError, match="samples reach"):
        load_clip(AudioClip(path=str(tmp_path / "a.wav")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_rate": -1}, "sample_rate must be in Hz, 1000 to 1000000, got -1"),
        ({"sample_rate": 2**31 - 1}, "sample_rate must be in Hz"),
        ({"start": -1.0}, "start must be >= 0"),
        ({"start": 1.0, "context": 2.0}, "context must be in 0..start"),
        ({"array": np.zeros(9)}, "exactly one of path, data, array"),
        ({"path": None, "array": np.zeros(9)}, "an array needs its sample_rate"),
    ],
)
def test_clips_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AudioClip(**({"path": "a.wav"} | fields))


def test_a_playlist_reads_no_other_file(tmp_path: Path, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "other.wav", speech)
    (tmp_path / "list.wav").write_bytes(b"ffconcat version 1.0\nfile other.wav\n")
    monkeypatch.chdir(tmp_path)
    for clip in (AudioClip(path="list.wav"), AudioClip(data=(tmp_path / "list.wav").read_bytes())):
        with pytest.raises(AudioError, match="not readable as audio"):
            load_clip(clip)


def test_a_wav_written_to_a_pipe_is_not_truncated(tmp_path: Path, speech: np.ndarray) -> None:
    path = write(tmp_path / "a.wav", speech)
    content = bytearray(path.read_bytes())
    at = content.index(b"data") + 4
    content[at : at + 4] = content[4:8] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert len(load_clip(AudioClip(path=str(path)))) == len(speech)


def test_a_cut_container_with_its_index_in_front_is_refused(tmp_path: Path, speech: np.ndarray) -> None:
    with av.open(str(tmp_path / "a.m4a"), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("aac", rate=RATE)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(speech[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    cut(tmp_path / "a.m4a")
    with pytest.raises(AudioError, match="truncated"):
        load_clip(AudioClip(path=str(tmp_path / "a.m4a")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no audio at all\n" * 100, "not readable as audio; convert it"),
        (b"", r"empty \(0 bytes\)"),
        (np.zeros(0), "holds no samples"),
        (np.array([0.1, np.nan, np.inf, 0.2]), "2 of 4 samples are NaN or infinite"),
        (None, "missing; check the path"),
    ],
)
def test_unusable_files(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "x.wav").write_bytes(content)
    elif content is not None:
        soundfile.write(tmp_path / "x.wav", content, RATE, subtype="FLOAT")
    with pytest.raises(AudioError, match=rf"x\.wav: {message}") as caught:
        load_clip(AudioClip(path=str(tmp_path / "x.wav")))
    assert "\n" not in str(caught.value)
    with pytest.raises(AudioError, match="a folder; name an audio file"):
        load_clip(AudioClip(path=str(tmp_path)))


def test_a_video_without_sound_is_refused(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "v.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    with pytest.raises(AudioError, match=r"v\.mp4: a .* file without sound"):
        load_clip(AudioClip(path=str(tmp_path / "v.mp4")))


def test_a_wrong_declared_rate_is_refused_but_opus_has_none_of_its_own(tmp_path: Path, speech: np.ndarray) -> None:
    wav, opus = write(tmp_path / "a.wav", speech), write(tmp_path / "a.opus", speech)
    with pytest.raises(AudioError, match="declared as 44100 Hz but the file has 16000 Hz"):
        load_clip(AudioClip(path=str(wav), sample_rate=44_100))
    assert len(load_clip(AudioClip(path=str(opus), sample_rate=48_000))) == len(speech)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"start": 4.0}, r"start 4 s lies past the end at 3\.00 s"),
        ({"start": 2.0, "duration": 1.5}, r"the part from 2 to 3\.5 s reaches past the end"),
        ({"duration": 0.0}, "duration must be > 0"),
    ],
)
def test_parts_outside_the_file(tmp_path: Path, speech: np.ndarray, part: dict[str, float], message: str) -> None:
    path = write(tmp_path / "a.wav", speech)
    with pytest.raises(AudioError, match=message):
        load_clip(AudioClip(path=str(path), **part))


def test_a_part_may_end_a_rounding_error_late(tmp_path: Path, speech: np.ndarray) -> None:
    clip = AudioClip(path=str(write(tmp_path / "a.wav", speech)), start=2.5, duration=0.53)
    assert len(load_clip(clip)) == 0.5 * RATE


def test_an_hour_is_refused_before_decoding_but_a_part_of_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "long.flac")
    soundfile.write(path, np.zeros(3600 * 1000, np.float32), 1000)
    with pytest.raises(AudioError, match="3600 s is longer than the limit of 600 s; cut it with start and duration"):
        load_clip(AudioClip(path=path))
    assert len(load_clip(AudioClip(path=path, start=3000.0, duration=2.0), 1000)) == 2000
    assert len(load_clip(AudioClip(path=path), 1000, max_seconds=4000)) == 3_600_000
    monkeypatch.setattr(audio, "MAX_SECONDS", 4000.0)
    assert len(load_clip(AudioClip(path=path), 1000)) == 3_600_000


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(100, np.int16), "samples are int16; give floats"),
        (np.zeros((2, 1000), np.float32), r"shape \(2, 1000\).*transpose"),
        (np.zeros(0, np.float32), "holds no samples"),
        (np.array([0.0, np.inf], np.float32), "1 of 2 samples"),
    ],
)
def test_unusable_arrays(array: np.ndarray, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        AudioClip(array=array, sample_rate=RATE).load()


def test_probe_reads_only_the_header(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((4410, 2)), 44_100, format="WAV")
    info = probe(AudioClip(data=buffer.getvalue()))
    assert (info.seconds, info.sample_rate, info.channels) == (0.1, 44_100, 2)
    assert probe(AudioClip(array=np.zeros((80, 2), np.float32), sample_rate=8000)).seconds == 0.01
    assert seconds(AudioClip(data=buffer.getvalue(), start=0.04)) == pytest.approx(0.06)
    assert seconds(AudioClip(path="never opened.wav", duration=2.0)) == 2.0
