"""Rewards: frozen dataclasses that score all rollouts of a step at once. Importing this loads no model.

>>> from audiorl import rewards
>>> reward = rewards.WeightedSum.of(accuracy=(rewards.AnswerAccuracy(), 2.0), format=rewards.ThinkFormat())
>>> [term.name for term in reward.terms]
['accuracy', 'format']
"""

from audiorl.rewards.answers import (
    AnswerAccuracy,
    after_think,
    extract_answer,
    extract_think,
    final_text,
    match_choice,
    maths_equal,
    normalize_text,
    same_answer,
    strip_tags,
)
from audiorl.rewards.asr import CharAccuracy, Hallucination, HotwordAccuracy, WordAccuracy
from audiorl.rewards.chat import ChatEndpoint, JudgeError
from audiorl.rewards.combine import Gated, StandardisedSum, Term, WeightedSum, check_scores
from audiorl.rewards.files import FileReward, FunctionReward, as_reward, load_reward
from audiorl.rewards.llm_judge import JudgePrompt, OpenAIJudge, PairwiseJudge, PolicyJudge
from audiorl.rewards.model import ModelReward, ProcessModelReward
from audiorl.rewards.remote import RemoteReward, RewardServerError
from audiorl.rewards.text_quality import CaptionQuality, LanguageConsistency, Overlong, Repetition
from audiorl.rewards.thoughts import (
    AnswerFormat,
    SpokenNumbers,
    ThinkFormat,
    ThinkLength,
    ThinkPresent,
    ThinkTranscript,
    ThoughtConsistency,
    ThoughtGrounding,
)

__all__ = [
    "AnswerAccuracy",
    "AnswerFormat",
    "CaptionQuality",
    "CharAccuracy",
    "ChatEndpoint",
    "FileReward",
    "FunctionReward",
    "Gated",
    "Hallucination",
    "HotwordAccuracy",
    "JudgeError",
    "JudgePrompt",
    "LanguageConsistency",
    "ModelReward",
    "OpenAIJudge",
    "Overlong",
    "PairwiseJudge",
    "PolicyJudge",
    "ProcessModelReward",
    "RemoteReward",
    "Repetition",
    "RewardServerError",
    "SpokenNumbers",
    "StandardisedSum",
    "Term",
    "ThinkFormat",
    "ThinkLength",
    "ThinkPresent",
    "ThinkTranscript",
    "ThoughtConsistency",
    "ThoughtGrounding",
    "WeightedSum",
    "WordAccuracy",
    "after_think",
    "as_reward",
    "check_scores",
    "extract_answer",
    "extract_think",
    "final_text",
    "load_reward",
    "match_choice",
    "maths_equal",
    "normalize_text",
    "same_answer",
    "strip_tags",
]
