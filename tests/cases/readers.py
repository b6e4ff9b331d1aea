"""Readers: which channel of a recording, Kaldi folders, tar archives, what other systems leave among the files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.manifest import read_samples
from audiorl.data.recordings import read_recordings
from audiorl.data.rollout_rows import clip_fields
from audiorl.data.seedtts import read_conversations, read_meta
from audiorl.eval.asr import ASROptions
from audiorl.eval.asr import main as eval_asr
from audiorl.tasks.simul.logs import read_log
from audiorl.tasks.simul.scoring import score
from tests.cases import Case, Refused

RATE = 16_000
APPLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(60) + b"\xff\xfe"
"""How a file begins in which macOS keeps what other file systems have no place for."""
BOM = b"\xef\xbb\xbf"


# -- files -------------------------------------------------------------------------------------------------------------


def tone(*hertz: float, seconds: float = 1.0) -> bytes:
    """Return a WAV file with a tone in each channel."""
    time = np.arange(round(seconds * RATE)) / RATE
    file = io.BytesIO()
    soundfile.write(file, np.stack([0.5 * np.sin(2 * np.pi * f * time) for f in hertz], 1), RATE, format="WAV")
    return file.getvalue()


def put(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files into a folder and return it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def json_lines(*rows: Mapping[str, Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def tar(path: Path, members: Mapping[str, str | bytes] | list[tuple[str, str | bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info, data = tarfile.TarInfo(name), content if isinstance(content, bytes) else content.encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def heard(clip: AudioClip) -> list[int]:
    """Return the frequencies in Hz of the tones in a clip, multiples of 20."""
    wav = clip.load(RATE)
    power = np.abs(np.fft.rfft(wav[: RATE // 20 * (len(wav) // (RATE // 20))]))
    hertz = np.arange(len(power)) * RATE / (2 * (len(power) - 1))
    return [round(float(f)) for f, p in zip(hertz, power, strict=True) if p > 0.1 * power.max()]


def said(path: Path, **options: Any) -> list[Any]:
    """Return (text, tones in Hz) of every row."""
    samples = read_samples(path, think=False, **options).samples
    return [(s.metadata.get("text"), heard(s.audio[0])) for s in samples]


def texts(path: Path, *columns: str, **options: Any) -> list[Any]:
    """Return the transcripts, or these columns too, of every row."""
    samples = read_samples(path, think=False, **options).samples
    rows = [(s.metadata.get("text"), *(s.metadata.get(c) for c in columns)) for s in samples]
    return rows if columns else [row[0] for row in rows]


# -- A3, A4: which audio -----------------------------------------------------------------------------------------------


def cut(text: str, channel: Any, type: str = "MonoCut", *, sources: Any = None, **more: Any) -> dict[str, Any]:
    """Return a line of lhotse's cuts about a.wav."""
    spoken = more.pop("supervisions", [{"id": text, "start": 0.0, "duration": 1.0, "channel": channel, "text": text}])
    sources = sources or [{"type": "file", "channels": [0, 1], "source": "a.wav"}]
    recording = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": RATE, "duration": 1.0}
    recording |= more.pop("recording", {})
    line = {"id": text, "start": 0.0, "duration": 1.0, "channel": channel, "type": type, "supervisions": spoken}
    return {**line, "recording": recording, **more}


def cuts(*lines: Mapping[str, Any], tones: tuple[float, ...] = (440, 1000)) -> Callable[[Path], Any]:
    return lambda folder: said(put(folder, {"a.wav": tone(*tones), "cuts.jsonl": json_lines(*lines)}) / "cuts.jsonl")


def manifest(*rows: Mapping[str, Any], tones: tuple[float, ...] = (440, 1000)) -> Callable[[Path], Any]:
    return lambda folder: said(put(folder, {"a.wav": tone(*tones), "rows.jsonl": json_lines(*rows)}) / "rows.jsonl")


def kaldi(tones: tuple[float, ...] = (440, 1000), **files: str | bytes) -> Callable[[Path], Any]:
    """Read a Kaldi folder; `wav_scp` stands for wav.scp."""
    named = {name.replace("wav_scp", "wav.scp"): content for name, content in files.items()}
    return lambda folder: said(put(folder, {"a.wav": tone(*tones), **named}))


