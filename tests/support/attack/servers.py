"""Bodies that a reward server gets, answers of judges, and requests to the view."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import torch

from audiorl.audio import AudioClip
from audiorl.config import RewardServerConfig
from audiorl.data.rollout_rows import array_of
from audiorl.data.schema import parse_json
from audiorl.data.serialization import VERSION, digest, serialize_rollouts
from audiorl.rewards import load_reward
from audiorl.rewards.chat import BadAnswer, ChatEndpoint, JudgeQuestion
from audiorl.rewards.llm_judge import JudgePrompt, OpenAIJudge
from audiorl.rewards.serve import make_app
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.attack.runs import run_folder
from tests.support.attack.targets import Input, Target
from tests.support.views import client, viewed

REWARD = """
from audiorl.types import Score

def reward(rollouts):
    return [Score(float(sum(int(s.ids.sum()) % 1000 for s in r.segments)), {"n": float(len(r.text))}) for r in rollouts]
"""


def _bodies() -> list[Input]:
    """Two rollouts of one prompt: of two written segments, and of a spoken one."""
    clip = AudioClip(array=np.linspace(-0.5, 0.5, 400, dtype=np.float32), sample_rate=16_000)
    metadata = {"topic": "t", "pair": (1, 2.5), "none": None}
    sample = Sample("q", (Message("user", (clip, "Which?")),), ("x",), ("x", "y"), "qa", metadata)
    written = [
        Segment(torch.arange(3), torch.tensor(ids), torch.full((len(ids),), -0.5), "text") for ids in ([1, 2], [7])
    ]
    spoken = Segment(
        torch.arange(2), torch.tensor([5, 6]), torch.zeros(2, 2), codes=torch.ones(2, 2).long(),
        prompt_codes=torch.full((2, 2), -1), code_mask=torch.ones(2, 2, dtype=torch.bool), source_time=1.0,
    )  # fmt: skip
    rollouts = [Rollout(sample, tuple(written), "g/0", 0), Rollout(sample, (spoken,), "g/0", 1, None, clip)]
    return [Input("body.json", serialize_rollouts(rollouts))]


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
    if type(body["version"]) is not int or body["version"] != VERSION or result["request"] != digest(given.data):
        yield f"version {body['version']!r}, or the answer to another request"
    for row, score in zip(body["rollouts"], result["scores"], strict=True):
        ids = [array_of(s["ids"]) for s in row["segments"]]
        if score["total"] != sum(int(i.sum()) % 1000 for i in ids):
            yield f"a score {score['total']} for ids {ids}"
        if type(row["index"]) is not int or type(row["group_id"]) is not str or type(row["sample"]) is not int:
            yield f"a rollout {row['index']!r} {row['group_id']!r} {row['sample']!r}"
        for segment in row["segments"]:
            if not isinstance(segment["text"], str) or type(segment["policy_version"]) is not int:
                yield f"a segment {segment['text']!r} {segment['policy_version']!r}"


# -- answers of judges -------------------------------------------------------------------------------------------------


@cache
def _question() -> tuple[JudgeQuestion, str]:
    """A question to a judge, and the id that its answer must repeat."""
    rollout = Rollout(Sample("q", (Message("user", ("Which?",)),)), (Segment(torch.arange(2), torch.arange(3),
                      torch.zeros(3), "x"),), "g/0", 0)  # fmt: skip
    (question,) = OpenAIJudge(ChatEndpoint("m"), JudgePrompt("5: right."))._questions(rollout)
    return question, question.schema["properties"]["id"]["const"]


def _rating(given: Input, folder: Path) -> Any:
    try:
        return _question()[0].read(given.data.decode(errors="replace"))
    except BadAnswer as error:  # counted; the rollout is skipped
        raise ValueError(f"judge: {error.kind}") from error


def _judge_rating(given: Input, rating: float) -> Iterator[str]:
    text = given.data.decode(errors="replace").strip()
    answer = json.loads(text.removeprefix("```json").removeprefix("```").removesuffix("```"))
    if answer["id"] != _question()[1] or isinstance(answer["score"], bool) or answer["score"] != rating:
        yield f"{rating} of {answer!r}"
    if not 1 <= rating <= 5:
        yield f"a rating {rating}"


def _answers() -> list[Input]:
    answer = json.dumps({"id": _question()[1], "reason": "It says why.", "score": 4})
    return [Input("plain", answer.encode()), Input("fenced", f"```json\n{answer}\n```".encode())]


# -- requests to the view ----------------------------------------------------------------------------------------------

REQUESTS = (
    {
        "path": "/rollouts",
        "query": {"q": 'answer reward>0.5 -"x y" task:qa prompt:which', "order": "newest", "page": 0},
    },
    {"path": "/rollouts", "query": {"runs": "0", "step": 1, "task": "qa", "phase": "grpo"}},
    {"path": "/rollouts/0/1/0", "query": {}},
    {"path": "/metrics/0", "query": {"epoch": 0, "since": 2}},
    {"path": "/evaluations", "query": {"left": "0/before", "right": "0/after", "show": "all", "page": 0}},
    {"path": "/labels", "body": {"id": "x", "verdict": "a"}, "headers": {"Origin": "http://127.0.0.1:8310"}},
    {"path": "/audio/x", "query": {}, "headers": {"Range": "bytes=0-5"}},
)


@cache
def _client() -> Any:
    view = viewed(run_folder(), labels=Path(tempfile.mkdtemp()) / "labels.jsonl", mode="pairs")
    requests = client(view)
    requests._transport.raise_server_exceptions = False
    return requests


def _request(given: Input, folder: Path) -> Any:
    row = parse_json(given.data)
    parts = {name: row.get(name) for name in ("query", "headers")} if isinstance(row, dict) else {"": 0}
    if not all(isinstance(part, dict | None) for part in parts.values()):
        raise ValueError(f"{folder}: no request")
    query = {str(k): str(v) for k, v in (parts["query"] or {}).items()}
    headers = {str(k): str(v).encode("latin-1", "replace") for k, v in (parts["headers"] or {}).items()}
    path = "/" + quote(str(row.get("path")).encode("utf-8", "surrogatepass")).lstrip("/")
    words = "&".join(
        f"{quote(k.encode('utf-8', 'replace'))}={quote(v.encode('utf-8', 'replace'))}" for k, v in query.items()
    )
    if len(words) + len(path) > 60_000 or any(not k.isascii() or not k.isprintable() or not k.strip() for k in headers):
        raise ValueError(f"{folder}: no address that can be sent")
    content = {"content": json.dumps(row["body"]).encode()} if "body" in row else {}
    return _client().request("POST" if content else "GET", f"{path}?{words}", headers=headers, **content)


def _judge_request(given: Input, answer: Any) -> Iterator[str]:
    if answer.status_code >= 500:
        yield f"status {answer.status_code}: {answer.text[:200]}"
    if b"root:" in answer.content:
        yield "a file that is not the run's"


TARGETS = [
    Target("server bodies", _post, _judge_answer, weight=1.5, more_seeds=_bodies, names=("server:",)),
    Target("judge answers", _rating, _judge_rating, weight=0.5, more_seeds=_answers, names=("judge:",)),
    Target("view requests", _request, _judge_request, weight=0.8,
           more_seeds=lambda: [Input(f"{i}.json", json.dumps(row).encode()) for i, row in enumerate(REQUESTS)],
           names=("",)),
]  # fmt: skip
