"""A critic next to trainers that do not hold it: the same metrics and weights as in the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import PackedBatch
from audiorl.config import CriticConfig, KLConfig, OptimConfig, RLConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.local import LocalGroup, World
from audiorl.run.checkpoint import read_state, save_checkpoint
from audiorl.train.optim import steps
from audiorl.train.rl import critic as critics
from audiorl.train.rl.critic import CriticWorker
from audiorl.train.rl.processes import GroupEngine, Workers
from audiorl.train.rl.trainer import Separate, TrainBatch, Trainer
from audiorl.types import Sample
from tests.conftest import make_omni
from tests.support.experiences import LENGTHS, SCORES, batch_of

OPTIM = OptimConfig(lr=1e-3, warmup_steps=2)
CONFIG = RLConfig(
    steps=4,
    prompts_per_step=2,
    group_size=3,
    epochs=2,
    mini_batches=2,
    advantage="gae",
    kl=KLConfig(place="reward", kind="k1", control="log-space"),
    kl_beta=0.1,
    ema_decay=0.7,
    micro_batch_tokens=100,
    critic=CriticConfig(warmup_steps=2, optim=OPTIM),
)


def trainer(separate: bool) -> Trainer:
    return Trainer(make_omni(), CONFIG, OPTIM, 1.0, 8, separate=Separate(critic=separate))


def critic() -> CriticWorker:
    return CriticWorker(make_omni(), CONFIG, World())


def test_separate_critic_trains_as_the_trainers_own(samples: list[Sample], tmp_path: Path) -> None:
    """Over two warm-up steps and two more; the fourth goes on from the state that the other layout had after three."""
    whole, without, separate = trainer(False), trainer(True), critic()
    for step in range(4):
        if step == 3:
            for folder, state in (("whole", whole.state()), ("parts", without.state() | separate.critic.state())):
                save_checkpoint(tmp_path / folder, without.policy, state, {"step": step})
            separate = critic()
            separate.resume(str(tmp_path / "whole"))
            whole.load(read_state(tmp_path / "parts"), "parts")
        scores = [[s + step for s in row] for row in SCORES]
        experiences = batch_of(whole.policy, samples, LENGTHS, scores)
        group, critics = LocalGroup([without]), LocalGroup([separate])
        expected = whole.step(TrainBatch(experiences))
        workers = Workers(CONFIG, group, GroupEngine(group), critics=critics)
        output = workers.step(TrainBatch(workers.fill_in(experiences)))
        assert output.metrics.keys() == expected.metrics.keys()
        assert output.metrics == pytest.approx(expected.metrics, abs=1e-6), step
        assert output.advantages == pytest.approx(expected.advantages, abs=1e-6)
    assert whole.critic is not None and without.critic is None
    for one, two in (
        (whole.policy.weights(), without.policy.weights()),
        (whole.critic.model.weights(), separate.critic.model.weights()),
        (whole.critic.optimizer.state(), separate.critic.optimizer.state()),
    ):
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=0)
    assert separate.critic.optimizer.updates == 16 and without.optimizer.updates == 8


def test_an_update_that_is_not_finite_changes_no_weight(samples: list[Sample]) -> None:
    worker = critic()
    batch = batch_of(make_omni(), samples)
    with_values = [e.replace(values=v, returns=v.clone()) for e, v in zip(batch, worker.values(batch), strict=True)]
    returns = with_values[4].returns
    assert returns is not None
    wrong = with_values[4].replace(returns=returns.masked_fill(with_values[4].loss_mask, float("nan")))
    before = {name: w.clone() for name, w in worker.critic.model.weights().items()}
    with pytest.raises(FloatingPointError, match=r"the loss of .*'sample-1'.* is nan; this update changed no weight"):
        worker.update(TrainBatch([wrong], mini_batches=[0]))
    assert all(torch.equal(w, before[n]) for n, w in worker.critic.model.weights().items())


def test_passes_that_memory_does_not_hold_are_halved(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FEWEST", 50)
    batch = batch_of(make_omni(), samples)

    def trained(held: int, planned: int) -> tuple[list[Tensor], dict[str, float], list[int]]:
        monkeypatch.setattr(critics, "with_pass_tokens", lambda c, *_: replace(c, micro_batch_tokens=planned))
        worker = CriticWorker(make_omni(), replace(CONFIG, micro_batch_tokens=None), World())
        trunk, lengths = worker.critic.model.trunk, list[int]()
        hidden = trunk.predicting_hidden

        def small(packed: PackedBatch) -> Tensor:
            lengths.append(len(packed.ids))
            if len(packed.ids) > held:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return hidden(packed)

        monkeypatch.setattr(trunk, "predicting_hidden", small)
        values = worker.values(batch)
        worker.config = replace(worker.config, micro_batch_tokens=planned)
        filled = [e.replace(values=v, returns=v + e.loss_mask) for e, v in zip(batch, values, strict=True)]
        return values, worker.update(TrainBatch(filled)), lengths

    values, metrics, parts = trained(10_000, 100)
    again, halved, lengths = trained(max(parts), 200)
    assert max(lengths) > max(parts) and halved == pytest.approx(metrics, abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(again, values, strict=True))


@pytest.mark.usefixtures("own_runtime")
@pytest.mark.parametrize("background", ["on", "off"])
def test_a_critic_writes_its_state_and_no_model(background: Literal["on", "off"], tmp_path: Path) -> None:
    set_current(RuntimeConfig(async_save=background))
    worker = critic()
    worker.begin_save(str(tmp_path))
    files = worker.saved_files(wait=True)
    assert files is not None and list(files) == [file.name for file in tmp_path.iterdir()]
    assert list(files) == ["trainer-critic.safetensors"]
    saved = read_state(tmp_path)
    assert saved.keys() == {"critic", "critic_optimizer"}
    assert all(torch.equal(saved["critic"][name], w) for name, w in worker.critic.model.weights().items())


def test_a_checkpoint_without_a_critic(samples: list[Sample], tmp_path: Path) -> None:
    without = trainer(True)
    save_checkpoint(tmp_path / "grpo", without.policy, without.state(), {"step": 0})
    with pytest.raises(ValueError, match="the checkpoint holds no critic; it was written without one"):
        critic().resume(str(tmp_path / "grpo"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RLConfig(), r"runtime\.critics 2: advantage 'grpo' has no critic"),
        (RLConfig(advantage="gae", critic=CriticConfig(shared=True)), r"the policy's trunk \(critic\.shared\)"),
    ],
)
def test_phases_without_a_critic_of_its_own(config: RLConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config.check_separate_critic(2)
