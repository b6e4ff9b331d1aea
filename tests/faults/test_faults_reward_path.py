"""A reward from its file to a run: studied on recorded rollouts, served, and used with a judge that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from audiorl import cli
from audiorl.report.summary import show
from audiorl.run.metrics_log import read_metrics
from tests.support.chat_servers import KINDS, ChatServer
from tests.support.recipe_runs import rows_of
from tests.support.reward_servers import Process, serving
from tests.support.training_runs import one_thread

__all__ = ["one_thread"]

RECORDED = Path(__file__).parents[2] / "docs" / "recorded" / "rollouts" / "step_000001.jsonl"
DESIGNED = '''
def reward(rollout):
    """The shorter the better; None, which skips the rollout, for every fourth length."""
    return None if len(rollout.text) % 4 == 3 else 1 / (1 + len(rollout.text))
'''
COMBINED = """
from audiorl.rewards import ChatEndpoint, JudgePrompt, OpenAIJudge, RemoteReward, WeightedSum

endpoint = ChatEndpoint("rule", "{judge}/v1", tries={tries}, timeout=60.0, backoff=0.0)
judge = OpenAIJudge(endpoint, JudgePrompt("Is the answer long?", thinking=True), max_failed=0.9)
reward = WeightedSum.of(designed=(RemoteReward("{server}"), 1.0), judge=(judge, 0.5))
"""


def designed(text: str) -> float | None:
    return None if len(text) % 4 == 3 else 1 / (1 + len(text))


def rating(text: str) -> float:
    """From 1 to 5, as the judge's scale is, by the letters: the prompt changes a tag in the answer."""
    return 1.0 + sum(map(str.isalpha, text)) % 5


@pytest.mark.parametrize("tries", [1, 8])
def test_a_designed_reward_is_studied_served_and_trained_on(
    tries: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of the judge's calls fail: with one try these rollouts are skipped, with more they are repeated."""
    monkeypatch.delenv("AUDIORL_REWARD_TOKEN", raising=False)
    file = tmp_path / "designed.py"
    file.write_text(DESIGNED)

    study = ["rewards", "study", str(file), "--rollouts", str(RECORDED), "--out", str(tmp_path / "study.html")]
    assert cli.main([*study, "--probe", "0"]) == 0
    printed = capsys.readouterr().out
    recorded = [json.loads(line)["text"] for line in RECORDED.read_text().splitlines()]
    scores = [score for score in map(designed, recorded) if score is not None]
    row = f"designed │ {len(scores)} │ {len(recorded) - len(scores)} │ {show(sum(scores) / len(scores))} │"
    assert 0 < len(scores) < len(recorded) and row in " ".join(printed.split())
    assert (tmp_path / "study.html").is_file()

    # Not "late": a busy machine is late by itself, and then all fail.
    kinds = [kind for kind in KINDS if kind != "late"]
    judge = ChatServer(lambda answers: rating(answers[0]), fail=0.2, kinds=kinds)
    server = Process(file)
    run = tmp_path / "run"
    try:
        with serving(judge.app) as url:
            combined = tmp_path / "combined.py"
            combined.write_text(COMBINED.format(judge=url, server=server.url, tries=tries))
            command = ["train", "mmau-grpo", "--tiny", "--reward-file", str(combined), "--max-steps", "4"]
            options = ["--rl.group-size", "6", "--rl.rollouts-every", "1", "--held-out-count", "6"]
            assert cli.main([*command, *options, "--out", str(run)]) == 0
    finally:
        server.close()

    failed = sum(count for kind, count in judge.calls.items() if kind in KINDS)
    assert failed > 0 and judge.calls["right"] > 0, judge.calls
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "grpo"]
    steps = [rows_of(path) for path in sorted((run / "rollouts").glob("*.jsonl"))]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4] and len(steps) == 4
    gone = 0
    for row, rollouts in zip(metrics, steps, strict=True):
        for rollout in rollouts:
            parts, text = rollout["score"]["parts"], rollout["text"]
            value = designed(text)
            assert value is not None, "a rollout that the reward skipped was trained on"
            user = value + 0.5 * (rating(text) - 1) / 4
            assert parts["user"] == pytest.approx(user, abs=1e-6)
            total = 2 * parts["accuracy"] + parts["format"] + user
            assert rollout["score"]["total"] == pytest.approx(total, abs=1e-6)
        share = row.get("reward/skipped", 0.0)
        assert share == pytest.approx(1 - len(rollouts) / 12)
        gone += 12 - len(rollouts)
    assert gone > 0
    assert {"before", "after"} <= set(json.loads((run / "eval.json").read_text()))
