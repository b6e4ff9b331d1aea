"""Rewards: frozen dataclasses that score all rollouts of a step at once. Importing this loads no model."""

from audiorl.rewards.answer import AnswerAccuracy
from audiorl.rewards.asr import CharAccuracy, WordAccuracy
from audiorl.rewards.caption import CaptionQuality
from audiorl.rewards.chat import ChatEndpoint, JudgeError
from audiorl.rewards.check import check_scores
from audiorl.rewards.choices import match_choice, normalize_text
from audiorl.rewards.combine import Gated, StandardisedSum, Term, WeightedSum
from audiorl.rewards.files import FileReward, FunctionReward, as_reward, load_reward
from audiorl.rewards.hallucination import Hallucination
from audiorl.rewards.judge import OpenAIJudge, PairwiseJudge
from audiorl.rewards.judge_prompt import JudgePrompt
from audiorl.rewards.language import LanguageConsistency
from audiorl.rewards.length import Overlong
from audiorl.rewards.maths import maths_equal
from audiorl.rewards.model import ModelReward, ProcessModelReward
from audiorl.rewards.policy_judge import PolicyJudge
from audiorl.rewards.remote import RemoteReward, RewardServerError
from audiorl.rewards.repetition import Repetition
from audiorl.rewards.tags import after_think, extract_answer, extract_think, final_text, strip_tags
from audiorl.rewards.think import AnswerFormat, ThinkFormat, ThinkLength, ThinkPresent, ThinkTranscript
from audiorl.rewards.thought import ThoughtConsistency, ThoughtGrounding

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
    "strip_tags",
]
