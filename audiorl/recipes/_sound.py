"""Parts that recipes of flows share: read rows, load a flow and its codec, measure held-out sounds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from audiorl.audio import name as clip_name
from audiorl.audio import seconds, write_wav
from audiorl.config import ModelConfig
from audiorl.config.flow import FlowConfig, FlowModelConfig, FlowSFTConfig
from audiorl.config.recipe import RecipeConfig, RewardOptions
from audiorl.data.augment import noisy_recording
from audiorl.data.corpus import bundled_speech
from audiorl.data.rows import write_json_lines
from audiorl.data.schema import FieldError
from audiorl.data.schema.scenes import Task
from audiorl.eval._common import paired_changes, read_rows, summarize
from audiorl.eval._speech import kept_clip
from audiorl.eval.metrics.text import word_errors
from audiorl.models.export import codec_of
from audiorl.models.flow import FlowPolicy, new_flow
from audiorl.models.flow.policy import duration_of, recording_of
from audiorl.protocols import Request, Reward
from audiorl.recipes._common import RowCheck, read_split
from audiorl.rewards import Term, WeightedSum, load_reward
from audiorl.rewards.asr import references_of
from audiorl.rewards.combine import check_sample, score_rollouts
from audiorl.rewards.llm_judge import RecordedSpeech
from audiorl.rollout.flow import FlowEngine, load_sounding
from audiorl.run.folder import Run
from audiorl.speech_models import load_recogniser, load_tagger
from audiorl.speech_models.protocol import Recogniser
from audiorl.tasks.sound.rewards import Clean, EventPlaces, EventsHeard, EventTimes, SoundModels
from audiorl.tasks.sound.rows import read_sounds, speech_sound
from audiorl.tasks.sound.scenes import Event, write_thought
from audiorl.tasks.tts.rewards import signal_to_distortion
from audiorl.train.flow import held_out_loss
from audiorl.types import Message, Rollout, Sample
from tokenizers_audio import load as load_codec
from tokenizers_audio.unified import UnifiedTokenizer
from tokenizers_audio.unified.config import MELS

SPEECH = ("enhance", "tts")
"""Tasks whose rows are speech."""
MEASURED = 1000
"""Most training sounds from which a codec of log-mels, and mean and deviation of latents, are taken."""
TINY: dict[str, Any] = dict(
    codec="mels", data=("bundled",), held_out_count=2, max_steps=2, model=ModelConfig(), sampling=FlowConfig(steps=4),
    network=FlowModelConfig(width=32, heads=2, joint_blocks=1, single_blocks=1, text_rows=256, max_seconds=2.0),
)  # fmt: skip
"""Options of tiny() of recipes for flows."""


@dataclass(frozen=True)
class SoundConfig(RecipeConfig):
    """Options of recipes for flows."""

    counts_steps = ("sampling",)
    path: str = "new"
    """The flow: a folder, such as a checkpoint; `new` makes a random one of the size `network`."""
    codec: str | None = None
    """The audio tokenizer whose latents the flow makes: a folder or hub id (ours, DAC, EnCodec); None: the folder
    codec/ in or above the flow's. For a new flow `mels` makes one of the training sounds in seconds: principal
    components of log-mels, from which a vocoder without learned parts guesses the phases."""
    data: tuple[str, ...] = ()
    """Rows with caption, audio, thought, video, duration, events: see `audiorl.tasks.sound.rows`."""
    task: Task = "sound"
    """What rows ask for that have no column `task`: sound of captions; `enhance`, clean speech of noisy; or `tts`, text
    to be said in the voice of `prompt_audio`."""
    judge: str | None = None
    """A recogniser by path or hub id that transcribes held-out speech before and after; None: no word error rates."""
    language: str | None = None
    """Language for multilingual recognisers, such as en; None: they guess."""
    network: FlowModelConfig = FlowModelConfig()
    """The size of a new flow."""
    sampling: FlowConfig = FlowConfig()
    """How sounds are made."""


@dataclass(frozen=True)
class SoundRewards(RewardOptions):
    """Options of recipes that reward sounds."""

    tagger: str | None = None
    """What hears which events a sound has, for the part `events`: a folder of `audiorl data train-tagger`."""
    parts: tuple[Literal["events", "times", "places", "clean"], ...] = ()
    """Rewards that are added up, each from 0 to 1: which events are heard, when, from where, how cleanly. By default
    all of them, of a mono flow without places; with a reward file none."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the parts by name, such as `places 3`; 1 for those that are not named."""


