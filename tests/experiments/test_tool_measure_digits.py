"""The experiment on digits runs to its table; what it hears and reads are digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiorl.audio import write_wav
from audiorl.data.sums import RATE, number_words
from audiorl.types import Message, Rollout, Sample
from tests.support.speech_models import save_ctc
from tests.support.tools import load_tool, run_tool


def test_digits_are_read_from_transcripts_and_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("measure_digits", monkeypatch)
    assert tool.digits_in("Two, 35 and seventy. Nine") == "two three five seven nine"
    words = [word for word in number_words("bundled") if word.value in (2, 7)]
    tool.learn_to_listen(words, tmp_path / "listener", 100, 60, 8, 0)
    (clip, *_) = (word.clip for word in words if word.value == 7)
    for said, share in (("seven", 1.0), ("two", 0.0)):
        prompt = Sample("a", (Message("user", ("",)),), (said,), metadata={"listener": str(tmp_path / "listener")})
        assert tool.reward(Rollout(prompt, (), "a", 0, spoken_audio=clip)) == pytest.approx(share, abs=0.3)


@pytest.mark.slow
def test_a_seed_runs_to_the_table(tmp_path: Path) -> None:
    words, out = tmp_path / "words", tmp_path / "out"
    for word in number_words("bundled"):
        for speaker in ("a", "b"):
            write_wav(words / f"{word.value}_{speaker}_0.wav", word.clip.load(RATE), RATE)
    few = [
        "--seeds",
        "0",
        "--updates",
        "2",
        "--steps",
        "1",
        "--listening",
        "2",
        "--size",
        "16",
        "--most",
        "2",
        "--unseen",
        "b",
    ]
    few += ["--options=--rl.prompts-per-step 1 --rl.group-size 2"]
    judge = str(save_ctc(tmp_path / "judge"))
    printed = run_tool("measure_digits", "--words", str(words), "--judge", judge, "--out", str(out), *few)
    table = (out / "table.md").read_text()
    assert table.strip() in printed
    systems = ["recordings", "start, unguided", "start", "best of 4", "NFT", "Fast-GRPO", "SFT"]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| {name}" for name in systems]
