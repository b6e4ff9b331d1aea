"""GRPO of a language model that writes thoughts about sounds, on the sounds that a frozen flow makes of them.

    audiorl train thought-grpo --out runs/thoughts --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 --lora \\
        --flow runs/sound --tagger tagger --data scenes/train.jsonl --held-out scenes/new_files.jsonl

A thought says which events are heard, when, where and how loud (`audiorl.tasks.sound.scenes.write_thought`). The
model is asked for it with a row's caption, or with `--hear` its recording, and learns the rows' own thoughts first
(`--sft`; `--learn False` leaves it out). GRPO then scores each thought by its sound, `SoundOfThought`: the events and
times that are asked, the places where the flow makes stereo, and a clean sound (`--parts`). `thought`, the events of
the thought against those of the row, is measured where all held-out rows have some, and not rewarded. `--reward-file`
adds a reward of yours, which hears the sound as `rollout.spoken_audio`. `--tiny` tries the recipe; `--path new --hear
True --model.audio projector` begins with a random model that a CPU trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.config.flow import FlowConfig
from audiorl.config.recipe import RecipeConfig
from audiorl.data.manifest import Loaded
from audiorl.data.schema import FieldError
from audiorl.eval._phases import Evaluation
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.recipes._common import RowCheck, grpo_and_control, random_policy, read_split
from audiorl.recipes._sound import TINY, SoundConfig, SoundRewards, begin_flow, bundled_sounds, flow_from, sound_reward
from audiorl.report import write_report
from audiorl.rewards import WeightedSum
from audiorl.run.folder import Run, newest_checkpoint
from audiorl.speech_models import load_tagger
from audiorl.tasks.sound.rewards import SoundOfThought, ThoughtEvents
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import Event, write_thought
from audiorl.train.sft import sft
from audiorl.types import Message, Sample


@dataclass(frozen=True)
class ThoughtGRPOConfig(SoundRewards, RecipeConfig):
    counts_steps = ("sft", "sound")
    path: str = "Qwen/Qwen2.5-Omni-3B"
    """The model that writes: a folder or hub id; `new`: a small random one that hears, with the encoder of Whisper
    tiny."""
    flow: str = ""
    """The flow that makes sounds of thoughts: a checkpoint, or a run folder of sound-sft; `tiny` for a random one."""
    codec: str | None = None
    """The audio tokenizer of the flow's latents; None: the folder codec/ in or above the flow's."""
    sound: FlowConfig = FlowConfig(steps=12)
    """How the flow makes them; it follows the ODE."""
    hear: bool = False
    """Ask with a row's recording in place of its caption."""
    learn: bool = True
    """Learn the rows' own thoughts first."""
    control: bool = False
    """Also train the control: further SFT for as much compute as GRPO took."""
    sft: SFTConfig = SFTConfig(steps=200, batch_size=16, save_every=100)
    """The supervised start; the control takes its batches."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=20, schedule="cosine")
    """The optimizer of the supervised start."""
    rl: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=50, save_every=50)
    """GRPO. Its steps follow from `epochs` and `max_steps`."""
    rl_optim: OptimConfig = OptimConfig(lr=1e-6)
    """The optimizer of GRPO."""
    control_optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=10)
    """The optimizer of the control."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=256)
    """How thoughts are sampled; held-out ones are greedy and as long at most."""


