"""CIDEr-D agrees with its released code, and a caption earns it for words that are rare."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from audiorl.eval.metrics.corpus import DocumentFrequencies, cider_d
from audiorl.rewards import CaptionQuality
from audiorl.types import Rollout, Sample

REFERENCES = (
    ("a dog barks in the rain", "a dog is barking"),
    ("music plays softly", "soft music"),
    ("a man speaks while a dog barks",),
)
# Cider().compute_score of pycocoevalcap 1.2 gives these.
PUBLISHED = {
    "a dog barks": 1.49874584,
    "music music music plays": 1.1043762,
    "a dog barks in the rain": 0.64528428,
}
SAMPLES = [Sample(str(i), (), texts) for i, texts in enumerate(REFERENCES)]


def test_cider_d_is_that_of_its_released_code() -> None:
    frequencies = DocumentFrequencies.of(REFERENCES)
    for (caption, value), references in zip(PUBLISHED.items(), REFERENCES, strict=True):
        assert cider_d(caption, references, frequencies) == pytest.approx(value, abs=1e-7)


def test_the_reward_reads_the_answer_and_ignores_case(make_rollout: Callable[..., Rollout]) -> None:
    reward = CaptionQuality.of(SAMPLES)
    texts = ("A DOG barks.", "<think>music plays</think><answer>a dog barks</answer>", "", "<think>a dog barks")
    scores = reward([make_rollout(text, references=REFERENCES[0]) for text in texts])
    assert [s.total for s in scores] == pytest.approx([0.149874584, 0.149874584, 0.0, 0.0], abs=1e-8)


def test_repeated_and_frequent_words_earn_little(make_rollout: Callable[..., Rollout]) -> None:
    reward = CaptionQuality.of(SAMPLES)

    def score(text: str) -> float:
        return reward([make_rollout(text, references=REFERENCES[1])])[0].total

    assert score("soft music") > score("soft soft soft music music music") > score("a dog")
    assert score("a dog") == 0.0


def test_bad_input(make_rollout: Callable[..., Rollout]) -> None:
    with pytest.raises(ValueError, match="sample 'clip-7' has no reference caption"):
        CaptionQuality.of(SAMPLES)([make_rollout("a dog")])
    with pytest.raises(ValueError, match="references of 1 clips do not say which words are rare"):
        CaptionQuality.of(SAMPLES[:1])
