"""Talk to a checkpoint in the terminal, by text, audio files and the microphone."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
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
    """Talk to a checkpoint: type questions, drop audio files, or record; /help lists the commands. With a question or
    --audio it answers once. Reads questions from a pipe, too: one a line, answers to stdout."""

    model: Positional[str]
    """A Hugging Face model folder or hub id, a checkpoint, an adapter, or a run folder (its newest checkpoint)."""
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
            _answer_lines(session)
    except KeyboardInterrupt:
        return 130
    return 0


def _conversation(options: ChatOptions) -> ChatSession:
    from audiorl.eval._speech import load_with_codec
    from audiorl.rollout.conversation import ChatSession
    from audiorl.run.folder import checkpoint_of

    model = checkpoint_of(options.model)
    policy = load_with_codec(model, options.codec, options.device)
    if policy.speech is None and (options.speak or options.codec is not None):
        raise ValueError(f"{model}: writes text only; leave --speak and --codec out")
    return ChatSession(
        policy,
        options.sampling,
        system=options.system,
        spoken=options.speak,
        language=options.language,
        seed=options.seed,
    )


def _talk(session: _Session) -> None:
    """Questions from a terminal. An error is one line, and the conversation goes on."""
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


def _answer_lines(session: _Session) -> None:
    """Questions from a pipe, up to the first error."""
    for number, line in enumerate(sys.stdin, 1):
        try:
            if not session.read(line):
                return
        except (ValueError, OSError) as error:
            raise ValueError(f"line {number}: {error}") from error


class _Session:
    """The conversation, and the recordings that the next question is sent with."""

    def __init__(self, options: ChatOptions, conversation: ChatSession):
        self.options, self.conversation = options, conversation
        self.attached: list[AudioClip] = []
        self._commands: dict[str, Callable[[str], object]] = {
            "/audio": self._audio,
            "/mic": self._microphone,
            "/system": self._system,
            "/reset": self._reset,
            "/save": self._save,
            "/help": lambda text: print(HELP),
        }

    def read(self, line: str) -> bool:
        """One line of input: a command, or a question with its recordings. False when it ends the session."""
        paths, text = leading_files(line.strip())
        command, _, argument = text.partition(" ")
        if paths or not command.startswith("/"):
            self._attach([_clip(path) for path in paths])
            if text or (self.attached and not paths):
                self.ask(text)
        elif command == "/quit":
            return False
        elif command in self._commands:
            self._commands[command](argument.strip())
        else:
            raise ValueError(f"{command}: no such file or command; /help lists the commands")
        return True

    def ask(self, text: str) -> None:
        """Print the answer to `text` and what is attached. Attached recordings stay for another try after an error."""
        try:
            rollout = self.conversation.ask([*self.attached, *([text] if text else [])], _show)
        except KeyboardInterrupt:
            self.attached = []
            raise
        self.attached = []
        print()
        if self.conversation.speech is not None:
            self._write_speech()
        if rollout.segments[-1].stop_reason == "length":
            print("(cut off; --sampling.max-new-tokens and --sampling.max-frames set the length)", file=sys.stderr)

    def _write_speech(self) -> None:
        from audiorl.audio import write_wav

        wave, rate = self.conversation.speech, self.conversation.speech_rate
        assert wave is not None and rate is not None
        folder = self.options.spoken
        folder.mkdir(parents=True, exist_ok=True)
        path = next(p for n in count(1) if not (p := folder / f"answer-{n:03d}.wav").exists())
        write_wav(path, wave, rate)
        print(f"({len(wave) / rate:.1f} s of speech: {path})", file=sys.stderr)

    def _attach(self, clips: Sequence[AudioClip]) -> None:
        from audiorl.audio import name, seconds

        for clip in clips:
            self.attached.append(clip)
            print(f"({name(clip)}: {seconds(clip):.1f} s)", file=sys.stderr)

    # -- commands --------------------------------------------------------------------------------------------------

    def _audio(self, text: str) -> None:
        paths, rest = leading_files(text)
        if rest or not paths:
            raise ValueError(f"/audio: {rest or 'no name'}: no such file; give /audio FILE")
        self._attach([_clip(path) for path in paths])

    def _microphone(self, text: str) -> None:
        from audiorl.cli._sound import record

        if text:
            try:
                seconds = float(text)
            except ValueError:
                raise ValueError(f"/mic {text}: give seconds, or nothing to record until Enter") from None
            self._attach([record(lambda: time.sleep(seconds))])
        else:
            print("(recording; Enter stops)", file=sys.stderr)
            self._attach([record(sys.stdin.readline)])

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        else:
            print(self.conversation.system or "(that of the model's chat template)")

    def _reset(self, text: str) -> None:
        self.conversation.reset()
        self.attached = []

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save: give the name of a file")
        path = Path(text).expanduser()
        system = [{"role": "system", "content": self.conversation.system}] if self.conversation.system else []
        turns = [{"role": m.role, "content": self._parts(m.content, path)} for m in self.conversation.messages]
        row = {"model": self.options.model, "messages": [*system, *turns]}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _parts(self, content: Sequence[str | AudioClip], path: Path) -> list[dict[str, Any]]:
        """As TRL writes conversations. What was recorded or spoken becomes a WAV file in the folder of `path`."""
        from audiorl.audio import write_wav

        parts: list[dict[str, Any]] = []
        for piece in content:
            if isinstance(piece, str):
                parts.append({"type": "text", "text": piece})
                continue
            file = piece.path
            if piece.array is not None:
                assert piece.sample_rate is not None
                file = str(path.resolve().parent / f"{path.stem}-{piece.key[:12]}.wav")
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                write_wav(file, piece.array, piece.sample_rate)
            parts.append({"type": "audio", "audio": file})
        return parts


def leading_files(line: str) -> tuple[list[Path], str]:
    """The audio files that a line begins with, as terminals write dropped ones, and the text after them.

    A path is quoted, has escaped spaces, or is a file:// address; one without a slash or a suffix is a word.
    """
    paths: list[Path] = []
    while line:
        source = io.StringIO(line)
        words = shlex.shlex(source, posix=True)
        words.whitespace_split, words.commenters = True, ""
        try:
            word = words.get_token()
        except ValueError:  # a quote that does not end: an apostrophe
            break
        path = _dropped(word or "")
        if path is None:
            break
        paths.append(path)
        line = source.read().strip()
    return paths, line


def _dropped(word: str) -> Path | None:
    path = Path(unquote(urlsplit(word).path) if word.startswith("file://") else word).expanduser()
    return path.resolve() if ("/" in word or path.suffix) and path.is_file() else None


def _clip(path: Path) -> AudioClip:
    """Raises AudioError (a ValueError) for a file that holds no audio."""
    from audiorl.audio import AudioClip, probe

    clip = AudioClip(path=str(path.resolve()))
    probe(clip)
    return clip


def _show(text: str) -> None:
    print(text, end="", flush=True)