def sounds_of(
    config: SoundConfig, policy: FlowPolicy, *, learned: bool, reward: Reward | None = None
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples (to train on, held out). Raises ValueError for rows that the flow cannot make, for those to be
    `learned` that have no sound, and for those that the reward cannot score."""

    def check(sample: Sample) -> list[Sample]:
        policy.prompt(sample)
        if config.judge is not None and sample.task in SPEECH:
            references_of(sample, "basic", config.language)
        if learned and "audio" not in sample.metadata and "after" not in sample.metadata:
            raise FieldError("audio", f"sample {sample.id!r}: no sound to learn; give its file")
        if (clip := recording_of(sample)) is not None:
            lasts = seconds(clip)
            if math.ceil(lasts * policy.frame_rate - 1e-6) < policy.frames_of(duration_of(sample)) - 1:
                raise FieldError("duration", f"{clip_name(clip)} lasts {lasts:.2f} s, less than asked for")
        if reward is not None:
            check_sample(reward, sample)
        return []

    asked = RowCheck(lambda: policy, trained=check, measured=check)  # type: ignore[arg-type, return-value]

    def bundled(name: str) -> list[Sample]:
        return bundled_sounds(name, config.task, policy.model.config.max_seconds / 2)

    return read_split(config, bundled, partial(read_sounds, task=config.task), check=asked)


def bundled_sounds(name: str, task: Task = "sound", max_seconds: float = 1.0) -> list[Sample]:
    """Return the bundled English speech: as sounds of one event whose captions are what is said, or for a task of
    speech; the voice to imitate is that of the recording before."""
    samples, speech = [], bundled_speech(("en",), max_seconds=max_seconds)
    for u, voice in zip(speech, [speech[-1], *speech], strict=False):
        about: dict[str, Any] = {"audio": u.clip, "duration": u.duration}
        if task == "sound":
            event = Event("speech", 0.0, u.duration)
            about |= {"events": [asdict(event)], "thought": write_thought([event])}
            samples.append(Sample(u.id, (Message("user", (u.text,)),), task="sound", metadata=about))
            continue
        about |= {"prompt_audio": voice.clip, "prompt_text": voice.text} if task == "tts" else {}
        samples.append(speech_sound(u.id, task, u.text, about))
    return samples


def sound_reward(config: SoundRewards, channels: int, device: str) -> WeightedSum:
    """Return the reward of the options for a flow that makes so many channels. Raises ValueError without a tagger."""
    every = ("events", "times", "places", "clean") if channels == 2 else ("events", "times", "clean")
    parts = config.parts or (every if config.reward_file is None else ())
    if unknown := sorted(config.weights.keys() - parts):
        raise ValueError(f"--weights: no part is called {unknown[0]!r}; there are {', '.join(parts)}")
    if "events" in parts and config.tagger is None:
        raise ValueError(
            "--tagger: name a folder of `audiorl data train-tagger`, which hears the events of a sound; or give a "
            "--reward-file, or --parts without events, such as --parts times clean"
        )
    sounds = SoundModels(load_tagger(config.tagger, device=device) if config.tagger else None)
    makers = {"events": EventsHeard, "times": EventTimes, "places": EventPlaces, "clean": Clean}
    terms = [Term(part, makers[part](sounds), config.weights.get(part, 1.0)) for part in dict.fromkeys(parts)]
    if config.reward_file is not None:
        terms.append(Term("user", load_reward(config.reward_file), config.reward_weight))
    return WeightedSum(tuple(terms))


def flow_from(config: SoundConfig, run: Run) -> FlowPolicy:
    """Return the flow that the options name, with its codec; see `begin_flow` for a new one."""
    if config.path != "new":
        return load_sounding(config.path, config.codec, config.adapted)
    if config.codec is None:
        raise ValueError("--codec: name the audio tokenizer whose latents a new flow is to make, or mels")
    kept = run.dir / "codec"
    if config.codec == "mels" and not kept.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return new_flow(config.network, UnifiedTokenizer(MELS), config.adapted, config.seed)
    return new_flow(config.network, load_codec(kept if kept.exists() else config.codec), config.adapted, config.seed)


def begin_flow(config: SoundConfig, run: Run, policy: FlowPolicy, samples: Sequence[Sample]) -> None:
    """Give a new flow what it takes from the training sounds: the codec `mels`, mean and deviation of latents. Raises
    ValueError where there are none."""
    codec: Any = policy.codec
    clips = [clip for s in samples if (clip := recording_of(s)) is not None]
    if config.path == "new":
        if not clips:
            raise ValueError(
                "--data: no row has audio, of which a new flow takes its codec and scales; give some, or a trained flow"
            )
        clips = clips[:: -(-len(clips) // MEASURED)]
        if config.codec == "mels" and not (run.dir / "codec").exists():
            rate = codec.sample_rate
            waves = [clip.load(rate) for clip in clips]
            rows = [np.pad(wave, (0, -len(wave) % rate)).reshape(-1, rate) for wave in waves]  # of a second each
            codec.begin(torch.from_numpy(np.concatenate(rows)), torch.Generator().manual_seed(config.seed))
            policy.codec_identity = ""
            policy.set_codec(codec)
        policy.measure_latents(clips)
    if not (run.dir / "codec").exists():  # where the run's other processes and readers of its checkpoints find it
        if isinstance(codec, UnifiedTokenizer):
            codec.save(run.dir / "codec")
        elif (source := config.codec or codec_of(config.path)) and Path(source).is_dir():
            shutil.copytree(source, run.dir / "codec")


def measure_sounds(
    run: Run,
    name: str,
    policy: FlowPolicy,
    samples: Sequence[Sample],
    config: SoundConfig,
    sft: FlowSFTConfig,
    reward: Reward | None = None,
) -> None:
    """Make every held-out sound once by the ODE, as a phase of the run: eval/NAME/*.wav, eval/NAME.jsonl and the entry
    NAME of eval.json, with the mean reward, its parts, and the flow matching loss of rows that have a sound."""
    if not samples:
        return
    if not run.finished(name):
        values = sound_scores(policy, samples, config, sft, reward, run.dir / "eval" / name)
        for row, sample in zip(values, samples, strict=True):
            if (recording := recording_of(sample)) is not None:
                row["reference_audio"] = kept_clip(recording, run.dir)
            row["spoken_audio"] = {"path": str(Path("eval") / name / row.pop("file"))}
        write_json_lines(run.dir / "eval" / f"{name}.jsonl", values)
        result = summarized(values)
        earlier = run.dir / "eval" / "before.jsonl"
        if name != "before" and earlier.exists():
            both = ({r["id"]: numbers_of(r) for r in rows} for rows in (read_rows(earlier), values))
            result["changes"] = paired_changes(*both)
        run.write_result(name, result)
        run.finish(name, result)
    shown = {k: v for k, v in run.result(name).items() if isinstance(v, float) and k not in ("low", "high")}
    print(
        f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in shown.items())}, {len(samples)} sounds", flush=True
    )


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what is measured of a row."""
    return {name: value for name, value in row.items() if isinstance(value, float)}


def summarized(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of eval.json of some rows: of the reward, or without one of the loss."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in numbers_of(row).items():
            columns.setdefault(name, []).append(value)
    headline = "reward" if "reward" in columns else "flow_loss"
    return summarize(columns.pop(headline), headline, columns)


recogniser = lru_cache(maxsize=1)(load_recogniser)
"""`load_recogniser`, once for all evaluations of a run."""


def sound_scores(
    policy: FlowPolicy,
    samples: Sequence[Sample],
    config: SoundConfig,
    sft: FlowSFTConfig,
    reward: Reward | None,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each sample: id, text, loss where it has a sound, reward and its parts; with a `folder` the
    sounds are written there as `file`."""
    rollouts = FlowEngine(policy, config.sampling).generate([Request(s, greedy=True) for s in samples])
    scores = [None] * len(samples) if reward is None else score_rollouts(reward, rollouts)
    judge = None if config.judge is None else recogniser(config.judge, config.language)
    rows: list[dict[str, Any]] = []
    for number, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        sample = rollout.sample
        row: dict[str, Any] = {"id": sample.id, "text": "".join(sample.references) or policy.prompt(sample).caption}
        if sample.metadata.get("video") is not None and "events" in sample.metadata:
            video = str(Path(sample.metadata["video"]).resolve())
            row["scene"] = {"video": video, "events": sample.metadata["events"]}
        if recording_of(sample) is not None:
            row["flow_loss"] = held_out_loss(policy, [sample], sft)
        if sample.task in SPEECH:
            row |= speech_scores(rollout, judge, policy.audio.codec.sample_rate, config.language)
        if score is not None:
            row |= {"reward": float(score.total), **{k: float(v) for k, v in score.parts.items()}}
        if folder is not None and (sound := rollout.spoken_audio) is not None:
            assert sound.array is not None and sound.sample_rate is not None
            row["file"] = f"{number:04d}.wav"
            write_wav(folder / row["file"], sound.array, sound.sample_rate)
        rows.append(row)
    return rows


def speech_scores(rollout: Rollout, judge: Recogniser | None, rate: int, language: str | None) -> dict[str, Any]:
    """Return the SI-SDR in dB of enhanced speech and of the noisy recording, and what the judge understands with its
    word error rate."""
    sample, out = rollout.sample, dict[str, Any]()
    wave = RecordedSpeech(rate).waveform(rollout)
    assert wave is not None
    if sample.task == "enhance" and "audio" in sample.metadata:
        for name, other in (("si_sdr", wave), ("noisy_si_sdr", noisy_recording(sample).load(rate))):
            out[name] = signal_to_distortion(sample.metadata["audio"], other, rate)
    if judge is not None:
        (said,) = judge.transcribe([wave], rate)
        out |= {"transcript": said, "wer": word_errors(sample.references[0], said, "basic", language).rate}
    return out


def probe_sounds(
    policy: FlowPolicy, samples: Sequence[Sample], config: SoundConfig, sft: FlowSFTConfig, reward: Reward
) -> Callable[[], Mapping[str, float]] | None:
    """Return the evaluation for the training loop."""

    def measure() -> dict[str, float]:
        return numbers_of(summarized(sound_scores(policy, samples, config, sft, reward)))

    return measure if samples else None
