"""audiorl chat with real tiny checkpoints: once, by a pipe, in a terminal, and with a microphone that tests play."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.cli import main
from audiorl.cli.chat import leading_files
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import load_policy
from audiorl.rollout.conversation import ChatSession
from audiorl.run.folder import Run
from tests.conftest import make_dual_omni, make_omni, make_qwen2_audio, make_text, make_whisper
from tests.support.checkpoints import save_run
from tests.support.codecs import save_mimi

SHORT = ("--sampling.max-new-tokens", "10")
MAKE = {"omni": make_omni, "qwen2-audio": make_qwen2_audio, "whisper": make_whisper, "text": make_text}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, make in MAKE.items():
        make().save(folder / name)
    return folder


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def answer(model: Path, *content: object, language: str = "") -> str:
    talk = ChatSession(load_policy(model), SamplingConfig(temperature=0, max_new_tokens=10), language=language)
    return talk.ask(content).text  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["omni", "qwen2-audio", "whisper"])
def test_one_answer(name: str, models: Path, speech: list[Utterance], capsys: pytest.CaptureFixture[str]) -> None:
    clip = speech[0].clip
    language = "en" if name == "whisper" else ""
    args = ["chat", str(models / name), "--audio", str(clip.path), *SHORT]
    args += ["--language", "en"] if language else ["What is said?"]
    assert main(args) == 0
    out, err = capsys.readouterr()
    content = (clip,) if language else (clip, "What is said?")
    assert out == answer(models / name, *content, language=language) + "\n" and "cut off" in err


def test_a_run_folder_and_an_adapter(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(models / "text", ModelConfig(lora=LoraConfig(rank=4)))
    run = Run.create(tmp_path / "run", "recipe.py", [], {})
    with pytest.raises(ValueError, match="run: the run has no checkpoint yet"):
        run_main(["chat", str(run.dir), "Why?"])
    for phase in ("sft", "grpo"):
        with torch.no_grad():
            for p in policy.trainable().values():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(phase))))
        run.log(phase, 1, {"loss": 1.0})
        save_run(run, phase, 1, policy, {})
    newest = run.dir / "checkpoints" / "grpo" / "step_000001"
    capsys.readouterr()
    assert main(["chat", str(run.dir), "Why?", *SHORT]) == 0
    out, err = capsys.readouterr()
    assert out == answer(newest, "Why?") + "\n" != answer(models / "text", "Why?") + "\n"
    assert err.startswith(f"{run.dir}: checkpoints/grpo/step_000001 (phases: sft, grpo)\n")
    assert main(["chat", str(run.dir), "Why?", "--phase", "sft", *SHORT]) == 0
    assert capsys.readouterr().out == answer(run.checkpoint("sft"), "Why?") + "\n"


def run_main(args: list[str]) -> int:
    """`main` with its errors as exceptions."""
    os.environ["AUDIORL_TRACEBACK"] = "1"
    try:
        return main(args)
    finally:
        del os.environ["AUDIORL_TRACEBACK"]


def test_a_pipe(
    models: Path,
    speech: list[Utterance],
    typed: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dropped = tmp_path / "a clip's.opus"
    dropped.write_bytes(Path(str(speech[0].clip.path)).read_bytes())
    escaped = str(dropped).replace(" ", r"\ ").replace("'", r"\'")
    saved = tmp_path / "saved.jsonl"
    typed("Why?", f"{escaped} What's said?", f"/audio '{speech[40].clip.path}'", "", "/system Be brief.", "/system",
          f"/save {saved}", "/reset", f"/save {saved}", "/quit", "never read")  # fmt: skip
    assert main(["chat", str(models / "omni"), *SHORT]) == 0
    out = capsys.readouterr().out
    first, second = map(json.loads, saved.read_text().splitlines())
    system, *turns = first["messages"]
    assert system == {"role": "system", "content": "Be brief."} and second["messages"] == [system]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 3
    assert turns[2]["content"] == [{"type": "audio", "audio": str(dropped)}, {"type": "text", "text": "What's said?"}]
    assert turns[4]["content"] == [{"type": "audio", "audio": str(speech[40].clip.path)}]
    answers = [turn["content"][0]["text"] for turn in turns[1::2]]
    assert out == "".join(f"{text}\n" for text in [*answers, "Be brief."])
    assert answers[0] == answer(models / "omni", "Why?")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "line 2: /nothing: no such file or command"),
        ("/audio gone.wav", "line 2: /audio: gone.wav: no such file"),
        ("/audio", "line 2: /audio: no name"),
        ("/mic soon", "line 2: /mic soon: give seconds"),
        ("/save", "line 2: /save: give the name"),
        (f"{__file__} What is it?", "test_chat.py"),
    ],
)
def test_a_bad_line_in_a_pipe_ends_it(line: str, message: str, models: Path, typed: Callable[..., None]) -> None:
    typed("Why?", line)
    with pytest.raises(ValueError, match=message):
        run_main(["chat", str(models / "text"), *SHORT])


def test_spoken_answers_become_files(
    tmp_path: Path, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_dual_omni().save(tmp_path / "model")
    save_mimi(tmp_path / "codec")
    for _ in range(2):
        typed("Say yes.", "/save talk.jsonl")
        sampling = ("--sampling.max-frames", "5", "--sampling.temperature", "1")
        assert main(["chat", "model", "--speak", *SHORT, *sampling]) == 0
    files = [tmp_path / "spoken" / f"answer-00{n}.wav" for n in (1, 2)]
    first, second = (soundfile.read(file)[0] for file in files)
    assert len(first) and np.array_equal(first, second)
    (content,) = {row.split('"assistant"')[1] for row in Path("talk.jsonl").read_text().splitlines()}
    assert '"type": "audio"' in content and len(list(tmp_path.glob("talk-*.wav"))) == 1


def test_files_at_the_begin_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a b.wav", "it's.wav", "word", "ü.wav"):
        (tmp_path / name).write_bytes(b"")
    for line, names, text in (
        ("'a b.wav' what?", ["a b.wav"], "what?"),
        (r"a\ b.wav ü.wav  it's a test", ["a b.wav", "ü.wav"], "it's a test"),
        ('"it\'s.wav"', ["it's.wav"], ""),
        (f"file://{tmp_path}/a%20b.wav why", ["a b.wav"], "why"),
        ("word is a file here", [], "word is a file here"),
        ("./word", ["word"], ""),
        ("what's in 'a b.wav'", [], "what's in 'a b.wav'"),
        ("", [], ""),
    ):
        paths, rest = leading_files(line)
        assert ([path.name for path in paths], rest) == (names, text), line


# -- the microphone ------------------------------------------------------------------------------------------------


class PortAudioError(Exception):
    pass


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A sounddevice whose microphone gives three blocks of a constant."""
    module = types.ModuleType("sounddevice")

    class InputStream:
        blocks = 3

        def __init__(self, samplerate: int, channels: int, dtype: str, callback: Callable[..., None]):
            assert (samplerate, channels, dtype) == (16_000, 1, "float32")
            self.callback = callback

        def __enter__(self) -> None:
            block = np.zeros((4000, 1), np.float32)
            for number in range(self.blocks):
                block[:] = 0.1 * (number + 1)  # PortAudio writes to one buffer again and again
                self.callback(block, 4000, None, None)

        def __exit__(self, *exc: object) -> None:
            pass

    module.InputStream, module.PortAudioError = InputStream, PortAudioError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    yield module


