"""The whole worker: critics, KL in the reward, controllers, averages, the supervised term, and what a resume needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import (
    CriticConfig,
    EstimatorConfig,
    KLConfig,
    ModelConfig,
    OptimConfig,
    PtxConfig,
    RLConfig,
    SamplingConfig,
)
from audiorl.distributed.local import LocalGroup
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.run.checkpoint import save_checkpoint
from audiorl.run.folder import Run
from audiorl.train.optim.adamw import EMA
from audiorl.train.rl.advantages import compute_advantages
from audiorl.train.rl.collect import RolloutBatch
from audiorl.train.rl.processes import GroupEngine, Workers
from audiorl.train.rl.train import check_given, step_batch, train_rl
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Sample, Score, Turn
from tests.conftest import make_omni
from tests.support.checkpoints import load_checkpoint
from tests.support.experiences import LENGTHS, SCORES, batch_of, logprobs, values, with_advantage
from tests.support.gradients import gradients_of
from tests.support.packing import with_audio
from tests.support.trainer_steps import gradients

Make = Callable[..., AudioPolicy]
TOKENS = 8
SHARED = pytest.mark.parametrize("shared", [False, True], ids=["own trunk", "shared trunk"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worker(
    policy: AudioPolicy, *, lr: float = 1e-3, critic: CriticConfig | None = None, warmup: int = 0, **config: object
) -> Trainer:
    """Does not clip gradients, so that they can be read after its update."""
    critic = critic or CriticConfig(optim=OptimConfig(lr=1e-3, max_grad_norm=1e9))
    settings = {"steps": 4, "prompts_per_step": 2, "group_size": 3, "kl_beta": 0.0, "critic": critic} | config
    optim = OptimConfig(lr=lr, max_grad_norm=1e9, warmup_steps=warmup)
    return Trainer(policy, RLConfig(**settings), optim, 1.0, TOKENS)  # type: ignore[arg-type]


def ppo(policy: AudioPolicy, shared: bool = False, head: float = 0.05, **config: object) -> Trainer:
    """PPO whose value head is not zero."""
    critic = CriticConfig(shared=shared, optim=OptimConfig(lr=1e-3, max_grad_norm=1e9))
    learner = worker(policy, **({"advantage": "gae", "critic": critic} | config))  # type: ignore[arg-type]
    assert learner.critic is not None
    disturb(learner.critic.model.head.parameters(), head)
    return learner


@torch.no_grad()
def disturb(parameters: object, by: float = 0.01) -> None:
    rng = torch.Generator().manual_seed(1)
    for p in parameters:  # type: ignore[attr-defined]
        p.add_(by * torch.randn(p.shape, generator=rng))


def snapshot(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def moved(before: dict[str, Tensor], parameters: dict[str, torch.nn.Parameter]) -> set[str]:
    return {name for name, p in parameters.items() if not torch.equal(before[name], p)}


def all_gradients(learner: Trainer) -> dict[str, Tensor]:
    out = {f"policy/{n}": g for n, g in gradients(learner.policy).items()}
    if learner.critic is not None:
        out |= {f"critic/{n}": g for n, g in gradients_of(learner.critic.model.trainable()).items()}
    return out


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Relative to the largest entry of the policy's, and of the critic's."""
    assert found.keys() == expected.keys()
    for owner in {name.split("/")[0] for name in expected}:
        names = [name for name in expected if name.split("/")[0] == owner]
        scale = max(float(expected[name].abs().max()) for name in names)
        assert scale > 0
        for name in names:
            torch.testing.assert_close(found[name] / scale, expected[name] / scale, atol=tolerance, rtol=0, msg=name)


# -- the gradient depends on the data alone ------------------------------------------------------------------------


