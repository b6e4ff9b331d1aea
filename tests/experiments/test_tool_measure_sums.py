"""RAFT as an estimator of a file: which answers are learned."""

from __future__ import annotations

import torch

from audiorl.algos.experience import Experience
from audiorl.config import EstimatorConfig
from audiorl.train.rl.advantages import AdvantageInputs
from audiorl.user_files import load_function
from tests.support.tools import ROOT


def test_the_first_best_answer_of_a_group_is_learned() -> None:
    best_of_group = load_function(str(ROOT / "experiments" / "raft.py"), "best_of_group", "advantage")
    scores = {"a": (1.0, 3.0, 3.0), "b": (0.0, 0.0), "c": (0.5,)}
    sampled = torch.tensor([False, True, True])
    experiences = [
        Experience(torch.arange(3), sampled, 1, (), group, score=score, rewards=torch.tensor([0.0, score]))
        for group, values in scores.items()
        for score in values
    ]
    learned = best_of_group(AdvantageInputs.of(experiences), EstimatorConfig())
    assert learned.tolist() == [0, 1, 0, 0, 0, 1]
