"""Bodies that a reward server gets."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from audiorl.audio import AudioClip
from audiorl.config import RewardServerConfig
from audiorl.data.rollout_rows import array_of
from audiorl.data.serialization import VERSION, digest, serialize_rollouts
from audiorl.rewards import load_reward
from audiorl.rewards.serve import make_app
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.attack.targets import Input, Target

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


TARGETS = [Target("server bodies", _post, _judge_answer, weight=1.5, more_seeds=_bodies, names=("server:",))]
