"""Reward servers that fail, are late, answer nonsense or are killed: every score is right, or there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from audiorl.rewards import RemoteReward, RewardServerError, load_reward
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample, Segment
from tests.support.reward_servers import Faulty, Process, app_of, serving
from tests.support.training_runs import CONFIG, one_thread, rows, train

__all__ = ["one_thread"]

EVEN = """
def reward(rollout):
    ids = rollout.segments[0].ids
    return float((ids % 2 == 0).float().mean())
"""
COUNTED = """
import time
from pathlib import Path
from audiorl.types import Score

LOG, STUCK = Path(__file__).with_suffix(".log"), Path(__file__).with_suffix(".stuck")

def reward(rollouts):
    # Keeps what it was asked for; gets stuck in the fifth call, where the test says so.
    with LOG.open("a") as log:
        log.write(" ".join(r.text for r in rollouts) + "\\n")
    while STUCK.exists() and len(LOG.read_text().splitlines()) >= 5:
        time.sleep(0.01)
    return [Score(float(r.text) / 7) for r in rollouts]
"""


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUDIORL_REWARD_TOKEN", raising=False)


@pytest.fixture
def even(tmp_path: Path) -> Path:
    file = tmp_path / "even.py"
    file.write_text(EVEN)
    return file


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    file = tmp_path / "counted.py"
    file.write_text(COUNTED)
    return file


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Forty that are told apart by their text."""
    sample = Sample("q", ())
    return [
        Rollout(sample, (Segment(torch.zeros(0).long(), torch.tensor([i]), torch.zeros(1), str(i)),), "g", i)
        for i in range(40)
    ]


@pytest.fixture
def server(counted: Path) -> Iterator[Process]:
    process = Process(counted)
    yield process
    process.close()


def test_a_run_with_a_server_that_fails_is_the_run_without(samples: list[Sample], even: Path, tmp_path: Path) -> None:
    """30% of calls fail in nine ways, 30% come later than the client waits: same weights, metrics and rollouts."""
    expected = train(Run.create(tmp_path / "here", "test", [], CONFIG), samples, load_reward(even))  # type: ignore[arg-type]
    app = Faulty(app_of(even), fail=0.3, late=0.3, delay=1.0)
    with serving(app) as url:
        reward = RemoteReward(url, batch_size=1, timeout=0.5, tries=30, backoff=0.01, max_backoff=0.02)
        found = train(Run.create(tmp_path / "there", "test", [], CONFIG), samples, reward)  # type: ignore[arg-type]
    assert app.calls["right"] >= 24 and app.calls["late"] > 5 and len(app.calls) > 6, app.calls
    assert all(torch.equal(found[n], w) for n, w in expected.items())
    assert rows(tmp_path / "there") == rows(tmp_path / "here")
    here, there = (sorted((tmp_path / run / "rollouts").iterdir()) for run in ("here", "there"))
    assert here and [p.name for p in here] == [p.name for p in there]
    for mine, other in zip(here, there, strict=True):
        assert mine.read_text() == other.read_text()


def test_a_server_that_is_killed_and_started_again(server: Process, counted: Path, rollouts: list[Rollout]) -> None:
    """SIGKILL in the middle of a call: it waits for the server to come back and finishes with the right scores."""
    log, stuck = counted.with_suffix(".log"), counted.with_suffix(".stuck")
    stuck.touch()

    def kill() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 5:
            time.sleep(0.01)
        server.kill()
        stuck.unlink()
        server.start()

    assassin = threading.Thread(target=kill)
    assassin.start()
    try:
        reward = RemoteReward(server.url, batch_size=4, concurrency=2, tries=1000, backoff=0.05, max_backoff=0.2)
        assert [s.total for s in reward(rollouts)] == [i / 7 for i in range(40)]
    finally:
        assassin.join()
    calls = log.read_text().splitlines()
    assert len(calls) > 10 and len(set(calls)) == 10  # the one that was under way was asked for again
    # One that does not come back is an error within its bound, which names it.
    server.kill()
    begin = time.monotonic()
    with pytest.raises(
        RewardServerError, match=rf"{server.url}: 40 rollouts starting with 'q' .* in 3 tries .*ConnectError"
    ):
        RemoteReward(server.url, tries=3, backoff=0.05)(rollouts)
    assert time.monotonic() - begin < 10
