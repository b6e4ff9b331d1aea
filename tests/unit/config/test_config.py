"""Options out of their range are refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from audiorl.config import (
    CriticConfig,
    EstimatorConfig,
    KLConfig,
    LoraConfig,
    LossOptions,
    ModelConfig,
    OptimConfig,
    PreferenceConfig,
    ProcessRewardConfig,
    PtxConfig,
    RewardModelConfig,
    RLConfig,
    SamplingConfig,
    ScoreConfig,
    SFTConfig,
    require_sound,
)
from audiorl.config.recipe import ControlOptions

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (OptimConfig, "lr", INF),
        (OptimConfig, "lr", NAN),
        (OptimConfig, "lr", -1e-6),
        (OptimConfig, "eps", 0.0),
        (OptimConfig, "betas", (0.9, 1.0)),
        (OptimConfig, "betas", (NAN, 0.9)),
        (OptimConfig, "weight_decay", -0.1),
        (OptimConfig, "warmup_steps", -1),
        (OptimConfig, "max_grad_norm", NAN),
        (SamplingConfig, "temperature", -1.0),
        (SamplingConfig, "temperature", NAN),
        (SamplingConfig, "temperature", INF),
        (SamplingConfig, "audio_temperature", -1.0),
        (SamplingConfig, "top_p", 0.0),
        (SamplingConfig, "audio_top_p", 1.5),
        (SamplingConfig, "top_k", -1),
        (SamplingConfig, "max_new_tokens", 0),
        (SamplingConfig, "max_batch_tokens", 0),
        (RLConfig, "kl_beta", -0.1),
        (RLConfig, "kl_beta", NAN),
        (KLConfig, "target", 0.0),
        (RLConfig, "clip_low", -0.2),
        (RLConfig, "clip_high", NAN),
        (LossOptions, "dual_clip", 1.0),
        (LossOptions, "ratio_cap", 0.0),
        (RLConfig, "tis_cap", -2.0),
        (EstimatorConfig, "gamma", 1.1),
        (EstimatorConfig, "lam", -0.1),
        (RLConfig, "entropy_coef", NAN),
        (PtxConfig, "coef", -1.0),
        (RLConfig, "rollouts_every", 0),
        (RLConfig, "eval_every", -1),
        (RLConfig, "micro_batch_tokens", 0),
        (RLConfig, "ema_decay", 1.0),
        (CriticConfig, "coef", -1.0),
        (CriticConfig, "clip", NAN),
        (SFTConfig, "micro_batch_tokens", 0),
        (PreferenceConfig, "beta", -0.1),
        (PreferenceConfig, "sft_coef", NAN),
        (RewardModelConfig, "regulariser", INF),
        (ProcessRewardConfig, "batch_size", 0),
        (LoraConfig, "rank", -1),
        (ModelConfig, "audio_cache_mb", -1),
    ],
)
def test_a_number_out_of_range_is_refused(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; it must be "):
        kind(**{name: value})


@pytest.mark.parametrize("advantage", ["grpo", "maxrl", "gdpo", "time-index", "rloo", "reinforce++-baseline"])
def test_a_group_of_one_has_no_group_advantage(advantage: Any) -> None:
    with pytest.raises(ValueError, match="group_size must be at least 2"):
        RLConfig(advantage=advantage, group_size=1)
    RLConfig(advantage="gae", group_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gae", "group_size": 1, "dynamic_sampling": 3}, "'gae' does not compare groups of 1"),
        ({"advantage": "mine.py:f", "group_size": 1, "dynamic_sampling": 3}, "'mine.py:f' does not compare groups"),
        ({"kl": KLConfig(kind="k1")}, "kl.kind 'k1' does nothing as a term of the loss.*: set kl.kind 'k3' or 'k2'"),
    ],
)
def test_options_without_an_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RLConfig(**options)
    RLConfig(advantage="mine.py:f", group_size=2, dynamic_sampling=3)
    RLConfig(advantage="process", group_size=1, dynamic_sampling=3)
    RLConfig(kl=KLConfig(kind="k1", place="reward"))


def test_a_time_limit_ends_the_control() -> None:
    require_sound(ControlOptions())
    with pytest.raises(ValueError, match=r"control_optim\.schedule is 'cosine'; it must be 'constant'"):
        require_sound(ControlOptions(control_optim=OptimConfig(schedule="cosine")))


def test_greedy_answers_are_not_compared() -> None:
    greedy = SamplingConfig(temperature=0.0)
    with pytest.raises(ValueError, match=r"sampling\.temperature 0 gives 8 times the same answer to a prompt"):
        RLConfig().check_sampling(greedy)
    RLConfig(advantage="gae", group_size=1).check_sampling(greedy)
    RLConfig().check_sampling(SamplingConfig(temperature=0.0, audio_temperature=0.8))


def test_options_that_an_estimator_does_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores\.clip and scores\.normalize do not apply"):
        RLConfig(advantage="gdpo", scores=ScoreConfig(normalize=True))
    with pytest.raises(ValueError, match="'maxrl' compares scores, not token rewards"):
        RLConfig(advantage="maxrl", kl=KLConfig(place="reward"))


def test_names_that_are_no_estimator_and_no_loss() -> None:
    """A function of a file is named by its path."""
    with pytest.raises(ValueError, match=r"advantage 'grop': give one of grpo, rloo, .*, or FILE\.py:FUNCTION"):
        RLConfig(advantage="grop")
    with pytest.raises(ValueError, match=r"loss 'clip': give one of ppo, gspo, .*, or FILE\.py:FUNCTION"):
        RLConfig(**{"loss": "clip"})
    assert RLConfig(loss="mine.py:loss", advantage="mine.py:advantage").loss == "mine.py:loss"
