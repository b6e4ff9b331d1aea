"""Scripts of conversations: how texts are divided, what a piece's prompt holds, and what cannot be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from audiorl.audio import AudioClip
from audiorl.data.seedtts import Conversation, ConversationTurn, read_conversations
from audiorl.eval.metrics.prosody import level_steps, slope_per_minute
from audiorl.tasks.tts.prompts import check_voices, conversation_examples, piece_sample, pieces_of, split_text

VOICES = {name: (f"I am {name}.", AudioClip(path=f"{name}.wav")) for name in ("A", "B")}


def conversation(*turns: tuple[str, str], voices: Any = VOICES) -> Conversation:
    return Conversation("d", tuple(ConversationTurn(speaker, text, None) for speaker, text in turns), voices)


@pytest.mark.parametrize(
    ("text", "most", "parts"),
    [
        ("One two.", 20, ["One two."]),
        ("First. Second one! Third?", 12, ["First.", "Second one!", "Third?"]),
        ("First. Second. Third.", 15, ["First. Second.", "Third."]),
        ("a long clause, and another one", 20, ["a long clause,", "and another one"]),
        ("no marks at all here", 8, ["no marks", "at all", "here"]),
        ("Donaudampfschifffahrt", 8, ["Donaudam", "pfschiff", "fahrt"]),
        ("你好。今天天气很好。", 6, ["你好。", "今天天气很好", "。"]),
        ("  ", 5, []),
    ],
)
def test_texts_are_divided_at_the_best_place(text: str, most: int, parts: list[str]) -> None:
    assert split_text(text, most) == parts


@given(st.text(alphabet="ab .,!?。\n", max_size=80), st.integers(1, 20))
def test_nothing_but_spaces_is_lost(text: str, most: int) -> None:
    parts = split_text(text, most)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert all(0 < len(part) <= most for part in parts)


def test_a_prompt_has_every_voice_and_the_pieces_before_it() -> None:
    talk = conversation(("A", "Hello. How are you?"), ("B", "Fine."))
    pieces = pieces_of(talk, 12)
    assert [(p.id, p.turn, p.speaker, p.text) for p in pieces] == [
        ("d/000-00", 0, "A", "Hello."),
        ("d/000-01", 0, "A", "How are you?"),
        ("d/001-00", 1, "B", "Fine."),
    ]
    spoken = AudioClip(path="said.wav")
    sample = piece_sample(talk, pieces[-1], [(pieces[-2], spoken)])
    contents = [(m.role, *m.content) for m in sample.messages]
    assert contents == [
        ("user", "[A] I am A."),
        ("assistant", VOICES["A"][1]),
        ("user", "[B] I am B."),
        ("assistant", VOICES["B"][1]),
        ("user", f"[A] {pieces[-2].text}"),
        ("assistant", spoken),
        ("user", "[B] Fine."),
    ]
    assert sample.references == ("Fine.",) and sample.metadata["respond"] == "speech"


@pytest.mark.parametrize("context", [0, 1, 2, 5])
def test_turns_are_learned_as_they_are_asked_for(context: int) -> None:
    turns = [ConversationTurn("AB"[i % 2], f"turn {i}", AudioClip(path=f"{i}.wav")) for i in range(4)]
    talk = Conversation("d", tuple(turns), VOICES)
    for number, example in enumerate(conversation_examples(talk, context)):
        assert example.speech == (turns[number].audio,)
        spoken = [c for m in example.sample.messages if m.role == "assistant" for c in m.content]
        voices = [clip for _, clip in VOICES.values()]
        assert spoken == [*voices, *(t.audio for t in turns[max(0, number - context) : number])]
        assert example.sample.messages[-1].content == (f"[{turns[number].speaker}] turn {number}",)
    with pytest.raises(ValueError, match=r"'turns\[0\]\.audio': missing; give a recording"):
        conversation_examples(conversation(("A", "x")), context)


def test_prompts_without_tags() -> None:
    """A prompt with the voice of its speaker alone, and a conversation of one."""
    talk = conversation(("A", "Hello."), ("B", "Fine."), ("A", "Good."))
    first, _, last = pieces_of(talk, 100)
    spoken = AudioClip(path="said.wav")
    sample = piece_sample(talk, last, [(first, spoken)], own_voice=True)
    assert [m.content[0] for m in sample.messages] == ["I am A.", VOICES["A"][1], "Hello.", spoken, "Good."]
    alone = conversation(("A", "Hello."), voices={"A": VOICES["A"]})
    sample = piece_sample(alone, pieces_of(alone, 100)[0], [])
    assert [m.content[0] for m in sample.messages] == ["I am A.", VOICES["A"][1], "Hello."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"turns": [{"speaker": "C", "text": "x"}]}, r"'turns\[0\]\.speaker': 'C' is none of the voices \(A\)"),
        ({"turns": [{"speaker": "A", "text": " "}]}, r"turns\[0\]\.text': ' ' is not a text"),
        ({"voices": {"A": {"audio": "a.wav"}}}, r"text"),
        ({"voices": ["a.wav"]}, r"voices"),
    ],
)
def test_scripts_need_voices_and_no_recordings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    row = {"id": "d", "voices": {"A": {"audio": "a.wav", "text": "Hi."}}, "turns": [{"speaker": "A", "text": "x"}]}
    (tmp_path / "scripts.jsonl").write_text(json.dumps(row | changes))
    if message:
        with pytest.raises(ValueError, match=message):
            read_conversations(tmp_path / "scripts.jsonl", script=True)
        return
    (talk,) = read_conversations(tmp_path / "scripts.jsonl", script=True)
    assert talk.turns == (ConversationTurn("A", "x", None),)
    assert talk.voices["A"][0] == "Hi." and talk.voices["A"][1].path == str(tmp_path / "a.wav")


def test_voices_that_cannot_be_imitated(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "short.wav", np.zeros(3200), 16_000)
    for path, message in (
        ("short.wav", "is 0.20 s long; give at least 0.5 s"),
        ("gone.wav", "'voices.A.audio': .*gone.wav"),
    ):
        talk = conversation(("A", "x"), voices={"A": ("Hi.", AudioClip(path=str(tmp_path / path)))})
        with pytest.raises(ValueError, match=message):
            check_voices(talk)


def test_the_level_on_both_sides_of_a_joint() -> None:
    loud, quiet = 0.5 * np.ones(8000, np.float32), 0.05 * np.ones(8000, np.float32)
    silence = np.zeros(4000, np.float32)
    assert level_steps(np.r_[loud, silence], np.r_[silence, quiet], 16_000) == [pytest.approx(20)]
    assert level_steps(loud, loud, 16_000) == [pytest.approx(0)]
    assert level_steps(loud, silence, 16_000) == []


def test_the_slope_of_a_voice() -> None:
    assert slope_per_minute([0.9, 0.8, 0.7], [0, 30, 60]) == pytest.approx(-0.2)
    assert np.isnan(slope_per_minute([0.9, 0.8], [0, 30]))
