"""An example of a reward of one's own: how varied an answer is, as distinct characters per character."""

from audiorl.types import Rollout


def reward(rollout: Rollout) -> float:
    return len(set(rollout.text)) / len(rollout.text) if rollout.text else 0.0
