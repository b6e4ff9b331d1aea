"""Questions to a chat model behind an OpenAI-compatible endpoint: concurrency, retries, a cache on disk, counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from audiorl.rewards.combine import check_options
from audiorl.rewards.concurrency import gather_all, run_async, semaphore_for
from audiorl.rewards.http import FailedTry, checked_token, is_loopback, post, printable, retried

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
PERMANENT = (401, 403, 404)
"""Statuses that no other question would get rid of: they stop the run."""
TEMPORARY = (408, 409, 425, 429)
"""Statuses below 500 that are worth another try."""
MOST_BYTES = 2**24
"""Longest answer that is read."""


class JudgeError(OSError):
    """A judge that cannot be asked, or more failures than allowed."""


class BadAnswer(FailedTry):
    """An answer that is no verdict. `kind`: how it is counted."""


@dataclass(frozen=True)
class JudgeQuestion:
    """One request, made by a judge."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages in the form of the OpenAI API, audio included."""
    schema: Mapping[str, Any]
    """JSON schema of the answer."""
    read: Callable[[str], Any]
    """Returns the value in an answer's text; raises BadAnswer."""
    seed: int = 0
    """Number of the vote."""


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer to a JudgeQuestion, made by `ChatEndpoint.ask`."""

    value: Any = None
    """What `JudgeQuestion.read` returned."""
    tokens: int = 0
    """Tokens of prompts and answers that this call used, over all tries; 0 from the cache."""
    seconds: float = 0.0
    """Latency of the request that succeeded; 0 from the cache."""
    failure: str = ""
    """Kind and message of the last try where there is no answer, such as "timeout: no answer within 60 s"."""


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _ChatUsage | None = None


@dataclass(frozen=True)
class ChatEndpoint:
    """A chat model behind an OpenAI-compatible endpoint (vLLM, transformers serve, OpenAI, …).

        ChatEndpoint("Qwen/Qwen2.5-Omni-7B", "http://127.0.0.1:8000/v1", cache="judge_cache")

    Plain http is allowed for this machine only; other machines need https. Proxies of the environment are used for
    https only, and redirects are not followed. The key is read when the endpoint is asked, and never printed.
    """

    model: str
    """Name of the model, as the server calls it."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """Address of the API, with its version."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key. A server on this machine needs none."""
    temperature: float = 0.0
    """Sampling temperature; above 0 votes differ."""
    max_tokens: int = 512
    """Most tokens of an answer. An answer that is cut there is a failure."""
    answer_format: Literal["json_schema", "json_object", "text"] = "json_schema"
    """How the server is told to answer in JSON: by schema, by JSON mode, or by the prompt alone."""
    concurrency: int = 16
    """Most requests that are open at a time."""
    timeout: float = 60.0
    """Seconds after which a try fails."""
    tries: int = 4
    """Tries for each request; a failed connection, a timeout, status 408, 429, 5xx and no verdict are worth another."""
    backoff: float = 0.5
    """Seconds before the second try; doubled for each further one, times a random factor."""
    max_backoff: float = 30.0
    """Most seconds between two tries."""
    max_seconds: float = 600.0
    """Seconds for all requests of one call of the reward; what is unanswered then is a failure."""
    cache: str | None = None
    """Folder of verdicts by the whole request, audio content included, for later calls and other processes."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a request; None leaves one out: {"max_tokens": None, "max_completion_tokens": 512}."""
    counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    """Since the endpoint was made: requests, answers from the cache, failed tries by kind, tokens."""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or url.username:
            raise ValueError(
                f"ChatEndpoint: base_url {self.base_url!r} is not an address like http://127.0.0.1:8000/v1"
            )
        if url.scheme == "http" and not is_loopback(url.hostname):
            raise ValueError(
                f"ChatEndpoint: base_url {self.base_url!r} would send prompts and the key in plain text to another "
                "machine; give its https address"
            )
        check_options(self, concurrency=1, tries=1, max_tokens=1, timeout=1e-3, max_seconds=1e-3)
        check_options(
            self, temperature=0, backoff=0, max_backoff=0, answer_format=("json_schema", "json_object", "text")
        )

    def ask(self, questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        """Return a JudgeAnswer for each question, in order.

        Raises JudgeError where no other question would be answered either (wrong key, no such model), and ValueError
        where the key is missing.
        """
        before = self.counts.copy()
        answers = run_async(self._ask_all(questions))
        new = self.counts - before
        failed = {name.removeprefix("failed: "): n for name, n in sorted(new.items()) if name.startswith("failed: ")}
        log.log(
            logging.WARNING if failed else logging.INFO,
            f"judge {self.model}: {len(questions)} questions, {new['cached']} cached, {new['requests']} requests; "
            f"failed tries: {', '.join(f'{n} {kind}' for kind, n in failed.items()) or 'none'}; "
            f"{new['prompt_tokens']} tokens read, {new['completion_tokens']} written",
        )
        return answers

    async def _ask_all(self, questions: Sequence[JudgeQuestion]) -> list[JudgeAnswer]:
        import httpx

        bodies: dict[str, tuple[JudgeQuestion, bytes]] = {}  # equal answers of a group are judged once
        keys = []
        for question in questions:
            body = json.dumps(self._body(question), sort_keys=True).encode()
            # `fields` may leave the seed out of the body, but votes stay different requests.
            keys.append(hashlib.sha256(body + str(question.seed).encode()).hexdigest())
            bodies.setdefault(keys[-1], (question, body))
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self._key():
            headers["Authorization"] = f"Bearer {checked_token(key, f'environment variable {self.api_key_env}')}"
        secure = urlsplit(self.base_url).scheme == "https"
        deadline = asyncio.get_running_loop().time() + self.max_seconds
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=secure) as client:
            answers = await gather_all(self._ask(client, deadline, name, *body) for name, body in bodies.items())
        found, in_order = dict(zip(bodies, answers, strict=True)), []
        for name in keys:  # the first of equal questions has the cost
            in_order.append(found[name])
            found[name] = replace(found[name], tokens=0, seconds=0.0)
        return in_order

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and not is_loopback(urlsplit(self.base_url).hostname or ""):
            raise ValueError(
                f"ChatEndpoint: {self.base_url} needs a key; set the environment variable {self.api_key_env}"
            )
        return key

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        schema = {"name": "verdict", "strict": True, "schema": question.schema}
        body = {
            "model": self.model,
            "messages": list(question.messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": question.seed,
            "response_format": {
                "json_schema": {"type": "json_schema", "json_schema": schema},
                "json_object": {"type": "json_object"},
                "text": None,
            }[self.answer_format],
        }
        return {name: value for name, value in (body | dict(self.fields)).items() if value is not None}

    async def _ask(
        self, client: httpx.AsyncClient, deadline: float, name: str, question: JudgeQuestion, body: bytes
    ) -> JudgeAnswer:
        file = None if self.cache is None else Path(self.cache).expanduser() / name[:2] / f"{name}.json"
        if file is not None and file.is_file():
            try:
                value = question.read(msgspec.json.decode(file.read_bytes(), type=dict[str, str])["text"])
            except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, BadAnswer):
                log.warning("%s: holds no verdict; asking again", file)
            else:
                self.counts["cached"] += 1
                return JudgeAnswer(value)
        usage: Counter[str] = Counter()

        async def attempt() -> tuple[Any, str, float]:
            async with semaphore_for(self, self.concurrency):
                begin = time.monotonic()
                self.counts["requests"] += 1
                try:
                    text = await self._request(client, body, usage)
                    return question.read(text), text, time.monotonic() - begin
                except FailedTry as failure:
                    self.counts[f"failed: {failure.kind}"] += 1
                    raise

        try:
            async with asyncio.timeout_at(deadline):
                value, text, seconds = await retried(
                    attempt, self.tries, self.backoff, self.max_backoff, random.Random(name)
                )
        except TimeoutError:
            self.counts["failed: no time left"] += 1
            late = f"no time left: no answer within the {self.max_seconds:g} s of the call"
            return JudgeAnswer(tokens=usage.total(), failure=late)
        except FailedTry as failure:
            return JudgeAnswer(tokens=usage.total(), failure=f"{failure.kind}: {failure}")
        if file is not None:  # whole files only: several processes may write the same verdict
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as temporary:
                temporary.write(msgspec.json.encode({"text": text}))
            os.replace(temporary.name, file)
        return JudgeAnswer(value, usage.total(), seconds)

    async def _request(self, client: httpx.AsyncClient, body: bytes, usage: Counter[str]) -> str:
        """Return the text of a completion, and count its tokens."""
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        status, wait, content = await post(client, url, body, self.timeout, MOST_BYTES)
        if status != 200:
            text, key = content[:2000].decode(errors="replace"), self._key()
            message = f"status {status}: {printable(text.replace(key, '***') if key else text, 500)}"
            if status in PERMANENT:
                raise JudgeError(f"judge {self.model} at {self.base_url}: {message}")
            raise FailedTry(f"status {status}", message, wait, again=status >= 500 or status in TEMPORARY)
        try:
            completion = msgspec.json.decode(content, type=_Completion)
            choice = completion.choices[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, RecursionError):
            raise FailedTry("not a completion", "the answer holds no chat completion") from None
        if completion.usage is not None:
            used = Counter(msgspec.structs.asdict(completion.usage))
            usage.update(used)
            self.counts.update(used)
        text = choice.message.content or ""
        refused = choice.message.refusal or choice.finish_reason == "content_filter"
        for is_so, kind, message in (
            (refused, "refusal", f"the judge refused: {str(choice.message.refusal)[:200]}"),
            (choice.finish_reason == "length", "cut", f"the answer is longer than max_tokens {self.max_tokens}"),
            (not text.strip(), "empty", "the answer is empty"),
        ):
            if is_so:
                raise FailedTry(kind, message)
        return text