def conversation(folder: Path) -> Any:
    turn = {"start": 0.0, "duration": 1.0}
    turns = [
        {"speaker": "A", "text": "Hi.", "channel": 0, **turn},
        {"speaker": "B", "text": "Yes.", "channel": 1, **turn},
    ]
    put(folder, {"a.wav": tone(440, 1000), "d.jsonl": json_lines({"id": "d", "audio": "a.wav", "turns": turns})})
    return [heard(turn.audio) for turn in read_conversations(folder / "d.jsonl")[0].turns if turn.audio]


def told_apart(folder: Path) -> Any:
    """Whether clips of two channels of one file are one to caches, and what rows of rollouts hold of them."""
    put(folder, {"a.wav": tone(440, 1000)})
    clips = [AudioClip(path=str(folder / "a.wav"), channel=channel) for channel in (0, 1, None)]
    return len({clip.key for clip in clips}), [clip_fields(clip, "a.wav") for clip in clips]


def shar(folder: Path) -> Any:
    """A shard as SharWriter makes it of two channels: each recording has its own channel only."""
    lines = [
        cut(text, c, sources=[{"type": "shar", "channels": [c], "source": ""}]) for c, text in enumerate(("l", "r"))
    ]
    put(folder, {"cuts.000000.jsonl": json_lines(*lines)})
    tar(folder / "recording.000000.tar", {"l.wav": tone(440), "l.json": "{}", "r.wav": tone(1000), "r.json": "{}"})
    return said(folder)


TWO = [
    {"id": "l", "start": 0.0, "duration": 0.5, "channel": 0, "text": "left"},
    {"id": "r", "start": 0.5, "duration": 0.5, "channel": 1, "text": "right"},
]
SPEED = {"transforms": [{"name": "Speed", "kwargs": {"factor": 1.1}}]}
MIX = {"id": "m", "type": "MixedCut", "tracks": [{"cut": cut("left", 0), "offset": 0.0}]}
SIDES = "r-A a.wav\nr-B a.wav\n"

