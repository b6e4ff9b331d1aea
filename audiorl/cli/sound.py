"""Make a sound of a text with a trained flow, as a WAV file; with a sound before, edit a part of it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from audiorl.cli._sound import check_output
from audiorl.config.flow import FlowInference
from audiorl.options import first_word, parse

if TYPE_CHECKING:
    from audiorl.audio import AudioClip
    from audiorl.models.flow import FlowPolicy


@dataclass(frozen=True)
class MakeSoundOptions(FlowInference):
    """Make sounds with a flow: audiorl sound runs/sound --text "A bell, then a dog." --seconds 4 --out bell.wav."""

    model: Positional[str]
    """A flow: the folder of a checkpoint, or a run folder (its newest checkpoint)."""
    text: str = ""
    """The sound that is asked for. Required, or --thought, --say, --enhance, or --audio with --edit."""
    thought: str = ""
    """Which events, when, where and how loud, as the thoughts that the flow was trained on say it."""
    video: Path | None = None
    """A .npy file of silent video, for a flow that was trained with some: frames or features."""
    video_rate: float | None = None
    """Frames a second of --video."""
    audio: Path | None = None
    """A recording to change by --edit, or to lengthen by --seconds."""
    edit: str = ""
    """With --audio: the change, such as "Remove the dog."; all outside of --region stays bit for bit."""
    region: tuple[str, ...] = ()
    """With --audio: the parts to be made anew, START:END in seconds or the name of an event in --thought; by default
    what --edit says ("from 1.2 to 3.4 s")."""
    say: str = ""
    """Words to be said, for a flow that was trained on rows of the task tts."""
    voice: Path | None = None
    """A recording whose voice and rate --say takes."""
    voice_text: str = ""
    """What is said in --voice."""
    enhance: Path | None = None
    """A noisy recording of speech to make clean, for a flow that was trained on rows of the task enhance."""
    seconds: float | None = None
    """How long the sound is; by default 4 s, as long as --audio, or what --say takes at the rate of --voice."""
    out: Path | None = None
    """The WAV file to write, of 16 bits, or of floats with --audio; an older one is replaced. Several sounds are
    numbered. Required."""
    count: int = 1
    """How many sounds to make."""


def main(args: list[str]) -> int:
    """Make the sounds. Return 0. Raises ValueError for options that contradict each other or ask for too much."""
    first_word(args, 'sound: name a flow first, for example: audiorl sound runs/sound --text "A bell." --out bell.wav')
    options = parse(MakeSoundOptions, args, prog="audiorl sound")
    asked = (options.text, options.thought, options.edit, options.say)
    for wrong, message in (
        (not any(map(str.strip, asked)) and not options.enhance, 'sound: say what is to be heard: --text "A bell."'),
        (options.out is None, "sound: name the file to write: --out FILE.wav"),
        (options.count < 1, f"--count is {options.count}; make at least 1 sound"),
        ((options.edit or options.region) and not options.audio, "--audio: name the recording that --edit changes"),
        (options.audio and options.text, '--text: of --audio say the change: --edit "Remove the dog."'),
        (options.say and options.enhance, "--say, --enhance: give one of the two"),
        ((options.say or options.enhance) and options.audio, "--audio: is for --edit; leave it out"),
        (
            options.voice and not (options.say and options.voice_text),
            "--voice: give --say, and what it says: --voice-text",
        ),
        (options.voice_text and not options.voice, "--voice-text: name the recording that says it, too: --voice"),
        (options.seconds is not None and options.seconds <= 0, f"--seconds is {options.seconds}; give more than 0"),
        (
            options.say and not options.voice and not options.seconds,
            "--say: give --voice, or the --seconds that it takes",
        ),
        (options.enhance and options.thought, "--thought: what is enhanced has none; leave it out"),
        ((options.say or options.enhance) and options.video, "--video: is for other sounds than speech; leave it out"),
        (options.enhance and options.seconds, "--seconds: what is enhanced stays as long as it is; leave it out"),
        (options.video and options.video_rate is None, "--video: give its frames a second, too: --video-rate"),
    ):
        if wrong:
            raise ValueError(message)
    check_output(options.out, False)
    _make(options)
    return 0


def _make(options: MakeSoundOptions) -> None:
    from audiorl.audio import AudioClip, seconds, write_wav
    from audiorl.protocols import Request
    from audiorl.rollout.flow import engine_for
    from audiorl.tasks.sound.rows import speech_sound
    from audiorl.tasks.sound.scenes import read_regions
    from audiorl.types import Message, Sample

    length = options.seconds or (4.0 if options.audio is None else seconds(AudioClip(path=str(options.audio))))
    about: dict[str, object] = {"duration": length, "thought": options.thought}
    if options.audio is not None:
        about["before"] = AudioClip(path=str(options.audio))
        about["mask"] = read_regions(options.region, options.edit, options.thought, length)
        if not about["mask"] and not options.seconds:
            raise ValueError("--region: say which part is to be made anew, START:END in seconds, such as 1.2:3.4")
    engine = engine_for(options.model, options)
    policy = engine.policy
    if options.video is not None:
        if not policy.model.config.video:
            raise ValueError(f"--video: {options.model} was trained without video; leave it out")
        about |= {"video": str(options.video), "video_rate": options.video_rate}
    text = (options.edit or options.text).strip()
    sample = Sample("sound", (Message("user", (text,)),), task="sound", metadata=about)
    if options.enhance:
        sample = speech_sound("sound", "enhance", "", {"before": AudioClip(path=str(options.enhance))}, text)
    elif options.say:
        about = {"thought": options.thought} | ({"duration": options.seconds} if options.seconds else {})
        if options.voice:
            about |= {"prompt_audio": AudioClip(path=str(options.voice)), "prompt_text": options.voice_text}
        sample = speech_sound("sound", "tts", options.say, about, text)
    assert options.out is not None
    # Each sound of a group follows the ODE from a noise of its own.
    requests = [Request(sample, seed=options.seed + k, greedy=True) for k in range(options.count)]
    for number, rollout in enumerate(engine.generate(requests)):
        out = options.out if options.count == 1 else options.out.with_stem(f"{options.out.stem}-{number + 1}")
        sound = rollout.spoken_audio
        assert sound is not None and sound.array is not None and sound.sample_rate is not None
        write_wav(out, sound.array, sound.sample_rate, "PCM_16" if options.audio is None else "FLOAT")
        print(f"{out}: {len(sound.array) / sound.sample_rate:.2f} s, {sound.sample_rate} Hz", file=sys.stderr)


def edited(model: Path, before: AudioClip, regions: Sequence[str], text: str, thought: str) -> AudioClip:
    """Return a sound with regions made anew by the newest flow of a run folder, each time from another noise.

    Raises ValueError for regions that `read_regions` refuses, and for what the flow cannot make.
    """
    if not (text or thought):
        raise ValueError("say what is to change, or give a thought")
    from audiorl.audio import seconds
    from audiorl.protocols import Request
    from audiorl.rollout.flow import FlowEngine
    from audiorl.run.folder import newest_checkpoint
    from audiorl.tasks.sound.scenes import read_regions
    from audiorl.types import Message, Sample

    length = seconds(before)
    about = {"before": before, "duration": length, "mask": read_regions(regions, text, thought, length)}
    sample = Sample("sound", (Message("user", (text,)),), task="sound", metadata={**about, "thought": thought})
    engine = FlowEngine(_held(newest_checkpoint(model)))
    (rollout,) = engine.generate([Request(sample, seed=secrets.randbits(32), greedy=True)])
    assert rollout.spoken_audio is not None
    return rollout.spoken_audio


@lru_cache(maxsize=2)
def _held(checkpoint: str) -> FlowPolicy:
    from audiorl.rollout.flow import load_sounding

    return load_sounding(checkpoint)
