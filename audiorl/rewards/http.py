"""A request to a server and its repetition, for judges and for reward servers."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class FailedTry(Exception):
    """A failed try of a request. `wait`: seconds from the server's Retry-After; `again`: another try may help."""

    def __init__(self, kind: str, message: str, wait: float = 0.0, again: bool = True):
        super().__init__(message)
        self.kind, self.wait, self.again = kind, wait, again


async def post(
    client: httpx.AsyncClient, url: str, document: bytes, seconds: float, most_bytes: int
) -> tuple[int, float, bytes]:
    """Return (status, seconds of Retry-After, body). A body that is compressed or too long is a FailedTry, too."""
    import httpx

    body = bytearray()
    try:
        async with asyncio.timeout(seconds), client.stream("POST", url, content=document) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise FailedTry("answer", "the answer is compressed, which was not asked for")
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > most_bytes:
                    raise FailedTry("answer", f"the answer is longer than {most_bytes} bytes")
    except TimeoutError:
        raise FailedTry("timeout", f"no answer within {seconds:g} s") from None
    except httpx.RequestError as error:
        raise FailedTry("connection", f"{type(error).__name__}: {error}") from None
    after = response.headers.get("Retry-After", "")  # a date is no wait
    wait = float(after) if after.isascii() and after.isdigit() and len(after) < 10 else 0.0
    return response.status_code, wait, bytes(body)


async def retried(
    attempt: Callable[[], Awaitable[T]], tries: int, backoff: float, max_backoff: float, rng: random.Random
) -> T:
    """Return what `attempt` returns in the first try that does not fail, with growing pauses between tries."""
    for number in range(tries):
        try:
            return await attempt()
        except FailedTry as failure:
            if number == tries - 1 or not failure.again:
                raise
            pause = min(backoff * 2**number, max_backoff) * rng.uniform(0.5, 1.0)
            await asyncio.sleep(max(pause, min(failure.wait, max_backoff)))
    raise AssertionError("tries is at least 1")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can be meant by the host of an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_token(token: str, where: str) -> str:
    """Return the token, if it fits into an HTTP header; errors never show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where}: not a token; give printable ASCII characters without spaces")
    return token


def printable(message: object, most: int) -> str:
    """Return a server's message on one line, without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(message)[:most])
