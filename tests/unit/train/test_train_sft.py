"""Supervised fine-tuning: its two weightings by formula, whatever the packing, and the order in which it sees data."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from audiorl.config import ModelConfig, OptimConfig, SFTConfig
from audiorl.data.schedule import rough_length
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.run.folder import Run
from audiorl.train.fit import Learner
from audiorl.train.sft import sft, sft_loss
from audiorl.types import Sample
from tests.conftest import Make, make_omni, make_text, readable
from tests.support.data_trainers import UNCLIPPED, alone, assert_hears, assert_same_gradients, gradients, times_heard


def examples(samples: Sequence[Sample]) -> list[Example]:
    texts = ("yes", "no why English Spanish French", "English", "who speaks")
    return [Example(samples[i % len(samples)], text) for i, text in enumerate(texts)]


@pytest.mark.parametrize("budget", [1, 150, 100_000])
@pytest.mark.parametrize("weighting", ["token", "sequence"])
def test_the_loss_is_its_formula_whatever_the_packing(samples: list[Sample], weighting: str, budget: int) -> None:
    """token: the mean over tokens. sequence: (1/M) Σ L_i / N_i (LongAlign)."""
    policy, batch = make_omni(), examples(samples)
    answers = [alone(policy, e.sample, e.target) for e in batch]
    assert len({len(a) for a in answers}) > 1
    expected = -torch.cat(answers).mean() if weighting == "token" else -torch.stack([a.mean() for a in answers]).mean()
    expected.backward()
    grads = gradients(policy)
    config = SFTConfig(weighting=weighting, micro_batch_tokens=budget)  # type: ignore[arg-type]
    metrics = Learner(sft_loss, policy, config, UNCLIPPED).train(batch)
    assert metrics["sft/loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(gradients(policy), grads, 1e-6)


def test_supervised_training_hears_the_right_audio(make_policy: Make, samples: list[Sample]) -> None:
    def learn(policy: AudioPolicy, asked: Sequence[Sample]) -> float:
        batch = [Example(asked[0], "yes"), Example(asked[1], "no why")]
        return Learner(sft_loss, policy, SFTConfig(), UNCLIPPED).train(batch)["sft/loss"]

    assert_hears(make_policy, samples, learn)


def test_a_trained_tower_hears_each_clip_once_an_update(make_policy: Make, samples: list[Sample]) -> None:
    policy, batch = make_policy(ModelConfig(audio="full")), examples(samples)
    worker = Learner(sft_loss, policy, SFTConfig(micro_batch_tokens=1), UNCLIPPED)
    for _ in range(2):
        assert times_heard(policy, lambda: worker.train(batch)) == len(samples)
    assert any("audio_tower" in name for name in gradients(policy))


def test_an_interrupted_phase_ends_with_the_same_weights(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [Example(s, t) for s in readable(make_text(), samples) for t in ("yes", "no why English", "who")]
    config = SFTConfig(steps=5, batch_size=2, sort=True, weighting="sequence", save_every=2)
    optim = OptimConfig(lr=1e-3, warmup_steps=2, schedule="cosine")
    assert len({rough_length(e.sample, e.target) for e in batch}) > 1

    def go(run: Run) -> AudioPolicy:
        policy = make_text()
        with run:
            sft(policy, batch, run, config=config, optim=optim)
        return policy

    whole = go(Run.create(tmp_path / "a", "r.py", [], config))
    run, train = Run.create(tmp_path / "b", "r.py", [], config), Learner.train
    with monkeypatch.context() as patched, pytest.raises(Interrupted):

        def stopping(self: Learner, examples: Sequence[Example]) -> dict[str, float]:
            if self.optimizer.updates == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return train(self, examples)

        patched.setattr(Learner, "train", stopping)
        go(run)
    again = go(Run.open(run.dir))
    for (name, a), b in zip(whole.trainable().items(), again.trainable().values(), strict=True):
        assert torch.equal(a, b), name
    finished = go(Run.open(run.dir))  # a finished phase only loads its result
    assert all(
        torch.equal(a, b) for a, b in zip(finished.trainable().values(), again.trainable().values(), strict=True)
    )
