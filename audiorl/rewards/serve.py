"""audiorl rewards serve FILE: the reward that a Python file defines, for other processes and machines.

audiorl rewards serve my_reward.py                                        # this machine only: http://127.0.0.1:8300
audiorl rewards serve judge.py --host 0.0.0.0 --token-file token.txt      # others too; they must send the token
audiorl rewards serve judge.py --audio-root /data/audio                   # may read audio there by path

POST /v1/scores takes rollouts and returns their scores in order, in the format of `audiorl.data.serialization`.
GET /health returns whether the server is ready and, with the token, which reward it serves. The client is
`RemoteReward`.

Errors are {"error": message}: 401 wrong or missing token, 403 audio outside the roots, 408 the body did not arrive in
time, 413 too many bytes or rollouts, 422 a malformed document (naming the field), 500 the reward raised, 503 the queue
is full (with Retry-After), 504 the reward takes too long. "retry": false means that a repetition is of no use.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from audiorl import __version__
from audiorl.config import RewardServerConfig
from audiorl.data.serialization import (
    VERSION,
    PathNotAllowed,
    SerializationError,
    deserialize_rollouts,
    digest,
    serialize_scores,
)
from audiorl.rewards.combine import check_scores
from audiorl.rewards.concurrency import run_async
from audiorl.rewards.files import FileReward, load_reward
from audiorl.rewards.http import checked_token, is_loopback
from audiorl.rewards.remote import TOKEN_ENV

BODY_SECONDS = 120.0
"""Seconds within which a request's body must arrive."""
REFUSED_BODY_SECONDS = 5.0
"""Seconds for which the body of a refused request is read: clients read the answer only after sending."""
RETRY_SECONDS = 2
STOP_SECONDS = 3
"""Seconds that open requests have after a SIGTERM: a reward may hang, and clients ask again."""
log = logging.getLogger(__name__)


def serve(options: RewardServerConfig) -> None:
    """Serve until interrupted. Raises ValueError or OSError for what is wrong with the options."""
    _check(options)
    given, where = os.environ.get(TOKEN_ENV, ""), f"environment variable {TOKEN_ENV}"
    if options.token_file is not None:
        given, where = options.token_file.read_text(), f"rewards serve: --token-file {options.token_file}"
    token = checked_token(given.strip(), where) if given.strip() or options.token_file else None
    if token is None and not is_loopback(options.host):
        raise ValueError(
            f"rewards serve: --host {options.host} is open to other machines, which needs a token: give --token-file, "
            f"or set {TOKEN_ENV}"
        )
    app = make_app(load_reward(options.file), options, token)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # bound before the address is printed, so that a port in use is one clear error
            listener.bind((options.host, options.port))
            listener.listen()  # from here on connections queue instead of failing
        except OSError as error:
            where = f"{options.host}:{options.port} ({error.strerror})"
            raise OSError(f"rewards serve: cannot listen on {where}; choose another --port") from None
        print(f"serving {options.file} on http://{shown}:{listener.getsockname()[1]}", flush=True)
        with suppress(KeyboardInterrupt):  # how one stops it
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=STOP_SECONDS)
            uvicorn.Server(config).run(sockets=[listener])


def _check(options: RewardServerConfig) -> None:
    for name, least in (("max_batch", 1), ("max_bytes", 1), ("concurrency", 1), ("max_queue", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"rewards serve: --{name.replace('_', '-')} must be at least {least}")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"rewards serve: --port {options.port}: not a port; give 0 (any free one) to 65535")
    if not 0 < options.max_seconds < float("inf"):
        raise ValueError("rewards serve: --max-seconds must be greater than 0")
    for root in options.audio_root:
        if not root.is_dir():
            raise ValueError(f"rewards serve: --audio-root {root}: no such folder")


