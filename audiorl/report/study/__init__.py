"""Rewards on recorded rollouts: scores, distributions, agreement, signs that a reward can be hacked.

rollouts = Rollouts.load("runs/*/rollouts/*.jsonl")
scored = rollouts.score(AnswerAccuracy()).score(load_reward("my_reward.py"))
scored.to_pandas()
write_page(study(scored), "study.html")
"""

from audiorl.report.study.page import write_page
from audiorl.report.study.study import RewardStudy, Rollouts, Study, study

__all__ = ["RewardStudy", "Rollouts", "Study", "study", "write_page"]
