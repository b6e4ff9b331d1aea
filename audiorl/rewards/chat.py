"""Questions to a chat model behind an OpenAI-compatible endpoint: concurrency, retries, a cache on disk, counts.

`OpenAIJudge` and `PairwiseJudge` (judge.py) ask through it. Needs the extra `judge`: openai and tenacity.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from audiorl.rewards.concurrency import (
    FailedTry,
    checked_token,
    gather_all,
    is_loopback,
    printable,
    retry_after,
    run_async,
    semaphore_for,
)

log = logging.getLogger(__name__)
PERMANENT = (401, 403, 404)
"""Statuses that no other question would get rid of: they stop the run."""
TEMPORARY = (408, 409, 425, 429)
"""Statuses below 500 that are worth another try."""


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
    """The value in an answer's text; raises BadAnswer."""
    seed: int = 0
    """Number of the vote."""


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer to a JudgeQuestion, made by `ChatEndpoint.ask`."""

    value: Any
    """What `JudgeQuestion.read` returned."""
    tokens: int = 0
    """Tokens of the prompt and of the answer that this call used, over all tries; 0 from the cache."""
    seconds: float = 0.0
    """Latency of the request that succeeded; 0 from the cache."""


@dataclass(frozen=True)
class JudgeFailure:
    """A JudgeQuestion without an answer, made by `ChatEndpoint.ask`."""

    kind: str
    """Such as "timeout", "status 500", "refusal", "not JSON", "another sample"."""
    message: str
    """The last try's message."""
    tokens: int = 0
    """Tokens that this call used for answers that were no verdicts."""


Vote = JudgeAnswer | JudgeFailure


