"""A row that the model or the reward cannot use is found before the first step, in every recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import audiorl
from audiorl.audio import write_wav
from audiorl.cli import main
from audiorl.data.manifest import read_samples
from audiorl.models.families import qwen2_audio, whisper
from audiorl.recipes._common import RowCheck, answer_reward
from audiorl.run.metrics_log import read_metrics
from tests.conftest import make_omni

TEXTS = ("one two", "three four", "five six seven", "eight", "nine ten", "six one")
QUESTION = {"question": "What is heard?", "choices": ["a dog", "a bell"], "answer": "a dog"}
SAID = {"language": "en", "text": "one two"}
LONG = " ".join(f"w{i}" for i in range(6000))
UNIT = {"start": 0.0, "end": 0.8, "source": "one", "target": "uno"}
STREAM = {"source_language": "en", "target_language": "es", "units": [UNIT]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    qwen2_audio.tiny(TEXTS, window=30).save(folder / "qwen2")
    whisper.tiny(TEXTS, window=10).save(folder / "whisper")
    make_omni().save(folder / "omni")
    return folder


def rows(folder: Path, row: dict[str, Any], bad: dict[str, Any] | None, seconds: float = 1.0, more: int = 0) -> Path:
    """Write six rows and then a bad one, whose clip has `seconds`; without `bad` the six rows alone.

    `more` samples make other recordings of them.
    """
    times = np.arange(16_000 * 60) / 16_000
    tone = (0.3 * np.sin(2764 * times)).astype(np.float32)
    lines = [{"id": f"r{i}", "audio": f"{i}.wav", "speaker": f"s{i % 2}", **row} for i in range(6)]
    if "text" in row:
        lines = [{**line, "text": text} for line, text in zip(lines, TEXTS, strict=True)]
    for i in range(6):
        write_wav(folder / f"{i}.wav", tone[: 16_000 + i + more], 16_000)
    if bad is not None:
        write_wav(folder / "bad.wav", tone[: round(16_000 * seconds)], 16_000)
        lines.append({**lines[0], "id": "bad", "audio": "bad.wav", **bad})
    path = folder / ("good.jsonl" if bad is None else "rows.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# -- the kinds, each in a recipe that meets it ------------------------------------------------------------------------

KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any], float, str, str]] = {
    "short": (("asr-grpo",), SAID, {}, 0.02, "audio", "audio of 20 ms is too short"),
    "no words": (("asr-grpo",), SAID, {"text": "[laughter]"}, 1.0, "text", "is empty after 'basic' normalisation"),
    "fillers": (
        ("asr-grpo", "--normalizer", "english"), SAID, {"text": "Um, hmm."}, 1.0, "text",
        "is empty after 'english' normalisation",
    ),
    "reserved token": (
        ("mmau-grpo",), QUESTION, {"question": "What does <|endoftext|> mean?"}, 1.0, "question", "reserved token",
    ),
    "long prompt": (
        ("mmau-grpo",), QUESTION, {"question": LONG}, 1.0, "question", "tokens, the model reads at most 4096",
    ),
    "long clip": (
        ("mmau-grpo", "--path", "MODELS/qwen2"), QUESTION, {}, 31.0, "audio", "longer than the 30 s that qwen2_audio",
    ),
    "long transcript": (
        ("sft-audio", "--task", "transcripts", "--path", "MODELS/whisper"), SAID, {"text": LONG[:2600]}, 1.0, "text",
        "at most 448 of text; shorten the transcript",
    ),
}  # fmt: skip


def options(kind: str, folder: Path, models: Path) -> tuple[list[str], str]:
    recipe, row, bad, seconds, field, _ = KINDS[kind]
    path = rows(folder, row, bad, seconds)
    words = [word.replace("MODELS", str(models)) for word in recipe]
    held = rows(folder, row, None)
    words += ["--tiny", "--data", str(path), "--held-out", str(held), "--out", str(folder / "run")]
    if recipe[0] == "asr-grpo":
        words += ["--retention", str(held), "--no-speech-held-out", "0"]
    return words, f"rows.jsonl: row 7, field '{field}': "


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_stops_a_run_before_it_begins(
    kind: str, tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, where = options(kind, tmp_path, models)
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert where in error and KINDS[kind][5] in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_row_is_skipped(kind: str, tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, where = options(kind, tmp_path, models)
    assert main(["train", *words, "--on-error", "skip", "--max-steps", "4"]) == 0
    printed = capsys.readouterr().out
    assert "rows.jsonl: 6 samples, 1 row skipped" in printed and f"skipped {tmp_path}/{where}" in printed
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")


def test_whether_a_row_can_be_used_does_not_depend_on_check_audio(
    tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, where = options("short", tmp_path, models)
    assert main(["train", *words, "--check-audio", "False"]) == 2
    assert where in capsys.readouterr().err


# -- every recipe -----------------------------------------------------------------------------------------------------

TOKEN = "Who says <|im_end|> here?"
ASKS: dict[str, Any] = {"row": QUESTION, "bad": {"question": TOKEN}, "field": "question"}
LEARNS: dict[str, Any] = {"row": QUESTION, "bad": {"choices": ["<|im_end|>", "b"], "answer": "b"}, "field": "choices"}
TTS: dict[str, Any] = {"own": True, "more": ("--max-seconds", "2", "--clone", "False")}
VOICE = {"name": "speech", "start": 0.1, "end": 0.5}
PAIR = {**QUESTION, "chosen": "a dog", "rejected": "a bell"}
RECIPES: dict[str, dict[str, Any]] = {
    "mmau-grpo": ASKS,
    "mmau-grpo --control": LEARNS,
    "ppo-audio-qa": {**ASKS, "bad": {}, "seconds": 0.02, "field": "audio"},
    "asr-grpo": {"row": SAID, "bad": {}, "seconds": 0.02, "field": "audio", "more": ("--no-speech-held-out", "0")},
    "distill-speech --task transcripts": {"row": SAID, "bad": {"text": "a <|im_end|>"}, "field": "text"},
    "distill-speech --rl.distill.view rationale": {
        "row": {**QUESTION, "rationale": "It barks."}, "bad": {"rationale": "<|im_end|>"}, "field": "rationale",
    },
    "sft-audio": {"row": QUESTION, "bad": {"choices": None, "answer": "<|im_end|>"}, "field": "answer"},
    "sft-audio --task transcripts": {"row": SAID, "bad": {"text": "a <|im_end|>"}, "field": "text"},
    "sft-audio --thought why": {"row": {**QUESTION, "why": "hm"}, "bad": {"why": " "}, "field": "why"},
    "dpo-audio-qa": {"row": PAIR, "bad": {"rejected": "a <|im_end|>"}, "field": "rejected"},
    "dpo-audio-qa --dpo.loss kto": {"row": PAIR, "bad": {"chosen": "a <|im_end|>"}, "field": "chosen"},
    "dpo-audio-qa --dpo.loss=kto": {
        "row": {**QUESTION, "completion": "a dog", "desirable": True}, "bad": {"completion": "a <|im_end|>"},
        "field": "completion",
    },
    "dpo-online": ASKS,
    "opa-dpo": LEARNS,
    "reward-model": {"row": PAIR, "bad": {"chosen": "a <|im_end|>"}, "field": "chosen", "own": True},
    "reward-model --kind process": {
        "row": {**QUESTION, "steps": ["a", "b"], "labels": [1, 0]}, "bad": {"steps": ["a", "<|im_end|>"]},
        "field": "steps", "own": True,
    },
    "simul-ppo": {
        "row": STREAM, "bad": {"units": [{**UNIT, "target": "uno <|im_end|>"}]}, "field": "units", "own": True,
    },
    "tts-sft": {"row": SAID, "bad": {"text": "one <|eot_id|> two"}, "field": "text", **TTS},
    "tts-grpo": {"row": SAID, "bad": {"text": "[laughter]"}, "field": "text", **TTS},
    "omni-grpo": {"row": QUESTION, "bad": {"choices": None, "answer": "..."}, "field": "answer"},
    "sound-sft": {"row": SAID, "bad": {"video": "a.npy", "video_rate": 0}, "field": "video_rate", "own": True},
    "sound-grpo": {"row": SAID, "bad": {"mask": [[0.1, 0.3], [0.2, 0.4]]}, "field": "mask", "own": True},
    "thought-grpo": {"row": {**SAID, "events": [VOICE]}, "bad": {"events": []}, "field": "events", "own": True},
    "align-speech": {"row": SAID, "bad": {"text": "a <|im_end|>"}, "field": "text", "more": ("--on-error", "raise")},
}  # fmt: skip


def command(recipe: str, folder: Path) -> list[str]:
    given = RECIPES[recipe]
    path = rows(folder, given["row"], given["bad"], given.get("seconds", 1.0))
    held = [] if given.get("own") else ["--held-out", str(rows(folder, given["row"], None))]
    name, *more = recipe.split()
    words = [name, "--tiny", *more, *(["True"] if more[-1:] == ["--control"] else []), *given.get("more", ())]
    return [*words, "--data", str(path), *held, "--held-out-count", "2", "--out", str(folder / "run")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_names_a_row_that_it_cannot_use(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *command(recipe, tmp_path)]) == 2
    error, field = capsys.readouterr().err, RECIPES[recipe]["field"]
    assert f"rows.jsonl: row 7, field '{field}': " in error if field else "rows.jsonl: row 7: " in error, error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_skips_a_row_that_it_cannot_use(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *command(recipe, tmp_path), "--on-error", "skip", "--max-steps", "1"]) == 0
    assert "1 row skipped (first: " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--held-out", "--unseen", "--retention", "--ptx-data"])
def test_rows_of_other_options_are_checked_too(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, good = rows(tmp_path, SAID, {"speaker": "x"}, 0.02), rows(tmp_path, SAID, None)
    (tmp_path / "others").mkdir()
    others = str(rows(tmp_path / "others", SAID, None, more=10))
    held = [] if option == "--held-out" else ["--held-out", others]
    words = ["asr-grpo", "--tiny", "--data", str(good), *held, option, str(path), "--out", str(tmp_path / "run")]
    words += ["--rl.ptx.coef", "1"] if option == "--ptx-data" else []
    words += [] if option == "--retention" else ["--retention", str(good)]
    if option == "--unseen":
        path.write_text(path.read_text().replace('"s0"', '"u0"').replace('"s1"', '"u1"'))
    assert main(["train", *words]) == 2
    assert "rows.jsonl: row 7, field 'audio': audio of 20 ms is too short" in capsys.readouterr().err
    assert not (tmp_path / "run" / "eval.json").exists()


@pytest.mark.parametrize("train", [audiorl.train_grpo, audiorl.train_ppo, audiorl.train_sft, audiorl.train_dpo])
def test_rows_in_memory_are_checked(train: Callable[..., Any], tmp_path: Path) -> None:
    path = rows(tmp_path, PAIR if train is audiorl.train_dpo else QUESTION, {}, 0.02)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = [{**line, "audio": str(tmp_path / line["audio"])} for line in lines]
    with pytest.raises(ValueError, match=r"^rows: row 7, field 'audio': audio of 20 ms is too short"):
        train("tiny", given, held_out_count=2, steps=1)


# -- around it --------------------------------------------------------------------------------------------------------


def test_a_mistake_in_a_file_shows_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = rows(tmp_path, QUESTION, None)
    words = ["mmau-grpo", "--path", str(tmp_path / "no-model"), "--data", str(good), "--out", str(tmp_path / "run")]
    assert main(["train", *words, "--held-out", str(tmp_path / "gone.jsonl")]) == 2
    assert "gone.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_a_mended_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever became of a row in the meantime, as an update of the program or of the file."""
    path = rows(tmp_path, QUESTION, {}, 0.02)
    words = ["mmau-grpo", "--tiny", "--data", str(path), "--held-out", str(rows(tmp_path, QUESTION, None))]
    words += ["--max-steps", "3", "--rl.save-every", "1", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(RowCheck, "_ask", lambda *_: None)  # as before rows were checked
        assert main(["train", *words]) == 2
    assert "too short" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "rows.jsonl: row 7, field 'audio'" in capsys.readouterr().err
    path.write_text(path.read_text().replace("bad.wav", "0.wav"))
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_the_check_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, path = make_omni(), rows(tmp_path, QUESTION, None)
    monkeypatch.setattr(policy.audio, "_features", None)
    check = RowCheck(lambda: policy, answer_reward(False), new_tokens=8)
    for sample in read_samples(path).samples:
        check.train(sample)
