"""Talk to a checkpoint in the terminal, by text, audio files and the microphone."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tyro.conf import Positional, UseAppendAction

from audiorl.config import SamplingConfig
from audiorl.options import first_word, parse

if TYPE_CHECKING:
    from audiorl.audio import AudioClip
    from audiorl.rollout.conversation import ChatSession

HELP = """\
TEXT                ask; the path of an audio file before it, or one dropped here, is sent along
/audio FILE         send a recording with the next question, or alone with an empty line
/mic [SECONDS]      the same with the microphone; without SECONDS until Enter
/system [TEXT]      set the system message, or show it
/reset              forget the conversation
/save FILE          append the conversation to a file of JSON lines
/help, /quit        Ctrl-C stops an answer, Ctrl-D ends"""


@dataclass(frozen=True)
class ChatOptions:
    """Talk to a checkpoint: type questions, drop audio files, or record (/help lists the commands). With a question or
    --audio it answers once; from a pipe it reads a question a line."""

    model: Positional[str]
    """A Hugging Face model folder or hub id, a checkpoint, an adapter, or a run folder (its newest checkpoint)."""
    phase: str | None = None
    """The phase of a run folder whose newest checkpoint is taken; by default the one that the run is for."""
    question: Positional[str] = ""
    """Answer this and end."""
    audio: UseAppendAction[tuple[Path, ...]] = ()
    """Recordings of the first question, one option each: --audio a.wav --audio b.wav. Answer them and end."""
    system: str = ""
    """System message; by default that of the model's chat template."""
    language: str = ""
    """For Whisper: language of the recordings, such as es."""
    speak: bool = False
    """Every answer is speech, of a model that speaks. By default the model decides."""
    spoken: Path = Path("spoken")
    """Folder for the WAV files of spoken answers: answer-001.wav and so on; none is overwritten."""
    codec: str | None = None
    """The audio tokenizer of a model that speaks; by default the folder codec/ in or above the model's."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0, max_new_tokens=512)
    """How answers are sampled; by default greedily."""
    seed: int = 0
    """Seed of sampling: equal seeds give equal answers to equal conversations."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


def main(args: list[str]) -> int:
    """Answer once, or until the input ends. Return the exit code: 130 after Ctrl-C where there is no prompt."""
    first_word(args, "chat: name a model first, for example: audiorl chat runs/quickstart")
    options = parse(ChatOptions, args, prog="audiorl chat")
    try:
        session = _Session(options, _conversation(options))
        if options.question or options.audio:
            session.attached = [_clip(path) for path in options.audio]
            session.ask(options.question)
        elif sys.stdin.isatty():
            _talk(session)
        else:
            for number, line in enumerate(sys.stdin, 1):  # questions from a pipe, up to the first error
                try:
                    if not session.read(line):
                        break
                except (ValueError, OSError) as error:
                    raise ValueError(f"line {number}: {error}") from error
    except KeyboardInterrupt:
        return 130
    return 0


def _conversation(options: ChatOptions) -> ChatSession:
    from audiorl.eval._speech import load_with_codec
    from audiorl.rollout.conversation import ChatSession
    from audiorl.run.folder import newest_checkpoint

    model = newest_checkpoint(options.model, options.phase)
    policy = load_with_codec(model, options.codec, options.device)
    if policy.speech is None and (options.speak or options.codec is not None):
        raise ValueError(f"{model}: writes text only; leave --speak and --codec out")
    how: dict[str, Any] = {"system": options.system, "spoken": options.speak, "language": options.language}
    return ChatSession(policy, options.sampling, seed=options.seed, **how)


def _talk(session: _Session) -> None:
    """Read questions from a terminal. An error is one line, and the conversation goes on."""
    with contextlib.suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  editing and history of lines
    print(f"{session.options.model}. /help lists the commands.")
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit ends)")
            continue
        try:
            if not session.read(line):
                return
        except KeyboardInterrupt:
            print("\n(stopped)")
        except (ValueError, OSError) as error:
            print(f"{' '.join(str(error).split())}", file=sys.stderr)


