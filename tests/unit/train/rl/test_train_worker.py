"""The GRPO worker: the first update is on-policy, and its gradient depends on the data alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.trainer import Trainer
from audiorl.types import Rollout, Sample
from tests.conftest import make_omni
from tests.support.experiences import with_advantage
from tests.support.trainer_steps import gradients, learn

Make = Callable[..., AudioPolicy]
TOKENS = 8
ADVANTAGES = (1.0, -0.5, -0.5, 0.3, 0.7, -1.0)


def rollouts(policy: AudioPolicy, samples: Sequence[Sample], n: int = 3, temperature: float = 1.0) -> list[Rollout]:
    engine = HFEngine(policy, SamplingConfig(temperature=temperature, max_new_tokens=TOKENS))
    return engine.generate([Request(s, n, seed=5) for s in samples])


def experiences(policy: AudioPolicy, samples: Sequence[Sample], temperature: float = 1.0) -> list[Experience]:
    """Three rollouts of each of two prompts, with fixed advantages."""
    found = rollouts(policy, samples[:2], temperature=temperature)
    return [with_advantage(Experience.from_rollout(r), a) for r, a in zip(found, ADVANTAGES, strict=True)]


def worker(
    policy: AudioPolicy, *, lr: float = 1e-3, temperature: float = 1.0, warmup: int = 0, **grpo: object
) -> Trainer:
    """A worker that does not clip gradients, so that they can be read after its update."""
    config = RLConfig(**({"steps": 4, "prompts_per_step": 2, "group_size": 3} | grpo))  # type: ignore[arg-type]
    return Trainer(policy, config, OptimConfig(lr=lr, max_grad_norm=1e9, warmup_steps=warmup), temperature, TOKENS)


def logprobs(policy: AudioPolicy, batch: Sequence[Experience]) -> list[Tensor]:
    with torch.no_grad():
        flat = policy.forward(pack_experiences(batch)).logprobs
    return list(flat.split([int(e.loss_mask.sum()) for e in batch]))


def heard(experience: Experience, clip: AudioClip) -> Experience:
    return experience.replace(audio=(clip,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_update_is_on_policy(make_policy: Make, samples: list[Sample], temperature: float) -> None:
    policy = make_policy()
    metrics = learn(worker(policy, temperature=temperature), experiences(policy, samples, temperature))
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/clip_frac"] == 0
    assert metrics["policy/approx_kl"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["policy/logprob_gap"] < 1e-5
    # 6 sequences of equal weight: the loss is minus the mean advantage
    assert metrics["policy/loss"] == pytest.approx(-sum(ADVANTAGES) / 6, abs=1e-6)
    assert metrics["grad_norm"] > 0


def test_old_logprobs_are_those_from_before_the_first_epoch(samples: list[Sample]) -> None:
    policy, twin = make_omni(), make_omni()
    batch = experiences(policy, samples)
    before = logprobs(twin, batch)
    learn(worker(twin, lr=5e-3, kl_beta=0.0), batch)
    after = logprobs(twin, batch)
    ratios = [(a - b).exp() for a, b in zip(after, before, strict=True)]
    second = float(torch.stack([r.mean() for r in ratios]).mean())
    clipped = torch.stack(
        [((r > 1.2) if a > 0 else (r < 0.8)).float().mean() for r, a in zip(ratios, ADVANTAGES, strict=True)]
    ).mean()
    assert abs(second - 1) > 1e-3 and clipped > 0
    metrics = learn(worker(policy, lr=5e-3, kl_beta=0.0, epochs=2), batch)
    assert metrics["policy/ratio"] == pytest.approx((1 + second) / 2, abs=1e-5)
    assert metrics["policy/clip_frac"] == pytest.approx(float(clipped) / 2, abs=1e-5)


def test_mini_batches_share_the_old_logprobs_of_the_step(samples: list[Sample]) -> None:
    """Two mini-batches: the second one's ratios are measured against the policy before the first one's update."""
    policy, twin = make_omni(), make_omni()
    batch = experiences(policy, samples)
    before = logprobs(twin, batch)[3:]
    learn(worker(twin, lr=5e-3, kl_beta=0.0), batch[:3])
    after = logprobs(twin, batch)[3:]
    second = float(torch.stack([(a - b).exp().mean() for a, b in zip(after, before, strict=True)]).mean())
    metrics = learn(worker(policy, lr=5e-3, kl_beta=0.0, mini_batches=2), batch)
    assert metrics["policy/ratio"] == pytest.approx((1 + second) / 2, abs=1e-5)


@pytest.mark.parametrize("audio", ["frozen", "full"])
@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "token-mean", "sequence-mean-token-sum"])
def test_the_gradient_does_not_depend_on_packing(samples: list[Sample], audio: str, aggregation: str) -> None:
    """Nor do the metrics, which are means over tokens. Every response has a ratio of its own."""
    results = []
    for budget, share in ((10_000, True), (70, True), (1, True), (10_000, False), (130, False)):
        policy = make_omni(ModelConfig(audio=audio))  # type: ignore[arg-type]
        batch = experiences(policy, samples)
        batch[1] = shortened(batch[1], 3)
        batch = [e.replace(old_logprobs=e.rollout_logprobs - 0.05 * i) for i, e in enumerate(batch)]  # type: ignore[operator]
        metrics = learn(
            worker(
                policy,
                kl_beta=0.1,
                entropy_coef=0.01,
                aggregation=aggregation,
                tis_cap=0.9,
                micro_batch_tokens=budget,
                share_prompts=share,
            ),
            batch,
        )
        ratios = torch.repeat_interleave(
            torch.exp(0.05 * torch.arange(6)), torch.tensor([e.num_sampled for e in batch])
        )
        assert metrics["policy/ratio"] == pytest.approx(float(ratios.mean()), abs=1e-5)
        results.append((metrics, gradients(policy)))
    metrics, expected = results[0]
    scale = max(float(g.abs().max()) for g in expected.values())
    for other, grads in results[1:]:
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad / scale, expected[name] / scale, atol=1e-6, rtol=0, msg=name)
        assert other == pytest.approx(metrics, abs=1e-5)


def shortened(e: Experience, sampled: int) -> Experience:
    """The experience with only its first `sampled` response tokens."""
    end = e.prompt_length + sampled
    assert e.rollout_logprobs is not None and e.advantages is not None
    return e.replace(
        ids=e.ids[:end],
        loss_mask=e.loss_mask[:end],
        rollout_logprobs=e.rollout_logprobs[:end],
        advantages=e.advantages[:end],
    )


def test_loss_and_gradient_hear_the_right_audio(make_policy: Make, samples: list[Sample]) -> None:
    """Against fixed old log-probs, another waveform or a swap of two prompts' audio changes loss and gradient."""
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples[:2]]
    noise = np.random.default_rng(0).normal(0, 0.1, 14_400).astype(np.float32)
    other = AudioClip(array=clips[1].array + noise, sample_rate=16_000)
    asked = [
        Sample(s.id, (type(s.messages[0])("user", (clip, "What?")),)) for s, clip in zip(samples, clips, strict=False)
    ]
    results: dict[str, tuple[float, Tensor]] = {}
    for name, sounds in (
        ("same", clips),
        ("again", clips),
        ("other", [clips[0], other]),
        ("swapped", [clips[1], clips[0]]),
    ):
        policy = make_policy()
        batch = [e.replace(old_logprobs=e.rollout_logprobs) for e in experiences(policy, asked)]
        batch = [heard(e, sounds[i // 3]) for i, e in enumerate(batch)]
        loss = learn(worker(policy, kl_beta=0.0), batch)["policy/loss"]
        results[name] = loss, torch.cat([g.flatten() for g in gradients(policy).values()])
    loss, gradient = results["same"]
    assert results["again"][0] == loss and torch.equal(results["again"][1], gradient)
    for name in ("other", "swapped"):
        assert abs(results[name][0] - loss) > 1e-6, name
        assert float((results[name][1] - gradient).norm() / gradient.norm()) > 1e-3, name


@pytest.mark.parametrize("audio", ["frozen", "projector", "full"])
def test_what_of_the_audio_side_an_update_moves(make_policy: Make, samples: list[Sample], audio: str) -> None:
    policy = make_policy(ModelConfig(audio=audio))  # type: ignore[arg-type]
    projector = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}
    inside = [p for p in policy.backbone.audio_encoder(policy.model).parameters() if id(p) not in projector]
    outside = [p for p in policy.model.parameters() if id(p) in projector]
    before = [[p.detach().clone() for p in side] for side in (inside, outside)]
    learn(worker(policy), experiences(policy, samples))
    moved = [
        any(not torch.equal(p, old) for p, old in zip(side, olds, strict=True))
        for side, olds in zip((inside, outside), before, strict=True)
    ]
    assert moved == [audio == "full", audio != "frozen"]


@pytest.mark.parametrize(
    "config",
    [ModelConfig(), ModelConfig(audio="full"), ModelConfig(lora=LoraConfig(rank=4)), ModelConfig(audio="projector")],
    ids=["frozen", "full", "lora", "projector"],
)
def test_the_reference_stays_what_it_was(make_policy: Make, samples: list[Sample], config: ModelConfig) -> None:
    """Also while the policy's own hearing of the same clips is cached, and from an adapter that is already trained."""
    policy = make_policy(config)
    batch = experiences(policy, samples)
    learn(worker(policy, lr=1e-2, kl_beta=0.0), batch)  # where a phase begins, adapters are not always fresh
    start = torch.cat(logprobs(policy, batch))
    learner = worker(policy, lr=1e-2)
    assert learner.reference is not None
    for _ in range(2):
        learn(learner, batch)
        rollouts(policy, samples[:2])
        reference = learner.reference.forward(pack_experiences(batch)).logprobs
        torch.testing.assert_close(reference, start, atol=1e-6, rtol=0)
    assert float((torch.cat(logprobs(policy, batch)) - start).abs().max()) > 1e-2


def test_the_reference_shares_what_is_not_trained(samples: list[Sample]) -> None:
    policy = make_omni(ModelConfig(lora=LoraConfig(rank=4)))
    reference = policy.reference()
    own = {p.data_ptr() for p in policy.model.parameters()}
    extra = sum(p.numel() for p in reference.runs_on.model.parameters() if p.data_ptr() not in own)
    assert extra <= sum(p.numel() for p in policy.trainable().values())


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "sapo", "cispo", "dppo-tv", "dppo-kl"])
def test_other_losses_do_not_depend_on_packing_either(samples: list[Sample], loss: str) -> None:
    found = []
    for budget in (10_000, 1):
        policy = make_omni()
        batch = experiences(policy, samples)
        metrics = learn(worker(policy, loss=loss, tis_cap=2.0, kl_beta=0.0, micro_batch_tokens=budget), batch)
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6)
        found.append(torch.cat([g.flatten() for g in gradients(policy).values()]))
    assert float(found[0].norm()) > 0
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-4)