@SHARED
def test_a_step_with_everything_in_it_does_not_depend_on_the_cut(samples: list[Sample], shared: bool) -> None:
    """Critic, KL in the reward, entropy, the supervised term, engine correction; groups in any order."""
    results = []
    for budget, share, order in (
        (10_000, True, (0, 1)),
        (10_000, True, (1, 0)),
        (90, True, (0, 1)),
        (1, True, (1, 0)),
        (10_000, False, (0, 1)),
        (140, False, (1, 0)),
    ):
        policy = make_omni()
        batch = batch_of(policy, samples)
        learner = ppo(
            policy,
            shared,
            kl_beta=0.1,
            kl=KLConfig(place="reward", kind="k1"),
            entropy_coef=0.01,
            ptx=PtxConfig(coef=0.3),
            tis_cap=1.05,
            micro_batch_tokens=budget,
            share_prompts=share,
        )
        disturb(policy.trainable().values())  # away from the reference
        examples = [experience(policy, Example(s, t)) for s, t in zip(samples, ("yes", "no", "why"), strict=True)]
        mixed = [e for g in order for e in batch[3 * g : 3 * g + 3]]
        trained = learner.step(TrainBatch(mixed, [examples[:: 1 - 2 * order[0]]] * 2))
        advantages = [trained.advantages[3 * order.index(g) + i] for g in (0, 1) for i in range(3)]
        results.append((trained.metrics, advantages, all_gradients(learner)))
    metrics, advantages, expected = results[0]
    assert metrics["kl"] != 0 and metrics["critic/loss"] > 0 and metrics["ptx/loss"] > 0
    assert any(n.startswith("critic/value_head") for n in expected)
    for other, found, grads in results[1:]:
        assert found == pytest.approx(advantages, abs=1e-5)
        assert other == pytest.approx(metrics, abs=1e-5, rel=1e-5)
        assert_same_gradients(grads, expected)


@SHARED
def test_answers_without_tokens_train_nothing_and_disturb_nothing(samples: list[Sample], shared: bool) -> None:
    """One empty answer beside others, in a pack of its own or not; then a step of nothing else."""
    found = []
    for budget in (10_000, 1):
        policy = make_omni()
        learner = ppo(policy, shared, micro_batch_tokens=budget)
        trained = learner.step(TrainBatch(batch_of(policy, samples, ((5, 0, 3),), ((1.0, 0.0, -1.0),))))
        assert trained.advantages[1] == 0
        found.append(all_gradients(learner))
    assert_same_gradients(found[1], found[0])
    policy = make_omni()
    learner = ppo(policy, shared, micro_batch_tokens=1)
    before = snapshot(policy.trainable())
    trained = learner.step(TrainBatch(batch_of(policy, samples, ((0, 0),), ((0.0, 1.0),))))
    assert trained.metrics["grad_norm"] == 0 and not moved(before, policy.trainable())


def test_a_step_with_missing_groups_has_no_more_updates_than_mini_batches(samples: list[Sample]) -> None:
    """Dynamic sampling may leave fewer groups than were asked for: five answers for three mini-batches."""
    policy = make_omni()
    learner = worker(policy, mini_batches=3)
    metrics = learner.step(TrainBatch(batch_of(policy, samples, ((3, 2, 2), (2, 4)), ((1, 0, 2), (0, 1))))).metrics
    assert learner.optimizer.updates == 3 and metrics["lr"] == pytest.approx(1e-3)
    few = worker(make_omni(), mini_batches=3)
    few.step(TrainBatch(batch_of(few.policy, samples, ((3, 2),), ((1, 0),))))
    assert few.optimizer.updates == 2  # no empty one


# -- the critic ----------------------------------------------------------------------------------------------------


