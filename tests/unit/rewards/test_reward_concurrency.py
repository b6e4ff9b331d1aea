"""Rewards that begin with the groups that have ended: the order of events, the same scores, the same errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from audiorl.config import RLConfig, SamplingConfig
from audiorl.errors import RewardError
from audiorl.protocols import Ended, Request, Reward
from audiorl.rewards import JudgeError, RemoteReward, StandardisedSum, WeightedSum, load_reward
from audiorl.rewards.combine import score_rollouts
from audiorl.rewards.concurrency import EarlyScores, begins_early
from audiorl.rewards.files import FunctionReward
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.collect import collect
from audiorl.types import Rollout, Sample, Score, Segment
from tests.conftest import make_omni
from tests.support.chat_servers import ChatServer
from tests.support.reward_servers import serving

SAMPLES = [Sample(name, ()) for name in "abcd"]
CONFIG = RLConfig(prompts_per_step=4, group_size=2)
WAIT = 30.0
"""Seconds after which a test that hangs fails."""


def rollout(request: Request, index: int, length: int = 1) -> Rollout:
    segment = Segment(torch.tensor([1]), torch.arange(length), torch.zeros(length), "x" * length)
    return Rollout(request.sample, (segment,), request.group_id, index)


def groups_of(n: int) -> list[list[Rollout]]:
    """One group a sample, whose answers differ in length."""
    return [[rollout(Request(s, n, group_id=f"0/{k}"), i, k + i) for i in range(n)] for k, s in enumerate(SAMPLES)]


class Engine:
    """Ends one request after the other, and before the last one waits until the reward has begun with the first."""

    def __init__(self, begun: threading.Event, events: list[str]):
        self.begun, self.events = begun, events

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        out: list[Rollout] = []
        for k, request in enumerate(requests):
            if 0 < k == len(requests) - 1 and ended is not None:
                assert self.begun.wait(WAIT), "no reward begins while others are sampled"
            rollouts = [rollout(request, i, length=k + i) for i in range(request.n)]
            self.events.append(f"ended {k}")
            out += rollouts
            if ended is not None:
                ended(rollouts)
        return out


def asynchronous(events: list[str], begun: threading.Event) -> FunctionReward:
    async def judge(rollout: Rollout) -> float:
        events.append(f"judged {rollout.group_id[2:]}")
        begun.set()
        return float(len(rollout.text))

    return FunctionReward(judge, "mine.py")


def test_a_reward_that_waits_begins_before_the_last_answer_has_ended() -> None:
    events: list[str] = []
    begun = threading.Event()
    batch = collect(Engine(begun, events), SAMPLES, asynchronous(events, begun), 0, CONFIG, 0)
    assert events.index("judged 0") < events.index("ended 3")
    assert sorted(events) == sorted([f"ended {k}" for k in range(4)] + [f"judged {k}" for k in range(4)] * 2)
    assert [r.score.total for r in batch.rollouts if r.score] == [k + i for k in range(4) for i in range(2)]


def test_any_other_reward_sees_the_whole_step() -> None:
    sizes: list[int] = []

    def count(rollouts: Sequence[Rollout]) -> list[Score]:
        sizes.append(len(rollouts))
        return [Score(float(r.index)) for r in rollouts]

    url = "http://127.0.0.1:1"
    assert (
        not begins_early(count)
        and begins_early(RemoteReward(url, batch_size=4))
        and not begins_early(RemoteReward(url))
    )
    collect(Engine(threading.Event(), []), SAMPLES, count, 0, CONFIG, 0)
    assert sizes == [8]
    assert begins_early(WeightedSum.of(judged=FunctionReward(wait, "f"), count=count))
    events: list[str] = []
    begun = threading.Event()
    mixed = WeightedSum.of(judged=asynchronous(events, begun), count=count)
    batch = collect(Engine(begun, events), SAMPLES, mixed, 0, CONFIG, 0)
    assert sizes == [8, 8] and events.index("judged 0") < events.index("ended 3")
    assert [dict(r.score.parts) for r in batch.rollouts if r.score] == [
        {"judged": k + i, "count": i} for k in range(4) for i in range(2)
    ]


async def wait(rollout: Rollout) -> float | None:
    return None if rollout.group_id == "0/2" else float(len(rollout.text)) ** 2


def index(rollouts: Sequence[Rollout]) -> list[Score]:
    return [Score(float(r.index)) for r in rollouts]


@pytest.mark.parametrize(
    "reward",
    [
        FunctionReward(wait, "f"),
        WeightedSum.of(judged=(FunctionReward(wait, "f"), 2.0), index=index),
        StandardisedSum.of(judged=FunctionReward(wait, "f"), index=WeightedSum.of(a=FunctionReward(wait, "g"))),
    ],
    ids=["function", "sum", "standardised sum"],
)
def test_scores_are_those_of_one_call(reward: Reward) -> None:
    groups = groups_of(3)
    rollouts = [r for group in groups for r in group]
    with EarlyScores(reward) as early:
        for group in groups[:3]:  # and one that ended without being reported
            early.add(group)
        scores = score_rollouts(early.reward, rollouts)
    assert scores == score_rollouts(reward, rollouts) and any(s is None for s in scores)


JUDGE_FILE = """
from audiorl.rewards import ChatEndpoint, JudgePrompt, OpenAIJudge
reward = OpenAIJudge(ChatEndpoint('rule', {url!r}, backoff=0, tries=1), JudgePrompt('good?'), max_failed={share})
"""


def test_a_judge_in_a_file_allows_failures_as_a_share_of_the_step(tmp_path: Path) -> None:
    """One verdict of 12 fails: less than 0.1 of the step, more than 0.1 of its group."""
    groups = groups_of(3)
    rollouts = [r for group in groups for r in group]
    server = ChatServer(lambda answers: 70.0 if not answers[0] else 1.0 + len(answers[0]) / 2)
    with serving(server.app) as url:
        for share in (0.1, 0.05):
            (tmp_path / f"{share}.py").write_text(JUDGE_FILE.format(url=f"{url}/v1", share=share))
        reward = load_reward(tmp_path / "0.1.py")
        with EarlyScores(reward) as early:
            for group in groups:
                early.add(group)
            scores = early.reward(rollouts)
        totals = [s and s.total for s in scores]
        assert totals == [s and s.total for s in reward(rollouts)] == [None, *(len(r.text) / 8 for r in rollouts[1:])]
        message = r"0\.05\.py', OpenAIJudge: .* 1 of 12 rollouts could not be judged"
        with EarlyScores(load_reward(tmp_path / "0.05.py")) as early, pytest.raises(JudgeError, match=message):
            early.add(groups[0])
            early.reward(rollouts)


def test_an_answer_that_was_sampled_again_is_scored_again() -> None:
    request = Request(SAMPLES[0], 1, group_id="0/0")
    with EarlyScores(FunctionReward(wait, "f")) as early:
        early.add([rollout(request, 0, 2)])
        assert [s.total for s in score_rollouts(early.reward, [rollout(request, 0, 5)]) if s] == [25]


def test_concurrency_counts_all_groups_together() -> None:
    running = [0, 0]

    async def busy(rollout: Rollout) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.005)
        running[0] -= 1
        return 0.0

    groups = groups_of(3)
    with EarlyScores(FunctionReward(busy, "f", concurrency=2)) as early:
        for group in groups:
            early.add(group)
        early.reward([r for group in groups for r in group])
    assert running[1] == 2


def test_a_failure_names_file_function_and_sample_and_ends_the_sampling(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def reward(rollout):\n    raise OSError('no answer')\n")
    reward = load_reward(tmp_path / "mine.py")
    assert begins_early(reward)
    with pytest.raises(RewardError, match=r"mine\.py', function 'reward', sample .* OSError: no answer"):
        collect(Engine(threading.Event(), []), SAMPLES[:1], reward, 0, RLConfig(prompts_per_step=1, group_size=2), 0)
    groups = groups_of(1)
    with EarlyScores(reward) as early:
        early.add(groups[0])
        with pytest.raises(RewardError, match="no answer"):
            score_rollouts(early.reward, groups[0])
        with pytest.raises(RewardError, match="no answer"):
            early.add(groups[1])


def test_the_engine_reports_a_request_when_its_answers_have_ended(samples: list[Sample]) -> None:
    """Rows end at different times: after "a", after 12 tokens."""
    engine = HFEngine(make_omni(), SamplingConfig(max_new_tokens=12, stop=("a",)))
    requests = [Request(s, 2, seed=seed, group_id=f"{i}/{seed}") for i, s in enumerate(samples) for seed in range(4)]
    reported: list[Sequence[Rollout]] = []
    steps: list[int] = []
    engine.on_step = lambda buffers: steps.append(len(reported))
    rollouts = engine.generate(requests, reported.append)
    assert 0 < steps[-2] < len(requests) == len(reported), "all ended at once"
    by_group = {r[0].group_id: r for r in reported}
    for r in rollouts:
        again = by_group[r.group_id][r.index]
        assert again.segments[0].ids.tolist() == r.segments[0].ids.tolist()
        assert again.segments[0].stop_reason == r.segments[0].stop_reason
    named = [f"{q.sample.id!r} (group {q.group_id}, answer {k})" for q in requests for k in range(2)]
    assert [r.name for r in rollouts] == named
