"""The thought about spoken numbers as an outside measure: numbers heard, arithmetic, answers that are right by luck."""

from audiorl.rewards import SpokenNumbers

reward = SpokenNumbers()