@SHARED
def test_a_critic_begins_at_zero(make_policy: Make, samples: list[Sample], shared: bool) -> None:
    policy = make_policy()
    learner = ppo(policy, shared, head=0.0)
    batch = learner.prepare(batch_of(policy, samples))
    assert all(e.values is not None and not e.values.any() for e in batch)
    metrics = learner.step(TrainBatch(batch_of(policy, samples))).metrics
    assert metrics["critic/value"] == 0 and metrics["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    # γ = 1 and V = 0: λ-returns are sums of what follows, weighted; at λ = 1 the score itself
    full = ppo(make_policy(), shared, head=0.0, estimator=EstimatorConfig(lam=1.0))
    loss = full.step(TrainBatch(batch_of(full.policy, samples))).metrics["critic/loss"]
    squares = [n * s**2 for ns, ss in zip(LENGTHS, SCORES, strict=True) for n, s in zip(ns, ss, strict=True)]
    assert loss == pytest.approx(0.5 * sum(squares) / sum(map(sum, LENGTHS)), rel=1e-6)


@SHARED
def test_log_probs_and_values_of_a_shared_trunk_come_from_one_pass(
    samples: list[Sample], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_omni()
    learner = ppo(policy, shared, epochs=2)
    assert learner.critic is not None
    batch = batch_of(policy, samples)
    alone = [(logprobs(policy, e), values(learner, e)) for e in batch]
    passes = []
    run = AudioPolicy.hidden
    monkeypatch.setattr(AudioPolicy, "hidden", lambda self, packed: passes.append(self) or run(self, packed))
    prepared = learner.prepare(batch)
    assert len(passes) == (1 if shared else 2)
    for e, (expected_logprobs, expected_values) in zip(prepared, alone, strict=True):
        assert e.values is not None and e.old_logprobs is not None
        torch.testing.assert_close(e.old_logprobs[e.loss_mask], expected_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(e.values[e.loss_mask], expected_values, atol=1e-5, rtol=0)
        assert expected_values.abs().max() > 1e-3


@SHARED
def test_in_its_warm_up_only_the_critic_moves(samples: list[Sample], shared: bool) -> None:
    """Of a shared trunk only the head; the average waits too, and the controller has nothing to follow."""
    policy = make_omni()
    critic = CriticConfig(shared=shared, warmup_steps=2, optim=OptimConfig(lr=1e-3))
    optim = OptimConfig(lr=1e-3, schedule="linear")
    config = RLConfig(steps=4, advantage="gae", critic=critic, ema_decay=0.5, ptx=PtxConfig(coef=1.0))
    learner = Trainer(policy, config, optim, 1.0, 8)
    assert learner.critic is not None and learner.ema is not None
    batch, examples = batch_of(policy, samples), [experience(policy, Example(samples[0], "yes"))]
    start, average = snapshot(policy.trainable()), {n: t.clone() for n, t in learner.ema.state().items()}
    for _ in range(2):
        before = snapshot(learner.critic.model.trainable())
        metrics = learner.step(TrainBatch(batch, [examples])).metrics
        names = moved(before, learner.critic.model.trainable())
        assert "value_head.linear.weight" in names and "value_head.linear.bias" in names
        assert not moved(start, policy.trainable()) and learner.optimizer.updates == 0
        assert "policy/loss" not in metrics and "ptx/loss" not in metrics and metrics["critic/loss"] > 0
        assert all(torch.equal(t, average[n]) for n, t in learner.ema.state().items())
    trunk = {n for n in names if not n.startswith("value_head")}
    assert bool(trunk) != shared
    metrics = learner.step(TrainBatch(batch, [examples])).metrics
    assert metrics["lr"] == 1e-3 and learner.step(TrainBatch(batch, [examples])).metrics["lr"] == 5e-4
    assert moved(start, policy.trainable()) and learner.optimizer.updates == 2 and "policy/loss" in metrics


def test_a_shared_trunk_has_the_values_gradient_times_its_coefficient(samples: list[Sample]) -> None:
    """Against plain autograd over answers one by one, with no advantage for the policy."""
    policy, twin = make_omni(), make_omni()
    learner = ppo(policy, shared=True, critic=CriticConfig(shared=True, coef=0.7, clip=None))
    mate = ppo(twin, shared=True)
    batch = learner.prepare(batch_of(policy, samples))
    returns = [torch.full((len(e),), float(i)) for i, e in enumerate(batch)]
    learner.step(TrainBatch([with_advantage(e, 0.0).replace(returns=r) for e, r in zip(batch, returns, strict=True)]))
    n = sum(int(e.loss_mask.sum()) for e in batch)
    assert mate.critic is not None
    for i, e in enumerate(batch):
        loss = 0.5 * ((mate.critic.model(pack_experiences([e])) - i) ** 2).sum() / n
        grads = torch.autograd.grad(
            loss, [*twin.trainable().values(), *mate.critic.model.head.parameters()], allow_unused=True
        )
        weights = [0.7] * len(twin.trainable()) + [0.7] * 2
        for p, g, w in zip(
            [*twin.trainable().values(), *mate.critic.model.head.parameters()], grads, weights, strict=True
        ):
            if g is not None:
                p.grad = w * g if p.grad is None else p.grad + w * g
    expected = {k: g for k, g in all_gradients(mate).items() if bool(g.any())}
    found = {k: g for k, g in all_gradients(learner).items() if bool(g.any())}
    assert any(name.startswith("policy/") for name in found)
    assert_same_gradients(found, expected)


@SHARED
def test_the_value_loss_in_float64(samples: list[Sample], shared: bool) -> None:
    """½·max((V - R)², (V_old ± clip - R)²), a mean over all sampled tokens of the step; V has moved since V_old."""
    policy = make_omni()
    learner = ppo(policy, shared, estimator=EstimatorConfig(lam=0.9, gamma=0.95))
    raw = batch_of(policy, samples)
    batch = compute_advantages(learner.prepare(raw), learner.config, 0.0)
    assert learner.critic is not None
    disturb(learner.critic.model.head.parameters(), 0.03)
    total, clipped, n = 0.0, 0, 0
    for e in batch:
        assert e.values is not None and e.returns is not None and e.rewards is not None
        old = e.values[e.loss_mask].double()
        own, following, advantage = e.rewards[e.loss_mask].double(), 0.0, 0.0
        returns = []
        for t in reversed(range(len(old))):
            advantage = float(own[t] + 0.95 * following - old[t]) + 0.95 * 0.9 * advantage
            following = float(old[t])
            returns.append(advantage + following)
        for v, o, r in zip(values(learner, e).double().tolist(), old.tolist(), reversed(returns), strict=True):
            near = o + min(max(v - o, -0.2), 0.2)
            total += 0.5 * max((v - r) ** 2, (near - r) ** 2)
            clipped += (near - r) ** 2 > (v - r) ** 2
            n += 1
    assert clipped  # the clip is part of it
    metrics = learner.step(TrainBatch(batch)).metrics
    assert metrics["critic/loss"] == pytest.approx(total / n, rel=1e-5)
    assert metrics["critic/clip_frac"] == pytest.approx(clipped / n, abs=1e-6)


def test_explained_variance_by_hand(samples: list[Sample]) -> None:
    policy = make_omni()
    learner = ppo(policy)
    batch = [with_advantage(e, 0.0) for e in batch_of(policy, samples, ((2,), (1,)), ((0.0,), (0.0,)))]
    streams = [torch.zeros(len(e)) for e in batch]

    def tokens(*flat: float) -> list[Tensor]:
        split = torch.tensor(flat, dtype=torch.float32).split([2, 1])
        return [s.masked_scatter(e.loss_mask, x) for s, e, x in zip(streams, batch, split, strict=True)]

    # returns 0, 3, 6: variance 6; left 0, 1, 2: variance 2/3
    filled = zip(batch, tokens(0, 2, 4), tokens(0, 3, 6), strict=True)
    metrics = learner.step(TrainBatch([e.replace(values=v, returns=r) for e, v, r in filled])).metrics
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (2 / 3) / 6)
    assert metrics["critic/value"] == pytest.approx(2)


@SHARED
def test_the_critic_hears_the_right_audio(make_policy: Make, samples: list[Sample], shared: bool) -> None:
    """Another waveform moves its own prompt's values and no other's; a swap moves those two; the loss follows."""
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples]
    noise = np.random.default_rng(0).normal(0, 0.1, 14_400).astype(np.float32)
    other = AudioClip(array=clips[1].array + noise, sample_rate=16_000)  # type: ignore[operator]
    found: dict[str, tuple[list[Tensor], float]] = {}
    for name, sounds in (
        ("same", clips),
        ("other", [clips[0], other, clips[2]]),
        ("swapped", [clips[1], clips[0], clips[2]]),
    ):
        policy = make_policy()
        learner = ppo(policy, shared, head=0.3)
        asked = [with_audio(s, c) for s, c in zip(samples, clips, strict=True)]
        batch = batch_of(policy, asked, ((3, 2),) * 3, ((1.0, 0.0),) * 3)
        batch = [e.replace(audio=(sounds[i // 2],)) for i, e in enumerate(batch)]
        heard = [e.values for e in learner.prepare(batch)]
        fixed = [with_advantage(e, 0.0).replace(values=torch.zeros(len(e)), returns=torch.ones(len(e))) for e in batch]
        found[name] = [v for v in heard if v is not None], learner.step(TrainBatch(fixed)).metrics["critic/loss"]
    before, loss = found["same"]
    for name, touched in (("other", {1}), ("swapped", {0, 1})):
        after, changed = found[name]
        for i, (a, b) in enumerate(zip(after, before, strict=True)):
            gap = float((a - b).abs().max())
            assert gap > 1e-4 if i // 2 in touched else gap < 1e-6, (name, i, gap)
        assert abs(changed - loss) > 1e-5, name


@pytest.mark.parametrize(
    ("advantage", "loss"), [("gae", "ppo"), ("rloo", "reinforce"), ("reinforce++-baseline", "ppo")]
)
def test_a_toy_reward_rises(samples: list[Sample], advantage: str, loss: str) -> None:
    """The share of even token ids: PPO, RLOO and REINFORCE++-baseline move it in twenty steps."""
    policy = make_omni()
    critic = CriticConfig(warmup_steps=1, optim=OptimConfig(lr=3e-3))
    config = RLConfig(steps=20, kl_beta=0.0, advantage=advantage, loss=loss, critic=critic)  # type: ignore[arg-type]
    learner = Trainer(policy, config, OptimConfig(lr=3e-3), 1.0, TOKENS)
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=TOKENS))
    means = []
    for step in range(20):
        rollouts = engine.generate([Request(s, 8, seed=step, group_id=s.id) for s in samples])
        scored = [r.with_score(Score(float((r.segments[0].ids % 2 == 0).float().mean()))) for r in rollouts]
        learner.step(TrainBatch([Experience.from_rollout(r) for r in scored]))
        means.append(sum(r.score.total for r in scored if r.score) / len(scored))
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.15, means


# -- the KL --------------------------------------------------------------------------------------------------------


def kl_by_hand(learner: Trainer, reference: AudioPolicy, batch: Sequence[Experience]) -> float:
    """k3 over all sampled tokens, one answer at a time, in float64."""
    gap = torch.cat([logprobs(learner.policy, e).double() - logprobs(reference, e).double() for e in batch])
    return float(((-gap).exp() + gap - 1).mean())


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_controller_follows_the_kl_that_is_logged(samples: list[Sample], where: str) -> None:
    for control, gain in (("log-space", 0.5), ("horizon", 6 / 200), ("fixed", 0.0)):
        policy, start = make_omni(), make_omni()
        batch = batch_of(policy, samples)
        learner = worker(
            policy, lr=2e-3, kl_beta=0.2, kl=KLConfig(place=where, control=control, target=0.01, gain=0.5, horizon=200)
        )
        disturb(policy.trainable().values(), 0.005)
        beta, seen = 0.2, []
        for _ in range(3):
            expected = kl_by_hand(learner, start, batch)
            metrics = learner.step(TrainBatch(batch)).metrics
            assert metrics["kl"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
            assert metrics["kl/beta"] == pytest.approx(beta, rel=1e-12)  # the one that this step used
            beta *= 1 + gain * min(max(metrics["kl"] / 0.01 - 1, -0.2), 0.2)
            assert learner.kl.beta == pytest.approx(beta, rel=1e-12)
            seen.append(metrics["kl"])
        assert min(seen) > 0
        resumed = worker(
            make_omni(), kl_beta=0.2, kl=KLConfig(place=where, control=control, target=0.01, gain=0.5, horizon=200)
        )
        resumed.load(learner.state(), "here")
        assert resumed.kl == learner.kl and resumed.steps == 3


# -- the average ---------------------------------------------------------------------------------------------------


def test_the_average_by_hand() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    half = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.bfloat16))
    ema = EMA({"p": p, "half": half}, decay=0.75)
    for new in ([5.0, 2.0], [1.0, 6.0]):
        with torch.no_grad():
            p.copy_(torch.tensor(new))
            half.add_(1)
        ema.update()
    # 1 → 1 + ¼·4 = 2 → 2 - ¼ = 1.75;  2 → 2 → 3;  3 → 3.25 → 3.6875, kept in float32
    assert ema.state()["p"].tolist() == [1.75, 3.0] and ema.state()["half"].tolist() == [3.6875]
    assert ema.state()["half"].dtype == torch.float32
    assert p.tolist() == [1.0, 6.0] and half.item() == 5
    with pytest.raises(ValueError, match="there: its moving average is of another architecture"):
        ema.load({"p": torch.zeros(2)}, "there")


# -- the supervised term -------------------------------------------------------------------------------------------


def test_the_supervised_gradient_is_added_times_its_coefficient(samples: list[Sample]) -> None:
    """RL alone, the mean negative log-likelihood alone by plain autograd, and both."""
    alone, both, plain = make_omni(), make_omni(), make_omni()
    batch = batch_of(alone, samples)
    examples = [experience(alone, Example(s, t)) for s, t in zip(samples, ("yes", "no no", "English"), strict=True)]
    worker(alone).step(TrainBatch(batch))
    metrics = worker(both, ptx=PtxConfig(coef=0.6, batch=3)).step(TrainBatch(batch, [examples])).metrics
    losses = torch.cat([-plain.forward(pack_experiences([e])).logprobs for e in examples])
    losses.mean().backward()
    assert metrics["ptx/loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-6)
    rl_part, sft_part = gradients(alone), gradients(plain)
    for name, grad in gradients(both).items():
        expected = rl_part[name] + 0.6 * sft_part[name]
        torch.testing.assert_close(grad, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-5, msg=name)
    assert max(float(g.abs().max()) for g in sft_part.values()) > 1e-3


def test_every_update_has_supervised_examples_of_its_own(samples: list[Sample]) -> None:
    learner = worker(make_omni(), epochs=2, ptx=PtxConfig(coef=1.0, batch=1))
    policy, group = learner.policy, LocalGroup([learner])
    assert isinstance(policy, AudioPolicy)
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=2)).generate([Request(samples[0], 3)])
    batch = RolloutBatch([r.with_score(Score(0.0)) for r in rollouts], [])
    workers = Workers(learner.config, group, GroupEngine(group))
    examples = [Example(samples[0], text) for text in ("yes", "no no", "why", "English")]
    steps = [step_batch(policy, batch, step, learner.config, 0, workers, examples, ()) for step in range(2)]
    assert [[len(part) for part in step.supervised] for step in steps] == [[1, 1], [1, 1]]
    assert len({tuple(e.ids.tolist()) for step in steps for part in step.supervised for e in part}) == 4


def test_the_supervised_term_needs_examples(samples: list[Sample], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "test", [], RLConfig())
    with pytest.raises(ValueError, match=r"ptx\.coef is set, but there are no supervised examples"):
        train_rl(
            make_omni(),
            samples,
            lambda rollouts: [Score(0.0) for _ in rollouts],
            run,
            config=RLConfig(ptx=PtxConfig(coef=0.1)),
            optim=OptimConfig(),
            sampling=SamplingConfig(),
        )


def test_streams_have_no_one_budget_of_an_answer() -> None:
    stream = Sample("talk", (), turns=(Turn(AudioClip(array=np.zeros(160, np.float32), sample_rate=16_000), 0.01),))
    check_given([stream], RLConfig(aggregation="token-mean"), (), ())
    with pytest.raises(ValueError, match=r"sample 'talk' is a stream of several turns: take 'token-mean'"):
        check_given([stream], RLConfig(aggregation="sequence-mean-token-sum"), (), ())


# -- resuming ------------------------------------------------------------------------------------------------------


@SHARED
def test_ppo_continues_bit_by_bit(samples: list[Sample], tmp_path: Path, shared: bool) -> None:
    """Critic in its warm-up's last step, average, controlled KL, schedule: all come back."""

    def fresh() -> Trainer:
        critic = CriticConfig(shared=shared, warmup_steps=2, optim=OptimConfig(lr=1e-3, warmup_steps=3))
        return worker(
            make_omni(),
            advantage="gae",
            critic=critic,
            kl_beta=0.1,
            kl=KLConfig(place="reward", control="log-space"),
            ema_decay=0.7,
            epochs=2,
            warmup=3,
        )

    def step(w: Trainer, k: int) -> dict[str, float]:
        scores = [[s + k for s in row] for row in SCORES]
        return w.step(TrainBatch(batch_of(w.policy, samples, LENGTHS, scores))).metrics

    straight = fresh()
    for k in range(4):
        last = step(straight, k)
        if k in (0, 2):
            save_checkpoint(tmp_path / f"step_{k + 1}", straight.policy, straight.state(), {"step": k + 1})
    for begin in (1, 3):
        resumed = fresh()
        trainer, meta = load_checkpoint(tmp_path / f"step_{begin}", resumed.policy)
        resumed.load(trainer, "here")
        assert meta.step == begin == resumed.steps
        for k in range(begin, 4):
            metrics = step(resumed, k)
        assert metrics == last
        assert resumed.critic is not None and straight.critic is not None
        assert not moved(snapshot(straight.policy.trainable()), resumed.policy.trainable())
        assert not moved(snapshot(straight.critic.model.trainable()), resumed.critic.model.trainable())
        a, b = straight.state(), resumed.state()
        assert a.keys() == b.keys() >= {"optimizer", "progress", "critic", "critic_optimizer", "ema"}
        for part in a:
            assert a[part].keys() == b[part].keys()
            assert all(torch.equal(x, b[part][n]) for n, x in a[part].items()), part


def test_a_checkpoint_without_a_critic_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    grpo = worker(make_omni())
    grpo.step(TrainBatch(batch_of(grpo.policy, samples)))
    save_checkpoint(tmp_path / "grpo", grpo.policy, grpo.state(), {"step": 1})
    for learner, missing in ((ppo(make_omni()), "critic"), (worker(make_omni(), ema_decay=0.9), "ema")):
        trainer, _ = load_checkpoint(tmp_path / "grpo", learner.policy)
        with pytest.raises(ValueError, match=f"there: the checkpoint holds no {missing}; it was written without one"):
            learner.load(trainer, "there")
    shared, own = ppo(make_omni(), shared=True), ppo(make_omni())
    with pytest.raises(ValueError, match="there: its critic is of another architecture"):
        own.load(shared.state(), "there")


# -- a trained tower -----------------------------------------------------------------------------------------------


def test_a_trained_tower_hears_each_clip_once_an_update(
    make_policy: Make, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its group lies in several packs; policy and critic have towers of their own."""
    found, calls = [], []
    for budget in (10_000, 1):
        policy = make_policy(ModelConfig(audio="full"))
        encode_audio = type(policy.backbone).encode_audio

        def spy(self, model, mels, encode_audio=encode_audio):  # type: ignore[no-untyped-def]
            if torch.is_grad_enabled():
                calls[-1].append(id(model))
            return encode_audio(self, model, mels)

        learner = ppo(policy, micro_batch_tokens=budget)
        batch = batch_of(policy, samples)
        assert len(micro_batches(batch, budget)) == (1 if budget > 1 else 6)
        calls.append([])
        with monkeypatch.context() as patched:
            patched.setattr(type(policy.backbone), "encode_audio", spy)
            learner.step(TrainBatch(batch))
        assert learner.critic is not None
        for model in (policy.model, learner.critic.model.trunk.model):
            assert calls[-1].count(id(model)) == 2  # prompts
        assert len(calls[-1]) == 4
        found.append(all_gradients(learner))
    assert_same_gradients(found[1], found[0])
    tower = [n for n, g in found[0].items() if "audio_tower" in n and bool(g.any())]
    assert any(n.startswith("policy/") for n in tower) and any(n.startswith("critic/") for n in tower)


def test_a_failed_update_leaves_no_hearing_behind(samples: list[Sample]) -> None:
    policy = make_omni(ModelConfig(audio="full"))
    learner = worker(policy)
    batch = [with_advantage(e, 1.0) for e in batch_of(policy, samples)]
    broken = [*batch[:5], batch[5].replace(advantages=torch.full((len(batch[5]),), torch.inf))]
    before = snapshot(policy.trainable())
    with pytest.raises(FloatingPointError, match=repr(samples[1].id)):
        learner.step(TrainBatch(broken))
    assert not moved(before, policy.trainable())
    twin = worker(make_omni(ModelConfig(audio="full")))
    learner.step(TrainBatch(batch))
    twin.step(TrainBatch(batch))
    assert not moved(snapshot(policy.trainable()), twin.policy.trainable())
