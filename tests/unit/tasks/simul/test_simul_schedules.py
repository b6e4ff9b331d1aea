"""Fixed schedules, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.eval.metrics.latency import split_words
from audiorl.tasks.simul.schedules import Offline, WaitK, delay_references, words_per_chunk
from audiorl.tasks.simul.streams import Stream, Unit
from audiorl.types import Turn

CLIP = AudioClip(array=np.ones(4000, np.float32), sample_rate=1000)


def turns(*references: str) -> tuple[Turn, ...]:
    return tuple(Turn(CLIP, t + 1.0, text, f"source {t}", 1.0) for t, text in enumerate(references))


def written(turns: tuple[Turn, ...], schedule: WaitK) -> list[str]:
    return [t.reference for t in delay_references(turns, schedule)]


def test_offline_writes_in_the_last_turn_only() -> None:
    assert [Offline("es").words(t, 3, 0) for t in range(3)] == [0, 0, None]
    assert Offline("es").words(0, 1, 0) is None
    assert (Offline("es").count("a b  c "), Offline("zh").count("你好 吗")) == (3, 3)


def test_wait_k_catches_up_and_never_falls_back() -> None:
    """Rate 2/3, k = 3: ceil(2/3), ceil(4/3), ceil(6/3) words after chunks 3, 4, 5."""
    schedule = WaitK(3, 2 / 3)
    assert [schedule.due(t) for t in range(6)] == [0, 0, 1, 2, 2, 3]
    assert schedule.words(3, 9, 0) == 2  # what a silent turn left out is written later
    assert schedule.words(3, 9, 5) == 0
    assert schedule.words(8, 9, 0) is None
    assert WaitK(1, 0.07).due(99) == 7  # 100 · 0.07 is a little more than 7 in floats
    for k, rate in ((0, 1.0), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="k must be at least 1 and the rate above 0"):
            WaitK(k, rate)


def test_references_moved_to_a_schedule() -> None:
    """Words a b c d e f, two a chunk from the second chunk on; the last turn takes the rest."""
    talk = turns("a b c", "", " d", " e f", "")
    assert written(talk, WaitK(2, 2.0, "es")) == ["", "a b", " c d", " e f", ""]
    assert written(talk, WaitK(1, 1.0, "es")) == ["a", " b", " c", " d", " e f"]
    assert written(talk, WaitK(9, 1.0, "es")) == ["", "", "", "", "a b c d e f"]
    moved = delay_references(talk, WaitK(2, 2.0, "es"))
    assert [t.end for t in moved] == [t.end for t in talk] and moved[1].audio is talk[1].audio
    assert {t.reference_seconds for t in moved} == {None} and {t.source for t in moved} == {""}
    assert "".join(t.reference for t in moved) == "a b c d e f"


def test_references_of_languages_without_spaces() -> None:
    talk = turns("你好吗", "", "我们 走", "")
    assert written(talk, WaitK(2, 2.0, "zh")) == ["", "你好", "吗我", "们走"]
    assert written(turns("", ""), WaitK(1, 2.0, "zh")) == ["", ""]
    assert written(turns("用 A BC", ""), WaitK(1, 2.0, "zh")) == ["用A", " BC"]


def test_words_per_chunk() -> None:
    """2 + 3 words in 4 + 6 s, 0.96 s a chunk: 0.48. A stream without units only adds time."""

    def stream(seconds: float, text: str, target: str) -> Stream:
        units = (Unit(0.0, 1.0, text),) if text else ()
        return Stream("s", CLIP, seconds, units, "en", target)

    spanish = [stream(4.0, "uno dos", "es"), stream(6.0, "tres cuatro cinco", "es")]
    assert words_per_chunk(spanish, 0.96) == pytest.approx(0.48)
    assert words_per_chunk([stream(4.0, "你好 吗", "zh")], 2.0) == pytest.approx(1.5)
    assert words_per_chunk([*spanish, stream(10.0, "", "es")], 1.0) == pytest.approx(0.25)
    assert split_words(" uno  dos ", "es") == ["uno", "dos"] and split_words("你 好", "zh") == ["你", "好"]
