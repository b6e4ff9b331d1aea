"""One rollout and one update of a tiny speech model on bundled human speech: does this machine train?"""

from __future__ import annotations


def self_test() -> dict[str, float]:
    """Metrics of the step; raises when anything on the way fails."""
    import torch

    from audiorl.algos.advantages import group_relative
    from audiorl.config import GRPOConfig, OptimConfig, SamplingConfig
    from audiorl.data.corpus import bundled_speech
    from audiorl.models.qwen_omni import tiny
    from audiorl.rollout.hf import HFEngine
    from audiorl.train.loop import with_advantage
    from audiorl.train.worker import GRPOWorker
    from audiorl.types import Message, Request, Sample

    utterance = next(u for u in bundled_speech(("en",)) if u.duration > 1)
    policy = tiny([utterance.text], hidden=64, layers=2, vocab_size=400)
    sample = Sample(utterance.id, (Message("user", (utterance.clip, "What is said?")),), (utterance.text,))
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=16)).generate([Request(sample, n=4)])
    rewards = torch.tensor([float(r.num_sampled) + r.index for r in rollouts])
    advantages = group_relative(rewards, [r.group_id for r in rollouts])
    worker = GRPOWorker(policy, GRPOConfig(prompts_per_step=1, group_size=4), OptimConfig(lr=1e-4), 1.0, 16)
    metrics = worker.train([with_advantage(r, float(a)) for r, a in zip(rollouts, advantages, strict=True)])
    return {name: metrics[name] for name in ("policy/ratio", "policy/engine_gap", "policy/entropy", "grad_norm")}