WHICH_AUDIO = [
    Case("A3", "lhotse-speech/lhotse#1", "lhotse: two MonoCuts of one stereo recording, a speaker a channel",
         cuts(cut("left", 0), cut("right", 1)), [("left", [440]), ("right", [1000])]),
    Case("A3", "lhotse-speech/lhotse#852", "Kaldi: the fifth column of segments",
         kaldi(wav_scp="r a.wav\n", text="a left\nb right\n", segments="a r 0.0 1.0 0\nb r 0.0 1.0 1\n"),
         [("left", [440]), ("right", [1000])]),
    Case("A3", "own", "lhotse: a MultiCut of two of four channels is the mean of these",
         cuts(cut("all", [1, 3], "MultiCut", sources=[{"type": "file", "channels": [0, 1, 2, 3], "source": "a.wav"}]),
              tones=(440, 1000, 2000, 3000)), [("all", [1000, 3000])]),
    Case("A3", "own", "lhotse: a MultiCut of both channels whose only speaker is on channel 1",
         cuts(cut("right", [0, 1], type="MultiCut", supervisions=[TWO[1]])), [("right", [1000])]),
    Case("A3", "own", "lhotse: a MultiCut with a speaker on each channel keeps both",
         cuts(cut("both", [0, 1], type="MultiCut", supervisions=TWO)), [("left right", [440, 1000])]),
    Case("A3", "own", "lhotse: channels in files of their own, which name them 3 and 7",
         cuts(cut("x", 7, sources=[{"type": "file", "channels": [3], "source": "b.wav"},
                                   {"type": "file", "channels": [5, 7], "source": "a.wav"}])), [("x", [1000])]),
    Case("A3", "own", "lhotse: a channel that the recording does not have", cuts(cut("x", 2)),
         Refused("field 'channel': 2 is none of the recording's channels (0, 1)")),
    Case("A3", "own", "lhotse: what is said on another channel than the cut's",
         cuts(cut("left", 0, supervisions=[TWO[1]])), Refused("said on channel 1")),
    Case("A3", "own", "lhotse: a mono recording stays",
         cuts(cut("x", 0, sources=[{"type": "file", "channels": [0], "source": "a.wav"}]), tones=(440,)),
         [("x", [440])]),
    Case("A3", "own", "lhotse Shar: recordings of one channel each", shar, [("l", [440]), ("r", [1000])]),
    Case("A3", "own", "Kaldi: reco2file_and_channel with A and B of one stereo file",
         kaldi(wav_scp=SIDES, text="r-A left\nr-B right\n", reco2file_and_channel="r-A a A\nr-B a B\n"),
         [("left", [440]), ("right", [1000])]),
    Case("A3", "own", "Kaldi: reco2file_and_channel with 1 and 2, and segments",
         kaldi(wav_scp=SIDES, text="u left\nv right\n", segments="u r-A 0 1\nv r-B 0.5 1\n",
               reco2file_and_channel="r-A a 1\nr-B a 2\n"), [("left", [440]), ("right", [1000])]),
    Case("A3", "own", "Kaldi: side B of a file that is mono stays: it was taken out before",
         kaldi((1000,), wav_scp="r-B a.wav\n", text="r-B right\n", reco2file_and_channel="r-B a B\n"),
         [("right", [1000])]),
    Case("A3", "own", "Kaldi: a channel that is none",
         kaldi(wav_scp="r a.wav\n", text="a left\n", segments="a r 0.0 1.0 left\n"),
         Refused("is not `RECORDING START END [CHANNEL]`")),
    Case("A3", "own", "NeMo: channel_selector, a number, a list and 'average'",
         manifest({"audio_filepath": "a.wav", "id": "1", "text": "one", "channel_selector": 1},
                  {"audio_filepath": "a.wav", "id": "2", "text": "two", "channel_selector": [2, 0]},
                  {"audio_filepath": "a.wav", "id": "3", "text": "all", "channel_selector": "average"},
                  tones=(440, 1000, 2000)), [("one", [1000]), ("two", [440, 2000]), ("all", [440, 1000, 2000])]),
    Case(
        "A3", "own", "rows without ids of two channels of one file are two samples",
        lambda folder: [s.id for s in read_samples(put(folder, {"m.jsonl": json_lines(
            *({"audio_filepath": "a.wav", "text": "x", "channel_selector": c} for c in (0, 1)))}) / "m.jsonl").samples],
        ["a.wav#0", "a.wav#1"],
    ),
    Case("A3", "own", "our own rows: channel with start and duration",
         manifest({"audio": "a.wav", "text": "right", "start": 0.5, "duration": 0.5, "channel": 1}),
         [("right", [1000])]),
    Case("A3", "own", "a channel that the file does not have", manifest({"audio": "a.wav", "text": "x", "channel": 2}),
         Refused("a.wav: channel 2 of 2, which count from 0")),
    Case("A3", "own", "a channel by name", manifest({"audio": "a.wav", "text": "x", "channel": "left"}),
         Refused("field 'channel': 'left' is not a channel")),
    Case("A3", "own", "a conversation in one recording with a channel a speaker", conversation, [[440], [1000]]),
    Case("A3", "own", "clips of two channels are two to caches, and rows of rollouts name the channel", told_apart,
         (3, [{"path": "a.wav", "channel": 0}, {"path": "a.wav", "channel": 1}, {"path": "a.wav"}])),
    Case("A4", "lhotse-speech/lhotse#1437", "lhotse: a recording with the transform Speed 1.1",
         cuts({**cut("x", 0, recording=SPEED), "duration": 0.9}), Refused("field 'recording.transforms': Speed")),
    Case("A4", "own", "lhotse: Volume and ReverbWithImpulseResponse",
         cuts(cut("x", 0, recording={"transforms": [{"name": "Volume", "kwargs": {"factor": 2.0}},
                                                    {"name": "ReverbWithImpulseResponse", "kwargs": {}}]})),
         Refused("Volume, ReverbWithImpulseResponse")),
    Case("A4", "own", "lhotse: no transforms, as null and as an empty list",
         cuts(cut("left", 0, recording={"transforms": []}), cut("right", 1, recording={"transforms": None})),
         [("left", [440]), ("right", [1000])]),
    Case("A4", "own", "lhotse: a MixedCut among cuts", cuts(cut("left", 0), MIX),
         Refused("row 2, field 'type': 'MixedCut'")),
    Case("A4", "own", "lhotse: a file of MixedCuts", cuts(MIX), Refused("row 1, field 'type': 'MixedCut'")),
    Case("A4", "own", "lhotse: cuts with features and no recording",
         cuts({k: v for k, v in cut("x", 0, features={"type": "fbank"}).items() if k != "recording"}),
         Refused("field 'recording': missing; ")),
]  # fmt: skip


