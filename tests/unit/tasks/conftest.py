from tests.unit.rewards.conftest import make_rollout

__all__ = ["make_rollout"]
