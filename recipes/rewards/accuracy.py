"""The right answer once more, which raises its share of the recipes' own reward of accuracy 2 and format 1."""

from audiorl.rewards import AnswerAccuracy

reward = AnswerAccuracy()
