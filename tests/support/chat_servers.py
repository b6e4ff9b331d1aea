"""A server that speaks the protocol of chat completions, judges by a rule, and misbehaves in stated ways."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import soundfile
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

KINDS = {
    "seven": "wrong fields", "refusal": "refusal", "other": "another sample", "out of scale": "out of scale",
    "nan": "not JSON", "prose": "not JSON", "cut": "cut", "empty": "empty", "status 500": "status 500",
    "status 429": "status 429", "no choices": "not a completion", "not json": "not a completion", "late": "timeout",
}  # fmt: skip
"""How each fault is counted."""
FAULTS = tuple(KINDS)
Rule = Callable[[list[str]], float]
Listen = Callable[[np.ndarray], float]


class ChatServer:
    """`rule` gets the texts between <answer> and </answer> and returns a rating; of two answers the higher one wins.

    With `listen` the recordings [T] at 16 kHz are rated instead; an answer without one gets -1.

    A share `fail` of the calls fails in one of `kinds`, drawn with seed 0; `late` waits `delay` seconds.
    """

    def __init__(
        self,
        rule: Rule = lambda answers: 1.0,
        fail: float = 0.0,
        kinds: Sequence[str] = FAULTS,
        delay: float = 1.0,
        listen: Listen | None = None,
    ):
        self.rule, self.fail, self.kinds, self.delay, self.listen = rule, fail, kinds, delay, listen
        self.rng = random.Random(0)
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = self.most_open = 0
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.complete, methods=["POST"])])

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        kind = self.rng.choice(self.kinds) if self.rng.random() < self.fail else "right"
        self.calls[kind] += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await asyncio.sleep(self.delay if kind == "late" else 0.005)
        finally:
            self.open -= 1
        return self.answer(kind, body)

    def answer(self, kind: str, body: dict[str, Any]) -> Response:
        text = text_of(body)
        (id,) = re.findall(r'"id" is "(\w+)"', text)
        answers = re.findall(r"<answer>\n(.*?)\n</answer>", text, re.DOTALL)
        ratings = [self.rule([answer]) for answer in answers]
        if self.listen is not None:
            ratings = [-1.0 if wav is None else self.listen(wav) for wav in recordings_of(body)]
        verdict: dict[str, Any] = {"id": "0" * 12 if kind == "other" else id, "reason": "by the rule"}
        if '"winner"' in text:
            a, b = ratings
            verdict["winner"] = "A" if a > b else "B" if b > a else "tie"
        else:
            verdict["score"] = {"seven": "seven", "out of scale": 70, "nan": float("nan")}.get(kind, ratings[0])
        content = {"prose": "I would say 4 of 5.", "empty": ""}.get(kind, json.dumps(verdict))
        if kind.startswith("status"):
            status = int(kind.split()[1])
            return JSONResponse({"error": {"message": "busy"}}, status, {"Retry-After": "0"})
        if kind == "not json":
            return PlainTextResponse("<html>a proxy's page</html>", media_type="application/json")
        message = {"role": "assistant", "content": content, "refusal": None}
        if kind == "refusal":
            message |= {"content": None, "refusal": "I cannot judge this."}
        choice = {"index": 0, "message": message, "finish_reason": "length" if kind == "cut" else "stop"}
        return JSONResponse(
            {
                "id": "c", "object": "chat.completion", "created": 0, "model": body["model"],
                "choices": [] if kind == "no choices" else [choice],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
            }
        )  # fmt: skip


def text_of(body: dict[str, Any]) -> str:
    """The text parts of the user's message."""
    return "\n".join(part["text"] for part in body["messages"][-1]["content"] if part["type"] == "text")


def recordings_of(body: dict[str, Any]) -> list[np.ndarray | None]:
    """The recordings of the answers A and B, each [T] at 16 kHz; None for an answer without one."""
    found: list[np.ndarray | None] = []
    for part in body["messages"][-1]["content"]:
        if part["type"] == "text":
            found += [None] * len(re.findall(r"^Answer [AB]:$", part["text"], re.MULTILINE))
        else:
            wav, rate = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])))
            assert rate == 16_000 and found[-1] is None
            found[-1] = wav
    return found
