"""Bodies that a reward server gets, and answers that its client gets."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import math
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import torch

from audiorl.audio import AudioClip
from audiorl.config import RewardServerConfig
from audiorl.data.rollout_rows import array_of
from audiorl.data.serialization import VERSION, digest, serialize_rollouts
from audiorl.rewards import RemoteReward, load_reward
from audiorl.rewards.serve import make_app
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.attack.mutation import mutate_bytes, mutate_json
from tests.support.attack.targets import Input, Target

REWARD = """
from audiorl.types import Score

def reward(rollouts):
    return [Score(float(sum(int(s.ids.sum()) % 1000 for s in r.segments)), {"n": float(len(r.text))}) for r in rollouts]
"""


@cache
def _rollouts() -> tuple[Rollout, ...]:
    clip = AudioClip(array=np.linspace(-0.5, 0.5, 400, dtype=np.float32), sample_rate=16_000)
    messages = (Message("user", (clip, "Which?")),)
    sample = Sample("q", messages, ("x",), ("x", "y"), "qa", {"topic": "t", "pair": (1, 2.5), "none": None})

    def segment(*ids: int) -> Segment:
        return Segment(torch.arange(3), torch.tensor(ids), torch.full((len(ids),), -0.5), "text")

    spoken = Segment(
        torch.arange(2), torch.tensor([5, 6]), torch.zeros(2, 2), codes=torch.ones(2, 2).long(),
        prompt_codes=torch.full((2, 2), -1), code_mask=torch.ones(2, 2, dtype=torch.bool), source_time=1.0,
    )  # fmt: skip
    return Rollout(sample, (segment(1, 2), segment(7)), "g/0", 0), Rollout(sample, (spoken,), "g/0", 1, None, clip)


# -- the server --------------------------------------------------------------------------------------------------------


@cache
def _app() -> Any:
    file = Path(tempfile.mkdtemp()) / "reward.py"
    file.write_text(REWARD)
    options = RewardServerConfig(str(file), max_bytes=2**22, audio_root=(file.parent,))
    return make_app(load_reward(file), options, None)


def _post(given: Input, folder: Path) -> Any:
    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/scores", content=given.data)

    response = asyncio.run(answer())
    content = response.json()
    if 400 <= response.status_code < 500 and isinstance(content["error"], str):
        raise ValueError(f"server: {content['error']}")
    assert response.status_code == 200, f"status {response.status_code}: {content}"
    return content


def _judge_answer(given: Input, result: Any) -> Iterator[str]:
    body = json.loads(given.data)
    if type(body["version"]) is not int or body["version"] != VERSION:
        yield f"version {body['version']!r}"
    if result["request"] != digest(given.data):
        yield "another request"
    if len(result["scores"]) != len(body["rollouts"]):
        yield f"{len(result['scores'])} scores for {len(body['rollouts'])} rollouts"
        return
    for row, score in zip(body["rollouts"], result["scores"], strict=True):
        ids = [array_of(s["ids"]) for s in row["segments"]]
        if score["total"] != sum(int(torch.from_numpy(i.copy()).sum()) % 1000 for i in ids):
            yield f"a score {score['total']} for ids {ids}"
        if type(row["index"]) is not int or type(row["group_id"]) is not str or type(row["sample"]) is not int:
            yield f"a rollout {row['index']!r} {row['group_id']!r} {row['sample']!r}"
        for segment in row["segments"]:
            if not isinstance(segment["text"], str) or type(segment["policy_version"]) is not int:
                yield f"a segment {segment['text']!r} {segment['policy_version']!r}"


def _bodies() -> list[Input]:
    return [Input("body.json", serialize_rollouts(_rollouts()))]


# -- the client --------------------------------------------------------------------------------------------------------


class Answering:
    """A server that gives every request the same bytes and closes the connection."""

    def __init__(self) -> None:
        self.answer = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            with connection:
                try:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(65536)
                    head, _, body = request.partition(b"\r\n\r\n")
                    (length,) = (
                        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line
                    )
                    while len(body) < length:
                        body += connection.recv(65536)
                    connection.sendall(self.answer)
                except OSError:
                    pass


@cache
def _server() -> Answering:
    return Answering()


def _document() -> bytes:
    return serialize_rollouts(_rollouts())


def _ask(given: Input, folder: Path) -> Any:
    server = _server()
    server.answer = given.data.replace(b"@DIGEST@", digest(_document()).encode())
    return RemoteReward(server.url, tries=1, timeout=5.0)(_rollouts())


def _judge_scores(given: Input, result: Any) -> Iterator[str]:
    raw = given.data.replace(b"@DIGEST@", digest(_document()).encode())

    class Raw:
        def makefile(self, mode: str) -> io.BytesIO:
            return io.BytesIO(raw)

    response = http.client.HTTPResponse(Raw())  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except http.client.HTTPException:
        return  # this parser is stricter in headers than the client's; its body must then be judged by hand
    if response.status != 200:
        yield f"scores from status {response.status}"
    answer = json.loads(body)
    if answer["request"] != digest(_document()):
        yield "scores of another request"
    if len(result) != 2 or len(answer["scores"]) != 2:
        yield f"{len(answer['scores'])} scores for 2 rollouts"
        return
    for row, score in zip(answer["scores"], result, strict=True):
        if (row is None) != (score is None):
            yield f"{row} became {score}"
        elif row is not None:
            numbers = [row["total"], *row["parts"].values()]
            if any(type(n) not in (int, float) or not math.isfinite(n) for n in numbers):
                yield f"accepted {numbers}"
            elif score.total != row["total"] or dict(score.parts) != row["parts"]:
                yield f"{row} became {score}"


def _answers() -> list[Input]:
    score = {"total": 0.5, "parts": {"n": 4.0}, "per_segment": None, "per_token": None, "segment_parts": {}}
    second = score | {"per_segment": [0.25], "per_token": [0.0, 0.25], "segment_parts": {"q": [None]}}
    body = json.dumps(
        {"version": VERSION, "request": "@DIGEST@", "reward": "r.py 0", "scores": [score, second]}
    ).encode()
    length = len(body) - len(b"@DIGEST@") + 32
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    pieces = (body[:60], body[60:])
    sizes = [len(piece) + piece.count(b"@DIGEST@") * (32 - len(b"@DIGEST@")) for piece in pieces]
    chunked = b"".join(b"%x\r\n%s\r\n" % (size, piece) for size, piece in zip(sizes, pieces, strict=True))
    busy = b'{"error": "busy"}'
    return [
        Input("length", head + b"Content-Length: %d\r\n\r\n" % length + body),
        Input("closed", head + b"Connection: close\r\n\r\n" + body),
        Input("chunked", head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked + b"0\r\n\r\n"),
        Input("busy", b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\nContent-Length: %d\r\n\r\n" % len(busy) + busy),
    ]


def _mutate_answer(rng: Random, data: bytes, others: tuple[bytes, ...]) -> bytes:
    """Half of the time the JSON of the body alone, with a length that fits."""
    head, mark, body = data.partition(b"\r\n\r\n")
    if rng.random() < 0.5 or b"chunked" in head:
        return mutate_bytes(rng, data, others)
    changed = mutate_json(rng, body)
    length = len(changed) + changed.count(b"@DIGEST@") * (32 - len(b"@DIGEST@"))
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % length]) + mark + changed


TARGETS = [
    Target("server bodies", _post, _judge_answer, mutate_json, 1.5, _bodies, lambda given, folder: ("server:",)),
    Target(
        "client answers", _ask, _judge_scores, _mutate_answer, 1.0, _answers, lambda given, folder: ("reward server",)
    ),
]
