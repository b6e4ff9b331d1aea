"""Judges that fail while a run trains, and a judge by a real model behind vLLM's OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from audiorl.models.families import text
from audiorl.report.study import Rollouts
from audiorl.rewards import ChatEndpoint, JudgeError, JudgePrompt, OpenAIJudge, PairwiseJudge, load_reward
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.types import Rollout, Sample
from tests.conftest import TEXTS
from tests.support.chat_servers import ChatServer
from tests.support.reward_servers import serving
from tests.support.training_runs import CONFIG, one_thread, train
from tests.support.vllm_servers import serving_vllm

__all__ = ["one_thread"]

NO_SEED = {"seed": None}
"""vLLM 0.32.0 stops on a CPU when it splits the prompt of a request with a seed."""
RECORDED = Path(__file__).parents[2] / "docs" / "recorded" / "rollouts" / "step_000001.jsonl"


def rating(text: str) -> float:
    return 1.0 + len(text) % 5


@pytest.mark.parametrize("tries", [1, 8])
def test_a_run_with_a_judge_that_fails_in_a_fifth_of_the_calls(
    tries: int, samples: list[Sample], tmp_path: Path
) -> None:
    """With one try failures are skipped rollouts; with more there are none. Every score is right, and the run ends."""
    server = ChatServer(lambda answers: rating(answers[0]), fail=0.2, delay=0.6)
    server.rng.seed(2)
    with serving(server.app) as url:
        file = tmp_path / "judged.py"
        file.write_text(
            "from audiorl.rewards import ChatEndpoint, JudgePrompt, OpenAIJudge\n"
            f"endpoint = ChatEndpoint('rule', '{url}/v1', tries={tries}, timeout=0.5, backoff=0.0)\n"
            "reward = OpenAIJudge(endpoint, JudgePrompt('long?', thinking=True), max_failed=0.8)\n"
        )
        run = tmp_path / "run"
        train(Run.create(run, "test", [], CONFIG), samples, load_reward(file))  # type: ignore[arg-type]
    rollouts = Rollouts.load(str(run / "rollouts" / "*.jsonl"))
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) >= CONFIG.steps and sum(n for kind, n in server.calls.items() if kind != "right") > 0
    assert all(r.score is not None and r.score.total == (rating(r.text) - 1) / 4 for r in rollouts)
    assert any(row.get("reward/skipped", 0) > 0 for row in rows) == (tries == 1)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with a tiny text model."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    text.tiny(TEXTS, hidden=256, layers=2, vocab_size=400).save(folder / "model")
    with serving_vllm(folder, folder / "model", "--max-model-len", "2048") as url:
        yield url


@pytest.fixture(scope="module")
def groups() -> list[Rollout]:
    """Four different answers to each of two prompts."""
    rollouts = Rollouts.load(RECORDED)[:16]
    texts = ("one", "two", "three", "four")
    picked = [r for r in rollouts if r.index < len(texts)]
    return [replace(r, segments=(replace(r.segments[0], text=texts[r.index]),), spoken_audio=None) for r in picked]


def test_a_real_model_rates_and_compares_by_schema(vllm: str, groups: list[Rollout], tmp_path: Path) -> None:
    endpoint = ChatEndpoint("model", vllm, temperature=1.0, max_tokens=800, cache=str(tmp_path), fields=NO_SEED)
    judge = OpenAIJudge(endpoint, JudgePrompt("5: right. 1: wrong."), votes=3, reason=False, max_failed=0.5)
    scores = judge(groups)
    assert all(s is None or 0 <= s.total <= 1 for s in scores)
    assert sum(s.parts["tokens"] for s in scores if s is not None) > 1000
    assert any(s is not None and s.parts["spread"] > 0 for s in scores)
    again = judge(groups)
    assert [s and s.total for s, t in zip(again, scores, strict=True) if t] == [t.total for t in scores if t]
    pairs = PairwiseJudge(endpoint, JudgePrompt("Which is right?"), reason=False, max_failed=0.5)(groups)
    assert all(s is None or 0 <= s.total <= 1 for s in pairs) and any(s is not None for s in pairs)


def test_a_real_model_that_writes_no_json_is_an_error(vllm: str, groups: list[Rollout]) -> None:
    endpoint = ChatEndpoint("model", vllm, max_tokens=50, tries=1, answer_format="text", fields=NO_SEED)
    with pytest.raises(JudgeError, match=r"8 of 8 rollouts could not be judged.*'en/letters/space/human'"):
        OpenAIJudge(endpoint, JudgePrompt("5: right. 1: wrong."))(groups)
    with pytest.raises(JudgeError, match="does not exist"):
        OpenAIJudge(replace(endpoint, model="other"), JudgePrompt("5: right. 1: wrong."))(groups)
