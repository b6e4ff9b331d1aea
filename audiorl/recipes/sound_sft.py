"""Supervised training of a flow that makes sounds from captions, thoughts, video or other sounds.

    audiorl train sound-sft --out runs/sound --codec mels --data scenes/train.jsonl --held-out scenes/test.jsonl
    audiorl train sound-sft --out runs/big --codec runs/codec/codec --data audiocaps.jsonl --model.autocast True \\
        --network.width 1024 --network.heads 16 --network.joint-blocks 7 --network.single-blocks 14

A row has a caption and the audio file that it describes; a thought (events, times, places, written out), video and
for edits what is there before may be added (`audiorl.tasks.sound.rows`). Each is left out of a tenth of the prompts,
and all are of another tenth, so that the flow also works with any part of them, and with guidance
(`--sampling.guidance-scale 3`). Before and after, the flow makes the held-out sounds, whose loss is measured, too;
`--reward-file` scores them. `audiorl sound runs/sound --text …` makes more, and sound-grpo goes on from the checkpoint.
`--tiny` tries the recipe on the bundled speech.
"""

from __future__ import annotations

from dataclasses import dataclass

from audiorl.config import OptimConfig
from audiorl.config.flow import FlowSFTConfig
from audiorl.config.recipe import RewardOptions
from audiorl.recipes._sound import TINY, SoundConfig, begin_flow, flow_from, measure_sounds, sounds_of
from audiorl.report import write_report
from audiorl.rewards import load_reward
from audiorl.run.folder import Run
from audiorl.train.flow import sound_sft


@dataclass(frozen=True)
class SoundSFTConfig(RewardOptions, SoundConfig):
    sft: FlowSFTConfig = FlowSFTConfig()
    """Batches and loss. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=3e-4, warmup_steps=100, schedule="cosine")
    """The optimizer."""


def tiny() -> SoundSFTConfig:
    return SoundSFTConfig(**TINY, sft=FlowSFTConfig(batch_size=2, save_every=1))


def main(config: SoundSFTConfig, run: Run) -> None:
    policy = flow_from(config, run)
    reward = None if config.reward_file is None else load_reward(config.reward_file)
    train, held_out = sounds_of(config, policy, learned=True, reward=reward)
    begin_flow(config, run, policy, train)
    training = config.with_steps_for(config.sft, len(train))
    measure_sounds(run, "before", policy, held_out, config, config.sft, reward)
    sound_sft(policy, train, run, config=training, optim=config.optim, seed=config.seed)
    measure_sounds(run, "after", policy, held_out, config, config.sft, reward)
    print(write_report(run.dir))