# -- A18 to A20: folders and archives ----------------------------------------------------------------------------------

WAVS = "r0 a.wav\nr1 a.wav\n"


def kaldi_columns(*columns: str, **files: str | bytes) -> Callable[[Path], Any]:
    named = {name.replace("wav_scp", "wav.scp"): content for name, content in files.items()}
    return lambda folder: texts(put(folder, {"a.wav": tone(440), **named}), *columns, check_audio=True)


def length(folder: Path, **files: str) -> list[float]:
    put(
        folder, {"a.wav": tone(440), **{name.replace("wav_scp", "wav.scp"): content for name, content in files.items()}}
    )
    return [len(s.audio[0].load(RATE)) / RATE for s in read_samples(folder).samples]


def recordings(files: Mapping[str, str | bytes]) -> Callable[[Path], int]:
    return lambda folder: len(read_recordings([str(put(folder / "in", files))], RATE).clips)


def archive(*members: tuple[str, str | bytes], name: str = "x.tar", mode: str = "w") -> Callable[[Path], Any]:
    return lambda folder: texts(tar(folder / name, list(members), mode))


def ids(*members: tuple[str, str | bytes]) -> Callable[[Path], Any]:
    return lambda folder: [s.id for s in read_samples(tar(folder / "x.tar", list(members))).samples]