class _Session:
    """The conversation, and the recordings that the next question is sent with."""

    def __init__(self, options: ChatOptions, conversation: ChatSession):
        self.options, self.conversation = options, conversation
        self.attached: list[AudioClip] = []

    def read(self, line: str) -> bool:
        """Read a line: a command, or a question with its recordings. Return False when it ends the session."""
        paths, text = leading_files(line.strip())
        command, _, argument = text.partition(" ")
        argument = argument.strip()
        if paths or not command.startswith("/"):
            self._attach(map(_clip, paths))
            if text or (self.attached and not paths):
                self.ask(text)
        elif command == "/audio":
            paths, rest = leading_files(argument)
            if rest or not paths:
                raise ValueError(f"/audio: {rest or 'no name'}: no such file; give /audio FILE")
            self._attach(map(_clip, paths))
        elif command == "/mic":
            self._microphone(argument)
        elif command == "/system" and argument:
            self.conversation.system = argument
        elif command == "/system":
            print(self.conversation.system or "(that of the model's chat template)")
        elif command == "/reset":
            self.conversation.reset()
            self.attached = []
        elif command == "/save":
            self._save(argument)
        elif command == "/help":
            print(HELP)
        elif command != "/quit":
            raise ValueError(f"{command}: no such file or command; /help lists the commands")
        return command != "/quit" or bool(paths)

    def ask(self, text: str) -> None:
        """Print the answer to `text` and what is attached. Attached recordings stay for another try after an error."""
        from audiorl.audio import write_wav

        try:
            rollout = self.conversation.ask([*self.attached, *([text] if text else [])], _show)
        except KeyboardInterrupt:
            self.attached = []
            raise
        self.attached = []
        print()
        wave, rate, folder = self.conversation.speech, self.conversation.speech_rate, self.options.spoken
        if wave is not None and rate is not None:
            path = next(p for n in count(1) if not (p := folder / f"answer-{n:03d}.wav").exists())
            write_wav(path, wave, rate)
            print(f"({len(wave) / rate:.1f} s of speech: {path})", file=sys.stderr)
        if rollout.segments[-1].stop_reason == "length":
            print("(cut off; --sampling.max-new-tokens and --sampling.max-frames set the length)", file=sys.stderr)

    def _attach(self, clips: Iterable[AudioClip]) -> None:
        from audiorl.audio import name, seconds

        for clip in clips:
            self.attached.append(clip)
            print(f"({name(clip)}: {seconds(clip):.1f} s)", file=sys.stderr)

    def _microphone(self, text: str) -> None:
        from audiorl.cli._sound import record

        if not text:
            print("(recording; Enter stops)", file=sys.stderr)
            self._attach([record(sys.stdin.readline)])
            return
        try:
            seconds = float(text)
        except ValueError:
            raise ValueError(f"/mic {text}: give seconds, or nothing to record until Enter") from None
        self._attach([record(lambda: time.sleep(seconds))])

    def _save(self, text: str) -> None:
        """Append the conversation as TRL writes them. What was recorded or spoken becomes a WAV file next to it."""
        from audiorl.audio import AudioClip, write_wav

        if not text:
            raise ValueError("/save: give the name of a file")
        path, system = Path(text).expanduser(), self.conversation.system
        path.parent.mkdir(parents=True, exist_ok=True)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for message in self.conversation.messages:
            parts: list[dict[str, str | None]] = []
            for piece in message.content:
                if isinstance(piece, str):
                    parts.append({"type": "text", "text": piece})
                    continue
                assert isinstance(piece, AudioClip), "nobody shows pictures here"
                file = piece.path
                if piece.array is not None and piece.sample_rate is not None:
                    file = str(path.resolve().parent / f"{path.stem}-{piece.key[:12]}.wav")
                    write_wav(file, piece.array, piece.sample_rate)
                parts.append({"type": "audio", "audio": file})
            messages.append({"role": message.role, "content": parts})
        with path.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"model": self.options.model, "messages": messages}, ensure_ascii=False) + "\n")


def leading_files(line: str) -> tuple[list[Path], str]:
    """Return the audio files that a line begins with, as terminals write dropped ones, and the text after them.

    A path is quoted, has escaped spaces, or is a file:// address; one without a slash or a suffix is a word.
    """
    paths: list[Path] = []
    while line:
        source = io.StringIO(line)
        words = shlex.shlex(source, posix=True)
        words.whitespace_split, words.commenters = True, ""
        try:
            word = words.get_token() or ""
        except ValueError:  # a quote that does not end: an apostrophe
            break
        path = Path(unquote(urlsplit(word).path) if word.startswith("file://") else word).expanduser()
        if not (("/" in word or path.suffix) and path.is_file()):
            break
        paths.append(path.resolve())
        line = source.read().strip()
    return paths, line


def _clip(path: Path) -> AudioClip:
    from audiorl.audio import AudioClip, probe

    clip = AudioClip(path=str(path.resolve()))
    probe(clip)  # AudioError, a ValueError, for a file that holds no audio
    return clip


def _show(text: str) -> None:
    print(text, end="", flush=True)
