"""Options that a reward cannot have, by reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from audiorl import rewards
from audiorl.rewards import ChatEndpoint, JudgePrompt, OpenAIJudge, PairwiseJudge, PolicyJudge, RemoteReward

ENDPOINT, PROMPT = ChatEndpoint("m"), JudgePrompt("5: good. 1: bad.")


@pytest.mark.parametrize(
    ("made", "given", "options"),
    [
        (rewards.AnswerAccuracy, (), {"fallback": "first"}),
        (rewards.Hallucination, (), {"unit": "token"}),
        (rewards.Hallucination, (), {"max_rate": 0.0}),
        (rewards.ThinkLength, (), {"max_words": 0}),
        (rewards.ThinkTranscript, (), {"words": 0}),
        (rewards.ThinkPresent, (), {"min_words": 0}),
        (rewards.ThoughtGrounding, ("p",), {"full": 0}),
        (rewards.LanguageConsistency, (), {"part": "some"}),
        (rewards.Overlong, (100,), {"buffer": 0}),
        (rewards.Repetition, (), {"n": 0}),
        (rewards.Repetition, (), {"unit": "tokens"}),
        (rewards.ModelReward, ("p",), {"std": 0.0}),
        (rewards.ProcessModelReward, ("p",), {"credit": "step"}),
        (JudgePrompt, ("r",), {"audio": "all"}),
        (JudgePrompt, (), {"rubric": " "}),
        (OpenAIJudge, (ENDPOINT, PROMPT), {"scale": (5, 1)}),
        (OpenAIJudge, (ENDPOINT, PROMPT), {"votes": 0}),
        (OpenAIJudge, (ENDPOINT, PROMPT), {"max_failed": -1}),
        (PairwiseJudge, (ENDPOINT, PROMPT), {"opponents": 0}),
        (PolicyJudge, ("p", PROMPT), {"scale": (1.0, 2.0)}),
        (ChatEndpoint, ("m",), {"timeout": 0}),
        (ChatEndpoint, ("m",), {"tries": 0}),
        (RemoteReward, ("http://127.0.0.1:8300",), {"audio": "flac"}),
        (RemoteReward, ("http://127.0.0.1:8300",), {"batch_size": 0}),
        (RemoteReward, ("http://127.0.0.1:8300",), {"cooldown": math.inf}),
    ],
)
def test_an_option_is_named_with_its_reward(made: Callable[..., Any], given: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"{made.__name__}: {name}"):
        made(*given, **options)