class _Cached(msgspec.Struct):
    """A file of the cache."""

    text: str


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
    """How the server is told to answer in JSON: by schema, by JSON mode, or by the prompt alone. Answers are checked
    in any case."""
    concurrency: int = 16
    """Most requests that are open at a time."""
    timeout: float = 60.0
    """Seconds after which a try fails."""
    tries: int = 4
    """Tries for each request. Worth another are: no connection, a timeout, status 408, 429, 5xx, an answer that is no
    verdict."""
    backoff: float = 0.5
    """Seconds before the second try; doubled for each further one, times a random factor."""
    max_backoff: float = 30.0
    """Most seconds between two tries."""
    max_seconds: float = 600.0
    """Seconds for all requests of one call of the reward; what is unanswered then is a failure."""
    cache: str | None = None
    """Folder of verdicts, which later calls and other processes use. The key is the whole request: model, prompt, audio
    content, schema, temperature, number of the vote. None: no cache."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of a request, which replace those above; None leaves a field out. For models that want others:
    {"max_tokens": None, "max_completion_tokens": 512}."""
    counts: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    """Since the endpoint was made: requests, answers from the cache, failed tries by kind, tokens."""

    def __post_init__(self) -> None:
        check_address(self.base_url)
        if self.answer_format not in ("json_schema", "json_object", "text"):
            raise ValueError(
                f"ChatEndpoint: answer_format {self.answer_format!r} is not one of 'json_schema', 'json_object', 'text'"
            )
        for name in ("concurrency", "tries", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"ChatEndpoint: {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("timeout", "max_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"ChatEndpoint: {name} is {getattr(self, name)}; it must be seconds, more than 0")
        for name in ("temperature", "backoff", "max_backoff"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"ChatEndpoint: {name} is {getattr(self, name)}; it must be 0 or more")

    def ask(self, questions: Sequence[JudgeQuestion]) -> list[Vote]:
        """Return a JudgeAnswer or a JudgeFailure for each question, in order.

        Raises JudgeError where no other question would be answered either (wrong key, no such model), and ValueError
        where openai or tenacity is not installed or the key is missing.
        """
        try:
            import openai  # noqa: F401
            import tenacity  # noqa: F401
        except ModuleNotFoundError as error:
            raise ValueError(f"ChatEndpoint: needs {error.name}: pip install 'audiorl[judge]'") from error
        before = self.counts.copy()
        answers = run_async(self._ask_all(questions))
        self._report(len(questions), self.counts - before)
        return answers

    def _report(self, questions: int, counts: Counter[str]) -> None:
        failed = {name.removeprefix("failed: "): n for name, n in counts.items() if name.startswith("failed: ")}
        level = logging.WARNING if failed else logging.INFO
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(failed.items())) or "none"
        log.log(
            level,
            "judge %s: %d questions, %d from the cache, %d requests, failed tries: %s; %d tokens read, %d written",
            self.model,
            questions,
            counts["cached"],
            counts["requests"],
            kinds,
            counts["prompt_tokens"],
            counts["completion_tokens"],
        )

    async def _ask_all(self, questions: Sequence[JudgeQuestion]) -> list[Vote]:
        import openai

        secure = urlsplit(self.base_url).scheme == "https"
        http = openai.DefaultAsyncHttpxClient(trust_env=secure, follow_redirects=False)
        client = openai.AsyncOpenAI(
            api_key=self._key(), base_url=self.base_url, timeout=self.timeout, max_retries=0, http_client=http
        )
        deadline = time.monotonic() + self.max_seconds
        keys = [_key_of(self._body(question), question.seed) for question in questions]  # with the audio's content
        different = dict(zip(keys, questions, strict=True))  # equal answers of a group are judged once
        async with client:
            answers = await gather_all(self._ask(client, deadline, q, key) for key, q in different.items())
        by_key = dict(zip(different, answers, strict=True))
        return [by_key[key] if keys.index(key) == i else _without_cost(by_key[key]) for i, key in enumerate(keys)]

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and not is_loopback(urlsplit(self.base_url).hostname or ""):
            raise ValueError(
                f"ChatEndpoint: {self.base_url} needs a key; set the environment variable {self.api_key_env}"
            )
        return checked_token(key, f"environment variable {self.api_key_env}") if key else "none"

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(question.messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": question.seed,
        }
        if self.answer_format == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.answer_format == "json_object":
            body["response_format"] = {"type": "json_object"}
        return {name: value for name, value in (body | dict(self.fields)).items() if value is not None}

    async def _ask(self, client: Any, deadline: float, question: JudgeQuestion, key: str) -> Vote:
        import tenacity

        file = None if self.cache is None else Path(self.cache).expanduser() / key[:2] / f"{key}.json"
        cached = None if file is None else _read_cached(file)
        if cached is not None:
            try:
                value = question.read(cached)
            except BadAnswer:
                log.warning("%s: not a verdict; asking again", file)
            else:
                self.counts["cached"] += 1
                return JudgeAnswer(value)
        usage: Counter[str] = Counter()
        backoff = tenacity.wait_random_exponential(multiplier=self.backoff, max=self.max_backoff)

        def wait(state: Any) -> float:
            failure = state.outcome.exception()
            return max(backoff(state), min(getattr(failure, "wait", 0.0), self.max_backoff))

        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.tries),
            wait=wait,
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, FailedTry) and e.again),
            reraise=True,
        )
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                async for attempt in retrying:
                    with attempt:
                        value, text, seconds = await self._try(client, question, usage)
        except TimeoutError:
            message = f"no answer within the {self.max_seconds:g} s of the call"
            self.counts["failed: no time left"] += 1
            return JudgeFailure("no time left", message, usage.total())
        except FailedTry as failure:
            return JudgeFailure(failure.kind, str(failure), usage.total())
        if file is not None:
            _write_cached(file, text)
        return JudgeAnswer(value, usage.total(), seconds)

    async def _try(self, client: Any, question: JudgeQuestion, usage: Counter[str]) -> tuple[Any, str, float]:
        """Return (value, text, seconds) of one request, and count it."""
        async with semaphore_for(self, self.concurrency):
            begin = time.monotonic()
            self.counts["requests"] += 1
            try:
                text = await self._request(client, self._body(question), usage)
                return question.read(text), text, time.monotonic() - begin
            except FailedTry as failure:
                self.counts[f"failed: {failure.kind}"] += 1
                raise

    async def _request(self, client: Any, body: Mapping[str, Any], usage: Counter[str]) -> str:
        import openai

        try:
            async with asyncio.timeout(self.timeout):
                answer = await client.chat.completions.create(**body)
        except (TimeoutError, openai.APITimeoutError):
            raise FailedTry("timeout", f"no answer within {self.timeout:g} s") from None
        except openai.APIStatusError as error:
            status, message = error.status_code, self._without_key(str(error))
            if status in PERMANENT:
                raise JudgeError(f"judge {self.model} at {self.base_url}: {message}") from None
            again = status >= 500 or status in TEMPORARY
            raise FailedTry(
                f"status {status}", message, retry_after(error.response.headers.get("retry-after")), again
            ) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise FailedTry("connection", self._without_key(f"{type(cause).__name__}: {cause}")) from None
        except (openai.APIError, ValueError, TypeError, AttributeError) as error:  # the client reads what it gets
            raise FailedTry("not a completion", self._without_key(f"{type(error).__name__}: {error}")) from None
        try:
            counts = getattr(answer, "usage", None)
            for name in ("prompt_tokens", "completion_tokens"):
                count = int(getattr(counts, name, None) or 0)
                usage[name] += count
                self.counts[name] += count
            choice = answer.choices[0]
            text, refusal, reason = choice.message.content, choice.message.refusal, choice.finish_reason
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError):
            raise FailedTry("not a completion", "the answer holds no chat completion") from None
        if refusal or reason == "content_filter":
            raise FailedTry("refusal", f"the judge refused: {str(refusal)[:200]}")
        if reason == "length":
            raise FailedTry("cut", f"the answer is longer than max_tokens {self.max_tokens}")
        if not isinstance(text, str) or not text.strip():
            raise FailedTry("empty", "the answer is empty")
        return text

    def _without_key(self, message: str) -> str:
        """Return a message without the key, which some servers quote, on one line, without control characters."""
        key = os.environ.get(self.api_key_env, "").strip()
        message = message.replace(key, "***") if key else message
        return printable(message, 500)


def _key_of(body: Mapping[str, Any], vote: int) -> str:
    """Equal for equal requests of one vote; `fields` may leave the seed out of the body."""
    return hashlib.sha256(json.dumps([body, vote], sort_keys=True).encode()).hexdigest()


def _without_cost(answer: Vote) -> Vote:
    """For a question that was asked once for several rollouts: the first of them has its cost."""
    return replace(answer, tokens=0) if isinstance(answer, JudgeFailure) else JudgeAnswer(answer.value)


def check_address(url: str) -> None:
    """Raise ValueError unless `url` is https, or http on this machine; without user, query or fragment."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"ChatEndpoint: base_url {url!r} is not an address like http://127.0.0.1:8000/v1")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(
            f"ChatEndpoint: base_url {url!r} would send prompts and the key in plain text to another machine; "
            "give its https address"
        )


def _read_cached(file: Path) -> str | None:
    """Return the text of a cached verdict; None where there is none or where the file is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Cached).text
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        log.warning("%s: damaged; asking again", file)
        return None


def _write_cached(file: Path, text: str) -> None:
    """Write whole files only: several processes may write the same verdict."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as temporary:
        temporary.write(msgspec.json.encode(_Cached(text)))
    os.replace(temporary.name, file)
