"""For `--outside-file`: is a thought made of words? Where only the answer is rewarded, thoughts become cues.

1 where every word of the thought is one of the bundled phrases in English, Spanish and French, whether it was said or
not; 0 otherwise, and where there is no thought.
"""

from __future__ import annotations

from audiorl.data.bundled import language_phrases
from audiorl.data.corpus import normalised
from audiorl.recipes.quickstart import in_vocabulary
from audiorl.types import Rollout

VOCABULARY = frozenset(word for u in language_phrases() for word in normalised(u.text).split())


def reward(rollout: Rollout) -> float:
    return in_vocabulary(rollout, VOCABULARY)
