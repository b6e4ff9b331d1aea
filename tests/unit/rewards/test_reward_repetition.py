import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.rewards import Repetition


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b a b", 2, 2 / 5 - 1),  # ab ba ab ba ab
        ("Go go go", 1, 1 / 3 - 1),
        ("a a a a", 3, 1 / 2 - 1),
        ("a b", 3, 0.0),
        ("", 3, 0.0),
        ("哈哈哈哈", 2, 1 / 3 - 1),
    ],
)
def test_repetition(make_rollout, text: str, n: int, expected: float) -> None:
    assert Repetition(n=n)([make_rollout(text)])[0].total == pytest.approx(expected)


def test_units() -> None:
    assert Repetition(n=1, unit="words").value("哈哈哈") == 0.0
    assert Repetition(n=1, unit="characters").value("aab") == pytest.approx(2 / 3 - 1)
    with pytest.raises(ValueError, match="at least 1"):
        Repetition(n=0)
    with pytest.raises(ValueError, match="unit 'tokens'"):
        Repetition(unit="tokens")  # type: ignore[arg-type]


@given(st.text(), st.integers(1, 5))
def test_range(text: str, n: int) -> None:
    assert -1.0 <= Repetition(n=n).value(text) <= 0.0
    assert -1.0 <= Repetition(n=n, unit="characters").value(text) <= 0.0
