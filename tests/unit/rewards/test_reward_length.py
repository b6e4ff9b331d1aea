import pytest

from audiorl.rewards import Overlong


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (99, -0.95), (100, -1.0), (150, -1.0)]
)
def test_overlong(make_rollout, tokens: int, expected: float) -> None:
    (score,) = Overlong(max_tokens=100, buffer=20)([make_rollout("text", tokens=tokens)])
    assert score.total == pytest.approx(expected)


def test_tokens_of_all_segments_count(make_rollout) -> None:
    assert Overlong(100, 20)([make_rollout("one", "two", tokens=45)])[0].total == pytest.approx(-0.5)


def test_bad_buffer() -> None:
    for buffer in (0, 101):
        with pytest.raises(ValueError, match="buffer must lie in 1"):
            Overlong(max_tokens=100, buffer=buffer)
