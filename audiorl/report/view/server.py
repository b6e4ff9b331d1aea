"""The server of `audiorl view`: this machine only, with a token. It writes labels, and sounds to a temporary folder.

The printed address holds the token; the first request with it gets a cookie, which all others need. Requests for any
host name but this machine's are refused, so that no other site can reach the server through a name of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import secrets
import socket
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, StreamingResponse
from msgspec import Struct
from starlette.requests import ClientDisconnect

from audiorl import __version__
from audiorl.audio import AudioClip, AudioError, seconds, write_wav
from audiorl.data.schema import check as check_body
from audiorl.report.charts import is_control, metric_names, offsets, with_evaluations
from audiorl.report.kit import ASSETS
from audiorl.report.run import checked_rows
from audiorl.report.summary import seed_folders
from audiorl.report.view import fragments
from audiorl.report.view.index import NUMBERS, ORDERS, TEXTS, FollowedRun, RolloutIndex, RolloutPlace, names_of
from audiorl.report.view.labels import LabelFile, LabelQuestion, Mode, next_question
from audiorl.report.view.sound import FRAMES, Sound

HOST = "127.0.0.1"
NAMES_OF_HOST = ("127.0.0.1", "localhost")
Edit = Callable[[Path, AudioClip, Sequence[str], str, str], AudioClip]
"""Changes a sound by the flow of a run folder: (run, sound, regions, instruction, thought) -> sound with samples."""
POLL_SECONDS = 0.7
MOST_BYTES = 2**16
"""Of a request's body: a label is short."""
MOST_SOUND = 2**26
"""Bytes of a sound that is sent to be edited."""
MOST_SOUNDS = 100
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass
class RunsView:
    """Runs that are looked at, and everything that was read of them so far."""

    runs: list[FollowedRun]
    index: RolloutIndex
    labels: LabelFile | None = None
    sound: Sound = field(default_factory=Sound)
    edit: Edit | None = None
    version: int = 0
    """Grows whenever something new was read."""
    stop: threading.Event = field(default_factory=threading.Event)
    editing: threading.Lock = field(default_factory=threading.Lock)
    made: tempfile.TemporaryDirectory[str] = field(default_factory=partial(tempfile.TemporaryDirectory, "audiorl-view"))
    """Sounds that were sent or made here; it goes with the view."""

    def poll(self) -> None:
        """Read what the runs have written since the last call."""
        for number, run in enumerate(self.runs):
            metrics = run.metrics.poll()
            if self.index.update(number) or metrics:
                self.version += 1

    def follow(self) -> None:
        """Poll until `stop` is set; runs in a thread."""
        with suppress(sqlite3.ProgrammingError):  # closed while it was read
            self.poll()
            while not self.stop.wait(POLL_SECONDS):
                self.poll()

    def state(self) -> dict[str, Any]:
        """Return what the page shows around its content."""
        problems = [run.metrics.problem for run in self.runs if run.metrics.problem] + self.index.problems()
        problems += [f"{run.path}: the run folder was deleted" for run in self.runs if not run.path.is_dir()]
        values = {name: sorted(texts) for name, texts in self.index.values.items()}
        return {
            "runs": [
                {
                    **{"name": run.name, "path": str(run.path), "recipe": run.recipe, "live": run.is_live},
                    **{"deleted": not run.path.is_dir(), "epoch": run.metrics.epoch, "lines": len(run.metrics.rows)},
                    **{"rollouts": self.index.count(number), "evaluations": run.evaluations()},
                    "edits": self.edit is not None and run.is_flow,
                }
                for number, run in enumerate(self.runs)
            ],
            "problems": problems,
            "fields": {"numbers": NUMBERS, "texts": TEXTS, "parts": values["parts"]},
            "orders": list(ORDERS),
            "changes": fragments.CHANGES,
            "label": None if self.labels is None else self.labels.mode,
            "task": values["task"],
            "phase": values["phase"],
            "step": self.index.steps(),
        }


