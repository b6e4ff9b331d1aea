"""One rollout and one update of a tiny speech model on bundled human speech: does this machine train?"""

from __future__ import annotations


def self_test() -> dict[str, float]:
    """Metrics of the step; raises when anything on the way fails."""
    from audiorl.algos.experience import Experience
    from audiorl.config import OptimConfig, RLConfig, SamplingConfig
    from audiorl.data.corpus import bundled_speech
    from audiorl.models.families.qwen_omni import tiny
    from audiorl.protocols import Request
    from audiorl.rollout.hf import HFEngine
    from audiorl.train.rl.trainer import TrainBatch, Trainer
    from audiorl.types import Message, Sample, Score

    utterance = next(u for u in bundled_speech(("en",)) if u.duration > 1)
    policy = tiny([utterance.text], hidden=64, layers=2, vocab_size=400)
    sample = Sample(utterance.id, (Message("user", (utterance.clip, "What is said?")),), (utterance.text,))
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=16)).generate([Request(sample, n=4)])
    scored = [r.with_score(Score(float(r.num_sampled) + r.index)) for r in rollouts]
    worker = Trainer(policy, RLConfig(prompts_per_step=1, group_size=4), OptimConfig(lr=1e-4), 1.0, 16)
    metrics = worker.step(TrainBatch([Experience.from_rollout(r) for r in scored])).metrics
    return {name: metrics[name] for name in ("policy/ratio", "policy/logprob_gap", "policy/entropy", "grad_norm")}