SPOKEN = tone(440)
FOLDERS = [
    Case("A18", "lhotse-speech/lhotse#952", "segments that end at -1: the end of the recording",
         lambda folder: length(folder, wav_scp=WAVS, text="a x\nb y\n", segments="a r0 0.25 -1\nb r1 0.0 0.5\n"),
         [0.75, 0.5]),
    Case("A18", "own", "segments that end at -1.00, from 0 on",
         lambda folder: length(folder, wav_scp=WAVS, text="a x\n", segments="a r0 0 -1.00\n"), [1.0]),
    Case("A18", "own", "segments that end at -2 or before the start stay errors",
         lambda folder: length(folder, wav_scp=WAVS, text="a x\n", segments="a r0 0.5 -2\n"),
         Refused("line 1: from 0.5 to -2 s")),
    Case("A18", "lhotse-speech/lhotse#925", "tabs between key and value",
         kaldi_columns("speaker", wav_scp=WAVS.replace(" ", "\t"), text="r0\thello there\nr1\tgood morning\n",
                       utt2spk="r0\tanna\nr1\tben\n"), [("hello there", "anna"), ("good morning", "ben")]),
    Case("A18", "own", "several blanks and tabs before the value, a tab inside of it, CRLF",
         kaldi_columns("speaker", wav_scp="r0 \t a.wav\r\n", text="r0\t  hello\tthere\r\n", utt2spk=" r0   anna \r\n"),
         [("hello\tthere", "anna")]),
    Case("A18", "myshell-ai/MeloTTS#148", "a BOM before utt2spk and utt2lang",
         kaldi_columns("speaker", "language", wav_scp=WAVS, text="r0 x\nr1 y\n", utt2spk=BOM + b"r0 anna\nr1 ben\n",
                       utt2lang=BOM + b"r0 de\nr1 de\n"), [("x", "anna", "de"), ("y", "ben", "de")]),
    Case("A18", "YuanGongND/cav-mae#25", "a BOM before text", kaldi_columns(wav_scp=WAVS, text=BOM + b"r0 x\nr1 y\n"),
         ["x", "y"]),
    Case("A18", "own", "a BOM before wav.scp and segments, and a second one where files were joined",
         kaldi_columns(wav_scp=BOM + b"r0 a.wav\n" + BOM + b"r1 a.wav\n", text="a x\nb y\n",
                       segments=BOM + b"a r0 0 1\nb r1 0 1\n"), ["x", "y"]),
    Case("A18", "own", "two lines for one segment",
         kaldi_columns(wav_scp=WAVS, text="a x\n", segments="a r0 0 1\na r0 0 0.5\n"),
         Refused("segments: line 2: 'a' is also the key of line 1")),
    Case("A18", "own", "a BOM before a transcript of LibriSpeech, and a tab after its id",
         lambda folder: texts(put(folder, {"1-2-0.flac": b"", "1-2.trans.txt": BOM + b"1-2-0\tHELLO WORLD\n"})),
         ["HELLO WORLD"]),
    Case("A19", "birdnet-team/BirdNET-Analyzer#635", "LibriSpeech with ._84-121123.trans.txt of macOS",
         lambda folder: texts(put(folder, {"84/1/84-1-0.flac": SPOKEN, "84/1/84-1.trans.txt": "84-1-0 HELLO WORLD\n",
                                           "84/1/._84-1.trans.txt": APPLE})), ["HELLO WORLD"]),
    Case("A19", "quasimagia/echo-list#2", "a folder of recordings with ._a.wav",
         recordings({"a.wav": SPOKEN, "._a.wav": APPLE}), 1),
    Case("A19", "birdnet-team/BirdNET-Analyzer#635", "a tar with ._a.wav and ._a.txt",
         archive(("._a.wav", bytes(120)), ("a.wav", SPOKEN), ("._a.txt", bytes(90)), ("a.txt", "one")), ["one"]),
    Case("A19", "own", "a tar with ./._a.wav in a folder and __MACOSX",
         archive(("./x/._a.wav", APPLE), ("./x/a.wav", SPOKEN), ("./x/._a.txt", APPLE), ("./x/a.txt", "one"),
                 ("__MACOSX/x/._a.wav", APPLE), ("x/.DS_Store", APPLE)), ["one"]),
    Case("A19", "own", "a folder with __MACOSX of an archive and a folder called b.wav",
         recordings({"a.wav": SPOKEN, "__MACOSX/a.wav": APPLE, "b.wav/c.wav": SPOKEN, "b.wav/._c.wav": APPLE}), 2),
    Case("A19", "own", "recordings whose names begin with a dot or an underline stay",
         recordings({".a.wav": SPOKEN, "_b.wav": SPOKEN, "c._d.wav": SPOKEN}), 3),
    Case("A20", "webdataset/webdataset#237", "a tar of utt_1.50_2.75.wav and .txt",
         archive(("utt_1.50_2.75.wav", SPOKEN), ("utt_1.50_2.75.txt", "hello")),
         Refused("the key ends at its first dot, 'utt_1'")),
    Case("A20", "own", "v1.2/talk.mp3.wav: a dot in the folder is none of the key",
         archive(("v1.2/talk.mp3.wav", SPOKEN), ("v1.2/talk.txt", "hello")),
         Refused("the key ends at its first dot, 'v1.2/talk'")),
    Case("A20", "own", "dots in folders alone",
         ids(("v1.2/a.wav", SPOKEN), ("v1.2/a.txt", "x"), ("v1.3/a.WAV", SPOKEN), ("v1.3/a.txt", "y")),
         ["v1.2/a", "v1.3/a"]),
    Case("A20", "own", "a column with a dot, KEY.voice.txt, stays",
         lambda folder: texts(tar(folder / "x.tar", {"a.wav": SPOKEN, "a.txt": "hello", "a.voice.txt": "anna"}),
                              "voice.txt"), [("hello", "anna")]),
    Case("A20", "webdataset/webdataset#258", "all texts first, then all recordings",
         archive(("a.txt", "one"), ("b.txt", "two"), ("a.wav", SPOKEN), ("b.wav", SPOKEN)),
         Refused("the members of 'a' stand apart")),
    Case("A20", "own", "all recordings first, in a tar.gz",
         archive(("a.wav", SPOKEN), ("b.wav", SPOKEN), ("a.txt", "one"), ("b.txt", "two"), name="x.tar.gz",
                 mode="w:gz"), Refused("the members of 'a' stand apart")),
    Case("A20", "own", "a key that is the beginning of another one",
         archive(("a.txt", "one"), ("a.wav", SPOKEN), ("a_b.txt", "two"), ("a_b.wav", SPOKEN)), ["one", "two"]),
    Case("A20", "own", "a recording called a.aiff", archive(("a.aiff", SPOKEN), ("a.txt", "one")), ["one"]),
    Case("A20", "own", "two recordings under one key", archive(("a.flac", SPOKEN), ("a.wav", SPOKEN), ("a.txt", "one")),
         Refused("two recordings of 'a'")),
    Case("A20", "own", "texts with a BOM in a tar",
         archive(("a.wav", SPOKEN), ("a.txt", BOM + b"one"), ("b.json", BOM + b'{"text": "two"}'), ("b.wav", SPOKEN)),
         ["one", "two"]),
]  # fmt: skip


