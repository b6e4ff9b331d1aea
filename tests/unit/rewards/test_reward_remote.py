"""Rewards over HTTP: what travels, that scores are those of the same reward here, and everything that is refused."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gzip
import json
import math
import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.data.corpus import Utterance
from audiorl.data.rollout_rows import NOT_SENT
from audiorl.data.serialization import (
    AudioMode,
    PathNotAllowed,
    SerializationError,
    deserialize_rollouts,
    serialize_rollouts,
)
from audiorl.rewards import RemoteReward, RewardServerError, StandardisedSum, WeightedSum, load_reward
from audiorl.tasks.simul.rewards import TurnQuality, multi_turn
from audiorl.types import Message, Rollout, Sample, Score, Segment, Turn
from tests.support.reward_servers import FAULTS, Faulty, Process, app_of, serving

ROOT = Path(__file__).parents[3]
PARTS = """
    from audiorl.types import Score

    def reward(rollouts):
        '''A different score for each, with everything that a score can have.'''
        return [
            Score(len(r.text) + r.index / 3, {"tokens": float(r.num_sampled), "third": 1 / 3},
                  tuple(len(s.text) / 7 for s in r.segments),
                  tuple(float(i) for s in r.segments for i in s.ids),
                  {"length": tuple(float(len(s.text)) if s.text else float("nan") for s in r.segments)})
            for r in rollouts
        ]
    """
SOUND = """
    import numpy as np

    def reward(rollout):
        '''Of every sample of every clip, wherever it is.'''
        clips = [*rollout.sample.audio, *rollout.audio, *(c for t in rollout.sample.turns for c in t.speech)]
        clips += [t.audio.with_context() for t in rollout.sample.turns]
        waves = [c.load(16_000).astype(np.float64) for c in clips]
        return sum(float(w @ np.arange(1, len(w) + 1)) for w in waves)
    """


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        file = tmp_path / f"reward_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(dedent(source))
        return file

    return write


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUDIORL_REWARD_TOKEN", raising=False)


def remote(*urls: str, **options: Any) -> RemoteReward:
    """Without long waits."""
    return RemoteReward(urls, **({"timeout": 20.0, "backoff": 0.01, "max_backoff": 0.02, "cooldown": 0.05} | options))


def answer(sample: Sample, *texts: str, index: int = 0, **tensors: Any) -> Rollout:
    segments = []
    for i, text in enumerate(texts):
        ids, logprobs = torch.arange(2 + i) * 7, torch.linspace(-1, 0, 2 + i)
        context = (text, sample.audio[:1], "stop" if i else "length")
        tensors |= {"policy_version": 5, "source_time": 0.1 * i}
        segments.append(Segment(torch.arange(3) + index, ids, logprobs, *context, **tensors))
    return Rollout(sample, tuple(segments), f"3/{index}", index)


def question(name: str = "q", *clips: AudioClip, references: tuple[str, ...] = ("yes",), **metadata: Any) -> Sample:
    messages = (Message("system", ("Answer.",)), Message("user", (*clips, "What is said?", *clips[:1])))
    return Sample(name, messages, references, ("yes", "no"), "qa", metadata)


def stream(clip: AudioClip) -> Sample:
    """Three turns of a quarter of a second, the later ones with context."""
    said = (("", ""), ("hola", "hello"), (" adiós", "bye"))
    turns = []
    for i, (reference, source) in enumerate(said):
        part = dataclasses.replace(clip, start=0.25 * i, duration=0.25, context=0.125 if i else 0.0)
        speech = (AudioClip(array=np.full(400, 0.1 * i, np.float32), sample_rate=8000),)
        seconds = 0.4 if reference else None
        turns.append(Turn(part, 0.25 * (i + 1), reference, source=source, reference_seconds=seconds, speech=speech))
    messages = (Message("system", ("Interpret.",)),)
    return Sample("s", messages, metadata={"target_language": "es"}, turns=tuple(turns))


def texts(*answers: str) -> list[Rollout]:
    sample = question()
    return [answer(sample, text, index=i) for i, text in enumerate(answers)]


# -- what travels ------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Every field, tensors by type, shape and value; audio by what it is."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, AudioClip):
        return isinstance(b, AudioClip) and np.array_equal(a.load(), b.load())
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("mode", ["bytes", "path"])
def test_rollouts_travel_complete(speech: list[Utterance], mode: AudioMode) -> None:
    file = speech[0].clip
    assert file.path is not None
    noise = np.random.default_rng(0).uniform(-1, 1, (4000, 2)).astype(np.float32)
    clips = [
        file,
        dataclasses.replace(file, start=0.3, duration=0.2),  # a small part of its file is cut out
        dataclasses.replace(file, start=0.1, duration=0.5, context=0.1),
        AudioClip(data=Path(file.path).read_bytes(), start=0.25),
        AudioClip(array=noise, sample_rate=11_025, start=0.05, duration=0.2),
    ]
    metadata = {
        "nested": {"a": [1, 2.5, None, True, ("x", float("nan"))], "float": {"$clip": 3}},
        "infinite": float("-inf"),
        "reference_audio": clips[0],
    }
    sample = question("ünï", *clips, **metadata)
    speaks = {
        "prompt_codes": torch.full((3, 4), -1),
        "codes": torch.arange(8).view(2, 4),
        "code_mask": torch.eye(2, 4) > 0,
    }
    sent = [
        answer(sample, "half a \ud83d pair", "…"),
        answer(sample, "b", index=1, **speaks),
        answer(stream(file), "", "hola", "x", index=2),
        Rollout(sample, (), "none", -1),
    ]
    found = deserialize_rollouts(serialize_rollouts(sent, mode), [Path(file.path).parent])
    assert same(sent, found)
    assert found[0].sample is found[1].sample and found[0].audio[0] is found[1].audio[0]


def test_a_group_sends_its_audio_once(speech: list[Utterance]) -> None:
    clip = speech[0].clip
    assert clip.path is not None
    size = len(base64.b64encode(Path(clip.path).read_bytes()))
    one, many = (len(serialize_rollouts([answer(stream(clip), "", "a", "b")] * n)) for n in (1, 8))
    assert size < one and many < one + 8 * 2000
    document = json.loads(serialize_rollouts([answer(stream(clip), "", "a", "b")]))
    assert sum(len(a) == size for a in document["audio"]) == 1  # whatever the number of chunks


def test_a_part_of_a_long_file_travels_alone(tmp_path: Path) -> None:
    wav = np.random.default_rng(1).uniform(-1, 1, 60 * 8000)
    soundfile.write(tmp_path / "long.flac", wav, 8000)
    part = AudioClip(path=str(tmp_path / "long.flac"), start=31.7, duration=0.5)
    document = serialize_rollouts([answer(question("q", part), "a")])
    assert len(document) < 0.5 * 8000 * 4 * 4 / 3 + 3000
    assert same(part, deserialize_rollouts(document)[0].audio[0])


@pytest.mark.parametrize("mode", ["bytes", "path"])
def test_a_channel_travels(tmp_path: Path, mode: AudioMode) -> None:
    """Channels of a whole file share its bytes; a short part of a long file travels as its channel alone."""
    wav = np.random.default_rng(1).uniform(-1, 1, (8000, 2))
    soundfile.write(tmp_path / "s.flac", wav, 8000)
    clips = [AudioClip(path=str(tmp_path / "s.flac"), channel=channel) for channel in (0, 1)]
    clips.append(AudioClip(path=str(tmp_path / "s.flac"), start=0.5, duration=0.25, channel=1))
    document = serialize_rollouts([answer(Sample("q", (Message("user", tuple(clips)),)), "a")], audio=mode)
    for clip, sent in zip(clips, deserialize_rollouts(document, [tmp_path])[0].sample.audio, strict=True):
        np.testing.assert_array_equal(sent.load(8000), clip.load(8000))
    assert len(json.loads(document)["audio"]) == (2 if mode == "bytes" else 0)


def test_audio_that_was_not_sent_says_so(speech: list[Utterance]) -> None:
    document = serialize_rollouts([answer(question("q", speech[0].clip), "a")], "none")
    assert len(document) < 3000
    (found,) = deserialize_rollouts(document)
    with pytest.raises(ValueError, match=r"audio that was not sent \(RemoteReward\(audio='none'\)\)"):
        found.audio[0].load()
    assert found.audio[0].path == NOT_SENT


def test_metadata_that_cannot_travel_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 'q': metadata\['when'\] holds a PosixPath, which cannot be sent"):
        serialize_rollouts([answer(question("q", when=[{"a": Path("x")}]), "a")])


CLIP = ("messages", 1, "content", 0)
SEGMENT = ("rollouts", 0, "segments", 0)
DOCUMENT = json.loads(serialize_rollouts([answer(question("q", AudioClip(data=b"x")), "a")]))
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("version",), 1, r"document\.version: is 1, this server speaks 4"),
    (("rollouts",), {}, r"rollouts: \{\} is not a list"),
    (("rollouts", 0, "sample"), 1, r"rollouts\[0\]\.sample: is 1, there are 1"),
    (("rollouts", 0, "sample"), True, r"rollouts\[0\]\.sample: True is not a number from 0"),
    (("rollouts", 0, "group_id"), None, r"rollouts\[0\]\.group_id: missing; give the text"),
    ((*SEGMENT, "stop_reason"), "tired", r"segments\[0\]\.stop_reason: 'tired' is not one of eos"),
    ((*SEGMENT, "text"), 3, r"segments\[0\]\.text: 3 is not a text"),
    ((*SEGMENT, "policy_version"), -1, r"segments\[0\]\.policy_version: holds -1, expected 0 or more"),
    ((*SEGMENT, "ids"), None, r"segments\[0\]\.ids: is not a tensor"),
    ((*SEGMENT, "ids", "shape"), [3], r"segments\[0\]\.ids: 16 bytes for shape \[3\]"),
    ((*SEGMENT, "ids", "shape"), [-1, -2], r"ids: shape \[-1, -2\] is not a list of whole numbers from 0"),
    ((*SEGMENT, "logprobs", "data"), "?", r"segments\[0\]\.logprobs: not base64"),
    ((*SEGMENT, "audio", 0), 7, r"segments\[0\]\.audio\[0\]: 7 is not an object"),
    ((*SEGMENT, "source_time"), 10**400, r"segments\[0\]\.source_time: 10+… is not a number"),
    (("samples", 0, "references"), ["a", 1], r"samples\[0\]\.references\[1\]: 1 is not a text"),
    (("samples", 0, "messages", 1, "role"), "boss", r"messages\[1\]\.role: 'boss' is not one of system"),
    (("samples", 0, "metadata"), {"a": {"$who": 1}}, r"samples\[0\]\.metadata\.a: '\$who' is no kind of value"),
    (("samples", 0, "metadata"), {"reference_audio": "/etc/passwd"}, r"metadata\.reference_audio: is a text"),
    (("samples", 0, *CLIP, "context"), 1.0, r"content\[0\]: AudioClip: context must be in 0\.\.start"),
    (("samples", 0, *CLIP, "start"), math.nan, "document: not JSON"),
    (("samples", 0, *CLIP, "path"), "/etc/passwd", "path: /etc/passwd lies outside"),
    (("audio", 0), "%", r"audio\[0\]: not base64"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG)
def test_a_wrong_document_is_refused_by_its_field(place: Sequence[Any], value: Any, message: str) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(SerializationError, match=message):
        deserialize_rollouts(json.dumps(document).encode())
    optional = ("source_time", "references", "metadata", "context", "start")
    if not isinstance(place[-1], int) and place[-1] not in optional:
        del inner[place[-1]]
        with pytest.raises(SerializationError, match=r"missing|is None|is not a tensor|exactly one"):
            deserialize_rollouts(json.dumps(document).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"version": 4}', b"1" * 10_000])
def test_what_is_no_document_is_refused(body: bytes) -> None:
    with pytest.raises(SerializationError, match=r"document|missing; give a list"):
        deserialize_rollouts(body)


def test_audio_outside_the_roots_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "inside-not"
    for folder in (inside, outside):
        folder.mkdir()
        soundfile.write(folder / "a.wav", np.full(800, 0.5), 8000)
    (inside / "link.wav").symlink_to(outside / "a.wav")

    def read(path: Path, *roots: Path) -> Rollout:
        sent = [answer(question("q", AudioClip(path=str(path))), "a")]
        return deserialize_rollouts(serialize_rollouts(sent, "path"), roots)[0]

    assert len(read(inside / "a.wav", inside).audio[0].load(8000)) == 800
    wrong = [outside / "a.wav", inside / ".." / "inside-not" / "a.wav", inside / "link.wav", Path("/etc/passwd")]
    for path in wrong:
        with pytest.raises(PathNotAllowed, match=r"path: .* lies outside the folders that may be read"):
            read(path, inside)
    with pytest.raises(PathNotAllowed, match=r"\(none\); start the server with --audio-root"):
        read(inside / "a.wav")
    assert len(read(outside / "a.wav", inside, outside).audio[0].load(8000)) == 800
    named = serialize_rollouts([answer(question("q", reference_audio=str(outside / "a.wav")), "a")], "path")
    with pytest.raises(PathNotAllowed):  # a path in the metadata is no way around it
        deserialize_rollouts(named, [inside])


# -- the same scores as here -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bytes", "path"])
def test_a_reward_hears_the_same(
    reward_file: Callable[[str], Path], speech: list[Utterance], tmp_path: Path, mode: AudioMode
) -> None:
    """To the bit: whole files, parts of them, arrays, streams with context, recordings of what could be said."""
    soundfile.write(tmp_path / "long.ogg", np.random.default_rng(0).uniform(-0.5, 0.5, 24_000 * 8), 24_000)
    part = AudioClip(path=str(tmp_path / "long.ogg"), start=3.21, duration=1.1)
    array = AudioClip(array=np.random.default_rng(2).normal(0, 0.1, 9000).astype(np.float32), sample_rate=22_050)
    clip = speech[3].clip
    rollouts = [answer(question("a", clip, part, array), "x"), answer(stream(clip), "", "y", "z")]
    file = reward_file(SOUND)
    roots = (tmp_path, Path(str(clip.path)).parent) if mode == "path" else ()
    with serving(app_of(file, audio_root=roots)) as url:
        assert remote(url, audio=mode)(rollouts) == load_reward(file)(rollouts)
        with pytest.raises(ValueError, match=r"raised ValueError: .*AudioError: <audio that was not sent"):
            remote(url, audio="none")(rollouts)


def test_rewards_of_streams(reward_file: Callable[[str], Path], speech: list[Utterance]) -> None:
    """Values per turn that are not defined stay so; the batch's statistics are those of the whole batch."""
    sample = stream(speech[3].clip)
    rollouts = [answer(sample, *t, index=i) for i, t in enumerate([("", "hola", " ad"), ("ho", "", ""), ("", "", "x")])]
    source = "from audiorl.tasks.simul.rewards import TurnQuality, multi_turn\nreward = "
    with serving(app_of(reward_file(source + "multi_turn()"))) as url:
        assert same(remote(url, audio="none")(rollouts), multi_turn()(rollouts))
    with serving(app_of(reward_file(source + "TurnQuality()"))) as url:
        found = remote(url, audio="none")(rollouts)
        assert math.isnan(found[0].per_segment[0]) and same(found, TurnQuality()(rollouts))  # type: ignore[index]
        here, there = StandardisedSum.of(quality=TurnQuality()), StandardisedSum.of(quality=remote(url, batch_size=1))
        assert same(there(rollouts), here(rollouts))