def test_a_recording(sound: types.ModuleType, models: Path, typed: Callable[..., None], tmp_path: Path) -> None:
    typed("/mic", "", "What is said?", f"/save {tmp_path / 'saved.jsonl'}", "/mic 0.01", "")
    assert main(["chat", str(models / "omni"), *SHORT]) == 0
    (wav,) = tmp_path.glob("saved-*.wav")
    samples, rate = soundfile.read(wav)
    assert rate == 16_000
    np.testing.assert_allclose(samples, np.repeat([0.1, 0.2, 0.3], 4000), atol=1e-4)


def test_microphones_that_do_not_work(
    sound: types.ModuleType, models: Path, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**settings: object) -> None:
        raise PortAudioError("Error querying device -1")

    def chat() -> int:
        typed("/mic 0")
        return run_main(["chat", str(models / "text")])

    sound.InputStream.blocks = 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"recorded 0\.0 s; record 0\.1 to 600 s"):
        chat()
    monkeypatch.setattr(sound, "InputStream", fails)
    with pytest.raises(ValueError, match="no microphone can be opened: Error querying device -1; give a file"):
        chat()
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ValueError, match=r"needs sounddevice: pip install .*\[mic\]'"):
        chat()


# -- the terminal --------------------------------------------------------------------------------------------------


def test_a_terminal(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C stops an answer, at the prompt it says how to end; an error is one line, and the conversation goes on."""
    saved = tmp_path / "saved.jsonl"
    lines = iter(["/help", "Why?", "Stop.", KeyboardInterrupt, "/nothing", f"/save {saved}", EOFError])
    ask = ChatSession.ask

    def typed(prompt: str) -> str:
        line = next(lines)
        if not isinstance(line, str):
            raise line
        return line

    def answered(self: ChatSession, content: Any, show: Callable[[str], None]) -> Any:
        if content == ["Stop."]:
            raise KeyboardInterrupt
        return ask(self, content, show)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(ChatSession, "ask", answered)
    assert main(["chat", str(models / "text"), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert "Ctrl-C stops an answer" in out and "(stopped)" in out and "(Ctrl-D or /quit ends)" in out
    assert "/nothing: no such file or command" in err
    question, reply = json.loads(saved.read_text())["messages"]
    assert question["content"][0]["text"] == "Why?" and reply["content"][0]["text"] in out
