"""Rewards on recorded rollouts: scores, distributions, agreement, signs that a reward can be hacked.

rollouts = Rollouts.load("runs/*/rollouts/*.jsonl")
scored = rollouts.score(AnswerAccuracy()).score(load_reward("my_reward.py"))
scored.to_pandas()
study(scored).write("study.html")
"""

from audiorl.report.study.rollouts import Rollouts
from audiorl.report.study.study import RewardStudy, Study, study

__all__ = ["RewardStudy", "Rollouts", "Study", "study"]
