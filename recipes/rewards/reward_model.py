"""An example of a reward to be served: a trained reward model, which reads the audio prompt, on a machine of its own.

    REWARD_MODEL=runs/rm/checkpoints/reward_model/step_000200 audiorl rewards serve recipes/rewards/reward_model.py \\
        --host 0.0.0.0 --token-file token.txt
"""

import os

from audiorl.rewards import ModelReward

reward = ModelReward(os.environ.get("REWARD_MODEL", "runs/rm"), device=os.environ.get("REWARD_DEVICE", "cpu"))
