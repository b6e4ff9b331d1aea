"""A reward that runs in other processes or machines (`audiorl rewards serve FILE`), called over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import urlsplit

from audiorl.data.serialization import AudioMode, deserialize_scores, digest, serialize_rollouts
from audiorl.rewards.combine import check_options, check_scores
from audiorl.rewards.concurrency import gather_all, run_async, semaphore_for
from audiorl.rewards.http import FailedTry, checked_token, post, printable, retried
from audiorl.types import Rollout, Score

TOKEN_ENV = "AUDIORL_REWARD_TOKEN"
ANSWER_BYTES, SCORE_BYTES, TOKEN_BYTES = 2**20, 2**16, 64
"""Longest answer that is read: so many bytes, and for each rollout and each of its sampled tokens so many more."""
log = logging.getLogger(__name__)


class RewardServerError(OSError):
    """No server gave a usable answer within the allowed tries."""


@dataclass(frozen=True)
class RemoteReward:
    """The scores of a reward server, or of several that serve the same file.

        RemoteReward("http://127.0.0.1:8300")
        WeightedSum.of(judge=(RemoteReward(("http://judge1:8300", "http://judge2:8300"), batch_size=16), 0.5), ...)

    All rollouts of a step are one request. `batch_size` splits them, to spread the work over the servers; only for
    rewards that score each rollout alone. At most `concurrency` requests are open at a time.

    `audio`: "bytes" sends the audio, "path" the names of files that the server can read too (its --audio-root), "none"
    nothing, for rewards of text and codes.

    A try fails with no usable answer within `timeout` seconds. Each request has `tries`, with random pauses (`seed`)
    that start around `backoff` seconds and double up to `max_backoff`. A server that failed is not used for `cooldown`
    seconds while another one works. The bearer token is read from the environment variable `token_env`; proxies of the
    environment are not used.

    Raises RewardServerError after the last try, and ValueError at once where a repetition is of no use: a refused
    request, a reward that raises ValueError, servers with different rewards. A fault never becomes a score of 0.
    """

    urls: str | tuple[str, ...]
    audio: AudioMode = "bytes"
    batch_size: int | None = None
    concurrency: int = 4
    timeout: float = 120.0
    tries: int = 8
    backoff: float = 0.5
    max_backoff: float = 30.0
    cooldown: float = 30.0
    seed: int = 0
    token_env: str = TOKEN_ENV
    # Until when a server is not used, in wall-clock time: the object may be copied to other processes and machines.
    _cooling: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValueError("RemoteReward: urls is empty; give the address of a reward server")
        for url in self.servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
                raise ValueError(f"RemoteReward: urls: {url!r} is not an address like http://host:8300")
        check_options(self, audio=get_args(AudioMode), batch_size=1, concurrency=1, tries=1)
        check_options(self, timeout=1e-3, backoff=0, max_backoff=0, cooldown=0)

    @property
    def servers(self) -> tuple[str, ...]:
        urls = (self.urls,) if isinstance(self.urls, str) else self.urls
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))

    @property
    def by_group(self) -> bool:
        """With a `batch_size` the scores cannot depend on the whole step; see `audiorl.rewards.concurrency`."""
        return self.batch_size is not None

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        size = self.batch_size or max(len(rollouts), 1)
        batches = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
        return [score for answer in run_async(self._request_all(batches)) for score in answer]

    async def _request_all(self, batches: Sequence[Sequence[Rollout]]) -> list[list[Score | None]]:
        import httpx

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token := os.environ.get(self.token_env, "").strip():
            headers["Authorization"] = f"Bearer {checked_token(token, f'environment variable {self.token_env}')}"
        wait = httpx.Timeout(None, connect=min(self.timeout, 10.0))  # `post` times the whole request
        async with httpx.AsyncClient(headers=headers, timeout=wait, trust_env=False) as client:
            step = _Step(self, client)
            return await gather_all(step.scores(batch) for batch in batches)


class _Step:
    """One call: how busy each server is, and which reward it serves."""

    def __init__(self, reward: RemoteReward, client: Any):
        self.reward, self.client = reward, client
        self.busy = dict.fromkeys(reward.servers, 0)
        self.served: dict[str, str] = {}

    async def scores(self, batch: Sequence[Rollout]) -> list[Score | None]:
        """Return the scores of one batch, in at most `tries` tries."""
        reward, begin = self.reward, time.monotonic()
        async with semaphore_for(reward, reward.concurrency):
            document = await asyncio.to_thread(serialize_rollouts, batch, reward.audio)
            rng = random.Random(f"{reward.seed}/{digest(document)}")

            async def attempt() -> list[Score | None]:
                # The least busy server that has not failed recently, or else the one whose failure is longest ago.
                now, cooling = time.time(), reward._cooling
                url = min(self.busy, key=lambda u: (max(cooling.get(u, 0.0) - now, 0.0), self.busy[u], rng.random()))
                self.busy[url] += 1
                try:
                    scores = await self.ask(url, document, batch)
                except FailedTry as failure:
                    cooling[url] = time.time() + (failure.wait or reward.cooldown)
                    log.warning("reward server %s: %s", url, failure)
                    raise FailedTry(failure.kind, f"at {url}: {failure}", failure.wait) from None
                finally:
                    self.busy[url] -= 1
                cooling[url] = 0.0
                return scores

            try:
                return await retried(attempt, reward.tries, reward.backoff, reward.max_backoff, rng)
            except FailedTry as failure:
                raise RewardServerError(
                    f"reward server {', '.join(reward.servers)}: {len(batch)} rollouts starting with {batch[0].name} "
                    f"could not be scored in {reward.tries} tries and {time.monotonic() - begin:.1f} s; the last try, "
                    f"{failure}. Start it again, or raise timeout or tries"
                ) from None

    async def ask(self, url: str, document: bytes, batch: Sequence[Rollout]) -> list[Score | None]:
        limit = ANSWER_BYTES + sum(SCORE_BYTES + TOKEN_BYTES * r.num_sampled for r in batch)
        status, wait, content = await post(self.client, f"{url}/v1/scores", document, self.reward.timeout, limit)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200:
            details = answer if isinstance(answer, dict) else {}
            error = details.get("error", content[:200].decode(errors="replace"))
            message = f"status {status}: {printable(error, 2000)}"
            if (status >= 500 or status in (408, 429)) and details.get("retry", True):
                raise FailedTry("status", message, wait)
            raise ValueError(f"reward server {url}: {message}")
        try:
            scores = check_scores("remote", deserialize_scores(answer), batch, undefined=True)
        except ValueError as error:
            raise FailedTry("answer", f"the answer is not a list of scores: {error}") from None
        if answer.get("request") != digest(document):
            raise FailedTry("answer", "the answer belongs to another request")
        served = self.served[url] = str(answer.get("reward"))
        for other, reward in self.served.items():
            if reward != served:
                raise ValueError(
                    f"reward servers {other} and {url} serve different rewards ({reward}, {served}); start both with "
                    "the same file"
                )
        return scores