# -- A28: smaller ones -------------------------------------------------------------------------------------------------


def score_asr(*rows: Mapping[str, Any], head: bytes = b"") -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        put(folder, {"results.jsonl": head + json_lines(*rows).encode()})
        return eval_asr(ASROptions(score=folder / "results.jsonl", out=folder / "out"))["files"]

    return run


def said_row(id: Any, text: str = "a b") -> dict[str, Any]:
    return {"id": id, "reference": text, "hypothesis": text}


def meta(line: str, *files: str) -> Callable[[Path], Any]:
    def run(folder: Path) -> Any:
        put(folder, {"meta.lst": line + "\n", **dict.fromkeys(files, b"")})
        held = read_meta(folder / "meta.lst")[0]
        return held.text, held.recording is not None

    return run


def table(name: str, content: str | bytes, *columns: str, **files: str | bytes) -> Callable[[Path], Any]:
    clips = {"a.wav": SPOKEN, "clips/c.wav": SPOKEN}
    return lambda folder: texts(put(folder, {**clips, name: content}) / name, *columns, check_audio=True)


def log(text: str, delays: list[float], head: bytes = b"", **more: Any) -> Callable[[Path], Any]:
    """Score a log of one stream of 3 s; return (average lagging, length-adaptive)."""

    def run(folder: Path) -> Any:
        row = {"index": 0, "prediction": text, "delays": delays, "elapsed": [0] * len(delays)}
        row |= {
            "prediction_length": len(delays),
            "reference": "a b c",
            "source": ["t.wav"],
            "source_length": 3000,
            **more,
        }
        config = head + b"source_type: speech\ntarget_type: text\n"
        put(folder, {"instances.log": head + json_lines(row).encode(), "config.yaml": config})
        scores = score(read_log(folder), "text", more.get("language", "fr"), quality=())
        return scores["AL"], scores["LAAL"]

    return run


