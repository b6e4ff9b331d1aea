"""tools/words.py: the private words are gone, and names and prose that use them are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools import load_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def words():
    with pytest.MonkeyPatch.context() as patch:
        yield load_tool("words", patch)


def test_no_private_word_is_used(words):
    assert words.uses(ROOT) == []


@pytest.mark.slow
def test_every_exception_is_needed(words, monkeypatch):
    allowed = dict(words.ALLOWED)
    monkeypatch.setattr(words, "ALLOWED", {})
    used = {tuple(line.split(":")[0:3:2]) for line in words.uses(ROOT, not_done=())}
    assert [entry for entry in allowed if (entry[0], f" {entry[1]}") not in used] == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("found = 1", "found"),
        ("def f(known): ...", "known"),
        ("for taken in x: ...", "taken"),
        ("class SpeechPen: ...", "pen"),
        ("def _hear_once(): ...", "hear"),
        ("class C:\n    ear: int = 0", "ear"),
        ("self.wire_format = 1", "wire"),
        ("with f() as told: ...", "told"),
        ("# computed anew", "anew"),
        ('"""Text.\n\nTwo stretches of tokens."""', "stretches"),
    ],
)
def test_names_and_prose_are_read(words, source, word):
    assert [use[1] for use in words.uses_in_code(source)] == [word]


@pytest.mark.parametrize(
    "source", ["raise ValueError(f'{path}: not found')", "x.known()", "open(1)", "# file not found", "early = 1"]
)
def test_plain_words_are_allowed(words, source):
    assert list(words.uses_in_code(source)) == []


def test_documents_and_file_names_are_read(words, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("plain\na file beside it\n")
    (tmp_path / "audiorl").mkdir()
    (tmp_path / "audiorl/pen.py").touch()
    assert [line.split(": ")[0:2] for line in words.uses(tmp_path, ["docs", "audiorl"], not_done=())] == [
        ["docs/a.md:2", "beside"],
        ["audiorl/pen.py:1", "pen"],
    ]
