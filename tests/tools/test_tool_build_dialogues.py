"""Conversations of two people: what is learned and what is measured have no text in common, and both are recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from audiorl.audio import seconds
from audiorl.data.seedtts import Conversation, read_conversations
from audiorl.models import load_policy
from audiorl.tasks.tts.texts import read_utterances
from tests.support.tools import run_tool

SIZES = ("--conversations", "4", "--texts", "9", "--held-out", "5", "--scripts", "2", "--turns", "9")


def texts(conversations: list[Conversation]) -> set[str]:
    turns = {turn.text for c in conversations for turn in c.turns}
    return turns | {text for c in conversations for text, _ in c.voices.values()}


@pytest.mark.slow
def test_texts_to_be_said_are_not_learned(tmp_path: Path) -> None:
    out = tmp_path / "dialogues"
    run_tool("build_dialogues", str(out), *SIZES)
    train, recorded = (read_conversations(out / f"{name}.jsonl") for name in ("train", "recorded"))
    scripts = read_conversations(out / "scripts.jsonl", script=True)
    singles, held_out = (read_utterances(out / f"{name}.jsonl").samples for name in ("texts", "held_out"))
    learned = texts(train) | {u.text for u in singles}
    assert not learned & (texts(scripts) | {u.text for u in held_out})
    assert len({t.text for c in scripts for t in c.turns}) == sum(len(c.turns) for c in scripts)
    assert [[t.text for t in c.turns] for c in scripts] == [[t.text for t in c.turns] for c in recorded]
    assert [len(c.turns) for c in train] == [6] * 4 and len(singles) == 9 and len(held_out) == 5
    for conversation in recorded:
        assert len(conversation.turns) == 9
        assert min(seconds(turn.audio) for turn in conversation.turns if turn.audio) > 0.5
    assert {u.speaker for u in (*singles, *held_out)} == {"Allison Smith", "July E. Jiménez"}
    assert load_policy(out / "decoder").speech is None
    assert (out / "unseen_speakers" / "ATTRIBUTION.md").exists() and (out / "ATTRIBUTION.md").exists()
    with pytest.raises(ValueError, match="not empty"):
        run_tool("build_dialogues", str(out), *SIZES)
