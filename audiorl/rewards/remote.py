"""A reward that runs in other processes or machines (`audiorl rewards serve FILE`), called over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import urlsplit

from audiorl.data.serialization import AudioMode, deserialize_scores, digest, serialize_rollouts
from audiorl.rewards.combine import check_scores
from audiorl.rewards.concurrency import (
    FailedTry,
    checked_token,
    gather_all,
    printable,
    retry_after,
    run_async,
    semaphore_for,
)
from audiorl.types import Rollout, Score

if TYPE_CHECKING:
    import httpx

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

    All rollouts of a step are one request, as for a local reward. `batch_size` splits them, to spread the work over the
    servers and to repeat less of it after a failure; only for rewards that score each rollout alone (not for a
    `StandardisedSum`). At most `concurrency` requests are open at a time.

    `audio`: "bytes" sends the audio, "path" the names of files that the server can read too (its --audio-root), "none"
    nothing, for rewards of text and codes; a reward that loads audio then raises an error that says so.

    A try fails if the answer takes longer than `timeout` seconds, cannot be parsed, has the wrong length or a value
    that is not finite, if the connection breaks, or with status 5xx. Each request has `tries`, with random pauses
    (`seed`) that start around `backoff` seconds and double up to `max_backoff`; the defaults outlast a restart of 30
    seconds. A server that failed is not used for `cooldown` seconds while another one works. The bearer token is read
    from the environment variable `token_env`; proxies of the environment are not used.

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
        if self.audio not in get_args(AudioMode):
            raise ValueError(f"RemoteReward: audio is {self.audio!r}, expected one of {', '.join(get_args(AudioMode))}")
        for name in ("batch_size", "concurrency", "tries"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"RemoteReward: {name} is {value}; it must be at least 1")
        for name, least in (("timeout", 1e-3), ("backoff", 0.0), ("max_backoff", 0.0), ("cooldown", 0.0)):
            if not least <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"RemoteReward: {name} is {value}; it must be seconds")

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
        answers = run_async(self._request_all(batches))
        return [score for answer in answers for score in answer]

    async def _request_all(self, batches: Sequence[Sequence[Rollout]]) -> list[list[Score | None]]:
        import httpx

        step = _Step(self.servers, self._cooling)
        wait = httpx.Timeout(None, connect=min(self.timeout, 10.0))  # `_post` times the whole request
        async with httpx.AsyncClient(headers=self._headers(), timeout=wait, trust_env=False) as client:
            return await gather_all(self._request(client, step, batch) for batch in batches)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if token := os.environ.get(self.token_env, "").strip():
            headers["Authorization"] = f"Bearer {checked_token(token, f'environment variable {self.token_env}')}"
        return headers

    async def _request(self, client: httpx.AsyncClient, step: _Step, batch: Sequence[Rollout]) -> list[Score | None]:
        """Return the scores of one batch, in at most `tries` tries."""
        async with semaphore_for(self, self.concurrency):
            document = await asyncio.to_thread(serialize_rollouts, batch, self.audio)
            rng = random.Random(f"{self.seed}/{digest(document)}")
            begin = time.monotonic()
            for number in range(1, self.tries + 1):
                url = step.acquire(rng)
                try:
                    scores = await self._post(client, step, url, document, batch)
                except FailedTry as failure:
                    step.release(url, failure.wait or self.cooldown)
                    log.warning("reward server %s: %s (try %d of %d)", url, failure, number, self.tries)
                    last = f"the last try, at {url}: {failure}"
                    if number < self.tries:
                        pause = min(self.backoff * 2 ** (number - 1), self.max_backoff) * rng.uniform(0.5, 1.0)
                        await asyncio.sleep(max(pause, min(failure.wait, self.max_backoff)))
                else:
                    step.release(url, 0.0)
                    return scores
        raise RewardServerError(
            f"reward server {', '.join(self.servers)}: {len(batch)} rollouts from {batch[0].name} on could not be "
            f"scored in {self.tries} tries and {time.monotonic() - begin:.1f} s; {last}. Start it again, or raise "
            "timeout or tries"
        )

    async def _post(
        self, client: httpx.AsyncClient, step: _Step, url: str, document: bytes, batch: Sequence[Rollout]
    ) -> list[Score | None]:
        import httpx

        try:
            async with asyncio.timeout(self.timeout):
                status, headers, content = await self._exchange(client, url, document, batch)
        except TimeoutError:
            raise FailedTry("timeout", f"no answer within {self.timeout:g} s") from None
        except httpx.RequestError as error:
            raise FailedTry("connection", f"{type(error).__name__}: {error}") from None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status == 200:
            return self._scores(step, url, answer, document, batch)
        details = answer if isinstance(answer, dict) else {}
        message = f"status {status}: {printable(details.get('error', content[:200].decode(errors='replace')), 2000)}"
        temporary = status >= 500 or status in (408, 429)
        if temporary and details.get("retry", True):
            raise FailedTry("status", message, retry_after(headers.get("Retry-After")))
        raise ValueError(f"reward server {url}: {message}")

    async def _exchange(
        self, client: httpx.AsyncClient, url: str, document: bytes, batch: Sequence[Rollout]
    ) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body) of a request; a body that is compressed or too long for its scores is a failure."""
        limit = ANSWER_BYTES + sum(SCORE_BYTES + TOKEN_BYTES * r.num_sampled for r in batch)
        body = bytearray()
        async with client.stream("POST", f"{url}/v1/scores", content=document) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise FailedTry("answer", "the answer is compressed, which was not asked for")
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > limit:
                    raise FailedTry(
                        "answer", f"the answer is longer than {limit} bytes, too long for {len(batch)} scores"
                    )
        return response.status_code, response.headers, bytes(body)

    def _scores(
        self, step: _Step, url: str, answer: Any, document: bytes, batch: Sequence[Rollout]
    ) -> list[Score | None]:
        try:
            scores = check_scores("remote", deserialize_scores(answer), batch, undefined=True)
        except ValueError as error:
            raise FailedTry("answer", f"the answer is not a list of scores: {error}") from None
        if answer.get("request") != digest(document):
            raise FailedTry("answer", "the answer belongs to another request")
        step.check_reward(url, str(answer.get("reward")))
        return scores


class _Step:
    """The servers during one call: which one is used next, and whether all serve the same reward."""

    def __init__(self, urls: Sequence[str], cooling: dict[str, float]):
        self._busy = dict.fromkeys(urls, 0)
        self._cooling = cooling
        self._served: dict[str, str] = {}

    def acquire(self, rng: random.Random) -> str:
        """Return the least busy server that has not failed recently, or else the one whose failure is longest ago."""
        now = time.time()
        ready = {u: max(self._cooling.get(u, 0.0) - now, 0.0) for u in self._busy}
        url = min(self._busy, key=lambda u: (ready[u], self._busy[u], rng.random()))
        self._busy[url] += 1
        return url

    def release(self, url: str, cooldown: float) -> None:
        self._busy[url] -= 1
        self._cooling[url] = time.time() + cooldown if cooldown else 0.0

    def check_reward(self, url: str, reward: str) -> None:
        other = next((u for u, served in self._served.items() if served != reward), None)
        if other is not None:
            raise ValueError(
                f"reward servers {other} and {url} serve different rewards ({self._served[other]}, {reward}); start "
                "both with the same file"
            )
        self._served[url] = reward
