"""What is not finite stops a step before anything has changed and says which rollout it was; the run can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.config import CriticConfig, KLConfig, OptimConfig, PtxConfig, RLConfig
from audiorl.models import AudioPolicy
from audiorl.run.folder import Run
from audiorl.train.rl.trainer import TrainBatch, Trainer, with_logprobs
from audiorl.types import Sample
from tests.conftest import make_omni
from tests.support.experiences import batch_of, with_advantage
from tests.support.training_runs import CONFIG, Even, rows, train

NAN, INF = float("nan"), float("inf")


def worker(**config: object) -> Trainer:
    """One that has an optimizer state, and a critic and an average where asked."""
    critic = CriticConfig(shared=bool(config.pop("shared", False)), optim=OptimConfig(lr=1e-3))
    settings = RLConfig(**({"steps": 9, "prompts_per_step": 2, "group_size": 3, "critic": critic} | config))  # type: ignore[arg-type]
    return Trainer(make_omni(), settings, OptimConfig(lr=1e-3), 1.0, 8)


def everything(learner: Trainer) -> dict[str, Tensor]:
    """All weights and all state, by name."""
    out = {f"weights/{n}": p.detach().clone() for n, p in learner.policy.model.named_parameters()}
    for part, tensors in learner.state().items():
        out |= {f"{part}/{name}": t.clone() for name, t in tensors.items()}
    return out


def assert_untouched(learner: Trainer, before: dict[str, Tensor]) -> None:
    after = everything(learner)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


def spoiled(e: Experience, name: str, value: float) -> Experience:
    """`value` at the second sampled token."""
    stream = getattr(e, name).clone()
    stream[e.loss_mask.nonzero()[1]] = value
    return e.replace(**{name: stream})


KINDS = pytest.mark.parametrize(
    "config",
    [
        {},
        {"advantage": "gae", "ema_decay": 0.9},
        {"advantage": "gae", "shared": True},
        {"kl": KLConfig(place="reward"), "advantage": "reinforce++"},
        {"loss": "gspo", "kl_beta": 0.0},
        {"loss": "cispo", "tis_cap": 2.0},
    ],
    ids=["grpo", "ppo", "ppo shared", "reinforce++", "gspo", "cispo"],
)


@KINDS
def test_an_engines_logprob_that_is_not_finite(samples: list[Sample], config: dict[str, object]) -> None:
    learner = worker(**config)
    batch = batch_of(learner.policy, samples)
    learner.step(TrainBatch(batch))
    before = everything(learner)
    for value, text in ((INF, "inf"), (-INF, "-inf")):
        wrong = [*batch[:4], spoiled(batch[4], "rollout_logprobs", value), batch[5]]
        with pytest.raises(FloatingPointError, match=rf"'sample-1': the engine's log-prob is {text} at .* token 1;"):
            learner.step(TrainBatch(wrong))
        assert_untouched(learner, before)
    learner.step(TrainBatch(batch))  # it goes on as if nothing had been


@KINDS
def test_an_engines_logprob_that_is_nan_has_ratio_1(samples: list[Sample], config: dict[str, object]) -> None:
    """As if the engine had said what the trainer says: the same loss, gradient and metrics."""
    own, other = worker(**config), worker(**config)
    batch = batch_of(own.policy, samples)
    (filled,) = with_logprobs(batch[4:5], "old_logprobs", own.policy, own.config, own.temperatures)
    assert filled.old_logprobs is not None
    same = batch[4].replace(rollout_logprobs=filled.old_logprobs)
    unknown = spoiled(same, "rollout_logprobs", NAN)
    made = [w.step(TrainBatch([*batch[:4], e, batch[5]])).metrics for w, e in ((own, same), (other, unknown))]
    assert made[1] == pytest.approx(made[0], abs=1e-6)
    for name, tensor in everything(own).items():
        torch.testing.assert_close(tensor, everything(other)[name], rtol=1e-5, atol=1e-7, msg=name)


@KINDS
@pytest.mark.parametrize("place", [1, 4], ids=["short", "long"])
def test_a_poisoned_weight(samples: list[Sample], config: dict[str, object], place: int) -> None:
    """An embedding that one answer reads: that one is named, whether its pack is among the first or the last."""
    learner = worker(**config, micro_batch_tokens=1)
    batch = batch_of(learner.policy, samples)
    learner.step(TrainBatch(batch))
    batch[place] = poisoned(batch, place, learner.policy)
    before = everything(learner)
    with pytest.raises(
        FloatingPointError, match=r"rollout 'poisoned': (the log-prob|old_logprobs|values) is nan at its"
    ):
        learner.step(TrainBatch(batch))
    assert_untouched(learner, before)


@torch.no_grad()
def poisoned(batch: Sequence[Experience], place: int, policy: AudioPolicy) -> Experience:
    """The answer with a token in it that no other has, whose embedding is made nan."""
    rows = policy.backbone.decoder(policy.model).get_input_embeddings().weight
    free = int((torch.cat([e.ids for e in batch]).bincount(minlength=len(rows)) == 0).nonzero()[0])
    rows[free] = NAN
    ids = batch[place].ids.clone()
    ids[batch[place].prompt_length] = free
    return batch[place].replace(ids=ids, name="'poisoned'")


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.smoke), 2])
def test_a_loss_that_is_infinite(samples: list[Sample], epochs: int) -> None:
    """By an advantage, or by old log-probs from which the ratio overflows."""
    learner = worker(kl_beta=0.0, micro_batch_tokens=1, epochs=epochs)
    batch = [with_advantage(e, -1.0) for e in learner.prepare(batch_of(learner.policy, samples))]
    learner.step(TrainBatch(batch))
    before = everything(learner)
    batch = [e.replace(old_logprobs=e.rollout_logprobs) for e in batch]
    far = batch[3].replace(old_logprobs=torch.full((len(batch[3]),), -200.0))
    for wrong, what in (
        (with_advantage(batch[3], INF), "inf|nan"),
        (with_advantage(batch[3], NAN), "nan"),
        (far, "inf"),
    ):
        with pytest.raises(FloatingPointError, match=rf"the loss of 'sample-1' is -?({what}); this update changed"):
            learner.step(TrainBatch([*batch[:3], wrong.replace(name="'sample-1'"), *batch[4:]]))
        assert_untouched(learner, before)


@pytest.mark.parametrize("part", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_though_its_loss_is(samples: list[Sample], part: str) -> None:
    """Neither the policy nor its critic moves when the gradient of one of them cannot be used."""
    learner = worker(advantage="gae", ema_decay=0.5)
    batch = batch_of(learner.policy, samples)
    learner.step(TrainBatch(batch))
    before = everything(learner)
    assert learner.critic is not None
    own = learner.policy.trainable() if part == "policy" else learner.critic.model.trainable()
    name, weight = next((n, p) for n, p in own.items() if "layers.1.mlp" in n)
    hook = weight.register_hook(lambda grad: grad * INF)
    with pytest.raises(FloatingPointError, match=f"gradient of '{name}' is not finite; this update changed no weight"):
        learner.step(TrainBatch(batch))
    assert_untouched(learner, before)
    hook.remove()
    learner.step(TrainBatch(batch))


def test_a_supervised_loss_that_is_not_finite(samples: list[Sample]) -> None:
    learner = worker(ptx=PtxConfig(coef=1.0), kl_beta=0.0)
    batch = batch_of(learner.policy, samples)
    rows = learner.policy.backbone.decoder(learner.policy.model).get_input_embeddings().weight
    free = int((torch.cat([e.ids for e in batch]).bincount(minlength=len(rows)) == 0).nonzero()[0])
    ids = torch.cat([batch[0].ids[:-1], torch.tensor([free, free])])
    example = Experience(ids, torch.arange(len(ids)) >= len(ids) - 1, len(ids) - 1, batch[0].audio, name="'example'")
    with torch.no_grad():
        rows[free] = NAN
    before = everything(learner)
    with pytest.raises(FloatingPointError, match="the loss of 'example' is nan"):
        learner.step(TrainBatch(batch, [[example]]))
    assert_untouched(learner, before)


# -- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_that_a_bad_reward_stopped_is_resumed(samples: list[Sample], tmp_path: Path) -> None:
    """It stops in the third step naming the sample, keeps the second step's checkpoint, and ends as if undisturbed."""
    expected = train(Run.create(tmp_path / "whole", "test", [], CONFIG), samples, Even())
    with pytest.raises(ValueError, match=r"sample 'sample-\d': total is nan"):
        train(Run.create(tmp_path / "run", "test", [], CONFIG), samples, Even(NAN))
    checkpoints = tmp_path / "run" / "checkpoints" / "rl"
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step_000001", "step_000002"]
    assert len(rows(tmp_path / "run")) == 2
    reward = Even()
    found = train(Run.open(tmp_path / "run"), samples, reward)
    assert reward.calls == 2
    assert all(torch.equal(found[n], w) for n, w in expected.items())
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    for name in ("step_000004/model.safetensors", "step_000004/trainer.safetensors", "ema/model.safetensors"):
        other = tmp_path / "whole" / "checkpoints" / "rl" / name
        assert (checkpoints / name).read_bytes() == other.read_bytes(), name
    # finished: nothing is done again, and the weights come from the last checkpoint
    again = train(Run.open(tmp_path / "run"), samples, reward)
    assert reward.calls == 2 and all(torch.equal(again[n], w) for n, w in expected.items())


def test_an_update_that_makes_weights_infinite_is_not_saved(tmp_path: Path, samples: list[Sample]) -> None:
    """Every number of the configuration is finite, and so is the gradient; 1e37 · 100 is not."""
    optim = OptimConfig(lr=1e37, weight_decay=100.0)
    learner = Trainer(make_omni(), RLConfig(steps=9, prompts_per_step=2, group_size=3), optim, 1.0, 8)
    with pytest.raises(
        FloatingPointError, match=r"the update made the weight '.*' not finite \(learning rate 1e\+37\)"
    ):
        learner.step(TrainBatch(batch_of(learner.policy, samples)))
    run = Run.create(tmp_path / "run", "test", [], CONFIG)
    with pytest.raises(FloatingPointError, match="the update made the weight"):
        train(run, samples, Even(), optim)  # its first step trains the critic only
    saved = list((tmp_path / "run").rglob("*.safetensors"))
    assert {f.parent.name for f in saved} == {"step_000001"}
    assert all(bool(w.isfinite().all()) for f in saved for w in load_file(f).values())
