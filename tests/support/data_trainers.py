"""What the tests of SFT, preferences and reward models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import OptimConfig
from audiorl.data.preferences import Answer, Pair, pairs_to_judged
from audiorl.models import AudioPolicy
from audiorl.models.examples import answer_example, experience
from audiorl.models.value import ValueModel
from audiorl.train.preference import Compared, pair_examples
from audiorl.types import Sample
from tests.conftest import Make
from tests.support.gradients import gradients_of
from tests.support.packing import with_audio

Gradients = dict[str, Tensor]


UNCLIPPED = OptimConfig(lr=1e-3, max_grad_norm=1e9)
"""Leaves the gradients of an update as they were."""


def gradients(policy: AudioPolicy) -> Gradients:
    return gradients_of(policy.trainable())


def assert_same_gradients(found: Gradients, expected: Gradients, atol: float) -> None:
    """Equal up to `atol` of the largest entry of all."""
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 0
    nothing = torch.zeros(())
    for name in found.keys() | expected.keys():
        a, b = (grads.get(name, nothing) / scale for grads in (found, expected))
        torch.testing.assert_close(
            *torch.broadcast_tensors(a, b), atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


def alone(policy: AudioPolicy, sample: Sample, answer: Answer) -> Tensor:
    """The log-probs [n] of one answer in a forward pass of its own, in float64."""
    row = pack_experiences([experience(policy, answer_example(sample, answer))], share_prompts=False)
    return policy.forward(row).logprobs.double()


Learn = Callable[[AudioPolicy, Sequence[Sample]], float]


def assert_hears(make: Make, samples: Sequence[Sample], learn: Learn) -> None:
    """Another waveform and a swap of two prompts' audio change loss and gradient; the same audio changes nothing.

    `learn` makes one update of a fresh policy on the two samples and gives the loss; clips have equal length, so that
    nothing but what is heard differs.
    """
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples[:2]]
    noise = np.random.default_rng(0).normal(0, 0.1, 14_400).astype(np.float32)
    other = AudioClip(array=clips[1].array + noise, sample_rate=16_000)
    found = {}
    for name, sounds in (("same", clips), ("again", clips), ("other", [clips[0], other]), ("swapped", clips[::-1])):
        policy = make()
        loss = learn(policy, [with_audio(s, c) for s, c in zip(samples, sounds, strict=False)])
        found[name] = loss, torch.cat([g.flatten() for g in gradients(policy).values()])
    loss, gradient = found["same"]
    assert found["again"][0] == loss and torch.equal(found["again"][1], gradient)
    for name in ("other", "swapped"):
        assert abs(found[name][0] - loss) > 1e-6, name
        assert float((found[name][1] - gradient).norm() / gradient.norm()) > 1e-3, name


def times_heard(policy: AudioPolicy, update: Callable[[], object]) -> int:
    """How often the audio tower is called in an update."""
    calls: list[int] = []
    hook = policy.backbone.audio_encoder(policy.model).register_forward_hook(lambda *_: calls.append(1))
    update()
    hook.remove()
    return len(calls)


def pairs_of(samples: Sequence[Sample]) -> list[Pair]:
    """Chosen longer, rejected longer, equally long; the last shares its prompt with the first."""
    texts = [("yes", "no why English"), ("English Spanish French", "who"), ("no why", "who yes"), ("French", "no yes")]
    return [Pair(samples[i % 3], *both) for i, both in enumerate(texts)]


def referenced(pairs: Sequence[Pair], reference: AudioPolicy | None) -> list[Compared]:
    with torch.no_grad():
        return [
            Compared(
                p,
                pair_examples(p),
                tuple(alone(reference, p.sample, t).float() for t in (p.chosen, p.rejected)) if reference else (),
            )
            for p in pairs
        ]


def contrasted(pairs: Sequence[Pair], reference: AudioPolicy, drift: float = 0.0) -> list[Compared]:
    """`drift`: by how much more likely than the reference does the policy find a token of a mismatched answer."""
    judged = pairs_to_judged(pairs)
    others = [judged[(i + 2) % len(judged)].answer for i in range(len(judged))]
    with torch.no_grad():
        return [
            Compared(
                j,
                (answer_example(j.sample, j.answer), answer_example(j.sample, o)),
                (alone(reference, j.sample, j.answer).float(), alone(reference, j.sample, o).float() - drift),
            )
            for j, o in zip(judged, others, strict=True)
        ]


def log_sigma(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def reward_model(trunk: AudioPolicy) -> ValueModel:
    torch.manual_seed(3)
    return ValueModel(trunk, spread=1.0)
