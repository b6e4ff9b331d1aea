"""Which of its choices does a model find most probable? For models that know the answer and do not write it as asked.

Harnesses for text models call it ranking by log-likelihood. It is no measure of what a user gets: a model is right here
that writes "Oulio" for the choice "Julio", if that is the nearest of the four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_logprobs, experience
from audiorl.types import Sample


def most_probable_choices(
    policy: AudioPolicy, samples: Sequence[Sample], answered: Callable[[str], str] = "{}".format, budget: int = 8192
) -> list[str]:
    """The choice of each sample with the greatest sum of log-probs, in nats, that of the end of the turn included.

    answered: what the model would write to give a choice, with its tags. budget: row tokens in a pass; the choices of a
    sample share its prompt. Raises ValueError for a sample without choices.
    """
    experiences = []
    for sample in samples:
        if not sample.choices:
            raise ValueError(f"sample {sample.id!r}: no choices to compare; give rows with choices")
        experiences += [experience(policy, Example(sample, answered(c)), sample.id) for c in sample.choices]
    sums = iter(float(values.sum()) for values in answer_logprobs(policy, experiences, budget, share_prompts=True))
    best = []
    for sample in samples:
        of_sample = [next(sums) for _ in sample.choices]
        best.append(sample.choices[of_sample.index(max(of_sample))])
    return best
