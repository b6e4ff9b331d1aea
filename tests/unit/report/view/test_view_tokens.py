"""Tokens of a rollout with their numbers, by the tokenizer of the run's checkpoint."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from audiorl.data.rollout_rows import tensor_row
from audiorl.models.tiny import tiny_tokenizer
from audiorl.report.view.fragments import pieces, tokens
from tests.conftest import TEXTS

TEXT = "What is said? <b>ñandú 🙂 日本"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tiny_tokenizer(TEXTS, 400).save_pretrained(tmp_path / "checkpoints" / "grpo" / "step_000001")
    return tmp_path


@pytest.fixture
def ids(run: Path) -> list[int]:
    file = run / "checkpoints/grpo/step_000001/tokenizer.json"
    encoded: list[int] = Tokenizer.from_file(str(file)).encode(TEXT).ids
    return encoded


def segment(ids: list[int], **more: Any) -> dict[str, Any]:
    logprobs = -torch.arange(1, len(ids) + 1, dtype=torch.float32) / 8
    rows = {"ids": tensor_row(torch.tensor(ids)), "logprobs": tensor_row(logprobs)}
    return rows | more


def test_the_texts_of_tokens_are_the_text(run: Path, ids: list[int]) -> None:
    html = tokens({"segments": [segment(ids)], "advantage": -0.5}, run)
    spans = re.findall(r"<span class='token'([^>]*)>([^<]*)</span>", html)
    assert len(spans) == len(ids) and any(not text for _, text in spans), "characters of several tokens"
    assert "".join(unescape(text) for _, text in spans) == TEXT
    assert [float(n) for n in re.findall(r"data-log-prob='([^']+)'", html)] == [-(i + 1) / 8 for i in range(len(ids))]
    assert set(re.findall(r"data-advantage='([^']+)'", html)) == {"-0.5"} and "data-ratio" not in html


def test_recorded_advantages_count_before_that_of_the_row(run: Path, ids: list[int]) -> None:
    advantages = torch.linspace(-1, 1, len(ids)).half()
    more = {"advantages": tensor_row(advantages.half()), "ratios": tensor_row(advantages.half())}
    html = tokens({"segments": [segment(ids, **more)], "advantage": 0.0}, run)
    for name in ("advantage", "ratio"):
        values = [float(n) for n in re.findall(rf"data-{name}='([^']+)'", html)]
        np.testing.assert_allclose(values, advantages.float().numpy(), atol=1e-3)


def test_frames_sum_over_their_codes(run: Path, ids: list[int]) -> None:
    codes = torch.tensor([[-1, -1], [3, 4], [5, 6]])
    logprobs = torch.tensor([[-0.5, 0.0], [-1.0, -2.0], [0.0, -0.25]])
    more = {"codes": tensor_row(codes), "logprobs": tensor_row(logprobs)}
    html = tokens({"segments": [segment(ids[:3], **more)]}, run)
    assert html.count("class='token frame'") == 2 and html.count("▪") == 2
    assert re.findall(r"data-log-prob='([^']+)'", html) == ["-0.5", "-3", "-0.25"]


def test_without_a_tokenizer_there_are_no_tokens(run: Path, ids: list[int], tmp_path: Path) -> None:
    row = {"segments": [segment(ids)]}
    assert tokens(row, tmp_path / "elsewhere") == ""
    assert tokens({"segments": [{"text": "of 0.1", "num_tokens": 2}]}, run) == ""
    assert tokens({"segments": [segment(ids, logprobs={"dtype": "float32", "shape": [3], "data": "AAAA"})]}, run) == ""
    (run / "checkpoints/grpo/step_000001/tokenizer.json").write_text("{")
    assert tokens(row, run) == ""


def test_an_impossible_character_does_not_swallow_the_rest(run: Path) -> None:
    tokenizer = Tokenizer.from_file(str(run / "checkpoints/grpo/step_000001/tokenizer.json"))
    half = tokenizer.encode("日").ids[:1]
    texts = pieces(tokenizer, [*half * 5, *tokenizer.encode("a").ids], [False] * 6)
    assert len(texts) == 6 and texts[-1].endswith("a")