VOICES = 'client_id\tpath\tsentence\tlocale\nanna\tc.wav\t"an unclosed quote\tit\n'
SMALLER = [
    Case("A28", "own", "eval asr: an id that comes again",
         score_asr(said_row("1"), said_row("1"), said_row("2", "c d")),
         Refused("row 2, field 'id': '1' also names row 1")),
    Case("A28", "own", "eval asr: the ids 7 and '7' are one", score_asr(said_row(7), said_row("7")),
         Refused("also names row 1")),
    Case("A28", "own", "eval asr: other ids with the same texts", score_asr(said_row("1"), said_row("2")), 2),
    Case("A28", "own", "eval asr: a BOM before the results", score_asr(said_row("1"), said_row("2"), head=BOM), 2),
    Case("A28", "BytedanceSpeech/seed-tts-eval#23", "meta.lst: ' | ' in the text", meta("x|prompt|p.wav|A | B"),
         ("A | B", False)),
    Case("A28", "own", "meta.lst: '|' in a text that has a recording", meta("x|prompt|p.wav|A|B | C|gold/x.wav"),
         ("A|B | C", True)),
    Case("A28", "own", "meta.lst: a recording without a suffix that is there",
         meta("x|prompt|p.wav|A|gold/x", "gold/x"), ("A", True)),
    Case("A28", "own", "meta.lst: '|' in the text of the prompt", meta("x|a | b|p.wav|A"),
         Refused("field 3, 'b', is no recording")),
    Case("A28", "own", "meta.lst: a text alone with two '|'", meta("x|A | B | C"),
         Refused("field 3, 'B', is no recording")),
    Case("A28", "own", "meta.lst: no recording of the prompt, and one of the text", meta("x|||A|gold.wav"),
         ("A", True)),
    Case("A28", "pytorch/audio#2838", "Common Voice's .tsv with an unclosed quote",
         table("train.tsv", VOICES, "language", "speaker"), [('"an unclosed quote', "it", "anna")]),
    Case("A28", "own", "a .csv with a quoted comma and a quoted line break",
         table("t.csv", 'audio,text\na.wav,"hello, world"\nclips/c.wav,"two\nlines"\n'),
         ["hello, world", "two\nlines"]),
    Case("A28", "own", "a .CSV with a BOM, CRLF, a part, digits and the word null as text",
         table("t.CSV", BOM + b"id,audio,start,duration,text\r\n007,a.wav,0.5,0.25,null\r\n8,a.wav,,,0123\r\n"),
         ["null", "0123"]),
    Case("A28", "own", "a .csv with nothing but a BOM", table("t.csv", BOM), Refused("no readable row")),
    Case("A28", "own", "a .tsv with a tab too many", table("t.tsv", "audio\ttext\na.wav\tone\ta.wav\n"),
         Refused("row 1: 3 fields under 2 names")),
    Case("A28", "own", "a .csv with a start that is no number", table("t.csv", "audio,text,start\na.wav,x,soon\n"),
         Refused("field 'start': 'soon' is not a time")),
    Case("A28", "own", "suffixes in capitals: .JSONL", table("t.JSONL", json_lines({"audio": "a.wav", "text": "one"})),
         ["one"]),
    Case("A28", "own", "suffixes in capitals: .TAR", archive(("a.wav", SPOKEN), ("a.txt", "one"), name="X.TAR"),
         ["one"]),
    Case("A28", "own", "suffixes in capitals: .Json.GZ",
         table("t.Json.GZ", gzip.compress(b'[{"audio": "a.wav", "text": "one"}]')), ["one"]),
    Case("A28", "own", "a path of Windows", table("t.jsonl", json_lines({"audio": "clips\\c.wav", "text": "x"})),
         Refused("write paths with /, not with \\")),
    Case("A28", "own", "JSON lines that were joined, each part with a BOM",
         table("t.jsonl", b"".join(BOM + b'{"audio": "%b.wav", "text": "x"}\n' % name for name in (b"a", b"clips/c"))),
         ["x", "x"]),
    Case("A28", "own", "a log whose words hold a no-break space: 3 delays for 'Bonjour\\u00a0! ça va'",
         log("Bonjour\u00a0! ça va", [1000, 2000, 3000]), (1000.0, 1000.0)),
    Case("A28", "own", "a log with a narrow no-break space in a number",
         log("10\u202f000 euros par", [1000, 2000, 3000]), (1000.0, 1000.0)),
    Case("A28", "own", "a log of SimulEval, which counts what stands between any blanks",
         log("Bonjour\u00a0! va", [1000, 2000, 3000]), (1000.0, 1000.0)),
    Case("A28", "own", "a log with too few delays stays an error", log("a b c d", [1000, 2000, 3000]),
         Refused("delays: 3 for 4 words")),
    Case("A28", "own", "a log and its config.yaml with a BOM", log("a b c", [1000, 2000, 3000], BOM), (1000.0, 1000.0)),
]  # fmt: skip

CASES = [*WHICH_AUDIO, *FOLDERS, *SMALLER]
