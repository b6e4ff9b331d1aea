"""Interpret a recording or the microphone while it is spoken: text as it is written, and speech as it is said."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from audiorl.cli._sound import PIPE_CLOSED, STOPPED, Write, check_output, pcm16, samples_to_stdout, wav_file
from audiorl.config import SamplingConfig
from audiorl.options import parse

if TYPE_CHECKING:
    from audiorl.rollout.speech import CodecSpeechDecoder
    from audiorl.types import Segment

RATE = 16_000
"""Hz at which the model reads."""


@dataclass(frozen=True)
class InterpretOptions:
    """Interpret speech while it is spoken: audiorl interpret MODEL talk.wav --source-language es --target-language en.
    What is written after a chunk appears with its time. A model that speaks is heard: … --raw | aplay -f S16_LE -r
    24000 -c1."""

    model: Positional[str]
    """An interpreter: a folder or hub id, a checkpoint, or a run folder (its newest checkpoint)."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    audio: Positional[Path | None] = None
    """The recording; without one give --mic."""
    mic: bool = False
    """Listen to the microphone until Ctrl-C."""
    source_language: str = ""
    """Code of the language that is spoken, such as es. Required."""
    target_language: str = ""
    """Code of the language to translate into. Required."""
    real_time: bool = False
    """Read the recording as fast as it was spoken; by default as fast as the model is."""
    chunk_seconds: float = 0.96
    """Length of a chunk."""
    context: float = 1.04
    """Seconds before a chunk that the audio encoder reads with it."""
    history: float | None = None
    """The most seconds of the past that are carried, for long streams; by default all. Not for models that speak."""
    out: Path | None = None
    """For a model that speaks: the WAV file of what it says, each turn at its time; an older one is replaced."""
    raw: bool = False
    """For a model that speaks: write its samples to stdout as they are made, 16 bits, little-endian, mono, without the
    silence between turns. Text goes to stderr."""
    codec: str | None = None
    """The audio tokenizer of the model's codes; by default the folder codec/ in or above the model's."""
    sampling: SamplingConfig = SamplingConfig(
        temperature=0.0, max_new_tokens=48, audio_temperature=0.4, audio_top_p=0.9, max_frames=250
    )
    """How it is sampled after each chunk: text greedily by default."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


def main(args: list[str]) -> int:
    """Interpret to the end, or to Ctrl-C: the chunk is finished; a second Ctrl-C stops now. Return the exit code: 0,
    130 after Ctrl-C in a recording, 141 for a closed pipe.

    Raises ValueError for options that do not go together and for a recording that cannot be read.
    """
    options = parse(InterpretOptions, args or ["--help"], prog="audiorl interpret")
    if options.mic == (options.audio is not None):
        raise ValueError("interpret: give a recording, or --mic")
    if not (options.source_language and options.target_language):
        raise ValueError("interpret: give --source-language and --target-language, such as es and en")
    if options.mic and options.real_time:
        raise ValueError("--real-time: belongs to a recording; the microphone is no faster")
    check_output(options.out, options.raw)
    try:
        with samples_to_stdout() if options.raw else nullcontext(None) as write_raw:
            return _interpret(options, write_raw)
    except BrokenPipeError:
        return PIPE_CLOSED


def _interpret(options: InterpretOptions, write_raw: Write | None) -> int:
    from audiorl.eval._speech import load_with_codec
    from audiorl.rollout.speech import CodecSpeechDecoder
    from audiorl.run.folder import StopRequest, newest_checkpoint
    from audiorl.tasks.simul.live import Interpreter
    from audiorl.tasks.simul.streams import ChunkConfig

    policy = load_with_codec(newest_checkpoint(options.model, options.phase), options.codec, options.device)
    decoder = CodecSpeechDecoder.of(policy) if policy.speech is not None else None
    if decoder is None and (options.raw or options.out):
        raise ValueError(f"{options.model}: writes text only; leave --raw and --out out")
    languages = (options.source_language, options.target_language)
    chunks = ChunkConfig(options.chunk_seconds, options.context)
    interpreter = Interpreter(policy, *languages, chunks, options.sampling, history=options.history)
    stop = StopRequest()
    with wav_file(options.out, decoder.sample_rate) if decoder and options.out else nullcontext(None) as write_file:
        output = _Output(decoder, write_raw, write_file)
        with stop.awaited():
            for samples in _samples(options):
                interpreter.observe(samples)
                output.show(interpreter.segments)
                if stop.received:
                    break
            interpreter.finish()
            output.show(interpreter.segments)
    if decoder and options.out:
        print(f"{output.written / decoder.sample_rate:.2f} s of track", file=sys.stderr)
    return STOPPED if stop.received and not options.mic else 0


def _samples(options: InterpretOptions) -> Iterator[Any]:
    """Float32 [T] at RATE Hz, a chunk at a time, or as the microphone gives them."""
    from audiorl.audio import AudioClip, load_clip
    from audiorl.cli._sound import listen

    if options.audio is None:
        print("(listening; Ctrl-C ends)", file=sys.stderr)
        yield from listen()
        return
    wav = load_clip(AudioClip(path=str(options.audio)), RATE, max_seconds=float("inf"))
    began, step = time.monotonic(), max(round(options.chunk_seconds * RATE), 1)
    for start in range(0, len(wav), step):
        if options.real_time:
            time.sleep(max(0.0, began + min(start + step, len(wav)) / RATE - time.monotonic()))
        yield wav[start : start + step]


class _Output:
    """Prints the text of new segments with their times, and gives speech to the player and the file."""

    def __init__(self, decoder: CodecSpeechDecoder | None, write_raw: Write | None, write_file: Write | None):
        self.decoder, self.write_raw, self.write_file = decoder, write_raw, write_file
        self.shown = self.written = 0

    def show(self, segments: tuple[Segment, ...]) -> None:
        import numpy as np

        for segment in segments[self.shown :]:
            seconds = segment.source_time or 0.0
            if segment.text.strip():
                text_to = sys.stdout if self.write_raw is None else sys.stderr
                print(f"{seconds:7.2f} s  {segment.text.strip()}", file=text_to, flush=True)
            wav = None if self.decoder is None else self.decoder.decode(segment)
            if self.decoder is None or wav is None or not len(wav):
                continue
            if self.write_raw is not None:
                self.write_raw(pcm16(wav))
            if self.write_file is not None:
                # In the track a turn begins after its chunk and after the speech before it.
                silence = max(0, round(seconds * self.decoder.sample_rate) - self.written)
                self.write_file(pcm16(np.concatenate([np.zeros(silence, np.float32), wav])))
                self.written += silence + len(wav)
        self.shown = len(segments)
