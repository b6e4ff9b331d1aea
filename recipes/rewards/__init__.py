"""Example rewards for `--reward-file` and `audiorl rewards`."""