def tiny() -> ThoughtGRPOConfig:
    return ThoughtGRPOConfig(
        path="tiny",
        flow="tiny",
        data=("bundled",),
        held_out_count=2,
        max_steps=1,
        parts=("times", "clean"),
        sound=FlowConfig(steps=3),
        model=ModelConfig(),
        sft=SFTConfig(steps=1, batch_size=2, save_every=1),
        rl=RLConfig(prompts_per_step=2, group_size=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def question(sample: Sample, hear: bool) -> Sample:
    """Return the sample that asks for the thought of a sound: of its caption, or with `hear` of its recording."""
    about = sample.metadata
    stereo = about.get("channels", 1) == 2
    example = [Event("bell", 0.5, 1.2, 0.0, -45.0 if stereo else None), Event("dog", 2.0, 2.75, -6.0, None)]
    if stereo:
        example[1] = replace(example[1], azimuth=0.0)
    (caption,) = sample.messages[0].content
    clip = about.get("audio")
    asks = (
        f"Write the thought of a sound of {about['duration']:g} s: which events are heard, from when to when, from "
        f"where and how loud. It has four lines, for example:\n{write_thought(example)}\n"
    )
    asks += "The sound is the one that you hear." if hear else f"The sound: {caption}"
    return Sample(
        sample.id,
        (Message("user", (clip, asks) if hear and isinstance(clip, AudioClip) else (asks,)),),
        (str(about["thought"]),) if about.get("thought") else (),
        task="thought",
        metadata={**about, "caption": "" if hear else caption},
    )


def new_policy(config: ThoughtGRPOConfig) -> AudioPolicy:
    """Return a small random model whose tokenizer knows the question and thoughts of the tagger's classes."""
    labels = load_tagger(config.tagger).labels if config.tagger else ("bell", "dog")
    about = {"duration": 1.0, "thought": write_thought([Event(label, 0.5, 1.2) for label in labels])}
    asked = question(Sample("", (Message("user", ("A bell.",)),), metadata=about), config.hear)
    return random_policy(config.model, [*asked.messages[0].content, about["thought"]] * 100, seed=config.seed)


def main(config: ThoughtGRPOConfig, run: Run) -> None:
    if not config.flow:
        raise ValueError("--flow: name the flow that makes sounds of the thoughts, such as runs/sound")
    frozen = ModelConfig(device=config.model.device)  # the other options of `model` are those of the writer
    random = SoundConfig(path="new", codec="mels", network=TINY["network"], model=frozen, seed=config.seed)
    made = replace(random, path=str(newest_checkpoint(config.flow)), codec=config.codec)
    flow = flow_from(random if config.flow == "tiny" else made, run)

    def read(path: Any, **options: Any) -> Loaded[Sample]:
        loaded = read_sounds(path, **options)
        return replace(loaded, samples=tuple(question(s, config.hear) for s in loaded.samples))

    def usable(sample: Sample) -> list[Sample | Example]:
        if config.hear and not sample.audio:
            raise FieldError("audio", f"sample {sample.id!r}: no sound to hear; give its file, or leave --hear out")
        learned = config.learn and sample.references
        return [sample, *([Example(sample, sample.references[0])] if learned else [])]

    tokens = config.sampling.max_new_tokens
    heard = sound_reward(config, flow.model.config.channels, config.model.device)
    reward = WeightedSum.of(sound=SoundOfThought(flow, heard, config.sound))
    new = new_policy(config) if config.path == "new" else None
    check = RowCheck.of(config, reward, new, new_tokens=tokens, eval_tokens=tokens, trained=usable, measured=usable)
    train, held_out = read_split(
        config, lambda name: [question(s, config.hear) for s in bundled_sounds(name)], read, check=check
    )
    examples = [Example(s, s.references[0]) for s in train if config.learn and s.references]
    if config.control and not examples:
        raise ValueError("--control: it goes on learning the rows' thoughts; give rows that have some, --learn True")
    if config.flow == "tiny":
        begin_flow(random, run, flow, train)
    policy = check.policy()
    if examples:
        sft(policy, examples, run, config=config.sft, optim=config.sft_optim, seed=config.seed)
    told = all("events" in s.metadata for s in held_out)
    outside = WeightedSum.of(thought=ThoughtEvents()) if told else None
    evaluation = Evaluation(reward, held_out, tokens, outside=outside, metric="sound")
    config = replace(config, rl=config.with_steps_for(config.rl, len(train)))
    grpo_and_control(config, run, policy, train, evaluation, examples)
    print(write_report(run.dir))