def open_view(
    folders: Sequence[Path],
    labels: Path | None = None,
    mode: Mode = "pairs",
    file: str | Path = ":memory:",
    edit: Edit | None = None,
) -> RunsView:
    """Open run folders, and all of folders of seeds. `file`: of RolloutIndex; without `edit` no sounds are edited.

    Raises ValueError for a folder that is none, and for a bad file of labels.
    """
    paths = [path for folder in folders for path in seed_folders(folder) or [folder]]
    runs = [FollowedRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
    return RunsView(runs, RolloutIndex(runs, file), None if labels is None else LabelFile(labels, mode), edit=edit)


def make_app(view: RunsView, token: str, cookie: str = "audiorl_view") -> FastAPI:
    """Return the server as an ASGI application."""
    app = FastAPI(title="audiorl view", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    questions: dict[str, LabelQuestion] = {}
    rng = random.Random()

    def find_run(number: int) -> FollowedRun:
        if not 0 <= number < len(view.runs):
            raise LookupError("no such run")
        return view.runs[number]

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refusal(request, token, cookie)
        if refusal is not None:
            return refusal
        response = await call_next(request)
        response.headers.update({**_HEADERS, **dict(response.headers)})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        """Answer bad input by a 400, what is not there any more or cannot be decoded by a 404, with one line."""
        gone = isinstance(error, LookupError | OSError | AudioError)
        line = " ".join(str(error).split())
        return Response(line, 404 if gone else 400, media_type="text/plain; charset=utf-8")

    # Numbers and searches that SQLite does not take, JSON too deep, and clients that hang up, are bad requests as well.
    for kind in (ValueError, LookupError, OSError, OverflowError, RecursionError, sqlite3.OperationalError,
                 ClientDisconnect):  # fmt: skip
        app.add_exception_handler(kind, failed)

    @app.get("/")
    def page() -> Response:
        return FileResponse(ASSETS / "index.html")

    @app.get("/assets/{name}")
    def asset(name: str) -> Response:
        if name not in {file.name for file in ASSETS.iterdir()}:
            raise LookupError(name)
        return FileResponse(ASSETS / name)

    @app.get("/state")
    def state() -> Any:
        return view.state()

    @app.get("/events")
    async def events(request: Request) -> Response:
        return StreamingResponse(_events(view, request), media_type="text/event-stream")

    @app.get("/metrics/{number}")
    def metrics(number: int, epoch: int = -1, since: int = 0) -> Any:
        """Return the lines of a run's metrics from `since` on, all of them when the file has become another one.

        `added` has its evaluations as such lines (`with_evaluations`), all of them each time.
        """
        run = find_run(number)
        current, rows = run.metrics.epoch, run.metrics.rows
        start = since if epoch == current else 0
        shift, whole = offsets(rows), with_evaluations(rows, run.evals())
        controls = [phase for phase in shift if is_control(phase)]
        more = {"names": metric_names(whole), "offsets": shift, "controls": controls, "added": whole[len(rows) :]}
        return {"epoch": current, "start": start, "rows": rows[start:], **more}

    @app.get("/results")
    def results(runs: str) -> Response:
        chosen = set(runs.split(","))
        return HTMLResponse(fragments.results([(n, run) for n, run in enumerate(view.runs) if str(n) in chosen]))

    @app.get("/rollouts")
    def rollouts(
        q: str = "",
        order: str = "newest",
        page: int = 0,
        runs: str | None = None,
        step: int | None = None,
        task: str | None = None,
        phase: str | None = None,
    ) -> Response:
        given = (("step", step), ("task", task), ("phase", phase))
        equal = {k: "" if v == "(none)" else v for k, v in given if v is not None}
        numbers = None if runs is None else [int(n) for n in runs.split(",") if n]
        matches = view.index.search(q, order=order, page=max(0, page), runs=numbers, equal=equal)
        return HTMLResponse(fragments.rollout_list(view.index, matches, max(0, page), view.sound))

    @app.get("/rollouts/{run}/{step}/{row}")
    def rollout(run: int, step: int, row: int) -> Response:
        find_run(run)
        return HTMLResponse(fragments.rollout_page(view.index, RolloutPlace(run, step, row), view.sound))

    @app.get("/evaluations")
    def evaluations(left: str, right: str, show: str = "changed", page: int = 0) -> Response:
        sides = []
        for number, _, name in (left.partition("/"), right.partition("/")):
            run = find_run(int(number) if number.isdigit() else -1)
            if name not in run.evaluations():
                raise LookupError(f"{run.name} has no evaluation {name!r}")
            sides.append((run, name))
        return HTMLResponse(fragments.evaluation_page(sides[0], sides[1], show, max(0, page), view.sound))

    @app.get("/audio/{key}")
    def audio(key: str, request: Request) -> Response:
        mime, content = view.sound.content(key)
        return _part(content, mime, request.headers.get("Range", ""))

    @app.get("/spectrogram/{key}")
    def spectrogram(key: str) -> Response:
        return Response(view.sound.spectrogram(key), media_type="image/png", headers={"Cache-Control": "private"})

    @app.get("/frames/{key}")
    def frames(key: str) -> Response:
        return Response(view.sound.frames(key), media_type="image/png", headers={"Cache-Control": "private"})

    @app.get("/question")
    def question() -> Any:
        if view.labels is None:
            raise LookupError("start the view with --labels FILE to label")
        given = next_question(view.index, view.labels, rng)
        status = {"mode": view.labels.mode, "count": view.labels.count, "problem": view.labels.problem}
        if given is None:
            return {**status, "id": None, "html": ""}
        key = secrets.token_urlsafe(8)
        questions[key] = given
        html = fragments.ask(given.rows, view.runs[given.places[0].run].path, view.sound)
        return {**status, "id": key, "html": html}

    @app.post("/labels")
    async def label(request: Request) -> Any:
        if view.labels is None:
            raise LookupError("start the view with --labels FILE to label")
        body = json.loads(await _body(request, MOST_BYTES))
        if not isinstance(body, dict) or not isinstance(body.get("id"), str) or body["id"] not in questions:
            raise ValueError("this question is not open any more; ask for the next one")
        await asyncio.to_thread(view.labels.add, questions[body["id"]], str(body.get("verdict")), view.index)
        questions.pop(body["id"], None)
        return {"count": view.labels.count}

    def named(path: Path) -> dict[str, Any]:
        clip = AudioClip(path=str(path))
        return {"source": view.sound.link(clip), "name": path.name, "seconds": seconds(clip)}

    @app.get("/sounds/{number}")
    def sounds(number: int) -> Any:
        """Return the sounds that a run has made of held-out rows, those of the last evaluation first; of a scene with a
        video its frames and events, by which objects in it are found."""
        run = find_run(number)
        found: list[dict[str, Any]] = []
        for name in reversed(run.evaluations()):
            rows = checked_rows(run.path / f"eval/{name}.jsonl")
            scenes = {(row.get("spoken_audio") or {}).get("path"): row.get("scene") for row in rows}
            for file in sorted(run.path.glob(f"eval/{name}/*.wav"))[: MOST_SOUNDS - len(found)]:
                sound = {**named(file), "name": f"{name}/{file.name}"}
                scene = scenes.get(str(file.relative_to(run.path)))
                if scene is not None:
                    film = view.sound.film(Path(scene["video"]))
                    sound |= {"film": film, "shown": FRAMES, "events": scene["events"]}
                found.append(sound)
        return found

    @app.post("/sounds")
    async def add_sound(request: Request, name: str) -> Any:
        content = await _body(request, MOST_SOUND)
        suffix = re.sub(r"[^.\w]", "", Path(name).suffix)[:8]
        path = Path(view.made.name) / f"{secrets.token_hex(8)}{suffix}"
        path.write_bytes(content)
        return {**named(path), "name": name}

    @app.post("/edits")
    async def make_edit(request: Request) -> Any:
        if view.edit is None:
            raise LookupError("this view edits no sounds")
        body = check_body(json.loads(await _body(request, MOST_BYTES)), EditRequest)
        run, clip = find_run(body.run), view.sound.clip(body.source.removeprefix("audio/"))

        def make() -> AudioClip:
            assert view.edit is not None
            with view.editing:
                return view.edit(run.path, clip, body.regions, body.text.strip(), body.thought.strip())

        sound = await asyncio.to_thread(make)
        assert sound.array is not None and sound.sample_rate is not None
        path = Path(view.made.name) / f"{secrets.token_hex(8)}.wav"
        write_wav(path, sound.array, sound.sample_rate, "FLOAT")
        return {**named(path), "name": body.text or body.thought}

    return app


class EditRequest(Struct):
    """What the page of edits asks for."""

    run: int
    source: str
    regions: list[str] = []
    text: str = ""
    thought: str = ""


async def _body(request: Request, most: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise ValueError(f"the request has more than {most} bytes")
    return bytes(content)


def _refusal(request: Request, token: str, cookie: str) -> Response | None:
    """Return the answer to a request that may not be served, or that brings the token; None for all others."""
    if request.headers.get("Host", "").partition(":")[0] not in NAMES_OF_HOST:
        return Response("this server answers requests for 127.0.0.1 and localhost only", 403)
    origin = request.headers.get("Origin")
    if request.method != "GET" and origin and origin.partition("://")[2] != request.headers.get("Host"):
        return Response("refused: a request from another site", 403)
    sent = request.query_params.get("token", "")
    if request.url.path == "/" and secrets.compare_digest(sent.encode(), token.encode()):
        redirect = RedirectResponse("/", 303)
        redirect.set_cookie(cookie, token, httponly=True, samesite="strict")
        return redirect
    if not secrets.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
        return Response("open the address that audiorl view has printed; it holds the token", 401)
    return None


async def _events(view: RunsView, request: Request) -> AsyncIterator[str]:
    """Server-sent events: the state at once, then whenever something new was read or a run has become idle."""
    sent = ""
    while not view.stop.is_set() and not await request.is_disconnected():
        state = json.dumps(await asyncio.to_thread(view.state))
        yield ": still there\n\n" if state == sent else f"data: {state}\n\n"
        sent = state
        for _ in range(20):
            version = view.version
            await asyncio.sleep(POLL_SECONDS)
            if view.version != version or view.stop.is_set():
                break


def _part(content: bytes, mime: str, byte_range: str) -> Response:
    """Return the content, or the range of bytes that a player asks for when it jumps."""
    start, _, end = byte_range.removeprefix("bytes=").partition("-")
    headers = {"Accept-Ranges": "bytes"}
    if not byte_range.startswith("bytes=") or not start.isdigit() or int(start) >= len(content):
        return Response(content, media_type=mime, headers=headers)
    last = min(int(end) if end.isdigit() else len(content) - 1, len(content) - 1)
    headers["Content-Range"] = f"bytes {int(start)}-{last}/{len(content)}"
    return Response(content[int(start) : last + 1], 206, headers, mime)


def serve(folders: Sequence[Path], port: int, labels: Path | None, mode: Mode, edit: Edit | None = None) -> None:
    """Print the address and serve until interrupted. ValueError or OSError for what is wrong with the options."""
    if not 0 <= port < 2**16:
        raise ValueError(f"view: --port {port}: not a port; give 0 (any free one) to 65535")
    with tempfile.TemporaryDirectory(prefix="audiorl-view-") as folder:
        view = open_view(folders, labels, mode, Path(folder) / "index.sqlite", edit)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
            listener.listen()
        except OSError as error:  # one clear error before the address is printed
            listener.close()
            raise OSError(f"view: cannot listen on {HOST}:{port} ({error.strerror}); choose another --port") from None
        port, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        print(f"open http://{HOST}:{port}/?token={token}", flush=True)
        thread = threading.Thread(target=view.follow, daemon=True)
        thread.start()
        # A cookie belongs to all ports of a host, so that each view needs a name of its own.
        app = make_app(view, token, f"audiorl_view_{port}")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        try:
            with suppress(KeyboardInterrupt):  # how one stops it
                uvicorn.Server(config).run(sockets=[listener])
        finally:
            view.stop.set()
            thread.join(5)
            view.index.close()
