"""GRPO on speech recognition, reward 1 - WER (or 1 - CER), with guards against outputs that nobody said.

    audiorl train asr-grpo --out runs/asr --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data LibriSpeech/train-clean-100 --held-out LibriSpeech/test-other \\
        --retention wenetspeech_test_meeting.json --unit char

A clipped 1 - WER does not see how long an output is that is wrong throughout, nor text in brackets. Two penalties,
logged as reward/hallucination and reward/repetition, do: see `audiorl.rewards.Hallucination` and `Repetition`.
`--no-speech 200` trains on silence and noise too, for which nothing is to be written.

With hotwords, of rows (a column `hotwords`) or of a file (`--hotwords names.txt`), the prompt has a list of words that
may be said, and an error in them weighs `--hotword-weight` words; `--distractors 20` adds words that nobody says.

Before and after training, greedy transcripts are measured, as WER (with `--unit char` CER) overall and by language: of
held-out rows, of `--unseen` speakers and of `--retention`; of clips without speech the share for which nothing is
written, `silent`. Next to the reward stands `as_written`, 1 - CER
of the texts without normalisation, which nothing optimises. `--control` also trains on the same rows by SFT for as
many seconds.

The sets of `--retention` are measured before and after training. Where their error rate has risen by more than
`--retention-margin`, the run ends with an error; its checkpoints and report remain. `--path tiny --data bundled` tries
the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig, require_ranges
from audiorl.config.recipe import (
    ControlOptions,
    HeldOutOptions,
    HotwordOptions,
    PtxOptions,
    RecipeConfig,
    RewardOptions,
)
from audiorl.data.bundled import bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.data.no_speech import TRAINED, no_speech_samples
from audiorl.data.sets import HELD_OUT, stratified
from audiorl.eval._phases import ErrorRate
from audiorl.eval.metrics.text import Normalizer, check_normalizer
from audiorl.protocols import Reward
from audiorl.recipes._common import (
    evaluation_of,
    read_sets,
    read_split,
    rl_check,
    train_with_reward,
    with_user_reward,
)
from audiorl.rewards import CharAccuracy, Hallucination, HotwordAccuracy, Repetition, WeightedSum, WordAccuracy
from audiorl.rewards.asr import languages_of
from audiorl.run.folder import Run
from audiorl.types import Sample


@dataclass(frozen=True)
class ASRConfig(ControlOptions, HeldOutOptions, HotwordOptions, PtxOptions, RewardOptions, RecipeConfig):
    retention: tuple[str, ...] = ()
    """Sets on which the error rate must not rise, named like `data`: another language, another domain. At most
    `held_out_count` rows of them are measured."""
    retention_margin: float = 0.01
    """By how much the error rate on `retention` may rise (0.01: one percentage point) before the run ends with an
    error."""
    unit: Literal["word", "char"] = "word"
    """Errors are counted in words (reward 1 - WER) or in characters (reward 1 - CER)."""
    normalizer: Normalizer = "basic"
    """How texts are normalised before they are compared: english, basic, none, or FILE.py:FUNCTION; see
    `audiorl.eval.metrics.text.normalize`."""
    hotword_weight: float = 3.0
    """How many words a hotword weighs in the reward, where a row has some; see `audiorl.rewards.HotwordAccuracy`."""
    false_hotword_weight: float = 1.0
    """How many words a hotword that nobody said weighs, beside the error that it is."""
    hallucination_weight: float = 0.5
    """Weight of the penalty, in [-1, 0], on inserted words and on more words than fit into the audio; 0: none."""
    max_rate: float | None = None
    """Words (or characters) a second that fit into the audio; None: 5 words or 25 characters."""
    repetition_weight: float = 0.2
    """Weight of the penalty, in (-1, 0], on repeated n-grams that the reference does not repeat; 0: none."""
    repetition_n: int = 3
    """Words of such an n-gram."""
    no_speech_held_out: int = 26
    """Clips without speech that are measured, hum and clicks among them, which are in no training row; 0: none."""
    no_speech: int = 0
    """Training rows without speech: silence, white and pink noise of 2 to 8 s, whose transcript is empty."""
    rl: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
    """The estimator. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The policy's optimizer."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=128)
    """How transcripts are sampled in training; held-out ones are greedy and as long at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ranges(self, not_negative=("hallucination_weight", "repetition_weight", "distractors"))
        require_ranges(self, not_negative=("hotword_weight", "false_hotword_weight"))
        check_normalizer(self.normalizer)


def tiny() -> ASRConfig:
    return ASRConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        retention=("bundled",),
        no_speech=2,
        no_speech_held_out=3,
        control_sft=SFTConfig(batch_size=2),
        retention_margin=1.0,
        max_steps=2,
        model=ModelConfig(),
        rl=RLConfig(group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: ASRConfig, run: Run) -> None:
    errors = ErrorRate(config.unit, config.normalizer)
    accuracy: Reward = CharAccuracy(config.normalizer)
    if config.unit == "word":
        accuracy = HotwordAccuracy(config.normalizer, config.hotword_weight, config.false_hotword_weight)
    guards: dict[str, tuple[Reward, float]] = {
        "hallucination": (Hallucination(config.unit, config.normalizer, config.max_rate), config.hallucination_weight),
        "repetition": (Repetition(config.repetition_n, beyond_reference=True), config.repetition_weight),
    }
    weighted = {name: (guard, weight) for name, (guard, weight) in guards.items() if weight}
    reward = WeightedSum.of(accuracy=accuracy, **weighted)
    # 1 - CER of the texts as they are, or 1 - WER where the reward is that 1 - CER itself.
    rewarded = (config.unit, config.normalizer) == ("char", "none")
    outside = WeightedSum.of(as_written=WordAccuracy("none") if rewarded else CharAccuracy("none"))

    reward = with_user_reward(config, reward)
    check = rl_check(config, reward, config.sampling.max_new_tokens, tags=False)
    source: dict[str, Any] = {"bundled": lambda _: bundled_transcripts(), "read": read_samples, "think": False}
    source["keep_conversations"] = True
    samples, held_out = read_split(config, check=check, **source)
    languages = languages_of(samples)
    sets: dict[str, list[Sample]] = {}
    if config.retention:
        retained = read_sets(config.retention, config, check=check.held_out, **source)
        count = HELD_OUT if config.held_out_count is None else config.held_out_count
        sets["retention"] = stratified(retained, count, config.data_seed)[1]
    if count := config.no_speech_held_out:
        sets["no_speech"] = no_speech_samples(count, seed=config.data_seed + 1, languages=languages)
    policy = check.policy()
    if config.no_speech:
        samples += no_speech_samples(config.no_speech, TRAINED, seed=config.data_seed, languages=languages)
    evaluation = evaluation_of(
        config,
        samples,
        held_out,
        reward,
        config.sampling.max_new_tokens,
        check=check,
        keep_conversations=True,
        bundled=source["bundled"],
        outside=outside,
        sets=sets,
        errors=errors,
    )
    train_with_reward(config, run, policy, samples, evaluation, phase="grpo", tags=False)
    if config.retention:
        before, after = (run.result(f"retention_{when}")[errors.name] for when in ("before", "after"))
        if after > before + config.retention_margin:
            rose = f"{errors.name.upper()} rose from {before:.3f} to {after:.3f} on {', '.join(config.retention)}"
            raise ValueError(
                f"retention: {rose}, more than {config.retention_margin}; take an earlier checkpoint (of "
                "--keep-checkpoints), a lower optim.lr or a higher rl.kl_beta"
            )
