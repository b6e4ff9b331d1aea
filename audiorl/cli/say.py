"""Hear a checkpoint speak while it generates: a WAV file, or samples for a player."""

from __future__ import annotations

import sys
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from audiorl.cli._sound import PIPE_CLOSED, STOPPED, Write, check_output, pcm16, samples_to_stdout, wav_file
from audiorl.config import SamplingConfig
from audiorl.options import first_word, parse


@dataclass(frozen=True)
class SayOptions:
    """Let a checkpoint say a text, and hear it while it is generated: audiorl say MODEL --text "Good morning." --raw |
    aplay -f S16_LE -r 24000 -c1. At the end stderr says how long the first sound took."""

    model: Positional[str]
    """A model that speaks: a folder or hub id, a checkpoint, or a run folder (its newest checkpoint)."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    text: str = ""
    """Text to say; - reads it from stdin. Required."""
    voice: Path | None = None
    """A recording of the voice to imitate; of a talker the name of one of its voices."""
    voice_text: str = ""
    """Text that is said in --voice."""
    out: Path | None = None
    """The WAV file to write, 16 bits; an older one is replaced."""
    raw: bool = False
    """Write samples to stdout as they are made: 16 bits, little-endian, mono, at the codec's rate."""
    codec: str | None = None
    """The audio tokenizer of the model's codes; by default the folder codec/ in or above the model's."""
    block_frames: int = 4
    """Frames that are decoded together; fewer are heard sooner and cost more calls of the codec."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, max_frames=750)
    """How it speaks: temperature, top-p, top-k, most frames."""
    seed: int = 0
    """Seed of sampling: equal seeds give equal speech."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


def main(args: list[str]) -> int:
    """Say the text. Return the exit code: 0, 1 for a model that said nothing, 130 after Ctrl-C, 141 for a closed pipe.

    Raises ValueError for options that do not go together, a model that writes text only, and an unreadable voice.
    """
    first_word(args, 'say: name a model first, for example: audiorl say runs/tts --text "Good morning." --out a.wav')
    options = parse(SayOptions, args, prog="audiorl say")
    for wrong, message in (
        (not options.text.strip(), 'say: name the text, such as --text "Good morning.", or - for stdin'),
        (options.raw == (options.out is not None), "say: give --out FILE.wav, or --raw with a player behind a pipe"),
        (
            options.voice and options.voice.is_file() and not options.voice_text.strip(),
            f"--voice-text: give what is said in {options.voice}",
        ),
        (options.voice_text and not options.voice, "--voice-text: belongs to --voice, the recording of it"),
        (options.block_frames < 1, f"--block-frames: {options.block_frames}; a block must have at least 1 frame"),
    ):
        if wrong:
            raise ValueError(message)
    check_output(options.out, options.raw)
    try:
        with samples_to_stdout() if options.raw else nullcontext(None) as write_raw:
            return _say(options, write_raw)
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        return PIPE_CLOSED


def _say(options: SayOptions, write_raw: Write | None) -> int:
    from audiorl.audio import AudioClip, seconds
    from audiorl.eval._speech import load_speaking
    from audiorl.eval.metrics.speech import real_time_factor
    from audiorl.models.families.talker import TalkerPolicy
    from audiorl.rollout.speech import speech_blocks
    from audiorl.run.folder import newest_checkpoint
    from audiorl.tasks.tts.prompts import SHORTEST_VOICE, speech_sample

    text, voice = sys.stdin.read() if options.text == "-" else options.text, None
    if not text.strip():
        raise ValueError("--text -: stdin holds no text to say")
    named = options.voice is not None and not options.voice_text
    if options.voice is not None and not named:
        clip = AudioClip(path=str(options.voice))
        clip.load()
        if seconds(clip) < SHORTEST_VOICE:
            raise ValueError(f"--voice: {clip.path} is {seconds(clip):.2f} s long; give at least {SHORTEST_VOICE} s")
        voice = (options.voice_text, clip)
    sample = speech_sample("said", text.strip(), voice=voice)
    policy = load_speaking(newest_checkpoint(options.model, options.phase), options.codec, options.device)
    assert policy.codec is not None
    if named:
        if not isinstance(policy, TalkerPolicy):
            raise ValueError(f"--voice {options.voice}: no such recording, and the model has no voices by name")
        policy.speak_in(str(options.voice))
    rate, where, written = policy.codec.sample_rate, f"; {options.out}" if options.out else "", 0
    if options.raw:
        print(f"16 bits, little-endian, mono, {rate} Hz", file=sys.stderr)
    blocks = speech_blocks(policy, sample, options.sampling, seed=options.seed, block_frames=options.block_frames)
    try:
        with closing(blocks), wav_file(options.out, rate) if options.out else nullcontext(write_raw) as write:
            assert write is not None
            while True:
                wav = next(blocks)
                write(pcm16(wav))
                written += len(wav)
    except StopIteration as end:
        rollout, speech = end.value
    except KeyboardInterrupt:
        # Ctrl-C may have come between a block and its count: a file says itself how long it is.
        length = written / rate
        if options.out and options.out.is_file():
            length = seconds(AudioClip(path=str(options.out)))
        print(f"stopped after {length:.2f} s of speech{where}", file=sys.stderr)
        raise
    if speech.first_audio is None:
        print("nothing was said", file=sys.stderr)
        return 1
    factor = real_time_factor(speech.seconds, written / rate)
    print(
        f"first audio after {speech.first_audio:.2f} s; {written / rate:.2f} s of speech in {speech.seconds:.2f} s, "
        f"real-time factor {factor:.2f}{where}",
        file=sys.stderr,
    )
    if rollout.segments[-1].stop_reason == "length":
        print("(cut off; --sampling.max-frames sets the length)", file=sys.stderr)
    return 0