class Refused(Exception):
    """A request that ends with a status and a message."""

    def __init__(self, status: int, message: str, **more: Any):
        super().__init__(message)
        self.status, self.more = status, more

    def response(self) -> Response:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_SECONDS)}}
        return _json({"error": str(self), **self.more}, self.status, headers.get(self.status))


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def make_app(served: FileReward, options: RewardServerConfig, token: str | None) -> FastAPI:
    """Return the server as an ASGI application."""
    app = FastAPI(title="audiorl reward", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    identity = f"{Path(served.path).name} {hashlib.sha256(Path(served.path).read_bytes()).hexdigest()[:16]}"
    free = asyncio.Semaphore(options.concurrency)
    most_open = options.concurrency + options.max_queue
    open_requests = 0

    def has_token(request: Request) -> bool:
        sent = request.headers.get("Authorization", "").encode()
        return token is None or secrets.compare_digest(sent, f"Bearer {token}".encode())  # in constant time

    @app.get("/health")
    async def health(request: Request) -> Response:
        details = {"file": identity, "reward": repr(served.reward)} if has_token(request) else {}
        return _json({"ready": True, "version": __version__, "format": VERSION, **details})

    async def answer(request: Request) -> Response:
        if open_requests > most_open:
            await _discard(request)
            raise Refused(503, f"busy: {most_open} requests are open already")
        body = await _read(request, options.max_bytes)
        await free.acquire()
        if await request.is_disconnected():
            free.release()
            raise ClientDisconnect  # the client gave up and will send the request again
        scores = await _in_thread(free.release, options.max_seconds, partial(_scored, served, options, body))
        return _json({"version": VERSION, "request": digest(body), "reward": identity, "scores": scores})

    @app.post("/v1/scores")
    async def scores(request: Request) -> Response:
        nonlocal open_requests
        if not has_token(request):
            await _discard(request)
            return Refused(401, f"wrong or missing token; set {TOKEN_ENV} to the server's").response()
        open_requests += 1  # counted from the first byte of the body on: bodies take memory
        try:
            return await answer(request)
        except Refused as refused:
            return refused.response()
        except ClientDisconnect:
            return Response(status_code=499)
        except asyncio.CancelledError:
            return Refused(503, "the server is stopping; ask another one").response()
        finally:
            open_requests -= 1

    return app


async def _discard(request: Request) -> None:
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(REFUSED_BODY_SECONDS):
            async for _ in request.stream():
                pass


async def _read(request: Request, limit: int) -> bytes:
    """Return the whole body. Bytes are counted as they arrive, since a declared length may be missing or wrong."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    if size > limit:
        advice = "smaller batches (batch_size), audio by path or none, or start the server with a larger --max-bytes"
        raise Refused(413, f"{size} bytes, at most {limit}; send {advice}")
    return bytes(body)


async def _in_thread(done: Callable[[], object], seconds: float, function: Callable[[], Any]) -> Any:
    """Return the function's result, from a thread; `done` is called in the loop when the thread ends, however late.

    Raises Refused after `seconds`. A thread cannot be stopped, so it goes on; the server's exit does not wait for it.
    """
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        done()
        if not result.done():
            setter(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (result.set_result, function())
        except BaseException as error:
            outcome = (result.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await result
    except TimeoutError:
        raise Refused(504, f"the reward did not return within {seconds:g} s (--max-seconds)") from None


def _scored(served: FileReward, options: RewardServerConfig, body: bytes) -> list[dict[str, Any] | None]:
    """Return the rows of an answer's scores. Raises Refused for a document or a reward that is wrong."""
    try:
        rollouts = deserialize_rollouts(body, options.audio_root)
    except SerializationError as error:
        raise Refused(403 if isinstance(error, PathNotAllowed) else 422, str(error)) from None
    if len(rollouts) > options.max_batch:
        raise Refused(413, f"{len(rollouts)} rollouts, at most {options.max_batch}; send smaller batches (batch_size)")
    try:
        given = served.reward(rollouts)
        if inspect.iscoroutine(given):
            given = run_async(given)
    except Exception as error:
        log.exception("the reward of %s raised", served.path)  # the traceback stays here; the client gets the message
        message = f"reward {served.path!r} raised {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        # A ValueError blames the rollouts, which are the same in the next try.
        raise Refused(500, message, retry=not isinstance(error, ValueError)) from None
    try:
        return serialize_scores(check_scores(served.path, given, rollouts, undefined=True))
    except ValueError as error:
        raise Refused(500, str(error)) from None
