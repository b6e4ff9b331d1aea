"""An example of asking reward servers: any recipe's --reward-file can be this, and REWARD_SERVERS says where they are.

    REWARD_SERVERS="http://judge1:8300 http://judge2:8300" AUDIORL_REWARD_TOKEN=$(cat token.txt) \\
        audiorl train mmau-grpo --reward-file recipes/rewards/remote.py --reward-weight 0.5
        --out runs/mmau
"""

import os

from audiorl.rewards import RemoteReward

servers = tuple(os.environ.get("REWARD_SERVERS", "http://127.0.0.1:8300").split())
reward = RemoteReward(servers, batch_size=16 if len(servers) > 1 else None)
