"""The texts that Seed-TTS-eval compares, against its own steps written out, and its lists."""

import json
import string

import jiwer
import pytest

from audiorl.data.seedtts import read_conversations, read_meta
from audiorl.eval.metrics.text import _CHINESE, compared, utterance_errors


@pytest.mark.parametrize(
    ("text", "language", "wanted"),
    [
        ("Don't, please – stop!", "en", "don't please stop"),
        ("a  b \u3000 c", "en", "a b c"),
        ("“Quoted” mother-in-law", "en", "quoted motherinlaw"),  # a hyphen goes without a space in its place
        ("你好，世界。", "zh", "你 好 世 界"),
        ("我有 2 个 apple", "zh", "我 有 2 个 a p p l e"),
        ("...", "en", ""),
    ],
)
def test_texts_to_compare(text: str, language: str, wanted: str) -> None:
    assert compared(text, language) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reference", "hypothesis", "language"),
    [
        ("Don't stop - go on, he said.", "dont stop, go on he says", "en"),
        ("One.", "one two three four", "en"),
        ("今天天气很好。", "今天 天汽好", "zh"),
        ("Same thing!", "same thing", "en"),
    ],
)
def test_rates_against_the_benchmarks_steps(reference: str, hypothesis: str, language: str) -> None:
    """Its script removes signs one by one, joins double spaces once, and asks jiwer."""
    texts = []
    for text in (reference, hypothesis):
        for sign in _CHINESE + string.punctuation:
            text = text if sign == "'" else text.replace(sign, "")
        text = text.replace("  ", " ")
        texts.append(" ".join(text) if language == "zh" else text.lower())
    wanted = jiwer.wer(*texts)
    assert utterance_errors(reference, hypothesis, language).rate == pytest.approx(wanted)


def test_languages_that_the_benchmark_lacks() -> None:
    assert compared("¿Qué «dice» l'ami?", "es") == "qué dice l'ami"
    assert compared("東京、まで。", "ja") == "東 京 ま で"
    assert utterance_errors("¡Sí, señor!", "si señor", "es").rate == 0.5


def test_meta_lines(tmp_path) -> None:
    file = tmp_path / "meta.lst"
    file.write_text("\ufeffa-1|Prompt one.|wavs/p1.wav|Say this.\n\nb.wav|p|p2.wav|And this|b_real.wav\nc|Only text\n")
    first, second, third = read_meta(file)
    assert (first.name, first.prompt_text, first.text) == ("a-1", "Prompt one.", "Say this.")
    assert first.prompt is not None and first.prompt.path == str(tmp_path / "wavs/p1.wav")
    assert (second.name, second.text) == ("b", "And this")
    assert (third.text, third.prompt, third.prompt_text) == ("Only text", None, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a|b|c\n", "line 1: 3 fields"),
        ("a|p|p.wav|x\n\nb\n", "line 3: 1 fields"),
        ("a|p|p.wav| \n", "line 1: the text is empty"),
        ("|p|p.wav|x\n", "line 1: the name is empty"),
        ("a|x\na|y\n", "line 2: 'a' is also the name of line 1"),
        ("../a|x\n", "line 1: '../a' is no name"),
        ("/a|x\n", "line 1: '/a' is no name"),
        ("\n", "holds no utterance"),
    ],
)
def test_meta_lines_that_cannot_be_used(tmp_path, content: str, message: str) -> None:
    file = tmp_path / "meta.lst"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_meta(file)


def test_files_that_are_no_lists(tmp_path) -> None:
    with pytest.raises(ValueError, match="missing"):
        read_meta(tmp_path / "nowhere.lst")
    file = tmp_path / "meta.lst"
    file.write_bytes(b"a|\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_meta(file)


def test_conversations(tmp_path) -> None:
    file = tmp_path / "talks.jsonl"
    rows = [
        {
            "id": "d1",
            "audio": "d1.wav",
            "turns": [
                {"speaker": "A", "text": "Hi.", "start": 0, "duration": 1.5},
                {"speaker": "B", "text": "Ho.", "audio": "own.wav"},
            ],
        },
        {"id": "d2", "turns": [{"speaker": "A", "text": "Hm.", "audio": "x/d2.wav"}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_conversations(file)
    assert [t.speaker for t in first.turns] == ["A", "B"]
    assert (first.turns[0].audio.path, first.turns[0].audio.duration) == (str(tmp_path / "d1.wav"), 1.5)
    assert first.turns[1].audio.path == str(tmp_path / "own.wav") and first.turns[1].audio.duration is None
    assert second.turns[0].audio.path == str(tmp_path / "x/d2.wav")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", r"line 1: \[\] is not an object"),
        ({"id": "a", "turns": []}, r"line 1: turns \[\] is not a list of turns; give at least one"),
        ({"id": "a", "turns": ["x"]}, r"line 1: turns\[0\] 'x' is not an object"),
        ({"id": "a", "turns": [{"speaker": "A", "text": "x"}]}, "line 1, turn 1: no audio"),
        (
            {"id": "a", "turns": [{"speaker": "A", "text": " ", "audio": "x"}]},
            r"line 1: turns\[0\]\.text ' ' is not a text",
        ),
        (
            {"id": "a", "audio": "x", "turns": [{"speaker": "A", "text": "x"}]},
            "line 1, turn 1: start: missing; give seconds",
        ),
        (
            {"id": "a", "audio": "x", "turns": [{"speaker": "A", "text": "x", "start": 0, "duration": 0}]},
            r"line 1: turns\[0\]\.duration 0 is not a duration",
        ),
    ],
)
def test_conversations_that_cannot_be_used(tmp_path, row, message: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(ValueError, match=message):
        read_conversations(file)
