"""RAFT (Dong et al. 2023, arXiv 2304.06767) as an advantage: of each prompt's answers the best is learned.

audiorl train mmau-grpo --rl.advantage experiments/raft.py:best_of_group --rl.loss reinforce --rl.kl-beta 0
"""

from __future__ import annotations

from torch import Tensor

from audiorl.config import EstimatorConfig
from audiorl.train.rl.advantages import AdvantageInputs


def best_of_group(inputs: AdvantageInputs, _: EstimatorConfig) -> Tensor:
    """Return 1 for the first best answer of each group in which any earned something, and 0 for the others: [B]."""
    best: dict[str, int] = {}
    scores = inputs.scores_B.tolist()
    for i, group in enumerate(inputs.groups):
        if group not in best or scores[i] > scores[best[group]]:
            best[group] = i
    return inputs.scores_B.new_tensor([best[g] == i and scores[i] > 0 for i, g in enumerate(inputs.groups)])