def test_a_server_of_its_own(
    tmp_path: Path, reward_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process with a token: alone, in a sum, from a file, and with the wrong token."""
    file = reward_file("from audiorl.rewards import WordAccuracy\nreward = WordAccuracy()")
    (tmp_path / "token.txt").write_text("s3cret\n")
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    rollouts = texts("yes", "yes it is", "no", "")
    mine, other = load_reward(file), load_reward(reward_file(PARTS))
    expected = mine(rollouts)
    assert [s.total for s in expected] == [1, 0, 0, 0]
    server = Process(file, "--token-file", str(tmp_path / "token.txt"))
    try:
        judge = remote(server.url, token_env="JUDGE_TOKEN")
        assert judge(rollouts) == expected
        here = WeightedSum.of(judge=(mine, 0.5), parts=other)
        assert WeightedSum.of(judge=(judge, 0.5), parts=other)(rollouts) == here(rollouts)
        monkeypatch.setenv("AUDIORL_REWARD_TOKEN", "s3cret")
        monkeypatch.setenv("REWARD_SERVERS", f"{server.url} {server.url}/")
        assert load_reward(ROOT / "recipes" / "rewards" / "remote.py")(rollouts) == expected
        monkeypatch.setenv("JUDGE_TOKEN", "wrong1")
        with pytest.raises(ValueError, match=r"status 401: wrong or missing token") as refused:
            judge(rollouts)
        assert "s3cret" not in str(refused.value) and "wrong1" not in str(refused.value)
    finally:
        server.close()


# -- health, refusals --------------------------------------------------------------------------------------------------

ONE = "def reward(rollout): return 1.0"


def post(url: str, *answers: str, content: Any = None, **options: Any) -> httpx.Response:
    content = serialize_rollouts(texts(*answers)) if content is None else content
    return httpx.post(f"{url}/v1/scores", content=content, **options)


def test_health_and_token(reward_file: Callable[[str], Path]) -> None:
    file = reward_file(ONE)
    with serving(app_of(file, token="abc")) as url:
        bare = httpx.get(f"{url}/health").json()
        assert bare["ready"] is True and set(bare) == {"ready", "version", "format"}
        full = httpx.get(f"{url}/health", headers={"Authorization": "Bearer abc"}).json()
        assert full["file"].startswith(file.name) and "FunctionReward" in full["reward"]
        for header in ({}, {"Authorization": "Bearer ab"}, {"Authorization": "abc"}, {"Authorization": "Basic abc"}):
            response = post(url, content=b"{}", headers=header)
            assert response.status_code == 401 and "token" in response.json()["error"]
            assert response.headers["WWW-Authenticate"] == "Bearer"


def test_slow_requests_without_a_token_lock_nobody_out(reward_file: Callable[[str], Path]) -> None:
    with serving(app_of(reward_file(ONE), token="abc", max_queue=1)) as url:
        host, port = url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(20)]
        for connection in slow:
            connection.sendall(b"POST /v1/scores HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        begin = time.monotonic()
        for _ in range(5):
            assert post(url, "a", headers={"Authorization": "Bearer abc"}).status_code == 200
        assert time.monotonic() - begin < 4, "waited for bodies that are refused"
        for connection in slow:
            connection.close()


def test_limits(reward_file: Callable[[str], Path]) -> None:
    with serving(app_of(reward_file(ONE), max_batch=2, max_bytes=100_000)) as url:
        assert len(remote(url, batch_size=2)(texts("a", "b", "c"))) == 3
        outside = [answer(question("q", AudioClip(path="/etc/passwd")), "a")]
        for reward, rollouts, message in (
            (remote(url), texts("a", "b", "c"), r"status 413: 3 rollouts, at most 2; send smaller batches"),
            # more than the sockets hold: it has to be read to be refused
            (remote(url), texts("a" * 5_000_000), r"status 413: \d+ bytes, at most 100000; send smaller"),
            (remote(url, audio="path"), outside, r"status 403: path: /etc/passwd lies outside"),
            (remote(f"{url}/else"), texts("a"), "status 404"),
        ):
            with pytest.raises(ValueError, match=message):
                reward(rollouts)
        chunks = (b"x" * 60_000 for _ in range(3))
        assert post(url, content=chunks).status_code == 413  # without a declared length
        response = post(url, content=b'{"version": 4, "audio": []}')
        error = "samples: missing; give a list (the columns are version, audio)"
        assert (response.status_code, response.json()["error"]) == (422, error)


def test_an_object_whose_call_is_asynchronous(reward_file: Callable[[str], Path]) -> None:
    file = reward_file("""
        from audiorl.types import Score

        class Judge:
            async def __call__(self, rollouts):
                return [Score(float(len(r.text))) for r in rollouts]

        reward = Judge()
        """)
    rollouts = texts("a", "abc")
    with serving(app_of(file)) as url:
        assert remote(url)(rollouts) == load_reward(file)(rollouts) == [Score(1.0), Score(3.0)]


def test_a_reward_that_raises(reward_file: Callable[[str], Path]) -> None:
    """A ValueError speaks of the rollouts and is not asked for again; anything else is."""
    calls: list[int] = []

    def unsure(rollouts: Sequence[Rollout]) -> list[Score]:
        calls.append(len(rollouts))
        if len(calls) < 3:
            raise RuntimeError("out of\nmemory")
        return [Score(1.0) for _ in rollouts]

    file = reward_file("def reward(rollout): raise ValueError('no transcript')")
    message = r"status 500: reward '.*' raised ValueError: .*function 'reward', sample 'q' .*: no transcript \("
    with serving(app_of(file)) as url, pytest.raises(ValueError, match=message):
        remote(url)(texts("a"))
    with serving(app_of(file, reward=unsure)) as url:
        with pytest.raises(RewardServerError, match="raised RuntimeError: out of memory"):
            remote(url, tries=2)(texts("a", "b"))
        assert remote(url)(texts("a", "b")) == [Score(1.0)] * 2 and calls == [2, 2, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([Score(math.nan)], "total is nan"),
        ([Score(1.0, per_segment=(math.inf,))], "per_segment holds a value that is not finite"),
        ([], "returned 0 scores for 1 rollouts"),
        (None, "returned NoneType, expected a list"),
    ],
)
def test_bad_scores_never_leave_the_server(reward_file: Callable[[str], Path], value: Any, message: str) -> None:
    with serving(app_of(reward_file(ONE), reward=lambda rollouts: value)) as url:
        response = post(url, "a")
        assert response.status_code == 500 and message in response.json()["error"]


class Waiting:
    """A reward that waits until it may go on, and notes what it was asked for and how many calls ran at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.inside = self.most = 0
        self.go = threading.Event()

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.asked.append(rollouts[0].text)
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.go.wait(20)
        time.sleep(0.1)
        self.inside -= 1
        return [Score(float(len(r.text))) for r in rollouts]


def test_a_reward_that_takes_too_long(reward_file: Callable[[str], Path]) -> None:
    """The request ends; the thread goes on and holds its place, so that calls do not pile up."""
    reward = Waiting()
    with serving(app_of(reward_file(PARTS), reward=reward, max_seconds=0.3)) as url:
        response = post(url, "first")
        assert response.status_code == 504 and "did not return within 0.3 s" in response.json()["error"]
        with pytest.raises(httpx.ReadTimeout):
            post(url, "second", timeout=0.5)
        assert reward.asked == ["first"]
        reward.go.set()
        assert remote(url)(texts("third")) == [Score(5.0)]
        assert reward.asked == ["first", "third"]  # who has gone is not answered


def test_the_queue_is_bounded_and_the_reward_called_once_at_a_time(reward_file: Callable[[str], Path]) -> None:
    async def ask(url: str, reward: Waiting, count: int, refused: int) -> list[httpx.Response]:
        """Ask all at once; the reward goes on when so many were turned away."""
        async with httpx.AsyncClient(timeout=30) as client:
            document = serialize_rollouts(texts("a"))
            found = []
            if not refused:
                reward.go.set()
            asked = [client.post(f"{url}/v1/scores", content=document) for _ in range(count)]
            for response in asyncio.as_completed(asked):
                found.append(await response)
                if len(found) == refused:
                    reward.go.set()
            return found

    reward = Waiting()
    with serving(app_of(reward_file(ONE), reward=reward, max_queue=1)) as url:
        found = asyncio.run(ask(url, reward, 5, refused=3))
        assert sorted(r.status_code for r in found) == [200, 200, 503, 503, 503] and reward.most == 1
        busy = next(r for r in found if r.status_code == 503)
        assert busy.headers["Retry-After"] == "2" and "busy" in busy.json()["error"]
        patient = remote(url, batch_size=1, concurrency=5, tries=60, max_backoff=0.2)
        assert [s.total for s in patient(texts("a", "bb", "ccc", "dddd"))] == [1, 2, 3, 4] and reward.most == 1
    with serving(app_of(reward_file(ONE), reward=reward, concurrency=2)) as url:
        asyncio.run(ask(url, reward, 4, refused=0))
        assert reward.most == 2


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FAULTS, "late"])
def test_every_fault_is_a_failed_try(reward_file: Callable[[str], Path], kind: str) -> None:
    """Once the server is right again so is the score; while it is not, the error names address, tries and cause."""
    app = Faulty(app_of(reward_file(PARTS)), fail=kind != "late", late=kind == "late", delay=1.0, kinds=[kind])
    causes = {
        "error": "status 500: Internal Server Error",
        "busy": "status 503: busy",
        "garbage": "is not a list of scores",
        "not json": "is not a list of scores",
        "short": "returned 1 scores for 2 rollouts",
        "null": r"scores\[1\]\.total: missing; give a number",
        "nan": r"scores\[1\]\.total: nan is not a finite number",
        "other": "belongs to another request",
        "cut": "RemoteProtocolError",
        "late": r"no answer within 0\.5 s",
    }
    with serving(app) as url:
        asked = remote(url, timeout=0.5 if kind == "late" else 5.0, tries=2)
        with pytest.raises(
            RewardServerError, match=rf"{url}: 2 rollouts starting with 'q' .* in 2 tries and .*{causes[kind]}"
        ):
            asked(texts("a", "b"))
        assert app.calls == {kind: 2}
        app.fail = app.late = 0.0
        assert [s.total for s in remote(url)(texts("a", "bb"))] == [1.0, 2 + 1 / 3]


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(50_000_000)), "the answer is compressed"),
        (200, {}, b" " * 3_000_000, r"the answer is longer than \d+ bytes"),
        (503, {"Retry-After": "\u00b2".encode().decode("latin-1")}, b'{"error": "busy"}', "status 503: busy"),
        (503, {"Retry-After": "1e9"}, b'{"error": "busy"}', "status 503: busy"),
        (500, {}, b'{"error": "\\u001b[2Jgone"}', r"status 500:  \[2Jgone"),
        (500, {}, b"\x1b[2Jgone", r"status 500:  \[2Jgone"),
    ],
)
def test_answers_that_would_harm_the_client(status: int, headers: dict[str, str], body: bytes, message: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            encoded = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
            await send({"type": "http.response.start", "status": status, "headers": encoded})
            await send({"type": "http.response.body", "body": body})

    with serving(app) as url, pytest.raises(RewardServerError, match=message):
        remote(url, tries=2)(texts("a"))


def test_work_goes_to_the_servers_that_answer(reward_file: Callable[[str], Path]) -> None:
    """One fails always, one is not there: each is asked once and then left aside; the third does the work."""
    file = reward_file(PARTS)
    broken, fine = Faulty(app_of(file), fail=1.0), Faulty(app_of(file))
    rollouts = texts(*("a" * i for i in range(12)))
    with serving(broken) as first, serving(fine) as second:
        asked = remote("http://127.0.0.1:9", first, second, batch_size=1, concurrency=1, cooldown=60.0, tries=3)
        expected = load_reward(file)(rollouts)
        assert same(asked(rollouts), expected)
        assert sum(broken.calls.values()) == 1 and fine.calls == {"right": 12}
        again = pickle.loads(pickle.dumps(asked))  # remembered from step to step, and by a copy in another process
        assert again == asked and same(again(rollouts), expected) and sum(broken.calls.values()) == 1


def test_servers_of_different_rewards_are_noticed(reward_file: Callable[[str], Path]) -> None:
    one, other = (reward_file(f"def reward(rollout): return {value}") for value in (1.0, 2.0))
    message = rf"serve different rewards .*{one.name}.*start both with the same file"
    with serving(app_of(one)) as first, serving(app_of(other)) as second, pytest.raises(ValueError, match=message):
        remote(first, second, batch_size=1, concurrency=2)(texts(*"abcdefghijkl"))


def test_an_error_stops_the_other_batches(reward_file: Callable[[str], Path]) -> None:
    def picky(rollouts: Sequence[Rollout]) -> list[Score]:
        if rollouts[0].text == "a":
            raise ValueError("not this one")
        raise RuntimeError("again")

    begin = time.monotonic()
    with serving(app_of(reward_file(PARTS), reward=picky)) as url, pytest.raises(ValueError, match="not this one"):
        remote(url, batch_size=1, tries=1000, backoff=5.0, max_backoff=5.0)(texts("a", "b", "c"))
    assert time.monotonic() - begin < 20  # and not for a thousand tries


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ((), "urls is empty"),
        ("127.0.0.1:8300", "is not an address like"),
        ("http://user:secret@a", "is not an address"),
    ],
)
def test_addresses(urls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"RemoteReward: .*{message}"):
        RemoteReward(urls)


def test_a_broken_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIORL_REWARD_TOKEN", "s3c\nret")
    with pytest.raises(ValueError, match="AUDIORL_REWARD_TOKEN: not a token") as error:
        remote("http://127.0.0.1:9")(texts("a"))
    assert "s3c" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to other machines, which needs a token: give --token-file"),
        (["--host", "::"], "needs a token"),
        (["--token-file", "EMPTY"], "not a token; give printable ASCII"),
        (["--token-file", "MISSING"], "No such file"),
        (["--port", "TAKEN"], "Address already in use"),
        (["--port", "99999"], "--port 99999: not a port"),
        (["--audio-root", "MISSING"], "no such folder"),
        (["--max-batch", "0"], "--max-batch must be at least 1"),
    ],
)
def test_options_of_the_server(
    reward_file: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"EMPTY": tmp_path / "empty", "MISSING": tmp_path / "missing", "TAKEN": taken.getsockname()[1]}
        given = [str(known.get(option, option)) for option in options]
        assert main(["rewards", "serve", str(reward_file(ONE)), *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error
